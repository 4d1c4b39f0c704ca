/*
 * The other rules on packed state with AVX-512: packed_avx512.h's masters and moments around rule_update.h's rules. One pass, everything
 * in registers: a line of 32 elements at a time with moments of 16 bits, a group of 64 with moments of 8 bits. What is the slow part of
 * Adam is short here, so nothing is done in two halves.
 */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "packed_avx512.h"
#include "rule_update.h"

/* New masters and moments (in: the old) of a line by its gradients; hi and lo are to be stored. */
ALWAYS_INLINE void
update_line(const constants *k, const rule_coefs *c, const spw__packed *p, uint64_t at, int rule, uint32_t low_bytes,
            spw_dtype grad_dtype, __m512 m[2], __m512i *hi, __m512i *lo)
{
    __m512 w[2];
    prefetch_grad(p, grad_dtype, at);
    prefetch_master(p, low_bytes, at);
    load_master(k, p, low_bytes, at, w);
    for (int j = 0; j < 2; j++) {
        __m512 g = load_grad(p->grad, grad_dtype, at + (uint64_t)j * LANES) * all_of(p->grad_scale);
        update(rule, c, true, &w[j], &m[j], g);
    }
    split_masters(k, w, hi, lo);
}

/* False: nothing is stored, the line is for opt_block.h. A bad gradient makes a bad m, or without moments a bad w. */
ALWAYS_INLINE bool
step_line(const constants *k, const rule_coefs *c, const spw__packed *p, uint64_t at, int rule, spw_dtype grad_dtype)
{
    const uint32_t counter = (uint32_t)(p->first + at) * SPW__HASH_STEP + p->coef->key;
    const __m512i pairs = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i steps = _mm512_mullo_epi32(pairs, _mm512_set1_epi32((int)SPW__HASH_STEP));
    __m512 m[2];
    __m512i hi, lo, high;
    prefetch(p->m, 2, at);
    load_bf16(k, (const uint16_t *)p->m + at, m);
    update_line(k, c, p, at, rule, 2, grad_dtype, m, &hi, &lo);
    high = both_high(k, m[0], m[1]);
    if (__builtin_expect((unusual(k, hi) | unusual(k, high)) != 0, 0))
        return false;
    store_master(p, 2, at, hi, lo);
    store_bf16(k, (uint16_t *)p->m + at, high, both_low(k, m[0], m[1]),
               rounding_hash(_mm512_add_epi32(_mm512_set1_epi32((int)counter), steps)));
    return true;
}

/* Moments of a group, encoded; top: the largest magnitude, as bits. group_scale() of ordinary numbers. */
ALWAYS_INLINE void
store_group(const constants *k, const spw__packed *p, uint64_t at, bool is_unsigned, const __m512 m[LINES][2],
            uint32_t top)
{
    const uint32_t group = (uint32_t)(at / GROUP), shift = is_unsigned ? 16 : 0;
    const uint32_t random = spw__rounding_hash(((uint32_t)(p->first / GROUP) + group) * SPW__HASH_STEP + p->coef->key);
    const float up = is_unsigned ? SPW__UNSIGNED_UP : SPW__SIGNED_UP;
    const bool some = top >= SPW__SCALE_LEAST;
    uint32_t scale = (spw_f32_bits(spw_bits_f32(top) * up) + (random >> shift & 0xffffu)) >> 16;
    __m512 factor = _mm512_set1_ps(some ? 1.0f / spw_bits_f32(scale << 16) : 0.0f);
    p->m_scale[group] = (uint16_t)(some ? scale : 0);
    for (uint64_t line = 0; line < LINES; line++)
        if (is_unsigned)
            store_unsigned(k, (uint8_t *)p->m + at + line * LINE, m[line], factor,
                           _mm512_set1_epi32(some ? UNSIGNED_BITS : 0));
        else
            store_signed(k, (int8_t *)p->m + at + line * LINE, m[line], factor,
                         _mm512_set1_epi32(some ? SIGNED_BITS : 0));
}

/* The same for a group; without a moment too. */
ALWAYS_INLINE bool
step_group(const constants *k, const rule_coefs *c, const spw__packed *p, uint64_t begin, int rule, uint32_t low_bytes,
           bool has_moment, spw_dtype grad_dtype)
{
    const bool is_unsigned = rule == SPW_OPT_ADAGRAD;
    __m512 m[LINES][2] = {{_mm512_setzero_ps()}};
    __m512i hi[LINES], lo[LINES], tops = _mm512_setzero_si512();
    uint32_t top = 0;
    bool odd = false;
    if (has_moment) {
        const float scale = spw_bits_f32((uint32_t)p->m_scale[begin / GROUP] << 16);
        prefetch(p->m, 1, begin);
        prefetch_at(p->m_scale, (begin + 16 * PREFETCH_AHEAD) / GROUP * sizeof *p->m_scale);
        for (uint64_t line = 0; line < LINES; line++)
            if (is_unsigned)
                load_unsigned(k, (const uint8_t *)p->m + begin + line * LINE, scale, m[line]);
            else
                load_signed(k, (const int8_t *)p->m + begin + line * LINE, scale, 0.5f * scale, m[line]);
    }
    for (uint64_t line = 0; line < LINES; line++) {
        update_line(k, c, p, begin + line * LINE, rule, low_bytes, grad_dtype, m[line], &hi[line], &lo[line]);
        odd |= unusual(k, hi[line]) != 0;
        for (int j = 0; j < 2 && has_moment; j++)
            tops = _mm512_max_epu32(tops, _mm512_andnot_si512(k->f_sign, _mm512_castps_si512(m[line][j])));
    }
    if (has_moment)
        top = _mm512_reduce_max_epu32(tops);
    if (__builtin_expect(odd || top >= 0x7f000000u, 0))
        return false;
    for (uint64_t line = 0; line < LINES; line++)
        store_master(p, low_bytes, begin + line * LINE, hi[line], lo[line]);
    if (has_moment)
        store_group(k, p, begin, is_unsigned, (const __m512(*)[2])m, top);
    return true;
}

ALWAYS_INLINE uint64_t
step_body(const spw__packed *packed, uint64_t first, uint64_t end, int rule, spw_state_format format,
          spw_dtype grad_dtype)
{
    const bool has_moment = rule != SPW_OPT_MUON;
    const bool by_lines = format == SPW_STATE_SPLIT_BF16 && has_moment;
    const spw_opt_coef coef = *packed->coef; /* copies: stores of bytes may alias the originals */
    const rule_coefs c = rule_coefs_of(rule, coef.c);
    const constants k = load_constants();
    const uint64_t piece = by_lines ? LINE : GROUP;
    spw__packed p = *packed;
    uint64_t nonfinite_count = 0;
    p.coef = &coef;
    for (uint64_t at = first; at < end; at += piece) {
        bool done = by_lines ? step_line(&k, &c, &p, at, rule, grad_dtype)
                             : step_group(&k, &c, &p, at, rule, format == SPW_STATE_SPLIT24_INT8 ? 1 : 2, has_moment,
                                          grad_dtype);
        if (!done)
            nonfinite_count += p.general(p.ctx, at, at + piece);
    }
    return nonfinite_count;
}

ALWAYS_INLINE uint64_t
step_typed(const spw__packed *p, uint64_t first, uint64_t end, int rule)
{
#define CASE(format, dtype)                                                                                            \
    case SPW_DTYPE_COUNT *(int)(format) + (int)(dtype):                                                                \
        return step_body(p, first, end, rule, format, dtype)
#define CASES(format)                                                                                                  \
    CASE(format, SPW_F32);                                                                                             \
    CASE(format, SPW_BF16);                                                                                            \
    CASE(format, SPW_F16)
    switch (SPW_DTYPE_COUNT * (int)p->format + (int)p->grad_dtype) {
        CASES(SPW_STATE_SPLIT_BF16);
        CASES(SPW_STATE_SPLIT_INT8);
        CASES(SPW_STATE_SPLIT24_INT8);
    default: SPW_ASSERT(false); return 0;
    }
#undef CASE
#undef CASES
}

static uint64_t
step_avx512(const spw__packed *p, uint64_t first, uint64_t end)
{
    switch (p->coef->optimizer->builtin) {
    case SPW_OPT_ADAGRAD: return step_typed(p, first, end, SPW_OPT_ADAGRAD);
    case SPW_OPT_LION: return step_typed(p, first, end, SPW_OPT_LION);
    case SPW_OPT_SGD: return step_typed(p, first, end, SPW_OPT_SGD);
    default: return step_typed(p, first, end, SPW_OPT_MUON);
    }
}

const spw__packed_fn spw__rules_packed_avx512 = step_avx512;
#else
const spw__packed_fn spw__rules_packed_avx512 = NULL;
#endif
