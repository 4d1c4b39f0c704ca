#!/bin/bash
# How long a step takes between hosts as spillway plan predicts it, over what it takes: two network namespaces with RANKS / 2 ranks each and a
# link between them of each RATE in turn, and a processor each. usage: bench_network.sh [RANKS [STEPS [RATE...]]]. For each rate spillway bench comm measures first,
# through the same link. Columns: what the first rank's host received a second while both gathered and summed up (GB/s), of a step with and
# without clipping seconds predicted and measured (the median from the third on) and their ratio, what the prediction is without the network, and
# the bound over the measured step. Needs the right to make namespaces, and tc.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway ranks=${1:-2} steps=${2:-10}
shift $(($# < 2 ? $# : 2))
[ $# -gt 0 ] || set -- 500mbit 2gbit 8gbit
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-network-XXXXXX")
export XDG_CACHE_HOME=$dir/cache
. tests/lib_hosts.sh
trap 'end_hosts; rm -rf "$dir"' EXIT
two_hosts 10.80.0 || { echo "$why"; exit 77; }
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 256, "n_embd": 512, "n_layer": 8, "n_head": 8},
  "data": {"path": ["README.md"], "seq_length": 256, "seed": 1}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3, "max_live_parameters": 16000000, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": $steps, "seed": 3, "device": "cpu", "eval_interval": 0, "compute_threads": 1, "optimizer_threads": 1,
               "run_log": "$dir/log", "comm_timeout": 300} }
JSON
port=29811
# all COMMAND...: on every rank; the first one's output comes out.
all() {
    local pids="" bad=0 ns r
    for ((r = 0; r < ranks; r++)); do
        ns=$(host_of $r "$ranks") core=0
        [ "$ns" = $b ] && core=1
        taskset -c $core ip netns exec $ns env RANK=$r WORLD_SIZE="$ranks" MASTER_ADDR=10.80.0.1 MASTER_PORT=$port SPW_HOST=$ns "$spw" "$@" >"$dir/rank-$r" 2>&1 </dev/null &
        pids="$pids $!"
    done
    for p in $pids; do wait "$p" || bad=1; done
    port=$((port + 3))
    [ $bad -eq 0 ] || { echo "$1 failed:"; head -n 3 "$dir"/rank-*; exit 1; }
    cat "$dir/rank-0"
}
# number KEY: of the plan's JSON
number() { sed -n "s/.*\"$1\": \([0-9.e+-]*\).*/\1/p" "$dir/plan" | head -n 1; }
echo "# bench network: $ranks ranks on 2 hosts, GPT-2 of 25.5 M parameters, 256 tokens a rank and step, $steps steps"
echo "#   link      clipping   received   predicted   measured   ratio   without network   bound/measured"
for rate; do
    slow_hosts "$rate" 1mb || exit 77
    all bench comm --json --size 16MiB --seconds 3 >"$dir/comm"
    got=$(sed -n 's/.*"from":"network","op":"both".*"host_gb_s":\([0-9.e+-]*\),.*/\1/p' "$dir/comm")
    for clip in 1e-6 0; do
        taskset -c 0 "$spw" plan "$dir/c.json" --json --set spillway.ranks="$ranks" --hosts 2 --set gradient_clipping=$clip >"$dir/plan" 2>"$dir/why" || { cat "$dir/why"; exit 1; }
        predicted=$(number step_s)
        without=$(taskset -c 0 "$spw" plan "$dir/c.json" --json --set spillway.ranks="$ranks" --hosts 2 --rate network=1e5 --set gradient_clipping=$clip 2>/dev/null |
            sed -n 's/.*"step_s": \([0-9.e+-]*\).*/\1/p')
        rm -f "$dir/log"
        all train "$dir/c.json" --quiet --set gradient_clipping=$clip >/dev/null
        sed -n 's/.*"step_s":\([0-9.e+-]*\),.*/\1/p' "$dir/log" | tail -n +3 | sort -g >"$dir/steps"
        measured=$(awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] }' "$dir/steps")
        bound=$(sed -n 's/.*bound \/ measured \([0-9]*\)%.*/\1/p' "$dir/rank-0")
        awk -v rate="$rate" -v clip=$clip -v got="$got" -v p="$predicted" -v m="$measured" -v w="$without" -v b="$bound" \
            'BEGIN { printf "  %-11s %8s %10.3f %11.3f %10.3f %7.2f %17.3f %15d%%\n", rate, (clip > 0 ? "always" : "none"), got, p, m, p / m, w, b }'
    done
done
