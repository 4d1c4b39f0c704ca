/*
 * Fills: which units get a place in the device's cache and at whose cost, and the copies that bring their weights there,
 * chunk by chunk, through slots where they come from nvme. A fill starts only at a generation that exists or whose update
 * has been released. Called by the mover, and by whoever tells the future, lock held; copies end on the h2d queue's thread.
 */
#include "offload_internal.h"

/* Of units in the device's cache: being filled, or there and nobody's. */
enum { FILLS, IDLE };

void
spw__store_note(spw_store *s, unit *u)
{
    const uint32_t unit_idx = (uint32_t)(u - s->units);
    spw__future_mark(&s->future, unit_idx, FILLS, u->d == D_FILLING);
    spw__future_mark(&s->future, unit_idx, IDLE, u->d == D_READY && u->pins == 0 && !u->wanted && !u->direct);
    if (u->op != OP_NONE)
        spw__store_note_op(s, u);
}

static spw_store_use
use_at(const spw_store *s, uint64_t place)
{
    const future_use *use = spw__future_at(&s->future, place);
    return (spw_store_use){use->unit_idx, use->generation};
}

static unit *
unit_at(spw_store *s, uint64_t place)
{
    return &s->units[spw__future_at(&s->future, place)->unit_idx];
}

/* How near a use is, as distances say it (slots.c): what is needed later than that may make room for it. */
static uint64_t
nearness(const spw_store *s, uint64_t place)
{
    return place - s->future.front + 1;
}

void
spw__store_drop_device(spw_store *s, unit *u)
{
    const uint64_t first = s->future.units[u - s->units].first;
    SPW_ASSERT(u->pins == 0 && u->copies_inflight == 0);
    if (s->cfg.chaos_seed != 0 && !s->apart)
        memset(s->device_cache + u->device_offset, 0xff, u->device_bytes);
    u->d = D_NONE;
    u->abort_fill = false;
    s->future.settled = first < s->future.settled ? first : s->future.settled;
    spw__store_note(s, u);
    if (u->direct)
        return;
    spw_gaps_give_back(&s->room, u->device_offset, u->device_bytes);
    spw_set_remove(&s->resident, (uint64_t)(u - s->units));
}

void
spw__store_abort_fill(spw_store *s, unit *u)
{
    u->abort_fill = true;
    if (u->copies_inflight == 0)
        spw__store_drop_device(s, u);
}

static void
copy_done(void *arg, const char *name, uint64_t unit_idx, uint64_t begin_ns, uint64_t end_ns)
{
    chunk *c = arg;
    spw_store *s = c->store;
    unit *u = &s->units[c->plan.unit_idx];
    spw__store_chaos_delay(s, c->idx);
    pthread_mutex_lock(&s->lock);
    c->pins--;
    u->copies_inflight--;
    s->copies_inflight--;
    s->ended++;
    u->copied_count++;
    spw_timeline_add(SPW_LANE_H2D, name, unit_idx, begin_ns, end_ns);
    if (u->abort_fill) {
        spw__store_abort_fill(s, u);
    } else if (u->copied_count == u->plan.chunk_count) {
        u->d = D_READY;
        spw__store_note(s, u);
        pthread_cond_broadcast(&s->main_cond);
    }
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

static void
start_copy(spw_store *s, unit *u, chunk *c)
{
    char *dst = s->device_cache + u->device_offset + (c->plan.first - u->plan.first) * s->compute_bytes;
    spw_dtype type = spw_gpu_get_info(s->cfg.gpu)->compute_dtype;
    const spw_quant form = spw__store_code_form(&s->cfg, &c->plan);
    bool on_device = c->plan.weight_tier == SPW_TIER_DEVICE;
    c->pins++;
    u->copies_inflight++;
    s->copies_inflight++;
    s->stats.h2d_bytes += on_device ? 0 : spw__chunk_weights(s, c);
    spw_gpu_span_begin(s->h2d, "gather");
    if (form != SPW_QUANT_NONE)
        (on_device ? spw_gpu_decode : spw_gpu_decode_h2d)(s->h2d, dst, type, c->weights, form, c->plan.elems);
    else if (on_device)
        spw_gpu_copy_d2d(s->h2d, dst, type, c->weights, s->cfg.weight_dtype, c->plan.elems, NULL);
    else
        spw_gpu_copy_h2d(s->h2d, dst, type, c->weights, s->cfg.weight_dtype, c->plan.elems);
    spw_gpu_span_end(s->h2d, c->plan.unit_idx, copy_done, c);
}

void
spw__store_follow(spw_store *s, unit *u)
{
    spw_gpu_event_wait(u->used, s->h2d);
    u->used_pending = false;
    spw_set_remove(&s->read, (uint64_t)(u - s->units));
}

/*
 * A unit was released when the work that reads it had been submitted, and that may still be under way when another unit comes
 * to lie there. Its own last readers too: once h2d is behind them, so is everything that it copies later, wherever the unit
 * lies next. On a device that computes in the caller's thread nothing is ever pending.
 */
static void
follow_readers(spw_store *s, const unit *u)
{
    for (uint64_t i = spw_set_next(&s->read, 0); i < s->unit_count; i = spw_set_next(&s->read, i + 1)) {
        unit *o = &s->units[i];
        bool meets =
            o->used_offset < u->device_offset + u->device_bytes && u->device_offset < o->used_offset + o->device_bytes;
        if (o == u || meets)
            spw__store_follow(s, o);
    }
}

/* Starts the copies that can be started for a unit that is being filled, or gives the fill up. */
static void
copy_chunks(spw_store *s, unit *u)
{
    while (u->fill_next < u->plan.chunk_count && s->copies_inflight < GATHERS_INFLIGHT_MAX) {
        chunk *c = spw__unit_chunk(s, u, u->fill_next);
        if (c->generation > u->device_generation) {
            spw__store_abort_fill(s, u);
            return;
        }
        if (c->generation != u->device_generation || (c->w != W_CLEAN && c->w != W_DIRTY && c->w != W_WRITING))
            break;
        if (u->fill_next == 0)
            follow_readers(s, u);
        start_copy(s, u, c);
        u->fill_next++;
    }
}

/* Starts what can be started for a unit that is being filled. False: out of slots, nothing later may take one. */
static bool
advance_fill(spw_store *s, unit *u, uint64_t nearer_than, bool urgent)
{
    copy_chunks(s, u);
    if (u->d != D_FILLING || u->abort_fill)
        return true;
    if (u->read_next < u->fill_next ||
        (u->fill_next < u->plan.chunk_count && spw__unit_chunk(s, u, u->fill_next)->w == W_EMPTY))
        u->read_next = u->fill_next;
    while (u->read_next < u->plan.chunk_count) {
        chunk *c = spw__unit_chunk(s, u, u->read_next);
        if (c->generation != u->device_generation)
            break;
        if (c->w == W_EMPTY) {
            if (!spw__store_take_weight_slot(s, c, nearer_than))
                return false;
            c->w = W_READING;
            spw__store_submit(s, c, true, SPW_AIO_READ, urgent ? SPW_AIO_URGENT : SPW_AIO_NORMAL);
        }
        u->read_next++;
    }
    return true;
}

/* The generation exists and no sweep changes it, or its update runs without any help from the main thread. */
static bool
promised(const spw_store *s, const unit *u, uint64_t generation)
{
    if (u->op == OP_EDIT || u->op == OP_INIT)
        return false;
    return u->generation >= generation ||
           (u->generation + 1 == generation && u->op == OP_UPDATE && u->grad_ready && s->gate_open);
}

bool
spw__store_fill_goes_on(const spw_store *s, const unit *u)
{
    bool demanded = s->demand_set && &s->units[s->demand.unit_idx] == u && s->demand.generation == u->device_generation;
    const uint64_t next = s->future.units[u - s->units].first;
    bool ahead = next < s->future.fetch_end && use_at(s, next).generation == u->device_generation;
    return u->d == D_FILLING && !u->abort_fill && (demanded || (ahead && (u->wanted || !s->tight))) &&
           promised(s, u, u->device_generation);
}

static uint32_t
next_use(const spw_store *s, const unit *u)
{
    return spw__future_until(&s->future, (uint32_t)(u - s->units));
}

/* Rather what is used later; of those of whose next use nothing is known what was used longer ago, and of those never used what lies lower. */
static bool
better_victim(const spw_store *s, const unit *o, const unit *than)
{
    if (than == NULL || o->wanted != than->wanted)
        return than == NULL || than->wanted;
    if (next_use(s, o) != next_use(s, than))
        return next_use(s, o) > next_use(s, than);
    return o->last_use != than->last_use ? o->last_use < than->last_use : o->device_offset < than->device_offset;
}

/*
 * Begun for a use that is not fetched any more, or not now; or, where somebody waits, without anything read for it yet: the slot that it needs may
 * hold what is waited for.
 */
static bool
may_be_begun_anew(const spw_store *s, const unit *o, bool waited_for)
{
    return o->d == D_FILLING && o->copies_inflight == 0 &&
           (s->future.units[o - s->units].first >= s->future.fetch_end || s->tight ||
            (waited_for && o->read_next <= o->fill_next));
}

/* The one of them to go, if it is o. */
static unit *
better_of(const spw_store *s, unit *o, unit *victim, uint64_t nearer_than)
{
    bool idle = (o->d == D_READY && o->pins == 0) || may_be_begun_anew(s, o, nearer_than == 0);
    return idle && (uint64_t)next_use(s, o) + 1 > nearer_than && (!o->wanted || nearer_than == 0) &&
                   better_victim(s, o, victim)
               ? o
               : victim;
}

/* Who has to make room; NULL: nobody may. */
static unit *
find_victim(spw_store *s, uint64_t nearer_than)
{
    unit *victim = NULL;
    for (uint64_t i = spw_set_next(&s->resident, 0); i < s->unit_count; i = spw_set_next(&s->resident, i + 1))
        victim = better_of(s, &s->units[i], victim, nearer_than);
    return victim;
}

/*
 * The same, and at hand where all that could go are known to be used again, which is nearly always: what is idle and used last, or one of
 * the few that are being filled.
 */
static unit *
victim_for(spw_store *s, uint64_t nearer_than)
{
    const future *f = &s->future;
    const uint64_t last = spw__future_last(f, IDLE);
    unit *victim = NULL;
    if (f->useless[IDLE] + f->useless[FILLS] > 0)
        return find_victim(s, nearer_than);
    if (last != FUTURE_NONE)
        victim = better_of(s, unit_at(s, last), NULL, nearer_than);
    for (uint64_t i = spw__future_next(f, FILLS, s->tight || nearer_than == 0 ? f->front : f->fetch_end);
         i != FUTURE_NONE; i = spw__future_next(f, FILLS, i + 1))
        victim = better_of(s, unit_at(s, i), victim, nearer_than);
    if (nearer_than == 0 && (victim == NULL || victim->wanted))
        return find_victim(s, nearer_than);
    SPW_ASSERT(victim == find_victim(s, nearer_than));
    return victim;
}

static bool
make_room(spw_store *s, unit *u, uint64_t nearer_than)
{
    while (!spw_gaps_take(&s->room, u->device_bytes, &u->device_offset)) {
        unit *victim = victim_for(s, nearer_than);
        if (victim == NULL)
            return false;
        s->tight = s->tight || victim->wanted;
        spw__store_drop_device(s, victim);
    }
    spw_set_add(&s->resident, (uint64_t)(u - s->units));
    return true;
}

/*
 * Gives the use its place on the device if it has none: from then on its fill is under way, whoever brings the bytes.
 * False: memory ran out, later uses must wait.
 */
static bool
reserve_use(spw_store *s, spw_store_use use, uint64_t nearer_than, bool urgent)
{
    unit *u = &s->units[use.unit_idx];
    if (!promised(s, u, use.generation))
        return true; /* a use of the next step: the copy on the device still serves this one */
    if (u->d == D_FILLING && (u->abort_fill || u->device_generation < use.generation))
        spw__store_abort_fill(s, u);
    else if (u->d == D_READY && u->device_generation < use.generation && u->pins == 0)
        spw__store_drop_device(s, u);
    if (u->d != D_NONE || u->generation > use.generation)
        return true;
    if (u->direct) {
        if (u->generation == use.generation && (u->op != OP_UPDATE || !spw__may_run(s, u))) {
            u->d = D_READY;
            u->device_generation = use.generation;
            u->by_demand = urgent;
            spw__store_note(s, u);
            pthread_cond_broadcast(&s->main_cond);
        }
        return true;
    }
    if (!make_room(s, u, nearer_than))
        return false;
    u->d = D_FILLING;
    u->device_generation = use.generation;
    u->fill_next = u->read_next = u->copied_count = 0;
    u->abort_fill = false;
    u->by_demand = urgent;
    spw__store_note(s, u);
    return true;
}

/* Nothing is left to fetch for it, until its unit is dropped or edited. */
static bool
is_settled(const spw_store *s, uint64_t place)
{
    const future_use *use = spw__future_at(&s->future, place);
    const unit *u = &s->units[use->unit_idx];
    return use->taken ||
           (u->d == D_READY && u->device_generation == use->generation && promised(s, u, use->generation));
}

static bool
are_settled(const spw_store *s, uint64_t place, uint64_t end)
{
    while (place < end && is_settled(s, place))
        place++;
    return place == end;
}

/* The first use that may be fetched and is not settled. */
static uint64_t
first_unsettled(spw_store *s)
{
    future *f = &s->future;
    f->settled = f->settled > f->front ? f->settled : f->front;
    SPW_ASSERT(are_settled(s, f->front, f->settled));
    while (f->settled < f->fetch_end && is_settled(s, f->settled))
        f->settled++;
    return f->settled;
}

/*
 * May this use be fetched, and those behind it? Where its weights are not promised yet they would get a place on the device that it needs
 * first, and be brought twice; and with few slots two of them could wait for each other.
 */
static bool
in_turn(const spw_store *s, spw_store_use use)
{
    return promised(s, &s->units[use.unit_idx], use.generation);
}

void
spw__store_reserve(spw_store *s)
{
    for (uint64_t i = first_unsettled(s); i < s->future.fetch_end && s->poison.status == SPW_OK && !s->tight; i++) {
        const spw_store_use use = use_at(s, i);
        if (!spw__future_at(&s->future, i)->taken && (!in_turn(s, use) || !reserve_use(s, use, nearness(s, i), false)))
            break;
    }
}

/* One wanted use. False: memory ran out, later uses must wait. */
static bool
serve_use(spw_store *s, spw_store_use use, uint64_t nearer_than, bool urgent)
{
    unit *u = &s->units[use.unit_idx];
    if (!reserve_use(s, use, nearer_than, urgent))
        return false;
    return !promised(s, u, use.generation) || u->d != D_FILLING || u->abort_fill ||
           advance_fill(s, u, nearer_than, urgent);
}

/* Nearest first. Where slots have run out, what those behind have read already is still copied, which frees theirs. */
static void
go_on_with_fills(spw_store *s)
{
    const future *f = &s->future;
    bool slots = !s->demand_set || s->units[s->demand.unit_idx].d != D_FILLING || serve_use(s, s->demand, 0, true);
    for (uint64_t i = spw__future_next(f, FILLS, f->front); i < f->fetch_end; i = spw__future_next(f, FILLS, i + 1)) {
        unit *u = unit_at(s, i);
        if (s->tight && !u->wanted)
            continue;
        if (slots)
            slots = serve_use(s, use_at(s, i), nearness(s, i), false);
        else if (!u->abort_fill)
            copy_chunks(s, u);
    }
}

/* Fills under way first: whoever waits for device memory may wait for the very unit being filled. */
void
spw__store_schedule_fills(spw_store *s)
{
    go_on_with_fills(s);
    if (s->demand_set && !serve_use(s, s->demand, 0, true))
        return;
    for (uint64_t i = first_unsettled(s); i < s->future.fetch_end; i++) {
        const spw_store_use use = use_at(s, i);
        if (spw__future_at(&s->future, i)->taken || (s->tight && !s->units[use.unit_idx].wanted))
            continue;
        if (!in_turn(s, use) || !serve_use(s, use, nearness(s, i), false))
            return;
    }
}
