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
prefetch_block(const spw_adam_slice *s, spw_state_format format, spw_dtype grad_dtype, uint64_t i)
{
    const int grad_bytes = grad_dtype == SPW_F32 ? 4 : 2;
    prefetch_lines((const char *)s->grad + i * (uint64_t)grad_bytes, BLOCK * grad_bytes);
    prefetch_lines(s->m + i, BLOCK * 4);
    prefetch_lines(s->v + i, BLOCK * 4);
    if (format == SPW_STATE_FP32)
        prefetch_lines((const float *)s->weights + i, BLOCK * 4);
    if (format == SPW_STATE_MIXED)
        prefetch_lines((const float *)s->master + i, BLOCK * 4);
    if (format == SPW_STATE_SPLIT) {
        prefetch_lines((const uint16_t *)s->weights + i, BLOCK * 2);
        prefetch_lines((const int16_t *)s->master + i, BLOCK * 2);
    }
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
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, __m512 w)
{
    if (format == SPW_STATE_FP32) {
        _mm512_storeu_ps((float *)s->weights + i, w);
    } else if (format == SPW_STATE_MIXED) {
        /* Streaming stores for the weights gained 0 to 5%: not worth a second path. */
        _mm512_storeu_ps((float *)s->master + i, w);
        store_16x16((uint16_t *)s->weights + i, to_bf16(w));
    } else {
        __m512i u = split_bits(w);
        __m512i hi = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16);
        store_16x16((uint16_t *)s->weights + i, _mm512_cvtepi32_epi16(hi));
        store_16x16((int16_t *)s->master + i, _mm512_cvtepi32_epi16(u));
    }
}

/* What runs an update backwards; opt_block.h has it element by element. */
typedef struct backwards {
    __m512 b1, step, back_m, back_v, back_w;
} backwards;

/* How far off it is, in 8 and twice 4 bits, and which elements are off by more. */
typedef struct miss {
    __m512i m, vw;
    __mmask16 fails;
} miss;

/* From state w, m, v to w1, m1, v1 by g; q is m1 / d, gg (1 - beta2) g^2. */
ALWAYS_INLINE miss
look_back(const backwards *b, __m512 w, __m512 m, __m512 v, __m512 w1, __m512 m1, __m512 v1, __m512 g, __m512 q,
          __m512 gg)
{
    const __m512i v_mask = _mm512_set1_epi32(SPW__V_MASK);
    __m512i m_back = _mm512_castps_si512(_mm512_mul_ps(_mm512_fnmadd_ps(b->b1, g, m1), b->back_m));
    __m512i v_back = _mm512_castps_si512(_mm512_mul_ps(_mm512_sub_ps(v1, gg), b->back_v));
    __m512i w_back = _mm512_castps_si512(_mm512_mul_ps(_mm512_fmadd_ps(b->step, q, w1), b->back_w));
    __m512i off_m = _mm512_add_epi32(_mm512_sub_epi32(_mm512_castps_si512(m), m_back), _mm512_set1_epi32(SPW__M_BIAS));
    __m512i off_v = _mm512_add_epi32(_mm512_sub_epi32(_mm512_castps_si512(v), v_back), _mm512_set1_epi32(SPW__V_BIAS));
    __m512i off_w = _mm512_add_epi32(_mm512_sub_epi32(_mm512_castps_si512(w), w_back), _mm512_set1_epi32(SPW__W_BIAS));
    __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(w1), _mm512_set1_epi32(0x7fffffff));
    __mmask16 fails = _mm512_cmpgt_epu32_mask(off_m, _mm512_set1_epi32(0xff)) |
                      _mm512_cmpgt_epu32_mask(_mm512_or_si512(off_v, off_w), v_mask) |
                      _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32((int)SPW__SPLIT_MAX));
    return (miss){off_m, _mm512_or_si512(off_v, _mm512_slli_epi32(off_w, SPW__W_SHIFT)), fails};
}

/* With a log what does not fill a block is left, and all from a block on for which the list has no room; returns how much was done. */
ALWAYS_INLINE uint64_t
step_body(const spw_adam_coef *c, const spw_adam_slice *s, spw_state_format format, spw_dtype grad_dtype,
          spw__adam_log *log)
{
    const backwards back = {_mm512_set1_ps(c->one_minus_beta1), _mm512_set1_ps(c->step_size),
                            _mm512_set1_ps(1.0f / (1.0f - c->one_minus_beta1)), _mm512_set1_ps(1.0f / c->beta2),
                            _mm512_set1_ps(1.0f / c->decay)};
    const __m512 grad_scale = _mm512_set1_ps(c->grad_scale), l2 = _mm512_set1_ps(c->l2);
    const __m512 one_minus_beta1 = _mm512_set1_ps(c->one_minus_beta1), beta2 = _mm512_set1_ps(c->beta2);
    const __m512 one_minus_beta2 = _mm512_set1_ps(c->one_minus_beta2), eps = _mm512_set1_ps(c->eps);
    const __m512 inv_bc2_sqrt = _mm512_set1_ps(c->inv_bc2_sqrt), decay = _mm512_set1_ps(c->decay);
    const __m512 minus_step_size = _mm512_set1_ps(-c->step_size);
    const bool has_l2 = c->l2 != 0.0f;
    uint64_t nonfinite_count = 0, i = 0;
    _Alignas(64) float before[BLOCK]; /* masters */
    spw_adam_slice rest;
    for (; i + BLOCK <= s->elems; i += BLOCK) {
        __m512 g[VECTORS], w[VECTORS], m[VECTORS], v[VECTORS];
        miss missed[VECTORS];
        uint64_t bad = 0;
        prefetch_block(s, format, grad_dtype, i);
        for (int k = 0; k < VECTORS; k++)
            g[k] = _mm512_mul_ps(load_grad(s->grad, grad_dtype, i + (uint64_t)k * LANES), grad_scale);
        for (int k = 0; k < VECTORS; k++)
            w[k] = load_master(s, format, i + (uint64_t)k * LANES);
        for (int k = 0; k < VECTORS; k++)
            m[k] = _mm512_loadu_ps(s->m + i + k * LANES);
        for (int k = 0; k < VECTORS; k++)
            v[k] = _mm512_loadu_ps(s->v + i + k * LANES);
        for (int k = 0; k < VECTORS; k++) {
            const __m512 w0 = w[k], m0 = m[k], v0 = v[k];
            __m512 d, q, gg;
            /* 0x99: quiet and signalling NaN, both infinities */
            bad += (unsigned)__builtin_popcount(_mm512_fpclass_ps_mask(g[k], 0x99));
            if (has_l2)
                g[k] = _mm512_fmadd_ps(l2, w[k], g[k]);
            m[k] = _mm512_fmadd_ps(one_minus_beta1, _mm512_sub_ps(g[k], m[k]), m[k]);
            gg = _mm512_mul_ps(_mm512_mul_ps(one_minus_beta2, g[k]), g[k]);
            v[k] = _mm512_fmadd_ps(beta2, v[k], gg);
            d = _mm512_fmadd_ps(_mm512_sqrt_ps(v[k]), inv_bc2_sqrt, eps);
            q = _mm512_div_ps(m[k], d);
            w[k] = _mm512_fmadd_ps(minus_step_size, q, _mm512_mul_ps(w[k], decay));
            if (log != NULL) {
                missed[k] = look_back(&back, w0, m0, v0, w[k], m[k], v[k], g[k], q, gg);
                _mm512_store_ps(before + k * LANES, w0);
            }
        }
        if (log != NULL) {
            uint32_t fails = missed[0].fails | (uint32_t)missed[1].fails << LANES;
            if (fails != 0 && !spw__log_misfits(log, s, i, before, fails))
                break;
            for (int k = 0; k < VECTORS; k++)
                _mm_storeu_si128((__m128i *)(log->m_bits + i + k * LANES), _mm512_cvtepi32_epi8(missed[k].m));
            for (int k = 0; k < VECTORS; k++)
                _mm_storeu_si128((__m128i *)(log->vw_bits + i + k * LANES), _mm512_cvtepi32_epi8(missed[k].vw));
        }
        nonfinite_count += bad;
        for (int k = 0; k < VECTORS; k++)
            _mm512_storeu_ps(s->m + i + k * LANES, m[k]);
        for (int k = 0; k < VECTORS; k++)
            _mm512_storeu_ps(s->v + i + k * LANES, v[k]);
        for (int k = 0; k < VECTORS; k++)
            store_master(s, format, i + (uint64_t)k * LANES, w[k]);
    }
    if (log != NULL) {
        log->nonfinite_count = nonfinite_count;
        return i;
    }
    rest = spw__adam_slice_rest(s, i);
    return nonfinite_count + spw__adam_ref(c, &rest);
}

/* log: NULL or not is known where it is called. */
ALWAYS_INLINE uint64_t
step_any(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log)
{
#define CASE(format, dtype)                                                                                            \
    case SPW_DTYPE_COUNT *(int)(format) + (int)(dtype): return step_body(coef, slice, format, dtype, log)
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
    default: return log != NULL ? 0 : spw__adam_ref(coef, slice);
    }
#undef CASE
}

static uint64_t
step_avx512(const spw_adam_coef *coef, const spw_adam_slice *slice)
{
    return step_any(coef, slice, NULL);
}

static uint64_t
logged_avx512(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log)
{
    return step_any(coef, slice, log);
}

const spw__adam_fn spw__adam_avx512 = step_avx512;
const spw__adam_logged_fn spw__adam_logged_avx512 = logged_avx512;
#else
const spw__adam_fn spw__adam_avx512 = NULL;
const spw__adam_logged_fn spw__adam_logged_avx512 = NULL;
#endif
