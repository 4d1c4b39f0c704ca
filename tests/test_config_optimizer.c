/*
 * Optimizers and their schedules in a configuration: decay, defaults by type, groups' rates, Muon's keys, and the learning rates of every
 * step, beside DeepSpeed's.
 */
#include "config_internal.h"
#include "lib_config.h"
#include "lib_tiny.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

static spw_config c, d;

static spw_status
parse(const char *set, spw_error *err)
{
    return spw_config_parse(&c, config_whole, "run.json", &set, set != NULL ? 1 : 0, err);
}

/* Parsed, printed and parsed again: the optimizer's decay, and by what rule. */
static void
decays(const char *optimizer, const char *type, bool decoupled, double decay)
{
    char set[200], *text;
    spw_error err = {0};
    snprintf(set, sizeof set, "optimizer=%s", optimizer);
    if (parse(set, &err) != SPW_OK)
        fail_msg("%s: %s", set, err.message);
    text = spw_config_dump(&c);
    assert_non_null(text);
    assert_int_equal(spw_config_parse(&d, text, "dump", NULL, 0, &err), SPW_OK);
    spw_mem_free(text);
    if (c.optimizer.adam_w_mode != decoupled || d.optimizer.adam_w_mode != decoupled ||
        c.optimizer.weight_decay != decay || d.optimizer.weight_decay != decay || strcmp(d.optimizer.type, type) != 0)
        fail_msg("%s: type %s, adam_w_mode %d, weight_decay %g", set, d.optimizer.type, c.optimizer.adam_w_mode,
                 c.optimizer.weight_decay);
}

/* As in DeepSpeed: decay is decoupled unless Adam has adam_w_mode false, AdamW does not look at it, and there is none by default. */
static void
test_decay(void **state)
{
    (void)state;
    decays("{\"type\":\"Adam\"}", "Adam", true, 0);
    decays("{\"type\":\"adam\",\"params\":{\"adam_w_mode\":\"auto\"}}", "adam", true, 0);
    decays("{\"type\":\"Adam\",\"params\":{\"adam_w_mode\":false,\"weight_decay\":0.1}}", "Adam", false, 0.1);
    decays("{\"type\":\"AdamW\"}", "AdamW", true, 0);
    decays("{\"type\":\"AdamW\",\"params\":{\"adam_w_mode\":false,\"weight_decay\":0.1}}", "AdamW", true, 0.1);
    decays("{\"type\":\"Lion\"}", "Lion", true, 0);
    decays("{\"type\":\"SGD\"}", "SGD", true, 0);
    decays("{\"type\":\"Adagrad\",\"params\":{\"weight_decay\":0.01}}", "Adagrad", true, 0.01);
    assert_int_equal(parse("optimizer.type=\"AdamW\"", NULL), SPW_OK);
    c.optimizer.adam_w_mode = false; /* by a program */
    {
        char *text = spw_config_dump(&c);
        assert_int_equal(spw_config_parse(&d, text, "dump", NULL, 0, NULL), SPW_OK);
        assert_true(!d.optimizer.adam_w_mode && strcmp(d.optimizer.type, "Adam") == 0);
        spw_mem_free(text);
    }
}

/* An optimizer is told what another one has: PyTorch's refuse it, here it would be passed over. */
static void
test_said_of_optimizers(void **state)
{
    static const struct {
        const char *set, *said; /* said NULL: all of it has a meaning */
    } cases[] = {{"optimizer={\"type\":\"AdamW\",\"params\":{\"lr\":0.1,\"momentum\":0.9}}", "momentum"},
                 {"optimizer={\"type\":\"SGD\",\"params\":{\"lr\":0.1,\"betas\":[0.9,0.99]}}", "betas"},
                 {"optimizer={\"type\":\"SGD\",\"params\":{\"lr\":0.1,\"lr_decay\":0.1}}", "lr_decay"},
                 {"optimizer={\"type\":\"Lion\",\"params\":{\"lr\":0.1,\"eps\":1e-6}}", "eps"},
                 {"optimizer={\"type\":\"Lion\",\"params\":{\"lr\":0.1,\"eps\":\"auto\"}}", NULL},
                 {"optimizer={\"type\":\"AdamW\",\"params\":{\"lr\":0.1,\"momentum\":0,\"nesterov\":false}}",
                  NULL}, /* as dumps have it */
                 {"optimizer={\"type\":\"Muon\",\"params\":{\"lr\":0.1,\"dampening\":0.1}}", "dampening"},
                 {"optimizer={\"type\":\"adamw\",\"params\":{\"lr\":0.1,\"betas\":[0.9,0.99],\"eps\":1e-6}}", NULL},
                 {"optimizer={\"type\":\"SGD\",\"params\":{\"lr\":0.1,\"momentum\":0.9,\"nesterov\":true}}", NULL}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char said[100] = "has no meaning for optimizer.type";
        config_listen();
        assert_int_equal(parse(cases[i].set, NULL), SPW_OK);
        spw_log_set(NULL, NULL);
        if (cases[i].said != NULL)
            snprintf(said, sizeof said, "optimizer.params.%s has no meaning for optimizer.type", cases[i].said);
        assert_int_equal(strstr(config_heard, said) != NULL, cases[i].said != NULL);
    }
}

/* Updates and learning rates of DeepSpeed 0.19.8's own classes, stepped behind each update as its engine does it; lr 6e-4. */
static void
test_schedules(void **state)
{
    enum { POINTS = 10 };
    static const uint64_t updates[POINTS] = {1, 2, 3, 6, 11, 12, 13, 21, 30, 35};
    static const struct {
        const char *scheduler;
        double lr[POINTS];
    } cases[] = {
        {"WarmupLR\",\"params\":{\"warmup_num_steps\":10,\"warmup_type\":\"linear\",\"warmup_max_lr\":0.1",
         {0, 0, 0.01, 0.04, 0.09, 0.1, 0.1, 0.1, 0.1, 0.1}},
        {"WarmupLR\",\"params\":{\"warmup_num_steps\":10,\"warmup_min_lr\":0.01,\"warmup_max_lr\":0.1",
         {0.01, 0.01, 0.0370926996098, 0.0729073003902, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}},
        {"WarmupDecayLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_steps\":30,\"warmup_min_lr\":0.01,"
         "\"warmup_max_lr\":0.11",
         {0.01, 0.01, 0.0401029995664, 0.0798970004336, 0.11, 0.11, 0.105, 0.065, 0.02, 0.01}},
        {"WarmupDecayLR\",\"params\":{\"warmup_num_steps\":1,\"total_num_steps\":12,\"warmup_min_lr\":0.01,"
         "\"warmup_max_lr\":0.11", /* a warm-up has two steps at least */
         {0.01, 0.01, 0.11, 0.09, 0.04, 0.03, 0.02, 0.01, 0.01, 0.01}},
        {"WarmupCosineLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_steps\":30,\"cos_min_ratio\":0.1,"
         "\"warmup_min_ratio\":0.2,\"warmup_type\":\"linear\"",
         {0, 0.00012, 0.000168, 0.000312, 0.000552, 0.000596675851961, 0.0005867852594, 0.00033, 6.33241480393e-05,
          6e-05}},
        {"WarmupCosineLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_steps\":30",
         {0, 0, 0.000180617997398, 0.000419382002602, 0.0006, 0.000596306871528, 0.000585318423193, 0.00030003,
          3.75312847168e-06, 6e-08}},
    };
    char text[300];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(text, sizeof text, "scheduler={\"type\":\"%s}}", cases[i].scheduler);
        assert_int_equal(parse(text, NULL), SPW_OK);
        for (int k = 0; k < POINTS; k++) {
            double lr = spw_schedule_lr(&c, updates[k]);
            if (fabs(lr - cases[i].lr[k]) > 1e-11 * 6e-4 + 1e-11 * cases[i].lr[k])
                fail_msg("case %zu, update %llu: %.13g, not %.13g", i, (unsigned long long)updates[k], lr,
                         cases[i].lr[k]);
        }
    }
    assert_int_equal(parse("scheduler={}", NULL), SPW_OK);
    assert_true(spw_schedule_lr(&c, 77) == 6e-4);
}

/* With two keys set. */
static void
parse_both(const char *first, const char *second)
{
    const char *const sets[] = {first, second};
    spw_error err = {0};
    if (spw_config_parse(&c, config_whole, "run.json", sets, 2, &err) != SPW_OK)
        fail_msg("%s", err.message);
}

/* A group with a rate of its own has it where the others have the schedule's, and follows the same curve, whatever the optimizer's is. */
static void
test_group_rates(void **state)
{
    static const struct {
        const char *scheduler, *lr;
        uint64_t update;
        double factor; /* of the group's rate */
    } cases[] = {
        {"{}", "3e-4", 9, 1},
        {"{\"type\":\"WarmupLR\",\"params\":{\"warmup_max_lr\":1e-5,\"warmup_num_steps\":4}}", "1e-3", 99, 1},
        {"{\"type\":\"WarmupLR\",\"params\":{\"warmup_num_steps\":10,\"warmup_type\":\"linear\"}}", "1e-3", 7, 0.5},
        {"{\"type\":\"OneCycle\",\"params\":{\"cycle_min_lr\":1e-3,\"cycle_max_lr\":1e-2,"
         "\"cycle_first_step_size\":4}}",
         "1e-3", 5, 1},
        {"{\"type\":\"OneCycle\",\"params\":{\"cycle_min_lr\":1e-3,\"cycle_max_lr\":1e-2,"
         "\"cycle_first_step_size\":4}}",
         "1e-3", 1, 0.1},
        {"{\"type\":\"LRRangeTest\",\"params\":{\"lr_range_test_min_lr\":1e-4}}", "0.5", 1, 1},
        {"{\"type\":\"WarmupCosineLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_steps\":30}}", "1e-3", 12,
         0.993845},
        {"{\"type\":\"WarmupCosineLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_steps\":30}}", "0", 12,
         0.993845},
        {"{\"type\":\"WarmupCosineLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_steps\":30}}", "0", 1, 0}};
    char text[400], rate[60];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double own;
        snprintf(text, sizeof text, "scheduler=%s", cases[i].scheduler);
        snprintf(rate, sizeof rate, "optimizer.params.lr=%s", cases[i].lr);
        parse_both(text, rate);
        own = spw_schedule_group_lr(&c, cases[i].update, spw_schedule_lr(&c, cases[i].update), 7e-5);
        if (!(fabs(own - cases[i].factor * 7e-5) < 1e-10))
            fail_msg("case %zu: %g, not %g of 7e-5", i, own, cases[i].factor);
    }
}

/* DeepSpeed's defaults that hang on a type; "auto" is what a Trainer fills in, and null is the optimizer's rate there. */
static void
test_defaults_by_type(void **state)
{
    static const char *const decay =
        "scheduler={\"type\":\"WarmupDecayLR\",\"params\":{\"warmup_num_steps\":2,\"total_num_steps\":9%s}}";
    char text[200];
    (void)state;
    snprintf(text, sizeof text, decay, "");
    parse_both(text, "optimizer.params.lr=1e-5");
    assert_true(spw_schedule_lr(&c, 4) == 0.001);
    snprintf(text, sizeof text, decay, ",\"warmup_max_lr\":\"auto\"");
    parse_both(text, "optimizer.params.lr=1e-5");
    assert_true(spw_schedule_lr(&c, 4) == 1e-5);
    snprintf(text, sizeof text, decay, ",\"warmup_max_lr\":null");
    parse_both(text, "optimizer.params.lr=1e-5");
    assert_true(spw_schedule_lr(&c, 4) == 1e-5);
    parse_both("optimizer.type=Adagrad", "optimizer.params={\"lr\":0.1}");
    assert_true(c.optimizer.eps == 1e-10);
    parse_both("optimizer.type=Adagrad", "optimizer.params={}");
    assert_true(c.optimizer.lr == 0.01);
    parse_both("optimizer.type=Adagrad", "optimizer.params={\"lr\":0.1,\"eps\":1e-7}");
    assert_true(c.optimizer.eps == 1e-7);
    parse_both("optimizer.type=adagrad", "optimizer.params={\"lr\":0.1,\"eps\":\"auto\"}");
    assert_true(c.optimizer.eps == 1e-8);
    parse_both("optimizer.type=AdamW", "optimizer.params={\"lr\":0.1}");
    assert_true(c.optimizer.eps == 1e-8);
    assert_true(c.optimizer.weight_decay == 0);
    parse_both("optimizer.type=AdamW", "optimizer.params={\"lr\":0.1,\"torch_adam\":true}");
    assert_true(c.optimizer.weight_decay == 0.01);
    parse_both("optimizer.type=Adam", "optimizer.params={\"torch_adam\":true}");
    assert_true(c.optimizer.weight_decay == 0.01);
    parse_both("optimizer.type=Adam", "optimizer.params={\"torch_adam\":true,\"adam_w_mode\":false}");
    assert_true(c.optimizer.weight_decay == 0);
    parse_both("optimizer.type=adamw", "optimizer.params={\"torch_adam\":true}");
    assert_true(c.optimizer.weight_decay == 0.01);
    parse_both("optimizer.type=AdamW", "optimizer.params={\"torch_adam\":true,\"weight_decay\":0.1}");
    assert_true(c.optimizer.weight_decay == 0.1);
    parse_both("optimizer.type=AdamW", "optimizer.params={\"torch_adam\":true,\"weight_decay\":\"auto\"}");
    assert_true(c.optimizer.weight_decay == 0);
}

/* Muon's rates and defaults are DeepSpeed's, and all survive printing and parsing; its method is one of two, which is not kept. */
static void
test_muon(void **state)
{
    static const struct {
        const char *params;
        double lr, muon_lr, adam_lr;
    } rates[] = {{"{}", 0.02, 0.02, 3e-4},
                 {"{\"lr\":\"auto\",\"muon_lr\":null}", 5e-5, 5e-5, 5e-5},
                 {"{\"lr\":0.5}", 0.5, 0.5, 0.5},
                 {"{\"muon_lr\":0.25}", 0.25, 0.25, 3e-4},
                 {"{\"adam_lr\":0.125}", 0.02, 0.02, 0.125},
                 {"{\"adam_lr\":0.125,\"muon_lr\":0.25}", 0.25, 0.25, 0.125},
                 {"{\"adam_lr\":0.125,\"lr\":0.5}", 0.5, 0.5, 0.125},
                 {"{\"lr\":0.5,\"muon_lr\":0.25,\"ns_method\":\"standard\"}", 0.5, 0.25, 0.5},
                 {"{\"adam_lr\":0,\"lr\":0.5,\"muon_lr\":0,\"ns_method\":\"gram\"}", 0.5, 0, 0}};
    static const char *const types[] = {"Muon", "muon"};
    char set[300], *text;
    spw_error err = {0};
    (void)state;
    for (size_t i = 0; i < 2 * sizeof rates / sizeof rates[0]; i++) {
        size_t k = i / 2;
        snprintf(set, sizeof set, "optimizer={\"params\":%s,\"type\":\"%s\"}", rates[k].params, types[i % 2]);
        if (parse(set, &err) != SPW_OK)
            fail_msg("%s: %s", set, err.message);
        if (c.optimizer.lr != rates[k].lr || c.optimizer.muon_lr != rates[k].muon_lr ||
            c.optimizer.adam_lr != rates[k].adam_lr)
            fail_msg("%s: lr %g, muon_lr %g, adam_lr %g", set, c.optimizer.lr, c.optimizer.muon_lr,
                     c.optimizer.adam_lr);
        assert_true(c.optimizer.momentum == 0.95 && c.optimizer.nesterov && c.optimizer.ns_steps == 5);
        assert_true(c.optimizer.beta1 == 0.9 && c.optimizer.beta2 == 0.95 && c.optimizer.eps == 1e-10);
        assert_true(c.optimizer.weight_decay == 0 && c.optimizer.adam_w_mode);
        text = spw_config_dump(&c);
        if (spw_config_parse(&d, text, "dump", NULL, 0, &err) != SPW_OK)
            fail_msg("%s: %s", set, err.message);
        spw_mem_free(text);
        d.scheduler.warmup_max_lr = c.scheduler.warmup_max_lr;
        if (memcmp(&c, &d, sizeof c) != 0)
            fail_msg("%s does not survive", set);
    }
    snprintf(
        set, sizeof set, "optimizer={\"type\":\"Muon\",\"params\":%s}",
        "{\"momentum\":0.5,\"nesterov\":false,\"ns_steps\":7,\"betas\":[0.8,0.9],\"eps\":1e-6,\"weight_decay\":0.1}");
    for (int again = 0; again < 2; again++) {
        if (again == 0 ? parse(set, &err) != SPW_OK : spw_config_parse(&c, text, "dump", NULL, 0, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_true(c.optimizer.momentum == 0.5 && !c.optimizer.nesterov && c.optimizer.ns_steps == 7);
        assert_true(c.optimizer.beta1 == 0.8 && c.optimizer.beta2 == 0.9 && c.optimizer.eps == 1e-6);
        assert_true(c.optimizer.weight_decay == 0.1);
        if (again == 0)
            text = spw_config_dump(&c);
    }
    spw_mem_free(text);
    assert_int_equal(parse("optimizer={\"type\":\"SGD\"}", &err), SPW_OK); /* nothing of it stays with another type */
    assert_true(c.optimizer.momentum == 0 && !c.optimizer.nesterov && c.optimizer.lr == 0.001);
    assert_true(isnan(c.optimizer.muon_lr) && isnan(c.optimizer.adam_lr));
    text = spw_config_dump(&c);
    assert_non_null(text);
    assert_null(strstr(text, "ns_steps"));
    assert_null(strstr(text, "muon_lr"));
    spw_mem_free(text);
}

/* What Muon does not do is refused, and done with another type; schedules are about lr, which may be the matrices'. */
static void
test_muon_refused(void **state)
{
    enum { MORE = 3 };
    static const struct {
        const char *says; /* NULL: taken */
        const char *set[MORE];
    } cases[] = {{NULL, {"spillway.state_format=\"fp32\""}},
                 {NULL, {"spillway.state_format=\"mixed\""}},
                 {NULL, {"spillway.state_format=\"split\""}},
                 {NULL, {"spillway.state_format=null", "bf16.enabled=false"}},
                 {NULL, {"spillway.state_format=null", "bf16.enabled=false", "fp16.enabled=true"}},
                 {NULL, {"spillway.state_format=\"split-bf16\""}},
                 {NULL, {"spillway.state_format=\"split-int8\""}},
                 {NULL, {"spillway.state_format=\"split24-int8\""}},
                 {"spillway.delayed_update above 0: not with optimizer.type Muon yet", {"spillway.delayed_update=1"}},
                 {NULL, {"spillway.gradients=\"host\""}}};
    spw_error err = {0};
    (void)state;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; i++) {
        bool muon = i % 2 == 0;
        const char *says = muon ? cases[i / 2].says : NULL;
        const char *sets[1 + MORE] = {muon ? "optimizer={\"type\":\"Muon\"}" : "optimizer={\"type\":\"AdamW\"}"};
        uint32_t count = 1;
        spw_status st;
        while (count <= MORE && cases[i / 2].set[count - 1] != NULL) {
            sets[count] = cases[i / 2].set[count - 1];
            count++;
        }
        st = spw_config_parse(&c, config_whole, "run.json", sets, count, &err);
        if (says == NULL ? st != SPW_OK : st != SPW_ECONFIG || strstr(err.message, says) == NULL)
            fail_msg("%s %s: %s", sets[0], sets[1], err.message);
    }
    parse_both("optimizer={\"type\":\"Muon\",\"params\":{\"muon_lr\":0.5}}", "scheduler={\"type\":\"WarmupLR\"}");
    assert_true(spw_schedule_lr(&c, 5000) == 0.5);
    assert_true(fabs(spw_schedule_group_lr(&c, 5000, 0.5, c.optimizer.adam_lr) - 3e-4) < 1e-18);
}

/* Updates, learning rates and beta1 of DeepSpeed 0.19.8's own classes, which were stepped as its engine does it. */
static void
test_cycles(void **state)
{
    static const struct {
        const char *scheduler;
        struct {
            uint64_t update;
            double lr, beta1;
        } at[8];
    } cases[] = {
        {"LRRangeTest\",\"params\":{\"lr_range_test_min_lr\":1e-4,\"lr_range_test_step_size\":10,"
         "\"lr_range_test_step_rate\":5",
         {{1, 0.0001, 0.9}, {2, 0.00015, 0.9}, {7, 0.0004, 0.9}, {11, 0.0006, 0.9}, {25, 0.0013, 0.9}}},
        {"LRRangeTest\",\"params\":{\"lr_range_test_min_lr\":1e-4,\"lr_range_test_step_size\":10,"
         "\"lr_range_test_step_rate\":5,\"lr_range_test_staircase\":true",
         {{1, 0.0001, 0.9}, {10, 0.0001, 0.9}, {11, 0.0006, 0.9}, {25, 0.0011, 0.9}}},
        {"OneCycle\",\"params\":{\"cycle_min_lr\":1e-4,\"cycle_max_lr\":1e-3,\"cycle_first_step_size\":10,"
         "\"cycle_second_step_size\":20,\"decay_step_size\":5,\"decay_lr_rate\":0.5,\"decay_mom_rate\":0.001,"
         "\"cycle_min_mom\":0.85,\"cycle_max_mom\":0.95",
         {{1, 0.0001, 0.85},
          {2, 0.00019, 0.94},
          {6, 0.00055, 0.9},
          {11, 0.001, 0.85},
          {12, 0.000955, 0.855},
          {31, 0.0001, 0.95},
          {32, 9.09090909090909e-05, 0.95019},
          {50, 3.4482758620689657e-05, 0.95361}}},
        {"OneCycle\",\"params\":{\"cycle_min_lr\":1e-4,\"cycle_max_lr\":1e-3,\"cycle_first_step_size\":8,"
         "\"cycle_first_stair_count\":4,\"decay_lr_rate\":0.5",
         {{1, 0.0001, 0.8},
          {2, 0.0001, 0.9},
          {5, 0.00055, 0.85},
          {9, 0.001, 0.8},
          {12, 0.00055, 0.85},
          {15, 0.000325, 0.875},
          {17, 0.0001, 0.9},
          {40, 0.0001, 0.9}}},
        {"OneCycle\",\"params\":{\"cycle_min_lr\":0,\"cycle_max_lr\":1e-3,\"cycle_first_step_size\":3,"
         "\"cycle_second_step_size\":7,\"cycle_first_stair_count\":2,\"cycle_second_stair_count\":5",
         {{2, 0, 0.9},
          {3, 0.0005, 0.85},
          {7, 0.0004, 0.86},
          {9, 0.0002, 0.88},
          {10, 0, 0.9},
          {11, 0, 0.9},
          {14, 0, 0.9}}},
        {"OneCycle\",\"params\":{\"cycle_min_lr\":0,\"cycle_max_lr\":1e-3,\"cycle_first_step_size\":100,"
         "\"cycle_first_stair_count\":50", /* 58 / 100 * 50 is rounded to less than 29 */
         {{58, 0.00056, 0.844}, {59, 0.00058, 0.842}, {143, 0.00058, 0.842}, {144, 0.00056, 0.844}}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[500];
        spw_error err = {0};
        snprintf(text, sizeof text, "scheduler={\"type\":\"%s}}", cases[i].scheduler);
        if (parse(text, &err) != SPW_OK)
            fail_msg("%s", err.message);
        for (int k = 0; k < 8 && cases[i].at[k].update > 0; k++) {
            uint64_t u = cases[i].at[k].update;
            double beta1 = 0.9, beta2 = 0.999;
            spw_schedule_betas(&c, u, &beta1, &beta2);
            if (!(fabs(spw_schedule_lr(&c, u) - cases[i].at[k].lr) < 1e-12 &&
                  fabs(beta1 - cases[i].at[k].beta1) < 1e-12))
                fail_msg("case %zu, update %llu: lr %.17g, beta1 %.17g", i, (unsigned long long)u,
                         spw_schedule_lr(&c, u), beta1);
            assert_true(beta2 == (i < 2 ? 0.999 : 0.99));
        }
    }
    assert_int_equal(parse("scheduler={\"type\":\"OneCycle\",\"params\":{\"cycle_min_lr\":0,\"cycle_max_lr\":1,"
                           "\"cycle_momentum\":false}}",
                           NULL),
                     SPW_OK);
    {
        double beta1 = 0.7, beta2 = 0.8;
        spw_schedule_betas(&c, 5, &beta1, &beta2);
        assert_true(beta1 == 0.7 && beta2 == 0.8);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decay),
        cmocka_unit_test(test_said_of_optimizers),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_group_rates),
        cmocka_unit_test(test_defaults_by_type),
        cmocka_unit_test(test_muon),
        cmocka_unit_test(test_muon_refused),
        cmocka_unit_test(test_cycles),
    };
    return cmocka_run_group_tests_name("config_optimizer", tests, NULL, NULL);
}
