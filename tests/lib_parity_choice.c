/*
 * Which keys are chosen, beside a count by hand. All numbers are small whole ones, whose products and sums every type and order has exactly: so there are equal
 * scores in every row, and each bit is right or wrong.
 */
#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

void
parity_chosen(uint64_t B, uint64_t T, uint64_t every, uint64_t words, const int32_t *begins, const int32_t *starts,
              int32_t *bits)
{
    for (uint64_t row = 0; row < B * T; row++) {
        uint64_t at = row % T + (starts != NULL ? (uint64_t)starts[row / T] : 0);
        uint64_t first = begins != NULL ? (uint64_t)begins[row] : 0, one = first + row * 7 % (at - first + 1);
        for (uint64_t w = 0; w < words; w++) {
            uint32_t word = 0, r[4];
            for (uint32_t i = 0; i < 32; i++) {
                spw_philox(every, row, w * 32 + i, r);
                word |= (uint32_t)(r[0] % every == 0 || w * 32 + i == one) << i;
            }
            bits[row * words + w] = (int32_t)word;
        }
    }
}

/* B, T, first, H, D, keys, documents' length or 0, capacity or 0, rows that a key stands for or 0 */
typedef const uint64_t sizes[9];

/* What a device is given, and what is to come of it. */
typedef struct choice {
    spw_choice_shape s;
    float *query, *key, *new_key, *weights;
    int32_t *begins, *slots, *starts;
    uint32_t *want, *got;
    uint64_t queries, keys, news, numbers, bits; /* elements */
} choice;

static float *
draw(uint64_t n, uint64_t key, int most)
{
    float *x = subject_need(n * sizeof *x);
    for (uint64_t i = 0; i < n; i++)
        x[i] = floorf((subject_number(key, i) + 1) * 0.4999f * (float)(2 * most + 1)) - (float)most;
    return x;
}

static bool
above(double a, double b)
{
    return a > b || (isnan(a) && !isnan(b));
}

/* One row, at a position, with the sequence's keys: as many keys as are above another, or as it and in front of it, decide. */
static void
choose_by_hand(const choice *c, uint64_t row, uint64_t at, const float *keys)
{
    const spw_choice_shape *s = &c->s;
    uint64_t begin = c->begins != NULL ? (uint64_t)c->begins[row] : 0, each = s->each > 0 ? s->each : 1;
    uint64_t first = begin / each, end = first + (at + 1 - begin) / each;
    double *scores = subject_need((at + 1) * sizeof *scores);
    for (uint64_t u = first; u < end; u++) {
        scores[u] = 0;
        for (uint64_t h = 0; h < s->H; h++) {
            double product = 0;
            for (uint64_t d = 0; d < s->D; d++)
                product += (double)c->query[(row * s->H + h) * s->D + d] * (double)keys[u * s->D + d];
            scores[u] += (double)c->weights[row * s->H + h] * (product < 0 ? 0 : product);
        }
    }
    for (uint64_t u = first; u < end; u++) {
        uint64_t before = 0;
        for (uint64_t v = first; v < end; v++)
            before += above(scores[v], scores[u]) || (v < u && !above(scores[u], scores[v]));
        if (before < s->keys)
            c->want[row * s->words + u / 32] |= 1u << u % 32;
    }
    free(scores);
}

static void
make_choice(choice *c, sizes d, bool nan)
{
    uint64_t rows = d[0] * d[1], key = subject_key(d[1] * 31 + d[4]), each = d[7] > 0 ? d[7] : d[1] + d[2];
    each = d[8] > 0 ? each / d[8] + 1 : each; /* one that nobody reads */
    memset(c, 0, sizeof *c);
    c->s = (spw_choice_shape){
        .B = d[0], .T = d[1], .first = d[2], .H = d[3], .D = d[4], .keys = d[5], .capacity = d[7], .each = d[8]};
    c->s.key_rows = each;
    c->s.capacity = d[7] > 0 ? each : 0;
    c->s.words = each / 32 + 1 + d[0] % 2;
    c->queries = rows * d[3] * d[4];
    c->keys = (d[0] + (d[7] > 0)) * each * d[4];
    c->news = d[7] > 0 && d[8] == 0 ? rows * d[4] : 0; /* those of several rows are there */
    c->numbers = rows * d[3];
    c->bits = rows * c->s.words;
    c->query = draw(c->queries, key, 2);
    c->key = draw(c->keys, key + 1, 2);
    c->new_key = draw(c->news + 1, key + 2, 2);
    c->weights = draw(c->numbers, key + 3, 2);
    c->want = subject_need(c->bits * 4);
    c->got = subject_need(c->bits * 4);
    memset(c->want, 0, c->bits * 4);
    if (nan)
        c->key[3 * d[4]] = NAN;
    if (d[6] > 0) {
        int32_t *ends = subject_need(rows * 4);
        c->begins = subject_need(rows * 4);
        parity_documents(d[0], d[1], d[6], c->begins, ends);
        free(ends);
    }
    if (d[7] > 0) {
        c->slots = subject_need(d[0] * 4);
        c->starts = subject_need(d[0] * 4);
    }
    for (uint64_t b = 0; b < d[0]; b++) {
        float *keys = c->key + b * each * d[4];
        uint64_t start = d[2];
        if (d[7] > 0) {
            c->slots[b] = (int32_t)(d[0] - b); /* slot 0 is nobody's */
            c->starts[b] = (int32_t)((d[7] - d[1] - d[2]) * (b + 1) / d[0]);
            start += (uint64_t)c->starts[b];
            keys = subject_need(each * d[4] * 4);
            memcpy(keys, c->key + (uint64_t)c->slots[b] * each * d[4], each * d[4] * 4);
            if (c->news > 0)
                memcpy(keys + start * d[4], c->new_key + b * d[1] * d[4], d[1] * d[4] * 4);
        }
        for (uint64_t t = 0; t < d[1]; t++)
            choose_by_hand(c, b * d[1] + t, start + t, keys);
        if (d[7] > 0)
            free(keys);
    }
}

static void
free_choice(choice *c)
{
    free(c->query);
    free(c->key);
    free(c->new_key);
    free(c->weights);
    free(c->begins);
    free(c->slots);
    free(c->starts);
    free(c->want);
    free(c->got);
}

/* n elements of the compute type; n ints. */
static act *
give(spw_gpu *gpu, spw_gpu_queue *q, const float *x, uint64_t n)
{
    spw_dtype type = spw_gpu_get_info(gpu)->compute_dtype;
    void *p = NULL;
    assert_int_equal(spw_gpu_alloc(gpu, &p, n * spw_dtype_bytes(type) + 4, NULL), SPW_OK);
    spw_gpu_copy_h2d(q, p, type, x, SPW_F32, n);
    return p;
}

static int32_t *
give_ints(spw_gpu *gpu, spw_gpu_queue *q, const int32_t *x, uint64_t n)
{
    void *p = NULL;
    if (x == NULL)
        return NULL;
    assert_int_equal(spw_gpu_alloc(gpu, &p, n * 4, NULL), SPW_OK);
    spw_gpu_write_bytes(q, p, x, n * 4);
    return p;
}

/* Bits that nobody writes stay wrong. */
static void
run_choice(spw_gpu *gpu, choice *c)
{
    spw_choice_shape s = c->s;
    void *bits = NULL, *scratch = NULL;
    act *query, *key, *new_key = NULL, *weights;
    int32_t *begins, *slots, *starts;
    spw_gpu_queue *q = NULL;
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &bits, c->bits * 4, NULL), SPW_OK);
    assert_int_equal(spw_gpu_alloc(gpu, &scratch, spw_gpu_choose_scratch(&s) * 4, NULL), SPW_OK);
    for (uint64_t i = 0; i < c->bits; i++)
        c->got[i] = ~c->want[i];
    spw_gpu_write_bytes(q, bits, c->got, c->bits * 4);
    query = give(gpu, q, c->query, c->queries);
    key = give(gpu, q, c->key, c->keys);
    new_key = c->news > 0 ? give(gpu, q, c->new_key, c->news) : NULL;
    weights = give(gpu, q, c->weights, c->numbers);
    s.begins = begins = give_ints(gpu, q, c->begins, s.B * s.T);
    s.slots = slots = give_ints(gpu, q, c->slots, s.B);
    s.starts = starts = give_ints(gpu, q, c->starts, s.B);
    spw_gpu_choose_keys(q, bits, query, key, new_key, weights, scratch, &s);
    spw_gpu_read_bytes(q, c->got, bits, c->bits * 4);
    for (uint64_t i = 0; i < c->bits; i++)
        if (c->got[i] != c->want[i])
            fail_msg("choice of %llu of %llu keys: word %llu of row %llu is %08x, it should be %08x",
                     (unsigned long long)s.keys, (unsigned long long)(s.first + s.T), (unsigned long long)(i % s.words),
                     (unsigned long long)(i / s.words), c->got[i], c->want[i]);
    spw_gpu_free(gpu, bits);
    spw_gpu_free(gpu, scratch);
    spw_gpu_free(gpu, query);
    spw_gpu_free(gpu, key);
    spw_gpu_free(gpu, new_key);
    spw_gpu_free(gpu, weights);
    spw_gpu_free(gpu, begins);
    spw_gpu_free(gpu, slots);
    spw_gpu_free(gpu, starts);
    spw_gpu_queue_destroy(q);
}

void
parity_choose_keys(const parity *p)
{
    static sizes all[] = {
        {1, 1, 0, 1, 8, 1, 0, 0},           {2, 9, 0, 2, 8, 3, 0, 0},           {1, 70, 0, 3, 12, 7, 0, 0},
        {2, 64, 0, 4, 24, 64, 0, 0},        {1, 150, 0, 2, 16, 31, 40, 0},      {3, 33, 0, 1, 6, 5, 12, 0},
        {1, 40, 90, 2, 128, 20, 0, 0},      {1, 20, 300, 3, 136, 100, 0, 0},    {1, 70, 5, 2, 264, 8, 0, 0},
        {3, 1, 0, 2, 16, 9, 0, 100},        {2, 9, 0, 3, 24, 20, 0, 70},        {1, 30, 40, 2, 10, 33, 0, 128},
        {2, 9, 0, 2, 8, 1, 0, 0, 4},        {3, 150, 0, 2, 16, 7, 0, 0, 2},     {1, 40, 300, 3, 136, 20, 0, 0, 4},
        {2, 170, 0, 2, 8, 3, 60, 0, 4},     {1, 90, 0, 1, 16, 2, 30, 0, 7},     {3, 1, 0, 2, 16, 5, 0, 100, 4},
        {1, 30, 40, 2, 10, 3, 0, 200, 8},   {1, 2048, 0, 8, 128, 256, 0, 0},    {2, 700, 0, 4, 64, 64, 300, 0},
        {2, 2000, 0, 8, 128, 128, 0, 0, 4}, {2, 2000, 0, 8, 128, 32, 900, 0, 4}};
    static const char *const once[] = {"", "", NULL};
    const char *const *orders = p->orders != NULL ? p->orders : once;
    subject_use(p->gpu);
    for (size_t i = 0; i < (p->large ? 23 : 19); i++)
        for (int nan = 0; nan < (i == 2 ? 2 : 1); nan++) {
            choice c;
            make_choice(&c, all[i], nan > 0);
            for (int run = 0; orders[run] != NULL; run++) {
                setenv("SPW_EMULATE_ORDER", orders[run], 1);
                run_choice(p->gpu, &c);
            }
            setenv("SPW_EMULATE_ORDER", "", 1);
            free_choice(&c);
        }
}
