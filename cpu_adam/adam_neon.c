/*
 * Adam with NEON, four elements at a time; see adam_body.h. Elsewhere the pointers are NULL. SVE would gain nothing where its vectors have
 * 128 bits (Neoverse V2).
 */
#include "cpu_adam_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
enum { LANES = 4, BLOCK = 32 };
typedef float32x4_t vec;
typedef uint32x4_t bits;

ALWAYS_INLINE vec
all_of(float x)
{
    return vdupq_n_f32(x);
}

ALWAYS_INLINE vec
load(const float *p)
{
    return vld1q_f32(p);
}

ALWAYS_INLINE void
store(float *p, vec x)
{
    vst1q_f32(p, x);
}

ALWAYS_INLINE vec
fma_of(vec a, vec b, vec c)
{
    return vfmaq_f32(c, a, b);
}

ALWAYS_INLINE vec
fnma_of(vec a, vec b, vec c)
{
    return vfmsq_f32(c, a, b);
}

ALWAYS_INLINE vec
sqrt_of(vec x)
{
    return vsqrtq_f32(x);
}

ALWAYS_INLINE bits
off_by(vec x, vec back, uint32_t bias)
{
    return vaddq_u32(vsubq_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(back)), vdupq_n_u32(bias));
}

ALWAYS_INLINE vec
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    if (dtype == SPW_F32)
        return vld1q_f32((const float *)grad + i);
    if (dtype == SPW_F16)
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)grad + i)));
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)grad + i), 16));
}

ALWAYS_INLINE bits
nan_mask(vec w)
{
    return vmvnq_u32(vceqq_f32(w, w));
}

/* spw__weight_bf16 */
ALWAYS_INLINE uint16x4_t
to_bf16(vec w)
{
    bits u = vreinterpretq_u32_f32(w);
    uint16x4_t rounded = vaddhn_u32(u, vdupq_n_u32(0x8000)), high = vorr_u16(vshrn_n_u32(u, 16), vdup_n_u16(0x40));
    return vbsl_u16(vmovn_u32(nan_mask(w)), high, rounded);
}

/* spw__split_bits */
ALWAYS_INLINE bits
split_bits(vec w)
{
    const bits sign = vdupq_n_u32(0x80000000u), most = vdupq_n_u32(SPW__SPLIT_MAX);
    bits u = vreinterpretq_u32_f32(w), magnitude = vbicq_u32(u, sign);
    bits guarded = vandq_u32(vcgtq_u32(magnitude, most), vcltq_u32(magnitude, vdupq_n_u32(SPW__F32_INF)));
    u = vbslq_u32(guarded, vorrq_u32(vandq_u32(u, sign), most), u);
    return vbslq_u32(nan_mask(w), vdupq_n_u32(SPW__SPLIT_NAN), u);
}

ALWAYS_INLINE vec
load_master(const spw_adam_slice *s, spw_state_format format, uint64_t i)
{
    if (format == SPW_STATE_SPLIT) {
        bits hi = vshll_n_u16(vld1_u16((const uint16_t *)s->weights + i), 16);
        int32x4_t lo = vmovl_s16(vld1_s16((const int16_t *)s->master + i));
        return vreinterpretq_f32_u32(vaddq_u32(hi, vreinterpretq_u32_s32(lo)));
    }
    return vld1q_f32((const float *)(format == SPW_STATE_FP32 ? s->weights : s->master) + i);
}

ALWAYS_INLINE void
store_master(const spw_adam_slice *s, spw_state_format format, uint64_t i, vec w)
{
    if (format == SPW_STATE_FP32) {
        vst1q_f32((float *)s->weights + i, w);
    } else if (format == SPW_STATE_MIXED) {
        vst1q_f32((float *)s->master + i, w);
        vst1_u16((uint16_t *)s->weights + i, to_bf16(w));
    } else if (format == SPW_STATE_MIXED_F16) {
        vst1q_f32((float *)s->master + i, w);
        vst1_u16((uint16_t *)s->weights + i, vreinterpret_u16_f16(vcvt_f16_f32(w)));
    } else {
        bits u = split_bits(w);
        vst1_u16((uint16_t *)s->weights + i, vaddhn_u32(u, vdupq_n_u32(0x8000)));
        vst1_u16((uint16_t *)s->master + i, vmovn_u32(u));
    }
}

ALWAYS_INLINE unsigned
count_nonfinite(vec g)
{
    bits magnitude = vbicq_u32(vreinterpretq_u32_f32(g), vdupq_n_u32(0x80000000u));
    return vaddvq_u32(vshrq_n_u32(vcgeq_u32(magnitude, vdupq_n_u32(SPW__F32_INF)), 31));
}

typedef struct miss {
    bits m, vw, fails; /* all ones, or none */
} miss;

ALWAYS_INLINE miss
missed_by(bits off_m, bits off_v, bits off_w, vec w1)
{
    bits magnitude = vbicq_u32(vreinterpretq_u32_f32(w1), vdupq_n_u32(0x80000000u));
    bits above =
        vorrq_u32(vbicq_u32(off_m, vdupq_n_u32(0xff)), vbicq_u32(vorrq_u32(off_v, off_w), vdupq_n_u32(SPW__V_MASK)));
    return (miss){off_m, vorrq_u32(off_v, vshlq_n_u32(off_w, SPW__W_SHIFT)),
                  vorrq_u32(vtstq_u32(above, above), vcgtq_u32(magnitude, vdupq_n_u32(SPW__SPLIT_MAX)))};
}

ALWAYS_INLINE uint32_t
fails_of(const miss *missed)
{
    static const uint32_t places[LANES] = {1, 2, 4, 8};
    uint32_t fails = 0;
    for (int k = 0; k < BLOCK / LANES; k++)
        fails |= vaddvq_u32(vandq_u32(missed[k].fails, vld1q_u32(places))) << k * LANES;
    return fails;
}

/* The low bytes of sixteen elements. */
ALWAYS_INLINE void
store_low_bytes(uint8_t *p, bits a, bits b, bits c, bits d)
{
    uint16x8_t ab = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), cd = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
    vst1q_u8(p, vcombine_u8(vmovn_u16(ab), vmovn_u16(cd)));
}

ALWAYS_INLINE void
store_missed(uint8_t *m_bits, uint8_t *vw_bits, const miss *missed)
{
    for (int k = 0; k < BLOCK / LANES; k += 4) {
        store_low_bytes(m_bits + k * LANES, missed[k].m, missed[k + 1].m, missed[k + 2].m, missed[k + 3].m);
        store_low_bytes(vw_bits + k * LANES, missed[k].vw, missed[k + 1].vw, missed[k + 2].vw, missed[k + 3].vw);
    }
}

ALWAYS_INLINE vec
canonical_of(vec x)
{
    return vbslq_f32(nan_mask(x), vreinterpretq_f32_u32(vdupq_n_u32(SPW__SPLIT_NAN)), x);
}

ALWAYS_INLINE vec
signed_where_moves(vec u, vec lr)
{
    bits stays = vorrq_u32(vceqzq_f32(u), nan_mask(u));
    return vbslq_f32(stays, u, vbslq_f32(vdupq_n_u32(0x80000000u), u, lr));
}

#define ADAM_KERNEL neon
#include "adam_body.h"
#include "rule_body.h"
#else
const spw__adam_fn spw__adam_neon = NULL;
const spw__adam_logged_fn spw__adam_logged_neon = NULL;
const spw__packed_fn spw__rules_neon = NULL;
#endif
