#!/bin/bash
# spillway bench comm: its rows, its JSON, ranks on one host and on two, over links between emulated devices, wrong usage, and that a copy which
# loses a byte fails it; what it keeps, and that plan and train count with it. Nothing is timed. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-bench-comm-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
export XDG_CACHE_HOME=$dir/cache OPENBLAS_NUM_THREADS=1
rates=$dir/cache/spillway/rates.json
port=$((20000 + $$ % 10000))
# hosts RANKS ARGS...: bench comm by ranks that take themselves for those of two hosts; the first one's output.
hosts() {
    local pids="" bad=0 r
    for r in $(seq 0 $(($1 - 1))); do
        RANK=$r WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port SPW_HOST=$((2 * r / $1)) \
            timeout -s KILL 200 "$spw" bench comm "${@:2}" >"$dir/rank$r" 2>&1 </dev/null &
        pids="$pids $!"
    done
    for p in $pids; do wait "$p" || bad=1; done
    cp "$dir/rank0" "$dir/out"; port=$((port + 2))
    return $bad
}
json() { python3 -c 'import json, sys; head, *rows = [json.loads(l) for l in open(sys.argv[1])]; h = head["header"]; sys.exit(0 if eval(sys.argv[2]) else 1)' "$dir/out" "$1"; }
table() { grep -v '^#' "$dir/out"; }

check "two ranks" run bench comm -n 2 --smoke
check "the header" grep -q "^# bench comm  schema 1  spillway [0-9.]*  2 ranks on 1 host, 2 here  build " "$dir/out"
check "three rows, as one rank is asked" test "$(table | wc -l)" -eq 3
check "nothing is wrong" test -z "$(table | awk '$NF != 0')"
check "and nothing is kept of it" test ! -e "$rates"
check "three ranks, sizes of one's own, as JSON" run bench comm -n 3 --smoke --json --size 1MiB,300004
check "its header" json 'h["bench"] == "comm" and h["schema"] == 1 and h["ranks"] == h["ranks_here"] == 3 and h["hosts"] == 1 and not h["linked"]'
check "its rows" json '[(r["from"], r["op"], r["size"]) for r in rows] == [("ranks", o, s) for o in ("gather", "reduce", "both") for s in (1048576, 300004)]'
# Parts are whole blocks: of three ranks 21 and 6.
check "its numbers" json 'all(abs(r["gb_s"] * r["us"] / (2e-3 * 16384 * (21 if r["size"] > 1e6 else 6) * (2 if r["op"] == "both" else 1)) - 1) < 1e-3 and abs(r["host_gb_s"] / r["gb_s"] - 3) < 1e-3 and r["memcpy_gb_s"] > 0 and r["calls"] == 1 and r["wrong"] == 0 for r in rows)'
check "four ranks on two hosts" hosts 4 --smoke --json
check "reach those of their host and of the other" json 'h["hosts"] == 2 and h["ranks_here"] == 2 and [(r["from"], r["op"]) for r in rows] == [(f, o) for f in ("ranks", "network") for o in ("gather", "reduce", "both")]'
check "in memory beside memcpy, and by the network, with the right sums" json 'all(r["wrong"] == 0 and (r["memcpy_gb_s"] > 0) == (r["from"] == "ranks") and r["cpu_s_per_gb"] > 0 for r in rows)'
check "two ranks on two hosts" hosts 2 --smoke --json
check "have none on their own" json '[r["from"] for r in rows] == ["network"] * 3'
check "three ranks on two hosts" hosts 3 --smoke --json
check "of which one has no other on its own, and one none on the other host" json '[r["from"] for r in rows] == ["ranks"] * 3 + ["network"] * 3 and all(r["wrong"] == 0 for r in rows)'
check "only the first rank prints" test ! -s "$dir/rank1" -a ! -s "$dir/rank2"

# From device to device.
if [ -f "$build/emulated/spillway-cuda.so" ]; then
    export SPW_CUDA_PLUGIN SPW_NCCL SPW_EMULATE_DEVICES=4 SPW_EMULATE_STREAMS=late
    SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so") SPW_NCCL=$(realpath "$build/emulated/libnccl.so.2")
    check "four linked devices on two hosts" hosts 4 --smoke --json --device cuda
    check "by NCCL" json 'h["linked"] and "NCCL" in h["how"] and len(rows) == 6 and all(r["wrong"] == 0 and r["memcpy_gb_s"] == 0 for r in rows)'
    check "three on one" run bench comm -n 3 --smoke --json --device cuda
    check "too" json 'h["linked"] and len(rows) == 3 and all(r["wrong"] == 0 for r in rows)'
    check "through the host if that is asked for" run bench comm -n 2 --smoke --json --device cuda --collectives host
    check "it is" json 'not h["linked"] and all(r["wrong"] == 0 and r["memcpy_gb_s"] > 0 for r in rows)'
    SPW_EMULATE_DEVICES=1
    check "through the host where two share a device" run bench comm -n 2 --smoke --json --device cuda
    check "which is said" json 'not h["linked"] and "share a GPU" in h["how"]'
    expect 1 "share a GPU, and NCCL wants one for each" "and refused where links are asked for" bench comm -n 2 --smoke --device cuda --collectives nccl
    SPW_EMULATE_DEVICES=4 SPW_EMULATE_NCCL_FAIL=1:7 run bench comm -n 2 --smoke --device cuda
    check "a transfer that fails ends it" test $? -eq 1 -a -n "$(grep 'rank [01].*emulated system error' "$dir/err")"
    begin=$SECONDS
    SPW_EMULATE_DEVICES=4 SPW_EMULATE_NCCL_FAIL=1:1 run bench comm -n 2 --smoke --device cuda
    check "so does a link that cannot be made, at once" test $? -eq 1 -a -n "$(grep 'rank 1 gave up.*emulated system error' "$dir/err")" -a $((SECONDS - begin)) -lt 50
    unset SPW_CUDA_PLUGIN SPW_NCCL SPW_EMULATE_DEVICES SPW_EMULATE_STREAMS
else
    n=$((n + 1)); echo "ok $n - links between devices # SKIP no C++ compiler when this was built"
fi

# Usage, and what keeps all ranks from beginning: once.
one_without() { # auto, and the second one finds no GPU
    for r in 0 1; do
        SPW_CUDA_PLUGIN=$build/emulated/$([ $r -eq 0 ] && echo spillway-cuda || echo none).so RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            timeout -s KILL 100 "$spw" bench comm --smoke >"$dir/rank$r" 2>&1 </dev/null &
    done
    wait
    port=$((port + 2))
    cat "$dir/rank0" "$dir/rank1" >"$dir/err"
}
if [ -f "$build/emulated/spillway-cuda.so" ]; then
    one_without
    check "a GPU on one of two ranks" test "$(cat "$dir/err")" = "spillway: 1 of 2 ranks have a GPU: it is cpu or cuda on all of them"
fi
expect 2 "one rank has nobody to reach" "one rank" bench comm --smoke
expect 2 "-n takes 1 to 1024 ranks, not 0" "no ranks" bench comm -n 0
expect 2 "auto, host or nccl, not tcp" "other collectives" bench comm -n 2 --collectives tcp
expect 2 "is not a size" "no size" bench comm -n 2 --size many
expect 2 "is not a number above 0" "no time" bench comm -n 2 --seconds 0
expect 1 "for these ranks it has at least 32768" "too little for two ranks" bench comm -n 2 --size 4KiB
check "is said once" test "$(wc -l <"$dir/err")" -eq 1
expect 1 "the cpu device has no links" "the cpu device has no links" bench comm -n 2 --device cpu --collectives nccl
check "is said once, too" test "$(wc -l <"$dir/err")" -eq 1

# A memcpy that loses the last byte of large copies.
case $build in
*asan* | *tsan*) n=$((n + 1)); echo "ok $n - a broken copy # SKIP sanitizers replace memcpy" ;;
*)
    if lossy_copies 100000; then
        LD_PRELOAD=$dir/lossy.so "$spw" bench comm -n 2 --smoke --json >"$dir/out" 2>"$dir/err"
        check "a broken copy fails" test $? -eq 1 -a -n "$(grep 'are not what they should be' "$dir/err")"
        check "and is counted: an element on each rank" json '[r["wrong"] for r in rows] == [2, 0, 2]'
    else
        n=$((n + 1)); echo "ok $n - a broken copy # SKIP no compiler"
    fi
    ;;
esac

# What is kept, and counted with.
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 40, "n_embd": 96, "n_layer": 4, "n_head": 3},
  "data": {"path": ["$dir/text.txt"], "seq_length": 40, "seed": 1}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 3, "seed": 3, "device": "cpu", "run_log": "$dir/log", "checkpoint_dir": "", "eval_interval": 0} }
JSON
plan() { run plan "$dir/c.json" --json --set spillway.ranks="$@"; }
planned() { python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); s, t = p["seconds"], p["step"]; sys.exit(0 if eval(sys.argv[2]) else 1)' "$dir/out" "$1"; }
shows() { grep -q -- "$1" "$dir/out"; }
# All but the last value, which is of processor time.
set_rates() { sed -i '/"values"/,/\]/ s/^\( *\)[0-9.e+]*,$/\1'"$1"',/' "$rates"; }
check "a plan of two ranks" plan 2
check "knows no time between them" planned 's["ranks"] is None and s["network"] == 0 and p["step_s"] > 0'
check "and says what measures it" run plan "$dir/c.json" --set spillway.ranks=2
check "once" test "$(grep -c 'spillway bench comm -n 2 measures it' "$dir/out")" -eq 1
rm "$rates"
check "a run that is kept" run bench comm -n 2 --seconds 0.01 --size 1MiB
check "in the cache of rates" grep -q '|received|ranks|host|2"' "$rates"
check "a larger size before a smaller one" run bench comm -n 2 --seconds 0.01 --size 2MiB,64KiB --json
kept='next(e["values"] for k, e in json.load(open(sys.argv[2]))["entries"].items() if "|received|ranks|host|2" in k)'
check "is what is kept" python3 -c 'import json, sys; rows = [json.loads(l) for l in open(sys.argv[1])][1:]; sys.exit(0 if len(rows) == 6 and all(abs(r["gb_s"] * 1e9 / v - 1) < 1e-4 for r, v in zip([r for r in rows if r["size"] == 2 << 20], '"$kept"')) else 1)' "$dir/out" "$rates"
check "of what there is alone" test "$(grep -c 'received' "$rates")" -eq 1
set_rates 1e6
check "a plan of two ranks, by the megabyte a second" plan 2
check "has the time of its bytes" planned 'abs(s["ranks"] - (t["gather"] + t["reduce"]) / 1e6) < 1e-9 and p["bound_by"] == "ranks" and p["step_s"] == s["ranks"]'
check "a plan of three" plan 3
check "has none: there are as many on a host" planned 's["ranks"] is None'
check "training" run train "$dir/c.json" -n 2
check "is bound by it" shows 'bound [0-9]*% ranks'
logged() { python3 -c 'import json, sys; rows = [r for r in map(json.loads, open(sys.argv[1])) if "loss" in r and "resource_s" in r]; sys.exit(0 if len(rows) == 3 and all(abs(r["resource_s"]["ranks"] - (r["bytes"]["gather"] + r["bytes"]["reduce"]) / 1e6) < 1e-9 for r in rows) else 1)' "$dir/log"; }
check "by the bytes that it received" logged
check "kept by two hosts" hosts 4 --seconds 0.01 --size 1MiB
check "both ways" test "$(grep -c '|received|ranks|host|2"\||received|network|host|2"' "$rates")" -eq 2
check "four ranks on two such hosts" plan 4 --hosts 2
check "have both times" planned 's["ranks"] > 0 and s["network"] > 0'
check "four ranks on a host of eight" plan 8 --hosts 2
check "have no time" planned 's["ranks"] is None and s["network"] is None'
check "a network that is given, of 8 Mbit/s" plan 8 --hosts 2 --rate network=0.001
check "is shared by the four ranks of a host" planned 'abs(s["network"] - 4 * (t["gather_hosts"] + t["reduce_hosts"]) / 1e6) < 1e-9 and p["bound_by"] == "network"'
echo "1..$n"
