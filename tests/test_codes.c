/* Frozen weights stored as codes: the same bits in every placement, and those of what the codes decode to. */
#include "lib_rig.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static void
with_codes(rig *r, const char *codes)
{
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "%s", codes);
}

static void
lora_int8(rig *r)
{
    rig_lora(r);
    with_codes(r, "int8");
}

static void
lora_int4(rig *r)
{
    rig_lora(r);
    with_codes(r, "int4");
}

static void
lower_int4(rig *r)
{
    rig_freeze_lower(r);
    with_codes(r, "int4");
}

static void
test_codes_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, lora_int8);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0, lora_int4);
    rig_everywhere(SPW_FAMILY_MIXTRAL, SPW_STATE_SPLIT, 1, lora_int4);
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_MIXED, 0, lower_int4);
}

static void
test_codes_resume(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_NVME, lora_int4);
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, SPW_TIER_HOST, lora_int8);
    rig_resumes(SPW_STATE_MIXED, SPW_FAMILY_GPT2, SPW_TIER_NVME, lower_int4);
}

/* What codes decode to, as a checkpoint has it, trained without codes: the same losses and state to the last bit. */
static void
against_plain(spw_family family, spw_state_format format, void (*change)(rig *r))
{
    rig coded, plain, exact;
    float *a, *b;
    uint64_t changed = 0;
    rig_config(&coded, family, format, SPW_TIER_NVME);
    rig_config(&plain, family, format, SPW_TIER_HOST);
    rig_config(&exact, family, format, SPW_TIER_HOST);
    change(&coded);
    change(&plain);
    change(&exact);
    with_codes(&plain, "none");
    with_codes(&exact, "");
    rig_open(&coded);
    rig_need(&coded, spw_engine_init_params(coded.e, 7, &coded.err));
    rig_save(&coded, 0);
    rig_train(&coded, 0, RIG_STEPS);
    rig_load(&plain, &coded, 0);
    rig_open(&exact);
    rig_need(&exact, spw_engine_init_params(exact.e, 7, &exact.err));
    a = rig_read(&plain, SPW_PART_MASTER);
    b = rig_read(&exact, SPW_PART_MASTER);
    for (uint32_t id = 0; id < plain.model->param_count;
         id++) { /* matrices of the layers' linear weights, and nothing else */
        const spw_param *p = &plain.model->params[id];
        uint64_t first = rig_elems_before(plain.model, id);
        bool differs = memcmp(a + first, b + first, p->rows * p->cols * sizeof *a) != 0;
        assert_true(differs == (p->frozen && p->ndim == 2 && p->owner_block > 0));
        for (uint64_t i = first; i < first + p->rows * p->cols; i++)
            assert_true(fabsf(a[i] - b[i]) <= 0.02f); /* of normals with a deviation of 0.05 */
        changed += differs;
    }
    assert_true(changed > 0);
    free(a);
    free(b);
    rig_train(&plain, 0, RIG_STEPS);
    assert_memory_equal(coded.losses, plain.losses, sizeof coded.losses);
    rig_same_state(&coded, &plain, "state beside codes");
    rig_remove(&coded);
    rig_remove(&plain);
    rig_remove(&exact);
}

static void
test_codes_are_numbers(void **state)
{
    (void)state;
    against_plain(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, lora_int8);
    against_plain(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, lora_int4);
    against_plain(SPW_FAMILY_LLAMA, SPW_STATE_FP32, lora_int8);
    against_plain(SPW_FAMILY_QWEN3_MOE, SPW_STATE_FP32, lora_int8);
    against_plain(SPW_FAMILY_PHI3, SPW_STATE_FP32, lora_int4);
    against_plain(SPW_FAMILY_QWEN3_5, SPW_STATE_FP32, lora_int4); /* whose convolution's weights stay as they are */
    against_plain(SPW_FAMILY_GPT2, SPW_STATE_MIXED, lower_int4);
}

/* Bytes of weights in the plan and over the links, counted by hand. */
static void
count_coded(const char *codes, uint64_t block)
{
    rig r;
    spw_store_stats before, after;
    const spw_layout *l;
    uint64_t all = 0, coded = 0, adapters = 0;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_lora(&r);
    with_codes(&r, codes);
    r.c.zero.max_live_parameters = 28672; /* the largest block: nearly every use fetches again */
    r.c.run.weight_slots = 1;
    r.c.run.prefetch = false;
    rig_open(&r);
    l = spw_engine_layout(r.e);
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        const spw_store_unit *u = &l->units[l->chunks[i].unit_idx];
        uint64_t elems = l->chunks[i].elems,
                 bytes = (u->form != SPW_QUANT_NONE) ? spw_round_up(elems / 128 * block, 4096) : elems * 2;
        all += bytes;
        coded += (u->form != SPW_QUANT_NONE) ? elems : 0;
        adapters += u->trainable ? bytes : 0;
    }
    assert_int_equal(coded, 3 * 12288); /* 12 x 32^2 */
    assert_int_equal(spw_engine_plan(r.e)->weight_nvme, all);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 2);
    rig_need(&r, spw_engine_drain(r.e, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &before);
    rig_train(&r, 2, 4);
    rig_need(&r, spw_engine_drain(r.e, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &after);
    assert_true(after.h2d_bytes - before.h2d_bytes <= 2 * 2 * all);
    assert_true(after.h2d_bytes - before.h2d_bytes >= 2 * all);
    assert_true(after.nvme_write_bytes - before.nvme_write_bytes <= 3 * adapters * 6);
    rig_remove(&r);
}

static void
test_codes_bytes(void **state)
{
    (void)state;
    count_coded("int8", 132);
    count_coded("int4", 68);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes_everywhere),
        cmocka_unit_test(test_codes_resume),
        cmocka_unit_test(test_codes_are_numbers),
        cmocka_unit_test(test_codes_bytes),
    };
    return cmocka_run_group_tests_name("codes", tests, NULL, NULL);
}
