#include "lib_config.h"
#include <stdio.h>
#include <string.h>

const char config_whole[] =
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

char config_heard[4000];

static void
hear(void *ctx, spw_log_level level, const char *line)
{
    size_t n = strlen(config_heard);
    (void)ctx;
    snprintf(config_heard + n, sizeof config_heard - n, "%s %s\n", level == SPW_LOG_WARN ? "warning" : "info", line);
}

void
config_listen(void)
{
    config_heard[0] = '\0';
    spw_log_set(hear, NULL);
}
