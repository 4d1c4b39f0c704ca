/*
 * Where gathered units lie on the device, and which of them must go: pure policy on plain data. All ranks of a world make
 * the same calls with the same arguments and so come to the same answers: the order of the collectives follows from them, and
 * which of them are among the ranks that keep slices of a unit (hpZ).
 * For that reason nothing here knows how far a gather has come, or what time it is.
 */
#include "runtime_internal.h"

spw_status
spw__gather_init(gather_pool *p, uint32_t unit_count, uint64_t bytes, spw_error *err)
{
    *p = (gather_pool){.unit_count = unit_count};
    SPW_TRY(spw_pieces_init(&p->pieces, bytes, unit_count, err));
    p->units = spw_mem_calloc(unit_count, sizeof *p->units);
    if (p->units == NULL) {
        spw_pieces_deinit(&p->pieces);
        return SPW_RAISE(err, SPW_ENOMEM, "gathered units (%u)", unit_count);
    }
    for (uint32_t i = 0; i < unit_count; i++)
        p->units[i].next_use = UINT32_MAX;
    return SPW_OK;
}

void
spw__gather_deinit(gather_pool *p)
{
    spw_mem_free(p->units);
    spw_pieces_deinit(&p->pieces);
    *p = (gather_pool){.unit_count = 0};
}

void
spw__gather_tell(gather_pool *p, const spw_store_use *future, uint32_t count)
{
    for (uint32_t i = 0; i < p->unit_count; i++)
        p->units[i].next_use = UINT32_MAX;
    for (uint32_t i = count; i-- > 0;)
        p->units[future[i].unit_idx].next_use = i;
}

/* Whose next use is farthest away, and farther than nearer_than; NULL: nobody may go. */
static gather_unit *
victim(gather_pool *p, uint64_t nearer_than)
{
    gather_unit *found = NULL;
    for (uint32_t i = 0; i < p->pieces.count; i++) {
        gather_unit *o = &p->units[p->pieces.list[i].owner];
        if (o->pins == 0 && (uint64_t)o->next_use + 1 > nearer_than && (found == NULL || o->next_use > found->next_use))
            found = o;
    }
    return found;
}

void
spw__gather_give_up(gather_pool *p, uint32_t unit_idx)
{
    gather_unit *u = &p->units[unit_idx];
    SPW_ASSERT(u->pins == 0);
    if (u->there)
        spw_pieces_give_back(&p->pieces, u->offset);
    u->there = false;
}

gather_answer
spw__gather_ask(gather_pool *p, uint32_t unit_idx, uint64_t bytes, uint64_t generation, uint64_t nearer_than)
{
    gather_unit *u = &p->units[unit_idx];
    gather_unit *gone;
    bool again;
    if (u->there && u->generation == generation)
        return GATHER_THERE;
    SPW_ASSERT(u->pins == 0);
    while (!u->there && !spw_pieces_take(&p->pieces, unit_idx, bytes, &u->offset)) {
        gone = victim(p, nearer_than);
        if (gone == NULL)
            return GATHER_NO_ROOM;
        spw__gather_give_up(p, (uint32_t)(gone - p->units));
    }
    u->bytes = bytes;
    u->there = true;
    u->generation = generation;
    again = u->kept && u->kept_generation == generation;
    u->kept = p->keeps;
    u->kept_generation = generation;
    return again ? GATHER_AGAIN : GATHER_ASK;
}

void
spw__gather_read(gather_pool *p, uint32_t unit_idx)
{
    gather_unit *u = &p->units[unit_idx];
    u->read_offset = u->offset;
    u->read_bytes = u->bytes;
}

bool
spw__gather_follows(gather_pool *p, uint32_t unit_idx)
{
    const gather_unit *u = &p->units[unit_idx];
    bool follows = u->read_bytes > 0;
    for (uint32_t i = 0; i < p->unit_count && !follows; i++) {
        const gather_unit *o = &p->units[i];
        follows =
            o->read_bytes > 0 && o->read_offset < u->offset + u->bytes && u->offset < o->read_offset + o->read_bytes;
    }
    for (uint32_t i = 0; i < p->unit_count && follows; i++)
        p->units[i].read_bytes = 0;
    return follows;
}

void
spw__gather_forget(gather_pool *p)
{
    for (uint32_t i = 0; i < p->unit_count; i++) {
        SPW_ASSERT(p->units[i].pins == 0);
        p->units[i].there = p->units[i].kept = false;
    }
    p->pieces.count = 0;
}
