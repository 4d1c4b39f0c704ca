/*
 * spw_engine.h - element space, trace, plan and the engine that walks a model's blocks layer-major.
 *
 * The engine decides when: it tells the store (offload) what it will use, computes on the device, and hands Adam to the
 * store's workers. Layout, placement and trace are pure functions on plain data.
 */
#ifndef SPW_ENGINE_H
#define SPW_ENGINE_H

#include "spw_comm.h"
#include "spw_config.h"
#include "spw_nn.h"
#include "spw_offload.h"
#include "spw_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- element space (pure) */

/*
 * Where a parameter lies: unit, element inside the unit (a multiple of 128). A matrix in pieces (spillway.tile_vocab) has piece_elems of its
 * elements in each of so many units in a row, what is left in the last, and nothing else is there.
 */
typedef struct spw_place {
    uint32_t unit_idx, pieces;
    uint64_t first, elems, piece_elems;
} spw_place;
/* A piece of it, as a place of its own. */
spw_place spw_layout_piece(const spw_place *place, uint32_t piece);

/*
 * Units are the blocks' own parameters, in chain order, a block's frozen ones before the others (those that are stored as codes
 * first); chunks cut them; tiers are filled in by spw_plan_make.
 */
typedef struct spw_layout {
    uint32_t unit_count, chunk_count, param_count;
    uint32_t part, parts; /* units are cut into so many equal parts, of which the units and chunks here are one */
    bool whole;           /* matrices of blocks are in units that are whole */
    spw_store_unit *units;
    spw_store_chunk *chunks;
    spw_place *places;     /* (param_count) in whole units */
    uint32_t *param_ids;   /* (param_count) by unit, then place; an id that no block owns is not there */
    uint32_t *param_first; /* (unit_count + 1) where each unit's begin in param_ids */
    uint32_t
        experts_each; /* experts of a layer in one unit, apart from what else the layer has; 0: they are with that */
    bool *of_experts; /* (unit_count) such a unit */
    bool *of_vocab;   /* (unit_count) it has a piece of a matrix with a row for each token */
    uint64_t granule; /* elements: on the device units take multiples of it; 0: what they have */
    uint64_t *bases;  /* (unit_count) where each unit begins when all lie in a row, uncut, experts with their layer */
    uint64_t elems, params; /* of the units here, padded; of the whole model, real */
} spw_layout;
/*
 * trainable: with gradients; without, frozen parameters are laid out like all others. experts_each: of the layout; units that are not
 * trainable then take multiples of the largest of experts. forms (param_count): matrices of the blocks
 * between the first and the last that are frozen, with gradients or without, are stored as codes of these, SPW_FORMS_MAX of them at most, those of one
 * form in units of their own; SPW_QUANT_NONE: as numbers; NULL: all are. whole: those
 * of them that are trained have units of their own, which an optimizer takes whole, and begin at multiples of 4096 there. parts 1: whole units. The last
 * parts of a small unit may hold padding alone. piece_rows: of what embeddings and heads have a row of for each token, in one piece
 * (spw_model_piece_rows); 0: they are whole.
 */
spw_status
spw_layout_make(spw_layout *out, const spw_model *model, uint64_t chunk_elems, bool trainable, uint32_t experts_each,
                const spw_quant *forms, bool whole, uint64_t piece_rows, uint32_t part, uint32_t parts, spw_error *err);
/* Elements of a unit over all parts, padded. */
uint64_t spw_layout_whole(const spw_layout *layout, uint32_t unit_idx);
/* What one part of so many takes of a unit of elems elements: a multiple of 4096. */
uint64_t spw_layout_part(uint64_t elems, uint32_t parts);
void spw_layout_free(spw_layout *layout);

/* ---------------------------------------------------------------- trace (pure) */

/* The recorded order of unit uses in one pass over the model. After a use that was not expected matching goes on at the next
 * position that fits. */
typedef struct spw_trace {
    uint32_t *units;
    uint32_t count, capacity, pos;
    bool recorded;
} spw_trace;
spw_status spw_trace_init(spw_trace *trace, uint32_t capacity, spw_error *err);
void spw_trace_deinit(spw_trace *trace);
void spw_trace_begin(spw_trace *trace);
void spw_trace_use(spw_trace *trace, uint32_t unit_idx);
void spw_trace_end(spw_trace *trace);
/*
 * The uses to come, at most max, nearest first: the rest of this pass at generations[unit], then the next pass, where what is trained is
 * wrap_step generations further. Those that begin within max_elems elements may be fetched.
 */
typedef struct spw_trace_rules {
    const uint64_t *generations;
    const spw_store_unit *units;
    uint64_t wrap_step, max_elems;
    uint32_t max;
} spw_trace_rules;
/* What was told of them last, zeroed before the first time: uses [pos, end) of this pass and the next, of which `ahead` may be fetched. */
typedef struct spw_trace_told {
    bool goes_on; /* to be cleared when generations change, or another trace was told of */
    uint32_t pos, end, ahead;
    uint64_t ahead_elems;
    uint32_t
        dropped; /* of the uses told last the first so many have passed; UINT32_MAX: all, what is told is everything */
} spw_trace_told;
/* Leaves in out (max) what comes behind the uses that were told last, and returns how many. Cost  of these and of what has passed. */
uint32_t spw_trace_tell(const spw_trace *trace, const spw_trace_rules *rules, spw_trace_told *told, spw_store_use *out);
/* How many of these uses may be fetched now: those that begin within max_elems elements. */
uint32_t spw_trace_ahead(const spw_store_use *uses, uint32_t count, const spw_store_unit *units, uint64_t max_elems);

/* ---------------------------------------------------------------- engine */

typedef struct spw_engine spw_engine;

typedef struct spw_engine_options {
    const spw_config *config;
    const spw_model *model; /* borrowed; outlives the engine */
    spw_comm
        *comm; /* borrowed: training is shared with its other ranks, which make the same calls in the same order; NULL:
                       one rank */
    bool inference;                /* no gradients, no records */
    bool losses;                   /* inference: for spw_engine_eval(), not for logits alone */
    uint64_t sequences, positions; /* of one micro-batch; 0: from the configuration */
    uint64_t cache_slots;          /* inference: so many sequences keep keys and values (spw_generate.h); 0: none do */
    uint64_t cache_positions;      /* of so many tokens each; positions is then the longest piece of a prompt */
    uint32_t chain_extra;          /* how many more blocks than the model has a chain may walk, in any order */
    bool plan_only;                /* stop before anything is taken: only the plan and the layout may be asked for */
    uint32_t
        device_ranks; /* plan_only: ranks on this one's device; 0: as many as ranks of its host on the devices that it sees */
    uint32_t local_ranks;   /* plan_only, without comm: so many of spillway.ranks, in a row, are on each host; 0: all */
    bool kept_rates;        /* what is chosen by time is so by rates that spw_calibrate() keeps; else by estimates */
    const spw_rates *rates; /* plan_only: these instead, by the plan's paths; NULL: as kept_rates says */
    const spw_gpu_spec *gpu; /* plan_only: for this device, which need not be here; NULL: the configuration's */
    bool fit_only;           /* plan_only: whether it fits is enough, what a step moves is not counted */
    /* plan_only, for searches: nobody reads the plan's decisions; nor, but of plans that are compared, what a step moves. */
    bool unexplained, uncounted;
    uint64_t process_bytes; /* what the plan counts for the process; 0: what is resident now */
    double
        targeted; /* share of tokens with a target (spw_data_targeted), where data hide some: what heads compute; 0: all */
    uint64_t caller_bytes; /* and for what the caller will take besides its batches */
    /* Not 0, as a signal may make it: state that is being made or loaded is given up, with SPW_ECANCELED, and the engine with it. NULL: never. */
    const volatile int *stop;
    bool resumes; /* a checkpoint will be loaded or saved, though there is neither model.path nor a checkpoint_dir */
    /*
     * Where the weights will be loaded from: the path of spw_engine_load_weights(), or spw_checkpoint_weights(). With
     * spillway.frozen_in_place, frozen weights on nvme of the type that the state format gives them stay there, and
     * nothing else can be loaded; the files must not change. NULL: all are copied.
     */
    const char *weights_from;
    uint64_t
        room_bytes; /* what the process may still take; 0: what this machine and its limits leave each of its ranks now */
    const spw_quant
        *forms;         /* spw_engine_create's own: by parameter, what frozen ones are stored as (spw_layout_make) */
    spw_plan *plan_out; /* out: the plan, also one that does not fit (its paths point into config); may be NULL */
} spw_engine_options;

/*
 * spw_engine_create - plans, then takes everything the run needs.
 * Errors  SPW_ENOFIT with the smallest budget that would do (plan_out has the table), and those of the parts.
 */
spw_status spw_engine_create(spw_engine **out, const spw_engine_options *options, spw_error *err);
/*
 * spw_engine_device_ranks - how many ranks will compute on this one's device: for plans that each makes alone. Collective, over the world.
 * Opens the device and closes it; 1 where that cannot be, or where the device is the host's.
 */
spw_status spw_engine_device_ranks(uint32_t *out, const spw_config *config, spw_comm *comm, spw_error *err);
void spw_engine_destroy(spw_engine *engine); /* NULL is fine */
/*
 * spw_plan_nearest - the nearest configuration that fits the budgets, for one that does not (how: nearest.c).
 * options->plan_out is not used. Takes nothing and moves nothing; set[] holds overrides as --set takes them.
 */
typedef struct spw_suggestion {
    bool found;
    bool lossy_would; /* not found, but with state format split24-int8 there is one */
    /* Not found, but with so many sequences in a step, fewer than were asked for, set fits; 0: nor that. */
    uint64_t batch;
    uint32_t count;
    char set[20][SPW_PATH_BYTES + 128]; /* more than the keys that a search changes */
} spw_suggestion;
spw_status spw_plan_nearest(const spw_engine_options *options, spw_suggestion *out, spw_error *err);
/*
 * spw_plan_faster - settings with which steps of a configuration that fits are predicted to be shorter, and of which no bit of a
 * training is another (how: faster.c). plan and rates are the configuration's own, as spw_calibrate() has them; options as for
 * spw_engine_create(), without plan_out. Each change is on top of those before it; step is what is predicted with it. Takes nothing.
 * Errors  SPW_ENOMEM.
 */
typedef struct spw_faster_change {
    uint32_t set_count;
    char set[2][96]; /* as --set takes them */
    spw_prediction step;
} spw_faster_change;
typedef struct spw_faster {
    uint32_t count;
    spw_faster_change changes[12];
} spw_faster;
spw_status spw_plan_faster(const spw_engine_options *options, const spw_plan *plan, const spw_rates *rates,
                           spw_faster *out, spw_error *err);
const spw_plan *spw_engine_plan(const spw_engine *engine);
const spw_layout *spw_engine_layout(const spw_engine *engine);
spw_store *spw_engine_store(spw_engine *engine);
spw_gpu *spw_engine_gpu(spw_engine *engine);
const spw_model *spw_engine_model(const spw_engine *engine);

/*
 * Writes the initial parameters: a function of (seed, parameter, element) alone. This and what loads them instead end on all ranks
 * together, with the error of the first one that failed.
 */
spw_status spw_engine_init_params(spw_engine *engine, uint64_t seed, spw_error *err);
/*
 * spw_engine_load_weights - initial parameters from a Hugging Face folder or a safetensors file, moments 0.
 * Reads every byte once, chunk by chunk into its tier; memory besides the engine's: 64 KiB per worker and the names.
 * Adapters are drawn like initial parameters, from spillway.seed.
 * Errors  those of spw_hf_reader_open and _bind, SPW_EIO; SPW_EUNSUPPORTED for a folder with adapters. The engine's state is
 *         then void.
 */
spw_status spw_engine_load_weights(spw_engine *engine, const char *path, spw_error *err);
/* The folder whose weights training starts from, by spillway.start and what is there; NULL: they are drawn. */
const char *spw_config_start_folder(const spw_config *config);
/* SPW_ECONFIG where they would be drawn though the folder is another program's checkpoint: who starts there means its weights. */
spw_status spw_config_check_start(const spw_config *config, spw_error *err);
/* What spillway.start says: one of the two above. */
spw_status spw_engine_start(spw_engine *engine, bool *loaded_out, spw_error *err);

/* fp16's loss scale: where it stands, and how it goes on after a step. scale 1 and never updated without fp16. Pure. */
typedef struct spw_loss_scaler {
    double scale;
    bool dynamic;
    uint64_t hysteresis;          /* overflows left until it falls, at least 1 */
    int64_t steps, last_overflow; /* so far, skipped ones too; -1: none */
} spw_loss_scaler;
void spw_loss_scale_init(spw_loss_scaler *scaler, const spw_config *config);
void spw_loss_scale_update(spw_loss_scaler *scaler, const spw_config *config, bool overflow);
/* Whether an overflow leaves it nowhere to fall to: DeepSpeed ends a run then, whose steps would all be skipped. */
bool spw_loss_scale_is_spent(const spw_loss_scaler *scaler, const spw_config *config);
/* Goes on from a checkpoint's. */
const spw_loss_scaler *spw_engine_loss_scaler(const spw_engine *engine);
void spw_engine_set_loss_scaler(spw_engine *engine, const spw_loss_scaler *scaler);

/* Of pairs of answers (spillway.preference), over all ranks: means. NAN where there is no pair. */
typedef struct spw_pair_means {
    uint64_t pairs;
    double loss, chosen, rejected; /* and the rewards of both answers */
    double right;                  /* share of pairs whose chosen answer has the larger reward */
} spw_pair_means;

typedef struct spw_step_result {
    double loss; /* NAN where targets is 0 */
    double grad_norm, lr, loss_scale;
    bool again;                      /* made twice: it clipped, and updates ahead of the norm had consumed gradients */
    bool skipped;                    /* the gradient was not finite: no byte of state changed */
    uint64_t targets;                /* tokens with a target, or pairs; of all ranks */
    uint64_t tokens;                 /* of all ranks; bytes and times below are this rank's */
    double step_s;                   /* compute_s, stall_s[] and other_s add up to it */
    double compute_s;                /* the thread that computes, in forward and backward */
    double stall_s[SPW_STALL_COUNT]; /* and waiting, by what for; DATA is left to the caller */
    double other_s;                  /* and in between: planning, sums, bookkeeping */
    double run_delay_s; /* of step_s, in all of its parts: the thread was ready and had no processor; 0: unknown */
    double cpu_s;       /* of all threads of the process */
    double bound_s;     /* spw_step_bound, of this step's bytes */
    spw_resource bound_by;
    double bounds_s[SPW_RESOURCE_COUNT];
    uint64_t nvme_read, nvme_write, h2d, d2h;
    uint64_t gather, reduce, trade; /* received from other ranks; trade: of sequences that they share */
    /* Chunks updated since the last step ended; of this step's, before its norm was known; of those taken back. */
    uint64_t updates, ahead, undone;
    double
        expert_peak; /* rows of the expert with most, over the mean, in the layer where that is largest; 0: no experts */
    spw_pair_means preferred; /* with spillway.preference, which its loss then is */
} spw_step_result;
/*
 * spw_engine_step - one optimizer step over all micro-batches.
 *   tokens, targets  (micro_batches, B, T) int32, host memory; target -1: no loss there. The step's loss is the mean
 *                    over all others, so a mask changes no other token's weight in it. Between ranks each brings
 *                    micro-batches of its own, as many as the others; with sequence_parallel_size P, P ranks in a row bring the same, whole. With data.documents "separate" tokens may be marked
 *                    by SPW_TOKEN_BEGINS (spw_data.h): none before one is attended to from there on
 * Returns when forward and backward are done; updates run on into the next step.
 * Errors  SPW_EINVAL for a batch or a rate that cannot be; nothing has changed. A step that fails later has broken off half-way: what it leaves is
 *         neither the state before nor after it, so steps, evaluations, saves and access give its error from then on. A save that was
 *         under way may still be finished, and is of the state before.
 */
spw_status spw_engine_step(spw_engine *engine, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches,
                           double lr, spw_step_result *result, spw_error *err);
/*
 * With spillway.preference sequences hold pairs (spw_data.h), the loss is the mean of theirs, and an answer's tokens are its targets.
 * spw_engine_set_reference - what the reference makes of them, for the steps and evaluations to come.
 *   reference  (micro_batches, B, T) beside the tokens of each call: at the first token of each answer's document the sum of -log p over its
 *              targets; others are not read. The caller's, until the next one is set. NULL, as at first: 0
 * spw_engine_answers - out like reference, of the weights as they are: of the last evaluation, whose targets these are. Others stay.
 * spw_engine_preferred - of the last step or evaluation.
 */
void spw_engine_set_reference(spw_engine *engine, const double *reference);
void spw_engine_answers(const spw_engine *engine, const int32_t *targets, uint32_t micro_batches, double *out);
const spw_pair_means *spw_engine_preferred(const spw_engine *engine);
/* Mean loss of micro-batches, forward only; over all ranks' micro-batches. NAN: no token has a target. */
spw_status spw_engine_eval(spw_engine *engine, const int32_t *tokens, const int32_t *targets, uint32_t micro_batches,
                           double *loss_out, spw_error *err);
/* values[i] = sum over all ranks, in their order; between steps. With one rank: nothing. */
spw_status spw_engine_sum(spw_engine *engine, double *values, uint32_t count, spw_error *err);
/*
 * spw_engine_logits - logits (V) of the last of count tokens. Between ranks collective, as a step is: a failure of one is told to all.
 * Errors  SPW_EINVAL for no tokens, more than positions, or one outside the vocabulary; SPW_EUNSUPPORTED where a model that is trained has
 *         embeddings and head in pieces (spillway.tile_vocab).
 */
spw_status spw_engine_logits(spw_engine *engine, const int32_t *tokens, uint64_t count, float *logits, spw_error *err);
/*
 * Blocks to walk from the next step on: first and last must be the model's; others may repeat, be permuted or left out.
 * Errors  SPW_EINVAL for another chain, or one that keeps more blocks' inputs than the plan has room for: with frozen blocks
 * in front, an engine made without chain_extra plans for those of the model's own order.
 */
spw_status spw_engine_set_chain(spw_engine *engine, const uint32_t *blocks, uint32_t count, spw_error *err);
/* For the bound of each step from now on; before, only processor time bounds it. */
void spw_engine_set_rates(spw_engine *engine, const spw_rates *rates);
/* Waits for all updates. */
spw_status spw_engine_drain(spw_engine *engine, spw_error *err);
/* Optimizer steps applied, or to be applied a step late (Adam's t), and where it goes on after loading. */
uint64_t spw_engine_updates(const spw_engine *engine);
void spw_engine_set_updates(spw_engine *engine, uint64_t updates);

/* ---------------------------------------------------------------- checkpoints */

/* What data trains, as far as it can be told without reading it all; files 0: not known. */
typedef struct spw_data_summary {
    uint64_t files, bytes, tokens;
    char formats[128]; /* of spw_data_formats() */
    char encoder[64];  /* of spw_data_encoder(); "": not known */
    /* Sequences held out; known is false in checkpoints of before, whose files' shares were rounded one by one. */
    uint64_t held_out, held_out_before;  /* before: by that rule; the manifest has held_out alone */
    bool held_out_known, held_out_moved; /* moved: that rule held out others */
} spw_data_summary;

typedef struct spw_checkpoint_state {
    uint64_t step, data_position, updates;
    uint64_t bytes_written; /* to nvme swap, by all ranks, since the first run */
    double tokens;
    spw_data_summary data;
} spw_checkpoint_state;
/*
 * A save while training goes on. begin takes the state as it is after the last step; each chunk reaches the files before the
 * next update changes it; a thread of its own then flushes, sums and renames.
 *   begin   reserves the files. SPW_ENOSPC with needed and free bytes, SPW_ESYS, SPW_EINVAL (one save at a time; dir has
 *           SPW_CHECKPOINT_DIR_BYTES or more): nothing was started. The engine, which must live until finish, does not wait for it.
 *   done    everything is on disk, or the save has failed: finish will not wait.
 *   hand_over  brings out what no update has: frozen weights, say, that the device keeps, so that nobody reads them. Where nothing is left, it does
 *           nothing; else it waits for updates and reads, not for the disk that is written. Between steps only.
 *   finish  ends it: hands over what is left, waits until it is on disk, frees the job (NULL: nothing to do). Its
 *           errors are those of writing; training is not affected. Between steps only. path_out as below.
 * A step that fails while a save is under way may take the save with it; the checkpoints before it are as they were.
 * Threads as the engine's calls: one at a time.
 */
typedef struct spw_checkpoint_job spw_checkpoint_job;
spw_status spw_checkpoint_begin(spw_checkpoint_job **out, spw_engine *engine, const spw_config *config, const char *dir,
                                const spw_checkpoint_state *state, spw_error *err);
/* About what so many checkpoints, one or more, take on disk at once; with spillway.checkpoint_links they share what is frozen, without spillway.checkpoint_base they
 * do not have it. */
uint64_t spw_checkpoint_disk_bytes(const spw_engine *engine, uint64_t count);
bool spw_checkpoint_done(spw_checkpoint_job *job);
void spw_checkpoint_hand_over(spw_checkpoint_job *job);
spw_status spw_checkpoint_finish(spw_checkpoint_job *job, char *path_out, spw_error *err);
/*
 * spw_checkpoint_save - begin and finish: writes <dir>/step-<n>/, complete or absent; path_out (may be NULL): SPW_PATH_BYTES.
 * With spillway.keep_last, what is then one too many is removed; a removal that fails is a warning in the log. With
 * spillway.checkpoint_links, a model that is all frozen is a hard link to the file of the save or load before, if nothing of
 * it was edited since.
 * Errors  SPW_ENOSPC with needed and free bytes, SPW_ESYS, of which EEXIST where something else than a checkpoint has the name; the checkpoints
 *         before it are as they were.
 */
spw_status spw_checkpoint_save(spw_engine *engine, const spw_config *config, const char *dir,
                               const spw_checkpoint_state *state, char *path_out, spw_error *err);
/* path: a checkpoint or the folder of checkpoints (the newest complete one). Fills found (SPW_PATH_BYTES). SPW_EINVAL as begin. */
spw_status spw_checkpoint_find(const char *path, char *found, spw_error *err);
/* Whether steps above `after` up to last can be saved to dir: SPW_ESYS (EEXIST) naming what has the name of one of them and is no checkpoint. */
spw_status spw_checkpoint_check_names(const char *dir, uint64_t after, uint64_t last, spw_error *err);
/*
 * spw_checkpoint_verify - compares a checkpoint's files with the digests in its manifest: model, adapters if there
 * are any, and the optimizer's if asked for. Reads all of them once. Those of an earlier version pass, with a warning in the log.
 * Errors  SPW_ECORRUPT naming the file and both digests; those of reading the manifest.
 * Threads any; starts up to four.
 */
spw_status spw_checkpoint_verify(const char *path, bool optimizer, spw_error *err);
/*
 * Where the weights of a checkpoint are, for spw_engine_options: its model's file, or the folder that adapters are beside which were saved without
 * it (spillway.checkpoint_base): model.path's, or the one that the checkpoint names. Errors  SPW_ENOENT: neither has the same weights.
 */
enum { SPW_WEIGHTS_BYTES = SPW_PATH_BYTES + 64 };
spw_status
spw_checkpoint_weights(const char *path, const spw_config *config, char out[SPW_WEIGHTS_BYTES], spw_error *err);
/* Model section of the checkpoint's configuration, and its state. */
spw_status
spw_checkpoint_read_config(const char *path, spw_config *config, spw_checkpoint_state *state, spw_error *err);
/*
 * spw_checkpoint_compare - what of config and data makes going on from a checkpoint another training than it was.
 *   data       what is trained on now; NULL: not compared
 *   line       called once for each difference, with the key and both values
 *   count_out  out: how many
 * Keys that only place, move, save or log are free, so are spillway.steps, and the formats fp32, mixed and split among each
 * other. A checkpoint without a description of its data is compared without, with a warning in the log.
 * Errors     those of reading the manifest; count_out is what was found until then.
 */
spw_status
spw_checkpoint_compare(const char *path, const spw_config *config, const spw_data_summary *data,
                       void (*line)(void *ctx, const char *text), void *ctx, uint32_t *count_out, spw_error *err);
/*
 * spw_checkpoint_compare_ranks - what of this rank's configuration, data and checkpoint to go on from is not rank 0's.
 *   first_config, first  rank 0's: the text of spw_config_dump(), and where it begins, its data described
 *   line, count_out      as spw_checkpoint_compare()'s
 * Free are budgets, paths, and where and how state is kept and moved: they may differ from host to host. For data on another path
 * the description decides. Not collective: the caller brings rank 0's here.
 */
spw_status
spw_checkpoint_compare_ranks(const char *first_config, const spw_checkpoint_state *first, const spw_config *config,
                             const spw_checkpoint_state *state, void (*line)(void *ctx, const char *text), void *ctx,
                             uint32_t *count_out, spw_error *err);
/*
 * Loads weights, and records unless the engine is for inference; compares the files with the digests in the manifest, the optimizer's
 * while it is read. Collective.
 * Errors  SPW_ECORRUPT naming the file; SPW_EINVAL of another model. What the engine holds is then undefined until a load succeeds.
 */
spw_status spw_checkpoint_load(spw_engine *engine, const char *path, spw_error *err);

/*
 * Going on from a checkpoint that DeepSpeed or PyTorch wrote (folder: as spw_foreign_find() fills it in): masters, moments, the number of updates and
 * fp16's loss scale, from any number of ranks to any. Of its order of batches nothing is known: data_position is that of as many sequences.
 *   read     its state; tokens: if all sequences had the configuration's length, and where it does not count them, its batch
 *   compare  as spw_checkpoint_compare(): batch, clipping, optimizer and schedule as far as the checkpoint has them, weight decay and
 *            freezing of each parameter. Errors also those of binding its tensors to the configuration's model
 *   load     as spw_checkpoint_load(). Errors also SPW_EUNSUPPORTED for a model with adapters, and for parameters that were frozen there
 *            and are trained here
 */
spw_status
spw_foreign_read_state(const char *folder, const spw_config *config, spw_checkpoint_state *state, spw_error *err);
spw_status spw_foreign_compare(const char *folder, const spw_config *config, void (*line)(void *ctx, const char *text),
                               void *ctx, uint32_t *count_out, spw_error *err);
spw_status spw_foreign_load(spw_engine *engine, const char *folder, spw_error *err);

/*
 * spw_model_from_config - builds the model that the configuration describes, with the adapters of spillway.lora and with
 * what spillway.freeze names frozen.
 * Errors  those of spw_model_build and spw_model_add_lora; SPW_ECONFIG for a glob that no parameter matches, or when nothing is left to train.
 */
spw_status spw_model_from_config(spw_model **out, const spw_config *config, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
