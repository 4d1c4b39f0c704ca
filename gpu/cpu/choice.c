/*
 * Which keys attention reads, on the cpu device: scores of a row in scratch, tile by tile and head by head, then the row's k-th greatest by
 * its digits, from the highest on, and a bit for each key that is not below it. Cut by rows.
 */
#include "cpu_internal.h"
#include <math.h>

enum { TILE_Q = 32, TILE_K = 128, DIGITS = 256 };

typedef struct choice {
    uint32_t *bits;
    const float *query, *weights;
    float *key, *scores;
    const float *new_key;
    spw_choice_shape s;
} choice;

/* The position of row t of sequence b, where the keys end that it may read, and the first one. */
static uint64_t
position_of(const choice *c, uint64_t b, uint64_t t)
{
    return (c->s.starts != NULL ? (uint64_t)c->s.starts[b] : 0) + c->s.first + t;
}

static uint64_t
first_of(const choice *c, uint64_t row)
{
    return c->s.begins != NULL ? (uint64_t)c->s.begins[row] / c->s.each : 0;
}

static uint64_t
end_of(const choice *c, uint64_t b, uint64_t t)
{
    const uint64_t row = b * c->s.T + t, begin = c->s.begins != NULL ? (uint64_t)c->s.begins[row] : 0;
    return first_of(c, row) + (position_of(c, b, t) + 1 - begin) / c->s.each;
}

static const float *
keys_of(const choice *c, uint64_t b)
{
    const spw_choice_shape *s = &c->s;
    return c->key + (s->slots != NULL ? (uint64_t)s->slots[b] * s->capacity : b * s->key_rows) * s->D;
}

static void
put_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const choice *c = ctx;
    const spw_choice_shape *s = &c->s;
    uint64_t at = (uint64_t)s->slots[part_idx] * s->capacity + position_of(c, part_idx, 0);
    (void)worker_idx;
    SPW_ASSERT(position_of(c, part_idx, s->T) <= s->capacity);
    memcpy(c->key + at * s->D, c->new_key + part_idx * s->T * s->D, s->T * s->D * sizeof(float));
}

static void
score_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const choice *c = ctx;
    const spw_choice_shape *s = &c->s;
    uint64_t tiles = (s->T + TILE_Q - 1) / TILE_Q, b = part_idx / tiles, t0 = part_idx % tiles * TILE_Q;
    uint64_t nq = min_u64(TILE_Q, s->T - t0), row = b * s->T + t0, end = end_of(c, b, t0 + nq - 1),
             cols = s->words * 32;
    const float *key = keys_of(c, b), *weights = c->weights + row * s->H;
    float product[TILE_Q * TILE_K];
    (void)worker_idx;
    for (uint64_t k0 = first_of(c, row) / TILE_K * TILE_K; k0 < end; k0 += TILE_K) {
        uint64_t nk = min_u64(TILE_K, end - k0);
        for (uint64_t h = 0; h < s->H; h++) {
            spw__cpu_gemm_here(false, true, nq, nk, s->D, 1.0f, c->query + (row * s->H + h) * s->D, s->H * s->D,
                               key + k0 * s->D, s->D, 0.0f, product, TILE_K);
            for (uint64_t i = 0; i < nq; i++) {
                float *to = c->scores + (row + i) * cols + k0, w = weights[i * s->H + h];
                const float *from = product + i * TILE_K;
                for (uint64_t j = 0; j < nk; j++) {
                    float x = from[j] < 0.0f ? 0.0f : from[j]; /* a NaN stays */
                    to[j] = h > 0 ? to[j] + w * x : w * x;
                }
            }
        }
    }
}

/* Whole numbers in the order of numbers, with 0 and -0 the same, and a NaN above all. */
static uint32_t
rank_of(float x)
{
    uint32_t bits = spw_f32_bits(x);
    if (isnan(x))
        return UINT32_MAX;
    bits = bits == 0x80000000u ? 0 : bits;
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

/* The k-th greatest rank of x (n), and of how many that have it *left are among the first k. */
static uint32_t
find_rank(const float *x, uint64_t n, uint64_t k, uint64_t *left)
{
    uint32_t found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint64_t counts[DIGITS] = {0};
        uint32_t digit = DIGITS - 1;
        for (uint64_t i = 0; i < n; i++) {
            uint32_t rank = rank_of(x[i]);
            counts[rank >> shift & (DIGITS - 1)] += ((uint64_t)(rank ^ found) >> shift >> 8) == 0;
        }
        for (; counts[digit] < k; digit--)
            k -= counts[digit];
        found |= digit << shift;
    }
    *left = k;
    return found;
}

static void
choose_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const choice *c = ctx;
    const spw_choice_shape *s = &c->s;
    uint64_t row = part_idx, first = first_of(c, row), end = end_of(c, row / s->T, row % s->T), left = 0;
    const float *scores = c->scores + row * s->words * 32;
    uint32_t *bits = c->bits + row * s->words, least = 0;
    bool all = end - first <= s->keys;
    (void)worker_idx;
    memset(bits, 0, s->words * sizeof *bits);
    if (!all)
        least = find_rank(scores + first, end - first, s->keys, &left);
    for (uint64_t u = first; u < end; u++) {
        uint32_t rank = all ? UINT32_MAX : rank_of(scores[u]);
        bool chosen = all || rank > least || (rank == least && left > 0);
        left -= !all && chosen && rank == least;
        bits[u / 32] |= (uint32_t)chosen << u % 32;
    }
}

void
spw__cpu_choose_keys(spw_gpu_queue *queue, uint32_t *bits, const act *query, act *key, const act *new_key,
                     const act *weights, float *scratch, const spw_choice_shape *shape)
{
    choice c = {.bits = bits,
                .query = query,
                .weights = weights,
                .key = key,
                .scores = scratch,
                .new_key = new_key,
                .s = *shape};
    uint64_t tiles = (shape->T + TILE_Q - 1) / TILE_Q;
    if (new_key != NULL)
        spw__cpu_run(queue, (uint32_t)shape->B, put_part, &c);
    spw__cpu_run(queue, (uint32_t)(shape->B * tiles), score_part, &c);
    spw__cpu_run(queue, (uint32_t)(shape->B * shape->T), choose_part, &c);
}
