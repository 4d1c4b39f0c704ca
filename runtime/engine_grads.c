/*
 * Gradients' buffers on the device: a unit has one while blocks that use it have their turn in the backward pass, and then it leaves for
 * the store, or for the other ranks. A buffer is free once its copy is on its way; whoever needs one sends others off first. Where passes hold
 * their sums (engine_choose.c), each unit has one of its own, which stays open to the last pass. A gradient that stays on the device as it is
 * made is made in the store's memory, and nothing is copied.
 */
#include "engine_internal.h"

static void
copied_out(void *arg, const char *name, uint64_t unit_idx, uint64_t begin_ns, uint64_t end_ns)
{
    (void)arg;
    spw_timeline_add(SPW_LANE_D2H, name, unit_idx, begin_ns, end_ns);
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
        const spw_place place = spw__layout_in_unit(&e->layout, p, unit_idx);
        bool matrix = e->model->params[p].rows > 1 && e->model->params[p].cols > 1;
        if (over && !e->grad_begun[p])
            spw_gpu_zero(e->compute, data + place.first, place.elems * sizeof(float));
        if (!over && matrix && place.first > at)
            spw_gpu_zero(e->compute, data + at, (place.first - at) * sizeof(float));
        at = matrix ? place.first + place.elems : at;
        e->grad_begun[p] = over || !matrix;
    }
    if (!over && at < elems)
        spw_gpu_zero(e->compute, data + at, (elems - at) * sizeof(float));
}

static void
grad_arrived(void *arg)
{
    grad_note *note = arg;
    spw__squares_see(note->engine, note->unit_idx);
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

/* What computes goes on: copies and sums of squares have a queue of their own. Waits for the gradient's memory, if records are still there. */
static spw_status
ship_grad(spw_engine *e, grad_buffer *b, spw_error *err)
{
    uint32_t unit_idx = b->unit_idx;
    uint64_t elems = e->layout.units[unit_idx].elems;
    double *sums = b->final ? e->partials + e->unit_partial[unit_idx] : NULL;
    spw_dtype type = e->config.run.grad_dtype;
    bool stays = b->at != b->data;
    b->unit_idx = UINT32_MAX;
    b->leaves = false;
    if (stays && !b->final) /* the next pass adds to it */
        return SPW_OK;
    if (!stays)
        SPW_TRY(spw_store_grad_open(e->store, unit_idx, err));
    spw_gpu_event_wait(b->made, e->d2h);
    spw_gpu_span_begin(e->d2h, "gradient");
    if (stays) {
        spw_gpu_sumsq(e->d2h, sums, b->at, elems);
    } else if (spw_store_grad_on_device(e->store, unit_idx)) {
        spw_gpu_copy_d2d(e->d2h, spw_store_grad(e->store, unit_idx), type, b->data, SPW_F32, elems, sums);
    } else {
        spw_gpu_copy_d2h(e->d2h, spw_store_grad(e->store, unit_idx), type, b->data, SPW_F32, elems, sums);
        e->d2h_bytes += elems * spw_dtype_bytes(type);
    }
    spw_gpu_span_end(e->d2h, unit_idx, copied_out, NULL);
    spw_gpu_event_record(b->sent, e->d2h);
    if (b->final) {
        e->notes[unit_idx] = (grad_note){e, unit_idx};
        spw_gpu_queue_notify(e->d2h, grad_arrived, &e->notes[unit_idx]);
    }
    return SPW_OK;
}

/* Of those that fit the one idle longest. */
static grad_buffer *
free_buffer(spw_engine *e, uint32_t unit_idx)
{
    const uint64_t elems = spw__grad_elems(e, unit_idx);
    const uint32_t kind = spw__grad_kind(e, unit_idx);
    grad_buffer *best = NULL;
    for (uint32_t i = 0; i < e->buffer_count; i++) {
        grad_buffer *b = &e->buffers[i];
        bool fits = b->unit_idx == UINT32_MAX && b->owner == UINT32_MAX && b->elems >= elems && b->kind == kind;
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

/* What was added up before, from the store; their sums may still be on their way there out of another buffer. */
static void
fetch_sum(spw_engine *e, uint32_t unit_idx, float *data)
{
    const void *sum = spw_store_grad(e->store, unit_idx);
    spw_dtype type = e->config.run.grad_dtype;
    uint64_t elems = e->layout.units[unit_idx].elems;
    spw_gpu_event_wait(e->passed, e->compute);
    if (spw_store_grad_on_device(e->store, unit_idx)) {
        spw_gpu_copy_d2d(e->compute, data, SPW_F32, sum, type, elems, NULL);
    } else {
        spw_gpu_copy_h2d(e->compute, data, SPW_F32, sum, type, elems);
        e->h2d_bytes += elems * spw_dtype_bytes(type);
    }
}

/* A free buffer for the unit, cleared or, in a later group, holding what earlier groups added up. */
static spw_status
open_grad(spw_engine *e, uint32_t unit_idx, bool later_group, spw_error *err)
{
    bool stays = spw_store_grad_on_device(e->store, unit_idx) && e->config.run.grad_dtype == SPW_F32;
    uint64_t begin;
    grad_buffer *best;
    SPW_TRY(make_free(e, unit_idx, err));
    best = free_buffer(e, unit_idx);
    if (best == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "the chain needs more gradient buffers at once than chain_extra allows");
    best->unit_idx = unit_idx;
    best->turn = ++e->buffer_turn;
    best->at = best->data;
    if (e->ranks != NULL) {
        SPW_TRY(spw__ranks_wait_free(e->ranks, best, err));
        clear_grad(e, unit_idx, best->data, false); /* passes are added up by the sum over the ranks */
        return SPW_OK;
    }
    SPW_ASSERT(stays || !e->grads_stay);
    if (stays) { /* after the last step's update of it, for which the forward pass has waited */
        SPW_TRY(spw_store_grad_open(e->store, unit_idx, err));
        best->at = spw_store_grad(e->store, unit_idx);
    } else {
        begin = spw_now_ns();
        spw_gpu_event_wait(best->sent, e->compute);
        e->stall_ns[SPW_STALL_D2H] += spw_now_ns() - begin;
        if (later_group)
            fetch_sum(e, unit_idx, best->data);
    }
    if (!later_group)
        clear_grad(e, unit_idx, best->at, false);
    return SPW_OK;
}

static spw_status
send_grad(spw_engine *e, uint32_t unit_idx, bool later_group, bool final_group, spw_error *err)
{
    grad_buffer *b = buffer_of(e, unit_idx);
    spw__late_may(e, unit_idx);
    clear_grad(e, unit_idx, b->at, true);
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
 * Is the unit's gradient opened, and sent, when the block at this place has its turn? Once each for all blocks that use it and all micro-batches
 * of the pass; but that of a piece leaves with each of its turns, and what was added up comes back for the next.
 */
static bool
opens(const spw_engine *e, const block_run *run, uint32_t unit_idx)
{
    return e->layout.units[unit_idx].trainable &&
           (e->layout.of_vocab[unit_idx] || e->last_use[unit_idx] == (int32_t)run->at);
}

static bool
sends(const spw_engine *e, const block_run *run, uint32_t unit_idx)
{
    return e->layout.of_vocab[unit_idx] || e->first_use[unit_idx] == (int32_t)run->at;
}

/* Sums that passes hold leave in the last one. */
static bool
leaves_now(const spw_engine *e, const block_run *run)
{
    return !e->holds || run->final_group;
}

/* Of sums that there are already. */
static bool
is_later(const spw_engine *e, const block_run *run, uint32_t unit_idx)
{
    bool again = run->later_micro || e->last_use[unit_idx] != (int32_t)run->at;
    return (run->later_group && !e->holds) || (e->layout.of_vocab[unit_idx] && again);
}

static bool
is_final(const spw_engine *e, const block_run *run, uint32_t unit_idx)
{
    return run->final_group && e->first_use[unit_idx] == (int32_t)run->at &&
           (run->final_micro || !e->layout.of_vocab[unit_idx]);
}

/* A buffer will be free for the gradient of each of the run's units from the first on that is made here first. */
spw_status
spw__free_grad_buffers(spw_engine *e, const block_run *run, uint32_t first, spw_error *err)
{
    for (uint32_t k = first; k < run->unit_count; k++) {
        if (opens(e, run, run->units[k]))
            SPW_TRY(make_free(e, run->units[k], err));
    }
    return SPW_OK;
}

spw_status
spw__open_grads(spw_engine *e, block_run *run, uint32_t first, spw_error *err)
{
    for (uint32_t k = first; k < run->unit_count; k++) {
        uint32_t u = run->units[k];
        if (!e->layout.units[u].trainable)
            continue;
        if (e->first_use[u] == (int32_t)run->at && leaves_now(e, run))
            spw_store_grad_ask(e->store, u);
        if (opens(e, run, u) && buffer_of(e, u) == NULL) /* else an earlier pass left it open */
            SPW_TRY(open_grad(e, u, is_later(e, run, u), err));
        run->grads[k] = buffer_of(e, u)->at;
    }
    return SPW_OK;
}

spw_status
spw__send_grads(spw_engine *e, const block_run *run, uint32_t first, spw_error *err)
{
    for (uint32_t k = first; k < run->unit_count; k++) {
        uint32_t u = run->units[k];
        if (run->grads[k] != NULL && sends(e, run, u) && leaves_now(e, run))
            SPW_TRY(send_grad(e, u, is_later(e, run, u), is_final(e, run, u), err));
    }
    return SPW_OK;
}

spw_status
spw__ship_grads(spw_engine *e, bool final_group, spw_error *err)
{
    for (grad_buffer *b; (b = leaving(e)) != NULL;)
        SPW_TRY(ship_grad(e, b, err));
    if (!final_group)
        spw_gpu_event_record(e->passed, e->d2h);
    return SPW_OK;
}
