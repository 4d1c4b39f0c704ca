/*
 * Checkpoints of DeepSpeed and FSDP are read as they read them: ZeRO stages 1 to 3, torch.distributed.checkpoint, full states. The files in
 * tests/vectors were written by them (make_foreign_vectors.py), and what must be read of them was taken from their own accessors. llm.c's were
 * written there by their description, of a model that PyTorch trained.
 */
#include "lib_foreign.h"
#include "lib_ranks.h"
#include "lib_tiny.h"
#include "spw_access.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { STEPS = 8, ELEMS_MAX = 4096 };

/* What must be read, fp32; *count: elements. */
static spw_status
find_expected(const char *name, const char *tensor, float out[ELEMS_MAX], uint64_t *count, spw_error *e)
{
    char path[200];
    spw_st_reader *r;
    const spw_tensor_info *t;
    spw_status st;
    snprintf(path, sizeof path, VECTORS "%s/expect.safetensors", strncmp(name, "fsdp/", 5) == 0 ? "fsdp" : name);
    SPW_TRY(spw_st_reader_open(&r, path, e));
    t = spw_st_reader_find(r, tensor);
    st = t != NULL && t->dtype == SPW_F32 && t->bytes <= ELEMS_MAX * sizeof *out
             ? spw_st_read(r, t, 0, out, t->bytes, e)
             : SPW_RAISE(e, SPW_ENOENT, "%s of %s", tensor, path);
    *count = t != NULL ? t->bytes / 4 : 0;
    spw_st_reader_close(r);
    return st;
}

static void
expected(const char *name, const char *tensor, float out[ELEMS_MAX], uint64_t *count)
{
    foreign_need(find_expected(name, tensor, out, count, &foreign_err));
}

static void
same_bytes(const char *what, const char *tensor, const void *got, const void *want, uint64_t bytes)
{
    if (memcmp(got, want, bytes) != 0)
        fail_msg("%s: %s differs", what, tensor);
}

/* Every tensor is bit for bit what DeepSpeed's accessor gave, or rounds to what is stored of a frozen one. */
static void
test_weights(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < FOREIGN_COUNT; i++) {
        const foreign_checkpoint *k = &foreign_checkpoints[i];
        spw_foreign *d;
        spw_hf_reader *r;
        const spw_foreign_about *a;
        foreign_need(spw_foreign_open(&d, foreign_folder(k), &foreign_err));
        a = spw_foreign_get_about(d);
        assert_true(a->stage == k->stage && a->ranks == k->ranks && a->steps == SAVED &&
                    a->updates == SAVED - k->skipped);
        assert_true(a->samples == (k->fsdp || k->llmc ? UINT64_MAX : SAVED * k->ranks));
        assert_string_equal(a->version, k->fsdp || k->llmc ? "" : "0.19.8");
        assert_true((spw_foreign_model(d) != NULL) == k->llmc);
        assert_int_equal(a->moment_count, 2);
        foreign_need(spw_foreign_weights(d, &r, &foreign_err));
        spw_foreign_close(d); /* the reader goes on */
        assert_int_equal(spw_hf_reader_count(r), k->tensors > 0 ? k->tensors : k->llmc ? 28 : 21);
        for (uint32_t t = 0; t < spw_hf_reader_count(r); t++) {
            const spw_tensor_info *info = spw_hf_reader_tensor(r, t, NULL);
            float want[ELEMS_MAX];
            char got[ELEMS_MAX * 4];
            uint16_t narrow[ELEMS_MAX];
            uint64_t n;
            expected(k->name, info->name, want, &n);
            assert_int_equal(info->bytes, n * spw_dtype_bytes(info->dtype));
            foreign_need(spw_hf_read(r, t, 0, got, info->bytes, &foreign_err));
            if (info->dtype != SPW_F32)
                spw_convert(narrow, info->dtype, want, SPW_F32, n);
            same_bytes(k->name, info->name, got, info->dtype != SPW_F32 ? (void *)narrow : (void *)want, info->bytes);
        }
        spw_hf_reader_close(r);
    }
}

/* How it is called in memory there, and which of that tensor's elements are its: an expert's are a slice of it, and the up projection is behind the gate. */
static uint64_t
place_there(const spw_param *p, char name[SPW_TENSOR_NAME_BYTES])
{
    const uint64_t elems = p->rows * p->cols;
    spw_tensor_info whole;
    const char *older;
    char *experts;
    bool down, up;
    spw_st_describe(&whole, p, SPW_F32);
    older = strstr(whole.name, "block_sparse_moe");
    snprintf(name, SPW_TENSOR_NAME_BYTES, "%.*s%s%s", (int)(older != NULL ? older - whole.name : 0), whole.name,
             older != NULL ? "mlp" : "",
             older != NULL                                 ? older + strlen("block_sparse_moe")
             : strcmp(whole.name, "embed_out.weight") == 0 ? "lm_head.weight"
                                                           : whole.name);
    experts = strstr(name, ".experts.");
    if (whole.stack > 0 || p->expert == 0 || experts == NULL)
        return whole.slice * elems;
    down = strstr(experts, "down_proj") != NULL || strstr(experts, ".w2.") != NULL;
    up = strstr(experts, "up_proj") != NULL || strstr(experts, ".w3.") != NULL;
    snprintf(experts, 40, ".experts.%s", down ? "down_proj" : "gate_up_proj");
    return ((p->expert - 1) * (down ? 1 : 2) + up) * elems;
}

/* A part of every parameter that is trained, bit for bit or within a bound; prefix: of the expected names. */
static spw_status
check_part(foreign_subject *s, const char *name, const char *part, const char *prefix, const char *suffix, double bound,
           spw_error *e)
{
    for (uint32_t id = 0; id < s->model->param_count; id++) {
        const spw_param *param = &s->model->params[id];
        char tensor[200], name_there[SPW_TENSOR_NAME_BYTES];
        float all[ELEMS_MAX], got[ELEMS_MAX], *want = all;
        uint64_t n, first;
        spw_access a;
        /* keys' biases have gradient 0 but for rounding, and Adam makes whole steps of that */
        if (param->frozen || (bound > 0 && (strstr(param->name, "c_attn.bias") != NULL ||
                                            strstr(param->name, "query_key_value.bias") != NULL)))
            continue;
        first = place_there(param, name_there);
        snprintf(tensor, sizeof tensor, "%s%.100s%s", prefix, name_there, suffix);
        SPW_TRY(find_expected(name, tensor, all, &n, e));
        SPW_TRY(spw_access_find(&a, s->e, param->name, part, e));
        if (first + a.count > n || (param->expert == 0 && param->stack == 0 && a.count != n))
            return SPW_RAISE(e, SPW_EINVAL, "%s: %s has %llu elements", name, tensor, (unsigned long long)a.count);
        want += first;
        n = a.count;
        SPW_TRY(spw_access_get_full(s->e, &a, got, e));
        for (uint64_t i = 0; i < n; i++) {
            if (!(fabs((double)got[i] - (double)want[i]) <= bound))
                return SPW_RAISE(e, SPW_EINVAL, "%s: %s[%llu] is %.9g, not %.9g", name, tensor, (unsigned long long)i,
                                 (double)got[i], (double)want[i]);
        }
    }
    return SPW_OK;
}

static spw_status
check_state(foreign_subject *s, const foreign_checkpoint *k, spw_error *e)
{
    SPW_TRY(check_part(s, k->name, "master", "", "", 0, e));
    if (!k->moments_unknown)
        SPW_TRY(check_part(s, k->name, "exp_avg", "", ".exp_avg", 0, e));
    if (!k->moments_unknown)
        SPW_TRY(check_part(s, k->name, "exp_avg_sq", "", ".exp_avg_sq", 0, e));
    return spw_engine_updates(s->e) == SAVED - k->skipped
               ? SPW_OK
               : SPW_RAISE(e, SPW_EINVAL, "%s: another number of updates", k->name);
}

/* In host memory and on nvme, in chunks of any size. */
static void
test_state(void **state)
{
    char dir[256], more[400];
    (void)state;
    tiny_dir_make(dir);
    snprintf(more, sizeof more,
             "\"zero_optimization\":{\"stage\":3,\"offload_param\":{\"device\":\"nvme\",\"nvme_path\":\"%s\"},"
             "\"offload_optimizer\":{\"device\":\"nvme\",\"nvme_path\":\"%s\"}},",
             dir, dir);
    for (uint32_t i = 0; i < 2 * FOREIGN_COUNT; i++) {
        const foreign_checkpoint *k = &foreign_checkpoints[i / 2];
        foreign_subject s = {.e = NULL};
        foreign_configure(&s.c, k, 1, i % 2 == 0 ? "" : more, i % 2 == 0 ? "" : "\"chunk_elems\":8192,");
        foreign_need(foreign_begin(&s, foreign_folder(k), NULL, &foreign_err));
        foreign_need(check_state(&s, k, &foreign_err));
        foreign_end(&s);
    }
    tiny_dir_remove(dir);
}

static spw_status
load_on_rank(void *ctx, spw_comm *comm, uint32_t rank, spw_error *e)
{
    const foreign_checkpoint *k = ctx;
    foreign_subject s = {.e = NULL};
    char folder[300];
    spw_status st;
    (void)rank;
    snprintf(folder, sizeof folder, VECTORS "%s/global_step4", k->name);
    foreign_configure(&s.c, k, 2, "\"zero_optimization\":{\"stage\":3},", "");
    st = foreign_begin(&s, folder, comm, e);
    if (st == SPW_OK)
        st = check_state(&s, k, e);
    foreign_end(&s);
    return st;
}

/* What three ranks wrote, on two. */
static void
test_ranks(void **state)
{
    foreign_checkpoint k = foreign_checkpoints[STAGE3];
    (void)state;
    k.ranks = 4; /* a batch that shares out */
    ranks_run(2, &(spw_comm_options){.chaos_seed = 3}, load_on_rank, &k);
}

/* The same as in make_foreign_vectors.py. */
static void
batch(const spw_config *c, uint64_t step, int32_t *tokens, int32_t *targets)
{
    for (uint64_t row = 0; row < c->train_batch_size; row++) {
        for (uint64_t i = 0; i <= LENGTH; i++) {
            int32_t x = (int32_t)((step * 7 + row * 5 + (step + 1) * i * i * 3 + i) % 19);
            if (i < LENGTH)
                tokens[row * LENGTH + i] = x;
            if (i > 0)
                targets[row * LENGTH + i - 1] = x;
        }
    }
}

/* Four more steps here, beside the four that they went on with: losses to a millionth, and the masters that come of them. */
static void
test_goes_on(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < FOREIGN_COUNT; i++) {
        const foreign_checkpoint *k = &foreign_checkpoints[i];
        bool exact = k->format == NULL || strcmp(k->format, "fp32") == 0;
        foreign_subject s = {.e = NULL};
        float losses[ELEMS_MAX];
        uint64_t n;
        if (k->experts)
            continue; /* its tokens are others */
        expected(k->name, "losses", losses, &n);
        assert_int_equal(n, STEPS);
        foreign_configure(&s.c, k, 1, "", "");
        foreign_need(foreign_begin(&s, foreign_folder(k), NULL, &foreign_err));
        for (uint64_t step = SAVED; step < STEPS; step++) {
            int32_t tokens[4 * LENGTH], targets[4 * LENGTH];
            spw_step_result result;
            double off, lr = spw_schedule_lr(&s.c, spw_engine_updates(s.e) + 1);
            batch(&s.c, step, tokens, targets);
            foreign_need(spw_engine_step(s.e, tokens, targets, (uint32_t)s.c.accumulation, lr, &result, &foreign_err));
            off = fabs(result.loss / (double)losses[step] - 1);
            if (off > (exact ? 1e-6 : 1e-2)) /* bf16 and fp16 are computed with in fp32 here */
                fail_msg("%s: loss %.9g of step %llu, theirs is %.9g", k->name, result.loss, (unsigned long long)step,
                         (double)losses[step]);
        }
        if (exact)
            foreign_need(check_part(&s, k->name, "master", "end.", "",
                                    k->model != NULL && strstr(k->model, "gemma4") != NULL ? 5e-6 : 3e-6,
                                    &foreign_err));
        foreign_end(&s);
    }
}

static void
test_loss_scale(void **state)
{
    const foreign_checkpoint *k = &foreign_checkpoints[FP16];
    foreign_subject s = {.e = NULL};
    float want[ELEMS_MAX];
    uint64_t n;
    const spw_loss_scaler *scaler;
    (void)state;
    expected(k->name, "scaler", want, &n);
    foreign_configure(&s.c, k, 1, "", "");
    foreign_need(foreign_begin(&s, foreign_folder(k), NULL, &foreign_err));
    scaler = spw_engine_loss_scaler(s.e);
    assert_true(scaler->dynamic && scaler->scale == (double)want[0] && scaler->scale < 524288);
    assert_int_equal(s.e->step_count, SAVED); /* one of them an update: masks go on with the fifth */
    assert_true((float)scaler->hysteresis == want[1] && (float)scaler->steps == want[2] &&
                (float)scaler->last_overflow == want[3]);
    foreign_end(&s);
}

/* ---------------------------------------------------------------- another configuration than it was */

static void
compares(const foreign_checkpoint *k, const spw_config *c, uint32_t count, const char *says)
{
    foreign_compares(foreign_folder(k), c, count, says);
}

static void
test_compare(void **state)
{
    const foreign_checkpoint *k = &foreign_checkpoints[STAGE2];
    spw_config c;
    (void)state;
    for (uint32_t i = 0; i < FOREIGN_COUNT; i++) {
        foreign_configure(&c, &foreign_checkpoints[i], 1, "", "");
        compares(&foreign_checkpoints[i], &c, 0, "");
    }
    foreign_configure(&c, k, 1, "", "");
    c.optimizer.beta2 = 0.999;
    c.gradient_clipping = 0;
    compares(k, &c, 2, "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.9,0.999] now\n");
    foreign_configure(&c, k, 1, "", "");
    c.train_batch_size = 6;
    c.accumulation = 2;
    compares(k, &c, 3, "train_batch_size: 3 in the checkpoint, 6 now\n");
    foreign_configure(&c, k, 1, "", "");
    c.run.decay_norm_and_bias = true;
    compares(
        k, &c, 1,
        "weight decay of model.layers.0.input_layernorm.weight (spillway.decay_norm_and_bias): 0 in the checkpoint, "
        "0.1 now\n");
    foreign_configure(&c, &foreign_checkpoints[STAGE3], 1, "", ""); /* stage 3, whose groups have several arrays */
    c.run.decay_norm_and_bias = true;
    compares(&foreign_checkpoints[STAGE3], &c, 1, "0 in the checkpoint, 0.1 now\n");
    foreign_configure(&c, k, 1, "", "\"freeze\":[\"lm_head.weight\"],");
    compares(k, &c, 1, "spillway.freeze: lm_head.weight was trained in the checkpoint, is frozen now\n");
    foreign_configure(&c, &foreign_checkpoints[FSDP], 1, "",
                      ""); /* which has no configuration: what its optimizer had is compared */
    c.run.decay_norm_and_bias = true;
    c.optimizer.beta1 = 0.8;
    c.gradient_clipping = 0.5;
    compares(&foreign_checkpoints[FSDP], &c, 2,
             "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.8,0.95] now\n");
    foreign_configure(&c, &foreign_checkpoints[FSDP], 1, "", "");
    snprintf(c.optimizer.type, sizeof c.optimizer.type, "Lion");
    compares(&foreign_checkpoints[FSDP], &c, 1,
             "optimizer: it kept exp_avg, exp_avg_sq of each element in the checkpoint, Lion keeps 1 of them now\n");
    foreign_configure(&c, &foreign_checkpoints[TRAINER], 1, "", ""); /* its numbers are each parameter's */
    c.run.decay_norm_and_bias = true;
    compares(&foreign_checkpoints[TRAINER], &c, 1, "0 in the checkpoint, 0.1 now\n");
    foreign_configure(&c, &foreign_checkpoints[LLMC], 1, "",
                      ""); /* where these three cannot be chosen, and shapes do not tell heads */
    c.run.decay_norm_and_bias = true;
    c.optimizer.beta2 = 0.999;
    c.gradient_clipping = 0.5;
    c.model.heads = c.model.kv_heads = 1;
    c.model.head_dim = 8;
    compares(&foreign_checkpoints[LLMC], &c, 4, "model: 2 heads in the checkpoint, 1 now\n");
    foreign_configure(&c, &foreign_checkpoints[FULL], 1, "", ""); /* its groups name their parameters */
    c.run.decay_norm_and_bias = true;
    c.optimizer.eps = 1e-6;
    compares(&foreign_checkpoints[FULL], &c, 2, "0 in the checkpoint, 0.1 now\n");
    foreign_configure(&c, &foreign_checkpoints[FROZEN], 1, "", "");
    c.run.freeze.count = 1;
    compares(&foreign_checkpoints[FROZEN], &c, 1, "was frozen in the checkpoint, is trained now\n");
    foreign_configure(&c, k, 1, "", "\"lora\":{\"rank\":2,\"targets\":[\"q_proj\"]},");
    {
        uint32_t found;
        assert_int_equal(spw_foreign_compare(foreign_folder(k), &c, NULL, NULL, &found, &foreign_err),
                         SPW_EUNSUPPORTED);
    }
}

/* Parameters count their updates each for itself: the most is what a schedule goes by, and that others have made fewer is told. */
static void
test_uneven(void **state)
{
    char dir[256], command[900];
    spw_config c;
    spw_foreign *d;
    (void)state;
    tiny_dir_make(dir);
    foreign_copy(&foreign_checkpoints[FULL], dir);
    snprintf(command, sizeof command, "cp " VECTORS "fsdp/broken/uneven.bin %s/optimizer.bin", dir);
    assert_int_equal(system(command), 0);
    foreign_need(spw_foreign_open(&d, dir, &foreign_err));
    assert_int_equal(spw_foreign_get_about(d)->updates, 4);
    spw_foreign_close(d);
    foreign_configure(&c, &foreign_checkpoints[FULL], 1, "", "");
    foreign_compares(dir, &c, 1, "updates: some parameters have made fewer than 4 in the checkpoint");
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- what is found */

/* Experts' matrices that are (in, out) in the weights are so in what the optimizer has of them: here twice the weights, and their half. */
static void
test_turned(void **state)
{
    static const char *const names[] = {"exp_avg", "exp_avg_sq"};
    spw_hf_reader *weights;
    spw_st_reader *moments;
    spw_model_config config;
    spw_model *m;
    spw_foreign *d;
    char dir[256], command[900];
    uint32_t found = 0;
    (void)state;
    tiny_dir_make(dir);
    snprintf(command, sizeof command, "cp " VECTORS "families/qwen3_vl_moe_images/* " VECTORS "fsdp/turned/* %s", dir);
    assert_int_equal(system(command), 0);
    foreign_need(spw_foreign_open(&d, dir, &foreign_err));
    foreign_need(spw_hf_config_load(&config, dir, &foreign_err));
    foreign_need(spw_model_build(&m, &config, &foreign_err));
    foreign_need(spw_foreign_weights(d, &weights, &foreign_err));
    foreign_need(spw_hf_reader_bind(weights, m, &foreign_err));
    foreign_need(spw_foreign_moments(d, weights, m, names, 2, &moments, &foreign_err));
    for (uint32_t id = 0; id < m->param_count; id++) {
        const uint64_t n = m->params[id].rows * m->params[id].cols;
        for (uint32_t k = 0; k < 2; k++) {
            char name[200];
            float w[ELEMS_MAX], got[ELEMS_MAX];
            const spw_tensor_info *t;
            snprintf(name, sizeof name, "%s.%s", m->params[id].name, names[k]);
            t = spw_st_reader_find(moments, name);
            if (t == NULL)
                continue;
            found++;
            assert_int_equal(t->bytes, n * sizeof *got);
            foreign_need(spw_hf_read_param(weights, id, 0, n, w, &foreign_err));
            foreign_need(spw_st_read(moments, t, 0, got, t->bytes, &foreign_err));
            for (uint64_t i = 0; i < n; i++) {
                if (got[i] != (k == 0 ? 2 * w[i] : w[i] / 2))
                    fail_msg("%s[%llu] is %.9g", name, (unsigned long long)i, (double)got[i]);
            }
        }
    }
    assert_int_equal(found, 2 * 3 * config.experts);
    spw_st_reader_close(moments);
    spw_hf_reader_close(weights);
    spw_model_destroy(m);
    spw_foreign_close(d);
    tiny_dir_remove(dir);
}

/* Averages of the weights (0) lie beside the weights (1), by names that come first: they are not taken for what is trained. */
static void
test_averages(void **state)
{
    spw_hf_reader *weights;
    spw_foreign *d;
    float w[4];
    (void)state;
    foreign_need(spw_foreign_open(&d, VECTORS "fsdp/averages", &foreign_err));
    foreign_need(spw_foreign_weights(d, &weights, &foreign_err));
    assert_int_equal(spw_hf_reader_count(weights), 1);
    foreign_need(spw_hf_read(weights, 0, 0, w, sizeof w, &foreign_err));
    for (int i = 0; i < 4; i++)
        assert_true(w[i] == 1);
    spw_hf_reader_close(weights);
    spw_foreign_close(d);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weights), cmocka_unit_test(test_state),      cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_goes_on), cmocka_unit_test(test_loss_scale), cmocka_unit_test(test_compare),
        cmocka_unit_test(test_uneven),  cmocka_unit_test(test_turned),     cmocka_unit_test(test_averages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
