/*
 * libFuzzer target for tokenizers. The first byte picks what the rest is: members that replace those of a small
 * tokenizer.json; a pattern and, after a zero, text for it; lines behind those of a small tiktoken.model; or text for tokenizers with and
 * without NFC, and by characters. What is accepted encodes, and what was encoded comes back; without NFC and with tokens that keep white space
 * it is the same bytes.
 */
#include "tokenizer_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const char split_json[] =
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\"},\"behavior\":"
    "\"Isolated\","
    "\"invert\":false},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}";

static void
must(bool good)
{
    if (!good)
        __builtin_trap();
}

/* 256 bytes, a few merges, three added tokens. */
static json_t *
small(void)
{
    static const char *const merges[] = {"a b", "ab a", "\xc4\xa0 t", "h e", "\xc4\xa0t he", "a a", "aa aa", "1 2"};
    json_t *root =
        json_loads("{\"added_tokens\":[{\"id\":300,\"content\":\"<|endoftext|>\",\"special\":true},{\"id\":301,"
                   "\"content\":\"<x>\",\"lstrip\":true,\"rstrip\":true},{\"id\":302,\"content\":\"<xy\","
                   "\"normalized\":true}],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
                   "\"add_prefix_space\":false},\"decoder\":null,\"model\":{\"type\":\"BPE\",\"vocab\":{},"
                   "\"merges\":[]}}",
                   0, NULL);
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    int rest = 256, id = 256;
    for (int b = 0; b < 256; b++) {
        int cp = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae ? b : rest++;
        char text[3] = {(char)cp};
        if (cp >= 0x80) {
            text[0] = (char)(0xc0 | cp >> 6);
            text[1] = (char)(0x80 | (cp & 0x3f));
        }
        json_object_set_new(vocab, text, json_integer(b));
    }
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
        char whole[32];
        const char *space = strchr(merges[i], ' ');
        snprintf(whole, sizeof whole, "%.*s%s", (int)(space - merges[i]), merges[i], space + 1);
        json_object_set_new(vocab, whole, json_integer(id++));
        json_array_append_new(json_object_get(json_object_get(root, "model"), "merges"), json_string(merges[i]));
    }
    return root;
}

/* NULL: refused, with a message. */
static spw_tokenizer *
open_json(const json_t *root)
{
    static char path[300];
    spw_tokenizer *t = NULL;
    spw_error err = {0};
    spw_status st;
    if (path[0] == '\0')
        snprintf(path, sizeof path, "%s/spw-fuzz-tokenizer-%ld", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp",
                 (long)getpid());
    must(json_dump_file(root, path, JSON_COMPACT) == 0);
    st = spw_tokenizer_open(&t, path, &err);
    must((st == SPW_OK) == (t != NULL) && (st == SPW_OK || strstr(err.message, path) != NULL));
    unlink(path);
    return t;
}

static void
try_text(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, bool same)
{
    spw_tokens ids = {0}, parts = {0};
    uint64_t back_bytes, cut;
    spw_error err = {0};
    char *back;
    if (spw_tokenizer_encode(t, text, bytes, special, &ids, &err) != SPW_OK) {
        must(!same && err.status == SPW_EUNSUPPORTED && ids.count == 0); /* a pattern of the fuzzer's that gives up */
        spw_tokens_free(&ids);
        return;
    }
    must(spw_tokenizer_decode(t, ids.ids, ids.count, true, NULL, 0, &back_bytes, NULL) == SPW_OK);
    back = malloc(back_bytes + 1);
    must(spw_tokenizer_decode(t, ids.ids, ids.count, true, back, back_bytes, &back_bytes, NULL) == SPW_OK);
    if (same)
        must(back_bytes == bytes && memcmp(back, text, bytes) == 0);
    cut = spw_tokenizer_cut(t, text, bytes, bytes / 2);
    must(spw_tokenizer_encode(t, text, cut, special, &parts, NULL) == SPW_OK);
    must(spw_tokenizer_encode_rest(t, text + cut, bytes - cut, special, &parts, NULL) == SPW_OK);
    must(parts.count == ids.count && (ids.count == 0 || memcmp(parts.ids, ids.ids, ids.count * sizeof *ids.ids) == 0));
    spw_tokens_free(&ids);
    spw_tokens_free(&parts);
    free(back);
}

static void
try_members(const char *text, size_t bytes)
{
    json_t *root = small(), *given = json_loadb(text, bytes, 0, NULL), *v;
    const char *name;
    spw_tokenizer *t;
    json_object_foreach(given, name, v)
    {
        json_t *held = json_object_get(root, name);
        if (json_is_object(held) && json_is_object(v) && strcmp(name, "model") == 0)
            json_object_update(held, v);
        else
            json_object_set(root, name, v);
    }
    if ((t = open_json(root)) != NULL)
        try_text(t, text, bytes, true, false);
    spw_tokenizer_close(t);
    json_decref(given);
    json_decref(root);
}

static void
try_pattern(const char *text, size_t bytes)
{
    const char *zero = memchr(text, '\0', bytes);
    json_t *root = small(), *split = json_loads(split_json, 0, NULL), *pattern;
    spw_tokenizer *t;
    if (zero != NULL && (pattern = json_string(text)) != NULL) {
        json_object_set_new(json_object_get(json_array_get(json_object_get(split, "pretokenizers"), 0), "pattern"),
                            "Regex", pattern);
        json_object_set(root, "pre_tokenizer", split);
        json_object_set_new(root, "added_tokens", json_array());
        if ((t = open_json(root)) != NULL)
            try_text(t, zero + 1, (uint64_t)(text + bytes - zero - 1), false, false);
        spw_tokenizer_close(t);
    }
    json_decref(split);
    json_decref(root);
}

static void
try_known(const char *text, size_t bytes, bool special)
{
    static spw_tokenizer *plain, *changing;
    if (plain == NULL) {
        json_t *root = small(), *split = json_loads(split_json, 0, NULL);
        changing = open_json(root);
        json_object_set_new(json_object_get(json_array_get(json_object_get(split, "pretokenizers"), 0), "pattern"),
                            "Regex", json_string(spw__tok_qwen2_pattern));
        json_object_set_new(root, "pre_tokenizer", split);
        json_object_del(json_array_get(json_object_get(root, "added_tokens"), 1), "lstrip");
        json_object_del(json_array_get(json_object_get(root, "added_tokens"), 1), "rstrip");
        plain = open_json(root);
        spw_tokenizer_close(changing);
        json_object_set_new(root, "normalizer", json_loads("{\"type\":\"NFC\"}", 0, NULL));
        changing = open_json(root);
        json_decref(root);
        must(plain != NULL && changing != NULL && plain->cuts && changing->cuts);
    }
    try_text(plain, text, bytes, special, true);
    try_text(changing, text, bytes, special, false);
}

/* By characters: what was encoded comes back, and words that are merged one by one are the whole text's merges. */
static void
try_characters(const char *text, size_t bytes)
{
    static spw_tokenizer *words, *whole;
    spw_tokens by_word = {0}, at_once = {0};
    bool signs = false;
    if (words == NULL) {
        must(spw_tokenizer_open(&words, "tests/vectors/tok_bare.json", NULL) == SPW_OK && words->words);
        must(spw_tokenizer_open(&whole, "tests/vectors/tok_bare.json", NULL) == SPW_OK);
        whole->words = false;
    }
    for (size_t i = 0; i + 3 <= bytes; i++)
        signs = signs || memcmp(text + i, "\xe2\x96\x81", 3) == 0; /* they become spaces */
    try_text(words, text, bytes, false, !signs);
    must(spw_tokenizer_encode(words, text, bytes, false, &by_word, NULL) == SPW_OK);
    must(spw_tokenizer_encode(whole, text, bytes, false, &at_once, NULL) == SPW_OK);
    must(by_word.count == at_once.count &&
         (by_word.count == 0 || memcmp(by_word.ids, at_once.ids, by_word.count * sizeof *by_word.ids) == 0));
    spw_tokens_free(&by_word);
    spw_tokens_free(&at_once);
}

/* Behind the lines of 256 bytes; what is read encodes the text too, and gives it back. */
static void
try_ranks(const char *text, size_t bytes)
{
    static const char sixes[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static char path[300];
    char file[340];
    spw_tokenizer *t = NULL;
    spw_error err = {0};
    FILE *f;
    if (path[0] == '\0') {
        snprintf(path, sizeof path, "%s/spw-fuzz-ranks-%ld", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp",
                 (long)getpid());
        must(mkdir(path, 0700) == 0);
        snprintf(file, sizeof file, "%s/tokenizer_config.json", path);
        must((f = fopen(file, "w")) != NULL);
        must(fputs("{\"tokenizer_class\": \"TikTokenTokenizer\"}", f) >= 0 && fclose(f) == 0);
    }
    snprintf(file, sizeof file, "%s/tiktoken.model", path);
    must((f = fopen(file, "w")) != NULL);
    for (unsigned b = 0; b < 256; b++)
        fprintf(f, "%c%c== %u\n", sixes[b >> 2], sixes[(b & 3) << 4], b);
    must(fwrite(text, 1, bytes, f) == bytes && fclose(f) == 0);
    if (spw_tokenizer_open(&t, path, &err) == SPW_OK)
        try_text(t, text, bytes, false, true);
    else
        must(t == NULL && strstr(err.message, path) != NULL);
    spw_tokenizer_close(t);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *text;
    if (bytes < 2)
        return 0;
    text = malloc(bytes);
    memcpy(text, data + 1, bytes - 1);
    text[bytes - 1] = '\0';
    if (data[0] >= 0xc0)
        try_characters(text, bytes - 1);
    else if (data[0] >= 0xa0)
        try_ranks(text, strlen(text));
    else if (data[0] % 4 == 0)
        try_members(text, bytes - 1);
    else if (data[0] % 4 == 1)
        try_pattern(text, bytes - 1);
    else
        try_known(text, bytes - 1, data[0] % 4 == 3);
    free(text);
    return 0;
}
