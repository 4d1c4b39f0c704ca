/*
 * What the tokens are: the vocabulary with its byte alphabet, added tokens, and the merges as a hash table from a pair of
 * ids to rank and result. Built once at open; every contradiction in the files is an error that names its place.
 */
#include "tokenizer_internal.h"
#include <stdio.h>

/* ---------------------------------------------------------------- byte alphabet */

/* The byte that a character of the alphabet stands for: itself where it can be seen, else counted from U+0100. */
static int
byte_of(uint32_t cp)
{
    if ((cp >= 0x21 && cp <= 0x7e) || (cp >= 0xa1 && cp <= 0xac) || (cp >= 0xae && cp <= 0xff))
        return (int)cp;
    if (cp < 0x100 || cp > 0x143)
        return -1;
    cp -= 0x100;
    return cp < 33 ? (int)cp : cp < 67 ? 0x7f + (int)cp - 33 : 0xad;
}

uint64_t
spw__tok_bytes_of(const char *spelled, char *bytes)
{
    uint64_t length = strlen(spelled), used = 0;
    for (uint64_t at = 0; at < length;) {
        uint32_t cp, step = spw__utf8_next(spelled + at, length - at, &cp);
        int byte = step == 0 ? -1 : byte_of(cp);
        if (byte < 0)
            return UINT64_MAX;
        bytes[used++] = (char)byte;
        at += step;
    }
    return used;
}

void
spw__tok_spell(const unsigned char *bytes, uint64_t count, char *spelled)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t b = bytes[i], cp = b;
        if (byte_of(b) < 0)
            cp = b < 0x21 ? 0x100 + b : b == 0xad ? 0x143 : 0x121 + (b - 0x7f);
        if (cp < 0x80) {
            *spelled++ = (char)cp;
        } else {
            *spelled++ = (char)(0xc0 | cp >> 6);
            *spelled++ = (char)(0x80 | (cp & 0x3f));
        }
    }
    *spelled = '\0';
}

/* ---------------------------------------------------------------- vocabulary */

int32_t
spw__tok_by_text(const spw_tokenizer *t, const char *text, uint64_t bytes)
{
    for (uint64_t at = spw_checksum(text, bytes) & t->by_text_mask; t->by_text[at] >= 0;
         at = (at + 1) & t->by_text_mask) {
        const tok_token *k = &t->tokens[t->by_text[at]];
        if (k->bytes == bytes && memcmp(t->pool + k->offset, text, bytes) == 0)
            return t->by_text[at];
    }
    return -1;
}

static spw_status
no_room(const spw_tokenizer *t, spw_error *err)
{
    return SPW_RAISE(err, SPW_ENOMEM, "%s: a vocabulary of %llu tokens", t->path, (unsigned long long)t->vocab);
}

static uint64_t
power_of_two(uint64_t at_least)
{
    uint64_t size = 16;
    while (size < at_least)
        size *= 2;
    return size;
}

/* An id: a whole number that is not too large for the tables. */
static bool
is_id(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= TOK_ID_MAX;
}

static spw_status
measure(spw_tokenizer *t, json_t *vocab, json_t *added, const char *added_path, spw_error *err)
{
    const char *spelled;
    json_t *v;
    size_t i;
    json_object_foreach(vocab, spelled, v)
    {
        if (!is_id(v))
            return SPW_RAISE(err, SPW_ECORRUPT,
                             "%s: model.vocab: the id of \"%.100s\" is not a whole number from 0 to %d", t->path,
                             spelled, TOK_ID_MAX);
        t->pool_bytes += strlen(spelled);
        if ((uint64_t)json_integer_value(v) >= t->vocab)
            t->vocab = (uint64_t)json_integer_value(v) + 1;
    }
    json_array_foreach(added, i, v)
    {
        if (!is_id(json_object_get(v, "id")))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: added_tokens[%zu].id is not a whole number from 0 to %d",
                             added_path, i, TOK_ID_MAX);
        if (json_string_length(json_object_get(v, "content")) == 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: added_tokens[%zu].content is not a text", added_path, i);
        t->pool_bytes += json_string_length(json_object_get(v, "content"));
        if ((uint64_t)json_integer_value(json_object_get(v, "id")) >= t->vocab)
            t->vocab = (uint64_t)json_integer_value(json_object_get(v, "id")) + 1;
    }
    return SPW_OK;
}

/* Whether words can be merged one by one: no token has a space behind another character. */
static bool
has_words(const spw_tokenizer *t)
{
    for (uint64_t id = 0; id < t->vocab; id++) {
        const char *text = t->pool + t->tokens[id].offset;
        for (uint32_t i = 1; i < t->tokens[id].bytes; i++) {
            if (text[i] == ' ' && text[i - 1] != ' ')
                return false;
        }
    }
    return true;
}

static spw_status
take_vocab(spw_tokenizer *t, json_t *vocab, spw_error *err)
{
    const char *spelled;
    json_t *v;
    memset(t->byte_id, 0xff, sizeof t->byte_id); /* -1 */
    json_object_foreach(vocab, spelled, v)
    {
        int32_t id = (int32_t)json_integer_value(v);
        tok_token *k = &t->tokens[id];
        int byte = -1;
        uint64_t length = t->chars ? spw__tok_chars_of(spelled, t->pool + t->pool_used, &byte)
                                   : spw__tok_bytes_of(spelled, t->pool + t->pool_used);
        bool in_alphabet = length != UINT64_MAX && byte < 0;
        if (k->flags != 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: model.vocab: id %d is \"%.100s\" and another token too", t->path,
                             id, spelled);
        if (length == UINT64_MAX) { /* a token that no text leads to, unless it is an added one */
            length = strlen(spelled);
            memcpy(t->pool + t->pool_used, spelled, length);
        }
        if (length > UINT32_MAX)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: model.vocab: token %d is too long", t->path, id);
        *k = (tok_token){.offset = t->pool_used, .bytes = (uint32_t)length, .flags = TOK_PRESENT};
        t->pool_used += length;
        if (byte >= 0)
            t->byte_id[byte] = id;
        if (in_alphabet && t->chars && spw__tok_by_text(t, t->pool + k->offset, length) >= 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: model.vocab: \"%.100s\" reads like another token", t->path,
                             spelled);
        if (in_alphabet) {
            uint64_t at = spw_checksum(t->pool + k->offset, length) & t->by_text_mask;
            while (t->by_text[at] >= 0)
                at = (at + 1) & t->by_text_mask;
            t->by_text[at] = id;
        }
    }
    for (int b = 0; t->chars && b < 256; b++) {
        if (t->byte_id[b] < 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "%s: model.vocab has no token <0x%02X>, which model.byte_fallback needs", t->path,
                             (unsigned)b);
    }
    for (int b = 0; !t->chars && b < 256; b++) {
        char byte = (char)b;
        if ((t->byte_id[b] = spw__tok_by_text(t, &byte, 1)) < 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "%s: model.vocab has no token for byte 0x%02x: this is no byte-level vocabulary", t->path,
                             b);
    }
    return SPW_OK;
}

/* One flag of an added token; it may be missing. */
static spw_status
flag(const json_t *token, const char *name, bool *out, const char *path, size_t i, spw_error *err)
{
    const json_t *v = json_object_get(token, name);
    if (v != NULL && !json_is_boolean(v))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: added_tokens[%zu].%s is neither true nor false", path, i, name);
    *out = json_is_true(v);
    return SPW_OK;
}

static spw_status
take_added(spw_tokenizer *t, json_t *vocab, json_t *v, size_t i, const char *path, spw_error *err)
{
    const char *content = json_string_value(json_object_get(v, "content")), *name;
    int32_t id = (int32_t)json_integer_value(json_object_get(v, "id"));
    const json_t *in_vocab = json_object_get(vocab, content);
    tok_token *k = &t->tokens[id];
    tok_added *a = &t->added[i];
    bool single_word = false;
    json_t *other;
    json_object_foreach(v, name, other)
    {
        if (strcmp(name, "id") != 0 && strcmp(name, "content") != 0 && strcmp(name, "single_word") != 0 &&
            strcmp(name, "lstrip") != 0 && strcmp(name, "rstrip") != 0 && strcmp(name, "normalized") != 0 &&
            strcmp(name, "special") != 0 && strcmp(name, "__type") != 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: added_tokens[%zu].%.100s is not known", path, i, name);
    }
    SPW_TRY(flag(v, "single_word", &single_word, path, i, err));
    SPW_TRY(flag(v, "lstrip", &a->lstrip, path, i, err));
    SPW_TRY(flag(v, "rstrip", &a->rstrip, path, i, err));
    SPW_TRY(flag(v, "normalized", &a->normalized, path, i, err));
    SPW_TRY(flag(v, "special", &a->special, path, i, err));
    if (single_word)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: added_tokens[%zu].single_word: true is not supported", path, i);
    if ((in_vocab != NULL && json_integer_value(in_vocab) != id) || (in_vocab == NULL && k->flags != 0))
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s: added_tokens[%zu].id: %d and \"%.100s\" do not belong together elsewhere", path, i, id,
                         content);
    if (k->flags & TOK_ADDED)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: added_tokens[%zu].id: %d is there twice", path, i, id);
    a->bytes = strlen(content);
    a->id = id;
    memcpy(t->pool + t->pool_used, content, a->bytes);
    a->text = t->pool + t->pool_used;
    if (!t->chars ||
        in_vocab == NULL) /* else merges make it too, and what it stands for is as it was: "▁▁" two spaces */
        *k = (tok_token){.offset = t->pool_used, .bytes = (uint32_t)a->bytes};
    k->flags = TOK_PRESENT | TOK_ADDED | (a->special ? TOK_SPECIAL : 0);
    t->pool_used += a->bytes;
    return SPW_OK;
}

spw_status
spw__tok_vocab_build(spw_tokenizer *t, json_t *vocab, json_t *added, const char *added_path, spw_error *err)
{
    uint64_t slots = power_of_two(2 * json_object_size(vocab) + 1);
    json_t *v;
    size_t i;
    SPW_TRY(measure(t, vocab, added, added_path, err));
    t->tokens = spw_mem_calloc(t->vocab > 0 ? t->vocab : 1, sizeof *t->tokens);
    t->pool = spw_mem_zalloc(t->pool_bytes + 1);
    t->by_text = spw_mem_calloc(slots, sizeof *t->by_text);
    t->added = spw_mem_calloc(json_array_size(added) + 1, sizeof *t->added);
    if (t->tokens == NULL || t->pool == NULL || t->by_text == NULL || t->added == NULL)
        return no_room(t, err);
    memset(t->by_text, 0xff, slots * sizeof *t->by_text); /* -1 */
    t->by_text_mask = slots - 1;
    SPW_TRY(take_vocab(t, vocab, err));
    t->words = t->chars && has_words(t); /* added tokens are no part of it: they are cut out before */
    json_array_foreach(added, i, v) SPW_TRY(take_added(t, vocab, v, i, added_path, err));
    t->added_count = (uint32_t)json_array_size(added);
    return SPW_OK;
}

/* ---------------------------------------------------------------- merges */

typedef struct merge_list {
    spw_tokenizer *t;
    json_t *vocab;
    const char *path;
    bool lines;  /* of merges.txt */
    uint64_t at; /* line, or index of model.merges */
    uint32_t rank;
    char *text; /* the two halves: "left\0right\0leftright" */
    uint64_t text_bytes;
} merge_list;

static spw_status
bad_merge(const merge_list *m, spw_error *err, const char *why, const char *what)
{
    if (m->lines)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s, line %llu: %s%.100s", m->path, (unsigned long long)m->at, why, what);
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: model.merges[%llu]: %s%.100s", m->path, (unsigned long long)m->at, why,
                     what);
}

static spw_status
add_merge(merge_list *m, const char *left, uint64_t left_bytes, const char *right, uint64_t right_bytes, spw_error *err)
{
    const char *key[3];
    uint32_t id[3];
    SPW_TRY(spw__tok_grow((void **)&m->text, &m->text_bytes, 2 * (left_bytes + right_bytes) + 3, 0, "a merge", err));
    memcpy(m->text, left, left_bytes);
    m->text[left_bytes] = '\0';
    memcpy(m->text + left_bytes + 1, right, right_bytes);
    m->text[left_bytes + right_bytes + 1] = '\0';
    key[0] = m->text;
    key[1] = m->text + left_bytes + 1;
    key[2] = m->text + left_bytes + right_bytes + 2;
    memcpy((char *)(uintptr_t)key[2], left, left_bytes);
    memcpy((char *)(uintptr_t)key[2] + left_bytes, right, right_bytes);
    m->text[2 * (left_bytes + right_bytes) + 2] = '\0';
    for (int i = 0; i < 3; i++) {
        const json_t *v = json_object_get(m->vocab, key[i]);
        if (v == NULL)
            return bad_merge(m, err, "not in the vocabulary: ", key[i]);
        id[i] = (uint32_t)json_integer_value(v);
    }
    spw__tok_pair_set(m->t, id[0], id[1], m->rank++, (int32_t)id[2]);
    return SPW_OK;
}

static spw_status
add_spaced(merge_list *m, const char *text, uint64_t bytes, spw_error *err)
{
    const char *space = memchr(text, ' ', bytes);
    if (space == NULL || memchr(space + 1, ' ', bytes - (uint64_t)(space + 1 - text)) != NULL)
        return bad_merge(m, err, "not two tokens with a space between them", "");
    return add_merge(m, text, (uint64_t)(space - text), space + 1, bytes - (uint64_t)(space + 1 - text), err);
}

static spw_status
add_array(merge_list *m, json_t *merges, spw_error *err)
{
    json_t *v;
    size_t i;
    json_array_foreach(merges, i, v)
    {
        const char *left = json_string_value(json_array_get(v, 0)), *right = json_string_value(json_array_get(v, 1));
        m->at = i;
        if (json_is_string(v))
            SPW_TRY(add_spaced(m, json_string_value(v), json_string_length(v), err));
        else if (json_array_size(v) == 2 && left != NULL && right != NULL)
            SPW_TRY(add_merge(m, left, strlen(left), right, strlen(right), err));
        else
            return bad_merge(m, err, "neither two texts nor one", "");
    }
    return SPW_OK;
}

static spw_status
add_lines(merge_list *m, const char *text, spw_error *err)
{
    static const char version[] = "#version";
    for (const char *end; *text != '\0'; text = *end == '\0' ? end : end + 1) {
        uint64_t bytes;
        end = strchr(text, '\n');
        if (end == NULL)
            end = text + strlen(text);
        m->at++;
        bytes = (uint64_t)(end - text);
        if (bytes > 0 && text[bytes - 1] == '\r')
            bytes--;
        if (bytes > 0 && strncmp(text, version, strlen(version)) != 0)
            SPW_TRY(add_spaced(m, text, bytes, err));
    }
    return SPW_OK;
}

/* Room for so many merges. */
static spw_status
pairs_create(spw_tokenizer *t, const char *path, uint64_t count, spw_error *err)
{
    uint64_t slots = power_of_two(2 * count);
    t->pairs = spw_mem_calloc(slots, sizeof *t->pairs);
    if (t->pairs == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s: %llu merges", path, (unsigned long long)count);
    for (uint64_t i = 0; i < slots; i++)
        t->pairs[i].key = UINT64_MAX;
    t->pair_mask = slots - 1;
    return SPW_OK;
}

/* merges: model.merges, or with lines one JSON string that holds merges.txt. Of a pair that is there twice the last counts. */
spw_status
spw__tok_merges_build(spw_tokenizer *t, json_t *vocab, json_t *merges, const char *path, bool lines, spw_error *err)
{
    merge_list m = {.t = t, .vocab = vocab, .path = path, .lines = lines};
    const char *text = lines ? json_string_value(merges) : "";
    uint64_t count = json_array_size(merges) + 1;
    spw_status st;
    for (; *text != '\0'; text++)
        count += *text == '\n';
    SPW_TRY(pairs_create(t, path, count, err));
    st = lines ? add_lines(&m, json_string_value(merges), err) : add_array(&m, merges, err);
    spw_mem_free(m.text);
    return st;
}

/* The ways of cutting token id into two: how many, and with set, each of them a merge. */
static uint64_t
cuts_of(spw_tokenizer *t, uint64_t id, bool set)
{
    const tok_token *k = &t->tokens[id];
    const char *text = t->pool + k->offset;
    uint64_t count = 0;
    for (uint32_t at = 1; (k->flags & TOK_PRESENT) && !(k->flags & TOK_ADDED) && at < k->bytes; at++) {
        int32_t left = spw__tok_by_text(t, text, at);
        int32_t right = left >= 0 ? spw__tok_by_text(t, text + at, k->bytes - at) : -1;
        if (right < 0)
            continue;
        count++;
        if (set)
            spw__tok_pair_set(t, (uint32_t)left, (uint32_t)right, (uint32_t)id, (int32_t)id);
    }
    return count;
}

spw_status
spw__tok_merges_of_ranks(spw_tokenizer *t, spw_error *err)
{
    uint64_t count = 0;
    for (uint64_t id = 0; id < t->vocab; id++)
        count += cuts_of(t, id, false);
    SPW_TRY(pairs_create(t, t->path, count + 1, err));
    for (uint64_t id = 0; id < t->vocab; id++)
        (void)cuts_of(t, id, true);
    return SPW_OK;
}
