/*
 * Adam on split-bf16 with AVX-512: packed_avx512.h's masters, moments of 16 bits rounded stochastically. One pass, everything
 * in registers, one line of 32 elements at a time.
 */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "packed_avx512.h"

/* A line between its two halves of a step. */
typedef struct half_done {
    __m512 w[2], m[2], v[2], root[2];
    uint64_t at;
} half_done;

/* New moments. */
ALWAYS_INLINE half_done
first_half(const constants *k, const coefs *c, const spw__packed *p, uint64_t at, spw_dtype grad_dtype, bool has_l2)
{
    half_done h = {.at = at};
    prefetch_grad(p, grad_dtype, at);
    prefetch_master(p, 2, at);
    prefetch(p->m, 2, at);
    prefetch(p->v, 2, at);
    load_bf16(k, (const uint16_t *)p->m + at, h.m);
    load_bf16(k, (const uint16_t *)p->v + at, h.v);
    load_master(k, p, 2, at, h.w);
    for (int j = 0; j < 2; j++) {
        __m512 g = scaled_grad(c, p, grad_dtype, at + (uint64_t)j * LANES, h.w[j], has_l2);
        h.root[j] = new_moments(c, g, &h.m[j], &h.v[j]);
    }
    return h;
}

/* New weights. False: nothing is stored, the group is for opt_block.h. */
ALWAYS_INLINE bool
second_half(const constants *k, const coefs *c, const spw__packed *p, const half_done *h)
{
    const __m512i pairs = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i pair_steps = _mm512_mullo_epi32(pairs, _mm512_set1_epi32((int)SPW__HASH_STEP));
    __m512i m_high = both_high(k, h->m[0], h->m[1]), v_high = both_high(k, h->v[0], h->v[1]), hi, lo, counters;
    __m512 w[2];
    uint32_t counter = (uint32_t)(p->first + h->at) * SPW__HASH_STEP + p->coef->key;
    for (int j = 0; j < 2; j++)
        w[j] = new_master(c, h->w[j], h->m[j], h->root[j]);
    split_masters(k, w, &hi, &lo);
    /* A bad gradient makes a bad m, a bad m or NaN in v a bad w. */
    if (__builtin_expect((unusual(k, hi) | unusual(k, m_high) | unusual(k, v_high)) != 0, 0))
        return false;
    store_master(p, 2, h->at, hi, lo);
    counters = _mm512_add_epi32(_mm512_set1_epi32((int)counter), pair_steps);
    store_bf16(k, (uint16_t *)p->m + h->at, m_high, both_low(k, h->m[0], h->m[1]), rounding_hash(counters));
    counters = _mm512_add_epi32(counters, _mm512_set1_epi32((int)SPW__HASH_STEP));
    store_bf16(k, (uint16_t *)p->v + h->at, v_high, both_low(k, h->v[0], h->v[1]), rounding_hash(counters));
    return true;
}

/*
 * Each iteration does the first half of one line and the second half of the line before. Divisions and square roots take
 * long, and the processor's window holds about two lines: so each waits only for what is done.
 */
ALWAYS_INLINE uint64_t
step_body(const spw__packed *packed, uint64_t first, uint64_t end, spw_dtype grad_dtype, bool has_l2)
{
    const spw_opt_coef coef = *packed->coef; /* copies: stores of bytes may alias the originals */
    const coefs c = load_coefs(&coef);
    const constants k = load_constants();
    spw__packed p = *packed;
    half_done open = {.at = UINT64_MAX};
    uint64_t nonfinite_count = 0;
    p.coef = &coef;
    for (uint64_t at = first; at <= end; at += LINE) {
        half_done next = {.at = UINT64_MAX};
        if (at < end)
            next = first_half(&k, &c, &p, at, grad_dtype, has_l2);
        if (at > first && !second_half(&k, &c, &p, &open))
            nonfinite_count += p.general(p.ctx, open.at, open.at + LINE);
        open = next;
    }
    return nonfinite_count;
}

ALWAYS_INLINE uint64_t
step_typed(const spw__packed *p, uint64_t first, uint64_t end, spw_dtype grad_dtype)
{
    return p->coef->c[4] != 0.0f ? step_body(p, first, end, grad_dtype, true)
                                 : step_body(p, first, end, grad_dtype, false);
}

static uint64_t
step_avx512(const spw__packed *p, uint64_t first, uint64_t end)
{
    return p->grad_dtype == SPW_F32    ? step_typed(p, first, end, SPW_F32)
           : p->grad_dtype == SPW_BF16 ? step_typed(p, first, end, SPW_BF16)
                                       : step_typed(p, first, end, SPW_F16);
}

const spw__packed_fn spw__packed_bf16_avx512 = step_avx512;
#else
const spw__packed_fn spw__packed_bf16_avx512 = NULL;
#endif
