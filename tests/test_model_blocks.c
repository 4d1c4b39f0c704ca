/*
 * Models of one's own, of blocks: one whose block uses a parameter of the block before it, and those that were put together wrongly.
 */
#include "lib_access.h"
#include "lib_tiny.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

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
        access_run r = {0};
        tiny_config(&c, SPW_STATE_FP32);
        access_place(&c, k == 0 ? SPW_TIER_DEVICE : k == 1 ? SPW_TIER_HOST : SPW_TIER_NVME, dir);
        c.run.chaos_seed = k == 3 ? 9 : 0;
        tiny_batch(0, 61, 4 * 24, tokens, targets);
        for (int borrows = 0; borrows < 2; borrows++) {
            r.model = borrowing_model(borrows);
            access_expect_ok(
                &r,
                spw_engine_create(
                    &r.e, &(spw_engine_options){.config = &c, .model = r.model, .process_bytes = TINY_PROCESS_BYTES},
                    &r.err));
            access_expect_ok(&r, spw_engine_init_params(r.e, 7, &r.err));
            access_expect_ok(&r, spw_access_get_full(r.e, &at, &w, &r.err));
            for (int side = 0; side < 2; side++) {
                float moved = w + (side ? 0.02f : -0.02f);
                access_expect_ok(&r, spw_access_set_full(r.e, &at, &moved, 0, &r.err));
                access_expect_ok(&r, spw_engine_eval(r.e, tokens, targets, 2, &loss[side], &r.err));
            }
            access_expect_ok(&r, spw_access_set_full(r.e, &at, &w, 0, &r.err));
            spw_engine_on_gradients(r.e, only_lent_gradient, borrows ? &grad : &alone);
            access_expect_ok(&r, spw_engine_step(r.e, tokens, targets, 2, 1e-2, &r.last, &r.err));
            if (!borrows)
                access_run_close(&r);
        }
        if (!(fabs((loss[1] - loss[0]) / 0.04 - (double)grad) < 2e-2 * fabs((double)grad) + 1e-5) || grad == alone)
            fail_msg("gradient %g (without the borrower %g), from losses %g", (double)grad, (double)alone,
                     (loss[1] - loss[0]) / 0.04);
        access_expect_ok(&r, spw_engine_step(r.e, tokens, targets, 2, 1e-2, &r.last, &r.err));
        want = k == 0 ? tiny_digest(r.e) : want;
        assert_int_equal(tiny_digest(r.e), want);
        access_run_close(&r);
    }
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faulty_models),
        cmocka_unit_test(test_external_parameter),
    };
    return cmocka_run_group_tests_name("model_blocks", tests, NULL, NULL);
}
