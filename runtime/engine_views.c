/*
 * What others see of an engine between two steps, and may set in it: its parts, its chain of blocks, its counts, all of its state.
 */
#include "engine_internal.h"

spw_status
spw_engine_set_chain(spw_engine *e, const uint32_t *blocks, uint32_t count, spw_error *err)
{
    bool reads = spw__choices_bytes(e) > 0;
    if (count < 2 || count > e->chain_max || blocks[0] != 0 || blocks[count - 1] != e->model->block_count - 1)
        return SPW_RAISE(err, SPW_EINVAL, "a chain has 2 to %u blocks and starts and ends with the model's own",
                         e->chain_max);
    for (uint32_t k = 0; k < SPW_SIDES_MAX; k++)
        reads = reads || spw_model_side_cols(&e->model->config, k) > 0;
    if (reads)
        return SPW_RAISE(err, SPW_EINVAL, "blocks of this model read what others have left: its chain is the model's");
    for (uint32_t i = 0; i < count; i++) {
        if (blocks[i] >= e->model->block_count || (i > 0 && blocks[i] == 0))
            return SPW_RAISE(err, SPW_EINVAL,
                             "block %u at position %u of the chain does not exist or cannot stand there", blocks[i], i);
    }
    if (!e->inference && spw__kept_slots(e, blocks, spw__lowest_trained(e, blocks, count), count) > e->kept_slots)
        return SPW_RAISE(err, SPW_EINVAL,
                         "this chain keeps %u blocks' inputs for its backward pass, and the plan, which ends it at the "
                         "model's lowest trained block, has room for %u: make the engine with chain_extra",
                         spw__kept_slots(e, blocks, spw__lowest_trained(e, blocks, count), count), e->kept_slots);
    e->grads_there = false; /* another chain may leave out what has one */
    memcpy(e->chain, blocks, count * sizeof *blocks);
    e->chain_count = count;
    spw__note_uses(e);
    return SPW_OK;
}

saved_model *
spw__engine_saved(spw_engine *e)
{
    return &e->saved;
}

const spw_checkpoint_job **
spw__engine_saving(spw_engine *e)
{
    return &e->saving;
}

void
spw_engine_set_rates(spw_engine *e, const spw_rates *rates)
{
    e->rates = *rates;
}

spw_status
spw_engine_sum(spw_engine *e, double *values, uint32_t count, spw_error *err)
{
    return e->ranks == NULL ? SPW_OK : spw__ranks_sum(e->ranks, values, count, err);
}

spw_status
spw_engine_drain(spw_engine *e, spw_error *err)
{
    e->counting = false;
    return spw_store_drain(e->store, err);
}

const spw_plan *
spw_engine_plan(const spw_engine *e)
{
    return &e->plan;
}

const spw_layout *
spw_engine_layout(const spw_engine *e)
{
    return &e->layout;
}

spw_store *
spw_engine_store(spw_engine *e)
{
    return e->store;
}

spw_gpu *
spw_engine_gpu(spw_engine *e)
{
    return e->gpu;
}

const spw_model *
spw_engine_model(const spw_engine *e)
{
    return e->model;
}

uint64_t
spw_engine_updates(const spw_engine *e)
{
    return e->updates + e->late.pending;
}

void
spw_engine_set_updates(spw_engine *e, uint64_t updates)
{
    e->updates = updates;
    e->step_count = updates;
}

void
spw__engine_set_steps(spw_engine *e, uint64_t steps)
{
    if (steps > e->step_count) /* a caller that keeps no count of them has skipped none */
        e->step_count = steps;
}

const spw_loss_scaler *
spw_engine_loss_scaler(const spw_engine *e)
{
    return &e->scaler;
}

/* Whether there is one, and whether it moves, is this run's configuration to say. */
void
spw_engine_set_loss_scaler(spw_engine *e, const spw_loss_scaler *scaler)
{
    if (e->scaler.dynamic)
        e->scaler = *scaler;
    e->scaler.dynamic = e->config.fp16 && e->config.loss_scale.fixed == 0;
}

bool
spw__engine_writes(const spw_engine *e)
{
    return e->rank < e->layout.parts;
}

uint32_t
spw__engine_rank(const spw_engine *e)
{
    return e->rank;
}

uint32_t
spw__engine_machine_ranks(const spw_engine *e)
{
    return e->local_world;
}

uint32_t
spw__engine_world(const spw_engine *e)
{
    return e->world;
}

spw_state_format
spw__engine_format(const spw_engine *e)
{
    return e->config.run.state_format;
}

const uint64_t *
spw__engine_generations(const spw_engine *e)
{
    return e->generations;
}

const spw_optimizer *
spw__optimizer_for(const spw_optimizer *configured, bool whole)
{
    return configured == &spw_opt_muon && !whole ? &spw_opt_adam : configured;
}

const spw_optimizer *
spw__engine_optimizer(const spw_engine *e, uint32_t unit_idx)
{
    return spw__optimizer_for(e->optimizer, e->layout.units[unit_idx].whole);
}

const spw_config *
spw__engine_config(const spw_engine *e)
{
    return &e->config;
}

spw_status
spw__engine_forget(spw_engine *e, spw_error *err)
{
    return e->ranks == NULL ? SPW_OK : spw__ranks_forget(e->ranks, err);
}

/* What fills chunks, unless it is to stop: of large models on disks that takes long. */
typedef struct fill_job {
    const spw_engine *e;
    spw_store_fn fn;
    void *ctx;
} fill_job;

static spw_status
fill_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    const fill_job *job = ctx;
    if (job->e->stop != NULL && *job->e->stop)
        return SPW_RAISE(err, SPW_ECANCELED, "stopped while weights were drawn or loaded: nothing was computed");
    return job->fn(job->ctx, chunk_idx, weights, record, grad, err);
}

spw_status
spw__engine_fill(spw_engine *e, spw_store_fn fn, void *ctx, spw_error *err)
{
    fill_job job = {e, fn, ctx};
    SPW_TRY(spw__engine_forget(e, err));
    e->fills++;
    SPW_TRY(spw_store_sweep(e->store, SPW_SWEEP_INIT, fill_chunk, &job, err));
    memset(e->generations, 0, e->layout.unit_count * sizeof *e->generations); /* as the store counts them now */
    e->grads_there = e->late.pending = e->told.goes_on = false;
    return SPW_OK;
}
