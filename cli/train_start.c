/*
 * How a run of spillway train comes to its first step, in phases that all ranks go through: outputs and the data, the model, whether
 * this is the training of the other ranks and of the checkpoint to go on from, the plan, the engine with its state. What would spoil
 * the run is said here: refused, or as a warning.
 */
#include "train.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

enum { TIMELINE_EVENTS = 1 << 18 };

static void
print_difference(void *ctx, const char *text)
{
    if (((const train_run *)ctx)->rank > 0)
        return;
    fprintf(stderr, "  %s\n", text);
}

static void
summarize_data(train_run *r)
{
    spw_data_summary *d = &r->at.data;
    *d = (spw_data_summary){.files = spw_data_file_count(r->data),
                            .bytes = spw_data_bytes(r->data),
                            .tokens = spw_data_tokens(r->data),
                            .held_out = spw_data_sequences(r->data, SPW_SPLIT_VALIDATION),
                            .held_out_known = true};
    d->held_out_moved = spw_data_split_moved(r->data, &d->held_out_before);
    snprintf(d->formats, sizeof d->formats, "%s", spw_data_formats(r->data));
    snprintf(d->encoder, sizeof d->encoder, "%s", spw_data_encoder(r->data));
}

static void
print_rank_difference(void *ctx, const char *text)
{
    fprintf(stderr, "  rank %u: %s\n", ((const train_run *)ctx)->rank, text);
}

/* Rank 0's configuration on all ranks; *text is the caller's to free. A rank without memory for it says so, or others would wait. */
static spw_status
bring_config(train_run *r, char **text, spw_error *err)
{
    uint64_t bytes = 0;
    *text = r->rank == 0 ? spw_config_dump(&r->config) : NULL;
    if (*text != NULL)
        bytes = strlen(*text) + 1;
    SPW_TRY(spw_broadcast(r->talk, &bytes, sizeof bytes, 0, err));
    if (r->rank > 0)
        *text = bytes > 0 ? spw_mem_zalloc(bytes) : NULL;
    if (*text == NULL) {
        spw_comm_abort(r->comm, "no memory for rank 0's configuration");
        return SPW_RAISE(err, SPW_ENOMEM, "rank 0's configuration");
    }
    return spw_broadcast(r->talk, *text, bytes, 0, err);
}

typedef struct start_word {
    uint64_t fingerprint; /* of the weights that are read; of those that cannot be, and of none, 0 */
    uint64_t reads;
} start_word;

/*
 * Some ranks would read weights and the others draw them, or other ones: what model.path says may be another folder on each host, and what
 * main is of a model of the hub another commit.
 */
static spw_status
compare_start(train_run *r, uint32_t *count, spw_error *err)
{
    const char *folder = r->resumed ? NULL : spw_config_start_folder(&r->config);
    start_word own = {.reads = folder != NULL}, first;
    char line[SPW_PATH_BYTES + 64];
    spw_error ignored = {0};
    if (folder != NULL) /* what is wrong with it is said where it is read */
        (void)spw_hf_fingerprint(folder, &own.fingerprint, &ignored);
    first = own;
    SPW_TRY(spw_broadcast(r->talk, &first, sizeof first, 0, err));
    if (memcmp(&first, &own, sizeof own) == 0)
        return SPW_OK;
    if (first.reads == 0 || folder == NULL)
        snprintf(line, sizeof line, "model.path: %s",
                 folder == NULL ? "weights on rank 0, none here" : "no weights on rank 0, some here");
    else
        snprintf(line, sizeof line, "model.path: %s has other weights here than rank 0 reads", folder);
    print_rank_difference(r, line);
    ++*count;
    return SPW_OK;
}

/* Ranks that train differently are refused: each would change its part of one model by rules of its own. */
static spw_status
compare_ranks(train_run *r, spw_error *err)
{
    spw_checkpoint_state first = r->at;
    uint32_t count = 0, starts = 0;
    char *text;
    spw_status st = bring_config(r, &text, err);
    if (st == SPW_OK)
        st = spw_broadcast(r->talk, &first, sizeof first, 0, err);
    if (st == SPW_OK)
        st = compare_start(r, &starts, err);
    if (st == SPW_OK)
        st = spw_checkpoint_compare_ranks(text, &first, &r->config, &r->at, print_rank_difference, r, &count, err);
    spw_mem_free(text);
    SPW_TRY(st);
    count += starts;
    if (count == 0)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECONFIG,
                     "this rank would train differently than rank 0 (%u difference%s, above): start all ranks with the "
                     "same configuration, --set, data and --resume",
                     count, count > 1 ? "s" : "");
}

/* Another training than the checkpoint's is refused, unless it is meant; either way every difference is shown. */
static spw_status
compare_checkpoint(const train_run *r, const char *checkpoint, spw_error *err)
{
    uint32_t count;
    void *ctx = (void *)(uintptr_t)r;
    SPW_TRY(r->from_foreign
                ? spw_foreign_compare(checkpoint, &r->config, print_difference, ctx, &count, err)
                : spw_checkpoint_compare(checkpoint, &r->config, &r->at.data, print_difference, ctx, &count, err));
    if (count == 0)
        return SPW_OK;
    if (!r->resume_anyway)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "%s: %u difference%s (above) would change what is computed; set them as they were (--set "
                         "KEY=VALUE), or go on "
                         "with --resume-anyway",
                         checkpoint, count, count > 1 ? "s" : "");
    if (r->rank == 0)
        fprintf(stderr, "spillway: going on from %s with %u difference%s (above)\n", checkpoint, count,
                count > 1 ? "s" : "");
    return SPW_OK;
}

static spw_status
check_monitor(const char *key, const spw_monitor_config *c, spw_error *err)
{
    char folder[SPW_MONITOR_FOLDER_BYTES];
    spw_monitor_folder(folder, c);
    return c->enabled ? cli_check_folder(key, folder, err) : SPW_OK;
}

/* The folders above it are made. */
static spw_status
check_log(const char *path, spw_error *err)
{
    char folder[SPW_PATH_BYTES], *slash;
    snprintf(folder, sizeof folder, "%s", path);
    slash = strrchr(folder, '/');
    if (slash == NULL || slash == folder)
        return cli_check_file("spillway.run_log", path, err);
    *slash = '\0';
    return access(folder, F_OK) == 0 ? cli_check_file("spillway.run_log", path, err)
                                     : cli_check_folder("spillway.run_log", folder, err);
}

/* The first rank writes them: what cannot be is said before any work. */
static spw_status
check_outputs(train_run *r, spw_error *err)
{
    const char *checkpoints = r->config.run.checkpoint_dir;
    if (r->rank > 0)
        return SPW_OK;
    if (checkpoints[0] != '\0')
        SPW_TRY(cli_check_folder("spillway.checkpoint_dir", checkpoints, err));
    if (r->trace_path != NULL)
        SPW_TRY(cli_check_file("--trace", r->trace_path, err));
    if (r->config.run.run_log[0] != '\0')
        SPW_TRY(check_log(r->config.run.run_log, err));
    SPW_TRY(check_monitor("tensorboard.output_path", &r->config.tensorboard, err));
    SPW_TRY(check_monitor("csv_monitor.output_path", &r->config.csv_monitor, err));
    return checkpoints[0] != '\0' ? cli_folder_take(&r->checkpoints, "spillway.checkpoint_dir", checkpoints, err)
                                  : SPW_OK;
}

/* The newest of the folders checkpoint-<n> that transformers' Trainer makes. */
static bool
find_newest_of_trainer(const char *folder, char newest[SPW_PATH_BYTES])
{
    DIR *dir = opendir(folder);
    const struct dirent *entry;
    uint64_t best = 0, n;
    bool any = false;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        if (strncmp(entry->d_name, "checkpoint-", 11) != 0 || !cli_number(entry->d_name + 11, &n) || (any && n < best))
            continue;
        best = n;
        any = true;
    }
    if (dir != NULL)
        closedir(dir);
    snprintf(newest, SPW_PATH_BYTES, "%.900s/checkpoint-%llu", folder, (unsigned long long)best);
    return any;
}

/* In the place of err, if it is known what the folder is. */
static void
tell_of_trainer(const char *folder, spw_error *err)
{
    char newest[SPW_PATH_BYTES], unused[SPW_PATH_BYTES];
    bool inside = find_newest_of_trainer(folder, newest);
    const char *one = inside ? newest : folder;
    if (inside && spw_foreign_find(newest, unused, sizeof unused))
        (void)SPW_RAISE(err, SPW_ENOENT, "%s is a folder of checkpoints, of which --resume %s is the newest", folder,
                        newest);
    else if (inside || spw_dir_has(folder, "optimizer.pt") || spw_dir_has(folder, "optimizer.bin"))
        (void)SPW_RAISE(err, SPW_ENOENT,
                        "%s is a checkpoint without the state of DeepSpeed or FSDP, and an optimizer's state is read "
                        "from no other file of a Trainer's: model.path %s, without --resume, starts from its weights",
                        one, one);
}

/* One of this program, or else of another. */
static spw_status
find_checkpoint(train_run *r, const char *resume, char found[SPW_PATH_BYTES], spw_error *err)
{
    static spw_config saved;
    spw_status st = spw_checkpoint_find(resume, found, err);
    r->from_foreign = st != SPW_OK && spw_foreign_find(resume, found, SPW_PATH_BYTES);
    if (r->from_foreign) {
        *err = (spw_error){0};
        SPW_TRY(spw_foreign_read_state(found, &r->config, &r->at, err));
    } else {
        if (st == SPW_ENOENT)
            tell_of_trainer(resume, err);
        SPW_TRY(st);
        SPW_TRY(spw_checkpoint_read_config(found, &saved, &r->at, err));
        SPW_TRY(spw_checkpoint_weights(found, &r->config, r->weights_from, err));
    }
    r->resumed = true;
    return SPW_OK;
}

spw_status
cli_train_open_first(train_run *r, const char *resume, char found[SPW_PATH_BYTES], spw_error *err)
{
    SPW_TRY(check_outputs(r, err));
    SPW_TRY(resume != NULL ? find_checkpoint(r, resume, found, err) : spw_config_check_start(&r->config, err));
    if (r->rank == 0 && r->config.run.checkpoint_dir[0] != '\0') {
        SPW_TRY(spw_checkpoint_check_names(r->config.run.checkpoint_dir, r->at.step, r->config.run.steps, err));
        SPW_TRY(cli_train_check_reference(r, found, err));
    }
    return spw_comm_get_info(r->comm)->local_rank == 0 ? spw_config_open_data(&r->data, &r->config, err) : SPW_OK;
}

spw_status
cli_train_prepare(train_run *r, spw_error *err)
{
    const spw_config *c = &r->config;
    const uint64_t elems = cli_train_batch_max(c) * c->micro_batch * c->data.seq_length;
    if (r->data == NULL)
        SPW_TRY(spw_config_open_data(&r->data, c, err));
    SPW_TRY(spw_data_check_targets(r->data, err)); /* steps would go through, with a loss of nothing */
    summarize_data(r);
    r->tokens = spw_mem_calloc(elems, sizeof *r->tokens);
    r->targets = spw_mem_calloc(elems, sizeof *r->targets);
    if (cli_train_has_reference(c))
        r->answers = spw_mem_calloc(elems, sizeof *r->answers);
    if (r->tokens == NULL || r->targets == NULL || (cli_train_has_reference(c) && r->answers == NULL))
        return SPW_RAISE(err, SPW_ENOMEM, "batch of %llu tokens", (unsigned long long)elems);
    return spw_model_from_config(&r->model, c, err);
}

spw_status
cli_train_compare(train_run *r, const char *found, spw_error *err)
{
    if (r->world > 1)
        SPW_TRY(compare_ranks(r, err));
    if (r->resumed)
        SPW_TRY(compare_checkpoint(r, found, err));
    return cli_train_find_reference(r, found, err);
}

/* A network file system may remember for half a minute that the folder, which rank 0 has just made, was not there. */
static bool
comes_to_see(const char *folder, const char *file)
{
    const uint64_t until = spw_now_ns() + 35000000000u;
    while (access(folder, F_OK) != 0 && spw_now_ns() < until)
        spw_sleep_ns(200000000);
    return access(file, F_OK) == 0;
}

spw_status
cli_train_check_shared(train_run *r, spw_error *err)
{
    const char *folder = r->config.run.checkpoint_dir;
    char name[64] = "", path[SPW_PATH_BYTES + sizeof name];
    bool seen = true;
    spw_status st;
    int fd;
    if (r->world == 1 || folder[0] == '\0' || r->config.zero.stage == 0) /* of which rank 0 has all */
        return SPW_OK;
    if (r->rank == 0) {
        snprintf(name, sizeof name, ".spillway-%ld-%llx", (long)getpid(), (unsigned long long)spw_now_ns());
        snprintf(path, sizeof path, "%s/%s", folder, name);
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd >= 0)
            close(fd);
        else
            name[0] = '\0'; /* a full disk, and room may be made before the first save */
    }
    st = spw_broadcast(r->talk, name, sizeof name, 0, err);
    if (st == SPW_OK && r->rank > 0) {
        snprintf(path, sizeof path, "%s/%s", folder, name);
        seen = name[0] == '\0' || comes_to_see(folder, path);
    }
    if (st == SPW_OK)
        st = spw_barrier(r->talk, err);
    if (r->rank == 0 && name[0] != '\0')
        (void)unlink(path);
    if (st == SPW_OK && !seen)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "spillway.checkpoint_dir %s is not rank 0's folder here: all ranks write to one, on a file "
                         "system that their hosts share",
                         folder);
    return st;
}

static spw_status
create(train_run *r, bool plan_only, spw_plan *plan, spw_error *err)
{
    const spw_config *c = &r->config;
    return spw_engine_create(
        &r->engine,
        &(spw_engine_options){.config = c,
                              .model = r->model,
                              .comm = r->comm,
                              .plan_only = plan_only,
                              .device_ranks = r->device_ranks,
                              .kept_rates = true,
                              .targeted = spw_data_targeted(r->data),
                              .caller_bytes = (r->trace_path != NULL ? spw_timeline_bytes(TIMELINE_EVENTS) : 0) +
                                              cli_train_reference_bytes(c, r->data),
                              .stop = &cli_stop,
                              .resumes = r->resumed,
                              .weights_from = r->from_foreign ? NULL
                                              : r->resumed    ? r->weights_from
                                                              : spw_config_start_folder(c),
                              .plan_out = plan},
        err);
}

spw_status
cli_train_check_fit(train_run *r, spw_plan *plan, spw_error *err)
{
    if (r->world == 1)
        return SPW_OK;
    SPW_TRY(spw_engine_device_ranks(&r->device_ranks, &r->config, r->comm, err));
    SPW_TRY(create(r, true, plan, err));
    spw_engine_destroy(r->engine);
    r->engine = NULL;
    return SPW_OK;
}

/* Said before the first step: evaluations would be left out without a word. */
static void
warn_of_no_evaluation(const train_run *r)
{
    const spw_config *c = &r->config;
    uint64_t have = spw_data_sequences(r->data, SPW_SPLIT_VALIDATION);
    if (r->rank == 0 && c->run.eval_interval > 0 && c->run.eval_batches > 0 && have < c->micro_batch)
        fprintf(stderr,
                "spillway: warning: %llu sequences are held out (data.validation_split %g), a micro-batch takes %llu: "
                "nothing will be evaluated\n",
                (unsigned long long)have, c->data.validation_split, (unsigned long long)c->micro_batch);
}

/* Said before the first step: they are missing in what is learned. */
static void
warn_of_left_out(const train_run *r)
{
    uint64_t left_out, kept = spw_data_pairs(r->data);
    (void)spw_data_untargeted(r->data, &left_out);
    if (r->rank == 0 && kept > 0 && left_out > 0)
        fprintf(stderr,
                "spillway: warning: %llu of %llu pairs are left out: both answers of a pair, each behind its prompt, "
                "have to be within data.seq_length (%llu tokens), and not the same or without a target\n",
                (unsigned long long)left_out, (unsigned long long)(kept + left_out),
                (unsigned long long)r->config.data.seq_length);
}

/* Said before the first step: such windows cost as much as others and teach nothing. */
static void
warn_of_no_targets(const train_run *r)
{
    uint64_t cut, windows = spw_data_untargeted(r->data, &cut);
    uint64_t all = spw_data_sequences(r->data, SPW_SPLIT_TRAIN) + spw_data_sequences(r->data, SPW_SPLIT_VALIDATION);
    char longer[120] = "";
    if (r->rank > 0 || windows == 0)
        return;
    if (cut > 0)
        snprintf(longer, sizeof longer, "; documents longer than %llu tokens (data.seq_length) were cut, %llu of them",
                 (unsigned long long)r->config.data.seq_length, (unsigned long long)cut);
    fprintf(stderr, "spillway: warning: no token has a target in %llu of %llu sequences, which teach nothing%s\n",
            (unsigned long long)windows, (unsigned long long)all, longer);
}

/* Said before the first step: --resume would take the newest of both, and a step of the same number is replaced. */
static void
warn_of_other_run(const train_run *r)
{
    const char *folder = r->config.run.checkpoint_dir;
    char found[SPW_PATH_BYTES];
    spw_error ignored = {0};
    if (r->rank == 0 && !r->resumed && folder[0] != '\0' && spw_checkpoint_find(folder, found, &ignored) == SPW_OK)
        fprintf(stderr,
                "spillway: warning: spillway.checkpoint_dir holds %s of an earlier run, which this one does not go on "
                "from (--resume %s does)\n",
                found, folder);
}

spw_status
cli_train_begin(train_run *r, const char *found, spw_plan *plan, spw_error *err)
{
    cli_catch_signals(); /* from here on there are swap files to remove */
    SPW_TRY(create(r, false, plan, err));
    SPW_TRY(cli_train_open_log(r, err));
    if (r->rank == 0)
        SPW_TRY(spw_monitor_open(&r->monitor, &r->config, r->at.step * r->config.train_batch_size, err));
    if (r->rank == 0)
        cli_warn_of_full_disk(&r->config, r->engine, r->resumed ? &r->at : NULL, 0);
    warn_of_no_evaluation(r);
    warn_of_no_targets(r);
    warn_of_left_out(r);
    warn_of_other_run(r);
    if (r->rank == 0) {
        cli_warn_of_length(&r->config);
        cli_warn_of_schedule(&r->config);
        cli_warn_of_idle_keys(&r->config, r->world);
    }
    if (r->trace_path != NULL)
        SPW_TRY(spw_timeline_open(TIMELINE_EVENTS, err));
    r->carried_bytes = r->at.bytes_written;
    SPW_TRY(cli_train_count_written(r, err));
    if (cli_train_budget_spent(r)) /* before the first byte is written */
        return SPW_OK;
    if (r->from_foreign)
        SPW_TRY(spw_foreign_load(r->engine, found, err));
    else if (r->resumed)
        SPW_TRY(spw_checkpoint_load(r->engine, found, err));
    else
        SPW_TRY(spw_engine_start(r->engine, &r->from_folder, err));
    SPW_TRY(cli_train_ask_reference(r, err));
    spw_engine_set_reference(r->engine, r->answers);
    r->first_update = spw_engine_updates(r->engine);
    return SPW_OK;
}

void
cli_train_use_rates(train_run *r, spw_prediction *out)
{
    const spw_plan *p = spw_engine_plan(r->engine);
    spw_rates rates;
    spw_calibration calibration;
    spw_calibrate(&rates, &r->config, p, SPW_CALIBRATE_CACHE_ONLY, &calibration);
    spw_plan_predict(p, &rates, r->config.run.tbw, out);
    spw_engine_set_rates(r->engine, &rates);
    r->rates_known = true;
    for (uint32_t i = 0; i < p->path_count; i++)
        r->rates_known &= rates.nvme_read[i] > 0;
    r->ranks_known = (p->local_ranks < 2 || rates.received[SPW_WAY_NEAR][SPW_USE_BOTH] > 0) &&
                     (p->local_ranks == p->ranks || rates.received[SPW_WAY_FAR][SPW_USE_BOTH] > 0);
}
