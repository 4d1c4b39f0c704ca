/*
 * Gradients that wait for their updates on nvme: the same bits as in host memory, the bytes that the plan says, and no more
 * memory than it takes. Skipped steps leave nothing behind; what changes on disk is found; what is refused says why.
 */
#include "lib_rig.h"
#include "engine_internal.h"
#include "spw_access.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static void
spill(spw_config *c)
{
    snprintf(c->run.gradients, sizeof c->run.gradients, "nvme");
}

static void
open_spilled(rig *r, spw_family family, spw_state_format format)
{
    rig_config(r, family, format, SPW_TIER_NVME);
    r->c.run.chunk_elems = 4096;
    spill(&r->c);
}

/* Opens it within the least host memory that it needs. */
static void
open_least(rig *r)
{
    spw_plan p;
    rig_open(r);
    assert_int_equal(r->e->plan.grad_windows, 2);
    rig_close(r);
    r->c.run.host_memory = 4096;
    rig_need(r, spw_model_from_config(&r->model, &r->c, &r->err));
    assert_int_equal(spw_engine_create(&r->e,
                                       &(spw_engine_options){.config = &r->c,
                                                             .model = r->model,
                                                             .resumes = true,
                                                             .process_bytes = TINY_PROCESS_BYTES,
                                                             .plan_out = &p},
                                       &r->err),
                     SPW_ENOFIT);
    rig_close(r);
    r->err = (spw_error){0};
    r->c.run.host_memory = p.least_bytes;
    rig_open(r);
    assert_int_equal(r->e->plan.grad_windows, 1);
}

/*
 * All formats, clipped and not, with one slot or many, random delays and poisoned windows, a budget that holds some of them, and one that has
 * room for one window.
 */
static void
test_same_bits(void **state)
{
    (void)state;
    for (int f = 0; f < SPW_STATE_COUNT; f++) {
        for (int clipped = 0; clipped < 2; clipped++) {
            rig want, got;
            if (f == SPW_STATE_MIXED_F16 || (SANITIZED && f % 2 == clipped))
                continue;
            rig_config(&want, SPW_FAMILY_GPT2, (spw_state_format)f, SPW_TIER_HOST);
            want.c.gradient_clipping = clipped;
            rig_open(&want);
            rig_need(&want, spw_engine_init_params(want.e, 7, &want.err));
            rig_train(&want, 0, RIG_STEPS);
            for (int k = 0; k < 5; k++) {
                open_spilled(&got, SPW_FAMILY_GPT2, (spw_state_format)f);
                got.c.gradient_clipping = clipped;
                got.c.run.weight_slots = got.c.run.record_slots = k == 0 ? 0 : k == 3 ? 5 : 1;
                got.c.run.chaos_seed = k >= 2 ? 40 + (uint64_t)(4 * f + k) : 0;
                got.c.run.integrity = k != 1;
                got.c.run.grad_dtype = SPW_F32;
                if (k == 3) {
                    rig_open(&got);
                    got.c.run.host_memory = /* weights come first, and slots give back what they need no more */
                        got.e->plan.host_bytes + got.e->plan.weight_nvme + got.e->plan.grad_nvme / 2;
                    rig_close(&got);
                }
                if (k == 4)
                    open_least(&got);
                else
                    rig_open(&got);
                assert_true(got.e->plan.grad_nvme > 0);
                assert_true((k == 3) == (got.e->plan.grad_host > 0));
                rig_need(&got, spw_engine_init_params(got.e, 7, &got.err));
                rig_train(&got, 0, RIG_STEPS);
                assert_memory_equal(want.losses, got.losses, sizeof want.losses);
                assert_memory_equal(want.norms, got.norms, sizeof want.norms);
                rig_same_state(&want, &got, "gradients on nvme");
                rig_remove(&got);
            }
            rig_remove(&want);
        }
    }
}

/*
 * Fewer slots for weights than for records: chunks whose gradients come back early hold all of them while one before them
 * waits for its own, and must not wait for it in turn.
 */
static void
test_few_weight_slots(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 6; seed++) {
        rig r;
        open_spilled(&r, SPW_FAMILY_MIXTRAL, SPW_STATE_SPLIT_BF16);
        r.c.model.mlp_width = 64;
        r.c.gradient_clipping = 1;
        r.c.run.weight_slots = 2;
        r.c.run.record_slots = 6;
        r.c.run.chaos_seed = seed;
        rig_open(&r);
        assert_true(r.e->plan.grad_nvme > 0);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        rig_train(&r, 0, RIG_STEPS);
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        rig_remove(&r);
    }
}

/*
 * Clipped, all gradients but the last unit's go out and come back, unless the norm is there before the last but one begins to, and with one window that
 * one does, too; without a norm to wait for none does, nor where updates do not wait for it: there weights of before go out.
 */
static void
test_bytes(void **state)
{
    (void)state;
    for (int k = 0; k < 6; k++) {
        const bool ahead = k >= 4, clipped = k % 2 && !ahead, narrow = k / 2 == 1 || k == 5;
        spw_store_stats before, after;
        const spw_plan *p;
        spw_prediction x;
        uint64_t moved, planned;
        rig r;
        open_spilled(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT);
        r.c.zero.offload_param = SPW_TIER_HOST;
        r.c.gradient_clipping = ahead ? 1e9 : clipped;
        snprintf(r.c.run.update_ahead, sizeof r.c.run.update_ahead, "%s", ahead ? "always" : "never");
        r.c.run.record_slots = 1; /* none is kept from one step to the next */
        if (narrow)
            open_least(&r);
        else
            rig_open(&r);
        p = &r.e->plan;
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        tiny_settle(spw_engine_store(r.e));
        spw_store_get_stats(spw_engine_store(r.e), &before);
        rig_train(&r, 0, RIG_STEPS);
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        tiny_settle(spw_engine_store(r.e));
        spw_store_get_stats(spw_engine_store(r.e), &after);
        spw_plan_predict(p, NULL, 0, &x);
        moved = after.nvme_write_bytes - before.nvme_write_bytes - RIG_STEPS * p->record_nvme;
        planned = x.traffic.nvme_write - p->record_nvme;
        assert_int_equal(after.nvme_read_bytes - before.nvme_read_bytes,
                         RIG_STEPS * p->record_nvme + (ahead ? 0 : moved));
        assert_true(p->ahead == ahead && (after.ahead > 0) == ahead && after.undone == 0);
        assert_int_equal(x.traffic.nvme_read, x.traffic.nvme_write);
        assert_true(clipped ? planned > p->grad_nvme / 2 && planned <= p->grad_nvme : planned == 0);
        assert_true(!clipped || (planned == p->grad_nvme) == narrow);
        assert_true(moved <= RIG_STEPS * (planned + p->undo_write) &&
                    moved >= (clipped ? RIG_STEPS * p->grad_nvme / 4 : 0));
        rig_remove(&r);
    }
}

/* Steps that overflow leave windows and gradients on their way; the next ones find everything free, and the bits are the same. */
static void
test_skipped(void **state)
{
    uint64_t digest[2], skipped[2] = {0};
    (void)state;
    for (int spilled = 0; spilled < 2; spilled++) {
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_MIXED_F16, spilled ? SPW_TIER_NVME : SPW_TIER_HOST);
        if (spilled)
            spill(&r.c);
        r.c.bf16 = false;
        r.c.fp16 = true;
        r.c.run.grad_dtype = SPW_F16;
        r.c.run.chunk_elems = 4096;
        r.c.run.chaos_seed = 9;
        r.c.loss_scale.initial_power = 24;
        r.c.loss_scale.window = 3;
        r.c.loss_scale.hysteresis = 1;
        r.c.loss_scale.min = 1;
        rig_open(&r);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        for (uint64_t s = 0; s < 24; s++) {
            spw_step_result result;
            uint64_t n = r.c.micro_batch * r.c.accumulation * r.c.data.seq_length;
            tiny_batch(s, r.c.model.vocab, n, rig_tokens, rig_targets);
            rig_need(&r,
                     spw_engine_step(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, 1e-3, &result, &r.err));
            skipped[spilled] += result.skipped;
        }
        digest[spilled] = tiny_digest(r.e);
        rig_remove(&r);
    }
    assert_in_range(skipped[0], 3, 20);
    assert_int_equal(skipped[0], skipped[1]);
    assert_int_equal(digest[0], digest[1]);
}

typedef struct spoiled {
    char path[1024];
    uint64_t first;
} spoiled;

/* Gradients lie behind all records: what is there when the step's norm is about to be used changes on disk. */
static void
spoil(void *ctx, spw_engine *e)
{
    const spoiled *x = ctx;
    tiny_settle(spw_engine_store(e));
    tiny_spoil_file(x->path, x->first);
}

static void
test_corrupt(void **state)
{
    spw_step_result result;
    const spw_plan *p;
    spoiled x = {.first = 0};
    spw_status st;
    rig r;
    (void)state;
    open_spilled(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32);
    rig_open(&r);
    p = &r.e->plan;
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
    tiny_settle(spw_engine_store(r.e));
    tiny_swap_file(r.dir, x.path);
    x.first = p->weight_nvme + p->record_nvme + 100;
    spw_engine_on_gradients(r.e, spoil, &x);
    tiny_batch(0, r.c.model.vocab, RIG_TOKENS, rig_tokens, rig_targets);
    st = spw_engine_step(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, 1e-3, &result, &r.err);
    st = st == SPW_OK ? spw_engine_drain(r.e, &r.err) : st;
    assert_int_equal(st, SPW_ECORRUPT);
    assert_non_null(strstr(r.err.message, "(gradient of chunk"));
    assert_non_null(strstr(r.err.message, x.path));
    rig_remove(&r);
}

/* A disk that is full, or fails, when a gradient goes out: the step says so, and the run ends. */
static void
test_faults(void **state)
{
    uint32_t named = 0;
    (void)state;
    for (uint64_t at = 1; at <= 60; at++) {
        spw_test_aio_schedule faults = {.error_at = 0};
        spw_status st = SPW_OK;
        rig r;
        open_spilled(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT);
        r.c.zero.offload_param = SPW_TIER_HOST;
        r.c.run.aio_faults = &faults;
        rig_open(&r);
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        tiny_settle(spw_engine_store(r.e));
        faults.error_at = at;
        for (uint64_t s = 0; s < 2 && st == SPW_OK; s++) {
            spw_step_result result;
            tiny_batch(s, r.c.model.vocab, RIG_TOKENS, rig_tokens, rig_targets);
            st = spw_engine_step(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, 1e-3, &result, &r.err);
        }
        st = st == SPW_OK ? spw_engine_drain(r.e, &r.err) : st;
        if (st != SPW_OK) { /* and it stays so, while what was under way comes to its end */
            spw_step_result result;
            spw_error again = {0};
            assert_int_not_equal(
                spw_engine_step(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, 1e-3, &result, &again),
                SPW_OK);
        }
        if (faults.failures > 0 && st != SPW_OK)
            named += strstr(r.err.message, "gradient of chunk") != NULL;
        assert_true(faults.failures == 0 || st == SPW_EIO || st == SPW_OK); /* OK: a write behind of the last step */
        rig_remove(&r);
        at += 4;
    }
    assert_true(named > 0);
}

/* Less host memory than gradients take is enough; what cannot be is refused, and what does not fit finds the key. */
static void
test_plan(void **state)
{
    uint64_t least[2];
    spw_suggestion near;
    rig r;
    (void)state;
    for (int spilled = 0; spilled < 2; spilled++) {
        spw_plan p;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_NVME);
        r.c.run.chunk_elems = 4096;
        if (spilled)
            spill(&r.c);
        r.c.run.host_memory = 4096;
        rig_need(&r, spw_model_from_config(&r.model, &r.c, &r.err));
        assert_int_equal(spw_engine_create(
                             &r.e,
                             &(spw_engine_options){
                                 .config = &r.c, .model = r.model, .process_bytes = TINY_PROCESS_BYTES, .plan_out = &p},
                             &r.err),
                         SPW_ENOFIT);
        least[spilled] = p.least_bytes;
        if (spilled) {
            spw_engine_options o = {.config = &r.c, .model = r.model, .process_bytes = TINY_PROCESS_BYTES};
            bool found = false;
            snprintf(r.c.run.gradients, sizeof r.c.run.gradients, "host");
            r.c.run.host_memory = least[1] + TINY_PROCESS_BYTES / 16 + (2 << 20);
            if (r.c.run.host_memory < least[0]) {
                assert_int_equal(spw_plan_nearest(&o, &near, &r.err), SPW_OK);
                for (uint32_t i = 0; i < near.count; i++)
                    found = found || strcmp(near.set[i], "spillway.gradients=nvme") == 0;
                assert_true(near.found && found);
            }
            snprintf(r.c.run.gradients, sizeof r.c.run.gradients, "auto"); /* as far as they must */
            for (int fits = 0; fits < 2; fits++) {
                r.c.run.host_memory = least[1 - fits];
                assert_int_equal(spw_engine_create(&r.e, &o, &r.err), SPW_OK);
                assert_true((r.e->plan.grad_nvme == 0) == fits && (r.e->plan.grad_host == 0) == !fits);
                assert_true(r.e->plan.host_bytes <= r.c.run.host_memory);
                spw_engine_destroy(r.e);
                r.e = NULL;
            }
            spill(&r.c);
            r.c.run.host_memory = SPW_AUTO;
            r.c.run.micro_batches_per_pass = 1;
            assert_int_equal(spw_engine_create(&r.e, &o, &r.err), SPW_ECONFIG);
            assert_non_null(strstr(r.err.message, "in one pass"));
            r.c.run.micro_batches_per_pass = 0;
            r.err = (spw_error){0};
            r.c.zero.offload_optimizer = SPW_TIER_HOST;
            assert_int_equal(spw_engine_create(&r.e, &o, &r.err), SPW_ECONFIG);
            assert_non_null(strstr(r.err.message, "offload_optimizer.device nvme"));
        }
        rig_remove(&r);
    }
    assert_true(least[1] < least[0]);
}

static void
read_one(void *ctx, spw_engine *e)
{
    float value;
    spw_error *err = ctx;
    (void)spw_access_get_full(e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 1}, &value, err);
}

/* Nobody can read by name what is on its way. */
static void
test_access(void **state)
{
    spw_error err = {0};
    rig r;
    (void)state;
    open_spilled(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT);
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    spw_engine_on_gradients(r.e, read_one, &err);
    rig_train(&r, 0, 1);
    assert_int_equal(err.status, SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "spillway.gradients host"));
    rig_remove(&r);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_few_weight_slots), cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_skipped),   cmocka_unit_test(test_corrupt),          cmocka_unit_test(test_faults),
        cmocka_unit_test(test_plan),      cmocka_unit_test(test_access),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
