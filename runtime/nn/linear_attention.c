/*
 * A layer's linear attention: what its rows are made into one by one, the convolution and the gated delta rule along the sequence, and the
 * norm and gate of what they give. Qwen3.5's weights have a matrix for each purpose; Qwen3-Next's are woven: all that belongs to a
 * key head is beside each other. Source: Yang et al. 2024 (2412.06464).
 */
#include "nn_internal.h"
#include <stdio.h>

/* y = x w^T by what is next in the block's list. */
static spw_value *
product(const spw_call *call, uint32_t *at, spw_value *x)
{
    return spw__nn_adapted(call, NULL, x, (*at)++, NULL, 0);
}

static void
unwoven(const spw_call *call, uint32_t *at, spw_value *h, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    uint64_t heads = c->linear_key_heads, each = c->linear_heads / heads, values = each * c->linear_value_dim;
    const uint64_t sizes[4] = {c->linear_key_dim, c->linear_key_dim, values, values}, numbers[2] = {each, each};
    spw_tape *t = call->tape;
    spw_value *x = product(call, at, h);
    spw_nn_into(t, 0);
    out[0] = spw_nn_parts(t, x, heads, sizes, 0, 3);
    spw_nn_into(t, 1);
    out[1] = spw_nn_parts(t, x, heads, sizes, 3, 1);
    x = product(call, at, h);
    for (uint32_t k = 0; k < 2; k++) {
        spw_nn_into(t, 2 + k);
        out[2 + k] = spw_nn_parts(t, x, heads, numbers, k, 1);
    }
}

/* Queries, keys and values in one, the gate of what is found, and b and a of each head. */
static void
before(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_value *h = spw__nn_norm(call, at, in[0]);
    if (call->model->config.linear_woven) {
        unwoven(call, at, h, out);
        return;
    }
    for (uint32_t k = 0; k < 4; k++) {
        spw_nn_into(call->tape, k);
        out[k] = product(call, at, h);
    }
}

spw_value *
spw__nn_linear_attention(const spw_call *call, uint32_t *at, spw_value *x, spw_value **gate)
{
    const spw_model_config *c = &call->model->config;
    const spw_batch *b = call->batch;
    spw_delta_shape shape = {.B = b->sequences,
                             .T = b->positions,
                             .Hk = c->linear_key_heads,
                             .Hv = c->linear_heads,
                             .Dk = c->linear_key_dim,
                             .Dv = c->linear_value_dim,
                             .begins = b->begins,
                             .ends = b->ends};
    spw_conv_shape taps = {.B = shape.B,
                           .T = shape.T,
                           .C = spw_model_linear_channels(c),
                           .K = c->linear_taps,
                           .begins = b->begins,
                           .ends = b->ends};
    spw_value *v[4], *const *own;
    spw_nn_rows(call, at, before, (spw_value *[]){x}, 1, v, 4);
    own = call->params + *at;
    *at += 3;
    *gate = v[1];
    x = spw_nn_conv(call->tape, v[0], own[0], &taps);
    return spw_nn_delta(call->tape, x, v[3], v[2], own[1], own[2], &shape);
}

/* The norm is of each head, and by w where the block's others are by 1 + w. */
spw_value *
spw__nn_linear_gated(const spw_call *call, uint32_t *at, spw_value *x, spw_value *gate)
{
    x = spw_nn_rmsnorm(call->tape, x, call->params[(*at)++], (float)call->model->config.norm_eps);
    return spw_nn_gate_mul(call->tape, SPW_GATE_SILU, gate, x);
}

static void
own_matrix(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols)
{
    char full[64];
    snprintf(full, sizeof full, "linear_attn.%s.weight", name);
    spw__nn_own(m, b, prefix, full, rows, cols, 2, SPW_INIT_NORMAL, (float)m->config.init_std);
}

void
spw__nn_own_linear_attention(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    uint64_t H = c->width, V = c->linear_heads * c->linear_value_dim, QKV = spw_model_linear_channels(c);
    if (c->linear_woven) {
        own_matrix(m, b, prefix, "in_proj_qkvz", QKV + V, H);
        own_matrix(m, b, prefix, "in_proj_ba", 2 * c->linear_heads, H);
    } else {
        own_matrix(m, b, prefix, "in_proj_qkv", QKV, H);
        own_matrix(m, b, prefix, "in_proj_z", V, H);
        own_matrix(m, b, prefix, "in_proj_b", c->linear_heads, H);
        own_matrix(m, b, prefix, "in_proj_a", c->linear_heads, H);
    }
    spw__nn_own(m, b, prefix, "linear_attn.conv1d.weight", QKV, c->linear_taps, 3, SPW_INIT_NORMAL, (float)c->init_std);
    spw__nn_own(m, b, prefix, "linear_attn.A_log", 1, c->linear_heads, 1, SPW_INIT_LOG_UNIFORM, 0);
    spw__nn_own(m, b, prefix, "linear_attn.dt_bias", 1, c->linear_heads, 1, SPW_INIT_ONES, 0);
    spw__nn_own(m, b, prefix, "linear_attn.norm.weight", 1, c->linear_value_dim, 1, SPW_INIT_ONES, 0);
    own_matrix(m, b, prefix, "out_proj", H, V);
}
