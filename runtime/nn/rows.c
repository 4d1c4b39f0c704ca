/*
 * Parts of a block that treat each row by itself, some rows at a time. A tile has a tape of its own, over what is free in the
 * arena; its inputs and outputs are rows of the values outside. Forward leaves nothing of a tile's inside behind, backward makes it again.
 */
#include "tape_internal.h"

uint64_t
spw_nn_tile_rows(uint64_t sequences, uint64_t T, uint64_t most)
{
    uint64_t each;
    if (most == 0 || sequences * T <= most)
        return sequences * T;
    if (T <= most)
        return most / T * T;
    each = (T + most - 1) / most;
    each = (T + each - 1) / each;
    return spw_round_up(each, 16) <= most ? spw_round_up(each, 16) : each;
}

static uint64_t
rows_of(const spw_batch *batch)
{
    return batch->sequences * batch->positions;
}

/* Rows of the tile that begins at row `first`; it ends where its sequence does, if it has not all of it. */
static uint64_t
tile_rows(const spw_tape *t, const spw_batch *batch, uint64_t first)
{
    uint64_t each = spw_nn_tile_rows(batch->sequences, batch->positions, t->rows_each);
    uint64_t left = each < batch->positions ? batch->positions - first % batch->positions : rows_of(batch) - first;
    return left < each ? left : each;
}

spw_tape *
spw__tape_inner(spw_tape *t)
{
    spw_tape *p = t->tile;
    if (p == NULL) {
        p = t->tile = spw_mem_zalloc(sizeof *p);
        if (p == NULL) {
            t->status = SPW_ENOMEM;
            return NULL;
        }
        p->queue = t->queue;
        p->act_dtype = t->act_dtype;
        p->act_bytes = t->act_bytes;
        p->loss_rows = t->loss_rows;
        p->is_tile = true;
    }
    p->share = t->share;
    return p;
}

static void *
free_memory(const spw_tape *t)
{
    return t->dry ? NULL : t->arena + t->used;
}

static uint64_t
free_bytes(const spw_tape *t)
{
    return t->dry || t->used > t->arena_bytes ? 0 : t->arena_bytes - t->used;
}

void
spw__tape_reset_inner(spw_tape *t, bool record)
{
    spw_tape_reset(t->tile, free_memory(t), free_bytes(t), record);
}

/* What a tile's tape takes and gives. */
typedef struct tile_values {
    spw_value *in[SPW_ROWS_VALUES], *out[SPW_ROWS_VALUES];
} tile_values;

/* Runs the part on the tile's tape, which was reset, over `rows` rows from `first` on. false: it failed, and the tape too. */
static bool
run_tile(spw_tape *t, spw__rows *r, uint64_t first, uint64_t rows, tile_values *v)
{
    spw_tape *p = t->tile;
    spw_call call = r->call;
    uint32_t at = r->at;
    call.tape = p;
    p->first_row = first;
    for (uint32_t k = 0; k < r->in_count; k++)
        v->in[k] = spw_tape_input(p, spw__tape_at_row(t, r->in[k], r->in[k]->data, first), rows, r->in[k]->cols,
                                  p->record && r->in[k]->needs_grad);
    for (uint32_t k = 0; k < r->out_count; k++)
        p->into[k] = r->out[k] == NULL ? NULL : spw__tape_at_row(t, r->out[k], r->out[k]->data, first);
    r->fn(&call, &at, v->in, v->out);
    r->end = at;
    for (uint32_t k = 0; k < r->out_count && p->status == SPW_OK; k++) {
        const spw_value *y = v->out[k];
        bool fits = y != NULL && y->rows == rows && (r->out[k] == NULL || y->cols == r->out[k]->cols);
        if (!fits || (!p->dry && p->into[k] != NULL && y->data != p->into[k]))
            (void)spw__tape_fail(p);
    }
    if (p->status != SPW_OK)
        t->status = p->status;
    return t->status == SPW_OK;
}

/* What memory the inside of a tile takes that is kept. */
static uint64_t
kept_bytes(spw_tape *t, spw__rows *r, uint64_t rows)
{
    tile_values v;
    spw_tape_reset(t->tile, NULL, 0, false);
    return run_tile(t, r, 0, rows, &v) ? t->tile->used : 0;
}

void
spw__tape_note_inner(spw_tape *t)
{
    if (!t->asleep && t->used + t->tile->peak > t->peak)
        t->peak = t->used + t->tile->peak;
}

/* Forward of all tiles; what is to be kept lies in the arena then. */
void
spw__rows_forward(spw_tape *t, const spw__op *o)
{
    spw__rows *r = o->rows;
    const spw_batch *batch = r->call.batch;
    tile_values v;
    for (uint64_t first = 0, rows; first < rows_of(batch); first += rows) {
        rows = tile_rows(t, batch, first);
        spw__tape_reset_inner(t, false);
        if (!run_tile(t, r, first, rows, &v))
            return;
        spw__tape_note_inner(t);
        t->linear_flops += t->asleep ? 0 : t->tile->linear_flops;
        if (t->keeping)
            t->used += t->tile->used;
    }
}

/* The values that the part gives, in memory of the arena. */
static bool
take_outputs(spw_tape *t, spw__rows *r)
{
    tile_values v;
    spw__tape_find_needs(t);
    spw_tape_reset(t->tile, NULL, 0, t->record);
    if (!run_tile(t, r, 0, tile_rows(t, r->call.batch, 0), &v))
        return false;
    spw__tape_find_needs(t->tile);
    for (uint32_t k = 0; k < r->out_count; k++) {
        r->out[k] = spw__tape_value(t, rows_of(r->call.batch), v.out[k]->cols, NULL);
        if (r->out[k] == NULL)
            return false;
        r->out[k]->needs_grad = v.out[k]->needs_grad;
    }
    return true;
}

static bool
in_tiles(spw_tape *t, const spw_call *call, spw__rows *r)
{
    uint64_t from = t->used;
    spw__op *o;
    if (spw__tape_inner(t) == NULL || !take_outputs(t, r) || (o = spw__tape_op(t, T_ROWS, r->out[0])) == NULL)
        return false;
    o->rows = r;
    if (t->kept) { /* past what forward has left here */
        r->kept = free_memory(t);
        r->kept_bytes = free_bytes(t);
        for (uint64_t first = 0, rows; first < rows_of(call->batch); first += rows) {
            rows = tile_rows(t, call->batch, first);
            t->used += kept_bytes(t, r, rows);
        }
    } else if (t->record) {
        t->pending = o;
        t->pending_from = from;
    } else {
        spw__rows_forward(t, o);
    }
    return t->status == SPW_OK;
}

bool
spw_nn_rows(const spw_call *call, uint32_t *at, spw_rows_fn fn, spw_value *const *in, uint32_t in_count,
            spw_value **out, uint32_t out_count)
{
    spw_tape *t = call->tape;
    spw__rows *r = &t->rows[t->rows_count];
    bool whole =
        spw_nn_tile_rows(call->batch->sequences, call->batch->positions, t->rows_each) == rows_of(call->batch) ||
        t->cache != NULL || t->places != NULL;
    for (uint32_t k = 0; k < out_count; k++)
        out[k] = NULL;
    for (uint32_t k = 0; k < in_count; k++) {
        if (in[k] == NULL)
            return spw__tape_fail(t) != NULL;
        whole = whole || in[k]->rows != rows_of(call->batch);
    }
    if (whole) {
        fn(call, at, in, out);
        return t->status == SPW_OK;
    }
    if (t->rows_count == SPW__ROWS_MAX || in_count > SPW_ROWS_VALUES || out_count > SPW_ROWS_VALUES)
        return spw__tape_fail(t) != NULL;
    t->rows_count++;
    *r = (spw__rows){.fn = fn, .call = *call, .at = *at, .in_count = in_count, .out_count = out_count};
    for (uint32_t k = 0; k < in_count; k++)
        r->in[k] = in[k];
    if (!in_tiles(t, call, r))
        return spw__tape_fail(t) != NULL;
    for (uint32_t k = 0; k < out_count; k++)
        out[k] = r->out[k];
    *at = r->end;
    return true;
}

uint32_t
spw_nn_hold_into(spw_tape *t)
{
    const uint32_t next = t->into_next;
    t->into_next = 0;
    return next > 0 ? next - 1 : SPW_ROWS_VALUES;
}

void
spw_nn_into(spw_tape *t, uint32_t k)
{
    if (k >= SPW_ROWS_VALUES)
        (void)spw__tape_fail(t);
    else
        t->into_next = 1 + k;
}

/* ---------------------------------------------------------------- backward */

/* Where the gradients of a part's inputs go, and what is there already (NULL: nothing). */
typedef struct input_grads {
    act *to[SPW_ROWS_VALUES];
    const act *onto[SPW_ROWS_VALUES];
    bool passes; /* the first one's is made in the first output's: that is a sum onto it, as a rule */
} input_grads;

static void
find_grads(spw_tape *t, spw__rows *r, input_grads *g)
{
    const spw_value *x = r->in[0], *y = r->out[0];
    *g = (input_grads){.passes = r->in_count > 0 && x->needs_grad && !x->grad_set && y->grad_set && x->cols == y->cols};
    for (uint32_t k = g->passes ? 1 : 0; k < r->in_count; k++)
        g->to[k] = spw__tape_grad_onto(t, r->in[k], &g->onto[k]);
}

static void
set_grads(spw_tape *t, const spw__rows *r, const input_grads *g, uint64_t first, tile_values *v)
{
    for (uint32_t k = 0; k < r->out_count; k++) {
        v->out[k]->grad = spw__tape_at_row(t, r->out[k], r->out[k]->grad, first);
        v->out[k]->grad_set = r->out[k]->grad_set;
    }
    for (uint32_t k = 0; k < r->in_count; k++) {
        v->in[k]->grad = spw__tape_at_row(t, r->in[k], g->to[k], first);
        v->in[k]->grad_set = g->onto[k] != NULL;
        if (g->onto[k] != NULL && g->onto[k] != g->to[k])
            v->in[k]->so_far = spw__tape_at_row(t, r->in[k], (act *)(uintptr_t)g->onto[k], first);
    }
}

/* What the tile's backward has left where it is not to stay, or not written. */
static void
settle_grads(spw_tape *t, const spw__rows *r, const input_grads *g, const tile_values *v)
{
    const spw_value *x = v->in[0];
    if (t->dry || t->status != SPW_OK)
        return;
    for (uint32_t k = 0; k < r->in_count; k++) {
        uint64_t bytes = v->in[k]->rows * v->in[k]->cols * t->act_bytes;
        act *at = k == 0 && g->passes ? v->out[0]->grad : v->in[k]->grad;
        if (r->in[k]->needs_grad && !v->in[k]->grad_set)
            spw_gpu_zero(t->queue, at, bytes);
    }
    if (g->passes && x->grad_set && x->grad != v->out[0]->grad)
        spw_gpu_copy_d2d(t->queue, v->out[0]->grad, t->act_dtype, x->grad, t->act_dtype, x->rows * x->cols, NULL);
}

void
spw__rows_backward(spw_tape *t, const spw__op *o)
{
    spw__rows *r = o->rows;
    spw_tape *p = t->tile;
    const spw_batch *batch = r->call.batch;
    uint64_t kept = 0;
    bool wanted = false;
    input_grads g;
    tile_values v;
    for (uint32_t k = 0; k < r->out_count; k++)
        wanted = wanted || r->out[k]->grad_set;
    if (!wanted)
        return;
    find_grads(t, r, &g);
    for (uint64_t first = 0, rows; t->status == SPW_OK && first < rows_of(batch); first += rows) {
        rows = tile_rows(t, batch, first);
        if (r->kept != NULL)
            spw_tape_reset_kept(p, r->kept + kept, r->kept_bytes - kept, free_memory(t), free_bytes(t));
        else
            spw__tape_reset_inner(t, true);
        p->into_there = !r->dropped;
        if (!run_tile(t, r, first, rows, &v))
            return;
        kept += p->used;
        set_grads(t, r, &g, first, &v);
        spw__tape_run_backward(p);
        t->status = p->status;
        settle_grads(t, r, &g, &v);
        t->linear_flops += p->linear_flops;
        spw__tape_note_inner(t);
    }
    if (g.passes)
        spw__tape_hand_over(t, r->in[0], r->out[0]);
}
