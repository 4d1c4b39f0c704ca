/*
 * The element space: parameters to units, units to chunks. Parameters start at multiples of 128 elements, units are
 * padded to 4096, chunks never cross a unit: every region of every format is then a multiple of 4096 bytes. A block with
 * frozen parameters and others has a unit for each kind, because a unit is fetched, summed up and updated as a whole; and one
 * more for those that are stored as codes. Without gradients every expert of a layer has its own, because a few rows need
 * a few of them.
 *
 * Between ranks every unit is cut into equal parts, one for each (ZeRO; Rajbhandari et al. 2020): all links carry the same,
 * and the parts of all ranks in a row are the unit, so that gathering and reducing it needs no packing.
 */
#include "runtime_internal.h"

void
spw_layout_free(spw_layout *l)
{
    spw_mem_free(l->units);
    spw_mem_free(l->chunks);
    spw_mem_free(l->places);
    spw_mem_free(l->param_ids);
    spw_mem_free(l->param_first);
    spw_mem_free(l->bases);
    spw_mem_free(l->by_choice);
    memset(l, 0, sizeof *l);
}

/* Frozen matrices between the embeddings and the head can be stored as codes; vectors are few and matter more. */
static bool
may_be_coded(const spw_model *m, uint32_t b, uint32_t id)
{
    return m->params[id].frozen && !m->params[id].adapter && b > 0 && b + 1 < m->block_count && m->params[id].ndim > 1;
}

/* Without gradients, and whole: 1 + the expert that a parameter belongs to; 0: none. */
static uint32_t
expert_of(const spw_layout *l, const spw_model *m, uint32_t id, bool trainable)
{
    return trainable || l->parts > 1 ? 0 : m->params[id].expert;
}

/*
 * The unit of a block's own parameters, of one expert or of none, that are frozen, or of those that are not; without a gradient these
 * are alike.
 */
static void
place_kind(spw_layout *l, const spw_model *m, uint32_t b, uint32_t expert, bool frozen, bool trainable, bool coded,
           uint64_t *base)
{
    uint64_t at = 0;
    uint32_t count = l->param_first[l->unit_count];
    for (uint32_t k = 0; k < m->blocks[b].param_count; k++) {
        uint32_t id = m->blocks[b].param_ids[k];
        if (m->params[id].owner_block != b || expert_of(l, m, id, trainable) != expert ||
            (l->code_bits > 0 && may_be_coded(m, b, id)) != coded ||
            (!coded && (trainable && m->params[id].frozen) != frozen))
            continue;
        l->places[id] = (spw_place){l->unit_count, at, m->params[id].rows * m->params[id].cols};
        l->param_ids[count++] = id;
        at = spw_round_up(at + l->places[id].elems, 128);
        l->params += l->places[id].elems;
    }
    if (at == 0)
        return;
    l->param_first[l->unit_count + 1] = count;
    l->bases[l->unit_count] = *base;
    *base += spw_round_up(at, 4096);
    at = spw_layout_part(at, l->parts);
    l->by_choice[l->unit_count] = expert > 0;
    l->granule = expert > 0 && at > l->granule ? at : l->granule;
    l->units[l->unit_count++] =
        (spw_store_unit){.first = l->part * at, .elems = at, .trainable = trainable && !frozen, .coded = coded};
    l->elems += at;
}

uint64_t
spw_layout_part(uint64_t elems, uint32_t parts)
{
    return spw_round_up((elems + parts - 1) / parts, 4096);
}

uint64_t
spw_layout_whole(const spw_layout *l, uint32_t unit_idx)
{
    return l->units[unit_idx].elems * l->parts;
}

uint64_t
spw__layout_on_device(const spw_layout *l, uint32_t unit_idx)
{
    uint64_t elems = spw_layout_whole(l, unit_idx);
    return l->granule > 0 ? (elems + l->granule - 1) / l->granule * l->granule : elems;
}

uint64_t
spw__layout_all_on_device(const spw_layout *l)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < l->unit_count; u++)
        elems += spw__layout_on_device(l, u);
    return elems;
}

uint64_t
spw__layout_largest_spilled(const spw_layout *l)
{
    uint64_t largest = 0;
    for (uint32_t u = 0; u < l->unit_count; u++)
        largest = l->units[u].spills && l->units[u].elems > largest ? l->units[u].elems : largest;
    return largest;
}

uint64_t
spw__layout_trained(const spw_layout *l)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < l->unit_count; u++)
        elems += l->units[u].trainable ? l->units[u].elems : 0;
    return elems;
}

spw_status
spw_layout_make(spw_layout *l, const spw_model *m, uint64_t chunk_elems, bool trainable, uint32_t code_bits,
                uint32_t part, uint32_t parts, spw_error *err)
{
    uint64_t chunks = 0, base = 0, units;
    uint32_t experts = 0;
    memset(l, 0, sizeof *l);
    l->code_bits = code_bits;
    SPW_ASSERT(part < parts);
    l->part = part;
    l->parts = parts;
    if (chunk_elems == 0 || chunk_elems % 4096 != 0)
        return SPW_RAISE(err, SPW_EINVAL, "chunk_elems %llu is not a multiple of 4096",
                         (unsigned long long)chunk_elems);
    l->param_count = m->param_count;
    for (uint32_t id = 0; id < m->param_count; id++)
        experts = expert_of(l, m, id, trainable) > experts ? m->params[id].expert : experts;
    units = 3 * (uint64_t)m->block_count * (1 + experts);
    l->units = spw_mem_calloc(units, sizeof *l->units);
    l->by_choice = spw_mem_calloc(units, sizeof *l->by_choice);
    l->places = spw_mem_calloc(m->param_count, sizeof *l->places);
    l->param_ids = spw_mem_calloc(m->param_count, sizeof *l->param_ids);
    l->param_first = spw_mem_calloc(units + 1, sizeof *l->param_first);
    l->bases = spw_mem_calloc(units, sizeof *l->bases);
    if (l->units == NULL || l->by_choice == NULL || l->places == NULL || l->bases == NULL || l->param_ids == NULL ||
        l->param_first == NULL)
        goto no_memory;
    for (uint32_t b = 0; b < m->block_count; b++) {
        for (uint32_t x = 0; x <= experts; x++) {
            place_kind(l, m, b, x, true, trainable, true, &base);
            place_kind(l, m, b, x, true, trainable, false, &base);
            place_kind(l, m, b, x, false, trainable, false, &base);
        }
    }
    for (uint32_t u = 0; u < l->unit_count; u++)
        chunks += (l->units[u].elems + chunk_elems - 1) / chunk_elems;
    if (chunks > INT32_MAX) {
        spw_layout_free(l);
        return SPW_RAISE(err, SPW_EINVAL, "chunk_elems %llu gives %llu chunks", (unsigned long long)chunk_elems,
                         (unsigned long long)chunks);
    }
    l->chunks = spw_mem_calloc(chunks, sizeof *l->chunks);
    if (l->chunks == NULL)
        goto no_memory;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        l->units[u].chunk_first = l->chunk_count;
        for (uint64_t at = 0; at < l->units[u].elems; at += chunk_elems) {
            uint64_t left = l->units[u].elems - at;
            l->chunks[l->chunk_count++] = (spw_store_chunk){
                .unit_idx = u, .first = l->units[u].first + at, .elems = left < chunk_elems ? left : chunk_elems};
        }
        l->units[u].chunk_count = l->chunk_count - l->units[u].chunk_first;
    }
    return SPW_OK;
no_memory:
    spw_layout_free(l);
    return SPW_RAISE(err, SPW_ENOMEM, "element space of %u parameters", m->param_count);
}

bool
spw__layout_overlap(const spw_place *at, const spw_store_chunk *c, uint64_t *first, uint64_t *end)
{
    *first = at->first > c->first ? at->first : c->first;
    *end = at->first + at->elems < c->first + c->elems ? at->first + at->elems : c->first + c->elems;
    return at->unit_idx == c->unit_idx && *first < *end;
}

uint32_t
spw__layout_from(const spw_layout *l, uint32_t unit_idx, uint64_t element)
{
    uint32_t low = l->param_first[unit_idx], high = l->param_first[unit_idx + 1];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const spw_place *at = &l->places[l->param_ids[middle]];
        if (at->first + at->elems > element)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

bool
spw__layout_next(const spw_layout *l, const spw_store_chunk *c, layout_stretch *s)
{
    uint32_t k = s->next > 0 ? s->next - 1 : spw__layout_from(l, c->unit_idx, c->first);
    if (k == l->param_first[c->unit_idx + 1])
        return false;
    s->id = l->param_ids[k];
    s->next = k + 2;
    return spw__layout_overlap(&l->places[s->id], c, &s->first, &s->end);
}
