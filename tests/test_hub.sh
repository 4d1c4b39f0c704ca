#!/bin/bash
# A model of the hub by its name, in a cache as "hf download" makes it, whose files are links: trained from, read and exported; its adapters are called
# by that name, and find it by it. TAP.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-hub-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
refuses() { local says=$1; shift; ! run "$@" && grep -qF "$says" "$dir/err"; }
export HF_HUB_CACHE="$dir/cache"
head -c 20000 docs/DESIGN.md >"$dir/text"
cat >"$dir/start.json" <<EOF
{"model": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
 "vocab_size": 256, "max_position_embeddings": 64}, "data": {"path": ["$dir/text"], "seq_length": 32}, "train_micro_batch_size_per_gpu": 1,
 "bf16": {"enabled": true}, "spillway": {"steps": 1, "device": "cpu", "checkpoint_dir": "$dir/start"}}
EOF
on() { run train "$dir/start.json" --quiet --set 'model={"path":"owner/name"}' --set spillway.checkpoint_dir="$dir/$1" "${@:2}"; }
check "there is none yet" refuses "no model of that name in the Hugging Face cache ($dir/cache): \"hf download owner/name\" fetches it there" plan "$dir/start.json" \
    --set 'model={"path":"owner/name"}'
run train "$dir/start.json" --quiet && run export "$dir/start" --to "$dir/plain"
model=$dir/cache/models--owner--name
mkdir -p "$model/blobs" "$model/refs" "$model/snapshots/ab12"
for f in config.json model.safetensors; do
    mv "$dir/plain/$f" "$model/blobs/$f" && ln -s "../../blobs/$f" "$model/snapshots/ab12/$f"
done
printf ab12 >"$model/refs/main"
check "it is looked at" run inspect owner/name
check "text is drawn" run generate owner/name --prompt abc --tokens 3
check "it is evaluated at its commit" run eval owner/name@ab12 --data "$dir/text" --seq-length 32
check "another one is not there" refuses "the Hugging Face cache has of this model (1 commit) is not what is named" eval owner/name@cd34 --data "$dir/text"
check "it is exported" run export owner/name --to "$dir/copy"
check "as it is" cmp "$dir/copy/model.safetensors" "$model/blobs/model.safetensors"
check "it is trained" on whole
check "adapters are" on held --set 'spillway.lora={"rank":2,"targets":["q_proj"]}'
check "and are called by its name" grep -q '"base_model_name_or_path": "owner/name"' "$dir/held/step-1/adapter_config.json"
check "and its commit" grep -q '"revision": "ab12"' "$dir/held/step-1/adapter_config.json"
check "alone too" on named --set 'spillway.lora={"rank":2,"targets":["q_proj"]}' --set spillway.checkpoint_base=false
check "by the same name" cmp "$dir/held/step-1/adapter_config.json" "$dir/named/step-1/adapter_config.json"
mkdir "$dir/alone" && cp "$dir"/named/step-1/adapter_* "$dir/alone"
check "those are merged" run export "$dir/alone" --to "$dir/merged"
check "to what the checkpoint gives" run export "$dir/held" --to "$dir/merged-held"
check "the same" cmp "$dir/merged/model.safetensors" "$dir/merged-held/model.safetensors"
printf ef56 >"$model/refs/main" && mkdir "$model/snapshots/ef56"
check "main may be another one since" run export "$dir/alone" --to "$dir/merged-since"
check "and they are merged into theirs" cmp "$dir/merged/model.safetensors" "$dir/merged-since/model.safetensors"
mv "$model/snapshots/ab12" "$dir/ab12" && cp -r "$dir/copy/." "$model/snapshots/ef56"
check "without theirs they are refused, whatever main is" refuses "no weights of that model: --model FOLDER" export "$dir/alone" --to "$dir/merged-gone"
mkdir -p "$dir/owner/name" && spw=$(realpath "$spw") && cd "$dir" || exit 1
check "what lies at the path itself is meant by it" refuses "owner/name/config.json" train start.json --set 'model={"path":"owner/name"}'
echo "1..$n"
