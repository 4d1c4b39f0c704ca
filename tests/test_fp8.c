/*
 * 8-bit floats: every bf16 number gets the nearest code, by brute force over the values of the formats' definition in fp64; scales at the ends of
 * fp32; and the cpu device's codes, transposes and products, with the same bits for any number of threads;
 * linear layers on the tape, forward and backward, from factors rounded so.
 */
#include "spw_nn.h"
#include "fp8.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static const char *const names[SPW_FP8_COUNT] = {"E4M3", "E5M2"};

/* What a code stands for: E4M3 has exponent bias 7, 3 bits of mantissa and one NaN; E5M2 15, 2, and ends as IEEE's halves do. */
static double
value_of(spw_fp8 format, unsigned code)
{
    int bits = format == SPW_E4M3 ? 3 : 2, bias = format == SPW_E4M3 ? 7 : 15;
    int mantissa = (int)(code & ((1u << bits) - 1)), exponent = (int)(code & 0x7f) >> bits;
    double x;
    if (format == SPW_E4M3 ? (code & 0x7f) == 0x7f : exponent == 31)
        return format == SPW_E5M2 && mantissa == 0 ? copysign((double)INFINITY, code & 0x80 ? -1 : 1) : (double)NAN;
    x = exponent == 0 ? ldexp(mantissa, 1 - bias - bits) : ldexp((1 << bits) + mantissa, exponent - bias - bits);
    return code & 0x80 ? -x : x;
}

static double
most_of(spw_fp8 format)
{
    return value_of(format, format == SPW_E4M3 ? 0x7e : 0x7b);
}

/* Of finite codes; of two that are as near the even one; of what is beyond them the last. */
static unsigned
nearest(spw_fp8 format, double x)
{
    unsigned best = 0;
    x = copysign(fmin(fabs(x), most_of(format)), x);
    for (unsigned code = 1; code < 0x80; code++) {
        double v = value_of(format, code), d = fabs(v - fabs(x)), least = fabs(value_of(format, best) - fabs(x));
        if (isfinite(v) && (d < least || (d == least && code % 2 == 0)))
            best = code;
    }
    return best | (signbit(x) ? 0x80 : 0);
}

static void
test_codes(void **state)
{
    (void)state;
    for (int f = 0; f < SPW_FP8_COUNT; f++) {
        spw_fp8 format = (spw_fp8)f;
        for (unsigned code = 0; code < 256; code++) {
            float got = spw_fp8_to_f32(format, (uint8_t)code);
            double want = value_of(format, code);
            if (!(isnan(want) ? isnan(got) : (double)got == want && !signbit(got) == !signbit(want)))
                fail_msg("%s: code %02x is %g, not %g", names[f], code, (double)got, want);
        }
        for (unsigned u = 0; u < 65536; u++) {
            float x = spw_bf16_to_f32((uint16_t)u);
            unsigned got = spw_f32_to_fp8(format, x);
            unsigned want = isnan(x) ? (u >> 8 & 0x80) | 0x7f : nearest(format, (double)x);
            if (got != want)
                fail_msg("%s: %g became %02x, not %02x", names[f], (double)x, got, want);
        }
        for (uint32_t i = 0; i < 100000; i++) { /* what bf16 does not have: just beside ties */
            float x = spw_bits_f32((i * 2654435761u & 0x83ffffffu) + (f == SPW_E4M3 ? 0x3a000000u : 0x36000000u));
            assert_int_equal(spw_f32_to_fp8(format, x), nearest(format, (double)x));
        }
    }
}

/* The least power of two that does, from the smallest numbers to the largest; and what is no number. */
static void
test_scales(void **state)
{
    (void)state;
    for (int f = 0; f < SPW_FP8_COUNT; f++) {
        spw_fp8 format = (spw_fp8)f;
        double most = most_of(format);
        float before = 0;
        for (uint32_t u = 0; u < 0x7f800000u; u += u < 64 ? 1 : 40503) {
            float x = spw_bits_f32(u), scale = spw_fp8_scale(format, u), inverse = spw_fp8_inverse(scale);
            int exponent;
            assert_true(frexp((double)scale, &exponent) == 0.5 && scale >= 0x1p-126f && scale >= before);
            assert_true((double)scale * (double)inverse == 1);
            assert_true((double)x / (double)scale <= most);
            assert_true(scale == 0x1p-126f || (double)x / (double)scale > most / 2);
            before = scale;
        }
        assert_true(isnan(spw_fp8_scale(format, 0x7f800000u)) && isnan(spw_fp8_scale(format, 0x7fc00001u)));
        assert_true(spw_fp8_inverse(spw_fp8_scale(format, 0x7f800000u)) == 0);
    }
}

/* ---------------------------------------------------------------- the cpu device */

enum { M = 80, N = 96, K = 528 };

typedef struct device {
    spw_gpu *gpu;
    spw_gpu_queue *q;
} device;

static device
open_device(uint32_t threads)
{
    device d;
    spw_error err = {0};
    assert_int_equal(spw_gpu_open(&d.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = threads}, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&d.q, d.gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_true(spw_gpu_get_info(d.gpu)->fp8);
    return d;
}

static void
close_device(device *d)
{
    spw_gpu_queue_destroy(d->q);
    spw_gpu_close(d->gpu);
}

static void
draw(float *x, uint64_t n, uint64_t key, float size)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t r[4];
        spw_philox(key, 0, i, r);
        x[i] = (2 * spw_uniform_f32(r[0]) - 1) * size * (r[1] % 8 == 0 ? 1.0f : 0.01f);
    }
}

static void
test_encode(void **state)
{
    static float x[M * K];
    static uint8_t codes[M * K], turned[K * M];
    static const float sizes[] = {0, 1e-40f, 3e-5f, 1, 700, 3e38f};
    (void)state;
    for (int f = 0; f < 2; f++)
        for (uint32_t k = 0; k < 8; k++) {
            device d = open_device(1 + 2 * (k % 2));
            float scale = 0, greatest = 0;
            draw(x, M * K, k, k < 6 ? sizes[k] : 1);
            if (k >= 6)
                x[M * K / 3] = k == 6 ? -INFINITY : NAN;
            for (uint64_t i = 0; i < M * K; i++)
                greatest = fabsf(x[i]) > greatest ? fabsf(x[i]) : greatest;
            spw_gpu_fp8_scale(d.q, &scale, (spw_fp8)f, x, M * K);
            spw_gpu_fp8_encode(d.q, codes, turned, (spw_fp8)f, &scale, x, M, K);
            assert_true(k >= 6 ? isnan(scale) : scale == spw_fp8_scale((spw_fp8)f, spw_f32_bits(greatest)));
            for (uint64_t i = 0; i < M * K; i++) {
                unsigned want = k >= 6 ? 0 : nearest((spw_fp8)f, (double)x[i] / (double)scale);
                if (codes[i] != want || turned[i % K * M + i / K] != want)
                    fail_msg("%s: %g by %g became %02x and %02x, not %02x", names[f], (double)x[i], (double)scale,
                             codes[i], turned[i % K * M + i / K], want);
            }
            close_device(&d);
        }
}

/* A sum of exact products in fp64 beside the device's; zeros; a NaN spreads; the bits of 1 thread and of 3. */
static void
test_product(void **state)
{
    static float a[M * K], b[N * K], onto[M * N], bias[N], y[2][M * N];
    static uint8_t of_a[M * K], of_b[N * K];
    (void)state;
    for (int f = 0; f < 12; f++) {
        spw_fp8 a_format = f % 3 == 1 ? SPW_E5M2 : SPW_E4M3, b_format = f % 3 == 2 ? SPW_E5M2 : SPW_E4M3;
        float a_scale, b_scale;
        draw(a, M * K, 1, 3);
        draw(b, N * K, 2, f == 9 ? 0 : 0.02f);
        draw(onto, M * N, 3, 1);
        draw(bias, N, 4, 1);
        if (f == 10)
            b[7] = INFINITY;
        for (int t = 0; t < 2; t++) {
            device d = open_device(t == 0 ? 1 : 3);
            spw_gpu_fp8_scale(d.q, &a_scale, a_format, a, M * K);
            spw_gpu_fp8_scale(d.q, &b_scale, b_format, b, N * K);
            spw_gpu_fp8_encode(d.q, of_a, NULL, a_format, &a_scale, a, M, K);
            spw_gpu_fp8_encode(d.q, of_b, NULL, b_format, &b_scale, b, N, K);
            memcpy(y[t], onto, sizeof onto);
            spw_gpu_fp8_product(d.q, &(spw_fp8_product){.y = y[t],
                                                        .onto = f % 2 ? y[t] : NULL,
                                                        .bias = f % 4 < 2 ? bias : NULL,
                                                        .f32_out = f > 5,
                                                        .a = {of_a, &a_scale, a_format},
                                                        .b = {of_b, &b_scale, b_format},
                                                        .M = M,
                                                        .N = N,
                                                        .K = K});
            close_device(&d);
        }
        assert_memory_equal(y[0], y[1], sizeof y[0]);
        for (uint64_t i = 0; i < M * N; i++) {
            double want = (f % 2 ? (double)onto[i] : 0) + (f % 4 < 2 ? (double)bias[i % N] : 0), size = 1;
            for (uint64_t k = 0; k < K; k++) {
                double term = value_of(a_format, of_a[i / N * K + k]) * value_of(b_format, of_b[i % N * K + k]) *
                              (double)a_scale * (double)b_scale;
                want += term;
                size += fabs(term);
            }
            if (f == 10 ? !isnan(y[0][i]) : !(fabs((double)y[0][i] - want) <= 1e-6 * size))
                fail_msg("product %d: element %llu is %.9g, not %.9g", f, (unsigned long long)i, (double)y[0][i], want);
        }
    }
}

/* ---------------------------------------------------------------- linear layers on the tape */

enum { ROWS = 32, IN = 48, OUT = 80, ARENA = 1 << 20 };

/* What codes stand for: rounded by brute force. */
static void
round_all(spw_fp8 format, double *out, const float *x, uint64_t n)
{
    float greatest = 0, scale;
    for (uint64_t i = 0; i < n; i++)
        greatest = fabsf(x[i]) > greatest ? fabsf(x[i]) : greatest;
    scale = spw_fp8_scale(format, spw_f32_bits(greatest));
    for (uint64_t i = 0; i < n; i++)
        out[i] = value_of(format, nearest(format, (double)x[i] / (double)scale)) * (double)scale;
}

static void
expect(const char *what, const float *got, const double *want, uint64_t n)
{
    double size = 0;
    for (uint64_t i = 0; i < n; i++)
        size += fabs(want[i]) / (double)n;
    for (uint64_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= 1e-5 * (size + fabs(want[i]))))
            fail_msg("%s: element %llu is %.9g, not %.9g", what, (unsigned long long)i, (double)got[i], want[i]);
}

/*
 * Two layers that read one input, which backward meets in turn: outputs, and the gradients of weights, biases and the input, from rounded
 * factors in fp64. how: 1 weights (in, out), 2 frozen, 4 without fp8.
 */
static void
examine_layers(unsigned how, uint64_t rows)
{
    static char arena[ARENA];
    static float x[ROWS * IN], w[2][OUT * IN], b[2][OUT], dy[2][ROWS * OUT], dw[2][OUT * IN], db[2][OUT], dx[ROWS * IN];
    static double of_x[ROWS * IN], of_w[OUT * IN], of_dy[ROWS * OUT], want_y[ROWS * OUT], want_dw[OUT * IN],
        want_dx[ROWS * IN], want_db[OUT];
    bool in_out = how & 1, coded = (how & 4) == 0 && rows % 16 == 0;
    device d = open_device(2);
    spw_tape *t;
    spw_value *vx, *vw[2], *y[2], *sum;
    uint64_t forward_bytes;
    draw(x, rows * IN, 1, 1);
    for (uint64_t i = 0; i < 2; i++) {
        draw(w[i], OUT * IN, 2 + i, 0.1f);
        draw(b[i], OUT, 4 + i, 1);
        draw(dy[i], rows * OUT, 6 + i, 0.001f);
        draw(dw[i], OUT * IN, 8 + i, 0.001f);
        memset(db[i], 0, sizeof db[i]);
    }
    assert_int_equal(spw_tape_create(&t, d.q, spw_gpu_get_info(d.gpu), NULL), SPW_OK);
    for (int dry = 1; dry >= 0; dry--) { /* what is measured is enough */
        uint64_t bytes = spw_tape_arena_used(t);
        assert_true(dry || bytes <= ARENA);
        if (!dry)
            memset(arena + bytes, 0x5a, ARENA - bytes);
        spw_tape_reset(t, dry ? NULL : arena, dry ? 0 : bytes, true);
        vx = spw_tape_input(t, x, rows, IN, true);
        vx->grad = dx;
        for (int i = 0; i < 2; i++) {
            vw[i] =
                spw_tape_param(t, w[i], dry || (how & 2) ? NULL : dw[i], NULL, in_out ? IN : OUT, in_out ? OUT : IN);
            vw[i]->fp8 = (how & 4) == 0;
            y[i] = spw_nn_linear(t, vx, vw[i], spw_tape_param(t, b[i], dry ? NULL : db[i], NULL, 1, OUT),
                                 in_out ? SPW_OP_W_IN_OUT : 0);
        }
        sum = spw_nn_add(t, y[0], y[1]);
        forward_bytes = spw_tape_arena_used(t);
        sum->grad = dry ? sum->data : (void *)dy[0];
        if (!dry)
            for (int i = 0; i < 2; i++) {
                round_all(SPW_E4M3, of_x, x, rows * IN);
                round_all(SPW_E4M3, of_w, w[i], OUT * IN);
                for (uint64_t e = 0; e < rows * OUT; e++) {
                    want_y[e] = (double)b[i][e % OUT];
                    for (uint64_t k = 0; k < IN; k++)
                        want_y[e] += coded
                                         ? of_x[e / OUT * IN + k] * of_w[in_out ? k * OUT + e % OUT : e % OUT * IN + k]
                                         : (double)x[e / OUT * IN + k] *
                                               (double)w[i][in_out ? k * OUT + e % OUT : e % OUT * IN + k];
                }
                expect("y", y[i]->data, want_y, rows * OUT);
            }
        spw_tape_backward(t, sum);
        assert_int_equal(spw_tape_check(t, NULL), SPW_OK);
        assert_true(spw_tape_arena_used(t) > forward_bytes);
    }
    for (uint64_t i = 0; i < ARENA - spw_tape_arena_used(t); i++)
        assert_int_equal(arena[spw_tape_arena_used(t) + i], 0x5a);
    if (coded)
        round_all(SPW_E5M2, of_dy, dy[0], rows * OUT);
    memset(want_dx, 0, sizeof want_dx);
    for (uint64_t i = 0; i < 2 && coded; i++) {
        float before[OUT * IN];
        draw(before, OUT * IN, 8 + i, 0.001f);
        round_all(SPW_E4M3, of_w, w[i], OUT * IN);
        memset(want_db, 0, sizeof want_db);
        for (uint64_t e = 0; e < OUT * IN; e++)
            want_dw[e] = (double)before[e];
        for (uint64_t e = 0; e < rows * OUT; e++)
            for (uint64_t k = 0; k < IN; k++) {
                uint64_t at = in_out ? k * OUT + e % OUT : e % OUT * IN + k;
                want_dw[at] += how & 2 ? 0 : of_dy[e] * of_x[e / OUT * IN + k];
                want_dx[e / OUT * IN + k] += of_dy[e] * of_w[at];
            }
        for (uint64_t e = 0; e < rows * OUT; e++)
            want_db[e % OUT] += (double)dy[0][e];
        expect("dw", dw[i], want_dw, OUT * IN);
        expect("db", db[i], want_db, OUT);
    }
    if (coded)
        expect("dx", dx, want_dx, rows * IN);
    spw_tape_destroy(t);
    close_device(&d);
}

static void
test_layers(void **state)
{
    (void)state;
    for (unsigned how = 0; how < 8; how++) {
        examine_layers(how, ROWS);
        examine_layers(how, ROWS - 4); /* not a multiple of 16: as without */
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes),   cmocka_unit_test(test_scales), cmocka_unit_test(test_encode),
        cmocka_unit_test(test_product), cmocka_unit_test(test_layers),
    };
    return cmocka_run_group_tests_name("fp8", tests, NULL, NULL);
}
