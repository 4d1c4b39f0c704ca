/*
 * What the engine promises of a step besides equal bits in every placement: grouping of micro-batches, prefetch, skipped steps,
 * loans of gradient memory, parameter groups, and the parts that its time is made of.
 */
#include "lib_rig.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* Every tensor: norm of the difference relative to the tensor's norm. */
static void
compare_masters(const spw_model *m, const float *want, const float *got)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t first = rig_elems_before(m, id);
        double diff = 0, norm = 0;
        for (uint64_t i = first; i < first + m->params[id].rows * m->params[id].cols; i++) {
            diff += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
            norm += (double)want[i] * (double)want[i];
        }
        if (!(sqrt(diff) <= 1e-5 * sqrt(norm)))
            fail_msg("final %s: relative difference %.3g", m->params[id].name, sqrt(diff / norm));
    }
}

/*
 * 1 micro-batch of 8, 8 of 1 and 4 of 2, in passes of 1, 2 and all: the same losses, gradient norms and final master weights
 * to 1e-5 relative. Weights are compared at eps 1e-4: with 1e-8 Adam turns the rounding noise of gradients near 0 into full
 * steps, and the difference falls as eps grows.
 */
static void
test_micro_batches(void **state)
{
    static const uint64_t shapes[][3] = {{8, 1, 0}, {1, 8, 0}, {2, 4, 0}, {1, 8, 1}, {2, 4, 2}, {1, 8, 3}};
    (void)state;
    for (int round = 0; round < 3; round++) { /* GPT-2 at eps 1e-8, GPT-2 and Llama at 1e-4 */
        double want[5], norm[5];
        float *want_masters = NULL;
        for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
            rig r;
            rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
            tiny_model_config(&r.c.model, round == 2 ? SPW_FAMILY_LLAMA : SPW_FAMILY_GPT2);
            r.c.micro_batch = shapes[k][0];
            r.c.accumulation = shapes[k][1];
            r.c.run.micro_batches_per_pass = shapes[k][2];
            r.c.optimizer.eps = round == 0 ? 1e-8 : 1e-4;
            rig_need(&r, rig_begin(&r));
            for (int s = 0; s < 5; s++) {
                spw_step_result result;
                assert_int_equal(rig_step(&r, (uint64_t)s, &result), SPW_OK);
                if (k == 0) {
                    want[s] = result.loss;
                    norm[s] = result.grad_norm;
                } else if (!(fabs(result.loss - want[s]) <= 1e-5 * want[s]) ||
                           !(fabs(result.grad_norm - norm[s]) <= 1e-5 * norm[s])) {
                    fail_msg("%llu micro-batches of %llu, step %d: loss %.9g and norm %.9g, one batch of 8 gives %.9g "
                             "and %.9g",
                             (unsigned long long)shapes[k][1], (unsigned long long)shapes[k][0], s + 1, result.loss,
                             result.grad_norm, want[s], norm[s]);
                }
            }
            if (round > 0) {
                float *got = rig_read(&r, SPW_PART_MASTER);
                if (k == 0) {
                    want_masters = got;
                } else {
                    compare_masters(r.model, want_masters, got);
                    free(got);
                }
            }
            rig_remove(&r);
        }
        free(want_masters);
    }
}

/*
 * From the third step on at least 99 % of the uses had been fetched before they were asked for, in little device memory. A
 * busy machine may wake the mover late: ten steps that keep to it are enough.
 */
static void
test_prefetch_hits(void **state)
{
    enum { FIRST = 2, STEPS = 10, TRIES = 10 };
    uint64_t uses = 1, hits = 0;
    rig r;
    spw_step_result result;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    r.c.model.layers = 12; /* large enough that a block takes longer than waking the mover */
    r.c.model.width = 256;
    r.c.model.head_dim = 64;
    r.c.model.mlp_width = 1024;
    r.c.run.chunk_elems = 65536;
    rig_need(&r, rig_begin(&r));
    for (uint64_t s = 0; s < FIRST; s++)
        assert_int_equal(rig_step(&r, s, &result), SPW_OK);
    for (uint64_t try = 0; try < TRIES && (double)hits < 0.99 * (double)uses; try++) {
        spw_store_stats before, after;
        spw_store_get_stats(spw_engine_store(r.e), &before);
        for (uint64_t s = FIRST + try * STEPS; s < FIRST + (try + 1) * STEPS; s++)
            assert_int_equal(rig_step(&r, s, &result), SPW_OK);
        spw_store_get_stats(spw_engine_store(r.e), &after);
        uses = after.uses - before.uses;
        hits = after.hits - before.hits;
        assert_true(uses >= STEPS * 27);
    }
    if ((double)hits < 0.99 * (double)uses)
        fail_msg("%llu of %llu uses were fetched ahead", (unsigned long long)hits, (unsigned long long)uses);
    rig_remove(&r);
}

/* The two keys that bound prefetch: a pure limit on uses, losses as without it, and the device's cache. */
static void
test_prefetch_bounds(void **state)
{
    static const spw_store_unit units[] = {{.elems = 4096}, {.elems = 8192}, {.elems = 4096}};
    static const spw_store_use uses[] = {{0, 1}, {1, 1}, {2, 1}, {0, 2}};
    static const uint64_t limits[] = {UINT64_MAX, 1, 0};
    static const uint32_t wants[] = {4, 1, 0};
    double want = 0;
    (void)state;
    assert_int_equal(spw_trace_ahead(uses, 4, units, 4097), 2);
    assert_int_equal(spw_trace_ahead(uses, 4, units, 12288), 2);
    assert_int_equal(spw_trace_ahead(uses, 4, units, 12289), 3);
    for (int k = 0; k < 3; k++) {
        rig r;
        spw_step_result result;
        spw_store_stats stats;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
        r.c.zero.prefetch_bucket_size = limits[k];
        assert_int_equal(spw_trace_ahead(uses, 4, units, limits[k]), wants[k]);
        rig_need(&r, rig_begin(&r));
        for (uint64_t s = 0; s < 4; s++)
            assert_int_equal(rig_step(&r, s, &result), SPW_OK);
        want = k == 0 ? result.loss : want;
        assert_true(result.loss == want);
        spw_store_get_stats(spw_engine_store(r.e), &stats);
        if (limits[k] == 0) /* only what an earlier use had left on the device can be there in time */
            assert_true(stats.hits * 10 < stats.uses * 8);
        rig_close(&r);
        r.c.zero.max_live_parameters = 1;
        rig_need(&r, rig_begin(&r)); /* it bounds what is fetched besides the block in use */
        assert_int_equal(rig_step(&r, 0, &result), SPW_OK);
        r.c.zero.max_live_parameters = spw_engine_plan(r.e)->cache_device / sizeof(float); /* the largest block */
        rig_close(&r);
        rig_need(&r, rig_begin(&r));
        assert_true(spw_engine_plan(r.e)->cache_device == r.c.zero.max_live_parameters * sizeof(float));
        assert_int_equal(rig_step(&r, 0, &result), SPW_OK);
        rig_remove(&r);
    }
}

/* Targets of -1 count neither in the loss nor in the mean: a second micro-batch without rig_targets changes no bit. */
static void
test_masked_targets(void **state)
{
    double loss[2], norm[2];
    uint64_t digest[2];
    (void)state;
    for (int masked = 0; masked < 2; masked++) {
        rig r;
        spw_step_result result;
        uint64_t n;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.accumulation = 2;
        rig_need(&r, rig_begin(&r));
        n = r.c.micro_batch * r.c.data.seq_length;
        tiny_batch(0, r.c.model.vocab, 2 * n, rig_tokens, rig_targets);
        for (uint64_t i = n; i < 2 * n; i++)
            rig_targets[i] = -1;
        assert_int_equal(spw_engine_step(r.e, rig_tokens, rig_targets, masked ? 2 : 1, 1e-3, &result, &r.err), SPW_OK);
        loss[masked] = result.loss;
        assert_int_equal(result.targets, n);
        norm[masked] = result.grad_norm;
        digest[masked] = tiny_digest(r.e);
        if (masked) { /* nothing to learn from: no loss, no gradient */
            for (uint64_t i = 0; i < n; i++)
                rig_targets[i] = -1;
            assert_int_equal(spw_engine_step(r.e, rig_tokens, rig_targets, 2, 1e-3, &result, &r.err), SPW_OK);
            assert_true(isnan(result.loss) && result.targets == 0 && result.grad_norm == 0);
            assert_int_equal(spw_engine_eval(r.e, rig_tokens, rig_targets, 1, &loss[masked], &r.err), SPW_OK);
            assert_true(isnan(loss[masked]));
            loss[masked] = loss[0];
        }
        rig_remove(&r);
    }
    assert_true(loss[0] > 1 && loss[0] == loss[1] && norm[0] == norm[1] && digest[0] == digest[1]);
}

/*
 * Records pass through the memory of gradients that were consumed. With and without clipping, with several groups of
 * micro-batches, with delays everywhere and consumed gradients poisoned: the bits of state in host memory.
 */
static void
test_loans(void **state)
{
    enum { CASES = 4, STEPS_EACH = 6 };
    (void)state;
    for (int k = 0; k < CASES; k++) {
        uint64_t digest[3];
        for (int run = 0; run < 3; run++) { /* host, nvme, nvme with chaos */
            rig r;
            spw_store_stats stats;
            rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, run == 0 ? SPW_TIER_HOST : SPW_TIER_NVME);
            r.c.gradient_clipping = k % 2 == 0 ? 1.0 : 0.0;
            r.c.accumulation = k < 2 ? 1 : 3;
            r.c.run.micro_batches_per_pass = 1;
            r.c.run.chunk_elems = 4096;
            r.c.run.weight_slots = 4;
            r.c.run.record_slots = 1;
            r.c.run.chaos_seed = run == 2 ? 100 + (uint64_t)k : 0;
            rig_need(&r, rig_begin(&r));
            for (uint64_t s = 0; s < STEPS_EACH; s++) {
                spw_step_result result;
                assert_int_equal(rig_step(&r, s, &result), SPW_OK);
            }
            assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
            spw_store_get_stats(spw_engine_store(r.e), &stats);
            if (run == 0)
                assert_int_equal(stats.loans, 0);
            else
                assert_true(stats.loans > stats.updates / 4 && stats.loans < stats.updates);
            digest[run] = tiny_digest(r.e);
            rig_remove(&r);
        }
        assert_true(digest[0] == digest[1] && digest[0] == digest[2]);
    }
}

/* A gradient that is not finite: with clipping the step is skipped and no byte of state changes; without, it is an error. */
static void
test_nonfinite(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig r;
        spw_step_result result;
        uint64_t before;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
        r.c.gradient_clipping = k == 0 ? 1.0 : 0.0;
        rig_need(&r, rig_begin(&r));
        assert_int_equal(spw_store_sweep(spw_engine_store(r.e), SPW_SWEEP_INIT, tiny_one_nan, r.e, &r.err), SPW_OK);
        before = tiny_digest(r.e);
        if (k == 0) {
            for (uint64_t s = 0; s < 3; s++) {
                assert_int_equal(rig_step(&r, s, &result), SPW_OK);
                assert_true(result.skipped);
            }
            assert_true(tiny_digest(r.e) == before);
            assert_int_equal(spw_engine_updates(r.e), 0);
        } else {
            spw_status st = rig_step(&r, 0, &result);
            if (st == SPW_OK)
                st = spw_engine_drain(r.e, &r.err);
            assert_int_equal(st, SPW_ENONFINITE);
            assert_non_null(strstr(r.err.message, "gradient"));
        }
        rig_remove(&r);
    }
}

/* Three steps on host; the digest of what they lead to, and optionally whether each parameter has moved. */
static uint64_t
groups_digest(const spw_param_group *groups, uint32_t count, double weight_decay, const char *scheduler, bool *moved)
{
    rig r;
    spw_step_result result;
    uint64_t digest;
    float *before, *after;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
    r.c.optimizer.weight_decay = weight_decay;
    snprintf(r.c.scheduler.type, sizeof r.c.scheduler.type, "%s", scheduler);
    r.c.scheduler.cycle_min_lr = 1e-3;
    r.c.scheduler.cycle_max_lr = 1e-2;
    r.c.scheduler.first_steps = 2;
    r.c.scheduler.second_steps = NAN;
    r.c.scheduler.cycle_momentum = true;
    r.c.scheduler.cycle_min_mom = 0.8;
    r.c.scheduler.cycle_max_mom = 0.9;
    r.c.optimizer.group_count = count;
    for (uint32_t g = 0; g < count; g++)
        r.c.optimizer.groups[g] = groups[g];
    rig_need(&r, rig_begin(&r));
    before = rig_read(&r, SPW_PART_MASTER);
    for (uint64_t s = 0; s < 3; s++)
        assert_int_equal(rig_step(&r, s, &result), SPW_OK);
    assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
    after = rig_read(&r, SPW_PART_MASTER);
    digest = tiny_digest(r.e);
    for (uint32_t id = 0; moved != NULL && id < r.model->param_count; id++) {
        uint64_t first = rig_elems_before(r.model, id), elems = r.model->params[id].rows * r.model->params[id].cols;
        moved[id] = memcmp(before + first, after + first, elems * sizeof(float)) != 0;
        if (strstr(r.model->params[id].name, "h.1.") != NULL && moved[id])
            fail_msg("%s moved", r.model->params[id].name);
        if (strstr(r.model->params[id].name, "h.1.") == NULL && !moved[id])
            fail_msg("%s did not move", r.model->params[id].name);
    }
    free(before);
    free(after);
    rig_remove(&r);
    return digest;
}

/* Parameter groups: one that says nothing new changes nothing, lr 0 keeps its parameters, norms and biases are decayed
 * only when asked; OneCycle's moments are those of groups with their own, too; a group without parameters is refused by name. */
static void
test_param_groups(void **state)
{
    const double no = NAN;
    spw_param_group all = {"*", no, no, no, no}, same = {"*", 1e-2, no, 0.9, 0.95}, still = {"*h.1.*", 0, no, no, no},
                    none = {"*", no, 0, no, no}, flat = {"*", no, 0.1, no, no}, other = {"*", no, no, 0.5, 0.6},
                    nobody = {"nothing.*", no, no, no, no};
    bool moved[256];
    uint64_t usual = groups_digest(NULL, 0, 0.1, "", NULL);
    rig r;
    (void)state;
    assert_true(groups_digest(&all, 1, 0.1, "", NULL) == usual);
    assert_true(groups_digest(&same, 1, 0.1, "", NULL) == usual);
    (void)groups_digest(&still, 1, 0.1, "", moved);
    assert_true(groups_digest(&none, 1, 0.1, "", NULL) == groups_digest(NULL, 0, 0.0, "", NULL));
    assert_true(groups_digest(&flat, 1, 0.1, "", NULL) != usual); /* decays norms and biases too */
    assert_true(groups_digest(&other, 1, 0.1, "", NULL) != usual);
    assert_true(groups_digest(&other, 1, 0.1, "OneCycle", NULL) == groups_digest(NULL, 0, 0.1, "OneCycle", NULL));
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
    r.c.optimizer.group_count = 1;
    r.c.optimizer.groups[0] = nobody;
    assert_int_equal(rig_begin(&r), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "nothing.*"));
    rig_remove(&r);
}

/* A step that is refused, for its rate or its batch, changes nothing: the next one is that of a run in which nobody asked for it. */
static void
test_refused(void **state)
{
    uint64_t want = 0;
    (void)state;
    for (int k = 0; k < 6; k++) { /* the norm decides, updates run ahead of it, there is none; each without and with */
        spw_step_result result;
        uint64_t digest;
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
        r.c.gradient_clipping = k / 2 == 2 ? 0 : 1e9;
        snprintf(r.c.run.update_ahead, sizeof r.c.run.update_ahead, k / 2 == 1 ? "always" : "never");
        rig_need(&r, rig_begin(&r));
        for (uint64_t s = 0; s < 3; s++) {
            if (k % 2 == 1) {
                const double lr = r.c.optimizer.lr;
                r.c.optimizer.lr = s == 0 ? -1 : s == 1 ? INFINITY : NAN;
                assert_int_equal(rig_step(&r, 7, &result), SPW_EINVAL);
                assert_non_null(strstr(r.err.message, "lr"));
                r.c.optimizer.lr = lr;
                rig_tokens[3] = 1 << 20;
                assert_int_equal(spw_engine_step(r.e, rig_tokens, rig_targets, 1, lr, &result, &r.err), SPW_EINVAL);
            }
            rig_need(&r, rig_step(&r, s, &result));
        }
        digest = tiny_digest(r.e);
        want = k == 0 ? digest : want;
        assert_true(digest == want);
        rig_remove(&r);
    }
}

/* Every allocation of create may fail: the error is SPW_ENOMEM and nothing is left, in memory or on disk. */
static void
test_allocation_failures(void **state)
{
    bool through = false;
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    assert_int_equal(spw_model_build(&r.model, &r.c.model, &r.err), SPW_OK);
    for (unsigned k = 1; !through; k++) {
        long live = spw_test_live_allocs();
        spw_status st;
        memset(&r.err, 0, sizeof r.err);
        spw_test_fail_alloc(k);
        st = spw_engine_create(&r.e, &(spw_engine_options){.config = &r.c, .model = r.model}, &r.err);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        if (st != SPW_OK && st != SPW_ENOMEM)
            fail_msg("allocation %u: %s: %s", k, spw_status_name(st), r.err.message);
        spw_engine_destroy(r.e);
        r.e = NULL;
        if (spw_test_live_allocs() != live)
            fail_msg("allocation %u: %ld objects are left", k, spw_test_live_allocs() - live);
        assert_int_equal(tiny_dir_entries(r.dir), 0);
    }
    rig_remove(&r);
}

static spw_status
slow_prepare(float coef[SPW_OPT_COEFS], const spw_opt_hp *hp, spw_error *err)
{
    (void)err;
    coef[0] = (float)hp->lr;
    return SPW_OK;
}

static uint64_t slow_ns;

static void
slow_rule(const float *coef, uint32_t n, float *w, float *m0, float *m1, const float *g)
{
    (void)m0;
    (void)m1;
    spw_sleep_ns(slow_ns);
    for (uint32_t i = 0; i < n; i++)
        w[i] -= coef[0] * g[i];
}

/* Eight steps; late: of the disk's transfers. True if this was waited for most, and more than 5 % of the time. */
static bool
stalls_for(spw_stall want, spw_test_aio_schedule *late)
{
    double stall_s[SPW_STALL_COUNT] = {0}, step_s = 0, apart = INFINITY;
    bool most = true;
    rig r;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, want == SPW_STALL_OPTIMIZER ? SPW_TIER_HOST : SPW_TIER_NVME);
    r.c.run.chunk_elems = 4096;
    r.c.run.weight_slots = r.c.run.record_slots = 2;
    r.c.run.aio_faults = late;
    if (want == SPW_STALL_OPTIMIZER)
        snprintf(r.c.optimizer.type, sizeof r.c.optimizer.type, "Slow");
    rig_need(&r, rig_begin(&r));
    for (uint64_t step = 0; step < 8; step++) {
        spw_step_result s;
        uint64_t begin = spw_now_ns();
        double parts, wall;
        assert_int_equal(rig_step(&r, step, &s), SPW_OK);
        wall = (double)(spw_now_ns() - begin) * 1e-9;
        assert_true(s.step_s <= wall);
        apart = fmin(apart, wall - s.step_s - 0.02 * wall);
        step_s += s.step_s;
        parts = s.compute_s + s.other_s;
        for (int k = 0; k < SPW_STALL_COUNT; k++) {
            assert_true(s.stall_s[k] >= 0);
            parts += s.stall_s[k];
            stall_s[k] += s.stall_s[k];
        }
        assert_true(s.compute_s > 0 && s.other_s >= 0);
        assert_true(fabs(parts - s.step_s) <= 1e-9 + 1e-6 * s.step_s);
        assert_true(s.bound_s > 0 && s.bound_s == s.bounds_s[s.bound_by]);
    }
    assert_true(apart <= 1e-3); /* of the step that nobody else's work came into at either end; some kernels are slow */
    rig_remove(&r);
    for (int k = 0; k < SPW_STALL_COUNT && want < SPW_STALL_COUNT; k++)
        most &= k == (int)want || stall_s[k] < stall_s[want];
    return most && (want == SPW_STALL_COUNT || stall_s[want] > 0.05 * step_s);
}

/*
 * The parts of a step add up to its time, and name what was made slow: the disk's reads, or the optimizer. On a busy machine
 * other things are slow too: then these are made slower still.
 */
static void
test_stall_causes(void **state)
{
    static const spw_optimizer slow = {.name = "Slow", .prepare = slow_prepare, .rule = slow_rule};
    bool read = false, optimizer = false;
    (void)state;
    assert_int_equal(spw_optimizer_register(&slow, NULL), SPW_OK);
    assert_true(stalls_for(SPW_STALL_COUNT, NULL));
    for (uint64_t factor = 1; factor <= 64; factor *= 4) {
        spw_test_aio_schedule late = {.seed = 5, .delays = 1000, .delay_ns_max = factor * 4000000};
        slow_ns = factor * 100000;
        read = read || stalls_for(SPW_STALL_NVME_READ, &late);
        optimizer = optimizer || stalls_for(SPW_STALL_OPTIMIZER, NULL);
    }
    assert_true(read);
    assert_true(optimizer);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_micro_batches),   cmocka_unit_test(test_prefetch_hits),
        cmocka_unit_test(test_prefetch_bounds), cmocka_unit_test(test_masked_targets),
        cmocka_unit_test(test_loans),           cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_param_groups),    cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_stall_causes),    cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
