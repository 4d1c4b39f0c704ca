/* Inside checkpoints: names of their files, and what saving, loading, comparing and removing share. */
#ifndef SPW_CHECKPOINT_INTERNAL_H
#define SPW_CHECKPOINT_INTERNAL_H

#include "runtime_internal.h"
#include "spw_files.h"
#include <jansson.h>

#define SPW_MODEL_FILE     "model.safetensors"
#define SPW_OPTIMIZER_FILE "optimizer-00001-of-00001.safetensors"
#define SPW_MANIFEST_FILE  "spillway.json"
/* The names that peft looks for. */
#define SPW_ADAPTER_FILE        "adapter_model.safetensors"
#define SPW_ADAPTER_CONFIG_FILE "adapter_config.json"

enum { SPW_BLOCK_ELEMS = 16384 };

/* Of model.path: what a save brings along beside the weights is there. NULL: nowhere; gone since the run began, which is told. */
const char *spw__checkpoint_source(const spw_engine *e, const spw_config *c);
/* A folder of checkpoints, or one of them: SPW_EINVAL where its files' names would be cut off. */
spw_status spw__checkpoint_fits(const char *path, spw_error *err);

/* "master", then what the optimizer calls its moments; and one past the last part. */
const char *spw__checkpoint_part_suffix(const spw_optimizer *o, int part);
uint32_t spw__checkpoint_part_end(const spw_optimizer *o);
/* Frozen parameters have no record, and none has in an engine for inference. */
const spw_optimizer *spw__checkpoint_rule(const spw_engine *e, uint32_t id); /* of a parameter */
bool spw__checkpoint_trains(const spw_engine *e, uint32_t param_id);
/* The tensor of a parameter, or of one of its parts. */
void spw__checkpoint_info(spw_tensor_info *t, const spw_param *p, const char *suffix, spw_dtype dtype);
/*
 * The model's file of the last checkpoint (checkpoint_link.c), for engines that train none of it. contents: a number that an
 * edit of what is frozen changes. saved: that folder holds what was there at this number; digest: of its file, for rank 0.
 * unchanged: this rank still has what is in it, and the next checkpoint may do without a file of its own. link, on rank 0 and if all ranks have: gives the file a second name in folder;
 * false: it must be written. Between steps.
 */
uint64_t spw__checkpoint_contents(spw_engine *e);
void spw__checkpoint_saved(spw_engine *e, const char *checkpoint, const char *digest, uint64_t contents);
bool spw__checkpoint_unchanged(spw_engine *e, const spw_config *config);
bool spw__checkpoint_link(spw_engine *e, const char *folder);
bool spw__checkpoint_all_frozen(const spw_engine *e); /* all but adapters */

/*
 * The manifest (checkpoint_manifest.c): what spillway.json says, every field checked. Errors are SPW_ECORRUPT and name file,
 * field and value, or line and column of what is not JSON. A struct that was read is given back with spw__manifest_free.
 */
enum { SPW_DIGEST_MODEL, SPW_DIGEST_OPTIMIZER, SPW_DIGEST_ADAPTER, SPW_DIGEST_COUNT };
extern const char *const spw__digest_names[SPW_DIGEST_COUNT]; /* the files */
typedef struct spw_manifest {
    spw_checkpoint_state state; /* data.files 0: an older one that says nothing of its data */
    char digests[SPW_DIGEST_COUNT]
                [17];   /* of the three files; "": none, or format 1's, which nothing computes any more */
    bool digests_known; /* false: of format 1 */
    bool scaled;
    spw_loss_scaler scaler; /* of fp16 */
    char base[SPW_PATH_BYTES],
        base_digest[17]; /* the folder of what is frozen, and its fingerprint; "": the model's file is here */
    json_t *config;      /* an object */
} spw_manifest;
/*
 * Where a checkpoint does not hold what is frozen (checkpoint_base.c).
 *   weights     its model's file, or the folder: model_path's or the one that it names, whichever has the fingerprint. SPW_ENOENT: neither
 *   check_base  whether a configuration makes the same weights of the folder. SPW_ECONFIG: it does not
 *   began       the engine's weights are a folder's, which checkpoints may name
 */
spw_status spw__checkpoint_weights(const spw_manifest *m, const char *checkpoint, const char *model_path,
                                   char out[SPW_WEIGHTS_BYTES], spw_error *err);
spw_status
spw__checkpoint_check_base(const spw_manifest *m, const char *checkpoint, const spw_config *now, spw_error *err);
void spw__checkpoint_began(spw_engine *e, const char *folder);
/* What each rank has summed of each file becomes what all have. Collective, on the channel of saves. */
spw_status spw__checkpoint_sum_ranks(spw_engine *e, spw_st_sum sums[SPW_DIGEST_COUNT], spw_error *err);
spw_status spw__manifest_read(spw_manifest *out, const char *checkpoint, spw_error *err);
spw_status spw__manifest_parse(spw_manifest *out, const char *text, const char *file, spw_error *err);
void spw__manifest_free(spw_manifest *m);
/* Also where it may not be read: who looks for the newest checkpoint must not get an older one for that. */
bool spw__manifest_there(const char *file);
/* NULL: no memory. free(). */
char *spw__manifest_text(const spw_manifest *m);
/* Its configuration, defaults filled in. */
spw_status spw__manifest_config(const spw_manifest *m, const char *file, spw_config *config, spw_error *err);
/* The number of a folder step-<n> with a manifest in it; false for every other name. */
bool spw__checkpoint_step(const char *dir, const char *name, uint64_t *step_out);
/* SPW_ESYS (EEXIST) where something else has the name of a checkpoint that is to be saved, for that would go with it. */
spw_status spw__checkpoint_check_name(const char *final, spw_error *err);

/*
 * spw__checkpoint_place - moves a finished folder to its name, in one step where the file system can exchange names.
 * What had that name before is removed, without ever being there half. Both names are in dir. Durable on SPW_OK; else
 * the names are what they were.
 */
spw_status spw__checkpoint_place(const char *dir, const char *partial, const char *final, spw_error *err);
/*
 * spw__checkpoint_recover - where names cannot be exchanged, a save that was killed while it replaced a step's checkpoint left the new one as
 * step-<n>.partial, the old one as step-<n>.old, both complete, and none that is found. The new one gets the name.
 */
void spw__checkpoint_recover(const char *dir);
/*
 * Of the complete checkpoints in dir up to step, which has just become one, removes all but the last keep (0: none), and
 * what killed removals and killed saves of earlier steps left. A failure is a warning in the log.
 */
void spw__checkpoint_trim(const char *dir, uint64_t step, uint64_t keep);

/* Parameters that are no adapters: the first so many. */
uint32_t spw__base_count(const spw_model *model);
/* Which model's they are, in adapter_config.json: its folder, or its name on the hub and the commit. "": null (checkpoint_adapter.c). */
void spw__adapter_names_base(json_t *adapters, const char *folder);
/* What adapter_config.json says of the model's adapters; NULL: no memory. */
json_t *spw__adapter_config(const spw_model *model, const spw_config *config);
void spw__adapter_warn(const spw_model *model); /* of adapters that peft does not load as they are */

/* What a chunk has of one parameter, and which part of it is read or written. */
typedef struct spw__chunk_view {
    spw_state_format format;
    const spw_optimizer *rule;
    const spw_store_chunk *c;
    void *weights, *record;
    uint64_t param_first; /* of the unit's elements */
    spw_state_part part;
} spw__chunk_view;
/* An spw_hf_take_fn (load.c); ctx is an spw__chunk_view. */
spw_status spw__chunk_take(void *ctx, uint64_t first, const float *data, uint64_t count, spw_error *err);
/* Elements of a parameter as they begin where no file has them. */
spw_status
spw__chunk_draw(spw__chunk_view *v, const spw_engine *e, uint32_t id, uint64_t first, uint64_t count, spw_error *err);
/*
 * Compares weights of a checkpoint with their digest after they were read by runs (of a file that was not read as a whole by reading
 * it). Collective. Errors  SPW_ECORRUPT naming the file.
 */
spw_status spw__checkpoint_check_weights(spw_engine *e, const char *path, const spw_hf_reader *reader,
                                         spw_bounce *bounce, spw_error *err);

/*
 * What an engine's state is loaded from, a folder's weights, its own checkpoint's files or another's: the weights, and a tensor for each part of a trained
 * parameter's record that is not the model's file's.
 *   init    nothing is open. deinit closes what is, also after init failed
 *   fill    reads all of it, each byte once, by the workers of the chunks it belongs to. Collective
 */
typedef struct spw__checkpoint_sources {
    spw_engine *e;
    spw_state_format format;
    spw_hf_reader *model;     /* bound */
    spw_hf_reader *codes;     /* bound, to model.path, of which codes are kept: model, or another; NULL: none are */
    spw_st_reader *optimizer; /* NULL: inference, or nothing was kept */
    spw_st_reader *adapter;   /* NULL: the model has none, or they are drawn */
    spw_bounce *bounce;       /* lent to all of them */
    const spw_tensor_info **
        tensors; /* (param_count, SPW_PART_COUNT) of the optimizer's file; NULL, also all of it: masters are the model's
                                        weights, moments are 0. An adapter's master is in the adapters' file */
} spw__checkpoint_sources;
spw_status spw__checkpoint_sources_init(spw__checkpoint_sources *s, spw_engine *e, spw_error *err);
void spw__checkpoint_sources_deinit(spw__checkpoint_sources *s);
/* Once the model's reader is bound and buffers are there: codes that are kept come from model.path, whatever numbers the model's files have (path: where
 * they are; NULL: nowhere that model.path could be). */
spw_status spw__checkpoint_open_codes(spw__checkpoint_sources *s, const char *path, spw_error *err);
spw_status spw__checkpoint_fill(spw__checkpoint_sources *s, spw_error *err);

/* codes.c: fills a chunk that is kept in published codes, and looks whether they are the weights that the sources have. */
spw_status spw__codes_load(const spw__checkpoint_sources *job, const spw_store_chunk *c, void *codes, spw_error *err);

/* The differences between two configurations that decide the result, each a line; *count: how many. */
typedef void (*spw__difference_fn)(void *ctx, const char *text);
spw_status spw__config_compare(const spw_config *saved, const spw_config *now, spw__difference_fn line, void *ctx,
                               uint32_t *count, spw_error *err);

/* Does a key of the configuration decide what training computes? */
bool spw__config_decides(const char *key);

/* Whether spillway.frozen_codes makes other numbers of weights than they were: those that a folder has as codes are just these. */
static inline bool
spw__codes_round(const char *frozen_codes)
{
    return strcmp(frozen_codes, "int8") == 0 || strcmp(frozen_codes, "int4") == 0;
}

#endif
