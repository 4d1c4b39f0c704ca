/*
 * Vector kernels in plain C. Included once per instruction set with KERNELS set to the table's name: the compiler
 * vectorises the fixed lanes below with that file's flags. Sums run in 16 lanes, combined in a fixed order.
 */
#include "cpu_internal.h"
#include "fp8.h"
#include "philox.h"
#include <math.h>

#define LANES 16

/*
 * yes ? a : b, of bits. Of ?: compilers make a branch where one side is arithmetic, which may raise a flag, or a constant, with which they
 * go on by themselves; and where lanes have no masks, which is everywhere but in AVX-512, a branch is the end of vectors.
 */
static inline float
choose(bool yes, float a, float b)
{
    uint32_t mask = (uint32_t)0 - (uint32_t)yes;
    return spw_bits_f32((spw_f32_bits(a) & mask) | (spw_f32_bits(b) & ~mask));
}

/* e^x to about 2 ulp; saturates instead of overflowing into infinity or flushing below 1e-38; NaN stays NaN. */
static inline float
exp_fast(float x)
{
    float n, r, p, in = x;
    x = choose(x > -87.0f, x, -87.0f); /* a NaN too: it has no integer exponent */
    x = choose(x < 88.0f, x, 88.0f);
    n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return choose(in == in, p * spw_bits_f32((uint32_t)((int32_t)n + 127) << 23), in);
}

/* log(1 + e) for e from 0 to 1e9, to about 2 ulp: that of u = 1 + e as it is rounded, and what the rounding lost. */
static inline float
log1p_fast(float e)
{
    float u = 1.0f + e, n, m, p;
    uint32_t bits = spw_f32_bits(u) - 0x3f3504f3u; /* of the root of a half: m is between it and twice it */
    n = (float)((int32_t)bits >> 23);
    m = spw_bits_f32((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * m * m + n * -2.12194440e-4f - 0.5f * m * m;
    return (m + p) + n * 0.693359375f + (e - (u - 1.0f)) / u;
}

static inline float
sum_lanes(const float *lane)
{
    float s[LANES / 2];
    for (int i = 0; i < LANES / 2; i++)
        s[i] = lane[i] + lane[i + LANES / 2];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

static void
k_add(float *y, const float *a, const float *b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = a[i] + b[i];
}

static void
k_axpy(float *restrict y, float a, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] += a * x[i];
}

/* gelu(x) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form without its cancellation. */
static inline float
gelu_sigmoid(float x)
{
    float u2 = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return 1.0f / (1.0f + exp_fast(-u2));
}

/* The derivative of gelu, where s is gelu_sigmoid(x). */
static inline float
gelu_slope(float x, float s)
{
    float du2 = 1.5957691216057308f * (1.0f + 3.0f * 0.044715f * x * x);
    return s + x * s * (1.0f - s) * du2;
}

static void
k_gelu(float *restrict y, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = x[i] * gelu_sigmoid(x[i]);
}

/*
 * Gradients go through a block: made by a loop in which nothing but the elements decides, which is vectors, and then left on top of what
 * is there or in its place.
 */
typedef void curve_slopes(float *restrict d, const float *restrict dy, const float *restrict x, uint64_t n);
typedef void gate_slopes(float *restrict g, float *restrict u, const float *restrict dy, const float *restrict gate,
                         const float *restrict up, uint64_t n);
enum { BLOCK = 256 };

/* A block goes on top of what is at dx, or in its place; NULL: nowhere. */
static inline void
leave(float *dx, uint64_t at, const float *d, uint64_t n, bool acc)
{
    if (dx != NULL && acc)
        k_axpy(dx + at, 1.0f, d, n);
    else if (dx != NULL)
        memcpy(dx + at, d, n * sizeof *d);
}

/* dx may be dy. */
static inline void
curve_backward(curve_slopes *slopes, float *dx, const float *dy, const float *x, uint64_t n, bool acc)
{
    float d[BLOCK];
    for (uint64_t at = 0, count; at < n; at += count) {
        count = min_u64(n - at, BLOCK);
        slopes(d, dy + at, x + at, count);
        leave(dx, at, d, count, acc);
    }
}

static inline void
gate_backward(gate_slopes *slopes, float *dg, float *du, const float *dy, const float *gate, const float *up,
              uint64_t n, bool acc_g, bool acc_u)
{
    float g[BLOCK], u[BLOCK];
    for (uint64_t at = 0, count; at < n; at += count) {
        count = min_u64(n - at, BLOCK);
        slopes(g, u, dy + at, gate + at, up + at, count);
        leave(dg, at, g, count, acc_g);
        leave(du, at, u, count, acc_u);
    }
}

static void
gelu_slopes(float *restrict d, const float *restrict dy, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        d[i] = dy[i] * gelu_slope(x[i], gelu_sigmoid(x[i]));
}

static void
k_gelu_backward(float *dx, const float *dy, const float *x, uint64_t n, bool acc)
{
    curve_backward(gelu_slopes, dx, dy, x, n, acc);
}

/*
 * The normal distribution up to x, without the cancellation that 1 + erf() has; *bell is e^(-x^2/2). The tail over that is a smooth
 * function of t = 1 / (1 + 0.3 |x|) that begins with t: the polynomial is fitted to it, to 1e-7 of it.
 */
static inline float
normal_share(float x, float *bell)
{
    float t = 1.0f / (1.0f + 0.3f * fabsf(x)), p = -1.300960220e-2f;
    p = p * t + 7.539702207e-2f;
    p = p * t - 1.515306830e-1f;
    p = p * t + 1.035823599e-1f;
    p = p * t - 1.768214628e-2f;
    p = p * t + 6.905405223e-2f;
    p = p * t + 8.580539376e-2f;
    p = p * t + 1.090212166e-1f;
    p = p * t + 1.196797267e-1f;
    p = p * t + 1.196826994e-1f;
    *bell = exp_fast(-0.5f * x * x);
    p = *bell * (p * t);
    return choose(x < 0.0f, p, 1.0f - p);
}

static void
k_gelu_erf(float *restrict y, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float bell;
        y[i] = x[i] * normal_share(x[i], &bell);
    }
}

static void
gelu_erf_slopes(float *restrict d, const float *restrict dy, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float bell, share = normal_share(x[i], &bell);
        d[i] = dy[i] * (share + x[i] * (0.39894228040143268f * bell));
    }
}

static void
k_gelu_erf_backward(float *dx, const float *dy, const float *x, uint64_t n, bool acc)
{
    curve_backward(gelu_erf_slopes, dx, dy, x, n, acc);
}

static void
k_relu(float *restrict y, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = x[i] <= 0.0f ? 0.0f : x[i];
}

static void
k_relu_backward(float *dx, const float *dy, const float *x, uint64_t n, bool acc)
{
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; i++) {
        float d = x[i] <= 0.0f ? 0.0f : dy[i];
        dx[i] = acc ? dx[i] + d : d;
    }
}

static void
k_relu_squared(float *restrict y, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = x[i] <= 0.0f ? 0.0f : x[i] * x[i];
}

static void
k_relu_squared_backward(float *dx, const float *dy, const float *x, uint64_t n, bool acc)
{
#pragma GCC ivdep
    for (uint64_t i = 0; i < n; i++) {
        float d = x[i] <= 0.0f ? 0.0f : dy[i] * (2.0f * x[i]);
        dx[i] = acc ? dx[i] + d : d;
    }
}

static void
k_silu_mul(float *restrict y, const float *restrict gate, const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
}

static void
silu_mul_slopes(float *restrict g, float *restrict u, const float *restrict dy, const float *restrict gate,
                const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float s = 1.0f / (1.0f + exp_fast(-gate[i]));
        g[i] = dy[i] * up[i] * (s + gate[i] * s * (1.0f - s));
        u[i] = dy[i] * gate[i] * s;
    }
}

static void
k_silu_mul_backward(float *dg, float *du, const float *dy, const float *gate, const float *up, uint64_t n, bool acc_g,
                    bool acc_u)
{
    gate_backward(silu_mul_slopes, dg, du, dy, gate, up, n, acc_g, acc_u);
}

static void
k_gelu_mul(float *restrict y, const float *restrict gate, const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = gate[i] * gelu_sigmoid(gate[i]) * up[i];
}

static void
gelu_mul_slopes(float *restrict g, float *restrict u, const float *restrict dy, const float *restrict gate,
                const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float s = gelu_sigmoid(gate[i]);
        g[i] = dy[i] * up[i] * gelu_slope(gate[i], s);
        u[i] = dy[i] * gate[i] * s;
    }
}

static void
k_gelu_mul_backward(float *dg, float *du, const float *dy, const float *gate, const float *up, uint64_t n, bool acc_g,
                    bool acc_u)
{
    gate_backward(gelu_mul_slopes, dg, du, dy, gate, up, n, acc_g, acc_u);
}

static void
k_sigmoid_mul(float *restrict y, const float *restrict gate, const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = up[i] / (1.0f + exp_fast(-gate[i]));
}

static void
sigmoid_mul_slopes(float *restrict g, float *restrict u, const float *restrict dy, const float *restrict gate,
                   const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float s = 1.0f / (1.0f + exp_fast(-gate[i]));
        g[i] = dy[i] * up[i] * s * (1.0f - s);
        u[i] = dy[i] * s;
    }
}

static void
k_sigmoid_mul_backward(float *dg, float *du, const float *dy, const float *gate, const float *up, uint64_t n,
                       bool acc_g, bool acc_u)
{
    gate_backward(sigmoid_mul_slopes, dg, du, dy, gate, up, n, acc_g, acc_u);
}

/* Comparisons let NaN through. */
static void
k_silu_clamped_mul(float *restrict y, const float *restrict gate, const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float g = choose(gate[i] > SPW_GATE_SILU_LIMIT, SPW_GATE_SILU_LIMIT, gate[i]);
        float u = choose(fabsf(up[i]) > SPW_GATE_SILU_LIMIT, copysignf(SPW_GATE_SILU_LIMIT, up[i]), up[i]);
        y[i] = g / (1.0f + exp_fast(-g)) * u;
    }
}

static void
silu_clamped_slopes(float *restrict dg, float *restrict du, const float *restrict dy, const float *restrict gate,
                    const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        bool high = gate[i] > SPW_GATE_SILU_LIMIT, far = fabsf(up[i]) > SPW_GATE_SILU_LIMIT;
        float g = choose(high, SPW_GATE_SILU_LIMIT, gate[i]);
        float u = choose(far, copysignf(SPW_GATE_SILU_LIMIT, up[i]), up[i]);
        float s = 1.0f / (1.0f + exp_fast(-g));
        dg[i] = choose(high, 0.0f, dy[i] * u * (s + g * s * (1.0f - s)));
        du[i] = choose(far, 0.0f, dy[i] * g * s);
    }
}

static void
k_silu_clamped_mul_backward(float *dg, float *du, const float *dy, const float *gate, const float *up, uint64_t n,
                            bool acc_g, bool acc_u)
{
    gate_backward(silu_clamped_slopes, dg, du, dy, gate, up, n, acc_g, acc_u);
}

static void
k_plain_mul(float *restrict y, const float *restrict gate, const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = gate[i] * up[i];
}

static void
plain_mul_slopes(float *restrict g, float *restrict u, const float *restrict dy, const float *restrict gate,
                 const float *restrict up, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        g[i] = dy[i] * up[i];
        u[i] = dy[i] * gate[i];
    }
}

static void
k_plain_mul_backward(float *dg, float *du, const float *dy, const float *gate, const float *up, uint64_t n, bool acc_g,
                     bool acc_u)
{
    gate_backward(plain_mul_slopes, dg, du, dy, gate, up, n, acc_g, acc_u);
}

/* Pairs of a gate and an up in x. Comparisons let NaN through. */
static void
k_clamped_mul(float *restrict y, const float *restrict x, const float *restrict up, uint64_t n)
{
    (void)up;
    for (uint64_t i = 0; i < n; i++) {
        float g = choose(x[2 * i] > SPW_GATE_LIMIT, SPW_GATE_LIMIT, x[2 * i]), u = x[2 * i + 1];
        u = choose(fabsf(u) > SPW_GATE_LIMIT, copysignf(SPW_GATE_LIMIT, u), u);
        y[i] = (u + 1.0f) * (g / (1.0f + exp_fast(-SPW_GATE_ALPHA * g)));
    }
}

static void
clamped_slopes(float *restrict d, const float *restrict dy, const float *restrict x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        bool high = x[2 * i] > SPW_GATE_LIMIT, far = fabsf(x[2 * i + 1]) > SPW_GATE_LIMIT;
        float g = choose(high, SPW_GATE_LIMIT, x[2 * i]);
        float u = choose(far, copysignf(SPW_GATE_LIMIT, x[2 * i + 1]), x[2 * i + 1]);
        float s = 1.0f / (1.0f + exp_fast(-SPW_GATE_ALPHA * g));
        d[2 * i] = choose(high, 0.0f, dy[i] * (u + 1.0f) * (s + SPW_GATE_ALPHA * g * s * (1.0f - s)));
        d[2 * i + 1] = choose(far, 0.0f, dy[i] * g * s);
    }
}

static void
k_clamped_mul_backward(float *dx, float *du, const float *dy, const float *x, const float *up, uint64_t n, bool acc,
                       bool acc_u)
{
    float d[2 * BLOCK];
    (void)du;
    (void)up;
    (void)acc_u;
    for (uint64_t at = 0, count; at < n; at += count) {
        count = min_u64(n - at, BLOCK);
        clamped_slopes(d, dy + at, x + 2 * at, count);
        leave(dx, 2 * at, d, 2 * count, acc);
    }
}

static float
k_sum(const float *x, uint64_t n)
{
    float lane[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += x[i + j];
    for (int j = 0; i < n; i++, j++)
        lane[j] += x[i];
    return sum_lanes(lane);
}

static float
k_dot(const float *x, const float *y, uint64_t n)
{
    float lane[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += x[i + j] * y[i + j];
    for (int j = 0; i < n; i++, j++)
        lane[j] += x[i] * y[i];
    return sum_lanes(lane);
}

static void
k_dot4(float *restrict out, const float *restrict x, uint64_t stride, const float *restrict y, uint64_t n)
{
    float a[LANES] = {0}, b[LANES] = {0}, c[LANES] = {0}, d[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            a[j] += x[i + j] * y[i + j];
            b[j] += x[stride + i + j] * y[i + j];
            c[j] += x[2 * stride + i + j] * y[i + j];
            d[j] += x[3 * stride + i + j] * y[i + j];
        }
    for (int j = 0; i < n; i++, j++) {
        a[j] += x[i] * y[i];
        b[j] += x[stride + i] * y[i];
        c[j] += x[2 * stride + i] * y[i];
        d[j] += x[3 * stride + i] * y[i];
    }
    out[0] = sum_lanes(a);
    out[1] = sum_lanes(b);
    out[2] = sum_lanes(c);
    out[3] = sum_lanes(d);
}

static float
sumsq_around(const float *x, float mean, uint64_t n)
{
    float lane[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            lane[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (int j = 0; i < n; i++, j++)
        lane[j] += (x[i] - mean) * (x[i] - mean);
    return sum_lanes(lane);
}

static void
k_layernorm_row(float *restrict y, float *mean, float *rstd, const float *restrict x, const float *restrict g,
                const float *restrict b, uint64_t C, float eps)
{
    float mu = k_sum(x, C) / (float)C;
    float r = 1.0f / sqrtf(sumsq_around(x, mu, C) / (float)C + eps);
    for (uint64_t i = 0; i < C && b != NULL; i++)
        y[i] = (x[i] - mu) * r * g[i] + b[i];
    for (uint64_t i = 0; i < C && b == NULL; i++)
        y[i] = (x[i] - mu) * r * g[i];
    *mean = mu;
    *rstd = r;
}

static void
k_layernorm_dx_row(float *dx, const float *onto, const float *dy, const float *x, const float *g, float mean,
                   float rstd, uint64_t C)
{
    float b[LANES] = {0}, ma = k_dot(dy, g, C) / (float)C, mb; /* compilers make no vectors of two sums in one loop */
    uint64_t i = 0;
    for (; i + LANES <= C; i += LANES)
        for (int j = 0; j < LANES; j++)
            b[j] += dy[i + j] * g[i + j] * ((x[i + j] - mean) * rstd);
    for (int j = 0; i < C; i++, j++)
        b[j] += dy[i] * g[i] * ((x[i] - mean) * rstd);
    mb = sum_lanes(b) / (float)C;
#pragma GCC ivdep
    for (i = 0; i < C; i++) {
        float d = (dy[i] * g[i] - ma - (x[i] - mean) * rstd * mb) * rstd;
        dx[i] = onto != NULL ? onto[i] + d : d;
    }
}

/* With g NULL each is compiled for itself: a test in the loops would keep them from being vectors. */
static inline __attribute__((always_inline)) void
rmsnorm_row(float *restrict y, float *rstd, const float *restrict x, const float *restrict g, float offset, uint64_t C,
            float eps)
{
    float r = 1.0f / sqrtf(k_dot(x, x, C) / (float)C + eps);
    for (uint64_t i = 0; i < C; i++)
        y[i] = x[i] * r * (g != NULL ? offset + g[i] : offset);
    *rstd = r;
}

static void
k_rmsnorm_row(float *y, float *rstd, const float *x, const float *g, float offset, uint64_t C, float eps)
{
    if (g != NULL)
        rmsnorm_row(y, rstd, x, g, offset, C, eps);
    else
        rmsnorm_row(y, rstd, x, NULL, offset, C, eps);
}

static inline __attribute__((always_inline)) void
rmsnorm_dx_row(float *dx, const float *onto, const float *dy, const float *x, const float *g, float offset, float rstd,
               uint64_t C)
{
    float b[LANES] = {0}, mb;
    uint64_t i = 0;
    for (; i + LANES <= C; i += LANES)
        for (int j = 0; j < LANES; j++)
            b[j] += dy[i + j] * (g != NULL ? offset + g[i + j] : offset) * (x[i + j] * rstd);
    for (int j = 0; i < C; i++, j++)
        b[j] += dy[i] * (g != NULL ? offset + g[i] : offset) * (x[i] * rstd);
    mb = sum_lanes(b) / (float)C;
#pragma GCC ivdep
    for (i = 0; i < C; i++) {
        float d = (dy[i] * (g != NULL ? offset + g[i] : offset) - x[i] * rstd * mb) * rstd;
        dx[i] = onto != NULL ? onto[i] + d : d;
    }
}

static void
k_rmsnorm_dx_row(float *dx, const float *onto, const float *dy, const float *x, const float *g, float offset,
                 float rstd, uint64_t C)
{
    if (g != NULL)
        rmsnorm_dx_row(dx, onto, dy, x, g, offset, rstd, C);
    else
        rmsnorm_dx_row(dx, onto, dy, x, NULL, offset, rstd, C);
}

static void
k_norm_dg_row(float *restrict dg, const float *restrict dy, const float *restrict x, float mean, float rstd, uint64_t C)
{
    for (uint64_t i = 0; i < C; i++)
        dg[i] += dy[i] * ((x[i] - mean) * rstd);
}

static void
k_axpy4(float *restrict y, const float *restrict a, const float *restrict x, uint64_t stride, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = (((y[i] + a[0] * x[i]) + a[1] * x[stride + i]) + a[2] * x[2 * stride + i]) + a[3] * x[3 * stride + i];
}

static void
k_scale(float *y, float a, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] *= a;
}

/* A NaN anywhere gives NaN: it must reach the loss, not vanish in a comparison. */
static inline float
greater(float a, float b)
{
    return choose(a >= b || a != a, a, b);
}

static float
k_max(const float *x, uint64_t n)
{
    enum { MANY = 2 * LANES }; /* fewer are unrolled whole, and then compilers find no vectors in them */
    float lane[MANY], m = -INFINITY;
    uint64_t i = 0;
    for (int j = 0; j < MANY; j++)
        lane[j] = -INFINITY;
    for (; i + MANY <= n; i += MANY)
        for (int j = 0; j < MANY; j++)
            lane[j] = greater(lane[j], x[i + j]);
    for (; i < n; i++)
        m = greater(m, x[i]);
    for (int j = 0; j < MANY; j++)
        m = greater(m, lane[j]);
    return m;
}

static float
k_exp_sum(float *y, const float *x, float shift, uint64_t n)
{
    float lane[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float e = exp_fast(x[i + j] - shift);
            y[i + j] = e;
            lane[j] += e;
        }
    for (int j = 0; i < n; i++, j++) {
        y[i] = exp_fast(x[i] - shift);
        lane[j] += y[i];
    }
    return sum_lanes(lane);
}

static void
k_softmax_grad_row(float *p_out, float *ds_out, const float *s, const float *dp, float lse, float d, float scale,
                   uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float p = exp_fast(s[i] - lse);
        p_out[i] = p;
        ds_out[i] = p * (dp[i] - d) * scale;
    }
}

/* To about 2 ulp: near 0, where 1 - 2 / (e^2x + 1) cancels, by Cephes' polynomial. NaN stays NaN. */
static inline float
tanh_fast(float x)
{
    float a = fabsf(x), z = x * x, p = -5.70498872745e-3f, far;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    far = copysignf(1.0f - 2.0f / (exp_fast(2.0f * a) + 1.0f), x);
    return choose(a < 0.625f, p * z * x + x, far);
}

static void
k_soft_cap(float *x, float cap, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        x[i] = cap * tanh_fast(x[i] / cap);
}

static void
k_soft_cap_backward(float *restrict dx, const float *restrict y, float d, float cap, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        dx[i] = (dx[i] - d) * (1.0f - (y[i] / cap) * (y[i] / cap));
}

/* Four elements share a counter: a block's words first. */
static void
k_dropout(float *y, const float *x, uint64_t n, float p, uint64_t key, uint64_t counter, uint64_t first)
{
    const float keep_scale = 1.0f / (1.0f - p);
    for (uint64_t at = 0, count; at < n; at += count) {
        uint32_t words[BLOCK];
        uint64_t skip = (first + at) % 4;
        count = min_u64(n - at, BLOCK - skip);
        for (uint64_t i = 0; i < (skip + count + 3) / 4; i++) {
            uint32_t r[4];
            spw__philox(key, counter, (first + at) / 4 + i, r);
            for (int j = 0; j < 4; j++)
                words[4 * i + (uint64_t)j] = r[j];
        }
#pragma GCC ivdep
        for (uint64_t i = 0; i < count; i++)
            y[at + i] = choose(spw_uniform_f32(words[skip + i]) < p, 0.0f, x[at + i] * keep_scale);
    }
}

static void
k_rope_row(float *restrict x, const float *restrict cos_sin, uint64_t half, float sign)
{
    for (uint64_t j = 0; j < half; j++) {
        float a = x[j], b = x[j + half], c = cos_sin[j], s = sign * cos_sin[j + half];
        x[j] = a * c - b * s;
        x[j + half] = b * c + a * s;
    }
}

static void
k_conv(float *restrict u, const float *const *x, const float *w, uint64_t taps, uint64_t n)
{
    memset(u, 0, n * sizeof *u);
    for (uint64_t j = 0; j < taps; j++) {
        const float *xj = x[j], *wj = w + j * n;
        if (xj == NULL)
            continue;
        for (uint64_t i = 0; i < n; i++)
            u[i] += wj[i] * xj[i];
    }
}

static void
k_silu(float *restrict y, const float *restrict u, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] = u[i] / (1.0f + exp_fast(-u[i]));
}

static void
k_silu_backward(float *restrict du, const float *restrict dy, const float *restrict u, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float s = 1.0f / (1.0f + exp_fast(-u[i]));
        du[i] = dy[i] * (s + u[i] * s * (1.0f - s));
    }
}

static void
k_mul_add(float *restrict y, const float *restrict a, const float *restrict b, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        y[i] += a[i] * b[i];
}

static void
k_decays(float *restrict y, const float *restrict a, const float *restrict bias, float rate, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float x = a[i] + bias[i], step = choose(x > 20.0f, x, log1p_fast(exp_fast(choose(x > 20.0f, 20.0f, x))));
        float log_decay = -rate * choose(x == x, step, x);
        y[i] = choose(log_decay < -87.0f, 0.0f, exp_fast(log_decay));
    }
}

/* A row's decay, a lane's, or one of all: by_row and by_lane are NULL but for one, and known where this is compiled into its callers. */
static inline float
decay_of(float decay, const float *by_row, const float *by_lane, uint64_t r, int j)
{
    return by_row != NULL ? by_row[r] : by_lane != NULL ? by_lane[j] : decay;
}

/* Two sums for even and odd rows, so that additions wait less for each other. */
static inline __attribute__((always_inline)) void
state_forward(float *restrict state, uint64_t rows, float decay, const float *by_row, const float *by_lane,
              const float *x, const float *lanes, const float *y, float *restrict out, const float *z,
              float *restrict next)
{
    float a[2][CPU_STATE_LANES] = {{0}}, b[2][CPU_STATE_LANES] = {{0}}, u[CPU_STATE_LANES];
    memcpy(u, lanes, sizeof u);
    for (uint64_t r = 0; r < rows; r += 2)
        for (int h = 0; h < 2; h++) {
            float *s = state + (r + (uint64_t)h) * CPU_STATE_LANES;
            float xr = x[r + (uint64_t)h], yr = y[r + (uint64_t)h], zr = z[r + (uint64_t)h];
            for (int j = 0; j < CPU_STATE_LANES; j++) {
                s[j] = decay_of(decay, by_row, by_lane, r + (uint64_t)h, j) * s[j] + xr * u[j];
                a[h][j] += yr * s[j];
                b[h][j] += zr * s[j];
            }
        }
    for (int j = 0; j < CPU_STATE_LANES; j++) {
        out[j] = a[0][j] + a[1][j];
        next[j] = b[0][j] + b[1][j];
    }
}

static void
k_state_forward(float *restrict state, uint64_t rows, float decay, const float *x, const float *lanes, const float *y,
                float *restrict out, const float *z, float *restrict next)
{
    state_forward(state, rows, decay, NULL, NULL, x, lanes, y, out, z, next);
}

static void
k_state_forward_by(float *restrict state, uint64_t rows, const float *by_row, const float *by_lane, const float *x,
                   const float *lanes, const float *y, float *restrict out, const float *z, float *restrict next)
{
    float own[CPU_STATE_LANES];
    if (by_row != NULL) {
        state_forward(state, rows, 0, by_row, NULL, x, lanes, y, out, z, next);
        return;
    }
    memcpy(own, by_lane, sizeof own);
    state_forward(state, rows, 0, NULL, own, x, lanes, y, out, z, next);
}

static inline __attribute__((always_inline)) void
state_backward(float *restrict state, uint64_t rows, float decay, const float *by_row, const float *by_lane,
               const float *x, const float *lanes, const float *x2, const float *lanes2, const float *y,
               float *restrict out)
{
    float a[2][CPU_STATE_LANES] = {{0}}, u[CPU_STATE_LANES], v[CPU_STATE_LANES];
    memcpy(u, lanes, sizeof u);
    memcpy(v, lanes2, sizeof v);
    for (uint64_t r = 0; r < rows; r += 2)
        for (int h = 0; h < 2; h++) {
            float *s = state + (r + (uint64_t)h) * CPU_STATE_LANES;
            float xr = x[r + (uint64_t)h], wr = x2[r + (uint64_t)h], yr = y[r + (uint64_t)h];
            for (int j = 0; j < CPU_STATE_LANES; j++) {
                s[j] = decay_of(decay, by_row, by_lane, r + (uint64_t)h, j) * (s[j] + xr * u[j]) + wr * v[j];
                a[h][j] += yr * s[j];
            }
        }
    for (int j = 0; j < CPU_STATE_LANES; j++)
        out[j] = a[0][j] + a[1][j];
}

static void
k_state_backward(float *restrict state, uint64_t rows, float decay, const float *x, const float *lanes, const float *x2,
                 const float *lanes2, const float *y, float *restrict out)
{
    state_backward(state, rows, decay, NULL, NULL, x, lanes, x2, lanes2, y, out);
}

static void
k_state_backward_by(float *restrict state, uint64_t rows, const float *by_row, const float *by_lane, const float *x,
                    const float *lanes, const float *x2, const float *lanes2, const float *y, float *restrict out)
{
    float own[CPU_STATE_LANES];
    if (by_row != NULL) {
        state_backward(state, rows, 0, by_row, NULL, x, lanes, x2, lanes2, y, out);
        return;
    }
    memcpy(own, by_lane, sizeof own);
    state_backward(state, rows, 0, NULL, own, x, lanes, x2, lanes2, y, out);
}

static void
k_to_fp8(uint8_t *restrict codes, spw_fp8 format, const float *restrict x, float inverse, uint64_t n)
{
    if (format == SPW_E4M3)
        for (uint64_t i = 0; i < n; i++)
            codes[i] = spw_f32_to_fp8(SPW_E4M3, x[i] * inverse);
    else
        for (uint64_t i = 0; i < n; i++)
            codes[i] = spw_f32_to_fp8(SPW_E5M2, x[i] * inverse);
}

static double
k_sumsq(const float *x, uint64_t n)
{
    return spw_sumsq(x, n);
}

const cpu_kernels KERNELS = {k_add,
                             {k_gelu, k_gelu_erf, k_relu, k_relu_squared},
                             {k_gelu_backward, k_gelu_erf_backward, k_relu_backward, k_relu_squared_backward},
                             {k_silu_mul, k_gelu_mul, k_sigmoid_mul, k_silu_clamped_mul, k_plain_mul, k_clamped_mul},
                             {k_silu_mul_backward, k_gelu_mul_backward, k_sigmoid_mul_backward,
                              k_silu_clamped_mul_backward, k_plain_mul_backward, k_clamped_mul_backward},
                             k_layernorm_row,
                             k_layernorm_dx_row,
                             k_rmsnorm_row,
                             k_rmsnorm_dx_row,
                             k_norm_dg_row,
                             k_axpy,
                             k_axpy4,
                             k_scale,
                             k_max,
                             k_dot,
                             k_dot4,
                             k_exp_sum,
                             k_softmax_grad_row,
                             k_soft_cap,
                             k_soft_cap_backward,
                             k_dropout,
                             k_rope_row,
                             k_conv,
                             k_silu,
                             k_silu_backward,
                             k_mul_add,
                             k_state_forward,
                             k_state_backward,
                             k_state_forward_by,
                             k_state_backward_by,
                             k_decays,
                             k_sumsq,
                             k_to_fp8};
