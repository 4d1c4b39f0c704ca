/*
 * What config.json says of Falcon-H1 beside what all of Llama's relatives have: sizes of Mamba-2's half of each layer, whether it has a norm,
 * and by what numbers of both halves, of the MLP, of embeddings and of logits are multiplied; the same written. Source: the configuration
 * class of transformers.
 */
#include "hf_source.h"

/* A number above 0, which is 1 where nothing is said. */
static spw_status
read_factor(const source *s, const char *key, double *out)
{
    *out = 1;
    SPW_TRY(read_real(s, key, out));
    return *out > 0 ? SPW_OK : wrong(s, key, "number above 0", get(s, key));
}

/* So many of them in a list. */
static spw_status
read_factors(const source *s, const char *key, double *const *out, size_t count)
{
    const json_t *list = get(s, key);
    char expected[64];
    snprintf(expected, sizeof expected, "a list of %zu numbers above 0", count);
    if (list != NULL && json_array_size(list) != count)
        return wrong(s, key, expected, list);
    for (size_t i = 0; i < count; i++) {
        const json_t *v = json_array_get(list, i);
        *out[i] = list != NULL ? json_number_value(v) : 1;
        if (!(*out[i] > 0 && *out[i] <= 1e12))
            return wrong(s, key, expected, list);
    }
    return SPW_OK;
}

static spw_status
read_multipliers(const source *s, spw_model_config *c)
{
    double *const of_mlp[2] = {&c->scales.gate, &c->scales.mlp};
    double *const of_linear[5] = {&c->scales.linear[0], &c->scales.linear[1], &c->scales.linear[2],
                                  &c->scales.linear[3], &c->scales.linear[4]};
    double of_logits;
    SPW_TRY(read_factor(s, "embedding_multiplier", &c->embedding_scale));
    SPW_TRY(read_factor(s, "lm_head_multiplier", &of_logits));
    SPW_TRY(read_factor(s, "key_multiplier", &c->scales.keys));
    SPW_TRY(read_factor(s, "attention_in_multiplier", &c->scales.attention_in));
    SPW_TRY(read_factor(s, "attention_out_multiplier", &c->scales.attention_out));
    SPW_TRY(read_factor(s, "ssm_in_multiplier", &c->scales.linear_in));
    SPW_TRY(read_factor(s, "ssm_out_multiplier", &c->scales.linear_out));
    SPW_TRY(read_factors(s, "mlp_multipliers", of_mlp, 2));
    SPW_TRY(read_factors(s, "ssm_multipliers", of_linear, 5));
    c->logit_divisor = 1 / of_logits;
    return SPW_OK;
}

spw_status
spw__hf_read_falcon(const source *s, spw_model_config *c)
{
    bool normed = false, first = true;
    uint64_t all = json_object_get(s->object, "mamba_d_ssm") == NULL ? 1024 : 0; /* the class's default */
    c->linear_beside = true;
    SPW_TRY(read_size(s, "mamba_d_ssm", 1, &all));
    SPW_TRY(spw__hf_read_mamba(s, c, all, "heads of mamba_d_head that are mamba_d_ssm together"));
    SPW_TRY(read_multipliers(s, c));
    SPW_TRY(read_bool(s, "mamba_rms_norm", &normed));
    SPW_TRY(read_bool(s, "mamba_norm_before_gate", &first));
    c->linear_unnormed = !normed;
    c->linear_norm_first = normed && first;
    SPW_TRY(must_be(s, "mamba_proj_bias", false));
    SPW_TRY(must_be(s, "projectors_bias", false));
    SPW_TRY(must_be(s, "mamba_use_mlp", true));
    return spw__hf_check_steps(s);
}

static void
write_sizes(json_t *o, const spw_model_config *c)
{
    set_size(o, "mamba_n_heads", c->linear_heads);
    set_size(o, "mamba_n_groups", c->linear_key_heads);
    set_size(o, "mamba_d_state", c->linear_key_dim);
    set_size(o, "mamba_d_head", c->linear_value_dim);
    set_size(o, "mamba_d_conv", c->linear_taps);
    set_size(o, "mamba_d_ssm", c->linear_heads * c->linear_value_dim);
    json_object_set_new(o, "mamba_conv_bias", json_boolean(c->linear_bias));
    json_object_set_new(o, "mamba_rms_norm", json_boolean(!c->linear_unnormed));
    json_object_set_new(o, "mamba_norm_before_gate", json_boolean(c->linear_norm_first));
    json_object_set_new(o, "mamba_proj_bias", json_false());
    json_object_set_new(o, "projectors_bias", json_false());
}

void
spw__hf_write_falcon(json_t *o, const spw_model_config *c)
{
    json_t *of_linear = json_array();
    for (int i = 0; i < 5; i++)
        json_array_append_new(of_linear, json_real(c->scales.linear[i]));
    write_sizes(o, c);
    json_object_set_new(o, "embedding_multiplier", json_real(c->embedding_scale));
    json_object_set_new(o, "lm_head_multiplier", json_real(1 / c->logit_divisor));
    json_object_set_new(o, "key_multiplier", json_real(c->scales.keys));
    json_object_set_new(o, "attention_in_multiplier", json_real(c->scales.attention_in));
    json_object_set_new(o, "attention_out_multiplier", json_real(c->scales.attention_out));
    json_object_set_new(o, "ssm_in_multiplier", json_real(c->scales.linear_in));
    json_object_set_new(o, "ssm_out_multiplier", json_real(c->scales.linear_out));
    json_object_set_new(o, "mlp_multipliers", json_pack("[f, f]", c->scales.gate, c->scales.mlp));
    json_object_set_new(o, "ssm_multipliers", of_linear);
}
