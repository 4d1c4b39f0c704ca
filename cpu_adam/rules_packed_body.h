/*
 * The other rules on packed state, included once by each instruction set's file behind its vectors: packed masters and moments around
 * rule_update.h's rules. One pass, everything in registers: a pair of vectors at a time with moments of 16 bits, a group of 64 with
 * moments of 8 bits. What is the slow part of Adam is short here, so nothing is done in two halves.
 */
#include "rule_update.h"

/* New masters and moments (in: the old) of a pair by its gradients; hi and lo are to be stored. */
ALWAYS_INLINE void
update_pair(const constants *k, const rule_coefs *c, const spw__packed *p, uint64_t at, int rule, uint32_t low_bytes,
            spw_dtype grad_dtype, vec m[2], bits *hi, bits *lo)
{
    vec w[2], g[2];
    if (begins_line(at)) {
        prefetch_grad(p, grad_dtype, at);
        prefetch_master(p, low_bytes, at);
    }
    load_master(k, p, low_bytes, at, w);
    load_grads(p->grad, grad_dtype, at, g);
    for (int j = 0; j < 2; j++)
        update(rule, c, true, &w[j], &m[j], g[j] * all_of(p->grad_scale));
    split_masters(k, w, hi, lo);
}

/* False: nothing is stored, the pair is for opt_block.h. A bad gradient makes a bad m, or without moments a bad w. */
ALWAYS_INLINE bool
step_pair(const constants *k, const rule_coefs *c, const spw__packed *p, uint64_t at, int rule, spw_dtype grad_dtype)
{
    const uint32_t counter = (uint32_t)(p->first + at) * SPW__HASH_STEP + p->coef->key;
    vec m[2];
    bits hi, lo, high;
    if (begins_line(at))
        prefetch(p->m, 2, at);
    load_bf16(k, (const uint16_t *)p->m + at, m);
    update_pair(k, c, p, at, rule, 2, grad_dtype, m, &hi, &lo);
    high = both_high(k, m[0], m[1]);
    if (__builtin_expect(any_of(unusual(k, hi) | unusual(k, high)), 0))
        return false;
    store_master(p, 2, at, hi, lo);
    store_bf16(k, (uint16_t *)p->m + at, high, both_low(k, m[0], m[1]), random_halves(counter));
    return true;
}

/* Moments of a group, encoded; top: the largest magnitude, as bits. group_scale() of ordinary numbers. */
ALWAYS_INLINE void
store_group(const constants *k, const spw__packed *p, uint64_t at, bool is_unsigned, const vec m[PAIRS][2],
            uint32_t top)
{
    const uint32_t group = (uint32_t)(at / GROUP), shift = is_unsigned ? 16 : 0;
    const uint32_t random = spw__rounding_hash(((uint32_t)(p->first / GROUP) + group) * SPW__HASH_STEP + p->coef->key);
    const float up = is_unsigned ? SPW__UNSIGNED_UP : SPW__SIGNED_UP;
    const bool some = top >= SPW__SCALE_LEAST;
    uint32_t scale = (spw_f32_bits(spw_bits_f32(top) * up) + (random >> shift & 0xffffu)) >> 16;
    vec factor = all_of(some ? 1.0f / spw_bits_f32(scale << 16) : 0.0f);
    p->m_scale[group] = (uint16_t)(some ? scale : 0);
    for (uint64_t pair = 0; pair < PAIRS; pair++)
        if (is_unsigned)
            store_unsigned(k, (uint8_t *)p->m + at + pair * PAIR, m[pair], factor, all_words(some ? UNSIGNED_BITS : 0));
        else
            store_signed(k, (int8_t *)p->m + at + pair * PAIR, m[pair], factor, all_words(some ? SIGNED_BITS : 0));
}

/* The same for a group; without a moment too. */
ALWAYS_INLINE bool
step_group(const constants *k, const rule_coefs *c, const spw__packed *p, uint64_t begin, int rule, uint32_t low_bytes,
           bool has_moment, spw_dtype grad_dtype)
{
    const bool is_unsigned = rule == SPW_OPT_ADAGRAD;
    vec m[PAIRS][2] = {{all_of(0)}};
    bits hi[PAIRS], lo[PAIRS], tops = all_words(0);
    uint32_t top = 0;
    bool odd = false;
    if (has_moment) {
        const float scale = spw_bits_f32((uint32_t)p->m_scale[begin / GROUP] << 16);
        prefetch(p->m, 1, begin);
        spw__prefetch(p->m_scale, (begin + 16 * PREFETCH_AHEAD) / GROUP * sizeof *p->m_scale, 1);
        for (uint64_t pair = 0; pair < PAIRS; pair++)
            if (is_unsigned)
                load_unsigned(k, (const uint8_t *)p->m + begin + pair * PAIR, scale, m[pair]);
            else
                load_signed(k, (const int8_t *)p->m + begin + pair * PAIR, scale, 0.5f * scale, m[pair]);
    }
    for (uint64_t pair = 0; pair < PAIRS; pair++) {
        update_pair(k, c, p, begin + pair * PAIR, rule, low_bytes, grad_dtype, m[pair], &hi[pair], &lo[pair]);
        odd |= any_of(unusual(k, hi[pair]));
        for (int j = 0; j < 2 && has_moment; j++)
            tops = larger_of(k, tops, m[pair][j]);
    }
    if (has_moment)
        top = largest_of(tops);
    if (__builtin_expect(odd || top >= 0x7f000000u, 0))
        return false;
    for (uint64_t pair = 0; pair < PAIRS; pair++)
        store_master(p, low_bytes, begin + pair * PAIR, hi[pair], lo[pair]);
    if (has_moment)
        store_group(k, p, begin, is_unsigned, (const vec(*)[2])m, top);
    return true;
}

ALWAYS_INLINE uint64_t
step_body(const spw__packed *packed, uint64_t first, uint64_t end, int rule, spw_state_format format,
          spw_dtype grad_dtype)
{
    const bool has_moment = rule != SPW_OPT_MUON;
    const bool by_pairs = format == SPW_STATE_SPLIT_BF16 && has_moment;
    const spw_opt_coef coef = *packed->coef; /* copies: stores of bytes may alias the originals */
    const rule_coefs c = rule_coefs_of(rule, coef.c);
    const constants k = load_constants();
    const uint64_t piece = by_pairs ? PAIR : GROUP;
    spw__packed p = *packed;
    uint64_t nonfinite_count = 0;
    p.coef = &coef;
    for (uint64_t at = first; at < end; at += piece) {
        bool done = by_pairs ? step_pair(&k, &c, &p, at, rule, grad_dtype)
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
    switch (SPW__KIND(p->format, p->grad_dtype)) {
        SPW__CASES(SPW_STATE_SPLIT_BF16, step_body, p, first, end, rule);
        SPW__CASES(SPW_STATE_SPLIT_INT8, step_body, p, first, end, rule);
        SPW__CASES(SPW_STATE_SPLIT24_INT8, step_body, p, first, end, rule);
    default: SPW_ASSERT(false); return 0;
    }
}

static uint64_t
step(const spw__packed *p, uint64_t first, uint64_t end)
{
    BY_RULE(p, step_typed, p, first, end);
}
