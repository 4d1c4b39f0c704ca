/*
 * What config.json says of Kimi Linear: its layers of linear attention with a decay for each channel, the others' latent attention without places, and
 * its experts. Folders as published have the first in an object, by numbers of layers from 1 on; transformers writes it and keys of its
 * own beside it, of which the object's sizes count more, and layer_types more than the numbers. Source: the configuration class of transformers, and the published
 * folders (Kimi Team 2025, 2510.26692).
 */
#include "hf_source.h"

/* One of two names, the published first. */
static const char *
name_of(const source *s, const char *key, const char *other)
{
    return get(s, key) == NULL && get(s, other) != NULL ? other : key;
}

static spw_status
read_either(const source *s, const char *key, const char *other, uint64_t min, uint64_t *out)
{
    return read_size(s, name_of(s, key, other), min, out);
}

/* Layers by their numbers; each is in one of both lists. */
static spw_status
read_numbers(const source *linear, const char *key, const spw_model_config *c, uint64_t *layers, uint64_t *found)
{
    const json_t *list = get(linear, key);
    if (!json_is_array(list))
        return wrong(linear, key, "a list of layers, the first of which is 1", list);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_int_t n = json_integer_value(json_array_get(list, i));
        if (n < 1 || (uint64_t)n > c->layers || n > SPW_FULL_LAYERS_MAX)
            return refuse(linear, key, list);
        *found += (layers[(n - 1) / 64] >> (n - 1) % 64 & 1) == 0;
        layers[(n - 1) / 64] |= 1ull << (n - 1) % 64;
    }
    return SPW_OK;
}

/* any: those of linear attention. */
static spw_status
read_lists(const source *linear, spw_model_config *c, bool *any)
{
    uint64_t others[SPW_FULL_LAYERS_MAX / 64] = {0}, full = 0, count = 0;
    SPW_TRY(read_numbers(linear, "full_attn_layers", c, c->full_layers, &full));
    SPW_TRY(read_numbers(linear, "kda_layers", c, others, &count));
    for (size_t i = 0; i < SPW_FULL_LAYERS_MAX / 64; i++) {
        if ((c->full_layers[i] & others[i]) != 0)
            return refuse(linear, "kda_layers", get(linear, "kda_layers"));
    }
    if (full + count != c->layers)
        return wrong(linear, "kda_layers", "all layers that full_attn_layers does not have", get(linear, "kda_layers"));
    *any = count > 0;
    return SPW_OK;
}

static spw_status
read_layers(const source *s, const source *linear, spw_model_config *c, bool *any)
{
    static const char *const words[2] = {"linear_attention", "linear_attention"};
    if (c->layers > SPW_FULL_LAYERS_MAX)
        return refuse(s, "num_hidden_layers", get(s, "num_hidden_layers"));
    if (get(s, "layer_types") != NULL)
        return spw__hf_read_layer_kinds(s, "layer_types", words, c, any);
    if (get(linear, "full_attn_layers") != NULL || get(linear, "kda_layers") != NULL)
        return read_lists(linear, c, any);
    for (uint64_t l = 4; l < c->layers; l += 4) /* as the class has it */
        c->full_layers[l / 64] |= 1ull << l % 64;
    *any = c->layers > 0;
    return SPW_OK;
}

/* Whatever is said of places, nothing is turned. */
static spw_status
check_fixed(const source *s)
{
    SPW_TRY(must_be(s, "tie_word_embeddings", false)); /* its class ties nothing, whatever is said */
    SPW_TRY(must_be(s, "mla_use_nope", true));
    return get(s, "rope_scaling") != NULL ? refuse(s, "rope_scaling", get(s, "rope_scaling")) : SPW_OK;
}

spw_status
spw__hf_read_kimi(const source *s, spw_model_config *c)
{
    source linear;
    bool any = false;
    SPW_TRY(check_fixed(s));
    SPW_TRY(read_size(s, name_of(s, "model_max_length", "max_position_embeddings"), 1, &c->positions));
    SPW_TRY(read_member(s, "linear_attn_config", &linear));
    SPW_TRY(read_layers(s, &linear, c, &any));
    if (!any) {
        memset(c->full_layers, 0, sizeof c->full_layers);
        return SPW_OK;
    }
    c->linear_channels = c->linear_apart = true;
    c->linear_heads = 32; /* the class's defaults */
    c->linear_key_dim = 128;
    c->linear_taps = 4;
    SPW_TRY(read_size(s, "linear_num_heads", 1, &c->linear_heads));
    SPW_TRY(read_size(s, "linear_head_dim", 1, &c->linear_key_dim));
    SPW_TRY(read_size(s, "linear_conv_kernel_dim", 1, &c->linear_taps));
    SPW_TRY(read_size(&linear, "num_heads", 1, &c->linear_heads));
    SPW_TRY(read_size(&linear, "head_dim", 1, &c->linear_key_dim));
    SPW_TRY(read_size(&linear, "short_conv_kernel_size", 1, &c->linear_taps));
    c->linear_key_heads = c->linear_heads;
    c->linear_value_dim = c->linear_key_dim;
    return linear.object != NULL
               ? spw__hf_check_linear(&linear, c, "head_dim", "head_dim", "short_conv_kernel_size")
               : spw__hf_check_linear(s, c, "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim");
}

spw_status
spw__hf_read_kimi_experts(const source *s, spw_model_config *c)
{
    const char *word = json_string_value(get(s, "moe_router_activation_func"));
    uint64_t shared = 1, every = 1;
    c->experts = 256; /* the class's defaults */
    c->choices = 8;
    c->mlp_width = 1024;
    c->dense_first = c->groups = c->group_choices = 1;
    c->choice_scale = 2.446;
    c->sigmoid = c->sum_to_one = true;
    SPW_TRY(read_either(s, "num_experts", "num_local_experts", 1, &c->experts));
    SPW_TRY(read_either(s, "num_experts_per_token", "num_experts_per_tok", 1, &c->choices));
    SPW_TRY(read_either(s, "num_shared_experts", "n_shared_experts", 1, &shared));
    SPW_TRY(read_either(s, "num_expert_group", "n_group", 1, &c->groups));
    SPW_TRY(read_size(s, "topk_group", 1, &c->group_choices));
    SPW_TRY(read_size(s, "moe_intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "first_k_dense_replace", 0, &c->dense_first));
    SPW_TRY(read_bool(s, name_of(s, "moe_renormalize", "norm_topk_prob"), &c->sum_to_one));
    SPW_TRY(read_real(s, "routed_scaling_factor", &c->choice_scale));
    if (!(c->choice_scale > 0))
        return wrong(s, "routed_scaling_factor", "number above 0", get(s, "routed_scaling_factor"));
    SPW_TRY(read_size(s, "moe_layer_freq", 1, &every));
    if (every != 1)
        return refuse(s, "moe_layer_freq", get(s, "moe_layer_freq"));
    if (get(s, "moe_router_activation_func") != NULL && (word == NULL || strcmp(word, "sigmoid") != 0))
        return refuse(s, "moe_router_activation_func", get(s, "moe_router_activation_func"));
    SPW_TRY(must_be(s, "use_grouped_topk", true));
    return spw__hf_settle_experts(s, c, shared);
}

static json_t *
numbers(const spw_model_config *c, bool linear)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++) {
        if (spw_model_is_linear(c, l) == linear)
            json_array_append_new(list, json_integer((json_int_t)l + 1));
    }
    return list;
}

void
spw__hf_write_kimi(json_t *o, const spw_model_config *c)
{
    const bool any = c->linear_heads > 0;
    json_t *linear = json_object();
    json_object_set_new(linear, "kda_layers", numbers(c, true));
    json_object_set_new(linear, "full_attn_layers", numbers(c, false));
    set_size(linear, "head_dim", any ? c->linear_key_dim : 128);
    set_size(linear, "num_heads", any ? c->linear_heads : 32);
    set_size(linear, "short_conv_kernel_size", any ? c->linear_taps : 4);
    json_object_set_new(o, "linear_attn_config", linear);
    json_object_set_new(o, "mla_use_nope", json_true());
    json_object_set_new(o, "attention_bias", json_boolean(c->qkv_bias));
    set_size(o, "model_max_length", c->positions);
    set_size(o, "num_experts", c->experts);
    set_size(o, "num_experts_per_token", c->choices);
    set_size(o, "num_shared_experts", c->shared_width / c->mlp_width);
    set_size(o, "moe_intermediate_size", c->mlp_width);
    set_size(o, "first_k_dense_replace", c->dense_first);
    set_size(o, "num_expert_group", c->groups > 0 ? c->groups : 1);
    set_size(o, "topk_group", c->groups > 0 ? c->group_choices : 1);
    set_size(o, "moe_layer_freq", 1);
    set_size(o, "num_nextn_predict_layers", 0);
    json_object_set_new(o, "moe_renormalize", json_boolean(c->sum_to_one));
    json_object_set_new(o, "moe_router_activation_func", json_string("sigmoid"));
    json_object_set_new(o, "use_grouped_topk", json_true());
    json_object_set_new(o, "routed_scaling_factor", json_real(c->choice_scale));
}
