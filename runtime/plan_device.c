/*
 * The device's part of the plan: whose state it holds, how much it gathers, and what is kept in memory that is left. Pure.
 *
 * Of state that is offloaded the first units' may be on the device all the same: a share (zero_optimization.offload_optimizer.ratio, as in
 * ZeRO-Offload++, or engine_choose.c's), and what the device has room for when everything else has its place (spillway.fill_device). The first ones, because the next forward pass begins with them: their updates run where it
 * computes, and meanwhile the host updates those that come later. Without clipping, when the host updates a unit as soon as its
 * gradient is there, they are the ones whose gradients come last.
 */
#include "plan_internal.h"
#include <string.h>

/* ---------------------------------------------------------------- what lies where */

/* So many chunks like this one. */
static void
add(plan_places *sum, const plan_input *in, const spw_store_chunk *c, bool spills, uint64_t count)
{
    sum->weights[c->weight_tier] += count * plan_weights(in, c);
    if (!plan_has_record(in, c))
        return;
    sum->records[c->record_tier] += count * plan_record(in, c);
    sum->padding[c->record_tier] += count * (plan_record_room(in, c) - plan_record(in, c));
    sum->spilled += spills ? count * c->elems : 0;
    sum->updated_there += in->device_updates && c->record_tier == SPW_TIER_DEVICE ? count * c->elems : 0;
}

plan_places
spw__plan_count(const plan_input *in)
{
    plan_places sum = {.updated_there = 0};
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        add(&sum, in, c, in->layout->units[c->unit_idx].spills, 1);
    }
    return sum;
}

static void
put(const plan_input *in, uint32_t first_count, spw_store_chunk *chunk)
{
    const spw_config *c = in->config;
    bool record = plan_has_record(in, chunk), there = record && chunk->unit_idx < first_count;
    chunk->weight_tier = there ? SPW_TIER_DEVICE : c->zero.offload_param;
    chunk->record_tier = there    ? SPW_TIER_DEVICE
                         : record ? c->zero.offload_optimizer
                                  : SPW_TIER_HOST; /* there are none */
    chunk->spare =
        in->ahead && record && chunk->record_tier == SPW_TIER_NVME && !in->layout->units[chunk->unit_idx].whole;
}

static bool
may_spill(const plan_input *in, uint32_t first_count, uint32_t unit_idx)
{
    const spw_store_unit *unit = &in->layout->units[unit_idx];
    return in->spill && unit->trainable && unit_idx >= first_count && !unit->whole &&
           !(in->piece_returns > 0 && in->layout->of_vocab[unit_idx]);
}

void
spw__plan_place_all(const plan_input *in, uint32_t first_count)
{
    for (uint32_t i = 0; i < in->layout->chunk_count; i++)
        put(in, first_count, &in->layout->chunks[i]);
    for (uint32_t u = 0; u < in->layout->unit_count; u++)
        in->layout->units[u].spills = may_spill(in, first_count, u);
}

/*
 * A unit's chunks lie alike then and are of one size, but for the last one, which may be smaller (spw_layout_make()): where plans are compared nobody needs to look at, and place, millions
 * of them.
 */
plan_places
spw__plan_count_placed(const plan_input *in, uint32_t first_count)
{
    plan_places sum = {.updated_there = 0};
    for (uint32_t u = 0; u < in->layout->unit_count; u++) {
        const spw_store_unit *unit = &in->layout->units[u];
        const bool spills = may_spill(in, first_count, u);
        for (uint32_t k = unit->chunk_count > 1 ? 0 : 1; unit->chunk_count > 0 && k < 2; k++) {
            spw_store_chunk c = in->layout->chunks[unit->chunk_first + k * (unit->chunk_count - 1)];
            put(in, first_count, &c);
            add(&sum, in, &c, spills, k == 0 ? unit->chunk_count - 1 : 1);
        }
    }
    return sum;
}

/* State that is offloaded may be on the device all the same. */
static bool
may_be_there(const plan_input *in)
{
    return !in->inference && in->config->zero.offload_optimizer != SPW_TIER_DEVICE &&
           (in->device_in_host || in->device_updates);
}

uint32_t
spw__plan_first_count(const plan_input *in)
{
    const spw_layout *l = in->layout;
    double there = 0, wanted = in->device_share * (double)spw__layout_trained(l);
    uint32_t u = 0;
    while (may_be_there(in) && u < l->unit_count && there < wanted - 0.5) {
        there += l->units[u].trainable ? (double)l->units[u].elems : 0;
        u++;
    }
    return u;
}

/* Of a unit all is on the device or nothing, but for frozen ones, whose chunks are all in one tier or in nvme and host memory. */
static bool
is_direct(const plan_input *in, uint32_t first_count, uint32_t unit_idx)
{
    const spw_store_unit *u = &in->layout->units[unit_idx];
    spw_store_chunk c = {.unit_idx = unit_idx};
    put(in, first_count, &c);
    return in->direct && u->chunk_count > 0 && c.weight_tier == SPW_TIER_DEVICE && u->form == SPW_QUANT_NONE;
}

/* ---------------------------------------------------------------- gathered units */

/* Bytes of units that are gathered. Between ranks all are, and of those that are not direct a rank's part comes first. */
typedef struct gathering {
    uint64_t all, largest_part;
} gathering;

static gathering
count_gathered(const plan_input *in, uint32_t first_count)
{
    const spw_layout *l = in->layout;
    gathering g = {0};
    for (uint32_t u = 0; u < l->unit_count; u++) {
        bool direct = is_direct(in, first_count, u);
        g.all += l->parts > 1 || !direct ? spw__layout_on_device(l, u) * in->compute_bytes : 0;
        if (l->parts > 1 && !direct && l->units[u].elems * in->compute_bytes > g.largest_part)
            g.largest_part = l->units[u].elems * in->compute_bytes;
    }
    return g;
}

/* Between ranks a unit's part comes to the device before it is made whole: room for the largest, and a share of the cache. */
static uint64_t
parts_room(const plan_input *in, const gathering *g, uint64_t cache)
{
    uint64_t share = spw_round_up(cache / in->layout->parts, 4096);
    return g->largest_part == 0 ? 0 : share > g->largest_part ? share : g->largest_part;
}

/* The largest cache that leaves room for its parts; 0: not even the parts fit. */
static uint64_t
cache_within(const plan_input *in, const gathering *g, uint64_t room)
{
    uint64_t least = parts_room(in, g, 0), parts = in->layout->parts, cache, by_share;
    if (room < least)
        return 0;
    cache = (room - least) / 4096 * 4096;
    by_share = room / (parts + 1) * parts / 4096 * 4096 + 4096 * parts; /* or a few pages less */
    if (g->largest_part > 0 && cache > by_share)
        cache = by_share;
    while (cache + parts_room(in, g, cache) > room)
        cache -= 4096;
    return cache;
}

/* Below stage 3 every rank keeps all weights. */
static bool
keeps_whole(const plan_input *in)
{
    return in->layout->parts > 1 && in->config->zero.stage < 3;
}

static uint64_t
least_cache(const plan_input *in, const gathering *g)
{
    return keeps_whole(in) || g->all < in->largest_block_bytes ? g->all : in->largest_block_bytes;
}

/* Of a cache what ranks gather together, and max_live_parameters leaves: the block in use is there all the same. */
static uint64_t
allowed(const plan_input *in, uint64_t least, uint64_t cache)
{
    const uint64_t most = in->config->zero.max_live_parameters;
    uint64_t live;
    if (in->gather_most > 0 && cache > in->gather_most)
        cache = in->gather_most;
    if (keeps_whole(in) || cache / in->compute_bytes <= most)
        return cache;
    live = spw_round_up(most, 4096) * in->compute_bytes;
    live = live > least ? live : least;
    return live < cache ? live : cache;
}

bool
spw__plan_fetches_ahead(const spw_plan *p, const plan_input *in, uint32_t first_count)
{
    return p->cache_device >= 3 * in->largest_block_bytes || p->cache_device >= count_gathered(in, first_count).all;
}

static spw_status
plan_device_within(spw_plan *p, const plan_input *in, const plan_places *placed, const gathering *g, uint64_t budget,
                   spw_error *err)
{
    const spw_config *c = in->config;
    uint64_t all_units = g->all, floor_bytes = least_cache(in, g), fixed;
    uint64_t ease = all_units > 2 * floor_bytes ? floor_bytes : all_units > floor_bytes ? all_units - floor_bytes : 0;
    char need[32], have[32];
    p->device_budget = c->run.device_memory;
    p->grads_device = p->single_grad ? in->grads_device_least : in->grads_device;
    p->grads_device -= in->made_there ? placed->updated_there * sizeof(float) : 0; /* they are made where they stay */
    p->trained_device = placed->updated_there;
    p->grad_device = placed->updated_there * in->grad_bytes;
    p->arena_device = in->arena_device;
    p->batch_device = in->batch_device;
    p->padding_device = placed->padding[SPW_TIER_DEVICE];
    fixed = p->grads_device + p->grad_device + p->arena_device + p->batch_device + p->padding_device;
    fixed += placed->weights[SPW_TIER_DEVICE] + placed->records[SPW_TIER_DEVICE];
    fixed += parts_room(in, g, floor_bytes);
    spw__plan_activations_device(p, in,
                                 budget == SPW_AUTO             ? UINT64_MAX
                                 : budget > fixed + floor_bytes ? budget - fixed - floor_bytes
                                                                : 0,
                                 ease);
    fixed += p->activations_device - parts_room(in, g, floor_bytes);
    if (budget == SPW_AUTO) {
        p->cache_device = keeps_whole(in) || in->gather_all ||
                                  (in->layout->parts == 1 && c->zero.offload_param == SPW_TIER_DEVICE) ||
                                  all_units < 3 * floor_bytes
                              ? all_units
                              : 3 * floor_bytes;
    } else if (budget > fixed) {
        p->cache_device = cache_within(in, g, budget - fixed);
        p->cache_device = p->cache_device < all_units ? p->cache_device : all_units;
    }
    p->cache_device = allowed(in, floor_bytes, p->cache_device);
    p->parts_device = parts_room(in, g, p->cache_device);
    p->device_bytes = fixed + p->cache_device + p->parts_device;
    if (p->cache_device < floor_bytes || budget < fixed)
        return SPW_RAISE(
            err, SPW_ENOFIT,
            "spillway.device_memory is %s, this model and batch need at least %s (%llu bytes); %s lowers it%s",
            spw_format_bytes(have, sizeof have, budget),
            spw_format_bytes(need, sizeof need, fixed + floor_bytes + parts_room(in, g, floor_bytes)),
            (unsigned long long)(fixed + floor_bytes + parts_room(in, g, floor_bytes)),
            in->inference
                ? "a smaller number or length of texts at a time"
                : "a smaller micro-batch, sequence, spillway.tile_tokens, tile_vocab or micro_batches_per_pass",
            p->activation_count[SPW_TIER_DEVICE] > 0 ? ", and so does spillway.activations auto" : "");
    return SPW_OK;
}

/*
 * device_memory auto: as much as is useful, or else what the device has. Gradients leave while the next ones are made, unless
 * nothing fits but one at a time.
 */
static spw_status
plan_with(spw_plan *p, const plan_input *in, uint32_t first_count, spw_error *err)
{
    uint64_t budget = in->config->run.device_memory;
    const plan_places placed = spw__plan_count_placed(in, first_count);
    const gathering g = count_gathered(in, first_count);
    spw_error first = {0};
    spw_status st;
    p->single_grad = in->single_grad;
    st = plan_device_within(p, in, &placed, &g, budget, &first);
    if (st == SPW_OK && budget == SPW_AUTO && in->device_room > 0 && p->device_bytes > in->device_room)
        st = plan_device_within(p, in, &placed, &g, budget = in->device_room, &first);
    if (st != SPW_ENOFIT)
        return st;
    p->single_grad = true;
    return plan_device_within(p, in, &placed, &g, budget, err);
}

/* Whether the state of the first units finds room that nothing else of the plan `before` takes. */
static bool
finds_room(const spw_plan *before, const plan_input *in, uint32_t first_count, uint64_t room)
{
    spw_plan p = *before;
    spw_error err = {0};
    uint64_t gathered;
    if (plan_with(&p, in, first_count, &err) != SPW_OK)
        return false;
    gathered = count_gathered(in, first_count).all;
    return p.single_grad == before->single_grad && p.activations_device == before->activations_device &&
           p.device_bytes + before->tapes_device <= room &&
           p.cache_device >= (before->cache_device < gathered ? before->cache_device : gathered);
}

spw_status
spw__plan_device(spw_plan *p, const plan_input *in, uint32_t *first_count, spw_error *err)
{
    uint32_t most = spw__plan_first_count(in), above = in->layout->unit_count + 1;
    uint64_t room = in->config->run.device_memory == SPW_AUTO ? in->device_room : in->config->run.device_memory;
    spw_plan before;
    *first_count = most;
    SPW_TRY(plan_with(p, in, most, err));
    if (!in->fills || !may_be_there(in) || in->device_in_host || room == 0)
        return SPW_OK;
    before = *p;
    spw__plan_tapes(&before, in);
    before.device_bytes = p->device_bytes;
    while (above - most > 1) {
        uint32_t middle = most + (above - most) / 2;
        if (finds_room(&before, in, middle, room))
            most = middle;
        else
            above = middle;
    }
    *first_count = most;
    return plan_with(p, in, most, err);
}

uint64_t
spw__plan_device_least(const spw_plan *p, const plan_input *in, uint32_t first_count)
{
    const gathering g = count_gathered(in, first_count);
    uint64_t least = least_cache(in, &g);
    return p->device_bytes - p->cache_device - p->parts_device + least + parts_room(in, &g, least);
}

/* ---------------------------------------------------------------- memory that is left */

double
spw__plan_kept_share(const spw_plan *p, const plan_input *in)
{
    return p->tape_count == 0 ? 0 : (double)p->tape_count / in->activation_slots_used / in->activation_micros;
}

/*
 * Device memory that nothing else wants, less what is not one's own to take: on a device whose memory is the host's, half of
 * what the host would have left, because there the same memory keeps files in cache.
 */
static uint64_t
device_left(const spw_plan *p, const plan_input *in)
{
    uint64_t budget = in->config->run.device_memory == SPW_AUTO ? in->device_room : in->config->run.device_memory;
    uint64_t room = budget == 0 ? UINT64_MAX : budget > p->device_bytes ? budget - p->device_bytes : 0;
    if (in->device_in_host) {
        uint64_t have = spw__plan_host_room(p, in) / 8 * 7;
        uint64_t left = have > p->host_bytes ? (have - p->host_bytes) / 2 : 0;
        room = left < room ? left : room;
    }
    return room / 4096 * 4096;
}

void
spw__plan_tapes(spw_plan *p, const plan_input *in)
{
    if (strcmp(in->config->run.recompute, "always") != 0)
        spw__plan_activations_tapes(p, in, device_left(p, in));
    p->device_bytes += p->tapes_device;
    p->flops -= in->recompute_flops * spw__plan_kept_share(p, in);
    p->attention_flops -= in->attention_again * spw__plan_kept_share(p, in);
}

void
spw__plan_gather_more(spw_plan *p, const plan_input *in, uint32_t first_count)
{
    const gathering g = count_gathered(in, first_count);
    const uint64_t had = p->cache_device + p->parts_device;
    uint64_t cache, left;
    if (in->config->run.device_memory != SPW_AUTO || p->cache_device >= g.all)
        return;
    left = device_left(p, in);
    left = left < UINT64_MAX - had ? left : UINT64_MAX - had;
    cache = cache_within(in, &g, had + left);
    cache = allowed(in, p->cache_device, cache < g.all ? cache : g.all);
    if (cache <= p->cache_device)
        return;
    p->cache_device = cache;
    p->parts_device = parts_room(in, &g, cache);
    p->device_bytes += cache + p->parts_device - had;
}
