/*
 * spillway eval: mean loss and perplexity of a checkpoint or a Hugging Face folder on data, forward only, with the data and the
 * streaming of training; of pairs of answers what training on preferences says of them. A sequence's losses are summed as they come; the
 * last batch is filled up with what has no target. A reference is asked first, and gone when the model comes.
 */
#include "cli.h"
#include "spw_reference.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { FOLDER_SEQ_MAX = 1024, DATA_MAX = SPW_PATHS_MAX };

typedef struct job {
    /* What was asked for. */
    const char *path, *tokenizer, *format, *text_field, *chat, *reference, *data[DATA_MAX];
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
} job;

static spw_status
open_data(job *j, spw_error *err)
{
    const spw_config *c = &j->weights.config;
    char tokenizer[SPW_PATH_BYTES];
    bool words = cli_text_find(tokenizer, &j->weights, j->tokenizer);
    spw_data_options o = {.patterns = j->data,
                          .pattern_count = j->data_count,
                          .seq_length = j->seq_length,
                          .seed = c->data.seed,
                          .vocab = c->model.vocab,
                          .lines_for = j->pairs                ? "--pairs"
                                       : j->chat != NULL       ? "--chat"
                                       : j->text_field != NULL ? "--text-field"
                                                               : NULL, /* what the checkpoint has may be of no use */
                          .text_field = j->text_field != NULL ? j->text_field : c->data.text_field,
                          .prompt_field = c->data.prompt_field,
                          .labels_field = c->data.labels_field,
                          .messages_field = c->data.messages_field,
                          .pairs = j->pairs,
                          .chosen_field = c->data.chosen_field,
                          .rejected_field = c->data.rejected_field,
                          .cache_dir = c->data.cache_dir};
    if (j->format != NULL && !spw_data_format_parse(j->format, &o.format))
        return SPW_RAISE(err, SPW_ECONFIG, "--format %s is not known: auto, text, llm.c, llmq, megatron or jsonl",
                         j->format);
    (void)spw_documents_parse(c->data.documents, &o.documents);
    if (words)
        SPW_TRY(cli_text_open(&j->words, &j->weights, j->tokenizer, err));
    if (j->words.tokenizer != NULL) {
        o.encode = spw_tokenizer_encode_data;
        o.encode_ctx = j->words.tokenizer;
        o.encode_key = spw_tokenizer_key(j->words.tokenizer);
        o.end_of_text = j->words.end;
        o.end_of_text_set = j->words.end >= 0;
        o.begin_of_text = j->words.begin;
    }
    SPW_TRY(cli_chat_open(&j->layout, &j->words, j->chat != NULL ? j->chat : c->data.chat, err));
    o.chat = j->layout;
    SPW_TRY(spw_data_open(&j->text, &o, err));
    if (!words &&
        (strstr(spw_data_formats(j->text), "text") != NULL || strstr(spw_data_formats(j->text), "json") != NULL))
        return cli_text_open(&j->words, &j->weights, j->tokenizer, err); /* says what is missing */
    return SPW_OK;
}

static uint64_t
default_length(const spw_weights *w)
{
    uint64_t trained = w->config.data.seq_length, positions = w->config.model.positions;
    if (!w->is_checkpoint)
        return trained < FOLDER_SEQ_MAX ? trained : FOLDER_SEQ_MAX;
    if (trained > positions)
        fprintf(stderr,
                "spillway: sequences are of %llu tokens, which is how many positions the model has; it was trained on "
                "%llu\n",
                (unsigned long long)positions, (unsigned long long)trained);
    return trained < positions ? trained : positions;
}

/* Pairs by the rule that the checkpoint was trained by, a folder's by DPO's with its usual beta; else there are none. */
static spw_status
set_rule(job *j, spw_config *c, spw_error *err)
{
    if (j->pairs || j->chat != NULL) /* as training would have it */
        snprintf(c->data.documents, sizeof c->data.documents, "whole");
    if (!j->pairs) {
        snprintf(c->run.preference.loss, sizeof c->run.preference.loss, "none");
        return SPW_OK;
    }
    if (!spw_config_preference(c, &j->rule)) {
        snprintf(c->run.preference.loss, sizeof c->run.preference.loss, "%s", spw_preference_name(SPW_PREFERENCE_DPO));
        c->run.preference.beta = 0.1;
        (void)spw_config_preference(c, &j->rule);
    }
    return j->reference == NULL || spw_preference_refers(j->rule.kind)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "--reference: %s was trained by %s, which has none", j->weights.path,
                           spw_preference_name(j->rule.kind));
}

static uint64_t
batch_tokens(const job *j)
{
    return j->batch_size * j->seq_length;
}

/* A model of these weights, in an engine for batches as they are asked for. */
static spw_status
open_engine(job *j, const spw_weights *w, spw_error *err)
{
    const uint64_t pairs = j->reference != NULL ? spw_data_pairs(j->text) : 0;
    SPW_TRY(spw_model_from_config(&j->model, &w->config, err));
    cli_place_model(&j->place, j->model);
    SPW_TRY(spw_engine_create(
        &j->e,
        &(spw_engine_options){
            .config = &w->config,
            .model = j->model,
            .inference = true,
            .losses = true,
            .stop = &cli_stop,
            .weights_from = w->from,
            .sequences = j->batch_size,
            .positions = j->seq_length,
            .caller_bytes =
                spw_data_memory_bytes(j->text) +
                (pairs > 0 ? spw_reference_memory_bytes(spw_data_sequences(j->text, SPW_SPLIT_TRAIN), 2 * pairs) +
                                 batch_tokens(j) * sizeof *j->answers
                           : 0)},
        err));
    return spw_weights_load(w, j->e, err);
}

static void
close_engine(job *j)
{
    spw_engine_destroy(j->e);
    spw_model_destroy(j->model);
    j->e = NULL;
    j->model = NULL;
}

/* How many sequences are evaluated. */
static uint64_t
sequences_of(const job *j)
{
    const uint64_t all = spw_data_sequences(j->text, SPW_SPLIT_TRAIN);
    return j->batches > 0 && j->batches < (all + j->batch_size - 1) / j->batch_size ? j->batches * j->batch_size : all;
}

static bool
goes_on(void *ctx, uint64_t asked)
{
    (void)ctx;
    (void)asked;
    return !cli_stop;
}

/* Of the weights that rewards are beside, which are gone afterwards. */
static spw_status
ask_reference(job *j, spw_error *err)
{
    spw_config *c = &j->beside.config;
    SPW_TRY(spw_weights_find(&j->beside, j->reference, err));
    if (j->seq_length > c->model.positions)
        return SPW_RAISE(err, SPW_ECONFIG, "--reference %s has %llu positions, and sequences are of %llu tokens",
                         j->beside.path, (unsigned long long)c->model.positions, (unsigned long long)j->seq_length);
    cli_place_apply(&j->place, c);
    c->data.seq_length = j->seq_length;
    c->run.preference = j->weights.config.run.preference;
    snprintf(c->data.documents, sizeof c->data.documents, "%s", j->weights.config.data.documents);
    SPW_TRY(spw_reference_create(&j->found, spw_data_sequences(j->text, SPW_SPLIT_TRAIN), 2 * spw_data_pairs(j->text),
                                 0, err));
    SPW_TRY(open_engine(j, &j->beside, err));
    SPW_TRY(spw_reference_ask(j->found,
                              &(spw_reference_asking){.engine = j->e,
                                                      .data = j->text,
                                                      .sequences = j->batch_size,
                                                      .T = j->seq_length,
                                                      .micro_batches = 1,
                                                      .tokens = j->tokens,
                                                      .targets = j->targets,
                                                      .answers = j->answers,
                                                      .told = goes_on},
                              SPW_SPLIT_TRAIN, spw_round_up(sequences_of(j), j->batch_size), err));
    close_engine(j);
    return SPW_OK;
}

static spw_status
open_all(job *j, spw_error *err)
{
    spw_config *c = &j->weights.config;
    uint64_t count;
    SPW_TRY(spw_weights_find(&j->weights, j->path, err));
    cli_place_apply(&j->place, c);
    if (j->seq_length == 0)
        j->seq_length = default_length(&j->weights);
    if (j->seq_length > c->model.positions)
        return SPW_RAISE(err, SPW_ECONFIG, "--seq-length %llu is more than the model's %llu positions",
                         (unsigned long long)j->seq_length, (unsigned long long)c->model.positions);
    if (j->batch_size == 0)
        j->batch_size = c->micro_batch > 0 ? c->micro_batch : 1;
    c->data.seq_length = j->seq_length;
    SPW_TRY(set_rule(j, c, err));
    SPW_TRY(open_data(j, err));
    count = batch_tokens(j);
    j->tokens = spw_mem_calloc(count, sizeof *j->tokens);
    j->targets = spw_mem_calloc(count, sizeof *j->targets);
    if (j->reference != NULL)
        j->answers = spw_mem_calloc(count, sizeof *j->answers);
    if (j->tokens == NULL || j->targets == NULL || (j->reference != NULL && j->answers == NULL))
        return SPW_RAISE(err, SPW_ENOMEM, "batches of %llu tokens", (unsigned long long)count);
    cli_catch_signals();
    if (j->reference != NULL)
        SPW_TRY(ask_reference(j, err));
    return open_engine(j, &j->weights, err);
}

/* What the batch's pairs come to, beside what the reference makes of its first n sequences. */
static spw_status
evaluate_pairs(job *j, uint64_t first, uint64_t n, spw_error *err)
{
    const uint64_t T = j->seq_length;
    const spw_pair_means *of;
    double loss;
    for (uint64_t k = 0; k < n && j->found != NULL; k++)
        SPW_TRY(spw_reference_fill(j->found, spw_data_window(j->text, SPW_SPLIT_TRAIN, first + k), j->tokens + k * T,
                                   j->targets + k * T, T, j->answers + k * T, err));
    spw_engine_set_reference(j->e, j->answers);
    SPW_TRY(spw_engine_eval(j->e, j->tokens, j->targets, 1, &loss, err));
    of = spw_engine_preferred(j->e);
    if (of->pairs == 0)
        return SPW_OK;
    j->sums.loss += of->loss * (double)of->pairs;
    j->sums.chosen += of->chosen * (double)of->pairs;
    j->sums.rejected += of->rejected * (double)of->pairs;
    j->sums.right += of->right * (double)of->pairs;
    j->sums.pairs += of->pairs;
    return SPW_OK;
}

static spw_status
run(job *j, spw_error *err)
{
    const uint64_t all = sequences_of(j), T = j->seq_length, begin = spw_now_ns();
    for (uint64_t first = 0; first < all; first += j->batch_size) {
        uint64_t n = all - first < j->batch_size ? all - first : j->batch_size, counted = 0;
        double loss;
        if (cli_stop)
            return SPW_RAISE(err, SPW_ECANCELED, "stopped");
        SPW_TRY(spw_data_fill(j->text, SPW_SPLIT_TRAIN, first, n, j->tokens, j->targets, err));
        for (uint64_t i = n * T; i < j->batch_size * T; i++) {
            j->tokens[i] = 0;
            j->targets[i] = -1;
        }
        for (uint64_t i = 0; i < n * T; i++)
            counted += j->targets[i] >= 0;
        if (j->pairs) {
            SPW_TRY(evaluate_pairs(j, first, n, err));
        } else {
            SPW_TRY(spw_engine_eval(j->e, j->tokens, j->targets, 1, &loss, err));
            j->loss_sum += counted > 0 ? loss * (double)counted : 0;
        }
        j->tokens_done += counted;
        j->sequences_done += n;
    }
    j->seconds = (double)(spw_now_ns() - begin) * 1e-9;
    if (j->tokens_done == 0)
        return SPW_RAISE(err, SPW_EINVAL, "no token of the data has a target");
    return SPW_OK;
}

static spw_status
check_loss(const job *j, double loss, spw_error *err)
{
    return isfinite(loss)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ENONFINITE, "the loss is not finite: weights of %s are infinite, NaN or very large",
                           j->weights.path);
}

static spw_status
show_pairs(const job *j, spw_error *err)
{
    const double n = (double)j->sums.pairs, loss = j->sums.loss / n, right = j->sums.right / n;
    const double chosen = j->sums.chosen / n, rejected = j->sums.rejected / n;
    json_t *o;
    char *line;
    if (!j->json) {
        printf("right %.4f  margin %.4f  loss %.6f  %llu pairs in %llu sequences of %llu  %.0f tokens/s\n", right,
               chosen - rejected, loss, (unsigned long long)j->sums.pairs, (unsigned long long)j->sequences_done,
               (unsigned long long)j->seq_length, (double)j->tokens_done / j->seconds);
        return check_loss(j, loss, err);
    }
    o = json_pack("{s:s, s:s, s:o, s:f, s:f, s:f, s:I, s:I, s:I, s:f}", "path", j->weights.path, "rule",
                  spw_preference_name(j->rule.kind), "loss", isfinite(loss) ? json_real(loss) : json_null(), "right",
                  right, "chosen", chosen, "rejected", rejected, "pairs", (json_int_t)j->sums.pairs, "sequences",
                  (json_int_t)j->sequences_done, "seq_length", (json_int_t)j->seq_length, "seconds", j->seconds);
    if (j->reference != NULL)
        json_object_set_new(o, "reference", json_string(j->beside.path));
    line = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    puts(line != NULL ? line : "{}");
    free(line);
    json_decref(o);
    return check_loss(j, loss, err);
}

static spw_status
show(const job *j, spw_error *err)
{
    double loss = j->loss_sum / (double)j->tokens_done, rate = (double)j->tokens_done / j->seconds;
    spw_store_stats stats;
    json_t *o;
    char *line;
    if (!j->json) {
        printf("loss %.6f  perplexity %.4f  %llu tokens in %llu sequences of %llu  %.0f tokens/s\n", loss, exp(loss),
               (unsigned long long)j->tokens_done, (unsigned long long)j->sequences_done,
               (unsigned long long)j->seq_length, rate);
        return check_loss(j, loss, err);
    }
    spw_store_get_stats(spw_engine_store(j->e), &stats);
    o = json_pack("{s:s, s:o, s:I, s:I, s:I, s:f, s:I}", "path", j->weights.path, "loss",
                  isfinite(loss) ? json_real(loss) : json_null(), "tokens", (json_int_t)j->tokens_done, "sequences",
                  (json_int_t)j->sequences_done, "seq_length", (json_int_t)j->seq_length, "seconds", j->seconds,
                  "nvme_read_bytes", (json_int_t)stats.nvme_read_bytes);
    if (isfinite(exp(loss)))
        json_object_set_new(o, "perplexity", json_real(exp(loss)));
    line = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    puts(line != NULL ? line : "{}");
    free(line);
    json_decref(o);
    return check_loss(j, loss, err);
}

static int
read_option(job *j, const char *name, const char *value)
{
    uint64_t *number = strcmp(name, "--seq-length") == 0 ? &j->seq_length
                       : strcmp(name, "--batches") == 0  ? &j->batches
                                                         : &j->batch_size;
    if (strcmp(name, "--data") == 0) {
        if (j->data_count == DATA_MAX)
            return cli_usage("eval", "more than %d --data", DATA_MAX);
        j->data[j->data_count++] = value;
    } else if (strcmp(name, "--tokenizer") == 0) {
        j->tokenizer = value;
    } else if (strcmp(name, "--format") == 0) {
        j->format = value;
    } else if (strcmp(name, "--text-field") == 0) {
        j->text_field = value;
    } else if (strcmp(name, "--chat") == 0) {
        j->chat = value;
    } else if (strcmp(name, "--reference") == 0) {
        j->reference = value;
    } else if (!cli_number(value, number) || *number == 0 || *number > 1 << 24) {
        return cli_usage("eval", "%s %s is not a whole number from 1 to %d", name, value, 1 << 24);
    }
    return EXIT_DONE;
}

static int
read_options(job *j, int argc, char **argv)
{
    static const char *const with_value[] = {"--data",      "--seq-length", "--batches", "--batch-size", "--format",
                                             "--tokenizer", "--text-field", "--chat",    "--reference",  NULL};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        int rc = cli_place_option("eval", &j->place, argc, argv, &i);
        if (rc >= 0) {
            if (rc != EXIT_DONE)
                return rc;
            continue;
        }
        if (strcmp(name, "--json") == 0 || strcmp(name, "--pairs") == 0) {
            *(name[2] == 'j' ? &j->json : &j->pairs) = true;
            continue;
        }
        if (name[0] != '-') {
            if (j->path != NULL)
                return cli_usage("eval", "one checkpoint at a time, got %s too; data comes after --data", name);
            j->path = name;
            continue;
        }
        if ((value = cli_known_value("eval", with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if ((rc = read_option(j, name, value)) != EXIT_DONE)
            return rc;
        while (strcmp(name, "--data") == 0 && i + 1 < argc && argv[i + 1][0] != '-' &&
               j->path != NULL) /* a shell's list */
            if ((rc = read_option(j, name, argv[++i])) != EXIT_DONE)
                return rc;
    }
    if (j->path == NULL || j->data_count == 0)
        return cli_usage("eval", "a checkpoint or a folder, and --data, are needed");
    if (!j->pairs && j->reference != NULL)
        return cli_usage("eval", "--reference is for --pairs");
    if (j->pairs && j->text_field != NULL)
        return cli_usage("eval", "--text-field is not for --pairs, whose fields are those of training");
    return EXIT_DONE;
}

int
cli_eval(int argc, char **argv)
{
    static job j; /* large */
    spw_error err = {0};
    int rc = read_options(&j, argc, argv);
    if (rc == EXIT_DONE) {
        spw_status st = open_all(&j, &err);
        if (st == SPW_OK)
            st = run(&j, &err);
        if (st == SPW_OK)
            st = j.pairs ? show_pairs(&j, &err) : show(&j, &err);
        if (st != SPW_OK)
            rc = cli_fail(&err);
    }
    close_engine(&j);
    spw_reference_destroy(j.found);
    spw_data_close(j.text);
    spw_chat_close(j.layout);
    cli_text_close(&j.words);
    spw_mem_free(j.tokens);
    spw_mem_free(j.targets);
    spw_mem_free(j.answers);
    return rc;
}
