/*
 * packed_avx2.h - packed state with AVX2 by the names that packed_body.h's kernels have for it. Of a pair of vectors one holds the
 * elements of even numbers and one those of odd: halves go there and back by shifts and blends, where putting them in order would take
 * shuffles, for which processors with AVX2 have one port.
 *
 * Included by adam_bf16_avx2.c, adam_int8_avx2.c and rules_avx2.c.
 */
#ifndef SPW_PACKED_AVX2_H
#define SPW_PACKED_AVX2_H

#include "vec_avx2.h"

enum { LANES = 8, PAIR = 2 * LANES, TWO_PART = 0 };

typedef struct constants {
    bits upper, magnitude, usual, code, one, two, minus_zero, f_sign, f_one;
} constants;

ALWAYS_INLINE constants
load_constants(void)
{
    return (constants){
        .upper = _mm256_set1_epi32((int)0xffff0000u),
        .magnitude = _mm256_set1_epi16(0x7fff),
        .usual = _mm256_set1_epi16(0x7eff),
        .code = _mm256_set1_epi16((short)0x83f8),
        .one = _mm256_set1_epi16(0x3f80), /* upper halves of 1.0f and 2.0f */
        .two = _mm256_set1_epi16(0x4000),
        .minus_zero =
            _mm256_set1_epi16((SPW__CODE_ZERO >> 16) - 4), /* less half a place of the code, so that it is rounded */
        .f_sign = _mm256_set1_epi32((int)0x80000000u),
        .f_one = _mm256_set1_epi32(0x3f800000),
    };
}

/* Every second half of b, the first from a. */
ALWAYS_INLINE bits
blend(bits a, bits b)
{
    return _mm256_blend_epi16(a, b, 0xaa);
}

ALWAYS_INLINE bits
both_low(const constants *k, vec even, vec odd)
{
    (void)k;
    return blend(_mm256_castps_si256(even), _mm256_slli_epi32(_mm256_castps_si256(odd), 16));
}

ALWAYS_INLINE bits
both_high(const constants *k, vec even, vec odd)
{
    (void)k;
    return blend(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}

/* Upper halves, with zeros below. */
ALWAYS_INLINE void
spread(const constants *k, bits halves, vec x[2])
{
    x[0] = _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
    x[1] = _mm256_castsi256_ps(_mm256_and_si256(halves, k->upper));
}

ALWAYS_INLINE bits
load_halves(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

ALWAYS_INLINE void
store_halves(void *p, bits x)
{
    _mm256_storeu_si256((__m256i *)p, x);
}

ALWAYS_INLINE bits
load_bytes(const void *p)
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}

/* Words below 256. */
ALWAYS_INLINE void
store_bytes(void *p, bits x)
{
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

/* Two vectors in order, as a pair. */
ALWAYS_INLINE void
by_parity(vec first, vec second, vec x[2])
{
    __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0x88));
    __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(first, second, 0xdd));
    x[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
    x[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}

ALWAYS_INLINE void
load_grads(const void *grad, spw_dtype dtype, uint64_t i, vec g[2])
{
    const uint16_t *half = (const uint16_t *)grad + i;
    if (dtype == SPW_F32) {
        by_parity(load((const float *)grad + i), load((const float *)grad + i + LANES), g);
    } else if (dtype == SPW_F16) {
        by_parity(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)half)),
                  _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(half + LANES))), g);
    } else {
        bits halves = load_halves(half);
        g[0] = _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
        g[1] = _mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32((int)0xffff0000u)));
    }
}

/* ---------------------------------------------------------------- masters */

ALWAYS_INLINE void
load_master(const constants *k, const spw__packed *p, uint32_t low_bytes, uint64_t i, vec w[2])
{
    bits hi = load_halves(p->hi + i);
    bits lo = low_bytes == 2 ? load_halves((const int16_t *)p->lo + i)
                             : _mm256_slli_epi16(load_bytes((const int8_t *)p->lo + i), 8);
    (void)k;
    hi = _mm256_sub_epi16(hi, _mm256_srli_epi16(lo, 15)); /* lo is signed */
    w[0] = _mm256_castsi256_ps(blend(lo, _mm256_slli_epi32(hi, 16)));
    w[1] = _mm256_castsi256_ps(blend(_mm256_srli_epi32(lo, 16), hi));
}

/* hi: rounded; lo: of masters. */
ALWAYS_INLINE void
store_master(const spw__packed *p, uint32_t low_bytes, uint64_t i, bits hi, bits lo)
{
    store_halves(p->hi + i, hi);
    if (low_bytes == 2)
        store_halves((int16_t *)p->lo + i, lo);
    else
        store_bytes((int8_t *)p->lo + i, _mm256_srli_epi16(_mm256_adds_epi16(lo, _mm256_set1_epi16(128)), 8));
}

/* New masters: hi (rounded) and lo. */
ALWAYS_INLINE void
split_masters(const constants *k, const vec w[2], bits *hi, bits *lo)
{
    *lo = both_low(k, w[0], w[1]);
    *hi = _mm256_add_epi16(both_high(k, w[0], w[1]), _mm256_srli_epi16(*lo, 15));
}

typedef bits lanes; /* which of a pair */

ALWAYS_INLINE bool
any_of(lanes which)
{
    return _mm256_movemask_epi8(which) != 0;
}

/* Which numbers are not below 2^127 in magnitude, or NaN; the halves are the upper ones. */
ALWAYS_INLINE lanes
unusual(const constants *k, bits halves)
{
    return _mm256_cmpgt_epi16(_mm256_and_si256(halves, k->magnitude), k->usual);
}

/* ---------------------------------------------------------------- moments */

/* spw__rounding_hash of a counter and the next ones, each `step` further. */
ALWAYS_INLINE bits
rounding_hashes(uint32_t counter, uint32_t step)
{
    const bits steps = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)step));
    bits c = _mm256_add_epi32(_mm256_set1_epi32((int)counter), steps),
         h = _mm256_xor_si256(c, _mm256_srli_epi32(c, 16));
    h = _mm256_mullo_epi32(h, _mm256_set1_epi32((int)SPW__HASH_MULTIPLIER));
    return _mm256_xor_si256(h, _mm256_srli_epi32(h, 15));
}

/* 8 hashes are the 16 elements' 16 bits, in order. counter: of the first element. */
ALWAYS_INLINE bits
random_halves(uint32_t counter)
{
    return rounding_hashes(counter, 2 * SPW__HASH_STEP);
}

ALWAYS_INLINE void
load_bf16(const constants *k, const uint16_t *m, vec x[2])
{
    spread(k, load_halves(m), x);
}

ALWAYS_INLINE void
store_bf16(const constants *k, uint16_t *m, bits high, bits low, bits random)
{
    /* low + random carries where low is above ~random; comparisons are signed. */
    bits carry = _mm256_cmpgt_epi16(_mm256_xor_si256(low, _mm256_set1_epi16(-0x8000)),
                                    _mm256_xor_si256(random, _mm256_set1_epi16(0x7fff)));
    (void)k;
    store_halves(m, _mm256_sub_epi16(high, carry));
}

/* Two words, over and over. */
ALWAYS_INLINE bits
all_words(uint32_t two)
{
    return _mm256_set1_epi32((int)two);
}

/* f of a code lies in the upper half of its bits; x = (f - 1) s. From 2 on, f's bits are 2's or the code's. */
ALWAYS_INLINE void
load_signed(const constants *k, const int8_t *code, float scale, float half_scale, vec x[2])
{
    const vec s = all_of(scale), half = all_of(half_scale), f_sign = _mm256_castsi256_ps(k->f_sign);
    bits shifted = _mm256_slli_epi16(load_bytes(code), SPW__CODE_SHIFT - 16);
    vec f[2];
    spread(k, _mm256_or_si256(k->two, _mm256_and_si256(shifted, k->code)), f);
    for (int j = 0; j < 2; j++) /* s with the sign that f has not */
        x[j] = fma_of(f[j], half, _mm256_or_ps(s, _mm256_andnot_ps(f[j], f_sign)));
}

ALWAYS_INLINE void
load_unsigned(const constants *k, const uint8_t *code, float scale, vec x[2])
{
    const vec s = all_of(scale);
    bits codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)code));
    vec f[2];
    spread(k, _mm256_add_epi16(_mm256_slli_epi16(codes, SPW__CODE_SHIFT - 16), k->one), f);
    for (int j = 0; j < 2; j++)
        x[j] = _mm256_fmsub_ps(f[j], s, s);
}

/* factor: one over the scale. sign: SIGNED_BITS, and 0 where all codes are. No scale is so small that a code needs clipping. */
ALWAYS_INLINE void
store_signed(const constants *k, int8_t *code, const vec x[2], vec factor, bits sign)
{
    const vec f_one = _mm256_castsi256_ps(k->f_one), f_sign = _mm256_castsi256_ps(k->f_sign);
    vec f[2];
    bits high, codes;
    for (int j = 0; j < 2; j++) /* one with the sign of x */
        f[j] = fma_of(x[j], factor, _mm256_or_ps(f_one, _mm256_and_ps(x[j], f_sign)));
    high = both_high(k, f[0], f[1]);
    codes = _mm256_and_si256(_mm256_srli_epi16(_mm256_sub_epi16(high, k->minus_zero), SPW__CODE_SHIFT - 16),
                             _mm256_set1_epi16(0x7f));
    store_bytes(code, _mm256_or_si256(codes, _mm256_and_si256(_mm256_srli_epi16(high, 8), sign)));
}

/* least: UNSIGNED_BITS, and 0 where all codes are. */
ALWAYS_INLINE void
store_unsigned(const constants *k, uint8_t *code, const vec x[2], vec factor, bits least)
{
    const vec f_one = _mm256_castsi256_ps(k->f_one);
    bits high = both_high(k, fma_of(x[0], factor, f_one), fma_of(x[1], factor, f_one));
    bits codes = _mm256_srli_epi16(_mm256_sub_epi16(high, k->minus_zero), SPW__CODE_SHIFT - 16);
    store_bytes(code, _mm256_max_epi16(codes, least));
}

/* The larger magnitudes, as bits. */
ALWAYS_INLINE bits
larger_of(const constants *k, bits magnitudes, vec x)
{
    return _mm256_max_epu32(magnitudes, _mm256_andnot_si256(k->f_sign, _mm256_castps_si256(x)));
}

ALWAYS_INLINE uint32_t
largest_of(bits magnitudes)
{
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
}

#include "packed_body.h"
#endif
