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
#include "offload_internal.h"
#include <stdio.h>
#include <unistd.h>

typedef enum act_state { EMPTY, PENDING, LEAVING, STAGED, WRITING, AWAY, READING, LOADED, ARRIVING, READY } act_state;

typedef struct working_buffer {
    void *data;
    spw_gpu_event *used; /* the compute that read it last */
} working_buffer;

typedef struct checkpoint {
    spw_act *act;
    uint32_t idx;
    spw_act_place place;
    act_state state;
    const void *source;      /* PENDING, LEAVING */
    void *device;            /* its home there */
    void *host;              /* its home there, or a staging buffer */
    working_buffer *working; /* ARRIVING, READY */
    uint64_t offset, sum;    /* in the swap file; of what was written */
    spw_aio_request req;
} checkpoint;

enum { COPIES_INFLIGHT_MAX = 8 }; /* far below a queue's ring: they are enqueued under the lock that their ends take */

struct spw_act {
    /* Fixed after create. */
    spw_act_config cfg;
    uint32_t count;
    uint64_t bytes, page_bytes; /* of a checkpoint; of one on nvme */
    spw_region host, staging;
    void *device_memory;
    spw_swap **swaps;
    spw_gpu_queue *d2h, *h2d;
    spw_gpu_event *made; /* the compute that wrote the sources */
    pthread_t driver;
    bool driver_started, host_pinned, staging_pinned;
    spw_aio *aio; /* used by the driver alone */

    pthread_mutex_t lock;
    pthread_cond_t main_cond, driver_cond;
    /* Under lock. */
    checkpoint *list; /* (slot_count, micro_count) */
    working_buffer *buffers, **working_free;
    void **staging_free;
    uint32_t working_free_count, staging_free_count;
    uint32_t put_end, leave_next, write_next; /* indices: one behind the last put; to be copied out; to be written */
    uint32_t read_next, copy_next, get_next;  /* places in the order of use */
    uint32_t copies_inflight, aio_inflight;   /* aio: from the checksum before a write to the one after a read */
    bool turned, stop, kicked;
    spw_error poison; /* status SPW_OK while healthy */
    spw_act_stats stats;
    uint64_t chaos_calls; /* atomic */
};

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

static void
kick(spw_act *a)
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
    kick(a);
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
    kick(a);
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

static void *
driver_main(void *arg)
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

/* ---------------------------------------------------------------- lifetime */

static uint32_t
count_in(const spw_act_config *cfg, spw_tier tier)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < cfg->slot_count * cfg->micro_count; i++)
        n += cfg->places[i].tier == tier;
    return n;
}

void
spw_act_compute_need(const spw_act_config *cfg, spw_act_need *need)
{
    uint64_t bytes = cfg->elems * spw_dtype_bytes(cfg->dtype);
    need->nvme_bytes = spw_round_up(bytes, 4096);
    need->device_bytes = spw_round_up((count_in(cfg, SPW_TIER_DEVICE) + (uint64_t)cfg->working_count) * bytes, 4096);
    need->host_bytes = spw_round_up(count_in(cfg, SPW_TIER_HOST) * bytes, 4096) + cfg->staging_count * need->nvme_bytes;
}

void
spw_act_compute_tables(const spw_act_config *cfg, spw_act_tables *out)
{
    enum { THREADS = 3 }; /* the driver and the queues' */
    out->table_bytes = sizeof(spw_act) + (uint64_t)cfg->slot_count * cfg->micro_count * sizeof(checkpoint);
    out->thread_bytes = THREADS * spw_touched_bytes(SPW_STACK_BYTES);
    out->transfer_bytes = spw_aio_memory_bytes(&cfg->aio, cfg->path_count);
}

static spw_status
check_config(const spw_act_config *cfg, spw_error *err)
{
    bool nvme = count_in(cfg, SPW_TIER_NVME) > 0;
    if (cfg->elems == 0 || (nvme && cfg->staging_count == 0) ||
        (cfg->working_count == 0 && (nvme || count_in(cfg, SPW_TIER_HOST) > 0)))
        return SPW_RAISE(err, SPW_EINVAL, "activation checkpoints off the device need working and staging buffers");
    for (uint32_t i = 0; i < cfg->slot_count * cfg->micro_count; i++) {
        if (cfg->places[i].tier == SPW_TIER_NVME && cfg->places[i].path_idx >= cfg->path_count)
            return SPW_RAISE(err, SPW_EINVAL, "activation checkpoint %u is on swap path %u of %u", i,
                             cfg->places[i].path_idx, cfg->path_count);
    }
    return SPW_OK;
}

static spw_status
open_swaps(spw_act *a, const uint64_t *path_bytes, spw_error *err)
{
    char job[128];
    a->cfg.aio.fixed = &a->staging;
    if (a->cfg.aio.probe_dir == NULL)
        a->cfg.aio.probe_dir = a->cfg.paths[0];
    if (a->cfg.job != NULL)
        snprintf(job, sizeof job, "%.100s-act", a->cfg.job);
    else
        snprintf(job, sizeof job, "%ld-%llx-act", (long)getpid(), (unsigned long long)spw_now_ns());
    SPW_TRY(spw_aio_create(&a->aio, &a->cfg.aio, err));
    if (a->cfg.aio_faults != NULL)
        spw_test_aio_fault(a->aio, spw_test_aio_scheduled, a->cfg.aio_faults);
    for (uint32_t i = 0; i < a->cfg.path_count; i++) {
        spw_status st = path_bytes[i] > 0
                            ? spw_swap_open(&a->swaps[i], a->aio, a->cfg.paths[i], job, a->cfg.rank, path_bytes[i], err)
                            : SPW_OK;
        if (st != SPW_OK) {
            spw_error_wrap(err, "activation checkpoints");
            return st;
        }
    }
    return SPW_OK;
}

/* Homes on the device, then working buffers; homes in host memory; extents in the swap files. */
static spw_status
take_memory(spw_act *a, spw_error *err)
{
    const spw_act_config *cfg = &a->cfg;
    unsigned flags = cfg->pin_memory ? SPW_REGION_LOCK : 0;
    spw_act_need need;
    uint64_t *path_bytes;
    char *device, *host;
    spw_status st = SPW_OK;
    spw_act_compute_need(cfg, &need);
    if (need.device_bytes > 0)
        SPW_TRY(spw_gpu_alloc(cfg->gpu, &a->device_memory, need.device_bytes, err));
    SPW_TRY(spw_region_map(&a->staging, cfg->staging_count * need.nvme_bytes, flags, err));
    SPW_TRY(spw_region_map(&a->host, need.host_bytes - cfg->staging_count * need.nvme_bytes, flags, err));
    a->staging_pinned = spw__pin_host(cfg->gpu, &a->staging);
    a->host_pinned = spw__pin_host(cfg->gpu, &a->host);
    path_bytes = spw_mem_calloc(cfg->path_count + 1, sizeof *path_bytes);
    if (path_bytes == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "activation checkpoints");
    device = a->device_memory;
    host = a->host.base;
    for (uint32_t i = 0; i < a->count; i++) {
        checkpoint *c = &a->list[i];
        *c = (checkpoint){.act = a, .idx = i, .place = cfg->places[i]};
        if (c->place.tier == SPW_TIER_DEVICE) {
            c->device = device;
            device += a->bytes;
        } else if (c->place.tier == SPW_TIER_HOST) {
            c->host = host;
            host += a->bytes;
        } else {
            c->offset = path_bytes[c->place.path_idx];
            path_bytes[c->place.path_idx] += need.nvme_bytes;
        }
    }
    for (uint32_t i = 0; i < cfg->working_count && st == SPW_OK; i++) {
        a->buffers[i].data = device + i * a->bytes;
        st = spw_gpu_event_create(&a->buffers[i].used, cfg->gpu, err);
    }
    if (st == SPW_OK && count_in(cfg, SPW_TIER_NVME) > 0)
        st = open_swaps(a, path_bytes, err);
    spw_mem_free(path_bytes);
    return st;
}

/* Every buffer is free, every checkpoint empty. */
static void
reset(spw_act *a)
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

static spw_status
build(spw_act *a, spw_error *err)
{
    const spw_act_config *cfg = &a->cfg;
    int rc;
    a->count = cfg->slot_count * cfg->micro_count;
    a->bytes = cfg->elems * spw_dtype_bytes(cfg->dtype);
    a->page_bytes = spw_round_up(a->bytes, 4096);
    a->list = spw_mem_calloc(a->count + 1, sizeof *a->list);
    a->buffers = spw_mem_calloc(cfg->working_count + 1, sizeof *a->buffers);
    a->working_free = spw_mem_calloc(cfg->working_count + 1, sizeof *a->working_free);
    a->staging_free = spw_mem_calloc(cfg->staging_count + 1, sizeof *a->staging_free);
    a->swaps = spw_mem_calloc(cfg->path_count + 1, sizeof(spw_swap *));
    if (!a->list || !a->buffers || !a->working_free || !a->staging_free || !a->swaps)
        return SPW_RAISE(err, SPW_ENOMEM, "activation checkpoints (%u)", a->count);
    SPW_TRY(take_memory(a, err));
    reset(a);
    if (count_in(cfg, SPW_TIER_DEVICE) == a->count)
        return SPW_OK; /* nothing moves */
    SPW_TRY(spw_gpu_event_create(&a->made, cfg->gpu, err));
    SPW_TRY(spw_gpu_queue_create(&a->d2h, cfg->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_gpu_queue_create(&a->h2d, cfg->gpu, SPW_QUEUE_H2D, err));
    rc = pthread_create(&a->driver, NULL, driver_main, a);
    if (rc != 0)
        return SPW_RAISE_SYS(err, rc, "start of the activations' thread");
    a->driver_started = true;
    return SPW_OK;
}

spw_status
spw_act_create(spw_act **out, const spw_act_config *config, spw_error *err)
{
    spw_status st;
    spw_act *a;
    *out = NULL;
    SPW_TRY(check_config(config, err));
    a = spw_mem_zalloc(sizeof *a);
    if (a == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "activation checkpoints");
    a->cfg = *config;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->main_cond, NULL);
    pthread_cond_init(&a->driver_cond, NULL);
    st = build(a, err);
    a->cfg.places = NULL; /* they were lent */
    if (st != SPW_OK)
        spw_act_destroy(a);
    else
        *out = a;
    return st;
}

void
spw_act_destroy(spw_act *a)
{
    if (a == NULL)
        return;
    if (a->driver_started) {
        pthread_mutex_lock(&a->lock);
        a->stop = true;
        a->put_end = a->leave_next = 0; /* what has not begun to leave stays */
        a->turned = false;
        kick(a);
        pthread_mutex_unlock(&a->lock);
        pthread_join(a->driver, NULL);
    }
    spw_gpu_queue_destroy(a->d2h);
    spw_gpu_queue_destroy(a->h2d);
    for (uint32_t i = 0; a->swaps != NULL && i < a->cfg.path_count; i++)
        spw_swap_close(a->swaps[i]);
    spw_aio_destroy(a->aio);
    for (uint32_t i = 0; a->buffers != NULL && i < a->cfg.working_count; i++)
        spw_gpu_event_destroy(a->buffers[i].used);
    spw_gpu_event_destroy(a->made);
    spw_gpu_free(a->cfg.gpu, a->device_memory);
    if (a->host_pinned)
        spw_gpu_unpin_host(a->cfg.gpu, a->host.base);
    if (a->staging_pinned)
        spw_gpu_unpin_host(a->cfg.gpu, a->staging.base);
    spw_region_unmap(&a->host);
    spw_region_unmap(&a->staging);
    pthread_cond_destroy(&a->main_cond);
    pthread_cond_destroy(&a->driver_cond);
    pthread_mutex_destroy(&a->lock);
    spw_mem_free(a->list);
    spw_mem_free(a->buffers);
    spw_mem_free(a->working_free);
    spw_mem_free(a->staging_free);
    spw_mem_free(a->swaps);
    spw_mem_free(a);
}

/* ---------------------------------------------------------------- a pass, on the caller's thread */

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
        reset(a);
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
    kick(a);
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
        kick(a);
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
