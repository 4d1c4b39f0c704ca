/*
 * packed_avx512.h - packed state with AVX-512 by the names that packed_body.h's kernels have for it: split masters with 16 or 8 low
 * bits, moments of 16 and 8 bits, gradients, and the constants. 16-bit halves of 32 elements are spread to two vectors and gathered
 * again by permutes, so they are loaded and stored in whole cache lines.
 *
 * Included by adam_bf16_avx512.c, adam_int8_avx512.c and rules_avx512.c.
 */
#ifndef SPW_PACKED_AVX512_H
#define SPW_PACKED_AVX512_H

#include "vec_avx512.h"

enum { LANES = 16, PAIR = 2 * LANES, TWO_PART = 1 };
typedef __m512i bits;

/* Lane numbers of 16-bit permutes: n is the lane of the result. */
#define EVERY_LANE(f)                                                                                                  \
    {                                                                                                                  \
        f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15), f(16),   \
            f(17), f(18), f(19), f(20), f(21), f(22), f(23), f(24), f(25), f(26), f(27), f(28), f(29), f(30), f(31)    \
    }
#define LOW_HALVES(n)   (2 * (n))
#define HIGH_HALVES(n)  (2 * (n) + 1)
#define SPREAD(n)       ((n) / 2)
#define SPREAD_UPPER(n) (16 + (n) / 2)
#define JOIN(n)         ((n) % 2 ? (n) / 2 : 32 + (n) / 2) /* odd: from hi; even: from lo */
#define JOIN_UPPER(n)   (16 + JOIN(n))
#define ALL(x)                                                                                                         \
    {                                                                                                                  \
        x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x                 \
    }
#define ALL_32(x)                                                                                                      \
    {                                                                                                                  \
        x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x                                                                 \
    }
typedef struct constants {
    __m512i low_halves, high_halves, spread[2], join[2];
    __m512i magnitude, too_large, minus_one, code, one, two, minus_zero;
    __m512i f_sign, f_one, f_large, lo_sign_32;
} constants;
static const struct {
    _Alignas(64) uint16_t low_halves[32], high_halves[32], spread[2][32], join[2][32];
    _Alignas(64) uint16_t magnitude[32], too_large[32], minus_one[32], code[32], one[32], two[32];
    _Alignas(64) uint16_t minus_zero[32];
    _Alignas(64) uint32_t f_sign[16], f_one[16], f_large[16], lo_sign_32[16];
} in_memory = {
    .low_halves = EVERY_LANE(LOW_HALVES),
    .high_halves = EVERY_LANE(HIGH_HALVES),
    .spread = {EVERY_LANE(SPREAD), EVERY_LANE(SPREAD_UPPER)},
    .join = {EVERY_LANE(JOIN), EVERY_LANE(JOIN_UPPER)},
    .magnitude = ALL(0x7fff),
    .too_large = ALL(0x7f00),
    .minus_one = ALL(0xffff),
    .code = ALL(0x83f8),
    .one = ALL(0x3f80), /* upper halves of 1.0f and 2.0f */
    .two = ALL(0x4000),
    .minus_zero = ALL((SPW__CODE_ZERO >> 16) - 4), /* less half a place of the code, so that it is rounded */
    .f_sign = ALL_32(0x80000000u),
    .f_one = ALL_32(0x3f800000u),
    .f_large = ALL_32(0x7f000000u),
    .lo_sign_32 = ALL_32(0x8000u),
};

/* Those that are used stay in registers. Made from general registers, as compilers like to, each would cost two instructions. */
ALWAYS_INLINE constants
load_constants(void)
{
    const void *from = &in_memory;
    const char *p;
    constants c;
    __asm__("" : "+r"(from)); /* loads, not values */
    p = from;
#define LOAD(field) c.field = _mm512_load_si512(p + ((const char *)&in_memory.field - (const char *)&in_memory))
    LOAD(low_halves);
    LOAD(high_halves);
    LOAD(spread[0]);
    LOAD(spread[1]);
    LOAD(join[0]);
    LOAD(join[1]);
    LOAD(magnitude);
    LOAD(too_large);
    LOAD(minus_one);
    LOAD(code);
    LOAD(one);
    LOAD(two);
    LOAD(minus_zero);
    LOAD(f_sign);
    LOAD(f_one);
    LOAD(f_large);
    LOAD(lo_sign_32);
#undef LOAD
    return c;
}

ALWAYS_INLINE __m512i
both_low(const constants *k, __m512 a, __m512 b)
{
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), k->low_halves, _mm512_castps_si512(b));
}

ALWAYS_INLINE __m512i
both_high(const constants *k, __m512 a, __m512 b)
{
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), k->high_halves, _mm512_castps_si512(b));
}

ALWAYS_INLINE __m512i
load_bytes(const void *p)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}

/* The lower bytes of words. */
ALWAYS_INLINE void
store_bytes(void *p, __m512i x)
{
    _mm512_mask_cvtepi16_storeu_epi8(p, (__mmask32)-1, x);
}

ALWAYS_INLINE __m512
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    const uint16_t *half = (const uint16_t *)grad + i;
    if (dtype == SPW_F32)
        return _mm512_loadu_ps((const float *)grad + i);
    if (dtype == SPW_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)half));
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)half)), 16));
}

ALWAYS_INLINE void
load_grads(const void *grad, spw_dtype dtype, uint64_t i, __m512 g[2])
{
    for (int j = 0; j < 2; j++)
        g[j] = load_grad(grad, dtype, i + (uint64_t)j * LANES);
}

/* ---------------------------------------------------------------- masters */

ALWAYS_INLINE void
load_master(const constants *k, const spw__packed *p, uint32_t low_bytes, uint64_t i, __m512 w[2])
{
    __m512i hi = _mm512_loadu_si512(p->hi + i);
    __m512i lo = low_bytes == 2 ? _mm512_loadu_si512((const int16_t *)p->lo + i)
                                : _mm512_slli_epi16(load_bytes((const int8_t *)p->lo + i), 8);
    hi = _mm512_sub_epi16(hi, _mm512_srli_epi16(lo, 15)); /* lo is signed */
    for (int j = 0; j < 2; j++)
        w[j] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(hi, k->join[j], lo));
}

/* hi: of masters plus 0x8000, so that it is rounded; lo: of masters. */
ALWAYS_INLINE void
store_master(const spw__packed *p, uint32_t low_bytes, uint64_t i, __m512i hi, __m512i lo)
{
    _mm512_storeu_si512(p->hi + i, hi);
    if (low_bytes == 2)
        _mm512_storeu_si512((int16_t *)p->lo + i, lo);
    else
        store_bytes((int8_t *)p->lo + i, _mm512_srli_epi16(_mm512_adds_epi16(lo, _mm512_set1_epi16(128)), 8));
}

/* New masters: hi (rounded) and lo. */
ALWAYS_INLINE void
split_masters(const constants *k, const __m512 w[2], __m512i *hi, __m512i *lo)
{
    __m512 rounded[2];
    for (int j = 0; j < 2; j++)
        rounded[j] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(w[j]), k->lo_sign_32));
    *hi = both_high(k, rounded[0], rounded[1]);
    *lo = both_low(k, w[0], w[1]);
}

/* Which numbers are not below 2^127 in magnitude, or NaN; the halves are the upper ones. */
typedef __mmask32 lanes; /* which of a pair */

ALWAYS_INLINE bool
any_of(lanes which)
{
    return which != 0;
}

ALWAYS_INLINE lanes
unusual(const constants *k, __m512i halves)
{
    return _mm512_cmpge_epu16_mask(_mm512_and_si512(halves, k->magnitude), k->too_large);
}

/* ---------------------------------------------------------------- moments */

/* spw__rounding_hash: 16 hashes are the 32 elements' 16 bits, in order. */
ALWAYS_INLINE __m512i
rounding_hash(__m512i counter)
{
    __m512i h = _mm512_xor_si512(counter, _mm512_srli_epi32(counter, 16));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)SPW__HASH_MULTIPLIER));
    return _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
}

/* counter: of the first element. */
ALWAYS_INLINE __m512i
random_halves(uint32_t counter)
{
    const __m512i pairs = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i steps = _mm512_mullo_epi32(pairs, _mm512_set1_epi32((int)SPW__HASH_STEP));
    return rounding_hash(_mm512_add_epi32(_mm512_set1_epi32((int)counter), steps));
}

ALWAYS_INLINE void
load_bf16(const constants *k, const uint16_t *m, __m512 x[2])
{
    __m512i half = _mm512_loadu_si512(m);
    for (int j = 0; j < 2; j++)
        x[j] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, k->spread[j], half));
}

ALWAYS_INLINE void
store_bf16(const constants *k, uint16_t *m, __m512i high, __m512i low, __m512i random)
{
    __mmask32 up = _mm512_cmplt_epu16_mask(_mm512_add_epi16(low, random), low);
    _mm512_storeu_si512(m, _mm512_mask_sub_epi16(high, up, high, k->minus_one));
}

/* Two words, over and over. */
ALWAYS_INLINE __m512i
all_words(uint32_t two)
{
    return _mm512_set1_epi32((int)two);
}

/* f of a code lies in the upper half of its bits; x = (f - 1) s. From 2 on, f's bits are 2's or the code's. */
ALWAYS_INLINE void
load_signed(const constants *k, const int8_t *code, float scale, float half_scale, __m512 x[2])
{
    __m512 s = _mm512_set1_ps(scale), half = _mm512_set1_ps(half_scale);
    /* 2 | (code & its bits) */
    __m512i halves =
        _mm512_ternarylogic_epi32(k->two, _mm512_slli_epi16(load_bytes(code), SPW__CODE_SHIFT - 16), k->code, 0xf8);
    for (int j = 0; j < 2; j++) {
        __m512i f = _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, k->spread[j], halves);
        /* s with the sign that f has not: s | (~f & sign) */
        __m512i minus = _mm512_ternarylogic_epi32(_mm512_castps_si512(s), f, k->f_sign, 0xf2);
        x[j] = _mm512_fmadd_ps(_mm512_castsi512_ps(f), half, _mm512_castsi512_ps(minus));
    }
}

ALWAYS_INLINE void
load_unsigned(const constants *k, const uint8_t *code, float scale, __m512 x[2])
{
    __m512 s = _mm512_set1_ps(scale);
    __m512i halves = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)code));
    halves = _mm512_add_epi16(_mm512_slli_epi16(halves, SPW__CODE_SHIFT - 16), k->one);
    for (int j = 0; j < 2; j++)
        x[j] = _mm512_fmsub_ps(_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, k->spread[j], halves)),
                               s, s);
}

/* factor: one over the scale. sign: SIGNED_BITS, and 0 where all codes are. No scale is so small that a code needs clipping. */
ALWAYS_INLINE void
store_signed(const constants *k, int8_t *code, const __m512 x[2], __m512 factor, __m512i sign)
{
    __m512 f[2];
    __m512i high, codes;
    for (int j = 0; j < 2; j++) {
        /* one with the sign of x: one | (x & sign) */
        __m512i one = _mm512_ternarylogic_epi32(k->f_one, _mm512_castps_si512(x[j]), k->f_sign, 0xf8);
        f[j] = _mm512_fmadd_ps(x[j], factor, _mm512_castsi512_ps(one));
    }
    high = both_high(k, f[0], f[1]);
    /* The code and its sign in a byte's last bit. */
    codes = _mm512_srli_epi16(_mm512_sub_epi16(high, k->minus_zero), SPW__CODE_SHIFT - 16);
    store_bytes(code, _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(high, 8), sign, 0xd8));
}

/* least: UNSIGNED_BITS, and 0 where all codes are. */
ALWAYS_INLINE void
store_unsigned(const constants *k, uint8_t *code, const __m512 x[2], __m512 factor, __m512i least)
{
    __m512i high = both_high(k, _mm512_fmadd_ps(x[0], factor, _mm512_castsi512_ps(k->f_one)),
                             _mm512_fmadd_ps(x[1], factor, _mm512_castsi512_ps(k->f_one)));
    __m512i codes = _mm512_srli_epi16(_mm512_sub_epi16(high, k->minus_zero), SPW__CODE_SHIFT - 16);
    store_bytes(code, _mm512_max_epi16(codes, least));
}

/* The larger magnitudes, as bits. */
ALWAYS_INLINE __m512i
larger_of(const constants *k, __m512i magnitudes, __m512 x)
{
    return _mm512_max_epu32(magnitudes, _mm512_andnot_si512(k->f_sign, _mm512_castps_si512(x)));
}

ALWAYS_INLINE uint32_t
largest_of(__m512i magnitudes)
{
    return _mm512_reduce_max_epu32(magnitudes);
}

#include "packed_body.h"
#endif
