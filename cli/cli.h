/* What the commands share: exit codes, options, and how errors become exit codes. Public API only. */
#ifndef SPW_CLI_H
#define SPW_CLI_H

#include "spillway.h"

enum { CLI_RANKS_MAX = 1024 };
enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_NO_FIT = 3, EXIT_PAUSED = 4 };

int cli_train(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_eval(int argc, char **argv);
int cli_doctor(int argc, char **argv);
int cli_bench(int argc, char **argv);
int cli_bench_io(int argc, char **argv);        /* argv[0] is "io" */
int cli_bench_adam(int argc, char **argv);      /* argv[0] is "adam" */
int cli_bench_copy(int argc, char **argv);      /* argv[0] is "copy" */
int cli_bench_comm(int argc, char **argv);      /* argv[0] is "comm" */
int cli_bench_gemm(int argc, char **argv);      /* argv[0] is "gemm" */
int cli_bench_attention(int argc, char **argv); /* argv[0] is "attention" */
int cli_tune(int argc, char **argv);
int cli_plot(int argc, char **argv);
int cli_inspect(int argc, char **argv);
int cli_export(int argc, char **argv); /* import, too */
int cli_plan(int argc, char **argv);
int cli_tokenize(int argc, char **argv);

void cli_log(bool shown); /* the library's warnings and notes, on stderr or nowhere */
/* Prints "spillway: message" and returns the exit code for its status. With several ranks it says which one speaks. */
int cli_fail(const spw_error *err);
int cli_exit_code(const spw_error *err);
void cli_set_rank(uint32_t rank);
/*
 * What -n asks for: starts this program count times as the ranks of one world, with these arguments, and returns their exit code, or EXIT_USAGE
 * after a message where a launcher has started this process already; -1: go on, for none is asked for (0), or this is one of them.
 */
int cli_start_ranks(const char *command, uint64_t count, char **argv);
/* The value of -n; 0 after a message. */
uint64_t cli_rank_count(const char *command, int argc, char **argv, int *i);
/* Prints a usage error and where help is. */
int cli_usage(const char *command, const char *fmt, ...) SPW_PRINTF(2, 3);
int cli_unknown_option(const char *command, const char *name);
/* The value of option argv[*i] (the next argument), or NULL after a message. */
const char *cli_value(const char *command, int argc, char **argv, int *i);
/* The same where argv[*i] is one of names, which ends with NULL; what is not is an unknown option. */
const char *cli_known_value(const char *command, const char *const *names, int argc, char **argv, int *i);
bool cli_number(const char *text, uint64_t *out);
/* Set when the command shall end: by Ctrl-C, SIGTERM, SIGUSR1, a terminal that closed, or as nobody reads its output any more. */
extern volatile int cli_stop;
extern volatile int cli_unread; /* the last of these */
/* From here on signals set it. One more, a second later or more, ends the process; SIGUSR1 is no such one. */
void cli_catch_signals(void);
/* Whether a file can be written at the command's end, or a folder be made or written to; what names it in the message. */
spw_status cli_check_file(const char *what, const char *path, spw_error *err);
/* The same of a file that a finished one takes the place of: a device, a pipe or a link would be gone. */
spw_status cli_check_replaced(const char *what, const char *path, spw_error *err);
spw_status cli_check_folder(const char *what, const char *path, spw_error *err);
/* A folder that this process alone writes to: a file in it is locked, where the file system has locks. */
typedef struct cli_folder {
    char path[SPW_PATH_BYTES], file[SPW_PATH_BYTES + 32];
    int fd;
    bool made;
} cli_folder;
/* Makes it where it is not there. SPW_EBUSY: another process has taken it, which the message names. */
spw_status cli_folder_take(cli_folder *f, const char *what, const char *path, spw_error *err);
void cli_folder_leave(cli_folder *f); /* zeroed: nothing; a folder made in vain goes again */
/* path, or what of the folders above it is there. */
void cli_nearest(char out[SPW_PATH_BYTES], const char *path);
/* How many of the checkpoints of a run from this state on (NULL: from the start) are there at once beside those that are; 0: it saves none. */
uint64_t cli_checkpoints_at_once(const spw_config *config, const spw_checkpoint_state *from);
/* Said before the first step where checkpoint_dir has no room for them; swap_bytes are still to be taken of the same disk. */
void cli_warn_of_full_disk(const spw_config *config, const spw_engine *engine, const spw_checkpoint_state *from,
                           uint64_t swap_bytes);
/* For a configuration that does not fit: the table and the nearest one that does, on stderr. */
void cli_show_no_fit(const spw_config *config, const spw_model *model, const spw_plan *plan);

/* With longrope: which factors a run's windows take ("long_factor"), and why; NULL: it is another rope. */
const char *cli_rope_choice(const spw_config *config, char reason[160]);

/* For windows longer than the model says it is for, which only a table of learned positions would refuse. */
void cli_warn_of_length(const spw_config *config);

/* For a schedule that is through before the last step, as it is where only spillway.steps was changed. */
void cli_warn_of_schedule(const spw_config *config);

/* For keys that say something of what is not there: of frozen weights where all are trained, say. ranks: how many train. */
void cli_warn_of_idle_keys(const spw_config *config, uint64_t ranks);

/* A line of JSON, with so many digits of each number; object is given up, and NULL an error like any other. */
enum { CLI_DIGITS_MEASURED = 6, CLI_DIGITS_ALL = 17 };
struct json_t;
spw_status cli_show_json(const char *command, size_t digits, struct json_t *object, spw_error *err);

/* Text as JSON: bytes that are not UTF-8, as a path may have or a character that --tokens cut, become U+FFFD each. */
struct json_t *cli_json_bytes(const char *bytes, uint64_t count);
struct json_t *cli_json_text(const char *text);

/* How weights live that are only read: --host-memory, --device-memory, --nvme (which may stand several times), --codes. */
typedef struct cli_place {
    uint64_t host_memory, device_memory; /* 0: not given */
    const char *nvme[SPW_PATHS_MAX];
    uint32_t nvme_count;
    const char *codes; /* none, int8, int4, published; NULL: what a checkpoint was trained with, or a folder has */
} cli_place;
/* Takes argv[*i] if it is one of them: EXIT_DONE, or EXIT_USAGE after a message; -1: it is not. */
int cli_place_option(const char *command, cli_place *place, int argc, char **argv, int *i);
void cli_place_apply(const cli_place *place, spw_config *config);
/* After the model was made from that: what --codes asks for, and what a folder has, is for all of it. */
void cli_place_model(const cli_place *place, const spw_weights *weights, spw_model *model);

/* How text becomes tokens and tokens text. */
typedef struct cli_text {
    spw_tokenizer *tokenizer; /* NULL: bytes */
    bool numbers;             /* tokens are written as numbers */
    uint64_t vocab;
    spw_begin begin; /* the tokenizer's */
    int32_t end;     /* -1: none */
} cli_text;
/*
 * The tokenizer for these weights (SPW_PATH_BYTES), "" for bytes: the one asked for, the one in their folder, or the one
 * that a checkpoint was trained with. False: there is none, and bytes do not fit the vocabulary.
 */
bool cli_text_find(char *out, const spw_weights *weights, const char *asked);
spw_status cli_text_open(cli_text *text, const spw_weights *weights, const char *asked, spw_error *err);
void cli_text_close(cli_text *text);
/* The layout of conversations for this tokenizer; NULL for "". Closed before the text. */
spw_status cli_chat_open(spw_chat **out, const cli_text *text, const char *layout, spw_error *err);
spw_status cli_text_encode(const cli_text *text, const char *bytes, spw_tokens *out, spw_error *err);
/* The bytes of one token, in room or the tokenizer's; numbers have a comma before them. */
const char *cli_text_decode(const cli_text *text, int32_t id, char room[16], uint64_t *bytes_out);
/* "release", "checked", "debug", "asan" or "tsan": a benchmark's header names it. */
const char *cli_build_name(void);
/* What benchmarks are asked for. False after a message: a list such as "256KiB,4MiB", of multiples of some bytes; seconds above 0. */
typedef struct cli_sizes {
    uint64_t bytes[16];
    uint32_t count;
} cli_sizes;
bool cli_bench_sizes(const char *command, const char *list, uint64_t multiple, cli_sizes *out);
bool cli_bench_seconds(const char *command, const char *text, double *out);

#endif
