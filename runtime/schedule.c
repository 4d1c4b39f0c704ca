/*
 * Learning rate of an update: DeepSpeed's schedulers, with their arithmetic. Pure. There a scheduler takes its first step behind the first
 * update, so last_batch_iteration is -1 at that one and t - 1 at those that follow, t being 0 at the first. Cycles and range tests count
 * from last_batch_iteration + 1, warm-ups from last_batch_iteration: their first two updates are both at the beginning.
 */
#include "spw_config.h"
#include <math.h>

/* i: last_batch_iteration. 0 at the first step of the warm-up of n steps, 1 from its end; linear, or the logarithm of the step. */
static double
warmup(const spw_config *c, uint64_t i, uint64_t n)
{
    if (i >= n)
        return 1;
    return c->scheduler.warmup_linear ? (double)i / (double)n : log((double)i + 1) / log((double)n);
}

/* Half a cosine from 1 to 0, where it stays; its first step is 1, not 0. */
static double
cosine(uint64_t i, uint64_t n, uint64_t total)
{
    double share = total > n ? (double)(i - n + 1) / (double)(total - n) : 1;
    return 0.5 * (1 + cos(3.14159265358979323846 * (share < 1 ? share : 1)));
}

/*
 * Of OneCycle's cycle at t: 0 at its ends, 1 in between where its halves meet; in stairs, or straight. Stairs are counted before anything is
 * divided: 0.58 times 50 is less than 29, and would be a stair too few.
 */
static double
cycle_share(const spw_config *c, double t)
{
    const double first = (double)c->scheduler.first_steps;
    const double second = isnan(c->scheduler.second_steps) ? first : c->scheduler.second_steps;
    double done, half = first, stairs = (double)c->scheduler.first_stairs;
    t = fmod(t, first + second);
    done = t;
    if (t > first) {
        done = first + second - t;
        half = second;
        stairs = isnan(c->scheduler.second_stairs) ? stairs : c->scheduler.second_stairs;
    }
    return stairs > 0 ? floor(done * stairs / half) / stairs : done / half;
}

/* Behind the cycle: by how many decay_step_sizes; negative: not yet. */
static double
behind_cycle(const spw_config *c, double t)
{
    double first = (double)c->scheduler.first_steps;
    double total = first + (isnan(c->scheduler.second_steps) ? first : c->scheduler.second_steps);
    if (t <= total)
        return -1;
    return c->scheduler.decay_steps > 0 ? (t - total) / (double)c->scheduler.decay_steps : 0;
}

static double
cycle_lr(const spw_config *c, double t)
{
    double low = c->scheduler.cycle_min_lr, high = c->scheduler.cycle_max_lr, behind = behind_cycle(c, t);
    return behind >= 0 ? low / (1 + c->scheduler.decay_lr_rate * behind) : low + (high - low) * cycle_share(c, t);
}

void
spw_schedule_betas(const spw_config *c, uint64_t update, double *beta1, double *beta2)
{
    double low = c->scheduler.cycle_min_mom, high = c->scheduler.cycle_max_mom, t = update > 0 ? (double)update - 1 : 0;
    double behind = behind_cycle(c, t);
    if (strcmp(c->scheduler.type, "OneCycle") != 0 || !c->scheduler.cycle_momentum)
        return;
    *beta2 = 0.99; /* whatever the optimizer's is, as there */
    if (t == 0)
        *beta1 = low; /* there the first update comes before the scheduler's first step */
    else
        *beta1 =
            behind >= 0 ? high * (1 + c->scheduler.decay_mom_rate * behind) : high - (high - low) * cycle_share(c, t);
}

/* Rises without end, in stairs or straight. */
static double
range_lr(const spw_config *c, double t)
{
    double interval = t / (double)c->scheduler.range_steps;
    return c->scheduler.range_min_lr *
           (1 + c->scheduler.range_rate * (c->scheduler.range_stairs ? floor(interval) : interval));
}

/* WarmupLR, WarmupDecayLR and WarmupCosineLR; behind the first update. */
static double
warmup_lr(const spw_config *c, uint64_t i, double base)
{
    uint64_t n = c->scheduler.warmup_num_steps < 2 ? 2 : c->scheduler.warmup_num_steps;
    uint64_t total = c->scheduler.total_num_steps;
    double low = c->scheduler.warmup_min_lr, gamma = warmup(c, i, n);
    double high = isnan(c->scheduler.warmup_max_lr) ? base : c->scheduler.warmup_max_lr;
    if (strcmp(c->scheduler.type, "WarmupCosineLR") == 0) {
        double start = c->scheduler.warmup_min_ratio, end = c->scheduler.cos_min_ratio;
        return base * (i < n ? start + (1 - start) * gamma : end + (1 - end) * cosine(i, n, total));
    }
    if (i >= n && strcmp(c->scheduler.type, "WarmupDecayLR") == 0)
        gamma = i < total ? (double)(total - i) / (double)(total > n ? total - n : 1) : 0;
    return low + (high - low) * gamma;
}

/* base: in the place of the optimizer's rate. */
static double
scheduled(const spw_config *c, uint64_t update, double base)
{
    const char *type = c->scheduler.type;
    uint64_t t = update > 0 ? update - 1 : 0;
    if (type[0] == '\0')
        return base;
    if (strcmp(type, "OneCycle") == 0)
        return cycle_lr(c, (double)t);
    if (strcmp(type, "LRRangeTest") == 0)
        return range_lr(c, (double)t);
    if (t == 0) /* a cosine's own start is not asked for there */
        return strcmp(type, "WarmupCosineLR") == 0 ? 0 : c->scheduler.warmup_min_lr;
    return warmup_lr(c, t - 1, base);
}

double
spw_schedule_lr(const spw_config *c, uint64_t update)
{
    return scheduled(c, update, c->optimizer.lr);
}

double
spw_schedule_group_lr(const spw_config *c, uint64_t update, double lr, double own)
{
    const char *type = c->scheduler.type;
    double about = strcmp(type, "OneCycle") == 0      ? c->scheduler.cycle_max_lr
                   : strcmp(type, "LRRangeTest") == 0 ? c->scheduler.range_min_lr
                   : type[0] != '\0' && strcmp(type, "WarmupCosineLR") != 0 && !isnan(c->scheduler.warmup_max_lr)
                       ? c->scheduler.warmup_max_lr
                       : c->optimizer.lr;
    return about > 0 ? lr * (own / about) : scheduled(c, update, own);
}
