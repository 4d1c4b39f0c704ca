/*
 * Conversations: ids and the assistant's mask are those of transformers' apply_chat_template (tests/make_chat_vectors.py) for each
 * layout; what a content spells stays text; layouts by file and by the tokenizer's tokens; what is refused, with its place;
 * and training data made of them.
 */
#include "lib_dataset.h"
#include "spw_chat.h"
#include "spw_files.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

/* A tokenizer of tests/vectors with more tokens, whose ids follow its own, in the test's folder. */
static spw_tokenizer *
open_with(const char *name, const json_t *added)
{
    char path[300];
    json_error_t why;
    json_t *root, *one;
    json_int_t next = 0;
    const char *token;
    size_t i;
    spw_tokenizer *t;
    spw_error err = {0};
    snprintf(path, sizeof path, "tests/vectors/tok_%s.json", name);
    root = json_load_file(path, 0, &why);
    assert_non_null(root);
    json_object_foreach(json_object_get(json_object_get(root, "model"), "vocab"), token, one) next =
        json_integer_value(one) >= next ? json_integer_value(one) + 1 : next;
    json_array_foreach(json_object_get(root, "added_tokens"), i, one) next =
        json_integer_value(json_object_get(one, "id")) >= next ? json_integer_value(json_object_get(one, "id")) + 1
                                                               : next;
    json_array_foreach(added, i, one)
    {
        json_t *copy = json_deep_copy(one);
        json_object_set_new(copy, "id", json_integer(next++));
        json_array_append_new(json_object_get(root, "added_tokens"), copy);
    }
    json_array_foreach(json_object_get(root, "added_tokens"), i, one)
    {
        if (json_object_get(one, "single_word") == NULL)
            json_object_set_new(one, "single_word", json_false());
    }
    snprintf(path, sizeof path, "%s/tokenizer.json", dataset_dir);
    assert_int_equal(json_dump_file(root, path, 0), 0);
    json_decref(root);
    if (spw_tokenizer_open(&t, path, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return t;
}

static spw_tokenizer *
open_spelled(const char *name, const char *added)
{
    json_t *list = json_loads(added, 0, NULL);
    spw_tokenizer *t;
    assert_non_null(list);
    t = open_with(name, list);
    json_decref(list);
    return t;
}

static spw_chat *
open_chat(const char *layout, const spw_tokenizer *t)
{
    spw_error err = {0};
    spw_chat *c;
    if (spw_chat_open(&c, layout, t, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return c;
}

static spw_status
try_line(spw_chat *c, const char *text, spw_tokens *tokens, spw_tokens *targets, spw_error *err)
{
    spw_data_line *line;
    spw_status st;
    tokens->count = targets->count = 0;
    assert_int_equal(spw_data_line_open(&line, text, strlen(text), err), SPW_OK);
    st = spw_chat_encode(c, line, NULL, tokens, targets, err);
    spw_data_line_close(line);
    return st;
}

static void
encode_line(spw_chat *c, const char *text, spw_tokens *tokens, spw_tokens *targets)
{
    spw_error err = {0};
    if (try_line(c, text, tokens, targets, &err) != SPW_OK)
        fail_msg("%s: %s", text, err.message);
    assert_int_equal(tokens->count, targets->count);
}

/* ids and mask of one conversation of the vectors. */
static void
compare(spw_chat *c, const char *layout, const json_t *conversation)
{
    char *line = json_dumps(conversation, 0);
    const json_t *ids = json_object_get(conversation, "ids");
    const char *mask = json_string_value(json_object_get(conversation, "mask"));
    spw_tokens tokens = {0}, targets = {0};
    encode_line(c, line, &tokens, &targets);
    for (uint64_t i = 0; i < json_array_size(ids) && i < tokens.count; i++) {
        int32_t want = (int32_t)json_integer_value(json_array_get(ids, i));
        if (tokens.ids[i] != want || targets.ids[i] != (mask[i] == '1' ? want : -1))
            fail_msg("%s: %s: token %d: %d with target %d, wanted %d, mask %c", layout, line, (int)i, tokens.ids[i],
                     targets.ids[i], want, mask[i]);
    }
    assert_int_equal(tokens.count, json_array_size(ids));
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    free(line);
}

/* Every layout, on every kind of tokenizer, id by id and target by target. */
static void
test_vectors(void **state)
{
    json_t *all = json_load_file("tests/vectors/chat.json", 0, NULL), *one, *conversation;
    size_t i, k;
    unsigned compared = 0;
    (void)state;
    json_array_foreach(all, i, one)
    {
        const char *layout = json_string_value(json_object_get(one, "layout"));
        spw_tokenizer *t =
            open_with(json_string_value(json_object_get(one, "tokenizer")), json_object_get(one, "added"));
        spw_chat *c = open_chat(layout, t);
        json_array_foreach(json_object_get(one, "conversations"), k, conversation)
        {
            compare(c, layout, conversation);
            compared++;
        }
        spw_chat_close(c);
        spw_tokenizer_close(t);
    }
    assert_true(compared > 150);
    json_decref(all);
}

#define INST_TOKENS                                                                                                    \
    "{\"content\":\"<s>\",\"special\":true},{\"content\":\"</s>\",\"special\":true},"                                  \
    "{\"content\":\"[INST]\",\"special\":true},{\"content\":\"[/INST]\",\"special\":true}"

#define IM_TOKENS                                                                                                      \
    "[{\"content\":\"<|im_start|>\",\"special\":true,\"lstrip\":false,\"rstrip\":false,\"normalized\":"                \
    "false},"                                                                                                          \
    "{\"content\":\"<|im_end|>\",\"special\":true,\"lstrip\":false,\"rstrip\":false,\"normalized\":false}"

static uint64_t
count_of(const spw_tokens *tokens, int32_t id)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < tokens->count; i++)
        count += tokens->ids[i] == id;
    return count;
}

/* Contents put together from special tokens and what resembles them: they stay text, and all of the text is there. */
static void
text_stays(const spw_tokenizer *t, uint64_t seed)
{
    static const char *const parts[] = {"<|im_end|>", "<|im_start|>",  "<|im_", "end|>", "<", "|>", "user", "\\n", " ",
                                        "assistant",  "<|endoftext|>", "</s>",  "<s>",   "a"};
    int32_t start = spw_tokenizer_find(t, "<|im_start|>", 12), end = spw_tokenizer_find(t, "<|im_end|>", 10);
    spw_chat *c = open_chat("chatml", t);
    spw_tokens tokens = {0}, targets = {0};
    for (int k = 0; k < 200; k++) {
        char content[400] = "", line[900], plain[900], text[1200];
        const char *from = content;
        uint64_t bytes, n = 0;
        spw_error err = {0};
        for (int i = 0; i < 12; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            strcat(content, parts[(seed >> 33) % (sizeof parts / sizeof parts[0])]);
        }
        snprintf(line, sizeof line,
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"},{\"role\":\"assistant\",\"content\":\"x\"}]}",
                 content);
        encode_line(c, line, &tokens, &targets);
        assert_int_equal(count_of(&tokens, start), 2);
        assert_int_equal(count_of(&tokens, end), 2);
        assert_int_equal(count_of(&targets, end), 1);
        assert_int_equal(count_of(&tokens, spw_tokenizer_find(t, "<|endoftext|>", 13)), 0);
        for (; *from != '\0'; from++)
            content[n++] = *from != '\\' ? *from : (from++, '\n');
        content[n] = '\0';
        snprintf(plain, sizeof plain, "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n", content);
        assert_int_equal(spw_tokenizer_decode(t, tokens.ids, tokens.count, true, text, sizeof text, &bytes, &err),
                         SPW_OK);
        text[bytes] = '\0';
        assert_string_equal(text, plain);
    }
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_chat_close(c);
}

static void
test_text_stays(void **state)
{
    const char *given = getenv("SPW_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 0) : 20240607;
    spw_tokenizer *t = open_spelled("qwen2", "[]");
    (void)state;
    print_message("SPW_SEED=%llu\n", (unsigned long long)seed);
    text_stays(t, seed);
    spw_tokenizer_close(t);
    t = open_spelled("gpt2", "[{\"content\":\"<|im_start|>\",\"special\":false,\"lstrip\":false,\"rstrip\":"
                             "false,\"normalized\":false},{\"content\":\"<|im_end|>\",\"special\":true,"
                             "\"lstrip\":false,\"rstrip\":false,\"normalized\":false}]");
    text_stays(t, seed); /* a layout's token that is not marked special is no different */
    spw_tokenizer_close(t);
}

static void
refuse_layout(const char *layout, const spw_tokenizer *t, spw_status want, const char *a, const char *b)
{
    spw_error err = {0};
    spw_chat *c;
    long live = spw_test_live_allocs();
    spw_status st = spw_chat_open(&c, layout, t, &err);
    if (st != want || strstr(err.message, a) == NULL || strstr(err.message, b) == NULL)
        fail_msg("%s: %s: %s", layout, spw_status_name(st), err.message);
    assert_null(c);
    assert_int_equal(spw_test_live_allocs(), live);
}

/* auto takes the layout whose tokens are there, the larger of two that contain each other; else it names them. */
static void
test_auto(void **state)
{
    spw_tokenizer *t = open_spelled("qwen2", "[]");
    spw_chat *c = open_chat("auto", t), *named = open_chat("chatml", t);
    (void)state;
    assert_string_equal(spw_chat_says(c), "auto: chatml, whose <|im_start|> <|im_end|> the tokenizer has");
    assert_string_equal(spw_chat_says(named), "chatml");
    assert_true(spw_chat_key(c) == spw_chat_key(named));
    assert_int_equal(spw_chat_end_of_turn(c), spw_tokenizer_find(t, "<|im_end|>", 10));
    spw_chat_close(c);
    spw_chat_close(named);
    refuse_layout("llama3", t, SPW_ECONFIG, "chat \"llama3\"", "has no token <|begin_of_text|>");
    refuse_layout("chatlm", t, SPW_ECONFIG, "\"chatlm\" is not known", "chatml, llama3, mistral");
    spw_tokenizer_close(t);
    t = open_spelled("gpt2", IM_TOKENS ",{\"content\":\"<|im_sep|>\",\"special\":true,\"lstrip\":false,"
                                       "\"rstrip\":false,\"normalized\":false}]");
    c = open_chat("auto", t);
    assert_non_null(strstr(spw_chat_says(c), "auto: phi4, "));
    spw_chat_close(c);
    spw_tokenizer_close(t);
    t = open_spelled("mixed", "[" INST_TOKENS "]");
    c = open_chat("auto", t);
    assert_non_null(strstr(spw_chat_says(c), "auto: mistral-tekken, "));
    spw_chat_close(c);
    spw_tokenizer_close(t);
    t = open_spelled("mixed", "[" INST_TOKENS ",{\"content\":\"[SYSTEM_PROMPT]\",\"special\":true},"
                              "{\"content\":\"[/SYSTEM_PROMPT]\",\"special\":true}]");
    c = open_chat("auto", t);
    assert_string_equal(spw_chat_says(c), "auto: mistral-v7, whose <s> </s> [INST] [/INST] [SYSTEM_PROMPT] "
                                          "[/SYSTEM_PROMPT] the tokenizer has");
    spw_chat_close(c);
    spw_tokenizer_close(t);
    t = open_spelled("gpt2", IM_TOKENS ",{\"content\":\"<bos>\",\"special\":true,\"lstrip\":false,\"rstrip\":"
                                       "false,\"normalized\":false},{\"content\":\"<start_of_turn>\","
                                       "\"special\":true,\"lstrip\":false,\"rstrip\":false,\"normalized\":false},"
                                       "{\"content\":\"<end_of_turn>\",\"special\":true,\"lstrip\":false,"
                                       "\"rstrip\":false,\"normalized\":false}]");
    refuse_layout("auto", t, SPW_ECONFIG, "special tokens of chatml and gemma", "name one");
    spw_tokenizer_close(t);
    t = open_spelled("gemma4", "[]");
    c = open_chat("auto", t);
    assert_string_equal(spw_chat_says(c), "auto: gemma4, whose <bos> <|turn> <turn|> the tokenizer has");
    assert_int_equal(spw_chat_end_of_turn(c), spw_tokenizer_find(t, "<turn|>", 7));
    spw_chat_close(c);
    spw_tokenizer_close(t);
    t = open_spelled("llama2", "[]");
    refuse_layout("auto", t, SPW_ECONFIG, "the special tokens of no layout", "chatml, llama3, mistral");
    spw_tokenizer_close(t);
    t = open_spelled("llama2", "[{\"content\":\"<|im_start|>\",\"special\":false,\"lstrip\":false,\"rstrip\":"
                               "false,\"normalized\":true},{\"content\":\"<|im_end|>\",\"special\":true,"
                               "\"lstrip\":false,\"rstrip\":false,\"normalized\":false}]");
    refuse_layout("chatml", t, SPW_ECONFIG, "token <|im_start|>", "is not special");
    spw_tokenizer_close(t);
}

/* A layout whose tokens the vocabulary has and the folder's chat template does not use is not the model's; of two the template decides. */
static void
test_auto_by_template(void **state)
{
    spw_tokenizer *t = open_spelled("qwen2", "[]");
    spw_chat *c;
    (void)state;
    dataset_write_text("tokenizer_config.json", "{\"model_max_length\": 1000000000000000019884624838656,"
                                                "\"chat_template\": \"{{ '<|user|>' + content }}\"}");
    refuse_layout("auto", t, SPW_ECONFIG, "has the special tokens of chatml, but the chat template", "name one");
    spw_chat_close(open_chat("chatml", t));
    dataset_write_text("tokenizer_config.json",
                       "{\"chat_template\": [{\"name\": \"default\", \"template\": \"{{ '<|user|>' + content }}\"}]}");
    refuse_layout("auto", t, SPW_ECONFIG, "does not use them", "name one");
    dataset_write_text("chat_template.jinja", "{{ '<|im_start|>' + role }}");
    spw_chat_close(open_chat("auto", t));
    spw_tokenizer_close(t);
    t = open_spelled("gpt2", IM_TOKENS ",{\"content\":\"<bos>\",\"special\":true},{\"content\":\"<start_of_turn>\","
                                       "\"special\":true},{\"content\":\"<end_of_turn>\",\"special\":true}]");
    dataset_write_text("chat_template.jinja", "{{ '<start_of_turn>' + role }}");
    c = open_chat("auto", t);
    assert_non_null(strstr(spw_chat_says(c), "auto: gemma, "));
    spw_chat_close(c);
    spw_tokenizer_close(t);
    t = open_spelled("gemma4", IM_TOKENS "]");
    dataset_write_text("chat_template.jinja", "{{ bos_token }}{{ '<|turn>' + role }}");
    c = open_chat("auto", t);
    assert_non_null(strstr(spw_chat_says(c), "auto: gemma4, "));
    spw_chat_close(c);
    spw_tokenizer_close(t);
}

/* A layout of a file, of plain text but for its end: where a turn begins and ends is found in bytes, after NFC too. */
static void
test_file(void **state)
{
    spw_tokenizer *t = open_spelled("qwen2", "[]");
    const char *path = dataset_path("layout.json");
    spw_tokens tokens = {0}, targets = {0}, whole = {0};
    spw_error err = {0};
    static const char want[] = "User: \u00e9\u00e9\u00e9\nBot: 7\u00e9\u00fa!\nT 5\n<|endoftext|>";
    char text[200];
    uint64_t bytes, n = 0;
    spw_chat *c;
    (void)state;
    dataset_write_text("layout.json",
                       "{\"user\": [\"User: \", \"\\n\"], \"assistant\": [\"Bot: \", \"!\\n\"], "
                       "\"tokens\": [\"<|endoftext|>\"], \"end\": \"<|endoftext|>\", \"tool\": [\"T \", \"\\n\"]}");
    c = open_chat(path, t);
    encode_line(c,
                "{\"messages\":[{\"role\":\"user\",\"content\":\"e\\u0301e\\u0301e\\u0301\"},"
                "{\"role\":\"assistant\",\"content\":\"7\\u00e9u\\u0301\"},{\"role\":\"tool\",\"content\":\"5\"}]}",
                &tokens, &targets);
    assert_int_equal(spw_tokenizer_encode(t, want, strlen(want), true, &whole, &err), SPW_OK);
    assert_int_equal(tokens.count, whole.count);
    assert_memory_equal(tokens.ids, whole.ids, whole.count * sizeof *whole.ids);
    for (uint64_t i = 0; i < targets.count; i++) { /* the answer's tokens are a stretch */
        if (targets.ids[i] >= 0)
            whole.ids[n++] = targets.ids[i];
    }
    assert_int_equal(spw_tokenizer_decode(t, whole.ids, n, true, text, sizeof text - 1, &bytes, &err), SPW_OK);
    text[bytes] = '\0';
    assert_non_null(strstr(text, "7\u00e9\u00fa!\n"));
    assert_true(bytes <= strlen(" 7\u00e9\u00fa!\n"));
    assert_int_equal(spw_chat_end_of_turn(c), -1);
    spw_chat_close(c);
    dataset_write_text("layout.json", "{\"user\": [\"U\", \"\"], \"assistant\": [\"A\"], \"tokens\": []}");
    refuse_layout(path, t, SPW_ECONFIG, "\"assistant\" is not", "layout.json");
    dataset_write_text("layout.json", "{\"user\": [\"U\", \"\"], \"assistant\": [\"A\", \"\"]}");
    refuse_layout(path, t, SPW_ECONFIG, "\"tokens\" is not a list", "layout.json");
    dataset_write_text("layout.json",
                       "{\"user\": [\"U\", \"\"], \"assistant\": [\"A\", \"<|eot|>\"], \"tokens\": [\"<|eot|>\"]}");
    refuse_layout(path, t, SPW_ECONFIG, "has no token <|eot|>", "layout.json");
    dataset_write_text("layout.json", "{\"users\": 1}");
    refuse_layout(path, t, SPW_ECONFIG, "unknown member \"users\"", "layout.json");
    dataset_write_text("layout.json", "{");
    refuse_layout(path, t, SPW_ECORRUPT, "layout.json, line 1", "");
    refuse_layout(dataset_path("none.json"), t, SPW_ENOENT, "none.json", "");
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_tokens_free(&whole);
    spw_tokenizer_close(t);
}

/* The older names, contents in parts and weights say the same; a user's last turn has no targets. */
static void
test_forms(void **state)
{
    static const char *const same[] = {
        "{\"system\":\"s\",\"conversations\":[{\"from\":\"human\",\"value\":\"Hi "
        "you\"},{\"from\":\"gpt\",\"value\":\"yes\"}],\"tools\":[]}",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\","
        "\"content\":\"Hi you\",\"reasoning_content\":\"\"},{\"role\":\"assistant\","
        "\"content\":\"yes\",\"tool_calls\":null}],\"system\":\"s\",\"tools\":null}",
        "{\"conversations\":[{\"from\":\"system\",\"value\":\"s\"},{\"from\":\"human\","
        "\"value\":\"Hi you\"},{\"from\":\"gpt\",\"value\":\"yes\"}]}",
        "{\"messages\":[{\"role\":\"system\",\"content\":[{\"type\":\"text\",\"text\":"
        "\"s\"}]},{\"role\":\"user\",\"content\":[{\"type\":"
        "\"text\",\"text\":\"Hi\"},{\"type\":\"text\",\"text\":\" "
        "you\"}]},{\"role\":\"assistant\",\"content\":[{\"type\":\"text\","
        "\"text\":\"yes\"}]}]}",
        "{\"messages\":null,\"text\":null,\"conversations\":[{\"role\":null,"
        "\"from\":\"system\",\"value\":\"s\"},{\"from\":\"human\",\"content\":null,\"value\":"
        "\"Hi you\",\"thinking\":false},{\"from\":\"gpt\",\"value\":\"yes\",\"weight\":null}]}",
        "{\"conversations\":0,\"messages\":[{\"role\":\"system\",\"content\":\"s\","
        "\"weight\":0},{\"role\":\"user\",\"content\":\"Hi you\"},"
        "{\"role\":\"assistant\",\"content\":\"yes\",\"weight\":1}]}"};
    spw_tokenizer *t = open_spelled("mistral", "[]");
    (void)state;
    for (int k = 0; k < 2; k++) {
        spw_chat *c =
            open_chat(k == 0 ? "zephyr" : "mistral-v1", t); /* the second puts the system's text before the user's */
        spw_tokens first = {0}, first_targets = {0}, tokens = {0}, targets = {0};
        encode_line(c, same[0], &first, &first_targets);
        assert_true(count_of(&first_targets, -1) < first_targets.count);
        for (size_t i = 1; i < sizeof same / sizeof same[0]; i++) {
            encode_line(c, same[i], &tokens, &targets);
            assert_int_equal(tokens.count, first.count);
            assert_memory_equal(tokens.ids, first.ids, first.count * sizeof *first.ids);
            assert_memory_equal(targets.ids, first_targets.ids, first.count * sizeof *first.ids);
        }
        encode_line(c,
                    "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"no\","
                    "\"weight\":0},"
                    "{\"role\":\"user\",\"content\":\"Why\"}]}",
                    &tokens, &targets);
        assert_int_equal(count_of(&targets, -1), targets.count);
        spw_tokens_free(&first);
        spw_tokens_free(&first_targets);
        spw_tokens_free(&tokens);
        spw_tokens_free(&targets);
        spw_chat_close(c);
    }
    spw_tokenizer_close(t);
}

#define SAYS(role, content) "{\"role\":\"" role "\",\"content\":\"" content "\"}"
#define TALKS(...)          "\"messages\":[" __VA_ARGS__ "]"
#define TALK(...)           "{" TALKS(__VA_ARGS__) "}"

/* A line that a layout refuses, with words of the message. */
struct refused {
    const char *layout, *line, *want, *also;
};

static void
refuses(const struct refused *r, spw_tokenizer *t, spw_tokens *tokens, spw_tokens *targets)
{
    spw_chat *c = open_chat(r->layout, t);
    spw_error err = {0};
    spw_status st = try_line(c, r->line, tokens, targets, &err);
    if (st != SPW_ECORRUPT || strstr(err.message, r->want) == NULL || strstr(err.message, r->also) == NULL)
        fail_msg("%s: %s: %s", r->line, spw_status_name(st), err.message);
    encode_line(c, TALK(SAYS("user", "x")), tokens, targets); /* nothing of it is left */
    assert_int_equal(count_of(tokens, tokens->ids[0]), 1);
    spw_chat_close(c);
}

/* What a layout cannot say, by message and member. */
static void
test_refused(void **state)
{
    static const struct refused cases[] = {
        {"zephyr", "{\"messages\":[]}", "\"messages\" is not a list of messages", ""},
        {"zephyr", "{\"messages\":\"x\"}", "\"messages\" is not a list of messages", ""},
        {"zephyr", "{\"conversations\":{}}", "\"conversations\" is not a list of messages", ""},
        {"zephyr", TALK("5"), "message 1", "no \"role\""},
        {"zephyr", TALK(SAYS("user", "x") ",{\"role\":5,\"content\":\"x\"}"), "message 2", "no \"role\""},
        {"zephyr", TALK(SAYS("robot", "x")), "message 1", "role \"robot\" is none of system, user"},
        {"zephyr", TALK("{\"role\":\"user\"}"), "message 1", "no \"content\""},
        {"zephyr", TALK("{\"role\":\"assistant\",\"content\":null}"), "message 1", "no \"content\""},
        {"zephyr", TALK("{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}"), "message 1",
         "part 0 of the content is \"image_url\""},
        {"zephyr", TALK("{\"role\":\"user\",\"content\":[\"x\"]}"), "message 1",
         "part 0 of the content is without a type"},
        {"zephyr", TALK("{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{}]}"), "message 1", "tool_calls"},
        {"zephyr", TALK("{\"role\":\"assistant\",\"content\":\"x\",\"reasoning_content\":\"hm\"}"), "message 1",
         "reasoning_content"},
        {"zephyr", TALK(SAYS("user", "x") ",{\"role\":\"assistant\",\"content\":\"x\",\"thinking\":\"hm\"}"),
         "message 2", "thinking"},
        {"zephyr", TALK("{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\"}}"), "message 1",
         "function_call"},
        {"zephyr", "{\"functions\":[{\"name\":\"f\"}]," TALKS(SAYS("user", "x")) "}", "\"functions\" is not empty", ""},
        {"zephyr", "{\"system\":\"s\"," TALKS(SAYS("system", "other") "," SAYS("user", "x")) "}", "message 1",
         "another text than the line's \"system\""},
        {"zephyr", "{\"system\":5," TALKS(SAYS("user", "x")) "}", "\"system\" is not text", ""},
        {"zephyr", "{\"tools\":[{\"type\":\"function\"}]," TALKS(SAYS("user", "x")) "}", "\"tools\"",
         "layout zephyr cannot say tools"},
        {"mistral-v1", "{\"system\":\"s\"," TALKS(SAYS("assistant", "x")) "}", "message 1", "begin with the user"},
        {"zephyr", TALK("{\"role\":\"assistant\",\"content\":\"\",\"weight\":0.5}"), "message 1",
         "\"weight\" is not 0 or 1"},
        {"zephyr", TALK(SAYS("tool", "x")), "message 1", "layout zephyr has no turns of a tool"},
        {"mistral-v1", TALK(SAYS("user", "x") "," SAYS("tool", "x")), "message 2", "no turns of a tool"},
        {"mistral-v1", TALK(SAYS("user", "x") "," SAYS("system", "x")), "message 2", "in front only"},
        {"mistral-v1", TALK(SAYS("assistant", "x")), "message 1", "begin with the user"},
        {"mistral-v1", TALK(SAYS("system", "x") "," SAYS("assistant", "x")), "message 2", "begin with the user"},
        {"mistral-v1", TALK(SAYS("user", "x") "," SAYS("user", "x")), "message 2", "two turns of the user in a row"},
        {"mistral-v1", TALK(SAYS("system", "x")), "without a user's turn", ""},
    };
    spw_tokenizer *t = open_spelled("mistral", "[]");
    spw_tokens tokens = {0}, targets = {0};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refuses(&cases[i], t, &tokens, &targets);
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_tokenizer_close(t);
}

#define USER              SAYS("user", "x")
#define NAMED             "\"name\":\"f\""
#define F                 "{\"id\":\"abcABC123\",\"type\":\"function\",\"function\":{" NAMED ",\"arguments\":{}}}"
#define CALLING           "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":["
#define ARGUMENTS(text)   CALLING "{\"id\":\"abcABC123\",\"function\":{" NAMED ",\"arguments\":" text "}}]}"
#define RESULT(id)        "{\"role\":\"tool\",\"content\":\"5\",\"tool_call_id\":\"" id "\"}"
#define TOOLS(tools, ...) "{\"tools\":" tools "," TALKS(__VA_ARGS__) "}"
#define THOUGHT(member)   "{\"role\":\"assistant\",\"content\":\"y\"," member "}"

/* A tokenizer with the special tokens of several layouts. */
static spw_tokenizer *
open_all_tokens(void)
{
    static const char *const names[] = {"<|im_start|>",
                                        "<|im_end|>",
                                        "[INST]",
                                        "[/INST]",
                                        "[AVAILABLE_TOOLS]",
                                        "[TOOL_CALLS]",
                                        "[TOOL_RESULTS]",
                                        "[/TOOL_RESULTS]",
                                        "<tool_call>",
                                        "[/AVAILABLE_TOOLS]",
                                        "<|begin_of_text|>",
                                        "<|start_header_id|>",
                                        "<|end_header_id|>",
                                        "<|eot_id|>"};
    json_t *list = json_array();
    spw_tokenizer *t;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        json_array_append_new(list, json_pack("{s:s, s:b, s:b, s:b, s:b}", "content", names[i], "special",
                                              strcmp(names[i], "<tool_call>") != 0, "lstrip", 0, "rstrip", 0,
                                              "normalized", 0));
    t = open_with("mistral", list);
    json_decref(list);
    return t;
}

/* Tools, calls, results and reasoning that are not what they have to be, or that a layout cannot say. */
static void
test_tools_refused(void **state)
{
    static const struct refused cases[] = {
        {"chatml", TALK(RESULT("a")), "message 1", "no call before it is without an answer"},
        {"chatml", TALK(USER "," RESULT("a")), "message 2", "no call before it"},
        {"chatml", TALK(USER "," SAYS("assistant", "y") "," SAYS("tool", "5")), "message 3", "no call before it"},
        {"chatml", TALK(USER "," CALLING F "]}," RESULT("abcABC123") "," RESULT("abcABC123")), "message 4",
         "no call before it is without"},
        {"chatml", TALK(USER "," CALLING F "]}," USER "," RESULT("abcABC123")), "message 4", "no call before it"},
        {"chatml", TALK(USER "," CALLING F "]}," RESULT("other")), "message 3",
         "\"tool_call_id\" \"other\" is none of the calls"},
        {"chatml", TALK(USER "," CALLING F "]},{\"role\":\"tool\",\"content\":\"5\",\"tool_call_id\":5}"), "message 3",
         "\"tool_call_id\" is not text"},
        {"chatml", TALK(USER "," CALLING F "]},{\"role\":\"tool\",\"content\":{\"a\":5}}"), "message 3",
         "no \"content\""},
        {"chatml", TALK(USER "," CALLING F "]},{\"role\":\"tool\",\"content\":[{\"type\":\"image\"}]}"), "message 3",
         "only {\"type\": \"text\"} is read"},
        {"chatml", TALK(USER "," CALLING F "]},{\"role\":\"tool\",\"content\":null}"), "message 3", "no \"content\""},
        {"chatml", TALK(USER "," ARGUMENTS("\"{\"")), "message 2: tool_calls: call 1",
         "\"arguments\", which are text: not JSON"},
        {"chatml", TALK(USER "," ARGUMENTS("\"\"")), "call 1", "which are text: not JSON"},
        {"chatml", TALK(USER "," ARGUMENTS("\"{}x\"")), "call 1", "which are text: not JSON"},
        {"chatml", TALK(USER "," ARGUMENTS("\"{\\\"a\\\":1,\\\"a\\\":2}\"")), "call 1", "which are text: not JSON"},
        {"chatml", TALK(USER "," ARGUMENTS("\"[1]\"")), "call 1", "text that is no JSON object"},
        {"chatml", TALK(USER "," ARGUMENTS("5")), "call 1", "neither an object nor text with one"},
        {"chatml", TALK(USER "," ARGUMENTS("null")), "call 1", "neither an object nor text with one"},
        {"chatml", TALK(USER "," ARGUMENTS("[{}]")), "call 1", "neither an object nor text with one"},
        {"chatml", TALK(USER "," ARGUMENTS("{\"n\":12345678901234567890}")), "call 1", "more than 64 bits"},
        {"chatml", TALK(USER "," CALLING F ",5]}"), "message 2: tool_calls: call 2", "it is not an object"},
        {"chatml", TALK(USER "," CALLING "null]}"), "call 1", "it is not an object"},
        {"chatml", TALK(USER "," CALLING "{}]}"), "call 1", "no \"name\""},
        {"chatml", TALK(USER "," CALLING "{\"function\":5}]}"), "call 1", "no \"name\""},
        {"chatml", TALK(USER "," CALLING "{\"name\":\"a\\\"b\",\"arguments\":{}}]}"), "call 1", "text without quotes"},
        {"chatml", TALK(USER "," CALLING "{\"name\":\"a\\u0000b\",\"arguments\":{}}]}"), "call 1",
         "text without quotes"},
        {"chatml", TALK(USER "," CALLING "{\"name\":\"\",\"arguments\":{}}]}"), "call 1", "no \"name\""},
        {"chatml", TALK(USER "," CALLING "{\"type\":\"custom\"," NAMED ",\"arguments\":{}}]}"), "call 1",
         "\"type\" is not"},
        {"chatml", TALK(USER "," CALLING "{\"type\":5," NAMED ",\"arguments\":{}}]}"), "call 1", "\"type\" is not"},
        {"chatml", TALK(USER "," CALLING "{\"id\":5," NAMED ",\"arguments\":{}}]}"), "call 1", "\"id\" is not text"},
        {"chatml", TALK(USER ",{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":\"f\"}"), "message 2",
         "are not a list"},
        {"chatml", TALK(USER ",{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":" F "}"), "message 2",
         "are not a list"},
        {"chatml", TALK("{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[" F "]}"), "message 1",
         "only the assistant makes"},
        {"chatml", TALK(USER ",{\"role\":\"assistant\",\"content\":\"\",\"function_call\":{" NAMED "}}"), "message 2",
         "function_call, an older form"},
        {"chatml", TALK(USER ",{\"role\":\"assistant\",\"tool_calls\":[]}"), "message 2", "no \"content\""},
        {"chatml", TALK("{\"role\":\"user\",\"content\":\"x\",\"reasoning\":\"y\"}"), "message 1",
         "only the assistant has"},
        {"chatml", TALK(USER "," THOUGHT("\"thinking\":5")), "message 2", "\"thinking\" is not text"},
        {"chatml", TALK(USER "," THOUGHT("\"reasoning_content\":[\"a\"]")), "message 2",
         "\"reasoning_content\" is not text"},
        {"chatml", TALK(USER "," THOUGHT("\"reasoning_content\":\"a\",\"reasoning\":\"b\"")), "message 2",
         "reasoning by two names"},
        {"chatml", TOOLS("\"x\"", USER), "field \"tools\"", "not JSON"},
        {"chatml", TOOLS("\"{}\"", USER), "field \"tools\"", "neither a list of tools nor text"},
        {"chatml", TOOLS("{\"a\":1}", USER), "field \"tools\"", "neither a list of tools nor text"},
        {"chatml", TOOLS("5", USER), "field \"tools\"", "neither a list of tools nor text"},
        {"chatml", TOOLS("[{},5]", USER), "field \"tools\"", "tool 2 is not an object"},
        {"chatml", TOOLS("[{\"n\":-12345678901234567890}]", USER), "tools: tool 1", "more than 64 bits"},
        {"chatml", "{\"functions\":[{}]," TALKS(USER) "}", "\"functions\" is not empty", "older form"},
        {"llama3", TALK(USER "," CALLING F "," F "]}"), "message 2",
         "2 tool_calls, and layout llama3 has one in a turn"},
        {"llama3", TALK(USER ",{\"role\":\"assistant\",\"content\":\"y\",\"tool_calls\":[" F "]}"), "message 2",
         "llama3 has no content beside calls"},
        {"llama3", TOOLS("[{}]", SAYS("assistant", "y") "," USER), "message 1", "in the first user's turn"},
        {"llama3", TOOLS("[{}]", SAYS("system", "s")), "field \"messages\"", "tools without a user's turn"},
        {"llama3", TALK(USER "," THOUGHT("\"reasoning\":\"a\"")), "message 2", "which layout llama3 cannot say"},
        {"mistral", TALK(USER "," CALLING "{" NAMED ",\"arguments\":{}}]}"), "call 1",
         "no \"id\", which layout mistral writes"},
        {"mistral", TALK(USER "," CALLING "{\"id\":\"call_1\"," NAMED ",\"arguments\":{}}]}"), "call 1",
         "\"call_1\", and layout mistral has 9 letters and digits"},
        {"mistral", TALK(USER "," CALLING "{\"id\":\"abc-BC123\"," NAMED ",\"arguments\":{}}]}"), "call 1",
         "9 letters and digits"},
        {"mistral", TALK(USER "," CALLING F "]}," SAYS("tool", "5")), "message 3", "no \"tool_call_id\""},
        {"mistral", TALK(USER "," CALLING F "]}," RESULT("abcABC123") "," USER), "message 4",
         "before the answer to a tool"},
        {"mistral", TALK(USER "," CALLING F "]}," USER), "message 3", "before the answer to a tool"},
        {"mistral", TALK(USER "," CALLING F "]}," CALLING F "]}"), "message 3", "two turns of the assistant in a row"},
        {"mistral", TALK(USER ",{\"role\":\"assistant\",\"content\":\"y\",\"tool_calls\":[" F "]}"), "message 2",
         "mistral has no content beside calls"},
        {"mistral", TOOLS("[{\"name\":\"f\"}]", USER), "field \"tools\"", "not an object with a \"function\""},
        {"zephyr", TALK(USER "," CALLING F "]}"), "message 2", "tool_calls: layout zephyr cannot say tools"},
        {"mistral-v1", TOOLS("\"[{}]\"", USER), "field \"tools\"", "layout mistral-v1 cannot say tools"},
    };
    spw_tokenizer *t = open_all_tokens();
    spw_tokens tokens = {0}, targets = {0};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refuses(&cases[i], t, &tokens, &targets);
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_tokenizer_close(t);
}

/* Layouts need more tokens for tools than without. */
static void
test_tools_need_tokens(void **state)
{
    spw_tokenizer *t = open_spelled(
        "mistral", "[{\"content\":\"[INST]\",\"special\":true},{\"content\":\"[/INST]\",\"special\":true}]");
    spw_chat *c = open_chat("mistral", t);
    spw_tokens tokens = {0}, targets = {0};
    spw_error err = {0};
    (void)state;
    encode_line(c, TALK(USER), &tokens, &targets);
    assert_int_equal(try_line(c, TOOLS("[{\"function\":{}}]", USER), &tokens, &targets, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "layout mistral needs the token [AVAILABLE_TOOLS] for tools"));
    assert_int_equal(try_line(c, TALK(USER "," CALLING F "]}"), &tokens, &targets, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "message 2"));
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_chat_close(c);
    spw_tokenizer_close(t);
}

static void
assert_same(spw_chat *c, const char *const *lines, size_t count)
{
    spw_tokens first = {0}, first_targets = {0}, tokens = {0}, targets = {0};
    encode_line(c, lines[0], &first, &first_targets);
    for (size_t i = 1; i < count; i++) {
        print_message("%s\n", lines[i]);
        encode_line(c, lines[i], &tokens, &targets);
        assert_int_equal(tokens.count, first.count);
        assert_memory_equal(tokens.ids, first.ids, first.count * sizeof *first.ids);
        assert_memory_equal(targets.ids, first_targets.ids, first.count * sizeof *first.ids);
    }
    spw_tokens_free(&first);
    spw_tokens_free(&first_targets);
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
}

/* Forms of tools, calls and reasoning that say the same; numbers keep their form where another number of the line has too many digits. */
static void
test_tool_forms(void **state)
{
    static const char *const tools[] = {
        TOOLS("[{\"a\":{\"n\":5,\"x\":1.5}}]",
              USER "," ARGUMENTS("{\"n\":5,\"x\":5.0}") ",{\"role\":\"tool\",\"content\":\"7\"}"),
        TOOLS("\"[{\\\"a\\\": {\\\"n\\\":5, \\\"x\\\":15e-1}}]\"",
              USER ",{\"role\":\"assistant\",\"tool_calls\":[{\"id\":null,\"type\":null," NAMED
                   ",\"arguments\":\" {\\\"n\\\":5,\\n\\\"x\\\":5.00}\"}],\"reasoning\":\"\",\"function_call\":null},"
                   "{\"role\":\"tool\",\"name\":\"f\",\"content\":[{\"type\":\"text\",\"text\":\"7\"}],\"tool_calls\":["
                   "],\"tool_call_id\":null}"),
        "{\"s\":\"\\\\\\\"1234567890123456789012\",\"n\":[-1234567890123456789012,12345678901234567890e-2,1."
        "0123456789012345678901,1e1],"
        "\"tools\":[{\"a\":{\"n\":5,\"x\":1.5}}],"
        "\"conversations\":[{\"from\":\"human\",\"value\":\"x\"},{\"from\":\"gpt\",\"value\":\"\",\"tool_calls\":[" F
        "]},"
        "{\"from\":\"tool\",\"value\":\"7\"}]}"};
    static const char *const thoughts[] = {TALK(USER "," THOUGHT("\"reasoning_content\":\"hm\"")),
                                           TALK(USER "," THOUGHT("\"reasoning\":\"\\nhm\\n\\n\"")),
                                           TALK(USER "," THOUGHT("\"thinking\":\"hm\",\"reasoning_content\":\"hm\"")),
                                           TALK(USER "," SAYS("assistant", "<think>\\nhm\\n</think>\\n\\ny"))};
    static const char *const nothing[] = {
        TALK(USER "," SAYS("assistant", "y")),
        "{\"tools\":\"[]\"," TALKS(USER "," THOUGHT("\"reasoning\":null,\"thinking\":false")) "}",
        "{\"tools\":\"\"," TALKS(USER "," THOUGHT("\"tool_calls\":null")) "}",
        "{\"tools\":[]," TALKS(USER "," THOUGHT("\"tool_calls\":[]")) "}"};
    char third[1200];
    const char *both[2] = {tools[0], third};
    const char *at = strstr(tools[2], "\"arguments\":{}");
    spw_tokenizer *t = open_all_tokens();
    spw_chat *c = open_chat("chatml", t);
    (void)state;
    snprintf(third, sizeof third, "%.*s\"arguments\":{\"n\":5,\"x\":5.0}%s", (int)(at - tools[2]), tools[2], at + 14);
    assert_same(c, tools, 2);
    assert_same(c, both, 2);
    assert_same(c, thoughts, 4);
    assert_same(c, nothing, 4);
    spw_chat_close(c);
    spw_tokenizer_close(t);
}

/* auto says tools and reasoning where the folder's template does, in the same way; by name a layout says them anyway. */
static void
test_auto_tools(void **state)
{
    static const char tools[] = TOOLS("[{}]", USER "," CALLING F "]}"), calls[] = TALK(USER "," CALLING F "]}");
    static const char thought[] = TALK(USER "," THOUGHT("\"reasoning\":\"a\""));
    static const struct {
        const char *template;
        bool tools, thought;
    } cases[] = {
        {NULL, true, true},
        {"{{ '<|im_start|>' }}", false, false},
        {"{{ '<|im_start|>' }} <tool_call> <tool_response> <args-dict>", false, false},
        {"{{ '<|im_start|>' }} <tool_response> <args-json-object>", true, false},
        {"{{ '<|im_start|>' }} <tool_response> <args-json-object> ns.last_query_index", true, true},
        {"{{ '<|im_start|>' }} <tool_response> <function=example> ns.last_query_index", false, true},
    };
    spw_tokens tokens = {0}, targets = {0};
    spw_error err = {0};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        spw_tokenizer *t = open_spelled("qwen2", "[]");
        spw_chat *c, *named;
        if (cases[i].template != NULL)
            dataset_write_text("chat_template.jinja", cases[i].template);
        c = open_chat("auto", t);
        named = open_chat("chatml", t);
        assert_true(spw_chat_key(c) == spw_chat_key(named));
        assert_int_equal(try_line(c, tools, &tokens, &targets, &err), cases[i].tools ? SPW_OK : SPW_ECORRUPT);
        if (!cases[i].tools)
            assert_non_null(strstr(err.message, "field \"tools\": the chat template beside"));
        assert_int_equal(try_line(c, calls, &tokens, &targets, &err), cases[i].tools ? SPW_OK : SPW_ECORRUPT);
        assert_int_equal(try_line(c, thought, &tokens, &targets, &err), cases[i].thought ? SPW_OK : SPW_ECORRUPT);
        if (!cases[i].thought)
            assert_non_null(strstr(err.message, "does not say it as layout chatml does, with last_query_index"));
        encode_line(c, TALK(USER), &tokens, &targets);
        encode_line(named, tools, &tokens, &targets);
        encode_line(named, thought, &tokens, &targets);
        spw_chat_close(c);
        spw_chat_close(named);
        spw_tokenizer_close(t);
    }
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
}

/* Layouts of a file say tools and reasoning, too: chatml written as one is chatml, and another has its texts where they belong. */
static void
test_file_tools(void **state)
{
    static const char chatml[] =
        "{\"system\":[\"<|im_start|>system\\n\",\"<|im_end|>\\n\"],\"user\":[\"<|im_start|>user\\n\",\"<|im_end|>\\n\"]"
        ","
        "\"assistant\":[\"<|im_start|>assistant\\n\",\"<|im_end|>\\n\"],\"tool\":[\"\\n<tool_response>\\n\",\"\\n</"
        "tool_response>\"],"
        "\"tokens\":[\"<|im_start|>\",\"<|im_end|>\"],\"tools_in\":\"system\",\"calls_behind\":\"\\n\","
        "\"tools\":[\"# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are "
        "provided with function "
        "signatures within <tools></tools> XML tags:\\n<tools>\\n\",\"\\n\",\"\\n</tools>\\n\\nFor each function call, "
        "return a json object "
        "with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\\"name\\\": "
        "<function-name>, "
        "\\\"arguments\\\": <args-json-object>}\\n</tool_call>\"],\"calls\":[\"\",\"<tool_call>\\n{\\\"name\\\": "
        "\\\"{name}\\\", "
        "\\\"arguments\\\": "
        "{arguments}}\\n</tool_call>\",\"\\n\",\"\"],\"results\":[\"<|im_start|>user\",\"<|im_end|>\\n\"],"
        "\"reasoning\":[\"<think>\\n\",\"\\n</think>\\n\\n\"]}";
    static const char own[] =
        "{\"user\":[\"U \",\";\"],\"assistant\":[\"A \",\"<|endoftext|>;\"],\"tokens\":[\"<|endoftext|>\"],"
        "\"tool\":[\"R \",\" {id};\"],\"results\":[\"(\",\")\"],\"tools\":[\"T:\",\"|\",\";\"],\"tools_in\":\"last "
        "user\",\"tools_indent\":1,\"calls\":[\"C\",\"<{id}:{name}{arguments}>\",null,\".\"],\"reasoning\":[\"[\",\"]"
        "\"]}";
    static const char line[] = TOOLS("[{\"b\":[1],\"a\":{}},{}]", USER
                                     "," SAYS("assistant", "y") "," USER ",{\"role\":\"assistant\",\"tool_calls\":[" F
                                                                "],\"thinking\":\"hm\"}," RESULT("abcABC123"));
    static const struct {
        const char *from, *to, *want;
    } wrong[] = {
        {"null,\".\"]", "null]", "\"calls\" is not [text before calls, a call"},
        {"\"C\",\"<", "null,\"<", "\"calls\" is not"},
        {"{name}", "name", "a call without {name} and {arguments}"},
        {"[\"T:\",\"|\",\";\"]", "[\"T:\",\"|\"]", "\"tools\" is not [text before the tools"},
        {"[\"T:\",\"|\",\";\"]", "[\"T:\",5,\";\"]", "\"tools\" is not [text before the tools"},
        {"\"last user\"", "\"user\"", "\"tools_in\" is not \"system\", \"first user\" or \"last user\""},
        {"\"last user\"", "5", "\"tools_in\" is not"},
        {"\"last user\"", "\"system\"", "and there is no \"system\""},
        {"indent\":1", "indent\":-1", "\"tools_indent\" is not a number from 0 to 16"},
        {"indent\":1", "indent\":\"1\"", "\"tools_indent\" is not"},
        {"\"(\",\")\"", "\"(\"", "\"results\" is not"},
        {"\"[\",\"]\"", "{}", "\"reasoning\" is not"},
        {"\"tool\":[\"R \",\" {id};\"],", "", "\"tools\", \"calls\" and \"tool\" belong together"},
        {"\"tools\":[\"T:\",\"|\",\";\"],", "", "belong together"},
        {"\"tools_indent\":1", "\"calls_behind\":5", "\"calls_behind\" is not text"},
    };
    spw_tokenizer *t = open_spelled("qwen2", "[]");
    spw_tokens tokens = {0}, targets = {0};
    spw_error err = {0};
    static const char *const other[][2] = {{"T:", "S:"},
                                           {"\"C\"", "\"D\""},
                                           {"null,\".\"", "\",\",\".\""},
                                           {"(", "[("},
                                           {"\"[\"", "\"{\""},
                                           {"indent\":1", "indent\":2"},
                                           {"last user", "first user"},
                                           {"\"tools_in\"", "\"calls_behind\":\",\",\"tools_in\""}};
    spw_chat *named = open_chat("chatml", t), *c;
    char text[1000];
    uint64_t bytes, n = 0;
    (void)state;
    dataset_write_text("layout.json", chatml);
    c = open_chat(dataset_path("layout.json"), t);
    assert_true(spw_chat_key(c) == spw_chat_key(named)); /* every text is the same */
    spw_chat_close(c);
    dataset_write_text("layout.json", own);
    c = open_chat(dataset_path("layout.json"), t);
    assert_true(spw_chat_key(c) != spw_chat_key(named));
    encode_line(c, line, &tokens, &targets);
    assert_int_equal(spw_tokenizer_decode(t, tokens.ids, tokens.count, true, text, sizeof text - 1, &bytes, &err),
                     SPW_OK);
    text[bytes] = '\0';
    assert_string_equal(text, "U x;A y<|endoftext|>;T:{\n \"b\": [\n  1\n ],\n \"a\": {}\n}|{};U x;"
                              "A [hm]C<abcABC123:f{}>.<|endoftext|>;(R 5 abcABC123;)");
    for (uint64_t i = 0; i < targets.count; i++) {
        if (targets.ids[i] >= 0)
            tokens.ids[n++] = targets.ids[i];
    }
    assert_int_equal(spw_tokenizer_decode(t, tokens.ids, n, true, text, sizeof text - 1, &bytes, &err), SPW_OK);
    text[bytes] = '\0';
    assert_non_null(strstr(text, "y<|endoftext|>"));
    assert_non_null(strstr(text, "[hm]C<abcABC123:f{}>.<|endoftext|>"));
    assert_true(bytes <= strlen(" y<|endoftext|> [hm]C<abcABC123:f{}>.<|endoftext|>"));
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++) { /* another text is another encoder */
        const char *at = strstr(own, other[i][0]);
        spw_chat *changed;
        assert_non_null(at);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - own), own, other[i][1], at + strlen(other[i][0]));
        dataset_write_text("layout.json", text);
        changed = open_chat(dataset_path("layout.json"), t);
        assert_true(spw_chat_key(changed) != spw_chat_key(c));
        spw_chat_close(changed);
    }
    spw_chat_close(c);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const char *at = strstr(own, wrong[i].from);
        assert_non_null(at);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - own), own, wrong[i].to, at + strlen(wrong[i].from));
        dataset_write_text("layout.json", text);
        refuse_layout(dataset_path("layout.json"), t, SPW_ECONFIG, wrong[i].want, "layout.json");
    }
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_chat_close(named);
    spw_tokenizer_close(t);
}

/* A prompt is the conversation up to where the answer begins. */
static void
test_prompt(void **state)
{
    static const struct {
        const char *tokenizer, *layout, *last; /* token of the prompt */
    } cases[] = {{"mistral", "zephyr", NULL},
                 {"mistral", "mistral-v1", NULL},
                 {"gemma4", "gemma4", "\n"},
                 {"gemma4", "examples/chat_gemma4_no_thinking.json", "<channel|>"}};
    spw_tokens prompt = {0}, tokens = {0}, targets = {0};
    spw_error err = {0};
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        spw_tokenizer *t = open_spelled(cases[k].tokenizer, "[]");
        spw_chat *c = open_chat(cases[k].layout, t);
        const char *last = cases[k].last;
        prompt.count = 0;
        assert_int_equal(spw_chat_encode_prompt(c, "Hi you", 6, &prompt, &err), SPW_OK);
        encode_line(c, TALK(SAYS("user", "Hi you") "," SAYS("assistant", "yes")), &tokens, &targets);
        assert_true(prompt.count < tokens.count);
        assert_memory_equal(prompt.ids, tokens.ids, prompt.count * sizeof *prompt.ids);
        for (uint64_t i = 0; i < prompt.count; i++)
            assert_int_equal(targets.ids[i], -1);
        assert_true(targets.ids[prompt.count] >= 0);
        if (last != NULL)
            assert_int_equal(prompt.ids[prompt.count - 1], spw_tokenizer_find(t, last, strlen(last)));
        spw_chat_close(c);
        spw_tokenizer_close(t);
    }
    spw_tokens_free(&prompt);
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
}

/* Training data: conversations and texts in one file, without a token behind a conversation; the cache knows the layout. */
static void
test_data(void **state)
{
    spw_tokenizer *t = open_spelled("qwen2", "[]");
    spw_chat *c = open_chat("auto", t), *other;
    spw_data_options o = dataset_options("c.jsonl");
    spw_tokens tokens = {0}, targets = {0};
    int32_t row[200], want[200];
    char encoder[64];
    spw_data *d;
    (void)state;
    dataset_write_text("c.jsonl", TALK(SAYS("user", "Hi") "," SAYS("assistant", "yes")) "\n{\"text\":\"a b\"}\n" TALK(
                                      SAYS("user", "x")) "\n");
    encode_line(c, TALK(SAYS("user", "Hi") "," SAYS("assistant", "yes")), &tokens, &targets);
    o.encode = spw_tokenizer_encode_data;
    o.encode_ctx = t;
    o.encode_key = spw_tokenizer_key(t);
    o.end_of_text = spw_tokenizer_end(t);
    o.end_of_text_set = true;
    o.chat = c;
    o.seq_length = tokens.count + 2;
    for (int masked = 0; masked < 2; masked++) {
        o.documents = masked ? SPW_DOCUMENTS_MASK : SPW_DOCUMENTS_PACKED;
        d = dataset_open(&o);
        dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, row, want);
        assert_memory_equal(row, tokens.ids, tokens.count * sizeof *row);
        assert_memory_equal(want, targets.ids + 1, (tokens.count - 1) * sizeof *row);
        assert_int_equal(want[tokens.count - 1],
                         masked ? -1 : row[tokens.count]); /* the text, whose first token is next */
        assert_string_equal(spw_data_chat(d), spw_chat_says(c));
        snprintf(encoder, sizeof encoder, "%s", spw_data_encoder(d));
        spw_data_close(d);
    }
    o.messages_field = "talk"; /* another cache, where lines have to be texts */
    dataset_refuse(&o, SPW_ECORRUPT, "c.jsonl: line 1 (byte 0)", "no field \"text\"", NULL);
    o.messages_field = NULL;
    dataset_write_text("layout.json",
                       "{\"user\": [\"User: \", \"\\n\"], \"assistant\": [\"Bot: \", \"\\n\"], \"tokens\": []}");
    other = open_chat(dataset_path("layout.json"), t);
    o.chat = other;
    o.seq_length = 8;
    d = dataset_open(&o);
    assert_string_not_equal(spw_data_encoder(d), encoder);
    dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, row, want);
    assert_memory_not_equal(row, tokens.ids, 8 * sizeof *row);
    spw_data_close(d);
    dataset_write_text("c.jsonl", "{\"text\":\"a b\"}\n\n" TALK(SAYS("user", "x") "," SAYS("bot", "y")) "\n");
    dataset_refuse(&o, SPW_ECORRUPT, "c.jsonl: line 3 (byte 16)", "message 2", "role \"bot\"", NULL);
    spw_chat_close(other);
    /* The first token of a conversation that begins with an answer: a target, unless documents are told apart. */
    dataset_write_text(
        "layout.json",
        "{\"system\": [\"S\", \"\"], \"user\": [\"U\", \"\"], \"assistant\": [\"\", \"\\n\"], \"tokens\": []}");
    other = open_chat(dataset_path("layout.json"), t);
    dataset_write_text("c.jsonl", TALK(SAYS("assistant", "a")) "\n" TALK(SAYS("assistant", "a")) "\n" TALK(
                                      SAYS("assistant", "a")) "\n");
    o.chat = other;
    o.seq_length = 4;
    for (int masked = 0; masked < 2; masked++) {
        o.documents = masked ? SPW_DOCUMENTS_MASK : SPW_DOCUMENTS_PACKED;
        d = dataset_open(&o);
        dataset_fill(d, SPW_SPLIT_TRAIN, 0, 1, row, want);
        assert_int_equal(want[1], masked ? -1 : row[2]);
        assert_int_equal(want[2], row[3]);
        spw_data_close(d);
    }
    spw_chat_close(other);
    spw_tokens_free(&tokens);
    spw_tokens_free(&targets);
    spw_chat_close(c);
    spw_tokenizer_close(t);
}

/* Memory that is refused, at every place. */
static void
no_memory(const spw_tokenizer *t, const char *layout, const char *text)
{
    spw_data_line *line;
    spw_error err = {0};
    bool through = false;
    assert_int_equal(spw_data_line_open(&line, text, strlen(text), &err), SPW_OK);
    for (unsigned k = 0; !through; k++) { /* 0: no failure, and the tokenizer has the memory that it keeps */
        spw_tokens tokens = {0}, targets = {0};
        long live = spw_test_live_allocs();
        spw_chat *c;
        spw_status st;
        if (k > 0)
            spw_test_fail_alloc(k);
        st = spw_chat_open(&c, layout, t, &err);
        if (st == SPW_OK)
            st = spw_chat_encode(c, line, NULL, &tokens, &targets, &err);
        through = k > 0 && !spw_test_fault_fired();
        if (st != (k == 0 || through ? SPW_OK : SPW_ENOMEM))
            fail_msg("%s: allocation %u: %s", layout, k, err.message);
        spw_chat_close(c);
        spw_tokens_free(&tokens);
        spw_tokens_free(&targets);
        assert_true(k == 0 || spw_test_live_allocs() == live);
    }
    spw_test_fail_alloc(0);
    spw_data_line_close(line);
}

static void
test_no_memory(void **state)
{
    static const char many[] = "{\"n\":12345678901234567890}";
    spw_tokenizer *t = open_all_tokens();
    spw_data_line *line;
    spw_error err = {0};
    (void)state;
    spw_test_fail_alloc(1);
    assert_int_equal(spw_data_line_open(&line, many, strlen(many), &err), SPW_ENOMEM);
    no_memory(t, "mistral-v1",
              TALK("{\"role\":\"system\",\"content\":[{\"type\":\"text\",\"text\":\"s\"}]}," SAYS("user", "x")));
    no_memory(t, "chatml",
              TOOLS("\"[{\\\"a\\\":1}]\"", USER "," ARGUMENTS("\"{\\\"b\\\":[1,2.5]}\"") "," RESULT("abcABC123")));
    no_memory(t, "mistral", TOOLS("[{\"function\":{\"return\":1}}]", USER "," CALLING F "]}," RESULT("abcABC123")));
    spw_tokenizer_close(t);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_vectors),    IN_DIR(test_text_stays), IN_DIR(test_auto),          IN_DIR(test_auto_by_template),
        IN_DIR(test_file),       IN_DIR(test_forms),      IN_DIR(test_refused),       IN_DIR(test_prompt),
        IN_DIR(test_data),       IN_DIR(test_no_memory),  IN_DIR(test_tools_refused), IN_DIR(test_tools_need_tokens),
        IN_DIR(test_tool_forms), IN_DIR(test_auto_tools), IN_DIR(test_file_tools),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
