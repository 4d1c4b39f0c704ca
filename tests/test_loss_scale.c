/*
 * fp16: the loss scale as its keys define it, and training with it: overflows are skipped without a changed byte, the scale is
 * the same after a resume, where state lives changes nothing.
 */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

/* One letter a step: o an overflow, . none; then the exponent of the scale after each, as DeepSpeed 0.19.8's own DynamicLossScaler has it. */
static void
follow(const char *name, const spw_config *c, const char *steps, const int *exponents)
{
    spw_loss_scaler s;
    spw_loss_scale_init(&s, c);
    for (int i = 0; steps[i] != '\0'; i++) {
        spw_loss_scale_update(&s, c, steps[i] == 'o');
        if (s.scale != ldexp(1, exponents[i]))
            fail_msg("%s: after step %d the scale is %g, expected 2^%d", name, i + 1, s.scale, exponents[i]);
    }
}

/* Window, hysteresis, lowest scale, fixed scale. */
static void
test_keys(void **state)
{
    spw_config c = {.fp16 = true};
    (void)state;
    c.loss_scale.initial_power = 8;
    c.loss_scale.window = 3;
    c.loss_scale.hysteresis = 1;
    c.loss_scale.min = 1;
    follow("window", &c, "....o....o..", (int[]){8, 8, 8, 9, 8, 8, 8, 8, 9, 8, 8, 8});
    follow("windows", &c, ".......", (int[]){8, 8, 8, 9, 9, 9, 10});
    c.loss_scale.hysteresis = 3;
    follow("hysteresis", &c, "ooo.oo", (int[]){8, 8, 7, 7, 6, 5});
    follow("forgotten when it rises", &c, "oo....oo", (int[]){8, 8, 8, 8, 8, 9, 9, 9});
    follow("not forgotten by a step", &c, "oo.o", (int[]){8, 8, 8, 7});
    c.loss_scale.consecutive_hysteresis = true;
    follow("consecutive", &c, "oo.oo", (int[]){8, 8, 8, 8, 8});
    c.loss_scale.hysteresis = 1;
    c.loss_scale.min = 64;
    follow("lowest", &c, "oooo", (int[]){7, 6, 6, 6});
    {
        spw_loss_scaler s = {.scale = 128, .dynamic = true, .hysteresis = 1};
        assert_false(spw_loss_scale_is_spent(&s, &c));
        s.scale = 64;
        assert_true(spw_loss_scale_is_spent(&s, &c));
        s.hysteresis = 2; /* one overflow is let pass */
        assert_false(spw_loss_scale_is_spent(&s, &c));
    }
    c.loss_scale.fixed = 1024;
    follow("fixed", &c, "oo....", (int[]){10, 10, 10, 10, 10, 10});
    c.fp16 = false;
    follow("without fp16", &c, "o.", (int[]){0, 0});
}

static void
fp16_config(spw_config *c, uint64_t initial_power)
{
    tiny_config(c, SPW_STATE_MIXED_F16);
    c->bf16 = false;
    c->fp16 = true;
    c->run.grad_dtype = SPW_F16;
    c->loss_scale.initial_power = initial_power;
    c->loss_scale.window = 4;
    c->loss_scale.hysteresis = 1;
    c->loss_scale.min = 1;
}

/* Whatever the tier, and near to fp32. */
static void
test_placements(void **state)
{
    const spw_tier tiers[] = {SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_TIER_NVME};
    double want[6], got[6], exact[6];
    uint64_t digest = 0;
    char dir[256];
    spw_config c;
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_FP32);
    (void)tiny_train(&c, SPW_FAMILY_GPT2, 6, exact);
    for (int i = 0; i < 3; i++) {
        uint64_t d;
        fp16_config(&c, 10);
        c.zero.offload_param = c.zero.offload_optimizer = tiers[i];
        c.zero.param_path.count = c.zero.optimizer_path.count = 1;
        snprintf(c.zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
        snprintf(c.zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
        d = tiny_train(&c, SPW_FAMILY_GPT2, 6, i == 0 ? want : got);
        digest = i == 0 ? d : digest;
        if (i > 0) {
            assert_memory_equal(want, got, sizeof want);
            assert_int_equal(d, digest);
        }
    }
    for (int s = 0; s < 6; s++)
        assert_true(fabs(want[s] - exact[s]) < 2e-3 * exact[s]);
    tiny_dir_remove(dir);
}

typedef struct session {
    spw_model *model;
    spw_engine *e;
    int32_t tokens[96], targets[96];
    uint64_t step;
} session;

static void
open_dropping(session *s, const spw_config *c, double dropout)
{
    spw_model_config mc;
    spw_error err = {0};
    memset(s, 0, sizeof *s);
    tiny_model_config(&mc, SPW_FAMILY_GPT2);
    mc.dropout = dropout;
    assert_int_equal(spw_model_build(&s->model, &mc, &err), SPW_OK);
    if (spw_engine_create(&s->e, &(spw_engine_options){.config = c, .model = s->model, .resumes = true}, &err) !=
        SPW_OK)
        fail_msg("%s", err.message);
    assert_int_equal(spw_engine_init_params(s->e, 7, &err), SPW_OK);
}

static void
open_session(session *s, const spw_config *c)
{
    open_dropping(s, c, 0);
}

static spw_step_result
step(session *s)
{
    spw_step_result r;
    spw_error err = {0};
    tiny_batch(s->step++, 61, 96, s->tokens, s->targets);
    if (spw_engine_step(s->e, s->tokens, s->targets, 2, 1e-2, &r, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return r;
}

static void
close_session(session *s)
{
    spw_engine_destroy(s->e);
    spw_model_destroy(s->model);
}

/* A first scale that is much too large: steps are skipped until it fits, and none of them changes a byte. */
static void
test_overflow(void **state)
{
    spw_config c;
    session s;
    uint64_t before, skipped = 0;
    double last = 0;
    (void)state;
    fp16_config(&c, 24);
    open_session(&s, &c);
    before = tiny_digest(s.e);
    for (;;) {
        spw_step_result r = step(&s);
        assert_true(isfinite(r.loss));
        assert_true(skipped == 0 || r.loss_scale == last / 2);
        last = r.loss_scale;
        if (!r.skipped)
            break;
        skipped++;
        assert_int_equal(tiny_digest(s.e), before);
        assert_int_equal(spw_engine_updates(s.e), 0);
    }
    assert_in_range(skipped, 3, 20);
    assert_int_equal(spw_engine_drain(s.e, NULL), SPW_OK);
    assert_true(tiny_digest(s.e) != before);
    close_session(&s);
}

/* Saves after some steps, of which the first ones were skipped, and goes on from there and without a break. */
static void
resume_with(double dropout)
{
    spw_config c;
    session a, b;
    char dir[256], found[SPW_PATH_BYTES];
    spw_checkpoint_state at = {.step = 7};
    spw_error err = {0};
    tiny_dir_make(dir);
    fp16_config(&c, 20);
    c.loss_scale.hysteresis = 2;
    open_dropping(&a, &c, dropout);
    for (int i = 0; i < 7; i++)
        (void)step(&a);
    at.updates = spw_engine_updates(a.e);
    assert_true(at.updates < 7);
    assert_int_equal(spw_checkpoint_save(a.e, &c, dir, &at, found, &err), SPW_OK);
    open_dropping(&b, &c, dropout);
    if (spw_checkpoint_load(b.e, found, &err) != SPW_OK)
        fail_msg("%s", err.message);
    b.step = 7;
    for (int i = 0; i < 12; i++) {
        spw_step_result x = step(&a), y = step(&b);
        assert_true(x.loss == y.loss && x.loss_scale == y.loss_scale && x.skipped == y.skipped);
    }
    assert_int_equal(tiny_digest(a.e), tiny_digest(b.e));
    close_session(&a);
    close_session(&b);
    tiny_dir_remove(dir);
}

/* The scale, its window and its hysteresis go on as if nothing had been; so do masks, which skipped steps draw too. */
static void
test_resume(void **state)
{
    (void)state;
    resume_with(0);
    resume_with(0.2);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_placements),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_resume),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
