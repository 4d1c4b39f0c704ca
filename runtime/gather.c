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
    *p = (gather_pool){.unit_count = unit_count, .bytes = bytes};
    spw_status st = spw_gaps_init(&p->room, bytes, unit_count, err);
    if (st == SPW_OK)
        st = spw_set_init(&p->there, unit_count, err);
    if (st == SPW_OK && (p->units = spw_mem_calloc(unit_count, sizeof *p->units)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "gathered units (%u)", unit_count);
    for (uint32_t i = 0; i < unit_count && st == SPW_OK; i++)
        p->units[i].next_use = UINT32_MAX;
    if (st != SPW_OK)
        spw__gather_deinit(p);
    return st;
}

void
spw__gather_deinit(gather_pool *p)
{
    spw_mem_free(p->units);
    spw_gaps_deinit(&p->room);
    spw_set_deinit(&p->there);
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

/* Whose next use is farthest away, and farther than nearer_than, of several the one that lies lowest; NULL: nobody may go. */
static gather_unit *
victim(gather_pool *p, uint64_t nearer_than)
{
    gather_unit *found = NULL;
    for (uint64_t i = spw_set_next(&p->there, 0); i < p->unit_count; i = spw_set_next(&p->there, i + 1)) {
        gather_unit *o = &p->units[i];
        bool farther = found == NULL || o->next_use > found->next_use ||
                       (o->next_use == found->next_use && o->offset < found->offset);
        if (o->pins == 0 && (uint64_t)o->next_use + 1 > nearer_than && farther)
            found = o;
    }
    return found;
}

bool
spw__gather_has(const gather_pool *p, spw_store_use use)
{
    return spw_set_has(&p->there, use.unit_idx) && p->units[use.unit_idx].generation == use.generation;
}

void
spw__gather_give_up(gather_pool *p, uint32_t unit_idx)
{
    gather_unit *u = &p->units[unit_idx];
    SPW_ASSERT(u->pins == 0);
    if (spw_set_has(&p->there, unit_idx))
        spw_gaps_give_back(&p->room, u->offset, u->bytes);
    spw_set_remove(&p->there, unit_idx);
}

gather_answer
spw__gather_ask(gather_pool *p, uint32_t unit_idx, uint64_t bytes, uint64_t generation, uint64_t nearer_than)
{
    gather_unit *u = &p->units[unit_idx];
    gather_unit *gone;
    bool there = spw_set_has(&p->there, unit_idx), again;
    if (there && u->generation == generation)
        return GATHER_THERE;
    SPW_ASSERT(u->pins == 0);
    while (!there && !spw_gaps_take(&p->room, bytes, &u->offset)) {
        gone = victim(p, nearer_than);
        if (gone == NULL)
            return GATHER_NO_ROOM;
        spw__gather_give_up(p, (uint32_t)(gone - p->units));
    }
    u->bytes = bytes;
    spw_set_add(&p->there, unit_idx);
    u->generation = generation;
    again = u->kept && u->kept_generation == generation;
    u->kept = p->keeps;
    u->kept_generation = generation;
    return again ? GATHER_AGAIN : GATHER_ASK;
}

/* ---------------------------------------------------------------- what a block needs, and what comes after it */

/* False: there is no room before nearer_than. */
static bool
want(gather_pool *p, const gather_asker *a, spw_store_use use, uint64_t nearer_than)
{
    uint64_t bytes = spw_layout_whole(a->layout, use.unit_idx) * a->elem_bytes;
    gather_answer answer = spw__gather_ask(p, use.unit_idx, bytes, use.generation, nearer_than);
    if (answer == GATHER_ASK || answer == GATHER_AGAIN)
        a->ask(a->ctx, use, answer == GATHER_AGAIN);
    return answer != GATHER_NO_ROOM;
}

/* Those that are there first: they stay while the others are given their places. False: no room; nothing is pinned. */
static bool
pin_all(gather_pool *p, const gather_asker *a, const spw_store_use *uses, uint32_t count)
{
    bool fits = true;
    for (int there = 1; there >= 0; there--) {
        for (uint32_t k = 0; k < count && fits; k++) {
            gather_unit *u = &p->units[uses[k].unit_idx];
            if (u->pins > 0 || (there && !spw__gather_has(p, uses[k])))
                continue;
            fits = there || want(p, a, uses[k], 0);
            u->pins = fits;
        }
    }
    for (uint32_t k = 0; k < count && !fits; k++)
        p->units[uses[k].unit_idx].pins = 0;
    return fits;
}

bool
spw__gather_pin(gather_pool *p, const gather_asker *a, const spw_store_use *uses, uint32_t count)
{
    if (pin_all(p, a, uses, count))
        return true;
    /* What is held lies where others would fit: with all of the block given up there is room for all of it. */
    for (uint32_t k = 0; k < count; k++)
        spw__gather_give_up(p, uses[k].unit_idx);
    return pin_all(p, a, uses, count);
}

void
spw__gather_ahead(gather_pool *p, const gather_asker *a, const spw_store_use *future, uint32_t count, uint32_t ahead,
                  const uint64_t *generations)
{
    spw__gather_tell(p, future, count);
    for (uint32_t i = 0; i < ahead; i++) {
        if (future[i].generation > generations[future[i].unit_idx] || !want(p, a, future[i], (uint64_t)i + 1))
            return;
    }
}

/* ---------------------------------------------------------------- readers that may be under way still */

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
        spw__gather_give_up(p, i);
        p->units[i].kept = false;
    }
}
