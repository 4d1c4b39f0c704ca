/*
 * Fine-tuning: parameters that are frozen, and adapters beside them. What is not trained costs no gradient and no record and
 * keeps its bytes; what is trained gets the bits it would have got otherwise, wherever state lives.
 */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include "spw_access.h"
#include "spw_files.h"
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

enum { STEPS = 5, TOKENS_MAX = 4096 };
static int32_t tokens[TOKENS_MAX], targets[TOKENS_MAX];

typedef struct rig {
    char dir[256];
    spw_config c;
    spw_model *model;
    spw_engine *e;
    const char *from;     /* weights_from of the engine */
    uint32_t chain_extra; /* of the engine */
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
    need(r, spw_engine_create(&r->e,
                              &(spw_engine_options){.config = &r->c,
                                                    .model = r->model,
                                                    .resumes = true,
                                                    .process_bytes = TINY_PROCESS_BYTES,
                                                    .weights_from = r->from,
                                                    .chain_extra = r->chain_extra},
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
                         *const all_but_last[] = {"w?e.weight", "h.*"},
                         *const all_but_norms[] = {"*proj.weight", "model.embed_tokens.weight"};

static void
test_frozen_is_lr_zero(void **state)
{
    (void)state;
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, embeddings, 1);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, mlps, 3);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_FP32, lower, 2);
    against_lr_zero(SPW_FAMILY_LLAMA, SPW_STATE_FP32, all_but_norms, 2);
    against_lr_zero(SPW_FAMILY_GPT2, SPW_STATE_FP32, all_but_last, 2);
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
        if (k >= 5)
            r.c.run.activations = k == 5 ? SPW_TIER_NVME : SPW_TIER_HOST;
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
freeze_lower(rig *r)
{
    freeze(r, r->c.model.family == SPW_FAMILY_GPT2 ? "w?e.weight" : "model.embed_tokens.weight");
    freeze(r, r->c.model.family == SPW_FAMILY_GPT2 ? "h.0.*" : "model.layers.[01].*");
}

static void
test_frozen_everywhere(void **state)
{
    (void)state;
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, freeze_lower);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0, freeze_lower);
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, freeze_mlps);
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, freeze_mlps);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, 0, freeze_mlps);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT24_INT8, 1, freeze_mlps);
}

/* Uses of units in a step and blocks whose inputs are kept, counted by hand. */
static void
count_uses(const char *const *globs, uint32_t count, uint64_t uses, uint32_t kept)
{
    rig r;
    spw_store_stats before, after;
    uint64_t places = 0;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    for (uint32_t g = 0; g < count; g++)
        freeze(&r, globs[g]);
    rig_open(&r);
    need(&r, spw_engine_init_params(r.e, 7, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &before);
    rig_train(&r, 0, 1);
    spw_store_get_stats(spw_engine_store(r.e), &after);
    assert_int_equal(after.uses - before.uses, uses);
    for (int t = 0; t < SPW_TIER_COUNT; t++)
        places += spw_engine_plan(r.e)->activation_count[t];
    assert_int_equal(places, kept * r.c.accumulation);
    rig_remove(&r);
}

/*
 * The backward pass ends at the lowest block that is trained. The chain is embeddings, three layers, head; the embeddings'
 * unit is used by both ends, the head has the last norm besides and runs in the backward pass alone.
 */
static void
test_backward_ends(void **state)
{
    static const char *const two[] = {"w?e.weight", "h.[01].*"}, *const middle[] = {"h.1.*"}, *const layers[] = {"h.*"};
    (void)state;
    count_uses(NULL, 0, 4 + 6, 3);
    count_uses(embeddings, 1, 4 + 5, 3);
    count_uses(middle, 1, 4 + 6, 3);
    count_uses(layers, 1, 4 + 6, 3);
    count_uses(two, 2, 4 + 3, 1);
    count_uses(all_but_last, 2, 4 + 2, 0);
}

/* A chain that brings a trained block down: refused where the plan has no room for what it keeps, else the same losses. */
static void
test_backward_ends_lower(void **state)
{
    static const uint32_t chains[2][6] = {{0, 3, 1, 2, 4}, {0, 1, 3, 2, 3, 4}};
    static const char *const globs[] = {"w?e.weight", "h.[01].*"};
    rig frozen, still;
    (void)state;
    rig_config(&frozen, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    rig_config(&still, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
    frozen.c.gradient_clipping = still.c.gradient_clipping = 0;
    for (uint32_t g = 0; g < 2; g++) {
        freeze(&frozen, globs[g]);
        still.c.optimizer.groups[g] = (spw_param_group){.lr = 0, .weight_decay = 0, .beta1 = NAN, .beta2 = NAN};
        snprintf(still.c.optimizer.groups[g].match, sizeof still.c.optimizer.groups[g].match, "%s", globs[g]);
    }
    still.c.optimizer.group_count = 2;
    rig_open(&frozen);
    assert_int_equal(spw_engine_set_chain(frozen.e, chains[0], 5, &frozen.err), SPW_EINVAL);
    assert_non_null(strstr(frozen.err.message, "chain_extra"));
    rig_close(&frozen);
    frozen.chain_extra = still.chain_extra = 1;
    rig_open(&frozen);
    rig_open(&still);
    need(&frozen, spw_engine_init_params(frozen.e, 7, &frozen.err));
    need(&still, spw_engine_init_params(still.e, 7, &still.err));
    for (int s = 0; s < 4; s++) { /* lowest 1, 2, 1, 2 */
        need(&frozen, spw_engine_set_chain(frozen.e, chains[s % 2], 5 + (uint32_t)s % 2, &frozen.err));
        need(&still, spw_engine_set_chain(still.e, chains[s % 2], 5 + (uint32_t)s % 2, &still.err));
        rig_train(&frozen, s, s + 1);
        rig_train(&still, s, s + 1);
    }
    assert_memory_equal(frozen.losses, still.losses, 4 * sizeof frozen.losses[0]);
    rig_remove(&frozen);
    rig_remove(&still);
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

/* Saved after two steps, while others follow, and gone on with in another place: the same bits. */
static void
resumes(spw_state_format format, spw_family family, spw_tier tier, void (*change)(rig *r))
{
    rig whole, part;
    char path[SPW_PATH_BYTES];
    spw_checkpoint_job *job = NULL;
    rig_config(&whole, family, format, tier);
    change(&whole);
    whole.c.run.checkpoint_links = true;
    whole.c.run.optimizer_threads = 4; /* several have nothing to do at once, and take their time */
    whole.c.run.chaos_seed = 9;
    rig_open(&whole);
    need(&whole, spw_engine_init_params(whole.e, 7, &whole.err));
    rig_train(&whole, 0, 1);
    need(&whole, spw_checkpoint_save(whole.e, &whole.c, whole.dir, &(spw_checkpoint_state){.step = 1, .updates = 1},
                                     NULL, &whole.err));
    rig_train(&whole, 1, 2);
    need(&whole, spw_checkpoint_begin(&job, whole.e, &whole.c, whole.dir,
                                      &(spw_checkpoint_state){.step = 2, .updates = 2}, &whole.err));
    rig_train(&whole, 2, STEPS); /* meanwhile */
    need(&whole, spw_checkpoint_finish(job, path, &whole.err));
    rig_config(&part, family, format, tier == SPW_TIER_NVME ? SPW_TIER_HOST : SPW_TIER_NVME);
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
    resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, SPW_TIER_NVME, freeze_mlps);
    resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_HOST, freeze_mlps);
    resumes(SPW_STATE_MIXED, SPW_FAMILY_GPT2, SPW_TIER_NVME, freeze_mlps);
}

/* ---------------------------------------------------------------- frozen weights that stay in their files */

/* A folder of the family with these bytes for weights: out of a model that was trained for a step. */
static void
make_folder(char folder[SPW_PATH_BYTES], const char *dir, spw_family family, spw_dtype dtype, uint64_t shard_bytes)
{
    rig r;
    char path[SPW_PATH_BYTES];
    spw_export_report report;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    rig_open(&r);
    need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 1);
    need(&r, spw_checkpoint_save(r.e, &r.c, r.dir, &(spw_checkpoint_state){.step = 1, .updates = 1}, path, &r.err));
    snprintf(folder, SPW_PATH_BYTES, "%.300s/folder", dir);
    need(&r, spw_export(&(spw_export_options){.source = path, .to = folder, .dtype = dtype, .shard_bytes = shard_bytes},
                        &report, &r.err));
    rig_remove(&r);
}

static uint64_t
in_place_bytes(const rig *r)
{
    return spw_engine_plan(r->e)->weight_in_place;
}

/*
 * Trained from a folder whose frozen weights stay there, and from copies of them: the same losses and state to the last bit,
 * in small chunks, with one slot, with delays. In swap there is nothing of them: not a byte is planned, none is written.
 */
static void
stays(spw_family family, spw_state_format format, spw_dtype dtype, uint64_t shard_bytes, void (*change)(rig *r))
{
    static const struct {
        uint64_t chunk, chaos;
        uint32_t slots;
        bool copied;
    } kinds[] = {{8192, 0, 0, true}, {8192, 0, 0, false}, {4096, 0, 1, false}, {4096, 41, 2, false}};
    char dir[256], folder[SPW_PATH_BYTES];
    double want[STEPS];
    float *want_part = NULL;
    uint64_t swap[2] = {0, 0}, frozen = 0;
    tiny_dir_make(dir);
    make_folder(folder, dir, family, dtype, shard_bytes);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        rig r;
        float *got;
        spw_store_stats stats;
        rig_config(&r, family, format, SPW_TIER_NVME);
        r.c.zero.offload_optimizer = SPW_TIER_HOST;
        change(&r);
        r.from = folder;
        r.c.run.frozen_in_place = !kinds[k].copied;
        r.c.run.chunk_elems = kinds[k].chunk;
        r.c.run.weight_slots = kinds[k].slots;
        r.c.run.chaos_seed = kinds[k].chaos;
        r.c.zero.max_live_parameters = k > 1 ? 24576 : UINT64_MAX; /* a layer or two: read again in every pass */
        rig_open(&r);
        need(&r, spw_engine_load_weights(r.e, folder, &r.err));
        rig_train(&r, 0, STEPS);
        got = read_part(&r, SPW_PART_MASTER);
        spw_store_get_stats(spw_engine_store(r.e), &stats);
        if (k == 0) {
            memcpy(want, r.losses, sizeof want);
            want_part = got;
            swap[0] = spw_engine_plan(r.e)->path_bytes[0];
            assert_int_equal(in_place_bytes(&r), 0);
        } else {
            assert_memory_equal(want, r.losses, sizeof want);
            for (uint32_t id = 0; id < r.model->param_count; id++)
                same_param(r.model, id, want_part, got, "state");
            free(got);
        }
        if (k == 1) {
            const spw_layout *l = spw_engine_layout(r.e);
            swap[1] = spw_engine_plan(r.e)->path_bytes[0];
            for (uint32_t u = 0; u < l->unit_count; u++)
                frozen += l->units[u].trainable ? 0 : l->units[u].elems * spw_state_weight_bytes(format);
            assert_true(frozen > 0);
            assert_int_equal(in_place_bytes(&r), frozen);
            assert_int_equal(swap[0] - swap[1], frozen);
            /* What is written is what is trained: its weights at the start and after each step. */
            assert_true(stats.nvme_write_bytes <= (STEPS + 1) * swap[1]);
            assert_true(stats.nvme_read_bytes > 0);
        }
        rig_remove(&r);
    }
    free(want_part);
    tiny_dir_remove(dir);
}

static void with_lora(rig *r);

/* All but one bias is frozen: nothing but that is in swap. */
static void
freeze_nearly_all(rig *r)
{
    freeze(r, "[!h]*");
    freeze(r, "h.[0-1].*");
    freeze(r, "h.2.*weight");
}

static void
test_stays(void **state)
{
    (void)state;
    stays(SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_F32, 0, freeze_nearly_all);
    stays(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_BF16, 9000, freeze_mlps);
    stays(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, SPW_BF16, 0, with_lora);
}

/* What has another type than the format gives weights is converted, and copied. */
static void
test_other_types_are_copied(void **state)
{
    char dir[256], folder[SPW_PATH_BYTES];
    (void)state;
    tiny_dir_make(dir);
    make_folder(folder, dir, SPW_FAMILY_LLAMA, SPW_F16, 0);
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, k ? SPW_STATE_SPLIT : SPW_STATE_FP32, SPW_TIER_NVME);
        freeze_mlps(&r);
        r.from = folder;
        rig_open(&r);
        assert_int_equal(in_place_bytes(&r), 0);
        need(&r, spw_engine_load_weights(r.e, folder, &r.err));
        rig_train(&r, 0, 1);
        rig_remove(&r);
    }
    tiny_dir_remove(dir);
}

static void
damage(const char *folder, uint64_t offset)
{
    char path[SPW_PATH_BYTES + 64];
    unsigned char byte;
    int fd;
    snprintf(path, sizeof path, "%.600s/model.safetensors", folder);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    close(fd);
}

/* Files that change are noticed: between reading the header and opening, and while they are in use. Nothing is trained on them. */
static void
test_changed_files(void **state)
{
    char dir[256], folder[SPW_PATH_BYTES], path[SPW_PATH_BYTES + 64];
    struct stat info;
    rig r;
    spw_step_result result;
    spw_status st = SPW_OK;
    (void)state;
    tiny_dir_make(dir);
    make_folder(folder, dir, SPW_FAMILY_LLAMA, SPW_BF16, 0);
    snprintf(path, sizeof path, "%.600s/model.safetensors", folder);
    assert_int_equal(stat(path, &info), 0);
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    freeze_mlps(&r);
    r.c.run.weight_slots = 1; /* and room for one layer on the device: every pass reads again */
    r.c.zero.max_live_parameters = 24576;
    r.c.run.chunk_elems = 4096;
    r.from = folder;
    rig_open(&r);
    assert_true(in_place_bytes(&r) > 0);
    need(&r, spw_engine_load_weights(r.e, folder, &r.err));
    rig_train(&r, 0, 2);
    for (uint64_t at = (uint64_t)info.st_size / 8; at < (uint64_t)info.st_size; at += (uint64_t)info.st_size / 8)
        damage(folder, at); /* some of it lies in what is frozen */
    for (int s = 2; s < STEPS && st == SPW_OK; s++) {
        uint64_t n = r.c.micro_batch * r.c.accumulation * r.c.data.seq_length;
        tiny_batch((uint64_t)s, r.c.model.vocab, n, tokens, targets);
        st = spw_engine_step(r.e, tokens, targets, (uint32_t)r.c.accumulation, 1e-3, &result, &r.err);
    }
    assert_int_equal(st, SPW_ECORRUPT);
    if (strstr(r.err.message, "model.safetensors changed while its frozen weights were in use") == NULL)
        fail_msg("%s", r.err.message);
    rig_close(&r);
    /* An engine takes the files that it was made for, and cannot edit what lies there. */
    memset(&r.err, 0, sizeof r.err);
    rig_open(&r);
    assert_int_equal(spw_engine_init_params(r.e, 1, &r.err), SPW_EINVAL);
    assert_non_null(strstr(r.err.message, "frozen_in_place"));
    assert_int_equal(spw_engine_load_weights(r.e, "/elsewhere", &r.err), SPW_EINVAL);
    memset(&r.err, 0, sizeof r.err);
    need(&r, spw_engine_load_weights(r.e, folder, &r.err));
    for (uint32_t id = 0; id < r.model->param_count; id++) {
        spw_access a;
        spw_stretch held;
        static float values[1 << 16];
        memset(&r.err, 0, sizeof r.err);
        need(&r, spw_access_find(&a, r.e, r.model->params[id].name, "master", &r.err));
        assert_int_equal(spw_access_set_local(r.e, &a, values, &held, &r.err),
                         r.model->params[id].frozen ? SPW_EUNSUPPORTED : SPW_OK);
    }
    rig_remove(&r);
    tiny_dir_remove(dir);
}

/* The store refuses a file that is not the one its header was read from: another size, another time. */
static void
test_file_changed_before_open(void **state)
{
    char dir[256], path[300];
    struct stat info;
    spw_error err = {0};
    spw_gpu *gpu = NULL;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/w", dir);
    need(&(rig){.err = err}, spw_file_write_text(path, "01234567", &err));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, &err), SPW_OK);
    for (int k = 0; k < 3; k++) {
        spw_store *s = NULL;
        const char *paths[] = {dir};
        spw_store_unit unit = {.chunk_count = 1, .elems = 4096};
        spw_store_chunk chunk = {.elems = 4096, .weight_tier = SPW_TIER_NVME, .piece_count = 1};
        spw_store_piece piece = {.bytes = 8};
        spw_store_file file = {path, 8 + (k == 1),
                               (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec + (k == 2)};
        spw_store_config c = {.gpu = gpu,
                              .units = &unit,
                              .chunks = &chunk,
                              .unit_count = 1,
                              .chunk_count = 1,
                              .weight_dtype = SPW_F32,
                              .grad_dtype = SPW_F32,
                              .weight_bytes = 4,
                              .weight_slot_count = 1,
                              .device_cache_bytes = 16384,
                              .paths = paths,
                              .path_count = 1,
                              .pieces = &piece,
                              .files = &file,
                              .file_count = 1};
        spw_status st = spw_store_create(&s, &c, &err);
        assert_int_equal(st, k == 0 ? SPW_OK : SPW_ECORRUPT);
        assert_true(k == 0 || strstr(err.message, "/w changed since its header was read") != NULL);
        spw_store_destroy(s);
    }
    spw_gpu_close(gpu);
    tiny_dir_remove(dir);
}

/* A checkpoint's own weights stay in place when training goes on from it, and the bits are those of the run that was not cut. */
static void
test_stays_on_resuming(void **state)
{
    rig whole, part;
    char path[SPW_PATH_BYTES], file[SPW_PATH_BYTES + 64];
    (void)state;
    rig_config(&whole, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    with_lora(&whole);
    rig_open(&whole);
    need(&whole, spw_engine_init_params(whole.e, 7, &whole.err));
    rig_train(&whole, 0, 2);
    need(&whole, spw_checkpoint_save(whole.e, &whole.c, whole.dir, &(spw_checkpoint_state){.step = 2, .updates = 2},
                                     path, &whole.err));
    rig_train(&whole, 2, STEPS);
    rig_config(&part, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    with_lora(&part);
    snprintf(file, sizeof file, "%.1000s/model.safetensors", path);
    part.from = file;
    rig_open(&part);
    assert_true(in_place_bytes(&part) > 0);
    need(&part, spw_checkpoint_load(part.e, path, &part.err));
    rig_train(&part, 2, STEPS);
    for (int s = 2; s < STEPS; s++)
        assert_true(whole.losses[s] == part.losses[s]);
    rig_remove(&whole);
    rig_remove(&part);
}

/* ---------------------------------------------------------------- adapters */

static void
lora(rig *r, uint64_t rank, double alpha, double dropout)
{
    bool gpt2 = r->c.model.family == SPW_FAMILY_GPT2;
    spw_glob_list *list = &r->c.run.lora_targets;
    r->c.run.lora = (spw_lora){rank, alpha, dropout};
    list->count = 2;
    snprintf(list->item[0], sizeof list->item[0], "%s", gpt2 ? "c_attn" : "[qv]_proj");
    snprintf(list->item[1], sizeof list->item[1], "%s", gpt2 ? "h.1.mlp.*" : "model.layers.1.mlp.down_proj");
    r->c.optimizer.lr = 2e-2;
}

static void
with_lora(rig *r)
{
    lora(r, 4, 16, 0);
}

static void
with_dropout(rig *r)
{
    lora(r, 3, 0, 0.2);
}

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

/* Saves after training up to step; what is on nvme is not in memory then. */
static void
save_at(rig *r, int step)
{
    need(r, spw_checkpoint_save(r->e, &r->c, r->dir,
                                &(spw_checkpoint_state){.step = (uint64_t)step, .updates = (uint64_t)step}, NULL,
                                &r->err));
}

/* A new engine with what the checkpoint has. */
static void
load_from(rig *r, const rig *from, int step)
{
    char path[400];
    rig_open(r);
    snprintf(path, sizeof path, "%s/step-%d", from->dir, step);
    need(r, spw_checkpoint_load(r->e, path, &r->err));
}

static void
same_state(rig *a, rig *b, const char *what)
{
    for (int p = 0; p < SPW_PART_COUNT; p++) {
        float *x = read_part(a, (spw_state_part)p), *y = read_part(b, (spw_state_part)p);
        for (uint32_t id = 0; id < a->model->param_count; id++)
            same_param(a->model, id, x, y, what);
        free(x);
        free(y);
    }
}

static void
change_frozen(rig *r, float value)
{
    spw_access a = {"wte.weight", SPW_ACCESS_MASTER, 5, 1};
    need(r, spw_access_set_full(r->e, &a, &value, 0, &r->err));
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
    with_lora(&r);
    with_lora(&other);
    r.c.run.checkpoint_links = other.c.run.checkpoint_links = true;
    rig_open(&r);
    need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 1);
    save_at(&r, 1);
    rig_train(&r, 1, 2);
    need(&r, spw_engine_drain(r.e, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &before);
    save_at(&r, 2);
    spw_store_get_stats(spw_engine_store(r.e), &after);
    assert_true(shared(&r, 1, 2));
    assert_int_equal(model_file(&r, 2).st_nlink, 2);
    assert_true(after.nvme_read_bytes - before.nvme_read_bytes <= spw_engine_plan(r.e)->trained * 12);
    load_from(&other, &r, 2);
    same_state(&r, &other, "state of a shared checkpoint");
    /* what was loaded is shared on, also from another folder; and when the first one goes */
    snprintf(command, sizeof command, "rm -r %s/step-1", r.dir);
    assert_int_equal(system(command), 0);
    rig_train(&other, 2, 3);
    save_at(&other, 3);
    assert_int_equal(model_file(&other, 3).st_ino, model_file(&r, 2).st_ino);
    rig_train(&r, 2, 3);
    save_at(&r, 3);
    assert_true(shared(&r, 2, 3));
    /* an edit of what is frozen */
    change_frozen(&r, 0.25f);
    save_at(&r, 4);
    assert_false(shared(&r, 3, 4));
    rig_close(&other);
    load_from(&other, &r, 4);
    same_state(&r, &other, "state after an edit");
    save_at(&r, 5);
    assert_true(shared(&r, 4, 5));
    /* a file that somebody wrote to, or took away */
    snprintf(command, sizeof command, "touch -d '2001-01-01' %s/step-5/model.safetensors", r.dir);
    assert_int_equal(system(command), 0);
    save_at(&r, 6);
    assert_false(shared(&r, 5, 6));
    snprintf(command, sizeof command, "rm -r %s/step-6", r.dir);
    assert_int_equal(system(command), 0);
    info = model_file(&r, 5);
    save_at(&r, 7);
    assert_int_not_equal(model_file(&r, 7).st_ino, info.st_ino);
    /* the same step again, and with a limit */
    save_at(&r, 7);
    r.c.run.keep_last = 1;
    save_at(&r, 8);
    assert_int_equal(model_file(&r, 8).st_nlink, 1);
    rig_close(&other);
    load_from(&other, &r, 8);
    same_state(&r, &other, "state of the last one");
    /* another type of weights; and who does not want it */
    rig_close(&other);
    other.c.run.state_format = SPW_STATE_FP32;
    load_from(&other, &r, 8);
    save_at(&other, 9);
    assert_int_not_equal(model_file(&other, 9).st_ino, model_file(&r, 8).st_ino);
    r.c.run.keep_last = 0;
    r.c.run.checkpoint_links = false;
    save_at(&r, 9);
    assert_false(shared(&r, 8, 9));
    rig_remove(&r);
    rig_remove(&other);
}

/* Where something of the model itself is trained, every checkpoint has its own. */
static void
test_checkpoints_do_not_share(void **state)
{
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
    freeze(&r, "h.*");
    r.c.run.checkpoint_links = true;
    rig_open(&r);
    need(&r, spw_engine_init_params(r.e, 7, &r.err));
    save_at(&r, 1);
    save_at(&r, 2);
    assert_false(shared(&r, 1, 2));
    rig_remove(&r);
}

/* B is 0 at first: losses of evaluation and of the first step are the base model's, bit for bit. */
static void
test_lora_starts_as_base(void **state)
{
    (void)state;
    for (int family = 0; family < 2; family++) {
        double loss[2][2];
        for (int k = 0; k < 2; k++) {
            rig r;
            rig_config(&r, family ? SPW_FAMILY_LLAMA : SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_HOST);
            if (k == 1)
                with_lora(&r);
            rig_open(&r);
            need(&r, spw_engine_init_params(r.e, 7, &r.err));
            tiny_batch(3, r.c.model.vocab, r.c.micro_batch * r.c.data.seq_length, tokens, targets);
            need(&r, spw_engine_eval(r.e, tokens, targets, 1, &loss[k][0], &r.err));
            rig_train(&r, 0, 2);
            loss[k][1] = r.losses[0];
            assert_true(k == 0 || r.norms[0] > 0);
            rig_remove(&r);
        }
        assert_memory_equal(loss[0], loss[1], sizeof loss[0]);
    }
}

/* ---------------------------------------------------------------- frozen weights stored as codes */

static void
with_codes(rig *r, const char *codes)
{
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "%s", codes);
}

static void
lora_int8(rig *r)
{
    with_lora(r);
    with_codes(r, "int8");
}

static void
lora_int4(rig *r)
{
    with_lora(r);
    with_codes(r, "int4");
}

static void
lower_int4(rig *r)
{
    freeze_lower(r);
    with_codes(r, "int4");
}

static void
test_codes_everywhere(void **state)
{
    (void)state;
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, 1, lora_int8);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 0, lora_int4);
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_MIXED, 0, lower_int4);
}

static void
test_codes_resume(void **state)
{
    (void)state;
    resumes(SPW_STATE_SPLIT, SPW_FAMILY_LLAMA, SPW_TIER_NVME, lora_int4);
    resumes(SPW_STATE_FP32, SPW_FAMILY_GPT2, SPW_TIER_HOST, lora_int8);
    resumes(SPW_STATE_MIXED, SPW_FAMILY_GPT2, SPW_TIER_NVME, lower_int4);
}

/* What codes decode to, as a checkpoint has it, trained without codes: the same losses and state to the last bit. */
static void
against_plain(spw_family family, spw_state_format format, void (*change)(rig *r))
{
    rig coded, plain, exact;
    float *a, *b;
    uint64_t changed = 0;
    rig_config(&coded, family, format, SPW_TIER_NVME);
    rig_config(&plain, family, format, SPW_TIER_HOST);
    rig_config(&exact, family, format, SPW_TIER_HOST);
    change(&coded);
    change(&plain);
    change(&exact);
    with_codes(&plain, "none");
    with_codes(&exact, "");
    rig_open(&coded);
    need(&coded, spw_engine_init_params(coded.e, 7, &coded.err));
    save_at(&coded, 0);
    rig_train(&coded, 0, STEPS);
    load_from(&plain, &coded, 0);
    rig_open(&exact);
    need(&exact, spw_engine_init_params(exact.e, 7, &exact.err));
    a = read_part(&plain, SPW_PART_MASTER);
    b = read_part(&exact, SPW_PART_MASTER);
    for (uint32_t id = 0; id < plain.model->param_count; id++) { /* matrices of the layers, and nothing else */
        const spw_param *p = &plain.model->params[id];
        uint64_t first = elems_before(plain.model, id);
        bool differs = memcmp(a + first, b + first, p->rows * p->cols * sizeof *a) != 0;
        assert_true(differs == (p->frozen && p->ndim > 1 && p->owner_block > 0));
        for (uint64_t i = first; i < first + p->rows * p->cols; i++)
            assert_true(fabsf(a[i] - b[i]) <= 0.02f); /* of normals with a deviation of 0.05 */
        changed += differs;
    }
    assert_true(changed > 0);
    free(a);
    free(b);
    rig_train(&plain, 0, STEPS);
    assert_memory_equal(coded.losses, plain.losses, sizeof coded.losses);
    same_state(&coded, &plain, "state beside codes");
    rig_remove(&coded);
    rig_remove(&plain);
    rig_remove(&exact);
}

static void
test_codes_are_numbers(void **state)
{
    (void)state;
    against_plain(SPW_FAMILY_GPT2, SPW_STATE_SPLIT, lora_int8);
    against_plain(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, lora_int4);
    against_plain(SPW_FAMILY_LLAMA, SPW_STATE_FP32, lora_int8);
    against_plain(SPW_FAMILY_GPT2, SPW_STATE_MIXED, lower_int4);
}

/* Bytes of weights in the plan and over the links, counted by hand. */
static void
count_coded(const char *codes, uint64_t block)
{
    rig r;
    spw_store_stats before, after;
    const spw_layout *l;
    uint64_t all = 0, coded = 0, adapters = 0;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_SPLIT, SPW_TIER_NVME);
    with_lora(&r);
    with_codes(&r, codes);
    r.c.zero.max_live_parameters = 28672; /* the largest block: nearly every use fetches again */
    r.c.run.weight_slots = 1;
    r.c.run.prefetch = false;
    rig_open(&r);
    l = spw_engine_layout(r.e);
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        const spw_store_unit *u = &l->units[l->chunks[i].unit_idx];
        uint64_t elems = l->chunks[i].elems, bytes = u->coded ? spw_round_up(elems / 128 * block, 4096) : elems * 2;
        all += bytes;
        coded += u->coded ? elems : 0;
        adapters += u->trainable ? bytes : 0;
    }
    assert_int_equal(coded, 3 * 12288); /* 12 x 32^2 */
    assert_int_equal(spw_engine_plan(r.e)->weight_nvme, all);
    need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 2);
    need(&r, spw_engine_drain(r.e, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &before);
    rig_train(&r, 2, 4);
    need(&r, spw_engine_drain(r.e, &r.err));
    spw_store_get_stats(spw_engine_store(r.e), &after);
    assert_true(after.h2d_bytes - before.h2d_bytes <= 2 * 2 * all);
    assert_true(after.h2d_bytes - before.h2d_bytes >= 2 * all);
    assert_true(after.nvme_write_bytes - before.nvme_write_bytes <= 3 * adapters * 6);
    rig_remove(&r);
}

static void
test_codes_bytes(void **state)
{
    (void)state;
    count_coded("int8", 132);
    count_coded("int4", 68);
}

static void
test_lora_everywhere(void **state)
{
    (void)state;
    everywhere(SPW_FAMILY_GPT2, SPW_STATE_FP32, 0, with_lora);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, 1, with_lora);
    everywhere(SPW_FAMILY_LLAMA, SPW_STATE_FP32, 1, with_dropout);
}

static void
test_lora_resumes(void **state)
{
    (void)state;
    resumes(SPW_STATE_FP32, SPW_FAMILY_LLAMA, SPW_TIER_HOST, with_lora);
    resumes(SPW_STATE_SPLIT, SPW_FAMILY_GPT2, SPW_TIER_NVME, with_lora);
    resumes(SPW_STATE_MIXED, SPW_FAMILY_LLAMA, SPW_TIER_HOST, with_dropout);
}

/* Gradients and records for the adapters alone. */
static void
test_lora_bytes(void **state)
{
    (void)state;
    for (int tier = SPW_TIER_DEVICE; tier < SPW_TIER_COUNT; tier++) {
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, (spw_tier)tier);
        with_lora(&r);
        rig_open(&r);
        count_bytes(&r, 4 * (3 * (32 + 96) + 2 * (32 + 128)));
        rig_remove(&r);
    }
}

/* The gradient that a step took: its part in Adam's first moment. */
static float *
gradient(rig *r, int step)
{
    float *before = read_part(r, SPW_PART_EXP_AVG), *after;
    rig_train(r, step, step + 1);
    after = read_part(r, SPW_PART_EXP_AVG);
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

/* Is got the product, scaled, of dW and A (for B's gradient), or of dW and B (for A's)? In fp64; dW is (out, in) by element. */
static void
check_gradients(const rig *plain, const float *dw, const rig *adapted, const float *state_, const float *got,
                uint32_t a)
{
    const spw_param *pa = &adapted->model->params[a], *pb = &adapted->model->params[a + 1];
    const float *A = state_ + elems_before(adapted->model, a), *B = state_ + elems_before(adapted->model, a + 1);
    const float *dA = got + elems_before(adapted->model, a), *dB = got + elems_before(adapted->model, a + 1);
    bool in_out = plain->c.model.family == SPW_FAMILY_GPT2;
    uint64_t in = pa->cols, out = pb->rows, rank = pa->rows;
    double scale = (double)spw_lora_scale(&adapted->model->lora), diff[2] = {0, 0}, norm[2] = {0, 0};
    const char *begin = pa->name + strlen("base_model.model.") + (in_out ? strlen("transformer.") : 0);
    char name[96];
    snprintf(name, sizeof name, "%.*s.weight", (int)(strstr(begin, ".lora_A") - begin), begin);
    dw += elems_before(plain->model, find_param(plain->model, name));
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
        if (!(norm[k] > 0) || !(sqrt(diff[k]) <= 2e-5 * sqrt(norm[k])))
            fail_msg("gradient of %s: relative difference %.3g (norm %.3g)", k ? pb->name : pa->name,
                     sqrt(diff[k] / norm[k]), sqrt(norm[k]));
    }
}

/*
 * A trained adapter, merged by export and loaded into a model without adapters: logits within 1e-5 of the largest, also
 * from the checkpoint in an engine for inference, and the adapter's gradients are what the merged weight's gives by the
 * chain rule in fp64.
 */
static void
merged(spw_family family)
{
    rig r, plain;
    char path[SPW_PATH_BYTES], out[SPW_PATH_BYTES];
    spw_export_report report;
    spw_engine *drawing = NULL;
    float logits[3][64], most = 0, *state_, *dw, *got;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    rig_config(&plain, family, SPW_STATE_FP32, SPW_TIER_HOST);
    with_lora(&r);
    r.c.gradient_clipping = plain.c.gradient_clipping = 0;
    rig_open(&r);
    rig_open(&plain);
    need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 3);
    need(&r, spw_checkpoint_save(r.e, &r.c, r.dir, &(spw_checkpoint_state){.step = 3, .updates = 3}, path, &r.err));
    assert_int_equal(spw_engine_load_weights(plain.e, path, &plain.err), SPW_EUNSUPPORTED);
    rig_close(&plain);
    memset(&plain.err, 0, sizeof plain.err);
    rig_open(&plain);
    snprintf(out, sizeof out, "%.200s/merged", r.dir);
    need(&r, spw_export(&(spw_export_options){.source = path, .to = out, .dtype = SPW_F32}, &report, &r.err));
    need(&plain, spw_engine_load_weights(plain.e, out, &plain.err));
    need(&r, spw_engine_create(
                 &drawing, &(spw_engine_options){.config = &r.c, .model = r.model, .inference = true, .sequences = 1},
                 &r.err));
    need(&r, spw_checkpoint_load(drawing, path, &r.err));
    tiny_batch(1, r.c.model.vocab, 20, tokens, targets);
    need(&r, spw_engine_logits(r.e, tokens, 20, logits[0], &r.err));
    need(&plain, spw_engine_logits(plain.e, tokens, 20, logits[1], &plain.err));
    need(&r, spw_engine_logits(drawing, tokens, 20, logits[2], &r.err));
    spw_engine_destroy(drawing);
    assert_memory_equal(logits[0], logits[2], r.c.model.vocab * sizeof(float));
    for (uint64_t i = 0; i < r.c.model.vocab; i++)
        most = fmaxf(most, fabsf(logits[0][i]));
    for (uint64_t i = 0; i < r.c.model.vocab; i++) {
        if (!(fabsf(logits[0][i] - logits[1][i]) <= 1e-5f * most))
            fail_msg("logit %u: %.9g with the adapter, %.9g merged", (unsigned)i, (double)logits[0][i],
                     (double)logits[1][i]);
    }
    state_ = read_part(&r, SPW_PART_MASTER);
    got = gradient(&r, 3);
    dw = gradient(&plain, 3);
    for (uint32_t id = 0; id < r.model->param_count; id++) {
        if (r.model->params[id].adapter && strstr(r.model->params[id].name, "lora_A") != NULL)
            check_gradients(&plain, dw, &r, state_, got, id);
    }
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
    merged(SPW_FAMILY_GPT2);
    merged(SPW_FAMILY_LLAMA);
}

/* Mistakes are told by name. */
static void
test_lora_refusals(void **state)
{
    static const struct {
        uint64_t rank;
        const char *target, *says;
    } cases[] = {{4, "q_proj", "\"q_proj\""},
                 {4, "wte", "\"wte\""},
                 {4, "lm_head", "\"lm_head\""},
                 {0, "c_attn", "no rank"},
                 {4, NULL, "no targets"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        rig r;
        rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_HOST);
        r.c.run.lora.rank = cases[i].rank;
        r.c.run.lora_targets.count = cases[i].target != NULL;
        snprintf(r.c.run.lora_targets.item[0], 96, "%s", cases[i].target != NULL ? cases[i].target : "");
        assert_int_equal(spw_model_from_config(&r.model, &r.c, &r.err), SPW_ECONFIG);
        if (strstr(r.err.message, cases[i].says) == NULL)
            fail_msg("%s", r.err.message);
        tiny_dir_remove(r.dir);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frozen_is_lr_zero),
        cmocka_unit_test(test_frozen_everywhere),
        cmocka_unit_test(test_frozen_bytes),
        cmocka_unit_test(test_backward_ends),
        cmocka_unit_test(test_backward_ends_lower),
        cmocka_unit_test(test_freeze_refusals),
        cmocka_unit_test(test_frozen_resumes),
        cmocka_unit_test(test_stays),
        cmocka_unit_test(test_other_types_are_copied),
        cmocka_unit_test(test_changed_files),
        cmocka_unit_test(test_file_changed_before_open),
        cmocka_unit_test(test_stays_on_resuming),
        cmocka_unit_test(test_checkpoints_share),
        cmocka_unit_test(test_checkpoints_do_not_share),
        cmocka_unit_test(test_codes_everywhere),
        cmocka_unit_test(test_codes_resume),
        cmocka_unit_test(test_codes_are_numbers),
        cmocka_unit_test(test_codes_bytes),
        cmocka_unit_test(test_lora_starts_as_base),
        cmocka_unit_test(test_lora_everywhere),
        cmocka_unit_test(test_lora_resumes),
        cmocka_unit_test(test_lora_bytes),
        cmocka_unit_test(test_lora_merged),
        cmocka_unit_test(test_lora_refusals),
    };
    return cmocka_run_group_tests_name("finetune", tests, NULL, NULL);
}
