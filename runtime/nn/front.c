/*
 * Attention of DeepSeek-V4 on the tape: keys that stand for several rows, attention to these in front of a sequence's own, which are its values too, and the
 * projection of its heads in groups.
 */
#include "tape_internal.h"

spw_value *
spw_nn_compress(spw_tape *t, spw_value *kv, spw_value *gate, spw_value *bias, const spw_compress_shape *shape,
                const spw_window_cache *cache, const int32_t **firsts)
{
    const uint64_t width = shape->D * (shape->overlaps ? 2 : 1), rate = shape->rate;
    const uint64_t windows = rate == 0 ? 0 : (shape->T + (cache != NULL ? rate - 1 : 0)) / rate;
    int32_t *rows;
    spw_value *y;
    spw__op *o;
    *firsts = NULL;
    if (kv == NULL || gate == NULL || bias == NULL || windows == 0 || kv->rows != shape->B * shape->T ||
        gate->rows != kv->rows || kv->cols != width || gate->cols != width || bias->rows * bias->cols != rate * width)
        return spw__tape_fail(t);
    y = spw__tape_value(t, shape->B * windows, shape->D, NULL);
    *firsts = rows = spw__tape_take(t, shape->B * windows * sizeof *rows);
    if (y == NULL || rows == NULL || (o = spw__tape_op(t, T_COMPRESS, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = kv;
    o->in[1] = gate;
    o->param[0] = bias;
    o->compress = *shape;
    o->compress.firsts = shape->begins != NULL || cache != NULL ? rows : NULL;
    if (!spw__tape_computes(t))
        return y;
    spw_gpu_windows(t->queue, rows, shape->begins, cache != NULL ? cache->starts : NULL, shape->B, shape->T, rate);
    if (cache != NULL)
        spw_gpu_compress_cached(t->queue, y->data, kv->data, gate->data, bias->data, cache, &o->compress);
    else
        spw_gpu_compress(t->queue, y->data, kv->data, gate->data, bias->data, &o->compress);
    return y;
}

void
spw__compress_backward(spw_tape *t, const spw__op *o)
{
    unsigned added = 0;
    act *dkv = spw__tape_grad(t, o->in[0], 1, &added), *dgate = spw__tape_grad(t, o->in[1], 1, &added);
    SPW_ASSERT(!added);
    if (!t->dry)
        spw_gpu_compress_backward(t->queue, dkv, dgate, spw__tape_sum(t, o->param[0]), o->out->grad, o->in[0]->data,
                                  o->in[1]->data, o->param[0]->data, &o->compress);
}

/* Between both kinds of keys where they are apart and where a sequence's are one behind the other. */
static void
copy_keys(const spw_tape *t, const spw_attention_shape *s, act *all, act *front, act *own, bool together)
{
    const uint64_t in_front = s->front * s->D, behind = s->T * s->D, each = in_front + behind;
    act *second = spw__tape_at_col(t, all, in_front);
    if (together && in_front > 0)
        spw_gpu_copy_heads(t->queue, all, each, 0, front, in_front, 0, s->B, 1, in_front);
    else if (in_front > 0 && front != NULL)
        spw_gpu_copy_heads(t->queue, front, in_front, 0, all, each, 0, s->B, 1, in_front);
    if (together)
        spw_gpu_copy_heads(t->queue, second, each, 0, own, behind, 0, s->B, 1, behind);
    else
        spw_gpu_copy_heads(t->queue, own, behind, 0, second, each, 0, s->B, 1, behind);
}

static uint64_t
all_bytes(const spw_tape *t, const spw_attention_shape *s)
{
    return s->B * (s->front + s->T) * s->D * t->act_bytes;
}

spw_value *
spw_nn_front_attention(spw_tape *t, spw_value *q, spw_value *front, spw_value *kv, spw_value *sinks,
                       const spw_attention_shape *shape)
{
    const uint64_t rows = shape->B * shape->T;
    const bool cached = t->front_cache != NULL;
    spw_value *y;
    float *lse;
    void *all;
    spw__op *o;
    if (q == NULL || kv == NULL || sinks == NULL || q->rows != rows || kv->rows != rows ||
        q->cols != shape->Hq * shape->D || kv->cols != shape->D || sinks->cols != shape->Hq ||
        (t->cache != NULL && (!cached || t->cache_taken || t->cache_width != shape->D)) ||
        (front != NULL) != (shape->front > 0 && !cached) ||
        (front != NULL && (front->rows != shape->B * shape->front || front->cols != shape->D)))
        return spw__tape_fail(t);
    t->cache_taken = true;
    y = spw__tape_value(t, rows, q->cols, NULL);
    lse = spw__tape_take(t, rows * shape->Hq * sizeof(float));
    all = front != NULL ? spw__tape_take(t, all_bytes(t, shape)) : kv->data;
    if (y == NULL || lse == NULL || all == NULL || (o = spw__tape_op(t, T_FRONT_ATTENTION, y)) == NULL)
        return spw__tape_fail(t);
    o->shape = *shape;
    o->shape.Hk = 1;
    o->shape.q_stride = q->cols;
    o->shape.kv_stride = shape->D;
    o->shape.sinks = sinks->data;
    o->in[0] = q;
    o->in[1] = kv;
    o->in[2] = front;
    o->param[0] = sinks;
    o->saved[0] = lse;
    o->saved[1] = all;
    if (spw__tape_computes(t) && cached) {
        spw_gpu_attention_cached(t->queue, y->data, q->data, kv->data, kv->data, t->cache, &o->shape);
    } else if (spw__tape_computes(t)) {
        if (front != NULL)
            copy_keys(t, &o->shape, all, front->data, kv->data, true);
        spw_gpu_attention(t->queue, y->data, lse, q->data, all, all, &o->shape);
    }
    return y;
}

/* What keys and what values get is one gradient. */
void
spw__front_attention_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    const uint64_t bytes = all_bytes(t, &o->shape), n = bytes / t->act_bytes;
    unsigned added = 0;
    act *dq = spw__tape_grad(t, o->in[0], 1, &added), *dkv = spw__tape_grad(t, o->in[1], 1, &added);
    act *dfront = spw__tape_grad(t, o->in[2], 1, &added), *dkeys, *dvalues;
    const uint64_t used = t->used;
    t->passed |= SPW_PASSED_ATTENTION;
    SPW_ASSERT(!added);
    dkeys = o->in[2] != NULL ? spw__tape_take(t, bytes) : dkv;
    dvalues = spw__tape_take(t, bytes);
    if (!t->dry && t->status == SPW_OK) {
        spw_gpu_attention_backward(t->queue, dq, dkeys, dvalues, spw__tape_sum(t, o->param[0]), y->grad, y->data,
                                   o->saved[0], o->in[0]->data, o->saved[1], o->saved[1], &o->shape);
        spw_gpu_add(t->queue, dkeys, dkeys, dvalues, n);
        if (o->in[2] != NULL)
            copy_keys(t, &o->shape, dkeys, dfront, dkv, false);
    }
    t->used = used; /* free again */
}

/* Between columns in groups, of rows, and where a group's rows lie together. */
static void
copy_groups(const spw_tape *t, act *apart, act *rows, uint64_t count, uint64_t groups, uint64_t K, bool forward)
{
    for (uint64_t g = 0; g < groups; g++) {
        act *of_group = (char *)apart + g * count * K * t->act_bytes, *of_rows = spw__tape_at_col(t, rows, g * K);
        if (forward)
            spw_gpu_copy_heads(t->queue, of_group, K, 0, of_rows, groups * K, 0, count, 1, K);
        else
            spw_gpu_copy_heads(t->queue, of_rows, groups * K, 0, of_group, K, 0, count, 1, K);
    }
}

/* What the device is told of the groups, whose matrices are rows of one. */
typedef struct told_groups {
    spw_each each;
    uint64_t ends[SPW_EXPERTS_MAX];
    const act *w[SPW_EXPERTS_MAX];
    float *dw[SPW_EXPERTS_MAX];
    bool set[SPW_EXPERTS_MAX];
} told_groups;

static void
tell_groups(const spw_tape *t, told_groups *out, const spw__op *o, bool set)
{
    const spw_value *w = o->param[0];
    const uint64_t groups = o->heads, N = w->rows / groups, K = w->cols;
    out->each = (spw_each){.count = groups, .N = N, .K = K, .ends = out->ends, .w = out->w, .dw = out->dw};
    out->each.set = out->set;
    for (uint64_t g = 0; g < groups; g++) {
        out->ends[g] = (g + 1) * o->out->rows;
        out->w[g] = spw__tape_at_row(t, w, w->data, g * N);
        out->dw[g] = w->w_grad != NULL ? w->w_grad + g * N * K : NULL;
        out->set[g] = set;
    }
}

spw_value *
spw_nn_linear_groups(spw_tape *t, spw_value *x, spw_value *w, uint64_t groups)
{
    told_groups told;
    uint64_t used;
    act *of_x, *of_y;
    spw_value *y;
    spw__op *o;
    if (x == NULL || w == NULL || groups == 0 || groups > SPW_EXPERTS_MAX || w->rows % groups != 0 ||
        x->cols != groups * w->cols)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, w->rows, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_LINEAR_GROUPS, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = x;
    o->param[0] = w;
    o->heads = groups;
    if (y->there)
        return y;
    if (!t->asleep && !t->kept)
        t->linear_flops += 2 * y->rows * y->cols * w->cols;
    used = t->used;
    of_x = spw__tape_take(t, x->rows * x->cols * t->act_bytes);
    of_y = spw__tape_take(t, y->rows * y->cols * t->act_bytes);
    if (spw__tape_computes(t) && t->status == SPW_OK) {
        tell_groups(t, &told, o, false);
        copy_groups(t, of_x, x->data, x->rows, groups, w->cols, true);
        spw_gpu_linear_each(t->queue, of_y, of_x, &told.each, t->by_row ? SPW_OP_BY_ROW : 0);
        copy_groups(t, of_y, y->data, x->rows, groups, w->rows / groups, false);
    }
    t->used = used;
    return y;
}

void
spw__linear_groups_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out, *x = o->in[0];
    spw_value *w = o->param[0];
    const uint64_t groups = o->heads, rows = x->rows, N = w->rows / groups, K = w->cols;
    unsigned added = 0;
    act *dx = spw__tape_grad(t, o->in[0], 1, &added), *of_x, *of_dy, *of_dx;
    const uint64_t used = t->used;
    told_groups told;
    SPW_ASSERT(!added);
    w->passes |= x->needs_grad;
    of_x = spw__tape_take(t, rows * x->cols * t->act_bytes);
    of_dy = spw__tape_take(t, rows * y->cols * t->act_bytes);
    of_dx = dx != NULL ? spw__tape_take(t, rows * x->cols * t->act_bytes) : NULL;
    if (!t->dry && t->status == SPW_OK) {
        tell_groups(t, &told, o, spw__tape_begins(t, w));
        copy_groups(t, of_x, x->data, rows, groups, K, true);
        copy_groups(t, of_dy, y->grad, rows, groups, N, true);
        spw_gpu_linear_each_backward(t->queue, of_dx, of_dy, of_x, &told.each, 0);
        if (dx != NULL)
            copy_groups(t, of_dx, dx, rows, groups, K, false);
    }
    t->used = used;
}
