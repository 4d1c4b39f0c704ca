/*
 * What config.json says of layers of linear attention, which Qwen3-Next, Qwen3.5 and OLMo Hybrid have: their sizes (hf_window.c reads which layers they
 * are); which layers of Granite 4 are Mamba-2's, and their sizes; which of LFM2 are convolutions; and the same written. Source: the configuration classes of transformers.
 */
#include "hf_source.h"

/* A size that kernels have no more of. */
static spw_status
check_most(const source *s, const char *key, uint64_t is, uint64_t most, uint64_t multiple_of)
{
    return is <= most && is % multiple_of == 0 ? SPW_OK : refuse(s, key, get(s, key));
}

spw_status
spw__hf_check_linear(const source *s, const spw_model_config *c, const char *keys, const char *values, const char *taps)
{
    SPW_TRY(check_most(s, keys, c->linear_key_dim, SPW_DELTA_DIM_MAX, 8));
    SPW_TRY(check_most(s, values, c->linear_value_dim, SPW_DELTA_DIM_MAX, 8));
    return check_most(s, taps, c->linear_taps, SPW_TAPS_MAX, 1);
}

spw_status
spw__hf_read_layer_kinds(const source *s, const char *name, const char *const words[2], spw_model_config *c, bool *any)
{
    const json_t *list = get(s, name);
    *any = false;
    if (!json_is_array(list) || json_array_size(list) != c->layers)
        return wrong(s, name, "a list with one entry for each layer", list);
    for (uint64_t l = 0; l < c->layers; l++) {
        const char *text = json_string_value(json_array_get(list, l));
        bool full = text != NULL && (strcmp(text, "attention") == 0 || strcmp(text, "full_attention") == 0);
        char key[40];
        snprintf(key, sizeof key, "%s[%llu]", name, (unsigned long long)l);
        if (!full && (text == NULL || (strcmp(text, words[0]) != 0 && strcmp(text, words[1]) != 0)))
            return refuse(s, key, json_array_get(list, l));
        *any |= !full;
        if (full && l < SPW_FULL_LAYERS_MAX)
            c->full_layers[l / 64] |= 1ull << l % 64;
    }
    return *any && c->layers > SPW_FULL_LAYERS_MAX ? refuse(s, "num_hidden_layers", get(s, "num_hidden_layers"))
                                                   : SPW_OK;
}

/* Granite 4's, by either of two names; where nothing is said all are mamba. */
static spw_status
read_mamba_layers(const source *s, spw_model_config *c, bool *any)
{
    static const char *const words[2] = {"mamba", "linear_attention"};
    const char *name = get(s, "layer_types") != NULL ? "layer_types" : "layers_block_type";
    *any = get(s, name) == NULL;
    return *any ? SPW_OK : spw__hf_read_layer_kinds(s, name, words, c, any);
}

/* Layers with attention, by their numbers, which have to be those of a list where that is there. */
static spw_status
read_full_numbers(const source *s, const char *key, spw_model_config *c, bool *any)
{
    const json_t *list = get(s, key);
    bool listed = get(s, "layer_types") != NULL;
    uint64_t full[SPW_FULL_LAYERS_MAX / 64] = {0}, found = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_int_t l = json_integer_value(json_array_get(list, i));
        if (!json_is_integer(json_array_get(list, i)) || l < 0 || l >= SPW_FULL_LAYERS_MAX || (uint64_t)l >= c->layers)
            return refuse(s, key, list);
        found += (full[l / 64] >> l % 64 & 1) == 0;
        full[l / 64] |= 1ull << l % 64;
    }
    if (list != NULL && (!json_is_array(list) || (listed && memcmp(full, c->full_layers, sizeof full) != 0)))
        return wrong(s, key, "a list of the layers that layer_types says have attention", list);
    if (listed || list == NULL)
        return SPW_OK;
    memcpy(c->full_layers, full, sizeof full);
    *any = found < c->layers;
    return SPW_OK;
}

/* Bamba's; where nothing is said all are mamba. Its class has no list, a part of a head that is turned in the rope object alone, and a loss more. */
static spw_status
read_bamba_layers(const source *s, spw_model_config *c, bool *any)
{
    static const char *const lists[] = {"layer_types", "layers_block_type"};
    const json_t *part = get(s, "partial_rotary_factor");
    double z_loss = 0;
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        if (get(s, lists[i]) != NULL)
            return refuse(s, lists[i], get(s, lists[i]));
    }
    if (part != NULL && json_number_value(part) != 0.5)
        return refuse(s, "partial_rotary_factor", part);
    SPW_TRY(read_real(s, "z_loss_coefficient", &z_loss));
    if (z_loss > 0)
        return refuse(s, "z_loss_coefficient", get(s, "z_loss_coefficient"));
    *any = get(s, "attn_layer_indices") == NULL;
    return read_full_numbers(s, "attn_layer_indices", c, any);
}

/* LFM2's width of MLPs: two thirds of what is said, times a factor, up to a multiple. */
static spw_status
read_block_width(const source *s, spw_model_config *c)
{
    uint64_t multiple = 256, width = c->mlp_width;
    double factor = 1;
    bool adjusts = true;
    SPW_TRY(read_size(s, "block_ff_dim", 1, &width));
    SPW_TRY(read_bool(s, "block_auto_adjust_ff_dim", &adjusts));
    SPW_TRY(read_size(s, "block_multiple_of", 1, &multiple));
    SPW_TRY(read_real(s, "block_ffn_dim_multiplier", &factor));
    c->mlp_width = width;
    if (adjusts)
        c->mlp_width = ((uint64_t)(factor * (double)(2 * width / 3)) + multiple - 1) / multiple * multiple;
    return SPW_OK;
}

static spw_status
read_lfm(const source *s, spw_model_config *c)
{
    static const char *const words[2] = {"conv", "conv"};
    const json_t *older = get(s, "tie_embedding"), *tied = get(s, "tie_word_embeddings");
    bool any = false;
    if (get(s, "layer_types") != NULL)
        SPW_TRY(spw__hf_read_layer_kinds(s, "layer_types", words, c, &any));
    else if (c->family == SPW_FAMILY_LFM2_MOE)
        return wrong(s, "layer_types", "a list with one entry for each layer", NULL);
    if (c->family == SPW_FAMILY_LFM2) {
        SPW_TRY(read_full_numbers(s, "full_attn_idxs", c, &any));
        SPW_TRY(read_block_width(s, c));
    }
    SPW_TRY(read_bool(s, "tie_embedding", &c->tied));
    if (older != NULL && tied != NULL && json_is_true(older) != json_is_true(tied))
        return wrong(s, "tie_embedding", "the same as tie_word_embeddings", older);
    SPW_TRY(must_be(s, "conv_bias", false));
    if (!any) {
        memset(c->full_layers, 0, sizeof c->full_layers);
        return SPW_OK;
    }
    c->linear_conv = true;
    c->linear_heads = c->linear_key_heads = 1;
    c->linear_value_dim = c->width;
    c->linear_taps = 3;
    SPW_TRY(read_size(s, "conv_L_cache", 1, &c->linear_taps));
    return check_most(s, "conv_L_cache", c->linear_taps, SPW_TAPS_MAX, 1);
}

/* Steps are not cut off by it. Infinity is a word, or an object with that; null is no limit, too. */
spw_status
spw__hf_check_steps(const source *s)
{
    const json_t *limit = get(s, "time_step_limit"), *most = json_array_get(limit, 1);
    const json_t *word = json_is_object(most) ? json_object_get(most, "__float__") : most;
    const char *text = json_string_value(word);
    bool free = most == NULL || json_is_null(most) || (text != NULL && strcmp(text, "Infinity") == 0);
    return limit == NULL || (json_array_size(limit) == 2 && json_number_value(json_array_get(limit, 0)) == 0 &&
                             json_is_number(json_array_get(limit, 0)) && free)
               ? SPW_OK
               : refuse(s, "time_step_limit", limit);
}

spw_status
spw__hf_read_mamba(const source *s, spw_model_config *c, uint64_t all, const char *together)
{
    const char *head = json_string_value(get(s, "mamba_d_head"));
    uint64_t expand = 2;
    c->linear_mamba = c->linear_bias = true;
    c->linear_heads = 128; /* the class's defaults */
    c->linear_key_heads = 1;
    c->linear_key_dim = 256;
    c->linear_taps = 4;
    SPW_TRY(read_size(s, "mamba_n_heads", 1, &c->linear_heads));
    SPW_TRY(read_size(s, "mamba_n_groups", 1, &c->linear_key_heads));
    SPW_TRY(read_size(s, "mamba_d_state", 1, &c->linear_key_dim));
    SPW_TRY(read_size(s, "mamba_d_conv", 1, &c->linear_taps));
    SPW_TRY(read_size(s, "mamba_expand", 1, &expand));
    all = all > 0 ? all : expand * c->width;
    c->linear_value_dim = all / c->linear_heads;
    if (head == NULL || strcmp(head, "auto") != 0)
        SPW_TRY(read_size(s, "mamba_d_head", 1, &c->linear_value_dim));
    if (c->linear_heads * c->linear_value_dim != all)
        return wrong(s, "mamba_n_heads", together, get(s, "mamba_n_heads"));
    if (c->linear_heads % c->linear_key_heads != 0)
        return wrong(s, "mamba_n_heads", "a multiple of mamba_n_groups", get(s, "mamba_n_heads"));
    SPW_TRY(spw__hf_check_linear(s, c, "mamba_d_state", "mamba_d_head", "mamba_d_conv"));
    return read_bool(s, "mamba_conv_bias", &c->linear_bias);
}

static spw_status
read_mamba(const source *s, spw_model_config *c)
{
    bool any;
    SPW_TRY(c->family == SPW_FAMILY_BAMBA ? read_bamba_layers(s, c, &any) : read_mamba_layers(s, c, &any));
    if (!any)
        return SPW_OK;
    SPW_TRY(spw__hf_read_mamba(s, c, 0, "heads of mamba_d_head that are mamba_expand times hidden_size together"));
    SPW_TRY(must_be(s, "mamba_proj_bias", false));
    return spw__hf_check_steps(s);
}

/* OLMo Hybrid's, whose sizes follow from others where they are not said. */
static void
begin_apart(const source *s, spw_model_config *c)
{
    c->linear_heads = c->linear_key_heads = c->heads;
    (void)read_size(s, "linear_num_key_heads", 1, &c->linear_key_heads); /* who reads it again says what is wrong */
    c->linear_key_dim = c->linear_key_heads > 0 ? (uint64_t)(0.75 * (double)c->width / (double)c->linear_key_heads) : 0;
    (void)read_size(s, "linear_key_head_dim", 1, &c->linear_key_dim);
    c->linear_value_dim = 2 * c->linear_key_dim;
    c->linear_apart = c->linear_before = true;
    c->linear_eps = 1e-5;
}

static spw_status
read_least_eigenvalue(const source *s, spw_model_config *c)
{
    bool negative = true;
    SPW_TRY(read_bool(s, "linear_allow_neg_eigval", &negative));
    c->linear_most = negative ? 2 : 0;
    return SPW_OK;
}

spw_status
spw__hf_read_linear(const source *s, spw_model_config *c)
{
    const bool olmo = c->family == SPW_FAMILY_OLMO_HYBRID;
    if (spw__hf_of(c->family, GRANITE4 | BAMBA))
        return read_mamba(s, c);
    if (spw__hf_of(c->family, LFM))
        return read_lfm(s, c);
    if (c->family == SPW_FAMILY_FALCON_H1)
        return spw__hf_read_falcon(s, c);
    if (c->family == SPW_FAMILY_KIMI_LINEAR)
        return spw__hf_read_kimi(s, c);
    if (!spw__hf_of(c->family, LINEAR | OLMO_HYBRID))
        return SPW_OK;
    c->linear_heads = 32; /* the classes' defaults */
    c->linear_key_heads = 16;
    c->linear_key_dim = c->linear_value_dim = 128;
    c->linear_taps = 4;
    c->linear_woven = c->family == SPW_FAMILY_QWEN3_NEXT;
    c->attention_gated = c->norms_from_one = !olmo;
    if (olmo)
        begin_apart(s, c);
    SPW_TRY(read_size(s, "linear_num_value_heads", 1, &c->linear_heads));
    SPW_TRY(read_size(s, "linear_num_key_heads", 1, &c->linear_key_heads));
    SPW_TRY(read_size(s, "linear_key_head_dim", 1, &c->linear_key_dim));
    SPW_TRY(read_size(s, "linear_value_head_dim", 1, &c->linear_value_dim));
    SPW_TRY(read_size(s, "linear_conv_kernel_dim", 1, &c->linear_taps));
    SPW_TRY(spw__hf_check_linear(s, c, "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"));
    if (c->linear_heads % c->linear_key_heads != 0)
        return wrong(s, "linear_num_value_heads", "a multiple of linear_num_key_heads",
                     get(s, "linear_num_value_heads"));
    return olmo ? read_least_eigenvalue(s, c) : must_be(s, "attn_output_gate", true);
}

static void
write_layer_types(json_t *o, const spw_model_config *c, const char *linear, const char *full)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++)
        json_array_append_new(list, json_string(spw_model_is_linear(c, l) ? linear : full));
    json_object_set_new(o, "layer_types", list);
}

static void
write_full_numbers(json_t *o, const spw_model_config *c, const char *key)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++) {
        if (!spw_model_is_linear(c, l))
            json_array_append_new(list, json_integer((json_int_t)l));
    }
    json_object_set_new(o, key, list);
}

/* In the words that older releases have, too. */
void
spw__hf_write_mamba(json_t *o, const spw_model_config *c)
{
    if (c->family == SPW_FAMILY_BAMBA)
        write_full_numbers(o, c, "attn_layer_indices");
    else
        write_layer_types(o, c, "mamba", "attention");
    if (c->linear_heads == 0) { /* the class refuses a default that does not divide, whether a layer has any */
        set_size(o, "mamba_n_heads", 1);
        return;
    }
    set_size(o, "mamba_n_heads", c->linear_heads);
    set_size(o, "mamba_n_groups", c->linear_key_heads);
    set_size(o, "mamba_d_state", c->linear_key_dim);
    set_size(o, "mamba_d_head", c->linear_value_dim);
    set_size(o, "mamba_d_conv", c->linear_taps);
    set_size(o, "mamba_expand", c->linear_heads * c->linear_value_dim / c->width);
    json_object_set_new(o, "mamba_conv_bias", json_boolean(c->linear_bias));
    json_object_set_new(o, "mamba_proj_bias", json_false());
}

/* The width of its MLPs is what it comes to. */
void
spw__hf_write_lfm(json_t *o, const spw_model_config *c)
{
    write_layer_types(o, c, "conv", "full_attention");
    json_object_set_new(o, "norm_eps", json_real(c->norm_eps));
    set_size(o, "conv_L_cache", c->linear_heads > 0 ? c->linear_taps : 3);
    json_object_set_new(o, "conv_bias", json_false());
    if (c->family == SPW_FAMILY_LFM2)
        json_object_set_new(o, "block_auto_adjust_ff_dim", json_false());
}

void
spw__hf_write_linear(json_t *o, const spw_model_config *c)
{
    write_layer_types(o, c, "linear_attention", "full_attention");
    if (c->family == SPW_FAMILY_OLMO_HYBRID)
        json_object_set_new(o, "linear_allow_neg_eigval", json_boolean(c->linear_most > 0));
    else
        set_size(o, "full_attention_interval", c->full_every);
    set_size(o, "linear_num_value_heads", c->linear_heads);
    set_size(o, "linear_num_key_heads", c->linear_key_heads);
    set_size(o, "linear_key_head_dim", c->linear_key_dim);
    set_size(o, "linear_value_head_dim", c->linear_value_dim);
    set_size(o, "linear_conv_kernel_dim", c->linear_taps);
}
