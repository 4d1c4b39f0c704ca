/*
 * Learning rate of a step, as DeepSpeed documents WarmupLR, WarmupDecayLR and WarmupCosineLR. Pure.
 */
#include "spw_config.h"
#include <math.h>

/* 0 at the first step of the warm-up, 1 from its end. */
static double
warmup(const spw_config *c, uint64_t t)
{
    uint64_t n = c->scheduler.warmup_num_steps < 2 ? 2 : c->scheduler.warmup_num_steps;
    if (t >= n)
        return 1;
    return c->scheduler.warmup_linear ? (double)t / (double)n : log((double)t + 1) / log((double)n);
}

double
spw_schedule_lr(const spw_config *c, uint64_t step)
{
    const char *type = c->scheduler.type;
    uint64_t t = step > 0 ? step - 1 : 0, n = c->scheduler.warmup_num_steps, total = c->scheduler.total_num_steps;
    double low = c->scheduler.warmup_min_lr;
    double high = isnan(c->scheduler.warmup_max_lr) ? c->optimizer.lr : c->scheduler.warmup_max_lr;
    double left = total > n ? ((double)total - (double)t) / (double)(total - n) : 1;
    double gamma = warmup(c, t);
    if (gamma > 1)
        gamma = 1;
    left = left < 0 ? 0 : left > 1 ? 1 : left;
    if (type[0] == '\0')
        return c->optimizer.lr;
    if (strcmp(type, "WarmupCosineLR") == 0) {
        double ratio = c->scheduler.cos_min_ratio, start = c->scheduler.warmup_min_ratio;
        if (t < n)
            return c->optimizer.lr * (start + (1 - start) * gamma);
        return c->optimizer.lr * (ratio + (1 - ratio) * 0.5 * (1 + cos(3.14159265358979323846 * (1 - left))));
    }
    if (t < n || strcmp(type, "WarmupLR") == 0)
        return low + (high - low) * gamma;
    return low + (high - low) * left;
}
