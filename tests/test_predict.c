/* Predictions: by hand from given rates, and predicted bytes beside what a real run moves. */
#include "lib_plan.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

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

/* 4 s of computing on a device apart, a quarter of it the forward pass, of a model with its records in host memory. */
static void
make_plan(spw_plan *p)
{
    memset(p, 0, sizeof *p);
    p->params = p->elems = p->trained = 1000000000;
    p->tokens = 1000;
    p->flops = 4e12;
    p->model_flops = 3e12;
    p->device_apart = true;
    p->record_host = 10000000000u;
}

/* Of four passes the first goes forward beside updates, a quarter of a second of 4; in the last one's 0.75 s backward gradients leave and updates begin. */
static void
test_prediction_passes(void **state)
{
    static spw_plan p;
    spw_rates r = plan_some_rates();
    spw_prediction x;
    (void)state;
    make_plan(&p);
    p.gated = p.clips = true;
    p.spared_host = p.record_host;
    p.passes = 4;
    r.optimizer = 0.4e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3.75 + 2.5)) < 1e-9 && fabs(x.clipped_s - x.step_s) < 1e-9);
    p.ahead = true; /* 0.75 s of 2.5 */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3.75 + 1.75)) < 1e-9 && fabs(x.clipped_s - (3.75 + 2.5)) < 1e-9);
    p.grad_host = 4000000000u;
    for (int k = 0; k < SPW_PACE_COUNT; k++)
        p.traffic[k].d2h = 4 * p.grad_host; /* in each pass, a quarter of a second */
    r.d2h = 16e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3.75 + 1.75)) < 1e-9);
    for (int k = 0; k < SPW_PACE_COUNT; k++)
        p.traffic[k].d2h = p.grad_host; /* all in the last one, in a whole second */
    r.d2h = 4e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3.75 + 0.25 + 1.75)) < 1e-9);
    make_plan(
        &p); /* weights alone are read, in each pass forward and backward: the first time beside updates, in 0.25 s or in 0.4 s */
    p.gated = p.clips = true;
    p.passes = 4;
    p.path_count = 1;
    r = plan_some_rates();
    r.optimizer = 100e9;
    r.nvme_read[0] = r.nvme_write[0] = r.nvme_mixed[0] = 8e9;
    for (int k = 0; k < SPW_PACE_COUNT; k++)
        p.traffic[k] = (spw_traffic){.nvme_read = 16000000000u, .path_read = {16000000000u}};
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.bound_s - 4) < 1e-9 && fabs(x.step_s - 4) < 1e-9);
    r.nvme_read[0] = r.nvme_mixed[0] = 5e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.bound_s - 4) < 1e-9 && fabs(x.step_s - (3.75 + 0.4)) < 1e-9);
}

/*
 * With clipping a step has its backward pass and its updates one behind the other: 4 s of computing, a quarter of which is the next forward
 * pass. Updates that take less hide behind that, and those ahead of the norm in the backward pass.
 */
static void
test_prediction_gated(void **state)
{
    static spw_plan p;
    spw_rates r = plan_some_rates();
    spw_prediction x;
    (void)state;
    make_plan(&p);
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(x.gated_s <= 0 && fabs(x.step_s - 4) < 1e-9 && fabs(x.clipped_s - 4) < 1e-9);
    p.gated = p.clips = true;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.gated_s - 4) < 1e-9 && fabs(x.step_s - 4) < 1e-9); /* 1 s of updates beside 1 s of computing */
    r.optimizer = 0.4e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(x.bound == SPW_RESOURCE_COMPUTE && fabs(x.bound_s - 4) < 1e-9 && fabs(x.step_s - (3 + 2.5)) < 1e-9);
    assert_true(fabs(x.tokens_per_s - 1000 / 5.5) < 1e-9);
    p.ahead = true;
    p.spared_host = 4000000000u; /* two fifths of them have a log */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3 + 2.5 * 0.6)) < 1e-9 && fabs(x.clipped_s - (3 + 2.5)) < 1e-9);
    p.spared_host = p.record_host;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - 4) < 1e-9);
    r.optimizer = 0.2e9; /* the backward pass has time for three fifths */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (3 + 5 * 0.4)) < 1e-9 && fabs(x.bound_s - 5) < 1e-9);
    assert_true(fabs(x.clipped_s - (3 + 5)) < 1e-9);
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
    p.late = true; /* 24 GB beside 3 s of the backward pass, with or without a norm */
    for (int k = 0; k < 4; k++) {
        p.gated = k % 2 == 0;
        r.nvme_read[0] = r.nvme_write[0] = r.nvme_mixed[0] = k < 2 ? 8e9 : 6e9;
        spw_plan_predict(&p, &r, 0, &x);
        assert_true(fabs(x.step_s - (k < 2 ? 4 : 5)) < 1e-9 && fabs(x.clipped_s - x.step_s) < 1e-9);
    }
}

/* Bytes over rates; the longest is the bound; what is unknown is not guessed. */
static void
test_prediction(void **state)
{
    static spw_plan p;
    spw_rates r = plan_some_rates();
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
    assert_true(fabs(x.written - 12e9) < 1);
    spw_plan_predict(&p, &r, 600000000000000u, &x);
    assert_true(fabs(x.tbw_years - 600e12 / (12e9 / 9 * 86400) / 365.25) < 1e-9);
    r.device_id[1] = 1; /* both paths on one disk */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME_READ] - 6) < 1e-9);
    p.path_ranks[0] = p.path_ranks[1] = 2; /* which two ranks share */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NVME_READ] - 12) < 1e-9);
    assert_true(fabs(x.written_per_day * x.step_s - 24e9 * 86400) < 1e3); /* and wear */
    assert_true(fabs(x.written - 24e9) < 1);
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
    p.device_ranks = 2; /* or half of one */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_COMPUTE] - 60) < 1e-9 && fabs(x.seconds[SPW_RESOURCE_H2D] - 0.8) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_OPTIMIZER] - 3) < 1e-9);
    r.nvme_read[1] = 0;
    spw_plan_predict(&p, &r, 0, &x);
    assert_false(x.timed);
    assert_true(isnan(x.tokens_per_s));
    spw_plan_predict(&p, NULL, 0, &x);
    assert_false(x.timed);
    assert_int_equal(x.traffic.nvme_read, 14000000000u);
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
    assert_int_equal(
        spw_step_bound(&p, &r, &(spw_step_load){.nvme_read = 800, .nvme_write = 200, .compute_s = 7, .cpu_s = 20}, s),
        SPW_RESOURCE_CPU); /* disks unknown: not counted */
    assert_true(s[SPW_RESOURCE_CPU] == 5 && s[SPW_RESOURCE_NVME_READ] == 0 && s[SPW_RESOURCE_COMPUTE] == 0);
    r.nvme_read[0] = r.nvme_read[1] = 50; /* twice the planned reads: 600 and 200 bytes, on two devices */
    r.nvme_write[0] = r.nvme_write[1] = 25;
    r.nvme_mixed[0] = r.nvme_mixed[1] = 40;
    assert_int_equal(
        spw_step_bound(&p, &r, &(spw_step_load){.nvme_read = 800, .nvme_write = 200, .compute_s = 7, .cpu_s = 20}, s),
        SPW_RESOURCE_NVME);
    assert_true(s[SPW_RESOURCE_NVME_READ] == 12 && s[SPW_RESOURCE_NVME_WRITE] == 4 && s[SPW_RESOURCE_NVME] == 17.5);
    r.device_id[0] = r.device_id[1] = 9; /* the same device: paths add up */
    assert_int_equal(
        spw_step_bound(&p, &r, &(spw_step_load){.nvme_read = 800, .nvme_write = 200, .compute_s = 7, .cpu_s = 20}, s),
        SPW_RESOURCE_NVME);
    assert_true(s[SPW_RESOURCE_NVME_READ] == 16 && s[SPW_RESOURCE_NVME] == 25);
    p.path_ranks[0] = p.path_ranks[1] = 3; /* two more ranks there */
    assert_int_equal(
        spw_step_bound(&p, &r, &(spw_step_load){.nvme_read = 800, .nvme_write = 200, .compute_s = 7, .cpu_s = 20}, s),
        SPW_RESOURCE_NVME);
    assert_true(s[SPW_RESOURCE_NVME_READ] == 48 && s[SPW_RESOURCE_NVME] == 75);
    p.cpu_ranks = 2; /* and on these cores */
    (void)spw_step_bound(&p, &r, &(spw_step_load){.nvme_read = 800, .nvme_write = 200, .compute_s = 7, .cpu_s = 20}, s);
    assert_true(s[SPW_RESOURCE_CPU] == 10);
    r.shared_cores = 0; /* a device of its own: its time, not the processor's */
    assert_int_equal(
        spw_step_bound(&p, &r, &(spw_step_load){.nvme_read = 8, .nvme_write = 2, .compute_s = 7, .cpu_s = 200}, s),
        SPW_RESOURCE_COMPUTE);
    assert_true(s[SPW_RESOURCE_COMPUTE] == 7 && s[SPW_RESOURCE_CPU] == 0);
}

/* A quarter of the operations is attention's, at a fifth of the rate: 3 s and 5 in place of 4. */
static void
test_attention(void **state)
{
    static spw_plan p;
    spw_rates r = plan_some_rates();
    spw_prediction x;
    (void)state;
    make_plan(&p);
    p.attention_flops = 1e12;
    spw_plan_predict(&p, &r, 0, &x); /* not known: as of products */
    assert_true(fabs(x.step_s - 4) < 1e-9);
    r.attention = 2e11;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(x.bound == SPW_RESOURCE_COMPUTE && fabs(x.step_s - (3 + 5)) < 1e-9);
    p.gated = p.clips = true; /* a quarter of it forward, and updates of 3 s beside that */
    r.optimizer = 1e9 / 3;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.step_s - (6 + 3)) < 1e-9);
}

/*
 * Between ranks, by hand: 4 ranks on 2 hosts; each gathers 10 GB, 4 of them first, of which 6 and 2 come from the other host, and gets 8 of
 * gradients, 4 from there.
 */
static void
test_between_ranks(void **state)
{
    static spw_plan p;
    double s[SPW_RESOURCE_COUNT], without;
    spw_rates r = plan_some_rates();
    spw_prediction x;
    const spw_received gathered = {10000000000u, 6000000000u}, first = {4000000000u, 2000000000u};
    const spw_received reduced = {8000000000u, 4000000000u};
    (void)state;
    make_plan(&p);
    p.ranks = 4;
    p.local_ranks = 2;
    p.gathered = gathered;
    p.gathered_first = first;
    p.reduced = reduced;
    spw_plan_predict(&p, &r, 0, &x); /* not known: said, and in no time */
    assert_true(x.timed && fabs(x.step_s - 4) < 1e-9);
    assert_true(isnan(x.seconds[SPW_RESOURCE_RANKS]) && isnan(x.seconds[SPW_RESOURCE_NETWORK]));
    r.received[SPW_WAY_NEAR][SPW_USE_GATHER] = 8e9; /* 4 GB in 0.5 s */
    r.received[SPW_WAY_NEAR][SPW_USE_REDUCE] = 5e9; /* 4 GB in 0.8 s */
    r.received[SPW_WAY_NEAR][SPW_USE_BOTH] = 6e9;   /* 8 GB in 1.33 s */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_RANKS] - 8.0 / 6) < 1e-9 && isnan(x.seconds[SPW_RESOURCE_NETWORK]));
    assert_true(fabs(x.step_s - 4) < 1e-9);
    r.received[SPW_WAY_NEAR][SPW_USE_BOTH] = 16e9; /* the gradients alone take longer */
    r.received[SPW_WAY_FAR][SPW_USE_GATHER] = r.received[SPW_WAY_FAR][SPW_USE_REDUCE] =
        4e9; /* 12 and 8 GB of both ranks */
    r.received[SPW_WAY_FAR][SPW_USE_BOTH] = 4e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_RANKS] - 0.8) < 1e-9);
    assert_true(fabs(x.seconds[SPW_RESOURCE_NETWORK] - 5) < 1e-9);
    assert_int_equal(x.bound, SPW_RESOURCE_NETWORK);
    assert_true(fabs(x.step_s - 5) < 1e-9);
    p.gated = p.clips = true; /* forward 1 s, its gathers 1; backward 3 s of computing, (8 + 8) / 4 of the network */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.gated_s - (1 + 4)) < 1e-9);
    r.received[SPW_WAY_FAR][SPW_USE_GATHER] =
        2e9; /* 2 s; and backward 4 both for what is gathered alone and for all of it */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.gated_s - (2 + 4)) < 1e-9 && fabs(x.seconds[SPW_RESOURCE_NETWORK] - 6) < 1e-9);
    r.received[SPW_WAY_FAR][SPW_USE_GATHER] = 1e9; /* 4 s, and 8: longer than all of it at the rate of both */
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.gated_s - (4 + 8)) < 1e-9 && fabs(x.seconds[SPW_RESOURCE_NETWORK] - 12) < 1e-9);
    p.late = true;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.gated_s - (4 + 8)) < 1e-9);
    p.device_apart = false; /* each of two ranks takes processors of 8 for what it receives: 8 and 10 GB */
    p.cpu_ranks = 2;
    r.shared_cores = 8;
    spw_plan_predict(&p, &r, 0, &x);
    without = x.seconds[SPW_RESOURCE_CPU];
    r.received_cpu[SPW_WAY_NEAR] = 4e9;
    r.received_cpu[SPW_WAY_FAR] = 1e9;
    spw_plan_predict(&p, &r, 0, &x);
    assert_true(fabs(x.seconds[SPW_RESOURCE_CPU] - without - (2 + 10) * 2.0 / 8) < 1e-9);
    assert_int_equal(spw_step_bound(&p, &r, &(spw_step_load){.gathered = gathered, .reduced = reduced}, s),
                     SPW_RESOURCE_NETWORK);
    assert_true(fabs(s[SPW_RESOURCE_NETWORK] - 12) < 1e-9 && fabs(s[SPW_RESOURCE_RANKS] - 0.8) < 1e-9);
    (void)spw_step_bound(&p, &r, &(spw_step_load){.gathered = {4000000000u, 0}}, s);
    assert_true(fabs(s[SPW_RESOURCE_NETWORK]) < 1e-9 && fabs(s[SPW_RESOURCE_RANKS] - 0.5) < 1e-9);
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
    spw_model *model = plan_make_model();
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
            .config = c, .model = model, .process_bytes = PLAN_PROCESS_BYTES, .room_bytes = UINT64_MAX, .plan_out = &p},
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
    if (SANITIZED)
        skip(); /* its pace is another, and what is read depends on it */
    plan_nvme_config(&c, SPW_STATE_MIXED);
    beside_training("mixed, all on nvme, small device", &c, 0.12);
    c.zero.offload_param = SPW_TIER_HOST;
    beside_training("mixed, records on nvme", &c, 0.01);
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_HOST;
    beside_training("all on host", &c, 0.01);
    c.accumulation = 4;
    c.run.micro_batches_per_pass = 2;
    beside_training("all on host, two passes", &c, 0.01);
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    c.zero.offload_param = SPW_TIER_HOST;
    beside_training("records on nvme", &c, 0.01);
    c.run.activations = SPW_TIER_NVME;
    beside_training("records and activations on nvme", &c, 0.01);
    c.accumulation = 5;
    c.run.micro_batches_per_pass = 2; /* the last pass has one */
    beside_training("the same in three passes", &c, 0.01);
    c.run.activations = SPW_TIER_HOST;
    beside_training("activations on host, three passes", &c, 0.01);
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    c.run.device_memory = 64 << 20; /* holds all units: what is read does not depend on who is faster */
    c.run.weight_slots = c.run.record_slots = 1;
    beside_training("all on nvme", &c, 0.01);
    c.run.host_memory = PLAN_PROCESS_BYTES + (5 << 20);
    beside_training("half and half", &c, 0.01);
    c.run.device_memory = SPW_AUTO;
    c.run.weight_slots = c.run.record_slots = 0;
    beside_training("half and half, small device", &c, 0.12);
    c.run.host_memory = SPW_AUTO;
    beside_training("all on nvme, small device", &c, 0.12);
    c.accumulation = 30; /* of so many passes a few are rehearsed */
    c.run.micro_batches_per_pass = 1;
    beside_training("all on nvme, small device, thirty passes", &c, 0.03);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zero_table),       cmocka_unit_test(test_prediction),
        cmocka_unit_test(test_prediction_gated), cmocka_unit_test(test_prediction_passes),
        cmocka_unit_test(test_step_bound),       cmocka_unit_test(test_between_ranks),
        cmocka_unit_test(test_attention),        cmocka_unit_test(test_beside_training)};
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
