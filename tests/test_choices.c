/*
 * What an engine chooses where no bit depends on it (engine_choose.c): how much of offloaded state the device has all the same. The choice
 * for a model of 7 B parameters is held to the best of many that are asked for, in plans for a GPU that is not here, and small trainings, on
 * the emulated cuda device, whose clock is set so that its peak is what the test wants, to the bits of those without.
 */
#include "lib_plan.h"
#include "lib_tiny.h"
#include "engine_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define GIB ((uint64_t)1 << 30)

enum { STEPS = 2 };

/* In bf16. The emulated device has one processor. */
static void
set_peak(double flops)
{
    char khz[32];
    snprintf(khz, sizeof khz, "%.0f", flops / 2048 / 1e3);
    setenv("SPW_EMULATE_CAPABILITY", "80", 1);
    setenv("SPW_EMULATE_KHZ", khz, 1);
}

static spw_rates
server_rates(void)
{
    spw_rates r = {.flops = 5e14, .optimizer = 15 * 3.5e8, .h2d = 4e10, .d2h = 4e10};
    for (int i = 0; i < SPW_PATHS_MAX; i++)
        r.nvme_read[i] = r.nvme_write[i] = r.nvme_mixed[i] = 4e9;
    return r;
}

typedef struct large {
    spw_config c;
    spw_model *model;
    spw_gpu_spec gpu; /* an H200, which did about half of this peak */
} large;

/* A Llama of 6.75 B parameters, 32768 tokens a step, weights and records in host memory. */
static void
large_open(large *x)
{
    static const char text[] =
        "{\"model\": {\"model_type\": \"llama\", \"vocab_size\": 50257, \"hidden_size\": 4096, \"intermediate_size\": "
        "11264,"
        " \"num_hidden_layers\": 36, \"num_attention_heads\": 32, \"num_key_value_heads\": 4,"
        " \"max_position_embeddings\": 2048, \"tie_word_embeddings\": false},"
        " \"data\": {\"path\": [\"none\"], \"seq_length\": 2048}, \"train_micro_batch_size_per_gpu\": 16,"
        " \"gradient_accumulation_steps\": 1, \"gradient_clipping\": 1.0, \"bf16\": {\"enabled\": true},"
        " \"optimizer\": {\"params\": {\"lr\": 1e-4}}, \"zero_optimization\": {\"stage\": 3,"
        " \"offload_param\": {\"device\": \"cpu\"}, \"offload_optimizer\": {\"device\": \"cpu\"}},"
        " \"spillway\": {\"device\": \"cuda\", \"optimizer_threads\": 15, \"checkpoint_dir\": \"\"}}";
    spw_error err = {0};
    DONE(spw_config_parse(&x->c, text, "7B", NULL, 0, &err));
    DONE(spw_model_from_config(&x->model, &x->c, &err));
    x->gpu = (spw_gpu_spec){
        .title = "an H200", .memory_bytes = (uint64_t)143771 << 20, .capability = 90, .half_flops = 1e15};
}

static spw_status
try_plan(const large *x, uint64_t room_bytes, spw_plan *p, spw_error *err)
{
    spw_engine *e = NULL;
    const bool cpu = strcmp(x->c.run.device, "cpu") == 0;
    spw_status st = spw_engine_create(&e,
                                      &(spw_engine_options){.config = &x->c,
                                                            .model = x->model,
                                                            .plan_only = true,
                                                            .process_bytes = PLAN_PROCESS_BYTES,
                                                            .room_bytes = room_bytes,
                                                            .gpu = cpu ? NULL : &x->gpu,
                                                            .plan_out = p},
                                      err);
    spw_engine_destroy(e);
    return st;
}

static void
fill(spw_config *c, const char *how)
{
    snprintf(c->run.fill_device, sizeof c->run.fill_device, "%s", how);
}

static spw_prediction
predicted(const spw_plan *p)
{
    const spw_rates r = server_rates();
    spw_prediction x;
    spw_plan_predict(p, &r, 0, &x);
    assert_true(x.timed);
    return x;
}

/* Steps that clip and steps that do not. */
static double
mean_seconds(const spw_plan *p)
{
    const spw_prediction x = predicted(p);
    return (x.step_s + x.clipped_s) / 2;
}

static double
share(const spw_plan *p)
{
    return (double)p->trained_device / (double)p->trained;
}

static void
plan(const large *x, uint64_t room_bytes, spw_plan *p)
{
    spw_error err = {0};
    DONE(try_plan(x, room_bytes, p, &err));
}

static void
test_as_good_as_the_best(void **state)
{
    static const uint64_t device[] = {76 * GIB, 137 * GIB}; /* an H100's and an H200's */
    static spw_plan never, chosen, asked;
    large x;
    (void)state;
    large_open(&x);
    for (int k = 0; k < 2; k++) {
        double best = 1e9;
        x.c.run.device_memory = device[k];
        fill(&x.c, "never");
        plan(&x, 118 * GIB, &never);
        assert_int_equal(never.trained_device, 0);
        for (int eighth = 0; eighth <= 8; eighth += 1 + SANITIZED) {
            spw_error refused = {0};
            x.c.zero.optimizer_ratio = 1 - eighth / 8.0;
            if (try_plan(&x, 118 * GIB, &asked, &refused) == SPW_OK)
                best = mean_seconds(&asked) < best ? mean_seconds(&asked) : best;
        }
        x.c.zero.optimizer_ratio = 1;
        fill(&x.c, "auto");
        plan(&x, 118 * GIB, &chosen);
        print_message(
            "%llu GiB: %.0f %% on the device, %.3f s, none of it %.3f s, the best that was asked for %.3f s\n",
            (unsigned long long)(device[k] / GIB), 100 * share(&chosen), mean_seconds(&chosen), mean_seconds(&never),
            best);
        assert_true(share(&chosen) > 0.02 && share(&chosen) < 0.6);
        assert_true(mean_seconds(&chosen) < 1.015 * best && mean_seconds(&chosen) < 0.97 * mean_seconds(&never));
        assert_true(predicted(&chosen).traffic.h2d < predicted(&never).traffic.h2d &&
                    predicted(&chosen).traffic.d2h < predicted(&never).traffic.d2h);
        assert_int_equal(chosen.activation_count[SPW_TIER_DEVICE], never.activation_count[SPW_TIER_DEVICE]);
        assert_true(chosen.device_bytes <= device[k] && chosen.host_bytes < never.host_bytes);
    }
    assert_true(chosen.tapes_device < never.tapes_device); /* which gave way */
    x.gpu.half_flops = 2e14; /* the host's updates hide behind what such a device computes */
    plan(&x, 118 * GIB, &chosen);
    assert_true(share(&chosen) < 0.1 && chosen.tapes_device == never.tapes_device);
    spw_model_destroy(x.model);
}

/* A disk is what a step waits for: all that the device can have. And a host that is too small for all of it. */
static void
test_where_it_saves_more(void **state)
{
    static spw_plan never, chosen;
    spw_error err = {0};
    large x;
    (void)state;
    large_open(&x);
    x.c.run.device_memory = 76 * GIB;
    fill(&x.c, "never");
    assert_int_equal(try_plan(&x, 80 * GIB, &never, &err), SPW_ENOFIT);
    fill(&x.c, "auto");
    plan(&x, 80 * GIB, &chosen);
    print_message("in 80 GiB of host memory: %.0f %% on the device\n", 100 * share(&chosen));
    assert_true(share(&chosen) > 0.2 && chosen.host_bytes <= 80 * GIB);

    x.c.zero.offload_optimizer = SPW_TIER_NVME;
    x.c.zero.optimizer_path.count = 1;
    snprintf(x.c.zero.optimizer_path.item[0], sizeof x.c.zero.optimizer_path.item[0], "%s", plan_dir);
    fill(&x.c, "never");
    plan(&x, 64 * GIB, &never);
    fill(&x.c, "auto");
    plan(&x, 64 * GIB, &chosen);
    print_message("records on nvme: %.0f %% on the device, %.1f s, none of it %.1f s\n", 100 * share(&chosen),
                  mean_seconds(&chosen), mean_seconds(&never));
    assert_true(share(&chosen) > 0.5 && mean_seconds(&chosen) < 0.5 * mean_seconds(&never));
    assert_true(predicted(&chosen).traffic.nvme_write < predicted(&never).traffic.nvme_write / 2);
    spw_model_destroy(x.model);
}

/* Who says how much, or has updates made otherwise, has it so. */
static void
test_left_alone(void **state)
{
    static spw_plan p;
    large x;
    (void)state;
    large_open(&x);
    x.c.run.device_memory = 137 * GIB;
    fill(&x.c, "auto");
    x.c.zero.optimizer_ratio = 0.95;
    plan(&x, 118 * GIB, &p);
    assert_true(share(&p) > 0.04 && share(&p) < 0.12);
    x.c.zero.optimizer_ratio = 1;
    x.c.run.delayed_update = 1;
    plan(&x, 118 * GIB, &p);
    assert_int_equal(p.trained_device, 0);
    x.c.run.delayed_update = 0;
    snprintf(x.c.run.device, sizeof x.c.run.device, "cpu");
    x.c.run.device_memory = SPW_AUTO;
    plan(&x, UINT64_MAX, &p);
    assert_int_equal(p.trained_device, 0);
    spw_model_destroy(x.model);
}

static void
small_plan(const spw_config *c, spw_plan *p)
{
    spw_model_config m;
    spw_model *model = NULL;
    spw_error err = {0};
    tiny_model_config(&m, SPW_FAMILY_GPT2);
    DONE(spw_model_build(&model, &m, &err));
    DONE(plan_of(c, model, p, &err));
    spw_model_destroy(model);
}

/* Whatever is chosen, and with whatever delays. */
static void
test_same_bits(void **state)
{
    static const spw_tier tiers[] = {SPW_TIER_HOST, SPW_TIER_NVME};
    static spw_plan none, all, never, chosen;
    (void)state;
    set_peak(1e15); /* computing again takes no time, so state comes first */
    for (int k = 0; k < 2; k++) {
        double want[STEPS], got[STEPS];
        uint64_t digest;
        int traded = 0;
        spw_config c;
        plan_nvme_config(&c, SPW_STATE_SPLIT);
        snprintf(c.run.device, sizeof c.run.device, "cuda");
        c.run.chunk_elems = 4096;
        c.zero.offload_param = c.zero.offload_optimizer = tiers[k];
        fill(&c, "never");
        digest = tiny_train(&c, SPW_FAMILY_GPT2, STEPS, want);
        small_plan(&c, &all);
        snprintf(c.run.recompute, sizeof c.run.recompute, "always");
        small_plan(&c, &none);
        snprintf(c.run.recompute, sizeof c.run.recompute, "auto");
        fill(&c, "auto");
        small_plan(&c, &chosen); /* in all of the device's memory: nothing is gathered any more */
        assert_true(chosen.trained_device == chosen.trained && chosen.cache_device == 0);
        for (uint64_t eighth = SANITIZED ? 8 : 0; eighth <= 8; eighth += 2) {
            c.run.device_memory = none.device_bytes + (all.device_bytes - none.device_bytes) * eighth / 8;
            c.run.chaos_seed = 1 + eighth;
            fill(&c, "never");
            small_plan(&c, &never);
            fill(&c, "auto");
            small_plan(&c, &chosen);
            traded += chosen.trained_device > 0 && chosen.tapes_device < never.tapes_device;
            if (tiny_train(&c, SPW_FAMILY_GPT2, STEPS, got) != digest || memcmp(want, got, sizeof want) != 0)
                fail_msg("records on %s, %.0f %% of the state on the device: other bits", spw_tier_name(tiers[k]),
                         100 * share(&chosen));
        }
        assert_true(traded >= (SANITIZED ? 1 : 2));
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_as_good_as_the_best),
        cmocka_unit_test(test_where_it_saves_more),
        cmocka_unit_test(test_left_alone),
        cmocka_unit_test(test_same_bits),
    };
    if (!tiny_emulated_device()) {
        printf("1..1\nok 1 - choices # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    setenv("SPW_EMULATE_STREAMS", "late", 1);
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
