/*
 * What config.json says of DeepSeek-V4: which layers have keys of few rows, of many or of a window alone, which choose experts by a table, streams, and
 * two rotary embeddings. Source: the configuration class of transformers.
 */
#include "hf_source.h"

enum { KINDS = 3 };
static const char *const kinds[KINDS] = {"sliding_attention", "compressed_sparse_attention",
                                         "heavily_compressed_attention"};

static void
set_bit(uint64_t *layers, uint64_t layer_idx)
{
    layers[layer_idx / 64] |= UINT64_C(1) << layer_idx % 64;
}

static void
set_kind(spw_model_config *c, uint64_t layer_idx, int kind)
{
    if (kind > 0)
        set_bit(kind == 1 ? c->few_layers : c->many_layers, layer_idx);
}

/* By a name for each layer, or by how many rows a key stands for; else two of many rows, and few and many in turns. */
static spw_status
read_layers(const source *s, spw_model_config *c)
{
    const json_t *names = get(s, "layer_types"), *rates = names == NULL ? get(s, "compress_ratios") : NULL;
    const json_t *list = names != NULL ? names : rates;
    const char *key = names != NULL ? "layer_types" : "compress_ratios";
    if (c->layers > SPW_FULL_LAYERS_MAX)
        return refuse(s, "num_hidden_layers", get(s, "num_hidden_layers"));
    if (list != NULL && (!json_is_array(list) || json_array_size(list) < c->layers))
        return wrong(s, key, "a list with an entry for each layer", list);
    for (uint64_t l = 0; l < c->layers; l++) {
        const json_t *v = json_array_get(list, l);
        const char *name = json_string_value(v);
        int kind = l < 2 || l % 2 == 0 ? 2 : 1;
        for (int k = 0; names != NULL && (k == 0 || kind < 0); k++)
            kind = k == KINDS ? KINDS : name != NULL && strcmp(name, kinds[k]) == 0 ? k : -1;
        if (rates != NULL)
            kind = !json_is_integer(v)            ? KINDS
                   : json_integer_value(v) == 0   ? 0
                   : json_integer_value(v) == 4   ? 1
                   : json_integer_value(v) == 128 ? 2
                                                  : KINDS;
        if (kind == KINDS)
            return refuse(s, key, list);
        set_kind(c, l, kind);
    }
    return SPW_OK;
}

/* Which layers choose by a table: the first ones, or by a name for each. */
static spw_status
read_hashed(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "mlp_layer_types");
    uint64_t first = 3;
    SPW_TRY(read_size(s, "num_hash_layers", 0, &first));
    if (list != NULL && (!json_is_array(list) || json_array_size(list) < c->layers))
        return wrong(s, "mlp_layer_types", "a list with an entry for each layer", list);
    for (uint64_t l = 0; l < c->layers; l++) {
        const char *name = json_string_value(json_array_get(list, l));
        bool hashed = list == NULL ? l < first : name != NULL && strcmp(name, "hash_moe") == 0;
        if (list != NULL && !hashed && (name == NULL || strcmp(name, "moe") != 0))
            return refuse(s, "mlp_layer_types", list);
        if (hashed)
            set_bit(c->hashed_layers, l);
    }
    return SPW_OK;
}

static spw_status
read_rates(const source *s, spw_model_config *c)
{
    source rates;
    c->few_rate = 4;
    c->many_rate = 128;
    SPW_TRY(read_member(s, "compress_rates", &rates));
    SPW_TRY(read_size(&rates, kinds[1], 1, &c->few_rate));
    SPW_TRY(read_size(&rates, kinds[2], 1, &c->many_rate));
    SPW_TRY(read_size(s, "compress_rate_csa", 1, &c->few_rate));
    return read_size(s, "compress_rate_hca", 1, &c->many_rate);
}

/* How many elements of a head are turned: the class takes a share of them, rounded down, or the number itself. */
static spw_status
read_turned(const source *s, spw_model_config *c)
{
    double part = 64.0 / 512;
    c->rope_dim = 0;
    SPW_TRY(read_real(s, "partial_rotary_factor", &part));
    if (get(s, "partial_rotary_factor") == NULL)
        SPW_TRY(read_size(s, "qk_rope_head_dim", 2, &c->rope_dim));
    if (c->rope_dim == 0)
        c->rope_dim = (uint64_t)((double)c->head_dim * part);
    return c->rope_dim > 0 && c->rope_dim % 2 == 0 && c->rope_dim <= c->head_dim
               ? SPW_OK
               : refuse(s, get(s, "partial_rotary_factor") != NULL ? "partial_rotary_factor" : "qk_rope_head_dim",
                        get(s, get(s, "partial_rotary_factor") != NULL ? "partial_rotary_factor" : "qk_rope_head_dim"));
}

static spw_status
check_part(const source *rope, const spw_model_config *c)
{
    double part = (double)c->rope_dim / (double)c->head_dim;
    SPW_TRY(read_real(rope, "partial_rotary_factor", &part));
    return (uint64_t)((double)c->head_dim * part) == c->rope_dim || get(rope, "partial_rotary_factor") == NULL
               ? SPW_OK
               : wrong(rope, "partial_rotary_factor", "the same as outside", get(rope, "partial_rotary_factor"));
}

/* Newer: an object for each of both. Else one, of the layers with keys in front, and a theta for each. */
static spw_status
read_ropes(const source *s, spw_model_config *c)
{
    const char *key = get(s, "rope_parameters") != NULL ? "rope_parameters" : "rope_scaling";
    spw_model_config local = {.rope_theta = 10000};
    source rope, first, second;
    json_t *inner;
    spw_status st;
    SPW_TRY(read_member(s, key, &rope));
    SPW_TRY(read_member(&rope, "main", &first));
    SPW_TRY(read_member(&rope, "compress", &second));
    c->rope_theta = 160000;
    c->rope_paired = true;
    SPW_TRY(read_real(s, "compress_rope_theta", &c->rope_theta));
    SPW_TRY(read_real(s, "rope_theta", &local.rope_theta));
    if (first.object == NULL || second.object == NULL)
        second = rope;
    else
        SPW_TRY(read_real(&first, "rope_theta", &local.rope_theta));
    if (first.object != NULL) {
        const json_t *type = get(&first, "rope_type");
        if (type != NULL && (!json_is_string(type) || strcmp(json_string_value(type), "default") != 0))
            return refuse(&first, "rope_type", type);
        SPW_TRY(check_part(&first, c));
        SPW_TRY(read_real(&second, "rope_theta", &c->rope_theta));
    }
    SPW_TRY(check_part(&second, c));
    c->rope_local_theta = local.rope_theta;
    if (!(c->rope_theta > 0) || !(c->rope_local_theta > 0))
        return wrong(s, "rope_theta", "number above 0", get(s, "rope_theta"));
    inner = second.object != NULL ? json_copy((json_t *)(uintptr_t)second.object) : json_object();
    json_object_del(inner, "rope_theta"); /* of the older form it is the other's */
    json_object_del(inner, "partial_rotary_factor");
    second.object = inner;
    st = spw__hf_read_scaled_rope(s, &second, c);
    if (st == SPW_OK && c->rope == SPW_ROPE_YARN && first.object == NULL && get(&second, "attention_factor") == NULL)
        c->rope_attention = 1; /* which the class then sets, whatever yarn has */
    json_decref(inner);
    return st;
}

/* A word, a number, or a switch, of what is not built otherwise. */
static spw_status
check_rest(const source *s)
{
    static const char *const words[][2] = {{"scoring_func", "sqrtsoftplus"}, {"topk_method", "noaux_tc"}};
    double limit = (double)SPW_GATE_SILU_LIMIT;
    uint64_t shared = 1, keys = 1;
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        const json_t *v = get(s, words[i][0]);
        const char *text = json_string_value(v);
        if (v != NULL && (text == NULL || strcmp(text, words[i][1]) != 0))
            return refuse(s, words[i][0], v);
    }
    SPW_TRY(read_real(s, "swiglu_limit", &limit));
    if ((float)limit != SPW_GATE_SILU_LIMIT)
        return refuse(s, "swiglu_limit", get(s, "swiglu_limit"));
    SPW_TRY(read_size(s, "n_shared_experts", 0, &shared));
    if (shared != 1)
        return refuse(s, "n_shared_experts", get(s, "n_shared_experts"));
    SPW_TRY(read_size(s, "num_key_value_heads", 1, &keys));
    if (keys != 1)
        return refuse(s, "num_key_value_heads", get(s, "num_key_value_heads"));
    SPW_TRY(must_be(s, "norm_topk_prob", true));
    SPW_TRY(must_be(s, "attention_bias", false));
    SPW_TRY(must_be(s, "mlp_bias", false));
    return spw__hf_check_router_logits(s);
}

spw_status
spw__hf_read_deepseek4(const source *s, spw_model_config *c)
{
    const struct {
        const char *key;
        uint64_t *at, otherwise;
    } sizes[] = {{"head_dim", &c->head_dim, 512},
                 {"moe_intermediate_size", &c->mlp_width, 2048},
                 {"q_lora_rank", &c->q_rank, 1024},
                 {"o_groups", &c->out_groups, 8},
                 {"o_lora_rank", &c->out_rank, 1024},
                 {"index_n_heads", &c->index_heads, 64},
                 {"index_head_dim", &c->index_dim, 128},
                 {"index_topk", &c->index_keys, 512},
                 {"sliding_window", &c->window, 128},
                 {"hc_mult", &c->streams, 4},
                 {"hc_sinkhorn_iters", &c->stream_rounds, 20},
                 {"n_routed_experts", &c->experts, 256},
                 {"num_experts_per_tok", &c->choices, 6},
                 {"hidden_size", &c->width, 0},
                 {"num_hidden_layers", &c->layers, 0},
                 {"num_attention_heads", &c->heads, 0},
                 {"max_position_embeddings", &c->positions, c->positions}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        *sizes[i].at = sizes[i].otherwise;
        SPW_TRY(read_size(s, sizes[i].key, 1, sizes[i].at));
    }
    c->keys_are_values = c->sinks = c->sigmoid = c->root = c->sum_to_one = true;
    c->kv_heads = 1;
    c->gate = SPW_GATE_SILU_CLAMPED;
    c->choice_scale = 1.5;
    c->norm_eps = c->stream_eps = 1e-6;
    c->shared_width = c->mlp_width;
    SPW_TRY(read_real(s, "rms_norm_eps", &c->norm_eps));
    SPW_TRY(read_real(s, "hc_eps", &c->stream_eps));
    SPW_TRY(read_real(s, "routed_scaling_factor", &c->choice_scale));
    if (!(c->choice_scale > 0))
        return wrong(s, "routed_scaling_factor", "number above 0", get(s, "routed_scaling_factor"));
    SPW_TRY(check_rest(s));
    SPW_TRY(read_layers(s, c));
    SPW_TRY(read_hashed(s, c));
    SPW_TRY(read_rates(s, c));
    SPW_TRY(read_turned(s, c));
    return read_ropes(s, c);
}

static json_t *
names_of(const spw_model_config *c, bool mlp)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++) {
        const char *attention = kinds[spw_model_front_overlaps(c, l) ? 1 : spw_model_front_rate(c, l) > 0 ? 2 : 0];
        json_array_append_new(list, json_string(!mlp ? attention : spw_model_is_hashed(c, l) ? "hash_moe" : "moe"));
    }
    return list;
}

/* scaling: of the layers with keys in front, an object that is taken over, or NULL. */
void
spw__hf_write_deepseek4(json_t *o, const spw_model_config *c, json_t *scaling)
{
    const double part = (double)c->rope_dim / (double)c->head_dim;
    json_t *second = scaling != NULL ? scaling : json_pack("{s:s}", "rope_type", "default");
    set_size(o, "hidden_size", c->width);
    set_size(o, "num_hidden_layers", c->layers);
    set_size(o, "num_attention_heads", c->heads);
    set_size(o, "num_key_value_heads", 1);
    set_size(o, "head_dim", c->head_dim);
    set_size(o, "qk_rope_head_dim", c->rope_dim);
    set_size(o, "q_lora_rank", c->q_rank);
    set_size(o, "o_groups", c->out_groups);
    set_size(o, "o_lora_rank", c->out_rank);
    set_size(o, "index_n_heads", c->index_heads);
    set_size(o, "index_head_dim", c->index_dim);
    set_size(o, "index_topk", c->index_keys);
    set_size(o, "sliding_window", c->window);
    set_size(o, "max_position_embeddings", c->positions);
    set_size(o, "moe_intermediate_size", c->mlp_width);
    set_size(o, "n_routed_experts", c->experts);
    set_size(o, "n_shared_experts", 1);
    set_size(o, "num_experts_per_tok", c->choices);
    set_size(o, "num_nextn_predict_layers", 0);
    set_size(o, "hc_mult", c->streams);
    set_size(o, "hc_sinkhorn_iters", c->stream_rounds);
    json_object_set_new(o, "hc_eps", json_real(c->stream_eps));
    json_object_set_new(o, "rms_norm_eps", json_real(c->norm_eps));
    json_object_set_new(o, "routed_scaling_factor", json_real(c->choice_scale));
    json_object_set_new(o, "scoring_func", json_string("sqrtsoftplus"));
    json_object_set_new(o, "hidden_act", json_string("silu"));
    json_object_set_new(o, "swiglu_limit", json_real((double)SPW_GATE_SILU_LIMIT));
    json_object_set_new(o, "layer_types", names_of(c, false));
    json_object_set_new(o, "mlp_layer_types", names_of(c, true));
    json_object_set_new(o, "compress_rates",
                        json_pack("{s:I, s:I}", kinds[1], (json_int_t)c->few_rate, kinds[2], (json_int_t)c->many_rate));
    json_object_set_new(o, "compress_rope_theta", json_real(c->rope_theta));
    json_object_set_new(o, "rope_theta", json_real(c->rope_local_theta));
    json_object_set_new(second, "rope_theta", json_real(c->rope_theta));
    json_object_set_new(second, "partial_rotary_factor", json_real(part));
    json_object_set_new(o, "rope_parameters",
                        json_pack("{s:{s:s, s:f, s:f}, s:o}", "main", "rope_type", "default", "rope_theta",
                                  c->rope_local_theta, "partial_rotary_factor", part, "compress", second));
}
