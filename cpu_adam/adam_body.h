/*
 * Adam's kernels with vectors, included by each once it has its vectors, LANES of them, and what they do. The operations of adam_ref.c
 * in the same order, so the bits are the same. One body is inlined once per state format and gradient type; the elements that do not fill
 * a block go to the reference.
 *
 *   vec, bits, miss       fp32 vectors, with C's operators; their bits; what an update's log gets of one, and the lanes that do not fit
 *   all_of load store sqrt_of fma_of fnma_of                   fma_of(a, b, c) is a b + c, fnma_of(a, b, c) c - a b, rounded once
 *   load_grad load_master store_master count_nonfinite         of LANES elements from element i on; lanes that are infinite or no numbers
 *   off_by                the difference of x's bits and back's, and bias
 *   missed_by             of the three differences in 8 and twice 4 bits, and the master as it is now, so that they fit
 *   fails_of store_missed the lanes of a block that do not fit, the first lowest; the log's bytes of one
 */
#ifndef ADAM_KERNEL
#error "ADAM_KERNEL is the instruction set's name"
#endif

/*
 * A block is 32 elements: one whole cache line of every 16-bit array, two of every fp32 array. Arrays of one chunk
 * often lie a large power of two apart and then evict each other from L1, so each line is loaded once, at once, and not
 * revisited before it is stored.
 */
enum { VECTORS = BLOCK / LANES, PREFETCH_AHEAD_BYTES = 1024 };

ALWAYS_INLINE void
prefetch_lines(const void *p, uint64_t bytes)
{
    spw__prefetch(p, PREFETCH_AHEAD_BYTES, bytes);
}

/* One KiB ahead on every array that is read: hardware prefetchers stop at each page. */
ALWAYS_INLINE void
prefetch_block(const spw_adam_slice *s, int moment_count, spw_state_format format, spw_dtype grad_dtype, uint64_t i)
{
    const uint64_t grad_bytes = grad_dtype == SPW_F32 ? 4 : 2;
    prefetch_lines((const char *)s->grad + i * grad_bytes, BLOCK * grad_bytes);
    if (moment_count > 0)
        prefetch_lines(s->m + i, BLOCK * 4);
    if (moment_count > 1)
        prefetch_lines(s->v + i, BLOCK * 4);
    if (format == SPW_STATE_FP32)
        prefetch_lines((const float *)s->weights + i, BLOCK * 4);
    if (format == SPW_STATE_MIXED || format == SPW_STATE_MIXED_F16)
        prefetch_lines((const float *)s->master + i, BLOCK * 4);
    if (format == SPW_STATE_SPLIT) {
        prefetch_lines((const uint16_t *)s->weights + i, BLOCK * 2);
        prefetch_lines((const int16_t *)s->master + i, BLOCK * 2);
    }
}

/* What runs an update backwards; opt_block.h has it element by element. */
typedef struct backwards {
    vec b1, step, back_m, back_v, back_w;
} backwards;

/* From state w, m, v to w1, m1, v1 by g; q is m1 / d, gg (1 - beta2) g^2. */
ALWAYS_INLINE miss
look_back(const backwards *b, vec w, vec m, vec v, vec w1, vec m1, vec v1, vec g, vec q, vec gg)
{
    return missed_by(off_by(m, fnma_of(b->b1, g, m1) * b->back_m, SPW__M_BIAS),
                     off_by(v, (v1 - gg) * b->back_v, SPW__V_BIAS),
                     off_by(w, fma_of(b->step, q, w1) * b->back_w, SPW__W_BIAS), w1);
}

/* With a log what does not fill a block is left, and all from a block on for which the list has no room; returns how much was done. */
ALWAYS_INLINE uint64_t
step_body(const spw_adam_coef *c, const spw_adam_slice *s, spw__adam_log *log, spw_state_format format,
          spw_dtype grad_dtype)
{
    const backwards back = {all_of(c->one_minus_beta1), all_of(c->step_size),
                            all_of(1.0f / (1.0f - c->one_minus_beta1)), all_of(1.0f / c->beta2),
                            all_of(1.0f / c->decay)};
    const vec grad_scale = all_of(c->grad_scale), l2 = all_of(c->l2);
    const vec one_minus_beta1 = all_of(c->one_minus_beta1), beta2 = all_of(c->beta2);
    const vec one_minus_beta2 = all_of(c->one_minus_beta2), eps = all_of(c->eps);
    const vec inv_bc2_sqrt = all_of(c->inv_bc2_sqrt), decay = all_of(c->decay);
    const vec minus_step_size = all_of(-c->step_size);
    const bool has_l2 = c->l2 != 0.0f;
    uint64_t nonfinite_count = 0, i = 0;
    _Alignas(64) float before[BLOCK]; /* masters */
    spw_adam_slice rest;
    for (; i + BLOCK <= s->elems; i += BLOCK) {
        vec g[VECTORS], w[VECTORS], m[VECTORS], v[VECTORS];
        miss missed[VECTORS];
        uint64_t bad = 0;
        prefetch_block(s, 2, format, grad_dtype, i);
        for (int k = 0; k < VECTORS; k++)
            g[k] = load_grad(s->grad, grad_dtype, i + (uint64_t)k * LANES) * grad_scale;
        for (int k = 0; k < VECTORS; k++)
            w[k] = load_master(s, format, i + (uint64_t)k * LANES);
        for (int k = 0; k < VECTORS; k++)
            m[k] = load(s->m + i + k * LANES);
        for (int k = 0; k < VECTORS; k++)
            v[k] = load(s->v + i + k * LANES);
        for (int k = 0; k < VECTORS; k++) {
            const vec w0 = w[k], m0 = m[k], v0 = v[k];
            vec d, q, gg;
            bad += count_nonfinite(g[k]);
            if (has_l2)
                g[k] = fma_of(l2, w[k], g[k]);
            m[k] = fma_of(one_minus_beta1, g[k] - m[k], m[k]);
            gg = one_minus_beta2 * g[k] * g[k];
            v[k] = fma_of(beta2, v[k], gg);
            d = fma_of(sqrt_of(v[k]), inv_bc2_sqrt, eps);
            q = m[k] / d;
            w[k] = fma_of(minus_step_size, q, w[k] * decay);
            if (log != NULL) {
                missed[k] = look_back(&back, w0, m0, v0, w[k], m[k], v[k], g[k], q, gg);
                store(before + k * LANES, w0);
            }
        }
        if (log != NULL) {
            uint32_t fails = fails_of(missed);
            if (fails != 0 && !spw__log_misfits(log, s, i, before, fails))
                break;
            store_missed(log->m_bits + i, log->vw_bits + i, missed);
        }
        nonfinite_count += bad;
        for (int k = 0; k < VECTORS; k++)
            store(s->m + i + k * LANES, m[k]);
        for (int k = 0; k < VECTORS; k++)
            store(s->v + i + k * LANES, v[k]);
        for (int k = 0; k < VECTORS; k++)
            store_master(s, format, i + (uint64_t)k * LANES, w[k]);
    }
    if (log != NULL) {
        log->nonfinite_count = nonfinite_count;
        return i;
    }
    rest = spw__adam_slice_rest(s, i);
    return nonfinite_count + spw__adam_ref(c, &rest);
}

/* log: NULL or not is known where it is called. */
ALWAYS_INLINE uint64_t
step_any(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log)
{
    switch (SPW__KIND(slice->format, slice->grad_dtype)) {
        SPW__CASES(SPW_STATE_FP32, step_body, coef, slice, log);
        SPW__CASES(SPW_STATE_MIXED, step_body, coef, slice, log);
        SPW__CASES(SPW_STATE_SPLIT, step_body, coef, slice, log);
    default: return log != NULL ? 0 : spw__adam_ref(coef, slice);
    }
}

#define ADAM_JOIN_(a, b) a##b
#define ADAM_JOIN(a, b)  ADAM_JOIN_(a, b)

static uint64_t
step(const spw_adam_coef *coef, const spw_adam_slice *slice)
{
    return step_any(coef, slice, NULL);
}

static uint64_t
logged(const spw_adam_coef *coef, const spw_adam_slice *slice, spw__adam_log *log)
{
    return step_any(coef, slice, log);
}

const spw__adam_fn ADAM_JOIN(spw__adam_, ADAM_KERNEL) = step;
const spw__adam_logged_fn ADAM_JOIN(spw__adam_logged_, ADAM_KERNEL) = logged;
