#!/bin/bash
# spillway bench io and tune from the command line: the table, the JSON, what train takes from tune, signals, wrong use.
cd "$(dirname "$0")/.." || exit 1
bin=${SPW_BUILD:-build/checked}/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-bio-XXXXXX")
cleanup() {
    mountpoint -q "$dir/tiny" 2>/dev/null && umount -l "$dir/tiny"
    rm -rf "$dir"
}
trap cleanup EXIT
mkdir "$dir/a" "$dir/b"
n=0
ok() { n=$((n + 1)); if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; [ -f "$dir/out" ] && tail -n 12 "$dir/out" | sed 's/^/# /'; fi; }
empty() { [ -z "$(ls -A "$1")" ]; }

timeout 120 "$bin" bench io "$dir/a" --smoke >"$dir/out" 2>"$dir/err"
ok $? "bench io --smoke"
for p in read write mixed swap; do
    grep -Eq "^  $p +131072 +8 +[a-z_]+ +[0-9]+ +[0-9]+ +[0-9.]+ .* 0$" "$dir/out"
    ok $? "a row for $p, nothing wrong"
done
head -n 1 "$dir/out" | grep -q '^# bench io  schema 1  spillway .*build '
ok $? "the header names schema, version and build"
empty "$dir/a"
ok $? "bench io leaves nothing behind"

backends=io_uring,threads
"$bin" doctor "$dir/a" | grep -q '^  OK  *io_uring ' || backends=auto,threads # containers forbid it
timeout 120 "$bin" bench io "$dir/a" "$dir/b" --smoke --json --pattern read,swap --block 64KiB,128KiB --depth 2,4 --backend $backends >"$dir/out" 2>"$dir/err"
ok $? "bench io --json over lists and two paths"
[ "$(wc -l <"$dir/out")" -eq 48 ]
ok $? "one object per row: 3 paths, 2 patterns, 2 blocks, 2 depths, 2 backends"
for key in pattern block depth gb_s p50_us p99_us cpu_s_per_gb path backend burst_gb_s settled_gb_s wrong; do
    [ "$(grep -c "\"$key\": " "$dir/out")" -eq 48 ]
    ok $? "every row has $key"
done
[ "$(grep -c '"path": "all"' "$dir/out")" -eq 16 ]
ok $? "rows for all paths at once"
"$bin" plot "$dir/out" -o "$dir/out.svg" >/dev/null 2>"$dir/err" && grep -q '<svg' "$dir/out.svg"
ok $? "plot draws them"
mkdir "$dir/"$'q"\xff'
timeout 120 "$bin" bench io "$dir/"$'q"\xff' --smoke --json --pattern read >"$dir/out" 2>"$dir/err" && grep -qF $'/q\\"\xef\xbf\xbd", ' "$dir/out"
ok $? "a path that is no UTF-8 is U+FFFD in JSON"

for sig in INT TERM; do
    "$bin" bench io "$dir/a" --seconds 20 --size 64MiB >/dev/null 2>"$dir/err" &
    pid=$!
    for _ in $(seq 1000); do ls -l /proc/$pid/fd 2>/dev/null | grep -q 'spw-bench-.*(deleted)' && break; sleep 0.05; done
    for _ in $(seq 20); do empty "$dir/a" && break; sleep 0.05; done # where probes have names, one may be there for a moment
    empty "$dir/a"
    ok $? "its file has no name, which a kill would leave"
    sleep 0.3
    kill -$sig $pid
    wait $pid
    [ $? -eq 1 ]
    ok $? "SIG$sig ends bench io with 1"
done

bin=$(realpath "$bin")
(cd "$dir" && exec timeout 200 "$bin" tune a "$dir/b" --seconds 5 --size 256MiB --params 7e9 -o aio.json) >"$dir/out" 2>"$dir/err"
ok $? "tune two paths, one of them from where it is"
grep -q '<- chosen' "$dir/out" && grep -q '####' "$dir/out"
ok $? "tune prints its candidates with a plot"
grep -Eq '^ +7.00 +98.0 +84.0 +[0-9.]+ +70.0 +70.0 +[0-9.]+$' "$dir/out"
ok $? "tune predicts a step of 7 B parameters: 98 GB read, 84 GB written"
empty "$dir/a" && empty "$dir/b"
ok $? "tune leaves nothing behind"
value_of() { sed -n "s/.*\"$1\": \"\{0,1\}\([a-z_0-9]*\).*/\1/p" "$dir/aio.json" | head -n 1; }
block=$(value_of block_size)
cat >"$dir/run.json" <<EOF
{"include": "aio.json", "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
 "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
 "data": {"path": "$PWD/README.md", "seq_length": 32}, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
 "spillway": {"steps": 2, "chunk_elems": 8192, "checkpoint_dir": "$dir/ckpt"}}
EOF
timeout 60 "$bin" train "$dir/run.json" >"$dir/out" 2>&1
ok $? "train takes what tune wrote"
grep -q "$dir/a" "$dir/out" && grep -q "$dir/b" "$dir/out"
ok $? "and swaps on both paths"
[ -n "$block" ] && grep -Eq "\"block_size\": *$block" "$dir"/ckpt/step-2/spillway.json
ok $? "with the block size that was chosen"

"$bin" bench io >/dev/null 2>&1; [ $? -eq 2 ]; ok $? "no path is wrong use"
"$bin" bench io "$dir/a" --block 5000 >/dev/null 2>"$dir/err"; [ $? -eq 2 ] && grep -q -- '--block cannot be 5000' "$dir/err"; ok $? "a block of 5000 is refused"
"$bin" bench io "$dir/a" --pattern rand >/dev/null 2>"$dir/err"; [ $? -eq 2 ] && grep -q 'rand' "$dir/err"; ok $? "an unknown pattern is refused"
"$bin" bench io "$dir/nowhere" --smoke >/dev/null 2>"$dir/err"; [ $? -eq 1 ] && grep -q "$dir/nowhere" "$dir/err"; ok $? "a missing folder is named"
"$bin" tune >/dev/null 2>&1; [ $? -eq 2 ]; ok $? "tune without a path is wrong use"
if [ "$(id -u)" = 0 ] && mkdir "$dir/tiny" && mount -t tmpfs -o size=20m tmpfs "$dir/tiny" 2>/dev/null; then
    "$bin" bench io "$dir/tiny" --smoke >/dev/null 2>"$dir/err"
    [ $? -eq 1 ] && grep -q 'needs 64.0 MiB' "$dir/err" && grep -q 'free' "$dir/err" && empty "$dir/tiny"
    ok $? "a full disk: needed and free bytes, nothing left"
    mount -o remount,size=100m "$dir/tiny"
    "$bin" bench io "$dir/tiny" --smoke --pattern read >/dev/null 2>"$dir/err"
    ok $? "bench io on tmpfs"
    grep -q 'cannot be checked' "$dir/err"
    ok $? "it says that nobody can check where the bytes went"
    umount -l "$dir/tiny" # the kernel may still be letting go of the ring's files
else
    n=$((n + 1)); echo "ok $n - tmpfs of 20 MiB # skip needs root"
fi
echo "1..$n"
