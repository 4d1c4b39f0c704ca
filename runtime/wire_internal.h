/*
 * Inside wire*.c: wire.c chooses the wire, takes its memory and counts; wire_weights.c gathers units; wire_grads.c sums
 * gradients.
 */
#ifndef SPW_WIRE_INTERNAL_H
#define SPW_WIRE_INTERNAL_H

#include "engine_internal.h"

enum { HALVES = 2, BLOCK = 4096 };

typedef struct way {
    spw_gpu_queue *queue;
    spw_gpu_event *came[HALVES]; /* a piece is in its half */
    char *staging;               /* (HALVES, half_bytes), which ranks share: (world, piece_elems); NULL: linked */
    uint64_t piece_elems;        /* of a part, at a time */
    uint64_t half_bytes;
    spw_gpu_link *link;   /* among the ranks of a circle; NULL: there are no links */
    spw_gpu_link *near;   /* of the group that keeps slices, or of this host */
    spw_gpu_link *across; /* of one rank of each host, or circle */
    /* What is under way on the link; busy: on which of them, NULL: nothing. */
    spw_gpu_link *busy;
    struct spw_wire *wire;
    spw_collective op;
    uint32_t unit;
    spw_waiting waiting;
} way;

struct spw_wire {
    const spw_engine *e;
    const rank_channels *channels;
    /*
     * Ranks among which units go around, and this one's place there: all, or a group of MiCS. Then there are several such circles,
     * and this is one of them; else one.
     */
    uint32_t rank, world, group, groups;
    spw_dtype weight_dtype, grad_dtype; /* gathered weights; gradients between ranks */
    way gather, reduce;
    char *shared; /* staging of both, landing, codes */
    bool pinned;  /* for the device's copies */
    /* Codes, in memory that ranks share or on the linked device. */
    char *codes;      /* (world, gather.piece_elems) of 8 bits; no unit is gathered so: unused */
    char *sent, *got; /* (hosts, reduce.piece_elems) of 4 bits; without zeropp.grads: unused */
    char *
        landing; /* (HALVES, landing_rows, reduce.piece_elems) fp32: sums on their way to the device; NULL: none go there */
    char *received,
        *rounded;  /* device: (world, reduce.piece_elems) of others' parts, and of what they get, if rounded */
    float *before; /* device: (reduce.piece_elems) of what earlier passes summed up */
    bool stays;    /* of the unit that is reduced the store's gradient is on the device */
    /* This rank's slices of the units that its group keeps, in the form in which they were gathered. */
    spw_region kept;
    bool kept_pinned;
    uint64_t *kept_at; /* (unit_count) offsets */
};

/* Which half of the staging a piece is in; every rank's part has its place there. */
static inline char *
half_of(const way *w, uint64_t k)
{
    return w->staging + k % HALVES * w->half_bytes;
}

static inline uint64_t
piece_at(const way *w, uint64_t first, uint64_t part)
{
    return part - first < w->piece_elems ? part - first : w->piece_elems;
}

/* How many parts of a unit a rank gets the sum of. */
static inline uint32_t
landing_rows(const spw_engine *e)
{
    return e->layout.parts > 1 ? 1 : e->world;
}

/* Brings the ranks together for what the link is to do, and counts what this rank will get. */
spw_status
spw__wire_meet(way *w, spw_channel *channel, spw_collective op, uint32_t unit, uint64_t part_bytes, spw_error *err);

/* All of a job has been given to the link; spw__wire_wait waits for it. */
static inline spw_status
submitted(way *w, spw_gpu_link *link)
{
    w->busy = link;
    return SPW_OK;
}

#endif
