#!/bin/bash
# spillway plan as people use it: what it prints, exit codes, the cache of rates, and its bytes beside a run's. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-plan-XXXXXX")
trap 'rm -rf "$dir"' EXIT
rates=$dir/cache/spillway/rates.json
. tests/lib_tap.sh
said() { grep -qF -- "$1" "$dir/err" "$dir/out"; }
shows() { grep -qE -- "$1" "$dir/out"; }
# json EXPRESSION: of the object p on stdout, true in Python
json() { python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); sys.exit(0 if eval(sys.argv[2]) else 1)' "$dir/out" "$1"; }

steps=102
case $build in *asan* | *tsan*) steps=1 ;; esac # its pace is another: bytes are compared without
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 3000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 6, "n_head": 4},
  "data": {"path": ["$dir/text.txt"], "seq_length": 32, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": $steps, "seed": 3, "device": "cpu", "chunk_elems": 16384, "device_memory": "64MiB", "weight_slots": 1,
               "record_slots": 1, "run_log": "$dir/run.jsonl"} }
JSON
c=$dir/tiny.json

# The paper's table.
check "table" run plan --table
check "7.5 B on 64: 120, 31.4, 16.6, 1.88 GB" shows '^ +64 +120 +31\.4 +16\.6 +1\.88$'
check "with model parallelism" run plan --table --params 30e9 --mp 1,4 --ranks 64
check "a quarter of the model, a quarter of the bytes" shows '^ +64 +120 +31\.4 +16\.6 +1\.88$'
expect 2 "cannot be 0" "no ranks" plan --table --ranks 0
expect 2 "belong to --table" "its options belong to it" plan "$c" --params 1e9
expect 2 "configuration file is needed" "nothing to plan" plan
expect 2 "not both" "--calibrate or --no-measure" plan "$c" --calibrate --no-measure
check "help" run help plan
expect 2 "unknown option" "unknown option" plan "$c" --wat
expect 2 "zero_optimization.stagee" "a wrong key" plan "$c" --set zero_optimization.stagee=3

# Without measuring: bytes and reasons, no times, no cache.
check "plan without measuring" run plan "$c" --no-measure
check "bytes per tier and purpose" shows '^  optimizer records +0 B +0 B +[0-9.]+ MiB'
check "bytes of a step" shows '^  nvme read +[0-9.]+ MiB +[0-9.]+ B'
check "no times, and it says so" shows 'times are not predicted: --no-measure'
check "reasons" shows '^  spillway.host_memory .* auto: '
check "wear" shows 'disk wear: [0-9.]+ MiB written a step$'
check "no cache was written" test ! -e "$dir/cache"
check "as JSON" run plan "$c" --no-measure --json
check "without times" json 'p["fits"] and p["step_s"] is None and p["rates"] is None and p["step"]["nvme_write"] > 0'
check "with reasons" json 'all(d["name"] and d["value"] and d["reason"] for d in p["decisions"]) and len(p["decisions"]) >= 3'
check "sums agree" json 'all(sum(b[t] for b in p["bytes"].values()) == p["total"][t] for t in ("device", "host", "nvme"))'

# What checkpoints take: a new one is complete before an old one goes, and frozen weights are one file for all.
saving=(--set spillway.checkpoint_dir="$dir/saved" --set spillway.checkpoint_interval=2 --set spillway.steps=9)
check "no checkpoints" json 'p["checkpoints"]["at_once"] == 0'
check "those of a run" run plan "$c" --no-measure --json "${saving[@]}"
check "are all there" json 'p["checkpoints"]["at_once"] == 5 and p["checkpoints"]["bytes"] == 5 * p["checkpoints"]["each"] > 0'
check "with keep_last" run plan "$c" --no-measure --json "${saving[@]}" --set spillway.keep_last=2
check "one more than stay" json 'p["checkpoints"]["at_once"] == 3'
check "more than are made" run plan "$c" --no-measure --json "${saving[@]}" --set spillway.keep_last=2 --set spillway.checkpoint_interval=5
check "are not there" json 'p["checkpoints"]["at_once"] == 2'
check "adapters" run plan "$c" --no-measure --json "${saving[@]}" --set spillway.lora='{"rank": 2, "targets": ["c_attn"]}'
check "share the weights" json 'p["checkpoints"]["each"] < p["checkpoints"]["bytes"] < 3 * p["checkpoints"]["each"]'
check "unless they are not linked" run plan "$c" --no-measure --json "${saving[@]}" --set spillway.lora='{"rank": 2, "targets": ["c_attn"]}' --set spillway.checkpoint_links=false
check "each has its own" json 'p["checkpoints"]["bytes"] == 5 * p["checkpoints"]["each"]'
check "as text" run plan "$c" --no-measure "${saving[@]}"
check "each and all" shows '^  checkpoints: [0-9.]+ [KM]iB each, 5 at once take [0-9.]+ [KM]iB$'

# DeepSpeed takes any bound, and 0: a chunk has at least 4096 elements whatever it is.
for bound in 1 4095 4096; do
    check "sub_group_size $bound" run plan "$c" --no-measure --set zero_optimization.sub_group_size=$bound
    check "makes the smallest chunks" shows '^  spillway.chunk_elems +4096 +zero_optimization.sub_group_size bounds it'
done
check "sub_group_size 0" run plan "$c" --no-measure --set zero_optimization.sub_group_size=0
check "is no bound" test -z "$(grep 'spillway.chunk_elems' "$dir/out")"

# Which of longrope's factors windows of this length take.
factors='[1, 1, 1, 1, 2, 2, 2, 2]'
phi3='"model_type": "phi3", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96'
long="model={$phi3, \"max_position_embeddings\": 64, \"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": $factors, \"long_factor\": $factors}"
check "longrope: windows within the original length" run plan "$c" --no-measure --set "$long, \"original_max_position_embeddings\": 32}"
check "take the short factors" shows '^  rope +short_factor +windows of 32 tokens are within the model.s original 32$'
check "longer windows" run train "$c" --set "$long, \"original_max_position_embeddings\": 31}" --set spillway.steps=1
check "take the long ones" shows '^rope     long_factor: windows of 32 tokens are longer than the model.s original 31$'

# Measured once, then from the cache; forced, damaged, unwritable.
check "plan measures" run plan "$c" --json --set spillway.tbw=600TB
check "all four" json 'p["rates"]["measured"] == 4 and p["rates"]["unknown"] == 0 and p["rates"]["seconds"] < 20'
check "times, the bound and wear" json 'p["step_s"] > 0 and p["seconds"][p["bound_by"]] == p["bound_s"] == max(p["seconds"].values()) and p["step_s"] == max(p["bound_s"], p["gated_s"]) <= p["clipped_s"] and p["tbw_years"] > 0 and p["written_per_day"] > 0'
check "the cache is there" test -s "$rates"
check "nothing else is" test -z "$(ls -A "$dir/swap")$(ls -A "$dir/cache/spillway" | grep -v '^rates.json$')"
cp "$dir/out" "$dir/first"
check "again" run plan "$c" --json --set spillway.tbw=600TB
check "from the cache" json 'p["rates"]["measured"] == 0 and p["rates"]["cached"] == 4'
same() { python3 -c 'import json, sys; a, b = (json.load(open(f)) for f in sys.argv[1:]); a["rates"] = b["rates"] = 0; sys.exit(0 if a == b or a["bytes"]["process"] != b["bytes"]["process"] else 1)' "$dir/first" "$dir/out"; }
check "the same plan" same
check "another format is measured by itself" run plan "$c" --json --set spillway.state_format=mixed
check "and only that" json 'p["rates"]["measured"] == 1 and p["rates"]["cached"] == 3'
if [ "$(nproc)" -gt 1 ] && command -v taskset >/dev/null; then
    bound() { taskset -c "$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')" "$spw" plan "$c" --json >"$dir/out" 2>"$dir/err"; }
    check "on one of the processors" bound
    check "disks and copies are the machine's" json 'p["rates"]["measured"] <= 2 and p["rates"]["cached"] >= 2'
fi
check "longer sequences" run plan "$c" --json --set model.n_positions=512 --set data.seq_length=512
check "have attention measured, and products for themselves" json 'p["rates"]["measured"] == 2 and p["rates"]["cached"] == 3'
operations() { run plan "$c" --json --set model.n_positions=512 --set data.seq_length=512 --rate compute=$1; python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["seconds"]["compute"] * float(sys.argv[2]))' "$dir/out" $1; }
check "a given rate of computing is that of attention, too" awk -v a="$(operations 0.001)" -v b="$(operations 0.01)" 'BEGIN { exit !(a > 0 && a < 1.000001 * b && b < 1.000001 * a) }'
check "--calibrate measures again" run plan "$c" --json --calibrate
check "everything" json 'p["rates"]["measured"] == 4'
echo '{"spillway_rates": 1, "entr' >"$rates"
check "a damaged cache is no error" run plan "$c" --json
check "it is measured again" json 'p["rates"]["measured"] == 4'
# Who may lock little memory is told that besides.
check "with one line" test "$(grep -c "$rates" "$dir/err")" -eq 1 -a "$(grep -vc 'io_uring did not register' "$dir/err")" -eq 1
check "and mended" python3 -m json.tool "$rates" "$dir/mended"
sed -i 's/"time": [0-9]*/"time": 1000000000/' "$rates"
check "old rates" run plan "$c" --json
check "are measured again" json 'p["rates"]["measured"] == 4'
cp "$dir/out" "$dir/one"
check "one rank's tokens" run plan "$c" --no-measure --json
one=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["tokens"])' "$dir/out")
check "two ranks" run plan "$c" --json --set spillway.ranks=2
check "whose sums agree too" json 'all(sum(b[t] for b in p["bytes"].values()) == p["total"][t] for t in ("device", "host", "nvme"))'
check "and tokens are of both" json "p['tokens'] == 2 * $one"
check "each have half of the disk" json 'any(d["value"] == "1/2 of the disk" for d in p["decisions"])'
per_byte() { python3 -c 'import json, sys; one, two = (p["seconds"]["nvme_write"] / p["step"]["nvme_write"] for p in (json.load(open(f)) for f in sys.argv[1:])); sys.exit(0 if abs(two / one - 2) < 1e-3 else 1)' "$dir/one" "$dir/out"; }
check "and twice the time for a byte" per_byte
check "two ranks, in words" run plan "$c" --set spillway.ranks=2
wears() { # what is written a step, times steps a day
    awk '/^  predicted step/ { s = $3 } /^  disk wear:/ { d = $3 * 86400 / s; for (i = 4; $(i + 2) != "day"; i++); u = $i == "GiB" ? 1024 : $i == "TiB" ? 1048576 : 1; day = $(i - 1) * u; unit = $4 }
         END { print "# " d " and " day " MiB a day, a step in " unit; exit !(unit == "MiB" && d > 0 && day > 0.99 * d && day < 1.01 * d) }' "$dir/out"
}
check "write a day what they write in its steps" wears
if [ -f "$build/emulated/spillway-cuda.so" ]; then
    of_gpus() { SPW_EMULATE_DEVICES=$1 SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so") "$spw" plan "$c" --json --set spillway.device=cuda --set spillway.ranks=2 --rate compute=1 >"$dir/out" 2>"$dir/err" &&
        python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["seconds"]["compute"])' "$dir/out"; }
    check "on one GPU they compute in turns" awk -v one="$(of_gpus 1)" -v two="$(of_gpus 2)" 'BEGIN { print "# " one " s, on two " two; exit !(two > 0 && one > 1.999 * two && one < 2.001 * two) }'
else
    skip "two ranks on one GPU" "no C++ compiler when this was built"
fi
expect 1 "spillway.collectives nccl: the cpu device has no links" "two ranks by NCCL, which train refuses" plan "$c" --no-measure --set spillway.ranks=2 --set spillway.collectives=nccl
check "on a host each" run plan "$c" --json --no-measure --set spillway.ranks=2 --hosts 2
check "each have all of it" json 'not any(d["value"] == "1/2 of the disk" for d in p["decisions"])'
four="--set spillway.ranks=4 --set zero_optimization.stage=3"
check "four ranks on one host" run plan "$c" --json --no-measure $four
check "receive nothing from others" json 'p["step"]["gather"] > 0 and p["step"]["reduce"] > 0 and p["step"]["gather_hosts"] + p["step"]["reduce_hosts"] == 0'
check "four ranks on two hosts" run plan "$c" --json --no-measure $four --hosts 2
check "receive two of three parts from the other one" json 'all(3 * p["step"][w + "_hosts"] == 2 * p["step"][w] for w in ("gather", "reduce"))'
check "and it is shown" run plan "$c" --no-measure $four --hosts 2
check "with what it takes on a network" shows 'the 2 ranks of a host receive [0-9.]* MiB a step from other hosts, [0-9.e-]* s at 10 Gbit/s'
check "in rows of their own" shows "^ *all ranks., from hosts  *[0-9.]* MiB"
check "sums between hosts as codes" run plan "$c" --json --no-measure $four --hosts 2 --set zero_optimization.zero_quantized_gradients=true
check "have memory for them" json 'p["bytes"]["ranks"]["host"] > 0'
expect 2 "equally many on each host" "hosts of different size" plan "$c" $four --hosts 3
expect 2 "equally many on each host" "more hosts than ranks" plan "$c" --hosts 2
expect 2 "ranks 2 and 3 would keep weights together and are on different hosts" "a group on two hosts" plan "$c" --set spillway.ranks=6 --set zero_optimization.stage=3 --set zero_optimization.zero_hpz_partition_size=2 --hosts 2
expect 2 "hosts cannot be 0" "no hosts" plan "$c" --hosts 0
expect 2 "and no configuration" "hosts of a table" plan --table --hosts 2
homeless() { env -u HOME XDG_CACHE_HOME= "$spw" plan "$c" >"$dir/out" 2>"$dir/err"; }
check "without a place for the cache" homeless
check "it plans all the same" shows 'no place here'
gone="--set zero_optimization.offload_param.nvme_path=$dir/gone --set zero_optimization.offload_optimizer.nvme_path=$dir/gone"
check "a plan with a folder that is not here" run plan "$c" --no-measure $gone --set spillway.checkpoint_dir="$c/below"
check "warns that training would be refused" said "train will not start here: folder $dir/gone: No such file"
check "and of a place for checkpoints that is none" said "train will not start here: spillway.checkpoint_dir $c/below: $c is not a folder"
check "a path that is not there yet" run plan "$c" $gone
check "has no rate, and it says so" shows 'times are not predicted: a rate is not known'
check "and names the path" grep -q "$dir/gone" "$dir/err"
check "train shows the prediction" run train "$c" --set spillway.steps=1 --set spillway.run_log=
check "in one line" shows '^plan     at least [0-9.e-]+ s a step, .* bound by'

# What does not fit: exit 3, the table, and options that do; train says the same.
pasted() { # takes the options from the line "it fits with:" of a file
    eval "set -- $(sed -n 's/^it fits with://p' "$1")"
    [ $# -gt 0 ] && run plan "$c" "${base[@]}" "$@" --no-measure
}
base=(--set spillway.host_memory=14MiB --set zero_optimization.offload_param='{"device":"cpu"}' --set zero_optimization.offload_optimizer='{"device":"cpu"}' --set model.n_layer=20)
case $build in
*asan* | *tsan*) base[1]=spillway.host_memory=$(($(run plan "$c" "${base[@]:2}" --no-measure --json; python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); print(p["total"]["host"] - 4000000)' "$dir/out"))) ;;
esac
expect 3 "spillway.host_memory is" "too little host memory" plan "$c" "${base[@]}" --no-measure
check "the table all the same" shows '^  total '
check "and a way out" shows '^it fits with: --set '
cp "$dir/out" "$dir/plan.out"
check "which fits when pasted" pasted "$dir/plan.out"
expect 3 "spillway.host_memory is" "as JSON" plan "$c" "${base[@]}" --no-measure --json
check "with the same" json 'not p["fits"] and p["needs"] > 0 and len(p["fits_with"]) > 0'
expect 3 "it fits with: --set" "train says it too" train "$c" "${base[@]}"
expect 3 "  total " "with the table" train "$c" "${base[@]}"
check "and nothing is left" test -z "$(ls -A "$dir/swap")"
case $build in *asan | *tsan) ;; *) # whose process is larger
    expect 3 "" "what docs/running.md says does not fit" $(sed -n 's/^.\/spillway \(plan examples\/demo.json --set spillway.host_memory=\)/\1/p' docs/running.md) --no-measure
    check "fits as it says there" test "$(grep '^it fits with:' "$dir/out")" = "$(sed -n '/^.\/spillway plan examples\/demo.json --set spillway.host_memory=/{n;p}' docs/running.md)"
    ;;
esac
base=(--set spillway.device_memory=2500KiB --set train_micro_batch_size_per_gpu=12)
expect 3 "spillway.device_memory is" "too little device memory" plan "$c" "${base[@]}" --no-measure
cp "$dir/out" "$dir/plan.out"
check "smaller micro-batches" shows '^it fits with: .*train_micro_batch_size_per_gpu=.*gradient_accumulation_steps='
check "which fit when pasted" pasted "$dir/plan.out"
base=(--set model.n_layer=2 --set model.n_positions=2048 --set data.seq_length=2048 --set train_micro_batch_size_per_gpu=1 --set spillway.recompute=always)
run plan "$c" "${base[@]}" --set spillway.tile_tokens=512 --no-measure --json
base+=(--set spillway.device_memory=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["total"]["device"])' "$dir/out"))
expect 3 "sequence, spillway.tile_tokens, tile_vocab or" "a long sequence" plan "$c" "${base[@]}" --no-measure
cp "$dir/out" "$dir/plan.out"
check "smaller tiles" shows '^it fits with: --set spillway.tile_tokens=(512|1024)$'
check "which fit when pasted" pasted "$dir/plan.out"
run plan "$c" --set spillway.device_memory=64KiB --no-measure
check "what never fits: the budget that would do" shows 'as it is, it fits with: --set spillway.device_memory=[0-9]+'
expect 3 "nvme_path" "too little disk" plan "$c" --no-measure --set "zero_optimization.offload_param.nvme_path={\"path\":\"$dir/swap\",\"bytes\":65536}" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap"
check "back to host" shows '^it fits with: .*device=cpu'

# Predicted bytes beside a run's, from the third step on, within 1 % where there are 100 steps, because what moves at the
# moment when the last one ends, at most a step's bytes, may fall to either side. The plan is the one in the run's log; that of
# spillway plan is the same, unless the process took another MiB (a sanitizer's wobble is of that size). With OFF set, what is read
# from nvme may be off by so much: how units on their way and updates meet in few slots is the moment's. (Experts in turns read
# 0.2 % more than planned where nothing else runs, 1 % beside two busy processes, 10 % under a sanitizer beside five.)
beside() { # NAME ARGS...
    local name=$1
    shift
    set -- --set spillway.update_ahead=never "$@" # how many begin ahead of the norm, and are taken back, is the moment's
    check "$name: plans" run plan "$c" --json "$@"
    cp "$dir/out" "$dir/plan.json"
    check "$name: trains" run train "$c" "$@"
    [ $steps -gt 1 ] && check "$name: the predicted bytes are the measured ones" python3 - "$dir/plan.json" "$dir/run.jsonl" "${OFF:-0.01}" <<'PY'
import json, sys
said = json.load(open(sys.argv[1]))
lines = [json.loads(line) for line in open(sys.argv[2])]
plan, steps = lines[0]["plan"], [s for s in lines if s.get("step", 0) >= 3]
bad = False
for link in ("nvme_read", "nvme_write", "h2d", "d2h"):
    got = sum(s["bytes"][link] for s in steps) / len(steps)
    may = max(float(sys.argv[3]) if link == "nvme_read" else 0.01, 1.001 / len(steps)) # a step's bytes, and what dividing rounds
    bad |= abs(got - plan[link]) > may * max(got, plan[link])
    bad |= said["bytes"]["process"]["host"] == plan["process"] and said["step"][link] != plan[link]
    print("# %-10s plan %9d, train's plan %9d, measured %11.1f" % (link, said["step"][link], plan[link], got))
sys.exit(bad)
PY
    cp "$dir/plan.json" "$dir/out"
}
beside "all on host" --set zero_optimization.offload_param='{"device":"cpu"}' --set zero_optimization.offload_optimizer='{"device":"cpu"}'
beside "records on nvme" --set zero_optimization.offload_param='{"device":"cpu"}'
beside "all on nvme" --set spillway.checkpoint_dir=
run plan "$c" --no-measure --json
half=$(python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); print(p["total"]["host"] + (p["bytes"]["weights"]["nvme"] + p["bytes"]["records"]["nvme"]) // 2)' "$dir/out")
beside "half and half" --set spillway.host_memory="$half"
check "it is on both" json 'p["total"]["nvme"] > 0 and p["bytes"]["weights"]["host"] + p["bytes"]["records"]["host"] > 0'
beside "two passes" --set spillway.micro_batches_per_pass=1
beside "activations on nvme" --set spillway.activations=nvme --set zero_optimization.offload_param='{"device":"cpu"}' --set zero_optimization.offload_optimizer='{"device":"cpu"}' --set zero_optimization.offload_param.nvme_path="$dir/swap"
check "they are" json 'p["bytes"]["activations"]["nvme"] == 6 * 2 * 16384 and p["step"]["nvme_read"] == p["step"]["nvme_write"] == 6 * 2 * 16384'
beside "activations on host" --set activation_checkpointing.cpu_checkpointing=true
OFF=0.15 beside "experts in turns" --set spillway.device_memory=1400KiB --set spillway.weight_slots=4 --set spillway.record_slots=2 \
    --set gradient_accumulation_steps=1 --set spillway.checkpoint_dir= --set model='{"model_type": "qwen3_moe", "vocab_size": 256,
        "max_position_embeddings": 32, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'
check "they are" json 'any(d["name"] == "spillway.expert_turns" and d["value"] == "16" for d in p["decisions"])'
# Twelve thousand units, all with a place on the device: a rehearsal that goes over them for each use takes minutes.
quickly() { timeout -s KILL 120 "$spw" "$@" >"$dir/out" 2>"$dir/err"; }
check "thousands of experts are planned in seconds" quickly plan "$c" --no-measure --set spillway.device_memory=8GiB \
    --set spillway.host_memory=4GiB --set spillway.chunk_elems=4096 --set 'spillway.freeze=["*.experts.*"]' --set model='{"model_type": "qwen3_moe",
        "vocab_size": 256, "max_position_embeddings": 32, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 16,
        "num_experts": 384, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}'
# What docs/running.md says of 405 B parameters.
llama=examples/llama_405b.json
check "405 B parameters are planned" run plan $llama --gpu rtx4090 --no-measure --json
check "within an RTX 4090, 16 GiB and 6 TiB" json 'p["fits"] and p["gpu"] == "rtx4090" and p["budget"]["device"] < 23.5 * 2**30 and p["total"]["device"] <= p["budget"]["device"] and p["total"]["host"] <= 16 * 2**30 and p["total"]["nvme"] < 6 * 2**40'
check "which move 13.4 TiB a step" json '13.3 * 2**40 < p["step"]["nvme_read"] + p["step"]["nvme_write"] < 13.45 * 2**40'
check "and with rates that are given" run plan "$c" --set spillway.device=auto --set spillway.fill_device=never --gpu h100 --json --rate nvme=10 --rate optimizer=4 --rate compute=500 --rate h2d=50 --rate d2h=40 --rate nvme_write=6
check "takes what they say" json '(lambda s, t: all(abs(s[r] - n) <= 1e-9 * n for r, n in [("nvme_read", t["nvme_read"] / 1e10), ("nvme_write", t["nvme_write"] / 6e9), ("nvme", (t["nvme_read"] + t["nvme_write"]) / 1e10), ("h2d", t["h2d"] / 5e10), ("d2h", t["d2h"] / 4e10)]) and 0.99 < s["optimizer"] / (p["params"] / 4e9) < 1.5 and t["nvme_read"] > 0 and t["h2d"] > 0)(p["seconds"], p["step"]) and p["step_s"] > 0 and p["rates"]["estimated"]'
check "on a machine that is not this one" run plan $llama --gpu h100 --json --no-measure --set spillway.device_memory=auto --set spillway.host_memory=900GiB
check "has the memory that is given" json 'p["total"]["host"] > 800 * 2**30 and p["total"]["device"] > 76 * 2**30'
SPW_CUDA_PLUGIN=$dir/none expect 1 "spillway plan --gpu NAME" "where there is no GPU, that is said" plan $llama
check "says what it is for" run plan "$c" --set spillway.device=auto --gpu h100 --rate nvme=10
check "and what it knows of it" shows 'of NVIDIA H100 SXM 80GB estimated: half of its peak, 44 GB/s to and from the host, given: nvme'
expect 2 "these are: a100-40gb, a100-80gb, h100, " "another GPU" plan $llama --gpu voodoo2
expect 2 "device cpu, and a plan for NVIDIA H100 SXM 80GB, a cuda device: spillway.device is cuda or auto then" "a GPU for the cpu device" plan "$c" --gpu h100
expect 2 "and no configuration" "a GPU for a table" plan --table --gpu h100
for rate in nvme network=0 cpu=3 tape=3 compute=fast optimizer=-1; do expect 2 "--rate $rate: NAME=NUMBER" "--rate $rate" plan "$c" --rate $rate; done
expect 0 "warning: --rate network changes nothing: there is one host (--hosts N)" "a rate of a network that is not there" plan "$c" --set spillway.ranks=2 --rate network=12.5
expect 0 "warning: --rate ranks changes nothing: there is one rank on a host" "a rate of ranks that are not there" plan "$c" --set spillway.ranks=2 --hosts 2 --rate ranks=5 --rate network=1
check "only of these" test "$(grep -c "changes nothing" "$dir/err")" -eq 1
expect 2 "which --no-measure leaves out" "a rate without times" plan "$c" --rate network=1 --no-measure
# A folder's model, and nothing saved: what loading takes is planned too.
mkdir "$dir/folder"
echo '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 6, "n_head": 4}' >"$dir/folder/config.json"
set -- --set model="{\"path\": \"$dir/folder\"}" --set spillway.checkpoint_dir=
check "a model from a folder: plans" run plan "$c" --no-measure "$@"
tables=$(grep '^  tables and stacks' "$dir/out")
check "without a word of weights that are not here" test "$(grep -c "will not start here" "$dir/err")" -eq 0
mkdir "$dir/part"
cp "$dir/folder/config.json" "$dir/part"
echo '{"weight_map": {"wte.weight": "model-00001-of-00002.safetensors"}}' >"$dir/part/model.safetensors.index.json"
expect 0 "train will not start here: $dir/part/model.safetensors.index.json lists wte.weight in shard model-00001-of-00002.safetensors" "weights of which a file is missing" \
    plan "$c" --no-measure --set model="{\"path\": \"$dir/part\"}"
echo "<html>not found</html>" >"$dir/part/model.safetensors"
expect 0 "train will not start here: $dir/part/model.safetensors is not a safetensors file" "or damaged" plan "$c" --no-measure --set model="{\"path\": \"$dir/part\"}"
expect 0 "" "and nothing is read of them where training starts from random numbers" plan "$c" --no-measure --set model="{\"path\": \"$dir/part\"}" --set spillway.start=random
check "nor said" test "$(grep -c "will not start here" "$dir/err")" -eq 0
check "trains" run train "$c" --set spillway.steps=1 "$@"
check "with the tables that were planned" test -n "$tables" -a "$(grep '^  tables and stacks' "$dir/out")" = "$tables"
# What would make steps shorter: the settings that it shows are predicted to, and train to the same losses.
check "plan looks for shorter steps" run plan "$c" --faster --set spillway.recompute=always
eval "set -- $(sed -n 's/^  [0-9.e+-]* s.* of the step above: *//p' "$dir/out" | tr '\n' ' ')"
check "and finds settings" test $# -ge 2 -a "${1:-}" = --set
check "as JSON" run plan "$c" --faster --json --set spillway.recompute=always
check "each of them shorter" json 'len(p["faster"]) > 0 and all(a["step_s"] + a["clipped_s"] > b["step_s"] + b["clipped_s"] for a, b in zip([p] + p["faster"], p["faster"]))'
said_s=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["faster"][-1]["step_s"])' "$dir/out")
check "with them it plans" run plan "$c" --json --set spillway.recompute=always "$@"
check "a step that was said" json "0.8 < p['step_s'] / $said_s < 1.25"
losses() { sed -n 's/.*"step":[0-9]*,"loss":\([^,]*\),.*/\1/p' "$dir/run.jsonl"; }
run train "$c" --set spillway.steps=3 --set spillway.recompute=always && losses >"$dir/slow"
check "and trains" run train "$c" --set spillway.steps=3 --set spillway.recompute=always "$@"
check "to the same losses" [ "$(losses | tail -n 3)" = "$(tail -n 3 "$dir/slow")" ]
check "nothing is shorter" run plan "$c" --faster --set spillway.recompute=always "$@"
check "and it says so" shows '^  no change of placement'
gone="{\"device\":\"nvme\",\"nvme_path\":\"$dir/gone\"}"
check "a folder for swap that is not there has no rate" run plan "$c" --faster --set zero_optimization.offload_param="$gone" --set zero_optimization.offload_optimizer="$gone"
check "and nothing is compared" shows '^  no settings are compared for --faster'
check "a GPU in capitals" run plan "$c" --gpu H100 --no-measure --set spillway.device=auto
expect 2 "which --no-measure leaves out" "shorter by what" plan "$c" --faster --no-measure
expect 2 "not supported yet: sparse_gradients" "a feature that is not built" plan "$c" --set sparse_gradients=true
expect 2 "nvme_path" "nowhere to put them" plan "$c" --set spillway.activations=nvme --set zero_optimization.offload_param='{"device":"cpu"}' --set zero_optimization.offload_optimizer='{"device":"cpu"}'
expect 2 "contradict" "device and host" plan "$c" --set spillway.activations=device --set activation_checkpointing.cpu_checkpointing=true
echo "1..$n"
