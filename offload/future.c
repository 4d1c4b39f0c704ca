/*
 * The uses to come: which units, in which order, and when each comes next. Who replays a trace tells the store after each use what is
 * different now, which is one use less in front and one more behind; with thousands of units everything else would cost more than the
 * training. Pure; called with the store's lock held.
 */
#include "future_internal.h"

spw_status
spw__future_init(future *f, uint32_t unit_count, uint32_t capacity, spw_error *err)
{
    *f = (future){.capacity = capacity, .unit_count = unit_count, .taken = FUTURE_NONE};
    f->uses = spw_mem_calloc(capacity, sizeof *f->uses);
    f->units = spw_mem_calloc(unit_count, sizeof *f->units);
    if (f->uses == NULL || f->units == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "the uses to come of %u units", unit_count);
    for (uint32_t i = 0; i < unit_count; i++)
        f->units[i].first = f->units[i].last = FUTURE_NONE;
    for (int k = 0; k < FUTURE_MARKS; k++)
        SPW_TRY(spw_set_init(&f->marked[k], capacity, err));
    return SPW_OK;
}

void
spw__future_deinit(future *f)
{
    spw_mem_free(f->uses);
    spw_mem_free(f->units);
    for (int k = 0; k < FUTURE_MARKS; k++)
        spw_set_deinit(&f->marked[k]);
    *f = (future){.capacity = 0};
}

static uint64_t
slot_of(const future *f, uint64_t place)
{
    return (uint64_t)(spw__future_at(f, place) - f->uses);
}

static future_use *
use_at(future *f, uint64_t place)
{
    return &f->uses[slot_of(f, place)];
}

/* The unit's first use is another one. */
static void
set_first(future *f, future_unit *u, uint64_t place)
{
    for (int k = 0; k < FUTURE_MARKS; k++) {
        if (!u->marked[k])
            continue;
        if (u->first != FUTURE_NONE)
            spw_set_remove(&f->marked[k], slot_of(f, u->first));
        if (place != FUTURE_NONE)
            spw_set_add(&f->marked[k], slot_of(f, place));
        f->useless[k] += (place == FUTURE_NONE) - (u->first == FUTURE_NONE);
    }
    u->first = place;
    if (place == FUTURE_NONE)
        u->last = FUTURE_NONE;
}

/* The use among its unit's, behind the one at `before`; FUTURE_NONE: as the first of them. */
static void
link_behind(future *f, uint64_t before, uint64_t place)
{
    future_use *use = use_at(f, place);
    future_unit *u = &f->units[use->unit_idx];
    const uint64_t then = before == FUTURE_NONE ? u->first : before + use_at(f, before)->again;
    const bool is_last = before == FUTURE_NONE ? then == FUTURE_NONE : then == before;
    use->again = is_last ? 0 : (uint32_t)(then - place);
    if (is_last)
        u->last = place;
    if (before == FUTURE_NONE)
        set_first(f, u, place);
    else
        use_at(f, before)->again = (uint32_t)(place - before);
}

static void
append(future *f, const spw_store_use *uses, uint32_t count)
{
    for (uint32_t i = 0; i < count && f->end - f->begin < f->capacity; i++) {
        const uint64_t place = f->end++;
        *use_at(f, place) = (future_use){.unit_idx = uses[i].unit_idx & INT32_MAX, .generation = uses[i].generation};
        link_behind(f, f->units[uses[i].unit_idx].last, place);
    }
}

/* What was taken is back where it was; of that what lies below `kept` is about to go. */
static void
put_back(future *f, uint64_t kept)
{
    while (f->taken != FUTURE_NONE) {
        const uint64_t place = f->taken;
        future_use *use = use_at(f, place);
        uint64_t before = FUTURE_NONE, at = f->units[use->unit_idx].first;
        f->taken = use->again == 0 ? FUTURE_NONE : f->begin + use->again - 1;
        use->taken = 0;
        f->settled = place >= kept && place < f->settled ? place : f->settled;
        while (at != FUTURE_NONE && at < place) {
            const uint32_t again = use_at(f, at)->again;
            before = at;
            at = again > 0 ? at + again : FUTURE_NONE;
        }
        link_behind(f, before, place);
    }
    f->front = f->begin;
}

static void
drop_first(future *f)
{
    const future_use *use = use_at(f, f->begin);
    set_first(f, &f->units[use->unit_idx], use->again > 0 ? f->begin + use->again : FUTURE_NONE);
    f->begin++;
    f->begin_slot = f->begin_slot + 1 < f->capacity ? f->begin_slot + 1 : 0;
}

void
spw__future_go_on(future *f, uint32_t dropped, const spw_store_use *uses, uint32_t count, uint32_t fetch_count)
{
    put_back(f, f->begin + dropped);
    for (; dropped > 0 && f->begin < f->end; dropped--)
        drop_first(f);
    append(f, uses, count);
    f->front = f->begin;
    f->settled = f->settled > f->begin ? f->settled : f->begin;
    f->fetch_end = f->begin + fetch_count < f->end ? f->begin + fetch_count : f->end;
}

void
spw__future_set(future *f, const spw_store_use *uses, uint32_t count, uint32_t fetch_count)
{
    spw__future_go_on(f, UINT32_MAX, uses, count, fetch_count);
}

void
spw__future_take(future *f, spw_store_use wanted)
{
    future_unit *u = &f->units[wanted.unit_idx];
    uint64_t before = FUTURE_NONE, place = u->first;
    future_use *use;
    while (place != FUTURE_NONE && place < f->fetch_end && use_at(f, place)->generation != wanted.generation) {
        before = place;
        place = use_at(f, place)->again > 0 ? place + use_at(f, place)->again : FUTURE_NONE;
    }
    if (place == FUTURE_NONE || place >= f->fetch_end)
        return;
    use = use_at(f, place);
    if (before == FUTURE_NONE)
        set_first(f, u, use->again > 0 ? place + use->again : FUTURE_NONE);
    else
        use_at(f, before)->again = use->again > 0 ? (uint32_t)(place - before) + use->again : 0;
    if (u->last == place)
        u->last = before;
    use->taken = 1;
    use->again = f->taken == FUTURE_NONE ? 0 : (uint32_t)(f->taken - f->begin) + 1;
    f->taken = place;
    while (f->front < f->fetch_end && use_at(f, f->front)->taken)
        f->front++;
}

void
spw__future_mark(future *f, uint32_t unit_idx, int mark, bool has)
{
    future_unit *u = &f->units[unit_idx];
    if (u->marked[mark] == has)
        return;
    u->marked[mark] = has;
    if (u->first == FUTURE_NONE)
        f->useless[mark] = has ? f->useless[mark] + 1 : f->useless[mark] - 1;
    else if (has)
        spw_set_add(&f->marked[mark], slot_of(f, u->first));
    else
        spw_set_remove(&f->marked[mark], slot_of(f, u->first));
}

/* Slots below begin_slot hold what comes last. */
uint64_t
spw__future_next(const future *f, int mark, uint64_t from)
{
    const spw_set *set = &f->marked[mark];
    uint64_t slot, found;
    if (from < f->begin || from >= f->end)
        return FUTURE_NONE;
    slot = slot_of(f, from);
    found = spw_set_next(set, slot);
    if (slot < f->begin_slot)
        return found < f->begin_slot ? from + (found - slot) : FUTURE_NONE;
    if (found != UINT64_MAX)
        return from + (found - slot);
    found = spw_set_next(set, 0);
    return found < f->begin_slot ? from + (f->capacity - slot) + found : FUTURE_NONE;
}

uint64_t
spw__future_last(const future *f, int mark)
{
    const spw_set *set = &f->marked[mark];
    uint64_t found = spw_set_last(set, f->begin_slot);
    if (found != UINT64_MAX)
        return f->begin + (f->capacity - f->begin_slot) + found;
    found = spw_set_last(set, UINT64_MAX);
    return found != UINT64_MAX ? f->begin + (found - f->begin_slot) : FUTURE_NONE;
}
