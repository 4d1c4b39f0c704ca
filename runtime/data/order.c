/*
 * The order of sequences, without tables of them: a keyed permutation of each epoch, and which source the p-th draw goes
 * to. Both are pure functions of seed and position.
 *
 * Permutation: a Feistel network of four rounds on the next even power of two, walked until it lands in range. Any function
 * may stand in a round, so Philox does; the network's range is less than 4 n, so 1 to 4 walks on average do.
 *
 * Mixing is a scheduling problem: a machine runs one job per slot, and job j of a source with share q of a period M must run
 * in slots [floor(j M/q), ceil((j+1) M/q)). Then after n slots a source has had more than n q/M - 1 and fewer than
 * n q/M + 1 of them. The shares add up to M, so such a schedule exists, and taking the released job with the earliest
 * deadline finds it, because jobs last one slot and all times are whole.
 *
 * Sources  Luby and Rackoff 1988, How to construct pseudorandom permutations from pseudorandom functions; Black and Rogaway
 *          2002, Ciphers with arbitrary finite domains (cycle walking); Tijdeman 1980, The chairman assignment problem;
 *          Baruah, Cohen, Plaxton and Varvel 1996, Proportionate progress (the windows); Jackson 1955 (earliest deadline).
 */
#include "data_internal.h"
#include <math.h>

enum { PERIOD_MAX = 65536 };

uint64_t
spw__data_permute(uint64_t seed, uint64_t epoch, uint64_t i, uint64_t n)
{
    unsigned half = 1;
    while (half < 32 && (1ull << (2 * half)) < n)
        half++;
    do {
        uint64_t mask = (1ull << half) - 1, left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint32_t r[4];
            uint64_t next;
            spw_philox(seed ^ 0x64617461, epoch, right * 4 + round, r);
            next = left ^ (((uint64_t)r[1] << 32 | r[0]) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

/* ---------------------------------------------------------------- sources by weight */

/* Rounds weights to whole shares of a period; returns how far the worst of them is from its own, in draws per draw. */
static double
round_shares(data_mix *mix, const double *weights, double sum, uint64_t period)
{
    double worst = 0;
    uint64_t left = period;
    mix->period = period;
    for (uint32_t s = 0; s < mix->count; s++) {
        double exact = weights[s] / sum * (double)period;
        mix->share[s] = weights[s] > 0 ? (uint64_t)(exact + 0.5) : 0;
        mix->share[s] = weights[s] > 0 && mix->share[s] == 0 ? 1 : mix->share[s];
        worst = fmax(worst, fabs((double)mix->share[s] - exact) / (double)period);
        left -= mix->share[s]; /* may pass below zero, and come back */
    }
    return left == 0 ? worst : 1;
}

void
spw__data_mix_init(data_mix *mix, const double *weights, uint32_t count)
{
    double sum = 0;
    uint64_t total = 0;
    uint32_t largest = 0;
    *mix = (data_mix){.count = count};
    for (uint32_t s = 0; s < count; s++)
        sum += weights[s];
    for (uint64_t period = 1; period <= PERIOD_MAX;
         period++) { /* the first that has the weights exactly: 10 for 0.7, 0.3 */
        if (round_shares(mix, weights, sum, period) < 1e-12)
            return;
    }
    (void)round_shares(mix, weights, sum, PERIOD_MAX); /* none has; what rounding leaves goes to the largest */
    for (uint32_t s = 0; s < count; s++) {
        total += mix->share[s];
        largest = mix->share[s] > mix->share[largest] ? s : largest;
    }
    mix->share[largest] = mix->share[largest] + PERIOD_MAX - total;
}

static void
set_window(data_draw *d, uint32_t s)
{
    uint64_t M = d->mix->period, q = d->mix->share[s], j = d->drawn[s];
    d->release[s] = q > 0 ? j * M / q : UINT64_MAX;
    d->deadline[s] = q > 0 ? ((j + 1) * M + q - 1) / q : UINT64_MAX;
}

/* The source of the next slot of this period. */
static uint32_t
take_slot(data_draw *d)
{
    uint32_t best = d->mix->count;
    for (uint32_t s = 0; s < d->mix->count; s++) {
        if (d->release[s] <= d->slot && (best == d->mix->count || d->deadline[s] < d->deadline[best]))
            best = s;
    }
    SPW_ASSERT(best < d->mix->count && d->slot < d->deadline[best]);
    d->drawn[best]++;
    set_window(d, best);
    d->slot++;
    return best;
}

static void
start_period(data_draw *d)
{
    d->slot = 0;
    memset(d->drawn, 0, sizeof d->drawn);
    for (uint32_t s = 0; s < d->mix->count; s++)
        set_window(d, s);
}

void
spw__data_draw_start(data_draw *d, const data_mix *mix, uint64_t position)
{
    d->mix = mix;
    d->cycle = position / mix->period;
    start_period(d);
    while (d->slot < position % mix->period)
        (void)take_slot(d);
}

uint32_t
spw__data_draw_next(data_draw *d, uint64_t *index_out)
{
    uint32_t s;
    if (d->slot == d->mix->period) {
        d->cycle++;
        start_period(d);
    }
    s = take_slot(d);
    *index_out = d->cycle * d->mix->share[s] + d->drawn[s] - 1;
    return s;
}
