/*
 * Walking the chain: a group of micro-batches forward and backward through block after block, and where what is between two blocks
 * lies meanwhile. What a step is made of; when is engine_step.c's.
 */
#include "engine_internal.h"

char *
spw__flow(const spw_engine *e, uint32_t turn, uint32_t micro)
{
    return e->flow + ((uint64_t)(turn % 2) * e->group_max + micro) * e->rows * spw_model_row_cols(&e->model->config) *
                         e->compute_bytes;
}

/* ---------------------------------------------------------------- what is held between the parts of a block */

/* Of a micro-batch: sums, its block's input, where it is read twice and then again behind the turns, and a routing. */
typedef struct held_layout {
    uint64_t sums, input, routing, bytes;
} held_layout;

static held_layout
held_of(const spw_engine *e)
{
    const spw_model_config *m = &e->model->config;
    held_layout h = {.sums = 0};
    h.input = spw_round_up(e->rows * m->width * sizeof(float), 256);
    h.routing = h.input + (e->read_kept_from > 0 ? spw_round_up(e->rows * m->width * e->compute_bytes, 256) : 0);
    h.bytes = h.routing + spw_tape_routing_bytes(e->rows, m->choices, m->experts);
    return h;
}

static uint64_t
flow_only_bytes(const spw_engine *e)
{
    return spw_round_up(2 * (uint64_t)e->group_max * e->rows * spw_model_row_cols(&e->model->config) * e->compute_bytes,
                        4096);
}

uint64_t
spw__flow_bytes(const spw_engine *e)
{
    return flow_only_bytes(e) + (e->shares_turns ? spw_round_up(e->group_max * held_of(e).bytes, 4096) : 0);
}

static void *
held_input(const spw_engine *e, uint32_t i)
{
    const held_layout h = held_of(e);
    return e->flow + flow_only_bytes(e) + i * h.bytes + h.input;
}

/* Where a block's experts read, read; what is held besides is where it always is. */
static void
hold_apart(const spw_engine *e, uint32_t c, uint32_t i, char *read)
{
    const held_layout h = held_of(e);
    char *at = e->flow + flow_only_bytes(e) + i * h.bytes;
    spw_apart *a = &e->apart[i];
    a->read = read;
    a->sums = (float *)(void *)(at + h.sums);
    a->routing = at + h.routing;
    a->dy = spw__flow(e, c + 2, i);
}

/* x[c] is a checkpoint; the last block's input goes straight into its backward pass, and some blocks have none. */
static bool
kept(const spw_engine *e, uint32_t c)
{
    return c > 0 && c >= e->lowest && c + 1 < e->chain_count;
}

static uint32_t
checkpoint_of(const spw_engine *e, uint32_t c, uint32_t micro)
{
    return spw__kept_slots(e, e->chain, e->lowest, c + 1) * e->group_max + micro;
}

/* What experts of a block read that is kept comes right behind its input. */
static uint32_t
read_checkpoint(const spw_engine *e, uint32_t c, uint32_t micro)
{
    return checkpoint_of(e, c, micro) + e->group_max;
}

static uint32_t
checkpoints_after(const spw_engine *e, uint32_t c, uint32_t micro)
{
    return spw__kept_slots(e, e->chain, e->lowest, e->chain_count) * e->group_max - checkpoint_of(e, c, micro);
}

bool
spw__tape_is_kept(const spw_engine *e, uint32_t c, uint32_t micro)
{
    return kept(e, c) && checkpoints_after(e, c, micro) <= e->plan.tape_count;
}

/* Memory in which what this block computes for a micro-batch is kept for the backward pass; NULL: it is computed again. */
static char *
tape_of(const spw_engine *e, uint32_t c, uint32_t micro)
{
    return spw__tape_is_kept(e, c, micro) ? e->tapes + (checkpoints_after(e, c, micro) - 1) * e->tape_bytes : NULL;
}

/* Where the forward pass of a training step makes x[c], and reads it. */
static char *
input_of(const spw_engine *e, uint32_t c, uint32_t micro)
{
    char *home = kept(e, c) ? spw_act_home(e->act, checkpoint_of(e, c, micro)) : NULL;
    return home != NULL ? home : spw__flow(e, c, micro);
}

/* Which of all ranks' micro-batches this is: they go to the ranks in turn, and each has the masks that one rank would draw. */
static uint64_t
world_micro(const spw_engine *e, uint32_t micro)
{
    return (uint64_t)micro * spw__sequence_groups(e) + e->rank / e->sequence_ranks;
}

chunk_rows
spw__chunks_of(const spw_engine *e, uint32_t micro)
{
    const uint64_t rows = e->B * e->T, all = e->documents != NULL ? e->micro_max * rows : rows;
    int32_t *at = e->chunks != NULL && e->documents != NULL ? e->chunks + micro * rows : e->chunks;
    return (chunk_rows){.begins = at, .ends = at != NULL ? at + all : NULL};
}

void
spw__cut_sequences(spw_engine *e)
{
    const chunk_rows to = spw__chunks_of(e, 0);
    if (to.begins != NULL)
        spw_gpu_chunks(e->compute, to.begins, to.ends, NULL, NULL, NULL, e->B, e->T, e->model->config.chunk);
}

static spw_batch
batch_of(const spw_engine *e, uint32_t micro)
{
    const chunk_rows chunks = spw__chunks_of(e, micro);
    const uint64_t whole = e->B * e->T;
    const int32_t *begins = e->documents != NULL ? e->documents + e->micro_max * e->rows + micro * whole : NULL;
    return (spw_batch){.sequences = e->B,
                       .positions = e->own_T,
                       .tokens = e->tokens + micro * e->rows,
                       .targets = e->targets + micro * e->rows,
                       .places = begins != NULL ? e->documents + micro * e->rows : e->places,
                       .begins = begins,
                       .ends = begins != NULL ? begins + e->micro_max * whole : NULL,
                       .chunk_begins = chunks.begins,
                       .chunk_ends = chunks.ends,
                       .targeted = e->targeted != NULL ? e->targeted + micro * e->rows : NULL,
                       .targeted_count = e->targeted != NULL ? e->targeted_counts[micro] : 0,
                       .losses = e->losses + micro * e->rows,
                       .preference = e->prefers ? &e->preference : NULL,
                       .pairs = e->prefers ? e->pairs + micro * spw__pairs_max(e) : NULL,
                       .pair_count = e->prefers ? e->pair_counts[micro] : 0,
                       .grad_scale = (float)(e->scaler.scale / (double)(e->target_count > 0 ? e->target_count : 1)),
                       .balance = (float)(e->config.run.router_balance * e->scaler.scale /
                                          (double)(e->config.accumulation * e->world)),
                       .dropout_key = e->config.run.seed,
                       .dropout_counter = (e->step_count << 20) + world_micro(e, micro)};
}

enum { NOT_LENT = UINT32_MAX };

/* Before a part of the flow is written: the checkpoint that leaves from there must have done so. */
static spw_status
settle_flow(spw_engine *e, uint32_t turn, uint32_t micro, spw_error *err)
{
    uint32_t *lent = &e->flow_lent[turn % 2 * e->group_max + micro], idx = *lent;
    *lent = NOT_LENT;
    return idx == NOT_LENT ? SPW_OK : spw_act_settle(e->act, idx, err);
}

static spw_status
begin_keeping(spw_engine *e, spw_error *err)
{
    for (uint32_t i = 0; i < 2 * e->group_max; i++)
        e->flow_lent[i] = NOT_LENT;
    return spw_act_begin(e->act, err);
}

/* Gives compute the copy of y to x[c], and x[c] to those that are kept. */
static spw_status
pass_on(spw_engine *e, const spw_value *y, uint32_t c, uint32_t micro, bool keep, spw_error *err)
{
    char *out = keep ? input_of(e, c, micro) : spw__flow(e, c, micro);
    bool in_flow = out == spw__flow(e, c, micro);
    if (keep && in_flow)
        SPW_TRY(settle_flow(e, c, micro, err));
    spw_gpu_copy_d2d(e->compute, out, e->compute_dtype, y->data, e->compute_dtype,
                     e->rows * spw_model_row_cols(&e->model->config), NULL);
    if (!keep || !kept(e, c))
        return SPW_OK;
    if (in_flow)
        e->flow_lent[c % 2 * e->group_max + micro] = checkpoint_of(e, c, micro);
    return spw_act_put(e->act, checkpoint_of(e, c, micro), out, e->compute, err);
}

/* One call of the run's block for a micro-batch, on a tape that was reset. */
static spw_value *
call_block(spw_engine *e, block_run *run, uint32_t micro, uint32_t i, spw_value *x, bool training)
{
    run->batch = batch_of(e, micro);
    run->side_row = i * e->rows;
    return spw__call_forward(e, run, &run->batch, x, training, false);
}

static spw_status
forward_whole(spw_engine *e, block_run *run, uint32_t first, uint32_t count, bool keep, spw_error *err)
{
    const uint32_t c = run->at;
    for (uint32_t i = 0; i < count; i++) {
        spw_value *x = NULL, *y;
        char *tape = keep ? tape_of(e, c, i) : NULL;
        if (tape != NULL)
            spw_tape_reset_keeping(e->tape, tape, e->tape_bytes);
        else
            spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
        if (c > 0)
            x = spw_tape_input(e->tape, keep ? input_of(e, c, i) : spw__flow(e, c, i), e->rows,
                               spw_model_row_cols(&e->model->config), false);
        y = call_block(e, run, first + i, i, x, keep);
        SPW_TRY(spw_tape_check(e->tape, err));
        if (c + 1 < e->chain_count)
            SPW_TRY(pass_on(e, y, c + 1, i, keep, err));
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- experts whose turns are shared */

/* A part of the block at the run's place, for a micro-batch whose input is data. *y: what the block gives. */
static spw_status
call_part(spw_engine *e, block_run *run, uint32_t micro, uint32_t i, void *data, spw_part part, uint64_t first,
          uint64_t end, spw_value **y, spw_error *err)
{
    const bool back = part == SPW_PART_BACK_TURN;
    spw_value *x;
    spw_tape_reset(e->tape, e->arena, e->arena_bytes, back);
    spw_tape_call_part(e->tape, part, &e->apart[i], first, end);
    x = spw_tape_input(e->tape, data, e->rows, spw_model_row_cols(&e->model->config), back && run->at > e->lowest);
    *y = call_block(e, run, micro, i, x, run->mode == MODE_TRAIN);
    return spw_tape_check(e->tape, err);
}

/* Calls the turn part for all micro-batches of a pass while experts [first, end) are there. */
static spw_status
run_turn(spw_engine *e, block_run *run, uint32_t micro, uint32_t count, spw_part part, uint64_t first, uint64_t end,
         spw_error *err)
{
    const bool back = part == SPW_PART_BACK_TURN;
    SPW_TRY(spw__take_turn(run, first, end, back ? SPW_TURN_BACKWARD : SPW_TURN_FORWARD, err));
    for (uint32_t i = 0; i < count; i++) {
        spw_value *y;
        SPW_TRY(call_part(e, run, micro + i, i, e->flow, part, first, end, &y, err));
        if (back)
            spw_tape_backward(e->tape, y);
        SPW_TRY(spw_tape_check(e->tape, err));
    }
    return spw__take_turn(run, first, end, SPW_TURN_OVER, err);
}

/* Gives what experts read to those that are kept; it stays where it is while they read it. */
static spw_status
keep_read(spw_engine *e, uint32_t c, uint32_t i, spw_error *err)
{
    const uint32_t idx = read_checkpoint(e, c, i);
    if (e->apart[i].read == spw__flow(e, c + 1, i))
        e->flow_lent[(c + 1) % 2 * e->group_max + i] = idx;
    return spw_act_put(e->act, idx, e->apart[i].read, e->compute, err);
}

/* What experts read lies at its home, or in the turn of the flow that the block's output goes to. */
static spw_status
forward_shared(spw_engine *e, block_run *run, uint32_t first, uint32_t count, bool keep, spw_error *err)
{
    const uint64_t experts = e->model->config.experts, each = e->turn_experts;
    const uint32_t c = run->at;
    const bool keeps_read = keep && kept(e, c) && spw__keeps_read(e, run->block_idx);
    spw_value *y;
    for (uint32_t i = 0; i < count; i++) {
        char *home = keeps_read ? spw_act_home(e->act, read_checkpoint(e, c, i)) : NULL;
        hold_apart(e, c, i, home != NULL ? home : spw__flow(e, c + 1, i));
        if (keep)
            SPW_TRY(settle_flow(e, c + 1, i, err));
        SPW_TRY(call_part(e, run, first + i, i, keep ? input_of(e, c, i) : spw__flow(e, c, i), SPW_PART_BEFORE, 0, 0,
                          &y, err));
        if (keeps_read)
            SPW_TRY(keep_read(e, c, i, err));
    }
    for (uint64_t at = 0; at < experts; at += each)
        SPW_TRY(run_turn(e, run, first, count, SPW_PART_TURN, at, at + each < experts ? at + each : experts, err));
    for (uint32_t i = 0; i < count; i++) {
        SPW_TRY(call_part(e, run, first + i, i, e->flow, SPW_PART_AFTER, 0, 0, &y, err));
        SPW_TRY(pass_on(e, y, c + 1, i, keep, err));
    }
    return SPW_OK;
}

spw_status
spw__forward_group(spw_engine *e, int mode, uint32_t first, uint32_t count, bool keep, spw_error *err)
{
    uint32_t last = e->chain_count - 1;
    if (keep)
        SPW_TRY(begin_keeping(e, err));
    for (uint32_t c = 0; c < last + (keep ? 0u : 1u); c++) {
        block_run run = {.block_idx = e->chain[c], .at = c};
        spw_status st;
        SPW_TRY(spw__acquire_block(e, mode, &run, err));
        run.timed = spw__begin_compute(e, "forward");
        st = spw__shares_turns(e, e->chain[c]) ? forward_shared(e, &run, first, count, keep, err)
                                               : forward_whole(e, &run, first, count, keep, err);
        spw__end_compute(e, &run);
        spw__release_block(e, &run);
        SPW_TRY(st);
        spw__orthogonal_help(e);
    }
    if (keep)
        spw_act_turn(e->act);
    return SPW_OK;
}

/*
 * Where the gradient of x[c] lies: in the flow at turn c + 1, where the block's output had its own before, or, for the last block, where x[c - 1]
 * leaves from. Tied weights have theirs from the last block for all micro-batches and then from the first, in one pass and in several: what
 * the first block is to go back through waits for the last pass.
 */
static void *
grad_of(const spw_engine *e, uint32_t c, uint32_t micro, uint32_t first)
{
    return e->defers && c == 1
               ? e->deferred + micro * e->rows * spw_model_row_cols(&e->model->config) * e->compute_bytes
               : spw__flow(e, c + 1, micro - first);
}

/* A checkpoint, once more, where it is held. */
static spw_status
hold_kept(spw_engine *e, uint32_t idx, void *to, spw_error *err)
{
    void *data;
    SPW_TRY(spw_act_get(e->act, idx, &data, err));
    spw_gpu_copy_d2d(e->compute, to, e->compute_dtype, data, e->compute_dtype,
                     e->rows * spw_model_row_cols(&e->model->config), NULL);
    spw_act_release(e->act, idx, e->compute);
    return SPW_OK;
}

/* Before the turns of the backward pass: what experts read, and who of them, from what is kept of it or of the block's input. */
static spw_status
back_before(spw_engine *e, block_run *run, uint32_t micro, uint32_t i, spw_error *err)
{
    const uint32_t c = run->at;
    char *read = spw__flow(e, c + 1, i); /* where the gradient of the block's input is to be */
    spw_value *y;
    hold_apart(e, c, i, read);
    SPW_TRY(settle_flow(e, c + 1, i, err));
    if (spw__keeps_read(e, run->block_idx)) {
        SPW_TRY(hold_kept(e, read_checkpoint(e, c, i), read, err));
        return call_part(e, run, micro, i, e->flow, SPW_PART_BACK_READ, 0, 0, &y, err);
    }
    SPW_TRY(hold_kept(e, checkpoint_of(e, c, i), held_input(e, i), err));
    return call_part(e, run, micro, i, held_input(e, i), SPW_PART_BACK_BEFORE, 0, 0, &y, err);
}

static spw_status
backward_shared(spw_engine *e, block_run *run, uint32_t first, uint32_t count, spw_error *err)
{
    const uint64_t experts = e->model->config.experts, each = e->turn_experts;
    const uint32_t c = run->at;
    const bool on = c > e->lowest,
               keeps_read = spw__keeps_read(e, run->block_idx); /* below it nothing asks for a gradient */
    spw_value *y;
    for (uint32_t i = 0; i < count; i++)
        SPW_TRY(back_before(e, run, first + i, i, err));
    for (uint64_t end = experts, at; end > 0; end = at) {
        at = (end - 1) / each * each;
        SPW_TRY(run_turn(e, run, first, count, SPW_PART_BACK_TURN, at, end, err));
    }
    for (uint32_t i = 0; i < count; i++) {
        spw_value *x;
        void *data = held_input(e, i);
        if (keeps_read)
            SPW_TRY(spw_act_get(e->act, checkpoint_of(e, c, i), &data, err));
        spw_tape_reset(e->tape, e->arena, e->arena_bytes, true);
        spw_tape_call_part(e->tape, SPW_PART_BACK, &e->apart[i], 0, 0);
        x = spw_tape_input(e->tape, data, e->rows, spw_model_row_cols(&e->model->config), on);
        x->grad = on ? grad_of(e, c, first + i, first) : NULL;
        y = call_block(e, run, first + i, i, x, true);
        if (y != NULL)
            y->grad = grad_of(e, c + 1, first + i, first);
        spw_tape_backward(e->tape, y);
        SPW_TRY(spw_tape_check(e->tape, err));
        if (keeps_read)
            spw_act_release(e->act, checkpoint_of(e, c, i), e->compute);
    }
    return SPW_OK;
}

/* For micro-batches from `from` on; the pass began with `first`. */
static spw_status
backward_block(spw_engine *e, block_run *run, uint32_t c, uint32_t from, uint32_t first, uint32_t count, spw_error *err)
{
    bool last = c + 1 == e->chain_count;
    for (uint32_t micro = from; micro < first + count; micro++) {
        const uint32_t i = micro - first; /* in the pass */
        spw_value *x = NULL, *y;
        run->later_micro = micro > from;
        run->final_micro = micro + 1 == first + count;
        if (c > 0) {
            bool on = c > e->lowest; /* below it nothing asks for a gradient */
            void *data = spw__flow(e, c, i);
            if (kept(e, c))
                SPW_TRY(spw_act_get(e->act, checkpoint_of(e, c, i), &data, err));
            if (tape_of(e, c, i) != NULL)
                spw_tape_reset_kept(e->tape, tape_of(e, c, i), e->tape_bytes, e->arena, e->arena_bytes);
            else
                spw_tape_reset(e->tape, e->arena, e->arena_bytes, true);
            x = spw_tape_input(e->tape, data, e->rows, spw_model_row_cols(&e->model->config), on);
            SPW_TRY(settle_flow(e, c + 1, i, err));
            x->grad = on ? grad_of(e, c, micro, first) : NULL;
        } else {
            spw_tape_reset(e->tape, e->arena, e->arena_bytes, true);
        }
        y = call_block(e, run, micro, i, x, true);
        if (y != NULL && !last)
            y->grad = grad_of(e, c + 1, micro, first);
        spw_tape_backward(e->tape, y);
        SPW_TRY(spw_tape_check(e->tape, err));
        if (kept(e, c))
            spw_act_release(e->act, checkpoint_of(e, c, i), e->compute);
    }
    return SPW_OK;
}

spw_status
spw__backward_group(spw_engine *e, uint32_t first, uint32_t count, bool later_group, bool final_group, spw_error *err)
{
    for (uint32_t c = e->chain_count; c-- > e->lowest;) {
        const bool for_all = e->defers && c == 0;
        block_run run = {.block_idx = e->chain[c],
                         .at = c,
                         .later_group = later_group && !for_all,
                         .final_group = final_group,
                         .gradients_alone = spw_model_is_embedding(e->model, e->chain[c])};
        spw_status st;
        if (for_all && !final_group)
            break;
        SPW_TRY(spw__acquire_block(e, MODE_TRAIN, &run, err));
        st = spw__free_grad_buffers(e, &run, 0, err); /* a wait is none of compute's time */
        run.timed = spw__begin_compute(e, "backward");
        if (st == SPW_OK)
            st = spw__open_grads(e, &run, 0, err);
        if (st == SPW_OK)
            st = spw__shares_turns(e, run.block_idx)
                     ? backward_shared(e, &run, first, count, err)
                     : backward_block(e, &run, c, for_all ? 0 : first, first, count, err);
        spw__end_compute(e, &run);
        spw__release_block(e, &run);
        if (st == SPW_OK)
            st = spw__send_grads(e, &run, 0, err);
        if (st != SPW_OK)
            return st;
        spw__orthogonal_help(e);
    }
    return spw__ship_grads(e, final_group, err);
}
