/*
 * Sums without rounding: the same bits in any order and over any number of ranks, and the right ones: against sums of whole numbers,
 * and against terms that cancel out of nothing but their sizes.
 */
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

enum { TERMS = 5000, RANKS = 7 };

static double
term(uint64_t i)
{
    uint32_t r[4];
    spw_philox(5, 1, i, r);
    return ldexp((double)r[0] + 1.0 / 3, (int)(r[1] % 1900) - 1000);
}

/* Of all terms, met in an order of its own and shared out among so many ranks; as numbers, or, with merged, as sums. */
static double
sum_of(uint32_t ranks, uint64_t stride, bool merged)
{
    double values[EXACT_VALUES] = {0}, own[EXACT_VALUES];
    exact_sum whole, together = {.adds = 0};
    for (uint32_t rank = 0; rank < ranks; rank++) {
        exact_sum s = {.adds = 0};
        for (uint64_t i = 0; i < TERMS; i++) {
            uint64_t at = i * stride % TERMS;
            if (at * ranks / TERMS == rank)
                spw__exact_add(&s, term(at));
        }
        spw__exact_merge(&together, &s);
        spw__exact_save(&s, own);
        for (int k = 0; k < EXACT_VALUES; k++)
            values[k] += own[k];
    }
    spw__exact_load(&whole, values);
    return spw__exact_value(merged ? &together : &whole);
}

static void
test_orders(void **state)
{
    double one = sum_of(1, 1, false), other;
    (void)state;
    assert_true(isfinite(one));
    for (uint32_t ranks = 1; ranks <= RANKS; ranks++) {
        uint64_t stride = ranks == 4 ? 7 : 1 + 2 * ranks * 3; /* odd, and no multiple of 5, as 25 would be */
        other = sum_of(ranks, stride, false);
        assert_memory_equal(&one, &other, sizeof one);
        other = sum_of(ranks, stride, true);
        assert_memory_equal(&one, &other, sizeof one);
    }
}

static double
sum_two(double a, double b, uint64_t times)
{
    exact_sum s = {.adds = 0};
    spw__exact_add(&s, a);
    for (uint64_t i = 0; i < times; i++)
        spw__exact_add(&s, b);
    return spw__exact_value(&s);
}

static void
test_values(void **state)
{
    exact_sum zero = {.adds = 0};
    (void)state;
    assert_true(spw__exact_value(&zero) == 0);
    assert_true(sum_two(0, 0, 3) == 0);
    assert_true(sum_two(0x1p53, 1, 1 << 20) == 0x1p53 + 0x1p20); /* each 1 alone would be lost */
    assert_true(sum_two(0x1p1023, 0x1p-1074, 1 << 10) == 0x1p1023);
    assert_true(sum_two(0x1p-1074, 0x1p-1074, 7) == 0x1p-1071); /* subnormals */
    assert_true(sum_two(0x1.8p-1023, 0x1p-1074, 1) == 0x1.8p-1023 + 0x1p-1074);
    assert_true(sum_two(0.1, 0.1, 0) == 0.1);
    assert_true(sum_two(3.5, 1.25, 1000000) == 1250003.5);
    assert_true(isinf(sum_two(1, INFINITY, 2)));
    assert_true(isnan(sum_two(INFINITY, NAN, 1)));
}

/* What carries do: as many additions as there can be before one, to the highest and to the lowest digit. */
static void
test_carries(void **state)
{
    exact_sum s = {.adds = 0};
    double saved[EXACT_VALUES];
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        s.adds = (1 << 30) - 1;
        spw__exact_add(&s, 0x1.fffffffffffffp31);
        spw__exact_add(&s, 0x1.fffffffffffffp31);
    }
    assert_true(spw__exact_value(&s) == 6 * 0x1.fffffffffffffp31);
    spw__exact_save(&s, saved);
    for (int k = 0; k < EXACT_VALUES; k++)
        assert_true(saved[k] < 0x1p32 && saved[k] == floor(saved[k]));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_orders), cmocka_unit_test(test_values),
                                       cmocka_unit_test(test_carries)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
