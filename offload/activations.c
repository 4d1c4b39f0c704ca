/*
 * Activation checkpoints: what the forward pass keeps for the backward pass, on the device, in host memory or on nvme.
 * They are used in an order that is known beforehand, last made first, so nothing has to be told or guessed: a driver
 * thread copies them out as they come and, after the turn, back in the order of their use. States, under the lock:
 *
 *   device   EMPTY -> READY -> EMPTY
 *   host     EMPTY -> PENDING -> LEAVING -> AWAY -> ARRIVING -> READY -> EMPTY
 *   nvme     EMPTY -> PENDING -> LEAVING -> STAGED -> WRITING -> AWAY -> READING -> LOADED -> ARRIVING -> READY -> EMPTY
 *
 * Who owns the bytes: PENDING and LEAVING, the caller's source buffer, lent; STAGED to READING, the driver and aio; LEAVING
 * and ARRIVING, a copy queue; READY, the caller. A checkpoint holds a staging buffer from LEAVING to WRITING and from READING
 * to ARRIVING, a working buffer from ARRIVING to READY.
 *
 * Why it cannot deadlock: what leaves needs staging alone and gives it back by itself. Nothing comes back before everything
 * has left. Then staging and working buffers are taken in the order of use, so the next one to be used always has, or gets,
 * both; and the caller holds one at a time. One buffer of each kind is enough.
 *
 * The runtime decides who lives where. Lock order: the act's lock, then a queue's.
 */
#include "act_internal.h"

/* ---------------------------------------------------------------- with the lock held */

/* The checkpoint at a place in the order of use. */
static checkpoint *
used_at(const spw_act *a, uint32_t place)
{
    uint32_t slot = a->cfg.slot_count - 1 - place / a->cfg.micro_count;
    return &a->list[slot * a->cfg.micro_count + place % a->cfg.micro_count];
}

static bool
healthy(const spw_act *a)
{
    return a->poison.status == SPW_OK;
}

void
spw__act_kick(spw_act *a)
{
    if (a->aio != NULL) {
        spw_aio_wake(a->aio);
    } else {
        a->kicked = true;
        pthread_cond_signal(&a->driver_cond);
    }
}

static void
poison(spw_act *a, const spw_error *err)
{
    spw_error_keep_first(&a->poison, err);
    pthread_cond_broadcast(&a->main_cond);
}

static spw_status
poisoned(const spw_act *a, spw_error *err)
{
    if (!healthy(a) && err != NULL)
        *err = a->poison;
    return a->poison.status;
}

/* Tests: whoever still reads it finds NaNs. */
static void
spoil(const spw_act *a, void *p, uint64_t bytes, bool on_device)
{
    if (a->cfg.chaos_seed != 0 && (!on_device || spw_gpu_get_info(a->cfg.gpu)->host_addressable))
        memset(p, 0xff, bytes);
}

static void
free_staging(spw_act *a, checkpoint *c)
{
    spoil(a, c->host, a->page_bytes, false);
    a->staging_free[a->staging_free_count++] = c->host;
    c->host = NULL;
}

/* ---------------------------------------------------------------- copies */

static void
left(void *arg, const char *name, uint64_t slot, uint64_t begin_ns, uint64_t end_ns)
{
    checkpoint *c = arg;
    spw_act *a = c->act;
    spw__chaos_delay(a->cfg.chaos_seed, &a->chaos_calls, c->idx);
    pthread_mutex_lock(&a->lock);
    c->state = c->place.tier == SPW_TIER_NVME ? STAGED : AWAY;
    c->source = NULL;
    a->copies_inflight--;
    a->stats.d2h_bytes += a->bytes;
    spw_timeline_add(SPW_LANE_D2H, name, slot, begin_ns, end_ns);
    pthread_cond_broadcast(&a->main_cond);
    spw__act_kick(a);
    pthread_mutex_unlock(&a->lock);
}

static void
arrived(void *arg, const char *name, uint64_t slot, uint64_t begin_ns, uint64_t end_ns)
{
    checkpoint *c = arg;
    spw_act *a = c->act;
    spw__chaos_delay(a->cfg.chaos_seed, &a->chaos_calls, c->idx);
    pthread_mutex_lock(&a->lock);
    c->state = READY;
    if (c->place.tier == SPW_TIER_NVME)
        free_staging(a, c);
    else
        spoil(a, c->host, a->bytes, false);
    a->copies_inflight--;
    a->stats.h2d_bytes += a->bytes;
    spw_timeline_add(SPW_LANE_H2D, name, slot, begin_ns, end_ns);
    pthread_cond_broadcast(&a->main_cond);
    spw__act_kick(a);
    pthread_mutex_unlock(&a->lock);
}

static void
start_leaving(spw_act *a)
{
    for (; a->leave_next < a->put_end && a->copies_inflight < COPIES_INFLIGHT_MAX; a->leave_next++) {
        checkpoint *c = &a->list[a->leave_next];
        if (c->state != PENDING)
            continue;
        if (c->place.tier == SPW_TIER_NVME) {
            if (a->staging_free_count == 0)
                return;
            c->host = a->staging_free[--a->staging_free_count];
        }
        c->state = LEAVING;
        a->copies_inflight++;
        spw_gpu_event_wait(a->made, a->d2h);
        spw_gpu_span_begin(a->d2h, "activation");
        spw_gpu_copy_d2h(a->d2h, c->host, a->cfg.dtype, c->source, a->cfg.dtype, a->cfg.elems, NULL);
        spw_gpu_span_end(a->d2h, c->idx / a->cfg.micro_count, left, c);
    }
}

static void
start_arriving(spw_act *a)
{
    for (; a->copy_next < a->count && a->copies_inflight < COPIES_INFLIGHT_MAX; a->copy_next++) {
        checkpoint *c = used_at(a, a->copy_next);
        if (c->state == EMPTY || c->place.tier == SPW_TIER_DEVICE)
            continue;
        if (c->state != (c->place.tier == SPW_TIER_NVME ? LOADED : AWAY) || a->working_free_count == 0)
            return;
        c->working = a->working_free[--a->working_free_count];
        c->state = ARRIVING;
        a->copies_inflight++;
        spw_gpu_event_wait(c->working->used, a->h2d);
        spw_gpu_span_begin(a->h2d, "activation");
        spw_gpu_copy_h2d(a->h2d, c->working->data, a->cfg.dtype, c->host, a->cfg.dtype, a->cfg.elems);
        spw_gpu_span_end(a->h2d, c->idx / a->cfg.micro_count, arrived, c);
    }
}

static void
start_copies(spw_act *a)
{
    if (!healthy(a))
        return;
    start_leaving(a);
    if (a->turned && a->leave_next == a->put_end)
        start_arriving(a);
}

/* ---------------------------------------------------------------- nvme, on the driver thread */

static void
submit(spw_act *a, checkpoint *c, spw_aio_op op, spw_aio_priority priority)
{
    spw_error err = {0};
    c->req = (spw_aio_request){.op = op,
                               .priority = priority,
                               .file = spw_swap_file(a->swaps[c->place.path_idx]),
                               .offset = c->offset,
                               .bytes = a->page_bytes,
                               .buf = c->host,
                               .user = c};
    if (spw_aio_submit(a->aio, &c->req, &err) != SPW_OK) {
        a->aio_inflight--;
        poison(a, &err);
    }
}

/* Lets the lock go while it computes checksums: a STAGED checkpoint is the driver's. */
static void
write_staged(spw_act *a)
{
    for (; a->write_next < a->put_end && healthy(a); a->write_next++) {
        checkpoint *c = &a->list[a->write_next];
        if (c->state == EMPTY || c->place.tier != SPW_TIER_NVME)
            continue;
        if (c->state != STAGED)
            return;
        a->aio_inflight++;
        if (a->cfg.integrity) {
            pthread_mutex_unlock(&a->lock);
            spw__chaos_delay(a->cfg.chaos_seed, &a->chaos_calls, c->idx);
            c->sum = spw_checksum(c->host, a->bytes);
            pthread_mutex_lock(&a->lock);
        }
        c->state = WRITING;
        submit(a, c, SPW_AIO_WRITE, SPW_AIO_BULK);
    }
}

static void
start_reads(spw_act *a)
{
    if (!a->turned || a->leave_next != a->put_end || !healthy(a))
        return;
    for (; a->read_next < a->count; a->read_next++) {
        checkpoint *c = used_at(a, a->read_next);
        if (c->state == EMPTY || c->place.tier != SPW_TIER_NVME)
            continue;
        if (c->state != AWAY || a->staging_free_count == 0)
            return;
        c->host = a->staging_free[--a->staging_free_count];
        c->state = READING;
        a->aio_inflight++;
        submit(a, c, SPW_AIO_READ, SPW_AIO_NORMAL);
    }
}

static void
check_sum(const spw_act *a, const checkpoint *c, spw_error *err)
{
    uint64_t sum = a->cfg.integrity ? spw_checksum(c->host, a->bytes) : c->sum;
    if (sum != c->sum)
        (void)SPW_RAISE(err, SPW_ECORRUPT,
                        "%s at offset %llu (activation checkpoint of slot %u, micro-batch %u): checksum is %016llx, "
                        "%016llx was written; the swap file changed on disk",
                        spw_aio_file_path(spw_swap_file(a->swaps[c->place.path_idx])), (unsigned long long)c->offset,
                        c->idx / a->cfg.micro_count, c->idx % a->cfg.micro_count, (unsigned long long)sum,
                        (unsigned long long)c->sum);
}

/* Without the lock: what a finished request points to is the driver's. */
static void
finish_request(spw_act *a, spw_aio_request *req)
{
    checkpoint *c = req->user;
    bool read = req->op == SPW_AIO_READ;
    spw_error err = {0};
    spw_timeline_add(read ? SPW_LANE_NVME_READ : SPW_LANE_NVME_WRITE, "activation", c->idx / a->cfg.micro_count,
                     req->submit_ns, req->done_ns);
    spw__chaos_delay(a->cfg.chaos_seed, &a->chaos_calls, c->idx);
    if (req->status != SPW_OK) {
        spw_aio_request_error(req, &err);
        spw_error_wrap(&err, "activation checkpoint of slot %u, micro-batch %u", c->idx / a->cfg.micro_count,
                       c->idx % a->cfg.micro_count);
    } else if (read) {
        check_sum(a, c, &err);
    }
    pthread_mutex_lock(&a->lock);
    a->aio_inflight--;
    if (err.status != SPW_OK) {
        poison(a, &err);
    } else if (read) {
        a->stats.nvme_read_bytes += req->bytes;
        c->state = LOADED;
    } else {
        a->stats.nvme_write_bytes += req->bytes;
        c->state = AWAY;
        free_staging(a, c);
    }
    pthread_cond_broadcast(&a->main_cond);
    pthread_mutex_unlock(&a->lock);
}

void *
spw__act_driver(void *arg)
{
    spw_act *a = arg;
    (void)pthread_setname_np(pthread_self(), "spw-act");
    spw_thread_be_prompt();
    for (;;) {
        spw_aio_request *req;
        bool stop;
        while (a->aio != NULL && (req = spw_aio_poll(a->aio)) != NULL)
            finish_request(a, req);
        pthread_mutex_lock(&a->lock);
        write_staged(a);
        start_reads(a);
        start_copies(a);
        stop = a->stop && a->copies_inflight == 0 && a->aio_inflight == 0;
        while (!stop && a->aio == NULL && !a->kicked)
            pthread_cond_wait(&a->driver_cond, &a->lock);
        a->kicked = false;
        pthread_mutex_unlock(&a->lock);
        if (stop)
            return NULL;
        if (a->aio != NULL && (req = spw_aio_wait(a->aio, UINT64_MAX)) != NULL)
            finish_request(a, req);
    }
}

/* ---------------------------------------------------------------- a pass, on the caller's thread */

void
spw__act_reset(spw_act *a)
{
    for (uint32_t i = 0; i < a->count; i++) {
        a->list[i].state = EMPTY;
        a->list[i].working = NULL;
        if (a->list[i].place.tier == SPW_TIER_NVME)
            a->list[i].host = NULL;
    }
    for (uint32_t i = 0; i < a->cfg.working_count; i++)
        a->working_free[i] = &a->buffers[i];
    for (uint32_t i = 0; i < a->cfg.staging_count; i++)
        a->staging_free[i] = (char *)a->staging.base + i * a->page_bytes;
    a->working_free_count = a->cfg.working_count;
    a->staging_free_count = a->cfg.staging_count;
    a->put_end = a->leave_next = a->write_next = a->read_next = a->copy_next = a->get_next = 0;
    a->turned = false;
}

/* What somebody who waits for this checkpoint waits for. */
static spw_stall
stall_cause(const checkpoint *c)
{
    bool nvme = c->place.tier == SPW_TIER_NVME;
    switch (c->state) {
    case PENDING: return nvme ? SPW_STALL_NVME_WRITE : SPW_STALL_D2H;
    case LEAVING: return SPW_STALL_D2H;
    case STAGED:
    case WRITING: return SPW_STALL_NVME_WRITE;
    case AWAY: return nvme ? SPW_STALL_NVME_READ : SPW_STALL_H2D;
    case READING: return SPW_STALL_NVME_READ;
    default: return SPW_STALL_H2D;
    }
}

static void
wait_for(spw_act *a, spw_stall cause)
{
    uint64_t begin = spw_now_ns();
    pthread_cond_wait(&a->main_cond, &a->lock);
    if (a->cfg.stall_ns != NULL)
        a->cfg.stall_ns[cause] += spw_now_ns() - begin;
}

void *
spw_act_home(const spw_act *a, uint32_t idx)
{
    return a->list[idx].device;
}

spw_status
spw_act_begin(spw_act *a, spw_error *err)
{
    spw_status st;
    pthread_mutex_lock(&a->lock);
    a->put_end = a->leave_next = a->write_next = 0; /* of a pass that broke off nothing more starts */
    a->turned = false;
    while (healthy(a) && (a->copies_inflight > 0 || a->aio_inflight > 0))
        wait_for(a, SPW_STALL_D2H);
    st = poisoned(a, err);
    if (st == SPW_OK)
        spw__act_reset(a);
    pthread_mutex_unlock(&a->lock);
    return st;
}

spw_status
spw_act_put(spw_act *a, uint32_t idx, const void *source, spw_gpu_queue *compute, spw_error *err)
{
    checkpoint *c = &a->list[idx];
    spw_status st;
    if (c->place.tier != SPW_TIER_DEVICE)
        spw_gpu_event_record(a->made, compute);
    pthread_mutex_lock(&a->lock);
    st = poisoned(a, err);
    if (st == SPW_OK && (idx < a->put_end || a->turned || (c->device != NULL && source != c->device)))
        st = SPW_RAISE(err, SPW_EINVAL, "activation checkpoint %u was put out of order or not at its home", idx);
    if (st == SPW_OK) {
        a->put_end = idx + 1;
        c->state = c->place.tier == SPW_TIER_DEVICE ? READY : PENDING;
        c->source = source;
        start_copies(a);
    }
    pthread_mutex_unlock(&a->lock);
    return st;
}

spw_status
spw_act_settle(spw_act *a, uint32_t idx, spw_error *err)
{
    const checkpoint *c = &a->list[idx];
    spw_status st;
    pthread_mutex_lock(&a->lock);
    while (healthy(a) && (c->state == PENDING || c->state == LEAVING))
        wait_for(a, stall_cause(c));
    st = poisoned(a, err);
    pthread_mutex_unlock(&a->lock);
    return st;
}

void
spw_act_turn(spw_act *a)
{
    pthread_mutex_lock(&a->lock);
    a->turned = true;
    start_copies(a);
    spw__act_kick(a);
    pthread_mutex_unlock(&a->lock);
}

spw_status
spw_act_get(spw_act *a, uint32_t idx, void **device_out, spw_error *err)
{
    const checkpoint *c = &a->list[idx];
    spw_status st;
    *device_out = NULL;
    pthread_mutex_lock(&a->lock);
    while (a->get_next < a->count && used_at(a, a->get_next)->state == EMPTY)
        a->get_next++;
    st = poisoned(a, err);
    if (st == SPW_OK && (!a->turned || a->get_next == a->count || used_at(a, a->get_next) != c))
        st = SPW_RAISE(err, SPW_EINVAL, "activation checkpoint %u is not the next one in the order of use", idx);
    while (st == SPW_OK && c->state != READY) {
        wait_for(a, stall_cause(c));
        st = poisoned(a, err);
    }
    if (st == SPW_OK)
        *device_out = c->device != NULL ? c->device : c->working->data;
    pthread_mutex_unlock(&a->lock);
    return st;
}

void
spw_act_release(spw_act *a, uint32_t idx, spw_gpu_queue *compute)
{
    checkpoint *c = &a->list[idx];
    if (c->working != NULL)
        spw_gpu_event_record(c->working->used, compute);
    pthread_mutex_lock(&a->lock);
    SPW_ASSERT(c->state == READY);
    c->state = EMPTY;
    spoil(a, c->device != NULL ? c->device : c->working->data, a->bytes, true);
    if (c->working != NULL) {
        a->working_free[a->working_free_count++] = c->working;
        c->working = NULL;
        start_copies(a);
        spw__act_kick(a);
    }
    pthread_mutex_unlock(&a->lock);
}

void
spw_act_get_stats(spw_act *a, spw_act_stats *out)
{
    pthread_mutex_lock(&a->lock);
    *out = a->stats;
    pthread_mutex_unlock(&a->lock);
}
