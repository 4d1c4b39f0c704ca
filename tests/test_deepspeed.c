/*
 * Configurations as they come from DeepSpeed: written for its parser, for transformers' Trainer or years ago. What it takes
 * is taken with the same meaning, and what is refused or differs is said in words that help.
 */
#include "config_internal.h"
#include "lib_tiny.h"
#include "spw_data.h"
#include "spw_files.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define NEEDED                                                                                                         \
    "\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1},\"data\":{\"path\":\"a\"},"           \
    "\"spillway\":{\"steps\":40},"
#define MICRO "\"train_micro_batch_size_per_gpu\":2,"
#define RATE  "\"optimizer\":{\"params\":{\"lr\":0.1}},"

static spw_config c;
static spw_error err;
static char heard[4000], noted[4000];

static void
hear(void *ctx, spw_log_level level, const char *line)
{
    char *to = level == SPW_LOG_NOTE ? noted : heard;
    size_t n = strlen(to);
    (void)ctx;
    if (level == SPW_LOG_WARN || level == SPW_LOG_NOTE)
        snprintf(to + n, sizeof heard - n, "%s\n", line);
}

/* Parses, with the warnings in heard and what is worth a note in noted. */
static spw_status
parse(const char *text)
{
    spw_status st;
    err = (spw_error){0};
    heard[0] = noted[0] = '\0';
    spw_log_set(hear, NULL);
    st = spw_config_parse(&c, text, "ds.json", NULL, 0, &err);
    spw_log_set(NULL, NULL);
    return st;
}

static void
write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void
takes(const char *text)
{
    if (parse(text) != SPW_OK)
        fail_msg("%s: %s", text, err.message);
}

static void
refuses(const char *text, const char *says)
{
    if (parse(text) != SPW_ECONFIG || strstr(err.message, says) == NULL)
        fail_msg("%s: \"%s\" should hold \"%s\"", text, err.message, says);
}

/* Comments of three kinds and commas before a bracket, as Hjson has them; strings keep theirs, and messages their columns. */
static void
test_comments(void **state)
{
    (void)state;
    takes("// above \"all\n{ " NEEDED "# hash {\n \"bf16\": {\"enabled\": true, }, /* \"bf16\"\n and more, */\n"
          "\"optimizer\": {\"params\": {\"betas\": [0.8, 0.9 /* , */ , ] , // last\n } }, " MICRO
          "\n# end\n}\n// over");
    assert_true(c.bf16 && c.optimizer.beta2 == 0.9);
    takes("{" NEEDED MICRO "\"zero_optimization\":{\"stage\":3,\"offload_param\":{\"device\":\"nvme\","
          "\"nvme_path\":\"/a//b#\\\"/*c,]\"}}}");
    assert_string_equal(c.zero.param_path.item[0], "/a//b#\"/*c,]");
    refuses("{ // one\n  /* two */ \"bf16\": nothing }", "ds.json:2:");
    refuses("{\n \"bf16\": {}, /* never closed\n }", "ds.json:2:");
    refuses("{\"bf16\": {,}}", "ds.json:1:");
    refuses("{\"betas\": [1,,]}", "ds.json:1:");
    refuses("{\"bf16\": \"cut", "ds.json:1:");
    refuses("// nothing", "ds.json:1:");
}

/* Spellings of other years mean what they meant: a bare true is stage 1, bfloat16 is bf16, an underscore begins a comment. */
static void
test_older(void **state)
{
    (void)state;
    takes("{" NEEDED MICRO "\"zero_optimization\":true,\"bfloat16\":{\"enabled\":true},\"_comment\":[1]}");
    assert_int_equal(c.zero.stage, 1);
    assert_true(c.bf16);
    assert_non_null(strstr(heard, "zero_optimization true is deprecated; use zero_optimization.stage"));
    takes("{" NEEDED MICRO "\"zero_optimization\":false}");
    assert_int_equal(c.zero.stage, 0);
    refuses("{" NEEDED MICRO "\"zero_optimization\":2}",
            "zero_optimization: expected an object such as {\"stage\": 3}, got integer 2");
    refuses("{" NEEDED MICRO "\"bf16\":{},\"bfloat16\":{}}", "bf16 is given twice, once as bfloat16");
    assert_null(strstr(err.message, "mistakes")); /* one, said once */
    takes("{" NEEDED MICRO "\"scheduler\":{\"type\":\"WarmupLR\",\"params\":{\"last_batch_iteration\":-1}},"
          "\"optimizer\":{\"type\":\"Adam\",\"params\":{\"torch_adam\":true,\"fused\":true}}}");
    refuses("{" NEEDED MICRO "\"scheduler\":{\"type\":\"WarmupLR\",\"params\":{\"last_batch_iteration\":5}}}",
            "last_batch_iteration (--resume");
}

/* The type in which gradients wait for their updates; ours goes first, so that --set may say another. */
static void
test_grad_accum(void **state)
{
    (void)state;
    takes("{" NEEDED MICRO "\"bf16\":{\"enabled\":true},\"data_types\":{\"grad_accum_dtype\":\"bf16\"}}");
    assert_int_equal(c.run.grad_dtype, SPW_BF16);
    takes("{" NEEDED MICRO "\"fp16\":{\"enabled\":true},\"data_types\":{\"grad_accum_dtype\":\"fp32\"}}");
    assert_int_equal(c.run.grad_dtype, SPW_F32);
    takes(
        "{\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1},\"data\":{\"path\":\"a\"}," MICRO
        "\"spillway\":{\"steps\":1,\"grad_dtype\":\"fp32\"},\"data_types\":{\"grad_accum_dtype\":\"bf16\"}}");
    assert_int_equal(c.run.grad_dtype, SPW_F32);
    takes("{" NEEDED MICRO "\"bf16\":{\"enabled\":true},\"communication_data_type\":\"BF16\","
          "\"data_types\":{\"grad_accum_dtype\":\"torch.bfloat16\"}}");
    assert_int_equal(c.comm_dtype, SPW_BF16);
    assert_int_equal(c.run.grad_dtype, SPW_BF16);
    takes("{" NEEDED MICRO "\"fp16\":{\"enabled\":true},\"communication_data_type\":\"Float32\","
          "\"seq_parallel_communication_data_type\":\"half\",\"data_types\":{\"grad_accum_dtype\":\"float32\"}}");
    assert_int_equal(c.comm_dtype, SPW_F32);
    assert_int_equal(c.run.grad_dtype, SPW_F32);
    refuses("{" NEEDED MICRO "\"communication_data_type\":\"int8\"}",
            "communication_data_type: expected fp32, bf16 or fp16");
    refuses("{" NEEDED MICRO "\"communication_data_type\":\"\"}", "communication_data_type: expected");
}

/* What DeepSpeed takes and does nothing with is taken too, and does nothing. */
static void
test_without_effect(void **state)
{
    (void)state;
    takes("{" NEEDED MICRO
          "\"activation_checkpointing\":{\"partition_activations\":true,\"number_checkpoints\":null}}");
    for (unsigned stage = 0; stage < 3; stage++) {
        char text[500];
        snprintf(text, sizeof text,
                 "{" NEEDED MICRO "\"zero_optimization\":{\"stage\":%u,\"offload_param\":{\"device\":\"cpu\"}}}",
                 stage);
        takes(text);
        assert_int_equal(c.zero.offload_param, SPW_TIER_DEVICE);
        assert_non_null(strstr(heard, "zero_optimization.offload_param has no effect in stage"));
    }
    takes("{" NEEDED MICRO RATE "\"wandb\":{\"project\":\"p\"},\"flops_profiler\":{\"profile_step\":1},"
          "\"autotuning\":{\"enabled\":false,\"fast\":true},\"amp\":{\"opt_level\":\"O1\"}}");
    assert_string_equal(heard, "");
    takes("{" NEEDED MICRO RATE "\"amp\":{\"enabled\":\"auto\",\"opt_level\":\"auto\"},"
          "\"zero_optimization\":{\"log_trace_cache_warnings\":true}}");
    assert_string_equal(heard, "");
    takes("{" NEEDED MICRO RATE
          "\"tensorboard\":{\"enabled\":true,\"output_path\":\"runs\",\"job_name\":\"a\"},\"csv_monitor\":{}}");
    assert_string_equal(heard, "");
    takes("{" NEEDED MICRO RATE "\"compile\":{\"deepcompile\":false},\"log_level\":\"warning\","
          "\"checkpoint\":{\"parallel_write\":{\"pipeline_stage\":true},\"checkpoint_serialization\":false,\"writer\":"
          "{\"type\":\"fast\"}},"
          "\"compression_training\":{\"weight_quantization\":{\"shared_parameters\":{\"enabled\":false,\"bits\":8},"
          "\"different_groups\":{\"wq1\":{\"params\":{\"start_bits\":8},\"modules\":[\"*\"]}}}},"
          "\"timers\":{\"throughput\":{\"enabled\":true}}}");
    assert_string_equal(heard, "");
    for (int size = 0; size < 3; size++) {
        char text[400];
        snprintf(text, sizeof text,
                 "{" NEEDED MICRO RATE "\"tensor_parallel\":{\"autotp_size\":%d,\"tp_grain_size\":64}}", size);
        if (size < 2)
            takes(text);
        else
            refuses(text, "not supported yet: tensor_parallel");
    }
    refuses("{" NEEDED MICRO "\"compression_training\":{\"head_pruning\":{\"shared_parameters\":{\"enabled\":true},"
            "\"different_groups\":{\"a\":{\"params\":{\"dense_ratio\":0.5}}}}}}",
            "not supported yet: compression_training");
    takes("{" NEEDED MICRO RATE
          "\"tensorboard\":{\"enabled\":true,\"output_path\":\"runs\",\"job_name\":\"a\"},\"csv_monitor\":{}}");
    assert_true(c.tensorboard.enabled && !c.csv_monitor.enabled);
    assert_string_equal(c.tensorboard.output_path, "runs");
    assert_string_equal(c.csv_monitor.job_name, "DeepSpeedJobName");
}

/* Keys that change nothing here are named once, unless they say what is so without them. */
static void
test_named_without_effect(void **state)
{
    (void)state;
    takes(
        "{" NEEDED MICRO RATE
        "\"zero_optimization\":{\"stage\":3,\"overlap_comm\":true,\"reduce_bucket_size\":2e8,\"contiguous_gradients\":"
        "true,\"stage3_max_reuse_distance\":1e9,\"stage3_param_persistence_threshold\":\"auto\",\"sub_group_size\":1e9}"
        ","
        "\"wall_clock_breakdown\":false,\"steps_per_print\":null,"
        "\"checkpoint\":{\"tag_validation\":\"Ignore\",\"checkpoint_serialization\":false,\"writer\":{\"type\":"
        "\"fast\"}}}");
    assert_string_equal(heard, "");
    assert_string_equal(noted, "ds.json: these change nothing here, as spillway help config explains: "
                               "zero_optimization.overlap_comm; zero_optimization.reduce_bucket_size; "
                               "checkpoint.tag_validation; checkpoint.checkpoint_serialization; checkpoint.writer\n");
    takes("{" NEEDED MICRO RATE "\"zero_optimization\":{\"stage\":2,\"overlap_comm\":false}}");
    assert_string_equal(noted, "");
}

/* Every mistake is said in one go, a line each: of keys, of values, of what is missing, and of what contradicts another. */
static void
test_all_at_once(void **state)
{
    (void)state;
    refuses("{\"fp16\":{\"enabled\":\"yes\"},\"bf16\":true,\"zero_optimization\":{\"stage\":3,\"aio\":{\"block_size\":"
            "262144}},"
            "\"train_batch_size\":\"auto\",\"wandb\":{\"enabled\":true}}",
            "ds.json: 7 mistakes\n"
            "  fp16.enabled: expected true or false, got string \"yes\"\n"
            "  bf16: expected an object such as {\"enabled\": true}, got true\n"
            "  unknown key \"zero_optimization.aio\"; \"aio\" belongs in the top level; did you mean \"aio\"?\n"
            "  not supported yet: wandb (monitor: tensorboard writes what wandb sync takes); --set KEY=null leaves one "
            "out\n"
            "  section model is missing: --set model.path=FOLDER");
    refuses("{" NEEDED MICRO
            "\"bf16\":{\"enabled\":true},\"train_batch_size\":7,\"zero_optimization\":{\"offload_optimizer\":"
            "{\"device\":\"nvme\"}},\"scheduler\":{\"type\":\"WarmupDecayLR\"}}",
            "ds.json: 3 mistakes\n  train_batch_size 7 is not a multiple of");
    assert_non_null(strstr(err.message, "\n  zero_optimization.offload_optimizer needs stage 1, 2 or 3, stage is 0\n"));
    assert_non_null(strstr(err.message, "\n  scheduler.params.total_num_steps is needed for WarmupDecayLR"));
    refuses("{" NEEDED MICRO
            "\"a0\":1,\"a1\":1,\"a2\":1,\"a3\":1,\"a4\":1,\"a5\":1,\"a6\":1,\"a7\":1,\"a8\":1,\"a9\":1,"
            "\"b0\":1,\"b1\":1,\"b2\":1}",
            "ds.json: 13 mistakes\n  unknown key \"a0\"");
    assert_non_null(strstr(err.message, "\n  and "));
    assert_string_equal(strrchr(err.message, ' '), " more");
    assert_int_equal(spw_config_parse(&c, "{\"a\":1,\"b\":1}", "ds.json", NULL, 0, NULL), SPW_ECONFIG);
    refuses("{" NEEDED "\"train_batch_size\":3,\"gradient_accumulation_steps\":4}",
            "train_batch_size 3 is not a multiple of");
    refuses("{" NEEDED MICRO "\"optimizer\":{\"params\":{\"betas\":[0.9]}}}", "got list [0.9]");
}

/* All that is missing is named at once, up to what a message holds; an optimizer by its name, not by its parameters. */
static void
test_missing(void **state)
{
    (void)state;
    refuses("{" NEEDED MICRO "\"wandb\":{\"enabled\":true},\"pipeline\":{\"stages\":2},\"sparse_gradients\":true}",
            "ds.json: not supported yet: wandb (monitor: tensorboard writes what wandb sync takes); "
            "pipeline (pipeline parallelism); sparse_gradients (");
    refuses("{" NEEDED MICRO "\"wandb\":{\"enabled\":true},\"comet\":{\"enabled\":true},"
            "\"torch_autocast\":{\"enabled\":true},\"curriculum_learning\":{\"enabled\":true},\"flops_profiler\":{"
            "\"enabled\":true},\"comms_logger\":{\"enabled\":true},"
            "\"autotuning\":{\"enabled\":true},\"amp\":{\"enabled\":true},\"nebula\":{\"enabled\":true},"
            "\"elasticity\":{\"enabled\":true},\"eigenvalue\":{\"enabled\":true}}",
            "; ...");
    refuses("{" NEEDED MICRO "\"optimizer\":{\"params\":{\"freeze_step\":4},\"type\":\"OneBitAdam\"}}",
            "not supported yet: optimizer.type \"OneBitAdam\"; Adam, AdamW");
    refuses("{" NEEDED MICRO "\"scheduler\":{\"params\":{\"cycle_min_lr\":0},\"type\":\"Cyclic\"}}",
            "scheduler.type \"Cyclic\" (one of WarmupLR|");
    refuses("{" NEEDED MICRO "\"optimizer\":{\"params\":{\"max_grad_norm\":1}}}",
            "did you mean \"gradient_clipping\"?");
    refuses("{" NEEDED MICRO "\"max_steps\":4}", "unknown key \"max_steps\"; did you mean \"spillway.steps\"?");
    refuses("{" NEEDED MICRO "\"data_types\":{\"target_modules\":[]}}", "did you mean \"spillway.lora.targets\"?");
    refuses("{" NEEDED
            "\"train_batch_size\":64,\"train_micro_batch_size_per_gpu\":8,\"gradient_accumulation_steps\":2}",
            "times 1 rank; it is for 4 ranks (train -n 4, plan --set spillway.ranks=4)");
    refuses("{" NEEDED "\"train_batch_size\":3,\"train_micro_batch_size_per_gpu\":8}",
            "train_batch_size 3 is not a multiple of train_micro_batch_size_per_gpu 8 times 1 rank");
    refuses("{" NEEDED "\"train_batch_size\":7,\"gradient_accumulation_steps\":2}",
            "train_batch_size 7 is not a multiple of gradient_accumulation_steps 2 times 1 rank");
}

/* Where a Trainer would fill in an argument, its default stands and is said once; the number of steps is known. */
static void
test_trainer(void **state)
{
    (void)state;
    takes("{" NEEDED MICRO
          "\"gradient_accumulation_steps\":\"auto\",\"gradient_clipping\":\"auto\",\"bf16\":{\"enabled\":\"auto\"},"
          "\"optimizer\":{\"type\":\"AdamW\",\"params\":{\"lr\":\"auto\",\"betas\":\"auto\"}},\"scheduler\":{\"type\":"
          "\"WarmupDecayLR\",\"params\":{\"total_num_steps\":\"auto\",\"warmup_num_steps\":\"auto\",\"warmup_max_lr\":"
          "\"auto\"}},"
          "\"zero_optimization\":{\"stage3_max_live_parameters\":\"auto\"}}");
    assert_int_equal(c.scheduler.total_num_steps, 40);
    assert_true(c.optimizer.lr == 5e-5 && c.scheduler.warmup_max_lr == 5e-5 && c.scheduler.warmup_num_steps == 0);
    assert_true(c.gradient_clipping == 1);
    assert_string_equal(heard,
                        "ds.json: \"auto\" is not filled in from a Trainer's arguments here, their defaults stand: "
                        "gradient_clipping 1.0; optimizer.params.lr 5e-05; optimizer.params.betas [0.9, 0.999]; "
                        "scheduler.params.warmup_num_steps 0; bf16.enabled and fp16.enabled false (so fp32)\n");
    takes("{" NEEDED MICRO "\"gradient_clipping\":\"auto\"}"); /* optimizer and schedule are the Trainer's */
    assert_true(c.optimizer.lr == 5e-5);
    assert_non_null(strstr(heard, "defaults stand: gradient_clipping 1.0; optimizer.params.lr 5e-05; a constant rate "
                                  "(a Trainer's falls to 0, as WarmupDecayLR's)\n"));
    takes("{" NEEDED MICRO "\"gradient_clipping\":\"auto\",\"optimizer\":{\"type\":\"AdamW\"}}"); /* DeepSpeed's */
    assert_true(c.optimizer.lr == 0.001);
    assert_non_null(strstr(heard, "; optimizer.params.lr 0.001;"));
    takes("{" NEEDED MICRO RATE "\"bf16\":{\"enabled\":true},\"fp16\":{\"enabled\":\"auto\"},"
          "\"zero_optimization\":{\"stage\":3,\"reduce_bucket_size\":\"auto\"}}");
    assert_string_equal(heard, "");
    refuses("{" NEEDED "\"train_batch_size\":\"auto\",\"train_micro_batch_size_per_gpu\":\"auto\"}",
            "is needed, as a number: \"auto\" is for transformers' Trainer");
}

/* Accelerate fills in stage and places, too. */
static void
test_accelerate(void **state)
{
    (void)state;
    takes("{" NEEDED MICRO RATE "\"zero_optimization\":{\"stage\":\"auto\",\"offload_optimizer\":{\"device\":\"auto\"},"
          "\"offload_param\":{\"device\":\"auto\"},\"stage3_gather_16bit_weights_on_model_save\":\"auto\"}}");
    assert_int_equal(c.zero.stage, 2);
    assert_non_null(strstr(heard,
                           "stand: zero_optimization.stage 2; zero_optimization.offload_optimizer.device \"none\"; "
                           "zero_optimization.offload_param.device \"none\";"));
    takes("{" NEEDED MICRO RATE
          "\"zero_optimization\":{\"stage\":\"auto\",\"offload_optimizer\":{\"device\":\"cpu\"}}}");
    assert_true(c.zero.stage == 2 && c.zero.offload_optimizer == SPW_TIER_HOST);
}

/* A learning rate that nobody chose is said, unless a schedule has one of its own. */
static void
test_no_rate(void **state)
{
    const char *const none[] = {"", "\"optimizer\":{\"type\":\"Lion\",\"params\":{\"lr\":null}}",
                                "\"scheduler\":{\"type\":\"WarmupLR\"}",
                                "\"scheduler\":{\"type\":\"WarmupCosineLR\",\"params\":{\"total_num_steps\":9}}"};
    const char *const own[] = {"\"scheduler\":{\"type\":\"WarmupLR\",\"params\":{\"warmup_max_lr\":0.1}}",
                               "\"scheduler\":{\"type\":\"LRRangeTest\"}",
                               "\"scheduler\":{\"type\":\"OneCycle\",\"params\":{\"cycle_min_lr\":0.1,"
                               "\"cycle_max_lr\":0.2}}"};
    char text[500];
    (void)state;
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        snprintf(text, sizeof text, "{" NEEDED MICRO "%s}", none[i]);
        takes(text);
        snprintf(text, sizeof text,
                 "ds.json: no learning rate is given, this stands: optimizer.type %s, optimizer.params.lr 0.001\n",
                 i == 1 ? "Lion" : "AdamW");
        assert_string_equal(heard, text);
    }
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        snprintf(text, sizeof text, "{" NEEDED MICRO "%s}", own[i]);
        takes(text);
        assert_string_equal(heard, "");
    }
    takes("{" NEEDED MICRO "\"optimizer\":{\"type\":\"Muon\"}}");
    assert_string_equal(heard,
                        "ds.json: no learning rate is given, this stands: optimizer.type Muon, optimizer.params.lr "
                        "0.02, adam_lr 0.0003\n");
    takes("{" NEEDED MICRO "\"optimizer\":{\"type\":\"Muon\",\"params\":{\"muon_lr\":0.1}}}");
    assert_string_equal(heard, "");
    takes("{" NEEDED MICRO "\"optimizer\":{\"type\":\"Muon\",\"params\":{\"lr\":\"auto\",\"momentum\":\"auto\"}}}");
    assert_non_null(strstr(heard, "stand: optimizer.params.lr 5e-05; optimizer.params.momentum 0.95; a constant"));
    takes("{" NEEDED MICRO "\"gradient_clipping\":\"auto\",\"scheduler\":{\"type\":\"LRRangeTest\"}}");
    assert_null(strstr(heard, "optimizer.params.lr"));
}

/* A folder's weights are read or missing; what cannot be read is not taken for missing. */
static void
test_weights(void **state)
{
    static const struct {
        const char *file, *says; /* NULL: taken */
    } cases[] = {{"pytorch_model.bin", NULL},
                 {"pytorch_model-00001-of-00002.bin", "pytorch_model-00001-of-00002.bin"},
                 {"model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors"},
                 {"consolidated.00.pth", "consolidated.00.pth"},
                 {"a.gguf", "a.gguf"},
                 {"model.safetensors.part", "has model.safetensors.part, which is not read"},
                 {"pytorch_model-00001-of-00002.bin.part", "has pytorch_model-00001-of-00002.bin.part, which"},
                 {"adapter_model.bin", "has adapter_model.bin (adapters of a model that adapter_config.json does not "
                                       "name), which is not read"},
                 {"training_args.bin", NULL}};
    char folder[] = "/tmp/spw-weights-XXXXXX", path[200], text[400];
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_file(path, "{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1}");
    snprintf(text, sizeof text, "{" MICRO "\"model\":{\"path\":\"%s\"},\"data\":{\"path\":\"a\"}}", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, cases[i].file);
        write_file(path, "x");
        if (cases[i].says != NULL)
            refuses(text, cases[i].says);
        else
            takes(text);
        assert_int_equal(remove(path), 0);
    }
    snprintf(path, sizeof path, "%s/adapter_config.json", folder);
    write_file(path, "{\"base_model_name_or_path\":\"owner/base\"}");
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", folder);
    write_file(path, "x");
    refuses(text, "has adapter_model.safetensors (adapters of owner/base, as adapter_config.json says), which is not");
    assert_int_equal(remove(path), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    write_file(path, "version https://git-lfs.github.com/spec/v1\n");
    takes(text); /* what is in it is looked at when it is opened */
    assert_int_equal(parse("{" MICRO "\"model\":{\"path\":\"owner/name\"},\"data\":{\"path\":\"a\"}}"), SPW_ENOENT);
    assert_non_null(strstr(err.message, "\"hf download owner/name\" fetches it there"));
    assert_int_equal(parse("{" MICRO "\"model\":{\"path\":\"./name\"},\"data\":{\"path\":\"a\"}}"), SPW_ENOENT);
    assert_non_null(
        strstr(err.message, "there is no folder ./name; \"hf download OWNER/NAME --local-dir ./name\" fetches"));
    {
        spw_hf_reader *weights = NULL;
        assert_int_equal(spw_hf_reader_open(&weights, folder, &err), SPW_ECORRUPT);
        assert_non_null(strstr(err.message, "is a pointer of Git LFS"));
    }
    assert_int_equal(spw_dir_remove(folder, &err), SPW_OK);
}

/* Text is not bytes to a model whose tokenizer cannot be read; where its folder has none at all, that is said. */
static void
test_unread_tokenizer(void **state)
{
    char folder[] = "/tmp/spw-tokenizer-XXXXXX", path[200], other[200], text[600];
    const char *const bytes[] = {"data.tokenizer=bytes"};
    spw_data *d = NULL;
    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_file(path, "{\"model_type\":\"gpt2\",\"vocab_size\":300,\"n_embd\":8,\"n_layer\":1,\"n_head\":1}");
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    write_file(path, "x");
    snprintf(path, sizeof path, "%s/text.txt", folder);
    write_file(path, "A text that is long enough for a few sequences of tokens, whatever they are, and then some.\n");
    snprintf(text, sizeof text,
             "{" MICRO RATE "\"model\":{\"path\":\"%s\"},\"data\":{\"path\":\"%s\",\"seq_length\":8,"
             "\"validation_split\":0,\"cache_dir\":\"%s\"}}",
             folder, path, folder);
    takes(text);
    assert_int_equal(spw_config_open_data(&d, &c, &err), SPW_ECONFIG);
    assert_non_null(strstr(err.message, "has a tokenizer that is not read: tokenizer.json is"));
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    snprintf(other, sizeof other, "%s/tokenizer_config.json", folder);
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(spw_config_open_data(&d, &c, &err), SPW_ECONFIG);
    snprintf(path, sizeof path, "%s/vocab.json", folder); /* without merges.txt */
    assert_int_equal(rename(other, path), 0);
    assert_int_equal(spw_config_open_data(&d, &c, &err), SPW_ECONFIG);
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(remove(other), 0);
    spw_log_set(hear, NULL);
    assert_int_equal(spw_config_open_data(&d, &c, &err), SPW_OK);
    assert_non_null(strstr(heard, "bytes are tokens, because model.path"));
    spw_data_close(d);
    heard[0] = '\0';
    assert_int_equal(spw_config_parse(&c, text, "ds.json", bytes, 1, &err), SPW_OK);
    assert_int_equal(spw_config_open_data(&d, &c, &err), SPW_OK);
    spw_data_close(d);
    assert_string_equal(heard, "");
    spw_log_set(NULL, NULL);
    assert_int_equal(spw_dir_remove(folder, &err), SPW_OK);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_comments),         cmocka_unit_test(test_older),
        cmocka_unit_test(test_grad_accum),       cmocka_unit_test(test_without_effect),
        cmocka_unit_test(test_all_at_once),      cmocka_unit_test(test_missing),
        cmocka_unit_test(test_trainer),          cmocka_unit_test(test_weights),
        cmocka_unit_test(test_unread_tokenizer), cmocka_unit_test(test_no_rate),
        cmocka_unit_test(test_accelerate),       cmocka_unit_test(test_named_without_effect)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
