/*
 * Weights between ranks: every rank's part of a unit made whole on the device, over the wire that wire.c chose. Called by the
 * gather thread of engine_ranks.c alone.
 */
#include "wire_internal.h"

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

static spw_status
gather_linked(spw_wire *x, uint32_t unit, char *whole, uint64_t part, spw_error *err)
{
    way *w = &x->gather;
    uint64_t bytes = part * spw_dtype_bytes(x->weight_dtype);
    SPW_TRY(spw__wire_meet(w, x->channels->gathers, SPW_COLL_ALL_GATHER, unit, bytes, err));
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
