/*
 * Measures what ranks receive from each other: the collectives of weights and gradients on channels like the engine's (engine_ranks.c), over
 * links between devices where there are any, else through memory that ranks share. All ranks make the same calls; how often, and how long it
 * took, is what the slowest of them says.
 */
#include "runtime_internal.h"
#include "spw_rank_bench.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 5, CALLS_MAX = 100000, BLOCK = 4096, TIMEOUT_S = 60 };

/* One thread's: a channel, and what its ranks' devices reach each other by. */
typedef struct lane {
    struct spw_rank_bench *bench;
    spw_channel *channel;
    spw_gpu_link *link; /* NULL: through the host */
    spw_gpu_queue *queue;
    spw_waiting waiting;
} lane;

struct spw_rank_bench {
    spw_comm *comm;
    spw_gpu *gpu;
    spw_rank_bench_info info;
    uint64_t unit_bytes;
    spw_channel *all;
    lane lanes[SPW_WAY_COUNT][SPW_USE_BOTH]; /* of gathers and of sums */
    /* (unit_bytes) that others read: of hosts' shared memory, or of the linked device. */
    char *gathered, *summed;
    char *received, *sum; /* (unit_bytes), (2 unit_bytes), of the linked device; sums are fp32 */
    spw_region own;       /* (2 unit_bytes) sums of the host; what is written to and read from a linked device */
    spw_pool *pool;       /* two threads */
    spw_rates kept;       /* what ranks receive, of it, and of which sizes */
    uint64_t kept_bytes[SPW_WAY_COUNT][SPW_USE_COUNT];
};

/* ---------------------------------------------------------------- set-up */

static spw_status
going(void *ctx, spw_error *err)
{
    lane *l = ctx;
    SPW_TRY(spw_comm_check(l->bench->comm, err));
    if (spw_waiting_look(&l->waiting) < TIMEOUT_S)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ETIMEDOUT, "a transfer between devices did not come to its end in %d s", TIMEOUT_S);
}

static spw_status
open_device(spw_rank_bench *b, const spw_rank_bench_options *o, spw_error *err)
{
    const bool must = strcmp(o->collectives, "nccl") == 0;
    char why[SPW_LINK_WHY_BYTES] = "";
    const spw_gpu_options options = {.name = o->device,
                                     .thread_count = 1,
                                     .compute_dtype = SPW_BF16,
                                     .turn = spw_comm_get_info(b->comm)->machine_rank};
    spw_error own = {0};
    spw_status st = spw_gpu_open(&b->gpu, &options, &own);
    double apart;
    SPW_TRY(spw_agree(b->all, st, &own, NULL, err));
    b->info.device = spw_gpu_get_info(b->gpu)->description;
    apart = !spw_gpu_get_info(b->gpu)->host_addressable;
    SPW_TRY(spw_sum(b->all, &apart, 1, err));
    if (apart > 0 && apart < spw_comm_get_info(b->comm)->world)
        return SPW_RAISE(err, SPW_EINVAL, "%.0f of %u ranks have a GPU: it is cpu or cuda on all of them", apart,
                         spw_comm_get_info(b->comm)->world);
    if (strcmp(o->collectives, "host") != 0 && (must || apart > 0))
        SPW_TRY(spw__links_agree(b->comm, b->gpu, &b->info.linked, why, err));
    if (must && !b->info.linked)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "collectives nccl: %s", why);
    snprintf(b->info.why, sizeof b->info.why, "%s%s%s",
             b->info.linked ? "from device to device, by NCCL" : "through memory of hosts", why[0] != '\0' ? ": " : "",
             why);
    return SPW_OK;
}

static spw_status
take_device(spw_rank_bench *b, spw_error *err)
{
    SPW_TRY(spw_gpu_alloc(b->gpu, (void **)&b->gathered, b->unit_bytes, err));
    SPW_TRY(spw_gpu_alloc(b->gpu, (void **)&b->summed, b->unit_bytes, err));
    SPW_TRY(spw_gpu_alloc(b->gpu, (void **)&b->received, b->unit_bytes, err));
    return spw_gpu_alloc(b->gpu, (void **)&b->sum, 2 * b->unit_bytes, err);
}

static spw_status
open_memory(spw_rank_bench *b, spw_error *err)
{
    spw_error own = {0};
    spw_status st = spw_region_map(&b->own, 2 * b->unit_bytes, 0, &own);
    if (st == SPW_OK)
        st = spw_pool_create(&b->pool, 2, "spw-bench", &own);
    if (st == SPW_OK && b->info.linked)
        st = take_device(b, &own);
    SPW_TRY(spw_agree(b->all, st, &own, NULL, err));
    if (b->info.linked)
        return SPW_OK;
    SPW_TRY(spw_comm_alloc(b->comm, (void **)&b->gathered, b->unit_bytes, err));
    return spw_comm_alloc(b->comm, (void **)&b->summed, b->unit_bytes, err);
}

static spw_status
open_lane_link(lane *l, bool swaps, spw_error *err)
{
    spw_rank_bench *b = l->bench;
    spw_error own = {0};
    spw_status st = spw_gpu_queue_create(&l->queue, b->gpu, swaps ? SPW_QUEUE_D2H : SPW_QUEUE_H2D, &own);
    SPW_TRY(spw_agree(b->all, st, &own, NULL, err));
    spw_waiting_begin(&l->waiting);
    SPW_TRY(spw__link_open(&l->link, b->gpu, l->channel, going, l, err));
    return swaps ? spw__link_connect(l->link, l->queue, spw_channel_size(l->channel), b->received, err) : SPW_OK;
}

/* Links that swap come first: they connect. */
static spw_status
open_lanes(spw_rank_bench *b, spw_error *err)
{
    static const char *const names[SPW_WAY_COUNT][SPW_USE_BOTH] = {{"gathers of a host", "sums of a host"},
                                                                   {"gathers of hosts", "sums of hosts"}};
    const spw_comm_info *info = spw_comm_get_info(b->comm);
    const uint32_t colors[SPW_WAY_COUNT] = {info->host, info->local_rank};
    for (int use = SPW_USE_REDUCE; use >= SPW_USE_GATHER; use--) {
        for (int way = 0; way < SPW_WAY_COUNT; way++) {
            lane *l = &b->lanes[way][use];
            l->bench = b;
            SPW_TRY(spw_channel_open(&l->channel, b->comm, NULL, colors[way], names[way][use], err));
            if (b->info.linked)
                SPW_TRY(open_lane_link(l, use == SPW_USE_REDUCE, err));
        }
    }
    return SPW_OK;
}

/* Which ways there are anywhere, so that all ranks go the same ones. */
static spw_status
agree_on_ways(spw_rank_bench *b, spw_error *err)
{
    const spw_comm_info *info = spw_comm_get_info(b->comm);
    double near = info->local_world > 1;
    SPW_TRY(spw_sum(b->all, &near, 1, err));
    b->info.there[SPW_WAY_NEAR] = near > 0;
    b->info.there[SPW_WAY_FAR] = info->host_count > 1;
    return SPW_OK;
}

spw_status
spw_rank_bench_open(spw_rank_bench **out, spw_comm *comm, const spw_rank_bench_options *options, spw_error *err)
{
    const uint64_t least = (uint64_t)spw_comm_get_info(comm)->world * BLOCK * sizeof(float);
    spw_rank_bench *b;
    spw_status st;
    *out = NULL;
    if (options->unit_bytes < least)
        return SPW_RAISE(err, SPW_EINVAL, "a unit of %llu bytes, for these ranks it has at least %llu",
                         (unsigned long long)options->unit_bytes, (unsigned long long)least);
    if ((b = spw_mem_zalloc(sizeof *b)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "benchmark of ranks");
    b->comm = comm;
    b->unit_bytes = spw_round_up(options->unit_bytes, 2 << 20);
    st = spw_channel_open(&b->all, b->comm, NULL, 0, "bench", err);
    if (st == SPW_OK)
        st = open_device(b, options, err);
    if (st == SPW_OK)
        st = open_memory(b, err);
    if (st == SPW_OK) {
        st = open_lanes(b, err);
        if (st != SPW_OK) /* of this rank's own, perhaps */
            spw_comm_abort(b->comm, err->message);
    }
    if (st == SPW_OK)
        st = agree_on_ways(b, err);
    if (st != SPW_OK)
        spw_rank_bench_close(b, false);
    else
        *out = b;
    return st;
}

void
spw_rank_bench_close(spw_rank_bench *b, bool together)
{
    if (b == NULL)
        return;
    for (int way = 0; way < SPW_WAY_COUNT; way++) {
        for (int use = 0; use < SPW_USE_BOTH; use++) {
            lane *l = &b->lanes[way][use];
            spw_waiting_begin(&l->waiting);
            spw_gpu_link_destroy(l->link, together);
            if (l->queue != NULL)
                spw_gpu_queue_destroy(l->queue);
            spw_channel_close(l->channel);
        }
    }
    spw_channel_close(b->all);
    if (b->gpu != NULL && b->info.linked) {
        spw_gpu_free(b->gpu, b->gathered);
        spw_gpu_free(b->gpu, b->summed);
        spw_gpu_free(b->gpu, b->received);
        spw_gpu_free(b->gpu, b->sum);
    } else {
        spw_comm_free(b->comm, b->gathered);
        spw_comm_free(b->comm, b->summed);
    }
    spw_pool_destroy(b->pool);
    spw_region_unmap(&b->own);
    spw_gpu_close(b->gpu);
    spw_mem_free(b);
}

const spw_rank_bench_info *
spw_rank_bench_get_info(const spw_rank_bench *b)
{
    return &b->info;
}

/* ---------------------------------------------------------------- what is moved, and what must come of it */

/* Of a way; bytes are those of each rank's part: whole blocks of elements. */
typedef struct round {
    spw_rank_bench *bench;
    lane *lanes; /* gathers, sums */
    uint32_t size, rank;
    uint64_t part, elems; /* bytes; elements of it where they are summed up */
    bool use[SPW_USE_BOTH];
    uint64_t count;
    atomic_uint begun;
    spw_error failed[SPW_USE_BOTH];
} round;

/* Word i of rank r's part. */
static uint32_t
word_of(uint32_t r, uint64_t i)
{
    return ((uint32_t)i + 1) * 2654435761u + r * 40503u;
}

/* Element i of what rank r has for another one: small integers, whose sums are exact in any type and order. */
static float
element_of(uint32_t r, uint64_t i)
{
    return (float)(i % 61 + r % 64);
}

static void
fill(round *r)
{
    spw_rank_bench *b = r->bench;
    const uint64_t words = r->part / sizeof(uint32_t);
    uint32_t *own = b->info.linked ? b->own.base : b->gathered;
    uint16_t *narrow = b->own.base;
    float *floats = (float *)(void *)b->summed;
    if (r->use[SPW_USE_GATHER]) {
        memset(own, 0, r->size * r->part);
        for (uint64_t i = 0; i < words; i++)
            own[r->rank * words + i] = word_of(r->rank, i);
        if (b->info.linked)
            spw_gpu_write_bytes(r->lanes[SPW_USE_GATHER].queue, b->gathered, own, r->size * r->part);
    }
    if (!r->use[SPW_USE_REDUCE])
        return;
    for (uint64_t i = 0; i < r->size * r->elems; i++) {
        if (b->info.linked)
            narrow[i] = spw_f32_to_bf16(element_of(r->rank, i % r->elems));
        else
            floats[i] = element_of(r->rank, i % r->elems);
    }
    if (b->info.linked)
        spw_gpu_write_bytes(r->lanes[SPW_USE_REDUCE].queue, b->summed, narrow, r->size * r->part);
    else
        memset(b->own.base, 0, r->elems * sizeof(float));
}

static uint64_t
count_wrong(round *r)
{
    spw_rank_bench *b = r->bench;
    const uint64_t words = r->part / sizeof(uint32_t);
    uint64_t wrong = 0;
    if (r->use[SPW_USE_REDUCE]) {
        float *sums = b->own.base;
        if (b->info.linked)
            spw_gpu_read_bytes(r->lanes[SPW_USE_REDUCE].queue, sums, b->sum, r->elems * sizeof(float));
        for (uint64_t i = 0; i < r->elems; i++) {
            float want = 0;
            for (uint32_t k = 0; k < r->size; k++)
                want += element_of(k, i);
            wrong += sums[i] != want;
        }
    }
    if (r->use[SPW_USE_GATHER]) {
        const uint32_t *got = b->info.linked ? b->own.base : (const void *)b->gathered;
        if (b->info.linked)
            spw_gpu_read_bytes(r->lanes[SPW_USE_GATHER].queue, b->own.base, b->gathered, r->size * r->part);
        for (uint64_t i = 0; i < r->size * words; i++)
            wrong += got[i] != word_of((uint32_t)(i / words), i % words);
    }
    return wrong;
}

/* ---------------------------------------------------------------- calls */

static spw_status
gather(round *r, spw_error *err)
{
    lane *l = &r->lanes[SPW_USE_GATHER];
    if (l->link == NULL)
        return spw_all_gather(l->channel, 0, r->bench->gathered, r->part, err);
    SPW_TRY(spw_meet(l->channel, SPW_COLL_ALL_GATHER, 0, r->part, err));
    spw_waiting_begin(&l->waiting);
    SPW_TRY(spw_gpu_link_all_gather(l->link, l->queue, r->bench->gathered, r->part, err));
    return spw_gpu_link_wait(l->link, l->queue, err);
}

static spw_status
reduce(round *r, spw_error *err)
{
    spw_rank_bench *b = r->bench;
    lane *l = &r->lanes[SPW_USE_REDUCE];
    const spw_reduce_sink sink = {.data = b->own.base, .dtype = SPW_F32};
    if (l->link == NULL)
        return spw_reduce_scatter(l->channel, 0, b->summed, SPW_F32, r->elems, &sink, err);
    SPW_TRY(spw_meet(l->channel, SPW_COLL_REDUCE_SCATTER, 0, r->part, err));
    spw_waiting_begin(&l->waiting);
    SPW_TRY(spw_gpu_link_swap(l->link, l->queue, b->summed, r->part, b->received, r->part, r->part, err));
    spw_gpu_link_sum(l->link, l->queue, (float *)(void *)b->sum, SPW_BF16, b->summed + r->rank * r->part, b->received,
                     r->elems, NULL, r->elems);
    return spw_gpu_link_wait(l->link, l->queue, err);
}

/* The calls of one use, beside those of the other one: nobody does both, so there are two threads. */
static void
run_lane(void *ctx, uint32_t use, uint32_t worker_idx)
{
    round *r = ctx;
    spw_status st = SPW_OK;
    (void)worker_idx;
    atomic_fetch_add(&r->begun, 1);
    while (atomic_load(&r->begun) < SPW_USE_BOTH)
        spw_sleep_ns(1000);
    for (uint64_t i = 0; i < r->count && st == SPW_OK; i++)
        st = use == SPW_USE_GATHER ? gather(r, &r->failed[use]) : reduce(r, &r->failed[use]);
}

static spw_status
run_calls(round *r, uint64_t count, spw_error *err)
{
    r->count = count;
    if (r->use[SPW_USE_GATHER] && r->use[SPW_USE_REDUCE] && !r->bench->info.linked) {
        atomic_store(&r->begun, 0);
        spw_pool_run(r->bench->pool, SPW_USE_BOTH, run_lane, r);
        for (int use = 0; use < SPW_USE_BOTH; use++) {
            if (r->failed[use].status != SPW_OK) {
                *err = r->failed[use];
                return err->status;
            }
        }
        return SPW_OK;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (r->use[SPW_USE_GATHER])
            SPW_TRY(gather(r, err));
        if (r->use[SPW_USE_REDUCE])
            SPW_TRY(reduce(r, err));
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- samples */

/* What each rank says of a sample. */
typedef struct told {
    uint64_t ns, bytes, wrong;
    uint64_t cpu_ns; /* its own */
    uint32_t machine;
} told;

/* The slowest rank's time, what came to this machine in a call, and what all got wrong. */
static spw_status
agree(spw_rank_bench *b, told *mine, spw_error *err)
{
    const uint32_t world = spw_comm_get_info(b->comm)->world, machine = mine->machine;
    const uint64_t cpu_ns = mine->cpu_ns;
    told *all = spw_mem_calloc(world, sizeof *all);
    spw_status st = all != NULL ? spw_exchange(b->all, mine, all, sizeof *mine, err)
                                : SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", world);
    if (st == SPW_OK)
        *mine = (told){.machine = machine, .cpu_ns = cpu_ns};
    for (uint32_t i = 0; st == SPW_OK && i < world; i++) {
        mine->ns = all[i].ns > mine->ns ? all[i].ns : mine->ns;
        mine->bytes += all[i].machine == machine ? all[i].bytes : 0;
        mine->wrong += all[i].wrong;
    }
    spw_mem_free(all);
    return st;
}

/* How long the calls take, or, copy, memcpy of as many bytes, when all ranks begin together. */
static spw_status
time_calls(round *r, uint64_t count, bool copy, uint64_t received, told *out, spw_error *err)
{
    spw_rank_bench *b = r->bench;
    uint64_t begin, cpu;
    SPW_TRY(spw_barrier(b->all, err));
    cpu = spw_process_cpu_ns();
    begin = spw_now_ns();
    for (uint64_t i = 0; copy && i < count; i++)
        memcpy((char *)b->own.base + b->unit_bytes, b->summed, received);
    if (!copy && r->size > 1)
        SPW_TRY(run_calls(r, count, err));
    *out = (told){.ns = spw_now_ns() - begin,
                  .bytes = received,
                  .cpu_ns = spw_process_cpu_ns() - cpu,
                  .machine = spw_comm_get_info(b->comm)->machine};
    return agree(b, out, err);
}

static spw_status
measure(round *r, spw_rank_way way, spw_rank_use use, uint64_t duration_ns, spw_rank_rate *out, spw_error *err)
{
    spw_rank_bench *b = r->bench;
    const uint64_t received = (r->size - 1) * r->part * (use == SPW_USE_BOTH ? 2 : 1);
    const bool copies = way == SPW_WAY_NEAR && !b->info.linked;
    double seconds[SAMPLES], copied[SAMPLES] = {0};
    uint64_t count, cpu_ns = 0;
    told t = {0};
    fill(r);
    SPW_TRY(time_calls(r, 1, false, received, &t, err)); /* warm */
    SPW_TRY(time_calls(r, 1, false, received, &t, err));
    count = duration_ns / SAMPLES / (copies ? 2 : 1) / (t.ns > 0 ? t.ns : 1);
    count = count < 1 ? 1 : count > CALLS_MAX ? CALLS_MAX : count;
    for (int i = 0; i < SAMPLES; i++) {
        SPW_TRY(time_calls(r, count, false, received, &t, err));
        seconds[i] = (double)t.ns * 1e-9 / (double)count;
        cpu_ns += t.cpu_ns;
        if (copies) {
            told c;
            SPW_TRY(time_calls(r, count, true, received < b->unit_bytes ? received : b->unit_bytes, &c, err));
            copied[i] = (double)c.ns * 1e-9 / (double)count;
        }
    }
    out->seconds = spw_median(seconds, SAMPLES);
    out->rank = (double)received / out->seconds;
    out->host = (double)t.bytes / out->seconds;
    out->cpu = cpu_ns > 0 ? (double)(received * count * SAMPLES) / ((double)cpu_ns * 1e-9) : 0;
    out->memcpy =
        copies ? (double)(received < b->unit_bytes ? received : b->unit_bytes) / spw_median(copied, SAMPLES) : 0;
    out->calls = count;
    t.wrong = r->size > 1 ? count_wrong(r) : 0;
    SPW_TRY(spw_gpu_check(b->gpu, err));
    SPW_TRY(agree(b, &t, err));
    out->wrong = t.wrong;
    return SPW_OK;
}

spw_status
spw_rank_bench_measure(spw_rank_bench *b, spw_rank_way way, spw_rank_use use, uint64_t bytes, uint64_t duration_ns,
                       spw_rank_rate *out, spw_error *err)
{
    const uint32_t elem_bytes = b->info.linked ? 2 : sizeof(float), world = spw_comm_get_info(b->comm)->world;
    lane *lanes = b->lanes[way];
    round r = {.bench = b,
               .lanes = lanes,
               .size = spw_channel_size(lanes[0].channel),
               .rank = spw_channel_rank(lanes[0].channel),
               .use = {use != SPW_USE_REDUCE, use != SPW_USE_GATHER}};
    spw_status st;
    *out = (spw_rank_rate){0};
    if (bytes > b->unit_bytes || bytes < (uint64_t)world * BLOCK * elem_bytes)
        return SPW_RAISE(err, SPW_EINVAL, "a unit of %llu bytes, with room for %llu and %u ranks",
                         (unsigned long long)bytes, (unsigned long long)b->unit_bytes, world);
    r.elems = bytes / r.size / (BLOCK * elem_bytes) * BLOCK;
    r.part = r.elems * elem_bytes;
    st = measure(&r, way, use, duration_ns, out, err);
    if (st != SPW_OK)
        spw_comm_abort(b->comm, err->message);
    if (st != SPW_OK || bytes < b->kept_bytes[way][use])
        return st;
    b->kept_bytes[way][use] = bytes;
    b->kept.received[way][use] = way == SPW_WAY_NEAR ? out->rank : out->host;
    if (use == SPW_USE_BOTH)
        b->kept.received_cpu[way] = out->cpu;
    return SPW_OK;
}

/* ---------------------------------------------------------------- for plans */

spw_status
spw_rank_bench_keep(spw_rank_bench *b, char *path, spw_error *err)
{
    const spw_comm_info *info = spw_comm_get_info(b->comm);
    path[0] = '\0';
    for (uint32_t machine = 0, more = 1; more > 0;
         machine++) { /* where they share a home, each reads what the one before wrote */
        double later = info->machine > machine;
        if (info->machine == machine && info->machine_rank == 0)
            spw__keep_received(b->info.linked, info->machine_world, &b->kept, path);
        SPW_TRY(spw_sum(b->all, &later, 1, err));
        more = later > 0;
    }
    return SPW_OK;
}
