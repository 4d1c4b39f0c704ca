/* What is free of one memory: a sorted list of gaps, no two of which touch. */
#include "spw_base.h"
#include <string.h>

spw_status
spw_gaps_init(spw_gaps *g, uint64_t bytes, uint32_t piece_count_max, spw_error *err)
{
    *g = (spw_gaps){.capacity = piece_count_max + 1, .most = bytes};
    g->list = spw_mem_calloc((uint64_t)g->capacity + 1, sizeof *g->list);
    if (g->list == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "gaps (%u)", g->capacity);
    if (bytes > 0)
        g->list[g->count++] = (spw_gap){0, bytes};
    return SPW_OK;
}

void
spw_gaps_deinit(spw_gaps *g)
{
    spw_mem_free(g->list);
    *g = (spw_gaps){.most = 0};
}

static void
drop(spw_gaps *g, uint32_t i)
{
    memmove(g->list + i, g->list + i + 1, (--g->count - i) * sizeof *g->list);
}

bool
spw_gaps_take(spw_gaps *g, uint64_t bytes, uint64_t *offset)
{
    uint32_t i = 0;
    SPW_ASSERT(bytes > 0);
    if (bytes > g->most)
        return false;
    while (i < g->count && g->list[i].bytes < bytes)
        i++;
    if (i == g->count) {
        g->most = bytes - 1;
        return false;
    }
    *offset = g->list[i].offset;
    g->list[i].offset += bytes;
    g->list[i].bytes -= bytes;
    if (g->list[i].bytes == 0)
        drop(g, i);
    return true;
}

void
spw_gaps_give_back(spw_gaps *g, uint64_t offset, uint64_t bytes)
{
    uint32_t low = 0, high = g->count;
    bool before, behind;
    while (low < high) { /* the first gap behind it */
        uint32_t mid = low + (high - low) / 2;
        if (g->list[mid].offset < offset)
            low = mid + 1;
        else
            high = mid;
    }
    before = low > 0 && g->list[low - 1].offset + g->list[low - 1].bytes == offset;
    behind = low < g->count && g->list[low].offset == offset + bytes;
    if (before && behind) {
        g->list[low - 1].bytes += bytes + g->list[low].bytes;
        drop(g, low);
    } else if (before) {
        g->list[low - 1].bytes += bytes;
    } else if (behind) {
        g->list[low].offset = offset;
        g->list[low].bytes += bytes;
    } else {
        SPW_ASSERT(g->count < g->capacity);
        memmove(g->list + low + 1, g->list + low, (g->count++ - low) * sizeof *g->list);
        g->list[low] = (spw_gap){offset, bytes};
    }
    low -= before;
    g->most = g->list[low].bytes > g->most ? g->list[low].bytes : g->most;
}
