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

/* Rows of logits that there is memory for at once. */
static uint64_t
most_rows(const spw_tape *t, uint64_t V)
{
    enum { STEP = 256, LOGITS_BYTES = 256 << 20 };
    uint64_t most = LOGITS_BYTES / (spw_gpu_logits_stride(V) * t->act_bytes) / STEP * STEP;
    return most < STEP ? STEP : most < t->loss_rows ? most : t->loss_rows;
}

/* By shape and device alone, because the sum of the weights' gradient depends on it. Chunks of about the same size. */
static uint64_t
rows_at_a_time(const spw_tape *t, uint64_t M, uint64_t V)
{
    enum { STEP = 256 };
    const uint64_t chunks = (M + most_rows(t, V) - 1) / most_rows(t, V);
    const uint64_t rows = chunks > 0 ? spw_round_up((M + chunks - 1) / chunks, STEP) : 0;
    return rows < M ? rows : M;
}

/* What a head's loss is made of: all rows of a batch, or those with a target. */
typedef struct head_loss {
    const spw_batch *batch;
    spw_value *w, x; /* x: the rows that are computed */
    const int32_t *targets;
    float *losses;
    act *logits, *dx; /* dx NULL: not wanted */
    uint64_t rows;    /* of logits at a time */
    float cap;
    bool some;                    /* x is not the batch's */
    float *weights, *all_weights; /* what losses weigh in what is minimised, and of all of the batch; NULL: 1 */
    float *sums, *dx_sums;        /* of a head in pieces */
} head_loss;

/* When all losses are there. */
static void
weigh(spw_tape *t, const head_loss *l)
{
    const spw_batch *b = l->batch;
    if (l->some)
        spw_gpu_put_rows(t->queue, b->losses, l->losses, b->targeted, b->targeted_count, sizeof *l->losses);
    spw_gpu_preference(t->queue, l->all_weights, b->losses, b->targets, b->pairs, b->pair_count, b->preference);
    if (l->some)
        spw_gpu_take_rows(t->queue, l->weights, l->all_weights, b->targeted, b->targeted_count, sizeof *l->weights);
}

static void
see_pieces(spw_tape *t, const head_loss *l)
{
    for (uint64_t i = 0; i < piece_count(l->w); i++) {
        piece p = piece_of(l->w, i);
        if (!begin_piece(t, l->w, &p, SPW_TURN_FORWARD))
            return;
        spw_gpu_head_see(t->queue, l->sums, l->x.data, l->w->data, l->targets, l->logits, l->rows, l->x.rows, p.first,
                         p.rows, l->w->cols, l->cap);
        if (!end_piece(t, l->w, &p))
            return;
    }
    spw_gpu_head_losses(t->queue, l->losses, l->sums, l->targets, l->x.rows);
}

static void
pieces_backward(spw_tape *t, const head_loss *l)
{
    for (uint64_t i = piece_count(l->w); i-- > 0;) {
        piece p = piece_of(l->w, i);
        unsigned flags = SPW_OP_ACC_DX;
        if (!begin_piece(t, l->w, &p, SPW_TURN_BACKWARD))
            return;
        if (spw__tape_begins(t, l->w))
            flags |= SPW_OP_SET_DW;
        spw_gpu_head_backward(t->queue, l->dx_sums, l->w->w_grad, l->x.data, l->w->data, l->targets, l->weights,
                              l->sums, l->logits, l->rows, l->x.rows, p.first, p.rows, l->w->cols, l->batch->grad_scale,
                              l->cap, flags);
        if (!end_piece(t, l->w, &p))
            return;
    }
}

/* added: to what is in dx. */
static void
loss_in_pieces(spw_tape *t, head_loss *l, bool added)
{
    l->sums = spw__tape_take(t, l->x.rows * 3 * sizeof *l->sums);
    l->dx_sums = l->dx != NULL ? spw__tape_take_sums(t, &l->x, added ? l->dx : NULL) : NULL;
    if (t->dry || t->status != SPW_OK)
        return;
    see_pieces(t, l);
    if (!t->record || t->status != SPW_OK)
        return;
    if (l->weights != NULL)
        weigh(t, l);
    pieces_backward(t, l);
    if (l->dx != NULL)
        spw_gpu_copy_d2d(t->queue, l->dx, t->act_dtype, l->dx_sums, SPW_F32, l->x.rows * l->x.cols, NULL);
}

/* With weights losses come first, and gradients from logits that are made again: rows of a pair lie in several chunks. */
static void
loss_of_whole(spw_tape *t, const head_loss *l, unsigned flags)
{
    const spw_value *w = l->w;
    if (l->weights != NULL) {
        spw_gpu_linear_cross_entropy(t->queue, l->losses, NULL, NULL, l->x.data, w->data, l->targets, NULL, l->logits,
                                     l->rows, l->x.rows, w->rows, w->cols, l->batch->grad_scale, l->cap, 0);
        weigh(t, l);
    }
    spw_gpu_linear_cross_entropy(t->queue, l->losses, l->dx, t->record ? w->w_grad : NULL, l->x.data, w->data,
                                 l->targets, l->weights, l->logits, l->rows, l->x.rows, w->rows, w->cols,
                                 l->batch->grad_scale, l->cap, flags);
}

/*
 * Of rows that nobody expects anything of (prompts, padding) nothing is computed: the others become a matrix. Its memory is that of all
 * rows, which a batch may need.
 */
static void
take_targeted(spw_tape *t, head_loss *l)
{
    const spw_batch *b = l->batch;
    const uint64_t M = l->x.rows, row_bytes = l->x.cols * t->act_bytes, n = b->targeted_count;
    act *x = spw__tape_take(t, M * row_bytes), *dx = l->dx != NULL ? spw__tape_take(t, M * row_bytes) : NULL;
    int32_t *targets = spw__tape_take(t, M * sizeof *targets);
    float *losses = spw__tape_take(t, M * sizeof *losses);
    float *weights = l->weights != NULL ? spw__tape_take(t, M * sizeof *weights) : NULL;
    if (t->dry || t->status != SPW_OK || n == 0 || n == M)
        return;
    spw_gpu_take_rows(t->queue, x, l->x.data, b->targeted, n, row_bytes);
    spw_gpu_take_rows(t->queue, targets, l->targets, b->targeted, n, sizeof *targets);
    spw_gpu_zero(t->queue, b->losses, M * sizeof *losses);
    l->x.data = x;
    l->x.rows = n;
    l->dx = dx;
    l->targets = targets;
    l->losses = losses;
    l->weights = weights;
    l->some = true;
}

/* Losses, unless weighing did so, and dx of all rows, to where they belong. */
static void
put_targeted(spw_tape *t, const head_loss *l, act *dx, uint64_t M)
{
    const spw_batch *b = l->batch;
    const uint64_t row_bytes = l->x.cols * t->act_bytes;
    if (l->weights == NULL)
        spw_gpu_put_rows(t->queue, b->losses, l->losses, b->targeted, b->targeted_count, sizeof *l->losses);
    if (dx == NULL)
        return;
    spw_gpu_zero(t->queue, dx, M * row_bytes);
    spw_gpu_put_rows(t->queue, dx, l->dx, b->targeted, b->targeted_count, row_bytes);
}

spw_value *
spw_nn_head_loss(spw_tape *t, spw_value *x, spw_value *w, const spw_batch *batch, float cap)
{
    uint64_t M = batch->sequences * batch->positions, V;
    unsigned flags = 0;
    head_loss l = {.batch = batch, .w = w, .targets = batch->targets, .losses = batch->losses, .cap = cap};
    spw_value *y;
    act *dx;
    bool some;
    if (x == NULL || w == NULL || x->rows != M || x->cols != w->cols)
        return spw__tape_fail(t);
    V = piece_of(w, 0).rows;
    l.x = *x;
    y = spw__tape_value(t, 1, 1, NULL);
    spw__tape_find_needs(t);
    dx = l.dx = t->record ? spw__tape_grad(t, x, SPW_OP_ACC_DX, &flags) : NULL;
    w->passes |= t->record && x->needs_grad;
    some = batch->targeted != NULL && (flags & SPW_OP_ACC_DX) == 0;
    l.rows = some && most_rows(t, V) < M ? most_rows(t, V) : some ? M : rows_at_a_time(t, M, V);
    l.logits = spw__tape_take(t, l.rows * spw_gpu_logits_stride(V) * t->act_bytes);
    if (t->record && batch->preference != NULL)
        l.weights = l.all_weights = spw__tape_take(t, M * sizeof *l.weights);
    if (some)
        take_targeted(t, &l);
    l.rows = rows_at_a_time(t, l.x.rows, V);
    if (t->record && w->piece_rows == 0 && spw__tape_begins(t, w))
        flags |= SPW_OP_SET_DW;
    if (y == NULL || l.logits == NULL || t->kept || t->status != SPW_OK || spw__tape_op(t, T_HEAD, y) == NULL)
        return spw__tape_fail(t);
    if (w->piece_rows > 0)
        loss_in_pieces(t, &l, flags & SPW_OP_ACC_DX);
    else if (!t->dry)
        loss_of_whole(t, &l, flags);
    if (l.some)
        put_targeted(t, &l, dx, M);
    return y;
}
