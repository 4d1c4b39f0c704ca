#!/bin/bash
# Training on the emulated cuda device in fp32, end to end: plan, gather, forward, backward, gradients to the host, update. The
# losses are those of the cpu device within 1e-4. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
[ -f "$build/emulated/spillway-cuda.so" ] || { echo "1..1"; echo "ok 1 - emulated training # SKIP no C++ compiler when this was built"; exit 77; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-emu-XXXXXX")
trap 'rm -rf "$dir"' EXIT
export OPENBLAS_NUM_THREADS=1
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
gpt2='"model_type": "gpt2", "vocab_size": 256, "n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 3'
llama='"model_type": "llama", "vocab_size": 256, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6,
  "num_key_value_heads": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "rope_theta": 10000.0'
n=0
losses() { sed -n 's/.*"step":[0-9]*,"loss":\([^,]*\).*/\1/p' "$1"; }
for family in gpt2 llama; do
    cat >"$dir/$family.json" <<JSON
{ "model": {${!family}},
  "data": {"path": ["$dir/text.txt"], "seq_length": 40, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 6, "seed": 3, "device": "cpu", "chunk_elems": 8192, "run_log": "$dir/$family.cpu"} }
JSON
    n=$((n + 1))
    if "$build/spillway" train "$dir/$family.json" >"$dir/out" 2>&1 &&
        SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so") SPW_CUDA_COMPUTE=fp32 "$build/spillway" train "$dir/$family.json" \
            --set spillway.device=cuda --set spillway.run_log="$dir/$family.cuda" >"$dir/out" 2>&1 &&
        paste <(losses "$dir/$family.cpu") <(losses "$dir/$family.cuda") |
        awk '{ d = $1 - $2; rows++; if (!(d < 1e-4 && d > -1e-4)) { print "# step " rows ": " $1 " on cpu, " $2 " on cuda"; bad = 1 } }
             END { exit bad || rows != 6 }'; then
        echo "ok $n - $family has the losses of the cpu device"
    else
        echo "not ok $n - $family has the losses of the cpu device"
        tail -n 5 "$dir/out" | sed 's/^/# /'
    fi
done
echo "1..$n"
