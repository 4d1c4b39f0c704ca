/* What does not fit: the nearest configuration that does is suggested, and does. */
#include "lib_plan.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <cmocka.h>

static const char base[] =
    "{\"model\": {\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_positions\": 64, \"n_embd\": 128, \"n_layer\": 4, "
    "\"n_head\": 4}, \"data\": {\"path\": [\"x\"], \"seq_length\": 64}, \"train_micro_batch_size_per_gpu\": 6, "
    "\"gradient_accumulation_steps\": 2, \"bf16\": {\"enabled\": true}, \"zero_optimization\": {\"stage\": 3, "
    "\"offload_param\": {\"device\": \"cpu\"}, \"offload_optimizer\": {\"device\": \"cpu\"}}, "
    "\"spillway\": {\"device\": \"cpu\"}}";

/* On a machine that has room for everything. */
static void
find_nearest(const spw_config *c, const spw_model *model, spw_suggestion *s)
{
    spw_error err = {0};
    assert_int_equal(spw_plan_nearest(&(spw_engine_options){.config = c,
                                                            .model = model,
                                                            .process_bytes = PLAN_PROCESS_BYTES,
                                                            .room_bytes = UINT64_MAX},
                                      s, &err),
                     SPW_OK);
}

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
            spw_engine_options o = {.config = &c, .process_bytes = PLAN_PROCESS_BYTES, .room_bytes = UINT64_MAX};
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
            .config = &c, .plan_only = true, .process_bytes = PLAN_PROCESS_BYTES, .room_bytes = room, .plan_out = &p};
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
            assert_true(p.host_bytes + p.device_bytes <= PLAN_PROCESS_BYTES + room);
            spw_engine_destroy(e);
        }
        spw_model_destroy(model);
    }
    assert_true(found > 2 && never > 0);
}

/* Who draws text or evaluates has options, not keys. */
static void
test_room_of_inference(void **state)
{
    static spw_config c;
    static spw_plan p;
    spw_engine *e = NULL;
    spw_model *model = NULL;
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw_config_parse(&c, base, "base", NULL, 0, &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    assert_int_equal(spw_engine_create(&e,
                                       &(spw_engine_options){.config = &c,
                                                             .model = model,
                                                             .inference = true,
                                                             .plan_only = true,
                                                             .plan_out = &p,
                                                             .process_bytes = PLAN_PROCESS_BYTES,
                                                             .room_bytes = 1 << 20},
                                       &err),
                     SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_ROOM);
    assert_non_null(strstr(err.message, "(--nvme, --codes)"));
    assert_null(strstr(err.message, "spillway."));
    spw_model_destroy(model);
}

/* What is left is a rank's share, and said to be one. */
static void
test_room_of_ranks(void **state)
{
    static spw_config c;
    static spw_plan p;
    const char *overrides[] = {"spillway.ranks=4", "train_batch_size=null", "train_micro_batch_size_per_gpu=64"};
    spw_model *model = NULL;
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw_config_parse(&c, base, "base", overrides, 3, &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    assert_int_equal(plan_in_room(&c, model, 10 << 20, &p, &err), SPW_ENOFIT);
    assert_true(p.lack == SPW_LACK_ROOM && p.device_bytes > p.host_bytes);
    assert_non_null(strstr(err.message, "has 10.0 MiB left for each of 4 ranks"));
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
    find_nearest(&c, model, &s);
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

static const char experts[] =
    "{\"model\": {\"model_type\": \"qwen3_moe\", \"vocab_size\": 256, \"max_position_embeddings\": 64, "
    "\"hidden_size\": 64, "
    "\"num_hidden_layers\": 8, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 16, "
    "\"moe_intermediate_size\": 128, \"num_experts\": 16, \"num_experts_per_tok\": 2}, \"data\": {\"path\": [\"x\"], "
    "\"seq_length\": 64}, \"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 4, \"bf16\": "
    "{\"enabled\": "
    "true}, \"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \".\"}, "
    "\"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \".\"}}, \"spillway\": {\"device\": \"cpu\", "
    "\"chunk_elems\": 65536, \"recompute\": \"always\", \"activations\": \"nvme\"}}";

/* Plans the model with experts with these overrides; what it lacks, and the budget that would do. */
static spw_status
plan_experts(const char *const *overrides, uint32_t count, uint64_t *least_out)
{
    static spw_config c;
    static spw_plan p;
    spw_model *model = NULL;
    spw_error err = {0};
    spw_status st;
    assert_int_equal(spw_config_parse(&c, experts, "experts", overrides, count, &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    st = plan_of(&c, model, &p, &err);
    *least_out = p.least_bytes;
    spw_model_destroy(model);
    return st;
}

static uint64_t
least_of(const char *budget, const char *const *others, uint32_t count)
{
    const char *overrides[8];
    char text[96];
    uint64_t least;
    snprintf(text, sizeof text, "spillway.%s=4096", budget);
    overrides[0] = text;
    for (uint32_t i = 0; i < count; i++)
        overrides[i + 1] = others[i];
    assert_int_equal(plan_experts(overrides, count + 1, &least), SPW_ENOFIT);
    return least;
}

/*
 * Neither has host memory room for gradients nor the device for all experts of a layer: gradients wait on nvme, turns serve all micro-batches, and
 * a plan finds both by itself.
 */
static void
test_experts(void **state)
{
    const char *waiting[] = {"spillway.gradients=nvme", "spillway.expert_turns=1"};
    char host[96], device[96];
    const char *overrides[2] = {host, device};
    const uint64_t host_least = least_of("host_memory", waiting, 1), at_once = least_of("device_memory", waiting, 2),
                   in_turns = least_of("device_memory", waiting, 1);
    uint64_t least;
    (void)state;
    print_message("least host memory %llu, device memory %llu, in turns %llu\n", (unsigned long long)host_least,
                  (unsigned long long)at_once, (unsigned long long)in_turns);
    assert_true(in_turns < at_once);
    snprintf(host, sizeof host, "spillway.host_memory=%llu", (unsigned long long)host_least);
    snprintf(device, sizeof device, "spillway.device_memory=%llu", (unsigned long long)at_once);
    assert_int_equal(plan_experts(overrides, 2, &least), SPW_OK);
    snprintf(device, sizeof device, "spillway.device_memory=%llu", (unsigned long long)in_turns);
    assert_int_equal(plan_experts(overrides, 2, &least), SPW_OK);
    snprintf(device, sizeof device, "spillway.device_memory=%llu", (unsigned long long)in_turns - 4096);
    assert_int_equal(plan_experts(overrides, 2, &least), SPW_ENOFIT);
}

/* Nor has the device room for what is held of all: a smaller batch is no way out among others, but the largest that fits is named, with what it takes. */
static void
test_nearest_batch(void **state)
{
    static spw_config c;
    static spw_suggestion s;
    const char *halved[] = {"spillway.gradients=nvme", "train_micro_batch_size_per_gpu=2",
                            "gradient_accumulation_steps=1"};
    char host[96], device[96], batch[64];
    const char *overrides[16] = {host, device, "gradient_accumulation_steps=64"};
    const uint64_t more = PLAN_PROCESS_BYTES / 16 + (1 << 20); /* which is wanted for the process that follows */
    uint64_t least;
    bool named = false;
    spw_model *model = NULL;
    spw_error err = {0};
    (void)state;
    snprintf(host, sizeof host, "spillway.host_memory=%llu",
             (unsigned long long)(least_of("host_memory", halved, 1) + more));
    snprintf(device, sizeof device, "spillway.device_memory=%llu",
             (unsigned long long)least_of("device_memory", halved, 3));
    assert_int_equal(spw_config_parse(&c, experts, "experts", overrides, 3, &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    find_nearest(&c, model, &s);
    spw_model_destroy(model);
    print_message("a batch of %llu\n", (unsigned long long)s.batch);
    assert_false(s.found);
    assert_true(s.batch >= 2 && s.batch < 64);
    snprintf(batch, sizeof batch, "train_batch_size=%llu", (unsigned long long)s.batch);
    for (uint32_t i = 0; i < s.count; i++) {
        overrides[i + 3] = s.set[i];
        named = named || strcmp(s.set[i], batch) == 0;
    }
    assert_true(named);
    assert_int_equal(plan_experts(overrides, s.count + 3, &least), SPW_OK);
}

/* The least device memory of four ranks with one long sequence each, or shared by so many, in tiles as small as they become. */
static uint64_t
least_shared(const spw_model *model, spw_config *c, uint32_t sharers)
{
    static spw_plan p;
    const char *overrides[12] = {
        "spillway.ranks=4",     "train_micro_batch_size_per_gpu=1", "model.n_positions=8192",
        "data.seq_length=8192", "gradient_accumulation_steps=4",    "spillway.grad_dtype=fp32"};
    spw_error err = {0};
    assert_int_equal(spw_config_parse(c, base, "base", overrides, 6, &err), SPW_OK);
    c->run.activations = SPW_TIER_NVME;
    c->zero.param_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, ".");
    c->sequence_ranks = sharers;
    c->run.tile_tokens = 512;
    c->run.micro_batches_per_pass = 1;
    c->run.device_memory = 4096;
    assert_int_equal(plan_of(c, model, &p, &err), SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_DEVICE);
    return p.least_bytes;
}

/* One sequence is too long for a rank's device: ranks share it, and the batch stays. */
static void
test_nearest_shared(void **state)
{
    static spw_config c, again;
    static spw_suggestion s;
    spw_model *model = NULL;
    spw_error err = {0};
    uint64_t alone, shared;
    bool named = false;
    (void)state;
    assert_int_equal(spw_config_parse(&c, base, "base",
                                      (const char *const[]){"model.n_positions=8192", "data.seq_length=8192"}, 2, &err),
                     SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    shared = least_shared(model, &again, 4);
    alone = least_shared(model, &c, 1);
    print_message("least device memory %llu, shared by four %llu\n", (unsigned long long)alone,
                  (unsigned long long)shared);
    assert_true(3 * shared < 2 * alone);
    c.run.device_memory = alone - 4096;
    find_nearest(&c, model, &s);
    assert_true(s.found);
    for (uint32_t i = 0; i < s.count; i++)
        named = named || strcmp(s.set[i], "sequence_parallel_size=2") == 0;
    assert_true(named);
    c.run.device_memory = shared + (1 << 20); /* for more micro-batches: the batch stays */
    find_nearest(&c, model, &s);
    assert_true(s.found);
    named = false;
    for (uint32_t i = 0; i < s.count; i++) {
        named = named || strcmp(s.set[i], "sequence_parallel_size=4") == 0;
        assert_null(strstr(s.set[i], "train_batch_size"));
    }
    assert_true(named);
    spw_model_destroy(model);
}

/*
 * 30 000 parameters in 10 000 units, and nothing fits: hundreds of plans are made before that is known. What looks at all units for each parameter, or at
 * all parameters of a block for each expert, takes ten times as long as this may.
 */
static void
test_nearest_large(void **state)
{
    static const char *const large[] = {
        "model.num_hidden_layers=62", "model.num_experts=160",       "spillway.device=cuda",
        "spillway.chunk_elems=4096",  "gradient_clipping=1",         "model.hidden_size=128",
        "spillway.host_memory=1GiB",  "model.num_attention_heads=4", "spillway.device_memory=1MiB"};
    static spw_config c;
    static spw_suggestion s;
    uint32_t count;
    const spw_gpu_spec *gpu = spw_gpu_get_specs(&count);
    uint64_t begin;
    double seconds;
    spw_model *model = NULL;
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw_config_parse(&c, experts, "experts", large, sizeof large / sizeof large[0], &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    assert_true(model->param_count > 30000);
    begin = spw_process_cpu_ns();
    assert_int_equal(spw_plan_nearest(&(spw_engine_options){.config = &c,
                                                            .model = model,
                                                            .gpu = gpu,
                                                            .process_bytes = PLAN_PROCESS_BYTES,
                                                            .room_bytes = c.run.host_memory},
                                      &s, &err),
                     SPW_OK);
    seconds = 1e-9 * (double)(spw_process_cpu_ns() - begin);
    spw_model_destroy(model);
    assert_false(s.found);
    print_message("%.2f s of processor time\n", seconds);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(seconds < 6);
#endif
}

/*
 * Gradients that host memory does not hold would go to nvme through one window, and the disk has no room for them: it is host memory that is
 * lacking, and in bf16 they fit there.
 */
static void
test_nearest_full_disk(void **state)
{
    static spw_config c;
    static spw_plan p;
    static spw_suggestion s;
    const uint64_t more = PLAN_PROCESS_BYTES / 16 + (1 << 20);
    const char *waits[] = {"model.vocab_size=16384",
                           "model.n_layer=8",
                           "zero_optimization.offload_param.device=nvme",
                           "zero_optimization.offload_optimizer.device=nvme",
                           "gradient_accumulation_steps=1",
                           "spillway.update_ahead=never",
                           "spillway.gradients=nvme",
                           "spillway.host_memory=4096",
                           "zero_optimization.offload_param.nvme_path=.",
                           "zero_optimization.offload_optimizer.nvme_path=."};
    const char *overrides[24];
    char host[96], paths[2][160];
    spw_model *model = NULL;
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw_config_parse(&c, base, "base", waits, 10, &err), SPW_OK);
    assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
    assert_int_equal(plan_of(&c, model, &p, &err), SPW_ENOFIT);
    memcpy(overrides, waits, sizeof waits);
    overrides[6] = "spillway.gradients=auto";
    overrides[7] = host;
    snprintf(host, sizeof host, "spillway.host_memory=%llu", (unsigned long long)(p.least_bytes + more));
    for (int k = 0; k < 2; k++) {
        snprintf(paths[k], sizeof paths[k],
                 "zero_optimization.offload_%s.nvme_path=[{\"path\": \".\", \"bytes\": %llu}]",
                 k == 0 ? "param" : "optimizer", (unsigned long long)(p.weight_nvme + p.record_nvme));
        overrides[8 + k] = paths[k];
    }
    assert_int_equal(spw_config_parse(&c, base, "base", overrides, 10, &err), SPW_OK);
    assert_int_equal(plan_of(&c, model, &p, &err), SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_HOST);
    find_nearest(&c, model, &s);
    assert_true(s.found);
    for (uint32_t i = 0; i < s.count; i++)
        overrides[10 + i] = s.set[i];
    assert_int_equal(spw_config_parse(&c, base, "base", overrides, 10 + s.count, &err), SPW_OK);
    assert_int_equal(plan_of(&c, model, &p, &err), SPW_OK);
    spw_model_destroy(model);
}

/*
 * Little room on the device and less and less in host memory: nearly everything changes, pieces of the vocabulary and several micro-batches
 * among it, whose sums need fp32 again, and all of that is said.
 */
static void
test_nearest_all(void **state)
{
    static const char *const first[] = {
        "model={\"model_type\": \"llama\", \"hidden_size\": 512, \"intermediate_size\": 1024, \"num_hidden_layers\": "
        "4, "
        "\"num_attention_heads\": 4, \"vocab_size\": 16384, \"max_position_embeddings\": 2048}",
        "data.seq_length=2048",
        "train_micro_batch_size_per_gpu=4",
        "gradient_accumulation_steps=1",
        "bf16.enabled=false",
        "zero_optimization={\"stage\": 1, \"offload_optimizer\": {\"device\": \"cpu\", \"ratio\": 0.5}}",
        "spillway.activations=device",
        "spillway.gradients=host",
        "spillway.optimizer_threads=1",
        "spillway.compute_threads=1",
        "spillway.device_memory=110000000"};
    static const uint64_t budgets[] = {200000000, 134000000, 113000000};
    enum { FIRST = sizeof first / sizeof first[0] };
    static spw_config c;
    static spw_plan p;
    static spw_suggestion s;
    uint32_t most = 0;
    (void)state;
    for (size_t k = 0; k < sizeof budgets / sizeof budgets[0]; k++) {
        const char *overrides[FIRST + 1 + sizeof s.set / sizeof s.set[0]];
        char text[96];
        spw_model *model = NULL;
        spw_error err = {0};
        memcpy(overrides, first, sizeof first);
        overrides[FIRST] = text;
        snprintf(text, sizeof text, "spillway.host_memory=%llu", (unsigned long long)budgets[k]);
        assert_int_equal(spw_config_parse(&c, base, "base", overrides, FIRST + 1, &err), SPW_OK);
        assert_int_equal(spw_model_from_config(&model, &c, &err), SPW_OK);
        assert_int_equal(plan_of(&c, model, &p, &err), SPW_ENOFIT);
        find_nearest(&c, model, &s);
        if (!s.found)
            fail_msg("%s: nothing was found", text);
        for (uint32_t i = 0; i < s.count; i++)
            overrides[FIRST + 1 + i] = s.set[i];
        assert_int_equal(spw_config_parse(&c, base, "base", overrides, FIRST + 1 + s.count, &err), SPW_OK);
        if (plan_of(&c, model, &p, &err) != SPW_OK)
            fail_msg("%s, %u settings: %s", text, s.count, err.message);
        assert_int_equal(c.micro_batch * c.accumulation, 4); /* the batch stays */
        most = s.count > most ? s.count : most;
        spw_model_destroy(model);
    }
    assert_true(most > 12);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nearest),           cmocka_unit_test(test_nearest_stage),
        cmocka_unit_test(test_nearest_room),      cmocka_unit_test(test_experts),
        cmocka_unit_test(test_nearest_batch),     cmocka_unit_test(test_nearest_shared),
        cmocka_unit_test(test_nearest_large),     cmocka_unit_test(test_nearest_full_disk),
        cmocka_unit_test(test_room_of_inference), cmocka_unit_test(test_room_of_ranks),
        cmocka_unit_test(test_nearest_all)};
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
