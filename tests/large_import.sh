#!/bin/bash
# make test-large: a Llama folder of 4 GB, generated, is imported, read and fine-tuned by processes that stay below 1 GiB each.
# Needs 13 GB of disk below DIR (default: this folder) and about two minutes. usage: large_import.sh [DIR]
set -eu
cd "$(dirname "$0")/.."
spw=$PWD/${SPW_BUILD:-build/release}/spillway
dir=$(mktemp -d "${1:-.}/spw-large-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
export OPENBLAS_NUM_THREADS=1
python3 - "$dir" <<'PY'
import json, os, random, struct, sys
d = sys.argv[1] + "/big"
os.mkdir(d)
H, I, L, V = 1024, 4096, 120, 256
shapes = {"model.embed_tokens.weight": [V, H], "model.norm.weight": [H], "lm_head.weight": [V, H]}
for l in range(L):
    p = "model.layers.%d." % l
    shapes.update({p + "self_attn.%s_proj.weight" % x: [H, H] for x in "qkvo"})
    shapes.update({p + "mlp.gate_proj.weight": [I, H], p + "mlp.up_proj.weight": [I, H], p + "mlp.down_proj.weight": [H, I],
                   p + "input_layernorm.weight": [H], p + "post_attention_layernorm.weight": [H]})
rng = random.Random(1)
# bf16 of magnitude 1/128 to 1/32, in a block that tensors begin at different places of
block = b"".join(struct.pack("<H", rng.choice((0, 0x8000)) | 0x3c00 + rng.randrange(256)) for _ in range(1 << 19))
head, at = {"__metadata__": {"format": "pt"}}, 0
for name, shape in shapes.items():
    size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
    at += size
text = json.dumps(head).encode()
text += b" " * (-len(text) % 8)
with open(d + "/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for i, name in enumerate(shapes):
        begin, end = head[name]["data_offsets"]
        turn = 2 * (i * 7919 % (1 << 18))
        piece = block[turn:] + block[:turn]
        while begin < end:
            n = min(end - begin, len(piece))
            f.write(piece[:n])
            begin += n
json.dump({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": H, "intermediate_size": I,
           "num_hidden_layers": L, "num_attention_heads": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
           "torch_dtype": "bfloat16"}, open(d + "/config.json", "w"))
print("a folder of %.2f GB" % (at / 1e9))
assert at > 4e9
PY
# within MIB COMMAND...: its output in $dir/out; fails unless it ends well and stayed below
within() {
    python3 - "$dir/out" "$@" <<'PY'
import resource, subprocess, sys, time
begin = time.monotonic()
rc = subprocess.run(sys.argv[3:], stdout=open(sys.argv[1], "w")).returncode
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print("%s %s: exit %d, %.0f s, peak %.0f MiB of %s" % ("ok" if rc == 0 and peak < int(sys.argv[2]) else "not ok", sys.argv[4], rc,
                                                 time.monotonic() - begin, peak, sys.argv[2]), flush=True)
sys.exit(0 if rc == 0 and peak < int(sys.argv[2]) else 1)
PY
}
within 64 "$spw" import "$dir/big" --to "$dir/again" --shard-size 1GB
[ "$(find "$dir/again" -name 'model-*.safetensors' | wc -l)" -ge 4 ] || { echo "not ok: no shards"; exit 1; }
within 64 "$spw" inspect "$dir/big" --digest
awk '/\[/ { print $1, $2, $NF }' "$dir/out" | sort >"$dir/one"
within 64 "$spw" inspect "$dir/again" --digest
awk '/\[/ { print $1, $2, $NF }' "$dir/out" | sort >"$dir/two"
[ -s "$dir/one" ] && cmp "$dir/one" "$dir/two" || { echo "not ok: other tensors"; exit 1; }
echo "ok $(wc -l <"$dir/one") tensors are the same"
rm -rf "$dir/again"
head -c 20000 README.md >"$dir/text"
cat >"$dir/c.json" <<JSON
{ "model": {"path": "$dir/big"}, "data": {"path": ["$dir/text"], "seq_length": 32, "tokenizer": "bytes"},
  "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 2, "device": "cpu", "host_memory": "512MiB", "device_memory": "448MiB",
               "lora": {"rank": 4, "targets": ["[qv]_proj"]}} }
JSON
within 1024 "$spw" train "$dir/c.json"
grep -E "^(start|[0-9]+ steps|  weights|  peak)" "$dir/out"
echo "ok: 4 GB within 1 GiB"
