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

/* Of weights that are as long as a row, whose parts of cols elements have norms of their own: how many; 1: all parts have the same. */
static uint64_t
groups_of(const spw_value *g, uint64_t cols)
{
    return g != NULL ? g->cols / cols : 1;
}

/* g NULL: by the offset alone. */
static spw_value *
rmsnorm(spw_tape *t, spw_value *x, spw_value *g, uint64_t cols, float offset, float eps)
{
    spw_value *y;
    float *rstd;
    uint64_t rows, groups;
    spw__op *o;
    if (x == NULL || cols == 0 || x->cols % cols != 0)
        return spw__tape_fail(t);
    groups = groups_of(g, cols);
    rows = x->rows * (x->cols / cols);
    y = spw__tape_value(t, x->rows, x->cols, NULL);
    rstd = spw__tape_take(t, rows * sizeof(float));
    if (y == NULL || rstd == NULL || (o = spw__tape_op(t, T_RMSNORM, y)) == NULL)
        return spw__tape_fail(t);
    for (uint64_t k = 0, n = rows / groups; k < groups && spw__tape_computes(t); k++)
        spw_gpu_rmsnorm(t->queue, spw__tape_at_col(t, y->data, k * cols), rstd + k * n,
                        spw__tape_at_col(t, x->data, k * cols),
                        g != NULL ? spw__tape_at_col(t, g->data, k * cols) : NULL, offset, n, cols, groups * cols, eps);
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
spw_nn_rmsnorm_groups(spw_tape *t, spw_value *x, spw_value *g, uint64_t groups, float eps)
{
    if (x == NULL || g == NULL || groups == 0 || g->cols != x->cols || g->cols % groups != 0)
        return spw__tape_fail(t);
    return rmsnorm(t, x, g, g->cols / groups, 0, eps);
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
    const uint64_t groups = groups_of(g, o->D), rows = x->rows * (x->cols / o->D) / groups;
    const act *onto;
    act *dx = spw__tape_grad_onto(t, x, &onto);
    float *dg = spw__tape_sum(t, g);
    for (uint64_t k = 0, at = 0; k < groups && !t->dry; k++, at += o->D)
        spw_gpu_rmsnorm_backward(t->queue, dx != NULL ? spw__tape_at_col(t, dx, at) : NULL,
                                 onto != NULL ? spw__tape_at_col(t, (act *)(uintptr_t)onto, at) : NULL,
                                 dg != NULL ? dg + at : NULL, spw__tape_at_col(t, y->grad, at),
                                 spw__tape_at_col(t, x->data, at), g != NULL ? spw__tape_at_col(t, g->data, at) : NULL,
                                 o->p, o->saved[0] + k * rows, rows, o->D, groups * o->D);
}
