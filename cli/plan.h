/* One `spillway plan`: plan.c makes it, plan_show.c shows it. */
#ifndef SPW_CLI_PLAN_H
#define SPW_CLI_PLAN_H

#include "cli.h"

/* A rate that is given, in place of what was measured. */
typedef struct given_rate {
    spw_resource resource;
    double value; /* bytes, parameters or operations a second */
} given_rate;

typedef struct plan_run {
    /* What train holds when it plans: the same data and batches, so that the process counts for the same bytes. */
    spw_config config;
    spw_data *data;
    spw_model *model;
    spw_engine *engine;
    int32_t *tokens, *targets;
    /* What came of it. */
    spw_error err; /* SPW_OK, or SPW_ENOFIT, of which nearest says what would */
    spw_plan plan;
    spw_suggestion nearest;
    bool rated; /* rates are known, and with them x; else only its bytes */
    spw_rates rates;
    spw_calibration calibration;
    const given_rate *given;
    uint32_t given_count;
    spw_prediction x;
    bool wants_faster;
    spw_faster faster;
} plan_run;

void cli_plan_show(const plan_run *r); /* on stdout, as text */
void cli_plan_show_json(const plan_run *r);
/* The nearest configuration that fits. False: there was no looking for it. */
bool cli_plan_suggest(const spw_config *config, const spw_model *model, const spw_plan *plan, spw_suggestion *out);
/* Of a machine that is not this one, for a GPU that need not be here: what is given of its memory. 0: as this one has. */
uint64_t cli_plan_room(const spw_gpu_spec *gpu, const spw_config *config);

#endif
