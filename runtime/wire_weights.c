/*
 * Weights between ranks: every rank's part of a unit made whole on the device, over the wire that wire.c chose. Called by the
 * gather thread of engine_ranks.c alone.
 *
 * In place, where nothing stands between a part and its place on the other ranks: memory that they share, or a link. In pieces
 * otherwise: a piece of every part is brought to memory that ranks share, goes around, and is handed out. Codes (quant.h) always
 * go in pieces, small enough to stay in the cache from one end to the other. Every rank computes with what they decode to, its own
 * part's too, or ranks would train different models.
 *
 * Kept slices (hpZ): of a unit that has been gathered each rank of a group keeps a slice in its own memory, as it went around, so
 * that the group has all of it. When the unit is gathered again at the same generation, the group's ranks are the world, their slices
 * the parts, and nothing else is asked, neither the other ranks nor the store. gather.c knows when.
 */
#include "quant.h"
#include "wire_internal.h"

/* One gather and who takes part in it. */
typedef struct gathering {
    char *whole; /* (world, share) of the device */
    uint32_t unit, rank, world;
    uint64_t share;     /* elements of each rank */
    bool coded, again;  /* again: shares are kept slices, and they are not on the device */
    char *kept;         /* this rank's slice; NULL: nothing is kept */
    uint32_t kept_rank; /* of the parts that it consists of, whose is the first, and how many they are */
    uint32_t kept_count;
    spw_channel *channel;
} gathering;

void
spw__wire_put_part(spw_wire *x, const spw_gpu_event *after, char *to, const void *part, uint64_t elems)
{
    uint64_t bytes = elems * spw_dtype_bytes(x->weight_dtype);
    if (after != NULL)
        spw_gpu_event_wait((spw_gpu_event *)(uintptr_t)after, x->gather.queue);
    if (part == NULL)
        return;
    if (x->gather.queue == NULL)
        memcpy(to + x->rank * bytes, part, bytes);
    else
        spw_gpu_copy_d2d(x->gather.queue, to + x->rank * bytes, x->weight_dtype, part, x->weight_dtype, elems, NULL);
}

spw_gpu_queue *
spw__wire_reader(const spw_wire *x)
{
    return x->gather.queue;
}

/* What elements take on their way. */
static uint64_t
form_bytes(const spw_wire *x, const gathering *g, uint64_t elems)
{
    return g->coded ? spw__quant_bytes(SPW_QUANT_INT8, elems) : elems * spw_dtype_bytes(x->weight_dtype);
}

/*
 * Every rank's share of buf to all, in place: at once, or from host to host first, between ranks that have the same place there,
 * and then inside each host what has come to it.
 */
static spw_status
go_around(const spw_wire *x, const gathering *g, char *buf, uint64_t bytes, spw_error *err)
{
    uint32_t near = x->e->zeropp.by_host;
    if (near == 0)
        return spw_all_gather(g->channel, g->unit, buf, bytes, err);
    SPW_TRY(spw_all_gather_apart(x->channels->abroad, g->unit, buf + g->rank % near * bytes, bytes, near, err));
    for (uint32_t first = 0; first < g->world; first += near)
        SPW_TRY(spw_all_gather(x->channels->at_home, g->unit, buf + first * bytes, bytes, err));
    return SPW_OK;
}

/* ---------------------------------------------------------------- in place */

/* This rank's slice, which is whole in its place: what is kept goes there first, or is taken from there last. */
static char *
slice_of(const spw_wire *x, const gathering *g, uint64_t *elems)
{
    *elems = g->again ? g->share : g->share * g->kept_count;
    return g->whole + (g->again ? g->rank : g->kept_rank) * g->share * spw_dtype_bytes(x->weight_dtype);
}

static spw_status
gather_shared(spw_wire *x, const gathering *g, spw_error *err)
{
    uint64_t elems, bytes;
    char *slice = slice_of(x, g, &elems);
    bytes = form_bytes(x, g, elems);
    if (g->again)
        memcpy(slice, g->kept, bytes);
    SPW_TRY(go_around(x, g, g->whole, form_bytes(x, g, g->share), err));
    if (g->kept != NULL && !g->again)
        memcpy(g->kept, slice, bytes);
    return SPW_OK;
}

static spw_status
gather_linked(spw_wire *x, const gathering *g, spw_error *err)
{
    way *w = &x->gather;
    spw_gpu_link *link = g->again ? w->near : w->link;
    uint64_t bytes = form_bytes(x, g, g->share), elems;
    char *slice = slice_of(x, g, &elems);
    SPW_TRY(spw__wire_meet(w, g->channel, SPW_COLL_ALL_GATHER, g->unit, bytes, err));
    if (g->again)
        spw_gpu_copy_h2d(w->queue, slice, x->weight_dtype, g->kept, x->weight_dtype, elems);
    SPW_TRY(spw_gpu_link_all_gather(link, w->queue, g->whole, bytes, err));
    if (g->kept != NULL && !g->again)
        spw_gpu_copy_d2h(w->queue, g->kept, x->weight_dtype, slice, x->weight_dtype, elems, NULL);
    return submitted(w, link);
}

/* ---------------------------------------------------------------- in pieces */

/* Where elements of a rank's share from `first` on are on the device. */
static char *
place_of(const spw_wire *x, const gathering *g, uint32_t rank, uint64_t first)
{
    return g->whole + (rank * g->share + first) * spw_dtype_bytes(x->weight_dtype);
}

/* Fewer ranks have room for more of each one's share. */
static uint64_t
piece_most(const spw_wire *x, const gathering *g)
{
    return x->gather.piece_elems * (x->world / g->world);
}

/* How many elements of each share piece number k has; 0: there is none. */
static uint64_t
piece_elems(const spw_wire *x, const gathering *g, uint64_t k)
{
    uint64_t most = piece_most(x, g), first = k * most, left = first < g->share ? g->share - first : 0;
    return left < most ? left : most;
}

/*
 * Of a device that the host cannot address: this rank's piece number k on its way to its half of the staging, or just the word that
 * all has left from there.
 */
static void
fetch(spw_wire *x, const gathering *g, uint64_t k)
{
    way *w = &x->gather;
    uint32_t bytes = spw_dtype_bytes(x->weight_dtype);
    uint64_t n = piece_elems(x, g, k);
    if (n == 0 || w->queue == NULL)
        return;
    if (!g->again)
        spw_gpu_copy_d2h(w->queue, half_of(w, k) + g->rank * n * bytes, x->weight_dtype,
                         place_of(x, g, g->rank, k * piece_most(x, g)), x->weight_dtype, n, NULL);
    spw_gpu_event_record(w->came[k % HALVES], w->queue);
}

/* What this rank keeps of a piece of everybody's part. */
static void
keep(const spw_wire *x, const gathering *g, const char *around, uint64_t first, uint64_t n)
{
    uint64_t bytes = form_bytes(x, g, n);
    for (uint32_t i = 0; i < g->kept_count && g->kept != NULL && !g->again; i++)
        memcpy(g->kept + form_bytes(x, g, i * g->share + first), around + (g->kept_rank + i) * bytes, bytes);
}

/* A piece of every rank's share, in the form in which it went around, to its place on the device; half: by way of there. */
static void
hand_out(spw_wire *x, const gathering *g, const char *around, char *half, uint64_t first, uint64_t n)
{
    uint64_t bytes = n * spw_dtype_bytes(x->weight_dtype);
    for (uint32_t r = 0; r < g->world; r++) {
        char *place = place_of(x, g, r, first), *wide = half != NULL ? half + r * bytes : place;
        if (g->coded)
            spw__quant_decode(wide, x->weight_dtype, around + r * form_bytes(x, g, n), SPW_QUANT_INT8, n);
        else if (r == g->rank && !g->again)
            continue;
        if (half != NULL)
            spw_gpu_copy_h2d(x->gather.queue, place, x->weight_dtype, wide, x->weight_dtype, n);
    }
}

static spw_status
gather_pieces(spw_wire *x, const gathering *g, spw_error *err)
{
    way *w = &x->gather;
    uint32_t elem_bytes = spw_dtype_bytes(x->weight_dtype);
    uint64_t n;
    fetch(x, g, 0);
    for (uint64_t k = 0; (n = piece_elems(x, g, k)) > 0; k++) {
        uint64_t first = k * piece_most(x, g), bytes = form_bytes(x, g, n);
        char *half = w->queue != NULL ? half_of(w, k) : NULL, *around = g->coded ? x->codes : half;
        const char *own = half != NULL ? half + g->rank * n * elem_bytes : place_of(x, g, g->rank, first);
        fetch(x, g, k + 1); /* its half's last piece has left before, in the order of the queue */
        if (w->queue != NULL)
            spw_gpu_event_sync(w->came[k % HALVES]);
        if (g->again)
            memcpy(around + g->rank * bytes, g->kept + form_bytes(x, g, first), bytes);
        else if (g->coded)
            spw__quant_encode(around + g->rank * bytes, SPW_QUANT_INT8, own, x->weight_dtype, n);
        SPW_TRY(go_around(x, g, around, bytes, err));
        keep(x, g, around, first, n);
        hand_out(x, g, around, half, first, n);
    }
    if (w->queue != NULL)
        spw_gpu_queue_sync(w->queue);
    return spw_gpu_check(x->e->gpu, err);
}

/* Codes over a link: made, sent and handed out on the device. Kept slices of them cross as words that nobody looks into. */
static spw_status
gather_linked_codes(spw_wire *x, const gathering *g, spw_error *err)
{
    way *w = &x->gather;
    spw_gpu_link *link = g->again ? w->near : w->link;
    uint64_t n;
    for (uint64_t k = 0; (n = piece_elems(x, g, k)) > 0; k++) {
        uint64_t first = k * piece_most(x, g), bytes = form_bytes(x, g, n), words = bytes / sizeof(float);
        char *own = x->codes + g->rank * bytes;
        SPW_TRY(spw__wire_meet(w, g->channel, SPW_COLL_ALL_GATHER, g->unit, bytes, err));
        if (g->again)
            spw_gpu_copy_h2d(w->queue, own, SPW_F32, g->kept + form_bytes(x, g, first), SPW_F32, words);
        else
            spw_gpu_encode(w->queue, own, 8, place_of(x, g, g->rank, first), x->weight_dtype, n);
        SPW_TRY(spw_gpu_link_all_gather(link, w->queue, x->codes, bytes, err));
        for (uint32_t i = 0; i < g->kept_count && !g->again; i++)
            spw_gpu_copy_d2h(w->queue, g->kept + form_bytes(x, g, i * g->share + first), SPW_F32,
                             x->codes + (g->kept_rank + i) * bytes, SPW_F32, words, NULL);
        for (uint32_t r = 0; r < g->world; r++)
            spw_gpu_decode(w->queue, place_of(x, g, r, first), x->weight_dtype, x->codes + r * bytes, 8, n);
    }
    return submitted(w, link);
}

spw_status
spw__wire_gather(spw_wire *x, uint32_t unit, char *whole, bool again, spw_error *err)
{
    uint32_t group = x->e->zeropp.group, member = x->rank % group;
    uint64_t part = x->e->layout.units[unit].elems;
    gathering g = {.whole = whole,
                   .unit = unit,
                   .rank = x->rank,
                   .world = x->world,
                   .share = part,
                   .coded = spw__zeropp_coded(x->e, unit),
                   .channel = x->channels->gathers};
    if (group > 1) {
        g.kept = (char *)x->kept.base + x->kept_at[unit];
        g.kept_count = x->world / group;
        g.kept_rank = member * g.kept_count;
    }
    if (again) {
        g.again = true;
        g.rank = member;
        g.world = group;
        g.share = part * g.kept_count;
        g.channel = x->channels->group;
    }
    if (x->gather.link != NULL)
        return g.coded ? gather_linked_codes(x, &g, err) : gather_linked(x, &g, err);
    return g.coded || x->gather.queue != NULL ? gather_pieces(x, &g, err) : gather_shared(x, &g, err);
}

void
spw__wire_count_weights(const spw_wire *x, uint32_t unit, bool again, uint64_t *d2h, uint64_t *h2d)
{
    uint64_t part = x->e->layout.units[unit].elems, whole = spw_layout_whole(&x->e->layout, unit);
    if (x->gather.link != NULL) {
        *(again ? h2d : d2h) += spw__zeropp_kept_bytes(x->e, unit);
    } else if (x->gather.staging != NULL) {
        *d2h += (again ? 0 : part) * x->e->compute_bytes;
        *h2d += (again || spw__zeropp_coded(x->e, unit) ? whole : whole - part) * x->e->compute_bytes;
    }
}
