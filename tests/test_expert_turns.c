/*
 * Experts that come to the device in turns, because a layer's do not fit there at once: the same bits as if they did, in every
 * placement, on one rank and on several; as few turns as there is room for; and no more bytes than this must move.
 */
#include "lib_rig.h"
#include "lib_worlds.h"
#include "engine_internal.h"
#include "runtime_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

typedef struct variant {
    const char *name;
    uint32_t turns;
    spw_tier param, optimizer;
    uint64_t chunk;
    uint32_t slots;
    bool no_prefetch, spills;
    const char *recompute;
    spw_tier checkpoints; /* SPW_TIER_COUNT: where there is room */
    uint64_t chaos;
} variant;

static const variant variants[] = {
    {"all at once", 1, SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, false, false, "auto", SPW_TIER_COUNT, 0},
    {"two turns", 2, SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, false, false, "auto", SPW_TIER_COUNT, 0},
    {"two turns, computed again", 2, SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, false, false, "always", SPW_TIER_COUNT, 0},
    {"four turns, on the device", 4, SPW_TIER_DEVICE, SPW_TIER_DEVICE, 4096, 0, false, false, "always", SPW_TIER_COUNT,
     0},
    {"each alone, records on nvme", 64, SPW_TIER_HOST, SPW_TIER_NVME, 8192, 0, false, true, "always", SPW_TIER_COUNT,
     0},
    {"two turns, nvme", 2, SPW_TIER_NVME, SPW_TIER_NVME, 4096, 0, false, true, "auto", SPW_TIER_COUNT, 0},
    {"four turns, nvme, one slot", 4, SPW_TIER_NVME, SPW_TIER_NVME, 4096, 1, true, false, "always", SPW_TIER_COUNT, 0},
    {"each alone, nvme, chaos", 64, SPW_TIER_NVME, SPW_TIER_NVME, 4096, 2, false, true, "always", SPW_TIER_COUNT, 31},
    {"two turns, host, chaos", 2, SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, false, false, "auto", SPW_TIER_COUNT, 32},
    {"two turns, what they read kept", 2, SPW_TIER_HOST, SPW_TIER_HOST, 8192, 0, false, false, "least", SPW_TIER_COUNT,
     0},
    {"four turns, it on the host, chaos", 4, SPW_TIER_NVME, SPW_TIER_NVME, 4096, 2, false, true, "least", SPW_TIER_HOST,
     33},
    {"two turns, it on nvme, chaos", 2, SPW_TIER_HOST, SPW_TIER_NVME, 8192, 0, false, false, "least", SPW_TIER_NVME,
     34},
};

static void
configure(rig *r, const variant *v, spw_family family, spw_state_format format, void (*change)(rig *r))
{
    rig_config(r, family, format, SPW_TIER_HOST);
    r->c.zero.offload_param = v->param;
    r->c.zero.offload_optimizer = v->optimizer;
    r->c.accumulation = 1;
    r->c.run.chunk_elems = v->chunk;
    r->c.run.expert_turns = v->turns;
    r->c.run.weight_slots = r->c.run.record_slots = v->slots;
    r->c.run.prefetch = !v->no_prefetch;
    r->c.run.chaos_seed = v->chaos;
    r->c.run.activations = v->checkpoints;
    snprintf(r->c.run.recompute, sizeof r->c.run.recompute, "%s", v->recompute);
    if (change != NULL)
        change(r);
    if (v->spills && (r->c.accumulation == 1 || r->c.run.micro_batches_per_pass == 0))
        snprintf(r->c.run.gradients, sizeof r->c.run.gradients, "nvme");
}

static void
train(rig *r)
{
    rig_open(r);
    rig_need(r, spw_engine_init_params(r->e, 7, &r->err));
    rig_train(r, 0, RIG_STEPS);
}

/* The logits that follow some tokens. */
static void
predict(rig *r, float *logits)
{
    rig_need(r, spw_engine_logits(r->e, (int32_t[]){5, 17, 40}, 3, logits, &r->err));
}

/* Losses, norms, an evaluation, logits and the state of every variant, under the sanitizers of every third, are those of the first. */
static void
compare(spw_family family, spw_state_format format, void (*change)(rig *r))
{
    static float logits[2][1024];
    static size_t cases;
    rig one;
    double want, got;
    configure(&one, &variants[0], family, format, change);
    train(&one);
    assert_true(one.losses[RIG_STEPS - 1] < one.losses[0]);
    rig_need(&one, spw_engine_eval(one.e, rig_tokens, rig_targets, (uint32_t)one.c.accumulation, &want, &one.err));
    assert_true(one.model->config.vocab <= 1024);
    predict(&one, logits[0]);
    for (size_t i = 1 + (SANITIZED ? cases++ % 3 : 0); i < sizeof variants / sizeof variants[0];
         i += SANITIZED ? 3 : 1) {
        rig r;
        configure(&r, &variants[i], family, format, change);
        train(&r);
        for (int s = 0; s < RIG_STEPS; s++) {
            if (one.losses[s] != r.losses[s] || one.norms[s] != r.norms[s])
                fail_msg("%s, %s: step %d has loss %.17g and norm %.17g, all at once %.17g and %.17g",
                         spw_state_name(format), variants[i].name, s + 1, r.losses[s], r.norms[s], one.losses[s],
                         one.norms[s]);
        }
        rig_need(&r, spw_engine_eval(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, &got, &r.err));
        assert_true(got == want);
        predict(&r, logits[1]);
        assert_memory_equal(logits[0], logits[1], r.model->config.vocab * sizeof **logits);
        rig_same_state(&one, &r, variants[i].name);
        rig_remove(&r);
    }
    rig_remove(&one);
}

static void
clipped(rig *r)
{
    r->c.gradient_clipping = 0.5;
}

/* Micro-batches come one by one in any case: in one pass there is one. */
static void
accumulated(rig *r)
{
    clipped(r);
    r->c.accumulation = 2;
    r->c.run.micro_batches_per_pass = 1;
}

/* Each turn serves all micro-batches. */
static void
together(rig *r)
{
    clipped(r);
    r->c.accumulation = 3;
}

/* The same of a pass, of two and then of one. */
static void
in_two_passes(rig *r)
{
    together(r);
    r->c.run.micro_batches_per_pass = 2;
}

static void
together_in_bf16(rig *r)
{
    together(r);
    r->c.run.grad_dtype = SPW_BF16;
}

/* Pieces of seven places, of several experts and of one, which turns cut once more. */
static void
in_sevens(rig *r)
{
    clipped(r);
    r->c.run.tile_tokens = 7;
}

/* Two units in each turn, one without gradient. */
static void
half_frozen(rig *r)
{
    clipped(r);
    rig_freeze(r, "*.experts.*.gate_proj.weight");
}

/* Two units in each turn, both trained: matrices are taken whole, and vectors are not. */
static void
muon(rig *r)
{
    clipped(r);
    tiny_muon(&r->c);
}

static void
lora_and_codes(rig *r)
{
    rig_lora(r);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "int8");
}

/* Adapters beside the experts that come in turns stay with their layer. */
static void
lora_of_experts(rig *r)
{
    clipped(r);
    rig_lora_experts(r);
}

static void
lora_of_experts_and_codes(rig *r)
{
    rig_lora_experts(r);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "int4");
}

static void
lora_of_experts_in_sevens(rig *r)
{
    in_sevens(r);
    rig_lora_experts(r);
}

static void
narrow(rig *r)
{
    accumulated(r);
    r->c.model.latent_width = 12;
}

static void
narrow_in_sevens(rig *r)
{
    lora_of_experts_in_sevens(r);
    r->c.model.latent_width = 12;
}

static void
together_in_sevens(rig *r)
{
    in_sevens(r);
    together(r);
}

static void
together_half_frozen(rig *r)
{
    half_frozen(r);
    together(r);
}

static void
lora_of_experts_together(rig *r)
{
    rig_lora_experts(r);
    together_in_sevens(r);
}

/* Whatever is between the parts of a block is what is there in a call of all of it. */
static void
test_shared(void **state)
{
    (void)state;
    compare(SPW_FAMILY_QWEN3_MOE, SPW_STATE_FP32, together);
    compare(SPW_FAMILY_QWEN2_MOE, SPW_STATE_SPLIT, together); /* an MLP of all rows behind the experts */
    compare(SPW_FAMILY_DEEPSEEK_V3, SPW_STATE_MIXED, in_two_passes);
    compare(SPW_FAMILY_LLAMA4, SPW_STATE_SPLIT, together_in_bf16);
    compare(SPW_FAMILY_GPT_OSS, SPW_STATE_SPLIT_INT8, together_in_sevens);
    compare(SPW_FAMILY_LLAMA4, SPW_STATE_FP32, together_in_sevens);
    compare(SPW_FAMILY_GRANITE_HYBRID, SPW_STATE_SPLIT, together);
    compare(SPW_FAMILY_NEMOTRON_H, SPW_STATE_SPLIT, together); /* onto the block's input */
    compare(SPW_FAMILY_NEMOTRON_H, SPW_STATE_FP32, lora_of_experts_together);
    compare(SPW_FAMILY_MISTRAL4, SPW_STATE_SPLIT, lora_of_experts_together);
    compare(SPW_FAMILY_GLM4_MOE, SPW_STATE_SPLIT, together_half_frozen);
    compare(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, lora_of_experts_together);
    compare(SPW_FAMILY_GEMMA4, SPW_STATE_SPLIT, accumulated); /* where they cannot */
    compare(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_SPLIT, accumulated);
    compare(SPW_FAMILY_AFMOE, SPW_STATE_SPLIT, accumulated);
    compare(SPW_FAMILY_KIMI_LINEAR, SPW_STATE_SPLIT, accumulated);
}

static void
test_same_bits(void **state)
{
    (void)state;
    compare(SPW_FAMILY_MIXTRAL, SPW_STATE_FP32, NULL);
    compare(SPW_FAMILY_GRANITE_HYBRID, SPW_STATE_SPLIT, clipped); /* whose halves are multiplied, and with a state */
    compare(SPW_FAMILY_GRANITE_HYBRID, SPW_STATE_FP32, lora_of_experts);
    compare(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, clipped);
    compare(SPW_FAMILY_QWEN2_MOE, SPW_STATE_MIXED, accumulated);
    compare(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT_INT8, half_frozen); /* noise by the element's place */
    compare(SPW_FAMILY_GPT_OSS, SPW_STATE_SPLIT, clipped);
    compare(SPW_FAMILY_GPT_OSS, SPW_STATE_MIXED, muon);
    compare(SPW_FAMILY_GLM4_MOE, SPW_STATE_SPLIT_INT8,
            clipped); /* a layer without experts, and a vector that is frozen */
    compare(SPW_FAMILY_DEEPSEEK_V3, SPW_STATE_SPLIT, accumulated);
    compare(SPW_FAMILY_MISTRAL4, SPW_STATE_FP32, in_sevens);
    compare(SPW_FAMILY_QWEN2_MOE, SPW_STATE_SPLIT, lora_and_codes);
    compare(SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, lora_of_experts_and_codes);
    compare(SPW_FAMILY_LLAMA4, SPW_STATE_FP32, lora_of_experts);
    compare(SPW_FAMILY_GPT_OSS, SPW_STATE_SPLIT, lora_of_experts_in_sevens);
    compare(SPW_FAMILY_QWEN2_MOE, SPW_STATE_FP32, in_sevens);
    compare(SPW_FAMILY_GPT_OSS, SPW_STATE_SPLIT_INT8, in_sevens);
    compare(SPW_FAMILY_DEEPSEEK_V3, SPW_STATE_MIXED, in_sevens);
    compare(SPW_FAMILY_GEMMA4, SPW_STATE_SPLIT, clipped); /* whose experts' sum is read: they come once more */
    compare(SPW_FAMILY_GEMMA4, SPW_STATE_FP32, in_sevens);
    compare(SPW_FAMILY_LLAMA4, SPW_STATE_SPLIT, accumulated); /* whose weights are of what experts read */
    compare(SPW_FAMILY_LLAMA4, SPW_STATE_FP32, in_sevens);
    compare(SPW_FAMILY_NEMOTRON_H, SPW_STATE_SPLIT, clipped); /* with a curve, and no gate */
    compare(SPW_FAMILY_NEMOTRON_H, SPW_STATE_FP32, lora_of_experts_in_sevens);
    compare(SPW_FAMILY_NEMOTRON_H, SPW_STATE_SPLIT, narrow); /* whose experts' sum is read */
    compare(SPW_FAMILY_NEMOTRON_H, SPW_STATE_FP32, narrow_in_sevens);
    compare(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_SPLIT, clipped);
    compare(SPW_FAMILY_AFMOE, SPW_STATE_SPLIT, clipped); /* whose experts' sum is normed */
    compare(SPW_FAMILY_AFMOE, SPW_STATE_FP32, lora_of_experts_in_sevens);
    compare(SPW_FAMILY_DEEPSEEK_V4, SPW_STATE_FP32, lora_of_experts_in_sevens);
}

/* What was saved with experts in turns goes on with all at once, and the other way. */
static void
test_resume(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig whole, part;
        configure(&whole, &variants[k == 0 ? 1 : 0], SPW_FAMILY_QWEN2_MOE, SPW_STATE_SPLIT, clipped);
        configure(&part, &variants[k == 0 ? 0 : 6], SPW_FAMILY_QWEN2_MOE, SPW_STATE_SPLIT, clipped);
        rig_open(&whole);
        rig_need(&whole, spw_engine_init_params(whole.e, 7, &whole.err));
        rig_train(&whole, 0, 2);
        rig_save(&whole, 2);
        rig_train(&whole, 2, RIG_STEPS);
        rig_load(&part, &whole, 2);
        rig_train(&part, 2, RIG_STEPS);
        for (int s = 2; s < RIG_STEPS; s++)
            assert_true(whole.losses[s] == part.losses[s] && whole.norms[s] == part.norms[s]);
        rig_same_state(&whole, &part, "resumed state");
        rig_remove(&whole);
        rig_remove(&part);
    }
}

/* Several ranks, each stage: the same bits whether experts come at once or in turns, also where the norm clips. */
static void
test_ranks(void **state)
{
    static const struct {
        uint32_t ranks, stage, turns;
        spw_tier tier;
        uint64_t chaos;
    } kinds[] = {{2, 3, 1, SPW_TIER_HOST, 0},  {2, 3, 2, SPW_TIER_HOST, 0},   {2, 3, 6, SPW_TIER_NVME, 41},
                 {2, 2, 3, SPW_TIER_HOST, 0},  {2, 0, 2, SPW_TIER_DEVICE, 0}, {3, 3, 1, SPW_TIER_NVME, 0},
                 {3, 3, 3, SPW_TIER_NVME, 42}, {3, 1, 6, SPW_TIER_HOST, 0}};
    outcome *first = outcome_new(), *other = outcome_new();
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        bool reference = k == 0 || kinds[k].ranks != kinds[k - 1].ranks;
        outcome *out = reference ? first : other;
        spw_config c;
        char what[80];
        ranks_config(&c, SPW_STATE_SPLIT);
        ranks_use_dir(&c, dir);
        c.gradient_clipping = 0.5;
        c.run.micro_batches_per_pass = 1;
        c.zero.stage = kinds[k].stage;
        c.zero.offload_optimizer = kinds[k].tier;
        c.zero.offload_param = kinds[k].stage == 3 ? kinds[k].tier : SPW_TIER_DEVICE;
        c.run.expert_turns = kinds[k].turns;
        c.run.chaos_seed = kinds[k].chaos;
        memset(out, 0, sizeof *out);
        world_run(&(world){
            .ranks = kinds[k].ranks, .steps = STEPS, .config = &c, .family = SPW_FAMILY_QWEN3_MOE, .out = out});
        snprintf(what, sizeof what, "%u ranks, stage %u, %u turns", kinds[k].ranks, kinds[k].stage, kinds[k].turns);
        if (!reference)
            outcome_same(first, out, what);
    }
    tiny_dir_remove(dir);
    outcome_free(first);
    outcome_free(other);
}

/* ---------------------------------------------------------------- room and bytes */

static const char *
decision_of(const spw_plan *p, const char *name)
{
    for (uint32_t k = 0; k < p->decision_count; k++) {
        if (strcmp(p->decisions[k].name, name) == 0)
            return p->decisions[k].value;
    }
    return NULL;
}

enum { WIDE = 256 };

/* The plan of a process of two ranks, so many on each host (0: all), that has so much room. */
static spw_status
plan_ranks(const spw_config *config, uint32_t on_host, uint32_t turns, uint64_t room, spw_error *err)
{
    spw_config c = *config;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_status st;
    tiny_model_config(&c.model, SPW_FAMILY_QWEN3_MOE);
    c.model.mlp_width = WIDE;
    c.run.ranks = 2;
    c.run.expert_turns = turns;
    c.accumulation = MICRO / 2;
    c.train_batch_size = MICRO * c.micro_batch;
    assert_int_equal(spw_model_build(&model, &c.model, NULL), SPW_OK);
    st = spw_engine_create(&e,
                           &(spw_engine_options){.config = &c,
                                                 .model = model,
                                                 .plan_only = true,
                                                 .resumes = true,
                                                 .local_ranks = on_host,
                                                 .process_bytes = TINY_PROCESS_BYTES,
                                                 .room_bytes = room},
                           err);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return st;
}

/* The least that a process of two ranks must have left for a plan with so many turns. */
static uint64_t
least_room(const spw_config *config, uint32_t on_host, uint32_t turns)
{
    uint64_t low = 0, high = 1ull << 30;
    while (high - low > 4096) {
        uint64_t room = (low + high) / 2;
        spw_status st = plan_ranks(config, on_host, turns, room, NULL);
        low = st == SPW_OK ? low : room;
        high = st == SPW_OK ? room : high;
    }
    return high;
}

/*
 * Where sums of gradients come from other hosts in codes, turns decide about bits, so memory does not decide about turns: they have to be said.
 * On one host nothing is coded.
 */
static void
test_coded_gradients(void **state)
{
    spw_error err = {0};
    uint64_t room;
    spw_config c;
    (void)state;
    ranks_config(&c, SPW_STATE_SPLIT);
    c.run.micro_batches_per_pass = 1;
    c.zero.quantized_gradients = true;
    room = (least_room(&c, 0, 6) + least_room(&c, 0, 1)) / 2;
    assert_int_equal(plan_ranks(&c, 0, 1, room, &err), SPW_ENOFIT);
    assert_int_equal(plan_ranks(&c, 0, 0, room, &err), SPW_OK);
    room = (least_room(&c, 1, 6) + least_room(&c, 1, 1)) / 2;
    assert_int_equal(plan_ranks(&c, 1, 0, room, &err), SPW_ENOFIT);
    assert_non_null(strstr(err.message,
                           "a layer's experts do not come in turns: "
                           "zero_optimization.zero_quantized_gradients rounds what comes from other hosts"));
    assert_int_equal(plan_ranks(&c, 1, 6, room, &err), SPW_OK);
    c.zero.quantized_gradients = false;
    assert_int_equal(plan_ranks(&c, 1, 0, room, &err), SPW_OK);
}

/* One rank has less room than the other, and not for all experts of a layer: both take them in as many turns. */
static void
test_ranks_agree(void **state)
{
    outcome *first = outcome_new(), *other = outcome_new();
    uint64_t least, most;
    spw_config c;
    (void)state;
    ranks_config(&c, SPW_STATE_SPLIT);
    c.run.micro_batches_per_pass = 1;
    least = least_room(&c, 0, 6);
    most = least_room(&c, 0, 1);
    print_message("room for all at once: %llu bytes, one by one: %llu\n", (unsigned long long)most,
                  (unsigned long long)least);
    assert_true(least + 8192 < most);
    world_run(&(world){
        .ranks = 2, .steps = STEPS, .config = &c, .family = SPW_FAMILY_QWEN3_MOE, .mlp_width = WIDE, .out = first});
    world_run(&(world){.ranks = 2,
                       .steps = STEPS,
                       .config = &c,
                       .family = SPW_FAMILY_QWEN3_MOE,
                       .mlp_width = WIDE,
                       .last_room = (least + most) / 2,
                       .out = other});
    for (int r = 0; r < 2; r++) {
        assert_null(decision_of(&first->plan[r], "spillway.expert_turns"));
        assert_non_null(decision_of(&other->plan[r], "spillway.expert_turns"));
    }
    assert_string_equal(decision_of(&other->plan[0], "spillway.expert_turns"),
                        decision_of(&other->plan[1], "spillway.expert_turns"));
    outcome_same(first, other, "room on one rank alone");
    outcome_free(first);
    outcome_free(other);
}

/* A layer's experts are nearly all of it. */
static void
large_layers(rig *r)
{
    rig_config(r, SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r->c.model.width = 64;
    r->c.model.mlp_width = 128;
    r->c.model.experts = 16;
    r->c.accumulation = 1;
    r->c.gradient_clipping = 0;
    snprintf(r->c.run.recompute, sizeof r->c.run.recompute, "always");
}

/* The least device memory with so many turns. */
static uint64_t
least_device(uint32_t turns)
{
    uint64_t least;
    rig r;
    large_layers(&r);
    r.c.run.expert_turns = turns;
    r.c.run.device_memory = 4096;
    assert_int_equal(rig_begin(&r), SPW_ENOFIT);
    least = rig_least_named(&r, "spillway.device_memory");
    rig_remove(&r);
    return least;
}

/*
 * Each budget gets the fewest turns of 1, 2, 4, 8 and 16 that it holds, says so, and trains as the one with room for all does; a budget
 * that holds none names what sixteen turns need.
 */
static void
test_fewest_turns(void **state)
{
    uint64_t least[5], all, one;
    rig whole;
    (void)state;
    large_layers(&whole);
    rig_open(&whole);
    assert_null(decision_of(spw_engine_plan(whole.e), "spillway.expert_turns"));
    rig_need(&whole, spw_engine_init_params(whole.e, 7, &whole.err));
    rig_train(&whole, 0, RIG_STEPS);
    for (int k = 0; k < 5; k++) {
        least[k] = least_device(1u << k);
        assert_true(k == 0 || least[k] < least[k - 1]);
    }
    all = least[0];
    one = least[4];
    print_message("device memory: %llu bytes for all experts of a layer at once, %llu for one\n",
                  (unsigned long long)all, (unsigned long long)one);
    for (int k = 0; k < 5; k++) {
        const char *value;
        char want[8];
        rig r;
        large_layers(&r);
        r.c.run.device_memory = least[k];
        assert_int_equal(rig_begin(&r), SPW_OK);
        value = decision_of(spw_engine_plan(r.e), "spillway.expert_turns");
        snprintf(want, sizeof want, "%d", 1 << k);
        assert_true(k == 0 ? value == NULL : value != NULL && strcmp(value, want) == 0);
        rig_train(&r, 0, RIG_STEPS);
        assert_memory_equal(whole.losses, r.losses, sizeof r.losses);
        rig_same_state(&whole, &r, "state");
        rig_remove(&r);
    }
    rig_remove(&whole);
    large_layers(&whole);
    whole.c.run.device_memory = one - 1;
    assert_int_equal(rig_begin(&whole), SPW_ENOFIT);
    assert_int_equal(rig_least_named(&whole, "spillway.device_memory"), one);
    rig_remove(&whole);
}

/* The budget that a plan in so many turns names; both are enough: 0. */
static uint64_t
planned_least(uint32_t turns, uint64_t host, uint64_t device)
{
    spw_plan plan;
    spw_status st;
    rig r;
    large_layers(&r);
    r.c.run.expert_turns = turns;
    r.c.run.activations = SPW_TIER_HOST; /* not as the device has room */
    r.c.run.host_memory = host;
    r.c.run.device_memory = device;
    rig_need(&r, spw_model_from_config(&r.model, &r.c, &r.err));
    st = spw_engine_create(&r.e,
                           &(spw_engine_options){.config = &r.c,
                                                 .model = r.model,
                                                 .plan_only = true,
                                                 .plan_out = &plan,
                                                 .process_bytes = TINY_PROCESS_BYTES,
                                                 .room_bytes = 1ull << 40},
                           &r.err);
    assert_int_equal(st, plan.lack == SPW_LACK_NOTHING ? SPW_OK : SPW_ENOFIT);
    rig_remove(&r);
    return plan.least_bytes;
}

/* Two turns fit where one lacks the device's memory and sixteen, with more tables, the host's: a plan finds them as a run does. */
static void
test_fewer_tables(void **state)
{
    uint64_t two = planned_least(2, 4096, 1ull << 30), sixteen = planned_least(16, 4096, 1ull << 30);
    uint64_t device = planned_least(2, 1ull << 30, 4096);
    (void)state;
    print_message("host memory: %llu bytes for two turns, %llu for sixteen\n", (unsigned long long)two,
                  (unsigned long long)sixteen);
    assert_true(two < sixteen && device < planned_least(1, 1ull << 30, 4096));
    assert_int_equal(planned_least(2, two, device), 0);
    assert_int_equal(planned_least(0, two, device), 0);
}

/*
 * With room for a turn or two a weight comes to the device twice a step, forward and backward, however many turns there are; but the
 * last turn of the forward pass is the first of the backward pass, and embeddings and head have other numbers of uses.
 */
static void
test_bytes(void **state)
{
    enum { SMALL = 32768 }; /* less than a turn */
    (void)state;
    for (uint32_t turns = 2; turns <= 16; turns *= 2) {
        spw_step_result result;
        uint64_t weights, planned, turn = 0, layers = 0;
        const spw_layout *l;
        rig r;
        large_layers(&r);
        r.c.run.expert_turns = turns;
        r.c.run.device_memory = least_device(turns);
        assert_int_equal(rig_begin(&r), SPW_OK);
        l = spw_engine_layout(r.e);
        for (uint32_t u = 0; u < l->unit_count; u++) {
            layers += l->of_experts[u] ? l->units[u].elems : 0;
            turn = l->of_experts[u] ? l->units[u].elems * 2 : turn;
        }
        for (int s = 0; s < 3; s++)
            rig_need(&r, rig_step(&r, (uint64_t)s, &result));
        weights = l->elems * 2;
        planned = spw_engine_plan(r.e)->traffic[SPW_PACE_DEFAULT].h2d;
        print_message("%u turns: %llu bytes to the device, planned were %llu, of %llu of weights\n", turns,
                      (unsigned long long)result.h2d, (unsigned long long)planned, (unsigned long long)weights);
        assert_true(result.h2d <= 2 * weights + weights / 10); /* what is fetched too early may have to go again */
        assert_true(result.h2d >= 2 * (layers - layers / r.c.model.layers) * 2);
        assert_true(planned + turn < 2 * weights + SMALL && planned + turn > 2 * weights - SMALL);
        rig_remove(&r);
    }
}

/* Adapters beside what lies next to the experts or behind them; in three turns, with the least memory. */
static void
little_asked(rig *r, spw_family family, const char *target, uint32_t micros)
{
    rig_config(r, family, SPW_STATE_SPLIT, SPW_TIER_HOST);
    rig_lora(r);
    r->c.run.lora_targets.count = 1;
    snprintf(r->c.run.lora_targets.item[0], sizeof r->c.run.lora_targets.item[0], "%s", target);
    r->c.accumulation = micros;
    r->c.gradient_clipping = 1;
    r->c.run.expert_turns = 3;
    r->c.run.prefetch = false; /* each turn comes when it is due: bytes do not depend on time */
    snprintf(r->c.run.recompute, sizeof r->c.run.recompute, "always");
    r->c.run.device_memory = 4096;
    assert_int_equal(rig_begin(r), SPW_ENOFIT);
    r->c.run.device_memory = rig_least_named(r, "spillway.device_memory");
    rig_close(r);
    rig_need(r, rig_begin(r));
}

/*
 * Where nothing in front of the lowest block's experts asks for a gradient the backward pass does not go through them, and their weights do
 * not come for it, but where what reads their sum is computed again: a step moves the bytes that were planned, fewer or not. In turns that
 * micro-batches share they do come.
 */
static void
test_bytes_nobody_asks_for(void **state)
{
    static const struct {
        spw_family family;
        const char *targets[2]; /* behind the experts or beside them, and in front */
        uint32_t micros;
        bool fewer;
    } cases[] = {{SPW_FAMILY_QWEN2_MOE, {"*.shared_expert.down_proj", "v_proj"}, 1, true},
                 {SPW_FAMILY_QWEN2_MOE, {"*.shared_expert.down_proj", "v_proj"}, 2, false},
                 {SPW_FAMILY_GEMMA4, {"*.mlp.down_proj", "*.mlp.down_proj"}, 1, false}};
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        uint64_t moved[2];
        for (int t = 0; t < 2; t++) {
            spw_step_result result;
            rig r;
            little_asked(&r, cases[k].family, cases[k].targets[t], cases[k].micros);
            for (int s = 0; s < 3; s++) {
                rig_need(&r, rig_step(&r, (uint64_t)s, &result));
                rig_need(&r, spw_store_drain(spw_engine_store(r.e), &r.err)); /* updates go before the next step */
            }
            moved[t] = result.h2d;
            print_message("%s, %u micro-batches: %llu bytes to the device\n", cases[k].targets[t], cases[k].micros,
                          (unsigned long long)moved[t]);
            assert_int_equal(moved[t], spw_engine_plan(r.e)->traffic[SPW_PACE_DEFAULT].h2d);
            rig_remove(&r);
        }
        assert_true(cases[k].fewer ? moved[0] < moved[1] : moved[0] == moved[1]);
    }
}

/* Three micro-batches in each of two turns of four layers' experts, checkpoints in a tier. */
static void
open_way(rig *r, spw_family family, spw_tier checkpoints, uint32_t read_kept_from, uint64_t chaos)
{
    rig_config(r, family, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r->c.model.layers = 4;
    r->c.accumulation = 3;
    r->c.run.activations = checkpoints;
    r->c.run.chaos_seed = chaos;
    rig_need(r, spw_model_from_config(&r->model, &r->c, &r->err));
    rig_need(r, spw__engine_build(
                    &r->e,
                    &(spw_engine_options){
                        .config = &r->c, .model = r->model, .resumes = true, .process_bytes = TINY_PROCESS_BYTES},
                    (expert_way){2, 3, read_kept_from}, &r->err));
    rig_need(r, spw_engine_init_params(r->e, 7, &r->err));
}

/* One plan moves so much more than another over the link and of a disk, each way. */
static void
planned_more(const spw_plan *p, const spw_plan *other, uint64_t link, uint64_t disk)
{
    const spw_traffic *less = &p->traffic[SPW_PACE_DEFAULT], *more = &other->traffic[SPW_PACE_DEFAULT];
    assert_int_equal(more->h2d - less->h2d, link);
    assert_int_equal(more->d2h - less->d2h, link);
    assert_int_equal(more->nvme_read - less->nvme_read, disk);
    assert_int_equal(more->nvme_write - less->nvme_write, disk);
}

/*
 * What experts read is kept in the upper layers, in all or in none, wherever checkpoints lie: the same bits, as many checkpoints more as that
 * has layers, the bytes that were planned, and less to compute by what lies before the experts of each.
 */
static void
test_read_kept(void **state)
{
    static const uint32_t from[] = {READ_NOT_KEPT, 4, 3, 0};
    static const spw_family families[] = {SPW_FAMILY_QWEN3_MOE, SPW_FAMILY_DEEPSEEK_V3};
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        for (spw_tier tier = 0; tier < SPW_TIER_COUNT; tier++) {
            double flops = 0;
            uint64_t flow = 0;
            uint32_t all = 0;
            rig none;
            for (size_t k = 0; k < sizeof from / sizeof from[0]; k++) {
                rig own, *r = k == 0 ? &none : &own;
                spw_act_stats before, after;
                const spw_plan *p;
                uint64_t bytes, pages;
                uint32_t count, layers;
                open_way(r, families[f], tier, from[k], k == 0 ? 0 : 50 + k);
                p = spw_engine_plan(r->e);
                count = p->activation_count[0] + p->activation_count[1] + p->activation_count[2];
                layers = k == 0 ? 0 : k < 3 ? (uint32_t)k : families[f] == SPW_FAMILY_QWEN3_MOE ? 4 : 3;
                all = k == 0 ? count : all;
                assert_int_equal(count, all + 3 * layers);
                assert_int_equal(count, p->activation_count[tier]);
                assert_true(k == 0 || p->flops < flops);
                assert_true(k == 0 || (k < 3 ? spw__flow_bytes(r->e) == flow : spw__flow_bytes(r->e) < flow));
                flops = p->flops;
                flow = spw__flow_bytes(r->e);
                rig_train(r, 0, RIG_STEPS - 1);
                spw_act_get_stats(r->e->act, &before);
                rig_train(r, RIG_STEPS - 1, RIG_STEPS);
                spw_act_get_stats(r->e->act, &after);
                bytes = tier == SPW_TIER_DEVICE ? 0 : r->e->rows * r->c.model.width * r->e->compute_bytes;
                pages = tier == SPW_TIER_NVME ? spw_round_up(bytes, 4096) : 0;
                assert_int_equal(after.d2h_bytes - before.d2h_bytes, count * bytes);
                assert_int_equal(after.h2d_bytes - before.h2d_bytes, count * bytes);
                assert_int_equal(after.nvme_write_bytes - before.nvme_write_bytes, count * pages);
                assert_int_equal(after.nvme_read_bytes - before.nvme_read_bytes, count * pages);
                if (k == 0)
                    continue;
                planned_more(&none.e->plan, p, 3 * layers * bytes, 3 * layers * pages);
                assert_memory_equal(none.losses, r->losses, sizeof none.losses);
                assert_memory_equal(none.norms, r->norms, sizeof none.norms);
                rig_same_state(&none, r, "what experts read is kept");
                rig_remove(r);
            }
            rig_remove(&none);
        }
    }
}

/* What is planned of four layers, four micro-batches and two turns, by rates of computing and of the link, with so much host memory and nvme beside it. */
static void
plan_kept(spw_plan *p, const char *recompute, double flops, double link, uint64_t host)
{
    spw_rates rates = {.flops = flops, .optimizer = 1e12, .h2d = link, .d2h = link, .shared_cores = 0};
    rig r;
    large_layers(&r);
    for (int k = 0; k < SPW_PATHS_MAX; k++)
        rates.nvme_read[k] = rates.nvme_write[k] = rates.nvme_mixed[k] = 1e12;
    r.c.model.layers = 4;
    r.c.model.mlp_width = 16; /* so that much is computed before them */
    r.c.accumulation = 4;
    r.c.run.micro_batches_per_pass = 4;
    r.c.run.host_memory = host;
    r.c.run.activations = SPW_TIER_HOST;
    r.c.run.expert_turns = 4;
    snprintf(r.c.run.recompute, sizeof r.c.run.recompute, "%s", recompute);
    rig_need(&r, spw_model_from_config(&r.model, &r.c, &r.err));
    rig_need(&r, spw_engine_create(&r.e,
                                   &(spw_engine_options){.config = &r.c,
                                                         .model = r.model,
                                                         .plan_only = true,
                                                         .rates = &rates,
                                                         .plan_out = p,
                                                         .process_bytes = TINY_PROCESS_BYTES,
                                                         .room_bytes = 1ull << 40},
                                   &r.err));
    rig_remove(&r);
}

static uint32_t
checkpoints(const spw_plan *p)
{
    return p->activation_count[SPW_TIER_DEVICE] + p->activation_count[SPW_TIER_HOST] +
           p->activation_count[SPW_TIER_NVME];
}

/* It is kept where a step is shorter so, in as many layers as there is room for. */
static void
test_read_chosen(void **state)
{
    spw_plan plain, kept, some, p;
    uint64_t room, each;
    (void)state;
    plan_kept(&plain, "always", 1e6, 1e12, SPW_AUTO);
    plan_kept(&kept, "least", 1e6, 1e12, SPW_AUTO);
    assert_int_equal(checkpoints(&plain), 4 * 4);
    assert_int_equal(checkpoints(&kept), 2 * 4 * 4);
    assert_null(decision_of(&plain, "spillway.recompute"));
    plan_kept(&p, "auto", 1e6, 1e12, SPW_AUTO);
    print_message("operations: %g, and %g where what experts read is kept\n", plain.flops, kept.flops);
    assert_true(kept.flops < 0.92 * plain.flops);
    assert_int_equal(checkpoints(&p), checkpoints(&kept));
    assert_non_null(decision_of(&p, "spillway.recompute"));
    plan_kept(&p, "auto", 1e15, 1e6, SPW_AUTO); /* the link has more to do already */
    assert_int_equal(checkpoints(&p), checkpoints(&plain));
    assert_null(decision_of(&p, "spillway.recompute"));
    each = (kept.activations_host - plain.activations_host) / (checkpoints(&kept) - checkpoints(&plain));
    room = plain.host_bytes + (kept.host_bytes - plain.host_bytes) / 2 + each;
    plan_kept(&some, "auto", 1e6, 1e12, room);
    print_message("checkpoints: %u, with all that experts read %u, and %u with %llu bytes of host memory\n",
                  checkpoints(&plain), checkpoints(&kept), checkpoints(&some), (unsigned long long)room);
    assert_true(checkpoints(&some) > checkpoints(&plain) && checkpoints(&some) < checkpoints(&kept));
}

/* ---------------------------------------------------------------- what cannot be */

static void
refuse(const rig *from, const char *says)
{
    rig r = *from;
    assert_int_equal(rig_begin(&r), SPW_ECONFIG);
    if (strstr(r.err.message, says) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", r.err.message, says);
    spw_model_destroy(r.model);
}

static void
test_refusals(void **state)
{
    rig r;
    (void)state;
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r.c.run.expert_turns = 2;
    refuse(&r, "spillway.expert_turns is 2: the model has no experts");
    tiny_dir_remove(r.dir);
    rig_config(&r, SPW_FAMILY_GEMMA4, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r.c.run.expert_turns = 2;
    r.c.accumulation = 2;
    r.c.run.grad_dtype = SPW_BF16;
    refuse(&r, "spillway.grad_dtype must be fp32");
    r.c.run.grad_dtype = SPW_F32;
    r.c.model.tied = true;
    refuse(&r, "spillway.micro_batches_per_pass must be 1");
    tiny_dir_remove(r.dir);
    rig_config(&r, SPW_FAMILY_QWEN3_MOE, SPW_STATE_SPLIT, SPW_TIER_HOST);
    r.c.run.expert_turns = 2;
    r.c.accumulation = 2;
    r.c.run.micro_batches_per_pass = 1;
    r.c.run.grad_dtype = SPW_BF16;
    refuse(&r, "spillway.grad_dtype must be fp32");
    r.c.run.micro_batches_per_pass = 0;
    r.chain_extra = 1;
    refuse(&r, "blocks are repeated");
    tiny_dir_remove(r.dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),    cmocka_unit_test(test_shared),
        cmocka_unit_test(test_resume),       cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_ranks_agree),  cmocka_unit_test(test_coded_gradients),
        cmocka_unit_test(test_fewest_turns), cmocka_unit_test(test_fewer_tables),
        cmocka_unit_test(test_bytes),        cmocka_unit_test(test_bytes_nobody_asks_for),
        cmocka_unit_test(test_read_kept),    cmocka_unit_test(test_read_chosen),
        cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests_name("expert turns", tests, NULL, NULL);
}
