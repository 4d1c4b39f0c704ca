/*
 * What a block leaves for blocks behind the next one, beside its output: it lies in memory that outlives the tape, and its gradient is
 * added up there by those who read it, until the block that left it goes back.
 */
#include "tape_internal.h"

void
spw_nn_leave(spw_tape *t, spw_value *x, const spw_side *side)
{
    spw_value *y = NULL;
    spw__op *o = NULL;
    if (x != NULL && x->cols == side->cols)
        y = spw__tape_value(t, x->rows, x->cols, x->data);
    if (y == NULL || (o = spw__tape_op(t, T_LEAVE, y)) == NULL) {
        (void)spw__tape_fail(t);
        return;
    }
    if (!t->record && spw__tape_computes(t)) /* recorded, it lies there since the forward pass */
        spw_gpu_copy_d2d(t->queue, side->data, t->act_dtype, x->data, t->act_dtype, x->rows * x->cols, NULL);
    o->in[0] = x;
    y->grad = side->grad;
    y->grad_set = side->grad != NULL;
}

void
spw__leave_backward(spw_tape *t, const spw__op *o)
{
    spw__tape_hand_over(t, o->in[0], o->out);
}

spw_value *
spw_nn_bring(spw_tape *t, const spw_side *side, uint64_t rows, uint64_t col, uint64_t cols)
{
    bool whole = col == 0 && cols == side->cols;
    act *from = spw__tape_at_col(t, side->data, col);
    spw_value *y;
    spw__op *o;
    if (col + cols > side->cols)
        return spw__tape_fail(t);
    y = spw__tape_value(t, rows, cols, whole ? side->data : NULL);
    if (y == NULL || (o = spw__tape_op(t, T_BRING, y)) == NULL)
        return spw__tape_fail(t);
    if (!whole && spw__tape_computes(t))
        spw_gpu_copy_heads(t->queue, y->data, cols, 0, from, side->cols, 0, rows, 1, cols);
    o->side = *side;
    o->col[0] = col;
    if (whole && !side->begun)
        y->grad = side->grad; /* nothing is there yet: it is made where it belongs */
    return y;
}

/* Of some columns nobody else reads any. */
void
spw__bring_backward(spw_tape *t, const spw__op *o)
{
    const spw_value *y = o->out;
    const spw_side *side = &o->side;
    const act *grad = y->so_far != NULL ? y->so_far : y->grad;
    if (t->dry || side->grad == NULL)
        return;
    if (y->cols < side->cols)
        spw_gpu_copy_heads(t->queue, spw__tape_at_col(t, side->grad, o->col[0]), side->cols, 0, grad, y->cols, 0,
                           y->rows, 1, y->cols);
    else if (side->begun)
        spw_gpu_add(t->queue, side->grad, side->grad, grad, y->rows * y->cols);
    else if (grad != side->grad) /* it was handed another's */
        spw_gpu_copy_d2d(t->queue, side->grad, t->act_dtype, grad, t->act_dtype, y->rows * y->cols, NULL);
}
