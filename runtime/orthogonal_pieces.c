/*
 * Which elements of a unit of matrices go from rank to rank between the two halves of Muon's update. A rank makes those matrices orthogonal
 * of which it has something, and lacks of them what other parts have: of the first one what lies in front of its part, of the last
 * one what lies behind. So a part gives at most two stretches away, its head, the end of a matrix that began before it, to the parts in front
 * that have some of that matrix, and its tail, the begin of one that goes on, to those behind.
 *
 * Each rank has memory for these at the same place: its head, its tail, what it gets, in the order of parts; behind each stretch of
 * gradients their sums of squares. Pure: all ranks know the places of all.
 */
#include "engine_internal.h"
#include <string.h>

static uint64_t
piece_bytes(const whole_piece *p, uint32_t grad_bytes)
{
    const uint64_t elems = p->end - p->first;
    return spw_round_up(spw__whole_squares_at(p, grad_bytes) + (elems + 4095) / 4096 * sizeof(double), 256);
}

/* The matrix that lies on both sides of an element of the unit; false: none does. */
static bool
crossing(const spw_layout *l, uint32_t unit_idx, uint64_t element, spw_place *at)
{
    const uint32_t k = spw__layout_from(l, unit_idx, element);
    if (k == l->param_first[unit_idx + 1])
        return false;
    *at = l->places[l->param_ids[k]];
    return at->first < element;
}

static whole_piece
head_of(const spw_layout *l, uint32_t unit_idx, uint32_t part)
{
    const uint64_t each = l->units[unit_idx].elems, first = part * each;
    spw_place at;
    if (!crossing(l, unit_idx, first, &at))
        return (whole_piece){first, first, 0};
    return (whole_piece){first, at.first + at.elems < first + each ? at.first + at.elems : first + each, 0};
}

static whole_piece
tail_of(const spw_layout *l, uint32_t unit_idx, uint32_t part)
{
    const uint64_t each = l->units[unit_idx].elems, end = (part + 1) * each;
    spw_place at;
    if (!crossing(l, unit_idx, end, &at))
        return (whole_piece){end, end, 0};
    return (whole_piece){at.first > end - each ? at.first : end - each, end, 0};
}

/* What part `to` gets of `from`: stretches of one matrix each, which all parts between them have some of. */
static whole_piece
piece_between(const spw_layout *l, uint32_t unit_idx, uint32_t from, uint32_t to)
{
    const uint64_t each = l->units[unit_idx].elems;
    spw_place at;
    if (from < to && crossing(l, unit_idx, to * each, &at) && at.first < (from + 1) * each)
        return tail_of(l, unit_idx, from);
    if (from > to && crossing(l, unit_idx, (to + 1) * each, &at) && at.first + at.elems > from * each)
        return head_of(l, unit_idx, from);
    return (whole_piece){0, 0, 0};
}

uint64_t
spw__whole_given(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes, uint32_t part, whole_piece *head,
                 whole_piece *tail)
{
    *head = head_of(l, unit_idx, part);
    *tail = tail_of(l, unit_idx, part);
    if (head->first == tail->first && head->end == tail->end) /* to both sides the same */
        tail->first = tail->end;
    else
        tail->at = piece_bytes(head, grad_bytes);
    return piece_bytes(head, grad_bytes) + piece_bytes(tail, grad_bytes);
}

/* The parts that have something of a part's first and of its last matrix. */
static void
sharing(const spw_layout *l, uint32_t unit_idx, uint32_t part, uint32_t *low, uint32_t *high)
{
    const uint64_t each = l->units[unit_idx].elems;
    spw_place matrix;
    *low = *high = part;
    if (crossing(l, unit_idx, part * each, &matrix))
        *low = (uint32_t)(matrix.first / each);
    if (crossing(l, unit_idx, (part + 1) * each, &matrix))
        *high = (uint32_t)((matrix.first + matrix.elems - 1) / each);
}

uint64_t
spw__whole_got(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes, uint32_t part, whole_piece *in,
               spw_comm_piece *take, spw_comm_piece *give)
{
    whole_piece head, tail;
    uint64_t at = spw__whole_given(l, unit_idx, grad_bytes, part, &head, &tail);
    uint32_t low, high;
    sharing(l, unit_idx, part, &low, &high);
    if (in != NULL)
        memset(in, 0, l->parts * sizeof *in);
    if (take != NULL)
        memset(take, 0, l->parts * sizeof *take);
    if (give != NULL)
        memset(give, 0, l->parts * sizeof *give);
    for (uint32_t p = low; p <= high; p++) {
        whole_piece its_head, its_tail, piece = piece_between(l, unit_idx, p, part);
        const whole_piece mine = piece_between(l, unit_idx, part, p);
        const uint64_t bytes = piece_bytes(&piece, grad_bytes);
        piece.at = at;
        at += bytes;
        (void)spw__whole_given(l, unit_idx, grad_bytes, p, &its_head, &its_tail);
        if (in != NULL)
            in[p] = piece;
        if (take != NULL)
            take[p] = (spw_comm_piece){.from = p < part ? its_tail.at : its_head.at, .to = piece.at, .bytes = bytes};
        if (give != NULL)
            give[p] = (spw_comm_piece){.from = p < part ? head.at : tail.at, .bytes = piece_bytes(&mine, grad_bytes)};
    }
    return at;
}

/* What spw__whole_got() returns, at once: of the parts between this one and the last that shares a matrix with it each gives all it has. */
static uint64_t
bytes_of(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes, uint32_t part)
{
    const whole_piece all = {0, l->units[unit_idx].elems, 0};
    const uint64_t full = piece_bytes(&all, grad_bytes);
    whole_piece head, tail, first, last;
    uint64_t bytes = spw__whole_given(l, unit_idx, grad_bytes, part, &head, &tail);
    uint32_t low, high;
    sharing(l, unit_idx, part, &low, &high);
    first = tail_of(l, unit_idx, low);
    last = head_of(l, unit_idx, high);
    bytes += low < part ? piece_bytes(&first, grad_bytes) + (part - low - 1) * full : 0;
    return bytes + (high > part ? piece_bytes(&last, grad_bytes) + (high - part - 1) * full : 0);
}

uint64_t
spw__whole_most(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes)
{
    uint64_t most = 0;
    for (uint32_t part = 0; part < l->parts && l->units[unit_idx].whole; part++) {
        const uint64_t bytes = bytes_of(l, unit_idx, grad_bytes, part);
        most = bytes > most ? bytes : most;
    }
    return most;
}
