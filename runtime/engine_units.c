/*
 * Which units blocks use: of a block, in the order of acquiring, and by turns; of a chain, each unit's first and last use and
 * the lowest block that is trained. From the layout and the chain alone; nothing is acquired here.
 */
#include "engine_internal.h"

bool
spw__in_turns(const spw_engine *e, uint32_t unit_idx)
{
    return e->layout.of_vocab[unit_idx] || (e->in_turns && e->layout.of_experts[unit_idx]);
}

bool
spw__shares_turns(const spw_engine *e, uint32_t block_idx)
{
    const spw_block *b = &e->model->blocks[block_idx];
    uint32_t k = 0;
    while (e->shares_turns && k < b->param_count && e->model->params[b->param_ids[k]].expert == 0)
        k++;
    return e->shares_turns && k < b->param_count;
}

bool
spw__keeps_read(const spw_engine *e, uint32_t block_idx)
{
    return block_idx >= e->read_kept_from && spw__shares_turns(e, block_idx);
}

uint64_t
spw__piece_leaves(const spw_engine *e, uint32_t unit_idx)
{
    bool leaves = e->layout.of_vocab[unit_idx] && e->layout.units[unit_idx].trainable;
    return !leaves ? 0 : e->config.accumulation * (e->first_use[unit_idx] != e->last_use[unit_idx] ? 2 : 1);
}

/* Which turn of its block's a unit is: of its layer's experts, or of a matrix's pieces. */
static uint32_t
turn_of(const spw_engine *e, uint32_t unit_idx)
{
    uint32_t id = e->layout.param_ids[e->layout.param_first[unit_idx]];
    return e->layout.of_vocab[unit_idx] ? unit_idx - e->layout.places[id].unit_idx
                                        : (e->model->params[id].expert - 1) / e->turn_experts;
}

/* The block whose own a unit's parameters are. */
static uint32_t
owner_of(const spw_engine *e, uint32_t unit_idx)
{
    return e->model->params[e->layout.param_ids[e->layout.param_first[unit_idx]]].owner_block;
}

uint32_t
spw__grad_kind(const spw_engine *e, uint32_t unit_idx)
{
    const spw_layout *l = &e->layout;
    const bool turns = spw__in_turns(e, unit_idx);
    bool beside = unit_idx > 0 && !l->units[unit_idx].whole && l->units[unit_idx - 1].whole &&
                  owner_of(e, unit_idx - 1) == owner_of(e, unit_idx) && spw__in_turns(e, unit_idx - 1) == turns;
    return turns ? (beside ? GRAD_BESIDE_OF_TURN : GRAD_OF_TURN) : beside ? GRAD_BESIDE : GRAD_AT_ONCE;
}

/* Those come last, in their order. */
static bool
is_later(const spw_layout *l, uint32_t unit_idx)
{
    return l->of_experts[unit_idx] || l->of_vocab[unit_idx];
}

static bool
comes_before(const spw_engine *e, uint32_t a, uint32_t b)
{
    const spw_layout *l = &e->layout;
    if (is_later(l, a) || is_later(l, b))
        return is_later(l, a) == is_later(l, b) ? a < b : is_later(l, b);
    return l->units[a].elems > l->units[b].elems;
}

/*
 * Units whose parameters a block uses, its own and external ones, without repeats, and without an indexer's where it chooses nothing; the largest first, which is the order
 * of acquiring: a small one that is held in the middle of the device's cache can keep a large one out for good. Those of experts
 * come last, in the order of the experts, and so do a matrix's pieces.
 */
uint32_t
spw__block_units(const spw_engine *e, uint32_t block_idx, uint32_t *out)
{
    const spw_block *b = &e->model->blocks[block_idx];
    uint32_t n = 0;
    for (uint32_t k = 0; k < b->param_count; k++) {
        const spw_place *at = &e->layout.places[b->param_ids[k]];
        if (e->model->params[b->param_ids[k]].of_indexer && !e->chooses)
            continue;
        for (uint32_t u = at->unit_idx, j; u < at->unit_idx + at->pieces; u++) {
            if (n > 0 && out[n - 1] == u)
                continue;
            const bool behind = n > 0 && is_later(&e->layout, out[n - 1]) && is_later(&e->layout, u) && u > out[n - 1];
            for (j = behind ? n : 0; j < n && out[j] != u; j++) /* which all of hundreds of experts are */
                continue;
            if (j < n)
                continue;
            for (n++; j > 0 && comes_before(e, u, out[j - 1]); j--)
                out[j] = out[j - 1];
            out[j] = u;
        }
    }
    return n;
}

uint32_t
spw__block_turns(const spw_engine *e, const uint32_t *units, uint32_t count)
{
    uint32_t k = 0;
    while (k < count && !spw__in_turns(e, units[k]))
        k++;
    return k;
}

uint32_t
spw__turn_units(const spw_engine *e, const uint32_t *units, uint32_t count, bool last)
{
    uint32_t n = 0;
    while (n < count && turn_of(e, units[last ? count - 1 - n : n]) == turn_of(e, units[last ? count - 1 : 0]))
        n++;
    return n;
}

uint64_t
spw__grad_elems(const spw_engine *e, uint32_t unit_idx)
{
    const uint32_t parts = e->layout.parts, replicas = spw__replicas(e);
    const uint64_t part = e->layout.units[unit_idx].elems;
    if (parts == 1)
        return spw_layout_part(part, replicas) * replicas;
    return spw_round_up((parts - 1) * part + spw__share_elems(part, replicas) * replicas, 4096);
}

/*
 * Elements of device cache in which units fit one after another, wherever those before lie: k units that are held leave k + 1
 * gaps at most, and when all of them together hold k + 1 times the next one, it fits in one of them.
 */
static uint64_t
elems_for(const spw_engine *e, const uint32_t *units, uint32_t count, uint32_t already, uint64_t held)
{
    uint64_t least = 0;
    for (uint32_t k = 0; k < count; k++) {
        uint64_t elems = spw__layout_on_device(&e->layout, units[k]), next = held + (already + k + 1) * elems;
        least = next > least ? next : least;
        held += elems;
    }
    return least;
}

/* Of a block's units; of those that come in turns, one turn's. */
uint64_t
spw__block_elems(const spw_engine *e, uint32_t block_idx)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX], n = spw__block_units(e, block_idx, units), core = 0;
    uint64_t held = 0, least;
    for (; core < n && !is_later(&e->layout, units[core]); core++)
        held += spw__layout_on_device(&e->layout, units[core]);
    least = elems_for(e, units, core, 0, 0);
    for (uint32_t k = core, count; k < n; k += count) {
        uint64_t turn;
        count = spw__turn_units(e, units + k, n - k, false);
        turn = held;
        for (uint32_t i = k; i < k + count; i++)
            turn += spw__layout_on_device(&e->layout, units[i]);
        if (e->layout.granule == 0) /* else multiples of an expert lie in front of and between all others */
            turn = elems_for(e, units + k, count, core, held);
        least = turn > least ? turn : least;
    }
    return least;
}

uint32_t
spw__lowest_trained(const spw_engine *e, const uint32_t *chain, uint32_t count)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    for (uint32_t c = 0; c + 1 < count; c++) {
        uint32_t n = spw__block_units(e, chain[c], units);
        for (uint32_t k = 0; k < n; k++) {
            if (e->layout.units[units[k]].trainable)
                return c;
        }
    }
    return count - 1; /* the loss is made there */
}

uint32_t
spw__kept_blocks(uint32_t lowest, uint32_t count)
{
    uint32_t first = lowest > 0 ? lowest : 1;
    return count - 1 > first ? count - 1 - first : 0;
}

uint32_t
spw__kept_slots(const spw_engine *e, const uint32_t *chain, uint32_t lowest, uint32_t count)
{
    uint32_t slots = spw__kept_blocks(lowest, count);
    for (uint32_t c = lowest > 0 ? lowest : 1; e->shares_turns && c + 1 < count; c++)
        slots += spw__keeps_read(e, chain[c]);
    return slots;
}

void
spw__note_uses(spw_engine *e)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->first_use[u] = e->last_use[u] = -1;
    for (uint32_t c = 0; c < e->chain_count; c++) {
        uint32_t n = spw__block_units(e, e->chain[c], units);
        for (uint32_t k = 0; k < n; k++) {
            if (e->first_use[units[k]] < 0)
                e->first_use[units[k]] = (int32_t)c;
            e->last_use[units[k]] = (int32_t)c;
        }
    }
    for (uint32_t u = 0; u < e->layout.unit_count; u++)
        e->takes_part[u] = e->first_use[u] >= 0 && e->layout.units[u].trainable;
    e->lowest = spw__lowest_trained(e, e->chain, e->chain_count);
}
