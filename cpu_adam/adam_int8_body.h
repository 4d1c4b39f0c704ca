/*
 * Adam on split-int8 and split24-int8, included once by each instruction set's file behind its vectors: moments of 8 bits in groups of 64 that share
 * a scale. The scale needs the whole group, and its division is the slower the fewer are done at once, so eight groups go
 * through two passes with their new moments in L1 between them:
 *   first   decodes the moments, makes the new ones and the new weights, finds the largest magnitudes
 *   scales  the sixteen new scales of the eight groups at once
 *   second  encodes the moments
 * The first pass of a batch runs before the second of the batch before, so nothing waits for the scales. The number of vector
 * instructions is what binds: with groups of 32 it was 10 % slower, for twice as many scales and largest magnitudes.
 *
 *   load_scales   of groups: m's and v's, BATCH of each, and half of them
 *   put_tops      the largest magnitudes of a group's moments to where make_scales looks; whether there is one of 2^127 and above
 *   make_scales   opt_block.h's group_scale() of ordinary numbers, to the state; one over each, and store_signed's and
 *                 store_unsigned's bits. The second pass puts the old scales of other groups back
 */
enum { VECTORS = GROUP / LANES };
typedef struct batch {
    _Alignas(64) float m[BATCH][GROUP], v[BATCH][GROUP]; /* the new ones */
    _Alignas(64) uint32_t tops[BATCH][16];               /* largest magnitudes as bits, as put_tops() leaves them */
    _Alignas(64) float factors[2 * BATCH];     /* one over the new scale, of m and of v; 0 where all codes are */
    _Alignas(64) float scales[2 * BATCH];      /* the old ones */
    _Alignas(64) float half_scales[2 * BATCH]; /* half of them */
    /* The sign bit of m's codes, the least code of v, in two words; 0 where all codes are. */
    _Alignas(64) uint32_t bits[2 * BATCH];
    uint64_t from;  /* the first element */
    uint32_t count; /* groups */
    uint32_t odd;   /* bits of groups that the kernel cannot do */
} batch;

/* ---------------------------------------------------------------- the first pass */

/* A group between the two halves of the first pass: square roots take long. */
typedef struct half_done {
    vec m[VECTORS], root[VECTORS];
    bool large; /* among the largest magnitudes: 2^127 and above */
} half_done;

/* New moments. */
ALWAYS_INLINE half_done
first_half(const constants *k, const coefs *c, const spw__packed *p, batch *b, uint32_t n, uint32_t low_bytes,
           spw_dtype grad_dtype, bool has_l2)
{
    const uint64_t begin = b->from + n * GROUP;
    half_done h;
    vec v[VECTORS];
    prefetch(p->m, 1, begin);
    prefetch(p->v, 1, begin);
    for (int j = 0; j < VECTORS; j += 2) {
        const uint64_t at = begin + (uint64_t)j * LANES;
        vec w[2] = {all_of(0), all_of(0)}, g[2];
        if (begins_line(at))
            prefetch_grad(p, grad_dtype, at);
        load_signed(k, (const int8_t *)p->m + at, b->scales[n], b->half_scales[n], h.m + j);
        load_unsigned(k, (const uint8_t *)p->v + at, b->scales[BATCH + n], v + j);
        if (has_l2)
            load_master(k, p, low_bytes, at, w);
        scaled_grads(c, p, grad_dtype, at, w, has_l2, g);
        for (int i = 0; i < 2; i++) {
            h.root[j + i] = new_moments(c, g[i], &h.m[j + i], &v[j + i]);
            store(b->m[n] + (j + i) * LANES, h.m[j + i]);
            store(b->v[n] + (j + i) * LANES, v[j + i]);
        }
    }
    h.large = put_tops(k, b->tops, n, h.m, v);
    return h;
}

/* New weights. */
ALWAYS_INLINE void
second_half(const constants *k, const coefs *c, const spw__packed *p, batch *b, uint32_t n, uint32_t low_bytes,
            const half_done *h)
{
    const uint64_t begin = b->from + n * GROUP;
    bits hi[PAIRS], lo[PAIRS];
    bool odd = h->large; /* a bad gradient makes a bad m, a bad m or NaN in v a bad w */
    for (int pair = 0; pair < PAIRS; pair++) {
        const uint64_t at = begin + (uint64_t)pair * PAIR;
        vec w[2];
        if (begins_line(at))
            prefetch_master(p, low_bytes, at);
        load_master(k, p, low_bytes, at, w);
        for (int i = 0; i < 2; i++)
            w[i] = new_master(c, w[i], h->m[2 * pair + i], h->root[2 * pair + i]);
        split_masters(k, w, &hi[pair], &lo[pair]);
        odd |= any_of(unusual(k, hi[pair]));
    }
    if (__builtin_expect(odd, false)) {
        b->odd |= 1u << n;
        return;
    }
    for (int pair = 0; pair < PAIRS; pair++)
        store_master(p, low_bytes, begin + (uint64_t)pair * PAIR, hi[pair], lo[pair]);
}

ALWAYS_INLINE void
first_pass(const constants *k, const coefs *c, const spw__packed *p, batch *b, uint32_t low_bytes, spw_dtype grad_dtype,
           bool has_l2)
{
    const spw__packed local = *p; /* stores may alias the original */
    const uint32_t last = b->count - 1;
    half_done h;
    load_scales(p, b->from / GROUP, b->count, b->scales, b->half_scales);
    b->odd = 0;
    h = first_half(k, c, &local, b, 0, low_bytes, grad_dtype, has_l2);
    for (uint32_t n = 0; n < last; n++) {
        half_done next = first_half(k, c, &local, b, n + 1, low_bytes, grad_dtype, has_l2);
        second_half(k, c, &local, b, n, low_bytes, &h);
        h = next;
    }
    second_half(k, c, &local, b, last, low_bytes, &h);
}

/* ---------------------------------------------------------------- the second pass */

ALWAYS_INLINE void
encode(const constants *k, const spw__packed *p, const batch *b, uint32_t n)
{
    const vec m_factor = all_of(b->factors[n]), v_factor = all_of(b->factors[BATCH + n]);
    const bits sign = all_words(b->bits[n]), least = all_words(b->bits[BATCH + n]);
    for (uint64_t pair = 0; pair < PAIRS; pair++) {
        const float *new_m = b->m[n] + pair * PAIR, *new_v = b->v[n] + pair * PAIR;
        const uint64_t at = b->from + n * GROUP + pair * PAIR;
        const vec m[2] = {load(new_m), load(new_m + LANES)};
        const vec v[2] = {load(new_v), load(new_v + LANES)};
        store_signed(k, (int8_t *)p->m + at, m, m_factor, sign);
        store_unsigned(k, (uint8_t *)p->v + at, v, v_factor, least);
    }
}

/* The group that the kernel cannot do, with the scales that it had. */
static __attribute__((noinline)) uint64_t
do_general(const spw__packed *p, const batch *b, uint32_t n)
{
    const uint64_t at = b->from + n * GROUP;
    p->m_scale[at / GROUP] = (uint16_t)(spw_f32_bits(b->scales[n]) >> 16);
    p->v_scale[at / GROUP] = (uint16_t)(spw_f32_bits(b->scales[BATCH + n]) >> 16);
    return p->general(p->ctx, at, at + GROUP);
}

ALWAYS_INLINE uint64_t
second_pass(const constants *k, const spw__packed *p, const batch *b)
{
    const spw__packed local = *p; /* stores may alias the original */
    uint64_t nonfinite_count = 0;
    for (uint32_t n = 0, count = b->count; n < count; n++)
        if (__builtin_expect((b->odd >> n & 1) != 0, 0))
            nonfinite_count += do_general(p, b, n);
        else
            encode(k, &local, b, n);
    return nonfinite_count;
}

/* ---------------------------------------------------------------- a step */

ALWAYS_INLINE uint64_t
step_body(const spw__packed *p, uint64_t first, uint64_t end, uint32_t low_bytes, spw_dtype grad_dtype, bool has_l2)
{
    const coefs c = load_coefs(p->coef);
    const constants k = load_constants();
    batch batches[2], *b = &batches[0], *before = &batches[1];
    uint64_t nonfinite_count = 0;
    for (int j = 0; j < 2; j++) { /* lanes of groups that a batch lacks are computed with and not used */
        memset(batches[j].tops, 0, sizeof batches[j].tops);
        batches[j].count = 0;
    }
    for (uint64_t at = first; at < end; at += BATCH * GROUP) {
        batch *done = before;
        b->from = at;
        b->count = end - at < BATCH * GROUP ? (uint32_t)((end - at) / GROUP) : BATCH;
        first_pass(&k, &c, p, b, low_bytes, grad_dtype, has_l2);
        nonfinite_count += second_pass(&k, p, before);
        make_scales(p, b->from / GROUP, b->count, b->tops, b->factors, b->bits);
        before = b;
        b = done;
    }
    nonfinite_count += second_pass(&k, p, before);
    return nonfinite_count;
}

ALWAYS_INLINE uint64_t
step_typed(const spw__packed *p, uint64_t first, uint64_t end, spw_state_format format, spw_dtype grad_dtype)
{
    const uint32_t low_bytes = format == SPW_STATE_SPLIT24_INT8 ? 1 : 2;
    return p->coef->c[4] != 0.0f ? step_body(p, first, end, low_bytes, grad_dtype, true)
                                 : step_body(p, first, end, low_bytes, grad_dtype, false);
}

static uint64_t
step(const spw__packed *p, uint64_t first, uint64_t end)
{
    switch (SPW__KIND(p->format, p->grad_dtype)) {
        SPW__CASES(SPW_STATE_SPLIT_INT8, step_typed, p, first, end);
        SPW__CASES(SPW_STATE_SPLIT24_INT8, step_typed, p, first, end);
    default: SPW_ASSERT(false); return 0;
    }
}
