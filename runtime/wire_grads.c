/*
 * Gradients between ranks: summed over all of them into the store's, over the wire that wire.c chose. Called by the reduce
 * thread of engine_ranks.c alone.
 */
#include "quant.h"
#include "wire_internal.h"

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
    char *half = half_of(w, k);
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

/* ---------------------------------------------------------------- from host to host as codes */

/* A piece of this rank's part: its own host's sum, which is exact, and the other hosts' codes, in the order of the hosts. */
static void
add_hosts(const spw_wire *x, const spw_reduce_sink *s, uint64_t first, const float *own, uint64_t n, uint64_t bytes)
{
    uint32_t per_host = x->e->zeropp.host_ranks, hosts = x->world / per_host;
    for (uint64_t at = 0; at < n; at += BLOCK) { /* parts are whole blocks */
        float sum[BLOCK], other[BLOCK];
        for (uint32_t h = 0; h < hosts; h++) {
            const float *from = h == x->rank / per_host ? own + at : other;
            if (from == other)
                spw__quant_decode(other, SPW_F32, x->got + h * bytes + spw__quant_bytes(SPW_QUANT_INT4, at),
                                  SPW_QUANT_INT4, BLOCK);
            for (uint64_t i = 0; i < BLOCK; i++)
                sum[i] = h == 0 ? from[i] : sum[i] + from[i];
        }
        keep(s, (char *)s->data + (first + at) * spw_dtype_bytes(s->dtype), first + at, sum, BLOCK);
    }
}

/*
 * data (world, part) in memory that ranks share, used up. Of each host's stretch of parts a rank sums up, with its own host, the
 * part of the rank that has its place there: in fp32, in their order, in place. One rank of each host has then all that another
 * host's rank needs of this host, and sends it in 4 bits.
 */
static spw_status
scatter_hosts(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, spw_error *err)
{
    uint32_t per_host = x->e->zeropp.host_ranks, hosts = x->world / per_host;
    float *mine =
        data + x->rank % per_host * part; /* the first of the parts that this rank sums up, one of each host */
    uint64_t stretch = per_host * part;
    for (uint32_t h = 0; h < hosts && per_host > 1; h++) {
        spw_reduce_sink own = {.data = mine + h * stretch, .dtype = SPW_F32};
        SPW_TRY(spw_reduce_scatter(x->channels->host, unit, data + h * stretch, SPW_F32, part, &own, err));
    }
    for (uint64_t first = 0; first < part; first += x->reduce.piece_elems) {
        uint64_t n = piece_at(&x->reduce, first, part), bytes = spw__quant_bytes(SPW_QUANT_INT4, n);
        for (uint32_t h = 0; h < hosts; h++) {
            if (h != x->rank / per_host)
                spw__quant_encode(x->sent + h * bytes, SPW_QUANT_INT4, mine + h * stretch + first, SPW_F32, n);
        }
        SPW_TRY(spw_all_to_all(x->channels->across, unit, x->sent, x->got, bytes, err));
        add_hosts(x, sink, first, mine + x->rank / per_host * stretch + first, n, bytes);
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- over groups that each have all parts (MiCS) */

/*
 * data (world, part) in memory that ranks share, used up; with room for the end of the last share behind it. The group sums up this
 * rank's part, in fp32: to its own place, or, where what the others read is narrower, behind that. Then the ranks that have
 * the same part in other groups add up theirs, each a share of it for all of them, in the order of the groups.
 */
static spw_status
scatter_groups(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, spw_error *err)
{
    float *own = data + (x->grad_dtype == SPW_F32 ? x->rank : x->world - 1) * part;
    const spw_reduce_sink sum = {.data = own, .dtype = SPW_F32};
    SPW_TRY(spw_reduce_scatter(x->channels->reduces, unit, data, x->grad_dtype, part, &sum, err));
    SPW_TRY(spw_all_reduce(x->channels->across, unit, own, spw__share_elems(part, x->groups), err));
    keep(sink, sink->data, 0, own, part);
    return SPW_OK;
}

static spw_status
scatter(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, spw_error *err)
{
    return x->e->zeropp.grads ? scatter_hosts(x, unit, data, part, sink, err)
           : x->groups > 1    ? scatter_groups(x, unit, data, part, sink, err)
                              : spw_reduce_scatter(x->channels->reduces, unit, data, x->grad_dtype, part, sink, err);
}

/* ---------------------------------------------------------------- through staging, in place and over links */

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
        SPW_TRY(scatter(x, unit, (float *)(void *)half_of(w, k), n, &piece, err));
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
        float *half = (float *)(void *)half_of(w, k);
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

/* Ranks that a link joins, and this one's place among them. */
typedef struct circle {
    spw_gpu_link *link;
    uint32_t rank, world;
} circle;

/*
 * The sum of this rank's part over a circle, to where its own part was. before: before_elems of what the store has, which is
 * added; NULL: nothing.
 */
static spw_status
sum_part_linked(spw_wire *x, circle c, spw_dtype type, float *data, uint64_t part, const float *before,
                uint64_t before_elems, spw_error *err)
{
    way *w = &x->reduce;
    uint64_t bytes = spw_dtype_bytes(type);
    for (uint64_t first = 0; first < part; first += w->piece_elems) {
        uint64_t n = piece_at(w, first, part), stride = part;
        float *own = data + c.rank * part + first;
        const char *send = (const char *)(data + first);
        uint64_t more = before != NULL ? in_sink(first, n, before_elems) : 0;
        if (type != SPW_F32) {
            send = x->rounded;
            stride = n;
            for (uint32_t r = 0; r < c.world; r++)
                spw_gpu_copy_d2d(w->queue, x->rounded + r * n * bytes, type, data + r * part + first, SPW_F32, n, NULL);
        }
        SPW_TRY(spw_gpu_link_swap(c.link, w->queue, send, stride * bytes, x->received, n * bytes, n * bytes, err));
        if (more > 0 && x->stays)
            spw_gpu_copy_d2d(w->queue, x->before, SPW_F32, before + first, SPW_F32, more, NULL);
        else if (more > 0)
            spw_gpu_copy_h2d(w->queue, x->before, SPW_F32, before + first, SPW_F32, more);
        spw_gpu_link_sum(c.link, w->queue, own, type, send + c.rank * stride * bytes, x->received, n,
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

/* What the store has of a piece of this rank's part, on the device. */
static const float *
bring_before(spw_wire *x, const spw_reduce_sink *s, uint64_t first, uint64_t n)
{
    const float *data = (const float *)s->data + first;
    if (!s->add)
        return NULL;
    if (x->stays)
        spw_gpu_copy_d2d(x->reduce.queue, x->before, SPW_F32, data, SPW_F32, n, NULL);
    else
        spw_gpu_copy_h2d(x->reduce.queue, x->before, SPW_F32, data, SPW_F32, n);
    return x->before;
}

/* As scatter_hosts, on the device: codes that have come are decoded to where parts of others lie before they are added up. */
static spw_status
scatter_hosts_linked(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink,
                     spw_error *err)
{
    way *w = &x->reduce;
    uint32_t per_host = x->e->zeropp.host_ranks, hosts = x->world / per_host, host = x->rank / per_host;
    uint64_t stretch = per_host * part, n;
    float *mine = data + x->rank % per_host * part, *received = (float *)(void *)x->received;
    for (uint32_t h = 0; h < hosts && per_host > 1; h++) {
        SPW_TRY(spw__wire_meet(w, x->channels->host, SPW_COLL_REDUCE_SCATTER, unit, part * sizeof(float), err));
        for (uint64_t first = 0; first < part; first += n) {
            float *own = mine + h * stretch + first;
            n = piece_at(w, first, part);
            SPW_TRY(spw_gpu_link_swap(w->near, w->queue, data + h * stretch + first, part * sizeof(float), received,
                                      n * sizeof(float), n * sizeof(float), err));
            spw_gpu_link_sum(w->near, w->queue, own, SPW_F32, own, received, n, NULL, n);
        }
    }
    for (uint64_t first = 0; first < part; first += n) {
        float *own = mine + host * stretch + first;
        uint64_t bytes;
        n = piece_at(w, first, part);
        bytes = spw__quant_bytes(SPW_QUANT_INT4, n);
        SPW_TRY(spw__wire_meet(w, x->channels->across, SPW_COLL_ALL_TO_ALL, unit, bytes, err));
        for (uint32_t h = 0; h < hosts; h++) {
            if (h != host)
                spw_gpu_encode(w->queue, x->sent + h * bytes, 4, mine + h * stretch + first, SPW_F32, n);
        }
        SPW_TRY(spw_gpu_link_swap(w->across, w->queue, x->sent, bytes, x->got, bytes, bytes, err));
        for (uint32_t h = 0; h < hosts; h++) {
            if (h != host)
                spw_gpu_decode(w->queue, received + h * n, SPW_F32, x->got + h * bytes, 4, n);
        }
        spw_gpu_link_sum(w->across, w->queue, own, SPW_F32, own, received, n, bring_before(x, sink, first, n), n);
    }
    deliver(x, sink, mine + host * stretch, part);
    return submitted(w, w->across);
}

static spw_status
scatter_linked(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, spw_error *err)
{
    way *w = &x->reduce;
    SPW_TRY(spw__wire_meet(w, x->channels->reduces, SPW_COLL_REDUCE_SCATTER, unit,
                           part * spw_dtype_bytes(x->grad_dtype), err));
    SPW_TRY(sum_part_linked(x, (circle){w->link, x->rank, x->world}, x->grad_dtype, data, part,
                            sink->add ? sink->data : NULL, part, err));
    deliver(x, sink, data + x->rank * part, part);
    return submitted(w, w->link);
}

/*
 * data (world of the circle, part): each of the circle sums up its part for all of them, and all of that comes to the sink, whose
 * sink_elems may end inside the last part.
 */
static spw_status
share_out_linked(spw_wire *x, circle c, float *data, uint64_t part, const spw_reduce_sink *sink, uint64_t sink_elems,
                 spw_error *err)
{
    uint64_t own = c.rank * part;
    SPW_TRY(sum_part_linked(x, c, SPW_F32, data, part,
                            sink->add && own < sink_elems ? (const float *)sink->data + own : NULL,
                            own < sink_elems ? sink_elems - own : 0, err));
    SPW_TRY(spw_gpu_link_all_gather(c.link, x->reduce.queue, data, part * sizeof(float), err));
    deliver(x, sink, data, sink_elems);
    return SPW_OK;
}

static spw_status
sum_linked(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, uint64_t sink_elems,
           spw_error *err)
{
    way *w = &x->reduce;
    uint64_t piece = w->piece_elems;
    SPW_TRY(spw__wire_meet(w, x->channels->reduces, SPW_COLL_ALL_REDUCE, unit, part * sizeof(float), err));
    for (uint64_t at = 0; at < part * x->world && x->grad_dtype != SPW_F32; at += piece) {
        uint64_t n = piece_at(w, at, part * x->world);
        spw_gpu_copy_d2d(w->queue, x->rounded, x->grad_dtype, data + at, SPW_F32, n, NULL);
        spw_gpu_copy_d2d(w->queue, data + at, SPW_F32, x->rounded, x->grad_dtype, n, NULL);
    }
    SPW_TRY(share_out_linked(x, (circle){w->link, x->rank, x->world}, data, part, sink, sink_elems, err));
    return submitted(w, w->link);
}

/* As scatter_groups, on the device. */
static spw_status
scatter_groups_linked(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink,
                      spw_error *err)
{
    way *w = &x->reduce;
    uint64_t share = spw__share_elems(part, x->groups);
    float *own = data + x->rank * part;
    SPW_TRY(spw__wire_meet(w, x->channels->reduces, SPW_COLL_REDUCE_SCATTER, unit,
                           part * spw_dtype_bytes(x->grad_dtype), err));
    SPW_TRY(sum_part_linked(x, (circle){w->link, x->rank, x->world}, x->grad_dtype, data, part, NULL, 0, err));
    SPW_TRY(spw__wire_meet(w, x->channels->across, SPW_COLL_ALL_REDUCE, unit, share * sizeof(float), err));
    SPW_TRY(share_out_linked(x, (circle){w->across, x->group, x->groups}, own, share, sink, part, err));
    return submitted(w, w->across);
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
    x->stays = spw_store_grad_on_device(x->e->store, unit);
    if (x->reduce.queue != NULL)
        return x->reduce.link == NULL ? scatter_staged(x, unit, data, part, sink, err)
               : x->e->zeropp.grads   ? scatter_hosts_linked(x, unit, data, part, sink, err)
               : x->groups > 1        ? scatter_groups_linked(x, unit, data, part, sink, err)
                                      : scatter_linked(x, unit, data, part, sink, err);
    round_grad(x->grad_dtype, data, data, part * x->world); /* they lie together at the front of the buffer */
    return scatter(x, unit, data, part, sink, err);
}

spw_status
spw__wire_sum(spw_wire *x, uint32_t unit, float *data, uint64_t part, const spw_reduce_sink *sink, uint64_t sink_elems,
              spw_error *err)
{
    x->stays = spw_store_grad_on_device(x->e->store, unit);
    if (x->reduce.queue != NULL)
        return x->reduce.link != NULL ? sum_linked(x, unit, data, part, sink, sink_elems, err)
                                      : sum_staged(x, unit, data, part, sink, sink_elems, err);
    round_grad(x->grad_dtype, NULL, data, part * x->world);
    SPW_TRY(spw_all_reduce(x->channels->reduces, unit, data, part, err));
    keep(sink, sink->data, 0, data, sink_elems);
    return SPW_OK;
}
