/*
 * Walking the chain: which units a block uses, their acquiring in the order of the trace, a group of micro-batches forward
 * and backward through block after block, and the gradients' way out. What a step is made of; when is engine_step.c's.
 */
#include "engine_internal.h"

/* ---------------------------------------------------------------- units of a block */

/* Which turn of its layer's experts a unit of experts is. */
static uint32_t
turn_of(const spw_engine *e, uint32_t unit_idx)
{
    uint32_t id = e->layout.param_ids[e->layout.param_first[unit_idx]];
    return (e->model->params[id].expert - 1) / e->turn_experts;
}

static bool
comes_before(const spw_engine *e, uint32_t a, uint32_t b)
{
    const spw_layout *l = &e->layout;
    if (l->of_experts[a] || l->of_experts[b])
        return l->of_experts[a] == l->of_experts[b] ? a < b : l->of_experts[b];
    return l->units[a].elems > l->units[b].elems;
}

/*
 * Units whose parameters a block uses, its own and external ones, without repeats; the largest first, which is the order
 * of acquiring: a small one that is held in the middle of the device's cache can keep a large one out for good. Those of experts
 * come last, in the order of the experts.
 */
uint32_t
spw__block_units(const spw_engine *e, uint32_t block_idx, uint32_t *out)
{
    const spw_block *b = &e->model->blocks[block_idx];
    uint32_t n = 0;
    for (uint32_t k = 0; k < b->param_count; k++) {
        uint32_t u = e->layout.places[b->param_ids[k]].unit_idx, j = 0;
        while (j < n && out[j] != u)
            j++;
        if (j < n)
            continue;
        for (n++; j > 0 && comes_before(e, u, out[j - 1]); j--)
            out[j] = out[j - 1];
        out[j] = u;
    }
    return n;
}

uint32_t
spw__block_turns(const spw_engine *e, const uint32_t *units, uint32_t count)
{
    uint32_t k = 0;
    while (k < count && !(e->in_turns && e->layout.of_experts[units[k]]))
        k++;
    return k;
}

uint32_t
spw__turn_units(const spw_engine *e, const uint32_t *units, uint32_t count, bool last)
{
    uint32_t n = 0;
    while (n < count && turn_of(e, units[last ? count - 1 - n : n]) == turn_of(e, units[last ? count - 1 : 0]))
        n++;
    return n;
}

uint64_t
spw__grad_elems(const spw_engine *e, uint32_t unit_idx)
{
    const uint32_t parts = e->layout.parts, replicas = spw__replicas(e);
    const uint64_t part = e->layout.units[unit_idx].elems;
    if (parts == 1)
        return spw_layout_part(part, replicas) * replicas;
    return spw_round_up((parts - 1) * part + spw__share_elems(part, replicas) * replicas, 4096);
}

/*
 * Elements of device cache in which units fit one after another, wherever those before lie: k units that are held leave k + 1
 * gaps at most, and when all of them together hold k + 1 times the next one, it fits in one of them.
 */
static uint64_t
elems_for(const spw_engine *e, const uint32_t *units, uint32_t count, uint32_t already, uint64_t held)
{
    uint64_t least = 0;
    for (uint32_t k = 0; k < count; k++) {
        uint64_t elems = spw__layout_on_device(&e->layout, units[k]), next = held + (already + k + 1) * elems;
        least = next > least ? next : least;
        held += elems;
    }
    return least;
}

/* Of a block's units; of experts that come in turns, one turn's. */
uint64_t
spw__block_elems(const spw_engine *e, uint32_t block_idx)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], n = spw__block_units(e, block_idx, units), core = 0;
    uint64_t held = 0, least;
    for (; core < n && !e->layout.of_experts[units[core]]; core++)
        held += spw__layout_on_device(&e->layout, units[core]);
    least = elems_for(e, units, core, 0, 0);
    for (uint32_t k = core, count; k < n; k += count) {
        uint64_t turn;
        count = spw__turn_units(e, units + k, n - k, false);
        turn = held;
        for (uint32_t i = k; i < k + count; i++)
            turn += spw__layout_on_device(&e->layout, units[i]);
        if (e->layout.granule == 0) /* else multiples of an expert lie in front of and between all others */
            turn = elems_for(e, units + k, count, core, held);
        least = turn > least ? turn : least;
    }
    return least;
}

uint32_t
spw__lowest_trained(const spw_engine *e, const uint32_t *chain, uint32_t count)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    for (uint32_t c = 0; c + 1 < count; c++) {
        uint32_t n = spw__block_units(e, chain[c], units);
        for (uint32_t k = 0; k < n; k++) {
            if (e->layout.units[units[k]].trainable)
                return c;
        }
    }
    return count - 1; /* the loss is made there */
}

uint32_t
spw__kept_blocks(uint32_t lowest, uint32_t count)
{
    uint32_t first = lowest > 0 ? lowest : 1;
    return count - 1 > first ? count - 1 - first : 0;
}

void
spw__note_uses(spw_engine *e)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->first_use[u] = e->last_use[u] = -1;
    for (uint32_t c = 0; c < e->chain_count; c++) {
        uint32_t n = spw__block_units(e, e->chain[c], units);
        for (uint32_t k = 0; k < n; k++) {
            if (e->first_use[units[k]] < 0)
                e->first_use[units[k]] = (int32_t)c;
            e->last_use[units[k]] = (int32_t)c;
        }
    }
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->takes_part[u] = e->first_use[u] >= 0 && e->layout.units[u].trainable;
    e->lowest = spw__lowest_trained(e, e->chain, e->chain_count);
}

static void tell(spw_engine *e, int mode, const spw_store_use *uses, uint32_t count);
static spw_status
take_turn(void *ctx, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn turn, spw_error *err);

/* ---------------------------------------------------------------- running one block */

static uint32_t
unit_in_run(const block_run *run, uint32_t unit_idx)
{
    uint32_t j = 0;
    while (j < run->unit_count && run->units[j] != unit_idx)
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
    for (uint32_t k = 0; k < b->param_count; k++) {
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        uint32_t j = unit_in_run(run, at->unit_idx);
        if (j == run->unit_count)
            continue;
        run->params[k]->data = (act *)((uintptr_t)run->weights[j] + at->first * e->compute_bytes);
        run->params[k]->w_grad = run->grads[j] == NULL ? NULL : run->grads[j] + at->first;
    }
}

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

spw_value *
spw__call_forward(spw_engine *e, block_run *run, const spw_batch *batch, spw_value *x, bool training, bool logits)
{
    const spw_block *b = &e->model->blocks[run->block_idx];
    const spw_model_config *m = &e->model->config;
    uint64_t table = spw_model_rope_table(m, b->layer_idx) * spw__table_positions(e) * m->head_dim;
    static act *const want_logits = (act *)(uintptr_t)1;
    spw_call call = {.tape = e->tape,
                     .batch = batch,
                     .block = b,
                     .params = run->params,
                     .model = e->model,
                     .cos_sin = e->cos_sin + table,
                     .training = training,
                     .logits_out = logits ? want_logits : NULL};
    run->e = e;
    for (uint32_t k = 0; k < b->param_count; k++) {
        const spw_param *p = &e->model->params[b->param_ids[k]];
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        uint32_t j = unit_in_run(run, at->unit_idx);
        bool there = j < run->unit_count; /* or it comes when it is chosen, or in its turn */
        run->params[k] = spw_tape_param(
            e->tape,
            !there || run->weights[j] == NULL ? NULL : (const char *)run->weights[j] + at->first * e->compute_bytes,
            !there || run->grads[j] == NULL ? NULL : run->grads[j] + at->first, &e->grad_begun[b->param_ids[k]],
            p->rows, p->cols);
        if (run->params[k] != NULL)
            run->params[k]->fp8 =
                e->config.run.fp8 && !e->inference && spw_model_is_dense(e->model, b, b->param_ids[k]);
    }
    if (training)
        spw_tape_on_route(e->tape, note_peak, e);
    if (e->in_turns || run->mode == MODE_CHOICE)
        spw_tape_on_turn(e->tape, e->turn_experts, take_turn, run);
    return b->forward(&call, x);
}

char *
spw__flow(const spw_engine *e, uint32_t turn, uint32_t micro)
{
    return e->flow +
           ((uint64_t)(turn % 2) * e->group_max + micro) * e->rows * e->model->config.width * e->compute_bytes;
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
    return (c - (e->lowest > 0 ? e->lowest : 1)) * e->group_max + micro;
}

/* Memory in which what this block computes for a micro-batch is kept for the backward pass; NULL: it is computed again. */
static char *
tape_of(const spw_engine *e, uint32_t c, uint32_t micro)
{
    uint32_t after; /* checkpoints from this one on, in the order of the forward pass */
    if (!kept(e, c))
        return NULL;
    after = spw__kept_blocks(e->lowest, e->chain_count) * e->group_max - checkpoint_of(e, c, micro);
    return after <= e->plan.tape_count ? e->tapes + (after - 1) * e->tape_bytes : NULL;
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
    return (uint64_t)micro * e->world + e->rank;
}

static spw_batch
batch_of(const spw_engine *e, uint32_t micro)
{
    const int32_t *documents = e->documents != NULL ? e->documents + micro * e->rows : NULL;
    uint64_t all = e->micro_max * e->rows;
    return (spw_batch){.sequences = e->B,
                       .positions = e->T,
                       .tokens = e->tokens + micro * e->rows,
                       .targets = e->targets + micro * e->rows,
                       .places = documents != NULL ? documents : e->places,
                       .begins = documents != NULL ? documents + all : NULL,
                       .ends = documents != NULL ? documents + 2 * all : NULL,
                       .losses = e->losses + micro * e->rows,
                       .grad_scale = (float)(e->scaler.scale / (double)e->target_count),
                       .balance = (float)(e->config.run.router_balance * e->scaler.scale /
                                          (double)(e->config.accumulation * e->world)),
                       .dropout_key = e->config.run.seed,
                       .dropout_counter = (e->step_count << 20) + world_micro(e, micro)};
}

/* ---------------------------------------------------------------- uses */

/* first of the future, and fetched, are these uses. */
static void
tell(spw_engine *e, int mode, const spw_store_use *uses, uint32_t count)
{
    uint32_t n, ahead;
    for (uint32_t i = 0; i < count; i++)
        e->future[i] = uses[i];
    n = count + spw_trace_future(&e->traces[mode], e->generations, mode == MODE_TRAIN ? 1 : 0, e->future + count,
                                 e->future_max - count);
    for (uint32_t i = count; i < n; i++) { /* what is frozen stays at the generation it has */
        if (!e->layout.units[e->future[i].unit_idx].trainable)
            e->future[i].generation = e->generations[e->future[i].unit_idx];
    }
    ahead = count + spw_trace_ahead(e->future + count, e->config.run.prefetch ? n - count : 0, e->layout.units,
                                    e->config.zero.prefetch_bucket_size / e->layout.parts);
    if (e->layout.parts > 1)
        spw__ranks_tell(e->ranks, e->future, n, ahead);
    else
        spw_store_set_future(e->store, e->future, n, ahead);
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
    if (count == 0)
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
        if (e->layout.of_experts[units[k]] && (mode == MODE_CHOICE || e->in_turns))
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
    for (uint32_t k = first; k < run->unit_count; k++) {
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

/* ---------------------------------------------------------------- forward and backward over a group */

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

static void
copied_out(void *arg, const char *name, uint64_t unit_idx, uint64_t begin_ns, uint64_t end_ns)
{
    (void)arg;
    spw_timeline_add(SPW_LANE_D2H, name, unit_idx, begin_ns, end_ns);
}

static compute_span
begin_compute(spw_engine *e, const char *name)
{
    if (!e->host_addressable)
        spw_gpu_span_begin(e->compute, name);
    return (compute_span){name, spw_now_ns(), waited_ns(e)};
}

/* Counts what the thread computed, or lets a device that works by itself tell what it did. */
static void
end_compute(spw_engine *e, const block_run *run)
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
    spw_gpu_copy_d2d(e->compute, out, e->compute_dtype, y->data, e->compute_dtype, e->rows * e->model->config.width,
                     NULL);
    if (!keep || !kept(e, c))
        return SPW_OK;
    if (in_flow)
        e->flow_lent[c % 2 * e->group_max + micro] = checkpoint_of(e, c, micro);
    return spw_act_put(e->act, checkpoint_of(e, c, micro), out, e->compute, err);
}

spw_status
spw__forward_group(spw_engine *e, int mode, uint32_t first, uint32_t count, bool keep, spw_error *err)
{
    uint32_t last = e->chain_count - 1;
    if (keep)
        SPW_TRY(begin_keeping(e, err));
    for (uint32_t c = 0; c < last + (keep ? 0u : 1u); c++) {
        block_run run = {.block_idx = e->chain[c], .at = c};
        spw_status st = SPW_OK;
        SPW_TRY(spw__acquire_block(e, mode, &run, err));
        run.timed = begin_compute(e, "forward");
        for (uint32_t i = 0; i < count && st == SPW_OK; i++) {
            spw_batch batch = batch_of(e, first + i);
            spw_value *x = NULL, *y;
            char *tape = keep ? tape_of(e, c, i) : NULL;
            if (tape != NULL)
                spw_tape_reset_keeping(e->tape, tape, e->tape_bytes);
            else
                spw_tape_reset(e->tape, e->arena, e->arena_bytes, false);
            if (c > 0)
                x = spw_tape_input(e->tape, keep ? input_of(e, c, i) : spw__flow(e, c, i), e->rows,
                                   e->model->config.width, false);
            y = spw__call_forward(e, &run, &batch, x, keep, false);
            st = spw_tape_check(e->tape, err);
            if (st == SPW_OK && c < last)
                st = pass_on(e, y, c + 1, i, keep, err);
        }
        end_compute(e, &run);
        spw__release_block(e, &run);
        SPW_TRY(st);
    }
    if (keep)
        spw_act_turn(e->act);
    return SPW_OK;
}

static void
wait_d2h(spw_engine *e)
{
    uint64_t begin = spw_now_ns();
    spw_gpu_queue_sync(e->d2h);
    e->stall_ns[SPW_STALL_D2H] += spw_now_ns() - begin;
}

spw_status
spw__wait_grads(spw_engine *e, spw_error *err)
{
    if (e->ranks != NULL)
        return spw__ranks_wait_reduced(e->ranks, err);
    wait_d2h(e);
    return SPW_OK;
}

static grad_buffer *
buffer_of(spw_engine *e, uint32_t unit_idx)
{
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        if (e->buffers[i].unit_idx == unit_idx)
            return &e->buffers[i];
    }
    return NULL;
}

/*
 * Makes ready for a unit's gradient, or, once all blocks that use it had their turn (over), fills in what nobody wrote. A matrix is
 * not zeroed before: what is computed first is written there.
 */
static void
clear_grad(spw_engine *e, uint32_t unit_idx, float *data, bool over)
{
    uint64_t at = 0, elems = spw__grad_elems(e, unit_idx);
    if (!over && e->config.run.chaos_seed != 0 && e->host_addressable)
        memset(data, 0xff, elems * sizeof(float));
    for (uint32_t k = e->layout.param_first[unit_idx]; k < e->layout.param_first[unit_idx + 1]; k++) {
        uint32_t p = e->layout.param_ids[k];
        const spw_place *place = &e->layout.places[p];
        bool matrix = e->model->params[p].rows > 1 && e->model->params[p].cols > 1;
        if (over && !e->grad_begun[p])
            spw_gpu_zero(e->compute, data + place->first, place->elems * sizeof(float));
        if (!over && matrix && place->first > at)
            spw_gpu_zero(e->compute, data + at, (place->first - at) * sizeof(float));
        at = matrix ? place->first + place->elems : at;
        e->grad_begun[p] = over || !matrix;
    }
    if (!over && at < elems)
        spw_gpu_zero(e->compute, data + at, (elems - at) * sizeof(float));
}

static void
grad_arrived(void *arg)
{
    grad_note *note = arg;
    spw__ahead_see(note->engine, note->unit_idx);
    spw_store_grad_ready(note->engine->store, note->unit_idx);
}

/* The buffer that waits longest for its copy to the store; NULL: none does. */
static grad_buffer *
leaving(spw_engine *e)
{
    grad_buffer *first = NULL;
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        grad_buffer *b = &e->buffers[i];
        if (b->leaves && (first == NULL || b->turn < first->turn))
            first = b;
    }
    return first;
}

/* Waits for the gradient's memory, if records are still there. */
static spw_status
ship_grad(spw_engine *e, grad_buffer *b, spw_error *err)
{
    uint32_t unit_idx = b->unit_idx;
    uint64_t elems = e->layout.units[unit_idx].elems;
    double *sums = b->final ? e->partials + e->unit_partial[unit_idx] : NULL;
    spw_gpu_queue *out = e->d2h;
    SPW_TRY(spw_store_grad_open(e->store, unit_idx, err));
    if (spw_store_grad_on_device(e->store, unit_idx)) { /* it stays there, and so does the order of compute */
        out = e->compute;
        spw_gpu_copy_d2d(out, spw_store_grad(e->store, unit_idx), e->config.run.grad_dtype, b->data, SPW_F32, elems,
                         sums);
    } else {
        spw_gpu_event_wait(b->made, out);
        spw_gpu_span_begin(out, "gradient");
        spw_gpu_copy_d2h(out, spw_store_grad(e->store, unit_idx), e->config.run.grad_dtype, b->data, SPW_F32, elems,
                         sums);
        spw_gpu_span_end(out, unit_idx, copied_out, NULL);
        e->d2h_bytes += elems * spw_dtype_bytes(e->config.run.grad_dtype);
    }
    spw_gpu_event_record(b->sent, out);
    b->unit_idx = UINT32_MAX;
    b->leaves = false;
    if (b->final) {
        e->notes[unit_idx] = (grad_note){e, unit_idx};
        spw_gpu_queue_notify(out, grad_arrived, &e->notes[unit_idx]);
    }
    return SPW_OK;
}

/* Of those that fit the one idle longest. */
static grad_buffer *
free_buffer(spw_engine *e, uint32_t unit_idx)
{
    const uint64_t elems = spw__grad_elems(e, unit_idx);
    grad_buffer *best = NULL;
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        grad_buffer *b = &e->buffers[i];
        bool fits = b->unit_idx == UINT32_MAX && b->owner == UINT32_MAX && b->elems >= elems &&
                    b->of_experts == e->layout.of_experts[unit_idx];
        if (b->owner == unit_idx)
            return b->unit_idx == UINT32_MAX ? b : NULL;
        if (fits && (best == NULL || b->turn < best->turn))
            best = b;
    }
    return best;
}

/* Sends gradients on their way until a buffer for the unit's is free, or none is left to send. */
static spw_status
make_free(spw_engine *e, uint32_t unit_idx, spw_error *err)
{
    grad_buffer *b;
    while (free_buffer(e, unit_idx) == NULL && (b = leaving(e)) != NULL)
        SPW_TRY(ship_grad(e, b, err));
    return SPW_OK;
}

/* A free buffer for the unit, cleared or, in a later group, holding what earlier groups added up. */
static spw_status
open_grad(spw_engine *e, uint32_t unit_idx, bool later_group, spw_error *err)
{
    uint64_t elems = spw__grad_elems(e, unit_idx), begin;
    grad_buffer *best;
    SPW_TRY(make_free(e, unit_idx, err));
    best = free_buffer(e, unit_idx);
    if (best == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "the chain needs more gradient buffers at once than chain_extra allows");
    best->unit_idx = unit_idx;
    best->turn = ++e->buffer_turn;
    if (e->ranks != NULL) {
        SPW_TRY(spw__ranks_wait_free(e->ranks, best, err));
        clear_grad(e, unit_idx, best->data, false); /* passes are added up by the sum over the ranks */
        return SPW_OK;
    }
    begin = spw_now_ns();
    spw_gpu_event_wait(best->sent, e->compute);
    if (later_group && spw_store_grad_on_device(e->store, unit_idx)) {
        spw_gpu_copy_d2d(e->compute, best->data, SPW_F32, spw_store_grad(e->store, unit_idx), e->config.run.grad_dtype,
                         elems, NULL);
        return SPW_OK;
    }
    if (later_group) /* the earlier group's sum may still be on its way out of another buffer */
        spw_gpu_event_wait(e->passed, e->compute);
    e->stall_ns[SPW_STALL_D2H] += spw_now_ns() - begin;
    if (later_group) {
        spw_gpu_copy_h2d(e->compute, best->data, SPW_F32, spw_store_grad(e->store, unit_idx), e->config.run.grad_dtype,
                         elems);
        e->h2d_bytes += elems * spw_dtype_bytes(e->config.run.grad_dtype);
    } else {
        clear_grad(e, unit_idx, best->data, false);
    }
    return SPW_OK;
}

static spw_status
send_grad(spw_engine *e, uint32_t unit_idx, bool later_group, bool final_group, spw_error *err)
{
    grad_buffer *b = buffer_of(e, unit_idx);
    clear_grad(e, unit_idx, b->data, true);
    if (e->ranks != NULL) {
        b->unit_idx = UINT32_MAX;
        spw__ranks_send(e->ranks, unit_idx, b, later_group, final_group);
        return SPW_OK;
    }
    spw_gpu_event_record(b->made, e->compute);
    b->turn = ++e->buffer_turn;
    b->leaves = true;
    b->final = final_group;
    while ((b = leaving(e)) != NULL && spw_store_grad_ask(e->store, b->unit_idx))
        SPW_TRY(ship_grad(e, b, err));
    return SPW_OK;
}

/*
 * The gradient of x[c] lies in the flow at turn c + 1: where the block's output had its own before, or, for the last
 * block, where x[c - 1] leaves from.
 */
static spw_status
backward_block(spw_engine *e, block_run *run, uint32_t c, uint32_t first, uint32_t count, spw_error *err)
{
    bool last = c + 1 == e->chain_count;
    for (uint32_t i = 0; i < count; i++) {
        spw_batch batch = batch_of(e, first + i);
        spw_value *x = NULL, *y;
        void *data = spw__flow(e, c, i);
        if (kept(e, c))
            SPW_TRY(spw_act_get(e->act, checkpoint_of(e, c, i), &data, err));
        if (tape_of(e, c, i) != NULL)
            spw_tape_reset_kept(e->tape, tape_of(e, c, i), e->tape_bytes, e->arena, e->arena_bytes);
        else
            spw_tape_reset(e->tape, e->arena, e->arena_bytes, true);
        if (c > 0) {
            bool on = c > e->lowest; /* below it nothing asks for a gradient */
            x = spw_tape_input(e->tape, data, e->rows, e->model->config.width, on);
            SPW_TRY(settle_flow(e, c + 1, i, err));
            x->grad = on ? spw__flow(e, c + 1, i) : NULL;
        }
        y = spw__call_forward(e, run, &batch, x, true, false);
        if (y != NULL && !last)
            y->grad = spw__flow(e, c + 2, i);
        spw_tape_backward(e->tape, y);
        SPW_TRY(spw_tape_check(e->tape, err));
        if (kept(e, c))
            spw_act_release(e->act, checkpoint_of(e, c, i), e->compute);
    }
    return SPW_OK;
}

/* A buffer will be free for the gradient of each of the run's units from the first on that is made here first. */
static spw_status
free_buffers(spw_engine *e, const block_run *run, uint32_t first, spw_error *err)
{
    for (uint32_t k = first; k < run->unit_count; k++) {
        if (e->layout.units[run->units[k]].trainable && e->last_use[run->units[k]] == (int32_t)run->at)
            SPW_TRY(make_free(e, run->units[k], err));
    }
    return SPW_OK;
}

static spw_status
open_grads(spw_engine *e, block_run *run, uint32_t first, spw_error *err)
{
    for (uint32_t k = first; k < run->unit_count; k++) {
        uint32_t u = run->units[k];
        if (!e->layout.units[u].trainable)
            continue;
        if (e->first_use[u] == (int32_t)run->at)
            spw_store_grad_ask(e->store, u);
        if (e->last_use[u] == (int32_t)run->at)
            SPW_TRY(open_grad(e, u, run->later_group, err));
        run->grads[k] = buffer_of(e, u)->data;
    }
    return SPW_OK;
}

static spw_status
send_grads(spw_engine *e, const block_run *run, uint32_t first, spw_error *err)
{
    for (uint32_t k = first; k < run->unit_count; k++) {
        if (run->grads[k] != NULL && e->first_use[run->units[k]] == (int32_t)run->at)
            SPW_TRY(send_grad(e, run->units[k], run->later_group, run->final_group, err));
    }
    return SPW_OK;
}

/* Without gradients, and whole, only experts with rows are needed. */
static bool
is_needed(const spw_engine *e, const spw_routed *routed, uint32_t expert)
{
    return !e->inference || e->layout.parts > 1 || routed->ends[expert] > (expert > 0 ? routed->ends[expert - 1] : 0);
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
 * Brings the units of these experts, which stay until their turn is over. Those that few rows have chosen are in no trace: all that are
 * still to come in this layer are put in front of the future.
 */
static spw_status
begin_turn(spw_engine *e, block_run *run, const spw_routed *routed, uint64_t first, uint64_t end, bool backward,
           spw_error *err)
{
    spw_store_use uses[SPW_BLOCK_PARAMS_MAX];
    uint32_t count = ask_for_experts(e, run, routed, first, end, uses, 0);
    SPW_ASSERT(run->unit_count == run->held);
    for (uint32_t k = 0; k < count; k++)
        add_unit(run, k, uses[k].unit_idx);
    if (run->mode != MODE_CHOICE) {
        SPW_TRY(acquire(e, run, uses, count, err));
        return backward ? free_buffers(e, run, run->held, err) : SPW_OK;
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
    st = send_grads(e, run, run->held, err);
    run->unit_count = run->held;
    return st;
}

/* What the tape tells of turns; ctx is the block_run. A wait is none of compute's time, where that is taken. */
static spw_status
take_turn(void *ctx, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn turn, spw_error *err)
{
    block_run *run = ctx;
    spw_engine *e = run->e;
    bool timed = run->timed.name != NULL;
    spw_status st;
    if (timed)
        end_compute(e, run);
    st = turn == SPW_TURN_OVER ? end_turn(e, run, err)
                               : begin_turn(e, run, routed, first, end, turn == SPW_TURN_BACKWARD, err);
    if (timed)
        run->timed = begin_compute(e, run->timed.name);
    if (st == SPW_OK && turn == SPW_TURN_BACKWARD)
        st = open_grads(e, run, run->held, err);
    if (st == SPW_OK && turn != SPW_TURN_OVER)
        bind_params(run);
    return st;
}

spw_status
spw__backward_group(spw_engine *e, uint32_t first, uint32_t count, bool later_group, bool final_group, spw_error *err)
{
    for (uint32_t c = e->chain_count; c-- > e->lowest;) {
        block_run run = {.block_idx = e->chain[c], .at = c, .later_group = later_group, .final_group = final_group};
        spw_status st;
        SPW_TRY(spw__acquire_block(e, MODE_TRAIN, &run, err));
        st = free_buffers(e, &run, 0, err); /* a wait is none of compute's time */
        run.timed = begin_compute(e, "backward");
        if (st == SPW_OK)
            st = open_grads(e, &run, 0, err);
        if (st == SPW_OK)
            st = backward_block(e, &run, c, first, count, err);
        end_compute(e, &run);
        spw__release_block(e, &run);
        if (st == SPW_OK)
            st = send_grads(e, &run, 0, err);
        if (st != SPW_OK)
            return st;
    }
    for (grad_buffer *b; (b = leaving(e)) != NULL;)
        SPW_TRY(ship_grad(e, b, err));
    if (!final_group)
        spw_gpu_event_record(e->passed, e->d2h);
    return SPW_OK;
}
