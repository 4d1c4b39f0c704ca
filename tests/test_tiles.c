/*
 * Blocks computed in tiles of tokens (spillway.tile_tokens): the same bits wherever state lies, kept or recomputed; the numbers of
 * blocks computed whole, but for rounding; less working memory.
 */
#include "lib_rig.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static void
in_nines(rig *r)
{
    r->c.run.tile_tokens = 9; /* three of a sequence of 24: eight tokens each */
}

static void
with_adapters(rig *r)
{
    rig_lora_dropout(r);
    r->c.run.tile_tokens = 5;
}

static void
with_frozen(rig *r)
{
    rig_freeze_lower(r);
    r->c.run.tile_tokens = 24; /* whole sequences */
}

static void
with_dropout(rig *r)
{
    r->c.model.dropout = 0.1;
    r->c.run.tile_tokens = 7;
}

static void
test_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, with_dropout);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_QWEN3, SPW_STATE_SPLIT, 1, with_frozen);
    rig_everywhere(SPW_FAMILY_GEMMA3, SPW_STATE_FP32, 0, in_nines);
    rig_everywhere(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_PHI3, SPW_STATE_FP32, 0, with_adapters);
    rig_everywhere(SPW_FAMILY_NEOX, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_STABLELM, SPW_STATE_FP32, 0, in_nines);
    rig_everywhere(SPW_FAMILY_QWEN3_5, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_QWEN3_NEXT, SPW_STATE_FP32, 0, in_nines);
    rig_everywhere(SPW_FAMILY_GRANITE_HYBRID, SPW_STATE_FP32, 0, in_nines);
    rig_everywhere(SPW_FAMILY_NEMOTRON_H, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_GEMMA4, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_MIMO_V2, SPW_STATE_SPLIT, 0, in_nines);
    rig_everywhere(SPW_FAMILY_LFM2_MOE, SPW_STATE_FP32, 1, in_nines);
    rig_everywhere(SPW_FAMILY_AFMOE, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_OLMO_HYBRID, SPW_STATE_FP32, 1, in_nines);
    rig_everywhere(SPW_FAMILY_KIMI_LINEAR, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_FALCON_H1, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(TINY_GEMMA4_SMALL, SPW_STATE_FP32, 0, in_nines);
    rig_everywhere(TINY_FEW_KEYS, SPW_STATE_SPLIT, 1, in_nines);
    rig_everywhere(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_SPLIT, 1, in_nines);
}

static void
test_resumes(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_NVME, in_nines);
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, SPW_TIER_HOST, with_dropout);
}

typedef struct outcome {
    rig_outcome of;
    uint64_t arena, tapes;
} outcome;

static void
run(outcome *o, spw_family family, void (*change)(rig *r), uint64_t tile, const char *recompute)
{
    rig r;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    change(&r);
    r.c.run.tile_tokens = tile;
    snprintf(r.c.run.recompute, sizeof r.c.run.recompute, "%s", recompute);
    rig_descend(&r, &o->of);
    o->arena = spw_engine_plan(r.e)->arena_device;
    o->tapes = spw_engine_plan(r.e)->tapes_device;
    rig_remove(&r);
}

static void
as_it_is(rig *r)
{
    (void)r;
}

/* Tiles round otherwise than the whole, and nothing else; what is kept or computed again makes no difference at all. */
static void
test_as_the_whole(void **state)
{
    static const struct {
        spw_family family;
        void (*change)(rig *r);
        uint64_t tiles[2];
    } kinds[] = {{SPW_FAMILY_GPT2, with_dropout, {7, 24}},     {SPW_FAMILY_LLAMA, as_it_is, {9, 1}},
                 {SPW_FAMILY_DEEPSEEK_V4, as_it_is, {9, 1}},   {SPW_FAMILY_DEEPSEEK_V4, with_adapters, {7, 24}},
                 {SPW_FAMILY_QWEN3, as_it_is, {5, 24}},        {SPW_FAMILY_GEMMA2, as_it_is, {8, 24}},
                 {SPW_FAMILY_OLMO2, as_it_is, {8, 47}},        {SPW_FAMILY_QWEN2_MOE, as_it_is, {8, 3}},
                 {SPW_FAMILY_LLAMA, with_adapters, {7, 2}},    {SPW_FAMILY_GPT_OSS, as_it_is, {9, 24}},
                 {SPW_FAMILY_NEOX, as_it_is, {7, 24}},         {SPW_FAMILY_OPT, as_it_is, {9, 1}},
                 {SPW_FAMILY_STABLELM, as_it_is, {9, 24}},     {SPW_FAMILY_NEOX, with_adapters, {7, 2}},
                 {SPW_FAMILY_QWEN3_5, as_it_is, {9, 1}},       {SPW_FAMILY_QWEN3_NEXT, as_it_is, {7, 24}},
                 {SPW_FAMILY_QWEN3_5, with_adapters, {7, 24}}, {SPW_FAMILY_GEMMA4, as_it_is, {9, 1}},
                 {SPW_FAMILY_LLAMA4, as_it_is, {9, 24}},       {TINY_GEMMA4_SMALL, as_it_is, {7, 24}},
                 {TINY_GEMMA4_SMALL, with_frozen, {9, 5}},     {TINY_FEW_KEYS, as_it_is, {7, 24}}};
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        bool four =
            kinds[k].family == SPW_FAMILY_GEMMA4 || kinds[k].family == TINY_GEMMA4_SMALL; /* norms of small sums */
        outcome whole;
        run(&whole, kinds[k].family, kinds[k].change, 0, "always");
        for (int i = 0; i < 2; i++) {
            outcome again, kept;
            run(&again, kinds[k].family, kinds[k].change, kinds[k].tiles[i], "always");
            run(&kept, kinds[k].family, kinds[k].change, kinds[k].tiles[i], "auto");
            assert_true(again.tapes == 0 && kept.tapes > 0);
            assert_memory_equal(again.of.losses, kept.of.losses, sizeof again.of.losses);
            assert_memory_equal(again.of.masters, kept.of.masters, again.of.elems * sizeof(float));
            rig_near(&whole.of, &again.of, four ? 3e-5 : 1e-6, tiny_family_name(kinds[k].family));
            assert_true(again.arena <= whole.arena);
            free(again.of.masters);
            free(kept.of.masters);
        }
        free(whole.of.masters);
    }
}

/*
 * Working memory of a long sequence: beside one tile's, in values of width per token, queries, keys, values and what attention
 * makes of them, and their gradients: 2 (1 + 1/2 + 1/2 + 1) here.
 */
static void
test_memory(void **state)
{
    uint64_t arenas[2];
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.micro_batch = r.c.accumulation = 1;
        r.c.model.positions = r.c.data.seq_length = 4096;
        r.c.run.tile_tokens = k == 0 ? 0 : 64;
        snprintf(r.c.run.recompute, sizeof r.c.run.recompute, "always");
        assert_true(r.c.model.kv_heads * 2 == r.c.model.heads &&
                    r.c.model.heads * r.c.model.head_dim == r.c.model.width);
        rig_open(&r);
        arenas[k] = spw_engine_plan(r.e)->arena_device;
        if (k == 1) {
            uint64_t row = r.c.model.width * sizeof(float);
            uint64_t sums = 2 * r.c.model.heads * sizeof(float); /* of attention's rows, and what is alike */
            assert_in_range(arenas[k], 4096 * 6 * row, 4096 * (6 * row + sums) + 64 * 40 * row);
        }
        rig_remove(&r);
    }
    assert_true(arenas[1] * 3 < arenas[0]);
}

/*
 * The same of a mixture with a shared expert, whose rows meet in routing: beside attention's there remain what is between it and the experts,
 * twice, what they read, with its gradient, logits with theirs and routing, and nothing that grows with what a row's experts make.
 */
static void
test_mixture_memory(void **state)
{
    static const uint64_t tokens[] = {4096, 4096, 8192};
    uint64_t arenas[3], expected = 0;
    (void)state;
    for (int k = 0; k < 3; k++) {
        rig r;
        const spw_model_config *c = &r.c.model;
        rig_config(&r, SPW_FAMILY_QWEN2_MOE, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.micro_batch = r.c.accumulation = 1;
        r.c.model.positions = r.c.data.seq_length = tokens[k];
        r.c.model.mlp_width = 8 * c->width; /* of an expert, more than any row of the rest */
        r.c.run.tile_tokens = k == 0 ? 0 : 64;
        snprintf(r.c.run.recompute, sizeof r.c.run.recompute, "always");
        rig_open(&r);
        arenas[k] = spw_engine_plan(r.e)->arena_device;
        expected = sizeof(float) * (4 * (c->heads + c->kv_heads) * c->head_dim + 2 * c->heads + 4 * c->width +
                                    2 * c->experts + 4 * c->choices);
        rig_remove(&r);
    }
    print_message("%llu bytes a token, %llu expected\n", (unsigned long long)((arenas[2] - arenas[1]) / 4096),
                  (unsigned long long)expected);
    assert_in_range(arenas[2] - arenas[1], 4096 * expected * 97 / 100, 4096 * expected);
    assert_true(arenas[1] * 5 < arenas[0]);
}

/* Without a number, tiles are 2^25 / width tokens: of 20000 tokens of width 4096 three parts, as 8192 would have, not two. */
static void
test_default(void **state)
{
    static const uint64_t tiles[] = {0, 8192, 10000};
    uint64_t arenas[3];
    (void)state;
    for (int k = 0; k < 3; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
        r.c.model.width = 4096;
        r.c.model.layers = 1;
        r.c.micro_batch = r.c.accumulation = 1;
        r.c.model.positions = r.c.data.seq_length = 20000;
        r.c.run.tile_tokens = tiles[k];
        rig_need(&r, spw_model_from_config(&r.model, &r.c, &r.err));
        rig_need(&r, spw_engine_create(&r.e, &(spw_engine_options){.config = &r.c, .model = r.model, .plan_only = true},
                                       &r.err));
        arenas[k] = spw_engine_plan(r.e)->arena_device;
        rig_remove(&r);
    }
    assert_int_equal(arenas[0], arenas[1]);
    assert_true(arenas[0] < arenas[2]);
}

/* Contexts of any length fit where the plan counted on tiles of the longest, and have the whole's logits. */
static void
test_contexts(void **state)
{
    enum { VOCAB = 512 };
    static float want[VOCAB], got[VOCAB];
    static const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA};
    (void)state;
    for (int f = 0; f < 2; f++) {
        rig r[2];
        for (int k = 0; k < 2; k++) {
            rig_config(&r[k], families[f], SPW_STATE_FP32, SPW_TIER_HOST);
            r[k].c.run.tile_tokens = k == 0 ? 0 : 20; /* twelves of the plan's 24 */
            snprintf(r[k].c.run.recompute, sizeof r[k].c.run.recompute, "always");
            rig_open(&r[k]);
            rig_need(&r[k], spw_engine_init_params(r[k].e, 7, &r[k].err));
        }
        assert_true(r[0].c.model.vocab <= VOCAB);
        tiny_batch(3, r[0].c.model.vocab, r[0].c.data.seq_length, rig_tokens, rig_targets);
        for (uint64_t n = 1; n <= r[0].c.data.seq_length; n++) {
            rig_need(&r[0], spw_engine_logits(r[0].e, rig_tokens, n, want, &r[0].err));
            rig_need(&r[1], spw_engine_logits(r[1].e, rig_tokens, n, got, &r[1].err));
            for (uint64_t i = 0; i < r[0].c.model.vocab; i++)
                assert_true(fabsf(want[i] - got[i]) <= 1e-6f);
        }
        for (int k = 0; k < 2; k++) {
            rig_tokens[1] = k == 0 ? (int32_t)r[0].c.model.vocab : -1;
            assert_int_equal(spw_engine_logits(r[k].e, rig_tokens, 2, got, &r[k].err), SPW_EINVAL);
            assert_non_null(strstr(r[k].err.message, "outside the vocabulary"));
            rig_need(&r[k], spw_engine_logits(r[k].e, rig_tokens, 1, got, &r[k].err));
        }
        rig_remove(&r[0]);
        rig_remove(&r[1]);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_everywhere),     cmocka_unit_test(test_resumes),
                                       cmocka_unit_test(test_as_the_whole),   cmocka_unit_test(test_memory),
                                       cmocka_unit_test(test_mixture_memory), cmocka_unit_test(test_default),
                                       cmocka_unit_test(test_contexts)};
    return cmocka_run_group_tests_name("tiles", tests, NULL, NULL);
}
