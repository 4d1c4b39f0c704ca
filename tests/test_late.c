/*
 * Updates that are made a step late (spillway.delayed_update), beside a simulation of them that knows the engine only as something that
 * tells the gradient at given weights; in every placement the same bytes; and what a save, a skipped step and a resumed run do with the
 * update that waits.
 */
#include "lib_rig.h"
#include "engine_internal.h"
#include "spw_access.h"
#include "spw_cpu_adam.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { STEPS = 7, AFTER = 2, SAVED = 5 };
static const double clipping = 1.3; /* which steps of the rig exceed and others do not */

static void
make_late(rig *r)
{
    r->c.run.delayed_update = AFTER;
    r->c.run.chunk_elems = 4096;
}

/* ---------------------------------------------------------------- beside a simulation */

/* All of a model's state in fp32, and a gradient that waits. */
typedef struct simulation {
    rig r; /* tells gradients: what it makes of its own weights is of no interest */
    uint64_t elems, updates;
    float *weights, *m, *v, *grad, *waiting; /* (elems) */
    double scale;                            /* of waiting */
    bool waits;
} simulation;

static void
read_gradients(void *ctx, spw_engine *e)
{
    simulation *sim = ctx;
    const spw_model *m = sim->r.model;
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_access a;
        spw_error err = {0};
        if (spw_access_find(&a, e, m->params[id].name, "grad", &err) != SPW_OK ||
            spw_access_get_full(e, &a, sim->grad + rig_elems_before(m, id), &err) != SPW_OK)
            fail_msg("%s", err.message);
    }
}

static void
set_weights(simulation *sim)
{
    const spw_model *m = sim->r.model;
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_access a;
        rig_need(&sim->r, spw_access_find(&a, sim->r.e, m->params[id].name, "master", &sim->r.err));
        rig_need(&sim->r, spw_access_set_full(sim->r.e, &a, sim->weights + rig_elems_before(m, id), 0, &sim->r.err));
    }
}

static void
update(simulation *sim)
{
    const spw_config *c = &sim->r.c;
    spw_adam_hp hp = {.lr = c->optimizer.lr,
                      .beta1 = c->optimizer.beta1,
                      .beta2 = c->optimizer.beta2,
                      .eps = c->optimizer.eps,
                      .weight_decay = c->optimizer.weight_decay,
                      .decoupled = true,
                      .bias_correction = true,
                      .step = ++sim->updates,
                      .grad_scale = sim->scale};
    spw_adam_coef coef;
    rig_need(&sim->r, spw_adam_prepare(&coef, &hp, &sim->r.err));
    spw_adam_step(&coef, &(spw_adam_slice){.format = SPW_STATE_FP32,
                                           .elems = sim->elems,
                                           .weights = sim->weights,
                                           .m = sim->m,
                                           .v = sim->v,
                                           .grad = sim->waiting,
                                           .grad_dtype = SPW_F32});
    sim->waits = false;
}

/* One step: the gradient at the weights there are, then the update of the one before, if that waits. */
static void
simulate(simulation *sim, uint64_t step, spw_step_result *out)
{
    bool late;
    set_weights(sim);
    rig_need(&sim->r, rig_step(&sim->r, step, out));
    late = sim->updates + sim->waits >= AFTER;
    if (sim->waits)
        update(sim);
    memcpy(sim->waiting, sim->grad, sim->elems * sizeof *sim->grad);
    sim->scale = out->grad_norm > clipping ? clipping / (out->grad_norm + 1e-6) : 1;
    sim->waits = true;
    if (!late)
        update(sim);
}

static void
test_simulated(void **state)
{
    static simulation sim;
    rig late;
    float *got;
    uint32_t clipped = 0;
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig *r = k == 0 ? &sim.r : &late;
        rig_config(r, SPW_FAMILY_LLAMA, SPW_STATE_FP32, SPW_TIER_HOST);
        r->c.gradient_clipping = clipping;
        r->c.run.decay_norm_and_bias = true;
        if (k == 1)
            make_late(r);
        rig_open(r);
        rig_need(r, spw_engine_init_params(r->e, 7, &r->err));
    }
    sim.elems = spw_model_elems(sim.r.model);
    sim.weights = rig_read(&late, SPW_PART_MASTER);
    sim.m = calloc(sim.elems, sizeof *sim.m);
    sim.v = calloc(sim.elems, sizeof *sim.v);
    sim.grad = calloc(sim.elems, sizeof *sim.grad);
    sim.waiting = calloc(sim.elems, sizeof *sim.waiting);
    assert_true(sim.m && sim.v && sim.grad && sim.waiting);
    spw_engine_on_gradients(sim.r.e, read_gradients, &sim);
    for (uint64_t step = 0; step < STEPS; step++) {
        spw_step_result want, is;
        simulate(&sim, step, &want);
        rig_need(&late, rig_step(&late, step, &is));
        clipped += want.grad_norm > clipping;
        if (memcmp(&want.loss, &is.loss, sizeof want.loss) != 0 ||
            memcmp(&want.grad_norm, &is.grad_norm, sizeof want.grad_norm) != 0)
            fail_msg("step %llu: loss %.17g, norm %.17g, and %.17g, %.17g simulated", (unsigned long long)step, is.loss,
                     is.grad_norm, want.loss, want.grad_norm);
        assert_true(spw_engine_updates(late.e) == step + 1);
        if (step + 1 == SAVED) { /* makes the update that waits */
            rig_save(&late, SAVED);
            update(&sim);
        }
    }
    assert_true(clipped > 0 && clipped < STEPS);
    for (int part = 0; part < 3; part++) {
        const float *want = part == 0 ? sim.weights : part == 1 ? sim.m : sim.v;
        got = rig_read(&late, (spw_state_part)(SPW_PART_MASTER + part));
        assert_memory_equal(got, want, sim.elems * sizeof *got);
        free(got);
    }
    free(sim.weights);
    free(sim.m);
    free(sim.v);
    free(sim.grad);
    free(sim.waiting);
    rig_close(&sim.r);
    rig_remove(&sim.r);
    rig_close(&late);
    rig_remove(&late);
}

/* ---------------------------------------------------------------- beside itself */

typedef struct place {
    spw_tier weights, records;
    uint64_t chaos;
    uint32_t slots;
    bool prefetch;
} place;

static const place places[] = {
    {SPW_TIER_HOST, SPW_TIER_HOST, 0, 0, true},    {SPW_TIER_HOST, SPW_TIER_HOST, 5, 0, true},
    {SPW_TIER_DEVICE, SPW_TIER_HOST, 11, 0, true}, {SPW_TIER_HOST, SPW_TIER_NVME, 13, 1, true},
    {SPW_TIER_NVME, SPW_TIER_NVME, 17, 1, true},   {SPW_TIER_NVME, SPW_TIER_NVME, 0, 2, false},
    {SPW_TIER_NVME, SPW_TIER_HOST, 19, 1, true}};
enum { PLACES = sizeof places / sizeof places[0] };

static void
configure(rig *r, spw_family family, spw_state_format format, const place *at)
{
    rig_config(r, family, format, SPW_TIER_HOST);
    make_late(r);
    r->c.gradient_clipping = clipping;
    r->c.zero.offload_param = at->weights;
    r->c.zero.offload_optimizer = at->records;
    r->c.run.chaos_seed = at->chaos;
    r->c.run.weight_slots = r->c.run.record_slots = at->slots;
    r->c.run.prefetch = at->prefetch;
}

typedef struct outcome {
    double losses[STEPS], norms[STEPS];
} outcome;

static void
train(rig *r, int first, outcome *o)
{
    for (int s = first; s < STEPS; s++) {
        spw_step_result x;
        rig_need(r, rig_step(r, (uint64_t)s, &x));
        o->losses[s] = x.loss;
        o->norms[s] = x.grad_norm;
        if (s + 1 == SAVED)
            rig_save(r, SAVED);
    }
    rig_save(r, STEPS);
}

static void
same(const outcome *want, const outcome *got, int first, const char *what)
{
    for (int s = first; s < STEPS; s++) {
        if (memcmp(&want->losses[s], &got->losses[s], sizeof want->losses[s]) != 0 ||
            memcmp(&want->norms[s], &got->norms[s], sizeof want->norms[s]) != 0)
            fail_msg("%s, step %d: loss %.17g, norm %.17g, and %.17g, %.17g in host memory", what, s, got->losses[s],
                     got->norms[s], want->losses[s], want->norms[s]);
    }
}

/* Wherever state is, with one slot, delays and poisoned buffers; and gone on with somewhere else from what was saved meanwhile. */
static void
everywhere(spw_family family, spw_state_format format)
{
    outcome want;
    rig first;
    configure(&first, family, format, &places[0]);
    rig_open(&first);
    rig_need(&first, spw_engine_init_params(first.e, 7, &first.err));
    train(&first, 0, &want);
    for (int k = 1; k < PLACES; k++) {
        outcome got;
        char what[32];
        rig r, on;
        snprintf(what, sizeof what, "place %d", k);
        configure(&r, family, format, &places[k]);
        rig_open(&r);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        train(&r, 0, &got);
        same(&want, &got, 0, what);
        rig_same_state(&first, &r, what);
        configure(&on, family, format, &places[(k + 2) % PLACES]);
        rig_load(&on, &r, SAVED);
        train(&on, SAVED, &got);
        same(&want, &got, SAVED, "resumed");
        rig_same_state(&first, &on, "resumed");
        rig_close(&on);
        rig_remove(&on);
        rig_close(&r);
        rig_remove(&r);
    }
    rig_close(&first);
    rig_remove(&first);
}

static void
test_everywhere(void **state)
{
    (void)state;
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32);
    everywhere(SPW_FAMILY_QWEN3_MOE, SPW_STATE_MIXED);
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT_INT8);
}

/* An engine in which an update waits takes what a checkpoint has, and that update is gone. */
static void
test_loaded(void **state)
{
    outcome want, got;
    spw_step_result x;
    char path[400];
    rig r;
    (void)state;
    configure(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, &places[3]);
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    train(&r, 0, &want);
    rig_need(&r, rig_step(&r, STEPS, &x));
    assert_true(r.e->late.pending);
    snprintf(path, sizeof path, "%s/step-%d", r.dir, SAVED);
    rig_need(&r, spw_checkpoint_load(r.e, path, &r.err));
    assert_true(!r.e->late.pending && spw_engine_updates(r.e) == SAVED);
    train(&r, SAVED, &got);
    same(&want, &got, SAVED, "loaded");
    rig_close(&r);
    rig_remove(&r);
}

/* A step that leaves out a block makes the update that waits of the block all the same, and leaves none. */
static void
test_other_chain(void **state)
{
    static const uint32_t fewer[] = {0, 2, 3, 4};
    uint64_t chunks, left_out;
    spw_store_stats stats;
    spw_step_result x;
    rig r;
    (void)state;
    configure(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, &places[0]);
    r.c.run.delayed_update = 1;
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    assert_int_equal(r.model->block_count, 5);
    chunks = spw_engine_layout(r.e)->chunk_count;
    left_out = 0;
    for (uint32_t u = 0; u < spw_engine_layout(r.e)->unit_count; u++)
        left_out += r.e->first_use[u] == 1 ? spw_engine_layout(r.e)->units[u].chunk_count : 0;
    assert_true(left_out > 0);
    for (uint64_t s = 0; s < 6; s++) {
        if (s == 3)
            rig_need(&r, spw_engine_set_chain(r.e, fewer, 4, &r.err));
        rig_need(&r, rig_step(&r, s, &x));
        if (s == 0)
            continue;
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        spw_store_get_stats(spw_engine_store(r.e), &stats);
        assert_int_equal(stats.updates, s * chunks - (s > 3 ? (s - 3) * left_out : 0));
    }
    rig_close(&r);
    rig_remove(&r);
}

/* A gradient that is not finite is none: the step after it makes no update, and the scale falls. */
static void
test_skipped(void **state)
{
    uint32_t skipped = 0;
    uint64_t good = 0;
    spw_store_stats stats;
    rig r;
    (void)state;
    configure(&r, SPW_FAMILY_GPT2, SPW_STATE_MIXED_F16, &places[3]);
    r.c.bf16 = false;
    r.c.fp16 = true;
    r.c.run.delayed_update = 1;
    r.c.run.grad_dtype = SPW_F16;
    r.c.loss_scale.initial_power = 24; /* far too much, and soon again */
    r.c.loss_scale.window = 2;
    r.c.loss_scale.hysteresis = 1;
    r.c.loss_scale.min = 1;
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    for (uint64_t s = 0; s < 24; s++) {
        spw_step_result x;
        uint64_t chunks = spw_engine_layout(r.e)->chunk_count;
        rig_need(&r, rig_step(&r, s, &x));
        spw_store_get_stats(spw_engine_store(r.e), &stats);
        if (good > 0) /* this one is late: what waited was made while it ran */
            assert_true(stats.updates == good * chunks && r.e->late.pending == !x.skipped);
        good += !x.skipped;
        skipped += x.skipped;
    }
    assert_true(skipped > 2 && skipped < 20);
    rig_close(&r);
    rig_remove(&r);
}

/* What it is not for is refused by name. */
static void
test_refused(void **state)
{
    (void)state;
    for (int k = 0; k < 5; k++) {
        rig r;
        configure(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, &places[3]);
        if (k == 0)
            r.c.zero.offload_optimizer = SPW_TIER_DEVICE;
        if (k == 1)
            r.c.zero.optimizer_ratio = 0.5;
        if (k == 2)
            snprintf(r.c.run.fill_device, sizeof r.c.run.fill_device, "always");
        if (k == 3)
            snprintf(r.c.run.gradients, sizeof r.c.run.gradients, "nvme");
        if (k == 4) {
            r.c.accumulation = 2;
            r.c.train_batch_size *= 2;
            r.c.run.micro_batches_per_pass = 1;
        }
        assert_int_equal(rig_begin(&r), SPW_ECONFIG);
        assert_non_null(strstr(r.err.message, "spillway.delayed_update"));
        rig_remove(&r);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_simulated), cmocka_unit_test(test_everywhere),
                                       cmocka_unit_test(test_loaded),    cmocka_unit_test(test_other_chain),
                                       cmocka_unit_test(test_skipped),   cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests_name("late", tests, NULL, NULL);
}
