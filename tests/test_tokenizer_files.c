/*
 * Files of tokenizers: tokenizer.json, vocab.json with merges.txt, tiktoken.model and the tokenizer_config.json beside them; what is not supported
 * is refused by file and field.
 */
#include "lib_tiny.h"
#include "lib_tokenizer.h"
#include "spw_files.h"
#include "tokenizer_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define BOT "{\"SpecialToken\": {\"id\": \"<|begin_of_text|>\", \"type_id\": 0}}" /* in a template */

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
        json_t *root = tok_load_named(cases[i].name);
        spw_error err = {0};
        long live = spw_test_live_allocs();
        spw_status st;
        tok_set_at(root, cases[i].where, cases[i].value);
        tok_write_json(dir, "tokenizer.json", root);
        json_decref(root);
        st = spw_tokenizer_open(&t, dir, &err);
        if (st != cases[i].status || t != NULL || strstr(err.message, cases[i].field) == NULL ||
            strstr(err.message, "tokenizer.json") == NULL)
            fail_msg("%s = %s: %s, \"%s\"", cases[i].where, cases[i].value, spw_status_name(st), err.message);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        json_t *root = tok_load_named("qwen2"),
               *part = json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers");
        spw_error err = {0};
        spw_status st;
        json_object_set_new(json_object_get(json_array_get(part, 0), "pattern"), "Regex", json_string(patterns[i]));
        tok_write_json(dir, "tokenizer.json", root);
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
        spw_tokenizer *t = tok_open_named(cases[i].name);
        assert_true(t->chars && t->words == (strcmp(cases[i].name, "across") != 0));
        assert_int_equal(spw_tokenizer_end(t), 2);
        assert_int_equal(tok_begin_of(t), 1);
        tok_encode(t, cases[i].text, strlen(cases[i].text), false, &ids);
        assert_int_equal(tok_decode(t, &ids, &back), strlen(cases[i].back));
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
        json_t *root = tok_load_named(cases[i].name);
        spw_tokens want = {.ids = (int32_t *)(uintptr_t)cases[i].ids};
        spw_error err = {0};
        spw_tokenizer *t;
        add_token(root, "<L>", chars ? 601 : 1201, "lstrip", chars);
        add_token(root, "<R>", chars ? 602 : 1202, "rstrip", chars);
        if (!chars)
            add_token(root, "\n\n", 1203, "lstrip", false);
        tok_write_json(dir, "tokenizer.json", root);
        if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
            fail_msg("%s", err.message);
        while (want.count < 9 && want.ids[want.count] != 0)
            want.count++;
        tok_encode(t, cases[i].text, strlen(cases[i].text), true, &got);
        tok_assert_same_ids(cases[i].text, i, &got, &want);
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
    tok_write_text(dir, "tokenizer.json", "{\n\n\"a\": }");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "tokenizer.json, line 3"));
    tok_write_text(dir, "tokenizer.json", "[]");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    tok_write_text(dir, "tokenizer.json", "");
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
    tok_write_json(dir, "vocab.json", json_object_get(model, "vocab"));
    tok_write_text(dir, "merges.txt", text);
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
    char *text = tok_read_file("tests/vectors/tok_text.txt", &bytes);
    spw_tokenizer *t, *whole = tok_open_named("gpt2");
    spw_tokens got = {0}, want = {0};
    spw_error err = {0};
    json_t *root = tok_load_named("gpt2"), *config = NULL;
    (void)state;
    tiny_dir_make(dir);
    /* GPT-2's own vocab.json holds <|endoftext|> at its end. */
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), "<|endoftext|>", json_integer(1200));
    write_pair(dir, root, "");
    snprintf(path, sizeof path, "%s/vocab.json", dir);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(spw_tokenizer_open(&t, i == 0 ? dir : path, &err), SPW_OK);
        tok_encode(whole, text, bytes, i == 0, &want);
        tok_encode(t, text, bytes, i == 0, &got);
        tok_assert_same_ids("pair", 0, &got, &want);
        assert_int_equal(spw_tokenizer_vocab(t), spw_tokenizer_vocab(whole));
        assert_int_equal(spw_tokenizer_end(t), spw_tokenizer_end(whole));
        spw_tokenizer_close(t);
    }
    write_pair(dir, root, "a b c\n");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "merges.txt, line "));
    tok_write_text(dir, "tokenizer_config.json", "{\"tokenizer_class\": \"BartTokenizer\"}");
    assert_int_equal(spw_tokenizer_open(&t, dir, &err), SPW_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "tokenizer_config.json: tokenizer_class: BartTokenizer"));
    json_decref(root);
    spw_tokenizer_close(whole);
    for (size_t i = 0; i < sizeof qwen / sizeof qwen[0]; i++) {
        whole = tok_open_named(qwen[i].name);
        root = tok_load_named(qwen[i].name);
        write_pair(dir, root, "");
        json_decref(config);
        config = config_of(qwen[i].class, json_object_get(root, "added_tokens"));
        tok_write_json(dir, "tokenizer_config.json", config);
        if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
            fail_msg("%s", err.message);
        tok_encode(whole, text, bytes, true, &want);
        tok_encode(t, text, bytes, true, &got);
        tok_assert_same_ids(qwen[i].class, 0, &got, &want);
        spw_tokenizer_close(t);
        spw_tokenizer_close(whole);
        json_decref(root);
    }
    tok_set_at(config, "added_tokens_decoder.x", "{}");
    tok_write_json(dir, "tokenizer_config.json", config);
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
    json_t *root = tok_load_named("gpt2"), *vocab = json_object_get(json_object_get(root, "model"), "vocab");
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
        tok_write_text(dir, "tokenizer_config.json", config);
        if (spw_tokenizer_open(&t, dir, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_int_equal(tok_begin_of(t), adds ? 1202 : -1);
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
    tok_write_text(dir, "tiktoken.model", text);
    snprintf(whole, sizeof whole, "{%s}", config);
    tok_write_text(dir, "tokenizer_config.json", whole);
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
    assert_int_equal(tok_begin_of(t), -1);
    tok_encode(t, text, sizeof text - 1, true, &ids);
    tok_assert_same_ids("tiktoken", 0, &ids, &(spw_tokens){(int32_t[]){256, 257, 258, 'a'}, 4, 4});
    assert_int_equal(tok_decode(t, &ids, &back), sizeof text - 1);
    assert_memory_equal(back, text, sizeof text - 1);
    free(back);
    tok_encode(t, "[EOS]", 5, false, &ids);
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
        tok_write_text(dir, "program.py", program);
        assert_int_equal(open_tiktoken(dir, "", TIKTOKEN "{}", &t, &err), SPW_EUNSUPPORTED);
        assert_non_null(strstr(err.message, "program.py cuts texts by another pattern than Kimi-K2's"));
        snprintf(program + strlen(program), sizeof program - strlen(program), "r\"%s\",\n", spw__tok_kimi_parts[i]);
    }
    tok_write_text(dir, "program.py", program);
    if (open_tiktoken(dir, "", TIKTOKEN "{}", &t, &err) != SPW_OK)
        fail_msg("%s", err.message);
    spw_tokenizer_close(t);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_characters),
        cmocka_unit_test(test_strips),   cmocka_unit_test(test_files),
        cmocka_unit_test(test_pair),     cmocka_unit_test(test_pair_of_opt),
        cmocka_unit_test(test_tiktoken), cmocka_unit_test(test_tiktoken_refusals),
    };
    return cmocka_run_group_tests_name("tokenizer files", tests, NULL, NULL);
}
