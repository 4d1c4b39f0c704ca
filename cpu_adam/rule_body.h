/*
 * Kernels of the other rules with vectors in fp32, mixed and split, included behind adam_body.h, whose loads and stores they share: one
 * pass with everything in registers. One body is inlined once per rule, state format and gradient type.
 */
#include "rule_update.h"

/* Elements [first, end), whole blocks. */
ALWAYS_INLINE uint64_t
rule_body(const spw__packed *p, uint64_t first, uint64_t end, int rule, spw_state_format format, spw_dtype grad_dtype)
{
    const spw_adam_slice s = {.weights = p->hi, .master = p->lo, .m = p->m, .grad = p->grad};
    const bool has_moment = rule != SPW_OPT_MUON;
    const rule_coefs c = rule_coefs_of(rule, p->coef->c);
    const vec grad_scale = all_of(p->grad_scale);
    uint64_t nonfinite_count = 0;
    for (uint64_t i = first; i < end; i += BLOCK) {
        vec g[VECTORS], w[VECTORS], m[VECTORS];
        prefetch_block(&s, has_moment, format, grad_dtype, i);
        for (int k = 0; k < VECTORS; k++)
            g[k] = load_grad(s.grad, grad_dtype, i + (uint64_t)k * LANES) * grad_scale;
        for (int k = 0; k < VECTORS; k++)
            w[k] = load_master(&s, format, i + (uint64_t)k * LANES);
        for (int k = 0; k < VECTORS; k++)
            m[k] = has_moment ? load(s.m + i + k * LANES) : g[k];
        for (int k = 0; k < VECTORS; k++) {
            nonfinite_count += count_nonfinite(g[k]);
            update(rule, &c, false, &w[k], &m[k], g[k]);
        }
        for (int k = 0; k < VECTORS && has_moment; k++)
            store(s.m + i + k * LANES, m[k]);
        for (int k = 0; k < VECTORS; k++)
            store_master(&s, format, i + (uint64_t)k * LANES, w[k]);
    }
    return nonfinite_count;
}

ALWAYS_INLINE uint64_t
rule_step(const spw__packed *p, uint64_t first, uint64_t end, int rule)
{
    switch (SPW__KIND(p->format, p->grad_dtype)) {
        SPW__CASES(SPW_STATE_FP32, rule_body, p, first, end, rule);
        SPW__CASES(SPW_STATE_MIXED, rule_body, p, first, end, rule);
        SPW__CASES(SPW_STATE_SPLIT, rule_body, p, first, end, rule);
        SPW__CASES(SPW_STATE_MIXED_F16, rule_body, p, first, end, rule);
    default: return p->general(p->ctx, first, end);
    }
}

static uint64_t
rules(const spw__packed *p, uint64_t first, uint64_t end)
{
    BY_RULE(p, rule_step, p, first, end);
}

const spw__packed_fn ADAM_JOIN(spw__rules_, ADAM_KERNEL) = rules;
