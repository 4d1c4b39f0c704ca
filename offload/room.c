/*
 * What a store takes: bytes of every kind before it exists, for the plan, and the same memory cut up when it does. Both are
 * here, so that they cannot differ.
 */
#include "offload_internal.h"
#include <stdio.h>
#include <unistd.h>

enum { HUGE_BYTES = 2 << 20 };

static uint64_t
compute_bytes_of(const spw_store_config *cfg)
{
    return spw_dtype_bytes(spw_gpu_get_info(cfg->gpu)->compute_dtype);
}

static uint64_t
page_up(uint64_t bytes)
{
    return spw_round_up(bytes, 4096);
}

spw_quant
spw__store_code_form(const spw_store_config *cfg, const spw_store_chunk *c)
{
    return cfg->units[c->unit_idx].form;
}

static uint64_t
chunk_bytes(const spw_store_config *cfg, const spw_store_chunk *c, bool records)
{
    return records ? c->elems / 32 * spw__record_of(cfg, c->unit_idx)->bytes_32
                   : spw_store_weight_bytes(c->elems, cfg->weight_bytes, spw__store_code_form(cfg, c));
}

static uint64_t
chunk_grad(const spw_store_config *cfg, const spw_store_chunk *c)
{
    return cfg->units[c->unit_idx].spills ? c->elems * spw_dtype_bytes(cfg->grad_dtype) : 0;
}

/* Of the largest gradient that passes through a window. */
static uint64_t
largest_spilled(const spw_store_config *cfg)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < cfg->unit_count; i++) {
        uint64_t bytes = page_up(cfg->units[i].elems * spw_dtype_bytes(cfg->grad_dtype));
        if (cfg->units[i].spills && bytes > largest)
            largest = bytes;
    }
    return largest;
}

/* Of the largest chunk with a copy on nvme, in whole pages, a record with what goes or comes behind it; 0: none. */
static uint64_t
largest_nvme_chunk(const spw_store_config *cfg, bool records)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < cfg->chunk_count; i++) {
        const spw_store_chunk *c = &cfg->chunks[i];
        bool on_nvme = records ? cfg->units[c->unit_idx].trainable && c->record_tier == SPW_TIER_NVME
                               : c->weight_tier == SPW_TIER_NVME;
        uint64_t grad = chunk_grad(cfg, c), undo = spw__undo_bytes(cfg, c);
        uint64_t behind = grad > undo ? grad : undo; /* a gradient comes back to an update that is not ahead */
        uint64_t bytes = page_up(chunk_bytes(cfg, c, records)) + (records ? behind : 0);
        if (on_nvme && bytes > largest)
            largest = bytes;
    }
    return largest;
}

/* All of a unit is there, or nothing (check_config). */
bool
spw__store_on_device(const spw_store_config *cfg, uint32_t unit_idx)
{
    const spw_store_unit *u = &cfg->units[unit_idx];
    return u->trainable && !spw_gpu_get_info(cfg->gpu)->host_addressable && u->chunk_count > 0 &&
           cfg->chunks[u->chunk_first].record_tier == SPW_TIER_DEVICE;
}

bool
spw_store_direct(const spw_store_config *cfg, uint32_t unit_idx)
{
    const spw_store_unit *u = &cfg->units[unit_idx];
    bool all = u->chunk_count > 0 && !spw_gpu_get_info(cfg->gpu)->host_addressable &&
               spw_gpu_get_info(cfg->gpu)->compute_dtype == cfg->weight_dtype;
    for (uint32_t i = u->chunk_first; i < u->chunk_first + u->chunk_count && all; i++)
        all = cfg->chunks[i].weight_tier == SPW_TIER_DEVICE &&
              spw__store_code_form(cfg, &cfg->chunks[i]) == SPW_QUANT_NONE;
    return all;
}

typedef struct stage_need {
    uint64_t weights, codes, record, told;
} stage_need;

static void
raise_to(uint64_t *most, uint64_t bytes)
{
    *most = page_up(bytes) > *most ? page_up(bytes) : *most;
}

/* The largest of what only staging memory shows to workers: chunks on a device apart, and what codes decode to. */
static stage_need
largest_staged(const spw_store_config *cfg)
{
    stage_need need = {0};
    bool apart = !spw_gpu_get_info(cfg->gpu)->host_addressable;
    for (uint32_t i = 0; i < cfg->chunk_count; i++) {
        const spw_store_chunk *c = &cfg->chunks[i];
        bool there = apart && c->weight_tier == SPW_TIER_DEVICE, coded = spw__store_code_form(cfg, c) != SPW_QUANT_NONE;
        if (there || coded)
            raise_to(&need.weights, c->elems * cfg->weight_bytes);
        if (there && coded)
            raise_to(&need.codes, chunk_bytes(cfg, c, false));
        if (there && cfg->units[c->unit_idx].trainable)
            raise_to(&need.record, chunk_bytes(cfg, c, true));
        if (spw__store_on_device(cfg, c->unit_idx))
            need.told = spw_store_told_bytes(cfg->chunk_count);
    }
    return need;
}

uint32_t
spw_store_stages(uint32_t worker_count)
{
    return worker_count < 1 ? 1 : worker_count < STAGES_MAX ? worker_count : STAGES_MAX;
}

uint64_t
spw_store_stage_bytes(const spw_store_config *cfg)
{
    stage_need need = largest_staged(cfg);
    return spw_store_stages(cfg->worker_count) * (need.weights + need.codes + need.record) + need.told;
}

/* Of what it has on nvme. */
static uint64_t
places(const spw_store_chunk *c)
{
    return c->spare ? 2 : 1;
}

/* Apart from the arena, for nothing but the processor looks at them. */
static uint64_t
all_logs(const spw_store_config *cfg)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < cfg->chunk_count; i++)
        bytes += page_up(spw__log_bytes(cfg, &cfg->chunks[i]));
    return bytes;
}

void
spw_store_compute_need(const spw_store_config *cfg, spw_store_need *need)
{
    need->host_bytes = 0;
    need->device_bytes = page_up(cfg->device_cache_bytes);
    for (uint32_t i = 0; need->path_bytes != NULL && i < cfg->path_count; i++)
        need->path_bytes[i] = 0;
    for (uint32_t i = 0; i < cfg->chunk_count; i++) {
        const spw_store_chunk *c = &cfg->chunks[i];
        for (int records = 0; records < 2; records++) {
            spw_tier tier = records ? c->record_tier : c->weight_tier;
            uint64_t bytes = page_up(chunk_bytes(cfg, c, records));
            if (records && !cfg->units[c->unit_idx].trainable)
                continue;
            if (tier == SPW_TIER_HOST)
                need->host_bytes += bytes;
            else if (tier == SPW_TIER_DEVICE)
                need->device_bytes += bytes;
            else if (need->path_bytes != NULL && (records || !spw__in_place(c)))
                need->path_bytes[c->path_idx] +=
                    places(c) * (bytes + (records ? spw__undo_bytes(cfg, c) : 0)) + (records ? chunk_grad(cfg, c) : 0);
        }
    }
    for (uint32_t i = 0; i < cfg->unit_count; i++) {
        uint64_t grad = page_up(cfg->units[i].elems * spw_dtype_bytes(cfg->grad_dtype));
        if (cfg->units[i].trainable && !cfg->units[i].spills)
            *(spw__store_on_device(cfg, i) ? &need->device_bytes : &need->host_bytes) += grad;
    }
    need->host_bytes += all_logs(cfg) + spw_store_stage_bytes(cfg) + cfg->grad_window_count * largest_spilled(cfg);
    need->host_bytes += cfg->weight_slot_count * largest_nvme_chunk(cfg, false);
    need->host_bytes += cfg->record_slot_count * largest_nvme_chunk(cfg, true);
}

uint64_t
spw_store_table_bytes(const spw_store_config *cfg)
{
    uint64_t threads = (cfg->worker_count > 0 ? cfg->worker_count : 1) + 1; /* and the mover */
    uint64_t slots = (uint64_t)cfg->weight_slot_count + cfg->record_slot_count;
    return sizeof(spw_store) +
           cfg->unit_count *
               (sizeof(unit) + 4 * sizeof(future_use) + sizeof(future_unit) + sizeof(spw_gap) + 3 /* of sets */) +
           cfg->chunk_count * (sizeof(chunk) + LOANS_PER_CHUNK * sizeof(loan)) + slots * sizeof(int32_t) +
           threads * spw_touched_bytes(SPW_STACK_BYTES) +
           (cfg->path_count > 0 ? spw_aio_memory_bytes(&cfg->aio, cfg->path_count + (cfg->file_count > 0)) : 0) +
           (cfg->file_count > 0 ? spw_aio_bounce_bytes(&cfg->aio) : 0);
}

/* The gradients' memory, from s->grads to end, in record slots. What lies on small pages would be slow to read and write. */
static void
lay_loans(spw_store *s, const char *end)
{
    const char *whole = (char *)s->host.base + s->host.bytes / HUGE_BYTES * HUGE_BYTES;
    uint64_t most = (uint64_t)LOANS_PER_CHUNK * s->chunk_count;
    if (s->slot_record_bytes == 0 || s->grads == NULL)
        return;
    if (whole > s->grads && end > whole)
        end = whole;
    s->loan_count = (uint32_t)((uint64_t)(end - s->grads) / s->slot_record_bytes);
    if (s->loan_count > most)
        s->loan_count = (uint32_t)most;
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        uint64_t first, last;
        if (!s->units[c->plan.unit_idx].plan.trainable || s->units[c->plan.unit_idx].on_device ||
            s->units[c->plan.unit_idx].plan.spills)
            continue;
        first = (uint64_t)(spw__store_grad_of(s, c) - s->grads);
        last = first + c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype) - 1;
        c->loan_first = (uint32_t)(first / s->slot_record_bytes);
        c->loan_end = (uint32_t)(last / s->slot_record_bytes) + 1;
        if (c->loan_end > s->loan_count)
            c->loan_end = s->loan_count;
    }
}

/* What there is in host memory, on the device and for logs, and of each swap path how much was given away. */
typedef struct room {
    spw_carve host, device, logs;
    uint64_t *path_bytes;
} room;

static spw_status
take_memory(spw_store *s, const spw_store_need *need, room *r, spw_error *err)
{
    const spw_store_config *cfg = &s->cfg;
    const uint64_t logs_bytes = all_logs(cfg);
    spw_id_set nodes = {{0}};
    if (cfg->topology != NULL) /* any worker may take any chunk: no node is nearer to its memory than another */
        (void)spw_topology_nodes(cfg->topology, &nodes);
    SPW_TRY(spw_region_map_over(&s->host, need->host_bytes - logs_bytes, cfg->pin_memory ? SPW_REGION_LOCK : 0, &nodes,
                                err));
    if (logs_bytes > 0)
        SPW_TRY(spw_region_map_over(&s->logs, logs_bytes, 0, &nodes, err));
    SPW_TRY(spw_gpu_alloc(cfg->gpu, &s->device_memory, need->device_bytes > 0 ? need->device_bytes : 4096, err));
    s->pinned = spw__pin_host(cfg->gpu, &s->host);
    if (cfg->pin_memory && !s->host.locked && s->host.bytes > 0)
        spw_log(SPW_LOG_WARN, "the host arena (%llu bytes) is not page-locked: RLIMIT_MEMLOCK is too small (ulimit -l)",
                (unsigned long long)s->host.bytes);
    r->host = (spw_carve){.base = s->host.base, .bytes = s->host.bytes};
    r->device = (spw_carve){.base = s->device_memory, .bytes = need->device_bytes};
    r->logs = (spw_carve){.base = s->logs.base, .bytes = s->logs.bytes};
    return SPW_OK;
}

/* Slots, windows, gradients and stages; the device's cache. */
static void
carve_buffers(spw_store *s, room *r)
{
    const spw_store_config *cfg = &s->cfg;
    const stage_need staged = largest_staged(cfg);
    s->slot_weight_bytes = largest_nvme_chunk(cfg, false);
    s->slot_record_bytes = largest_nvme_chunk(cfg, true);
    s->weight_slots = spw_carve_take(&r->host, cfg->weight_slot_count * s->slot_weight_bytes);
    s->record_slots = spw_carve_take(&r->host, cfg->record_slot_count * s->slot_record_bytes);
    s->window_bytes = largest_spilled(cfg);
    s->window_memory = spw_carve_take(&r->host, cfg->grad_window_count * s->window_bytes);
    s->window_free = cfg->grad_window_count;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *u = &s->units[i];
        if (u->plan.trainable && !u->plan.spills)
            u->grad =
                spw_carve_take(u->on_device ? &r->device : &r->host, u->plan.elems * spw_dtype_bytes(cfg->grad_dtype));
        if (s->grads == NULL && !u->on_device)
            s->grads = u->grad;
    }
    lay_loans(s, r->host.base + r->host.used);
    /* What never meets a disk comes last, where the rest of a huge page is small ones. */
    s->stage_count = spw_store_stage_bytes(cfg) > 0 ? spw_store_stages(cfg->worker_count) : 0;
    for (uint32_t i = 0; i < s->stage_count; i++) {
        s->stages[i].weights = spw_carve_take(&r->host, staged.weights);
        s->stages[i].codes = spw_carve_take(&r->host, staged.codes);
        s->stages[i].record = spw_carve_take(&r->host, staged.record);
    }
    s->bad = spw_carve_take(&r->host, staged.told);
    s->device_cache = spw_carve_take(&r->device, cfg->device_cache_bytes);
}

/* Where in the swap file of its path a chunk's weights lie, or its record and its gradient. */
static void
give_extent(spw_store *s, chunk *c, bool record, uint64_t bytes, room *r)
{
    uint64_t *at = &r->path_bytes[c->plan.path_idx];
    if ((record ? c->plan.record_tier : c->plan.weight_tier) == SPW_TIER_NVME && (record || !spw__in_place(&c->plan))) {
        bytes += record ? spw__undo_bytes(&s->cfg, &c->plan) : 0;
        *(record ? &c->record_offset : &c->weight_offset) = *at;
        *(record ? &c->record_spare : &c->weight_spare) = *at + bytes;
        *at += places(&c->plan) * bytes;
    }
    if (record && s->units[c->plan.unit_idx].plan.spills) {
        c->grad_offset = *at;
        *at += chunk_grad(&s->cfg, &c->plan);
    }
}

/* Where a chunk's weights are, or its record: in memory or in a swap file. */
static void
give_home(spw_store *s, chunk *c, bool record, room *r)
{
    const spw_tier tier = record ? c->plan.record_tier : c->plan.weight_tier;
    const uint64_t bytes = page_up(chunk_bytes(&s->cfg, &c->plan, record));
    const unit *u = &s->units[c->plan.unit_idx];
    void *home = tier == SPW_TIER_NVME ? NULL : spw_carve_take(tier == SPW_TIER_HOST ? &r->host : &r->device, bytes);
    if (record) {
        uint64_t log_bytes = page_up(spw__log_bytes(&s->cfg, &c->plan));
        c->log = log_bytes > 0 ? spw_carve_take(&r->logs, log_bytes) : NULL;
        c->record = home;
        c->r = tier == SPW_TIER_NVME ? R_EMPTY : R_READY;
    } else {
        c->weights = home;
        SPW_ASSERT(!u->direct || c->idx == u->plan.chunk_first ||
                   (char *)home == (char *)c[-1].weights + chunk_bytes(&s->cfg, &c[-1].plan, false));
        c->w = tier == SPW_TIER_NVME ? W_EMPTY : W_CLEAN;
    }
    s->any_nvme = s->any_nvme || tier == SPW_TIER_NVME;
    give_extent(s, c, record, bytes, r);
}

static spw_status
open_swaps(spw_store *s, const uint64_t *path_bytes, spw_error *err)
{
    const spw_store_config *cfg = &s->cfg;
    char job[64];
    spw_status st;
    snprintf(job, sizeof job, "%ld-%llx", (long)getpid(), (unsigned long long)spw_now_ns());
    s->cfg.aio.fixed = &s->host;
    if (s->cfg.aio.probe_dir == NULL)
        s->cfg.aio.probe_dir = cfg->paths[0];
    st = spw_aio_create(&s->aio, &s->cfg.aio, err);
    if (st == SPW_EIO || st == SPW_ENOSPC) /* a limit, a quota, no more files: what is free was asked before */
        spw_error_wrap(err, "swap space in %s", cfg->paths[0]);
    if (st == SPW_OK && cfg->aio_faults != NULL)
        spw_test_aio_fault(s->aio, spw_test_aio_scheduled, cfg->aio_faults);
    for (uint32_t i = 0; st == SPW_OK && i < cfg->path_count; i++)
        st = spw_swap_open(&s->swaps[i], s->aio, cfg->paths[i], cfg->job != NULL ? cfg->job : job, cfg->rank,
                           path_bytes[i] > 0 ? path_bytes[i] : 4096, err);
    return st == SPW_OK ? spw__in_place_open(s, err) : st;
}

/* What disks hold is asked first, for a large arena takes minutes to be there. Extents: all weights first, then all records. */
static spw_status
carve(spw_store *s, spw_store_need *need, spw_error *err)
{
    const spw_store_config *cfg = &s->cfg;
    room r = {.path_bytes = need->path_bytes};
    spw_store_compute_need(cfg, need);
    SPW_TRY(spw_swap_check(cfg->paths, need->path_bytes, cfg->path_count, err));
    SPW_TRY(take_memory(s, need, &r, err));
    carve_buffers(s, &r);
    memset(r.path_bytes, 0, cfg->path_count * sizeof *r.path_bytes);
    for (uint32_t i = 0; i < s->chunk_count; i++)
        give_home(s, &s->chunks[i], false, &r);
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        if (s->units[s->chunks[i].plan.unit_idx].plan.trainable)
            give_home(s, &s->chunks[i], true, &r);
    }
    return s->any_nvme ? open_swaps(s, r.path_bytes, err) : SPW_OK;
}

spw_status
spw__store_carve(spw_store *s, spw_error *err)
{
    spw_store_need need = {.path_bytes = spw_mem_calloc(s->cfg.path_count + 1, sizeof(uint64_t))};
    spw_status st = need.path_bytes == NULL ? SPW_RAISE(err, SPW_ENOMEM, "store") : carve(s, &need, err);
    spw_mem_free(need.path_bytes);
    return st;
}

spw_status
spw__store_check_config(const spw_store_config *cfg, spw_error *err)
{
    uint64_t largest_unit = 0;
    for (uint32_t i = 0; i < cfg->unit_count; i++) {
        if (cfg->units[i].elems > largest_unit && !spw_store_direct(cfg, i))
            largest_unit = cfg->units[i].elems;
    }
    if (largest_unit * compute_bytes_of(cfg) > cfg->device_cache_bytes)
        return SPW_RAISE(err, SPW_EINVAL, "the largest unit takes %llu bytes on the device, its cache has %llu",
                         (unsigned long long)(largest_unit * compute_bytes_of(cfg)),
                         (unsigned long long)cfg->device_cache_bytes);
    if ((largest_nvme_chunk(cfg, false) > 0 && cfg->weight_slot_count == 0) ||
        (largest_nvme_chunk(cfg, true) > 0 && cfg->record_slot_count == 0))
        return SPW_RAISE(err, SPW_EINVAL, "chunks on nvme need at least one slot of each kind");
    for (uint32_t i = 0; i < cfg->chunk_count; i++) {
        const spw_store_unit *u = &cfg->units[cfg->chunks[i].unit_idx];
        const spw_store_chunk *c = &cfg->chunks[i];
        const spw_store_chunk *next = c + (i + 1 < cfg->chunk_count);
        if (c->spare && (!u->trainable || c->record_tier == SPW_TIER_DEVICE ||
                         (c->record_tier == SPW_TIER_HOST && c->weight_tier == SPW_TIER_DEVICE)))
            return SPW_RAISE(err, SPW_EINVAL,
                             "chunk %u of unit %u: updated ahead of the gate may be what is trained, with a record on "
                             "nvme, or in host memory and weights there or on nvme",
                             i, c->unit_idx);
        if (spw__log_bytes(cfg, c) > 0 && cfg->undo == NULL)
            return SPW_RAISE(err, SPW_EINVAL, "chunk %u of unit %u has a log, and nothing takes updates back by it", i,
                             c->unit_idx);
        if (next->unit_idx == c->unit_idx && next->spare != c->spare && c->record_tier == SPW_TIER_NVME &&
            next->record_tier == SPW_TIER_NVME)
            return SPW_RAISE(
                err, SPW_EINVAL,
                "chunk %u of unit %u: of a unit's records on nvme all are updated ahead of the gate or none", i,
                c->unit_idx);
        if (u->whole && (!u->trainable || u->spills || c->spare || cfg->prepare == NULL ||
                         (spw__store_on_device(cfg, c->unit_idx) && cfg->prepare_device == NULL)))
            return SPW_RAISE(
                err, SPW_EINVAL,
                "chunk %u of unit %u: an update in two halves needs a gradient that stays in memory, functions for "
                "both, and runs when the gate is open",
                i, c->unit_idx);
        if (u->spills && (!u->trainable || cfg->chunks[i].record_tier != SPW_TIER_NVME || cfg->grad_window_count == 0))
            return SPW_RAISE(err, SPW_EINVAL,
                             "chunk %u of unit %u: a gradient that spills needs a record on nvme and a window", i,
                             cfg->chunks[i].unit_idx);
    }
    for (uint32_t i = 0; i < cfg->chunk_count && !spw_gpu_get_info(cfg->gpu)->host_addressable; i++) {
        const spw_store_chunk *c = &cfg->chunks[i];
        bool there = spw__store_on_device(cfg, c->unit_idx);
        if (cfg->units[c->unit_idx].trainable &&
            ((c->weight_tier == SPW_TIER_DEVICE) != there || (c->record_tier == SPW_TIER_DEVICE) != there))
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "chunk %u of unit %u: weights on %s and record on %s; device %s, whose memory the host "
                             "cannot address, holds all of a unit or nothing",
                             i, c->unit_idx, spw_tier_name(c->weight_tier), spw_tier_name(c->record_tier),
                             spw_gpu_get_info(cfg->gpu)->name);
        if (there && (cfg->update_device == NULL || cfg->bad_fn == NULL))
            return SPW_RAISE(err, SPW_EINVAL, "records on device %s and no function that updates them there",
                             spw_gpu_get_info(cfg->gpu)->name);
    }
    return SPW_OK;
}
