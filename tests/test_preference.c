/*
 * Preferences: what is minimised of a pair, beside an independent implementation's numbers and beside formulas written anew in long double,
 * whose differences are the derivatives; and the weights of rows that the cpu device makes of it, beside sums in long double, 1, 2 and 5
 * threads giving the same bits. SPW_SEED draws other numbers.
 */
#include "lib_ops.h"
#include "lib_subject.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include "vectors/preference_vectors.h"

/* ---------------------------------------------------------------- a pair */

static void
close_to(const char *what, size_t i, double got, double want, double part)
{
    if (!(fabs(got - want) <= part * fabs(want)))
        fail_msg("%s of pair %zu is %.17g, not %.17g", what, i, got, want);
}

/* Nothing is lost of small numbers either: relative errors of a few roundings. */
static void
test_vectors(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof preference_vectors / sizeof preference_vectors[0]; i++) {
        const preference_vector *v = &preference_vectors[i];
        spw_preferred got = spw_preference_weigh(&v->rule, &v->pair, v->sums, v->counts);
        close_to("loss", i, got.loss, v->want.loss, 1e-14);
        for (int k = 0; k < 2; k++) {
            close_to("coefficient", i, got.coef[k], v->want.coef[k], 1e-14);
            close_to("reward", i, got.reward[k], v->want.reward[k], 1e-14);
        }
    }
}

/* As the papers have it, of probabilities' logarithms; no number here leaves a long double's range. */
static long double
loss_of(const spw_preference *rule, const spw_pair *pair, long double chosen, long double rejected,
        const uint64_t counts[2])
{
    const long double beta = (long double)rule->beta, e = (long double)rule->label_smoothing;
    const long double of_policy[2] = {-chosen, -rejected},
                      of_reference[2] = {-(long double)pair->reference[0], -(long double)pair->reference[1]};
    const long double N[2] = {(long double)counts[0], (long double)counts[1]};
    long double more = (long double)rule->likelihood * chosen / N[0], h, gap;
    switch (rule->kind) {
    case SPW_PREFERENCE_IPO:
        gap = (of_policy[0] - of_reference[0]) / N[0] - (of_policy[1] - of_reference[1]) / N[1];
        return powl(gap - 0.5L / beta, 2) + more;
    case SPW_PREFERENCE_SIMPO:
        h = beta * of_policy[0] / N[0] - beta * of_policy[1] / N[1] - (long double)rule->margin;
        break;
    case SPW_PREFERENCE_ORPO: {
        const long double p[2] = {expl(of_policy[0] / N[0]), expl(of_policy[1] / N[1])};
        return beta * logl(1 + p[1] / (1 - p[1]) * ((1 - p[0]) / p[0])) + more;
    }
    case SPW_PREFERENCE_APO_ZERO:
        return 1 / (1 + expl(beta * (of_policy[0] - of_reference[0]))) +
               1 / (1 + expl(-beta * (of_policy[1] - of_reference[1]))) + more;
    default: h = beta * ((of_policy[0] - of_policy[1]) - (of_reference[0] - of_reference[1])); break;
    }
    return (1 - e) * logl(1 + expl(-h)) + e * logl(1 + expl(h)) + more;
}

/* d loss / d sum of answer k. */
static long double
slope_of(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2], int k)
{
    const long double step = 1e-6L;
    long double at[2][2] = {{(long double)sums[0], (long double)sums[1]}, {(long double)sums[0], (long double)sums[1]}};
    at[0][k] += step;
    at[1][k] -= step;
    return (loss_of(rule, pair, at[0][0], at[0][1], counts) - loss_of(rule, pair, at[1][0], at[1][1], counts)) /
           (2 * step);
}

static double
between(double least, double most, uint64_t *state)
{
    return least + (most - least) * ((double)ops_draw(state) + 1) / 2;
}

static void
compare_pair(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2])
{
    spw_preferred got = spw_preference_weigh(rule, pair, sums, counts);
    long double loss = loss_of(rule, pair, (long double)sums[0], (long double)sums[1], counts);
    if (!(fabsl((long double)got.loss - loss) <= 1e-12L * (1 + fabsl(loss))))
        fail_msg("kind %d: the loss is %.17g, not %.17Lg", (int)rule->kind, got.loss, loss);
    for (int k = 0; k < 2; k++) {
        long double slope = slope_of(rule, pair, sums, counts, k);
        double ratio = pair->reference[k] - sums[k];
        double reward = (double)rule->beta * (spw_preference_refers(rule->kind) ? ratio : -sums[k] / (double)counts[k]);
        if (!(fabsl((long double)got.coef[k] - slope) <= 1e-7L * (1 + fabsl(slope))))
            fail_msg("kind %d: coefficient %d is %.17g, not %.17Lg", (int)rule->kind, k, got.coef[k], slope);
        assert_true(fabs(got.reward[k] - reward) <= 1e-12 * (1 + fabs(reward)));
    }
}

/* Pairs as they come, of all kinds and with all that a rule may have; and such that h is far from 0, either way. */
static void
test_formulas(void **state)
{
    uint64_t key = subject_key(1);
    (void)state;
    for (unsigned i = 0; i < 1000; i++) {
        uint64_t counts[2] = {(uint64_t)between(1, 200, &key), (uint64_t)between(1, 200, &key)};
        double far = i % 10 == 8 ? 1e4 : i % 10 == 9 ? -1e4 : 0, sums[2];
        spw_preference rule = {.kind = (spw_preference_kind)(i / 10 % SPW_PREFERENCE_COUNT),
                               .beta = (float)between(0.01, 2.5, &key),
                               .label_smoothing = i % 2 ? (float)between(0, 0.5, &key) : 0,
                               .margin = i % 4 ? (float)between(-1, 3, &key) : 0,
                               .likelihood = i % 5 > 2 ? (float)between(0, 2, &key) : 0};
        spw_pair pair = {0};
        for (int k = 0; k < 2; k++) {
            sums[k] = (double)counts[k] * between(0.1, 4, &key);
            pair.reference[k] = !spw_preference_refers(rule.kind) ? 0 : sums[k] + between(-9, 9, &key);
        }
        if (rule.kind == SPW_PREFERENCE_ORPO) /* the formula above is of no more digits than p has */
            sums[far > 0] += fabs(far) * 1e-3 * (double)counts[far > 0];
        else if (rule.kind == SPW_PREFERENCE_SIMPO)
            sums[far > 0] += fabs(far) * (double)counts[far > 0] / (double)rule.beta;
        else
            sums[far > 0] += fabs(far) / (double)rule.beta;
        compare_pair(&rule, &pair, sums, counts);
    }
}

/* Of an answer without a target nothing can be said, of the other one then neither. */
static void
test_no_targets(void **state)
{
    const double sums[2] = {3, 4};
    (void)state;
    for (unsigned i = 0; i < 3 * SPW_PREFERENCE_COUNT; i++) {
        spw_preference rule = {(spw_preference_kind)(i % SPW_PREFERENCE_COUNT), 0.5f, 0.1f, 1, 2};
        spw_pair pair = {1, 2, 3, {5, 7}};
        uint64_t counts[2] = {i / SPW_PREFERENCE_COUNT == 1 ? 2 : 0, i / SPW_PREFERENCE_COUNT == 2 ? 2 : 0};
        spw_preferred got = spw_preference_weigh(&rule, &pair, sums, counts);
        const double all[] = {got.loss, got.coef[0], got.coef[1], got.reward[0], got.reward[1]};
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            assert_true(all[k] == 0);
    }
}

/* ---------------------------------------------------------------- rows */

enum { M = 3000, PAIRS = 7 };

static const spw_pair pairs[PAIRS] = {
    {7, 8, 9, {2, 1.5f}},         {0, 0, 0, {0, 0}},    {9, 700, 1500, {900, 1000}},    {2900, 2960, M, {80, 41}},
    {1510, 1540, 1550, {30, 11}}, {1550, 1560, 0, {0}}, {1600, 1610, 1620, {12, 8.5f}},
};
static float losses[M], weights[3][M];
static int32_t targets[M];

static void
fill_rows(void)
{
    uint64_t key = subject_key(2);
    for (int m = 0; m < M; m++) {
        targets[m] = m % 4 == 1 || (m >= 1510 && m < 1540) ? -1 : m; /* one answer has none */
        targets[m] = m == 7 || m == 8 ? m : targets[m];
        losses[m] = (float)between(0, 3, &key);
        losses[m] = targets[m] < 0 ? NAN : losses[m]; /* not looked at */
    }
}

static void
expect_weights(const spw_preference *rule, const spw_pair *pair, const float *got)
{
    const int32_t bounds[] = {pair->chosen, pair->rejected, pair->end};
    long double of[2] = {0, 0};
    uint64_t counts[2] = {0, 0};
    for (int k = 0; k < 2; k++)
        for (int32_t m = bounds[k]; m < bounds[k + 1]; m++) {
            of[k] += targets[m] >= 0 ? (long double)losses[m] : 0;
            counts[k] += targets[m] >= 0;
        }
    for (int k = 0; k < 2; k++) {
        const double sums[2] = {(double)of[0], (double)of[1]};
        double want = counts[0] > 0 && counts[1] > 0 ? (double)slope_of(rule, pair, sums, counts, k) : 0;
        for (int32_t m = bounds[k]; m < bounds[k + 1]; m++) {
            double at = targets[m] >= 0 ? want : 0;
            if (!(fabs((double)got[m] - at) <= 1e-7 * fabs(at) + 1e-10))
                fail_msg("kind %d: row %d weighs %.9g, not %.9g", (int)rule->kind, m, (double)got[m], at);
        }
    }
}

/* Every row of a pair weighs what is its answer's, and other rows' weights are not written. */
static void
test_weights_of_rows(void **state)
{
    static const spw_preference rules[] = {
        {SPW_PREFERENCE_DPO, 0.125f, 0, 0, 0},    {SPW_PREFERENCE_DPO, 0.05f, 0.25f, 0, 1},
        {SPW_PREFERENCE_IPO, 0.1f, 0, 0, 0},      {SPW_PREFERENCE_IPO, 0.5f, 0, 0, 0.5f},
        {SPW_PREFERENCE_SIMPO, 2.5f, 0, 0.5f, 0}, {SPW_PREFERENCE_SIMPO, 1, 0.125f, 0.5f, 0.25f},
        {SPW_PREFERENCE_ORPO, 0.5f, 0, 0, 1},     {SPW_PREFERENCE_APO_ZERO, 0.01f, 0, 0, 0},
    };
    (void)state;
    fill_rows();
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        static float poison[M];
        memset(poison, 0x7b, sizeof poison);
        for (uint32_t t = 0; t < 3; t++) {
            spw_gpu *gpu = NULL;
            spw_gpu_queue *q = NULL;
            memset(weights[t], 0x7b, sizeof weights[t]);
            assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = t * t + 1}, NULL),
                             SPW_OK);
            assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
            spw_gpu_preference(q, weights[t], losses, targets, pairs, 0, &rules[i]);
            assert_memory_equal(weights[t], poison, sizeof poison);
            spw_gpu_preference(q, weights[t], losses, targets, pairs, PAIRS, &rules[i]);
            spw_gpu_queue_destroy(q);
            spw_gpu_close(gpu);
            assert_memory_equal(weights[t], weights[0], sizeof weights[0]);
        }
        for (size_t k = 0; k < PAIRS; k++)
            if (pairs[k].end > 0) {
                expect_weights(&rules[i], &pairs[k], weights[0]);
                for (int32_t m = pairs[k].chosen; m < pairs[k].end; m++)
                    weights[0][m] = poison[m];
            }
        assert_memory_equal(weights[0], poison, sizeof poison);
    }
}

/* A loss that is not a number makes its pair's weights no numbers, so that the step is seen to have failed. */
static void
test_nan(void **state)
{
    static const spw_pair pair = {0, 2, 4, {1, 1}};
    static const int32_t all[4] = {1, -1, 1, 1};
    spw_gpu *gpu = NULL;
    spw_gpu_queue *q = NULL;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu"}, NULL), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&q, gpu, SPW_QUEUE_COMPUTE, NULL), SPW_OK);
    for (int kind = 0; kind < SPW_PREFERENCE_COUNT; kind++) {
        const float with_nan[4] = {1, 2, 1, NAN};
        float out[4];
        spw_preference rule = {.kind = (spw_preference_kind)kind, .beta = 1};
        spw_gpu_preference(q, out, with_nan, all, &pair, 1, &rule);
        assert_true((isnan(out[0]) || kind == SPW_PREFERENCE_APO_ZERO) && out[1] == 0); /* whose answers stand apart */
        assert_true(isnan(out[2]) && isnan(out[3]));
    }
    spw_gpu_queue_destroy(q);
    spw_gpu_close(gpu);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),         cmocka_unit_test(test_formulas), cmocka_unit_test(test_no_targets),
        cmocka_unit_test(test_weights_of_rows), cmocka_unit_test(test_nan),
    };
    return cmocka_run_group_tests_name("preference", tests, NULL, NULL);
}
