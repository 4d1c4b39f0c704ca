/*
 * Linear layers on the tape: what lies between them and their neighbours is done with them, a sum before, a gelu behind, and in the
 * backward pass the gelu in front. Which of them compute with 8-bit floats says fp8.c.
 */
#include "tape_internal.h"

void
spw__linear_forward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out, *x = o->in[0], *onto = o->in[1];
    unsigned how = o->flags | (t->by_row ? SPW_OP_BY_ROW : 0u);
    const act *bias = o->param[1] != NULL ? o->param[1]->data : NULL;
    if (y->there)
        return;
    if (!t->asleep)
        t->linear_flops += 2 * y->rows * y->cols * x->cols;
    if (spw__fp8_takes(x, o->param[0])) {
        spw__fp8_forward(t, o);
        return;
    }
    if (!spw__tape_computes(t))
        return;
    if (y->gelu_in != NULL)
        spw_gpu_linear_gelu(t->queue, y->data, y->gelu_in, x->data, o->param[0]->data, bias, y->rows, y->cols, x->cols,
                            how);
    else if (onto != NULL)
        spw_gpu_linear_add(t->queue, y->data, onto->data, x->data, o->param[0]->data, bias, y->rows, y->cols, x->cols,
                           how);
    else
        spw_gpu_linear(t->queue, y->data, x->data, o->param[0]->data, bias, y->rows, y->cols, x->cols, how);
}

/* onto NULL: onto nothing. in_place: in its memory. gelu: of the result. */
static spw_value *
linear(spw_tape *t, spw_value *onto, bool in_place, spw_value *x, spw_value *w, spw_value *b, unsigned flags, bool gelu)
{
    uint64_t M, K, N, from;
    spw_value *y;
    spw__op *o;
    if (x == NULL || w == NULL)
        return spw__tape_fail(t);
    M = x->rows;
    K = (flags & SPW_OP_W_IN_OUT) ? w->rows : w->cols;
    N = (flags & SPW_OP_W_IN_OUT) ? w->cols : w->rows;
    if (K != x->cols || w->piece_rows > 0 || (b != NULL && b->rows * b->cols != N) ||
        (onto != NULL && (onto->rows != M || onto->cols != N)))
        return spw__tape_fail(t);
    if (spw__fp8_takes(x, w) && !spw__fp8_prepare(t, x))
        return spw__tape_fail(t);
    from = t->used; /* the input's codes stay: backward needs their scale */
    y = spw__tape_value(t, M, N, in_place ? onto->data : NULL);
    if (y == NULL || (gelu && (y->gelu_in = spw__tape_take(t, M * N * t->act_bytes)) == NULL) ||
        (o = spw__tape_op(t, T_LINEAR, y)) == NULL)
        return spw__tape_fail(t);
    y->there |= in_place && onto->there;
    o->out = y;
    o->in[0] = x;
    o->in[1] = onto;
    o->param[0] = w;
    o->param[1] = b;
    o->flags = flags;
    if (spw__fp8_takes(x, w)) /* a call that does not record computes it here */
        (void)spw__fp8_lend(t, w);
    if (t->record && !gelu) {
        t->pending = o;
        t->pending_from = from;
    } else {
        spw__linear_forward(t, o);
    }
    return y;
}

spw_value *
spw_nn_linear(spw_tape *t, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return linear(t, NULL, false, x, w, b, flags, false);
}

spw_value *
spw_nn_linear_add(spw_tape *t, spw_value *onto, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return onto == NULL ? spw__tape_fail(t) : linear(t, onto, false, x, w, b, flags, false);
}

spw_value *
spw_nn_linear_onto(spw_tape *t, spw_value *onto, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return onto == NULL ? spw__tape_fail(t) : linear(t, onto, !t->by_row, x, w, b, flags, false);
}

spw_value *
spw_nn_linear_gelu(spw_tape *t, spw_value *x, spw_value *w, spw_value *b, unsigned flags)
{
    return linear(t, NULL, false, x, w, b, flags, true);
}

/* Nothing else takes v than this operation, once: the gradient that it gives v is all there is. */
static bool
only_user(const spw_tape *t, const spw__op *user, const spw_value *v)
{
    uint32_t uses = 0;
    for (const spw__op *o = t->ops; o <= user; o++)
        for (int i = 0; i < 3; i++)
            uses += o->in[i] == v;
    return uses == 1 && !v->grad_set; /* those behind it are done */
}

void
spw__linear_backward(spw_tape *t, const spw__op *o)
{
    spw_value *y = o->out, *x = o->in[0], *w = o->param[0];
    unsigned flags = o->flags;
    uint64_t M = x->rows, N = y->cols, K = (flags & SPW_OP_W_IN_OUT) ? w->rows : w->cols;
    bool through_gelu = x->gelu_in != NULL && x->needs_grad && only_user(t, o, x);
    act *dx = spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags);
    w->passes |= x->needs_grad;
    x->grad_of_gelu_in = through_gelu;
    if (spw__tape_begins(t, w))
        flags |= SPW_OP_SET_DW;
    if (!t->dry && y->gelu_in != NULL && !y->grad_of_gelu_in)
        spw_gpu_curve_backward(t->queue, SPW_CURVE_GELU, y->grad, y->grad, y->gelu_in, M * N, 0);
    if (spw__fp8_takes(x, w)) {
        float *db = t->dry ? NULL : spw__tape_sum(t, o->param[1]);
        spw__fp8_backward(t, o, dx, flags);
        if (db != NULL)
            spw_gpu_linear_backward(t->queue, NULL, NULL, db, y->grad, x->data, w->data, M, N, K, o->flags);
        if (!t->dry && through_gelu)
            spw_gpu_curve_backward(t->queue, SPW_CURVE_GELU, dx, dx, x->gelu_in, M * K, 0);
        spw__tape_hand_over(t, o->in[1], y);
        return;
    }
    if (t->dry) {
        spw__tape_hand_over(t, o->in[1], y);
        return;
    }
    if (through_gelu)
        spw_gpu_linear_gelu_backward(t->queue, dx, w->w_grad, spw__tape_sum(t, o->param[1]), y->grad, x->data,
                                     x->gelu_in, w->data, M, N, K, flags);
    else
        spw_gpu_linear_backward(t->queue, dx, w->w_grad, spw__tape_sum(t, o->param[1]), y->grad, x->data, w->data, M, N,
                                K, flags);
    spw__tape_hand_over(t, o->in[1], y);
}
