/*
 * Where gradients wait for their updates: in host memory, which is lent to records once they are consumed; on a device that
 * updates its units; or, of units that spill, on nvme beside the records. There a gradient comes into a window, of which there
 * are a few, each as large as the largest such unit. It leaves for the swap file when a window may be missed and updates must
 * wait, chunk by chunk, and comes back behind the chunk's record in the record's slot:
 *
 *   NONE -> WINDOW -> SUMMING -> LEAVING -> AWAY -> COMING -> THERE -> NONE
 *
 * An update that may run takes it from the window as well; so without clipping none is ever written, and where updates wait for the gate
 * those that came last are not. Where they are ahead of it (ahead.c) they consume gradients, too, and should they have to be taken back,
 * gradients are made a second time: what spills is then of no use any more, and is dropped.
 */
#include "offload_internal.h"

static uint64_t
grad_bytes(const spw_store *s, uint64_t elems)
{
    return elems * spw_dtype_bytes(s->cfg.grad_dtype);
}

static char *
window_of(const spw_store *s, const unit *u)
{
    return s->window_memory + (uint64_t)u->window * s->window_bytes;
}

char *
spw__store_grad_of(const spw_store *s, const chunk *c)
{
    const unit *u = &s->units[c->plan.unit_idx];
    uint64_t at = grad_bytes(s, c->plan.first - u->plan.first);
    if (!u->plan.spills)
        return (char *)u->grad + at;
    return c->g == G_COMING || c->g == G_THERE ? (char *)c->record + spw_round_up(spw__chunk_record(s, c), 4096)
                                               : window_of(s, u) + at;
}

void *
spw_store_grad(spw_store *s, uint32_t unit_idx)
{
    const unit *u = &s->units[unit_idx];
    return u->plan.spills ? window_of(s, u) : u->grad;
}

bool
spw_store_grad_on_device(const spw_store *s, uint32_t unit_idx)
{
    return s->units[unit_idx].on_device;
}

/* ---------------------------------------------------------------- memory that is lent to records */

void
spw__store_hold_grad(spw_store *s, chunk *c, bool held)
{
    if (c->grad_held == held)
        return;
    c->grad_held = held;
    for (uint32_t i = c->loan_first; i < c->loan_end; i++)
        s->loans[i].held = held ? s->loans[i].held + 1 : s->loans[i].held - 1;
}

void
spw__store_hold_unit(spw_store *s, const unit *u)
{
    for (uint32_t k = 0; k < u->plan.chunk_count; k++)
        spw__store_hold_grad(s, &s->chunks[u->plan.chunk_first + k], true);
}

/* A chunk whose record lies where the unit's gradient goes, NULL if there is none; all such chunks are rushed out. */
static const chunk *
in_the_way(spw_store *s, const unit *u)
{
    const chunk *found = NULL;
    for (uint32_t k = 0; k < u->plan.chunk_count; k++) {
        const chunk *c = &s->chunks[u->plan.chunk_first + k];
        for (uint32_t i = c->loan_first; i < c->loan_end; i++) {
            if (s->loans[i].chunk != NULL) {
                spw__store_rush(s, s->loans[i].chunk, s->loans[i].chunk->r != R_WRITING);
                found = s->loans[i].chunk;
            }
        }
    }
    return found;
}

/* ---------------------------------------------------------------- windows */

/* False: all are taken. */
static bool
take_window(spw_store *s, unit *u)
{
    for (uint32_t i = 0; i < s->cfg.grad_window_count && u->window < 0 && u->plan.chunk_count > 0; i++) {
        if (s->windows[i] != NULL)
            continue;
        s->windows[i] = u;
        s->window_free--;
        u->window = (int32_t)i;
        u->grad_turn = ++s->grad_turns;
    }
    return u->window >= 0 || u->plan.chunk_count == 0;
}

static void
free_window(spw_store *s, unit *u)
{
    s->windows[u->window] = NULL;
    s->window_free++;
    u->window = -1;
    pthread_cond_broadcast(&s->main_cond);
}

void
spw__store_leave_window(spw_store *s, chunk *c, g_state g)
{
    unit *u = &s->units[c->plan.unit_idx];
    if (s->cfg.chaos_seed != 0)
        memset(window_of(s, u) + grad_bytes(s, c->plan.first - u->plan.first), 0xff, grad_bytes(s, c->plan.elems));
    c->g = g;
    if (--u->in_window == 0)
        free_window(s, u);
}

/* Idle but for gradients on their way. What a skipped step left is not wanted any more. */
void
spw__store_drop_grads(spw_store *s)
{
    for (uint32_t i = 0; i < s->chunk_count && s->cfg.grad_window_count > 0; i++) {
        chunk *c = &s->chunks[i];
        while ((c->g == G_SUMMING || c->g == G_LEAVING || c->g == G_COMING) && s->poison.status == SPW_OK)
            pthread_cond_wait(&s->main_cond, &s->lock);
        if (s->poison.status != SPW_OK)
            return; /* transfers may be under way still */
        if (c->g == G_WINDOW)
            spw__store_leave_window(s, c, G_NONE);
        c->g = G_NONE;
    }
    for (uint32_t i = 0; i < s->cfg.grad_window_count; i++) {
        if (s->windows[i] != NULL)
            free_window(s, s->windows[i]); /* taken, and no gradient came */
    }
}

/* The unit whose gradient has been in its window the longest, and has no update that may run; NULL: none is whole, or one is leaving already. */
static unit *
next_to_leave(spw_store *s)
{
    unit *first = NULL;
    for (uint32_t i = 0; i < s->cfg.grad_window_count; i++) {
        unit *u = s->windows[i];
        if (u != NULL && u->grad_ready && !spw__runs_ahead(s, u) && (first == NULL || u->grad_turn < first->grad_turn))
            first = u;
    }
    return s->grads_leaving > 0 ? NULL : first;
}

/* No update will begin from them. What a job has is left by that. */
static void
drop_windows(spw_store *s)
{
    for (uint32_t i = 0; i < s->cfg.grad_window_count; i++) {
        unit *u = s->windows[i];
        for (uint32_t k = 0; u != NULL && u->grad_ready && k < u->plan.chunk_count; k++) {
            chunk *c = &s->chunks[u->plan.chunk_first + k];
            if (c->g == G_WINDOW && !c->started)
                spw__store_leave_window(s, c, G_NONE);
        }
    }
}

/* The mover's: what has its checksum goes out; when no window is free and no update may run, the oldest gradient begins to. */
void
spw__store_schedule_grads(spw_store *s)
{
    unit *u;
    for (chunk *c; (c = s->summed_head) != NULL;) {
        s->summed_head = c->next_grad;
        spw__store_submit_grad(s, c, SPW_AIO_WRITE);
    }
    if (spw__must_come_again(s)) {
        drop_windows(s);
        return;
    }
    if (s->window_free > 0 || s->gate_open || (u = next_to_leave(s)) == NULL)
        return;
    for (uint32_t k = 0; k < u->plan.chunk_count; k++) {
        chunk *c = &s->chunks[u->plan.chunk_first + k];
        if (c->g != G_WINDOW)
            continue;
        s->grads_leaving++;
        c->g = s->cfg.integrity ? G_SUMMING : G_LEAVING;
        if (!s->cfg.integrity) {
            spw__store_submit_grad(s, c, SPW_AIO_WRITE);
            continue;
        }
        c->next_grad = s->sum_head;
        s->sum_head = c;
        pthread_cond_signal(&s->work_cond);
    }
}

/* ---------------------------------------------------------------- the caller's part */

/* LATE: the gradient of the step before is still there for its update. */
static bool
in_use(const spw_store *s, const unit *u)
{
    return s->mode == SPW_STEP_LATE && u->op == OP_UPDATE;
}

bool
spw_store_grad_ask(spw_store *s, uint32_t unit_idx)
{
    const unit *u = &s->units[unit_idx];
    bool free;
    pthread_mutex_lock(&s->lock);
    spw__store_hold_unit(s, u);
    free = u->plan.spills ? s->window_free > 0
                          : !in_use(s, u) && in_the_way(s, u) == NULL; /* not taken: another's may come first */
    if (!free)
        spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
    return free;
}

/* c: whose record lies in the way; NULL: a window is wanted. */
static spw_stall
memory_cause(const spw_store *s, const chunk *c)
{
    if (c == NULL)
        return s->gate_open || spw__before_gate(s) ? SPW_STALL_OPTIMIZER : SPW_STALL_NVME_WRITE;
    return c->r == R_READING ? SPW_STALL_NVME_READ : c->r == R_UPDATING ? SPW_STALL_OPTIMIZER : SPW_STALL_NVME_WRITE;
}

spw_status
spw_store_grad_open(spw_store *s, uint32_t unit_idx, spw_error *err)
{
    unit *u = &s->units[unit_idx];
    const chunk *c = NULL;
    still watch = {0};
    pthread_mutex_lock(&s->lock);
    spw__store_hold_unit(s, u);
    while (s->poison.status == SPW_OK &&
           (in_use(s, u) || (c = in_the_way(s, u)) != NULL || (u->plan.spills && !take_window(s, u)))) {
        spw_stall cause = in_use(s, u) ? spw__store_stall_cause(s, u, u->generation) : memory_cause(s, c);
        uint64_t begin = spw_now_ns();
        spw__store_kick(s);
        spw__store_wait_a_moment(s);
        s->stats.stall_ns[cause] += spw_now_ns() - begin;
        if (spw__store_still(s, &watch))
            spw__store_fail_still(s, "memory for a gradient is waited for");
    }
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

void
spw_store_grad_ready(spw_store *s, uint32_t unit_idx)
{
    unit *u = &s->units[unit_idx];
    pthread_mutex_lock(&s->lock);
    u->grad_ready = true;
    spw__store_note_op(s, u);
    u->in_window = u->plan.spills ? u->plan.chunk_count : 0;
    for (uint32_t k = 0; k < u->plan.chunk_count && u->plan.spills; k++)
        s->chunks[u->plan.chunk_first + k].g = G_WINDOW;
    spw__store_kick(s);
    pthread_mutex_unlock(&s->lock);
}
