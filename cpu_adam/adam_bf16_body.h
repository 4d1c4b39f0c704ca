/*
 * Adam on split-bf16, included once by each instruction set's file behind its vectors: moments of 16 bits rounded stochastically. One
 * pass, everything in registers, a pair of vectors at a time.
 */
/* A pair between its two halves of a step. */
typedef struct half_done {
    vec w[2], m[2], v[2], root[2];
    uint64_t at;
} half_done;

/* New moments. */
ALWAYS_INLINE half_done
first_half(const constants *k, const coefs *c, const spw__packed *p, uint64_t at, spw_dtype grad_dtype, bool has_l2)
{
    half_done h = {.at = at};
    vec g[2];
    if (begins_line(at)) {
        prefetch_grad(p, grad_dtype, at);
        prefetch_master(p, 2, at);
        prefetch(p->m, 2, at);
        prefetch(p->v, 2, at);
    }
    load_bf16(k, (const uint16_t *)p->m + at, h.m);
    load_bf16(k, (const uint16_t *)p->v + at, h.v);
    load_master(k, p, 2, at, h.w);
    scaled_grads(c, p, grad_dtype, at, h.w, has_l2, g);
    for (int j = 0; j < 2; j++)
        h.root[j] = new_moments(c, g[j], &h.m[j], &h.v[j]);
    return h;
}

/* New weights. False: nothing is stored, the pair is for opt_block.h. */
ALWAYS_INLINE bool
second_half(const constants *k, const coefs *c, const spw__packed *p, const half_done *h)
{
    bits m_high = both_high(k, h->m[0], h->m[1]), v_high = both_high(k, h->v[0], h->v[1]), hi, lo;
    vec w[2];
    uint32_t counter = (uint32_t)(p->first + h->at) * SPW__HASH_STEP + p->coef->key;
    for (int j = 0; j < 2; j++)
        w[j] = new_master(c, h->w[j], h->m[j], h->root[j]);
    split_masters(k, w, &hi, &lo);
    /* A bad gradient makes a bad m, a bad m or NaN in v a bad w. */
    if (__builtin_expect(any_of(unusual(k, hi) | unusual(k, m_high) | unusual(k, v_high)), 0))
        return false;
    store_master(p, 2, h->at, hi, lo);
    store_bf16(k, (uint16_t *)p->m + h->at, m_high, both_low(k, h->m[0], h->m[1]), random_halves(counter));
    store_bf16(k, (uint16_t *)p->v + h->at, v_high, both_low(k, h->v[0], h->v[1]),
               random_halves(counter + SPW__HASH_STEP));
    return true;
}

/*
 * Where it is TWO_PART, each iteration does the first half of one pair and the second half of the pair before. Divisions and square roots
 * take long, and the processor's window holds about two pairs of AVX-512: so each waits only for what is done. With AVX2 pairs are
 * half as large and registers half as many, and one after the other was 6 % faster.
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
    for (uint64_t at = first; at < end && !TWO_PART; at += PAIR) {
        open = first_half(&k, &c, &p, at, grad_dtype, has_l2);
        if (!second_half(&k, &c, &p, &open))
            nonfinite_count += p.general(p.ctx, at, at + PAIR);
    }
    for (uint64_t at = first; at <= end && TWO_PART; at += PAIR) {
        half_done next = {.at = UINT64_MAX};
        if (at < end)
            next = first_half(&k, &c, &p, at, grad_dtype, has_l2);
        if (at > first && !second_half(&k, &c, &p, &open))
            nonfinite_count += p.general(p.ctx, open.at, open.at + PAIR);
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
step(const spw__packed *p, uint64_t first, uint64_t end)
{
    return p->grad_dtype == SPW_F32    ? step_typed(p, first, end, SPW_F32)
           : p->grad_dtype == SPW_BF16 ? step_typed(p, first, end, SPW_BF16)
                                       : step_typed(p, first, end, SPW_F16);
}
