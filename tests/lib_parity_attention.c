/* Attention beside the cpu device, and beside itself where spw_gpu_attention_cached() promises equal bits. */
#include "lib_reference.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/*
 * Documents of 1 to 2 length - 1 tokens, other ones in each sequence; the first and the last are cut off, as windows do it. begins,
 * ends (B, T) as spw_gpu_attention() takes them.
 */
void
parity_documents(uint64_t B, uint64_t T, uint64_t length, int32_t *begins, int32_t *ends)
{
    for (uint64_t b = 0; b < B; b++)
        for (uint64_t t = 0, n; t < T; t += n) {
            uint32_t r[4];
            spw_philox(length, b, t, r);
            n = 1 + r[0] % (2 * length - 1);
            n = n < T - t ? n : T - t;
            for (uint64_t i = t; i < t + n; i++) {
                begins[b * T + i] = (int32_t)t;
                ends[b * T + i] = (int32_t)(t + n);
            }
        }
}

/* ------------------------------------------- attention: d = B, T, Hq, Hk, D, window, documents' length or 0, cap in quarters, sinks, Dv or 0, woven, one key in how many is chosen or 0 */

static spw_attention_shape
shape_of(const subject *s)
{
    const uint64_t *d = s->d;
    uint64_t stride = (d[2] + 2 * d[3]) * d[4];
    return (spw_attention_shape){.B = d[0],
                                 .T = d[1],
                                 .Hq = d[2],
                                 .Hk = d[3],
                                 .D = d[4],
                                 .q_stride = stride,
                                 .kv_stride = stride,
                                 .qk_head =
                                     d[10] > 0 ? 3 * d[4] : 0, /* a head's query, key and value beside each other */
                                 .Dv = d[9],
                                 .v_stride = d[9] > 0 ? stride : 0,
                                 .v_head = d[10] > 0  ? 3 * d[4]
                                           : d[9] > 0 ? d[4]
                                                      : 0, /* their last elements: what lies between heads stays */
                                 .scale = 1 / sqrtf((float)d[4]),
                                 .window = d[5],
                                 .cap = (float)d[7] / 4};
}

/* Words of a row's bits, for so many positions: sometimes one that nobody needs. */
static uint64_t
words_for(const subject *s, uint64_t positions)
{
    return positions / 32 + 1 + s->d[2] % 2;
}

/* Where in a row the keys begin, and the values. */
static uint64_t
keys_at(const spw_attention_shape *s)
{
    return s->qk_head > 0 ? s->D : s->Hq * s->D;
}

static uint64_t
values_at(const spw_attention_shape *s)
{
    if (s->qk_head > 0)
        return 2 * s->D;
    return (s->Hq + s->Hk) * s->D + (s->Dv > 0 ? s->D - s->Dv : 0);
}

static uint64_t
value_width(const uint64_t *d)
{
    return d[9] > 0 ? d[9] : d[4];
}

static void
run_attention(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_attention_shape shape = shape_of(s);
    uint64_t k = keys_at(&shape), v = values_at(&shape);
    shape.begins = s->d[6] > 0 ? p[5] : NULL;
    shape.ends = s->d[6] > 0 ? p[6] : NULL;
    shape.sinks = s->d[8] > 0 ? p[7] : NULL;
    shape.chosen = s->d[11] > 0 ? p[9] : NULL;
    shape.chosen_words = words_for(s, s->d[1]);
    spw_gpu_attention(q, p[1], p[2], p[0], subject_elem(p[0], k), subject_elem(p[0], v), &shape);
    spw_gpu_attention_backward(q, p[4], subject_elem(p[4], k), subject_elem(p[4], v), s->d[8] ? p[8] : NULL, p[3], p[1],
                               p[2], p[0], subject_elem(p[0], k), subject_elem(p[0], v), &shape);
}

static void
run_attention_cached(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_attention_shape shape = shape_of(s);
    uint64_t k = keys_at(&shape), v = values_at(&shape);
    spw_attention_cache cache = {p[2], p[3], s->d[6], p[4], p[5]};
    shape.sinks = s->d[8] > 0 ? p[6] : NULL;
    shape.chosen = s->d[11] > 0 ? p[7] : NULL;
    shape.chosen_words = words_for(s, s->d[6]);
    spw_gpu_attention_cached(q, p[1], p[0], subject_elem(p[0], k), subject_elem(p[0], v), &cache, &shape);
}

/* Slots in turn from the last, starts all over the cache; what no row has written yet is NaN. */
static void
fill_cache(const subject *s, float **host, int32_t **ints)
{
    uint64_t B = s->d[0], T = s->d[1], capacity = s->d[6];
    for (uint64_t b = 0; b < B; b++) {
        ints[4][b] = (int32_t)(B - 1 - b);
        ints[5][b] = (int32_t)(b == 0 ? capacity - T : (capacity - T) * b / (B + 1));
        for (int k = 2; k < 4; k++) {
            uint64_t width = s->d[3] * (k == 2 ? s->d[4] : value_width(s->d));
            for (uint64_t i = (uint64_t)ints[5][b] * width; i < capacity * width; i++)
                host[k][(uint64_t)ints[4][b] * capacity * width + i] = NAN;
        }
    }
    if (s->d[11] > 0)
        parity_chosen(B, T, s->d[11], words_for(s, capacity), NULL, ints[5], ints[7]);
}

static void
fill_documents(const subject *s, float **host, int32_t **ints)
{
    (void)host;
    if (s->d[6] > 0)
        parity_documents(s->d[0], s->d[1], s->d[6], ints[5], ints[6]);
    if (s->d[11] > 0)
        parity_chosen(s->d[0], s->d[1], s->d[11], words_for(s, s->d[1]), s->d[6] > 0 ? ints[5] : NULL, NULL, ints[9]);
}

static const uint64_t attentions[][12] = {
    {2, 70, 2, 2, 24, 0, 0, 0, 0, 16, 0, 3},
    {1, 150, 3, 3, 192, 0, 0, 0, 0, 128, 0, 9},
    {1, 130, 2, 1, 8, 0, 40, 0, 1, 0, 0, 4},
    {2, 70, 1, 1, 256, 0, 0, 0, 0, 0, 0, 30},
    {1, 90, 2, 2, 80, 0, 0, 0, 0, 0, 1, 5},
    {1, 40, 2, 1, 301, 0, 0, 0, 0, 259, 0, 3},
    {1, 97, 2, 2, 512, 0, 40, 0, 1, 0, 0, 6},
    {2, 70, 3, 3, 24, 0, 0, 0, 0, 0, 1},
    {1, 90, 2, 2, 80, 9, 30, 0, 0, 0, 1},
    {1, 65, 2, 2, 22, 0, 0, 0, 0, 0, 1},
    {1, 90, 4, 2, 192, 0, 0, 0, 0, 128},
    {2, 70, 2, 2, 48, 9, 0, 0, 1, 32},
    {1, 130, 2, 1, 24, 0, 40, 0, 0, 16},
    {1, 65, 2, 1, 22, 0, 0, 0, 0, 13},
    {1, 70, 1, 1, 256, 0, 30, 0, 0, 200},
    {1, 40, 2, 2, 136, 0, 0, 0, 0, 136},
    {1, 1, 1, 1, 8, 0},
    {2, 7, 2, 2, 8, 0},
    {1, 65, 2, 1, 24, 0},
    {2, 33, 6, 2, 16, 0},
    {1, 150, 2, 1, 64, 0},
    {1, 40, 2, 1, 8, 1},
    {2, 33, 4, 2, 6, 5},
    {1, 200, 2, 1, 32, 37},
    {1, 70, 1, 1, 128, 0},
    {1, 45, 2, 1, 192, 0},
    {1, 40, 1, 1, 256, 9},
    {1, 33, 2, 2, 5, 0},
    {1, 130, 1, 1, 104, 0},
    {1, 129, 1, 1, 40, 128},
    {1, 90, 2, 1, 80, 33},
    {2, 40, 2, 1, 8, 0, 3},
    {1, 200, 4, 2, 64, 0, 40},
    {2, 150, 2, 1, 128, 33, 60},
    {1, 90, 1, 1, 256, 0, 25},
    {1, 130, 2, 2, 80, 0, 300},
    {1, 65, 2, 1, 24, 0, 0, 1},
    {2, 33, 4, 2, 6, 5, 0, 2},
    {1, 90, 2, 1, 80, 33, 0, 1},
    {2, 130, 2, 1, 128, 0, 30, 2},
    {1, 70, 2, 2, 256, 9, 0, 1},
    {2, 7, 2, 2, 8, 0, 0, 0, 1},
    {1, 70, 4, 1, 64, 0, 0, 0, 1},
    {2, 150, 2, 1, 64, 33, 60, 0, 1},
    {1, 45, 2, 1, 256, 9, 0, 0, 1},
    {1, 65, 2, 1, 24, 0, 0, 1, 1},
    {1, 69, 4, 1, 512, 0}, /* in quarters of columns, of which heads of 320 and 264 have three */
    {1, 1, 2, 2, 512, 0},
    {1, 97, 2, 2, 512, 33, 40, 0, 1},
    {2, 33, 2, 1, 320, 9, 0, 2, 1, 128},
    {1, 65, 2, 1, 512, 0, 30, 1, 0, 264},
    {1, 45, 2, 2, 264, 0, 0, 0, 0, 0, 1},
    {1, 40, 2, 1, 301, 5, 0, 0, 0, 259},
    {2, 1024, 12, 12, 64, 0},
    {1, 1000, 8, 8, 192, 0, 0, 0, 0, 128},
    {2, 1000, 8, 8, 192, 0, 0, 0, 0, 128, 0, 9},
    {1, 700, 4, 4, 256, 0, 0, 0, 0, 256, 0, 4},
    {1, 700, 4, 4, 256, 0, 300, 0, 0, 256},
    {1, 1000, 8, 2, 128, 0},
    {1, 700, 4, 1, 256, 0},
    {1, 2048, 8, 2, 128, 300},
    {3, 333, 4, 4, 80, 0},
    {1, 513, 3, 1, 96, 64},
    {2, 1024, 12, 12, 64, 0, 100},
    {1, 1000, 8, 2, 128, 0, 400},
    {1, 2048, 8, 2, 128, 300, 700},
    {1, 1000, 8, 4, 256, 0, 0, 4},
    {1, 2048, 8, 2, 128, 300, 0, 2},
    {2, 2048, 64, 8, 64, 128, 0, 0, 1},
    {1, 1000, 8, 8, 96, 0, 0, 0, 0, 0, 1},
    {2, 700, 4, 4, 256, 0, 100, 0, 0, 0, 1},
    {1, 1000, 16, 2, 512, 0},
    {2, 700, 4, 2, 512, 300, 200, 2, 1, 384},
};
enum { SMALL_ATTENTIONS = 53, ALL_ATTENTIONS = sizeof attentions / sizeof attentions[0] };

static void examine_fronts(const parity *p);

void
parity_attention(const parity *p)
{
    examine_fronts(p);
    for (size_t i = 0; i < (p->large ? ALL_ATTENTIONS : SMALL_ATTENTIONS); i++) {
        const uint64_t *d = attentions[i];
        uint64_t rows = d[0] * d[1], packed = rows * (d[2] + 2 * d[3]) * d[4], n = rows * d[2] * value_width(d);
        subject_examine(p, &(subject){.name = "attention",
                                      .a = {{ACT, packed, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {FP32_OUT, rows * d[2], 0, 0},
                                            {ACT, n, 0, 0},
                                            {ACT_OUT, packed, 0, 0},
                                            {INT, rows, 1, 0},
                                            {INT, rows, 1, 0},
                                            {ACT, d[2], 0, 0},
                                            {FP32, d[2], 0, 0},
                                            {INT, rows * (d[1] / 32 + 2), 1, 0}},
                                      .d = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11]},
                                      .row = {d[4], value_width(d), 0, 0, d[4]},
                                      /* With one token to see, q and k have no gradient. */
                                      .heads = {[4] = d[1] == 1 || d[5] == 1 ? 1 : d[2] + 2 * d[3]},
                                      .row_least = 2, /* first queries: what cancels is rounded, and little is left */
                                      .worst = {2e-6, 3e-3, 4e-4}, /* probabilities and their gradients are rounded */
                                      .reference = d[0] * d[1] * d[1] * d[2] * d[4] < 1e7 ? reference_attention : NULL,
                                      .ways = 2,
                                      .run = run_attention,
                                      .prepare = fill_documents});
    }
}

/* ------------------- keys in front of a sequence's: d = B, T, Hq, D, window, rows that each stands for, one in how many is chosen or 0, documents' length or 0 */

static uint64_t
front_words(const uint64_t *d)
{
    return d[1] / d[5] / 32 + 1;
}

static void
run_attention_front(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d, rows = d[0] * d[1];
    int32_t *begins = d[7] > 0 ? p[11] : NULL;
    spw_attention_shape shape = {.B = d[0],
                                 .T = d[1],
                                 .Hq = d[2],
                                 .Hk = 1,
                                 .begins = begins,
                                 .ends = begins != NULL ? begins + rows : NULL,
                                 .front_rows = begins != NULL ? begins + 2 * rows : NULL,
                                 .D = d[3],
                                 .q_stride = d[2] * d[3],
                                 .kv_stride = d[3],
                                 .scale = 1 / sqrtf((float)d[3]),
                                 .window = d[4],
                                 .sinks = p[7],
                                 .chosen = d[6] > 0 ? p[9] : NULL,
                                 .chosen_words = front_words(d),
                                 .front = d[1] / d[5],
                                 .front_each = d[5]};
    if (begins != NULL)
        spw_gpu_windows(q, begins + 2 * rows, begins, NULL, d[0], d[1], d[5]);
    spw_gpu_attention(q, p[1], p[2], p[0], p[10], p[10], &shape);
    spw_gpu_attention_backward(q, p[4], p[5], p[6], p[8], p[3], p[1], p[2], p[0], p[10], p[10], &shape);
}

static void
fill_fronts(const subject *s, float **host, int32_t **ints)
{
    (void)host;
    for (uint64_t i = 0; i < s->d[0] * s->d[1] * front_words(s->d); i++) {
        uint32_t word = 0, r[4];
        for (uint32_t bit = 0; bit < 32 && s->d[6] > 0; bit++) {
            spw_philox(8, i, bit, r);
            word |= (uint32_t)(r[0] % s->d[6] == 0) << bit;
        }
        ints[9][i] = (int32_t)word;
    }
    if (s->d[7] > 0)
        parity_documents(s->d[0], s->d[1], s->d[7], ints[11], ints[11] + s->d[0] * s->d[1]);
}

/* Fewer rows than a key stands for; tiles that have both kinds, and neither; heads of a tile's width and narrower; documents, short ones and longer than tiles. */
static void
examine_fronts(const parity *p)
{
    static const uint64_t sizes[][8] = {{1, 3, 1, 8, 2, 4},
                                        {2, 9, 2, 24, 4, 4},
                                        {1, 70, 2, 16, 0, 1, 3},
                                        {2, 150, 3, 40, 33, 4, 2},
                                        {1, 200, 1, 64, 9, 2},
                                        {1, 97, 2, 512, 16, 4, 5},
                                        {1, 65, 2, 301, 9, 32},
                                        {1, 150, 4, 13, 20, 50},
                                        {2, 70, 2, 16, 0, 1, 3, 20},
                                        {2, 150, 3, 40, 33, 4, 0, 9},
                                        {1, 333, 1, 24, 20, 2, 2, 90},
                                        {2, 170, 2, 40, 9, 16, 0, 60},
                                        {1, 1000, 16, 512, 128, 4, 3},
                                        {2, 1024, 8, 512, 128, 128},
                                        {2, 1000, 16, 512, 128, 4, 3, 150}};
    for (size_t i = 0; i < (p->large ? 15 : 12); i++) {
        const uint64_t *d = sizes[i];
        uint64_t rows = d[0] * d[1], n = rows * d[2] * d[3], keys = d[0] * (d[1] / d[5] + d[1]) * d[3];
        subject_examine(p, &(subject){.name = "attention with keys in front",
                                      .a = {{ACT, n, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {FP32_OUT, rows * d[2], 0, 0},
                                            {ACT, n, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {ACT_OUT, keys, 0, 0},
                                            {ACT_OUT, keys, 0, 0},
                                            {ACT, d[2], 0, 0},
                                            {FP32, d[2], 0, 0},
                                            {INT, rows * front_words(d), 1, 0},
                                            {ACT, keys, 0, 0},
                                            {INT, 2 * rows + d[0] * (d[1] / d[5]), 1, 0}},
                                      .d = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]},
                                      .row_least = 2,
                                      .worst = {2e-6, 6e-3, 8e-4},
                                      .run = run_attention_front,
                                      .prepare = fill_fronts});
    }
}

/* ------------------- the same with a cache: d = B, T, Hq, D, window, rows that each stands for, one in how many is chosen or 0, capacity */

static uint64_t
front_kept(const uint64_t *d)
{
    return spw_round_up(d[7] / d[5], SPW_FRONT_TILE);
}

static uint64_t
kept_words(const uint64_t *d)
{
    return front_kept(d) / 32;
}

static void
run_front_cached(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t *d = s->d;
    const spw_attention_cache cache = {p[2], p[2], d[7], p[5], p[6]};
    const spw_attention_shape shape = {.B = d[0],
                                       .T = d[1],
                                       .Hq = d[2],
                                       .Hk = 1,
                                       .D = d[3],
                                       .q_stride = d[2] * d[3],
                                       .kv_stride = d[3],
                                       .scale = 1 / sqrtf((float)d[3]),
                                       .window = d[4],
                                       .sinks = p[4],
                                       .chosen = d[6] > 0 ? p[7] : NULL,
                                       .chosen_words = kept_words(d),
                                       .front = front_kept(d),
                                       .front_each = d[5]};
    spw_gpu_attention_cached(q, p[1], p[0], p[3], p[3], &cache, &shape);
}

/* What is not there yet is not read: neither rows, nor keys of several that are not complete. */
static void
fill_front_cache(const subject *s, float **host, int32_t **ints)
{
    const uint64_t *d = s->d, front = front_kept(d), each = (front + d[7]) * d[3];
    for (uint64_t b = 0; b < d[0]; b++) {
        const uint64_t start = b == 0 ? d[7] - d[1] : (d[7] - d[1]) * (b - 1) / d[0];
        float *keys = host[2] + (d[0] - 1 - b) * each;
        ints[5][b] = (int32_t)(d[0] - 1 - b);
        ints[6][b] = (int32_t)start;
        for (uint64_t i = (start + d[1]) / d[5] * d[3]; i < front * d[3]; i++)
            keys[i] = NAN;
        for (uint64_t i = (front + start) * d[3]; i < each; i++)
            keys[i] = NAN;
    }
    for (uint64_t i = 0; i < d[0] * d[1] * kept_words(d); i++) {
        uint32_t word = 0, r[4];
        for (uint32_t bit = 0; bit < 32 && d[6] > 0; bit++) {
            spw_philox(9, i, bit, r);
            word |= (uint32_t)(r[0] % d[6] == 0) << bit;
        }
        ints[7][i] = (int32_t)word;
    }
}

static void
examine_front_cached(const parity *p)
{
    static const uint64_t sizes[][8] = {{3, 1, 2, 8, 5, 4, 0, 40},     {2, 9, 2, 24, 4, 4, 2, 70},
                                        {1, 70, 3, 40, 33, 4, 2, 150}, {3, 1, 2, 512, 9, 4, 3, 90},
                                        {2, 5, 1, 16, 0, 1, 0, 30},    {1, 40, 2, 301, 9, 16, 0, 130}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const uint64_t *d = sizes[i], n = d[0] * d[1] * d[2] * d[3];
        subject_examine(p, &(subject){.name = "attention cached, keys in front",
                                      .a = {{ACT, n, 0, 0},
                                            {ACT_OUT, n, 0, 0},
                                            {ACT, d[0] * (front_kept(d) + d[7]) * d[3], 0, 0},
                                            {ACT, d[0] * d[1] * d[3], 0, 0},
                                            {ACT, d[2], 0, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, d[0] * d[1] * kept_words(d), 1, 0}},
                                      .d = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]},
                                      .worst = {5e-7, 3e-3, 4e-4},
                                      .run = run_front_cached,
                                      .prepare = fill_front_cache});
    }
}

void
parity_attention_cached(const parity *p)
{
    static const uint64_t sizes[][12] = {
        {2, 9, 2, 2, 192, 0, 70, 0, 0, 128, 0, 4},
        {3, 1, 3, 3, 24, 0, 90, 0, 0, 13, 0, 3},
        {2, 9, 8, 1, 320, 0, 70, 0, 0, 0, 0, 5},
        {2, 9, 3, 3, 24, 0, 70, 0, 0, 0, 1},
        {2, 9, 2, 2, 192, 0, 70, 0, 0, 128},
        {3, 1, 4, 2, 24, 5, 40, 0, 0, 13},
        {2, 9, 2, 1, 24, 5, 40, 1},
        {1, 1, 1, 1, 8, 0, 1},
        {3, 1, 4, 2, 16, 0, 90},
        {2, 9, 2, 1, 24, 0, 70},
        {3, 1, 2, 1, 8, 20, 150},
        {2, 70, 2, 2, 8, 33, 140},
        {2, 5, 2, 1, 128, 0, 70},
        {1, 3, 1, 1, 256, 0, 40},
        {3, 1, 4, 2, 64, 20, 90, 0, 1},
        {2, 9, 2, 1, 24, 0, 70, 0, 1},
        {2, 9, 8, 1, 512, 0, 70},
        {3, 1, 2, 1, 320, 20, 90, 2, 1, 136},
        {8, 1, 12, 12, 64, 0, 1024},
    };
    examine_front_cached(p);
    for (size_t i = 0; i < (p->large ? 19 : 18); i++) {
        const uint64_t *d = sizes[i];
        uint64_t rows = d[0] * d[1];
        subject_examine(p, &(subject){.name = "attention cached",
                                      .a = {{ACT, rows * (d[2] + 2 * d[3]) * d[4], 0, 0},
                                            {ACT_OUT, rows * d[2] * value_width(d), 0, 0},
                                            {ACT, d[0] * d[6] * d[3] * d[4], 0, 0},
                                            {ACT, d[0] * d[6] * d[3] * value_width(d), 0, 0},
                                            {INT, d[0], 1, 0},
                                            {INT, d[0], 1, 0},
                                            {ACT, d[2], 0, 0},
                                            {INT, rows * (d[6] / 32 + 2), 1, 0}},
                                      .d = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], d[9], d[10], d[11]},
                                      .worst = {5e-7, 3e-3, 4e-4},
                                      .reference = reference_attention_cached,
                                      .ways = 2,
                                      .run = run_attention_cached,
                                      .prepare = fill_cache});
    }
}

/* ---------------------------------------------------------------- chunks */

/* Bounds of rows as they are counted here, of whole sequences, of documents, and where a cache has what is before. */
void
parity_chunks(const parity *p)
{
    static const uint64_t sizes[][4] = {{2, 7, 3, 0}, {3, 1, 4, 0}, {1, 65, 64, 0}, {2, 300, 17, 40}, {2, 40, 50, 9}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t B = sizes[i][0], T = sizes[i][1], C = sizes[i][2], length = sizes[i][3], rows = B * T;
        int32_t *host = subject_need(5 * rows * 4), *got = subject_need(3 * rows * 4);
        int32_t *begins = host, *ends = host + rows, *starts = host + 2 * rows;
        int32_t *at = NULL, *documents;
        spw_gpu_queue *q = NULL;
        subject_use(p->gpu);
        for (uint64_t r = 0; r < rows; r++) {
            begins[r] = 0;
            ends[r] = (int32_t)T;
            starts[r] = (int32_t)(5 * r);
        }
        if (length > 0)
            parity_documents(B, T, length, begins, ends);
        assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        assert_int_equal(spw_gpu_alloc(p->gpu, (void **)&at, 6 * rows * 4, NULL), SPW_OK);
        documents = length > 0 ? at + 3 * rows : NULL;
        spw_gpu_write_bytes(q, at + 3 * rows, host, 3 * rows * 4);
        spw_gpu_chunks(q, at, at + rows, documents, documents != NULL ? documents + rows : NULL, NULL, B, T, C);
        spw_gpu_chunks(q, at + 2 * rows, NULL, NULL, NULL, at + 5 * rows, B, T, C);
        spw_gpu_read_bytes(q, got, at, 3 * rows * 4);
        for (uint64_t r = 0; r < rows; r++) {
            uint64_t t = r % T, first = t, last = t, place = (uint64_t)starts[r / T] + t;
            while (first > (uint64_t)begins[r] && (first - (uint64_t)begins[r]) % C != 0)
                first--;
            while (last + 1 < (uint64_t)ends[r] && (last + 1 - (uint64_t)begins[r]) % C != 0)
                last++;
            assert_int_equal(got[r], first);
            assert_int_equal(got[rows + r], last + 1);
            assert_int_equal(got[2 * rows + r], place - place % C);
        }
        spw_gpu_free(p->gpu, at);
        spw_gpu_queue_destroy(q);
        free(host);
        free(got);
    }
}

/* ---------------------------------------------------------------- promises about bits */

/* One sequence of T tokens in pieces, in the slot of a cache that begins as NaN; row t of out (host). chunk: 0, or of what a row reads. */
static void
attend_in_pieces(spw_gpu *gpu, spw_gpu_queue *q, const subject *s, uint64_t chunk, void *packed, uint64_t piece,
                 void *out)
{
    spw_attention_shape shape = shape_of(s);
    uint64_t T = shape.T, width = shape.Hk * shape.D, capacity = T + 3, k = keys_at(&shape), v = values_at(&shape);
    uint64_t out_width = shape.Hq * value_width(s->d);
    uint64_t bytes = spw_dtype_bytes(subject_type()), cache_bytes = 3 * capacity * width * bytes;
    unsigned char *nan = subject_need(cache_bytes);
    void *key = NULL, *value = NULL, *places = NULL, *y = NULL;
    int32_t *begins = NULL;
    memset(nan, 0xff, cache_bytes);
    assert_int_equal(spw_gpu_alloc(gpu, &key, cache_bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &value, cache_bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &places, 8, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, (void **)&begins, T * 4, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &y, T * out_width * bytes, NULL), SPW_OK);
    spw_gpu_write_bytes(q, key, nan, cache_bytes);
    spw_gpu_write_bytes(q, value, nan, cache_bytes);
    for (uint64_t t = 0; t < T; t += piece) {
        int32_t place[2] = {2, (int32_t)t};
        spw_attention_cache cache = {key, value, capacity, places, (const int32_t *)places + 1};
        uint64_t at = t * shape.q_stride;
        spw_gpu_write_bytes(q, places, place, sizeof place);
        shape.T = T - t < piece ? T - t : piece;
        shape.begins = chunk > 0 ? begins : NULL;
        if (chunk > 0)
            spw_gpu_chunks(q, begins, NULL, NULL, NULL, cache.starts, 1, shape.T, chunk);
        spw_gpu_attention_cached(q, subject_elem(y, t * out_width), subject_elem(packed, at),
                                 subject_elem(packed, at + k), subject_elem(packed, at + v), &cache, &shape);
    }
    spw_gpu_read_bytes(q, out, y, T * out_width * bytes);
    spw_gpu_free(gpu, key);
    spw_gpu_free(gpu, value);
    spw_gpu_free(gpu, places);
    spw_gpu_free(gpu, begins);
    spw_gpu_free(gpu, y);
    free(nan);
}

/* The first t of T tokens alone: rows of out (host) and, behind them, their statistics (Hq, t). */
static void
attend_to_prefix(spw_gpu *gpu, spw_gpu_queue *q, spw_attention_shape shape, uint64_t chunk, uint64_t t, void *packed,
                 void *out)
{
    uint64_t k = keys_at(&shape), v = values_at(&shape);
    uint64_t y_bytes = t * shape.Hq * (shape.Dv > 0 ? shape.Dv : shape.D) * spw_dtype_bytes(subject_type());
    void *y = NULL, *lse = NULL;
    int32_t *bounds = NULL;
    assert_int_equal(spw_gpu_alloc(gpu, (void **)&bounds, 2 * t * 4, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &y, y_bytes, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &lse, shape.Hq * t * 4, NULL), SPW_OK);
    shape.T = t;
    if (chunk > 0) {
        shape.begins = bounds;
        shape.ends = bounds + t;
        spw_gpu_chunks(q, bounds, bounds + t, NULL, NULL, NULL, 1, t, chunk);
    }
    spw_gpu_attention(q, y, lse, packed, subject_elem(packed, k), subject_elem(packed, v), &shape);
    spw_gpu_read_bytes(q, out, y, y_bytes);
    spw_gpu_read_bytes(q, (char *)out + y_bytes, lse, shape.Hq * t * 4);
    spw_gpu_free(gpu, bounds);
    spw_gpu_free(gpu, y);
    spw_gpu_free(gpu, lse);
}

/*
 * A whole sequence through the cache has the bits of attention without one; so have its pieces, as a row's tiles are its own; and so
 * has its beginning without what follows, statistics included, where an unread tile that changes a sum by one rounding shows.
 */
void
parity_attention_bits(const parity *p)
{
    /* B, T, Hq, Hk, D, window, cap in quarters, Dv or 0, woven, chunk or 0 */
    static const uint64_t sizes[][10] = {{1, 65, 3, 3, 24, 0, 0, 0, 1},
                                         {1, 90, 2, 2, 192, 0, 0, 128},
                                         {1, 7, 2, 2, 8, 0},
                                         {1, 65, 2, 1, 24, 0},
                                         {1, 150, 2, 1, 8, 0},
                                         {1, 140, 2, 1, 8, 37},
                                         {1, 70, 2, 1, 24, 0, 1},
                                         {1, 90, 2, 1, 512, 0},
                                         {1, 140, 2, 1, 320, 37, 1},
                                         {1, 150, 2, 1, 24, 0, 0, 0, 0, 40},
                                         {1, 90, 2, 1, 320, 0, 0, 0, 0, 13},
                                         {1, 1000, 4, 2, 128, 0},
                                         {1, 700, 2, 2, 64, 300},
                                         {1, 700, 2, 2, 256, 0, 2},
                                         {1, 700, 4, 2, 128, 0, 0, 0, 0, 256}};
    for (size_t i = 0; i < (p->large ? 15 : 11); i++) {
        const uint64_t *d = sizes[i];
        subject s = {.d = {d[0], d[1], d[2], d[3], d[4], d[5], 0, d[6], 0, d[7], d[8]}};
        spw_attention_shape shape = shape_of(&s);
        uint64_t elems = shape.T * shape.q_stride, k = shape.Hq * value_width(s.d), n = shape.T * k;
        spw_dtype type = spw_gpu_get_info(p->gpu)->compute_dtype;
        uint64_t lse_bytes = shape.Hq * shape.T * 4, bytes = spw_dtype_bytes(type);
        float *host = subject_need(elems * 4);
        char *want = subject_need(n * 4 + lse_bytes), *got = subject_need(n * 4 + lse_bytes);
        void *packed = NULL;
        spw_gpu_queue *q = NULL;
        subject_use(p->gpu);
        for (uint64_t e = 0, key = subject_key(i); e < elems; e++)
            host[e] = subject_number(key, e);
        assert_int_equal(spw_gpu_queue_create(&q, p->gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        assert_int_equal(spw_gpu_alloc(p->gpu, &packed, elems * bytes, NULL), SPW_OK);
        spw_gpu_copy_h2d(q, packed, type, host, SPW_F32, elems);
        attend_to_prefix(p->gpu, q, shape, d[9], shape.T, packed, want);
        for (uint64_t piece = shape.T; piece > 0; piece = piece > 40 ? piece / 3 : piece > 7 ? 5 : 0) {
            attend_in_pieces(p->gpu, q, &s, d[9], packed, piece, got);
            assert_memory_equal(want, got, n * bytes);
        }
        for (uint64_t t = shape.T; t > 0; t = t > 4 ? t / 3 : t - 1) {
            attend_to_prefix(p->gpu, q, shape, d[9], t, packed, got);
            assert_memory_equal(want, got, t * k * bytes);
            for (uint64_t h = 0; h < shape.Hq; h++)
                assert_memory_equal(want + n * bytes + h * shape.T * 4, got + t * k * bytes + h * t * 4, t * 4);
        }
        spw_gpu_free(p->gpu, packed);
        spw_gpu_queue_destroy(q);
        free(host);
        free(want);
        free(got);
    }
}
