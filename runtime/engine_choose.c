/*
 * What is open of a plan: how many micro-batches a pass takes together, and how much of the state that is offloaded the device has all the
 * same. No bit depends on either, and what is chosen moves no more bytes than the plan that does without: so it is a matter of time, and the
 * plan with the shortest step is taken, by rates that were measured here before, or else by estimates.
 *
 * In one pass weights come once and gradients leave once, however many micro-batches there are, but what lies between checkpoints has to be
 * kept for all of them, or is computed again. Several passes need room for one's activations. On a device that need not fetch anything for
 * another pass, and can hold the sums of gradients meanwhile, they move nothing more.
 *
 * State on the device crosses no link, and the host need not update it. It takes memory that else would keep what lies between checkpoints.
 * Or weights that stay gathered, which then come over the link again: more bytes there, fewer of a disk, less for the host to do. That is worth
 * it or not by how fast each of them is, so it is done only where all that was measured.
 */
#include "engine_internal.h"
#include <math.h>
#include <string.h>

typedef struct choice {
    uint32_t group; /* micro-batches in a pass */
    bool holds;     /* passes hold the sums of gradients */
    bool fills;     /* the first units' state takes device memory that is left */
    double share;   /* of what is trained, whose state the device has at least */
} choice;

typedef struct search {
    spw_engine *e;
    const spw_engine_options *o;
    choice first, best;
    double least; /* seconds of a step, by estimate; INFINITY: nothing fits yet */
    bool fits;
    spw_traffic moved; /* at most; limits: by what the first plan's device part does */
    uint64_t received; /* from other ranks, at most */
    plan_trial limits;
    spw_rates rates;
    bool best_costs; /* it moves more over the link than the first plan */
} search;

/* How much shorter a step has to be: for a choice that moves no more, for one that moves more over the link, and for memory that is left. */
static const double WORTH = 0.99, WORTH_BYTES = 0.95, WORTH_NOTHING = 1.001;

/* Weights are not decoded again for each pass, and the first block goes back through its output alone (engine.deferred has no other). */
static bool
may_take_turns(const spw_engine *e, const spw_engine_options *o)
{
    return o->chain_extra == 0 && !e->in_pieces && !e->in_turns && strcmp(e->config.run.frozen_codes, "none") == 0 &&
           e->model->config.inputs_dim == 0;
}

static bool
asks_for_passes(const spw_engine *e)
{
    return e->config.run.micro_batches_per_pass != 0;
}

/* Makes the plan of a choice. */
static spw_status
make(const search *s, choice c, spw_error *err)
{
    spw_engine *e = s->e;
    e->group_max = c.group;
    e->holds = c.holds;
    e->defers = e->model->config.tied && c.group < s->first.group;
    e->fills_device = c.fills;
    e->device_share = c.share;
    if (e->may_fill)
        e->device_updates = c.fills;
    return spw__make_one_plan(e, s->o, err);
}

void
spw__settle_choices(spw_engine *e, const spw_engine_options *o)
{
    const spw_config *c = &e->config;
    const bool apart = !e->inference && !e->host_addressable, asked = asks_for_passes(e), whole = may_take_turns(e, o);
    e->device_share = 1 - c->zero.optimizer_ratio;
    e->fills_device = strcmp(c->run.fill_device, "always") == 0;
    e->grads_stay = apart && e->comm == NULL && e->world == 1 && c->zero.offload_optimizer == SPW_TIER_DEVICE &&
                    c->run.grad_dtype == SPW_F32;
    if (e->grads_stay && !asked && whole) {
        e->group_max = 1;
        e->defers = e->model->config.tied && c->accumulation > 1;
    }
    /*
     * Sums that stay on the device for ever are made where they stay, and late updates change weights between passes. Passes that are asked for
     * between ranks are each summed over them by themselves, wherever state lies.
     */
    e->may_hold = apart && whole && (e->world == 1 || !asked) && c->accumulation > 1 &&
                  c->zero.offload_optimizer != SPW_TIER_DEVICE && (!asked || e->group_max < c->accumulation) &&
                  (!e->device_updates || c->run.grad_dtype == SPW_F32) && strcmp(c->run.gradients, "nvme") != 0 &&
                  c->run.delayed_update == 0;
    e->may_fill = !e->inference && !e->host_addressable && !e->device_updates && e->optimizer->rule == NULL &&
                  c->zero.offload_optimizer != SPW_TIER_DEVICE && strcmp(c->run.fill_device, "never") != 0 &&
                  c->run.delayed_update == 0;
}

/* ---------------------------------------------------------------- rates */

/*
 * Estimates of a current server's rates, in place of what was not measured: nothing else hangs on them than which of several plans is taken
 * that move no more bytes than the first. What matters is how many tokens a device computes while the host updates as many parameters.
 */
static spw_rates
estimated_rates(const search *s)
{
    const double peak = spw_gpu_get_info(s->e->gpu)->peak_flops, link = 4e10, disk = 5e9; /* bytes/s */
    const double thread = 3.5e8, memory = 1e10; /* parameters/s: of one, and of as many as keep a host's memory busy */
    const double threads = (double)spw__engine_workers(s->e) * (s->e->plan.cpu_ranks > 1 ? s->e->plan.cpu_ranks : 1);
    spw_rates r = {
        .flops = (peak > 0 ? peak : 4e14) / 2, .optimizer = fmin(thread * threads, memory), .h2d = link, .d2h = link};
    for (uint32_t i = 0; i < SPW_PATHS_MAX; i++)
        r.nvme_read[i] = r.nvme_write[i] = r.nvme_mixed[i] = disk;
    return r;
}

static void
fill_in(double *rate, double guess, bool *all)
{
    *all = *all && *rate > 0;
    *rate = *rate > 0 ? *rate : guess;
}

/* A product by itself is faster than a model is: of the peak half is the most that is counted on. */
static void
settle_rates(search *s)
{
    const spw_rates guess = estimated_rates(s);
    spw_rates *r = &s->rates;
    spw_calibration report;
    bool all = true;
    *r = guess;
    if (s->e->world > 1 || !(s->o->kept_rates || s->o->rates != NULL))
        return; /* all ranks choose alike, whatever their hosts keep */
    if (s->o->rates != NULL)
        *r = *s->o->rates;
    else
        spw_calibrate(r, &s->e->config, &s->e->plan, SPW_CALIBRATE_CACHE_ONLY, &report);
    r->flops = r->flops > 0 ? fmin(r->flops, guess.flops) : guess.flops;
    r->orthogonal = r->orthogonal > 0 ? fmin(r->orthogonal, guess.flops) : r->flops;
    fill_in(&r->optimizer, guess.optimizer, &all);
    fill_in(&r->h2d, guess.h2d, &all);
    fill_in(&r->d2h, guess.d2h, &all);
    for (uint32_t i = 0; i < s->e->plan.path_count; i++) {
        fill_in(&r->nvme_read[i], guess.nvme_read[i], &all);
        fill_in(&r->nvme_write[i], guess.nvme_write[i], &all);
        fill_in(&r->nvme_mixed[i], guess.nvme_mixed[i], &all);
    }
    s->e->measured = all;
}

/* A training's first steps clip, and later ones mostly do not: the mean of both. */
static double
mean_step(const spw_prediction *x)
{
    return x->timed ? (x->step_s + x->clipped_s) / 2 : INFINITY;
}

/* How long a step of this plan would take. */
static double
estimated_seconds(const search *s)
{
    spw_prediction x;
    spw_plan_predict(&s->e->plan, &s->rates, 0, &x);
    return mean_step(&x);
}

double
spw__engine_seconds(spw_engine *e, const spw_engine_options *o, double *uncomputed)
{
    search s = {.e = e, .o = o};
    spw_prediction x;
    settle_rates(&s);
    spw_plan_predict(&e->plan, &s.rates, 0, &x);
    *uncomputed = 0;
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++) {
        if (k != SPW_RESOURCE_COMPUTE && k != SPW_RESOURCE_CPU)
            *uncomputed = fmax(*uncomputed, x.seconds[k]);
    }
    return mean_step(&x);
}

/* ---------------------------------------------------------------- plans beside each other */

/* State may take the place of weights that are gathered. Passes need all of those. */
static bool
may_cost_link(const search *s, choice c)
{
    return s->e->measured && c.fills && c.share > 0 && !c.holds;
}

static uint64_t
received(const spw_plan *p)
{
    return p->gathered.all + p->reduced.all;
}

/* Whether the plan of a choice, for comparison only, fits and moves no more than the first, or only over a link that was measured. */
static bool
stands(const search *s, choice c)
{
    const spw_traffic *t = &s->e->plan.traffic[SPW_PACE_DEFAULT];
    const plan_trial trial = {.away = s->limits.away,
                              .single_grad = s->limits.single_grad && !c.holds,
                              .has_state = c.fills && !s->first.fills,
                              .gathered = s->limits.gathered};
    spw_error refused = {0};
    spw_status st;
    s->e->trial = &trial;
    st = make(s, c, &refused);
    s->e->trial = NULL;
    return st == SPW_OK && (t->h2d <= s->moved.h2d || may_cost_link(s, c)) && t->d2h <= s->moved.d2h &&
           t->nvme_read <= s->moved.nvme_read && t->nvme_write <= s->moved.nvme_write &&
           received(&s->e->plan) <= s->received;
}

/* The first plan, which others are held to. */
static void
begin_with(search *s, choice c)
{
    const spw_plan *p = &s->e->plan;
    s->best = c;
    s->fits = true;
    s->least = estimated_seconds(s);
    s->moved = p->traffic[SPW_PACE_DEFAULT];
    s->received = received(p);
    s->limits.gathered = p->cache_device;
    s->limits.single_grad = p->single_grad;
    s->limits.away = p->activation_count[SPW_TIER_HOST] + p->activation_count[SPW_TIER_NVME];
}

/* Takes a choice that is worth it. What lies in memory that is left costs nothing, so that it need only not be slower. */
static void
try_choice(search *s, choice c)
{
    double worth = c.fills && c.share == 0 && !s->best.fills ? WORTH_NOTHING : WORTH, seconds;
    if ((s->o->fit_only && s->fits) || !stands(s, c))
        return;
    if (s->e->plan.traffic[SPW_PACE_DEFAULT].h2d > s->moved.h2d && !s->best_costs)
        worth = WORTH_BYTES;
    seconds = estimated_seconds(s);
    if (s->fits && seconds >= worth * s->least)
        return;
    s->best_costs = s->e->plan.traffic[SPW_PACE_DEFAULT].h2d > s->moved.h2d;
    s->best = c;
    s->least = seconds;
    s->fits = true;
}

/* Passes of half as many micro-batches, of half of that, and so on, or as many as are asked for. */
static void
try_passes(search *s, choice c)
{
    c.holds = s->e->may_hold && (!c.fills || s->e->config.run.grad_dtype == SPW_F32);
    if (!c.holds)
        return;
    if (asks_for_passes(s->e)) {
        try_choice(s, c);
        return;
    }
    while (c.group > 1) {
        c.group = (c.group + 1) / 2;
        try_choice(s, c);
    }
}

static void
try_state(search *s, double share)
{
    choice c = s->first;
    c.fills = true;
    c.share = share;
    try_choice(s, c);
    try_passes(s, c);
}

/* Of the state what finds room, quarters, and about the best of those eighths and sixteenths. */
static void
try_more_state(search *s)
{
    for (int k = 0; k <= 4; k++)
        try_state(s, k / 4.0);
    for (double step = 0.125; step > 0.05; step /= 2) {
        const double middle = s->best.fills ? s->best.share : 0;
        for (int side = -1; side <= 1; side += 2) {
            if (middle + side * step > 0 && middle + side * step < 1)
                try_state(s, middle + side * step);
        }
    }
}

spw_status
spw__choose_plan(spw_engine *e, const spw_engine_options *o, spw_error *err)
{
    search s = {.e = e,
                .o = o,
                .first = {.group = e->group_max, .fills = e->fills_device, .share = e->device_share},
                .least = INFINITY,
                .moved = {.nvme_read = UINT64_MAX, .nvme_write = UINT64_MAX, .h2d = UINT64_MAX, .d2h = UINT64_MAX},
                .received = UINT64_MAX,
                .limits = {.away = UINT32_MAX, .single_grad = true}};
    choice held = s.first;
    bool stood;
    if (!e->may_hold && !e->may_fill)
        return spw__make_one_plan(e, o, err);
    s.best = s.first;
    stood = stands(&s, s.first);
    settle_rates(&s); /* the plan has its paths, whether it fits or not */
    if (stood)
        begin_with(&s, s.first);
    held.holds = true;
    if (e->may_hold && asks_for_passes(e) && stands(&s, held))
        begin_with(&s, held);
    else if (!asks_for_passes(e))
        try_passes(&s, s.first);
    if (e->may_fill)
        try_more_state(&s);
    e->displaces = s.best_costs;
    return make(&s, s.best, err);
}
