/*
 * Training on several ranks. What must hold: the run of one rank up to rounding, for every number of ranks; the same bytes for
 * every stage and placement at one number of ranks; the bytes that ZeRO's table says.
 */
#include "lib_tiny.h"
#include "lib_worlds.h"
#include "engine_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>

static void
assert_share(double got, double want, uint32_t stage, uint32_t ranks, const char *what)
{
    if (fabs(got - want) > 0.01 * want)
        fail_msg("stage %u, %u ranks: %s %.0f bytes, the table says %.0f", stage, ranks, what, got, want);
}

/* ---------------------------------------------------------------- stages and placements */

typedef struct variant {
    const char *name;
    uint32_t stage;
    spw_tier param, optimizer;
    bool no_prefetch, tight;
    uint64_t chaos;
} variant;

static const variant variants[] = {
    {"stage 0", 0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, false, 0},
    {"stage 1", 1, SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, false, 0},
    {"stage 1, records on nvme", 1, SPW_TIER_DEVICE, SPW_TIER_NVME, false, false, 0},
    {"stage 2, records on host", 2, SPW_TIER_DEVICE, SPW_TIER_HOST, false, false, 0},
    {"stage 2, records on nvme, chaos", 2, SPW_TIER_DEVICE, SPW_TIER_NVME, false, false, 5},
    {"stage 3", 3, SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, false, 0},
    {"stage 3, host", 3, SPW_TIER_HOST, SPW_TIER_HOST, false, false, 0},
    {"stage 3, host, tight", 3, SPW_TIER_HOST, SPW_TIER_HOST, false, true, 0},
    {"stage 3, nvme", 3, SPW_TIER_NVME, SPW_TIER_NVME, false, false, 0},
    {"stage 3, nvme, tight, no prefetch", 3, SPW_TIER_NVME, SPW_TIER_NVME, true, true, 0},
    {"stage 3, nvme, tight, chaos", 3, SPW_TIER_NVME, SPW_TIER_NVME, false, true, 6},
};

/* Elements on the device that the largest block needs and little more. */
static uint64_t
tight_elems(spw_family family)
{
    spw_model_config mc;
    spw_model *m = NULL;
    spw_layout l;
    uint64_t most = 0;
    tiny_model_config(&mc, family);
    assert_int_equal(spw_model_build(&m, &mc, NULL), SPW_OK);
    assert_int_equal(spw_layout_make(&l, m, 4096, true, 0, NULL, false, 0, 0, WORLD_MAX, NULL), SPW_OK);
    for (uint32_t u = 0; u < l.unit_count; u++)
        most = spw_layout_whole(&l, u) > most ? spw_layout_whole(&l, u) : most;
    spw_layout_free(&l);
    spw_model_destroy(m);
    return 3 * most;
}

typedef struct comparison {
    spw_family family;       /* GPT-2 unless said */
    spw_state_format format; /* fp32 unless said */
    double clipping;
    bool frozen;
    const char *codes; /* what is frozen is stored as such; NULL: as it is */
    uint64_t pass;     /* micro-batches; 0: all of them */
    uint32_t worlds[4];
    bool harshest; /* of the variants the two with chaos alone, beside the first */
} comparison;

/* One rank and each world of several in every variant: losses near those of the one, and the same bits whatever the variant. */
static void
compare(const comparison *x)
{
    outcome *one = outcome_new(), *first = outcome_new(), *other = outcome_new();
    spw_config c;
    bool four = x->family == SPW_FAMILY_GEMMA4 || x->family == TINY_GEMMA4_SMALL; /* norms of small sums */
    char dir[256], what[120];
    tiny_dir_make(dir);
    ranks_config(&c, x->format);
    c.gradient_clipping = x->clipping;
    snprintf(c.run.frozen_codes, sizeof c.run.frozen_codes, "%s", x->codes != NULL ? x->codes : "");
    world_run(&(world){.ranks = 1, .steps = STEPS, .config = &c, .family = x->family, .frozen = x->frozen, .out = one});
    assert_true(one->losses[STEPS - 1] < one->losses[0]);
    for (uint32_t k = 0; k < 4 && x->worlds[k] > 0; k++) {
        for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
            const variant *v = &variants[i];
            outcome *out = i == 0 ? first : other;
            bool least = v->tight && v->chaos != 0; /* one gradient at a time, one block in the cache */
            if (x->harshest && i > 0 && v->chaos == 0)
                continue;
            ranks_config(&c, x->format);
            ranks_use_dir(&c, dir);
            snprintf(c.run.frozen_codes, sizeof c.run.frozen_codes, "%s", x->codes != NULL ? x->codes : "");
            c.gradient_clipping = x->clipping;
            c.run.micro_batches_per_pass = x->pass;
            c.zero.stage = v->stage;
            c.zero.offload_param = v->param;
            c.zero.offload_optimizer = v->optimizer;
            c.run.prefetch = !v->no_prefetch;
            c.run.chaos_seed = v->chaos;
            if (v->optimizer == SPW_TIER_NVME && x->pass == 0 && i % 3 != 2)
                snprintf(c.run.gradients, sizeof c.run.gradients, "nvme");
            if (v->tight && !least)
                c.zero.max_live_parameters = tight_elems(x->family);
            snprintf(what, sizeof what, "%u ranks, %s, %s", x->worlds[k], v->name, spw_state_name(x->format));
            memset(out, 0, sizeof *out);
            world_run(&(world){.ranks = x->worlds[k],
                               .steps = STEPS,
                               .config = &c,
                               .family = x->family,
                               .frozen = x->frozen,
                               .least_device = least,
                               .out = out});
            if (i == 0)
                outcome_within(one, out, four ? 1e-5 : 1e-6, what);
            else
                outcome_same(first, out, what);
            for (uint32_t r = 0; r < x->worlds[k] && least; r++)
                assert_true(out->plan[r].single_grad);
            for (uint32_t r = 0; r < x->worlds[k] && out->plan[r].path_count > 0; r++)
                assert_int_equal(out->plan[r].path_ranks[0], x->worlds[k]);
        }
    }
    tiny_dir_remove(dir);
    outcome_free(one);
    outcome_free(first);
    outcome_free(other);
}

/* Three ranks, and eight, which are more than a unit has chunks; tied weights. */
static void
test_worlds(void **state)
{
    (void)state;
    compare(&(comparison){.clipping = 1.0, .worlds = {3, SANITIZED ? 0 : 8}});
}

/* Updates that run during the backward pass; other families, which have all kinds of blocks. */
static void
test_no_clipping(void **state)
{
    static const spw_family others[] = {SPW_FAMILY_QWEN3_NEXT, TINY_GEMMA4_SMALL, SPW_FAMILY_MIXTRAL,
                                        SPW_FAMILY_NEOX,       SPW_FAMILY_OPT,    SPW_FAMILY_QWEN3_5,
                                        SPW_FAMILY_GEMMA4,     TINY_FEW_KEYS,     SPW_FAMILY_DEEPSEEK_V4};
    (void)state;
    compare(&(comparison){.family = SPW_FAMILY_LLAMA, .worlds = {3}, .harshest = SANITIZED});
    for (size_t i = 0; i < (SANITIZED ? 2 : sizeof others / sizeof others[0]); i++)
        compare(&(comparison){.family = others[i], .worlds = {3}, .harshest = true});
}

/* Several passes over the weights in a step: gradients are reduced and added up pass by pass. */
static void
test_passes(void **state)
{
    (void)state;
    compare(&(comparison){.clipping = 1.0, .pass = 5, .worlds = {2}});
}

/* A block that is not trained is gathered and not reduced; parts of codes decode to what the whole would. */
static void
test_frozen(void **state)
{
    (void)state;
    compare(&(comparison){.clipping = 1.0, .frozen = true, .worlds = {4}, .harshest = SANITIZED});
    compare(&(comparison){
        .format = SPW_STATE_SPLIT, .clipping = 1.0, .frozen = true, .codes = "int4", .worlds = {4}, .harshest = true});
}

/* Beside attention and experts, of a rank with which their matrices end in another rank's part. */
static void
use_adapters(spw_config *c)
{
    c->run.lora = (spw_lora){44, 16, 0};
    c->run.lora_targets.count = c->run.lora_target_parameters.count = 1;
    snprintf(c->run.lora_targets.item[0], sizeof c->run.lora_targets.item[0], "[qv]_proj");
    snprintf(c->run.lora_target_parameters.item[0], sizeof c->run.lora_target_parameters.item[0], "experts.*");
}

/*
 * Two ranks with a micro-batch each add two gradients, as one rank does that takes one after the other: there is one sum of two numbers, so
 * losses, norm, weights and moments are the same bits, wherever the ranks have their parts and frozen experts.
 */
static void
test_adapters(void **state)
{
    static const spw_family families[] = {SPW_FAMILY_QWEN3_MOE, SPW_FAMILY_GPT_OSS, SPW_FAMILY_LLAMA4};
    outcome *one = outcome_new(), *two = outcome_new();
    char dir[256], what[120];
    (void)state;
    tiny_dir_make(dir);
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        for (size_t i = 0; i <= sizeof variants / sizeof variants[0]; i++) {
            const variant *v = i > 0 ? &variants[i - 1] : NULL;
            spw_config c;
            if (f > 0 && i > 1 && v->chaos == 0)
                continue;
            ranks_config(&c, f == 0 ? SPW_STATE_SPLIT : SPW_STATE_FP32);
            ranks_use_dir(&c, dir);
            use_adapters(&c);
            c.gradient_clipping = f == 1 ? 0 : 0.5;
            c.run.micro_batches_per_pass = 1;
            snprintf(c.run.frozen_codes, sizeof c.run.frozen_codes, "%s", f == 0 ? "int4" : "");
            if (v != NULL) {
                c.zero.stage = v->stage;
                c.zero.offload_param = v->param;
                c.zero.offload_optimizer = v->optimizer;
                c.run.prefetch = !v->no_prefetch;
                c.run.chaos_seed = v->chaos;
            }
            memset(v != NULL ? two : one, 0, sizeof *one);
            world_run(&(world){.ranks = v != NULL ? 2 : 1,
                               .micros = 2,
                               .steps = STEPS,
                               .config = &c,
                               .family = families[f],
                               .out = v != NULL ? two : one});
            snprintf(what, sizeof what, "family %d, two ranks, %s", (int)families[f], v != NULL ? v->name : "");
            if (v != NULL)
                outcome_same(one, two, what);
        }
        assert_true(one->losses[STEPS - 1] < one->losses[0] && one->norm > 0);
    }
    tiny_dir_remove(dir);
    outcome_free(one);
    outcome_free(two);
}

/* However many ranks share a step, each micro-batch has the masks that one rank would draw for it, in one pass or several. */
static void
test_dropout(void **state)
{
    outcome *one = outcome_new(), *none = outcome_new(), *other = outcome_new();
    spw_config c;
    (void)state;
    ranks_config(&c, SPW_STATE_FP32);
    world_run(&(world){.ranks = 1, .steps = STEPS, .config = &c, .family = SPW_FAMILY_GPT2, .out = none});
    world_run(
        &(world){.ranks = 1, .steps = STEPS, .config = &c, .family = SPW_FAMILY_GPT2, .dropout = 0.2, .out = one});
    assert_true(fabs(one->losses[0] - none->losses[0]) > 1e-4); /* there are masks */
    for (uint32_t ranks = 2; ranks <= 4; ranks++) {
        char what[40];
        c.run.micro_batches_per_pass = ranks == 3 ? 3 : 0;
        memset(other, 0, sizeof *other);
        world_run(&(world){
            .ranks = ranks, .steps = STEPS, .config = &c, .family = SPW_FAMILY_GPT2, .dropout = 0.2, .out = other});
        snprintf(what, sizeof what, "%u ranks with dropout", ranks);
        outcome_near(one, other, what);
    }
    outcome_free(one);
    outcome_free(none);
    outcome_free(other);
}

static char first_dir[256]; /* of a checkpoint that the ranks of the next world look for */

/* Rank 1 finds nothing to load: both learn it, and may go on with something else. */
static spw_status
load_on_one(spw_engine *e, spw_error *err)
{
    char found[SPW_PATH_BYTES], path[SPW_PATH_BYTES + 32];
    spw_error why = {0};
    SPW_TRY(spw_checkpoint_find(first_dir, found, err));
    snprintf(path, sizeof path, "%s/model.safetensors", spw__engine_rank(e) == 1 ? "/nowhere" : found);
    if (spw_engine_load_weights(e, path, &why) == SPW_OK || strstr(why.message, "rank 1: ") == NULL ||
        strstr(why.message, "/nowhere") == NULL)
        return SPW_RAISE(err, SPW_ESYS, "rank %u heard: %s", spw__engine_rank(e), why.message);
    return spw_engine_init_params(e, spw__engine_config(e)->run.seed, err);
}

/* Disks take ranks differently long to fill: one that has its weights waits for the others, however short a collective's time is. */
static void
test_late_start(void **state)
{
    outcome *early = outcome_new(), *late = outcome_new();
    world w = {.ranks = 2, .steps = 2, .family = SPW_FAMILY_GPT2};
    spw_config c;
    (void)state;
    tiny_dir_make(first_dir);
    ranks_config(&c, SPW_STATE_FP32);
    w.config = &c;
    w.out = early;
    w.save = first_dir;
    world_run(&w);
    c.run.comm_timeout =
        SANITIZED ? 5 : 3; /* a busy machine keeps ranks waiting, too: more than 3 s under sanitizers once */
    w.late_s = SANITIZED ? 7 : 4;
    w.out = late;
    w.save = NULL;
    world_run(&w);
    outcome_same(early, late, "drawn late");
    w.load = first_dir;
    w.first_step = 2;
    world_run(&w);
    w.load = NULL;
    w.first_step = 0;
    w.late_s = 0;
    w.prepare = load_on_one;
    memset(late, 0, sizeof *late);
    world_run(&w);
    outcome_same(early, late, "after a load that failed on one rank");
    tiny_dir_remove(first_dir);
    outcome_free(early);
    outcome_free(late);
}

/* Rank 1's disk takes its time to give room, or has none. */
static struct {
    spw_comm *comm; /* NULL: disks are as they are */
    bool full;
} odd_disk;

int
fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    char link[64], path[512] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (odd_disk.comm == NULL || readlink(link, path, sizeof path - 1) < 0 || path[0] != '/' ||
        strncmp(path, "/memfd:", 7) == 0)
        return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    if (spw_comm_get_info(odd_disk.comm)->rank == 0) {
        spw_comm_set_timeout(odd_disk.comm, 2.5);
    } else if (odd_disk.full) {
        errno = ENOSPC;
        return -1;
    } else {
        usleep(4000000);
    }
    odd_disk.comm = NULL; /* the first of them is enough */
    return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

static spw_status
begin_on_odd_disk(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    const char(*dirs)[256] = ctx;
    spw_config c;
    spw_model_config mc;
    spw_model *model;
    spw_engine *e;
    spw_error why = {0};
    spw_status st;
    ranks_config(&c, SPW_STATE_FP32);
    ranks_use_dir(&c, dirs[rank]);
    c.run.ranks = 2;
    c.zero.stage = 3;
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_NVME;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    SPW_TRY(spw_model_build(&model, &mc, err));
    odd_disk.comm = comm;
    st = spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model, .comm = comm}, &why);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    if (odd_disk.full ? st != SPW_ENOSPC || strstr(why.message, "rank 1: ") == NULL ||
                            strstr(why.message, "swap space in") == NULL
                      : st != SPW_OK)
        return SPW_RAISE(err, SPW_ESYS, "rank %u: %s %s", rank, spw_status_name(st), why.message);
    return SPW_OK;
}

/* What a rank takes at the start is its own, and so is how long that takes; one that does not get it says so to all. */
static void
test_own_disks(void **state)
{
    char dirs[2][256];
    (void)state;
    for (int r = 0; r < 2; r++)
        tiny_dir_make(dirs[r]);
    for (int full = 0; full < 2; full++) {
        odd_disk.full = full;
        ranks_run(2, &(spw_comm_options){0}, begin_on_odd_disk, dirs);
    }
    for (int r = 0; r < 2; r++)
        tiny_dir_remove(dirs[r]);
}

/* What rank 1 asks for cannot be; rank 0's half of it is fine. */
static spw_status
logits_on_one(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    static float logits[4096];
    int32_t tokens[2] = {1, rank == 1 ? 1 << 20 : 2};
    spw_config c;
    spw_model_config mc;
    spw_model *model;
    spw_engine *e;
    spw_status st;
    (void)ctx;
    ranks_config(&c, SPW_STATE_FP32);
    c.run.ranks = 2;
    c.zero.stage = 3;
    c.run.comm_timeout = 3;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    assert_true(mc.vocab <= 4096);
    SPW_TRY(spw_model_build(&model, &mc, err));
    SPW_TRY(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model, .comm = comm}, err));
    SPW_TRY(spw_engine_init_params(e, 1, err));
    st = spw_engine_logits(e, tokens, 2, logits, err);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return st;
}

static spw_status
hear_on_one(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    void *all;
    spw_status st;
    (void)ctx;
    spw_comm_set_timeout(comm, 3);
    if (rank == 1)
        spw_test_fail_alloc(1);
    st = spw__ranks_hear(comm, "test", &rank, &all, sizeof rank, err);
    spw_mem_free(all);
    return st;
}

/* Rank 1 fails and lives on, for longer than rank 0 would wait. */
static spw_status
fail_on_one(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    const ranks_fn *fn = ctx;
    spw_error why = {0};
    spw_status st = (*fn)(NULL, comm, rank, &why);
    for (int i = 0; i < 500 && rank == 1 && spw_comm_check(comm, NULL) == SPW_OK; i++)
        spw_sleep_ns(10000000);
    if (rank == 1 ? st != SPW_EINVAL && st != SPW_ENOMEM : strstr(why.message, "rank 1 gave up: ") == NULL)
        return SPW_RAISE(err, SPW_ESYS, "rank %u: %s %s", rank, spw_status_name(st), why.message);
    return SPW_OK;
}

/* A call that all ranks make together fails on one of them: the others are told, and do not wait for it. */
static void
test_told(void **state)
{
    (void)state;
    ranks_run(2, &(spw_comm_options){0}, fail_on_one, &(ranks_fn){logits_on_one});
    ranks_run(2, &(spw_comm_options){0}, fail_on_one, &(ranks_fn){hear_on_one});
}

/* Long after the last transfer ranks end their links, which waits for all. */
static spw_status
end_late(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    spw_config c;
    spw_model_config mc;
    spw_model *model;
    spw_engine *e;
    (void)ctx;
    (void)rank;
    ranks_config(&c, SPW_STATE_FP32);
    c.run.ranks = 2;
    c.zero.stage = 3;
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
    snprintf(c.run.device, sizeof c.run.device, "cuda");
    snprintf(c.run.collectives, sizeof c.run.collectives, "nccl");
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    SPW_TRY(spw_model_build(&model, &mc, err));
    SPW_TRY(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model, .comm = comm}, err));
    e->config.run.comm_timeout = 0.5; /* nothing has to come in that time any more */
    spw_sleep_ns(600000000);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return spw_comm_check(comm, err);
}

static void
test_links_end_late(void **state)
{
    (void)state;
    if (!tiny_emulated_links("2"))
        skip();
    ranks_run(2, &(spw_comm_options){0}, end_late, NULL);
    unsetenv("SPW_NCCL");
    unsetenv("SPW_EMULATE_DEVICES");
    unsetenv("SPW_CUDA_PLUGIN");
}

/* What a plan of one rank calls the least is enough for each, whichever matrices it makes orthogonal. */
static void
test_least(void **state)
{
    static const spw_family families[] = {SPW_FAMILY_LLAMA, SPW_FAMILY_DEEPSEEK_V3};
    (void)state;
    for (uint32_t k = 0; k < 4; k++) {
        outcome *out = outcome_new();
        spw_config c;
        ranks_config(&c, SPW_STATE_MIXED);
        tiny_muon(&c);
        c.zero.stage = 3;
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
        world_run(&(world){
            .ranks = 2 + k / 2, .steps = 1, .config = &c, .family = families[k % 2], .least_device = true, .out = out});
        outcome_free(out);
    }
}

/* Gradients rounded to bf16 before they are summed: other bits than fp32's, the same in every stage, and near. */
static void
test_comm_dtype(void **state)
{
    outcome *exact = outcome_new(), *first = outcome_new(), *other = outcome_new();
    (void)state;
    for (uint32_t stage = 0; stage <= 4; stage++) {
        outcome *out = stage == 0 ? exact : stage == 1 ? first : other;
        spw_config c;
        ranks_config(&c, SPW_STATE_FP32);
        c.zero.stage = stage - (stage > 0); /* 0, then 0 to 3 */
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_DEVICE;
        c.comm_dtype = stage == 0 ? SPW_F32 : SPW_BF16;
        memset(out, 0, sizeof *out);
        world_run(&(world){.ranks = 3, .steps = STEPS, .config = &c, .family = SPW_FAMILY_GPT2, .out = out});
        if (stage > 1)
            outcome_same(first, out, "gradients in bf16 between ranks");
    }
    assert_true(memcmp(exact->state, first->state, sizeof exact->state) != 0);
    for (int s = 0; s < STEPS; s++)
        assert_true(fabs(exact->losses[s] - first->losses[s]) < 1e-3 * exact->losses[s]);
    assert_true(first->reduce[0] == exact->reduce[0]);     /* whole sums stay in fp32 */
    assert_true(other->reduce[0] * 4 == exact->reduce[0]); /* half of the bytes, and half of the way */
    outcome_free(exact);
    outcome_free(first);
    outcome_free(other);
}

/* ---------------------------------------------------------------- from one number of ranks to another */

typedef struct leg {
    uint32_t ranks, stage, steps;
    spw_tier param, optimizer;
    spw_state_format format;
} leg;

/* Checkpoints load with any number of ranks, stage, placement and exact format; a leg with as many ranks as before is exact. */
static void
test_elastic(void **state)
{
    const leg legs[] = {{4, 3, 5, SPW_TIER_NVME, SPW_TIER_NVME, SPW_STATE_FP32},
                        {3, 2, 5, SPW_TIER_DEVICE, SPW_TIER_NVME, SPW_STATE_FP32},
                        {1, 3, 2, SPW_TIER_HOST, SPW_TIER_HOST, SPW_STATE_FP32},
                        {8, 0, 2, SPW_TIER_DEVICE, SPW_TIER_DEVICE, SPW_STATE_FP32},
                        {2, 1, 1, SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_STATE_FP32}};
    outcome *one = outcome_new(), *out = outcome_new();
    spw_config c;
    char dir[256], save[300];
    uint32_t at = 0;
    (void)state;
    tiny_dir_make(dir);
    snprintf(save, sizeof save, "%s/out", dir);
    ranks_config(&c, SPW_STATE_FP32);
    world_run(&(world){.ranks = 1, .steps = 15, .config = &c, .family = SPW_FAMILY_GPT2, .out = one});
    for (size_t i = 0; i < sizeof legs / sizeof legs[0]; i++) {
        const leg *l = &legs[i];
        ranks_config(&c, l->format);
        ranks_use_dir(&c, dir);
        c.zero.stage = l->stage;
        c.zero.offload_param = l->param;
        c.zero.offload_optimizer = l->optimizer;
        world_run(&(world){.ranks = l->ranks,
                           .steps = l->steps,
                           .first_step = at,
                           .config = &c,
                           .family = SPW_FAMILY_GPT2,
                           .load = at > 0 ? save : NULL,
                           .save = save,
                           .out = out});
        at += l->steps;
    }
    assert_int_equal(at, 15);
    outcome_near(one, out, "4, 3, 1, 8 and 2 ranks in turn");
    tiny_dir_remove(dir);
    outcome_free(one);
    outcome_free(out);
}

/* Saved and loaded at one number of ranks: as if nothing had been; the files are those of one rank's folder. */
static void
test_resume_exact(void **state)
{
    const leg legs[] = {{3, 3, 2, SPW_TIER_NVME, SPW_TIER_NVME, SPW_STATE_SPLIT},
                        {3, 2, 2, SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_STATE_MIXED}};
    outcome *whole = outcome_new(), *out = outcome_new();
    spw_config c;
    char dir[256], save[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(save, sizeof save, "%s/out", dir);
    ranks_config(&c, SPW_STATE_SPLIT);
    world_run(&(world){.ranks = 3, .steps = 4, .config = &c, .family = SPW_FAMILY_LLAMA, .out = whole});
    for (uint32_t i = 0; i < 2; i++) {
        ranks_config(&c, legs[i].format);
        ranks_use_dir(&c, dir);
        c.zero.stage = legs[i].stage;
        c.zero.offload_param = legs[i].param;
        c.zero.offload_optimizer = legs[i].optimizer;
        world_run(&(world){.ranks = 3,
                           .steps = 2,
                           .first_step = 2 * i,
                           .config = &c,
                           .family = SPW_FAMILY_LLAMA,
                           .load = i > 0 ? save : NULL,
                           .save = save,
                           .out = out});
    }
    outcome_same(whole, out, "3 ranks, saved after 2 of 4 steps, split then mixed");
    tiny_dir_remove(dir);
    outcome_free(whole);
    outcome_free(out);
}

static void
run_own(const spw_config *c, const spw_config *last, const char *load, outcome *out)
{
    memset(out, 0, sizeof *out);
    world_run(&(world){.ranks = 2,
                       .steps = STEPS,
                       .config = c,
                       .last = last,
                       .family = SPW_FAMILY_LLAMA,
                       .frozen = load != NULL,
                       .load = load,
                       .out = out});
}

/*
 * Budgets and placements of one rank's own: the least device memory, few elements gathered, activations or records somewhere else. All
 * gather into as much as that rank does, and make one gradient at a time if it has to; no bit changes.
 */
static void
test_own_budgets(void **state)
{
    outcome *plain = outcome_new(), *least = outcome_new(), *out = outcome_new();
    spw_config c, last;
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    ranks_config(&c, SPW_STATE_SPLIT);
    ranks_use_dir(&c, dir);
    run_own(&c, NULL, NULL, plain);
    memset(least, 0, sizeof *least);
    world_run(&(world){
        .ranks = 2, .steps = STEPS, .config = &c, .family = SPW_FAMILY_LLAMA, .least_device = true, .out = least});
    for (int k = 0; k < 5; k++) {
        last = c;
        if (k < 2)
            last.run.device_memory = least->plan[0].device_budget;
        if (k == 1)
            c.run.device_memory = (least->plan[0].device_budget + plain->plan[0].device_bytes) / 2;
        if (k == 2)
            last.zero.max_live_parameters = 4096;
        if (k == 3)
            last.run.activations = SPW_TIER_HOST;
        if (k == 4)
            last.zero.offload_param = last.zero.offload_optimizer = SPW_TIER_NVME;
        run_own(&c, &last, NULL, out);
        outcome_same(plain, out, "the last rank has a placement of its own");
        assert_int_equal(out->plan[0].cache_device, out->plan[1].cache_device);
        assert_int_equal(out->plan[0].single_grad, k < 2);
        assert_int_equal(out->plan[1].single_grad, k < 2);
    }
    tiny_dir_remove(dir);
    outcome_free(plain);
    outcome_free(least);
    outcome_free(out);
}

/* Of memory in which one rank could not read frozen weights where they are: all ranks copy them. */
static void
test_copies_together(void **state)
{
    outcome *there = outcome_new(), *copied = outcome_new();
    spw_config c, last;
    char dir[256], save[300];
    uint64_t reads;
    (void)state;
    tiny_dir_make(dir);
    snprintf(save, sizeof save, "%s/out", dir);
    ranks_config(&c, SPW_STATE_SPLIT);
    ranks_use_dir(&c, dir);
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_NVME;
    c.aio.block_size = 4 << 20;
    world_run(
        &(world){.ranks = 2, .config = &c, .family = SPW_FAMILY_LLAMA, .frozen = true, .save = save, .out = there});
    run_own(&c, NULL, save, there);
    assert_true(there->plan[0].weight_in_place > 0 && there->plan[1].weight_in_place > 0);
    reads = spw_aio_bounce_bytes(&(spw_aio_options){.block_bytes = c.aio.block_size});
    last = c;
    last.run.host_memory = there->plan[1].host_bytes - reads / 2;
    last.run.weight_slots = last.run.record_slots = 1;
    run_own(&c, &last, save, copied);
    outcome_same(there, copied, "one rank copies frozen weights");
    assert_true(copied->plan[0].weight_in_place == 0 && copied->plan[1].weight_in_place == 0);
    tiny_dir_remove(dir);
    outcome_free(there);
    outcome_free(copied);
}

/* ---------------------------------------------------------------- bytes */

/* A model large enough that padding of parts is little. */
static void
measure(uint32_t ranks, uint32_t stage, bool tight, spw_state_format format, const char *dir, const char *plugin,
        outcome *out)
{
    spw_config c;
    ranks_config(&c, format);
    c.zero.stage = stage;
    c.zero.offload_param = stage == 3 ? SPW_TIER_HOST : SPW_TIER_DEVICE;
    c.zero.offload_optimizer = stage > 0 ? SPW_TIER_HOST : SPW_TIER_DEVICE;
    c.run.grad_dtype = SPW_BF16;
    c.data.seq_length = 4;
    c.micro_batch = 1;
    if (dir != NULL) {
        ranks_use_dir(&c, dir);
        c.zero.offload_optimizer = SPW_TIER_NVME;
        c.zero.offload_param = stage == 3 ? SPW_TIER_NVME : c.zero.offload_param;
    }
    if (plugin != NULL)
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
    if (tight)
        c.zero.max_live_parameters = 3 * 20 * 4096;
    world_run(&(world){.ranks = ranks,
                       .steps = plugin != NULL ? 0 : STEPS,
                       .config = &c,
                       .family = SPW_FAMILY_QWEN2,
                       .plugin = plugin,
                       .out = out});
}

/*
 * Received per rank and step: gradients once around, weights once after an update; in stage 3 once for each pass that does
 * not find them there. Source  Rajbhandari et al. 2020, ZeRO, section 7.
 */
static void
test_bytes(void **state)
{
    const uint32_t worlds[] = {2, 4, 8};
    outcome *out = outcome_new();
    (void)state;
    for (int k = 0; k < (SANITIZED ? 1 : 3); k++) {
        uint32_t n = worlds[k];
        for (uint32_t stage = 0; stage <= 3; stage++) {
            double share, gathered = stage == 0 ? 0 : 1;
            memset(out, 0, sizeof *out);
            measure(n, stage, stage == 3, SPW_STATE_SPLIT, NULL, NULL, out);
            share = 4.0 * (double)out->padded * (n - 1) / n; /* of a number per parameter, on the cpu device fp32 */
            assert_true((double)out->padded < 1.5 * (double)out->elems);
            for (uint32_t r = 0; r < n; r++) {
                double passes = (double)out->gather[r] / share;
                assert_share((double)out->reduce[r], STEPS * (stage == 0 ? 2 : 1) * share, stage, n, "reduced");
                if (stage < 3) /* once before the first step, then after each update */
                    assert_share((double)out->gather[r], (STEPS + 1) * gathered * share, stage, n, "gathered");
                else if (passes > 2.01 * STEPS + 1 || passes < 1.5 * STEPS) /* what a pass leaves there is used again */
                    fail_msg("stage 3, %u ranks: weights gathered %.2f times in %d steps and an evaluation", n, passes,
                             STEPS);
            }
        }
    }
    outcome_free(out);
}

/*
 * What a rank of a run holds of weights, gradients and records, by the bytes that the library took: mappings, device memory
 * and swap files together, less what a step works with, which the plan lists. Per parameter, of N ranks and padded to whole parts:
 *
 *   stage   paper       mixed (its 2 + 2 + 12)   split (2 + 2 + 10)
 *   0       16          16                       14
 *   1       4 + 12/N    G + 16/N                 G + 14/N
 *   2       2 + 14/N    G + 16/N                 G + 14/N
 *   3       16/N        16/N                     14/N
 *
 * G is a gathered weight: 4 on the cpu device, which computes in fp32, 2 on one that computes in bf16: split then has the paper's
 * stage 2, and in stage 1, which keeps no whole gradients here, less. The 2/N that mixed has more are the rank's part of
 * the weights, which is there beside the gathered one. Source  Rajbhandari et al. 2020, ZeRO, section 5.
 */
static void
check_held(uint32_t n, uint32_t stage, spw_state_format format, const char *dir, const char *plugin, outcome *out)
{
    double own = format == SPW_STATE_MIXED ? 16 : 14, gathered = plugin != NULL ? 2 : 4;
    bool keeps_all = stage == 1 || stage == 2;
    memset(out, 0, sizeof *out);
    measure(n, stage, stage == 3, format, dir, plugin, out);
    for (uint32_t r = 0; r < n; r++) {
        const spw_plan *p = &out->plan[r];
        uint64_t works = p->grads_device + p->arena_device + p->batch_device + p->padding_device +
                         p->activations_device + p->tapes_device + p->parts_device + (keeps_all ? 0 : p->cache_device) +
                         p->slots_host + p->activations_host + p->wire_host + p->spare_nvme + p->spare_host;
        double want = (double)out->held[r] * (own + (keeps_all ? gathered * n : 0));
        double took = (double)out->taken[r] - (double)works;
        assert_true(want > 0 && out->taken[r] > works);
        if (fabs(took - want) > 0.02 * want)
            fail_msg(
                "stage %u, %u ranks, %s%s%s: rank %u took %llu bytes, %llu to work with; %.0f are left, %.0f wanted "
                "(%.3f and %.3f a parameter)",
                stage, n, spw_state_name(format), dir != NULL ? ", nvme" : "", plugin != NULL ? ", bf16" : "", r,
                (unsigned long long)out->taken[r], (unsigned long long)works, took, want,
                took / ((double)out->held[r] * (stage == 0 ? 1 : n)),
                want / ((double)out->held[r] * (stage == 0 ? 1 : n)));
    }
}

static void
test_held(void **state)
{
    const uint32_t worlds[] = {2, 4, 8};
    outcome *out = outcome_new();
    char dir[256], plugin[TINY_PATH_BYTES];
    const bool emulated = tiny_emulated_file(plugin, "spillway-cuda.so"); /* where a C++ compiler was there */
    (void)state;
    tiny_dir_make(dir);
    for (int k = 0; k < (SANITIZED ? 1 : 3); k++) {
        for (uint32_t stage = 0; stage <= 3; stage++) {
            check_held(worlds[k], stage, SPW_STATE_SPLIT, NULL, NULL, out);
            check_held(worlds[k], stage, SPW_STATE_MIXED, stage > 0 ? dir : NULL, NULL, out);
            if (stage > 0 && emulated)
                check_held(worlds[k], stage, SPW_STATE_SPLIT, NULL, plugin, out);
        }
    }
    tiny_dir_remove(dir);
    outcome_free(out);
}

/* ---------------------------------------------------------------- overlap */

/*
 * On a slow link, made so slow that it takes about as long as computing does: both go on at once, what is waited for is
 * said to be the collectives, and the parts of a step are the step.
 */
static void
test_overlap(void **state)
{
    outcome *out = outcome_new();
    double link = 0, alone = 0, share = 1;
    (void)state;
    for (int run = 0; run < 12 && share > 0.9; run++) { /* the link's speed from the run before; a busy CPU hides it */
        spw_config c;
        ranks_config(&c, SPW_STATE_SPLIT);
        c.data.seq_length = 40;
        c.micro_batch = 4;
        c.zero.max_live_parameters = 3 * 20 * 4096;
        memset(out, 0, sizeof *out);
        world_run(
            &(world){.ranks = 2, .steps = STEPS, .config = &c, .family = SPW_FAMILY_QWEN2, .link = link, .out = out});
        if (link > 0) {
            alone = out->busy_s / link;
            share = out->step_s / (out->compute_s + alone);
            print_message("step %.3f s, computing %.3f, link %.3f, waiting for collectives %.3f: %.2f of the sum\n",
                          out->step_s, out->compute_s, alone, out->collective_s, share);
            assert_true(out->collective_s > 0);
        }
        assert_true(fabs(out->parts_s - out->step_s) < 0.02 * out->step_s);
        link = out->busy_s / out->compute_s;
    }
    assert_true(share <= 0.9);
    outcome_free(out);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worlds),       cmocka_unit_test(test_no_clipping), cmocka_unit_test(test_passes),
        cmocka_unit_test(test_frozen),       cmocka_unit_test(test_least),       cmocka_unit_test(test_comm_dtype),
        cmocka_unit_test(test_elastic),      cmocka_unit_test(test_dropout),     cmocka_unit_test(test_late_start),
        cmocka_unit_test(test_resume_exact), cmocka_unit_test(test_bytes),       cmocka_unit_test(test_held),
        cmocka_unit_test(test_overlap),      cmocka_unit_test(test_own_budgets), cmocka_unit_test(test_copies_together),
        cmocka_unit_test(test_own_disks),    cmocka_unit_test(test_told),        cmocka_unit_test(test_links_end_late),
        cmocka_unit_test(test_adapters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
