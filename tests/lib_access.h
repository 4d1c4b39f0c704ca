/* lib_access - an engine of lib_tiny's model with what tests of state by the name of a parameter ask of it, and all of its state at once. */
#ifndef LIB_ACCESS_H
#define LIB_ACCESS_H

#include "engine_internal.h"

enum { PARTS = SPW_ACCESS_WEIGHT + 1, ELEMS_MAX = 1 << 17, WORLD = 3, MICRO = 6, BATCH_MAX = MICRO * 64 };

typedef struct access_run {
    spw_config c;
    spw_model *model;
    spw_engine *e;
    spw_error err;
    spw_step_result last;
} access_run;

/* Fails the running test with what r->err says, unless st is SPW_OK; so do open and what it calls. */
void access_expect_ok(access_run *r, spw_status st);
void access_run_open(access_run *r, const spw_config *c, uint64_t seed);
void access_run_close(access_run *r);
/* A step of batch s; its result is r->last. */
spw_status access_run_step(access_run *r, uint64_t s);
/* Weights and records on tier, which swaps to dir. */
void access_place(spw_config *c, spw_tier tier, const char *dir);

/* All of the state, as a sweep sees it. */
typedef struct access_image {
    const spw_engine *e;
    float part[PARTS][ELEMS_MAX]; /* master, moments, weight; units in a row, uncut */
    uint64_t sums[512];           /* of every chunk's bytes; one rank */
} access_image;

/* A spw_sweep_fn whose ctx is an image of engine e. */
spw_status
access_take_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err);

/* Whether the files of that name in folders a and b have the same bytes. */
bool access_same_file(const char *a, const char *b, const char *name);

#endif
