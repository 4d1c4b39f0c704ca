#!/bin/bash
# What a checkpoint exports loads in transformers: no key missing, unexpected or of another shape, every tensor equal byte for
# byte, the configuration as it was given; and what transformers then saves is the same model to spillway again. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
python3 -c 'import torch, transformers, safetensors' 2>/dev/null || { echo "no transformers here"; exit 77; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-export-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
small='"hidden_size":24,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"intermediate_size":29,"vocab_size":256,"max_position_embeddings":64'
# train NAME BF16 MODEL: one step, then a checkpoint in $dir/NAME/step-1
train() {
    cat >"$dir/$1.json" <<EOF
{"model": {$3},
 "data": {"path": ["README.md"], "seq_length": 16}, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": $2},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
 "spillway": {"steps": 1, "device": "cpu", "checkpoint_dir": "$dir/$1"}}
EOF
    check "$1 trains" run train "$dir/$1.json" --quiet
}
names="gpt2 gpt2_untied llama llama3 linear yarn mistral mistral_full qwen2 qwen2_window qwen3 qwen3_bias mixtral qwen3_moe phi3 phi3_long smollm3 qwen2_moe olmo2 gemma3 gemma3_full gemma2 gemma2_full gpt_oss gpt_oss_plain qwen3_moe_dense glm4_moe glm4_moe_free deepseek_v3 deepseek_v2 dots1 solar_open glm4_moe_lite deepseek_v32 glm_moe_dsa deepseek_v4 deepseek_v4_all exaone_moe minimax_m2 olmo3 olmo3_plain gemma granite granitemoehybrid granitemoehybrid_nope granitemoehybrid_mamba granitemoehybrid_moe nemotron_h nemotron_h_moe llama4 llama4_each olmoe seed_oss glm glm4 ernie4_5 ernie4_5_moe hy_v3 hunyuan_v1_dense hunyuan_v1_moe cohere cohere2 exaone4 exaone4_window ministral3 mistral4 mimo_v2_flash lfm2 lfm2_moe bamba afmoe kimi_linear kimi_linear_groups olmo_hybrid olmo_hybrid_rope falcon_h1 falcon_h1_norm gpt_neox gpt_neox_serial opt opt_plain starcoder2 stablelm stablelm_parallel qwen3_5 qwen3_5_moe qwen3_next gemma4 gemma4_plain gemma4_moe gemma4_small"
gpt2='"model_type":"gpt2","n_embd":24,"n_layer":2,"n_head":4,"n_positions":64,"vocab_size":256'
train gpt2 true "$gpt2"
train gpt2_untied false "$gpt2,\"n_inner\":31,\"tie_word_embeddings\":false"
train llama true "\"model_type\":\"llama\",$small,\"rope_theta\":5e5"
train llama3 true "\"model_type\":\"llama\",$small,\"head_dim\":10,\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true,
    \"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":48}"
train linear false "\"model_type\":\"llama\",$small,\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":2.5,\"rope_theta\":1000}"
train yarn true "\"model_type\":\"llama\",$small,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"beta_fast\":8,\"truncate\":false,
    \"mscale\":0,\"attention_factor\":0.9,\"original_max_position_embeddings\":16}"
train mistral true "\"model_type\":\"mistral\",$small,\"sliding_window\":7,\"head_dim\":8"
train mistral_full false "\"model_type\":\"mistral\",$small,\"sliding_window\":null"
train qwen2 true "\"model_type\":\"qwen2\",$small,\"tie_word_embeddings\":true,\"rope_theta\":1e6"
train qwen2_window false "\"model_type\":\"qwen2\",$small,\"use_sliding_window\":true,\"sliding_window\":5,\"max_window_layers\":1"
train qwen3 true "\"model_type\":\"qwen3\",$small,\"head_dim\":12,\"tie_word_embeddings\":true"
train qwen3_bias false "\"model_type\":\"qwen3\",$small,\"head_dim\":8,\"attention_bias\":true"
train mixtral true "\"model_type\":\"mixtral\",$small,\"num_local_experts\":5,\"num_experts_per_tok\":2"
train qwen3_moe false "\"model_type\":\"qwen3_moe\",$small,\"head_dim\":8,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"norm_topk_prob\":true"
train qwen3_moe_dense true "\"model_type\":\"qwen3_moe\",$small,\"head_dim\":8,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"mlp_only_layers\":[0]"
glm="\"model_type\":\"glm4_moe\",$small,\"head_dim\":8,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11"
train glm4_moe true "$glm,\"n_routed_experts\":6,\"n_group\":3,\"topk_group\":2,\"n_shared_experts\":2,\"routed_scaling_factor\":1.7,\"attention_bias\":true"
train glm4_moe_free false "$glm,\"n_routed_experts\":5,\"norm_topk_prob\":false,\"use_qk_norm\":true,\"partial_rotary_factor\":1"
latent="$(echo "$small" | sed 's/"num_key_value_heads":2/"num_key_value_heads":4/'),\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"kv_lora_rank\":10,\"qk_nope_head_dim\":6,\"qk_rope_head_dim\":4"
train deepseek_v3 true "\"model_type\":\"deepseek_v3\",$latent,\"q_lora_rank\":9,\"v_head_dim\":7,\"n_routed_experts\":6,\"n_group\":3,\"topk_group\":2,\"first_k_dense_replace\":1,
    \"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"mscale\":0.8,\"mscale_all_dim\":1.2,\"original_max_position_embeddings\":16}"
train deepseek_v2 false "\"model_type\":\"deepseek_v2\",$latent,\"q_lora_rank\":null,\"v_head_dim\":8,\"n_routed_experts\":6,\"n_group\":3,\"topk_group\":2,\"topk_method\":\"group_limited_greedy\",\"attention_bias\":true"
train dots1 true "\"model_type\":\"dots1\",$small,\"head_dim\":8,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"n_routed_experts\":6,\"n_shared_experts\":2,
    \"n_group\":3,\"topk_group\":2,\"first_k_dense_replace\":1,\"routed_scaling_factor\":2.5,\"attention_bias\":true,\"sliding_window\":7,\"max_window_layers\":1"
train solar_open false "\"model_type\":\"solar_open\",${small/\"intermediate_size\":29,/},\"head_dim\":8,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,
    \"n_routed_experts\":6,\"routed_scaling_factor\":1.7"
train glm4_moe_lite true "\"model_type\":\"glm4_moe_lite\",$latent,\"q_lora_rank\":8,\"v_head_dim\":10,\"n_routed_experts\":5,\"rope_interleave\":false"
train deepseek_v32 true "\"model_type\":\"deepseek_v32\",$latent,\"q_lora_rank\":9,\"v_head_dim\":7,\"n_routed_experts\":6,\"n_group\":3,\"topk_group\":2,\"first_k_dense_replace\":1,
    \"index_topk\":24,\"index_n_heads\":3,\"index_head_dim\":8"
train glm_moe_dsa false "\"model_type\":\"glm_moe_dsa\",$latent,\"q_lora_rank\":8,\"v_head_dim\":10,\"n_routed_experts\":5,\"index_topk\":24,\"index_n_heads\":2,\"index_head_dim\":6,
    \"indexer_types\":[\"full\",\"shared\"],\"mlp_layer_types\":[\"dense\",\"sparse\"]"
four=$(echo "$small" | sed 's/"num_key_value_heads":2,"intermediate_size":29,/"num_key_value_heads":1,/'),\"head_dim\":8,\"qk_rope_head_dim\":4,\"moe_intermediate_size\":11,\"n_routed_experts\":6,\"num_experts_per_tok\":3,\"q_lora_rank\":9
train deepseek_v4 true "\"model_type\":\"deepseek_v4\",$four,\"o_groups\":2,\"o_lora_rank\":5,\"index_n_heads\":3,\"index_head_dim\":6,\"index_topk\":2,\"sliding_window\":5,\"hc_sinkhorn_iters\":4,
    \"compress_rates\":{\"compressed_sparse_attention\":4,\"heavily_compressed_attention\":8},\"layer_types\":[\"compressed_sparse_attention\",\"heavily_compressed_attention\"],
    \"mlp_layer_types\":[\"hash_moe\",\"moe\"],\"routed_scaling_factor\":1.7,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"original_max_position_embeddings\":16}"
train deepseek_v4_all false "\"model_type\":\"deepseek_v4\",$four,\"o_groups\":4,\"o_lora_rank\":5,\"hc_mult\":2,\"hc_eps\":1e-4,\"compress_rope_theta\":500,\"compress_ratios\":[0,4],\"num_hash_layers\":0,\"tie_word_embeddings\":true"
train exaone_moe true "\"model_type\":\"exaone_moe\",$small,\"head_dim\":8,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"n_group\":3,\"topk_group\":2,
    \"sliding_window\":7,\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\""
train phi3 true "\"model_type\":\"phi3\",$small,\"sliding_window\":9,\"resid_pdrop\":0.1"
train phi3_long false "\"model_type\":\"phi3\",$small,\"partial_rotary_factor\":0.75,\"original_max_position_embeddings\":12,
    \"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1.0,1.25],\"long_factor\":[1.5,9],\"attention_factor\":1.25}"
train smollm3 true "\"model_type\":\"smollm3\",$small,\"no_rope_layer_interval\":2,\"mlp_bias\":true"
train qwen2_moe true "\"model_type\":\"qwen2_moe\",$small,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"shared_expert_intermediate_size\":17"
train olmo2 true "\"model_type\":\"olmo2\",$small,\"head_dim\":8,\"rope_theta\":5e5,\"attention_bias\":true"
train minimax_m2 true "\"model_type\":\"minimax_m2\",$small,\"head_dim\":8,\"num_local_experts\":5,\"num_experts_per_tok\":2,\"rotary_dim\":4"
train olmo3 true "\"model_type\":\"olmo3\",$small,\"sliding_window\":7,\"layer_types\":[\"sliding_attention\",\"full_attention\"],
    \"rope_parameters\":{\"full_attention\":{\"rope_type\":\"linear\",\"factor\":2.5,\"rope_theta\":1000},\"sliding_attention\":{\"rope_theta\":50}}"
train olmo3_plain false "\"model_type\":\"olmo3\",$small,\"layer_types\":[\"full_attention\",\"full_attention\"],\"attention_bias\":true"
train gemma true "\"model_type\":\"gemma\",$small,\"head_dim\":8,\"hidden_act\":\"gelu\",\"rope_theta\":500"
train granite true "\"model_type\":\"granite\",$small,\"embedding_multiplier\":12,\"residual_multiplier\":0.22,\"attention_multiplier\":0.4,\"logits_scaling\":8,\"mlp_bias\":true"
granite4="\"model_type\":\"granitemoehybrid\",$small,\"num_local_experts\":0,\"shared_intermediate_size\":31,\"layer_types\":[\"attention\",\"attention\"]"
train granitemoehybrid true "$granite4,\"residual_multiplier\":0.22,\"attention_bias\":true,\"position_embedding_type\":\"rope\""
train granitemoehybrid_nope false "$granite4,\"tie_word_embeddings\":true"
mamba=$(echo "$granite4" | sed 's/\["attention","attention"\]/["mamba","attention"]/')
train granitemoehybrid_moe false "$(echo "$mamba" | sed 's/"num_local_experts":0/"num_local_experts":5/'),\"num_experts_per_tok\":3,\"mamba_n_heads\":6,\"mamba_d_state\":8,\"residual_multiplier\":0.22"
train granitemoehybrid_mamba true "$mamba,\"mamba_n_heads\":3,\"mamba_d_head\":16,\"mamba_d_state\":24,\"mamba_d_conv\":3"
nemotron="\"model_type\":\"nemotron_h\",$(echo "$small" | sed 's/"num_hidden_layers":2/"num_hidden_layers":4/'),\"head_dim\":8,\"mamba_num_heads\":6,\"mamba_head_dim\":8,\"n_groups\":3,\"ssm_state_size\":16"
train nemotron_h true "$nemotron,\"hybrid_override_pattern\":\"M-*-\",\"mlp_bias\":true,\"time_step_min\":0.01"
train nemotron_h_moe false "$nemotron,\"layers_block_type\":[\"mamba\",\"moe\",\"attention\",\"moe\"],\"n_routed_experts\":6,\"num_experts_per_tok\":3,\"n_group\":3,\"topk_group\":2,\"moe_intermediate_size\":11,
    \"moe_shared_expert_intermediate_size\":19,\"routed_scaling_factor\":2.5,\"use_conv_bias\":false,\"conv_kernel\":3,\"moe_latent_size\":10"
llama4="\"model_type\":\"llama4_text\",$small,\"head_dim\":8,\"num_local_experts\":5"
train llama4 true "$llama4,\"intermediate_size_mlp\":31,\"interleave_moe_layer_step\":2,\"no_rope_layer_interval\":2,\"attention_chunk_size\":7,\"floor_scale\":4,\"attn_scale\":0.3"
train llama4_each false "$llama4,\"num_experts_per_tok\":2,\"use_qk_norm\":false,\"attention_chunk_size\":null,\"attn_temperature_tuning\":false,\"attention_bias\":true,\"tie_word_embeddings\":true"
train olmoe false "\"model_type\":\"olmoe\",$small,\"num_experts\":6,\"num_experts_per_tok\":3,\"norm_topk_prob\":true"
train seed_oss true "\"model_type\":\"seed_oss\",$small,\"head_dim\":8,\"attention_out_bias\":true"
train glm true "\"model_type\":\"glm\",$small,\"head_dim\":8,\"partial_rotary_factor\":1.0"
train glm4 true "\"model_type\":\"glm4\",$small,\"head_dim\":8,\"attention_bias\":false"
train ernie4_5 false "\"model_type\":\"ernie4_5\",$small,\"head_dim\":8,\"use_bias\":true"
train ernie4_5_moe true "\"model_type\":\"ernie4_5_moe\",$small,\"moe_num_experts\":6,\"moe_k\":3,\"moe_intermediate_size\":11,\"moe_num_shared_experts\":1,\"moe_norm_min\":0"
train hy_v3 true "\"model_type\":\"hy_v3\",$small,\"head_dim\":8,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"mlp_bias\":true"
hunyuan="$small,\"head_dim\":8,\"rope_scaling\":{\"type\":\"dynamic\",\"alpha\":16,\"factor\":1}"
train hunyuan_v1_dense true "\"model_type\":\"hunyuan_v1_dense\",$hunyuan,\"attention_bias\":true"
train hunyuan_v1_moe false "\"model_type\":\"hunyuan_v1_moe\",$hunyuan,\"num_experts\":6,\"moe_topk\":3,\"rope_theta\":100"
train cohere true "\"model_type\":\"cohere\",$small,\"logit_scale\":0.25,\"attention_bias\":true,\"rope_theta\":1e4"
train cohere2 false "\"model_type\":\"cohere2\",$small,\"sliding_window\":7,\"sliding_window_pattern\":2"
train exaone4 true "\"model_type\":\"exaone4\",$small,\"sliding_window\":null"
train ministral3 true "\"model_type\":\"ministral3\",$small,\"head_dim\":6,\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":16,\"original_max_position_embeddings\":8,
    \"rope_theta\":1e6,\"llama_4_scaling_beta\":0.1,\"mscale\":1,\"mscale_all_dim\":1}"
train mistral4 true "\"model_type\":\"mistral4\",$latent,\"q_lora_rank\":9,\"v_head_dim\":7,\"n_routed_experts\":6,\"first_k_dense_replace\":1,\"rope_parameters\":{\"rope_type\":\"yarn\",
    \"rope_theta\":1e4,\"factor\":16,\"original_max_position_embeddings\":8,\"llama_4_scaling_beta\":0.1,\"mscale\":0.8,\"mscale_all_dim\":1.2}"
train mimo_v2_flash true "\"model_type\":\"mimo_v2_flash\",$small,\"head_dim\":12,\"v_head_dim\":7,\"n_routed_experts\":6,\"num_experts_per_tok\":3,\"n_group\":3,\"topk_group\":2,\"moe_intermediate_size\":11,
    \"sliding_window\":7,\"attention_bias\":true"
lfm="$small,\"layer_types\":[\"conv\",\"full_attention\"]"
train lfm2 true "\"model_type\":\"lfm2\",$lfm,\"block_multiple_of\":8,\"rope_theta\":1e5"
train lfm2_moe false "\"model_type\":\"lfm2_moe\",$lfm,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"num_dense_layers\":1,\"routed_scaling_factor\":1.7,
    \"conv_L_cache\":4,\"tie_word_embeddings\":false"
train bamba true "\"model_type\":\"bamba\",$small,\"head_dim\":8,\"attn_layer_indices\":[1],\"mamba_n_heads\":6,\"mamba_d_state\":8,\"mlp_bias\":true,
    \"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e5,\"partial_rotary_factor\":1.0}"
train olmo_hybrid true "\"model_type\":\"olmo_hybrid\",$small,\"linear_num_key_heads\":2,\"linear_num_value_heads\":2,\"linear_key_head_dim\":8,\"linear_value_head_dim\":8,
    \"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":null}"
train olmo_hybrid_rope false "\"model_type\":\"olmo_hybrid\",$small,\"linear_num_key_heads\":1,\"linear_num_value_heads\":2,\"linear_key_head_dim\":16,\"linear_value_head_dim\":8,
    \"linear_conv_kernel_dim\":3,\"linear_allow_neg_eigval\":false,\"attention_bias\":true,\"tie_word_embeddings\":true"
train falcon_h1 true "\"model_type\":\"falcon_h1\",$small,\"mamba_n_heads\":2,\"mamba_d_ssm\":32,\"mamba_d_state\":8,\"mamba_d_head\":\"auto\",\"embedding_multiplier\":5.656854249492381,\"lm_head_multiplier\":0.1,
    \"mlp_multipliers\":[0.8838834764831844,0.5859375],\"key_multiplier\":0.390625,\"attention_out_multiplier\":0.9375,\"ssm_in_multiplier\":1.25,\"ssm_out_multiplier\":0.23570226039551587,
    \"ssm_multipliers\":[0.3535533905932738,0.25,0.3535533905932738,0.5,0.3535533905932738],\"rope_theta\":1e11"
train falcon_h1_norm false "\"model_type\":\"falcon_h1\",$small,\"head_dim\":8,\"mamba_n_heads\":6,\"mamba_d_ssm\":null,\"mamba_d_head\":8,\"mamba_d_state\":16,\"mamba_n_groups\":2,\"mamba_d_conv\":3,\"mamba_rms_norm\":true,
    \"mamba_norm_before_gate\":false,\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true,\"mamba_conv_bias\":false"
train afmoe true "\"model_type\":\"afmoe\",$small,\"head_dim\":8,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"num_shared_experts\":1,\"route_scale\":1.7,\"sliding_window\":7,
    \"global_attn_every_n_layers\":2,\"mup_enabled\":true,\"attention_bias\":true"
train kimi_linear true "\"model_type\":\"kimi_linear\",$latent,\"v_head_dim\":7,\"num_experts\":6,
    \"linear_attn_config\":{\"full_attn_layers\":[1],\"kda_layers\":[2],\"head_dim\":8,\"num_heads\":3,\"short_conv_kernel_size\":4},\"mla_use_nope\":true"
train kimi_linear_groups false "\"model_type\":\"kimi_linear\",$latent,\"v_head_dim\":6,\"q_lora_rank\":9,\"num_local_experts\":6,\"n_group\":3,\"topk_group\":2,\"n_shared_experts\":2,
    \"layer_types\":[\"linear_attention\",\"full_attention\"],\"linear_head_dim\":16,\"linear_num_heads\":2,\"linear_conv_kernel_dim\":3,\"attention_bias\":true,\"norm_topk_prob\":false,
    \"routed_scaling_factor\":1.5,\"mlp_layer_types\":[\"sparse\",\"sparse\"]"
wide=$(echo "$small" | sed 's/"hidden_size":24/"hidden_size":32/;s/"num_key_value_heads":2,//')
train gpt_neox true "\"model_type\":\"gpt_neox\",$wide"
train gpt_neox_serial false "\"model_type\":\"gpt_neox\",$wide,\"rotary_pct\":1.0,\"rotary_emb_base\":500,\"use_parallel_residual\":false,\"hidden_act\":\"gelu_new\",
    \"attention_bias\":false,\"tie_word_embeddings\":true,\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2.5}"
opt=$(echo "$wide" | sed 's/"intermediate_size"/"ffn_dim"/')
train opt true "\"model_type\":\"opt\",$opt"
train opt_plain false "\"model_type\":\"opt\",$opt,\"activation_function\":\"gelu\",\"enable_bias\":false,\"tie_word_embeddings\":false,\"init_std\":0.006"
train starcoder2 true "\"model_type\":\"starcoder2\",$small,\"sliding_window\":7,\"rope_theta\":1e5"
train stablelm true "\"model_type\":\"stablelm\",$wide,\"num_key_value_heads\":2,\"use_qkv_bias\":true"
train stablelm_parallel false "\"model_type\":\"stablelm\",$wide,\"num_key_value_heads\":4,\"use_parallel_residual\":true,\"partial_rotary_factor\":0.5"
linear="$small,\"head_dim\":8,\"linear_num_key_heads\":2,\"linear_num_value_heads\":4,\"linear_key_head_dim\":8,\"linear_value_head_dim\":16,\"full_attention_interval\":2"
train qwen3_5 true "\"model_type\":\"qwen3_5_text\",$linear,\"tie_word_embeddings\":true"
linear="$linear,\"num_experts\":6,\"num_experts_per_tok\":3,\"moe_intermediate_size\":11,\"shared_expert_intermediate_size\":17"
train qwen3_5_moe false "\"model_type\":\"qwen3_5_moe_text\",$(echo "$linear" | sed 's/"intermediate_size":29,//'),\"linear_conv_kernel_dim\":3"
train qwen3_next true "\"model_type\":\"qwen3_next\",$linear,\"mlp_only_layers\":[0],\"rope_theta\":1e7,\"partial_rotary_factor\":0.5"
train exaone4_window true "\"model_type\":\"exaone4\",$small,\"sliding_window\":7,\"layer_types\":[\"sliding_attention\",\"full_attention\"]"
train gemma3 true "\"model_type\":\"gemma3_text\",$small,\"head_dim\":8,\"query_pre_attn_scalar\":10,\"sliding_window\":7,\"sliding_window_pattern\":2,
    \"rope_parameters\":{\"full_attention\":{\"rope_type\":\"linear\",\"factor\":2.5,\"rope_theta\":1000},\"sliding_attention\":{\"rope_theta\":50}}"
train gemma3_full false "\"model_type\":\"gemma3_text\",$small,\"head_dim\":8,\"layer_types\":[\"full_attention\",\"full_attention\"],\"tie_word_embeddings\":false"
train gemma2 true "\"model_type\":\"gemma2\",$small,\"head_dim\":8,\"query_pre_attn_scalar\":10,\"sliding_window\":7,\"attn_logit_softcapping\":1.5,\"rope_theta\":500"
train gemma2_full false "\"model_type\":\"gemma2\",$small,\"head_dim\":8,\"layer_types\":[\"full_attention\",\"full_attention\"],\"attention_bias\":true,
    \"attn_logit_softcapping\":null,\"final_logit_softcapping\":null"
gemma4="\"model_type\":\"gemma4_text\",$small,\"head_dim\":8,\"global_head_dim\":16,\"hidden_size_per_layer_input\":0,\"sliding_window\":7,
    \"layer_types\":[\"sliding_attention\",\"full_attention\"]"
train gemma4 true "$gemma4,\"attention_k_eq_v\":true,\"num_global_key_value_heads\":1,\"final_logit_softcapping\":30"
train gemma4_plain false "$gemma4,\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"proportional\",\"rope_theta\":1000,\"partial_rotary_factor\":0.5,
    \"factor\":2.5},\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":50}}"
train gemma4_moe true "$gemma4,\"attention_k_eq_v\":true,\"num_global_key_value_heads\":4,\"enable_moe_block\":true,\"num_experts\":6,\"top_k_experts\":3,\"moe_intermediate_size\":11"
train gemma4_small true "\"model_type\":\"gemma4_text\",${small/layers\":2/layers\":4},\"head_dim\":8,\"global_head_dim\":16,\"sliding_window\":7,
    \"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\",\"full_attention\"],\"hidden_size_per_layer_input\":8,\"vocab_size_per_layer_input\":256,\"num_kv_shared_layers\":2,\"use_double_wide_mlp\":true"
# Of a folder with images what is written is a text model's, configuration and all.
for name in gemma3_images llama4_images mistral3_images mistral4_images qwen2_vl_images qwen2_5_vl_images qwen3_vl_images qwen3_vl_moe_images qwen3_5_images qwen3_5_moe_images kimi_k25_images gemma4_image gemma4_small_image gemma4_unified; do
    mkdir "$dir/$name"
    check "$name: exported" run export "tests/vectors/families/$name" --to "$dir/$name/step-1"
    names="$names $name"
done
oss="\"model_type\":\"gpt_oss\",$small,\"head_dim\":8,\"num_local_experts\":5,\"num_experts_per_tok\":2"
train gpt_oss true "$oss,\"sliding_window\":7,\"rope_theta\":1e4,
    \"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":32,\"beta_fast\":32,\"beta_slow\":1,\"truncate\":false,\"original_max_position_embeddings\":4096}"
train gpt_oss_plain false "$oss,\"layer_types\":[\"full_attention\",\"full_attention\"],\"attention_bias\":false,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500}"

cat >"$dir/check.py" <<'PY'
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

root = sys.argv[1]
# What transformers must have understood, besides shapes.
want = {
    "gpt2": dict(n_head=4, n_inner=96, tie_word_embeddings=True), "gpt2_untied": dict(n_inner=31, tie_word_embeddings=False),
    "llama": dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-6),
    "llama3": dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                                    "original_max_position_embeddings": 48}, head_dim=10, attention_bias=True, mlp_bias=True),
    "linear": dict(rope_parameters={"rope_type": "linear", "rope_theta": 1000, "factor": 2.5}),
    "yarn": dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "beta_slow": 1, "beta_fast": 8, "truncate": False,
                                  "attention_factor": 0.9, "original_max_position_embeddings": 16}),
    "mistral": dict(sliding_window=7, head_dim=8, num_key_value_heads=2), "mistral_full": dict(sliding_window=None, head_dim=6),
    "qwen2": dict(use_sliding_window=False, layer_types=["full_attention"] * 2, tie_word_embeddings=True),
    "qwen2_window": dict(sliding_window=5, layer_types=["full_attention", "sliding_attention"]),
    "qwen3": dict(head_dim=12, attention_bias=False), "qwen3_bias": dict(head_dim=8, attention_bias=True),
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=None, num_key_value_heads=2),
    "qwen3_moe": dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, norm_topk_prob=True, mlp_only_layers=[]),
    "qwen3_moe_dense": dict(num_experts=6, mlp_only_layers=[0], decoder_sparse_step=1),
    "glm4_moe": dict(n_routed_experts=6, n_group=3, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.7, attention_bias=True, num_mtp_layers=0,
                     use_qk_norm=False, first_k_dense_replace=1, norm_topk_prob=True,
                     rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "glm4_moe_free": dict(n_routed_experts=5, n_group=1, norm_topk_prob=False, use_qk_norm=True, attention_bias=False,
                          rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
    "dots1": dict(n_routed_experts=6, n_group=3, topk_group=2, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5, attention_bias=True,
                  norm_topk_prob=False, sliding_window=7, layer_types=["full_attention", "sliding_attention"]),
    "solar_open": dict(n_routed_experts=6, n_group=1, n_shared_experts=1, routed_scaling_factor=1.7, attention_bias=False, norm_topk_prob=True,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "deepseek_v3": dict(n_routed_experts=6, n_group=3, topk_group=2, first_k_dense_replace=1, n_shared_experts=1, kv_lora_rank=10, q_lora_rank=9,
                        v_head_dim=7, qk_nope_head_dim=6, qk_rope_head_dim=4, rope_interleave=True, routed_scaling_factor=2.5, num_mtp_layers=0,
                        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "beta_slow": 1, "beta_fast": 32, "truncate": True,
                                         "mscale": 0.8, "mscale_all_dim": 1.2, "original_max_position_embeddings": 16}),
    "deepseek_v2": dict(n_routed_experts=6, n_group=3, topk_group=2, topk_method="group_limited_greedy", first_k_dense_replace=0, n_shared_experts=2,
                        kv_lora_rank=10, q_lora_rank=None, v_head_dim=8, routed_scaling_factor=1.0, norm_topk_prob=False, attention_bias=True),
    "glm4_moe_lite": dict(n_routed_experts=5, q_lora_rank=8, v_head_dim=10, rope_interleave=False, mlp_layer_types=["dense", "sparse"],
                          routed_scaling_factor=1.8, rms_norm_eps=1e-5, attention_bias=False),
    "deepseek_v32": dict(n_routed_experts=6, n_group=3, topk_group=2, n_shared_experts=1, kv_lora_rank=10, q_lora_rank=9, v_head_dim=7, qk_nope_head_dim=6,
                         qk_rope_head_dim=4, routed_scaling_factor=2.5, mlp_layer_types=["dense", "sparse"], index_topk=24, index_n_heads=3, index_head_dim=8,
                         max_position_embeddings=64),
    "glm_moe_dsa": dict(n_routed_experts=5, q_lora_rank=8, v_head_dim=10, mlp_layer_types=["dense", "sparse"], indexer_types=["full", "shared"],
                        index_topk=24, index_n_heads=2, index_head_dim=6, routed_scaling_factor=2.5, rms_norm_eps=1e-5, max_position_embeddings=64),
    "deepseek_v4": dict(layer_types=["compressed_sparse_attention", "heavily_compressed_attention"], mlp_layer_types=["hash_moe", "moe"], hc_mult=4, hc_sinkhorn_iters=4, qk_rope_head_dim=4,
                        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, sliding_window=5, index_topk=2, o_groups=2, routed_scaling_factor=1.7,
                        rope_parameters={"main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "compress": {
                            "rope_type": "yarn", "rope_theta": 160000, "factor": 4, "beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": 1, "original_max_position_embeddings": 16,
                            "partial_rotary_factor": 0.5}}),
    "deepseek_v4_all": dict(layer_types=["sliding_attention", "compressed_sparse_attention"], mlp_layer_types=["moe", "moe"], hc_mult=2, hc_eps=1e-4, tie_word_embeddings=True, o_groups=4,
                            rope_parameters={"main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                                             "compress": {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}}),
    "exaone_moe": dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, n_group=3, topk_group=2, num_shared_experts=1, sliding_window=7,
                       layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse"], routed_scaling_factor=2.5, rms_norm_eps=1e-5),
    "phi3": dict(sliding_window=9, resid_pdrop=0.1, num_key_value_heads=2, rms_norm_eps=1e-5),
    "phi3_long": dict(original_max_position_embeddings=12, rope_parameters={
        "rope_type": "longrope", "type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1, 1.25],
        "long_factor": [1.5, 9], "attention_factor": 1.25, "original_max_position_embeddings": 12}),
    "qwen2_moe": dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, shared_expert_intermediate_size=17, qkv_bias=True),
    "smollm3": dict(no_rope_layers=[1, 0], mlp_bias=True, attention_bias=False, tie_word_embeddings=True, layer_types=["full_attention"] * 2,
                    rope_parameters={"rope_type": "default", "rope_theta": 2e6}),
    "olmo2": dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5, head_dim=8, attention_bias=True),
    "minimax_m2": dict(num_local_experts=5, num_experts_per_tok=2, head_dim=8,
                       rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}),
    "olmo3": dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"], attention_bias=False, rms_norm_eps=1e-5,
                  rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1000},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 50}}),
    "olmo3_plain": dict(layer_types=["full_attention"] * 2, attention_bias=True),
    "gemma": dict(hidden_act="gelu_pytorch_tanh", attention_bias=False, tie_word_embeddings=True, head_dim=8, rms_norm_eps=1e-6,
                  rope_parameters={"rope_type": "default", "rope_theta": 500}),
    "granite": dict(embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.4, logits_scaling=8, mlp_bias=True, attention_bias=False),
    "olmoe": dict(num_experts=6, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=False, clip_qkv=None),
    "seed_oss": dict(attention_bias=True, attention_out_bias=True, mlp_bias=False, head_dim=8),
    "glm": dict(attention_bias=True, head_dim=8, rms_norm_eps=1.5625e-7, rope_parameters={"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}),
    "glm4": dict(attention_bias=False, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5}),
    "granitemoehybrid": dict(residual_multiplier=0.22, attention_bias=True, position_embedding_type="rope", num_local_experts=0, shared_intermediate_size=31,
                             layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "granitemoehybrid_mamba": dict(layer_types=["linear_attention", "full_attention"], mamba_n_heads=3, mamba_d_head=16, mamba_d_state=24, mamba_d_conv=3, mamba_expand=2,
                                   mamba_n_groups=1, mamba_conv_bias=True, mamba_proj_bias=False),
    "granitemoehybrid_moe": dict(num_local_experts=5, num_experts_per_tok=3, intermediate_size=29, shared_intermediate_size=31, residual_multiplier=0.22, mamba_d_head=8),
    "nemotron_h": dict(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], mamba_num_heads=6, mamba_head_dim=8, n_groups=3, ssm_state_size=16, conv_kernel=4, head_dim=8,
                       intermediate_size=29, mlp_bias=True, time_step_min=0.01, use_conv_bias=True, num_key_value_heads=2, layer_norm_epsilon=1e-5, mlp_hidden_act="relu2"),
    "nemotron_h_moe": dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=6, num_experts_per_tok=3, n_group=3, topk_group=2, moe_intermediate_size=11,
                           moe_shared_expert_intermediate_size=19, routed_scaling_factor=2.5, norm_topk_prob=True, use_conv_bias=False, conv_kernel=3, time_step_min=0.001, mlp_bias=False, moe_latent_size=10),
    "granitemoehybrid_nope": dict(position_embedding_type="nope", tie_word_embeddings=True, attention_bias=False),
    "llama4": dict(num_local_experts=5, num_experts_per_tok=1, moe_layers=[1], intermediate_size=29, intermediate_size_mlp=31, use_qk_norm=True, no_rope_layers=[1, 0],
                   layer_types=["chunked_attention", "full_attention"], attention_chunk_size=7, attn_temperature_tuning=True, floor_scale=4, attn_scale=0.3,
                   attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama4_each": dict(num_experts_per_tok=2, moe_layers=[0, 1], use_qk_norm=False, attention_chunk_size=None, attn_temperature_tuning=False,
                        attention_bias=True, tie_word_embeddings=True, layer_types=["full_attention"] * 2),
    "llama4_images": dict(model_type="llama4_text", num_local_experts=5, vocab_size=41, attention_chunk_size=8192),
    "hunyuan_v1_dense": dict(attention_bias=True, head_dim=8, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4 * 16 ** (8 / 6)}),
    "hunyuan_v1_moe": dict(num_experts=6, moe_topk=3, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 100 * 16 ** (8 / 6)}),
    "cohere": dict(attention_bias=True, logit_scale=0.25, num_key_value_heads=2, tie_word_embeddings=True, layer_norm_eps=1e-5, use_qk_norm=False,
                   rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "cohere2": dict(attention_bias=False, logit_scale=0.0625, sliding_window=7, layer_types=["sliding_attention", "full_attention"],
                    rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "hy_v3": dict(num_experts=6, num_experts_per_tok=3, num_shared_experts=1, moe_intermediate_size=11, router_scaling_factor=2.826, attention_bias=False,
                  mlp_bias=True, mlp_layer_types=["dense", "sparse"], head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 11158840}),
    "ernie4_5_moe": dict(moe_num_experts=6, moe_k=3, moe_intermediate_size=11, moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=1,
                         moe_layer_interval=1, use_bias=False, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "ernie4_5": dict(use_bias=True, tie_word_embeddings=True, head_dim=8, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "exaone4": dict(sliding_window=None, layer_types=["full_attention"] * 2, rms_norm_eps=1e-5),
    "ministral3": dict(head_dim=6, sliding_window=None, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16, "beta_fast": 32, "beta_slow": 1, "truncate": True, "original_max_position_embeddings": 8,
        "attention_factor": 1, "llama_4_scaling_beta": 0.1}),
    "mimo_v2_flash": dict(n_routed_experts=6, num_experts_per_tok=3, n_group=3, topk_group=2, moe_intermediate_size=11, head_dim=12, v_head_dim=7, num_key_value_heads=2, sliding_window=7,
                          attention_bias=True, attention_value_scale=0.707, layer_types=["full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse"], rope_parameters={
                              "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}}),
    "lfm2": dict(layer_types=["conv", "full_attention"], intermediate_size=24, block_auto_adjust_ff_dim=False, norm_eps=1e-5, tie_word_embeddings=True, conv_L_cache=3,
                 rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, num_dense_layers=1, intermediate_size=29,
                     routed_scaling_factor=1.7, norm_topk_prob=True, conv_L_cache=4, tie_word_embeddings=False),
    "olmo_hybrid": dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                        linear_conv_kernel_dim=4, linear_allow_neg_eigval=True, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": None}),
    "olmo_hybrid_rope": dict(linear_num_value_heads=2, linear_value_head_dim=8, linear_conv_kernel_dim=3, linear_allow_neg_eigval=False, attention_bias=True, tie_word_embeddings=True,
                             rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "falcon_h1": dict(mamba_n_heads=2, mamba_d_ssm=32, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=4, mamba_rms_norm=False, embedding_multiplier=5.656854249492381,
                      lm_head_multiplier=0.1, mlp_multipliers=[0.8838834764831844, 0.5859375], key_multiplier=0.390625, attention_in_multiplier=1.0, attention_out_multiplier=0.9375,
                      ssm_in_multiplier=1.25, ssm_out_multiplier=0.23570226039551587, ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
                      rope_parameters={"rope_type": "default", "rope_theta": 1e11}),
    "falcon_h1_norm": dict(mamba_d_ssm=48, mamba_d_head=8, mamba_n_groups=2, mamba_d_conv=3, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_conv_bias=False, attention_bias=True,
                           mlp_bias=True, tie_word_embeddings=True, head_dim=8, lm_head_multiplier=1.0),
    "afmoe": dict(layer_types=["sliding_attention", "full_attention"], num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, num_shared_experts=1, num_dense_layers=1, head_dim=8,
                  route_scale=1.7, sliding_window=7, mup_enabled=True, attention_bias=True, intermediate_size=29, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "kimi_linear": dict(layer_types=["full_attention", "linear_attention"], linear_head_dim=8, linear_num_heads=3, linear_conv_kernel_dim=4, kv_lora_rank=10, q_lora_rank=None, v_head_dim=7,
                        qk_nope_head_dim=6, qk_rope_head_dim=4, num_experts=6, num_experts_per_token=3, num_shared_experts=1, num_expert_group=1, moe_intermediate_size=11, intermediate_size=29,
                        moe_renormalize=True, routed_scaling_factor=2.446, mlp_layer_types=["dense", "sparse"], attention_bias=False, model_max_length=64),
    "kimi_linear_groups": dict(layer_types=["linear_attention", "full_attention"], linear_head_dim=16, linear_num_heads=2, linear_conv_kernel_dim=3, q_lora_rank=9, num_expert_group=3,
                               topk_group=2, num_shared_experts=2, moe_renormalize=False, routed_scaling_factor=1.5, mlp_layer_types=["sparse", "sparse"], attention_bias=True),
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=4, mlp_bias=True, attention_bias=False, z_loss_coefficient=0.0,
                  rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0}),
    "mistral4": dict(n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, kv_lora_rank=10, q_lora_rank=9, v_head_dim=7, qk_nope_head_dim=6,
                     qk_rope_head_dim=4, head_dim=10, rope_interleave=True, routed_scaling_factor=1.0, norm_topk_prob=True, rope_parameters={
                         "rope_type": "yarn", "rope_theta": 1e4, "factor": 16, "beta_fast": 32, "beta_slow": 1, "truncate": True, "original_max_position_embeddings": 8,
                         "mscale": 0.8, "mscale_all_dim": 1.2, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.4}),
    "mistral4_images": dict(model_type="mistral4", q_lora_rank=None, attention_bias=True, rope_interleave=False, n_shared_experts=2),
    "exaone4_window": dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"]),
    "gpt_neox": dict(use_parallel_residual=True, hidden_act="gelu", attention_bias=True, layer_norm_eps=1e-5, tie_word_embeddings=False,
                     rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
    "gpt_neox_serial": dict(use_parallel_residual=False, hidden_act="gelu_pytorch_tanh", attention_bias=False, tie_word_embeddings=True,
                            rope_parameters={"rope_type": "linear", "rope_theta": 500, "factor": 2.5, "partial_rotary_factor": 1.0}),
    "opt": dict(ffn_dim=29, activation_function="relu", enable_bias=True, do_layer_norm_before=True, word_embed_proj_dim=32, tie_word_embeddings=True),
    "opt_plain": dict(activation_function="gelu", enable_bias=False, tie_word_embeddings=False, init_std=0.006),
    "starcoder2": dict(sliding_window=7, num_key_value_heads=2, hidden_act="gelu_pytorch_tanh", use_bias=True, norm_epsilon=1e-5, tie_word_embeddings=True,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
    "stablelm": dict(use_qkv_bias=True, use_parallel_residual=False, num_key_value_heads=2, hidden_act="silu",
                     rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
    "stablelm_parallel": dict(use_qkv_bias=False, use_parallel_residual=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "gemma3": dict(query_pre_attn_scalar=10, sliding_window=7, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True,
                   hidden_activation="gelu_pytorch_tanh", attention_bias=False,
                   rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1000},
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 50}}),
    "gemma2": dict(query_pre_attn_scalar=10, sliding_window=7, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True,
                   attn_logit_softcapping=1.5, final_logit_softcapping=30, hidden_activation="gelu_pytorch_tanh",
                   rope_parameters={"rope_type": "default", "rope_theta": 500}),
    "gemma2_full": dict(layer_types=["full_attention"] * 2, attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3_images": dict(model_type="gemma3_text", vocab_size=41, sliding_window=5), "mistral3_images": dict(model_type="mistral", head_dim=6),
    "qwen2_vl_images": dict(model_type="qwen2", tie_word_embeddings=True), "qwen2_5_vl_images": dict(model_type="qwen2", num_hidden_layers=3),
    "qwen3_5": dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_conv_kernel_dim=4, head_dim=8, num_key_value_heads=2,
                    tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
    "qwen3_5_moe": dict(linear_conv_kernel_dim=3, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=11, shared_expert_intermediate_size=17),
    "qwen3_next": dict(linear_num_key_heads=2, mlp_only_layers=[0], decoder_sparse_step=1, norm_topk_prob=True, intermediate_size=29,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}),
    "kimi_k25_images": dict(model_type="deepseek_v3", n_routed_experts=6, routed_scaling_factor=2.827, v_head_dim=6, tie_word_embeddings=False),
    "qwen3_5_images": dict(model_type="qwen3_5_text", tie_word_embeddings=True, vocab_size=41),
    "qwen3_5_moe_images": dict(model_type="qwen3_5_moe_text", tie_word_embeddings=False, num_experts=6),
    "qwen3_vl_images": dict(model_type="qwen3", tie_word_embeddings=False),
    "qwen3_vl_moe_images": dict(model_type="qwen3_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=11, norm_topk_prob=True, mlp_only_layers=[0]),
    "gemma4": dict(attention_k_eq_v=True, sliding_window=7, layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=30,
                   hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=False, tie_word_embeddings=True, rms_norm_eps=1e-6,
                   hidden_activation="gelu_pytorch_tanh", attention_bias=False, rope_parameters={
                       "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    "gemma4_plain": dict(attention_k_eq_v=False, final_logit_softcapping=None, rope_parameters={
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000, "partial_rotary_factor": 0.5, "factor": 2.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50}}),
    "gemma4_moe": dict(enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=11, attention_k_eq_v=True),
    "gemma4_small": dict(num_hidden_layers=4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=256, num_kv_shared_layers=2, use_double_wide_mlp=True),
    "gemma4_small_image": dict(model_type="gemma4_text", hidden_size_per_layer_input=8, num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4_image": dict(model_type="gemma4_text", vocab_size=41, sliding_window=5), "gemma4_unified": dict(vocab_size=41, sliding_window=5),
    "gpt_oss": dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=7, layer_types=["sliding_attention", "full_attention"],
                    attention_bias=True, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 32, "beta_fast": 32, "beta_slow": 1,
                                                          "truncate": False, "original_max_position_embeddings": 4096}),
    "gpt_oss_plain": dict(layer_types=["full_attention"] * 2, attention_bias=False,
                          rope_parameters={"rope_type": "default", "rope_theta": 500}),
    "gemma3_full": dict(query_pre_attn_scalar=256, layer_types=["full_attention"] * 2, tie_word_embeddings=False),
}


# transformers holds a layer's experts in two tensors; files have each expert's own.
def by_expert(model):
    mixtral = model.config.model_type in ("mixtral", "minimax_m2", "deepseek_v4", "lfm2_moe", "kimi_linear")
    for key, t in model.state_dict().items():
        dense = model.config.model_type == "kimi_linear" and any(f".mlp.{kind}_proj." in key for kind in ("gate", "up", "down"))
        key = key.replace(".mlp.", ".block_sparse_moe.") if mixtral and model.config.model_type != "deepseek_v4" and not dense else key.replace(".gate.moe_statics.", ".moe_statics.")
        if model.config.model_type == "mimo_v2_flash":
            key = key.replace(".sinks", ".attention_sink_bias")
        if model.config.model_type == "exaone_moe":
            key = key.replace(".gate.e_score", ".e_score")
        if model.config.model_type == "nemotron_h":
            key = key.replace("model.", "backbone.")
        if model.config.model_type == "hy_v3":
            key = key.replace(".mlp.gate.", ".mlp.router.gate.").replace("e_score_correction_bias", "expert_bias").replace(".shared_experts.", ".shared_mlp.")
        if model.config.model_type == "granitemoehybrid":
            key = key.replace(".router.", ".router.layer.").replace("experts.gate_up_proj", "input_linear.weight").replace("experts.down_proj", "output_linear.weight")
        if model.config.model_type == "olmo_hybrid" and key.startswith("model.layers.") and model.config.layer_types[int(key.split(".")[2])] == "linear_attention":
            key = key.replace(".input_layernorm.", ".attention_layer_norm.").replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
        key = key.replace(".forget_gate.", ".")
        if model.config.model_type in ("olmo_hybrid", "kimi_linear") and "conv1d" in key:
            yield from zip((key.replace("conv1d", f"{kind}_conv1d") for kind in "qkv"), t.chunk(3))
            continue
        if t.ndim < 3 or "conv1d" in key or key.endswith("A_log") or ".conv." in key or model.config.model_type in ("gpt_oss", "gemma4_text", "llama4_text", "granitemoehybrid", "mistral4"):  # whose files have the two tensors
            yield key, t
            continue
        kinds = [("w2", "down_proj")] if key.endswith("down_proj") else [("w1", "gate_proj"), ("w3", "up_proj")]
        kinds = kinds[-1:] if key.endswith(".up_proj") else kinds
        for kind, part in zip(kinds, t.chunk(len(kinds), dim=1)):
            for e in range(part.shape[0]):
                yield f"{key.rsplit('.', 1)[0]}.{e}.{kind[0 if mixtral else 1]}.weight", part[e]


for name, values in want.items():
    folder = f"{root}/{name}/step-1"
    kind = AutoModelForImageTextToText if AutoConfig.from_pretrained(folder).model_type == "mistral4" else AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype="auto", experts_implementation="eager")
    wrong = [f"{k}: {v}" for k, v in info.items() if v]
    state = dict(by_expert(model))
    stored = load_file(f"{folder}/model.safetensors")
    for key, t in stored.items():
        got = state.get(key, state.get("transformer." + key, state.get(key.replace("embed_out", "lm_head"))))
        if key.endswith(("e_score_correction_bias", "expert_bias", "mlp.gate.weight", "router.gate.weight", "layer_scalar", "A_log")) or name.startswith("kimi_linear") and key.endswith(("block_sparse_moe.gate.weight", "dt_bias")):  # which classes round, or hold in fp32
            got = got.to(t.dtype)
        elif name.startswith("deepseek_v4") and t.is_floating_point():  # whose class holds what is no matrix in fp32, and some of these
            got = got.to(t.dtype)
        if got is None or got.dtype != t.dtype or got.shape != t.shape or got.contiguous().view(torch.uint8).tolist() != t.view(torch.uint8).tolist():
            wrong.append(f"tensor {key}")
    if len(stored) != len({t.data_ptr() for t in state.values()}):
        wrong.append(f"{len(stored)} tensors are stored")
    for key, v in values.items():
        got = getattr(model.config, key)
        if got != v:
            wrong.append(f"{key} is {got}")
    model(torch.tensor([[1, 2, 3]]))
    model.save_pretrained(f"{root}/{name}/again", max_shard_size="8KB")
    print(("not ok" if wrong else "ok"), name, *wrong)
PY
python3 "$dir/check.py" "$dir" >"$dir/python" 2>"$dir/err" || bad "transformers loads every family"
# Experts that are published in 4 bits: exported they are the numbers that transformers' function makes of them.
coded=tests/vectors/families/gpt_oss_mxfp4
check "MXFP4 is exported" run export $coded --to "$dir/plain"
python3 - $coded "$dir/plain" >"$dir/out" 2>&1 <<'PY'
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
coded, plain = (load_file(f"{folder}/model.safetensors") for folder in sys.argv[1:])
for name in [n.removesuffix("_blocks") for n in coded if n.endswith("_blocks")]:
    assert torch.equal(convert_moe_packed_tensors(coded[name + "_blocks"], coded[name + "_scales"], dtype=torch.bfloat16), plain[name]), name
assert "quantization_config" not in json.load(open(f"{sys.argv[2]}/config.json"))
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[2], output_loading_info=True, dtype="auto")
assert not any(info.values()), info
PY
check "MXFP4 is what transformers makes of it" test $? = 0
for name in $names; do
    grep -E "^(not )?ok $name( |\$)" "$dir/python" >"$dir/out"
    check "$name: transformers loads it, tensors equal byte for byte" grep -qx "ok $name" "$dir/out"
    run inspect "$dir/$name/again" --json
    check "$name: what transformers saves is the same model" grep -q '"fits": true' "$dir/out"
done
echo "1..$n"
