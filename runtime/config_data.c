/* From the section data to an open spw_data: one place for every command that reads training data. */
#include "spw_config.h"
#include "spw_chat.h"
#include "spw_data.h"
#include "spw_files.h"
#include "spw_tokenizer.h"
#include <stdio.h>
#include <string.h>

const char *
spw_config_tokenizer(const spw_config *c)
{
    if (strcmp(c->data.tokenizer, "auto") != 0)
        return strcmp(c->data.tokenizer, "bytes") == 0 ? NULL : c->data.tokenizer;
    return c->model_path[0] != '\0' && spw_tokenizer_is_in(c->model_path) ? c->model_path : NULL;
}

const char *
spw_config_kept_tokenizer(const spw_config *c)
{
    if (strcmp(c->data.tokenizer, "auto") != 0)
        return spw_config_tokenizer(c);
    return c->model_path[0] != '\0' ? c->model_path : NULL;
}

/* Its ids must be rows of the model's embedding, but for added tokens: a text with one beyond is refused where it is read. */
static spw_status
open_tokenizer(spw_tokenizer **out, const spw_config *c, spw_error *err)
{
    const char *path = spw_config_tokenizer(c);
    *out = NULL;
    if (path == NULL)
        return SPW_OK;
    SPW_TRY(spw_tokenizer_open(out, path, err));
    if (spw_tokenizer_vocab_own(*out) <= c->model.vocab)
        return SPW_OK;
    (void)SPW_RAISE(err, SPW_ECONFIG, "data.tokenizer %s has tokens up to %llu, the model's vocab_size is %llu, from 0",
                    path, (unsigned long long)spw_tokenizer_vocab_own(*out) - 1, (unsigned long long)c->model.vocab);
    spw_tokenizer_close(*out);
    *out = NULL;
    return SPW_ECONFIG;
}

/* Stands for a tokenizer that the model's folder has in a form that is not read: its ids are not bytes. */
static spw_status
unread_tokenizer(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t token_max,
                 uint64_t *token_count, spw_error *err)
{
    const spw_config *c = ctx;
    (void)text;
    (void)bytes;
    (void)rest;
    (void)tokens;
    (void)token_max;
    *token_count = 0;
    return SPW_RAISE(
        err, SPW_ECONFIG,
        "model.path %s has a tokenizer that is not read: tokenizer.json is (save_pretrained of transformers' "
        "tokenizers writes it), or data.tokenizer names another folder, or says bytes, or data.text_field names lists "
        "of "
        "tokens in JSON lines",
        c->model_path);
}

static bool
has_unread_tokenizer(const spw_config *c)
{
    static const char *const forms[] = {"tokenizer.model", "tekken.json", "spiece.model",
                                        "vocab.txt",       "vocab.json",  "tokenizer_config.json"};
    bool found = false;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        found = found || spw_dir_has(c->model_path, forms[i]);
    return found && strcmp(c->data.tokenizer, "auto") == 0 && c->model_path[0] != '\0';
}

/* A model's folder may have been fetched without its tokenizer, whose ids are not bytes. */
static void
warn_of_bytes(const spw_config *c, const char *encoder)
{
    if (strncmp(encoder, "bytes", 5) == 0 && strcmp(c->data.tokenizer, "auto") == 0 && c->model_path[0] != '\0' &&
        c->model.vocab != 256)
        spw_log(SPW_LOG_WARN,
                "data: bytes are tokens, because model.path %s has no tokenizer for its vocabulary of %llu; "
                "data.tokenizer names another folder, or says bytes",
                c->model_path, (unsigned long long)c->model.vocab);
}

static spw_status
open_chat(spw_chat **out, const spw_config *c, const spw_tokenizer *tokenizer, spw_error *err)
{
    spw_status st;
    *out = NULL;
    if (c->data.chat[0] == '\0')
        return SPW_OK;
    if (tokenizer == NULL)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "data.chat \"%.200s\" needs a tokenizer: data.tokenizer, or model.path's folder, has none",
                         c->data.chat);
    st = spw_chat_open(out, c->data.chat, tokenizer, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "data.chat");
    return st;
}

/* A key that only JSON lines have a use for, or NULL. */
static const char *
key_for_lines(const spw_config *c)
{
    if (spw_config_preference(c, &(spw_preference){0}))
        return "spillway.preference.loss";
    if (c->data.chat[0] != '\0')
        return "data.chat";
    if (c->data.prompt_field[0] != '\0')
        return "data.prompt_field";
    return c->data.text_field[0] != '\0' && strcmp(c->data.text_field, "text") != 0 ? "data.text_field" : NULL;
}

spw_status
spw_config_open_data(spw_data **out, const spw_config *c, spw_error *err)
{
    const char *patterns[SPW_PATHS_MAX];
    spw_data_source sources[SPW_PATHS_MAX];
    spw_data_options o = {.patterns = patterns,
                          .pattern_count = c->data.path.count,
                          .sources = sources,
                          .source_count = c->data.sources.count,
                          .seq_length = c->data.seq_length,
                          .validation_split = c->data.validation_split,
                          .seed = c->data.seed,
                          .vocab = c->model.vocab,
                          .lines_for = key_for_lines(c),
                          .text_field = c->data.text_field,
                          .prompt_field = c->data.prompt_field,
                          .labels_field = c->data.labels_field,
                          .messages_field = c->data.messages_field,
                          .pairs = spw_config_preference(c, &(spw_preference){0}),
                          .chosen_field = c->data.chosen_field,
                          .rejected_field = c->data.rejected_field,
                          .cache_dir = c->data.cache_dir};
    spw_tokenizer *tokenizer = NULL;
    spw_status st;
    *out = NULL;
    for (uint32_t i = 0; i < c->data.path.count; i++)
        patterns[i] = c->data.path.item[i];
    for (uint32_t i = 0; i < c->data.sources.count; i++)
        sources[i] =
            (spw_data_source){c->data.sources.item[i], c->data.sources.weight[i] > 0 ? c->data.sources.weight[i] : 1};
    if (c->data.format[0] != '\0' && !spw_data_format_parse(c->data.format, &o.format))
        return SPW_RAISE(err, SPW_EINVAL, "data.format \"%s\" is not known", c->data.format);
    (void)spw_documents_parse(c->data.documents, &o.documents);
    SPW_TRY(open_tokenizer(&tokenizer, c, err));
    if (tokenizer != NULL) {
        o.encode = spw_tokenizer_encode_data;
        o.encode_ctx = tokenizer;
        o.encode_key = spw_tokenizer_key(tokenizer);
        o.end_of_text = spw_tokenizer_end(tokenizer);
        o.end_of_text_set = o.end_of_text >= 0;
        if (c->data.begin_of_text)
            o.begin_of_text = spw_tokenizer_begin(tokenizer);
    } else if (has_unread_tokenizer(c)) { /* which says so when there is text */
        o.encode = unread_tokenizer;
        o.encode_ctx = (void *)(uintptr_t)c;
    }
    st = open_chat(&o.chat, c, tokenizer, err);
    if (st == SPW_OK)
        st = spw_data_open(out, &o, err);
    if (st == SPW_OK)
        warn_of_bytes(c, spw_data_encoder(*out));
    spw_chat_close(o.chat);
    spw_tokenizer_close(tokenizer); /* text is tokens in a file now */
    return st;
}
