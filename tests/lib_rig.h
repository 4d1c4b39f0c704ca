/*
 * A rig: a tiny model in an engine with a folder of its own, whose state can be read part by part; and what is checked of it in
 * many placements. Errors fail the test.
 */
#ifndef LIB_RIG_H
#define LIB_RIG_H

#include "lib_tiny.h"

enum { RIG_STEPS = 5, RIG_TOKENS = 4096 };
extern int32_t rig_tokens[RIG_TOKENS], rig_targets[RIG_TOKENS]; /* room for a batch */

typedef struct rig {
    char dir[256];
    spw_config c;
    spw_model *model;
    spw_engine *e;
    const char *from;     /* weights_from of the engine, which begins with them */
    uint32_t chain_extra; /* of the engine */
    spw_error err;
    double losses[RIG_STEPS], norms[RIG_STEPS];
} rig;

/* Fails the test with the rig's error unless st is SPW_OK. */
void rig_need(const rig *r, spw_status st);

/* Makes the folder and a configuration with AdamW and all state in tier. */
void rig_config(rig *r, spw_family family, spw_state_format format, spw_tier tier);
void rig_open(rig *r);
/* The weights of `from`, where there is one, else drawn ones. */
void rig_fill(rig *r);
/*
 * The same for a run that begins, with initial weights by the run's seed, and what comes of it: an engine may be refused. Its
 * budgets count this process as it is.
 */
spw_status rig_begin(rig *r);
void rig_close(rig *r);  /* but for the folder: it can be opened again */
void rig_remove(rig *r); /* the folder too */
/* One step with its own batch, which stays in rig_tokens and rig_targets. */
spw_status rig_step(rig *r, uint64_t step, spw_step_result *result);
/* Steps first to end, each with its own batch; into losses and norms. */
void rig_train(rig *r, int first, int end);
/* To step-<step> of the rig's folder. */
void rig_save(rig *r, int step);
/* Opens the rig with what that checkpoint of another has. */
void rig_load(rig *r, const rig *from, int step);

/* Changes of a configuration. freeze_mlps: matrices inside every layer; freeze_lower: the embeddings and lower layers. */
void rig_freeze(rig *r, const char *glob);
void rig_freeze_mlps(rig *r);
void rig_freeze_lower(rig *r);
void rig_lora(rig *r);
void rig_lora_dropout(rig *r);
void rig_lora_experts(rig *r); /* beside attention and experts, with a scale that is no power of two */

/* Elements of parameters in front of id: where it begins in what rig_read returns. */
uint64_t rig_elems_before(const spw_model *m, uint32_t id);
/* One part of every parameter, one after the other, by id; without a record moments are 0. The caller frees it. */
float *rig_read(rig *r, spw_state_part part);
/* Bytes of one parameter, and of all state of two rigs, are equal. what: for the message. */
void rig_same_param(const spw_model *m, uint32_t id, const float *a, const float *b, const char *what);
void rig_same_state(rig *a, rig *b, const char *what);

/*
 * Opens the rig for a short run with SGD, whose steps are as long as gradients are: losses, an evaluation's at last, and masters (elems), which
 * the caller frees. near: two of them differ by rounding alone; what: for the message.
 */
typedef struct rig_outcome {
    double losses[RIG_STEPS + 1];
    float *masters;
    uint64_t elems;
} rig_outcome;
void rig_descend(rig *r, rig_outcome *out);
void rig_near(const rig_outcome *want, const rig_outcome *got, double most, const char *what);

/* In every placement, with one slot, random delays and poisoned buffers, clipped or not: the same bytes. */
void rig_everywhere(spw_family family, spw_state_format format, double clipping, void (*change)(rig *r));
/* Saved after two steps, while others follow, and gone on with in another place: the same bits. */
void rig_resumes(spw_state_format format, spw_family family, spw_tier tier, void (*change)(rig *r));
/* Elements that are trained, counted by hand, and nothing for the others; weights for all. */
void rig_count_bytes(rig *r, uint64_t trained_params);
/* The smallest budget, in bytes, that the refusal of the rig's last rig_begin names; it names the key too. */
uint64_t rig_least_named(const rig *r, const char *key);
/* Bytes of weights that stay in the files they come from. */
uint64_t rig_in_place_bytes(const rig *r);

#endif
