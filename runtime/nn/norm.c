/*
 * Norms of rows on the tape: LayerNorm and RMSNorm, the latter of parts of a row too, as a head's is. Forward keeps each row's
 * statistics, which backward reads. Their gradient is added to what lies anywhere, so the residual stream's is copied nowhere.
 */
#include "tape_internal.h"

spw_value *
spw_nn_layernorm(spw_tape *t, spw_value *x, spw_value *g, spw_value *b, float eps)
{
    spw_value *y;
    float *mean, *rstd;
    spw__op *o;
    if (x == NULL || g == NULL || g->cols != x->cols || (b != NULL && b->cols != x->cols))
        return spw__tape_fail(t);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    mean = spw__tape_take(t, x->rows * sizeof(float));
    rstd = spw__tape_take(t, x->rows * sizeof(float));
    if (y == NULL || mean == NULL || rstd == NULL || (o = spw__tape_op(t, T_LAYERNORM, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_layernorm(t->queue, y->data, mean, rstd, x->data, g->data, b != NULL ? b->data : NULL, x->rows, x->cols,
                          eps);
    o->in[0] = x;
    o->param[0] = g;
    o->param[1] = b;
    o->saved[0] = mean;
    o->saved[1] = rstd;
    return y;
}

void
spw__layernorm_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    spw_value *x = o->in[0];
    const act *onto;
    act *dx = spw__tape_grad_onto(t, x, &onto);
    if (!t->dry)
        spw_gpu_layernorm_backward(t->queue, dx, onto, spw__tape_sum(t, o->param[0]), spw__tape_sum(t, o->param[1]),
                                   y->grad, x->data, o->param[0]->data, o->saved[0], o->saved[1], x->rows, x->cols);
}

/* g NULL: by the offset alone. */
static spw_value *
rmsnorm(spw_tape *t, spw_value *x, spw_value *g, uint64_t cols, float offset, float eps)
{
    spw_value *y;
    float *rstd;
    uint64_t rows;
    spw__op *o;
    if (x == NULL || cols == 0 || x->cols % cols != 0)
        return spw__tape_fail(t);
    rows = x->rows * (x->cols / cols);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    rstd = spw__tape_take(t, rows * sizeof(float));
    if (y == NULL || rstd == NULL || (o = spw__tape_op(t, T_RMSNORM, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t))
        spw_gpu_rmsnorm(t->queue, y->data, rstd, x->data, g != NULL ? g->data : NULL, offset, rows, cols, cols, eps);
    o->in[0] = x;
    o->param[0] = g;
    o->saved[0] = rstd;
    o->D = cols;
    o->p = offset;
    return y;
}

spw_value *
spw_nn_rmsnorm(spw_tape *t, spw_value *x, spw_value *g, float eps)
{
    return g == NULL ? spw__tape_fail(t) : rmsnorm(t, x, g, g->cols, 0, eps);
}

spw_value *
spw_nn_rmsnorm_from_one(spw_tape *t, spw_value *x, spw_value *g, float eps)
{
    return g == NULL ? spw__tape_fail(t) : rmsnorm(t, x, g, g->cols, 1, eps);
}

spw_value *
spw_nn_rmsnorm_plain(spw_tape *t, spw_value *x, uint64_t cols, float eps)
{
    return rmsnorm(t, x, NULL, cols, 1, eps);
}

void
spw__rmsnorm_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    spw_value *x = o->in[0], *g = o->param[0];
    const act *onto;
    act *dx = spw__tape_grad_onto(t, x, &onto);
    if (!t->dry)
        spw_gpu_rmsnorm_backward(t->queue, dx, onto, spw__tape_sum(t, g), y->grad, x->data, g != NULL ? g->data : NULL,
                                 o->p, o->saved[0], x->rows * (x->cols / o->D), o->D, o->D);
}
