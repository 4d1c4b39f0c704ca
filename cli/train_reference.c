/*
 * What the reference of spillway.preference finds of the answers that will be trained on and evaluated: asked of the weights that the run
 * starts from, before the first step, or read from the file beside the checkpoint that it goes on from.
 */
#include "train.h"
#include <math.h>
#include <stdio.h>
#include <unistd.h>

static const char FILE_NAME[] = "reference.bin";

bool
cli_train_has_reference(const spw_config *c)
{
    spw_preference p;
    return spw_config_preference(c, &p) && spw_preference_refers(p.kind);
}

static uint64_t
window_count(const spw_data *data)
{
    return spw_data_sequences(data, SPW_SPLIT_TRAIN) + spw_data_sequences(data, SPW_SPLIT_VALIDATION);
}

/* The table, and what is brought for a batch and told of it. */
uint64_t
cli_train_reference_bytes(const spw_config *c, const spw_data *data)
{
    if (data == NULL || !cli_train_has_reference(c))
        return 0;
    return spw_reference_memory_bytes(window_count(data), 2 * spw_data_pairs(data)) +
           2 * cli_train_batch_max(c) * c->micro_batch * (c->data.seq_length + 1) * sizeof(double);
}

/* How many sequences so many steps take; what is beyond all numbers is beyond all data. */
static uint64_t
positions_of(const spw_config *c, uint64_t steps)
{
    const uint64_t most = UINT64_MAX / 4;
    return steps > most / c->train_batch_size ? most : steps * c->train_batch_size;
}

/* And one that goes on at this position and step. */
static uint64_t
drawn_until(const train_run *r)
{
    const uint64_t steps = r->config.run.steps;
    return r->at.data_position + positions_of(&r->config, r->at.step < steps ? steps - r->at.step : 0);
}

/* Of the data: a file of other pairs, or of the same in other windows, is not this training's. */
static uint64_t
key_of(const train_run *r)
{
    const char *encoder = spw_data_encoder(r->data);
    const uint64_t numbers[] = {r->config.data.seq_length, spw_data_tokens(r->data), spw_data_pairs(r->data),
                                spw_data_sequences(r->data, SPW_SPLIT_TRAIN)};
    return spw_checksum_more(spw_checksum_more(0, encoder, strlen(encoder)), numbers, sizeof numbers);
}

/* That the start is asked about: a run may be lengthened to so many. */
static uint64_t
steps_asked(const spw_config *c)
{
    return c->run.reference_steps > c->run.steps ? c->run.reference_steps : c->run.steps;
}

uint64_t
cli_train_reference_sequences(const spw_config *c, const spw_data *data)
{
    const uint64_t drawn = positions_of(c, steps_asked(c)), have = spw_data_sequences(data, SPW_SPLIT_TRAIN);
    const uint64_t held = c->run.eval_interval > 0 ? cli_train_eval_batches(c, data) * c->micro_batch : 0;
    return (drawn < have ? drawn : have) + held;
}

/* Of the time from the begin on, which asking has taken so far. False: a signal came, and there is nothing yet to save. */
static bool
show_asked(void *ctx, uint64_t asked)
{
    train_run *r = ctx;
    const uint64_t now = spw_now_ns(), all = cli_train_reference_sequences(&r->config, r->data);
    const double left = (double)(now - r->begin_ns) * 1e-9 / (double)asked * (double)(all > asked ? all - asked : 0);
    if (cli_stop || r->quiet || now - r->last_line_ns < 5000000000ull)
        return !cli_stop;
    r->last_line_ns = now;
    printf("reference  %llu of %llu sequences  left %d:%02d\n", (unsigned long long)asked, (unsigned long long)all,
           (int)left / 60, (int)left % 60);
    fflush(stdout);
    return true;
}

static spw_status
ask(train_run *r, spw_error *err)
{
    const spw_config *c = &r->config;
    const spw_reference_asking asking = {.engine = r->engine,
                                         .data = r->data,
                                         .channel = r->talk,
                                         .sequences = c->micro_batch,
                                         .T = c->data.seq_length,
                                         .micro_batches = (uint32_t)cli_train_batch_max(c),
                                         .tokens = r->tokens,
                                         .targets = r->targets,
                                         .answers = r->answers,
                                         .told = show_asked,
                                         .ctx = r};
    r->begin_ns = r->last_line_ns = spw_now_ns(); /* the loop sets it anew */
    SPW_TRY(spw_reference_ask(r->reference, &asking, SPW_SPLIT_TRAIN, positions_of(c, steps_asked(c)), err));
    if (c->run.eval_interval > 0)
        SPW_TRY(spw_reference_ask(r->reference, &asking, SPW_SPLIT_VALIDATION,
                                  cli_train_eval_batches(c, r->data) * c->micro_batch, err));
    if (!r->quiet)
        printf("reference  %llu of %llu sequences were asked about in %.1f s\n",
               (unsigned long long)spw_reference_count(r->reference), (unsigned long long)window_count(r->data),
               (double)(spw_now_ns() - r->begin_ns) * 1e-9);
    return SPW_OK;
}

/* Beside the checkpoint, in the folder that spillway.checkpoint_dir was. */
static void
beside(const char *checkpoint, char path[SPW_PATH_BYTES])
{
    const char *slash = strrchr(checkpoint, '/');
    snprintf(path, SPW_PATH_BYTES, "%.*s/%s", slash != NULL ? (int)(slash - checkpoint) : 1,
             slash != NULL ? checkpoint : ".", FILE_NAME);
}

static void
in_folder(const char *folder, char path[SPW_PATH_BYTES])
{
    snprintf(path, SPW_PATH_BYTES, "%.*s/%s", (int)(SPW_PATH_BYTES - sizeof FILE_NAME - 1), folder, FILE_NAME);
}

static bool
have_same_contents(const char *a, const char *b)
{
    void *x = NULL, *y = NULL;
    uint64_t n, m;
    spw_error ignored = {0};
    bool same = spw_file_read(a, INT64_MAX, &x, &n, &ignored) == SPW_OK &&
                spw_file_read(b, INT64_MAX, &y, &m, &ignored) == SPW_OK && n == m && memcmp(x, y, n) == 0;
    spw_mem_free(x);
    spw_mem_free(y);
    return same;
}

spw_status
cli_train_check_reference(const train_run *r, const char *found, spw_error *err)
{
    const char *folder = r->config.run.checkpoint_dir;
    char here[SPW_PATH_BYTES], from[SPW_PATH_BYTES], other[SPW_PATH_BYTES];
    spw_error ignored = {0};
    if (!cli_train_has_reference(&r->config) || folder[0] == '\0' || !spw_dir_has(folder, FILE_NAME) ||
        spw_checkpoint_find(folder, other, &ignored) != SPW_OK)
        return SPW_OK;
    in_folder(folder, here);
    if (r->resumed) {
        beside(found, from);
        if (access(from, F_OK) != 0 || have_same_contents(from, here)) /* none is refused when it is read */
            return SPW_OK;
    }
    return SPW_RAISE(err, SPW_ECONFIG,
                     "spillway.checkpoint_dir holds %s of another run, and in %s what its reference found, without "
                     "which it cannot be gone on from and which this run would replace: take another folder, or "
                     "remove both (--resume %s goes on from it)",
                     other, here, folder);
}

/* Before the first step, not when it comes to what is not there. */
static spw_status
check_asked(const train_run *r, spw_error *err)
{
    const spw_config *c = &r->config;
    SPW_TRY(spw_reference_check(r->reference, r->data, SPW_SPLIT_TRAIN, r->at.data_position, drawn_until(r), err));
    return c->run.eval_interval == 0 ? SPW_OK
                                     : spw_reference_check(r->reference, r->data, SPW_SPLIT_VALIDATION, 0,
                                                           cli_train_eval_batches(c, r->data) * c->micro_batch, err);
}

spw_status
cli_train_find_reference(train_run *r, const char *found, spw_error *err)
{
    char path[SPW_PATH_BYTES];
    spw_status st;
    if (!cli_train_has_reference(&r->config))
        return SPW_OK;
    SPW_TRY(spw_reference_create(&r->reference, window_count(r->data), 2 * spw_data_pairs(r->data), key_of(r), err));
    if (!r->resumed)
        return SPW_OK;
    if (r->from_foreign)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s holds no reference for spillway.preference.loss %s: model.path, without --resume, starts "
                         "from its weights, with them as the reference",
                         found, r->config.run.preference.loss);
    beside(found, path);
    st = spw_reference_load(r->reference, path, r->talk, err);
    if (st == SPW_ENOENT)
        spw_error_wrap(err, "what the reference found is in no file any more, and it cannot be asked again");
    return st == SPW_OK ? check_asked(r, err) : st;
}

spw_status
cli_train_ask_reference(train_run *r, spw_error *err)
{
    const char *folder = r->config.run.checkpoint_dir;
    char path[SPW_PATH_BYTES];
    spw_status st = SPW_OK;
    spw_error own = {0};
    if (r->reference == NULL)
        return SPW_OK;
    if (!r->resumed)
        SPW_TRY(ask(r, err));
    in_folder(folder, path);
    if (r->rank == 0 && folder[0] != '\0') {
        st = spw_dir_make(folder, &own);
        if (st == SPW_OK)
            st = spw_reference_save(r->reference, path, &own);
    }
    if (r->talk != NULL)
        return spw_agree(r->talk, st, &own, NULL, err);
    if (st != SPW_OK)
        *err = own;
    return st;
}

spw_status
cli_train_fill_answers(train_run *r, spw_split split, uint64_t position, uint64_t k, spw_error *err)
{
    const uint64_t T = r->config.data.seq_length;
    return r->reference == NULL ? SPW_OK
                                : spw_reference_fill(r->reference, spw_data_window(r->data, split, position),
                                                     r->tokens + k * T, r->targets + k * T, T, r->answers + k * T, err);
}
