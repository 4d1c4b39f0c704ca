/*
 * One use of a block: its units acquired in the order of the trace, forward on the tape with its parameters where they lie, and
 * released again. Experts that come in turns, or only when they are chosen, and pieces of a matrix with a row for each token are acquired and
 * released while the tape computes.
 */
#include "engine_internal.h"

/* ---------------------------------------------------------------- time of the computing */

/* All waiting of this step that the store does not count. */
static uint64_t
waited_ns(const spw_engine *e)
{
    uint64_t sum = 0;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        sum += e->stall_ns[k];
    return sum;
}

static void
computed(void *arg, const char *name, uint64_t block_idx, uint64_t begin_ns, uint64_t end_ns)
{
    spw_engine *e = arg;
    __atomic_fetch_add(&e->device_ns, end_ns - begin_ns, __ATOMIC_RELAXED);
    spw_timeline_add(SPW_LANE_COMPUTE, name, block_idx, begin_ns, end_ns);
}

compute_span
spw__begin_compute(spw_engine *e, const char *name)
{
    if (!e->host_addressable)
        spw_gpu_span_begin(e->compute, name);
    return (compute_span){name, spw_now_ns(), waited_ns(e)};
}

/* Counts what the thread computed, or lets a device that works by itself tell what it did. */
void
spw__end_compute(spw_engine *e, const block_run *run)
{
    const compute_span *c = &run->timed;
    uint64_t now = spw_now_ns();
    if (!e->host_addressable) {
        spw_gpu_span_end(e->compute, run->block_idx, computed, e);
        return;
    }
    e->compute_ns += now - c->begin_ns - (waited_ns(e) - c->waited_ns);
    spw_timeline_add(SPW_LANE_COMPUTE, c->name, run->block_idx, c->begin_ns, now);
}

/* ---------------------------------------------------------------- units and parameters */

/*
 * The run's unit that has the parameter, or of its pieces the one that is there; unit_count: none. guess: where the one before it was, which
 * it mostly shares or follows.
 */
static uint32_t
unit_in_run(const block_run *run, const spw_place *at, uint32_t guess)
{
    uint32_t j = 0;
    for (uint32_t k = guess; k < guess + 2 && k < run->unit_count; k++) {
        if (at->pieces == 1 && run->units[k] == at->unit_idx)
            return k;
    }
    while (j < run->unit_count && run->units[j] - at->unit_idx >= at->pieces)
        j++;
    return j;
}

/* Makes it the k-th behind the units that the run has; it gets its weights later. */
static void
add_unit(block_run *run, uint32_t k, uint32_t unit_idx)
{
    uint32_t at = run->unit_count + k;
    run->units[at] = unit_idx;
    run->weights[at] = NULL;
    run->grads[at] = NULL;
}

/* Tells the parameters where their weights and gradients are. */
static void
bind_params(block_run *run)
{
    const spw_engine *e = run->e;
    const spw_block *b = &e->model->blocks[run->block_idx];
    for (uint32_t k = 0, j = 0; k < b->param_count; k++) {
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        j = unit_in_run(run, at, j);
        if (j == run->unit_count)
            continue;
        run->params[k]->data = (act *)((uintptr_t)run->weights[j] + at->first * e->compute_bytes);
        run->params[k]->w_grad = run->grads[j] == NULL ? NULL : run->grads[j] + at->first;
    }
}

/* first of the future, and fetched, are these uses. */
static void
tell(spw_engine *e, int mode, const spw_store_use *uses, uint32_t count)
{
    const bool parts = e->layout.parts > 1;
    const spw_trace_rules rules = {
        .generations = e->generations,
        .units = e->layout.units,
        .wrap_step = mode == MODE_TRAIN ? 1 : 0,
        .max_elems = e->config.run.prefetch ? e->config.zero.prefetch_bucket_size / e->layout.parts : 0,
        .max = e->future_max - count};
    uint32_t n;
    e->told.goes_on = e->told.goes_on && e->told_mode == mode && count == 0 && !parts;
    e->told_mode = mode;
    for (uint32_t i = 0; i < count; i++)
        e->future[i] = uses[i];
    n = count + spw_trace_tell(&e->traces[mode], &rules, &e->told, e->future + count);
    e->told.goes_on = e->told.goes_on && count == 0;
    if (parts)
        spw__ranks_tell(e->ranks, e->future, n, count + e->told.ahead);
    else
        spw_store_future_goes_on(e->store, e->told.dropped, e->future, n, count + e->told.ahead);
}

void
spw__tell_future(spw_engine *e, int mode)
{
    if (e->config.run.prefetch)
        tell(e, mode, NULL, 0);
}

/* Acquires the units, notes that they were used, and makes them the run's. */
static spw_status
acquire(spw_engine *e, block_run *run, const spw_store_use *uses, uint32_t count, spw_error *err)
{
    const void **weights = run->weights + run->unit_count;
    if (run->gradients_alone)
        run->unit_count += count;
    if (run->gradients_alone || count == 0)
        return SPW_OK;
    SPW_TRY(e->layout.parts > 1 ? spw__ranks_acquire(e->ranks, uses, count, weights, err)
                                : spw_store_acquire(e->store, uses, count, weights, err));
    run->unit_count += count;
    for (uint32_t k = 0; k < count; k++)
        spw_trace_use(&e->traces[run->mode], uses[k].unit_idx);
    spw__tell_future(e, run->mode);
    return SPW_OK;
}

spw_status
spw__acquire_block(spw_engine *e, int mode, block_run *run, spw_error *err)
{
    spw_store_use uses[SPW_BLOCK_PARAMS_MAX];
    uint32_t units[SPW_BLOCK_PARAMS_MAX], all = spw__block_units(e, run->block_idx, units), count = 0;
    run->mode = mode;
    run->unit_count = 0;
    for (uint32_t k = 0; k < all; k++) {
        if (spw__in_turns(e, units[k]) || (e->layout.of_experts[units[k]] && mode == MODE_CHOICE))
            continue;
        add_unit(run, count, units[k]);
        uses[count++] = (spw_store_use){units[k], e->generations[units[k]]};
    }
    run->held = count;
    return acquire(e, run, uses, count, err);
}

/* Units from the first on. */
static void
release(spw_engine *e, const block_run *run, uint32_t first)
{
    for (uint32_t k = first; k < run->unit_count && !run->gradients_alone; k++) {
        if (e->layout.parts > 1)
            spw__ranks_release(e->ranks, run->units[k]);
        else
            spw_store_release(e->store, run->units[k], e->compute);
    }
}

void
spw__release_block(spw_engine *e, const block_run *run)
{
    release(e, run, 0);
}

/* ---------------------------------------------------------------- experts and pieces in turns */

/* Whose piece the *piece-th of the block's matrices in pieces is; which of that one's it is. NULL: there are fewer. */
static const spw_place *
piece_in(const spw_engine *e, uint32_t block_idx, uint64_t *piece)
{
    const spw_block *b = &e->model->blocks[block_idx];
    for (uint32_t k = 0; k < b->param_count; k++) {
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        if (at->pieces > 1 && *piece < at->pieces)
            return at;
        *piece -= at->pieces > 1 ? at->pieces : 0;
    }
    return NULL;
}

/*
 * Puts the unit that has the piece first of uses. Before the first turn of a backward pass what other turns have added up leaves, if it has
 * not, for it comes back in these.
 */
static spw_status
ask_for_piece(const block_run *run, uint64_t piece, bool backward, spw_store_use *uses, spw_error *err)
{
    const spw_place *at = piece_in(run->e, run->block_idx, &piece);
    uint32_t u = at->unit_idx + (uint32_t)piece;
    uses[0] = (spw_store_use){u, run->e->generations[u]};
    return backward && piece + 1 == at->pieces && run->e->layout.units[u].trainable
               ? spw__ship_grads(run->e, false, err)
               : SPW_OK;
}

/* Without gradients, and whole, only experts with rows are needed. routed NULL: all. */
static bool
is_needed(const spw_engine *e, const spw_routed *routed, uint32_t expert)
{
    return routed == NULL || !e->inference || e->layout.parts > 1 ||
           routed->ends[expert] > (expert > 0 ? routed->ends[expert - 1] : 0);
}

/* Puts the units of the needed ones among experts [first, end) behind count others; returns how many there are then. */
static uint32_t
ask_for_experts(const spw_engine *e, const block_run *run, const spw_routed *routed, uint64_t first, uint64_t end,
                spw_store_use *uses, uint32_t count)
{
    const spw_block *b = &e->model->blocks[run->block_idx];
    const uint32_t before = count;
    for (uint32_t k = 0; k < b->param_count; k++) {
        uint32_t expert = e->model->params[b->param_ids[k]].expert, u = e->layout.places[b->param_ids[k]].unit_idx;
        uint32_t i = before;
        if (expert <= first || expert > end || !is_needed(e, routed, expert - 1))
            continue;
        while (i < count && uses[i].unit_idx != u)
            i++;
        if (i == count)
            uses[count++] = (spw_store_use){u, e->generations[u]};
    }
    return count;
}

/*
 * Brings the units of these experts, or of this piece, which stay until their turn is over. Those that few rows have chosen are in no trace: all that are
 * still to come in this layer are put in front of the future.
 */
static spw_status
begin_turn(spw_engine *e, block_run *run, bool piece, const spw_routed *routed, uint64_t first, uint64_t end,
           bool backward, spw_error *err)
{
    spw_store_use uses[SPW_BLOCK_PARAMS_MAX];
    uint32_t count = 1;
    if (piece)
        SPW_TRY(ask_for_piece(run, first, backward, uses, err));
    else
        count = ask_for_experts(e, run, routed, first, end, uses, 0);
    SPW_ASSERT(run->unit_count == run->held);
    for (uint32_t k = 0; k < count; k++)
        add_unit(run, k, uses[k].unit_idx);
    if (run->mode != MODE_CHOICE) {
        SPW_TRY(acquire(e, run, uses, count, err));
        return backward ? spw__free_grad_buffers(e, run, run->held, err) : SPW_OK;
    }
    if (count == 0)
        return SPW_OK;
    tell(e, run->mode, uses, ask_for_experts(e, run, routed, end, routed->on_device.E, uses, count));
    SPW_TRY(spw_store_acquire(e->store, uses, count, run->weights + run->held, err));
    run->unit_count += count;
    return SPW_OK;
}

static spw_status
end_turn(spw_engine *e, block_run *run, spw_error *err)
{
    spw_status st;
    release(e, run, run->held);
    st = spw__send_grads(e, run, run->held, err);
    run->unit_count = run->held;
    return st;
}

/* A wait is none of compute's time, where that is taken. */
static spw_status
take_turn(block_run *run, bool piece, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn turn,
          spw_error *err)
{
    spw_engine *e = run->e;
    bool timed = run->timed.name != NULL;
    spw_status st;
    if (timed)
        spw__end_compute(e, run);
    st = turn == SPW_TURN_OVER ? end_turn(e, run, err)
                               : begin_turn(e, run, piece, routed, first, end, turn == SPW_TURN_BACKWARD, err);
    if (timed)
        run->timed = spw__begin_compute(e, run->timed.name);
    if (st == SPW_OK && turn == SPW_TURN_BACKWARD)
        st = spw__open_grads(e, run, run->held, err);
    return st;
}

/* What the tape tells of turns; ctx is the block_run. */
static spw_status
on_turn(void *ctx, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn turn, spw_error *err)
{
    SPW_TRY(take_turn(ctx, routed == NULL, routed, first, end, turn, err));
    if (turn != SPW_TURN_OVER)
        bind_params(ctx);
    return SPW_OK;
}

spw_status
spw__take_turn(block_run *run, uint64_t first, uint64_t end, spw_turn turn, spw_error *err)
{
    return take_turn(run, false, NULL, first, end, turn, err);
}

/* ---------------------------------------------------------------- forward */

static spw_status
note_peak(void *ctx, const spw_routed *routed, spw_error *err)
{
    spw_engine *e = ctx;
    const spw_routing *r = &routed->on_device;
    (void)err;
    for (uint64_t x = 0; x < r->E; x++) {
        double rows = (double)(routed->ends[x] - (x > 0 ? routed->ends[x - 1] : 0));
        double over = rows * (double)r->E / (double)(r->M * r->k);
        e->expert_peak = over > e->expert_peak ? over : e->expert_peak;
    }
    return SPW_OK;
}

/*
 * What blocks leave for later ones: one after another data of all rows of a group, and behind all of it, in training, their gradients alike.
 * Blocks below the lowest that is trained want none. Before memory is taken: places that nobody looks at.
 */
static void
find_sides(const spw_engine *e, const block_run *run, spw_side *sides)
{
    const spw_model_config *m = &e->model->config;
    char *data = e->sides != NULL ? e->sides : (char *)(uintptr_t)4096;
    uint64_t grads = spw__sides_bytes(e) / 2;
    for (uint32_t k = 0; k < SPW_SIDES_MAX; k++) {
        uint64_t cols = spw_model_side_cols(m, k), row = cols * e->compute_bytes;
        bool goes_back = cols > 0 && !e->inference && spw_model_side_block(m, k) >= e->lowest;
        char *at = data + run->side_row * row;
        sides[k] = (spw_side){.data = at,
                              .grad = goes_back ? at + grads : NULL,
                              .begun = goes_back && spw_model_side_reader(m, k) != run->block_idx,
                              .cols = cols};
        data += e->group_max * e->rows * row;
    }
}

/*
 * Where the block finds which keys are read, or leaves it: in training one after another for each layer that leaves it, of all rows of a group.
 */
static spw_choice
find_choice(const spw_engine *e, const block_run *run)
{
    const spw_model_config *m = &e->model->config;
    const spw_block *b = &e->model->blocks[run->block_idx];
    const uint64_t words = spw__choice_words(e), layer = b->layer_idx;
    spw_choice c = {.words = run->block_idx > 0 && run->block_idx + 1 < e->model->block_count ? words : 0};
    uint64_t lender = 0;
    if (m->keys_are_values) /* none leaves its choice to another */
        return spw_model_has_indexer(m, layer) ? c : (spw_choice){.words = 0};
    if (c.words == 0)
        return c;
    for (uint64_t l = 0; l < layer && !e->inference; l++)
        lender += spw_model_lends_choice(m, l);
    if (!spw_model_has_indexer(m, layer) && !e->inference)
        lender--; /* the last one before it */
    if (spw_model_lends_choice(m, layer) || !spw_model_has_indexer(m, layer))
        c.bits = (uint32_t *)(void *)(e->choices != NULL ? e->choices : (char *)(uintptr_t)4096) +
                 (lender * e->group_max * e->rows + run->side_row) * words;
    if (e->cache_slots > 0) {
        const layer_cache kept = spw__cache_of_layer(e, layer);
        c.cache = (e->cache != NULL ? e->cache : (char *)(uintptr_t)4096) + kept.at + kept.bytes[0] + kept.bytes[1];
    }
    return c;
}

spw_value *
spw__call_forward(spw_engine *e, block_run *run, const spw_batch *batch, spw_value *x, bool training, bool logits)
{
    const spw_block *b = &e->model->blocks[run->block_idx];
    const spw_model_config *m = &e->model->config;
    uint64_t table_elems = spw_model_rope_elems(m, spw__table_positions(e));
    static act *const want_logits = (act *)(uintptr_t)1;
    spw_side sides[SPW_SIDES_MAX];
    uint64_t pieces = 0;
    spw_call call = {.tape = e->tape,
                     .batch = batch,
                     .block = b,
                     .params = run->params,
                     .model = e->model,
                     .cos_sin = e->cos_sin + spw_model_rope_table(m, b->layer_idx) * table_elems,
                     .query_cos_sin = e->cos_sin + spw_model_query_table(m, b->layer_idx) * table_elems,
                     .sides = sides,
                     .choice = find_choice(e, run),
                     .training = training,
                     .logits_out = logits ? want_logits : NULL};
    run->e = e;
    find_sides(e, run, sides);
    for (uint32_t k = 0, j = 0; k < b->param_count; k++) {
        const spw_param *p = &e->model->params[b->param_ids[k]];
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        j = unit_in_run(run, at, j);
        bool there = j < run->unit_count; /* or it comes when it is chosen, or in its turn */
        run->params[k] = spw_tape_param(
            e->tape,
            !there || run->weights[j] == NULL ? NULL : (const char *)run->weights[j] + at->first * e->compute_bytes,
            !there || run->grads[j] == NULL ? NULL : run->grads[j] + at->first, &e->grad_begun[b->param_ids[k]],
            p->rows, p->cols);
        if (run->params[k] == NULL)
            continue;
        run->params[k]->trained = e->layout.units[at->unit_idx].trainable;
        run->params[k]->absent = run->gradients_alone;
        run->params[k]->piece_rows = at->pieces > 1 ? at->piece_elems / p->cols : 0;
        run->params[k]->pieces_before = pieces;
        pieces += at->pieces > 1 ? at->pieces : 0;
        run->params[k]->fp8 = e->config.run.fp8 && !e->inference && spw_model_is_dense(e->model, b, b->param_ids[k]);
    }
    if (training)
        spw_tape_on_route(e->tape, note_peak, e);
    if (e->in_turns || run->mode == MODE_CHOICE || pieces > 0)
        spw_tape_on_turn(e->tape, e->turn_experts > 0 ? e->turn_experts : 1, on_turn, run);
    return b->forward(&call, x);
}
