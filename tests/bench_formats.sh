#!/bin/sh
# What lossy state formats cost in loss: the demo model (10.7 M parameters) trained on this repository's sources from one
# seed, in every format, with fewer tokens a step than the demo's. usage: bench_formats.sh [STEPS]
set -eu
cd "$(dirname "$0")/.."
steps=${1:-1000}
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-formats-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/text" # a copy: an edit meanwhile would be another text
for f in README.md docs/*.md runtime/*.c offload/*.c aio/*.c cpu_adam/*.c; do cp "$f" "$dir/text/$(echo "$f" | tr / -)"; done
echo "# bench formats  6 layers of width 384, $steps steps of 256 tokens, AdamW; eval on 5 % held out"
echo "#  format         eval loss   - split's   train loss (mean of the last 50 steps)"
for format in split mixed fp32 split-bf16 split-int8 split24-int8; do
    half=true
    [ $format = fp32 ] && half=false
    OPENBLAS_NUM_THREADS=1 ./spillway train examples/demo.json --quiet --set "data.path=$dir/text/*" \
        --set train_micro_batch_size_per_gpu=2 --set gradient_accumulation_steps=1 --set spillway.steps="$steps" --set scheduler.params.total_num_steps="$steps" \
        --set spillway.checkpoint_dir= --set spillway.eval_interval="$steps" --set spillway.eval_batches=64 --set spillway.device_memory=auto \
        --set spillway.host_memory=auto --set spillway.run_log="$dir/log" --set spillway.state_format="\"$format\"" --set bf16.enabled=$half \
        --set 'zero_optimization.offload_param={"device":"cpu"}' --set 'zero_optimization.offload_optimizer={"device":"cpu"}' >"$dir/out"
    sed -n 's/.*"eval_loss":\([0-9.]*\).*/\1/p' "$dir/log" | tail -n 1 >"$dir/eval"
    [ $format = split ] && cp "$dir/eval" "$dir/base"
    sed -n 's/.*"step":[0-9]*,"loss":\([0-9.]*\),.*/\1/p' "$dir/log" | tail -n 50 |
        awk -v f=$format -v e="$(cat "$dir/eval")" -v b="$(cat "$dir/base")" '{ s += $1 } END { printf "   %-13s %10.4f %11.4f %12.4f\n", f, e, e - b, s / NR }'
    rm -f "$dir/log"
done
