/*
 * Normal numbers (normal.h) beside the C library's logarithm and cosine, with each instruction set, however they are cut, and by their moments.
 */
#include "normal.h"
static spw__normal_fn drawn_here;
#define NORMAL drawn_here
#include "normal_body.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { COUNT = 1 << 17 };
static const float deviation = 0.02f;

/* Within an ulp of fp32: the product is rounded once, and fp64 shows more than twice as many places. */
static void
test_reference(void **state)
{
    float *got = malloc(COUNT * sizeof *got);
    uint32_t others = 0;
    (void)state;
    assert_non_null(got);
    for (uint64_t stream = 0; stream < 4; stream++) {
        uint64_t first = stream << 33, seed = 0x123456789abcdef0 + stream;
        spw__normal_draw(got, seed, stream, first, COUNT, deviation);
        for (uint64_t i = 0; i < COUNT; i++) {
            uint32_t r[4];
            float want;
            spw_philox(seed, stream, first + i, r);
            want = (float)(sqrt(-2 * log(((double)r[0] + 1) / 4294967296.0)) *
                           cos(6.283185307179586 * ((double)r[1] / 4294967296.0)) * (double)deviation);
            others += got[i] != want;
            if (fabsf(got[i] - want) > nextafterf(fabsf(want), 1) - fabsf(want))
                fail_msg("element %llu of stream %llu is %.9g, not %.9g", (unsigned long long)i,
                         (unsigned long long)stream, (double)got[i], (double)want);
        }
    }
    printf("# %u of %d numbers are not the C library's to the bit\n", others, 4 * COUNT);
    free(got);
}

/* What Philox gives once in 4 billion, and all of both functions' ways there, beside the C library's. */
static void
test_ends(void **state)
{
    (void)state;
    assert_true(logarithm(1) == 0 && fabs(logarithm(0x1p-32) + 22.180709777918249) < 1e-14);
    assert_true(cosine(0) == 1 && cosine(1u << 31) == -1 && cosine(1u << 30) == 0 && cosine(3u << 30) == 0);
    for (uint64_t word = 0; word < 1ull << 32; word += 65521) {
        double u = ((double)word + 1) * 0x1p-32, off = logarithm(u) - log(u);
        assert_true(fabs(off) <= 5e-16 * fabs(log(u)));
        assert_true(fabs(cosine((uint32_t)word) - cos(6.283185307179586 * ((double)word * 0x1p-32))) < 1e-15);
    }
}

/* Mean, variance and the greatest of many. */
static void
test_moments(void **state)
{
    float *got = malloc(COUNT * sizeof *got);
    double sum = 0, squares = 0, top = 0;
    (void)state;
    assert_non_null(got);
    spw__normal_draw(got, 5, 1, 0, COUNT, 1.0f);
    for (uint64_t i = 0; i < COUNT; i++) {
        assert_true(isfinite(got[i]));
        sum += (double)got[i];
        squares += (double)got[i] * (double)got[i];
        top = fabs((double)got[i]) > top ? fabs((double)got[i]) : top;
    }
    /* Five standard errors of the mean and of the variance; sqrt(2 ln 2^32) = 6.66 is the greatest that can be. */
    assert_true(fabs(sum / COUNT) < 5 / sqrt(COUNT));
    assert_true(fabs(squares / COUNT - 1) < 5 * sqrt(2.0 / COUNT));
    assert_true(top > 4 && top < 6.67);
    free(got);
}

static void
test_same_bits(void **state)
{
    static const uint64_t firsts[] = {0, 1, 63, 64, 4294967290ull, 1ull << 40};
    spw__normal_fn *const sets[] = {drawn_here, spw_cpu_has(SPW_ISA_AVX2) ? spw__normal_avx2 : NULL,
                                    spw_cpu_has(SPW_ISA_AVX512) ? spw__normal_avx512 : NULL};
    float *want = malloc(COUNT * sizeof *want), *got = malloc(COUNT * sizeof *got);
    (void)state;
    assert_true(want != NULL && got != NULL);
    for (size_t f = 0; f < sizeof firsts / sizeof firsts[0]; f++) {
        spw__normal_scalar(want, 9, f, firsts[f], COUNT, deviation);
        for (int s = 0; s < 3; s++) {
            if (sets[s] == NULL)
                continue;
            memset(got, 0xff, COUNT * sizeof *got);
            sets[s](got, 9, f, firsts[f], COUNT, deviation);
            assert_memory_equal(got, want, COUNT * sizeof *got);
            for (uint64_t at = 0, n = 1; at < COUNT; at += n, n = (n * 7 + 1) % 193) { /* in pieces */
                n = n < COUNT - at ? n : COUNT - at;
                memset(got, 0xff, (n + 1) * sizeof *got);
                sets[s](got, 9, f, firsts[f] + at, n, deviation);
                assert_memory_equal(got, want + at, n * sizeof *got);
                assert_true(isnan(got[n])); /* and nothing behind */
            }
        }
    }
    free(want);
    free(got);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_moments),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
