/*
 * Models of which an indexer chooses the keys that attention reads (GLM-5's), the layer between two of them what the first one chose. Within as many keys as it
 * chooses they are trained as others are, and nobody fetches its weights; beyond, the same bytes come out in every placement, and its weights stay as they are:
 * no update, no rounding to codes. What is chosen is test_families.c's and lib_parity_choice.c's.
 */
#include "lib_rig.h"
#include "engine_internal.h"
#include <math.h>
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

/* Each micro-batch by itself, documents that end inside a sequence, and layers that are not trained below. */
static void
apart(rig *r)
{
    r->c.run.micro_batches_per_pass = 1;
    snprintf(r->c.data.documents, sizeof r->c.data.documents, "separate");
    rig_freeze(r, "model.embed_tokens.weight");
    rig_freeze(r, "model.layers.0.*");
}

static void
in_turns(rig *r)
{
    r->c.run.expert_turns = 3;
}

static void
in_turns_of_tied(rig *r)
{
    in_turns(r);
    r->c.run.micro_batches_per_pass = 1;
}

static void
test_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_GLM_DSA, SPW_STATE_SPLIT, 1, trained);
    rig_everywhere(SPW_FAMILY_GLM_DSA, SPW_STATE_FP32, 0, lora_int4);
    rig_everywhere(TINY_FEW_KEYS, SPW_STATE_SPLIT, 1, trained);
    rig_everywhere(TINY_FEW_KEYS, SPW_STATE_FP32, 0, lora_int4);
    rig_everywhere(TINY_FEW_KEYS, SPW_STATE_FP32, 0, apart);
    rig_everywhere(TINY_FEW_KEYS, SPW_STATE_FP32, 0, in_turns);
    rig_everywhere(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_SPLIT, 1, trained);
    rig_everywhere(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_FP32, 0, lora_int4);
    rig_everywhere(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_FP32, 0, in_turns_of_tied);
}

static void
test_resumes(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_SPLIT, TINY_FEW_KEYS, SPW_TIER_NVME, trained);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_DEEPSEEK_V4, SPW_TIER_NVME, trained);
}

/* Whether each of the indexers' parameters is the same in both; how many there are. */
static uint32_t
same_indexers(const spw_model *m, const float *a, const float *b)
{
    uint32_t count = 0;
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t first = rig_elems_before(m, id), elems = m->params[id].rows * m->params[id].cols;
        if (!m->params[id].of_indexer)
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
    rig_config(&r, TINY_FEW_KEYS, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_need(&r, rig_begin(&r));
    before = rig_read(&r, SPW_PART_MASTER);
    rig_train(&r, 0, 3);
    after = rig_read(&r, SPW_PART_MASTER);
    assert_int_equal(same_indexers(r.model, before, after), 2 * 5); /* of the second layer they are the first one's */
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
    assert_int_equal(same_indexers(r.model, before, coded), 2 * 5);
    free(before);
    free(after);
    free(coded);
    rig_close(&r);
    rig_remove(&r);
    rig_close(&other);
    rig_remove(&other);
}

typedef struct outcome {
    rig_outcome of;
    double flops;
    uint64_t held, units; /* by the device beside arenas; that the second layer uses */
} outcome;

static void
run(outcome *o, uint64_t keys, const char *recompute, uint64_t per_pass)
{
    uint32_t units[SPW_BLOCK_PARAMS_MAX];
    rig r;
    rig_config(&r, SPW_FAMILY_GLM_DSA, SPW_STATE_FP32, SPW_TIER_HOST);
    r.c.model.index_keys = keys;
    r.c.run.micro_batches_per_pass = per_pass;
    snprintf(r.c.run.recompute, sizeof r.c.run.recompute, "%s", recompute);
    rig_descend(&r, &o->of);
    o->flops = spw_engine_plan(r.e)->flops;
    o->held = spw_engine_plan(r.e)->batch_device;
    o->units = spw__block_units(r.e, 1, units);
    rig_close(&r);
    rig_remove(&r);
}

static void
same(const outcome *a, const outcome *b)
{
    assert_memory_equal(a->of.losses, b->of.losses, sizeof a->of.losses);
    assert_int_equal(a->of.elems, b->of.elems);
    assert_memory_equal(a->of.masters, b->of.masters, a->of.elems * sizeof(float));
}

/*
 * With as many keys as a sequence has, or more, operations and memory are as without indexers, and the indexers' unit is used by no block. With fewer it
 * is, and what comes out is something else.
 */
static void
test_within(void **state)
{
    outcome none, all, more, few;
    (void)state;
    run(&none, 0, "auto", 0);
    run(&all, 24, "auto", 0);
    run(&more, 36, "auto", 0);
    run(&few, 23, "auto", 0);
    assert_true(none.flops > 0 && none.flops == all.flops && none.flops == more.flops && few.flops > all.flops);
    assert_true(none.units == 1 && all.units == 1 && more.units == 1 && few.units == 2);
    assert_true(none.held == all.held && none.held == more.held);
    assert_int_equal(few.held - all.held,
                     spw_round_up(2 * 2 * 24 * 4, 4096)); /* two micro-batches' bits of one layer */
    same(&all, &more);
    assert_memory_not_equal(all.of.losses, few.of.losses, sizeof all.of.losses);
    free(none.of.masters);
    free(all.of.masters);
    free(more.of.masters);
    free(few.of.masters);
}

/* What is kept or computed again makes no difference, and how many micro-batches a pass takes none but of rounding. */
static void
test_again(void **state)
{
    static const char *const how[] = {"auto", "least"};
    outcome first[2];
    (void)state;
    for (uint64_t per_pass = 0; per_pass < 2; per_pass++) {
        outcome o;
        run(&first[per_pass], 7, "always", per_pass);
        for (int k = 0; k < 2; k++) {
            run(&o, 7, how[k], per_pass);
            same(&first[per_pass], &o);
            free(o.of.masters);
        }
    }
    rig_near(&first[0].of, &first[1].of, 1e-6, "one micro-batch in a pass");
    for (int k = 0; k < 2; k++)
        free(first[k].of.masters);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everywhere), cmocka_unit_test(test_stays), cmocka_unit_test(test_resumes),
        cmocka_unit_test(test_within),     cmocka_unit_test(test_again),
    };
    return cmocka_run_group_tests_name("indexer", tests, NULL, NULL);
}
