/*
 * Training while the disk misbehaves: delays, reorders, short transfers and retries change no bit; an I/O error ends the
 * run with one error that names the file, and the checkpoint made before it is whole.
 */
#include "lib_tiny.h"
#include "spw_access.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { STEPS = 5, TOKENS = 4 * 24 };

static void
on_nvme(spw_config *c, spw_state_format format, spw_aio_backend backend, const char *dir)
{
    tiny_config(c, format);
    c->zero.offload_param = c->zero.offload_optimizer = SPW_TIER_NVME;
    c->zero.param_path.count = c->zero.optimizer_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
    snprintf(c->zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
    c->aio.backend = backend;
    c->aio.block_size = 8192;
    c->aio.queue_depth = 4;
}

static bool
backend_here(spw_aio_backend backend)
{
    spw_aio *aio = NULL;
    bool here = spw_aio_create(&aio, &(spw_aio_options){.backend = backend}, NULL) == SPW_OK;
    spw_aio_destroy(aio);
    return here;
}

/* Delays, reorders, short transfers, EAGAIN and EINTR change neither losses nor one bit of the state. */
static void
test_delays_change_nothing(void **state)
{
    static const spw_state_format formats[] = {SPW_STATE_FP32, SPW_STATE_SPLIT};
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t f = 0; f < 2; f++)
        for (int backend = SPW_AIO_URING; backend <= SPW_AIO_THREADS; backend++) {
            spw_config c;
            double want[STEPS], got[STEPS];
            uint64_t digest;
            if (!backend_here((spw_aio_backend)backend))
                continue;
            on_nvme(&c, formats[f], (spw_aio_backend)backend, dir);
            digest = tiny_train(&c, SPW_FAMILY_GPT2, STEPS, want);
            for (uint64_t seed = 1; seed <= 3; seed++) {
                spw_test_aio_schedule faults = {
                    .seed = seed, .delays = 300, .shorts = 100, .agains = 50, .delay_ns_max = 2000000};
                c.run.aio_faults = &faults;
                c.run.weight_slots = seed == 2 ? 2 : 0;
                c.run.record_slots = seed == 2 ? 1 : 0;
                assert_int_equal(tiny_train(&c, SPW_FAMILY_GPT2, STEPS, got), digest);
                assert_memory_equal(got, want, sizeof want);
                assert_true(faults.transfers > 100 && faults.failures == 0);
            }
        }
    tiny_dir_remove(dir);
}

typedef struct run {
    spw_model_config mc;
    spw_model *model;
    spw_engine *e;
    spw_error err;
} run;

static void
run_open(run *r, const spw_config *c)
{
    memset(r, 0, sizeof *r);
    tiny_model_config(&r->mc, SPW_FAMILY_GPT2);
    assert_int_equal(spw_model_build(&r->model, &r->mc, &r->err), SPW_OK);
    assert_int_equal(spw_engine_create(&r->e, &(spw_engine_options){.config = c, .model = r->model}, &r->err), SPW_OK);
}

static void
run_close(run *r)
{
    spw_engine_destroy(r->e);
    spw_model_destroy(r->model);
}

static spw_status
run_step(run *r, const spw_config *c, uint64_t step, double *loss)
{
    int32_t tokens[TOKENS], targets[TOKENS];
    spw_step_result result;
    spw_status st;
    tiny_batch(step, r->mc.vocab, TOKENS, tokens, targets);
    st = spw_engine_step(r->e, tokens, targets, (uint32_t)c->accumulation, c->optimizer.lr, &result, &r->err);
    *loss = result.loss;
    return st;
}

static int warnings;

static void
count_warnings(void *ctx, spw_log_level level, const char *line)
{
    (void)ctx;
    (void)line;
    warnings += level == SPW_LOG_WARN;
}

/* One EIO, wherever it hits, is one error that names the swap file; the checkpoint before it continues bit by bit. */
static void
test_one_error(void **state)
{
    char dir[256], ckpt_dir[300], path[SPW_PATH_BYTES];
    double want[STEPS], loss;
    uint64_t digest, hits = 0;
    spw_config c;
    run r;
    (void)state;
    tiny_dir_make(dir);
    snprintf(ckpt_dir, sizeof ckpt_dir, "%s/ckpt", dir);
    on_nvme(&c, SPW_STATE_SPLIT, SPW_AIO_AUTO, dir);
    digest = tiny_train(&c, SPW_FAMILY_GPT2, STEPS, want);
    for (uint64_t at = 1; at < 4000; at = at < 8 ? at + 1 : at * 3 / 2) {
        spw_test_aio_schedule faults = {.seed = at};
        spw_status st = SPW_OK;
        uint64_t s;
        c.run.aio_faults = &faults;
        run_open(&r, &c);
        assert_int_equal(spw_engine_init_params(r.e, c.run.seed, &r.err), SPW_OK);
        for (s = 0; s < 2; s++)
            assert_int_equal(run_step(&r, &c, s, &loss), SPW_OK);
        assert_int_equal(spw_checkpoint_save(r.e, &c, ckpt_dir, &(spw_checkpoint_state){.step = 2}, path, &r.err),
                         SPW_OK);
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        warnings = 0;
        spw_log_set(count_warnings, NULL);
        faults.error_at = faults.transfers + at; /* the next but at - 1, in a step */
        for (; s < STEPS && st == SPW_OK; s++)
            st = run_step(&r, &c, s, &loss);
        if (st == SPW_OK)
            st = spw_engine_drain(r.e, &r.err);
        spw_log_set(NULL, NULL);
        if (faults.failures == 0) { /* the steps had fewer transfers */
            assert_int_equal(st, SPW_OK);
            run_close(&r);
            break;
        }
        hits++;
        assert_int_equal(st, SPW_EIO);
        assert_int_equal(r.err.status, SPW_EIO);
        assert_non_null(strstr(r.err.message, "swap.bin"));
        assert_non_null(strstr(r.err.message, "wanted"));
        assert_int_equal(warnings, 0);                            /* the error is said once, by its return */
        assert_int_not_equal(run_step(&r, &c, s, &loss), SPW_OK); /* nothing goes on with half a state */
        run_close(&r);
        c.run.aio_faults = NULL;
        run_open(&r, &c);
        assert_int_equal(spw_checkpoint_load(r.e, path, &r.err), SPW_OK);
        spw_engine_set_updates(r.e, 2);
        for (s = 2; s < STEPS; s++) {
            assert_int_equal(run_step(&r, &c, s, &loss), SPW_OK);
            assert_true(loss == want[s]);
        }
        assert_true(tiny_digest(r.e) == digest);
        run_close(&r);
    }
    assert_true(hits >= 8);
    print_message("# %llu errors, each told once\n", (unsigned long long)hits);
    tiny_dir_remove(dir);
}

/*
 * Checkpoints of activations on nvme: delays, short transfers and retries of theirs change nothing; one error or a full
 * disk, wherever it hits, ends the step with one error that says what it was about, and the engine stays ended.
 */
static void
test_activations(void **state)
{
    char dir[256];
    double want[STEPS], got[STEPS], loss;
    uint64_t digest, hits[2] = {0};
    (void)state;
    tiny_dir_make(dir);
    for (int backend = SPW_AIO_URING; backend <= SPW_AIO_THREADS; backend++) {
        spw_config c;
        spw_test_aio_schedule slow = {.seed = 5, .delays = 300, .shorts = 100, .agains = 50, .delay_ns_max = 2000000};
        if (!backend_here((spw_aio_backend)backend))
            continue;
        on_nvme(&c, SPW_STATE_SPLIT, (spw_aio_backend)backend, dir);
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
        digest = tiny_train(&c, SPW_FAMILY_GPT2, STEPS, want);
        c.run.activations = SPW_TIER_NVME;
        c.run.activation_faults = &slow;
        assert_int_equal(tiny_train(&c, SPW_FAMILY_GPT2, STEPS, got), digest);
        assert_memory_equal(got, want, sizeof want);
        assert_true(slow.transfers > 40 && slow.failures == 0);
        for (uint64_t k = 1; k < 120; k++) {
            bool full = k % 3 == 0;
            spw_test_aio_schedule faults = {.seed = k, .error_at = full ? 0 : k, .full = full ? 100 : 0};
            spw_error first;
            spw_status st = SPW_OK;
            run r;
            c.run.activation_faults = &faults;
            run_open(&r, &c);
            assert_int_equal(spw_engine_init_params(r.e, c.run.seed, &r.err), SPW_OK);
            for (uint64_t s = 0; s < STEPS && st == SPW_OK; s++)
                st = run_step(&r, &c, s, &loss);
            if (faults.failures > 0) {
                hits[full]++;
                assert_int_equal(st, full ? SPW_ENOSPC : SPW_EIO);
                assert_non_null(strstr(r.err.message, "activation checkpoint of slot"));
                assert_non_null(strstr(r.err.message, "swap.bin"));
                first = r.err;
                memset(&r.err, 0, sizeof r.err);
                assert_int_equal(run_step(&r, &c, 0, &loss), st);
                assert_string_equal(r.err.message, first.message);
            } else {
                assert_int_equal(st, SPW_OK);
            }
            run_close(&r);
        }
    }
    assert_true(hits[0] >= 20 && hits[1] >= 20);
    assert_int_equal(rmdir(dir), 0); /* no swap file is left, whatever happened */
}

/* All that could go on with a state that is neither one nor the other. */
static void
expect_ended(run *r, const spw_config *c, const char *ckpt_dir)
{
    const spw_error first = r->err;
    const spw_access bias = {.param = "ln_f.bias"};
    int32_t tokens[TOKENS], targets[TOKENS];
    float values[64];
    spw_stretch held;
    double loss;
    tiny_batch(0, r->mc.vocab, TOKENS, tokens, targets);
    assert_int_equal(run_step(r, c, 1, &loss), first.status);
    assert_string_equal(r->err.message, first.message);
    assert_int_equal(spw_engine_eval(r->e, tokens, targets, 1, &loss, &r->err), first.status);
    assert_string_equal(r->err.message, first.message);
    assert_int_equal(spw_access_get_local(r->e, &bias, values, &held, &r->err), first.status);
    assert_string_equal(r->err.message, first.message);
    assert_int_equal(spw_checkpoint_save(r->e, c, ckpt_dir, &(spw_checkpoint_state){.step = 2}, NULL, &r->err),
                     first.status);
    assert_non_null(strstr(r->err.message, first.message));
}

/*
 * A step that breaks off half-way while the state itself is well, some of it updated already: nothing is saved of what is neither the state
 * before nor after it, and nobody goes on with it. A save that was under way has the state before.
 */
static void
test_broken_off(void **state)
{
    char dir[256], ckpt_dir[300], path[SPW_PATH_BYTES];
    uint64_t hits = 0;
    (void)state;
    tiny_dir_make(dir);
    snprintf(ckpt_dir, sizeof ckpt_dir, "%s/ckpt", dir);
    alarm(200); /* one that waits for ever */
    for (uint64_t k = 1; k < 40; k++) {
        spw_test_aio_schedule faults = {.seed = k};
        spw_checkpoint_job *job = NULL;
        spw_status st;
        uint64_t digest;
        double loss;
        spw_config c;
        run r;
        on_nvme(&c, SPW_STATE_SPLIT, SPW_AIO_AUTO, dir);
        c.zero.offload_param = c.zero.offload_optimizer = k % 4 < 2 ? SPW_TIER_HOST : SPW_TIER_NVME;
        c.gradient_clipping = k % 2 == 0 ? 0 : 1e9; /* 0: updates do not wait for a norm; else they run ahead of it */
        snprintf(c.run.update_ahead, sizeof c.run.update_ahead, "always");
        c.run.activations = SPW_TIER_NVME;
        c.run.activation_faults = &faults;
        run_open(&r, &c);
        assert_int_equal(spw_engine_init_params(r.e, c.run.seed, &r.err), SPW_OK);
        assert_int_equal(run_step(&r, &c, 0, &loss), SPW_OK);
        assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
        digest = tiny_digest(r.e);
        assert_int_equal(spw_checkpoint_begin(&job, r.e, &c, ckpt_dir, &(spw_checkpoint_state){.step = 1}, &r.err),
                         SPW_OK);
        faults.error_at = faults.transfers + k;
        st = run_step(&r, &c, 1, &loss);
        if (faults.failures > 0) {
            spw_error first = r.err;
            hits++;
            assert_int_equal(st, SPW_EIO);
            assert_int_equal(spw_checkpoint_finish(job, path, &r.err), SPW_OK);
            r.err = first;
            expect_ended(&r, &c, ckpt_dir);
            assert_int_equal(tiny_dir_entries(ckpt_dir), 1);
            run_close(&r);
            c.run.activation_faults = NULL;
            run_open(&r, &c);
            assert_int_equal(spw_checkpoint_load(r.e, path, &r.err), SPW_OK);
            assert_true(tiny_digest(r.e) == digest);
        } else {
            assert_int_equal(st, SPW_OK);
            assert_int_equal(spw_checkpoint_finish(job, path, &r.err), SPW_OK);
        }
        run_close(&r);
    }
    alarm(0);
    assert_true(hits >= 8);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_delays_change_nothing), cmocka_unit_test(test_one_error),
                                       cmocka_unit_test(test_activations), cmocka_unit_test(test_broken_off)};
    return cmocka_run_group_tests_name("train_faults", tests, NULL, NULL);
}
