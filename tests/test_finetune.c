/*
 * Fine-tuning: parameters that are frozen, and adapters beside them. What is not trained costs no gradient and no record and
 * keeps its bytes; what is trained gets the bits it would have got otherwise, wherever state lives.
 */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { STEPS = 5, TOKENS_MAX = 4096 };
static int32_t tokens[TOKENS_MAX], targets[TOKENS_MAX];

typedef struct rig {
    char dir[256];
    spw_config c;
    spw_model *model;
    spw_engine *e;
    spw_error err;
    double losses[STEPS], norms[STEPS];
} rig;

static void
rig_config(rig *r, spw_family family, spw_state_format format, spw_tier tier)
{
    memset(r, 0, sizeof *r);
    tiny_dir_make(r->dir);
    tiny_config(&r->c, format);
    tiny_model_config(&r->c.model, family);
    r->c.zero.offload_param = r->c.zero.offload_optimizer = tier;
    r->c.zero.param_path.count = r->c.zero.optimizer_path.count = 1;
    snprintf(r->c.zero.param_path.item[0], SPW_PATH_BYTES, "%s", r->dir);
    snprintf(r->c.zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", r->dir);
    snprintf(r->c.optimizer.type, sizeof r->c.optimizer.type, "AdamW");
}

static void
freeze(rig *r, const char *glob)
{
    spw_glob_list *list = &r->c.run.freeze;
    snprintf(list->item[list->count++], sizeof list->item[0], "%s", glob);
}

static void
need(const rig *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", r->err.message);
}

static void
rig_open(rig *r)
{
    need(r, spw_model_from_config(&r->model, &r->c, &r->err));
    need(r, spw_engine_create(
                &r->e,
                &(spw_engine_options){
                    .config = &r->c, .model = r->model, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
                &r->err));
}

static void
rig_close(rig *r)
{
    spw_engine_destroy(r->e);
    spw_model_destroy(r->model);
    r->e = NULL;
    r->model = NULL;
}

static void
rig_remove(rig *r)
{
    rig_close(r);
    tiny_dir_remove(r->dir);
}

static void
rig_train(rig *r, int first, int end)
{
    uint64_t n = r->c.micro_batch * r->c.accumulation * r->c.data.seq_length;
    assert_true(n <= TOKENS_MAX);
    for (int s = first; s < end; s++) {
        spw_step_result result;
        tiny_batch((uint64_t)s, r->c.model.vocab, n, tokens, targets);
        need(r,
             spw_engine_step(r->e, tokens, targets, (uint32_t)r->c.accumulation, r->c.optimizer.lr, &result, &r->err));
        r->losses[s] = result.loss;
        r->norms[s] = result.grad_norm;
    }
}

/* ---------------------------------------------------------------- reading state */

typedef struct reading {
    const rig *r;
    spw_state_part part;
    float *out; /* parameters one after the other, by id; those without a record have moments of 0 */
} reading;

static uint64_t
elems_before(const spw_model *m, uint32_t id)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < id; i++)
        sum += m->params[i].rows * m->params[i].cols;
    return sum;
}

static spw_status
read_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    reading *job = ctx;
    const spw_layout *l = spw_engine_layout(job->r->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    (void)grad;
    (void)err;
    for (uint32_t id = 0; id < l->param_count; id++) {
        uint64_t first, end;
        if (!spw__layout_overlap(&l->places[id], c, &first, &end) || (record == NULL && job->part != SPW_PART_MASTER))
            continue;
        spw_state_get(job->r->c.run.state_format, &spw_opt_adam, weights, record, c->elems, job->part, first - c->first,
                      end - first, job->out + elems_before(job->r->model, id) + (first - l->places[id].first));
    }
    return SPW_OK;
}

/* One part of every parameter; the caller frees it. */
static float *
read_part(rig *r, spw_state_part part)
{
    reading job = {r, part, calloc(spw_model_elems(r->model), sizeof(float))};
    assert_non_null(job.out);
    need(r, spw_engine_drain(r->e, &r->err));
    need(r, spw_store_sweep(spw_engine_store(r->e), SPW_SWEEP_VISIT, read_chunk, &job, &r->err));
    return job.out;
}

static void
same_param(const spw_model *m, uint32_t id, const float *a, const float *b, const char *what)
{
    uint64_t first = elems_before(m, id), n = m->params[id].rows * m->params[id].cols;
    if (memcmp(a + first, b + first, n * sizeof *a) != 0)
        fail_msg("%s of %s differs", what, m->params[id].name);
}

/* ---------------------------------------------------------------- frozen parameters */

/*
 * Frozen parameters keep their bytes. Everything else, and the losses, is what the same run gives in which their learning
 * rate and weight decay are 0: there gradients and moments exist and have no effect.
 */
static void
against_lr_zero(spw_family family, spw_state_format format, const char *const *globs, uint32_t count)
{
    rig frozen, still;
    float *before, *a, *b;
    rig_config(&frozen, family, format, SPW_TIER_NVME);
    rig_config(&still, family, format, SPW_TIER_HOST);
    frozen.c.gradient_clipping = still.c.gradient_clipping = 0;
    for (uint32_t g = 0; g < count; g++) {
        freeze(&frozen, globs[g]);
        still.c.optimizer.groups[g] = (spw_param_group){.lr = 0, .weight_decay = 0, .beta1 = NAN, .beta2 = NAN};
        snprintf(still.c.optimizer.groups[g].match, sizeof still.c.optimizer.groups[g].match, "%s", globs[g]);
    }
    still.c.optimizer.group_count = count;
    rig_open(&frozen);
    rig_open(&still);
    need(&frozen, spw_engine_init_params(frozen.e, 7, &frozen.err));
    need(&still, spw_engine_init_params(still.e, 7, &still.err));
    before = read_part(&frozen, SPW_PART_MASTER);
    rig_train(&frozen, 0, STEPS);
    rig_train(&still, 0, STEPS);
    assert_memory_equal(frozen.losses, still.losses, sizeof frozen.losses);
    for (int p = SPW_PART_MASTER; p < SPW_PART_COUNT; p++) {
        a = read_part(&frozen, (spw_state_part)p);
        b = read_part(&still, (spw_state_part)p);
        for (uint32_t id = 0; id < frozen.model->param_count; id++) {
            if (!frozen.model->params[id].frozen)
                same_param(frozen.model, id, a, b, p == SPW_PART_MASTER ? "the master" : "a moment");
            else if (p == SPW_PART_MASTER)
                same_param(frozen.model, id, a, before, "what is frozen");
        }
        free(a);
        free(b);
    }
    free(before);
    rig_remove(&frozen);
    rig_remove(&still);
}

static const char *const embeddings[] = {"w?e.weight"}, *const mlps[] = {"*.mlp.*", "ln_f.*", "h.1.attn.c_attn.weight"},
                         *const lower[] = {"model.embed_tokens.weight", "model.layers.[01].*"},
                         *const all_but_norms[] = {"*proj.weight", "model.embed_tokens.weight"};

static void
test_frozen_is_lr_zero(void **state)
{
    (void)state;
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, embeddings, 1);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, mlps, 3);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_FP32, lower, 2);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_FP32, all_but_norms, 2);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, mlps, 3);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, all_but_norms, 2);
}

/* In every placement, with one slot, random delays and poisoned buffers, clipped or not: the same bytes. */
static void
everywhere(spw_family family, spw_state_format format, double clipping, void (*change)(rig *r))
{
    static const struct {
        spw_tier param, optimizer;
        uint64_t chunk, passes;
        uint32_t slots;
        bool no_prefetch;
        uint64_t chaos;
    } kinds[] = {
        {SPW_TIER_DEVICE, SPW_TIER_DEVICE, 8192, 0, 0, false, 0}, {SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, 0, false, 0},
        {SPW_TIER_NVME, SPW_TIER_NVME, 8192, 0, 0, false, 0},     {SPW_TIER_HOST, SPW_TIER_NVME, 4096, 0, 1, false, 0},
        {SPW_TIER_NVME, SPW_TIER_NVME, 4096, 0, 1, true, 0},      {SPW_TIER_NVME, SPW_TIER_NVME, 4096, 0, 2, false, 31},
        {SPW_TIER_NVME, SPW_TIER_HOST, 4096, 0, 0, false, 32}};
    double want[STEPS];
    float *want_part[SPW_PART_COUNT] = {NULL};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        rig r;
        rig_config(&r, family, format, SPW_TIER_HOST);
        change(&r);
        r.c.gradient_clipping = clipping;
        r.c.zero.offload_param = kinds[k].param;
        r.c.zero.offload_optimizer = kinds[k].optimizer;
        r.c.run.chunk_elems = kinds[k].chunk;
        r.c.run.weight_slots = r.c.run.record_slots = kinds[k].slots;
        r.c.run.prefetch = !kinds[k].no_prefetch;
        r.c.run.chaos_seed = kinds[k].chaos;
        rig_open(&r);
        need(&r, spw_engine_init_params(r.e, 7, &r.err));
        rig_train(&r, 0, STEPS);
        if (k == 0)
            memcpy(want, r.losses, sizeof want);
        assert_memory_equal(want, r.losses, sizeof want);
        for (int p = 0; p < SPW_PART_COUNT; p++) {
            float *got = read_part(&r, (spw_state_part)p);
            for (uint32_t id = 0; id < r.model->param_count && k > 0; id++)
                same_param(r.model, id, got, want_part[p], "state");
            if (k == 0)
                want_part[p] = got;
            else
                free(got);
        }
        rig_remove(&r);
    }
    assert_true(want[STEPS - 1] < want[0]);
    for (int p = 0; p < SPW_PART_COUNT; p++)
        free(want_part[p]);
}

static void
freeze_mlps(rig *r)
{
    freeze(r, r->c.model.family == SPW_FAMILY_GPT2 ? "*.mlp.*" : "*_proj.weight");
}

static void
test_frozen_everywhere(void **state)
{
    (void)state;
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, freeze_mlps);
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, freeze_mlps);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, 0, freeze_mlps);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT24_INT8, 1, freeze_mlps);
}

/* Elements that are trained, counted by hand, and nothing for the others; weights for all. */
static void
count_bytes(rig *r, uint64_t trained_params)
{
    const spw_layout *l = spw_engine_layout(r->e);
    const spw_plan *p = spw_engine_plan(r->e);
    uint64_t trained = 0, params = 0;
    for (uint32_t id = 0; id < r->model->param_count; id++)
        params += r->model->params[id].frozen ? 0 : r->model->params[id].rows * r->model->params[id].cols;
    assert_int_equal(params, trained_params);
    for (uint32_t u = 0; u < l->unit_count; u++) {
        bool frozen = !l->units[u].trainable;
        trained += frozen ? 0 : l->units[u].elems;
        for (uint32_t id = 0; id < l->param_count; id++) {
            if (l->places[id].unit_idx == u)
                assert_int_equal(r->model->params[id].frozen, frozen);
        }
        assert_true((spw_store_grad(spw_engine_store(r->e), u) == NULL) == frozen);
    }
    assert_int_equal(p->trained, trained);
    assert_int_equal(p->grad_host, trained * sizeof(float));
    assert_int_equal(p->record_device + p->record_host + p->record_nvme, trained * 8);
    assert_int_equal(p->weight_device + p->weight_host + p->weight_nvme, l->elems * sizeof(float));
    for (int k = 0; k < SPW_PACE_COUNT; k++)
        assert_int_equal(p->traffic[k].d2h, trained * sizeof(float));
}

/* Gradients and records for what is trained alone: in the plan, in the store, and in what a step writes. */
static void
test_frozen_bytes(void **state)
{
    (void)state;
    for (int tier = SPW_TIER_DEVICE; tier < SPW_TIER_COUNT; tier++) {
        rig r;
        spw_store_stats before, after;
        const spw_plan *p;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, (spw_tier)tier);
        freeze(&r, "h.*.weight");
        freeze(&r, "w*");
        freeze(&r, "ln_f.*");
        rig_open(&r);
        count_bytes(&r, 3 * (32 + 96 + 32 + 32 + 128 + 32)); /* the biases of three layers */
        need(&r, spw_engine_init_params(r.e, 7, &r.err));
        rig_train(&r, 0, 1);
        need(&r, spw_engine_drain(r.e, &r.err));
        spw_store_get_stats(spw_engine_store(r.e), &before);
        rig_train(&r, 1, 3);
        need(&r, spw_engine_drain(r.e, &r.err));
        spw_store_get_stats(spw_engine_store(r.e), &after);
        p = spw_engine_plan(r.e);
        assert_int_equal(after.updates - before.updates, 2 * 3); /* a chunk per layer */
        if (tier == SPW_TIER_NVME) { /* what is still dirty in its slot comes later: no more than this */
            assert_true(after.nvme_write_bytes - before.nvme_write_bytes <= 3 * p->trained * 12);
            assert_int_equal(p->traffic[SPW_PACE_DEFAULT].nvme_write, p->trained * 12);
        } else {
            assert_int_equal(after.nvme_write_bytes, 0);
        }
        rig_remove(&r);
    }
}

/* Mistakes are told by name, before anything is taken. */
static void
test_freeze_refusals(void **state)
{
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
    freeze(&r, "wte.weight");
    freeze(&r, "h.9.*");
    assert_int_equal(spw_model_from_config(&r.model, &r.c, &r.err), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "\"h.9.*\""));
    assert_null(r.model);
    r.c.run.freeze.count = 0;
    freeze(&r, "*");
    assert_int_equal(spw_model_from_config(&r.model, &r.c, &r.err), SPW_ECONFIG);
    assert_non_null(strstr(r.err.message, "nothing to train"));
    assert_int_equal(spw_model_build(&r.model, &r.c.model, &r.err), SPW_OK);
    assert_int_equal(
        spw_engine_create(&r.e, &(spw_engine_options){.config = &r.c, .model = r.model, .plan_only = true}, &r.err),
        SPW_EINVAL);
    assert_non_null(strstr(r.err.message, "spillway.freeze"));
    spw_model_destroy(r.model);
    tiny_dir_remove(r.dir);
}

/* Saved after two steps and gone on with: the same bits; the optimizer's file has nothing of what is frozen. */
static void
resumes(spw_state_format format, spw_family family, void (*change)(rig *r))
{
    rig whole, part;
    char path[SPW_PATH_BYTES];
    rig_config(&whole, family, format, SPW_TIER_HOST);
    change(&whole);
    rig_open(&whole);
    need(&whole, spw_engine_init_params(whole.e, 7, &whole.err));
    rig_train(&whole, 0, 2);
    need(&whole, spw_checkpoint_save(whole.e, &whole.c, whole.dir, &(spw_checkpoint_state){.step = 2, .updates = 2},
                                     path, &whole.err));
    rig_train(&whole, 2, STEPS);
    rig_config(&part, family, format, SPW_TIER_NVME);
    change(&part);
    rig_open(&part);
    need(&part, spw_checkpoint_load(part.e, path, &part.err));
    rig_train(&part, 2, STEPS);
    for (int s = 2; s < STEPS; s++)
        assert_true(whole.losses[s] == part.losses[s]);
    for (int p = 0; p < SPW_PART_COUNT; p++) {
        float *a = read_part(&whole, (spw_state_part)p), *b = read_part(&part, (spw_state_part)p);
        for (uint32_t id = 0; id < whole.model->param_count; id++)
            same_param(whole.model, id, a, b, "resumed state");
        free(a);
        free(b);
    }
    rig_remove(&whole);
    rig_remove(&part);
}

static void
test_frozen_resumes(void **state)
{
    (void)state;
    resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, freeze_mlps);
    resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, freeze_mlps);
    resumes(SPW_STATE_MIXED, SPW_FAMILY_GPT2, freeze_mlps);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frozen_is_lr_zero), cmocka_unit_test(test_frozen_everywhere),
        cmocka_unit_test(test_frozen_bytes),      cmocka_unit_test(test_freeze_refusals),
        cmocka_unit_test(test_frozen_resumes),
    };
    return cmocka_run_group_tests_name("finetune", tests, NULL, NULL);
}
