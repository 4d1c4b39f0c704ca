/*
 * Several ranks in random stages and placements: losses, weights and moments are the bytes that the same ranks have with
 * everything on the device, also where a checkpoint is written meanwhile, or gone on from in another placement, and where the last
 * rank has a placement of its own. SPW_SEED and SPW_RUNS choose others and more of them.
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

static bool emulated;

enum { MODELS = 2, PLACEMENTS = 4, SECONDS_MAX = SANITIZED ? 240 : 120 };

static bool
has_experts(const world *w)
{
    return w->family == SPW_FAMILY_MIXTRAL || w->family == SPW_FAMILY_QWEN3_MOE || w->family == SPW_FAMILY_GLM4_MOE ||
           w->family == SPW_FAMILY_DEEPSEEK_V3 || w->family == SPW_FAMILY_ERNIE_MOE || w->family == SPW_FAMILY_LLAMA4 ||
           w->family == SPW_FAMILY_QWEN3_NEXT;
}

/* A part that is not trained, or adapters beside what is not. */
static void
draw_frozen(uint64_t run, spw_config *c, const world *w)
{
    static const char *const tensors[] = {"experts.*", "experts.*up_proj", "experts.down_proj"};
    bool gpt2 = w->family == SPW_FAMILY_GPT2, latent = w->family == SPW_FAMILY_DEEPSEEK_V3;
    spw_glob_list *of_experts = &c->run.lora_target_parameters;
    if (w->frozen)
        return;
    if (random_pick(run, 36, 5) < (has_experts(w) ? 2 : 1)) {
        c->run.lora = (spw_lora){4, 16, 0};
        of_experts->count = has_experts(w) && random_pick(run, 48, 3) > 0;
        if (of_experts->count > 0 && random_pick(run, 49, 2) == 0) /* matrices that end in another rank's part */
            c->run.lora.rank = 44;
        snprintf(of_experts->item[0], sizeof of_experts->item[0], "%s", tensors[random_pick(run, 50, 3)]);
        c->run.lora_targets.count = 1;
        snprintf(c->run.lora_targets.item[0], sizeof c->run.lora_targets.item[0], "%s",
                 gpt2     ? "c_attn"
                 : latent ? "*_b_proj"
                          : "[qv]_proj");
        c->optimizer.lr = 2e-2;
    } else if (random_pick(run, 37, 5) == 0) {
        c->run.freeze.count = 2;
        snprintf(c->run.freeze.item[0], sizeof c->run.freeze.item[0], "%s",
                 gpt2 ? "w?e.weight" : "model.embed_tokens.weight");
        snprintf(c->run.freeze.item[1], sizeof c->run.freeze.item[1], "%s", gpt2 ? "h.0.*" : "model.layers.0.*");
    }
}

/* Updates run where records are. */
static void
keep_together(spw_config *c, const world *w)
{
    if (w->plugin != NULL && c->zero.offload_optimizer == SPW_TIER_DEVICE)
        c->zero.offload_param = SPW_TIER_DEVICE;
}

/* Groups, or codes on the way. */
static bool
needs_stage_3(const spw_config *c)
{
    return c->zero.quantized_weights || c->zero.quantized_frozen || c->zero.quantized_gradients ||
           c->zero.mics_shard_size > 0;
}

/* How bytes travel. */
static void
draw_travel(uint64_t at, spw_config *c)
{
    static spw_test_aio_schedule faults;
    faults = (spw_test_aio_schedule){.seed = at, .delays = 300, .shorts = 100, .agains = 50, .delay_ns_max = 1000000};
    c->run.aio_faults = c->run.activation_faults = random_pick(at, 40, 4) == 0 ? &faults : NULL;
    c->zero.max_in_cpu = random_pick(at, 41, 3) == 0 ? random_pick(at, 42, 60000) : 0;
    c->zero.prefetch_bucket_size = random_pick(at, 43, 3) == 0 ? random_pick(at, 44, 60000) : UINT64_MAX;
    c->zero.max_live_parameters = random_pick(at, 45, 3) == 0 ? random_pick(at, 46, 100000) : UINT64_MAX;
}

/* What decides about bits. */
static void
draw_world(uint64_t run, spw_config *c, world *w)
{
    static const spw_family families[] = {SPW_FAMILY_GPT2,        SPW_FAMILY_LLAMA,      SPW_FAMILY_MIXTRAL,
                                          SPW_FAMILY_GEMMA3,      SPW_FAMILY_QWEN3_MOE,  SPW_FAMILY_GLM4_MOE,
                                          SPW_FAMILY_DEEPSEEK_V3, SPW_FAMILY_ERNIE_MOE,  SPW_FAMILY_COHERE2,
                                          SPW_FAMILY_LLAMA4,      SPW_FAMILY_QWEN3_NEXT, SPW_FAMILY_FALCON_H1};
    static const char *const optimizers[] = {"AdamW", "AdamW", "Lion", "SGD", "Adagrad"};
    static const uint32_t ranks[] = {2, 3, 4};
    spw_state_format format = (spw_state_format)random_pick(run, 0, SPW_STATE_COUNT);
    ranks_config(c, format);
    if (format == SPW_STATE_MIXED_F16) { /* the first steps overflow */
        c->bf16 = false;
        c->fp16 = true;
        c->loss_scale.initial_power = 8 + random_pick(run, 26, 16);
        c->loss_scale.window = c->loss_scale.hysteresis = 1;
        c->loss_scale.min = 1;
    }
    snprintf(c->optimizer.type, sizeof c->optimizer.type, "%s", optimizers[random_pick(run, 1, 5)]);
    c->optimizer.momentum = random_pick(run, 39, 2) == 0 ? 0.9 : 0;
    c->optimizer.lr = 1e-3;
    c->bf16_check_overflow = c->bf16 && random_pick(run, 40, 2) == 0;
    c->gradient_clipping = random_pick(run, 2, 3) == 0 ? 0 : 0.125 * (double)(1u << random_pick(run, 33, 6));
    *w = (world){.ranks = ranks[random_pick(run, 3, 3)],
                 .steps = STEPS,
                 .config = c,
                 .family = families[random_pick(run, 4, sizeof families / sizeof families[0])],
                 .mlp_width = 32 + 8 * random_pick(run, 5, 12)};
    w->settles = random_pick(run, 22, 2) == 0 ? STEPS - 1 : 0;
    w->frozen = w->family == SPW_FAMILY_GPT2 && random_pick(run, 6, 3) == 0;
    c->run.delayed_update = random_pick(run, 21, 4) == 0 ? 1 : 0;
    if (c->run.delayed_update == 0 && random_pick(run, 44, 4) == 0)
        tiny_muon(c);
    c->run.micro_batches_per_pass = c->run.delayed_update > 0     ? 0
                                    : random_pick(run, 7, 3) == 0 ? 1
                                    : random_pick(run, 7, 3) == 1 ? 3
                                                                  : 0;
    if (c->run.delayed_update == 0 && random_pick(run, 23, 3) == 0) {
        c->run.tile_vocab = 64 * (1 + random_pick(run, 24, 2));
        w->vocab = 130 + random_pick(run, 25, 100);
    }
    c->run.tile_tokens = random_pick(run, 27, 3) == 0 ? 1 + random_pick(run, 28, 40) : 0;
    if (random_pick(run, 29, 4) == 0)
        snprintf(c->data.documents, sizeof c->data.documents, "separate");
    else if (random_pick(run, 46, 5) == 0)
        tiny_prefer(c, (uint32_t)random_pick(run, 47, 2 * SPW_PREFERENCE_COUNT));
    if (format != SPW_STATE_FP32 && c->run.micro_batches_per_pass == 0 && c->run.tile_vocab == 0 &&
        random_pick(run, 30, 2) == 0)
        c->run.grad_dtype = c->fp16 ? SPW_F16 : SPW_BF16;
    c->run.fp8 = c->bf16 && random_pick(run, 31, 6) == 0;
    w->dropout = w->family == SPW_FAMILY_GPT2 && random_pick(run, 34, 4) == 0 ? 0.1 : 0;
    c->comm_dtype = c->bf16 && random_pick(run, 35, 6) == 0 ? SPW_BF16 : SPW_F32;
    draw_frozen(run, c, w);
    c->zero.quantized_weights = random_pick(run, 8, 6) == 0;
    c->zero.mics_shard_size = w->ranks == 4 && random_pick(run, 9, 2) == 0 ? 2 : 0; /* the order of sums */
    if (c->zero.mics_shard_size == 0 && w->ranks == 4 && c->comm_dtype == SPW_F32 && random_pick(run, 41, 4) == 0) {
        c->zero.quantized_gradients = true;
        w->per_host = 2;
    }
    c->zero.quantized_frozen =
        (w->frozen || c->run.freeze.count > 0 || c->run.lora.rank > 0) && random_pick(run, 42, 2) == 0;
    c->zero.stage = needs_stage_3(c) ? 3 : 1;
    if (w->ranks % 2 == 0 && strcmp(c->data.documents, "whole") != 0 && random_pick(run, 51, 3) == 0)
        c->sequence_ranks = random_pick(run, 52, 2) == 0 ? w->ranks : 2;
    w->idle = random_pick(run, 43, 3) == 0;
    c->zero.offload_optimizer = c->run.delayed_update > 0 ? SPW_TIER_HOST : SPW_TIER_DEVICE;
    w->plugin = emulated && random_pick(run, 38, 8) == 0 ? getenv("SPW_CUDA_PLUGIN") : NULL;
    keep_together(c, w);
}

/* What must not. */
static void
draw_placement(uint64_t at, spw_config *c, world *w)
{
    static const char *const gradients[] = {"auto", "host", "nvme"}, *const ahead[] = {"auto", "always", "never"};
    bool codes = c->zero.quantized_weights || c->zero.quantized_frozen, groups = c->zero.mics_shard_size > 0;
    c->zero.stage = needs_stage_3(c) ? 3 : (uint32_t)random_pick(at, 0, 4);
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
    snprintf(c->run.fill_device, sizeof c->run.fill_device, "%s", ahead[random_pick(at, 11, 3)]);
    c->zero.optimizer_ratio = random_pick(at, 12, 4) == 0 ? (double)random_pick(at, 13, 101) / 100 : 1;
    c->aio.backend = random_pick(at, 14, 2) == 0 ? SPW_AIO_THREADS : SPW_AIO_AUTO;
    c->zero.hpz_partition_size = c->zero.stage == 3 && w->ranks == 4 && !groups && random_pick(at, 15, 2) == 0 ? 2 : 0;
    if (c->zero.stage == 3 && !groups && c->zero.hpz_partition_size == 0 && !c->zero.quantized_gradients &&
        random_pick(at, 19, 3) == 0)
        c->zero.mics_shard_size = codes || random_pick(at, 20, 2) == 0 ? (int32_t)w->ranks : 1;
    if (c->zero.offload_optimizer == SPW_TIER_NVME && c->run.micro_batches_per_pass == 0)
        snprintf(c->run.gradients, sizeof c->run.gradients, "%s", gradients[random_pick(at, 16, 3)]);
    if (c->run.delayed_update > 0) { /* what the host updates, with gradients in its memory */
        c->zero.offload_optimizer = random_pick(at, 22, 2) == 0 ? SPW_TIER_HOST : SPW_TIER_NVME;
        c->zero.optimizer_ratio = 1;
        snprintf(c->run.fill_device, sizeof c->run.fill_device, "auto");
        snprintf(c->run.gradients, sizeof c->run.gradients, "auto");
    }
    snprintf(c->run.recompute, sizeof c->run.recompute, "%s",
             (const char *[]){"always", "auto", "least"}[random_pick(at, 17, 3)]);
    w->least_device = c->zero.stage == 3 && random_pick(at, 18, 3) == 0;
    /* In codes come sums of other hosts, so whose an element is decides about bits, and turns decide about that. */
    if (!c->zero.quantized_gradients && has_experts(w))
        c->run.expert_turns = (uint32_t)random_pick(at, 23, 4);
    w->per_host = c->zero.quantized_gradients ? 2 : (uint32_t)random_pick(at, 24, 3);
    if (w->per_host == 1 && c->zero.hpz_partition_size > 0)
        w->per_host = 2;
    c->zero.mics_by_host = c->zero.mics_shard_size > 0 && random_pick(at, 25, 2) == 0;
    c->run.integrity = random_pick(at, 26, 4) > 0;
    c->run.compute_threads = (uint32_t)random_pick(at, 27, 3);
    c->aio.block_size = 4096ull << random_pick(at, 28, 8);
    c->aio.queue_depth = 1 + (uint32_t)random_pick(at, 29, 16);
    draw_travel(at, c);
    keep_together(c, w);
    if (w->plugin != NULL && w->per_host > 0) /* a plan ahead knows of one host, and not who is linked */
        w->least_device = false;
    if (random_pick(at, 37, 2) == 0)
        setenv("SPW_EMULATE_DEVICES", "4", 1); /* each its own, and links between them */
    else
        unsetenv("SPW_EMULATE_DEVICES");
}

/* The last rank's own, where ranks may differ. */
static void
draw_last(uint64_t run, uint64_t at, const char *dir, const spw_config *c, spw_config *last, world *w)
{
    world unused;
    draw_world(run, last, &unused);
    ranks_use_dir(last, dir);
    draw_placement(at, last, &unused);
    if (random_pick(at, 47, 3) == 0)
        random_paths(at, last, dir);
    last->zero.stage = c->zero.stage;
    last->zero.hpz_partition_size = c->zero.hpz_partition_size;
    last->zero.mics_shard_size = c->zero.mics_shard_size;
    last->zero.mics_by_host = c->zero.mics_by_host;
    last->run.chunk_elems = c->run.chunk_elems;
    last->run.expert_turns = c->run.expert_turns;
    last->run.prefetch = c->run.prefetch;
    last->zero.prefetch_bucket_size = c->zero.prefetch_bucket_size;
    last->run.chaos_seed = c->run.chaos_seed; /* with one, pieces on the way between ranks are the least */
    if (last->zero.stage < 3)
        last->zero.offload_param = SPW_TIER_DEVICE;
    if (w->least_device && has_experts(w)) /* or its least is with all experts at once, and the others' is one by one */
        last->run.activations = c->run.activations;
    keep_together(last, &unused);
    w->last = last;
    w->last_least = last->zero.stage == 3 && !(w->plugin != NULL && w->per_host > 0) && random_pick(at, 35, 2) == 0;
}

static void
run_world(uint64_t run, uint64_t placement, const world *w)
{
    const spw_config *c = w->config;
    random_says(SECONDS_MAX,
                "run %llu, placement %llu (%s%u ranks, %u share, family %d, %s, %s; stage %u, groups of %d, weights "
                "%d, records %d, "
                "gradients %s, chunk %llu, slots %u and %u, chaos %llu, least %d)",
                (unsigned long long)run, (unsigned long long)placement, w->plugin != NULL ? "emulated, " : "", w->ranks,
                c->sequence_ranks, (int)w->family, spw_state_name(c->run.state_format), c->optimizer.type,
                c->zero.stage, c->zero.mics_shard_size, (int)c->zero.offload_param, (int)c->zero.offload_optimizer,
                c->run.gradients, (unsigned long long)c->run.chunk_elems, c->run.weight_slots, c->run.record_slots,
                (unsigned long long)c->run.chaos_seed, w->least_device);
    world_run(w);
}

/* In one placement, and beside it a checkpoint, or up to one in the first and from it on in another. */
static void
place(uint64_t run, uint64_t placement, const char *dir, outcome *out)
{
    static spw_config c, last;
    uint64_t at = (run + 1) * 1000 + placement;
    char saved[400];
    world w, next;
    snprintf(saved, sizeof saved, "%s/saved", dir);
    draw_world(run, &c, &w);
    ranks_use_dir(&c, dir);
    draw_placement(at, &c, &w);
    if (random_pick(at, 47, 3) == 0)
        random_paths(at, &c, dir);
    if (random_pick(at, 36, 2) == 0)
        draw_last(run, at + 250, dir, &c, &last, &w);
    w.out = out;
    memset(out, 0, sizeof *out);
    if (c.run.delayed_update == 0)
        w.settles = 1 + (uint32_t)random_pick(at, 30, STEPS - 1);
    if (w.settles == 0 || random_pick(at, 31, 3) == 0) {
        run_world(run, placement, &w);
        return;
    }
    w.save = saved;
    w.meanwhile = random_pick(at, 34, 2) == 0;
    next = w;
    if (!w.meanwhile)
        w.steps = w.settles;
    run_world(run, placement, &w);
    if (!w.meanwhile) {
        draw_world(run, &c, &next);
        ranks_use_dir(&c, dir);
        draw_placement(at + 500, &c, &next);
        next.first_step = w.steps;
        next.steps = STEPS - w.steps;
        next.settles = 0;
        next.last = NULL;
        next.last_least = false;
        next.load = saved;
        next.out = out;
        run_world(run, placement + 500, &next);
    }
    tiny_dir_remove(saved);
}

static void
test_random_worlds(void **state)
{
    uint64_t runs = random_runs(MODELS);
    outcome *want = outcome_new(), *got = outcome_new();
    char dir[256], nccl[1300];
    (void)state;
    emulated = !SANITIZED && tiny_emulated_device();
    if (emulated) {
        snprintf(nccl, sizeof nccl, "%s", getenv("SPW_CUDA_PLUGIN"));
        snprintf(strrchr(nccl, '/'), 20, "/libnccl.so.2");
        setenv("SPW_NCCL", nccl, 1);
    }
    tiny_dir_make(dir);
    for (uint64_t run = 0; run < runs; run++) {
        static spw_config c;
        world w;
        draw_world(run, &c, &w);
        w.out = want;
        memset(want, 0, sizeof *want);
        run_world(run, 0, &w);
        for (uint64_t placement = 1; placement <= PLACEMENTS; placement++) {
            place(run, placement, dir, got);
            outcome_same(want, got, random_said);
            if (want->skipped != got->skipped)
                fail_msg("%s: %u steps are skipped, expected %u", random_said, got->skipped, want->skipped);
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
