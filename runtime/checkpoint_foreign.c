/*
 * Going on from checkpoints of other programs: their state into an engine, and whether the configuration goes on with what was trained
 * there. files/foreign.c finds the tensors; from there on they are loaded as a checkpoint's of this program are.
 */
#include "checkpoint_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

spw_status
spw_foreign_read_state(const char *folder, const spw_config *config, spw_checkpoint_state *state, spw_error *err)
{
    const spw_foreign_about *a;
    spw_foreign *d;
    uint64_t samples;
    spw_status st;
    SPW_TRY(spw_foreign_open(&d, folder, err));
    st = spw_foreign_check_state(d, err);
    a = spw_foreign_get_about(d);
    samples = a->samples != UINT64_MAX ? a->samples : a->steps * config->train_batch_size;
    *state = (spw_checkpoint_state){.step = a->steps,
                                    .updates = a->updates,
                                    .data_position = samples,
                                    .tokens = (double)samples * (double)config->data.seq_length};
    spw_foreign_close(d);
    return st;
}

/* ---------------------------------------------------------------- loading */

static spw_status
check_adapters(uint64_t rank, spw_error *err)
{
    return rank == 0 ? SPW_OK
                     : SPW_RAISE(err, SPW_EUNSUPPORTED,
                                 "adapters (spillway.lora) go on from checkpoints of this program alone");
}

static spw_status
open_sources(spw__checkpoint_sources *s, spw_foreign *d, spw_error *err)
{
    const spw_model *m = spw_engine_model(s->e);
    const spw_foreign_about *a = spw_foreign_get_about(d);
    const spw_optimizer *rule = spw__engine_optimizer(s->e, 0);
    uint32_t end = spw__checkpoint_part_end(rule);
    if (spw_engine_layout(s->e)->whole)
        return SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "Muon goes on from checkpoints of this program alone; \"model\" can name the weights of another");
    SPW_TRY(spw_foreign_check_state(d, err));
    SPW_TRY(spw_foreign_weights(d, &s->model, err));
    SPW_TRY(spw_hf_reader_bind(s->model, m, err));
    SPW_TRY(spw_bounce_create(&s->bounce, spw__checkpoint_buffers(spw__engine_workers(s->e)), err));
    spw_hf_reader_past_cache(s->model, s->bounce);
    SPW_TRY(spw__checkpoint_open_codes(s, NULL, err));
    if (a->updates == 0 && a->moment_count == 0) /* the optimizer makes its state with its first update */
        return SPW_OK;
    SPW_TRY(spw_foreign_moments(d, s->model, m, rule->moment_names, rule->moment_count, &s->optimizer, err));
    spw_st_reader_past_cache(s->optimizer, s->bounce);
    for (uint32_t id = 0; id < m->param_count; id++) {
        for (uint32_t p = SPW_PART_EXP_AVG; spw__checkpoint_trains(s->e, id) && p < end; p++) {
            const spw_tensor_info **slot = &s->tensors[(size_t)id * SPW_PART_COUNT + p];
            spw_tensor_info want;
            spw__checkpoint_info(&want, &m->params[id], spw__checkpoint_part_suffix(rule, (int)p), SPW_F32);
            *slot = spw_st_reader_find(s->optimizer, want.name);
            if (*slot == NULL)
                return SPW_RAISE(err, SPW_EUNSUPPORTED,
                                 "%s was frozen there and is trained here; spillway.freeze keeps it as it is",
                                 m->params[id].name);
        }
    }
    return SPW_OK;
}

static void
go_on(spw_engine *e, const spw_foreign_about *a)
{
    spw_loss_scaler scaler = *spw_engine_loss_scaler(e);
    if (a->scaled && scaler.dynamic && a->hysteresis >= 1) {
        scaler.scale = a->scale;
        scaler.hysteresis = (uint64_t)a->hysteresis;
        scaler.steps = a->scaler_steps;
        scaler.last_overflow = a->last_overflow;
        spw_engine_set_loss_scaler(e, &scaler);
    }
    spw_engine_set_updates(e, a->updates);
    spw__engine_set_steps(e, a->steps);
}

spw_status
spw_foreign_load(spw_engine *e, const char *folder, spw_error *err)
{
    spw__checkpoint_sources s;
    spw_foreign *d = NULL;
    spw_error own = {0};
    int64_t none = 0;
    spw_status st;
    SPW_TRY(spw__checkpoint_sources_init(&s, e, err));
    st = check_adapters(spw_engine_model(e)->lora.rank, &own);
    if (st == SPW_OK)
        st = spw__in_place_check(e, folder, &own);
    if (st == SPW_OK)
        st = spw_foreign_open(&d, folder, &own);
    if (st == SPW_OK)
        st = open_sources(&s, d, &own);
    st = spw__engine_agree(e, st, &own, &none, err);
    if (st == SPW_OK)
        st = spw__checkpoint_fill(&s, err);
    if (st == SPW_OK)
        go_on(e, spw_foreign_get_about(d));
    else
        spw_error_wrap(err, "loading checkpoint %s", folder);
    spw__checkpoint_sources_deinit(&s);
    spw_foreign_close(d);
    return st;
}

/* ---------------------------------------------------------------- comparing */

/* Sections and keys of its configuration that are compared; what they do not say has its default here. */
static const char *const compared[] = {"train_batch_size",
                                       "train_micro_batch_size_per_gpu",
                                       "gradient_accumulation_steps",
                                       "gradient_clipping",
                                       "optimizer",
                                       "scheduler",
                                       "communication_data_type"};

/* What of the checkpoint's optimizer is known besides, or instead where its configuration does not have it. */
static void
add_known(json_t *config, const json_t *theirs, const spw_foreign_about *a)
{
    json_t *params = json_object_get(json_object_get(config, "optimizer"), "params");
    if (json_object_get(theirs, "gradient_clipping") == NULL && !isnan(a->clip))
        json_object_set_new(config, "gradient_clipping", json_real(a->clip));
    if (json_object_get(theirs, "optimizer") != NULL || params == NULL)
        return;
    if (!isnan(a->beta1) && json_object_get(params, "betas") != NULL)
        json_object_set_new(params, "betas", json_pack("[f, f]", a->beta1, a->beta2));
    if (!isnan(a->eps) && json_object_get(params, "eps") != NULL)
        json_object_set_new(params, "eps", json_real(a->eps));
}

/*
 * The configuration of now with what the checkpoint says in the place of what is said now, as JSON text; free(). Where it says nothing of a section
 * (a client's own optimizer or scheduler) nothing can be compared.
 */
static char *
their_config(const spw_config *now, const spw_foreign *d)
{
    const spw_foreign_about *a = spw_foreign_get_about(d);
    char *mine = spw_config_dump(now), *text = NULL;
    json_t *config = mine != NULL ? json_loads(mine, 0, NULL) : NULL;
    json_t *theirs = spw_foreign_config(d) != NULL ? json_loads(spw_foreign_config(d), 0, NULL) : json_object();
    json_t *run = json_object_get(config, "spillway");
    for (size_t i = 0; i < sizeof compared / sizeof compared[0]; i++) {
        json_t *v = json_object_get(theirs, compared[i]);
        bool batch = i < 3 && spw_foreign_config(d) != NULL;
        if (v != NULL || batch) /* one or two of the three batch sizes give the others */
            json_object_del(config, compared[i]);
        if (v != NULL && !json_is_null(v))
            json_object_set(config, compared[i], v);
    }
    if (now->fp16 && json_is_true(json_object_get(json_object_get(theirs, "fp16"), "enabled")))
        json_object_set(config, "fp16", json_object_get(theirs, "fp16"));
    add_known(config, theirs, a);
    if (spw_foreign_config(d) != NULL)
        json_object_set_new(run, "ranks", json_integer(a->ranks));
    text = run != NULL && theirs != NULL ? json_dumps(config, 0) : NULL;
    json_decref(config);
    json_decref(theirs);
    spw_mem_free(mine);
    return text;
}

typedef struct differences {
    spw__difference_fn line;
    void *ctx;
    uint32_t count;
} differences;

static void
tell(differences *x, const char *text)
{
    x->line(x->ctx, text);
    x->count++;
}

/* What shapes do not tell. */
static void
compare_model(differences *x, const spw_model *m, const spw_model_config *theirs)
{
    char text[200];
    if (theirs == NULL || theirs->heads == m->config.heads)
        return;
    snprintf(text, sizeof text, "model: %llu heads in the checkpoint, %llu now", (unsigned long long)theirs->heads,
             (unsigned long long)m->config.heads);
    tell(x, text);
}

static spw_status
compare_config(differences *x, const spw_config *now, const spw_foreign *d, const char *folder, spw_error *err)
{
    spw_config *saved = spw_mem_zalloc(sizeof *saved);
    char *text = saved != NULL ? their_config(now, d) : NULL;
    spw_error refusal = {0};
    uint32_t count = 0;
    const char *name = spw_foreign_get_about(d)->config_name;
    spw_status st = text != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "configuration of %s", folder);
    if (name[0] != '\0')
        spw_log(SPW_LOG_WARN,
                "of its configuration %s has the name alone, %.200s: batch and scheduler are not compared with what "
                "they were, and of the optimizer only what it kept",
                folder, name);
    if (st == SPW_OK && spw_config_parse(saved, text, "ds_config", NULL, 0, &refusal) != SPW_OK)
        spw_log(SPW_LOG_WARN, "the configuration in %s is not compared with this one: %s", folder, refusal.message);
    else if (st == SPW_OK)
        st = spw__config_compare(saved, now, x->line, x->ctx, &count, err);
    x->count += count;
    free(text);
    spw_mem_free(saved);
    return st;
}

/* Experts that were not chosen, say, have made fewer; a moment is corrected by how many its parameter has. */
static void
compare_updates(differences *x, const spw_foreign *d)
{
    const spw_foreign_about *a = spw_foreign_get_about(d);
    char text[200];
    if (!a->uneven)
        return;
    snprintf(text, sizeof text,
             "updates: some parameters have made fewer than %llu in the checkpoint, all have made as many now",
             (unsigned long long)a->updates);
    tell(x, text);
}

/* A client's own optimizer is known by what it keeps: another one's would go on from a part of it without a word. */
static void
compare_moments(differences *x, const spw_config *now, const spw_foreign *d)
{
    const spw_foreign_about *a = spw_foreign_get_about(d);
    const spw_optimizer *rule = spw_optimizer_find(now->optimizer.type);
    char kept[200] = "", text[400];
    if (rule == NULL || a->moment_count <= rule->moment_count)
        return; /* one that is missing is refused */
    for (uint32_t k = 0; k < a->moment_count; k++)
        snprintf(kept + strlen(kept), sizeof kept - strlen(kept), "%s%s", k > 0 ? ", " : "", a->moments[k]);
    snprintf(text, sizeof text, "optimizer: it kept %s of each element in the checkpoint, %s keeps %u of them now",
             kept, rule->name, rule->moment_count);
    tell(x, text);
}

/* One decay for all vectors, which a key of ours can say too; transformers' Trainer leaves out norms and biases, but not A_log or sinks. */
static bool
vectors_are_alike(const spw_foreign *d, const spw_model *m, const spw_hf_reader *weights)
{
    double of_all = NAN;
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t first;
        double decay = NAN;
        const char *name = m->params[id].ndim == 1 ? spw_hf_bound_name(weights, id, &first) : NULL;
        if (name == NULL || !spw_foreign_trained(d, name, &decay) || isnan(decay))
            continue;
        if (!isnan(of_all) && decay != of_all)
            return false;
        of_all = decay;
    }
    return true;
}

/* Weight decay and freezing, of which a client may make groups in any way: the first parameter that differs stands for all alike. */
static void
compare_params(differences *x, const spw_config *now, const spw_foreign *d, const spw_model *m,
               const spw_hf_reader *weights)
{
    bool matrix = false, vector = false, frozen = false;
    const char *key = vectors_are_alike(d, m, weights) ? " (spillway.decay_norm_and_bias)" : " (spillway.param_groups)";
    for (uint32_t id = 0; id < m->param_count; id++) {
        const spw_param *p = &m->params[id];
        uint64_t first;
        const char *name = spw_hf_bound_name(weights, id, &first);
        double decay = NAN, mine = spw__weight_decay_of(now, p);
        bool trained = name != NULL && spw_foreign_trained(d, name, &decay), *said = p->ndim > 1 ? &matrix : &vector;
        char text[400];
        if (name != NULL && trained == p->frozen && !frozen) {
            frozen = true;
            snprintf(text, sizeof text, "spillway.freeze: %s was %s in the checkpoint, is %s now", p->name,
                     trained ? "trained" : "frozen", trained ? "frozen" : "trained");
            tell(x, text);
        }
        if (trained && !p->frozen && !isnan(decay) && decay != mine && !*said) {
            *said = true;
            snprintf(text, sizeof text, "weight decay of %s%s: %g in the checkpoint, %g now", p->name,
                     p->ndim > 1 ? "" : key, decay, mine);
            tell(x, text);
        }
    }
}

spw_status
spw_foreign_compare(const char *folder, const spw_config *config, void (*line)(void *ctx, const char *text), void *ctx,
                    uint32_t *count_out, spw_error *err)
{
    differences x = {line, ctx, 0};
    spw_hf_reader *weights = NULL;
    spw_foreign *d;
    spw_model *m = NULL;
    spw_status st;
    *count_out = 0;
    SPW_TRY(check_adapters(config->run.lora.rank, err));
    SPW_TRY(spw_foreign_open(&d, folder, err));
    st = compare_config(&x, config, d, folder, err);
    if (st == SPW_OK)
        st = spw_model_from_config(&m, config, err);
    if (st == SPW_OK)
        st = spw_foreign_weights(d, &weights, err);
    if (st == SPW_OK)
        st = spw_hf_reader_bind(weights, m, err);
    if (st == SPW_OK) {
        compare_model(&x, m, spw_foreign_model(d));
        compare_updates(&x, d);
        compare_moments(&x, config, d);
        compare_params(&x, config, d, m, weights);
    }
    *count_out = x.count;
    spw_hf_reader_close(weights);
    spw_model_destroy(m);
    spw_foreign_close(d);
    return st;
}
