/*
 * State by the name of a parameter: what is read is what is there, what is set is what training goes on from, nothing else
 * changes and nothing else moves; in every placement and format, on one rank and on three.
 */
#include "lib_ranks.h"
#include "lib_tiny.h"
#include "engine_internal.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { PARTS = SPW_ACCESS_WEIGHT + 1, ELEMS_MAX = 1 << 17, WORLD = 3, MICRO = 6, BATCH_MAX = MICRO * 64 };

/* ---------------------------------------------------------------- one engine */

typedef struct run {
    spw_config c;
    spw_model *model;
    spw_engine *e;
    spw_error err;
    spw_step_result last;
} run;

static void
expect_ok(run *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", r->err.message);
}

static void
run_open(run *r, const spw_config *c, uint64_t seed)
{
    spw_model_config mc;
    memset(r, 0, sizeof *r);
    r->c = *c;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    expect_ok(r, spw_model_build(&r->model, &mc, &r->err));
    if (c->run.lora.rank > 0)
        expect_ok(r, spw_model_add_lora(r->model, &(spw_lora){.rank = c->run.lora.rank}, (const char *[]){"c_attn"}, 1,
                                        &r->err));
    expect_ok(
        r, spw_engine_create(&r->e,
                             &(spw_engine_options){
                                 .config = c, .model = r->model, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
                             &r->err));
    expect_ok(r, spw_engine_init_params(r->e, seed, &r->err));
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
    uint64_t n = r->c.accumulation * r->c.micro_batch * r->c.data.seq_length;
    int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
    assert_true(n <= BATCH_MAX);
    tiny_batch(s, r->model->config.vocab, n, tokens, targets);
    return spw_engine_step(r->e, tokens, targets, (uint32_t)r->c.accumulation, r->c.optimizer.lr, &r->last, &r->err);
}

static void
place(spw_config *c, spw_tier tier, const char *dir)
{
    c->zero.offload_param = c->zero.offload_optimizer = tier;
    ranks_use_dir(c, dir);
}

/* ---------------------------------------------------------------- all of the state, as a sweep sees it */

typedef struct image {
    const spw_engine *e;
    float part[PARTS][ELEMS_MAX]; /* master, moments, weight; units in a row, uncut */
    uint64_t sums[512];           /* of every chunk's bytes; one rank */
} image;

static spw_status
take_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    image *im = ctx;
    const spw_layout *l = &im->e->layout;
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    spw_state_format f = im->e->config.run.state_format;
    uint64_t base = l->bases[c->unit_idx] + c->first, bytes = c->elems * spw_state_weight_bytes(f);
    uint64_t end = c->unit_idx + 1 < l->unit_count ? l->bases[c->unit_idx + 1] : ELEMS_MAX;
    uint64_t n = base >= end ? 0 : end - base < c->elems ? end - base : c->elems; /* the rest pads the parts of ranks */
    (void)grad;
    (void)err;
    for (uint32_t p = 0; p < 1 + im->e->optimizer->moment_count && (p == 0 || record != NULL); p++)
        spw_state_get(f, im->e->optimizer, weights, record, c->elems, (spw_state_part)p, 0, n, im->part[p] + base);
    spw_convert(im->part[SPW_ACCESS_WEIGHT] + base, SPW_F32, weights, spw_state_weight_dtype(f), n);
    im->sums[chunk_idx % 512] = spw_checksum(weights, bytes);
    if (record != NULL)
        im->sums[chunk_idx % 512] ^= 31 * spw_checksum(record, spw_state_record_bytes(f, im->e->optimizer, c->elems));
    return SPW_OK;
}

static image *
new_image(const spw_engine *e)
{
    image *im = spw_mem_zalloc(sizeof *im);
    assert_non_null(im);
    assert_true(e->layout.elems <= ELEMS_MAX && e->layout.chunk_count <= 512);
    im->e = e;
    assert_int_equal(spw_store_sweep(e->store, SPW_SWEEP_VISIT, take_chunk, im, NULL), SPW_OK);
    return im;
}

static const float *
image_at(const image *im, uint32_t id, int part)
{
    const spw_place *at = &im->e->layout.places[id];
    return im->part[part] + im->e->layout.bases[at->unit_idx] + at->first;
}

/* After what an edit writes behind its back: when nothing moves and nothing begins to. */
static spw_store_stats
quiet_stats(const spw_engine *e)
{
    spw_store_stats now, before;
    do {
        tiny_settle(e->store);
        spw_store_get_stats(e->store, &before);
        spw_sleep_ns(10000000);
        spw_store_get_stats(e->store, &now);
    } while (now.nvme_moving > 0 || now.nvme_read_bytes != before.nvme_read_bytes ||
             now.nvme_write_bytes != before.nvme_write_bytes);
    return now;
}

/* ---------------------------------------------------------------- one rank: every placement and format */

static void
assert_get_is_image(run *r, const image *im)
{
    static float got[ELEMS_MAX];
    for (uint32_t id = 0; id < r->model->param_count; id++) {
        uint64_t elems = r->e->layout.places[id].elems;
        for (int p = 0; p < PARTS; p++) {
            spw_access a = {r->model->params[id].name, (spw_access_part)p, 0, 0};
            spw_stretch held;
            expect_ok(r, spw_access_get_full(r->e, &a, got, &r->err));
            assert_memory_equal(got, image_at(im, id, p), elems * sizeof(float));
            if (elems < 40)
                continue;
            a.first = 7;
            a.count = elems - 20;
            expect_ok(r, spw_access_get_local(r->e, &a, got, &held, &r->err));
            assert_true(held.first == 7 && held.count == elems - 20);
            assert_memory_equal(got, image_at(im, id, p) + 7, held.count * sizeof(float));
        }
    }
}

static void
write_image(run *r, const image *im)
{
    for (uint32_t id = 0; id < r->model->param_count; id++) {
        for (int p = 0; p < SPW_ACCESS_WEIGHT; p++)
            expect_ok(r, spw_access_set_full(r->e, &(spw_access){r->model->params[id].name, (spw_access_part)p, 0, 0},
                                             image_at(im, id, p), 0, &r->err));
    }
}

/* Elements first to last of one part of one parameter change; nothing else does, and no other chunk moves. */
static void
assert_edit_is_narrow(run *r, const char *name, spw_access_part part, uint64_t first, uint64_t count, bool exact)
{
    uint32_t id = spw_model_find_param(r->model, name), wb = spw_state_weight_bytes(r->c.run.state_format);
    const spw_place *at = &r->e->layout.places[id];
    spw_access a = {name, part, first, count};
    float *values = spw_mem_calloc(count, sizeof *values), *got = spw_mem_calloc(count, sizeof *got);
    image *before = new_image(r->e), *after;
    spw_store_stats s0, s1, s2;
    uint64_t want = 0, touched = 0;
    expect_ok(r, spw_engine_release_gathered(r->e, &r->err)); /* nothing is fetched ahead meanwhile */
    s0 = quiet_stats(r->e);
    for (uint64_t i = 0; i < count; i++)
        values[i] = (float)(i % 13 + 1) * 0.0078125f;
    for (uint32_t k = 0; k < r->e->layout.chunk_count; k++) {
        const spw_store_chunk *c = &r->e->layout.chunks[k];
        uint64_t x, y;
        if (!spw__layout_overlap(&(spw_place){at->unit_idx, 1, at->first + first, count, count}, c, &x, &y))
            continue;
        touched |= 1ull << k;
        if (c->record_tier == SPW_TIER_NVME)
            want += spw_state_record_bytes(r->c.run.state_format, r->e->optimizer, c->elems);
        if (c->weight_tier == SPW_TIER_NVME)
            want += c->elems * wb;
    }
    expect_ok(r, spw_access_set_full(r->e, &a, values, 0, &r->err));
    s1 = quiet_stats(r->e);
    assert_int_equal(s1.nvme_write_bytes - s0.nvme_write_bytes, want);
    assert_true(s1.nvme_read_bytes - s0.nvme_read_bytes <= want); /* weights may still be in a slot */
    expect_ok(r, spw_access_get_full(r->e, &a, got, &r->err));
    s2 = quiet_stats(r->e);
    assert_int_equal(s2.nvme_write_bytes, s1.nvme_write_bytes);
    assert_true(s2.nvme_read_bytes - s1.nvme_read_bytes <= want);
    for (uint64_t i = 0; i < count; i++) {
        if (exact ? got[i] != values[i] : fabsf(got[i] - values[i]) > 0.02f * values[i] + 1e-3f)
            fail_msg("%s part %d, element %llu: %g was set, %g comes back", name, part, (unsigned long long)i,
                     (double)values[i], (double)got[i]);
    }
    after = new_image(r->e);
    for (uint32_t k = 0; k < r->e->layout.chunk_count; k++)
        assert_true((touched >> k & 1) != 0 || before->sums[k] == after->sums[k]);
    for (uint32_t other = 0; other < r->model->param_count; other++) {
        uint64_t n = r->e->layout.places[other].elems;
        for (int p = 0; p < PARTS; p++) {
            bool same = p != (int)part && !(part == SPW_ACCESS_MASTER && p == SPW_ACCESS_WEIGHT);
            const float *x = image_at(before, other, p), *y = image_at(after, other, p);
            if (other != id || same)
                assert_memory_equal(x, y, n * sizeof *x);
            else if (exact) {
                assert_memory_equal(x, y, first * sizeof *x);
                assert_memory_equal(x + first + count, y + first + count, (n - first - count) * sizeof *x);
            }
        }
    }
    spw_mem_free(values);
    spw_mem_free(got);
    spw_mem_free(before);
    spw_mem_free(after);
}

static void
format_config(spw_config *c, spw_state_format f)
{
    tiny_config(c, f);
    c->run.chunk_elems = 4096;
    if (f != SPW_STATE_MIXED_F16)
        return;
    c->bf16 = false;
    c->fp16 = true;
    c->loss_scale.initial_power = 10;
    c->loss_scale.window = 1000;
    c->loss_scale.hysteresis = 1;
    c->loss_scale.min = 1;
}

/* One engine's state, read by name and written into another, is that state: training goes on in both, bit for bit. */
static void
test_every_placement(void **state)
{
    const spw_tier tiers[] = {SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_HOST};
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (int f = 0; f < SPW_STATE_COUNT; f++) {
        bool exact = spw_state_exact((spw_state_format)f);
        uint64_t start, end;
        spw_config c;
        image *im;
        run a;
        format_config(&c, (spw_state_format)f);
        run_open(&a, &c, 7);
        for (uint64_t s = 0; s < 3; s++)
            expect_ok(&a, run_step(&a, s));
        im = new_image(a.e);
        assert_get_is_image(&a, im);
        start = tiny_digest(a.e);
        for (uint64_t s = 3; s < 5; s++)
            expect_ok(&a, run_step(&a, s));
        end = tiny_digest(a.e);
        for (int k = 0; k < 5; k++) {
            run b;
            format_config(&c, (spw_state_format)f);
            place(&c, tiers[k], dir);
            c.run.weight_slots = c.run.record_slots = k == 3 ? 1 : 0;
            c.run.chaos_seed = k >= 3 ? 20 + (uint64_t)(k + f) : 0;
            c.run.optimizer_threads = 1 + (uint32_t)k;
            run_open(&b, &c, 8);
            expect_ok(&b, run_step(&b, 9)); /* the device holds what is about to be wrong */
            write_image(&b, im);
            spw_engine_set_updates(b.e, 3);
            spw_engine_set_loss_scaler(b.e, &(spw_loss_scaler){.scale = 1024, .hysteresis = 1, .steps = 3});
            assert_get_is_image(&b, im);
            assert_int_equal(tiny_digest(b.e), start);
            for (uint64_t s = 3; s < 5; s++)
                expect_ok(&b, run_step(&b, s));
            assert_memory_equal(&a.last.loss, &b.last.loss, sizeof a.last.loss);
            assert_int_equal(tiny_digest(b.e), end);
            assert_edit_is_narrow(&b, "h.1.mlp.c_fc.weight", SPW_ACCESS_MASTER, 1000, 1500, exact);
            assert_edit_is_narrow(&b, "h.2.attn.c_attn.weight", SPW_ACCESS_EXP_AVG, 0, 3072, exact);
            assert_edit_is_narrow(&b, "h.0.ln_1.bias", SPW_ACCESS_EXP_AVG_SQ, 3, 1, exact);
            expect_ok(&b, run_step(&b, 5)); /* checksums of what was written hold */
            run_close(&b);
        }
        spw_mem_free(im);
        run_close(&a);
    }
    tiny_dir_remove(dir);
}

/* Edits and reads between steps, while updates of the step before still run and the next units come: as with waits between. */
static void
test_between_steps(void **state)
{
    char dir[256];
    uint64_t want = 0;
    (void)state;
    tiny_dir_make(dir);
    for (int k = 0; k < 9; k++) {
        uint64_t digest;
        spw_config c;
        run r;
        tiny_config(&c, SPW_STATE_SPLIT);
        c.run.chunk_elems = 4096;
        place(&c, k % 3 == 0 ? SPW_TIER_NVME : k % 3 == 1 ? SPW_TIER_HOST : SPW_TIER_DEVICE, dir);
        c.run.weight_slots = c.run.record_slots = k % 3 == 0 ? 1 + (uint32_t)k / 3 : 0;
        c.run.chaos_seed = k > 0 ? 70 + (uint64_t)k : 0;
        c.gradient_clipping = 0;
        run_open(&r, &c, 3);
        for (uint64_t s = 0; s < 6; s++) {
            const char *name = s % 2 == 0 ? "wte.weight" : "h.1.mlp.c_proj.weight";
            spw_access a = {name, SPW_ACCESS_MASTER, 100, 900};
            float values[900];
            spw_stretch held;
            expect_ok(&r, run_step(&r, s));
            expect_ok(&r, spw_access_get_full(r.e, &a, values, &r.err));
            for (int i = 0; i < 900; i++)
                values[i] *= 0.5f;
            if (k == 2)
                expect_ok(&r, spw_engine_drain(r.e, &r.err));
            expect_ok(&r, spw_access_set_local(r.e, &a, values, &held, &r.err));
            if (s == 4)
                expect_ok(&r, spw_engine_release_gathered(r.e, &r.err));
        }
        digest = tiny_digest(r.e);
        want = k == 0 ? digest : want;
        assert_int_equal(digest, want);
        run_close(&r);
    }
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- gradients */

typedef struct gradients {
    run *r;
    uint32_t calls;
    double squares;
    float first[8]; /* of wte */
    spw_status other, release;
} gradients;

static void
take_gradients(void *ctx, spw_engine *e)
{
    gradients *g = ctx;
    static float values[ELEMS_MAX];
    spw_error err = {0};
    g->calls++;
    g->squares = 0;
    for (uint32_t id = 0; id < g->r->model->param_count; id++) {
        uint64_t n = e->layout.places[id].elems;
        expect_ok(g->r, spw_access_get_full(e, &(spw_access){g->r->model->params[id].name, SPW_ACCESS_GRAD, 0, 0},
                                            values, &g->r->err));
        for (uint64_t i = 0; i < n; i++)
            g->squares += (double)values[i] * values[i];
        if (id == 0)
            memcpy(g->first, values, sizeof g->first);
    }
    g->other = spw_access_get_full(e, &(spw_access){"wte.weight", SPW_ACCESS_MASTER, 0, 1}, values, &err);
    g->release = spw_engine_release_gathered(e, &err);
}

/* What the hook sees has the norm that the step says, whatever accumulates it and stores it; training is the same with it. */
static void
test_gradients(void **state)
{
    (void)state;
    for (int k = 0; k < 6; k++) {
        double squares[2] = {0, 0};
        uint64_t digest[2];
        spw_config c;
        for (int hook = 0; hook < 2; hook++) {
            gradients g = {0};
            run r;
            format_config(&c, k == 3 ? SPW_STATE_MIXED_F16 : SPW_STATE_FP32);
            c.gradient_clipping = k < 2 ? 0.5 : 0;
            c.run.micro_batches_per_pass = k == 1 ? 1 : 0;
            c.run.grad_dtype = k == 4 ? SPW_BF16 : SPW_F32;
            c.run.chaos_seed = k == 5 ? 4 : 0;
            run_open(&r, &c, 7);
            g.r = &r;
            if (hook)
                spw_engine_on_gradients(r.e, take_gradients, &g);
            for (uint64_t s = 0; s < 3; s++) {
                float value;
                expect_ok(&r, run_step(&r, s));
                assert_false(r.last.skipped);
                assert_int_equal(
                    spw_access_get_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 1}, &value, &r.err),
                    SPW_ESTALE);
                assert_non_null(strstr(r.err.message, "spw_engine_on_gradients"));
                if (!hook)
                    continue;
                assert_int_equal(g.calls, s + 1);
                assert_true(g.other == SPW_EINVAL && g.release == SPW_EINVAL);
                squares[1] = sqrt(g.squares);
                assert_true(fabs(squares[1] - r.last.grad_norm) < 1e-6 * squares[1]);
            }
            digest[hook] = tiny_digest(r.e);
            run_close(&r);
        }
        assert_int_equal(digest[0], digest[1]);
    }
}

/* A step that was skipped leaves its gradient for whoever wants to know where it went wrong. */
static void
test_skipped(void **state)
{
    float values[61 * 32], nan = NAN;
    bool found = false;
    uint64_t digest;
    spw_config c;
    run r;
    (void)state;
    tiny_config(&c, SPW_STATE_SPLIT);
    run_open(&r, &c, 7);
    expect_ok(&r, run_step(&r, 0));
    expect_ok(&r, spw_access_get_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, values, &r.err));
    expect_ok(&r, spw_access_set_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, &nan, 0, &r.err));
    digest = tiny_digest(r.e);
    expect_ok(&r, run_step(&r, 1));
    assert_true(r.last.skipped);
    assert_int_equal(tiny_digest(r.e), digest);
    expect_ok(&r, spw_access_set_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, values, 0, &r.err));
    expect_ok(&r, spw_access_get_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 0}, values, &r.err));
    for (int i = 0; i < 61 * 32; i++)
        found = found || !isfinite(values[i]);
    assert_true(found);
    expect_ok(&r, run_step(&r, 1));
    assert_false(r.last.skipped);
    assert_int_equal(spw_access_get_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 0}, values, &r.err),
                     SPW_ESTALE);
    run_close(&r);
}

/* ---------------------------------------------------------------- errors */

static void
expect_error(run *r, spw_access a, bool set, spw_status st, const char *says)
{
    static float values[ELEMS_MAX];
    spw_stretch held;
    for (int local = 0; local < 2; local++) {
        r->err = (spw_error){0};
        assert_int_equal(local ? set ? spw_access_set_local(r->e, &a, values, &held, &r->err)
                                     : spw_access_get_local(r->e, &a, values, &held, &r->err)
                         : set ? spw_access_set_full(r->e, &a, values, 0, &r->err)
                               : spw_access_get_full(r->e, &a, values, &r->err),
                         st);
        if (strstr(r->err.message, says) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", r->err.message, says);
    }
}

static void
test_errors(void **state)
{
    const char *twice[] = {"wte.weight", "wte.weight"};
    spw_checkpoint_job *job = NULL;
    spw_gathered *g = NULL;
    char dir[256], folder[300];
    spw_access a;
    float one = 1;
    uint64_t digest;
    spw_config c;
    run r;
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_MIXED);
    run_open(&r, &c, 7);
    expect_ok(&r, run_step(&r, 0));
    digest = tiny_digest(r.e);
    for (int set = 0; set < 2; set++) {
        expect_error(&r, (spw_access){"wte.wieght", SPW_ACCESS_MASTER, 0, 0}, set, SPW_EINVAL,
                     "did you mean wte.weight?");
        expect_error(&r, (spw_access){"something.else", SPW_ACCESS_MASTER, 0, 0}, set, SPW_EINVAL, "no parameter");
        expect_error(&r, (spw_access){NULL, SPW_ACCESS_MASTER, 0, 0}, set, SPW_EINVAL, "no parameter");
        expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_MASTER, 1952, 0}, set, SPW_EINVAL, "which has 1952");
        expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_MASTER, 1, 1952}, set, SPW_EINVAL, "which has 1952");
        expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_MASTER, 1, UINT64_MAX}, set, SPW_EINVAL, "which has");
        expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_PART_COUNT, 0, 0}, set, SPW_EINVAL, "part 5");
    }
    expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_WEIGHT, 0, 0}, true, SPW_EINVAL, "cannot be set");
    expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 0}, true, SPW_EINVAL, "cannot be set");
    assert_int_equal(spw_access_set_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_MASTER, 0, 1}, &one, 1, &r.err),
                     SPW_EINVAL);
    assert_int_equal(spw_access_find(&a, r.e, "wte.weight", "exp_avgs", &r.err), SPW_EINVAL);
    assert_non_null(strstr(r.err.message, "exp_avg, exp_avg_sq"));
    expect_ok(&r, spw_access_find(&a, r.e, "h.1.ln_2.bias", "exp_avg_sq", &r.err));
    assert_true(a.part == SPW_ACCESS_EXP_AVG_SQ && a.first == 0 && a.count == 32);
    assert_int_equal(spw_gathered_begin(&g, r.e, twice, 2, &r.err), SPW_EINVAL);
    assert_null(g);
    expect_ok(&r, spw_gathered_begin(&g, r.e, twice, 1, &r.err));
    assert_int_equal(spw_gathered_end(g, 1, &r.err), SPW_EINVAL);
    snprintf(folder, sizeof folder, "%s/ckpt", dir);
    expect_ok(&r, spw_checkpoint_begin(&job, r.e, &c, folder, &(spw_checkpoint_state){.step = 1}, &r.err));
    for (int set = 0; set < 2; set++)
        expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_MASTER, 0, 0}, set, SPW_EINVAL, "snapshot is under way");
    snprintf(folder, sizeof folder, "%s/out", dir);
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_BF16, &r.err), SPW_EINVAL);
    expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_F32, &r.err), SPW_EINVAL);
    assert_int_equal(spw_engine_save_16bit(r.e, dir, SPW_BF16, &r.err), SPW_ESYS);
    assert_int_not_equal(spw_engine_save_16bit(r.e, "/proc/none/out", SPW_BF16, &r.err), SPW_OK);
    assert_int_equal(tiny_digest(r.e), digest);
    expect_ok(&r, spw_gathered_begin(&g, r.e, twice, 1, &r.err));
    expect_ok(&r, run_step(&r, 1));
    digest = tiny_digest(r.e);
    assert_int_equal(spw_gathered_end(g, 0, &r.err), SPW_ESTALE);
    assert_int_equal(tiny_digest(r.e), digest);
    run_close(&r);
    tiny_dir_remove(dir);
}

/* What fills the engine anew makes gathered copies old, also where the number of updates stays. */
static void
test_gathered_before_a_load(void **state)
{
    static const char *const names[] = {"wte.weight"};
    char dir[256], found[SPW_PATH_BYTES], file[SPW_PATH_BYTES + 32];
    spw_config c;
    run r = {0};
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_SPLIT);
    run_open(&r, &c, 7);
    expect_ok(&r, spw_checkpoint_save(r.e, &c, dir, &(spw_checkpoint_state){0}, found, &r.err));
    snprintf(file, sizeof file, "%s/model.safetensors", found);
    for (int way = 0; way < 3; way++) {
        spw_gathered *g;
        uint64_t digest;
        expect_ok(&r, spw_engine_init_params(r.e, 8, &r.err));
        expect_ok(&r, spw_gathered_begin(&g, r.e, names, 1, &r.err));
        spw_gathered_values(g, 0, NULL)[0] = 5;
        expect_ok(&r, way == 0   ? spw_engine_init_params(r.e, 9, &r.err)
                      : way == 1 ? spw_engine_load_weights(r.e, file, &r.err)
                                 : spw_checkpoint_load(r.e, found, &r.err));
        assert_int_equal(spw_engine_updates(r.e), 0);
        digest = tiny_digest(r.e);
        assert_int_equal(spw_gathered_end(g, 0, &r.err), SPW_ESTALE);
        assert_int_equal(tiny_digest(r.e), digest);
    }
    run_close(&r);
    tiny_dir_remove(dir);
}

/* Lion has one moment; a frozen parameter has its weight alone, and an engine for inference nothing but weights. */
static void
test_what_is_not_there(void **state)
{
    float values[32];
    spw_model_config mc;
    spw_config c;
    run r = {0};
    (void)state;
    tiny_config(&c, SPW_STATE_SPLIT);
    snprintf(c.optimizer.type, sizeof c.optimizer.type, "Lion");
    run_open(&r, &c, 7);
    expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_EXP_AVG_SQ, 0, 0}, false, SPW_EINVAL, "keeps 1 moments");
    expect_ok(&r, spw_access_get_full(r.e, &(spw_access){"ln_f.bias", SPW_ACCESS_EXP_AVG, 0, 0}, values, &r.err));
    run_close(&r);
    for (int inference = 0; inference < 2; inference++) {
        tiny_config(&c, SPW_STATE_SPLIT);
        tiny_model_config(&mc, SPW_FAMILY_GPT2);
        r.c = c;
        expect_ok(&r, spw_model_build(&r.model, &mc, &r.err));
        assert_true(inference || spw_model_freeze(r.model, "h.1.*") > 0);
        expect_ok(&r, spw_engine_create(&r.e,
                                        &(spw_engine_options){.config = &c,
                                                              .model = r.model,
                                                              .inference = inference,
                                                              .losses = true,
                                                              .process_bytes = TINY_PROCESS_BYTES},
                                        &r.err));
        expect_ok(&r, spw_engine_init_params(r.e, 7, &r.err));
        for (int set = 0; set < 2; set++)
            expect_error(&r, (spw_access){"h.1.ln_1.weight", SPW_ACCESS_EXP_AVG, 0, 0}, set, SPW_EINVAL,
                         inference ? "for inference" : "frozen");
        expect_error(&r, (spw_access){"h.1.ln_1.weight", SPW_ACCESS_GRAD, 0, 0}, false, SPW_EINVAL, "has no gradient");
        for (int i = 0; i < 32; i++)
            values[i] = 0.5f + (float)i / 64;
        expect_ok(
            &r, spw_access_set_full(r.e, &(spw_access){"h.1.ln_1.weight", SPW_ACCESS_MASTER, 0, 0}, values, 0, &r.err));
        for (int p = 0; p < 2; p++) {
            float got[32];
            expect_ok(&r,
                      spw_access_get_full(
                          r.e, &(spw_access){"h.1.ln_1.weight", p == 0 ? SPW_ACCESS_MASTER : SPW_ACCESS_WEIGHT, 0, 0},
                          got, &r.err));
            assert_memory_equal(got, values, sizeof got);
        }
        run_close(&r);
    }
}

/* ---------------------------------------------------------------- scopes, releasing */

static void
test_gathered(void **state)
{
    const char *names[] = {"h.2.mlp.c_fc.weight", "ln_f.weight"};
    (void)state;
    for (int drop = 0; drop < 2; drop++) {
        static float got[4096];
        spw_gathered *g = NULL;
        uint64_t digest, elems;
        spw_config c;
        run r;
        tiny_config(&c, SPW_STATE_FP32);
        run_open(&r, &c, 7);
        expect_ok(&r, run_step(&r, 0));
        digest = tiny_digest(r.e);
        expect_ok(&r, spw_gathered_begin(&g, r.e, names, 2, &r.err));
        for (uint32_t i = 0; i < 2; i++) {
            float *values = spw_gathered_values(g, i, &elems);
            assert_int_equal(elems, i == 0 ? 4096 : 32);
            for (uint64_t k = 0; k < elems; k++)
                values[k] = (float)k / 4096;
        }
        expect_ok(&r, spw_gathered_end(g, drop ? SPW_GATHERED_DROP : 0, &r.err));
        expect_ok(&r, spw_access_get_full(r.e, &(spw_access){names[0], SPW_ACCESS_MASTER, 0, 0}, got, &r.err));
        assert_true(drop ? tiny_digest(r.e) == digest : got[4095] == 4095.0f / 4096);
        run_close(&r);
    }
    expect_ok(&(run){0}, spw_gathered_end(NULL, SPW_GATHERED_DROP, NULL));
}

/* What was on the device comes again, and computes the same. */
static void
test_release(void **state)
{
    uint64_t h2d[2], digest[2];
    (void)state;
    for (int release = 0; release < 2; release++) {
        spw_config c;
        run r;
        tiny_config(&c, SPW_STATE_SPLIT);
        run_open(&r, &c, 7);
        for (uint64_t s = 0; s < 3; s++) {
            expect_ok(&r, run_step(&r, s));
            expect_ok(&r, spw_engine_drain(r.e, &r.err));
            if (s == 1) { /* between, an evaluation that fetches all and changes nothing */
                int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
                double loss;
                tiny_batch(0, 61, 2 * 24, tokens, targets);
                expect_ok(&r, spw_engine_eval(r.e, tokens, targets, 1, &loss, &r.err));
                if (release)
                    expect_ok(&r, spw_engine_release_gathered(r.e, &r.err));
            }
        }
        h2d[release] = quiet_stats(r.e).h2d_bytes;
        digest[release] = tiny_digest(r.e);
        run_close(&r);
    }
    assert_int_equal(digest[0], digest[1]);
    assert_true(h2d[1] > h2d[0]);
}

/* ---------------------------------------------------------------- another block's parameter */

/* x + (norm(x) W1) W0, where W0 belongs to the block before. */
static spw_value *
borrowing_forward(const spw_call *call, spw_value *x)
{
    spw_tape *t = call->tape;
    spw_value *h = spw_nn_rmsnorm(t, x, call->params[0], 1e-5f);
    for (uint32_t k = call->block->param_count; k-- > 1;)
        h = spw_nn_linear(t, h, call->params[k], NULL, 0);
    return spw_nn_add(t, x, h);
}

static spw_model *
borrowing_model(bool borrows)
{
    spw_model_config mc;
    spw_model *m = NULL;
    spw_block *b;
    uint32_t wte, lent;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    mc.family = SPW_FAMILY_CUSTOM;
    assert_int_equal(spw_model_create(&m, &mc, 16, 8, NULL), SPW_OK);
    b = spw_model_add_block(m, "embed", spw_gpt2_embed_forward);
    spw_block_use(m, b, wte = spw_model_add_param(m, "wte", 61, 32, 2, SPW_INIT_NORMAL, 0.05f));
    spw_block_use(m, b, spw_model_add_param(m, "wpe", 40, 32, 2, SPW_INIT_NORMAL, 0.05f));
    b = spw_model_add_block(m, "lender", borrowing_forward);
    spw_block_use(m, b, spw_model_add_param(m, "0.norm", 1, 32, 1, SPW_INIT_ONES, 0));
    spw_block_use(m, b, lent = spw_model_add_param(m, "0.weight", 32, 32, 2, SPW_INIT_NORMAL, 0.1f));
    b = spw_model_add_block(m, "borrower", borrowing_forward);
    spw_block_use(m, b, spw_model_add_param(m, "1.norm", 1, 32, 1, SPW_INIT_ONES, 0));
    if (borrows)
        spw_block_use(m, b, lent);
    spw_block_use(m, b, spw_model_add_param(m, "1.weight", 32, 32, 2, SPW_INIT_NORMAL, 0.1f));
    b = spw_model_add_block(m, "head", spw_gpt2_head_forward);
    spw_block_use(m, b, spw_model_add_param(m, "norm.weight", 1, 32, 1, SPW_INIT_ONES, 0));
    spw_block_use(m, b, spw_model_add_param(m, "norm.bias", 1, 32, 1, SPW_INIT_ZEROS, 0));
    spw_block_use(m, b, wte);
    return m;
}

enum fault { NO_FAULT, PARAM_TOO_MUCH, BLOCK_TOO_MUCH, USE_TOO_MUCH, USE_OF_NONE, NOT_USED, SAME_NAME, FAULTS };

static spw_model *
faulty_model(enum fault fault)
{
    spw_model *m = NULL, *good = borrowing_model(true);
    uint32_t params = good->param_count + (fault == NOT_USED) - (fault == PARAM_TOO_MUCH), again = 0;
    spw_block *b = NULL;
    assert_int_equal(spw_model_create(&m, &good->config, params, good->block_count - (fault == BLOCK_TOO_MUCH), NULL),
                     SPW_OK);
    for (uint32_t id = 0; id < good->param_count; id++) {
        const spw_param *p = &good->params[id];
        bool same = fault == SAME_NAME && strcmp(p->name, "1.norm") == 0;
        (void)spw_model_add_param(m, same ? "0.norm" : p->name, p->rows, p->cols, p->ndim, p->init, p->init_std);
    }
    if (fault == NOT_USED)
        (void)spw_model_add_param(m, "lonely", 1, 32, 1, SPW_INIT_ONES, 0);
    for (uint32_t i = 0; i < good->block_count; i++) {
        b = spw_model_add_block(m, good->blocks[i].name, good->blocks[i].forward);
        for (uint32_t k = 0; k < good->blocks[i].param_count; k++)
            spw_block_use(m, b, good->blocks[i].param_ids[k]);
    }
    for (; fault == USE_TOO_MUCH && again <= SPW_BLOCK_PARAMS_MAX; again++)
        spw_block_use(m, b, 0);
    if (fault == USE_OF_NONE)
        spw_block_use(m, b, spw_model_find_param(m, "none"));
    spw_model_destroy(good);
    return m;
}

/* A model of one's own that was put together wrongly is refused before anything is made of it, and nothing is written beside it. */
static void
test_faulty_models(void **state)
{
    static const char *const says[FAULTS] = {NULL,
                                             "norm.bias is one more than the 7",
                                             "block head is one more than the 3",
                                             "block head uses more than 2048 parameters",
                                             "block head uses parameter 4294967295 of 8",
                                             "no block uses parameter lonely",
                                             "two parameters have the name 0.norm"};
    (void)state;
    for (int fault = NO_FAULT; fault < FAULTS; fault++) {
        spw_model *m = faulty_model((enum fault)fault);
        spw_engine *e = NULL;
        spw_error err = {0};
        spw_config c;
        tiny_config(&c, SPW_STATE_SPLIT);
        c.model = m->config;
        assert_int_equal(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = m, .resumes = true}, &err),
                         fault == NO_FAULT ? SPW_OK : SPW_EINVAL);
        if (fault != NO_FAULT && strstr(err.message, says[fault]) == NULL)
            fail_msg("said %s instead of %s", err.message, says[fault]);
        spw_engine_destroy(e);
        spw_model_destroy(m);
    }
    { /* not even room for one */
        spw_model *m = NULL;
        spw_model_config mc = {.family = SPW_FAMILY_CUSTOM, .width = 32, .vocab = 61};
        assert_int_equal(spw_model_create(&m, &mc, 0, 0, NULL), SPW_OK);
        spw_block_use(m, spw_model_add_block(m, "embed", spw_gpt2_embed_forward),
                      spw_model_add_param(m, "wte", 61, 32, 2, SPW_INIT_NORMAL, 0.05f));
        assert_int_equal(spw_model_check(m, NULL), SPW_EINVAL);
        spw_model_destroy(m);
    }
}

static void
only_lent_gradient(void *ctx, spw_engine *e)
{
    float *out = ctx;
    if (spw_access_get_full(e, &(spw_access){"0.weight", SPW_ACCESS_GRAD, 0, 1}, out, NULL) != SPW_OK)
        *out = NAN;
}

/* A custom block uses a weight of the block before it: its gradient is the derivative of the loss, wherever it lies. */
static void
test_external_parameter(void **state)
{
    char dir[256];
    uint64_t want = 0;
    (void)state;
    tiny_dir_make(dir);
    for (int k = 0; k < 4; k++) {
        const spw_access at = {"0.weight", SPW_ACCESS_MASTER, 0, 1};
        int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
        double loss[2];
        float grad = 0, alone = 0, w;
        spw_config c;
        run r = {0};
        tiny_config(&c, SPW_STATE_FP32);
        place(&c, k == 0 ? SPW_TIER_DEVICE : k == 1 ? SPW_TIER_HOST : SPW_TIER_NVME, dir);
        c.run.chaos_seed = k == 3 ? 9 : 0;
        tiny_batch(0, 61, 4 * 24, tokens, targets);
        for (int borrows = 0; borrows < 2; borrows++) {
            r.model = borrowing_model(borrows);
            expect_ok(&r, spw_engine_create(&r.e,
                                            &(spw_engine_options){
                                                .config = &c, .model = r.model, .process_bytes = TINY_PROCESS_BYTES},
                                            &r.err));
            expect_ok(&r, spw_engine_init_params(r.e, 7, &r.err));
            expect_ok(&r, spw_access_get_full(r.e, &at, &w, &r.err));
            for (int side = 0; side < 2; side++) {
                float moved = w + (side ? 0.02f : -0.02f);
                expect_ok(&r, spw_access_set_full(r.e, &at, &moved, 0, &r.err));
                expect_ok(&r, spw_engine_eval(r.e, tokens, targets, 2, &loss[side], &r.err));
            }
            expect_ok(&r, spw_access_set_full(r.e, &at, &w, 0, &r.err));
            spw_engine_on_gradients(r.e, only_lent_gradient, borrows ? &grad : &alone);
            expect_ok(&r, spw_engine_step(r.e, tokens, targets, 2, 1e-2, &r.last, &r.err));
            if (!borrows)
                run_close(&r);
        }
        if (!(fabs((loss[1] - loss[0]) / 0.04 - (double)grad) < 2e-2 * fabs((double)grad) + 1e-5) || grad == alone)
            fail_msg("gradient %g (without the borrower %g), from losses %g", (double)grad, (double)alone,
                     (loss[1] - loss[0]) / 0.04);
        expect_ok(&r, spw_engine_step(r.e, tokens, targets, 2, 1e-2, &r.last, &r.err));
        want = k == 0 ? tiny_digest(r.e) : want;
        assert_int_equal(tiny_digest(r.e), want);
        run_close(&r);
    }
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- 16-bit weights */

static bool
same_file(const char *a, const char *b, const char *name)
{
    char command[1400];
    snprintf(command, sizeof command, "cmp '%s/%s' '%s/%s'", a, name, b, name);
    return system(command) == 0;
}

/* Every tensor is the weight by its name: as it is stored, or the master rounded once. */
static void
check_folder(run *r, const char *folder, spw_dtype dtype)
{
    static float want[ELEMS_MAX], got[ELEMS_MAX];
    static uint16_t rounded[ELEMS_MAX];
    bool stored = spw_state_weight_dtype(r->c.run.state_format) == dtype;
    spw_model_config mc;
    spw_hf_reader *h = NULL;
    expect_ok(r, spw_hf_config_load(&mc, folder, &r->err));
    assert_true(mc.layers == r->model->config.layers && mc.vocab == r->model->config.vocab);
    expect_ok(r, spw_hf_reader_open(&h, folder, &r->err));
    expect_ok(r, spw_hf_reader_bind(h, r->model, &r->err));
    for (uint32_t id = 0; id < r->model->param_count; id++) {
        uint64_t n = r->e->layout.places[id].elems;
        if (r->model->params[id].adapter)
            continue;
        expect_ok(r, spw_access_get_full(
                         r->e,
                         &(spw_access){r->model->params[id].name, stored ? SPW_ACCESS_WEIGHT : SPW_ACCESS_MASTER, 0, 0},
                         want, &r->err));
        spw_convert(rounded, dtype, want, SPW_F32, n);
        spw_convert(want, SPW_F32, rounded, dtype, n);
        expect_ok(r, spw_hf_read_param(h, id, 0, n, got, &r->err));
        assert_memory_equal(got, want, n * sizeof *got);
    }
    assert_int_equal(spw_hf_reader_tensor(h, 0, NULL)->dtype, dtype);
    spw_hf_reader_close(h);
}

static void
test_save_16bit(void **state)
{
    const spw_state_format formats[] = {SPW_STATE_FP32, SPW_STATE_MIXED, SPW_STATE_SPLIT_INT8, SPW_STATE_MIXED_F16};
    char dir[256], folder[300], checkpoint[300], found[SPW_PATH_BYTES];
    (void)state;
    tiny_dir_make(dir);
    snprintf(checkpoint, sizeof checkpoint, "%s/ckpt", dir);
    for (int k = 0; k < 10; k++) {
        spw_state_format f = formats[k % 4];
        spw_dtype dtype = k < 4 || k >= 8 ? SPW_BF16 : SPW_F16;
        spw_config c;
        run r;
        format_config(&c, f);
        place(&c, k % 2 == 0 ? SPW_TIER_NVME : SPW_TIER_HOST, dir);
        c.run.chaos_seed = (uint64_t)k;
        c.run.lora.rank = k >= 8 ? 2 : 0;
        run_open(&r, &c, 7);
        expect_ok(&r, run_step(&r, 0));
        snprintf(folder, sizeof folder, "%s/deeper/%d%s", dir, k, k == 1 ? "//" : "");
        expect_ok(&r, spw_engine_save_16bit(r.e, folder, dtype, &r.err));
        check_folder(&r, folder, dtype);
        expect_ok(&r, spw_checkpoint_save(r.e, &c, checkpoint, &(spw_checkpoint_state){.step = 1}, found, &r.err));
        if (dtype == spw_state_weight_dtype(f)) {
            assert_true(same_file(folder, found, "model.safetensors"));
            assert_true(same_file(folder, found, "config.json"));
        }
        if (k >= 8) {
            assert_true(same_file(folder, found, "adapter_model.safetensors"));
            assert_true(same_file(folder, found, "adapter_config.json"));
        }
        expect_ok(&r, run_step(&r, 1));
        assert_int_equal(spw_engine_save_16bit(r.e, folder, dtype, &r.err), SPW_ESYS);
        run_close(&r);
    }
    tiny_dir_remove(dir);
}

/* The folder beside the name: what a killed save left there goes, what is somebody else's is refused and stays. */
static void
test_save_beside_a_folder(void **state)
{
    char dir[256], folder[300], partial[320], left[400], notes[400];
    spw_config c;
    run r;
    (void)state;
    tiny_dir_make(dir);
    snprintf(folder, sizeof folder, "%s/out", dir);
    snprintf(partial, sizeof partial, "%s.partial", folder);
    snprintf(left, sizeof left, "%s/model.safetensors.tmp-17", partial);
    snprintf(notes, sizeof notes, "%s/notes.txt", partial);
    tiny_config(&c, SPW_STATE_SPLIT);
    run_open(&r, &c, 7);
    expect_ok(&r, spw_dir_make(partial, &r.err));
    expect_ok(&r, spw_file_write_text(left, "half of it", &r.err));
    expect_ok(&r, spw_file_write_text(notes, "mine", &r.err));
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_BF16, &r.err), SPW_ESYS);
    assert_non_null(strstr(r.err.message, "out.partial"));
    assert_non_null(strstr(r.err.message, "notes.txt"));
    assert_int_equal(access(left, F_OK) | access(notes, F_OK), 0);
    assert_int_equal(unlink(notes), 0);
    expect_ok(&r, spw_engine_save_16bit(r.e, folder, SPW_BF16, &r.err));
    assert_int_not_equal(access(partial, F_OK), 0);
    run_close(&r);
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- ranks */

/* In a forked rank no assertion may fail. */
#define NEED(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return SPW_RAISE(err, SPW_EINVAL, "line %d: %s", __LINE__, #condition);                                    \
    } while (0)

typedef struct world {
    spw_config c;
    bool local;     /* every rank sets its own stretch, instead of all what rank 1 has */
    char save[300]; /* "": nowhere */
    image *out;     /* shared */
    double *losses; /* shared */
} world;

static float
new_value(uint32_t id, uint64_t i)
{
    return 0.001f * (float)((i * 7 + id) % 101) - 0.03f;
}

static spw_status
rank_step(spw_engine *e, uint32_t rank, uint64_t s, double *loss, spw_error *err)
{
    int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
    uint64_t each = e->config.accumulation, n = e->config.micro_batch * e->config.data.seq_length;
    spw_step_result r;
    tiny_batch(s, 61, MICRO * n, tokens, targets);
    for (uint64_t i = 0; i < each; i++) {
        memmove(tokens + i * n, tokens + (i * WORLD + rank) * n, n * sizeof *tokens);
        memmove(targets + i * n, targets + (i * WORLD + rank) * n, n * sizeof *targets);
    }
    SPW_TRY(spw_engine_step(e, tokens, targets, (uint32_t)each, e->config.optimizer.lr, &r, err));
    *loss = r.loss;
    return SPW_OK;
}

/* What every rank reads is what all of them find in their chunks. */
static spw_status
check_reads(spw_engine *e, image *shared, uint32_t rank, spw_error *err)
{
    static float got[ELEMS_MAX];
    for (uint32_t r = 0; r < WORLD; r++) { /* in turns: the image knows one engine, at an address of that rank's own */
        double turn = 0;
        if (r == rank) {
            shared->e = e;
            SPW_TRY(spw_store_sweep(e->store, SPW_SWEEP_VISIT, take_chunk, shared, err));
        }
        SPW_TRY(spw_engine_sum(e, &turn, 1, err));
    }
    for (uint32_t id = 0; id < e->model->param_count; id++) {
        const spw_place *at = &e->layout.places[id];
        uint64_t base = e->layout.bases[at->unit_idx] + at->first;
        for (int p = 0; p < PARTS; p++) {
            spw_access a = {e->model->params[id].name, (spw_access_part)p, 0, 0};
            spw_stretch held;
            SPW_TRY(spw_access_get_full(e, &a, got, err));
            NEED(memcmp(got, shared->part[p] + base, at->elems * sizeof *got) == 0);
            SPW_TRY(spw_access_get_local(e, &a, got, &held, err));
            NEED(held.first + held.count <= at->elems);
            NEED(memcmp(got, shared->part[p] + base + held.first, held.count * sizeof *got) == 0);
        }
    }
    return SPW_OK;
}

/* Masters of every fourth parameter, and a moment. */
static spw_status
change(const world *w, spw_engine *e, uint32_t rank, spw_error *err)
{
    static float values[ELEMS_MAX];
    for (uint32_t id = 0; id < e->model->param_count; id++) {
        uint64_t n = e->layout.places[id].elems;
        for (int p = SPW_ACCESS_MASTER; p <= (id == 3 ? SPW_ACCESS_EXP_AVG : SPW_ACCESS_MASTER); p++) {
            spw_access a = {e->model->params[id].name, (spw_access_part)p, n > 64 ? 17 : 0, n > 64 ? n - 40 : 0};
            spw_stretch held;
            uint64_t count = a.count > 0 ? a.count : n;
            if (id % 4 != 3)
                continue;
            for (uint64_t i = 0; i < count; i++)
                values[i] = new_value(id, a.first + i);
            if (w->local) {
                SPW_TRY(spw_access_get_local(e, &a, NULL, &held, err));
                for (uint64_t i = 0; i < held.count; i++)
                    values[i] = new_value(id, held.first + i);
                SPW_TRY(spw_access_set_local(e, &a, values, &held, err));
            } else {
                SPW_TRY(spw_access_set_full(e, &a, rank == 1 ? values : NULL, 1, err));
            }
        }
    }
    return SPW_OK;
}

static spw_status
check_scope(spw_engine *e, uint32_t rank, spw_error *err)
{
    const char *names[] = {"h.0.mlp.c_proj.weight", "ln_f.bias"};
    static float got[ELEMS_MAX];
    spw_gathered *g;
    uint64_t n;
    SPW_TRY(spw_gathered_begin(&g, e, names, 2, err));
    for (uint32_t i = 0; i < 2; i++) {
        float *v = spw_gathered_values(g, i, &n);
        for (uint64_t k = 0; k < n; k++)
            v[k] = rank == 1 ? v[k] * 0.5f + 0.01f : 1000.0f; /* only rank 1's are written back */
        if (rank == 1)
            memcpy(got + i * 8192, v, n * sizeof *v);
    }
    SPW_TRY(spw_gathered_end(g, 1, err));
    for (uint32_t i = 0; i < 2; i++) {
        static float back[ELEMS_MAX];
        SPW_TRY(spw_access_get_full(e, &(spw_access){names[i], SPW_ACCESS_MASTER, 0, 0}, back, err));
        NEED(rank != 1 || memcmp(back, got + i * 8192, (i == 0 ? 4096 : 32) * sizeof *back) == 0);
        NEED(back[0] < 100);
    }
    return SPW_OK;
}

/* What one rank gets wrong is refused by all, and nothing has come out of step. */
static spw_status
check_refusals(spw_engine *e, uint32_t rank, spw_error *err)
{
    float values[64];
    spw_error own = {0};
    spw_access a = {rank == 2 ? "wte.wait" : "wte.weight", SPW_ACCESS_MASTER, 0, 8};
    NEED(spw_access_get_full(e, &a, values, &own) == SPW_EINVAL);
    NEED(strstr(own.message, "rank 2: the model has no parameter") != NULL);
    a = (spw_access){"wte.weight", SPW_ACCESS_MASTER, rank == 1, 8};
    NEED(spw_access_set_full(e, &a, values, 0, &own) == SPW_EINVAL);
    NEED(strstr(own.message, "rank 1 asks for something else than rank 0") != NULL);
    a.first = 0;
    NEED(spw_access_set_full(e, &a, rank == 2 ? NULL : values, 2, &own) == SPW_EINVAL);
    NEED(strstr(own.message, "rank 2: no values") != NULL);
    a.part = SPW_ACCESS_GRAD;
    NEED(spw_access_get_full(e, &a, values, &own) == SPW_ESTALE);
    return SPW_OK;
}

typedef struct rank_gradients {
    double squares;
    spw_status st;
    spw_error err;
} rank_gradients;

static void
take_rank_gradients(void *ctx, spw_engine *e)
{
    rank_gradients *g = ctx;
    static float values[ELEMS_MAX];
    g->squares = 0;
    for (uint32_t id = 0; id < e->model->param_count && g->st == SPW_OK; id++) {
        g->st =
            spw_access_get_full(e, &(spw_access){e->model->params[id].name, SPW_ACCESS_GRAD, 0, 0}, values, &g->err);
        for (uint64_t i = 0; i < e->layout.places[id].elems; i++)
            g->squares += (double)values[i] * values[i];
    }
}

static spw_status
run_rank(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    world *w = ctx;
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    rank_gradients g = {0};
    double loss;
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    SPW_TRY(spw_model_build(&model, &mc, err));
    SPW_TRY(spw_engine_create(
        &e,
        &(spw_engine_options){
            .config = &w->c, .model = model, .comm = comm, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
        err));
    SPW_TRY(spw_engine_init_params(e, 7, err));
    for (uint64_t s = 0; s < 6; s++) {
        if (s == 2)
            SPW_TRY(change(w, e, rank, err));
        if (s == 3)
            SPW_TRY(check_scope(e, rank, err));
        if (s == 3)
            SPW_TRY(check_refusals(e, rank, err));
        if (s == 4)
            SPW_TRY(spw_engine_release_gathered(e, err));
        spw_engine_on_gradients(e, s == 4 ? take_rank_gradients : NULL, &g);
        SPW_TRY(rank_step(e, rank, s, &loss, err));
        if (rank == 0)
            w->losses[s] = loss;
        if (s == 4)
            NEED(g.st == SPW_OK && g.squares > 0);
        if (s == 4 && rank == 0)
            w->losses[7] = g.squares;
    }
    SPW_TRY(check_reads(e, w->out, rank, err));
    if (w->save[0] != '\0')
        SPW_TRY(spw_engine_save_16bit(e, w->save, SPW_BF16, err));
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return SPW_OK;
}

/* Stages, placements, set together or each its own: the same losses, gradients, state and files. */
static void
test_ranks(void **state)
{
    const struct {
        uint32_t stage;
        spw_tier param, optimizer;
        bool local;
        uint64_t chaos;
        uint32_t kept; /* by how many ranks, of what they gathered */
    } runs[] = {{0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, false, 0, 0}, {0, SPW_TIER_DEVICE, SPW_TIER_DEVICE, true, 3, 0},
                {2, SPW_TIER_DEVICE, SPW_TIER_HOST, false, 0, 0},   {2, SPW_TIER_DEVICE, SPW_TIER_NVME, true, 4, 0},
                {3, SPW_TIER_HOST, SPW_TIER_HOST, false, 0, 0},     {3, SPW_TIER_NVME, SPW_TIER_NVME, true, 0, WORLD},
                {3, SPW_TIER_NVME, SPW_TIER_NVME, false, 5, 0},     {3, SPW_TIER_HOST, SPW_TIER_HOST, true, 6, 0},
                {3, SPW_TIER_HOST, SPW_TIER_HOST, false, 7, WORLD}};
    image *first = ranks_share(sizeof *first), *other = ranks_share(sizeof *other);
    double *losses[2] = {ranks_share(4096), ranks_share(4096)};
    char dir[256], saved[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(saved, sizeof saved, "%s/0", dir);
    for (size_t k = 0; k < sizeof runs / sizeof runs[0]; k++) {
        world w = {.local = runs[k].local, .out = k == 0 ? first : other, .losses = losses[k > 0]};
        ranks_config(&w.c, SPW_STATE_SPLIT);
        ranks_use_dir(&w.c, dir);
        w.c.micro_batch = 1;
        w.c.run.ranks = WORLD;
        w.c.accumulation = MICRO / WORLD;
        w.c.train_batch_size = MICRO;
        w.c.zero.stage = runs[k].stage;
        w.c.zero.offload_param = runs[k].param;
        w.c.zero.offload_optimizer = runs[k].optimizer;
        w.c.run.chaos_seed = runs[k].chaos;
        w.c.zero.hpz_partition_size = runs[k].kept;
        snprintf(w.save, sizeof w.save, "%s/%zu", dir, k);
        ranks_run(WORLD, &(spw_comm_options){.chaos_seed = runs[k].chaos}, run_rank, &w);
        assert_memory_equal(losses[0], losses[k > 0], 8 * sizeof(double));
        assert_true(same_file(saved, w.save, "model.safetensors"));
        for (int p = 0; k > 0 && p < PARTS; p++)
            assert_memory_equal(first->part[p], other->part[p], sizeof first->part[p]);
        memset(other->part, 0, sizeof other->part);
    }
    tiny_dir_remove(dir);
    ranks_unshare(first, sizeof *first);
    ranks_unshare(other, sizeof *other);
    ranks_unshare(losses[0], 4096);
    ranks_unshare(losses[1], 4096);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_placement),
        cmocka_unit_test(test_between_steps),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_skipped),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_what_is_not_there),
        cmocka_unit_test(test_gathered),
        cmocka_unit_test(test_gathered_before_a_load),
        cmocka_unit_test(test_faulty_models),
        cmocka_unit_test(test_release),
        cmocka_unit_test(test_external_parameter),
        cmocka_unit_test(test_save_16bit),
        cmocka_unit_test(test_save_beside_a_folder),
        cmocka_unit_test(test_ranks),
    };
    return cmocka_run_group_tests_name("access", tests, NULL, NULL);
}
