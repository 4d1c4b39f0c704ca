/*
 * What config.json says of the families whose blocks have LayerNorms and, as a rule, an MLP of two matrices: keys of their own, which are
 * read and written here, one family after the other. Rotary positions and windows are read where the other families' are.
 * Source: their configuration classes in transformers.
 */
#include "hf_source.h"

/* ---------------------------------------------------------------- what they have in common */

/* What is between an MLP's two matrices, by transformers' names. */
static const struct {
    const char *name;
    spw_curve curve;
} curves[] = {{"gelu", SPW_CURVE_GELU_ERF},
              {"gelu_pytorch_tanh", SPW_CURVE_GELU}, /* written; the others are the same formula */
              {"gelu_new", SPW_CURVE_GELU},
              {"gelu_fast", SPW_CURVE_GELU},
              {"relu", SPW_CURVE_RELU}};

static spw_status
read_curve(const source *s, const char *key, spw_curve otherwise, spw_model_config *c)
{
    const json_t *v = get(s, key);
    const char *name = json_string_value(v);
    c->ungated = true;
    c->curve = otherwise;
    for (size_t i = 0; v != NULL && i < sizeof curves / sizeof curves[0]; i++) {
        c->curve = curves[i].curve;
        if (name != NULL && strcmp(name, curves[i].name) == 0)
            return SPW_OK;
    }
    return v == NULL ? SPW_OK : refuse(s, key, v);
}

static void
write_curve(json_t *o, const char *key, spw_curve curve)
{
    size_t i = 0;
    while (curves[i].curve != curve)
        i++;
    json_object_set_new(o, key, json_string(curves[i].name));
}

static spw_status
read_sizes(const source *s, const char *mlp_width, spw_model_config *c)
{
    SPW_TRY(read_size(s, "hidden_size", 1, &c->width));
    SPW_TRY(read_size(s, "num_hidden_layers", 1, &c->layers));
    SPW_TRY(read_size(s, "num_attention_heads", 1, &c->heads));
    SPW_TRY(read_size(s, mlp_width, 1, &c->mlp_width));
    SPW_TRY(read_size(s, "max_position_embeddings", 1, &c->positions));
    if (c->heads > 0 && c->width % c->heads != 0)
        return wrong(s, "num_attention_heads", "a divisor of hidden_size", get(s, "num_attention_heads"));
    c->kv_heads = c->heads;
    c->head_dim = c->heads > 0 ? c->width / c->heads : 0;
    c->layer_norm = true;
    c->norm_eps = 1e-5;
    return SPW_OK;
}

static void
write_sizes(json_t *o, const char *mlp_width, const spw_model_config *c)
{
    set_size(o, "hidden_size", c->width);
    set_size(o, "num_hidden_layers", c->layers);
    set_size(o, "num_attention_heads", c->heads);
    set_size(o, mlp_width, c->mlp_width);
    set_size(o, "max_position_embeddings", c->positions);
}

/* They have a gate, as Llama's. */
static spw_status
check_silu(const source *s)
{
    const json_t *v = get(s, "hidden_act");
    const char *name = json_string_value(v);
    return v == NULL || (name != NULL && strcmp(name, "silu") == 0) ? SPW_OK : refuse(s, "hidden_act", v);
}

/* ---------------------------------------------------------------- GPT-NeoX */

static spw_status
read_neox(const source *s, spw_model_config *c)
{
    c->parallel = c->parallel_norm = c->packed = c->woven = c->qkv_bias = c->mlp_bias = true;
    SPW_TRY(read_sizes(s, "intermediate_size", c));
    SPW_TRY(read_real(s, "layer_norm_eps", &c->norm_eps));
    SPW_TRY(read_curve(s, "hidden_act", SPW_CURVE_GELU_ERF, c));
    SPW_TRY(spw__hf_read_rope(s, c));
    SPW_TRY(read_bool(s, "attention_bias", &c->qkv_bias));
    c->out_bias = c->qkv_bias;
    return read_bool(s, "use_parallel_residual", &c->parallel);
}

static void
write_neox(json_t *o, const spw_model_config *c)
{
    write_sizes(o, "intermediate_size", c);
    write_curve(o, "hidden_act", c->curve);
    json_object_set_new(o, "layer_norm_eps", json_real(c->norm_eps));
    json_object_set_new(o, "rotary_pct", json_real(c->rope_part > 0 ? c->rope_part : 1));
    json_object_set_new(o, "rotary_emb_base", json_real(c->rope_theta));
    spw__hf_write_scaling(o, c);
    json_object_set_new(o, "attention_bias", json_boolean(c->qkv_bias));
    json_object_set_new(o, "use_parallel_residual", json_boolean(c->parallel));
}

/* ---------------------------------------------------------------- OPT */

static spw_status
read_opt(const source *s, spw_model_config *c)
{
    uint64_t embedding_width;
    bool bias = true;
    c->tied = c->learned_places = true;
    c->places_before = 2;
    SPW_TRY(read_sizes(s, "ffn_dim", c));
    SPW_TRY(read_real(s, "init_std", &c->init_std));
    SPW_TRY(read_curve(s, "activation_function", SPW_CURVE_RELU, c));
    SPW_TRY(read_bool(s, "enable_bias", &bias));
    c->qkv_bias = c->out_bias = c->mlp_bias = bias;
    if (get(s, "do_layer_norm_before") != NULL && json_is_false(get(s, "do_layer_norm_before")))
        return say(s, "not supported yet: ", "do_layer_norm_before", " ", get(s, "do_layer_norm_before"),
                   ": of OPT the models that norm what is read are computed, which are all but the one of 350M");
    SPW_TRY(must_be(s, "do_layer_norm_before", true));
    SPW_TRY(must_be(s, "_remove_final_layer_norm", false));
    SPW_TRY(must_be(s, "layer_norm_elementwise_affine", true));
    embedding_width = c->width;
    SPW_TRY(read_size(s, "word_embed_proj_dim", 1, &embedding_width));
    if (embedding_width != c->width)
        return say(s, "not supported yet: ", "word_embed_proj_dim", " ", get(s, "word_embed_proj_dim"),
                   ": embeddings must be as wide as hidden_size");
    return SPW_OK;
}

static void
write_opt(json_t *o, const spw_model_config *c)
{
    write_sizes(o, "ffn_dim", c);
    write_curve(o, "activation_function", c->curve);
    json_object_set_new(o, "do_layer_norm_before", json_true());
    set_size(o, "word_embed_proj_dim", c->width);
    json_object_set_new(o, "enable_bias", json_boolean(c->qkv_bias));
    json_object_set_new(o, "dropout", json_real(0)); /* the class has some by default */
}

/* ---------------------------------------------------------------- Starcoder2, StableLM */

static spw_status
read_kv_heads(const source *s, uint64_t otherwise, spw_model_config *c)
{
    if (json_object_get(s->object, "num_key_value_heads") == NULL)
        c->kv_heads = otherwise;
    return read_size(s, "num_key_value_heads", 1, &c->kv_heads);
}

static void
write_usual(json_t *o, const spw_model_config *c)
{
    write_sizes(o, "intermediate_size", c);
    set_size(o, "num_key_value_heads", c->kv_heads);
    json_object_set_new(o, "rope_theta", json_real(c->rope_theta));
    spw__hf_write_scaling(o, c);
}

static spw_status
read_starcoder2(const source *s, spw_model_config *c)
{
    bool bias = true;
    c->tied = true;
    SPW_TRY(read_sizes(s, "intermediate_size", c));
    SPW_TRY(read_kv_heads(s, 2, c));
    SPW_TRY(read_real(s, "norm_epsilon", &c->norm_eps));
    SPW_TRY(read_curve(s, "hidden_act", SPW_CURVE_GELU, c));
    SPW_TRY(spw__hf_read_rope(s, c));
    SPW_TRY(read_size(s, "sliding_window", 1, &c->window));
    SPW_TRY(read_bool(s, "use_bias", &bias));
    c->qkv_bias = c->out_bias = c->mlp_bias = bias;
    return SPW_OK;
}

static void
write_starcoder2(json_t *o, const spw_model_config *c)
{
    write_usual(o, c);
    write_curve(o, "hidden_act", c->curve);
    json_object_set_new(o, "norm_epsilon", json_real(c->norm_eps));
    json_object_set_new(o, "sliding_window", c->window > 0 ? json_integer((json_int_t)c->window) : json_null());
    json_object_set_new(o, "use_bias", json_boolean(c->qkv_bias));
}

static spw_status
read_stablelm(const source *s, spw_model_config *c)
{
    SPW_TRY(read_sizes(s, "intermediate_size", c));
    SPW_TRY(read_kv_heads(s, 32, c));
    SPW_TRY(read_real(s, "layer_norm_eps", &c->norm_eps));
    SPW_TRY(check_silu(s));
    SPW_TRY(spw__hf_read_rope(s, c));
    SPW_TRY(read_bool(s, "use_qkv_bias", &c->qkv_bias));
    if (json_is_true(get(s, "qk_layernorm")))
        return say(s, "not supported yet: ", "qk_layernorm", " ", get(s, "qk_layernorm"),
                   ": of StableLM the models without norms of heads are computed, which are all but StableLM 2 of 12B");
    SPW_TRY(must_be(s, "qk_layernorm", false));
    return read_bool(s, "use_parallel_residual", &c->parallel);
}

static void
write_stablelm(json_t *o, const spw_model_config *c)
{
    write_usual(o, c);
    json_object_set_new(o, "hidden_act", json_string("silu"));
    json_object_set_new(o, "layer_norm_eps", json_real(c->norm_eps));
    json_object_set_new(o, "partial_rotary_factor", json_real(c->rope_part > 0 ? c->rope_part : 1));
    json_object_set_new(o, "use_qkv_bias", json_boolean(c->qkv_bias));
    json_object_set_new(o, "use_parallel_residual", json_boolean(c->parallel));
}

/* ---------------------------------------------------------------- Cohere, Cohere 2 */

/* Logits are multiplied by a number. The first class norms heads by weights of each where use_qk_norm is true. */
static spw_status
read_cohere(const source *s, spw_model_config *c)
{
    double scale = 0.0625;
    uint64_t head_dim;
    c->tied = c->parallel = c->norm_unbiased = c->rope_paired = true;
    SPW_TRY(read_sizes(s, "intermediate_size", c));
    SPW_TRY(read_kv_heads(s, c->heads, c));
    SPW_TRY(read_real(s, "layer_norm_eps", &c->norm_eps));
    SPW_TRY(check_silu(s));
    head_dim = c->head_dim;
    SPW_TRY(read_size(s, "head_dim", 1, &head_dim));
    if (head_dim != c->head_dim)
        return refuse(s, "head_dim", get(s, "head_dim"));
    SPW_TRY(spw__hf_read_rope(s, c));
    if (c->family == SPW_FAMILY_COHERE2)
        SPW_TRY(spw__hf_read_window(s, c));
    SPW_TRY(must_be(s, "use_qk_norm", false));
    SPW_TRY(read_bool(s, "attention_bias", &c->qkv_bias));
    c->out_bias = c->qkv_bias;
    SPW_TRY(read_real(s, "logit_scale", &scale));
    c->logit_divisor = 1 / scale;
    return scale > 0 ? SPW_OK : wrong(s, "logit_scale", "number above 0", get(s, "logit_scale"));
}

static void
write_cohere(json_t *o, const spw_model_config *c)
{
    write_usual(o, c);
    json_object_set_new(o, "hidden_act", json_string("silu"));
    json_object_set_new(o, "layer_norm_eps", json_real(c->norm_eps));
    json_object_set_new(o, "attention_bias", json_boolean(c->qkv_bias));
    json_object_set_new(o, "logit_scale", json_real(1 / c->logit_divisor));
    if (c->family == SPW_FAMILY_COHERE2)
        spw__hf_write_rope_windows(o, c);
}

/* ---------------------------------------------------------------- all of them */

spw_status
spw__hf_read_layer_norm(const source *s, spw_model_config *c)
{
    switch (c->family) {
    case SPW_FAMILY_OPT: return read_opt(s, c);
    case SPW_FAMILY_STARCODER2: return read_starcoder2(s, c);
    case SPW_FAMILY_STABLELM: return read_stablelm(s, c);
    case SPW_FAMILY_COHERE:
    case SPW_FAMILY_COHERE2: return read_cohere(s, c);
    default: return read_neox(s, c);
    }
}

void
spw__hf_write_layer_norm(json_t *o, const spw_model_config *c)
{
    switch (c->family) {
    case SPW_FAMILY_OPT: write_opt(o, c); break;
    case SPW_FAMILY_STARCODER2: write_starcoder2(o, c); break;
    case SPW_FAMILY_STABLELM: write_stablelm(o, c); break;
    case SPW_FAMILY_COHERE:
    case SPW_FAMILY_COHERE2: write_cohere(o, c); break;
    default: write_neox(o, c);
    }
}
