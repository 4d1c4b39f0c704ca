/*
 * Reading a tokenizer's files: tokenizer.json, or vocab.json with merges.txt, or tiktoken.model, and tokenizer_config.json beside them. Every
 * field is known, or the file is refused with its name: a field that is skipped would be ids that are quietly others
 * than the model was trained on. Tables are left to tokenizer_vocab.c, patterns to tokenizer_split.c.
 */
#include "tokenizer_internal.h"
#include "spw_files.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { FILE_BYTES_MAX = 1 << 29, DEPTH_MAX = 4 };

static spw_status
read_json(spw_tokenizer *t, json_t **out, const char *path, size_t flags, spw_error *err)
{
    json_error_t why;
    char *text;
    *out = NULL;
    SPW_TRY(spw_file_read_text(path, FILE_BYTES_MAX, &text, err));
    t->key = spw_checksum_more(t->key, text, strlen(text));
    *out = json_loads(text, JSON_REJECT_DUPLICATES | flags, &why);
    spw_mem_free(text);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s, line %d: %s", path, why.line, why.text);
    if (json_is_object(*out))
        return SPW_OK;
    json_decref(*out);
    *out = NULL;
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: not a JSON object", path);
}

/* What a field says, for a message; a number or a list is named by what it is. */
static const char *
shown(const json_t *v)
{
    static const char *const types[] = {"an object", "a list", "a text", "a number",
                                        "a number",  "true",   "false",  "null"};
    return v == NULL ? "missing" : json_is_string(v) ? json_string_value(v) : types[json_typeof(v)];
}

static spw_status
refused(const char *path, const char *field, const json_t *v, spw_error *err)
{
    return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s: %.100s is not supported", path, field, shown(v));
}

/* Only these members, in a list that ends with NULL. */
static spw_status
only(const json_t *object, const char *path, const char *field, const char *const *names, spw_error *err)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)object, name, v)
    {
        uint32_t i = 0;
        while (names[i] != NULL && strcmp(names[i], name) != 0)
            i++;
        if (names[i] == NULL)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s%s%.100s is not known", path, field,
                             field[0] != '\0' ? "." : "", name);
    }
    return SPW_OK;
}
#define ONLY(object, path, field, err, ...) only(object, path, field, (const char *const[]){__VA_ARGS__, NULL}, err)

static bool
is_type(const json_t *object, const char *type)
{
    const char *held = json_string_value(json_object_get(object, "type"));
    return held != NULL && strcmp(held, type) == 0;
}

static bool
is_nothing(const json_t *v)
{
    return v == NULL || json_is_null(v) || (json_is_string(v) && json_string_length(v) == 0);
}

/* A member that is true or false, `otherwise` when it is missing. */
static spw_status
boolean(const json_t *object, const char *name, bool otherwise, bool *out, const char *path, const char *field,
        spw_error *err)
{
    const json_t *v = json_object_get(object, name);
    *out = v == NULL ? otherwise : json_is_true(v);
    if (v != NULL && !json_is_boolean(v))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.%s: %.100s is neither true nor false", path, field, name, shown(v));
    return SPW_OK;
}

/* ---------------------------------------------------------------- parts of tokenizer.json */

static spw_status
read_normalizer(spw_tokenizer *t, const json_t *v, const char *path, const char *field, int depth, spw_error *err)
{
    if (v == NULL || json_is_null(v))
        return SPW_OK;
    if (is_type(v, "NFC")) {
        t->nfc = true;
        return ONLY(v, path, field, err, "type");
    }
    if (is_type(v, "Sequence") && json_is_array(json_object_get(v, "normalizers")) && depth < DEPTH_MAX) {
        const json_t *part;
        size_t i;
        json_array_foreach(json_object_get(v, "normalizers"), i, part)
        {
            char name[160];
            snprintf(name, sizeof name, "%.100s.normalizers[%zu]", field, i);
            SPW_TRY(read_normalizer(t, part, path, name, depth + 1, err));
        }
        return ONLY(v, path, field, err, "type", "normalizers");
    }
    return refused(path, field, json_is_object(v) ? json_object_get(v, "type") : v, err);
}

static spw_status
read_byte_level(spw_tokenizer *t, const json_t *v, const char *path, const char *field, bool *done, spw_error *err)
{
    bool prefix, regex;
    SPW_TRY(ONLY(v, path, field, err, "type", "add_prefix_space", "trim_offsets", "use_regex"));
    SPW_TRY(boolean(v, "add_prefix_space", true, &prefix, path, field, err));
    SPW_TRY(boolean(v, "use_regex", true, &regex, path, field, err));
    if (prefix)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s.add_prefix_space: true is not supported", path, field);
    *done = true;
    return regex ? spw__tok_pattern_add(t, spw__tok_gpt2_pattern, TOK_REGEX, path, field, err) : SPW_OK;
}

static spw_status
read_split(spw_tokenizer *t, const json_t *v, const char *path, const char *field, spw_error *err)
{
    const json_t *pattern = json_object_get(v, "pattern"), *text = json_object_get(pattern, "Regex");
    const char *behavior = json_string_value(json_object_get(v, "behavior"));
    int kind = text != NULL ? TOK_REGEX : TOK_LITERAL;
    bool invert, alone;
    SPW_TRY(ONLY(v, path, field, err, "type", "pattern", "behavior", "invert"));
    SPW_TRY(boolean(v, "invert", false, &invert, path, field, err));
    alone = invert && behavior != NULL && strcmp(behavior, "Removed") == 0;
    if (!alone && (behavior == NULL || strcmp(behavior, "Isolated") != 0))
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s.behavior: %.100s is not supported", path, field,
                         shown(json_object_get(v, "behavior")));
    if (text == NULL)
        text = json_object_get(pattern, "String");
    if (json_object_size(pattern) != 1 || json_string_length(text) == 0 ||
        json_string_length(text) >= TOK_PATTERN_BYTES)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.pattern is neither {\"Regex\": text} nor {\"String\": text}", path,
                         field);
    SPW_TRY(spw__tok_pattern_add(t, json_string_value(text), kind, path, field, err));
    t->patterns[t->pattern_count - 1].alone = alone;
    return SPW_OK;
}

static spw_status
read_pre_tokenizer(spw_tokenizer *t, const json_t *v, const char *path, const char *field, int depth, bool *done,
                   spw_error *err)
{
    const json_t *part;
    bool one_by_one;
    size_t i;
    if (*done) /* what comes after sees characters of the byte alphabet */
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s: ByteLevel is not the last pre-tokenizer", path, field);
    if (is_type(v, "ByteLevel"))
        return read_byte_level(t, v, path, field, done, err);
    if (is_type(v, "Split"))
        return read_split(t, v, path, field, err);
    if (is_type(v, "Digits")) {
        SPW_TRY(ONLY(v, path, field, err, "type", "individual_digits"));
        SPW_TRY(boolean(v, "individual_digits", false, &one_by_one, path, field, err));
        return spw__tok_pattern_add(t, one_by_one ? "\\p{N}" : "\\p{N}+", TOK_REGEX, path, field, err);
    }
    if (!is_type(v, "Sequence") || !json_is_array(json_object_get(v, "pretokenizers")) || depth == DEPTH_MAX)
        return refused(path, field, json_is_object(v) ? json_object_get(v, "type") : v, err);
    SPW_TRY(ONLY(v, path, field, err, "type", "pretokenizers"));
    json_array_foreach(json_object_get(v, "pretokenizers"), i, part)
    {
        char name[160];
        snprintf(name, sizeof name, "%.100s.pretokenizers[%zu]", field, i);
        SPW_TRY(read_pre_tokenizer(t, part, path, name, depth + 1, done, err));
    }
    return SPW_OK;
}

/* "single": special tokens around the text. Those before it are kept for spw_tokenizer_begin(). */
static spw_status
read_template(spw_tokenizer *t, const json_t *v, const char *path, const char *field, spw_error *err)
{
    const json_t *single = json_object_get(v, "single"), *part;
    bool text_seen = false;
    size_t i;
    SPW_TRY(ONLY(v, path, field, err, "type", "single", "pair", "special_tokens"));
    if (!json_is_array(single))
        return refused(path, field, single, err);
    json_array_foreach(single, i, part)
    {
        const json_t *name = json_object_get(json_object_get(part, "SpecialToken"), "id");
        const json_t *ids = json_object_get(
            json_object_get(json_object_get(v, "special_tokens"), name == NULL ? "" : json_string_value(name)), "ids");
        const json_t *id = json_array_get(ids, 0);
        if (json_object_get(part, "Sequence") != NULL && !text_seen) {
            text_seen = true;
            continue;
        }
        if (!json_is_string(name) || json_array_size(ids) != 1 || !json_is_integer(id) || json_integer_value(id) < 0 ||
            (uint64_t)json_integer_value(id) >= t->vocab)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.single[%zu] is neither a text nor a token of the vocabulary",
                             path, field, i);
        if (text_seen || t->begin.count == SPW_BEGIN_MAX)
            return SPW_RAISE(
                err, SPW_EUNSUPPORTED,
                "%s: %s.single[%zu]: %s: up to %d tokens before the text are supported, and none behind it; a copy "
                "of this file whose post_processor is null leaves all of them out",
                path, field, i, json_string_value(name), SPW_BEGIN_MAX);
        t->begin.ids[t->begin.count++] = (int32_t)json_integer_value(id);
    }
    return SPW_OK;
}

static spw_status
read_post_processor(spw_tokenizer *t, const json_t *v, const char *path, const char *field, int depth, spw_error *err)
{
    if (v == NULL || json_is_null(v))
        return SPW_OK;
    if (is_type(v, "ByteLevel")) /* about offsets, which nobody asks for here */
        return ONLY(v, path, field, err, "type", "add_prefix_space", "trim_offsets", "use_regex");
    if (is_type(v, "TemplateProcessing"))
        return read_template(t, v, path, field, err);
    if (is_type(v, "Sequence") && json_is_array(json_object_get(v, "processors")) && depth < DEPTH_MAX) {
        const json_t *part;
        size_t i;
        json_array_foreach(json_object_get(v, "processors"), i, part)
        {
            char name[160];
            snprintf(name, sizeof name, "%.100s.processors[%zu]", field, i);
            SPW_TRY(read_post_processor(t, part, path, name, depth + 1, err));
        }
        return ONLY(v, path, field, err, "type", "processors");
    }
    return refused(path, field, json_is_object(v) ? json_object_get(v, "type") : v, err);
}

static spw_status
read_decoder(const json_t *v, const char *path, spw_error *err)
{
    if (v == NULL || json_is_null(v))
        return SPW_OK;
    if (!is_type(v, "ByteLevel"))
        return refused(path, "decoder", json_is_object(v) ? json_object_get(v, "type") : v, err);
    return ONLY(v, path, "decoder", err, "type", "add_prefix_space", "trim_offsets", "use_regex");
}

/* The model's settings; vocabulary and merges are read elsewhere. */
static spw_status
read_model(spw_tokenizer *t, const json_t *v, const char *path, spw_error *err)
{
    const json_t *type = json_object_get(v, "type"), *dropout = json_object_get(v, "dropout");
    static const char *const empty[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    char field[64];
    bool fuse;
    if (!json_is_object(v))
        return refused(path, "model", v, err);
    if (type != NULL && !is_type(v, "BPE")) /* the first files of GPT-2 do not name it */
        return refused(path, "model.type", type, err);
    SPW_TRY(ONLY(v, path, "model", err, "type", "vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix",
                 "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges"));
    if (!json_is_object(json_object_get(v, "vocab")))
        return refused(path, "model.vocab", json_object_get(v, "vocab"), err);
    if (!json_is_array(json_object_get(v, "merges")))
        return refused(path, "model.merges", json_object_get(v, "merges"), err);
    SPW_TRY(boolean(v, "byte_fallback", false, &t->chars, path, "model", err));
    SPW_TRY(boolean(v, "fuse_unk", false, &fuse, path, "model", err)); /* no byte is unknown */
    SPW_TRY(boolean(v, "ignore_merges", false, &t->ignore_merges, path, "model", err));
    if (dropout != NULL && !json_is_null(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0))
        return refused(path, "model.dropout", dropout, err);
    for (size_t i = 0; i < sizeof empty / sizeof empty[0]; i++) {
        snprintf(field, sizeof field, "model.%s", empty[i]);
        if (!is_nothing(json_object_get(v, empty[i])))
            return refused(path, field, json_object_get(v, empty[i]), err);
    }
    return SPW_OK;
}

/* Whether the patterns are of a kind for which it is known where a text may be cut. */
static bool
are_known(const spw_tokenizer *t, const json_t *pre)
{
    const json_t *steps = json_object_get(pre, "pretokenizers");
    const char *texts[TOK_PATTERNS_MAX];
    if (is_type(pre, "ByteLevel"))
        return t->pattern_count == 1;                   /* GPT-2's, or none */
    if (json_array_size(steps) != t->pattern_count + 1) /* ByteLevel without its own is the last */
        return false;
    for (uint32_t i = 0; i < t->pattern_count; i++) {
        texts[i] = json_string_value(json_object_get(json_object_get(json_array_get(steps, i), "pattern"), "Regex"));
        if (texts[i] == NULL)
            return false;
    }
    return spw__tok_patterns_known(texts, t->pattern_count);
}

static spw_status
load_byte_level(spw_tokenizer *t, const json_t *root, const char *path, spw_error *err)
{
    const json_t *pre = json_object_get(root, "pre_tokenizer");
    bool done = false;
    SPW_TRY(read_normalizer(t, json_object_get(root, "normalizer"), path, "normalizer", 0, err));
    SPW_TRY(read_pre_tokenizer(t, pre, path, "pre_tokenizer", 0, &done, err));
    if (!done)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: pre_tokenizer has no ByteLevel", path);
    t->cuts = are_known(t, pre);
    return read_decoder(json_object_get(root, "decoder"), path, err);
}

static spw_status
load_tokenizer_json(spw_tokenizer *t, const json_t *root, const char *path, spw_error *err)
{
    json_t *model = json_object_get(root, "model"), *added = json_object_get(root, "added_tokens");
    SPW_TRY(ONLY(root, path, "", err, "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                 "post_processor", "decoder", "model"));
    if (added != NULL && !json_is_array(added))
        return refused(path, "added_tokens", added, err);
    SPW_TRY(read_model(t, model, path, err));
    SPW_TRY(t->chars ? spw__tok_chars_load(t, root, path, err) : load_byte_level(t, root, path, err));
    SPW_TRY(spw__tok_vocab_build(t, json_object_get(model, "vocab"), added, path, err));
    SPW_TRY(
        spw__tok_merges_build(t, json_object_get(model, "vocab"), json_object_get(model, "merges"), path, false, err));
    return read_post_processor(t, json_object_get(root, "post_processor"), path, "post_processor", 0, err);
}

/* ---------------------------------------------------------------- vocab.json and merges.txt */

spw_status
spw__tok_added_of_config(json_t **out, const json_t *config, const char *path, spw_error *err)
{
    json_t *decoder = json_object_get(config, "added_tokens_decoder"), *v;
    const char *key;
    *out = json_array();
    json_object_foreach(decoder, key, v)
    {
        char *end;
        long id = strtol(key, &end, 10);
        json_t *copy = json_is_object(v) && key[0] >= '0' && key[0] <= '9' && *end == '\0' ? json_copy(v) : NULL;
        if (copy == NULL || json_object_set_new(copy, "id", json_integer(id)) != 0 ||
            json_array_append_new(*out, copy) != 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: added_tokens_decoder.%.100s is not a token by its id", path, key);
    }
    return *out == NULL ? SPW_RAISE(err, SPW_ENOMEM, "%s: added tokens", path) : SPW_OK;
}

/* The text of bos_token, say: a string, or an object that describes a token. NULL: there is none. */
static const char *
token_text(const json_t *config, const char *name)
{
    const json_t *v = json_object_get(config, name);
    return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

static bool
is_listed(const json_t *added, const char *text)
{
    const json_t *v;
    size_t i;
    json_array_foreach(added, i, v)
    {
        if (strcmp(json_string_value(json_object_get(v, "content")), text) == 0)
            return true;
    }
    return false;
}

/*
 * Without a list of added tokens those are added that tokenizer_config.json names, as OPT's does. What it does not name is <|endoftext|>:
 * GPT-2's files say so nowhere.
 */
static spw_status
add_named_tokens(json_t *added, const json_t *vocab, const json_t *config, spw_error *err)
{
    static const char *const names[] = {"eos_token", "bos_token", "unk_token", "pad_token"};
    if (json_array_size(added) > 0)
        return SPW_OK;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *text = token_text(config, names[i]);
        json_t *id, *token;
        if (json_object_get(config, names[i]) == NULL && i < 3) /* there need be no padding */
            text = "<|endoftext|>";
        id = text != NULL ? json_object_get(vocab, text) : NULL;
        if (id == NULL || is_listed(added, text))
            continue;
        token = json_pack("{s:s, s:O, s:b}", "content", text, "id", id, "special", 1);
        if (token == NULL || json_array_append_new(added, token) != 0)
            return SPW_RAISE(err, SPW_ENOMEM, "added tokens");
    }
    return SPW_OK;
}

/* What a class has that is read from vocab.json and merges.txt, and says nothing of it there. NULL: not such a one. */
typedef struct pair_class {
    const char *name, *const *pattern;
    bool nfc;
} pair_class;

static const pair_class *
find_class(const char *name)
{
    static const pair_class classes[] = {{"GPT2Tokenizer", &spw__tok_gpt2_pattern, false},
                                         {"Qwen2Tokenizer", &spw__tok_qwen2_pattern, true},
                                         {"Qwen3_5Tokenizer", &spw__tok_qwen3_5_pattern, true}};
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
        size_t n = strlen(classes[i].name);
        if (strncmp(name, classes[i].name, n) == 0 && (name[n] == '\0' || strcmp(name + n, "Fast") == 0))
            return &classes[i];
    }
    return NULL;
}

static spw_status
load_pair(spw_tokenizer *t, json_t *vocab, const json_t *config, const char *config_path, const char *merges_path,
          spw_error *err)
{
    const json_t *name = json_object_get(config, "tokenizer_class"),
                 *prefix = json_object_get(config, "add_prefix_space");
    const pair_class *class = find_class(json_is_string(name) ? json_string_value(name) : "GPT2Tokenizer");
    json_t *added = NULL, *merges = NULL;
    char *text = NULL;
    spw_status st;
    if (class == NULL)
        return refused(config_path, "tokenizer_class", name, err);
    if (json_is_true(prefix))
        return refused(config_path, "add_prefix_space", prefix, err);
    t->nfc = class->nfc;
    SPW_TRY(spw__tok_pattern_add(t, *class->pattern, TOK_REGEX, t->path, "pattern", err));
    t->cuts = true;
    st = spw__tok_added_of_config(&added, config, config_path, err);
    if (st == SPW_OK)
        st = add_named_tokens(added, vocab, config, err);
    if (st == SPW_OK)
        st = spw__tok_vocab_build(t, vocab, added, config != NULL ? config_path : t->path, err);
    if (st == SPW_OK)
        st = spw_file_read_text(merges_path, FILE_BYTES_MAX, &text, err);
    if (st == SPW_OK && (merges = json_string(text)) == NULL)
        st = SPW_RAISE(err, SPW_ECORRUPT, "%s: not UTF-8", merges_path);
    if (st == SPW_OK)
        t->key = spw_checksum_more(t->key, text, strlen(text));
    if (st == SPW_OK)
        st = spw__tok_merges_build(t, vocab, merges, merges_path, true, err);
    json_decref(added);
    json_decref(merges);
    spw_mem_free(text);
    return st;
}

/* ---------------------------------------------------------------- which files */

static bool
exists(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0;
}

/* folder/name; false when it is too long. */
static bool
join(char out[TOK_PATH_BYTES], const char *folder, const char *name)
{
    int length = snprintf(out, TOK_PATH_BYTES, "%s%s%s", folder, folder[0] != '\0' ? "/" : "", name);
    return length > 0 && length < TOK_PATH_BYTES;
}

static int32_t
added_id(const spw_tokenizer *t, const char *text)
{
    for (uint32_t i = 0; text != NULL && i < t->added_count; i++) {
        if (strlen(text) == t->added[i].bytes && memcmp(t->added[i].text, text, t->added[i].bytes) == 0)
            return t->added[i].id;
    }
    return -1;
}

/*
 * Of these classes transformers goes by tokenizer_config.json, and by what is here where that does not say it, whatever tokenizer.json has:
 * DeepSeek's has nothing before a text. GPT-2's goes by tokenizer.json where there is one; pair: there is none, as in OPT's folders.
 */
static void
choose_begin(spw_tokenizer *t, const json_t *config, bool pair)
{
    static const struct {
        const char *name, *begin;
        bool adds;
    } classes[] = {{"LlamaTokenizer", "<s>", true},
                   {"CodeLlamaTokenizer", "<s>", true},
                   {"GemmaTokenizer", "<bos>", true},
                   {"CohereTokenizer", "<BOS_TOKEN>", true},
                   {"GPTNeoXTokenizer", "<|endoftext|>", false},
                   {"GPT2Tokenizer", "<|endoftext|>", false}};
    const char *name = json_string_value(json_object_get(config, "tokenizer_class"));
    const json_t *add = json_object_get(config, "add_bos_token");
    size_t count = sizeof classes / sizeof classes[0] - (pair ? 0 : 1);
    if (name == NULL && pair)
        name = "GPT2Tokenizer";
    for (size_t i = 0; name != NULL && i < count; i++) {
        size_t n = strlen(classes[i].name);
        const char *text =
            json_object_get(config, "bos_token") == NULL ? classes[i].begin : token_text(config, "bos_token");
        int32_t found = text != NULL ? spw_tokenizer_find(t, text, strlen(text)) : -1;
        if (strncmp(name, classes[i].name, n) != 0 || (name[n] != '\0' && strcmp(name + n, "Fast") != 0))
            continue;
        if (!(json_is_boolean(add) ? json_is_true(add) : classes[i].adds))
            t->begin.count = 0;
        else if (found >= 0)
            t->begin = (spw_begin){1, {found}};
    }
}

static void
choose_end(spw_tokenizer *t, const json_t *config)
{
    const char *names[] = {"<|endoftext|>", "<|end_of_text|>", token_text(config, "eos_token"), "<|im_end|>", "</s>"};
    for (size_t i = 0; i < sizeof names / sizeof names[0] && t->end < 0; i++)
        t->end = added_id(t, names[i]);
}

/* Which file has the vocabulary, and what kind of a tokenizer it is. */
typedef enum tok_kind { KIND_JSON, KIND_PAIR, KIND_TIKTOKEN } tok_kind;
typedef struct tok_files {
    tok_kind kind;
    char merges[TOK_PATH_BYTES], config[TOK_PATH_BYTES];
} tok_files;

static const char *const kind_names[] = {"tokenizer.json", "vocab.json", "tiktoken.model"}; /* by tok_kind */
enum { KINDS = sizeof kind_names / sizeof kind_names[0] };

/* Of a folder the first of these that is there; a file's kind is in its name. t->path out. */
static spw_status
find_files(tok_files *out, spw_tokenizer *t, const char *path, bool is_folder, spw_error *err)
{
    char folder[TOK_PATH_BYTES], *slash;
    int kind = 0;
    snprintf(folder, sizeof folder, "%s", path);
    snprintf(t->path, sizeof t->path, "%s", path);
    if (is_folder) {
        while (kind < KINDS && (!join(t->path, folder, kind_names[kind]) || !exists(t->path)))
            kind++;
        if (kind == KINDS)
            return SPW_RAISE(err, SPW_ENOENT,
                             "tokenizer %s: neither tokenizer.json nor vocab.json nor tiktoken.model "
                             "is there",
                             path);
        out->kind = (tok_kind)kind;
    } else {
        slash = strrchr(folder, '/');
        out->kind = KIND_JSON;
        for (kind = KIND_PAIR; kind < KINDS; kind++) {
            if (strcmp(slash != NULL ? slash + 1 : folder, kind_names[kind]) == 0)
                out->kind = (tok_kind)kind;
        }
        if (slash == folder)
            slash++;
        *(slash != NULL ? slash : folder) = '\0';
    }
    return join(out->merges, folder, "merges.txt") && join(out->config, folder, "tokenizer_config.json")
               ? SPW_OK
               : SPW_RAISE(err, SPW_EINVAL, "the path of tokenizer %s is too long", path);
}

static spw_status
load_kind(spw_tokenizer *t, const tok_files *f, const json_t *config, spw_error *err)
{
    json_t *root;
    spw_status st;
    if (f->kind == KIND_TIKTOKEN)
        return spw__tok_tiktoken_load(t, config, f->config, err);
    SPW_TRY(read_json(t, &root, t->path, 0, err));
    st = f->kind == KIND_PAIR ? load_pair(t, root, config, f->config, f->merges, err)
                              : load_tokenizer_json(t, root, t->path, err);
    json_decref(root);
    return st;
}

bool
spw_tokenizer_is_in(const char *folder)
{
    return spw_dir_has(folder, "tokenizer.json") ||
           (spw_dir_has(folder, "vocab.json") && spw_dir_has(folder, "merges.txt")) ||
           spw_dir_has(folder, "tiktoken.model");
}

spw_status
spw__tok_load(spw_tokenizer *t, const char *path, spw_error *err)
{
    char of_hub[SPW_HUB_PATH_BYTES];
    tok_files f;
    json_t *config = NULL;
    struct stat info;
    spw_status st = SPW_OK;
    path = spw_hub_find(of_hub, path) ? of_hub : path;
    if (strlen(path) + 32 > TOK_PATH_BYTES)
        return SPW_RAISE(err, SPW_EINVAL, "the path of a tokenizer is longer than %d bytes", TOK_PATH_BYTES - 32);
    if (stat(path, &info) != 0) {
        int errnum = errno;
        const char *dot = strrchr(path, '.');
        if (dot == NULL || strcmp(dot, ".json") != 0) /* else a file that is missing, and no model's name */
            SPW_TRY(spw_hf_check_folder(path, err));
        return SPW_RAISE_SYS(err, errnum, "tokenizer %s", path);
    }
    SPW_TRY(find_files(&f, t, path, S_ISDIR(info.st_mode), err));
    if (exists(f.config))
        st = read_json(t, &config, f.config, JSON_DECODE_INT_AS_REAL, err); /* "model_max_length": 10^30 */
    if (st == SPW_OK)
        st = load_kind(t, &f, config, err);
    if (st == SPW_OK) {
        choose_begin(t, config, f.kind == KIND_PAIR);
        choose_end(t, config);
    }
    json_decref(config);
    return st;
}
