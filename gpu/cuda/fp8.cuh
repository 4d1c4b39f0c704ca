/*
 * 8-bit floats: what runtime/base/fp8.h says, bit for bit. Conversions are the hardware's where it has them, which is where its tensor cores take
 * the formats, and the same in whole numbers elsewhere. A transpose goes through shared memory in squares, so that both
 * arrays are written in pieces of 16 bytes.
 */
#ifndef SPW_CUDA_FP8_CUH
#define SPW_CUDA_FP8_CUH

#include "common.cuh"

enum { FP8_THREADS = 256, FP8_SQUARE = 64 };

/* FORMAT 0: E4M3, 1: E5M2; x is at most the format's greatest number and no NaN. */
template <int FORMAT>
SPW_DEVICE unsigned
fp8_code(float x)
{
    constexpr unsigned mantissa = FORMAT == 0 ? 3 : 2, bias = FORMAT == 0 ? 7 : 15, shift = 23 - mantissa;
    constexpr unsigned ones = (128 - bias + shift) << 23;
    unsigned u = __float_as_uint(x), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
    if (a < (128 - bias) << 23)
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(ones))) - ones);
    return sign | (((a + (1u << (shift - 1)) - 1 + (a >> shift & 1u)) >> shift) - ((127 - bias) << mantissa));
}

/* Four codes, the first in the lowest byte. */
template <int FORMAT>
SPW_DEVICE unsigned
fp8_pack4(const float *x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short lo, hi;
    if (FORMAT == 0) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x[3]), "f"(x[2]));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x[3]), "f"(x[2]));
    }
    return lo | (unsigned)hi << 16;
#else
    return fp8_code<FORMAT>(x[0]) | fp8_code<FORMAT>(x[1]) << 8 | fp8_code<FORMAT>(x[2]) << 16 |
           fp8_code<FORMAT>(x[3]) << 24;
#endif
}

/* Four elements as memory holds them; like eight of common.cuh they are widened after the last load. */
template <class E> struct four {
    uint2 bits;
};
template <> struct four<float> {
    float4 all;
};

SPW_DEVICE void
load_four(four<float> *f, const float *p, bool wide)
{
    if (wide) {
        SPW_NEED_ALIGNED(p, 16);
        f->all = *(const float4 *)p;
    } else {
        f->all = float4{p[0], p[1], p[2], p[3]};
    }
}

template <class E>
SPW_DEVICE void
load_four(four<E> *f, const E *p, bool wide)
{
    if (wide) {
        SPW_NEED_ALIGNED(p, 8);
        f->bits = *(const uint2 *)p;
    } else {
        f->bits = uint2{p[0].bits | (unsigned)p[1].bits << 16, p[2].bits | (unsigned)p[3].bits << 16};
    }
}

SPW_DEVICE void
widen4(float *v, const four<float> &f)
{
    v[0] = f.all.x, v[1] = f.all.y, v[2] = f.all.z, v[3] = f.all.w;
}

template <class E>
SPW_DEVICE void
widen4(float *v, const four<E> &f)
{
    unpack<E>(v, f.bits.x);
    unpack<E>(v + 2, f.bits.y);
}

/*
 * *scale, zero before, becomes the greatest of the scales of all blocks' greatest elements: scales never fall as elements grow, and a NaN's
 * bits are above all, so that one atomic maximum of bits does it, in any order.
 */
template <int FORMAT, class T>
SPW_KERNEL void
fp8_scale_kernel(unsigned *scale, const T *x, uint64_t n, bool wide)
{
    constexpr unsigned emax = FORMAT == 0 ? 8 : 15;
    __shared__ unsigned parts[32];
    unsigned greatest = 0, exponent;
    for (uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n;
         i += (uint64_t)gridDim.x * blockDim.x * 8) {
        float v[8];
        load8(v, x + i, n - i, wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            greatest = most(greatest, __float_as_uint(v[j]) & 0x7fffffffu);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        greatest = most(greatest, __shfl_xor_sync(0xffffffffu, greatest, d));
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = greatest;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (unsigned w = 1; w < blockDim.x / 32; w++)
        greatest = most(greatest, parts[w]);
    exponent = (greatest >> 23) + ((greatest & 0x7fffffu) > 0x600000u);
    exponent = exponent > emax + 1 ? exponent - emax : 1u;
    atomicMax(scale, greatest >= 0x7f800000u ? 0x7fc00000u : exponent << 23);
}

/*
 * Where the four codes lie that column 4 q + j of a square has in rows 4 r to 4 r + 3. A warp stores those of one j, of two r and of all q, and
 * loads those of two neighbouring columns, whose q is the same, and of all r: 32 banks both times.
 */
SPW_DEVICE unsigned
fp8_slot(unsigned j, unsigned r, unsigned q)
{
    return j * 256 + (r ^ (j & 1)) * 16 + (q ^ r);
}

/* A square of 64 by 64 of x (M,N), four by four for each thread: half a warp reads 64 elements and writes 64 codes in a row. */
template <int FORMAT, class T>
SPW_KERNEL void
fp8_encode_kernel(unsigned char *codes, unsigned char *turned, const float *scale, const T *x, uint64_t M, uint64_t N,
                  bool wide)
{
    __shared__ unsigned words[FP8_SQUARE * FP8_SQUARE / 4];
    unsigned tx = threadIdx.x % 16, ty = threadIdx.x / 16, u = __float_as_uint(*scale);
    uint64_t m0 = (uint64_t)blockIdx.y * FP8_SQUARE, n0 = (uint64_t)blockIdx.x * FP8_SQUARE;
    float inverse = u < 0x7f800000u ? __uint_as_float((254u << 23) - u) : 0.0f, v[4][4];
    bool there = m0 + ty * 4 < M && n0 + tx * 4 < N; /* all four by four or none */
    if (there) {
        four<T> of_x[4];
#pragma unroll
        for (unsigned i = 0; i < 4; i++)
            load_four(&of_x[i], x + (m0 + ty * 4 + i) * N + n0 + tx * 4, wide);
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            uint64_t at = (m0 + ty * 4 + i) * N + n0 + tx * 4;
            widen4(v[i], of_x[i]);
#pragma unroll
            for (int j = 0; j < 4; j++)
                v[i][j] = inverse > 0.0f ? __fmul_rn(v[i][j], inverse) : 0.0f;
            if (codes != NULL)
                *(unsigned *)(codes + at) = fp8_pack4<FORMAT>(v[i]);
        }
    }
    if (turned == NULL)
        return; /* the whole block */
    if (there) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float column[4] = {v[0][j], v[1][j], v[2][j], v[3][j]};
            words[fp8_slot((unsigned)j, ty, tx)] = fp8_pack4<FORMAT>(column);
        }
    }
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < 4; i++) { /* a half warp has a row of 64 bytes */
        unsigned column = ty + 16 * i;
        if (n0 + column < N && m0 + tx * 4 < M)
            *(unsigned *)(turned + (n0 + column) * M + m0 + tx * 4) = words[fp8_slot(column % 4, tx, column / 4)];
    }
}

/* codes (n, a multiple of 4) times their scale: exact in T where the scale is not at its ends. */
template <int FORMAT, class T>
SPW_KERNEL void
fp8_decode_kernel(T *y, const unsigned char *codes, const float *scale, uint64_t n)
{
    constexpr unsigned mantissa = FORMAT == 0 ? 3 : 2, bias = FORMAT == 0 ? 7 : 15;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned code, a;
    float v;
    if (i >= n)
        return;
    code = codes[i];
    a = code & 0x7fu;
    v = a >> mantissa == 0 ? __fmul_rn((float)a, __uint_as_float((128 - bias - mantissa) << 23))
                           : __uint_as_float((a << (23 - mantissa)) + ((127 - bias) << 23));
    narrow(y + i, __fmul_rn(code & 0x80u ? -v : v, *scale));
}

#endif
