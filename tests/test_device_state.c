/*
 * State on a device that the host cannot address, the emulated cuda device: updates run there, gradients stay there, and nothing
 * of it changes a bit beside the same device with its state in host memory or on nvme. Streams work as late as they may.
 */
#include "lib_ranks.h"
#include "lib_tiny.h"
#include "engine_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { STEPS = 2 };

static void
device_config(spw_config *c, spw_state_format f)
{
    tiny_config(c, f);
    snprintf(c->run.device, sizeof c->run.device, "cuda");
    c->zero.offload_param = c->zero.offload_optimizer = SPW_TIER_DEVICE;
    c->run.chunk_elems = 4096;
    if (f != SPW_STATE_MIXED_F16)
        return;
    c->bf16 = false;
    c->fp16 = true;
    c->run.grad_dtype = SPW_F16;
    c->loss_scale.initial_power = 10;
    c->loss_scale.window = 1000;
    c->loss_scale.hysteresis = 1;
    c->loss_scale.min = 1;
}

/* Every format and optimizer, with gradients of several types, passes, no clipping, decay groups and random delays. */
static void
test_same_bits(void **state)
{
    static const char *const types[] = {"AdamW", "Lion", "SGD", "Adagrad"};
    static const spw_state_format muons[] = {SPW_STATE_SPLIT, SPW_STATE_FP32, SPW_STATE_MIXED};
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (int v = 0; v < SPW_STATE_COUNT + 3; v++) {
        const bool muon = v >= SPW_STATE_COUNT;
        const spw_state_format f = muon ? muons[v - SPW_STATE_COUNT] : (spw_state_format)v;
        if (SANITIZED && f != SPW_STATE_SPLIT)
            continue; /* what differs between formats is shown without them */
        double want[STEPS], got[STEPS];
        uint64_t digest = 0;
        for (int k = 0; k < (f == SPW_STATE_SPLIT ? 8 : 4); k++) {
            const spw_tier weights[] = {SPW_TIER_HOST,   SPW_TIER_DEVICE, SPW_TIER_DEVICE, SPW_TIER_HOST,
                                        SPW_TIER_DEVICE, SPW_TIER_NVME,   SPW_TIER_NVME,   SPW_TIER_DEVICE};
            const spw_tier records[] = {SPW_TIER_HOST, SPW_TIER_DEVICE, SPW_TIER_DEVICE, SPW_TIER_HOST,
                                        SPW_TIER_HOST, SPW_TIER_NVME,   SPW_TIER_NVME,   SPW_TIER_HOST};
            const double ratio[] = {1, 1, 1, 0.5, 1, 1, 0.4, 0.3}; /* the host updates so much of it */
            spw_config c;
            uint64_t sum;
            if (SANITIZED && muon && k % 4 != 0 && k != 6)
                continue;
            device_config(&c, f);
            snprintf(c.optimizer.type, sizeof c.optimizer.type, "%s", types[f % 4]);
            c.optimizer.momentum = 0.9;
            if (muon)
                tiny_muon(&c);
            c.zero.offload_param = weights[k];
            c.zero.offload_optimizer = records[k];
            c.zero.optimizer_ratio = ratio[k];
            if (f == SPW_STATE_SPLIT)
                c.run.micro_batches_per_pass = 1;
            if (f == SPW_STATE_SPLIT || f == SPW_STATE_SPLIT_INT8)
                c.gradient_clipping = 0; /* updates run while the backward pass goes on */
            if (f == SPW_STATE_SPLIT_BF16 || f == SPW_STATE_MIXED)
                c.run.grad_dtype = SPW_BF16;
            c.run.chaos_seed = k >= 2 ? 30 + (uint64_t)k : 0;
            c.run.chunk_elems = k == 2 ? 1 << 20 : 4096;
            ranks_use_dir(&c, dir);
            sum = tiny_train(&c, f % 2 ? SPW_FAMILY_LLAMA : SPW_FAMILY_GPT2, STEPS, k == 0 ? want : got);
            digest = k == 0 ? sum : digest;
            if (k > 0 && (memcmp(want, got, sizeof want) != 0 || sum != digest))
                fail_msg("%s, weights on %s, records on %s, ratio %g: losses end with %.17g, not %.17g; digest %llx, "
                         "not %llx",
                         spw_state_name(f), spw_tier_name(weights[k]), spw_tier_name(records[k]), ratio[k],
                         got[STEPS - 1], want[STEPS - 1], (unsigned long long)sum, (unsigned long long)digest);
        }
    }
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- one engine */

typedef struct run {
    spw_config c;
    spw_model *model;
    spw_engine *e;
    spw_step_result last;
    spw_error err;
    uint64_t seen; /* checksum of the gradient that the hook read */
} run;

static spw_status
run_open(run *r, const spw_config *c)
{
    spw_model_config mc;
    memset(r, 0, sizeof *r);
    r->c = *c;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    assert_int_equal(spw_model_build(&r->model, &mc, &r->err), SPW_OK);
    if (c->run.freeze.count > 0)
        assert_true(spw_model_freeze(r->model, r->c.run.freeze.item[0]) > 0);
    SPW_TRY(spw_engine_create(
        &r->e, &(spw_engine_options){.config = &r->c, .model = r->model, .process_bytes = TINY_PROCESS_BYTES},
        &r->err));
    return spw_engine_init_params(r->e, 7, &r->err);
}

static void
run_close(run *r)
{
    spw_engine_destroy(r->e);
    spw_model_destroy(r->model);
}

static spw_status
run_step(run *r, uint64_t s)
{
    int32_t tokens[96], targets[96];
    tiny_batch(s, r->model->config.vocab, 96, tokens, targets);
    return spw_engine_step(r->e, tokens, targets, 2, r->c.optimizer.lr, &r->last, &r->err);
}

static void
expect_ok(run *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", r->err.message);
}

static void
read_gradient(void *ctx, spw_engine *e)
{
    static float values[61 * 32];
    run *r = ctx;
    expect_ok(r, spw_access_get_full(e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 0}, values, &r->err));
    r->seen = r->seen * 31 + spw_checksum(values, sizeof values);
}

/* Gradients, masters and moments by name are those of state in host memory; a change is what training goes on from. */
static void
test_access(void **state)
{
    uint64_t digest[2], seen[2];
    (void)state;
    for (int there = 0; there < 2; there++) {
        float moments[100], one = 0.25f;
        spw_config c;
        run r;
        device_config(&c, SPW_STATE_SPLIT);
        c.run.grad_dtype = SPW_BF16;
        if (!there)
            c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
        expect_ok(&r, run_open(&r, &c));
        assert_int_equal(spw_store_grad_on_device(r.e->store, 0), there);
        spw_engine_on_gradients(r.e, read_gradient, &r);
        expect_ok(&r, run_step(&r, 0));
        expect_ok(
            &r, spw_access_get_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_EXP_AVG_SQ, 32, 100}, moments, &r.err));
        expect_ok(&r, spw_access_set_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, &one, 0, &r.err));
        expect_ok(
            &r, spw_access_set_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_EXP_AVG, 64, 100}, moments, 0, &r.err));
        expect_ok(&r, run_step(&r, 1));
        digest[there] = tiny_digest(r.e);
        seen[there] = r.seen + spw_checksum(moments, sizeof moments);
        if (there) {
            assert_int_equal(r.last.d2h, 0);
            assert_int_equal(r.last.h2d, 0);
            assert_true(r.e->plan.grad_host == 0 && r.e->plan.record_host == 0 && r.e->plan.record_device > 0);
            assert_true(spw_gpu_bytes_live(r.e->gpu) <= r.e->plan.device_bytes);
        }
        run_close(&r);
    }
    assert_int_equal(digest[0], digest[1]);
    assert_int_equal(seen[0], seen[1]);
}

/* With clipping a step that is not finite changes nothing; without, the run ends and says which unit, as on the host. */
static void
test_nonfinite(void **state)
{
    float nan = NAN;
    (void)state;
    for (int clip = 0; clip < 2; clip++) {
        uint64_t before;
        spw_config c;
        run r;
        device_config(&c, SPW_STATE_SPLIT);
        c.gradient_clipping = clip;
        expect_ok(&r, run_open(&r, &c));
        expect_ok(&r, spw_access_set_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, &nan, 0, &r.err));
        before = tiny_digest(r.e);
        if (clip) {
            expect_ok(&r, run_step(&r, 0));
            assert_true(r.last.skipped);
            assert_int_equal(tiny_digest(r.e), before);
        } else {
            spw_status st = run_step(&r, 0);
            st = st == SPW_OK ? spw_engine_drain(r.e, &r.err) : st;
            assert_int_equal(st, SPW_ENONFINITE);
            assert_non_null(strstr(r.err.message, "infinite or NaN"));
        }
        run_close(&r);
    }
}

/* Frozen parameters lie on the device too, and the trained ones have the bits that they have with all state on the host. */
static void
test_frozen(void **state)
{
    static const char *const codes[] = {"none", "int8", "int4"};
    uint64_t digest[2];
    (void)state;
    for (int k = 0; k < 6; k++) { /* as they are and as codes, which are brought to the workers in two steps */
        int there = k % 2;
        spw_config c;
        run r;
        device_config(&c, SPW_STATE_SPLIT);
        snprintf(c.run.frozen_codes, sizeof c.run.frozen_codes, "%s", codes[k / 2]);
        c.run.freeze.count = 1;
        snprintf(c.run.freeze.item[0], sizeof c.run.freeze.item[0], "h.[01].*");
        if (!there)
            c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
        expect_ok(&r, run_open(&r, &c));
        for (uint64_t s = 0; s < STEPS; s++)
            expect_ok(&r, run_step(&r, s));
        digest[there] = tiny_digest(r.e);
        run_close(&r);
        assert_true(!there || digest[0] == digest[1]);
    }
}

/* Of a step's updates a chunk costs its kernel and nothing else: more chunks are more launches. */
static void
test_updates_together(void **state)
{
    spw_emulate_counts took[2];
    uint32_t chunks[2];
    (void)state;
    for (int k = 0; k < 2; k++) {
        spw_emulate_counts before;
        spw_config c;
        run r;
        device_config(&c, SPW_STATE_SPLIT);
        c.run.chunk_elems = k == 0 ? 4096 : 1 << 20;
        expect_ok(&r, run_open(&r, &c));
        assert_true(spw_store_grad_on_device(r.e->store, 0));
        for (uint64_t s = 0; s < 2; s++) {
            before = tiny_emulated_counts();
            expect_ok(&r, run_step(&r, s));
            expect_ok(&r, spw_engine_drain(r.e, &r.err));
        }
        took[k] = tiny_emulated_counts();
        took[k].launches -= before.launches;
        took[k].copies -= before.copies;
        took[k].sets -= before.sets;
        took[k].host_functions -= before.host_functions;
        took[k].notes -= before.notes;
        chunks[k] = r.e->layout.chunk_count;
        run_close(&r);
    }
    assert_true(chunks[0] > chunks[1]);
    assert_true(took[0].launches > took[1].launches); /* one for so many groups of parameters */
    assert_int_equal(took[0].copies, took[1].copies);
    assert_int_equal(took[0].sets, took[1].sets);
    assert_int_equal(took[0].host_functions, took[1].host_functions);
    assert_int_equal(took[0].notes, took[1].notes);
}

/* ---------------------------------------------------------------- snapshots */

typedef struct copy {
    spw_engine *e;
    uint64_t sums[64];
    uint32_t calls;
} copy;

static spw_status
copy_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    copy *c = ctx;
    const spw_store_chunk *chunk = &c->e->layout.chunks[chunk_idx];
    (void)grad;
    (void)err;
    assert_true(chunk_idx < 64);
    c->sums[chunk_idx] =
        spw_checksum(weights, chunk->elems * spw_state_weight_bytes(SPW_STATE_SPLIT)) * 31 +
        spw_checksum(record, spw_state_record_bytes(SPW_STATE_SPLIT, spw__engine_optimizer(c->e, chunk->unit_idx),
                                                    chunk->elems));
    __atomic_fetch_add(&c->calls, 1, __ATOMIC_RELAXED);
    return SPW_OK;
}

static void
config_with_snapshot(spw_config *c, uint64_t seed, bool muon)
{
    device_config(c, SPW_STATE_SPLIT);
    if (muon) /* whose chunks have two turns */
        tiny_muon(c);
    c->run.chaos_seed = seed;
    if (seed % 3 == 2) { /* some of it */
        c->zero.offload_param = c->zero.offload_optimizer = SPW_TIER_HOST;
        c->zero.optimizer_ratio = 0.5;
    }
    c->gradient_clipping = seed % 2;
    c->run.optimizer_threads = 1 + (uint32_t)seed % 3;
}

/*
 * A snapshot has every chunk as it was when it began, whoever hands it over: idle workers, updates to come, or its end. And training goes
 * on as without it.
 */
static void
test_snapshot(void **state)
{
    (void)state;
    for (uint64_t k = 4; k < (SANITIZED ? 8 : 28); k++) {
        const uint64_t seed = k / 4;
        const bool muon = k % 4 > 1, snaps = k % 2;
        static double without;
        copy still = {0}, moving = {0};
        spw_config c;
        run r;
        config_with_snapshot(&c, seed, muon);
        expect_ok(&r, run_open(&r, &c));
        expect_ok(&r, run_step(&r, 0));
        expect_ok(&r, spw_engine_drain(r.e, &r.err));
        still.e = moving.e = r.e;
        expect_ok(&r, spw_store_sweep(r.e->store, SPW_SWEEP_VISIT, copy_chunk, &still, &r.err));
        if (snaps)
            expect_ok(&r, spw_store_snapshot_begin(r.e->store, r.e->generations, false, copy_chunk, &moving, &r.err));
        for (uint64_t s = 1; s <= seed; s++)
            expect_ok(&r, run_step(&r, s));
        if (snaps) {
            expect_ok(&r, spw_store_snapshot_finish(r.e->store, &r.err));
            assert_int_equal(moving.calls, r.e->layout.chunk_count);
            assert_memory_equal(still.sums, moving.sums, sizeof still.sums);
        }
        expect_ok(&r, run_step(&r, 9));
        if (snaps && r.last.loss != without)
            fail_msg("%s, seed %llu: after a snapshot the loss is %.17g, else %.17g", c.optimizer.type,
                     (unsigned long long)seed, r.last.loss, without);
        without = r.last.loss;
        run_close(&r);
    }
}

/* ---------------------------------------------------------------- ranks */

enum { WORLD = 2, NUMBERS_MAX = 61 * 32 };

/* What a world found, in memory that ranks share. */
typedef struct found {
    double losses[STEPS + 1];
    uint64_t sums[4];
    uint64_t device_bytes, planned, nonfinite;
} found;

typedef struct world {
    spw_config c;
    bool poisons; /* a weight that is not a number, before the last step */
    found *out;
} world;

static spw_status
rank_step(spw_engine *e, uint32_t rank, uint64_t s, spw_step_result *r, spw_error *err)
{
    int32_t tokens[24 * WORLD * 2], targets[24 * WORLD * 2];
    uint64_t n = e->config.data.seq_length, each = e->config.accumulation;
    tiny_batch(s, 61, n * WORLD * each, tokens, targets);
    for (uint64_t i = 0; i < each; i++) {
        memmove(tokens + i * n, tokens + (i * WORLD + rank) * n, n * sizeof *tokens);
        memmove(targets + i * n, targets + (i * WORLD + rank) * n, n * sizeof *targets);
    }
    return spw_engine_step(e, tokens, targets, (uint32_t)each, e->config.optimizer.lr, r, err);
}

typedef struct seen {
    uint64_t sum;
    spw_status st;
    spw_error err;
} seen;

static uint64_t
read_sum(spw_engine *e, const char *name, spw_access_part part, uint64_t sum, spw_status *st, spw_error *err)
{
    static float values[NUMBERS_MAX];
    memset(values, 0, sizeof values);
    if (*st == SPW_OK)
        *st = spw_access_get_full(e, &(spw_access){name, part, 0, 0}, values, err);
    return sum * 31 + spw_checksum(values, sizeof values);
}

static void
read_gradients(void *ctx, spw_engine *e)
{
    seen *g = ctx;
    g->sum = read_sum(e, "wte.weight", SPW_ACCESS_GRAD, g->sum, &g->st, &g->err);
    g->sum = read_sum(e, "ln_f.bias", SPW_ACCESS_GRAD, g->sum, &g->st, &g->err);
}

static spw_status
rank_main(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    static const spw_access_part parts[] = {SPW_ACCESS_MASTER, SPW_ACCESS_EXP_AVG, SPW_ACCESS_EXP_AVG_SQ};
    float some[3] = {0.25f, rank == 1 ? 0.5f : 9, NAN};
    world *w = ctx;
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_step_result r;
    seen g = {0};
    spw_status st = SPW_OK;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    SPW_TRY(spw_model_build(&model, &mc, err));
    SPW_TRY(spw_engine_create(
        &e, &(spw_engine_options){.config = &w->c, .model = model, .comm = comm, .process_bytes = TINY_PROCESS_BYTES},
        err));
    SPW_TRY(spw_engine_init_params(e, 7, err));
    if (w->c.gradient_clipping > 0)
        spw_engine_on_gradients(e, read_gradients, &g);
    for (uint64_t s = 0; s < STEPS; s++) {
        SPW_TRY(rank_step(e, rank, s, &r, err));
        SPW_TRY(g.st == SPW_OK ? SPW_OK : (*err = g.err, g.st));
        if (rank == 0)
            w->out->losses[s] = r.loss;
        if (s == 0)
            SPW_TRY(spw_access_set_full(e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 2}, some, 1, err));
    }
    for (int p = 0; p < 3; p++) {
        uint64_t sum = read_sum(e, "wte.weight", parts[p], g.sum, &st, err);
        sum = read_sum(e, "h.1.mlp.c_fc.bias", parts[p], sum, &st, err);
        if (rank == 0)
            w->out->sums[p] = sum;
    }
    SPW_TRY(st);
    if (e->device_updates && w->c.zero.optimizer_ratio < 1 &&
        (e->plan.trained_device == 0 || e->plan.trained_device == e->plan.trained))
        st = SPW_RAISE(err, SPW_EINVAL, "%llu of %llu elements are on the device",
                       (unsigned long long)e->plan.trained_device, (unsigned long long)e->plan.trained);
    if (rank == 0 && e->device_updates) {
        w->out->device_bytes = spw_gpu_bytes_live(e->gpu);
        w->out->planned = e->plan.device_bytes;
    }
    if (w->poisons) { /* every rank ends with it, whoever has that weight's part */
        SPW_TRY(spw_access_set_full(e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 3}, some, 0, err));
        st = rank_step(e, rank, 0, &r, err);
        st = st == SPW_OK ? spw_engine_drain(e, err) : st;
        if (rank == 0)
            w->out->nonfinite = st != SPW_OK && strstr(err->message, "infinite or NaN") != NULL;
        *err = (spw_error){0};
    }
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return st == SPW_OK || w->poisons ? SPW_OK : st;
}

/*
 * A rank's part of the state on the device, or all of it in stage 0: losses, gradients, state by name, with and without links
 * between devices, and the bits are those of state in host memory.
 */
static void
test_ranks(void **state)
{
    const struct {
        uint32_t stage;
        spw_tier tier;
        bool linked;
        uint64_t chaos;
        double ratio;
    } runs[2][5] = {{{3, SPW_TIER_HOST, false, 0, 1},
                     {3, SPW_TIER_DEVICE, false, 3, 1},
                     {0, SPW_TIER_DEVICE, true, 4, 1},
                     {3, SPW_TIER_HOST, true, 7, 0.5},
                     {3, SPW_TIER_HOST, false, 8, 0.5}},
                    {{3, SPW_TIER_HOST, false, 0, 1},
                     {0, SPW_TIER_DEVICE, false, 5, 1},
                     {1, SPW_TIER_DEVICE, true, 6, 1},
                     {3, SPW_TIER_HOST, true, 9, 0.5},
                     {3, SPW_TIER_HOST, false, 10, 0.5}}};
    char nccl[1200];
    (void)state;
    snprintf(nccl, sizeof nccl, "%.*slibnccl.so.2",
             (int)(strlen(getenv("SPW_CUDA_PLUGIN")) - strlen("spillway-cuda.so")), getenv("SPW_CUDA_PLUGIN"));
    for (int passes = SANITIZED; passes < 2; passes++) {
        found *first = ranks_share(sizeof *first), *other = ranks_share(sizeof *other);
        for (int k = 0; k < 5; k++) {
            world w = {.poisons = passes && k == 1, .out = k == 0 ? first : other};
            ranks_config(&w.c, SPW_STATE_SPLIT);
            snprintf(w.c.run.device, sizeof w.c.run.device, "cuda");
            w.c.micro_batch = 1;
            w.c.run.ranks = WORLD;
            w.c.accumulation = 2;
            w.c.train_batch_size = 2 * WORLD;
            w.c.run.micro_batches_per_pass = (uint64_t)passes;
            w.c.gradient_clipping = !passes; /* without, updates run while other units are summed up */
            w.c.run.grad_dtype = passes ? SPW_F32 : SPW_BF16;
            w.c.zero.stage = runs[passes][k].stage;
            w.c.zero.offload_param = w.c.zero.offload_optimizer = runs[passes][k].tier;
            w.c.zero.optimizer_ratio = runs[passes][k].ratio;
            w.c.run.chaos_seed = runs[passes][k].chaos;
            setenv("SPW_NCCL", nccl, 1);
            setenv("SPW_EMULATE_DEVICES", runs[passes][k].linked ? "2" : "1", 1);
            ranks_run(WORLD, &(spw_comm_options){.chaos_seed = runs[passes][k].chaos}, rank_main, &w);
            assert_memory_equal(first->losses, w.out->losses, sizeof first->losses);
            assert_memory_equal(first->sums, w.out->sums, sizeof first->sums);
            assert_true(other->device_bytes <= other->planned && (k == 0) == (other->planned == 0));
            assert_int_equal(w.out->nonfinite, w.poisons);
            memset(other, 0, sizeof *other);
        }
        ranks_unshare(first, sizeof *first);
        ranks_unshare(other, sizeof *other);
    }
    unsetenv("SPW_EMULATE_DEVICES");
}

/* ---------------------------------------------------------------- what is refused, and what replaces it */

static void
test_refused(void **state)
{
    spw_config c;
    run r;
    (void)state;
    device_config(&c, SPW_STATE_SPLIT);
    c.zero.offload_param = SPW_TIER_HOST;
    assert_int_equal(run_open(&r, &c), SPW_EUNSUPPORTED);
    assert_non_null(strstr(r.err.message, "offload_optimizer.device to cpu"));
    run_close(&r);
    /* device auto does it on the cpu device instead */
    snprintf(c.run.device, sizeof c.run.device, "auto");
    expect_ok(&r, run_open(&r, &c));
    assert_string_equal(spw_gpu_get_info(r.e->gpu)->name, "cpu");
    expect_ok(&r, run_step(&r, 0));
    run_close(&r);
    c.zero.offload_param = SPW_TIER_DEVICE;
    expect_ok(&r, run_open(&r, &c));
    assert_string_equal(spw_gpu_get_info(r.e->gpu)->name, "cuda");
    run_close(&r);
}

/* A device that is too small for all state: the nearest configuration that fits takes weights and records off together. */
static void
test_nearest(void **state)
{
    spw_suggestion near;
    spw_config c;
    run r;
    (void)state;
    device_config(&c, SPW_STATE_SPLIT);
    expect_ok(&r, run_open(&r, &c));
    c.run.device_memory = r.e->plan.device_bytes - r.e->plan.record_device;
    run_close(&r);
    assert_int_equal(run_open(&r, &c), SPW_ENOFIT);
    assert_int_equal(
        spw_plan_nearest(&(spw_engine_options){.config = &c, .model = r.model, .process_bytes = TINY_PROCESS_BYTES},
                         &near, &r.err),
        SPW_OK);
    assert_true(near.found);
    for (uint32_t i = 0; i < near.count; i++)
        assert_non_null(strstr(near.set[i], "offload_"));
    run_close(&r);
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST; /* too much of what is offloaded is to be there */
    c.zero.optimizer_ratio = 0;
    assert_int_equal(run_open(&r, &c), SPW_ENOFIT);
    assert_int_equal(
        spw_plan_nearest(&(spw_engine_options){.config = &c, .model = r.model, .process_bytes = TINY_PROCESS_BYTES},
                         &near, &r.err),
        SPW_OK);
    assert_true(near.found && near.count == 1);
    assert_string_equal(near.set[0], "zero_optimization.offload_optimizer.ratio=1");
    run_close(&r);
}

/* Offloaded state takes the device memory that is left, and no more; the step is the same. */
static void
test_filled(void **state)
{
    spw_config c;
    uint64_t least, all, previous = 0;
    double loss = 0;
    run r;
    (void)state;
    device_config(&c, SPW_STATE_SPLIT);
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
    snprintf(c.run.fill_device, sizeof c.run.fill_device, "always");
    expect_ok(&r, run_open(&r, &c)); /* the emulated device has room for all of it */
    assert_int_equal(r.e->plan.trained_device, r.e->plan.trained);
    all = r.e->plan.device_bytes;
    run_close(&r);
    snprintf(c.run.fill_device, sizeof c.run.fill_device, "never");
    expect_ok(&r, run_open(&r, &c));
    assert_int_equal(r.e->plan.trained_device, 0);
    least = r.e->plan.device_bytes;
    run_close(&r);
    snprintf(c.run.fill_device, sizeof c.run.fill_device, "always");
    for (uint64_t k = 0; k <= 4; k += SANITIZED ? 2 : 1) {
        c.run.device_memory = least + (all - least) * k / 4;
        expect_ok(&r, run_open(&r, &c));
        expect_ok(&r, run_step(&r, 0));
        expect_ok(&r, run_step(&r, 1));
        assert_true(r.e->plan.device_bytes <= c.run.device_memory && r.e->plan.trained_device >= previous);
        assert_true((k == 4) == (r.e->plan.trained_device == r.e->plan.trained));
        assert_true((k == 0) == (r.e->plan.trained_device == 0));
        assert_true(k == 0 || memcmp(&r.last.loss, &loss, sizeof loss) == 0);
        previous = r.e->plan.trained_device;
        loss = r.last.loss;
        run_close(&r);
    }
}

/* ---------------------------------------------------------------- weights used where they lie: the store alone */

enum { DIRECT_ELEMS = 8192 }; /* two chunks */

typedef struct direct_ctx {
    float value[DIRECT_ELEMS / 2];
    int updates; /* put into the queue */
} direct_ctx;

static spw_status
fill_ones(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    uint16_t *w = weights;
    (void)ctx;
    (void)chunk_idx;
    (void)record;
    (void)grad;
    (void)err;
    for (int i = 0; i < DIRECT_ELEMS / 2; i++)
        w[i] = spw_f32_to_bf16(1.0f);
    return SPW_OK;
}

/* Weights become 2. */
static void
write_twos(void *ctx, uint32_t chunk_idx, spw_gpu_queue *queue, void *weights, void *record, void *grad, uint64_t *bad)
{
    direct_ctx *d = ctx;
    (void)chunk_idx;
    (void)record;
    (void)grad;
    *bad = 0;
    __atomic_fetch_add(&d->updates, 1, __ATOMIC_RELAXED);
    spw_gpu_copy_h2d(queue, weights, SPW_BF16, d->value, SPW_F32, DIRECT_ELEMS / 2);
}

static spw_status
no_bad(void *ctx, uint32_t chunk_idx, uint64_t bad, spw_error *err)
{
    (void)ctx;
    return SPW_RAISE(err, SPW_EINVAL, "chunk %u: %llu", chunk_idx, (unsigned long long)bad);
}

static void
assert_all(spw_gpu_queue *q, const void *device, float want)
{
    static float host[DIRECT_ELEMS];
    spw_gpu_copy_d2h(q, host, SPW_F32, device, SPW_BF16, DIRECT_ELEMS, NULL);
    spw_gpu_queue_sync(q);
    for (int i = 0; i < DIRECT_ELEMS; i++)
        assert_true(host[i] == want);
}

/*
 * An update that may run waits while the unit is held, and then, in its queue, for what was given to another queue before the
 * release; so does an edit. Who reads before sees nothing of it, and nothing is copied to be read.
 */
static void
test_used_in_place(void **state)
{
    static direct_ctx d;
    spw_store_unit unit = {.chunk_count = 2, .elems = DIRECT_ELEMS, .trainable = true};
    spw_store_chunk chunks[2];
    spw_store_config c = {.units = &unit,
                          .chunks = chunks,
                          .unit_count = 1,
                          .chunk_count = 2,
                          .weight_dtype = SPW_BF16,
                          .weight_bytes = 2,
                          .record = {{.bytes_32 = 256}},
                          .worker_count = 1,
                          .update_device = write_twos,
                          .bad_fn = no_bad,
                          .update_ctx = &d};
    spw_store_use old = {.unit_idx = 0}, new = {.unit_idx = 0, .generation = 1};
    const void *weights, *later;
    spw_gpu_queue *compute = NULL, *out = NULL;
    spw_store *s = NULL;
    spw_error err = {0};
    void *before[2] = {NULL};
    (void)state;
    for (int i = 0; i < DIRECT_ELEMS / 2; i++)
        d.value[i] = 2;
    for (uint64_t k = 0; k < 2; k++)
        chunks[k] = (spw_store_chunk){.first = k * 4096, .elems = 4096}; /* tier 0: the device */
    assert_int_equal(
        spw_gpu_open((spw_gpu **)&c.gpu, &(spw_gpu_options){.name = "cuda", .compute_dtype = SPW_BF16}, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&compute, c.gpu, SPW_QUEUE_COMPUTE, &err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&out, c.gpu, SPW_QUEUE_D2H, &err), SPW_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(spw_gpu_alloc(c.gpu, &before[i], DIRECT_ELEMS * 2, &err), SPW_OK);
    assert_true(spw_store_direct(&c, 0));
    assert_int_equal(spw_store_create(&s, &c, &err), SPW_OK);
    assert_int_equal(spw_store_sweep(s, SPW_SWEEP_INIT, fill_ones, NULL, &err), SPW_OK);

    assert_int_equal(spw_store_acquire(s, &old, 1, &weights, &err), SPW_OK);
    spw_store_step_begin(s, NULL, SPW_STEP_GATED);
    assert_int_equal(spw_store_grad_open(s, 0, &err), SPW_OK);
    spw_store_grad_ready(s, 0);
    spw_store_step_go(s);
    spw_sleep_ns(20000000);
    assert_int_equal(__atomic_load_n(&d.updates, __ATOMIC_RELAXED), 0); /* it is held */
    spw_gpu_copy_d2d(compute, before[0], SPW_BF16, weights, SPW_BF16, DIRECT_ELEMS,
                     NULL); /* works when it is waited for */
    spw_store_release(s, 0, compute);
    assert_int_equal(spw_store_acquire(s, &new, 1, &later, &err), SPW_OK);
    assert_int_equal(d.updates, 2);
    assert_ptr_equal(weights, later);
    spw_gpu_queue_sync(compute);
    assert_all(out, before[0], 1);
    assert_all(out, later, 2);

    spw_gpu_copy_d2d(compute, before[1], SPW_BF16, later, SPW_BF16, DIRECT_ELEMS, NULL);
    spw_store_release(s, 0, compute);
    assert_int_equal(spw_store_drain(s, &err), SPW_OK);
    assert_int_equal(spw_store_sweep_some(s, SPW_SWEEP_EDIT, 0, 2, fill_ones, NULL, &err), SPW_OK);
    spw_gpu_queue_sync(compute);
    assert_all(out, before[1], 2);
    assert_int_equal(spw_store_acquire(s, &new, 1, &later, &err), SPW_OK);
    assert_all(out, later, 1);
    spw_store_release(s, 0, NULL);

    spw_store_destroy(s);
    spw_gpu_queue_destroy(compute);
    spw_gpu_queue_destroy(out);
    for (int i = 0; i < 2; i++)
        spw_gpu_free(c.gpu, before[i]);
    spw_gpu_close(c.gpu);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks), /* first: it forks */
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_access),
        cmocka_unit_test(test_nonfinite), cmocka_unit_test(test_updates_together),
        cmocka_unit_test(test_frozen),    cmocka_unit_test(test_snapshot),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_filled),    cmocka_unit_test(test_used_in_place),
    };
    if (!tiny_emulated_device()) {
        printf("1..1\nok 1 - device state # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    setenv("SPW_EMULATE_STREAMS", "late", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
