/*
 * The mover: one thread that looks at the states under the lock, starts every transfer that can start, and sleeps until
 * something finishes. Order of service: writes behind (they free slots), the unit somebody waits for, the future in its
 * order, updates of the lowest ready unit, records read ahead.
 *
 * Nothing here holds one resource while it waits for the main thread: a fill starts only at a generation that exists or
 * whose update has been released, and an update takes its record slot before its weight slot. So the smallest pools
 * (one slot each) still make progress.
 */
#include "offload_internal.h"
#include <stdio.h>

static uint64_t
weight_bytes(const spw_store *s, const chunk *c)
{
    return spw_store_weight_bytes(c->plan.elems, s->cfg.weight_bytes, spw__store_code_bits(&s->cfg, &c->plan));
}

static uint64_t
record_bytes(const spw_store *s, const chunk *c)
{
    return c->plan.elems / 32 * s->cfg.record_bytes_32;
}

static chunk *
unit_chunk(spw_store *s, const unit *u, uint32_t k)
{
    return &s->chunks[u->plan.chunk_first + k];
}

/* ---------------------------------------------------------------- slots */

void
spw__store_free_weight_slot(spw_store *s, chunk *c)
{
    SPW_ASSERT(c->w == W_CLEAN || c->w == W_EMPTY);
    SPW_ASSERT(c->pins == 0);
    if (s->cfg.chaos_seed != 0)
        memset(c->weights, 0xff, weight_bytes(s, c));
    s->weight_slot_owner[c->weight_slot] = -1;
    c->weight_slot = -1;
    c->weights = NULL;
    c->w = W_EMPTY;
}

/* How far away the next need of a chunk's host copy is; larger is farther. */
static uint64_t
distance(const spw_store *s, const chunk *c)
{
    const unit *u = &s->units[c->plan.unit_idx];
    uint32_t k = c->idx - u->plan.chunk_first;
    if (u->op == OP_UPDATE && u->grad_ready && (s->gate_open || spw__runs_ahead(s, u)) && !c->started)
        return 0; /* about to be updated */
    if (u->d == D_READY || (u->d == D_FILLING && k < u->fill_next))
        return (1ull << 32) + u->next_use2;
    return u->next_use;
}

/* A slot for c, by evicting the clean copy needed last if it is needed later than `nearer_than`. */
static bool
take_weight_slot(spw_store *s, chunk *c, uint64_t nearer_than)
{
    int32_t best = -1;
    uint64_t best_distance = 0;
    for (uint32_t i = 0; i < s->cfg.weight_slot_count; i++) {
        chunk *owner;
        if (s->weight_slot_owner[i] < 0) {
            best = (int32_t)i;
            best_distance = UINT64_MAX;
            break;
        }
        owner = &s->chunks[s->weight_slot_owner[i]];
        if (owner->w == W_CLEAN && owner->pins == 0) {
            uint64_t d = distance(s, owner) + 1;
            if (d > best_distance) {
                best = (int32_t)i;
                best_distance = d;
            }
        }
    }
    if (best < 0 || best_distance <= nearer_than)
        return false;
    if (s->weight_slot_owner[best] >= 0)
        spw__store_free_weight_slot(s, &s->chunks[s->weight_slot_owner[best]]);
    s->weight_slot_owner[best] = (int32_t)c->idx;
    c->weight_slot = best;
    c->weights = s->weight_slots + (uint64_t)best * s->slot_weight_bytes;
    return true;
}

/*
 * The lowest loan below `end`: units are updated from the lowest on and get their next gradient from the highest on, so
 * that one is free the longest.
 */
static bool
take_loan(spw_store *s, chunk *c, uint32_t end)
{
    for (uint32_t i = 0; i < end; i++) {
        if (s->loans[i].held > 0 || s->loans[i].chunk != NULL)
            continue;
        s->loans[i].chunk = c;
        c->record_slot = (int32_t)(s->cfg.record_slot_count + i);
        c->record = s->grads + i * s->slot_record_bytes;
        s->stats.loans++;
        return true;
    }
    return false;
}

/* released: the update runs without any help from the main thread. High loans last: the backward pass begins there. */
static bool
take_record_slot(spw_store *s, chunk *c, bool released)
{
    if (released && take_loan(s, c, s->loan_count / 2))
        return true;
    if (s->record_slot_free_count == 0)
        return released && take_loan(s, c, s->loan_count);
    c->record_slot = s->record_slot_free[--s->record_slot_free_count];
    c->record = s->record_slots + (uint64_t)c->record_slot * s->slot_record_bytes;
    return true;
}

/* ---------------------------------------------------------------- transfers */

static void
submit(spw_store *s, chunk *c, bool is_weight, spw_aio_op op, spw_aio_priority priority)
{
    spw_aio_request *req = is_weight ? &c->weight_req : &c->record_req;
    spw_error err = {0};
    *req = (spw_aio_request){.op = op,
                             .priority = priority,
                             .file = spw_swap_file(s->swaps[c->plan.path_idx]),
                             .offset = is_weight ? c->weight_offset : c->record_offset,
                             .bytes = is_weight ? weight_bytes(s, c) : record_bytes(s, c),
                             .buf = is_weight ? c->weights : c->record,
                             .user = c};
    if (is_weight && spw__in_place(&c->plan))
        spw__in_place_aim(s, c, req);
    if (!is_weight && c->undoable && spw__undo_bytes(&s->cfg, &c->plan) > 0)
        req->bytes = spw_round_up(req->bytes, 4096) + spw__undo_bytes(&s->cfg, &c->plan);
    s->aio_inflight++;
    if (spw_aio_submit(s->aio, req, &err) != SPW_OK) {
        s->aio_inflight--;
        spw__store_poison(s, &err);
    }
}

void
spw__store_submit_grad(spw_store *s, chunk *c, spw_aio_op op)
{
    spw_error err = {0};
    c->g = op == SPW_AIO_READ ? G_COMING : G_LEAVING;
    c->grad_req = (spw_aio_request){.op = op,
                                    .priority = SPW_AIO_NORMAL,
                                    .file = spw_swap_file(s->swaps[c->plan.path_idx]),
                                    .offset = c->grad_offset,
                                    .bytes = c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype),
                                    .buf = spw__store_grad_of(s, c),
                                    .user = c};
    s->aio_inflight++;
    if (spw_aio_submit(s->aio, &c->grad_req, &err) != SPW_OK) {
        s->aio_inflight--;
        spw__store_poison(s, &err);
    }
}

void
spw__store_push_job(chunk **head, chunk **tail, chunk *c)
{
    c->next_job = NULL;
    if (*head == NULL)
        *head = c;
    else
        (*tail)->next_job = c;
    *tail = c;
}

static void
finish_request(spw_store *s, spw_aio_request *req)
{
    chunk *c = req->user;
    bool is_weight = req == &c->weight_req;
    const char *what = is_weight ? "weights" : req == &c->grad_req ? "gradient" : "record";
    s->aio_inflight--;
    s->ended++;
    spw_timeline_add(req->op == SPW_AIO_READ ? SPW_LANE_NVME_READ : SPW_LANE_NVME_WRITE, what, c->plan.unit_idx,
                     req->submit_ns, req->done_ns);
    if (req->status != SPW_OK) {
        spw_error err = {0};
        spw_aio_request_error(req, &err);
        spw_error_wrap(&err, "%s of chunk %u (unit %u)", what, c->idx, c->plan.unit_idx);
        spw__store_poison(s, &err);
        return;
    }
    if (req == &c->grad_req) {
        *(req->op == SPW_AIO_READ ? &s->stats.nvme_read_bytes : &s->stats.nvme_write_bytes) += req->bytes;
        if (req->op == SPW_AIO_READ) {
            c->g = G_THERE;
        } else {
            s->grads_leaving--;
            spw__store_leave_window(s, c, G_AWAY);
        }
        pthread_cond_broadcast(&s->main_cond);
        return;
    }
    if (req->op == SPW_AIO_READ) {
        s->stats.nvme_read_bytes += req->bytes;
        if (!is_weight) {
            s->update_reads -= c->released;
            c->r = R_READY;
            c->record_fresh = true;
            pthread_cond_broadcast(&s->main_cond);
        } else if (spw__in_place(&c->plan) && spw__in_place_more(c)) {
            submit(s, c, true, SPW_AIO_READ, req->priority);
        } else if (s->cfg.integrity) {
            c->w = W_VERIFYING;
            spw__store_push_job(&s->verify_head, &s->verify_tail, c);
            pthread_cond_signal(&s->work_cond);
        } else {
            c->w = W_CLEAN;
            spw__undo_is_back(s, c);
        }
        return;
    }
    s->stats.nvme_write_bytes += req->bytes;
    if (is_weight) {
        c->w = W_CLEAN;
    } else {
        s->record_writes--;
        spw__store_free_record_slot(s, c);
    }
}

/*
 * Records on their way out, in chunks: enough to keep a disk busy, and few while updates read. What is held back can still be put
 * in order. Once all gradients are there, the next forward pass waits for those reads, and a disk that does both does
 * neither as fast: then records go out only to make room for the next reads, and the rest beside the backward pass.
 */
enum { WRITES_MAX = 8, WRITES_BESIDE_READS = 2, READS_ENOUGH = 4 };
enum { FORWARD_FOR_ROOM = 3, FORWARD_BESIDE_READS = 1, FORWARD_READS_ENOUGH = 2 };

static uint32_t
writes_now(const spw_store *s)
{
    if (s->backward)
        return s->update_reads >= READS_ENOUGH ? WRITES_BESIDE_READS : WRITES_MAX;
    if (s->update_reads < FORWARD_READS_ENOUGH)
        return s->out_of_slots ? FORWARD_FOR_ROOM : WRITES_MAX;
    return s->out_of_slots ? FORWARD_BESIDE_READS : 0;
}

/* Whose memory is needed first: what a gradient waits for, then high loans, where a backward pass begins. */
static uint32_t
write_rank(const spw_store *s, const chunk *c)
{
    uint32_t slot = (uint32_t)c->record_slot;
    return c->rush ? UINT32_MAX : slot < s->cfg.record_slot_count ? s->loan_count / 2 : slot - s->cfg.record_slot_count;
}

/* Weights go out at once: they are few bytes, and their slots are few. */
static void
schedule_writes(spw_store *s)
{
    uint32_t most = writes_now(s);
    if (s->dirty_weights == 0 && s->rushed == 0 && s->record_writes >= most)
        return; /* the list is long where gradients lend records much memory */
    for (;;) {
        chunk **best = NULL, *c;
        for (chunk **at = &s->dirty_head; (c = *at) != NULL;) {
            if (c->w == W_DIRTY) {
                c->w = W_WRITING;
                s->dirty_weights--;
                submit(s, c, true, SPW_AIO_WRITE, SPW_AIO_BULK);
            }
            if (c->r != R_DIRTY) {
                *at = c->next_dirty;
                c->in_dirty = false;
                continue;
            }
            if (best == NULL || write_rank(s, c) > write_rank(s, *best))
                best = at;
            at = &c->next_dirty;
        }
        if (best == NULL || (s->record_writes >= most && !(*best)->rush))
            return;
        c = *best;
        *best = c->next_dirty;
        c->in_dirty = false;
        c->r = R_WRITING;
        s->record_writes++;
        submit(s, c, false, SPW_AIO_WRITE, c->rush ? SPW_AIO_URGENT : SPW_AIO_BULK);
        spw__store_rush(s, c, false);
    }
}

/* ---------------------------------------------------------------- fills: weights to the device */

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
    uint32_t bits = spw__store_code_bits(&s->cfg, &c->plan);
    bool on_device = c->plan.weight_tier == SPW_TIER_DEVICE;
    c->pins++;
    u->copies_inflight++;
    s->copies_inflight++;
    s->stats.h2d_bytes += on_device ? 0 : weight_bytes(s, c);
    spw_gpu_span_begin(s->h2d, "gather");
    if (bits > 0)
        (on_device ? spw_gpu_decode : spw_gpu_decode_h2d)(s->h2d, dst, type, c->weights, bits, c->plan.elems);
    else if (on_device)
        spw_gpu_copy_d2d(s->h2d, dst, type, c->weights, s->cfg.weight_dtype, c->plan.elems, NULL);
    else
        spw_gpu_copy_h2d(s->h2d, dst, type, c->weights, s->cfg.weight_dtype, c->plan.elems);
    spw_gpu_span_end(s->h2d, c->plan.unit_idx, copy_done, c);
}

/*
 * A unit was released when the work that reads it had been submitted, and that may still be under way when another unit comes
 * to lie there. Its own last readers too: once h2d is behind them, so is everything that it copies later, wherever the unit
 * lies next. On a device that computes in the caller's thread nothing is ever pending.
 */
static void
follow_readers(spw_store *s, const unit *u)
{
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *o = &s->units[i];
        bool meets =
            o->used_offset < u->device_offset + u->device_bytes && u->device_offset < o->used_offset + o->device_bytes;
        if (o->used_pending && !o->direct && (o == u || meets)) {
            spw_gpu_event_wait(o->used, s->h2d);
            o->used_pending = false;
        }
    }
}

enum { COPIES_INFLIGHT_MAX = 8 };

/* Starts what can be started for a unit that is being filled. False: out of slots, nothing later may take one. */
static bool
advance_fill(spw_store *s, unit *u, uint64_t nearer_than, bool urgent)
{
    while (u->fill_next < u->plan.chunk_count && s->copies_inflight < COPIES_INFLIGHT_MAX) {
        chunk *c = unit_chunk(s, u, u->fill_next);
        if (c->generation > u->device_generation) {
            spw__store_abort_fill(s, u);
            return true;
        }
        if (c->generation != u->device_generation || (c->w != W_CLEAN && c->w != W_DIRTY && c->w != W_WRITING))
            break;
        if (u->fill_next == 0)
            follow_readers(s, u);
        start_copy(s, u, c);
        u->fill_next++;
    }
    if (u->read_next < u->fill_next ||
        (u->fill_next < u->plan.chunk_count && unit_chunk(s, u, u->fill_next)->w == W_EMPTY))
        u->read_next = u->fill_next;
    while (u->read_next < u->plan.chunk_count) {
        chunk *c = unit_chunk(s, u, u->read_next);
        if (c->generation != u->device_generation)
            break;
        if (c->w == W_EMPTY) {
            if (!take_weight_slot(s, c, nearer_than))
                return false;
            c->w = W_READING;
            submit(s, c, true, SPW_AIO_READ, urgent ? SPW_AIO_URGENT : SPW_AIO_NORMAL);
        }
        u->read_next++;
    }
    return true;
}

static bool
op_may_run(const spw_store *s, const unit *u)
{
    return u->op == OP_INIT || u->op == OP_VISIT || u->op == OP_EDIT ||
           (u->op == OP_UPDATE && u->grad_ready && s->gate_open);
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

/* The lowest place that is free, and where in the list of those that have one. */
static bool
place_on_device(spw_store *s, unit *u, uint32_t *rank)
{
    uint64_t at = 0;
    uint32_t i = 0;
    for (; i < s->resident_count && at + u->device_bytes > s->units[s->resident[i]].device_offset; i++) {
        const unit *o = &s->units[s->resident[i]];
        at = o->device_offset + o->device_bytes;
    }
    u->device_offset = at;
    *rank = i;
    return at + u->device_bytes <= s->cfg.device_cache_bytes;
}

/* Rather what is used later; of those of whose next use nothing is known what was used longer ago. */
static bool
better_victim(const unit *o, const unit *than)
{
    if (than == NULL || o->wanted != than->wanted)
        return than == NULL || than->wanted;
    return o->next_use != than->next_use ? o->next_use > than->next_use : o->last_use < than->last_use;
}

/* It has a place on the device, and its next chunk no slot: what is nearer has them, and may need that place to give them back. */
static bool
stuck(spw_store *s, const unit *u)
{
    return u->d == D_FILLING && u->copies_inflight == 0 && u->fill_next < u->plan.chunk_count &&
           unit_chunk(s, u, u->fill_next)->w == W_EMPTY;
}

static bool
make_room(spw_store *s, unit *u, uint64_t nearer_than)
{
    uint32_t rank;
    while (!place_on_device(s, u, &rank)) {
        unit *victim = NULL;
        for (uint32_t i = 0; i < s->resident_count; i++) {
            unit *o = &s->units[s->resident[i]];
            bool idle = (o->d == D_READY &&
                         o->pins == 0) || /* or it was begun for a use that is not fetched any more, or not now */
                        (o->d == D_FILLING && o->copies_inflight == 0 && (o->next_use >= s->fetch_count || s->tight)) ||
                        (nearer_than == 0 && stuck(s, o));
            if (idle && (uint64_t)o->next_use + 1 > nearer_than && (!o->wanted || nearer_than == 0) &&
                better_victim(o, victim))
                victim = o;
        }
        if (victim == NULL)
            return false;
        s->tight = s->tight || victim->wanted;
        spw__store_drop_device(s, victim);
    }
    memmove(s->resident + rank + 1, s->resident + rank, (s->resident_count++ - rank) * sizeof *s->resident);
    s->resident[rank] = (uint32_t)(u - s->units);
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
        if (u->generation == use.generation && (u->op != OP_UPDATE || !op_may_run(s, u))) {
            u->d = D_READY;
            u->device_generation = use.generation;
            u->by_demand = urgent;
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
    return true;
}

void
spw__store_reserve(spw_store *s)
{
    for (uint32_t i = 0; i < s->fetch_count && s->poison.status == SPW_OK && !s->tight; i++) {
        if (!reserve_use(s, s->future[i], (uint64_t)i + 1, false))
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

/* Fills under way go on first, nearest first: whoever waits for device memory may wait for the very unit being filled. */
static void
schedule_fills(spw_store *s)
{
    for (int start = 0; start < 2; start++) {
        if (s->demand_set && (start || s->units[s->demand.unit_idx].d == D_FILLING) &&
            !serve_use(s, s->demand, 0, true)) {
            if (start)
                return;
            continue;
        }
        for (uint32_t i = 0; i < s->fetch_count; i++) {
            bool filling = s->units[s->future[i].unit_idx].d == D_FILLING;
            if (s->tight && !s->units[s->future[i].unit_idx].wanted)
                continue;
            if ((start || filling) && !serve_use(s, s->future[i], (uint64_t)i + 1, false))
                break;
        }
    }
}

/* ---------------------------------------------------------------- updates and sweeps: records past the workers */

/* Brings the weights of c to memory for its job. True when they are there and the job may start. */
static bool
weights_ready(spw_store *s, unit *u, chunk *c)
{
    bool reads = u->op == OP_VISIT || u->op == OP_EDIT ||
                 (u->op == OP_UPDATE && (s->cfg.update_reads_weights || spw__snap_wants(c)));
    if (c->w == W_EMPTY) {
        if (!take_weight_slot(s, c, 0))
            return false;
        if (!reads)
            return true;
        c->w = W_READING;
        c->held = true;
        c->pins++;
        submit(s, c, true, SPW_AIO_READ, SPW_AIO_NORMAL);
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
    spw__store_chaos_delay(s, c->idx);
    pthread_mutex_lock(&s->lock);
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
            spw__store_finish_job(s, c, OP_UPDATE);
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
start_on_device(spw_store *s, chunk *c)
{
    if (s->together_head == NULL) {
        s->copies_inflight++;
        spw_gpu_span_begin(s->h2d, "update");
    }
    spw__store_push_job(&s->together_head, &s->together_tail, c);
    c->w = W_UPDATING;
    c->r = R_UPDATING;
    c->started = true;
    s->bad[c->idx] = 0;
    s->cfg.update_device(s->cfg.update_ctx, c->idx, s->h2d, c->weights, c->record, spw__store_grad_of(s, c),
                         &s->bad[c->idx]);
    s->together_elems += c->plan.elems;
    if (s->together_elems >= TOGETHER_ELEMS)
        end_together(s);
}

/*
 * Jobs whose chunk is in memory: the lowest first. Gradients come from the highest on, so what is left when the last of them has come
 * is done in the order of the next forward pass.
 */
static void
insert_job(spw_store *s, chunk *c)
{
    chunk **at = &s->job_head;
    if (s->job_tail == NULL || s->job_head == NULL || s->job_tail->idx < c->idx) {
        spw__store_push_job(&s->job_head, &s->job_tail, c);
        return;
    }
    while ((*at)->idx < c->idx)
        at = &(*at)->next_job;
    c->next_job = *at;
    *at = c;
}

static void
start_job(spw_store *s, unit *u, chunk *c)
{
    if (c->held) {
        c->held = false;
        c->pins--;
    }
    if (u->on_device && u->op == OP_UPDATE && !spw__snap_wants(c)) {
        start_on_device(s, c);
        return;
    }
    if (u->op == OP_VISIT)
        c->pins++;
    else
        c->w = W_UPDATING;
    c->ahead = spw__runs_ahead(s, u);
    c->apart = c->ahead && c->record_other != NULL;
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

/* Enough slots are left for those whose gradient is there; which records always leave then. */
static bool
may_read_ahead(const spw_store *s)
{
    return spw__before_gate(s) ? s->rushed == 0 && s->record_slot_free_count > s->cfg.record_slot_count / 2
                               : !leaving(s);
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

/*
 * may_load: new record slots may be taken. False: there was none left to take. The first chunk that no weight slot is left for gets
 * the next one; chunks behind it that have theirs, because their gradients came earlier, go on and give them back.
 */
static bool
advance_unit(spw_store *s, unit *u, bool may_load)
{
    bool released = op_may_run(s, u), ahead = spw__runs_ahead(s, u), runs = released || ahead;
    bool slots_left = true, weightless = false;
    while (may_load && u->load_next < u->op_end) {
        chunk *c = unit_chunk(s, u, u->load_next);
        if (c->r == R_WRITING || c->r == R_DIRTY)
            break; /* the last step's record is still on its way out */
        if (c->r == R_EMPTY) {
            if ((!runs && !may_read_ahead(s)) || !take_record_slot(s, c, released && u->op == OP_UPDATE)) {
                slots_left = false;
                break;
            }
            if (u->op == OP_INIT) {
                c->r = R_READY;
            } else {
                c->r = R_READING;
                c->released = runs;
                s->update_reads += runs;
                submit(s, c, false, SPW_AIO_READ, SPW_AIO_NORMAL);
            }
        }
        u->load_next++;
    }
    if (!runs)
        return slots_left;
    if (u->op != OP_VISIT && u->d == D_READY && u->pins == 0)
        spw__store_drop_device(s, u); /* the generation it shows is about to pass */
    if (u->op != OP_VISIT && u->d == D_FILLING && u->device_generation <= u->generation)
        spw__store_abort_fill(s, u);
    if ((u->op == OP_EDIT || u->direct) && u->op != OP_VISIT && u->d != D_NONE)
        return slots_left; /* somebody still reads what it shows, or a copy to it is under way */
    if (u->direct && u->op != OP_VISIT && u->used_pending) {
        spw_gpu_event_wait(u->used, s->h2d); /* what a queue still reads; workers' queue does the same */
        u->used_pending = false;
    }
    for (uint32_t k = u->job_next; k < u->load_next; k++) {
        chunk *c = unit_chunk(s, u, k);
        bool ready;
        if (c->started || (ahead && !c->plan.spare))
            continue;
        if (u->op == OP_INIT && spw__in_place(&c->plan)) {
            c->started = true;
            spw__store_finish_job(s, c, OP_INIT); /* as they lie there */
            continue;
        }
        if (u->on_device && s->together_head == NULL && s->copies_inflight >= COPIES_INFLIGHT_MAX)
            break;
        if (!gradient_ready(s, u, c))
            continue;
        if (weightless && c->w == W_EMPTY)
            continue;
        ready = weights_ready(s, u, c);
        if (ready && (c->r == R_READY || c->r == R_NONE))
            start_job(s, u, c);
        else if (ready && c->w == W_EMPTY) { /* an unread slot waits for its record: give it back for now */
            c->w = W_CLEAN;
            spw__store_free_weight_slot(s, c);
        }
        weightless = weightless || (!ready && c->w == W_EMPTY);
    }
    end_together(s);
    while (u->job_next < u->load_next && unit_chunk(s, u, u->job_next)->started)
        u->job_next++;
    return slots_left;
}

/*
 * What updates before the gate opens will want next: of those that may, the unit whose gradient comes next; then what has to wait for
 * the gate, lowest first.
 */
static void
read_ahead(spw_store *s, bool may_load)
{
    for (uint32_t i = s->unit_count; i-- > 0;) {
        unit *u = &s->units[i];
        if (u->op == OP_UPDATE && !u->grad_ready && u->spare)
            may_load = advance_unit(s, u, may_load) && may_load;
    }
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *u = &s->units[i];
        if (u->op == OP_UPDATE && !u->spare)
            may_load = advance_unit(s, u, may_load) && may_load;
    }
}

/* Out of slots, the higher units still start what they hold: the slots that all wait for are theirs to give back. */
static void
schedule_updates(spw_store *s)
{
    bool may_load = true, before = spw__before_gate(s),
         only_running = s->gate_open || s->mode == SPW_STEP_EARLY || before;
    s->out_of_slots = s->backward = false;
    for (uint32_t i = 0; i < s->unit_count && !s->undoing; i++) {
        unit *u = &s->units[i];
        bool runs = op_may_run(s, u) || spw__runs_ahead(s, u);
        s->backward = s->backward || (u->op == OP_UPDATE && !u->grad_ready);
        if (u->op == OP_NONE || (only_running && !runs))
            continue;
        may_load = advance_unit(s, u, may_load) && may_load;
        s->out_of_slots = s->out_of_slots || (!may_load && u->op == OP_UPDATE && runs);
    }
    if (before)
        read_ahead(s, may_load);
}

/* ---------------------------------------------------------------- the thread */

enum { BATCH = 64 };

void *
spw__store_mover_main(void *arg)
{
    spw_store *s = arg;
    spw_aio_request *done[BATCH];
    uint32_t done_count = 0;
    (void)pthread_setname_np(pthread_self(), "spw-mover");
    spw_thread_be_prompt();
    for (;;) {
        bool stop;
        while (s->aio != NULL && done_count < BATCH && (done[done_count] = spw_aio_poll(s->aio)) != NULL)
            done_count++;
        pthread_mutex_lock(&s->lock);
        for (uint32_t i = 0; i < done_count; i++)
            finish_request(s, done[i]);
        if (s->aio != NULL) {
            spw_aio_stats io;
            spw_aio_get_stats(s->aio, &io);
            s->stats.read_busy_ns = io.read_busy_ns;
            s->stats.write_busy_ns = io.write_busy_ns;
        }
        if (s->poison.status == SPW_OK) {
            spw__ahead_reads(s);
            schedule_writes(s);
            spw__store_schedule_grads(s);
            schedule_fills(s);
            schedule_updates(s);
            schedule_writes(s);
        }
        s->passes++;
        stop = s->stop && s->copies_inflight == 0 && s->aio_inflight == 0 && s->jobs_running == 0;
        if (!stop && s->aio == NULL) {
            while (!s->mover_kicked)
                pthread_cond_wait(&s->mover_cond, &s->lock);
            s->mover_kicked = false;
        }
        pthread_mutex_unlock(&s->lock);
        if (stop)
            return NULL;
        done_count = 0;
        if (s->aio != NULL && (done[0] = spw_aio_wait(s->aio, UINT64_MAX)) != NULL)
            done_count = 1;
    }
}
