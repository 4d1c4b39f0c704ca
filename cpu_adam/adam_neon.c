/*
 * Adam with NEON, four elements at a time: the operations of adam_ref.c in the same order, so the bits are the same. One body is
 * inlined once per state format and gradient type; the elements that do not fill a block go to the reference. Elsewhere the
 * pointer is NULL. SVE would gain nothing where its vectors have 128 bits (Neoverse V2).
 */
#include "cpu_adam_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* A block is 32 elements, as of the other kernels: what a log's list of misfits counts in. */
enum { LANES = 4, VECTORS = 8, BLOCK = LANES * VECTORS, PREFETCH_AHEAD_BYTES = 1024 };

/* Past the end of an array a prefetch does nothing; hence the arithmetic on the address and not on the pointer. */
ALWAYS_INLINE void
prefetch_lines(const void *p, int bytes)
{
    for (int at = 0; at < bytes; at += 64)
        __builtin_prefetch((const void *)((uintptr_t)p + PREFETCH_AHEAD_BYTES + (uintptr_t)at));
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

ALWAYS_INLINE float32x4_t
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    if (dtype == SPW_F32)
        return vld1q_f32((const float *)grad + i);
    if (dtype == SPW_F16)
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)grad + i)));
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)grad + i), 16));
}

ALWAYS_INLINE uint32x4_t
nan_mask(float32x4_t w)
{
    return vmvnq_u32(vceqq_f32(w, w));
}

/* spw__weight_bf16 */
ALWAYS_INLINE uint16x4_t
to_bf16(float32x4_t w)
{
    uint32x4_t u = vreinterpretq_u32_f32(w);
    uint16x4_t rounded = vaddhn_u32(u, vdupq_n_u32(0x8000)), high = vorr_u16(vshrn_n_u32(u, 16), vdup_n_u16(0x40));
    return vbsl_u16(vmovn_u32(nan_mask(w)), high, rounded);
}

/* spw__split_bits */
ALWAYS_INLINE uint32x4_t
split_bits(float32x4_t w)
{
    const uint32x4_t sign = vdupq_n_u32(0x80000000u), most = vdupq_n_u32(SPW__SPLIT_MAX);
    uint32x4_t u = vreinterpretq_u32_f32(w), magnitude = vbicq_u32(u, sign);
    uint32x4_t guarded = vandq_u32(vcgtq_u32(magnitude, most), vcltq_u32(magnitude, vdupq_n_u32(SPW__F32_INF)));
    u = vbslq_u32(guarded, vorrq_u32(vandq_u32(u, sign), most), u);
    return vbslq_u32(nan_mask(w), vdupq_n_u32(SPW__SPLIT_NAN), u);
}

ALWAYS_INLINE float32x4_t
load_master(const spw_adam_slice *s, spw_state_format format, uint64_t i)
{
    if (format == SPW_STATE_SPLIT) {
        uint32x4_t hi = vshll_n_u16(vld1_u16((const uint16_t *)s->weights + i), 16);
        int32x4_t lo = vmovl_s16(vld1_s16((const int16_t *)s->master + i));
        return vreinterpretq_f32_u32(vaddq_u32(hi, vreinterpretq_u32_s32(lo)));
    }
    return vld1q_f32((const float *)(format == SPW_STATE_FP32 ? s->weights : s->master) + i);
}

ALWAYS_INLINE void
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, float32x4_t w)
{
    if (format == SPW_STATE_FP32) {
        vst1q_f32((float *)s->weights + i, w);
    } else if (format == SPW_STATE_MIXED) {
        vst1q_f32((float *)s->master + i, w);
        vst1_u16((uint16_t *)s->weights + i, to_bf16(w));
    } else {
        uint32x4_t u = split_bits(w);
        vst1_u16((uint16_t *)s->weights + i, vaddhn_u32(u, vdupq_n_u32(0x8000)));
        vst1_u16((uint16_t *)s->master + i, vmovn_u32(u));
    }
}

/* 1 in each lane that is infinite or no number. */
ALWAYS_INLINE uint32x4_t
nonfinite(float32x4_t g)
{
    uint32x4_t magnitude = vbicq_u32(vreinterpretq_u32_f32(g), vdupq_n_u32(0x80000000u));
    return vshrq_n_u32(vcgeq_u32(magnitude, vdupq_n_u32(SPW__F32_INF)), 31);
}

/* What runs an update backwards; opt_block.h has it element by element. */
typedef struct backwards {
    float32x4_t b1, step, back_m, back_v, back_w;
} backwards;

/* How far off it is, in 8 and twice 4 bits, and which elements are off by more, all ones. */
typedef struct miss {
    uint32x4_t m, vw, fails;
} miss;

/* The difference of their bits, and bias. */
ALWAYS_INLINE uint32x4_t
off_by(float32x4_t x, float32x4_t back, uint32_t bias)
{
    return vaddq_u32(vsubq_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(back)), vdupq_n_u32(bias));
}

/* From state w, m, v to w1, m1, v1 by g; q is m1 / d, gg (1 - beta2) g^2. */
ALWAYS_INLINE miss
look_back(const backwards *b, float32x4_t w, float32x4_t m, float32x4_t v, float32x4_t w1, float32x4_t m1,
          float32x4_t v1, float32x4_t g, float32x4_t q, float32x4_t gg)
{
    uint32x4_t off_m = off_by(m, vmulq_f32(vfmsq_f32(m1, b->b1, g), b->back_m), SPW__M_BIAS);
    uint32x4_t off_v = off_by(v, vmulq_f32(vsubq_f32(v1, gg), b->back_v), SPW__V_BIAS);
    uint32x4_t off_w = off_by(w, vmulq_f32(vfmaq_f32(w1, b->step, q), b->back_w), SPW__W_BIAS);
    uint32x4_t magnitude = vbicq_u32(vreinterpretq_u32_f32(w1), vdupq_n_u32(0x80000000u));
    uint32x4_t above =
        vorrq_u32(vbicq_u32(off_m, vdupq_n_u32(0xff)), vbicq_u32(vorrq_u32(off_v, off_w), vdupq_n_u32(SPW__V_MASK)));
    return (miss){off_m, vorrq_u32(off_v, vshlq_n_u32(off_w, SPW__W_SHIFT)),
                  vorrq_u32(vtstq_u32(above, above), vcgtq_u32(magnitude, vdupq_n_u32(SPW__SPLIT_MAX)))};
}

/* A bit for each element of a block, the first lowest. */
ALWAYS_INLINE uint32_t
bits_of(const miss *missed)
{
    static const uint32_t places[LANES] = {1, 2, 4, 8};
    uint32_t bits = 0;
    for (int k = 0; k < VECTORS; k++)
        bits |= vaddvq_u32(vandq_u32(missed[k].fails, vld1q_u32(places))) << k * LANES;
    return bits;
}

/* The low bytes of sixteen elements. */
ALWAYS_INLINE void
store_low_bytes(uint8_t *p, uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d)
{
    uint16x8_t ab = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), cd = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
    vst1q_u8(p, vcombine_u8(vmovn_u16(ab), vmovn_u16(cd)));
}

/* With a log what does not fill a block is left, and all from a block on for which the list has no room; returns how much was done. */
ALWAYS_INLINE uint64_t
step_body(const spw_adam_coef *c, const spw_adam_slice *s, spw_state_format format, spw_dtype grad_dtype,
          spw__adam_log *log)
{
    const backwards back = {vdupq_n_f32(c->one_minus_beta1), vdupq_n_f32(c->step_size),
                            vdupq_n_f32(1.0f / (1.0f - c->one_minus_beta1)), vdupq_n_f32(1.0f / c->beta2),
                            vdupq_n_f32(1.0f / c->decay)};
    const float32x4_t grad_scale = vdupq_n_f32(c->grad_scale), l2 = vdupq_n_f32(c->l2);
    const float32x4_t one_minus_beta1 = vdupq_n_f32(c->one_minus_beta1), beta2 = vdupq_n_f32(c->beta2);
    const float32x4_t one_minus_beta2 = vdupq_n_f32(c->one_minus_beta2), eps = vdupq_n_f32(c->eps);
    const float32x4_t inv_bc2_sqrt = vdupq_n_f32(c->inv_bc2_sqrt), decay = vdupq_n_f32(c->decay);
    const float32x4_t minus_step_size = vdupq_n_f32(-c->step_size);
    const bool has_l2 = c->l2 != 0.0f;
    uint64_t nonfinite_count = 0, i = 0;
    float before[BLOCK]; /* masters */
    spw_adam_slice rest;
    for (; i + BLOCK <= s->elems; i += BLOCK) {
        float32x4_t g[VECTORS], w[VECTORS], m[VECTORS], v[VECTORS];
        uint32x4_t bad = vdupq_n_u32(0);
        miss missed[VECTORS];
        prefetch_block(s, format, grad_dtype, i);
        for (int k = 0; k < VECTORS; k++) {
            const uint64_t at = i + (uint64_t)k * LANES;
            float32x4_t d, q, gg, w0, m0, v0;
            g[k] = vmulq_f32(load_grad(s->grad, grad_dtype, at), grad_scale);
            w0 = w[k] = load_master(s, format, at);
            m0 = m[k] = vld1q_f32(s->m + at);
            v0 = v[k] = vld1q_f32(s->v + at);
            bad = vaddq_u32(bad, nonfinite(g[k]));
            if (has_l2)
                g[k] = vfmaq_f32(g[k], l2, w[k]);
            m[k] = vfmaq_f32(m[k], one_minus_beta1, vsubq_f32(g[k], m[k]));
            gg = vmulq_f32(vmulq_f32(one_minus_beta2, g[k]), g[k]);
            v[k] = vfmaq_f32(gg, beta2, v[k]);
            d = vfmaq_f32(eps, vsqrtq_f32(v[k]), inv_bc2_sqrt);
            q = vdivq_f32(m[k], d);
            w[k] = vfmaq_f32(vmulq_f32(w[k], decay), minus_step_size, q);
            if (log != NULL) {
                missed[k] = look_back(&back, w0, m0, v0, w[k], m[k], v[k], g[k], q, gg);
                vst1q_f32(before + k * LANES, w0);
            }
        }
        if (log != NULL) {
            uint32_t fails = bits_of(missed);
            if (fails != 0 && !spw__log_misfits(log, s, i, before, fails))
                break;
            for (int k = 0; k < VECTORS; k += 4) {
                const miss *of = missed + k;
                store_low_bytes(log->m_bits + i + k * LANES, of[0].m, of[1].m, of[2].m, of[3].m);
                store_low_bytes(log->vw_bits + i + k * LANES, of[0].vw, of[1].vw, of[2].vw, of[3].vw);
            }
        }
        nonfinite_count += vaddvq_u32(bad);
        for (int k = 0; k < VECTORS; k++) {
            const uint64_t at = i + (uint64_t)k * LANES;
            vst1q_f32(s->m + at, m[k]);
            vst1q_f32(s->v + at, v[k]);
            store_master(s, format, at, w[k]);
        }
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
step_neon(const spw_adam_coef *coef, const spw_adam_slice *slice)
{
    return step_any(coef, slice, NULL);
}

static uint64_t
logged_neon(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log)
{
    return step_any(coef, slice, log);
}

const spw__adam_fn spw__adam_neon = step_neon;
const spw__adam_logged_fn spw__adam_logged_neon = logged_neon;
#else
const spw__adam_fn spw__adam_neon = NULL;
const spw__adam_logged_fn spw__adam_logged_neon = NULL;
#endif
