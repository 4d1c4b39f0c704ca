/*
 * Traces: the order of unit uses of one pass, recorded once and replayed as a hint.
 */
#include "spw_engine.h"

spw_status
spw_trace_init(spw_trace *t, uint32_t capacity, spw_error *err)
{
    memset(t, 0, sizeof *t);
    t->units = spw_mem_calloc(capacity, sizeof *t->units);
    if (t->units == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "trace of %u uses", capacity);
    t->capacity = capacity;
    return SPW_OK;
}

void
spw_trace_deinit(spw_trace *t)
{
    spw_mem_free(t->units);
    memset(t, 0, sizeof *t);
}

void
spw_trace_begin(spw_trace *t)
{
    t->pos = 0;
    if (!t->recorded)
        t->count = 0;
}

void
spw_trace_use(spw_trace *t, uint32_t unit_idx)
{
    if (!t->recorded) {
        if (t->count < t->capacity)
            t->units[t->count++] = unit_idx;
        t->pos = t->count;
        return;
    }
    if (t->pos < t->count && t->units[t->pos] == unit_idx) {
        t->pos++;
        return;
    }
    for (uint32_t i = t->pos; i < t->count; i++) {
        if (t->units[i] == unit_idx) {
            t->pos = i + 1;
            return;
        }
    }
}

void
spw_trace_end(spw_trace *t)
{
    t->recorded = true;
    t->pos = t->count;
}

uint32_t
spw_trace_ahead(const spw_store_use *uses, uint32_t count, const spw_store_unit *units, uint64_t max_elems)
{
    uint64_t ahead = 0;
    uint32_t n = 0;
    for (; n < count && ahead < max_elems; n++)
        ahead += units[uses[n].unit_idx].elems;
    return n;
}

/* That one of the pass's uses, or, behind its last, of the next pass's. */
static uint32_t
unit_at(const spw_trace *t, uint32_t at)
{
    return t->units[at < t->count ? at : at - t->count];
}

/* How far uses may be fetched, which never ends earlier than before: the first of them may be fewer. */
static void
reach(const spw_trace *t, const spw_trace_rules *r, spw_trace_told *told)
{
    for (; told->ahead < told->end - told->pos && told->ahead_elems < r->max_elems; told->ahead++)
        told->ahead_elems += r->units[unit_at(t, told->pos + told->ahead)].elems;
}

uint32_t
spw_trace_tell(const spw_trace *t, const spw_trace_rules *r, spw_trace_told *told, spw_store_use *out)
{
    const uint32_t pos = t->pos, left = t->recorded ? 2 * t->count - pos : 0;
    const uint32_t end = pos + (left < r->max ? left : r->max);
    uint32_t n = 0;
    if (!told->goes_on || pos < told->pos)
        *told = (spw_trace_told){.pos = pos, .end = pos, .dropped = UINT32_MAX};
    else
        told->dropped = pos - told->pos;
    for (; told->pos < pos; told->pos++) {
        told->ahead_elems -= told->ahead > 0 ? r->units[unit_at(t, told->pos)].elems : 0;
        told->ahead -= told->ahead > 0;
    }
    for (uint32_t i = told->end > pos ? told->end : pos; i < end; i++) {
        const uint32_t u = unit_at(t, i);
        out[n++] = (spw_store_use){u, r->generations[u] + (i >= t->count && r->units[u].trainable ? r->wrap_step : 0)};
    }
    told->end = end;
    told->goes_on = t->recorded;
    reach(t, r, told);
    return n;
}
