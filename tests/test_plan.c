/* The plan: formulas, the order in which host memory is filled, what fits, and predicted bytes beside measured ones. */
#include "lib_tiny.h"
#include "runtime_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { PROCESS = 8 << 20 };
static char swap_dir[256];

/* ---------------------------------------------------------------- formulas */

/* Rajbhandari et al. 2020, table 1: 7.5 B parameters on 64 devices. */
static void
test_zero_table(void **state)
{
    const double want[4] = {120, 31.4, 16.6, 1.88};
    (void)state;
    for (uint32_t stage = 0; stage < 4; stage++)
        assert_true(fabs(spw_zero_bytes(7.5e9, stage, 64, 1) * 1e-9 - want[stage]) <= 0.051);
    assert_true(fabs(spw_zero_bytes(7.5e9, 3, 64, 1) * 1e-9 - 1.875) < 1e-9);
    for (uint32_t stage = 0; stage < 4; stage++) {
        assert_true(fabs(spw_zero_bytes(8e9, stage, 1, 1) - 128e9) < 1); /* alone, all stages are the same */
        assert_true(fabs(spw_zero_bytes(8e9, stage, 16, 4) - spw_zero_bytes(2e9, stage, 16, 1)) < 1);
    }
}

static spw_rates
some_rates(void)
{
    return (spw_rates){.nvme_read = {2e9, 4e9},
                       .nvme_write = {1e9, 2e9},
                       .nvme_mixed = {2e9, 3e9},
                       .device_id = {1, 2},
                       .h2d = 10e9,
                       .d2h = 8e9,
                       .optimizer = 1e9,
                       .flops = 1e12};
}

/*
 * With clipping a step has its backward pass and its updates one behind the other: 4 s of computing, a quarter of which is the next forward
 * pass. Updates that take less hide behind that, and those ahead of the norm in the backward pass.
 */
static void
test_prediction_gated(void **state)
{
    static spw_plan p;
    spw_rates r = some_rates();
    spw_prediction x;
    (void)state;
    memset(&p, 0, sizeof p);
    p.params = p.elems = p.trained = 1000000000;
    p.tokens = 1000;
    p.flops = 4e12;
    p.model_flops = 3e12;
    p.device_apart = true;
    p.record_host = 10000000000u;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(x.gated_s <= 0 && fabs(x.step_s - 4) < 1e-9);
    p.gated = true;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.gated_s - 4) < 1e-9 && fabs(x.step_s - 4) < 1e-9); /* 1 s of updates beside 1 s of computing */
    r.optimizer = 0.4e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(x.bound == SPW_RESOURCE_COMPUTE && fabs(x.bound_s - 4) < 1e-9 && fabs(x.step_s - (3 + 2.5)) < 1e-9);
    assert_true(fabs(x.tokens_per_s - 1000 / 5.5) < 1e-9);
    p.ahead = true;
    p.spared_host = 4000000000u; /* two fifths of them have a second place */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3 + 2.5 * 0.6)) < 1e-9);
    p.spared_host = p.record_host;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - 4) < 1e-9);
    r.optimizer = 0.2e9; /* the backward pass has time for three fifths */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3 + 5 * 0.4)) < 1e-9 && fabs(x.bound_s - 5) < 1e-9);
    p.ahead = false;
    p.record_nvme = p.record_host; /* now 10 of 14 GB that are read, and all that is written */
    p.record_host = p.spared_host = 0;
    p.path_count = 1;
    r.optimizer = 10e9;
    for (int k = 0; k < SPW_PACE_COUNT; k++)
        p.traffic[k] = (spw_traffic){.nvme_read = 14000000000u,
                                     .nvme_write = 10000000000u,
                                     .path_read = {14000000000u},
                                     .path_write = {10000000000u}};
    r.nvme_read[0] = r.nvme_write[0] = r.nvme_mixed[0] = 8e9;
    p.grad_host = 5000000000u; /* half of that waits for the next backward pass */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.bound_s - 4) < 1e-9 && fabs(x.step_s - (3 + (12 + 5) / 8.0)) < 1e-9);
    p.grad_host = 10000000000u;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3 + 12 / 8.0)) < 1e-9);
}

/* Bytes over rates; the longest is the bound; what is unknown is not guessed. */
static void
test_prediction(void **state)
{
    static spw_plan p;
    spw_rates r = some_rates();
    spw_prediction x;
    (void)state;
    memset(&p, 0, sizeof p);
    p.path_count = 2;
    p.params = p.elems = p.trained = 1000000000;
    p.tokens = 1000;
    p.flops = 3e12;
    for (int k = 0; k < SPW_PACE_COUNT; k++) {
        p.traffic[k] = (spw_traffic){.nvme_read = 14000000000u,
                                     .nvme_write = 12000000000u,
                                     .h2d = 4000000000u,
                                     .d2h = 4000000000u,
                                     .path_read = {10000000000u, 4000000000u},
                                     .path_write = {8000000000u, 4000000000u}};
    }
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(x.timed);
    assert_true(fabs(x.seconds[SPW_RESOURCE_COMPUTE] - 3) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_OPTIMIZER] - 1) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME_READ] - 5) < 1e-9); /* the slower of two disks */
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME_WRITE] - 8) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME] - 9) < 1e-9);
    assert_int_equal(x.bound, SPW_RESOURCE_NVME);
    assert_string_equal(spw_resource_name(x.bound), "nvme");
    assert_true(fabs(x.step_s - 9) < 1e-9 && fabs(x.tokens_per_s - 1000 / 9.0) < 1e-9);
    assert_true(fabs(x.written_per_day - 12e9 / 9 * 86400) < 1 && isnan(x.tbw_years));
    spw_plan_predict(&p, &r, 600000000000000u, &x);
    assert_true(fabs(x.tbw_years - 600e12 / (12e9 / 9 * 86400) / 365.25) < 1e-9);
    r.device_id[1] = 1; /* both paths on one disk */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME_READ] - 6) < 1e-9);
    p.path_ranks[0] = p.path_ranks[1] = 2; /* which two ranks share */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME_READ] - 12) < 1e-9);
    assert_true(fabs(x.written_per_day * x.step_s - 24e9 * 86400) < 1e3); /* and wear */
    r.shared_cores = 2;
    r.flops = 1e11;
    spw_plan_predict(&p, &r, 0, &x);
    assert_int_equal(x.bound, SPW_RESOURCE_CPU);
    assert_true(fabs(x.step_s - (30 + 1 + (0.4 + 0.5) / 2)) < 1e-9);
    r.compute_threads = r.optimizer_threads = 1; /* of two cores: then it is compute's own time that binds */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_CPU] - (15 + 0.5 + (0.4 + 0.5) / 2)) < 1e-9 && fabs(x.step_s - 30) < 1e-9);
    r.compute_threads = r.optimizer_threads = 0;
    p.cpu_ranks = 3; /* which as many ranks share */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - 3 * (30 + 1 + (0.4 + 0.5) / 2)) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_COMPUTE] - 90) < 1e-9 && fabs(x.seconds[SPW_RESOURCE_H2D] - 1.2) < 1e-9);
    p.device_apart = true; /* each has a device and a link of its own, the optimizer not */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_COMPUTE] - 30) < 1e-9 && fabs(x.seconds[SPW_RESOURCE_H2D] - 0.4) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_OPTIMIZER] - 3) < 1e-9);
    r.nvme_read[1] = 0;
    spw_plan_predict(&p, &r, 0, &x);
    assert_false(x.timed);
    assert_true(isnan(x.step_s * 0 + x.tokens_per_s));
    spw_plan_predict(&p, NULL, 0, &x);
    assert_false(x.timed);
    assert_int_equal(x.traffic.nvme_read, 14000000000u);
}

/* ---------------------------------------------------------------- plans of a small model */

/* A GPT of 10 units; state on nvme. */
static void
nvme_config(spw_config *c, spw_state_format format)
{
    tiny_config(c, format);
    c->data.seq_length = 40;
    c->zero.param_path.count = 1;
    snprintf(c->zero.param_path.item[0], sizeof c->zero.param_path.item[0], "%s", swap_dir);
    c->zero.optimizer_path = c->zero.param_path;
    c->zero.offload_param = c->zero.offload_optimizer = SPW_TIER_NVME;
    c->aio.block_size = 1 << 20;
    c->aio.queue_depth = 16;
    c->aio.thread_count = 4;
}

static spw_model *
make_model(void)
{
    spw_model_config m;
    spw_model *model = NULL;
    spw_error err = {0};
    tiny_model_config(&m, SPW_FAMILY_GPT2);
    m.layers = 8;
    m.width = 64;
    m.head_dim = 16;
    m.mlp_width = 256;
    assert_int_equal(spw_model_build(&model, &m, &err), SPW_OK);
    return model;
}

static spw_status
plan_of(const spw_config *c, const spw_model *model, spw_plan *plan, spw_error *err)
{
    spw_engine *e = NULL;
    spw_status st = spw_engine_create(&e,
                                      &(spw_engine_options){.config = c,
                                                            .model = model,
                                                            .plan_only = true,
                                                            .process_bytes = PROCESS,
                                                            .room_bytes = UINT64_MAX,
                                                            .plan_out = plan},
                                      err);
    spw_engine_destroy(e);
    return st;
}

/*
 * More host memory never leaves more on nvme, and never predicts a slower step, whatever the bound; but for what the
 * store itself may lose then: it evicts as it goes, and now and then another chunk in host memory makes it evict one that
 * it reads again.
 */
static void
test_monotonic(void **state)
{
    static spw_config c;
    static spw_plan p, all;
    spw_model *model = make_model();
    const double flops[3] = {1e9, 1e11, 1e14}, AGAIN = 1.015;
    (void)state;
    for (int format = SPW_STATE_FP32; format <= SPW_STATE_SPLIT; format++) {
        double last[3] = {INFINITY, INFINITY, INFINITY};
        uint64_t last_bytes = UINT64_MAX;
        uint32_t fitting = 0;
        nvme_config(&c, (spw_state_format)format);
        assert_int_equal(plan_of(&c, model, &all, NULL), SPW_OK);
        for (uint64_t budget = PROCESS; budget < 2 * all.host_bytes + all.weight_nvme + all.record_nvme;
             budget += SANITIZED ? 79979 : 19937) {
            c.run.host_memory = budget;
            if (plan_of(&c, model, &p, NULL) != SPW_OK) {
                assert_int_equal(fitting, 0);
                continue;
            }
            fitting++;
            assert_true(p.host_bytes <= budget);
            assert_true(p.weight_nvme + p.record_nvme <= last_bytes);
            last_bytes = p.weight_nvme + p.record_nvme;
            for (int k = 0; k < 3; k++) {
                spw_rates r = some_rates();
                spw_prediction x;
                r.flops = flops[k];
                spw_plan_predict(&p, &r, 0, &x);
                assert_true(x.timed);
                if (x.step_s > last[k] * AGAIN)
                    print_error("format %d, budget %llu: %.9g s after %.9g s\n", format, (unsigned long long)budget,
                                x.step_s, last[k]);
                assert_true(x.step_s <= last[k] * AGAIN);
                last[k] = fmin(last[k], x.step_s);
            }
        }
        assert_true(fitting > (SANITIZED ? 8 : 30));
        assert_int_equal(last_bytes, 0); /* at the end everything is in host memory, and no slot is left */
        assert_int_equal(p.weight_slots + p.record_slots, 0);
    }
    spw_model_destroy(model);
}

/* A step's bound: the longest of what its work takes alone, by hand. */
static void
test_step_bound(void **state)
{
    static spw_plan p;
    double s[SPW_RESOURCE_COUNT];
    spw_rates r = {.shared_cores = 4};
    (void)state;
    memset(&p, 0, sizeof p);
    p.path_count = 2;
    p.traffic[SPW_PACE_DEFAULT] =
        (spw_traffic){.nvme_read = 400, .nvme_write = 200, .path_read = {300, 100}, .path_write = {100, 100}};
    assert_int_equal(spw_step_bound(&p, &r, 800, 200, 7, 20, s), SPW_RESOURCE_CPU); /* disks unknown: not counted */
    assert_true(s[SPW_RESOURCE_CPU] == 5 && s[SPW_RESOURCE_NVME_READ] == 0 && s[SPW_RESOURCE_COMPUTE] == 0);
    r.nvme_read[0] = r.nvme_read[1] = 50; /* twice the planned reads: 600 and 200 bytes, on two devices */
    r.nvme_write[0] = r.nvme_write[1] = 25;
    r.nvme_mixed[0] = r.nvme_mixed[1] = 40;
    assert_int_equal(spw_step_bound(&p, &r, 800, 200, 7, 20, s), SPW_RESOURCE_NVME);
    assert_true(s[SPW_RESOURCE_NVME_READ] == 12 && s[SPW_RESOURCE_NVME_WRITE] == 4 && s[SPW_RESOURCE_NVME] == 17.5);
    r.device_id[0] = r.device_id[1] = 9; /* the same device: paths add up */
    assert_int_equal(spw_step_bound(&p, &r, 800, 200, 7, 20, s), SPW_RESOURCE_NVME);
    assert_true(s[SPW_RESOURCE_NVME_READ] == 16 && s[SPW_RESOURCE_NVME] == 25);
    p.path_ranks[0] = p.path_ranks[1] = 3; /* two more ranks there */
    assert_int_equal(spw_step_bound(&p, &r, 800, 200, 7, 20, s), SPW_RESOURCE_NVME);
    assert_true(s[SPW_RESOURCE_NVME_READ] == 48 && s[SPW_RESOURCE_NVME] == 75);
    p.cpu_ranks = 2; /* and on these cores */
    (void)spw_step_bound(&p, &r, 800, 200, 7, 20, s);
    assert_true(s[SPW_RESOURCE_CPU] == 10);
    r.shared_cores = 0; /* a device of its own: its time, not the processor's */
    assert_int_equal(spw_step_bound(&p, &r, 8, 2, 7, 200, s), SPW_RESOURCE_COMPUTE);
    assert_true(s[SPW_RESOURCE_COMPUTE] == 7 && s[SPW_RESOURCE_CPU] == 0);
}

/* What the machine has left bounds every plan: slots of auto shrink into it, and what does not fit is refused. */
static void
test_room(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = make_model();
    uint32_t fitting = 0, refused = 0;
    (void)state;
    for (int budget = 0; budget < 2; budget++) {
        for (uint64_t room = 1 << 20; room < 64 << 20; room += 409600) {
            spw_engine *e = NULL;
            spw_error err = {0};
            spw_status st;
            nvme_config(&c, SPW_STATE_SPLIT);
            if (budget)
                c.run.host_memory = PROCESS + (24 << 20);
            st = spw_engine_create(&e,
                                   &(spw_engine_options){.config = &c,
                                                         .model = model,
                                                         .plan_only = true,
                                                         .process_bytes = PROCESS,
                                                         .room_bytes = room,
                                                         .plan_out = &p},
                                   &err);
            spw_engine_destroy(e);
            fitting += st == SPW_OK;
            refused += st == SPW_ENOFIT;
            if (st == SPW_OK)
                assert_true(p.host_bytes + p.device_bytes <= PROCESS + room);
            else
                assert_true(st == SPW_ENOFIT && p.lack == SPW_LACK_ROOM &&
                            p.host_bytes + p.device_bytes > PROCESS + room);
        }
    }
    assert_true(fitting > 50 && refused > 20);
    spw_model_destroy(model);
}

/* Weights that are read again every step come first; when slots hold them all, records do. */
static void
test_filling_order(void **state)
{
    static spw_config c;
    static spw_plan p, least;
    spw_model *model = make_model();
    (void)state;
    nvme_config(&c, SPW_STATE_SPLIT);
    c.run.weight_slots = 2;
    c.run.record_slots = 2;
    assert_int_equal(plan_of(&c, model, &least, NULL), SPW_OK);
    c.run.host_memory =
        least.host_bytes + (2 + 3) * 8192 * 2; /* room behind both records' slots, three chunks of weights */
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_true(p.weight_host > 2 * 8192 * 2);
    assert_true(p.record_host == 0);
    assert_true(p.host_budget - p.host_bytes < 8192 * 2); /* exact to a chunk */
    c.run.weight_slots = 100;
    c.run.host_memory = SPW_AUTO;
    assert_int_equal(plan_of(&c, model, &least, NULL), SPW_OK);
    c.run.host_memory = least.host_bytes + 2 * 8192 * 2 + 3 * 8192 * 10;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_true(p.record_host > 2 * 8192 * 10);
    assert_true(p.weight_host < 8192 * 10);
    assert_true(p.host_budget - p.host_bytes < 8192 * 10);
    spw_model_destroy(model);
}

/* With less and less device memory, ever more checkpoints leave it, those needed last first; on auto nothing else does. */
static void
test_activations(void **state)
{
    static spw_config c;
    static spw_plan p, all;
    spw_model *model = make_model();
    uint32_t kept, mixed = 0;
    uint64_t budget, least, two;
    (void)state;
    tiny_config(&c, SPW_STATE_SPLIT);
    c.data.seq_length = 40;
    c.micro_batch = 24;
    c.accumulation = 4;
    assert_int_equal(plan_of(&c, model, &all, NULL), SPW_OK);
    kept = all.activation_count[SPW_TIER_DEVICE];
    two = all.grads_device;
    assert_int_equal(kept, (10 - 2) * 4); /* the embedding's input and the head's are no checkpoints */
    for (budget = all.device_bytes; c.run.device_memory = budget, plan_of(&c, model, &p, NULL) == SPW_OK;
         budget -= 50000) {
        assert_true(p.device_bytes <= budget && p.activation_count[SPW_TIER_NVME] == 0);
        assert_true(p.activation_count[SPW_TIER_DEVICE] <= kept);
        kept = p.activation_count[SPW_TIER_DEVICE];
        mixed += kept > 0 && p.activation_count[SPW_TIER_HOST] > 0;
    }
    assert_int_equal(kept, 0);
    assert_true(mixed > 20);
    assert_int_equal(p.lack, SPW_LACK_DEVICE);
    least = c.run.device_memory = p.least_bytes;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    c.run.activations = SPW_TIER_DEVICE; /* kept by order: it takes more */
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
    assert_true(p.lack == SPW_LACK_DEVICE && p.least_bytes > least);
    c.run.device_memory = p.least_bytes;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_true(p.single_grad && p.grads_device < two);
    c.run.device_memory += two - p.grads_device;
    c.run.activations = SPW_TIER_COUNT; /* and where it fits, auto does the same */
    assert_int_equal(plan_of(&c, model, &all, NULL), SPW_OK);
    assert_int_equal(all.activation_count[SPW_TIER_DEVICE], p.activation_count[SPW_TIER_DEVICE]);
    c.run.device_memory = least; /* now too little host memory: a path takes the rest, without one it is refused */
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    c.run.host_memory = p.host_bytes - 100000;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_HOST);
    c.zero.optimizer_path.count = 1;
    snprintf(c.zero.optimizer_path.item[0], sizeof c.zero.optimizer_path.item[0], "%s", swap_dir);
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_true(p.activation_count[SPW_TIER_NVME] > 0 && p.activation_count[SPW_TIER_HOST] > 0);
    assert_true(p.path_count == 1 && p.path_bytes[0] == p.activations_nvme && p.host_bytes <= c.run.host_memory);
    c.run.host_memory = c.run.device_memory = SPW_AUTO; /* not needed: no path is opened */
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_int_equal(p.path_count, 0);
    c.run.cpu_checkpointing = true;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_int_equal(p.activation_count[SPW_TIER_HOST], (10 - 2) * 4);
    spw_model_destroy(model);
}

/* Everything that was left open has a line with a reason; what was given has none. */
static void
test_decisions(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = make_model();
    const char *open[] = {"spillway.activations",  "spillway.host_memory",  "spillway.device_memory",
                          "spillway.weight_slots", "spillway.record_slots", "spillway.micro_batches_per_pass",
                          "gathered units"};
    (void)state;
    nvme_config(&c, SPW_STATE_SPLIT);
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    for (size_t i = 0; i < sizeof open / sizeof *open; i++) {
        bool there = false;
        for (uint32_t k = 0; k < p.decision_count; k++) {
            there |= strcmp(p.decisions[k].name, open[i]) == 0;
            assert_true(p.decisions[k].reason[0] != '\0');
            assert_true(p.decisions[k].value[0] != '\0');
        }
        assert_true(there);
    }
    c.run.weight_slots = c.run.record_slots = 3;
    c.run.host_memory = 64 << 20;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    for (uint32_t k = 0; k < p.decision_count; k++) {
        assert_string_not_equal(p.decisions[k].name, "spillway.weight_slots");
        assert_string_not_equal(p.decisions[k].name, "spillway.host_memory");
    }
    spw_model_destroy(model);
}

/* Any allocation may fail: an error, nothing left behind, and the same plan afterwards. */
static void
test_no_memory(void **state)
{
    static spw_config c;
    static spw_plan p, again;
    spw_model *model = make_model();
    bool through = false;
    (void)state;
    nvme_config(&c, SPW_STATE_SPLIT);
    c.run.host_memory = PROCESS + (5 << 20);
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    for (unsigned k = 1; !through; k++) {
        spw_error err = {0};
        long live = spw_test_live_allocs();
        spw_status st;
        spw_test_fail_alloc(k);
        st = plan_of(&c, model, &again, &err);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    assert_memory_equal(&p, &again, sizeof p);
    spw_model_destroy(model);
}

/* ---------------------------------------------------------------- what does not fit */

static const char base[] =
    "{\"model\": {\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_positions\": 64, \"n_embd\": 128, \"n_layer\": 4, "
    "\"n_head\": 4}, \"data\": {\"path\": [\"x\"], \"seq_length\": 64}, \"train_micro_batch_size_per_gpu\": 6, "
    "\"gradient_accumulation_steps\": 2, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 3, "
    "\"offload_param\": {\"device\": \"cpu\"}, \"offload_optimizer\": {\"device\": \"cpu\"}}, "
    "\"spillway\": {\"device\": \"cpu\"}}";

/* Ever smaller budgets: as long as a configuration is suggested, it fits when its overrides are given to the parser. */
static void
test_nearest(void **state)
{
    const char *budgets[] = {"host_memory", "device_memory", "device_memory"};
    const char *activations[] = {"spillway.activations=auto", "spillway.activations=auto",
                                 "spillway.activations=device"};
    static spw_config c;
    static spw_plan p;
    static spw_suggestion s;
    uint32_t suggested[3] = {0}, moved = 0;
    (void)state;
    for (int k = 0; k < 3; k++) {
        for (uint64_t budget = 40 << 20; budget > 1 << 20; budget -= budget / 7) {
            char text[96];
            const char *overrides[16] = {text, activations[k]};
            spw_model *model = NULL;
            spw_error err = {0};
            spw_engine_options o = {.config = &c, .process_bytes = PROCESS, .room_bytes = UINT64_MAX};
            spw_status st;
            snprintf(text, sizeof text, "spillway.%s=%llu", budgets[k], (unsigned long long)budget);
            assert_int_equal(spw_config_parse(&c, base, "base", overrides, 2, &err), SPW_OK);
            assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
            o.model = model;
            st = plan_of(&c, model, &p, &err);
            if (st == SPW_ENOFIT) {
                assert_int_equal(p.lack, k ? SPW_LACK_DEVICE : SPW_LACK_HOST);
                assert_true(p.least_bytes > budget);
                assert_int_equal(spw_plan_nearest(&o, &s, &err), SPW_OK);
                if (s.found) {
                    suggested[k]++;
                    for (uint32_t i = 0; i < s.count; i++) {
                        overrides[i + 2] = s.set[i];
                        assert_null(strstr(s.set[i], "state_format"));
                        moved += strcmp(s.set[i], activations[0]) == 0;
                    }
                    assert_int_equal(spw_config_parse(&c, base, "base", overrides, s.count + 2, &err), SPW_OK);
                    st = plan_of(&c, model, &p, &err);
                    if (st != SPW_OK)
                        print_error("%s: %s\n", text, err.message);
                    assert_int_equal(st, SPW_OK);
                    assert_int_equal(c.micro_batch * c.accumulation, 12); /* the batch stays */
                }
            } else {
                assert_int_equal(st, SPW_OK);
            }
            spw_model_destroy(model);
        }
    }
    assert_true(suggested[0] > 2);
    assert_true(suggested[1] > 0 && suggested[2] > 2 && moved > 0);
}

/* Budgets above what the machine has left: the suggestion is what it has, and where that is too little, nothing but more memory. */
static void
test_nearest_room(void **state)
{
    static spw_config c;
    static spw_plan p;
    static spw_suggestion s;
    uint32_t found = 0, never = 0;
    (void)state;
    for (uint64_t room = 26 << 20; room > 1 << 20; room -= room / 5) {
        const char *overrides[16] = {
            "spillway.host_memory=80MiB", "spillway.device_memory=80MiB",
            "zero_optimization.offload_optimizer={\"device\":\"nvme\",\"nvme_path\":\"/tmp\"}"};
        spw_model *model = NULL;
        spw_engine *e = NULL;
        spw_error err = {0};
        spw_engine_options o = {
            .config = &c, .plan_only = true, .process_bytes = PROCESS, .room_bytes = room, .plan_out = &p};
        assert_int_equal(spw_config_parse(&c, base, "base", overrides, 3, &err), SPW_OK);
        assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
        o.model = model;
        assert_int_equal(spw_engine_create(&e, &o, &err), SPW_ENOFIT);
        assert_int_equal(p.lack, SPW_LACK_ROOM);
        assert_true(p.least_bytes > room);
        assert_int_equal(spw_plan_nearest(&o, &s, &err), SPW_OK);
        never += !s.found;
        if (s.found) {
            for (uint32_t i = 0; i < s.count; i++)
                overrides[i + 3] = s.set[i];
            assert_true(found++ > 0 || strstr(s.set[0], "_memory=auto") != NULL);
            assert_int_equal(spw_config_parse(&c, base, "base", overrides, s.count + 3, &err), SPW_OK);
            assert_int_equal(spw_engine_create(&e, &o, &err), SPW_OK);
            assert_true(p.host_bytes + p.device_bytes <= PROCESS + room);
            spw_engine_destroy(e);
        }
        spw_model_destroy(model);
    }
    assert_true(found > 2 && never > 0);
}

/* A gradient leaves the device before the next is begun where two do not fit, and nowhere else; host memory is not what lacks then. */
static void
test_single_gradient(void **state)
{
    static spw_config c;
    static spw_plan p, wide;
    spw_model *model = make_model();
    spw_prediction x;
    const spw_rates rates = {.flops = 1e9, .d2h = 1e6, .h2d = 1e9, .optimizer = 1e9};
    uint64_t least;
    uint32_t single = 0, two = 0;
    (void)state;
    nvme_config(&c, SPW_STATE_SPLIT);
    c.gradient_clipping = 1;
    assert_int_equal(plan_of(&c, model, &wide, NULL), SPW_OK);
    c.run.device_memory = 4096;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
    least = p.least_bytes;
    for (uint64_t budget = least; budget < wide.device_bytes; budget += 16384) {
        c.run.device_memory = budget;
        assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
        assert_true(p.device_bytes <= budget && (two == 0 || !p.single_grad));
        assert_true(p.single_grad ? p.grads_device < wide.grads_device : p.grads_device == wide.grads_device);
        p.single_grad ? single++ : two++;
        if (p.single_grad) {
            spw_plan_predict(&p, &rates, 0, &x);
            assert_true(x.seconds[SPW_RESOURCE_COMPUTE] >= p.flops / rates.flops + x.seconds[SPW_RESOURCE_D2H]);
        }
    }
    assert_true(single > 0 && two > 0);
    c.run.device_memory = least - 1;
    c.run.weight_slots = c.run.record_slots = 1;
    snprintf(c.run.gradients, sizeof c.run.gradients, "nvme");
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
    c.run.host_memory = p.host_bytes;
    snprintf(c.run.gradients, sizeof c.run.gradients, "host");
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_HOST);
    snprintf(c.run.gradients, sizeof c.run.gradients, "auto"); /* they go to nvme, and the device is too small still */
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
    assert_true(p.lack == SPW_LACK_DEVICE && p.least_bytes == least);
    spw_model_destroy(model);
}

/* Between ranks at stage 0: what leaves the device is tried at the stage that it needs, where a rank has a part of the weights. */
static void
test_nearest_stage(void **state)
{
    static spw_config c;
    static spw_plan p;
    static spw_suggestion s;
    const char *overrides[16] = {"spillway.device_memory=1048576", "spillway.ranks=2"};
    spw_model *model = NULL;
    spw_error err = {0};
    char text[96];
    bool raised = false;
    (void)state;
    assert_int_equal(spw_config_parse(&c, base, "base", overrides, 2, &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    assert_int_equal(plan_of(&c, model, &p, &err), SPW_ENOFIT);
    snprintf(text, sizeof text, "spillway.device_memory=%llu", (unsigned long long)p.least_bytes);
    overrides[0] = text;
    overrides[2] = "zero_optimization={\"stage\":0}";
    assert_int_equal(spw_config_parse(&c, base, "base", overrides, 3, &err), SPW_OK);
    assert_int_equal(plan_of(&c, model, &p, &err), SPW_ENOFIT);
    assert_int_equal(
        spw_plan_nearest(
            &(spw_engine_options){.config = &c, .model = model, .process_bytes = PROCESS, .room_bytes = UINT64_MAX}, &s,
            &err),
        SPW_OK);
    assert_true(s.found);
    for (uint32_t i = 0; i < s.count; i++) {
        overrides[i + 3] = s.set[i];
        raised = raised || strcmp(s.set[i], "zero_optimization.stage=3") == 0;
    }
    assert_true(raised);
    assert_int_equal(spw_config_parse(&c, base, "base", overrides, s.count + 3, &err), SPW_OK);
    assert_int_equal(plan_of(&c, model, &p, &err), SPW_OK);
    spw_model_destroy(model);
}

/* The smallest budget that the plan names does, and one byte less does not. */
static void
test_least_budget(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = make_model();
    (void)state;
    for (int k = 0; k < 2; k++) {
        for (uint32_t ranks = 1; ranks <= 8; ranks++) {
            nvme_config(&c, SPW_STATE_SPLIT);
            uint64_t *budget = k ? &c.run.device_memory : &c.run.host_memory;
            c.run.ranks = ranks;
            c.run.chunk_elems = 4096;
            *budget = 1 << 20;
            assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
            *budget = p.least_bytes;
            assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
            *budget -= k ? 4096 : 1;
            assert_int_equal(plan_of(&c, model, &p, NULL), SPW_ENOFIT);
        }
    }
    spw_model_destroy(model);
}

/* ---------------------------------------------------------------- any configuration */

static uint64_t
pick(uint64_t seed, uint64_t round, uint64_t what, uint64_t n)
{
    uint32_t r[4];
    spw_philox(seed, round, what, r);
    return (((uint64_t)r[0] << 32) | r[1]) % n;
}

/* The plan's bytes are what offload would take; last needed, farthest away. */
static void
check_activations(const spw_plan *p, const plan_input *in)
{
    uint32_t all = in->inference ? 0 : in->activation_slots * in->activation_micros;
    const uint32_t *n = p->activation_count;
    spw_act_config c = {.dtype = SPW_F32,
                        .elems = in->activation_elems,
                        .slot_count = all > 0 ? in->activation_slots : 0,
                        .micro_count = in->activation_micros,
                        .places = in->activation_places,
                        .working_count = p->activation_working,
                        .staging_count = p->activation_staging};
    spw_tier asked = in->config->run.activations;
    spw_act_need need;
    spw_act_compute_need(&c, &need);
    assert_int_equal(n[SPW_TIER_DEVICE] + n[SPW_TIER_HOST] + n[SPW_TIER_NVME], all);
    assert_int_equal(p->activations_device, in->flow_device + need.device_bytes);
    assert_int_equal(p->activations_host,
                     need.host_bytes +
                         (n[SPW_TIER_DEVICE] < all && need.host_bytes > 0 ? in->activation_tables.thread_bytes : 0) +
                         (n[SPW_TIER_NVME] > 0 ? in->activation_tables.transfer_bytes : 0));
    assert_int_equal(p->activations_nvme, n[SPW_TIER_NVME] * need.nvme_bytes);
    assert_true((n[SPW_TIER_NVME] == 0) == (p->activation_staging == 0));
    assert_true((n[SPW_TIER_DEVICE] == all) == (p->activation_working == 0));
    for (uint32_t i = 0; i < all; i++) {
        spw_tier tier = in->activation_places[i].tier;
        assert_true(i == 0 || tier <= in->activation_places[i - 1].tier);
        assert_true(asked == SPW_TIER_COUNT || asked == tier);
        assert_true(tier != SPW_TIER_NVME || in->activation_places[i].path_idx < p->path_count);
    }
}

/* Device memory that the plan may take; 0: whatever it likes. */
static uint64_t
room_of(const plan_input *in)
{
    return in->config->run.device_memory == SPW_AUTO ? in->device_room : in->config->run.device_memory;
}

/* What lies between checkpoints: as much of it as fits is kept, all of them are on the device then, and only that is not computed. */
static void
check_tapes(const spw_plan *p, const plan_input *in)
{
    uint64_t all = in->inference ? 0 : (uint64_t)in->activation_slots_used * in->activation_micros;
    bool always = strcmp(in->config->run.recompute, "always") == 0;
    assert_int_equal(p->tapes_device, p->tape_count * in->tape_bytes);
    assert_true(p->tape_count <= all);
    if (p->tape_count > 0)
        assert_true(!always && p->activation_count[SPW_TIER_HOST] + p->activation_count[SPW_TIER_NVME] == 0);
    if (p->tape_count < all && !always && !in->device_in_host &&
        p->activation_count[SPW_TIER_HOST] + p->activation_count[SPW_TIER_NVME] == 0)
        assert_true(room_of(in) > 0 && p->device_bytes + in->tape_bytes > room_of(in));
    assert_true(fabs(p->flops - in->flops + (all > 0 ? in->recompute_flops * p->tape_count / (double)all : 0)) < 1);
}

/*
 * Records on a device that updates them are those of the first units, whole: as many as the ratio asks for, or as find room.
 * Returns their elements. Where only the ratio may put them there, one unit less would leave the host too much.
 */
static uint64_t
check_first_units(const spw_plan *p, const plan_input *in)
{
    const spw_layout *l = in->layout;
    uint64_t there = 0, last = 0, spilled = 0, total = in->inference ? 0 : l->elems;
    bool ended = false;
    for (uint32_t u = 0; u < l->unit_count && in->device_updates; u++) {
        const spw_store_chunk *c = &l->chunks[l->units[u].chunk_first];
        bool all = c->record_tier == SPW_TIER_DEVICE;
        for (uint32_t k = 0; k < l->units[u].chunk_count; k++)
            assert_true((c[k].record_tier == SPW_TIER_DEVICE) == all && (!all || c[k].weight_tier == SPW_TIER_DEVICE));
        assert_false(all && ended);
        ended = !all;
        last = all ? l->units[u].elems : last;
        there += all ? l->units[u].elems : 0;
    }
    if (in->device_updates && in->config->zero.offload_optimizer != SPW_TIER_DEVICE) {
        double ratio = in->config->zero.optimizer_ratio;
        assert_true((double)(total - there) <= ratio * (double)total + 1);
        if (!in->config->run.fill_device)
            assert_true(there == 0 || (double)(total - there + last) > ratio * (double)total);
    }
    assert_int_equal(p->trained_device, there);
    for (uint32_t u = 0; u < l->unit_count; u++) { /* gradients wait beside records, all of a unit's */
        const spw_store_unit *unit = &l->units[u];
        for (uint32_t k = 0; k < unit->chunk_count && unit->spills; k++)
            assert_int_equal(l->chunks[unit->chunk_first + k].record_tier, SPW_TIER_NVME);
        spilled += unit->spills ? unit->elems : 0;
    }
    assert_int_equal(p->grad_nvme, spilled * in->grad_bytes);
    assert_int_equal(p->grad_host + p->grad_nvme + p->grad_device, total * in->grad_bytes);
    assert_true(spilled == 0 || (strcmp(in->config->run.gradients, "host") != 0 && p->grad_windows == 2));
    return there;
}

/*
 * State that fills the device takes nothing that the plan without it has, and all that it can: the next unit would not fit, or
 * not everything is gathered.
 */
static void
check_filled(const spw_plan *p, const plan_input *in, spw_config *c)
{
    static spw_plan q;
    const spw_layout *l = in->layout;
    uint64_t more = 0, gathered = 0;
    uint32_t next = 0;
    spw_error err = {0};
    if (!c->run.fill_device || !in->device_updates || c->zero.offload_optimizer == SPW_TIER_DEVICE || room_of(in) == 0)
        return;
    while (next < l->unit_count && l->chunks[l->units[next].chunk_first].record_tier == SPW_TIER_DEVICE)
        next++;
    for (uint32_t u = 0; u < l->unit_count; u++)
        gathered += !in->direct || u >= next ? l->units[u].elems * in->compute_bytes : 0;
    for (uint32_t k = 0; next < l->unit_count && k < l->units[next].chunk_count; k++) {
        uint64_t elems = l->chunks[l->units[next].chunk_first + k].elems;
        more += elems * (in->weight_bytes + in->grad_bytes) + spw_round_up(elems / 32 * in->record_bytes_32, 4096);
    }
    if (next < l->unit_count && !in->direct && p->cache_device == gathered)
        assert_true(p->device_bytes + more > room_of(in));
    c->run.fill_device = false;
    if (spw__plan_make(&q, in, &err) == SPW_OK) {
        assert_true(p->trained_device >= q.trained_device);
        assert_int_equal(p->tapes_device, q.tapes_device);
        assert_int_equal(p->activations_device, q.activations_device);
        assert_true(p->cache_device >= q.cache_device || p->cache_device == gathered);
    }
    c->run.fill_device = true;
}

static uint32_t spared; /* plans that have some */

/* Second places in host memory: only of what can have one, the last chunks first, and as many as the budget holds. */
static void
check_spares(const spw_plan *p, const plan_input *in)
{
    uint64_t bytes = 0, records = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        uint64_t weights = c->weight_tier == SPW_TIER_HOST ? c->elems * in->weight_bytes : 0,
                 record = c->elems / 32 * in->record_bytes_32, all = weights + spw_round_up(record, 4096);
        assert_true(!c->spare || c->record_tier == SPW_TIER_NVME ||
                    (c->record_tier == SPW_TIER_HOST && c->weight_tier != SPW_TIER_DEVICE));
        bytes += c->spare && c->record_tier == SPW_TIER_HOST ? all : 0;
        records += c->spare && c->record_tier == SPW_TIER_HOST ? record : 0;
        if (!c->spare && p->spare_host > 0 && c->record_tier == SPW_TIER_HOST && c->weight_tier != SPW_TIER_DEVICE &&
            p->host_budget != SPW_AUTO)
            assert_true(all > p->host_budget - p->host_bytes);
    }
    assert_int_equal(bytes, p->spare_host);
    assert_int_equal(records, p->spared_host);
    assert_true(bytes == 0 || (p->ahead && in->config->gradient_clipping > 0 && !in->inference && p->grad_nvme == 0 &&
                               in->update_streams));
    spared += bytes > 0;
}

/* Whatever the sizes and budgets: sums agree, budgets hold, nothing overflows. */
static void
test_random_plans(void **state)
{
    enum { UNITS = 12, CHUNKS = 200, ROUNDS = SANITIZED ? 500 : 2000 };
    const char *given = getenv("SPW_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 0) : 20261121, fitted = 0, filled = 0;
    static spw_config c;
    static spw_plan p;
    (void)state;
    spared = 0;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        spw_store_unit units[UNITS];
        static spw_store_chunk chunks[CHUNKS];
        plan_use uses[2 * UNITS];
        uint32_t n = 0;
        uint64_t at = 0, weights, records, on_paths = 0, act_moves = 0, act_nvme = 0, act_bytes, act_pages, there,
                 moved = 0;
        spw_layout l = {.parts = 1, .units = units, .chunks = chunks};
        spw_error err = {0};
        spw_status st;
        bool unclipped = false;
        static spw_act_place places[60];
        plan_input in = {.config = &c, .layout = &l, .inference = pick(seed, round, n++, 10) == 0};
        nvme_config(&c, SPW_STATE_SPLIT);
#define PICK(n) pick(seed, round, 100 + at++, (n))
        c.zero.offload_param = (spw_tier)PICK(3);
        c.zero.offload_optimizer = (spw_tier)PICK(3);
        c.run.prefetch = PICK(8) != 0;
        c.gradient_clipping = (double)PICK(2);
        c.run.weight_slots = (uint32_t)PICK(60) % 45 % 30;
        c.run.record_slots = (uint32_t)PICK(60) % 45 % 30;
        c.zero.param_path.bytes[0] = c.zero.optimizer_path.bytes[0] = PICK(4) == 0 ? 1ull << PICK(50) : 0;
        l.unit_count = 1 + (uint32_t)PICK(UNITS);
        for (uint32_t u = 0, shift = (uint32_t)PICK(30); u < l.unit_count; u++) {
            units[u] = (spw_store_unit){
                .chunk_first = l.chunk_count, .chunk_count = 1 + (uint32_t)PICK(CHUNKS / UNITS), .trainable = true};
            for (uint32_t k = 0; k < units[u].chunk_count; k++) {
                uint64_t elems = 4096 * (1 + PICK(1ull << shift));
                chunks[l.chunk_count++] = (spw_store_chunk){.unit_idx = u, .first = units[u].elems, .elems = elems};
                units[u].elems += elems;
            }
            l.elems += units[u].elems;
            if (units[u].elems * 4 > in.largest_block_bytes)
                in.largest_block_bytes = units[u].elems * 4;
        }
        l.params = l.elems;
        in.weight_bytes = 2 + 2 * (uint32_t)PICK(2);
        in.grad_bytes = 2 + 2 * (uint32_t)PICK(2);
        in.compute_bytes = 4;
        in.record_bytes_32 = (uint32_t)(32 + PICK(400));
        in.update_reads_weights = PICK(2) != 0;
        in.update_streams = PICK(4) != 0;
        in.grads_device = PICK(1 << 30);
        in.process_bytes = PICK(1 << 30);
        in.passes = in.micro_batches = 1 + (uint32_t)PICK(3);
        in.future_max = 4 * l.unit_count + 64;
        in.tokens = 1 + PICK(1 << 20);
        in.flops = 1e12;
        in.recompute_flops = 3e11;
        in.tape_bytes = 4096 * (1 + PICK(1000));
        snprintf(c.run.recompute, sizeof c.run.recompute, "%s", PICK(4) ? "auto" : "always");
        in.activation_places = places;
        in.activation_elems = 1 + (PICK(4) ? PICK(1 << 22) : PICK(1000));
        in.activation_slots = (uint32_t)PICK(20);
        in.activation_slots_used = in.activation_slots - (uint32_t)PICK(in.activation_slots + 1);
        in.activation_micros = 1 + (uint32_t)PICK(3);
        in.micro_batches = in.passes * in.activation_micros - (uint32_t)PICK(in.activation_micros);
        in.flow_device = 4096 * (1 + PICK(1000));
        in.activation_tables.thread_bytes = 4096 * PICK(30);
        in.activation_tables.transfer_bytes = 4096 * PICK(300);
        act_bytes = in.activation_elems * in.compute_bytes;
        act_pages = spw_round_up(act_bytes, 4096);
        c.run.activations = (spw_tier)PICK(SPW_TIER_COUNT + 1);
        c.run.cpu_checkpointing = PICK(4) == 0 && c.run.activations != SPW_TIER_DEVICE;
        n = 0;
        for (uint32_t k = 0; k < 2 * l.unit_count - 1; k++) {
            in.forward_count += k + 1 < l.unit_count;
            uses[n++] = (plan_use){k < l.unit_count ? k : 2 * (l.unit_count - 1) - k, k + 1, k + 1};
        }
        in.uses = uses;
        in.use_count = n;
        if (PICK(2))
            c.run.host_memory = in.process_bytes + PICK(2 * l.elems * 20);
        if (PICK(2))
            c.run.device_memory = PICK(2 * l.elems * 20);
        c.run.host_memory = PICK(50) == 0 ? UINT64_MAX - 1 : c.run.host_memory;
        weights = l.elems * in.weight_bytes;
        records = in.inference ? 0 : l.elems / 32 * in.record_bytes_32;
        in.device_updates =
            c.zero.offload_optimizer != SPW_TIER_DEVICE ? PICK(2) != 0 : c.zero.offload_param == SPW_TIER_DEVICE;
        in.device_updates = in.device_updates && !in.inference;
        in.direct = PICK(2) != 0;
        in.device_room = PICK(2) ? 0 : 4 * PICK(l.elems * 20);
        c.zero.optimizer_ratio = PICK(3) ? 1 : (double)PICK(101) / 100;
        c.run.fill_device = PICK(2) != 0;
        snprintf(c.run.gradients, sizeof c.run.gradients, "%s", (const char *const[]){"auto", "host", "nvme"}[PICK(3)]);
        st = spw__plan_make(&p, &in, &err);
        there = check_first_units(&p, &in);
        if (st != SPW_OK) {
            assert_int_equal(err.status, SPW_ENOFIT);
            assert_int_not_equal(p.lack, SPW_LACK_NOTHING);
        } else {
            spw_prediction x;
            spw_rates r = some_rates();
            fitted++;
            assert_true(p.host_bytes <= p.host_budget && p.device_bytes <= p.device_budget);
            for (uint32_t i = 0; i < p.path_count; i++)
                on_paths += p.path_bytes[i];
            for (uint32_t i = 0; i < l.chunk_count; i++) { /* swap files hold whole pages */
                uint64_t record = l.chunks[i].elems / 32 * in.record_bytes_32;
                if (l.chunks[i].record_tier == SPW_TIER_NVME && l.units[l.chunks[i].unit_idx].trainable &&
                    !in.inference)
                    on_paths -= spw_round_up(record, 4096) - record;
            }
            assert_int_equal(on_paths, p.weight_nvme + p.record_nvme + p.grad_nvme + p.activations_nvme + p.spare_nvme);
            check_activations(&p, &in);
            check_tapes(&p, &in);
            for (uint32_t i = 0; i < in.activation_slots_used * in.micro_batches && !in.inference; i++) {
                uint32_t slot = i / in.micro_batches, micro = i % in.micro_batches % in.activation_micros;
                act_moves += places[slot * in.activation_micros + micro].tier != SPW_TIER_DEVICE;
                act_nvme += places[slot * in.activation_micros + micro].tier == SPW_TIER_NVME;
            }
            for (uint32_t u = 0; u < l.unit_count && c.gradient_clipping > 0 && p.grad_nvme > 0; u++) {
                if (units[u].spills) { /* all but the first one's, which comes last and stays in its window */
                    moved = p.grad_nvme - units[u].elems * in.grad_bytes;
                    break;
                }
            }
            spw_plan_predict(&p, &r, 1, &x);
            assert_true(in.inference || (x.timed && x.step_s > 0 && isfinite(x.step_s)));
            for (int k = 0; k < SPW_PACE_COUNT && !in.inference; k++) {
                uint64_t read = p.traffic[k].nvme_read - act_nvme * act_pages;
                assert_int_equal(p.traffic[k].nvme_write, /* everything once */
                                 p.weight_nvme + p.record_nvme + moved + act_nvme * act_pages);
                assert_true(read >= p.record_nvme + moved);
                assert_true(read <= p.record_nvme + moved + (2 * in.passes + 1) * p.weight_nvme);
                assert_int_equal(p.traffic[k].d2h,
                                 in.passes * (l.elems - there) * in.grad_bytes + act_moves * act_bytes);
            }
        }
        assert_int_equal(p.weight_device + p.weight_host + p.weight_nvme, weights);
        assert_int_equal(p.record_device + p.record_host + p.record_nvme, records);
        assert_int_equal(p.host_bytes, p.process_host + p.tables_host + p.grad_host + p.slots_host +
                                           p.activations_host + p.weight_host + p.record_host + p.spare_host);
        check_spares(&p, &in);
        assert_int_equal(p.trained_device, there);
        assert_int_equal(p.grad_device, there * in.grad_bytes);
        assert_int_equal(p.device_bytes, p.grad_device + p.grads_device + p.activations_device + p.arena_device +
                                             p.batch_device + p.padding_device + p.weight_device + p.record_device +
                                             p.cache_device + p.tapes_device);
        for (uint32_t i = 0; i < p.decision_count; i++) {
            assert_true(strlen(p.decisions[i].reason) > 10);
            unclipped = unclipped || strcmp(p.decisions[i].name, "gradient_clipping") == 0;
        }
        assert_int_equal(unclipped, c.gradient_clipping <= 0 && !in.inference); /* other programs clip by default */
        if (st == SPW_OK)
            check_filled(&p, &in, &c);
        filled += st == SPW_OK && in.device_updates && c.run.fill_device && c.zero.optimizer_ratio == 1 && there > 0 &&
                  c.zero.offload_optimizer != SPW_TIER_DEVICE;
#undef PICK
    }
    print_message("seed %llu: %llu of %d fit\n", (unsigned long long)seed, (unsigned long long)fitted, ROUNDS);
    assert_true(fitted > ROUNDS / 4 && filled > ROUNDS / 100 && spared > ROUNDS / 100);
}

/* ---------------------------------------------------------------- beside a real run */

static void
assert_close(const char *name, const char *what, double predicted, double measured, double within)
{
    if (fabs(predicted - measured) > within * measured)
        print_error("%s, %s: predicted %.0f, measured %.0f\n", name, what, predicted, measured);
    assert_true(fabs(predicted - measured) <= within * measured);
}

/*
 * Steps from the third on move what the plan says; reads within read_within of what it says for one of the paces of updates:
 * which one that is depends on the machine. What moves at the moment when the window begins and ends may fall to
 * either side of it: a step's bytes, on a busy machine part of the one before. test_traffic.sh holds the formula to 1 %.
 */
static void
beside_training(const char *name, const spw_config *c, double read_within)
{
    enum { STEPS = 42, FIRST = 3 };
    const double EDGE = 2.0 / (STEPS - FIRST);
    static spw_plan p;
    spw_model *model = make_model();
    spw_engine *e = NULL;
    spw_error err = {0};
    uint64_t n = c->accumulation * c->micro_batch * c->data.seq_length;
    int32_t *tokens = malloc(n * 4), *targets = malloc(n * 4);
    double read = 0, written = 0, h2d = 0, d2h = 0, planned = NAN;
    spw_prediction x;
    assert_non_null(tokens);
    assert_non_null(targets);
    (void)spw_engine_create(
        &e,
        &(spw_engine_options){
            .config = c, .model = model, .process_bytes = PROCESS, .room_bytes = UINT64_MAX, .plan_out = &p},
        &err);
    assert_int_equal(err.status, SPW_OK);
    assert_int_equal(spw_engine_init_params(e, 7, &err), SPW_OK);
    for (uint32_t s = 0; s < STEPS; s++) {
        spw_step_result r;
        tiny_batch(s, model->config.vocab, n, tokens, targets);
        assert_int_equal(spw_engine_step(e, tokens, targets, (uint32_t)c->accumulation, 1e-3, &r, &err), SPW_OK);
        read += s >= FIRST ? (double)r.nvme_read / (STEPS - FIRST) : 0;
        written += s >= FIRST ? (double)r.nvme_write / (STEPS - FIRST) : 0;
        h2d += s >= FIRST ? (double)r.h2d / (STEPS - FIRST) : 0;
        d2h += s >= FIRST ? (double)r.d2h / (STEPS - FIRST) : 0;
    }
    spw_plan_predict(&p, NULL, 0, &x);
    for (int k = 0; k < SPW_PACE_COUNT; k++) {
        double at_pace = (double)p.traffic[k].nvme_read;
        planned = k == 0 || fabs(at_pace - read) < fabs(planned - read) ? at_pace : planned;
    }
    assert_close(name, "nvme read", planned, read, read_within + EDGE);
    assert_close(name, "nvme write", (double)x.traffic.nvme_write, written, 0.01 + EDGE);
    assert_close(name, "h2d", (double)x.traffic.h2d, h2d, 0.01 + EDGE);
    assert_close(name, "d2h", (double)x.traffic.d2h, d2h, 0.01);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    free(tokens);
    free(targets);
}

static void
test_beside_training(void **state)
{
    static spw_config c;
    (void)state;
    for (int format = SANITIZED ? SPW_STATE_SPLIT : SPW_STATE_MIXED; format <= SPW_STATE_SPLIT; format++) {
        nvme_config(&c, (spw_state_format)format);
        c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
        beside_training("all on host", &c, 0.01);
        c.accumulation = 4;
        c.run.micro_batches_per_pass = 2;
        beside_training("all on host, two passes", &c, 0.01);
        nvme_config(&c, (spw_state_format)format);
        c.zero.offload_param = SPW_TIER_HOST;
        beside_training("records on nvme", &c, 0.01);
        c.run.activations = SPW_TIER_NVME;
        beside_training("records and activations on nvme", &c, 0.01);
        c.accumulation = 5;
        c.run.micro_batches_per_pass = 2; /* the last pass has one */
        beside_training("the same in three passes", &c, 0.01);
        c.run.activations = SPW_TIER_HOST;
        beside_training("activations on host, three passes", &c, 0.01);
        nvme_config(&c, (spw_state_format)format);
        c.run.device_memory = 64 << 20; /* holds all units: what is read does not depend on who is faster */
        c.run.weight_slots = c.run.record_slots = 1;
        beside_training("all on nvme", &c, 0.01);
        c.run.host_memory = PROCESS + (5 << 20);
        beside_training("half and half", &c, 0.01);
        c.run.device_memory = SPW_AUTO;
        c.run.weight_slots = c.run.record_slots = 0;
        beside_training("half and half, small device", &c, 0.12);
        c.run.host_memory = SPW_AUTO;
        beside_training("all on nvme, small device", &c, 0.12);
    }
}

/* ---------------------------------------------------------------- the cache of rates */

/* What was put is there for the next opener; old, odd and damaged entries are not, and no file is an error. */
static void
test_rate_cache(void **state)
{
    char dir[256], text[512];
    double v[2] = {1.5e9, 2.5e9}, got[3], age = -1;
    rate_cache *c;
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    setenv("XDG_CACHE_HOME", dir, 1);
    c = spw__rate_cache_open();
    assert_non_null(c);
    assert_false(spw__rate_cache_get(c, "a", 1000, got, 2, &age));
    spw__rate_cache_put(c, "a", 1000, v, 2);
    spw__rate_cache_close(c);
    c = spw__rate_cache_open();
    assert_true(spw__rate_cache_get(c, "a", 1000 + 86400, got, 2, &age));
    assert_true(got[0] == 1.5e9 && got[1] == 2.5e9 && age == 1);
    assert_false(spw__rate_cache_get(c, "a", 1000 + 31 * 86400, got, 2, &age)); /* too old */
    assert_false(spw__rate_cache_get(c, "a", 999, got, 2, &age));               /* from the future */
    assert_false(spw__rate_cache_get(c, "a", 1000, got, 3, &age));
    assert_false(spw__rate_cache_get(c, "b", 1000, got, 2, &age));
    snprintf(text, sizeof text, "%s", spw__rate_cache_path(c));
    spw__rate_cache_close(c);
    for (int k = 0; k < 3; k++) {
        static const char *const damaged[3] = {"{\"spillway_", "[1, 2]",
                                               "{\"spillway_rates\": 1, \"entries\": {\"a\": {\"time\": 1000, "
                                               "\"values\": [-1, \"x\"]}}}"};
        assert_non_null(f = fopen(text, "we"));
        fputs(damaged[k], f);
        fclose(f);
        c = spw__rate_cache_open();
        assert_non_null(c);
        assert_false(spw__rate_cache_get(c, "a", 1000, got, 2, &age));
        spw__rate_cache_close(c);
    }
    setenv("XDG_CACHE_HOME", "/proc/nowhere", 1); /* cannot be written */
    c = spw__rate_cache_open();
    spw__rate_cache_put(c, "a", 1000, v, 2);
    spw__rate_cache_close(c);
    unsetenv("XDG_CACHE_HOME");
    tiny_dir_remove(dir);
}

static int
setup(void **state)
{
    (void)state;
    tiny_dir_make(swap_dir);
    return 0;
}

static int
teardown(void **state)
{
    (void)state;
    tiny_dir_remove(swap_dir);
    return spw_test_live_allocs() == 0 ? 0 : -1;
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_zero_table),
                                       cmocka_unit_test(test_prediction),
                                       cmocka_unit_test(test_prediction_gated),
                                       cmocka_unit_test(test_monotonic),
                                       cmocka_unit_test(test_filling_order),
                                       cmocka_unit_test(test_step_bound),
                                       cmocka_unit_test(test_room),
                                       cmocka_unit_test(test_activations),
                                       cmocka_unit_test(test_decisions),
                                       cmocka_unit_test(test_no_memory),
                                       cmocka_unit_test(test_nearest),
                                       cmocka_unit_test(test_nearest_stage),
                                       cmocka_unit_test(test_nearest_room),
                                       cmocka_unit_test(test_single_gradient),
                                       cmocka_unit_test(test_least_budget),
                                       cmocka_unit_test(test_random_plans),
                                       cmocka_unit_test(test_beside_training),
                                       cmocka_unit_test(test_rate_cache)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
