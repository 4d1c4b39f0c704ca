#!/bin/bash
# What ZeRO++'s savings save where hosts are joined by a slow network: two network namespaces with two ranks each and a link of RATE
# between them. usage: bench_zeropp.sh [RATE [STEPS]]. Rows are medians of a step's time on rank 0, bytes that came over the link, by
# the interface's own count, per step with what starting costs, and the loss, the mean of the last ten steps. Needs the right to make
# namespaces, and tc.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway rate=${1:-1gbit} steps=${2:-12}
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-zeropp-XXXXXX")
. tests/lib_hosts.sh
trap 'end_hosts; rm -rf "$dir"' EXIT
two_hosts 10.79.0 || { echo "$why"; exit 77; }
slow_hosts "$rate" 256kb || exit 77
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 384, "n_layer": 6, "n_head": 6},
  "data": {"path": ["README.md"], "seq_length": 64, "seed": 1},
  "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3, "max_live_parameters": 8000000, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": $steps, "seed": 3, "device": "cpu", "eval_interval": 0, "compute_threads": 1, "optimizer_threads": 1,
               "run_log": "$dir/log", "comm_timeout": 300} }
JSON
port=29711
# row NAME KEYS...: four ranks with these keys of zero_optimization.
row() {
    local name=$1 set=() pids="" bad=0 before after
    shift
    for key in "$@"; do set+=(--set "zero_optimization.$key"); done
    rm -f "$dir/log"
    before=$(ip netns exec $a cat /sys/class/net/v$a/statistics/rx_bytes)
    for r in 0 1 2 3; do
        ns=$(host_of $r 4)
        ip netns exec $ns env RANK=$r WORLD_SIZE=4 MASTER_ADDR=10.79.0.1 MASTER_PORT=$port SPW_HOST=$ns \
            "$spw" train "$dir/c.json" --quiet "${set[@]}" >"$dir/rank-$r" 2>&1 </dev/null &
        pids="$pids $!"
    done
    for p in $pids; do wait "$p" || bad=1; done
    port=$((port + 3))
    [ $bad -eq 0 ] || { echo "$name failed:"; head -n 3 "$dir"/rank-*; exit 1; }
    after=$(ip netns exec $a cat /sys/class/net/v$a/statistics/rx_bytes)
    sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.e+-]*\),.*"step_s":\([0-9.e+-]*\),.*/\3 \2/p' "$dir/log" | tail -n +3 >"$dir/steps"
    printf '  %-24s %9.3f %12.1f %10.4f\n' "$name" "$(sort -g "$dir/steps" | awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] }')" \
        "$(awk -v bytes=$((after - before)) -v steps="$steps" 'BEGIN { print bytes / steps / 1e6 }')" \
        "$(tail -n 10 "$dir/steps" | awk '{ sum += $2 } END { print sum / NR }')"
}
echo "# bench zeropp: 4 ranks on 2 hosts, $rate between them, 10.7 M parameters, 64 tokens a rank and step, $steps steps"
echo "#   keys                  step (s)   MB over link       loss"
qw=zero_quantized_weights=true hp=zero_hpz_partition_size=2 qg=zero_quantized_gradients=true
row "none" stage=3
row "quantized weights" $qw
row "kept weights" $hp
row "quantized gradients" $qg
row "all" $qw $hp $qg
row "groups of 2 (MiCS)" mics_shard_size=2
row "once to each host" mics_shard_size=4 mics_hierarchical_params_gather=true
row "none, again" stage=3
