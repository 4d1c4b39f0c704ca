/*
 * Adam with AVX2 and FMA, eight elements at a time: the operations of adam_ref.c in the same order, so the bits are the
 * same. One body is inlined once per state format and gradient type; the elements that do not fill a vector go to
 * the reference. Compiled with its own flags; elsewhere the pointer is NULL.
 */
#include "cpu_adam_internal.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
/*
 * A block is 32 elements: one whole cache line of every 16-bit array, two of every fp32 array. Arrays of one chunk
 * often lie a large power of two apart and then evict each other from L1, so each line is loaded once, at once, and not
 * revisited before it is stored.
 */
enum { LANES = 8, VECTORS = 4, BLOCK = LANES * VECTORS, PREFETCH_AHEAD_BYTES = 1024 };

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

ALWAYS_INLINE __m128i
load_8x16(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* The low halves of eight 32-bit numbers. */
ALWAYS_INLINE void
store_low_halves(void *p, __m256i x)
{
    x = _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); /* the pack saturates */
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

ALWAYS_INLINE __m256
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    if (dtype == SPW_F32)
        return _mm256_loadu_ps((const float *)grad + i);
    if (dtype == SPW_F16)
        return _mm256_cvtph_ps(load_8x16((const uint16_t *)grad + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8x16((const uint16_t *)grad + i)), 16));
}

ALWAYS_INLINE __m256i
nan_mask(__m256 w)
{
    return _mm256_castps_si256(_mm256_cmp_ps(w, w, _CMP_UNORD_Q));
}

/* spw__weight_bf16, in the low halves */
ALWAYS_INLINE __m256i
to_bf16(__m256 w)
{
    __m256i u = _mm256_castps_si256(w), high = _mm256_srli_epi32(u, 16);
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16);
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan_mask(w));
}

/* spw__split_bits */
ALWAYS_INLINE __m256i
split_bits(__m256 w)
{
    __m256i u = _mm256_castps_si256(w), max = _mm256_set1_epi32((int)SPW__SPLIT_MAX);
    __m256i sign_mask = _mm256_set1_epi32((int)0x80000000u), magnitude = _mm256_andnot_si256(sign_mask, u);
    __m256i guarded = _mm256_and_si256(_mm256_cmpgt_epi32(magnitude, max),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32((int)SPW__F32_INF), magnitude));
    u = _mm256_blendv_epi8(u, _mm256_or_si256(_mm256_and_si256(u, sign_mask), max), guarded);
    return _mm256_blendv_epi8(u, _mm256_set1_epi32((int)SPW__SPLIT_NAN), nan_mask(w));
}

ALWAYS_INLINE __m256
load_master(const spw_adam_slice *s, spw_state_format format, uint64_t i)
{
    if (format == SPW_STATE_SPLIT) {
        __m256i hi = _mm256_cvtepu16_epi32(load_8x16((const uint16_t *)s->weights + i));
        __m256i lo = _mm256_cvtepi16_epi32(load_8x16((const int16_t *)s->master + i));
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(hi, 16), lo));
    }
    return _mm256_loadu_ps((const float *)(format == SPW_STATE_FP32 ? s->weights : s->master) + i);
}

ALWAYS_INLINE void
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, __m256 w)
{
    if (format == SPW_STATE_FP32) {
        _mm256_storeu_ps((float *)s->weights + i, w);
    } else if (format == SPW_STATE_MIXED) {
        /* Streaming stores for the weights gained 0 to 5%: not worth a second path. */
        _mm256_storeu_ps((float *)s->master + i, w);
        store_low_halves((uint16_t *)s->weights + i, to_bf16(w));
    } else {
        __m256i u = split_bits(w);
        store_low_halves((uint16_t *)s->weights + i,
                         _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16));
        store_low_halves((int16_t *)s->master + i, u);
    }
}

ALWAYS_INLINE unsigned
count_nonfinite(__m256 g)
{
    __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), g);
    __m256 inf = _mm256_castsi256_ps(_mm256_set1_epi32((int)SPW__F32_INF));
    int lanes = _mm256_movemask_ps(_mm256_cmp_ps(magnitude, inf, _CMP_NLT_UQ)); /* a NaN is not less either */
    return (unsigned)__builtin_popcount((unsigned)lanes);
}

/* What runs an update backwards; opt_block.h has it element by element. */
typedef struct backwards {
    __m256 b1, step, back_m, back_v, back_w;
} backwards;

/* How far off it is, in 8 and twice 4 bits, and which elements are off by more. */
typedef struct miss {
    __m256i m, vw;
    uint32_t fails;
} miss;

/* The difference of their bits, and bias. */
ALWAYS_INLINE __m256i
off_by(__m256 x, __m256 back, int bias)
{
    __m256i difference = _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_castps_si256(back));
    return _mm256_add_epi32(difference, _mm256_set1_epi32(bias));
}

/* From state w, m, v to w1, m1, v1 by g; q is m1 / d, gg (1 - beta2) g^2. */
ALWAYS_INLINE miss
look_back(const backwards *b, __m256 w, __m256 m, __m256 v, __m256 w1, __m256 m1, __m256 v1, __m256 g, __m256 q,
          __m256 gg)
{
    __m256i off_m = off_by(m, _mm256_mul_ps(_mm256_fnmadd_ps(b->b1, g, m1), b->back_m), SPW__M_BIAS);
    __m256i off_v = off_by(v, _mm256_mul_ps(_mm256_sub_ps(v1, gg), b->back_v), SPW__V_BIAS);
    __m256i off_w = off_by(w, _mm256_mul_ps(_mm256_fmadd_ps(b->step, q, w1), b->back_w), SPW__W_BIAS);
    __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(w1), _mm256_set1_epi32(0x7fffffff));
    __m256i above = _mm256_or_si256(
        _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi32(0xff), off_m),
                        _mm256_andnot_si256(_mm256_set1_epi32(SPW__V_MASK), _mm256_or_si256(off_v, off_w))),
        _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32((int)SPW__SPLIT_MAX)));
    __m256i fits = _mm256_cmpeq_epi32(above, _mm256_setzero_si256());
    return (miss){off_m, _mm256_or_si256(off_v, _mm256_slli_epi32(off_w, SPW__W_SHIFT)),
                  (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(fits)) ^ 0xffu};
}

/* The low bytes of a block. */
ALWAYS_INLINE void
store_low_bytes(uint8_t *p, __m256i a, __m256i b, __m256i c, __m256i d)
{
    const __m256i low = _mm256_set1_epi32(0xff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i ab = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    __m256i cd = _mm256_packus_epi32(_mm256_and_si256(c, low), _mm256_and_si256(d, low));
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
}

/* With a log what does not fill a block is left, and all from a block on for which the list has no room; returns how much was done. */
ALWAYS_INLINE uint64_t
step_body(const spw_adam_coef *c, const spw_adam_slice *s, spw_state_format format, spw_dtype grad_dtype,
          spw__adam_log *log)
{
    const backwards back = {_mm256_set1_ps(c->one_minus_beta1), _mm256_set1_ps(c->step_size),
                            _mm256_set1_ps(1.0f / (1.0f - c->one_minus_beta1)), _mm256_set1_ps(1.0f / c->beta2),
                            _mm256_set1_ps(1.0f / c->decay)};
    const __m256 grad_scale = _mm256_set1_ps(c->grad_scale), l2 = _mm256_set1_ps(c->l2);
    const __m256 one_minus_beta1 = _mm256_set1_ps(c->one_minus_beta1), beta2 = _mm256_set1_ps(c->beta2);
    const __m256 one_minus_beta2 = _mm256_set1_ps(c->one_minus_beta2), eps = _mm256_set1_ps(c->eps);
    const __m256 inv_bc2_sqrt = _mm256_set1_ps(c->inv_bc2_sqrt), decay = _mm256_set1_ps(c->decay);
    const __m256 minus_step_size = _mm256_set1_ps(-c->step_size);
    const bool has_l2 = c->l2 != 0.0f;
    uint64_t nonfinite_count = 0, i = 0;
    _Alignas(32) float before[BLOCK]; /* masters */
    spw_adam_slice rest;
    for (; i + BLOCK <= s->elems; i += BLOCK) {
        __m256 g[VECTORS], w[VECTORS], m[VECTORS], v[VECTORS];
        miss missed[VECTORS];
        uint64_t bad = 0;
        prefetch_block(s, format, grad_dtype, i);
        for (int k = 0; k < VECTORS; k++)
            g[k] = _mm256_mul_ps(load_grad(s->grad, grad_dtype, i + (uint64_t)k * LANES), grad_scale);
        for (int k = 0; k < VECTORS; k++)
            w[k] = load_master(s, format, i + (uint64_t)k * LANES);
        for (int k = 0; k < VECTORS; k++)
            m[k] = _mm256_loadu_ps(s->m + i + k * LANES);
        for (int k = 0; k < VECTORS; k++)
            v[k] = _mm256_loadu_ps(s->v + i + k * LANES);
        for (int k = 0; k < VECTORS; k++) {
            const __m256 w0 = w[k], m0 = m[k], v0 = v[k];
            __m256 d, q, gg;
            bad += count_nonfinite(g[k]);
            if (has_l2)
                g[k] = _mm256_fmadd_ps(l2, w[k], g[k]);
            m[k] = _mm256_fmadd_ps(one_minus_beta1, _mm256_sub_ps(g[k], m[k]), m[k]);
            gg = _mm256_mul_ps(_mm256_mul_ps(one_minus_beta2, g[k]), g[k]);
            v[k] = _mm256_fmadd_ps(beta2, v[k], gg);
            d = _mm256_fmadd_ps(_mm256_sqrt_ps(v[k]), inv_bc2_sqrt, eps);
            q = _mm256_div_ps(m[k], d);
            w[k] = _mm256_fmadd_ps(minus_step_size, q, _mm256_mul_ps(w[k], decay));
            if (log != NULL) {
                missed[k] = look_back(&back, w0, m0, v0, w[k], m[k], v[k], g[k], q, gg);
                _mm256_store_ps(before + k * LANES, w0);
            }
        }
        if (log != NULL) {
            uint32_t fails = 0;
            for (int k = 0; k < VECTORS; k++)
                fails |= missed[k].fails << k * LANES;
            if (fails != 0 && !spw__log_misfits(log, s, i, before, fails))
                break;
            store_low_bytes(log->m_bits + i, missed[0].m, missed[1].m, missed[2].m, missed[3].m);
            store_low_bytes(log->vw_bits + i, missed[0].vw, missed[1].vw, missed[2].vw, missed[3].vw);
        }
        nonfinite_count += bad;
        for (int k = 0; k < VECTORS; k++)
            _mm256_storeu_ps(s->m + i + k * LANES, m[k]);
        for (int k = 0; k < VECTORS; k++)
            _mm256_storeu_ps(s->v + i + k * LANES, v[k]);
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
step_avx2(const spw_adam_coef *coef, const spw_adam_slice *slice)
{
    return step_any(coef, slice, NULL);
}

static uint64_t
logged_avx2(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log)
{
    return step_any(coef, slice, log);
}

const spw__adam_fn spw__adam_avx2 = step_avx2;
const spw__adam_logged_fn spw__adam_logged_avx2 = logged_avx2;
#else
const spw__adam_fn spw__adam_avx2 = NULL;
const spw__adam_logged_fn spw__adam_logged_avx2 = NULL;
#endif
