/* Training runs on several ranks, for tests: every rank writes its losses and its part of the state to memory that all share. */
#ifndef LIB_WORLDS_H
#define LIB_WORLDS_H

#include "lib_ranks.h"

enum { STEPS = 4, STEPS_MAX = 40, MICRO = 24, WORLD_MAX = 8, ELEMS_MAX = 1 << 20, PARTS = 3 };

/* What a run leaves behind, in shared memory. */
typedef struct outcome {
    double losses[STEPS_MAX], eval, norm;
    uint64_t gather[WORLD_MAX], reduce[WORLD_MAX]; /* received in the steps and an evaluation */
    uint64_t trade[WORLD_MAX];
    uint64_t far_gather[WORLD_MAX], far_reduce[WORLD_MAX], far_trade[WORLD_MAX]; /* of that, from other hosts */
    uint64_t h2d[WORLD_MAX],
        parts[WORLD_MAX]; /* that the store brought to the device; parts of units that it was asked for */
    double step_s, compute_s, collective_s, parts_s, busy_s; /* of the last steps of rank 0 */
    uint64_t elems, padded, held[WORLD_MAX]; /* of one rank; with whole parts for every rank; that a rank holds */
    uint64_t digest[WORLD_MAX]; /* of the bytes that a rank holds; world_run compares those that hold the same */
    uint32_t part[WORLD_MAX];   /* which that is */
    uint32_t skipped;           /* steps */
    uint64_t taken[WORLD_MAX];  /* bytes that the library took: mappings, device memory, swap files */
    spw_plan plan[WORLD_MAX];
    spw_plan alone;                /* world.alone */
    float state[PARTS][ELEMS_MAX]; /* master, moments; in one row, uncut */
} outcome;

/* One run: what its ranks do differently from the first run of all. */
typedef struct world {
    uint32_t ranks, steps, first_step;
    const spw_config *config;
    spw_family family;
    const char *load, *save; /* checkpoint folders; NULL: none */
    bool frozen;
    bool idle;                 /* in its second step the last rank has nothing to learn */
    bool least_device;         /* the least device memory that a plan names; whatever else the configuration says */
    bool last_least;           /* that for the last rank alone */
    uint64_t mlp_width, vocab; /* 0: the family's tiny ones */
    uint64_t micros;           /* micro-batches of a step, of all ranks; 0: MICRO */
    const spw_config *last;    /* of the last rank, where it has another placement and budgets; NULL: the same */
    uint64_t last_room;        /* bytes that the last rank may still take; 0: what there is */
    double dropout;
    uint32_t settles;   /* before this step what waits of delayed updates is made, as by a save; 0: never */
    bool meanwhile;     /* then one is begun, in save, and finished after the last step; not another one at the end */
    double late_s;      /* so much later than the others the last rank gets its weights */
    const char *plugin; /* the emulated device's, or NULL */
    uint32_t per_host;  /* so many ranks are on each host; 0: all on one */
    bool alone;         /* what rank 0 plans without the others is wanted, too */
    spw_status (*prepare)(spw_engine *e, spw_error *err); /* before the first step; NULL: nothing */
    double link;                                          /* bytes/s of every operation at most; 0: as it is */
    outcome *out;
} world;

outcome *outcome_new(void);
void outcome_free(outcome *o);
/* A configuration that cannot be trained fails the test. */
void world_run(const world *w);
/* No engine comes to be on any of the ranks, so many of which are on each host, and each says why. */
void world_refused(const spw_config *c, spw_family family, uint32_t per_host, uint32_t ranks, const char *says);
/* Losses and weights are those of one rank up to rounding. */
void outcome_near(const outcome *one, const outcome *other, const char *what);
/* Weights differ by at most so much of the largest; near: by a millionth. */
void outcome_within(const outcome *one, const outcome *other, double most, const char *what);
/* Losses, norm, evaluation, weights and moments are the same to the last bit. */
void outcome_same(const outcome *first, const outcome *other, const char *what);

#endif
