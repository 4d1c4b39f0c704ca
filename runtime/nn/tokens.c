/*
 * Where tokens enter the tape and leave it: a row of a table for each, and the loss of what was expected of each over the whole
 * vocabulary, some rows at a time, whose gradients are made with it because nobody keeps the logits.
 */
#include "tape_internal.h"

static spw_value *
embedding(spw_tape *t, spw_value *onto, const int32_t *ids, uint64_t count, spw_value *table)
{
    spw_value *y;
    spw__op *o;
    if (table == NULL || (onto != NULL && (onto->rows != count || onto->cols != table->cols)))
        return spw__tape_fail(t);
    y = spw__tape_value(t, count, table->cols, onto != NULL ? onto->data : NULL);
    if (y == NULL || (o = spw__tape_op(t, T_EMBEDDING, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !table->absent)
        spw_gpu_embedding(t->queue, y->data, ids, table->data, 0, count, table->rows, table->cols, onto != NULL);
    o->in[0] = onto;
    o->param[0] = table;
    o->ids = ids;
    return y;
}

spw_value *
spw_nn_embedding(spw_tape *t, const int32_t *ids, uint64_t count, spw_value *table)
{
    return embedding(t, NULL, ids, count, table);
}

spw_value *
spw_nn_embedding_add(spw_tape *t, spw_value *x, const int32_t *ids, spw_value *table)
{
    return x == NULL ? spw__tape_fail(t) : embedding(t, x, ids, x->rows, table);
}

void
spw__embedding_backward(spw_tape *t, const spw__op *o)
{
    spw_value *y = o->out, *table = o->param[0];
    if (!t->dry && table->w_grad != NULL)
        spw_gpu_embedding_backward(t->queue, spw__tape_sum(t, table), y->grad, o->ids, 0, y->rows, table->rows,
                                   table->cols);
    spw__tape_share_grad(o->in[0], y);
}

/* By shape and device alone, because the sum of the weights' gradient depends on it. Chunks of about the same size. */
static uint64_t
rows_at_a_time(const spw_tape *t, uint64_t M, uint64_t V)
{
    enum { STEP = 256, LOGITS_BYTES = 256 << 20 };
    uint64_t most = LOGITS_BYTES / (spw_gpu_logits_stride(V) * t->act_bytes) / STEP * STEP, chunks, rows;
    most = most < STEP ? STEP : most < t->loss_rows ? most : t->loss_rows;
    chunks = (M + most - 1) / most;
    rows = chunks > 0 ? spw_round_up((M + chunks - 1) / chunks, STEP) : 0;
    return rows < M ? rows : M;
}

spw_value *
spw_nn_head_loss(spw_tape *t, spw_value *x, spw_value *w, const spw_batch *batch, float cap)
{
    uint64_t M = batch->sequences * batch->positions, rows;
    unsigned flags = 0;
    spw_value *y;
    act *logits, *dx;
    if (x == NULL || w == NULL || x->rows != M || x->cols != w->cols)
        return spw__tape_fail(t);
    rows = rows_at_a_time(t, M, w->rows);
    y = spw__tape_value(t, 1, 1, NULL);
    logits = spw__tape_take(t, rows * spw_gpu_logits_stride(w->rows) * t->act_bytes);
    dx = t->record ? spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags) : NULL;
    if (t->record && spw__tape_begins(t, w))
        flags |= SPW_OP_SET_DW;
    if (y == NULL || logits == NULL || t->kept || t->status != SPW_OK || spw__tape_op(t, T_HEAD, y) == NULL)
        return spw__tape_fail(t);
    if (!t->dry)
        spw_gpu_linear_cross_entropy(t->queue, batch->losses, dx, t->record ? w->w_grad : NULL, x->data, w->data,
                                     batch->targets, logits, rows, M, w->rows, w->cols, batch->grad_scale, cap, flags);
    return y;
}
