/*
 * What activation checkpoints take: bytes of every kind before they exist, for the plan, and the same memory and swap space when
 * they do. The driver starts last and ends first.
 */
#include "act_internal.h"
#include <stdio.h>
#include <unistd.h>

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
    spw__act_reset(a);
    if (count_in(cfg, SPW_TIER_DEVICE) == a->count)
        return SPW_OK; /* nothing moves */
    SPW_TRY(spw_gpu_event_create(&a->made, cfg->gpu, err));
    SPW_TRY(spw_gpu_queue_create(&a->d2h, cfg->gpu, SPW_QUEUE_D2H, err));
    SPW_TRY(spw_gpu_queue_create(&a->h2d, cfg->gpu, SPW_QUEUE_H2D, err));
    rc = pthread_create(&a->driver, NULL, spw__act_driver, a);
    if (rc != 0)
        return SPW_RAISE_SYS(err, rc, "start of the activations' thread " SPW_THREAD_LIMITS);
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
        spw__act_kick(a);
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
