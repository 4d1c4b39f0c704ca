/*
 * Sequences that ranks share (sequence_parallel_size): losses and weights are those of one rank up to rounding, whatever the model's heads, documents and
 * dropout; and the same to the last bit wherever state lies, however much is kept, in any order of time.
 */
#include "lib_tiny.h"
#include "lib_worlds.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { SHARED_STEPS = 3, SHARED_MICRO = 4 };

typedef struct setting {
    const char *name;
    spw_family family;
    double dropout;
    const char *documents;
    uint64_t tile, pass;
    uint32_t turns;     /* of experts */
    bool frozen, again; /* computed again: nothing is kept between checkpoints */
    /*
     * Weights are off by at most, of the largest; 0: 2e-6. Gemma 4's gradients are small beside Adam's eps, as is what they are off by, and one
     * rank's run in tiles is off by as much.
     */
    double most;
} setting;

static const setting settings[] = {
    {"gpt2", SPW_FAMILY_GPT2, .dropout = 0.1},
    {"gpt2, documents", SPW_FAMILY_GPT2, .documents = "separate"},
    {"llama, few heads of keys", SPW_FAMILY_LLAMA, .dropout = 0},
    {"llama, documents, tiles", SPW_FAMILY_LLAMA, .documents = "separate", .tile = 5},
    {"gemma 3, windows", SPW_FAMILY_GEMMA3, .dropout = 0},
    {"gpt-oss, sinks and experts", SPW_FAMILY_GPT_OSS, .dropout = 0},
    {"phi 3, packed", SPW_FAMILY_PHI3, .dropout = 0},
    {"neox, woven", SPW_FAMILY_NEOX, .dropout = 0},
    {"deepseek v3, latent", SPW_FAMILY_DEEPSEEK_V3, .dropout = 0},
    {"deepseek v3, latent, tiles", SPW_FAMILY_DEEPSEEK_V3, .tile = 4},
    {"gemma 3, tiles", SPW_FAMILY_GEMMA3, .tile = 7},
    {"phi 3, packed, tiles", SPW_FAMILY_PHI3, .tile = 9, .pass = 1},
    {"mixtral", SPW_FAMILY_MIXTRAL, .dropout = 0},
    {"gemma 4, tiles", SPW_FAMILY_GEMMA4, .tile = 5, .most = 2e-5},
    {"gemma 4, heads of two sizes", SPW_FAMILY_GEMMA4, .most = 1e-5},
    {"gpt2, frozen", SPW_FAMILY_GPT2, .frozen = true},
    {"gpt2, again", SPW_FAMILY_GPT2, .dropout = 0.1, .again = true},
    {"gemma 3, tiles, again", SPW_FAMILY_GEMMA3, .tile = 5, .again = true},
    {"llama, tiles of all rows, again", SPW_FAMILY_LLAMA, .tile = 30, .again = true},
    {"qwen3-moe, turns, tiles, again", SPW_FAMILY_QWEN3_MOE, .turns = 2, .tile = 9, .again = true},
    {"qwen3-moe, turns of a pass", SPW_FAMILY_QWEN3_MOE, .turns = 3, .pass = 2},
    {"deepseek v3, tiles, again", SPW_FAMILY_DEEPSEEK_V3, .turns = 2, .tile = 7, .again = true},
    {"granite 4, mamba, tiles, again", SPW_FAMILY_GRANITE_HYBRID, .turns = 2, .tile = 5, .again = true, .most = 1e-5},
    {"qwen3-next, tiles, again", SPW_FAMILY_QWEN3_NEXT, .tile = 7, .again = true, .most = 1e-5},
    {"qwen3-next, linear, documents", SPW_FAMILY_QWEN3_NEXT, .documents = "separate"},
    {"qwen3.5, linear, tiles", SPW_FAMILY_QWEN3_5, .tile = 5, .most = 1e-5},
    {"granite 4, mamba, documents, tiles", SPW_FAMILY_GRANITE_HYBRID, .documents = "separate", .tile = 7, .most = 1e-5},
    {"falcon h1, mamba beside", SPW_FAMILY_FALCON_H1, .most = 1e-5},
    {"kimi linear, channels, documents", TINY_EVEN_CHANNELS, .documents = "separate", .most = 1e-5},
    {"lfm2, convolutions, documents", SPW_FAMILY_LFM2_MOE, .documents = "separate", .most = 1e-5},
    {"olmo hybrid", SPW_FAMILY_OLMO_HYBRID, .most = 1e-5},
    {"gpt2, passes, dropout", SPW_FAMILY_GPT2, .dropout = 0.2, .pass = 1},
};
enum { COUNT = sizeof settings / sizeof settings[0] };

static world
world_of(const setting *s, spw_config *c, uint32_t ranks, uint32_t sharers)
{
    ranks_config(c, SPW_STATE_FP32);
    c->zero.stage = 3;
    c->sequence_ranks = sharers;
    c->run.router_balance = 0; /* it is of a rank's rows */
    c->run.tile_tokens = s->tile;
    c->run.micro_batches_per_pass = s->pass;
    c->run.expert_turns = s->turns;
    if (s->again)
        snprintf(c->run.recompute, sizeof c->run.recompute, "always");
    if (s->documents != NULL)
        snprintf(c->data.documents, sizeof c->data.documents, "%s", s->documents);
    return (world){.ranks = ranks,
                   .steps = SHARED_STEPS,
                   .micros = SHARED_MICRO,
                   .config = c,
                   .family = s->family,
                   .dropout = s->dropout,
                   .frozen = s->frozen,
                   .out = outcome_new()};
}

static void
test_near(void **state)
{
    static const uint32_t worlds[][2] = {{2, 2}, {4, 4}, {4, 2}};
    (void)state;
    for (int i = 0; i < COUNT; i += SANITIZED ? 3 : 1) {
        spw_config c;
        world one = world_of(&settings[i], &c, 1, 1);
        world_run(&one);
        for (size_t k = 0; k < sizeof worlds / sizeof worlds[0]; k++) {
            char what[96];
            world w = world_of(&settings[i], &c, worlds[k][0], worlds[k][1]);
            snprintf(what, sizeof what, "%s, %u ranks, %u share", settings[i].name, worlds[k][0], worlds[k][1]);
            world_run(&w);
            outcome_within(one.out, w.out, settings[i].most > 0 ? settings[i].most : 2e-6, what);
            assert_true(w.out->trade[0] > 0);
            outcome_free(w.out);
        }
        outcome_free(one.out);
    }
}

/* What of a family's tiny model looks at other rows besides attention, or has heads that two ranks cannot share out. */
static const char *
refusal_of(spw_family family)
{
    spw_model_config m;
    tiny_model_config(&m, family);
    if (m.heads % 2 != 0 || (m.linear_heads % 2 != 0 && !m.linear_conv))
        return "is to divide the first";
    if (m.keys_are_values)
        return "keys that stand for several rows";
    return m.index_keys > 0 && m.index_keys < 24 ? "indexers that choose" : NULL;
}

/* Each family is shared, or says why it cannot be. */
static void
test_families(void **state)
{
    static const spw_family families[] = {
        SPW_FAMILY_MISTRAL,     SPW_FAMILY_QWEN3,       SPW_FAMILY_QWEN3_MOE,  SPW_FAMILY_QWEN2_MOE,
        SPW_FAMILY_OLMO2,       SPW_FAMILY_OLMO3,       SPW_FAMILY_GEMMA2,     SPW_FAMILY_GEMMA,
        SPW_FAMILY_GLM4_MOE,    SPW_FAMILY_DEEPSEEK_V2, SPW_FAMILY_MINIMAX_M2, SPW_FAMILY_OPT,
        SPW_FAMILY_STARCODER2,  SPW_FAMILY_STABLELM,    SPW_FAMILY_ERNIE_MOE,  SPW_FAMILY_HY_V3,
        SPW_FAMILY_HUNYUAN,     SPW_FAMILY_HUNYUAN_MOE, SPW_FAMILY_COHERE2,    SPW_FAMILY_LLAMA4,
        SPW_FAMILY_GLM_DSA,     SPW_FAMILY_MISTRAL4,    SPW_FAMILY_MIMO_V2,    SPW_FAMILY_AFMOE,
        SPW_FAMILY_MINISTRAL3,  TINY_GEMMA4_SMALL,      TINY_FEW_KEYS,         SPW_FAMILY_DEEPSEEK_V4,
        SPW_FAMILY_QWEN3_5,     SPW_FAMILY_QWEN3_NEXT,  SPW_FAMILY_LFM2_MOE,   SPW_FAMILY_FALCON_H1,
        SPW_FAMILY_OLMO_HYBRID, SPW_FAMILY_KIMI_LINEAR, SPW_FAMILY_NEMOTRON_H, SPW_FAMILY_GRANITE_HYBRID};
    uint32_t shared = 0;
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f += SANITIZED ? 5 : 1) {
        const setting s = {"a family", families[f], .most = families[f] == TINY_GEMMA4_SMALL ? 5e-5 : 1e-5};
        const char *refusal = refusal_of(s.family);
        char what[32];
        spw_config c;
        world one = world_of(&s, &c, 1, 1), w;
        if (refusal != NULL) {
            outcome_free(one.out);
            c.sequence_ranks = 2;
            world_refused(&c, s.family, 0, 2, refusal);
            continue;
        }
        one.steps = 2;
        world_run(&one);
        w = world_of(&s, &c, 2, 2);
        w.steps = 2;
        world_run(&w);
        snprintf(what, sizeof what, "family %d", (int)s.family);
        outcome_within(one.out, w.out, s.most, what);
        shared++;
        outcome_free(w.out);
        outcome_free(one.out);
    }
    assert_true(shared >= (SANITIZED ? 6 : 33));
}

/* Long sequences are what it is for: what a rank keeps of a micro-batch is its part of it. */
static void
test_memory(void **state)
{
    const setting s = {"llama", SPW_FAMILY_LLAMA, .dropout = 0};
    spw_plan plans[3];
    (void)state;
    for (uint32_t k = 0; k < 3; k++) {
        spw_config c;
        world w = world_of(&s, &c, 1u << k, 1u << k);
        c.data.seq_length = 40; /* as long as the model has places */
        c.micro_batch = 16;
        w.steps = 1;
        world_run(&w);
        plans[k] = w.out->plan[0];
        outcome_free(w.out);
        print_message("%u share: checkpoints %llu, between them %llu, working memory %llu\n", 1u << k,
                      (unsigned long long)plans[k].activations_device, (unsigned long long)plans[k].tapes_device,
                      (unsigned long long)plans[k].arena_device);
        assert_true((double)plans[k].activations_device < 1.05 * (double)plans[0].activations_device / (1u << k));
        assert_true((double)plans[k].tapes_device < 1.4 * (double)plans[0].tapes_device / (1u << k));
        assert_true((double)plans[k].arena_device < 1.4 * (double)plans[0].arena_device / (1u << k));
    }
}

/* What ranks do differently from the first run. */
typedef struct variant {
    const char *name;
    uint32_t stage;
    spw_tier weights, records;
    /* Device memory: the least; that for the last rank; half of what it keeps between checkpoints. */
    bool least, last_least, last_fewer;
    bool last_reads; /* what experts read is to be kept by the last rank */
    uint64_t chaos;
    uint32_t per_host;
} variant;

static const variant variants[] = {
    {"all on the device", 3, SPW_TIER_DEVICE, SPW_TIER_DEVICE, .least = false},
    {"stage 0", 0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, .least = false},
    {"stage 1, records on nvme", 1, SPW_TIER_DEVICE, SPW_TIER_NVME, .least = false},
    {"stage 2", 2, SPW_TIER_DEVICE, SPW_TIER_HOST, .least = false},
    {"all on nvme, least device memory", 3, SPW_TIER_NVME, SPW_TIER_NVME, .least = true},
    {"least device memory on the last rank, late", 3, SPW_TIER_HOST, SPW_TIER_HOST, .last_least = true, .chaos = 7},
    {"the last rank computes more again", 3, SPW_TIER_DEVICE, SPW_TIER_DEVICE, .last_fewer = true, .chaos = 9},
    {"turns of experts, of whose input the last rank would keep more", 3, SPW_TIER_HOST, SPW_TIER_HOST,
     .last_reads = true},
    {"hosts, random delays", 3, SPW_TIER_HOST, SPW_TIER_NVME, .chaos = 3, .per_host = 1},
    {"hosts of two, random delays", 3, SPW_TIER_NVME, SPW_TIER_NVME, .chaos = 5, .per_host = 2},
};

static void
test_same(void **state)
{
    char dir[256];
    static const setting of[] = {{"gpt2", SPW_FAMILY_GPT2, .dropout = 0.1},
                                 {"llama", SPW_FAMILY_LLAMA, .documents = "separate"},
                                 {"qwen3-next", SPW_FAMILY_QWEN3_NEXT, .documents = "separate"},
                                 {"qwen3-moe", SPW_FAMILY_QWEN3_MOE, .tile = 9}};
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof of / sizeof of[0]; i += SANITIZED ? 3 : 1) {
        outcome *first = NULL;
        for (size_t k = 0; k < sizeof variants / sizeof variants[0]; k++) {
            const variant *v = &variants[k];
            char what[128];
            spw_config c, last;
            world w = world_of(&of[i], &c, 4, i == 0 ? 2 : 4);
            ranks_use_dir(&c, dir);
            c.zero.stage = v->stage;
            c.zero.offload_param = v->weights;
            c.zero.offload_optimizer = v->records;
            c.run.chaos_seed = v->chaos;
            w.per_host = v->per_host;
            w.least_device = v->least;
            w.last_least = v->last_least;
            if (v->last_reads &&
                of[i].family == SPW_FAMILY_QWEN3_MOE) { /* with experts in turns it would not compute attention again */
                last = c;
                snprintf(last.run.recompute, sizeof last.run.recompute, "least");
                c.run.expert_turns = last.run.expert_turns = 2;
                w.last = &last;
            }
            if (v->last_fewer) {
                const spw_plan *p = &first->plan[0];
                last = c;
                last.run.device_memory = (p->device_bytes - p->tapes_device / 2) / 4096 * 4096;
                w.last = &last;
            }
            world_run(&w);
            snprintf(what, sizeof what, "%s, %s", of[i].name, v->name);
            for (uint32_t r = 0; r < 4; r++) { /* or one waits for what another does not compute again */
                assert_int_equal(w.out->plan[r].tape_count, w.out->plan[0].tape_count);
                assert_true(v->per_host == 0 || w.out->far_trade[r] > 0 || (i == 0 && v->per_host == 2));
            }
            assert_true((w.out->plan[0].tape_count == 0) ==
                        (v->least || v->last_least || (v->last_reads && of[i].family == SPW_FAMILY_QWEN3_MOE)));
            assert_true(!v->last_fewer || w.out->plan[0].tape_count < first->plan[0].tape_count);
            if (first != NULL) {
                outcome_same(first, w.out, what);
                outcome_free(w.out);
            } else {
                first = w.out;
            }
        }
        outcome_free(first);
    }
    tiny_dir_remove(dir);
}

/* A checkpoint knows nothing of it. */
static void
test_resume(void **state)
{
    const setting s = {"gpt2", SPW_FAMILY_GPT2, .dropout = 0};
    spw_config c, c1;
    char dir[256];
    world whole = world_of(&s, &c, 4, 2), before = world_of(&s, &c1, 4, 2), after;
    (void)state;
    tiny_dir_make(dir);
    whole.steps = 4;
    world_run(&whole);
    before.steps = 2;
    before.save = dir;
    world_run(&before);
    for (uint32_t sharers = 1; sharers <= 4; sharers *= 2) {
        after = world_of(&s, &c1, 4, sharers);
        after.first_step = after.steps = 2;
        after.load = dir;
        world_run(&after);
        memcpy(after.out->losses, before.out->losses, 2 * sizeof after.out->losses[0]);
        if (sharers == 2)
            outcome_same(whole.out, after.out, "resumed");
        else
            outcome_within(whole.out, after.out, 2e-6, "resumed by others");
        outcome_free(after.out);
    }
    outcome_free(whole.out);
    outcome_free(before.out);
    tiny_dir_remove(dir);
}

static void
test_refused(void **state)
{
    spw_config c;
    (void)state;
    ranks_config(&c, SPW_STATE_FP32);
    c.zero.stage = 3;
    c.sequence_ranks = 2;
    c.data.seq_length = 23;
    world_refused(&c, SPW_FAMILY_GPT2, 0, 2, "sequence_parallel_size 2 does not divide data.seq_length 23");
    c.data.seq_length = 24;
    world_refused(&c, SPW_FAMILY_GPT2, 0, 3, "sequence_parallel_size 2 does not divide 3 ranks");
    c.sequence_ranks = 3;
    world_refused(&c, SPW_FAMILY_GPT2, 0, 3, "layer 0 has 4, 4 of keys");
    c.sequence_ranks = 2;
    snprintf(c.data.documents, sizeof c.data.documents, "whole");
    snprintf(c.run.preference.loss, sizeof c.run.preference.loss, "simpo");
    c.run.preference.beta = 1;
    world_refused(&c, SPW_FAMILY_GPT2, 0, 2, "spillway.preference");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_near),   cmocka_unit_test(test_families),
                                       cmocka_unit_test(test_memory), cmocka_unit_test(test_same),
                                       cmocka_unit_test(test_resume), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests_name("sequences", tests, NULL, NULL);
}
