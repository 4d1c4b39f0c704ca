#!/bin/sh
# On the GPU machine, beside bin/ and lib/: run.sh [test|sanitize|bench|train|all]. Needs the driver; cuBLASLt of the toolkit where it is.
# train alone: the benchmarks of whole runs, about ten minutes; train.sh beside this file says what they are.
# Exits 77 where there is no GPU, with the line that says why.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
SPW_CUDA_PLUGIN=$here/lib/spillway-cuda.so
export LD_LIBRARY_PATH SPW_CUDA_PLUGIN
what=${1:-all} failed=0
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null
step() { # name seconds command...
    name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout -s KILL "$limit" "$@"
    rc=$?
    [ $rc -eq 77 ] && exit 77
    [ $rc -ne 0 ] && { echo "== $name failed ($rc)"; failed=1; }
}
if [ "$what" = test ] || [ "$what" = all ]; then
    step "operations beside the cpu device" 400 env CMOCKA_MESSAGE_OUTPUT=STDOUT "$here/bin/test_cuda"
fi
# Where there are two GPUs: a rank on each, by NCCL and through the host, to the last digit of every loss.
train_ranks() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cat "$here/run.sh" "$here/run.sh" "$here/run.sh" >"$work/text.txt"
    cat >"$work/c.json" <<JSON
{ "model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128},
  "data": {"path": ["$work/text.txt"], "seq_length": 128}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true}, "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 10, "seed": 1, "device": "cuda"} }
JSON
    for by in nccl host; do
        "$here/bin/spillway" train "$work/c.json" -n 2 --quiet --set spillway.collectives=$by --set spillway.run_log="$work/$by.log" || return 1
        sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2 \3/p' "$work/$by.log" >"$work/$by"
    done
    [ "$(wc -l <"$work/nccl")" -eq 10 ] && cmp "$work/nccl" "$work/host"
}
if [ "$what" = test ] || [ "$what" = all ]; then
    step "links between GPUs" 300 sh -c '"$0" --gpu; rc=$?; [ $rc -eq 77 ] && rc=0; exit $rc' "$here/bin/test_link"
    if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -ge 2 ]; then
        echo "== two ranks on two GPUs"
        (train_ranks) || { echo "== two ranks on two GPUs failed"; failed=1; }
    fi
fi
if [ "$what" = test ] || [ "$what" = all ]; then
    step "whole runs" 500 "$here/train.sh" "$here/bin/spillway" "$here/tokens.bin" places curves
fi
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ "$what" = sanitize ] || [ "$what" = all ]; then
    if [ -n "$sanitizer" ]; then
        step "memcheck" 400 env SPW_CUDA_BLAS=0 "$sanitizer" --tool memcheck --error-exitcode 1 "$here/bin/test_cuda" --small
        step "racecheck" 400 env SPW_CUDA_BLAS=0 "$sanitizer" --tool racecheck --error-exitcode 1 "$here/bin/test_cuda" --small
    else
        echo "== no compute-sanitizer here"
    fi
fi
if [ "$what" = bench ] || [ "$what" = all ]; then
    for kind in gemm attention "copy --seconds 0.3"; do # shellcheck disable=SC2086
        step "bench $kind" 200 "$here/bin/spillway" bench $kind --device cuda
    done
fi
if [ "$what" = train ] || [ "$what" = bench ] || [ "$what" = all ]; then
    step "training" 900 "$here/train.sh" "$here/bin/spillway" "$here/tokens.bin" speed offload
fi
exit $failed
