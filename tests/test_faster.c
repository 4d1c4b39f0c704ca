/*
 * Settings with which steps are predicted to be shorter (runtime/faster.c), with made-up rates: what is found is held to plans that are made
 * from the configuration's text with the same settings, and to trainings with the same bits.
 */
#include "lib_plan.h"
#include "lib_tiny.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static const char text[] =
    "{\"model\": {\"model_type\": \"gpt2\", \"n_embd\": 256, \"n_layer\": 24, \"n_head\": 4,"
    " \"n_positions\": 64, \"vocab_size\": 512}, \"data\": {\"path\": [\"none\"], \"seq_length\": 64},"
    " \"train_micro_batch_size_per_gpu\": 1, \"gradient_clipping\": 1.0, \"bf16\": {\"enabled\": true},"
    " \"optimizer\": {\"params\": {\"lr\": 1e-3}}, \"zero_optimization\": {\"stage\": 3},"
    " \"spillway\": {\"device\": \"cpu\", \"chunk_elems\": 65536, \"checkpoint_dir\": \"\"}}";

typedef struct found {
    spw_plan plan;
    spw_prediction before;
    spw_faster faster;
} found;

static uint32_t local_ranks; /* of a host; 0: all */

static void
load(spw_config *c, const char *const *sets, uint32_t count)
{
    spw_error err = {0};
    DONE(spw_config_parse(c, text, "small", sets, count, &err));
}

static void
predict_as_set(const char *const *sets, uint32_t count, uint64_t room_bytes, const spw_rates *rates, spw_plan *plan,
               spw_prediction *x)
{
    static spw_config c;
    spw_model *model = NULL;
    spw_error err = {0};
    load(&c, sets, count);
    DONE(spw_model_from_config(&model, &c, &err));
    DONE(plan_on_hosts(&c, model, local_ranks, room_bytes, plan, &err));
    spw_plan_predict(plan, rates, 0, x);
    spw_model_destroy(model);
}

static void
find(const char *const *sets, uint32_t count, uint64_t room_bytes, const spw_rates *rates, found *out)
{
    static spw_config c;
    spw_model *model = NULL;
    spw_error err = {0};
    const spw_engine_options options = {
        .config = &c, .process_bytes = PLAN_PROCESS_BYTES, .room_bytes = room_bytes, .plan_only = true};
    spw_engine_options own = options;
    load(&c, sets, count);
    DONE(spw_model_from_config(&model, &c, &err));
    DONE(plan_on_hosts(&c, model, local_ranks, room_bytes, &out->plan, &err));
    spw_plan_predict(&out->plan, rates, 0, &out->before);
    own.model = model;
    own.local_ranks = local_ranks;
    DONE(spw_plan_faster(&own, &out->plan, rates, &out->faster, &err));
    spw_model_destroy(model);
}

/* Each step that was said is that of a plan from text, and shorter than the one before it. */
static void
check(const char *const *sets, uint32_t count, uint64_t room_bytes, const spw_rates *rates, const found *f)
{
    static spw_plan plan;
    const char *all[32];
    double before = f->before.step_s + f->before.clipped_s;
    memcpy(all, sets, count * sizeof *sets);
    for (uint32_t i = 0; i < f->faster.count; i++) {
        const spw_faster_change *c = &f->faster.changes[i];
        spw_prediction x;
        assert_true(c->set_count > 0);
        for (uint32_t k = 0; k < c->set_count; k++)
            all[count++] = c->set[k];
        predict_as_set(all, count, room_bytes, rates, &plan, &x);
        print_message("%s%s%s: %.4g s\n", c->set[0], c->set_count > 1 ? ", " : "", c->set_count > 1 ? c->set[1] : "",
                      x.step_s);
        assert_true(x.step_s == c->step.step_s && x.clipped_s == c->step.clipped_s);
        assert_true(x.step_s + x.clipped_s < before);
        before = x.step_s + x.clipped_s;
    }
}

static bool
says(const found *f, const char *what)
{
    for (uint32_t i = 0; i < f->faster.count; i++)
        for (uint32_t k = 0; k < f->faster.changes[i].set_count; k++)
            if (strncmp(f->faster.changes[i].set[k], what, strlen(what)) == 0)
                return true;
    return false;
}

/* What a plan takes beside the process. */
static uint64_t
room_of(const spw_plan *p)
{
    return p->device_bytes + p->host_bytes - p->process_host;
}

/* Without what is gathered because memory is left. */
static const char *const host[] = {"zero_optimization.offload_param={\"device\":\"cpu\"}",
                                   "zero_optimization.offload_optimizer={\"device\":\"cpu\"}",
                                   "zero_optimization.max_live_parameters=1"};
static char nvme_param[400], nvme_optimizer[400];

static void
set_paths(const char *param, const char *optimizer)
{
    snprintf(nvme_param, sizeof nvme_param,
             "zero_optimization.offload_param={\"device\":\"nvme\",\"nvme_path\":\"%s%s\"}", plan_dir, param);
    snprintf(nvme_optimizer, sizeof nvme_optimizer,
             "zero_optimization.offload_optimizer={\"device\":\"nvme\",\"nvme_path\":\"%s%s\"}", plan_dir, optimizer);
}

static void
test_up_from_disk(void **state)
{
    static found f;
    const char *sets[] = {nvme_param, nvme_optimizer, "spillway.recompute=always", "spillway.update_ahead=never"};
    const spw_rates rates = plan_some_rates();
    uint64_t room;
    (void)state;
    set_paths("", "");
    find(sets, 4, (uint64_t)1 << 34, &rates, &f);
    check(sets, 4, (uint64_t)1 << 34, &rates, &f);
    assert_true(f.faster.count > 0 && f.faster.changes[f.faster.count - 1].step.traffic.nvme_read == 0);
    assert_true(says(&f, "zero_optimization.offload_optimizer.device=cpu"));
    assert_false(says(&f, "spillway.host_memory")); /* what is not needed is not said */
    assert_true(f.faster.changes[f.faster.count - 1].step.step_s < 0.8 * f.before.step_s);

    predict_as_set(host, 3, UINT64_MAX, &rates, &f.plan, &f.before);
    room = room_of(&f.plan) - (130 << 20); /* all records do not fit */
    find(sets, 4, room, &rates, &f);
    check(sets, 4, room, &rates, &f);
    assert_true(says(&f, "spillway.host_memory="));
    assert_false(says(&f, "zero_optimization.offload_optimizer.device=cpu"));
}

/* Only a gate: nothing moves, and updates begin before the norm is known. */
static void
test_no_waiting(void **state)
{
    static found f;
    const char *sets[] = {nvme_param, nvme_optimizer, "spillway.update_ahead=never", "gradient_clipping=1e9"};
    spw_rates rates = plan_some_rates();
    uint64_t room;
    (void)state;
    set_paths("", "");
    rates.flops = 6e10;
    rates.nvme_read[0] = rates.nvme_write[0] = 2e9;
    rates.nvme_mixed[0] = 4e9;
    predict_as_set(host, 3, UINT64_MAX, &rates, &f.plan, &f.before);
    room = room_of(&f.plan) - (130 << 20);
    find(sets, 4, room, &rates, &f);
    check(sets, 4, room, &rates, &f);
    assert_true(f.before.gated_s > f.before.bound_s);
    assert_true(says(&f, "spillway.update_ahead=auto"));
}

/* What is best already, and what leaves another bit: none of it is changed. */
static void
test_nothing_better(void **state)
{
    static found f;
    const char *sets[] = {"zero_optimization.offload_param={\"device\":\"cpu\"}",
                          "zero_optimization.offload_optimizer={\"device\":\"cpu\"}", "spillway.tile_vocab=64",
                          "gradient_accumulation_steps=4", "spillway.micro_batches_per_pass=1"};
    const spw_rates rates = plan_some_rates();
    (void)state;
    find(sets, 5, (uint64_t)1 << 34, &rates, &f);
    assert_int_equal(f.faster.count, 0);
}

/* Rates go with their paths: when weights leave the first one, the second is the first. */
static void
test_rates_by_path(void **state)
{
    static found f;
    const char *sets[] = {nvme_param, nvme_optimizer};
    spw_rates rates = plan_some_rates();
    (void)state;
    set_paths("", "/records");
    rates.nvme_read[0] = rates.nvme_write[0] = rates.nvme_mixed[0] = 1e7; /* weights are what a step waits for */
    rates.nvme_read[1] = rates.nvme_write[1] = rates.nvme_mixed[1] = 1e12;
    find(sets, 2, (uint64_t)1 << 34, &rates, &f);
    assert_int_equal(f.plan.path_count, 2);
    assert_int_equal(f.faster.count, 1);
    assert_string_equal(f.faster.changes[0].set[0], "zero_optimization.offload_param.device=cpu");
    assert_true(f.faster.changes[0].step.traffic.path_read[0] > 0 &&
                f.faster.changes[0].step.bound != SPW_RESOURCE_NVME);
}

/* Between hosts weights come from the own one the second time, and bounds on what is gathered, as files for DeepSpeed have them, are let go. */
static void
test_between_hosts(void **state)
{
    static found f;
    const char *sets[] = {host[0],
                          host[1],
                          "spillway.ranks=8",
                          "zero_optimization.stage3_max_live_parameters=2000000",
                          "zero_optimization.stage3_prefetch_bucket_size=1000000",
                          "spillway.device_memory=70MiB"};
    spw_rates rates = plan_some_rates();
    (void)state;
    local_ranks = 4;
    find(sets, 6, (uint64_t)1 << 36, &rates, &f); /* how fast ranks are is not known: nothing of it is said */
    check(sets, 6, (uint64_t)1 << 36, &rates, &f);
    assert_false(says(&f, "zero_optimization.zero_hpz_partition_size"));
    for (int use = 0; use < SPW_USE_COUNT; use++) {
        rates.received[SPW_WAY_NEAR][use] = 1e10;
        rates.received[SPW_WAY_FAR][use] = 1e8;
    }
    find(sets, 6, (uint64_t)1 << 36, &rates, &f);
    check(sets, 6, (uint64_t)1 << 36, &rates, &f);
    assert_int_equal(f.before.bound, SPW_RESOURCE_NETWORK);
    assert_true(says(&f, "zero_optimization.zero_hpz_partition_size=4"));
    sets[5] = "spillway.device_memory=200MiB"; /* room for all */
    find(sets, 6, (uint64_t)1 << 36, &rates, &f);
    check(sets, 6, (uint64_t)1 << 36, &rates, &f);
    assert_int_equal(f.faster.count, 1);
    assert_true(says(&f, "zero_optimization.max_live_parameters=1e18"));
    local_ranks = 0;
    sets[2] = "spillway.ranks=4"; /* on one host there is no other to gather from */
    sets[5] = "spillway.device_memory=70MiB";
    find(sets, 6, (uint64_t)1 << 36, &rates, &f);
    assert_false(says(&f, "zero_optimization.zero_hpz_partition_size"));
}

/* Every setting that can be said, at once: the bits of the training without. */
static void
test_same_bits(void **state)
{
    static spw_config c, d;
    double losses[2][3];
    uint64_t digests[2];
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    snprintf(c.run.recompute, sizeof c.run.recompute, "always");
    snprintf(c.run.update_ahead, sizeof c.run.update_ahead, "never");
    c.run.activations = SPW_TIER_HOST;
    d = c;
    d.zero.offload_optimizer = SPW_TIER_HOST;
    d.run.host_memory = (uint64_t)1 << 30;
    snprintf(d.run.recompute, sizeof d.run.recompute, "auto");
    snprintf(d.run.update_ahead, sizeof d.run.update_ahead, "auto");
    d.run.activations = SPW_TIER_COUNT;
    digests[0] = tiny_train(&c, SPW_FAMILY_LLAMA, 3, losses[0]);
    digests[1] = tiny_train(&d, SPW_FAMILY_LLAMA, 3, losses[1]);
    assert_memory_equal(losses[0], losses[1], sizeof losses[0]);
    assert_true(digests[0] == digests[1]);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_up_from_disk),   cmocka_unit_test(test_no_waiting),
        cmocka_unit_test(test_nothing_better), cmocka_unit_test(test_rates_by_path),
        cmocka_unit_test(test_between_hosts),  cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
