/*
 * Inside the reader of DeepSpeed's checkpoints: what a rank's file and the model's states say (deepspeed_ranks.c, deepspeed_states.c), before
 * deepspeed.c puts it together.
 */
#ifndef SPW_DEEPSPEED_H
#define SPW_DEEPSPEED_H

#include "torch.h"

enum { SPW__DS_PATH_BYTES = 4096, SPW__DS_PARTS_MAX = 1 + SPW_DEEPSPEED_MOMENTS_MAX, SPW__DS_GROUPS_MAX = 1 << 20 };

/* A flat array in a file of the span. */
typedef struct spw__ds_flat {
    uint32_t file_idx;
    uint64_t offset, elems;
} spw__ds_flat;

typedef struct spw__ds_rank {
    uint32_t file_idx;
    spw__ds_flat *flats; /* (SPW__DS_PARTS_MAX, group_count); masters first */
} spw__ds_rank;

/* A parameter as DeepSpeed saved it. */
typedef struct spw__ds_param {
    spw_tensor_info info; /* begin: of its masters, or of a frozen one's weights, in the span */
    uint64_t moment[SPW_DEEPSPEED_MOMENTS_MAX];
    uint32_t group_idx;
    uint64_t padding; /* elements behind it */
    bool frozen;
} spw__ds_param;

struct spw_deepspeed {
    char folder[SPW__DS_PATH_BYTES];
    spw_deepspeed_about about;
    spw__ds_rank *ranks; /* (about.ranks) */
    uint32_t group_count;
    double *decays;        /* (group_count) NAN: not known */
    spw__ds_param *params; /* in their files' order; frozen ones behind */
    uint32_t param_count, trained_count;
    const spw__ds_param **by_name; /* (param_count) */
    spw__span *span;
    char *config; /* JSON */
};

/* SPW_ECORRUPT: what of a file is wrong. */
spw_status spw__ds_damaged(const spw__torch *t, const char *what, spw_error *err);
/*
 * deepspeed_states.c: names and shapes of parameters, counts of steps; stage is 3 or one below, which its file's name tells. And, behind all else in
 * the span, frozen parameters' weights.
 */
spw_status spw__ds_read_states(spw_deepspeed *d, spw_error *err);
spw_status spw__ds_read_frozen(spw_deepspeed *d, spw_error *err);
/* deepspeed_ranks.c: where a rank's flat arrays are; of the first rank what all have in common too. After the states. */
spw_status spw__ds_read_rank(spw_deepspeed *d, uint32_t rank, spw_error *err);
uint64_t spw__ds_elements(const spw_tensor_info *t);

#endif
