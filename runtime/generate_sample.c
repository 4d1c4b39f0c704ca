/*
 * One token from logits: temperature, top-k, top-p and a number of [0, 1). Pure; weights are made of plain operations in fp64, and sums
 * in one order, so that a draw depends on logits and number alone, on any machine. A generator draws for many texts between two passes,
 * of vocabularies of 10^5: what all tokens take part in goes block by block, for vector instructions, and only candidates of a cut are
 * put in order, as many as are looked at.
 */
#include "spw_generate.h"
#include <math.h>
#include <string.h>

enum { LANES = 16, BLOCK = 512, BLOCKS_MAX = 1024 };

/* ---------------------------------------------------------------- weights */

typedef struct scale {
    double max, inverse; /* a weight is exp((logit - max) * inverse), so 1 at most */
} scale;

/* exp(x) of x <= 0, to some units of the last place; 0 where no normal number is so small: at -709 the exponent's bits are 0. */
static inline double
exp_of(double x)
{
    const double magic = 0x1.8p52, log2_e = 1.4426950408889634, ln2_high = 0x1.62e42feep-1,
                 ln2_low = 0x1.a39ef35793c76p-33;
    const double y = x > -709 ? x : -709, shifted = y * log2_e + magic, k = shifted - magic;
    const double r = (y - k * ln2_high) - k * ln2_low;
    double p = 1.0 / 6227020800.0, power;
    uint64_t bits;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    memcpy(&bits, &shifted, sizeof bits); /* its last bits are k */
    bits = (bits + 1023) << 52;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline double
weight_of(const scale *s, float logit)
{
    return exp_of(((double)logit - s->max) * s->inverse);
}

/* (count) of a block. */
static void
weigh(double *out, const float *logits, uint64_t count, const scale *s)
{
    const scale local = *s;
    for (uint64_t i = 0; i < count; i++)
        out[i] = weight_of(&local, logits[i]);
}

/* The largest; NaN where one is. */
static float
largest(const float *logits, uint64_t vocab)
{
    float top[LANES], most = -INFINITY;
    uint64_t i = 0;
    int bad = 0;
    for (int k = 0; k < LANES; k++)
        top[k] = -INFINITY;
    for (; i + LANES <= vocab; i += LANES)
        for (int k = 0; k < LANES; k++) {
            const float x = logits[i + (uint64_t)k];
            top[k] = x > top[k] ? x : top[k];
            bad |= x != x;
        }
    for (; i < vocab; i++) {
        most = logits[i] > most ? logits[i] : most;
        bad |= logits[i] != logits[i];
    }
    for (int k = 0; k < LANES; k++)
        most = top[k] > most ? top[k] : most;
    return bad ? NAN : most;
}

/* All tokens' weights, summed by blocks. */
typedef struct blocks {
    uint64_t each, count;
    double sum, of[BLOCKS_MAX];
} blocks;

static void
sum_up(blocks *b, const float *logits, uint64_t vocab, const scale *s)
{
    b->each = spw_round_up((vocab + BLOCKS_MAX - 1) / BLOCKS_MAX, BLOCK);
    b->count = (vocab + b->each - 1) / b->each;
    b->sum = 0;
    for (uint64_t i = 0; i < b->count; i++) {
        const uint64_t end = (i + 1) * b->each < vocab ? (i + 1) * b->each : vocab;
        double w[BLOCK], sums[LANES] = {0};
        for (uint64_t at = i * b->each; at < end; at += BLOCK) {
            const uint64_t n = end - at < BLOCK ? end - at : BLOCK;
            weigh(w, logits + at, n, s);
            memset(w + n, 0, (BLOCK - n) * sizeof *w);
            for (uint64_t j = 0; j < BLOCK; j += LANES)
                for (uint64_t k = 0; k < LANES; k++)
                    sums[k] += w[j + k];
        }
        b->of[i] = 0;
        for (int k = 0; k < LANES; k++)
            b->of[i] += sums[k];
        b->sum += b->of[i];
    }
}

/* The one at uniform of all, in the order of ids; where roundings leave none, the last that has a weight. */
static int32_t
pick_of_all(const blocks *b, const float *logits, uint64_t vocab, const scale *s, double uniform)
{
    double left = uniform * b->sum;
    uint64_t i = 0, last = 0;
    for (; i + 1 < b->count && left >= b->of[i]; i++)
        left -= b->of[i];
    while (b->of[i] == 0) /* the first one has some */
        i--;
    for (uint64_t at = i * b->each; at < (i + 1) * b->each && at < vocab; at++) {
        const double w = weight_of(s, logits[at]);
        left -= w;
        if (left < 0)
            return (int32_t)at;
        last = w > 0 ? at : last;
    }
    return (int32_t)last;
}

/* ---------------------------------------------------------------- cuts */

static bool
likelier(const spw_candidate *x, const spw_candidate *y)
{
    return x->logit != y->logit ? x->logit > y->logit : x->id < y->id;
}

/* Of a heap with the likeliest first, or the least likely, but for what stands at i. */
static void
sift(spw_candidate *heap, uint64_t count, uint64_t i, bool likeliest)
{
    for (uint64_t next; (next = 2 * i + 1) < count; i = next) {
        const spw_candidate x = heap[i];
        next += next + 1 < count && likelier(&heap[next + 1], &heap[next]) == likeliest;
        if (likelier(&x, &heap[next]) == likeliest)
            return;
        heap[i] = heap[next];
        heap[next] = x;
    }
}

static void
heap_up(spw_candidate *heap, uint64_t count, bool likeliest)
{
    for (uint64_t i = count / 2; i-- > 0;)
        sift(heap, count, i, likeliest);
}

/* The k likeliest, in any order; fewer where there are no more above -infinity. */
static uint64_t
select_top(spw_candidate *out, uint64_t k, const float *logits, uint64_t vocab)
{
    uint64_t count = 0, i = 0;
    for (; i < vocab && count < k; i++)
        if (logits[i] > -INFINITY)
            out[count++] = (spw_candidate){logits[i], (int32_t)i};
    heap_up(out, count, false);
    for (; i < vocab; i++) {
        if (logits[i] > out[0].logit) {
            out[0] = (spw_candidate){logits[i], (int32_t)i};
            sift(out, count, 0, false);
        }
    }
    return count;
}

/* All that the share p of the sum may need: what is left out, of less than (1 - p) / vocab of it each, has no more than 1 - p together. */
static uint64_t
select_share(spw_candidate *out, double p, double sum, const float *logits, uint64_t vocab, const scale *s)
{
    const double least = s->max + (log((1 - p) * sum / (double)vocab) - 1e-6) / s->inverse;
    uint64_t count = 0;
    for (uint64_t i = 0; i < vocab; i++)
        if ((double)logits[i] >= least)
            out[count++] = (spw_candidate){logits[i], (int32_t)i};
    return count;
}

/* Candidates from the likeliest down: of a heap of count those that were taken stand at its end, the likeliest last. */
typedef struct ranking {
    spw_candidate *c;
    uint64_t count, taken;
    scale s;
} ranking;

static const spw_candidate *
candidate(ranking *r, uint64_t i)
{
    for (; r->taken <= i; r->taken++) {
        const uint64_t left = r->count - r->taken;
        const spw_candidate first = r->c[0];
        r->c[0] = r->c[left - 1];
        r->c[left - 1] = first;
        sift(r->c, left - 1, 0, true);
    }
    return &r->c[r->count - 1 - i];
}

static double
weight(ranking *r, uint64_t i)
{
    return weight_of(&r->s, candidate(r, i)->logit);
}

/* How many of the first n reach the share p of the sum, which becomes what those weigh. */
static uint64_t
nucleus(ranking *r, uint64_t n, double p, double *sum)
{
    const double share = p * *sum;
    *sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        *sum += weight(r, i);
        if (*sum >= share)
            return i + 1;
    }
    return n;
}

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

int32_t
spw_sample(const float *logits, uint64_t vocab, const spw_sampling *how, double uniform, spw_candidate *room)
{
    const float max = largest(logits, vocab);
    const bool some = how->top_k > 0 && how->top_k < vocab;
    ranking r = {.c = room, .s = {(double)max, fmin(1 / how->temperature, 1e300)}};
    blocks all;
    double sum = 0;
    uint64_t n;
    if (isnan(max) || max == -INFINITY)
        return -1;
    if (how->temperature <= 0 || isinf(max)) {
        for (n = 0; logits[n] != max; n++)
            ;
        return (int32_t)n;
    }
    if (!some) {
        sum_up(&all, logits, vocab, &r.s);
        sum = all.sum;
    }
    if (!some && how->top_p >= 1)
        return pick_of_all(&all, logits, vocab, &r.s, uniform);
    r.count =
        some ? select_top(room, how->top_k, logits, vocab) : select_share(room, how->top_p, sum, logits, vocab, &r.s);
    heap_up(room, r.count, true);
    for (uint64_t i = 0; some && i < r.count; i++)
        sum += weight(&r, i);
    n = how->top_p < 1 ? nucleus(&r, r.count, how->top_p, &sum) : r.count;
    return pick(&r, n, sum, uniform);
}
