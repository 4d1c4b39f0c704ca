#!/bin/sh
# On the GPU machine, beside bin/ and lib/: run.sh [--within SECONDS] STEP... Needs the driver; cuBLASLt and NCCL from the toolkit, or from Python's packages.
#   ops        each operation beside the cpu device; where a type fails, each of its tests in a process of its own; ops=TEST one of them (test_cuda --list)
#   links      NCCL between GPUs, with one rank where there is one GPU
#   runs       losses on cpu and cuda, and the same bits in every placement, of Muon and preferences too
#   places, curves, kinds    one of these
#   rates      bench gemm, attention, copy, of the processor adam, and of several GPUs comm (half a minute)
#   speed, profile, offload, large    benchmarks of whole runs; train.sh beside this file says what they are (1, half, 2 and 3 minutes)
#   memcheck, racecheck    compute-sanitizer on small operations
#   test = ops links runs memcheck side by side (2 minutes), sanitize = memcheck racecheck, bench = rates speed profile offload large, all = test bench racecheck
# The end of what each says is shown; with $OUT set all of it is in $OUT/kit.log at the end, for which --within leaves time. Exits 77 where there is no
# GPU, with the line that says why.
here=$(cd "$(dirname "$0")" && pwd)
failed=0 until=$(($(date +%s) + 86400))
[ "${1:-}" = --within ] && { until=$(($(date +%s) + $2)); shift 2; }
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# A library's folder, for the loader: where toolkits and drivers have it, else anywhere.
find_library() {
    for folder in "$here/lib" /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib /usr/lib/x86_64-linux-gnu; do
        for file in "$folder/$1"*; do [ -e "$file" ] && { echo "$folder"; return; }; done
    done
    find / -xdev -name "$1*" -not -path '/proc/*' 2>/dev/null | head -n 1 | sed 's,/[^/]*$,,'
}
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
for library in libcublasLt.so.13 libnccl.so.2; do
    folder=$(find_library $library)
    echo "$library: ${folder:-not found}"
    [ -n "$folder" ] && LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$folder
done
SPW_CUDA_PLUGIN=$here/lib/spillway-cuda.so
CMOCKA_MESSAGE_OUTPUT=STDOUT
export LD_LIBRARY_PATH SPW_CUDA_PLUGIN CMOCKA_MESSAGE_OUTPUT
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null
about=$("$here/bin/test_cuda" --about --type bf16) || { echo "$about"; exit 77; }
echo "$about"
# What is left of --within, at most $1.
seconds() {
    left=$((until - $(date +%s)))
    [ "$left" -lt "$1" ] && echo "$left" || echo "$1"
}
step() { # name seconds command...
    name=$1 limit=$(seconds "$2") began=$(date +%s)
    shift 2
    [ "$limit" -le 0 ] && { echo "== $name: no time is left"; failed=1; return 1; }
    timeout -s KILL "$limit" "$@" >"$logs/$name" 2>&1
    rc=$?
    echo "== $name: $(($(date +%s) - began)) s"
    tail -n 40 "$logs/$name"
    [ $rc -eq 77 ] && { echo "== $name: skipped"; return 0; }
    [ $rc -ne 0 ] && { echo "== $name failed ($rc)"; failed=1; }
    return $rc
}
# Each argument, a command of this script, at the same time as the others; what they say comes in order.
beside() {
    pids='' n=0
    for part in "$@"; do
        n=$((n + 1))
        (failed=0; $part; exit $failed) >"$logs/.beside-$1-$n" 2>&1 &
        pids="$pids $!"
    done
    n=0
    for pid in $pids; do
        n=$((n + 1))
        wait "$pid" || failed=1
        cat "$logs/.beside-$1-$n"
    done
}
ops_in() { # type
    step "ops-$1" 200 "$here/bin/test_cuda" --type "$1" && return
    for test in $("$here/bin/test_cuda" --list); do
        step "ops-$1-$test" 60 "$here/bin/test_cuda" --type "$1" --only "$test"
    done
}
ops() { beside "ops_in fp32" "ops_in bf16" "ops_in fp16"; }
one_op() { for type in fp32 bf16 fp16; do step "$1-$type" 60 "$here/bin/test_cuda" --type $type --only "$1"; done; }
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
  "spillway": {"steps": 10, "seed": 1, "device": "cuda", "fill_device": "never"} }
JSON
    for by in nccl host; do
        "$here/bin/spillway" train "$work/c.json" -n 2 --quiet --set spillway.collectives=$by --set spillway.run_log="$work/$by.log" || return 1
        sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2 \3/p' "$work/$by.log" >"$work/$by"
    done
    [ "$(wc -l <"$work/nccl")" -eq 10 ] && cmp "$work/nccl" "$work/host"
}
gpus() { nvidia-smi -L 2>/dev/null | grep -c '^GPU'; }
links() {
    step links 200 "$here/bin/test_link" --gpu
    [ "$(gpus)" -ge 2 ] || return 0
    echo "== two ranks on two GPUs"
    (train_ranks) || { echo "== two ranks on two GPUs failed"; failed=1; }
}
# Without cuBLASLt products are this project's own, for any shape and slow: numbers of that would be of no use.
measured() {
    case $about in
    *cuBLASLt*) "$@" ;;
    *) echo "== no cuBLASLt was found: nothing is measured"; failed=1 ;;
    esac
}
# Products first where each must be cuBLASLt's own (one for which it has no way is named, and then they are measured as they come), and
# once more without its GELUs; these and attention by mma too, which all of these GPUs have.
rates() {
    step bench-gemm 150 env SPW_CUDA_BLAS=only "$here/bin/spillway" bench gemm --device cuda --seconds 0.2 ||
        step bench-gemm-any 150 "$here/bin/spillway" bench gemm --device cuda --seconds 0.2
    step bench-gemm-plain 150 env SPW_CUDA_BLAS=plain SPW_CUDA_HOPPER=0 "$here/bin/spillway" bench gemm --device cuda --seconds 0.2
    for kind in attention copy; do
        step "bench-$kind" 150 "$here/bin/spillway" bench $kind --device cuda --seconds 0.2
    done
    step bench-attention-mma 150 env SPW_CUDA_HOPPER=0 "$here/bin/spillway" bench attention --device cuda --seconds 0.2
    step bench-adam 60 "$here/bin/spillway" bench adam
    [ "$(gpus)" -lt 2 ] || step bench-comm 60 "$here/bin/spillway" bench comm -n "$(gpus)" --device cuda --seconds 0.5
}
whole_runs() { step "$1" 580 "$here/train.sh" "$here/bin/spillway" "$here/tokens.bin" "$1"; }
check_with() {
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    [ -n "$sanitizer" ] || { echo "== no compute-sanitizer here"; return; }
    step "$1" 400 env SPW_CUDA_BLAS=0 "$sanitizer" --tool "$1" --error-exitcode 1 "$here/bin/test_cuda" --small
}
do_step() {
    case $1 in
    ops | links) "$1" ;;
    ops=*) one_op "${1#ops=}" ;;
    rates) measured rates ;;
    runs) beside "whole_runs places" "whole_runs curves" "whole_runs kinds" ;;
    places | curves | kinds) whole_runs "$1" ;;
    speed | profile | offload | large) measured whole_runs "$1" ;;
    memcheck | racecheck) check_with "$1" ;;
    test) beside ops links "do_step runs" "check_with memcheck" ;;
    sanitize) for part in memcheck racecheck; do do_step $part; done ;;
    bench) for part in rates speed profile offload large; do do_step $part; done ;;
    all) for part in test bench racecheck; do do_step $part; done ;;
    *) echo "no step $1"; failed=1 ;;
    esac
}
for what in "${@:-all}"; do do_step "$what"; done
if [ -n "${OUT:-}" ]; then
    for log in "$logs"/*; do
        echo "== ${log##*/}"
        cat "$log"
    done >"$OUT/kit.log"
fi
exit $failed
