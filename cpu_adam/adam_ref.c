/*
 * Adam, one element at a time: the truth that the vector kernels repeat bit for bit. Every multiply-add is an explicit
 * fma, every other operation rounds on its own (the build turns contraction off), sqrt and divide are IEEE. Called for
 * the last elements of the vector kernels, and for everything where there are none.
 */
#include "cpu_adam_internal.h"
#include <math.h>

static float
load_grad(const void *grad, spw_dtype dtype, uint64_t i)
{
    if (dtype == SPW_F32)
        return ((const float *)grad)[i];
    return dtype == SPW_BF16 ? spw_bf16_to_f32(((const uint16_t *)grad)[i])
                             : spw_f16_to_f32(((const uint16_t *)grad)[i]);
}

static float
load_master(const spw_adam_slice *s, uint64_t i)
{
    if (s->format == SPW_STATE_FP32)
        return ((const float *)s->weights)[i];
    return s->format == SPW_STATE_MIXED ? ((const float *)s->master)[i]
                                        : spw__join(((const uint16_t *)s->weights)[i], ((const int16_t *)s->master)[i]);
}

static void
store_master(const spw_adam_slice *s, uint64_t i, float w)
{
    if (s->format == SPW_STATE_FP32) {
        ((float *)s->weights)[i] = w;
    } else if (s->format == SPW_STATE_MIXED) {
        ((float *)s->master)[i] = w;
        ((uint16_t *)s->weights)[i] = spw__weight_bf16(w);
    } else {
        spw__split(w, (uint16_t *)s->weights + i, (int16_t *)s->master + i);
    }
}

uint64_t
spw__adam_ref(const spw_adam_coef *c, const spw_adam_slice *s)
{
    uint64_t nonfinite_count = 0;
    for (uint64_t i = 0; i < s->elems; i++) {
        float g = load_grad(s->grad, s->grad_dtype, i) * c->grad_scale;
        float w = load_master(s, i), m = s->m[i], v = s->v[i], d;
        nonfinite_count += (spw_f32_bits(g) & 0x7fffffffu) >= SPW__F32_INF;
        if (c->l2 != 0.0f)
            g = fmaf(c->l2, w, g);
        m = fmaf(c->one_minus_beta1, g - m, m);
        v = fmaf(c->beta2, v, (c->one_minus_beta2 * g) * g);
        d = fmaf(sqrtf(v), c->inv_bc2_sqrt, c->eps);
        w = fmaf(-c->step_size, m / d, w * c->decay);
        s->m[i] = m;
        s->v[i] = v;
        store_master(s, i, w);
    }
    return nonfinite_count;
}
