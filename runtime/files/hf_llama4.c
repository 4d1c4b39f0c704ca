/*
 * What config.json says of Llama 4's text part beside what Llama's says: which layers have experts and how wide the others' MLP is, what
 * is done to queries and keys where they are turned, and to queries where they are not. Chunks are read where windows are.
 * Source: its configuration class in transformers.
 */
#include "hf_source.h"

/* By a list, which counts more than the step and must be what some step gives. */
static spw_status
read_moe_layers(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "moe_layers");
    uint64_t step = 1, at = 0;
    SPW_TRY(read_size(s, "interleave_moe_layer_step", 1, &step));
    if (json_is_array(list) && json_array_size(list) == 0)
        step = c->layers + 1; /* none has */
    else if (list != NULL)
        step = json_is_integer(json_array_get(list, 0)) ? (uint64_t)json_integer_value(json_array_get(list, 0)) + 1 : 0;
    for (uint64_t l = 0; list != NULL && l < c->layers && step > 0; l++) {
        const json_t *v = json_array_get(list, at);
        if ((l + 1) % step != 0)
            continue;
        if (!json_is_integer(v) || json_integer_value(v) != (json_int_t)l)
            return refuse(s, "moe_layers", list);
        at++;
    }
    if (list != NULL && (step == 0 || at != json_array_size(list)))
        return refuse(s, "moe_layers", list);
    c->sparse_every = step > 1 ? step : 0;
    c->dense_width = step > 1 ? 16384 : 0;
    return step > 1 ? read_size(s, "intermediate_size_mlp", 1, &c->dense_width) : SPW_OK;
}

/* A switch that older files have as a number. */
static spw_status
read_tuning(const source *s, spw_model_config *c)
{
    const json_t *v = get(s, "attn_temperature_tuning");
    bool tuned = v == NULL || json_is_true(v) || (json_is_integer(v) && json_integer_value(v) != 0), still = false;
    if (v != NULL && !json_is_boolean(v) && !json_is_integer(v))
        return wrong(s, "attn_temperature_tuning", "true or false", v);
    c->still_places = 8192;
    c->still_growth = 0.1;
    SPW_TRY(read_size(s, "floor_scale", 1, &c->still_places));
    SPW_TRY(read_real(s, "attn_scale", &c->still_growth));
    for (uint64_t l = 0; l < c->layers; l++)
        still = still || !spw_model_has_rope(c, l);
    if (!tuned || !still || c->still_growth == 0) {
        c->still_places = 0;
        c->still_growth = 0;
    }
    return SPW_OK;
}

spw_status
spw__hf_read_llama4(const source *s, spw_model_config *c)
{
    if (c->family != SPW_FAMILY_LLAMA4)
        return SPW_OK;
    c->experts = 16;
    c->choices = 1;
    c->sigmoid = c->experts_weighed = c->rope_paired = c->qk_unit = true;
    c->shared_width = c->mlp_width; /* an expert's */
    SPW_TRY(read_size(s, "num_local_experts", 1, &c->experts));
    SPW_TRY(read_size(s, "num_experts_per_tok", 1, &c->choices));
    SPW_TRY(read_moe_layers(s, c));
    SPW_TRY(read_bool(s, "use_qk_norm", &c->qk_unit));
    return read_tuning(s, c);
}

void
spw__hf_write_llama4(json_t *o, const spw_model_config *c)
{
    json_t *turned = json_array();
    for (uint64_t l = 0; l < c->layers; l++)
        json_array_append_new(turned, json_integer(spw_model_has_rope(c, l)));
    set_size(o, "intermediate_size", c->mlp_width);
    if (c->dense_width > 0)
        set_size(o, "intermediate_size_mlp", c->dense_width);
    set_size(o, "num_local_experts", c->experts);
    set_size(o, "num_experts_per_tok", c->choices);
    set_size(o, "interleave_moe_layer_step", c->sparse_every > 0 ? c->sparse_every : 1);
    json_object_set_new(o, "use_qk_norm", json_boolean(c->qk_unit));
    json_object_set_new(o, "no_rope_layers", turned);
    json_object_set_new(o, "attention_chunk_size", c->chunk > 0 ? json_integer((json_int_t)c->chunk) : json_null());
    json_object_set_new(o, "attn_temperature_tuning", json_boolean(c->still_growth > 0));
    if (c->still_growth > 0) {
        set_size(o, "floor_scale", c->still_places);
        json_object_set_new(o, "attn_scale", json_real(c->still_growth));
    }
    json_object_set_new(o, "attention_bias", json_boolean(c->qkv_bias));
}
