/*
 * The cpu device's vector kernels: the bits of the scalar ones from every instruction set of this CPU, for every length and numbers of every
 * kind, and nothing written behind the end; no NaN is lost to a comparison. Random inputs come from Philox; SPW_SEED replays a run.
 */
#include "../gpu/cpu/cpu_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { LENGTH_MAX = 1000, ROOM = 2 * LENGTH_MAX + 32 }; /* gates of pairs have two numbers for each element */
typedef struct arrays {
    float x[ROOM], y[ROOM];
} arrays;

static uint64_t seed = 20261129, draws;
static float in[4][ROOM];

static uint32_t
random_u32(void)
{
    uint32_t out[4];
    spw_philox(seed, 0, draws++, out);
    return out[0];
}

static float
random_float(bool special)
{
    static const uint32_t corners[] = {0x00000000u, 0x80000000u, 0x00000001u, 0x7f7fffffu,
                                       0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u};
    uint32_t kind = special ? random_u32() % 8 : 7;
    if (kind == 0)
        return spw_bits_f32(corners[random_u32() % (sizeof corners / sizeof *corners)]);
    if (kind == 1)
        return spw_bits_f32(random_u32());
    return (spw_uniform_f32(random_u32()) - 0.5f) * (kind == 2 ? 400.0f : 16.0f);
}

static const cpu_kernels *
kernels_of(spw_isa isa)
{
    return !spw_cpu_has(isa)       ? NULL
           : isa == SPW_ISA_AVX512 ? &spw__cpu_kernels_avx512
           : isa == SPW_ISA_AVX2   ? &spw__cpu_kernels_avx2
           : isa == SPW_ISA_SCALAR ? &spw__cpu_kernels_scalar
                                   : NULL;
}

enum {
    CURVE,
    CURVE_BACK = CURVE + 3,
    GATE = CURVE_BACK + 3,
    GATE_BACK = GATE + 4,
    NORMS = GATE_BACK + 4,
    OPS = NORMS + 14
};

/* One kernel on n elements; what it returns, or 0. */
static double
call(const cpu_kernels *k, int op, arrays *a, uint64_t n, bool acc)
{
    float first, second;
    switch (op < NORMS ? -1 : op - NORMS) {
    case 0:
        k->layernorm_row(a->x, &first, &second, in[0], in[1], in[2], n, 1e-5f);
        return (double)first + (double)second;
    case 1: k->layernorm_dx_row(a->x, acc ? a->x : NULL, in[0], in[1], in[2], 0.25f, 1.5f, n); return 0;
    case 2: k->rmsnorm_row(a->x, &first, in[0], acc ? in[1] : NULL, 1.0f, n, 1e-5f); return (double)first;
    case 3: k->rmsnorm_dx_row(a->x, acc ? a->x : NULL, in[0], in[1], in[2], 1.0f, 1.5f, n); return 0;
    case 4: return (double)k->max(in[0], n);
    case 5: return (double)k->dot(in[0], in[1], n);
    case 6: return (double)k->exp_sum(a->x, acc ? a->x : in[0], 1.0f, n);
    case 7: k->softmax_grad_row(a->x, a->y, acc ? a->x : in[0], acc ? a->y : in[1], 0.5f, 0.25f, 0.125f, n); return 0;
    case 8: k->soft_cap(a->x, 20.0f, n); return 0;
    case 9: k->soft_cap_backward(a->x, in[0], 0.5f, 20.0f, n); return 0;
    case 10: k->silu(a->x, in[0], n); return 0;
    case 11: k->silu_backward(a->x, in[0], in[1], n); return 0;
    case 12: return k->sumsq(in[0], n);
    case 13: k->decays(a->x, in[0], in[1], acc ? 400.0f : 0.5f, n); return 0;
    default: break;
    }
    if (op < CURVE_BACK)
        k->curve[op - CURVE](a->x, in[0], n);
    else if (op < GATE)
        k->curve_backward[op - CURVE_BACK](a->x, acc ? in[0] : a->x, in[1], n, acc); /* in place */
    else if (op < GATE_BACK)
        k->gate_mul[op - GATE](a->x, in[0], in[1], n);
    else
        k->gate_mul_backward[op - GATE_BACK](a->x, acc ? a->y : NULL, in[0], in[1], in[2], n, acc, !acc);
    return 0;
}

static bool
same(float a, float b)
{
    return spw_f32_bits(a) == spw_f32_bits(b) || (a != a && b != b);
}

static void
test_isa_identity(void **state)
{
    static arrays start, want, got;
    (void)state;
    for (uint32_t round = 0; round < 120; round++) {
        const uint64_t n = round % 4 == 0 ? LENGTH_MAX - random_u32() % 40 : 1 + random_u32() % 80;
        const bool acc = random_u32() % 2 == 0;
        for (uint64_t i = 0; i < ROOM; i++) {
            for (int j = 0; j < 4; j++)
                in[j][i] = random_float(round % 3 == 0);
            start.x[i] = random_float(false);
            start.y[i] = random_float(false);
        }
        for (int op = 0; op < OPS; op++) {
            double value, result;
            want = start;
            value = call(&spw__cpu_kernels_scalar, op, &want, n, acc);
            for (uint64_t i = 2 * n; i < ROOM; i++)
                assert_true(want.x[i] == start.x[i] && want.y[i] == start.y[i]);
            for (int isa = SPW_ISA_SCALAR + 1; isa < SPW_ISA_COUNT; isa++) {
                if (kernels_of((spw_isa)isa) == NULL)
                    continue;
                got = start;
                result = call(kernels_of((spw_isa)isa), op, &got, n, acc);
                if (!(result == value || (result != result && value != value)))
                    fail_msg("op %d %s n %d: %a, scalar %a", op, spw_isa_name((spw_isa)isa), (int)n, result, value);
                for (uint64_t i = 0; i < ROOM; i++)
                    if (!same(got.x[i], want.x[i]) || !same(got.y[i], want.y[i]))
                        fail_msg("op %d %s n %d element %d seed %llu", op, spw_isa_name((spw_isa)isa), (int)n, (int)i,
                                 (unsigned long long)seed);
            }
        }
    }
}

static void
test_max_sees_nan(void **state)
{
    /* Wherever it is, whatever comes after it; without one it is the greatest. */
    enum { N = 100 };
    (void)state;
    for (int isa = SPW_ISA_SCALAR; isa < SPW_ISA_COUNT; isa++) {
        const cpu_kernels *k = kernels_of((spw_isa)isa);
        for (uint64_t n = 1; k != NULL && n <= N; n++)
            for (uint64_t at = 0; at < n; at++) {
                float x[N];
                for (uint64_t i = 0; i < n; i++)
                    x[i] = (float)i - 50.0f;
                x[at] = 200.0f;
                assert_true(k->max(x, n) == 200.0f);
                x[at] = at % 2 == 0 ? NAN : -NAN;
                assert_true(isnan(k->max(x, n)));
            }
    }
}

static void
test_dropout(void **state)
{
    /* An element is dropped by its own word of its own counter, wherever a part begins; also in place. */
    (void)state;
    for (int isa = SPW_ISA_SCALAR; isa < SPW_ISA_COUNT; isa++) {
        const cpu_kernels *k = kernels_of((spw_isa)isa);
        for (uint32_t round = 0; k != NULL && round < 60; round++) {
            const uint64_t n = 1 + random_u32() % LENGTH_MAX, first = ((uint64_t)random_u32() << 8) + random_u32() % 8;
            float x[LENGTH_MAX + 1], y[LENGTH_MAX + 1];
            for (uint64_t i = 0; i <= LENGTH_MAX; i++)
                y[i] = x[i] = random_float(false);
            k->dropout(y, round % 2 == 0 ? x : y, n, 0.25f, seed, 7, first);
            for (uint64_t i = 0; i < n; i++) {
                uint32_t r[4];
                spw_philox(seed, 7, (first + i) / 4, r);
                assert_true(y[i] == (spw_uniform_f32(r[(first + i) % 4]) < 0.25f ? 0.0f : x[i] * (1.0f / 0.75f)));
            }
            assert_true(y[n] == x[n]);
        }
    }
}

/* Decays are those of the definition, whatever a is: near one, less than any float, and NaN where a is. */
static void
test_decays(void **state)
{
    static const float rates[] = {1e-3f, 0.5f, 16, 400};
    (void)state;
    for (int isa = 0; isa < SPW_ISA_COUNT; isa++)
        for (size_t r = 0; kernels_of((spw_isa)isa) != NULL && r < sizeof rates / sizeof rates[0]; r++) {
            float a[LENGTH_MAX], bias[LENGTH_MAX], y[LENGTH_MAX];
            for (int i = 0; i < LENGTH_MAX; i++) {
                a[i] = 120.0f * (float)i / LENGTH_MAX - 80.0f;
                bias[i] = random_float(false) / 16;
            }
            a[7] = NAN;
            a[9] = INFINITY;
            a[11] = -INFINITY;
            kernels_of((spw_isa)isa)->decays(y, a, bias, rates[r], LENGTH_MAX);
            assert_true(isnan(y[7]) && y[9] == 0 && y[11] == 1);
            for (int i = 12; i < LENGTH_MAX; i++) {
                const double x = (double)(a[i] + bias[i]), step = x > 40 ? x : log1p(exp(x)),
                             by = (double)rates[r] * step;
                const double want = exp(-by);
                if (by < 86.9)
                    assert_true(fabs((double)y[i] - want) <= 4e-7 * (1 + by) * want);
                else
                    assert_true(y[i] >= 0 && (double)y[i] <= 2e-38);
            }
        }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_isa_identity),
        cmocka_unit_test(test_max_sees_nan),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_decays),
    };
    if (getenv("SPW_SEED") != NULL)
        seed = strtoull(getenv("SPW_SEED"), NULL, 0);
    return cmocka_run_group_tests_name("cpu_kernels", tests, NULL, NULL);
}
