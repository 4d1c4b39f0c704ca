/*
 * Several ranks in random stages and placements: losses, weights and moments are the bytes that the same ranks have with
 * everything on the device. SPW_SEED and SPW_RUNS choose others and more of them.
 */
#include "lib_worlds.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

enum { MODELS = SANITIZED ? 3 : 6, PLACEMENTS = 4, SECONDS_MAX = SANITIZED ? 240 : 120 };

static uint64_t seed;
static char says[400]; /* which run it is, for the alarm */

/* Draw number `what` of a run, below n. */
static uint64_t
pick(uint64_t run, uint32_t what, uint64_t n)
{
    uint32_t r[4];
    spw_philox(seed, run, what, r);
    return (((uint64_t)r[0] << 32) | r[1]) % n;
}

static void
stands_still(int signal_number)
{
    ssize_t written = write(STDERR_FILENO, says, strlen(says));
    (void)signal_number;
    (void)written;
    abort();
}

/* What decides about bits. */
static void
draw_world(uint64_t run, spw_config *c, world *w)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA, SPW_FAMILY_MIXTRAL, SPW_FAMILY_GEMMA3,
                                          SPW_FAMILY_QWEN3_MOE};
    static const char *const optimizers[] = {"AdamW", "AdamW", "Lion", "SGD"};
    static const uint32_t ranks[] = {2, 3, 4};
    spw_state_format format = (spw_state_format)pick(run, 0, SPW_STATE_COUNT);
    ranks_config(c, format == SPW_STATE_MIXED_F16 ? SPW_STATE_SPLIT : format);
    snprintf(c->optimizer.type, sizeof c->optimizer.type, "%s", optimizers[pick(run, 1, 4)]);
    c->optimizer.momentum = 0.9;
    c->optimizer.lr = 1e-3;
    c->gradient_clipping = pick(run, 2, 3) > 0 ? 1.0 : 0;
    *w = (world){.ranks = ranks[pick(run, 3, 3)],
                 .steps = STEPS,
                 .config = c,
                 .family = families[pick(run, 4, 5)],
                 .mlp_width = 32 + 8 * pick(run, 5, 12)};
    w->frozen = w->family == SPW_FAMILY_GPT2 && pick(run, 6, 3) == 0;
    c->run.micro_batches_per_pass = pick(run, 7, 3) == 0 ? 1 : pick(run, 7, 3) == 1 ? 3 : 0;
    c->zero.quantized_weights = pick(run, 8, 6) == 0;
}

/* What must not. */
static void
draw_placement(uint64_t at, spw_config *c, world *w)
{
    static const char *const gradients[] = {"auto", "host", "nvme"};
    bool weights = c->zero.quantized_weights;
    c->zero.stage = weights ? 3 : (uint32_t)pick(at, 0, 4);
    c->zero.offload_param = c->zero.stage == 3 ? (spw_tier)pick(at, 1, SPW_TIER_COUNT) : SPW_TIER_DEVICE;
    c->zero.offload_optimizer = (spw_tier)pick(at, 2, SPW_TIER_COUNT);
    c->run.chunk_elems = 4096ull << pick(at, 3, 3);
    c->run.weight_slots = (uint32_t)pick(at, 4, 4);
    c->run.record_slots = (uint32_t)pick(at, 5, 7);
    c->run.optimizer_threads = 1 + (uint32_t)pick(at, 6, 3);
    c->run.prefetch = pick(at, 7, 6) > 0;
    c->run.chaos_seed = pick(at, 8, 2) == 0 ? 1 + pick(at, 9, 1000000) : 0;
    c->run.activations = (spw_tier)pick(at, 10, SPW_TIER_COUNT + 1);
    c->run.fill_device = pick(at, 11, 2) == 0;
    c->zero.optimizer_ratio = pick(at, 12, 4) == 0 ? (double)pick(at, 13, 101) / 100 : 1;
    c->aio.backend = pick(at, 14, 2) == 0 ? SPW_AIO_THREADS : SPW_AIO_AUTO;
    c->zero.hpz_partition_size = c->zero.stage == 3 && w->ranks == 4 && pick(at, 15, 2) == 0 ? 2 : 0;
    if (c->zero.offload_optimizer == SPW_TIER_NVME && c->run.micro_batches_per_pass == 0)
        snprintf(c->run.gradients, sizeof c->run.gradients, "%s", gradients[pick(at, 16, 3)]);
    snprintf(c->run.recompute, sizeof c->run.recompute, "%s", pick(at, 17, 2) == 0 ? "always" : "auto");
    w->least_device = c->zero.stage == 3 && pick(at, 18, 3) == 0;
}

static void
run_world(uint64_t run, uint64_t placement, const world *w)
{
    const spw_config *c = w->config;
    snprintf(says, sizeof says,
             "SPW_SEED=%llu, run %llu, placement %llu (%u ranks, family %d, %s, %s; stage %u, weights %d, records %d, "
             "gradients %s, "
             "chunk %llu, slots %u and %u, chaos %llu, least %d)",
             (unsigned long long)seed, (unsigned long long)run, (unsigned long long)placement, w->ranks, (int)w->family,
             spw_state_name(c->run.state_format), c->optimizer.type, c->zero.stage, (int)c->zero.offload_param,
             (int)c->zero.offload_optimizer, c->run.gradients, (unsigned long long)c->run.chunk_elems,
             c->run.weight_slots, c->run.record_slots, (unsigned long long)c->run.chaos_seed, w->least_device);
    alarm(SECONDS_MAX);
    memset(w->out, 0, sizeof *w->out);
    world_run(w);
}

static void
test_random_worlds(void **state)
{
    uint64_t runs = getenv("SPW_RUNS") != NULL ? strtoull(getenv("SPW_RUNS"), NULL, 10) : MODELS;
    outcome *want = outcome_new(), *got = outcome_new();
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    signal(SIGALRM, stands_still);
    for (uint64_t run = 0; run < runs; run++) {
        static spw_config c;
        world w;
        draw_world(run, &c, &w);
        c.zero.stage = c.zero.quantized_weights ? 3 : 1;
        w.out = want;
        run_world(run, 0, &w);
        for (uint64_t placement = 1; placement <= PLACEMENTS; placement++) {
            draw_world(run, &c, &w);
            ranks_use_dir(&c, dir);
            draw_placement((run + 1) * 1000 + placement, &c, &w);
            w.out = got;
            run_world(run, placement, &w);
            outcome_same(want, got, says);
        }
    }
    alarm(0);
    tiny_dir_remove(dir);
    outcome_free(want);
    outcome_free(got);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_worlds)};
    seed = getenv("SPW_SEED") != NULL ? strtoull(getenv("SPW_SEED"), NULL, 10) : 1;
    return cmocka_run_group_tests_name("random worlds", tests, NULL, NULL);
}
