/*
 * Inside the readers of other programs' checkpoints: the object that they fill in (foreign.c), DeepSpeed's (deepspeed.c, from what
 * deepspeed_states.c and deepspeed_ranks.c read), PyTorch's (dcp.c; full_state.c) and llm.c's (llmc_state.c).
 */
#ifndef SPW_FOREIGN_H
#define SPW_FOREIGN_H

#include "torch.h"

enum { SPW__FOREIGN_PATH_BYTES = 4096, SPW__DS_PARTS_MAX = 1 + SPW_FOREIGN_MOMENTS_MAX, SPW__DS_GROUPS_MAX = 1 << 20 };

/* A flat array in a file of the span. */
typedef struct spw__ds_flat {
    uint32_t file_idx;
    uint64_t offset, elems;
} spw__ds_flat;

typedef struct spw__ds_rank {
    uint32_t file_idx;
    spw__ds_flat *flats; /* (SPW__DS_PARTS_MAX, group_count); masters first */
} spw__ds_rank;

/* A parameter as it was saved. */
typedef struct spw__foreign_param {
    spw_tensor_info info; /* begin: of its masters, or of a frozen one's weights, in the span */
    uint64_t moment[SPW_FOREIGN_MOMENTS_MAX];
    double decay;          /* NAN: not known */
    bool frozen, buffer;   /* buffer: DeepSpeed's, of which each rank's file has all */
    uint32_t moment_count; /* PyTorch's */
    uint32_t group_idx;    /* DeepSpeed's, and elements behind it */
    uint64_t padding;
} spw__foreign_param;

struct spw_foreign {
    char folder[SPW__FOREIGN_PATH_BYTES];
    spw_foreign_about about;
    spw__foreign_param *params;         /* in their files' order; frozen ones behind */
    const spw__foreign_param **by_name; /* (param_count) */
    uint32_t param_count, trained_count;
    spw__span *span;
    char *config;             /* JSON; NULL: it has none */
    bool says_model, counted; /* counted: one's updates have been seen */
    spw_model_config model;
    spw_error
        unread; /* why the optimizer's state cannot be gone on from, though the weights are good; SPW_OK: it can */
    spw__ds_rank *ranks; /* (about.ranks) of DeepSpeed */
    uint32_t group_count;
};

/* SPW_ECORRUPT: what of a file is wrong. */
spw_status spw__ds_damaged(const spw__torch *t, const char *what, spw_error *err);
/*
 * deepspeed_states.c: names and shapes of parameters, counts of steps; stage is 3 or one below, which its file's name tells. And, behind all else in
 * the span, frozen parameters' weights.
 */
spw_status spw__ds_read_states(spw_foreign *d, spw_error *err);
spw_status spw__ds_read_frozen(spw_foreign *d, spw_error *err);
/* deepspeed_ranks.c: where a rank's flat arrays are; of the first rank what all have in common too. After the states. */
spw_status spw__ds_read_rank(spw_foreign *d, uint32_t rank, spw_error *err);

/*
 * Each fills in what a folder holds; params and about, with samples as they are where it does not say. find: as spw_foreign_find().
 * there: whether the folder holds a checkpoint of PyTorch's.
 */
bool spw__ds_find(const char *path, char *found, uint64_t bytes);
spw_status spw__ds_read(spw_foreign *d, spw_error *err);
bool spw__dcp_there(const char *folder);
spw_status spw__dcp_read(spw_foreign *d, spw_error *err);
/* is: what was found there is one. */
bool spw__full_is(const char *folder);
bool spw__full_there(const char *folder);
spw_status spw__full_read(spw_foreign *d, spw_error *err);
/* is: whether the name is that of a model's file of llm.c's, which is what find finds. */
bool spw__llmc_is(const char *path);
bool spw__llmc_find(const char *path, char *found, uint64_t bytes);
spw_status spw__llmc_read(spw_foreign *d, spw_error *err);
/* Which moment has this name, in *out; a new one's place is behind the others. */
spw_status spw__foreign_moment(spw_foreign *d, const char *name, uint32_t *out, spw_error *err);
/* Sees one parameter's number of updates; the most of any count. False: it is none. */
bool spw__foreign_see_updates(spw_foreign *d, double updates);
uint64_t spw__foreign_elements(const spw_tensor_info *t);

#endif
