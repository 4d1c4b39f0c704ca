/*
 * What every kernel of the cuda device uses: the element types, loads and stores of eight elements at a time, sums over a
 * block in a fixed order, Philox. All kernels compute in fp32 and round once, to nearest, when they store. The same text
 * compiles for the GPU and, against tests/emulate, for the CPU; what is written in PTX has its C twin beside it.
 */
#ifndef SPW_CUDA_COMMON_CUH
#define SPW_CUDA_COMMON_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* Shared memory whose size the launch gives. */
#ifdef SPW_EMULATED
#include "spw_base.h"
#define SPW_DYNAMIC_SHARED(name)   unsigned char *name = emulate::now.dynamic_shared
#define SPW_NEED_ALIGNED(p, bytes) emulate::need_aligned(p, bytes)
#else
#define SPW_NEED_ALIGNED(p, bytes) ((void)0)
#define SPW_DYNAMIC_SHARED(name)   extern __shared__ __align__(128) unsigned char name[]
#endif

#define SPW_DEVICE static __device__ __forceinline__
#ifdef SPW_EMULATED
#define SPW_KERNEL static
#else
#define SPW_KERNEL static __global__
#endif

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
template <class E> inline constexpr bool is_bf16 = false;
template <> inline constexpr bool is_bf16<bf16> = true;
template <class E> inline constexpr bool is_f16 = false;
template <> inline constexpr bool is_f16<f16> = true;

SPW_DEVICE float
widen(float x)
{
    return x;
}

SPW_DEVICE float
widen(bf16 x)
{
    return __uint_as_float((unsigned)x.bits << 16);
}

SPW_DEVICE float
widen(f16 x)
{
#ifdef SPW_EMULATED
    return spw_emulate_widen(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

/* Two floats to bf16, lo in the lower half. A GPU's conversions make one NaN of all, 0x7fff in 16 bits, unlike the host's. */
SPW_DEVICE unsigned
pack_bf16(float lo, float hi)
{
#ifdef SPW_EMULATED
    unsigned low = lo != lo ? 0x7fffu : spw_f32_to_bf16(lo), high = hi != hi ? 0x7fffu : spw_f32_to_bf16(hi);
    return low | high << 16;
#else
    unsigned u;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(hi), "f"(lo));
    return u;
#endif
}

SPW_DEVICE unsigned
pack_f16(float lo, float hi)
{
#ifdef SPW_EMULATED
    return spw_emulate_narrow(lo) | (unsigned)spw_emulate_narrow(hi) << 16;
#else
    unsigned u;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(hi), "f"(lo));
    return u;
#endif
}

/* Two elements of E. */
template <class E>
SPW_DEVICE unsigned
pack(float lo, float hi)
{
    return is_bf16<E> ? pack_bf16(lo, hi) : pack_f16(lo, hi);
}

SPW_DEVICE void
narrow(float *y, float x)
{
    *y = x;
}

SPW_DEVICE void
narrow(bf16 *y, float x)
{
    y->bits = (uint16_t)pack_bf16(x, 0.0f);
}

SPW_DEVICE void
narrow(f16 *y, float x)
{
#ifdef SPW_EMULATED
    y->bits = spw_emulate_narrow(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x));
#endif
}

/* 2^x in one instruction, of which exp2f() makes four to keep results that are denormal: 0 here. 2^0 is 1, 2^-inf is 0. */
SPW_DEVICE float
power_of_2(float x)
{
#ifdef SPW_EMULATED
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y; /* a NaN stays */
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* tanh(x) without a branch, within about 2e-7 of it: 1 less 2 / (1 + e^2x), which is 0 or 2 where the power ends. */
SPW_DEVICE float
quick_tanh(float x)
{
    float e = power_of_2(2.88539008177792681f * x);
#ifdef SPW_EMULATED
    return 1.0f - 2.0f / (1.0f + e);
#else
    return 1.0f - __fdividef(2.0f, 1.0f + e);
#endif
}

/* 1 / (1 + e^-x) without a branch, within about 3e-7 of itself. */
SPW_DEVICE float
quick_sigmoid(float x)
{
    float e = power_of_2(-1.44269504088896341f * x);
#ifdef SPW_EMULATED
    return 1.0f / (1.0f + e);
#else
    return __fdividef(1.0f, 1.0f + e);
#endif
}

template <class T>
SPW_DEVICE T
least(T a, T b)
{
    return a < b ? a : b;
}

template <class T>
SPW_DEVICE T
most(T a, T b)
{
    return a > b ? a : b;
}

/* ---------------------------------------------------------------- eight elements */

/*
 * As memory holds them. A kernel that reads several arrays loads from all before it widens what came from the first: between two loads with
 * a branch each, a use would wait for the first one, and the second could not begin before.
 */
template <class E> struct eight {
    uint4 bits;
};
template <> struct eight<float> {
    float4 low, high;
};

template <class E>
SPW_DEVICE void
unpack(float *v, unsigned u)
{
    E lo, hi;
    lo.bits = (uint16_t)u;
    hi.bits = (uint16_t)(u >> 16);
    v[0] = widen(lo);
    v[1] = widen(hi);
}

/*
 * Reads p[0 .. least(left, 8)), zeros behind. wide: p is aligned to 16 bytes, as far as whole eights are read.
 */
SPW_DEVICE void
load_eight(eight<float> *e, const float *p, uint64_t left, bool wide)
{
    if (wide && left >= 8) {
        SPW_NEED_ALIGNED(p, 16);
        e->low = *(const float4 *)p;
        e->high = *(const float4 *)(p + 4);
    } else {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = (uint64_t)i < left ? p[i] : 0.0f;
        e->low = float4{v[0], v[1], v[2], v[3]};
        e->high = float4{v[4], v[5], v[6], v[7]};
    }
}

/* bf16 and f16. */
template <class E>
SPW_DEVICE void
load_eight(eight<E> *e, const E *p, uint64_t left, bool wide)
{
    if (wide && left >= 8) {
        SPW_NEED_ALIGNED(p, 16);
        e->bits = *(const uint4 *)p;
    } else {
        unsigned u[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            u[i] = (uint64_t)i < left ? p[i].bits : 0;
        e->bits = uint4{u[0] | u[1] << 16, u[2] | u[3] << 16, u[4] | u[5] << 16, u[6] | u[7] << 16};
    }
}

SPW_DEVICE void
widen8(float *v, const eight<float> &e)
{
    v[0] = e.low.x, v[1] = e.low.y, v[2] = e.low.z, v[3] = e.low.w;
    v[4] = e.high.x, v[5] = e.high.y, v[6] = e.high.z, v[7] = e.high.w;
}

template <class E>
SPW_DEVICE void
widen8(float *v, const eight<E> &e)
{
    unpack<E>(v, e.bits.x);
    unpack<E>(v + 2, e.bits.y);
    unpack<E>(v + 4, e.bits.z);
    unpack<E>(v + 6, e.bits.w);
}

template <class E>
SPW_DEVICE void
load8(float *v, const E *p, uint64_t left, bool wide)
{
    eight<E> e;
    load_eight(&e, p, left, wide);
    widen8(v, e);
}

SPW_DEVICE void
store8(float *p, const float *v, uint64_t left, bool wide)
{
    if (wide && left >= 8) {
        SPW_NEED_ALIGNED(p, 16);
        *(float4 *)p = float4{v[0], v[1], v[2], v[3]};
        *(float4 *)(p + 4) = float4{v[4], v[5], v[6], v[7]};
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if ((uint64_t)i < left)
            p[i] = v[i];
}

template <class E>
SPW_DEVICE void
store8(E *p, const float *v, uint64_t left, bool wide)
{
    if (wide && left >= 8) {
        SPW_NEED_ALIGNED(p, 16);
        *(uint4 *)p = uint4{pack<E>(v[0], v[1]), pack<E>(v[2], v[3]), pack<E>(v[4], v[5]), pack<E>(v[6], v[7])};
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if ((uint64_t)i < left)
            narrow(p + i, v[i]);
}

/* What SPW_TERMS numbers in a row stand for. */
template <class T>
SPW_DEVICE float
sum_of_terms(const T *terms)
{
    return widen(terms[0]) + widen(terms[1]) + widen(terms[2]) + widen(terms[3]);
}

/* log(exp(a) + exp(b)) */
SPW_DEVICE float
log_of_sum(float a, float b)
{
    return fmaxf(a, b) + log1pf(expf(-fabsf(a - b)));
}

/* ---------------------------------------------------------------- sums */

SPW_DEVICE float
warp_sum(float v)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

/* The sum over a block, the same in every thread and from run to run. All threads call it. */
SPW_DEVICE float
block_sum(float v)
{
    __shared__ float parts[32];
    float sum = 0.0f;
    v = warp_sum(v);
    __syncthreads(); /* parts of the call before have been read */
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = v;
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / 32; w++)
        sum += parts[w];
    return sum;
}

SPW_DEVICE float
block_max(float v)
{
    __shared__ float parts[32];
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = parts[0];
    for (unsigned w = 1; w < blockDim.x / 32; w++)
        v = fmaxf(v, parts[w]);
    return v;
}

/* ---------------------------------------------------------------- random numbers */

#define SPW_PHILOX_FN SPW_DEVICE
#include "philox.h"

#endif
