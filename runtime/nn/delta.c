/*
 * Linear attention on the tape: a short convolution, and the gated delta rule or Mamba-2's. Both read other rows of a sequence, so neither is in a
 * tile; with a cache (generation) they go on from what it keeps.
 */
#include "tape_internal.h"

/* Which of x's channels the k-th of an operation's taps are of: from *col on, so many of them. */
static uint64_t
channels(const spw__op *o, uint32_t k, uint64_t *col)
{
    *col = 0;
    for (uint32_t i = 0; i < k; i++)
        *col += o->param[i]->rows;
    return o->part_count == 0 ? o->conv.C : o->param[k]->rows;
}

/* By each of the parameters that have taps. */
static void
convolve(const spw_tape *t, const spw__op *o)
{
    uint32_t count = o->part_count > 0 ? o->part_count : 1;
    for (uint32_t k = 0; k < count; k++) {
        spw_conv_shape shape = o->conv;
        uint64_t col;
        shape.C = channels(o, k, &col);
        shape.bias = o->bias[k] != NULL ? o->bias[k]->data : NULL;
        act *y = spw__tape_at_col(t, o->out->data, col), *x = spw__tape_at_col(t, o->in[0]->data, col);
        if (t->delta_cache != NULL) {
            spw_delta_cache cache = *t->delta_cache;
            cache.before = spw__tape_at_col(t, cache.before, col);
            spw_gpu_conv_cached(t->queue, y, x, o->param[k]->data, &cache, &shape);
        } else {
            spw_gpu_conv(t->queue, y, x, o->param[k]->data, &shape);
        }
    }
}

spw_value *
spw_nn_conv(spw_tape *t, spw_value *x, spw_value *const *w, spw_value *const *bias, uint32_t count,
            const spw_conv_shape *shape)
{
    uint64_t rows = 0;
    spw_value *y;
    spw__op *o;
    for (uint32_t k = 0; k < count; k++) {
        if (count > 3 || w[k] == NULL || w[k]->cols != shape->K || (bias[k] != NULL && bias[k]->cols != w[k]->rows))
            return spw__tape_fail(t);
        rows += w[k]->rows;
    }
    if (x == NULL || x->rows != shape->B * shape->T || x->cols != shape->C || rows != shape->C ||
        shape->K > SPW_TAPS_MAX)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_CONV, y)) == NULL)
        return spw__tape_fail(t);
    o->out = y;
    o->in[0] = x;
    o->part_count = count > 1 ? count : 0;
    memcpy(o->param, w, count * sizeof *w);
    memcpy(o->bias, bias, count * sizeof *bias);
    o->conv = *shape;
    o->conv.stride = shape->C;
    if (spw__tape_computes(t))
        convolve(t, o);
    return y;
}

void
spw__conv_backward(spw_tape *t, const spw__op *o)
{
    const uint32_t count = o->part_count > 0 ? o->part_count : 1;
    unsigned flags = 0;
    act *dx = spw__tape_grad(t, o->in[0], SPW_OP_ACC_DX, &flags);
    for (uint32_t k = 0; k < count; k++) {
        float *dw = spw__tape_sum(t, o->param[k]);
        float *dbias = spw__tape_sum(t, o->bias[k]);
        spw_conv_shape shape = o->conv;
        uint64_t col;
        shape.C = channels(o, k, &col);
        shape.bias = o->bias[k] != NULL ? o->bias[k]->data : NULL;
        if (!t->dry && (dx != NULL || dw != NULL || dbias != NULL))
            spw_gpu_conv_backward(t->queue, dx != NULL ? spw__tape_at_col(t, dx, col) : NULL, dw, dbias,
                                  spw__tape_at_col(t, o->out->grad, col), spw__tape_at_col(t, o->in[0]->data, col),
                                  o->param[k]->data, &shape, flags);
    }
}

/*
 * Backward takes so many rows at a time, or a longer sequence, because its scratch is several times as large as its inputs. Of a sequence
 * whose scratch would be more than so many bytes it takes heads in turns, as few as that allows: 16384 rows of 32 heads of 128 are one turn.
 * Turns cost time where all heads together do not fill a GPU.
 */
enum { ROWS_EACH = 4096 };
#define SCRATCH_BYTES (1152ull << 20)

/* Rows from one on. */
static spw_delta_inputs
inputs(const spw_tape *t, const spw__op *o, uint64_t row)
{
    return (spw_delta_inputs){.qkv = spw__tape_at_row(t, o->in[0], o->in[0]->data, row),
                              .a = spw__tape_at_row(t, o->in[1], o->in[1]->data, row),
                              .b = o->in[2] != NULL ? spw__tape_at_row(t, o->in[2], o->in[2]->data, row) : NULL,
                              .log_a = o->param[0]->data,
                              .dt_bias = o->param[1]->data,
                              .skip = o->param[2] != NULL ? o->param[2]->data : NULL};
}

spw_value *
spw_nn_delta(spw_tape *t, spw_value *qkv, spw_value *a, spw_value *b, spw_value *log_a, spw_value *dt_bias,
             spw_value *skip, const spw_delta_shape *shape)
{
    uint64_t rows = shape->B * shape->T, heads = shape->Hv, cols = heads * shape->Dv;
    uint64_t decays = shape->channels ? heads * shape->Dk : heads;
    spw_delta_inputs in;
    float *delta = NULL;
    spw_value *y;
    spw__op *o;
    if (qkv == NULL || a == NULL || log_a == NULL || dt_bias == NULL || qkv->rows != rows || a->rows != rows ||
        qkv->cols != 2 * shape->Hk * shape->Dk + cols || a->cols != decays || log_a->cols != heads ||
        dt_bias->cols != decays)
        return spw__tape_fail(t);
    if (shape->mamba ? b != NULL || skip == NULL || skip->cols != heads
                     : skip != NULL || b == NULL || b->rows != rows || b->cols != heads)
        return spw__tape_fail(t);
    y = spw__tape_value(t, rows, cols, NULL);
    if ((t->record || t->keeping) && !shape->mamba) {
        delta = spw__tape_take(t, rows * cols * sizeof *delta);
        if (delta == NULL)
            return spw__tape_fail(t);
    }
    if (y == NULL || (o = spw__tape_op(t, T_DELTA, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = qkv;
    o->in[1] = a;
    o->in[2] = b;
    o->param[0] = log_a;
    o->param[1] = dt_bias;
    o->param[2] = skip;
    o->saved[0] = delta;
    o->delta = *shape;
    in = inputs(t, o, 0);
    if (spw__tape_computes(t) && t->delta_cache != NULL)
        spw_gpu_delta_cached(t->queue, y->data, &in, t->delta_cache, shape);
    else if (spw__tape_computes(t))
        spw_gpu_delta(t->queue, y->data, delta, &in, shape);
    return y;
}

static uint64_t
heads_each(const spw_delta_shape *shape)
{
    spw_delta_shape one = *shape;
    uint64_t most, turns;
    one.heads_each = 1;
    most = SCRATCH_BYTES / (spw_gpu_delta_scratch(&one) * sizeof(float));
    turns = most > 0 ? (shape->Hk + most - 1) / most : shape->Hk;
    return (shape->Hk + turns - 1) / turns;
}

/* The shape of the sequences from b on that are taken together. All have the heads that the first have: scratch is for these. */
static spw_delta_shape
some_sequences(const spw_delta_shape *whole, uint64_t b)
{
    spw_delta_shape s = *whole;
    uint64_t each = ROWS_EACH > s.T ? ROWS_EACH / s.T : 1;
    s.B = each < s.B ? each : s.B;
    s.heads_each = heads_each(&s);
    s.B = s.B < whole->B - b ? s.B : whole->B - b;
    s.begins = s.begins != NULL ? s.begins + b * s.T : NULL;
    s.ends = s.ends != NULL ? s.ends + b * s.T : NULL;
    return s;
}

void
spw__delta_backward(spw_tape *t, const spw__op *o)
{
    float *dlog_a = spw__tape_sum(t, o->param[0]), *ddt_bias = spw__tape_sum(t, o->param[1]);
    float *dskip = spw__tape_sum(t, o->param[2]), *scratch;
    spw_delta_shape s = some_sequences(&o->delta, 0);
    uint64_t used;
    act *d[3] = {NULL};
    t->passed |= SPW_PASSED_LINEAR;
    for (int i = 0; i < 3 && o->in[i] != NULL; i++) {
        unsigned ignored = 0;
        SPW_ASSERT(!o->in[i]->grad_set);
        d[i] = spw__tape_grad(t, o->in[i], 1, &ignored);
    }
    used = t->used;
    scratch = spw__tape_take(t, spw_gpu_delta_scratch(&s) * sizeof *scratch);
    for (uint64_t b = 0; !t->dry && scratch != NULL && b < o->delta.B; b += s.B) {
        uint64_t row = b * s.T;
        spw_delta_inputs in = inputs(t, o, row);
        s = some_sequences(&o->delta, b);
        spw_gpu_delta_backward(t->queue, spw__tape_at_row(t, o->in[0], d[0], row),
                               spw__tape_at_row(t, o->in[1], d[1], row),
                               d[2] != NULL ? spw__tape_at_row(t, o->in[2], d[2], row) : NULL, dlog_a, ddt_bias, dskip,
                               spw__tape_at_row(t, o->out, o->out->grad, row),
                               o->saved[0] != NULL ? o->saved[0] + row * o->out->cols : NULL, scratch, &in, &s);
    }
    t->used = used; /* scratch is free again */
}
