#!/bin/sh
# A training step with state on host and on nvme, interleaved in one run, medians of step seconds. usage: bench_step.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d "${1:-${TMPDIR:-/tmp}}/spw-bench-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
one() { # name tokens-per-step extra...
    name=$1
    shift
    OPENBLAS_NUM_THREADS=1 ./spillway train examples/demo.json --quiet --set "data.path=docs/DESIGN.md" --set spillway.steps=8 \
        --set spillway.checkpoint_dir= --set spillway.eval_interval=0 --set spillway.device_memory=auto --set spillway.run_log="$dir/log" \
        --set zero_optimization.offload_param.nvme_path="$dir/swap" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap" \
        --set spillway.host_memory=auto "$@" >/dev/null
    sed -n 's/.*"step":\([0-9]*\),.*"step_s":\([0-9.e-]*\),.*/\1 \2/p' "$dir/log" | awk '$1 > 2 { print $2 }' >>"$dir/$name"
}
median() { sort -g "$1" | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
host='--set zero_optimization.offload_param.device=cpu --set zero_optimization.offload_optimizer.device=cpu'
few='--set train_micro_batch_size_per_gpu=1 --set gradient_accumulation_steps=1'
for round in 1 2 3; do
    one host-many $host
    one nvme-many
    one host-few $host $few
    one nvme-few $few
done
echo "# bench step  10.8 M parameters, split, cpu device; medians of 18 steps, interleaved"
echo "#  tokens/step      host s      nvme s   nvme/host"
for k in many few; do
    tokens=2048
    [ $k = few ] && tokens=128
    awk -v t=$tokens -v h="$(median "$dir/host-$k")" -v n="$(median "$dir/nvme-$k")" 'BEGIN { printf "   %11d %11.4f %11.4f %11.3f\n", t, h, n, n / h }'
done
