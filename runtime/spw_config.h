/*
 * spw_config.h - a run's configuration: DeepSpeed's JSON plus the sections model, data and spillway.
 *
 * One table in config_keys.c drives parsing, defaults, ranges, help and the printed configuration. A key that is
 * misspelt or misplaced is an error with a suggestion; a key whose feature is not built is refused, never ignored.
 */
#ifndef SPW_CONFIG_H
#define SPW_CONFIG_H

#include "spw_base.h"
#include "spw_cpu_adam.h"
#include "spw_nn.h"
#include "spw_offload.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SPW_PATHS_MAX = 16,
    SPW_PATH_BYTES = 1024,
    SPW_CHECKPOINT_DIR_BYTES = SPW_PATH_BYTES - 124 /* names of steps and files come behind it */
};
#define SPW_AUTO UINT64_MAX /* a size left to the planner */

typedef struct spw_path_list {
    uint32_t count;
    char item[SPW_PATHS_MAX][SPW_PATH_BYTES];
    double weight[SPW_PATHS_MAX];  /* of swap paths, data sources: share relative to the other paths; 0 means 1 */
    uint64_t bytes[SPW_PATHS_MAX]; /* of swap paths: limit on this path's swap file; 0: none */
} spw_path_list;

/* Hyper-parameters of their own for the parameters whose name matches; NaN: the optimizer's. */
enum { SPW_PARAM_GROUPS_MAX = 8 };
/* Files of numbers over samples (spw_monitor.h), in output_path/job_name. */
typedef struct spw_monitor_config {
    bool enabled;
    char output_path[SPW_PATH_BYTES], job_name[128];
} spw_monitor_config;

typedef struct spw_param_group {
    char match[96];                        /* glob on Hugging Face names; the first group that matches counts */
    double lr, weight_decay, beta1, beta2; /* lr: where the optimizer has its lr; schedules scale both */
} spw_param_group;

/* Names or globs (fnmatch). */
enum { SPW_GLOBS_MAX = 16 };
typedef struct spw_glob_list {
    uint32_t count;
    char item[SPW_GLOBS_MAX][96];
} spw_glob_list;

typedef struct spw_config {
    spw_model_config model;
    char model_path[SPW_PATH_BYTES]; /* "" or the folder whose config.json gave it */
    struct {
        spw_path_list path;                        /* files or globs: one source */
        spw_path_list sources;                     /* or several, drawn by weight */
        char format[16];                           /* of spw_data_format_parse() */
        char text_field[64];                       /* of JSON lines */
        char prompt_field[64];                     /* "": none */
        char labels_field[64];                     /* of lines of tokens */
        char chat[SPW_PATH_BYTES];                 /* layout of conversations, of spw_chat_open(); "": none */
        char messages_field[64];                   /* "": the usual ones */
        char chosen_field[64], rejected_field[64]; /* of pairs */
        char documents[16];                        /* packed, mask, separate, whole */
        bool begin_of_text;
        char cache_dir[SPW_PATH_BYTES]; /* of tokens; "": the user's */
        char tokenizer[SPW_PATH_BYTES]; /* bytes, auto, or a path */
        uint64_t seq_length;
        double validation_split;
        uint64_t seed;
    } data;
    uint64_t train_batch_size, micro_batch, accumulation; /* consistent after load; the first over all ranks */
    uint32_t sequence_ranks; /* so many ranks in a row share each sequence's positions; 0, 1: none do */
    double gradient_clipping;
    spw_dtype comm_dtype; /* of gradients between ranks */
    bool bf16, fp16, bf16_check_overflow;
    struct {
        double fixed, min; /* fixed 0: dynamic */
        uint64_t initial_power, window, hysteresis;
        bool consecutive_hysteresis;
    } loss_scale; /* with fp16 */
    struct {
        char type[32]; /* of spw_optimizer_find() */
        double lr, beta1, beta2, eps, weight_decay;
        bool adam_w_mode, bias_correction;
        double momentum, dampening, lr_decay;
        bool nesterov;
        double muon_lr, adam_lr; /* Muon: of its matrices, and of what takes AdamW beside them; other types: NaN */
        uint32_t ns_steps;       /* Muon: iterations of Newton and Schulz */
        uint32_t group_count;
        spw_param_group groups[SPW_PARAM_GROUPS_MAX];
    } optimizer;
    spw_monitor_config csv_monitor, tensorboard;
    struct {
        char type[32]; /* "" constant; WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest */
        double warmup_min_lr, warmup_max_lr; /* max NaN: the optimizer's lr */
        double warmup_min_ratio, cos_min_ratio;
        uint64_t warmup_num_steps, total_num_steps;
        bool warmup_linear; /* else log */
        /* OneCycle; NaN where the first half's number, or none, stands for it. */
        double cycle_min_lr, cycle_max_lr, decay_lr_rate, second_steps, second_stairs;
        uint64_t first_steps, first_stairs, decay_steps;
        bool cycle_momentum;
        double cycle_min_mom, cycle_max_mom, decay_mom_rate;
        double range_min_lr, range_rate; /* LRRangeTest */
        uint64_t range_steps;
        bool range_stairs;
    } scheduler;
    struct {
        uint32_t stage;
        spw_tier offload_param, offload_optimizer; /* SPW_TIER_DEVICE: none */
        double optimizer_ratio;                    /* of the elements: the host updates no more than so many; 1: all */
        spw_path_list param_path, optimizer_path;
        bool pin_memory_param, pin_memory_optimizer;
        uint64_t param_buffer_count, param_buffer_size; /* elements */
        uint64_t optimizer_buffer_count;
        uint64_t max_in_cpu;                                           /* elements */
        uint64_t sub_group_size;                                       /* elements; 0: no bound */
        uint64_t prefetch_bucket_size, max_live_parameters;            /* elements */
        bool quantized_weights, quantized_frozen, quantized_gradients; /* ZeRO++, between ranks, in stage 3 */
        uint32_t hpz_partition_size;                                   /* its secondary weights; 0, 1: none */
        int32_t mics_shard_size; /* MiCS: ranks that have all parts among them, in stage 3; up to 0: all ranks */
        bool mics_by_host;       /* a group's weights come once to each of its hosts */
    } zero;
    struct {
        spw_aio_backend backend;
        bool single_submit, overlap_events, sqpoll, iopoll;
        uint64_t block_size;
        uint32_t queue_depth, thread_count;
    } aio;
    struct {
        uint64_t steps, seed;
        double comm_timeout; /* seconds */
        uint32_t ranks;      /* of the world; train_batch_size is over all of them */
        char device[32];
        char collectives[16];                /* auto, host, nccl */
        char recompute[16];                  /* auto, least, always */
        char gradients[8];                   /* auto, host, nvme: where they wait for their update */
        char update_ahead[8];                /* auto, always, never: before the norm is known */
        uint64_t delayed_update;             /* updates after so many are made a step late; 0: none is */
        char fill_device[8];                 /* auto, always, never: offloaded state takes device memory that is left */
        uint64_t device_memory, host_memory; /* bytes; SPW_AUTO */
        spw_state_format state_format;
        uint64_t chunk_elems;
        char start[16];                  /* auto, weights, random */
        uint64_t micro_batches_per_pass; /* 0: all */
        uint64_t tile_vocab;             /* rows of embeddings and heads in a piece, at most; 0: they are whole */
        uint64_t tile_tokens;            /* at most, that a block's parts compute at once; 0: by width */
        uint32_t expert_turns;           /* 0: as few as there is room for */
        spw_tier activations;            /* of their checkpoints; SPW_TIER_COUNT: auto */
        bool cpu_checkpointing;          /* DeepSpeed's key: activations auto means host */
        uint32_t optimizer_threads, compute_threads; /* 0: auto */
        bool pin_threads;
        uint32_t weight_slots, record_slots; /* 0: from the budget */
        bool integrity, prefetch, frozen_in_place;
        char frozen_codes[12]; /* none (or empty), int8, int4, published */
        double router_balance;
        uint64_t
            reference_steps; /* whose sequences the reference of preference is asked about, if they are more than steps */
        bool fp8;
        spw_glob_list freeze; /* parameters that are not trained */
        spw_lora lora;
        spw_glob_list lora_targets, lora_target_parameters;
        struct {
            char loss[12]; /* none, or as spw_preference_name() has it */
            double beta, label_smoothing, margin, likelihood;
        } preference;
        bool decay_norm_and_bias;
        bool nearest_moments;
        spw_dtype grad_dtype;
        char checkpoint_dir[SPW_CHECKPOINT_DIR_BYTES], run_log[SPW_PATH_BYTES];
        uint64_t checkpoint_interval, eval_interval, eval_batches; /* steps; 0: never (the end still saves) */
        bool save_at_end, save_in_background, checkpoint_links, checkpoint_base;
        uint64_t keep_last;           /* checkpoints of checkpoint_dir that stay; 0: all */
        uint64_t tbw;                 /* bytes the swap disks are rated for; 0: not known */
        uint64_t write_budget;        /* bytes that the run may write to nvme swap, resumed or not; 0: no limit */
        char write_budget_action[16]; /* stop, pause */
        uint64_t chaos_seed;          /* tests */
        spw_test_aio_schedule *aio_faults, *activation_faults; /* tests; NULL: none */
    } run;
} spw_config;
/* Ranks that have parts of the same micro-batches: 1, each has its own. */
static inline uint32_t
spw_config_sharers(const spw_config *c)
{
    return c->sequence_ranks > 1 ? c->sequence_ranks : 1;
}

/*
 * spw_config_load - reads a JSON file and those it includes, applies `a.b=c` overrides, checks everything, fills defaults.
 * Errors  SPW_ENOENT, SPW_ECONFIG with file, key and value (and a suggestion). Nothing is touched on disk.
 */
spw_status spw_config_load(spw_config *out, const char *path, const char *const *overrides, uint32_t override_count,
                           spw_error *err);
/* The same from text; name stands for the file in messages, and relative includes start at its folder if it has one. */
spw_status spw_config_parse(spw_config *out, const char *json_text, const char *name, const char *const *overrides,
                            uint32_t override_count, spw_error *err);
/* The whole effective configuration as JSON text (spw_mem; the caller frees with spw_mem_free); NULL: no memory. */
char *spw_config_dump(const spw_config *config);
/* What spillway.preference says; false: losses of tokens are minimised. */
bool spw_config_preference(const spw_config *config, spw_preference *out);
/* Path of its tokenizer (spw_tokenizer_open); NULL: bytes are tokens. */
const char *spw_config_tokenizer(const spw_config *config);
/* Whose tokenizer's files, in whatever form, checkpoints hold: the one that is named, else the model's folder; NULL: none, or bytes. */
const char *spw_config_kept_tokenizer(const spw_config *config);
/* Opens the training data that it describes, for its model's vocabulary. Errors: those of spw_data_open(). */
struct spw_data;
spw_status spw_config_open_data(struct spw_data **out, const spw_config *config, spw_error *err);
/* Help: one line per key: name, type, default, meaning. Calls line(ctx, text) for each. */
void spw_config_help(void (*line)(void *ctx, const char *text), void *ctx);

/*
 * spw_schedule_lr - learning rate of an update, counted from 1: skipped steps do not count, as DeepSpeed's schedulers stand still there.
 * spw_schedule_group_lr - of a group with a rate of its own, where the others have lr: it follows the same curve, and has its own rate where that
 * has the one that the schedule is about (the largest; of LRRangeTest the least).
 * spw_schedule_betas - OneCycle's moments where it cycles them; else *beta1 and *beta2 stay as they are.
 * Source  DeepSpeed's documented schedulers; OneCycle, LRRangeTest: Smith 2018 (1803.09820).
 */
double spw_schedule_lr(const spw_config *config, uint64_t update);
double spw_schedule_group_lr(const spw_config *config, uint64_t update, double lr, double own);
void spw_schedule_betas(const spw_config *config, uint64_t update, double *beta1, double *beta2);

#ifdef __cplusplus
}
#endif
#endif
