#!/bin/bash
# Adapters through the program: a run that is resumed is the run that was not stopped, byte for byte; text is drawn from its
# checkpoint; an export has the base's tensors and no others. Where peft is installed, it and transformers read the checkpoint
# as it is and give the logits of the merged export. TAP.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-lora-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
awk 'BEGIN { for (i = 0; i < 500; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text"
head -c 9000 "$dir/text" >"$dir/part"
refuses() { local says=$1; shift; ! run "$@" && grep -q "$says" "$dir/err"; }
same() { for f in model adapter_model optimizer-00001-of-00001; do cmp "$1/$f.safetensors" "$2/$f.safetensors" || return 1; done; }

both() { # NAME MODEL TARGETS
    cat >"$dir/$1.json" <<EOF
{"model": {$2}, "data": {"path": ["$dir/text"], "seq_length": 32}, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}}, "zero_optimization": {"stage": 3,
  "offload_param": {"device": "nvme", "nvme_path": "$dir"}, "offload_optimizer": {"device": "nvme", "nvme_path": "$dir"}},
 "spillway": {"steps": 6, "device": "cpu", "checkpoint_dir": "$dir/$1", "checkpoint_interval": 3,
  "lora": {"rank": 3, "alpha": 12, "targets": $3, "dropout": 0.1}}}
EOF
    check "$1 trains adapters" run train "$dir/$1.json" --quiet
    check "$1 is resumed" run train "$dir/$1.json" --quiet --resume "$dir/$1/step-3" --set "spillway.checkpoint_dir=$dir/$1-again" \
        --set zero_optimization.offload_param.device=cpu
    check "$1 is the same then" same "$dir/$1/step-6" "$dir/$1-again/step-6"
    check "$1's checkpoints share the frozen model" [ "$dir/$1/step-3/model.safetensors" -ef "$dir/$1/step-6/model.safetensors" ]
    check "$1's resumed one shares it too" [ "$dir/$1/step-3/model.safetensors" -ef "$dir/$1-again/step-6/model.safetensors" ]
    check "$1 on two ranks" run train "$dir/$1.json" -n 2 --quiet --set "spillway.checkpoint_dir=$dir/$1-two"
    check "$1's two ranks share it" [ "$dir/$1-two/step-3/model.safetensors" -ef "$dir/$1-two/step-6/model.safetensors" ]
    check "$1 on two ranks, sharing nothing" run train "$dir/$1.json" -n 2 --quiet --resume "$dir/$1-two/step-3" \
        --set "spillway.checkpoint_dir=$dir/$1-apart" --set spillway.checkpoint_links=false
    check "$1's is another file" [ ! "$dir/$1-two/step-3/model.safetensors" -ef "$dir/$1-apart/step-6/model.safetensors" ]
    check "$1's has the same bytes" same "$dir/$1-two/step-6" "$dir/$1-apart/step-6"
    check "$1 with another alpha is refused" refuses spillway.lora.alpha train "$dir/$1.json" --resume "$dir/$1/step-3" \
        --set spillway.lora.alpha=1
    check "$1 draws text" run generate "$dir/$1" --prompt abc --tokens 5
    check "$1 is evaluated" run eval "$dir/$1" --data "$dir/text"
    check "$1 exports" run export "$dir/$1" --to "$dir/$1-merged" --dtype fp32
    check "$1's export trains" run train "$dir/$1.json" --quiet --set "model={\"path\":\"$dir/$1-merged\"}" \
        --set spillway.lora.rank=0 --set 'spillway.lora.targets=[]' --set "spillway.checkpoint_dir=$dir/$1-on"
    check "$1's checkpoint is no start" refuses adapters train "$dir/$1.json" --quiet --set "model={\"path\":\"$dir/$1/step-6\"}"
}
both llama '"model_type":"llama","hidden_size":32,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,
  "intermediate_size":48,"vocab_size":256,"max_position_embeddings":64' '["[qv]_proj", "model.layers.1.mlp.down_proj"]'
both gpt2 '"model_type":"gpt2","n_embd":32,"n_layer":3,"n_head":4,"n_positions":64,"vocab_size":256' '["c_attn", "h.2.mlp.*"]'

# What stays in its own files is not counted as written.
check "llama exports in bf16" run export "$dir/llama" --to "$dir/base" --dtype bf16
written() { # OVERRIDES...
    rm -f "$dir/log"
    run train "$dir/llama.json" --quiet --set "model={\"path\":\"$dir/base\"}" --set spillway.checkpoint_dir= --set spillway.steps=1 \
        --set spillway.run_log="$dir/log" "$@"
    grep -o '"bytes_written_total":[0-9]*' "$dir/log" | tail -n 1 | cut -d: -f2
}
apart=$(($(written --set spillway.frozen_in_place=false) - $(written)))
check "weights that stay in their files are not written" [ "$apart" -gt 50000 ]

# Checkpoints that name the folder of the frozen model: the same training, without its weights.
head -c 700 "$dir/text" >"$dir/little"
alone() { run train "$dir/llama.json" --quiet --set "model={\"path\":\"$dir/base\"}" --set spillway.checkpoint_dir="$dir/$1" "${@:2}"; }
adapters() { for f in adapter_model optimizer-00001-of-00001; do cmp "$1/$f.safetensors" "$2/$f.safetensors" || return 1; done; }
losses() { run eval "$@" --data "$dir/little" && cp "$dir/out" "$dir/loss"; }
named="--set spillway.checkpoint_base=false"
check "with the model" alone held
check "without it" alone named $named
check "has no weights" [ ! -e "$dir/named/step-6/model.safetensors" ]
check "and the same state" adapters "$dir/held/step-6" "$dir/named/step-6"
check "peft is told where they are" grep -q "\"base_model_name_or_path\": \"$dir/base\"" "$dir/named/step-6/adapter_config.json"
check "resumed, all in host memory" alone named-again $named --resume "$dir/named/step-3" --set zero_optimization.offload_param.device=cpu
check "it is the run that was not stopped" adapters "$dir/named/step-6" "$dir/named-again/step-6"
check "and has none either" [ ! -e "$dir/named-again/step-6/model.safetensors" ]
check "resumed with the model" alone named-whole --resume "$dir/named/step-3"
check "it has the model's bytes" same "$dir/held/step-6" "$dir/named-whole/step-6"
check "on two ranks" alone named-two $named -n 2
check "it has none" [ ! -e "$dir/named-two/step-6/model.safetensors" ]
check "and is resumed by one" alone named-one $named --resume "$dir/named-two/step-3" --set gradient_accumulation_steps=2
check "with codes" alone named-codes $named --set spillway.frozen_codes=int8
check "other codes of its weights are other weights" refuses "spillway.frozen_codes was int8 and is none" train "$dir/llama.json" --quiet --resume-anyway \
    --set "model={\"path\":\"$dir/base\"}" $named --resume "$dir/named-codes/step-3"
check "other roundings too" refuses "spillway.state_format gave bf16 weights and gives fp32" train "$dir/llama.json" --quiet --resume-anyway \
    --set "model={\"path\":\"$dir/base\"}" $named --resume "$dir/named/step-3" --set spillway.state_format=fp32 --set bf16.enabled=false
check "the same codes are not" alone named-codes-2 $named --set spillway.frozen_codes=int8 --resume "$dir/named-codes/step-3"
check "and are the same weights" adapters "$dir/named-codes/step-6" "$dir/named-codes-2/step-6"
check "text is drawn" run generate "$dir/held" --prompt abc --tokens 9 --temperature 0
cp "$dir/out" "$dir/want"
check "and from named weights" run generate "$dir/named" --prompt abc --tokens 9 --temperature 0
check "the same" cmp "$dir/want" "$dir/out"
check "held weights are evaluated" losses "$dir/held"
cp "$dir/loss" "$dir/want"
check "named ones too" losses "$dir/named"
check "with the same loss" [ "$(grep -o 'loss [0-9.]*' "$dir/want")" = "$(grep -o 'loss [0-9.]*' "$dir/loss")" ]
check "held weights are exported" run export "$dir/held" --to "$dir/held-merged" --dtype bf16
check "named ones too" run export "$dir/named" --to "$dir/named-merged" --dtype bf16
check "to the same" cmp "$dir/held-merged/model.safetensors" "$dir/named-merged/model.safetensors"
check "inspected, it says where they are" run inspect "$dir/named"
check "by its path" grep -qx "the weights are those of $dir/base" "$dir/out"
deep=$dir/$(printf 'd%.0s' {1..250}) && deep=$deep/$(basename "$deep") && deep=$deep/$(basename "$deep") && deep=$deep/$(basename "$deep")
mkdir -p "$deep" && cp -r "$dir/base" "$deep/base"
in_deep() { local at=$PWD; case $spw in /*) ;; *) local spw=$at/$spw ;; esac; cd "$deep" || return 1; run "$@"; local rc=$?; cd "$at" || return 1; return $rc; }
check "a folder of which the whole path is too long to be named" in_deep train "$dir/llama.json" --quiet --set 'model={"path":"base"}' $named \
    --set spillway.checkpoint_dir="$dir/deep"
check "is held" same "$dir/held/step-6" "$dir/deep/step-6"
rm -rf "$deep"
mv "$dir/base" "$dir/moved"
gone="has adapters alone, and the weights that they are beside were in $dir/base, which is not there"
for command in "eval $dir/named --data $dir/little" "generate $dir/named --prompt a" "export $dir/named --to $dir/gone"; do
    check "a folder that is not there stops ${command%% *}" refuses "$gone" $command
done
check "and train" refuses "$gone" train "$dir/llama.json" --quiet --set "model={\"path\":\"$dir/llama-merged\"}" --resume-anyway --resume "$dir/named/step-3"
check "one that is somewhere else now does not" run train "$dir/llama.json" --quiet --set "model={\"path\":\"$dir/moved\"}" $named \
    --set spillway.checkpoint_dir="$dir/named-moved" --resume "$dir/named/step-3"
check "and the state is the same" adapters "$dir/named/step-6" "$dir/named-moved/step-6"
check "what is merged elsewhere too" run export "$dir/named" --to "$dir/moved-merged" --dtype bf16 --model "$dir/moved"
check "is the same" cmp "$dir/held-merged/model.safetensors" "$dir/moved-merged/model.safetensors"
cp -r "$dir/llama-merged" "$dir/base"
check "other weights of the same shapes are others" refuses "were in $dir/base, which has others now" eval "$dir/named" --data "$dir/little"
rm -rf "$dir/base" && mv "$dir/moved" "$dir/base"

# Adapters as peft writes them: in 16 bits, with alpha over the root of the rank; and what they may not be.
variant() { # NAME CODE WIDTH OF: a folder like llama's or that of OF, changed by Python, which has tensors t {name: (shape, bytes of bf16)} and the configuration c
    local of=$dir/${4:-llama}/step-6
    rm -rf "$dir/$1" && mkdir "$dir/$1" && cp "$of"/{config.json,model.safetensors} "$dir/$1" || return 1
    python3 - "$of" "$dir/$1" "${3:-2}" "$2" <<'EOF'
import json, struct, sys
source, to, width, code = sys.argv[1:]
raw = open(f"{source}/adapter_model.safetensors", "rb").read()
n = struct.unpack("<Q", raw[:8])[0]
t, c = {}, json.load(open(f"{source}/adapter_config.json"))
for name, v in json.loads(raw[8:8 + n]).items():
    if name != "__metadata__":
        x = raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]
        t[name] = v["shape"], b"".join(x[i + 2:i + 4] for i in range(0, len(x), 4))
exec(code)
head, body = {}, b""
for name, (shape, x) in t.items():
    x = x if width == "2" else b"".join(b"\0\0" + x[i:i + 2] for i in range(0, len(x), 2))
    head[name] = {"dtype": "BF16" if width == "2" else "F32", "shape": shape, "data_offsets": [len(body), len(body) + len(x)]}
    body += x
head = json.dumps(head).encode()
open(f"{to}/adapter_model.safetensors", "wb").write(struct.pack("<Q", len(head)) + head + body)
json.dump(c, open(f"{to}/adapter_config.json", "w"))
EOF
}
merges() { rm -rf "$dir/$1-merged" && run export "$dir/$1" --to "$dir/$1-merged" --dtype fp32; }
check "fp32 of 16 bits is made" variant wide "" 4
check "and merged" merges wide
check "16 bits are made" variant narrow ""
check "and merged" merges narrow
check "to the same" cmp "$dir/wide-merged/model.safetensors" "$dir/narrow-merged/model.safetensors"
check "alpha over the root is made" variant root 'c["use_rslora"], c["lora_alpha"] = True, 4 * 3 ** 0.5'
check "and merged" merges root
check "to the same" cmp "$dir/wide-merged/model.safetensors" "$dir/root-merged/model.safetensors"
for key in use_dora alpha_pattern layer_replication; do
    check "$key is made" variant "$key" "c['$key'] = {'alpha_pattern': {'q_proj': 3}, 'layer_replication': [[0, 1], [0, 1]]}.get('$key', True)"
    check "and refused by its name" refuses "not supported yet: $key; peft's merge_and_unload" export "$dir/$key" --to "$dir/$key-merged"
done
for init in pissa olora; do
    check "$init is made" variant "$init" "c['init_lora_weights'] = '$init'"
    check "and refused" refuses "init_lora_weights \"$init\" has changed the weights" export "$dir/$init" --to "$dir/$init-merged"
done
check "adapters for what follows some tokens are made" variant after 'c["alora_invocation_tokens"] = [1, 2]'
check "and refused" refuses "alora_invocation_tokens are for what follows" export "$dir/after" --to "$dir/after-merged"
check "a trained head is made" variant head 't["base_model.model.lm_head.weight"] = [256, 32], bytes(2 * 256 * 32)'
check "and refused" refuses "head/adapter_model.safetensors: base_model.model.lm_head.weight is not an adapter" export "$dir/head" --to "$dir/head-merged"
check "and leaves nothing" [ ! -e "$dir/head-merged" ]
# Alone, as peft saves them: the weights are where adapter_config.json says, or --model.
variant alone "c['base_model_name_or_path'] = '$dir/weights'"
mkdir "$dir/weights" && mv "$dir"/alone/{config.json,model.safetensors} "$dir/weights"
check "adapters alone are merged" merges alone
check "to the same" cmp "$dir/narrow-merged/model.safetensors" "$dir/alone-merged/model.safetensors"
check "with the model's configuration" cmp "$dir/narrow-merged/config.json" "$dir/alone-merged/config.json"
mv "$dir/weights" "$dir/elsewhere"
check "without these weights they are refused" refuses "adapters of $dir/weights, as adapter_config.json says), and no weights of that model: --model" \
    export "$dir/alone" --to "$dir/alone-2"
echo '{"chat_template": "theirs"}' >"$dir/elsewhere/tokenizer_config.json"
check "but where --model says" run export "$dir/alone" --to "$dir/alone-2" --dtype fp32 --model "$dir/elsewhere"
check "to the same" cmp "$dir/narrow-merged/model.safetensors" "$dir/alone-2/model.safetensors"
check "with the model's tokenizer" cmp "$dir/elsewhere/tokenizer_config.json" "$dir/alone-2/tokenizer_config.json"
echo '{"chat_template": "ours"}' >"$dir/alone/tokenizer_config.json"
check "and where they were trained with another" run export "$dir/alone" --to "$dir/alone-3" --model "$dir/elsewhere"
check "with that one" cmp "$dir/alone/tokenizer_config.json" "$dir/alone-3/tokenizer_config.json"
check "beside weights that have adapters themselves" refuses "narrow, whose weights the adapters of $dir/alone are beside, has adapters itself" \
    export "$dir/alone" --to "$dir/alone-4" --model "$dir/narrow"
mkdir "$dir/bin" && cp "$dir"/llama/step-6/{config.json,model.safetensors,adapter_config.json} "$dir/bin" && touch "$dir/bin/adapter_model.bin"
for command in "eval $dir/bin --data $dir/text" "generate $dir/bin --prompt a" "export $dir/bin --to $dir/bin-merged"; do
    check "adapters of torch.save are not left out by ${command%% *}" refuses "bin/adapter_model.bin" $command
done
if python3 -c 'import torch, safetensors' 2>/dev/null; then
    python3 -c 'import sys, torch; from safetensors.torch import load_file; torch.save(load_file(sys.argv[1]), sys.argv[2])' \
        "$dir/narrow/adapter_model.safetensors" "$dir/bin/adapter_model.bin"
    check "they are merged" merges bin
    check "to the same" cmp "$dir/narrow-merged/model.safetensors" "$dir/bin-merged/model.safetensors"
fi

# Of mixtures: "*" leaves the router alone, which peft has no adapters beside, and MLPs that peft takes for experts are told of.
mixture() { # NAME MODEL TARGETS
    check "$1 trains adapters" run train "$dir/llama.json" --quiet --set "model={\"model_type\":\"$1\",$moe,$2}" --set "spillway.lora.targets=$3" \
        --set "spillway.checkpoint_dir=$dir/$1"
}
moe='"hidden_size":32,"head_dim":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"intermediate_size":48,"vocab_size":256,"max_position_embeddings":64,"num_experts_per_tok":2'
mixture gpt_oss '"num_local_experts":4,"rope_scaling":{"rope_type":"default"}' '["*"]'
check "gpt_oss says nothing of them" [ ! -s "$dir/err" ]
check "gpt_oss's router has none" [ "$(grep -c 'proj"' "$dir/gpt_oss/step-6/adapter_config.json")-$(grep -c router "$dir/gpt_oss/step-6/adapter_config.json")" = 8-0 ]
check "gpt_oss exports" run export "$dir/gpt_oss" --to "$dir/gpt_oss-merged" --dtype fp32
mixture qwen3_moe '"num_experts":4,"moe_intermediate_size":16,"mlp_only_layers":[0]' '["down_proj"]'
check "qwen3_moe is told of" grep -q "does not load adapters of MLPs beside experts, such as base_model.model.model.layers.0.mlp.down_proj" "$dir/err"
mixture hy_v3 '"num_experts":4,"moe_intermediate_size":16,"tie_word_embeddings":true' '["shared_mlp.*"]'
check "hy_v3's are called as transformers has them in memory" [ "$(grep -c 'layers.1.mlp.shared_experts.[a-z]*_proj"' "$dir/hy_v3/step-6/adapter_config.json")" = 3 ]
check "hy_v3 exports" run export "$dir/hy_v3" --to "$dir/hy_v3-merged" --dtype fp32
moe='"hidden_size":32,"head_dim":16,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":256,"max_position_embeddings":64,"full_attention_interval":2,
  "linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":8,"linear_value_head_dim":16,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":16,"shared_expert_intermediate_size":24'
mixture qwen3_5_moe_text '"tie_word_embeddings":true' '["*", "shared_expert_gate"]'
check "qwen3_5_moe_text says nothing of them" [ ! -s "$dir/err" ]
check "its linear attention has them, but for the convolution" [ "$(grep -c linear_attn "$dir/qwen3_5_moe_text/step-6/adapter_config.json")-$(grep -c conv1d "$dir/qwen3_5_moe_text/step-6/adapter_config.json")" = 10-0 ]
check "its shared expert's gate has them, where that is named" [ "$(grep -c shared_expert_gate "$dir/qwen3_5_moe_text/step-6/adapter_config.json")" = 3 ]
check "its router has none" refuses "there are.* shared_expert_gate.*; the router is none" train "$dir/llama.json" --quiet \
    --set "model={\"model_type\":\"qwen3_5_moe_text\",$moe}" --set 'spillway.lora.targets=["gate"]'
check "qwen3_5_moe_text exports" run export "$dir/qwen3_5_moe_text" --to "$dir/qwen3_5_moe_text-merged" --dtype fp32

# Beside a model of text and images peft calls them otherwise, and may have some of what reads images, which the export does not have.
longer='language = {n.replace("model.model.", "model.model.language_model."): v for n, v in t.items()}'
check "those of its text are made" variant words "" 2 qwen3_5_moe_text
check "and merged" merges words
check "those beside images are made" variant images "$longer; t = {**language, **{f'base_model.model.model.visual.blocks.0.attn.qkv.lora_{x}.weight': ([1, 1], bytes(2)) for x in 'AB'}}" 2 qwen3_5_moe_text
check "and merged" merges images
check "to the same" cmp "$dir/words-merged/model.safetensors" "$dir/images-merged/model.safetensors"
check "one by both names is made" variant twice "$longer; t.update(language)" 2 qwen3_5_moe_text
check "and refused" refuses "is there twice, with and without its prefix" export "$dir/twice" --to "$dir/twice-merged"
mixture qwen3_next '"intermediate_size":48' '["linear_attn.*"]'
check "qwen3_next exports" run export "$dir/qwen3_next" --to "$dir/qwen3_next-merged" --dtype fp32
moe='"hidden_size":32,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":4,"vocab_size":256,"max_position_embeddings":64,"num_experts_per_tok":2'
mixture kimi_linear '"num_experts":4,"moe_intermediate_size":16,"intermediate_size":48,"kv_lora_rank":12,"linear_head_dim":8,"linear_num_heads":2,"layer_types":["full_attention","linear_attention"]' '["*"]'
check "kimi_linear's are called as transformers has them in memory" [ "$(grep -c 'layers.1.self_attn.forget_gate.f_[ab]_proj"\|layers.1.mlp.shared_experts.[a-z]*_proj"' "$dir/kimi_linear/step-6/adapter_config.json")" = 5 ]
check "kimi_linear exports" run export "$dir/kimi_linear" --to "$dir/kimi_linear-merged" --dtype fp32
moe='"hidden_size":32,"head_dim":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":256,"max_position_embeddings":64,"num_experts_per_tok":2'

# Beside experts: each a layer's own, resumed, on ranks and in turns with the same bytes; and folders that peft made.
loss() { sed -n 's/.*loss \([0-9.]*\).*/\1/p' "$dir/out" | head -n 1; }
experts() { # NAME MODEL PARAMETERS
    local more=("--set" "spillway.lora.dropout=0" "--set" "spillway.lora.target_parameters=$3" "--set" "model={$moe,$2}" "--set" "spillway.lora.targets=[\"q_proj\"]")
    check "$1 trains adapters beside experts" run train "$dir/llama.json" --quiet "${more[@]}" --set "spillway.checkpoint_dir=$dir/$1"
    check "$1 is resumed in turns" run train "$dir/llama.json" --quiet "${more[@]}" --resume "$dir/$1/step-3" --set spillway.expert_turns=2 \
        --set "spillway.checkpoint_dir=$dir/$1-again"
    check "$1 is the same then" same "$dir/$1/step-6" "$dir/$1-again/step-6"
    check "$1 goes on with two ranks" run train "$dir/llama.json" -n 2 --quiet "${more[@]}" --resume "$dir/$1/step-3" --set train_micro_batch_size_per_gpu=1 \
        --set "spillway.checkpoint_dir=$dir/$1-two"
    check "$1 draws text" run generate "$dir/$1" --prompt abc --tokens 5
    check "$1 is evaluated" run eval "$dir/$1" --data "$dir/text"
    adapted=$(loss)
    check "$1 exports" run export "$dir/$1" --to "$dir/$1-merged" --dtype fp32
    check "$1's export is evaluated" run eval "$dir/$1-merged" --data "$dir/text"
    check "$1's loss is near: $adapted, $(loss)" awk -v a="$adapted" -v b="$(loss)" 'BEGIN { exit !(a > 0 && a - b < 1e-2 && b - a < 1e-2) }'
}
experts fused_qwen3 '"model_type":"qwen3_moe","num_experts":4,"moe_intermediate_size":24,"intermediate_size":48' '["mlp.experts.gate_up_proj","mlp.experts.down_proj"]'
check "its tensors are named one by one" [ "$(grep -c 'model.layers.[01].mlp.experts.\(gate_up\|down\)_proj"' "$dir/fused_qwen3/step-6/adapter_config.json")" = 4 ]
experts fused_gpt_oss '"model_type":"gpt_oss","num_local_experts":4,"intermediate_size":48,"rope_scaling":{"rope_type":"default"}' '["down_proj","layers.1.*"]'
check "a tensor of experts with another shape is made" variant ranks 'k = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"; t[k] = [t[k][0][0] - 1, t[k][0][1]], t[k][1][:-2 * t[k][0][1]]' 2 fused_qwen3
check "and refused" refuses "the adapter of model.layers.0.mlp.experts.down_proj is not (rank, 24) and (32, rank) with a rank for each expert" export "$dir/ranks" --to "$dir/ranks-merged"
check "tensors that no name is for are made" variant nameless 'c["target_parameters"] = ["mlp.experts.down_proj"]' 2 fused_qwen3
check "and refused" refuses "experts.base_layer.lora_A.weight is not an adapter of a weight" export "$dir/nameless" --to "$dir/nameless-merged"
check "dropout beside experts is refused" refuses "spillway.lora: dropout 0.1 with target_parameters" train "$dir/llama.json" --quiet \
    --set "model={$moe,\"model_type\":\"qwen3_moe\",\"num_experts\":4,\"moe_intermediate_size\":24,\"intermediate_size\":48}" --set 'spillway.lora.target_parameters=["*"]' \
    --set 'spillway.lora.targets=["q_proj"]'

# Weights as codes: text and loss of a checkpoint that was trained beside them are the same from codes and from what they stand
# for; of others they are near.
losses() { for data in text part; do run eval "$dir/$name-merged" --data "$dir/$data" "$@"; loss; done | tr '\n' ' '; } # one pair of digits may be the same by chance
near() { [ "$1" != "$2" ] && awk -v a="${1%% *}" -v b="${2%% *}" 'BEGIN { exit !(a > 0 && b > 0 && a / b < 1.03 && b / a < 1.03) }'; }
for name in llama gpt2; do
    check "$name trains beside 4-bit codes" run train "$dir/$name.json" --quiet --set spillway.frozen_codes=int4 --set "spillway.checkpoint_dir=$dir/$name-coded"
    check "$name with other codes is refused" refuses spillway.frozen_codes train "$dir/$name.json" --resume "$dir/$name-coded/step-3"
    for codes in "" none; do
        run generate "$dir/$name-coded" --prompt abc --tokens 40 --temperature 0 ${codes:+--codes $codes}
        cp "$dir/out" "$dir/text-$codes"
        run eval "$dir/$name-coded" --data "$dir/text" --nvme "$dir" ${codes:+--codes $codes}
        sed 's/ sequences.*//' "$dir/out" >"$dir/loss-$codes" # not how fast
    done
    check "$name's text is the same from codes" cmp "$dir/text-" "$dir/text-none"
    check "$name's loss is the same from codes" cmp "$dir/loss-" "$dir/loss-none"
    exact=$(losses)
    for codes in int8 int4; do
        check "$name's loss from $codes is near" near "$exact" "$(losses --codes $codes)"
    done
    check "$name's other codes are refused" refuses "is not int8, int4, published or none" eval "$dir/$name-merged" --data "$dir/text" --codes int3
done

compare() { python3 - "$@" >"$dir/out" 2>"$dir/err" <<'EOF'
import os, shutil, sys, torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
folder, merged = sys.argv[1:3]
base = sys.argv[3] if len(sys.argv) > 3 else merged + "-base"
for f in ("config.json", "model.safetensors") if len(sys.argv) < 4 else ():
    os.makedirs(base, exist_ok=True)
    shutil.copy(f"{folder}/{f}", base)
load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
ids = torch.arange(60)[None] * 7 % 256
with torch.no_grad():
    want, plain, whole = load(merged)(ids).logits, load(base)(ids).logits, load(folder)(ids).logits
    adapted = PeftModel.from_pretrained(load(base), folder).eval()
    got = adapted(ids).logits
mine, theirs = load_file(f"{folder}/adapter_model.safetensors"), get_peft_model_state_dict(adapted)
assert set(mine) == set(theirs) and all(torch.equal(mine[k], theirs[k]) for k in mine)
most = want.abs().max()
print("effect", (got - plain).abs().max(), "peft", (got - want).abs().max(), "transformers", (whole - want).abs().max())
assert (got - plain).abs().max() > 1e-2 * most
assert (got - want).abs().max() <= 4e-6 * most and (whole - want).abs().max() <= 4e-6 * most
EOF
}
# Adapters beside experts that peft makes of a model's folder, and the logits that the export of them is to have.
peft_makes() { python3 - "$@" >"$dir/out" 2>"$dir/err" <<'EOF'
import sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
base, to, *parameters = sys.argv[1:]
torch.manual_seed(1)
adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval(), LoraConfig(
    r=2, lora_alpha=5, use_rslora=True, target_modules=["v_proj"], target_parameters=parameters))
for name, p in adapted.named_parameters():
    if "lora_" in name:
        torch.nn.init.normal_(p, std=0.3)
adapted.save_pretrained(to)
with torch.no_grad():
    torch.save(adapted(torch.arange(60)[None] * 7 % 256).logits, f"{to}/want.pt")
EOF
}
peft_agrees() { python3 - "$@" >"$dir/out" 2>"$dir/err" <<'EOF'
import sys, torch
from transformers import AutoModelForCausalLM
want = torch.load(f"{sys.argv[1]}/want.pt")
with torch.no_grad():
    plain, got = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval()(torch.arange(60)[None] * 7 % 256).logits for p in sys.argv[2:])
print("effect", (plain - want).abs().max(), "export", (got - want).abs().max())
assert (plain - want).abs().max() > 1e-2 * want.abs().max() and (got - want).abs().max() <= 2e-5 * want.abs().max()
EOF
}
if python3 -c 'import torch, transformers, peft' 2>/dev/null; then
    for name in llama gpt2 gpt_oss qwen3_5_moe_text qwen3_next fused_qwen3 fused_gpt_oss; do
        check "$name is the same to peft, transformers and the export" compare "$dir/$name/step-6" "$dir/$name-merged"
    done
    check "named weights are exported in fp32" run export "$dir/named" --to "$dir/named-full" --dtype fp32
    check "and the same to peft and transformers" compare "$dir/named/step-6" "$dir/named-full" "$dir/base"
    for name in fused_qwen3 fused_gpt_oss; do
        for parameters in "mlp.experts.down_proj mlp.experts.gate_up_proj" "layers.1.mlp.experts.gate_up_proj"; do
            rm -rf "$dir/theirs" "$dir/theirs-merged"
            check "peft makes adapters of $name, beside $parameters" peft_makes "$dir/$name-merged-base" "$dir/theirs" $parameters
            check "they are merged" merges theirs
            check "to its logits" peft_agrees "$dir/theirs" "$dir/$name-merged-base" "$dir/theirs-merged"
        done
    done
else
    echo "# no peft here"
fi
echo "1..$n"
