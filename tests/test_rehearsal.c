/*
 * The rehearsal (runtime/rehearse.c) beside one that takes no shortcut: it looks at all that is on the device for each unit that leaves, at all
 * slots for each chunk that takes one, and at each chunk of what is copied. Both must move the same, byte for byte, over random layouts, uses, budgets and
 * paces.
 */
#include "runtime_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- chunk by chunk */

enum { NO_SLOT = -1, STEPS_MIN = 3, STEPS_MAX = 8 }; /* where experts take turns it may take so many */
static const uint64_t SCAN_MAX =
    1u << 22; /* chunks times slots looked at in a step; above it, both are taken in groups */

typedef enum place_state { AWAY, FILLING, THERE } place_state;

typedef struct sim_unit {
    uint32_t group_first, group_count; /* of sim_group */
    uint64_t device_offset, device_bytes, generation, device_generation, wanted;
    place_state place;
    bool pinned, updating, grad_ready, kept;
    uint64_t kept_generation;
    uint32_t fill_next, job_next;
    uint64_t next_at, then_at; /* the first of its uses that are still to come, and the second */
    uint64_t last_use;         /* the let_go count */
} sim_unit;

/* A chunk, or several in a row where there are very many. */
typedef struct sim_group {
    uint32_t chunk_first, chunk_count, unit_idx;
    int32_t slot;
    bool on_nvme, updated;
    uint64_t generation;
} sim_group;

typedef struct sim {
    const rehearsal_input *in;
    rehearsal *out;
    sim_unit *units;
    sim_group *groups;
    int32_t *slot_owner, *slot_free;
    uint32_t slot_count, slot_free_count, group_count;
    spw_gaps room; /* of the device */
    /* (use_count) uses from each to the next of the same unit, in the next pass or step if need be. */
    uint32_t *until_again;
    /*
     * Uses are numbered from the step's first on, through all passes, and on into the next step. `position` have been made; those
     * below future_end are known, and those below fetch_end fetched, of fetch_elems elements.
     */
    uint64_t position, future_end, fetch_end, fetch_elems, step_uses;
    uint64_t settled; /* of those below nothing is left to fetch */
    uint64_t let_go_count;
    uint32_t ready_count; /* units whose update may run once the gate is open */
    uint32_t ready_from;  /* none below it is one */
    double credit;        /* elements that may be updated before the engine goes on */
    bool gate_open, first_step;
} sim;

/* ---------------------------------------------------------------- the future */

/* Which of a pass's uses it is. Mostly of the first pass, or of the second, where no division is needed. */
static uint32_t
in_pass(const sim *s, uint64_t at)
{
    const uint32_t count = s->in->use_count;
    return (uint32_t)(at < count ? at : at - count < count ? at - count : at % count);
}

static uint32_t
unit_used(const sim *s, uint64_t at)
{
    return s->in->uses[in_pass(s, at)].unit_idx;
}

/* Of the next step those of what is trained are of the next generation. */
static spw_store_use
use_at(const sim *s, uint64_t at)
{
    uint32_t u = unit_used(s, at);
    return (spw_store_use){u, s->units[u].wanted + (at >= s->step_uses && s->in->layout->units[u].trainable)};
}

/* How many uses from now, as far as uses are known; UINT32_MAX: none. */
static uint32_t
uses_until(const sim *s, uint64_t at)
{
    return at < s->future_end ? (uint32_t)(at - s->position) : UINT32_MAX;
}

static uint32_t
next_use(const sim *s, const sim_unit *u)
{
    return uses_until(s, u->next_at);
}

static uint32_t
next_use2(const sim *s, const sim_unit *u)
{
    return uses_until(s, u->then_at);
}

/* Something of the unit changed that decides what its uses need. */
static void
unsettle(sim *s, const sim_unit *u)
{
    s->settled = u->next_at < s->settled ? u->next_at : s->settled;
}

/* Nothing is known in the first step, nor without prefetch. */
static void
look_ahead(sim *s)
{
    const rehearsal_input *in = s->in;
    uint64_t end = s->position + in->future_max;
    if (!in->prefetch || s->first_step)
        end = s->position;
    s->future_end = end < 2 * s->step_uses ? end : 2 * s->step_uses;
    while (s->fetch_end < s->future_end && s->fetch_elems < in->prefetch_elems)
        s->fetch_elems += in->layout->units[unit_used(s, s->fetch_end++)].elems;
}

/* The use that comes next has come. */
static void
go_on(sim *s)
{
    uint64_t at = s->position++;
    uint32_t u = unit_used(s, at);
    s->units[u].next_at = at + s->until_again[in_pass(s, at)];
    s->units[u].then_at = s->units[u].next_at + s->until_again[in_pass(s, s->units[u].next_at)];
    if (s->fetch_end > at)
        s->fetch_elems -= s->in->layout->units[u].elems;
    else
        s->fetch_end = s->position;
    look_ahead(s);
}

/* What the first of a new step is told. */
static void
wrap_around(sim *s)
{
    s->position = 0;
    for (uint32_t u = 0; u < s->in->layout->unit_count; u++) {
        s->units[u].next_at -= s->units[u].next_at < UINT64_MAX ? s->step_uses : 0;
        s->units[u].then_at -= s->units[u].then_at < UINT64_MAX ? s->step_uses : 0;
    }
    s->fetch_end = s->fetch_elems = s->settled = 0;
    look_ahead(s);
}

/* ---------------------------------------------------------------- counting */

static void
count_read(sim *s, const sim_group *g)
{
    for (uint32_t i = g->chunk_first; i < g->chunk_first + g->chunk_count; i++) {
        const spw_store_chunk *c = &s->in->layout->chunks[i];
        if (c->weight_tier != SPW_TIER_NVME)
            continue;
        s->out->path_read[c->path_idx] += spw__layout_weight_bytes(s->in->layout, c, s->in->weight_bytes);
        if (s->out->chunk_reads != NULL)
            s->out->chunk_reads[i]++;
    }
}

static void
count_copy(sim *s, const sim_group *g)
{
    for (uint32_t i = g->chunk_first; i < g->chunk_first + g->chunk_count; i++) {
        const spw_store_chunk *c = &s->in->layout->chunks[i];
        s->out->h2d +=
            c->weight_tier == SPW_TIER_DEVICE ? 0 : spw__layout_weight_bytes(s->in->layout, c, s->in->weight_bytes);
    }
}

/* ---------------------------------------------------------------- slots */

/* It has been on the device at this generation: ranks have kept it, and the store has nothing to do with the next time. */
static bool
again(const sim *s, const sim_unit *u, uint64_t generation)
{
    return s->in->gathers_again && u->kept && u->kept_generation == generation;
}

static uint64_t
distance(const sim *s, const sim_group *g)
{
    const sim_unit *u = &s->units[g->unit_idx];
    uint32_t k = (uint32_t)(g - s->groups) - u->group_first;
    if (u->updating && u->grad_ready && s->gate_open && !g->updated)
        return 0;
    if (u->place == THERE || (u->place == FILLING && k < u->fill_next))
        return (1ull << 32) + next_use2(s, u);
    if (again(s, u, u->wanted))
        return next_use2(s, u); /* the store is not told of the next */
    return next_use(s, u);
}

/* None is farther than what is on the device and not known to be used again. */
static bool
take_slot(sim *s, sim_group *g, uint64_t nearer_than)
{
    const uint64_t farthest = (1ull << 32) + UINT32_MAX + 1;
    int32_t best = NO_SLOT;
    uint64_t best_distance = 0;
    if (s->slot_free_count > 0) {
        best = s->slot_free[--s->slot_free_count];
        best_distance = UINT64_MAX;
    }
    for (uint32_t i = 0; i < s->slot_count && best_distance < farthest; i++) {
        uint64_t d = distance(s, &s->groups[s->slot_owner[i]]) + 1;
        if (d > best_distance) {
            best = (int32_t)i;
            best_distance = d;
        }
    }
    if (best == NO_SLOT || best_distance <= nearer_than)
        return false;
    if (s->slot_owner[best] >= 0)
        s->groups[s->slot_owner[best]].slot = NO_SLOT;
    s->slot_owner[best] = (int32_t)(g - s->groups);
    g->slot = best;
    return true;
}

/* ---------------------------------------------------------------- the device */

static void
leave_device(sim *s, sim_unit *u)
{
    u->place = AWAY;
    unsettle(s, u);
    if (u->device_bytes > 0)
        spw_gaps_give_back(&s->room, u->device_offset, u->device_bytes);
}

static bool
make_room(sim *s, sim_unit *u, uint64_t nearer_than)
{
    if (u->device_bytes == 0)
        return true; /* used where it lies */
    while (!spw_gaps_take(&s->room, u->device_bytes, &u->device_offset)) {
        sim_unit *victim = NULL;
        uint32_t farthest = 0;
        for (uint32_t i = 0; i < s->in->layout->unit_count; i++) {
            sim_unit *o = &s->units[i];
            uint32_t next = next_use(s, o);
            bool idle = (o->place == THERE && !o->pinned) || (o->place == FILLING && next == UINT32_MAX);
            bool longer =
                victim != NULL && (o->last_use < victim->last_use ||
                                   (o->last_use == victim->last_use && o->device_offset < victim->device_offset));
            bool farther = victim == NULL || next > farthest || (next == farthest && longer);
            if (!idle || o->device_bytes == 0 || (uint64_t)next + 1 <= nearer_than || !farther)
                continue;
            victim = o;
            farthest = next;
        }
        if (victim == NULL)
            return false;
        leave_device(s, victim);
    }
    return true;
}

static bool
promised(const sim *s, const sim_unit *u, uint64_t generation)
{
    return u->generation >= generation ||
           (u->generation + 1 == generation && u->updating && u->grad_ready && s->gate_open);
}

static bool
reserve(sim *s, spw_store_use use, uint64_t nearer_than)
{
    sim_unit *u = &s->units[use.unit_idx];
    if (!promised(s, u, use.generation))
        return true;
    if ((u->place == FILLING || (u->place == THERE && !u->pinned)) && u->device_generation < use.generation)
        leave_device(s, u);
    if (u->place != AWAY || u->generation > use.generation)
        return true;
    if (!make_room(s, u, nearer_than))
        return false;
    u->place = FILLING;
    u->device_generation = use.generation;
    u->fill_next = 0;
    return true;
}

/* False: no slot or no room on the device, later uses must wait. */
static bool
serve(sim *s, spw_store_use use, uint64_t nearer_than)
{
    sim_unit *u = &s->units[use.unit_idx];
    if (!reserve(s, use, nearer_than))
        return false;
    if (!promised(s, u, use.generation) || u->place != FILLING)
        return true;
    if (again(s, u, use.generation))
        u->fill_next = u->group_count;
    for (; u->fill_next < u->group_count; u->fill_next++) {
        sim_group *g = &s->groups[u->group_first + u->fill_next];
        if (g->generation != u->device_generation)
            return true;
        if (g->on_nvme && g->slot == NO_SLOT) {
            if (!take_slot(s, g, nearer_than))
                return false;
            count_read(s, g);
        }
        count_copy(s, g);
    }
    u->place = THERE;
    u->kept = true;
    u->kept_generation = u->device_generation;
    return true;
}

static void
serve_future(sim *s)
{
    s->settled = s->settled > s->position ? s->settled : s->position;
    for (uint64_t at = s->settled; at < s->fetch_end; at++) {
        const spw_store_use use = use_at(s, at);
        if (!promised(s, &s->units[use.unit_idx], use.generation) || !serve(s, use, at - s->position + 1))
            return;
        s->settled += s->settled == at;
    }
}

/* ---------------------------------------------------------------- updates */

static void
update_next(sim *s, sim_unit *u)
{
    sim_group *g;
    if ((u->place == THERE && !u->pinned) || (u->place == FILLING && u->device_generation <= u->generation))
        leave_device(s, u);
    g = &s->groups[u->group_first + u->job_next];
    if (g->on_nvme && g->slot == NO_SLOT && take_slot(s, g, 0) && s->in->update_reads_weights)
        count_read(s, g);
    for (uint32_t k = 0; k < g->chunk_count; k++)
        s->credit -= (double)s->in->layout->chunks[g->chunk_first + k].elems;
    unsettle(s, u);
    g->updated = true;
    g->generation++;
    if (++u->job_next == u->group_count) {
        u->generation++;
        u->updating = false;
        s->ready_count--;
    }
}

/* One chunk of the lowest unit that may be updated. False: there is none. */
static bool
update_one(sim *s)
{
    while (s->gate_open && s->ready_count > 0 && s->ready_from < s->in->layout->unit_count) {
        sim_unit *u = &s->units[s->ready_from];
        if (!u->updating || !u->grad_ready) {
            s->ready_from++;
            continue;
        }
        update_next(s, u);
        return true;
    }
    return false;
}

/*
 * Where updates consume gradients that spill in their windows, these are as many as there are windows at most: the next one waits until the
 * highest units have been updated, and the engine with it.
 */
static void
empty_windows(sim *s)
{
    const spw_layout *l = s->in->layout;
    const double credit = s->credit;
    uint32_t held = 0;
    for (uint32_t i = 0; i < l->unit_count && s->in->early_gate && s->gate_open; i++) {
        sim_unit *u = &s->units[i];
        if (!l->units[i].spills || !u->updating || !u->grad_ready || ++held <= s->in->grad_windows)
            continue;
        while (u->updating)
            update_next(s, u);
        serve_future(s);
    }
    s->credit = credit;
}

/* What happens while the engine computes: what was not used of the time is not saved up. */
static void
meanwhile(sim *s, double credit)
{
    s->credit = s->credit < 0 ? s->credit + credit : credit;
    serve_future(s);
    while (s->credit > 0 && update_one(s))
        serve_future(s);
}

/* ---------------------------------------------------------------- the engine's part */

static void
use_unit(sim *s, uint32_t unit_idx)
{
    sim_unit *u = &s->units[unit_idx];
    const double credit = s->credit; /* the engine waits: what is updated now costs none of its time */
    for (bool more = true; more;) {
        (void)serve(s, (spw_store_use){unit_idx, u->wanted}, 0);
        if (u->place == THERE && u->device_generation == u->wanted)
            break;
        more = update_one(s); /* nothing left to update: a plan without room for a block, refused elsewhere */
        serve_future(s);
    }
    s->credit = credit;
    u->pinned = true;
    go_on(s);
    serve_future(s);
}

static void
begin_updates(sim *s)
{
    while (update_one(s))
        serve_future(s);
    for (uint32_t i = 0; i < s->in->layout->unit_count; i++) {
        sim_unit *u = &s->units[i];
        u->grad_ready = false;
        u->updating = s->in->layout->units[i].trainable;
        u->job_next = 0;
        for (uint32_t k = 0; k < u->group_count; k++)
            s->groups[u->group_first + k].updated = false;
    }
    s->ready_count = s->ready_from = 0;
    s->settled = 0;
    s->gate_open = s->in->early_gate;
}

/* What was used up to `end`, from `open` on, and is not needed any longer; returns the first that still is. */
static uint32_t
let_go(sim *s, uint32_t open, uint32_t end, bool makes_gradients)
{
    const rehearsal_input *in = s->in;
    uint32_t first = end;
    for (uint32_t i = end; i-- > open;) {
        sim_unit *u = &s->units[in->uses[i].unit_idx];
        if (in->uses[i].until > end) {
            first = i;
            continue;
        }
        if (!u->pinned)
            continue; /* before */
        u->pinned = false;
        u->last_use = ++s->let_go_count;
        if (makes_gradients && !in->uses[i].ends_later && !u->grad_ready &&
            i + s->until_again[i] >= in->use_count) { /* the last time in the step */
            u->grad_ready = true;
            s->ready_count += u->updating;
            s->ready_from = in->uses[i].unit_idx < s->ready_from ? in->uses[i].unit_idx : s->ready_from;
        }
        if (promised(s, u, u->device_generation + 1))
            unsettle(s, u); /* the next may come in its place now */
    }
    return first;
}

static void
step(sim *s)
{
    const rehearsal_input *in = s->in;
    const double whole =
        (in->forward_count + in->backward * (in->use_count - in->forward_count)) * in->passes; /* in uses forward */
    serve_future(s);
    for (uint32_t p = 0; p < in->passes; p++) {
        for (uint32_t at = 0, end, open = 0; at < in->use_count; at = end) {
            if (p + 1 == in->passes && at == in->forward_count)
                begin_updates(s);
            for (end = at; end < in->uses[at].end; end++)
                use_unit(s, in->uses[end].unit_idx);
            meanwhile(s, (double)in->layout->elems * in->pace * (at < in->forward_count ? 1 : in->backward) *
                             (end - at) / whole);
            open = let_go(s, open, end, p + 1 == in->passes && at >= in->forward_count);
            serve_future(s);
            empty_windows(s);
        }
    }
    for (uint32_t u = 0; u < in->layout->unit_count; u++) { /* gradients that ended without weights */
        s->ready_count += s->units[u].last_use > 0 && s->units[u].updating && !s->units[u].grad_ready;
        s->units[u].grad_ready = s->units[u].last_use > 0;
    }
    s->ready_from = 0;
    s->gate_open = true;
    for (uint32_t u = 0; u < in->layout->unit_count; u++)
        s->units[u].wanted += s->units[u].grad_ready && in->layout->units[u].trainable;
    s->first_step = false;
    wrap_around(s);
}

/* ---------------------------------------------------------------- lifetime */

static void
make_groups(sim *s, uint32_t per_group)
{
    const spw_layout *l = s->in->layout;
    for (uint32_t i = 0; i < l->unit_count; i++) {
        const spw_store_unit *from = &l->units[i];
        sim_unit *u = &s->units[i];
        u->group_first = s->group_count;
        u->device_bytes = from->elems * s->in->compute_bytes;
        if (s->in->direct && from->chunk_count > 0 && l->chunks[from->chunk_first].weight_tier == SPW_TIER_DEVICE &&
            from->form == SPW_QUANT_NONE)
            u->device_bytes = 0; /* used where it lies */
        u->next_at = u->then_at = UINT64_MAX;
        for (uint32_t c = 0; c < from->chunk_count; c += per_group) {
            sim_group *g = &s->groups[s->group_count++];
            *g = (sim_group){.chunk_first = from->chunk_first + c,
                             .chunk_count = from->chunk_count - c < per_group ? from->chunk_count - c : per_group,
                             .unit_idx = i,
                             .slot = NO_SLOT};
            for (uint32_t k = 0; k < g->chunk_count; k++)
                g->on_nvme |= l->chunks[g->chunk_first + k].weight_tier == SPW_TIER_NVME;
        }
        u->group_count = s->group_count - u->group_first;
    }
}

/* Twice over a pass's uses, backwards: what comes next of the last ones is in the next pass. */
static void
number_uses(sim *s)
{
    s->step_uses = (uint64_t)s->in->use_count * s->in->passes;
    for (uint64_t at = 2 * (uint64_t)s->in->use_count; at-- > 0;) {
        sim_unit *u = &s->units[unit_used(s, at)];
        s->until_again[in_pass(s, at)] = (uint32_t)(u->next_at - at);
        u->then_at = u->next_at;
        u->next_at = at;
    }
}

static void
clear(rehearsal *r, uint32_t chunk_count)
{
    uint32_t *reads = r->chunk_reads;
    if (reads != NULL)
        memset(reads, 0, chunk_count * sizeof *reads);
    *r = (rehearsal){.chunk_reads = reads};
}

static bool
same_bytes(const rehearsal *a, const rehearsal *b)
{
    return a->h2d == b->h2d && memcmp(a->path_read, b->path_read, sizeof a->path_read) == 0;
}

static spw_status
rehearse_plainly(const rehearsal_input *in, rehearsal *out, spw_error *err)
{
    const spw_layout *l = in->layout;
    sim s = {.in = in, .out = out, .first_step = true};
    rehearsal last;
    spw_status st = SPW_OK;
    uint32_t per_group = 1;
    while ((uint64_t)(l->chunk_count / per_group) * (in->weight_slots / per_group) > SCAN_MAX &&
           in->weight_slots < l->chunk_count)
        per_group *= 2;
    s.slot_count = in->weight_slots / per_group > 0 ? in->weight_slots / per_group : 1;
    s.units = spw_mem_calloc(l->unit_count + 1, sizeof *s.units);
    s.groups = spw_mem_calloc((uint64_t)l->chunk_count + 1, sizeof *s.groups);
    s.slot_owner = spw_mem_calloc(s.slot_count, sizeof *s.slot_owner);
    s.slot_free = spw_mem_calloc(s.slot_count, sizeof *s.slot_free);
    s.until_again = spw_mem_calloc((uint64_t)in->use_count + 1, sizeof *s.until_again);
    if (s.units && s.groups && s.slot_owner && s.slot_free && s.until_again &&
        spw_gaps_init(&s.room, in->cache_bytes, l->unit_count, err) == SPW_OK) {
        make_groups(&s, per_group);
        number_uses(&s);
        for (uint32_t i = 0; i < s.slot_count; i++) {
            s.slot_owner[i] = NO_SLOT;
            s.slot_free[s.slot_free_count++] = (int32_t)i;
        }
        for (int i = 0; i < STEPS_MAX && (i < STEPS_MIN || !same_bytes(out, &last)); i++) {
            last = *out;
            clear(out, l->chunk_count);
            step(&s);
        }
    } else {
        st = SPW_RAISE(err, SPW_ENOMEM, "rehearsal of %u chunks", l->chunk_count);
    }
    spw_mem_free(s.units);
    spw_mem_free(s.groups);
    spw_mem_free(s.slot_owner);
    spw_mem_free(s.slot_free);
    spw_gaps_deinit(&s.room);
    spw_mem_free(s.until_again);
    return st;
}

/* ---------------------------------------------------------------- random inputs */

enum { UNITS_MAX = 40, CHUNKS_MAX = 4000, USES_MAX = 2000, BLOCKS_MAX = 12 };

typedef struct draw {
    uint64_t seed, count;
} draw;

static uint32_t
below(draw *d, uint32_t n)
{
    uint32_t r[4];
    spw_philox(d->seed, 0, d->count++, r);
    return r[0] % n;
}

typedef struct example {
    spw_layout layout;
    spw_store_unit units[UNITS_MAX];
    spw_store_chunk chunks[CHUNKS_MAX];
    plan_use uses[USES_MAX];
    rehearsal_input in;
} example;

static void
draw_layout(example *x, draw *d, uint32_t chunks_each)
{
    const uint32_t tiers = below(d, 3); /* nvme alone, with host memory, with the device */
    x->layout = (spw_layout){.units = x->units, .chunks = x->chunks, .parts = 1};
    x->layout.unit_count = 2 + below(d, UNITS_MAX - 1);
    for (uint32_t i = 0; i < x->layout.unit_count; i++) {
        spw_store_unit *u = &x->units[i];
        const bool there = tiers == 2 && below(d, 4) == 0;
        *u = (spw_store_unit){.chunk_first = x->layout.chunk_count, .trainable = below(d, 4) > 0};
        u->form = !u->trainable && below(d, 2) == 0 ? SPW_QUANT_INT4 : SPW_QUANT_NONE;
        u->spills = u->trainable && below(d, 3) == 0;
        u->chunk_count = 1 + below(d, chunks_each);
        for (uint32_t k = 0; k < u->chunk_count; k++) {
            x->chunks[x->layout.chunk_count++] =
                (spw_store_chunk){.unit_idx = i,
                                  .elems = 4096 * (k + 1 < u->chunk_count ? 4 : 1 + below(d, 4)),
                                  .weight_tier = there                           ? SPW_TIER_DEVICE
                                                 : tiers == 0 || below(d, 3) > 0 ? SPW_TIER_NVME
                                                                                 : SPW_TIER_HOST,
                                  .path_idx = below(d, 2)};
            u->elems += x->chunks[x->layout.chunk_count - 1].elems;
        }
        x->layout.elems += u->elems;
    }
}

/* Uses of a block, in turns or all at once; some of it may be held over all its turns. Returns its bytes. */
static uint64_t
draw_block(example *x, draw *d, uint32_t first, uint32_t count, uint32_t *n)
{
    const uint32_t held = below(d, 2) == 0 ? below(d, count) : 0, turns = held > 0 ? 1 + below(d, 2) : 1;
    const uint32_t begin = *n, all = held + turns * (count - held);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < held; i++)
        x->uses[(*n)++] = (plan_use){first + i, begin + held, begin + all, below(d, 8) == 0};
    for (uint32_t t = 0; t < turns; t++) {
        const uint32_t end = *n + count - held;
        for (uint32_t i = held; i < count; i++)
            x->uses[(*n)++] = (plan_use){first + i, end, end, false};
    }
    for (uint32_t i = 0; i < count; i++)
        bytes += x->units[first + i].elems * x->in.compute_bytes;
    return bytes;
}

static void
draw_example(example *x, draw *d, uint32_t chunks_each)
{
    uint32_t first[BLOCKS_MAX], count[BLOCKS_MAX], blocks = 0, n = 0;
    uint64_t largest = 0, all = 0;
    memset(x, 0, sizeof *x);
    draw_layout(x, d, chunks_each);
    x->in.compute_bytes = 2;
    for (uint32_t u = 0; u < x->layout.unit_count && blocks < BLOCKS_MAX; blocks++) {
        count[blocks] = 1 + below(d, 6);
        first[blocks] = blocks > 0 && below(d, 8) == 0 ? 0 : u; /* or what the first one has, too */
        if (first[blocks] + count[blocks] > x->layout.unit_count)
            count[blocks] = x->layout.unit_count - first[blocks];
        u += first[blocks] == u ? count[blocks] : 0;
    }
    for (uint32_t b = 0; b + 1 < blocks; b++) {
        const uint64_t bytes = draw_block(x, d, first[b], count[b], &n);
        largest = bytes > largest ? bytes : largest;
    }
    x->in.forward_count = n;
    for (uint32_t b = blocks; b-- > 0;) {
        const uint64_t bytes = draw_block(x, d, first[b], count[b], &n);
        largest = bytes > largest ? bytes : largest;
    }
    for (uint32_t u = 0; u < x->layout.unit_count; u++)
        all += x->units[u].elems * x->in.compute_bytes;
    x->in = (rehearsal_input){.layout = &x->layout,
                              .uses = x->uses,
                              .use_count = n,
                              .forward_count = x->in.forward_count,
                              .passes = 1 + below(d, 5),
                              .future_max = below(d, 4) == 0 ? below(d, n) : 4 * x->layout.unit_count + 64,
                              .weight_slots = 1 + below(d, below(d, 2) == 0 ? 4 : x->layout.chunk_count),
                              .weight_bytes = 2,
                              .compute_bytes = 2,
                              .direct = below(d, 2) == 0,
                              .cache_bytes = largest * (2 + below(d, 3)) / 2 + below(d, (uint32_t)all),
                              .prefetch_elems = below(d, (uint32_t)x->layout.elems * 2),
                              .update_reads_weights = below(d, 2) == 0,
                              .prefetch = below(d, 6) > 0,
                              .early_gate = below(d, 2) == 0,
                              .grad_windows = 1 + below(d, 2),
                              .gathers_again = below(d, 4) == 0,
                              .backward = 2 + below(d, 2)};
}

static uint32_t
runs(void)
{
    const char *asked = getenv("SPW_RUNS");
    return asked != NULL ? (uint32_t)strtoul(asked, NULL, 10) : 1500;
}

static void
compare(const example *x, uint64_t seed)
{
    static uint32_t reads[CHUNKS_MAX], plain_reads[CHUNKS_MAX];
    rehearsal r = {.chunk_reads = reads}, plain = {.chunk_reads = plain_reads};
    spw_error err = {0};
    assert_int_equal(spw__rehearse(&x->in, &r, &err), SPW_OK);
    assert_int_equal(rehearse_plainly(&x->in, &plain, &err), SPW_OK);
    if (same_bytes(&r, &plain) && memcmp(reads, plain_reads, x->layout.chunk_count * sizeof *reads) == 0)
        return;
    print_message("SPW_SEED=%llu: %llu bytes copied, %llu plainly; %llu and %llu bytes read\n",
                  (unsigned long long)seed, (unsigned long long)r.h2d, (unsigned long long)plain.h2d,
                  (unsigned long long)(r.path_read[0] + r.path_read[1]),
                  (unsigned long long)(plain.path_read[0] + plain.path_read[1]));
    fail();
}

/* And where no update had to wait for time, more of it moves nothing else. */
static void
test_random(void **state)
{
    static example x;
    uint32_t never = 0;
    const char *asked = getenv("SPW_SEED");
    const uint64_t from = asked != NULL ? strtoull(asked, NULL, 10) : 1;
    (void)state;
    for (uint64_t seed = from; seed < from + (asked != NULL ? 1 : runs()); seed++) {
        draw d = {.seed = seed};
        draw_example(&x, &d, 1 + below(&d, 12));
        rehearsal last = {.waits = true};
        for (int k = 0; k < SPW_PACE_COUNT; k += 2) {
            rehearsal now = {.waits = last.waits};
            x.in.pace = spw_paces[k];
            compare(&x, seed);
            assert_int_equal(spw__rehearse(&x.in, &now, NULL), SPW_OK);
            assert_true(last.waits || (same_bytes(&now, &last) && !now.waits));
            never += k > 0 && !last.waits;
            last = now;
        }
    }
    assert_true(asked != NULL || never > runs() / 10);
}

/* Chunks and slots so many that both are taken in groups. */
static void
test_groups(void **state)
{
    static example x;
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        draw d = {.seed = seed};
        do
            draw_example(&x, &d, CHUNKS_MAX / UNITS_MAX);
        while (x.layout.chunk_count < 1000);
        x.in.weight_slots = x.layout.chunk_count - 1 - below(&d, 300);
        while ((uint64_t)x.in.weight_slots * x.layout.chunk_count <= SCAN_MAX &&
               x.in.weight_slots + 1 < x.layout.chunk_count)
            x.in.weight_slots++;
        x.in.pace = 4;
        compare(&x, seed);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
