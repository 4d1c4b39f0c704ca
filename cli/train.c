/*
 * spillway train: reads the configuration, trains, shows every step, saves, and closes with a table. One process per rank,
 * one loop, the first rank speaks; Ctrl-C finishes the step, saves if a checkpoint folder is set, removes the swap files and
 * exits with 4.
 * Here: options, ranks, and the phases of a run, which are train_*.c's.
 */
#include "train.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { OVERRIDES_MAX = 256 };

/* What the command line says. */
typedef struct options {
    const char *path, *resume, *overrides[OVERRIDES_MAX];
    uint32_t override_count;
    uint64_t ranks;
} options;

/* The world that a launcher started this process into; the configuration is told how large it is. */
static spw_status
join(train_run *r, options *o, spw_error *err)
{
    static char ranks[40];
    r->world = 1;
    SPW_TRY(spw_comm_open(&r->comm, &(spw_comm_options){.backend = SPW_COMM_AUTO}, err));
    r->rank = spw_comm_get_info(r->comm)->rank;
    r->world = spw_comm_get_info(r->comm)->world;
    if (r->world == 1)
        return SPW_OK;
    cli_set_rank(r->rank);
    snprintf(ranks, sizeof ranks, "spillway.ranks=%u", r->world);
    if (o->override_count < OVERRIDES_MAX)
        o->overrides[o->override_count++] = ranks;
    SPW_TRY(spw_channel_open(&r->talk, r->comm, NULL, 0, "start", err));
    spw_channel_set_timeout(r->talk, 24 * 3600); /* tokenizing may take a rank hours */
    return SPW_OK;
}

/*
 * After a phase that all ranks went through: whether any of them failed. Of those that did the first one speaks, since a
 * mistake in the configuration is one mistake. Returns the exit code of what that one says, on all of them: who ends first
 * decides the code of the job.
 */
static int
all_well(train_run *r, spw_status st, const spw_error *own)
{
    spw_word word = {.first = r->rank};
    spw_error err = {0};
    spw_status all = st;
    if (r->talk != NULL) {
        all = spw_agree(r->talk, st, own, &word, &err);
        if (all != SPW_OK && word.first == r->world)
            return cli_fail(st != SPW_OK ? own : &err);
        r->speaker = word.first;
    }
    if (st != SPW_OK && word.first == r->rank)
        return cli_fail(own);
    return all == SPW_OK ? EXIT_DONE : cli_exit_code(&(spw_error){.status = all});
}

/* A failure that the others have to hear of: they are waiting for this rank, or soon will. */
static int
fail(train_run *r, const spw_error *err)
{
    spw_comm_abort(r->comm, err->message);
    return cli_fail(err);
}

/* Steps that failed, which has been said: a save that was under way is finished, or fails with them. */
static void
end_failed(train_run *r, spw_status why, const char *found)
{
    spw_error err = {0};
    if (cli_train_finish_save(r, &err) != SPW_OK)
        fprintf(stderr, "spillway: the checkpoint of step %llu was not finished\n", (unsigned long long)r->saved_step);
    if (r->rank == 0 && why != SPW_ENONFINITE) /* which names what to change, too */
        cli_train_show_way_on(r, found);
}

static void
release(train_run *r)
{
    cli_folder_leave(&r->checkpoints);
    spw_engine_destroy(r->engine);
    spw_channel_close(r->talk);
    spw_comm_close(r->comm);
    spw_model_destroy(r->model);
    spw_data_close(r->data);
    spw_mem_free(r->tokens);
    spw_mem_free(r->targets);
    spw_mem_free(r->answers);
    spw_reference_destroy(r->reference);
    if (r->log != NULL)
        fclose(r->log);
    spw_monitor_close(r->monitor);
    spw_timeline_close();
}

/* An option that has a value, which is the next argument. */
static int
parse_valued(train_run *r, options *o, int argc, char **argv, int *i)
{
    const char *name = argv[*i], *value = cli_value("train", argc, argv, i);
    if (value == NULL)
        return EXIT_USAGE;
    if (strcmp(name, "--resume") == 0)
        o->resume = value;
    else if (strcmp(name, "--trace") == 0)
        r->trace_path = value;
    else if (o->override_count < OVERRIDES_MAX)
        o->overrides[o->override_count++] = value;
    else
        return cli_usage("train", "more than %d times --set", OVERRIDES_MAX);
    return EXIT_DONE;
}

/* EXIT_DONE, or the exit code of what is wrong. */
static int
parse(train_run *r, options *o, int argc, char **argv)
{
    int rc;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (name[0] != '-') {
            if (o->path != NULL)
                return cli_usage("train", "one configuration at a time, got %s too", name);
            o->path = name;
        } else if (strcmp(name, "--quiet") == 0) {
            r->quiet = true;
        } else if (strcmp(name, "--resume-anyway") == 0) {
            r->resume_anyway = true;
        } else if (strcmp(name, "-n") == 0) {
            if ((o->ranks = cli_rank_count("train", argc, argv, &i)) == 0)
                return EXIT_USAGE;
        } else if (strcmp(name, "--set") == 0 || strcmp(name, "--resume") == 0 || strcmp(name, "--trace") == 0) {
            if ((rc = parse_valued(r, o, argc, argv, &i)) != EXIT_DONE)
                return rc;
        } else {
            return cli_unknown_option("train", name);
        }
    }
    if (o->path == NULL)
        return cli_usage("train", "a configuration file is needed");
    if (r->resume_anyway && o->resume == NULL)
        return cli_usage("train", "--resume-anyway belongs to --resume DIR");
    return EXIT_DONE;
}

/* The configuration, the same on all ranks. */
static int
configure(train_run *r, options *o, spw_error *err)
{
    spw_status st;
    int rc;
    r->tty = isatty(STDOUT_FILENO) == 1;
    if (join(r, o, err) != SPW_OK)
        return cli_fail(err);
    cli_log(r->rank == 0); /* all ranks read the same file, and have the same variables */
    (void)spw_cpu_isa();
    st = spw_config_load(&r->config, o->path, o->overrides, o->override_count, err);
    cli_log(true);
    if (st != SPW_OK)
        st = err->status = SPW_ECONFIG; /* whatever was wrong with it */
    if ((rc = all_well(r, st, err)) != EXIT_DONE)
        return rc;
    spw_comm_set_timeout(r->comm, r->config.run.comm_timeout);
    if (r->rank > 0) {
        r->quiet = true;
        r->trace_path = NULL;
    }
    return EXIT_DONE;
}

/* From there to an engine that is ready for the first step; found: the checkpoint that it goes on from, or "". */
static int
begin(train_run *r, const options *o, char found[SPW_PATH_BYTES], spw_error *err)
{
    static spw_plan plan;
    spw_status st;
    int rc;
    if ((rc = all_well(r, cli_train_open_first(r, o->resume, found, err), err)) != EXIT_DONE ||
        (rc = all_well(r, cli_train_prepare(r, err), err)) != EXIT_DONE ||
        (rc = all_well(r, cli_train_compare(r, found, err), err)) != EXIT_DONE ||
        (rc = all_well(r, cli_train_check_shared(r, err), err)) != EXIT_DONE)
        return rc;
    st = cli_train_check_fit(r, &plan, err);
    rc = all_well(r, st, err);
    if (rc == EXIT_DONE && (st = cli_train_begin(r, found, &plan, err)) != SPW_OK) {
        rc = fail(r, err);
        r->speaker = r->rank;
    }
    if (st == SPW_ENOFIT && plan.lack != SPW_LACK_NOTHING && r->rank == r->speaker)
        cli_show_no_fit(&r->config, r->model, &plan);
    return rc;
}

/* All steps, and what is shown before and behind them. */
static int
train(train_run *r, const char *found, spw_error *err)
{
    spw_prediction predicted;
    spw_status st;
    int rc = EXIT_DONE;
    cli_train_show_start(r);
    cli_train_use_rates(r, &predicted);
    cli_train_show_prediction(r, &predicted);
    cli_train_log_start(r, &predicted);
    if ((st = cli_train_loop(r, err)) != SPW_OK) {
        rc = fail(r, err);
        end_failed(r, st, found);
    } else if (r->stopped || (r->spent && strcmp(r->config.run.write_budget_action, "pause") == 0)) {
        rc = EXIT_PAUSED;
        if (cli_unread && r->rank == 0)
            fprintf(stderr, "spillway: nobody reads the output any more: stopped after step %llu of %llu%s%s\n",
                    (unsigned long long)r->at.step, (unsigned long long)r->config.run.steps,
                    r->last_checkpoint[0] != '\0' ? "; to go on: --resume " : "", r->last_checkpoint);
    }
    if (r->rank == 0 && r->steps_done > 0 && (rc == EXIT_DONE || rc == EXIT_PAUSED)) {
        cli_train_show_end(r);
        cli_train_log_end(r);
    }
    if (r->trace_path != NULL && spw_timeline_write(r->trace_path, err) != SPW_OK)
        rc = cli_fail(err);
    return rc;
}

int
cli_train(int argc, char **argv)
{
    static train_run r; /* large: the configuration holds its paths */
    static options o;
    char found[SPW_PATH_BYTES] = "";
    spw_error err = {0};
    int rc;
    if ((rc = parse(&r, &o, argc, argv)) != EXIT_DONE || (rc = cli_start_ranks("train", o.ranks, argv - 1)) >= 0)
        return rc;
    if ((rc = configure(&r, &o, &err)) == EXIT_DONE && (rc = begin(&r, &o, found, &err)) == EXIT_DONE)
        rc = train(&r, found, &err);
    release(&r);
    return rc;
}
