/*
 * Random small models trained in random placements: whatever the tiers, budgets, slots, chunks, threads, delays, and whether
 * a checkpoint is written meanwhile or gone on from, losses and final state are the bytes of the plainest run. A run that stands
 * still is ended by an alarm and named. SPW_SEED and SPW_RUNS choose others and more of them.
 */
#include "lib_random.h"
#include "lib_rig.h"
#include "runtime_internal.h"
#include "spw_data.h"
#include "spw_plan.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { MODELS = SANITIZED ? 8 : 16, PLACEMENTS = 5, STEPS = 4, SECONDS_MAX = SANITIZED ? 120 : 60 };

static uint32_t trained, refused, failed;
static bool emulated;
static int saved_step; /* of this model's runs */

static void
need(const rig *r, spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s: %s", random_said, r->err.message);
}

/* How the optimizer computes. */
static void
draw_rule(uint64_t run, spw_config *c)
{
    c->optimizer.bias_correction = random_pick(run, 60, 4) > 0;
    c->optimizer.nesterov = random_pick(run, 61, 3) == 0;
    c->optimizer.momentum = c->optimizer.nesterov || random_pick(run, 62, 2) == 0 ? 0.9 : 0;
    c->optimizer.dampening = !c->optimizer.nesterov && random_pick(run, 63, 2) == 0 ? 0.5 : 0;
    c->optimizer.lr_decay = random_pick(run, 64, 2) == 0 ? 0.1 : 0;
    c->optimizer.weight_decay = random_pick(run, 65, 2) == 0 ? 0.1 : 0;
    if (strcmp(c->optimizer.type, "AdamW") == 0 && random_pick(run, 66, 4) == 0) {
        snprintf(c->optimizer.type, sizeof c->optimizer.type, "Adam");
        c->optimizer.adam_w_mode = false;
    }
    if (c->run.delayed_update == 0 && random_pick(run, 71, 4) == 0) {
        snprintf(c->optimizer.type, sizeof c->optimizer.type, "Muon");
        c->optimizer.adam_w_mode = true;
        c->optimizer.muon_lr = 2e-3;
        c->optimizer.adam_lr = c->optimizer.lr;
        c->optimizer.ns_steps = 1 + (uint32_t)random_pick(run, 72, 5);
    }
    c->run.decay_norm_and_bias = random_pick(run, 67, 2) == 0;
    c->run.nearest_moments = c->run.state_format == SPW_STATE_SPLIT_BF16 && random_pick(run, 68, 2) == 0;
    c->bf16_check_overflow = c->bf16 && random_pick(run, 69, 2) == 0;
    if (random_pick(run, 70, 2) == 0)
        c->run.router_balance = 0;
}

/* Beside experts too: all their tensors of a layer, or one of the two. */
static void
draw_adapters(uint64_t run, rig *r)
{
    static const char *const tensors[] = {"experts.*", "experts.*up_proj", "experts.down_proj"};
    if (r->c.model.experts == 0 || random_pick(run, 73, 3) == 0) {
        rig_lora(r);
        return;
    }
    rig_lora_experts(r);
    snprintf(r->c.run.lora_target_parameters.item[0], sizeof r->c.run.lora_target_parameters.item[0], "%s",
             tensors[random_pick(run, 74, 3)]);
}

/* What decides about bits. */
static void
draw_model(uint64_t run, rig *r)
{
    static const char *const optimizers[] = {"AdamW", "AdamW", "Lion", "SGD", "Adagrad"};
    static const char *const codes[] = {"", "int8", "int4"};
    spw_state_format format = (spw_state_format)random_pick(run, 0, SPW_STATE_COUNT);
    spw_config *c = &r->c;
    rig_config(r, random_family(run, 1), format, SPW_TIER_HOST);
    snprintf(c->optimizer.type, sizeof c->optimizer.type, "%s", optimizers[random_pick(run, 2, 5)]);
    c->optimizer.momentum = 0.9;
    c->optimizer.lr = 1e-3;
    c->model.layers = 1 + (uint32_t)random_pick(run, 3, 5);
    c->model.vocab = 61 + random_pick(run, 4, 400);
    c->model.mlp_width = c->model.experts > 0 ? 24 + 8 * random_pick(run, 5, 8) : 64 + 8 * random_pick(run, 5, 40);
    if (c->model.experts > 0 &&
        random_pick(run, 43, 16) == 0) { /* more than a device keeps in the smaller of its kernels */
        c->model.experts = 258 + 3 * random_pick(run, 44, 82);
        c->model.choices = 2 + random_pick(run, 45, 7);
        c->model.mlp_width = 8;
        c->model.layers = 2;
    }
    if (c->model.shared_width > 0 && !c->model.shared_gated)
        c->model.shared_width = c->model.mlp_width;
    tiny_model_fit(&c->model);
    if (c->model.index_keys > 0 && random_pick(run, 80, 3) > 0)
        c->model.index_keys = 1 + random_pick(run, 81, 16);
    c->model.tied = random_pick(run, 6, 2) == 0;
    c->micro_batch = 1 + random_pick(run, 7, 3);
    c->accumulation = 1 + random_pick(run, 8, 3);
    c->train_batch_size = c->micro_batch * c->accumulation;
    c->data.seq_length = 8 + random_pick(run, 9, 17);
    c->gradient_clipping = random_pick(run, 10, 3) == 0 ? 0 : 0.125 * (double)(1u << random_pick(run, 33, 6));
    c->run.micro_batches_per_pass = 1 + random_pick(run, 11, c->accumulation);
    c->run.tile_tokens = random_pick(run, 12, 3) == 0 ? 1 + random_pick(run, 13, 30) : 0;
    if (format == SPW_STATE_MIXED_F16) { /* the first steps overflow */
        c->bf16 = false;
        c->fp16 = true;
        c->loss_scale.initial_power = 8 + random_pick(run, 22, 16);
        c->loss_scale.window = c->loss_scale.hysteresis = 1;
        c->loss_scale.min = 1;
    }
    if (format != SPW_STATE_FP32 && c->run.micro_batches_per_pass == c->accumulation && random_pick(run, 14, 2) == 0)
        c->run.grad_dtype = c->fp16 ? SPW_F16 : SPW_BF16;
    if (c->run.micro_batches_per_pass == c->accumulation && random_pick(run, 46, 4) == 0)
        c->run.delayed_update = 1 + random_pick(run, 47, 2);
    if (c->run.grad_dtype == SPW_F32 && c->run.delayed_update == 0 && random_pick(run, 48, 4) == 0)
        c->run.tile_vocab = 64 * (1 + random_pick(run, 49, 3));
    if (random_pick(run, 23, 4) == 0)
        snprintf(c->data.documents, sizeof c->data.documents, "separate");
    else if (random_pick(run, 54, 5) == 0)
        tiny_prefer(c, (uint32_t)random_pick(run, 55, 2 * SPW_PREFERENCE_COUNT));
    if (random_pick(run, 15, 4) == 0)
        (random_pick(run, 16, 2) == 0 ? rig_freeze_mlps : rig_freeze_lower)(r);
    else if (c->model.layers > 1 && random_pick(run, 18, 5) < (c->model.experts > 0 ? 2 : 1))
        draw_adapters(run, r);
    c->run.fp8 = c->bf16 && random_pick(run, 19, 6) == 0;
    if (c->model.family == SPW_FAMILY_GPT2 && random_pick(run, 20, 3) == 0)
        c->model.dropout = 0.1;
    if (emulated && random_pick(run, 21, 4) == 0) {
        static char number[24];
        static const char *const streams[] = {"", "late", "odd", number};
        snprintf(number, sizeof number, "%llu", (unsigned long long)(1 + run));
        setenv("SPW_EMULATE_STREAMS", streams[random_pick(run, 35, 4)], 1);
        snprintf(c->run.device, sizeof c->run.device, "cuda");
    }
    draw_rule(run, c);
    if (random_pick(run, 50, 4) == 0) { /* other rates and decay for some, moments that change with every update */
        c->optimizer.groups[0] = (spw_param_group){"*norm*", 3e-4, 0.2, 0.8, 0.9};
        c->optimizer.groups[1] = (spw_param_group){"*.weight", NAN, 0.05, NAN, NAN};
        c->optimizer.group_count = 1 + (uint32_t)random_pick(run, 51, 2);
        if (c->model.family == SPW_FAMILY_GPT2)
            snprintf(c->optimizer.groups[0].match, sizeof c->optimizer.groups[0].match, "*ln_*");
        if (c->run.lora.rank > 0 || c->run.freeze.count > 0)
            c->optimizer.group_count = 0;
    }
    if (random_pick(run, 52, 4) == 0) {
        snprintf(c->scheduler.type, sizeof c->scheduler.type, "OneCycle");
        c->scheduler.cycle_min_lr = 1e-4;
        c->scheduler.cycle_max_lr = 1e-3;
        c->scheduler.first_steps = 2;
        c->scheduler.second_steps = c->scheduler.second_stairs = NAN;
        c->scheduler.cycle_momentum = true;
        c->scheduler.cycle_min_mom = 0.8;
        c->scheduler.cycle_max_mom = 0.9;
    }
    if ((c->run.freeze.count > 0 || c->run.lora.rank > 0) && format != SPW_STATE_FP32)
        snprintf(c->run.frozen_codes, sizeof c->run.frozen_codes, "%s", codes[random_pick(run, 17, 3)]);
}

/* from: the weights that will be loaded, or NULL. */
static spw_status
create(rig *r, const char *from, spw_plan *plan_only)
{
    need(r, spw_model_from_config(&r->model, &r->c, &r->err));
    return spw_engine_create(&r->e,
                             &(spw_engine_options){.config = &r->c,
                                                   .model = r->model,
                                                   .resumes = true, /* or saved */
                                                   .weights_from = from,
                                                   .plan_only = plan_only != NULL,
                                                   .process_bytes = TINY_PROCESS_BYTES,
                                                   .plan_out = plan_only},
                             &r->err);
}

static spw_status
plan_of(rig *r, spw_plan *p)
{
    spw_status st = create(r, NULL, p);
    rig_close(r);
    memset(&r->err, 0, sizeof r->err);
    return st;
}

/* Between what is needed at least and what holds everything, more often near the least. */
static uint64_t
between(uint64_t at, uint32_t what, uint64_t least, uint64_t most)
{
    uint64_t span = most > least ? most - least : 0;
    span = random_pick(at, what, 2) == 0 ? span / 8 : span;
    return least + (span > 0 ? random_pick(at, what + 1, span) : 0);
}

/* How bytes travel. */
static void
draw_travel(uint64_t at, rig *r)
{
    spw_config *c = &r->c;
    static spw_test_aio_schedule faults;
    faults = (spw_test_aio_schedule){.seed = at, .delays = 300, .shorts = 100, .agains = 50, .delay_ns_max = 1000000};
    c->run.aio_faults = c->run.activation_faults = NULL;
    if (random_pick(at, 50, 3) == 0)
        c->run.aio_faults = c->run.activation_faults = &faults;
    c->aio.single_submit = random_pick(at, 51, 4) == 0;
    c->aio.overlap_events = random_pick(at, 52, 4) > 0;
    c->zero.max_in_cpu = random_pick(at, 53, 3) == 0 ? random_pick(at, 54, 60000) : 0;
    c->zero.prefetch_bucket_size = random_pick(at, 55, 3) == 0 ? random_pick(at, 56, 60000) : (uint64_t)1e18;
    c->zero.max_live_parameters = random_pick(at, 57, 3) == 0 ? random_pick(at, 58, 100000) : (uint64_t)1e18;
    c->zero.sub_group_size = random_pick(at, 59, 3) == 0 ? 4096 + random_pick(at, 60, 20000) : 0;
    c->zero.pin_memory_param = c->zero.pin_memory_optimizer = random_pick(at, 61, 3) == 0;
}

/* What must not. */
static void
draw_placement(uint64_t at, rig *r)
{
    static const char *const gradients[] = {"auto", "host", "nvme"}, *const ahead[] = {"auto", "always", "never"};
    spw_config *c = &r->c;
    spw_plan all, least;
    bool whole = c->run.micro_batches_per_pass == 0 || c->run.micro_batches_per_pass == c->accumulation;
    if (whole) /* 0: or one by one, where all is on a device of its own */
        c->run.micro_batches_per_pass = random_pick(at, 36, 2) == 0 ? 0 : c->accumulation;
    c->zero.offload_param = (spw_tier)random_pick(at, 0, SPW_TIER_COUNT);
    c->zero.offload_optimizer =
        random_pick(at, 1, 4) == 0 ? (spw_tier)random_pick(at, 2, SPW_TIER_COUNT) : SPW_TIER_NVME;
    if (c->zero.offload_optimizer == SPW_TIER_DEVICE && strcmp(c->run.device, "cpu") != 0)
        c->zero.offload_param = SPW_TIER_DEVICE; /* updates run where records are */
    c->zero.stage = c->zero.offload_param == SPW_TIER_DEVICE ? (uint32_t)random_pick(at, 31, 4) : 3;
    c->run.chunk_elems = 4096ull << random_pick(at, 3, 4);
    c->run.weight_slots = (uint32_t)random_pick(at, 4, 5);
    c->run.record_slots = (uint32_t)random_pick(at, 5, 8);
    c->run.optimizer_threads = 1 + (uint32_t)random_pick(at, 6, 4);
    c->run.compute_threads = (uint32_t)random_pick(at, 7, 3);
    c->run.prefetch = random_pick(at, 8, 6) > 0;
    c->run.integrity = random_pick(at, 9, 3) > 0;
    c->run.chaos_seed = random_pick(at, 10, 2) == 0 ? 1 + random_pick(at, 11, 1000000) : 0;
    c->run.activations = (spw_tier)random_pick(at, 12, SPW_TIER_COUNT + 1);
    c->run.expert_turns =
        c->model.experts > 0 && (c->run.micro_batches_per_pass == 1 || !spw_model_reads_experts(&c->model))
            ? (uint32_t)random_pick(at, 13, 4)
            : 0;
    snprintf(c->run.update_ahead, sizeof c->run.update_ahead, "%s", ahead[random_pick(at, 32, 3)]);
    snprintf(c->run.fill_device, sizeof c->run.fill_device, "%s", ahead[random_pick(at, 14, 3)]);
    c->zero.optimizer_ratio = random_pick(at, 15, 4) == 0 ? (double)random_pick(at, 16, 101) / 100 : 1;
    c->aio.backend = random_pick(at, 17, 2) == 0 ? SPW_AIO_THREADS : SPW_AIO_AUTO;
    c->aio.block_size = 4096ull << random_pick(at, 18, 8);
    c->aio.queue_depth = 1 + (uint32_t)random_pick(at, 19, 16);
    snprintf(c->run.recompute, sizeof c->run.recompute, "%s",
             (const char *[]){"always", "auto", "least"}[random_pick(at, 20, 3)]);
    if (c->zero.offload_optimizer == SPW_TIER_NVME && whole)
        snprintf(c->run.gradients, sizeof c->run.gradients, "%s", gradients[random_pick(at, 21, 3)]);
    if (c->run.delayed_update > 0) { /* what the host updates, with gradients in its memory */
        c->zero.offload_optimizer = random_pick(at, 37, 2) == 0 ? SPW_TIER_HOST : SPW_TIER_NVME;
        c->zero.optimizer_ratio = 1;
        snprintf(c->run.fill_device, sizeof c->run.fill_device, "auto");
        snprintf(c->run.gradients, sizeof c->run.gradients, "%s", random_pick(at, 38, 2) == 0 ? "auto" : "host");
    }
    c->run.frozen_in_place = random_pick(at, 39, 2) == 0;
    draw_travel(at, r);
    if (random_pick(at, 40, 3) == 0)
        random_paths(at, &r->c, r->dir);
    if (plan_of(r, &all) != SPW_OK)
        return;
    if (random_pick(at, 22, 3) > 0) {
        c->run.device_memory = 4096;
        (void)plan_of(r, &least);
        c->run.device_memory = between(at, 23, least.least_bytes, all.device_bytes);
        if (plan_of(r, &all) != SPW_OK)
            return;
    }
    if (random_pick(at, 25, 3) > 0) {
        c->run.host_memory = 4096;
        (void)plan_of(r, &least);
        c->run.host_memory = between(at, 26, least.least_bytes, all.host_bytes + all.weight_nvme + all.record_nvme);
    }
}

typedef struct outcome {
    double loss[STEPS], norm[STEPS], eval;
    uint64_t digest;
    bool saved;
} outcome;

/* Of all weights and moments, parameter by parameter, wherever units have them. */
static uint64_t
state_sum(rig *r)
{
    uint64_t sum = 0, bytes = spw_model_elems(r->model) * sizeof(float);
    for (uint32_t part = 0; part <= spw__engine_optimizer(r->e, 0)->moment_count; part++) {
        float *values = rig_read(r, (spw_state_part)part);
        sum = sum * 31 + spw_checksum(values, bytes);
        free(values);
    }
    return sum;
}

/*
 * Steps from first on, until one fails; an evaluation, and a checkpoint of then meanwhile, after the one that was drawn for it.
 * out->saved: that is whole.
 */
static spw_status
try_from(rig *r, int first, bool saves, outcome *out)
{
    const spw_config *c = &r->c;
    const uint64_t n = c->micro_batch * c->accumulation * c->data.seq_length;
    static double reference[RIG_TOKENS];
    spw_checkpoint_job *job = NULL;
    spw_error why = {0};
    spw_status st = SPW_OK, kept = SPW_OK;
    for (int s = first; st == SPW_OK && s < STEPS; s++) {
        spw_step_result result;
        tiny_batch((uint64_t)s, c->model.vocab, n, rig_tokens, rig_targets);
        for (uint64_t i = 0; i < n && strcmp(c->data.documents, "separate") == 0; i++)
            rig_tokens[i] |= (i * 7 + (uint64_t)s) % 11 == 0 ? SPW_TOKEN_BEGINS : 0;
        if (strcmp(c->data.documents, "whole") == 0) {
            tiny_pairs(n, c->data.seq_length, rig_tokens, rig_targets, reference);
            spw_engine_set_reference(r->e, reference);
        }
        st = spw_engine_step(r->e, rig_tokens, rig_targets, (uint32_t)c->accumulation, c->optimizer.lr, &result,
                             &r->err);
        out->loss[s] = result.loss;
        out->norm[s] = result.grad_norm;
        if (st != SPW_OK || s + 1 != saved_step)
            continue;
        if (saves)
            st = spw_checkpoint_begin(
                &job, r->e, &r->c, r->dir,
                &(spw_checkpoint_state){.step = (uint64_t)saved_step, .updates = spw_engine_updates(r->e)}, &r->err);
        if (st == SPW_OK)
            st = spw_engine_eval(r->e, rig_tokens, rig_targets, 1, &out->eval, &r->err);
    }
    out->saved = job != NULL;
    if (job != NULL)
        kept = spw_checkpoint_finish(job, NULL, &why);
    out->saved = out->saved && kept == SPW_OK;
    if (st == SPW_OK && kept != SPW_OK)
        r->err = why;
    return st != SPW_OK ? st : kept;
}

static void
train_from(rig *r, int first, bool saves, outcome *out)
{
    need(r, try_from(r, first, saves, out));
    out->digest = state_sum(r);
}

static void
same(const outcome *want, const outcome *got, int first)
{
    for (int s = first; s < STEPS; s++) {
        if (memcmp(&want->loss[s], &got->loss[s], sizeof want->loss[s]) != 0 ||
            memcmp(&want->norm[s], &got->norm[s], sizeof want->norm[s]) != 0)
            fail_msg("%s: step %d has loss %.17g, norm %.17g, and %.17g, %.17g in the plainest run", random_said, s + 1,
                     got->loss[s], got->norm[s], want->loss[s], want->norm[s]);
    }
    if ((first < saved_step && memcmp(&want->eval, &got->eval, sizeof want->eval) != 0) || want->digest != got->digest)
        fail_msg("%s: another evaluation (%.17g, not %.17g) or another final state (%llx, not %llx)", random_said,
                 got->eval, want->eval, (unsigned long long)got->digest, (unsigned long long)want->digest);
}

static void
name_run(const rig *r, uint64_t model, uint64_t placement, const char *what)
{
    const spw_config *c = &r->c;
    random_says(
        strcmp(c->run.device, "cpu") == 0 ? SECONDS_MAX : 4 * SECONDS_MAX, /* emulated kernels take their time */
        "model %llu, placement %llu%s (%s, family %d, %s, %s; weights %d, records %d, gradients %s, ahead %s, chunk "
        "%llu, slots %u "
        "and %u, turns %u, chaos %llu)",
        (unsigned long long)model, (unsigned long long)placement, what, c->run.device, (int)c->model.family,
        spw_state_name(c->run.state_format), c->optimizer.type, (int)c->zero.offload_param,
        (int)c->zero.offload_optimizer, c->run.gradients, c->run.update_ahead, (unsigned long long)c->run.chunk_elems,
        c->run.weight_slots, c->run.record_slots, c->run.expert_turns, (unsigned long long)c->run.chaos_seed);
}

/* From the seed, or with what a checkpoint has. False: refused for want of memory, or by name. */
static bool
begin(rig *r, const char *checkpoint)
{
    char weights[500];
    spw_status st;
    snprintf(weights, sizeof weights, "%s/model.safetensors", checkpoint != NULL ? checkpoint : "");
    st = create(r, checkpoint != NULL ? weights : NULL, NULL);
    if (st == SPW_OK) {
        need(r, checkpoint != NULL ? spw_checkpoint_load(r->e, checkpoint, &r->err)
                                   : spw_engine_init_params(r->e, r->c.run.seed, &r->err));
        return true;
    }
    if (st != SPW_ENOFIT && st != SPW_ECONFIG)
        need(r, st);
    refused++;
    return false;
}

/* In one placement; then, from its checkpoint, in the next. */
static void
place_and_train(uint64_t model, uint64_t placement, const outcome *want)
{
    uint64_t at = (model + 1) * 1000 + placement;
    bool saves;
    outcome got;
    char path[400];
    rig r, next;
    draw_model(model, &r);
    draw_placement(at, &r);
    saves = r.c.run.delayed_update > 0 || random_pick(at, 30, 2) == 0;
    name_run(&r, model, placement, "");
    if (begin(&r, NULL)) {
        train_from(&r, 0, saves, &got);
        same(want, &got, 0);
        trained++;
        if (saves) {
            draw_model(model, &next);
            draw_placement(at + 500, &next);
            name_run(&next, model, placement, ", from its checkpoint");
            snprintf(path, sizeof path, "%s/step-%d", r.dir, saved_step);
            if (begin(&next, path)) {
                train_from(&next, saved_step, false, &got);
                same(want, &got, saved_step);
                trained++;
            }
            rig_remove(&next);
        }
    }
    rig_remove(&r);
}

/* The run that others of the model are held to. */
static void
train_in_host(uint64_t model, bool saves, outcome *want)
{
    rig r;
    saved_step = 1 + (int)random_pick(model, 53, STEPS - 1);
    draw_model(model, &r);
    name_run(&r, model, 0, ", all in host memory");
    assert_true(begin(&r, NULL));
    train_from(&r, 0, saves || r.c.run.delayed_update > 0, want); /* then a save decides about bits */
    rig_remove(&r);
}

static void
test_random_runs(void **state)
{
    uint64_t models = random_runs(MODELS);
    (void)state;
    emulated = !SANITIZED && tiny_emulated_device();
    for (uint64_t model = 0; model < models; model++) {
        outcome want;
        train_in_host(model, false, &want);
        for (uint64_t placement = 1; placement <= PLACEMENTS; placement++)
            place_and_train(model, placement, &want);
    }
    random_done();
    print_message("seed %llu: %u runs, %u refusals\n", (unsigned long long)random_seed(), trained, refused);
    assert_true(trained > 2 * refused);
}

/* With what is still on its way to the disk, which a step does not wait for. */
static spw_status
drain_writes(rig *r)
{
    spw_store_stats stats;
    spw_status st = spw_engine_drain(r->e, &r->err);
    do {
        spw_sleep_ns(100000);
        spw_store_get_stats(spw_engine_store(r->e), &stats);
    } while (st == SPW_OK && stats.nvme_moving > 0 && spw_store_check(spw_engine_store(r->e), NULL) == SPW_OK);
    return st == SPW_OK ? spw_engine_drain(r->e, &r->err) : st;
}

/* One transfer of the disk fails, whatever the placement: the run ends with that, and a checkpoint that is there is whole. */
static void
fail_and_resume(uint64_t model, uint64_t placement, const outcome *want)
{
    static spw_test_aio_schedule faults;
    uint64_t at = (model + 1) * 1000 + placement;
    outcome got = {.saved = false};
    char path[400];
    rig r, next;
    spw_status st;
    draw_model(model, &r);
    draw_placement(at, &r);
    name_run(&r, model, placement, ", one transfer fails");
    faults = (spw_test_aio_schedule){.seed = at, .error_at = 1 + random_pick(at, 70, 1ull << random_pick(at, 71, 10))};
    r.c.run.aio_faults = random_pick(at, 72, 4) > 0 ? &faults : NULL;
    r.c.run.activation_faults = r.c.run.aio_faults == NULL ? &faults : NULL;
    st = create(&r, NULL, NULL);
    if (st == SPW_OK) {
        st = spw_engine_init_params(r.e, r.c.run.seed, &r.err);
        if (st == SPW_OK)
            st = try_from(&r, 0, true, &got);
        if (st == SPW_OK)
            st = drain_writes(&r);
        if (st != (faults.failures > 0 ? SPW_EIO : SPW_OK))
            fail_msg("%s: %llu transfers failed, and the run ends with %d: %s", random_said,
                     (unsigned long long)faults.failures, (int)st, r.err.message);
        if (faults.failures > 0 && strstr(r.err.message, "swap.bin") == NULL)
            fail_msg("%s: %s", random_said, r.err.message);
        failed += faults.failures > 0;
        rig_close(&r);
        snprintf(path, sizeof path, "%s/step-%d", r.dir, saved_step);
        draw_model(model, &next);
        if (got.saved && begin(&next, path)) {
            train_from(&next, saved_step, false, &got);
            same(want, &got, saved_step);
        }
        rig_remove(&next);
    } else if (st != SPW_ENOFIT && st != SPW_ECONFIG && faults.failures == 0)
        need(&r, st);
    rig_remove(&r);
}

static void
test_random_faults(void **state)
{
    uint64_t models = random_runs(MODELS) / 2;
    (void)state;
    for (uint64_t model = 0; model < models; model++) {
        outcome want;
        train_in_host(model, true, &want);
        for (uint64_t placement = 1; placement <= PLACEMENTS; placement++)
            fail_and_resume(model, 100 + placement, &want);
    }
    random_done();
    print_message("seed %llu: %u runs failed\n", (unsigned long long)random_seed(), failed);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_runs), cmocka_unit_test(test_random_faults)};
    return cmocka_run_group_tests_name("random runs", tests, NULL, NULL);
}
