#!/bin/sh
# Throughput over eleven host budgets, from the least that trains to one that holds everything, interleaved in rounds.
# Prints the medians of tokens/s; fails where one is more than 10 % below that of a smaller budget.
# usage: bench_sweep.sh [ROUNDS] [FOLDER]
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-5}
dir=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/spw-sweep-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
cp docs/DESIGN.md "$dir/text"
one() { # command, then settings
    command=$1
    shift
    ./spillway "$command" examples/demo.json --set "data.path=$dir/text" --set spillway.steps=8 --set spillway.checkpoint_dir= \
        --set spillway.eval_interval=0 --set spillway.device_memory=auto --set spillway.run_log="$dir/log" \
        --set data.seq_length=16 --set train_micro_batch_size_per_gpu=2 --set gradient_accumulation_steps=1 \
        --set zero_optimization.offload_param.nvme_path="$dir/swap" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap" "$@"
}
refused=0
one plan --no-measure --json --set spillway.host_memory=1MiB >"$dir/plan" 2>"$dir/refusal" || refused=$?
[ "$refused" -eq 3 ] || { echo "a budget of 1 MiB was not refused (exit $refused)"; cat "$dir/refusal"; exit 1; }
least=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["needs"])' "$dir/plan")
all=$(python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); print(p["needs"] + p["total"]["nvme"] + 7 * p["bytes"]["slots"]["host"])' "$dir/plan")
for round in $(seq "$rounds"); do
    for i in 0 1 2 3 4 5 6 7 8 9 10; do
        budget=$((least + (1 << 20) + (all - least) * i / 10)) # the process differs a little from start to start
        one train --quiet --set spillway.host_memory=$budget >"$dir/out"
        sed -n 's/.*"step":\([0-9]*\),.*"tokens_per_s":\([0-9.e+]*\),.*/\1 \2/p' "$dir/log" | awk '$1 > 3 { print $2 }' >>"$dir/$i"
        echo "$budget" >"$dir/budget.$i"
    done
done
echo "# median tokens/s of steps 4 to 8 in $rounds rounds, by spillway.host_memory; 32 tokens a step, disk-bound"
bad=0 best=0
for i in 0 1 2 3 4 5 6 7 8 9 10; do
    rate=$(sort -g "$dir/$i" | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }')
    awk -v b="$(cat "$dir/budget.$i")" -v r="$rate" -v best="$best" 'BEGIN {
        printf "%8.1f MiB %10.1f%s\n", b / 1048576, r, (r < 0.9 * best) ? "  more than 10 % below a smaller budget" : ""; exit (r < 0.9 * best) }' || bad=1
    best=$(awk -v r="$rate" -v best="$best" 'BEGIN { print (r > best) ? r : best }')
done
exit $bad
