/*
 * Embeddings and heads in pieces of their rows (spillway.tile_vocab): the same bits wherever state lies, the numbers of whole ones but for
 * rounding, files that know nothing of pieces, the bytes of the plan, and less device memory.
 */
#include "lib_ranks.h"
#include "lib_rig.h"
#include "runtime_internal.h"
#include "spw_access.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { VOCAB = 203 }; /* in pieces of 64: four, the last of 11 rows */

static void
in_fours(rig *r)
{
    r->c.model.vocab = VOCAB;
    r->c.run.tile_vocab = 64;
}

static void
untied(rig *r)
{
    in_fours(r);
    r->c.model.tied = false;
}

static void
in_halves(rig *r)
{
    in_fours(r);
    r->c.run.tile_vocab = 130;
    r->c.model.dropout = 0.1;
    r->c.accumulation = 3;
}

static void
with_frozen(rig *r)
{
    untied(r);
    rig_freeze(r, "model.embed_tokens.weight");
    rig_freeze(r, "model.layers.0.*");
}

static void
head_frozen(rig *r)
{
    untied(r);
    rig_freeze(r, "lm_head.weight");
}

static void
in_tiles(rig *r)
{
    untied(r);
    r->c.run.tile_tokens = 9;
    r->c.accumulation = 2;
}

static void
with_adapters(rig *r)
{
    in_fours(r);
    rig_lora(r);
}

static void
in_turns(rig *r)
{
    in_fours(r);
    r->c.run.expert_turns = 2;
    r->c.run.micro_batches_per_pass = 1;
}

/* Two tables in pieces in one block. */
static void
small(rig *r)
{
    in_fours(r);
    tiny_model_fit(&r->c.model);
}

static void
small_frozen(rig *r)
{
    small(r);
    rig_freeze(r, "model.embed_tokens.weight");
}

static void
test_everywhere(void **state)
{
    (void)state;
    rig_everywhere(TINY_GEMMA4_SMALL, SPW_STATE_SPLIT, 1, small);
    rig_everywhere(TINY_GEMMA4_SMALL, SPW_STATE_FP32, 0, small_frozen);
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, in_halves);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, untied);
    rig_everywhere(SPW_FAMILY_GEMMA3, SPW_STATE_SPLIT, 1, in_fours);
    rig_everywhere(SPW_FAMILY_GEMMA2, SPW_STATE_FP32, 0, in_fours);
    rig_everywhere(SPW_FAMILY_QWEN3, SPW_STATE_FP32, 0, in_tiles);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, 0, with_frozen);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT24_INT8, 1, head_frozen);
    rig_everywhere(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, 1, in_turns);
    rig_everywhere(SPW_FAMILY_QWEN3, SPW_STATE_SPLIT, 0, with_adapters);
}

static void
test_resumes(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_NVME, untied);
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, SPW_TIER_HOST, in_halves);
}

/* ---------------------------------------------------------------- beside whole ones */

/* Returns the bytes of gradients that wait on nvme. */
static uint64_t
run(rig_outcome *o, spw_family family, void (*change)(rig *r), bool whole)
{
    rig r;
    uint64_t waiting;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    change(&r);
    if (whole)
        r.c.run.tile_vocab = 0;
    rig_descend(&r, o);
    assert_int_equal(spw_engine_layout(r.e)->places[0].pieces == 1, whole);
    waiting = spw_engine_plan(r.e)->grad_nvme;
    rig_remove(&r);
    return waiting;
}

static void
test_as_the_whole(void **state)
{
    static const struct {
        spw_family family;
        void (*change)(rig *r);
    } kinds[] = {{SPW_FAMILY_GPT2, in_halves},  {SPW_FAMILY_GPT2, in_fours},     {SPW_FAMILY_LLAMA, untied},
                 {SPW_FAMILY_GEMMA2, in_fours}, {SPW_FAMILY_LLAMA, head_frozen}, {SPW_FAMILY_GEMMA3, in_fours},
                 {SPW_FAMILY_QWEN3, in_tiles},  {TINY_GEMMA4_SMALL, small}};
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        rig_outcome want, got;
        (void)run(&want, kinds[k].family, kinds[k].change, true);
        (void)run(&got, kinds[k].family, kinds[k].change, false);
        rig_near(&want, &got, kinds[k].family == TINY_GEMMA4_SMALL ? 1e-4 : 1e-6, tiny_family_name(kinds[k].family));
        free(want.masters);
        free(got.masters);
    }
}

static void
waiting(rig *r)
{
    in_fours(r);
    r->c.zero.offload_optimizer = SPW_TIER_NVME;
}

static void
spilled(rig *r)
{
    waiting(r);
    snprintf(r->c.run.gradients, sizeof r->c.run.gradients, "nvme");
    r->c.run.chaos_seed = 5;
}

/* Gradients wait on nvme, but for those of pieces that come back to the device for the embedding's share. */
static void
test_gradients_on_nvme(void **state)
{
    rig_outcome want, got;
    (void)state;
    assert_int_equal(run(&want, SPW_FAMILY_GPT2, waiting, false), 0);
    assert_true(run(&got, SPW_FAMILY_GPT2, spilled, false) > 0);
    assert_memory_equal(want.losses, got.losses, sizeof want.losses);
    assert_memory_equal(want.masters, got.masters, want.elems * sizeof(float));
    free(want.masters);
    free(got.masters);
}

/* ---------------------------------------------------------------- files and names */

/* A checkpoint knows nothing of pieces: it loads into whole matrices, and those of a whole one into pieces. */
static void
test_files(void **state)
{
    (void)state;
    for (int whole_first = 0; whole_first < 2; whole_first++) {
        rig saved, other;
        rig_config(&saved, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
        untied(&saved);
        rig_config(&other, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
        untied(&other);
        (whole_first ? &saved : &other)->c.run.tile_vocab = 0;
        rig_open(&saved);
        rig_need(&saved, spw_engine_init_params(saved.e, 7, &saved.err));
        rig_train(&saved, 0, 2);
        rig_save(&saved, 2);
        rig_open(&other);
        rig_load(&other, &saved, 2);
        rig_same_state(&saved, &other, "what was loaded");
        rig_remove(&saved);
        rig_remove(&other);
    }
}

/* By name a matrix is whole: reads and writes go over its pieces, and into the middle of them. */
static void
test_access(void **state)
{
    rig r;
    spw_access a = {.param = "lm_head.weight", .part = SPW_ACCESS_MASTER};
    spw_stretch held;
    float *all, *some;
    uint64_t elems, cols;
    (void)state;
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    untied(&r);
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 1);
    cols = r.c.model.width;
    elems = VOCAB * cols;
    all = malloc(elems * sizeof *all);
    some = malloc(elems * sizeof *some);
    assert_non_null(all);
    assert_non_null(some);
    rig_need(&r, spw_access_get_local(r.e, &a, all, &held, &r.err));
    assert_true(held.first == 0 && held.count == elems);
    for (uint64_t i = 0; i < elems; i++)
        some[i] = 0.001f * (float)(i % 1009) - 0.5f;
    a.first = 60 * cols + 3; /* the end of the first piece, the second, and some of the third */
    a.count = 100 * cols;
    rig_need(&r, spw_access_set_local(r.e, &a, some, &held, &r.err));
    assert_true(held.first == a.first && held.count == a.count);
    memcpy(all + a.first, some, a.count * sizeof *some);
    a.first = a.count = 0;
    memset(some, 0xff, elems * sizeof *some);
    rig_need(&r, spw_access_get_full(r.e, &a, some, &r.err));
    assert_memory_equal(some, all, elems * sizeof *all);
    free(all);
    free(some);
    rig_remove(&r);
}

/* In a forked rank no assertion may fail. */
#define NEED(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return SPW_RAISE(err, SPW_EINVAL, "line %d: %s", __LINE__, #condition);                                    \
    } while (0)

/* Of all pieces together or of one at a time, what three ranks set is what they get. */
static spw_status
access_rank(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    static float want[VOCAB * 64], got[VOCAB * 64];
    rig *r = ctx;
    spw_engine *e = NULL;
    spw_access a = {.param = "lm_head.weight", .part = SPW_ACCESS_MASTER};
    spw_stretch held;
    uint64_t cols = r->c.model.width, elems = VOCAB * cols;
    NEED(cols <= 64);
    SPW_TRY(spw_engine_create(
        &e,
        &(spw_engine_options){.config = &r->c, .model = r->model, .comm = comm, .process_bytes = TINY_PROCESS_BYTES},
        err));
    SPW_TRY(spw_engine_init_params(e, 7, err));
    SPW_TRY(spw_access_get_full(e, &a, want, err));
    a.first = 10 * cols; /* from the first piece into the third */
    a.count = 130 * cols;
    for (uint64_t i = 0; i < a.count; i++)
        want[a.first + i] = rank == 1 ? 0.001f * (float)(i % 977) : -1;
    SPW_TRY(spw_access_set_full(e, &a, rank == 1 ? want + a.first : NULL, 1, err));
    for (uint64_t i = 0; i < a.count; i++)
        want[a.first + i] = 0.001f * (float)(i % 977);
    for (uint64_t at = 0; at < elems; at += 64 * cols) { /* each its own part of each piece */
        a.first = at + 1;
        a.count = 9 * cols;
        SPW_TRY(spw_access_get_local(e, &a, NULL, &held, err));
        for (uint64_t i = 0; i < held.count; i++)
            got[i] = 0.002f * (float)((held.first + i) % 89);
        SPW_TRY(spw_access_set_local(e, &a, got, &held, err));
        for (uint64_t i = 0; i < a.count; i++)
            want[a.first + i] = 0.002f * (float)((a.first + i) % 89);
    }
    a.first = a.count = 0;
    SPW_TRY(spw_access_get_full(e, &a, got, err));
    NEED(memcmp(got, want, elems * sizeof *got) == 0);
    NEED(spw_access_get_local(e, &a, got, &held, err) == SPW_EUNSUPPORTED);
    NEED(strstr(err->message, "multiples of") != NULL);
    *err = (spw_error){0};
    spw_engine_destroy(e);
    return SPW_OK;
}

static void
test_access_on_ranks(void **state)
{
    enum { RANKS = 3 };
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    untied(&r);
    r.c.zero.stage = 3;
    r.c.run.ranks = RANKS;
    r.c.accumulation = 1;
    r.c.train_batch_size = r.c.micro_batch * RANKS;
    rig_need(&r, spw_model_from_config(&r.model, &r.c, &r.err));
    ranks_run(RANKS, &(spw_comm_options){.chaos_seed = 3}, access_rank, &r);
    spw_model_destroy(r.model);
    tiny_dir_remove(r.dir);
}

/* ---------------------------------------------------------------- bytes */

/* A step moves what the plan says, and a device takes less. */
static void
test_bytes(void **state)
{
    enum { FIRST = 3, STEPS = 24 };
    (void)state;
    for (int k = 0; k < 4; k++) {
        const bool tied = k % 2;
        const uint64_t passes = k < 2 ? 0 : 1; /* all micro-batches in one, or each in its own */
        uint64_t least[2];
        for (int whole = 0; whole < 2; whole++) {
            spw_step_result result;
            const spw_plan *p;
            double h2d = 0, planned;
            rig r;
            rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
            untied(&r);
            r.c.model.tied = tied;
            r.c.model.vocab = 4099;
            r.c.run.tile_vocab = whole ? 0 : 512;
            r.c.accumulation = 3;
            r.c.run.micro_batches_per_pass = passes;
            r.c.run.device_memory = 1;
            assert_int_equal(rig_begin(&r), SPW_ENOFIT);
            least[whole] = rig_least_named(&r, "spillway.device_memory");
            spw_model_destroy(r.model);
            r.c.run.device_memory = least[whole];
            rig_need(&r, rig_begin(&r));
            for (uint64_t step = 0; step < FIRST + STEPS; step++) {
                rig_need(&r, rig_step(&r, step, &result));
                h2d += step >= FIRST ? (double)result.h2d / STEPS : 0;
            }
            p = spw_engine_plan(r.e);
            planned = (double)p->traffic[SPW_PACE_DEFAULT].h2d;
            print_message("%s, %s: least %llu, h2d %.0f of %.0f planned, d2h %llu of %llu\n", tied ? "tied" : "untied",
                          whole ? "whole" : "in pieces", (unsigned long long)least[whole], h2d, planned,
                          (unsigned long long)result.d2h, (unsigned long long)p->traffic[SPW_PACE_DEFAULT].d2h);
            assert_int_equal(result.d2h, p->traffic[SPW_PACE_DEFAULT].d2h);
            /* What comes ahead of the next step may fall to either side of where the counting begins and ends. */
            assert_true(fabs(h2d - planned) < 0.01 * planned + 2 * (double)p->cache_device / STEPS);
            rig_remove(&r);
        }
        assert_true(least[0] < least[1] / 2);
    }
}

/* Rows of a piece: multiples of 64, the fewest pieces, and never more of them than a block may have units. */
static void
test_rows(void **state)
{
    static const struct {
        uint64_t vocab, most, rows;
    } kinds[] = {
        {203, 0, 0},         {203, 203, 0},         {203, 202, 128},       {203, 64, 64},     {203, 1, 64},
        {256, 128, 128},     {257, 128, 128},       {50257, 16384, 12608}, {262208, 64, 320}, {262208, 262207, 131136},
        {1u << 20, 1, 1024}, {128256, 16384, 16064}};
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        spw_model_config c = {.vocab = kinds[k].vocab};
        uint64_t rows = spw_model_piece_rows(&c, kinds[k].most);
        if (rows != kinds[k].rows)
            fail_msg("%llu of %llu: %llu rows, not %llu", (unsigned long long)kinds[k].most,
                     (unsigned long long)kinds[k].vocab, (unsigned long long)rows, (unsigned long long)kinds[k].rows);
        assert_true(rows == 0 || (c.vocab + rows - 1) / rows <= SPW_BLOCK_PARAMS_MAX / 2);
    }
}

/* A parameter that no block owns has no place, with pieces beside it or without. */
static void
test_owned_by_none(void **state)
{
    (void)state;
    for (uint64_t rows = 0; rows <= 64; rows += 64) {
        spw_model_config c;
        spw_model *m = NULL;
        spw_layout l;
        tiny_model_config(&c, SPW_FAMILY_GPT2);
        c.vocab = VOCAB;
        assert_int_equal(spw_model_build(&m, &c, NULL), SPW_OK);
        m->params[3].owner_block = UINT32_MAX;
        assert_int_equal(spw_layout_make(&l, m, 4096, true, 0, NULL, false, rows, 0, 1, NULL), SPW_OK);
        assert_int_equal(l.places[3].elems, 0);
        assert_int_equal(l.places[0].pieces, rows == 0 ? 1 : 4);
        assert_int_equal(l.places[0].elems, VOCAB * c.width);
        for (uint32_t i = 0; i < l.param_first[l.unit_count]; i++)
            assert_int_not_equal(l.param_ids[i], 3);
        spw_layout_free(&l);
        spw_model_destroy(m);
    }
}

/* ---------------------------------------------------------------- what cannot be */

static void
test_refusals(void **state)
{
    float logits[VOCAB];
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
    in_fours(&r);
    r.c.run.grad_dtype = SPW_BF16;
    assert_int_equal(rig_begin(&r), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "spillway.tile_vocab"));
    spw_model_destroy(r.model);
    r.c.run.grad_dtype = SPW_F32;
    r.c.run.delayed_update = 1;
    assert_int_equal(rig_begin(&r), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "spillway.tile_vocab 0"));
    spw_model_destroy(r.model);
    r.c.run.delayed_update = 0;
    assert_int_equal(rig_begin(&r), SPW_OK);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    assert_int_equal(spw_engine_logits(r.e, (int32_t[]){1, 2}, 2, logits, &r.err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(r.err.message, "spillway.tile_vocab 0"));
    rig_remove(&r);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everywhere),        cmocka_unit_test(test_resumes), cmocka_unit_test(test_as_the_whole),
        cmocka_unit_test(test_gradients_on_nvme), cmocka_unit_test(test_files),   cmocka_unit_test(test_access),
        cmocka_unit_test(test_access_on_ranks),   cmocka_unit_test(test_bytes),   cmocka_unit_test(test_rows),
        cmocka_unit_test(test_owned_by_none),     cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests_name("pieces of a vocabulary", tests, NULL, NULL);
}
