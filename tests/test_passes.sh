#!/bin/bash
# Several passes that hold sums of gradients on the emulated cuda device: the losses, norms and bytes of one pass, and which of both is taken. A
# processor of a kilohertz (SPW_EMULATE_KHZ) makes computing again dear, so that passes are taken for models of a test's size. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
[ -f "$build/emulated/spillway-cuda.so" ] || { echo "1..1"; echo "ok 1 - passes # SKIP no C++ compiler when this was built"; exit 77; }
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - passes # SKIP minutes under a sanitizer; test_cuda_emulated runs the kernels there"; exit 77 ;; esac
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-passes-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
export SPW_NCCL=$(realpath "$build/emulated/libnccl.so.2") SPW_CUDA_PLUGIN SPW_EMULATE_GUARD=1 SPW_EMULATE_STREAMS=late OPENBLAS_NUM_THREADS=1
SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so")
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
gpt2='{"model_type": "gpt2", "vocab_size": 256, "n_positions": 40, "n_embd": 48, "n_layer": 4, "n_head": 3}'
llama='{"model_type": "llama", "vocab_size": 256, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
  "num_key_value_heads": 2, "max_position_embeddings": 40, "tie_word_embeddings": false}'
cat >"$dir/c.json" <<JSON
{ "model": $gpt2, "data": {"path": ["$dir/text.txt"], "seq_length": 40, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 2, "seed": 3, "device": "cuda", "fill_device": "never", "chunk_elems": 4096, "eval_interval": 2, "eval_batches": 1, "chaos_seed": 5} }
JSON
ranks=1
train() { # LABEL SETTINGS...
    local count=()
    [ "$ranks" -gt 1 ] && count=(-n "$ranks")
    timeout -s KILL 400 "$spw" train "$dir/c.json" "${count[@]}" --set spillway.run_log="$dir/$1.log" "${@:2}" >"$dir/out" 2>"$dir/err" || return
    cp "$dir/out" "$dir/$1.out"
}
# Of each step all that training decides, and the bytes of gradients that leave. Weights come once an update, whichever step that falls in, and
# those of the evaluation behind two steps may be counted with the second: three times for two, which is what as_many_bytes allows.
numbers() { sed -n 'h; s/.*"eval_loss":\([^,}]*\).*/\1/p; g; s/.*"step":[0-9]*,"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2/p' "$dir/$1.log"; }
leave() { sed -n 's/.*"step":[0-9].*"bytes":{.*"d2h":\([0-9]*\).*/\1/p' "$dir/$1.log"; }
come() { sed -n 's/.*"step":[0-9].*"bytes":{.*"h2d":\([0-9]*\).*/\1/p' "$dir/$1.log" | awk '{ sum += $1 } END { print sum + 0 }'; }
same() { [ "$(numbers "$1" | wc -l)" -ge 3 ] && cmp <(numbers "$1") <(numbers "$2"); }
as_many_bytes() {
    echo "# $(come "$1") and $(come "$2") bytes come, $(leave "$2" | head -n 1) leave a step"
    [ "$(leave "$1" | wc -l)" -eq 2 ] && cmp <(leave "$1") <(leave "$2") && [ "$(come "$2")" -le $(($(come "$1") * 3 / 2)) ]
}
# The device's largest use in a run, and what was planned of it.
within_plan() {
    sed -n 's/.*"run":"closed".*"peak_bytes":{"device":\([0-9]*\),.*"plan_bytes":{.*"device":\([0-9]*\)}.*/\1 \2/p' "$dir/$1.log" |
        awk '{ print "# device " $1 " of " $2; n++; if ($1 <= 0 || $1 > $2) bad = 1 } END { exit bad || n != 1 }'
}
# passes_of PER_PASS WHY SETTINGS...: what a plan says
passes_of() { run plan --no-measure "$dir/c.json" --set spillway.ranks="$ranks" "${@:3}" && grep -Eq "^  spillway.micro_batches_per_pass +$1 .*$2" "$dir/out"; }
# beside NAME MEMORY SETTINGS...: with so much device memory passes of less than 5 are taken, and nothing but that is another.
beside() {
    local name=$1 memory=$2
    shift 2
    train one "$@"
    check "$name: one pass without a reason for more" passes_of 5 "all of them" "$@"
    set -- "$@" --set spillway.device_memory="$memory"
    SPW_EMULATE_KHZ=1 train several "$@"
    SPW_EMULATE_KHZ=1 check "$name: passes of less, which hold their sums" passes_of "[123]" "holds all weights" "$@"
    check "$name: the same numbers" same one several
    check "$name: not a byte more" as_many_bytes one several
    check "$name: the device's memory within the plan" within_plan several
}
beside "tied weights" 2MiB
beside "gradients that leave as bf16" 2MiB --set spillway.grad_dtype=bf16
beside "updates as gradients come" 2MiB --set gradient_clipping=0
beside "updates ahead of the norm" 2MiB --set gradient_clipping=1e9 --set spillway.update_ahead=always
beside "records on nvme" 2MiB --set zero_optimization.offload_optimizer="{\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}"
beside "adapters" 2MiB --set 'spillway.lora={"rank":2,"alpha":4,"targets":["c_attn"]}'
beside "half of the state on the device" 3MiB --set zero_optimization.offload_optimizer.ratio=0.5
check "half of the state on the device: each gradient has one place" grep -Eq "^  gradients +592 KiB " "$dir/several.out"
# Between ranks sums are sent round once, too.
ranks=2
beside "two ranks, stage 1" 2MiB --set zero_optimization.stage=1
beside "two ranks, stage 2, records on nvme" 2MiB --set zero_optimization.offload_optimizer="{\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}"
beside "two ranks, stage 3" 2MiB --set zero_optimization.stage=3 --set zero_optimization.offload_param.device=cpu --set spillway.device_memory=64MiB
beside "two ranks, half of the state on the device" 3MiB --set zero_optimization.offload_optimizer.ratio=0.5
train one
RANK=0 SPW_EMULATE_FREE=0:9000 SPW_EMULATE_KHZ=1 check "a rank with less memory: by itself it would take passes" passes_of "[123]" "holds all weights"
SPW_EMULATE_FREE=0:9000 SPW_EMULATE_KHZ=1 train several
check "a rank with less memory: with the others it takes one" cmp <(grep "^  gradients " "$dir/one.out") <(grep "^  gradients " "$dir/several.out")
check "a rank with less memory: the same numbers" same one several
ranks=3
export SPW_EMULATE_DEVICES=4
beside "three ranks linked" 2MiB --set spillway.collectives=nccl
unset SPW_EMULATE_DEVICES
ranks=1
train one --set spillway.fill_device=always
set -- --set spillway.fill_device=always --set spillway.device_memory=2500KiB
SPW_EMULATE_KHZ=1 train several "$@"
SPW_EMULATE_KHZ=1 check "state where there is room: passes hold their sums" passes_of "[123]" "holds all weights" "$@"
check "state where there is room: the same numbers" same one several
SPW_EMULATE_KHZ=1 train several --set spillway.fill_device=auto --set spillway.device_memory=2500KiB
check "state where it is worth it: the same numbers" same one several

# Asked for, passes hold their sums where they can, and else those go to host memory and come back.
asked() { train "$1" --set spillway.micro_batches_per_pass="$2" "${@:3}"; }
train one --set model="$llama"
for group in 1 2 3; do
    asked several $group --set model="$llama"
    check "asked for passes of $group, the numbers of one" same one several
    check "asked for passes of $group, not a byte more" as_many_bytes one several
done
asked several 2 --set model="$llama" --set spillway.device_memory=760KiB
check "no room for all sums: they go and come back" [ "$(leave several | head -n 1)" -eq $((3 * $(leave one | head -n 1))) ]
check "no room for all sums: the same numbers" same one several
nvme="{\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}}"
asked several 2 --set model="$llama" --set zero_optimization="$nvme"
check "asked for, all state on nvme: the same numbers" same one several
check "asked for, all state on nvme: sums leave once" cmp <(leave one) <(leave several)

# What decides: how long it takes, by estimates. One thread that updates needs all of the forward pass for it.
cat >"$dir/large.json" <<JSON
{ "model": {"model_type": "gpt2", "n_embd": 256, "n_layer": 12, "n_head": 4, "n_positions": 1024, "vocab_size": 512},
  "data": {"path": ["$dir/text.txt"], "seq_length": 1024}, "train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 8,
  "gradient_clipping": 1.0, "bf16": {"enabled": true}, "optimizer": {"params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"device": "cuda", "fill_device": "never", "update_ahead": "never", "checkpoint_dir": ""} }
JSON
planned() { # PER_PASS MEMORY THREADS
    run plan --gpu h100 --no-measure "$dir/large.json" --set spillway.device_memory="$2" --set spillway.optimizer_threads="$3" &&
        grep -Eq "^  spillway.micro_batches_per_pass +$1 " "$dir/out"
}
check "all in one pass where the device has room for it" planned 8 70GiB 64
check "two passes where it has room for half" planned 4 16GiB 64
check "one by one where it has room for one" planned 1 4GiB 64
check "all in one where the host needs the whole forward pass for its updates" planned 8 8GiB 1
set -- --set model="$llama" --set gradient_accumulation_steps=64 --set spillway.device_memory=1200KiB
expect 3 "this model and batch need at least" "all of 64 micro-batches in one pass do not fit" plan --no-measure "$dir/c.json" "$@" --set spillway.micro_batches_per_pass=64
check "passes are taken where one does not fit" passes_of "[0-9]+" "holds all weights" "$@"
echo "1..$n"
