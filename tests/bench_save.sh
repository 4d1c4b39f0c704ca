#!/bin/sh
# What saving costs a whole run: seconds of 24 steps that save three times, in the background and waiting, over those of the same
# steps without a save, the three in turn in each round. Prints the median and the range of the rounds' ratios.
# With RATE=bytes/s: saves of a model 14 times as large, in the background, to a disk of 6 GB that takes no more (a loop device, bounded by
# the root cgroup; root, version 1), and how long the slowest step took beside the slowest of a run without saves. Fails
# where the median of that is above 3, or losses differ.
# usage: bench_save.sh [ROUNDS] [FOLDER]
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-5}
dir=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/spw-save-XXXXXX")
loop= bounded= bound=/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device
cleanup() {
    [ -z "$loop" ] || { echo "$bounded 0" >"$bound"; umount "$dir/ckpt"; losetup -d "$loop"; } 2>/dev/null || true
    rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
mkdir "$dir/swap"
cp docs/DESIGN.md "$dir/text"
same_losses() { # of the run that has ended, and of the first
    sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.]*\),.*/\1 \2/p' "$dir/log" >"$dir/losses"
    [ -s "$dir/first" ] || cp "$dir/losses" "$dir/first"
    cmp -s "$dir/first" "$dir/losses" || { echo "the losses differ" >&2; exit 1; }
}
seconds() { # settings; 1 if the losses are not those of the runs before
    rm -rf "$dir/ckpt"
    ./spillway train examples/demo.json --quiet --set "data.path=$dir/text" --set spillway.steps=24 --set spillway.eval_interval=0 \
        --set spillway.save_at_end=false --set spillway.run_log="$dir/log" --set spillway.host_memory=auto --set spillway.device_memory=auto \
        --set data.seq_length=64 --set train_micro_batch_size_per_gpu=4 --set gradient_accumulation_steps=2 --set spillway.keep_last=1 \
        "$@" >"$dir/out" || { cat "$dir/out" >&2; exit 1; }
    same_losses
    sed -n 's/^24 steps in \([0-9.]*\) s.*/\1/p' "$dir/out"
}
slow() { # settings: seconds of the whole run, and of its slowest step
    rm -rf "$dir/ckpt/"step*
    ./spillway train examples/demo.json --quiet --set "data.path=$dir/text" --set spillway.steps=23 --set spillway.eval_interval=0 \
        --set spillway.save_at_end=false --set spillway.run_log="$dir/log" --set spillway.host_memory=auto --set spillway.device_memory=auto \
        --set model.n_embd=1024 --set model.n_layer=12 --set model.n_head=16 --set train_micro_batch_size_per_gpu=1 --set spillway.keep_last=1 \
        --set zero_optimization.offload_param.device=cpu --set zero_optimization.offload_optimizer.device=cpu --set spillway.chunk_elems=auto \
        "$@" >"$dir/out" || { cat "$dir/out" >&2; exit 1; }
    same_losses
    echo "$(sed -n 's/^23 steps in \([0-9.]*\) s.*/\1/p' "$dir/out") $(sed -n 's/^{"step":.*"step_s":\([0-9.]*\),.*/\1/p' "$dir/log" | sort -g | tail -n 1)"
}
if [ "${RATE:-0}" -gt 0 ]; then
    truncate -s 6G "$dir/disk" && mkfs.ext4 -q -F "$dir/disk" && mkdir "$dir/ckpt" && loop=$(losetup -f --show --direct-io=on "$dir/disk") &&
        mount "$loop" "$dir/ckpt" && bounded=$(cat "/sys/block/${loop#/dev/}/dev") && echo "$bounded $RATE" >"$bound" ||
        { echo "bench save: no loop device can be bounded here (RATE needs root and blkio of version 1)" && exit 77; }
    echo "# 23 steps of 256 tokens, 152 M parameters, state in memory, two saves of 2.1 GB to a disk of $RATE bytes/s, $rounds rounds in turn"
    for round in $(seq "$rounds"); do
        without=$(slow --set spillway.checkpoint_dir=)
        saves=$(slow --set spillway.checkpoint_dir="$dir/ckpt" --set spillway.checkpoint_interval=10)
        echo "$without $saves" | awk '{ printf "without  %6.1f s, slowest step %.2f s\nsaves    %6.1f s, slowest step %.2f s\n", $1, $2, $3, $4 }'
        echo "$without $saves" | awk '{ print $4 / $2 }' >>"$dir/ratios"
    done
    sort -g "$dir/ratios" | awk '{ v[NR] = $1 } END { r = v[int((NR + 1) / 2)]; printf "the slowest step of those that save over the others, median: %.2f\n", r; exit !(r > 0 && r <= 3) }' ||
        { echo "# FAILED: more than three times as long" && exit 1; }
    exit 0
fi
saves="--set spillway.checkpoint_dir=$dir/ckpt --set spillway.checkpoint_interval=8"
echo "# 24 steps of 512 tokens, 10.8 M parameters, three saves of 129 MB; time over that without saves, $rounds rounds in turn"
for place in nvme cpu; do
    p="--set zero_optimization.offload_param={\"device\":\"$place\",\"nvme_path\":\"$dir/swap\"}
       --set zero_optimization.offload_optimizer={\"device\":\"$place\",\"nvme_path\":\"$dir/swap\"}"
    rm -f "$dir/ratios"
    for round in $(seq "$rounds"); do
        none=$(seconds $p --set spillway.checkpoint_dir=)
        back=$(seconds $p $saves)
        wait=$(seconds $p $saves --set spillway.save_in_background=false)
        awk -v n="$none" -v b="$back" -v w="$wait" 'BEGIN { print b / n, w / n, n }' >>"$dir/ratios"
    done
    for k in 1 2; do
        sort -g -k $k "$dir/ratios" | awk -v k=$k -v place="$place" '{ v[NR] = $k } END {
            printf "%-4s %-10s %.3f  (%.3f to %.3f)\n", place, k == 1 ? "background" : "waiting", v[int((NR + 1) / 2)], v[1], v[NR] }'
    done
done
