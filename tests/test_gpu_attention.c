/*
 * Attention of the cpu device against naive loops in double, and its backward against central differences of those loops, element
 * by element; with a cache, in pieces; with the kernels of every instruction set of this CPU.
 */
#include "lib_ops.h"
#include "lib_parity.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* --------------------- attention: d = B, T, Hq, Hk, D, window, length of documents or 0, cap in quarters, Dv or 0, woven, one key in how many is chosen or 0; packed */

typedef struct heads {
    const int32_t *begins, *ends; /* in ops_ids */
    const uint32_t *chosen;       /* there, too */
    uint64_t words;
    uint64_t B, T, Hq, Hk, D, Dv, window, q_stride, kv_stride, k_at, v_at, head;
    float cap;
    const float *sinks;
} heads;

static heads
heads_of(const ops_subject *s)
{
    heads h = {.B = s->d[0], .T = s->d[1], .Hq = s->d[2], .Hk = s->d[3], .D = s->d[4], .window = s->d[5]};
    if (s->d[6] > 0) {
        assert_true(2 * h.B * h.T <= OPS_N_MAX);
        parity_documents(h.B, h.T, s->d[6], ops_ids, ops_ids + h.B * h.T);
        h.begins = ops_ids;
        h.ends = ops_ids + h.B * h.T;
    }
    h.q_stride = (h.Hq + 2 * h.Hk) * h.D; /* one packed input: q, then k, then v in each row */
    h.kv_stride = h.q_stride;
    h.k_at = h.Hq * h.D;
    h.Dv = s->d[8] > 0 ? s->d[8] : h.D;
    h.v_at = (h.Hq + h.Hk) * h.D + h.D - h.Dv; /* heads D apart still: what lies between them is nobody's */
    h.cap = (float)s->d[7] / 4;
    h.head = h.D;
    if (s->d[9] > 0) { /* q, k and v of a head beside each other */
        h.k_at = h.D;
        h.v_at = 2 * h.D;
        h.head = 3 * h.D;
    }
    if (s->d[10] > 0) {
        int32_t *bits = ops_ids + 2 * h.B * h.T;
        h.words = h.T / 32 + 1 + h.Hq % 2;
        assert_true((2 + h.words) * h.B * h.T <= OPS_N_MAX);
        parity_chosen(h.B, h.T, s->d[10], h.words, h.begins, NULL, bits);
        h.chosen = (const uint32_t *)bits;
    }
    return h;
}

static void
attention_ref(const ops_subject *s, double *const *in, double *out)
{
    heads h = heads_of(s);
    double scale = 1 / sqrt((double)h.D), *p = malloc(h.T * sizeof *p);
    assert_non_null(p);
    for (uint64_t b = 0; b < h.B; b++)
        for (uint64_t head = 0; head < h.Hq; head++)
            for (uint64_t t = 0; t < h.T; t++) {
                const double *q = in[0] + (b * h.T + t) * h.q_stride + head * h.head;
                uint64_t hk = head / (h.Hq / h.Hk);
                double sum = s->inputs > 1 ? exp(in[1][head]) : 0, *o = out + (b * h.T + t) * h.Hq * h.Dv + head * h.Dv;
                uint64_t first = h.window > 0 && t + 1 > h.window ? t + 1 - h.window : 0;
                if (h.begins != NULL && (uint64_t)h.begins[b * h.T + t] > first)
                    first = (uint64_t)h.begins[b * h.T + t];
                for (uint64_t u = first; u <= t; u++) {
                    p[u] = 0;
                    if (h.chosen != NULL && (h.chosen[(b * h.T + t) * h.words + u / 32] >> u % 32 & 1) == 0)
                        continue;
                    const double *k = in[0] + (b * h.T + u) * h.kv_stride + h.k_at + hk * h.head;
                    double dot = 0;
                    for (uint64_t d = 0; d < h.D; d++)
                        dot += q[d] * k[d];
                    dot *= scale;
                    sum += p[u] = exp(s->d[7] > 0 ? (double)s->d[7] / 4 * tanh(dot * 4 / (double)s->d[7]) : dot);
                }
                for (uint64_t d = 0; d < h.Dv; d++) {
                    o[d] = 0;
                    for (uint64_t u = first; u <= t; u++)
                        o[d] += p[u] / sum * in[0][(b * h.T + u) * h.kv_stride + h.v_at + hk * h.head + d];
                }
            }
    free(p);
}

static spw_attention_shape
shape_of(const heads *h)
{
    return (spw_attention_shape){.B = h->B,
                                 .T = h->T,
                                 .Hq = h->Hq,
                                 .Hk = h->Hk,
                                 .D = h->D,
                                 .q_stride = h->q_stride,
                                 .kv_stride = h->kv_stride,
                                 .Dv = h->Dv < h->D ? h->Dv : 0,
                                 .qk_head = h->head > h->D ? h->head : 0,
                                 .v_stride = h->Dv < h->D ? h->kv_stride : 0,
                                 .v_head = h->head > h->D || h->Dv < h->D ? h->head : 0,
                                 .scale = 1 / sqrtf((float)h->D),
                                 .window = h->window,
                                 .begins = h->begins,
                                 .ends = h->ends,
                                 .cap = h->cap,
                                 .sinks = h->sinks,
                                 .chosen = h->chosen,
                                 .chosen_words = h->words};
}

static void
attention_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    heads h = heads_of(s);
    spw_attention_shape shape;
    h.sinks = s->inputs > 1 ? in[1] : NULL;
    shape = shape_of(&h);
    spw_gpu_attention(q, out, ops_saved[0], in[0], in[0] + h.k_at, in[0] + h.v_at, &shape);
}

static void
attention_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
              float *const *g)
{
    heads h = heads_of(s);
    spw_attention_shape shape;
    h.sinks = s->inputs > 1 ? in[1] : NULL;
    shape = shape_of(&h);
    for (uint64_t i = 0; h.Dv < h.D && i < h.B * h.T * h.q_stride; i++)
        g[0][i] = 0; /* what lies between heads of values stays */
    spw_gpu_attention_backward(q, g[0], g[0] + h.k_at, g[0] + h.v_at, s->inputs > 1 ? g[1] : NULL, dout, out,
                               ops_saved[0], in[0], in[0] + h.k_at, in[0] + h.v_at, &shape);
}

/*
 * Causal attention on packed qkv: one token, tiles cut off and several tiles, plain and grouped heads, odd head sizes,
 * windows of one key, inside a tile, across tiles, and one that leaves tiles unread; documents, inside tiles and over several; scores with a
 * cap; a head's query, key and value beside each other; heads of more than 256 elements; keys that are chosen, tiles without one among them.
 */
static void
test_attention(void **state)
{
    static const uint64_t sizes[][11] = {{1, 1, 1, 1, 8, 0},
                                         {2, 40, 2, 2, 6, 0, 0, 0, 4, 0, 3},
                                         {1, 200, 2, 1, 4, 0, 0, 0, 0, 0, 9},
                                         {1, 150, 2, 2, 4, 0, 40, 0, 0, 0, 4},
                                         {1, 290, 1, 1, 4, 0, 0, 0, 3, 0, 60},
                                         {1, 140, 2, 2, 4, 37, 0, 0, 0, 1, 2},
                                         {2, 7, 2, 2, 8, 0},
                                         {1, 65, 2, 1, 20, 0},
                                         {2, 33, 6, 2, 4, 0},
                                         {1, 150, 2, 1, 8, 0},
                                         {1, 200, 1, 1, 4, 0},
                                         {1, 40, 2, 1, 4, 1},
                                         {2, 33, 4, 2, 6, 5},
                                         {1, 150, 2, 2, 8, 149},
                                         {1, 200, 2, 1, 4, 100},
                                         {1, 300, 1, 1, 4, 37},
                                         {1, 290, 1, 1, 4, 129},
                                         {2, 40, 2, 1, 4, 0, 1},
                                         {1, 150, 2, 1, 8, 0, 12},
                                         {1, 290, 2, 2, 4, 0, 90},
                                         {1, 200, 1, 1, 4, 21, 40},
                                         {2, 7, 2, 2, 8, 0, 0, 1},
                                         {1, 150, 4, 2, 8, 37, 0, 1},
                                         {1, 200, 1, 1, 4, 0, 40, 3},
                                         {2, 7, 2, 2, 8, 0, 0, 0, 5},
                                         {1, 150, 4, 2, 6, 0, 0, 0, 4},
                                         {1, 200, 2, 1, 4, 37, 40, 0, 1},
                                         {1, 140, 2, 2, 4, 0, 0, 1, 3},
                                         {2, 7, 2, 2, 8, 0, 0, 0, 0, 1},
                                         {1, 200, 3, 3, 4, 37, 0, 0, 0, 1},
                                         {1, 150, 2, 2, 6, 0, 40, 0, 0, 1},
                                         {1, 5, 1, 1, 512, 0},
                                         {1, 4, 2, 1, 320, 3, 0, 1, 264}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t rows = sizes[i][0] * sizes[i][1], Hq = sizes[i][2], Hk = sizes[i][3], D = sizes[i][4];
        uint64_t Dv = sizes[i][8] > 0 ? sizes[i][8] : D;
        ops_examine(&(ops_subject){"attention",
                                   1,
                                   {rows * (Hq + 2 * Hk) * D},
                                   rows * Hq * Dv,
                                   {sizes[i][0], sizes[i][1], Hq, Hk, D, sizes[i][5], sizes[i][6], sizes[i][7],
                                    sizes[i][8], sizes[i][9], sizes[i][10]},
                                   0,
                                   attention_ref,
                                   attention_fwd,
                                   attention_bwd});
    }
}

/* With a logit of each head that no key has: one row, windows, documents, groups; its gradient is a sum over all rows. */
static void
test_attention_sinks(void **state)
{
    static const uint64_t sizes[][7] = {{1, 1, 1, 1, 8, 0},    {2, 33, 6, 2, 4, 0},       {1, 150, 2, 1, 8, 0},
                                        {1, 200, 2, 1, 4, 37}, {1, 150, 4, 1, 8, 21, 12}, {2, 290, 1, 1, 4, 0, 90}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint64_t rows = sizes[i][0] * sizes[i][1], Hq = sizes[i][2], Hk = sizes[i][3], D = sizes[i][4];
        ops_examine(&(ops_subject){"attention with sinks",
                                   2,
                                   {rows * (Hq + 2 * Hk) * D, Hq},
                                   rows * Hq * D,
                                   {sizes[i][0], sizes[i][1], Hq, Hk, D, sizes[i][5], sizes[i][6]},
                                   0,
                                   attention_ref,
                                   attention_fwd,
                                   attention_bwd});
    }
}

/* A sink far above or below the scores takes all of the weight, or none. */
static void
test_attention_far_sinks(void **state)
{
    static const float sinks[3] = {2000.0f, -2000.0f, 0.0f}, x[9] = {1, 1, 1, 1, 1, 1, 3, 3, 3};
    float out[3], lse[3];
    spw_attention_shape shape = {
        .B = 1, .T = 1, .Hq = 3, .Hk = 3, .D = 1, .q_stride = 9, .kv_stride = 9, .scale = 1, .sinks = sinks};
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    spw_gpu_attention(q, out, lse, x, x + 3, x + 6, &shape);
    assert_true(out[0] == 0 && lse[0] == 2000);
    assert_true(out[1] == 3 && lse[1] == 1);
    assert_true(out[2] > 2 && out[2] < 3 && lse[2] > 1);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

/* One sequence of T tokens in pieces, in the slot of a cache; the others hold NaN. Row t of out. */
static void
attend_in_pieces(spw_gpu_queue *q, const heads *h, const float *packed, uint64_t piece, int32_t slot, float *out)
{
    uint64_t capacity = h->T + 3, elems = 3 * capacity * h->Hk * h->D;
    float *key = malloc(elems * 4), *value = malloc(elems * 4);
    assert_true(key != NULL && value != NULL);
    for (uint64_t i = 0; i < elems; i++)
        key[i] = value[i] = NAN;
    for (uint64_t t = 0; t < h->T; t += piece) {
        spw_attention_shape shape = shape_of(h);
        int32_t start = (int32_t)t;
        spw_attention_cache cache = {key, value, capacity, &slot, &start};
        const float *in = packed + t * h->q_stride;
        shape.T = h->T - t < piece ? h->T - t : piece;
        spw_gpu_attention_cached(q, out + t * h->Hq * h->Dv, in, in + h->k_at, in + h->v_at, &cache, &shape);
    }
    free(key);
    free(value);
}

/*
 * With a cache, whole sequences have the bits of attention without one, pieces and single tokens are within rounding of it; and
 * one token each of several sequences of different lengths has the bits of each alone.
 */
static void
test_attention_cached(void **state)
{
    static const uint64_t sizes[][9] = {
        {1, 90, 4, 2, 8, 0, 0, 5}, {1, 40, 2, 2, 6, 9, 0, 4}, {1, 1, 1, 1, 8, 0},       {1, 7, 2, 2, 8, 0},
        {1, 65, 2, 1, 20, 0},      {1, 150, 4, 2, 8, 0},      {1, 300, 2, 1, 4, 0},     {1, 40, 2, 1, 4, 1},
        {1, 200, 2, 1, 4, 37},     {1, 290, 1, 1, 4, 129},    {1, 200, 2, 1, 4, 37, 1}, {1, 90, 3, 3, 8, 0, 0, 0, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const uint64_t *d = sizes[i];
        ops_subject s = {.d = {d[0], d[1], d[2], d[3], d[4], d[5], 0, d[6], d[7], d[8]}};
        heads h = heads_of(&s);
        spw_attention_shape shape;
        uint64_t n = h.T * h.Hq * h.Dv, seed = i;
        float *packed = malloc(h.T * h.q_stride * 4), *want = malloc(n * 4), *got = malloc(n * 4), *one = malloc(n * 4);
        spw_gpu *gpu = NULL;
        spw_gpu_queue *q = NULL;
        assert_true(packed && want && got && one);
        for (uint64_t k = 0; k < h.T * h.q_stride; k++)
            packed[k] = ops_draw(&seed);
        h.sinks = i % 2 == 1 ? packed : NULL;
        shape = shape_of(&h);
        assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
        assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
        spw_gpu_attention(q, want, ops_saved[0], packed, packed + h.k_at, packed + h.v_at, &shape);
        attend_in_pieces(q, &h, packed, h.T, 1, got);
        assert_memory_equal(want, got, n * 4);
        for (uint64_t piece = 1; piece < h.T; piece = piece * 3 + 1) {
            attend_in_pieces(q, &h, packed, piece, 2, got);
            for (uint64_t k = 0; k < n; k++) {
                if (!(fabs((double)got[k] - (double)want[k]) <= 2e-5))
                    fail_msg("attention of %llu in pieces of %llu: element %llu is %.9g, at once it is %.9g",
                             (unsigned long long)h.T, (unsigned long long)piece, (unsigned long long)k, (double)got[k],
                             (double)want[k]);
            }
        }
        /* Three sequences that are beginnings of this one, the last token of each. */
        if (h.T >= 7) {
            uint64_t at[3] = {h.T - 1, 0, h.T / 2}, width = h.Hk * h.D;
            int32_t slots[3] = {1, 2, 0}, starts[3];
            float *key = malloc(3 * h.T * width * 4), *value = malloc(3 * h.T * width * 4),
                  *rows = malloc(3 * h.q_stride * 4);
            spw_attention_cache cache = {key, value, h.T, slots, starts};
            assert_true(key && value && rows);
            for (int k = 0; k < 3; k++) {
                starts[k] = (int32_t)at[k];
                memcpy(rows + (uint64_t)k * h.q_stride, packed + at[k] * h.q_stride, h.q_stride * 4);
                for (uint64_t t = 0; t < at[k]; t++) {
                    uint64_t to = ((uint64_t)slots[k] * h.T + t) * width;
                    for (uint64_t head = 0; head < h.Hk; head++) {
                        memcpy(key + to + head * h.D, packed + t * h.q_stride + h.k_at + head * h.head, h.D * 4);
                        memcpy(value + ((uint64_t)slots[k] * h.T + t) * h.Hk * h.Dv + head * h.Dv,
                               packed + t * h.q_stride + h.v_at + head * h.head, h.Dv * 4);
                    }
                }
            }
            shape.B = 3;
            shape.T = 1;
            spw_gpu_attention_cached(q, got, rows, rows + h.k_at, rows + h.v_at, &cache, &shape);
            attend_in_pieces(q, &h, packed, 1, 0, one);
            for (int k = 0; k < 3; k++)
                assert_memory_equal(got + (uint64_t)k * h.Hq * h.Dv, one + at[k] * h.Hq * h.Dv, h.Hq * h.Dv * 4);
            free(key);
            free(value);
            free(rows);
        }
        spw_gpu_queue_destroy(q);
        spw_gpu_close(gpu);
        free(packed);
        free(want);
        free(got);
        free(one);
    }
}

/* With every key chosen the bits are those of no choice, forward and back. */
static void
test_attention_all_chosen(void **state)
{
    ops_subject s = {.d = {2, 150, 2, 1, 8, 0, 40, 0, 5}, .inputs = 1};
    heads h = heads_of(&s);
    uint64_t elems = h.B * h.T * h.q_stride, n = h.B * h.T * h.Hq * h.Dv, words = 6, seed = 3;
    float *in = malloc(elems * 4), *dout = malloc(n * 4), *out[2], *grads[2];
    uint32_t *bits = malloc(h.B * h.T * words * 4);
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_true(in && dout && bits);
    memset(bits, 0xff, h.B * h.T * words * 4);
    for (uint64_t i = 0; i < elems; i++)
        in[i] = ops_draw(&seed);
    for (uint64_t i = 0; i < n; i++)
        dout[i] = ops_draw(&seed);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 2}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int k = 0; k < 2; k++) {
        spw_attention_shape shape = shape_of(&h);
        shape.chosen = k > 0 ? bits : NULL;
        shape.chosen_words = words;
        out[k] = calloc(n, 4);
        grads[k] = calloc(elems, 4);
        assert_true(out[k] && grads[k]);
        spw_gpu_attention(q, out[k], ops_saved[0], in, in + h.k_at, in + h.v_at, &shape);
        spw_gpu_attention_backward(q, grads[k], grads[k] + h.k_at, grads[k] + h.v_at, NULL, dout, out[k], ops_saved[0],
                                   in, in + h.k_at, in + h.v_at, &shape);
    }
    assert_memory_equal(out[0], out[1], n * 4);
    assert_memory_equal(grads[0], grads[1], elems * 4);
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
    for (int k = 0; k < 2; k++) {
        free(out[k]);
        free(grads[k]);
    }
    free(in);
    free(dout);
    free(bits);
}

/* Which keys are chosen, with as many threads as there may be. */
static void
test_choose_keys(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads += 2) {
        parity p = {0};
        assert_int_equal(spw_gpu_open(&p.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, NULL),
                         SPW_OK);
        parity_choose_keys(&p);
        spw_gpu_close(p.gpu);
    }
}

/* ------------------- keys in front of a sequence's: d = B, T, Hq, D, window, rows that each stands for, one in how many is chosen or 0, documents' length or 0; in: q, keys that are values too, sinks */

/* begins, ends, and the first row that each key in front stands for */
static int32_t front_documents[3 * OPS_N_MAX];

static uint64_t
front_of(const ops_subject *s)
{
    return s->d[1] / s->d[5];
}

static uint64_t
front_words(const ops_subject *s)
{
    return front_of(s) / 32 + 1;
}

/* Bits in ops_ids, of the keys in front alone; some rows have none. */
static void
choose_fronts(const ops_subject *s)
{
    assert_true(s->d[0] * s->d[1] * front_words(s) <= OPS_N_MAX);
    for (uint64_t i = 0; i < s->d[0] * s->d[1] * front_words(s); i++) {
        uint32_t word = 0, r[4];
        for (uint32_t bit = 0; bit < 32; bit++) {
            spw_philox(8, i, bit, r);
            word |= (uint32_t)(r[0] % s->d[6] == 0) << bit;
        }
        ops_ids[i] = (int32_t)word;
    }
}

static void
front_ref(const ops_subject *s, double *const *in, double *out)
{
    const uint64_t T = s->d[1], Hq = s->d[2], D = s->d[3], front = front_of(s);
    double *p = malloc((front + T) * sizeof *p), scale = 1 / sqrt((double)D);
    assert_non_null(p);
    for (uint64_t i = 0; i < s->d[0] * T * Hq; i++) {
        const uint64_t h = i % Hq, row = i / Hq, t = row % T;
        const double *q = in[0] + i * D, *keys = in[1] + row / T * (front + T) * D;
        const uint64_t begin = s->d[7] > 0 ? (uint64_t)front_documents[row] : 0;
        double sum = exp(in[2][h]), *o = out + i * D;
        memset(o, 0, D * sizeof *o);
        for (uint64_t u = 0; u < front + T; u++) {
            bool reads = u >= front ? u - front <= t && u - front >= begin && (s->d[4] == 0 || u - front + s->d[4] > t)
                                    : u >= begin / s->d[5] && u < begin / s->d[5] + (t + 1 - begin) / s->d[5] &&
                                          (s->d[6] == 0 ||
                                           ((uint32_t)ops_ids[row * front_words(s) + u / 32] >> u % 32 & 1) != 0);
            p[u] = 0;
            for (uint64_t d = 0; d < D; d++)
                p[u] += q[d] * keys[u * D + d] * scale;
            sum += p[u] = reads ? exp(p[u]) : 0;
        }
        for (uint64_t u = 0; u < front + T; u++)
            for (uint64_t d = 0; d < D; d++)
                o[d] += p[u] / sum * keys[u * D + d];
    }
    free(p);
}

static spw_attention_shape
front_shape(const ops_subject *s, const float *sinks)
{
    const uint64_t rows = s->d[0] * s->d[1];
    const bool documents = s->d[7] > 0;
    return (spw_attention_shape){.B = s->d[0],
                                 .T = s->d[1],
                                 .Hq = s->d[2],
                                 .Hk = 1,
                                 .D = s->d[3],
                                 .q_stride = s->d[2] * s->d[3],
                                 .kv_stride = s->d[3],
                                 .begins = documents ? front_documents : NULL,
                                 .ends = documents ? front_documents + rows : NULL,
                                 .front_rows = documents ? front_documents + 2 * rows : NULL,
                                 .scale = 1 / sqrtf((float)s->d[3]),
                                 .window = s->d[4],
                                 .sinks = sinks,
                                 .chosen = s->d[6] > 0 ? (const uint32_t *)ops_ids : NULL,
                                 .chosen_words = front_words(s),
                                 .front = front_of(s),
                                 .front_each = s->d[5]};
}

static void
front_fwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, float *out)
{
    const spw_attention_shape shape = front_shape(s, in[2]);
    if (s->d[7] > 0)
        spw_gpu_windows(q, front_documents + 2 * s->d[0] * s->d[1], front_documents, NULL, s->d[0], s->d[1], s->d[5]);
    spw_gpu_attention(q, out, ops_saved[0], in[0], in[1], in[1], &shape);
}

/* What keys and what values get is one gradient. */
static void
front_bwd(const ops_subject *s, spw_gpu_queue *q, float *const *in, const float *out, const float *dout,
          float *const *g)
{
    const spw_attention_shape shape = front_shape(s, in[2]);
    spw_gpu_attention_backward(q, g[0], g[1], ops_saved[1], g[2], dout, out, ops_saved[0], in[0], in[1], in[1], &shape);
    for (uint64_t i = 0; i < s->n[1]; i++)
        g[1][i] += ops_saved[1][i];
}

/* Fewer rows than one stands for, one, several tiles of either kind; windows; chosen ones; documents with fewer and more rows than one stands for. */
static void
test_attention_front(void **state)
{
    static const uint64_t sizes[][8] = {
        {1, 3, 1, 4, 2, 4},          {2, 9, 2, 6, 4, 4},           {1, 40, 2, 8, 0, 1, 3},
        {2, 70, 3, 4, 33, 4, 2},     {1, 200, 1, 4, 9, 1},         {1, 300, 2, 4, 70, 2, 5},
        {1, 150, 2, 4, 16, 50, 0},   {2, 9, 2, 6, 4, 4, 0, 5},     {1, 200, 1, 4, 9, 1, 0, 40},
        {2, 70, 3, 4, 33, 4, 2, 20}, {1, 300, 2, 4, 70, 2, 5, 170}};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        ops_subject s = {.name = "attention with keys in front",
                         .inputs = 3,
                         .d = {sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4], sizes[i][5],
                               sizes[i][6], sizes[i][7]},
                         .reference = front_ref,
                         .forward = front_fwd,
                         .backward = front_bwd};
        s.out_n = s.n[0] = s.d[0] * s.d[1] * s.d[2] * s.d[3];
        s.n[1] = s.d[0] * (front_of(&s) + s.d[1]) * s.d[3];
        s.n[2] = s.d[2];
        if (s.d[6] > 0)
            choose_fronts(&s);
        if (s.d[7] > 0)
            parity_documents(s.d[0], s.d[1], s.d[7], front_documents, front_documents + s.d[0] * s.d[1]);
        ops_examine(&s);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_sinks),
        cmocka_unit_test(test_attention_far_sinks),
        cmocka_unit_test(test_attention_cached),
        cmocka_unit_test(test_attention_all_chosen),
        cmocka_unit_test(test_choose_keys),
        cmocka_unit_test(test_attention_front),
    };
    return ops_run_tests(tests, sizeof tests / sizeof tests[0]);
}
