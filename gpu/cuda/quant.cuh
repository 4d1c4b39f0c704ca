/*
 * Block codes: what runtime/base/quant.h says, operation for operation, so that a device makes the host's bytes. A warp has a block of
 * 128 elements, each thread four of them.
 */
#ifndef SPW_CUDA_QUANT_CUH
#define SPW_CUDA_QUANT_CUH

#include "common.cuh"
#include "spw_codes.h"

enum { QUANT_BLOCK = SPW_QUANT_BLOCK, QUANT_HALF = 64, WARP = 32 };

/* Bytes of a block with its scale. */
template <int BITS> constexpr int quant_step = 4 + QUANT_BLOCK *BITS / 8;

/* Which element of the block a thread's j-th is: 8 bits: four in a row; 4 bits: two, and two that share their bytes. */
template <int BITS>
SPW_DEVICE unsigned
quant_element(unsigned lane, int j)
{
    return BITS == 8 ? 4 * lane + j : 2 * lane + j % 2 + QUANT_HALF * (j / 2);
}

template <int BITS, class T>
SPW_KERNEL void
encode_kernel(unsigned char *codes, const T *x, uint64_t blocks)
{
    uint64_t block = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    unsigned lane = threadIdx.x % WARP, greatest = 0, code[4];
    unsigned char *out = codes + block * quant_step<BITS>;
    float v[4], scale, inverse;
    if (block >= blocks)
        return; /* the whole warp */
    for (int j = 0; j < 4; j++) {
        v[j] = widen(x[block * QUANT_BLOCK + quant_element<BITS>(lane, j)]);
        greatest = most(greatest, __float_as_uint(v[j]) & 0x7fffffffu);
    }
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2)
        greatest = most(greatest, __shfl_xor_sync(0xffffffffu, greatest, d));
    scale = __fdiv_rn(__uint_as_float(greatest), BITS == 8 ? 127.0f : 7.0f);
    scale = most(scale, 0x1p-126f);
    scale = BITS == 8 ? least(scale, 0x1.020406p+121f) : scale;
    inverse = __fdiv_rn(1.0f, scale);
    for (int j = 0; j < 4; j++)
        code[j] = greatest < 0x7f800000u ? __float_as_uint(__fadd_rn(__fmul_rn(v[j], inverse), 12582912.0f)) : 0;
    if (lane == 0)
        *(unsigned *)out = greatest < 0x7f800000u ? __float_as_uint(scale) : 0x7fc00000u;
    if (BITS == 8)
        ((unsigned *)out)[1 + lane] = (code[0] & 255u) | (code[1] & 255u) << 8 | (code[2] & 255u) << 16 | code[3] << 24;
    else
        ((uint16_t *)out)[2 + lane] =
            (uint16_t)((code[0] & 15u) | (code[2] & 15u) << 4 | (code[1] & 15u) << 8 | code[3] << 12);
}

template <int BITS, class T>
SPW_KERNEL void
decode_kernel(T *x, const unsigned char *codes, uint64_t blocks)
{
    uint64_t block = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    unsigned lane = threadIdx.x % WARP, scale, bits;
    const unsigned char *in = codes + block * quant_step<BITS>;
    if (block >= blocks)
        return;
    scale = *(const unsigned *)in;
    bits = BITS == 8 ? ((const unsigned *)in)[1 + lane] : ((const uint16_t *)in)[2 + lane];
    for (int j = 0; j < 4; j++) {
        unsigned place = BITS == 8 ? 8 * j : j % 2 * 8 + j / 2 * 4;
        int code = BITS == 8 ? (int)(int8_t)(bits >> place) : (int)((bits >> place & 15u) ^ 8u) - 8;
        float y = __fmul_rn((float)code, __uint_as_float(scale));
        narrow(x + block * QUANT_BLOCK + quant_element<BITS>(lane, j),
               scale == 0x7fc00000u ? __uint_as_float(scale) : y);
    }
}

/* ---------------------------------------------------------------- published forms (spw_codes.h) */

struct published {
    unsigned begin, step; /* bytes: of a block, its codes begin there, and the next block */
    unsigned group, scale_bytes;
    bool floats, rounds;
};

/* That of group g of a block. */
SPW_DEVICE float
published_scale(const unsigned char *block, const published &p, unsigned g)
{
    if (p.scale_bytes == 1)
        return __uint_as_float(block[g] > 0 ? (unsigned)block[g] << 23 : 1u << 22);
    if (p.scale_bytes == 2)
        return __uint_as_float((unsigned)((const uint16_t *)block)[g] << 16);
    return ((const float *)block)[g];
}

/* Floats of few bits are those of fp32 with another bias: what lies below their least exponent too, as long as nothing is flushed to zero. */
template <int BITS>
SPW_DEVICE float
published_value(unsigned code, bool floats)
{
    const unsigned sign = 1u << (BITS - 1), magnitude = code & (sign - 1);
    if (!floats)
        return (float)((int)(code ^ sign) - (int)sign);
    return __uint_as_float(__float_as_uint(__fmul_rn(__uint_as_float(magnitude << (BITS == 8 ? 20 : 22)),
                                                     BITS == 8 ? 0x1p120f : 0x1p126f)) |
                           (code & sign) << (32 - BITS));
}

template <int BITS, class T>
SPW_KERNEL void
decode_published_kernel(T *x, const unsigned char *codes, published p, uint64_t blocks)
{
    uint64_t block = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    unsigned lane = threadIdx.x % WARP, bits;
    const unsigned char *in = codes + block * p.step, *from = in + p.begin;
    if (block >= blocks)
        return;
    bits = BITS == 8 ? ((const unsigned *)from)[lane] : ((const uint16_t *)from)[lane];
    for (int j = 0; j < 4; j++) {
        const unsigned place = BITS == 8 ? 8 * j : j % 2 * 8 + j / 2 * 4, element = quant_element<BITS>(lane, j);
        float y = __fmul_rn(published_value<BITS>(bits >> place & ((1u << BITS) - 1), p.floats),
                            published_scale(in, p, element / p.group));
        if (p.rounds)
            y = __uint_as_float((__float_as_uint(y) + 0x8000u) & 0xffff0000u);
        narrow(x + block * QUANT_BLOCK + element, y);
    }
}

/* Strips (spw_codes.h) of cols columns, a multiple of 4: four elements of a row. */
template <class T>
SPW_KERNEL void
decode_strips_kernel(T *x, const unsigned char *codes, unsigned cols, bool rounds, uint64_t n)
{
    const uint64_t at = 4 * ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x), strip = at / (32 * cols);
    const unsigned in_strip = (unsigned)(at - strip * (32 * cols)), row = in_strip / cols, col = in_strip - row * cols;
    const unsigned char *in = codes + strip * (17 * cols);
    unsigned bits, scales;
    if (at >= n)
        return;
    scales = *(const unsigned *)(in + col);
    bits = *(const unsigned *)(in + cols * (1 + row % 16) + col) >> row / 16 * 4;
    for (int j = 0; j < 4; j++) {
        const unsigned e = scales >> 8 * j & 255u;
        float y = __fmul_rn(published_value<4>(bits >> 8 * j & 15u, true), __uint_as_float(e > 0 ? e << 23 : 1u << 22));
        if (rounds)
            y = __uint_as_float((__float_as_uint(y) + 0x8000u) & 0xffff0000u);
        narrow(x + at + j, y);
    }
}

#endif
