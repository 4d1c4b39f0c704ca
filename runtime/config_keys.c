/*
 * The table of keys: DeepSpeed's with their names, aliases, defaults and meaning, and ours. Parsing, ranges, help and the
 * printed configuration all come from here.
 */
#include "config_internal.h"
#include <string.h>
#include <strings.h>

#define AT(field)   offsetof(spw_config, field)
#define SIZE(field) sizeof(((spw_config *)0)->field)
#define BIG         1e18
#define SECTION(k, h)                                                                                                  \
    {                                                                                                                  \
        k, NULL, K_SECTION, C_BUILT, 0, 0, 0, 0, NULL, h, NULL                                                         \
    }
#define BOOL(k, a, f, d, h)                                                                                            \
    {                                                                                                                  \
        k, a, K_BOOL, C_BUILT, AT(f), 0, 0, 1, d, h, NULL                                                              \
    }
#define U64(k, a, f, lo, hi, d, h)                                                                                     \
    {                                                                                                                  \
        k, a, K_U64, C_BUILT, AT(f), 0, lo, hi, d, h, NULL                                                             \
    }
#define U32(k, a, f, lo, hi, d, h)                                                                                     \
    {                                                                                                                  \
        k, a, K_U32, C_BUILT, AT(f), 0, lo, hi, d, h, NULL                                                             \
    }
#define REAL(k, a, f, lo, hi, d, h)                                                                                    \
    {                                                                                                                  \
        k, a, K_REAL, C_BUILT, AT(f), 0, lo, hi, d, h, NULL                                                            \
    }
#define TEXT(k, f, d, choices, h)                                                                                      \
    {                                                                                                                  \
        k, NULL, K_TEXT, C_BUILT, AT(f), SIZE(f), 0, 0, d, h, choices                                                  \
    }
#define PATH(k, f, d, h)                                                                                               \
    {                                                                                                                  \
        k, NULL, K_PATH, C_BUILT, AT(f), SIZE(f), 0, 0, d, h, NULL                                                     \
    }
/* Checked like any other key, said once, kept nowhere: type, range and default are DeepSpeed's. */
#define INERT(k, a, t, lo, hi, d, h)                                                                                   \
    {                                                                                                                  \
        k, a, t, C_INERT, SPW_CONFIG_NOWHERE, 0, lo, hi, d, h, NULL                                                    \
    }
#define INERT_BOOL(k, d, h)         INERT(k, NULL, K_BOOL, 0, 1, d, h)
#define INERT_INT(k, lo, hi, d, h)  INERT(k, NULL, K_U64, lo, hi, d, h)
#define INERT_ANY(k, h)             INERT(k, NULL, K_ANY, 0, 0, NULL, h)
#define INERT_ZERO3(k, t, hi, d, h) INERT(ZO k, "stage3_" k, t, 0, hi, d, h)
#define UNBUILT(k, inert, h)                                                                                           \
    {                                                                                                                  \
        k, NULL, K_ANY, C_UNBUILT, 0, 0, 0, 0, inert, h, NULL                                                          \
    }
#define MONITOR(k, f, h)                                                                                               \
    SECTION(k, h), BOOL(k ".enabled", NULL, f.enabled, "false", "write them"),                                         \
        PATH(k ".output_path", f.output_path, "\"\"", "folder above the job's; empty: the working directory"),         \
        TEXT(k ".job_name", f.job_name, "\"DeepSpeedJobName\"", NULL, "folder of the job")
/* A section that is off unless its own enabled is true. */
#define SWITCHED(k, h) UNBUILT(k, "{\"enabled\": false}", h)
#define ZO             "zero_optimization."
#define SWAP_PATHS                                                                                                     \
    "swap folder, or a list of folders or {path, weight, bytes}; weight: its share (1), bytes: limit of its swap file"

const key_row spw__config_rows[] = {
    {"include", NULL, K_PATHS, C_BUILT, SPW_CONFIG_NOWHERE, 0, 0, 0, NULL,
     "configuration file or list of files below this one: what this file says wins, then the last that says it", NULL},
    U64("train_batch_size", NULL, train_batch_size, 1, 1e9, NULL, "sequences per optimizer step"),
    U64("train_micro_batch_size_per_gpu", NULL, micro_batch, 1, 1e6, NULL, "sequences per micro-batch"),
    U64("gradient_accumulation_steps", NULL, accumulation, 1, 1e6, NULL, "micro-batches per optimizer step"),
    U32("sequence_parallel_size", NULL, sequence_ranks, 1, 65536, "1",
        "so many ranks in a row have a part of the positions of each sequence, and of attention's heads"),
    REAL("gradient_clipping", NULL, gradient_clipping, 0, 1e30, "0.0", "largest global gradient norm; 0: off"),

    SECTION("optimizer", "the optimizer"),
    TEXT("optimizer.type", optimizer.type, "\"AdamW\"", NULL, "Adam, AdamW, Adagrad, Lion, SGD or Muon"),
    SECTION("optimizer.params", "its hyper-parameters"),
    REAL("optimizer.params.lr", NULL, optimizer.lr, 0, 1e6, "0.001",
         "learning rate per step; where it is not given, 0.01 of Adagrad, muon_lr or else 0.02 of Muon"),
    {"optimizer.params.betas", NULL, K_BETAS, C_BUILT, 0, 0, 0, 1, "[0.9, 0.999]",
     "Adam, Lion: decay of the moments; where it is not given, [0.9, 0.95] of Muon's AdamW", NULL},
    REAL("optimizer.params.eps", NULL, optimizer.eps, 1e-30, 1, "1e-08",
         "added to the denominator; where it is not given, 1e-10 of Adagrad and Muon's AdamW"),
    REAL("optimizer.params.weight_decay", NULL, optimizer.weight_decay, 0, 1e6, "0.0",
         "weight decay; where it is not given, 0.01 of AdamW with torch_adam"),
    BOOL("optimizer.params.adam_w_mode", NULL, optimizer.adam_w_mode, "true",
         "Adam: decoupled decay, as AdamW always has it; false: L2"),
    BOOL("optimizer.params.bias_correction", NULL, optimizer.bias_correction, "true",
         "divide the moments by 1 - beta^t"),
    REAL("optimizer.params.momentum", NULL, optimizer.momentum, 0, 1e6, "0.0",
         "SGD, Muon: momentum; where it is not given, 0.95 of Muon"),
    REAL("optimizer.params.dampening", NULL, optimizer.dampening, 0, 1, "0.0", "SGD: dampening of the momentum"),
    BOOL("optimizer.params.nesterov", NULL, optimizer.nesterov, "false",
         "SGD, Muon: Nesterov's momentum; where it is not given, true of Muon"),
    REAL("optimizer.params.lr_decay", NULL, optimizer.lr_decay, 0, 1e6, "0.0", "Adagrad: lr / (1 + (t - 1) lr_decay)"),
    REAL("optimizer.params.muon_lr", NULL, optimizer.muon_lr, 0, 1e6, NULL,
         "Muon: learning rate of matrices between embeddings and head, which are made orthogonal; not given: lr"),
    REAL("optimizer.params.adam_lr", NULL, optimizer.adam_lr, 0, 1e6, NULL,
         "Muon: learning rate of all else, which takes AdamW; not given: lr, or 0.0003 without that"),
    U32("optimizer.params.ns_steps", NULL, optimizer.ns_steps, 1, 20, "5",
        "Muon: iterations of Newton and Schulz in a step"),
    {"optimizer.params.ns_method", NULL, K_TEXT, C_INERT, SPW_CONFIG_NOWHERE, 0, 0, 0, "\"gram\"",
     "Muon: gram and standard are the same iteration in exact arithmetic, and the standard one is done",
     "gram|standard"},
    {"optimizer.params.torch_adam", NULL, K_BOOL, C_BUILT, SPW_CONFIG_NOWHERE, 0, 0, 1, "false",
     "one implementation serves; where weight_decay is not given, PyTorch's 0.01 of AdamW", NULL},
    INERT_BOOL("optimizer.params.fused", "false", "one implementation serves"),
    UNBUILT("optimizer.params.fp32_optimizer_states", "true", "spillway.state_format split-bf16"),
    UNBUILT("optimizer.params.amsgrad", "false", "AMSGrad"),
    UNBUILT("optimizer.legacy_fusion", "false", "legacy fusion"),

    SECTION("scheduler", "learning rate over steps"),
    TEXT("scheduler.type", scheduler.type, "\"\"", "|WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle|LRRangeTest",
         "the schedule; empty: constant"),
    SECTION("scheduler.params", "its parameters"),
    REAL("scheduler.params.warmup_min_lr", NULL, scheduler.warmup_min_lr, 0, 1e6, "0.0", "lr at the start"),
    REAL("scheduler.params.warmup_max_lr", NULL, scheduler.warmup_max_lr, 0, 1e6, NULL,
         "lr after the warm-up; where it is not given, the optimizer's, and 0.001 of WarmupDecayLR (of which auto and "
         "null "
         "are the optimizer's)"),
    U64("scheduler.params.warmup_num_steps", NULL, scheduler.warmup_num_steps, 0, 1e12, "1000", "steps of warm-up"),
    U64("scheduler.params.total_num_steps", NULL, scheduler.total_num_steps, 0, 1e12, "0", "steps in all"),
    REAL("scheduler.params.warmup_min_ratio", NULL, scheduler.warmup_min_ratio, 0, 1, "0.0",
         "share of lr at the start (cosine)"),
    REAL("scheduler.params.cos_min_ratio", NULL, scheduler.cos_min_ratio, 0, 1, "0.0001",
         "share of lr at the end (cosine)"),
#define SCHEDULE "scheduler.params."
    REAL(SCHEDULE "cycle_min_lr", NULL, scheduler.cycle_min_lr, 0, 1e6, NULL, "OneCycle: lr at both ends of the cycle"),
    REAL(SCHEDULE "cycle_max_lr", NULL, scheduler.cycle_max_lr, 0, 1e6, NULL, "OneCycle: lr in its middle"),
    U64(SCHEDULE "cycle_first_step_size", NULL, scheduler.first_steps, 1, 1e12, "2000",
        "OneCycle: updates up to there"),
    REAL(SCHEDULE "cycle_second_step_size", NULL, scheduler.second_steps, 0, 1e12, NULL,
         "OneCycle: updates down again; none given: as many"),
    U64(SCHEDULE "cycle_first_stair_count", NULL, scheduler.first_stairs, 0, 1e12, "0",
        "OneCycle: stairs up; 0: straight"),
    REAL(SCHEDULE "cycle_second_stair_count", NULL, scheduler.second_stairs, 0, 1e12, NULL,
         "OneCycle: stairs down; none given: as many"),
    U64(SCHEDULE "decay_step_size", NULL, scheduler.decay_steps, 0, 1e12, "0",
        "OneCycle: updates of a decay behind the cycle; 0: none"),
    REAL(SCHEDULE "decay_lr_rate", NULL, scheduler.decay_lr_rate, 0, 1e6, "0.0", "OneCycle: lr / (1 + rate decays)"),
    BOOL(SCHEDULE "cycle_momentum", NULL, scheduler.cycle_momentum, "true",
         "OneCycle: beta1 goes the other way, beta2 is 0.99"),
    REAL(SCHEDULE "cycle_min_mom", NULL, scheduler.cycle_min_mom, 0, 0.99999, "0.8", "OneCycle: beta1 in the middle"),
    REAL(SCHEDULE "cycle_max_mom", NULL, scheduler.cycle_max_mom, 0, 0.99999, "0.9", "OneCycle: beta1 at both ends"),
    REAL(SCHEDULE "decay_mom_rate", NULL, scheduler.decay_mom_rate, 0, 1e6, "0.0", "OneCycle: beta1 (1 + rate decays)"),
    REAL(SCHEDULE "lr_range_test_min_lr", NULL, scheduler.range_min_lr, 0, 1e6, "0.001", "LRRangeTest: the first lr"),
    U64(SCHEDULE "lr_range_test_step_size", NULL, scheduler.range_steps, 1, 1e12, "2000",
        "LRRangeTest: updates of an interval"),
    REAL(SCHEDULE "lr_range_test_step_rate", NULL, scheduler.range_rate, 0, 1e6, "1.0",
         "LRRangeTest: lr (1 + rate intervals)"),
    BOOL(SCHEDULE "lr_range_test_staircase", NULL, scheduler.range_stairs, "false", "LRRangeTest: whole intervals"),
    UNBUILT("scheduler.params.last_batch_iteration", "-1", "--resume goes on where a checkpoint ends"),
    {"scheduler.params.warmup_type", NULL, K_TEXT, C_BUILT, 0, 0, 0, 0, "\"log\"", "log or linear", "log|linear"},

    {"bf16", "bfloat16", K_SECTION, C_BUILT, 0, 0, 0, 0, NULL, "bf16 weights", NULL},
    {"bf16.enabled", NULL, K_BOOL, C_BUILT, AT(bf16), 0, 0, 1, "false", "weights in bf16", NULL},
    BOOL("bf16.check_grad_overflow", NULL, bf16_check_overflow, "false", "skip a step whose gradient is not finite"),
    INERT_BOOL("bf16.immediate_grad_update", "false", "gradients are always accumulated at once"),
    UNBUILT("bf16.bf16_master_weights_and_grads", "false", "spillway.state_format has compact formats"),
    UNBUILT("bf16.bf16_optimizer_states", "false", "spillway.state_format split-bf16"),
    SECTION("fp16", "fp16 weights and loss scaling"),
    {"fp16.enabled", NULL, K_BOOL, C_BUILT, AT(fp16), 0, 0, 1, "false", "weights in fp16, gradients scaled", NULL},
    INERT_BOOL("fp16.auto_cast", "false", "inputs are tokens"),
    REAL("fp16.loss_scale", NULL, loss_scale.fixed, 0, 1e30, "0", "0: dynamic"),
    U64("fp16.initial_scale_power", NULL, loss_scale.initial_power, 0, 100, "16", "the first scale is 2 to this"),
    U64("fp16.loss_scale_window", NULL, loss_scale.window, 1, 1e9, "1000", "steps without overflow until it doubles"),
    U64("fp16.hysteresis", NULL, loss_scale.hysteresis, 1, 1e9, "2", "overflows until it halves"),
    BOOL("fp16.consecutive_hysteresis", NULL, loss_scale.consecutive_hysteresis, "false",
         "count only overflows that follow each other"),
    REAL("fp16.min_loss_scale", NULL, loss_scale.min, 0, 1e30, "1", "it does not fall below"),
    UNBUILT("fp16.fp16_master_weights_and_grads", "false", "fp16 master weights"),

    SECTION("zero_optimization", "what is partitioned and where it lives"),
    U32(ZO "stage", NULL, zero.stage, 0, 3, "0", "ZeRO stage"),
    SECTION(ZO "offload_param", "where the weights live"),
    {ZO "offload_param.device", NULL, K_TIER, C_BUILT, AT(zero.offload_param), 0, 0, 0, "\"none\"", "none, cpu or nvme",
     NULL},
    {ZO "offload_param.nvme_path", NULL, K_PATHS, C_BUILT, AT(zero.param_path), 0, 0, 0, NULL, SWAP_PATHS, NULL},
    BOOL(ZO "offload_param.pin_memory", NULL, zero.pin_memory_param, "false", "page-lock the host arena"),
    U64(ZO "offload_param.buffer_count", NULL, zero.param_buffer_count, 0, 1e6, "0",
        "staging buffers for weights; 0: by the budget"),
    U64(ZO "offload_param.buffer_size", NULL, zero.param_buffer_size, 0, BIG, "100000000",
        "elements per staging buffer, with buffer_count"),
    U64(ZO "offload_param.max_in_cpu", NULL, zero.max_in_cpu, 0, BIG, "0", "elements of weights cached in host memory"),
    SECTION(ZO "offload_optimizer", "where the optimizer's records live"),
    {ZO "offload_optimizer.device", NULL, K_TIER, C_BUILT, AT(zero.offload_optimizer), 0, 0, 0, "\"none\"",
     "none, cpu or nvme", NULL},
    {ZO "offload_optimizer.nvme_path", NULL, K_PATHS, C_BUILT, AT(zero.optimizer_path), 0, 0, 0, NULL, SWAP_PATHS,
     NULL},
    BOOL(ZO "offload_optimizer.pin_memory", NULL, zero.pin_memory_optimizer, "false", "page-lock the host arena"),
    U64(ZO "offload_optimizer.buffer_count", NULL, zero.optimizer_buffer_count, 0, 1e6, "0",
        "staging buffers for records, a chunk each; 0: by the budget"),
    INERT_BOOL(ZO "offload_optimizer.fast_init", "false", "initial state is always written"),
    INERT_BOOL(ZO "offload_optimizer.pipeline_read", "true", "reading always overlaps the update"),
    INERT_BOOL(ZO "offload_optimizer.pipeline_write", "true", "writing always overlaps the update"),
    INERT_BOOL(ZO "offload_optimizer.pipeline", "false", "both directions overlap anyway"),
    REAL(ZO "offload_optimizer.ratio", NULL, zero.optimizer_ratio, 0, 1, "1.0",
         "the host updates no more than this share of the parameters; state of the first units is on the device"),
    INERT_BOOL(ZO "offload_optimizer.super_offload", "false", "spillway.update_ahead does it by itself"),
    INERT(ZO "offload_optimizer.cpuadam_cores_perc", NULL, K_REAL, 0, 1, "0.8", "spillway.optimizer_threads says it"),
    U64(ZO "sub_group_size", NULL, zero.sub_group_size, 0, BIG, "1000000000",
        "upper bound of a chunk, elements, of at least 4096; 0: none"),
    U64(ZO "prefetch_bucket_size", "stage3_prefetch_bucket_size", zero.prefetch_bucket_size, 0, BIG, "1e18",
        "elements fetched ahead of the unit in use at most; the default leaves it to slots and device memory"),
    U64(ZO "max_live_parameters", "stage3_max_live_parameters", zero.max_live_parameters, 0, BIG, "1e18",
        "gathered elements on the device at most, the largest block at least; the default leaves it to device_memory"),
    INERT_ZERO3("max_reuse_distance", K_U64, BIG, "1000000000", "eviction follows the recorded trace"),
    INERT_ZERO3("param_persistence_threshold", K_U64, 1e19, "100000", "units are gathered whole"),
    INERT_ZERO3("model_persistence_threshold", K_U64, 1e19, "9223372036854775807", "units are gathered whole"),
    INERT_ZERO3("gather_16bit_weights_on_model_save", K_BOOL, 1, "false", "checkpoints always hold whole weights"),
    INERT_ZERO3("use_all_reduce_for_fetch_params", K_BOOL, 1, "false", "units are gathered in place"),
    INERT_ZERO3("module_granularity_threshold", K_U64, 1e19, "0", "blocks are fetched whole"),
    INERT_INT(ZO "reduce_bucket_size", 0, BIG, "500000000",
              "a unit is reduced at once, without a bucket to copy it to"),
    INERT_INT(ZO "allgather_bucket_size", 0, BIG, "500000000", "a unit is gathered at once, to where it is used"),
    INERT_BOOL(ZO "allgather_partitions", "true", "parts are always gathered"),
    INERT_BOOL(ZO "reduce_scatter", "true", "gradients are always scattered"),
    INERT_BOOL(ZO "contiguous_gradients", "true", "gradients are always contiguous"),
    INERT_BOOL(ZO "overlap_comm", "false", "communication always overlaps"),
    INERT_BOOL(ZO "round_robin_gradients", "false", "parts are equal"),
    INERT_BOOL(ZO "use_multi_rank_bucket_allreduce", "true", "there are no buckets"),
    INERT_BOOL(ZO "load_from_fp32_weights", "true", "the master is always loaded"),
    INERT_BOOL(ZO "elastic_checkpoint", "false", "checkpoints are always elastic"),
    INERT_BOOL(ZO "pipeline_loading_checkpoint", "false", "loading streams anyway"),
    INERT_BOOL(ZO "ignore_unused_parameters", "true", "a block that is not walked is not updated"),
    INERT_BOOL(ZO "memory_efficient_linear", "true", "activations are recomputed"),
    INERT_BOOL(ZO "override_module_apply", "true", "there are no Python modules"),
    INERT_BOOL(ZO "legacy_stage1", "false", "there is one stage 1"),
    U32(ZO "zero_hpz_partition_size", NULL, zero.hpz_partition_size, 0, 65536, "1",
        "ZeRO++'s hpZ: so many ranks of a host keep what was gathered once more, cut among them, in host memory, and "
        "gather it again from there; the same bits; stage 3; 0, 1: off"),
    BOOL(ZO "zero_quantized_weights", NULL, zero.quantized_weights, "false",
         "ZeRO++'s qwZ: ranks gather weights as 8-bit codes and all compute with those; stage 3"),
    BOOL(ZO "zero_quantized_nontrainable_weights", NULL, zero.quantized_frozen, "false",
         "the same of what spillway.freeze or spillway.lora freezes, and only that"),
    BOOL(ZO "zero_quantized_gradients", NULL, zero.quantized_gradients, "false",
         "ZeRO++'s qgZ: gradients are summed inside a host, and go from host to host as 4-bit codes; stage 3"),
    UNBUILT(ZO "zeropp_loco_param", "null", "ZeRO++ error feedback"),
    {ZO "mics_shard_size", NULL, K_I32, C_BUILT, AT(zero.mics_shard_size), 0, -1, 65536, "-1",
     "MiCS: so many ranks in a row have all parts among them, every other group of as many has them again, and groups "
     "add up their gradients; stage 3; -1, 0: all ranks are one group",
     NULL},
    BOOL(ZO "mics_hierarchical_params_gather", NULL, zero.mics_by_host, "false",
         "where groups are on several hosts, weights come once to each host and are shared inside it; the same bits"),
    INERT_BOOL(ZO "log_trace_cache_warnings", "false", "the order of uses is known, nothing is learned in steps"),
    UNBUILT(ZO "zenflow", "null", "ZenFlow"),
    INERT_ANY(ZO "leaf_module", "units are moved as wholes, and of experts those that are chosen"),
    INERT_ZERO3("allgather_sequential", K_BOOL, 1, "false", "units are gathered one after the other"),
    INERT_BOOL(ZO "parameter_alignment", "false", "parts of units are always aligned"),
    INERT_BOOL(ZO "compute_grad_norm", "true", "the norm comes with the gradients"),
    INERT_BOOL(ZO "enable_sanity_checks", "false", "the build VARIANT=checked has them"),
    INERT_BOOL(ZO "save_muon_momentum_buffer_in_memory", "false", "the momentum is in the record, wherever that lies"),
    {ZO "cpu_offload", NULL, K_BOOL, C_DEPRECATED, 0, 0, 0, 1, NULL, "zero_optimization.offload_optimizer.device",
     NULL},
    {ZO "cpu_offload_params", "cpu_offload_param", K_BOOL, C_DEPRECATED, 0, 0, 0, 1, NULL,
     "zero_optimization.offload_param.device", NULL},
    {ZO "cpu_offload_use_pin_memory", NULL, K_BOOL, C_DEPRECATED, 0, 0, 0, 1, NULL,
     "zero_optimization.offload_optimizer.pin_memory", NULL},
    {ZO "stage3_gather_fp16_weights_on_model_save", NULL, K_BOOL, C_DEPRECATED, 0, 0, 0, 1, NULL,
     "zero_optimization.gather_16bit_weights_on_model_save", NULL},

    SECTION("aio", "file transfers"),
    U64("aio.block_size", NULL, aio.block_size, 4096, 1073741824.0, "1048576", "bytes per transfer"),
    U32("aio.queue_depth", NULL, aio.queue_depth, 1, 1024, "16", "transfers in flight per device"),
    U32("aio.thread_count", "intra_op_parallelism", aio.thread_count, 1, 256, "4", "threads of the threads backend"),
    {"aio.backend", NULL, K_BACKEND, C_BUILT, AT(aio.backend), 0, 0, 0, "\"auto\"", "auto, io_uring or threads", NULL},
    BOOL("aio.single_submit", NULL, aio.single_submit, "false", "hand transfers to the kernel one by one"),
    BOOL("aio.overlap_events", NULL, aio.overlap_events, "true",
         "start transfers while others are under way; false: a batch of queue_depth lands before the next"),
    BOOL("aio.sqpoll", NULL, aio.sqpoll, "false", "io_uring: a kernel thread submits (costs a core)"),
    BOOL("aio.iopoll", NULL, aio.iopoll, "false", "io_uring: poll for completions (needs poll queues)"),
    UNBUILT("aio.use_gds", "false", "GPUDirect storage"),

    SECTION("activation_checkpointing", "activation checkpoints"),
    INERT_BOOL("activation_checkpointing.partition_activations", "false",
               "ranks have the same activations nowhere; sequence_parallel_size shares those of a sequence out"),
    BOOL("activation_checkpointing.cpu_checkpointing", NULL, run.cpu_checkpointing, "false",
         "checkpoints in host memory; spillway.activations says it in more detail"),
    INERT_BOOL("activation_checkpointing.contiguous_memory_optimization", "false",
               "checkpoints always lie in one arena"),
    INERT_ANY("activation_checkpointing.number_checkpoints", "one per block"), /* also false */
    INERT_BOOL("activation_checkpointing.synchronize_checkpoint_boundary", "false", "nothing to synchronise"),
    INERT_BOOL("activation_checkpointing.profile", "false", "the timeline shows it"),

    INERT_ANY("steps_per_print", /* also "inf" */
              "a terminal shows every step, a file or pipe one every 5 s; spillway.run_log has all"),
    INERT_BOOL("wall_clock_breakdown", "false",
               "every step that is shown says what it waited for, and those in spillway.run_log"),
    INERT_ANY("timers", "every step's line has its tokens per second"),
    INERT_BOOL("dump_state", "false", "use spillway help config"),
    INERT_BOOL("zero_allow_untested_optimizer", "false", "the optimizers are ours"),
    INERT_BOOL("zero_force_ds_cpu_optimizer", "true", "the optimizers are ours"),
    INERT_BOOL("prescale_gradients", "false", "the loss is a mean over all ranks' targets from the start"),
    INERT("gradient_predivide_factor", NULL, K_REAL, 1e-30, 1e30, "1.0", "nothing is divided after the sum"),
    {"communication_data_type", NULL, K_DTYPE, C_BUILT, AT(comm_dtype), 0, 0, 0, "\"fp32\"",
     "fp32, bf16 or fp16: what gradients are rounded to before ranks sum them, in fp32", NULL},
    {"seq_parallel_communication_data_type", NULL, K_DTYPE, C_INERT, SPW_CONFIG_NOWHERE, 0, 0, 0, NULL,
     "fp32, bf16 or fp16: gradients of all ranks are summed at once, see communication_data_type", NULL},
    INERT_BOOL("disable_allgather", "false", "gathering is how weights come"),
    INERT_BOOL("memory_breakdown", "false", "the plan shows it"),
    UNBUILT("sparse_gradients", "false", "sparse gradients"),
    SWITCHED("amp", "apex amp: bf16 and fp16 choose the type"),
    SECTION("data_types", "types of accumulation"),
    {"data_types.grad_accum_dtype", NULL, K_DTYPE, C_BUILT, SPW_CONFIG_NOWHERE, 0, 0, 0, NULL,
     "fp32, bf16 or fp16: spillway.grad_dtype, where that is not given", NULL},
    SWITCHED("flops_profiler", "the closing table says where time goes, --trace when"),
    MONITOR("tensorboard", tensorboard, "event files of TensorBoard with loss, lr and loss scale over samples"),
    MONITOR("csv_monitor", csv_monitor, "a CSV file each for loss, lr and loss scale over samples"),
    SWITCHED("wandb", "monitor: tensorboard writes what wandb sync takes"),
    SWITCHED("comet", "monitor: tensorboard and csv_monitor write files, spillway.run_log has every step"),
    SWITCHED("comms_logger", "communication log: --trace shows collectives"),
    SWITCHED("autotuning", "autotuning: spillway tune measures disks, spillway plan --faster looks for shorter steps"),
    SWITCHED("elasticity", "elastic batch sizes"),
    UNBUILT("compression_training", "{}", "compression"),
    SWITCHED("curriculum_learning", "curriculum"),
    SWITCHED("data_efficiency", "data efficiency"),
    SWITCHED("progressive_layer_drop", "layer drop"),
    SWITCHED("eigenvalue", "eigenvalues"),
    UNBUILT("sparse_attention", "{}", "sparse attention"),
    SECTION("checkpoint", "DeepSpeed's checkpoint options"),
    INERT("checkpoint.tag_validation", NULL, K_TEXT, 0, 0, "\"Warn\"", "a tag is the step, which all ranks agree on"),
    INERT_BOOL("checkpoint.load_universal", "false", "every checkpoint is for any number of ranks"),
    INERT_BOOL("checkpoint.checkpoint_serialization", "true", "a checkpoint is safetensors"),
    INERT_ANY("checkpoint.writer", "files are written past the page cache, while training goes on"),
    UNBUILT("checkpoint.use_node_local_storage", "false", "a checkpoint is one folder that all ranks see"),
    INERT_ANY("checkpoint.parallel_write", "every rank writes its own part anyway"),
    UNBUILT("pipeline", "{}", "pipeline parallelism"),
    UNBUILT("tensor_parallel", "{\"autotp_size\": 1}", "tensor parallelism"),
    SWITCHED("nebula", "Nebula"),
    SWITCHED("torch_autocast", "autocast: bf16 and fp16 choose the type"),
    INERT_ANY("compile",
              "kernels are compiled already; offload_param, offload_optimizer and spillway.activations place state"),
    SWITCHED("hybrid_engine", "hybrid engine"),
    UNBUILT("weight_quantization", "{}", "spillway.frozen_codes stores weights as codes"),
    UNBUILT("expert_parallel", "{}", "expert parallelism"),
    UNBUILT("use_data_before_expert_parallelism", "false", "expert parallelism"),
    UNBUILT("gradient_allreduce_op", "\"mean\"", "the loss is a mean over all ranks' targets"),
    UNBUILT("data_types.keep_in_fp32_modules", "\"auto\"", "norms compute in fp32 as it is"),
    INERT_ANY("log_level", "the program says what a person needs"),
    INERT_BOOL("managed_gradient_accumulation", "true", "accumulation is always the engine's"),
    INERT_BOOL("dataloader_drop_last", "false", "every step has whole sequences"),
    INERT_BOOL("disable_python_gc", "false", "there is no Python"),

    SECTION("model",
            "a Hugging Face config.json's keys (model_type gpt2, llama, mistral, qwen2, qwen3, mixtral, "
            "qwen3_moe, phi3, smollm3, qwen2_moe, olmo2, olmo3, gemma2, gemma3_text, gpt_oss, glm4_moe, deepseek_v2, "
            "deepseek_v3, glm4_moe_lite, minimax_m2, gemma, granite, olmoe, seed_oss, glm, glm4, ernie4_5, exaone4, "
            "ministral3, gpt_neox, opt, starcoder2, stablelm, qwen3_5_text, "
            "qwen3_5_moe_text, qwen3_next, gemma4_text, dots1, solar_open, ernie4_5_moe, hy_v3, hunyuan_v1_dense, "
            "hunyuan_v1_moe, cohere, cohere2, granitemoehybrid, llama4_text, deepseek_v32, glm_moe_dsa, exaone_moe, "
            "nemotron_h, deepseek_v4, mistral4, mimo_v2_flash, lfm2, lfm2_moe, bamba, afmoe, olmo_hybrid, falcon_h1 or "
            "kimi_linear), or "
            "{\"path\": folder, or OWNER/NAME of a model in the Hugging Face cache}"),
    SECTION("data", "what is trained on"),
    {"data.path", NULL, K_PATHS, C_BUILT, AT(data.path), 0, 0, 0, NULL,
     "files, else globs (without **), or the PREFIX of Megatron's .bin and .idx: every sequence once an epoch", NULL},
    {"data.sources", NULL, K_PATHS, C_BUILT, AT(data.sources), 0, 0, 0, NULL,
     "instead of path: list of paths or {path, weight}; sequences are drawn by weight (1), from each in epochs of its "
     "own",
     NULL},
    TEXT("data.format", data.format, "\"auto\"", "auto|text|llm.c|llmq|megatron|jsonl",
         "auto: by each file's content, then its extension (.bin, .jsonl, .ndjson, .json that begins with an object), "
         "else text; compressed files, tables, UTF-16 and the like are refused unless this says text"),
    TEXT("data.text_field", data.text_field, "\"text\"", NULL,
         "field of JSON lines that is trained on, text or a list of tokens; another one than text, data.prompt_field "
         "and data.chat are refused "
         "where no file holds JSON lines"),
    TEXT("data.prompt_field", data.prompt_field, "\"\"", NULL,
         "field of JSON lines that comes before it and gets no loss; empty: none"),
    TEXT("data.labels_field", data.labels_field, "\"labels\"", NULL,
         "field beside a list of tokens that says which get loss: the token, or below 0 (-100) without; lines may do "
         "without it"),
    PATH("data.chat", data.chat, "\"\"",
         "layout of conversations in JSON lines, whose assistant's turns alone get loss: auto (by the tokenizer's "
         "special tokens and the chat_template beside it), "
         "chatml, llama3, mistral, mistral-tekken, mistral-v7, mistral-v1, gemma, gemma4, phi3, phi4, deepseek, "
         "zephyr, or a "
         "file that describes one and ends in .json; empty: lines are text"),
    TEXT("data.messages_field", data.messages_field, "\"\"", NULL,
         "field with a conversation; empty: messages, or conversations where that is missing"),
    TEXT("data.chosen_field", data.chosen_field, "\"chosen\"", NULL,
         "with spillway.preference: field with the answer that is preferred, text, a list of messages or of tokens"),
    TEXT("data.rejected_field", data.rejected_field, "\"rejected\"", NULL, "and with the other one"),
    TEXT("data.documents", data.documents, "\"packed\"", "packed|mask|separate|whole",
         "packed: windows cut through all documents; mask: the same, without loss for the first token of a document; "
         "separate: and attention and positions begin anew with each; whole, which data.chat and spillway.preference "
         "make the default: and "
         "windows cut none that fits, padded without loss"),
    BOOL("data.begin_of_text", NULL, data.begin_of_text, "true",
         "documents of text begin with the token that the tokenizer puts before a text, as models of Llama, Gemma, "
         "Mistral and DeepSeek expect it; those whose tokenizer has none do without"),
    PATH("data.cache_dir", data.cache_dir, "\"\"",
         "folder for tokens of JSON lines, made once; empty: spillway/tokens below $XDG_CACHE_HOME or ~/.cache"),
    PATH("data.tokenizer", data.tokenizer, "\"auto\"",
         "of text and JSON lines: bytes; a tokenizer.json, or a folder with it, with vocab.json and merges.txt or with "
         "Kimi's "
         "tiktoken.model; auto: the one in model.path's folder, else bytes; checkpoints hold the one that is named, "
         "else the folder's, of bytes "
         "none"),
    U64("data.seq_length", NULL, data.seq_length, 1, 1e7, NULL,
        "tokens per sequence; default: the model's positions, at most 1024"),
    REAL("data.validation_split", NULL, data.validation_split, 0, 0.9, "0.05", "share held out"),
    U64("data.seed", NULL, data.seed, 0, BIG, "0", "order of the sequences"),

    SECTION("spillway", "this engine's own keys"),
    U64("spillway.steps", NULL, run.steps, 1, 1e12, "100", "optimizer steps, counted from the first run"),
    U64("spillway.seed", NULL, run.seed, 0, BIG, "0", "initial weights and dropout"),
    U32("spillway.ranks", NULL, run.ranks, 1, 65536, "1",
        "data-parallel ranks; a launcher (mpirun, srun, torchrun, spillway train -n) says it by itself"),
    REAL("spillway.comm_timeout", NULL, run.comm_timeout, 0.1, 1e8, "60",
         "seconds that a collective waits for other ranks before all of them give up"),
    TEXT("spillway.collectives", run.collectives, "\"auto\"", "auto|host|nccl",
         "of ranks on the cuda device: nccl from device to device, host through host memory; the same bits. auto: nccl "
         "where every rank has it and a GPU of its own"),
    TEXT("spillway.device", run.device, "\"auto\"", NULL, "auto, cpu or cuda[:i]"),
    {"spillway.device_memory", NULL, K_BYTES, C_BUILT, AT(run.device_memory), 0, 4096, BIG, "\"auto\"",
     "limit on the device; auto: what passes take, and more gathered weights as far as memory is left", NULL},
    {"spillway.host_memory", NULL, K_BYTES, C_BUILT, AT(run.host_memory), 0, 4096, BIG, "\"auto\"",
     "budget of the process without the device", NULL},
    {"spillway.state_format", NULL, K_FORMAT, C_BUILT, AT(run.state_format), 0, 0, 0, NULL,
     "fp32, mixed, split, split-bf16, split-int8 or split24-int8; default split with bf16", NULL},
    U64("spillway.chunk_elems", NULL, run.chunk_elems, 4096, 268435456, "1048576",
        "elements per chunk, a multiple of 4096"),
    TEXT("spillway.start", run.start, "\"auto\"", "auto|weights|random",
         "weights: from the folder in model.path; random: drawn by spillway.seed; auto: from the folder if it has "
         "weights"),
    {"spillway.activations", NULL, K_PLACE, C_BUILT, AT(run.activations), 0, 0, 0, "\"auto\"",
     "checkpoints of activations: device, host, nvme (any nvme_path) or auto: on the device while they fit, then those "
     "needed last to host, then to nvme",
     NULL},
    TEXT("spillway.recompute", run.recompute, "\"auto\"", "auto|least|always",
         "auto: device memory that is left keeps what blocks computed between checkpoints of activations, and where "
         "experts' turns serve several micro-batches what they read is one more checkpoint of a layer if a step is "
         "shorter so; least: it is in any case; always: the backward pass computes all of it again"),
    TEXT("spillway.gradients", run.gradients, "\"auto\"", "auto|host|nvme",
         "where they wait for their update; auto: host memory, or what it does not hold on nvme, if offload_optimizer "
         "is there"),
    TEXT(
        "spillway.update_ahead", run.update_ahead, "\"auto\"", "auto|always|never",
        "offloaded state is updated before the gradient's norm is known, on nvme at a second place, in host memory "
        "with a log, and taken back if the step clips; auto: while steps do not clip, on nvme if the disk has room for "
        "twice the state, in host memory as far as nothing else wants it and a GPU computes. Gradients that would wait "
        "on "
        "nvme are not written then, and a step that clips computes them twice"),
    U64("spillway.delayed_update", NULL, run.delayed_update, 0, 1e9, "0",
        "updates after so many are each made a step late, beside the next backward pass, whether steps clip or not "
        "(ZeRO-Offload's delayed parameter update): other losses, and a save applies what is left; 0: none is"),
    TEXT("spillway.fill_device", run.fill_device, "\"auto\"", "auto|always|never",
         "offloaded state of the first units stays on a GPU, and is updated there: always in memory that nothing else "
         "takes; auto: also in place of what blocks computed, as far as a step is shorter so, by rates that "
         "plan measured here, or else by estimate"),
    U64("spillway.micro_batches_per_pass", NULL, run.micro_batches_per_pass, 0, 1e6, "0",
        "0: all in one pass, or fewer in each where a device of its own holds all state, or all weights and, between "
        "passes, the sums of gradients, and a step is shorter so"),
    U64("spillway.tile_tokens", NULL, run.tile_tokens, 0, 1e9, "0",
        "what a block computes for each token by itself is computed for at most so many at a time, and experts take "
        "so many rows, which bounds working memory for long sequences; 0: 2^25 / width, which is 8192 of width 4096"),
    U64("spillway.tile_vocab", NULL, run.tile_vocab, 0, 1e9, "0",
        "embeddings and heads come to the device in pieces of at most so many rows of the vocabulary, weights and "
        "gradients, once for each micro-batch, and logits are computed twice: for devices that would hold little "
        "else; 0: they come whole"),
    U32("spillway.expert_turns", NULL, run.expert_turns, 0, 256, "0",
        "mixtures of experts: a layer's come to the device in so many turns, each for all micro-batches of a pass; 0: "
        "as few as there is room for"),
    U32("spillway.optimizer_threads", NULL, run.optimizer_threads, 0, 1024, "0", "0: one per CPU"),
    U32("spillway.compute_threads", NULL, run.compute_threads, 0, 1024, "0", "of the cpu device; 0: one per CPU"),
    BOOL("spillway.pin_threads", NULL, run.pin_threads, "true",
         "keep optimizer and compute threads on their NUMA node, one per core while there are cores (see doctor)"),
    U32("spillway.weight_slots", NULL, run.weight_slots, 0, 1e6, "0", "staging slots for weights; 0: by the budget"),
    U32("spillway.record_slots", NULL, run.record_slots, 0, 1e6, "0", "staging slots for records; 0: by the budget"),
    {"spillway.param_groups", NULL, K_GROUPS, C_BUILT, 0, 0, 0, 0, NULL,
     "list of {match, lr, weight_decay, betas}: for parameters whose name matches the glob", NULL},
    {"spillway.freeze", NULL, K_GLOBS, C_BUILT, AT(run.freeze), 0, 0, 0, NULL,
     "globs on Hugging Face names: parameters that are not trained, without gradient and record", NULL},
    SECTION("spillway.lora", "adapters of low rank; everything else is frozen"),
    U64("spillway.lora.rank", NULL, run.lora.rank, 0, 65536, "0", "of the adapters; 0: none"),
    REAL("spillway.lora.alpha", NULL, run.lora.alpha, 0, 1e6, "0", "their output is scaled by alpha / rank; 0: by 1"),
    {"spillway.lora.targets", NULL, K_GLOBS, C_BUILT, AT(run.lora_targets), 0, 0, 0, NULL,
     "linear weights that get one: globs on names without .weight, or on what follows any of their dots (q_proj)",
     NULL},
    {"spillway.lora.target_parameters", NULL, K_GLOBS, C_BUILT, AT(run.lora_target_parameters), 0, 0, 0, NULL,
     "the same for a mixture's experts: globs on what transformers 5 calls all experts' weights "
     "(mlp.experts.gate_up_proj, "
     "down_proj)",
     NULL},
    REAL("spillway.lora.dropout", NULL, run.lora.dropout, 0, 0.99, "0", "of the adapters' input, in training"),
    SECTION("spillway.preference", "training on pairs of answers instead of on tokens"),
    TEXT("spillway.preference.loss", run.preference.loss, "\"none\"", "none|dpo|ipo|simpo|orpo|apo_zero",
         "dpo: that a chosen answer becomes more likely, beside what the start finds of it, than a rejected one; ipo: "
         "as much more as beta says, by means over tokens; simpo: by means, beside no start; orpo: by odds, beside no "
         "start, and the chosen answer likely; apo_zero: the chosen one more likely than at the start, the other less; "
         "none: tokens of texts"),
    REAL("spillway.preference.beta", NULL, run.preference.beta, 1e-6, 1000, "0.1",
         "how near to the start it stays; of simpo 2.0 where it is not given; of orpo the weight of the odds"),
    REAL("spillway.preference.label_smoothing", NULL, run.preference.label_smoothing, 0, 0.499, "0",
         "dpo, simpo: share of pairs that are taken for labelled the wrong way round"),
    REAL("spillway.preference.margin", NULL, run.preference.margin, 0, 1000, "0",
         "simpo: by how much the chosen answer's reward should be larger (gamma)"),
    REAL("spillway.preference.likelihood", NULL, run.preference.likelihood, 0, 1000, "0",
         "weight of the chosen answer's mean loss beside it, so that it does not become less likely; of orpo 1 where "
         "it is not given"),
    U64("spillway.reference_steps", NULL, run.reference_steps, 0, 1ull << 62, "0",
        "with spillway.preference: so many steps' sequences the start is asked about, where a run may be lengthened to "
        "them later; below spillway.steps: that many"),
    BOOL("spillway.decay_norm_and_bias", NULL, run.decay_norm_and_bias, "false",
         "weight decay for norms and biases (tensors of one dimension) too"),
    BOOL("spillway.nearest_moments", NULL, run.nearest_moments, "false",
         "split-bf16: round moments to nearest, not stochastically"),
    BOOL("spillway.integrity", NULL, run.integrity, "true", "checksum every chunk read from disk"),
    BOOL("spillway.frozen_in_place", NULL, run.frozen_in_place, "true",
         "read frozen weights on nvme from the files they come from; false copies them to swap"),
    TEXT("spillway.frozen_codes", run.frozen_codes, "\"none\"", "none|int8|int4|published",
         "store frozen matrices between embeddings and head as codes with a scale per 128: 1.03 or 0.53 bytes per "
         "parameter; rounds them once. published: those that model.path has as codes in just these, which rounds "
         "nothing"),
    REAL("spillway.router_balance", NULL, run.router_balance, 0, 100, "0",
         "mixtures of experts: weight of a loss that spreads tokens over experts, in each layer and micro-batch"),
    BOOL("spillway.fp8", NULL, run.fp8, "false",
         "train with the products of dense linear layers between embeddings and head in 8-bit floats; needs "
         "bf16.enabled, and a GPU of compute capability 8.9 or the cpu device"),
    BOOL("spillway.prefetch", NULL, run.prefetch, "true", "fetch ahead of use"),
    {"spillway.grad_dtype", NULL, K_DTYPE, C_BUILT, AT(run.grad_dtype), 0, 0, 0, NULL,
     "fp32, bf16 or fp16; default fp32, with fp16 fp16", NULL},
    PATH("spillway.checkpoint_dir", run.checkpoint_dir, "\"\"", "folder of checkpoints; empty: none"),
    U64("spillway.checkpoint_interval", NULL, run.checkpoint_interval, 0, 1e12, "0",
        "steps between checkpoints; 0: at the end"),
    PATH("spillway.run_log", run.run_log, "\"\"", "run.jsonl; empty: none"),
    U64("spillway.eval_interval", NULL, run.eval_interval, 0, 1e12, "0", "steps between evaluations; 0: never"),
    U64("spillway.eval_batches", NULL, run.eval_batches, 1, 1e6, "8", "micro-batches per evaluation"),
    U64("spillway.keep_last", NULL, run.keep_last, 0, 1e6, "0",
        "how many checkpoints stay in checkpoint_dir: older ones go when a new one is complete; 0: all"),
    BOOL("spillway.checkpoint_links", NULL, run.checkpoint_links, "true",
         "with adapters, checkpoints share the file of the frozen model (a hard link); false: each writes its own"),
    BOOL("spillway.checkpoint_base", NULL, run.checkpoint_base, "true",
         "with adapters, checkpoints hold the frozen model; false: they name model.path's folder, from which it came "
         "and which then has to stay"),
    BOOL("spillway.save_in_background", NULL, run.save_in_background, "true",
         "training goes on while a checkpoint is written; false: it waits"),
    BOOL("spillway.save_at_end", NULL, run.save_at_end, "true",
         "checkpoint after the last step; a run that a signal or the write budget ends sooner always saves"),
    {"spillway.tbw", NULL, K_BYTES, C_BUILT, AT(run.tbw), 0, 0, 9.2e18, "0",
     "bytes that the disks are rated for (\"600TB\"): spillway plan says how many years that is; 0: not known", NULL},
    {"spillway.write_budget", NULL, K_BYTES, C_BUILT, AT(run.write_budget), 0, 0, 9.2e18, "0",
     "bytes that training may write to nvme swap, counted on when it is resumed; 0: no limit", NULL},
    TEXT("spillway.write_budget_action", run.write_budget_action, "\"stop\"", "stop|pause",
         "before a step would exceed it: save and exit with 0 (stop) or 4 (pause: for a scheduler that resumes)"),
    U64("spillway.chaos_seed", NULL, run.chaos_seed, 0, BIG, "0", "tests: random delays, poisoned buffers"),
};
const uint32_t spw__config_row_count = sizeof spw__config_rows / sizeof spw__config_rows[0];

const char *
spw__config_fallback(const key_row *row, const char *optimizer)
{
    static const struct {
        const char *type, *key, *fallback;
    } own[] = {{"Adagrad", "optimizer.params.lr", "0.01"},   {"Adagrad", "optimizer.params.eps", "1e-10"},
               {"Muon", "optimizer.params.lr", "0.02"},      {"Muon", "optimizer.params.betas", "[0.9, 0.95]"},
               {"Muon", "optimizer.params.eps", "1e-10"},    {"Muon", "optimizer.params.momentum", "0.95"},
               {"Muon", "optimizer.params.nesterov", "true"}};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        if (strcasecmp(own[i].type, optimizer) == 0 && strcmp(own[i].key, row->key) == 0)
            return own[i].fallback;
    }
    return row->fallback;
}

const char *
spw__config_trainer_default(const char *key)
{
    static const char *const arguments[][2] = {{"gradient_clipping", "1.0"},
                                               {"zero_optimization.stage", "2"},
                                               {"optimizer.params.lr", "5e-05"},
                                               {"optimizer.params.betas", "[0.9, 0.999]"},
                                               {"optimizer.params.eps", "1e-08"},
                                               {"optimizer.params.weight_decay", "0.0"},
                                               {"scheduler.params.warmup_min_lr", "0.0"},
                                               {"scheduler.params.warmup_num_steps", "0"}};
    for (size_t i = 0; i < sizeof arguments / sizeof arguments[0]; i++) {
        if (strcmp(arguments[i][0], key) == 0)
            return arguments[i][1];
    }
    return NULL;
}
