/*
 * The store: owns all copies of all chunks. This file is its face to the runtime: create, acquire, release, steps. mover.c
 * moves the bytes (slots.c, transfers.c, fills.c, updates.c), worker.c shows them to the function that changes numbers, sweep.c visits them all,
 * room.c says what memory that takes.
 */
#include "offload_internal.h"
#include <stdio.h>
#include <time.h>

const char *
spw_stall_name(spw_stall stall)
{
    static const char *const names[SPW_STALL_COUNT] = {"nvme_read", "nvme_write",  "h2d", "optimizer",
                                                       "d2h",       "collectives", "data"};
    return (unsigned)stall < SPW_STALL_COUNT ? names[stall] : "unknown";
}

/* ---------------------------------------------------------------- helpers shared with the mover (lock held) */

void
spw__store_kick(spw_store *s)
{
    if (s->aio != NULL) {
        spw_aio_wake(s->aio);
    } else {
        s->mover_kicked = true;
        pthread_cond_signal(&s->mover_cond);
    }
}

void
spw__store_poison(spw_store *s, const spw_error *err)
{
    spw_error_keep_first(&s->poison, err);
    pthread_cond_broadcast(&s->main_cond);
    pthread_cond_broadcast(&s->work_cond);
}

void
spw__store_rush(spw_store *s, chunk *c, bool rush)
{
    s->rushed += rush && !c->rush;
    s->rushed -= !rush && c->rush;
    c->rush = rush;
}

bool
spw__pin_host(spw_gpu *gpu, const spw_region *region)
{
    spw_error err = {0};
    if (region->bytes == 0)
        return false;
    if (spw_gpu_pin_host(gpu, region->base, region->bytes, &err) == SPW_OK)
        return true;
    spw_log(SPW_LOG_WARN, "copies to and from the device make the threads that start them wait: %s", err.message);
    return false;
}

void
spw__chaos_delay(uint64_t seed, uint64_t *calls, uint64_t salt)
{
    uint32_t r[4];
    if (seed == 0)
        return;
    spw_philox(seed, salt, __atomic_fetch_add(calls, 1, __ATOMIC_RELAXED), r);
    if (r[0] % 4 == 0)
        spw_sleep_ns(r[1] % 300000);
}

void
spw__store_chaos_delay(spw_store *s, uint64_t salt)
{
    spw__chaos_delay(s->cfg.chaos_seed, &s->chaos_state, salt);
}

/* ---------------------------------------------------------------- create and destroy */

static spw_status
start_workers(spw_store *s, uint32_t worker_count, spw_error *err)
{
    spw_seat *seats = spw_mem_calloc(worker_count, sizeof *seats);
    spw_status st = seats != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "seats of %u threads", worker_count);
    if (st == SPW_OK && s->cfg.pin_threads && s->cfg.topology != NULL)
        spw_seat_workers(seats, worker_count, s->cfg.topology);
    while (st == SPW_OK && s->worker_started < worker_count) {
        uint32_t i = s->worker_started;
        int rc = pthread_create(&s->workers[i], NULL, spw__store_worker_main, s);
        if (rc != 0) {
            st = SPW_RAISE_SYS(err, rc, "start of optimizer thread %u " SPW_THREAD_LIMITS, i + 1);
        } else {
            spw_seat_apply(&seats[i], s->workers[i]);
            s->worker_started++;
        }
    }
    spw_mem_free(seats);
    return st;
}

static spw_status
build(spw_store *s, spw_error *err)
{
    const spw_store_config *cfg = &s->cfg;
    uint32_t workers = cfg->worker_count > 0 ? cfg->worker_count : 1;
    s->units = spw_mem_calloc(cfg->unit_count, sizeof *s->units);
    s->chunks = spw_mem_calloc(cfg->chunk_count, sizeof *s->chunks);
    s->weight_slot_owner = spw_mem_calloc(cfg->weight_slot_count, sizeof(int32_t));
    s->record_slot_free = spw_mem_calloc(cfg->record_slot_count, sizeof(int32_t));
    s->loans = spw_mem_calloc((uint64_t)LOANS_PER_CHUNK * cfg->chunk_count, sizeof *s->loans);
    s->swaps = spw_mem_calloc(cfg->path_count + 1, sizeof(spw_swap *));
    s->windows = spw_mem_calloc(cfg->grad_window_count + 1, sizeof *s->windows);
    s->workers = spw_mem_calloc(workers, sizeof(pthread_t));
    if (!s->units || !s->chunks || !s->weight_slot_owner || !s->record_slot_free || !s->loans || !s->swaps ||
        !s->windows || !s->workers)
        return SPW_RAISE(err, SPW_ENOMEM, "store of %u chunks", cfg->chunk_count);
    SPW_TRY(spw__future_init(&s->future, cfg->unit_count, 4 * cfg->unit_count + 64, err));
    SPW_TRY(spw_gaps_init(&s->room, cfg->device_cache_bytes, cfg->unit_count, err));
    SPW_TRY(spw_set_init(&s->resident, cfg->unit_count, err));
    SPW_TRY(spw_set_init(&s->busy, cfg->unit_count, err));
    SPW_TRY(spw_set_init(&s->todo, cfg->unit_count, err));
    SPW_TRY(spw_set_init(&s->read, cfg->unit_count, err));
    s->unit_count = cfg->unit_count;
    s->chunk_count = cfg->chunk_count;
    s->compute_bytes = (uint32_t)spw_dtype_bytes(spw_gpu_get_info(cfg->gpu)->compute_dtype);
    for (uint32_t i = 0; i < s->unit_count; i++) {
        s->units[i].plan = cfg->units[i];
        s->units[i].on_device = spw__store_on_device(cfg, i);
        s->units[i].direct = spw_store_direct(cfg, i);
        s->units[i].window = -1;
        s->units[i].device_bytes = cfg->units[i].elems * s->compute_bytes;
        if (cfg->device_granule > 0)
            s->units[i].device_bytes =
                (s->units[i].device_bytes + cfg->device_granule - 1) / cfg->device_granule * cfg->device_granule;
    }
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        s->chunks[i].store = s;
        s->chunks[i].idx = i;
        s->chunks[i].plan = cfg->chunks[i];
        s->chunks[i].weight_slot = s->chunks[i].record_slot = -1;
        s->units[cfg->chunks[i].unit_idx].spare |= cfg->chunks[i].spare;
        s->units[cfg->chunks[i].unit_idx].on_nvme += cfg->chunks[i].record_tier == SPW_TIER_NVME;
    }
    for (uint32_t i = 0; i < cfg->weight_slot_count; i++)
        s->weight_slot_owner[i] = -1;
    for (uint32_t i = 0; i < cfg->record_slot_count; i++)
        s->record_slot_free[i] = (int32_t)i;
    s->record_slot_free_count = cfg->record_slot_count;
    SPW_TRY(spw__store_carve(s, err));
    SPW_TRY(spw_gpu_queue_create(&s->h2d, cfg->gpu, SPW_QUEUE_H2D, err));
    for (uint32_t i = 0; i < s->stage_count && s->apart; i++)
        SPW_TRY(spw_gpu_queue_create(&s->stages[i].queue, cfg->gpu, SPW_QUEUE_D2H, err));
    for (uint32_t i = 0; i < s->unit_count && s->apart; i++)
        SPW_TRY(spw_gpu_event_create(&s->units[i].used, cfg->gpu, err));
    SPW_TRY(start_workers(s, workers, err));
    {
        int rc = pthread_create(&s->mover, NULL, spw__store_mover_main, s);
        if (rc != 0)
            return SPW_RAISE_SYS(err, rc, "start of the mover thread " SPW_THREAD_LIMITS);
        s->mover_started = true;
    }
    return SPW_OK;
}

spw_status
spw_store_create(spw_store **out, const spw_store_config *config, spw_error *err)
{
    spw_status st;
    spw_store *s;
    *out = NULL;
    SPW_TRY(spw__store_check_config(config, err));
    s = spw_mem_zalloc(sizeof *s);
    if (s == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "store");
    s->cfg = *config;
    s->apart = !spw_gpu_get_info(config->gpu)->host_addressable;
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->stage_lock, NULL);
    pthread_cond_init(&s->stage_freed, NULL);
    pthread_cond_init(&s->main_cond, NULL);
    pthread_cond_init(&s->work_cond, NULL);
    pthread_cond_init(&s->mover_cond, NULL);
    st = build(s, err);
    s->cfg.topology = NULL; /* it was lent */
    if (st != SPW_OK)
        spw_store_destroy(s);
    else
        *out = s;
    return st;
}

void
spw_store_destroy(spw_store *s)
{
    if (s == NULL)
        return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->work_cond);
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
    for (uint32_t i = 0; i < s->worker_started; i++)
        pthread_join(s->workers[i], NULL);
    if (s->mover_started) {
        pthread_mutex_lock(&s->lock);
        spw__store_kick(s);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->mover, NULL);
    }
    spw_gpu_queue_destroy(s->h2d);
    for (uint32_t i = 0; i < s->stage_count; i++)
        spw_gpu_queue_destroy(s->stages[i].queue);
    for (uint32_t i = 0; i < s->unit_count; i++)
        spw_gpu_event_destroy(s->units[i].used);
    for (uint32_t i = 0; s->swaps != NULL && i < s->cfg.path_count; i++)
        spw_swap_close(s->swaps[i]);
    spw__in_place_close(s);
    spw_aio_destroy(s->aio);
    spw_gpu_free(s->cfg.gpu, s->device_memory);
    if (s->pinned)
        spw_gpu_unpin_host(s->cfg.gpu, s->host.base);
    spw_region_unmap(&s->host);
    spw_region_unmap(&s->logs);
    pthread_cond_destroy(&s->main_cond);
    pthread_cond_destroy(&s->work_cond);
    pthread_cond_destroy(&s->mover_cond);
    pthread_cond_destroy(&s->stage_freed);
    pthread_mutex_destroy(&s->stage_lock);
    pthread_mutex_destroy(&s->lock);
    spw_mem_free(s->units);
    spw_mem_free(s->chunks);
    spw_mem_free(s->weight_slot_owner);
    spw_mem_free(s->record_slot_free);
    spw_mem_free(s->loans);
    spw__future_deinit(&s->future);
    spw_gaps_deinit(&s->room);
    spw_set_deinit(&s->resident);
    spw_set_deinit(&s->busy);
    spw_set_deinit(&s->todo);
    spw_set_deinit(&s->read);
    spw_mem_free(s->swaps);
    spw_mem_free(s->windows);
    spw_mem_free(s->workers);
    spw_mem_free(s);
}

/* ---------------------------------------------------------------- uses */

void
spw_store_set_future(spw_store *s, const spw_store_use *uses, uint32_t use_count, uint32_t fetch_count)
{
    spw_store_future_goes_on(s, UINT32_MAX, uses, use_count, fetch_count);
}

void
spw_store_future_goes_on(spw_store *s, uint32_t dropped, const spw_store_use *uses, uint32_t use_count,
                         uint32_t fetch_count)
{
    pthread_mutex_lock(&s->lock);
    spw__future_go_on(&s->future, dropped, uses, use_count, fetch_count);
    spw__store_reserve(s);
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void
spw_store_forget(spw_store *s)
{
    bool filling = true;
    pthread_mutex_lock(&s->lock);
    spw__future_go_on(&s->future, UINT32_MAX, NULL, 0, 0);
    while (filling && s->poison.status == SPW_OK) {
        filling = false;
        for (uint32_t i = 0; i < s->unit_count; i++) {
            unit *u = &s->units[i];
            if (u->d == D_READY && u->pins == 0)
                spw__store_drop_device(s, u);
            if (u->d == D_FILLING)
                spw__store_abort_fill(s, u);
            filling = filling || u->d == D_FILLING;
        }
        if (filling)
            spw__store_wait_a_moment(s);
    }
    pthread_mutex_unlock(&s->lock);
}

spw_stall
spw__store_stall_cause(const spw_store *s, const unit *u, uint64_t generation)
{
    bool reading = false, writing = false;
    if (u->generation < generation || (u->op == OP_UPDATE && u->grad_ready)) {
        for (uint32_t k = 0; k < u->plan.chunk_count; k++) {
            const chunk *c = &s->chunks[u->plan.chunk_first + k];
            if (!c->started && (c->r == R_READING || c->w == W_READING || c->r == R_EMPTY))
                return s->record_slot_free_count == 0 && c->r == R_EMPTY ? SPW_STALL_NVME_WRITE : SPW_STALL_NVME_READ;
        }
        return SPW_STALL_OPTIMIZER;
    }
    for (uint32_t k = 0; k < u->plan.chunk_count; k++) {
        const chunk *c = &s->chunks[u->plan.chunk_first + k];
        reading = reading || c->w == W_READING || c->w == W_VERIFYING;
        writing = writing || c->w == W_EMPTY;
    }
    return reading ? SPW_STALL_NVME_READ : writing && u->copies_inflight == 0 ? SPW_STALL_NVME_WRITE : SPW_STALL_H2D;
}

/* Until something happens, or for a millisecond: what a long wait is for changes on the way. Lock held. */
void
spw__store_wait_a_moment(spw_store *s)
{
    uint64_t until = spw_now_ns() + 1000000;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
    (void)pthread_cond_clockwait(&s->main_cond, &s->lock, CLOCK_MONOTONIC, &t);
}

/* The first use that is not on the device; count: all are. */
static uint32_t
first_missing(const spw_store *s, const spw_store_use *uses, uint32_t count)
{
    uint32_t k = 0;
    while (k < count && s->units[uses[k].unit_idx].d == D_READY &&
           s->units[uses[k].unit_idx].device_generation == uses[k].generation)
        k++;
    return k;
}

static void
fail_use(spw_store *s, spw_store_use use)
{
    char what[128];
    snprintf(what, sizeof what, "unit %u is wanted as of %llu updates and has %llu", use.unit_idx,
             (unsigned long long)use.generation, (unsigned long long)s->units[use.unit_idx].generation);
    spw__store_fail_still(s, what);
}

/* Somebody is between the halves of a unit's update. */
static void
change(spw_store *s, unit *u)
{
    u->half = H_CHANGING;
    s->between--;
    s->copies_inflight++;
}

/* Lock held, released in between. The lowest unit between the halves of its update goes on; false: there is none. */
static bool
help(spw_store *s)
{
    unit *u = s->units;
    if (s->cfg.whole == NULL || s->between == 0 || s->poison.status != SPW_OK)
        return false;
    while (u->half != H_BETWEEN)
        u++;
    change(s, u);
    pthread_mutex_unlock(&s->lock);
    spw__store_chaos_delay(s, (uint64_t)(u - s->units));
    s->cfg.whole(s->cfg.update_ctx, (uint32_t)(u - s->units), u->grad);
    pthread_mutex_lock(&s->lock);
    return true;
}

spw_status
spw_store_acquire(spw_store *s, const spw_store_use *uses, uint32_t count, const void **weights, spw_error *err)
{
    spw_status st = SPW_OK;
    still watch = {0};
    uint32_t k;
    SPW_ASSERT(count <= SPW_ACQUIRE_MAX);
    pthread_mutex_lock(&s->lock);
    for (k = 0; k < count; k++) {
        unit *u = &s->units[uses[k].unit_idx];
        weights[k] = NULL;
        u->wanted = true;
        spw__store_note(s, u);
        s->stats.uses++;
        s->stats.hits += u->d != D_NONE && u->device_generation == uses[k].generation && !u->by_demand;
    }
    while (s->poison.status == SPW_OK && (k = first_missing(s, uses, count)) < count) {
        const unit *u = &s->units[uses[k].unit_idx];
        spw_stall cause = spw__store_stall_cause(s, u, uses[k].generation);
        uint64_t begin;
        if (u->generation > uses[k].generation) {
            st = SPW_RAISE(err, SPW_ESTALE, "unit %u is at generation %llu, generation %llu was asked for",
                           uses[k].unit_idx, (unsigned long long)u->generation, (unsigned long long)uses[k].generation);
            break;
        }
        s->demand = uses[k];
        s->demand_set = true;
        spw__store_kick(s);
        if (help(s))
            continue;
        begin = spw_now_ns();
        spw__store_wait_a_moment(s);
        s->stats.stall_ns[cause] += spw_now_ns() - begin;
        if (spw__store_still(s, &watch))
            fail_use(s, uses[k]);
    }
    s->demand_set = s->tight = false;
    if (st == SPW_OK && s->poison.status != SPW_OK) {
        if (err != NULL)
            *err = s->poison;
        st = s->poison.status;
    }
    for (k = 0; k < count; k++) {
        unit *u = &s->units[uses[k].unit_idx];
        u->wanted = false;
        u->pins += st == SPW_OK;
        spw__store_note(s, u);
        if (st != SPW_OK)
            continue;
        u->by_demand = false;
        spw__future_take(&s->future, uses[k]); /* nothing is fetched for it once it was released */
        weights[k] = u->direct ? s->chunks[u->plan.chunk_first].weights : s->device_cache + u->device_offset;
    }
    pthread_mutex_unlock(&s->lock);
    return st;
}

void
spw_store_release(spw_store *s, uint32_t unit_idx, spw_gpu_queue *reader)
{
    unit *u = &s->units[unit_idx];
    pthread_mutex_lock(&s->lock);
    SPW_ASSERT(u->pins > 0);
    if (u->used != NULL && reader != NULL) {
        spw_gpu_event_record(u->used, reader);
        u->used_offset = u->device_offset;
        u->used_pending = true;
        if (!u->direct)
            spw_set_add(&s->read, unit_idx);
    }
    u->pins--;
    u->last_use = ++s->releases;
    spw__store_note(s, u);
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

/* ---------------------------------------------------------------- steps */

bool
spw__store_has_todo(const unit *u)
{
    return u->op != OP_NONE && (u->op != OP_UPDATE || u->grad_ready) && (u->job_next < u->op_end || u->d != D_NONE);
}

void
spw__store_note_op(spw_store *s, unit *u)
{
    const bool waits = u->op == OP_UPDATE && !u->grad_ready;
    s->waiting += waits && !u->waits;
    s->waiting -= !waits && u->waits;
    u->waits = waits;
    (spw__store_has_todo(u) ? spw_set_add : spw_set_remove)(&s->todo, (uint64_t)(u - s->units));
}

/* For chunks [first, end) of the unit. */
void
spw__store_begin_op(spw_store *s, unit *u, unit_op op, uint32_t first, uint32_t end)
{
    u->op = op;
    if (op == OP_INIT || op == OP_EDIT)
        s->future.settled = s->future.begin;
    spw_set_add(&s->busy, (uint64_t)(u - s->units));
    u->half = op == OP_UPDATE && u->plan.whole ? H_FIRST : H_SECOND;
    u->load_next = u->job_next = u->done_next = first;
    u->op_end = end;
    u->grad_ready = false;
    for (uint32_t k = first; k < end; k++)
        s->chunks[u->plan.chunk_first + k].started = false;
    spw__store_note_op(s, u);
}

void
spw__store_end_op(spw_store *s, unit *u)
{
    u->op = OP_NONE;
    spw_set_remove(&s->busy, (uint64_t)(u - s->units));
    spw__store_note_op(s, u);
}

void
spw_store_help(spw_store *s)
{
    pthread_mutex_lock(&s->lock);
    while (help(s)) {
    }
    pthread_mutex_unlock(&s->lock);
}

spw_status
spw_store_whole_take(spw_store *s, uint32_t unit_idx, void **grad, spw_error *err)
{
    unit *u = &s->units[unit_idx];
    spw_status st;
    still watch = {0};
    pthread_mutex_lock(&s->lock);
    while (u->half != H_BETWEEN && s->poison.status == SPW_OK) {
        spw__store_wait_a_moment(s);
        if (spw__store_still(s, &watch))
            spw__store_fail_still(s, "the first half of an update is waited for");
    }
    st = s->poison.status; /* of this moment: who is told of a failure gives nothing back */
    if (st == SPW_OK) {
        change(s, u);
    } else if (err != NULL) {
        *err = s->poison;
    }
    *grad = u->grad;
    pthread_mutex_unlock(&s->lock);
    return st;
}

void
spw_store_whole_done(spw_store *s, uint32_t unit_idx)
{
    unit *u = &s->units[unit_idx];
    pthread_mutex_lock(&s->lock);
    SPW_ASSERT(u->half == H_CHANGING);
    u->half = H_SECOND;
    u->load_next = u->job_next = u->done_next = 0;
    for (uint32_t k = 0; k < u->op_end; k++)
        spw__unit_chunk(s, u, k)->started = false;
    spw__store_note_op(s, u);
    s->copies_inflight--;
    s->ended++;
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

/* Lock held. Waits until no unit has an operation that can run. */
void
spw__store_wait_idle(spw_store *s)
{
    still watch = {0};
    for (uint64_t i = spw_set_next(&s->busy, 0); i < s->unit_count && s->poison.status == SPW_OK;) {
        const unit *u = &s->units[i];
        bool runs = spw__may_run(s, u);
        if (runs && !help(s)) {
            spw__store_wait_a_moment(s);
            if (spw__store_still(s, &watch))
                spw__store_fail_still(s, "updates or a sweep are waited for");
        }
        i = spw_set_next(&s->busy, runs ? 0 : i + 1);
    }
}

/* Lock held, idle. Units whose update did not come to run keep their state; records read ahead stay for the next step. */
void
spw__store_close_step(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count; i++) {
        s->units[i].grad_ready = false;
        spw__store_note_op(s, &s->units[i]);
    }
    s->gate_open = s->step_open = s->held_back = s->spent = false;
    s->mode = SPW_STEP_GATED;
}

void
spw__store_stop_holding(spw_store *s, unit *u)
{
    s->holding -= u->holding ? u->on_nvme : 0;
    u->holding = false;
}

/* Lock held, the unit without an operation, or nothing is read for it. */
void
spw__store_drop_records(spw_store *s, unit *u)
{
    spw__store_stop_holding(s, u);
    for (uint32_t k = 0; k < u->plan.chunk_count; k++) {
        chunk *c = &s->chunks[u->plan.chunk_first + k];
        while ((c->r == R_READING || c->snap_taken) && s->poison.status == SPW_OK) /* or a save looks at it */
            pthread_cond_wait(&s->main_cond, &s->lock);
        if (c->r == R_READY && c->plan.record_tier == SPW_TIER_NVME) {
            spw__store_free_record_slot(s, c);
            c->record_fresh = false;
        }
    }
}

void
spw_store_step_begin(spw_store *s, const bool *takes_part, spw_step_mode mode)
{
    (void)spw_store_step_undo(s, NULL); /* of a step that broke off */
    pthread_mutex_lock(&s->lock);
    spw__store_wait_idle(s);
    spw__store_close_step(s);
    spw__store_drop_grads(s);
    if (mode == SPW_STEP_EARLY || mode == SPW_STEP_AHEAD)
        spw__store_drop_read_ahead(s); /* the lowest units', of a step that was skipped: the highest are first now */
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *u = &s->units[i];
        bool updates = u->plan.trainable && (takes_part == NULL || takes_part[i]);
        if (updates && u->op == OP_NONE) {
            spw__store_begin_op(s, u, OP_UPDATE, 0, u->plan.chunk_count);
        } else if (!updates && u->op == OP_UPDATE) { /* read ahead for a step that was skipped */
            spw__store_end_op(s, u);
            spw__store_drop_records(s, u);
        }
        spw__store_hold_unit(s, u);
    }
    for (uint32_t i = 0; i < s->chunk_count; i++)
        s->chunks[i].rest -= s->chunks[i].rest > 0;
    s->step_open = true;
    s->mode = mode;
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void
spw_store_step_go(spw_store *s)
{
    pthread_mutex_lock(&s->lock);
    SPW_ASSERT(!spw__must_come_again(s));
    spw__ahead_commit(s);
    s->gate_open = true;
    spw__store_reserve(s); /* the next step's first use may come before the mover wakes up */
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void
spw_store_step_skip(spw_store *s)
{
    (void)spw_store_step_undo(s, NULL);
    pthread_mutex_lock(&s->lock);
    spw__store_close_step(s);
    pthread_mutex_unlock(&s->lock);
}

spw_status
spw_store_drain(spw_store *s, spw_error *err)
{
    pthread_mutex_lock(&s->lock);
    spw__store_wait_idle(s);
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

void
spw_store_get_stats(spw_store *s, spw_store_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    out->nvme_moving = s->aio_inflight + (s->dirty_head != NULL);
    pthread_mutex_unlock(&s->lock);
}

const char *
spw_store_aio_reason(const spw_store *s)
{
    return s->aio == NULL ? "none" : spw_aio_reason(s->aio);
}

void
spw_store_fail(spw_store *s, const spw_error *reason)
{
    pthread_mutex_lock(&s->lock);
    spw__store_poison(s, reason);
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

spw_status
spw_store_check(spw_store *s, spw_error *err)
{
    spw_status st;
    pthread_mutex_lock(&s->lock);
    st = s->poison.status;
    if (st != SPW_OK && err != NULL)
        *err = s->poison;
    pthread_mutex_unlock(&s->lock);
    return st;
}
