/* Text to tokens and back for the commands that read a model: by its tokenizer, by bytes, or as numbers. */
#include "cli.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static const char tokenizer_sign[] = "tokenizer "; /* how what a tokenizer made begins */

/* Whether the tokenizer made the tokens that the checkpoint was trained on. */
static bool
has_made(const spw_tokenizer *t, const spw_weights *w)
{
    spw_data_options o = {.encode_key = spw_tokenizer_key(t)};
    char text[64];
    if (w->config.data.begin_of_text)
        o.begin_of_text = spw_tokenizer_begin(t);
    snprintf(text, sizeof text, "%s%016llx", tokenizer_sign, (unsigned long long)spw_data_encode_key(&o));
    return strncmp(w->encoder, text, strlen(text)) == 0;
}

static bool
made_by(const char *path, const spw_weights *w)
{
    spw_error ignored = {0};
    spw_tokenizer *t;
    bool has;
    if (spw_tokenizer_open(&t, path, &ignored) != SPW_OK)
        return false;
    has = has_made(t, w);
    spw_tokenizer_close(t);
    return has;
}

bool
cli_text_find(char *out, const spw_weights *w, const char *asked)
{
    bool is_named = w->is_checkpoint && strcmp(w->config.data.tokenizer, "auto") != 0;
    const char *path = asked, *said = is_named ? spw_config_tokenizer(&w->config) : NULL;
    bool is_bytes = asked == NULL && is_named && said == NULL;
    if (path == NULL && said != NULL && said[0] == '/' && made_by(said, w))
        path = said; /* older checkpoints hold the model's, whatever was said */
    if (path == NULL && !is_bytes && spw_tokenizer_is_in(w->path))
        path = w->path;
    if (path == NULL)
        path = spw_config_tokenizer(&w->config);
    snprintf(out, SPW_PATH_BYTES, "%.1000s", path != NULL ? path : "");
    return out[0] != '\0' || is_bytes || w->config.model.vocab == 256;
}

spw_status
cli_text_open(cli_text *t, const spw_weights *w, const char *asked, spw_error *err)
{
    char path[SPW_PATH_BYTES];
    *t = (cli_text){.vocab = w->config.model.vocab, .end = -1};
    if (!cli_text_find(path, w, asked))
        return SPW_RAISE(
            err, SPW_ENOENT,
            "%s has no tokenizer.json, no vocab.json with merges.txt and no tiktoken.model for its vocabulary of %llu; "
            "--tokenizer DIR names another folder that has",
            w->path, (unsigned long long)w->config.model.vocab);
    if (path[0] == '\0')
        return SPW_OK;
    SPW_TRY(spw_tokenizer_open(&t->tokenizer, path, err));
    if (w->config.data.begin_of_text) /* as it was trained */
        t->begin = spw_tokenizer_begin(t->tokenizer);
    t->end = spw_tokenizer_end(t->tokenizer);
    if (strncmp(w->encoder, tokenizer_sign, strlen(tokenizer_sign)) == 0 && !has_made(t->tokenizer, w))
        fprintf(stderr,
                "spillway: warning: the tokenizer of %s is not the one that made what %s was trained on: its tokens "
                "may mean others to the model\n",
                path, w->path);
    if (spw_tokenizer_vocab_own(t->tokenizer) > t->vocab) {
        spw_status st = SPW_RAISE(
            err, SPW_EINVAL, "the tokenizer of %s has tokens up to %llu, the model a vocabulary of %llu, from 0", path,
            (unsigned long long)spw_tokenizer_vocab_own(t->tokenizer) - 1, (unsigned long long)t->vocab);
        cli_text_close(t);
        return st;
    }
    return SPW_OK;
}

spw_status
cli_chat_open(spw_chat **out, const cli_text *t, const char *layout, spw_error *err)
{
    *out = NULL;
    if (layout[0] == '\0')
        return SPW_OK;
    if (t->tokenizer == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "chat \"%.200s\" needs a tokenizer with its special tokens: --tokenizer DIR",
                         layout);
    return spw_chat_open(out, layout, t->tokenizer, err);
}

void
cli_text_close(cli_text *t)
{
    spw_tokenizer_close(t->tokenizer);
    t->tokenizer = NULL;
}

static spw_status
encode_numbers(const char *text, spw_tokens *out, spw_error *err)
{
    while (*text != '\0') {
        char *end;
        long long id;
        errno = 0;
        id = strtoll(text, &end, 10);
        if (end == text || errno != 0 || id < 0 || id > INT32_MAX || (*end != '\0' && *end != ',' && *end != ' '))
            return SPW_RAISE(err, SPW_EINVAL, "\"%.60s\" is not a list of token numbers such as 5,17,2", text);
        SPW_TRY(spw_tokens_push(out, (int32_t)id, err));
        text = *end != '\0' ? end + 1 : end;
    }
    return SPW_OK;
}

spw_status
cli_text_encode(const cli_text *t, const char *text, spw_tokens *out, spw_error *err)
{
    if (t->numbers)
        return encode_numbers(text, out, err);
    if (t->tokenizer == NULL) {
        for (; *text != '\0'; text++)
            SPW_TRY(spw_tokens_push(out, (unsigned char)*text, err));
        return SPW_OK;
    }
    SPW_TRY(spw_tokens_push_begin(out, &t->begin, err));
    return spw_tokenizer_encode(t->tokenizer, text, strlen(text), true, out, err);
}

const char *
cli_text_decode(const cli_text *t, int32_t id, char room[16], uint64_t *bytes_out)
{
    const char *text;
    if (t->numbers) {
        *bytes_out = (uint64_t)snprintf(room, 16, ",%d", id);
        return room;
    }
    if (t->tokenizer != NULL) {
        text = spw_tokenizer_text(t->tokenizer, id, bytes_out);
        *bytes_out = text != NULL ? *bytes_out : 0;
        return text != NULL ? text : "";
    }
    room[0] = (char)id;
    *bytes_out = id < 256; /* what a vocabulary has beyond bytes stands for nothing */
    return room;
}
