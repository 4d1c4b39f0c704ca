/* The plan: the order in which memory is filled, what fits and what does not, and the reasons it gives. */
#include "lib_plan.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

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
    spw_model *model = plan_make_model();
    const double flops[3] = {1e9, 1e11, 1e14}, AGAIN = 1.02;
    (void)state;
    for (int format = SPW_STATE_FP32; format <= SPW_STATE_SPLIT; format++) {
        double last[3] = {INFINITY, INFINITY, INFINITY};
        uint64_t last_bytes = UINT64_MAX;
        uint32_t fitting = 0;
        plan_nvme_config(&c, (spw_state_format)format);
        assert_int_equal(plan_of(&c, model, &all, NULL), SPW_OK);
        for (uint64_t budget = PLAN_PROCESS_BYTES; budget < 2 * all.host_bytes + all.weight_nvme + all.record_nvme;
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
                spw_rates r = plan_some_rates();
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

/* What the machine has left bounds every plan: slots of auto shrink into it, and what does not fit is refused. */
static void
test_room(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = plan_make_model();
    uint32_t fitting = 0, refused = 0;
    (void)state;
    for (int budget = 0; budget < 2; budget++) {
        for (uint64_t room = 1 << 20; room < 64 << 20; room += 409600) {
            spw_error err = {0};
            spw_status st;
            plan_nvme_config(&c, SPW_STATE_SPLIT);
            if (budget)
                c.run.host_memory = PLAN_PROCESS_BYTES + (24 << 20);
            st = plan_in_room(&c, model, room, &p, &err);
            fitting += st == SPW_OK;
            refused += st == SPW_ENOFIT;
            if (st == SPW_OK)
                assert_true(p.host_bytes + p.device_bytes <= PLAN_PROCESS_BYTES + room);
            else
                assert_true(st == SPW_ENOFIT && p.lack == SPW_LACK_ROOM &&
                            p.host_bytes + p.device_bytes > PLAN_PROCESS_BYTES + room);
        }
    }
    assert_true(fitting > 50 && refused > 20);
    spw_model_destroy(model);
}

/*
 * A device whose memory is the host's makes do with what the host leaves: with the memory that is named where nothing fits, and with all above it,
 * there is a plan, and with little less there is none. A budget of its own stays.
 */
static void
test_room_of_device(void **state)
{
    static spw_config c;
    static spw_plan whole, p;
    spw_model *model = plan_make_model();
    spw_error err = {0};
    uint64_t least;
    uint32_t smaller = 0;
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    assert_int_equal(plan_in_room(&c, model, UINT64_MAX, &whole, &err), SPW_OK);
    assert_int_equal(plan_in_room(&c, model, 1 << 20, &p, &err), SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_ROOM);
    least = p.least_bytes - PLAN_PROCESS_BYTES;
    assert_true(least < whole.device_bytes);
    assert_int_equal(plan_in_room(&c, model, least / 16 * 15, &p, &err), SPW_ENOFIT);
    for (uint64_t room = least; room < least + (16 << 20); room += 65536) {
        assert_int_equal(plan_in_room(&c, model, room, &p, &err), SPW_OK);
        assert_true(p.host_bytes + p.device_bytes <= PLAN_PROCESS_BYTES + room);
        smaller += p.cache_device < whole.cache_device;
    }
    assert_true(smaller > 0);
    c.run.device_memory = whole.device_bytes;
    assert_int_equal(plan_in_room(&c, model, least, &p, &err), SPW_ENOFIT);
    spw_model_destroy(model);
}

/*
 * With device_memory auto what is left holds more gathered units than the three blocks that go by, until all come over the link once a step. A budget and
 * max_live_parameters stay what they are, and what lies between checkpoints comes first.
 */
static void
test_gathers_what_is_left(void **state)
{
    static spw_config c;
    static spw_plan bound, whole, p;
    spw_model *model = plan_make_model();
    spw_error err = {0};
    uint64_t last = 0;
    uint32_t between = 0;
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    snprintf(c.run.recompute, sizeof c.run.recompute, "always");
    assert_int_equal(plan_in_room(&c, model, UINT64_MAX, &whole, &err), SPW_OK);
    c.run.device_memory = whole.device_bytes - whole.cache_device / 2;
    assert_int_equal(plan_in_room(&c, model, UINT64_MAX, &bound, &err), SPW_OK);
    assert_true(bound.cache_device <= whole.cache_device / 2);
    c.run.device_memory = SPW_AUTO;
    c.zero.max_live_parameters = bound.cache_device / sizeof(float);
    assert_int_equal(plan_in_room(&c, model, UINT64_MAX, &p, &err), SPW_OK);
    assert_true(p.cache_device >= bound.cache_device && p.cache_device < bound.cache_device + 4096 * sizeof(float));
    assert_int_equal(whole.traffic[SPW_PACE_DEFAULT].h2d, whole.elems * 2); /* bf16, once */
    assert_true(p.traffic[SPW_PACE_DEFAULT].h2d > whole.elems * 5 / 2);
    c.zero.max_live_parameters = 1000000000000;
    for (uint64_t room = 8 << 20; room < 64 << 20; room += 409600) {
        if (plan_in_room(&c, model, room, &p, &err) != SPW_OK)
            continue;
        assert_true(p.host_bytes + p.device_bytes <= PLAN_PROCESS_BYTES + room);
        assert_true(p.cache_device <=
                    whole.cache_device); /* what the host takes besides is not always more with more room */
        between += p.cache_device > last && last > 0;
        last = p.cache_device;
    }
    assert_int_equal(last, whole.cache_device);
    assert_true(between > 1);
    spw_model_destroy(model);
}

/* Weights that are read again every step come first; when slots hold them all, records do. */
static void
test_filling_order(void **state)
{
    static spw_config c;
    static spw_plan p, least;
    spw_model *model = plan_make_model();
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
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
    spw_model *model = plan_make_model();
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
    snprintf(c.zero.optimizer_path.item[0], sizeof c.zero.optimizer_path.item[0], "%s", plan_dir);
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
    spw_model *model = plan_make_model();
    const char *open[] = {"spillway.activations",  "spillway.host_memory",  "spillway.device_memory",
                          "spillway.weight_slots", "spillway.record_slots", "spillway.micro_batches_per_pass",
                          "gathered units"};
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
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

static bool
decides(const spw_config *c, const spw_model *model, const char *name)
{
    static spw_plan p;
    bool said = false;
    assert_int_equal(plan_of(c, model, &p, NULL), SPW_OK);
    for (uint32_t k = 0; k < p.decision_count; k++)
        said = said || strcmp(p.decisions[k].name, name) == 0;
    return said;
}

/* What this program leaves out by default and DeepSpeed does: clipping, and in bf16 without it a look at every gradient. */
static void
test_left_out(void **state)
{
    static spw_config c;
    spw_model *model = plan_make_model();
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    c.bf16 = true;
    c.gradient_clipping = 0;
    assert_true(decides(&c, model, "gradient_clipping") && decides(&c, model, "bf16.check_grad_overflow"));
    c.bf16_check_overflow = true;
    assert_true(decides(&c, model, "gradient_clipping") && !decides(&c, model, "bf16.check_grad_overflow"));
    c.bf16_check_overflow = false;
    c.gradient_clipping = 1;
    assert_true(!decides(&c, model, "gradient_clipping") && !decides(&c, model, "bf16.check_grad_overflow"));
    c.gradient_clipping = 0;
    c.bf16 = false;
    assert_false(decides(&c, model, "bf16.check_grad_overflow"));
    spw_model_destroy(model);
}

/* So many swap folders as there can be: each one's share is said. */
static void
test_decisions_of_paths(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = plan_make_model();
    uint32_t said = 0;
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    for (uint32_t i = 0; i < SPW_PATHS_MAX; i++)
        snprintf(c.zero.param_path.item[i], sizeof c.zero.param_path.item[i], "%s/%u", plan_dir, i);
    c.zero.param_path.count = SPW_PATHS_MAX;
    c.zero.optimizer_path = c.zero.param_path;
    assert_int_equal(plan_of(&c, model, &p, NULL), SPW_OK);
    assert_int_equal(p.path_count, SPW_PATHS_MAX);
    for (uint32_t k = 0; k < p.decision_count; k++)
        said += strncmp(p.decisions[k].name, plan_dir, strlen(plan_dir)) == 0;
    assert_int_equal(said, SPW_PATHS_MAX);
    spw_model_destroy(model);
}

/* Any allocation may fail: an error, nothing left behind, and the same plan afterwards. */
static void
test_no_memory(void **state)
{
    static spw_config c;
    static spw_plan p, again;
    spw_model *model = plan_make_model();
    bool through = false;
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
    c.run.host_memory = PLAN_PROCESS_BYTES + (5 << 20);
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

/* A gradient leaves the device before the next is begun where two do not fit, and nowhere else; host memory is not what lacks then. */
static void
test_single_gradient(void **state)
{
    static spw_config c;
    static spw_plan p, wide;
    spw_model *model = plan_make_model();
    spw_prediction x;
    const spw_rates rates = {.flops = 1e9, .d2h = 1e6, .h2d = 1e9, .optimizer = 1e9};
    uint64_t least;
    uint32_t single = 0, two = 0;
    (void)state;
    plan_nvme_config(&c, SPW_STATE_SPLIT);
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

/* The smallest budget that the plan names does, and one byte less does not. */
static void
test_least_budget(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = plan_make_model();
    (void)state;
    for (int k = 0; k < 2; k++) {
        for (uint32_t ranks = 1; ranks <= 8; ranks++) {
            plan_nvme_config(&c, SPW_STATE_SPLIT);
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

static double
flops_of(const spw_config *c, double targeted)
{
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_plan p;
    spw_error err = {0};
    DONE(spw_model_build(&model, &c->model, &err));
    DONE(spw_engine_create(
        &e, &(spw_engine_options){.config = c, .model = model, .plan_only = true, .targeted = targeted, .plan_out = &p},
        &err));
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return p.flops;
}

/* What heads do not compute of prompts and padding is not counted: a product forward, two backward, and of preferences the logits again. */
static void
test_targeted(void **state)
{
    const spw_family families[] = {SPW_FAMILY_GPT2, SPW_FAMILY_LLAMA}; /* tied, and not */
    (void)state;
    for (int k = 0; k < 2; k++) {
        spw_config c;
        double product;
        tiny_config(&c, SPW_STATE_FP32);
        tiny_model_config(&c.model, families[k]);
        product =
            2 * (double)(c.model.vocab * c.model.width) * (double)(c.micro_batch * c.accumulation * c.data.seq_length);
        for (int whole = 0; whole < 2; whole++) { /* by its data's own bits too */
            if (whole)
                snprintf(c.data.documents, sizeof c.data.documents, "whole");
            assert_true(flops_of(&c, 1) == flops_of(&c, 0));
            assert_true(fabs(flops_of(&c, 0) - flops_of(&c, 0.25) - 0.75 * 3 * product) < 1e-9 * product);
        }
        tiny_prefer(&c, 0);
        assert_true(fabs(flops_of(&c, 0) - flops_of(&c, 0.25) - 0.75 * 4 * product) < 1e-9 * product);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_monotonic),
                                       cmocka_unit_test(test_filling_order),
                                       cmocka_unit_test(test_room),
                                       cmocka_unit_test(test_room_of_device),
                                       cmocka_unit_test(test_gathers_what_is_left),
                                       cmocka_unit_test(test_activations),
                                       cmocka_unit_test(test_decisions),
                                       cmocka_unit_test(test_left_out),
                                       cmocka_unit_test(test_decisions_of_paths),
                                       cmocka_unit_test(test_no_memory),
                                       cmocka_unit_test(test_single_gradient),
                                       cmocka_unit_test(test_least_budget),
                                       cmocka_unit_test(test_targeted)};
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
