/* Weights of rows: made of preferences, and of 1, which change nothing. And rows that are picked out and put back. */
#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- d = M, kind; arrays: weights, losses, targets, pairs */

enum { PAIRS = 6 };

static const spw_preference rules[SPW_PREFERENCE_COUNT] = {
    {.kind = SPW_PREFERENCE_DPO, .beta = 0.1f, .label_smoothing = 0.1f, .likelihood = 0.5f},
    {.kind = SPW_PREFERENCE_IPO, .beta = 0.1f},
    {.kind = SPW_PREFERENCE_SIMPO, .beta = 2, .margin = 0.5f},
    {.kind = SPW_PREFERENCE_ORPO, .beta = 0.5f, .likelihood = 1},
    {.kind = SPW_PREFERENCE_APO_ZERO, .beta = 0.1f},
};

/* Answers of one row and of more than a block has threads, with rows between that are of no pair; one has no target. */
static const spw_pair pairs[PAIRS] = {
    {2, 3, 4, {1.5f, 1.25f}},           {4, 260, 523, {270, 261.5f}},   {0, 0, 0, {0, 0}},
    {523, 1300, 1309, {800.0f, 10.0f}}, {1320, 1333, 1340, {20, 5.0f}}, {1350, 1351, 1990, {1, 600}},
};

static void
prepare_pairs(const subject *s, float **host, int32_t **ints)
{
    _Static_assert(sizeof(spw_pair) % sizeof(int32_t) == 0, "an array of numbers is one of pairs");
    ints[2][2] = ints[2][3] = ints[2][1350] = 1;
    for (int m = 1320; m < 1333; m++)
        ints[2][m] = -1;
    for (uint64_t m = 0; m < s->d[0]; m++) /* what is not a loss is not read */
        host[1][m] = ints[2][m] < 0 ? NAN : 1 + host[1][m];
    memcpy(ints[3], pairs, sizeof pairs);
}

static void
run_pairs(const subject *s, spw_gpu_queue *q, void **p)
{
    spw_preference rule = rules[s->d[1]];
    spw_gpu_preference(q, p[0], p[1], p[2], p[3], PAIRS, &rule);
    memset(&rule, 0xff, sizeof rule); /* it has been read */
    spw_gpu_preference(q, NULL, p[1], p[2], p[3], 0, &rules[0]);
}

/* ---------------------------------------------------------------- d = M, V, C, cap */

/* Gradients for x by weights of 1, less those without weights, of a whole head and of one that is a piece. */
static void
run_ones(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t M = s->d[0], V = s->d[1], C = s->d[2];
    const float cap = (float)s->d[3];
    float *onto[2] = {p[8], (float *)p[8] + M * C};
    for (int k = 0; k < 2; k++)
        spw_gpu_linear_cross_entropy(q, (float *)p[2] + (uint64_t)k * M, p[3 + k], NULL, p[0], p[1], p[5],
                                     k > 0 ? p[7] : NULL, p[6], M, M, V, C, 3, cap, 0);
    spw_gpu_add_scaled(q, p[4], p[4], p[3], -1, M * C);
    spw_gpu_head_see(q, p[9], p[0], p[1], p[5], p[6], M, M, 0, V, C, cap);
    for (int k = 0; k < 2; k++)
        spw_gpu_head_backward(q, onto[k], NULL, p[0], p[1], p[5], k > 0 ? p[7] : NULL, p[9], p[6], M, M, 0, V, C, 3,
                              cap, 0);
    spw_gpu_copy_d2d(q, p[3], subject_type(), onto[0], SPW_F32, M * C, NULL);
    spw_gpu_copy_d2d(q, p[10], subject_type(), onto[1], SPW_F32, M * C, NULL);
    spw_gpu_add_scaled(q, p[10], p[10], p[3], -1, M * C);
    spw_gpu_zero(q, p[6], s->a[6].n * 4);
    spw_gpu_zero(q, p[9], s->a[9].n * 4);
}

static void
prepare_ones(const subject *s, float **host, int32_t **ints)
{
    (void)ints;
    subject_scale(host[1], s->a[1].n, s->d[2]);
    for (uint64_t m = 0; m < s->d[0]; m++)
        host[7][m] = 1;
}

/* ---------------------------------------------------------------- d = rows of all, rows picked, columns; arrays: all, numbers, picked, put back, numbers picked */

static void
run_moves(const subject *s, spw_gpu_queue *q, void **p)
{
    const uint64_t row_bytes = s->d[2] * spw_dtype_bytes(subject_type());
    spw_gpu_take_rows(q, p[2], p[0], p[1], s->d[1], row_bytes);
    spw_gpu_put_rows(q, p[3], p[2], p[1], s->d[1], row_bytes);
    spw_gpu_take_rows(q, p[4], p[1], p[1], s->d[1], sizeof(int32_t));
    spw_gpu_take_rows(q, NULL, p[0], p[1], 0, row_bytes);
    spw_gpu_put_rows(q, NULL, p[0], p[1], 0, row_bytes);
}

static void
prepare_moves(const subject *s, float **host, int32_t **ints)
{
    (void)host;
    for (uint64_t i = 0; i < s->d[1]; i++)
        ints[1][i] = (int32_t)((i * 7 + 3) % s->d[0]);
}

static void
parity_moves(const parity *p)
{
    static const uint64_t sizes[][3] = {{300, 131, 40}, {300, 300, 33}, {37, 5, 1030}, {90000, 70000, 2}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const uint64_t all = sizes[i][0], some = sizes[i][1], C = sizes[i][2];
        subject_examine(p, &(subject){.name = "rows by number",
                                      .a = {{ACT, all * C, 0, 0},
                                            {INT, all, 1, 0},
                                            {ACT_OUT, some * C, 0, 0},
                                            {ACT_OUT, all * C, 0, 0},
                                            {INT, some, 1, 0}},
                                      .d = {all, some, C},
                                      .run = run_moves,
                                      .prepare = prepare_moves});
    }
}

void
parity_preference(const parity *p)
{
    enum { M = 2000, ROWS = 9, V = 130, C = 40 };
    parity_moves(p);
    for (uint64_t kind = 0; kind < SPW_PREFERENCE_COUNT; kind++)
        subject_examine(
            p,
            &(subject){
                .name = "preference",
                .a = {{FP32_OUT, M, 0, 0}, {FP32, M, 0, 0}, {INT, M, 3, -1}, {INT, PAIRS * sizeof(spw_pair) / 4, 1, 0}},
                .d = {M, kind},
                .row = {1},
                .run = run_pairs,
                .prepare = prepare_pairs});
    for (uint64_t cap = 0; cap < 2; cap++)
        subject_examine(p, &(subject){.name = "weights of 1",
                                      .a = {{ACT, ROWS * C, 0, 0},
                                            {ACT, V * C, 0, 0},
                                            {FP32_OUT, 2 * ROWS, 0, 0},
                                            {ACT_OUT, ROWS * C, 0, 0},
                                            {ACT_OUT, ROWS * C, 0, 0},
                                            {INT, ROWS, V + 1, -1},
                                            {FP32_OUT, ROWS * spw_gpu_logits_stride(V), 0, 0},
                                            {FP32, ROWS, 0, 0},
                                            {FP32_OUT, 2 * ROWS * C, 0, 0},
                                            {FP32_OUT, 3 * ROWS, 0, 0},
                                            {ACT_OUT, ROWS * C, 0, 0}},
                                      .d = {ROWS, V, C, 3 * cap},
                                      .worst = {8e-6, 7e-3, 8e-4},
                                      .run = run_ones,
                                      .prepare = prepare_ones});
}
