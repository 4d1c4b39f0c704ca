/*
 * State cut among fewer ranks than there are (MiCS): groups hold the same bytes and give the run of one rank, wherever state lives;
 * the bytes that are received and held follow the group's size; what is saved says nothing of groups.
 */
#include "lib_tiny.h"
#include "lib_worlds.h"
#include "checkpoint_internal.h"
#include "engine_internal.h"
#include "spw_access.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- worlds */

/* Stage 3 in host memory, fp32; shard 0: not cut into groups. */
static void
groups_config(spw_config *c, uint32_t shard)
{
    ranks_config(c, SPW_STATE_FP32);
    c->gradient_clipping = 1.0;
    c->zero.mics_shard_size = (int32_t)shard;
}

static outcome *
run(world w, uint32_t shard)
{
    spw_config c;
    groups_config(&c, shard);
    w.config = &c;
    w.out = outcome_new();
    world_run(&w);
    return w.out;
}

typedef struct variant {
    const char *name;
    spw_tier param, optimizer;
    bool no_prefetch, tight, gradients;
    double ratio;
    uint64_t chaos;
} variant;

static const variant variants[] = {
    {"host", SPW_TIER_HOST, SPW_TIER_HOST, false, false, false, 1, 0},
    {"device", SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, false, false, 1, 0},
    {"nvme, gradients too, tight", SPW_TIER_NVME, SPW_TIER_NVME, false, true, true, 1, 0},
    {"half of it on the device, chaos", SPW_TIER_HOST, SPW_TIER_HOST, false, false, false, 0.5, 4},
    {"host, tight, no prefetch", SPW_TIER_HOST, SPW_TIER_HOST, true, true, false, 1, 0},
    {"nvme, tight, chaos", SPW_TIER_NVME, SPW_TIER_NVME, false, true, false, 1, 6},
};

/* Gathered elements on the device that the last block of the tiny model needs. */
static uint64_t
tight_elems(uint32_t shard)
{
    return 3 * shard * spw_layout_part(12 * 32 * 32 + 13 * 32, shard);
}

/* Every second placement, in turns, gives the bits of the first; c0: what they have in common. The caller's to free. */
static outcome *
compare_placements(const char *what, world w, const spw_config *c0)
{
    static size_t turn;
    outcome *first = outcome_new(), *other = outcome_new();
    char dir[256], text[160];
    tiny_dir_make(dir);
    turn++;
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const variant *v = &variants[i];
        spw_config c = *c0;
        if (i > 0 && (i + turn) % 2 == 1)
            continue;
        ranks_use_dir(&c, dir);
        c.zero.offload_param = v->param;
        c.zero.offload_optimizer = v->optimizer;
        c.zero.optimizer_ratio = v->ratio;
        c.run.prefetch = !v->no_prefetch;
        c.run.chaos_seed = v->chaos;
        if (v->gradients && c.run.micro_batches_per_pass == 0)
            snprintf(c.run.gradients, sizeof c.run.gradients, "nvme");
        c.zero.max_live_parameters = v->tight ? tight_elems((uint32_t)c.zero.mics_shard_size) : UINT64_MAX;
        w.config = &c;
        w.out = i == 0 ? first : other;
        memset(w.out, 0, sizeof *w.out);
        world_run(&w);
        snprintf(text, sizeof text, "%s, %u ranks in groups of %d, %s", what, w.ranks, c.zero.mics_shard_size, v->name);
        if (i > 0)
            outcome_same(first, other, text);
    }
    tiny_dir_remove(dir);
    outcome_free(other);
    return first;
}

/* ---------------------------------------------------------------- the same run */

/* One rank's run up to rounding, for groups of every size; groups of one are stage 0, one group is stage 3 as it is. */
static void
test_worlds(void **state)
{
    const uint32_t worlds[][2] = {{4, 2}, {4, 1}, {4, 4}, {8, 2}, {6, 3}};
    outcome *one = run((world){.ranks = 1, .steps = STEPS, .family = SPW_FAMILY_GPT2}, 0);
    (void)state;
    for (size_t k = 0; k < (SANITIZED ? 2 : sizeof worlds / sizeof worlds[0]); k++) {
        const uint32_t ranks = worlds[k][0], shard = worlds[k][1];
        world w = {.ranks = ranks, .steps = STEPS, .family = SPW_FAMILY_GPT2};
        outcome *cut, *plain;
        spw_config c;
        groups_config(&c, shard);
        cut = compare_placements("worlds", w, &c);
        outcome_near(one, cut, "groups");
        assert_true(fabs(cut->norm - one->norm) < 1e-5 * one->norm); /* each part counts once */
        groups_config(&c, 0);
        c.zero.stage = shard == 1 ? 0 : 3;
        if (shard == 1)
            c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_DEVICE;
        w.config = &c;
        w.out = plain = outcome_new();
        world_run(&w);
        if (shard == 1 || shard == ranks)
            outcome_same(plain, cut, "groups of one rank, or of all");
        else /* the sums have another order */
            assert_true(memcmp(plain->state[0], cut->state[0], sizeof plain->state[0]) != 0);
        outcome_free(plain);
        outcome_free(cut);
    }
    outcome_free(one);
}

/* Passes that are added up, what is frozen, another family without tied weights, groups across hosts; rounding before sums. */
static void
test_kinds(void **state)
{
    static const struct {
        const char *name;
        world w;
        uint64_t pass;
        spw_state_format format;
        spw_dtype comm;
        bool codes;
        double clipping, within;
    } kinds[] = {
        {"passes", {.ranks = 4, .family = SPW_FAMILY_GPT2}, 2, SPW_STATE_FP32, SPW_F32, false, 1, 0},
        {"frozen", {.ranks = 4, .family = SPW_FAMILY_GPT2, .frozen = true}, 0, SPW_STATE_FP32, SPW_F32, false, 1, 0},
        {"llama, no clipping", {.ranks = 4, .family = SPW_FAMILY_LLAMA}, 0, SPW_STATE_FP32, SPW_F32, false, 0, 0},
        {"four hosts", {.ranks = 4, .family = SPW_FAMILY_GPT2, .per_host = 1}, 0, SPW_STATE_FP32, SPW_F32, false, 1, 0},
        {"three hosts, three groups, two passes",
         {.ranks = 6, .family = SPW_FAMILY_GPT2, .per_host = 2},
         2,
         SPW_STATE_FP32,
         SPW_F32,
         false,
         1,
         0},
        {"bf16 between ranks", {.ranks = 4, .family = SPW_FAMILY_GPT2}, 0, SPW_STATE_FP32, SPW_BF16, false, 1, 1e-3},
        {"8-bit weights", {.ranks = 4, .family = SPW_FAMILY_GPT2}, 0, SPW_STATE_FP32, SPW_F32, true, 1, 5e-2},
        {"split-int8, noise",
         {.ranks = 4, .family = SPW_FAMILY_GPT2},
         0,
         SPW_STATE_SPLIT_INT8,
         SPW_F32,
         false,
         1,
         5e-2},
    };
    (void)state;
    for (size_t k = 0; k < (SANITIZED ? 3 : sizeof kinds / sizeof kinds[0]); k++) {
        world w = kinds[k].w;
        outcome *one = outcome_new(), *cut;
        spw_config c;
        w.steps = STEPS;
        groups_config(&c, 2);
        c.run.state_format = kinds[k].format;
        c.bf16 = kinds[k].format != SPW_STATE_FP32;
        c.gradient_clipping = kinds[k].clipping;
        c.run.micro_batches_per_pass = kinds[k].pass;
        c.comm_dtype = kinds[k].comm;
        c.zero.quantized_weights = kinds[k].codes;
        cut = compare_placements(kinds[k].name, w, &c);
        w.ranks = 1;
        w.per_host = 0;
        w.config = &c;
        w.out = one;
        world_run(&w);
        if (kinds[k].within == 0)
            outcome_near(one, cut, kinds[k].name);
        for (int s = 0; s < STEPS; s++)
            assert_true(fabs(one->losses[s] - cut->losses[s]) <=
                        (kinds[k].within > 0 ? kinds[k].within : 1e-6) * one->losses[s]);
        outcome_free(one);
        outcome_free(cut);
    }
}

/* Steps that fp16 skips are skipped by all groups: as many as without groups, and the scale goes on from there. */
static void
test_skipped(void **state)
{
    world w = {.ranks = 4, .steps = 12, .family = SPW_FAMILY_GPT2};
    outcome *cut, *plain = outcome_new();
    spw_config c;
    (void)state;
    groups_config(&c, 2);
    c.run.state_format = SPW_STATE_MIXED_F16;
    c.fp16 = true;
    c.run.grad_dtype = SPW_F16;
    c.bf16 = false;
    c.loss_scale.initial_power = 24;
    c.loss_scale.window = 4;
    c.loss_scale.hysteresis = 1;
    c.loss_scale.min = 1;
    cut = compare_placements("fp16", w, &c);
    c.zero.mics_shard_size = -1;
    w.config = &c;
    w.out = plain;
    world_run(&w);
    print_message("%u of %u steps are skipped\n", cut->skipped, w.steps);
    assert_true(cut->skipped > 0 && cut->skipped < w.steps && cut->skipped == plain->skipped);
    outcome_free(cut);
    outcome_free(plain);
}

/* ---------------------------------------------------------------- bytes */

/*
 * Of Psi parameters, N ranks in G groups of P: a step receives weights (P-1)/P Psi from the group, once where all stay on the device, up
 * to twice where not; gradients (P-1)/P Psi from the group and 2 (G-1)/G Psi/P from the ranks that hold the same part.
 */
static void
test_bytes(void **state)
{
    const uint32_t worlds[][2] = {{4, 2}, {8, 2}, {8, 4}, {6, 2}};
    (void)state;
    for (size_t k = 0; k < (SANITIZED ? 1 : sizeof worlds / sizeof worlds[0]); k++) {
        const uint32_t n = worlds[k][0], p = worlds[k][1], g = n / p;
        for (int tight = 0; tight < 2; tight++) {
            world w = {.ranks = n, .steps = STEPS, .family = SPW_FAMILY_QWEN2, .per_host = p};
            outcome *cut = outcome_new();
            spw_config c;
            groups_config(&c, p);
            c.data.seq_length = 4;
            c.micro_batch = 1;
            if (tight)
                c.zero.max_live_parameters = 3 * 20 * 4096;
            else
                c.run.device_memory = 64 << 20; /* room for all units */
            w.config = &c;
            w.out = cut;
            world_run(&w);
            for (uint32_t r = 0; r < n; r++) {
                double part = 4.0 * (double)cut->held[r], psi = part * p;
                double weights = psi * (p - 1) / p, near = psi * (p - 1) / p, far = 2 * (g - 1) * part / g;
                double passes = (double)cut->gather[r] / weights;
                if (r == 0)
                    print_message(
                        "%u ranks, groups of %u%s: weights received %.2f times in %d steps and an evaluation, "
                        "gradients %.4f of Psi a step (%.4f)\n",
                        n, p, tight ? ", tight" : "", passes, STEPS, (double)cut->reduce[r] / STEPS / psi,
                        (near + far) / psi);
                assert_true((double)cut->held[r] * p < 1.2 * (double)cut->elems);
                assert_int_equal(cut->far_gather[r], 0); /* no weight crosses hosts */
                if (tight)
                    assert_true(passes > 1.5 * STEPS && passes < 2.01 * STEPS + 1);
                else
                    assert_true(passes == STEPS + 1);
                if (g != 3) { /* shares are whole numbers of blocks */
                    assert_true((double)cut->reduce[r] == STEPS * (near + far));
                    assert_true((double)cut->far_reduce[r] == STEPS * far);
                }
                assert_true(fabs((double)cut->reduce[r] - STEPS * (near + far)) < 0.01 * STEPS * (near + far));
                assert_true(fabs((double)cut->far_reduce[r] - STEPS * far) < 0.04 * STEPS * far);
            }
            outcome_free(cut);
        }
    }
}

/*
 * Where a group is on several hosts, each of its weights comes to a host once and not to each of its ranks: the same bits, and of L
 * ranks on a host each receives 1/L of what it did from others, and as much as before in all.
 */
static void
test_by_host(void **state)
{
    static const uint32_t all[][3] = {{8, 4, 2}, {6, 6, 3}, {0}}, few[][3] = {{4, 4, 2}, {0}};
    (void)state;
    for (const uint32_t(*of)[3] = SANITIZED ? few : all; (*of)[0] > 0; of++) {
        world w = {.ranks = (*of)[0], .steps = STEPS, .family = SPW_FAMILY_GPT2, .per_host = (*of)[2]};
        for (int coded = 0; coded < 2; coded++) {
            outcome *flat = outcome_new(), *once;
            spw_config c;
            groups_config(&c, (*of)[1]);
            c.run.device_memory = 64 << 20; /* every generation is gathered once */
            c.zero.quantized_weights = coded > 0;
            w.config = &c;
            w.out = flat;
            world_run(&w);
            c.zero.mics_by_host = true;
            once = compare_placements(coded ? "codes by host" : "by host", w, &c);
            outcome_same(flat, once, "once to each host");
            memset(once, 0, sizeof *once);
            w.out = once;
            world_run(&w);
            for (uint32_t r = 0; r < w.ranks; r++) {
                assert_true(flat->far_gather[r] > 0);
                assert_int_equal(once->far_gather[r] * w.per_host, flat->far_gather[r]);
                assert_int_equal(once->gather[r], flat->gather[r]);
                assert_int_equal(once->reduce[r], flat->reduce[r]);
                assert_int_equal(once->taken[r], flat->taken[r]);
            }
            outcome_free(flat);
            outcome_free(once);
        }
    }
}

static void
hear(void *ctx, spw_log_level level, const char *line)
{
    char *heard = ctx;
    size_t n = strlen(heard);
    (void)level;
    snprintf(heard + n, 4000 - n, "%s\n", line);
}

/* In a rank: what the key says where it cannot matter, on the first rank and nowhere else. */
static spw_status
listen(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    const char *says = ctx;
    static char heard[4000];
    spw_config c;
    spw_model_config mc;
    spw_model *model;
    spw_engine *e;
    const char *at;
    groups_config(&c, 4);
    c.zero.mics_by_host = true;
    c.run.ranks = spw_comm_get_info(comm)->world;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    SPW_TRY(spw_model_build(&model, &mc, err));
    spw_log_set(hear, heard);
    SPW_TRY(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model, .comm = comm}, err));
    spw_log_set(NULL, NULL);
    at = strstr(heard, "mics_hierarchical_params_gather");
    spw_engine_destroy(e);
    spw_model_destroy(model);
    if (rank == 0 && says != NULL)
        return at != NULL && strstr(at, says) != NULL && strstr(at + 1, "mics_hierarchical_params_gather") == NULL
                   ? SPW_OK
                   : SPW_RAISE(err, SPW_EINVAL, "not said once, or in other words: %s", heard);
    return at == NULL ? SPW_OK : SPW_RAISE(err, SPW_EINVAL, "said for nothing: %s", heard);
}

static void
test_by_host_said(void **state)
{
    (void)state;
    ranks_on_hosts(4, 4, &(spw_comm_options){0}, listen, "the ranks of a group are on one host");
    ranks_on_hosts(1, 4, &(spw_comm_options){0}, listen, "no two ranks of a group are on one host");
    ranks_on_hosts(3, 4, &(spw_comm_options){0}, listen, "a group's hosts have differently many of its ranks");
    ranks_on_hosts(2, 4, &(spw_comm_options){0}, listen, NULL);
}

/* A rank of N in groups of P holds what one of P ranks holds, and a quarter or so of what it does in groups of P/4. */
static void
test_held(void **state)
{
    const uint32_t shards[] = {1, 2, 4, 8};
    outcome *few = outcome_new(), *cut = outcome_new();
    (void)state;
    for (size_t k = 0; k < sizeof shards / sizeof shards[0]; k++) {
        const uint32_t p = shards[k];
        world w = {.ranks = 8, .steps = 1, .family = SPW_FAMILY_QWEN2, .config = NULL};
        double want;
        spw_config c;
        groups_config(&c, p);
        c.run.state_format = SPW_STATE_MIXED;
        c.bf16 = true;
        c.run.grad_dtype = SPW_BF16;
        c.data.seq_length = 4;
        c.micro_batch = 1;
        c.zero.max_live_parameters = 3 * 20 * 4096;
        w.config = &c;
        w.out = cut;
        memset(cut, 0, sizeof *cut);
        world_run(&w);
        for (uint32_t r = 0; r < w.ranks; r++) {
            const spw_plan *q = &cut->plan[r];
            uint64_t works = q->grads_device + q->arena_device + q->batch_device + q->padding_device +
                             q->activations_device + q->tapes_device + q->parts_device + q->cache_device +
                             q->slots_host + q->activations_host + q->wire_host + q->spare_host;
            want = 16.0 * (double)cut->held[r];
            if (r == 0)
                print_message("8 ranks, groups of %u: %.3f bytes per parameter are held, 16/P are %.3f\n", p,
                              ((double)cut->taken[r] - (double)works) / (double)cut->elems, 16.0 / p);
            assert_true(fabs((double)(cut->taken[r] - works) - want) < 0.02 * want);
            assert_true((double)cut->held[r] * p < 1.2 * (double)cut->elems);
        }
        if (p == 1 || p == 8)
            continue;
        c.zero.mics_shard_size = -1;
        w.ranks = p;
        w.out = few;
        memset(few, 0, sizeof *few);
        world_run(&w);
        assert_int_equal(few->held[0], cut->held[7 / p * p]);
    }
    outcome_free(few);
    outcome_free(cut);
}

/* ---------------------------------------------------------------- state by name */

/* What one rank sets, one that is not of the first group, all have, and each group has all of it. */
static spw_status
edit(spw_engine *e, spw_error *err)
{
    static float values[ELEMS_MAX], got[ELEMS_MAX];
    const spw_param *p = &spw_engine_model(e)->params[0];
    spw_access all = {p->name, SPW_ACCESS_MASTER, 0, 0};
    uint64_t n = p->rows * p->cols;
    uint32_t last = e->world - 1;
    spw_stretch held;
    double counts;
    SPW_TRY(spw_access_get_full(e, &all, values, err));
    for (uint64_t i = 0; i < n && e->rank == last; i++)
        values[i] += (float)(i % 7) / 64;
    SPW_TRY(spw_access_set_full(e, &all, values, last, err));
    SPW_TRY(spw_access_get_full(e, &all, got, err));
    for (uint64_t i = 0; e->rank == last && i < n; i++) {
        if (got[i] != values[i])
            return SPW_RAISE(err, SPW_EINVAL, "element %llu is not what was set", (unsigned long long)i);
    }
    SPW_TRY(spw_access_get_local(e, &all, values, &held, err));
    if (memcmp(values, got + held.first, held.count * sizeof *values) != 0)
        return SPW_RAISE(err, SPW_EINVAL, "the stretch that rank %u holds is another", e->rank);
    SPW_TRY(spw_access_set_local(e, &all, values, &held, err));
    counts = (double)held.count;
    SPW_TRY(spw_engine_sum(e, &counts, 1, err));
    return counts == (double)(n * spw__replicas(e))
               ? SPW_OK
               : SPW_RAISE(err, SPW_EINVAL, "%.0f elements of %llu are held", counts, (unsigned long long)n);
}

static void
test_access(void **state)
{
    world w = {.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2, .prepare = edit};
    outcome *one, *cut = run(w, 2);
    (void)state;
    w.ranks = 1;
    one = run(w, 0);
    outcome_near(one, cut, "after a change by name");
    outcome_free(one);
    outcome_free(cut);
}

/* ---------------------------------------------------------------- files */

static void
assert_same_file(const char *a, const char *b, const char *name)
{
    char command[1024];
    snprintf(command, sizeof command, "cmp -s %s/%s %s/%s", a, name, b, name);
    if (system(command) != 0)
        fail_msg("%s/%s and %s/%s are not the same", a, name, b, name);
}

static char sixteen[300]; /* where the next world saves its 16-bit weights */

static spw_status
save_16bit(spw_engine *e, spw_error *err)
{
    return spw_engine_save_16bit(e, sixteen, SPW_BF16, err);
}

/* Saved by one group: the files of stage 3. Loaded by any number of ranks in any groups; saved halfway and gone on with, no bit is different. */
static void
test_checkpoints(void **state)
{
    const uint32_t worlds[][2] = {{1, 0}, {3, 0}, {4, 4}, {4, 1}, {8, 2}, {6, 3}};
    outcome *whole, *part = outcome_new(), *loaded = outcome_new();
    world w = {.ranks = 4, .steps = STEPS, .family = SPW_FAMILY_GPT2};
    spw_config c;
    char dir[256], save[300], again[300], found[SPW_PATH_BYTES], second[SPW_PATH_BYTES];
    spw_error err = {0};
    (void)state;
    assert_false(
        spw__config_decides("zero_optimization.mics_shard_size")); /* free to resume with, as the number of ranks */
    tiny_dir_make(dir);
    snprintf(save, sizeof save, "%s/out", dir);
    snprintf(again, sizeof again, "%s/again", dir);
    whole = run(w, 2);
    groups_config(&c, 2);
    ranks_use_dir(&c, dir);
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_NVME;
    w.config = &c;
    w.out = part;
    w.save = save;
    w.steps = 2;
    world_run(&w);
    for (size_t k = 0; k < (SANITIZED ? 2 : sizeof worlds / sizeof worlds[0]); k++) {
        groups_config(&c, worlds[k][1]);
        memset(loaded, 0, sizeof *loaded);
        world_run(&(world){.ranks = worlds[k][0],
                           .first_step = 2,
                           .config = &c,
                           .family = SPW_FAMILY_GPT2,
                           .load = save,
                           .save = again,
                           .out = loaded});
        for (int p = 0; p < PARTS; p++)
            assert_memory_equal(part->state[p], loaded->state[p], part->elems * sizeof(float));
        assert_int_equal(spw_checkpoint_find(save, found, &err), SPW_OK);
        assert_int_equal(spw_checkpoint_find(again, second, &err), SPW_OK);
        assert_same_file(found, second, "model.safetensors");
        assert_same_file(found, second, "optimizer-00001-of-00001.safetensors");
    }
    groups_config(&c, 2);
    memset(loaded, 0, sizeof *loaded);
    memcpy(loaded->losses, part->losses, sizeof loaded->losses);
    w = (world){
        .ranks = 4, .first_step = 2, .steps = 2, .family = SPW_FAMILY_GPT2, .load = save, .config = &c, .out = loaded};
    snprintf(sixteen, sizeof sixteen, "%s/groups", dir);
    w.prepare = save_16bit;
    world_run(&w);
    outcome_same(whole, loaded, "saved after 2 of 4 steps");
    c.zero.mics_shard_size = -1;
    snprintf(again, sizeof again, "%s", sixteen);
    snprintf(sixteen, sizeof sixteen, "%s/whole", dir);
    w.steps = 0;
    world_run(&w);
    assert_same_file(again, sixteen, "model.safetensors");
    tiny_dir_remove(dir);
    outcome_free(whole);
    outcome_free(part);
    outcome_free(loaded);
}

/* ---------------------------------------------------------------- a device that the host cannot address */

/* What staging takes, in host memory and on the device, is what the plan says: through the host, and linked. */
static void
test_emulated_memory(void **state)
{
    world w = {.ranks = 4, .family = SPW_FAMILY_GPT2};
    char nccl[1300], *slash;
    (void)state;
    if (!tiny_emulated_device())
        skip();
    w.plugin = getenv("SPW_CUDA_PLUGIN");
    snprintf(nccl, sizeof nccl, "%s", w.plugin);
    slash = strrchr(nccl, '/');
    snprintf(slash, sizeof nccl - (size_t)(slash - nccl), "/libnccl.so.2");
    for (int linked = 0; linked < 2; linked++) {
        outcome *plain = run(w, 0), *cut = run(w, 2);
        for (uint32_t r = 0; r < w.ranks; r++) {
            const spw_plan *a = &plain->plan[r], *b = &cut->plan[r];
            uint64_t before = a->host_bytes - a->tables_host + a->device_bytes, state_bytes;
            uint64_t after = b->host_bytes - b->tables_host + b->device_bytes;
            assert_int_equal(b->wire_host > 0, !linked);
            state_bytes = cut->taken[r] - plain->taken[r];
            assert_int_equal(state_bytes, after - before);
        }
        outcome_free(plain);
        outcome_free(cut);
        setenv("SPW_NCCL", nccl, 1); /* a device for each rank, and something to link them */
        setenv("SPW_EMULATE_DEVICES", "4", 1);
    }
    unsetenv("SPW_NCCL");
    unsetenv("SPW_EMULATE_DEVICES");
}

/* ---------------------------------------------------------------- refusals */

static void
test_refused(void **state)
{
    static const struct {
        uint32_t shard, kept;
        bool grads;
        const char *says;
    } all[] = {{3, 0, false, "zero_optimization.mics_shard_size 3 does not divide the 4 ranks into groups"},
               {8, 0, false, "zero_optimization.mics_shard_size 8 does not divide the 4 ranks into groups"},
               {2, 2, false, "zero_optimization.mics_shard_size 2 and zero_hpz_partition_size 2"},
               {2, 0, true, "zero_optimization.mics_shard_size 2 and zero_quantized_gradients"}};
    (void)state;
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) {
        spw_config c;
        groups_config(&c, all[k].shard);
        c.zero.hpz_partition_size = all[k].kept;
        c.zero.quantized_gradients = all[k].grads;
        world_refused(&c, SPW_FAMILY_GPT2, 4, 4, all[k].says);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worlds),          cmocka_unit_test(test_kinds),        cmocka_unit_test(test_skipped),
        cmocka_unit_test(test_bytes),           cmocka_unit_test(test_held),         cmocka_unit_test(test_access),
        cmocka_unit_test(test_by_host),         cmocka_unit_test(test_by_host_said), cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_emulated_memory), cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
