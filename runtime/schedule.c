/*
 * Learning rate of a step: DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, with its arithmetic. Pure. Its
 * last_batch_iteration is t here, 0 at the first step. One difference: past total_num_steps a cosine stays at its end
 * instead of rising again.
 */
#include "spw_config.h"
#include <math.h>

/* 0 at the first step of the warm-up of n steps, 1 from its end; linear, or the logarithm of the step. */
static double
warmup(const spw_config *c, uint64_t t, uint64_t n)
{
    if (t >= n)
        return 1;
    return c->scheduler.warmup_linear ? (double)t / (double)n : log((double)t + 1) / log((double)n);
}

/* Half a cosine from 1 to 0, whose last value falls on the last step. */
static double
cosine(uint64_t t, uint64_t n, uint64_t total)
{
    double share = total > n ? (double)(t - n + 1) / (double)(total - n) : 1;
    return 0.5 * (1 + cos(3.14159265358979323846 * (share < 1 ? share : 1)));
}

double
spw_schedule_lr(const spw_config *c, uint64_t step)
{
    const char *type = c->scheduler.type;
    uint64_t t = step > 0 ? step - 1 : 0, total = c->scheduler.total_num_steps;
    uint64_t n = c->scheduler.warmup_num_steps < 2 ? 2 : c->scheduler.warmup_num_steps;
    double low = c->scheduler.warmup_min_lr, gamma = warmup(c, t, n);
    double high = isnan(c->scheduler.warmup_max_lr) ? c->optimizer.lr : c->scheduler.warmup_max_lr;
    if (type[0] == '\0')
        return c->optimizer.lr;
    if (strcmp(type, "WarmupCosineLR") == 0) {
        double start = c->scheduler.warmup_min_ratio, end = c->scheduler.cos_min_ratio;
        return c->optimizer.lr * (t < n ? start + (1 - start) * gamma : end + (1 - end) * cosine(t, n, total));
    }
    if (t >= n && strcmp(type, "WarmupDecayLR") == 0)
        gamma = t < total ? (double)(total - t) / (double)(total > n ? total - n : 1) : 0;
    return low + (high - low) * gamma;
}
