/*
 * Attention on the tape, and what makes its inputs: rotary positions, columns of packed values, whole keys of a latent
 * attention's parts. Queries, keys and values are columns of any value; their gradients are written where they lie. With a cache
 * (generation) attention reads that, and appends to it.
 */
#include "tape_internal.h"

static spw_value *
rope(spw_tape *t, spw_value *x, uint64_t col, const float *cos_sin, const int32_t *places, uint64_t T, uint64_t heads,
     uint64_t D, uint64_t R, bool neighbors, bool back)
{
    spw_value *y;
    spw__op *o;
    act *at;
    if (x == NULL || heads == 0 || x->cols < col + (heads - 1) * D + R || R % 2 != 0 || R > D)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, x->cols, x->data);
    if (y == NULL || (o = spw__tape_op(t, T_ROPE, y)) == NULL)
        return spw__tape_fail(t);
    y->there = x->there;
    places = places != NULL ? places + t->first_row : t->places;
    cos_sin =
        cos_sin == NULL || places != NULL ? cos_sin : cos_sin + (spw__tape_first_position(t, T) + t->first_row % T) * R;
    at = spw__tape_at_col(t, y->data, col);
    if (spw__tape_computes(t) && !y->there)
        spw_gpu_rope(t->queue, at, x->cols, cos_sin, places, x->rows, T, heads, D, R, neighbors, back ? -1 : 1);
    o->in[0] = x;
    o->cos_sin = cos_sin;
    o->places = places;
    o->T = T;
    o->heads = heads;
    o->D = D;
    o->R = R;
    o->col[0] = col;
    o->neighbors = neighbors;
    o->back = back;
    return y;
}

spw_value *
spw_nn_rope(spw_tape *t, spw_value *x, uint64_t col, const float *cos_sin, const int32_t *places, uint64_t T,
            uint64_t heads, uint64_t D, uint64_t R, bool neighbors)
{
    return rope(t, x, col, cos_sin, places, T, heads, D, R, neighbors, false);
}

spw_value *
spw_nn_rope_back(spw_tape *t, spw_value *x, uint64_t col, const float *cos_sin, const int32_t *places, uint64_t T,
                 uint64_t heads, uint64_t D, uint64_t R, bool neighbors)
{
    return rope(t, x, col, cos_sin, places, T, heads, D, R, neighbors, true);
}

void
spw__rope_backward(spw_tape *t, const spw__op *o)
{
    spw_value *y = o->out;
    act *at = spw__tape_at_col(t, y->grad, o->col[0]);
    if (!t->dry)
        spw_gpu_rope(t->queue, at, y->cols, o->cos_sin, o->places, y->rows, o->T, o->heads, o->D, o->R, o->neighbors,
                     o->back ? 1 : -1);
    spw__tape_share_grad(o->in[0], y);
}

/* Copies the parts of each head between a value and where they lie beside each other. */
static void
copy_parts(const spw_tape *t, const spw__op *o, act *together, act *apart, bool forward)
{
    uint64_t to = 0, from = o->col[0], rows = o->out->rows, cols = o->out->cols;
    for (uint32_t i = 0; i < o->part_count; i++) {
        uint64_t size = o->parts[i];
        act *y = spw__tape_at_col(t, together, to), *x = spw__tape_at_col(t, apart, from);
        if (forward)
            spw_gpu_copy_heads(t->queue, y, cols, size, x, o->in[0]->cols, o->D, rows, o->heads, size);
        else
            spw_gpu_copy_heads(t->queue, x, o->in[0]->cols, o->D, y, cols, size, rows, o->heads, size);
        to += o->heads * size;
        from += size;
    }
}

spw_value *
spw_nn_parts(spw_tape *t, spw_value *x, uint64_t heads, const uint64_t *sizes, uint32_t first, uint32_t count)
{
    uint64_t before = 0, size = 0;
    spw_value *y;
    spw__op *o;
    for (uint32_t i = 0; i < first; i++)
        before += sizes[i];
    for (uint32_t i = first; i < first + count; i++)
        size += sizes[i];
    if (x == NULL || heads == 0 || x->cols % heads != 0 || size == 0 || before + size > x->cols / heads ||
        count > SPW_PARTS_MAX)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, heads * size, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_PARTS, y)) == NULL)
        return spw__tape_fail(t);
    o->out = y;
    o->in[0] = x;
    o->col[0] = before;
    o->heads = heads;
    o->D = x->cols / heads;
    o->part_count = count;
    memcpy(o->parts, sizes + first, count * sizeof *sizes);
    if (spw__tape_computes(t) && !y->there)
        copy_parts(t, o, y->data, x->data, true);
    return y;
}

void
spw__parts_backward(spw_tape *t, const spw__op *o)
{
    unsigned written = 0; /* by those who read the other columns */
    act *dx = spw__tape_grad(t, o->in[0], 1, &written);
    if (!t->dry && dx != NULL)
        copy_parts(t, o, o->out->grad, dx, false);
}

/* Copies what lies in a row's columns one after another, where it comes from or goes to. */
static void
copy_beside(const spw_tape *t, const spw__op *o, uint32_t i, act *from, act *to, bool forward)
{
    const uint64_t cols = o->out->cols, own = o->in[i]->cols;
    uint64_t before = 0;
    for (uint32_t k = 0; k < i; k++)
        before += o->in[k]->cols;
    if (forward)
        spw_gpu_copy_heads(t->queue, spw__tape_at_col(t, to, before), cols, cols, from, own, own, o->out->rows, 1, own);
    else
        spw_gpu_copy_heads(t->queue, to, own, own, spw__tape_at_col(t, from, before), cols, cols, o->out->rows, 1, own);
}

spw_value *
spw_nn_beside(spw_tape *t, spw_value *const *x, uint32_t count)
{
    uint64_t cols = 0;
    spw_value *y;
    spw__op *o;
    for (uint32_t i = 0; i < count; i++) {
        if (x[i] == NULL || x[i]->rows != x[0]->rows || count > 3)
            return spw__tape_fail(t);
        cols += x[i]->cols;
    }
    y = spw__tape_value(t, x[0]->rows, cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_BESIDE, y)) == NULL)
        return spw__tape_fail(t);
    o->out = y;
    o->in[2] = NULL;
    memcpy(o->in, x, count * sizeof(spw_value *));
    for (uint32_t i = 0; i < count && spw__tape_computes(t) && !y->there; i++)
        copy_beside(t, o, i, x[i]->data, y->data, true);
    return y;
}

void
spw__beside_backward(spw_tape *t, const spw__op *o)
{
    for (uint32_t i = 0; i < 3 && o->in[i] != NULL; i++) {
        unsigned ignored = 0;
        act *dx;
        SPW_ASSERT(!o->in[i]->grad_set);
        dx = spw__tape_grad(t, o->in[i], 1, &ignored);
        if (!t->dry && dx != NULL)
            copy_beside(t, o, i, o->out->grad, dx, false);
    }
}

spw_value *
spw_nn_keys(spw_tape *t, spw_value *own, spw_value *shared, uint64_t col, uint64_t heads, uint64_t N, uint64_t R)
{
    spw_value *y;
    spw__op *o;
    if (own == NULL || shared == NULL || heads == 0 || own->cols % heads != 0 || own->cols / heads < N ||
        col + R > shared->cols || own->rows != shared->rows)
        return spw__tape_fail(t);
    y = spw__tape_value(t, own->rows, heads * (N + R), NULL);
    if (y == NULL || (o = spw__tape_op(t, T_KEYS, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !y->there) {
        spw_gpu_copy_heads(t->queue, y->data, y->cols, N + R, own->data, own->cols, own->cols / heads, own->rows, heads,
                           N);
        spw_gpu_copy_heads(t->queue, spw__tape_at_col(t, y->data, N), y->cols, N + R,
                           spw__tape_at_col(t, shared->data, col), shared->cols, 0, own->rows, heads, R);
    }
    o->in[0] = own;
    o->in[1] = shared;
    o->col[1] = col;
    o->heads = heads;
    o->D = N;
    o->R = R;
    return y;
}

void
spw__keys_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out, *own = o->in[0], *shared = o->in[1];
    uint64_t N = o->D, R = o->R;
    unsigned written = 0; /* by those who read the other columns */
    act *d = spw__tape_grad(t, o->in[0], 1, &written), *dshared = spw__tape_grad(t, o->in[1], 1, &written);
    if (!t->dry && d != NULL)
        spw_gpu_copy_heads(t->queue, d, own->cols, own->cols / o->heads, y->grad, y->cols, N + R, y->rows, o->heads, N);
    if (!t->dry && dshared != NULL)
        spw_gpu_sum_heads(t->queue, spw__tape_at_col(t, dshared, o->col[1]), shared->cols,
                          spw__tape_at_col(t, y->grad, N), y->cols, N + R, y->rows, o->heads, R);
}

/* Where all rows are. */
static spw_value *
attention(spw_tape *t, spw_value *const in[3], const uint64_t col[3], spw_value *sinks,
          const spw_attention_shape *shape)
{
    const uint64_t rows = shape->B * shape->T;
    spw_value *y;
    float *lse;
    spw__op *o;
    if (t->cache != NULL && (t->cache_taken || t->cache_width != shape->Hk * shape->D))
        return spw__tape_fail(t);
    t->cache_taken = true;
    y = spw__tape_value(t, rows, shape->Hq * shape->Dv, NULL);
    lse = spw__tape_take(t, rows * shape->Hq * sizeof(float));
    if (y == NULL || lse == NULL || (o = spw__tape_op(t, T_ATTENTION, y)) == NULL)
        return spw__tape_fail(t);
    o->shape = *shape;
    o->shape.q_stride = in[0]->cols;
    o->shape.kv_stride = in[1]->cols;
    o->shape.v_stride = in[2]->cols;
    o->shape.sinks = sinks != NULL ? sinks->data : NULL;
    if (spw__tape_computes(t) && t->cache != NULL)
        spw_gpu_attention_cached(t->queue, y->data, spw__tape_at_col(t, in[0]->data, col[0]),
                                 spw__tape_at_col(t, in[1]->data, col[1]), spw__tape_at_col(t, in[2]->data, col[2]),
                                 t->cache, &o->shape);
    else if (spw__tape_computes(t))
        spw_gpu_attention(t->queue, y->data, lse, spw__tape_at_col(t, in[0]->data, col[0]),
                          spw__tape_at_col(t, in[1]->data, col[1]), spw__tape_at_col(t, in[2]->data, col[2]),
                          &o->shape);
    memcpy(o->in, in, sizeof o->in);
    memcpy(o->col, col, sizeof o->col);
    o->param[0] = sinks;
    o->saved[0] = lse;
    return y;
}

/* Where ranks share sequences: of this rank's heads, with all rows. */
static spw_value *
shared_attention(spw_tape *t, spw_value *const in[3], const uint64_t col[3], spw_value *sinks,
                 const spw_attention_shape *s)
{
    const spw__heads parts[3] = {{in[0], col[0], s->Hq, s->qk_head, s->D},
                                 {in[1], col[1], s->Hk, s->qk_head, s->D},
                                 {in[2], col[2], s->Hk, s->v_head, s->Dv}};
    spw_attention_shape own = *s;
    spw_value *x = spw__share_out(t, parts, 3, s->B, s->T), *y;
    own.T *= t->share->count;
    own.Hq = spw__share_heads(t, s->Hq);
    own.Hk = spw__share_heads(t, s->Hk);
    own.qk_head = s->D;
    own.v_head = s->Dv;
    if (x == NULL)
        return NULL;
    y = attention(t, (spw_value *[]){x, x, x}, (uint64_t[]){0, own.Hq * s->D, (own.Hq + own.Hk) * s->D},
                  spw__share_part(t, sinks, 0, s->Hq, 1), &own);
    return spw__share_home(t, y, s->Hq, s->Dv, s->B, s->T);
}

spw_value *
spw_nn_attention(spw_tape *t, spw_value *q, uint64_t q_col, spw_value *k, uint64_t k_col, spw_value *v, uint64_t v_col,
                 spw_value *sinks, const spw_attention_shape *shape)
{
    spw_value *const in[3] = {q, k, v};
    const uint64_t rows = shape->B * shape->T, col[3] = {q_col, k_col, v_col};
    spw_attention_shape s = *shape;
    s.Dv = shape->Dv > 0 ? shape->Dv : shape->D;
    s.v_head = shape->v_head > 0 ? shape->v_head : s.Dv;
    s.qk_head = shape->qk_head > 0 ? shape->qk_head : shape->D;
    if (q == NULL || k == NULL || v == NULL || q->rows != rows || k->rows != rows || v->rows != rows ||
        q_col + (s.Hq - 1) * s.qk_head + s.D > q->cols || k_col + (s.Hk - 1) * s.qk_head + s.D > k->cols ||
        v_col + (s.Hk - 1) * s.v_head + s.Dv > v->cols || s.Dv > s.D || (sinks != NULL && sinks->cols != s.Hq))
        return spw__tape_fail(t);
    return t->share == NULL ? attention(t, in, col, sinks, &s) : shared_attention(t, in, col, sinks, &s);
}

void
spw__attention_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    act *d[3];
    t->passed |= SPW_PASSED_ATTENTION;
    float *dsinks = spw__tape_sum(t, o->param[0]);
    for (int i = 0; i < 3; i++) {
        unsigned ignored = 0;
        SPW_ASSERT(!o->in[i]->grad_set || o->in[i] == o->in[0]);
        d[i] = spw__tape_grad(t, o->in[i], 1, &ignored);
    }
    if (!t->dry)
        spw_gpu_attention_backward(t->queue, spw__tape_at_col(t, d[0], o->col[0]), spw__tape_at_col(t, d[1], o->col[1]),
                                   spw__tape_at_col(t, d[2], o->col[2]), dsinks, y->grad, y->data, o->saved[0],
                                   spw__tape_at_col(t, o->in[0]->data, o->col[0]),
                                   spw__tape_at_col(t, o->in[1]->data, o->col[1]),
                                   spw__tape_at_col(t, o->in[2]->data, o->col[2]), &o->shape);
}
