#!/bin/bash
# Training across hosts: two network namespaces joined by a pair of interfaces, two ranks in each; then the same under MPI with ranks
# that take each other for strangers. Losses are those of one rank. Needs iproute2 and the right to make namespaces, or mpirun. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway
export LSAN_OPTIONS="suppressions=$PWD/tests/lsan_mpi.txt:print_suppressions=0" ASAN_OPTIONS="${ASAN_OPTIONS:-}:fast_unwind_on_malloc=0" # leaks inside MPI, found by whole stacks
export OPENBLAS_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-net-XXXXXX")
. tests/lib_hosts.sh
trap 'end_hosts; rm -rf "$dir"' EXIT
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 1500; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"path": ["$dir/text.txt"], "seq_length": 16, "seed": 1},
  "train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-4}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 6, "seed": 3, "device": "cpu", "chunk_elems": 4096, "eval_interval": 3, "run_log": "$dir/log"} }
JSON
losses() { sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.e+-]*\),.*/\1 \2/p' "$1"; }
near() {
    paste -d' ' <(losses "$dir/log1") <(losses "$dir/log") |
        awk '{ d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > 1e-5 * $2) { print "# step " $1 ": " $2 ", here step " $3 ": " $4; bad = 1 } } END { if (NR != 6) print "# " NR " steps"; exit bad || NR != 6 }'
}
n=0
tell() {
    n=$((n + 1))
    if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; head -n 5 "$dir"/rank-* | sed 's/^/# /'; fi
}
timeout -s KILL 100 "$spw" train "$dir/tiny.json" --quiet >"$dir/rank-one" 2>&1
tell $? "one rank"
cp "$dir/log" "$dir/log1"
world() { # four ranks, two in each namespace; what else to set
    pids= bad=0
    rm -f "$dir/log"
    for r in 0 1 2 3; do
        ns=$(host_of $r 4)
        timeout -s KILL 100 ip netns exec $ns env RANK=$r WORLD_SIZE=4 MASTER_ADDR=10.78.0.1 MASTER_PORT=29611 SPW_HOST=$ns \
            "$spw" train "$dir/tiny.json" --quiet "$@" >"$dir/rank-$r" 2>&1 </dev/null &
        pids="$pids $!"
    done
    for p in $pids; do wait "$p" || bad=1; done
}
if two_hosts 10.78.0; then
    for stage in 0 1 2 3; do
        place=
        [ $stage -lt 3 ] && place="--set zero_optimization.offload_param.device=none"
        [ $stage -eq 0 ] && place="$place --set zero_optimization.offload_optimizer.device=none"
        world --set zero_optimization.stage=$stage $place
        tell $bad "stage $stage on two networked hosts"
        near
        tell $? "has the losses of one rank"
    done
    world --set spillway.checkpoint_dir="$dir/out"
    tell $bad "with a checkpoint"
    timeout -s KILL 60 "$spw" inspect "$dir/out" --digest >"$dir/rank-inspect" 2>&1
    tell $? "that is whole"
else
    n=$((n + 1))
    echo "ok $n - two networked hosts # SKIP $why"
fi
if command -v mpirun >/dev/null 2>&1 && [ -f "${SPW_BUILD:-build/release}/spillway-mpi.so" ]; then
    run="$spw train $dir/tiny.json --quiet"
    timeout -s KILL 100 mpirun --oversubscribe -n 2 -x LSAN_OPTIONS -x ASAN_OPTIONS -x SPW_HOST=first $run : -n 1 -x LSAN_OPTIONS -x ASAN_OPTIONS -x SPW_HOST=second $run >"$dir/rank-mpi" 2>&1
    tell $? "three ranks on two hosts under MPI"
    near
    tell $? "have the losses of one rank"
else
    n=$((n + 1))
    echo "ok $n - under MPI # SKIP no mpirun, or built without MPI"
fi
echo "1..$n"
