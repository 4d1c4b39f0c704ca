/*
 * How the bytes of a unit get from rank to rank: parts of weights made whole on the device, gradients summed into the store.
 * There are three wires. Memory that the host can address is shared and read where it lies. Devices of their own are linked
 * (NCCL), straight from and to the units' buffers. Where they cannot be, their memory is reached through a staging buffer that
 * ranks share: a piece of every rank's part comes there, goes around and leaves again, while the next piece is on its way.
 * Sums are formed in the order of the ranks, in fp32, so all three give the same bits. They end where the store has its
 * gradients, in host memory or on a device that updates by itself.
 *
 * On every wire each operation begins on the host's channel, where ranks name what they call: a mismatch, a rank that is gone
 * and one that does not come are told there, also when the bytes then go from device to device.
 *
 * A way of gathering and one of reducing, each used by its own thread of engine_ranks.c alone.
 */
#include "engine_internal.h"
#include <stdio.h>

enum { STAGING_BYTES = 16 << 20, HALVES = 2, BLOCK = 4096 }; /* of a half */

typedef struct way {
    spw_gpu_queue *queue;
    spw_gpu_event *came[HALVES]; /* a piece is in its half */
    char *staging;               /* (HALVES, world, piece_elems), which ranks share; NULL: linked */
    uint64_t piece_elems;        /* of a part, at a time */
    spw_gpu_link *link;
    /* What is under way on the link. */
    struct spw_wire *wire;
    spw_collective op;
    uint32_t unit;
    uint64_t begin_ns;
} way;

struct spw_wire {
    const spw_engine *e;
    const rank_channels *channels;
    uint32_t rank, world;
    spw_dtype weight_dtype, grad_dtype; /* gathered weights; gradients between ranks */
    way gather, reduce;
    char *shared; /* staging of both, and landing */
    char *
        landing; /* (HALVES, landing_rows, reduce.piece_elems) fp32: sums on their way to the device; NULL: none go there */
    char *received,
        *rounded;  /* device: (world, reduce.piece_elems) of others' parts, and of what they get, if rounded */
    float *before; /* device: (reduce.piece_elems) of what earlier passes summed up */
    bool stays;    /* the store's gradients are on the device */
};

/* ---------------------------------------------------------------- sizes */

/* Of each part that a piece has: whole blocks of sums; tests take turns with the least. */
static uint64_t
piece_elems(const spw_engine *e, uint32_t elem_bytes, bool trained)
{
    uint64_t most = e->config.run.chaos_seed != 0 ? 0 : STAGING_BYTES / (elem_bytes * e->world) / BLOCK * BLOCK;
    uint64_t largest = BLOCK;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        uint64_t part = spw_layout_part(spw_layout_whole(&e->layout, u), e->world);
        if ((e->layout.units[u].trainable || !trained) && part > largest)
            largest = part;
    }
    return most < BLOCK ? BLOCK : most < largest ? most : largest;
}

static uint64_t
way_bytes(const spw_engine *e, uint32_t elem_bytes, bool trained)
{
    return HALVES * piece_elems(e, elem_bytes, trained) * e->world * elem_bytes;
}

/* How many parts of a unit a rank gets the sum of. */
static uint32_t
landing_rows(const spw_engine *e)
{
    return e->layout.parts > 1 ? 1 : e->world;
}

static uint64_t
landing_bytes(const spw_engine *e)
{
    return e->device_updates ? HALVES * landing_rows(e) * piece_elems(e, sizeof(float), true) * sizeof(float) : 0;
}

uint64_t
spw__wire_device_bytes(const spw_engine *e)
{
    uint64_t piece = piece_elems(e, sizeof(float), true);
    uint64_t rounded = e->config.comm_dtype != SPW_F32 ? e->world * piece * spw_dtype_bytes(e->config.comm_dtype) : 0;
    return e->linked && !e->inference ? e->world * piece * sizeof(float) + rounded + piece * sizeof(float) : 0;
}

uint64_t
spw__wire_host_bytes(const spw_engine *e)
{
    if (e->world == 1 || e->host_addressable || e->linked)
        return 0;
    return (e->layout.parts > 1 ? way_bytes(e, e->compute_bytes, false) : 0) +
           (e->inference ? 0 : way_bytes(e, sizeof(float), true)) + landing_bytes(e);
}

/* ---------------------------------------------------------------- weights */

void
spw__wire_put_part(spw_wire *x, const spw_gpu_event *after, char *to, const void *part, uint64_t elems)
{
    uint64_t bytes = elems * spw_dtype_bytes(x->weight_dtype);
    if (x->gather.queue == NULL) {
        memcpy(to + x->rank * bytes, part, bytes);
        return;
    }
    if (after != NULL)
        spw_gpu_event_wait((spw_gpu_event *)(uintptr_t)after, x->gather.queue);
    spw_gpu_copy_d2d(x->gather.queue, to + x->rank * bytes, x->weight_dtype, part, x->weight_dtype, elems, NULL);
}

spw_gpu_queue *
spw__wire_reader(const spw_wire *x)
{
    return x->gather.queue;
}

/* Which half of the staging a piece is in; every rank's part has its place there. */
static char *
half_of(const spw_wire *x, const way *w, uint64_t k, uint32_t elem_bytes)
{
    return w->staging + k % HALVES * x->world * w->piece_elems * elem_bytes;
}

static uint64_t
piece_at(const way *w, uint64_t first, uint64_t part)
{
    return part - first < w->piece_elems ? part - first : w->piece_elems;
}

/* This rank's piece number k to where the others read it. */
static void
fetch_weights(spw_wire *x, const char *whole, uint64_t k, uint64_t part)
{
    way *w = &x->gather;
    uint32_t bytes = spw_dtype_bytes(x->weight_dtype);
    uint64_t first = k * w->piece_elems, n = first < part ? piece_at(w, first, part) : 0;
    if (n == 0)
        return;
    spw_gpu_copy_d2h(w->queue, half_of(x, w, k, bytes) + x->rank * n * bytes, x->weight_dtype,
                     whole + (x->rank * part + first) * bytes, x->weight_dtype, n, NULL);
    spw_gpu_event_record(w->came[k % HALVES], w->queue);
}

static spw_status
gather_staged(spw_wire *x, uint32_t unit, char *whole, uint64_t part, spw_error *err)
{
    way *w = &x->gather;
    uint32_t bytes = spw_dtype_bytes(x->weight_dtype);
    fetch_weights(x, whole, 0, part);
    for (uint64_t k = 0, first = 0; first < part; k++, first += w->piece_elems) {
        uint64_t n = piece_at(w, first, part);
        char *half = half_of(x, w, k, bytes);
        fetch_weights(x, whole, k + 1, part); /* its half's last piece has left before, in the order of the queue */
        spw_gpu_event_sync(w->came[k % HALVES]);
        SPW_TRY(spw_all_gather(x->channels->gathers, unit, half, n * bytes, err));
        for (uint32_t r = 0; r < x->world; r++) {
            if (r != x->rank)
                spw_gpu_copy_h2d(w->queue, whole + (r * part + first) * bytes, x->weight_dtype, half + r * n * bytes,
                                 x->weight_dtype, n);
        }
    }
    spw_gpu_queue_sync(w->queue);
    return spw_gpu_check(x->e->gpu, err);
}

/* Brings the ranks together for what the link is to do, and counts what this rank will get. */
static spw_status
meet(way *w, spw_channel *channel, spw_collective op, uint32_t unit, uint64_t part_bytes, spw_error *err)
{
    w->op = op;
    w->unit = unit;
    w->begin_ns = spw_now_ns();
    return spw_meet(channel, op, unit, part_bytes, err);
}

/* The link asks while it waits. All ranks have come: one that does not go on has failed, or its device hangs. */
static spw_status
going(void *ctx, spw_error *err)
{
    way *w = ctx;
    const spw_engine *e = w->wire->e;
    double timeout = e->config.run.comm_timeout > 0 ? e->config.run.comm_timeout : 60;
    spw_error late = {0};
    SPW_TRY(spw_comm_check(e->comm, err));
    if ((double)(spw_now_ns() - w->begin_ns) * 1e-9 < timeout)
        return SPW_OK;
    SPW_RAISE(&late, SPW_ETIMEDOUT, "rank %u: %s of unit %u between devices did not come to its end in %.1f s", e->rank,
              spw_collective_name(w->op), w->unit, timeout);
    spw_comm_abort(e->comm, late.message);
    *err = late;
    return SPW_ETIMEDOUT;
}

static spw_status
gather_linked(spw_wire *x, uint32_t unit, char *whole, uint64_t part, spw_error *err)
{
    way *w = &x->gather;
    uint64_t bytes = part * spw_dtype_bytes(x->weight_dtype);
    SPW_TRY(meet(w, x->channels->gathers, SPW_COLL_ALL_GATHER, unit, bytes, err));
    SPW_TRY(spw_gpu_link_all_gather(w->link, w->queue, whole, bytes, err));
    return spw_gpu_link_wait(w->link, w->queue, err);
}

spw_status
spw__wire_gather(spw_wire *x, uint32_t unit, char *whole, uint64_t part, spw_error *err)
{
    if (x->gather.queue == NULL)
        return spw_all_gather(x->channels->gathers, unit, whole, part * spw_dtype_bytes(x->weight_dtype), err);
    return x->gather.link != NULL ? gather_linked(x, unit, whole, part, err) : gather_staged(x, unit, whole, part, err);
}

/* ---------------------------------------------------------------- gradients */

/* Where the host puts elements from `at` on of a sum, of row r in piece k: to the sink, or to where they leave for it. */
static char *
land(const spw_wire *x, const spw_reduce_sink *s, uint64_t k, uint32_t r, uint64_t at)
{
    uint64_t row = k % HALVES * landing_rows(x->e) + r;
    return x->stays ? x->landing + row * x->reduce.piece_elems * sizeof(float)
                    : (char *)s->data + at * spw_dtype_bytes(s->dtype);
}

/* The sink on the device gets n elements from `at` on; the place they leave is taken again two pieces later, in the queue's order. */
static void
take_off(spw_wire *x, const spw_reduce_sink *s, const char *from, uint64_t at, uint64_t n)
{
    if (x->stays)
        spw_gpu_copy_h2d(x->reduce.queue, (char *)s->data + at * spw_dtype_bytes(s->dtype), s->dtype, from, s->dtype,
                         n);
}

/* What they are to be added to comes from there first. */
static void
fetch_before(spw_wire *x, const spw_reduce_sink *s, char *to, uint64_t at, uint64_t n)
{
    if (x->stays && s->add)
        spw_gpu_copy_d2h(x->reduce.queue, to, SPW_F32, (const float *)s->data + at, SPW_F32, n, NULL);
}

/*
 * Elements [first, first + n) of what the sink gets at `to`, as they are summed up; sum is overwritten. The sums of squares are
 * those of a copy from the device, one per block, in the same order.
 */
static void
keep(const spw_reduce_sink *s, char *to, uint64_t first, float *sum, uint64_t n)
{
    for (uint64_t at = 0; at < n; at += BLOCK) {
        uint64_t m = n - at < BLOCK ? n - at : BLOCK;
        float *part = sum + at;
        char *out = to + at * spw_dtype_bytes(s->dtype);
        for (uint64_t i = 0; s->add && i < m; i++)
            part[i] += ((const float *)(const void *)out)[i];
        spw_convert(out, s->dtype, part, SPW_F32, m);
        if (s->sumsq == NULL)
            continue;
        if (s->dtype != SPW_F32)
            spw_convert(part, SPW_F32, out, s->dtype, m);
        s->sumsq[(first + at) / BLOCK] = spw_sumsq(part, m);
    }
}

/* To the type in which ranks exchange gradients, and, where their sum stays whole and fp32, back. */
static void
round_grad(spw_dtype type, void *to, float *data, uint64_t elems)
{
    uint16_t narrow[BLOCK];
    for (uint64_t i = 0; i < elems && type != SPW_F32; i += BLOCK) { /* parts are whole blocks */
        spw_convert(narrow, type, data + i, SPW_F32, BLOCK);
        if (to != NULL)
            memcpy((uint16_t *)to + i, narrow, sizeof narrow);
        else
            spw_convert(data + i, SPW_F32, narrow, type, BLOCK);
    }
}

/* Of row r of a piece: how many of n elements from `at` on the sink has; the last rank's part ends in padding. */
static uint64_t
in_sink(uint64_t at, uint64_t n, uint64_t sink_elems)
{
    return at >= sink_elems ? 0 : sink_elems - at < n ? sink_elems - at : n;
}

/* A piece of each rank's part, rounded, side by side. */
static void
fetch_grads(spw_wire *x, const float *data, uint64_t k, uint64_t part, spw_dtype type, const spw_reduce_sink *sink,
            uint64_t sink_elems)
{
    way *w = &x->reduce;
    uint64_t first = k * w->piece_elems, n = first < part ? piece_at(w, first, part) : 0;
    char *half = half_of(x, w, k, sizeof(float));
    if (n == 0)
        return;
    for (uint32_t r = 0; r < x->world; r++)
        spw_gpu_copy_d2h(w->queue, half + r * n * spw_dtype_bytes(type), type, data + r * part + first, SPW_F32, n,
                         NULL);
    for (uint32_t r = 0; r < landing_rows(x->e); r++) {
        uint64_t at = r * part + first;
        fetch_before(x, sink, land(x, sink, k, r, at), at, in_sink(at, n, sink_elems));
    }
    spw_gpu_event_record(w->came[k % HALVES], w->queue);
}

/* The last sums are on the device when the queue has passed them. */
static spw_status
landed(spw_wire *x, spw_error *err)
{
    if (x->stays)
        spw_gpu_queue_sync(x->reduce.queue);
    return spw_gpu_check(x->e->gpu, err);
}

static spw_status
scatter_staged(spw_wire *x, uint32_t unit, const float *data, uint64_t part, const spw_reduce_sink *sink,
               spw_error *err)
{
    way *w = &x->reduce;
    fetch_grads(x, data, 0, part, x->grad_dtype, sink, part);
    for (uint64_t k = 0, first = 0; first < part; k++, first += w->piece_elems) {
        uint64_t n = piece_at(w, first, part);
        char *to = land(x, sink, k, 0, first);
        spw_reduce_sink piece = {.data = to,
                                 .dtype = sink->dtype,
                                 .add = sink->add,
                                 .sumsq = sink->sumsq != NULL ? sink->sumsq + first / BLOCK : NULL};
        fetch_grads(x, data, k + 1, part, x->grad_dtype, sink, part);
        spw_gpu_event_sync(w->came[k % HALVES]);
        SPW_TRY(spw_reduce_scatter(x->channels->reduces, unit, half_of(x, w, k, sizeof(float)), x->grad_dtype, n,
                                   &piece, err));
        take_off(x, sink, to, first, n);
    }
    return landed(x, err);
}

static spw_status
sum_staged(spw_wire *x, uint32_t unit, const float *data, uint64_t part, const spw_reduce_sink *sink,
           uint64_t sink_elems, spw_error *err)
{
    way *w = &x->reduce;
    fetch_grads(x, data, 0, part, SPW_F32, sink, sink_elems);
    for (uint64_t k = 0, first = 0; first < part; k++, first += w->piece_elems) {
        float *half = (float *)(void *)half_of(x, w, k, sizeof(float));
        uint64_t n = piece_at(w, first, part);
        fetch_grads(x, data, k + 1, part, SPW_F32, sink, sink_elems);
        spw_gpu_event_sync(w->came[k % HALVES]);
        round_grad(x->grad_dtype, NULL, half, x->world * n);
        SPW_TRY(spw_all_reduce(x->channels->reduces, unit, half, n, err));
        for (uint32_t r = 0; r < x->world; r++) {
            uint64_t at = r * part + first, m = in_sink(at, n, sink_elems);
            char *to = land(x, sink, k, r, at);
            keep(sink, to, at, half + r * n, m);
            take_off(x, sink, to, at, m);
        }
    }
    return landed(x, err);
}

/*
 * The sum of this rank's part over all ranks, to where its own part was. before: before_elems of what the store has, which is
 * added; NULL: nothing.
 */
static spw_status
sum_part_linked(spw_wire *x, spw_dtype type, float *data, uint64_t part, const float *before, uint64_t before_elems,
                spw_error *err)
{
    way *w = &x->reduce;
    uint64_t bytes = spw_dtype_bytes(type);
    for (uint64_t first = 0; first < part; first += w->piece_elems) {
        uint64_t n = piece_at(w, first, part), stride = part;
        float *own = data + x->rank * part + first;
        const char *send = (const char *)(data + first);
        uint64_t more = before != NULL ? in_sink(first, n, before_elems) : 0;
        if (type != SPW_F32) {
            send = x->rounded;
            stride = n;
            for (uint32_t r = 0; r < x->world; r++)
                spw_gpu_copy_d2d(w->queue, x->rounded + r * n * bytes, type, data + r * part + first, SPW_F32, n, NULL);
        }
        SPW_TRY(spw_gpu_link_swap(w->link, w->queue, send, stride * bytes, x->received, n * bytes, n * bytes, err));
        if (more > 0 && x->stays)
            spw_gpu_copy_d2d(w->queue, x->before, SPW_F32, before + first, SPW_F32, more, NULL);
        else if (more > 0)
            spw_gpu_copy_h2d(w->queue, x->before, SPW_F32, before + first, SPW_F32, more);
        spw_gpu_link_sum(w->link, w->queue, own, type, send + x->rank * stride * bytes, x->received, n,
                         more > 0 ? x->before : NULL, n);
    }
    return SPW_OK;
}

/* From the unit's buffer, where a link has summed them up. */
static void
deliver(spw_wire *x, const spw_reduce_sink *s, const float *from, uint64_t n)
{
    if (x->stays)
        spw_gpu_copy_d2d(x->reduce.queue, s->data, s->dtype, from, SPW_F32, n, s->sumsq);
    else
        spw_gpu_copy_d2h(x->reduce.queue, s->data, s->dtype, from, SPW_F32, n, s->sumsq);
}

static spw_status
scatter_linked(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, spw_error *err)
{
    way *w = &x->reduce;
    SPW_TRY(meet(w, x->channels->reduces, SPW_COLL_REDUCE_SCATTER, unit, part * spw_dtype_bytes(x->grad_dtype), err));
    SPW_TRY(sum_part_linked(x, x->grad_dtype, data, part, sink->add ? sink->data : NULL, part, err));
    deliver(x, sink, data + x->rank * part, part);
    return spw_gpu_link_wait(w->link, w->queue, err);
}

static spw_status
sum_linked(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, uint64_t sink_elems,
           spw_error *err)
{
    way *w = &x->reduce;
    uint64_t own = x->rank * part, piece = w->piece_elems;
    SPW_TRY(meet(w, x->channels->reduces, SPW_COLL_ALL_REDUCE, unit, part * sizeof(float), err));
    for (uint64_t at = 0; at < part * x->world && x->grad_dtype != SPW_F32; at += piece) {
        uint64_t n = piece_at(w, at, part * x->world);
        spw_gpu_copy_d2d(w->queue, x->rounded, x->grad_dtype, data + at, SPW_F32, n, NULL);
        spw_gpu_copy_d2d(w->queue, data + at, SPW_F32, x->rounded, x->grad_dtype, n, NULL);
    }
    SPW_TRY(sum_part_linked(x, SPW_F32, data, part,
                            sink->add && own < sink_elems ? (const float *)sink->data + own : NULL,
                            own < sink_elems ? sink_elems - own : 0, err));
    SPW_TRY(spw_gpu_link_all_gather(w->link, w->queue, data, part * sizeof(float), err));
    deliver(x, sink, data, sink_elems);
    return spw_gpu_link_wait(w->link, w->queue, err);
}

void
spw__wire_follow(spw_wire *x, const spw_gpu_event *after)
{
    if (x->reduce.queue != NULL)
        spw_gpu_event_wait((spw_gpu_event *)(uintptr_t)after, x->reduce.queue);
}

spw_status
spw__wire_scatter(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, spw_error *err)
{
    if (x->reduce.queue != NULL)
        return x->reduce.link != NULL ? scatter_linked(x, unit, data, part, sink, err)
                                      : scatter_staged(x, unit, data, part, sink, err);
    round_grad(x->grad_dtype, data, data, part * x->world); /* they lie together at the front of the buffer */
    return spw_reduce_scatter(x->channels->reduces, unit, data, x->grad_dtype, part, sink, err);
}

spw_status
spw__wire_sum(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, uint64_t sink_elems,
              spw_error *err)
{
    if (x->reduce.queue != NULL)
        return x->reduce.link != NULL ? sum_linked(x, unit, data, part, sink, sink_elems, err)
                                      : sum_staged(x, unit, data, part, sink, sink_elems, err);
    round_grad(x->grad_dtype, NULL, data, part * x->world);
    SPW_TRY(spw_all_reduce(x->channels->reduces, unit, data, part, err));
    keep(sink, sink->data, 0, data, sink_elems);
    return SPW_OK;
}

/* ---------------------------------------------------------------- what crosses the device's link besides */

void
spw__wire_count_weights(const spw_wire *x, uint32_t unit, uint64_t *d2h, uint64_t *h2d)
{
    uint64_t part = x->e->layout.units[unit].elems, whole = spw_layout_whole(&x->e->layout, unit);
    if (x->gather.staging == NULL)
        return;
    *d2h += part * x->e->compute_bytes;
    *h2d += (whole - part) * x->e->compute_bytes;
}

void
spw__wire_count_grad(const spw_wire *x, uint32_t unit, bool add, uint64_t *d2h, uint64_t *h2d)
{
    const spw_engine *e = x->e;
    uint64_t own = e->layout.units[unit].elems * spw_dtype_bytes(e->config.run.grad_dtype);
    bool staged = x->reduce.staging != NULL;
    if (staged)
        *d2h += spw__grad_elems(e, unit) * spw_dtype_bytes(e->layout.parts > 1 ? x->grad_dtype : SPW_F32);
    if (staged && x->stays) {
        *d2h += add ? own : 0;
        *h2d += own;
    } else if (!staged && !x->stays) {
        *d2h += own;
        *h2d += add && x->reduce.link != NULL ? own : 0;
    }
}

/* ---------------------------------------------------------------- which wire */

/* What each rank says of itself. */
typedef struct offer {
    int32_t status; /* of making links */
    uint32_t host;
    unsigned char id[sizeof((spw_gpu_info *)0)->id];
    char why[240];
} offer;

/* The same answer on every rank. */
static bool
all_can(const offer *all, uint32_t world, char *why, size_t why_bytes)
{
    for (uint32_t r = 0; r < world; r++) {
        if (all[r].status != (int32_t)SPW_OK) {
            snprintf(why, why_bytes, "rank %u: %s", r, all[r].why);
            return false;
        }
        for (uint32_t o = 0; o < r; o++) {
            if (all[o].host == all[r].host && memcmp(all[o].id, all[r].id, sizeof all[r].id) == 0) {
                snprintf(why, why_bytes, "ranks %u and %u share a GPU, and NCCL wants one for each", o, r);
                return false;
            }
        }
    }
    return true;
}

static spw_status
agree_on_links(spw_engine *e, offer *mine, char *why, size_t why_bytes, spw_error *err)
{
    offer *all = spw_mem_calloc(e->world, sizeof *all);
    spw_channel *channel = NULL;
    spw_status st = all != NULL ? spw_channel_open(&channel, e->comm, NULL, 0, "wire", err)
                                : SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", e->world);
    if (st == SPW_OK)
        st = spw_exchange(channel, mine, all, sizeof *mine, err);
    e->linked = st == SPW_OK && all_can(all, e->world, why, why_bytes);
    spw_channel_close(channel);
    spw_mem_free(all);
    return st;
}

spw_status
spw__wire_choose(spw_engine *e, bool plan_only, spw_error *err)
{
    const spw_gpu_info *gpu = spw_gpu_get_info(e->gpu);
    const char *wanted = e->config.run.collectives;
    bool nccl = strcmp(wanted, "nccl") == 0;
    char why[280] = "";
    spw_error none = {0};
    offer mine = {0};
    e->linked = false;
    if (e->world == 1 || (e->host_addressable && !nccl) || strcmp(wanted, "host") == 0)
        return SPW_OK;
    mine.status = (int32_t)spw_gpu_link_probe(e->gpu, &none);
    snprintf(mine.why, sizeof mine.why, "%.*s", (int)sizeof mine.why - 1, none.message);
    memcpy(mine.id, gpu->id, sizeof mine.id);
    mine.host = e->comm != NULL ? spw_comm_get_info(e->comm)->host : 0;
    if (e->comm == NULL || plan_only) { /* what the others will say is not known */
        e->linked = mine.status == (int32_t)SPW_OK && e->device_sharers == 1;
        return SPW_OK;
    }
    SPW_TRY(agree_on_links(e, &mine, why, sizeof why, err));
    if (!e->linked && nccl)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "spillway.collectives nccl: %s", why);
    if (e->rank == 0)
        spw_log(SPW_LOG_INFO, e->linked ? "ranks are linked by NCCL%s" : "ranks reach each other through the host: %s",
                why);
    return SPW_OK;
}

/* ---------------------------------------------------------------- lifetime */

static spw_status
open_way(spw_wire *x, way *w, spw_gpu_queue_kind kind, uint32_t elem_bytes, bool trained, spw_error *err)
{
    w->piece_elems = piece_elems(x->e, elem_bytes, trained);
    SPW_TRY(spw_gpu_queue_create(&w->queue, x->e->gpu, kind, err));
    for (int i = 0; i < HALVES; i++)
        SPW_TRY(spw_gpu_event_create(&w->came[i], x->e->gpu, err));
    return SPW_OK;
}

static void
close_way(way *w)
{
    if (w->queue != NULL)
        spw_gpu_queue_destroy(w->queue);
    for (int i = 0; i < HALVES; i++) {
        if (w->came[i] != NULL)
            spw_gpu_event_destroy(w->came[i]);
    }
}

static spw_status
open_staged(spw_wire *x, spw_error *err)
{
    const spw_engine *e = x->e;
    uint64_t weights = e->layout.parts > 1 ? way_bytes(e, e->compute_bytes, false) : 0;
    uint64_t grads = e->inference ? 0 : way_bytes(e, sizeof(float), true);
    uint64_t all = weights + grads + landing_bytes(e);
    SPW_TRY(spw_comm_alloc(e->comm, (void **)&x->shared, all, err));
    x->gather.staging = weights > 0 ? x->shared : NULL;
    x->reduce.staging = x->shared + weights;
    x->landing = x->shared + weights + grads;
    return spw_gpu_pin_host(e->gpu, x->shared, all, err);
}

/* The first rank makes ids for both links. */
typedef struct invitation {
    int32_t status;
    unsigned char id[2][SPW_GPU_LINK_ID_BYTES];
    char why[240];
} invitation;

static spw_status
open_linked(spw_wire *x, char *memory, spw_error *err)
{
    const spw_engine *e = x->e;
    way *ways[2] = {&x->gather, &x->reduce};
    uint64_t piece = x->reduce.piece_elems;
    spw_error own = {0};
    invitation in = {0};
    x->received = memory;
    x->before = (float *)(void *)(memory + e->world * piece * sizeof(float));
    x->rounded = (char *)(x->before + piece);
    for (int i = 0; i < 2 && e->rank == 0 && in.status == (int32_t)SPW_OK; i++)
        in.status = (int32_t)spw_gpu_link_id(e->gpu, in.id[i], &own);
    snprintf(in.why, sizeof in.why, "%.*s", (int)sizeof in.why - 1, own.message);
    SPW_TRY(spw_broadcast(x->channels->control, &in, sizeof in, 0, err));
    if (in.status != (int32_t)SPW_OK)
        return SPW_RAISE(err, (spw_status)in.status, "rank 0: %s", in.why);
    for (int i = 0; i < 2; i++) {
        ways[i]->op = SPW_COLL_BARRIER;
        ways[i]->begin_ns = spw_now_ns();
        SPW_TRY(spw_gpu_link_create(&ways[i]->link, e->gpu, in.id[i], e->rank, e->world, going, ways[i], err));
    }
    return SPW_OK;
}

spw_status
spw__wire_open(spw_wire **out, const spw_engine *e, const rank_channels *channels, char *memory, spw_error *err)
{
    spw_wire *x = spw_mem_zalloc(sizeof *x);
    spw_status st = SPW_OK;
    *out = NULL;
    if (x == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "wire between ranks");
    x->e = e;
    x->channels = channels;
    x->rank = e->rank;
    x->world = e->world;
    x->weight_dtype = e->compute_dtype;
    x->grad_dtype = e->config.comm_dtype;
    x->stays = e->device_updates;
    x->gather.wire = x->reduce.wire = x;
    if (!e->host_addressable) {
        st = open_way(x, &x->gather, SPW_QUEUE_H2D, e->compute_bytes, false, err);
        if (st == SPW_OK)
            st = open_way(x, &x->reduce, SPW_QUEUE_D2H, sizeof(float), true, err);
        if (st == SPW_OK)
            st = e->linked ? open_linked(x, memory, err) : open_staged(x, err);
    }
    if (st != SPW_OK)
        spw__wire_close(x, false);
    else
        *out = x;
    return st;
}

void
spw__wire_close(spw_wire *x, bool together)
{
    if (x == NULL)
        return;
    spw_gpu_link_destroy(x->gather.link, together);
    spw_gpu_link_destroy(x->reduce.link, together);
    close_way(&x->gather);
    close_way(&x->reduce);
    if (x->shared != NULL) {
        spw_gpu_unpin_host(x->e->gpu, x->shared);
        spw_comm_free(x->e->comm, x->shared);
    }
    spw_mem_free(x);
}
