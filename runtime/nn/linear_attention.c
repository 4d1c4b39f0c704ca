/*
 * A layer's linear attention: what its rows are made into one by one, the convolution and the gated delta rule along the sequence, and the
 * norm and gate of what they give. Qwen3.5's weights have a matrix for each purpose; Qwen3-Next's are woven: all that belongs to a
 * key head is beside each other. Mamba-2's layers have one matrix for all, and behind the gate a norm of all heads together that read
 * the same keys. OLMo Hybrid's have a matrix and taps for each of queries, keys and values, and so have Kimi Linear's, whose decays are channels'. LFM2's are the convolution alone, of what a row's first part lets through of its third, as far as the second lets that.
 * Sources: Yang et al. 2024 (2412.06464), Dao and Gu 2024 (2405.21060).
 */
#include "nn_internal.h"
#include "tape_internal.h"
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

/* The same of what is in a row of x, each multiplied by a number of its own. */
static void
scaled_parts(const spw_call *call, spw_value *x, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t V = c->linear_heads * c->linear_value_dim, K = c->linear_key_heads * c->linear_key_dim;
    const uint64_t sizes[5] = {V, V, K, K, c->linear_heads};
    spw_value *parts[5];
    for (uint32_t k = 0; k < 5; k++) {
        parts[k] = spw_nn_parts(call->tape, x, 1, sizes, k, 1);
        if (k % 4 == 0)
            spw_nn_into(call->tape, k == 0 ? 1 : 2);
        parts[k] = spw_nn_scale(call->tape, parts[k], (float)(c->scales.linear_in * c->scales.linear[k]));
    }
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_beside(call->tape, parts + 1, 3);
    out[1] = parts[0];
    out[2] = parts[4];
}

/* What the convolution reads, the gate, and a step of each head. */
static void
before_mamba(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    static const uint32_t from[3] = {1, 0, 2};
    const spw_model_config *c = &call->model->config;
    const uint64_t sizes[3] = {c->linear_heads * c->linear_value_dim, spw_model_linear_channels(c), c->linear_heads};
    spw_value *x = product(call, at, c->linear_beside ? in[0] : spw__nn_norm(call, at, in[0]));
    if (c->scales.linear_in > 0) {
        scaled_parts(call, x, out);
        return;
    }
    for (uint32_t k = 0; k < 3; k++) {
        spw_nn_into(call->tape, k);
        out[k] = spw_nn_parts(call->tape, x, 1, sizes, from[k], 1);
    }
}

/* What the convolution reads, and the gate of what it gives. */
static void
before_conv(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const uint64_t width = call->model->config.width, sizes[3] = {width, width, width};
    spw_value *x = product(call, at, spw__nn_norm(call, at, in[0])), *parts[3];
    for (uint32_t k = 0; k < 3; k++) {
        if (k == 1)
            spw_nn_into(call->tape, 1);
        parts[k] = spw_nn_parts(call->tape, x, 1, sizes, k, 1);
    }
    out[1] = parts[1];
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_gate_mul(call->tape, SPW_GATE_PLAIN, parts[0], parts[2]);
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

/* The same where each has a matrix of its own. */
static void
before_apart(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_value *h = spw__nn_norm(call, at, in[0]), *parts[3];
    for (uint32_t k = 0; k < 3; k++)
        parts[k] = product(call, at, h);
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_beside(call->tape, parts, 3);
    for (uint32_t k = 1; k < 4; k++) {
        spw_nn_into(call->tape, k);
        out[k] = product(call, at, h);
    }
}

/* The same where the gate, and what decays of channels are made of, come by way of something narrower. */
static void
before_channels(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_value *h = spw__nn_norm(call, at, in[0]), *parts[3], *low;
    for (uint32_t k = 0; k < 3; k++)
        parts[k] = product(call, at, h);
    spw_nn_into(call->tape, 0);
    out[0] = spw_nn_beside(call->tape, parts, 3);
    for (uint32_t k = 1; k < 4; k++) {
        low = k == 2 ? h : product(call, at, h);
        spw_nn_into(call->tape, k);
        out[k] = product(call, at, low);
    }
}

/* How a layer's rows are made into what it reads along the sequence. */
static spw_rows_fn
before_of(const spw_model_config *c)
{
    return c->linear_mamba      ? before_mamba
           : c->linear_channels ? before_channels
           : c->linear_apart    ? before_apart
                                : before;
}

/* What is computed along the sequence: of what a row's parts made, of which b is NULL where the rule has none. */
typedef struct along {
    spw_value *x, *a, *b;
    spw_value *taps[3], *bias[3], *log_a, *dt_bias, *skip; /* bias: NULL where there is none */
    uint32_t taps_count;
    spw_conv_shape conv;
    spw_delta_shape shape;
} along;

static spw_value *
compute_along(const spw_call *call, along *s)
{
    spw_value *x = spw_nn_conv(call->tape, s->x, s->taps, s->bias, s->taps_count, &s->conv);
    return call->model->config.linear_conv
               ? x
               : spw_nn_delta(call->tape, x, s->a, s->b, s->log_a, s->dt_bias, s->skip, &s->shape);
}

/* Of the convolution's channels heads of queries, keys and values, in the order in which a row has them; a convolution alone is cut as it comes. */
static uint32_t
heads_of(const spw_call *call, const along *s, spw__heads parts[3])
{
    const spw_delta_shape *d = &s->shape;
    const bool mamba = d->mamba;
    const uint64_t count = call->tape->share->count, K = d->Hk * d->Dk, V = d->Hv * d->Dv;
    if (call->model->config.linear_conv) {
        parts[0] = (spw__heads){s->x, 0, count, s->conv.C / count, s->conv.C / count};
        return 1;
    }
    parts[mamba ? 0 : 2] = (spw__heads){s->x, mamba ? 0 : 2 * K, d->Hv, d->Dv, d->Dv};
    parts[1] = (spw__heads){s->x, mamba ? V : K, d->Hk, d->Dk, d->Dk};
    parts[mamba ? 2 : 0] = (spw__heads){s->x, mamba ? V + K : 0, d->Hk, d->Dk, d->Dk};
    return 3;
}

/* Where ranks share sequences: of this rank's heads, with all rows; its taps and numbers are those of these. */
static spw_value *
share_along(const spw_call *call, along *s)
{
    spw_tape *t = call->tape;
    const spw_delta_shape all = s->shape;
    const uint64_t decays = all.channels ? all.Dk : 1;
    spw__heads parts[3];
    const uint32_t count = heads_of(call, s, parts);
    spw_value *taps[3], *bias[3] = {NULL}, *y;
    uint64_t C = 0;
    for (uint32_t k = 0; k < count; k++) {
        const uint64_t before = s->taps_count == 1 ? parts[k].col : 0;
        taps[k] = spw__share_part(t, s->taps[s->taps_count == 1 ? 0 : k], before, parts[k].heads, parts[k].D);
        if (s->bias[0] != NULL)
            bias[k] = spw__share_part(t, s->bias[0], before, parts[k].heads, parts[k].D);
        C += spw__share_heads(t, parts[k].heads) * parts[k].D;
    }
    memcpy(s->taps, taps, sizeof taps);
    memcpy(s->bias, bias, sizeof bias);
    s->taps_count = count;
    s->x = spw__share_out(t, parts, count, all.B, all.T);
    if (s->a != NULL)
        s->a = spw__share_out(t, &(spw__heads){s->a, 0, all.Hv, decays, decays}, 1, all.B, all.T);
    if (s->b != NULL)
        s->b = spw__share_out(t, &(spw__heads){s->b, 0, all.Hv, 1, 1}, 1, all.B, all.T);
    s->log_a = spw__share_part(t, s->log_a, 0, all.Hv, 1);
    s->dt_bias = spw__share_part(t, s->dt_bias, 0, all.Hv, decays);
    s->skip = spw__share_part(t, s->skip, 0, all.Hv, 1);
    s->shape.T = s->conv.T = all.T * t->share->count;
    s->shape.Hk = spw__share_heads(t, all.Hk);
    s->shape.Hv = spw__share_heads(t, all.Hv);
    s->conv.C = C;
    y = compute_along(call, s);
    if (call->model->config.linear_conv)
        return spw__share_home(t, y, parts[0].heads, parts[0].D, all.B, all.T);
    return spw__share_home(t, y, all.Hv, all.Dv, all.B, all.T);
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
                             .ends = b->ends,
                             .mamba = c->linear_mamba,
                             .channels = c->linear_channels,
                             .step_least = (float)c->linear_step,
                             .beta_most = (float)c->linear_most};
    spw_conv_shape taps = {.B = shape.B,
                           .T = shape.T,
                           .C = spw_model_linear_channels(c),
                           .K = c->linear_taps,
                           .plain = c->linear_conv,
                           .begins = b->begins,
                           .ends = b->ends};
    along s = {.shape = shape, .conv = taps, .taps_count = c->linear_apart ? 3 : 1};
    spw_value *v[4] = {NULL}, *const * own;
    if (c->linear_conv)
        spw_nn_rows(call, at, before_conv, (spw_value *[]){x}, 1, v, 2);
    else
        spw_nn_rows(call, at, before_of(c), (spw_value *[]){x}, 1, v, c->linear_mamba ? 3 : 4);
    s.bias[0] = c->linear_bias ? call->params[(*at)++] : NULL;
    own = call->params + *at;
    *at += c->linear_conv ? 1 : c->linear_mamba ? 4 : c->linear_apart ? 5 : 3;
    *gate = v[1];
    memcpy(s.taps, own, s.taps_count * sizeof *own);
    s.x = v[0];
    if (!c->linear_conv) {
        s.a = c->linear_mamba ? v[2] : v[3];
        s.b = c->linear_mamba ? NULL : v[2];
        s.log_a = own[s.taps_count];
        s.dt_bias = own[s.taps_count + 1];
        s.skip = c->linear_mamba ? own[s.taps_count + 2] : NULL;
    }
    return call->tape->share != NULL ? share_along(call, &s) : compute_along(call, &s);
}

/* The norm is of each head, and by w where the block's others are by 1 + w. Mamba-2's is of what the gate has let through of a group. */
spw_value *
spw__nn_linear_gated(const spw_call *call, uint32_t *at, spw_value *x, spw_value *gate)
{
    const spw_model_config *c = &call->model->config;
    spw_value *w;
    if (c->linear_conv)
        return spw_nn_gate_mul(call->tape, SPW_GATE_PLAIN, gate, x);
    if (c->linear_unnormed)
        return spw_nn_gate_mul(call->tape, SPW_GATE_SILU, gate, x);
    w = call->params[(*at)++];
    if (c->linear_norm_first) {
        x = spw_nn_rmsnorm_groups(call->tape, x, w, c->linear_key_heads, (float)c->norm_eps);
        return spw_nn_gate_mul(call->tape, SPW_GATE_SILU, gate, x);
    }
    if (!c->linear_mamba)
        return spw_nn_gate_mul(
            call->tape, c->linear_channels ? SPW_GATE_SIGMOID : SPW_GATE_SILU, gate,
            spw_nn_rmsnorm(call->tape, x, w, (float)(c->linear_eps > 0 ? c->linear_eps : c->norm_eps)));
    x = spw_nn_gate_mul(call->tape, SPW_GATE_SILU, gate, x);
    return spw_nn_rmsnorm_groups(call->tape, x, w, c->linear_key_heads, (float)c->norm_eps);
}

static void
own(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols, uint32_t ndim,
    spw_init init)
{
    char full[64];
    snprintf(full, sizeof full, "%s.%s", spw__nn_names(m->config.family)->linear, name);
    spw__nn_own(m, b, prefix, full, rows, cols, ndim, init, init == SPW_INIT_NORMAL ? (float)m->config.init_std : 0);
}

static void
own_matrix(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols)
{
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    own(m, b, prefix, full, rows, cols, 2, SPW_INIT_NORMAL);
}

/* Matrices of queries, keys, values, gates, b and a, where there are channels two for gates and what would be a; taps of the first three. */
static void
own_apart(spw_model *m, spw_block *b, const char *prefix)
{
    static const char *const names[6] = {"q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"};
    static const char *const narrow[8] = {"q_proj",   "k_proj", "v_proj",   "g_a_proj",
                                          "g_b_proj", "b_proj", "f_a_proj", "f_b_proj"};
    static const char *const taps[3] = {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"};
    const spw_model_config *c = &m->config;
    const uint64_t K = c->linear_key_heads * c->linear_key_dim, V = c->linear_heads * c->linear_value_dim;
    const uint64_t H = c->width, N = c->linear_key_dim, heads = c->linear_heads;
    const uint64_t rows[6] = {K, K, V, V, heads, heads}, own_rows[8] = {K, K, V, N, V, heads, N, K};
    const uint64_t cols[8] = {H, H, H, H, N, H, H, N};
    for (int k = 0; k < (c->linear_channels ? 8 : 6); k++)
        own_matrix(m, b, prefix, c->linear_channels ? narrow[k] : names[k], (c->linear_channels ? own_rows : rows)[k],
                   c->linear_channels ? cols[k] : H);
    for (int k = 0; k < 3; k++)
        own(m, b, prefix, taps[k], rows[k], c->linear_taps, 3, SPW_INIT_NORMAL);
}

void
spw__nn_own_linear_attention(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    const spw__names *names = spw__nn_names(c->family);
    const char *norm = names->linear_norm != NULL ? names->linear_norm : "norm";
    uint64_t H = c->width, V = c->linear_heads * c->linear_value_dim, QKV = spw_model_linear_channels(c);
    char full[40];
    if (c->linear_conv) {
        own_matrix(m, b, prefix, "in_proj", 3 * H, H);
        own(m, b, prefix, "conv.weight", H, c->linear_taps, 3, SPW_INIT_NORMAL);
        own_matrix(m, b, prefix, "out_proj", H, H);
        return;
    }
    if (c->linear_mamba) {
        own_matrix(m, b, prefix, "in_proj", V + QKV + c->linear_heads, H);
    } else if (c->linear_apart) {
        own_apart(m, b, prefix);
    } else if (c->linear_woven) {
        own_matrix(m, b, prefix, "in_proj_qkvz", QKV + V, H);
        own_matrix(m, b, prefix, "in_proj_ba", 2 * c->linear_heads, H);
    } else {
        own_matrix(m, b, prefix, "in_proj_qkv", QKV, H);
        own_matrix(m, b, prefix, "in_proj_z", V, H);
        own_matrix(m, b, prefix, "in_proj_b", c->linear_heads, H);
        own_matrix(m, b, prefix, "in_proj_a", c->linear_heads, H);
    }
    if (c->linear_bias)
        own(m, b, prefix, "conv1d.bias", 1, QKV, 1, SPW_INIT_ZEROS);
    if (!c->linear_apart)
        own(m, b, prefix, "conv1d.weight", QKV, c->linear_taps, 3, SPW_INIT_NORMAL);
    own(m, b, prefix, "A_log", 1, c->linear_heads, 1, c->linear_mamba ? SPW_INIT_LOG_COUNT : SPW_INIT_LOG_UNIFORM);
    m->params[m->param_count - 1].of_heads = c->linear_channels;
    own(m, b, prefix, "dt_bias", 1, c->linear_heads * (c->linear_channels ? c->linear_key_dim : 1), 1,
        c->linear_channels ? SPW_INIT_STEPS : SPW_INIT_ONES);
    if (c->linear_mamba)
        own(m, b, prefix, "D", 1, c->linear_heads, 1, SPW_INIT_ONES);
    snprintf(full, sizeof full, "%s.weight", norm);
    if (!c->linear_unnormed)
        own(m, b, prefix, full, 1, c->linear_mamba ? V : c->linear_value_dim, 1, SPW_INIT_ONES);
    own_matrix(m, b, prefix, names->linear_out != NULL ? names->linear_out : "out_proj", H, V);
}
