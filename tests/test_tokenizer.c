/*
 * Tokenizers: the ids of the tokenizers library (vectors made by make_tokenizer_vectors.py) for the configurations of
 * GPT-2, Llama 3, Qwen2, Qwen3.5, gpt-oss, one with DeepSeek-V3's patterns and one that keeps matches alone, of Llama 2, Mistral and
 * four more by characters, and of Kimi-K2 by its ranks; any bytes come back. Files: test_tokenizer_files.c.
 */
#include "lib_tiny.h"
#include "lib_tokenizer.h"
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

#define BOT "{\"SpecialToken\": {\"id\": \"<|begin_of_text|>\", \"type_id\": 0}}" /* in a template */
enum { TEXT_MAX = 1 << 20 };

/* Every case of the hard text has the library's ids, with special tokens and without. Twice: the second time from the
 * cache. */
static void
test_vectors(void **state)
{
    uint64_t text_bytes;
    char *text = tok_read_file("tests/vectors/tok_text.txt", &text_bytes);
    (void)state;
    for (int n = 0; n < TOK_NAMES; n++) {
        char path[300];
        uint64_t want_bytes;
        spw_tokens got = {0}, want = {0};
        spw_tokenizer *t = tok_open_named(tok_names[n]);
        snprintf(path, sizeof path, "tests/vectors/tok_%s.ids", tok_names[n]);
        uint16_t *all = (uint16_t *)(void *)tok_read_file(path, &want_bytes);
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
                    tok_encode(t, p, (uint64_t)(end - p), special != 0, &got);
                    tok_assert_same_ids(tok_names[n], number, &got, &want);
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
    char *hard = tok_read_file("tests/vectors/tok_text.txt", &hard_bytes), *text = malloc(BYTES), *back, *again;
    spw_tokens ids = {0};
    (void)state;
    print_message("# SPW_SEED=%llu\n", (unsigned long long)seed);
    for (int n = 0; n < TOK_NAMES; n++) {
        spw_tokenizer *t;
        if (strstr("mixed llama2 mistral across alone", tok_names[n]) != NULL)
            continue; /* they have tokens that swallow white space, a space that is not always added, or leave text out */
        t = tok_open_named(tok_names[n]);
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
            tok_encode(t, text, BYTES, round % 2 != 0, &ids);
            bytes = tok_decode(t, &ids, &back);
            if (strstr("qwen2 qwen3_5", tok_names[n]) == NULL) {
                assert_int_equal(bytes, BYTES);
                assert_memory_equal(back, text, BYTES);
            } else {
                tok_encode(t, back, bytes, round % 2 != 0, &ids);
                assert_int_equal(tok_decode(t, &ids, &again), bytes);
                assert_memory_equal(back, again, bytes);
                free(again);
            }
            free(back);
        }
        for (int b = 0; b < 256; b++) {
            char byte = (char)b;
            tok_encode(t, &byte, 1, false, &ids);
            assert_int_equal(ids.count, 1);
            assert_int_equal(tok_decode(t, &ids, &back), 1);
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
    for (int n = 0; n < TOK_NAMES; n++) {
        spw_tokenizer *t = tok_open_named(tok_names[n]);
        for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
            uint64_t start = spw_process_cpu_ns(), bytes, length = strlen(units[u]);
            for (uint64_t i = 0; i < BYTES; i++)
                text[i] = units[u][i % length];
            tok_encode(t, text, BYTES, true, &ids);
            start = spw_process_cpu_ns() - start;
            if (getenv("SPW_VERBOSE") != NULL)
                print_message("# %s %zu: %.3f s\n", tok_names[n], u, (double)start * 1e-9);
            assert_true(start < 20000000000u); /* quadratic would take an hour */
            bytes = tok_decode(t, &ids, &back);
            if (!t->nfc && t->prefix != TOK_PREFIX_FIRST && t->prefix != TOK_PREFIX_MISSING &&
                strcmp(tok_names[n], "alone") != 0) {
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

/* DeepSeek-V3's patterns alone, and no added tokens that take white space. */
static spw_tokenizer *
open_deepseek(void)
{
    json_t *root = tok_load_named("mixed"), *added = json_object_get(root, "added_tokens");
    char dir[256];
    spw_tokenizer *t;
    assert_int_equal(json_array_remove(json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers"), 3), 0);
    tok_set_at(root, "pre_tokenizer.pretokenizers.2.pattern.Regex", /* line ends as they are, as it is published */
               "\"[!\\\"#$%&'()*+,\\\\-./"
               ":;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+|"
               " ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"");
    while (json_array_size(added) > 1)
        assert_int_equal(json_array_remove(added, 1), 0);
    tiny_dir_make(dir);
    tok_write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
    tiny_dir_remove(dir);
    return t;
}

/* The tokenizer of Qwen2's vector with another pattern. */
static spw_tokenizer *
open_pattern(const char *pattern)
{
    json_t *root = tok_load_named("qwen2"), *text = json_string(pattern);
    char dir[256], *quoted = json_dumps(text, JSON_ENCODE_ANY);
    spw_tokenizer *t;
    spw_error err = {0};
    tok_set_at(root, "pre_tokenizer.pretokenizers.0.pattern.Regex", quoted);
    tiny_dir_make(dir);
    tok_write_json(dir, "tokenizer.json", root);
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
    tok_encode(t, text, bytes, true, &whole);
    for (uint64_t at = 0, end; at < bytes; at = end) {
        end = spw_tokenizer_cut(t, text, bytes, at + 1);
        assert_true(end > at && end <= bytes);
        assert_int_equal(at == 0 ? spw_tokenizer_encode(t, text, end, true, &pieces, NULL)
                                 : spw_tokenizer_encode_rest(t, text + at, end - at, true, &pieces, NULL),
                         SPW_OK);
        cuts += end < bytes;
    }
    tok_assert_same_ids(name, 0, &pieces, &whole);
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
    char *text = tok_read_file("tests/vectors/tok_text.txt", &bytes), many[64 * TIMES];
    spw_tokenizer *plain = tok_open_named("gpt2"), *other;
    (void)state;
    for (int n = 0; n < TOK_NAMES; n++) {
        spw_tokenizer *t = tok_open_named(tok_names[n]);
        bool nowhere = strstr("mixed across alone", tok_names[n]) != NULL;
        uint64_t cuts = count_cuts(tok_names[n], t, text, bytes);
        assert_true(nowhere ? cuts == 0 : cuts > 40);
        for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
            many[0] = '\0';
            for (int k = 0; k < TIMES; k++)
                strcat(many, lines[i]);
            cuts = count_cuts(tok_names[n], t, many, strlen(many));
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
    json_t *root = tok_load_named("qwen2");
    spw_tokenizer *t;
    spw_tokens ids = {0};
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    tok_set_at(root, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(a|aa|aaa)+[xy]\"");
    tok_write_json(dir, "tokenizer.json", root);
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

/* Tokens by text and back; the tokens that begin and end a text; decoding what is no token. */
static void
test_lookup(void **state)
{
    spw_tokenizer *t = tok_open_named("llama3");
    char dir[256], text[64];
    spw_error err = {0};
    json_t *root;
    uint64_t bytes;
    int32_t ids[3] = {spw_tokenizer_find(t, " the", 4), spw_tokenizer_find(t, "<|eot_id|>", 10), 5000};
    (void)state;
    assert_int_equal(spw_tokenizer_vocab(t), 1107);
    assert_int_equal(tok_begin_of(t), 1104);
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
    t = tok_open_named("gpt2");
    assert_int_equal(tok_begin_of(t), -1);
    assert_int_equal(spw_tokenizer_end(t), 1200);
    spw_tokenizer_close(t);
    /* Without a token of that name, tokenizer_config.json says which one ends a text. */
    tiny_dir_make(dir);
    root = tok_load_named("llama3");
    tok_set_at(root, "added_tokens.1.content", "\"<end>\"");
    tok_write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_OK);
    assert_int_equal(spw_tokenizer_end(t), -1);
    spw_tokenizer_close(t);
    tok_write_text(dir, "tokenizer_config.json",
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
        json_t *root = tok_load_named(cases[i].tokenizer);
        spw_tokenizer *t;
        tok_write_json(dir, "tokenizer.json", root);
        tok_write_text(dir, "tokenizer_config.json", cases[i].config);
        json_decref(root);
        assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
        if (tok_begin_of(t) != cases[i].begin)
            fail_msg("%s: %d", cases[i].config, tok_begin_of(t));
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
    json_t *root = tok_load_named("llama3");
    spw_tokens ids = {0};
    spw_tokenizer *t;
    spw_begin b;
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    tok_set_at(root, "post_processor.processors.1.special_tokens.<|eot_id|>",
               "{\"id\": \"<|eot_id|>\", \"ids\": [1106], \"tokens\": [\"<|eot_id|>\"]}");
    tok_set_at(root, "post_processor.processors.1.single",
               "[{\"SpecialToken\": {\"id\": \"<|eot_id|>\", \"type_id\": 0}}, " BOT
               ", {\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}]");
    tok_write_json(dir, "tokenizer.json", root);
    json_decref(root);
    assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
    b = spw_tokenizer_begin(t);
    assert_int_equal(b.count, 2);
    assert_true(b.ids[0] == 1106 && b.ids[1] == 1104);
    assert_int_equal(spw_tokens_push_begin(&ids, &b, NULL), SPW_OK);
    assert_true(ids.count == 2 && ids.ids[0] == 1106 && ids.ids[1] == 1104);
    spw_tokens_free(&ids);
    spw_tokenizer_close(t);
    tok_write_text(dir, "tokenizer_config.json",
                   "{\"tokenizer_class\": \"LlamaTokenizer\", \"bos_token\": \"<|begin_of_text|>\"}");
    assert_int_equal(spw_tokenizer_open(&t, dir, NULL), SPW_OK);
    assert_int_equal(tok_begin_of(t), 1104);
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
    char dir[256], path[300], *text = tok_read_file("cli/main.c", &bytes);
    int32_t tokens[8], targets[8];
    uint64_t keys[TOK_NAMES];
    spw_tokens ids = {0};
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/text.txt", dir);
    assert_int_equal(spw_file_write_text(path, text, NULL), SPW_OK);
    for (int n = 0; n < TOK_NAMES; n++) {
        spw_tokenizer *t = tok_open_named(tok_names[n]);
        spw_data *d;
        uint64_t windows;
        keys[n] = spw_tokenizer_key(t);
        for (int i = 0; i < n; i++)
            assert_true(keys[i] != keys[n]);
        tok_encode(t, text, bytes, false, &ids);
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
    for (int n = 0; n < TOK_NAMES; n++) {
        char path[300];
        through = false;
        tok_path_of(path, tok_names[n]);
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
    char *text = tok_read_file("tests/vectors/tok_text.txt", &r.bytes);
    (void)state;
    assert_int_equal(spw_pool_create(&pool, 4, "race", NULL), SPW_OK);
    for (int n = 0; n < TOK_NAMES; n++) {
        r.t = tok_open_named(tok_names[n]);
        r.text = text;
        tok_encode(r.t, text, r.bytes, false, &r.want);
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
    char dir[256], path[300], *once = tok_read_file("cli/main.c", &bytes), *text = malloc(bytes * TIMES + 1);
    (void)state;
    assert_true(text != NULL && bytes * TIMES > 2 * TEXT_MAX);
    for (int i = 0; i < TIMES; i++)
        memcpy(text + bytes * (uint64_t)i, once, bytes + 1);
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/text.txt", dir);
    assert_int_equal(spw_file_write_text(path, text, NULL), SPW_OK);
    for (int n = 0; n < TOK_NAMES; n += each) {
        spw_tokenizer *t = tok_open_named(tok_names[n]);
        spw_tokens ids = {0};
        spw_error err = {0};
        spw_data *d;
        tok_encode(t, text, bytes * TIMES, false, &ids);
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
        cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_hopeless_pattern),
        cmocka_unit_test(test_training_data),
        cmocka_unit_test(test_long_training_data),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
