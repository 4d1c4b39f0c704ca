/*
 * The store: owns all copies of all chunks. This file is its face to the runtime (create, acquire, release, steps,
 * sweeps) and the workers that verify checksums and call the function that changes numbers; mover.c moves the bytes.
 */
#include "offload_internal.h"
#include <errno.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

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
spw__store_drop_device(spw_store *s, unit *u)
{
    SPW_ASSERT(u->pins == 0 && u->copies_inflight == 0);
    if (s->cfg.chaos_seed != 0 && spw_gpu_get_info(s->cfg.gpu)->host_addressable)
        memset(s->device_cache + u->device_offset, 0xff, u->device_bytes);
    u->d = D_NONE;
    u->abort_fill = false;
}

void
spw__store_free_record_slot(spw_store *s, chunk *c)
{
    uint32_t slot = (uint32_t)c->record_slot;
    if (s->cfg.chaos_seed != 0)
        memset(c->record, 0xff, c->plan.elems / 32 * s->cfg.record_bytes_32);
    if (slot < s->cfg.record_slot_count) {
        s->record_slot_free[s->record_slot_free_count++] = c->record_slot;
    } else {
        s->loans[slot - s->cfg.record_slot_count].chunk = NULL;
        pthread_cond_broadcast(&s->main_cond);
    }
    c->record_slot = -1;
    c->record = NULL;
    c->r = R_EMPTY;
}

/* Lock held. From now on a gradient is there, or, when not held, none that anybody will read. */
static void
hold_grad(spw_store *s, chunk *c, bool held)
{
    if (c->grad_held == held)
        return;
    c->grad_held = held;
    for (uint32_t i = c->loan_first; i < c->loan_end; i++)
        s->loans[i].held = held ? s->loans[i].held + 1 : s->loans[i].held - 1;
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

/* ---------------------------------------------------------------- workers */

static spw_status
corrupt(const spw_store *s, const chunk *c, bool is_weight, uint64_t found, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT,
                     "%s at offset %llu (%s of chunk %u, unit %u, generation %llu): checksum is %016llx, %016llx was "
                     "written; the swap file changed on disk",
                     spw_aio_file_path(spw_swap_file(s->swaps[c->plan.path_idx])),
                     (unsigned long long)(is_weight ? c->weight_offset : c->record_offset),
                     is_weight ? "weights" : "record", c->idx, c->plan.unit_idx, (unsigned long long)c->generation,
                     (unsigned long long)found, (unsigned long long)(is_weight ? c->weight_sum : c->record_sum));
}

/* Checksums of one job, counted. */
typedef struct sums {
    uint64_t bytes, ns;
} sums;

enum { PIECE = 16384 }; /* elements; all its arrays together fit a core's cache */

/* Of elements [first, first + n) of one array, after `before`. */
static uint64_t
sum_more(uint64_t before, const void *array, uint64_t first, uint64_t n, uint32_t bytes_32, sums *count)
{
    uint64_t begin = spw_now_ns(), bytes = n / 32 * bytes_32;
    uint64_t sum = spw_checksum_more(before, (const char *)array + first / 32 * bytes_32, bytes);
    count->bytes += bytes;
    count->ns += spw_now_ns() - begin;
    return sum;
}

static uint64_t
sum_weights(const spw_store *s, const chunk *c, uint64_t before, uint64_t first, uint64_t n, sums *count)
{
    return sum_more(before, c->weights, first, n, 32 * s->cfg.weight_bytes, count);
}

static uint64_t
sum_record(const spw_store *s, const chunk *c, uint64_t before, uint64_t first, uint64_t n, sums *count)
{
    const char *array = c->record;
    for (uint32_t k = 0; k < s->cfg.record_part_count; k++) {
        before = sum_more(before, array, first, n, s->cfg.record_parts[k], count);
        array += c->plan.elems / 32 * s->cfg.record_parts[k];
    }
    return before;
}

static uint64_t
piece_at(const chunk *c, uint64_t first)
{
    return c->plan.elems - first < PIECE ? c->plan.elems - first : PIECE;
}

static char *
grad_of(const spw_store *s, const chunk *c)
{
    const unit *u = &s->units[c->plan.unit_idx];
    return (char *)u->grad + (c->plan.first - u->plan.first) * spw_dtype_bytes(s->cfg.grad_dtype);
}

/* Of a record that has just been read, before somebody else than an update looks at it. */
static spw_status
verify_record(const spw_store *s, const chunk *c, sums *count, spw_error *err)
{
    uint64_t found = 0;
    for (uint64_t first = 0; first < c->plan.elems; first += piece_at(c, first))
        found = sum_record(s, c, found, first, piece_at(c, first), count);
    return found == c->record_sum ? SPW_OK : corrupt(s, c, false, found, err);
}

/* Hands the chunk to the snapshot as it is; no lock held, nobody changes it meanwhile. */
static spw_status
take_snapshot(spw_store *s, const chunk *c, sums *count, spw_error *err)
{
    void *record = s->units[c->plan.unit_idx].plan.trainable ? c->record : NULL;
    if (c->record_fresh && s->cfg.integrity)
        SPW_TRY(verify_record(s, c, count, err));
    return s->snap_fn(s->snap_ctx, c->idx, c->weights, record, NULL, err);
}

/*
 * The job itself; no lock held, the chunk is this worker's. Checksums run along, piece by piece.
 * snap: the snapshot gets the chunk before it is updated.
 */
static spw_status
run_job(spw_store *s, chunk *c, unit_op op, bool snap, sums *count, spw_error *err)
{
    const unit *u = &s->units[c->plan.unit_idx];
    const char *grad = op == OP_UPDATE ? grad_of(s, c) : NULL;
    void *record = u->plan.trainable ? c->record : NULL;
    bool verify = c->record_fresh && s->cfg.integrity, writes = op != OP_VISIT && s->cfg.integrity;
    bool sum_w = writes && c->plan.weight_tier == SPW_TIER_NVME;
    bool sum_r = writes && c->plan.record_tier == SPW_TIER_NVME && record != NULL;
    uint64_t found = 0, weight_sum = 0, record_sum = 0;
    spw_status st = SPW_OK;
    spw__store_chaos_delay(s, c->idx);
    if (op == OP_EDIT && verify) {
        SPW_TRY(verify_record(s, c, count, err));
        verify = false;
    }
    if (op == OP_INIT || op == OP_EDIT)
        st = s->sweep_fn(s->sweep_ctx, c->idx, c->weights, record, NULL, err);
    if (op == OP_UPDATE && snap) {
        SPW_TRY(take_snapshot(s, c, count, err));
        verify = false; /* it has been */
    }
    for (uint64_t first = 0, n; first < c->plan.elems && st == SPW_OK; first += n) {
        n = piece_at(c, first);
        if (verify)
            found = sum_record(s, c, found, first, n, count);
        if (op == OP_UPDATE)
            st = s->cfg.update(s->cfg.update_ctx, c->idx, c->weights, record, grad, first, n, err);
        if (sum_w)
            weight_sum = sum_weights(s, c, weight_sum, first, n, count);
        if (sum_r)
            record_sum = sum_record(s, c, record_sum, first, n, count);
    }
    if (st == SPW_OK && verify && found != c->record_sum) /* before anybody sees what came of it */
        return corrupt(s, c, false, found, err);
    if (st == SPW_OK && op == OP_VISIT && (snap || !s->snap_sweep))
        st = s->sweep_fn(s->sweep_ctx, c->idx, c->weights, record, NULL, err);
    if (op == OP_UPDATE && s->cfg.chaos_seed != 0)
        memset(grad_of(s, c), 0xff, c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype));
    c->weight_sum = sum_w ? weight_sum : c->weight_sum;
    c->record_sum = sum_r ? record_sum : c->record_sum;
    return st;
}

static void
mark_dirty(spw_store *s, chunk *c)
{
    if (!c->in_dirty) {
        c->in_dirty = true;
        c->next_dirty = s->dirty_head;
        s->dirty_head = c;
    }
}

/* Lock held. */
static void
snapshot_has(spw_store *s, chunk *c)
{
    c->snap = false;
    s->snap_left--;
}

/* At most half of the workers: the others are there for what training waits for. */
static bool
may_snap_idle(const spw_store *s)
{
    return s->snap_left > 0 && !s->snap_sweep && s->snap_idle < (s->worker_started + 1) / 2;
}

/* Lock held. A chunk that the snapshot lacks, whole in memory, with nobody about to change it; NULL: none. */
static chunk *
idle_chunk(spw_store *s)
{
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        uint32_t at = (s->snap_next + i) % s->chunk_count;
        chunk *c = &s->chunks[at];
        if (spw__snap_wants(c) && (c->r == R_READY || c->r == R_NONE) &&
            (c->w == W_CLEAN || c->w == W_DIRTY || c->w == W_WRITING)) {
            s->snap_next = at + 1;
            return c;
        }
    }
    return NULL;
}

/* Lock held, released in between. The pin keeps the weights, the state of the record keeps its update from starting. */
static void
snap_idle(spw_store *s, chunk *c, sums *count, spw_error *err)
{
    bool record = c->r == R_READY;
    uint64_t begin = spw_now_ns();
    c->pins++;
    c->r = record ? R_UPDATING : c->r;
    s->snap_idle++;
    pthread_mutex_unlock(&s->lock);
    spw__store_chaos_delay(s, c->idx);
    (void)take_snapshot(s, c, count, err);
    pthread_mutex_lock(&s->lock);
    spw_timeline_add(SPW_LANE_ADAM, "save", c->plan.unit_idx, begin, spw_now_ns());
    s->snap_idle--;
    c->r = record ? R_READY : c->r;
    c->pins--;
    if (err->status == SPW_OK)
        snapshot_has(s, c);
    pthread_cond_broadcast(&s->main_cond);
}

/* Hands the chunk back, under the lock. */
static void
finish_job(spw_store *s, chunk *c, unit_op op)
{
    unit *u = &s->units[c->plan.unit_idx];
    bool record_on_nvme = c->plan.record_tier == SPW_TIER_NVME && c->r != R_NONE;
    c->record_fresh = false;
    if (op == OP_VISIT) {
        c->pins--;
        if (record_on_nvme) { /* unchanged: the slot goes back without a write */
            spw__store_free_record_slot(s, c);
        } else if (c->r != R_NONE) {
            c->r = R_READY;
        }
    } else {
        c->w = c->plan.weight_tier == SPW_TIER_NVME ? W_DIRTY : W_CLEAN;
        if (c->r != R_NONE)
            c->r = record_on_nvme ? R_DIRTY : R_READY;
        if (c->w == W_DIRTY || c->r == R_DIRTY)
            mark_dirty(s, c);
        if (op == OP_UPDATE)
            hold_grad(s, c, false);
        c->generation = op == OP_UPDATE ? c->generation + 1 : op == OP_INIT ? 0 : c->generation;
        s->stats.updates += op == OP_UPDATE;
    }
    if (++u->done_next == u->op_end) {
        u->op = OP_NONE;
        u->generation = c->generation;
        pthread_cond_broadcast(&s->main_cond);
    }
}

void *
spw__store_worker_main(void *arg)
{
    spw_store *s = arg;
    (void)pthread_setname_np(pthread_self(), "spw-adam");
    pthread_mutex_lock(&s->lock);
    for (;;) {
        bool verify = s->verify_head != NULL;
        chunk *c = verify ? s->verify_head : s->job_head;
        spw_error err = {0};
        sums count = {0};
        uint64_t begin;
        bool idle = c == NULL && !s->stop && s->poison.status == SPW_OK && may_snap_idle(s);
        if (idle)
            idle = (c = idle_chunk(s)) != NULL;
        if (c == NULL || s->poison.status != SPW_OK) {
            if (s->stop)
                break;
            pthread_cond_wait(&s->work_cond, &s->lock);
            continue;
        }
        s->jobs_running++;
        if (idle) {
            snap_idle(s, c, &count, &err);
        } else if (verify) {
            uint64_t sum = 0;
            s->verify_head = c->next_job;
            pthread_mutex_unlock(&s->lock);
            spw__store_chaos_delay(s, c->idx);
            for (uint64_t first = 0; first < c->plan.elems; first += piece_at(c, first))
                sum = sum_weights(s, c, sum, first, piece_at(c, first), &count);
            if (sum != c->weight_sum)
                corrupt(s, c, true, sum, &err);
            pthread_mutex_lock(&s->lock);
            if (err.status == SPW_OK)
                c->w = W_CLEAN;
        } else {
            unit_op op = s->units[c->plan.unit_idx].op;
            bool snap = spw__snap_wants(c);
            s->job_head = c->next_job;
            pthread_mutex_unlock(&s->lock);
            begin = spw_now_ns();
            (void)run_job(s, c, op, snap, &count, &err);
            pthread_mutex_lock(&s->lock);
            if (err.status == SPW_OK && snap && (op == OP_UPDATE || s->snap_sweep))
                snapshot_has(s, c);
            s->stats.update_busy_ns += spw_now_ns() - begin;
            spw_timeline_add(SPW_LANE_ADAM, op == OP_UPDATE ? "update" : "sweep", c->plan.unit_idx, begin,
                             spw_now_ns());
            if (err.status == SPW_OK)
                finish_job(s, c, op);
        }
        s->jobs_running--;
        s->stats.checked_bytes += count.bytes;
        s->stats.checksum_ns += count.ns;
        if (err.status != SPW_OK)
            spw__store_poison(s, &err);
        spw__store_kick(s);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---------------------------------------------------------------- sizes and lay-out */

static uint64_t
compute_bytes_of(const spw_store_config *cfg)
{
    return spw_dtype_bytes(spw_gpu_get_info(cfg->gpu)->compute_dtype);
}

/* A record is never smaller than 3 bytes per element, a gradient never larger than 4. */
enum { LOANS_PER_CHUNK = 2 };

static uint64_t
page_up(uint64_t bytes)
{
    return spw_round_up(bytes, 4096);
}

/* Largest chunk with a copy on nvme, in elements; 0: none. */
static uint64_t
largest_nvme_chunk(const spw_store_config *cfg, bool records)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < cfg->chunk_count; i++) {
        const spw_store_chunk *c = &cfg->chunks[i];
        bool on_nvme = records ? cfg->units[c->unit_idx].trainable && c->record_tier == SPW_TIER_NVME
                               : c->weight_tier == SPW_TIER_NVME;
        if (on_nvme && c->elems > largest)
            largest = c->elems;
    }
    return largest;
}

static uint64_t
chunk_bytes(const spw_store_config *cfg, uint64_t elems, bool records)
{
    return records ? elems / 32 * cfg->record_bytes_32 : elems * cfg->weight_bytes;
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
            uint64_t bytes = page_up(chunk_bytes(cfg, c->elems, records));
            if (records && !cfg->units[c->unit_idx].trainable)
                continue;
            if (tier == SPW_TIER_HOST)
                need->host_bytes += bytes;
            else if (tier == SPW_TIER_DEVICE)
                need->device_bytes += bytes;
            else if (need->path_bytes != NULL)
                need->path_bytes[c->path_idx] += bytes;
        }
    }
    for (uint32_t i = 0; i < cfg->unit_count; i++) {
        if (cfg->units[i].trainable)
            need->host_bytes += page_up(cfg->units[i].elems * spw_dtype_bytes(cfg->grad_dtype));
    }
    need->host_bytes += cfg->weight_slot_count * page_up(largest_nvme_chunk(cfg, false) * cfg->weight_bytes);
    need->host_bytes += cfg->record_slot_count * page_up(chunk_bytes(cfg, largest_nvme_chunk(cfg, true), true));
}

uint64_t
spw_store_table_bytes(const spw_store_config *cfg)
{
    uint64_t threads = (cfg->worker_count > 0 ? cfg->worker_count : 1) + 1; /* and the mover */
    uint64_t slots = (uint64_t)cfg->weight_slot_count + cfg->record_slot_count;
    return sizeof(spw_store) + cfg->unit_count * (sizeof(unit) + 4 * sizeof(spw_store_use)) +
           cfg->chunk_count * (sizeof(chunk) + LOANS_PER_CHUNK * sizeof(loan)) + slots * sizeof(int32_t) +
           threads * spw_touched_bytes(SPW_STACK_BYTES) +
           (cfg->path_count > 0 ? spw_aio_memory_bytes(&cfg->aio, cfg->path_count) : 0);
}

/* The gradients' memory, from s->grads to end, in record slots. */
static void
lay_loans(spw_store *s, const char *end)
{
    uint64_t most = (uint64_t)LOANS_PER_CHUNK * s->chunk_count;
    if (s->slot_record_bytes == 0 || s->grads == NULL)
        return;
    s->loan_count = (uint32_t)((uint64_t)(end - s->grads) / s->slot_record_bytes);
    if (s->loan_count > most)
        s->loan_count = (uint32_t)most;
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        uint64_t first, last;
        if (!s->units[c->plan.unit_idx].plan.trainable)
            continue;
        first = (uint64_t)(grad_of(s, c) - s->grads);
        last = first + c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype) - 1;
        c->loan_first = (uint32_t)(first / s->slot_record_bytes);
        c->loan_end = (uint32_t)(last / s->slot_record_bytes) + 1;
        if (c->loan_end > s->loan_count)
            c->loan_end = s->loan_count;
    }
}

static spw_status
carve_memory(spw_store *s, spw_error *err)
{
    const spw_store_config *cfg = &s->cfg;
    spw_store_need need = {.path_bytes = spw_mem_calloc(cfg->path_count + 1, sizeof(uint64_t))};
    spw_carve host, device;
    spw_id_set nodes = {{0}};
    spw_status st = SPW_OK;
    if (need.path_bytes == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "store");
    spw_store_compute_need(cfg, &need);
    if (cfg->topology != NULL) /* any worker may take any chunk: no node is nearer to its memory than another */
        (void)spw_topology_nodes(cfg->topology, &nodes);
    st = spw_region_map_over(&s->host, need.host_bytes, cfg->pin_memory ? SPW_REGION_LOCK : 0, &nodes, err);
    if (st == SPW_OK)
        st = spw_gpu_alloc(cfg->gpu, &s->device_memory, need.device_bytes > 0 ? need.device_bytes : 4096, err);
    if (st != SPW_OK)
        goto out;
    s->pinned = spw__pin_host(cfg->gpu, &s->host);
    if (cfg->pin_memory && !s->host.locked && s->host.bytes > 0)
        spw_log(SPW_LOG_WARN, "the host arena (%llu bytes) is not page-locked: RLIMIT_MEMLOCK is too small (ulimit -l)",
                (unsigned long long)s->host.bytes);
    host = (spw_carve){.base = s->host.base, .bytes = s->host.bytes};
    device = (spw_carve){.base = s->device_memory, .bytes = need.device_bytes};
    s->slot_weight_bytes = page_up(largest_nvme_chunk(cfg, false) * cfg->weight_bytes);
    s->slot_record_bytes = page_up(chunk_bytes(cfg, largest_nvme_chunk(cfg, true), true));
    s->weight_slots = spw_carve_take(&host, cfg->weight_slot_count * s->slot_weight_bytes);
    s->record_slots = spw_carve_take(&host, cfg->record_slot_count * s->slot_record_bytes);
    s->device_cache = spw_carve_take(&device, cfg->device_cache_bytes);
    memset(need.path_bytes, 0, cfg->path_count * sizeof(uint64_t));
    for (int records = 0; records < 2; records++) { /* extents: all weights first, then all records */
        for (uint32_t i = 0; i < s->chunk_count; i++) {
            chunk *c = &s->chunks[i];
            spw_tier tier = records ? c->plan.record_tier : c->plan.weight_tier;
            uint64_t bytes = page_up(chunk_bytes(cfg, c->plan.elems, records));
            void *home;
            if (records && !cfg->units[c->plan.unit_idx].trainable)
                continue;
            home = tier == SPW_TIER_NVME ? NULL : spw_carve_take(tier == SPW_TIER_HOST ? &host : &device, bytes);
            if (records) {
                c->record = home;
                c->r = tier == SPW_TIER_NVME ? R_EMPTY : R_READY;
            } else {
                c->weights = home;
                c->w = tier == SPW_TIER_NVME ? W_EMPTY : W_CLEAN;
            }
            if (tier == SPW_TIER_NVME) {
                *(records ? &c->record_offset : &c->weight_offset) = need.path_bytes[c->plan.path_idx];
                need.path_bytes[c->plan.path_idx] += bytes;
                s->any_nvme = true;
            }
        }
    }
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *u = &s->units[i];
        if (u->plan.trainable)
            u->grad = spw_carve_take(&host, u->plan.elems * spw_dtype_bytes(cfg->grad_dtype));
        if (s->grads == NULL)
            s->grads = u->grad;
    }
    lay_loans(s, host.base + host.used);
    if (s->any_nvme) {
        char job[64];
        snprintf(job, sizeof job, "%ld-%llx", (long)getpid(), (unsigned long long)spw_now_ns());
        s->cfg.aio.fixed = &s->host;
        if (s->cfg.aio.probe_dir == NULL)
            s->cfg.aio.probe_dir = cfg->paths[0];
        st = spw_aio_create(&s->aio, &s->cfg.aio, err);
        if (st == SPW_OK && cfg->aio_faults != NULL)
            spw_test_aio_fault(s->aio, spw_test_aio_scheduled, cfg->aio_faults);
        for (uint32_t i = 0; st == SPW_OK && i < cfg->path_count; i++)
            st = spw_swap_open(&s->swaps[i], s->aio, cfg->paths[i], cfg->job != NULL ? cfg->job : job, cfg->rank,
                               need.path_bytes[i] > 0 ? need.path_bytes[i] : 4096, err);
    }
out:
    spw_mem_free(need.path_bytes);
    return st;
}

static spw_status
check_config(const spw_store_config *cfg, spw_error *err)
{
    uint64_t largest_unit = 0;
    for (uint32_t i = 0; i < cfg->unit_count; i++) {
        if (cfg->units[i].elems > largest_unit)
            largest_unit = cfg->units[i].elems;
    }
    if (largest_unit * compute_bytes_of(cfg) > cfg->device_cache_bytes)
        return SPW_RAISE(err, SPW_EINVAL, "the largest unit takes %llu bytes on the device, its cache has %llu",
                         (unsigned long long)(largest_unit * compute_bytes_of(cfg)),
                         (unsigned long long)cfg->device_cache_bytes);
    if ((largest_nvme_chunk(cfg, false) > 0 && cfg->weight_slot_count == 0) ||
        (largest_nvme_chunk(cfg, true) > 0 && cfg->record_slot_count == 0))
        return SPW_RAISE(err, SPW_EINVAL, "chunks on nvme need at least one slot of each kind");
    if (!spw_gpu_get_info(cfg->gpu)->host_addressable) {
        for (uint32_t i = 0; i < cfg->chunk_count; i++) {
            if (cfg->chunks[i].weight_tier == SPW_TIER_DEVICE || cfg->chunks[i].record_tier == SPW_TIER_DEVICE)
                return SPW_RAISE(err, SPW_EUNSUPPORTED,
                                 "state on device %s, whose memory the host cannot address: updates run on the host",
                                 spw_gpu_get_info(cfg->gpu)->name);
        }
    }
    return SPW_OK;
}

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
            st = SPW_RAISE_SYS(err, rc, "start of optimizer thread %u", i + 1);
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
    s->future_capacity = 4 * cfg->unit_count + 64;
    s->future = spw_mem_calloc(s->future_capacity, sizeof *s->future);
    s->swaps = spw_mem_calloc(cfg->path_count + 1, sizeof(spw_swap *));
    s->workers = spw_mem_calloc(workers, sizeof(pthread_t));
    if (!s->units || !s->chunks || !s->weight_slot_owner || !s->record_slot_free || !s->loans || !s->future ||
        !s->swaps || !s->workers)
        return SPW_RAISE(err, SPW_ENOMEM, "store of %u chunks", cfg->chunk_count);
    s->unit_count = cfg->unit_count;
    s->chunk_count = cfg->chunk_count;
    s->compute_bytes = (uint32_t)compute_bytes_of(cfg);
    for (uint32_t i = 0; i < s->unit_count; i++) {
        s->units[i].plan = cfg->units[i];
        s->units[i].device_bytes = cfg->units[i].elems * s->compute_bytes;
        s->units[i].next_use = s->units[i].next_use2 = UINT32_MAX;
    }
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        s->chunks[i].store = s;
        s->chunks[i].idx = i;
        s->chunks[i].plan = cfg->chunks[i];
        s->chunks[i].weight_slot = s->chunks[i].record_slot = -1;
    }
    for (uint32_t i = 0; i < cfg->weight_slot_count; i++)
        s->weight_slot_owner[i] = -1;
    for (uint32_t i = 0; i < cfg->record_slot_count; i++)
        s->record_slot_free[i] = (int32_t)i;
    s->record_slot_free_count = cfg->record_slot_count;
    SPW_TRY(carve_memory(s, err));
    SPW_TRY(spw_gpu_queue_create(&s->h2d, cfg->gpu, SPW_QUEUE_H2D, err));
    for (uint32_t i = 0; i < s->unit_count && !spw_gpu_get_info(cfg->gpu)->host_addressable; i++)
        SPW_TRY(spw_gpu_event_create(&s->units[i].used, cfg->gpu, err));
    SPW_TRY(start_workers(s, workers, err));
    {
        int rc = pthread_create(&s->mover, NULL, spw__store_mover_main, s);
        if (rc != 0)
            return SPW_RAISE_SYS(err, rc, "start of the mover thread");
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
    SPW_TRY(check_config(config, err));
    s = spw_mem_zalloc(sizeof *s);
    if (s == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "store");
    s->cfg = *config;
    pthread_mutex_init(&s->lock, NULL);
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
    for (uint32_t i = 0; i < s->unit_count; i++)
        spw_gpu_event_destroy(s->units[i].used);
    for (uint32_t i = 0; s->swaps != NULL && i < s->cfg.path_count; i++)
        spw_swap_close(s->swaps[i]);
    spw_aio_destroy(s->aio);
    spw_gpu_free(s->cfg.gpu, s->device_memory);
    if (s->pinned)
        spw_gpu_unpin_host(s->cfg.gpu, s->host.base);
    spw_region_unmap(&s->host);
    pthread_cond_destroy(&s->main_cond);
    pthread_cond_destroy(&s->work_cond);
    pthread_cond_destroy(&s->mover_cond);
    pthread_mutex_destroy(&s->lock);
    spw_mem_free(s->units);
    spw_mem_free(s->chunks);
    spw_mem_free(s->weight_slot_owner);
    spw_mem_free(s->record_slot_free);
    spw_mem_free(s->loans);
    spw_mem_free(s->future);
    spw_mem_free(s->swaps);
    spw_mem_free(s->workers);
    spw_mem_free(s);
}

/* ---------------------------------------------------------------- uses */

/* Lock held. */
static void
note_next_uses(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count; i++)
        s->units[i].next_use = s->units[i].next_use2 = UINT32_MAX;
    for (uint32_t i = 0; i < s->future_count; i++) {
        unit *u = &s->units[s->future[i].unit_idx];
        if (u->next_use == UINT32_MAX)
            u->next_use = i;
        else if (u->next_use2 == UINT32_MAX)
            u->next_use2 = i;
    }
}

/* Lock held. A use that has come is not to come any more: nothing is fetched for it once it was released. */
static void
take_from_future(spw_store *s, spw_store_use use)
{
    for (uint32_t i = 0; i < s->fetch_count; i++) {
        if (s->future[i].unit_idx != use.unit_idx || s->future[i].generation != use.generation)
            continue;
        memmove(s->future + i, s->future + i + 1, (s->future_count - i - 1) * sizeof *s->future);
        s->future_count--;
        s->fetch_count--;
        note_next_uses(s);
        return;
    }
}

void
spw_store_set_future(spw_store *s, const spw_store_use *uses, uint32_t use_count, uint32_t fetch_count)
{
    pthread_mutex_lock(&s->lock);
    if (use_count > s->future_capacity)
        use_count = s->future_capacity;
    memcpy(s->future, uses, use_count * sizeof *uses);
    s->future_count = use_count;
    s->fetch_count = fetch_count < use_count ? fetch_count : use_count;
    note_next_uses(s);
    spw__store_reserve(s);
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

/* What the engine waits for when it waits for this unit. */
static spw_stall
stall_cause(const spw_store *s, const unit *u, uint64_t generation)
{
    bool reading = false, writing = false;
    if (u->generation < generation || u->op == OP_UPDATE) {
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
static void
wait_a_moment(spw_store *s)
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

spw_status
spw_store_acquire(spw_store *s, const spw_store_use *uses, uint32_t count, const void **weights, spw_error *err)
{
    spw_status st = SPW_OK;
    uint32_t k;
    SPW_ASSERT(count <= SPW_ACQUIRE_MAX);
    pthread_mutex_lock(&s->lock);
    for (k = 0; k < count; k++) {
        unit *u = &s->units[uses[k].unit_idx];
        weights[k] = NULL;
        u->wanted = true;
        s->stats.uses++;
        s->stats.hits += u->d != D_NONE && u->device_generation == uses[k].generation && !u->by_demand;
    }
    while (s->poison.status == SPW_OK && (k = first_missing(s, uses, count)) < count) {
        const unit *u = &s->units[uses[k].unit_idx];
        spw_stall cause = stall_cause(s, u, uses[k].generation);
        uint64_t begin = spw_now_ns();
        if (u->generation > uses[k].generation) {
            st = SPW_RAISE(err, SPW_ESTALE, "unit %u is at generation %llu, generation %llu was asked for",
                           uses[k].unit_idx, (unsigned long long)u->generation, (unsigned long long)uses[k].generation);
            break;
        }
        s->demand = uses[k];
        s->demand_set = true;
        spw__store_kick(s);
        wait_a_moment(s);
        s->stats.stall_ns[cause] += spw_now_ns() - begin;
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
        if (st != SPW_OK)
            continue;
        u->pins++;
        u->by_demand = false;
        take_from_future(s, uses[k]);
        weights[k] = s->device_cache + u->device_offset;
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
    }
    u->pins--;
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void *
spw_store_grad(spw_store *s, uint32_t unit_idx)
{
    return s->units[unit_idx].grad;
}

/* Lock held. No record goes there any more. */
static void
hold_unit_grad(spw_store *s, const unit *u)
{
    for (uint32_t k = 0; k < u->plan.chunk_count; k++)
        hold_grad(s, &s->chunks[u->plan.chunk_first + k], true);
}

/* A chunk whose record lies where the unit's gradient goes, NULL if there is none; all such chunks are rushed out. */
static const chunk *
in_the_way(spw_store *s, const unit *u)
{
    const chunk *found = NULL;
    for (uint32_t k = 0; k < u->plan.chunk_count; k++) {
        const chunk *c = &s->chunks[u->plan.chunk_first + k];
        for (uint32_t i = c->loan_first; i < c->loan_end; i++) {
            if (s->loans[i].chunk != NULL) {
                s->loans[i].chunk->rush = s->loans[i].chunk->r != R_WRITING;
                found = s->loans[i].chunk;
            }
        }
    }
    return found;
}

spw_status
spw_store_grad_open(spw_store *s, uint32_t unit_idx, spw_error *err)
{
    const unit *u = &s->units[unit_idx];
    const chunk *c;
    pthread_mutex_lock(&s->lock);
    hold_unit_grad(s, u);
    while (s->poison.status == SPW_OK && (c = in_the_way(s, u)) != NULL) {
        spw_stall cause = c->r == R_READING    ? SPW_STALL_NVME_READ
                          : c->r == R_UPDATING ? SPW_STALL_OPTIMIZER
                                               : SPW_STALL_NVME_WRITE;
        uint64_t begin = spw_now_ns();
        spw__store_kick(s);
        wait_a_moment(s);
        s->stats.stall_ns[cause] += spw_now_ns() - begin;
    }
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

/* ---------------------------------------------------------------- steps and sweeps */

/* For chunks [first, end) of the unit. */
static void
begin_op_on(spw_store *s, unit *u, unit_op op, uint32_t first, uint32_t end)
{
    u->op = op;
    u->load_next = u->job_next = u->done_next = first;
    u->op_end = end;
    u->grad_ready = false;
    for (uint32_t k = first; k < end; k++)
        s->chunks[u->plan.chunk_first + k].started = false;
}

static void
begin_op(spw_store *s, unit *u, unit_op op)
{
    begin_op_on(s, u, op, 0, u->plan.chunk_count);
}

/* Lock held. Waits until no unit has an operation that can run. */
static void
wait_idle(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count && s->poison.status == SPW_OK;) {
        const unit *u = &s->units[i];
        bool runs = u->op != OP_NONE && (u->op != OP_UPDATE || (u->grad_ready && s->gate_open));
        if (runs)
            pthread_cond_wait(&s->main_cond, &s->lock);
        i = runs ? 0 : i + 1;
    }
}

/* Lock held, idle. Units whose update did not come to run keep their state; records read ahead stay for the next step. */
static void
close_step(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count; i++)
        s->units[i].grad_ready = false;
    s->gate_open = s->step_open = false;
}

void
spw_store_step_begin(spw_store *s)
{
    pthread_mutex_lock(&s->lock);
    wait_idle(s);
    close_step(s);
    for (uint32_t i = 0; i < s->unit_count; i++) {
        if (s->units[i].plan.trainable && s->units[i].op == OP_NONE)
            begin_op(s, &s->units[i], OP_UPDATE);
        hold_unit_grad(s, &s->units[i]);
    }
    s->step_open = true;
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void
spw_store_grad_ready(spw_store *s, uint32_t unit_idx)
{
    pthread_mutex_lock(&s->lock);
    s->units[unit_idx].grad_ready = true;
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void
spw_store_step_go(spw_store *s)
{
    pthread_mutex_lock(&s->lock);
    s->gate_open = true;
    spw__store_reserve(s); /* the next step's first use may come before the mover wakes up */
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

void
spw_store_step_skip(spw_store *s)
{
    pthread_mutex_lock(&s->lock);
    close_step(s);
    pthread_mutex_unlock(&s->lock);
}

spw_status
spw_store_drain(spw_store *s, spw_error *err)
{
    pthread_mutex_lock(&s->lock);
    wait_idle(s);
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

/* Lock held, idle. Records that were read ahead for a step that never ran go back, so that a sweep starts from rest. */
static void
drop_read_ahead(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count; i++)
        s->units[i].op = OP_NONE;
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        while (c->r == R_READING && s->poison.status == SPW_OK)
            pthread_cond_wait(&s->main_cond, &s->lock);
        if (c->r == R_READY && c->plan.record_tier == SPW_TIER_NVME) {
            spw__store_free_record_slot(s, c);
            c->record_fresh = false;
        }
    }
}

/* Lock held. After a failure others may still be at work with what the caller is going to free. */
static void
wait_jobs(spw_store *s)
{
    while (s->jobs_running > 0)
        wait_a_moment(s);
}

/* Lock held. Chunks [first, end). */
static void
run_sweep(spw_store *s, unit_op op, uint32_t first, uint32_t end, spw_store_fn fn, void *ctx)
{
    wait_idle(s);
    close_step(s);
    drop_read_ahead(s);
    s->sweep_fn = fn;
    s->sweep_ctx = ctx;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *u = &s->units[i];
        uint32_t at = u->plan.chunk_first, count = u->plan.chunk_count;
        if (first < at + count && at < end)
            begin_op_on(s, u, op, first > at ? first - at : 0, end - at < count ? end - at : count);
    }
    spw__store_kick(s);
    wait_idle(s);
    wait_jobs(s);
}

spw_status
spw_store_sweep(spw_store *s, spw_sweep mode, spw_store_fn fn, void *ctx, spw_error *err)
{
    SPW_ASSERT(mode != SPW_SWEEP_EDIT);
    pthread_mutex_lock(&s->lock);
    if (s->snap_fn != NULL) {
        pthread_mutex_unlock(&s->lock);
        return SPW_RAISE(err, SPW_EINVAL, "a sweep while a snapshot is under way");
    }
    run_sweep(s, mode == SPW_SWEEP_INIT ? OP_INIT : OP_VISIT, 0, s->chunk_count, fn, ctx);
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

spw_status
spw_store_sweep_some(spw_store *s, spw_sweep mode, uint32_t first, uint32_t count, spw_store_fn fn, void *ctx,
                     spw_error *err)
{
    const char *why = NULL;
    SPW_TRY(spw_store_check(s, err));
    SPW_ASSERT(mode != SPW_SWEEP_INIT);
    pthread_mutex_lock(&s->lock);
    if (s->snap_fn != NULL)
        why = "while a snapshot is under way";
    else if (s->step_open && !s->gate_open)
        why = "in the middle of a step";
    else if (first > s->chunk_count || count > s->chunk_count - first)
        why = "of chunks that are not there";
    else if (count > 0)
        run_sweep(s, mode == SPW_SWEEP_EDIT ? OP_EDIT : OP_VISIT, first, first + count, fn, ctx);
    pthread_mutex_unlock(&s->lock);
    return why == NULL ? spw_store_check(s, err) : SPW_RAISE(err, SPW_EINVAL, "a sweep %s", why);
}

void
spw_store_forget(spw_store *s)
{
    bool filling = true;
    pthread_mutex_lock(&s->lock);
    s->future_count = s->fetch_count = 0;
    note_next_uses(s);
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
            wait_a_moment(s);
    }
    pthread_mutex_unlock(&s->lock);
}

spw_status
spw_store_snapshot_begin(spw_store *s, const uint64_t *generations, spw_store_fn fn, void *ctx, spw_error *err)
{
    SPW_TRY(spw_store_check(s, err));
    pthread_mutex_lock(&s->lock);
    if (s->snap_fn != NULL) {
        pthread_mutex_unlock(&s->lock);
        return SPW_RAISE(err, SPW_EINVAL, "a snapshot while another one is under way");
    }
    s->snap_fn = fn;
    s->snap_ctx = ctx;
    s->snap_left = s->chunk_count;
    s->snap_next = 0;
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        c->snap = true;
        c->snap_generation = generations[c->plan.unit_idx];
        SPW_ASSERT(c->generation == c->snap_generation || c->generation + 1 == c->snap_generation);
    }
    pthread_cond_broadcast(&s->work_cond);
    pthread_mutex_unlock(&s->lock);
    return SPW_OK;
}

/* Lock held. Visits the units that the snapshot lacks: whole ones, since updates that were released have come to an end. */
static void
sweep_rest(spw_store *s)
{
    wait_idle(s);
    close_step(s);
    s->snap_sweep = true;
    while (s->snap_idle > 0)
        pthread_cond_wait(&s->main_cond, &s->lock);
    drop_read_ahead(s);
    s->sweep_fn = s->snap_fn;
    s->sweep_ctx = s->snap_ctx;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const unit *u = &s->units[i];
        bool lacks = false;
        for (uint32_t k = 0; k < u->plan.chunk_count; k++)
            lacks = lacks || s->chunks[u->plan.chunk_first + k].snap;
        if (lacks)
            begin_op(s, &s->units[i], OP_VISIT);
    }
    spw__store_kick(s);
    wait_idle(s);
}

spw_status
spw_store_snapshot_finish(spw_store *s, spw_error *err)
{
    pthread_mutex_lock(&s->lock);
    if (s->snap_left > 0 && s->poison.status == SPW_OK)
        sweep_rest(s);
    if (s->poison.status != SPW_OK)
        wait_jobs(s);
    SPW_ASSERT(s->snap_left == 0 || s->poison.status != SPW_OK);
    for (uint32_t i = 0; i < s->chunk_count; i++)
        s->chunks[i].snap = false;
    s->snap_left = 0;
    s->snap_sweep = false;
    s->snap_fn = NULL;
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

void
spw_store_get_stats(spw_store *s, spw_store_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
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
