/*
 * State by the name of a parameter: what is read is what is there, what is set is what training goes on from, nothing else
 * changes and nothing else moves; in every placement and format.
 */
#include "lib_access.h"
#include "lib_tiny.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

/* ---------------------------------------------------------------- all of the state, as a sweep sees it */

static access_image *
new_image(const spw_engine *e)
{
    access_image *im = spw_mem_zalloc(sizeof *im);
    assert_non_null(im);
    assert_true(e->layout.elems <= ELEMS_MAX && e->layout.chunk_count <= 512);
    im->e = e;
    assert_int_equal(spw_store_sweep(e->store, SPW_SWEEP_VISIT, access_take_chunk, im, NULL), SPW_OK);
    return im;
}

static const float *
image_at(const access_image *im, uint32_t id, int part)
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
assert_get_is_image(access_run *r, const access_image *im)
{
    static float got[ELEMS_MAX];
    for (uint32_t id = 0; id < r->model->param_count; id++) {
        uint64_t elems = r->e->layout.places[id].elems;
        for (int p = 0; p < PARTS; p++) {
            spw_access a = {r->model->params[id].name, (spw_access_part)p, 0, 0};
            spw_stretch held;
            access_expect_ok(r, spw_access_get_full(r->e, &a, got, &r->err));
            assert_memory_equal(got, image_at(im, id, p), elems * sizeof(float));
            if (elems < 40)
                continue;
            a.first = 7;
            a.count = elems - 20;
            access_expect_ok(r, spw_access_get_local(r->e, &a, got, &held, &r->err));
            assert_true(held.first == 7 && held.count == elems - 20);
            assert_memory_equal(got, image_at(im, id, p) + 7, held.count * sizeof(float));
        }
    }
}

static void
write_image(access_run *r, const access_image *im)
{
    for (uint32_t id = 0; id < r->model->param_count; id++) {
        for (int p = 0; p < SPW_ACCESS_WEIGHT; p++)
            access_expect_ok(r, spw_access_set_full(r->e,
                                                    &(spw_access){r->model->params[id].name, (spw_access_part)p, 0, 0},
                                                    image_at(im, id, p), 0, &r->err));
    }
}

/* Elements first to last of one part of one parameter change; nothing else does, and no other chunk moves. */
static void
assert_edit_is_narrow(access_run *r, const char *name, spw_access_part part, uint64_t first, uint64_t count, bool exact)
{
    uint32_t id = spw_model_find_param(r->model, name), wb = spw_state_weight_bytes(r->c.run.state_format);
    const spw_place *at = &r->e->layout.places[id];
    spw_access a = {name, part, first, count};
    float *values = spw_mem_calloc(count, sizeof *values), *got = spw_mem_calloc(count, sizeof *got);
    access_image *before = new_image(r->e), *after;
    spw_store_stats s0, s1, s2;
    uint64_t want = 0, touched = 0;
    access_expect_ok(r, spw_engine_release_gathered(r->e, &r->err)); /* nothing is fetched ahead meanwhile */
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
    access_expect_ok(r, spw_access_set_full(r->e, &a, values, 0, &r->err));
    s1 = quiet_stats(r->e);
    assert_int_equal(s1.nvme_write_bytes - s0.nvme_write_bytes, want);
    assert_true(s1.nvme_read_bytes - s0.nvme_read_bytes <= want); /* weights may still be in a slot */
    access_expect_ok(r, spw_access_get_full(r->e, &a, got, &r->err));
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
        access_image *im;
        access_run a;
        format_config(&c, (spw_state_format)f);
        access_run_open(&a, &c, 7);
        for (uint64_t s = 0; s < 3; s++)
            access_expect_ok(&a, access_run_step(&a, s));
        im = new_image(a.e);
        assert_get_is_image(&a, im);
        start = tiny_digest(a.e);
        for (uint64_t s = 3; s < 5; s++)
            access_expect_ok(&a, access_run_step(&a, s));
        end = tiny_digest(a.e);
        for (int k = 0; k < 5; k++) {
            access_run b;
            format_config(&c, (spw_state_format)f);
            access_place(&c, tiers[k], dir);
            c.run.weight_slots = c.run.record_slots = k == 3 ? 1 : 0;
            c.run.chaos_seed = k >= 3 ? 20 + (uint64_t)(k + f) : 0;
            c.run.optimizer_threads = 1 + (uint32_t)k;
            access_run_open(&b, &c, 8);
            access_expect_ok(&b, access_run_step(&b, 9)); /* the device holds what is about to be wrong */
            write_image(&b, im);
            spw_engine_set_updates(b.e, 3);
            spw_engine_set_loss_scaler(b.e, &(spw_loss_scaler){.scale = 1024, .hysteresis = 1, .steps = 3});
            assert_get_is_image(&b, im);
            assert_int_equal(tiny_digest(b.e), start);
            for (uint64_t s = 3; s < 5; s++)
                access_expect_ok(&b, access_run_step(&b, s));
            assert_memory_equal(&a.last.loss, &b.last.loss, sizeof a.last.loss);
            assert_int_equal(tiny_digest(b.e), end);
            assert_edit_is_narrow(&b, "h.1.mlp.c_fc.weight", SPW_ACCESS_MASTER, 1000, 1500, exact);
            assert_edit_is_narrow(&b, "h.2.attn.c_attn.weight", SPW_ACCESS_EXP_AVG, 0, 3072, exact);
            assert_edit_is_narrow(&b, "h.0.ln_1.bias", SPW_ACCESS_EXP_AVG_SQ, 3, 1, exact);
            access_expect_ok(&b, access_run_step(&b, 5)); /* checksums of what was written hold */
            access_run_close(&b);
        }
        spw_mem_free(im);
        access_run_close(&a);
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
        access_run r;
        tiny_config(&c, SPW_STATE_SPLIT);
        c.run.chunk_elems = 4096;
        access_place(&c, k % 3 == 0 ? SPW_TIER_NVME : k % 3 == 1 ? SPW_TIER_HOST : SPW_TIER_DEVICE, dir);
        c.run.weight_slots = c.run.record_slots = k % 3 == 0 ? 1 + (uint32_t)k / 3 : 0;
        c.run.chaos_seed = k > 0 ? 70 + (uint64_t)k : 0;
        c.gradient_clipping = 0;
        access_run_open(&r, &c, 3);
        for (uint64_t s = 0; s < 6; s++) {
            const char *name = s % 2 == 0 ? "wte.weight" : "h.1.mlp.c_proj.weight";
            spw_access a = {name, SPW_ACCESS_MASTER, 100, 900};
            float values[900];
            spw_stretch held;
            access_expect_ok(&r, access_run_step(&r, s));
            access_expect_ok(&r, spw_access_get_full(r.e, &a, values, &r.err));
            for (int i = 0; i < 900; i++)
                values[i] *= 0.5f;
            if (k == 2)
                access_expect_ok(&r, spw_engine_drain(r.e, &r.err));
            access_expect_ok(&r, spw_access_set_local(r.e, &a, values, &held, &r.err));
            if (s == 4)
                access_expect_ok(&r, spw_engine_release_gathered(r.e, &r.err));
        }
        digest = tiny_digest(r.e);
        want = k == 0 ? digest : want;
        assert_int_equal(digest, want);
        access_run_close(&r);
    }
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- gradients */

typedef struct gradients {
    access_run *r;
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
        access_expect_ok(g->r,
                         spw_access_get_full(e, &(spw_access){g->r->model->params[id].name, SPW_ACCESS_GRAD, 0, 0},
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
            access_run r;
            format_config(&c, k == 3 ? SPW_STATE_MIXED_F16 : SPW_STATE_FP32);
            c.gradient_clipping = k < 2 ? 0.5 : 0;
            c.run.micro_batches_per_pass = k == 1 ? 1 : 0;
            c.run.grad_dtype = k == 4 ? SPW_BF16 : SPW_F32;
            c.run.chaos_seed = k == 5 ? 4 : 0;
            access_run_open(&r, &c, 7);
            g.r = &r;
            if (hook)
                spw_engine_on_gradients(r.e, take_gradients, &g);
            for (uint64_t s = 0; s < 3; s++) {
                float value;
                access_expect_ok(&r, access_run_step(&r, s));
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
            access_run_close(&r);
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
    access_run r;
    (void)state;
    tiny_config(&c, SPW_STATE_SPLIT);
    access_run_open(&r, &c, 7);
    access_expect_ok(&r, access_run_step(&r, 0));
    access_expect_ok(&r,
                     spw_access_get_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, values, &r.err));
    access_expect_ok(&r,
                     spw_access_set_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, &nan, 0, &r.err));
    digest = tiny_digest(r.e);
    access_expect_ok(&r, access_run_step(&r, 1));
    assert_true(r.last.skipped);
    assert_int_equal(tiny_digest(r.e), digest);
    access_expect_ok(
        &r, spw_access_set_full(r.e, &(spw_access){"ln_f.weight", SPW_ACCESS_MASTER, 4, 1}, values, 0, &r.err));
    access_expect_ok(&r, spw_access_get_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 0}, values, &r.err));
    for (int i = 0; i < 61 * 32; i++)
        found = found || !isfinite(values[i]);
    assert_true(found);
    access_expect_ok(&r, access_run_step(&r, 1));
    assert_false(r.last.skipped);
    assert_int_equal(spw_access_get_full(r.e, &(spw_access){"wte.weight", SPW_ACCESS_GRAD, 0, 0}, values, &r.err),
                     SPW_ESTALE);
    access_run_close(&r);
}

/* ---------------------------------------------------------------- errors */

static void
expect_error(access_run *r, spw_access a, bool set, spw_status st, const char *says)
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
    access_run r;
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_MIXED);
    access_run_open(&r, &c, 7);
    access_expect_ok(&r, access_run_step(&r, 0));
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
    access_expect_ok(&r, spw_access_find(&a, r.e, "h.1.ln_2.bias", "exp_avg_sq", &r.err));
    assert_true(a.part == SPW_ACCESS_EXP_AVG_SQ && a.first == 0 && a.count == 32);
    assert_int_equal(spw_gathered_begin(&g, r.e, twice, 2, &r.err), SPW_EINVAL);
    assert_null(g);
    access_expect_ok(&r, spw_gathered_begin(&g, r.e, twice, 1, &r.err));
    assert_int_equal(spw_gathered_end(g, 1, &r.err), SPW_EINVAL);
    snprintf(folder, sizeof folder, "%s/ckpt", dir);
    access_expect_ok(&r, spw_checkpoint_begin(&job, r.e, &c, folder, &(spw_checkpoint_state){.step = 1}, &r.err));
    for (int set = 0; set < 2; set++)
        expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_MASTER, 0, 0}, set, SPW_EINVAL, "snapshot is under way");
    snprintf(folder, sizeof folder, "%s/out", dir);
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_BF16, &r.err), SPW_EINVAL);
    access_expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_F32, &r.err), SPW_EINVAL);
    assert_int_equal(spw_engine_save_16bit(r.e, dir, SPW_BF16, &r.err), SPW_ESYS);
    assert_int_not_equal(spw_engine_save_16bit(r.e, "/proc/none/out", SPW_BF16, &r.err), SPW_OK);
    assert_int_equal(tiny_digest(r.e), digest);
    access_expect_ok(&r, spw_gathered_begin(&g, r.e, twice, 1, &r.err));
    access_expect_ok(&r, access_run_step(&r, 1));
    digest = tiny_digest(r.e);
    assert_int_equal(spw_gathered_end(g, 0, &r.err), SPW_ESTALE);
    assert_int_equal(tiny_digest(r.e), digest);
    access_run_close(&r);
    tiny_dir_remove(dir);
}

/* What fills the engine anew makes gathered copies old, also where the number of updates stays. */
static void
test_gathered_before_a_load(void **state)
{
    static const char *const names[] = {"wte.weight"};
    char dir[256], found[SPW_PATH_BYTES], file[SPW_PATH_BYTES + 32];
    spw_config c;
    access_run r = {0};
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_SPLIT);
    access_run_open(&r, &c, 7);
    access_expect_ok(&r, spw_checkpoint_save(r.e, &c, dir, &(spw_checkpoint_state){0}, found, &r.err));
    snprintf(file, sizeof file, "%s/model.safetensors", found);
    for (int way = 0; way < 3; way++) {
        spw_gathered *g;
        uint64_t digest;
        access_expect_ok(&r, spw_engine_init_params(r.e, 8, &r.err));
        access_expect_ok(&r, spw_gathered_begin(&g, r.e, names, 1, &r.err));
        spw_gathered_values(g, 0, NULL)[0] = 5;
        access_expect_ok(&r, way == 0   ? spw_engine_init_params(r.e, 9, &r.err)
                             : way == 1 ? spw_engine_load_weights(r.e, file, &r.err)
                                        : spw_checkpoint_load(r.e, found, &r.err));
        assert_int_equal(spw_engine_updates(r.e), 0);
        digest = tiny_digest(r.e);
        assert_int_equal(spw_gathered_end(g, 0, &r.err), SPW_ESTALE);
        assert_int_equal(tiny_digest(r.e), digest);
    }
    access_run_close(&r);
    tiny_dir_remove(dir);
}

/* Lion has one moment; a frozen parameter has its weight alone, and an engine for inference nothing but weights. */
static void
test_what_is_not_there(void **state)
{
    float values[32];
    spw_model_config mc;
    spw_config c;
    access_run r = {0};
    (void)state;
    tiny_config(&c, SPW_STATE_SPLIT);
    snprintf(c.optimizer.type, sizeof c.optimizer.type, "Lion");
    access_run_open(&r, &c, 7);
    expect_error(&r, (spw_access){"wte.weight", SPW_ACCESS_EXP_AVG_SQ, 0, 0}, false, SPW_EINVAL, "keeps 1 moments");
    access_expect_ok(&r,
                     spw_access_get_full(r.e, &(spw_access){"ln_f.bias", SPW_ACCESS_EXP_AVG, 0, 0}, values, &r.err));
    access_run_close(&r);
    for (int inference = 0; inference < 2; inference++) {
        tiny_config(&c, SPW_STATE_SPLIT);
        tiny_model_config(&mc, SPW_FAMILY_GPT2);
        r.c = c;
        access_expect_ok(&r, spw_model_build(&r.model, &mc, &r.err));
        assert_true(inference || spw_model_freeze(r.model, "h.1.*") > 0);
        access_expect_ok(&r, spw_engine_create(&r.e,
                                               &(spw_engine_options){.config = &c,
                                                                     .model = r.model,
                                                                     .inference = inference,
                                                                     .losses = true,
                                                                     .process_bytes = TINY_PROCESS_BYTES},
                                               &r.err));
        access_expect_ok(&r, spw_engine_init_params(r.e, 7, &r.err));
        for (int set = 0; set < 2; set++)
            expect_error(&r, (spw_access){"h.1.ln_1.weight", SPW_ACCESS_EXP_AVG, 0, 0}, set, SPW_EINVAL,
                         inference ? "for inference" : "frozen");
        expect_error(&r, (spw_access){"h.1.ln_1.weight", SPW_ACCESS_GRAD, 0, 0}, false, SPW_EINVAL, "has no gradient");
        for (int i = 0; i < 32; i++)
            values[i] = 0.5f + (float)i / 64;
        access_expect_ok(
            &r, spw_access_set_full(r.e, &(spw_access){"h.1.ln_1.weight", SPW_ACCESS_MASTER, 0, 0}, values, 0, &r.err));
        for (int p = 0; p < 2; p++) {
            float got[32];
            access_expect_ok(
                &r, spw_access_get_full(
                        r.e, &(spw_access){"h.1.ln_1.weight", p == 0 ? SPW_ACCESS_MASTER : SPW_ACCESS_WEIGHT, 0, 0},
                        got, &r.err));
            assert_memory_equal(got, values, sizeof got);
        }
        access_run_close(&r);
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
        access_run r;
        tiny_config(&c, SPW_STATE_FP32);
        access_run_open(&r, &c, 7);
        access_expect_ok(&r, access_run_step(&r, 0));
        digest = tiny_digest(r.e);
        access_expect_ok(&r, spw_gathered_begin(&g, r.e, names, 2, &r.err));
        for (uint32_t i = 0; i < 2; i++) {
            float *values = spw_gathered_values(g, i, &elems);
            assert_int_equal(elems, i == 0 ? 4096 : 32);
            for (uint64_t k = 0; k < elems; k++)
                values[k] = (float)k / 4096;
        }
        access_expect_ok(&r, spw_gathered_end(g, drop ? SPW_GATHERED_DROP : 0, &r.err));
        access_expect_ok(&r, spw_access_get_full(r.e, &(spw_access){names[0], SPW_ACCESS_MASTER, 0, 0}, got, &r.err));
        assert_true(drop ? tiny_digest(r.e) == digest : got[4095] == 4095.0f / 4096);
        access_run_close(&r);
    }
    access_expect_ok(&(access_run){0}, spw_gathered_end(NULL, SPW_GATHERED_DROP, NULL));
}

/* What was on the device comes again, and computes the same. */
static void
test_release(void **state)
{
    uint64_t h2d[2], digest[2];
    (void)state;
    for (int release = 0; release < 2; release++) {
        spw_config c;
        access_run r;
        tiny_config(&c, SPW_STATE_SPLIT);
        access_run_open(&r, &c, 7);
        for (uint64_t s = 0; s < 3; s++) {
            access_expect_ok(&r, access_run_step(&r, s));
            access_expect_ok(&r, spw_engine_drain(r.e, &r.err));
            if (s == 1) { /* between, an evaluation that fetches all and changes nothing */
                int32_t tokens[BATCH_MAX], targets[BATCH_MAX];
                double loss;
                tiny_batch(0, 61, 2 * 24, tokens, targets);
                access_expect_ok(&r, spw_engine_eval(r.e, tokens, targets, 1, &loss, &r.err));
                if (release)
                    access_expect_ok(&r, spw_engine_release_gathered(r.e, &r.err));
            }
        }
        h2d[release] = quiet_stats(r.e).h2d_bytes;
        digest[release] = tiny_digest(r.e);
        access_run_close(&r);
    }
    assert_int_equal(digest[0], digest[1]);
    assert_true(h2d[1] > h2d[0]);
}

/* ---------------------------------------------------------------- 16-bit weights */

/* Every tensor is the weight by its name: as it is stored, or the master rounded once. */
static void
check_folder(access_run *r, const char *folder, spw_dtype dtype)
{
    static float want[ELEMS_MAX], got[ELEMS_MAX];
    static uint16_t rounded[ELEMS_MAX];
    bool stored = spw_state_weight_dtype(r->c.run.state_format) == dtype;
    spw_model_config mc;
    spw_hf_reader *h = NULL;
    access_expect_ok(r, spw_hf_config_load(&mc, folder, &r->err));
    assert_true(mc.layers == r->model->config.layers && mc.vocab == r->model->config.vocab);
    access_expect_ok(r, spw_hf_reader_open(&h, folder, &r->err));
    access_expect_ok(r, spw_hf_reader_bind(h, r->model, &r->err));
    for (uint32_t id = 0; id < r->model->param_count; id++) {
        uint64_t n = r->e->layout.places[id].elems;
        if (r->model->params[id].adapter)
            continue;
        access_expect_ok(r, spw_access_get_full(r->e,
                                                &(spw_access){r->model->params[id].name,
                                                              stored ? SPW_ACCESS_WEIGHT : SPW_ACCESS_MASTER, 0, 0},
                                                want, &r->err));
        spw_convert(rounded, dtype, want, SPW_F32, n);
        spw_convert(want, SPW_F32, rounded, dtype, n);
        access_expect_ok(r, spw_hf_read_param(h, id, 0, n, got, &r->err));
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
        access_run r;
        format_config(&c, f);
        access_place(&c, k % 2 == 0 ? SPW_TIER_NVME : SPW_TIER_HOST, dir);
        c.run.chaos_seed = (uint64_t)k;
        c.run.lora.rank = k >= 8 ? 2 : 0;
        access_run_open(&r, &c, 7);
        access_expect_ok(&r, access_run_step(&r, 0));
        snprintf(folder, sizeof folder, "%s/deeper/%d%s", dir, k, k == 1 ? "//" : "");
        access_expect_ok(&r, spw_engine_save_16bit(r.e, folder, dtype, &r.err));
        check_folder(&r, folder, dtype);
        access_expect_ok(&r,
                         spw_checkpoint_save(r.e, &c, checkpoint, &(spw_checkpoint_state){.step = 1}, found, &r.err));
        if (dtype == spw_state_weight_dtype(f)) {
            assert_true(access_same_file(folder, found, "model.safetensors"));
            assert_true(access_same_file(folder, found, "config.json"));
        }
        if (k >= 8) {
            assert_true(access_same_file(folder, found, "adapter_model.safetensors"));
            assert_true(access_same_file(folder, found, "adapter_config.json"));
        }
        access_expect_ok(&r, access_run_step(&r, 1));
        assert_int_equal(spw_engine_save_16bit(r.e, folder, dtype, &r.err), SPW_ESYS);
        access_run_close(&r);
    }
    tiny_dir_remove(dir);
}

/* A master that fp16 would make infinity of ends the save and not the training; the largest that it holds goes there. */
static void
test_save_beyond_fp16(void **state)
{
    const spw_access a = {"ln_f.weight", SPW_ACCESS_MASTER, 4, 1};
    const float most = 65519, beyond = -65520;
    char dir[256], folder[300];
    spw_config c;
    access_run r;
    (void)state;
    tiny_dir_make(dir);
    snprintf(folder, sizeof folder, "%s/out", dir);
    tiny_config(&c, SPW_STATE_SPLIT);
    access_run_open(&r, &c, 7);
    access_expect_ok(&r, spw_access_set_full(r.e, &a, &beyond, 0, &r.err));
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_F16, &r.err), SPW_EINVAL);
    assert_non_null(strstr(r.err.message, "ln_f.weight, element 4, is -65520, and fp16 ends at 65504"));
    assert_int_not_equal(access(folder, F_OK), 0);
    access_expect_ok(&r, spw_access_set_full(r.e, &a, &most, 0, &r.err));
    access_expect_ok(&r, spw_engine_save_16bit(r.e, folder, SPW_F16, &r.err));
    access_expect_ok(&r, access_run_step(&r, 0));
    access_run_close(&r);
    tiny_dir_remove(dir);
}

/* The folder beside the name: what a killed save left there goes, what is somebody else's is refused and stays. */
static void
test_save_beside_a_folder(void **state)
{
    char dir[256], folder[300], partial[320], left[400], notes[400];
    spw_config c;
    access_run r;
    (void)state;
    tiny_dir_make(dir);
    snprintf(folder, sizeof folder, "%s/out", dir);
    snprintf(partial, sizeof partial, "%s.partial", folder);
    snprintf(left, sizeof left, "%s/model.safetensors.tmp-17", partial);
    snprintf(notes, sizeof notes, "%s/notes.txt", partial);
    tiny_config(&c, SPW_STATE_SPLIT);
    access_run_open(&r, &c, 7);
    access_expect_ok(&r, spw_dir_make(partial, &r.err));
    access_expect_ok(&r, spw_file_write_text(left, "half of it", &r.err));
    access_expect_ok(&r, spw_file_write_text(notes, "mine", &r.err));
    assert_int_equal(spw_engine_save_16bit(r.e, folder, SPW_BF16, &r.err), SPW_ESYS);
    assert_non_null(strstr(r.err.message, "out.partial"));
    assert_non_null(strstr(r.err.message, "notes.txt"));
    assert_int_equal(access(left, F_OK) | access(notes, F_OK), 0);
    assert_int_equal(unlink(notes), 0);
    access_expect_ok(&r, spw_engine_save_16bit(r.e, folder, SPW_BF16, &r.err));
    assert_int_not_equal(access(partial, F_OK), 0);
    access_run_close(&r);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_placement),  cmocka_unit_test(test_between_steps),
        cmocka_unit_test(test_gradients),        cmocka_unit_test(test_skipped),
        cmocka_unit_test(test_errors),           cmocka_unit_test(test_what_is_not_there),
        cmocka_unit_test(test_gathered),         cmocka_unit_test(test_gathered_before_a_load),
        cmocka_unit_test(test_release),          cmocka_unit_test(test_save_16bit),
        cmocka_unit_test(test_save_beyond_fp16), cmocka_unit_test(test_save_beside_a_folder),
    };
    return cmocka_run_group_tests_name("access", tests, NULL, NULL);
}
