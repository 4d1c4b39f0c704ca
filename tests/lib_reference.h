/*
 * lib_reference - operations in fp64, element by element, which round to the compute type where the operation stores its numbers on the
 * way: what is left of a device's error is its arithmetic. For the subjects of lib_parity, whose arrays these are.
 *
 * Each takes the arrays as they are given and puts results into them, the last rounding left out. Where a device may take one of two ways,
 * with a rounding or without it, `way` says which.
 */
#ifndef LIB_REFERENCE_H
#define LIB_REFERENCE_H

#include "lib_subject.h"

/* Weights are rounded beside the greatest in all tiles of keys so far; way 0: of 64 keys, way 1: of 32. */
void reference_attention(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints);
void reference_attention_cached(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints);
/* way 1: the product is rounded before it is added. */
void reference_linear_add(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints);
/* way 1: what goes into the gelu is rounded before, and what comes back to it. */
void reference_linear_gelu(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints);
/* way 1: dx gets what the last V % 64 columns give first, and is rounded; way 2: and each is rounded before it is added. */
void reference_loss(const subject *s, spw_dtype type, unsigned way, float **a, int32_t **ints);

/* Linear attention as spw_gpu.h has it. dx, where it is NaN, begins as 0; dx, dw and what delta's backward writes may be NULL. */
typedef struct reference_delta_arrays {
    const float *qkv, *a, *b, *log_a, *dt_bias, *skip, *dout;
    float *out, *delta, *dqkv, *da, *db, *dlog_a, *ddt_bias, *dskip;
} reference_delta_arrays;
void reference_conv(const spw_conv_shape *s, float *y, float *dx, float *dw, float *dbias, const float *dy,
                    const float *x, const float *w);
void reference_conv_cached(const spw_conv_shape *s, float *y, const float *x, const float *w, float *before,
                           const int32_t *slots, const int32_t *starts);
void reference_delta(const spw_delta_shape *s, const reference_delta_arrays *a); /* forward and back */
void reference_delta_cached(const spw_delta_shape *s, const reference_delta_arrays *a, float *state,
                            const int32_t *slots, const int32_t *starts);

#endif
