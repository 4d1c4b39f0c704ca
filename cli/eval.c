/*
 * spillway eval: mean loss and perplexity of a checkpoint or a Hugging Face folder on data, forward only, with the data and the
 * streaming of training; of pairs of answers what training on preferences says of them. A sequence's losses are summed as they come; the
 * last batch is filled up with what has no target. A reference is asked first, and gone when the model comes.
 */
#include "eval.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { FOLDER_SEQ_MAX = 1024 };

static spw_status
open_data(eval_job *j, spw_error *err)
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

static uint64_t
batch_tokens(const eval_job *j)
{
    return j->batch_size * j->seq_length;
}

spw_status
cli_eval_open(eval_job *j, const spw_weights *w, spw_error *err)
{
    const uint64_t pairs = j->reference != NULL ? spw_data_pairs(j->text) : 0;
    SPW_TRY(spw_model_from_config(&j->model, &w->config, err));
    cli_place_model(&j->place, w, j->model);
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

void
cli_eval_close(eval_job *j)
{
    spw_engine_destroy(j->e);
    spw_model_destroy(j->model);
    j->e = NULL;
    j->model = NULL;
}

uint64_t
cli_eval_sequences(const eval_job *j)
{
    const uint64_t all = spw_data_sequences(j->text, SPW_SPLIT_TRAIN);
    return j->batches > 0 && j->batches < (all + j->batch_size - 1) / j->batch_size ? j->batches * j->batch_size : all;
}

static spw_status
open_all(eval_job *j, spw_error *err)
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
    if (j->pairs || j->chat != NULL) /* as training would have it */
        snprintf(c->data.documents, sizeof c->data.documents, "whole");
    if (j->pairs)
        SPW_TRY(cli_eval_pairs_rule(j, err));
    else
        snprintf(c->run.preference.loss, sizeof c->run.preference.loss, "none");
    SPW_TRY(open_data(j, err));
    count = batch_tokens(j);
    j->tokens = spw_mem_calloc(count, sizeof *j->tokens);
    j->targets = spw_mem_calloc(count, sizeof *j->targets);
    if (j->reference != NULL)
        j->answers = spw_mem_calloc(count, sizeof *j->answers);
    if (j->tokens == NULL || j->targets == NULL || (j->reference != NULL && j->answers == NULL))
        return SPW_RAISE(err, SPW_ENOMEM, "batches of %llu tokens", (unsigned long long)count);
    cli_catch_signals();
    SPW_TRY(cli_eval_pairs_ask(j, err));
    return cli_eval_open(j, &j->weights, err);
}

static spw_status
run(eval_job *j, spw_error *err)
{
    const uint64_t all = cli_eval_sequences(j), T = j->seq_length, begin = spw_now_ns();
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
            SPW_TRY(cli_eval_pairs_batch(j, first, n, err));
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

spw_status
cli_eval_check(const eval_job *j, double loss, spw_error *err)
{
    return isfinite(loss)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ENONFINITE, "the loss is not finite: weights of %s are infinite, NaN or very large",
                           j->weights.path);
}

static spw_status
show(const eval_job *j, spw_error *err)
{
    double loss = j->loss_sum / (double)j->tokens_done, rate = (double)j->tokens_done / j->seconds;
    spw_store_stats stats;
    json_t *o;
    if (!j->json) {
        printf("loss %.6f  perplexity %.4f  %llu tokens in %llu sequences of %llu  %.0f tokens/s\n", loss, exp(loss),
               (unsigned long long)j->tokens_done, (unsigned long long)j->sequences_done,
               (unsigned long long)j->seq_length, rate);
        return cli_eval_check(j, loss, err);
    }
    spw_store_get_stats(spw_engine_store(j->e), &stats);
    o = json_pack("{s:o, s:o, s:I, s:I, s:I, s:f, s:I}", "path", cli_json_text(j->weights.path), "loss",
                  isfinite(loss) ? json_real(loss) : json_null(), "tokens", (json_int_t)j->tokens_done, "sequences",
                  (json_int_t)j->sequences_done, "seq_length", (json_int_t)j->seq_length, "seconds", j->seconds,
                  "nvme_read_bytes", (json_int_t)stats.nvme_read_bytes);
    if (isfinite(exp(loss)))
        json_object_set_new(o, "perplexity", json_real(exp(loss)));
    SPW_TRY(cli_show_json("eval", CLI_DIGITS_ALL, o, err));
    return cli_eval_check(j, loss, err);
}

static int
read_option(eval_job *j, const char *name, const char *value)
{
    uint64_t *number = strcmp(name, "--seq-length") == 0 ? &j->seq_length
                       : strcmp(name, "--batches") == 0  ? &j->batches
                                                         : &j->batch_size;
    if (strcmp(name, "--data") == 0) {
        if (j->data_count == SPW_PATHS_MAX)
            return cli_usage("eval", "more than %d --data", SPW_PATHS_MAX);
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
read_options(eval_job *j, int argc, char **argv)
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
        j->json = j->json || strcmp(name, "--json") == 0;
        j->pairs = j->pairs || strcmp(name, "--pairs") == 0;
        if (strcmp(name, "--json") == 0 || strcmp(name, "--pairs") == 0)
            continue;
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
    static eval_job j; /* large */
    spw_error err = {0};
    int rc = read_options(&j, argc, argv);
    if (rc == EXIT_DONE) {
        spw_status st = open_all(&j, &err);
        if (st == SPW_OK)
            st = run(&j, &err);
        if (st == SPW_OK)
            st = j.pairs ? cli_eval_pairs_show(&j, &err) : show(&j, &err);
        if (st != SPW_OK)
            rc = cli_fail(&err);
    }
    cli_eval_close(&j);
    spw_reference_destroy(j.found);
    spw_data_close(j.text);
    spw_chat_close(j.layout);
    cli_text_close(&j.words);
    spw_mem_free(j.tokens);
    spw_mem_free(j.targets);
    spw_mem_free(j.answers);
    return rc;
}
