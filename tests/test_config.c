/*
 * The configuration: what is right parses to the right values, what is wrong is refused by key and value, and what was
 * parsed prints and parses again to the same.
 */
#include "config_internal.h"
#include "lib_config.h"
#include "lib_tiny.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define PARAM     "zero_optimization.offload_param.nvme_path"
#define OPTIMIZER "zero_optimization.offload_optimizer.nvme_path"

static spw_config c, d;

static spw_status
parse(const char *set, spw_error *err)
{
    return spw_config_parse(&c, config_whole, "run.json", &set, set != NULL ? 1 : 0, err);
}

/* The whole configuration of the design page has the values that it says. */
static void
test_whole(void **state)
{
    spw_error err = {0};
    (void)state;
    if (parse(NULL, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_int_equal(c.model.family, SPW_FAMILY_GPT2);
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
        {"queue_depth=4", "run.json: unknown key \"queue_depth\"; \"queue_depth\" belongs in aio"},
        {"zero_optimization.gradient_clipping=1", "belongs in the top level; did you mean \"gradient_clipping\""},
        {"n_layer=2", "belongs in model; did you mean \"model.n_layer\""},
        {"zero_optimization.stage3_max_live_params=1", "unknown key \"zero_optimization.stage3_max_live_params\""},
        {"zero_optimization.stage3_max_live_parameter=1",
         "did you mean \"zero_optimization.stage3_max_live_parameters\""},
        {"spillway.stage=3", "\"stage\" belongs in zero_optimization; did you mean \"zero_optimization.stage\""},
        {"nonsense=1", "unknown key \"nonsense\""},
        {"model.n_layers=3", "unknown key \"model.n_layers\"; did you mean \"model.n_layer\""},
        {"model.rope_interleave=true", "\"model.rope_interleave\" is a key of other values of model.model_type"},
        {"spillway.steps=\"x\"", "run.json: spillway.steps: expected integer, got string \"x\""},
        {"spillway.steps=1.5", "spillway.steps: expected integer in [1, 1e+12], got number 1.5"},
        {"spillway.steps=true", "spillway.steps: expected integer, got true"},
        {"spillway.integrity=1", "spillway.integrity: expected true or false, got integer 1"},
        {"spillway.device=3", "spillway.device: expected string, got integer 3"},
        {"spillway.device=\"gpu\"", "spillway.device: expected auto, cpu, cuda or cuda:0, got \"gpu\""},
        {"spillway.device=\"cuda:x\"", "spillway.device"},
        {"spillway.steps=0", "spillway.steps"},
        {"train_micro_batch_size_per_gpu=-3",
         "train_micro_batch_size_per_gpu: expected integer in [1, 1000000], got integer -3"},
        {"train_batch_size=17", "train_batch_size 17"},
        {"gradient_clipping=-1", "gradient_clipping: expected number in [0, 1e+30], got integer -1"},
        {"gradient_clipping=\"a\"", "gradient_clipping: expected number, got string \"a\""},
        {"optimizer.type=\"Lamb\"", "not supported yet: optimizer.type"},
        {"optimizer.params.muon_lr=0.1",
         "run.json: optimizer.params.muon_lr belongs to optimizer.type \"Muon\", the type is \"AdamW\""},
        {"optimizer={\"type\":\"SGD\",\"params\":{\"adam_lr\":0.1}}",
         "optimizer.params.adam_lr belongs to optimizer.type"},
        {"optimizer.params.ns_steps=5", "optimizer.params.ns_steps belongs to optimizer.type \"Muon\""},
        {"optimizer={\"type\":\"Muon\",\"params\":{\"ns_steps\":0}}",
         "optimizer.params.ns_steps: expected integer in [1, 20], got integer 0"},
        {"optimizer={\"type\":\"Muon\",\"params\":{\"ns_steps\":21}}",
         "optimizer.params.ns_steps: expected integer in"},
        {"optimizer={\"type\":\"Muon\",\"params\":{\"muon_lr\":-1}}", "optimizer.params.muon_lr: expected number in"},
        {"optimizer={\"type\":\"Muon\",\"params\":{\"ns_method\":\"svd\"}}",
         "optimizer.params.ns_method \"svd\" (one of gram|standard)"},
        {"spillway.param_groups={}", "spillway.param_groups"},
        {"spillway.lora.rank=-1", "spillway.lora.rank"},
        {"spillway.lora.dropout=1", "spillway.lora.dropout"},
        {"spillway.lora.r=8", "spillway.lora.r"},
        {"spillway.lora={\"alpha\":16}", "run.json: spillway.lora has alpha and no rank"},
        {"spillway.preference={\"beta\":0.1}",
         "spillway.preference has beta and no loss (dpo, ipo, apo_zero, simpo or orpo)"},
        {"spillway.freeze={}", "a list of at most 16 names or globs"},
        {"spillway.freeze=[\"a\",1]", "spillway.freeze"},
        {"spillway.param_groups=[{\"lr\":1}]", "an object with match"},
        {"spillway.param_groups=[{\"match\":\"a\",\"lr\":-1}]", "lr and weight_decay from 0"},
        {"spillway.param_groups=[{\"match\":\"a\",\"betas\":[0.9]}]", "betas of two numbers"},
        {"spillway.param_groups=[{\"match\":\"a\",\"eps\":1}]", "unknown member \"eps\""},
        {"optimizer.params.betas=[0.9]", "optimizer.params.betas"},
        {"optimizer.params.betas=[0.9,1.0]", "optimizer.params.betas"},
        {"optimizer.params.eps=0", "optimizer.params.eps"},
        {"scheduler.type=\"Noam\"", "not supported yet: scheduler.type"},
        {"fp16.fp16_master_weights_and_grads=true", "not supported yet: fp16.fp16_master_weights_and_grads"},
        {"flops_profiler={\"enabled\": true}", "not supported yet: flops_profiler"},
        {"zero_optimization.zeropp_loco_param={\"err_beta\": 0.8}",
         "not supported yet: zero_optimization.zeropp_loco_param"},
        {"zero_optimization={\"stage\":2,\"zero_quantized_weights\":true}",
         "zero_optimization.zero_quantized_weights needs stage 3, stage is 2"},
        {"zero_optimization={\"stage\":1,\"zero_quantized_nontrainable_weights\":true}",
         "zero_optimization.zero_quantized_nontrainable_weights needs stage 3, stage is 1"},
        {"zero_optimization={\"stage\":2,\"zero_quantized_gradients\":true}",
         "zero_optimization.zero_quantized_gradients needs stage 3, stage is 2"},
        {"zero_optimization.zero_quantized_weights=8",
         "zero_optimization.zero_quantized_weights: expected true or false"},
        {"zero_optimization.offload_optimizer.ratio=1.5",
         "zero_optimization.offload_optimizer.ratio: expected number in [0, 1], got number 1.5"},
        {"zero_optimization.offload_optimizer.super_offload=1",
         "zero_optimization.offload_optimizer.super_offload: expected true or false"},
        {"aio.use_gds=true", "not supported yet: aio.use_gds"},
        {"activation_checkpointing.cpu_checkpointing=1", "activation_checkpointing.cpu_checkpointing: expected true"},
        {"spillway.activations=\"disk\"", "spillway.activations: expected"},
        {"zero_optimization.stage=4", "zero_optimization.stage"},
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
        {"model.model_type=\"mamba\"",
         "not supported yet: model.model_type \"mamba\" (spillway help config model_type names all that are)"},
        {"model.activation_function=\"relu\"", "model.activation_function"},
        {"model.n_embd=0", "model.n_embd"},
        {"data.path=[]", "data.path"},
        {"data.format=\"parquet\"", "not supported yet: data.format"},
        {"data.validation_split=1.5", "data.validation_split"},
        {"zero_optimization.overlap_comm=\"yes\"", "zero_optimization.overlap_comm: expected true or false"},
        {"zero_optimization.reduce_bucket_size=-1", "zero_optimization.reduce_bucket_size: expected integer in"},
        {"zero_optimization.cpu_offload=true", "zero_optimization.cpu_offload is deprecated and cannot stand beside "
                                               "zero_optimization.offload_optimizer.device"},
        {"zero_optimization={\"max_live_parameters\":1,\"stage3_max_live_parameters\":2}", "is given twice"},
        {"zero_optimization.offload_optimizer={\"device\":\"nvme\"}", "offload_optimizer.nvme_path is needed"},
        {"zero_optimization={\"stage\":0,\"offload_optimizer\":{\"device\":\"cpu\"}}",
         "zero_optimization.offload_optimizer needs stage 1, 2 or 3"},
        {PARAM "={\"path\":\"/a\",\"bytes\":1}",
         "run.json: " PARAM ": bytes of /a: expected integer in [4096, 1e+18], got integer 1"},
        {PARAM "={\"path\":\"/a\",\"bytes\":\"lots\"}", PARAM ": bytes of /a: expected bytes (a number, or a text"},
        {PARAM "={\"path\":\"/a\",\"weight\":0}",
         PARAM ": weight of /a: expected number above 0 and up to 1e+09, got integer 0"},
        {PARAM "=[\"/b\",{\"path\":\"/a\",\"weight\":-2.5}]", "weight of /a: expected number above 0"},
        {PARAM "={\"path\":\"/a\",\"weight\":\"3\"}",
         "weight of /a: expected number above 0 and up to 1e+09, got string"},
        {PARAM "={\"path\":\"/a\",\"weight\":null}", "weight of /a: expected number above 0"},
        {PARAM "={\"path\":\"/a\",\"wieght\":1}",
         PARAM ": unknown member \"wieght\" of /a; allowed: path, weight, bytes"},
        {PARAM "={\"weight\":1}", PARAM ": expected a path or a list of paths"},
        {"data.path={\"path\":\"/a\",\"weight\":1}", "data.path: unknown member \"weight\" of /a; allowed: path"},
        {"zero_optimization={\"stage\":2,\"mics_shard_size\":8}",
         "zero_optimization.mics_shard_size needs stage 3, stage is 2"},
        {"zero_optimization.mics_shard_size=-2",
         "zero_optimization.mics_shard_size: expected integer in [-1, 65536], got integer -2"},
        {"zero_optimization.mics_shard_size=1.5", "zero_optimization.mics_shard_size: expected integer in"},
        {"zero_optimization.mics_hierarchical_params_gather=1",
         "zero_optimization.mics_hierarchical_params_gather: expected true or false"},
        {"zero_optimization={\"stage\":2,\"zero_hpz_partition_size\":8}",
         "zero_optimization.zero_hpz_partition_size needs stage 3, stage is 2"},
        {"zero_optimization.zero_hpz_partition_size=false", "zero_optimization.zero_hpz_partition_size"},
        {"data_types.grad_accum_dtype=\"int8\"",
         "data_types.grad_accum_dtype: expected fp32, bf16 or fp16: spillway.grad_dtype"},
        {"data_types.grad_accum_dtype=\"fp16\"", "spillway.grad_dtype fp16 needs the loss scale of fp16.enabled"},
        {"checkpoint={\"use_node_local_storage\": true}", "not supported yet: checkpoint.use_node_local_storage"},
        {"sparse_gradients=true", "not supported yet: sparse_gradients"},
        {"model.attn_pdrop=0.1", "not supported yet: model.attn_pdrop"},
        {"model.scale_attn_weights=false", "model.scale_attn_weights"},
        {"model.resid_pdrop=1.5", "model.resid_pdrop: expected number in [0, 1)"},
        {"model.path=\"folder\"", "model.path stands alone"},
        {"model.path=folder", "--set 'model={\"path\":\"FOLDER\"}' takes the place of all of model"},
        {"spillway={\"steps\":2", "--set spillway={\"steps\":2: the value is no complete JSON: "},
        {"data.path=[\"a.txt\"", "the value is no complete JSON: "},
        {"data.path=\"a.txt", "the value is no complete JSON: "},
        {"model=[1", "model: expected an object"},
        {"model={\"path\": 3}", "model.path: expected a folder with config.json, got integer 3"},
        {"model={}", "model.model_type is missing (gpt2, llama, qwen3 ...: spillway help config model_type names all)"},
        {"scheduler={\"type\":\"OneCycle\",\"params\":{\"cycle_max_lr\":1}}",
         "cycle_min_lr and cycle_max_lr are needed"},
        {"scheduler={\"type\":\"WarmupDecayLR\"}", "scheduler.params.total_num_steps is needed for WarmupDecayLR"},
        {"spillway.grad_dtype=\"fp16\"", "spillway.grad_dtype fp16 needs the loss scale of fp16.enabled"},
        {"fp16.enabled=true", "exclude each other"},
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

/* Weights and limits of swap folders: their values, defaults, and one folder in both lists. */
static void
test_paths(void **state)
{
    static const struct {
        const char *param, *optimizer, *says;
    } clash[] = {
        {PARAM "={\"path\":\"/a\",\"weight\":2}", OPTIMIZER "=[\"/b\",{\"path\":\"/a\",\"weight\":3}]",
         "give /a two weights, 2 and 3"},
        {PARAM "={\"path\":\"/a\",\"bytes\":\"4GiB\"}", OPTIMIZER "={\"path\":\"/a\",\"bytes\":4096}",
         "give /a two limits, 4294967296 and 4096 bytes"},
        {PARAM "=[{\"path\":\"/a\",\"weight\":2},\"/a\",{\"path\":\"/a\",\"weight\":1}]", OPTIMIZER "=\"/b\"",
         "give /a two weights, 2 and 1"},
        {PARAM "=[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\"]",
         OPTIMIZER "=[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\",\"1\"]", "have 17 paths, at most 16"},
    };
    static const char *const sets[] = {
        PARAM "=[\"/a\",{\"path\":\"/b\",\"weight\":2.9,\"bytes\":\"64GiB\"},{\"path\":\"/c\",\"bytes\":8192}]",
        OPTIMIZER "=[{\"path\":\"/a\",\"weight\":0.5,\"bytes\":\"auto\"},\"/b\"]"};
    spw_error err = {0};
    (void)state;
    if (spw_config_parse(&c, config_whole, "run.json", sets, 2, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_int_equal(c.zero.param_path.count, 3);
    assert_string_equal(c.zero.param_path.item[1], "/b");
    assert_true(c.zero.param_path.weight[1] == 2.9 && c.zero.param_path.bytes[1] == UINT64_C(64) << 30);
    assert_true(c.zero.param_path.weight[2] == 1 && c.zero.param_path.bytes[2] == 8192);
    assert_true(c.zero.param_path.weight[0] == 0.5 && c.zero.param_path.bytes[0] == 0); /* said in the other list */
    assert_true(c.zero.optimizer_path.weight[1] == 2.9 && c.zero.optimizer_path.bytes[1] == UINT64_C(64) << 30);
    for (size_t i = 0; i < sizeof clash / sizeof clash[0]; i++) {
        const char *const both[2] = {clash[i].param, clash[i].optimizer};
        if (spw_config_parse(&c, config_whole, "run.json", both, 2, &err) != SPW_ECONFIG ||
            strstr(err.message, clash[i].says) == NULL)
            fail_msg("%s %s: \"%s\" should hold \"%s\"", both[0], both[1], err.message, clash[i].says);
    }
    assert_int_equal(
        spw_config_parse(&c,
                         "{\"zero_optimization\":{\"offload_param\":{\"nvme_path\":{\"path\":\"/a\",\"weight\":NaN}}}}",
                         "nan.json", NULL, 0, &err),
        SPW_ECONFIG); /* JSON has no such number */
    assert_non_null(strstr(err.message, "nan.json:1"));
}

/* Aliases, deprecated keys, "auto" and keys without effect work. */
static void
test_accepted(void **state)
{
    static const char *const right[] = {
        "zero_optimization.stage3_prefetch_bucket_size=5000000",
        "zero_optimization.stage3_max_live_parameters=\"auto\"",
        "zero_optimization={\"stage\":2,\"cpu_offload\":true}",
        "fp16.enabled=\"auto\"",
        "data_types={\"grad_accum_dtype\": null}",
        "communication_data_type=null",
        "spillway.device=\"cuda:1\"",
        "optimizer.params.betas=\"auto\"",
        "zero_optimization.offload_param.nvme_path={\"path\":\"/a\"}",
        "zero_optimization.overlap_comm=true",
        "zero_optimization.reduce_bucket_size=500000000",
        "aio.intra_op_parallelism=8",
        "aio.single_submit=false",
        "wandb={\"enabled\": false}",
        "fp16={\"enabled\": false, \"loss_scale\": 0}",
        "spillway.host_memory=\"auto\"",
        "train_batch_size=\"auto\"",
        "optimizer.params.torch_adam=true",
        "steps_per_print=\"inf\"",
        "tensor_parallel={\"autotp_size\":0}",
        "tensor_parallel={\"autotp_size\":1}",
        "zero_optimization.leaf_module={\"classes\":[\"MixtralSparseMoeBlock\"]}",
        "compile={\"disable\":false,\"backend\":\"inductor\"}",
        "activation_checkpointing.number_checkpoints=false",
        "spillway.param_groups=[{\"match\":\"*.bias\",\"lr\":1e-4,\"betas\":[0.8,0.9]},{\"match\":\"x\"}]",
        "spillway.freeze=\"wte.*\"",
        "spillway.freeze=[\"a\",\"b*\"]",
        "spillway.lora={\"rank\":4,\"alpha\":8,\"targets\":[\"q_proj\"],\"dropout\":0.1}",
        "zero_optimization.offload_optimizer.ratio=0.3"};
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

/* "auto" and null say nothing: the formats are those of a configuration without the keys. */
/* Every key that DeepSpeed has is known and takes DeepSpeed's default; a section's members with the section itself. */
static void
test_deepspeed_keys(void **state)
{
    static const char base[] =
        "{\"model\": {\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 1, \"n_head\": 1}, "
        "\"data\": {\"path\": \"a\"}, \"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 4}";
    FILE *f = fopen("tests/vectors/deepspeed_keys.txt", "r");
    char line[300], set[300];
    const char *sets[] = {set};
    int keys = 0, bad = 0;
    (void)state;
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL) {
        spw_error err = {0};
        char *space = strchr(line, ' ');
        if (line[0] == '#' || space == NULL)
            continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(set, sizeof set, "%.*s=%s", (int)(space - line), line, space + 1);
        keys++;
        if (spw_config_parse(&c, base, "run.json", sets, 1, &err) != SPW_OK) {
            bad++;
            print_error("%s: %s\n", set, err.message);
        }
    }
    fclose(f);
    assert_true(keys > 80);
    assert_int_equal(bad, 0);
}

static void
test_auto(void **state)
{
    static const char *const half[] = {"bf16.enabled=false", "fp16.enabled=true", "spillway.state_format=\"auto\"",
                                       "spillway.grad_dtype=null"};
    (void)state;
    assert_int_equal(parse("spillway.state_format=\"auto\"", NULL), SPW_OK);
    assert_int_equal(c.run.state_format, SPW_STATE_SPLIT);
    for (int k = 0; k < 2; k++) {
        const char *sets[4] = {half[0], half[1], half[2], k ? half[3] : "spillway.grad_dtype=\"auto\""};
        assert_int_equal(spw_config_parse(&c, config_whole, "run.json", sets, 4, NULL), SPW_OK);
        assert_int_equal(c.run.state_format, SPW_STATE_MIXED_F16);
        assert_int_equal(c.run.grad_dtype, SPW_F16);
    }
}

/* Deprecated keys act and name their successor; keys that cannot matter say so; parameters of another schedule too. */
static void
test_said(void **state)
{
    (void)state;
    config_listen();
    assert_int_equal(parse("zero_optimization={\"stage\":3,\"cpu_offload\":true,\"cpu_offload_param\":true,"
                           "\"cpu_offload_use_pin_memory\":true,\"stage3_gather_fp16_weights_on_model_save\":true,"
                           "\"round_robin_gradients\":true,\"stage3_max_live_parameters\":7}",
                           NULL),
                     SPW_OK);
    assert_int_equal(c.zero.offload_optimizer, SPW_TIER_HOST);
    assert_int_equal(c.zero.offload_param, SPW_TIER_HOST);
    assert_true(c.zero.pin_memory_optimizer && c.zero.pin_memory_param);
    assert_int_equal(c.zero.max_live_parameters, 7);
    assert_int_equal(parse("scheduler.params.warmup_max_lr=0.1", NULL), SPW_OK);
    spw_log_set(NULL, NULL);
    assert_non_null(strstr(config_heard, "warning run.json: zero_optimization.cpu_offload is deprecated; use "
                                         "zero_optimization.offload_optimizer.device"));
    assert_non_null(strstr(config_heard, "use zero_optimization.offload_param.device"));
    assert_non_null(strstr(config_heard, "use zero_optimization.offload_optimizer.pin_memory"));
    assert_non_null(strstr(config_heard, "use zero_optimization.gather_16bit_weights_on_model_save"));
    assert_non_null(strstr(config_heard, "info run.json: zero_optimization.round_robin_gradients has no effect here"));
    assert_non_null(strstr(config_heard, "scheduler.params.warmup_max_lr has no meaning for scheduler.type"));
}

/* Of three batch sizes any one or two give the rest, as DeepSpeed derives them on one rank; none is an error. */
static void
test_batches(void **state)
{
    static const struct {
        const char *given;
        uint64_t all, micro, steps; /* all 0: refused */
    } cases[] = {{"\"train_batch_size\":12", 12, 12, 1},
                 {"\"train_micro_batch_size_per_gpu\":3", 3, 3, 1},
                 {"\"train_batch_size\":12,\"train_micro_batch_size_per_gpu\":3", 12, 3, 4},
                 {"\"train_batch_size\":12,\"gradient_accumulation_steps\":3", 12, 4, 3},
                 {"\"train_micro_batch_size_per_gpu\":5,\"gradient_accumulation_steps\":3", 15, 5, 3},
                 {"\"train_batch_size\":12,\"gradient_accumulation_steps\":5", 0, 0, 0},
                 {"\"train_batch_size\":3,\"train_micro_batch_size_per_gpu\":4", 0, 0, 0},
                 {"\"gradient_accumulation_steps\":5", 0, 0, 0}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[400];
        spw_error err = {0};
        snprintf(text, sizeof text,
                 "{\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1},"
                 "\"data\":{\"path\":\"a\"},%s}",
                 cases[i].given);
        assert_int_equal(spw_config_parse(&c, text, "b.json", NULL, 0, &err), cases[i].all ? SPW_OK : SPW_ECONFIG);
        if (cases[i].all == 0) {
            assert_non_null(strstr(err.message, "train_batch_size"));
            continue;
        }
        assert_int_equal(c.train_batch_size, cases[i].all);
        assert_int_equal(c.micro_batch, cases[i].micro);
        assert_int_equal(c.accumulation, cases[i].steps);
        assert_int_equal(c.run.state_format, SPW_STATE_FP32); /* without bf16 */
        assert_int_equal(c.data.seq_length, 1024);
        assert_true(c.run.host_memory == SPW_AUTO);
    }
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
    assert_int_equal(spw_config_parse(&c, "{\"bf16.enabled\": true}", "dot.json", NULL, 0, &err), SPW_ECONFIG);
    assert_non_null(strstr(err.message, "unknown key \"bf16.enabled\""));
    assert_int_equal(spw_config_load(&c, "/nowhere/x.json", NULL, 0, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, "/nowhere/x.json"));
}

static char folder[256];

static void
put_file(const char *name, const char *text)
{
    char path[300];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

/* The whole configuration with one more member in front, as folder/run.json. */
static spw_status
load_with(const char *member, const char *const *sets, uint32_t set_count, spw_error *err)
{
    char path[300], text[4000];
    snprintf(path, sizeof path, "%s/run.json", folder);
    snprintf(text, sizeof text, "{%s,%s", member, config_whole + 1);
    put_file("run.json", text);
    return spw_config_load(&c, path, sets, set_count, err);
}

/*
 * Included files lie below the including one, later ones above earlier ones, overrides above all; objects merge and lists
 * do not; an alias is the same key. The merged configuration prints as one.
 */
static void
test_include(void **state)
{
    static const char *const sets[] = {"aio.thread_count=7", "zero_optimization.offload_param={\"device\":\"cpu\"}"};
    spw_error err = {0};
    char member[700], *text, *again;
    (void)state;
    tiny_dir_make(folder);
    put_file("tuned.json",
             "{\"aio\": {\"block_size\": 8192, \"queue_depth\": 3, \"thread_count\": 5, \"backend\": "
             "\"threads\"},\n \"zero_optimization\": {\"offload_param\": {\"pin_memory\": true, \"nvme_path\": "
             "[{\"path\": \"/x\", \"weight\": 2.9}]}, \"stage3_max_live_parameters\": 11}}");
    put_file("later.json", "{\"aio\": {\"intra_op_parallelism\": 6}, \"gradient_clipping\": 3, \"data\": {\"seed\": 9},"
                           " \"zero_optimization\": {\"max_live_parameters\": 12}}");
    if (load_with("\"include\": \"tuned.json\"", NULL, 0, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_true(c.aio.block_size == 1048576 && c.aio.queue_depth == 16); /* this file's own */
    assert_true(c.aio.thread_count == 5 && c.aio.backend == SPW_AIO_THREADS && c.zero.pin_memory_param);
    assert_true(c.zero.param_path.count == 1 && c.zero.max_live_parameters == 11);
    assert_string_equal(c.zero.param_path.item[0],
                        "/mnt/nvme0"); /* a list is taken config_whole, here from this file */
    snprintf(member, sizeof member, "\"include\": [\"tuned.json\", \"%s/later.json\"]", folder);
    if (load_with(member, NULL, 0, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_true(c.aio.thread_count == 6 && c.zero.max_live_parameters == 12 && c.aio.backend == SPW_AIO_THREADS);
    assert_true(c.gradient_clipping == 1.0 && c.data.seed == 1);
    text = spw_config_dump(&c);
    assert_non_null(text);
    assert_null(strstr(text, "include")); /* it is one configuration now */
    assert_int_equal(spw_config_parse(&d, text, "dump", NULL, 0, &err), SPW_OK);
    again = spw_config_dump(&d);
    assert_string_equal(text, again);
    spw_mem_free(text);
    spw_mem_free(again);
    if (load_with(member, sets, 2, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_true(c.aio.thread_count == 7 && c.zero.offload_param == SPW_TIER_HOST);
    assert_true(c.zero.param_path.count == 0 && !c.zero.pin_memory_param); /* an object that is set replaces */
    {
        static const char *const off[] = {"include=[]", "include=null"};
        for (int i = 0; i < 2; i++) {
            assert_int_equal(load_with(member, off + i, 1, &err), SPW_OK);
            assert_true(c.aio.backend != SPW_AIO_THREADS && c.aio.thread_count != 6);
        }
    }
    { /* from text, with the folder that its name has; and the tuner's lists where this file has none */
        char name[300];
        static const char bare[] =
            "{\"include\":[\"tuned.json\"],\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,"
            "\"n_head\":1},\"data\":{\"path\":\"a\"},\"train_batch_size\":1,"
            "\"zero_optimization\":{\"stage\":3,\"offload_param\":{\"device\":\"nvme\"}}}";
        snprintf(name, sizeof name, "%s/text", folder);
        if (spw_config_parse(&c, bare, name, NULL, 0, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_true(c.zero.param_path.weight[0] == 2.9 && c.aio.queue_depth == 3);
        assert_string_equal(c.zero.param_path.item[0], "/x");
        assert_int_equal(spw_config_parse(&c, bare, "text", NULL, 0, &err), SPW_ENOENT); /* the working folder */
        assert_non_null(strstr(err.message, "text: include: open tuned.json"));
    }
    tiny_dir_remove(folder);
}

/* What is wrong with or in an included file is said of that file. */
static void
test_include_refused(void **state)
{
    static const struct {
        const char *text, *says[3]; /* NULL: the included file is not there */
    } wrong[] = {
        {NULL, {"run.json: include: open", "/inc.json", "No such file"}},
        {"{\n \"aio\": }", {"run.json: include: ", "/inc.json:2:", ""}},
        {"[]", {"/inc.json:", "not an object", "run.json"}},
        {"{\"aio\": {}, \"aio\": {}}", {"/inc.json:1", "duplicate", "aio"}},
        {"{\"include\": \"other.json\"}", {"/inc.json: include", "itself included", "run.json"}},
        {"{\"aio\": {\"queue_dept\": 1}}", {"/inc.json: unknown key", "aio.queue_dept", "did you mean"}},
        {"{\"queue_depth\": 1}", {"/inc.json: unknown key", "queue_depth", "belongs in aio"}},
        {"{\"model\": {\"n_layers\": 1}}", {"/inc.json: unknown key", "model.n_layers", "model.n_layer"}},
        {"{\"aio\": {\"thread_count\": \"x\"}}", {"/inc.json: aio.thread_count", "expected integer", "\"x\""}},
        {"{\"aio\": {\"thread_count\": 1, \"intra_op_parallelism\": 2}}", {"/inc.json: aio.", "given twice", "thread"}},
        {"{\"wandb\": {\"enabled\": true}}", {"/inc.json: not supported yet: wandb", "", ""}},
    };
    static const struct {
        const char *member, *says;
    } named[] = {{"\"include\": 3", "run.json: include: expected a path or a list of paths"},
                 {"\"include\": [\"\"]", "run.json: include: expected a path or a list of paths"},
                 {"\"include\": \".\"", "is not a regular file"},
                 {"\"include\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "run.json: include: at most 16 files"},
                 {"\"include\": \"fine.json\", \"wat\": 1", "/run.json: unknown key \"wat\""}};
    static const char *const bad_set[] = {"aio.queue_depth=\"x\""};
    spw_error err = {0};
    (void)state;
    tiny_dir_make(folder);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        if (wrong[i].text != NULL)
            put_file("inc.json", wrong[i].text);
        if (load_with("\"include\": [\"inc.json\"]", NULL, 0, &err) == SPW_OK)
            fail_msg("%s was accepted", wrong[i].text);
        for (int k = 0; k < 3; k++) {
            if (strstr(err.message, wrong[i].says[k]) == NULL)
                fail_msg("%s: \"%s\" should hold \"%s\"", wrong[i].text, err.message, wrong[i].says[k]);
        }
    }
    put_file("fine.json", "{\"aio\": {\"queue_depth\": 4}, \"wat\": 2}");
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
        if (load_with(named[i].member, NULL, 0, &err) == SPW_OK || strstr(err.message, named[i].says) == NULL)
            fail_msg("%s: \"%s\" should hold \"%s\"", named[i].member, err.message, named[i].says);
    }
    put_file("fine.json", "{\"aio\": {\"queue_depth\": 4}}"); /* it is not this file's fault */
    assert_int_equal(load_with("\"include\": \"fine.json\"", bad_set, 1, &err), SPW_ECONFIG);
    assert_non_null(strstr(err.message, "/run.json: aio.queue_depth"));
    tiny_dir_remove(folder);
}

/* The section, out of a configuration; false: it is not in there. */
static bool
leave_out(json_t *root, const char *key)
{
    char part[SPW_CONFIG_KEY_BYTES];
    size_t n = strcspn(key, ".");
    snprintf(part, sizeof part, "%.*s", (int)n, key);
    return key[n] == '.' ? leave_out(json_object_get(root, part), key + n + 1) : json_object_del(root, part) == 0;
}

/* A section that --set makes null is as if the file did not have it, one that is needed too. */
static void
test_null(void **state)
{
    uint32_t sections = 0, there = 0;
    (void)state;
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        json_t *root = json_loads(config_whole, 0, NULL);
        char set[SPW_CONFIG_KEY_BYTES + 8], *text;
        spw_error without = {0}, err = {0};
        spw_status st;
        if (spw__config_rows[i].type == K_SECTION) {
            there += leave_out(root, spw__config_rows[i].key);
            text = json_dumps(root, 0);
            st = spw_config_parse(&d, text, "run.json", NULL, 0, &without);
            free(text);
            snprintf(set, sizeof set, "%s=null", spw__config_rows[i].key);
            if (parse(set, &err) != st || strcmp(err.message, without.message) != 0)
                fail_msg("%s: \"%s\", expected \"%s\"", set, err.message, without.message);
            assert_true(st != SPW_OK || memcmp(&c, &d, sizeof c) == 0);
            sections++;
        }
        json_decref(root);
    }
    assert_true(sections > 15 && there > 7);
}

/* ~/ is the home folder under every key that is a path, and nowhere else; without HOME it is refused. */
static void
test_home(void **state)
{
    char set[600], want[300], *old = getenv("HOME") != NULL ? strdup(getenv("HOME")) : NULL;
    const char *sets[] = {"data.path=null", set};
    uint32_t paths = 0;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(folder);
    assert_int_equal(setenv("HOME", folder, 1), 0);
    snprintf(want, sizeof want, "%s/a b", folder);
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        const void *field = (const char *)&c + row->offset;
        bool one = row->type == K_PATH;
        if ((!one && row->type != K_PATHS) || row->offset == SPW_CONFIG_NOWHERE)
            continue;
        snprintf(set, sizeof set, one ? "%s=~/a b" : "%s=[{\"path\":\"~/a b\"}]", row->key);
        if (spw_config_parse(&c, config_whole, "run.json", sets + (strcmp(row->key, "data.sources") != 0),
                             strcmp(row->key, "data.sources") != 0 ? 1 : 2, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_string_equal(one ? field : ((const spw_path_list *)field)->item[0], want);
        paths++;
    }
    assert_int_equal(paths, 11);
    put_file("config.json", "{\"model_type\":\"gpt2\",\"vocab_size\":300,\"n_embd\":8,\"n_layer\":1,\"n_head\":1}");
    assert_int_equal(parse("model={\"path\":\"~/\"}", &err), SPW_OK);
    assert_int_equal(c.model.width, 8);
    put_file("inc.json", "{\"csv_monitor\":{\"enabled\":true}}");
    assert_int_equal(parse("include=~/inc.json", &err), SPW_OK);
    assert_true(c.csv_monitor.enabled);
    assert_int_equal(parse("spillway.checkpoint_dir=~me/~/a", &err), SPW_OK);
    assert_string_equal(c.run.checkpoint_dir, "~me/~/a");
    assert_int_equal(parse("data.text_field=~/a", &err), SPW_OK);
    assert_string_equal(c.data.text_field, "~/a");
    assert_int_equal(unsetenv("HOME"), 0);
    assert_int_equal(parse("spillway.checkpoint_dir=~/a", &err), SPW_ECONFIG);
    assert_string_equal(err.message,
                        "run.json: spillway.checkpoint_dir: ~/a is in the home folder, and HOME is not set");
    assert_int_equal(parse("spillway.checkpoint_dir=a/~/", &err), SPW_OK);
    if (old != NULL)
        assert_int_equal(setenv("HOME", old, 1), 0);
    free(old);
    tiny_dir_remove(folder);
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

/* Settings away from their defaults survive printing and parsing, one at a time. */
static void
test_dump_settings(void **state)
{
    static const char *const sets[] = {
        "model.embd_pdrop=0.25",
        "spillway.device_memory=\"auto\"",
        "spillway.device_memory=1000000007",
        "spillway.grad_dtype=\"bf16\"",
        "spillway.state_format=\"mixed\"",
        "spillway.state_format=\"fp32\"",
        "spillway.eval_batches=3",
        "spillway.integrity=false",
        "optimizer.type=\"Adam\"",
        "optimizer.params.lr=0.1",
        "scheduler={}",
        "scheduler={\"type\":\"WarmupLR\",\"params\":{\"warmup_type\":\"linear\"}}",
        "scheduler={\"type\":\"WarmupDecayLR\",\"params\":{\"total_num_steps\":9}}",
        "scheduler={\"type\":\"WarmupDecayLR\",\"params\":{\"total_num_steps\":9,\"warmup_max_lr\":\"auto\"}}",
        "scheduler={\"type\":\"OneCycle\",\"params\":{\"cycle_min_lr\":1e-4,\"cycle_max_lr\":1e-3,\"cycle_momentum\":"
        "false}}",
        "scheduler={\"type\":\"LRRangeTest\",\"params\":{\"lr_range_test_step_size\":7}}",
        "zero_optimization.max_reuse_distance=9",
        "zero_optimization.offload_param.max_in_cpu=12345",
        "aio.backend=\"threads\"",
        "zero_optimization.offload_optimizer.nvme_path=[{\"path\":\"/a\",\"weight\":0.1,"
        "\"bytes\":\"3GiB\"},\"/b\"]",
        "data.path=[\"a b\",\"c\"]"};
    (void)state;
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        spw_error err = {0};
        char *text = NULL;
        if (parse(sets[i], &err) != SPW_OK || (text = spw_config_dump(&c)) == NULL)
            fail_msg("%s: %s", sets[i], err.message);
        if (spw_config_parse(&d, text, "dump", NULL, 0, &err) != SPW_OK)
            fail_msg("%s: %s", sets[i], err.message);
        spw_mem_free(text);
        if (isnan(c.scheduler.warmup_max_lr) && isnan(d.scheduler.warmup_max_lr))
            c.scheduler.warmup_max_lr = d.scheduler.warmup_max_lr = 0;
        if (memcmp(&c, &d, sizeof c) != 0) /* both began as zero bytes, padding too */
            fail_msg("%s does not survive", sets[i]);
    }
    assert_int_equal(parse(sets[0], NULL), SPW_OK);
    assert_true(c.model.dropout == 0.25);
}

/* A launcher's file is told from a mistake in JSON. */
static void
test_yaml(void **state)
{
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw_config_parse(&c, "deepspeed_config:\n  zero_stage: 3\n", "default_config.yaml", NULL, 0, &err),
                     SPW_ECONFIG);
    assert_non_null(strstr(err.message, "default_config.yaml:1:"));
    assert_non_null(strstr(err.message, "of accelerate give the file that deepspeed_config_file names"));
    assert_int_equal(spw_config_parse(&c, "deepspeed_config:\n", "run.json", NULL, 0, &err), SPW_ECONFIG);
    assert_null(strstr(err.message, "YAML"));
}

static void
match_line(void *ctx, const char *text)
{
    uint32_t *i = ctx;
    size_t n;
    assert_true(*i < spw__config_row_count);
    n = strlen(spw__config_rows[*i].key);
    assert_memory_equal(text, "  ", 2);
    assert_int_equal(strncmp(text + 2, spw__config_rows[*i].key, n), 0);
    assert_true(text[2 + n] == ':' || text[2 + n] == ' ');
    assert_non_null(strstr(text, spw__config_rows[*i].help));
    ++*i;
}

/* Help has a line for every row of the table, in its order; every default is a value that its own key accepts. */
static void
test_help(void **state)
{
    uint32_t lines = 0;
    (void)state;
    spw_config_help(match_line, &lines);
    assert_int_equal(lines, spw__config_row_count);
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        char set[300];
        spw_error err = {0};
        if (row->fallback == NULL)
            continue;
        snprintf(set, sizeof set, "%s=%s", row->key, row->fallback);
        if (parse(set, &err) != SPW_OK && strcmp(row->key, "bf16.enabled") != 0 &&
            strcmp(row->key, "zero_optimization.stage") != 0 && strcmp(row->key, "optimizer.params.ns_steps") != 0 &&
            strcmp(row->key, "scheduler.params.total_num_steps") != 0 &&
            strstr(err.message, " and no ") == NULL) /* it stands beside the key that turns its section on */
            fail_msg("%s: %s", set, err.message);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_said),
        cmocka_unit_test(test_auto),
        cmocka_unit_test(test_deepspeed_keys),
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_dump),
        cmocka_unit_test(test_dump_settings),
        cmocka_unit_test(test_yaml),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_home),
        cmocka_unit_test(test_null),
        cmocka_unit_test(test_include),
        cmocka_unit_test(test_include_refused),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
