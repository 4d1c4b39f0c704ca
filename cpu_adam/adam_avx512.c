/* Adam with AVX-512, sixteen elements at a time; see adam_body.h. Compiled with its own flags; elsewhere the pointers are NULL. */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vec_avx512.h"

enum { LANES = 16, BLOCK = 32 };
typedef __m512i bits;

ALWAYS_INLINE bits
off_by(vec x, vec back, int bias)
{
    bits difference = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_castps_si512(back));
    return _mm512_add_epi32(difference, _mm512_set1_epi32(bias));
}

ALWAYS_INLINE __m256i
load_16x16(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

ALWAYS_INLINE void
store_16x16(void *p, __m256i x)
{
    _mm256_storeu_si256((__m256i *)p, x);
}

ALWAYS_INLINE vec
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    if (dtype == SPW_F32)
        return _mm512_loadu_ps((const float *)grad + i);
    if (dtype == SPW_F16)
        return _mm512_cvtph_ps(load_16x16((const uint16_t *)grad + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16x16((const uint16_t *)grad + i)), 16));
}

/* spw__weight_bf16 */
ALWAYS_INLINE __m256i
to_bf16(vec w)
{
    bits u = _mm512_castps_si512(w), high = _mm512_srli_epi32(u, 16);
    bits rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
}

/* spw__split_bits */
ALWAYS_INLINE bits
split_bits(vec w)
{
    bits u = _mm512_castps_si512(w), max = _mm512_set1_epi32((int)SPW__SPLIT_MAX);
    bits sign_mask = _mm512_set1_epi32((int)0x80000000u), magnitude = _mm512_andnot_si512(sign_mask, u);
    __mmask16 above = _mm512_cmpgt_epi32_mask(magnitude, max);
    __mmask16 finite = _mm512_mask_cmplt_epi32_mask(above, magnitude, _mm512_set1_epi32((int)SPW__F32_INF));
    __mmask16 is_nan = _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q);
    u = _mm512_mask_or_epi32(u, finite, _mm512_and_si512(u, sign_mask), max);
    return _mm512_mask_mov_epi32(u, is_nan, _mm512_set1_epi32((int)SPW__SPLIT_NAN));
}

ALWAYS_INLINE vec
load_master(const spw_adam_slice *s, spw_state_format format, uint64_t i)
{
    if (format == SPW_STATE_SPLIT) {
        bits hi = _mm512_cvtepu16_epi32(load_16x16((const uint16_t *)s->weights + i));
        bits lo = _mm512_cvtepi16_epi32(load_16x16((const int16_t *)s->master + i));
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 16), lo));
    }
    return _mm512_loadu_ps((const float *)(format == SPW_STATE_FP32 ? s->weights : s->master) + i);
}

ALWAYS_INLINE void
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, vec w)
{
    if (format == SPW_STATE_FP32) {
        _mm512_storeu_ps((float *)s->weights + i, w);
    } else if (format == SPW_STATE_MIXED) {
        /* Streaming stores for the weights gained 0 to 5%: not worth a second path. */
        _mm512_storeu_ps((float *)s->master + i, w);
        store_16x16((uint16_t *)s->weights + i, to_bf16(w));
    } else if (format == SPW_STATE_MIXED_F16) {
        _mm512_storeu_ps((float *)s->master + i, w);
        store_16x16((uint16_t *)s->weights + i, _mm512_cvtps_ph(w, _MM_FROUND_TO_NEAREST_INT));
    } else {
        bits u = split_bits(w);
        bits hi = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16);
        store_16x16((uint16_t *)s->weights + i, _mm512_cvtepi32_epi16(hi));
        store_16x16((int16_t *)s->master + i, _mm512_cvtepi32_epi16(u));
    }
}

/* 0x99: quiet and signalling NaN, both infinities. */
ALWAYS_INLINE unsigned
count_nonfinite(vec g)
{
    return (unsigned)__builtin_popcount(_mm512_fpclass_ps_mask(g, 0x99));
}

typedef struct miss {
    bits m, vw;
    __mmask16 fails;
} miss;

ALWAYS_INLINE miss
missed_by(bits off_m, bits off_v, bits off_w, vec w1)
{
    bits magnitude = _mm512_and_si512(_mm512_castps_si512(w1), _mm512_set1_epi32(0x7fffffff));
    __mmask16 fails = _mm512_cmpgt_epu32_mask(off_m, _mm512_set1_epi32(0xff)) |
                      _mm512_cmpgt_epu32_mask(_mm512_or_si512(off_v, off_w), _mm512_set1_epi32(SPW__V_MASK)) |
                      _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32((int)SPW__SPLIT_MAX));
    return (miss){off_m, _mm512_or_si512(off_v, _mm512_slli_epi32(off_w, SPW__W_SHIFT)), fails};
}

ALWAYS_INLINE uint32_t
fails_of(const miss *missed)
{
    return missed[0].fails | (uint32_t)missed[1].fails << LANES;
}

ALWAYS_INLINE void
store_missed(uint8_t *m_bits, uint8_t *vw_bits, const miss *missed)
{
    for (int k = 0; k < BLOCK / LANES; k++)
        _mm_storeu_si128((__m128i *)(m_bits + k * LANES), _mm512_cvtepi32_epi8(missed[k].m));
    for (int k = 0; k < BLOCK / LANES; k++)
        _mm_storeu_si128((__m128i *)(vw_bits + k * LANES), _mm512_cvtepi32_epi8(missed[k].vw));
}

#define ADAM_KERNEL avx512
#include "adam_body.h"
#include "rule_body.h"
#else
const spw__adam_fn spw__adam_avx512 = NULL;
const spw__adam_logged_fn spw__adam_logged_avx512 = NULL;
const spw__packed_fn spw__rules_avx512 = NULL;
#endif
