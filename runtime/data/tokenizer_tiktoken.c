/*
 * tiktoken.model, as Moonshot's models have it (Kimi-K2 to K2.6, Kimi Linear, Moonlight): lines of a token in base64 and its id, which is its rank
 * too. Two neighbours merge when their bytes together are a token, those of the lowest id first, so every way of cutting a token into two tokens is
 * a merge of that rank; a piece that is a token is that one. The pattern, and that 256 ids behind those of the file are added tokens, are in the
 * folder's program, which is not run: the class is known here, and where its file lies beside, it has to have the same pattern.
 *
 * Source  openai/tiktoken (lib.rs); TikTokenTokenizer of the models named.
 */
#include "tokenizer_internal.h"
#include "spw_files.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { FILE_BYTES_MAX = 1 << 28, TOKEN_BYTES_MAX = 1024, RESERVED = 256 };

/* ---------------------------------------------------------------- the file */

static int
six_bits(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* base64 (length) to bytes; how many, 0: it is not such a text, or none. */
static uint32_t
from_base64(const char *text, uint64_t length, unsigned char bytes[TOKEN_BYTES_MAX])
{
    uint32_t used = 0, bits = 0, held = 0;
    if (length % 4 != 0 || length / 4 * 3 > TOKEN_BYTES_MAX)
        return 0;
    while (length > 0 && text[length - 1] == '=' && bits++ < 2)
        length--;
    bits = 0;
    for (uint64_t i = 0; i < length; i++) {
        int v = six_bits(text[i]);
        if (v < 0)
            return 0;
        held = held << 6 | (uint32_t)v;
        bits += 6;
        if (bits >= 8) {
            bits -= 8;
            bytes[used++] = (unsigned char)(held >> bits);
        }
    }
    return used;
}

static spw_status
bad_line(const spw_tokenizer *t, uint64_t line, const char *why, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s, line %llu: %s", t->path, (unsigned long long)line, why);
}

/* One line, which ends at `end`: a token and its id, into vocab by its spelling in the byte alphabet. */
static spw_status
take_line(const spw_tokenizer *t, json_t *vocab, const char *text, const char *end, uint64_t line, spw_error *err)
{
    unsigned char bytes[TOKEN_BYTES_MAX];
    char spelled[2 * TOKEN_BYTES_MAX + 1], *rest;
    const char *space = memchr(text, ' ', (uint64_t)(end - text));
    uint32_t n = space != NULL ? from_base64(text, (uint64_t)(space - text), bytes) : 0;
    unsigned long id;
    if (n == 0)
        return bad_line(t, line, "not a token in base64 and its number", err);
    id = strtoul(space + 1, &rest, 10);
    if (space[1] < '0' || space[1] > '9' || rest != end || id > TOK_ID_MAX)
        return bad_line(t, line, "what follows the token is not its number", err);
    spw__tok_spell(bytes, n, spelled);
    if (json_object_get(vocab, spelled) != NULL)
        return bad_line(t, line, "a token that is there twice", err);
    return json_object_set_new(vocab, spelled, json_integer((json_int_t)id)) == 0
               ? SPW_OK
               : SPW_RAISE(err, SPW_ENOMEM, "%s: the vocabulary", t->path);
}

static spw_status
read_vocab(spw_tokenizer *t, json_t *vocab, spw_error *err)
{
    spw_status st = SPW_OK;
    uint64_t line = 0;
    char *text;
    SPW_TRY(spw_file_read_text(t->path, FILE_BYTES_MAX, &text, err));
    t->key = spw_checksum_more(t->key, text, strlen(text));
    for (const char *p = text, *end; st == SPW_OK && *p != '\0'; p = *end == '\0' ? end : end + 1) {
        const char *stop = end = p + strcspn(p, "\n");
        line++;
        stop -= stop > p && stop[-1] == '\r';
        if (stop > p)
            st = take_line(t, vocab, p, stop, line, err);
    }
    spw_mem_free(text);
    return st;
}

/* ---------------------------------------------------------------- added tokens */

/* The 256 ids behind the vocabulary: those that added (a list) has not got yet, by the names that the class gives them. */
static spw_status
add_reserved(const spw_tokenizer *t, json_t *added, uint64_t base, const char *config_path, spw_error *err)
{
    bool named[RESERVED] = {false};
    json_t *v;
    size_t i;
    json_array_foreach(added, i, v)
    {
        uint64_t id = (uint64_t)json_integer_value(json_object_get(v, "id"));
        if (id < base || id >= base + RESERVED)
            return SPW_RAISE(err, SPW_ECORRUPT,
                             "%s: added_tokens_decoder.%llu is none of the %d ids behind the vocabulary of %llu in %s",
                             config_path, (unsigned long long)id, RESERVED, (unsigned long long)base, t->path);
        named[id - base] = true;
    }
    for (i = 0; i < RESERVED; i++) {
        char text[48];
        snprintf(text, sizeof text, "<|reserved_token_%llu|>", (unsigned long long)(base + i));
        if (!named[i] && json_array_append_new(added, json_pack("{s:s, s:I, s:b}", "content", text, "id",
                                                                (json_int_t)(base + i), "special", 1)) != 0)
            return SPW_RAISE(err, SPW_ENOMEM, "%s: added tokens", config_path);
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- class and pattern */

/* The folder's program, where it is there, has each part of the pattern by which texts are cut here. */
static spw_status
check_program(const json_t *config, const char *config_path, spw_error *err)
{
    const json_t *map = json_object_get(json_object_get(config, "auto_map"), "AutoTokenizer");
    const char *named = json_string_value(json_is_array(map) ? json_array_get(map, 0) : map), *dot, *slash;
    char path[TOK_PATH_BYTES + 128], *program;
    spw_status st = SPW_OK;
    if (named == NULL || (dot = strchr(named, '.')) == NULL || dot - named > 100 || memchr(named, '/', strlen(named)))
        return SPW_OK;
    slash = strrchr(config_path, '/');
    snprintf(path, sizeof path, "%.*s%.*s.py", slash != NULL ? (int)(slash + 1 - config_path) : 0, config_path,
             (int)(dot - named), named);
    if (access(path, F_OK) != 0)
        return SPW_OK;
    SPW_TRY(spw_file_read_text(path, FILE_BYTES_MAX, &program, err));
    for (size_t i = 0; st == SPW_OK && spw__tok_kimi_parts[i] != NULL; i++) {
        if (strstr(program, spw__tok_kimi_parts[i]) == NULL)
            st = SPW_RAISE(err, SPW_EUNSUPPORTED,
                           "%s cuts texts by another pattern than Kimi-K2's, the only one that is known for %s: %.100s "
                           "is not in it",
                           path, "tiktoken.model", spw__tok_kimi_parts[i]);
    }
    spw_mem_free(program);
    return st;
}

static spw_status
add_pattern(spw_tokenizer *t, const json_t *config, const char *config_path, spw_error *err)
{
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));
    char pattern[TOK_PATTERN_BYTES] = "";
    if (class == NULL || strcmp(class, "TikTokenTokenizer") != 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s: by which pattern texts are cut is said by no file but its program; known is that of the "
                         "tokenizer_class TikTokenTokenizer (Kimi-K2's), and %s says %.100s",
                         t->path, config_path, class != NULL ? class : "none");
    SPW_TRY(check_program(config, config_path, err));
    for (size_t i = 0, used = 0; spw__tok_kimi_parts[i] != NULL; i++)
        used +=
            (size_t)snprintf(pattern + used, sizeof pattern - used, "%s%s", i > 0 ? "|" : "", spw__tok_kimi_parts[i]);
    t->cuts = true;
    t->ignore_merges = true; /* a piece that is a token is not looked at further */
    return spw__tok_pattern_add(t, pattern, TOK_REGEX, t->path, "pattern", err);
}

spw_status
spw__tok_tiktoken_load(spw_tokenizer *t, const json_t *config, const char *config_path, spw_error *err)
{
    json_t *vocab = json_object(), *added = NULL;
    spw_status st = vocab != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "%s: the vocabulary", t->path);
    if (st == SPW_OK)
        st = add_pattern(t, config, config_path, err);
    if (st == SPW_OK)
        st = read_vocab(t, vocab, err);
    if (st == SPW_OK)
        st = spw__tok_added_of_config(&added, config, config_path, err);
    if (st == SPW_OK)
        st = add_reserved(t, added, json_object_size(vocab), config_path, err);
    if (st == SPW_OK)
        st = spw__tok_vocab_build(t, vocab, added, config_path, err);
    if (st == SPW_OK)
        st = spw__tok_merges_of_ranks(t, err);
    json_decref(vocab);
    json_decref(added);
    return st;
}
