/*
 * Chains that change from step to step: blocks permuted, repeated and left out train to the same bits in every placement, and
 * nothing waits for a block that is not in the chain.
 */
#include "lib_rig.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static void
changing_chain(bool muon)
{
    static const uint32_t chains[][8] = {{5, 0, 1, 2, 3, 4},       {5, 0, 3, 1, 2, 4}, {4, 0, 2, 1, 4},
                                         {7, 0, 1, 1, 2, 3, 1, 4}, {3, 0, 3, 4},       {5, 0, 2, 3, 1, 4},
                                         {6, 0, 3, 3, 2, 1, 4},    {5, 0, 1, 2, 3, 4}};
    enum { STEPS = 16 };
    double want[STEPS];
    uint64_t want_digest = 0;
    for (int k = 0; k < 4; k++) {
        rig r;
        uint64_t digest;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, k == 0 ? SPW_TIER_DEVICE : SPW_TIER_NVME);
        r.chain_extra = 4;
        if (muon)
            tiny_muon(&r.c);
        if (k == 2) {
            r.c.run.weight_slots = r.c.run.record_slots = 2;
            r.c.run.chunk_elems = 4096;
            r.c.run.chaos_seed = 5;
        }
        if (k == 3) { /* the least device memory: a block's weights evict the last one's */
            r.c.run.device_memory = 4096;
            assert_int_equal(rig_begin(&r), SPW_ENOFIT);
            r.c.run.device_memory = rig_least_named(&r, "spillway.device_memory");
            rig_close(&r);
        }
        rig_need(&r, rig_begin(&r));
        if (k == 3)
            assert_true(spw_engine_plan(r.e)->cache_device < spw_engine_layout(r.e)->elems * sizeof(float));
        for (int s = 0; s < STEPS; s++) {
            const uint32_t *chain = chains[s % 8];
            spw_step_result result;
            uint32_t n = chain[0]; /* the first number counts the blocks */
            if (spw_engine_set_chain(r.e, chain + 1, n, &r.err) != SPW_OK ||
                rig_step(&r, (uint64_t)s, &result) != SPW_OK)
                fail_msg("step %d: %s", s + 1, r.err.message);
            if (k == 0)
                want[s] = result.loss;
            else if (memcmp(&want[s], &result.loss, sizeof want[s]) != 0)
                fail_msg("run %d, step %d: loss %.17g, on device it was %.17g", k, s + 1, result.loss, want[s]);
        }
        digest = tiny_digest(r.e);
        if (k == 0)
            want_digest = digest;
        assert_true(digest == want_digest);
        rig_remove(&r);
    }
}

/* Blocks permuted, left out and repeated from step to step: the same bits from disk in little memory as on the device. */
static void
test_changing_chain(void **state)
{
    (void)state;
    changing_chain(false);
    changing_chain(true); /* two gradients a block */
}

/*
 * A chain without the lowest block that is trained, its records on disk: nothing is read ahead for a gradient that does not come, also
 * not by a step before it that was skipped. The same bits as on the device.
 */
static void
test_trained_left_out(void **state)
{
    static const uint32_t chains[][6] = {{5, 0, 1, 2, 3, 4}, {4, 0, 2, 3, 4}, {3, 0, 3, 4}};
    double want[6];
    uint64_t digest[2];
    (void)state;
    alarm(200); /* before it was mended it waited for ever */
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, k == 0 ? SPW_TIER_DEVICE : SPW_TIER_NVME);
        r.c.gradient_clipping = 1;
        r.c.run.record_slots = 2;
        r.c.run.chunk_elems = 4096;
        r.chain_extra = 1;
        rig_freeze(&r, "w?e.weight");
        rig_need(&r, rig_begin(&r));
        for (uint64_t s = 0; s < 6; s++) {
            const uint32_t *chain = chains[s % 3];
            spw_step_result result;
            if (spw_engine_set_chain(r.e, chain + 1, chain[0], &r.err) != SPW_OK || rig_step(&r, s, &result) != SPW_OK)
                fail_msg("step %d: %s", (int)s + 1, r.err.message);
            if (k == 0)
                want[s] = result.loss;
            assert_memory_equal(&want[s], &result.loss, sizeof want[s]);
        }
        digest[k] = tiny_digest(r.e);
        rig_remove(&r);
    }
    alarm(0);
    assert_true(digest[0] == digest[1]);
}

/*
 * A chain of fewer units than there are buffers for gradients, in passes that add up, on a device whose queues are late: a unit's next
 * gradient is made elsewhere than the one whose sum is still on its way to host memory. The same bits as with all state on the device.
 */
static void
test_sums_on_their_way(void **state)
{
    static const uint32_t chain[] = {0, 3, 4};
    static const char *const streams[] = {"", "", "late", "odd", "5"};
    double want[3];
    (void)state;
    if (!tiny_emulated_device())
        skip();
    for (int k = 0; k < 5; k++) {
        rig r;
        setenv("SPW_EMULATE_STREAMS", streams[k], 1);
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, k == 0 ? SPW_TIER_DEVICE : SPW_TIER_HOST);
        snprintf(r.c.run.device, sizeof r.c.run.device, "cuda");
        r.c.accumulation = 4;
        r.c.run.micro_batches_per_pass = 1;
        r.chain_extra = 4;
        rig_need(&r, rig_begin(&r));
        assert_int_equal(spw_engine_set_chain(r.e, chain, 3, &r.err), SPW_OK);
        for (uint64_t s = 0; s < 3; s++) {
            spw_step_result result;
            rig_need(&r, rig_step(&r, s, &result));
            if (k == 0)
                want[s] = result.grad_norm;
            assert_memory_equal(&want[s], &result.grad_norm, sizeof want[s]);
        }
        rig_remove(&r);
    }
    unsetenv("SPW_EMULATE_STREAMS");
}

/* Where blocks read what others have left, a chain is the model's, and what was asked for changes nothing. */
static void
test_left_for_others(void **state)
{
    static const uint32_t chain[] = {0, 1, 2, 3, 4, 5, 6, 7};
    double want = 0;
    (void)state;
    for (int k = 0; k < 4; k++) {
        rig r;
        spw_step_result result;
        rig_config(&r, k < 2 ? TINY_GEMMA4_SMALL : TINY_FEW_KEYS, SPW_STATE_FP32, SPW_TIER_HOST);
        rig_need(&r, rig_begin(&r));
        if (k % 2 == 1) {
            assert_int_equal(spw_engine_set_chain(r.e, chain, r.model->block_count, &r.err), SPW_EINVAL);
            assert_non_null(strstr(r.err.message, "what others have left"));
            r.err = (spw_error){0};
        }
        rig_need(&r, rig_step(&r, 0, &result));
        want = k % 2 == 0 ? result.grad_norm : want;
        assert_true(result.grad_norm == want);
        rig_remove(&r);
    }
}

/* A model of embedding and head alone: nothing between them keeps anything, and the plan does not look for it. */
static void
test_two_blocks(void **state)
{
    spw_config c;
    spw_model_config mc;
    spw_model *m = NULL;
    spw_engine *e = NULL;
    spw_block *b;
    spw_error err = {0};
    uint32_t wte;
    (void)state;
    alarm(60); /* once it counted layers to 2^32 */
    tiny_config(&c, SPW_STATE_FP32);
    tiny_model_config(&mc, SPW_FAMILY_LLAMA);
    mc.family = SPW_FAMILY_CUSTOM;
    mc.layers = 0;
    DONE(spw_model_create(&m, &mc, 4, 2, &err));
    b = spw_model_add_block(m, "embed", spw_llama_embed_forward);
    wte = spw_model_add_param(m, "wte", mc.vocab, mc.width, 2, SPW_INIT_NORMAL, 0.05f);
    spw_block_use(m, b, wte);
    b = spw_model_add_block(m, "head", spw_llama_head_forward);
    spw_block_use(m, b, spw_model_add_param(m, "norm", 1, mc.width, 1, SPW_INIT_ONES, 0));
    spw_block_use(m, b, wte);
    DONE(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = m}, &err));
    spw_engine_destroy(e);
    spw_model_destroy(m);
    alarm(0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_on_their_way), cmocka_unit_test(test_changing_chain),
        cmocka_unit_test(test_trained_left_out),  cmocka_unit_test(test_left_for_others),
        cmocka_unit_test(test_two_blocks),
    };
    return cmocka_run_group_tests_name("chains", tests, NULL, NULL);
}
