/*
 * How many micro-batches a pass takes together. In one pass weights come once and gradients leave once, however many there are, but what lies
 * between checkpoints has to be kept for all of them, or is computed again. Several passes need room for one's activations. On a device that
 * need not fetch anything for another pass, and can hold the sums of gradients meanwhile, they move not a byte more: so it is a matter of
 * time, and no bit depends on it.
 */
#include "engine_internal.h"
#include <math.h>
#include <string.h>

/* Weights are not decoded again for each pass, and the first block goes back through its output alone (engine.deferred has no other). */
static bool
may_take_turns(const spw_engine *e, const spw_engine_options *o)
{
    return o->chain_extra == 0 && !e->in_pieces && !e->in_turns && strcmp(e->config.run.frozen_codes, "none") == 0 &&
           e->model->config.inputs_dim == 0;
}

static void
set_group(spw_engine *e, uint32_t group, bool holds)
{
    const bool asked =
        e->config.run.micro_batches_per_pass != 0; /* then sums of tied weights are as they were asked for */
    e->group_max = group;
    e->holds = holds;
    e->defers = !asked && e->model->config.tied && group < e->config.accumulation;
}

void
spw__settle_passes(spw_engine *e, const spw_engine_options *o)
{
    const spw_config *c = &e->config;
    const bool alone = !e->inference && !e->host_addressable && e->comm == NULL && e->world == 1,
               asked = c->run.micro_batches_per_pass != 0, whole = may_take_turns(e, o);
    e->grads_stay = alone && c->zero.offload_optimizer == SPW_TIER_DEVICE && c->run.grad_dtype == SPW_F32;
    if (e->grads_stay && !asked && whole)
        set_group(e, 1, false);
    /* Sums that stay on the device for ever are made where they stay, late updates change weights between passes, and a disk's time is not known. */
    e->may_hold = alone && whole && c->accumulation > 1 && c->zero.offload_optimizer != SPW_TIER_DEVICE &&
                  (asked ? e->group_max < c->accumulation : c->zero.offload_optimizer == SPW_TIER_HOST) &&
                  (!e->device_updates || c->run.grad_dtype == SPW_F32) && strcmp(c->run.gradients, "nvme") != 0 &&
                  c->run.delayed_update == 0;
}

/*
 * How long a step of this plan would take, from estimates of a current server's rates: nothing else hangs on them than which of several
 * plans that move the same bytes is taken. What matters is how many tokens a device computes while the host updates as many parameters.
 */
static double
estimated_seconds(const spw_engine *e)
{
    const double peak = spw_gpu_get_info(e->gpu)->peak_flops, link = 4e10,
                 update = 3.5e8; /* bytes/s; a thread's parameters/s */
    const spw_rates rates = {
        .flops = (peak > 0 ? peak : 4e14) / 2, .optimizer = update * spw__engine_workers(e), .h2d = link, .d2h = link};
    spw_prediction x;
    spw_plan_predict(&e->plan, &rates, 0, &x);
    return x.timed ? x.step_s : INFINITY;
}

/* Takes the plan of so many micro-batches in a pass if it moves no more than `moved`. */
static bool
try_holding(spw_engine *e, const spw_engine_options *o, uint32_t group, const spw_traffic *moved)
{
    const spw_traffic *t = &e->plan.traffic[SPW_PACE_DEFAULT];
    spw_error refused = {0};
    set_group(e, group, true);
    return spw__make_one_plan(e, o, &refused) == SPW_OK && !e->plan.single_grad && t->h2d <= moved->h2d &&
           t->d2h <= moved->d2h && t->nvme_read <= moved->nvme_read && t->nvme_write <= moved->nvme_write;
}

spw_status
spw__choose_passes(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    const bool asked = e->config.run.micro_batches_per_pass != 0;
    const uint32_t first = e->group_max;
    uint32_t best = first;
    bool holds = false;
    spw_error refused = {0};
    spw_traffic moved = {.nvme_read = UINT64_MAX, .nvme_write = UINT64_MAX, .h2d = UINT64_MAX, .d2h = UINT64_MAX};
    double least = INFINITY;
    set_group(e, first, false);
    if (spw__make_one_plan(e, o, &refused) == SPW_OK) {
        if (o->fit_only)
            return SPW_OK;
        moved = e->plan.traffic[SPW_PACE_DEFAULT];
        least = estimated_seconds(e);
    }
    if (asked)
        holds = try_holding(e, o, first, &moved);
    for (uint32_t group = first; !asked && group > 1;) {
        group = (group + 1) / 2;
        if (try_holding(e, o, group, &moved) && estimated_seconds(e) < 0.99 * least) {
            least = estimated_seconds(e);
            best = group;
            holds = true;
        }
    }
    set_group(e, best, holds);
    return spw__make_one_plan(e, o, err);
}
