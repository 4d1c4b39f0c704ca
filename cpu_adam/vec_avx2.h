/*
 * vec_avx2.h - eight floats of AVX2 by the names that adam_body.h and rule_update.h have for them.
 */
#ifndef SPW_VEC_AVX2_H
#define SPW_VEC_AVX2_H

#include "cpu_adam_internal.h"
#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
typedef __m256 vec;
typedef __m256i bits;

ALWAYS_INLINE vec
all_of(float x)
{
    return _mm256_set1_ps(x);
}

ALWAYS_INLINE vec
load(const float *p)
{
    return _mm256_loadu_ps(p);
}

ALWAYS_INLINE void
store(float *p, vec x)
{
    _mm256_storeu_ps(p, x);
}

ALWAYS_INLINE vec
fma_of(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

ALWAYS_INLINE vec
fnma_of(vec a, vec b, vec c)
{
    return _mm256_fnmadd_ps(a, b, c);
}

ALWAYS_INLINE vec
sqrt_of(vec x)
{
    return _mm256_sqrt_ps(x);
}

ALWAYS_INLINE vec
canonical_of(vec x)
{
    vec nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)SPW__SPLIT_NAN));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

ALWAYS_INLINE vec
signed_where_moves(vec u, vec lr)
{
    vec moves = _mm256_cmp_ps(u, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    return _mm256_blendv_ps(u, _mm256_or_ps(lr, _mm256_and_ps(u, _mm256_set1_ps(-0.0f))), moves);
}

#endif
