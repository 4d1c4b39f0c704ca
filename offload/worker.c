/*
 * The store's workers: they verify checksums, show chunks to the function that changes numbers (updates, sweeps, snapshots), and
 * take the checksums of what it leaves. The mover hands them chunks; what they finish goes back to it.
 */
#include "offload_internal.h"

/* ---------------------------------------------------------------- checksums */

typedef enum { OF_WEIGHTS, OF_RECORD, OF_GRADIENT } sum_of;

static spw_status
corrupt(const spw_store *s, const chunk *c, sum_of what, uint64_t found, spw_error *err)
{
    const char *const names[] = {"weights", "record", "gradient"};
    const uint64_t offsets[] = {c->undo_read ? spw__undo_offset(s, c) : c->weight_offset, c->record_offset,
                                c->grad_offset};
    const uint64_t written[] = {c->undo_read ? c->undo_sum : c->weight_sum, c->record_sum, c->grad_sum};
    return SPW_RAISE(err, SPW_ECORRUPT,
                     "%s at offset %llu (%s of chunk %u, unit %u, generation %llu): checksum is %016llx, %016llx was "
                     "written; the swap file changed on disk",
                     spw_aio_file_path(spw_swap_file(s->swaps[c->plan.path_idx])), (unsigned long long)offsets[what],
                     names[what], c->idx, c->plan.unit_idx, (unsigned long long)c->generation,
                     (unsigned long long)found, (unsigned long long)written[what]);
}

/* Checksums of one job, counted. */
typedef struct sums {
    uint64_t bytes, ns;
} sums;

enum { PIECE = 16384 }; /* elements; all its arrays together fit a core's cache */

/* Of elements [first, first + n) of one array, after `before`. */
static uint64_t
sum_more(uint64_t before, const void *array, uint64_t first, uint64_t n, uint32_t bytes_32, sums *count)
{
    uint64_t begin = spw_now_ns(), bytes = n / 32 * bytes_32;
    uint64_t sum = spw_checksum_more(before, (const char *)array + first / 32 * bytes_32, bytes);
    count->bytes += bytes;
    count->ns += spw_now_ns() - begin;
    return sum;
}

static uint64_t
sum_weights(const spw_store *s, const chunk *c, uint64_t before, uint64_t first, uint64_t n, sums *count)
{
    const spw_quant form = spw__store_code_form(&s->cfg, &c->plan);
    const uint32_t bytes_32 =
        form != SPW_QUANT_NONE ? spw_codes_block_bytes(form) / (SPW_QUANT_BLOCK / 32) : 32 * s->cfg.weight_bytes;
    return sum_more(before, c->weights, first, n, bytes_32, count);
}

static uint64_t
sum_record(const spw_store *s, const chunk *c, uint64_t before, uint64_t first, uint64_t n, sums *count)
{
    const spw_store_record *r = spw__record_of(&s->cfg, c->plan.unit_idx);
    const char *array = c->record;
    for (uint32_t k = 0; k < r->part_count; k++) {
        before = sum_more(before, array, first, n, r->parts[k], count);
        array += c->plan.elems / 32 * r->parts[k];
    }
    return before;
}

static uint64_t
sum_grad(const spw_store *s, const chunk *c, uint64_t before, uint64_t first, uint64_t n, sums *count)
{
    return sum_more(before, spw__store_grad_of(s, c), first, n, 32 * (uint32_t)spw_dtype_bytes(s->cfg.grad_dtype),
                    count);
}

static uint64_t
piece_at(const chunk *c, uint64_t first)
{
    return c->plan.elems - first < PIECE ? c->plan.elems - first : PIECE;
}

/* One of the three above over all of the chunk. */
static uint64_t
sum_all(const spw_store *s, const chunk *c,
        uint64_t (*sum)(const spw_store *, const chunk *, uint64_t, uint64_t, uint64_t, sums *), sums *count)
{
    uint64_t found = 0;
    for (uint64_t first = 0; first < c->plan.elems; first += piece_at(c, first))
        found = sum(s, c, found, first, piece_at(c, first), count);
    return found;
}

/* ---------------------------------------------------------------- jobs */

/* A copy of the weights that the update is about to change, with its checksum. */
static uint64_t
keep_weights(const spw_store *s, const chunk *c, char *undo, uint64_t before, uint64_t first, uint64_t n, sums *count)
{
    const uint64_t at = first * s->cfg.weight_bytes;
    memcpy(undo + at, (const char *)c->weights + at, n * s->cfg.weight_bytes);
    return s->cfg.integrity ? sum_more(before, undo, first, n, 32 * s->cfg.weight_bytes, count) : 0;
}

/* Of a record that has just been read, before somebody else than an update looks at it. */
static spw_status
verify_record(const spw_store *s, const chunk *c, sums *count, spw_error *err)
{
    uint64_t found = sum_all(s, c, sum_record, count);
    return found == c->record_sum ? SPW_OK : corrupt(s, c, OF_RECORD, found, err);
}

/* Hands the chunk to the snapshot as it is; no lock held, nobody changes it meanwhile. */
static spw_status
take_snapshot(spw_store *s, const chunk *c, sums *count, spw_error *err)
{
    if (c->record_fresh && s->cfg.integrity)
        SPW_TRY(verify_record(s, c, count, err));
    return spw__store_call_with(s, c, s->snap_fn, s->snap_ctx, true, false, err);
}

static spw_store_state
state_of(const spw_store *s, const chunk *c, bool logged)
{
    bool trainable = s->units[c->plan.unit_idx].plan.trainable;
    return (spw_store_state){.weights = c->weights,
                             .record = trainable ? c->record : NULL,
                             .log = logged ? c->log : NULL,
                             .log_weights = spw__logs_weights(&c->plan)};
}

/* No lock held: the update of elements up to `end`, by the chunk's log. */
static spw_status
take_back_pieces(spw_store *s, const chunk *c, uint64_t end, spw_error *err)
{
    spw_store_state state = state_of(s, c, true);
    spw_status st = SPW_OK;
    spw__store_chaos_delay(s, c->idx);
    for (uint64_t first = 0; first < end && st == SPW_OK; first += piece_at(c, first))
        st = s->cfg.undo(s->cfg.update_ctx, c->idx, &state, spw__store_grad_of(s, c), first, piece_at(c, first), err);
    return st;
}

enum { REST_MAX = 63 }; /* steps */

/*
 * The job itself; no lock held, the chunk is this worker's. Checksums run along, piece by piece.
 * snap: the snapshot gets the chunk before anything of it is changed. ahead: what the update changes may have to come back; where the log has no
 * room for that nothing is changed, and the chunk rests.
 */
static spw_status
run_job(spw_store *s, chunk *c, unit_op op, bool snap, bool ahead, sums *count, spw_error *err)
{
    const unit *u = &s->units[c->plan.unit_idx];
    char *grad = spw__op_changes(op) ? spw__store_grad_of(s, c) : NULL;
    spw_store_state state = state_of(s, c, ahead);
    bool verify = c->record_fresh && s->cfg.integrity, writes = op != OP_VISIT && s->cfg.integrity;
    bool grad_read = grad != NULL && c->g == G_THERE && s->cfg.integrity;
    bool sum_w = writes && op != OP_PREPARE && c->plan.weight_tier == SPW_TIER_NVME;
    bool sum_r = writes && c->plan.record_tier == SPW_TIER_NVME && state.record != NULL;
    char *undo = ahead && spw__undo_bytes(&s->cfg, &c->plan) > 0 ? spw__undo_of(s, c) : NULL;
    uint64_t found = 0, grad_found = 0, weight_sum = 0, record_sum = 0, undo_sum = 0;
    spw_status st = SPW_OK;
    spw__store_chaos_delay(s, c->idx);
    if (op == OP_EDIT && verify) {
        SPW_TRY(verify_record(s, c, count, err));
        verify = false;
    }
    if (op == OP_INIT || op == OP_EDIT)
        st = spw__store_call_with(s, c, s->sweep_fn, s->sweep_ctx, op == OP_EDIT, true, err);
    if (grad != NULL && snap) {
        SPW_TRY(take_snapshot(s, c, count, err));
        verify = false; /* it has been */
    }
    if (spw__op_changes(op) && u->on_device) /* it runs elsewhere, once the chunk is handed back */
        return SPW_OK;
    for (uint64_t first = 0, n; first < c->plan.elems && st == SPW_OK; first += n) {
        n = piece_at(c, first);
        if (verify)
            found = sum_record(s, c, found, first, n, count);
        if (grad_read)
            grad_found = sum_grad(s, c, grad_found, first, n, count);
        if (undo != NULL)
            undo_sum = keep_weights(s, c, undo, undo_sum, first, n, count);
        if (op == OP_UPDATE)
            st = s->cfg.update(s->cfg.update_ctx, c->idx, &state, grad, first, n, err);
        else if (op == OP_PREPARE)
            st = s->cfg.prepare(s->cfg.update_ctx, c->idx, c->record, grad, first, n, err);
        if (state.no_room && st == SPW_OK) {
            SPW_ASSERT(state.log_weights); /* else the piece's weights are not what they were */
            c->rest = c->rest_next = 2 * c->rest_next + 1 < REST_MAX ? 2 * c->rest_next + 1 : REST_MAX;
            return take_back_pieces(s, c, first, err);
        }
        if (sum_w)
            weight_sum = sum_weights(s, c, weight_sum, first, n, count);
        if (sum_r)
            record_sum = sum_record(s, c, record_sum, first, n, count);
    }
    if (st == SPW_OK && verify && found != c->record_sum) /* before anybody sees what came of it */
        return corrupt(s, c, OF_RECORD, found, err);
    if (st == SPW_OK && grad_read && grad_found != c->grad_sum)
        return corrupt(s, c, OF_GRADIENT, grad_found, err);
    if (st == SPW_OK && op == OP_VISIT && (snap || !s->snap_sweep))
        st = spw__store_call_with(s, c, s->sweep_fn, s->sweep_ctx, true, false, err);
    if (op == OP_UPDATE && !ahead && s->cfg.chaos_seed != 0)
        memset(spw__store_grad_of(s, c), 0xff, c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype));
    if (ahead) {
        c->weight_sum_before = c->weight_sum;
        c->record_sum_before = c->record_sum;
        c->undo_sum = undo_sum;
    }
    c->weight_sum = sum_w ? weight_sum : c->weight_sum;
    c->record_sum = sum_r ? record_sum : c->record_sum;
    return st;
}

static void
mark_dirty(spw_store *s, chunk *c)
{
    if (!c->in_dirty) {
        c->in_dirty = true;
        c->next_dirty = s->dirty_head;
        s->dirty_head = c;
    }
}

/* Lock held. */
static void
snapshot_has(spw_store *s, chunk *c)
{
    c->snap = false;
    s->snap_left--;
}

/* At most half of the workers: the others are there for what training waits for. */
static bool
may_snap_idle(const spw_store *s)
{
    return s->snap_left > 0 && !s->snap_sweep && s->snap_idle < (s->worker_started + 1) / 2;
}

/*
 * Lock held. A chunk that the snapshot lacks, whole in memory, with nobody about to change it; NULL: none among the next few, and the
 * next look goes on behind them. What is never found is handed over by its update or by the sweep at the end.
 */
static chunk *
idle_chunk(spw_store *s)
{
    enum { LOOK_AT = 256 };
    for (uint32_t i = 0; i < s->chunk_count && i < LOOK_AT; i++) {
        uint32_t at = s->snap_next++ % s->chunk_count;
        chunk *c = &s->chunks[at];
        if (spw__snap_wants(c) && !c->snap_taken && (c->r == R_READY || c->r == R_NONE) &&
            (c->w == W_CLEAN || c->w == W_DIRTY || c->w == W_WRITING))
            return c;
    }
    return NULL;
}

/* Lock held, released in between. The pin keeps the weights, the state of the record keeps its update from starting. */
static void
snap_idle(spw_store *s, chunk *c, sums *count, spw_error *err)
{
    bool record = c->r == R_READY;
    uint64_t begin = spw_now_ns();
    c->pins++;
    c->r = record ? R_UPDATING : c->r;
    c->snap_taken = true; /* one without a record has nothing else that keeps others off */
    s->snap_idle++;
    pthread_mutex_unlock(&s->lock);
    spw__store_chaos_delay(s, c->idx);
    (void)take_snapshot(s, c, count, err);
    pthread_mutex_lock(&s->lock);
    spw_timeline_add(SPW_LANE_ADAM, "save", c->plan.unit_idx, begin, spw_now_ns());
    s->snap_idle--;
    c->snap_taken = false;
    c->r = record ? R_READY : c->r;
    c->pins--;
    if (err->status == SPW_OK)
        snapshot_has(s, c);
    pthread_cond_broadcast(&s->main_cond);
}

/* Under the lock. The update is still to be: the snapshot has seen a chunk of the device, or a log had no room. */
static void
hand_back(spw_store *s, chunk *c)
{
    unit *u = &s->units[c->plan.unit_idx];
    uint32_t k = c->idx - u->plan.chunk_first;
    c->w = W_CLEAN;
    c->r = R_READY;
    c->started = c->ahead = false;
    u->job_next = k < u->job_next ? k : u->job_next;
    spw__store_note_op(s, u);
    pthread_cond_broadcast(&s->main_cond);
}

/* What the unit shows from now on is what its chunks have reached. */
void
spw__store_finish_unit(spw_store *s, unit *u)
{
    spw__store_end_op(s, u);
    u->half = H_SECOND;
    spw__store_stop_holding(s, u);
    u->generation = s->chunks[u->plan.chunk_first + u->op_end - 1].generation;
    pthread_cond_broadcast(&s->main_cond);
}

/* Hands the chunk back, under the lock. */
void
spw__store_finish_job(spw_store *s, chunk *c, unit_op op)
{
    unit *u = &s->units[c->plan.unit_idx];
    bool record_on_nvme = c->plan.record_tier == SPW_TIER_NVME && c->r != R_NONE;
    c->record_fresh = false;
    if (op == OP_VISIT) {
        c->pins--;
        if (record_on_nvme) { /* unchanged: the slot goes back without a write */
            spw__store_free_record_slot(s, c);
        } else if (c->r != R_NONE) {
            c->r = R_READY;
        }
    } else if (spw__in_place(&c->plan)) {
        c->generation = 0;
    } else if (op == OP_PREPARE) {
        c->pins -= c->held;
        c->held = false;
        c->r = record_on_nvme && !u->holding ? R_DIRTY : R_READY;
        if (c->r == R_DIRTY)
            mark_dirty(s, c);
    } else {
        c->w = c->plan.weight_tier == SPW_TIER_NVME ? W_DIRTY : W_CLEAN;
        s->dirty_weights += c->w == W_DIRTY;
        if (c->r != R_NONE)
            c->r = record_on_nvme ? R_DIRTY : R_READY;
        if (c->w == W_DIRTY || c->r == R_DIRTY)
            mark_dirty(s, c);
        if (op == OP_UPDATE && c->ahead)
            spw__ahead_done(c);
        else if (op == OP_UPDATE)
            spw__store_hold_grad(s, c, s->mode == SPW_STEP_LATE); /* then the next gradient is about to come */
        if (op == OP_UPDATE && c->g == G_WINDOW)
            spw__store_leave_window(s, c, G_NONE);
        c->g = op == OP_UPDATE ? G_NONE : c->g;
        c->generation = op == OP_UPDATE ? c->generation + 1 : op == OP_INIT ? 0 : c->generation;
        s->stats.updates += op == OP_UPDATE;
    }
    if (++u->done_next < u->op_end || (op == OP_UPDATE && !s->gate_open))
        return;
    if (op != OP_PREPARE) {
        spw__store_finish_unit(s, u);
    } else {
        u->half = H_BETWEEN;
        s->between++;
        pthread_cond_broadcast(&s->main_cond);
    }
}

/*
 * Lock held. The list whose first chunk is the next job. Chunks without a slot are ready all at once when updates may run, lowest
 * first, which is what the forward pass wants; but the disk would rest until those that were read ahead have had their turn.
 */
static chunk **
next_jobs(spw_store *s)
{
    bool passing = s->passing_head != NULL && (s->job_head == NULL || s->passing_turn);
    if (s->passing_head != NULL && s->job_head != NULL)
        s->passing_turn = !s->passing_turn;
    return passing ? &s->passing_head : &s->job_head;
}

/* Lock held, released in between, as for the next two. The mover sends it out with its checksum. */
static void
sum_gradient(spw_store *s, chunk *c, sums *count)
{
    uint64_t found;
    pthread_mutex_unlock(&s->lock);
    spw__store_chaos_delay(s, c->idx);
    found = sum_all(s, c, sum_grad, count);
    pthread_mutex_lock(&s->lock);
    c->grad_sum = found;
    c->next_grad = s->summed_head;
    s->summed_head = c;
}

static void
verify_weights(spw_store *s, chunk *c, sums *count, spw_error *err)
{
    uint64_t found;
    pthread_mutex_unlock(&s->lock);
    spw__store_chaos_delay(s, c->idx);
    found = sum_all(s, c, sum_weights, count);
    if (spw__in_place(&c->plan))
        spw__in_place_verify(s, c, found, err);
    else if (found != (c->undo_read ? c->undo_sum : c->weight_sum))
        corrupt(s, c, OF_WEIGHTS, found, err);
    pthread_mutex_lock(&s->lock);
    if (err->status != SPW_OK)
        return;
    c->w = W_CLEAN;
    spw__undo_is_back(s, c);
}

static void
change(spw_store *s, chunk *c, sums *count, spw_error *err)
{
    const unit *u = &s->units[c->plan.unit_idx];
    unit_op op = spw__half_op(u);
    bool snap = spw__snap_wants(c), ahead = c->ahead, refused;
    uint64_t begin;
    pthread_mutex_unlock(&s->lock);
    begin = spw_now_ns();
    (void)run_job(s, c, op, snap, ahead, count, err);
    pthread_mutex_lock(&s->lock);
    if (err->status == SPW_OK && snap && (spw__op_changes(op) || s->snap_sweep))
        snapshot_has(s, c);
    s->stats.update_busy_ns += spw_now_ns() - begin;
    spw_timeline_add(SPW_LANE_ADAM, op == OP_UPDATE ? "update" : "sweep", c->plan.unit_idx, begin, spw_now_ns());
    s->stats.no_room += refused = op == OP_UPDATE && ahead && c->rest > 0;
    if (err->status == SPW_OK && ((spw__op_changes(op) && u->on_device) || refused))
        hand_back(s, c);
    else if (err->status == SPW_OK)
        spw__store_finish_job(s, c, op);
}

static void
bring_back(spw_store *s, chunk *c, spw_error *err)
{
    uint64_t begin;
    pthread_mutex_unlock(&s->lock);
    begin = spw_now_ns();
    (void)take_back_pieces(s, c, c->plan.elems, err);
    pthread_mutex_lock(&s->lock);
    s->stats.update_busy_ns += spw_now_ns() - begin;
    spw_timeline_add(SPW_LANE_ADAM, "undo", c->plan.unit_idx, begin, spw_now_ns());
    if (err->status == SPW_OK)
        spw__ahead_is_back(s, c);
}

/* Lock held, released while it works. False: there is nothing to do. What others wait for comes first. */
static bool
work_once(spw_store *s)
{
    sums count = {0};
    spw_error err = {0};
    chunk **jobs, *c;
    if (s->poison.status != SPW_OK)
        return false;
    s->jobs_running++;
    if ((c = s->sum_head) != NULL) {
        s->sum_head = c->next_grad;
        sum_gradient(s, c, &count);
    } else if ((c = s->verify_head) != NULL) {
        s->verify_head = c->next_job;
        verify_weights(s, c, &count, &err);
    } else if ((c = *(jobs = next_jobs(s))) != NULL) {
        *jobs = c->next_job;
        if (c->taking_back)
            bring_back(s, c, &err);
        else
            change(s, c, &count, &err);
    } else if (!s->stop && may_snap_idle(s) && (c = idle_chunk(s)) != NULL) {
        snap_idle(s, c, &count, &err);
    }
    s->jobs_running--;
    if (c == NULL)
        return false;
    s->ended++;
    s->stats.checked_bytes += count.bytes;
    s->stats.checksum_ns += count.ns;
    if (err.status != SPW_OK)
        spw__store_poison(s, &err);
    spw__store_kick(s);
    return true;
}

void *
spw__store_worker_main(void *arg)
{
    spw_store *s = arg;
    (void)pthread_setname_np(pthread_self(), "spw-adam");
    pthread_mutex_lock(&s->lock);
    for (;;) {
        if (work_once(s))
            continue;
        if (s->stop)
            break;
        pthread_cond_wait(&s->work_cond, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
