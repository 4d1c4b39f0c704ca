/*
 * Updates and sweeps: brings a unit's records and weights past the workers, or, where they are on the device, past its
 * queue. An update takes its record slot before its weight slot; the lowest unit whose update may run comes first. Called by the mover, lock
 * held; updates on the device end on the h2d queue's thread.
 */
#include "offload_internal.h"

/* Brings the weights of c to memory for its job. True when they are there and the job may start. */
static bool
weights_ready(spw_store *s, unit *u, chunk *c)
{
    bool first_half = u->half == H_FIRST, snap = spw__snap_wants(c);
    bool reads = u->op == OP_VISIT || u->op == OP_EDIT ||
                 (u->op == OP_UPDATE && ((s->cfg.update_reads_weights && !first_half) || snap));
    if (first_half && !snap)
        return true;
    if (c->w == W_EMPTY) {
        if (!spw__store_take_weight_slot(s, c, 0))
            return false;
        if (!reads)
            return true;
        c->w = W_READING;
        c->held = true;
        c->pins++;
        spw__store_submit(s, c, true, SPW_AIO_READ, SPW_AIO_NORMAL);
        return false;
    }
    if (u->op == OP_VISIT)
        return c->w == W_CLEAN || c->w == W_DIRTY || c->w == W_WRITING;
    return c->w == W_CLEAN && c->pins == (c->held ? 1u : 0u);
}

/* Updates on the device have passed: a list of chunks. */
static void
updates_done(void *arg, const char *name, uint64_t unit_idx, uint64_t begin_ns, uint64_t end_ns)
{
    chunk *c = arg, *next;
    spw_store *s = c->store;
    unit_op op;
    spw__store_chaos_delay(s, c->idx);
    pthread_mutex_lock(&s->lock);
    op = spw__half_op(&s->units[c->plan.unit_idx]);
    s->copies_inflight--;
    s->ended++;
    spw_timeline_add(SPW_LANE_ADAM, name, unit_idx, begin_ns, end_ns);
    for (; c != NULL; c = next) {
        spw_error err = {0};
        next = c->next_job;
        if (s->bad[c->idx] > 0)
            (void)s->cfg.bad_fn(s->cfg.update_ctx, c->idx, s->bad[c->idx], &err);
        if (err.status != SPW_OK)
            spw__store_poison(s, &err);
        else
            spw__store_finish_job(s, c, op);
    }
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}

/*
 * A chunk of a million elements is updated in ten microseconds, and a span with its notice costs more than that: updates of one
 * unit share them, as many as take a hundred or two.
 */
enum { TOGETHER_ELEMS = 16 << 20 };

static void
end_together(spw_store *s)
{
    chunk *c = s->together_head;
    s->together_head = s->together_tail = NULL;
    s->together_elems = 0;
    if (c != NULL)
        spw_gpu_span_end(s->h2d, c->plan.unit_idx, updates_done, c);
}

/*
 * In the h2d queue: what is copied from there later comes after it. The gradient is there, since somebody waited for it before
 * it was said to be ready. A chunk that the snapshot lacks goes to a worker first, which hands it back.
 */
static void
start_on_device(spw_store *s, const unit *u, chunk *c)
{
    const bool first_half = u->half == H_FIRST;
    const spw_store_device_fn fn = first_half ? s->cfg.prepare_device : s->cfg.update_device;
    if (s->together_head == NULL) {
        s->copies_inflight++;
        spw_gpu_span_begin(s->h2d, "update");
    }
    spw__store_push_job(&s->together_head, &s->together_tail, c);
    c->w = first_half ? c->w : W_UPDATING;
    c->r = R_UPDATING;
    c->started = true;
    s->bad[c->idx] = 0;
    fn(s->cfg.update_ctx, c->idx, s->h2d, first_half ? NULL : c->weights, c->record, spw__store_grad_of(s, c),
       &s->bad[c->idx]);
    s->together_elems += c->plan.elems;
    if (s->together_elems >= TOGETHER_ELEMS)
        end_together(s);
}

/*
 * The lowest first: gradients come from the highest on, so what is left when the last of them has come is done in the order of the next
 * forward pass. LATE: the highest, for whose next gradient somebody may wait.
 */
static bool
goes_before(const spw_store *s, const chunk *a, const chunk *b)
{
    return s->mode == SPW_STEP_LATE ? a->idx > b->idx : a->idx < b->idx;
}

/* Jobs whose chunk is in memory. */
static void
insert_job(spw_store *s, chunk *c)
{
    chunk **at = &s->job_head;
    if (s->job_tail == NULL || s->job_head == NULL || goes_before(s, s->job_tail, c)) {
        spw__store_push_job(&s->job_head, &s->job_tail, c);
        return;
    }
    while (goes_before(s, *at, c))
        at = &(*at)->next_job;
    c->next_job = *at;
    *at = c;
}

static void
start_job(spw_store *s, unit *u, chunk *c)
{
    bool first_half = u->half == H_FIRST;
    if (first_half && !c->held && spw__snap_wants(c)) {
        c->held = true;
        c->pins++;
    }
    if (c->held && !first_half) {
        c->held = false;
        c->pins--;
    }
    if (u->on_device && u->op == OP_UPDATE && !spw__snap_wants(c)) {
        start_on_device(s, u, c);
        return;
    }
    if (u->op == OP_VISIT)
        c->pins++;
    else if (!first_half)
        c->w = W_UPDATING;
    c->ahead = spw__runs_ahead(s, u);
    s->spent = s->spent || (c->ahead && u->plan.spills);
    if (c->r == R_READY)
        c->r = R_UPDATING;
    c->started = true;
    if (c->plan.record_tier == SPW_TIER_NVME || c->plan.weight_tier == SPW_TIER_NVME)
        spw__store_push_job(&s->passing_head, &s->passing_tail, c);
    else
        insert_job(s, c);
    pthread_cond_signal(&s->work_cond);
}

/*
 * Records are still on their way out of memory that gradients need. What is read ahead comes after them: gradients get their place
 * without waiting for those reads, and the disk has something to do while the last of them arrive and the norm is formed.
 */
static bool
leaving(const spw_store *s)
{
    return s->backward && (s->record_writes > 0 || s->dirty_head != NULL);
}

/* Enough slots, one at least, are left for those whose gradient is there; which records always leave then. */
static bool
may_read_ahead(const spw_store *s)
{
    if (s->mode == SPW_STEP_LATE) /* it is the turn of the next */
        return true;
    if (!spw__before_gate(s))
        return !leaving(s);
    return s->rushed == 0 && s->record_slot_free_count > 1 && s->record_slot_free_count > s->cfg.record_slot_count / 2;
}

/* In memory, or nothing that this operation reads. One that is away comes behind the record, in its slot. */
static bool
gradient_ready(spw_store *s, const unit *u, chunk *c)
{
    if (u->op != OP_UPDATE || !u->plan.spills)
        return true;
    if (c->g == G_AWAY && (c->r == R_READING || c->r == R_READY))
        spw__store_submit_grad(s, c, SPW_AIO_READ);
    return c->g == G_WINDOW || c->g == G_THERE;
}

/* Its records are to stay in memory from its first half to its second, and do not yet. */
static bool
is_to_hold(const spw_store *s, const unit *u)
{
    return u->op == OP_UPDATE && u->half == H_FIRST && !u->holding && u->on_nvme > 0 &&
           spw_store_holds(s->cfg.record_slot_count, u->on_nvme);
}

/*
 * Units whose second halves begin in an order of the caller's hold their records in that order (spw_store_whole_take): what one after it
 * held would not come back before it is taken itself.
 */
static bool
is_next_to_hold(const spw_store *s, const unit *u)
{
    const bool early = s->mode == SPW_STEP_EARLY;
    const unit *first = early ? u + 1 : s->units, *end = early ? s->units + s->unit_count : u;
    if (s->cfg.whole != NULL)
        return true;
    while (first < end && !is_to_hold(s, first))
        first++;
    return first == end;
}

/* False: others' records are in the slots that its own are to have. */
static bool
may_begin(spw_store *s, unit *u)
{
    if (!is_to_hold(s, u))
        return true;
    if (!spw_store_holds(s->cfg.record_slot_count, s->holding + u->on_nvme) || !is_next_to_hold(s, u))
        return false;
    u->holding = true;
    s->holding += u->on_nvme;
    return true;
}

/*
 * may_load: new record slots may be taken. False: there was none left to take. The first chunk that no weight slot is left for gets
 * the next one; chunks behind it that have theirs, because their gradients came earlier, go on and give them back.
 */
static bool
advance_unit(spw_store *s, unit *u, bool may_load)
{
    bool released = spw__may_run(s, u), ahead = spw__runs_ahead(s, u), runs = released || ahead;
    bool slots_left = true, weightless = false, changes = u->op != OP_VISIT && u->half == H_SECOND;
    if (!may_begin(s, u))
        return true;
    while (u->load_next < u->op_end) {
        chunk *c = spw__unit_chunk(s, u, u->load_next);
        if (!may_load && !(u->holding && c->r == R_READY))
            break;
        if (c->r == R_WRITING || c->r == R_DIRTY)
            break; /* the last step's record is still on its way out */
        if (c->r == R_EMPTY) {
            if ((!runs && !may_read_ahead(s)) || !spw__store_take_record_slot(s, c, released && u->op == OP_UPDATE)) {
                slots_left = false;
                break;
            }
            if (u->op == OP_INIT) {
                c->r = R_READY;
            } else {
                c->r = R_READING;
                c->released = runs;
                s->update_reads += runs;
                spw__store_submit(s, c, false, SPW_AIO_READ, SPW_AIO_NORMAL);
            }
        }
        u->load_next++;
    }
    if (!runs)
        return slots_left;
    if (changes && u->d == D_READY && u->pins == 0)
        spw__store_drop_device(s, u); /* the generation it shows is about to pass */
    if (changes && u->d == D_FILLING && u->device_generation <= u->generation)
        spw__store_abort_fill(s, u);
    if ((u->op == OP_EDIT || u->direct) && changes && u->d != D_NONE)
        return slots_left; /* somebody still reads what it shows, or a copy to it is under way */
    if (u->direct && changes && u->used_pending)
        spw__store_follow(s, u); /* workers' queue does the same */
    for (uint32_t k = u->job_next; k < u->load_next; k++) {
        chunk *c = spw__unit_chunk(s, u, k);
        bool ready;
        if (c->started || (ahead && (!c->plan.spare || c->rest > 0)))
            continue;
        if (u->op == OP_INIT && spw__in_place(&c->plan)) {
            c->started = true;
            spw__store_finish_job(s, c, OP_INIT); /* as they lie there */
            continue;
        }
        if (u->on_device && s->together_head == NULL && s->copies_inflight >= GATHERS_INFLIGHT_MAX)
            break;
        if (!gradient_ready(s, u, c))
            continue;
        if (weightless && c->w == W_EMPTY)
            continue;
        ready = weights_ready(s, u, c);
        if (ready && (c->r == R_READY || c->r == R_NONE))
            start_job(s, u, c);
        else if (ready && c->weight_slot >= 0 &&
                 c->w == W_EMPTY) { /* an unread slot waits for its record: give it back for now */
            c->w = W_CLEAN;
            spw__store_free_weight_slot(s, c);
        }
        weightless = weightless || (!ready && c->w == W_EMPTY);
    }
    end_together(s);
    while (u->job_next < u->load_next && spw__unit_chunk(s, u, u->job_next)->started)
        u->job_next++;
    spw__store_note_op(s, u);
    return slots_left;
}

/*
 * What updates before the gate opens will want next: of those that may, the unit whose gradient comes next; then what has to wait for
 * the gate, lowest first.
 */
static void
read_ahead(spw_store *s, bool may_load)
{
    for (uint64_t i = spw_set_last(&s->busy, s->unit_count); i < s->unit_count; i = spw_set_last(&s->busy, i)) {
        unit *u = &s->units[i];
        if (u->op == OP_UPDATE && !u->grad_ready && u->spare)
            may_load = advance_unit(s, u, may_load) && may_load;
    }
    for (uint64_t i = spw_set_next(&s->busy, 0); i < s->unit_count; i = spw_set_next(&s->busy, i + 1)) {
        unit *u = &s->units[i];
        if (u->op == OP_UPDATE && !u->spare)
            may_load = advance_unit(s, u, may_load) && may_load;
    }
}

/* Of these units the first from there on, or, downwards, the last before. */
static uint64_t
next_of(const spw_set *units, bool down, uint64_t from)
{
    return down ? spw_set_last(units, from) : spw_set_next(units, from);
}

/* What is told of all units with an operation. */
static bool
is_noted(const spw_store *s)
{
    uint32_t waiting = 0;
    bool same = true;
    for (uint64_t i = spw_set_next(&s->busy, 0); i < s->unit_count; i = spw_set_next(&s->busy, i + 1)) {
        waiting += s->units[i].op == OP_UPDATE && !s->units[i].grad_ready;
        same = same && spw_set_has(&s->todo, i) == spw__store_has_todo(&s->units[i]);
    }
    return same && waiting == s->waiting;
}

/*
 * Out of slots, the higher units still start what they hold: the slots that all wait for are theirs to give back. Units that wait for their
 * gradients, often thousands, are not looked at where nothing is read ahead for them.
 */
void
spw__store_schedule_updates(spw_store *s)
{
    bool may_load = true, before = spw__before_gate(s), late = s->mode == SPW_STEP_LATE;
    bool only_running = !late && (s->gate_open || s->mode == SPW_STEP_EARLY || before);
    const spw_set *units = only_running || s->waiting == 0 ? &s->todo : &s->busy;
    SPW_ASSERT(is_noted(s));
    s->out_of_slots = false;
    s->backward = s->waiting > 0 && !s->undoing;
    for (uint64_t i = next_of(units, late, late ? s->unit_count : 0); i < s->unit_count && !s->undoing;
         i = next_of(units, late, late ? i : i + 1)) {
        unit *u = &s->units[i];
        bool runs = spw__may_run(s, u) || spw__runs_ahead(s, u);
        if (only_running && !runs)
            continue;
        may_load = advance_unit(s, u, may_load) && may_load;
        s->out_of_slots = s->out_of_slots || (!may_load && u->op == OP_UPDATE && runs);
    }
    if (before)
        read_ahead(s, may_load);
}
