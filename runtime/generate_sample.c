/*
 * One token from logits: temperature, top-k, top-p and a number of [0, 1). Pure; sums are fp64 and in one order, so that a draw
 * depends on logits and number alone.
 */
#include "spw_generate.h"
#include <math.h>
#include <stdlib.h>

static int
likelier(const void *a, const void *b)
{
    const spw_candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The one at uniform among candidates of these weights, in their order. */
static int32_t
pick(const spw_candidate *c, uint64_t count, double max, double temperature, double sum, double uniform)
{
    double left = uniform * sum;
    for (uint64_t i = 0; i + 1 < count; i++) {
        left -= exp(((double)c[i].logit - max) / temperature);
        if (left < 0)
            return c[i].id;
    }
    return c[count - 1].id;
}

/* How many of the first count, likeliest first, reach the share p of all of them; *sum is what they weigh. */
static uint64_t
nucleus(const spw_candidate *c, uint64_t count, double max, double temperature, double p, double *sum)
{
    double reached = 0;
    for (uint64_t i = 0; i < count; i++) {
        reached += exp(((double)c[i].logit - max) / temperature);
        if (reached >= p * *sum) {
            *sum = reached;
            return i + 1;
        }
    }
    *sum = reached;
    return count;
}

int32_t
spw_sample(const float *logits, uint64_t vocab, const spw_sampling *how, double uniform, spw_candidate *room)
{
    uint64_t count = 0, best = 0;
    double sum = 0, max;
    for (uint64_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]))
            return -1;
        if (logits[i] > logits[best])
            best = i;
        if (logits[i] > -INFINITY)
            room[count++] = (spw_candidate){logits[i], (int32_t)i};
    }
    if (count == 0)
        return -1;
    max = (double)logits[best];
    if (how->temperature <= 0 || isinf(max))
        return (int32_t)best;
    if ((how->top_k > 0 && how->top_k < count) || how->top_p < 1) {
        qsort(room, count, sizeof *room, likelier);
        if (how->top_k > 0 && how->top_k < count)
            count = how->top_k;
    }
    for (uint64_t i = 0; i < count; i++)
        sum += exp(((double)room[i].logit - max) / how->temperature);
    if (how->top_p < 1)
        count = nucleus(room, count, max, how->temperature, how->top_p, &sum);
    return pick(room, count, max, how->temperature, sum, uniform);
}
