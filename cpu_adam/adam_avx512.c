/*
 * Adam with AVX-512, sixteen elements at a time: the operations of adam_ref.c in the same order, so the bits are the
 * same. One body is inlined once per state format and gradient type; the elements that do not fill a vector go to
 * the reference. Compiled with its own flags; elsewhere the pointer is NULL.
 */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
/*
 * A block is 32 elements: one whole cache line of every 16-bit array, two of every fp32 array. Arrays of one chunk
 * often lie a large power of two apart and then evict each other from L1, so each line is loaded once, at once, and not
 * revisited before it is stored.
 */
enum { LANES = 16, VECTORS = 2, BLOCK = LANES * VECTORS, PREFETCH_AHEAD_BYTES = 1024 };

/* Past the end of an array a prefetch does nothing; hence the arithmetic on the address and not on the pointer. */
ALWAYS_INLINE void
prefetch_lines(const void *p, int bytes)
{
    for (int at = 0; at < bytes; at += 64)
        _mm_prefetch((const char *)((uintptr_t)p + PREFETCH_AHEAD_BYTES + (uintptr_t)at), _MM_HINT_T0);
}

/* One KiB ahead on every array that is read: hardware prefetchers stop at each page. */
ALWAYS_INLINE void
prefetch_block(const spw_adam_slice *s, const spw_adam_slice *from, spw_state_format format, spw_dtype grad_dtype,
               uint64_t i)
{
    const int grad_bytes = grad_dtype == SPW_F32 ? 4 : 2;
    prefetch_lines((const char *)s->grad + i * (uint64_t)grad_bytes, BLOCK * grad_bytes);
    prefetch_lines(from->m + i, BLOCK * 4);
    prefetch_lines(from->v + i, BLOCK * 4);
    if (format == SPW_STATE_FP32)
        prefetch_lines((const float *)from->weights + i, BLOCK * 4);
    if (format == SPW_STATE_MIXED)
        prefetch_lines((const float *)from->master + i, BLOCK * 4);
    if (format == SPW_STATE_SPLIT) {
        prefetch_lines((const uint16_t *)from->weights + i, BLOCK * 2);
        prefetch_lines((const int16_t *)from->master + i, BLOCK * 2);
    }
}

ALWAYS_INLINE __m256i
load_16x16(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* apart: past the caches, which would read the line first and keep what nobody looks at soon. */
ALWAYS_INLINE void
store_16x16(void *p, __m256i x, bool apart)
{
    if (apart)
        _mm256_stream_si256((__m256i *)p, x);
    else
        _mm256_storeu_si256((__m256i *)p, x);
}

ALWAYS_INLINE void
store_ps(float *p, __m512 x, bool apart)
{
    if (apart)
        _mm512_stream_ps(p, x);
    else
        _mm512_storeu_ps(p, x);
}

ALWAYS_INLINE __m512
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
to_bf16(__m512 w)
{
    __m512i u = _mm512_castps_si512(w), high = _mm512_srli_epi32(u, 16);
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
}

/* spw__split_bits */
ALWAYS_INLINE __m512i
split_bits(__m512 w)
{
    __m512i u = _mm512_castps_si512(w), max = _mm512_set1_epi32((int)SPW__SPLIT_MAX);
    __m512i sign_mask = _mm512_set1_epi32((int)0x80000000u), magnitude = _mm512_andnot_si512(sign_mask, u);
    __mmask16 above = _mm512_cmpgt_epi32_mask(magnitude, max);
    __mmask16 finite = _mm512_mask_cmplt_epi32_mask(above, magnitude, _mm512_set1_epi32((int)SPW__F32_INF));
    __mmask16 is_nan = _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q);
    u = _mm512_mask_or_epi32(u, finite, _mm512_and_si512(u, sign_mask), max);
    return _mm512_mask_mov_epi32(u, is_nan, _mm512_set1_epi32((int)SPW__SPLIT_NAN));
}

ALWAYS_INLINE __m512
load_master(const spw_adam_slice *s, spw_state_format format, uint64_t i)
{
    if (format == SPW_STATE_SPLIT) {
        __m512i hi = _mm512_cvtepu16_epi32(load_16x16((const uint16_t *)s->weights + i));
        __m512i lo = _mm512_cvtepi16_epi32(load_16x16((const int16_t *)s->master + i));
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 16), lo));
    }
    return _mm512_loadu_ps((const float *)(format == SPW_STATE_FP32 ? s->weights : s->master) + i);
}

ALWAYS_INLINE void
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, __m512 w, bool apart)
{
    if (format == SPW_STATE_FP32) {
        store_ps((float *)s->weights + i, w, apart);
    } else if (format == SPW_STATE_MIXED) {
        /* Streaming stores for the weights gained 0 to 5% in place: not worth a third path. */
        store_ps((float *)s->master + i, w, apart);
        store_16x16((uint16_t *)s->weights + i, to_bf16(w), apart);
    } else {
        __m512i u = split_bits(w);
        __m512i hi = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16);
        store_16x16((uint16_t *)s->weights + i, _mm512_cvtepi32_epi16(hi), apart);
        store_16x16((int16_t *)s->master + i, _mm512_cvtepi32_epi16(u), apart);
    }
}

ALWAYS_INLINE uint64_t
step_body(const spw_adam_coef *c, const spw_adam_slice *s, const spw_adam_slice *from, spw_state_format format,
          spw_dtype grad_dtype, bool apart)
{
    const __m512 grad_scale = _mm512_set1_ps(c->grad_scale), l2 = _mm512_set1_ps(c->l2);
    const __m512 one_minus_beta1 = _mm512_set1_ps(c->one_minus_beta1), beta2 = _mm512_set1_ps(c->beta2);
    const __m512 one_minus_beta2 = _mm512_set1_ps(c->one_minus_beta2), eps = _mm512_set1_ps(c->eps);
    const __m512 inv_bc2_sqrt = _mm512_set1_ps(c->inv_bc2_sqrt), decay = _mm512_set1_ps(c->decay);
    const __m512 minus_step_size = _mm512_set1_ps(-c->step_size);
    const bool has_l2 = c->l2 != 0.0f;
    uint64_t nonfinite_count = 0, i = 0;
    spw_adam_slice rest, rest_from;
    for (; i + BLOCK <= s->elems; i += BLOCK) {
        __m512 g[VECTORS], w[VECTORS], m[VECTORS], v[VECTORS];
        prefetch_block(s, from, format, grad_dtype, i);
        for (int k = 0; k < VECTORS; k++)
            g[k] = _mm512_mul_ps(load_grad(s->grad, grad_dtype, i + (uint64_t)k * LANES), grad_scale);
        for (int k = 0; k < VECTORS; k++)
            w[k] = load_master(from, format, i + (uint64_t)k * LANES);
        for (int k = 0; k < VECTORS; k++)
            m[k] = _mm512_loadu_ps(from->m + i + k * LANES);
        for (int k = 0; k < VECTORS; k++)
            v[k] = _mm512_loadu_ps(from->v + i + k * LANES);
        for (int k = 0; k < VECTORS; k++) {
            __m512 d;
            /* 0x99: quiet and signalling NaN, both infinities */
            nonfinite_count += (unsigned)__builtin_popcount(_mm512_fpclass_ps_mask(g[k], 0x99));
            if (has_l2)
                g[k] = _mm512_fmadd_ps(l2, w[k], g[k]);
            m[k] = _mm512_fmadd_ps(one_minus_beta1, _mm512_sub_ps(g[k], m[k]), m[k]);
            v[k] = _mm512_fmadd_ps(beta2, v[k], _mm512_mul_ps(_mm512_mul_ps(one_minus_beta2, g[k]), g[k]));
            d = _mm512_fmadd_ps(_mm512_sqrt_ps(v[k]), inv_bc2_sqrt, eps);
            w[k] = _mm512_fmadd_ps(minus_step_size, _mm512_div_ps(m[k], d), _mm512_mul_ps(w[k], decay));
        }
        for (int k = 0; k < VECTORS; k++)
            store_ps(s->m + i + k * LANES, m[k], apart);
        for (int k = 0; k < VECTORS; k++)
            store_ps(s->v + i + k * LANES, v[k], apart);
        for (int k = 0; k < VECTORS; k++)
            store_master(s, format, i + (uint64_t)k * LANES, w[k], apart);
    }
    if (apart)
        _mm_sfence();
    rest = spw__adam_slice_rest(s, i);
    rest_from = spw__adam_slice_rest(from, i);
    return nonfinite_count + spw__adam_ref(c, &rest, &rest_from);
}

static uint64_t
step_avx512(const spw_adam_coef *coef, const spw_adam_slice *slice, const spw_adam_slice *from)
{
    const bool apart = from != slice;
#define CASE(format, dtype)                                                                                            \
    case SPW_DTYPE_COUNT *(int)(format) + (int)(dtype):                                                                \
        return apart ? step_body(coef, slice, from, format, dtype, true)                                               \
                     : step_body(coef, slice, slice, format, dtype, false)
    switch (SPW_DTYPE_COUNT * (int)slice->format + (int)slice->grad_dtype) {
        CASE(SPW_STATE_FP32, SPW_F32);
        CASE(SPW_STATE_FP32, SPW_BF16);
        CASE(SPW_STATE_FP32, SPW_F16);
        CASE(SPW_STATE_MIXED, SPW_F32);
        CASE(SPW_STATE_MIXED, SPW_BF16);
        CASE(SPW_STATE_MIXED, SPW_F16);
        CASE(SPW_STATE_SPLIT, SPW_F32);
        CASE(SPW_STATE_SPLIT, SPW_BF16);
        CASE(SPW_STATE_SPLIT, SPW_F16);
    default: return spw__adam_ref(coef, slice, from);
    }
#undef CASE
}

const spw__adam_fn spw__adam_avx512 = step_avx512;
#else
const spw__adam_fn spw__adam_avx512 = NULL;
#endif
