#!/bin/sh
# What gradients on nvme cost: time of a step, bytes that the disk moves, and host memory, over those with gradients in host
# memory, all other state on nvme in both; medians of ROUNDS runs of ten steps in turn. Fails where the losses are not the same
# digits, or a step takes a tenth longer than its bytes say.
# usage: bench_gradients.sh [ROUNDS] [FOLDER]
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-4}
dir=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/spw-gradients-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
cp docs/DESIGN.md "$dir/text"
run() { # log, settings: appends the medians of steps 4 to 10: seconds, bytes, host memory at most
    log=$1
    shift
    ./spillway train examples/demo.json --quiet --set "data.path=$dir/text" --set spillway.steps=10 --set spillway.eval_interval=0 \
        --set 'model={"model_type":"gpt2","vocab_size":256,"n_positions":128,"n_embd":768,"n_layer":12,"n_head":12}' \
        --set train_micro_batch_size_per_gpu=2 --set gradient_accumulation_steps=1 --set spillway.checkpoint_dir= --set spillway.run_log="$dir/log" \
        --set zero_optimization.offload_param.nvme_path="$dir/swap" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap" \
        --set spillway.host_memory=auto --set spillway.device_memory=auto --set spillway.weight_slots=8 --set spillway.record_slots=8 \
        --set spillway.chunk_elems=1048576 "$@" >"$dir/out" || { cat "$dir/out" >&2; exit 1; }
    sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.]*\),.*/\1 \2/p' "$dir/log" >"$dir/losses"
    [ -s "$dir/first" ] || cp "$dir/losses" "$dir/first"
    cmp -s "$dir/first" "$dir/losses" || { echo "the losses differ" >&2; exit 1; }
    for field in '"step_s":' '"bytes":{"nvme_read":' '"nvme_write":' '"host":'; do
        # nvme_write: seconds first, then bytes; of each line the last
        sed -n "/\"step\":/s/.*$field\([0-9.e+-]*\).*/\1/p" "$dir/log" | tail -n 7 | sort -g | sed -n 4p
    done | tr '\n' ' ' | awk '{ print $1, $2 + $3, $4 }' >>"$log"
}
echo "# 85 M parameters, 256 tokens a step, all state on nvme; gradients on nvme over gradients in host memory, $rounds rounds in turn"
bad=0
for kind in "fp32, waits" "bf16, waits" "fp32, ahead" "fp32, not clipped"; do
    rm -f "$dir/first" "$dir/host" "$dir/nvme"
    set --
    case $kind in
    bf16*) set -- --set spillway.grad_dtype=bf16 --set spillway.update_ahead=never ;;
    *waits) set -- --set spillway.update_ahead=never ;;
    *ahead) set -- --set spillway.update_ahead=always --set gradient_clipping=1e9 ;;
    *not*) set -- --set gradient_clipping=0 ;;
    esac
    for round in $(seq "$rounds"); do
        run "$dir/host" "$@"
        run "$dir/nvme" "$@" --set spillway.gradients=nvme
    done
    paste -d ' ' "$dir/host" "$dir/nvme" | awk '{ print $4 / $1, $5 / $2, $3 / 2^20, $6 / 2^20 }' | sort -g >"$dir/ratios"
    awk -v kind="$kind" '{ t[NR] = $1; b[NR] = $2; h = $3; n = $4 } END {
        time = (t[int((NR + 1) / 2)] + t[int(NR / 2) + 1]) / 2
        printf "%-18s step %.2f (%.2f to %.2f), bytes %.2f, host memory %.0f MiB, not %.0f\n", kind, time, t[1], t[NR], b[1], n, h
        exit time > 1.1 * b[1] }' "$dir/ratios" || bad=1
done
[ $bad = 0 ] || echo "a step takes longer than its bytes say" >&2
exit $bad
