/*
 * How long a step takes: bytes and operations of the plan over calibrated rates, per resource. The longest is the bound. Where
 * updates wait for the gradient's norm, a step also has its backward pass and its updates one behind the other. It is predicted to be as long
 * as the longer of these; what else does not overlap makes a real step longer. Pure.
 */
#include "spw_plan.h"
#include <math.h>

const char *
spw_resource_name(spw_resource resource)
{
    static const char *const names[SPW_RESOURCE_COUNT] = {"compute",   "optimizer",  "h2d",  "d2h",   "cpu",
                                                          "nvme_read", "nvme_write", "nvme", "ranks", "network"};
    return (unsigned)resource < SPW_RESOURCE_COUNT ? names[resource] : "unknown";
}

static const spw_resource of_way[SPW_WAY_COUNT] = {SPW_RESOURCE_RANKS, SPW_RESOURCE_NETWORK};

const char *
spw_rank_way_name(spw_rank_way way)
{
    return spw_resource_name(of_way[way]);
}

const char *
spw_rank_use_name(spw_rank_use use)
{
    return use == SPW_USE_GATHER ? "gather" : use == SPW_USE_REDUCE ? "reduce" : "both";
}

/* amount / rate; nothing takes no time, also at an unknown rate. */
static double
seconds_of(double amount, double rate)
{
    return amount <= 0 ? 0 : rate > 0 ? amount / rate : NAN;
}

/*
 * The busiest device: paths on one device add up, and so do the ranks of this host that swap there, each of which moves about as
 * much as this one. read and write say which bytes count.
 */
static double
disk_seconds(const spw_plan *p, const spw_traffic *t, const spw_rates *r, const double *rate, bool read, bool write)
{
    double longest = 0;
    for (uint32_t i = 0; i < p->path_count; i++) {
        double sum = 0;
        for (uint32_t k = 0; k < p->path_count; k++) {
            double bytes = (read ? (double)t->path_read[k] : 0) + (write ? (double)t->path_write[k] : 0);
            if (k == i || (r->device_id[k] == r->device_id[i] && r->device_id[i] != 0))
                sum += seconds_of(bytes * (p->path_ranks[k] > 1 ? p->path_ranks[k] : 1), rate[k]);
        }
        if (isnan(sum))
            return NAN;
        longest = fmax(longest, sum);
    }
    return longest;
}

/* gathered and reduced bytes over one way. */
static double
way_seconds(double gathered, double reduced, const double rate[SPW_USE_COUNT])
{
    const double longer = fmax(seconds_of(gathered, rate[SPW_USE_GATHER]), seconds_of(reduced, rate[SPW_USE_REDUCE]));
    return gathered > 0 && reduced > 0 ? fmax(longer, seconds_of(gathered + reduced, rate[SPW_USE_BOTH])) : longer;
}

/* What this rank receives from those of its host, or what all of these do from others. What is traded comes as what is gathered does. */
static double
received_seconds(const spw_plan *p, const spw_received *gathered, const spw_received *reduced, const spw_rates *r,
                 spw_rank_way way)
{
    const double ranks = p->local_ranks > 1 ? p->local_ranks : 1;
    return way == SPW_WAY_NEAR
               ? way_seconds((double)(gathered->all - gathered->far), (double)(reduced->all - reduced->far),
                             r->received[way])
               : way_seconds(ranks * (double)gathered->far, ranks * (double)reduced->far, r->received[way]);
}

/* The longer of both ways, as far as they are known: of the first forward pass, or of all that comes after it. */
static double
ranks_seconds(const spw_plan *p, const spw_rates *r, bool first)
{
    static const spw_received nothing;
    const spw_received after = {p->gathered.all - p->gathered_first.all, p->gathered.far - p->gathered_first.far};
    double longest = 0;
    for (int way = 0; way < SPW_WAY_COUNT; way++)
        longest = fmax(longest, received_seconds(p, first ? &p->gathered_first : &after, first ? &nothing : &p->reduced,
                                                 r, (spw_rank_way)way));
    return longest;
}

/* Attention of shared sequences begins when it is there, and computing waits. */
static double
traded_seconds(const spw_plan *p, const spw_rates *r)
{
    static const spw_received nothing;
    double longest = 0;
    for (int way = 0; way < SPW_WAY_COUNT; way++)
        longest = fmax(longest, received_seconds(p, &p->traded, &nothing, r, (spw_rank_way)way));
    return longest;
}

static spw_received
with_traded(const spw_received *gathered, const spw_received *traded)
{
    return (spw_received){gathered->all + traded->all, gathered->far + traded->far};
}

/* How many ranks take turns on this one's processors, each with about as much to do. */
static double
turns(const spw_plan *p)
{
    return p->cpu_ranks > 1 ? p->cpu_ranks : 1;
}

static double
share(double part, double all)
{
    return all > 0 ? fmin(part / all, 1) : 0;
}

static double
forward_seconds(const spw_plan *p, const spw_prediction *x)
{
    return (x->seconds[SPW_RESOURCE_COMPUTE] - x->orthogonal_s) *
           share(p->model_flops / 3, p->flops - p->orthogonal_flops);
}

/* Late updates have the backward pass, and all that is read and written with it. */
static double
late_seconds(const spw_plan *p, const spw_rates *r, const spw_prediction *x)
{
    const double *s = x->seconds, forward = forward_seconds(p, x);
    const double backward = fmax(s[SPW_RESOURCE_COMPUTE] - forward, ranks_seconds(p, r, false));
    return fmax(forward, ranks_seconds(p, r, true)) +
           fmax(backward, fmax(s[SPW_RESOURCE_OPTIMIZER], s[SPW_RESOURCE_NVME]));
}

/*
 * Records, and gradients that wait on nvme, are read when the norm is known, beside the next forward pass and its share of weights. What
 * memory of gradients and slots can hold of them is written beside the next backward pass. Of updates ahead of the norm, where there are any,
 * as many as the backward pass has time for are done by then, and those for which windows wait in any case. Of several passes, each of which reads
 * weights forward and backward, the first goes forward beside updates, and in the last one gradients leave and updates begin. Ranks gather with each of them, and sum up before the norm.
 */
static double
gated_seconds(const spw_plan *p, const spw_rates *r, const spw_prediction *x, bool ahead)
{
    const double *s = x->seconds, reads = (double)x->traffic.nvme_read, writes = (double)x->traffic.nvme_write;
    const double held = share((double)(p->grad_host + p->slots_host), (double)p->record_nvme);
    const double passes = p->passes > 1 ? p->passes : 1;
    const double records = share((double)(p->record_nvme + (ahead ? 0 : p->grad_nvme)), reads);
    const double weights = (1 - records) / (2 * passes), later = 1 - records - weights;
    const double leave = s[SPW_RESOURCE_D2H] * share((double)(p->grad_host + p->grad_nvme), (double)x->traffic.d2h);
    const double all_forward = forward_seconds(p, x), forward = all_forward / passes;
    const double computed = forward + x->orthogonal_s, after = fmax(computed, ranks_seconds(p, r, true));
    const double before =
        fmax(fmax(s[SPW_RESOURCE_COMPUTE] - computed, s[SPW_RESOURCE_NVME_READ] * later), ranks_seconds(p, r, false));
    const double last = (before - (all_forward - forward)) / passes;
    const double backward = before + fmax(0, leave - last);
    const double disk =
        fmax(s[SPW_RESOURCE_NVME_READ] * (records + weights),
             s[SPW_RESOURCE_NVME] * share(reads * (records + weights) + writes * (1 - held), reads + writes));
    const double both = fmax(s[SPW_RESOURCE_OPTIMIZER], s[SPW_RESOURCE_NVME] * records);
    const double may =
        ahead ? share((double)(p->record_nvme + p->spared_host), (double)(p->record_nvme + p->record_host)) : 0;
    const double must = ahead ? share((double)p->grad_nvme, (double)(p->grad_nvme + p->grad_host)) : 0;
    const double done = both > 0 ? fmax(must, fmin(may, last / both)) : 0;
    return fmax(backward, both * must) + fmax(after, fmax(s[SPW_RESOURCE_OPTIMIZER], disk) * (1 - done));
}

static void
disks_seconds(const spw_plan *p, const spw_rates *r, spw_prediction *x)
{
    x->seconds[SPW_RESOURCE_NVME_READ] = disk_seconds(p, &x->traffic, r, r->nvme_read, true, false);
    x->seconds[SPW_RESOURCE_NVME_WRITE] = disk_seconds(p, &x->traffic, r, r->nvme_write, false, true);
    x->seconds[SPW_RESOURCE_NVME] = disk_seconds(p, &x->traffic, r, r->nvme_mixed, true, true);
}

/* A step whose updates wait, because the last ones clipped: what else would be consumed in its window goes to nvme and comes back. */
static double
waiting_seconds(const spw_plan *p, const spw_rates *r, const spw_prediction *x)
{
    spw_prediction w = *x;
    double longest = x->bound_s;
    for (uint32_t i = 0; i < p->path_count && p->ahead; i++) {
        w.traffic.path_read[i] += p->grad_path[i];
        w.traffic.path_write[i] += p->grad_path[i];
        w.traffic.nvme_read += p->grad_path[i];
        w.traffic.nvme_write += p->grad_path[i];
    }
    disks_seconds(p, r, &w);
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
        longest = fmax(longest, w.seconds[k]);
    return fmax(longest, gated_seconds(p, r, &w, false));
}

/* Of the cores that they share, what so many threads keep busy. */
static double
busy(uint32_t threads, uint32_t cores)
{
    return threads > 0 && threads < cores ? (double)threads / cores : 1;
}

/* Between ranks a rate may well not be known; it is left out then. */
static double
known(double seconds)
{
    return isnan(seconds) ? 0 : seconds;
}

/* Of one processor, for what this rank receives. */
static double
receiving(const spw_plan *p, const spw_rates *r)
{
    const double far = (double)(p->gathered.far + p->reduced.far + p->traded.far);
    const double near = (double)(p->gathered.all + p->reduced.all + p->traded.all) - far;
    return known(seconds_of(near, r->received_cpu[SPW_WAY_NEAR])) +
           known(seconds_of(far, r->received_cpu[SPW_WAY_FAR]));
}

/* Products, and attention where its rate is known, without what Muon makes orthogonal. */
static double
computing(const spw_plan *p, const spw_rates *r)
{
    const double attention = r->attention > 0 ? p->attention_flops : 0;
    return seconds_of(p->flops - p->orthogonal_flops - attention, r->flops) + seconds_of(attention, r->attention);
}

static void
fill_seconds(const spw_plan *p, const spw_rates *r, spw_prediction *out)
{
    const spw_traffic *t = &out->traffic;
    double *s = out->seconds;
    const spw_received gathered = with_traded(&p->gathered, &p->traded);
    const double host = turns(p); /* rates are those of all processors */
    const double device = !p->device_apart ? host : p->device_ranks > 1 ? p->device_ranks : 1;
    out->orthogonal_s = device * seconds_of(p->orthogonal_flops, r->orthogonal);
    s[SPW_RESOURCE_COMPUTE] = device * computing(p, r) + out->orthogonal_s;
    s[SPW_RESOURCE_OPTIMIZER] = host * seconds_of((double)(p->trained - p->trained_device), r->optimizer);
    s[SPW_RESOURCE_H2D] = device * seconds_of((double)t->h2d, r->h2d);
    s[SPW_RESOURCE_D2H] = device * seconds_of((double)t->d2h, r->d2h);
    if (p->single_grad && t->d2h > 0) /* nothing is computed while a gradient leaves */
        s[SPW_RESOURCE_COMPUTE] += s[SPW_RESOURCE_D2H];
    s[SPW_RESOURCE_COMPUTE] += traded_seconds(p, r);
    for (int way = 0; way < SPW_WAY_COUNT; way++)
        s[of_way[way]] = received_seconds(p, &gathered, &p->reduced, r, (spw_rank_way)way);
    s[SPW_RESOURCE_CPU] = 0;
    if (r->shared_cores > 0) /* a copy keeps one core busy, the others as many as they have threads */
        s[SPW_RESOURCE_CPU] = s[SPW_RESOURCE_COMPUTE] * busy(r->compute_threads, r->shared_cores) +
                              s[SPW_RESOURCE_OPTIMIZER] * busy(r->optimizer_threads, r->shared_cores) +
                              (s[SPW_RESOURCE_H2D] + s[SPW_RESOURCE_D2H] + host * receiving(p, r)) / r->shared_cores;
    disks_seconds(p, r, out);
    out->timed = true;
    out->bound_s = 0;
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++) {
        out->timed = out->timed && (!isnan(s[k]) || k >= SPW_RESOURCE_RANKS);
        if (s[k] > out->bound_s) {
            out->bound_s = s[k];
            out->bound = (spw_resource)k;
        }
    }
    out->gated_s = !out->timed ? 0
                   : p->late   ? late_seconds(p, r, out)
                   : p->gated  ? gated_seconds(p, r, out, p->ahead)
                               : 0;
    out->step_s = fmax(out->bound_s, out->gated_s);
    out->clipped_s = out->timed && p->clips && !p->late ? waiting_seconds(p, r, out) : out->step_s;
}

/* How often the store could do all its updates while the step computes. */
static double
pace_of(const spw_prediction *x)
{
    const double *s = x->seconds;
    double store = fmax(fmax(s[SPW_RESOURCE_NVME_READ], s[SPW_RESOURCE_NVME_WRITE]),
                        fmax(s[SPW_RESOURCE_NVME], s[SPW_RESOURCE_OPTIMIZER]));
    return store > 0 ? s[SPW_RESOURCE_COMPUTE] / store : INFINITY;
}

/* In a step, on all paths: each of the ranks that swap to a path's disk writes about as much as this one. */
static double
written_by_ranks(const spw_plan *p, const spw_traffic *t)
{
    double bytes = 0;
    for (uint32_t i = 0; i < p->path_count; i++)
        bytes += (double)t->path_write[i] * (p->path_ranks[i] > 1 ? p->path_ranks[i] : 1);
    return bytes;
}

void
spw_plan_predict(const spw_plan *p, const spw_rates *rates, uint64_t tbw_bytes, spw_prediction *out)
{
    uint32_t k = SPW_PACE_DEFAULT;
    *out = (spw_prediction){.traffic = p->traffic[k]};
    for (int r = 0; r < SPW_RESOURCE_COUNT; r++)
        out->seconds[r] = NAN;
    if (rates != NULL)
        fill_seconds(p, rates, out);
    if (out->timed) {
        double pace = pace_of(out);
        k = SPW_PACE_COUNT - 1;
        while (k > 0 && spw_paces[k] > pace)
            k--;
        out->traffic = p->traffic[k];
        fill_seconds(p, rates, out);
    }
    out->timed = out->timed && out->step_s > 0;
    out->tokens_per_s = out->timed ? (double)p->tokens / out->step_s : NAN;
    out->written = written_by_ranks(p, &out->traffic);
    out->written_per_day = out->timed ? out->written * (86400 / out->step_s) : NAN;
    out->tbw_years = out->timed && tbw_bytes > 0 ? (double)tbw_bytes / out->written_per_day / 365.25 : NAN;
}

spw_resource
spw_step_bound(const spw_plan *p, const spw_rates *r, const spw_step_load *load, double seconds[SPW_RESOURCE_COUNT])
{
    const spw_traffic *planned = &p->traffic[SPW_PACE_DEFAULT];
    double reads = planned->nvme_read > 0 ? (double)load->nvme_read / (double)planned->nvme_read : 0;
    double writes = planned->nvme_write > 0 ? (double)load->nvme_write / (double)planned->nvme_write : 0;
    const spw_received gathered = with_traded(&load->gathered, &load->traded);
    spw_resource longest = SPW_RESOURCE_COMPUTE;
    spw_traffic t = {0};
    for (uint32_t i = 0; i < p->path_count; i++) { /* the paths' shares are the plan's */
        t.path_read[i] = (uint64_t)((double)planned->path_read[i] * reads);
        t.path_write[i] = (uint64_t)((double)planned->path_write[i] * writes);
    }
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++)
        seconds[k] = 0;
    if (r->shared_cores > 0)
        seconds[SPW_RESOURCE_CPU] = turns(p) * load->cpu_s / r->shared_cores;
    else
        seconds[SPW_RESOURCE_COMPUTE] = load->compute_s;
    seconds[SPW_RESOURCE_NVME_READ] = disk_seconds(p, &t, r, r->nvme_read, true, false);
    seconds[SPW_RESOURCE_NVME_WRITE] = disk_seconds(p, &t, r, r->nvme_write, false, true);
    seconds[SPW_RESOURCE_NVME] = disk_seconds(p, &t, r, r->nvme_mixed, true, true);
    for (int way = 0; way < SPW_WAY_COUNT; way++)
        seconds[of_way[way]] = received_seconds(p, &gathered, &load->reduced, r, (spw_rank_way)way);
    for (int k = 0; k < SPW_RESOURCE_COUNT; k++) {
        seconds[k] = known(seconds[k]);
        if (seconds[k] > seconds[longest])
            longest = (spw_resource)k;
    }
    return longest;
}

double
spw_zero_bytes(double params, uint32_t stage, double ranks, double mp)
{
    double psi = params / mp;
    switch (stage) {
    case 0: return 16 * psi;
    case 1: return 4 * psi + 12 * psi / ranks;
    case 2: return 2 * psi + 14 * psi / ranks;
    default: return 16 * psi / ranks;
    }
}
