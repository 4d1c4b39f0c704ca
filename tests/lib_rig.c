#include "lib_rig.h"
#include "nn_internal.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

int32_t rig_tokens[RIG_TOKENS], rig_targets[RIG_TOKENS];

void
rig_need(const rig *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", r->err.message);
}

void
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

void
rig_open(rig *r)
{
    rig_need(r, spw_model_from_config(&r->model, &r->c, &r->err));
    rig_need(r, spw_engine_create(&r->e,
                                  &(spw_engine_options){.config = &r->c,
                                                        .model = r->model,
                                                        .resumes = true,
                                                        .process_bytes = TINY_PROCESS_BYTES,
                                                        .weights_from = r->from,
                                                        .chain_extra = r->chain_extra},
                                  &r->err));
}

void
rig_fill(rig *r)
{
    rig_need(r, r->from != NULL ? spw_engine_load_weights(r->e, r->from, &r->err)
                                : spw_engine_init_params(r->e, 7, &r->err));
}

spw_status
rig_begin(rig *r)
{
    spw_status st = spw_model_from_config(&r->model, &r->c, &r->err);
    if (st == SPW_OK)
        st = spw_engine_create(
            &r->e, &(spw_engine_options){.config = &r->c, .model = r->model, .chain_extra = r->chain_extra}, &r->err);
    if (st == SPW_OK)
        st = spw_engine_init_params(r->e, r->c.run.seed, &r->err);
    return st;
}

void
rig_close(rig *r)
{
    spw_engine_destroy(r->e);
    spw_model_destroy(r->model);
    r->e = NULL;
    r->model = NULL;
}

void
rig_remove(rig *r)
{
    rig_close(r);
    tiny_dir_remove(r->dir);
}

spw_status
rig_step(rig *r, uint64_t step, spw_step_result *result)
{
    uint64_t n = r->c.micro_batch * r->c.accumulation * r->c.data.seq_length;
    assert_true(n <= RIG_TOKENS);
    tiny_batch(step, r->c.model.vocab, n, rig_tokens, rig_targets);
    return spw_engine_step(r->e, rig_tokens, rig_targets, (uint32_t)r->c.accumulation, r->c.optimizer.lr, result,
                           &r->err);
}

void
rig_train(rig *r, int first, int end)
{
    for (int s = first; s < end; s++) {
        spw_step_result result;
        rig_need(r, rig_step(r, (uint64_t)s, &result));
        r->losses[s] = result.loss;
        r->norms[s] = result.grad_norm;
    }
}

void
rig_save(rig *r, int step)
{
    rig_need(r, spw_checkpoint_save(r->e, &r->c, r->dir,
                                    &(spw_checkpoint_state){.step = (uint64_t)step, .updates = (uint64_t)step}, NULL,
                                    &r->err));
}

void
rig_load(rig *r, const rig *from, int step)
{
    char path[400];
    rig_open(r);
    snprintf(path, sizeof path, "%s/step-%d", from->dir, step);
    rig_need(r, spw_checkpoint_load(r->e, path, &r->err));
}

void
rig_freeze(rig *r, const char *glob)
{
    spw_glob_list *list = &r->c.run.freeze;
    snprintf(list->item[list->count++], sizeof list->item[0], "%s", glob);
}

void
rig_freeze_mlps(rig *r)
{
    bool named_mlp = r->c.model.family == SPW_FAMILY_GPT2 || r->c.model.family == SPW_FAMILY_NEOX;
    rig_freeze(r, named_mlp ? "*.mlp.*" : "*_proj.weight");
}

void
rig_freeze_lower(rig *r)
{
    rig_freeze(r, r->c.model.family == SPW_FAMILY_GPT2 ? "w?e.weight" : "*.embed_[it]*");
    rig_freeze(r, r->c.model.family == SPW_FAMILY_GPT2 ? "h.0.*" : "*.layers.[01].*");
}

static void
set_lora(rig *r, uint64_t rank, double alpha, double dropout)
{
    bool gpt2 = r->c.model.family == SPW_FAMILY_GPT2;
    spw_glob_list *list = &r->c.run.lora_targets;
    r->c.run.lora = (spw_lora){rank, alpha, dropout};
    list->count = r->c.model.experts > 0 ? 1 : 2; /* experts have none */
    snprintf(list->item[0], sizeof list->item[0], "%s",
             gpt2                                                ? "c_attn"
             : r->c.model.woven                                  ? "query_key_value"
             : r->c.model.packed                                 ? "qkv_proj"
             : r->c.model.q_rank > 0                             ? "*_b_proj"
             : r->c.model.kv_rank > 0                            ? "*_b_proj"
             : r->c.model.linear_mamba || r->c.model.linear_conv ? "in_proj"
             : r->c.model.linear_apart                           ? "[qbg]_proj"
             : r->c.model.linear_heads > 0                       ? "in_proj_[qb]*"
                                                                 : "[qv]_proj");
    snprintf(list->item[1], sizeof list->item[1], "*.layers.1.%s", spw__nn_names(r->c.model.family)->down);
    if (gpt2)
        snprintf(list->item[1], sizeof list->item[1], "h.1.mlp.*");
    r->c.optimizer.lr = 2e-2;
}

void
rig_lora(rig *r)
{
    set_lora(r, 4, 16, 0);
}

void
rig_lora_dropout(rig *r)
{
    set_lora(r, 3, 0, 0.2);
}

void
rig_lora_experts(rig *r)
{
    set_lora(r, 3, 4, 0);
    r->c.run.lora_target_parameters.count = 1;
    snprintf(r->c.run.lora_target_parameters.item[0], sizeof r->c.run.lora_target_parameters.item[0], "experts.*");
}

uint64_t
rig_elems_before(const spw_model *m, uint32_t id)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < id; i++)
        sum += m->params[i].rows * m->params[i].cols;
    return sum;
}

typedef struct reading {
    const rig *r;
    spw_state_part part;
    float *out; /* parameters one after the other, by id; those without a record have moments of 0 */
} reading;

static spw_status
read_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    reading *job = ctx;
    const spw_layout *l = spw_engine_layout(job->r->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    const spw_optimizer *rule = spw__engine_optimizer(job->r->e, c->unit_idx);
    (void)grad;
    (void)err;
    if ((uint32_t)job->part > rule->moment_count) /* beside Muon's one others have two */
        return SPW_OK;
    for (layout_stretch s = {0}; (record != NULL || job->part == SPW_PART_MASTER) && spw__layout_next(l, c, &s);)
        spw_state_get(job->r->c.run.state_format, rule, weights, record, c->elems, job->part, s.first - c->first,
                      s.end - s.first, job->out + rig_elems_before(job->r->model, s.id) + (s.first - s.from));
    return SPW_OK;
}

float *
rig_read(rig *r, spw_state_part part)
{
    reading job = {r, part, calloc(spw_model_elems(r->model), sizeof(float))};
    assert_non_null(job.out);
    rig_need(r, spw_engine_drain(r->e, &r->err));
    rig_need(r, spw_store_sweep(spw_engine_store(r->e), SPW_SWEEP_VISIT, read_chunk, &job, &r->err));
    return job.out;
}

void
rig_same_param(const spw_model *m, uint32_t id, const float *a, const float *b, const char *what)
{
    uint64_t first = rig_elems_before(m, id), n = m->params[id].rows * m->params[id].cols;
    if (memcmp(a + first, b + first, n * sizeof *a) != 0)
        fail_msg("%s of %s differs", what, m->params[id].name);
}

void
rig_same_state(rig *a, rig *b, const char *what)
{
    for (int p = 0; p < SPW_PART_COUNT; p++) {
        float *x = rig_read(a, (spw_state_part)p), *y = rig_read(b, (spw_state_part)p);
        for (uint32_t id = 0; id < a->model->param_count; id++)
            rig_same_param(a->model, id, x, y, what);
        free(x);
        free(y);
    }
}

void
rig_descend(rig *r, rig_outcome *out)
{
    snprintf(r->c.optimizer.type, sizeof r->c.optimizer.type, "SGD");
    r->c.optimizer.lr = 0.2;
    rig_open(r);
    rig_need(r, spw_engine_init_params(r->e, 7, &r->err));
    rig_train(r, 0, RIG_STEPS);
    memcpy(out->losses, r->losses, sizeof r->losses);
    rig_need(r, spw_engine_eval(r->e, rig_tokens, rig_targets, 1, &out->losses[RIG_STEPS], &r->err));
    out->masters = rig_read(r, SPW_PART_MASTER);
    out->elems = spw_model_elems(r->model);
}

void
rig_near(const rig_outcome *want, const rig_outcome *got, double most, const char *what)
{
    for (int s = 0; s <= RIG_STEPS; s++) {
        if (!(fabs(want->losses[s] - got->losses[s]) <= 2 * most * fabs(want->losses[s])))
            fail_msg("%s: loss %d is %.9g, not %.9g", what, s, got->losses[s], want->losses[s]);
    }
    for (uint64_t i = 0; i < want->elems; i++) {
        if (!(fabs((double)want->masters[i] - (double)got->masters[i]) <= most))
            fail_msg("%s: weight %llu is %.9g, not %.9g", what, (unsigned long long)i, (double)got->masters[i],
                     (double)want->masters[i]);
    }
}

void
rig_everywhere(spw_family family, spw_state_format format, double clipping, void (*change)(rig *r))
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
    double want[RIG_STEPS];
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
        rig_fill(&r);
        rig_train(&r, 0, RIG_STEPS);
        if (k == 0)
            memcpy(want, r.losses, sizeof want);
        assert_memory_equal(want, r.losses, sizeof want);
        for (int p = 0; p < SPW_PART_COUNT; p++) {
            float *got = rig_read(&r, (spw_state_part)p);
            for (uint32_t id = 0; id < r.model->param_count && k > 0; id++)
                rig_same_param(r.model, id, got, want_part[p], "state");
            if (k == 0)
                want_part[p] = got;
            else
                free(got);
        }
        rig_remove(&r);
    }
    assert_true(want[RIG_STEPS - 1] < want[0]);
    for (int p = 0; p < SPW_PART_COUNT; p++)
        free(want_part[p]);
}

void
rig_resumes(spw_state_format format, spw_family family, spw_tier tier, void (*change)(rig *r))
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
    rig_fill(&whole);
    rig_train(&whole, 0, 1);
    rig_need(&whole, spw_checkpoint_save(whole.e, &whole.c, whole.dir, &(spw_checkpoint_state){.step = 1, .updates = 1},
                                         NULL, &whole.err));
    rig_train(&whole, 1, 2);
    rig_need(&whole, spw_checkpoint_begin(&job, whole.e, &whole.c, whole.dir,
                                          &(spw_checkpoint_state){.step = 2, .updates = 2}, &whole.err));
    rig_train(&whole, 2, RIG_STEPS); /* meanwhile */
    rig_need(&whole, spw_checkpoint_finish(job, path, &whole.err));
    rig_config(&part, family, format, tier == SPW_TIER_NVME ? SPW_TIER_HOST : SPW_TIER_NVME);
    change(&part);
    rig_open(&part);
    rig_need(&part, spw_checkpoint_load(part.e, path, &part.err));
    rig_train(&part, 2, RIG_STEPS);
    for (int s = 2; s < RIG_STEPS; s++)
        assert_true(whole.losses[s] == part.losses[s]);
    rig_same_state(&whole, &part, "resumed state");
    rig_remove(&whole);
    rig_remove(&part);
}

void
rig_count_bytes(rig *r, uint64_t trained_params)
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

uint64_t
rig_in_place_bytes(const rig *r)
{
    return spw_engine_plan(r->e)->weight_in_place;
}

uint64_t
rig_least_named(const rig *r, const char *key)
{
    unsigned long long least = 0;
    const char *at = strchr(r->err.message, '(');
    assert_non_null(strstr(r->err.message, key));
    assert_non_null(at);
    assert_int_equal(sscanf(at, "(%llu bytes)", &least), 1);
    return least;
}
