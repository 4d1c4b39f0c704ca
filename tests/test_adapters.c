/* Adapters beside frozen weights: their gradients, merging them, and checkpoints that share the file of what is frozen. */
#include "lib_rig.h"
#include "nn_internal.h"
#include "spw_access.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/stat.h>
#include <cmocka.h>

/* The file of the model in checkpoint step-<n> of the rig's folder. */
static struct stat
model_file(const rig *r, int step)
{
    char path[400];
    struct stat info;
    snprintf(path, sizeof path, "%s/step-%d/model.safetensors", r->dir, step);
    if (stat(path, &info) != 0)
        fail_msg("%s is missing", path);
    return info;
}

static bool
shared(const rig *r, int a, int b)
{
    return model_file(r, a).st_ino == model_file(r, b).st_ino;
}

static void
change_frozen(rig *r, float value)
{
    spw_access a = {"wte.weight", SPW_ACCESS_MASTER, 5, 1};
    rig_need(r, spw_access_set_full(r->e, &a, &value, 0, &r->err));
}

/*
 * Checkpoints of adapters share the file of the frozen model, as long as it is certain that it holds what the store holds; every
 * one loads, whatever becomes of the others. A save then reads and writes nothing of the base.
 */
static void
test_checkpoints_share(void **state)
{
    rig r, other;
    spw_store_stats before, after;
    char command[700];
    struct stat info;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_config(&other, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
    rig_lora(&r);
    rig_lora(&other);
    r.c.run.checkpoint_links = other.c.run.checkpoint_links = true;
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 1);
    rig_save(&r, 1);
    rig_train(&r, 1, 2);
    rig_need(&r, spw_engine_drain(r.e, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &before);
    rig_save(&r, 2);
    spw_store_get_stats(spw_engine_store(r.e), &after);
    assert_true(shared(&r, 1, 2));
    assert_int_equal(model_file(&r, 2).st_nlink, 2);
    assert_true(after.nvme_read_bytes - before.nvme_read_bytes <= spw_engine_plan(r.e)->trained * 12);
    rig_load(&other, &r, 2);
    rig_same_state(&r, &other, "state of a shared checkpoint");
    /* what was loaded is shared on, also from another folder; and when the first one goes */
    snprintf(command, sizeof command, "rm -r %s/step-1", r.dir);
    assert_int_equal(system(command), 0);
    rig_train(&other, 2, 3);
    rig_save(&other, 3);
    assert_int_equal(model_file(&other, 3).st_ino, model_file(&r, 2).st_ino);
    rig_train(&r, 2, 3);
    rig_save(&r, 3);
    assert_true(shared(&r, 2, 3));
    /* an edit of what is frozen */
    change_frozen(&r, 0.25f);
    rig_save(&r, 4);
    assert_false(shared(&r, 3, 4));
    rig_close(&other);
    rig_load(&other, &r, 4);
    rig_same_state(&r, &other, "state after an edit");
    rig_save(&r, 5);
    assert_true(shared(&r, 4, 5));
    /* a file that somebody wrote to, or took away */
    snprintf(command, sizeof command, "touch -d '2001-01-01' %s/step-5/model.safetensors", r.dir);
    assert_int_equal(system(command), 0);
    rig_save(&r, 6);
    assert_false(shared(&r, 5, 6));
    snprintf(command, sizeof command, "rm -r %s/step-6", r.dir);
    assert_int_equal(system(command), 0);
    info = model_file(&r, 5);
    rig_save(&r, 7);
    assert_int_not_equal(model_file(&r, 7).st_ino, info.st_ino);
    /* the same step again, and with a limit */
    rig_save(&r, 7);
    r.c.run.keep_last = 1;
    rig_save(&r, 8);
    assert_int_equal(model_file(&r, 8).st_nlink, 1);
    rig_close(&other);
    rig_load(&other, &r, 8);
    rig_same_state(&r, &other, "state of the last one");
    /* another type of weights; and who does not want it */
    rig_close(&other);
    other.c.run.state_format = SPW_STATE_FP32;
    rig_load(&other, &r, 8);
    rig_save(&other, 9);
    assert_int_not_equal(model_file(&other, 9).st_ino, model_file(&r, 8).st_ino);
    /* codes for it: what they stand for is not what was loaded, and then it is */
    rig_close(&other);
    other.c.run.state_format = SPW_STATE_SPLIT;
    snprintf(other.c.run.frozen_codes, sizeof other.c.run.frozen_codes, "int4");
    rig_load(&other, &r, 8);
    rig_save(&other, 10);
    assert_int_not_equal(model_file(&other, 10).st_ino, model_file(&r, 8).st_ino);
    rig_close(&other);
    rig_load(&other, &other, 10);
    rig_save(&other, 11);
    assert_true(shared(&other, 10, 11));
    rig_close(&other);
    snprintf(other.c.run.frozen_codes, sizeof other.c.run.frozen_codes, "none");
    rig_load(&other, &other, 11);
    rig_save(&other, 12);
    assert_true(shared(&other, 11, 12));
    r.c.run.keep_last = 0;
    r.c.run.checkpoint_links = false;
    rig_save(&r, 9);
    assert_false(shared(&r, 8, 9));
    rig_remove(&r);
    rig_remove(&other);
}

static bool
has_model(const rig *r, int step)
{
    char path[400];
    snprintf(path, sizeof path, "%s/step-%d/model.safetensors", r->dir, step);
    return access(path, F_OK) == 0;
}

/* Those that name the folder of the frozen model, in every tier, until something of it is edited: then it is in the checkpoint. */
static void
test_checkpoints_name(void **state)
{
    rig base, r, other;
    char from[400];
    (void)state;
    rig_config(&base, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
    rig_open(&base);
    rig_need(&base, spw_engine_init_params(base.e, 7, &base.err));
    rig_save(&base, 1);
    snprintf(from, sizeof from, "%s/step-1", base.dir);
    for (int tier = SPW_TIER_HOST; tier <= SPW_TIER_NVME; tier++) {
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, (spw_tier)tier);
        rig_config(&other, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
        rig_lora(&r);
        rig_lora(&other);
        r.c.run.checkpoint_base = false;
        r.c.run.frozen_in_place = tier == SPW_TIER_NVME;
        other.c.run.checkpoint_base = true;
        r.from = from;
        rig_open(&r);
        rig_need(&r, spw_engine_load_weights(r.e, from, &r.err));
        rig_train(&r, 0, 2);
        rig_save(&r, 2);
        assert_false(has_model(&r, 2));
        rig_load(&other, &r, 2);
        rig_same_state(&r, &other, "state of a checkpoint without the model");
        rig_save(&other, 3);
        assert_true(has_model(&other, 3)); /* who wants it has it again */
        rig_close(&other);
        other.c.run.checkpoint_base = false;
        rig_load(&other, &r, 2);
        rig_train(&other, 2, 3);
        rig_save(&other, 4);
        assert_false(has_model(&other, 4));
        change_frozen(&other, 0.25f);
        rig_save(&other, 5);
        assert_true(has_model(&other, 5));
        rig_close(&r);
        r.from = NULL;
        rig_load(&r, &other, 5);
        rig_same_state(&r, &other, "state after an edit");
        rig_remove(&r);
        rig_remove(&other);
    }
    rig_remove(&base);
}

/* Where something of the model itself is trained, every checkpoint has its own. */
static void
test_checkpoints_do_not_share(void **state)
{
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
    rig_freeze(&r, "h.*");
    r.c.run.checkpoint_links = true;
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_save(&r, 1);
    rig_save(&r, 2);
    assert_false(shared(&r, 1, 2));
    rig_remove(&r);
}

/* B is 0 at first: losses of evaluation and of the first step are the base model's, bit for bit. */
static void
test_lora_starts_as_base(void **state)
{
    (void)state;
    static const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA, SPW_FAMILY_QWEN3_MOE, SPW_FAMILY_GPT_OSS,
                                          SPW_FAMILY_LLAMA4};
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        double loss[2][2];
        for (int k = 0; k < 2; k++) {
            rig r;
            rig_config(&r, families[i], SPW_STATE_SPLIT, SPW_TIER_HOST);
            if (k == 1)
                (r.c.model.experts > 0 ? rig_lora_experts : rig_lora)(&r);
            rig_open(&r);
            rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
            tiny_batch(3, r.c.model.vocab, r.c.micro_batch * r.c.data.seq_length, rig_tokens, rig_targets);
            rig_need(&r, spw_engine_eval(r.e, rig_tokens, rig_targets, 1, &loss[k][0], &r.err));
            rig_train(&r, 0, 2);
            loss[k][1] = r.losses[0];
            assert_true(k == 0 || r.norms[0] > 0);
            rig_remove(&r);
        }
        assert_memory_equal(loss[0], loss[1], sizeof loss[0]);
    }
}

static void
test_lora_everywhere(void **state)
{
    (void)state;
    rig_everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, rig_lora);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 1, rig_lora_dropout);
    rig_everywhere(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_PHI3, SPW_STATE_FP32, 0, rig_lora_dropout);
    rig_everywhere(SPW_FAMILY_GEMMA3, SPW_STATE_FP32, 0, rig_lora);
    rig_everywhere(SPW_FAMILY_NEOX, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_STABLELM, SPW_STATE_FP32, 0, rig_lora_dropout);
    rig_everywhere(SPW_FAMILY_QWEN3_5, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_QWEN3_NEXT, SPW_STATE_FP32, 0, rig_lora_dropout);
    rig_everywhere(SPW_FAMILY_GEMMA4, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_OLMO_HYBRID, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_KIMI_LINEAR, SPW_STATE_FP32, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_FALCON_H1, SPW_STATE_FP32, 0, rig_lora);
    rig_everywhere(TINY_GEMMA4_SMALL, SPW_STATE_FP32, 1, rig_lora_dropout);
    rig_everywhere(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_SPLIT, 1, rig_lora);
    rig_everywhere(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, 1, rig_lora_experts);
    rig_everywhere(SPW_FAMILY_GPT_OSS, SPW_STATE_FP32, 0, rig_lora_experts);
}

static void
test_lora_resumes(void **state)
{
    (void)state;
    rig_resumes(SPW_STATE_FP32, SPW_FAMILY_LLAMA, SPW_TIER_HOST, rig_lora);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_GPT2, SPW_TIER_NVME, rig_lora);
    rig_resumes(SPW_STATE_MIXED, SPW_FAMILY_LLAMA, SPW_TIER_HOST, rig_lora_dropout);
    rig_resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA4, SPW_TIER_NVME, rig_lora_experts);
}

/* Gradients and records for the adapters alone. */
static void
test_lora_bytes(void **state)
{
    (void)state;
    for (int tier = SPW_TIER_DEVICE; tier < SPW_TIER_COUNT; tier++) {
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, (spw_tier)tier);
        rig_lora(&r);
        rig_open(&r);
        rig_count_bytes(&r, 4 * (3 * (32 + 96) + 2 * (32 + 128)));
        rig_remove(&r);
    }
}

/* The gradient that a step took: its part in Adam's first moment. */
static float *
gradient(rig *r, int step)
{
    float *before = rig_read(r, SPW_PART_EXP_AVG), *after;
    rig_train(r, step, step + 1);
    after = rig_read(r, SPW_PART_EXP_AVG);
    for (uint64_t i = 0; i < spw_model_elems(r->model); i++)
        after[i] = (float)(((double)after[i] - (double)(float)r->c.optimizer.beta1 * (double)before[i]) /
                           (1 - (double)(float)r->c.optimizer.beta1));
    free(before);
    return after;
}

static uint32_t
find_param(const spw_model *m, const char *name)
{
    uint32_t id = 0;
    while (id < m->param_count && strcmp(m->params[id].name, name) != 0)
        id++;
    assert_true(id < m->param_count);
    return id;
}

/* What the adapter is beside: peft has the names that transformers has in memory. */
static uint32_t
find_adapted(const spw_model *m, const char *adapter)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        char linear[96], module[160], name[200];
        snprintf(linear, sizeof linear, "%.*s", (int)(strlen(m->params[id].name) - strlen(".weight")),
                 m->params[id].name);
        spw__nn_name_module(m, linear, module, sizeof module);
        snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
        if (strcmp(name, adapter) == 0)
            return id;
    }
    fail_msg("nothing is beside %s", adapter);
    return 0;
}

/* Is got the product, scaled, of dW and A (for B's gradient), or of dW and B (for A's)? In fp64; dW is (out, in) by element. */
static void
check_gradients(const rig *plain, const float *dw, const rig *adapted, const float *state_, const float *got,
                uint32_t a)
{
    const spw_param *pa = &adapted->model->params[a], *pb = &adapted->model->params[a + 1];
    const float *A = state_ + rig_elems_before(adapted->model, a),
                *B = state_ + rig_elems_before(adapted->model, a + 1);
    const float *dA = got + rig_elems_before(adapted->model, a), *dB = got + rig_elems_before(adapted->model, a + 1);
    bool in_out = plain->c.model.family == SPW_FAMILY_GPT2;
    uint64_t in = pa->cols, out = pb->rows, rank = pa->rows;
    double scale = (double)spw_lora_scale(&adapted->model->lora), diff[2] = {0, 0}, norm[2] = {0, 0};
    dw += rig_elems_before(plain->model, find_adapted(plain->model, pa->name));
    for (uint64_t k = 0; k < rank; k++) {
        for (uint64_t i = 0; i < in; i++) {
            double want = 0;
            for (uint64_t o = 0; o < out; o++)
                want += scale * (double)B[o * rank + k] * (double)dw[in_out ? i * out + o : o * in + i];
            diff[0] += (want - (double)dA[k * in + i]) * (want - (double)dA[k * in + i]);
            norm[0] += want * want;
        }
        for (uint64_t o = 0; o < out; o++) {
            double want = 0;
            for (uint64_t i = 0; i < in; i++)
                want += scale * (double)A[k * in + i] * (double)dw[in_out ? i * out + o : o * in + i];
            diff[1] += (want - (double)dB[o * rank + k]) * (want - (double)dB[o * rank + k]);
            norm[1] += want * want;
        }
    }
    for (int k = 0; k < 2; k++) {
        if (!(norm[k] > 0) || !(sqrt(diff[k]) <= 3e-5 * sqrt(norm[k])))
            fail_msg("gradient of %s: relative difference %.3g (norm %.3g)", k ? pb->name : pa->name,
                     sqrt(diff[k] / norm[k]), sqrt(norm[k]));
    }
}

/* The gradient of a whole tensor of experts, by that of the k-th parameter's matrix: its rows and the expert's elements of B. */
typedef struct factors {
    const float *A, *B, *dA, *dB;
    uint64_t experts, rank, in, out;
    bool turned; /* the matrix is A^T B^T */
    double scale;
    double *want_a, *want_b;
} factors;

static void
add_expert(const factors *f, const float *dw, uint64_t expert, uint64_t first, uint64_t rows, uint64_t cols)
{
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t col = 0; col < cols; col++)
            for (uint64_t k = 0; k < f->rank; k++) {
                const uint64_t o = f->turned ? col : first + row, i = f->turned ? row : col;
                const uint64_t a = (expert * f->rank + k) * f->in + i, b = (o * f->rank + k) * f->experts + expert;
                f->want_a[a] += f->scale * (double)f->B[b] * (double)dw[row * cols + col];
                f->want_b[b] += f->scale * (double)f->A[a] * (double)dw[row * cols + col];
            }
}

static void
check_near(const char *name, const double *want, const float *got, uint64_t n)
{
    double diff = 0, norm = 0;
    for (uint64_t i = 0; i < n; i++) {
        diff += (want[i] - (double)got[i]) * (want[i] - (double)got[i]);
        norm += want[i] * want[i];
    }
    if (!(norm > 0) || !(sqrt(diff) <= 3e-5 * sqrt(norm)))
        fail_msg("gradient of %s: relative difference %.3g (norm %.3g)", name, sqrt(diff / norm), sqrt(norm));
}

/* Of an adapter beside experts, by the layout that peft's files have: the chain rule over all experts' merged matrices. */
static void
check_fused(const rig *plain, const float *dw, const rig *adapted, const float *state_, const float *got, uint32_t b,
            spw_fused_kind kind)
{
    const spw_model *m = adapted->model;
    const spw_block *block = &m->blocks[b];
    const uint32_t a = block->param_ids[block->fused_at[kind]];
    const spw_param *pa = &m->params[a], *pb = &m->params[a + 1];
    factors f = {state_ + rig_elems_before(m, a),
                 state_ + rig_elems_before(m, a + 1),
                 got + rig_elems_before(m, a),
                 got + rig_elems_before(m, a + 1),
                 m->config.experts,
                 m->lora.rank,
                 pa->cols,
                 pb->rows,
                 m->config.experts_paired,
                 (double)spw_lora_scale(&m->lora),
                 calloc(pa->rows * pa->cols, sizeof(double)),
                 calloc(pb->rows * pb->cols, sizeof(double))};
    uint64_t first, matrices = 0;
    spw_fused_kind of;
    assert_int_equal(pa->rows, m->config.experts * m->lora.rank);
    assert_int_equal(pb->cols, pa->rows);
    for (uint32_t k = 0; k < block->param_count; k++) {
        const spw_param *p = &m->params[block->param_ids[k]];
        if (!spw_model_fused_part(m, block, k, &of, &first) || of != kind)
            continue;
        add_expert(&f, dw + rig_elems_before(plain->model, find_param(plain->model, p->name)), p->expert - 1, first,
                   p->rows, p->cols);
        matrices++;
    }
    assert_true(matrices == m->config.experts || matrices == 2 * m->config.experts);
    check_near(pa->name, f.want_a, f.dA, pa->rows * pa->cols);
    check_near(pb->name, f.want_b, f.dB, pb->rows * pb->cols);
    free(f.want_a);
    free(f.want_b);
}

/*
 * A trained adapter, merged by export and loaded into a model without adapters: logits within 1e-5 of the largest, also
 * from the checkpoint in an engine for inference, and the adapter's gradients are what the merged weight's gives by the
 * chain rule in fp64.
 */
static void
merged(spw_family family, void (*adapt)(rig *r))
{
    rig r, plain;
    char path[SPW_PATH_BYTES], out[SPW_PATH_BYTES];
    spw_export_report report;
    spw_engine *drawing = NULL;
    float logits[3][64], most = 0, *state_, *dw, *got;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    rig_config(&plain, family, SPW_STATE_FP32, SPW_TIER_HOST);
    if (r.c.model.experts_beside) /* files say that the last layer has no window */
        r.c.model.layers = plain.c.model.layers = r.c.model.full_every;
    adapt(&r);
    r.c.gradient_clipping = plain.c.gradient_clipping = 0;
    rig_open(&r);
    rig_open(&plain);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 3);
    rig_need(&r, spw_checkpoint_save(r.e, &r.c, r.dir, &(spw_checkpoint_state){.step = 3, .updates = 3}, path, &r.err));
    assert_int_equal(spw_engine_load_weights(plain.e, path, &plain.err), SPW_EUNSUPPORTED);
    rig_close(&plain);
    memset(&plain.err, 0, sizeof plain.err);
    rig_open(&plain);
    snprintf(out, sizeof out, "%.200s/merged", r.dir);
    rig_need(&r, spw_export(&(spw_export_options){.source = path, .to = out, .dtype = SPW_F32}, &report, &r.err));
    rig_need(&plain, spw_engine_load_weights(plain.e, out, &plain.err));
    rig_need(&r,
             spw_engine_create(
                 &drawing, &(spw_engine_options){.config = &r.c, .model = r.model, .inference = true, .sequences = 1},
                 &r.err));
    rig_need(&r, spw_checkpoint_load(drawing, path, &r.err));
    tiny_batch(1, r.c.model.vocab, 20, rig_tokens, rig_targets);
    rig_need(&r, spw_engine_logits(r.e, rig_tokens, 20, logits[0], &r.err));
    rig_need(&plain, spw_engine_logits(plain.e, rig_tokens, 20, logits[1], &plain.err));
    rig_need(&r, spw_engine_logits(drawing, rig_tokens, 20, logits[2], &r.err));
    spw_engine_destroy(drawing);
    assert_memory_equal(logits[0], logits[2], r.c.model.vocab * sizeof(float));
    for (uint64_t i = 0; i < r.c.model.vocab; i++)
        most = fmaxf(most, fabsf(logits[0][i]));
    for (uint64_t i = 0; i < r.c.model.vocab; i++) {
        if (!(fabsf(logits[0][i] - logits[1][i]) <= 1e-5f * most))
            fail_msg("logit %u: %.9g with the adapter, %.9g merged", (unsigned)i, (double)logits[0][i],
                     (double)logits[1][i]);
    }
    state_ = rig_read(&r, SPW_PART_MASTER);
    got = gradient(&r, 3);
    dw = gradient(&plain, 3);
    for (uint32_t id = 0; id < r.model->param_count; id++) {
        if (r.model->params[id].adapter && !r.model->params[id].of_experts &&
            strstr(r.model->params[id].name, "lora_A") != NULL)
            check_gradients(&plain, dw, &r, state_, got, id);
    }
    for (uint32_t b = 0; b < r.model->block_count; b++)
        for (int kind = 0; kind < SPW_FUSED_COUNT; kind++)
            if (r.model->blocks[b].fused_at[kind] > 0)
                check_fused(&plain, dw, &r, state_, got, b, (spw_fused_kind)kind);
    free(state_);
    free(got);
    free(dw);
    rig_remove(&r);
    rig_remove(&plain);
}

static void
test_lora_merged(void **state)
{
    (void)state;
    merged(SPW_FAMILY_GPT2, rig_lora);
    merged(SPW_FAMILY_LLAMA, rig_lora);
    merged(SPW_FAMILY_PHI3, rig_lora);
    merged(SPW_FAMILY_DEEPSEEK_V4, rig_lora_experts);
    merged(SPW_FAMILY_NEOX, rig_lora);
    merged(SPW_FAMILY_OPT, rig_lora);
    merged(SPW_FAMILY_QWEN3_5, rig_lora);
    merged(SPW_FAMILY_GRANITE_HYBRID, rig_lora);
    merged(TINY_GEMMA4_SMALL, rig_lora);
    merged(SPW_FAMILY_QWEN3_MOE, rig_lora_experts);  /* gate and up apart */
    merged(SPW_FAMILY_GPT_OSS, rig_lora_experts);    /* (in, out), in pairs, with biases */
    merged(SPW_FAMILY_GEMMA4, rig_lora_experts);     /* in one */
    merged(SPW_FAMILY_NEMOTRON_H, rig_lora_experts); /* without a gate */
    merged(SPW_FAMILY_MISTRAL4, rig_lora_experts);
    merged(SPW_FAMILY_LFM2_MOE, rig_lora_experts);
    merged(SPW_FAMILY_AFMOE, rig_lora_experts);
    merged(SPW_FAMILY_OLMO_HYBRID, rig_lora);
    merged(SPW_FAMILY_KIMI_LINEAR, rig_lora_experts);
    merged(SPW_FAMILY_FALCON_H1, rig_lora);
    merged(SPW_FAMILY_LLAMA4, rig_lora_experts); /* (in, out), which peft takes for (out, in) */
}

/* Mistakes are told by name. */
static void
test_lora_refusals(void **state)
{
    static const struct {
        uint64_t rank;
        const char *target, *says, *parameter;
        spw_family family;
        double dropout;
    } cases[] = {
        {4, "q_proj", "target \"q_proj\"; there are c_attn, c_proj, c_fc, and * is all", NULL, SPW_FAMILY_GPT2, 0},
        {4, "wte", "\"wte\"", NULL, SPW_FAMILY_GPT2, 0},
        {4, "lm_head", "\"lm_head\"", NULL, SPW_FAMILY_GPT2, 0},
        {0, "c_attn", "no rank", NULL, SPW_FAMILY_GPT2, 0},
        {4, NULL, "no targets; there are c_attn, c_proj, c_fc, and", NULL, SPW_FAMILY_GPT2, 0},
        {4, "c_attn", "no layer of the model has experts; linear weights have targets", "down_proj", SPW_FAMILY_GPT2,
         0},
        {0, NULL, "has target_parameters and no rank", "down_proj", SPW_FAMILY_QWEN3_MOE, 0},
        {4, "gate_up_proj", "(the experts' are for target_parameters)", NULL, SPW_FAMILY_QWEN3_MOE, 0},
        {4, NULL, "no tensor of experts matches \"gate_proj\" of target_parameters; a layer has experts.gate_up_proj",
         "gate_proj", SPW_FAMILY_QWEN3_MOE, 0},
        {4, NULL, "dropout 0.1 with target_parameters: peft has no adapters beside experts with dropout", "*",
         SPW_FAMILY_QWEN3_MOE, 0.1},
        {4, "q_proj", "no layer of the model has experts; linear weights have targets", "experts.*",
         SPW_FAMILY_GLM4_MOE, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rig r;
        rig_config(&r, cases[i].family, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.run.lora.rank = cases[i].rank;
        r.c.run.lora.dropout = cases[i].dropout;
        r.c.run.lora_target_parameters.count = cases[i].parameter != NULL;
        snprintf(r.c.run.lora_target_parameters.item[0], 96, "%s",
                 cases[i].parameter != NULL ? cases[i].parameter : "");
        r.c.run.lora_targets.count = cases[i].target != NULL;
        snprintf(r.c.run.lora_targets.item[0], 96, "%s", cases[i].target != NULL ? cases[i].target : "");
        if (cases[i].family == SPW_FAMILY_GLM4_MOE) /* whose layers may all be without experts */
            r.c.model.dense_first = r.c.model.layers;
        assert_int_equal(spw_model_from_config(&r.model, &r.c, &r.err), SPW_ECONFIG);
        if (strstr(r.err.message, cases[i].says) == NULL)
            fail_msg("%s", r.err.message);
        tiny_dir_remove(r.dir);
    }
}

/* How many adapters of the tiny model are beside a linear weight of that last name; UINT32_MAX: the target is refused. */
static uint32_t
count_adapters(spw_family family, const char *target, const char *last, spw_error *err)
{
    spw_model_config c;
    spw_model *m;
    char end[60];
    uint32_t count = 0;
    tiny_model_config(&c, family);
    assert_int_equal(spw_model_build(&m, &c, err), SPW_OK);
    snprintf(end, sizeof end, ".%s.lora_A.weight", last);
    if (spw_model_add_lora(m, &(spw_lora){.rank = 2}, &target, 1, NULL, 0, err) != SPW_OK)
        count = UINT32_MAX;
    for (uint32_t id = 0; count < UINT32_MAX && id < m->param_count; id++)
        count += m->params[id].adapter && strstr(m->params[id].name, end) != NULL;
    spw_model_destroy(m);
    return count;
}

/* Routers have none unless a target spells one out, and then only where it is a linear layer to peft. */
static void
test_lora_routers(void **state)
{
    static const struct {
        spw_family family;
        const char *target, *last, *says; /* NULL: taken */
    } cases[] = {
        {SPW_FAMILY_MIXTRAL, "gate", "gate", NULL},
        {SPW_FAMILY_QWEN3_MOE, "*.mlp.gate", "gate", NULL},
        {SPW_FAMILY_QWEN2_MOE, "gate", "gate", NULL},
        {SPW_FAMILY_QWEN2_MOE, "shared_expert_gate", "shared_expert_gate", NULL},
        {SPW_FAMILY_MINIMAX_M2, "gate", "gate", NULL},
        {SPW_FAMILY_AFMOE, "router.gate", "gate", NULL},
        {SPW_FAMILY_GPT_OSS, "router", "router", "matches the target \"router\"; there are q_proj"},
        {SPW_FAMILY_GLM4_MOE, "gate", "gate", "matches the target \"gate\"; there are"},
        {SPW_FAMILY_DEEPSEEK_V2, "*.gate", "gate", "is all; the router is none, because peft"},
        {SPW_FAMILY_DEEPSEEK_V3, "model.layers.2.mlp.gate", "gate", "target \"model.layers.2.mlp.gate\""},
        {SPW_FAMILY_GLM_DSA, "gate", "gate", "is all; the router is none, because peft"},
        {SPW_FAMILY_DEEPSEEK_V4, "o_a_proj", "o_a_proj", "matches the target \"o_a_proj\"; there are q_a_proj"},
        {SPW_FAMILY_DEEPSEEK_V4, "weights_proj", "weights_proj", "matches the target \"weights_proj\"; there are"},
        {SPW_FAMILY_GLM_DSA, "wq_b", "wq_b", "matches the target \"wq_b\"; there are q_a_proj"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        spw_error err = {0};
        uint32_t named = count_adapters(cases[i].family, cases[i].target, cases[i].last, &err);
        if ((cases[i].says == NULL) != (named > 0 && named < UINT32_MAX))
            fail_msg("\"%s\", %s: %u adapters, %s", cases[i].target, spw_family_name(cases[i].family), named,
                     err.message);
        if (cases[i].says != NULL && strstr(err.message, cases[i].says) == NULL)
            fail_msg("%s", err.message);
        assert_int_equal(count_adapters(cases[i].family, "*", cases[i].last, &err), 0);
        assert_int_equal(count_adapters(cases[i].family, "model.layers.1.*", cases[i].last, &err), 0);
        assert_true(count_adapters(cases[i].family, "*",
                                   cases[i].family == SPW_FAMILY_DEEPSEEK_V4 ? "o_b_proj" : "o_proj", &err) == 3);
    }
    {
        spw_error err = {0};
        assert_int_equal(count_adapters(SPW_FAMILY_MIXTRAL, "gat?", "gate", &err), UINT32_MAX);
        assert_non_null(
            strstr(err.message, "there are q_proj, k_proj, v_proj, o_proj, gate, and * is all but routers"));
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checkpoints_share), cmocka_unit_test(test_checkpoints_do_not_share),
        cmocka_unit_test(test_checkpoints_name),  cmocka_unit_test(test_lora_starts_as_base),
        cmocka_unit_test(test_lora_everywhere),   cmocka_unit_test(test_lora_resumes),
        cmocka_unit_test(test_lora_bytes),        cmocka_unit_test(test_lora_merged),
        cmocka_unit_test(test_lora_refusals),     cmocka_unit_test(test_lora_routers),
    };
    return cmocka_run_group_tests_name("adapters", tests, NULL, NULL);
}
