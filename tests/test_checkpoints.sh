#!/bin/bash
# Checkpoints: which ones stay, what may differ when training goes on from one, full disks. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-checkpoints-XXXXXX")
mounted=""
cleanup() { [ -n "$mounted" ] && umount "$mounted"; chmod -R u+w "$dir"; rm -rf "$dir"; }
trap cleanup EXIT
. tests/lib_tap.sh
train() { run train "$dir/tiny.json" --quiet "$@"; }
expects=train
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 1500; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"path": ["$dir/text.txt"], "seq_length": 16, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 6, "seed": 3, "device": "cpu", "chunk_elems": 8192, "checkpoint_dir": "$dir/a"} }
JSON
steps() { ls "$1" | sed 's/step-//' | sort -n | xargs; }
same() { cmp "$1/model.safetensors" "$2/model.safetensors" && cmp "$1/optimizer-00001-of-00001.safetensors" "$2/optimizer-00001-of-00001.safetensors"; }
to() { rm -rf "$dir/$1"; echo "--set spillway.checkpoint_dir=$dir/$1"; }

# keep_last: after each complete save the newest N stay; what is newer than the one just saved is not touched.
check "all checkpoints stay" train --set spillway.checkpoint_interval=1
check "without keep_last" test "$(steps "$dir/a")" = "1 2 3 4 5 6"
check "keep_last 2" train $(to k) --set spillway.checkpoint_interval=1 --set spillway.keep_last=2
check "keeps two" test "$(steps "$dir/k")" = "5 6"
check "the same bytes" same "$dir/a/step-6" "$dir/k/step-6"
cp -r "$dir/a" "$dir/b"
mkdir "$dir/b/step-2.old" "$dir/b/step-2.partial" "$dir/b/step-3.partial.old" "$dir/b/step-7.partial" "$dir/b/step-05" "$dir/b/mine"
cp "$dir/a/step-5/spillway.json" "$dir/b/step-05/"
rm "$dir/b/step-1/spillway.json" # not complete: not counted, not removed
ln -s "$dir/a/step-3" "$dir/b/step-0"
ln -s "$dir/a/step-3" "$dir/b/step-3.old" # a removal of a link that was killed
ln -s "$dir/gone" "$dir/b/step-1.old"
check "resume from the third of six, keep_last 1" train --resume "$dir/b/step-3" --set spillway.checkpoint_dir="$dir/b" --set spillway.steps=4 --set spillway.keep_last=1
check "older ones go, newer, incomplete and foreign ones stay" test "$(ls "$dir/b" | xargs)" = "mine step-05 step-1 step-4 step-5 step-6 step-7.partial"
check "the same step saved again is whole" same "$dir/a/step-4" "$dir/b/step-4"
check "a link goes, not what it points to" test ! -e "$dir/b/step-0" -a -f "$dir/a/step-3/spillway.json"
check "no step, no removal: the one resumed from stays" train --resume "$dir/k" --set spillway.checkpoint_dir="$dir/k" --set spillway.keep_last=1
check "that there is nothing to do is said" grep -qx "nothing to do: the checkpoint is of step 6, and spillway.steps is 6" "$dir/out"
check "both are there" test "$(steps "$dir/k")" = "5 6"
if [ "$(id -u)" != 0 ]; then
    chmod 555 "$dir/k/step-5"
    expect 0 "an older checkpoint stays" "a removal that fails is a warning" --resume "$dir/k" --set spillway.checkpoint_dir="$dir/k" --set spillway.keep_last=1 --set spillway.steps=7
    chmod 755 "$dir/k"/*
elif command -v chattr >/dev/null && chattr +i "$dir/k/step-5/config.json" 2>/dev/null; then
    expect 0 "an older checkpoint stays" "a removal that fails is a warning" --resume "$dir/k" --set spillway.checkpoint_dir="$dir/k" --set spillway.keep_last=1 --set spillway.steps=7
    chattr -i "$dir"/k/*/config.json
else
    skip "a removal that fails is a warning" "nothing is read-only for root here"
fi

# What another program calls step-<n> is not replaced, and that is said before the first step.
mkdir -p "$dir/others/step-4" "$dir/others/step-2"
echo weights >"$dir/others/step-4/model.pt"
cp -r "$dir/a/step-3" "$dir/others/"
expect 1 "others/step-4 would be replaced, and is no checkpoint of this program" "somebody else's folder of a step to come" --resume "$dir/others" --set spillway.checkpoint_dir="$dir/others"
check "stays" test "$(cat "$dir/others/step-4/model.pt")" = weights
mv "$dir/others/step-4" "$dir/others/4"
check "of steps that are done it is in nobody's way" train --resume "$dir/others" --set spillway.checkpoint_dir="$dir/others" --set spillway.keep_last=1
check "all but checkpoints stays" test "$(ls "$dir/others" | xargs)" = "4 step-2 step-6"

# What differs and matters is refused, by name and with both values, all of it at once.
r() { expect 2 "$2" "$1 is named" --resume "$dir/a/step-3" --set spillway.checkpoint_dir= "${@:3}"; }
r "another learning rate" "  optimizer.params.lr: 0.002 in the checkpoint, 0.001 now" --set optimizer.params.lr=0.001
r "another optimizer" '  optimizer.type: "AdamW" in the checkpoint, "Lion" now' --set optimizer.type='"Lion"'
r "other betas" "  optimizer.params.betas: [0.9,0.999] in the checkpoint" --set optimizer.params.betas=[0.9,0.95]
r "another model" "  model.n_embd: 32 in the checkpoint, 64 now" --set model.n_embd=64
r "another family" '  model.model_type: "gpt2" in the checkpoint, "llama" now' --set 'model={"model_type":"llama","vocab_size":256,"max_position_embeddings":32,"hidden_size":32,"intermediate_size":64,"num_hidden_layers":2,"num_attention_heads":2}'
r "dropout" "  model.embd_pdrop: " --set model.embd_pdrop=0.1
r "clipping" "  gradient_clipping: 1.0 in the checkpoint, 0.5 now" --set gradient_clipping=0.5
r "another micro-batch" "  train_micro_batch_size_per_gpu: 2 in the checkpoint, 4 now" --set train_micro_batch_size_per_gpu=4
r "other accumulation" "  gradient_accumulation_steps: 2 in the checkpoint, 3 now" --set gradient_accumulation_steps=3
r "another length" "  data.seq_length: 16 in the checkpoint, 32 now" --set data.seq_length=32
r "another order" "  data.seed: 1 in the checkpoint, 2 now" --set data.seed=2
r "another split" "  data.validation_split: 0.05 in the checkpoint, 0.1 now" --set data.validation_split=0.1
cp "$dir/text.txt" "$dir/copy.txt"
r "another file" "  data.path: [\"$dir/text.txt\"] in the checkpoint, [\"$dir/copy.txt\"] now" --set data.path="$dir/copy.txt"
r "another seed" "  spillway.seed: 3 in the checkpoint, 4 now" --set spillway.seed=4
r "a schedule" '  scheduler.type: "" in the checkpoint, "WarmupLR" now' --set scheduler.type='"WarmupLR"'
r "a lossy format" '  spillway.state_format: "split" in the checkpoint, "split-bf16" now' --set spillway.state_format='"split-bf16"'
r "gradients in bf16" '  spillway.grad_dtype: "fp32" in the checkpoint, "bf16" now' --set spillway.grad_dtype='"bf16"'
r "parameter groups" '  spillway.param_groups: not set in the checkpoint, [{"match":"*wte*","lr":0.1}] now' --set 'spillway.param_groups=[{"match":"*wte*","lr":0.1}]'
r "decay of norms" "  spillway.decay_norm_and_bias: false in the checkpoint, true now" --set spillway.decay_norm_and_bias=true
r "skipping" "  bf16.check_grad_overflow: false in the checkpoint, true now" --set bf16.check_grad_overflow=true
r "8-bit floats" "  spillway.fp8: false in the checkpoint, true now" --set spillway.fp8=true
r "another pass" "  spillway.micro_batches_per_pass: 0 in the checkpoint, 1 now" --set spillway.micro_batches_per_pass=1
r "two of them" "2 differences (above)" --set spillway.seed=4 --set data.seed=2
check "each in a line" test "$(grep -c '^  [a-z_.]*: .* in the checkpoint, .* now$' "$dir/err")" -eq 2
echo "one more line" >>"$dir/text.txt"
r "a file that grew" "  bytes of training data: $(stat -c %s "$dir/copy.txt") in the checkpoint, $(stat -c %s "$dir/text.txt") now"
check "and its tokens" grep -q "^  tokens of training data: " "$dir/err"
cp "$dir/copy.txt" "$dir/text.txt"
# The tokenizer's contents count, not its name alone; and a manifest that says nothing of it goes on as before.
cp tests/vectors/tok_gpt2.json "$dir/tok.json"
words="--set model.vocab_size=4096 --set data.tokenizer=$dir/tok.json"
check "trains through a tokenizer" train $words --set spillway.checkpoint_dir="$dir/words" --set spillway.steps=1
cp -r "$dir/words" "$dir/silent"
python3 - "$dir/tok.json" "$dir/silent/step-1/spillway.json" <<'PY'
import json, sys
t = json.load(open(sys.argv[1]))
t["model"]["merges"] = t["model"]["merges"][:-1] + t["model"]["merges"][-1:] * 2  # the same ids, and another file
json.dump(t, open(sys.argv[1], "w"))
m = json.load(open(sys.argv[2]))
assert m["data"].pop("encoder").startswith("tokenizer ")
json.dump(m, open(sys.argv[2], "w"))
PY
r2() { expect 2 "$2" "$1 is named" --resume "$dir/$3" $words --set spillway.checkpoint_dir= --set spillway.steps=2 "${@:4}"; }
r2 "another tokenizer under the same name" "  encoder of training data: tokenizer " words
check "alone" grep -qF "1 difference (above)" "$dir/err"
cp tests/vectors/tok_gpt2.json "$dir/elsewhere.json"
check "the same tokenizer in another place is taken" train --resume "$dir/words" $words --set data.tokenizer="$dir/elsewhere.json" --set spillway.checkpoint_dir= --set spillway.steps=2
check "a manifest without it goes on" train --resume "$dir/silent" $words --set spillway.checkpoint_dir= --set spillway.steps=2
# A manifest that somebody edited is refused by field.
cp -r "$dir/a/step-3" "$dir/edited"
sed -i 's/"updates": 3/"updates": "3"/' "$dir/edited/spillway.json"
expect 1 "$dir/edited/spillway.json: updates: expected an integer of at least 0, got \"3\"" "an edited manifest" --resume "$dir/edited"
check "--resume-anyway goes on" train --resume "$dir/a/step-3" --resume-anyway $(to any) --set optimizer.params.lr=0.001
check "and still names the difference" grep -qF "  optimizer.params.lr: 0.002 in the checkpoint, 0.001 now" "$dir/err"
check "the next checkpoint has the new value" train --resume "$dir/any" $(to any2) --set spillway.steps=7 --set optimizer.params.lr=0.001
expect 2 "--resume-anyway belongs to --resume" "--resume-anyway alone is usage" --resume-anyway
cp -r "$dir/a/step-3" "$dir/ancient"
python3 - "$dir/ancient/spillway.json" <<'PY'
import json, sys
m = json.load(open(sys.argv[1]))
del m["data"], m["config"]["spillway"]["keep_last"]
json.dump(m, open(sys.argv[1], "w"))
PY
expect 0 "is older than the description of training data" "an old checkpoint goes on, with a warning" --resume "$dir/ancient" $(to anc)
check "to the same bytes" same "$dir/a/step-6" "$dir/anc/step-6"

# What does not matter is free, and the bits say so: placement, chunks, threads, exact formats, instruction sets.
free() { # NAME ARGS...
    check "resume with $1" train --resume "$dir/a/step-3" $(to f) "${@:2}"
    check "$1: the same bytes" same "$dir/a/step-6" "$dir/f/step-6"
}
host='zero_optimization.offload_param={"device":"cpu"}'
free "everything in host memory" --set "$host" --set 'zero_optimization.offload_optimizer={"device":"cpu"}'
free "everything on the device" --set 'zero_optimization={"stage":3}'
free "small chunks, a slot each, one thread" --set spillway.chunk_elems=4096 --set spillway.weight_slots=1 --set spillway.record_slots=1 \
    --set spillway.optimizer_threads=1
free "threads for files, no prefetch, no checksums" --set aio.backend='"threads"' --set spillway.prefetch=false --set spillway.integrity=false
for isa in scalar avx2 avx512; do
    SPW_ISA=$isa free "instruction set $isa" --set spillway.chunk_elems=4096 --set "$host"
done
# mixed weights round as split's do: there and back, with a step in each, is the same state.
check "resume in mixed" train --resume "$dir/a/step-3" $(to m) --set spillway.state_format='"mixed"' --set spillway.steps=5 --set spillway.chunk_elems=4096
check "and back in split" train --resume "$dir/m" $(to s) --set "$host"
check "the same bytes" same "$dir/a/step-6" "$dir/s/step-6"
# fp32 computes with wider weights; without a step between, nothing is lost on the way.
check "resume in fp32" train --resume "$dir/a/step-3" $(to w) --set spillway.state_format='"fp32"' --set spillway.steps=4
check "and the masters in split again" train --resume "$dir/w" $(to s2) --set spillway.steps=5
check "chain of formats, again" train --resume "$dir/w" $(to s3) --set spillway.steps=5 --set spillway.state_format='"mixed"'
check "the same weights and moments" same "$dir/s2/step-5" "$dir/s3/step-5"

# A vector's last moments share their scale with padding, which is not saved: it must count for nothing, whatever parameter comes behind it.
padded='--set spillway.state_format="split-int8" --set optimizer.params.betas=[0.9,0] --set spillway.param_groups=[{"match":"*attn*","betas":[0.9,0.999]}] --set spillway.steps=20'
check "moments of 8 bits, in groups" train $(to pad) $padded --set spillway.checkpoint_interval=10
check "resumed" train --resume "$dir/pad/step-10" $(to pad2) $padded
check "the same bytes of them" same "$dir/pad/step-20" "$dir/pad2/step-20"

# What is frozen has no masters: formats of another width round it for good.
still='--set spillway.freeze=["*.mlp.*"] --set spillway.steps=2'
check "frozen weights in fp32" train $(to fz) $still --set spillway.state_format='"fp32"' --set bf16.enabled=false
expect 2 'spillway.state_format: "fp32" in the checkpoint, "split" now' "are not rounded without a word" --resume "$dir/fz" $(to fz2) $still --set spillway.steps=3
check "nor where nothing else differs" train --resume "$dir/fz" $(to fz2) $still --set spillway.steps=3 --set spillway.state_format='"fp32"' --set bf16.enabled=false

# What is frozen is read in the checkpoint's file by who goes on from it: with the least memory that training takes.
case ${SPW_BUILD:-} in *asan | *tsan) ;; *) # whose processes are never of one size
    run plan "$dir/tiny.json" $still --no-measure --set spillway.host_memory=1MiB $(to least) || true
    least=$(grep -o '([0-9]* bytes)' "$dir/err" | grep -o '[0-9]*' | head -n 1)
    least=$((least + 1048576)) # the process is not always as large
    check "frozen weights in the least memory" train $still $(to least) --set spillway.host_memory="$least"
    check "resumed in it" train --resume "$dir/least" $still --set spillway.steps=3 --set spillway.checkpoint_dir="$dir/least" --set spillway.host_memory="$least" ;;
esac

# Updates that are made a step late: a save makes what waits, so when saves come decides what is computed.
late="--set spillway.delayed_update=2 --set spillway.checkpoint_interval=3"
check "late updates" train $(to late) $late
check "resume with late updates" train --resume "$dir/late/step-3" $(to late2) $late
check "the same bytes with late updates" same "$dir/late/step-6" "$dir/late2/step-6"
fails() { ! "$@"; }
check "which others have not" fails same "$dir/late/step-6" "$dir/a/step-6" 2>/dev/null
# Saved after each step, no update is late: what is evaluated is what is saved, also after the last step.
evals() { sed -n 's/.*"eval_loss":\([^,}]*\).*/\1/p' "$1"; }
each="--set spillway.eval_interval=1 --set spillway.eval_batches=1 --set spillway.steps=4 --set data.validation_split=0.2"
check "evaluations beside saves" train $each $(to ev) --set spillway.delayed_update=1 --set spillway.checkpoint_interval=1 --set spillway.run_log="$dir/ev1.jsonl"
check "and without late updates" train $each $(to ev2) --set spillway.run_log="$dir/ev2.jsonl"
check "are the same" test "$(evals "$dir/ev1.jsonl" | wc -l)" = 4 -a "$(evals "$dir/ev1.jsonl")" = "$(evals "$dir/ev2.jsonl")"
check "the last one, that is saved at the end" train $each $(to ev3) --set spillway.delayed_update=3 --set spillway.checkpoint_interval=3 --set spillway.run_log="$dir/ev3.jsonl"
check "too" test "$(evals "$dir/ev3.jsonl" | tail -n 1)" = "$(evals "$dir/ev2.jsonl" | tail -n 1)"
expect 2 "spillway.checkpoint_interval: 3 in the checkpoint, 2 now" "then the interval is named" --resume "$dir/late/step-3" $(to late2) --set spillway.delayed_update=2 --set spillway.checkpoint_interval=2
expect 2 "spillway.delayed_update: 2 in the checkpoint, 0 now" "late updates are named" --resume "$dir/late/step-3" $(to late2) --set spillway.checkpoint_interval=2

# Frozen weights that the device keeps are handed to a save some steps later, not when the next one begins: what is lost by a kill is since the save.
rm -rf "$dir/held"
"$spw" train "$dir/tiny.json" --quiet --set 'spillway.freeze=["h.*"]' --set spillway.checkpoint_dir="$dir/held" --set spillway.steps=1000000 \
    --set spillway.weight_slots=2 --set spillway.checkpoint_interval=1000 --set spillway.run_log="$dir/held.jsonl" >"$dir/out" 2>"$dir/err" &
pid=$!
comes test -f "$dir/held/step-1000/spillway.json"
kill -STOP $pid
check "a save of what is not read any more is complete before the next begins" test -f "$dir/held/step-1000/spillway.json" -a "$(grep -c '"loss"' "$dir/held.jsonl")" -lt 2000
kill -KILL $pid
{ wait $pid; } 2>/dev/null

# A folder that cannot hold checkpoints is said before the first step, and before the state is on disk.
expect 1 "$dir/text.txt" "a folder that is a file" --set spillway.checkpoint_dir="$dir/text.txt"
check "before a step" test "$(grep -c '^step' "$dir/out")" -eq 0
expect 1 "$dir/text.txt" "a folder below a file" --set spillway.checkpoint_dir="$dir/text.txt/deep"
check "before a step, too" test "$(grep -c '^step' "$dir/out")" -eq 0
if [ "$(id -u)" != 0 ]; then
    mkdir -m 555 "$dir/locked"
    expect 1 "spillway.checkpoint_dir $dir/locked: " "a folder that may not be written" --set spillway.checkpoint_dir="$dir/locked"
elif mkdir "$dir/locked" && mount -t tmpfs -o ro,size=100k tmpfs "$dir/locked" 2>/dev/null; then
    expect 1 "spillway.checkpoint_dir $dir/locked: " "a folder that may not be written" --set spillway.checkpoint_dir="$dir/locked"
    umount "$dir/locked"
else
    skip "a folder that may not be written" "mounting is not permitted here"
fi
long=$dir/$(printf 'd%.0s' $(seq 200))/$(printf 'd%.0s' $(seq 200))/$(printf 'd%.0s' $(seq 200))/$(printf 'd%.0s' $(seq 200))/$(printf 'e%.0s' $(seq 120))
expect 2 "spillway.checkpoint_dir is longer than 899 bytes" "a folder whose name would be cut off" --set spillway.checkpoint_dir="$long"
expect 1 "the path is longer than 899 bytes" "and one to go on from" --resume "$long"

# A disk that fills up while saving, and a limit on file sizes: an error with numbers, and the last checkpoint as it was.
mkdir "$dir/small"
if mount -t tmpfs -o size=1500k tmpfs "$dir/small" 2>/dev/null; then
    mounted=$dir/small
    expect 1 "bytes), " "a full disk names what is needed" --set spillway.checkpoint_dir="$dir/small" --set spillway.checkpoint_interval=1
    check "and what is free" grep -qE "saving checkpoint $dir/small/step-[0-9]+: it needs [0-9.]+ [KM]iB \([0-9]+ bytes\), [0-9.]+ [KM]iB free" "$dir/err"
    left=$(ls "$dir/small" | xargs)
    check "the last complete one is alone" test "$left" = "step-1" -o "$left" = "step-1 step-2"
    check "and named as what to go on from" grep -qE "^spillway: training ended after step [2-6] of 6; to go on from its newest complete checkpoint: --resume $dir/small/${left##* }\$" "$dir/err"
    check "and goes on" train --resume "$dir/small" $(to o)
    check "to the same bytes" same "$dir/a/step-6" "$dir/o/step-6"
    rm -rf "$dir/small"/*
    head -c 1200000 /dev/zero >"$dir/small/other"
    expect 1 "spillway.checkpoint_dir $dir/small/new/deep has" "too little room is said before the first step" --set spillway.checkpoint_dir="$dir/small/new/deep"
    check "first of all" sh -c 'grep -v "refuses O_DIRECT" "$1" | head -n 1 | grep -q "saving will fail unless room is made"' - "$dir/err"
    rm -rf "$dir/small"/*
    expect 1 "checkpoints at once take" "room for one and not for all is said too" --set spillway.checkpoint_dir="$dir/small" --set spillway.checkpoint_interval=1
    check "with the way out" grep -qE "warning: [0-9]+ checkpoints at once take .* has .* free: saving will fail unless room is made or spillway.keep_last says" "$dir/err"
    rm -rf "$dir/small"/*
    "$spw" plan "$dir/tiny.json" --no-measure --set spillway.checkpoint_dir="$dir/small" --set spillway.checkpoint_interval=1 >"$dir/out" 2>"$dir/err"
    check "by plan as well" grep -q "checkpoints at once take" "$dir/err"
    train --set spillway.checkpoint_dir="$dir/small" --set spillway.steps=1
    check "and not where there is room" test "$(grep -c "saving will fail" "$dir/err")" -eq 0
    rm -rf "$dir/small"/*
    check "with keep_last 1 there is room for each" train --set spillway.checkpoint_dir="$dir/small" --set spillway.checkpoint_interval=1 --set spillway.keep_last=1
    # A disk that is full of what a killed run left there has room, for train, but not one that is full of something else.
    rm -rf "$dir/small"/*
    swapped="--set zero_optimization.offload_param.nvme_path=$dir/small --set zero_optimization.offload_optimizer.nvme_path=$dir/small --set spillway.checkpoint_dir="
    mkdir -p "$dir/small/spillway-17-1/rank-0"
    touch "$dir/small/spillway-17-1/rank-0/lock"
    head -c 2000000 /dev/zero >"$dir/small/spillway-17-1/rank-0/swap.bin" 2>/dev/null
    check "a disk that is full of a killed run's swap" train $swapped
    check "is empty behind the next" test -z "$(ls -A "$dir/small")"
    for _ in $(seq 20); do head -c 2000000 /dev/zero >>"$dir/small/other" 2>/dev/null; sleep 0.1; done # a ring's files may be gone a little after its process
    expect 1 "swap space in $dir/small: needs 1.12 MiB (1179648 bytes), 0 B free" "a full disk for swap is named" $swapped
else
    skip "a full disk" "mounting is not permitted here"
fi
limited() { (ulimit -f 200 && train "$@"); }
cp -r "$dir/a/step-2" "$dir/lim2" && mkdir "$dir/lim" && mv "$dir/lim2" "$dir/lim/step-2"
limited --resume "$dir/lim" --set spillway.checkpoint_dir="$dir/lim" --set spillway.steps=3 --set "$host" --set 'zero_optimization.offload_optimizer={"device":"cpu"}'
code=$?
check "a limit on file sizes is an error" test $code -eq 1 -a -n "$(grep 'saving checkpoint .*step-3.*needs' "$dir/err")"
check "and leaves the checkpoint before alone" test "$(ls "$dir/lim")" = step-2
check "which was gone on from, and is again" grep -qx "spillway: training ended after step 3 of 3; to go on from its newest complete checkpoint: --resume $dir/lim/step-2" "$dir/err"
limited $(to lim3) --set spillway.steps=1 --set "$host" --set 'zero_optimization.offload_optimizer={"device":"cpu"}'
check "that there is none is said too" grep -qx "spillway: training ended after step 1 of 1, and no checkpoint of it is complete" "$dir/err"
check "which goes on" train --resume "$dir/lim" $(to l)
check "to the same bytes" same "$dir/a/step-6" "$dir/l/step-6"
check "nothing is left in swap" test -z "$(ls -A "$dir/swap")"
echo "1..$n"
