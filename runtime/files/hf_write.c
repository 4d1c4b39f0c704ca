/*
 * A model's configuration into Hugging Face's config.json, with the keys that today's releases write.
 * Source: the configuration classes of transformers.
 */
#include "hf_source.h"

static void
write_gpt2(json_t *o, const spw_model_config *c)
{
    set_size(o, "n_embd", c->width);
    set_size(o, "n_layer", c->layers);
    set_size(o, "n_head", c->heads);
    set_size(o, "n_inner", c->mlp_width);
    set_size(o, "n_positions", c->positions);
    json_object_set_new(o, "activation_function", json_string("gelu_new"));
    json_object_set_new(o, "layer_norm_epsilon", json_real(c->norm_eps));
    json_object_set_new(o, "resid_pdrop", json_real(c->dropout));
    json_object_set_new(o, "embd_pdrop", json_real(c->dropout));
    json_object_set_new(o, "attn_pdrop", json_real(0));
}

static json_t *
yarn_object(const spw_model_config *c)
{
    json_t *o = json_pack("{s:s, s:f, s:f, s:f, s:b, s:I}", "rope_type", "yarn", "factor", c->rope_factor, "beta_slow",
                          c->rope_low, "beta_fast", c->rope_high, "truncate", c->rope_truncate,
                          "original_max_position_embeddings", (json_int_t)c->rope_positions);
    double attention = spw__hf_yarn_attention(c->rope_factor, 1);
    if (c->rope_mscale > 0)
        json_object_set_new(o, "mscale", json_real(c->rope_mscale));
    if (c->rope_all_dim > 0)
        json_object_set_new(o, "mscale_all_dim", json_real(c->rope_all_dim));
    if (c->rope_mscale > 0 && c->rope_all_dim > 0)
        attention = spw__hf_yarn_attention(c->rope_factor, c->rope_mscale) /
                    spw__hf_yarn_attention(c->rope_factor, c->rope_all_dim);
    if (c->rope_attention != attention)
        json_object_set_new(o, "attention_factor", json_real(c->rope_attention));
    return o;
}

static json_t *
factor_list(const float *factors, uint64_t count)
{
    json_t *list = json_array();
    for (uint64_t i = 0; i < count; i++)
        json_array_append_new(list, json_real((double)factors[i]));
    return list;
}

/* Older releases take no more than the three members. */
static json_t *
long_object(const spw_model_config *c)
{
    uint64_t count = spw_model_rope_width(c, 0) / 2;
    json_t *o = json_pack("{s:s, s:o, s:o}", "type", "longrope", "short_factor", factor_list(c->rope_short, count),
                          "long_factor", factor_list(c->rope_long, count));
    if (c->rope_attention !=
        spw__hf_long_attention((double)c->positions / (double)c->rope_positions, c->rope_positions))
        json_object_set_new(o, "attention_factor", json_real(c->rope_attention));
    return o;
}

static json_t *
proportional_object(const spw_model_config *c)
{
    json_t *o = json_pack("{s:s, s:f}", "rope_type", "proportional", "partial_rotary_factor", c->rope_part);
    if (c->rope_factor != 1)
        json_object_set_new(o, "factor", json_real(c->rope_factor));
    return o;
}

static json_t *
rope_scaling(const spw_model_config *c)
{
    switch (c->rope) {
    case SPW_ROPE_LINEAR: return json_pack("{s:s, s:f}", "rope_type", "linear", "factor", c->rope_factor);
    case SPW_ROPE_LONG: return long_object(c);
    case SPW_ROPE_YARN: return yarn_object(c);
    case SPW_ROPE_LLAMA3:
        return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", c->rope_factor,
                         "low_freq_factor", c->rope_low, "high_freq_factor", c->rope_high,
                         "original_max_position_embeddings", (json_int_t)c->rope_positions);
    case SPW_ROPE_PROPORTIONAL: return proportional_object(c);
    case SPW_ROPE_PLAIN: break;
    }
    return NULL;
}

/* By the key that its class has known from the first. */
static void
write_growing_rope(json_t *o, const spw_model_config *c)
{
    json_t *rope = rope_scaling(c);
    json_object_set_new(rope, "rope_theta", json_real(c->rope_theta));
    json_object_set_new(rope, "llama_4_scaling_beta", json_real(c->rope_growth));
    json_object_set_new(o, "rope_parameters", rope);
}

/* By the object in which alone Bamba's class looks for the part. */
static void
write_rope_part(json_t *o, const spw_model_config *c)
{
    json_t *rope = rope_scaling(c);
    if (rope == NULL)
        rope = json_pack("{s:s}", "rope_type", "default");
    json_object_set_new(rope, "rope_theta", json_real(c->rope_theta));
    json_object_set_new(rope, "partial_rotary_factor", json_real(c->rope_part > 0 ? c->rope_part : 1));
    json_object_set_new(o, "rope_parameters", rope);
}

/* By the object in which alone a theta of null is none. */
static void
write_rope_or_none(json_t *o, const spw_model_config *c)
{
    json_t *rope = rope_scaling(c);
    if (rope == NULL)
        rope = json_pack("{s:s}", "rope_type", "default");
    json_object_set_new(rope, "rope_theta", c->rope_theta > 0 ? json_real(c->rope_theta) : json_null());
    json_object_set_new(o, "rope_parameters", rope);
}

/* By newer keys: by older ones releases make different models. */
static void
write_rope_by_layer(json_t *o, const spw_model_config *c)
{
    json_t *full = rope_scaling(c), *sliding;
    if (full == NULL)
        full = json_pack("{s:s}", "rope_type", "default");
    json_object_set_new(full, "rope_theta", json_real(c->rope_theta));
    sliding = json_pack("{s:s, s:f}", "rope_type", "default", "rope_theta",
                        c->rope_local_theta > 0 ? c->rope_local_theta : c->rope_theta);
    if (c->family == SPW_FAMILY_MIMO_V2) { /* whose default is less than all */
        json_object_set_new(full, "partial_rotary_factor", json_real(c->rope_part > 0 ? c->rope_part : 1));
        json_object_set_new(sliding, "partial_rotary_factor", json_real(c->rope_part > 0 ? c->rope_part : 1));
    }
    json_object_set_new(o, "rope_parameters",
                        json_pack("{s:o, s:o}", "full_attention", full, "sliding_attention", sliding));
}

void
spw__hf_write_scaling(json_t *o, const spw_model_config *c)
{
    json_t *scaling = rope_scaling(c);
    if (scaling != NULL)
        json_object_set_new(o, "rope_scaling", scaling);
}

/* The older rope keys: every release reads them. */
static void
write_rope(json_t *o, const spw_model_config *c)
{
    if (spw__hf_of(c->family, OLMO3 | GEMMA4 | MIMO)) {
        write_rope_by_layer(o, c);
        return;
    }
    if (spw__hf_of(c->family, GROWING)) {
        write_growing_rope(o, c);
        return;
    }
    if (c->family == SPW_FAMILY_BAMBA) {
        write_rope_part(o, c);
        return;
    }
    if (c->family == SPW_FAMILY_OLMO_HYBRID) {
        write_rope_or_none(o, c);
        return;
    }
    if (c->rope_theta > 0)
        json_object_set_new(o, "rope_theta", json_real(c->rope_theta));
    if (c->rope_part > 0 || c->family == SPW_FAMILY_GLM4_MOE || spw__hf_of(c->family, GLM_DENSE) ||
        spw__hf_of(c->family, LINEAR)) /* whose default is less than all */
        json_object_set_new(o, "partial_rotary_factor", json_real(c->rope_part > 0 ? c->rope_part : 1));
    spw__hf_write_scaling(o, c);
    if (c->rope == SPW_ROPE_LONG)
        set_size(o, "original_max_position_embeddings", c->rope_positions);
}

static json_t *
no_rope_list(const spw_model_config *c)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++)
        json_array_append_new(list, json_integer(spw_model_has_rope(c, l)));
    return list;
}

static json_t *
layer_types(const spw_model_config *c)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++)
        json_array_append_new(list, json_string(spw_model_window(c, l) > 0 ? "sliding_attention" : "full_attention"));
    return list;
}

static void
write_windows(json_t *o, const spw_model_config *c)
{
    json_object_set_new(o, "layer_types", layer_types(c));
    if (c->window > 0) /* transformers computes nothing by one of null */
        set_size(o, "sliding_window", c->window);
}

static void
write_gemma(json_t *o, const spw_model_config *c)
{
    json_object_set_new(o, "hidden_activation", json_string("gelu_pytorch_tanh"));
    if (c->family == SPW_FAMILY_GEMMA) {
        json_object_set_new(o, "hidden_act", json_string("gelu_pytorch_tanh"));
        return;
    }
    if (c->family == SPW_FAMILY_GEMMA4) {
        write_windows(o, c);
        spw__hf_write_gemma4(o, c);
        return;
    }
    set_size(o, "query_pre_attn_scalar", c->query_scalar);
    if (c->window > 0) /* transformers computes nothing by a window of null, even where no layer has one */
        set_size(o, "sliding_window", c->window);
    if (c->family == SPW_FAMILY_GEMMA2) {
        if (c->window == 0 ||
            (c->full_every != 2 && c->layers > 1)) /* older releases know no other than every second */
            json_object_set_new(o, "layer_types", layer_types(c));
        json_object_set_new(o, "attn_logit_softcapping", c->score_cap > 0 ? json_real(c->score_cap) : json_null());
        json_object_set_new(o, "final_logit_softcapping", c->logit_cap > 0 ? json_real(c->logit_cap) : json_null());
        return;
    }
    set_size(o, "sliding_window_pattern", c->window == 0 ? 1 : c->full_every > 0 ? c->full_every : c->layers + 1);
    if (c->window > 0)
        json_object_set_new(o, "rope_local_base_freq", json_real(c->rope_local_theta));
}

static void
write_granite(json_t *o, const spw_model_config *c)
{
    if (c->family == SPW_FAMILY_GRANITE_HYBRID) {
        set_size(o, "shared_intermediate_size", c->experts > 0 ? c->shared_width : c->mlp_width);
        set_size(o, "num_local_experts", c->experts);
        set_size(o, "num_experts_per_tok", c->choices);
        json_object_set_new(o, "position_embedding_type", json_string(c->rope_theta > 0 ? "rope" : "nope"));
        spw__hf_write_mamba(o, c);
    }
    json_object_set_new(o, "embedding_multiplier", json_real(c->embedding_scale));
    json_object_set_new(o, "residual_multiplier", json_real(c->half_scale));
    json_object_set_new(o, "attention_multiplier", json_real(c->score_scale));
    json_object_set_new(o, "logits_scaling", json_real(c->logit_divisor));
}

/* A window of null is none, and then all layers have rope; with one those without it have none, even if that is all of them. */
void
spw__hf_write_rope_windows(json_t *o, const spw_model_config *c)
{
    bool none = c->window == 0 && c->rope_skip_every == 0;
    json_object_set_new(o, "layer_types", layer_types(c));
    json_object_set_new(o, "sliding_window",
                        none ? json_null() : json_integer(c->window > 0 ? (json_int_t)c->window : 1));
}

static void
write_gpt_oss(json_t *o, const spw_model_config *c)
{
    write_windows(o, c);
    json_object_set_new(o, "swiglu_limit", json_real((double)SPW_GATE_LIMIT));
    if (c->rope == SPW_ROPE_PLAIN) /* without one the class has a yarn of its own */
        json_object_set_new(o, "rope_scaling", json_pack("{s:s}", "rope_type", "default"));
}

static json_t *
mlp_layer_types(const spw_model_config *c)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++)
        json_array_append_new(list, json_string(spw_model_experts(c, l) > 0 ? "sparse" : "dense"));
    return list;
}

static void
write_latent(json_t *o, const spw_model_config *c)
{
    bool v2 = c->family == SPW_FAMILY_DEEPSEEK_V2;
    set_size(o, "kv_lora_rank", c->kv_rank);
    json_object_set_new(o, "q_lora_rank", c->q_rank > 0 ? json_integer((json_int_t)c->q_rank) : json_null());
    set_size(o, "qk_nope_head_dim", c->head_dim - c->rope_dim);
    set_size(o, "qk_rope_head_dim", c->rope_dim);
    set_size(o, "v_head_dim", spw_model_value_dim(c, 0));
    if (c->family == SPW_FAMILY_KIMI_LINEAR) /* which turns nothing */
        return;
    if (!v2 && c->index_keys == 0)
        json_object_set_new(o, "rope_interleave", json_boolean(c->rope_paired));
    if (c->family == SPW_FAMILY_MISTRAL4) /* whose class has no word for it */
        return;
    json_object_set_new(o, "scoring_func", json_string(v2 ? "softmax" : "sigmoid"));
    json_object_set_new(o, "topk_method",
                        json_string(!v2             ? "noaux_tc"
                                    : c->groups > 0 ? "group_limited_greedy"
                                                    : "greedy"));
    if (c->family == SPW_FAMILY_GLM4_LITE || c->index_keys > 0)
        json_object_set_new(o, "mlp_layer_types", mlp_layer_types(c));
    if (c->index_keys > 0)
        spw__hf_write_indexer(o, c);
}

void
spw__hf_write_shared_experts(json_t *o, const spw_model_config *c)
{
    const bool exaone = c->family == SPW_FAMILY_EXAONE_MOE;
    set_size(o, exaone ? "num_experts" : "n_routed_experts", c->experts);
    if (c->family != SPW_FAMILY_MIMO_V2)
        set_size(o, exaone ? "num_shared_experts" : "n_shared_experts", c->shared_width / c->mlp_width);
    set_size(o, "num_experts_per_tok", c->choices);
    set_size(o, "moe_intermediate_size", c->mlp_width);
    if (!spw__hf_of(c->family, SOLAR | MIMO) && !c->halves_apart)
        set_size(o, "first_k_dense_replace", c->dense_first);
    set_size(o, "n_group", c->groups > 0 ? c->groups : 1);
    set_size(o, "topk_group", c->groups > 0 ? c->group_choices : 1);
    json_object_set_new(o, "norm_topk_prob", json_boolean(c->sum_to_one));
    json_object_set_new(o, "routed_scaling_factor", json_real(c->choice_scale > 0 ? c->choice_scale : 1));
    set_size(o, "num_nextn_predict_layers", 0);
    if (c->family == SPW_FAMILY_GLM4_MOE)
        json_object_set_new(o, "use_qk_norm", json_boolean(c->qk_norm));
}

static void
write_ernie_experts(json_t *o, const spw_model_config *c)
{
    set_size(o, "moe_num_experts", c->experts);
    set_size(o, "moe_k", c->choices);
    set_size(o, "moe_intermediate_size", c->mlp_width);
    set_size(o, "moe_num_shared_experts", c->shared_width / c->mlp_width);
    set_size(o, "moe_layer_start_index", c->dense_first);
    set_size(o, "moe_layer_interval", c->sparse_every > 0 ? c->sparse_every : 1);
}

static void
write_hy_experts(json_t *o, const spw_model_config *c)
{
    set_size(o, "num_experts", c->experts);
    set_size(o, "num_experts_per_tok", c->choices);
    set_size(o, "moe_intermediate_size", c->mlp_width);
    set_size(o, "num_shared_experts", c->shared_width / c->mlp_width);
    json_object_set_new(o, "router_scaling_factor", json_real(c->choice_scale));
    json_object_set_new(o, "mlp_layer_types", mlp_layer_types(c));
}

static void
write_afmoe(json_t *o, const spw_model_config *c)
{
    set_size(o, "num_experts", c->experts);
    set_size(o, "num_experts_per_tok", c->choices);
    set_size(o, "moe_intermediate_size", c->mlp_width);
    set_size(o, "num_shared_experts", c->shared_width / c->mlp_width);
    set_size(o, "num_dense_layers", c->dense_first);
    json_object_set_new(o, "route_scale", json_real(c->choice_scale));
    json_object_set_new(o, "mup_enabled", json_boolean(c->embedding_scale > 0));
}

/* Those that have none whatever the step says. */
static json_t *
dense_layers(const spw_model_config *c)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers && l < c->dense_first; l++)
        json_array_append_new(list, json_integer((json_int_t)l));
    return list;
}

static void
write_sizes(json_t *o, const spw_model_config *c)
{
    set_size(o, "hidden_size", c->width);
    set_size(o, "num_hidden_layers", c->layers);
    set_size(o, "num_attention_heads", c->heads);
    set_size(o, "num_key_value_heads",
             c->family == SPW_FAMILY_MIMO_V2 && c->window > 0 ? c->full_kv_heads : c->kv_heads);
    if (c->kv_rank == 0)
        set_size(o, "head_dim", c->head_dim);
    if (c->family != SPW_FAMILY_QWEN3_5_MOE && c->family != SPW_FAMILY_SOLAR_OPEN) /* which have none */
        set_size(o, "intermediate_size", c->dense_width > 0 ? c->dense_width : c->mlp_width);
    if (c->family != SPW_FAMILY_KIMI_LINEAR)
        set_size(o, "max_position_embeddings", c->positions);
}

/* Biases, and between them what sets attention apart. */
static void
write_attention(json_t *o, const spw_model_config *c)
{
    bool q_alone = spw__hf_of(c->family, SEED_OSS | GLM_DENSE);
    bool mlp = spw__hf_of(c->family, LLAMA | SMOLLM3 | OF(GRANITE) | HY | SEED_OSS | BAMBA | FALCON);
    if (mlp)
        json_object_set_new(o, "mlp_bias", json_boolean(c->mlp_bias));
    if (c->family == SPW_FAMILY_GPT_OSS)
        write_gpt_oss(o, c);
    if (spw__hf_of(c->family, ERNIE))
        json_object_set_new(o, "use_bias", json_boolean(c->qkv_bias));
    if (spw__hf_of(c->family, LINEAR | OLMO_HYBRID))
        spw__hf_write_linear(o, c);
    if (mlp || (c->qk_norm && !spw__hf_of(c->family, MINIMAX | EXAONE | LFM)) ||
        spw__hf_of(c->family, GEMMAS | GPT_OSS | GLM_DENSE | GRANITE))
        json_object_set_new(o, "attention_bias", json_boolean(q_alone ? c->qkv_bias : c->out_bias));
    if (c->family == SPW_FAMILY_SEED_OSS)
        json_object_set_new(o, "attention_out_bias", json_boolean(c->out_bias));
}

/* By the names of Mixtral, Qwen, gpt-oss, MiniMax and OLMoE. */
static void
write_plain_experts(json_t *o, const spw_model_config *c)
{
    bool qwen_moe = spw__hf_of(c->family, QWEN_MOE | QWEN3_NEXT);
    if (c->experts > 0 && !c->experts_beside && !spw__hf_of(c->family, GRANITE)) {
        set_size(o, spw__hf_of(c->family, MIXTRAL | MINIMAX | GPT_OSS) ? "num_local_experts" : "num_experts",
                 c->experts);
        set_size(o, "num_experts_per_tok", c->choices);
    }
    if (c->shared_gated)
        set_size(o, "shared_expert_intermediate_size", c->shared_width);
    if (c->family == SPW_FAMILY_QWEN2_MOE)
        json_object_set_new(o, "qkv_bias", json_boolean(c->qkv_bias));
    if (qwen_moe || spw__hf_of(c->family, OLMOE | LFM_MOE))
        json_object_set_new(o, "norm_topk_prob", json_boolean(c->sum_to_one));
    if (qwen_moe || spw__hf_of(c->family, OF(QWEN3_5_MOE) | LFM_MOE))
        set_size(o, "moe_intermediate_size", c->mlp_width);
    if (qwen_moe) {
        set_size(o, "decoder_sparse_step", c->sparse_every > 0 ? c->sparse_every : 1);
        json_object_set_new(o, "mlp_only_layers", dense_layers(c));
    }
}

static void
write_experts(json_t *o, const spw_model_config *c)
{
    if (c->family == SPW_FAMILY_LLAMA4) {
        spw__hf_write_llama4(o, c);
    } else if (c->family == SPW_FAMILY_KIMI_LINEAR) {
        spw__hf_write_kimi(o, c);
    } else if (spw__hf_of(c->family, SHARED)) {
        spw__hf_write_shared_experts(o, c);
        if (spw__hf_of(c->family, EXAONE_MOE | MIMO))
            json_object_set_new(o, "mlp_layer_types", mlp_layer_types(c));
        if (c->family != SPW_FAMILY_EXAONE_MOE)
            json_object_set_new(o, "attention_bias", json_boolean(c->qkv_bias));
        if (c->family == SPW_FAMILY_MIMO_V2)
            spw__hf_write_mimo(o, c);
    } else if (c->family == SPW_FAMILY_ERNIE_MOE) {
        write_ernie_experts(o, c);
    } else if (c->family == SPW_FAMILY_HY_V3) {
        write_hy_experts(o, c);
    } else if (c->family == SPW_FAMILY_AFMOE) {
        write_afmoe(o, c);
    } else if (c->family == SPW_FAMILY_LFM2_MOE) {
        write_plain_experts(o, c);
        set_size(o, "num_dense_layers", c->dense_first);
        json_object_set_new(o, "routed_scaling_factor", json_real(c->choice_scale));
    } else if (c->family == SPW_FAMILY_HUNYUAN_MOE) {
        set_size(o, "num_experts", c->experts);
        set_size(o, "moe_topk", c->choices);
    } else {
        write_plain_experts(o, c);
    }
}

/* Which layers have a window. */
static void
write_layers(json_t *o, const spw_model_config *c)
{
    if (spw__hf_of(c->family, QWEN | QWEN_MOE))
        json_object_set_new(o, "use_sliding_window", json_boolean(c->window > 0));
    if (spw__hf_of(c->family, QWEN | DOTS))
        set_size(o, "max_window_layers", c->window > 0 ? c->window_from : c->layers);
    if (spw__hf_of(c->family, EXAONE | AFMOE))
        spw__hf_write_rope_windows(o, c);
    else if (spw__hf_of(c->family, OLMO3 | MIMO))
        write_windows(o, c);
    else if (!spw__hf_of(c->family,
                         LLAMA | OF(OLMO2) | GPT_OSS | FULL | GEMMAS)) /* null, not absent: that would be 4096 */
        json_object_set_new(o, "sliding_window", c->window > 0 ? json_integer((json_int_t)c->window) : json_null());
}

static void
write_llama(json_t *o, const spw_model_config *c)
{
    write_sizes(o, c);
    if (spw__hf_of(c->family, GEMMAS))
        write_gemma(o, c);
    else
        json_object_set_new(o, "hidden_act", json_string("silu"));
    if (spw__hf_of(c->family, LFM))
        spw__hf_write_lfm(o, c);
    else
        json_object_set_new(o, "rms_norm_eps", json_real(c->norm_eps));
    write_rope(o, c);
    if (c->family == SPW_FAMILY_PHI3)
        json_object_set_new(o, "resid_pdrop", json_real(c->dropout));
    if (c->family == SPW_FAMILY_SMOLLM3)
        json_object_set_new(o, "no_rope_layers", no_rope_list(c));
    write_attention(o, c);
    if (spw__hf_of(c->family, GRANITE))
        write_granite(o, c);
    if (c->family == SPW_FAMILY_BAMBA)
        spw__hf_write_mamba(o, c);
    if (c->family == SPW_FAMILY_FALCON_H1)
        spw__hf_write_falcon(o, c);
    if (c->kv_rank > 0)
        write_latent(o, c);
    write_experts(o, c);
    write_layers(o, c);
}

char *
spw_hf_config_text(const spw_model_config *c, spw_dtype dtype)
{
    static const char *const dtypes[SPW_DTYPE_COUNT] = {"float32", "bfloat16", "float16"};
    json_t *o = json_object();
    char *text, *copy = NULL;
    json_object_set_new(o, "model_type", json_string(spw_family_name(c->family)));
    if (dtype < SPW_DTYPE_COUNT) {
        if (c->family < SPW_FAMILY_CUSTOM)
            json_object_set_new(o, "architectures", json_pack("[s]", spw__hf_architectures[c->family]));
        json_object_set_new(o, "torch_dtype", json_string(dtypes[dtype]));
        json_object_set_new(o, "bos_token_id", json_null());
        json_object_set_new(o, "eos_token_id", json_null());
        json_object_set_new(o, "pad_token_id", json_null()); /* classes' own may lie beyond a small vocabulary */
    }
    set_size(o, "vocab_size", c->vocab);
    json_object_set_new(o, "tie_word_embeddings", json_boolean(c->tied));
    json_object_set_new(o, c->family == SPW_FAMILY_OPT ? "init_std" : "initializer_range", json_real(c->init_std));
    if (c->family == SPW_FAMILY_GPT2)
        write_gpt2(o, c);
    else if (spw__hf_of(c->family, LAYER_NORM))
        spw__hf_write_layer_norm(o, c);
    else if (c->family == SPW_FAMILY_NEMOTRON_H)
        spw__hf_write_nemotron(o, c);
    else if (c->family == SPW_FAMILY_DEEPSEEK_V4)
        spw__hf_write_deepseek4(o, c, rope_scaling(c));
    else
        write_llama(o, c);
    text = json_dumps(o, JSON_INDENT(2));
    json_decref(o);
    if (text != NULL)
        copy = spw_mem_strdup(text);
    free(text);
    return copy;
}
