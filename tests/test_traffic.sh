#!/bin/bash
# Bytes on nvme per parameter and step: the formula of docs/DESIGN.md, section 11, the library's own count, the kernel's
# count for the process, and the disk's counters. Speaks TAP. Updates wait for the norm here, or all are ahead of it: else how many are is up to time.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - traffic # SKIP a sanitizer shifts what is in time, and bytes with it"; exit 77 ;; esac
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-traffic-XXXXXX")
trap 'rm -rf "$dir"' EXIT
export XDG_CACHE_HOME=$dir/cache
mkdir "$dir/swap"
cp docs/DESIGN.md "$dir/text"
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 192, "n_layer": 40, "n_head": 4},
  "data": {"path": ["$dir/text"], "seq_length": 16, "seed": 1},
  "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3, "max_live_parameters": 1339392, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"seed": 3, "update_ahead": "never", "device": "cpu", "chunk_elems": 65536, "weight_slots": 2, "record_slots": 2, "checkpoint_dir": "",
               "eval_interval": 0, "run_log": "$dir/run.jsonl"} }
JSON
python3 - "$spw" "$dir" <<'PY'
import json, os, resource, subprocess, sys
spw, folder = sys.argv[1:]
SHORT, LONG = 2, 5  # steps; what starting and ending costs is in both
n = 0

def check(name, good, *notes):
    global n
    n += 1
    print("%s %d - %s" % ("ok" if good else "not ok", n, name))
    for note in notes:
        print("# " + note)

def disk():
    """Bytes read and written of the disk that holds the folder; None where the kernel does not count them."""
    device = os.stat(folder).st_dev
    try:
        for line in open("/proc/diskstats"):
            f = line.split()
            if (int(f[0]), int(f[1])) == (os.major(device), os.minor(device)):
                return 512 * int(f[5]), 512 * int(f[9])
    except OSError:
        pass
    return None

def leave(why):
    print("1..1\nok 1 - traffic # SKIP " + why)
    sys.exit(77)

def run(steps, more):
    before, usage = disk(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([spw, "train", folder + "/c.json", "--quiet", "--set", "spillway.steps=%d" % steps] + more,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if "refuses O_DIRECT" in done.stderr:
        leave("what goes through the page cache comes to the disk some time, or never")
    done.check_returncode()
    after, used = disk(), resource.getrusage(resource.RUSAGE_CHILDREN)
    log = [json.loads(line) for line in open(folder + "/run.jsonl")]
    process = 512 * (used.ru_inblock - usage.ru_inblock), 512 * (used.ru_oublock - usage.ru_oublock)
    return log, process, None if before is None or after is None else tuple(b - a for a, b in zip(before, after))

def near(got, want, part=0.01):
    return abs(got - want) <= part * want

# Per parameter of the whole model, and how far off the reads may be. What is frozen is written never; below the lowest trained
# layer it is read once, elsewhere twice, but for what a slot still holds when it is wanted again, which is the moment's.
LAYER, TABLES, NORM = 12 * 192 * 192 + 13 * 192, (256 + 32) * 192, 2 * 192
ALL = 40 * LAYER + TABLES + NORM
lower = (20 * LAYER * 2 + TABLES * 4 + (20 * LAYER + NORM) * 14) / ALL, (20 * LAYER + NORM) * 12 / ALL
# Codes are a quarter of the bytes, so that updates of the lowest trained layers may be through before the forward pass comes to
# them, and it reads those once more: that is the moment's. Were all codes read twice, it would be 3.6 % more.
coded = lower[0] - 20 * 12 * 192 * 192 * (2 - 68 / 128) / ALL, lower[1]
FROZEN = ["--set", 'spillway.freeze=["w*","h.?.*","h.1?.*"]']
# Muon: of the layers' matrices a record of 6 bytes, held between the halves of an update where slots do, else read and written twice. Where its products take longer than the
# disk, updates run ahead of the forward pass, which reads weights of 2 bytes once more: that is the moment's, between none and all of them.
WHOLE = 40 * 12 * 192 * 192 / ALL
MUON = ["--set", 'optimizer={"type":"Muon","params":{"lr":1e-3,"ns_steps":1}}']
# Gradients of 4 bytes that wait on nvme are written and read again, but for the first unit's. Ahead of the norm none is: updates take them from their windows. Beside
# the backward pass two slots do not keep weights for them, and these come once more.
SPILLED = ["--set", "spillway.gradients=nvme"]
AHEAD = SPILLED + ["--set", "spillway.update_ahead=always", "--set", "gradient_clipping=1e9"]
left = 4 * (ALL - TABLES) / ALL
for name, more, formula, off in (
        ("weights and records on nvme", [], (14, 12), 0.01),
        ("weights on host", ["--set", 'zero_optimization.offload_param={"device":"cpu"}'], (10, 10), 0.01),
        ("gradients on nvme", SPILLED, (14 + left, 12 + left), 0.01),
        ("gradients on nvme, updates ahead of the norm", AHEAD, (16, 12), 0.02),
        ("Muon", MUON + ["--set", "spillway.record_slots=16"], (4 + 10 + WHOLE * (6 - 10 + 1), 2 + 10 + WHOLE * (6 - 10)), 0.11),
        ("Muon with two slots", MUON, (4 + 10 + WHOLE * (2 * 6 - 10 + 1), 2 + 10 + WHOLE * (2 * 6 - 10)), 0.07),
        ("the lower half frozen", FROZEN, lower, 0.02),
        ("the lower half frozen, as codes of 4 bits", FROZEN + ["--set", "spillway.frozen_codes=int4"], coded, 0.025)):
    # A disk that others use as well counts too much, and a process whose program left the page cache reads that too, neither
    # ever too little: of several tries the least is ours, for each run by itself. (A difference of two counts goes wrong
    # either way.) And a busy machine reads some twice, now and then, which the library counts as well: the least of that too.
    least = few = many = counted = None
    may = off, 0.01
    for attempt in range(8):
        short, long = run(SHORT, more), run(LONG, more)
        few = short[1] if few is None else tuple(map(min, few, short[1]))
        many = long[1] if many is None else tuple(map(min, many, long[1]))
        if long[2] is not None:
            least = long[2] if least is None else tuple(map(min, least, long[2]))
        steps = [s for s in long[0] if s.get("step", 0) >= 3]
        now = tuple(sum(s["bytes"][k] for s in steps) / len(steps) for k in ("nvme_read", "nvme_write"))
        counted = now if counted is None else tuple(map(min, counted, now))
        if many[1] == 0:
            leave("no disk is written to: memory is so fast that what is in time is the moment's")
        process = [(b - a) / (LONG - SHORT) for a, b in zip(few, many)]
        params = long[0][0]["params"]
        fits = all(near(c / params, f, m) and near(p, c, m) for c, p, f, m in zip(counted, process, formula, may))
        if fits and (least is None or all(map(near, least, many))):
            break
    for i, way in enumerate(("read", "written")):
        check("%s: %.4g bytes %s per parameter and step" % (name, formula[i], way), near(counted[i] / params, formula[i], may[i]),
              "library %.3f, kernel for the process %.3f" % (counted[i] / params, process[i] / params))
        check("%s: %s, as the kernel counts for the process" % (name, way), near(process[i], counted[i], may[i]))
        if least is None:
            check("%s: /proc/diskstats does not show this disk # SKIP" % name, True)
        elif least[i] > 1.01 * many[i]:
            check("%s: others use this disk # SKIP" % name, True, "disk %d, process %d" % (least[i], many[i]))
        else:
            check("%s: %s, as the disk counts" % (name, way), near(least[i], many[i]),
                  "all of a run: disk %d, kernel for the process %d, attempt %d" % (least[i], many[i], attempt + 1))
    if more[:2] == SPILLED:
        plan = json.loads(subprocess.run([spw, "plan", folder + "/c.json", "--json"] + more, stdout=subprocess.PIPE, text=True, check=True).stdout)["step"]
        check("%s: as the plan says" % name, all(near(c, plan[k], 0.03) for c, k in zip(counted, ("nvme_read", "nvme_write"))),
              "plan %.3f read, %.3f written" % (plan["nvme_read"] / params, plan["nvme_write"] / params))
print("1..%d" % n)
PY
