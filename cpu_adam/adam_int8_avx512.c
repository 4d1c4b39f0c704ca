/*
 * Adam on split-int8 and split24-int8 with AVX-512: packed_avx512.h's masters, moments of 8 bits in groups of 64 that share
 * a scale. The scale needs the whole group, and its division is the slower the fewer are done at once, so eight groups go
 * through two passes with their new moments in L1 between them:
 *   first   decodes the moments, makes the new ones and the new weights, finds the largest magnitudes
 *   scales  the sixteen new scales of the eight groups, sixteen lanes at a time
 *   second  encodes the moments
 * The first pass of a batch runs before the second of the batch before, so nothing waits for the scales. The number of vector
 * instructions is what binds: with groups of 32 it was 10 % slower, for twice as many scales and largest magnitudes.
 */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "packed_avx512.h"

enum { VECTORS = GROUP / LANES, SCALES_AHEAD = 128 /* groups */ };
enum { BATCH = 8 };
typedef struct batch {
    _Alignas(64) float m[BATCH][GROUP], v[BATCH][GROUP]; /* the new ones */
    _Alignas(64) uint32_t tops[BATCH][16];               /* largest magnitudes as bits: eight lanes of m, eight of v */
    _Alignas(64) float factors[2 * BATCH];     /* one over the new scale, of m and of v; 0 where all codes are */
    _Alignas(64) float scales[2 * BATCH];      /* the old ones */
    _Alignas(64) float half_scales[2 * BATCH]; /* half of them */
    /* The sign bit of m's codes, the least code of v, in two words; 0 where all codes are. */
    _Alignas(64) uint32_t bits[2 * BATCH];
    uint64_t from;  /* the first element */
    uint32_t count; /* groups */
    uint32_t odd;   /* bits of groups that the kernel cannot do */
} batch;

/* ---------------------------------------------------------------- the first pass */

/* The largest magnitudes of eighths of both moments, as bits. v is not negative; a NaN of m shows in the new weight. */
ALWAYS_INLINE __m512i
tops_of(const __m512 m[VECTORS], const __m512 v[VECTORS])
{
    __m512 a = m[0];
    __m512i b = _mm512_castps_si512(v[0]), top_m;
    for (int j = 1; j < VECTORS; j++) {
        a = _mm512_range_ps(a, m[j], 0xb); /* the larger magnitude */
        b = _mm512_max_epu32(b, _mm512_castps_si512(v[j]));
    }
    top_m = _mm512_castps_si512(a);
    return _mm512_max_epu32(_mm512_shuffle_i64x2(top_m, b, 0x44), _mm512_shuffle_i64x2(top_m, b, 0xee));
}

ALWAYS_INLINE void
load_scales(const spw__packed *p, batch *b)
{
    const uint64_t group = b->from / GROUP, ahead = group + SCALES_AHEAD;
    __mmask8 mine = (__mmask8)((1u << b->count) - 1);
    __m128i m = _mm_maskz_loadu_epi16(mine, p->m_scale + group), v = _mm_maskz_loadu_epi16(mine, p->v_scale + group);
    __m512 both = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_set_m128i(v, m)), 16));
    prefetch_at(p->m_scale, ahead * sizeof *p->m_scale);
    prefetch_at(p->v_scale, ahead * sizeof *p->v_scale);
    _mm512_store_ps(b->scales, both);
    _mm512_store_ps(b->half_scales, _mm512_mul_ps(both, _mm512_set1_ps(0.5f)));
}

/* A group between the two halves of the first pass: square roots take long. */
typedef struct half_done {
    __m512 m[VECTORS], root[VECTORS];
    __mmask16 large; /* among the largest magnitudes: 2^127 and above */
} half_done;

/* New moments. */
ALWAYS_INLINE half_done
first_half(const constants *k, const coefs *c, const spw__packed *p, batch *b, uint32_t n, uint32_t low_bytes,
           spw_dtype grad_dtype, bool has_l2)
{
    const uint64_t begin = b->from + n * GROUP;
    half_done h;
    __m512 v[VECTORS];
    __m512i tops;
    prefetch(p->m, 1, begin);
    prefetch(p->v, 1, begin);
    for (int j = 0; j < VECTORS; j += 2) {
        const uint64_t at = begin + (uint64_t)j * LANES;
        __m512 w[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        prefetch_grad(p, grad_dtype, at);
        load_signed(k, (const int8_t *)p->m + at, b->scales[n], b->half_scales[n], h.m + j);
        load_unsigned(k, (const uint8_t *)p->v + at, b->scales[BATCH + n], v + j);
        if (has_l2)
            load_master(k, p, low_bytes, at, w);
        for (int i = 0; i < 2; i++) {
            __m512 g = scaled_grad(c, p, grad_dtype, at + (uint64_t)i * LANES, w[i], has_l2);
            h.root[j + i] = new_moments(c, g, &h.m[j + i], &v[j + i]);
            _mm512_store_ps(b->m[n] + (j + i) * LANES, h.m[j + i]);
            _mm512_store_ps(b->v[n] + (j + i) * LANES, v[j + i]);
        }
    }
    tops = tops_of(h.m, v);
    _mm512_store_si512(b->tops[n], tops);
    h.large = _mm512_cmpge_epu32_mask(tops, k->f_large);
    return h;
}

/* New weights. */
ALWAYS_INLINE void
second_half(const constants *k, const coefs *c, const spw__packed *p, batch *b, uint32_t n, uint32_t low_bytes,
            const half_done *h)
{
    const uint64_t begin = b->from + n * GROUP;
    __m512i hi[LINES], lo[LINES];
    bool odd = h->large != 0; /* a bad gradient makes a bad m, a bad m or NaN in v a bad w */
    for (int line = 0; line < LINES; line++) {
        const uint64_t at = begin + (uint64_t)line * LINE;
        __m512 w[2];
        prefetch_master(p, low_bytes, at);
        load_master(k, p, low_bytes, at, w);
        for (int i = 0; i < 2; i++)
            w[i] = new_master(c, w[i], h->m[2 * line + i], h->root[2 * line + i]);
        split_masters(k, w, &hi[line], &lo[line]);
        odd |= unusual(k, hi[line]) != 0;
    }
    if (__builtin_expect(odd, false)) {
        b->odd |= 1u << n;
        return;
    }
    for (int line = 0; line < LINES; line++)
        store_master(p, low_bytes, begin + (uint64_t)line * LINE, hi[line], lo[line]);
}

ALWAYS_INLINE void
first_pass(const constants *k, const coefs *c, const spw__packed *p, batch *b, uint32_t low_bytes, spw_dtype grad_dtype,
           bool has_l2)
{
    const spw__packed local = *p; /* stores may alias the original */
    const uint32_t last = b->count - 1;
    half_done h;
    load_scales(p, b);
    b->odd = 0;
    h = first_half(k, c, &local, b, 0, low_bytes, grad_dtype, has_l2);
    for (uint32_t n = 0; n < last; n++) {
        half_done next = first_half(k, c, &local, b, n + 1, low_bytes, grad_dtype, has_l2);
        second_half(k, c, &local, b, n, low_bytes, &h);
        h = next;
    }
    second_half(k, c, &local, b, last, low_bytes, &h);
}

/* ---------------------------------------------------------------- scales */

#define MERGE(type, a, b) _mm512_max_epu32(_mm512_unpacklo_##type(a, b), _mm512_unpackhi_##type(a, b))

/* Four groups' tops as lanes of quarters: four of m, the same four, four of v, the same. */
ALWAYS_INLINE __m512i
four_tops(const uint32_t tops[4][16])
{
    __m512i a = _mm512_load_si512(tops[0]), b = _mm512_load_si512(tops[1]);
    __m512i c = _mm512_load_si512(tops[2]), d = _mm512_load_si512(tops[3]);
    return MERGE(epi64, MERGE(epi32, a, b), MERGE(epi32, c, d));
}

#define STEPS(n) (int)((n)*SPW__HASH_STEP)

/* group_scale() of ordinary numbers; the second pass puts the old scales of other groups back. */
ALWAYS_INLINE void
make_scales(const spw__packed *p, batch *b)
{
    const __m512i steps =
        _mm512_setr_epi32(STEPS(0), STEPS(1), STEPS(2), STEPS(3), STEPS(4), STEPS(5), STEPS(6), STEPS(7), STEPS(0),
                          STEPS(1), STEPS(2), STEPS(3), STEPS(4), STEPS(5), STEPS(6), STEPS(7));
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
    const __m512i bits = _mm512_setr_epi32(SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS,
                                           SIGNED_BITS, SIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS,
                                           UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS);
    const __m512 up = _mm512_mask_mov_ps(_mm512_set1_ps(SPW__SIGNED_UP), 0xff00, _mm512_set1_ps(SPW__UNSIGNED_UP));
    const uint64_t group = b->from / GROUP;
    const uint32_t counter = (uint32_t)(p->first / GROUP + group) * SPW__HASH_STEP + p->coef->key;
    const __mmask8 mine = (__mmask8)((1u << b->count) - 1);
    __m512i random = _mm512_srlv_epi32(rounding_hash(_mm512_add_epi32(_mm512_set1_epi32((int)counter), steps)), shift);
    __m512i low = four_tops(b->tops), high = four_tops(b->tops + 4), tops, sum, scales;
    __m256i halves;
    __mmask16 some;
    tops = _mm512_max_epu32(_mm512_shuffle_i64x2(low, high, 0x88), _mm512_shuffle_i64x2(low, high, 0xdd));
    tops = _mm512_shuffle_i64x2(tops, tops, 0xd8); /* from m v m v to m m v v */
    some = _mm512_cmpge_epu32_mask(tops, _mm512_set1_epi32((int)SPW__SCALE_LEAST));
    sum = _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(tops), up)),
                           _mm512_and_si512(random, _mm512_set1_epi32(0xffff)));
    scales = _mm512_maskz_srli_epi32(some, sum, 16);
    halves = _mm512_cvtepi32_epi16(scales);
    _mm_mask_storeu_epi16(p->m_scale + group, mine, _mm256_castsi256_si128(halves));
    _mm_mask_storeu_epi16(p->v_scale + group, mine, _mm256_extracti128_si256(halves, 1));
    _mm512_store_si512(b->bits, _mm512_maskz_mov_epi32(some, bits));
    _mm512_store_ps(b->factors, _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f),
                                                    _mm512_castsi512_ps(_mm512_slli_epi32(scales, 16))));
}

/* ---------------------------------------------------------------- the second pass */

ALWAYS_INLINE void
encode(const constants *k, const spw__packed *p, const batch *b, uint32_t n)
{
    const __m512 m_factor = _mm512_set1_ps(b->factors[n]), v_factor = _mm512_set1_ps(b->factors[BATCH + n]);
    const __m512i m_bits = _mm512_set1_epi32((int)b->bits[n]), v_bits = _mm512_set1_epi32((int)b->bits[BATCH + n]);
    for (uint64_t line = 0; line < LINES; line++) {
        const float *new_m = b->m[n] + line * LINE, *new_v = b->v[n] + line * LINE;
        const uint64_t at = b->from + n * GROUP + line * LINE;
        const __m512 m[2] = {_mm512_load_ps(new_m), _mm512_load_ps(new_m + LANES)};
        const __m512 v[2] = {_mm512_load_ps(new_v), _mm512_load_ps(new_v + LANES)};
        store_signed(k, (int8_t *)p->m + at, m, m_factor, m_bits);
        store_unsigned(k, (uint8_t *)p->v + at, v, v_factor, v_bits);
    }
}

/* The group that the kernel cannot do, with the scales that it had. */
static __attribute__((noinline)) uint64_t
do_general(const spw__packed *p, const batch *b, uint32_t n)
{
    const uint64_t at = b->from + n * GROUP;
    p->m_scale[at / GROUP] = (uint16_t)(spw_f32_bits(b->scales[n]) >> 16);
    p->v_scale[at / GROUP] = (uint16_t)(spw_f32_bits(b->scales[BATCH + n]) >> 16);
    return p->general(p->ctx, at, at + GROUP);
}

ALWAYS_INLINE uint64_t
second_pass(const constants *k, const spw__packed *p, const batch *b)
{
    const spw__packed local = *p; /* stores may alias the original */
    uint64_t nonfinite_count = 0;
    for (uint32_t n = 0, count = b->count; n < count; n++)
        if (__builtin_expect((b->odd >> n & 1) != 0, 0))
            nonfinite_count += do_general(p, b, n);
        else
            encode(k, &local, b, n);
    return nonfinite_count;
}

/* ---------------------------------------------------------------- a step */

ALWAYS_INLINE uint64_t
step_body(const spw__packed *p, uint64_t first, uint64_t end, uint32_t low_bytes, spw_dtype grad_dtype, bool has_l2)
{
    const coefs c = load_coefs(p->coef);
    const constants k = load_constants();
    batch batches[2], *b = &batches[0], *before = &batches[1];
    uint64_t nonfinite_count = 0;
    for (int j = 0; j < 2; j++) { /* lanes of groups that a batch lacks are computed with and not used */
        memset(batches[j].tops, 0, sizeof batches[j].tops);
        batches[j].count = 0;
    }
    for (uint64_t at = first; at < end; at += BATCH * GROUP) {
        batch *done = before;
        b->from = at;
        b->count = end - at < BATCH * GROUP ? (uint32_t)((end - at) / GROUP) : BATCH;
        first_pass(&k, &c, p, b, low_bytes, grad_dtype, has_l2);
        nonfinite_count += second_pass(&k, p, before);
        make_scales(p, b);
        before = b;
        b = done;
    }
    nonfinite_count += second_pass(&k, p, before);
    return nonfinite_count;
}

ALWAYS_INLINE uint64_t
step_typed(const spw__packed *p, uint64_t first, uint64_t end, uint32_t low_bytes, spw_dtype grad_dtype)
{
    return p->coef->c[4] != 0.0f ? step_body(p, first, end, low_bytes, grad_dtype, true)
                                 : step_body(p, first, end, low_bytes, grad_dtype, false);
}

static uint64_t
step_avx512(const spw__packed *p, uint64_t first, uint64_t end)
{
#define CASE(format, low_bytes, dtype)                                                                                 \
    case SPW_DTYPE_COUNT *(int)(format) + (int)(dtype):                                                                \
        return step_typed(p, first, end, low_bytes, dtype)
#define CASES(format, low_bytes)                                                                                       \
    CASE(format, low_bytes, SPW_F32);                                                                                  \
    CASE(format, low_bytes, SPW_BF16);                                                                                 \
    CASE(format, low_bytes, SPW_F16)
    switch (SPW_DTYPE_COUNT * (int)p->format + (int)p->grad_dtype) {
        CASES(SPW_STATE_SPLIT_INT8, 2);
        CASES(SPW_STATE_SPLIT24_INT8, 1);
    default: SPW_ASSERT(false); return 0;
    }
#undef CASE
#undef CASES
}

const spw__packed_fn spw__packed_int8_avx512 = step_avx512;
#else
const spw__packed_fn spw__packed_int8_avx512 = NULL;
#endif
