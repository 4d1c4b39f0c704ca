/* What the commands share: exit codes, options, and how errors become exit codes. Public API only. */
#ifndef SPW_CLI_H
#define SPW_CLI_H

#include "spillway.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_NO_FIT = 3, EXIT_PAUSED = 4 };

int cli_train(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_doctor(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_bench_io(int argc, char **argv);   /* argv[0] is "io" */
int cli_bench_adam(int argc, char **argv); /* argv[0] is "adam" */
int cli_bench_copy(int argc, char **argv); /* argv[0] is "copy" */
int cli_tune(int argc, char **argv);
int cli_plot(int argc, char **argv);
int cli_inspect(int argc, char **argv);
int cli_export(int argc, char **argv); /* import, too */
int cli_plan(int argc, char **argv);
int cli_tokenize(int argc, char **argv);

/* Prints "spillway: message" and returns the exit code for its status. */
int cli_fail(const spw_error *err);
/* Prints a usage error and where help is. */
int cli_usage(const char *command, const char *fmt, ...) SPW_PRINTF(2, 3);
/* The value of option argv[*i] (the next argument), or NULL after a message. */
const char *cli_value(const char *command, int argc, char **argv, int *i);
bool cli_number(const char *text, uint64_t *out);
/* For a configuration that does not fit: the table and the nearest one that does, on stderr. */
void cli_show_no_fit(const spw_config *config, const spw_model *model, const spw_plan *plan);
/* Draws text from a checkpoint; used by generate and at the end of the demo. */
int cli_sample(const char *checkpoint, const char *prompt, uint64_t tokens, double temperature, uint64_t top_k,
               uint64_t seed);
/* "release", "checked", "debug", "asan" or "tsan": a benchmark's header names it. */
const char *cli_build_name(void);

#endif
