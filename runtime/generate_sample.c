/*
 * One token from logits: temperature, top-k, top-p and a number of [0, 1). Pure; sums are fp64 and in one order, so that a draw
 * depends on logits and number alone. Only as many candidates are put in order as are looked at: they come from a heap.
 */
#include "spw_generate.h"
#include <math.h>

static bool
likelier(const spw_candidate *x, const spw_candidate *y)
{
    return x->logit != y->logit ? x->logit > y->logit : x->id < y->id;
}

static void
swap(spw_candidate *x, spw_candidate *y)
{
    const spw_candidate z = *x;
    *x = *y;
    *y = z;
}

/* Of a heap whose likeliest stands first, but for what stands at i. */
static void
sift(spw_candidate *heap, uint64_t count, uint64_t i)
{
    for (uint64_t next; (next = 2 * i + 1) < count; i = next) {
        next += next + 1 < count && likelier(&heap[next + 1], &heap[next]);
        if (likelier(&heap[i], &heap[next]))
            return;
        swap(&heap[i], &heap[next]);
    }
}

/* Candidates from the likeliest down, or in the order of ids: the first taken of count stand at the end, the likeliest last. */
typedef struct ranking {
    spw_candidate *c;
    uint64_t count, taken;
    double max, temperature;
    bool by_rank;
} ranking;

static const spw_candidate *
candidate(ranking *r, uint64_t i)
{
    if (!r->by_rank)
        return &r->c[i];
    for (; r->taken <= i; r->taken++) {
        const uint64_t left = r->count - r->taken;
        swap(&r->c[0], &r->c[left - 1]);
        sift(r->c, left - 1, 0);
    }
    return &r->c[r->count - 1 - i];
}

static double
weight(ranking *r, uint64_t i)
{
    return exp(((double)candidate(r, i)->logit - r->max) / r->temperature);
}

static void
rank(ranking *r)
{
    for (uint64_t i = r->count / 2; i-- > 0;)
        sift(r->c, r->count, i);
    r->by_rank = true;
}

/* The one at uniform among the first n, which weigh sum. */
static int32_t
pick(ranking *r, uint64_t n, double sum, double uniform)
{
    double left = uniform * sum;
    for (uint64_t i = 0; i + 1 < n; i++) {
        left -= weight(r, i);
        if (left < 0)
            return candidate(r, i)->id;
    }
    return candidate(r, n - 1)->id;
}

/* How many of the first n reach the share p of what they weigh; *sum is that, and becomes what those weigh. */
static uint64_t
nucleus(ranking *r, uint64_t n, double p, double *sum)
{
    double reached = 0;
    for (uint64_t i = 0; i < n; i++) {
        reached += weight(r, i);
        if (reached >= p * *sum) {
            *sum = reached;
            return i + 1;
        }
    }
    *sum = reached;
    return n;
}

int32_t
spw_sample(const float *logits, uint64_t vocab, const spw_sampling *how, double uniform, spw_candidate *room)
{
    ranking r = {.c = room, .temperature = how->temperature};
    uint64_t best = 0, n;
    double sum = 0;
    for (uint64_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]))
            return -1;
        if (logits[i] > logits[best])
            best = i;
        if (logits[i] > -INFINITY)
            room[r.count++] = (spw_candidate){logits[i], (int32_t)i};
    }
    if (r.count == 0)
        return -1;
    r.max = (double)logits[best];
    if (how->temperature <= 0 || isinf(r.max))
        return (int32_t)best;
    n = how->top_k > 0 && how->top_k < r.count ? how->top_k : r.count;
    if (n < r.count)
        rank(&r);
    for (uint64_t i = 0; i < n; i++)
        sum += weight(&r, i);
    if (how->top_p < 1) {
        if (!r.by_rank)
            rank(&r);
        n = nucleus(&r, n, how->top_p, &sum);
    }
    return pick(&r, n, sum, uniform);
}
