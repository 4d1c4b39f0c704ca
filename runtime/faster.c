/*
 * Settings with which a step is shorter and no bit of a training another: where state lies, how much memory may be used, what is kept, how
 * far weights may be gathered ahead and where they are gathered from. By
 * predictions alone, each from a plan: of all changes the one that shortens a step most is made, on top of those before it, until none
 * shortens it by 2%. Then those that turn out not to be needed are taken back. What would change a sum's order, micro-batches, pieces of the
 * vocabulary, experts in turns, is not among them, nor are late updates.
 */
#include "runtime_internal.h"
#include <math.h>
#include <stdio.h>

typedef enum change {
    OPTIMIZER_UP, /* of two that are as good the one that comes first here */
    PARAM_UP,
    BOTH_UP,
    HOST_MEMORY,
    DEVICE_MEMORY,
    FILL,
    RATIO,
    AHEAD,
    RECOMPUTE,
    ACTIVATIONS,
    LIVE,      /* the bounds on what is gathered, which files for DeepSpeed set */
    KEPT_NEAR, /* between hosts: the second time in a step from ranks of this one */
    CHANGE_COUNT
} change;

/* The first, rounds of one more change each, then without each, with two budgets, and with the first of those found, the first two and so on. */
enum { TRIED_MAX = 1 + (CHANGE_COUNT + 1) * CHANGE_COUNT + CHANGE_COUNT + 2 + CHANGE_COUNT };

static const uint64_t unbounded = 1000000000000000000;

/* One configuration, planned. */
typedef struct tried {
    uint64_t config; /* checksum */
    double seconds;  /* INFINITY: it does not fit, is refused, or has no times */
    uint64_t host_bytes;
    spw_prediction step;
} tried;

typedef struct search {
    const spw_engine_options *options;
    const spw_plan *first; /* of the configuration as it is; rates are by its paths */
    const spw_rates *rates;
    spw_config trial;
    spw_plan plan;
    uint64_t budget; /* of host memory that HOST_MEMORY gives; 0: how much there is is not known */
    change done[CHANGE_COUNT];
    uint32_t done_count;
    tried tried[TRIED_MAX]; /* changes in another order, or without one of them again, often come to the same */
    uint32_t tried_count;
} search;

/* Seven eighths of what there is: a budget is meant for the next process, which may find a little less. */
static uint64_t
most_memory(const search *s)
{
    const spw_plan *p = s->first;
    const uint64_t room = s->options->room_bytes > 0 ? s->options->room_bytes
                                                     : spw_memory_room_bytes(0, p->cpu_ranks > 1 ? p->cpu_ranks : 1);
    const uint64_t all = p->process_host + room, device = p->device_apart ? 0 : p->device_bytes;
    return room > 0 && all > device ? (all - device) / 8 * 7 >> 20 << 20 : 0;
}

static bool
move_up(spw_tier *tier, bool device_apart)
{
    const bool moves = *tier == SPW_TIER_NVME || (*tier == SPW_TIER_HOST && device_apart);
    *tier = moves ? (spw_tier)(*tier - 1) : *tier;
    return moves;
}

/* One change; false: there is nothing of it to do. */
static bool
apply(const search *s, spw_config *c, change what)
{
    const bool apart = s->first->device_apart;
    switch (what) {
    case HOST_MEMORY:
        if (s->budget == 0 || (c->run.host_memory != SPW_AUTO && c->run.host_memory >= s->budget))
            return false;
        c->run.host_memory = s->budget;
        return true;
    case DEVICE_MEMORY:
        if (c->run.device_memory == SPW_AUTO)
            return false;
        c->run.device_memory = SPW_AUTO;
        return true;
    case OPTIMIZER_UP: return move_up(&c->zero.offload_optimizer, apart);
    case PARAM_UP: return move_up(&c->zero.offload_param, apart);
    case BOTH_UP: return move_up(&c->zero.offload_optimizer, apart) && move_up(&c->zero.offload_param, apart);
    case FILL:
        if (!apart || strcmp(c->run.fill_device, "never") != 0)
            return false;
        snprintf(c->run.fill_device, sizeof c->run.fill_device, "auto");
        return true;
    case RATIO:
        if (!apart || c->zero.optimizer_ratio == 1)
            return false;
        c->zero.optimizer_ratio = 1;
        return true;
    case AHEAD:
        if (strcmp(c->run.update_ahead, "never") != 0)
            return false;
        snprintf(c->run.update_ahead, sizeof c->run.update_ahead, "auto");
        return true;
    case RECOMPUTE:
        if (strcmp(c->run.recompute, "always") != 0)
            return false;
        snprintf(c->run.recompute, sizeof c->run.recompute, "auto");
        return true;
    case ACTIVATIONS:
        if (c->run.activations == SPW_TIER_COUNT && !c->run.cpu_checkpointing)
            return false;
        c->run.activations = SPW_TIER_COUNT;
        c->run.cpu_checkpointing = false;
        return true;
    case LIVE:
        if (c->zero.max_live_parameters == unbounded && c->zero.prefetch_bucket_size == unbounded)
            return false;
        c->zero.max_live_parameters = c->zero.prefetch_bucket_size = unbounded;
        return true;
    case KEPT_NEAR:
        if (c->zero.stage < 3 || c->zero.hpz_partition_size > 1 || c->zero.mics_shard_size > 0 ||
            s->first->local_ranks < 2 || s->first->local_ranks == s->first->ranks)
            return false;
        c->zero.hpz_partition_size = s->first->local_ranks;
        return true;
    default: return false;
    }
}

/* What was measured of the first plan's paths, in the order of another's. */
static spw_rates
rates_of(const search *s, const spw_plan *p)
{
    spw_rates r = *s->rates;
    for (uint32_t i = 0; i < p->path_count; i++) {
        for (uint32_t k = 0; k < s->first->path_count; k++) {
            if (strcmp(p->paths[i], s->first->paths[k]) != 0)
                continue;
            r.nvme_read[i] = s->rates->nvme_read[k];
            r.nvme_write[i] = s->rates->nvme_write[k];
            r.nvme_mixed[i] = s->rates->nvme_mixed[k];
            r.device_id[i] = s->rates->device_id[k];
        }
    }
    return r;
}

static void
plan_it(search *s, tried *out)
{
    spw_rates r;
    if (spw__try_plan(s->options, &s->trial, &s->plan) != SPW_OK)
        return;
    r = rates_of(s, &s->plan);
    spw_plan_predict(&s->plan, &r, 0, &out->step);
    out->host_bytes = s->plan.host_bytes;
    if (out->step.timed) /* steps clip at first, and later mostly do not */
        out->seconds = (out->step.step_s + out->step.clipped_s) / 2;
}

/* With all changes that are in, and one more; in s->trial its configuration. */
static const tried *
predict(search *s, change more)
{
    static const tried nothing_to_do = {.seconds = INFINITY};
    tried *t = s->tried;
    uint64_t config;
    s->trial = *s->options->config;
    for (uint32_t i = 0; i < s->done_count; i++)
        (void)apply(s, &s->trial, s->done[i]);
    if (more < CHANGE_COUNT && !apply(s, &s->trial, more))
        return &nothing_to_do;
    config = spw_checksum(&s->trial, sizeof s->trial);
    while (t < s->tried + s->tried_count && t->config != config)
        t++;
    if (t == s->tried + s->tried_count) {
        SPW_ASSERT(s->tried_count < TRIED_MAX);
        *t = (tried){.config = config, .seconds = INFINITY};
        s->tried_count++;
        plan_it(s, t);
    }
    return t;
}

/* A budget that holds no more than what is used, if that is as good. */
static void
lower_budget(search *s, double least)
{
    const uint64_t most = s->budget;
    const tried *t = predict(s, CHANGE_COUNT);
    if (isinf(t->seconds))
        return;
    s->budget = ((t->host_bytes >> 20) + 2) << 20; /* the next process may be a little larger */
    if (s->budget > most || predict(s, CHANGE_COUNT)->seconds > 1.005 * least)
        s->budget = most;
}

static void
search_all(search *s)
{
    double least = predict(s, CHANGE_COUNT)->seconds;
    while (s->done_count < CHANGE_COUNT) {
        change best = CHANGE_COUNT;
        double shortest = 0.98 * least;
        for (change what = 0; what < CHANGE_COUNT; what++) {
            const double seconds = predict(s, what)->seconds;
            if (seconds >= shortest)
                continue;
            shortest = seconds;
            best = what;
        }
        if (best == CHANGE_COUNT)
            break;
        s->done[s->done_count++] = best;
        least = shortest;
    }
    for (uint32_t i = 0; i < s->done_count;) {
        const change what = s->done[i];
        memmove(&s->done[i], &s->done[i + 1], (s->done_count - i - 1) * sizeof s->done[0]);
        s->done_count--;
        if (predict(s, CHANGE_COUNT)->seconds <= 1.005 * least)
            continue;
        memmove(&s->done[i + 1], &s->done[i], (s->done_count - i) * sizeof s->done[0]);
        s->done[i++] = what;
        s->done_count++;
    }
    lower_budget(s, least);
}

static const char *
tier_text(spw_tier tier)
{
    return tier == SPW_TIER_NVME ? "nvme" : tier == SPW_TIER_HOST ? "cpu" : "none";
}

/* What has become of a configuration with a change, as --set takes it. */
static void
say(spw_faster_change *out, const spw_config *c, change what)
{
    const size_t room = sizeof out->set[0];
    out->set_count = 1;
    switch (what) {
    case HOST_MEMORY:
        snprintf(out->set[0], room, "spillway.host_memory=%lluMiB", (unsigned long long)(c->run.host_memory >> 20));
        break;
    case DEVICE_MEMORY: snprintf(out->set[0], room, "spillway.device_memory=auto"); break;
    case OPTIMIZER_UP:
    case BOTH_UP:
        snprintf(out->set[0], room, "zero_optimization.offload_optimizer.device=%s",
                 tier_text(c->zero.offload_optimizer));
        if (what == OPTIMIZER_UP)
            break;
        snprintf(out->set[out->set_count++], room, "zero_optimization.offload_param.device=%s",
                 tier_text(c->zero.offload_param));
        break;
    case PARAM_UP:
        snprintf(out->set[0], room, "zero_optimization.offload_param.device=%s", tier_text(c->zero.offload_param));
        break;
    case FILL: snprintf(out->set[0], room, "spillway.fill_device=auto"); break;
    case RATIO: snprintf(out->set[0], room, "zero_optimization.offload_optimizer.ratio=1"); break;
    case AHEAD: snprintf(out->set[0], room, "spillway.update_ahead=auto"); break;
    case RECOMPUTE: snprintf(out->set[0], room, "spillway.recompute=auto"); break;
    case ACTIVATIONS:
        snprintf(out->set[0], room, "spillway.activations=auto");
        snprintf(out->set[out->set_count++], room, "activation_checkpointing.cpu_checkpointing=false");
        break;
    case LIVE:
        snprintf(out->set[0], room, "zero_optimization.max_live_parameters=1e18");
        snprintf(out->set[out->set_count++], room, "zero_optimization.prefetch_bucket_size=1e18");
        break;
    case KEPT_NEAR:
        snprintf(out->set[0], room, "zero_optimization.zero_hpz_partition_size=%u", c->zero.hpz_partition_size);
        break;
    default: out->set_count = 0; break;
    }
}

spw_status
spw_plan_faster(const spw_engine_options *options, const spw_plan *plan, const spw_rates *rates, spw_faster *out,
                spw_error *err)
{
    search *s = spw_mem_zalloc(sizeof *s);
    uint32_t found;
    _Static_assert(CHANGE_COUNT <= sizeof out->changes / sizeof out->changes[0], "a place for each change");
    memset(out, 0, sizeof *out);
    if (s == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "search for shorter steps");
    s->options = options;
    s->first = plan;
    s->rates = rates;
    s->budget = most_memory(s);
    search_all(s);
    found = s->done_count;
    for (s->done_count = 1; s->done_count <= found; s->done_count++) {
        const tried *t = predict(s, CHANGE_COUNT);
        if (isinf(t->seconds))
            continue; /* it needs one that comes later */
        out->changes[out->count].step = t->step;
        say(&out->changes[out->count++], &s->trial, s->done[s->done_count - 1]);
    }
    spw_mem_free(s);
    return SPW_OK;
}
