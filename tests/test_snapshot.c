/*
 * Saving while training goes on: the files are, byte for byte, those of a run that stood still while it saved, and training
 * is, bit for bit, that of a run that saved nothing; wherever state lives, in every order in which threads come to it.
 */
#include "lib_tiny.h"
#include "spw_files.h"
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { STEPS = 6, TOKENS = 4 * 24 };

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
    for (uint32_t i = 0; i < c->run.freeze.count; i++)
        assert_true(spw_model_freeze(r->model, c->run.freeze.item[i]) > 0);
    if (spw_engine_create(&r->e, &(spw_engine_options){.config = c, .model = r->model, .resumes = true}, &r->err) !=
        SPW_OK)
        fail_msg("%s", r->err.message);
    assert_int_equal(spw_engine_init_params(r->e, c->run.seed, &r->err), SPW_OK);
}

static void
run_close(run *r)
{
    spw_engine_destroy(r->e);
    spw_model_destroy(r->model);
}

static spw_status
run_step(run *r, const spw_config *c, uint64_t step, spw_step_result *result)
{
    int32_t tokens[TOKENS], targets[TOKENS];
    tiny_batch(step, r->mc.vocab, TOKENS, tokens, targets);
    return spw_engine_step(r->e, tokens, targets, (uint32_t)c->accumulation, c->optimizer.lr, result, &r->err);
}

static void
expect_ok(const run *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", r->err.message);
}

/* Where state lives: all on nvme, a slot of each kind; all in host memory; on the device; weights there, records on nvme. */
enum { PLACES = 5 };
static void
place(spw_config *c, int k, const char *dir)
{
    static const spw_tier weights[PLACES] = {SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_HOST, SPW_TIER_DEVICE,
                                             SPW_TIER_HOST};
    static const spw_tier records[PLACES] = {SPW_TIER_NVME, SPW_TIER_NVME, SPW_TIER_HOST, SPW_TIER_DEVICE,
                                             SPW_TIER_NVME};
    c->zero.offload_param = weights[k];
    c->zero.offload_optimizer = records[k];
    c->zero.param_path.count = c->zero.optimizer_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
    snprintf(c->zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
    c->run.weight_slots = c->run.record_slots = k == 0 ? 1 : 0;
}

/* Trains; saves after the steps in the set (bit s: after step s + 1), waiting or not. Returns the final digest. */
static uint64_t
train(const spw_config *c, const char *folder, uint32_t save_after, bool wait, double *losses)
{
    spw_checkpoint_job *job = NULL;
    uint64_t digest;
    run r;
    run_open(&r, c);
    for (uint64_t s = 0; s < STEPS; s++) {
        spw_step_result result;
        expect_ok(&r, run_step(&r, c, s, &result));
        losses[s] = result.loss;
        if ((save_after >> s & 1) == 0)
            continue;
        expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
        job = NULL;
        if (wait)
            expect_ok(&r, spw_checkpoint_save(r.e, c, folder, &(spw_checkpoint_state){.step = s + 1}, NULL, &r.err));
        else
            expect_ok(&r, spw_checkpoint_begin(&job, r.e, c, folder, &(spw_checkpoint_state){.step = s + 1}, &r.err));
    }
    expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
    digest = tiny_digest(r.e);
    run_close(&r);
    return digest;
}

static bool
same_file(const char *a, const char *b, int step, const char *name)
{
    char command[1400];
    snprintf(command, sizeof command, "cmp -s '%s/step-%d/%s' '%s/step-%d/%s'", a, step, name, b, step, name);
    return system(command) == 0;
}

static void
compare(const char *a, const char *b, uint32_t saved)
{
    for (int s = 0; s < STEPS; s++) {
        if ((saved >> s & 1) == 0)
            continue;
        if (!same_file(a, b, s + 1, "model.safetensors") ||
            !same_file(a, b, s + 1, "optimizer-00001-of-00001.safetensors"))
            fail_msg("step %d: the files of %s and %s differ", s + 1, a, b);
    }
}

/* Formats, placements, with and without clipping, threads, orders: the same files, losses and final state. */
static void
test_same_bytes(void **state)
{
    static const spw_state_format formats[] = {SPW_STATE_FP32, SPW_STATE_MIXED, SPW_STATE_SPLIT, SPW_STATE_SPLIT_INT8};
    static const uint32_t saves[] = {0x12, 0x3f, 0x24}; /* after 2 and 5, all, 3 and 6 */
    char dir[256], waits[300], goes[300];
    uint32_t runs = 0;
    (void)state;
    tiny_dir_make(dir);
    snprintf(waits, sizeof waits, "%s/waits", dir);
    snprintf(goes, sizeof goes, "%s/goes", dir);
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        for (int clip = 0; clip < 2; clip++) {
            double want[STEPS], alone[STEPS], got[STEPS];
            uint64_t digest;
            spw_config c;
            tiny_config(&c, formats[f]);
            c.gradient_clipping = clip;
            c.run.chunk_elems = 4096;
            digest = train(&c, waits, 0x3f, true, want);
            assert_true(train(&c, waits, 0, true, alone) == digest);
            assert_memory_equal(alone, want, sizeof want);
            for (int k = 0; k < PLACES; k++) {
                place(&c, k, dir);
                c.run.chunk_elems = k % 2 == 0 ? 4096 : 8192;
                c.run.optimizer_threads = 1 + (uint32_t)k;
                c.run.chaos_seed = k == 2 ? 0 : 100 + (uint64_t)k;
                c.run.integrity = k != 4;
                assert_true(train(&c, goes, saves[(f + (size_t)k) % 3], false, got) == digest);
                assert_memory_equal(got, want, sizeof want);
                compare(waits, goes, saves[(f + (size_t)k) % 3]);
                runs++;
                tiny_dir_remove(goes);
            }
            tiny_dir_remove(waits);
        }
    }
    print_message("# %u runs\n", runs);
    tiny_dir_remove(dir);
}

/* Steps that update nothing, and blocks that a step leaves out: what no update hands over is there all the same. */
static void
test_left_out(void **state)
{
    static const uint32_t part[] = {0, 1, 4};
    char dir[256], folders[2][300];
    (void)state;
    tiny_dir_make(dir);
    for (int skips = 0; skips < 2; skips++) {
        for (int going = 0; going < 2; going++) {
            spw_checkpoint_job *job = NULL;
            spw_step_result result;
            spw_config c;
            run r;
            snprintf(folders[going], sizeof folders[going], "%s/%d", dir, going);
            tiny_config(&c, SPW_STATE_FP32);
            place(&c, 0, dir);
            c.run.chaos_seed = 3;
            run_open(&r, &c);
            if (skips)
                expect_ok(&r, spw_store_sweep(spw_engine_store(r.e), SPW_SWEEP_INIT, tiny_one_nan, r.e, &r.err));
            else
                expect_ok(&r, spw_engine_set_chain(r.e, part, 3, &r.err));
            for (uint64_t s = 0; s < 3; s++) {
                expect_ok(&r, run_step(&r, &c, s, &result));
                assert_true(result.skipped == (skips == 1));
                if (s > 0)
                    continue;
                expect_ok(&r, spw_checkpoint_begin(&job, r.e, &c, folders[going], &(spw_checkpoint_state){.step = 1},
                                                   &r.err));
                if (!going)
                    expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
            }
            if (going) {
                char path[SPW_PATH_BYTES];
                expect_ok(&r, spw_checkpoint_finish(job, path, &r.err));
                assert_non_null(strstr(path, "/step-1"));
            }
            run_close(&r);
        }
        compare(folders[0], folders[1], 1);
        tiny_dir_remove(folders[0]);
        tiny_dir_remove(folders[1]);
    }
    tiny_dir_remove(dir);
}

/* One at a time, and the first is not touched; no sweep meanwhile; a folder that cannot be made starts nothing. */
static void
test_refusals(void **state)
{
    char dir[256], folder[300], file[320], found[SPW_PATH_BYTES];
    spw_checkpoint_job *job, *other;
    spw_step_result result;
    spw_config c;
    run r;
    (void)state;
    tiny_dir_make(dir);
    snprintf(folder, sizeof folder, "%s/ckpt", dir);
    snprintf(file, sizeof file, "%s/ckpt/file", dir);
    tiny_config(&c, SPW_STATE_SPLIT);
    run_open(&r, &c);
    expect_ok(&r, run_step(&r, &c, 0, &result));
    expect_ok(&r, spw_checkpoint_begin(&job, r.e, &c, folder, &(spw_checkpoint_state){.step = 1}, &r.err));
    for (uint64_t step = 1; step < 3; step++) {
        assert_int_equal(spw_checkpoint_begin(&other, r.e, &c, folder, &(spw_checkpoint_state){.step = step}, &r.err),
                         SPW_EINVAL);
        assert_null(other);
        assert_non_null(strstr(r.err.message, "ckpt/step-1 is under way"));
    }
    assert_int_equal(spw_engine_init_params(r.e, 1, &r.err), SPW_EINVAL);
    expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
    expect_ok(&r, spw_checkpoint_find(folder, found, &r.err));
    expect_ok(&r, spw_checkpoint_load(r.e, found, &r.err));
    expect_ok(&r, spw_file_write_text(file, "not a folder", &r.err));
    assert_int_not_equal(spw_checkpoint_begin(&other, r.e, &c, file, &(spw_checkpoint_state){.step = 2}, &r.err),
                         SPW_OK);
    assert_null(other);
    assert_non_null(strstr(r.err.message, file));
    expect_ok(&r, run_step(&r, &c, 1, &result));
    expect_ok(&r, spw_checkpoint_finish(NULL, NULL, &r.err));
    snprintf(file, sizeof file, "%s/ckpt/step-2.partial", dir);
    assert_int_not_equal(access(file, F_OK), 0);
    run_close(&r);
    tiny_dir_remove(dir);
}

/*
 * One I/O error of the swap file, wherever it hits while a save is under way: training ends with it, the save ends with
 * nothing left or with a whole checkpoint, and nobody touches what was freed.
 */
static void
test_errors_meanwhile(void **state)
{
    char dir[256], folder[300], found[SPW_PATH_BYTES];
    uint32_t lost = 0, whole = 0;
    uint64_t before = 0; /* transfers of the start and one step */
    (void)state;
    tiny_dir_make(dir);
    snprintf(folder, sizeof folder, "%s/ckpt", dir);
    for (uint64_t at = 0; at < 400; at = at < 8 ? at + 1 : at * 5 / 4) {
        spw_test_aio_schedule faults = {.seed = at, .error_at = at > 0 ? before + at : 0};
        spw_checkpoint_job *job = NULL;
        spw_step_result result;
        spw_status st, saved;
        spw_error err = {0};
        spw_config c;
        run r;
        tiny_config(&c, SPW_STATE_MIXED);
        place(&c, 1, dir);
        c.run.chunk_elems = 4096;
        c.run.optimizer_threads = 3;
        c.run.chaos_seed = at;
        c.run.aio_faults = &faults;
        run_open(&r, &c);
        st = run_step(&r, &c, 0, &result);
        if (at > 0 && st == SPW_OK)
            st = spw_checkpoint_begin(&job, r.e, &c, folder, &(spw_checkpoint_state){.step = 1}, &r.err);
        if (at == 0 || job == NULL) { /* counted; or one transfer more than then came before the save */
            run_close(&r);
            before = at == 0 ? faults.transfers : before;
            tiny_dir_remove(folder);
            continue;
        }
        for (uint64_t s = 1; s < 3 && st == SPW_OK; s++)
            st = run_step(&r, &c, s, &result);
        saved = spw_checkpoint_finish(job, NULL, &err);
        if (saved == SPW_OK) {
            whole++;
            assert_int_equal(spw_checkpoint_find(folder, found, &err), SPW_OK);
        } else {
            lost++;
            assert_int_equal(saved, SPW_EIO);
            assert_non_null(strstr(err.message, "saving checkpoint"));
            assert_int_equal(spw_checkpoint_find(folder, found, &err), SPW_ENOENT);
            assert_int_equal(rmdir(folder), 0); /* no half of it either */
        }
        run_close(&r);
        tiny_dir_remove(folder);
    }
    print_message("# %u saves lost with their training, %u whole\n", lost, whole);
    assert_true(lost >= 2 && whole >= 2); /* on a busy machine the transfer that fails often comes before the save */
    tiny_dir_remove(dir);
}

static bool no_thread_left;

#if !SANITIZED /* they have their own */
typedef int (*create_fn)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

/* In front of the C library's. */
int
pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*main)(void *), void *arg)
{
    return no_thread_left ? EAGAIN
                          : ((create_fn)(uintptr_t)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, main, arg);
}
#endif

/* A save behind the second step, while training goes on, is whole in the end and the same as one that training waits for. */
static void
check_save(const spw_config *c, const char *dir, bool has_no_thread, bool hands_over)
{
    char waits[300], goes[300];
    double losses[STEPS];
    spw_checkpoint_job *job = NULL;
    spw_step_result result;
    run r;
    snprintf(waits, sizeof waits, "%s/waits", dir);
    snprintf(goes, sizeof goes, "%s/goes", dir);
    train(c, waits, 2, true, losses);
    run_open(&r, c);
    for (uint64_t s = 0; s < STEPS; s++) {
        expect_ok(&r, run_step(&r, c, s, &result));
        assert_true(result.loss == losses[s]);
        no_thread_left = has_no_thread && s == 1;
        if (s == 1)
            expect_ok(&r, spw_checkpoint_begin(&job, r.e, c, goes, &(spw_checkpoint_state){.step = 2}, &r.err));
        no_thread_left = false;
        if (s == 4 && hands_over)
            spw_checkpoint_hand_over(job);
    }
    for (int i = 0; i < 10000 && !spw_checkpoint_done(job); i++)
        spw_sleep_ns(1000000);
    assert_true(spw_checkpoint_done(job)); /* steps have handed every chunk over, or that call has */
    spw_checkpoint_hand_over(job);         /* nothing is left */
    expect_ok(&r, spw_checkpoint_finish(job, NULL, &r.err));
    compare(waits, goes, 2);
    run_close(&r);
    tiny_dir_remove(waits);
    tiny_dir_remove(goes);
}

/* Where there is no thread any more, a save is finished between steps. */
static void
test_no_thread(void **state)
{
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (int k = 0; k < PLACES; k++) {
        spw_config c;
        tiny_config(&c, SPW_STATE_SPLIT);
        place(&c, k, dir);
        check_save(&c, dir, true, false);
    }
    tiny_dir_remove(dir);
}

/* Frozen weights that the device keeps are in nobody's way: a save is on disk without waiting for the next one. */
static void
test_hand_over(void **state)
{
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (int k = 0; k < PLACES; k++) {
        spw_config c;
        tiny_config(&c, SPW_STATE_SPLIT);
        place(&c, k, dir);
        c.run.freeze.count = 1;
        snprintf(c.run.freeze.item[0], sizeof c.run.freeze.item[0], "h.*");
        check_save(&c, dir, false, true);
    }
    tiny_dir_remove(dir);
}

static char heard[2000];

static void
hear(void *ctx, spw_log_level level, const char *line)
{
    size_t n = strlen(heard);
    (void)ctx;
    if (level == SPW_LOG_WARN)
        snprintf(heard + n, sizeof heard - n, "%s\n", line);
}

/* A model's folder that goes while training lasts: checkpoints go on without what they took from there, and say so. */
static void
test_source_gone(void **state)
{
    char source[256], dir[256], path[400], *text;
    spw_config c;
    run r;
    (void)state;
    tiny_dir_make(source);
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_SPLIT);
    snprintf(c.model_path, sizeof c.model_path, "%s", source);
    run_open(&r, &c);
    text = spw_hf_config_text(&r.mc, SPW_BF16);
    snprintf(path, sizeof path, "%s/config.json", source);
    expect_ok(&r, spw_file_write_text(path, text, &r.err));
    spw_mem_free(text);
    spw_log_set(hear, NULL);
    expect_ok(&r, spw_checkpoint_save(r.e, &c, dir, &(spw_checkpoint_state){.step = 1}, NULL, &r.err));
    assert_string_equal(heard, "");
    assert_int_equal(unlink(path), 0);
    expect_ok(&r, spw_checkpoint_save(r.e, &c, dir, &(spw_checkpoint_state){.step = 2}, NULL, &r.err));
    spw_log_set(NULL, NULL);
    assert_non_null(strstr(heard, "/config.json cannot be read any more: what is saved"));
    run_close(&r);
    tiny_dir_remove(source);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_bytes), cmocka_unit_test(test_left_out),
                                       cmocka_unit_test(test_refusals),   cmocka_unit_test(test_errors_meanwhile),
                                       cmocka_unit_test(test_no_thread),  cmocka_unit_test(test_hand_over),
                                       cmocka_unit_test(test_source_gone)};
    return cmocka_run_group_tests_name("snapshot", tests, NULL, NULL);
}
