/*
 * Models of which an indexer chooses the keys that attention reads (GLM-5's): within as many keys as it chooses they are trained as
 * others are (test_families.c), and what no block computes with comes through as it was: no update, no rounding to codes, no operation
 * counted. Longer sequences are refused.
 */
#include "lib_rig.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void
lora_int4(rig *r)
{
    rig_lora(r);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "int4");
}

static void
trained(rig *r)
{
    (void)r;
}

static void
test_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_GLM_DSA, SPW_STATE_SPLIT, 1, trained);
    rig_everywhere(SPW_FAMILY_GLM_DSA, SPW_STATE_FP32, 0, lora_int4);
}

/* Whether each of the parameters that nothing computes with is the same in both; how many there are. */
static uint32_t
same_unread(const spw_model *m, const float *a, const float *b)
{
    uint32_t count = 0;
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t first = rig_elems_before(m, id), elems = m->params[id].rows * m->params[id].cols;
        if (!m->params[id].unread)
            continue;
        assert_true(m->params[id].frozen && strstr(m->params[id].name, ".self_attn.indexer.") != NULL);
        if (memcmp(a + first, b + first, elems * sizeof *a) != 0)
            fail_msg("%s has changed", m->params[id].name);
        count++;
    }
    return count;
}

static void
test_stays(void **state)
{
    float *before, *after, *coded;
    uint64_t first, bytes;
    uint32_t near; /* a weight that codes round, and training changes */
    rig r, other;
    (void)state;
    rig_config(&r, SPW_FAMILY_GLM_DSA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_need(&r, rig_begin(&r));
    before = rig_read(&r, SPW_PART_MASTER);
    rig_train(&r, 0, 3);
    after = rig_read(&r, SPW_PART_MASTER);
    assert_int_equal(same_unread(r.model, before, after), 2 * 5); /* of the second layer they are the first one's */
    rig_config(&other, SPW_FAMILY_GLM_DSA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    lora_int4(&other);
    rig_need(&other, rig_begin(&other));
    near = spw_model_find_param(r.model, "model.layers.2.self_attn.q_b_proj.weight");
    assert_int_equal(near, spw_model_find_param(other.model, "model.layers.2.self_attn.q_b_proj.weight"));
    coded = rig_read(&other, SPW_PART_MASTER);
    first = rig_elems_before(r.model, near);
    bytes = r.model->params[near].rows * r.model->params[near].cols * sizeof *before;
    assert_memory_not_equal(before + first, after + first, bytes);
    assert_memory_not_equal(before + first, coded + first, bytes);
    assert_int_equal(same_unread(r.model, before, coded), 2 * 5);
    free(before);
    free(after);
    free(coded);
    rig_close(&r);
    rig_remove(&r);
    rig_close(&other);
    rig_remove(&other);
}

/* A plan counts the operations of the same model without them. */
static void
test_operations(void **state)
{
    double flops[2];
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_GLM_DSA, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.model.index_keys = k == 0 ? 36 : 0;
        rig_open(&r);
        flops[k] = spw_engine_plan(r.e)->flops;
        rig_close(&r);
        rig_remove(&r);
    }
    assert_true(flops[0] > 0 && flops[0] == flops[1]);
}

static void
test_longer(void **state)
{
    (void)state;
    for (uint64_t length = 36; length < 38; length++) {
        rig r;
        rig_config(&r, SPW_FAMILY_GLM_DSA, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.data.seq_length = length;
        if (length == 36) {
            rig_open(&r);
        } else {
            assert_int_equal(rig_begin(&r), SPW_ECONFIG);
            assert_non_null(strstr(r.err.message,
                                   "data.seq_length 37 is larger than the 36 keys (index_topk) that this "
                                   "model's attention reads"));
        }
        rig_close(&r);
        rig_remove(&r);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everywhere),
        cmocka_unit_test(test_stays),
        cmocka_unit_test(test_operations),
        cmocka_unit_test(test_longer),
    };
    return cmocka_run_group_tests_name("indexer", tests, NULL, NULL);
}
