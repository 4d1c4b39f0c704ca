/*
 * What config.json says of layers of linear attention, which Qwen3-Next and Qwen3.5 have: their sizes (hf_window.c reads which layers they
 * are); and the same written. Source: the configuration classes of transformers.
 */
#include "hf_source.h"

/* A size that kernels have no more of. */
static spw_status
check_most(const source *s, const char *key, uint64_t is, uint64_t most, uint64_t multiple_of)
{
    return is <= most && is % multiple_of == 0 ? SPW_OK : refuse(s, key, get(s, key));
}

spw_status
spw__hf_read_linear(const source *s, spw_model_config *c)
{
    if (!spw__hf_of(c->family, LINEAR))
        return SPW_OK;
    c->linear_heads = 32; /* the classes' defaults */
    c->linear_key_heads = 16;
    c->linear_key_dim = c->linear_value_dim = 128;
    c->linear_taps = 4;
    c->linear_woven = c->family == SPW_FAMILY_QWEN3_NEXT;
    c->attention_gated = c->norms_from_one = true;
    SPW_TRY(read_size(s, "linear_num_value_heads", 1, &c->linear_heads));
    SPW_TRY(read_size(s, "linear_num_key_heads", 1, &c->linear_key_heads));
    SPW_TRY(read_size(s, "linear_key_head_dim", 1, &c->linear_key_dim));
    SPW_TRY(read_size(s, "linear_value_head_dim", 1, &c->linear_value_dim));
    SPW_TRY(read_size(s, "linear_conv_kernel_dim", 1, &c->linear_taps));
    SPW_TRY(check_most(s, "linear_key_head_dim", c->linear_key_dim, SPW_DELTA_DIM_MAX, 8));
    SPW_TRY(check_most(s, "linear_value_head_dim", c->linear_value_dim, SPW_DELTA_DIM_MAX, 8));
    SPW_TRY(check_most(s, "linear_conv_kernel_dim", c->linear_taps, SPW_TAPS_MAX, 1));
    if (c->linear_heads % c->linear_key_heads != 0)
        return wrong(s, "linear_num_value_heads", "a multiple of linear_num_key_heads",
                     get(s, "linear_num_value_heads"));
    return must_be(s, "attn_output_gate", true);
}

void
spw__hf_write_linear(json_t *o, const spw_model_config *c)
{
    json_t *list = json_array();
    for (uint64_t l = 0; l < c->layers; l++)
        json_array_append_new(list, json_string(spw_model_is_linear(c, l) ? "linear_attention" : "full_attention"));
    json_object_set_new(o, "layer_types", list);
    set_size(o, "full_attention_interval", c->full_every);
    set_size(o, "linear_num_value_heads", c->linear_heads);
    set_size(o, "linear_num_key_heads", c->linear_key_heads);
    set_size(o, "linear_key_head_dim", c->linear_key_dim);
    set_size(o, "linear_value_head_dim", c->linear_value_dim);
    set_size(o, "linear_conv_kernel_dim", c->linear_taps);
}
