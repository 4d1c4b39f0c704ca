/*
 * Updates ahead of the gate. Whether a step clips its gradient is known when all of it is there; nearly always it does not, and
 * then the updates are those that would have run at once. So they do run at once. What they change on nvme goes to a second place
 * there: until the gate opens the state before lies untouched in the first, and then the places change their roles. What is in memory
 * is changed where it lies, and a log beside it takes that back (cpu_adam/undo.c). If the norm says otherwise, all becomes as it was,
 * and the update is done again: the same bits, at the price of what was done in vain. Whoever computes the norm decides whether to try
 * (runtime/ahead.c). Where a log has no room for an update the chunk waits for the gate, and is not tried for some steps.
 *
 *   chunk   ahead (its job began before the gate) -> undoable (the job has ended) -> final, or as before, in memory by a job (taking_back)
 *
 * A gradient in host memory stays until then. One that spills does not, for its window is the next one's: in the rare step in which it is needed
 * once more, it is made once more (spw_store_step_spent), and so none is ever written. Weights in memory beside a record on nvme go out
 * behind it as they were.
 * Source: speculation-then-validation in SuperOffload (Lian et al. 2025, 2509.21271), where the state before is computed back; here
 * to the last bit.
 */
#include "offload_internal.h"

uint64_t
spw__undo_bytes(const spw_store_config *cfg, const spw_store_chunk *c)
{
    return c->spare && c->record_tier == SPW_TIER_NVME && c->weight_tier != SPW_TIER_NVME
               ? spw_round_up(c->elems * cfg->weight_bytes, 4096)
               : 0;
}

char *
spw__undo_of(const spw_store *s, const chunk *c)
{
    return (char *)c->record + spw_round_up(spw__chunk_record(s, c), 4096);
}

bool
spw__before_gate(const spw_store *s)
{
    return s->mode == SPW_STEP_AHEAD && !s->gate_open && !s->held_back;
}

bool
spw__runs_ahead(const spw_store *s, const unit *u)
{
    return spw__before_gate(s) && u->op == OP_UPDATE && u->grad_ready && u->spare && !u->on_device;
}

bool
spw__must_come_again(const spw_store *s)
{
    return s->spent && s->held_back && !s->gate_open;
}

bool
spw_store_step_spent(spw_store *s)
{
    bool spent;
    pthread_mutex_lock(&s->lock);
    spent = s->spent;
    pthread_mutex_unlock(&s->lock);
    return spent;
}

static void
swap_u64(uint64_t *a, uint64_t *b)
{
    uint64_t t = *a;
    *a = *b;
    *b = t;
}

/* Both copies of what is on nvme: from one place to the other. */
static void
change_offsets(chunk *c)
{
    swap_u64(&c->weight_offset, &c->weight_spare);
    swap_u64(&c->record_offset, &c->record_spare);
}

uint64_t
spw__log_bytes(const spw_store_config *cfg, const spw_store_chunk *c)
{
    return c->spare && c->record_tier == SPW_TIER_HOST ? c->elems / 32 * cfg->log_bytes_32[spw__logs_weights(c)] : 0;
}

/* Tests: nobody has anything of a log that has served. */
static void
poison_log(const spw_store *s, const chunk *c)
{
    if (s->cfg.chaos_seed != 0 && c->log != NULL)
        memset(c->log, 0xff, spw__log_bytes(&s->cfg, &c->plan));
}

/* Lock held. Jobs ahead that no worker has begun are jobs no more. Those that hold a slot stay, they are few. */
static void
recall(spw_store *s)
{
    chunk *c = s->job_head;
    s->job_head = s->job_tail = NULL;
    for (chunk *next; c != NULL; c = next) {
        unit *u = &s->units[c->plan.unit_idx];
        uint32_t k = c->idx - u->plan.chunk_first;
        next = c->next_job;
        if (!c->ahead) {
            spw__store_push_job(&s->job_head, &s->job_tail, c);
            continue;
        }
        c->w = W_CLEAN;
        c->r = R_READY;
        c->ahead = c->started = false;
        u->job_next = k < u->job_next ? k : u->job_next;
        spw__store_note_op(s, u);
    }
}

void
spw__ahead_done(chunk *c)
{
    c->undoable = true;
    change_offsets(c);
}

void
spw__ahead_commit(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count && s->mode == SPW_STEP_AHEAD; i++) {
        unit *u = &s->units[i];
        for (uint32_t k = 0; k < u->plan.chunk_count && u->op == OP_UPDATE; k++) {
            chunk *c = &s->chunks[u->plan.chunk_first + k];
            if (c->undoable) {
                s->stats.ahead++;
                c->rest_next /= 2;
                if (s->cfg.chaos_seed != 0 && !u->plan.spills) /* else it left its window with the job */
                    memset(spw__store_grad_of(s, c), 0xff, c->plan.elems * spw_dtype_bytes(s->cfg.grad_dtype));
                poison_log(s, c);
                spw__store_hold_grad(s, c, false);
            }
            c->ahead = c->undoable = false; /* a job under way ends like any other */
        }
        if (u->op == OP_UPDATE && u->op_end > 0 && u->done_next == u->op_end)
            spw__store_finish_unit(s, u);
    }
}

/* ---------------------------------------------------------------- back */

/* Nobody but the store has anything of it. */
static bool
settled(const chunk *c)
{
    return c->undoable && c->r != R_WRITING && c->w != W_WRITING;
}

static void
take_back(spw_store *s, chunk *c)
{
    const uint64_t undo = spw__undo_bytes(&s->cfg, &c->plan);
    const bool in_memory = c->r == R_DIRTY;
    SPW_ASSERT(c->pins == 0 && (c->r == R_DIRTY || c->r == R_EMPTY || c->log != NULL));
    if (in_memory && undo > 0)
        memcpy(c->weights, spw__undo_of(s, c), c->plan.elems * s->cfg.weight_bytes);
    if (in_memory)
        spw__store_free_record_slot(s, c);
    if (c->plan.weight_tier == SPW_TIER_NVME && c->w != W_EMPTY) {
        s->dirty_weights -= c->w == W_DIRTY;
        c->w = W_CLEAN;
        spw__store_free_weight_slot(s, c);
    } else if (undo > 0 && !in_memory) {
        c->w = W_READING;
        c->undo_read = true;
        c->next_grad = s->undo_head;
        s->undo_head = c;
        s->undo_left++;
    }
    if (c->log != NULL) {
        c->taking_back = true;
        c->w = spw__logs_weights(&c->plan) ? W_UPDATING : c->w;
        c->r = R_UPDATING;
        spw__store_push_job(&s->job_head, &s->job_tail, c);
        pthread_cond_signal(&s->work_cond);
        s->undo_left++;
    }
    change_offsets(c);
    c->weight_sum = c->weight_sum_before;
    c->record_sum = c->record_sum_before;
    c->generation--;
    c->ahead = c->undoable = c->started = false;
    s->stats.undone++;
}

/* Lock held: the job of a chunk in memory has ended. */
void
spw__ahead_is_back(spw_store *s, chunk *c)
{
    poison_log(s, c);
    c->taking_back = false;
    c->w = spw__logs_weights(&c->plan) ? W_CLEAN : c->w;
    c->r = R_READY;
    s->undo_left--;
    pthread_cond_broadcast(&s->main_cond);
}

/* Weights of before, from behind the record that is not to be. */
void
spw__ahead_reads(spw_store *s)
{
    for (chunk *c; (c = s->undo_head) != NULL;) {
        spw_error err = {0};
        s->undo_head = c->next_grad;
        c->weight_req = (spw_aio_request){.op = SPW_AIO_READ,
                                          .priority = SPW_AIO_URGENT,
                                          .file = spw_swap_file(s->swaps[c->plan.path_idx]),
                                          .offset = spw__undo_offset(s, c),
                                          .bytes = c->plan.elems * s->cfg.weight_bytes,
                                          .buf = c->weights,
                                          .user = c};
        s->aio_inflight++;
        if (spw_aio_submit(s->aio, &c->weight_req, &err) != SPW_OK) {
            s->aio_inflight--;
            spw__store_poison(s, &err);
        }
    }
}

uint64_t
spw__undo_offset(const spw_store *s, const chunk *c)
{
    return c->record_spare + spw_round_up(spw__chunk_record(s, c), 4096);
}

/* The weights of before, if that is what was read. */
void
spw__undo_is_back(spw_store *s, chunk *c)
{
    s->undo_left -= c->undo_read;
    if (c->undo_read)
        pthread_cond_broadcast(&s->main_cond);
    c->undo_read = false;
}

/* Takes back what nobody has anything of. True: nothing is left to wait for. */
static bool
take_back_some(spw_store *s)
{
    bool left = false;
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        if (c->ahead && settled(c))
            take_back(s, c);
        left = left || c->ahead;
    }
    return !left && s->undo_left == 0;
}

/* Lock held. Weights that were brought for an update which has to wait now are anybody's again: the backward pass may need their slots. */
static void
hold_back(spw_store *s)
{
    s->held_back = true;
    recall(s);
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        c->pins -= c->held;
        c->held = false;
    }
}

/*
 * What has not gone out when it is looked at first never does. Records that were read ahead go too: a unit reads its chunks in their order,
 * and one that is held further up than that would be a slot for nobody.
 */
spw_status
spw_store_step_undo(spw_store *s, spw_error *err)
{
    still watch = {0};
    pthread_mutex_lock(&s->lock);
    if (s->mode == SPW_STEP_AHEAD && !s->gate_open) {
        s->undoing = true;
        hold_back(s);
        while (!take_back_some(s) && s->poison.status == SPW_OK) {
            spw__store_kick(s);
            spw__store_wait_a_moment(s);
            if (spw__store_still(s, &watch))
                spw__store_fail_still(s, "updates that are to be taken back are waited for");
        }
        for (uint32_t i = 0; i < s->unit_count; i++) {
            unit *u = &s->units[i];
            if (u->op != OP_UPDATE || !u->spare)
                continue;
            spw__store_drop_records(s, u);
            u->load_next = u->job_next = u->done_next = 0;
            spw__store_note_op(s, u);
        }
        s->undoing = false;
        spw__store_kick(s);
    }
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

void
spw_store_step_hold(spw_store *s)
{
    pthread_mutex_lock(&s->lock);
    if (spw__before_gate(s)) {
        hold_back(s);
        spw__store_kick(s); /* windows have nobody to wait for */
    }
    pthread_mutex_unlock(&s->lock);
}
