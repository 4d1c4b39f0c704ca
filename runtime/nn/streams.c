/*
 * Hyper-connections on the tape: a row is several streams, and its own maps say what a half of a layer reads of them and how they go on behind it. Of
 * one value of maps both are made, and each leaves its own columns of that one's gradient.
 */
#include "tape_internal.h"

spw_value *
spw_nn_repeat(spw_tape *t, spw_value *x, uint64_t n)
{
    spw_value *y;
    spw__op *o;
    if (x == NULL || n == 0)
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, n * x->cols, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_REPEAT, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !y->there && x->data != NULL)
        spw_gpu_copy_heads(t->queue, y->data, y->cols, x->cols, x->data, x->cols, 0, x->rows, n, x->cols);
    o->in[0] = x;
    o->heads = n;
    return y;
}

void
spw__repeat_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out, *x = o->in[0];
    unsigned added = 0;
    act *dx = spw__tape_grad(t, o->in[0], 1, &added);
    SPW_ASSERT(!added);
    if (!t->dry && dx != NULL)
        spw_gpu_sum_heads(t->queue, dx, x->cols, y->grad, y->cols, x->cols, x->rows, o->heads, x->cols);
}

spw_value *
spw_nn_stream_maps(spw_tape *t, spw_value *mixes, spw_value *scale, spw_value *base, const spw_streams *shape)
{
    const uint64_t width = spw_stream_maps(shape);
    spw_value *y;
    spw__op *o;
    if (mixes == NULL || scale == NULL || base == NULL || mixes->cols != width || base->cols != width ||
        scale->cols != (shape->head ? 1u : 3u))
        return spw__tape_fail(t);
    y = spw__tape_value(t, mixes->rows, width, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_STREAM_MAPS, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = mixes;
    o->param[0] = scale;
    o->param[1] = base;
    o->streams = *shape;
    o->streams.M = mixes->rows;
    if (spw__tape_computes(t) && !y->there)
        spw_gpu_stream_maps(t->queue, y->data, mixes->data, scale->data, base->data, &o->streams);
    return y;
}

void
spw__stream_maps_backward(spw_tape *t, const spw__op *o)
{
    unsigned added = 0;
    act *dmixes = spw__tape_grad(t, o->in[0], 1, &added);
    SPW_ASSERT(!added);
    if (!t->dry)
        spw_gpu_stream_maps_backward(t->queue, dmixes, spw__tape_sum(t, o->param[0]), spw__tape_sum(t, o->param[1]),
                                     o->out->grad, o->in[0]->data, o->param[0]->data, o->param[1]->data, &o->streams);
}

spw_value *
spw_nn_mix(spw_tape *t, spw_value *h, spw_value *x, spw_value *maps, const spw_streams *shape)
{
    const uint64_t n = shape->n, C = shape->C;
    spw_value *y;
    spw__op *o;
    if (x == NULL || maps == NULL || x->cols != n * C || maps->cols != spw_stream_maps(shape) ||
        maps->rows != x->rows || (h != NULL && (h->rows != x->rows || h->cols != C)))
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, h != NULL ? n * C : C, NULL);
    if (y == NULL || (o = spw__tape_op(t, T_MIX, y)) == NULL)
        return spw__tape_fail(t);
    o->in[0] = x;
    o->in[1] = maps;
    o->in[2] = h;
    o->streams = *shape;
    o->streams.M = x->rows;
    if (spw__tape_computes(t) && !y->there)
        spw_gpu_mix(t->queue, y->data, h != NULL ? h->data : NULL, x->data, maps->data, &o->streams);
    return y;
}

void
spw__mix_backward(spw_tape *t, const spw__op *o)
{
    spw_value *h = o->in[2];
    unsigned flags = 0, written = 0; /* the other columns, by the other kind */
    act *dmaps = spw__tape_grad(t, o->in[1], 1, &written), *dh = spw__tape_grad(t, h, 1, &written);
    act *dx = spw__tape_grad(t, o->in[0], SPW_OP_ACC_DX, &flags);
    if (!t->dry)
        spw_gpu_mix_backward(t->queue, dh, dx, dmaps, o->out->grad, h != NULL ? h->data : NULL, o->in[0]->data,
                             o->in[1]->data, &o->streams, flags);
}
