/* One run of `spillway train`, and what each of its files does with it. */
#ifndef SPW_CLI_TRAIN_H
#define SPW_CLI_TRAIN_H

#include "cli.h"
#include "spw_reference.h"
#include <stdio.h>

/* Everything one run owns; released in one place. */
typedef struct train_run {
    spw_config config;
    spw_comm *comm;
    spw_channel *talk; /* NULL: one rank */
    uint32_t rank, world;
    uint32_t device_ranks; /* of this machine, on this one's GPU */
    spw_data *data;
    spw_model *model;
    spw_engine *engine;
    spw_checkpoint_job *saving; /* NULL: none is under way */
    FILE *log;
    cli_folder checkpoints; /* of the first rank, while it trains */
    spw_monitor *monitor;   /* of the first rank; NULL: none */
    int32_t *tokens, *targets;
    spw_reference *reference; /* of spillway.preference; NULL: there is none */
    double *answers;          /* beside tokens, what it found */
    spw_checkpoint_state at;
    char weights_from[SPW_WEIGHTS_BYTES]; /* of the checkpoint to go on from */
    const char *trace_path;
    bool quiet, tty, resumed, resume_anyway, from_folder, from_foreign, rates_known, ranks_known;
    bool spent, stopped; /* before spillway.steps, on all ranks: the write budget is; a signal came to one of them */
    uint64_t begin_ns, last_line_ns, first_step, skipped, skipped_in_row, undone_steps, twice_steps, saved_step;
    /* Totals for the closing table. */
    spw_step_result sum;
    double first_loss, last_loss;
    uint64_t steps_done;
    char last_checkpoint[SPW_PATH_BYTES];
    /* Bytes to swap, of all ranks: by the runs before this one, since the first run, what a step writes, in these steps. */
    uint64_t carried_bytes, written, each_step, steps_wrote;
    uint64_t first_update; /* updates of the runs before */
    uint32_t speaker;      /* the rank that tells what failed */
} train_run;

/* ---------------------------------------------------------------- train_start.c: up to the first step */

/*
 * What a rank does by itself up to the data; found is the checkpoint, "" without one. One rank of each host makes tokens of text
 * and JSON lines, and the others, who open the data after that, find them made: together they would all do the same work on
 * the same processors, and each write a file of its own.
 */
spw_status cli_train_open_first(train_run *r, const char *resume, char found[SPW_PATH_BYTES], spw_error *err);
/* And up to the model. */
spw_status cli_train_prepare(train_run *r, spw_error *err);
/* Whether this is the training of the first rank, and of the checkpoint. With the other ranks. */
spw_status cli_train_compare(train_run *r, const char *found, spw_error *err);
/* Whether all ranks see the folder that checkpoints are saved to, which the first save would need, but in stage 0. With the other ranks. */
spw_status cli_train_check_shared(train_run *r, spw_error *err);
/* Whether it fits, before ranks wait for each other in what takes the memory. One rank finds out there. */
spw_status cli_train_check_fit(train_run *r, spw_plan *plan, spw_error *err);
/* Takes everything and fills it, with the other ranks. */
spw_status cli_train_begin(train_run *r, const char *found, spw_plan *plan, spw_error *err);
/* Rates that spillway plan has measured here, if any, and what they predict; training itself measures nothing. */
void cli_train_use_rates(train_run *r, spw_prediction *out);

/* ---------------------------------------------------------------- train_reference.c: of spillway.preference */

bool cli_train_has_reference(const spw_config *c);
/* Host memory that it takes, with these data; NULL: none. */
uint64_t cli_train_reference_bytes(const spw_config *c, const spw_data *data);
/* Sequences that it is asked about: each that is drawn or evaluated, once. */
uint64_t cli_train_reference_sequences(const spw_config *c, const spw_data *data);
/* Refused: this run's would replace the one that checkpoints of another, in the folder that it saves to, are nothing without. */
spw_status cli_train_check_reference(const train_run *r, const char *found, spw_error *err);
/* Makes room for it, and reads what it said before the first step of the run that is gone on from. With the other ranks, whose data are these. */
spw_status cli_train_find_reference(train_run *r, const char *found, spw_error *err);
/* Else asks it, of weights that were just filled in; and keeps what it says for those who go on. With the other ranks. */
spw_status cli_train_ask_reference(train_run *r, spw_error *err);
/* What it found of the k-th sequence of the batch, which is at this position. */
spw_status cli_train_fill_answers(train_run *r, spw_split split, uint64_t position, uint64_t k, spw_error *err);

/* ---------------------------------------------------------------- train_loop.c: the steps */

uint64_t cli_train_batch_max(const spw_config *c); /* micro-batches that a rank brings at once */
/* Micro-batches of an evaluation, of all ranks. */
uint64_t cli_train_eval_batches(const spw_config *c, const spw_data *data);

spw_status cli_train_loop(train_run *r, spw_error *err);
/* Waits for the save under way, if there is one, and tells how it went. */
spw_status cli_train_finish_save(train_run *r, spw_error *err);

/* ---------------------------------------------------------------- train_wear.c: bytes to swap, and their budget */

/* With all ranks: each has counted its own, and all have to decide alike. */
spw_status cli_train_count_written(train_run *r, spw_error *err);
/* Is there a step left, and would it write more than it may? By what was counted last, so alike on all ranks. Says so. */
bool cli_train_budget_spent(train_run *r);

/* ---------------------------------------------------------------- train_log.c: for programs */

/* Of the first rank, if there is to be one. */
spw_status cli_train_open_log(train_run *r, spw_error *err);
/* The first line: what is trained, and what the plan says of it. */
void cli_train_log_start(train_run *r, const spw_prediction *predicted);
/* eval_loss NaN: nothing was evaluated. */
void cli_train_log_step(train_run *r, uint64_t step, const spw_step_result *s, double eval_loss);
void cli_train_tell_monitor(train_run *r, uint64_t step, const spw_step_result *s, double eval_loss);
void cli_train_log_end(train_run *r);

/* ---------------------------------------------------------------- train_show.c: for people */

void cli_train_show_start(const train_run *r);
void cli_train_show_prediction(const train_run *r, const spw_prediction *x);
void cli_train_show_step(train_run *r, uint64_t step, const spw_step_result *s, double eval_loss);
/* The closing table. */
void cli_train_show_end(train_run *r);
/* Behind what failed on the way: where training stands, and which checkpoint it goes on from. found: the one that it came from; "": none. */
void cli_train_show_way_on(const train_run *r, const char *found);
/* Bytes that this process has had at once: planned for it, tables, and regions. */
uint64_t cli_train_memory_peak(const train_run *r);

#endif
