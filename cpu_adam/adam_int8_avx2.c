/* Adam on split-int8 and split24-int8 with AVX2; see adam_int8_body.h. */
#include "cpu_adam_internal.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "packed_avx2.h"

ALWAYS_INLINE void
load_scales(const spw__packed *p, uint64_t group, uint32_t count, float *scales, float *half_scales)
{
    const uint16_t *from[2] = {p->m_scale + group, p->v_scale + group};
    for (int j = 0; j < 2; j++) {
        uint16_t own[BATCH] = {0};
        vec s;
        memcpy(own, from[j], count * sizeof *own);
        spw__prefetch(from[j], SCALES_AHEAD * sizeof *own, 1);
        s = _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)own)), 16));
        store(scales + j * BATCH, s);
        store(half_scales + j * BATCH, s * all_of(0.5f));
    }
}

/* Of all groups: m's first, then v's. v is not negative; a NaN of m shows in the new weight. */
ALWAYS_INLINE bool
put_tops(const constants *k, uint32_t (*tops)[16], uint32_t n, const vec m[GROUP / LANES], const vec v[GROUP / LANES])
{
    bits a = _mm256_setzero_si256(), b = _mm256_castps_si256(v[0]), both;
    uint32_t top_m, top_v;
    for (int j = 0; j < GROUP / LANES; j++)
        a = larger_of(k, a, m[j]);
    for (int j = 1; j < GROUP / LANES; j++)
        b = _mm256_max_epu32(b, _mm256_castps_si256(v[j]));
    both = _mm256_max_epu32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
    both = _mm256_max_epu32(both, _mm256_shuffle_epi32(both, 0x4e));
    both = _mm256_max_epu32(both, _mm256_shuffle_epi32(both, 0xb1));
    top_m = (uint32_t)_mm256_extract_epi32(both, 0);
    top_v = (uint32_t)_mm256_extract_epi32(both, 4);
    tops[0][n] = top_m;
    tops[0][BATCH + n] = top_v;
    return (top_m > top_v ? top_m : top_v) >= 0x7f000000u;
}

ALWAYS_INLINE void
make_scales(const spw__packed *p, uint64_t group, uint32_t count, const uint32_t (*tops)[16], float *factors,
            uint32_t *code_bits)
{
    const uint32_t counter = (uint32_t)(p->first / GROUP + group) * SPW__HASH_STEP + p->coef->key;
    uint16_t *const to[2] = {p->m_scale + group, p->v_scale + group};
    bits random = rounding_hashes(counter, SPW__HASH_STEP);
    for (int j = 0; j < 2; j++) {
        const vec up = all_of(j == 0 ? SPW__SIGNED_UP : SPW__UNSIGNED_UP);
        const uint32_t *from = tops[0] + j * BATCH;
        bits top = _mm256_loadu_si256((const bits *)(const void *)from);
        bits some = _mm256_cmpgt_epi32(top, all_words(SPW__SCALE_LEAST - 1));
        bits sum = _mm256_add_epi32(_mm256_castps_si256(_mm256_castsi256_ps(top) * up),
                                    _mm256_and_si256(random, all_words(0xffff)));
        bits scale = _mm256_and_si256(some, _mm256_srli_epi32(sum, 16));
        vec factor = all_of(1.0f) / _mm256_castsi256_ps(_mm256_slli_epi32(scale, 16));
        uint16_t own[BATCH];
        _mm_storeu_si128((__m128i *)(void *)own,
                         _mm_packus_epi32(_mm256_castsi256_si128(scale), _mm256_extracti128_si256(scale, 1)));
        memcpy(to[j], own, count * sizeof *own);
        store(factors + j * BATCH, _mm256_and_ps(factor, _mm256_castsi256_ps(some)));
        _mm256_storeu_si256((bits *)(void *)(code_bits + j * BATCH),
                            _mm256_and_si256(some, all_words(j == 0 ? SIGNED_BITS : UNSIGNED_BITS)));
        random = _mm256_srli_epi32(random, 16);
    }
}

#include "adam_int8_body.h"
const spw__packed_fn spw__packed_int8_avx2 = step;
#else
const spw__packed_fn spw__packed_int8_avx2 = NULL;
#endif
