/*
 * Where tokens enter the tape and leave it: a row of a table for each, and the loss of what was expected of each over the whole
 * vocabulary, some rows at a time, whose gradients are made with it because nobody keeps the logits. The table, and the head's matrix, may come in pieces
 * of their rows, each in its turn.
 */
#include "tape_internal.h"

/* A table's rows: [first, first + rows) are those of the piece. */
typedef struct piece {
    uint64_t idx, first, rows;
} piece;

static piece
piece_of(const spw_value *table, uint64_t idx)
{
    uint64_t each = table->piece_rows > 0 ? table->piece_rows : table->rows, first = idx * each;
    return (piece){idx, first, table->rows - first < each ? table->rows - first : each};
}

static uint64_t
piece_count(const spw_value *table)
{
    return table->piece_rows > 0 ? (table->rows + table->piece_rows - 1) / table->piece_rows : 1;
}

/* A whole table is there without being asked for. false: the call has failed. */
static bool
begin_piece(spw_tape *t, const spw_value *table, const piece *p, spw_turn what)
{
    uint64_t idx = table->pieces_before + p->idx;
    return table->piece_rows == 0 || spw__tape_turn(t, NULL, idx, idx + 1, what);
}

static bool
end_piece(spw_tape *t, const spw_value *table, const piece *p)
{
    return begin_piece(t, table, p, SPW_TURN_OVER);
}

static void
look_up(spw_tape *t, spw_value *y, const int32_t *ids, spw_value *table, uint64_t before, bool add)
{
    for (uint64_t i = 0; i < piece_count(table); i++) {
        piece p = piece_of(table, i);
        if (!begin_piece(t, table, &p, SPW_TURN_FORWARD))
            return;
        spw_gpu_embedding(t->queue, y->data, ids, spw__tape_at_row(t, table, table->data, before), p.first, y->rows,
                          p.rows - before, table->cols, add);
        if (!end_piece(t, table, &p))
            return;
    }
}

static spw_value *
embedding(spw_tape *t, spw_value *onto, const int32_t *ids, uint64_t count, spw_value *table, uint64_t before)
{
    spw_value *y;
    spw__op *o;
    if (table == NULL || before >= table->rows || (before > 0 && table->piece_rows > 0) ||
        (onto != NULL && (onto->rows != count || onto->cols != table->cols)))
        return spw__tape_fail(t);
    y = spw__tape_value(t, count, table->cols, onto != NULL ? onto->data : NULL);
    if (y == NULL || (o = spw__tape_op(t, T_EMBEDDING, y)) == NULL)
        return spw__tape_fail(t);
    if (spw__tape_computes(t) && !table->absent)
        look_up(t, y, ids, table, before, onto != NULL);
    o->in[0] = onto;
    o->param[0] = table;
    o->ids = ids;
    o->first = before;
    return y;
}

spw_value *
spw_nn_embedding(spw_tape *t, const int32_t *ids, uint64_t count, spw_value *table)
{
    return embedding(t, NULL, ids, count, table, 0);
}

spw_value *
spw_nn_embedding_add(spw_tape *t, spw_value *x, const int32_t *ids, spw_value *table, uint64_t before)
{
    return x == NULL ? spw__tape_fail(t) : embedding(t, x, ids, x->rows, table, before);
}

void
spw__embedding_backward(spw_tape *t, const spw__op *o)
{
    spw_value *y = o->out, *table = o->param[0];
    for (uint64_t i = piece_count(table); !t->dry && i-- > 0;) {
        piece p = piece_of(table, i);
        if (!begin_piece(t, table, &p, SPW_TURN_BACKWARD))
            return;
        if (spw__tape_begins(t, table))
            spw_gpu_zero(t->queue, table->w_grad, p.rows * table->cols * sizeof(float));
        if (table->w_grad != NULL)
            spw_gpu_embedding_backward(t->queue, table->w_grad + o->first * table->cols, y->grad, o->ids, p.first,
                                       y->rows, p.rows - o->first, table->cols);
        if (!end_piece(t, table, &p))
            return;
    }
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

/* What the loss of a head in pieces is made of. */
typedef struct pieces_loss {
    const spw_value *x;
    spw_value *w;
    const spw_batch *batch;
    act *logits;
    uint64_t rows; /* of logits at a time */
    float cap;
    float *sums, *dx, *weights; /* dx NULL: not wanted; weights NULL: all are 1 */
} pieces_loss;

static void
see_pieces(spw_tape *t, const pieces_loss *l)
{
    for (uint64_t i = 0; i < piece_count(l->w); i++) {
        piece p = piece_of(l->w, i);
        if (!begin_piece(t, l->w, &p, SPW_TURN_FORWARD))
            return;
        spw_gpu_head_see(t->queue, l->sums, l->x->data, l->w->data, l->batch->targets, l->logits, l->rows, l->x->rows,
                         p.first, p.rows, l->w->cols, l->cap);
        if (!end_piece(t, l->w, &p))
            return;
    }
    spw_gpu_head_losses(t->queue, l->batch->losses, l->sums, l->batch->targets, l->x->rows);
}

/* What the loss of each row weighs in what is minimised, when all losses are there. */
static void
weigh(spw_tape *t, const spw_batch *batch, float *weights)
{
    spw_gpu_preference(t->queue, weights, batch->losses, batch->targets, batch->pairs, batch->pair_count,
                       batch->preference);
}

static void
pieces_backward(spw_tape *t, const pieces_loss *l)
{
    for (uint64_t i = piece_count(l->w); i-- > 0;) {
        piece p = piece_of(l->w, i);
        unsigned flags = SPW_OP_ACC_DX;
        if (!begin_piece(t, l->w, &p, SPW_TURN_BACKWARD))
            return;
        if (spw__tape_begins(t, l->w))
            flags |= SPW_OP_SET_DW;
        spw_gpu_head_backward(t->queue, l->dx, l->w->w_grad, l->x->data, l->w->data, l->batch->targets, l->weights,
                              l->sums, l->logits, l->rows, l->x->rows, p.first, p.rows, l->w->cols,
                              l->batch->grad_scale, l->cap, flags);
        if (!end_piece(t, l->w, &p))
            return;
    }
}

/* dx NULL: not wanted; added: to what is there. */
static void
loss_in_pieces(spw_tape *t, pieces_loss *l, act *dx, bool added)
{
    const spw_value *x = l->x;
    l->sums = spw__tape_take(t, x->rows * 3 * sizeof *l->sums);
    l->dx = dx != NULL ? spw__tape_begin_sums(t, x, added ? dx : NULL) : NULL;
    if (t->dry || t->status != SPW_OK)
        return;
    see_pieces(t, l);
    if (!t->record || t->status != SPW_OK)
        return;
    if (l->weights != NULL)
        weigh(t, l->batch, l->weights);
    pieces_backward(t, l);
    if (dx != NULL)
        spw_gpu_copy_d2d(t->queue, dx, t->act_dtype, l->dx, SPW_F32, x->rows * x->cols, NULL);
}

/* With weights the losses come first, from logits that are made again for the gradients: rows of a pair lie in several chunks. */
static void
loss_of_whole(spw_tape *t, const spw_value *x, const spw_value *w, const spw_batch *batch, act *logits, uint64_t rows,
              float cap, act *dx, float *weights, unsigned flags)
{
    if (weights != NULL) {
        spw_gpu_linear_cross_entropy(t->queue, batch->losses, NULL, NULL, x->data, w->data, batch->targets, NULL,
                                     logits, rows, x->rows, w->rows, w->cols, batch->grad_scale, cap, 0);
        weigh(t, batch, weights);
    }
    spw_gpu_linear_cross_entropy(t->queue, batch->losses, dx, t->record ? w->w_grad : NULL, x->data, w->data,
                                 batch->targets, weights, logits, rows, x->rows, w->rows, w->cols, batch->grad_scale,
                                 cap, flags);
}

spw_value *
spw_nn_head_loss(spw_tape *t, spw_value *x, spw_value *w, const spw_batch *batch, float cap)
{
    uint64_t M = batch->sequences * batch->positions, V, rows;
    unsigned flags = 0;
    spw_value *y;
    act *logits, *dx;
    float *weights = NULL;
    if (x == NULL || w == NULL || x->rows != M || x->cols != w->cols)
        return spw__tape_fail(t);
    V = piece_of(w, 0).rows;
    rows = rows_at_a_time(t, M, V);
    y = spw__tape_value(t, 1, 1, NULL);
    logits = spw__tape_take(t, rows * spw_gpu_logits_stride(V) * t->act_bytes);
    if (t->record && batch->preference != NULL)
        weights = spw__tape_take(t, M * sizeof *weights);
    dx = t->record ? spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags) : NULL;
    if (t->record && w->piece_rows == 0 && spw__tape_begins(t, w))
        flags |= SPW_OP_SET_DW;
    if (y == NULL || logits == NULL || t->kept || t->status != SPW_OK || spw__tape_op(t, T_HEAD, y) == NULL)
        return spw__tape_fail(t);
    if (w->piece_rows > 0)
        loss_in_pieces(
            t,
            &(pieces_loss){
                .x = x, .w = w, .batch = batch, .logits = logits, .rows = rows, .cap = cap, .weights = weights},
            dx, flags & SPW_OP_ACC_DX);
    else if (!t->dry)
        loss_of_whole(t, x, w, batch, logits, rows, cap, dx, weights, flags);
    return y;
}
