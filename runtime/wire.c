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
 * A way of gathering (wire_weights.c) and one of reducing (wire_grads.c), each used by its own thread of engine_ranks.c alone. Here:
 * which wire, and its memory.
 */
#include "quant.h"
#include "wire_internal.h"
#include <stdio.h>

enum { STAGING_BYTES = 16 << 20 }; /* of a half */

/* ---------------------------------------------------------------- sizes */

/* Ranks that a unit goes around among, and is cut for. */
static uint32_t
circle(const spw_engine *e)
{
    return e->zeropp.shard > 0 ? e->zeropp.shard : e->world;
}

/* Of each part that a piece has: whole blocks of sums; tests take turns with the least. */
static uint64_t
piece_elems(const spw_engine *e, uint32_t elem_bytes, bool trained)
{
    uint64_t most = e->config.run.chaos_seed != 0 ? 0 : STAGING_BYTES / (elem_bytes * circle(e)) / BLOCK * BLOCK;
    uint64_t largest = BLOCK;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        uint64_t part = spw_layout_part(spw_layout_whole(&e->layout, u), circle(e));
        if ((e->layout.units[u].trainable || !trained) && part > largest)
            largest = part;
    }
    return most < BLOCK ? BLOCK : most < largest ? most : largest;
}

/* Of a half. Behind a sum that groups share out is room for the end of the last share. */
static uint64_t
half_elems(const spw_engine *e, uint32_t elem_bytes, bool trained)
{
    uint64_t piece = piece_elems(e, elem_bytes, trained), elems = piece * circle(e);
    uint32_t groups = trained && e->zeropp.shard > 0 ? spw__replicas(e) : 1;
    return spw_round_up(elems + spw__share_elems(piece, groups) * groups - piece, BLOCK);
}

static uint64_t
way_bytes(const spw_engine *e, uint32_t elem_bytes, bool trained)
{
    return HALVES * half_elems(e, elem_bytes, trained) * elem_bytes;
}

static uint64_t
landing_bytes(const spw_engine *e)
{
    return e->lands ? HALVES * landing_rows(e) * piece_elems(e, sizeof(float), true) * sizeof(float) : 0;
}

static uint64_t
codes_bytes(const spw_engine *e)
{
    uint64_t elems = circle(e) * piece_elems(e, e->compute_bytes, false);
    return e->zeropp.weights || e->zeropp.frozen ? spw_round_up(spw__quant_bytes(SPW_QUANT_INT8, elems), 4096) : 0;
}

/* Sent, and got. */
static uint64_t
grad_codes_bytes(const spw_engine *e)
{
    uint64_t elems = e->zeropp.grads ? e->world / e->zeropp.host_ranks * piece_elems(e, sizeof(float), true) : 0;
    return 2 * spw_round_up(spw__quant_bytes(SPW_QUANT_INT4, elems), 4096);
}

/* Of how many ranks a sum over a link has parts, at most: of a group, or of one rank of each. */
static uint64_t
received_rows(const spw_engine *e)
{
    return e->zeropp.shard > 0 && spw__replicas(e) > circle(e) ? spw__replicas(e) : circle(e);
}

/* Of others' parts and what they are added to; of what others get. */
static uint64_t
parts_bytes(const spw_engine *e)
{
    uint64_t piece = piece_elems(e, sizeof(float), true);
    uint64_t rounded = e->config.comm_dtype != SPW_F32 ? circle(e) * piece * spw_dtype_bytes(e->config.comm_dtype) : 0;
    return e->inference ? 0 : received_rows(e) * piece * sizeof(float) + rounded + piece * sizeof(float);
}

uint64_t
spw__wire_device_bytes(const spw_engine *e)
{
    return e->linked ? parts_bytes(e) + codes_bytes(e) + grad_codes_bytes(e) : 0;
}

/* What is taken of memory that ranks share, in this order. */
typedef struct shares {
    uint64_t weights, grads, landing; /* staging */
    uint64_t codes, grad_codes;
} shares;

static shares
count_shares(const spw_engine *e)
{
    bool staged = e->world > 1 && !e->host_addressable && !e->linked;
    return (shares){.weights = staged && e->layout.parts > 1 ? way_bytes(e, e->compute_bytes, false) : 0,
                    .grads = staged && !e->inference ? way_bytes(e, sizeof(float), true) : 0,
                    .landing = staged ? landing_bytes(e) : 0,
                    .codes = e->linked ? 0 : codes_bytes(e),
                    .grad_codes = e->linked ? 0 : grad_codes_bytes(e)};
}

uint64_t
spw__wire_host_bytes(const spw_engine *e)
{
    shares s = count_shares(e);
    return s.weights + s.grads + s.landing + s.codes + s.grad_codes;
}

uint64_t
spw__wire_kept_bytes(const spw_engine *e)
{
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        bytes += spw__zeropp_kept_bytes(e, u);
    return spw_round_up(bytes, 4096);
}

/* ---------------------------------------------------------------- what crosses the device's link besides */

void
spw__wire_count_grad(const spw_wire *x, uint32_t unit, bool add, uint64_t *d2h, uint64_t *h2d)
{
    const spw_engine *e = x->e;
    uint64_t own = e->layout.units[unit].elems * spw_dtype_bytes(e->config.run.grad_dtype);
    bool staged = x->reduce.staging != NULL, stays = spw_store_grad_on_device(e->store, unit);
    if (staged)
        *d2h += e->layout.parts > 1 ? spw_layout_whole(&e->layout, unit) * spw_dtype_bytes(x->grad_dtype)
                                    : spw__grad_elems(e, unit) * sizeof(float);
    if (staged && stays) {
        *d2h += add ? own : 0;
        *h2d += own;
    } else if (!staged && !stays) {
        *d2h += own;
        *h2d += add && x->reduce.link != NULL ? own : 0;
    }
}

/* ---------------------------------------------------------------- on the link */

spw_status
spw__wire_meet(way *w, spw_channel *channel, spw_collective op, uint32_t unit, uint64_t part_bytes, spw_error *err)
{
    w->op = op;
    w->unit = unit;
    spw_waiting_begin(&w->waiting);
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
    if (spw_waiting_look(&w->waiting) < timeout)
        return SPW_OK;
    SPW_RAISE(&late, SPW_ETIMEDOUT, "rank %u: %s of unit %u between devices did not come to its end in %.1f s", e->rank,
              spw_collective_name(w->op), w->unit, timeout);
    spw_comm_abort(e->comm, late.message);
    *err = late;
    return SPW_ETIMEDOUT;
}

spw_status
spw__wire_ready(spw_wire *x, bool gather, spw_error *err)
{
    way *w = gather ? &x->gather : &x->reduce;
    if (x->e->linked)
        spw_gpu_queue_sync(w->queue);
    return spw_gpu_check(x->e->gpu, err);
}

spw_status
spw__wire_wait(spw_wire *x, bool gather, spw_error *err)
{
    way *w = gather ? &x->gather : &x->reduce;
    spw_gpu_link *busy = w->busy;
    w->busy = NULL;
    return busy != NULL ? spw_gpu_link_wait(busy, w->queue, err) : SPW_OK;
}

/* ---------------------------------------------------------------- which wire */

spw_status
spw__wire_choose(spw_engine *e, bool plan_only, spw_error *err)
{
    const char *wanted = e->config.run.collectives;
    bool nccl = strcmp(wanted, "nccl") == 0;
    char why[SPW_LINK_WHY_BYTES];
    e->linked = false;
    if (e->world == 1 || (e->host_addressable && !nccl) || strcmp(wanted, "host") == 0)
        return SPW_OK;
    if (e->comm == NULL || plan_only) { /* what the others will say is not known */
        spw_error own = {0};
        spw_status st = e->device_sharers == 1
                            ? spw_gpu_link_probe(e->gpu, &own)
                            : SPW_RAISE(&own, SPW_EUNSUPPORTED, "ranks share a GPU, and NCCL wants one for each");
        e->linked = st == SPW_OK;
        return e->linked || !nccl ? SPW_OK : SPW_RAISE(err, st, "spillway.collectives nccl: %s", own.message);
    }
    SPW_TRY(spw__links_agree(e->comm, e->gpu, &e->linked, why, err));
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
    w->half_bytes = half_elems(x->e, elem_bytes, trained) * elem_bytes;
    if (x->e->host_addressable)
        return SPW_OK;
    SPW_TRY(spw_gpu_queue_create(&w->queue, x->e->gpu, kind, err));
    for (int i = 0; i < HALVES; i++)
        SPW_TRY(spw_gpu_event_create(&w->came[i], x->e->gpu, err));
    return SPW_OK;
}

static void
close_way(way *w, bool together)
{
    spw_waiting_begin(&w->waiting); /* of the end, not of the last transfer, which may be long ago */
    spw_gpu_link_destroy(w->link, together);
    spw_gpu_link_destroy(w->near, together);
    spw_gpu_link_destroy(w->across, together);
    if (w->queue != NULL)
        spw_gpu_queue_destroy(w->queue);
    for (int i = 0; i < HALVES; i++) {
        if (w->came[i] != NULL)
            spw_gpu_event_destroy(w->came[i]);
    }
}

static spw_status
open_shared(spw_wire *x, spw_error *err)
{
    const spw_engine *e = x->e;
    shares s = count_shares(e);
    uint64_t pinned = s.weights + s.grads + s.landing;
    if (spw__wire_host_bytes(e) == 0) /* with links, too */
        return SPW_OK;
    SPW_TRY(spw_comm_alloc(e->comm, (void **)&x->shared, spw__wire_host_bytes(e), err));
    x->gather.staging = s.weights > 0 ? x->shared : NULL;
    x->reduce.staging = s.grads > 0 ? x->shared + s.weights : NULL;
    x->landing = x->shared + s.weights + s.grads;
    x->codes = x->shared + pinned;
    x->sent = x->codes + s.codes;
    x->got = x->sent + s.grad_codes / 2;
    if (pinned == 0)
        return SPW_OK;
    SPW_TRY(spw_gpu_pin_host(e->gpu, x->shared, pinned, err));
    x->pinned = true;
    return SPW_OK;
}

/* Among the channel's ranks; without a channel there is none. */
static spw_status
open_link(spw_wire *x, spw_gpu_link **out, way *w, spw_channel *channel, spw_error *err)
{
    if (channel == NULL)
        return SPW_OK;
    w->op = SPW_COLL_BARRIER;
    spw_waiting_begin(&w->waiting);
    return spw__link_open(out, x->e->gpu, channel, going, w, err);
}

static spw_status
open_reduce_link(spw_wire *x, spw_gpu_link **out, spw_channel *channel, spw_error *err)
{
    way *w = &x->reduce;
    if (x->e->inference || channel == NULL)
        return SPW_OK;
    SPW_TRY(open_link(x, out, w, channel, err));
    return spw__link_connect(*out, w->queue, spw_channel_size(channel), x->received, err);
}

static spw_status
open_linked(spw_wire *x, char *memory, spw_error *err)
{
    const spw_engine *e = x->e;
    const rank_channels *c = x->channels;
    uint64_t piece = x->reduce.piece_elems;
    x->received = memory;
    x->before = (float *)(void *)(memory + received_rows(e) * piece * sizeof(float));
    x->rounded = (char *)(x->before + piece);
    x->codes = memory + parts_bytes(e);
    x->sent = x->codes + codes_bytes(e);
    x->got = x->sent + grad_codes_bytes(e) / 2;
    SPW_TRY(open_reduce_link(x, &x->reduce.link, e->zeropp.shard > 0 ? c->reduces : c->control, err));
    SPW_TRY(open_reduce_link(x, &x->reduce.near, c->host, err));
    SPW_TRY(open_reduce_link(x, &x->reduce.across, c->across, err));
    SPW_TRY(open_link(x, &x->gather.link, &x->gather, e->zeropp.shard > 0 ? c->gathers : c->control, err));
    return open_link(x, &x->gather.near, &x->gather, c->group, err);
}

static spw_status
open_kept(spw_wire *x, spw_error *err)
{
    const spw_engine *e = x->e;
    uint64_t at = 0;
    x->kept_at = spw_mem_calloc(e->layout.unit_count, sizeof *x->kept_at);
    if (x->kept_at == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "kept weights");
    for (uint32_t u = 0; u < e->layout.unit_count; u++) {
        x->kept_at[u] = at;
        at += spw__zeropp_kept_bytes(e, u);
    }
    SPW_TRY(spw_region_map(&x->kept, spw__wire_kept_bytes(e), 0, err));
    if (!e->linked)
        return SPW_OK; /* only links copy between there and the device */
    SPW_TRY(spw_gpu_pin_host(e->gpu, x->kept.base, x->kept.bytes, err));
    x->kept_pinned = true;
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
    x->rank = e->rank % circle(e);
    x->world = circle(e);
    x->groups = e->world / circle(e);
    x->group = e->rank / circle(e);
    x->weight_dtype = e->compute_dtype;
    x->grad_dtype = e->config.comm_dtype;
    x->gather.wire = x->reduce.wire = x;
    st = open_way(x, &x->gather, SPW_QUEUE_H2D, e->compute_bytes, false, err);
    if (st == SPW_OK)
        st = open_way(x, &x->reduce, SPW_QUEUE_D2H, sizeof(float), true, err);
    if (st == SPW_OK && e->linked)
        st = open_linked(x, memory, err);
    if (st == SPW_OK)
        st = open_shared(x, err);
    if (st == SPW_OK && e->zeropp.group > 1)
        st = open_kept(x, err);
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
    close_way(&x->gather, together);
    close_way(&x->reduce, together);
    if (x->shared != NULL) {
        if (x->pinned)
            spw_gpu_unpin_host(x->e->gpu, x->shared);
        spw_comm_free(x->e->comm, x->shared);
    }
    if (x->kept_pinned)
        spw_gpu_unpin_host(x->e->gpu, x->kept.base);
    spw_region_unmap(&x->kept);
    spw_mem_free(x->kept_at);
    spw_mem_free(x);
}
