#!/bin/bash
# What sharing sequences costs where nothing is to be gained but memory: two ranks of this machine, a processor each, that have a sequence each or share both
# (sequence_parallel_size 2), in turn. usage: bench_sequences.sh [ROUNDS [TOKENS...]]. Rows are medians over all rounds' steps but the first two: tokens a
# second shared over own, what of a shared step waited for the other rank, and planned device memory without weights and gradients.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway rounds=${1:-5}
shift
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-sequences-XXXXXX")
trap 'rm -rf "$dir"' EXIT
cat docs/*.md >"$dir/text.txt"
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
            "num_key_value_heads": 2, "max_position_embeddings": 8192},
  "data": {"path": ["$dir/text.txt"], "seed": 1}, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
  "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 8, "seed": 3, "device": "cpu", "eval_interval": 0, "compute_threads": 1, "optimizer_threads": 1, "recompute": "always"} }
JSON
median() { sort -g | awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] }'; }
memory() { awk '/activation|working/ { for (i = 2; i < NF; i++) if ($(i + 1) ~ /^[KMG]iB$/) { f = $(i + 1) == "KiB" ? 1 : $(i + 1) == "MiB" ? 1024 : 1048576; sum += $i * f; break } } END { printf "%.1f", sum / 1024 }' "$dir/out$1"; }
run() { # SHARERS TOKENS
    rm -f "$dir/log"
    "$spw" train "$dir/c.json" -n 2 --set spillway.run_log="$dir/log" --set sequence_parallel_size="$1" --set data.seq_length="$2" >"$dir/out$1" 2>&1 ||
        { tail -n 5 "$dir/out$1"; exit 1; }
    sed -n 's/.*"step":[0-9]*,"loss":.*"step_s":\([0-9.e+-]*\),.*/\1/p' "$dir/log" | tail -n +3 >>"$dir/steps$1"
    sed -n 's/.*"step":[0-9]*,"loss":.*"collectives":\([0-9.e+-]*\).*/\1/p' "$dir/log" | tail -n +3 >>"$dir/waits$1"
}
echo "# bench sequences: 2 ranks, $rounds rounds, median of steps"
printf '#   %8s %16s %14s %14s %14s\n' tokens "shared over own" "waits of it" "MiB, own" "MiB, shared"
for tokens in "${@:-1024}"; do
    for t in $tokens; do
        rm -f "$dir"/steps* "$dir"/waits*
        for _ in $(seq "$rounds"); do
            run 1 "$t"
            run 2 "$t"
        done
        own=$(median <"$dir/steps1") shared=$(median <"$dir/steps2") waits=$(median <"$dir/waits2")
        printf '    %8d %16.3f %13.1f%% %14s %14s\n' "$t" "$(echo "$own $shared" | awk '{ print $1 / $2 }')" "$(echo "$waits $shared" | awk '{ print 100 * $1 / $2 }')" \
            "$(memory 1)" "$(memory 2)"
    done
done
