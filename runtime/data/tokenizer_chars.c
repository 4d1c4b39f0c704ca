/*
 * Vocabularies by characters, as SentencePiece makes them (Llama 2, Mistral, Mixtral, Yi, Gemma): a word begins with the space before
 * it, spelled U+2581 in the files; merging starts from characters, and a character that has no token from the tokens of its
 * bytes ("<0x0A>"). Here such a vocabulary is kept with plain spaces, and U+2581 in a text, which those tokenizers take for a
 * space, becomes one; so a text is what it was but for the space that is put before it.
 *
 * A text is one piece to them. Where no token has a space behind another character, no merge goes across the start of a
 * word, and the words are merged one by one, with the cache.
 */
#include "tokenizer_internal.h"
#include <stdio.h>
#include <stdlib.h>

#define SPACE_SIGN "\xe2\x96\x81" /* U+2581 */
enum { SIGN_BYTES = 3 };

/* ---------------------------------------------------------------- text */

spw_status
spw__tok_chars_form(tok_scratch *s, bool prefix, const char *text, uint64_t bytes, const char **out,
                    uint64_t *bytes_out, spw_error *err)
{
    uint64_t used = 0;
    SPW_TRY(spw__tok_grow((void **)&s->normal, &s->normal_bytes, bytes + 1, 0, "a text with its spaces", err));
    if (prefix && bytes > 0)
        s->normal[used++] = ' ';
    for (uint64_t at = 0; at < bytes;) {
        bool sign = bytes - at >= SIGN_BYTES && memcmp(text + at, SPACE_SIGN, SIGN_BYTES) == 0;
        s->normal[used++] = sign ? ' ' : text[at];
        at += sign ? SIGN_BYTES : 1;
    }
    *out = s->normal;
    *bytes_out = used;
    return SPW_OK;
}

uint64_t
spw__tok_chars_space(const char *text, uint64_t bytes)
{
    if (bytes >= SIGN_BYTES && memcmp(text, SPACE_SIGN, SIGN_BYTES) == 0)
        return SIGN_BYTES;
    return bytes > 0 && text[0] == ' ';
}

spw_status
spw__tok_chars_split(const tok_run *r, const char *text, uint64_t bytes)
{
    const spw_tokenizer *t = r->t;
    uint64_t begin = 0;
    if (!t->chars_early) {
        bool at_start = t->prefix == TOK_PREFIX_MISSING || (t->prefix == TOK_PREFIX_FIRST && text == r->begin);
        bool prefix = at_start && !(r->rest && text == r->begin) && spw__tok_chars_space(text, bytes) == 0;
        SPW_TRY(spw__tok_chars_form(r->s, prefix, text, bytes, &text, &bytes, r->err));
    }
    for (uint64_t at = 1; t->words && at < bytes; at++) {
        if (text[at] != ' ' || text[at - 1] == ' ')
            continue;
        SPW_TRY(spw__tok_word(r, text + begin, at - begin));
        begin = at;
    }
    return begin < bytes ? spw__tok_word(r, text + begin, bytes - begin) : SPW_OK;
}

uint64_t
spw__tok_chars_ids(const spw_tokenizer *t, const char *text, uint64_t bytes, uint32_t *ids)
{
    uint64_t count = 0;
    for (uint64_t at = 0; at < bytes;) {
        uint32_t cp, length = spw__utf8_next(text + at, bytes - at, &cp);
        int32_t id = length > 0 ? spw__tok_by_text(t, text + at, length) : -1;
        if (id >= 0)
            ids[count++] = (uint32_t)id;
        for (uint32_t i = 0; id < 0 && i < (length > 0 ? length : 1); i++)
            ids[count++] = (uint32_t)t->byte_id[(unsigned char)text[at + i]];
        at += length > 0 ? length : 1;
    }
    return count;
}

/* ---------------------------------------------------------------- vocabulary */

static int
hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

uint64_t
spw__tok_chars_of(const char *spelled, char *bytes, int *byte)
{
    uint64_t used = 0, length = strlen(spelled);
    *byte = -1;
    if (length == 6 && strncmp(spelled, "<0x", 3) == 0 && spelled[5] == '>' && hex_digit(spelled[3]) >= 0 &&
        hex_digit(spelled[4]) >= 0) {
        *byte = 16 * hex_digit(spelled[3]) + hex_digit(spelled[4]);
        bytes[0] = (char)*byte;
        return 1;
    }
    while (*spelled != '\0') {
        bool sign = strncmp(spelled, SPACE_SIGN, SIGN_BYTES) == 0;
        bytes[used++] = sign ? ' ' : *spelled;
        spelled += sign ? SIGN_BYTES : 1;
    }
    return used;
}

/* ---------------------------------------------------------------- tokenizer.json */

static const char *
member(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));
    return text != NULL ? text : "";
}

static spw_status
unknown(const char *path, const char *field, const json_t *v, spw_error *err)
{
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    spw_status st = SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s: %.100s is not supported with model.byte_fallback", path,
                              field, text != NULL ? text : "it");
    free(text);
    return st;
}

/* The spaces' sign put before a text, and in the place of spaces. */
static spw_status
read_normalizer(spw_tokenizer *t, const json_t *v, const char *path, bool *replaces, spw_error *err)
{
    const json_t *list = json_object_get(v, "normalizers");
    const char *type = member(v, "type");
    if (v == NULL || json_is_null(v))
        return SPW_OK;
    t->chars_early = true;
    if (strcmp(type, "Sequence") == 0 && json_is_array(list) && json_object_size(v) == 2) {
        const json_t *part;
        size_t i;
        json_array_foreach(list, i, part)
        {
            if (strcmp(member(part, "type"), "Sequence") == 0)
                return unknown(path, "normalizer", v, err);
            SPW_TRY(read_normalizer(t, part, path, replaces, err));
        }
        return SPW_OK;
    }
    if (strcmp(type, "Prepend") == 0 && strcmp(member(v, "prepend"), SPACE_SIGN) == 0 && json_object_size(v) == 2 &&
        t->prefix == TOK_PREFIX_NEVER) {
        t->prefix = TOK_PREFIX_ALWAYS;
        return SPW_OK;
    }
    if (strcmp(type, "Replace") == 0 && strcmp(member(v, "content"), SPACE_SIGN) == 0 && json_object_size(v) == 3 &&
        strcmp(member(json_object_get(v, "pattern"), "String"), " ") == 0) {
        *replaces = true;
        return SPW_OK;
    }
    return unknown(path, "normalizer", v, err);
}

/* Gemma cuts at spaces, of which its normalizer left none. */
static bool
cuts_nowhere(const spw_tokenizer *t, const json_t *v, bool replaced)
{
    return t->chars_early && replaced && strcmp(member(v, "type"), "Split") == 0 &&
           strcmp(member(json_object_get(v, "pattern"), "String"), " ") == 0 &&
           strcmp(member(v, "behavior"), "MergedWithPrevious") == 0 && json_is_false(json_object_get(v, "invert")) &&
           json_object_size(v) == 4;
}

/* Metaspace does the same to each stretch between added tokens; a text is not split. */
static spw_status
read_pre_tokenizer(spw_tokenizer *t, const json_t *v, const char *path, bool *replaces, spw_error *err)
{
    const char *scheme = member(v, "prepend_scheme"), *name;
    json_t *other;
    if (v == NULL || json_is_null(v) || cuts_nowhere(t, v, *replaces))
        return SPW_OK;
    json_object_foreach((json_t *)(uintptr_t)v, name, other)
    {
        if (strcmp(name, "type") != 0 && strcmp(name, "replacement") != 0 && strcmp(name, "prepend_scheme") != 0 &&
            strcmp(name, "split") != 0)
            return unknown(path, "pre_tokenizer", v, err);
    }
    if (strcmp(member(v, "type"), "Metaspace") != 0 || strcmp(member(v, "replacement"), SPACE_SIGN) != 0 ||
        !json_is_false(json_object_get(v, "split")) || t->chars_early)
        return unknown(path, "pre_tokenizer", v, err);
    if (strcmp(scheme, "first") != 0 && strcmp(scheme, "always") != 0 && strcmp(scheme, "never") != 0)
        return unknown(path, "pre_tokenizer", v, err);
    t->prefix = scheme[0] == 'f' ? TOK_PREFIX_FIRST : scheme[0] == 'a' ? TOK_PREFIX_MISSING : TOK_PREFIX_NEVER;
    *replaces = true;
    return SPW_OK;
}

/* It undoes the above: its parts are checked by name, what they do is spw_tokenizer_decode()'s. */
static spw_status
read_decoder(const json_t *v, const char *path, spw_error *err)
{
    static const char *const parts[] = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"};
    const json_t *list = json_object_get(v, "decoders"), *part;
    bool known = false;
    size_t at;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        known = known || strcmp(member(v, "type"), parts[i]) == 0;
    if (v == NULL || json_is_null(v) || known)
        return SPW_OK;
    if (strcmp(member(v, "type"), "Sequence") != 0 || !json_is_array(list))
        return unknown(path, "decoder", v, err);
    json_array_foreach(list, at, part)
    {
        if (strcmp(member(part, "type"), "Sequence") == 0)
            return unknown(path, "decoder", v, err);
        SPW_TRY(read_decoder(part, path, err));
    }
    return SPW_OK;
}

spw_status
spw__tok_chars_load(spw_tokenizer *t, const json_t *root, const char *path, spw_error *err)
{
    bool replaces = false;
    if (t->ignore_merges)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s: model.ignore_merges: true is not supported with model.byte_fallback", path);
    SPW_TRY(read_normalizer(t, json_object_get(root, "normalizer"), path, &replaces, err));
    SPW_TRY(read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer"), path, &replaces, err));
    if (!replaces)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s: neither normalizer nor pre_tokenizer puts U+2581 in the place of spaces, which "
                         "model.byte_fallback needs here",
                         path);
    return read_decoder(json_object_get(root, "decoder"), path, err);
}
