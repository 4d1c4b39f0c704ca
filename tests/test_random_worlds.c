/*
 * Several ranks in random stages and placements: losses, weights and moments are the bytes that the same ranks have with
 * everything on the device. SPW_SEED and SPW_RUNS choose others and more of them.
 */
#include "lib_random.h"
#include "lib_tiny.h"
#include "lib_worlds.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { MODELS = SANITIZED ? 3 : 6, PLACEMENTS = 4, SECONDS_MAX = SANITIZED ? 240 : 120 };

/* What decides about bits. */
static void
draw_world(uint64_t run, spw_config *c, world *w)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2,       SPW_FAMILY_LLAMA,     SPW_FAMILY_MIXTRAL,
                                          SPW_FAMILY_GEMMA3,     SPW_FAMILY_QWEN3_MOE, SPW_FAMILY_GLM4_MOE,
                                          SPW_FAMILY_DEEPSEEK_V3};
    static const char *const optimizers[] = {"AdamW", "AdamW", "Lion", "SGD"};
    static const uint32_t ranks[] = {2, 3, 4};
    spw_state_format format = (spw_state_format)random_pick(run, 0, SPW_STATE_COUNT);
    ranks_config(c, format == SPW_STATE_MIXED_F16 ? SPW_STATE_SPLIT : format);
    snprintf(c->optimizer.type, sizeof c->optimizer.type, "%s", optimizers[random_pick(run, 1, 4)]);
    c->optimizer.momentum = 0.9;
    c->optimizer.lr = 1e-3;
    c->gradient_clipping = random_pick(run, 2, 3) == 0 ? 0 : 0.125 * (double)(1u << random_pick(run, 33, 6));
    *w = (world){.ranks = ranks[random_pick(run, 3, 3)],
                 .steps = STEPS,
                 .config = c,
                 .family = families[random_pick(run, 4, sizeof families / sizeof families[0])],
                 .mlp_width = 32 + 8 * random_pick(run, 5, 12)};
    w->settles = random_pick(run, 22, 2) == 0 ? STEPS - 1 : 0;
    w->frozen = w->family == SPW_FAMILY_GPT2 && random_pick(run, 6, 3) == 0;
    c->run.delayed_update = random_pick(run, 21, 4) == 0 ? 1 : 0;
    c->run.micro_batches_per_pass = c->run.delayed_update > 0     ? 0
                                    : random_pick(run, 7, 3) == 0 ? 1
                                    : random_pick(run, 7, 3) == 1 ? 3
                                                                  : 0;
    if (c->run.delayed_update == 0 && random_pick(run, 23, 3) == 0) {
        c->run.tile_vocab = 64 * (1 + random_pick(run, 24, 2));
        w->vocab = 130 + random_pick(run, 25, 100);
    }
    c->zero.quantized_weights = random_pick(run, 8, 6) == 0;
    c->zero.mics_shard_size = w->ranks == 4 && random_pick(run, 9, 2) == 0 ? 2 : 0; /* the order of sums */
    c->zero.stage = c->zero.quantized_weights || c->zero.mics_shard_size > 0 ? 3 : 1;
    c->zero.offload_optimizer = c->run.delayed_update > 0 ? SPW_TIER_HOST : SPW_TIER_DEVICE;
}

/* What must not. */
static void
draw_placement(uint64_t at, spw_config *c, world *w)
{
    static const char *const gradients[] = {"auto", "host", "nvme"}, *const ahead[] = {"auto", "always", "never"};
    bool weights = c->zero.quantized_weights, groups = c->zero.mics_shard_size > 0;
    c->zero.stage = weights || groups ? 3 : (uint32_t)random_pick(at, 0, 4);
    c->zero.offload_param = c->zero.stage == 3 ? (spw_tier)random_pick(at, 1, SPW_TIER_COUNT) : SPW_TIER_DEVICE;
    c->zero.offload_optimizer = (spw_tier)random_pick(at, 2, SPW_TIER_COUNT);
    c->run.chunk_elems = 4096ull << random_pick(at, 3, 3);
    c->run.weight_slots = (uint32_t)random_pick(at, 4, 4);
    c->run.record_slots = (uint32_t)random_pick(at, 5, 7);
    c->run.optimizer_threads = 1 + (uint32_t)random_pick(at, 6, 3);
    c->run.prefetch = random_pick(at, 7, 6) > 0;
    c->run.chaos_seed = random_pick(at, 8, 2) == 0 ? 1 + random_pick(at, 9, 1000000) : 0;
    c->run.activations = (spw_tier)random_pick(at, 10, SPW_TIER_COUNT + 1);
    snprintf(c->run.update_ahead, sizeof c->run.update_ahead, "%s", ahead[random_pick(at, 32, 3)]);
    c->run.fill_device = random_pick(at, 11, 2) == 0;
    c->zero.optimizer_ratio = random_pick(at, 12, 4) == 0 ? (double)random_pick(at, 13, 101) / 100 : 1;
    c->aio.backend = random_pick(at, 14, 2) == 0 ? SPW_AIO_THREADS : SPW_AIO_AUTO;
    c->zero.hpz_partition_size = c->zero.stage == 3 && w->ranks == 4 && !groups && random_pick(at, 15, 2) == 0 ? 2 : 0;
    if (c->zero.stage == 3 && !groups && c->zero.hpz_partition_size == 0 && random_pick(at, 19, 3) == 0)
        c->zero.mics_shard_size = weights || random_pick(at, 20, 2) == 0 ? (int32_t)w->ranks : 1;
    if (c->zero.offload_optimizer == SPW_TIER_NVME && c->run.micro_batches_per_pass == 0)
        snprintf(c->run.gradients, sizeof c->run.gradients, "%s", gradients[random_pick(at, 16, 3)]);
    if (c->run.delayed_update > 0) { /* what the host updates, with gradients in its memory */
        c->zero.offload_optimizer = random_pick(at, 22, 2) == 0 ? SPW_TIER_HOST : SPW_TIER_NVME;
        c->zero.optimizer_ratio = 1;
        c->run.fill_device = false;
        snprintf(c->run.gradients, sizeof c->run.gradients, "auto");
    }
    snprintf(c->run.recompute, sizeof c->run.recompute, "%s", random_pick(at, 17, 2) == 0 ? "always" : "auto");
    w->least_device = c->zero.stage == 3 && random_pick(at, 18, 3) == 0;
}

static void
run_world(uint64_t run, uint64_t placement, const world *w)
{
    const spw_config *c = w->config;
    random_says(
        SECONDS_MAX,
        "run %llu, placement %llu (%u ranks, family %d, %s, %s; stage %u, groups of %d, weights %d, records %d, "
        "gradients "
        "%s, chunk %llu, "
        "slots %u and %u, chaos %llu, least %d)",
        (unsigned long long)run, (unsigned long long)placement, w->ranks, (int)w->family,
        spw_state_name(c->run.state_format), c->optimizer.type, c->zero.stage, c->zero.mics_shard_size,
        (int)c->zero.offload_param, (int)c->zero.offload_optimizer, c->run.gradients,
        (unsigned long long)c->run.chunk_elems, c->run.weight_slots, c->run.record_slots,
        (unsigned long long)c->run.chaos_seed, w->least_device);
    memset(w->out, 0, sizeof *w->out);
    world_run(w);
}

static void
test_random_worlds(void **state)
{
    uint64_t runs = random_runs(MODELS);
    outcome *want = outcome_new(), *got = outcome_new();
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (uint64_t run = 0; run < runs; run++) {
        static spw_config c;
        world w;
        draw_world(run, &c, &w);
        w.out = want;
        run_world(run, 0, &w);
        for (uint64_t placement = 1; placement <= PLACEMENTS; placement++) {
            draw_world(run, &c, &w);
            ranks_use_dir(&c, dir);
            draw_placement((run + 1) * 1000 + placement, &c, &w);
            w.out = got;
            run_world(run, placement, &w);
            outcome_same(want, got, random_said);
        }
    }
    random_done();
    tiny_dir_remove(dir);
    outcome_free(want);
    outcome_free(got);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_worlds)};
    return cmocka_run_group_tests_name("random worlds", tests, NULL, NULL);
}
