/*
 * packed_body.h - what the kernels of packed state share, whatever their vectors: included by packed_avx512.h and packed_avx2.h behind
 * their own part. A pair of vectors holds PAIR elements, in any order that loads and stores agree on; halves of 16 bits are one vector,
 * in order.
 *
 * The kernels do the operations of opt_block.h in the same order. Whatever is not an ordinary number (NaN, infinities,
 * magnitudes of 2^127 and above) goes back to opt_block.h with its neighbours before a byte is stored: the bits stay the same,
 * and the common case pays one test.
 */
enum { LINE = 32 /* 16-bit numbers */, PREFETCH_AHEAD = 512 /* elements */ };
/* 8 bits: groups share a scale. */
enum {
    GROUP = SPW__GROUP,
    PAIRS = GROUP / PAIR,
    BATCH = 8,                /* groups whose scales are made at once */
    SCALES_AHEAD = 128,       /* groups */
    SIGNED_BITS = 0x00800080, /* in two words */
    UNSIGNED_BITS = 0x00010001
};

/* Whether what is prefetched by lines is to be. */
ALWAYS_INLINE bool
begins_line(uint64_t at)
{
    return (int)PAIR == (int)LINE || at % LINE == 0;
}

/*
 * The same elements of all arrays: what is needed together comes together, and waits in L1 no longer than it must. With one
 * distance in bytes, 8-bit moments came four times as early as fp32 gradients, and steps of 8-bit states took 1 to 6 % longer.
 */
ALWAYS_INLINE void
prefetch(const void *array, uint64_t element_bytes, uint64_t at)
{
    spw__prefetch(array, (at + PREFETCH_AHEAD) * element_bytes, 1);
}

ALWAYS_INLINE void
prefetch_grad(const spw__packed *p, spw_dtype dtype, uint64_t at)
{
    const uint64_t grad_bytes = dtype == SPW_F32 ? 4 : 2;
    spw__prefetch(p->grad, (at + PREFETCH_AHEAD) * grad_bytes, LINE * grad_bytes);
}

ALWAYS_INLINE void
prefetch_master(const spw__packed *p, uint32_t low_bytes, uint64_t at)
{
    prefetch(p->hi, 2, at);
    prefetch(p->lo, low_bytes, at);
}

/* Adam's coefficients in every lane. */
typedef struct coefs {
    vec grad_scale, one_minus_beta1, beta2, one_minus_beta2, eps, l2, decay, minus_step, inv_bc2_sqrt;
} coefs;

ALWAYS_INLINE coefs
load_coefs(const spw_opt_coef *from)
{
    return (coefs){.grad_scale = all_of(from->grad_scale),
                   .one_minus_beta1 = all_of(from->c[0]),
                   .beta2 = all_of(from->c[1]),
                   .one_minus_beta2 = all_of(from->c[2]),
                   .eps = all_of(from->c[3]),
                   .l2 = all_of(from->c[4]),
                   .decay = all_of(from->c[5]),
                   .minus_step = all_of(-from->c[6]),
                   .inv_bc2_sqrt = all_of(from->c[7])};
}

/* Adam's new moments; returns v's square roots. g: gradients. */
ALWAYS_INLINE vec
new_moments(const coefs *c, vec g, vec *m, vec *v)
{
    *m = fma_of(c->one_minus_beta1, g - *m, *m);
    *v = fma_of(c->beta2, *v, c->one_minus_beta2 * g * g);
    return sqrt_of(*v);
}

ALWAYS_INLINE vec
new_master(const coefs *c, vec w, vec m, vec root)
{
    return fma_of(c->minus_step, m / fma_of(root, c->inv_bc2_sqrt, c->eps), w * c->decay);
}

ALWAYS_INLINE void
scaled_grads(const coefs *c, const spw__packed *p, spw_dtype dtype, uint64_t i, const vec w[2], bool has_l2, vec g[2])
{
    load_grads(p->grad, dtype, i, g);
    for (int j = 0; j < 2; j++) {
        g[j] = g[j] * c->grad_scale;
        g[j] = has_l2 ? fma_of(c->l2, w[j], g[j]) : g[j];
    }
}
