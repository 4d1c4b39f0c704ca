/*
 * What needs more than one key, when all of them are read: values that follow from others, contradictions, and what a person
 * is told once. Errors name the file and the keys.
 */
#include "config_internal.h"
#include "runtime_internal.h"
#include "spw_files.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

void
spw__config_remark(char list[SPW_REMARK_BYTES], const char *format, ...)
{
    char one[SPW_REMARK_BYTES];
    size_t n = strlen(list), m;
    const char *between = n > 0 ? "; " : "";
    va_list args;
    va_start(args, format);
    vsnprintf(one, sizeof one, format, args);
    va_end(args);
    m = strlen(between) + strlen(one);
    if (n + m + sizeof "; ..." <= SPW_REMARK_BYTES)
        snprintf(list + n, SPW_REMARK_BYTES - n, "%s%s", between, one);
    else if (n < 4 || strcmp(list + n - 3, "...") != 0)
        snprintf(list + n, SPW_REMARK_BYTES - n, "; ...");
}

spw_status
spw__config_note(const config_reader *r, spw_status st)
{
    config_remarks *m = r->remarks;
    const char *text = r->err->message;
    size_t used = strlen(m->wrong), name = strlen(r->name);
    if (st == SPW_OK || st == SPW_ENOMEM)
        return st;
    if (strncmp(text, r->name, name) == 0 && strncmp(text + name, ": ", 2) == 0)
        text += name + 2; /* the heading has it */
    if (m->wrong_count++ == 0)
        m->first_wrong = *r->err;
    if (m->wrong_shown + 1 == m->wrong_count && used + strlen(text) + sizeof "\n  " <= sizeof m->wrong) {
        snprintf(m->wrong + used, sizeof m->wrong - used, "\n  %s", text);
        m->wrong_shown++;
    }
    *r->err = (spw_error){0};
    return SPW_OK;
}

spw_status
spw__config_noted(const config_reader *r)
{
    const config_remarks *m = r->remarks;
    char rest[40] = "";
    if (m->wrong_count == 0)
        return SPW_OK;
    if (m->wrong_count == 1) {
        *r->err = m->first_wrong;
        return m->first_wrong.status;
    }
    if (m->wrong_shown < m->wrong_count)
        snprintf(rest, sizeof rest, "\n  and %u more", m->wrong_count - m->wrong_shown);
    return SPW_RAISE(r->err, SPW_ECONFIG, "%.60s: %u mistakes%s%s", r->name, m->wrong_count, m->wrong, rest);
}

spw_status
spw__config_check_optimizer(const config_reader *r, const char *type)
{
    return spw_optimizer_find(type) != NULL
               ? SPW_OK
               : SPW_RAISE(r->err, SPW_ECONFIG,
                           "%s: not supported yet: optimizer.type \"%s\"; Adam, AdamW, Adagrad, Lion, SGD and "
                           "Muon are",
                           r->name, type);
}

/* The three batch sizes agree; what is missing follows from the others. */
static spw_status
settle_batch(const config_reader *r)
{
    spw_config *c = r->out;
    const uint64_t sharers = spw_config_sharers(c), ranks = c->run.ranks / sharers; /* that have others' sequences */
    uint64_t all = c->train_batch_size, micro = c->micro_batch, steps = c->accumulation;
    if (c->run.ranks % sharers != 0)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: sequence_parallel_size %llu does not divide %u rank%s (train -n %llu, plan --set "
                         "spillway.ranks=%llu)",
                         r->name, (unsigned long long)sharers, c->run.ranks, c->run.ranks > 1 ? "s" : "",
                         (unsigned long long)sharers, (unsigned long long)sharers);
    if (all > 0 && micro == 0)
        micro = (steps > 0 ? all / steps : all) / ranks;
    micro = micro > 0
                ? micro
                : 1; /* fewer sequences than there are ranks and steps: that they do not share out is said below */
    if (steps == 0)
        steps = all > 0 ? all / micro / ranks : 1;
    if (all == 0)
        all = micro * steps * ranks;
    if (all != micro * steps * ranks || all == 0) {
        char meant[160] = "", given[128] = "";
        if (steps > 0 && all >= micro * steps && all % (micro * steps) == 0)
            snprintf(meant, sizeof meant, "; it is for %llu rank%s (train -n %llu, plan --set spillway.ranks=%llu)",
                     (unsigned long long)(all / (micro * steps) * sharers),
                     all / (micro * steps) * sharers > 1 ? "s" : "",
                     (unsigned long long)(all / (micro * steps) * sharers),
                     (unsigned long long)(all / (micro * steps) * sharers));
        if (c->micro_batch > 0)
            snprintf(given, sizeof given, "train_micro_batch_size_per_gpu %llu times ", (unsigned long long)micro);
        if (c->accumulation > 0)
            snprintf(given + strlen(given), sizeof given - strlen(given), "gradient_accumulation_steps %llu times ",
                     (unsigned long long)steps);
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: train_batch_size %llu is not %s%s%llu %s%s%s", r->name,
                         (unsigned long long)all, c->micro_batch > 0 && c->accumulation > 0 ? "" : "a multiple of ",
                         given, (unsigned long long)ranks, sharers > 1 ? "group" : "rank", ranks > 1 ? "s" : "", meant);
    }
    c->train_batch_size = all;
    c->micro_batch = micro;
    c->accumulation = steps;
    return SPW_OK;
}

static spw_status
check_offload(const config_reader *r)
{
    spw_config *c = r->out;
    if (c->zero.offload_param != SPW_TIER_DEVICE && c->zero.stage != 3) {
        spw_log(SPW_LOG_WARN,
                "%s: zero_optimization.offload_param has no effect in stage %u, as in DeepSpeed: weights stay on the "
                "device; stage 3 offloads them",
                r->name, c->zero.stage);
        c->zero.offload_param = SPW_TIER_DEVICE;
    }
    if (c->zero.offload_optimizer != SPW_TIER_DEVICE && c->zero.stage == 0)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: zero_optimization.offload_optimizer needs stage 1, 2 or 3, stage is 0", r->name);
    if (c->zero.offload_param == SPW_TIER_NVME && c->zero.param_path.count == 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: zero_optimization.offload_param.nvme_path is needed for device nvme",
                         r->name);
    if (c->zero.offload_optimizer == SPW_TIER_NVME && c->zero.optimizer_path.count == 0)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: zero_optimization.offload_optimizer.nvme_path is needed for device nvme", r->name);
    if (c->run.activations == SPW_TIER_NVME && c->zero.param_path.count + c->zero.optimizer_path.count == 0)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: spillway.activations nvme needs an nvme_path (zero_optimization.offload_param or "
                         "offload_optimizer; their device may be another)",
                         r->name);
    if (c->run.activations == SPW_TIER_DEVICE && c->run.cpu_checkpointing)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: activation_checkpointing.cpu_checkpointing true and spillway.activations device "
                         "contradict each other",
                         r->name);
    return SPW_OK;
}

/* ZeRO++ changes how what stage 3 has cut comes together, MiCS among whom it is cut. */
static spw_status
check_zeropp(const config_reader *r)
{
    const spw_config *c = r->out;
    const struct {
        const char *key;
        bool on;
    } keys[] = {{"zero_quantized_weights", c->zero.quantized_weights},
                {"zero_quantized_nontrainable_weights", c->zero.quantized_frozen},
                {"zero_quantized_gradients", c->zero.quantized_gradients},
                {"zero_hpz_partition_size", c->zero.hpz_partition_size > 1},
                {"mics_shard_size", c->zero.mics_shard_size > 0}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (keys[i].on && c->zero.stage != 3)
            return SPW_RAISE(r->err, SPW_ECONFIG, "%s: zero_optimization.%s needs stage 3, stage is %u", r->name,
                             keys[i].key, c->zero.stage);
    }
    return SPW_OK;
}

/* A path in both lists, or twice in one, is one swap file: weight and limit are said once, or alike. */
static spw_status
settle_paths(const config_reader *r)
{
    spw_path_list *lists[2] = {&r->out->zero.param_path, &r->out->zero.optimizer_path};
    uint32_t distinct = 0, n = lists[0]->count, all = n + lists[1]->count;
    for (uint32_t i = 0; i < all; i++) {
        spw_path_list *a = lists[i >= n];
        uint32_t ai = i >= n ? i - n : i;
        bool first = true;
        for (uint32_t j = 0; j < all; j++) {
            const spw_path_list *b = lists[j >= n];
            uint32_t bi = j >= n ? j - n : j;
            if (i == j || strcmp(a->item[ai], b->item[bi]) != 0)
                continue;
            first = first && j > i;
            a->weight[ai] = a->weight[ai] > 0 ? a->weight[ai] : b->weight[bi];
            a->bytes[ai] = a->bytes[ai] > 0 ? a->bytes[ai] : b->bytes[bi];
            if (b->weight[bi] > 0 && a->weight[ai] != b->weight[bi])
                return SPW_RAISE(r->err, SPW_ECONFIG,
                                 "%s: zero_optimization.offload_param.nvme_path and offload_optimizer.nvme_path give "
                                 "%s two weights, %g and %g; it is one swap file: say it once, or alike",
                                 r->name, a->item[ai], a->weight[ai], b->weight[bi]);
            if (b->bytes[bi] > 0 && a->bytes[ai] != b->bytes[bi])
                return SPW_RAISE(r->err, SPW_ECONFIG,
                                 "%s: zero_optimization.offload_param.nvme_path and offload_optimizer.nvme_path give "
                                 "%s two limits, %llu and %llu bytes; it is one swap file: say it once, or alike",
                                 r->name, a->item[ai], (unsigned long long)a->bytes[ai],
                                 (unsigned long long)b->bytes[bi]);
        }
        distinct += first;
    }
    if (distinct > SPW_PATHS_MAX)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: zero_optimization.offload_param.nvme_path and offload_optimizer.nvme_path have %u paths, "
                         "at most %d are used together",
                         r->name, distinct, SPW_PATHS_MAX);
    for (uint32_t i = 0; i < all; i++) {
        double *weight = &lists[i >= n]->weight[i >= n ? i - n : i];
        *weight = *weight > 0 ? *weight : 1;
    }
    return SPW_OK;
}

static spw_status
check_device(const config_reader *r)
{
    const char *name = r->out->run.device, *index = name + 5;
    bool numbered = strncmp(name, "cuda:", 5) == 0 && index[0] != '\0' && strspn(index, "0123456789") == strlen(index);
    if (!numbered && strcmp(name, "auto") != 0 && strcmp(name, "cpu") != 0 && strcmp(name, "cuda") != 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.device: expected auto, cpu, cuda or cuda:0, got \"%s\"",
                         r->name, name);
    return SPW_OK;
}

/* A folder whose weights cannot be read is not one without weights: training would begin with others than were meant. */
static spw_status
check_start(const config_reader *r)
{
    const spw_config *c = r->out;
    char file[SPW_PATH_BYTES];
    if (strcmp(c->run.start, "auto") != 0 || c->model_path[0] == '\0' || spw_hf_has_weights(c->model_path))
        return SPW_OK;
    if (spw_foreign_find(c->model_path, file, sizeof file)) /* spw_config_check_start()'s, for who does not resume */
        return SPW_OK;
    if (spw_hf_has_other_weights(c->model_path, file))
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: model.path %s has %s, which is not read: weights are read from model.safetensors or "
                         "pytorch_model.bin, or shards with their index (save_pretrained of transformers writes them); "
                         "spillway.start random draws new ones",
                         r->name, c->model_path, file);
    return SPW_OK;
}

static bool
is_muon(const char *type)
{
    return strcasecmp(type, "Muon") == 0;
}

bool
spw__config_optimizer_takes(const char *type, const char *param)
{
    return is_muon(type) ||
           (strcmp(param, "muon_lr") != 0 && strcmp(param, "adam_lr") != 0 && strcmp(param, "ns_steps") != 0);
}

bool
spw__config_scheduler_takes(const char *type, const char *param)
{
    bool cosine = strcmp(type, "WarmupCosineLR") == 0, cycle = strcmp(type, "OneCycle") == 0,
         range = strcmp(type, "LRRangeTest") == 0;
    if (strncmp(param, "cycle_", 6) == 0 || strncmp(param, "decay_", 6) == 0)
        return cycle;
    if (strncmp(param, "lr_range_test_", 14) == 0)
        return range;
    if (strcmp(param, "total_num_steps") == 0)
        return cosine || strcmp(type, "WarmupDecayLR") == 0;
    if (strcmp(param, "warmup_min_lr") == 0 || strcmp(param, "warmup_max_lr") == 0)
        return type[0] != '\0' && !cosine && !cycle && !range;
    if (strcmp(param, "warmup_min_ratio") == 0 || strcmp(param, "cos_min_ratio") == 0)
        return cosine;
    return type[0] != '\0' && !cycle && !range;
}

/* DeepSpeed's ways to leave a value to it are "auto" and null: then nothing was said. */
static bool
given(const json_t *section, const char *key)
{
    const json_t *v = json_object_get(section, key);
    const char *text = json_string_value(v);
    return v != NULL && !json_is_null(v) && (text == NULL || strcmp(text, "auto") != 0);
}

static bool
is_auto(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text != NULL && strcmp(text, "auto") == 0;
}

/* Without lr Muon's two kinds of parameters have a default each; schedules are about lr, which is the matrices' then. */
static void
settle_rates(spw_config *c, const json_t *params)
{
    bool lr = given(params, "lr") || is_auto(params, "lr");
    if (!is_muon(c->optimizer.type))
        return;
    if (isnan(c->optimizer.adam_lr))
        c->optimizer.adam_lr = lr ? c->optimizer.lr : 3e-4;
    if (!lr && !isnan(c->optimizer.muon_lr))
        c->optimizer.lr = c->optimizer.muon_lr;
    if (isnan(c->optimizer.muon_lr))
        c->optimizer.muon_lr = c->optimizer.lr;
}

/* Hyper-parameters that some optimizers have: one that has another value than without it, and no meaning, is said. */
static void
say_meaningless(const config_reader *r)
{
    const spw_config *c = r->out;
    const struct {
        const char *param, *types[4];
        bool changed;
    } some[] = {{"betas", {"Adam", "AdamW", "Lion", "Muon"}, c->optimizer.beta1 != 0.9 || c->optimizer.beta2 != 0.999},
                {"eps", {"Adam", "AdamW", "Adagrad", "Muon"}, c->optimizer.eps != 1e-8},
                {"momentum", {"SGD", "Muon"}, c->optimizer.momentum != 0},
                {"nesterov", {"SGD", "Muon"}, c->optimizer.nesterov},
                {"dampening", {"SGD"}, c->optimizer.dampening != 0},
                {"lr_decay", {"Adagrad"}, c->optimizer.lr_decay != 0}};
    for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
        bool known = false;
        for (size_t t = 0; t < 4 && some[i].types[t] != NULL; t++)
            known = known || strcasecmp(c->optimizer.type, some[i].types[t]) == 0;
        if (some[i].changed && !known)
            spw_log(SPW_LOG_WARN, "%s: optimizer.params.%s has no meaning for optimizer.type \"%s\"", r->name,
                    some[i].param, c->optimizer.type);
    }
}

/* Another optimizer would train with rates that were not meant. */
static spw_status
check_params(const config_reader *r, json_t *params)
{
    const char *name;
    json_t *v;
    json_object_foreach(params, name, v)
    {
        if (given(params, name) && !spw__config_optimizer_takes(r->out->optimizer.type, name))
            SPW_TRY(spw__config_note(
                r, SPW_RAISE(r->err, SPW_ECONFIG,
                             "%s: optimizer.params.%s belongs to optimizer.type \"Muon\", the type is \"%s\"", r->name,
                             name, r->out->optimizer.type)));
    }
    return SPW_OK;
}

/* What its matrices, which are updated as wholes, do not do. */
static spw_status
settle_muon(const config_reader *r)
{
    if (!is_muon(r->out->optimizer.type) || r->out->run.delayed_update == 0)
        return SPW_OK;
    return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.delayed_update above 0: not with optimizer.type Muon yet",
                     r->name);
}

/* WarmupDecayLR's largest rate: the optimizer's where it is "auto" or null, so that what is printed says it too. */
static void
settle_decay(const config_reader *r, const json_t *params)
{
    spw_config *c = r->out;
    if (!isnan(c->scheduler.warmup_max_lr))
        return;
    if (json_object_get(params, "warmup_max_lr") != NULL) {
        c->scheduler.warmup_max_lr = c->optimizer.lr;
        return;
    }
    c->scheduler.warmup_max_lr = 0.001;
    if (c->optimizer.lr != 0.001)
        spw_log(SPW_LOG_WARN,
                "%s: scheduler.params.warmup_max_lr is not given: of WarmupDecayLR it is 0.001 then, as in DeepSpeed, "
                "and not optimizer.params.lr %g",
                r->name, c->optimizer.lr);
}

/* DeepSpeed's defaults that hang on more than a type (spw__config_fallback()). */
static void
settle_by_type(const config_reader *r, const json_t *root)
{
    spw_config *c = r->out;
    const json_t *params = json_object_get(json_object_get(root, "optimizer"), "params");
    if (strncasecmp(c->optimizer.type, "Adam", 4) == 0 && c->optimizer.adam_w_mode &&
        json_is_true(json_object_get(params, "torch_adam")) && json_object_get(params, "weight_decay") == NULL)
        c->optimizer.weight_decay = 0.01; /* torch.optim.AdamW's; "auto" is a Trainer's, which has none */
    if (strcmp(c->scheduler.type, "WarmupDecayLR") == 0)
        settle_decay(r, json_object_get(json_object_get(root, "scheduler"), "params"));
}

static spw_status
check_scheduler(const config_reader *r, json_t *params)
{
    const char *type = r->out->scheduler.type, *name;
    json_t *v;
    json_object_foreach(params, name, v)
    {
        if (!spw__config_scheduler_takes(type, name))
            spw_log(SPW_LOG_WARN, "%s: scheduler.params.%s has no meaning for scheduler.type \"%s\"", r->name, name,
                    type);
    }
    if (spw__config_scheduler_takes(type, "total_num_steps") && r->out->scheduler.total_num_steps == 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: scheduler.params.total_num_steps is needed for %s", r->name, type);
    if (strcmp(type, "OneCycle") == 0 &&
        (isnan(r->out->scheduler.cycle_min_lr) || isnan(r->out->scheduler.cycle_max_lr)))
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: scheduler.params.cycle_min_lr and cycle_max_lr are needed for OneCycle", r->name);
    return SPW_OK;
}

static spw_dtype
default_grad_dtype(const spw_config *c, const json_t *data_types)
{
    const char *name = json_string_value(json_object_get(data_types, "grad_accum_dtype"));
    spw_dtype found = c->fp16 ? SPW_F16 : SPW_F32;
    if (name != NULL)
        (void)spw_dtype_parse(name, &found);
    return found;
}

/* By the configuration, or by a scheduler that does not go by the optimizer's. */
static bool
rate_is_given(const spw_config *c, const json_t *root)
{
    const char *schedule = c->scheduler.type;
    const json_t *params = json_object_get(json_object_get(root, "optimizer"), "params");
    return given(params, "lr") || given(params, "muon_lr") || spw__config_scheduler_takes(schedule, "cycle_max_lr") ||
           spw__config_scheduler_takes(schedule, "lr_range_test_min_lr") ||
           (spw__config_scheduler_takes(schedule, "warmup_max_lr") &&
            given(json_object_get(json_object_get(root, "scheduler"), "params"), "warmup_max_lr"));
}

/*
 * transformers' Trainer would put its arguments where "auto" is, and bring optimizer and schedule where there is none. The number
 * of steps is known here; the rest is said, and a learning rate that nobody chose in any case.
 */
static void
settle_autos(const config_reader *r, const json_t *root)
{
    spw_config *c = r->out;
    const json_t *params = json_object_get(json_object_get(root, "scheduler"), "params");
    const json_t *optimizer = json_object_get(json_object_get(root, "optimizer"), "params");
    bool typed = c->bf16 || c->fp16, rate = rate_is_given(c, root), trainer;
    char others[40] = "";
    if (is_muon(c->optimizer.type))
        snprintf(others, sizeof others, ", adam_lr %g", c->optimizer.adam_lr);
    if (is_auto(params, "total_num_steps"))
        c->scheduler.total_num_steps = c->run.steps;
    if (!typed &&
        (is_auto(json_object_get(root, "bf16"), "enabled") || is_auto(json_object_get(root, "fp16"), "enabled")))
        spw__config_remark(r->remarks->autos, "bf16.enabled and fp16.enabled false (so fp32)");
    trainer = r->remarks->autos[0] != '\0';
    if (trainer && !given(root, "optimizer") && !rate)
        c->optimizer.lr = strtod(spw__config_trainer_default("optimizer.params.lr"), NULL);
    if (trainer && !rate && !is_auto(optimizer, "lr"))
        spw__config_remark(r->remarks->autos, "optimizer.params.lr %g", c->optimizer.lr);
    if (trainer && c->scheduler.type[0] == '\0')
        spw__config_remark(r->remarks->autos, "a constant rate (a Trainer's falls to 0, as WarmupDecayLR's)");
    if (trainer)
        spw_log(SPW_LOG_WARN, "%s: \"auto\" is not filled in from a Trainer's arguments here, their defaults stand: %s",
                r->name, r->remarks->autos);
    else if (!rate)
        spw_log(SPW_LOG_WARN, "%s: no learning rate is given, this stands: optimizer.type %s, optimizer.params.lr %g%s",
                r->name, c->optimizer.type, c->optimizer.lr, others);
}

/* What DeepSpeed's files do not have, because it is in the program that they are for. */
static spw_status
check_missing(const config_reader *r, const json_t *root)
{
    const json_t *data = json_object_get(root, "data");
    const char *const batches[] = {"train_batch_size", "train_micro_batch_size_per_gpu"};
    bool batch = false;
    spw_status st = SPW_OK;
    if (!given(root, "model"))
        st = spw__config_note(r, SPW_RAISE(r->err, SPW_ECONFIG,
                                           "%s: section model is missing: --set model.path=FOLDER, one of Hugging "
                                           "Face's, or \"model\": {\"path\": \"FOLDER\"}",
                                           r->name));
    if (st == SPW_OK && !given(data, "path") && !given(data, "sources"))
        st = spw__config_note(r, SPW_RAISE(r->err, SPW_ECONFIG,
                                           "%s: data.path is missing (or data.sources): --set data.path=FILE, or "
                                           "\"data\": {\"path\": \"FILE\"}",
                                           r->name));
    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++)
        batch = batch || given(root, batches[i]);
    if (st == SPW_OK && !batch)
        st = spw__config_note(
            r,
            SPW_RAISE(r->err, SPW_ECONFIG,
                      "%s: train_batch_size or train_micro_batch_size_per_gpu is needed, as a number: \"auto\" is for "
                      "transformers' Trainer to fill in (--set train_micro_batch_size_per_gpu=1)",
                      r->name));
    return st;
}

bool
spw_config_preference(const spw_config *c, spw_preference *out)
{
    for (int kind = 0; kind < SPW_PREFERENCE_COUNT; kind++) {
        if (strcmp(c->run.preference.loss, spw_preference_name((spw_preference_kind)kind)) != 0)
            continue;
        *out = (spw_preference){.kind = (spw_preference_kind)kind,
                                .beta = (float)c->run.preference.beta,
                                .label_smoothing = (float)c->run.preference.label_smoothing,
                                .margin = (float)c->run.preference.margin,
                                .likelihood = (float)c->run.preference.likelihood};
        return true;
    }
    return false;
}

/* What a section says without the key that turns it on would be passed over, and all weights trained on all tokens. */
static spw_status
check_switch(const config_reader *r, const json_t *root, const char *name, const char *key, const char *values)
{
    json_t *section = json_object_get(json_object_get(root, "spillway"), name), *v;
    const char *other;
    if (json_object_get(section, key) != NULL)
        return SPW_OK;
    json_object_foreach(section, other, v)
    {
        if (given(section, other))
            return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.%s has %s and no %s%s", r->name, name, other, key,
                             values);
    }
    return SPW_OK;
}

/* Pairs are in windows of their own, each whole. */
static spw_status
settle_preference(const config_reader *r, const json_t *root)
{
    spw_config *c = r->out;
    const json_t *own = json_object_get(json_object_get(root, "spillway"), "preference");
    spw_preference p;
    if (!spw_config_preference(c, &p))
        return SPW_OK;
    if (p.kind == SPW_PREFERENCE_SIMPO && !given(own, "beta"))
        c->run.preference.beta = 2;
    if (p.kind == SPW_PREFERENCE_ORPO && !given(own, "likelihood"))
        c->run.preference.likelihood = 1;
    if (p.kind != SPW_PREFERENCE_DPO && p.kind != SPW_PREFERENCE_SIMPO && c->run.preference.label_smoothing > 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.preference.label_smoothing is of dpo and simpo, not of %s",
                         r->name, c->run.preference.loss);
    if (p.kind != SPW_PREFERENCE_SIMPO && c->run.preference.margin > 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.preference.margin is of simpo, not of %s", r->name,
                         c->run.preference.loss);
    if (!given(json_object_get(root, "data"), "documents"))
        snprintf(c->data.documents, sizeof c->data.documents, "whole");
    if (strcmp(c->data.documents, "whole") != 0)
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: data.documents %s would cut pairs: with spillway.preference it is whole", r->name,
                         c->data.documents);
    return SPW_OK;
}

/* A model of the hub by its name. */
static void
settle_tokenizer(spw_config *c)
{
    char folder[SPW_HUB_PATH_BYTES];
    if (strcmp(c->data.tokenizer, "auto") != 0 && strcmp(c->data.tokenizer, "bytes") != 0 &&
        spw_hub_find(folder, c->data.tokenizer))
        memcpy(c->data.tokenizer, folder, sizeof folder);
}

static spw_status
settle_all(const config_reader *r, const json_t *root)
{
    spw_config *c = r->out;
    const json_t *own = json_object_get(root, "spillway");
    json_t *params = json_object_get(json_object_get(root, "optimizer"), "params");
    if (c->data.path.count > 0 && c->data.sources.count > 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: data.path and data.sources stand for the same: one of them, please",
                         r->name);
    if (c->data.text_field[0] == '\0' || strcmp(c->data.text_field, c->data.prompt_field) == 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: data.text_field \"%s\" is empty or the same as data.prompt_field",
                         r->name, c->data.text_field);
    SPW_TRY(spw__config_note(r, settle_batch(r)));
    settle_rates(c, params);
    settle_autos(r, root);
    SPW_TRY(spw__config_note(r, check_offload(r)));
    SPW_TRY(spw__config_note(r, check_zeropp(r)));
    SPW_TRY(spw__config_note(r, settle_paths(r)));
    settle_tokenizer(c);
    SPW_TRY(spw__config_note(r, spw__config_check_optimizer(r, c->optimizer.type)));
    SPW_TRY(check_params(r, params));
    say_meaningless(r);
    if (strcasecmp(c->optimizer.type, "AdamW") == 0 && !c->optimizer.adam_w_mode) {
        spw_log(SPW_LOG_WARN,
                "%s: optimizer.params.adam_w_mode false has no meaning for optimizer.type \"%s\": L2 is Adam's",
                r->name, c->optimizer.type);
        c->optimizer.adam_w_mode = true;
    }
    SPW_TRY(spw__config_note(r, check_switch(r, root, "lora", "rank", "")));
    SPW_TRY(spw__config_note(r, check_switch(r, root, "preference", "loss", " (dpo, ipo, apo_zero, simpo or orpo)")));
    SPW_TRY(spw__config_note(r, settle_preference(r, root)));
    if (!given(json_object_get(root, "data"), "documents") && c->data.chat[0] != '\0')
        snprintf(c->data.documents, sizeof c->data.documents, "whole"); /* half a conversation teaches half an answer */
    if (!given(own, "state_format"))
        c->run.state_format = c->bf16 ? SPW_STATE_SPLIT : c->fp16 ? SPW_STATE_MIXED_F16 : SPW_STATE_FP32;
    if (!given(own, "grad_dtype"))
        c->run.grad_dtype = default_grad_dtype(c, json_object_get(root, "data_types"));
    if (c->run.fp8 && !c->bf16)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.fp8 needs bf16.enabled", r->name);
    if (c->bf16 && c->fp16)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: bf16.enabled and fp16.enabled exclude each other", r->name);
    if (c->fp16 != (c->run.state_format == SPW_STATE_MIXED_F16))
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: fp16.enabled and spillway.state_format mixed-fp16 go together",
                         r->name);
    if (c->run.grad_dtype == SPW_F16 && !c->fp16)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.grad_dtype fp16 needs the loss scale of fp16.enabled",
                         r->name);
    if (!c->bf16 && !c->fp16 && c->run.state_format != SPW_STATE_FP32)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.state_format %s needs bf16.enabled", r->name,
                         spw_state_name(c->run.state_format));
    SPW_TRY(spw__config_note(r, settle_muon(r)));
    SPW_TRY(spw__config_note(r, check_device(r)));
    SPW_TRY(spw__config_note(r, check_start(r)));
    settle_by_type(r, root);
    SPW_TRY(spw__config_note(r, check_scheduler(r, json_object_get(json_object_get(root, "scheduler"), "params"))));
    if (c->run.chunk_elems % 4096 != 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: spillway.chunk_elems %llu is not a multiple of 4096", r->name,
                         (unsigned long long)c->run.chunk_elems);
    if (c->run.write_budget > 0 && strcmp(c->run.write_budget_action, "pause") == 0 && c->run.checkpoint_dir[0] == '\0')
        return SPW_RAISE(r->err, SPW_ECONFIG,
                         "%s: spillway.write_budget_action pause needs a spillway.checkpoint_dir to go on from",
                         r->name);
    if (c->aio.block_size % 4096 != 0)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: aio.block_size %llu is not a multiple of 4096", r->name,
                         (unsigned long long)c->aio.block_size);
    if (c->data.seq_length == 0)
        c->data.seq_length = c->model.positions < 1024 ? c->model.positions : 1024;
    return SPW_OK;
}

spw_status
spw__config_settle(const config_reader *r, const json_t *root)
{
    SPW_TRY(check_missing(r, root));
    SPW_TRY(spw__config_noted(r)); /* what follows from values needs all of them */
    SPW_TRY(spw__config_note(r, settle_all(r, root)));
    return spw__config_noted(r);
}
