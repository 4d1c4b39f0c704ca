/*
 * Budgets of an engine: what does not fit is refused with the least that would do, that much trains, and the keys that size
 * staging memory give what they say.
 */
#include "lib_rig.h"
#include "runtime_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* Sanitizers keep freed memory, so the process grows with every try and no budget that counts it is ever exact. */
#define HOST_SLACK (SANITIZED ? 1u << 20 : 0u)

/* A budget that is too small is refused with the smallest that would do, and exactly that one works. */
static void
test_budgets(void **state)
{
    static const char *const keys[2] = {"spillway.host_memory", "spillway.device_memory"};
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig r;
        spw_step_result result;
        uint64_t *budget = k ? &r.c.run.device_memory : &r.c.run.host_memory, least = 0;
        spw_status st = SPW_ENOFIT;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
        *budget = 4096;
        assert_int_equal(rig_begin(&r), SPW_ENOFIT);
        least = rig_least_named(&r, keys[k]);
        assert_int_equal(tiny_dir_entries(r.dir), 0);
        rig_close(&r);
        if (k == 1) { /* one byte less is refused, and names the same */
            *budget = least - 1;
            assert_int_equal(rig_begin(&r), SPW_ENOFIT);
            assert_true(rig_least_named(&r, keys[k]) == least);
            rig_close(&r);
        }
        /* the process itself is part of the host budget and may grow between two tries: then the next one names more */
        for (int attempt = 0; st == SPW_ENOFIT && attempt < (k ? 1 : 20); attempt++) {
            *budget = least + (k ? 0 : HOST_SLACK);
            memset(&r.err, 0, sizeof r.err);
            st = rig_begin(&r);
            if (st == SPW_ENOFIT) {
                uint64_t more = rig_least_named(&r, keys[k]);
                assert_true(more > least && more < least + (8u << 20));
                least = more;
                rig_close(&r);
            }
        }
        if (st != SPW_OK)
            fail_msg("%s", r.err.message);
        assert_int_equal(rig_step(&r, 0, &result), SPW_OK);
        assert_int_equal(rig_step(&r, 1, &result), SPW_OK);
        if (k == 1)
            assert_true(spw_gpu_bytes_peak(spw_engine_gpu(r.e)) <= least);
        rig_remove(&r);
    }
}

/* With the least device memory, as it is named where there is far too little. */
static void
begin_on_least(rig *r)
{
    r->c.run.device_memory = 4096;
    assert_int_equal(rig_begin(r), SPW_ENOFIT);
    r->c.run.device_memory = rig_least_named(r, "spillway.device_memory");
    rig_close(r);
    memset(&r->err, 0, sizeof r->err);
    rig_need(r, rig_begin(r));
}

/*
 * The least device memory that is named is enough for every shape of blocks: the last one uses its own small unit and the
 * tied embedding, which needs one gap in the device's cache however the units before it came to lie.
 */
static void
test_least_device(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= 4; layers++) {
        for (uint64_t vocab = 61; vocab < 2000; vocab += 490) {
            rig r;
            spw_step_result result;
            rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_DEVICE);
            r.c.model.layers = layers;
            r.c.model.vocab = vocab;
            r.c.gradient_clipping = layers % 2;
            begin_on_least(&r);
            for (uint64_t s = 0; s < 3; s++)
                assert_int_equal(rig_step(&r, s, &result), SPW_OK);
            rig_remove(&r);
        }
    }
}

/*
 * The smallest device that a model is planned for trains it, whatever lies where: a head whose tied embedding fills all
 * that its norm leaves used to find the norm in the middle. Widths and vocabularies make units of many sizes.
 */
static void
test_smallest_device(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 24; i++) {
        double loss[2];
        for (int small = 0; small < 2; small++) {
            rig r;
            spw_step_result s;
            rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, (spw_tier)(i % SPW_TIER_COUNT));
            r.c.run.chunk_elems = 4096;
            r.c.model.width = 32 + 16 * (i % 5);
            r.c.model.mlp_width = 4 * r.c.model.width;
            r.c.model.head_dim = r.c.model.width / r.c.model.heads;
            r.c.model.vocab = 64 << i % 7;
            r.c.model.layers = 1 + i % 3;
            r.c.gradient_clipping = i % 2;
            if (small)
                begin_on_least(&r);
            else
                rig_need(&r, rig_begin(&r));
            for (uint64_t step = 0; step < 3; step++)
                assert_int_equal(rig_step(&r, step, &s), SPW_OK);
            loss[small] = s.loss;
            rig_remove(&r);
        }
        assert_memory_equal(&loss[0], &loss[1], sizeof loss[0]);
    }
}

/* Muon's matrices and what is beside them have gradients at the same time, those of experts that come in turns too. */
static void
test_least_with_muon(void **state)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_QWEN3_MOE, SPW_FAMILY_GPT_OSS};
    (void)state;
    for (uint32_t i = 0; i < 12; i++) {
        rig r;
        spw_step_result s;
        rig_config(&r, families[i % 3], SPW_STATE_MIXED, i / 3 % 2 ? SPW_TIER_NVME : SPW_TIER_DEVICE);
        tiny_muon(&r.c);
        r.c.accumulation = 1;
        r.c.run.chunk_elems = 4096;
        r.c.run.expert_turns = i % 3 == 0 ? 0 : i < 6 ? 2 : 64;
        begin_on_least(&r);
        for (uint64_t step = 0; step < 2; step++)
            rig_need(&r, rig_step(&r, step, &s));
        rig_remove(&r);
    }
}

/* max_in_cpu and the buffer keys set the number of staging slots, as documented; never more than there are chunks. */
static void
test_staging_keys(void **state)
{
    enum { ALL = 1000 }; /* chunks of a small model: less than what auto stages in bytes */
    static const struct {
        uint64_t count, size, max_in_cpu, records;
        uint32_t weight_slots, record_slots;
    } cases[] = {{0, 100000000, 0, 0, ALL, ALL},
                 {3, 4096, 0, 2, 3, 2},
                 {1, 100000000, 0, 0, ALL, ALL},
                 {2, 4096, 40960, 5, 10, 5}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rig r;
        uint32_t all;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
        r.c.run.chunk_elems = 4096;
        r.c.zero.param_buffer_count = cases[i].count;
        r.c.zero.param_buffer_size = cases[i].size;
        r.c.zero.optimizer_buffer_count = cases[i].records;
        r.c.zero.max_in_cpu = cases[i].max_in_cpu;
        rig_need(&r, rig_begin(&r));
        all = spw_engine_layout(r.e)->chunk_count;
        assert_int_equal(spw_engine_plan(r.e)->weight_slots,
                         cases[i].weight_slots == ALL ? all : cases[i].weight_slots);
        assert_int_equal(spw_engine_plan(r.e)->record_slots,
                         cases[i].record_slots == ALL ? all : cases[i].record_slots);
        rig_remove(&r);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budgets),         cmocka_unit_test(test_least_device),
        cmocka_unit_test(test_smallest_device), cmocka_unit_test(test_least_with_muon),
        cmocka_unit_test(test_staging_keys),
    };
    return cmocka_run_group_tests_name("least_memory", tests, NULL, NULL);
}
