/*
 * rule_update.h - the rules of opt_block.h that have one moment or none, on vectors: the same operations in the same order. Included by
 * the kernels once they have
 *
 *   vec, all_of, fma_of, sqrt_of    as adam_body.h has them
 *   canonical_of                    a NaN as opt_block.h leaves one
 *   signed_where_moves(u, lr)       lr with u's sign where u is above or below 0, else u
 */

/* A body inlined for each of them, its last argument. */
#define BY_RULE(p, body, ...)                                                                                          \
    switch ((p)->coef->optimizer->builtin) {                                                                           \
    case SPW_OPT_ADAGRAD: return body(__VA_ARGS__, SPW_OPT_ADAGRAD);                                                   \
    case SPW_OPT_LION: return body(__VA_ARGS__, SPW_OPT_LION);                                                         \
    case SPW_OPT_SGD: return body(__VA_ARGS__, SPW_OPT_SGD);                                                           \
    default: return body(__VA_ARGS__, SPW_OPT_MUON);                                                                   \
    }

typedef struct rule_coefs {
    vec c[6];
    bool has_l2, nesterov;
} rule_coefs;

ALWAYS_INLINE rule_coefs
rule_coefs_of(int rule, const float *c)
{
    rule_coefs k = {.has_l2 = c[rule == SPW_OPT_ADAGRAD ? 2 : 3] != 0.0f, .nesterov = c[4] != 0.0f};
    for (int i = 0; i < 6; i++)
        k.c[i] = all_of(i == 0 && rule != SPW_OPT_LION ? -c[i] : c[i]);
    return k;
}

/* normal: NaN need not be made canonical, as what has one is not stored. */
ALWAYS_INLINE void
update(int rule, const rule_coefs *k, bool normal, vec *w, vec *m, vec g)
{
    const vec *c = k->c;
    vec x;
    switch (rule) {
    case SPW_OPT_ADAGRAD:
        g = k->has_l2 ? fma_of(c[2], *w, g) : g;
        x = fma_of(g, g, *m);
        *m = normal ? x : canonical_of(x);
        x = fma_of(c[0], g / (sqrt_of(*m) + c[1]), *w);
        break;
    case SPW_OPT_LION:
        x = *w * c[4] - signed_where_moves(fma_of(c[0], *m, c[1] * g), c[5]);
        *m = fma_of(c[2], *m, c[3] * g);
        *m = normal ? *m : canonical_of(*m);
        break;
    case SPW_OPT_SGD:
        g = k->has_l2 ? fma_of(c[3], *w, g) : g;
        x = fma_of(c[1], *m, c[2] * g);
        *m = normal ? x : canonical_of(x);
        x = fma_of(c[0], k->nesterov ? fma_of(c[1], *m, g) : *m, *w);
        break;
    default: x = fma_of(c[0], g, *w * c[1]); break; /* Muon's second half */
    }
    *w = normal ? x : canonical_of(x);
}
