/*
 * vec_avx512.h - sixteen floats of AVX-512 by the names that adam_body.h and rule_update.h have for them.
 */
#ifndef SPW_VEC_AVX512_H
#define SPW_VEC_AVX512_H

#include "cpu_adam_internal.h"
#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
typedef __m512 vec;

ALWAYS_INLINE vec
all_of(float x)
{
    return _mm512_set1_ps(x);
}

ALWAYS_INLINE vec
load(const float *p)
{
    return _mm512_loadu_ps(p);
}

ALWAYS_INLINE void
store(float *p, vec x)
{
    _mm512_storeu_ps(p, x);
}

ALWAYS_INLINE vec
fma_of(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

ALWAYS_INLINE vec
fnma_of(vec a, vec b, vec c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

ALWAYS_INLINE vec
sqrt_of(vec x)
{
    return _mm512_sqrt_ps(x);
}

ALWAYS_INLINE vec
canonical_of(vec x)
{
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(_mm512_set1_epi32((int)SPW__SPLIT_NAN)));
}

ALWAYS_INLINE vec
signed_where_moves(vec u, vec lr)
{
    __mmask16 moves = _mm512_cmp_ps_mask(u, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    __m512i sign = _mm512_set1_epi32((int)0x80000000u); /* lr | (u & sign) */
    return _mm512_mask_mov_ps(
        u, moves,
        _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(lr), _mm512_castps_si512(u), sign, 0xf8)));
}

#endif
