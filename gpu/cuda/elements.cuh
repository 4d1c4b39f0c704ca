/*
 * Element-wise kernels: eight elements per thread, one pass over memory. The formulas are those of the cpu device.
 */
#ifndef SPW_CUDA_ELEMENTS_CUH
#define SPW_CUDA_ELEMENTS_CUH

#include "common.cuh"
#include "spw_gpu.h"

enum { ELEMENT_THREADS = 256, ELEMENTS_PER_BLOCK = 8 * ELEMENT_THREADS };

SPW_DEVICE uint64_t
my_eight(void)
{
    return ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
}

/* y = a + scale b; a NULL: 0. */
template <class T>
__global__ void
add_scaled_kernel(T *y, const T *a, const T *b, float scale, uint64_t n, bool wide)
{
    uint64_t i = my_eight();
    eight<T> of_a = {}, of_b;
    float va[8], vb[8];
    if (i >= n)
        return;
    if (a != NULL)
        load_eight(&of_a, a + i, n - i, wide);
    load_eight(&of_b, b + i, n - i, wide);
    widen8(va, of_a);
    widen8(vb, of_b);
#pragma unroll
    for (int j = 0; j < 8; j++)
        va[j] += scale * vb[j];
    store8(y + i, va, n - i, wide);
}

/* y = (a + b) * the sum of the terms; b NULL: 0. */
template <class T>
__global__ void
add_scaled_by_kernel(T *y, const T *a, const T *b, const T *terms, uint64_t n, bool wide)
{
    uint64_t i = my_eight();
    eight<T> of_a, of_b = {};
    float va[8], vb[8], scale;
    if (i >= n)
        return;
    load_eight(&of_a, a + i, n - i, wide);
    if (b != NULL)
        load_eight(&of_b, b + i, n - i, wide);
    scale = sum_of_terms(terms);
    widen8(va, of_a);
    widen8(vb, of_b);
#pragma unroll
    for (int j = 0; j < 8; j++)
        va[j] = (va[j] + vb[j]) * scale;
    store8(y + i, va, n - i, wide);
}

/* y = cap tanh(x / cap). */
template <class T>
__global__ void
soft_cap_kernel(T *y, const T *x, float cap, uint64_t n, bool wide)
{
    uint64_t i = my_eight();
    float v[8];
    if (i >= n)
        return;
    load8(v, x + i, n - i, wide);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = cap * tanhf(v[j] / cap);
    store8(y + i, v, n - i, wide);
}

/* gelu(x) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form without its cancellation. */
SPW_DEVICE float
gelu_sigmoid(float x)
{
    float u2 = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return 1.0f / (1.0f + expf(-u2));
}

/* The derivative of gelu, where s is gelu_sigmoid(x). */
SPW_DEVICE float
gelu_slope(float x, float s)
{
    float du2 = 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x);
    return s + x * s * (1.0f - s) * du2;
}

/* The normal distribution up to x, without the cancellation that 1 + erf() has. */
SPW_DEVICE float
normal_share(float x)
{
    return 0.5f * erfcf(-0.70710678118654752f * x);
}

template <spw_curve kind>
SPW_DEVICE float
curve_at(float x)
{
    switch (kind) {
    case SPW_CURVE_GELU_ERF: return x * normal_share(x);
    case SPW_CURVE_RELU: return x <= 0.0f ? 0.0f : x;
    case SPW_CURVE_RELU_SQUARED: return x <= 0.0f ? 0.0f : x * x;
    default: return x * gelu_sigmoid(x);
    }
}

/* What comes back to x where d comes back to the curve. */
template <spw_curve kind>
SPW_DEVICE float
curve_back(float x, float d)
{
    switch (kind) {
    case SPW_CURVE_GELU_ERF: return d * (normal_share(x) + x * (0.39894228040143268f * expf(-0.5f * x * x)));
    case SPW_CURVE_RELU: return x <= 0.0f ? 0.0f : d;
    case SPW_CURVE_RELU_SQUARED: return x <= 0.0f ? 0.0f : d * (2.0f * x);
    default: return d * gelu_slope(x, gelu_sigmoid(x));
    }
}

template <class T, spw_curve kind>
__global__ void
curve_kernel(T *y, const T *x, uint64_t n, bool wide)
{
    uint64_t i = my_eight();
    float v[8];
    if (i >= n)
        return;
    load8(v, x + i, n - i, wide);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = curve_at<kind>(v[j]);
    store8(y + i, v, n - i, wide);
}

template <class T, spw_curve kind>
__global__ void
curve_backward_kernel(T *dx, const T *dy, const T *x, uint64_t n, bool add, bool wide)
{
    uint64_t i = my_eight();
    eight<T> of_x, of_dy, of_dx = {};
    float v[8], d[8], old[8];
    if (i >= n)
        return;
    load_eight(&of_x, x + i, n - i, wide);
    load_eight(&of_dy, dy + i, n - i, wide);
    if (add)
        load_eight(&of_dx, dx + i, n - i, wide);
    widen8(v, of_x);
    widen8(d, of_dy);
    widen8(old, of_dx);
#pragma unroll
    for (int j = 0; j < 8; j++)
        d[j] = old[j] + curve_back<kind>(v[j], d[j]);
    store8(dx + i, d, n - i, wide);
}

/* A thread's eight elements of M rows of C: false, there are none; row and the first's column. */
SPW_DEVICE bool
my_eight_of_row(uint64_t M, uint64_t C, uint64_t *row, uint64_t *col)
{
    uint64_t eights = (C + 7) / 8, i = my_eight() / 8;
    *row = M == 1 ? 0 : i / eights;
    *col = (i - *row * eights) * 8;
    return *row < M && *col < C;
}

/* A gate's sigmoid, of which silu and gelu are g times, or 1, of which a plain gate is; and the slope of what a gate multiplies by, where that is s. */
template <spw_gate kind>
SPW_DEVICE float
gate_sigmoid(float g)
{
    return kind == SPW_GATE_PLAIN ? 1.0f : kind == SPW_GATE_GELU ? gelu_sigmoid(g) : 1.0f / (1.0f + expf(-g));
}

template <spw_gate kind>
SPW_DEVICE float
gate_slope(float g, float s)
{
    switch (kind) {
    case SPW_GATE_GELU: return gelu_slope(g, s);
    case SPW_GATE_SIGMOID: return s * (1.0f - s);
    case SPW_GATE_PLAIN: return 1.0f;
    default: return s + g * s * (1.0f - s);
    }
}

/* A number no farther from 0 than where SPW_GATE_SILU_CLAMPED cuts it off, of others itself; comparisons let NaN through. */
template <spw_gate kind>
SPW_DEVICE float
cut_gate(float g)
{
    return kind == SPW_GATE_SILU_CLAMPED && g > SPW_GATE_SILU_LIMIT ? SPW_GATE_SILU_LIMIT : g;
}

template <spw_gate kind>
SPW_DEVICE float
cut_up(float u)
{
    return kind == SPW_GATE_SILU_CLAMPED && u < -SPW_GATE_SILU_LIMIT ? -SPW_GATE_SILU_LIMIT : cut_gate<kind>(u);
}

template <class T, spw_gate kind>
__global__ void
gate_mul_kernel(T *y, const T *gate, const T *up, uint64_t M, uint64_t C, uint64_t stride, bool wide)
{
    uint64_t row, col, n, i;
    eight<T> of_gate, of_up;
    float g[8], u[8];
    if (!my_eight_of_row(M, C, &row, &col))
        return;
    n = C - col;
    i = row * stride + col;
    load_eight(&of_gate, gate + i, n, wide);
    load_eight(&of_up, up + i, n, wide);
    widen8(g, of_gate);
    widen8(u, of_up);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        g[j] = cut_gate<kind>(g[j]);
        u[j] = cut_up<kind>(u[j]) *
               (kind == SPW_GATE_SIGMOID ? gate_sigmoid<kind>(g[j]) : g[j] * gate_sigmoid<kind>(g[j]));
    }
    store8(y + row * C + col, u, n, wide);
}

/* dgate and dup may each be NULL. */
template <class T, spw_gate kind>
__global__ void
gate_mul_backward_kernel(T *dgate, T *dup, const T *dy, const T *gate, const T *up, uint64_t M, uint64_t C,
                         uint64_t stride, bool add_gate, bool add_up, bool wide)
{
    uint64_t row, col, n, i;
    eight<T> of_gate, of_up, of_dy, of_dgate = {}, of_dup = {};
    float g[8], u[8], d[8], s[8], old[8], out[8];
    if (!my_eight_of_row(M, C, &row, &col))
        return;
    n = C - col;
    i = row * stride + col;
    load_eight(&of_gate, gate + i, n, wide);
    load_eight(&of_up, up + i, n, wide);
    load_eight(&of_dy, dy + row * C + col, n, wide);
    if (add_gate && dgate != NULL)
        load_eight(&of_dgate, dgate + i, n, wide);
    if (add_up && dup != NULL)
        load_eight(&of_dup, dup + i, n, wide);
    widen8(g, of_gate);
    widen8(u, of_up);
    widen8(d, of_dy);
#pragma unroll
    for (int j = 0; j < 8; j++)
        s[j] = gate_sigmoid<kind>(cut_gate<kind>(g[j]));
    if (dgate != NULL) {
        widen8(old, of_dgate);
#pragma unroll
        for (int j = 0; j < 8; j++)
            out[j] = old[j] +
                     (cut_gate<kind>(g[j]) < g[j] ? 0.0f : d[j] * cut_up<kind>(u[j]) * gate_slope<kind>(g[j], s[j]));
        store8(dgate + i, out, n, wide);
    }
    if (dup != NULL) {
        widen8(old, of_dup);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float of_gate = kind == SPW_GATE_SIGMOID ? d[j] * s[j] : d[j] * cut_gate<kind>(g[j]) * s[j];
            bool far = kind == SPW_GATE_SILU_CLAMPED && fabsf(u[j]) > SPW_GATE_SILU_LIMIT;
            out[j] = old[j] + (far ? 0.0f : of_gate);
        }
        store8(dup + i, out, n, wide);
    }
}

/* Pairs of a gate and an up in x. Comparisons let NaN through. */
template <class T>
SPW_DEVICE void
load_pairs(float *g, float *u, const T *x, uint64_t n, bool wide)
{
    float v[16];
    load8(v, x, 2 * n, wide);
    load8(v + 8, x + 8, n > 4 ? 2 * n - 8 : 0, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        g[j] = v[2 * j];
        u[j] = v[2 * j + 1];
    }
}

SPW_DEVICE float
clamped(float x, float low)
{
    return x > SPW_GATE_LIMIT ? SPW_GATE_LIMIT : x < low ? low : x;
}

template <class T>
__global__ void
clamped_mul_kernel(T *y, const T *x, uint64_t M, uint64_t C, uint64_t stride, bool wide)
{
    uint64_t row, col;
    float g[8], u[8];
    if (!my_eight_of_row(M, C, &row, &col))
        return;
    load_pairs(g, u, x + row * stride + 2 * col, C - col, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        g[j] = clamped(g[j], -INFINITY);
        u[j] = (clamped(u[j], -SPW_GATE_LIMIT) + 1.0f) * (g[j] / (1.0f + expf(-SPW_GATE_ALPHA * g[j])));
    }
    store8(y + row * C + col, u, C - col, wide);
}

template <class T>
__global__ void
clamped_mul_backward_kernel(T *dx, const T *dy, const T *x, uint64_t M, uint64_t C, uint64_t stride, bool add,
                            bool wide)
{
    uint64_t row, col, n;
    float g[8], u[8], d[8], out[16], old[16] = {0};
    if (!my_eight_of_row(M, C, &row, &col))
        return;
    n = C - col;
    dx += row * stride + 2 * col;
    load_pairs(g, u, x + row * stride + 2 * col, n, wide);
    load8(d, dy + row * C + col, n, wide);
    if (add) {
        load8(old, dx, 2 * n, wide);
        load8(old + 8, dx + 8, n > 4 ? 2 * n - 8 : 0, wide);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float cut = clamped(g[j], -INFINITY), s = 1.0f / (1.0f + expf(-SPW_GATE_ALPHA * cut));
        float slope = s + SPW_GATE_ALPHA * cut * s * (1.0f - s);
        bool high = g[j] > SPW_GATE_LIMIT, far = fabsf(u[j]) > SPW_GATE_LIMIT;
        out[2 * j] = old[2 * j] + (high ? 0.0f : d[j] * (clamped(u[j], -SPW_GATE_LIMIT) + 1.0f) * slope);
        out[2 * j + 1] = old[2 * j + 1] + (far ? 0.0f : d[j] * cut * s);
    }
    store8(dx, out, 2 * n, wide);
    store8(dx + 8, out + 8, n > 4 ? 2 * n - 8 : 0, wide);
}

/* The mask has the bits of the cpu device: word i % 4 of Philox(key, counter_hi, i / 4), i counted from first. */
template <class T>
__global__ void
dropout_kernel(T *y, const T *x, uint64_t n, float p, uint64_t key, uint64_t counter_hi, uint64_t first, bool wide)
{
    uint64_t i = my_eight(), at = first + i;
    float v[8], keep_scale = 1.0f / (1.0f - p);
    uint32_t r[8], all[12] = {0};
    if (i >= n)
        return;
    load8(v, x + i, n - i, wide);
    spw__philox(key, counter_hi, at / 4, all);
    spw__philox(key, counter_hi, at / 4 + 1, all + 4);
    if (at % 4 != 0)
        spw__philox(key, counter_hi, at / 4 + 2, all + 8);
#pragma unroll
    for (int j = 0; j < 8; j++) /* written out, because registers have no index */
        r[j] = at % 4 == 0 ? all[j] : at % 4 == 1 ? all[j + 1] : at % 4 == 2 ? all[j + 2] : all[j + 3];
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = (float)(r[j] >> 8) * (1.0f / 16777216.0f) < p ? 0.0f : v[j] * keep_scale;
    store8(y + i, v, n - i, wide);
}

#endif
