#!/bin/sh
# What updates before the norm is known are worth: a training whose state streams from disk and whose steps do not clip, with updates that
# wait for the norm, with updates ahead of it, and without clipping (the best that could be), and with updates that are made a step late while
# every step clips, which waiting takes as long for as if none did; in turns. Shown are medians over all runs'
# steps from the fifth on: the step, its ratio to the one that waits, and what was read and written. Fails where updating ahead takes more
# than 1.05 of the time of waiting, or nothing is updated ahead, or updates that are late take longer with 128
# tokens (1.15 with 32, where the disk has too much to do beside the backward pass alone, and in memory). "memory" has its state in host memory, one thread that computes and one
# that updates, 16 tokens, so that updates take a good part of a step, as beside a GPU, and memory beside the state for a log of 2.25 bytes
# per parameter and no more. It fails above 1.00. RATE=bytes/s bounds the disk each way where a cgroup can (version 1, root): what is noise of the disk
# goes, and how computing and disk compare can be chosen.
# usage: bench_ahead.sh [ROUNDS] [FOLDER]
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-5}
dir=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/spw-bench-XXXXXX")
group=/sys/fs/cgroup/blkio/spw-bench-$$
cleanup() {
    echo $$ >/sys/fs/cgroup/blkio/cgroup.procs 2>/dev/null || true
    rmdir "$group" 2>/dev/null || true
    rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
if [ "${RATE:-0}" -gt 0 ]; then
    part=$(stat -c '%Hd:%Ld' "$dir")
    whole=$(cat "/sys/dev/block/$part/../dev" 2>/dev/null || echo "$part")
    mkdir "$group" && echo "$whole $RATE" >"$group/blkio.throttle.read_bps_device" &&
        echo "$whole $RATE" >"$group/blkio.throttle.write_bps_device" && echo $$ >"$group/cgroup.procs" ||
        { echo "bench ahead: no cgroup bounds the disk here (RATE needs root and blkio of version 1)" && exit 77; }
fi
mkdir "$dir/swap"
export XDG_CACHE_HOME="$dir/cache"
cp docs/DESIGN.md "$dir/text"
one() { # name case clipping ahead: lines of step_s read write ahead done
    tokens=$2 where=
    if [ "$2" = memory ]; then
        tokens=16
        where="--set zero_optimization.offload_param.device=cpu --set zero_optimization.offload_optimizer.device=cpu
            --set spillway.host_memory=1010MiB --set spillway.compute_threads=1 --set spillway.optimizer_threads=1"
    fi
    ./spillway train examples/demo.json --set "data.path=$dir/text" --set spillway.checkpoint_dir= --set spillway.eval_interval=0 \
        --set spillway.device_memory=auto --set spillway.run_log="$dir/log" --set spillway.host_memory=400MiB \
        --set zero_optimization.offload_param.nvme_path="$dir/swap" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap" \
        --set model.n_embd=768 --set model.n_layer=8 --set model.n_head=12 --set train_micro_batch_size_per_gpu=1 \
        --set gradient_accumulation_steps=1 --set "data.seq_length=$tokens" $where --set "gradient_clipping=$3" --set "spillway.update_ahead=$4" \
        --set "spillway.delayed_update=${5:-0}" --set spillway.steps=16 --quiet >/dev/null
    sed -n 's/.*"step":\([0-9]*\),.*"step_s":\([0-9.e-]*\),.*"nvme_read":\([0-9]*\),"nvme_write":\([0-9]*\),.*/\1 \2 \3 \4/p' "$dir/log" >"$dir/one"
    sed -n 's/.*"step":.*"updates":{"done":\([0-9]*\),"ahead":\([0-9]*\),.*/\1 \2/p' "$dir/log" >"$dir/two"
    [ -s "$dir/two" ] || sed 's/.*/1 0/' "$dir/one" >"$dir/two"
    paste -d' ' "$dir/one" "$dir/two" | awk '$1 > 4' >>"$dir/$1-$2"
}
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
column() { awk -v k="$2" '{ print $k }' "$dir/$1" | median; }
for round in $(seq "$rounds"); do
    for case in 32 128 memory; do
        how=auto
        [ $case != memory ] || how=always
        case $((round % 3)) in
            0) one waits $case 1e9 never; one ahead $case 1e9 $how; one unclipped $case 0 auto; one late $case 1e-3 never 1 ;;
            1) one late $case 1e-3 never 1; one ahead $case 1e9 $how; one unclipped $case 0 auto; one waits $case 1e9 never ;;
            2) one unclipped $case 0 auto; one waits $case 1e9 never; one late $case 1e-3 never 1; one ahead $case 1e9 $how ;;
        esac
    done
done
failed=
echo "# bench ahead  56.9 M parameters, split, cpu device; medians of $rounds runs of 12 steps, interleaved${RATE:+; disk at $RATE bytes/s each way}"
echo "#  tokens  updates         step s  of waiting  read MB  written MB  ahead"
for tokens in 32 128 memory; do
    most=1.05
    [ $tokens != memory ] || most=1.00
    for name in waits ahead unclipped late; do
        f=$name-$tokens
        ratio=$(awk -v a="$(column $f 2)" -v b="$(column waits-$tokens 2)" 'BEGIN { print a / b }')
        printf '   %6s  %-12s %9.4f %11.3f %8.0f %11.0f %5.0f%%\n' $tokens $name "$(column $f 2)" "$ratio" \
            "$(column $f 3 | awk '{ print $1 / 1e6 }')" "$(column $f 4 | awk '{ print $1 / 1e6 }')" \
            "$(awk '{ print 100 * $6 / ($5 > 0 ? $5 : 1) }' "$dir/$f" | median)"
        [ $name != ahead ] || awk -v r="$ratio" -v most=$most '{ ahead += $6 } END { exit !(r > 0 && r <= most && ahead > 0) }' "$dir/$f" ||
            failed="$failed $tokens"
        [ $name != late ] || awk -v r="$ratio" -v t=$tokens 'BEGIN { exit !(r > 0 && r <= (t == "128" ? 1 : 1.15)) }' || failed="$failed $tokens(late)"
    done
done
[ -z "$failed" ] || { echo "# FAILED: ahead took more than 1.05 of the time of waiting (memory: 1.00) or never came to be, or late took longer with 128 tokens (else 1.15 of it): $failed" && exit 1; }
