/*
 * opt.c - a step of any optimizer in any state format: checks hyper-parameters, then walks a chunk in blocks that fit
 * L1. Our rules have fused kernels that keep everything in registers: Adam's in fp32, mixed and split (adam.c), the others' in what has
 * fp32 moments (rule_body.h), and for packed moments (packed_body.h). The rest is decoded, updated by its rule and encoded, block by
 * block (opt_block.h).
 */
#include "cpu_adam_internal.h"
#include <math.h>
#include <strings.h>

enum { THIRD_PARTY_MAX = 16, SQUARES = 4096, PREFETCH_AHEAD = 2 * SPW_OPT_BLOCK };
static const spw_optimizer *third_party[THIRD_PARTY_MAX];
static uint32_t third_party_count;

/* ---------------------------------------------------------------- hyper-parameters */

static bool
usable(double x) /* finite and not negative, also in fp32 */
{
    return x >= 0.0 && isfinite((float)x);
}

static spw_status
check(const char *optimizer, const char *name, double x, bool below_one, spw_error *err)
{
    if (!usable(x) || (below_one && x >= 1.0))
        return SPW_RAISE(err, SPW_EINVAL, "%s: %s %g is %s", optimizer, name, x,
                         below_one ? "outside [0, 1)" : "not a finite number >= 0");
    return SPW_OK;
}

static spw_status
check_eps(const char *optimizer, double eps, spw_error *err)
{
    if (!usable(eps) || (float)eps <= 0.0f)
        return SPW_RAISE(err, SPW_EINVAL, "%s: eps %g is not a finite number above 0 in fp32", optimizer, eps);
    return SPW_OK;
}

static spw_status
prepare_adam(float c[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    spw_adam_hp adam = {.lr = hp->lr,
                        .beta1 = hp->beta1,
                        .beta2 = hp->beta2,
                        .eps = hp->eps,
                        .weight_decay = hp->weight_decay,
                        .decoupled = hp->decoupled,
                        .bias_correction = hp->bias_correction,
                        .step = hp->step,
                        .grad_scale = hp->grad_scale};
    spw_adam_coef k;
    SPW_TRY(spw_adam_prepare(&k, &adam, err));
    c[0] = k.one_minus_beta1;
    c[1] = k.beta2;
    c[2] = k.one_minus_beta2;
    c[3] = k.eps;
    c[4] = k.l2;
    c[5] = k.decay;
    c[6] = k.step_size;
    c[7] = k.inv_bc2_sqrt;
    return SPW_OK;
}

static spw_status
prepare_adagrad(float c[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    SPW_TRY(check("Adagrad", "lr_decay", hp->lr_decay, false, err));
    SPW_TRY(check_eps("Adagrad", hp->eps, err));
    c[0] = (float)(hp->lr / (1.0 + (double)(hp->step - 1) * hp->lr_decay));
    c[1] = (float)hp->eps;
    c[2] = (float)hp->weight_decay;
    return SPW_OK;
}

static spw_status
prepare_lion(float c[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    SPW_TRY(check("Lion", "beta1", hp->beta1, true, err));
    SPW_TRY(check("Lion", "beta2", hp->beta2, true, err));
    c[0] = (float)hp->beta1;
    c[1] = (float)(1.0 - hp->beta1);
    c[2] = (float)hp->beta2;
    c[3] = (float)(1.0 - hp->beta2);
    c[4] = (float)(1.0 - hp->lr * hp->weight_decay);
    c[5] = (float)hp->lr;
    return isfinite(c[4]) ? SPW_OK
                          : SPW_RAISE(err, SPW_EINVAL, "Lion: lr %g with weight_decay %g overflows fp32", hp->lr,
                                      hp->weight_decay);
}

static spw_status
prepare_sgd(float c[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    SPW_TRY(check("SGD", "momentum", hp->momentum, false, err));
    if (!isfinite((float)hp->dampening))
        return SPW_RAISE(err, SPW_EINVAL, "SGD: dampening %g is not a finite number", hp->dampening);
    if (hp->nesterov && (hp->momentum <= 0.0 || hp->dampening != 0.0))
        return SPW_RAISE(err, SPW_EINVAL, "SGD: nesterov needs a momentum above 0 and no dampening, not %g and %g",
                         hp->momentum, hp->dampening);
    c[0] = (float)hp->lr;
    c[1] = (float)hp->momentum;
    c[2] = hp->step == 1 || hp->momentum == 0.0 ? 1.0f : (float)(1.0 - hp->dampening); /* of what has a buffer */
    c[3] = (float)hp->weight_decay;
    c[4] = hp->nesterov ? 1.0f : 0.0f;
    return SPW_OK;
}

static spw_status
prepare_muon(float c[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    SPW_TRY(check("Muon", "momentum", hp->momentum, true, err));
    c[0] = (float)hp->lr;
    c[1] = (float)(1.0 - hp->lr * hp->weight_decay);
    c[2] = (float)(1.0 - hp->momentum);
    c[3] = (float)hp->momentum;
    c[4] = hp->nesterov ? 1.0f : 0.0f;
    return isfinite(c[1]) ? SPW_OK
                          : SPW_RAISE(err, SPW_EINVAL, "Muon: lr %g with weight_decay %g overflows fp32", hp->lr,
                                      hp->weight_decay);
}

const spw_optimizer spw_opt_adam = {.name = "Adam",
                                    .moment_count = 2,
                                    .moment_names = {"exp_avg", "exp_avg_sq"},
                                    .moment_unsigned = {false, true},
                                    .prepare = prepare_adam,
                                    .builtin = SPW_OPT_ADAM};
const spw_optimizer spw_opt_adagrad = {.name = "Adagrad",
                                       .moment_count = 1,
                                       .moment_names = {"sum"},
                                       .moment_unsigned = {true},
                                       .prepare = prepare_adagrad,
                                       .builtin = SPW_OPT_ADAGRAD};
const spw_optimizer spw_opt_lion = {
    .name = "Lion", .moment_count = 1, .moment_names = {"exp_avg"}, .prepare = prepare_lion, .builtin = SPW_OPT_LION};
const spw_optimizer spw_opt_sgd = {.name = "SGD",
                                   .moment_count = 1,
                                   .moment_names = {"momentum_buffer"},
                                   .prepare = prepare_sgd,
                                   .builtin = SPW_OPT_SGD};
const spw_optimizer spw_opt_muon = {.name = "Muon",
                                    .moment_count = 1,
                                    .moment_names = {"momentum_buffer"},
                                    .prepare = prepare_muon,
                                    .builtin = SPW_OPT_MUON};

static const spw_optimizer *const ours[SPW_OPT_BUILTIN_COUNT] = {[SPW_OPT_ADAM] = &spw_opt_adam,
                                                                 [SPW_OPT_ADAGRAD] = &spw_opt_adagrad,
                                                                 [SPW_OPT_LION] = &spw_opt_lion,
                                                                 [SPW_OPT_SGD] = &spw_opt_sgd,
                                                                 [SPW_OPT_MUON] = &spw_opt_muon};

const spw_optimizer *
spw_optimizer_find(const char *name)
{
    if (strcasecmp(name, "AdamW") == 0)
        return &spw_opt_adam;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (strcasecmp(name, ours[i]->name) == 0)
            return ours[i];
    for (uint32_t i = 0; i < third_party_count; i++)
        if (strcasecmp(name, third_party[i]->name) == 0)
            return third_party[i];
    return NULL;
}

/* Tensors of checkpoints and parts of a parameter go by them, beside those that each parameter has anyway. */
static spw_status
check_moment_names(const spw_optimizer *o, spw_error *err)
{
    static const char *const taken[] = {"master", "weight", "grad"};
    for (uint32_t k = 0; k < o->moment_count; k++) {
        const char *name = o->moment_names[k];
        bool again = false;
        if (name == NULL || name[0] == '\0')
            return SPW_RAISE(err, SPW_EINVAL, "optimizer %s: moment %u has no name", o->name, k);
        for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
            again = again || strcmp(name, taken[i]) == 0;
        for (uint32_t i = 0; i < k; i++)
            again = again || strcmp(name, o->moment_names[i]) == 0;
        if (again)
            return SPW_RAISE(err, SPW_EINVAL, "optimizer %s: moment %u is called %s, as something else is", o->name, k,
                             name);
    }
    return SPW_OK;
}

spw_status
spw_optimizer_register(const spw_optimizer *o, spw_error *err)
{
    if (o->name == NULL || o->name[0] == '\0' || o->prepare == NULL || o->rule == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "an optimizer needs a name, prepare and a rule");
    if (o->moment_count > SPW_MOMENTS_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "optimizer %s: %u moments, at most %d", o->name, o->moment_count,
                         SPW_MOMENTS_MAX);
    SPW_TRY(check_moment_names(o, err));
    if (spw_optimizer_find(o->name) != NULL || third_party_count == THIRD_PARTY_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "optimizer %s: the name is taken, or there are %d already", o->name,
                         THIRD_PARTY_MAX);
    third_party[third_party_count++] = o;
    return SPW_OK;
}

spw_status
spw_opt_prepare(spw_opt_coef *out, const spw_optimizer *o, const spw_opt_hp *hp, spw_error *err)
{
    spw_opt_coef made = {.optimizer = o, .grad_scale = (float)hp->grad_scale, .nearest = hp->nearest};
    uint32_t words[4];
    SPW_TRY(check(o->name, "lr", hp->lr, false, err));
    SPW_TRY(check(o->name, "weight_decay", hp->weight_decay, false, err));
    SPW_TRY(check(o->name, "grad_scale", hp->grad_scale, false, err));
    if (hp->step == 0)
        return SPW_RAISE(err, SPW_EINVAL, "%s: step 0; steps count from 1", o->name);
    SPW_TRY(o->prepare(made.c, hp, err));
    spw_philox(hp->seed, 0x6f7074, hp->step, words);
    made.key = words[0];
    *out = made;
    return SPW_OK;
}

/* ---------------------------------------------------------------- a chunk, block by block */

typedef struct block {
    _Alignas(64) float w[SPW_OPT_BLOCK], g[SPW_OPT_BLOCK], m[SPW_MOMENTS_MAX][SPW_OPT_BLOCK];
} block;

/* The arrays of a chunk that are not fp32 themselves. */
typedef struct walk {
    const spw_opt_chunk *chunk;
    const spw__opt_table *table;
    const spw_optimizer *o;
    spw_opt_rule rule;
    const spw__state_layout *layout;
    uint32_t moment_count; /* that it changes */
    bool scaled;           /* gradients are to be */
    char *moments[SPW_MOMENTS_MAX];
    uint16_t *scales[SPW_MOMENTS_MAX];
} walk;

static float *
load_master(const walk *k, uint64_t i, uint32_t n, float *w)
{
    const spw_opt_chunk *c = k->chunk;
    if (c->format == SPW_STATE_FP32)
        return (float *)c->weights + i;
    if (k->layout->low_bytes == 4)
        return (float *)c->record + i;
    if (k->layout->low_bytes == 2)
        k->table->load_split(w, (uint16_t *)c->weights + i, (int16_t *)c->record + i, n);
    else
        k->table->load_split24(w, (uint16_t *)c->weights + i, (int8_t *)c->record + i, n);
    return w;
}

static void
store_master(const walk *k, uint64_t i, uint32_t n, const float *w)
{
    const spw_opt_chunk *c = k->chunk;
    if (c->format == SPW_STATE_FP32)
        return;
    if (k->layout->low_bytes == 4 && k->layout->weight_dtype == SPW_BF16)
        k->table->store_bf16((uint16_t *)c->weights + i, w, n);
    else if (k->layout->low_bytes == 4)
        k->table->store_f16((uint16_t *)c->weights + i, w, n);
    else if (k->layout->low_bytes == 2)
        k->table->store_split((uint16_t *)c->weights + i, (int16_t *)c->record + i, w, n);
    else
        k->table->store_split24((uint16_t *)c->weights + i, (int8_t *)c->record + i, w, n);
}

static float *
load_moment(const walk *k, uint32_t j, uint64_t i, uint32_t n, float *m)
{
    char *at = k->moments[j];
    uint16_t *scale = k->scales[j] != NULL ? k->scales[j] + i / SPW_STATE_GROUP : NULL;
    if (k->layout->code == SPW__MOMENT_F32)
        return (float *)(void *)at + i;
    if (k->layout->code == SPW__MOMENT_BF16)
        k->table->load_bf16(m, (uint16_t *)(void *)at + i, n);
    else if (k->o->moment_unsigned[j])
        k->table->load_uint8(m, (uint8_t *)at + i, scale, n);
    else
        k->table->load_int8(m, (int8_t *)at + i, scale, n);
    return m;
}

static void
store_moment(const walk *k, uint32_t j, uint64_t i, uint32_t n, const float *m, const spw_opt_coef *coef)
{
    char *at = k->moments[j];
    uint16_t *scale = k->scales[j] != NULL ? k->scales[j] + i / SPW_STATE_GROUP : NULL;
    const spw__scale_rounding stochastic = {coef->key, (uint32_t)((k->chunk->first + i) / SPW_STATE_GROUP)};
    const spw__scale_rounding *by = coef->nearest ? NULL : &stochastic;
    if (k->layout->code == SPW__MOMENT_F32)
        return;
    if (k->layout->code == SPW__MOMENT_BF16 && coef->nearest)
        k->table->store_bf16((uint16_t *)(void *)at + i, m, n);
    else if (k->layout->code == SPW__MOMENT_BF16)
        k->table->store_bf16_stochastic((uint16_t *)(void *)at + i, m, n, coef->key + j * SPW__HASH_STEP,
                                        (uint32_t)(k->chunk->first + i));
    else if (k->o->moment_unsigned[j])
        k->table->store_uint8((uint8_t *)at + i, scale, m, n, by);
    else
        k->table->store_int8((int8_t *)at + i, scale, m, n, by);
}

/* Of a block's elements from i on, those that come later. */
static void
prefetch(const void *array, uint64_t element_bytes, uint64_t i)
{
    spw__prefetch(array, (i + PREFETCH_AHEAD) * element_bytes, SPW_OPT_BLOCK * element_bytes);
}

/* Elements [from, to) of the chunk; they lie in ranges[0] and those after it. */
static uint64_t
walk_blocks(const walk *k, const spw_opt_range *ranges, uint64_t from, uint64_t to)
{
    const spw_opt_chunk *c = k->chunk;
    const uint64_t grad_bytes = spw_dtype_bytes(c->grad_dtype);
    uint64_t nonfinite_count = 0;
    block b;
    for (uint64_t i = from; i < to; i += SPW_OPT_BLOCK) {
        uint32_t n = to - i < SPW_OPT_BLOCK ? (uint32_t)(to - i) : SPW_OPT_BLOCK;
        const spw_opt_coef *first = ranges->coef; /* of one step: all have its key */
        float *w, *m[SPW_MOMENTS_MAX] = {b.m[0], b.m[1]};
        prefetch(c->weights, spw_state_weight_bytes(c->format), i);
        w = load_master(k, i, n, b.w);
        prefetch(c->grad, grad_bytes, i);
        for (uint32_t j = 0; j < k->moment_count; j++)
            m[j] = load_moment(k, j, i, n, b.m[j]);
        for (uint32_t at = 0; at < n;) {
            uint32_t end;
            while (ranges->end <= i + at)
                ranges++;
            end = ranges->end < i + n ? (uint32_t)(ranges->end - i) : n;
            nonfinite_count +=
                k->table->load_grad(b.g + at, (const char *)c->grad + (i + at) * grad_bytes, c->grad_dtype, end - at,
                                    k->scaled ? ranges->coef->grad_scale : 1.0f);
            k->rule(ranges->coef->c, end - at, w + at, m[0] + at, m[1] + at, b.g + at);
            at = end;
        }
        prefetch(c->record, k->layout->low_bytes, i);
        store_master(k, i, n, w);
        for (uint32_t j = 0; j < k->moment_count; j++)
            prefetch(k->moments[j], spw_state_moment_bytes(c->format), i);
        for (uint32_t j = 0; j < k->moment_count; j++)
            store_moment(k, j, i, n, m[j], first);
    }
    return nonfinite_count;
}

const spw__opt_table *
spw__opt_table_of(spw_isa isa)
{
    if (!spw_cpu_has(isa))
        return NULL;
    return isa == SPW_ISA_AVX512 ? spw__opt_table_avx512
           : isa == SPW_ISA_AVX2 ? spw__opt_table_avx2
                                 : &spw__opt_table_ref;
}

spw_isa
spw__opt_isa(void)
{
    spw_isa isa = spw_cpu_isa();
    while (spw__opt_table_of(isa) == NULL) /* ends at scalar */
        isa = (spw_isa)(isa - 1);
    return isa;
}

static walk
walk_of(const spw__opt_table *table, const spw_opt_chunk *c, const spw_optimizer *o)
{
    walk k = {.chunk = c,
              .table = table,
              .o = o,
              .rule = o->rule != NULL ? o->rule : table->rules[o->builtin],
              .layout = &spw__state_layouts[c->format],
              .moment_count = o == &spw_opt_muon ? 0 : o->moment_count, /* its first half has */
              .scaled = o != &spw_opt_muon};
    for (uint32_t j = 0; j < o->moment_count; j++) {
        k.moments[j] = spw__state_moment(c->format, o, c->record, c->elems, j);
        k.scales[j] = spw__state_scales(c->format, o, c->record, c->elems, j);
    }
    return k;
}

/* What a fused kernel would not take. */
typedef struct general_walk {
    const walk *walk;
    const spw_opt_range *ranges; /* those that hold it, and what comes after */
} general_walk;

static uint64_t
walk_some(void *ctx, uint64_t first, uint64_t end)
{
    const general_walk *g = ctx;
    return walk_blocks(g->walk, g->ranges, first, end);
}

/* Whole groups of one range by the fused kernel, a group that several ranges share block by block. */
static uint64_t
step_packed(spw__packed_fn kernel, const walk *k, const spw_opt_range *ranges, uint64_t from, uint64_t to)
{
    const spw_opt_chunk *c = k->chunk;
    general_walk general = {k, ranges};
    uint64_t nonfinite_count = 0;
    spw__packed p = {.format = c->format,
                     .grad_dtype = c->grad_dtype,
                     .first = c->first,
                     .hi = c->weights,
                     .lo = c->record,
                     .m = k->moments[0],
                     .v = k->moments[1],
                     .m_scale = k->scales[0],
                     .v_scale = k->scales[1],
                     .grad = c->grad,
                     .general = walk_some,
                     .ctx = &general};
    for (uint64_t at = from; at < to;) {
        uint64_t end;
        while (general.ranges->end <= at)
            general.ranges++;
        end = general.ranges->end < to ? general.ranges->end / SPW_STATE_GROUP * SPW_STATE_GROUP : to;
        if (end > at) {
            p.coef = general.ranges->coef;
            p.grad_scale = k->scaled ? p.coef->grad_scale : 1.0f;
            nonfinite_count += kernel(&p, at, end);
        } else {
            end = at + SPW_STATE_GROUP;
            nonfinite_count += walk_some(&general, at, end);
        }
        at = end;
    }
    return nonfinite_count;
}

/* NULL: this state has none. The kernels of packed moments round stochastically. */
static spw__packed_fn
packed_of(spw_isa isa, const spw_opt_chunk *c, const spw_opt_coef *coef)
{
    static const spw__packed_fn *const rules[SPW_ISA_COUNT] = {
        [SPW_ISA_AVX2] = &spw__rules_avx2, [SPW_ISA_AVX512] = &spw__rules_avx512, [SPW_ISA_NEON] = &spw__rules_neon};
    spw__moment_code code = spw__state_layouts[c->format].code;
    const spw_optimizer *o = coef->optimizer;
    const bool adam = o == &spw_opt_adam;
    if (o->rule != NULL || ours[o->builtin] != o)
        return NULL;
    if (code == SPW__MOMENT_F32)
        return adam || rules[isa] == NULL ? NULL : *rules[isa];
    if (coef->nearest || (isa != SPW_ISA_AVX2 && isa != SPW_ISA_AVX512))
        return NULL;
    if (!adam)
        return isa == SPW_ISA_AVX2 ? spw__rules_packed_avx2 : spw__rules_packed_avx512;
    if (code == SPW__MOMENT_BF16)
        return isa == SPW_ISA_AVX2 ? spw__packed_bf16_avx2 : spw__packed_bf16_avx512;
    return isa == SPW_ISA_AVX2 ? spw__packed_int8_avx2 : spw__packed_int8_avx512;
}

spw_adam_coef
spw__adam_coef_of(const spw_opt_coef *o)
{
    return (spw_adam_coef){.grad_scale = o->grad_scale,
                           .one_minus_beta1 = o->c[0],
                           .beta2 = o->c[1],
                           .one_minus_beta2 = o->c[2],
                           .eps = o->c[3],
                           .l2 = o->c[4],
                           .decay = o->c[5],
                           .step_size = o->c[6],
                           .inv_bc2_sqrt = o->c[7]};
}

/* Adam's fused kernels, range by range. */
static uint64_t
step_adam(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint64_t from, uint64_t to)
{
    uint64_t nonfinite_count = 0, first = from;
    for (const spw_opt_range *r = ranges; first < to; r++) {
        const spw_adam_coef coef = spw__adam_coef_of(r->coef);
        uint64_t end = r->end < to ? r->end : to;
        spw_adam_slice slice;
        uint64_t bad = 0;
        if (end <= first)
            continue;
        spw_adam_slice_init(&slice, c->format, c->weights, c->record, c->elems, c->grad, c->grad_dtype, first,
                            end - first);
        (void)spw_adam_step_isa(isa, &coef, &slice, &bad);
        nonfinite_count += bad;
        first = end;
    }
    return nonfinite_count;
}

/* In place, by the fastest kernel there is. */
static uint64_t
step_any(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint64_t from, uint64_t to)
{
    const spw_optimizer *o = ranges[0].coef->optimizer;
    walk k;
    spw__packed_fn kernel;
    if (o == &spw_opt_adam && c->format <= SPW_STATE_SPLIT)
        return step_adam(isa, c, ranges, from, to);
    k = walk_of(spw__opt_table_of(isa), c, o);
    kernel = packed_of(isa, c, ranges[0].coef);
    return kernel != NULL ? step_packed(kernel, &k, ranges, from, to) : walk_blocks(&k, ranges, from, to);
}

/* A piece is copied to the log, and then updated from the cache. */
static uint64_t
step_copied(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint64_t from, uint64_t to)
{
    enum { PIECE = 4096 };
    uint64_t nonfinite_count = 0;
    for (uint64_t at = from, end; at < to; at = end) {
        end = to - at < PIECE ? to : at + PIECE;
        spw__log_copy(spw__opt_table_of(isa), c, ranges[0].coef->optimizer, at, end, false);
        nonfinite_count += step_any(isa, c, ranges, at, end);
    }
    return nonfinite_count;
}

spw_status
spw_opt_step_isa(spw_isa isa, const spw_opt_chunk *c, const spw_opt_range *ranges, uint32_t range_count,
                 uint64_t *nonfinite_out)
{
    uint64_t nonfinite_count, from = c->begin, to = c->end > 0 ? c->end : c->elems;
    SPW_ASSERT(c->begin % SPW_STATE_GROUP == 0 && to % SPW_STATE_GROUP == 0 && to <= c->elems);
    SPW_ASSERT(range_count > 0 && ranges[range_count - 1].end == c->elems && c->elems % SPW_STATE_GROUP == 0);
    if (spw__opt_table_of(isa) == NULL)
        return SPW_EUNSUPPORTED;
    if (c->log == NULL)
        nonfinite_count = step_any(isa, c, ranges, from, to);
    else if (spw__runs_backwards(c->format, ranges[0].coef->optimizer, c->log_weights))
        nonfinite_count = spw__opt_step_logged(isa, c, ranges, from, to);
    else
        nonfinite_count = step_copied(isa, c, ranges, from, to);
    if (nonfinite_out != NULL)
        *nonfinite_out = nonfinite_count;
    return SPW_OK;
}

uint64_t
spw_opt_step(const spw_opt_chunk *chunk, const spw_opt_range *ranges, uint32_t range_count)
{
    uint64_t nonfinite_count = 0;
    (void)spw_opt_step_isa(spw__opt_isa(), chunk, ranges, range_count, &nonfinite_count);
    return nonfinite_count;
}

/* ---------------------------------------------------------------- Muon's first half */

/* Elements of a block, whose place in the chunk is i, in one range. */
static uint64_t
take_range(const spw__opt_table *t, const spw_opt_chunk *c, void *grad, const spw_opt_coef *coef, float *m, uint64_t i,
           uint32_t n, double *lane)
{
    _Alignas(64) float g[SPW_OPT_BLOCK];
    char *at = (char *)grad + i * spw_dtype_bytes(c->grad_dtype);
    uint64_t nonfinite_count = t->load_grad(g, at, c->grad_dtype, n, coef->grad_scale);
    t->momentum(coef->c, n, m, g, c->grad_dtype == SPW_F16 ? 1.0f / coef->grad_scale : 1.0f, lane);
    if (c->grad_dtype == SPW_F32)
        memcpy(at, g, n * sizeof *g);
    else if (c->grad_dtype == SPW_BF16)
        t->store_bf16((uint16_t *)(void *)at, g, n);
    else
        t->store_f16((uint16_t *)(void *)at, g, n);
    return nonfinite_count;
}

/* A block of the chunk, which lies in ranges[0] and those after it. */
static uint64_t
take_momentum(const walk *k, void *grad, const spw_opt_range *ranges, uint64_t i, double *lane)
{
    _Alignas(64) float decoded[SPW_OPT_BLOCK];
    float *m = load_moment(k, 0, i, SPW_OPT_BLOCK, decoded);
    const spw_opt_coef *first = ranges->coef; /* of one step: all have its key */
    uint64_t nonfinite_count = 0;
    for (uint64_t at = i; at < i + SPW_OPT_BLOCK;) {
        uint64_t end;
        while (ranges->end <= at)
            ranges++;
        end = ranges->end < i + SPW_OPT_BLOCK ? ranges->end : i + SPW_OPT_BLOCK;
        SPW_ASSERT((end - at) % SPW_SUM_LANES == 0);
        nonfinite_count +=
            take_range(k->table, k->chunk, grad, ranges->coef, m + (at - i), at, (uint32_t)(end - at), lane);
        at = end;
    }
    store_moment(k, 0, i, SPW_OPT_BLOCK, m, first);
    return nonfinite_count;
}

spw_status
spw_opt_momentum_isa(spw_isa isa, const spw_opt_chunk *c, void *grad, const spw_opt_range *ranges, uint32_t range_count,
                     double *squares, uint64_t *nonfinite_out)
{
    const uint64_t from = c->begin, to = c->end > 0 ? c->end : c->elems;
    const spw__opt_table *t = spw__opt_table_of(isa);
    uint64_t nonfinite_count = 0;
    walk k;
    SPW_ASSERT(from % SQUARES == 0 && to % SQUARES == 0 && to <= c->elems);
    SPW_ASSERT(range_count > 0 && ranges[range_count - 1].end == c->elems);
    if (t == NULL)
        return SPW_EUNSUPPORTED;
    k = walk_of(t, c, &spw_opt_muon);
    for (uint64_t at = from; at < to; at += SQUARES) {
        double lane[SPW_SUM_LANES] = {0};
        for (uint64_t i = at; i < at + SQUARES; i += SPW_OPT_BLOCK) {
            while (ranges->end <= i)
                ranges++;
            nonfinite_count += take_momentum(&k, grad, ranges, i, lane);
        }
        squares[(at - from) / SQUARES] = spw_sumsq_end(lane);
    }
    if (nonfinite_out != NULL)
        *nonfinite_out = nonfinite_count;
    return SPW_OK;
}

uint64_t
spw_opt_momentum(const spw_opt_chunk *chunk, void *grad, const spw_opt_range *ranges, uint32_t range_count,
                 double *squares)
{
    uint64_t nonfinite_count = 0;
    (void)spw_opt_momentum_isa(spw__opt_isa(), chunk, grad, ranges, range_count, squares, &nonfinite_count);
    return nonfinite_count;
}
