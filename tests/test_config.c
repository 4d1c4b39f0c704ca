/*
 * The configuration: what is right parses to the right values, what is wrong is refused by key and value, and what was
 * parsed prints and parses again to the same.
 */
#include "spw_config.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static const char whole[] =
    "{ \"model\": {\"model_type\": \"gpt2\", \"vocab_size\": 256, \"n_positions\": 256, \"n_embd\": 384, \"n_layer\": "
    "6, \"n_head\": 6},"
    "  \"data\":  {\"path\": [\"corpus/*.txt\"], \"format\": \"text\", \"tokenizer\": \"bytes\", \"seq_length\": 256, "
    "\"validation_split\": 0.05, \"seed\": 1},"
    "  \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 4, \"gradient_clipping\": 1.0, "
    "\"bf16\": {\"enabled\": true},"
    "  \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 6e-4, \"betas\": [0.9, 0.95], \"eps\": 1e-8, "
    "\"weight_decay\": 0.1}},"
    "  \"scheduler\": {\"type\": \"WarmupCosineLR\", \"params\": {\"warmup_num_steps\": 20, \"total_num_steps\": 200}},"
    "  \"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"/mnt/nvme0\"},"
    "                        \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": [\"/mnt/nvme0\", "
    "\"/mnt/nvme1\"]}},"
    "  \"aio\": {\"block_size\": 1048576, \"queue_depth\": 16},"
    "  \"spillway\": {\"steps\": 200, \"seed\": 1, \"device\": \"auto\", \"device_memory\": \"256MiB\", "
    "\"host_memory\": \"1GiB\", \"state_format\": \"split\","
    "               \"chunk_elems\": 1048576, \"micro_batches_per_pass\": 0, \"checkpoint_dir\": \"out\", "
    "\"checkpoint_interval\": 100,"
    "               \"run_log\": \"out/run.jsonl\", \"eval_interval\": 50} }";

static spw_config c, d;

static spw_status
parse(const char *set, spw_error *err)
{
    return spw_config_parse(&c, whole, "run.json", &set, set != NULL ? 1 : 0, err);
}

/* The whole configuration of the design page has the values that it says. */
static void
test_whole(void **state)
{
    spw_error err = {0};
    (void)state;
    if (parse(NULL, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_string_equal(c.model.model_type, "gpt2");
    assert_int_equal(c.model.width, 384);
    assert_int_equal(c.model.mlp_width, 1536);
    assert_int_equal(c.model.head_dim, 64);
    assert_true(c.model.tied);
    assert_int_equal(c.train_batch_size, 16);
    assert_int_equal(c.micro_batch, 4);
    assert_true(c.bf16 && c.optimizer.adam_w_mode);
    assert_true(c.optimizer.beta2 == 0.95 && c.optimizer.lr == 6e-4);
    assert_int_equal(c.zero.offload_param, SPW_TIER_NVME);
    assert_int_equal(c.zero.optimizer_path.count, 2);
    assert_string_equal(c.zero.optimizer_path.item[1], "/mnt/nvme1");
    assert_true(c.run.device_memory == 256u << 20 && c.run.host_memory == 1u << 30);
    assert_int_equal(c.run.state_format, SPW_STATE_SPLIT);
    assert_int_equal(c.run.eval_interval, 50);
}

/* Each wrong setting is refused with its key, and the words a person needs, in the message. */
static void
test_refused(void **state)
{
    static const struct {
        const char *set, *says;
    } wrong[] = {
        {"zero_optimization.stagee=3", "did you mean \"zero_optimization.stage\""},
        {"queue_depth=4", "aio.queue_depth"},
        {"spillway.stage=3", "zero_optimization.stage"},
        {"nonsense=1", "unknown key \"nonsense\""},
        {"model.n_layers=3", "model.n_layers"},
        {"spillway.steps=\"x\"", "spillway.steps: expected a whole number"},
        {"spillway.steps=1.5", "spillway.steps"},
        {"spillway.steps=0", "spillway.steps"},
        {"train_micro_batch_size_per_gpu=-3", "train_micro_batch_size_per_gpu"},
        {"train_batch_size=17", "train_batch_size 17"},
        {"gradient_clipping=-1", "gradient_clipping"},
        {"gradient_clipping=\"a\"", "gradient_clipping"},
        {"optimizer.type=\"Muon\"", "not supported yet: optimizer.type"},
        {"optimizer.params.betas=[0.9]", "optimizer.params.betas"},
        {"optimizer.params.betas=[0.9,1.0]", "optimizer.params.betas"},
        {"optimizer.params.eps=0", "optimizer.params.eps"},
        {"scheduler.type=\"OneCycle\"", "not supported yet: scheduler.type"},
        {"fp16.enabled=true", "not supported yet: fp16.enabled"},
        {"flops_profiler={\"enabled\": true}", "not supported yet: flops_profiler"},
        {"zero_optimization.zero_quantized_weights=true",
         "not supported yet: zero_optimization.zero_quantized_weights"},
        {"zero_optimization.offload_optimizer.ratio=0.5",
         "not supported yet: zero_optimization.offload_optimizer.ratio"},
        {"aio.use_gds=true", "not supported yet: aio.use_gds"},
        {"zero_optimization.stage=4", "zero_optimization.stage"},
        {"zero_optimization.stage=2", "offload_param needs stage 3"},
        {"zero_optimization.offload_param={\"device\":\"nvme\"}", "offload_param.nvme_path"},
        {"zero_optimization.offload_param.device=\"disk\"", "offload_param.device"},
        {"zero_optimization.offload_param=3", "expected an object"},
        {"aio.block_size=5000", "aio.block_size"},
        {"aio.backend=\"kafka\"", "aio.backend"},
        {"spillway.chunk_elems=5000", "spillway.chunk_elems"},
        {"spillway.host_memory=\"lots\"", "spillway.host_memory"},
        {"spillway.host_memory=-5", "spillway.host_memory"},
        {"spillway.state_format=\"int3\"", "spillway.state_format"},
        {"bf16.enabled=false", "needs bf16.enabled"},
        {"model.model_type=\"mamba\"", "not supported yet: model.model_type \"mamba\""},
        {"model.activation_function=\"relu\"", "model.activation_function"},
        {"model.n_embd=0", "model.n_embd"},
        {"data.path=[]", "data.path"},
        {"data.format=\"parquet\"", "not supported yet: data.format"},
        {"data.validation_split=1.5", "data.validation_split"},
        {"=3", "--set =3"},
        {"spillway..steps=3", "--set"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        spw_error err = {0};
        if (parse(wrong[i].set, &err) != SPW_ECONFIG || strstr(err.message, wrong[i].says) == NULL)
            fail_msg("%s: %s: \"%s\" should hold \"%s\"", wrong[i].set, spw_status_name(err.status), err.message,
                     wrong[i].says);
    }
}

/* Aliases, deprecated keys, "auto" and keys without effect work. */
static void
test_accepted(void **state)
{
    static const char *const right[] = {"zero_optimization.stage3_prefetch_bucket_size=5000000",
                                        "zero_optimization.stage3_max_live_parameters=\"auto\"",
                                        "zero_optimization.cpu_offload=true",
                                        "zero_optimization.overlap_comm=true",
                                        "zero_optimization.reduce_bucket_size=500000000",
                                        "aio.intra_op_parallelism=8",
                                        "aio.single_submit=false",
                                        "wandb={\"enabled\": false}",
                                        "fp16={\"enabled\": false, \"loss_scale\": 0}",
                                        "spillway.host_memory=\"auto\"",
                                        "train_batch_size=\"auto\"",
                                        "optimizer.params.torch_adam=true",
                                        "zero_optimization.offload_optimizer.ratio=1"};
    (void)state;
    for (size_t i = 0; i < sizeof right / sizeof right[0]; i++) {
        spw_error err = {0};
        if (parse(right[i], &err) != SPW_OK)
            fail_msg("%s: %s", right[i], err.message);
    }
    assert_int_equal(parse("aio.intra_op_parallelism=8", NULL), SPW_OK);
    assert_int_equal(c.aio.thread_count, 8);
    assert_int_equal(parse("data.path=a.txt", NULL), SPW_OK);
    assert_string_equal(c.data.path.item[0], "a.txt");
}

/* Syntax errors have line and column; a missing file, missing sections and duplicate keys are named. */
static void
test_files(void **state)
{
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw_config_parse(&c, "{\n \"a\": }", "cut.json", NULL, 0, &err), SPW_ECONFIG);
    assert_non_null(strstr(err.message, "cut.json:2"));
    assert_int_equal(spw_config_parse(&c, "[]", "list.json", NULL, 0, &err), SPW_ECONFIG);
    assert_int_equal(spw_config_parse(&c, "{}", "empty.json", NULL, 0, &err), SPW_ECONFIG);
    assert_non_null(strstr(err.message, "model"));
    assert_int_equal(spw_config_parse(&c, "{\"bf16\": {}, \"bf16\": {}}", "twice.json", NULL, 0, &err), SPW_ECONFIG);
    assert_int_equal(spw_config_load(&c, "/nowhere/x.json", NULL, 0, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, "/nowhere/x.json"));
}

/* What is printed parses to the same values. */
static void
test_dump(void **state)
{
    spw_error err = {0};
    char *first, *second;
    (void)state;
    assert_int_equal(parse(NULL, &err), SPW_OK);
    first = spw_config_dump(&c);
    assert_non_null(first);
    if (spw_config_parse(&d, first, "dump", NULL, 0, &err) != SPW_OK)
        fail_msg("%s", err.message);
    second = spw_config_dump(&d);
    assert_non_null(second);
    assert_string_equal(first, second);
    assert_int_equal(d.run.host_memory, c.run.host_memory);
    assert_string_equal(d.zero.optimizer_path.item[1], c.zero.optimizer_path.item[1]);
    spw_mem_free(first);
    spw_mem_free(second);
}

/* Llama's keys, and a Hugging Face config.json with keys that are not ours. */
static void
test_llama(void **state)
{
    spw_error err = {0};
    (void)state;
    memset(&c, 0, sizeof c);
    assert_int_equal(spw_config_parse_model(
                         &c,
                         "{\"model_type\": \"llama\", \"hidden_size\": 64, \"num_hidden_layers\": 2,"
                         " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"intermediate_size\": 96,"
                         " \"vocab_size\": 300, \"rms_norm_eps\": 1e-5, \"unheard_of\": 1, \"rope_scaling\": null}",
                         "config.json", &err),
                     SPW_OK);
    assert_int_equal(c.model.kv_heads, 2);
    assert_int_equal(c.model.head_dim, 16);
    assert_false(c.model.tied);
    memset(&c, 0, sizeof c);
    assert_int_equal(spw_config_parse_model(&c,
                                            "{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"yarn\"}}",
                                            "config.json", &err),
                     SPW_ECONFIG);
    assert_non_null(strstr(err.message, "rope_scaling"));
}

/* The schedules at their corners, by hand. */
static void
test_schedules(void **state)
{
    (void)state;
    assert_int_equal(parse("scheduler={\"type\":\"WarmupLR\",\"params\":{\"warmup_num_steps\":10,\"warmup_type\":"
                           "\"linear\",\"warmup_max_lr\":0.1}}",
                           NULL),
                     SPW_OK);
    assert_true(fabs(spw_schedule_lr(&c, 1)) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 6) - 0.05) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 500) - 0.1) < 1e-12);
    assert_int_equal(parse("scheduler={\"type\":\"WarmupDecayLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_"
                           "steps\":110,\"warmup_max_lr\":0.1}}",
                           NULL),
                     SPW_OK);
    assert_true(fabs(spw_schedule_lr(&c, 11) - 0.1) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 61) - 0.05) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 1000)) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 4) - 0.1 * log(4) / log(10)) < 1e-12);
    assert_int_equal(parse("scheduler={\"type\":\"WarmupCosineLR\",\"params\":{\"warmup_num_steps\":10,\"total_num_"
                           "steps\":110,\"cos_min_ratio\":0.1}}",
                           NULL),
                     SPW_OK);
    assert_true(fabs(spw_schedule_lr(&c, 11) - 6e-4) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 61) - 6e-4 * 0.55) < 1e-12);
    assert_true(fabs(spw_schedule_lr(&c, 111) - 6e-5) < 1e-12);
    assert_int_equal(parse("scheduler={}", NULL), SPW_OK);
    assert_true(spw_schedule_lr(&c, 77) == 6e-4);
}

static void
count_line(void *ctx, const char *text)
{
    assert_true(strlen(text) > 10);
    ++*(int *)ctx;
}

/* Help has a line for every key. */
static void
test_help(void **state)
{
    int lines = 0;
    (void)state;
    spw_config_help(count_line, &lines);
    assert_true(lines > 140);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),     cmocka_unit_test(test_refused), cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_files),     cmocka_unit_test(test_dump),    cmocka_unit_test(test_llama),
        cmocka_unit_test(test_schedules), cmocka_unit_test(test_help),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
