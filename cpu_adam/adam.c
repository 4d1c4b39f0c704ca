/*
 * The optimizer's front door: turns hyper-parameters into coefficients and sends a slice to the fastest kernel that
 * this CPU has. What a step computes is in adam_ref.c; how the state lies in memory is in state.c.
 */
#include "cpu_adam_internal.h"
#include <math.h>
#include <stdatomic.h>

/* Finite, not negative, and still finite as fp32. */
static bool
is_usable(double x)
{
    return x >= 0.0 && isfinite((float)x);
}

static spw_status
check_hp(const spw_adam_hp *hp, spw_error *err)
{
    if (!is_usable(hp->lr))
        return SPW_RAISE(err, SPW_EINVAL, "Adam: lr %g is not a finite number >= 0", hp->lr);
    if (!is_usable(hp->weight_decay))
        return SPW_RAISE(err, SPW_EINVAL, "Adam: weight_decay %g is not a finite number >= 0", hp->weight_decay);
    if (!is_usable(hp->grad_scale))
        return SPW_RAISE(err, SPW_EINVAL, "Adam: grad_scale %g is not a finite number >= 0", hp->grad_scale);
    if (!(hp->beta1 >= 0.0 && hp->beta1 < 1.0))
        return SPW_RAISE(err, SPW_EINVAL, "Adam: beta1 %g is outside [0, 1)", hp->beta1);
    if (!(hp->beta2 >= 0.0 && hp->beta2 < 1.0))
        return SPW_RAISE(err, SPW_EINVAL, "Adam: beta2 %g is outside [0, 1)", hp->beta2);
    /* As fp32: an eps that rounds to 0 would divide 0 by 0 where the gradient has always been 0. */
    if (!is_usable(hp->eps) || (float)hp->eps <= 0.0f)
        return SPW_RAISE(err, SPW_EINVAL, "Adam: eps %g is not a finite number above 0 in fp32", hp->eps);
    if (hp->step == 0)
        return SPW_RAISE(err, SPW_EINVAL, "Adam: step 0; steps count from 1");
    return SPW_OK;
}

spw_status
spw_adam_prepare(spw_adam_coef *out, const spw_adam_hp *hp, spw_error *err)
{
    double bias1 = 1.0, bias2 = 1.0, step_size, decay;
    SPW_TRY(check_hp(hp, err));
    if (hp->bias_correction) {
        bias1 = 1.0 - pow(hp->beta1, (double)hp->step);
        bias2 = 1.0 - pow(hp->beta2, (double)hp->step);
    }
    step_size = hp->lr / bias1;
    decay = hp->decoupled ? 1.0 - hp->lr * hp->weight_decay : 1.0;
    if (!is_usable(step_size) || !isfinite((float)decay))
        return SPW_RAISE(err, SPW_EINVAL, "Adam: lr %g with beta1 %g, weight_decay %g overflows fp32 at step %llu",
                         hp->lr, hp->beta1, hp->weight_decay, (unsigned long long)hp->step);
    *out = (spw_adam_coef){
        .grad_scale = (float)hp->grad_scale,
        .beta1 = (float)hp->beta1,
        .one_minus_beta1 = (float)(1.0 - hp->beta1),
        .beta2 = (float)hp->beta2,
        .one_minus_beta2 = (float)(1.0 - hp->beta2),
        .eps = (float)hp->eps,
        .l2 = hp->decoupled ? 0.0f : (float)hp->weight_decay,
        .decay = (float)decay,
        .step_size = (float)step_size,
        .inv_bc2_sqrt = (float)(1.0 / sqrt(bias2)),
    };
    return SPW_OK;
}

/* NULL when the build lacks it. */
static spw__adam_fn
kernel_of(spw_isa isa)
{
    switch (isa) {
    case SPW_ISA_SCALAR: return spw__adam_ref;
    case SPW_ISA_AVX2: return spw__adam_avx2;
    case SPW_ISA_AVX512: return spw__adam_avx512;
    case SPW_ISA_NEON: return spw__adam_neon;
    default: return NULL;
    }
}

uint64_t
spw_adam_step(const spw_adam_coef *coef, const spw_adam_slice *slice)
{
    spw_isa isa = spw_cpu_isa();
    while (kernel_of(isa) == NULL) /* ends at scalar */
        isa = (spw_isa)(isa - 1);
    return kernel_of(isa)(coef, slice);
}

spw_status
spw_adam_step_isa(spw_isa isa, const spw_adam_coef *coef, const spw_adam_slice *slice, uint64_t *nonfinite_out)
{
    spw__adam_fn kernel = kernel_of(isa);
    uint64_t nonfinite_count;
    if (kernel == NULL || !spw_cpu_has(isa))
        return SPW_EUNSUPPORTED;
    nonfinite_count = kernel(coef, slice);
    if (nonfinite_out != NULL)
        *nonfinite_out = nonfinite_count;
    return SPW_OK;
}

enum { PIECE = 1 << 16 }; /* elements: 1.8 MB of traffic, long beside the counter that hands them out */

struct run {
    const spw_adam_work *works;
    uint32_t count;
    _Atomic uint64_t nonfinite_count;
};

/* The part's work is the last whose first part is not after it; works of no elements have none. */
static void
run_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    struct run *r = ctx;
    uint32_t low = 0, high = r->count;
    const spw_adam_work *work;
    spw_adam_slice s;
    uint64_t at;
    (void)worker_idx;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        if (r->works[mid].first_part <= part_idx)
            low = mid;
        else
            high = mid;
    }
    work = &r->works[low];
    s = work->slice;
    at = (uint64_t)(part_idx - work->first_part) * PIECE;
    s.elems = s.elems - at < PIECE ? s.elems - at : PIECE;
    s.weights = (char *)s.weights + at * spw_state_weight_bytes(s.format);
    if (s.master != NULL)
        s.master = (char *)s.master + at * (s.format == SPW_STATE_SPLIT ? sizeof(int16_t) : sizeof(float));
    s.m += at;
    s.v += at;
    s.grad = (const char *)s.grad + at * spw_dtype_bytes(s.grad_dtype);
    atomic_fetch_add(&r->nonfinite_count, spw_adam_step(&work->coef, &s));
}

uint64_t
spw_adam_run(spw_pool *pool, spw_adam_work *works, uint32_t count)
{
    struct run r = {.works = works, .count = count};
    uint32_t part_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        works[i].first_part = part_count;
        part_count += (uint32_t)((works[i].slice.elems + PIECE - 1) / PIECE);
    }
    spw_pool_run(pool, part_count, run_part, &r);
    return r.nonfinite_count;
}
