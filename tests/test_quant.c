/*
 * Block codes (runtime/quant.h): no other code is nearer, by brute force in fp64; what happens at the ends of fp32; the same
 * bytes from every instruction set, in every cut and from every type.
 */
#include "quant.h"
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { BLOCK = SPW_QUANT_BLOCK, BLOCKS = 300, ELEMS = BLOCK * BLOCKS };

static const spw_quant kinds[] = {SPW_QUANT_INT8, SPW_QUANT_INT4};
static float input[ELEMS], output[ELEMS];
static uint8_t codes[2 * ELEMS + 8], other[2 * ELEMS + 8];

static int
top_of(spw_quant kind)
{
    return kind == SPW_QUANT_INT8 ? 127 : 7;
}

/* Blocks of every size of number, from those that scales cannot reach to the largest. */
static void
fill(void)
{
    for (uint64_t b = 0; b < BLOCKS; b++) {
        int exponent = (int)b - 149;
        for (uint64_t i = 0; i < BLOCK; i++) {
            uint32_t r[4];
            double x;
            spw_philox(11, b, i, r);
            x = ldexp((double)(int32_t)r[0] * 0x1p-31, exponent);
            input[b * BLOCK + i] = fabs(x) > FLT_MAX ? copysignf(FLT_MAX, (float)x) : (float)x;
        }
        if (b % 7 == 0)
            input[b * BLOCK + b % BLOCK] *= 100; /* one that stands out */
        if (!isfinite(input[b * BLOCK + b % BLOCK]))
            input[b * BLOCK + b % BLOCK] = -FLT_MAX;
    }
}

static void
check_block(spw_quant kind, const float *x, const float *decoded)
{
    double most = 0, scale;
    for (int i = 0; i < BLOCK; i++)
        most = fabs((double)x[i]) > most ? fabs((double)x[i]) : most;
    scale = most / top_of(kind) > FLT_MIN ? most / top_of(kind) : FLT_MIN;
    for (int i = 0; i < BLOCK; i++) {
        double error = fabs((double)decoded[i] - (double)x[i]), least = INFINITY;
        for (int c = -top_of(kind); c <= top_of(kind); c++) {
            double d = fabs(c * scale - (double)x[i]);
            least = d < least ? d : least;
        }
        if (!(error <= (0.5 + 3e-5) * scale) || !(error <= least + 6e-5 * scale))
            fail_msg("%d bits: %g became %g, scale %g: the nearest code is %g away", kind == SPW_QUANT_INT8 ? 8 : 4,
                     (double)x[i], (double)decoded[i], scale, least);
    }
}

static void
test_nearest(void **state)
{
    (void)state;
    fill();
    for (int k = 0; k < 2; k++) {
        spw__quant_encode(codes, kinds[k], input, SPW_F32, ELEMS);
        spw__quant_decode(output, SPW_F32, codes, kinds[k], ELEMS);
        for (int b = 0; b < BLOCKS; b++)
            check_block(kinds[k], input + b * BLOCK, output + b * BLOCK);
    }
    assert_int_equal(spw__quant_bytes(SPW_QUANT_INT8, 4096), 32 * 132);
    assert_int_equal(spw__quant_bytes(SPW_QUANT_INT4, 4096), 32 * 68);
}

/* A block of one value in an otherwise empty, or ordinary, block. */
static void
one_block(spw_quant kind, float at_7, float others)
{
    for (int i = 0; i < BLOCK; i++)
        input[i] = i == 7 ? at_7 : others;
    memset(codes, 0xaa, sizeof codes);
    spw__quant_encode(codes, kind, input, SPW_F32, BLOCK);
    spw__quant_decode(output, SPW_F32, codes, kind, BLOCK);
}

static void
test_extremes(void **state)
{
    const float odd[] = {NAN, -NAN, INFINITY, -INFINITY}, rest[] = {0, 1, -FLT_MAX};
    (void)state;
    for (int k = 0; k < 2; k++) {
        spw_quant kind = kinds[k];
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 3; j++) {
                one_block(kind, odd[i], rest[j]);
                for (int e = 0; e < BLOCK; e++)
                    assert_true(isnan(output[e]));
            }
        }
        one_block(kind, -0.0f, 0.0f);
        for (int e = 0; e < BLOCK; e++)
            assert_int_equal(spw_f32_bits(output[e]), 0);
        one_block(kind, FLT_TRUE_MIN, -FLT_TRUE_MIN); /* too small for any code but 0 */
        for (int e = 0; e < BLOCK; e++)
            assert_true(output[e] == 0);
        one_block(kind, FLT_MAX, -FLT_MAX);
        assert_true(output[7] > 0.999999f * FLT_MAX && isfinite(output[7]) && output[0] == -output[7]);
        one_block(kind, FLT_MIN, 0);
        assert_true(output[7] == FLT_MIN);
        one_block(kind, (float)top_of(kind), 0.5f); /* ties go to the even code */
        assert_true(output[7] == (float)top_of(kind) && output[0] == 0);
        one_block(kind, (float)top_of(kind), 1.5f);
        assert_true(output[0] == 2);
        one_block(kind, (float)top_of(kind), -2.5f);
        assert_true(output[0] == -2);
    }
}

/* The nearest codes of a scale for which all that they stand for are bf16 numbers, and the same when it is done again. */
static void
test_settled(void **state)
{
    const spw__quant_kernels *all[] = {&spw__quant_scalar, &spw__quant_avx2, &spw__quant_avx512};
    spw_dtype types[] = {SPW_F32, SPW_BF16, SPW_F16};
    static uint8_t again[sizeof codes];
    static uint16_t half[ELEMS];
    (void)state;
    fill();
    for (int i = 0; i < ELEMS; i++) /* as weights are */
        input[i] = fmodf(input[i], 60000.0f);
    for (int k = 0; k < 2; k++) {
        for (int t = 0; t < 3; t++) {
            spw__quant_settle(codes, kinds[k], input, SPW_F32, ELEMS);
            spw__quant_decode(output, SPW_F32, codes, kinds[k], ELEMS);
            for (int b = 0; b < BLOCKS; b++) {
                double most = 0, scale, least;
                float stored;
                memcpy(&stored, codes + (uint64_t)b * spw__quant_bytes(kinds[k], BLOCK), sizeof stored);
                scale = (double)stored;
                for (int i = 0; i < BLOCK; i++)
                    most = fmax(most, fabs((double)input[b * BLOCK + i]));
                least = most / top_of(kinds[k]);
                assert_true(scale >= fmax(least, k == 0 ? 0x1p-24 : 0x1p-20) * (1 - 1e-6));
                assert_true(scale <= fmax(least * (k == 0 ? 2 : 17.0 / 16), k == 0 ? 0x1p-24 : 0x1p-20));
                for (int i = 0; i < BLOCK; i++) {
                    float x = input[b * BLOCK + i], y = output[b * BLOCK + i];
                    assert_true(fabs((double)x - (double)y) <= (0.5 + 3e-5) * scale);
                    assert_true(spw_bf16_to_f32(spw_f32_to_bf16(y)) == y);
                }
            }
            for (int a = 0; a < 3 && spw_cpu_has((spw_isa)a); a++) {
                memset(again, 0, sizeof again);
                all[a]->settle(again, kinds[k], input, SPW_F32, ELEMS);
                assert_memory_equal(codes, again, ELEMS / BLOCK * spw__quant_bytes(kinds[k], BLOCK));
            }
            spw_convert(half, types[t], output, SPW_F32, t == 0 ? 0 : ELEMS);
            spw__quant_settle(again, kinds[k], t == 0 ? (const void *)output : half, types[t], ELEMS);
            assert_memory_equal(codes, again, ELEMS / BLOCK * spw__quant_bytes(kinds[k], BLOCK));
        }
        input[5] = NAN;
        spw__quant_settle(codes, kinds[k], input, SPW_F32, ELEMS);
        spw__quant_decode(output, SPW_F32, codes, kinds[k], ELEMS);
        assert_true(isnan(output[5]) && isnan(output[0]) && !isnan(output[BLOCK]));
        input[5] = 1;
    }
}

/* Every instruction set, every cut at a block and every place in memory: the same bytes. */
static void
test_same_bytes(void **state)
{
    const spw__quant_kernels *all[] = {&spw__quant_scalar, &spw__quant_avx2, &spw__quant_avx512};
    spw_dtype types[] = {SPW_F32, SPW_BF16, SPW_F16};
    static float from[ELEMS], one[ELEMS], two[ELEMS];
    (void)state;
    fill();
    input[5 * BLOCK + 3] = NAN;
    input[9 * BLOCK] = -INFINITY;
    for (int t = 0; t < 3; t++) {
        uint32_t bytes = spw_dtype_bytes(types[t]);
        spw_convert(from, types[t], input, SPW_F32, ELEMS);
        for (int k = 0; k < 2; k++) {
            uint64_t all_bytes = spw__quant_bytes(kinds[k], ELEMS);
            all[0]->encode(codes, kinds[k], from, types[t], ELEMS);
            all[0]->decode(one, types[t], codes, kinds[k], ELEMS);
            for (int isa = 1; isa < 3 && spw_cpu_has((spw_isa)isa); isa++) {
                memset(other, 0, sizeof other);
                memset(two, 0, sizeof two);
                all[isa]->encode(other + 1, kinds[k], from, types[t], ELEMS);
                assert_memory_equal(other + 1, codes, all_bytes);
                all[isa]->decode(two, types[t], other + 1, kinds[k], ELEMS);
                assert_memory_equal(two, one, (size_t)ELEMS * bytes);
            }
            memset(other, 0, sizeof other);
            for (uint64_t at = 0, n; at < ELEMS; at += n) {
                n = BLOCK * (1 + at / BLOCK % 5);
                n = ELEMS - at < n ? ELEMS - at : n;
                spw__quant_encode(other + spw__quant_bytes(kinds[k], at), kinds[k], (char *)from + at * bytes, types[t],
                                  n);
            }
            assert_memory_equal(other, codes, all_bytes);
        }
    }
}

/* ---------------------------------------------------------------- published forms */

static const struct {
    uint32_t bits;
    bool floats;
    spw_codes_scale scale;
    uint32_t group, bytes; /* of a block */
} published[] = {
    {4, false, SPW_SCALE_BF16, 32, 72},  {4, true, SPW_SCALE_E8M0, 32, 68},  {8, true, SPW_SCALE_F32, 128, 132},
    {4, false, SPW_SCALE_F32, 128, 68},  {4, false, SPW_SCALE_BF16, 64, 68}, {4, true, SPW_SCALE_F32, 16, 96},
    {8, false, SPW_SCALE_F32, 128, 132},
};
enum { PUBLISHED = sizeof published / sizeof published[0] };

/* By the formats' definitions. */
static double
value_of(uint32_t code, uint32_t bits, bool floats)
{
    const int mantissa = bits == 8 ? 3 : 1, bias = bits == 8 ? 7 : 1, sign = code >> (bits - 1) & 1;
    const int e = (int)(code >> mantissa) & ((1 << (bits - 1 - (uint32_t)mantissa)) - 1),
              m = (int)code & ((1 << mantissa) - 1);
    if (!floats)
        return (double)code - (sign ? 1 << bits : 0);
    return (sign ? -1 : 1) * ldexp(e > 0 ? 1 + ldexp(m, -mantissa) : ldexp(m, 1 - mantissa), e - bias);
}

/* To bf16, ties away from zero, by its neighbours. */
static float
to_bf16(float x)
{
    float below = spw_bits_f32(spw_f32_bits(x) & 0xffff0000u),
          above = spw_bits_f32((spw_f32_bits(x) & 0xffff0000u) + 0x10000u);
    return fabs((double)x - (double)below) < fabs((double)above - (double)x) ? below : above;
}

static float
random_scale(spw_codes_scale scale, uint64_t at)
{
    uint32_t r[4];
    spw_philox(3, 5, at, r);
    if (scale == SPW_SCALE_E8M0)
        return ldexpf(1, (int)(r[0] % 60) - 30);
    return spw_bits_f32((((127 - 20 + r[0] % 40) << 23) | r[1] % (1u << 23)) &
                        (scale == SPW_SCALE_BF16 ? 0xffff0000u : ~0u));
}

/* Codes as a publisher may have made them: some groups of zeros, some with few codes, some that never use the greatest. */
static uint32_t
random_code(uint32_t bits, bool floats, uint64_t at, uint64_t group)
{
    uint32_t r[4], all = 1u << bits;
    spw_philox(4, 5, at, r);
    if (group % 11 == 10 || (group % 5 == 4 && r[1] % 8 > 0))
        return 0;
    if (group % 3 == 2)
        r[0] = (r[0] & (all / 2)) | r[0] % (all / 4 + 1);
    return floats && bits == 8 && (r[0] & 127u) == 127u ? 1 : r[0] % all;
}

/* Fills codes and input; what the definition says is in input. */
static void
publish(int k, bool round)
{
    const uint32_t bits = published[k].bits, group = published[k].group,
                   begin = BLOCK / group *
                           (published[k].scale == SPW_SCALE_F32    ? 4
                            : published[k].scale == SPW_SCALE_BF16 ? 2
                                                                   : 1);
    memset(codes, 0, sizeof codes);
    for (uint64_t i = 0; i < ELEMS; i++) {
        uint8_t *block = codes + i / BLOCK * published[k].bytes;
        const float scale = random_scale(published[k].scale, i / group);
        const uint32_t code = random_code(bits, published[k].floats, i, i / group), u = spw_f32_bits(scale),
                       at = i % BLOCK;
        const uint16_t half = (uint16_t)(u >> 16);
        if (published[k].scale == SPW_SCALE_E8M0)
            block[at / group] = (uint8_t)(u >> 23);
        else if (published[k].scale == SPW_SCALE_BF16)
            memcpy(block + at / group * 2, &half, 2);
        else
            memcpy(block + at / group * 4, &scale, 4);
        if (bits == 8)
            block[begin + at] = (uint8_t)code;
        else
            block[begin + at % 64] |= (uint8_t)(code << (at < 64 ? 0 : 4));
        input[i] = (float)(value_of(code, bits, published[k].floats) * (double)scale);
        input[i] = round ? to_bf16(input[i]) : input[i];
    }
}

static spw_quant
form_of(int k, bool round)
{
    return spw_codes_published(published[k].bits, published[k].floats, published[k].scale, published[k].group, round);
}

/* Published codes decode to what the formats say, with every instruction set, and to 16 bits as to 32. */
static void
test_published(void **state)
{
    const spw__quant_kernels *all[] = {&spw__quant_scalar, &spw__quant_avx2, &spw__quant_avx512};
    static uint16_t half[ELEMS];
    (void)state;
    for (int k = 0; k < 2 * PUBLISHED; k++) {
        const bool round = k % 2;
        const spw_quant form = form_of(k / 2, round);
        assert_int_equal(spw__quant_bytes(form, ELEMS), (uint64_t)BLOCKS * published[k / 2].bytes);
        publish(k / 2, round);
        for (int a = 0; a < 3 && spw_cpu_has((spw_isa)a); a++) {
            memset(output, 0xee, sizeof output);
            all[a]->decode(output, SPW_F32, codes, form, ELEMS);
            assert_memory_equal(output, input, sizeof output);
            spw_convert(half, SPW_BF16, input, SPW_F32, ELEMS);
            memset(other, 0xee, sizeof other);
            all[a]->decode(other, SPW_BF16, codes, form, ELEMS);
            assert_true(!round || memcmp(other, half, sizeof half) == 0);
        }
    }
}

/* Strips of 32 rows, a scale for each column, one more than a chunk of the loop and less, with every instruction set. */
static void
test_strips(void **state)
{
    const spw__quant_kernels *all[] = {&spw__quant_scalar, &spw__quant_avx2, &spw__quant_avx512};
    static const uint32_t widths[] = {4, 64, 128, 132, 388};
    static float row[388];
    (void)state;
    for (int k = 0; k < 10; k++) {
        const uint32_t cols = widths[k / 2], n = 3 * 32 * cols;
        const bool round = k % 2;
        const spw_quant form = spw_codes_strips(cols, round);
        assert_true(n <= ELEMS && spw__quant_bytes(form, n) == 3 * 17 * cols);
        memset(codes, 0, sizeof codes);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t r = i / cols, col = i % cols, code = random_code(4, true, i, col);
            const int e = (int)(col * 7 % 100) + (col % 5 == 0 ? 0 : 80); /* 0 too: 2^-127 */
            uint8_t *strip = codes + r / 32 * 17 * cols;
            strip[col] = (uint8_t)e;
            strip[cols * (1 + r % 16) + col] |= (uint8_t)(code << (r % 32 < 16 ? 0 : 4));
            input[i] = (float)(value_of(code, 4, true) * ldexp(1, e - 127));
            input[i] = round ? to_bf16(input[i]) : input[i];
        }
        for (int a = 0; a < 3 && spw_cpu_has((spw_isa)a); a++) {
            memset(output, 0xee, sizeof output);
            all[a]->decode(output, SPW_F32, codes, form, n);
            assert_memory_equal(output, input, n * 4);
        }
        for (uint32_t r = 0; r < 96; r++) {
            spw__quant_strip_row(row, form, codes + r / 32 * 17 * cols, r % 32, 3, cols - 3);
            assert_memory_equal(row, input + r * cols + 3, (cols - 3) * 4);
        }
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nearest),    cmocka_unit_test(test_extremes),  cmocka_unit_test(test_settled),
        cmocka_unit_test(test_same_bytes), cmocka_unit_test(test_published), cmocka_unit_test(test_strips),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
