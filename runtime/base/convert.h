/*
 * convert.h - arrays of numbers from one type to another, with the instructions of the file that includes it: plain loops that compilers
 * vectorise, and for fp16 F16C or NEON's conversions, which they do not make of the bits. Every instruction set makes the same bits.
 */
#ifndef SPW_CONVERT_H
#define SPW_CONVERT_H

#include "spw_base.h"
#ifdef __F16C__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static inline void
spw__widen_f16(float *restrict to, const uint16_t *restrict from, uint64_t n)
{
    uint64_t done = 0;
#ifdef __F16C__
    done = n / 8 * 8;
    for (uint64_t i = 0; i < done; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from + i))));
#elif defined(__aarch64__)
    done = n / 4 * 4;
    for (uint64_t i = 0; i < done; i += 4)
        vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
    for (uint64_t i = done; i < n; i++)
        to[i] = spw_f16_to_f32(from[i]);
}

static inline void
spw__narrow_f16(uint16_t *restrict to, const float *restrict from, uint64_t n)
{
    uint64_t done = 0;
#ifdef __F16C__
    done = n / 8 * 8;
    for (uint64_t i = 0; i < done; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    done = n / 4 * 4;
    for (uint64_t i = 0; i < done; i += 4)
        vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
    for (uint64_t i = done; i < n; i++)
        to[i] = spw_f32_to_f16(from[i]);
}

static inline void
spw__widen_bf16(float *restrict to, const uint16_t *restrict from, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] = spw_bf16_to_f32(from[i]);
}

static inline void
spw__narrow_bf16(uint16_t *restrict to, const float *restrict from, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] = spw_f32_to_bf16(from[i]);
}

/* spw_convert() of types that are not equal, one of them fp32. */
static inline void
spw__convert_here(void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    if (src_type == SPW_BF16)
        spw__widen_bf16(dst, src, n);
    else if (src_type == SPW_F16)
        spw__widen_f16(dst, src, n);
    else if (dst_type == SPW_BF16)
        spw__narrow_bf16(dst, src, n);
    else
        spw__narrow_f16(dst, src, n);
}

/* The same with one instruction set, for convert_scalar.c and tests. */
typedef void spw__convert_fn(void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n);
spw__convert_fn spw__convert_scalar, spw__convert_avx2, spw__convert_avx512;

#endif
