/*
 * Tokenizers: the ids of the tokenizers library (vectors made by make_tokenizer_vectors.py) for the configurations of
 * GPT-2, Llama 3, Qwen2, Qwen3.5, gpt-oss, one with DeepSeek-V3's patterns and one that keeps matches alone, of Llama 2, Mistral and
 * four more by characters; any bytes come back; what is not supported is refused by name.
 */
#include "lib_tiny.h"
#include "spw_data.h"
#include "spw_files.h"
#include "tokenizer_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>
#include <utf8proc.h>

static const char *const names[] = {"gpt2", "llama3", "qwen2", "mixed", "llama2",  "mistral", "across",
                                    "bare", "gemma",  "o200k", "alone", "qwen3_5", "gemma4",  "kimi"};
#define BOT "{\"SpecialToken\": {\"id\": \"<|begin_of_text|>\", \"type_id\": 0}}" /* in a template */
enum { NAMES = sizeof names / sizeof names[0], TEXT_MAX = 1 << 20 };

static char *
read_file(const char *path, uint64_t *bytes)
{
    FILE *f = fopen(path, "rb");
    char *data;
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *bytes = (uint64_t)ftell(f);
    rewind(f);
    data = malloc(*bytes + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *bytes, f), *bytes);
    data[*bytes] = '\0';
    fclose(f);
    return data;
}

/* The one token before a text; -1: none. */
static int32_t
begin_of(const spw_tokenizer *t)
{
    spw_begin b = spw_tokenizer_begin(t);
    assert_true(b.count <= 1);
    return b.count == 1 ? b.ids[0] : -1;
}

static void
path_of(char path[300], const char *name)
{
    snprintf(path, 300, "tests/vectors/tok_%s.json", name);
    if (access(path, F_OK) != 0) /* a folder */
        snprintf(path, 300, "tests/vectors/tok_%s", name);
}

static spw_tokenizer *
open_named(const char *name)
{
    char path[300];
    spw_tokenizer *t;
    spw_error err = {0};
    path_of(path, name);
    if (spw_tokenizer_open(&t, path, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return t;
}

static void
encode(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, spw_tokens *out)
{
    spw_error err = {0};
    out->count = 0;
    if (spw_tokenizer_encode(t, text, bytes, special, out, &err) != SPW_OK)
        fail_msg("%s", err.message);
}

static uint64_t
decode(const spw_tokenizer *t, const spw_tokens *ids, char **text)
{
    uint64_t bytes, again;
    assert_int_equal(spw_tokenizer_decode(t, ids->ids, ids->count, true, NULL, 0, &bytes, NULL), SPW_OK);
    *text = malloc(bytes + 1);
    assert_int_equal(spw_tokenizer_decode(t, ids->ids, ids->count, true, *text, bytes, &again, NULL), SPW_OK);
    assert_int_equal(bytes, again);
    return bytes;
}

static void
assert_same_ids(const char *what, uint64_t number, const spw_tokens *got, const spw_tokens *want)
{
    for (uint64_t i = 0; i < got->count && i < want->count; i++) {
        if (got->ids[i] != want->ids[i])
            fail_msg("%s, case %llu: token %llu is %d, not %d", what, (unsigned long long)number, (unsigned long long)i,
                     got->ids[i], want->ids[i]);
    }
    if (got->count != want->count)
        fail_msg("%s, case %llu: %llu tokens, not %llu", what, (unsigned long long)number,
                 (unsigned long long)got->count, (unsigned long long)want->count);
}

/* Every case of the hard text has the library's ids, with special tokens and without. Twice: the second time from the
 * cache. */
static void
test_vectors(void **state)
{
    uint64_t text_bytes;
    char *text = read_file("tests/vectors/tok_text.txt", &text_bytes);
    (void)state;
    for (int n = 0; n < NAMES; n++) {
        char path[300];
        uint64_t want_bytes;
        spw_tokens got = {0}, want = {0};
        spw_tokenizer *t = open_named(names[n]);
        snprintf(path, sizeof path, "tests/vectors/tok_%s.ids", names[n]);
        uint16_t *all = (uint16_t *)(void *)read_file(path, &want_bytes);
        want.ids = calloc(TEXT_MAX, sizeof *want.ids);
        for (int round = 0; round < 2; round++) {
            uint64_t at = 0, number = 0;
            for (const char *p = text, *end; p <= text + text_bytes; p = end + 1, number++) {
                end = memchr(p, 0x1e, (uint64_t)(text + text_bytes - p));
                if (end == NULL)
                    end = text + text_bytes;
                for (int special = 1; special >= 0; special--) {
                    want.count = all[at++];
                    for (uint64_t i = 0; i < want.count; i++)
                        want.ids[i] = all[at++];
                    encode(t, p, (uint64_t)(end - p), special != 0, &got);
                    assert_same_ids(names[n], number, &got, &want);
                }
            }
            assert_int_equal(at * 2, want_bytes);
            assert_true(number > 600);
        }
        free(all);
        free(want.ids);
        spw_tokens_free(&got);
        spw_tokenizer_close(t);
    }
    free(text);
}

/* Random bytes, text with broken bytes in it, and text: what was encoded comes back. NFC changes text once, not twice. */
static void
test_round_trip(void **state)
{
    enum { BYTES = 100000, ROUNDS = 12 };
    uint64_t seed = getenv("SPW_SEED") != NULL ? strtoull(getenv("SPW_SEED"), NULL, 0) : 1, hard_bytes;
    char *hard = read_file("tests/vectors/tok_text.txt", &hard_bytes), *text = malloc(BYTES), *back, *again;
    spw_tokens ids = {0};
    (void)state;
    print_message("# SPW_SEED=%llu\n", (unsigned long long)seed);
    for (int n = 0; n < NAMES; n++) {
        spw_tokenizer *t;
        if (strstr("mixed llama2 mistral across alone", names[n]) != NULL)
            continue; /* they have tokens that swallow white space, a space that is not always added, or leave text out */
        t = open_named(names[n]);
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t bytes;
            for (uint64_t i = 0; i < BYTES; i++) {
                uint32_t r[4];
                spw_philox(seed, round, i, r);
                if (round % 3 == 0)
                    text[i] = (char)r[0];
                else
                    text[i] = r[1] % 64 == 0 && round % 3 == 1 ? (char)r[0] : hard[(i + round * 1000) % hard_bytes];
            }
            encode(t, text, BYTES, round % 2 != 0, &ids);
            bytes = decode(t, &ids, &back);
            if (strstr("qwen2 qwen3_5", names[n]) == NULL) {
                assert_int_equal(bytes, BYTES);
                assert_memory_equal(back, text, BYTES);
            } else {
                encode(t, back, bytes, round % 2 != 0, &ids);
                assert_int_equal(decode(t, &ids, &again), bytes);
                assert_memory_equal(back, again, bytes);
                free(again);
            }
            free(back);
        }
        for (int b = 0; b < 256; b++) {
            char byte = (char)b;
            encode(t, &byte, 1, false, &ids);
            assert_int_equal(ids.count, 1);
            assert_int_equal(decode(t, &ids, &back), 1);
            assert_int_equal(back[0], byte);
            free(back);
        }
        spw_tokenizer_close(t);
    }
    spw_tokens_free(&ids);
    free(text);
    free(hard);
}

/* A megabyte (with sanitizers a tenth) without a boundary, of every kind that could take quadratic time. */
static void
test_long_pieces(void **state)
{
    static const char *const units[] = {"a",
                                        " ",
                                        "\n",
                                        "ab",
                                        "the",
                                        "=",
                                        "\xff",
                                        "1",
                                        "e\xcc\x81",
                                        "\xcc\xa3\xcc\x81",
                                        "\xcc\x81\xcc\xa3",
                                        "\t ",
                                        "<",
                                        "<|endoftext|",
                                        "\xe0\xa4"};
    enum { BYTES = SANITIZED ? 100000 : 1000000 };
    char *text = malloc(BYTES), *back;
    spw_tokens ids = {0};
    (void)state;
    for (int n = 0; n < NAMES; n++) {
        spw_tokenizer *t = open_named(names[n]);
        for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
            uint64_t start = spw_process_cpu_ns(), bytes, length = strlen(units[u]);
            for (uint64_t i = 0; i < BYTES; i++)
                text[i] = units[u][i % length];
            encode(t, text, BYTES, true, &ids);
            start = spw_process_cpu_ns() - start;
            if (getenv("SPW_VERBOSE") != NULL)
                print_message("# %s %zu: %.3f s\n", names[n], u, (double)start * 1e-9);
            assert_true(start < 20000000000u); /* quadratic would take an hour */
            bytes = decode(t, &ids, &back);
            if (!t->nfc && t->prefix != TOK_PREFIX_FIRST && t->prefix != TOK_PREFIX_MISSING &&
                strcmp(names[n], "alone") != 0) {
                assert_int_equal(bytes, BYTES);
                assert_memory_equal(back, text, BYTES);
            }
            free(back);
        }
        spw_tokenizer_close(t);
    }
    spw_tokens_free(&ids);
    free(text);
}

/* Every character, before and after others that may join with it: the same NFC as utf8proc's of the whole text. */
static void
test_nfc(void **state)
{
    static const int32_t after[] = {0x301, 0x323, 0x11a8, 0x3099, 'x'};
    tok_scratch s = {0};
    (void)state;
    for (int32_t cp = 1; cp < 0x110000; cp++) {
        char text[32];
        const char *got;
        utf8proc_uint8_t *want = NULL;
        uint64_t used = 0, bytes;
        if (cp >= 0xd800 && cp < 0xe000)
            continue;
        used += (uint64_t)utf8proc_encode_char(0xe9, (utf8proc_uint8_t *)text);
        used += (uint64_t)utf8proc_encode_char('a', (utf8proc_uint8_t *)text + used);
        used += (uint64_t)utf8proc_encode_char(cp, (utf8proc_uint8_t *)text + used);
        used += (uint64_t)utf8proc_encode_char(after[cp % 5], (utf8proc_uint8_t *)text + used);
        used += (uint64_t)utf8proc_encode_char(cp, (utf8proc_uint8_t *)text + used);
        used += (uint64_t)utf8proc_encode_char(after[cp / 5 % 5], (utf8proc_uint8_t *)text + used);
        text[used] = '\0';
        assert_int_equal(spw__tok_nfc(&s, text, used, &got, &bytes, NULL), SPW_OK);
        want = utf8proc_NFC((utf8proc_uint8_t *)text);
        if (bytes != strlen((char *)want) || memcmp(got, want, bytes) != 0)
            fail_msg("U+%04X", (unsigned)cp);
        free(want);
    }
    spw_mem_free(s.normal);
    spw_mem_free(s.points);
}

/* ---------------------------------------------------------------- files */

/* Sets what stands at "a.b.0.c" to a JSON value; "-" takes it out. */
static void
set_at(json_t *root, const char *where, const char *value)
{
    char path[200], *last = path, *dot;
    json_t *at = root, *v;
    json_error_t why;
    snprintf(path, sizeof path, "%s", where);
    while ((dot = strchr(last, '.')) != NULL) {
        *dot = '\0';
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(last)) : json_object_get(at, last);
        last = dot + 1;
    }
    assert_non_null(at);
    if (strcmp(value, "-") == 0) {
        assert_int_equal(json_object_del(at, last), 0);
        return;
    }
    v = json_loads(value, JSON_DECODE_ANY, &why);
    assert_non_null(v);
    if (json_is_array(at))
        assert_int_equal(json_array_set_new(at, (size_t)atoi(last), v), 0);
    else
        assert_int_equal(json_object_set_new(at, last, v), 0);
}

static json_t *
load_named(const char *name)
{
    char path[300];
    json_error_t why;
    json_t *root;
    snprintf(path, sizeof path, "tests/vectors/tok_%s.json", name);
    root = json_load_file(path, 0, &why);
    assert_non_null(root);
    return root;
}

static void
write_text(const char *dir, const char *name, const char *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(spw_file_write_text(path, text, NULL), SPW_OK);
}

static void
write_json(const char *dir, const char *name, const json_t *v)
{
    char *text = json_dumps(v, JSON_COMPACT);
    write_text(dir, name, text);
    free(text);
}

/* DeepSeek-V3's patterns alone, and no added tokens that take white space. */
static spw_tokenizer *
open_deepseek(void)
{
    json_t *root = load_named("mixed"), *added = json_object_get(root, "added_tokens");
    char dir[256];
    spw_tokenizer *t;
    assert_int_equal(json_array_remove(json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers"), 3), 0);
    set_at(root, "pre_tokenizer.pretokenizers.2.pattern.Regex", /* line ends as they are, as it is published */
           "\"[!\\\"#$%&'()*+,\\\\-./"
           ":;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+|"
           " ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"");
    while (json_array_size(added) > 1)
        assert_int_equal(json_array_remove(added, 1), 0);
    tiny_dir_make(dir);
    write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
    tiny_dir_remove(dir);
    return t;
}

/* The tokenizer of Qwen2's vector with another pattern. */
static spw_tokenizer *
open_pattern(const char *pattern)
{
    json_t *root = load_named("qwen2"), *text = json_string(pattern);
    char dir[256], *quoted = json_dumps(text, JSON_ENCODE_ANY);
    spw_tokenizer *t;
    spw_error err = {0};
    set_at(root, "pre_tokenizer.pretokenizers.0.pattern.Regex", quoted);
    tiny_dir_make(dir);
    write_json(dir, "tokenizer.json", root);
    if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
        fail_msg("%s", err.message);
    free(quoted);
    json_decref(text);
    json_decref(root);
    tiny_dir_remove(dir);
    return t;
}

/* Cuts a text wherever spw_tokenizer_cut says so: the ids must be those of the whole. Returns how often. */
static uint64_t
count_cuts(const char *name, const spw_tokenizer *t, const char *text, uint64_t bytes)
{
    spw_tokens whole = {0}, pieces = {0};
    uint64_t cuts = 0;
    encode(t, text, bytes, true, &whole);
    for (uint64_t at = 0, end; at < bytes; at = end) {
        end = spw_tokenizer_cut(t, text, bytes, at + 1);
        assert_true(end > at && end <= bytes);
        assert_int_equal(at == 0 ? spw_tokenizer_encode(t, text, end, true, &pieces, NULL)
                                 : spw_tokenizer_encode_rest(t, text + at, end - at, true, &pieces, NULL),
                         SPW_OK);
        cuts += end < bytes;
    }
    assert_same_ids(name, 0, &pieces, &whole);
    spw_tokens_free(&whole);
    spw_tokens_free(&pieces);
    return cuts;
}

/* A text that is cut where spw_tokenizer_cut says so has the same ids in pieces, and there is such a place in most languages. */
static void
test_cut(void **state)
{
    static const char *const lines[] = {"Water flows.\r\n", "It is 7 m. ", "the dam\r\n",
                                        "\xe6\xb0\xb4\xe6\xb5\x81\n\xe6\xb0\xb4\xe3\x80\x82\n",
                                        "\xd0\xb2\xd0\xbe\xd0\xb4\xd0\xb0 \xd0\xb8\xd0\xb4\xd1\x91\xd1\x82.\n"};
    static const char *const patterns[] = {
        /* Ministral's and Seed-OSS' */
        "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|[^\\r\\n\\p{L}\\p{N}"
        "]?"
        "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}| "
        "?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|"
        "\\s+(?!\\S)|\\s+",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|"
        "\\s+(?!\\S)|\\s+"};
    enum { TIMES = 100 };
    uint64_t bytes;
    char *text = read_file("tests/vectors/tok_text.txt", &bytes), many[64 * TIMES];
    spw_tokenizer *plain = open_named("gpt2"), *other;
    (void)state;
    for (int n = 0; n < NAMES; n++) {
        spw_tokenizer *t = open_named(names[n]);
        bool nowhere = strstr("mixed across alone", names[n]) != NULL;
        uint64_t cuts = count_cuts(names[n], t, text, bytes);
        assert_true(nowhere ? cuts == 0 : cuts > 40);
        for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
            many[0] = '\0';
            for (int k = 0; k < TIMES; k++)
                strcat(many, lines[i]);
            cuts = count_cuts(names[n], t, many, strlen(many));
            assert_true(nowhere || t->chars || cuts >= TIMES - 1);
        }
        spw_tokenizer_close(t);
    }
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        spw_tokenizer *t = open_pattern(patterns[i]);
        assert_true(count_cuts(patterns[i], t, text, bytes) > 40);
        spw_tokenizer_close(t);
    }
    other = open_deepseek();
    assert_true(count_cuts("DeepSeek", other, text, bytes) > 40);
    spw_tokenizer_close(other);
    assert_int_equal(spw_tokenizer_cut(plain, "ab1\n c\n\n", 9, 0), 3);
    assert_int_equal(spw_tokenizer_cut(plain, "ab1\n c\n\n", 9, 4), 6);
    assert_int_equal(spw_tokenizer_cut(plain, "ab1\n c\n\n", 9, 7), 9);
    assert_int_equal(spw_tokenizer_cut(plain, "\xb4\n \xe6\xb0\n.\n", 8, 0), 8); /* no characters */
    spw_tokenizer_close(plain);
    free(text);
}

/* A pattern without end is an error that names it, and the ids from before stay. */
static void
test_hopeless_pattern(void **state)
{
    char dir[256], text[61];
    json_t *root = load_named("qwen2");
    spw_tokenizer *t;
    spw_tokens ids = {0};
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    set_at(root, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(a|aa|aaa)+[xy]\"");
    write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_OK);
    memset(text, 'a', sizeof text);
    assert_int_equal(spw_tokens_push(&ids, 7, NULL), SPW_OK);
    assert_int_equal(spw_tokenizer_encode(t, "aax", 3, false, &ids, &err), SPW_OK);
    ids.count = 1;
    assert_int_equal(spw_tokenizer_encode(t, text, sizeof text, false, &ids, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "tokenizer.json: pattern 0 gave up at byte 0 of 61"));
    assert_int_equal(ids.count, 1);
    assert_int_equal(ids.ids[0], 7);
    spw_tokens_free(&ids);
    spw_tokenizer_close(t);
    tiny_dir_remove(dir);
}

/* What is not supported, or cannot be, is refused with file and field. */
static void
test_refusals(void **state)
{
    static const struct {
        const char *name, *where, *value, *field;
        spw_status status;
    } cases[] = {
        {"gpt2", "model.type", "\"Unigram\"", "model.type: Unigram", SPW_EUNSUPPORTED},
        {"gpt2", "model.type", "\"WordPiece\"", "model.type: WordPiece", SPW_EUNSUPPORTED},
        {"gpt2", "model.type", "7", "model.type: a number", SPW_EUNSUPPORTED},
        {"gpt2", "model", "-", "model: missing", SPW_EUNSUPPORTED},
        {"gpt2", "model.vocab", "[[\"a\", 0]]", "model.vocab: a list", SPW_EUNSUPPORTED},
        {"gpt2", "model.merges", "-", "model.merges: missing", SPW_EUNSUPPORTED},
        {"gpt2", "model.byte_fallback", "true", "with model.byte_fallback", SPW_EUNSUPPORTED},
        {"llama2", "model.byte_fallback", "false", "normalizer.normalizers[0]: Prepend", SPW_EUNSUPPORTED},
        {"llama2", "model.ignore_merges", "true", "model.ignore_merges: true", SPW_EUNSUPPORTED},
        {"llama2", "model.vocab.<0x0A>", "-", "no token <0x0A>", SPW_EUNSUPPORTED},
        {"llama2", "model.vocab. ", "5000", "reads like another token", SPW_EUNSUPPORTED},
        {"llama2", "normalizer", "null", "in the place of spaces", SPW_EUNSUPPORTED},
        {"llama2", "normalizer", "{\"type\":\"NFKC\"}", "normalizer: {\"type\":\"NFKC\"}", SPW_EUNSUPPORTED},
        {"llama2", "normalizer.normalizers.0.prepend", "\"_\"", "normalizer: {\"type\":\"Prepend\"", SPW_EUNSUPPORTED},
        {"llama2", "normalizer.normalizers.1.content", "\"_\"", "normalizer: {\"type\":\"Replace\"", SPW_EUNSUPPORTED},
        {"llama2", "normalizer.normalizers.1.pattern", "{\"Regex\":\" \"}", "normalizer: {\"type\":\"Replace\"",
         SPW_EUNSUPPORTED},
        {"llama2", "pre_tokenizer", "{\"type\":\"ByteLevel\"}", "pre_tokenizer: {\"type\":\"ByteLevel\"}",
         SPW_EUNSUPPORTED},
        {"llama2", "decoder", "{\"type\":\"WordPiece\"}", "decoder: {\"type\":\"WordPiece\"}", SPW_EUNSUPPORTED},
        {"mistral", "pre_tokenizer.split", "true", "pre_tokenizer: {", SPW_EUNSUPPORTED},
        {"mistral", "pre_tokenizer.replacement", "\"_\"", "pre_tokenizer: {", SPW_EUNSUPPORTED},
        {"mistral", "pre_tokenizer.prepend_scheme", "\"last\"", "pre_tokenizer: {", SPW_EUNSUPPORTED},
        {"mistral", "pre_tokenizer.more", "1", "pre_tokenizer: {", SPW_EUNSUPPORTED},
        {"gemma", "pre_tokenizer.pattern", "{\"String\":\"e\"}", "pre_tokenizer: {", SPW_EUNSUPPORTED},
        {"gemma", "pre_tokenizer.invert", "true", "pre_tokenizer: {", SPW_EUNSUPPORTED},
        {"gemma", "normalizer", "null", "pre_tokenizer: {", SPW_EUNSUPPORTED}, /* then there are spaces to cut at */
        {"gpt2", "model.dropout", "0.1", "model.dropout", SPW_EUNSUPPORTED},
        {"gpt2", "model.continuing_subword_prefix", "\"##\"", "model.continuing_subword_prefix: ##", SPW_EUNSUPPORTED},
        {"gpt2", "model.end_of_word_suffix", "\"</w>\"", "model.end_of_word_suffix: </w>", SPW_EUNSUPPORTED},
        {"gpt2", "model.ignore_merges", "1", "model.ignore_merges", SPW_ECORRUPT},
        {"gpt2", "model.cleverness", "1", "model.cleverness", SPW_EUNSUPPORTED},
        {"gpt2", "extra", "1", "extra is not known", SPW_EUNSUPPORTED},
        {"gpt2", "model.vocab.a", "-", "byte 0x61", SPW_EUNSUPPORTED},
        {"gpt2", "model.vocab.a", "66", "id 66", SPW_ECORRUPT},
        {"gpt2", "model.vocab.a", "-1", "\"a\"", SPW_ECORRUPT},
        {"gpt2", "model.vocab.a", "99999999999", "\"a\"", SPW_ECORRUPT},
        {"gpt2", "model.vocab.a", "0.5", "\"a\"", SPW_ECORRUPT},
        {"gpt2", "model.merges.3", "\"a b c\"", "model.merges[3]", SPW_ECORRUPT},
        {"gpt2", "model.merges.3", "\"ab\"", "model.merges[3]", SPW_ECORRUPT},
        {"gpt2", "model.merges.3", "\"zq zq\"", "model.merges[3]: not in the vocabulary: zq", SPW_ECORRUPT},
        {"qwen2", "model.merges.3", "[\"a\"]", "model.merges[3]", SPW_ECORRUPT},
        {"qwen2", "model.merges.3", "[\"a\", 5]", "model.merges[3]", SPW_ECORRUPT},
        {"qwen2", "normalizer", "{\"type\": \"NFKC\"}", "normalizer: NFKC", SPW_EUNSUPPORTED},
        {"qwen2", "normalizer", "{\"type\": \"Lowercase\"}", "normalizer: Lowercase", SPW_EUNSUPPORTED},
        {"qwen2", "normalizer", "5", "normalizer: a number", SPW_EUNSUPPORTED},
        {"mixed", "normalizer.normalizers.0", "{\"type\": \"Strip\"}", "normalizer.normalizers[0]: Strip",
         SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer", "null", "pre_tokenizer: null", SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer", "{\"type\": \"Metaspace\"}", "pre_tokenizer: Metaspace", SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers", "[]", "pre_tokenizer has no ByteLevel", SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers.0", "{\"type\": \"Whitespace\"}",
         "pre_tokenizer.pretokenizers[0]: Whitespace", SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers.0", "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}",
         "pretokenizers[1]: ByteLevel is not the last", SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers.0.behavior", "\"Removed\"", "pretokenizers[0].behavior: Removed",
         SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers.0.more", "1", "pretokenizers[0].more", SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers.0.pattern", "{}", "pretokenizers[0].pattern", SPW_ECORRUPT},
        {"qwen2", "pre_tokenizer.pretokenizers.1.add_prefix_space", "true", "pretokenizers[1].add_prefix_space",
         SPW_EUNSUPPORTED},
        {"qwen2", "pre_tokenizer.pretokenizers.1.use_regex", "0", "pretokenizers[1].use_regex", SPW_ECORRUPT},
        {"qwen2", "decoder", "{\"type\": \"WordPiece\"}", "decoder: WordPiece", SPW_EUNSUPPORTED},
        {"qwen2", "post_processor", "{\"type\": \"BertProcessing\"}", "post_processor: BertProcessing",
         SPW_EUNSUPPORTED},
        {"llama3", "post_processor.processors.1", "{\"type\": \"RobertaProcessing\"}",
         "post_processor.processors[1]: RobertaProcessing", SPW_EUNSUPPORTED},
        {"llama3", "post_processor.processors.1.single",
         "[{\"Sequence\": {\"id\": \"A\"}}, {\"SpecialToken\": {\"id\": \"<|begin_of_text|>\"}}]",
         "single[1]: <|begin_of_text|>", SPW_EUNSUPPORTED},
        {"llama3", "post_processor.processors.1.single", "[" BOT ", " BOT ", " BOT ", " BOT ", " BOT "]",
         "single[4]: <|begin_of_text|>: up to 4 tokens before the text", SPW_EUNSUPPORTED},
        {"llama3", "post_processor.processors.1.single.0", "{\"SpecialToken\": {\"id\": \"<x>\"}}", "single[0]",
         SPW_ECORRUPT},
        {"llama3", "added_tokens", "{}", "added_tokens: an object", SPW_EUNSUPPORTED},
        {"llama3", "added_tokens.0.single_word", "true", "added_tokens[0].single_word", SPW_EUNSUPPORTED},
        {"llama3", "added_tokens.0.lstrip", "1", "added_tokens[0].lstrip", SPW_ECORRUPT},
        {"llama3", "added_tokens.0.colour", "1", "added_tokens[0].colour", SPW_EUNSUPPORTED},
        {"llama3", "added_tokens.1.id", "1104", "added_tokens[1].id", SPW_ECORRUPT},
        {"llama3", "added_tokens.1.id", "5", "added_tokens[1].id", SPW_ECORRUPT},
        {"llama3", "added_tokens.1.id", "\"5\"", "added_tokens[1].id", SPW_ECORRUPT},
        {"llama3", "added_tokens.1.content", "\"\"", "added_tokens[1].content", SPW_ECORRUPT},
        {"llama3", "added_tokens.1.content", "\"a\"", "added_tokens[1].id", SPW_ECORRUPT},
        {"llama3", "added_tokens.1.content", "\"<|begin_of_text|>\"",
         "added_tokens: \"<|begin_of_text|>\" is there twice", SPW_ECORRUPT},
    };
    static const char *const patterns[] = {"^a",
                                           "\\bA",
                                           "\\w+",
                                           "[[:alpha:]]+",
                                           "[a&&b]",
                                           "(?m:a)",
                                           "\\p{Hira}",
                                           "[^a&&[^\\p{Han}]]",
                                           "[a&&[^\\p{Han}]b]",
                                           "[a&&b&&[^\\p{Han}]]",
                                           "\\P{Han}",
                                           "\\p{L",
                                           "a{,3}",
                                           "a{2}+",
                                           "(?<n>a)",
                                           "\\h",
                                           "\\x41",
                                           "[]a]",
                                           "(?i:ss)",
                                           "(?i:[a])",
                                           "(?i:a",
                                           "a\\",
                                           "(a",
                                           "a)",
                                           "[a",
                                           "*a",
                                           "a*",
                                           "(?#a)",
                                           "\\Qa\\E",
                                           "[\\S]",
                                           "\\1(a)",
                                           "(?=a)",
                                           "\\K",
                                           "\\R",
                                           "a{"};
    char dir[256];
    spw_tokenizer *t;
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *root = load_named(cases[i].name);
        spw_error err = {0};
        long live = spw_test_live_allocs();
        spw_status st;
        set_at(root, cases[i].where, cases[i].value);
        write_json(dir, "tokenizer.json", root);
        json_decref(root);
        st = spw_tokenizer_open(&t, dir, &err);
        if (st != cases[i].status || t != NULL || strstr(err.message, cases[i].field) == NULL ||
            strstr(err.message, "tokenizer.json") == NULL)
            fail_msg("%s = %s: %s, \"%s\"", cases[i].where, cases[i].value, spw_status_name(st), err.message);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        json_t *root = load_named("qwen2"),
               *part = json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers");
        spw_error err = {0};
        spw_status st;
        json_object_set_new(json_object_get(json_array_get(part, 0), "pattern"), "Regex", json_string(patterns[i]));
        write_json(dir, "tokenizer.json", root);
        json_decref(root);
        st = spw_tokenizer_open(&t, dir, &err);
        if ((st != SPW_EUNSUPPORTED && st != SPW_ECORRUPT) ||
            strstr(err.message, "pre_tokenizer.pretokenizers[0]") == NULL)
            fail_msg("%s: %s, \"%s\"", patterns[i], spw_status_name(st), err.message);
    }
    tiny_dir_remove(dir);
}

/* A vocabulary by characters: its words, the space before them and back, and where a text ends. */
static void
test_characters(void **state)
{
    static const struct {
        const char *name, *text, *back;
    } cases[] = {{"llama2", " the", " the"},          {"llama2", "the", "the"},     {"mistral", "the", "the"},
                 {"mistral", " the", "the"},          {"bare", "the", "the"},       {"bare", " the", " the"},
                 {"llama2", "a\xe2\x96\x81z", "a z"}, {"bare", "\xff\n", "\xff\n"}, {"across", "", ""}};
    spw_tokens ids = {0};
    char *back;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        spw_tokenizer *t = open_named(cases[i].name);
        assert_true(t->chars && t->words == (strcmp(cases[i].name, "across") != 0));
        assert_int_equal(spw_tokenizer_end(t), 2);
        assert_int_equal(begin_of(t), 1);
        encode(t, cases[i].text, strlen(cases[i].text), false, &ids);
        assert_int_equal(decode(t, &ids, &back), strlen(cases[i].back));
        assert_memory_equal(back, cases[i].back, strlen(cases[i].back));
        free(back);
        spw_tokenizer_close(t);
    }
    spw_tokens_free(&ids);
}

static void
add_token(json_t *root, const char *content, json_int_t id, const char *strip, bool normalized)
{
    assert_int_equal(json_array_append_new(json_object_get(root, "added_tokens"),
                                           json_pack("{s:s, s:I, s:b, s:b}", "content", content, "id", id, strip, 1,
                                                     "normalized", normalized)),
                     0);
}

/*
 * White space around added tokens, with the ids of tokenizers 0.22.2: a space that is U+2581 when they are looked for is none,
 * and white space that is gone is no token. The library stops at the last text, whose lines were swallowed as a whole.
 */
static void
test_strips(void **state)
{
    static const struct {
        const char *name, *text;
        int32_t ids[9]; /* up to a zero */
    } cases[] = {{"llama2", "a \n<L>b", {411, 391, 260, 284, 289, 286, 298}},
                 {"llama2", "a\n <L>b", {411, 601, 298}},
                 {"llama2", "<L>", {601}},
                 {"llama2", "x<R> \nb", {391, 319, 284, 85, 286, 391, 260, 298}},
                 {"llama2", "  <R>  ", {566, 602, 566}},
                 {"llama2", "a <R> <L> b", {411, 602, 601, 430}},
                 {"gemma", "a \n<L>b", {298, 386, 601, 299}},
                 {"gemma", "a\n <L>b", {298, 260, 386, 601, 299}},
                 {"gemma", "x<R>\n b", {320, 602, 429}},
                 {"gemma", "x<R> \nb", {320, 602, 386, 260, 299}},
                 {"gemma", "a <R> <L> b", {298, 386, 602, 386, 601, 429}},
                 {"bare", "x<R> \nb", {322, 602, 388, 260, 301}},
                 {"bare", "  <R>  ", {566, 602, 566}},
                 {"gpt2", "a<R>\n\nb", {64, 1202, 65}},
                 {"gpt2", "a<R> \n\nb", {64, 1202, 65}},
                 {"gpt2", "a \n\nb", {64, 1203, 65}},
                 {"gpt2", "a<R>\n\n<L>", {64, 1202, 1201}},
                 {"gpt2", "a<R>\n\n \n <L>b", {64, 1202, 1201, 65}}};
    char dir[256];
    spw_tokens got = {0};
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool chars = strcmp(cases[i].name, "gpt2") != 0;
        json_t *root = load_named(cases[i].name);
        spw_tokens want = {.ids = (int32_t *)(uintptr_t)cases[i].ids};
        spw_error err = {0};
        spw_tokenizer *t;
        add_token(root, "<L>", chars ? 601 : 1201, "lstrip", chars);
        add_token(root, "<R>", chars ? 602 : 1202, "rstrip", chars);
        if (!chars)
            add_token(root, "\n\n", 1203, "lstrip", false);
        write_json(dir, "tokenizer.json", root);
        if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
            fail_msg("%s", err.message);
        while (want.count < 9 && want.ids[want.count] != 0)
            want.count++;
        encode(t, cases[i].text, strlen(cases[i].text), true, &got);
        assert_same_ids(cases[i].text, i, &got, &want);
        spw_tokenizer_close(t);
        json_decref(root);
    }
    spw_tokens_free(&got);
    tiny_dir_remove(dir);
}

/* Missing and broken files. */
static void
test_files(void **state)
{
    char dir[256], path[300];
    spw_tokenizer *t;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, dir));
    snprintf(path, sizeof path, "%s/none", dir);
    assert_int_equal(spw_tokenizer_open(&t, path, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, path));
    write_text(dir, "tokenizer.json", "{\n\n\"a\": }");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "tokenizer.json, line 3"));
    write_text(dir, "tokenizer.json", "[]");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    write_text(dir, "tokenizer.json", "");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    assert_null(t);
    tiny_dir_remove(dir);
}

/* merges.txt of a tokenizer.json whose merges are "a b". */
static void
write_pair(const char *dir, const json_t *root, const char *more)
{
    const json_t *model = json_object_get(root, "model"), *v;
    char *text = calloc(1, 1 << 20), *at = text;
    size_t i;
    at += sprintf(at, "#version: 0.2\r\n");
    json_array_foreach(json_object_get(model, "merges"), i, v)
    {
        if (json_is_string(v))
            at += sprintf(at, "%s\n", json_string_value(v));
        else
            at += sprintf(at, "%s %s\n", json_string_value(json_array_get(v, 0)),
                          json_string_value(json_array_get(v, 1)));
    }
    sprintf(at, "%s", more);
    write_json(dir, "vocab.json", json_object_get(model, "vocab"));
    write_text(dir, "merges.txt", text);
    free(text);
}

/* tokenizer_config.json with a class and the added tokens that tokenizer.json has. */
static json_t *
config_of(const char *class, const json_t *added)
{
    json_t *decoder = json_object(),
           *config = json_pack("{s:s, s:s, s:o}", "tokenizer_class", class, "eos_token", "<|im_end|>",
                               "added_tokens_decoder", decoder),
           *token;
    char id[32];
    size_t i;
    assert_non_null(config);
    json_array_foreach(added, i, token)
    {
        snprintf(id, sizeof id, "%lld", (long long)json_integer_value(json_object_get(token, "id")));
        assert_int_equal(json_object_set(decoder, id, token), 0);
    }
    return config;
}

/* vocab.json and merges.txt give what tokenizer.json gives, by folder and by file, for GPT-2 and, named by
 * tokenizer_config.json, for Qwen2 and Qwen3.5; other classes are refused. */
static void
test_pair(void **state)
{
    static const struct {
        const char *name, *class;
    } qwen[] = {{"qwen2", "Qwen2Tokenizer"}, {"qwen3_5", "Qwen3_5Tokenizer"}, {"qwen3_5", "Qwen3_5TokenizerFast"}};
    char dir[256], path[300];
    uint64_t bytes;
    char *text = read_file("tests/vectors/tok_text.txt", &bytes);
    spw_tokenizer *t, *whole = open_named("gpt2");
    spw_tokens got = {0}, want = {0};
    spw_error err = {0};
    json_t *root = load_named("gpt2"), *config = NULL;
    (void)state;
    tiny_dir_make(dir);
    /* GPT-2's own vocab.json holds <|endoftext|> at its end. */
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), "<|endoftext|>", json_integer(1200));
    write_pair(dir, root, "");
    snprintf(path, sizeof path, "%s/vocab.json", dir);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(spw_tokenizer_open(&t, i == 0 ? dir : path, &err), SPW_OK);
        encode(whole, text, bytes, i == 0, &want);
        encode(t, text, bytes, i == 0, &got);
        assert_same_ids("pair", 0, &got, &want);
        assert_int_equal(spw_tokenizer_vocab(t), spw_tokenizer_vocab(whole));
        assert_int_equal(spw_tokenizer_end(t), spw_tokenizer_end(whole));
        spw_tokenizer_close(t);
    }
    write_pair(dir, root, "a b c\n");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "merges.txt, line "));
    write_text(dir, "tokenizer_config.json", "{\"tokenizer_class\": \"BartTokenizer\"}");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "tokenizer_config.json: tokenizer_class: BartTokenizer"));
    json_decref(root);
    spw_tokenizer_close(whole);
    for (size_t i = 0; i < sizeof qwen / sizeof qwen[0]; i++) {
        whole = open_named(qwen[i].name);
        root = load_named(qwen[i].name);
        write_pair(dir, root, "");
        json_decref(config);
        config = config_of(qwen[i].class, json_object_get(root, "added_tokens"));
        write_json(dir, "tokenizer_config.json", config);
        if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
            fail_msg("%s", err.message);
        encode(whole, text, bytes, true, &want);
        encode(t, text, bytes, true, &got);
        assert_same_ids(qwen[i].class, 0, &got, &want);
        spw_tokenizer_close(t);
        spw_tokenizer_close(whole);
        json_decref(root);
    }
    set_at(config, "added_tokens_decoder.x", "{}");
    write_json(dir, "tokenizer_config.json", config);
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "tokenizer_config.json: added_tokens_decoder.x"));
    json_decref(config);
    spw_tokens_free(&got);
    spw_tokens_free(&want);
    tiny_dir_remove(dir);
    free(text);
}

/*
 * OPT's vocab.json and merges.txt: its tokenizer_config.json has no list of added tokens and names them one by one, of which </s> is
 * before each text and behind it, although <|endoftext|> is in the vocabulary too; without add_bos_token nothing is before.
 */
static void
test_pair_of_opt(void **state)
{
    static const char named[] =
        "\"bos_token\": {\"content\": \"</s>\", \"__type\": \"AddedToken\"}, \"eos_token\": \"</s>\", "
        "\"unk_token\": \"</s>\", \"pad_token\": \"<pad>\", \"tokenizer_class\": \"GPT2Tokenizer\"";
    json_t *root = load_named("gpt2"), *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    char dir[256], config[512];
    spw_tokenizer *t;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    json_object_set_new(vocab, "<|endoftext|>", json_integer(1200));
    json_object_set_new(vocab, "<pad>", json_integer(1201));
    json_object_set_new(vocab, "</s>", json_integer(1202));
    write_pair(dir, root, "");
    for (int adds = 0; adds < 2; adds++) {
        snprintf(config, sizeof config, "{%s, \"add_bos_token\": %s}", named, adds ? "true" : "false");
        write_text(dir, "tokenizer_config.json", config);
        if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_int_equal(begin_of(t), adds ? 1202 : -1);
        assert_int_equal(spw_tokenizer_end(t), 1202);
        spw_tokenizer_close(t);
    }
    json_decref(root);
    tiny_dir_remove(dir);
}

/* A folder with a tiktoken.model of the 256 bytes, "ab" and what `more` says; config: members of its tokenizer_config.json. */
static spw_status
open_tiktoken(const char *dir, const char *more, const char *config, spw_tokenizer **t, spw_error *err)
{
    static const char sixes[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[8192], whole[1024];
    size_t used = 0;
    for (unsigned b = 0; b < 256; b++)
        used += (size_t)sprintf(text + used, "%c%c== %u\n", sixes[b >> 2], sixes[(b & 3) << 4], b);
    sprintf(text + used, "YWI= 256\r\n%s", more);
    write_text(dir, "tiktoken.model", text);
    snprintf(whole, sizeof whole, "{%s}", config);
    write_text(dir, "tokenizer_config.json", whole);
    return spw_tokenizer_open(t, dir, err);
}

#define TIKTOKEN                                                                                                       \
    "\"tokenizer_class\": \"TikTokenTokenizer\", \"eos_token\": \"[EOS]\", \"auto_map\": "                             \
    "{\"AutoTokenizer\": [\"program.TikTokenTokenizer\", null]}, \"added_tokens_decoder\": "

/* Kimi's folders: ids without a name are reserved ones, what ends a text is said by name. */
static void
test_tiktoken(void **state)
{
    static const char text[] = "ab<|reserved_token_257|>[EOS]a";
    char dir[256], *back;
    spw_tokenizer *t;
    spw_tokens ids = {0};
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    if (open_tiktoken(dir, "", TIKTOKEN "{\"258\": {\"content\": \"[EOS]\", \"special\": true}}", &t, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_int_equal(spw_tokenizer_vocab(t), 513);
    assert_int_equal(spw_tokenizer_vocab_own(t), 257);
    assert_int_equal(spw_tokenizer_end(t), 258);
    assert_int_equal(begin_of(t), -1);
    encode(t, text, sizeof text - 1, true, &ids);
    assert_same_ids("tiktoken", 0, &ids, &(spw_tokens){(int32_t[]){256, 257, 258, 'a'}, 4, 4});
    assert_int_equal(decode(t, &ids, &back), sizeof text - 1);
    assert_memory_equal(back, text, sizeof text - 1);
    free(back);
    encode(t, "[EOS]", 5, false, &ids);
    assert_int_equal(ids.count, 5);
    spw_tokens_free(&ids);
    spw_tokenizer_close(t);
    tiny_dir_remove(dir);
}

/* What is no such file is refused by its line; the folder's program is not run, but has to have the pattern that is known. */
static void
test_tiktoken_refusals(void **state)
{
    static const struct {
        const char *more, *decoder, *message;
    } bad[] = {{"YWI= 257\n", "{}", "line 258: a token that is there twice"},
               {"YWJj\n", "{}", "line 258: not a token in base64"},
               {"YW*= 257\n", "{}", "line 258: not a token in base64"},
               {"YWJ 257\n", "{}", "line 258: not a token in base64"},
               {"==== 257\n", "{}", "line 258: not a token in base64"},
               {"YWJj -1\n", "{}", "line 258: what follows the token is not its number"},
               {"YWJj 257x\n", "{}", "line 258: what follows the token is not its number"},
               {"YWJj 16777216\n", "{}", "line 258: what follows the token is not its number"},
               {"YWJj 256\n", "{}", "id 256 is"},
               {"YWJj 300\n", "{}", "added_tokens[42].id: 300 and"}, /* an id is left out */
               {"", "{\"256\": {\"content\": \"[BOS]\"}}", "added_tokens_decoder.256 is none of the 256 ids behind"},
               {"", "{\"513\": {\"content\": \"[BOS]\"}}", "added_tokens_decoder.513 is none of the 256 ids behind"}};
    char dir[256], config[1024], program[4096] = "class TikTokenTokenizer:\n";
    spw_tokenizer *t;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(config, sizeof config, TIKTOKEN "%s", bad[i].decoder);
        err = (spw_error){0};
        if (open_tiktoken(dir, bad[i].more, config, &t, &err) != SPW_ECORRUPT ||
            strstr(err.message, bad[i].message) == NULL)
            fail_msg("%zu: %s", i, err.message);
    }
    assert_int_equal(open_tiktoken(dir, "", "\"tokenizer_class\": \"QWenTokenizer\"", &t, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "QWenTokenizer"));
    for (size_t i = 0; spw__tok_kimi_parts[i + 1] != NULL; i++) { /* the last is a part of the one before */
        write_text(dir, "program.py", program);
        assert_int_equal(open_tiktoken(dir, "", TIKTOKEN "{}", &t, &err), SPW_EUNSUPPORTED);
        assert_non_null(strstr(err.message, "program.py cuts texts by another pattern than Kimi-K2's"));
        snprintf(program + strlen(program), sizeof program - strlen(program), "r\"%s\",\n", spw__tok_kimi_parts[i]);
    }
    write_text(dir, "program.py", program);
    if (open_tiktoken(dir, "", TIKTOKEN "{}", &t, &err) != SPW_OK)
        fail_msg("%s", err.message);
    spw_tokenizer_close(t);
    tiny_dir_remove(dir);
}

/* Tokens by text and back; the tokens that begin and end a text; decoding what is no token. */
static void
test_lookup(void **state)
{
    spw_tokenizer *t = open_named("llama3");
    char dir[256], text[64];
    spw_error err = {0};
    json_t *root;
    uint64_t bytes;
    int32_t ids[3] = {spw_tokenizer_find(t, " the", 4), spw_tokenizer_find(t, "<|eot_id|>", 10), 5000};
    (void)state;
    assert_int_equal(spw_tokenizer_vocab(t), 1107);
    assert_int_equal(begin_of(t), 1104);
    assert_int_equal(spw_tokenizer_end(t), 1105);
    assert_int_equal(ids[1], 1106);
    assert_true(ids[0] >= 0);
    assert_int_equal(spw_tokenizer_find(t, "no such token", 13), -1);
    assert_memory_equal(spw_tokenizer_text(t, ids[0], &bytes), " the", 4);
    assert_int_equal(bytes, 4);
    assert_null(spw_tokenizer_text(t, -1, &bytes));
    assert_null(spw_tokenizer_text(t, 1107, &bytes));
    assert_int_equal(spw_tokenizer_decode(t, ids, 2, true, text, sizeof text, &bytes, &err), SPW_OK);
    assert_int_equal(bytes, 14);
    assert_memory_equal(text, " the<|eot_id|>", 14);
    assert_int_equal(spw_tokenizer_decode(t, ids, 2, false, text, sizeof text, &bytes, &err), SPW_OK);
    assert_int_equal(bytes, 4);
    assert_int_equal(spw_tokenizer_decode(t, ids, 2, true, text, 13, &bytes, &err), SPW_EINVAL);
    assert_int_equal(spw_tokenizer_decode(t, ids, 3, true, text, sizeof text, &bytes, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "5000"));
    spw_tokenizer_close(t);
    t = open_named("gpt2");
    assert_int_equal(begin_of(t), -1);
    assert_int_equal(spw_tokenizer_end(t), 1200);
    spw_tokenizer_close(t);
    /* Without a token of that name, tokenizer_config.json says which one ends a text. */
    tiny_dir_make(dir);
    root = load_named("llama3");
    set_at(root, "added_tokens.1.content", "\"<end>\"");
    write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_OK);
    assert_int_equal(spw_tokenizer_end(t), -1);
    spw_tokenizer_close(t);
    write_text(dir, "tokenizer_config.json",
               "{\"eos_token\": {\"content\": \"<end>\"}, \"model_max_length\": 1000000000000000019884624838656}");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_OK);
    assert_int_equal(spw_tokenizer_end(t), 1105);
    spw_tokenizer_close(t);
    tiny_dir_remove(dir);
}

/* What comes before a text: by tokenizer.json, but of classes that transformers itself gives one, by tokenizer_config.json. */
static void
test_begin(void **state)
{
    static const struct {
        const char *tokenizer, *config;
        int32_t begin;
    } cases[] = {
        {"llama3", "{\"tokenizer_class\": \"LlamaTokenizerFast\", \"bos_token\": \"<|begin_of_text|>\"}", 1104},
        {"llama3",
         "{\"tokenizer_class\": \"LlamaTokenizerFast\", \"bos_token\": \"<|begin_of_text|>\", \"add_bos_token\": "
         "false}",
         -1},
        {"llama3", "{\"tokenizer_class\": \"PreTrainedTokenizerFast\", \"add_bos_token\": false}", 1104},
        {"mixed",
         "{\"tokenizer_class\": \"LlamaTokenizerFast\", \"bos_token\": {\"content\": \"<pad>\"}, \"add_bos_token\": "
         "true}",
         902},
        {"mixed", "{\"tokenizer_class\": \"GemmaTokenizer\", \"bos_token\": \"<pad>\", \"add_bos_token\": true}", 902},
        {"mixed", "{\"tokenizer_class\": \"LlamaTokenizers\", \"bos_token\": \"<pad>\", \"add_bos_token\": true}", -1},
        {"mixed", "{\"tokenizer_class\": \"LlamaTokenizer\", \"bos_token\": null, \"add_bos_token\": true}", -1},
        {"mixed", "{\"tokenizer_class\": \"LlamaTokenizer\", \"bos_token\": \"<pad>\"}", 902}, /* as the class has it */
        {"gpt2", "{\"tokenizer_class\": \"GPTNeoXTokenizer\", \"add_bos_token\": true}", 1200},
        {"llama3", "{\"tokenizer_class\": \"GPTNeoXTokenizerFast\"}", -1},
        {"llama3", "{\"tokenizer_class\": \"LlamaTokenizer\"}", 1104}, /* whose <s> it does not have */
        {"gemma4", "{\"tokenizer_class\": \"GemmaTokenizer\", \"eos_token\": \"<eos>\"}", 2},
        {"gemma4", "{\"tokenizer_class\": \"GemmaTokenizer\", \"add_bos_token\": false}", -1},
        {"gemma4", "{}", -1},
    };
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *root = load_named(cases[i].tokenizer);
        spw_tokenizer *t;
        write_json(dir, "tokenizer.json", root);
        write_text(dir, "tokenizer_config.json", cases[i].config);
        json_decref(root);
        assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
        if (begin_of(t) != cases[i].begin)
            fail_msg("%s: %d", cases[i].config, begin_of(t));
        if (strstr(cases[i].config, "<eos>") != NULL)
            assert_int_equal(spw_tokenizer_end(t), 1);
        spw_tokenizer_close(t);
    }
    tiny_dir_remove(dir);
}

/* Several tokens before a text, as ChatGLM's tokenizers have them, in the template's order; of Llama's classes tokenizer_config.json decides. */
static void
test_begin_of_several(void **state)
{
    json_t *root = load_named("llama3");
    spw_tokens ids = {0};
    spw_tokenizer *t;
    spw_begin b;
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    set_at(root, "post_processor.processors.1.special_tokens.<|eot_id|>",
           "{\"id\": \"<|eot_id|>\", \"ids\": [1106], \"tokens\": [\"<|eot_id|>\"]}");
    set_at(root, "post_processor.processors.1.single",
           "[{\"SpecialToken\": {\"id\": \"<|eot_id|>\", \"type_id\": 0}}, " BOT
           ", {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}]");
    write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
    b = spw_tokenizer_begin(t);
    assert_int_equal(b.count, 2);
    assert_true(b.ids[0] == 1106 && b.ids[1] == 1104);
    assert_int_equal(spw_tokens_push_begin(&ids, &b, NULL), SPW_OK);
    assert_true(ids.count == 2 && ids.ids[0] == 1106 && ids.ids[1] == 1104);
    spw_tokens_free(&ids);
    spw_tokenizer_close(t);
    write_text(dir, "tokenizer_config.json",
               "{\"tokenizer_class\": \"LlamaTokenizer\", \"bos_token\": \"<|begin_of_text|>\"}");
    assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
    assert_int_equal(begin_of(t), 1104);
    spw_tokenizer_close(t);
    tiny_dir_remove(dir);
}

static spw_status
open_data(spw_data **out, const char *dir, const spw_tokenizer *t, uint64_t seq_length, spw_error *err)
{
    char path[300];
    const char *p = path;
    snprintf(path, sizeof path, "%s/text.txt", dir);
    return spw_data_open(out,
                         &(spw_data_options){.patterns = &p,
                                             .pattern_count = 1,
                                             .seq_length = seq_length,
                                             .vocab = spw_tokenizer_vocab(t),
                                             .encode = spw_tokenizer_encode_data,
                                             .encode_ctx = (void *)(uintptr_t)t,
                                             .encode_key = spw_tokenizer_key(t),
                                             .cache_dir = dir},
                         err);
}

/* Training data through a tokenizer: windows are the text's ids; another tokenizer has another cache. */
static void
test_training_data(void **state)
{
    uint64_t bytes;
    char dir[256], path[300], *text = read_file("cli/main.c", &bytes);
    int32_t tokens[8], targets[8];
    uint64_t keys[NAMES];
    spw_tokens ids = {0};
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/text.txt", dir);
    assert_int_equal(spw_file_write_text(path, text, NULL), SPW_OK);
    for (int n = 0; n < NAMES; n++) {
        spw_tokenizer *t = open_named(names[n]);
        spw_data *d;
        uint64_t windows;
        keys[n] = spw_tokenizer_key(t);
        for (int i = 0; i < n; i++)
            assert_true(keys[i] != keys[n]);
        encode(t, text, bytes, false, &ids);
        if (open_data(&d, dir, t, 8, &err) != SPW_OK)
            fail_msg("%s", err.message);
        windows = spw_data_sequences(d, SPW_SPLIT_TRAIN);
        assert_int_equal(windows, (ids.count - 1) / 8);
        for (uint64_t p = 0; p < windows; p++) {
            bool found = false;
            assert_int_equal(spw_data_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets, &err), SPW_OK);
            for (uint64_t w = 0; w < windows && !found; w++)
                found = memcmp(tokens, ids.ids + 8 * w, sizeof tokens) == 0 &&
                        memcmp(targets, ids.ids + 8 * w + 1, sizeof targets) == 0;
            assert_true(found);
        }
        spw_data_close(d);
        spw_tokenizer_close(t);
    }
    spw_tokens_free(&ids);
    tiny_dir_remove(dir);
    free(text);
}

/* Memory that is refused, at every place: an error, nothing lost, and the list of ids as it was. */
static void
test_no_memory(void **state)
{
    static const char text[] = "Hello wa\xcc\x88ter, the lake e\xcc\x81 "
                               "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!";
    bool through = false;
    (void)state;
    for (int n = 0; n < NAMES; n++) {
        char path[300];
        through = false;
        path_of(path, names[n]);
        for (unsigned k = 1; !through; k++) {
            spw_error err = {0};
            spw_tokenizer *t = NULL;
            spw_tokens ids = {0};
            long live = spw_test_live_allocs();
            spw_status st;
            spw_test_fail_alloc(k);
            st = spw_tokenizer_open(&t, path, &err);
            if (st == SPW_OK && !spw_test_fault_fired())
                st = spw_tokenizer_encode(t, text, sizeof text - 1, false, &ids, &err);
            through = !spw_test_fault_fired();
            spw_test_fail_alloc(0);
            if (st != SPW_OK) {
                assert_int_equal(st, SPW_ENOMEM);
                assert_int_equal(ids.count, 0);
            } else if (t != NULL && !through) { /* what only makes it slower may be refused */
                assert_int_equal(spw_tokenizer_encode(t, text, sizeof text - 1, false, &ids, &err), SPW_OK);
            }
            spw_tokens_free(&ids);
            spw_tokenizer_close(t);
            assert_int_equal(spw_test_live_allocs(), live);
        }
    }
}

typedef struct race {
    const spw_tokenizer *t;
    const char *text;
    uint64_t bytes;
    spw_tokens want;
    _Atomic int wrong;
} race;

static void
race_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    race *r = ctx;
    spw_tokens got = {0};
    uint64_t skip = part_idx % 2;
    (void)worker_idx;
    if (spw_tokenizer_encode(r->t, r->text + skip, r->bytes - skip, false, &got, NULL) != SPW_OK)
        r->wrong++;
    if (skip == 0 && (got.count != r->want.count || memcmp(got.ids, r->want.ids, got.count * sizeof *got.ids) != 0))
        r->wrong++;
    spw_tokens_free(&got);
}

/* Four threads on one tokenizer at once. */
static void
test_threads(void **state)
{
    spw_pool *pool;
    race r = {0};
    char *text = read_file("tests/vectors/tok_text.txt", &r.bytes);
    (void)state;
    assert_int_equal(spw_pool_create(&pool, 4, "race", NULL), SPW_OK);
    for (int n = 0; n < NAMES; n++) {
        r.t = open_named(names[n]);
        r.text = text;
        encode(r.t, text, r.bytes, false, &r.want);
        spw_pool_run(pool, 32, race_part, &r);
        spw_tokenizer_close((spw_tokenizer *)(uintptr_t)r.t);
    }
    assert_int_equal(r.wrong, 0);
    spw_tokens_free(&r.want);
    spw_pool_destroy(pool);
    free(text);
}

/* A text of more than one piece has no token more for it, also where a space is put before a text. */
static void
test_long_training_data(void **state)
{
    enum { TIMES = 120 };
    const int each = SANITIZED ? 4 : 1; /* of the tokenizers: their own ways were all taken above */
    uint64_t bytes;
    char dir[256], path[300], *once = read_file("cli/main.c", &bytes), *text = malloc(bytes * TIMES + 1);
    (void)state;
    assert_true(text != NULL && bytes * TIMES > 2 * TEXT_MAX);
    for (int i = 0; i < TIMES; i++)
        memcpy(text + bytes * (uint64_t)i, once, bytes + 1);
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/text.txt", dir);
    assert_int_equal(spw_file_write_text(path, text, NULL), SPW_OK);
    for (int n = 0; n < NAMES; n += each) {
        spw_tokenizer *t = open_named(names[n]);
        spw_tokens ids = {0};
        spw_error err = {0};
        spw_data *d;
        encode(t, text, bytes * TIMES, false, &ids);
        if (open_data(&d, dir, t, 1, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), ids.count - 1);
        spw_data_close(d);
        spw_tokens_free(&ids);
        spw_tokenizer_close(t);
    }
    tiny_dir_remove(dir);
    free(once);
    free(text);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_begin),
        cmocka_unit_test(test_begin_of_several),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_long_pieces),
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_characters),
        cmocka_unit_test(test_strips),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_pair),
        cmocka_unit_test(test_pair_of_opt),
        cmocka_unit_test(test_tiktoken),
        cmocka_unit_test(test_tiktoken_refusals),
        cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_hopeless_pattern),
        cmocka_unit_test(test_training_data),
        cmocka_unit_test(test_long_training_data),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
