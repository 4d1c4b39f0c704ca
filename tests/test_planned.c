/*
 * Plans for a GPU that is not here (gpu/planned.c, spillway plan --gpu): they are those that are made where it is. What is here is the
 * emulated cuda device, with the plugin's own code; a description of it gives the same plans, to the byte, for models, placements and
 * formats of all kinds. And a budget beyond what a device has left is not counted on.
 */
#include "lib_plan.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { SETS_MAX = 12, CONTEXT_MIB = 576 /* that a driver takes, as planned.c has it */ };

static const char text[] = "{\"model\": {\"model_type\": \"llama\", \"vocab_size\": 512, \"hidden_size\": 192, "
                           "\"intermediate_size\": 512, \"num_hidden_layers\": 6,"
                           " \"num_attention_heads\": 6, \"num_key_value_heads\": 2, \"max_position_embeddings\": 256},"
                           " \"data\": {\"path\": [\"none\"], \"seq_length\": 128}, "
                           "\"train_micro_batch_size_per_gpu\": 2, \"gradient_accumulation_steps\": 4,"
                           " \"gradient_clipping\": 1.0, \"bf16\": {\"enabled\": true}, \"optimizer\": {\"type\": "
                           "\"AdamW\", \"params\": {\"lr\": 1e-3}},"
                           " \"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"cpu\"}, "
                           "\"offload_optimizer\": {\"device\": \"cpu\"}},"
                           " \"spillway\": {\"device\": \"cuda\", \"chunk_elems\": 65536, \"checkpoint_dir\": \"\", "
                           "\"host_memory\": \"1GiB\"}}";

#define MIXTURE                                                                                                        \
    "model={\"model_type\":\"qwen3_moe\",\"vocab_size\":512,\"hidden_size\":128,\"intermediate_size\":256,\"moe_"      \
    "intermediate_size\":96,"                                                                                          \
    "\"num_hidden_layers\":4,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"num_experts\":16,"  \
    "\"num_experts_per_tok\":4,\"max_position_embeddings\":256}"
#define LINEAR                                                                                                         \
    "model={\"model_type\":\"qwen3_5_text\",\"vocab_size\":512,\"hidden_size\":128,\"intermediate_size\":256,\"num_"   \
    "hidden_layers\":4,"                                                                                               \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"linear_num_key_heads\":2,\"linear_num_"     \
    "value_heads\":4,"                                                                                                 \
    "\"linear_key_head_dim\":32,\"linear_value_head_dim\":32,\"max_position_embeddings\":256,\"full_attention_"        \
    "interval\":4}"
#define ON_DEVICE "zero_optimization={\"stage\":2}"
#define ALL_ON_NVME                                                                                                    \
    "zero_optimization={\"stage\":3,\"offload_param\":{\"device\":\"nvme\",\"nvme_path\":\"/"                          \
    "tmp\"},\"offload_optimizer\":{\"device\":\"nvme\","                                                               \
    "\"nvme_path\":\"/tmp\"}}"

static const struct {
    const char *name, *sets[SETS_MAX];
} cases[] = {
    {"state in host memory", {NULL}},
    {"all on the device", {ON_DEVICE}},
    {"all on nvme", {ALL_ON_NVME, "spillway.host_memory=24MiB"}},
    {"little device memory", {"spillway.device_memory=12MiB"}},
    {"less, checkpoints leave it", {"spillway.device_memory=9MiB", "spillway.host_memory=200MiB"}},
    {"some state there", {"spillway.fill_device=always", "spillway.device_memory=40MiB"}},
    {"fp32", {"bf16.enabled=false"}},
    {"fp16", {"bf16.enabled=false", "fp16.enabled=true"}},
    {"8-bit floats", {"spillway.fp8=true"}},
    {"8-bit moments, late updates", {"spillway.state_format=split-int8", "spillway.delayed_update=1"}},
    {"Muon", {"optimizer.type=Muon"}},
    {"Muon, all on the device", {"optimizer.type=Muon", ON_DEVICE, "spillway.grad_dtype=bf16"}},
    {"adapters, codes",
     {"spillway.lora={\"rank\":8,\"alpha\":16,\"targets\":[\"q_proj\",\"o_proj\"]}", "spillway.frozen_codes=int4"}},
    {"tiles, pieces of the vocabulary", {"spillway.tile_tokens=64", "spillway.tile_vocab=128"}},
    {"a mixture", {MIXTURE}},
    {"its experts in turns", {MIXTURE, "spillway.device_memory=7MiB", "spillway.expert_turns=4"}},
    {"linear attention", {LINEAR}},
    {"no recomputing, documents", {"spillway.recompute=always", "data.documents=separate"}},
    {"four ranks", {"spillway.ranks=4"}},
    {"eight bits and four between them",
     {"spillway.ranks=4", "zero_optimization.zero_quantized_weights=true",
      "zero_optimization.zero_quantized_gradients=true"}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* Its paths point into *c. */
static spw_status
plan_for(spw_config *c, const char *const *sets, const spw_gpu_spec *gpu, spw_plan *out, spw_error *err)
{
    spw_engine *e = NULL;
    spw_model *model = NULL;
    uint32_t count = 0;
    spw_status st;
    while (count < SETS_MAX && sets[count] != NULL)
        count++;
    SPW_TRY(spw_config_parse(c, text, "planned", sets, count, err));
    SPW_TRY(spw_model_from_config(&model, c, err));
    st = spw_engine_create(&e,
                           &(spw_engine_options){.config = c,
                                                 .model = model,
                                                 .plan_only = true,
                                                 .process_bytes = PLAN_PROCESS_BYTES,
                                                 .room_bytes = (uint64_t)1 << 36,
                                                 .local_ranks = 2,
                                                 .gpu = gpu,
                                                 .plan_out = out},
                           err);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return st;
}

/* What is here, as somebody would describe it who plans for it elsewhere. */
static spw_gpu_spec
describe(void)
{
    spw_gpu_spec s = {.name = "emulated", .title = "emulated device", .capability = 89, .link = 1e9};
    spw_gpu *gpu = NULL;
    spw_error err = {0};
    for (int single = 0; single < 2; single++) {
        DONE(
            spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda", .compute_dtype = single ? SPW_F32 : SPW_BF16}, &err));
        *(single ? &s.single_flops : &s.half_flops) = spw_gpu_get_info(gpu)->peak_flops;
        s.memory_bytes = spw_gpu_get_info(gpu)->free_bytes + ((uint64_t)CONTEXT_MIB << 20);
        spw_gpu_close(gpu);
    }
    return s;
}

static void
compare(const char *name, const char *what, const void *a, const void *b, size_t bytes)
{
    if (memcmp(a, b, bytes) != 0)
        fail_msg("%s: %s are not those of the device that is here", name, what);
}

static void
test_same_plans(void **state)
{
    static spw_config here_config, there_config;
    static spw_plan here, there;
    const spw_gpu_spec spec = describe();
    (void)state;
    for (int i = 0; i < CASES; i++) {
        spw_error err = {0}, other = {0};
        spw_status st = plan_for(&here_config, cases[i].sets, NULL, &here, &err);
        assert_int_equal(plan_for(&there_config, cases[i].sets, &spec, &there, &other), st);
        print_message("%-34s %s %llu bytes of the device, %llu of the host\n", cases[i].name,
                      st == SPW_OK ? "" : err.message, (unsigned long long)here.device_bytes,
                      (unsigned long long)here.host_bytes);
        assert_int_equal(st, SPW_OK);
        assert_true(there.gpu == &spec && here.gpu == NULL && there.device_apart);
        for (uint32_t k = 0; k < here.path_count; k++)
            here.paths[k] = there.paths[k] = NULL; /* of two configurations */
        there.gpu = NULL;
        compare(cases[i].name, "decisions", here.decisions, there.decisions, sizeof here.decisions);
        compare(cases[i].name, "bytes", &here, &there, sizeof here);
    }
}

/* Half of its peak, and its link; and what is given, instead. */
static void
test_estimates(void **state)
{
    static spw_config c;
    static spw_plan p;
    const char *sets[] = {NULL}, *fp32[] = {"bf16.enabled=false", NULL}, *ranks[] = {"spillway.ranks=4", NULL};
    const char *longer[] = {"model.max_position_embeddings=8192", "data.seq_length=8192", NULL};
    const char *through_host[] = {"spillway.ranks=4", "spillway.collectives=host", NULL};
    spw_gpu_spec spec = describe();
    spw_calibration report;
    spw_rates rates;
    spw_error err = {0};
    (void)state;
    spec.half_flops = 4e14;
    spec.single_flops = 6e13;
    spec.link = 3e10;
    spec.peers = 1e11;
    DONE(plan_for(&c, sets, &spec, &p, &err));
    spw_calibrate(&rates, &c, &p, SPW_CALIBRATE_CACHE_ONLY, &report);
    assert_true(report.estimated && rates.flops == 2e14 && rates.orthogonal == 2e14 && rates.h2d == 3e10 &&
                rates.d2h == 3e10);
    assert_true(rates.received[SPW_WAY_NEAR][SPW_USE_BOTH] == 0);
    assert_true(rates.attention == 0); /* little of it */
    DONE(plan_for(&c, longer, &spec, &p, &err));
    spw_calibrate(&rates, &c, &p, SPW_CALIBRATE_CACHE_ONLY, &report);
    assert_true(p.attention_flops > p.flops / 2 && rates.attention == 1.6e14);
    DONE(plan_for(&c, ranks, &spec, &p, &err));
    spw_calibrate(&rates, &c, &p, SPW_CALIBRATE_CACHE_ONLY, &report);
    assert_true(p.linked && rates.received[SPW_WAY_NEAR][SPW_USE_GATHER] == 1e11 &&
                rates.received[SPW_WAY_FAR][SPW_USE_GATHER] == 0);
    DONE(plan_for(&c, through_host, &spec, &p, &err));
    spw_calibrate(&rates, &c, &p, SPW_CALIBRATE_CACHE_ONLY, &report);
    assert_true(!p.linked && rates.received[SPW_WAY_NEAR][SPW_USE_GATHER] == 0);
    DONE(plan_for(&c, fp32, &spec, &p, &err));
    spw_calibrate(&rates, &c, &p, SPW_CALIBRATE_CACHE_ONLY, &report);
    assert_true(rates.flops == 3e13);
    DONE(plan_for(&c, sets, NULL, &p, &err));
    spw_calibrate(&rates, &c, &p, SPW_CALIBRATE_CACHE_ONLY, &report);
    assert_true(!report.estimated && rates.h2d == 0);
}

/* On the device that is here, and on one that is planned for. */
static void
test_beyond_what_there_is(void **state)
{
    static spw_config c;
    static spw_plan within, beyond;
    const spw_gpu_spec spec = describe();
    const uint64_t left = spec.memory_bytes - ((uint64_t)CONTEXT_MIB << 20);
    char exact[64];
    const char *all[] = {exact, NULL}, *more[] = {"spillway.device_memory=900GiB", NULL};
    (void)state;
    snprintf(exact, sizeof exact, "spillway.device_memory=%llu", (unsigned long long)left);
    for (int planned = 0; planned < 2; planned++) {
        spw_error err = {0};
        bool said = false;
        DONE(plan_for(&c, all, planned ? &spec : NULL, &within, &err));
        DONE(plan_for(&c, more, planned ? &spec : NULL, &beyond, &err));
        assert_true(within.device_budget == left && beyond.device_budget == left &&
                    beyond.device_bytes == within.device_bytes);
        for (uint32_t i = 0; i < beyond.decision_count; i++)
            said = said || (strcmp(beyond.decisions[i].name, "spillway.device_memory") == 0 &&
                            strstr(beyond.decisions[i].reason, "900 GiB are asked for") != NULL);
        assert_true(said);
        assert_int_equal(beyond.decision_count, within.decision_count + 1);
    }
}

/* Those that are known by name: a device of a plan has no memory to give, and is no cpu device. */
static void
test_known(void **state)
{
    static spw_config c;
    static spw_plan p;
    const char *sets[] = {NULL}, *cpu[] = {"spillway.device=cpu", NULL}, *fp8[] = {"spillway.fp8=true", NULL};
    uint32_t count;
    const spw_gpu_spec *all = spw_gpu_get_specs(&count);
    spw_error err = {0};
    spw_gpu *gpu = NULL;
    void *memory;
    (void)state;
    for (uint32_t i = 0; i < count; i++) {
        assert_true(all[i].capability >= 80 && all[i].half_flops > 1.5 * all[i].single_flops && all[i].link > 1e10);
        for (uint32_t k = 0; k < i; k++)
            assert_string_not_equal(all[i].name, all[k].name);
        DONE(plan_for(&c, sets, &all[i], &p, &err));
        assert_int_equal(plan_for(&c, fp8, &all[i], &p, &err), all[i].capability >= 89 ? SPW_OK : SPW_EUNSUPPORTED);
    }
    assert_int_equal(plan_for(&c, cpu, &all[0], &p, &err), SPW_ECONFIG);
    DONE(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cuda", .planned = &all[0], .compute_dtype = SPW_BF16}, &err));
    assert_int_equal(spw_gpu_alloc(gpu, &memory, 4096, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "planned for, and not here"));
    spw_gpu_close(gpu);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_plans),
        cmocka_unit_test(test_estimates),
        cmocka_unit_test(test_beyond_what_there_is),
        cmocka_unit_test(test_known),
    };
    if (!tiny_emulated_links("4")) {
        printf("1..1\nok 1 - plans for another device # SKIP no C++ compiler when this was built\n");
        return 77;
    }
    setenv("XDG_CACHE_HOME", "/proc/none", 1); /* rates that this machine keeps are not asked for */
    return cmocka_run_group_tests(tests, plan_dir_make, plan_dir_remove);
}
