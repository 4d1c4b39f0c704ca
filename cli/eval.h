/* What evaluating text and evaluating pairs of answers share. */
#ifndef SPW_CLI_EVAL_H
#define SPW_CLI_EVAL_H

#include "cli.h"
#include "spw_reference.h"
#include <jansson.h>

typedef struct eval_job {
    /* What was asked for. */
    const char *path, *tokenizer, *format, *text_field, *chat, *reference, *data[SPW_PATHS_MAX];
    uint32_t data_count;
    cli_place place;
    uint64_t seq_length, batches, batch_size; /* 0: not given */
    bool json, pairs;
    /* What it became. */
    spw_weights weights, beside; /* beside: the reference's */
    spw_preference rule;
    spw_reference *found;
    cli_text words;
    spw_chat *layout; /* of conversations, or NULL */
    spw_data *text;
    spw_model *model;
    spw_engine *e;
    int32_t *tokens, *targets; /* (batch_size, seq_length) */
    double *answers;           /* likewise, what the reference makes of them */
    /* What came out. */
    double loss_sum, seconds;
    spw_pair_means sums;
    uint64_t tokens_done, sequences_done;
} eval_job;

/* A model of these weights in an engine for batches as they are asked for, one at a time. */
spw_status cli_eval_open(eval_job *j, const spw_weights *weights, spw_error *err);
void cli_eval_close(eval_job *j);
/* How many sequences are evaluated. */
uint64_t cli_eval_sequences(const eval_job *j);
/* SPW_ENONFINITE where it is not finite. */
spw_status cli_eval_check(const eval_job *j, double loss, spw_error *err);

/* eval_pairs.c: the rule that pairs are judged by, before their data is opened. */
spw_status cli_eval_pairs_rule(eval_job *j, spw_error *err);
/* Asks --reference, if there is one, whose engine comes and goes before the model's. */
spw_status cli_eval_pairs_ask(eval_job *j, spw_error *err);
/* The batch that was filled, whose first n sequences are those from first on. */
spw_status cli_eval_pairs_batch(eval_job *j, uint64_t first, uint64_t n, spw_error *err);
spw_status cli_eval_pairs_show(const eval_job *j, spw_error *err);

#endif
