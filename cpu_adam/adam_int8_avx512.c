/* Adam on split-int8 and split24-int8 with AVX-512; see adam_int8_body.h. */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "packed_avx512.h"

/* The largest magnitudes of eighths of both moments, as bits. v is not negative; a NaN of m shows in the new weight. */
ALWAYS_INLINE __m512i
tops_of(const __m512 m[GROUP / LANES], const __m512 v[GROUP / LANES])
{
    __m512 a = m[0];
    __m512i b = _mm512_castps_si512(v[0]), top_m;
    for (int j = 1; j < GROUP / LANES; j++) {
        a = _mm512_range_ps(a, m[j], 0xb); /* the larger magnitude */
        b = _mm512_max_epu32(b, _mm512_castps_si512(v[j]));
    }
    top_m = _mm512_castps_si512(a);
    return _mm512_max_epu32(_mm512_shuffle_i64x2(top_m, b, 0x44), _mm512_shuffle_i64x2(top_m, b, 0xee));
}

/* Eight lanes of m, eight of v. */
ALWAYS_INLINE bool
put_tops(const constants *k, uint32_t (*tops)[16], uint32_t n, const vec m[GROUP / LANES], const vec v[GROUP / LANES])
{
    const __m512i both = tops_of(m, v);
    _mm512_store_si512(tops[n], both);
    return _mm512_cmpge_epu32_mask(both, k->f_large) != 0;
}

ALWAYS_INLINE void
load_scales(const spw__packed *p, uint64_t group, uint32_t count, float *scales, float *half_scales)
{
    const uint64_t ahead = group + SCALES_AHEAD;
    __mmask8 mine = (__mmask8)((1u << count) - 1);
    __m128i m = _mm_maskz_loadu_epi16(mine, p->m_scale + group), v = _mm_maskz_loadu_epi16(mine, p->v_scale + group);
    __m512 both = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_set_m128i(v, m)), 16));
    spw__prefetch(p->m_scale, ahead * sizeof *p->m_scale, 1);
    spw__prefetch(p->v_scale, ahead * sizeof *p->v_scale, 1);
    _mm512_store_ps(scales, both);
    _mm512_store_ps(half_scales, _mm512_mul_ps(both, _mm512_set1_ps(0.5f)));
}

#define MERGE(type, a, b) _mm512_max_epu32(_mm512_unpacklo_##type(a, b), _mm512_unpackhi_##type(a, b))

/* Four groups' tops as lanes of quarters: four of m, the same four, four of v, the same. */
ALWAYS_INLINE __m512i
four_tops(const uint32_t (*tops)[16])
{
    __m512i a = _mm512_load_si512(tops[0]), b = _mm512_load_si512(tops[1]);
    __m512i c = _mm512_load_si512(tops[2]), d = _mm512_load_si512(tops[3]);
    return MERGE(epi64, MERGE(epi32, a, b), MERGE(epi32, c, d));
}

#define STEPS(n) (int)((n)*SPW__HASH_STEP)

ALWAYS_INLINE void
make_scales(const spw__packed *p, uint64_t group, uint32_t count, const uint32_t (*of_groups)[16], float *factors,
            uint32_t *code_bits)
{
    const __m512i steps =
        _mm512_setr_epi32(STEPS(0), STEPS(1), STEPS(2), STEPS(3), STEPS(4), STEPS(5), STEPS(6), STEPS(7), STEPS(0),
                          STEPS(1), STEPS(2), STEPS(3), STEPS(4), STEPS(5), STEPS(6), STEPS(7));
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
    const __m512i some_bits =
        _mm512_setr_epi32(SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS, SIGNED_BITS,
                          SIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS,
                          UNSIGNED_BITS, UNSIGNED_BITS, UNSIGNED_BITS);
    const __m512 up = _mm512_mask_mov_ps(_mm512_set1_ps(SPW__SIGNED_UP), 0xff00, _mm512_set1_ps(SPW__UNSIGNED_UP));
    const uint32_t counter = (uint32_t)(p->first / GROUP + group) * SPW__HASH_STEP + p->coef->key;
    const __mmask8 mine = (__mmask8)((1u << count) - 1);
    __m512i random = _mm512_srlv_epi32(rounding_hash(_mm512_add_epi32(_mm512_set1_epi32((int)counter), steps)), shift);
    __m512i low = four_tops(of_groups), high = four_tops(of_groups + 4), tops, sum, scales;
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
    _mm512_store_si512(code_bits, _mm512_maskz_mov_epi32(some, some_bits));
    _mm512_store_ps(
        factors, _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0f), _mm512_castsi512_ps(_mm512_slli_epi32(scales, 16))));
}

#include "adam_int8_body.h"
const spw__packed_fn spw__packed_int8_avx512 = step;
#else
const spw__packed_fn spw__packed_int8_avx512 = NULL;
#endif
