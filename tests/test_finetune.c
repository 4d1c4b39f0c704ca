/*
 * Fine-tuning: what is frozen costs no gradient and no record and keeps its bytes; what is trained gets the bits it would have got
 * otherwise, wherever state lives; and the backward pass ends where nothing more is trained.
 */
#include "lib_rig.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/*
 * Frozen parameters keep their bytes. Everything else, and the losses, is what the same run gives in which their learning
 * rate and weight decay are 0: there gradients and moments exist and have no effect.
 */
static void
against_lr_zero(spw_family family, spw_state_format format, const char *const *globs, uint32_t count)
{
    rig frozen, still;
    float *before, *a, *b;
    rig_config(&frozen, family, format, SPW_TIER_NVME);
    rig_config(&still, family, format, SPW_TIER_HOST);
    frozen.c.gradient_clipping = still.c.gradient_clipping = 0;
    for (uint32_t g = 0; g < count; g++) {
        rig_freeze(&frozen, globs[g]);
        still.c.optimizer.groups[g] = (spw_param_group){.lr = 0, .weight_decay = 0, .beta1 = NAN, .beta2 = NAN};
        snprintf(still.c.optimizer.groups[g].match, sizeof still.c.optimizer.groups[g].match, "%s", globs[g]);
    }
    still.c.optimizer.group_count = count;
    rig_open(&frozen);
    rig_open(&still);
    rig_need(&frozen, spw_engine_init_params(frozen.e, 7, &frozen.err));
    rig_need(&still, spw_engine_init_params(still.e, 7, &still.err));
    before = rig_read(&frozen, SPW_PART_MASTER);
    rig_train(&frozen, 0, RIG_STEPS);
    rig_train(&still, 0, RIG_STEPS);
    assert_memory_equal(frozen.losses, still.losses, sizeof frozen.losses);
    for (int p = SPW_PART_MASTER; p < SPW_PART_COUNT; p++) {
        a = rig_read(&frozen, (spw_state_part)p);
        b = rig_read(&still, (spw_state_part)p);
        for (uint32_t id = 0; id < frozen.model->param_count; id++) {
            if (!frozen.model->params[id].frozen)
                rig_same_param(frozen.model, id, a, b, p == SPW_PART_MASTER ? "the master" : "a moment");
            else if (p == SPW_PART_MASTER)
                rig_same_param(frozen.model, id, a, before, "what is frozen");
        }
        free(a);
        free(b);
    }
    free(before);
    rig_remove(&frozen);
    rig_remove(&still);
}

static const char *const embeddings[] = {"w?e.weight"}, *const mlps[] = {"*.mlp.*", "ln_f.*", "h.1.attn.c_attn.weight"},
                         *const lower[] = {"model.embed_tokens.weight", "model.layers.[01].*"},
                         *const all_but_last[] = {"w?e.weight", "h.*"},
                         *const all_but_norms[] = {"*proj.weight", "model.embed_tokens.weight"};

static void
test_frozen_is_lr_zero(void **state)
{
    (void)state;
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, embeddings, 1);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, mlps, 3);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_FP32, lower, 2);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_FP32, all_but_norms, 2);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, all_but_last, 2);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, mlps, 3);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, all_but_norms, 2);
}

static void
test_frozen_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, rig_freeze_lower);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0, rig_freeze_lower);
    rig_everywhere(SPW_FAMILY_MIXTRAL, SPW_STATE_SPLIT, 0, rig_freeze_lower);
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, rig_freeze_mlps);
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, rig_freeze_mlps);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, 0, rig_freeze_mlps);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT24_INT8, 1, rig_freeze_mlps);
}

/* Uses of units in a step and blocks whose inputs are kept, counted by hand. */
static void
count_uses(const char *const *globs, uint32_t count, uint64_t uses, uint32_t kept)
{
    rig r;
    spw_store_stats before, after;
    uint64_t places = 0;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    for (uint32_t g = 0; g < count; g++)
        rig_freeze(&r, globs[g]);
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &before);
    rig_train(&r, 0, 1);
    spw_store_get_stats(spw_engine_store(r.e), &after);
    assert_int_equal(after.uses - before.uses, uses);
    for (int t = 0; t < SPW_TIER_COUNT; t++)
        places += spw_engine_plan(r.e)->activation_count[t];
    assert_int_equal(places, kept * r.c.accumulation);
    rig_remove(&r);
}

/*
 * The backward pass ends at the lowest block that is trained. The chain is embeddings, three layers, head; the embeddings'
 * unit is used by both ends, the head has the last norm besides and runs in the backward pass alone. What embeddings do there needs
 * no weights.
 */
static void
test_backward_ends(void **state)
{
    static const char *const two[] = {"w?e.weight", "h.[01].*"}, *const middle[] = {"h.1.*"}, *const layers[] = {"h.*"};
    (void)state;
    count_uses(NULL, 0, 4 + 5, 3);
    count_uses(embeddings, 1, 4 + 5, 3);
    count_uses(middle, 1, 4 + 5, 3);
    count_uses(layers, 1, 4 + 5, 3);
    count_uses(two, 2, 4 + 3, 1);
    count_uses(all_but_last, 2, 4 + 2, 0);
}

/* A chain that brings a trained block down: refused where the plan has no room for what it keeps, else the same losses. */
static void
test_backward_ends_lower(void **state)
{
    static const uint32_t chains[2][6] = {{0, 3, 1, 2, 4}, {0, 1, 3, 2, 3, 4}};
    static const char *const globs[] = {"w?e.weight", "h.[01].*"};
    rig frozen, still;
    (void)state;
    rig_config(&frozen, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    rig_config(&still, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
    frozen.c.gradient_clipping = still.c.gradient_clipping = 0;
    for (uint32_t g = 0; g < 2; g++) {
        rig_freeze(&frozen, globs[g]);
        still.c.optimizer.groups[g] = (spw_param_group){.lr = 0, .weight_decay = 0, .beta1 = NAN, .beta2 = NAN};
        snprintf(still.c.optimizer.groups[g].match, sizeof still.c.optimizer.groups[g].match, "%s", globs[g]);
    }
    still.c.optimizer.group_count = 2;
    rig_open(&frozen);
    assert_int_equal(spw_engine_set_chain(frozen.e, chains[0], 5, &frozen.err), SPW_EINVAL);
    assert_non_null(strstr(frozen.err.message, "chain_extra"));
    rig_close(&frozen);
    frozen.chain_extra = still.chain_extra = 1;
    rig_open(&frozen);
    rig_open(&still);
    rig_need(&frozen, spw_engine_init_params(frozen.e, 7, &frozen.err));
    rig_need(&still, spw_engine_init_params(still.e, 7, &still.err));
    for (int s = 0; s < 4; s++) { /* lowest 1, 2, 1, 2 */
        rig_need(&frozen, spw_engine_set_chain(frozen.e, chains[s % 2], 5 + (uint32_t)s % 2, &frozen.err));
        rig_need(&still, spw_engine_set_chain(still.e, chains[s % 2], 5 + (uint32_t)s % 2, &still.err));
        rig_train(&frozen, s, s + 1);
        rig_train(&still, s, s + 1);
    }
    assert_memory_equal(frozen.losses, still.losses, 4 * sizeof frozen.losses[0]);
    rig_remove(&frozen);
    rig_remove(&still);
}

/* Gradients and records for what is trained alone: in the plan, in the store, and in what a step writes. */
static void
test_frozen_bytes(void **state)
{
    (void)state;
    for (int tier = SPW_TIER_DEVICE; tier < SPW_TIER_COUNT; tier++) {
        rig r;
        spw_store_stats before, after;
        const spw_plan *p;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, (spw_tier)tier);
        rig_freeze(&r, "h.*.weight");
        rig_freeze(&r, "w*");
        rig_freeze(&r, "ln_f.*");
        rig_open(&r);
        rig_count_bytes(&r, 3 * (32 + 96 + 32 + 32 + 128 + 32)); /* the biases of three layers */
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        rig_train(&r, 0, 1);
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        spw_store_get_stats(spw_engine_store(r.e), &before);
        rig_train(&r, 1, 3);
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        spw_store_get_stats(spw_engine_store(r.e), &after);
        p = spw_engine_plan(r.e);
        assert_int_equal(after.updates - before.updates, 2 * 3); /* a chunk per layer */
        if (tier == SPW_TIER_NVME) { /* what is still dirty in its slot comes later: no more than this */
            assert_true(after.nvme_write_bytes - before.nvme_write_bytes <= 3 * p->trained * 12);
            assert_int_equal(p->traffic[SPW_PACE_DEFAULT].nvme_write, p->trained * 12);
        } else {
            assert_int_equal(after.nvme_write_bytes, 0);
        }
        rig_remove(&r);
    }
}

/* Mistakes are told by name, before anything is taken. */
static void
test_freeze_refusals(void **state)
{
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
    rig_freeze(&r, "wte.weight");
    rig_freeze(&r, "h.9.*");
    assert_int_equal(spw_model_from_config(&r.model, &r.c, &r.err), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "\"h.9.*\""));
    assert_null(r.model);
    r.c.run.freeze.count = 0;
    rig_freeze(&r, "*");
    assert_int_equal(spw_model_from_config(&r.model, &r.c, &r.err), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "nothing to train"));
    assert_int_equal(spw_model_build(&r.model, &r.c.model, &r.err), SPW_OK);
    assert_int_equal(
        spw_engine_create(&r.e, &(spw_engine_options){.config = &r.c, .model = r.model, .plan_only = true}, &r.err),
        SPW_EINVAL);
    assert_non_null(strstr(r.err.message, "spillway.freeze"));
    spw_model_destroy(r.model);
    tiny_dir_remove(r.dir);
}

static void
test_frozen_resumes(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, SPW_TIER_NVME, rig_freeze_mlps);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_HOST, rig_freeze_mlps);
    rig_resumes(SPW_STATE_MIXED, SPW_FAMILY_GPT2, SPW_TIER_NVME, rig_freeze_mlps);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_QWEN3_MOE, SPW_TIER_HOST, rig_freeze_lower);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frozen_is_lr_zero), cmocka_unit_test(test_frozen_everywhere),
        cmocka_unit_test(test_backward_ends),     cmocka_unit_test(test_backward_ends_lower),
        cmocka_unit_test(test_frozen_bytes),      cmocka_unit_test(test_freeze_refusals),
        cmocka_unit_test(test_frozen_resumes),
    };
    return cmocka_run_group_tests_name("finetune", tests, NULL, NULL);
}
