/*
 * The model families against transformers (vectors made by make_family_vectors.py): config.json and weights as it writes
 * them, logits of every position, loss and every gradient, the same bits from disk. What its readers refuse is test_hf_config.c's
 * and test_hf_folder.c's.
 */
#include "lib_tiny.h"
#include "spw_access.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { B = 2, T = 18, VOCAB = 41, ROWS_MAX = 256 }; /* of the cases that are checked in; of any */

static const char *const *cases; /* all that there are vectors of */
static uint32_t case_count;

/* ---------------------------------------------------------------- against transformers */

typedef struct loading {
    spw_engine *e;
    spw_hf_reader *r;
} loading;

static spw_status
load_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    loading *job = ctx;
    const spw_layout *l = spw_engine_layout(job->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    (void)grad;
    memset(weights, 0, c->elems * spw_state_weight_bytes(SPW_STATE_FP32));
    if (record != NULL)
        memset(record, 0, spw_state_record_bytes(SPW_STATE_FP32, &spw_opt_adam, c->elems));
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_place *at = &l->places[id];
        uint64_t from = at->first > c->first ? at->first : c->first, to = at->first + at->elems;
        float part[1000]; /* not a divisor of anything */
        to = to < c->first + c->elems ? to : c->first + c->elems;
        for (uint64_t n; at->unit_idx == c->unit_idx && from < to; from += n) {
            n = to - from < 1000 ? to - from : 1000;
            SPW_TRY(spw_hf_read_param(job->r, id, from - at->first, n, part, err));
            spw_state_set(SPW_STATE_FP32, &spw_opt_adam, weights, record, c->elems, SPW_PART_MASTER, from - c->first, n,
                          part);
        }
    }
    return SPW_OK;
}

static spw_engine *
make_engine(const char *folder, uint64_t sequences, uint64_t length, bool inference, const char *swap, uint32_t threads,
            spw_model **model)
{
    spw_error err = {0};
    spw_model_config m;
    spw_config c;
    loading job = {0};
    tiny_config(&c, SPW_STATE_FP32);
    c.micro_batch = sequences;
    c.accumulation = 1;
    c.data.seq_length = length;
    c.run.compute_threads = threads;
    c.run.router_balance = strstr(folder, "_balance") != NULL ? 0.5 : 0; /* as make_family_vectors.py has it */
    if (swap != NULL) {
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_NVME;
        c.zero.param_path.count = c.zero.optimizer_path.count = 1;
        snprintf(c.zero.param_path.item[0], SPW_PATH_BYTES, "%s", swap);
        snprintf(c.zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", swap);
    }
    DONE(spw_hf_config_load(&m, folder, &err));
    DONE(spw_model_build(model, &m, &err));
    DONE(spw_hf_reader_open(&job.r, folder, &err));
    DONE(spw_hf_reader_bind(job.r, *model, &err));
    DONE(spw_engine_create(&job.e, &(spw_engine_options){.config = &c, .model = *model, .inference = inference}, &err));
    DONE(spw_store_sweep(spw_engine_store(job.e), SPW_SWEEP_INIT, load_chunk, &job, &err));
    spw_hf_reader_close(job.r);
    return job.e;
}

/* A tensor of expect.safetensors as fp32; the caller frees it. */
static float *
expected(spw_st_reader *r, const char *name, uint64_t elems)
{
    const spw_tensor_info *t = spw_st_reader_find(r, name);
    float *out = malloc(elems * sizeof *out);
    if (t == NULL)
        fail_msg("the vectors have no %s", name);
    assert_non_null(out);
    assert_int_equal(t->bytes, elems * sizeof *out);
    assert_int_equal(spw_st_read(r, t, 0, out, t->bytes, NULL), SPW_OK);
    return out;
}

static void
expected_ids(spw_st_reader *r, const char *name, uint64_t rows, int32_t *out)
{
    float *f = expected(r, name, rows);
    for (uint64_t i = 0; i < rows; i++)
        out[i] = (int32_t)f[i];
    free(f);
}

/*
 * Of drawn models: a gradient that is small because large terms cancel, as that of a query over few keys, has their rounding
 * in it. So a difference is one from the tensor's norm and this share of all gradients'. What is expected of them is computed
 * in double, and beside it stands how far transformers' fp32 is from that: three times as far is no worse than it, up to
 * where a model would be another one.
 */
static double cancel;

static double
allowed(spw_st_reader *r)
{
    double out = 1e-5;
    if (spw_st_reader_find(r, "rounding") != NULL) {
        float *rounding = expected(r, "rounding", 1);
        out = fmax(out, fmin(3 * (double)*rounding, 1e-3));
        free(rounding);
    }
    return out;
}

/* Every position's logits, relative to the largest; those of a drawn model may be off by what rounding does to its gradients, to a bound. */
static double
compare_logits(spw_engine *e, spw_st_reader *r, const char *name, uint64_t rows, uint64_t length)
{
    uint64_t vocab = spw_engine_model(e)->config.vocab;
    float *want = expected(r, "logits", rows * vocab), *got = malloc(vocab * sizeof *got);
    int32_t tokens[ROWS_MAX];
    double largest = 0, worst = 0;
    spw_error err = {0};
    assert_non_null(got);
    expected_ids(r, "tokens", rows, tokens);
    for (uint64_t i = 0; i < rows * vocab; i++)
        largest = fmax(largest, fabs((double)want[i]));
    for (uint64_t row = 0; row < rows; row++) {
        DONE(spw_engine_logits(e, tokens + row / length * length, row % length + 1, got, &err));
        for (uint64_t i = 0; i < vocab; i++)
            worst = fmax(worst, fabs((double)got[i] - (double)want[row * vocab + i]));
    }
    if (!(worst <= (cancel > 0 ? fmin(allowed(r), 1e-4) : 1e-5) * largest))
        fail_msg("%s: a logit is off by %.3g of the largest", name, worst / largest);
    free(want);
    free(got);
    return worst / largest;
}

/*
 * Without rope a key's bias adds the same to all scores of a row: its gradient is nothing but what rounding leaves. That of a decay is a
 * difference of sums over all rows behind. Of queries and keys whose scores nothing divides one key may have all but all of the weight; then
 * what is left of theirs is what two sums of the same numbers differ by.
 */
static double
share_of_all(const spw_model *m, const char *name)
{
    if (strstr(name, ".A_log") != NULL || strstr(name, ".dt_bias") != NULL)
        return 0.05;
    if (m->config.layer_scaled && (strstr(name, ".self_attn.q_") != NULL || strstr(name, ".self_attn.k_") != NULL))
        return 3 * cancel;
    return m->config.learned_places && strstr(name, ".k_proj.bias") != NULL ? fmax(cancel, 0.01) : cancel;
}

/* Norm of the difference relative to the tensor's norm. */
static double
compare_grads(spw_engine *e, spw_st_reader *r, const char *name)
{
    const spw_model *m = spw_engine_model(e);
    const spw_layout *l = spw_engine_layout(e);
    double worst = 0, all = 0, most = allowed(r);
    for (uint32_t id = 0; id < l->param_count; id++) {
        char key[160];
        float *want;
        if (m->params[id].frozen)
            continue;
        snprintf(key, sizeof key, "grad.%s", m->params[id].name);
        want = expected(r, key, l->places[id].elems);
        for (uint64_t i = 0; i < l->places[id].elems; i++)
            all += (double)want[i] * (double)want[i];
        free(want);
    }
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_place *at = &l->places[id];
        const float *got = (const float *)spw_store_grad(spw_engine_store(e), at->unit_idx) + at->first;
        char key[160];
        float *want;
        double diff = 0, norm = 0, share;
        if (m->params[id].frozen)
            continue;
        snprintf(key, sizeof key, "grad.%s", m->params[id].name);
        want = expected(r, key, at->elems);
        for (uint64_t i = 0; i < at->elems; i++) {
            diff += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
            norm += (double)want[i] * (double)want[i];
        }
        share = share_of_all(m, m->params[id].name);
        if (!(sqrt(diff) <= most * (sqrt(norm) + share * sqrt(all))) || (norm == 0 && share == 0))
            fail_msg("%s: gradient of %s: relative error %.3g", name, m->params[id].name, sqrt(diff / norm));
        worst = fmax(worst, norm > 0 && share == cancel ? sqrt(diff / norm) : 0);
        free(want);
    }
    return worst;
}

static void
run_folder(const char *folder, const char *swap)
{
    const char *name = strrchr(folder, '/') + 1;
    char file[300];
    spw_st_reader *r = NULL;
    spw_model *model = NULL;
    spw_engine *e;
    spw_error err = {0};
    spw_step_result result;
    const spw_tensor_info *shape;
    int32_t tokens[ROWS_MAX], targets[ROWS_MAX];
    double logits, grads;
    uint64_t sequences, length;
    float *loss;
    snprintf(file, sizeof file, "%.250s/expect.safetensors", folder);
    DONE(spw_st_reader_open(&r, file, &err));
    shape = spw_st_reader_find(r, "tokens");
    assert_true(shape != NULL && shape->ndim == 2 && shape->shape[0] * shape->shape[1] <= ROWS_MAX);
    sequences = shape->shape[0];
    length = shape->shape[1];
    e = make_engine(folder, sequences, length, true, swap, 2, &model);
    logits = compare_logits(e, r, name, sequences * length, length);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    e = make_engine(folder, sequences, length, false, swap, 2, &model);
    expected_ids(r, "tokens", sequences * length, tokens);
    expected_ids(r, "targets", sequences * length, targets);
    DONE(spw_engine_step(e, tokens, targets, 1, 1e-3, &result, &err));
    DONE(spw_engine_drain(e, &err));
    loss = expected(r, "loss", 1);
    if (!(fabs(result.loss - (double)*loss) <= 1e-5 * (double)*loss))
        fail_msg("%s: loss %.9g, transformers has %.9g", name, result.loss, (double)*loss);
    grads = swap == NULL ? compare_grads(e, r, name) : 0; /* else records may have passed through their memory since */
    if (getenv("SPW_VERBOSE") != NULL)
        print_message("# %-13s logits %.1e  loss %.1e  gradients %.1e\n", name, logits,
                      fabs(result.loss / (double)*loss - 1), grads);
    free(loss);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    spw_st_reader_close(r);
}

static void
run(const char *name, const char *swap)
{
    char folder[200];
    snprintf(folder, sizeof folder, "tests/vectors/families/%s", name);
    run_folder(folder, swap);
}

/* Logits, loss and gradients of every case, in host memory. */
static void
test_against_transformers(void **state)
{
    (void)state;
    for (size_t i = 0; i < case_count; i++)
        run(cases[i], NULL);
}

/* And streamed from disk, where a block has most parameters: logits and loss; test_same_bits compares what comes of the gradients. */
static void
test_streamed(void **state)
{
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    run("llama3", dir);
    run("qwen3_bias", dir);
    run("mixtral", dir);
    run("phi3", dir);
    run("phi3_long", dir);
    run("qwen2_moe", dir);
    run("gemma3", dir);
    run("gemma2", dir);
    run("gpt_oss", dir);
    run("glm4_moe", dir);
    run("exaone_moe", dir);
    run("nemotron_h_moe", dir);
    run("deepseek_v2", dir);
    run("deepseek_v3_half", dir);
    run("kimi_k25_images", dir);
    run("deepseek_v32", dir);
    run("mistral4", dir);
    run("mimo_v2_flash", dir);
    run("lfm2", dir);
    run("bamba", dir);
    run("lfm2_moe", dir);
    run("afmoe", dir);
    run("olmo_hybrid", dir);
    run("kimi_linear", dir);
    run("falcon_h1", dir);
    run("glm_moe_dsa_few", dir);
    run("deepseek_v4", dir);
    run("deepseek_v4_all", dir);
    run("minimax_m2", dir);
    run("olmo3", dir);
    run("gpt_neox", dir);
    run("opt", dir);
    run("stablelm_parallel", dir);
    run("qwen3_5", dir);
    run("qwen3_5_moe_images", dir);
    run("qwen3_next", dir);
    run("gemma4_dense", dir);
    run("gemma4_small", dir);
    run("gemma4_moe", dir);
    tiny_dir_remove(dir);
}

/* Three steps give the same bytes in host memory and from disk, with one thread and with three, windows and all. */
static void
test_same_bits(void **state)
{
    static const char *const some[] = {"llama3",
                                       "mistral",
                                       "qwen2_window",
                                       "qwen3_bias",
                                       "mixtral",
                                       "qwen3_moe_sum",
                                       "phi3_long",
                                       "smollm3",
                                       "qwen2_moe",
                                       "olmo2",
                                       "gemma3",
                                       "gemma2",
                                       "gpt_oss",
                                       "glm4_moe",
                                       "deepseek_v3",
                                       "deepseek_v2_greedy",
                                       "mistral4",
                                       "mimo_v2_flash",
                                       "lfm2_moe",
                                       "afmoe_bias",
                                       "olmo_hybrid_rope",
                                       "kimi_linear_groups",
                                       "falcon_h1_norm",
                                       "bamba",
                                       "glm_moe_dsa",
                                       "glm_moe_dsa_few",
                                       "deepseek_v4",
                                       "minimax_m2_old",
                                       "olmo3_old",
                                       "gpt_neox",
                                       "gpt_neox_serial",
                                       "opt",
                                       "starcoder2_window",
                                       "stablelm_parallel",
                                       "qwen3_5_tied",
                                       "qwen3_5_yarn",
                                       "qwen3_5_moe_images",
                                       "qwen3_next",
                                       "gemma4_plain",
                                       "gemma4_small",
                                       "gemma4_moe"};
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        uint64_t first = 0;
        for (int k = 0; k < 3; k++) {
            char folder[200];
            spw_model *model = NULL;
            int32_t tokens[B * T], targets[B * T];
            spw_error err = {0};
            spw_step_result r;
            spw_engine *e;
            snprintf(folder, sizeof folder, "tests/vectors/families/%s", some[i]);
            e = make_engine(folder, B, T, false, k == 2 ? dir : NULL, k == 1 ? 3 : 1, &model);
            for (uint64_t s = 0; s < 3; s++) {
                tiny_batch(s, VOCAB, B * T, tokens, targets);
                DONE(spw_engine_step(e, tokens, targets, 1, 1e-2, &r, &err));
            }
            DONE(spw_engine_drain(e, &err));
            if (k == 0)
                first = tiny_digest(e);
            assert_int_equal(tiny_digest(e), first);
            spw_engine_destroy(e);
            spw_model_destroy(model);
        }
    }
    tiny_dir_remove(dir);
}

/* The biases that choices go by, of a folder, a checkpoint or what was saved in 16 bits, one after the other. */
static uint64_t
read_biases(const char *path, float *out)
{
    spw_st_reader *r = NULL;
    spw_error err = {0};
    uint64_t count = 0;
    char file[400];
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    DONE(spw_st_reader_open(&r, file, &err));
    for (uint32_t i = 0; i < spw_st_reader_count(r); i++) {
        const spw_tensor_info *t = spw_st_reader_tensor(r, i);
        if (strstr(t->name, ".e_score_correction_bias") == NULL)
            continue;
        assert_true(t->dtype == SPW_F32 && t->ndim == 1 && t->shape[0] == 6);
        DONE(spw_st_read(r, t, 0, out + count, t->bytes, &err));
        count += t->shape[0];
    }
    spw_st_reader_close(r);
    return count;
}

/* Where weights are bf16 these biases are fp32 still, in a checkpoint, in what goes on from it and in what is saved; steps leave them. */
static void
test_biases_stay(void **state)
{
    static const char *const source = "tests/vectors/families/glm4_moe";
    int32_t tokens[B * T], targets[B * T];
    spw_model *model = NULL;
    float want[12], got[12];
    spw_error err = {0};
    spw_model_config m;
    spw_step_result r;
    spw_engine *e;
    spw_config c;
    char dir[256], path[300], saved[SPW_PATH_BYTES] = "";
    (void)state;
    tiny_dir_make(dir);
    assert_int_equal(read_biases(source, want), 12);
    tiny_config(&c, SPW_STATE_SPLIT);
    c.micro_batch = B;
    c.accumulation = 1;
    c.data.seq_length = T;
    c.bf16 = true;
    DONE(spw_hf_config_load(&m, source, &err));
    DONE(spw_model_build(&model, &m, &err));
    for (int turn = 0; turn < 2; turn++) {
        DONE(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model}, &err));
        if (turn == 0)
            DONE(spw_engine_load_weights(e, source, &err));
        else
            DONE(spw_checkpoint_load(e, saved, &err));
        tiny_batch(0, VOCAB, B * T, tokens, targets);
        DONE(spw_engine_step(e, tokens, targets, 1, 1e-2, &r, &err));
        DONE(spw_checkpoint_save(e, &c, dir, &(spw_checkpoint_state){.step = 1 + (uint64_t)turn}, saved, &err));
        assert_int_equal(read_biases(saved, got), 12);
        assert_memory_equal(got, want, sizeof want);
        snprintf(path, sizeof path, "%s/saved-%d", dir, turn);
        DONE(spw_engine_save_16bit(e, path, SPW_F16, &err));
        assert_int_equal(read_biases(path, got), 12);
        assert_memory_equal(got, want, sizeof want);
        spw_engine_destroy(e);
    }
    spw_model_destroy(model);
    tiny_dir_remove(dir);
}

/* What is read from config.json is written back the same, whole and as a section. */
static void
test_config_text(void **state)
{
    (void)state;
    for (size_t i = 0; i < case_count; i++) {
        spw_model_config m, again;
        spw_error err = {0};
        char folder[200];
        snprintf(folder, sizeof folder, "tests/vectors/families/%s", cases[i]);
        DONE(spw_hf_config_load(&m, folder, &err));
        for (int section = 0; section < 2; section++) {
            char *text = spw_hf_config_text(&m, section ? SPW_DTYPE_COUNT : SPW_BF16);
            assert_non_null(text);
            DONE(spw_hf_config_parse(&again, text, cases[i], section != 0, &err));
            assert_memory_equal(&m, &again, sizeof m); /* both began as zero bytes */
            spw_mem_free(text);
        }
    }
}

/* Norms begin as the norm alone: weights of 1, or of 0 where they multiply by 1 + w. */
static void
test_norms_begin(void **state)
{
    (void)state;
    for (size_t i = 0; i < case_count; i++) {
        spw_model_config m;
        spw_model *model = NULL;
        spw_error err = {0};
        char folder[200];
        uint32_t norms = 0;
        snprintf(folder, sizeof folder, "tests/vectors/families/%s", cases[i]);
        DONE(spw_hf_config_load(&m, folder, &err));
        DONE(spw_model_build(&model, &m, &err));
        for (uint32_t id = 0; id < model->param_count; id++) {
            const spw_param *p = &model->params[id];
            if (strstr(p->name, "norm") == NULL || strstr(p->name, ".bias") != NULL || p->ndim != 1)
                continue;
            assert_int_equal(p->init, m.norms_from_one && strstr(p->name, "linear_attn") == NULL ? SPW_INIT_ZEROS
                                                                                                 : SPW_INIT_ONES);
            norms++;
        }
        if (strcmp(cases[i], "gemma2") == 0)
            assert_int_equal(norms, 3 * 4 + 1);
        if (strcmp(cases[i], "gemma3") == 0)
            assert_int_equal(norms, 4 * 6 + 1);
        if (strcmp(cases[i], "olmo2") == 0)
            assert_int_equal(norms, 2 * 4 + 1);
        if (strcmp(cases[i], "minimax_m2") == 0)
            assert_int_equal(norms, 2 * 4 + 1);
        if (strcmp(cases[i], "olmo3") == 0)
            assert_int_equal(norms, 4 * 4 + 1);
        if (strcmp(cases[i], "gpt_neox") == 0)
            assert_int_equal(norms, 2 * 2 + 1);
        if (strcmp(cases[i], "qwen3_5") == 0)
            assert_int_equal(norms, 3 * 3 + 4 + 1);
        if (strcmp(cases[i], "gemma4_small") == 0)
            assert_int_equal(norms, 6 * 6 + 3 + 2);
        spw_model_destroy(model);
    }
}

static char **given; /* folders named on the command line */

/* Each in host memory, and every other one from disk. */
static void
test_given(void **state)
{
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    cancel = 0.01;
    for (uint32_t i = 0; given[i] != NULL; i++)
        run_folder(given[i], i % 2 == 1 ? dir : NULL);
    tiny_dir_remove(dir);
}

/* usage: test_families [FOLDER...]: those alone, made by make_family_vectors.py --random */
int
main(int argc, char **argv)
{
    const struct CMUnitTest given_tests[] = {cmocka_unit_test(test_given)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_transformers),
        cmocka_unit_test(test_streamed),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_biases_stay),
        cmocka_unit_test(test_config_text),
        cmocka_unit_test(test_norms_begin),
    };
    given = argv + 1;
    cases = tiny_family_vectors(&case_count);
    return argc > 1 ? cmocka_run_group_tests_name("given families", given_tests, NULL, NULL)
                    : cmocka_run_group_tests_name("families", tests, NULL, NULL);
}
