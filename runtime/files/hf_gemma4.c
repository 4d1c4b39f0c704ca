/*
 * What config.json says of Gemma 4 beside what all of Llama's relatives have: the heads of layers without a window, embeddings of each layer,
 * layers that read another's keys, experts beside the MLP; and the same written. Source: the configuration class of transformers 5.
 */
#include "hf_source.h"

/* Of its smaller sizes: embeddings of each layer, and layers that read another's keys. */
static spw_status
read_small(const source *s, spw_model_config *c)
{
    c->inputs_dim = is_unified(s) ? 0 : 256; /* the classes' defaults */
    c->inputs_vocab = 262144;
    SPW_TRY(read_size(s, "hidden_size_per_layer_input", 0, &c->inputs_dim));
    SPW_TRY(read_size(s, "vocab_size_per_layer_input", 1, &c->inputs_vocab));
    SPW_TRY(read_size(s, "num_kv_shared_layers", 0, &c->readers));
    SPW_TRY(read_bool(s, "use_double_wide_mlp", &c->readers_double));
    if (c->inputs_dim == 0)
        c->inputs_vocab = 0;
    c->readers_double = c->readers_double && c->readers > 0;
    return c->readers < c->layers || c->layers == 0 ? SPW_OK
                                                    : refuse(s, "num_kv_shared_layers", get(s, "num_kv_shared_layers"));
}

/* The name that layer l has among others: its number, with zeros in front where the last one's is longer. NULL: none. */
static const char *
name_of_layer(const source *layers, uint64_t l)
{
    const char *name;
    char *end;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)layers->object, name, v)
    {
        if (name[0] >= '0' && name[0] <= '9' && strtoull(name, &end, 10) == l && *end == '\0')
            return name;
    }
    return NULL;
}

/* What newer releases write: an object for each layer that differs, by its number. */
static spw_status
read_layer_heads(const source *layers, uint64_t l, spw_model_config *c)
{
    uint64_t head_dim = c->head_dim, kv_heads = c->kv_heads;
    const char *key = name_of_layer(layers, l), *name;
    char number[24];
    source own;
    json_t *v;
    snprintf(number, sizeof number, "%llu", (unsigned long long)l);
    key = key != NULL ? key : number;
    SPW_TRY(read_member(layers, key, &own));
    json_object_foreach((json_t *)(uintptr_t)own.object, name, v)
    {
        if (strcmp(name, "head_dim") != 0 && strcmp(name, "num_key_value_heads") != 0)
            return refuse(&own, name, v);
    }
    SPW_TRY(read_size(&own, "head_dim", 1, &head_dim));
    SPW_TRY(read_size(&own, "num_key_value_heads", 1, &kv_heads));
    if (spw_model_window(c, l) == 0 && c->full_head_dim == 0) {
        c->full_head_dim = head_dim;
        c->full_kv_heads = kv_heads;
    }
    return spw_model_head_dim(c, l) == head_dim && spw_model_kv_heads(c, l) == kv_heads
               ? SPW_OK
               : refuse(layers, key, own.object); /* layers of one kind are alike here */
}

static spw_status
read_heads(const source *s, spw_model_config *c)
{
    source layers;
    SPW_TRY(read_member(s, "per_layer_config", &layers));
    for (uint64_t l = 0; layers.object != NULL && l < c->layers; l++)
        SPW_TRY(read_layer_heads(&layers, l, c));
    if (layers.object == NULL) {
        c->full_head_dim = 512;
        c->full_kv_heads = c->kv_heads;
        SPW_TRY(read_size(s, "global_head_dim", 1, &c->full_head_dim));
        if (c->values_of_keys) /* else its class does not look at it */
            SPW_TRY(read_size(s, "num_global_key_value_heads", 1, &c->full_kv_heads));
    }
    return c->values_of_keys || c->full_kv_heads == c->kv_heads
               ? SPW_OK
               : refuse(s, "per_layer_config", get(s, "per_layer_config"));
}

/* Images are looked at both ways, which text alone has none of. */
static spw_status
check_direction(const source *s)
{
    const json_t *v = get(s, "use_bidirectional_attention");
    const char *of = json_string_value(v);
    return v == NULL || json_is_false(v) || (of != NULL && strcmp(of, "vision") == 0)
               ? SPW_OK
               : refuse(s, "use_bidirectional_attention", v);
}

static spw_status
read_experts(const source *s, spw_model_config *c)
{
    const struct {
        const char *key;
        uint64_t *out;
    } sizes[] = {
        {"num_experts", &c->experts}, {"top_k_experts", &c->choices}, {"moe_intermediate_size", &c->mlp_width}};
    SPW_TRY(read_bool(s, "enable_moe_block", &c->experts_beside));
    if (!c->experts_beside)
        return SPW_OK;
    c->dense_width = c->mlp_width;
    c->sum_to_one = true;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (get(s, sizes[i].key) == NULL)
            return wrong(s, sizes[i].key, "an integer, because enable_moe_block is true", NULL);
        SPW_TRY(read_size(s, sizes[i].key, 1, sizes[i].out));
    }
    return SPW_OK;
}

spw_status
spw__hf_read_gemma4(const source *s, spw_model_config *c)
{
    if (c->family != SPW_FAMILY_GEMMA4)
        return SPW_OK;
    c->values_normed = c->layer_scaled = c->qk_norm = c->embedding_scaled = true;
    c->gate = SPW_GATE_GELU;
    c->norms = SPW_NORMS_BOTH;
    c->score_scale = 1;
    SPW_TRY(read_small(s, c));
    SPW_TRY(check_direction(s));
    SPW_TRY(read_bool(s, "attention_k_eq_v", &c->values_of_keys));
    SPW_TRY(read_heads(s, c));
    if (spw_model_window(c, c->layers - 1) > 0)
        return SPW_RAISE(s->err, SPW_ECONFIG,
                         "%s: %slayer_types: the last layer has a window, of which its class makes one without",
                         s->name, s->prefix);
    SPW_TRY(spw__hf_read_cap(s, "final_logit_softcapping", 0, &c->logit_cap));
    return read_experts(s, c);
}

void
spw__hf_write_gemma4(json_t *o, const spw_model_config *c)
{
    set_size(o, "hidden_size_per_layer_input", c->inputs_dim);
    if (c->inputs_dim > 0)
        set_size(o, "vocab_size_per_layer_input", c->inputs_vocab);
    set_size(o, "num_kv_shared_layers", c->readers);
    json_object_set_new(o, "use_double_wide_mlp", json_boolean(c->readers_double));
    set_size(o, "global_head_dim", c->full_head_dim);
    set_size(o, "num_global_key_value_heads", c->full_kv_heads);
    json_object_set_new(o, "attention_k_eq_v", json_boolean(c->values_of_keys));
    json_object_set_new(o, "final_logit_softcapping", c->logit_cap > 0 ? json_real(c->logit_cap) : json_null());
    json_object_set_new(o, "enable_moe_block", json_boolean(c->experts_beside));
    if (!c->experts_beside)
        return;
    set_size(o, "num_experts", c->experts);
    set_size(o, "top_k_experts", c->choices);
    set_size(o, "moe_intermediate_size", c->mlp_width);
}
