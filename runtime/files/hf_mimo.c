/*
 * What config.json says of MiMo-V2 beside what all of Llama's relatives have: heads of two kinds of layers, sizes of values and what they are
 * multiplied by, and what its published files say more of the same, which has to agree; the same written. Source: the configuration class
 * of transformers, and the files that are published.
 */
#include "hf_source.h"

/* A number for each layer, 1 where it is of a kind: transformers does not look at the list. */
static spw_status
check_layers(const source *s, const char *key, const spw_model_config *c,
             uint64_t (*of)(const spw_model_config *, uint64_t))
{
    const json_t *list = get(s, key);
    bool same = list == NULL || (json_is_array(list) && json_array_size(list) == c->layers);
    for (uint64_t l = 0; list != NULL && same && l < c->layers; l++)
        same = json_is_integer(json_array_get(list, l)) &&
               (json_integer_value(json_array_get(list, l)) != 0) == (of(c, l) > 0);
    return same ? SPW_OK : refuse(s, key, list);
}

/* What transformers' class does whatever its files say. */
static spw_status
check_published(const source *s, const spw_model_config *c)
{
    const struct {
        const char *key;
        double is;
    } numbers[] = {{"swa_num_attention_heads", (double)c->heads},
                   {"swa_num_key_value_heads", (double)c->kv_heads},
                   {"swa_head_dim", (double)c->head_dim},
                   {"swa_v_head_dim", (double)c->value_dim}};
    const json_t *eps = get(s, "layernorm_epsilon");
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const json_t *v = get(s, numbers[i].key);
        if (v != NULL && c->window > 0 && json_number_value(v) != numbers[i].is)
            return refuse(s, numbers[i].key, v);
    }
    if (eps != NULL && json_number_value(eps) != c->norm_eps)
        return refuse(s, "layernorm_epsilon", eps);
    if (get(s, "rope_parameters") == NULL && (c->rope_theta != 5e6 || (c->window > 0 && c->rope_local_theta != 1e4)))
        return refuse(s, c->rope_theta != 5e6 ? "rope_theta" : "swa_rope_theta",
                      get(s, c->rope_theta != 5e6 ? "rope_theta" : "swa_rope_theta"));
    if (get(s, "rope_parameters") == NULL && c->rope_part != 0.334)
        return refuse(s, "partial_rotary_factor", get(s, "partial_rotary_factor"));
    SPW_TRY(must_be(s, "add_full_attention_sink_bias", false));
    SPW_TRY(must_be(s, "add_swa_attention_sink_bias", true));
    SPW_TRY(check_layers(s, "hybrid_layer_pattern", c, spw_model_window));
    return check_layers(s, "moe_layer_freq", c, spw_model_experts);
}

/* Layers with a window have twice as many heads of keys and values. A scale that is null is none. */
spw_status
spw__hf_read_mimo(const source *s, spw_model_config *c)
{
    if (c->family != SPW_FAMILY_MIMO_V2)
        return SPW_OK;
    c->value_dim = 128;
    c->value_scale = json_object_get(s->object, "attention_value_scale") == NULL ? 0.707 : 1;
    c->sinks = c->sinks_windowed = true;
    SPW_TRY(read_size(s, "v_head_dim", 1, &c->value_dim));
    SPW_TRY(read_real(s, "attention_value_scale", &c->value_scale));
    if (!(c->value_scale > 0))
        return wrong(s, "attention_value_scale", "number above 0, or null", get(s, "attention_value_scale"));
    if (c->window > 0) {
        c->full_head_dim = c->head_dim;
        c->full_kv_heads = c->kv_heads;
        c->kv_heads *= 2;
    }
    return check_published(s, c);
}

void
spw__hf_write_mimo(json_t *o, const spw_model_config *c)
{
    set_size(o, "v_head_dim", c->value_dim);
    json_object_set_new(o, "attention_value_scale", json_real(c->value_scale));
}
