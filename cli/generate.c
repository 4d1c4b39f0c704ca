/*
 * spillway generate: draws tokens from a checkpoint or a Hugging Face folder, for one prompt or many at once. Prompts take
 * slots of the generator; one that has ended gives its slot to the next. A single prompt's text is shown as it is drawn.
 */
#include "cli.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

enum { PROMPTS_MAX = 4096, BATCH_SIZE = 16, PIECE_MAX = 512, TEXT_BYTES_MAX = 1 << 26 };

typedef enum { RUNNING, STOP_TOKENS, STOP_END } stop;

typedef struct text {
    char *prompt;
    spw_tokens tokens; /* of the prompt, then what was drawn */
    uint64_t prompt_count;
    uint64_t restarts; /* times that it was longer than the model's positions */
    uint32_t slot;
    stop why;
} text;

typedef struct job {
    /* What was asked for. */
    const char *path, *tokenizer, *chat;
    cli_place place;
    text texts[PROMPTS_MAX];
    uint64_t text_count, tokens, batch_size;
    spw_sampling how;
    bool json, numbers, said_restart;
    /* What it became. */
    spw_weights weights;
    cli_text words;
    spw_chat *layout; /* of conversations, or NULL */
    spw_model *model;
    spw_generator *g;
    text *in_slot[PROMPTS_MAX]; /* NULL: none is */
    uint32_t slots;
    uint64_t positions;
} job;

/* ---------------------------------------------------------------- what is printed */

static void
show_tokens(const job *j, const int32_t *ids, uint64_t count, bool first)
{
    for (uint64_t i = 0; i < count; i++) {
        char room[16];
        uint64_t bytes;
        const char *s = cli_text_decode(&j->words, ids[i], room, &bytes);
        if (first && i == 0 && j->numbers) {
            s++;
            bytes--;
        }
        fwrite(s, 1, bytes, stdout);
    }
    fflush(stdout);
}

static json_t *
json_text(const job *j, const int32_t *ids, uint64_t count)
{
    json_t *s;
    char *bytes, room[16];
    uint64_t n = 0, all = 0;
    for (uint64_t i = 0; i < count; i++) {
        (void)cli_text_decode(&j->words, ids[i], room, &n);
        all += n;
    }
    bytes = spw_mem_calloc(all + 1, 1);
    if (bytes == NULL)
        return json_null();
    all = 0;
    for (uint64_t i = 0; i < count; i++) {
        const char *part = cli_text_decode(&j->words, ids[i], room, &n);
        memcpy(bytes + all, part, n);
        all += n;
    }
    s = cli_json_bytes(bytes, all);
    spw_mem_free(bytes);
    return s;
}

static void
show_json(const job *j, const text *t)
{
    static const char *const why[] = {"", "tokens", "end"};
    json_t *o = json_object(), *ids = json_array();
    char *line;
    for (uint64_t i = t->prompt_count; i < t->tokens.count; i++)
        json_array_append_new(ids, json_integer(t->tokens.ids[i]));
    json_object_set_new(o, "prompt", cli_json_text(t->prompt));
    json_object_set_new(o, "prompt_tokens", json_integer((json_int_t)t->prompt_count));
    if (!j->numbers)
        json_object_set_new(o, "text",
                            json_text(j, t->tokens.ids + t->prompt_count, t->tokens.count - t->prompt_count));
    json_object_set_new(o, "tokens", ids);
    json_object_set_new(o, "stop", json_string(why[t->why]));
    if (t->restarts > 0)
        json_object_set_new(o, "restarts", json_integer((json_int_t)t->restarts));
    line = json_dumps(o, JSON_COMPACT);
    puts(line != NULL ? line : "{}");
    free(line);
    json_decref(o);
}

/* An answer has a line of its own, other text goes on. */
static void
show_prompt(const job *j, const text *t)
{
    fputs(t->prompt, stdout);
    if (j->layout != NULL)
        putchar('\n');
}

/* A disk that is full: what else would be drawn, for hours maybe, is for nobody. */
static spw_status
check_output(spw_error *err)
{
    return ferror(stdout) ? SPW_RAISE_SYS(err, errno, "writing the output failed") : SPW_OK;
}

static void
show(const job *j, const text *t, uint64_t number)
{
    if (j->json) {
        show_json(j, t);
        return;
    }
    if (j->text_count == 1)
        putchar('\n'); /* the rest has been shown */
    else {
        printf("--- %llu\n", (unsigned long long)number);
        show_prompt(j, t);
        show_tokens(j, t->tokens.ids + t->prompt_count, t->tokens.count - t->prompt_count, false);
        putchar('\n');
    }
}

static uint64_t
nvme_read(job *j)
{
    spw_store_stats stats;
    spw_store_get_stats(spw_engine_store(spw_generator_engine(j->g)), &stats);
    return stats.nvme_read_bytes;
}

/* On stderr, beside the texts: how fast they came, and from where. */
static void
show_speed(job *j, double seconds, uint64_t read_before)
{
    const uint64_t read = nvme_read(j) - read_before;
    uint64_t drawn = 0;
    for (uint64_t i = 0; i < j->text_count; i++)
        drawn += j->texts[i].tokens.count - j->texts[i].prompt_count;
    fflush(stdout);
    fprintf(stderr, "spillway: %llu tokens in %.1f s, %.1f tokens/s", (unsigned long long)drawn, seconds,
            (double)drawn / seconds);
    if (j->slots > 1)
        fprintf(stderr, ", %u texts at once", j->slots);
    if (read > 0)
        fprintf(stderr, ", %.2f GB/s read", (double)read * 1e-9 / seconds);
    fputc('\n', stderr);
}

/* ---------------------------------------------------------------- the loop */

static bool
ends(const job *j, int32_t id)
{
    bool end = id == j->words.end || (j->layout != NULL && id == spw_chat_end_of_turn(j->layout));
    for (uint32_t i = 0; i < j->weights.end_token_count; i++)
        end = end || id == j->weights.end_tokens[i];
    return end;
}

/*
 * Feeds what the slot has not seen. A sequence that is as long as it can be goes on from the last half of its positions, as a
 * prompt of its own.
 */
static spw_status
feed(job *j, text *t, uint64_t count, spw_error *err)
{
    if (spw_generator_length(j->g, t->slot) + count > j->positions) {
        spw_generator_clear(j->g, t->slot);
        count = j->positions > 1 ? j->positions / 2 : 1;
        t->restarts++;
        if (!j->said_restart)
            fprintf(stderr,
                    "spillway: a text has come to the model's %llu positions: it goes on from its last %llu tokens and "
                    "knows nothing of what was before (fewer --tokens avoid it)\n",
                    (unsigned long long)j->positions, (unsigned long long)count);
        j->said_restart = true;
    }
    return spw_generator_feed(j->g, t->slot, t->tokens.ids + t->tokens.count - count, count, err);
}

/* Takes the next token of a text whose logits are there. */
static spw_status
advance(job *j, text *t, spw_error *err)
{
    int32_t id;
    SPW_TRY(spw_generator_draw(j->g, t->slot, &j->how, &id, err));
    if (ends(j, id)) {
        t->why = STOP_END;
        return SPW_OK;
    }
    SPW_TRY(spw_tokens_push(&t->tokens, id, err));
    if (j->text_count == 1 && !j->json) {
        show_tokens(j, &id, 1, false);
        SPW_TRY(check_output(err));
    }
    if (t->tokens.count - t->prompt_count == j->tokens) {
        t->why = STOP_TOKENS;
        return SPW_OK;
    }
    return feed(j, t, 1, err);
}

static spw_status
run(job *j, spw_error *err)
{
    text **in_slot = j->in_slot;
    uint64_t next = 0, shown = 0;
    const uint64_t begin = spw_now_ns(), read_before = nvme_read(j);
    if (j->text_count == 1 && !j->json)
        show_prompt(j, &j->texts[0]);
    while (shown < j->text_count) {
        for (uint32_t i = 0; i < j->slots && next < j->text_count; i++) {
            if (in_slot[i] != NULL)
                continue;
            in_slot[i] = &j->texts[next++];
            in_slot[i]->slot = i;
            spw_generator_clear(j->g, i);
            if (j->tokens == 0)
                in_slot[i]->why = STOP_TOKENS;
            else
                SPW_TRY(feed(j, in_slot[i], in_slot[i]->prompt_count, err));
        }
        if (cli_stop)
            return SPW_RAISE(err, SPW_ECANCELED, "stopped");
        SPW_TRY(spw_generator_forward(j->g, err));
        for (uint32_t i = 0; i < j->slots; i++) {
            if (in_slot[i] != NULL && spw_generator_logits(j->g, i) != NULL)
                SPW_TRY(advance(j, in_slot[i], err));
            if (in_slot[i] != NULL && in_slot[i]->why != RUNNING) {
                spw_generator_clear(j->g, i);
                in_slot[i] = NULL;
            }
        }
        for (; shown < next && j->texts[shown].why != RUNNING; shown++) { /* in the order of the prompts */
            show(j, &j->texts[shown], shown + 1);
            SPW_TRY(check_output(err));
        }
    }
    show_speed(j, (double)(spw_now_ns() - begin) * 1e-9, read_before);
    return SPW_OK;
}

/* ---------------------------------------------------------------- what is asked for */

static spw_status
encode_all(job *j, uint64_t *longest, spw_error *err)
{
    uint64_t limit = j->weights.config.model.positions;
    *longest = 0;
    for (uint64_t i = 0; i < j->text_count; i++) {
        text *t = &j->texts[i];
        if (j->layout != NULL)
            SPW_TRY(spw_chat_encode_prompt(j->layout, t->prompt, strlen(t->prompt), &t->tokens, err));
        else
            SPW_TRY(cli_text_encode(&j->words, t->prompt, &t->tokens, err));
        t->prompt_count = t->tokens.count;
        for (uint64_t k = 0; k < t->prompt_count; k++) {
            if ((uint64_t)t->tokens.ids[k] >= j->weights.config.model.vocab)
                return SPW_RAISE(err, SPW_EINVAL, "prompt %llu: token %d is outside the vocabulary of %llu",
                                 (unsigned long long)(i + 1), t->tokens.ids[k],
                                 (unsigned long long)j->weights.config.model.vocab);
        }
        if (t->prompt_count == 0)
            return SPW_RAISE(err, SPW_EINVAL, "prompt %llu has no tokens", (unsigned long long)(i + 1));
        if (t->prompt_count > limit)
            return SPW_RAISE(err, SPW_EINVAL, "prompt %llu has %llu tokens, the model has %llu positions",
                             (unsigned long long)(i + 1), (unsigned long long)t->prompt_count,
                             (unsigned long long)limit);
        *longest = t->prompt_count > *longest ? t->prompt_count : *longest;
    }
    return SPW_OK;
}

/* longrope's factors are one choice for all slots: by the longest text that there can be. */
static void
say_factors(const job *j)
{
    const spw_model_config *m = &j->weights.config.model;
    if (m->rope == SPW_ROPE_LONG && j->positions > m->rope_positions)
        fprintf(stderr,
                "spillway: the longest prompt and its --tokens can come to %llu tokens, more than the model's original "
                "%llu: every text of this run is by longrope's long factors (fewer --tokens, or long prompts in a run "
                "of their own, leave the others the short ones)\n",
                (unsigned long long)j->positions, (unsigned long long)m->rope_positions);
}

static spw_status
open_all(job *j, spw_error *err)
{
    uint64_t longest, limit, piece;
    SPW_TRY(spw_weights_find(&j->weights, j->path, err));
    cli_place_apply(&j->place, &j->weights.config);
    if (j->numbers)
        j->words = (cli_text){.numbers = true, .end = -1};
    else
        SPW_TRY(cli_text_open(&j->words, &j->weights, j->tokenizer, err));
    SPW_TRY(cli_chat_open(&j->layout, &j->words, j->chat != NULL ? j->chat : "", err));
    SPW_TRY(encode_all(j, &longest, err));
    limit = j->weights.config.model.positions;
    j->positions = longest + j->tokens < limit ? longest + j->tokens : limit;
    say_factors(j);
    piece = j->weights.is_checkpoint ? j->weights.config.data.seq_length : PIECE_MAX;
    j->slots = (uint32_t)(j->text_count < j->batch_size ? j->text_count : j->batch_size);
    SPW_TRY(spw_model_from_config(&j->model, &j->weights.config, err));
    cli_place_model(&j->place, &j->weights, j->model);
    cli_catch_signals(); /* weights may be in swap files */
    SPW_TRY(spw_generator_create(&j->g,
                                 &(spw_generator_options){.config = &j->weights.config,
                                                          .model = j->model,
                                                          .slots = j->slots,
                                                          .positions = j->positions,
                                                          .piece = piece,
                                                          .weights_from = j->weights.from,
                                                          .stop = &cli_stop},
                                 err));
    return spw_weights_load(&j->weights, spw_generator_engine(j->g), err);
}

static int
add_prompt(job *j, const char *prompt, size_t bytes)
{
    text *t = &j->texts[j->text_count];
    if (j->text_count == PROMPTS_MAX)
        return cli_usage("generate", "more than %d prompts", PROMPTS_MAX);
    if (bytes == 0)
        return cli_usage("generate", "prompt %llu is empty", (unsigned long long)(j->text_count + 1));
    t->prompt = spw_mem_zalloc(bytes + 1);
    if (t->prompt == NULL)
        return cli_fail(&(spw_error){.status = SPW_ENOMEM, .message = "no memory for the prompts"});
    memcpy(t->prompt, prompt, bytes);
    j->text_count++;
    return EXIT_DONE;
}

/* A prompt a line; empty lines are passed over. */
static int
add_lines(job *j, const char *lines)
{
    int rc = EXIT_DONE;
    for (const char *line = lines, *end; rc == EXIT_DONE && *line != '\0'; line = *end != '\0' ? end + 1 : end) {
        size_t bytes = strcspn(line, "\n");
        end = line + bytes;
        if (bytes > 0 && line[bytes - 1] == '\r') /* a file from Windows */
            bytes--;
        if (bytes > 0)
            rc = add_prompt(j, line, bytes);
    }
    return rc;
}

/* "-": what comes in on stdin. */
static int
read_prompts(job *j, const char *path)
{
    spw_error err = {0};
    char *all = NULL;
    size_t room = 0;
    int rc;
    if (strcmp(path, "-") != 0) {
        if (spw_file_read_text(path, TEXT_BYTES_MAX, &all, &err) != SPW_OK)
            return cli_fail(&err);
        rc = add_lines(j, all);
        spw_mem_free(all);
        return rc;
    }
    errno = 0;
    if (getdelim(&all, &room, '\0', stdin) > 0 && feof(stdin)) {
        rc = add_lines(j, all);
    } else if (ferror(stdin)) {
        (void)SPW_RAISE_SYS(&err, errno, "--prompts -: reading stdin");
        rc = cli_fail(&err);
    } else {
        rc =
            cli_usage("generate", "--prompts -: stdin has %s", feof(stdin) ? "nothing" : "a zero byte, and is no text");
    }
    free(all);
    return rc;
}

static int
read_option(job *j, const char *name, const char *value)
{
    char *end;
    double number = strtod(value, &end);
    bool is_number = end != value && *end == '\0';
    if (strcmp(name, "--prompt") == 0)
        return add_prompt(j, value, strlen(value));
    if (strcmp(name, "--prompts") == 0)
        return read_prompts(j, value);
    if (strcmp(name, "--tokenizer") == 0 || strcmp(name, "--chat") == 0) {
        *(strcmp(name, "--chat") == 0 ? &j->chat : &j->tokenizer) = value;
        return EXIT_DONE;
    }
    if (strcmp(name, "--temperature") == 0) {
        if (!is_number || !(number >= 0) || number > 100)
            return cli_usage("generate", "--temperature %s is not a number from 0 to 100", value);
        j->how.temperature = number;
        return EXIT_DONE;
    }
    if (strcmp(name, "--top-p") == 0) {
        if (!is_number || !(number > 0) || number > 1)
            return cli_usage("generate", "--top-p %s is not a number above 0 and at most 1", value);
        j->how.top_p = number;
        return EXIT_DONE;
    }
    if (!cli_number(value, strcmp(name, "--tokens") == 0       ? &j->tokens
                           : strcmp(name, "--top-k") == 0      ? &j->how.top_k
                           : strcmp(name, "--batch-size") == 0 ? &j->batch_size
                                                               : &j->how.seed))
        return cli_usage("generate", "%s %s is not a whole number", name, value);
    return EXIT_DONE;
}

static int
read_options(job *j, int argc, char **argv)
{
    static const char *const with_value[] = {"--prompt",     "--prompts",   "--tokens", "--temperature",
                                             "--top-k",      "--top-p",     "--seed",   "--chat",
                                             "--batch-size", "--tokenizer", NULL};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value;
        int rc = cli_place_option("generate", &j->place, argc, argv, &i);
        if (rc >= 0) {
            if (rc != EXIT_DONE)
                return rc;
            continue;
        }
        if (strcmp(name, "--json") == 0 || strcmp(name, "--ids") == 0) {
            *(strcmp(name, "--json") == 0 ? &j->json : &j->numbers) = true;
            continue;
        }
        if (name[0] != '-') {
            if (j->path != NULL)
                return cli_usage("generate", "one checkpoint at a time, got %s too", name);
            j->path = name;
            continue;
        }
        if ((value = cli_known_value("generate", with_value, argc, argv, &i)) == NULL)
            return EXIT_USAGE;
        if ((rc = read_option(j, name, value)) != EXIT_DONE)
            return rc;
    }
    if (j->path == NULL || j->text_count == 0)
        return cli_usage("generate", "a checkpoint or a folder, and a --prompt of at least one byte, are needed");
    if (j->chat != NULL && j->numbers)
        return cli_usage("generate", "--chat makes tokens of text, and --ids says that there is none");
    if (j->batch_size == 0 || j->batch_size > PROMPTS_MAX)
        return cli_usage("generate", "--batch-size %llu is not a number from 1 to %d",
                         (unsigned long long)j->batch_size, PROMPTS_MAX);
    if (j->tokens > 1000000)
        return cli_usage("generate", "--tokens %llu is more than 1000000", (unsigned long long)j->tokens);
    return EXIT_DONE;
}

int
cli_generate(int argc, char **argv)
{
    static job j; /* large */
    spw_error err = {0};
    spw_status st;
    int rc;
    j.tokens = 200;
    j.batch_size = BATCH_SIZE;
    j.how = (spw_sampling){.temperature = 0.8, .top_p = 1, .seed = 1};
    rc = read_options(&j, argc, argv);
    if (rc == EXIT_DONE) {
        st = open_all(&j, &err);
        if (st == SPW_OK)
            st = run(&j, &err);
        if (st != SPW_OK)
            rc = cli_fail(&err);
    }
    spw_generator_destroy(j.g);
    spw_model_destroy(j.model);
    spw_chat_close(j.layout);
    cli_text_close(&j.words);
    for (uint64_t i = 0; i < j.text_count; i++) {
        spw_mem_free(j.texts[i].prompt);
        spw_tokens_free(&j.texts[i].tokens);
    }
    return rc;
}
