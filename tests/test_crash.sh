#!/bin/bash
# kill -9 at a hundred random points of runs that save at every step: whatever is found afterwards is a complete checkpoint,
# and going on from it gives the losses of the run that nobody killed. SPW_SEED= replays the delays. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-crash-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 1500; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"path": ["$dir/text.txt"], "seq_length": 16, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 100000, "seed": 3, "device": "cpu", "chunk_elems": 8192, "keep_last": 2} }
JSON
case $build in *asan* | *tsan*) kills=25 ;; *) kills=100 ;; esac # a start under a sanitizer takes long
python3 - "$build/spillway" "$dir" "$kills" <<'PY'
import json, os, random, re, subprocess, sys, time

spw, top, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
seed = int(os.environ.get("SPW_SEED", "20260101"))
rng = random.Random(seed)
print("# seed %d, %d kills" % (seed, kills), flush=True)
folder, log = top + "/ckpt", top + "/run.jsonl"
ended = [False]


def command(*more):
    return [spw, "train", top + "/tiny.json", "--quiet"] + [a for m in more for a in ("--set", m)]


def losses(path):
    found = []
    for line in open(path):
        try:
            o = json.loads(line)
        except ValueError:
            continue  # the line that a kill cut short
        if "loss" in o:
            found.append((o["step"], o["loss"]))
    return found


def complete():
    steps = [int(m.group(1)) for m in (re.fullmatch(r"step-(\d+)", n) for n in os.listdir(folder)) if m]
    return sorted(s for s in steps if os.path.exists("%s/step-%d/spillway.json" % (folder, s)))


def run(victim, delay=0.0):
    """One run that saves at every step; killed `delay` seconds after its first save began. Its exit code and messages."""
    p = subprocess.Popen(victim, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    before = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    begin = time.monotonic()
    while p.poll() is None and time.monotonic() - begin < 20:
        if os.path.isdir(folder) and set(os.listdir(folder)) - before:
            break
        time.sleep(0.0005)
    time.sleep(delay)
    p.kill()
    return p.wait(), p.stderr.read()


os.mkdir(folder)
victim = command("spillway.checkpoint_dir=" + folder, "spillway.run_log=" + log, "spillway.checkpoint_interval=1")
inside = removing = 0
why = ""
last = 0
begin = time.monotonic()
for k in range(kills):
    resume = ["--resume", folder] if complete() else []
    code, messages = run(victim + resume, rng.random() ** 2 * 0.06)
    names = os.listdir(folder)
    inside += any(n.endswith(".partial") for n in names)
    removing += any(n.endswith(".old") for n in names)
    have = complete()
    if code != -9:
        why = "run %d ended by itself with %d: %s" % (k, code, messages.strip()[-300:])
    elif have and have[-1] < last:
        why = "after kill %d step %d is the newest, step %d was complete" % (k, have[-1], last)
    if why:
        break
    last = have[-1] if have else last
print("# %d steps, %d kills left a half checkpoint, %d a half removal; %.1f s" %
      (last, inside, removing, time.monotonic() - begin), flush=True)
print("%s 1 - %d kills: every next run loaded the newest checkpoint%s" % ("not ok" if why else "ok", kills, "" if not why else " # " + why))
print("%s 2 - kills came while checkpoints were written" % ("ok" if inside >= kills // 5 else "not ok"))
final = subprocess.run(command("spillway.checkpoint_dir=" + folder, "spillway.run_log=" + log,
                               "spillway.steps=%d" % (last + 3)) + ["--resume", folder], capture_output=True, text=True)
print("%s 3 - what is left goes on to the end" % ("ok" if final.returncode == 0 else "not ok # " + final.stderr[-300:]))
left = sorted(os.listdir(folder))
print("%s 4 - and leaves the last two, without remains # %s" % ("ok" if complete() == [last, last + 3] or complete()[-1] == last + 3 and
      len(complete()) == 2 and len(left) == 2 else "not ok", left))
alone = subprocess.run(command("spillway.run_log=%s/alone.jsonl" % top, "spillway.steps=%d" % (last + 3)), capture_output=True, text=True)
want = dict(losses(top + "/alone.jsonl")) if alone.returncode == 0 else {}
got = losses(log)
wrong = [(s, x, want.get(s)) for s, x in got if want.get(s) != x]
whole = set(s for s, _ in got) == set(range(1, last + 4))
print("%s 5 - all %d losses of all runs are the uninterrupted run's, to the last digit%s" %
      ("ok" if whole and not wrong else "not ok", len(got), "" if not wrong else " # " + str(wrong[:3])))
print("%s 6 - swap files of all killed runs were reclaimed # %s" % ("ok" if not os.listdir(top + "/swap") else "not ok", os.listdir(top + "/swap")))
print("1..6")
PY
