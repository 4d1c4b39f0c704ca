/*
 * cpu_adam_internal.h - what the files of cpu_adam share: the kernels' common signature and the split format's bits.
 */
#ifndef SPW_CPU_ADAM_INTERNAL_H
#define SPW_CPU_ADAM_INTERNAL_H

#include "spw_cpu_adam.h"

/* One update of a slice; returns the number of elements whose scaled gradient was not finite. */
typedef uint64_t (*spw__adam_fn)(const spw_adam_coef *coef, const spw_adam_slice *slice);

/* The truth; it also does the last elements of the vector kernels. */
uint64_t spw__adam_ref(const spw_adam_coef *coef, const spw_adam_slice *slice);
/* NULL when the build lacks the instruction set. */
extern const spw__adam_fn spw__adam_avx2;
extern const spw__adam_fn spw__adam_avx512;

/* Elements [first, elems) of a slice as a slice of their own. */
spw_adam_slice spw__adam_slice_rest(const spw_adam_slice *slice, uint64_t first);

/*
 * The bits of a master in the split format's sense. Two kinds of value have no exact code, because hi alone is what
 * the model reads:
 *   finite, at least 0x7f7f8000   hi would be an infinity, and every code of hi 0x7f7f belongs to another master (the
 *                                 codes with finite hi are as many as the masters below, so no scheme is exact here):
 *                                 it becomes the largest master below, 0x7f7f7fff with its sign
 *   NaN                           adding 0x8000 could carry out of the NaN's mantissa, and payloads depend on the
 *                                 order of operands: every NaN becomes 0x7fc00000, the same on every instruction set
 */
#define SPW__SPLIT_MAX 0x7f7f7fffu
#define SPW__SPLIT_NAN 0x7fc00000u
#define SPW__F32_INF   0x7f800000u

static inline uint32_t
spw__split_bits(float master)
{
    uint32_t u = spw_f32_bits(master), magnitude = u & 0x7fffffffu;
    uint32_t finite = magnitude > SPW__SPLIT_MAX && magnitude < SPW__F32_INF ? (u & 0x80000000u) | SPW__SPLIT_MAX : u;
    return magnitude > SPW__F32_INF ? SPW__SPLIT_NAN : finite;
}

static inline void
spw__split(float master, uint16_t *hi, int16_t *lo)
{
    uint32_t u = spw__split_bits(master);
    *hi = (uint16_t)((u + 0x8000u) >> 16);
    *lo = (int16_t)(uint16_t)(u & 0xffffu);
}

static inline float
spw__join(uint16_t hi, int16_t lo)
{
    return spw_bits_f32(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

#endif
