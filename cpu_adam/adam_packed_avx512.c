/*
 * Adam on packed state with AVX-512: split masters with 16 or 8 low bits, moments of 16 or 8 bits. One pass, everything
 * in registers, one group of 32 elements at a time; 16-bit halves are spread and gathered by permutes, so a group
 * is loaded and stored in whole cache lines. It does the operations of opt_block.h in the same order. Whatever is not an
 * ordinary number (NaN, infinities, magnitudes of 2^127 and above) goes back to opt_block.h, group by group, before a byte is
 * stored: the bits stay the same, and the common case pays one test.
 */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
enum { LANES = 16, GROUP = SPW__GROUP, PREFETCH_AHEAD_BYTES = 2048 };

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
/* In memory: made from general registers, as compilers like to, each constant would cost an instruction per use. */
typedef struct constants {
    _Alignas(64) uint16_t low_halves[32], high_halves[32], spread[2][32], join[2][32];
    _Alignas(64) uint16_t magnitude[32], too_large[32], minus_one[32], one[32], lo_sign[32], code_sign[32], code[32];
    _Alignas(64) uint16_t zero[32], minus_zero[32];
    _Alignas(64) uint32_t f_one[16], f_sign[16], lo_sign_32[16];
    _Alignas(64) uint64_t codes[8];
} constants;
static const constants in_memory = {
    .low_halves = EVERY_LANE(LOW_HALVES),
    .high_halves = EVERY_LANE(HIGH_HALVES),
    .spread = {EVERY_LANE(SPREAD), EVERY_LANE(SPREAD_UPPER)},
    .join = {EVERY_LANE(JOIN), EVERY_LANE(JOIN_UPPER)},
    .magnitude = ALL(0x7fff),
    .too_large = ALL(0x7f00),
    .minus_one = ALL(0xffff),
    .one = ALL(1),
    .lo_sign = ALL(0x8000),
    .code_sign = ALL(0x80),
    .code = ALL(0x83f8),
    .zero = ALL(SPW__CODE_ZERO >> 16),
    .minus_zero = ALL((SPW__CODE_ZERO >> 16) - 4), /* less half a place of the code, so that it is rounded */
    .f_one = ALL_32(0x3f800000u),
    .f_sign = ALL_32(0x80000000u),
    .lo_sign_32 = ALL_32(0x8000u),
    .codes = {0, 2, 4, 6, 1, 3, 5, 7},
};

ALWAYS_INLINE __m512i
lanes(const uint16_t numbers[32])
{
    return _mm512_load_si512(numbers);
}

ALWAYS_INLINE __m512i
lanes_32(const uint32_t numbers[16])
{
    return _mm512_load_si512(numbers);
}

ALWAYS_INLINE __m512i
both_low(const constants *k, __m512 a, __m512 b)
{
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), lanes(k->low_halves), _mm512_castps_si512(b));
}

ALWAYS_INLINE __m512i
both_high(const constants *k, __m512 a, __m512 b)
{
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), lanes(k->high_halves), _mm512_castps_si512(b));
}

ALWAYS_INLINE __m512i
load_bytes(const void *p)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}

ALWAYS_INLINE void
store_bytes(void *p, __m512i x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8(x));
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

/* Past the end of an array a prefetch does nothing; hence the arithmetic on the address and not on the pointer. */
ALWAYS_INLINE void
prefetch(const void *p)
{
    _mm_prefetch((const char *)((uintptr_t)p + PREFETCH_AHEAD_BYTES), _MM_HINT_T0);
}

/* ---------------------------------------------------------------- masters */

ALWAYS_INLINE void
load_master(const constants *c, const spw__packed *p, uint32_t low_bytes, uint64_t i, __m512 w[2])
{
    __m512i hi = _mm512_loadu_si512(p->hi + i);
    __m512i lo = low_bytes == 2 ? _mm512_loadu_si512((const int16_t *)p->lo + i)
                                : _mm512_slli_epi16(load_bytes((const int8_t *)p->lo + i), 8);
    lo = _mm512_xor_si512(lo, lanes(c->lo_sign)); /* signed; the subtraction makes it so */
    for (int k = 0; k < 2; k++)
        w[k] = _mm512_castsi512_ps(
            _mm512_sub_epi32(_mm512_permutex2var_epi16(hi, lanes(c->join[k]), lo), lanes_32(c->lo_sign_32)));
}

/* hi: of masters plus 0x8000, so that it is rounded; lo: of masters. */
ALWAYS_INLINE void
store_master(const spw__packed *p, uint32_t low_bytes, uint64_t i, __m512i hi, __m512i lo)
{
    _mm512_storeu_si512(p->hi + i, hi);
    if (low_bytes == 2)
        _mm512_storeu_si512((int16_t *)p->lo + i, lo);
    else
        store_bytes((int8_t *)p->lo + i, _mm512_srai_epi16(_mm512_adds_epi16(lo, _mm512_set1_epi16(128)), 8));
}

/* ---------------------------------------------------------------- moments of 16 bits */

ALWAYS_INLINE void
load_bf16(const constants *c, const uint16_t *m, __m512 x[2])
{
    __m512i half = _mm512_loadu_si512(m);
    for (int k = 0; k < 2; k++)
        x[k] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, lanes(c->spread[k]), half));
}

/* spw__rounding_hash: 16 hashes are the 32 elements' 16 bits, in order. */
ALWAYS_INLINE __m512i
rounding_hash(__m512i counter)
{
    __m512i h = _mm512_xor_si512(counter, _mm512_srli_epi32(counter, 16));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)SPW__HASH_MULTIPLIER));
    return _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
}

ALWAYS_INLINE void
store_bf16(const constants *k, uint16_t *m, __m512i high, __m512i low, __m512i random)
{
    __mmask32 up = _mm512_cmplt_epu16_mask(_mm512_add_epi16(low, random), low);
    _mm512_storeu_si512(m, _mm512_mask_sub_epi16(high, up, high, lanes(k->minus_one)));
}

/* ---------------------------------------------------------------- moments of 8 bits */

/* f of a code lies in the upper half of its bits; x = (f - 1) s. */
ALWAYS_INLINE void
load_signed(const constants *c, const int8_t *code, float scale, __m512 x[2])
{
    __m512 s = _mm512_set1_ps(scale);
    __m512i half = _mm512_and_si512(_mm512_slli_epi16(load_bytes(code), SPW__CODE_SHIFT - 16), lanes(c->code));
    half = _mm512_add_epi16(half, lanes(c->zero));
    for (int k = 0; k < 2; k++) {
        __m512i f = _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, lanes(c->spread[k]), half);
        /* s with the sign that f has not: s | (~f & sign) */
        __m512i minus = _mm512_ternarylogic_epi32(_mm512_castps_si512(s), f, lanes_32(c->f_sign), 0xf2);
        x[k] = _mm512_fmadd_ps(_mm512_castsi512_ps(f), s, _mm512_castsi512_ps(minus));
    }
}

ALWAYS_INLINE void
load_unsigned(const constants *c, const uint8_t *code, float scale, __m512 x[2])
{
    __m512 s = _mm512_set1_ps(scale);
    __m512i half = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)code));
    half = _mm512_add_epi16(_mm512_slli_epi16(half, SPW__CODE_SHIFT - 16), lanes(c->zero));
    for (int k = 0; k < 2; k++)
        x[k] = _mm512_fmsub_ps(
            _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, lanes(c->spread[k]), half)), s, s);
}

/* The largest magnitudes of both moments, as bits: lanes m m v v. v is not negative; a NaN shows in the new weight. */
ALWAYS_INLINE __m128i
tops_of(const __m512 m[2], const __m512 v[2])
{
    __m512i a = _mm512_castps_si512(_mm512_range_ps(m[0], m[1], 0xb)); /* the larger magnitude */
    __m512i b = _mm512_max_epu32(_mm512_castps_si512(v[0]), _mm512_castps_si512(v[1]));
    __m256i a8 = _mm256_max_epu32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m256i b8 = _mm256_max_epu32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
    __m128i a4 = _mm_max_epu32(_mm256_castsi256_si128(a8), _mm256_extracti128_si256(a8, 1));
    __m128i b4 = _mm_max_epu32(_mm256_castsi256_si128(b8), _mm256_extracti128_si256(b8, 1));
    __m128i both = _mm_max_epu32(_mm_unpacklo_epi64(a4, b4), _mm_unpackhi_epi64(a4, b4));
    return _mm_max_epu32(both, _mm_shuffle_epi32(both, 0xb1));
}

/* Eight groups whose new moments are known and not yet encoded. Their scales are made together: sixteen lanes at a time. */
enum { BATCH = 8 };
typedef struct batch {
    _Alignas(64) float m[BATCH][GROUP], v[BATCH][GROUP];
    _Alignas(64) uint32_t tops[BATCH][4];  /* lanes m m v v */
    _Alignas(64) float factors[2 * BATCH]; /* one over the new scale; 0 where all codes are */
    _Alignas(64) float scales[2 * BATCH];  /* the old ones */
    _Alignas(32) uint32_t v_some[BATCH];   /* all ones where not all codes of v are 0 */
    uint64_t group;                        /* the first, in the chunk */
    uint32_t count, done;                  /* done: a bit for each group that is encoded already */
} batch;

/* group_scale() of ordinary numbers. */
ALWAYS_INLINE void
make_scales(const spw__packed *p, batch *b)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
    const __m512 up = _mm512_mask_mov_ps(_mm512_set1_ps(SPW__SIGNED_UP), 0xff00, _mm512_set1_ps(SPW__UNSIGNED_UP));
    __m512i counter =
        _mm512_mullo_epi32(_mm512_add_epi32(_mm512_set1_epi32((int)(uint32_t)(p->first / GROUP + b->group)), lane),
                           _mm512_set1_epi32((int)SPW__HASH_STEP));
    __m512i hash = rounding_hash(_mm512_add_epi32(counter, _mm512_set1_epi32((int)p->coef->key)));
    __m512i random = _mm512_and_si512(_mm512_srlv_epi32(hash, shift), _mm512_set1_epi32(0xffff));
    const __m512i of_each = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 2, 6, 10, 14, 18, 22, 26, 30);
    __m512i tops = _mm512_permutex2var_epi32(_mm512_load_si512(b->tops[0]), of_each, _mm512_load_si512(b->tops[4]));
    __mmask16 some = _mm512_cmpge_epu32_mask(tops, _mm512_set1_epi32((int)SPW__SCALE_LEAST));
    __m512i sum = _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(tops), up)), random);
    __m512i scales = _mm512_maskz_srli_epi32(some, sum, 16);
    __m256i halves = _mm512_cvtepi32_epi16(scales);
    __mmask8 mine = (__mmask8)(((1u << b->count) - 1) & ~b->done);
    if (mine == 0)
        return;
    _mm_mask_storeu_epi16(p->m_scale + b->group, mine, _mm256_castsi256_si128(halves));
    _mm_mask_storeu_epi16(p->v_scale + b->group, mine, _mm256_extracti128_si256(halves, 1));
    _mm256_store_si256((__m256i *)b->v_some, _mm256_maskz_set1_epi32((__mmask8)(some >> BATCH), -1));
    _mm512_store_ps(b->factors, _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f),
                                                    _mm512_castsi512_ps(_mm512_slli_epi32(scales, 16))));
}

ALWAYS_INLINE void
load_scales(const spw__packed *p, batch *b, uint64_t group, uint64_t count)
{
    __mmask8 mine = (__mmask8)((1u << (count < BATCH ? count : BATCH)) - 1);
    __m128i m = _mm_maskz_loadu_epi16(mine, p->m_scale + group), v = _mm_maskz_loadu_epi16(mine, p->v_scale + group);
    __m512i both = _mm512_cvtepu16_epi32(_mm256_set_m128i(v, m));
    _mm512_store_si512(b->scales, _mm512_slli_epi32(both, 16));
}

ALWAYS_INLINE void
encode(const constants *k, const spw__packed *p, const batch *b, uint32_t j)
{
    const uint64_t at = (b->group + j) * GROUP;
    __m512 m_factor = _mm512_set1_ps(b->factors[j]), v_factor = _mm512_set1_ps(b->factors[BATCH + j]), m[2], v[2];
    __m512i m_high, v_high, both;
    if (j >= b->count || (b->done >> j & 1) != 0)
        return;
    for (int i = 0; i < 2; i++) {
        __m512 x = _mm512_load_ps(b->m[j] + i * LANES);
        /* one with the sign of x: one | (x & sign) */
        __m512i one = _mm512_ternarylogic_epi32(lanes_32(k->f_one), _mm512_castps_si512(x), lanes_32(k->f_sign), 0xf8);
        m[i] = _mm512_fmadd_ps(x, m_factor, _mm512_castsi512_ps(one));
        v[i] = _mm512_fmadd_ps(_mm512_load_ps(b->v[j] + i * LANES), v_factor, _mm512_castsi512_ps(lanes_32(k->f_one)));
    }
    m_high = both_high(k, m[0], m[1]);
    v_high = both_high(k, v[0], v[1]);
    /* The code and, from bit 15, its sign; no scale is so small that a code needs clipping. */
    both = _mm512_sub_epi16(_mm512_and_si512(m_high, lanes(k->magnitude)), lanes(k->minus_zero));
    both = _mm512_srli_epi16(both, SPW__CODE_SHIFT - 16);
    m_high = _mm512_ternarylogic_epi32(both, _mm512_srli_epi16(m_high, 8), lanes(k->code_sign), 0xf8);
    v_high = _mm512_srli_epi16(_mm512_sub_epi16(v_high, lanes(k->minus_zero)), SPW__CODE_SHIFT - 16);
    v_high = _mm512_maskz_max_epi16(b->v_some[j], v_high, lanes(k->one));
    both = _mm512_permutexvar_epi64(_mm512_load_si512(k->codes), _mm512_packus_epi16(m_high, v_high));
    _mm256_storeu_si256((__m256i *)((int8_t *)p->m + at), _mm512_castsi512_si256(both));
    _mm256_storeu_si256((__m256i *)((uint8_t *)p->v + at), _mm512_extracti64x4_epi64(both, 1));
}

/* ---------------------------------------------------------------- a step */

/* Which numbers are not below 2^127 in magnitude, or NaN; the halves are the upper ones. */
ALWAYS_INLINE __mmask32
unusual(const constants *k, __m512i halves)
{
    return _mm512_cmpge_epu16_mask(_mm512_and_si512(halves, lanes(k->magnitude)), lanes(k->too_large));
}

/* One group's coefficients in every lane; in memory for the same reason. */
typedef struct coefs {
    __m512 grad_scale, one_minus_beta1, beta2, one_minus_beta2, eps, l2, decay, minus_step, inv_bc2_sqrt;
} coefs;

/* A group between its two halves of a step. */
typedef struct half_done {
    __m512 w[2], m[2], v[2], d[2]; /* d: what m is divided by */
    __m128i tops;
    uint64_t at;
} half_done;

/* New moments. */
ALWAYS_INLINE half_done
first_half(const constants *k, const coefs *c, const spw__packed *p, const batch *b, uint32_t in_batch, uint64_t at,
           bool is_bf16, uint32_t low_bytes, spw_dtype grad_dtype, bool has_l2)
{
    const uint64_t grad_bytes = grad_dtype == SPW_F32 ? 4 : 2;
    half_done h = {.at = at};
    for (uint64_t byte = 0; byte < GROUP * grad_bytes; byte += 64)
        prefetch((const char *)p->grad + at * grad_bytes + byte);
    prefetch(p->hi + at);
    prefetch((const char *)p->lo + at * low_bytes);
    if (is_bf16 || at % (2 * GROUP) == 0) {
        prefetch((const char *)p->m + at * (is_bf16 ? 2 : 1));
        prefetch((const char *)p->v + at * (is_bf16 ? 2 : 1));
    }
    if (is_bf16) {
        load_bf16(k, (const uint16_t *)p->m + at, h.m);
        load_bf16(k, (const uint16_t *)p->v + at, h.v);
    } else {
        load_signed(k, (const int8_t *)p->m + at, b->scales[in_batch], h.m);
        load_unsigned(k, (const uint8_t *)p->v + at, b->scales[BATCH + in_batch], h.v);
    }
    load_master(k, p, low_bytes, at, h.w);
    for (int j = 0; j < 2; j++) {
        __m512 g = load_grad(p->grad, grad_dtype, at + (uint64_t)j * LANES);
        g = _mm512_mul_ps(g, c->grad_scale);
        if (has_l2)
            g = _mm512_fmadd_ps(c->l2, h.w[j], g);
        h.m[j] = _mm512_fmadd_ps(c->one_minus_beta1, _mm512_sub_ps(g, h.m[j]), h.m[j]);
        h.v[j] = _mm512_fmadd_ps(c->beta2, h.v[j], _mm512_mul_ps(_mm512_mul_ps(c->one_minus_beta2, g), g));
        h.d[j] = _mm512_fmadd_ps(_mm512_sqrt_ps(h.v[j]), c->inv_bc2_sqrt, c->eps);
    }
    if (!is_bf16)
        h.tops = tops_of(h.m, h.v);
    return h;
}

/* New weights, and moments of 16 bits. False: nothing is stored, the group is for opt_block.h. */
ALWAYS_INLINE bool
second_half(const constants *k, const coefs *c, const spw__packed *p, const half_done *h, bool is_bf16,
            uint32_t low_bytes)
{
    __m512 w[2], rounded[2];
    __m512i hi, m_high, v_high;
    __mmask32 bad;
    for (int j = 0; j < 2; j++) {
        w[j] = _mm512_fmadd_ps(c->minus_step, _mm512_div_ps(h->m[j], h->d[j]), _mm512_mul_ps(h->w[j], c->decay));
        rounded[j] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(w[j]), lanes_32(k->lo_sign_32)));
    }
    hi = both_high(k, rounded[0], rounded[1]);
    /* A bad gradient makes a bad m, a bad m or NaN in v a bad w. */
    bad = unusual(k, hi);
    if (is_bf16) {
        m_high = both_high(k, h->m[0], h->m[1]);
        v_high = both_high(k, h->v[0], h->v[1]);
        bad |= unusual(k, m_high) | unusual(k, v_high);
    } else {
        bad |= _mm_cmpge_epu32_mask(h->tops, _mm_set1_epi32(0x7f000000));
    }
    if (__builtin_expect(bad != 0, 0))
        return false;
    store_master(p, low_bytes, h->at, hi, both_low(k, w[0], w[1]));
    if (is_bf16) {
        const __m512i pairs = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i pair_steps = _mm512_mullo_epi32(pairs, _mm512_set1_epi32((int)SPW__HASH_STEP));
        uint32_t counter = (uint32_t)(p->first + h->at) * SPW__HASH_STEP + p->coef->key;
        __m512i counters = _mm512_add_epi32(_mm512_set1_epi32((int)counter), pair_steps);
        store_bf16(k, (uint16_t *)p->m + h->at, m_high, both_low(k, h->m[0], h->m[1]), rounding_hash(counters));
        counters = _mm512_add_epi32(counters, _mm512_set1_epi32((int)SPW__HASH_STEP));
        store_bf16(k, (uint16_t *)p->v + h->at, v_high, both_low(k, h->v[0], h->v[1]), rounding_hash(counters));
    }
    return true;
}

/*
 * Each iteration does the first half of one group, the second half of the group before and encodes the group eight
 * before. Divisions and square roots take long, and the processor's window holds about two groups: so each waits only for
 * what is done.
 */
ALWAYS_INLINE uint64_t
step_body(const spw__packed *packed, uint64_t first, uint64_t end, bool is_bf16, uint32_t low_bytes,
          spw_dtype grad_dtype, bool has_l2)
{
    const spw_opt_coef coef = *packed->coef; /* copies: stores of bytes may alias the originals */
    coefs in_lanes = {.grad_scale = _mm512_set1_ps(coef.grad_scale),
                      .one_minus_beta1 = _mm512_set1_ps(coef.c[0]),
                      .beta2 = _mm512_set1_ps(coef.c[1]),
                      .one_minus_beta2 = _mm512_set1_ps(coef.c[2]),
                      .eps = _mm512_set1_ps(coef.c[3]),
                      .l2 = _mm512_set1_ps(coef.c[4]),
                      .decay = _mm512_set1_ps(coef.c[5]),
                      .minus_step = _mm512_set1_ps(-coef.c[6]),
                      .inv_bc2_sqrt = _mm512_set1_ps(coef.c[7])};
    const coefs *c = &in_lanes;
    constants copy = in_memory;
    spw__packed local = *packed;
    const spw__packed *p = &local;
    const constants *k = &copy;
    batch batches[2], *b = &batches[0], *before = &batches[1];
    half_done open = {.at = UINT64_MAX};
    uint64_t nonfinite_count = 0, groups = (end - first) / GROUP;
    local.coef = &coef;
    for (int j = 0; j < 2; j++) { /* lanes of an unfinished batch are computed with and not used */
        memset(batches[j].tops, 0, sizeof batches[j].tops);
        batches[j].group = batches[j].count = batches[j].done = 0;
    }
    __asm__("" : "+m"(copy)); /* loads, not values: see constants */
    for (uint64_t n = 0; n <= groups; n++) {
        uint32_t in_batch = (uint32_t)(n % BATCH);
        uint64_t at = first + n * GROUP;
        half_done next = {.at = UINT64_MAX};
        if (n < groups) {
            if (!is_bf16 && in_batch == 0)
                load_scales(p, b, at / GROUP, groups - n);
            next = first_half(k, c, p, b, in_batch, at, is_bf16, low_bytes, grad_dtype, has_l2);
        }
        if (n > 0 && !second_half(k, c, p, &open, is_bf16, low_bytes)) {
            nonfinite_count += p->general(p->ctx, open.at);
            if (in_batch > 0)
                b->done |= 1u << (in_batch - 1);
            else
                before->done |= 1u << (BATCH - 1);
        }
        open = next;
        if (is_bf16 || n == groups)
            continue;
        for (int j = 0; j < 2; j++) {
            _mm512_store_ps(b->m[in_batch] + j * LANES, next.m[j]);
            _mm512_store_ps(b->v[in_batch] + j * LANES, next.v[j]);
        }
        _mm_store_si128((__m128i *)b->tops[in_batch], next.tops);
        b->count = in_batch + 1;
        if (in_batch == 0) { /* a group late: what was just stored cannot be loaded wider yet */
            b->group = at / GROUP;
            make_scales(p, before);
        }
        encode(k, p, before, in_batch);
        if (in_batch + 1 == BATCH) {
            batch *full = b;
            b = before;
            before = full;
            b->done = b->count = 0;
        }
    }
    if (!is_bf16) {
        if (b->count == 0)
            make_scales(p, before);
        for (uint32_t j = b->count; j < before->count; j++)
            encode(k, p, before, j);
        make_scales(p, b);
        for (uint32_t j = 0; j < b->count; j++)
            encode(k, p, b, j);
    }
    return nonfinite_count;
}

static uint64_t
step_avx512(const spw__packed *p, uint64_t first, uint64_t end)
{
#define CASE(format, dtype, bf16, low)                                                                                 \
    case SPW_DTYPE_COUNT *(int)(format) + (int)(dtype):                                                                \
        return p->coef->c[4] != 0.0f ? step_body(p, first, end, bf16, low, dtype, true)                                \
                                     : step_body(p, first, end, bf16, low, dtype, false)
#define CASES(format, bf16, low)                                                                                       \
    CASE(format, SPW_F32, bf16, low);                                                                                  \
    CASE(format, SPW_BF16, bf16, low);                                                                                 \
    CASE(format, SPW_F16, bf16, low)
    switch (SPW_DTYPE_COUNT * (int)p->format + (int)p->grad_dtype) {
        CASES(SPW_STATE_SPLIT_BF16, true, 2);
        CASES(SPW_STATE_SPLIT_INT8, false, 2);
        CASES(SPW_STATE_SPLIT24_INT8, false, 1);
    default: SPW_ASSERT(false); return 0;
    }
#undef CASES
#undef CASE
}

const spw__packed_fn spw__packed_avx512 = step_avx512;
#else
const spw__packed_fn spw__packed_avx512 = NULL;
#endif
