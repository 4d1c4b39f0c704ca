/* Pieces of one memory, first fit: a sorted list, for a few thousand of them at most. */
#include "spw_base.h"
#include <string.h>

spw_status
spw_pieces_init(spw_pieces *p, uint64_t bytes, uint32_t capacity, spw_error *err)
{
    *p = (spw_pieces){.bytes = bytes, .capacity = capacity};
    p->list = spw_mem_calloc((uint64_t)capacity + 1, sizeof *p->list);
    if (p->list == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "pieces (%u)", capacity);
    return SPW_OK;
}

void
spw_pieces_deinit(spw_pieces *p)
{
    spw_mem_free(p->list);
    *p = (spw_pieces){.bytes = 0};
}

bool
spw_pieces_take(spw_pieces *p, uint32_t owner, uint64_t bytes, uint64_t *offset)
{
    uint64_t at = 0;
    uint32_t i = 0;
    SPW_ASSERT(bytes > 0);
    for (; i < p->count && at + bytes > p->list[i].offset; i++)
        at = p->list[i].offset + p->list[i].bytes;
    if (at + bytes > p->bytes)
        return false;
    SPW_ASSERT(p->count < p->capacity);
    memmove(p->list + i + 1, p->list + i, (p->count++ - i) * sizeof *p->list);
    p->list[i] = (spw_piece){at, bytes, owner};
    *offset = at;
    return true;
}

void
spw_pieces_give_back(spw_pieces *p, uint64_t offset)
{
    uint32_t low = 0, high = p->count;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (p->list[mid].offset < offset)
            low = mid + 1;
        else
            high = mid;
    }
    SPW_ASSERT(low < p->count && p->list[low].offset == offset);
    memmove(p->list + low, p->list + low + 1, (--p->count - low) * sizeof *p->list);
}
