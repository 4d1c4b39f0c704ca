/*
 * A store that stands still: somebody waits in it, nothing is under way that could end the wait, and the mover has looked
 * again and started nothing. That is a defect, of the store or of a caller who waits for an update that nobody released. It
 * ends with an error that says who holds what, and not with a process that hangs. Called by whoever waits, lock held.
 */
#include "offload_internal.h"

/* A round is a millisecond or less, and the mover is kicked in each. */
enum { STILL_ROUNDS = 2000, STILL_PASSES = 3 };

/* Transfers, copies, jobs; or what another thread is to bring or to give back, however long that takes. */
static bool
moves(const spw_store *s)
{
    if (s->aio_inflight + s->copies_inflight + s->jobs_running > 0 || s->verify_head != NULL || s->job_head != NULL ||
        s->passing_head != NULL || s->sum_head != NULL)
        return true;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const unit *u = &s->units[i];
        bool gradient = u->op == OP_UPDATE && !u->grad_ready && (s->gate_open || u->window >= 0);
        bool read = u->pins > 0 && (u->op == OP_EDIT || u->op == OP_INIT || (u->op == OP_UPDATE && u->direct));
        if (gradient || read || u->half == H_BETWEEN)
            return true;
    }
    return false;
}

static const char *const device_names[] = {"not there", "being filled", "there"};
static const char *const op_names[] = {"none", "update", "init", "visit", "edit"};
static const char *const weight_names[] = {"empty", "read", "verified", "clean", "updated", "dirty", "written"};
static const char *const record_names[] = {"none", "empty", "read", "ready", "updated", "dirty", "written"};

static void
tell_unit(const spw_store *s, const unit *u)
{
    spw_log(SPW_LOG_WARN,
            "unit %u: generation %llu, on the device %s (generation %llu, %u of %u chunks copied, %u pins)%s; "
            "operation %s%s, chunks loaded to %u, handed out to %u, done to %u",
            (uint32_t)(u - s->units), (unsigned long long)u->generation, device_names[u->d],
            (unsigned long long)u->device_generation, u->copied_count, u->plan.chunk_count, u->pins,
            u->wanted ? ", wanted" : "", op_names[u->op],
            u->op == OP_UPDATE && u->grad_ready ? " with its gradient" : "", u->load_next, u->job_next, u->done_next);
}

static void
tell_chunk(const spw_store *s, const chunk *c)
{
    (void)s;
    spw_log(SPW_LOG_WARN, "chunk %u of unit %u: generation %llu, weights %s in slot %d (%u pins), record %s in slot %d",
            c->idx, c->plan.unit_idx, (unsigned long long)c->generation, weight_names[c->w], c->weight_slot, c->pins,
            record_names[c->r], c->record_slot);
}

/* Whoever has something that others may lack. */
static void
tell(const spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const unit *u = &s->units[i];
        if (u->d != D_NONE || u->wanted || (u->op != OP_NONE && (u->op != OP_UPDATE || u->grad_ready)))
            tell_unit(s, u);
    }
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        const chunk *c = &s->chunks[i];
        if (c->weight_slot >= 0 || c->record_slot >= 0)
            tell_chunk(s, c);
    }
}

bool
spw__store_still(spw_store *s, still *watch)
{
    if (watch->rounds == 0 || watch->ended != s->ended || moves(s)) {
        *watch = (still){.rounds = 1, .passes = s->passes, .ended = s->ended};
        return false;
    }
    spw__store_kick(s);
    return ++watch->rounds > STILL_ROUNDS && s->passes - watch->passes >= STILL_PASSES;
}

void
spw__store_fail_still(spw_store *s, const char *what)
{
    spw_error err = {0};
    (void)SPW_RAISE(&err, SPW_ETIMEDOUT,
                    "%s: nothing is under way that it could come from (step %s, gate %s, %u of %u record slots free). "
                    "Either no update leads there, or this is a defect of Spillway; the log says who holds what",
                    what, s->step_open ? "open" : "closed", s->gate_open ? "open" : "closed", s->record_slot_free_count,
                    s->cfg.record_slot_count);
    tell(s);
    spw__store_poison(s, &err);
}
