/*
 * Inside the store: the uses to come, nearest first, as a list that loses its front and grows behind, with each unit's own uses in it. Pure;
 * what moves by one use costs the same however many units there are.
 *
 * A use's place in the list is a number that stays while the list goes on: the difference of two is how many uses lie between them.
 */
#ifndef SPW_FUTURE_INTERNAL_H
#define SPW_FUTURE_INTERNAL_H

#include "spw_offload.h"

enum { FUTURE_MARKS = 2 };
static const uint64_t FUTURE_NONE = UINT64_MAX;

typedef struct future_use {
    uint32_t unit_idx : 31, taken : 1;
    uint32_t
        again; /* how many uses on the same unit's next one is; 0: there is none. Of what was taken: how far behind the first taken before it is */
    uint64_t generation;
} future_use;

typedef struct future_unit {
    uint64_t first, last; /* places of its uses; FUTURE_NONE: it has none */
    bool marked[FUTURE_MARKS];
} future_unit;

typedef struct future {
    future_use *uses; /* (capacity) a ring */
    future_unit *units;
    uint32_t capacity, unit_count, begin_slot;
    /* begin <= front <= fetch_end <= end: where the list was told to begin, its first use that is not taken, what is fetched, all of it. */
    uint64_t begin, front, fetch_end, end;
    uint64_t settled; /* of uses below it nothing is left to fetch, says the caller */
    uint64_t taken;   /* the last that was; FUTURE_NONE: none */
    /* Of each mark: slots of the first uses of units that have it, and how many have it and no use. */
    spw_set marked[FUTURE_MARKS];
    uint32_t useless[FUTURE_MARKS];
} future;

spw_status spw__future_init(future *f, uint32_t unit_count, uint32_t capacity, spw_error *err);
void spw__future_deinit(future *f); /* accepts what init left half done */

/* All of the list, of which what exceeds the capacity is cut off. */
void spw__future_set(future *f, const spw_store_use *uses, uint32_t count, uint32_t fetch_count);
/* The list without its first `dropped`, whether they were taken or not; what was taken of the others is back; and these behind it. */
void spw__future_go_on(future *f, uint32_t dropped, const spw_store_use *uses, uint32_t count, uint32_t fetch_count);
/* The first of these uses that may be fetched has come, if there is one: it is in the list no more. */
void spw__future_take(future *f, spw_store_use use);

/* Whether the unit has the mark; it keeps it however the list goes on. */
void spw__future_mark(future *f, uint32_t unit_idx, int mark, bool has);
/* Of the places of first uses of units with the mark the lowest from there on, or the highest of all; FUTURE_NONE: there is none. */
uint64_t spw__future_next(const future *f, int mark, uint64_t from);
uint64_t spw__future_last(const future *f, int mark);

static inline const future_use *
spw__future_at(const future *f, uint64_t place)
{
    const uint64_t slot = f->begin_slot + (place - f->begin);
    return &f->uses[slot < f->capacity ? slot : slot - f->capacity];
}

/* How many uses from now the unit's next one is, and the one after it; UINT32_MAX: there is none. */
static inline uint32_t
spw__future_until(const future *f, uint32_t unit_idx)
{
    const uint64_t first = f->units[unit_idx].first;
    return first == FUTURE_NONE ? UINT32_MAX : (uint32_t)(first - f->front);
}

static inline uint32_t
spw__future_until_again(const future *f, uint32_t unit_idx)
{
    const uint64_t first = f->units[unit_idx].first;
    const uint32_t again = first == FUTURE_NONE ? 0 : spw__future_at(f, first)->again;
    return again == 0 ? UINT32_MAX : (uint32_t)(first - f->front) + again;
}

#endif
