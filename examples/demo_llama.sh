#!/bin/sh
# make demo-llama: a small Llama as a Hugging Face folder, fine-tuned with LoRA on other text, merged and exported again. It
# fails unless the merged folder is better at the new text than the base. usage: demo_llama.sh [TEXT-FILE-OR-GLOB]
set -eu
cd "$(dirname "$0")/.."
out=demo-llama-out
new=${1:-"docs/*.md"}
export OPENBLAS_NUM_THREADS=1
rm -rf $out
mkdir -p $out/swap
cat >$out/base.json <<JSON
{ "model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-5},
  "data": {"path": ["*/*.c", "*/*.h", "*/*/*.c"], "seq_length": 128, "validation_split": 0},
  "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 120}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$out/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$out/swap"}},
  "spillway": {"steps": 120, "device": "cpu", "chunk_elems": 65536, "checkpoint_dir": "$out/first"} }
JSON
echo "--- a Llama of 1.7 M parameters learns C ---"
./spillway train $out/base.json | grep -E '^(spillway|step|[0-9]+ steps)'
./spillway export $out/first --to $out/base

echo "--- the folder is fine-tuned on $new: adapters of rank 16, everything else frozen ---"
./spillway train $out/base.json --set "model={\"path\":\"$out/base\"}" --set "data.path=$new" --set spillway.steps=80 \
    --set 'spillway.lora={"rank": 16, "alpha": 32, "targets": ["[qkvo]_proj", "gate_proj", "up_proj", "down_proj"]}' \
    --set scheduler.params.total_num_steps=80 --set spillway.checkpoint_dir=$out/adapted |
    grep -E '^(spillway|start|step|[0-9]+ steps|  optimizer records|  gradients)'
./spillway export $out/adapted --to $out/merged
./spillway inspect $out/merged | tail -n 3

echo "--- its text, and both on $new ---"
./spillway generate $out/merged --prompt "The plan " --tokens 100 --temperature 0.7 --top-p 0.9
echo
loss() { ./spillway eval "$1" --data "$new" --seq-length 128 --batches 40 --batch-size 4 --json | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p'; }
base=$(loss $out/base)
merged=$(loss $out/merged)
echo "loss of the base folder $base, of the merged one $merged"
awk -v a="$base" -v b="$merged" 'BEGIN { exit !(b > 0 && b < a) }'
