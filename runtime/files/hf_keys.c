/*
 * The keys of Hugging Face's config.json that are known here, which families each belongs to, and the name that each family's class has
 * there. Pure; a training configuration's model section is checked by it.
 * Source: FORMATS S7.
 */
#include "files_internal.h"
#include <string.h>

/* Which families a key belongs to: a bit for each. */
#define OF(family)  (UINT64_C(1) << SPW_FAMILY_##family)
#define GPT2        OF(GPT2)
#define LLAMA       OF(LLAMA)
#define MISTRAL     (OF(MISTRAL) | OF(MINISTRAL3))
#define QWEN        (OF(QWEN2) | OF(QWEN3))
#define MIXTRAL     OF(MIXTRAL)
#define QWEN2_MOE   OF(QWEN2_MOE)
#define QWEN_MOE    (QWEN2_MOE | OF(QWEN3_MOE))
#define EXPERTS     (MIXTRAL | QWEN_MOE)
#define PHI3        OF(PHI3)
#define SMOLLM3     OF(SMOLLM3)
#define OLMO3       OF(OLMO3)
#define OLMO        (OF(OLMO2) | OLMO3)
#define GEMMA2      OF(GEMMA2)
#define GEMMA3      OF(GEMMA3)
#define GEMMA       (GEMMA2 | GEMMA3)
#define GEMMA4      OF(GEMMA4)
#define GPT_OSS     OF(GPT_OSS)
#define GLM         OF(GLM4_MOE)
#define MINIMAX     OF(MINIMAX_M2)
#define DEEPSEEK_V2 OF(DEEPSEEK_V2)
#define DEEPSEEK_V3 OF(DEEPSEEK_V3)
#define GLM_LITE    OF(GLM4_LITE)
#define LATENT      (DEEPSEEK_V2 | DEEPSEEK_V3 | GLM_LITE)
#define DOTS        OF(DOTS1)
#define SOLAR       OF(SOLAR_OPEN)
#define SHARED      (GLM | LATENT | DOTS | SOLAR) /* an expert of all rows beside the others, by DeepSeek's names */
#define GEMMA1      OF(GEMMA)
#define GRANITE4    OF(GRANITE_HYBRID)
#define GRANITE     (OF(GRANITE) | GRANITE4)
#define OLMOE       OF(OLMOE)
#define LLAMA4      OF(LLAMA4)
#define SEED_OSS    OF(SEED_OSS)
#define GLM_DENSE   (OF(GLM) | OF(GLM4))
#define ERNIE_MOE   OF(ERNIE_MOE)
#define ERNIE       (OF(ERNIE) | ERNIE_MOE)
#define HY          OF(HY_V3)
#define HUNYUAN_MOE OF(HUNYUAN_MOE)
#define HUNYUAN     (OF(HUNYUAN) | HUNYUAN_MOE)
#define EXAONE      OF(EXAONE4)
#define QWEN3_5     (OF(QWEN3_5) | OF(QWEN3_5_MOE))
#define QWEN3_NEXT  OF(QWEN3_NEXT)
#define LINEAR      (QWEN3_5 | QWEN3_NEXT)
#define LINEAR_MOE  (OF(QWEN3_5_MOE) | QWEN3_NEXT)
#define FULL                                                                                                           \
    (GEMMA1 | GRANITE | OLMOE | SEED_OSS | (SHARED & ~DOTS) | MINIMAX | GLM_DENSE | ERNIE | HY | HUNYUAN | LINEAR |    \
     LLAMA4) /* without a window */
#define LLAMAS                                                                                                         \
    (FULL | DOTS | LLAMA | MISTRAL | QWEN | EXPERTS | PHI3 | SMOLLM3 | OLMO | GEMMA | GEMMA4 | GPT_OSS | EXAONE)
#define NEOX       OF(NEOX)
#define OPT        OF(OPT)
#define STARCODER2 OF(STARCODER2)
#define STABLELM   OF(STABLELM)
#define COHERE2    OF(COHERE2)
#define COHERE     (OF(COHERE) | COHERE2)
#define LAYER_NORM (NEOX | OPT | STARCODER2 | STABLELM | COHERE)
#define ALL        (GPT2 | LLAMAS | LAYER_NORM)
_Static_assert(SPW_FAMILY_COUNT <= 64, "a bit for each family");

static const struct {
    const char *key;
    uint64_t families;
} keys[] = {
    {"model_type", ALL},
    {"architectures", ALL},
    {"vocab_size", ALL},
    {"n_embd", GPT2},
    {"n_layer", GPT2},
    {"n_head", GPT2},
    {"n_inner", GPT2},
    {"n_positions", GPT2},
    {"n_ctx", GPT2},
    {"hidden_size", LLAMAS | LAYER_NORM},
    {"num_hidden_layers", LLAMAS | LAYER_NORM},
    {"num_attention_heads", LLAMAS | LAYER_NORM},
    {"num_key_value_heads", LLAMAS | STARCODER2 | STABLELM | COHERE},
    {"head_dim", LLAMAS | COHERE},
    {"intermediate_size", (LLAMAS & ~(OF(QWEN3_5_MOE) | SOLAR)) | (LAYER_NORM & ~OPT)},
    {"max_position_embeddings", LLAMAS | LAYER_NORM},
    {"original_max_position_embeddings", LLAMAS & ~GEMMA4},
    {"activation_function", GPT2 | OPT},
    {"hidden_act", (LLAMAS & ~(GEMMA3 | GEMMA4)) |
                       (LAYER_NORM & ~OPT)}, /* Gemma 2's files have both, and its class looks at the other */
    {"hidden_activation", GEMMA | GEMMA1 | GEMMA4},
    {"layer_norm_epsilon", GPT2},
    {"rms_norm_eps", LLAMAS},
    {"layer_norm_eps", NEOX | STABLELM | COHERE},
    {"norm_epsilon", STARCODER2},
    {"ffn_dim", OPT},
    {"init_std", OPT},
    {"do_layer_norm_before", OPT},
    {"_remove_final_layer_norm", OPT},
    {"layer_norm_elementwise_affine", OPT},
    {"word_embed_proj_dim", OPT},
    {"enable_bias", OPT},
    {"use_qkv_bias", STABLELM},
    {"qk_layernorm", STABLELM},
    {"initializer_range", ALL & ~OPT},
    {"tie_word_embeddings", ALL},
    {"rope_theta", (LLAMAS & ~GEMMA4) | STARCODER2 | STABLELM | COHERE},
    {"rope_scaling", (LLAMAS & ~GEMMA4) | (LAYER_NORM & ~OPT)},
    {"rope_parameters", LLAMAS | (LAYER_NORM & ~OPT)},
    {"partial_rotary_factor", (LLAMAS & ~GEMMA4) | STABLELM},
    {"rotary_pct", NEOX},
    {"rotary_emb_base", NEOX},
    {"use_parallel_residual", NEOX | STABLELM},
    {"no_rope_layers", SMOLLM3 | LLAMA4},
    {"no_rope_layer_interval", SMOLLM3 | LLAMA4},
    {"rope_local_base_freq", GEMMA3},
    {"attention_bias", LLAMAS | NEOX | COHERE},
    {"mlp_bias", LLAMAS},
    {"sliding_window", (LLAMAS & ~FULL) | STARCODER2 | COHERE2},
    {"use_sliding_window", LLAMAS & ~(FULL | DOTS | GEMMA | GEMMA4 | GPT_OSS | OLMO3 | EXAONE)},
    {"max_window_layers", QWEN | QWEN_MOE | DOTS},
    {"sliding_window_pattern", GEMMA3 | EXAONE | COHERE2},
    {"_sliding_window_pattern", GEMMA3}, /* a note beside layer_types, which transformers does not read either */
    {"query_pre_attn_scalar", GEMMA},
    {"attn_logit_softcapping", GEMMA},
    {"final_logit_softcapping", GEMMA | GEMMA4},
    {"use_bidirectional_attention", GEMMA | GEMMA1 | GEMMA4},
    {"global_head_dim", GEMMA4},
    {"num_global_key_value_heads", GEMMA4},
    {"per_layer_config", GEMMA4},
    {"attention_k_eq_v", GEMMA4},
    {"num_kv_shared_layers", GEMMA4},
    {"use_double_wide_mlp", GEMMA4},
    {"hidden_size_per_layer_input", GEMMA4},
    {"vocab_size_per_layer_input", GEMMA4},
    {"enable_moe_block", GEMMA4},
    {"top_k_experts", GEMMA4},
    {"cache_implementation", GEMMA},
    {"embedding_multiplier", GRANITE},
    {"residual_multiplier", GRANITE},
    {"attention_multiplier", GRANITE},
    {"logits_scaling", GRANITE},
    {"shared_intermediate_size", MINIMAX | GRANITE4},
    {"position_embedding_type", GRANITE4},
    {"layers_block_type", GRANITE4},
    {"intermediate_size_mlp", LLAMA4},
    {"moe_layers", LLAMA4},
    {"interleave_moe_layer_step", LLAMA4},
    {"attention_chunk_size", LLAMA4},
    {"attn_temperature_tuning", LLAMA4},
    {"floor_scale", LLAMA4},
    {"attn_scale", LLAMA4},
    {"attention_out_bias", SEED_OSS},
    {"clip_qkv", OLMOE},
    {"use_bias", ERNIE | STARCODER2},
    {"num_experts", EXPERTS | OLMOE | GPT_OSS | MINIMAX | LINEAR_MOE | GEMMA4 | HY | HUNYUAN_MOE},
    {"num_local_experts", (EXPERTS & ~QWEN2_MOE) | OLMOE | GPT_OSS | MINIMAX | HY | HUNYUAN_MOE | GRANITE4 | LLAMA4},
    {"shared_expert_intermediate_size", QWEN2_MOE | LINEAR_MOE},
    {"qkv_bias", QWEN2_MOE},
    {"num_experts_per_tok", EXPERTS | OLMOE | GPT_OSS | SHARED | MINIMAX | LINEAR_MOE | HY | GRANITE4 | LLAMA4},
    {"n_routed_experts", SHARED},
    {"n_shared_experts", SHARED},
    {"first_k_dense_replace", (SHARED & ~SOLAR) | HY},
    {"n_group", SHARED},
    {"topk_group", SHARED},
    {"routed_scaling_factor", SHARED},
    {"use_qk_norm", GLM | MINIMAX | HUNYUAN | OF(COHERE) | LLAMA4},
    {"kv_lora_rank", LATENT},
    {"q_lora_rank", LATENT},
    {"qk_nope_head_dim", LATENT},
    {"qk_rope_head_dim", LATENT},
    {"v_head_dim", LATENT},
    {"rope_interleave", DEEPSEEK_V3 | GLM_LITE},
    {"topk_method", LATENT},
    {"scoring_func", LATENT | MINIMAX},
    {"rotary_dim", MINIMAX},
    {"qk_norm_type", MINIMAX},
    {"use_routing_bias", MINIMAX},
    {"moe_layer_freq", LATENT},
    {"mlp_layer_types", GLM_LITE | HY},
    {"aux_loss_alpha", LATENT},
    {"seq_aux", LATENT},
    {"ep_size", LATENT},
    {"num_nextn_predict_layers", SHARED | ERNIE_MOE | HY}, /* layers behind the last one, which are left out */
    {"num_mtp_layers", SHARED},
    {"moe_num_experts", ERNIE_MOE},
    {"moe_k", ERNIE_MOE},
    {"moe_num_shared_experts", ERNIE_MOE},
    {"moe_layer_start_index", ERNIE_MOE},
    {"moe_layer_end_index", ERNIE_MOE},
    {"moe_layer_interval", ERNIE_MOE},
    {"moe_norm_min", ERNIE_MOE},
    {"num_shared_experts", HY},
    {"router_scaling_factor", HY},
    {"enable_moe_fp32_combine", HY},
    {"moe_topk", HUNYUAN_MOE},
    {"use_cla", HUNYUAN},
    {"logit_scale", COHERE},
    {"swiglu_limit", GPT_OSS},
    {"swiglu_alpha", GPT_OSS},
    {"moe_intermediate_size", QWEN_MOE | SHARED | LINEAR_MOE | GEMMA4 | ERNIE_MOE | HY},
    {"norm_topk_prob", QWEN_MOE | OLMOE | SHARED | LINEAR_MOE},
    {"decoder_sparse_step", QWEN_MOE | QWEN3_NEXT},
    {"mlp_only_layers", QWEN_MOE | LINEAR_MOE},
    {"output_router_logits",
     EXPERTS | OLMOE | GPT_OSS | SHARED | MINIMAX | LINEAR_MOE | ERNIE_MOE | HY | HUNYUAN_MOE | GRANITE4 | LLAMA4},
    {"router_aux_loss_coef", EXPERTS | OLMOE | GPT_OSS | SHARED | MINIMAX | LINEAR_MOE | ERNIE_MOE | GRANITE4 | LLAMA4},
    {"router_jitter_noise", MIXTRAL | MINIMAX | LLAMA4},
    {"layer_types", LLAMAS | COHERE2},
    {"full_attention_interval", LINEAR},
    {"linear_num_value_heads", LINEAR},
    {"linear_num_key_heads", LINEAR},
    {"linear_key_head_dim", LINEAR},
    {"linear_value_head_dim", LINEAR},
    {"linear_conv_kernel_dim", LINEAR},
    {"attn_output_gate", LINEAR},
    {"mamba_ssm_dtype", LINEAR},       /* of the state in generation, which is fp32 here always */
    {"mtp_num_hidden_layers", LINEAR}, /* layers behind the last one, which are left out */
    {"mtp_use_dedicated_embeddings", LINEAR},
    {"resid_pdrop", GPT2 | PHI3},
    {"embd_pdrop", GPT2 | PHI3},
    {"attn_pdrop", ALL},
    {"attention_dropout", ALL},
    {"hidden_dropout", NEOX | STABLELM},
    {"dropout", OPT},
    {"activation_dropout", OPT},
    {"layerdrop", OPT},
    {"residual_dropout", STARCODER2},
    {"embedding_dropout", STARCODER2},
    {"classifier_dropout", NEOX},
    {"scale_attn_weights", GPT2},
    {"scale_attn_by_inverse_layer_idx", GPT2},
    {"reorder_and_upcast_attn", GPT2},
    {"add_cross_attention", GPT2},
    {"pretraining_tp", LLAMAS},
    {"torch_dtype", ALL},
    {"dtype", ALL},
    {"bos_token_id", ALL},
    {"eos_token_id", ALL},
    {"pad_token_id", ALL},
    {"use_cache", ALL},
    {"transformers_version", ALL},
};

const char *const spw__hf_architectures[SPW_FAMILY_CUSTOM] = {"GPT2LMHeadModel",         "LlamaForCausalLM",
                                                              "MistralForCausalLM",      "Qwen2ForCausalLM",
                                                              "Qwen3ForCausalLM",        "MixtralForCausalLM",
                                                              "Qwen3MoeForCausalLM",     "Phi3ForCausalLM",
                                                              "SmolLM3ForCausalLM",      "Qwen2MoeForCausalLM",
                                                              "Olmo2ForCausalLM",        "Gemma3ForCausalLM",
                                                              "Gemma2ForCausalLM",       "GptOssForCausalLM",
                                                              "Glm4MoeForCausalLM",      "DeepseekV2ForCausalLM",
                                                              "DeepseekV3ForCausalLM",   "Glm4MoeLiteForCausalLM",
                                                              "MiniMaxM2ForCausalLM",    "Olmo3ForCausalLM",
                                                              "GemmaForCausalLM",        "GraniteForCausalLM",
                                                              "OlmoeForCausalLM",        "SeedOssForCausalLM",
                                                              "GlmForCausalLM",          "Glm4ForCausalLM",
                                                              "Ernie4_5ForCausalLM",     "Exaone4ForCausalLM",
                                                              "Ministral3ForCausalLM",   "GPTNeoXForCausalLM",
                                                              "OPTForCausalLM",          "Starcoder2ForCausalLM",
                                                              "StableLmForCausalLM",     "Qwen3_5ForCausalLM",
                                                              "Qwen3_5MoeForCausalLM",   "Qwen3NextForCausalLM",
                                                              "Gemma4ForCausalLM",       "Dots1ForCausalLM",
                                                              "SolarOpenForCausalLM",    "Ernie4_5_MoeForCausalLM",
                                                              "HYV3ForCausalLM",         "HunYuanDenseV1ForCausalLM",
                                                              "HunYuanMoEV1ForCausalLM", "CohereForCausalLM",
                                                              "Cohere2ForCausalLM",      "GraniteMoeHybridForCausalLM",
                                                              "Llama4ForCausalLM"};

const char *
spw_hf_config_key(uint32_t i)
{
    return i < sizeof keys / sizeof keys[0] ? keys[i].key : NULL;
}

bool
spw_hf_config_has_key(spw_family family, const char *key)
{
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (strcmp(keys[i].key, key) == 0)
            return (keys[i].families & UINT64_C(1) << family) != 0;
    }
    return false;
}
