/*
 * The rehearsal: training steps of the store on paper, until one moves what the one before it moved, to know the bytes of
 * each. It follows the mover's rules (offload/slots.c, fills.c, updates.c: what is fetched ahead, which copy is evicted, in
 * which order updates run) over the recorded uses, with transfers that take no time. What it counts: a unit is copied to the
 * device once per generation and again after each eviction; the weights of a chunk on nvme are read when a copy or an update
 * needs them and no slot holds them. That they are written once, and records read and written once, needs no rehearsal.
 *
 * Time enters in one place: how far updates run ahead of the next forward pass, for they evict what that pass needs.
 * `pace` says how many times over the store could update everything while a step computes; at 0 each update waits until
 * it is needed.
 *
 * A step of a large mixture copies tens of millions of chunks. So chunks are not looked at one by one: those of a unit that lie alike are copied
 * at once, what they take is known beforehand or counted behind the step, and the unit that leaves the device next is kept at hand. What that
 * moves is what one by one would (tests/test_rehearsal.c). Pure; called by the planner.
 */
#include "runtime_internal.h"

enum { NO_SLOT = -1, STEPS_MIN = 3, STEPS_MAX = 8 }; /* where experts take turns it may take so many */
enum { PASSES_MAX = 24 };                            /* rehearsed */
static const uint64_t SCAN_MAX =
    1u << 22; /* chunks times slots looked at in a step; above it, both are taken in groups */

typedef enum place_state { AWAY, FILLING, THERE } place_state;

/* Where a unit stands among those that may leave the device: by its next use, if that is known, or else in a row. */
static const uint64_t NOT_IDLE = UINT64_MAX, IDLE_UNKNOWN = UINT64_MAX - 1;

typedef struct sim_unit {
    uint32_t group_first, group_count;
    uint64_t device_offset, device_bytes, generation, device_generation, wanted;
    place_state place;
    bool pinned, updating, grad_ready, kept;
    uint64_t kept_generation;
    uint32_t fill_next, job_next;
    uint64_t next_at, then_at; /* the first of its uses that are still to come, and the second */
    uint64_t last_use;         /* the let_go count */
    uint64_t idle_at;
    uint32_t idle_before, idle_behind; /* in the row */
    uint32_t slot_first;               /* of those that have a group of it; UINT32_MAX: none */
} sim_unit;

/* What a slot holds: a group of a unit's chunks. */
typedef struct sim_slot {
    uint32_t unit_idx, k, next; /* next: the unit's next one */
} sim_slot;

typedef struct sim {
    const rehearsal_input *in;
    rehearsal *out;
    sim_unit *units;
    /* A unit's chunks in a row, per_group and what is left; one by one but where there are very many. */
    uint32_t per_group, group_count;
    uint64_t *copied_before; /* (group_count + 1) bytes that copies of all groups before it take */
    spw_set away; /* groups that are read before they are copied: some of it is on nvme, and no slot has it */
    uint32_t *
        reads; /* (chunk_count + 1) of a chunk's weights if they are on nvme, less those of the chunk before it; in this step */
    sim_slot *slots;
    uint32_t slot_count, slot_free_count, rank_leaves;
    uint64_t *
        slot_ranks; /* (2 x rank_leaves) a tree: of each slot how late it is needed, 0: it is free; above two of them the later */
    spw_gaps room; /* of the device */
    /*
     * Units that may leave the device: next uses that are known, of which the highest leaves, unless there are others. Those are in a row by
     * their last use, and then by where they lie.
     */
    spw_set idle;
    uint32_t idle_first, idle_last; /* UINT32_MAX: none */
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

/* Something of the unit changed that decides what its uses need. */
static void
unsettle(sim *s, const sim_unit *u)
{
    s->settled = u->next_at < s->settled ? u->next_at : s->settled;
}

/* ---------------------------------------------------------------- counting */

static uint32_t
group_end(const sim *s, const sim_unit *u, uint32_t k)
{
    const spw_store_unit *of = &s->in->layout->units[u - s->units];
    const uint64_t end = (uint64_t)k * s->per_group;
    return of->chunk_first + (end < of->chunk_count ? (uint32_t)end : of->chunk_count);
}

/* Those of a unit's groups from `first` on that are on nvme. */
static void
count_reads(sim *s, const sim_unit *u, uint32_t first, uint32_t end)
{
    s->reads[group_end(s, u, first)]++;
    s->reads[group_end(s, u, end)]--;
}

static void
count_copies(sim *s, const sim_unit *u, uint32_t first, uint32_t end)
{
    s->out->h2d += s->copied_before[u->group_first + end] - s->copied_before[u->group_first + first];
}

/* What the step has read. */
static void
sum_reads(sim *s)
{
    const spw_layout *l = s->in->layout;
    uint32_t times = 0;
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        const spw_store_chunk *c = &l->chunks[i];
        const bool there = c->weight_tier == SPW_TIER_NVME;
        times += s->reads[i];
        if (s->out->chunk_reads != NULL)
            s->out->chunk_reads[i] = there ? times : 0;
        if (there && times > 0)
            s->out->path_read[c->path_idx] += times * spw__layout_weight_bytes(l, c, s->in->weight_bytes);
    }
    memset(s->reads, 0, ((uint64_t)l->chunk_count + 1) * sizeof *s->reads);
}

/* ---------------------------------------------------------------- slots */

/* It has been on the device at this generation: ranks have kept it, and the store has nothing to do with the next time. */
static bool
again(const sim *s, const sim_unit *u, uint64_t generation)
{
    return s->in->gathers_again && u->kept && u->kept_generation == generation;
}

/* What is about to be updated is needed before what is about to be copied, and that before what is on the device. */
static bool
updates_soon(const sim *s, const sim_unit *u, uint32_t k)
{
    return u->updating && u->grad_ready && s->gate_open && k >= u->job_next;
}

static bool
is_copied(const sim_unit *u, uint32_t k)
{
    return u->place == THERE || (u->place == FILLING && k < u->fill_next);
}

/* When a group is needed; of one that is not copied yet and comes again without the store, the time after that. */
static uint64_t
needed_at(const sim *s, const sim_unit *u, uint32_t k)
{
    return is_copied(u, k) || again(s, u, u->wanted) ? u->then_at : u->next_at;
}

/* How far away that is. None is farther than what is on the device and not known to be used again. */
static uint64_t
distance(const sim *s, const sim_unit *u, uint32_t k)
{
    return updates_soon(s, u, k) ? 0 : (is_copied(u, k) ? 1ull << 32 : 0) + uses_until(s, needed_at(s, u, k));
}

/* The same in numbers that stay as time goes by: in the order of distances. */
static uint64_t
rank_of(const sim *s, const sim_unit *u, uint32_t k)
{
    const uint64_t at = needed_at(s, u, k), most = 1ull << 40;
    return updates_soon(s, u, k) ? 1 : (is_copied(u, k) ? 2 * most : 0) + (at < s->future_end ? at + 2 : most);
}

static void
rank_slot(sim *s, uint32_t slot)
{
    const sim_slot *x = &s->slots[slot];
    const uint64_t rank = rank_of(s, &s->units[x->unit_idx], x->k);
    uint32_t i = s->rank_leaves + slot;
    if (s->slot_ranks[i] == rank)
        return;
    s->slot_ranks[i] = rank;
    for (i /= 2; i > 0; i /= 2) {
        const uint64_t one = s->slot_ranks[2 * i], other = s->slot_ranks[2 * i + 1], later = one > other ? one : other;
        if (s->slot_ranks[i] == later)
            return;
        s->slot_ranks[i] = later;
    }
}

/* Something of the unit changed that decides when its groups are needed. */
static void
rank_slots(sim *s, const sim_unit *u)
{
    for (uint32_t i = u->slot_first; i != UINT32_MAX; i = s->slots[i].next)
        rank_slot(s, i);
}

/* Or for all units. */
static void
rank_all_slots(sim *s)
{
    for (uint32_t i = s->slot_free_count; i < s->slot_count; i++)
        rank_slot(s, i);
}

/* The slot whose group is needed last, the first of such. */
static uint32_t
latest_slot(const sim *s)
{
    uint32_t i = 1;
    while (i < s->rank_leaves)
        i = 2 * i + (s->slot_ranks[2 * i] < s->slot_ranks[i]);
    return i - s->rank_leaves;
}

/* The group in it is away from now on. */
static void
empty_slot(sim *s, uint32_t slot)
{
    sim_unit *u = &s->units[s->slots[slot].unit_idx];
    uint32_t *link = &u->slot_first;
    while (*link != slot)
        link = &s->slots[*link].next;
    *link = s->slots[slot].next;
    spw_set_add(&s->away, u->group_first + s->slots[slot].k);
}

/* Gives a group that is away a slot: *slot_out, and in *held_out how far what it held is; UINT64_MAX: it was free. */
static bool
take_slot(sim *s, sim_unit *u, uint32_t k, uint64_t nearer_than, uint32_t *slot_out, uint64_t *held_out)
{
    uint32_t slot;
    *held_out = UINT64_MAX;
    if (s->slot_free_count > 0) {
        slot = --s->slot_free_count;
    } else {
        slot = latest_slot(s);
        *held_out = distance(s, &s->units[s->slots[slot].unit_idx], s->slots[slot].k);
        slot = *held_out > 0 ? slot : 0; /* all are needed now, for whatever it is: the first of them */
        if (*held_out + 1 <= nearer_than)
            return false;
        empty_slot(s, slot);
    }
    s->slots[slot] = (sim_slot){(uint32_t)(u - s->units), k, u->slot_first};
    u->slot_first = slot;
    spw_set_remove(&s->away, u->group_first + k);
    rank_slot(s, slot);
    *slot_out = slot;
    return true;
}

/* The first of a unit's groups from k on that has a slot; `end`: none. */
static uint32_t
next_in_slot(const sim *s, const sim_unit *u, uint32_t k, uint32_t end)
{
    for (uint32_t i = u->slot_first; i != UINT32_MAX; i = s->slots[i].next) {
        if (s->slots[i].k >= k && s->slots[i].k < end)
            end = s->slots[i].k;
    }
    return end;
}

/* ---------------------------------------------------------------- who leaves the device */

static void
leave_row(sim *s, sim_unit *u)
{
    *(u->idle_before == UINT32_MAX ? &s->idle_first : &s->units[u->idle_before].idle_behind) = u->idle_behind;
    *(u->idle_behind == UINT32_MAX ? &s->idle_last : &s->units[u->idle_behind].idle_before) = u->idle_before;
}

/* Nearly always behind all others. */
static void
join_row(sim *s, sim_unit *u)
{
    uint32_t before = s->idle_last, own = (uint32_t)(u - s->units);
    while (before != UINT32_MAX &&
           (s->units[before].last_use > u->last_use ||
            (s->units[before].last_use == u->last_use && s->units[before].device_offset > u->device_offset)))
        before = s->units[before].idle_before;
    u->idle_before = before;
    u->idle_behind = before == UINT32_MAX ? s->idle_first : s->units[before].idle_behind;
    *(before == UINT32_MAX ? &s->idle_first : &s->units[before].idle_behind) = own;
    *(u->idle_behind == UINT32_MAX ? &s->idle_last : &s->units[u->idle_behind].idle_before) = own;
}

static void
set_idle(sim *s, sim_unit *u, uint64_t at)
{
    if (u->idle_at == IDLE_UNKNOWN)
        leave_row(s, u);
    else if (u->idle_at != NOT_IDLE)
        spw_set_remove(&s->idle, u->idle_at);
    u->idle_at = at;
    if (at == IDLE_UNKNOWN)
        join_row(s, u);
    else if (at != NOT_IDLE)
        spw_set_add(&s->idle, at);
}

/* Something changed that decides whether it may leave, and when. */
static void
note_idle(sim *s, sim_unit *u)
{
    const bool known = u->next_at < s->future_end;
    const bool idle = u->device_bytes > 0 && (u->place == THERE ? !u->pinned : u->place == FILLING && !known);
    const uint64_t at = !idle ? NOT_IDLE : known ? u->next_at : IDLE_UNKNOWN;
    if (at != u->idle_at)
        set_idle(s, u, at);
}

/* The one that is used last, or not as far as is known, and of these longest ago. NULL: there is none. */
static sim_unit *
farthest_idle(const sim *s)
{
    uint64_t at;
    if (s->idle_first != UINT32_MAX)
        return &s->units[s->idle_first];
    at = spw_set_last(&s->idle, UINT64_MAX);
    return at != UINT64_MAX ? &s->units[unit_used(s, at)] : NULL;
}

/* ---------------------------------------------------------------- time goes on */

/* Nothing is known in the first step, nor without prefetch. */
static void
look_ahead(sim *s)
{
    const rehearsal_input *in = s->in;
    const uint64_t known = s->future_end;
    uint64_t end = s->position + in->future_max;
    if (!in->prefetch || s->first_step)
        end = s->position;
    s->future_end = end < 2 * s->step_uses ? end : 2 * s->step_uses;
    for (uint64_t at = known; at < s->future_end; at++) {
        note_idle(s, &s->units[unit_used(s, at)]);
        rank_slots(s, &s->units[unit_used(s, at)]);
    }
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
    note_idle(s, &s->units[u]);
    rank_slots(s, &s->units[u]);
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
        set_idle(s, &s->units[u], NOT_IDLE);
        s->units[u].next_at -= s->units[u].next_at < UINT64_MAX ? s->step_uses : 0;
        s->units[u].then_at -= s->units[u].then_at < UINT64_MAX ? s->step_uses : 0;
    }
    s->fetch_end = s->fetch_elems = s->settled = 0;
    look_ahead(s);
    for (uint32_t u = 0; u < s->in->layout->unit_count; u++)
        note_idle(s, &s->units[u]);
    rank_all_slots(s);
}

/* ---------------------------------------------------------------- the device */

static void
leave_device(sim *s, sim_unit *u)
{
    u->place = AWAY;
    unsettle(s, u);
    note_idle(s, u);
    rank_slots(s, u);
    if (u->device_bytes > 0)
        spw_gaps_give_back(&s->room, u->device_offset, u->device_bytes);
}

static bool
make_room(sim *s, sim_unit *u, uint64_t nearer_than)
{
    if (u->device_bytes == 0)
        return true; /* used where it lies */
    while (!spw_gaps_take(&s->room, u->device_bytes, &u->device_offset)) {
        sim_unit *victim = farthest_idle(s);
        if (victim == NULL || (uint64_t)next_use(s, victim) + 1 <= nearer_than)
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
    note_idle(s, u);
    return true;
}

/*
 * Copies a unit's groups up to `end`, of one generation. One that is away takes the slot that is needed last, and once that was one of this
 * unit's own, which have been copied, all others do, up to the next that has one: they go through it one by one, and the last stays. False: no
 * slot.
 */
static bool
copy_groups(sim *s, sim_unit *u, uint32_t end, uint64_t nearer_than)
{
    while (u->fill_next < end) {
        const uint64_t found = spw_set_next(&s->away, u->group_first + u->fill_next) - u->group_first;
        const uint32_t away = found < end ? (uint32_t)found : end;
        uint32_t slot, stop;
        uint64_t held, last;
        count_copies(s, u, u->fill_next, away);
        u->fill_next = away;
        rank_slots(s, u);
        if (away == end)
            break;
        if (!take_slot(s, u, away, nearer_than, &slot, &held))
            return false;
        count_reads(s, u, away, away + 1);
        count_copies(s, u, away, away + 1);
        u->fill_next++;
        rank_slot(s, slot);
        if (distance(s, u, away) != held)
            continue;
        stop = next_in_slot(s, u, u->fill_next, end);
        last = spw_set_last(&s->away, u->group_first + stop);
        if (last != UINT64_MAX && last >= u->group_first + u->fill_next) {
            count_reads(s, u, u->fill_next, stop);
            spw_set_add(&s->away, u->group_first + away);
            spw_set_remove(&s->away, last);
            s->slots[slot].k = (uint32_t)last - u->group_first;
        }
        count_copies(s, u, u->fill_next, stop);
        u->fill_next = stop; /* of the same distance */
    }
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
    while (u->fill_next < u->group_count) { /* those that have been updated come first */
        const bool updated = u->updating && u->fill_next < u->job_next;
        if (u->generation + updated != u->device_generation)
            return true;
        if (!copy_groups(s, u, updated ? u->job_next : u->group_count, nearer_than))
            return false;
    }
    u->place = THERE;
    u->kept = true;
    u->kept_generation = u->device_generation;
    note_idle(s, u);
    rank_slots(s, u);
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
    const uint32_t k = u->job_next, end = group_end(s, u, k + 1);
    uint32_t slot;
    uint64_t held;
    if ((u->place == THERE && !u->pinned) || (u->place == FILLING && u->device_generation <= u->generation))
        leave_device(s, u);
    if (spw_set_has(&s->away, u->group_first + k) && take_slot(s, u, k, 0, &slot, &held) && s->in->update_reads_weights)
        count_reads(s, u, k, k + 1);
    for (uint32_t i = group_end(s, u, k); i < end; i++)
        s->credit -= (double)s->in->layout->chunks[i].elems;
    unsettle(s, u);
    if (++u->job_next == u->group_count) {
        u->generation++;
        u->updating = false;
        s->ready_count--;
    }
    rank_slots(s, u);
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
    if (s->in->grad_windows == 0 || !s->in->early_gate || !s->gate_open)
        return;
    for (uint32_t i = s->ready_from; i < l->unit_count && s->ready_count > s->in->grad_windows; i++) {
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
    s->out->waits = s->out->waits || (s->gate_open && s->ready_count > 0);
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
    }
    s->ready_count = s->ready_from = 0;
    s->settled = 0;
    s->gate_open = s->in->early_gate;
    rank_all_slots(s);
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
        set_idle(s, u, NOT_IDLE);
        u->pinned = false;
        u->last_use = ++s->let_go_count;
        note_idle(s, u);
        if (makes_gradients && !in->uses[i].ends_later && !u->grad_ready &&
            i + s->until_again[i] >= in->use_count) { /* the last time in the step */
            u->grad_ready = true;
            s->ready_count += u->updating;
            s->ready_from = in->uses[i].unit_idx < s->ready_from ? in->uses[i].unit_idx : s->ready_from;
            rank_slots(s, u);
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
make_groups(sim *s)
{
    const spw_layout *l = s->in->layout;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < l->unit_count; i++) {
        const spw_store_unit *from = &l->units[i];
        sim_unit *u = &s->units[i];
        u->group_first = s->group_count;
        u->group_count = from->chunk_count / s->per_group + (from->chunk_count % s->per_group > 0);
        u->device_bytes = from->elems * s->in->compute_bytes;
        if (s->in->direct && from->chunk_count > 0 && l->chunks[from->chunk_first].weight_tier == SPW_TIER_DEVICE &&
            from->form == SPW_QUANT_NONE)
            u->device_bytes = 0; /* used where it lies */
        u->next_at = u->then_at = UINT64_MAX;
        u->idle_at = NOT_IDLE;
        u->slot_first = UINT32_MAX;
        for (uint32_t k = 0; k < u->group_count; k++, s->group_count++) {
            s->copied_before[s->group_count] = bytes;
            for (uint32_t c = group_end(s, u, k); c < group_end(s, u, k + 1); c++) {
                const spw_tier tier = l->chunks[c].weight_tier;
                bytes += tier == SPW_TIER_DEVICE ? 0 : spw__layout_weight_bytes(l, &l->chunks[c], s->in->weight_bytes);
                if (tier == SPW_TIER_NVME)
                    spw_set_add(&s->away, s->group_count);
            }
        }
    }
    s->copied_before[s->group_count] = bytes;
}

/* Twice over a pass's uses, backwards: what comes next of the last ones is in the next pass. */
static void
number_uses(sim *s)
{
    for (uint64_t at = 2 * (uint64_t)s->in->use_count; at-- > 0;) {
        sim_unit *u = &s->units[unit_used(s, at)];
        s->until_again[in_pass(s, at)] = (uint32_t)(u->next_at - at);
        u->then_at = u->next_at;
        u->next_at = at;
    }
}

static bool
same_bytes(const rehearsal *a, const rehearsal *b)
{
    return a->h2d == b->h2d && memcmp(a->path_read, b->path_read, sizeof a->path_read) == 0;
}

/* What a rehearsal takes. */
static spw_status
begin(sim *s, spw_error *err)
{
    const rehearsal_input *in = s->in;
    const uint64_t chunks = in->layout->chunk_count;
    for (s->rank_leaves = 1; s->rank_leaves < s->slot_count;)
        s->rank_leaves *= 2;
    s->slots = spw_mem_calloc(s->slot_count, sizeof *s->slots);
    s->slot_ranks = spw_mem_calloc(2 * (uint64_t)s->rank_leaves, sizeof *s->slot_ranks);
    s->units = spw_mem_calloc((uint64_t)in->layout->unit_count + 1, sizeof *s->units);
    s->reads = spw_mem_calloc(chunks + 1, sizeof *s->reads);
    s->copied_before = spw_mem_calloc(chunks + 1, sizeof *s->copied_before);
    s->until_again = spw_mem_calloc((uint64_t)in->use_count + 1, sizeof *s->until_again);
    if (!s->slots || !s->slot_ranks || !s->units || !s->reads || !s->copied_before || !s->until_again)
        return SPW_RAISE(err, SPW_ENOMEM, "rehearsal of %u chunks", in->layout->chunk_count);
    SPW_TRY(spw_set_init(&s->away, chunks, err));
    SPW_TRY(spw_set_init(&s->idle, 2 * s->step_uses, err));
    return spw_gaps_init(&s->room, in->cache_bytes, in->layout->unit_count, err);
}

static void
end(sim *s)
{
    spw_mem_free(s->slots);
    spw_mem_free(s->slot_ranks);
    spw_mem_free(s->units);
    spw_mem_free(s->reads);
    spw_mem_free(s->copied_before);
    spw_mem_free(s->until_again);
    spw_set_deinit(&s->away);
    spw_set_deinit(&s->idle);
    spw_gaps_deinit(&s->room);
}

static spw_status
rehearse(const rehearsal_input *in, rehearsal *out, spw_error *err)
{
    const spw_layout *l = in->layout;
    sim s = {.in = in,
             .out = out,
             .per_group = 1,
             .idle_first = UINT32_MAX,
             .idle_last = UINT32_MAX,
             .step_uses = (uint64_t)in->use_count * in->passes,
             .first_step = true};
    rehearsal last;
    spw_status st;
    while ((uint64_t)(l->chunk_count / s.per_group) * (in->weight_slots / s.per_group) > SCAN_MAX &&
           in->weight_slots < l->chunk_count)
        s.per_group *= 2;
    s.slot_count = in->weight_slots / s.per_group > 0 ? in->weight_slots / s.per_group : 1;
    s.slot_free_count = s.slot_count;
    st = begin(&s, err);
    if (st == SPW_OK) {
        make_groups(&s);
        number_uses(&s);
        out->waits = false;
        for (int i = 0; i < STEPS_MAX && (i < STEPS_MIN || !same_bytes(out, &last)); i++) {
            last = *out;
            *out = (rehearsal){.chunk_reads = out->chunk_reads, .waits = out->waits};
            step(&s);
            sum_reads(&s);
        }
    }
    end(&s);
    return st;
}

/* Of PASSES_MAX passes, which come to few, and more: half of them come to fewer. */
static uint64_t
with_more(uint64_t few, uint64_t fewer, uint64_t more)
{
    return few + (few > fewer ? (few - fewer) * more / (PASSES_MAX / 2) : 0);
}

/* Passes between the first and the last ones move the same, one by one or a few together: of very many, a few are rehearsed. */
spw_status
spw__rehearse(const rehearsal_input *in, rehearsal *out, spw_error *err)
{
    const uint32_t chunks = in->layout->chunk_count, more = in->passes > PASSES_MAX ? in->passes - PASSES_MAX : 0;
    rehearsal_input few = *in;
    rehearsal fewer = {0};
    few.passes = in->passes - more;
    few.pace = in->pace * few.passes / in->passes;
    SPW_TRY(rehearse(&few, out, err));
    if (more == 0)
        return SPW_OK;
    few.passes = PASSES_MAX / 2;
    few.pace = in->pace * few.passes / in->passes;
    if (out->chunk_reads != NULL && (fewer.chunk_reads = spw_mem_calloc(chunks, sizeof *fewer.chunk_reads)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "rehearsal of %u chunks", chunks);
    spw_status st = rehearse(&few, &fewer, err);
    for (uint32_t i = 0; i < SPW_PATHS_MAX; i++)
        out->path_read[i] = with_more(out->path_read[i], fewer.path_read[i], more);
    out->h2d = with_more(out->h2d, fewer.h2d, more);
    out->waits = out->waits || fewer.waits;
    for (uint32_t i = 0; i < chunks && out->chunk_reads != NULL; i++)
        out->chunk_reads[i] = (uint32_t)with_more(out->chunk_reads[i], fewer.chunk_reads[i], more);
    spw_mem_free(fewer.chunk_reads);
    return st;
}
