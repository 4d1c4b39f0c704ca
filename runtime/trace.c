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

uint32_t
spw_trace_future(const spw_trace *t, const uint64_t *generations, uint64_t wrap_step, spw_store_use *out, uint32_t max)
{
    uint32_t n = 0;
    if (!t->recorded)
        return 0;
    for (uint32_t i = t->pos; i < t->count && n < max; i++)
        out[n++] = (spw_store_use){t->units[i], generations[t->units[i]]};
    for (uint32_t i = 0; i < t->count && n < max; i++)
        out[n++] = (spw_store_use){t->units[i], generations[t->units[i]] + wrap_step};
    return n;
}
