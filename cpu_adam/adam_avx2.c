/* Adam with AVX2 and FMA, eight elements at a time; see adam_body.h. Compiled with its own flags; elsewhere the pointers are NULL. */
#include "cpu_adam_internal.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vec_avx2.h"

enum { LANES = 8, BLOCK = 32 };

ALWAYS_INLINE bits
off_by(vec x, vec back, int bias)
{
    bits difference = _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_castps_si256(back));
    return _mm256_add_epi32(difference, _mm256_set1_epi32(bias));
}

ALWAYS_INLINE __m128i
load_8x16(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* The low halves of eight 32-bit numbers. */
ALWAYS_INLINE void
store_low_halves(void *p, bits x)
{
    x = _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); /* the pack saturates */
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

ALWAYS_INLINE vec
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    if (dtype == SPW_F32)
        return _mm256_loadu_ps((const float *)grad + i);
    if (dtype == SPW_F16)
        return _mm256_cvtph_ps(load_8x16((const uint16_t *)grad + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8x16((const uint16_t *)grad + i)), 16));
}

ALWAYS_INLINE bits
nan_mask(vec w)
{
    return _mm256_castps_si256(_mm256_cmp_ps(w, w, _CMP_UNORD_Q));
}

/* spw__weight_bf16, in the low halves */
ALWAYS_INLINE bits
to_bf16(vec w)
{
    bits u = _mm256_castps_si256(w), high = _mm256_srli_epi32(u, 16);
    bits rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16);
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan_mask(w));
}

/* spw__split_bits */
ALWAYS_INLINE bits
split_bits(vec w)
{
    bits u = _mm256_castps_si256(w), max = _mm256_set1_epi32((int)SPW__SPLIT_MAX);
    bits sign_mask = _mm256_set1_epi32((int)0x80000000u), magnitude = _mm256_andnot_si256(sign_mask, u);
    bits guarded = _mm256_and_si256(_mm256_cmpgt_epi32(magnitude, max),
                                    _mm256_cmpgt_epi32(_mm256_set1_epi32((int)SPW__F32_INF), magnitude));
    u = _mm256_blendv_epi8(u, _mm256_or_si256(_mm256_and_si256(u, sign_mask), max), guarded);
    return _mm256_blendv_epi8(u, _mm256_set1_epi32((int)SPW__SPLIT_NAN), nan_mask(w));
}

ALWAYS_INLINE vec
load_master(const spw_adam_slice *s, spw_state_format format, uint64_t i)
{
    if (format == SPW_STATE_SPLIT) {
        bits hi = _mm256_cvtepu16_epi32(load_8x16((const uint16_t *)s->weights + i));
        bits lo = _mm256_cvtepi16_epi32(load_8x16((const int16_t *)s->master + i));
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(hi, 16), lo));
    }
    return _mm256_loadu_ps((const float *)(format == SPW_STATE_FP32 ? s->weights : s->master) + i);
}

ALWAYS_INLINE void
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, vec w)
{
    if (format == SPW_STATE_FP32) {
        _mm256_storeu_ps((float *)s->weights + i, w);
    } else if (format == SPW_STATE_MIXED) {
        /* Streaming stores for the weights gained 0 to 5%: not worth a second path. */
        _mm256_storeu_ps((float *)s->master + i, w);
        store_low_halves((uint16_t *)s->weights + i, to_bf16(w));
    } else if (format == SPW_STATE_MIXED_F16) {
        _mm256_storeu_ps((float *)s->master + i, w);
        _mm_storeu_si128((__m128i *)(void *)((uint16_t *)s->weights + i),
                         _mm256_cvtps_ph(w, _MM_FROUND_TO_NEAREST_INT));
    } else {
        bits u = split_bits(w);
        store_low_halves((uint16_t *)s->weights + i,
                         _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16));
        store_low_halves((int16_t *)s->master + i, u);
    }
}

ALWAYS_INLINE unsigned
count_nonfinite(vec g)
{
    vec magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), g);
    vec inf = _mm256_castsi256_ps(_mm256_set1_epi32((int)SPW__F32_INF));
    int lanes = _mm256_movemask_ps(_mm256_cmp_ps(magnitude, inf, _CMP_NLT_UQ)); /* a NaN is not less either */
    return (unsigned)__builtin_popcount((unsigned)lanes);
}

typedef struct miss {
    bits m, vw;
    uint32_t fails;
} miss;

ALWAYS_INLINE miss
missed_by(bits off_m, bits off_v, bits off_w, vec w1)
{
    bits magnitude = _mm256_and_si256(_mm256_castps_si256(w1), _mm256_set1_epi32(0x7fffffff));
    bits above = _mm256_or_si256(
        _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi32(0xff), off_m),
                        _mm256_andnot_si256(_mm256_set1_epi32(SPW__V_MASK), _mm256_or_si256(off_v, off_w))),
        _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32((int)SPW__SPLIT_MAX)));
    bits fits = _mm256_cmpeq_epi32(above, _mm256_setzero_si256());
    return (miss){off_m, _mm256_or_si256(off_v, _mm256_slli_epi32(off_w, SPW__W_SHIFT)),
                  (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(fits)) ^ 0xffu};
}

ALWAYS_INLINE uint32_t
fails_of(const miss *missed)
{
    uint32_t fails = 0;
    for (int k = 0; k < BLOCK / LANES; k++)
        fails |= missed[k].fails << k * LANES;
    return fails;
}

/* The low bytes of a block. */
ALWAYS_INLINE void
store_low_bytes(uint8_t *p, bits a, bits b, bits c, bits d)
{
    const bits low = _mm256_set1_epi32(0xff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    bits ab = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    bits cd = _mm256_packus_epi32(_mm256_and_si256(c, low), _mm256_and_si256(d, low));
    _mm256_storeu_si256((bits *)(void *)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
}

ALWAYS_INLINE void
store_missed(uint8_t *m_bits, uint8_t *vw_bits, const miss *missed)
{
    store_low_bytes(m_bits, missed[0].m, missed[1].m, missed[2].m, missed[3].m);
    store_low_bytes(vw_bits, missed[0].vw, missed[1].vw, missed[2].vw, missed[3].vw);
}

#define ADAM_KERNEL avx2
#include "adam_body.h"
#include "rule_body.h"
#else
const spw__adam_fn spw__adam_avx2 = NULL;
const spw__adam_logged_fn spw__adam_logged_avx2 = NULL;
const spw__packed_fn spw__rules_avx2 = NULL;
#endif
