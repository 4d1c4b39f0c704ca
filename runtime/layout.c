/*
 * The element space: parameters to units, units to chunks. Parameters start at multiples of 128 elements, units are
 * padded to 4096, chunks never cross a unit: every region of every format is then a multiple of 4096 bytes. A block with
 * frozen parameters and others has a unit for each kind, because a unit is fetched, summed up and updated as a whole; and one
 * more for those that are stored as codes, one for an indexer's, which are not always needed, and one for trained matrices whose optimizer takes them whole. Experts may have units apart from the rest of their layer, each of one or several: where
 * a few rows need a few of them, or the device has no room for all; and so may pieces of a matrix with a row for each token.
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
    spw_mem_free(l->of_experts);
    spw_mem_free(l->of_vocab);
    memset(l, 0, sizeof *l);
}

/* Frozen matrices between the embeddings and the head can be stored as codes; vectors are few and matter more. */
static bool
may_be_coded(const spw_model *m, uint32_t b, uint32_t id)
{
    const spw_param *p = &m->params[id];
    return p->frozen && !p->adapter && !p->of_indexer && b > 0 && b + 1 < m->block_count && p->ndim == 2;
}

/* Trained matrices between the embeddings and the head: Muon is for those. */
static bool
is_whole(const spw_model *m, uint32_t b, uint32_t id)
{
    return !m->params[id].frozen && b > 0 && b + 1 < m->block_count && m->params[id].ndim == 2;
}

/* What place_kind() takes up. */
typedef struct kind {
    uint32_t block_idx, first, end; /* of its parameters, those whose .expert is in this range */
    spw_quant form;                 /* of codes; SPW_QUANT_NONE: numbers */
    bool frozen, whole;
    bool of_experts, of_indexer;
} kind;

enum { KINDS_OF_NUMBERS = 4, KINDS_MAX = KINDS_OF_NUMBERS + SPW_FORMS_MAX };

/* A block's parameters, those of no expert first, then each expert's: one block of a mixture has hundreds of them, in hundreds of units. */
typedef struct by_expert {
    uint32_t experts;
    uint32_t ids[SPW_BLOCK_PARAMS_MAX];
    uint32_t *ends;         /* (experts + 1) where in ids those of each end */
    const spw_quant *forms; /* (param_count) of all blocks; NULL: none is codes */
    spw_quant distinct[SPW_FORMS_MAX];
    uint32_t form_count;
    uint64_t chunk_elems;
} by_expert;

/* Where a parameter may begin, a chunk and a part: multiples of 4096, and of strips that codes are cut into. */
static uint64_t
step_of(spw_quant form)
{
    uint64_t step = spw_codes_unit(form);
    while (step % 4096 != 0)
        step *= 2;
    return step;
}

/* Strips that are no part of a chunk stay numbers. */
static spw_quant
form_of(const by_expert *of, uint32_t id)
{
    const spw_quant form = of->forms != NULL ? of->forms[id] : SPW_QUANT_NONE;
    return spw_codes_cols(form) > 0 && step_of(form) > of->chunk_elems ? SPW_QUANT_NONE : form;
}

static void
list_forms(by_expert *of, uint32_t param_count)
{
    for (uint32_t id = 0; id < param_count; id++) {
        const spw_quant form = form_of(of, id);
        uint32_t k = 0;
        while (k < of->form_count && of->distinct[k] != form)
            k++;
        if (k < of->form_count || form == SPW_QUANT_NONE)
            continue;
        SPW_ASSERT(of->form_count < SPW_FORMS_MAX);
        of->distinct[of->form_count++] = form;
    }
}

/* The i-th of a block, codes first. Large ones first: where units come and go they then leave no gaps that are too small for others. */
static kind
kind_at(const by_expert *of, uint32_t block_idx, uint32_t i)
{
    const uint32_t k = i - of->form_count; /* of numbers */
    if (i < of->form_count)
        return (kind){.block_idx = block_idx, .form = of->distinct[i], .frozen = true};
    return (kind){.block_idx = block_idx, .frozen = k < 2, .of_indexer = k == 0, .whole = k == 2};
}

static void
sort_by_expert(by_expert *s, const spw_model *m, uint32_t block_idx)
{
    const spw_block *b = &m->blocks[block_idx];
    memset(s->ends, 0, (s->experts + 1) * sizeof *s->ends);
    for (uint32_t i = 0; i < b->param_count; i++)
        s->ends[m->params[b->param_ids[i]].expert]++;
    for (uint32_t x = 0, at = 0; x <= s->experts; x++) {
        at += s->ends[x];
        s->ends[x] = at - s->ends[x]; /* where they begin */
    }
    for (uint32_t i = 0; i < b->param_count; i++)
        s->ids[s->ends[m->params[b->param_ids[i]].expert]++] = b->param_ids[i];
}

static bool
is_kind(const spw_layout *l, const spw_model *m, const by_expert *of, const kind *k, uint32_t id, bool trainable)
{
    const spw_quant form = may_be_coded(m, k->block_idx, id) ? form_of(of, id) : SPW_QUANT_NONE;
    if (k->of_indexer || m->params[id].of_indexer)
        return m->params[id].owner_block == k->block_idx && k->of_indexer && m->params[id].of_indexer;
    return m->params[id].owner_block == k->block_idx && l->places[id].pieces == 1 && form == k->form &&
           (form != SPW_QUANT_NONE || (trainable && m->params[id].frozen) == k->frozen) &&
           (trainable && l->whole && is_whole(m, k->block_idx, id)) == k->whole;
}

/*
 * The elements of a block's own parameters of a kind, one after the other. An expert's lie together and begin at a multiple of 4096, so that
 * sums over 4096 elements are the same in whatever unit they are. places: they get their places in the next unit.
 */
static uint64_t
lay_kind(spw_layout *l, const spw_model *m, const by_expert *of, const kind *k, bool trainable, bool places)
{
    uint64_t at = 0;
    uint32_t count = l->param_first[l->unit_count];
    for (uint32_t x = k->first; x < k->end && x <= of->experts; x++) {
        at = spw_round_up(at, 4096);
        for (uint32_t i = x > 0 ? of->ends[x - 1] : 0; i < of->ends[x]; i++) {
            uint32_t id = of->ids[i];
            uint64_t elems = m->params[id].rows * m->params[id].cols;
            if (!is_kind(l, m, of, k, id, trainable))
                continue;
            at = k->whole ? spw_round_up(at, 4096) : at; /* so that sums over 4096 elements are of one matrix */
            at = spw_codes_cols(k->form) > 0 ? spw_round_up(at, step_of(k->form)) : at;
            if (places) {
                l->places[id] = (spw_place){l->unit_count, 1, at, elems, elems};
                l->param_ids[count++] = id;
                l->params += elems;
            }
            at = spw_round_up(at + elems, 128);
        }
    }
    if (places && at > 0)
        l->param_first[l->unit_count + 1] = count;
    return at;
}

/* The unit of a block's own parameters that are frozen, or of those that are not; without a gradient these are alike. */
static void
place_kind(spw_layout *l, const spw_model *m, const by_expert *of, const kind *k, bool trainable, uint64_t *base)
{
    uint64_t at = lay_kind(l, m, of, k, trainable, true);
    if (at == 0)
        return;
    l->bases[l->unit_count] = *base;
    *base += spw_round_up(at, 4096);
    at = spw_layout_part(at, l->parts);
    at = spw_codes_cols(k->form) > 0 ? spw_round_up(at, step_of(k->form)) : at;
    l->of_experts[l->unit_count] = k->of_experts;
    l->granule = k->of_experts && !trainable && at > l->granule ? at : l->granule;
    l->units[l->unit_count++] = (spw_store_unit){
        .first = l->part * at, .elems = at, .trainable = trainable && !k->frozen, .form = k->form, .whole = k->whole};
    l->elems += at;
}

spw_place
spw_layout_piece(const spw_place *place, uint32_t piece)
{
    uint64_t before = piece * place->piece_elems, left = place->elems - before;
    spw_place p = {place->unit_idx + piece, 1, place->first, left < place->piece_elems ? left : place->piece_elems, 0};
    SPW_ASSERT(piece < place->pieces);
    p.piece_elems = p.elems;
    return p;
}

/* Units of pieces, one after the other. */
static void
place_pieces(spw_layout *l, const spw_model *m, uint32_t id, bool trainable, uint64_t *base)
{
    spw_place *whole = &l->places[id];
    whole->unit_idx = l->unit_count;
    for (uint32_t k = 0; k < whole->pieces; k++) {
        uint64_t elems = spw_layout_piece(whole, k).elems, at = spw_layout_part(elems, l->parts);
        uint32_t count = l->param_first[l->unit_count];
        l->param_ids[count++] = id;
        l->bases[l->unit_count] = *base;
        *base += spw_round_up(elems, 4096);
        l->of_vocab[l->unit_count] = true;
        l->units[l->unit_count++] =
            (spw_store_unit){.first = l->part * at, .elems = at, .trainable = trainable && !m->params[id].frozen};
        l->param_first[l->unit_count] = count;
        l->elems += at;
    }
    l->params += whole->elems;
}

/* All units of a block: those of each kind that its experts have nothing to do with, then theirs, then pieces. */
static void
place_block(spw_layout *l, const spw_model *m, const by_expert *of, uint32_t block_idx, bool trainable, uint64_t *base)
{
    const uint32_t each = l->experts_each, groups = each > 0 ? (of->experts + each - 1) / each : 0;
    const uint32_t kinds = of->form_count + KINDS_OF_NUMBERS;
    uint64_t bases[KINDS_MAX]; /* those of one unit for all experts, into how many they are cut or not */
    for (uint32_t i = 0; i < kinds; i++) {
        kind k = kind_at(of, block_idx, i);
        k.end = of->experts + 1;
        bases[i] = *base;
        *base += spw_round_up(lay_kind(l, m, of, &k, trainable, false), 4096);
    }
    for (uint32_t g = 0; g <= groups; g++) {
        for (uint32_t i = 0; i < kinds; i++) {
            kind k = kind_at(of, block_idx, i);
            k.of_experts = g > 0;
            k.first = g > 0 ? (g - 1) * each + 1 : 0;
            k.end = g > 0 ? k.first + each : groups > 0 ? 1 : of->experts + 1;
            place_kind(l, m, of, &k, trainable, &bases[i]);
        }
    }
    for (uint32_t i = 0; i < m->blocks[block_idx].param_count; i++) {
        uint32_t id = m->blocks[block_idx].param_ids[i];
        if (m->params[id].owner_block == block_idx && l->places[id].pieces > 1)
            place_pieces(l, m, id, trainable, base);
    }
}

/* How many pieces parameters come in; returns how many units they take beyond one for each. */
static uint64_t
cut_params(spw_layout *l, const spw_model *m, uint64_t piece_rows)
{
    uint64_t more = 0;
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t cols = m->params[id].cols, elems = m->params[id].rows * cols, each = piece_rows * cols;
        l->places[id].pieces = 1; /* where, says lay_kind() */
        if (each == 0 || !spw_model_by_vocab(m, id))
            continue;
        l->places[id] =
            (spw_place){.pieces = (uint32_t)((elems + each - 1) / each), .elems = elems, .piece_elems = each};
        more += l->places[id].pieces - 1;
    }
    return more;
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

spw_tier
spw__layout_record_tier(const spw_layout *l, uint32_t unit_idx)
{
    return l->chunks[l->units[unit_idx].chunk_first].record_tier;
}

uint64_t
spw__layout_trained(const spw_layout *l)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < l->unit_count; u++)
        elems += l->units[u].trainable ? l->units[u].elems : 0;
    return elems;
}

/* As many strips as a chunk has room for. */
static uint64_t
chunk_of(const spw_store_unit *u, uint64_t chunk_elems)
{
    return spw_codes_cols(u->form) > 0 ? chunk_elems / step_of(u->form) * step_of(u->form) : chunk_elems;
}

spw_status
spw_layout_make(spw_layout *l, const spw_model *m, uint64_t chunk_elems, bool trainable, uint32_t experts_each,
                const spw_quant *forms, bool whole, uint64_t piece_rows, uint32_t part, uint32_t parts, spw_error *err)
{
    uint64_t chunks = 0, base = 0, units, more;
    by_expert of = {.experts = (uint32_t)m->config.experts, .forms = forms, .chunk_elems = chunk_elems};
    uint32_t groups;
    memset(l, 0, sizeof *l);
    l->experts_each = experts_each;
    list_forms(&of, m->param_count);
    l->whole = whole && trainable;
    SPW_ASSERT(part < parts);
    l->part = part;
    l->parts = parts;
    if (chunk_elems == 0 || chunk_elems % 4096 != 0)
        return SPW_RAISE(err, SPW_EINVAL, "chunk_elems %llu is not a multiple of 4096",
                         (unsigned long long)chunk_elems);
    l->param_count = m->param_count;
    groups = experts_each > 0 ? (of.experts + experts_each - 1) / experts_each : 0;
    l->places = spw_mem_calloc(m->param_count, sizeof *l->places);
    if (l->places == NULL)
        goto no_memory;
    more = cut_params(l, m, piece_rows);
    units = (of.form_count + KINDS_OF_NUMBERS) * (uint64_t)m->block_count * (1 + groups) + more;
    l->units = spw_mem_calloc(units, sizeof *l->units);
    l->of_experts = spw_mem_calloc(units, sizeof *l->of_experts);
    l->of_vocab = spw_mem_calloc(units, sizeof *l->of_vocab);
    l->param_ids = spw_mem_calloc(m->param_count + more, sizeof *l->param_ids);
    l->param_first = spw_mem_calloc(units + 1, sizeof *l->param_first);
    l->bases = spw_mem_calloc(units, sizeof *l->bases);
    of.ends = spw_mem_calloc(of.experts + 1, sizeof *of.ends);
    if (of.ends == NULL || l->units == NULL || l->of_experts == NULL || l->of_vocab == NULL || l->bases == NULL ||
        l->param_ids == NULL || l->param_first == NULL)
        goto no_memory;
    for (uint32_t b = 0; b < m->block_count; b++) {
        sort_by_expert(&of, m, b);
        place_block(l, m, &of, b, trainable, &base);
    }
    spw_mem_free(of.ends);
    of.ends = NULL;
    for (uint32_t u = 0; u < l->unit_count; u++)
        chunks += (l->units[u].elems - 1) / chunk_of(&l->units[u], chunk_elems) + 1;
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
        const uint64_t each = chunk_of(&l->units[u], chunk_elems);
        for (uint64_t at = 0; at < l->units[u].elems; at += each) {
            uint64_t left = l->units[u].elems - at;
            l->chunks[l->chunk_count++] =
                (spw_store_chunk){.unit_idx = u, .first = l->units[u].first + at, .elems = left < each ? left : each};
        }
        l->units[u].chunk_count = l->chunk_count - l->units[u].chunk_first;
    }
    return SPW_OK;
no_memory:
    spw_mem_free(of.ends);
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

bool
spw__layout_own_whole(const spw_layout *l, uint32_t id, uint64_t *first, uint64_t *end)
{
    const spw_place *at = &l->places[id];
    const spw_store_unit *u = &l->units[at->unit_idx];
    const spw_store_chunk own = {.unit_idx = at->unit_idx, .first = u->first, .elems = u->elems};
    return u->whole && spw__layout_overlap(at, &own, first, end);
}

spw_place
spw__layout_in_unit(const spw_layout *l, uint32_t id, uint32_t unit_idx)
{
    return spw_layout_piece(&l->places[id], unit_idx - l->places[id].unit_idx);
}

uint32_t
spw__layout_from(const spw_layout *l, uint32_t unit_idx, uint64_t element)
{
    uint32_t low = l->param_first[unit_idx], high = l->param_first[unit_idx + 1];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const spw_place at = spw__layout_in_unit(l, l->param_ids[middle], unit_idx);
        if (at.first + at.elems > element)
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
    spw_place at;
    if (k == l->param_first[c->unit_idx + 1])
        return false;
    s->id = l->param_ids[k];
    s->next = k + 2;
    at = spw__layout_in_unit(l, s->id, c->unit_idx);
    s->from = at.first - (c->unit_idx - l->places[s->id].unit_idx) * l->places[s->id].piece_elems;
    return spw__layout_overlap(&at, c, &s->first, &s->end);
}
