/*
 * Updates that are made a step late (Ren et al. 2021, ZeRO-Offload, section 5.2, delayed parameter update): a step's gradient stays in
 * host memory, and each unit's update with it runs beside the next step's backward pass, from the unit's last use there on; records are
 * read ahead beside its forward pass. Both passes of a step see the same weights, those before that update. Nothing waits for a norm, and
 * nothing has to be taken back. The next gradient of a unit comes where the last one was, so it waits for the unit's update, and all of
 * them are done when the step is. Whoever saves settles first: what waits is made, and the next step has nothing to make.
 */
#include "engine_internal.h"

bool
spw__late_step(const spw_engine *e)
{
    const uint64_t after = e->config.run.delayed_update;
    return after > 0 && e->updates >= after;
}

void
spw__late_keep(spw_engine *e, double lr, double scale)
{
    e->late.pending = true;
    e->late.lr = lr;
    e->late.scale = scale;
    memcpy(e->late.units, e->takes_part, e->layout.unit_count * sizeof *e->late.units);
}

spw_status
spw__late_begin(spw_engine *e, spw_error *err)
{
    if (!e->late.pending)
        return SPW_OK;
    spw_store_step_begin(e->store, e->late.units, SPW_STEP_LATE);
    SPW_TRY(spw_store_check(e->store, err));
    SPW_TRY(spw__set_coefficients(e, e->late.lr, e->late.scale, err));
    spw_store_step_go(e->store);
    e->late.pending = false;
    e->late.runs = true;
    return SPW_OK;
}

void
spw__late_may(spw_engine *e, uint32_t unit_idx)
{
    if (e->late.runs && e->late.units[unit_idx])
        spw_store_grad_ready(e->store, unit_idx);
}

void
spw__late_end(spw_engine *e)
{
    if (!e->late.runs)
        return;
    for (uint32_t u = 0; u < e->layout.unit_count; u++) { /* another chain may not have used it */
        spw__late_may(e, u);
        e->generations[u] += e->late.units[u];
    }
    e->told.goes_on = false;
    e->updates++;
    e->late.runs = false;
}

spw_status
spw__engine_settle(spw_engine *e, spw_error *err)
{
    SPW_TRY(spw__engine_unbroken(e, err));
    if (!e->late.pending)
        return SPW_OK;
    SPW_TRY(spw__engine_forget(e, err)); /* what ranks gathered for the next step, as weights were */
    SPW_TRY(spw__late_begin(e, err));
    spw__late_end(e);
    spw__tell_future(e, MODE_TRAIN);
    return SPW_OK;
}
