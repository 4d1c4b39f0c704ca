/*
 * normal.h - normal numbers that hang on a seed, a stream and an element's index alone: where weights begin.
 *
 *   element i = deviation * sqrt(-2 ln u) * cos(2 pi v),   u = (r[0] + 1) / 2^32,   v = r[1] / 2^32,   r = Philox(seed, stream, i)
 *
 * in fp64, rounded once. Every instruction set makes the same bits. Source: Box and Muller 1958; Salmon et al. 2011 (Philox 4x32-10).
 */
#ifndef SPW_NORMAL_H
#define SPW_NORMAL_H

#include "spw_base.h"

/* Elements [first, first + n) of a stream. Any thread. */
void spw__normal_draw(float *out, uint64_t seed, uint64_t stream, uint64_t first, uint64_t n, float deviation);

/* The same with one instruction set, for normal_scalar.c and tests. */
typedef void spw__normal_fn(float *out, uint64_t seed, uint64_t stream, uint64_t first, uint64_t n, float deviation);
spw__normal_fn spw__normal_scalar, spw__normal_avx2, spw__normal_avx512;

#endif
