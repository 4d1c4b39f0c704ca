/*
 * Visits of many chunks: sweeps, for which the store comes to rest, and snapshots, which see every chunk as it was at one
 * generation while training goes on.
 */
#include "offload_internal.h"

/* Records that were read ahead for a step that never ran go back, so that a sweep starts from rest. */
void
spw__store_drop_read_ahead(spw_store *s)
{
    for (uint32_t i = 0; i < s->unit_count; i++)
        spw__store_end_op(s, &s->units[i]);
    for (uint32_t i = 0; i < s->unit_count; i++)
        spw__store_drop_records(s, &s->units[i]);
}

/* Lock held. After a failure others may still be at work with what the caller is going to free. */
static void
wait_jobs(spw_store *s)
{
    while (s->jobs_running > 0)
        spw__store_wait_a_moment(s);
}

/* Lock held. Chunks [first, end). */
static void
run_sweep(spw_store *s, unit_op op, uint32_t first, uint32_t end, spw_store_fn fn, void *ctx)
{
    spw__store_wait_idle(s);
    spw__store_close_step(s);
    spw__store_drop_read_ahead(s);
    s->sweep_fn = fn;
    s->sweep_ctx = ctx;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        unit *u = &s->units[i];
        uint32_t at = u->plan.chunk_first, count = u->plan.chunk_count;
        if (first < at + count && at < end)
            spw__store_begin_op(s, u, op, first > at ? first - at : 0, end - at < count ? end - at : count);
    }
    spw__store_kick(s);
    spw__store_wait_idle(s);
    wait_jobs(s);
}

spw_status
spw_store_sweep(spw_store *s, spw_sweep mode, spw_store_fn fn, void *ctx, spw_error *err)
{
    SPW_ASSERT(mode != SPW_SWEEP_EDIT);
    (void)spw_store_step_undo(s, NULL); /* of a step that broke off: its jobs are no visits */
    pthread_mutex_lock(&s->lock);
    if (s->snap_fn != NULL) {
        pthread_mutex_unlock(&s->lock);
        return SPW_RAISE(err, SPW_EINVAL, "a sweep while a snapshot is under way");
    }
    s->stats.frozen_edits += mode == SPW_SWEEP_INIT;
    run_sweep(s, mode == SPW_SWEEP_INIT ? OP_INIT : OP_VISIT, 0, s->chunk_count, fn, ctx);
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}

static bool
any_in_place(const spw_store *s, uint32_t first, uint32_t count)
{
    bool any = false;
    for (uint32_t i = first; i < first + count; i++)
        any = any || spw__in_place(&s->chunks[i].plan);
    return any;
}

/* Of these numbers are shown, and nothing makes codes of them. */
static bool
any_published(const spw_store *s, uint32_t first, uint32_t count)
{
    bool any = false;
    for (uint32_t i = first; i < first + count; i++)
        any = any || spw_codes_group(spw__store_code_form(&s->cfg, &s->chunks[i].plan)) > 0;
    return any;
}

static bool
any_frozen(const spw_store *s, uint32_t first, uint32_t count)
{
    bool any = false;
    for (uint32_t i = first; i < first + count; i++)
        any = any || !s->units[s->chunks[i].plan.unit_idx].plan.trainable;
    return any;
}

spw_status
spw_store_sweep_some(spw_store *s, spw_sweep mode, uint32_t first, uint32_t count, spw_store_fn fn, void *ctx,
                     spw_error *err)
{
    const char *why = NULL;
    SPW_TRY(spw_store_check(s, err));
    SPW_ASSERT(mode != SPW_SWEEP_INIT);
    pthread_mutex_lock(&s->lock);
    if (s->snap_fn != NULL)
        why = "while a snapshot is under way";
    else if (s->step_open && !s->gate_open)
        why = "in the middle of a step";
    else if (first > s->chunk_count || count > s->chunk_count - first)
        why = "of chunks that are not there";
    else if (mode == SPW_SWEEP_EDIT && any_in_place(s, first, count))
        why = "that edits frozen weights in the files they come from";
    else if (mode == SPW_SWEEP_EDIT && any_published(s, first, count))
        why = "that edits frozen weights which are kept in the codes they were published in";
    else if (count > 0) {
        s->stats.frozen_edits += mode == SPW_SWEEP_EDIT && any_frozen(s, first, count);
        run_sweep(s, mode == SPW_SWEEP_EDIT ? OP_EDIT : OP_VISIT, first, first + count, fn, ctx);
    }
    pthread_mutex_unlock(&s->lock);
    return why == NULL ? spw_store_check(s, err) : SPW_RAISE(err, SPW_EINVAL, "a sweep %s", why);
}

spw_status
spw_store_snapshot_begin(spw_store *s, const uint64_t *generations, bool trained, spw_store_fn fn, void *ctx,
                         spw_error *err)
{
    SPW_TRY(spw_store_check(s, err));
    pthread_mutex_lock(&s->lock);
    if (s->snap_fn != NULL) {
        pthread_mutex_unlock(&s->lock);
        return SPW_RAISE(err, SPW_EINVAL, "a snapshot while another one is under way");
    }
    s->snap_fn = fn;
    s->snap_ctx = ctx;
    s->snap_left = s->snap_next = 0;
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunk *c = &s->chunks[i];
        c->snap = !trained || s->units[c->plan.unit_idx].plan.trainable;
        s->snap_left += c->snap;
        c->snap_generation = generations[c->plan.unit_idx];
        SPW_ASSERT(c->generation == c->snap_generation || c->generation + 1 == c->snap_generation);
    }
    pthread_cond_broadcast(&s->work_cond);
    pthread_mutex_unlock(&s->lock);
    return SPW_OK;
}

/* Lock held. Visits the units that the snapshot lacks: whole ones, since updates that were released have come to an end. */
static void
sweep_rest(spw_store *s)
{
    spw__store_wait_idle(s);
    spw__store_close_step(s);
    s->snap_sweep = true;
    while (s->snap_idle > 0)
        pthread_cond_wait(&s->main_cond, &s->lock);
    spw__store_drop_read_ahead(s);
    s->sweep_fn = s->snap_fn;
    s->sweep_ctx = s->snap_ctx;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const unit *u = &s->units[i];
        bool lacks = false;
        for (uint32_t k = 0; k < u->plan.chunk_count; k++)
            lacks = lacks || s->chunks[u->plan.chunk_first + k].snap;
        if (lacks)
            spw__store_begin_op(s, &s->units[i], OP_VISIT, 0, u->plan.chunk_count);
    }
    spw__store_kick(s);
    spw__store_wait_idle(s);
}

spw_status
spw_store_snapshot_finish(spw_store *s, spw_error *err)
{
    (void)spw_store_step_undo(s, NULL); /* as before a sweep */
    pthread_mutex_lock(&s->lock);
    if (s->snap_left > 0 && s->poison.status == SPW_OK)
        sweep_rest(s);
    if (s->poison.status != SPW_OK)
        wait_jobs(s);
    SPW_ASSERT(s->snap_left == 0 || s->poison.status != SPW_OK);
    for (uint32_t i = 0; i < s->chunk_count; i++)
        s->chunks[i].snap = false;
    s->snap_left = 0;
    s->snap_sweep = false;
    s->snap_fn = NULL;
    pthread_mutex_unlock(&s->lock);
    return spw_store_check(s, err);
}
