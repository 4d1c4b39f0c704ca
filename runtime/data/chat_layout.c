/*
 * Layouts of conversations: the table of those that published models were tuned with, files that describe others, and which
 * of the table fits a tokenizer. A layout is data; chat.c writes conversations by it.
 *
 * Sources: the chat templates that these models are published with, without what they add to the messages.
 */
#include "chat_internal.h"
#include "spw_files.h"
#include "tokenizer_internal.h"
#include <stdio.h>
#include <strings.h>
#include <unistd.h>

enum {
    FILE_BYTES_MAX = 1 << 20,
    TEMPLATES_BYTES_MAX = 64 << 20 /* of a file that also has thousands of added tokens */
};

#define IM(role)                                                                                                       \
    {                                                                                                                  \
        "<|im_start|>" role "\n", "<|im_end|>\n"                                                                       \
    }
#define HEADER(role)                                                                                                   \
    {                                                                                                                  \
        "<|start_header_id|>" role "<|end_header_id|>\n\n", "<|eot_id|>"                                               \
    }
#define PIPES(role)                                                                                                    \
    {                                                                                                                  \
        "<|" role "|>\n", "<|end|>\n"                                                                                  \
    }
#define SEP(role)                                                                                                      \
    {                                                                                                                  \
        "<|im_start|>" role "<|im_sep|>", "<|im_end|>"                                                                 \
    }
#define TURN(role)                                                                                                     \
    {                                                                                                                  \
        "<|turn>" role "\n", "<turn|>\n"                                                                               \
    }
#define ZEPHYR(role)                                                                                                   \
    {                                                                                                                  \
        "<|" role "|>\n", "</s>\n"                                                                                     \
    }

#define KIMI(role)                                                                                                     \
    {                                                                                                                  \
        "<|im_" role "|>" role "<|im_middle|>", "<|im_end|>"                                                           \
    }

static const chat_layout layouts[] = {
    /* Qwen2, Qwen2.5, Qwen3, SmolLM2 */
    {.name = "chatml",
     .begin = "",
     .end = "",
     .turns = {IM("system"), IM("user"), IM("assistant"), {NULL, NULL}},
     .tokens = {"<|im_start|>", "<|im_end|>"}},
    {.name = "llama3",
     .begin = "<|begin_of_text|>",
     .end = "",
     .turns = {HEADER("system"), HEADER("user"), HEADER("assistant"), {NULL, NULL}},
     .tokens = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .trim = true},
    /* Where [INST] is a token: Mistral 7B v0.3 and Mixtral 8x22B; with Tekken's vocabulary, Nemo and Ministral. */
    {.name = "mistral",
     .begin = "<s>",
     .end = "",
     .turns = {{NULL, NULL}, {"[INST] ", "[/INST]"}, {" ", "</s>"}, {NULL, NULL}},
     .tokens = {"<s>", "</s>", "[INST]", "[/INST]"},
     .vocabulary = CHAT_BY_CHARS},
    {.name = "mistral-tekken",
     .begin = "<s>",
     .end = "",
     .turns = {{NULL, NULL}, {"[INST]", "[/INST]"}, {"", "</s>"}, {NULL, NULL}},
     .tokens = {"<s>", "</s>", "[INST]", "[/INST]"},
     .vocabulary = CHAT_BY_BYTES},
    /* With Tekken's vocabulary and tokens for the system: Mistral Small 3, 3.1 and 3.2. */
    {.name = "mistral-v7",
     .begin = "<s>",
     .end = "",
     .turns = {{"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}, {"[INST]", "[/INST]"}, {"", "</s>"}, {NULL, NULL}},
     .tokens = {"<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"},
     .vocabulary = CHAT_BY_BYTES},
    /* Where [INST] is text: Mistral 7B v0.1 and v0.2, Mixtral 8x7B. */
    {.name = "mistral-v1",
     .begin = "<s>",
     .end = "",
     .turns = {{NULL, NULL}, {" [INST] ", " [/INST]"}, {" ", "</s>"}, {NULL, NULL}},
     .tokens = {"<s>", "</s>"},
     .named_only = true},
    {.name = "gemma",
     .begin = "<bos>",
     .end = "",
     .turns = {{NULL, NULL},
               {"<start_of_turn>user\n", "<end_of_turn>\n"},
               {"<start_of_turn>model\n", "<end_of_turn>\n"},
               {NULL, NULL}},
     .tokens = {"<bos>", "<start_of_turn>", "<end_of_turn>"},
     .trim = true},
    /* Without thoughts, which its template takes out of answers. */
    {.name = "gemma4",
     .begin = "<bos>",
     .end = "",
     .turns = {TURN("system"), TURN("user"), TURN("model"), {NULL, NULL}},
     .tokens = {"<bos>", "<|turn>", "<turn|>"},
     .trim = true},
    {.name = "phi3",
     .begin = "",
     .end = "<|endoftext|>",
     .turns = {PIPES("system"), PIPES("user"), PIPES("assistant"), {NULL, NULL}},
     .tokens = {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"}},
    {.name = "phi4",
     .begin = "",
     .end = "",
     .turns = {SEP("system"), SEP("user"), SEP("assistant"), {NULL, NULL}},
     .tokens = {"<|im_start|>", "<|im_sep|>", "<|im_end|>"}},
    /* V2.5, V3 and R1, and what R1 was distilled to; its reasoning is content. */
    {.name = "deepseek",
     .begin = "<｜begin▁of▁sentence｜>",
     .end = "",
     .turns = {{"", ""}, {"<｜User｜>", ""}, {"<｜Assistant｜>", "<｜end▁of▁sentence｜>"}, {NULL, NULL}},
     .tokens = {"<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"}},
    /* Kimi-K2 to K2.6, Kimi Linear, Moonlight. */
    {.name = "kimi",
     .begin = "",
     .end = "",
     .turns = {KIMI("system"), KIMI("user"), KIMI("assistant"), {NULL, NULL}},
     .tokens = {"<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"}},
    {.name = "zephyr",
     .begin = "",
     .end = "",
     .turns = {ZEPHYR("system"), ZEPHYR("user"), ZEPHYR("assistant"), {NULL, NULL}},
     .tokens = {"</s>"},
     .named_only = true},
};
enum { LAYOUTS = sizeof layouts / sizeof layouts[0] };

const char *
spw_chat_names(void)
{
    return "chatml, llama3, mistral, mistral-tekken, mistral-v7, mistral-v1, gemma, gemma4, phi3, phi4, deepseek, "
           "kimi or zephyr";
}

/* ---------------------------------------------------------------- of the table */

static const char *
missing(const chat_layout *l, const spw_tokenizer *t)
{
    for (uint32_t i = 0; i < CHAT_TOKENS_MAX && l->tokens[i] != NULL; i++) {
        if (spw__tok_added_find(t, l->tokens[i]) == NULL)
            return l->tokens[i];
    }
    return NULL;
}

static bool
has_all_of(const chat_layout *l, const chat_layout *other)
{
    for (uint32_t i = 0; other->tokens[i] != NULL; i++) {
        bool found = false;
        for (uint32_t k = 0; l->tokens[k] != NULL; k++)
            found = found || strcmp(l->tokens[k], other->tokens[i]) == 0;
        if (!found)
            return false;
    }
    return true;
}

static bool
has_tokens(const chat_layout *l, const spw_tokenizer *t)
{
    return !l->named_only && missing(l, t) == NULL &&
           (l->vocabulary == CHAT_ANY || (l->vocabulary == CHAT_BY_CHARS) == t->chars);
}

/* A vocabulary has tokens of layouts that its model was not tuned with, too: OLMo 2's has those of chatml. */
static bool
is_used(const chat_layout *l, const json_t *templates)
{
    bool used = json_array_size(templates) == 0;
    for (size_t i = 0; i < json_array_size(templates); i++) {
        for (uint32_t k = 0; l->tokens[k] != NULL; k++)
            used = used || strstr(json_string_value(json_array_get(templates, i)), l->tokens[k]) != NULL;
    }
    return used;
}

static bool
fits(const chat_layout *l, const spw_tokenizer *t, const json_t *templates)
{
    return has_tokens(l, t) && is_used(l, templates);
}

static void
add_template(json_t *list, json_t *template)
{
    if (json_is_string(template))
        (void)json_array_append(list, template);
}

/* Beside the tokenizer, in a file of that name; the text is NULL where there is none. */
static spw_status
read_beside(char **text, const spw_tokenizer *t, const char *name, spw_error *err)
{
    char path[TOK_PATH_BYTES + 64];
    const char *slash = strrchr(t->path, '/');
    *text = NULL;
    snprintf(path, sizeof path, "%.*s%s", slash != NULL ? (int)(slash + 1 - t->path) : 0, t->path, name);
    return access(path, F_OK) == 0 ? spw_file_read_text(path, TEMPLATES_BYTES_MAX, text, err) : SPW_OK;
}

/* The chat templates that the tokenizer's folder has. */
static spw_status
read_templates(json_t *list, const spw_tokenizer *t, spw_error *err)
{
    char *text;
    json_t *config, *v, *one;
    size_t i;
    SPW_TRY(read_beside(&text, t, "chat_template.jinja", err));
    if (text != NULL)
        (void)json_array_append_new(list, json_string(text));
    spw_mem_free(text);
    SPW_TRY(read_beside(&text, t, "tokenizer_config.json", err));
    config = text != NULL ? json_loads(text, JSON_DECODE_INT_AS_REAL, NULL) : NULL;
    spw_mem_free(text);
    v = json_object_get(config, "chat_template");
    add_template(list, v);
    json_array_foreach(v, i, one)
    {
        add_template(list, json_object_get(one, "template"));
    }
    json_decref(config);
    return SPW_OK;
}

/* Of those that have all their tokens the larger one; what says why there is none. */
static spw_status
choose_layout(const chat_layout **out, const spw_tokenizer *t, const json_t *templates, spw_error *err)
{
    const chat_layout *best = NULL, *unused = NULL;
    char several[200] = "";
    for (int i = 0; i < LAYOUTS; i++) {
        if (fits(&layouts[i], t, templates) && (best == NULL || has_all_of(&layouts[i], best)))
            best = &layouts[i];
        if (has_tokens(&layouts[i], t))
            unused = &layouts[i];
    }
    if (best == NULL && unused != NULL)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "chat \"auto\": %s has the special tokens of %s, but the chat template beside it, by which the "
            "model was tuned, does not use them; name one: %s, or a file that ends in .json",
            t->path, unused->name, spw_chat_names());
    if (best == NULL)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "chat \"auto\": %s has the special tokens of no layout; name one: %s, or a file that ends in .json",
            t->path, spw_chat_names());
    for (int i = 0; i < LAYOUTS; i++) {
        size_t used = strlen(several);
        if (fits(&layouts[i], t, templates) && !has_all_of(best, &layouts[i]))
            snprintf(several + used, sizeof several - used, " and %s", layouts[i].name);
    }
    *out = best;
    return several[0] == '\0'
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "chat \"auto\": %s has the special tokens of %s%s; name one: %s", t->path,
                           best->name, several, spw_chat_names());
}

static spw_status
find_auto(chat_layout *out, char *says, size_t bytes, const spw_tokenizer *t, spw_error *err)
{
    const chat_layout *best = NULL;
    json_t *templates = json_array();
    spw_status st = read_templates(templates, t, err);
    int n;
    if (st == SPW_OK)
        st = choose_layout(&best, t, templates, err);
    json_decref(templates);
    SPW_TRY(st);
    *out = *best;
    n = snprintf(says, bytes, "auto: %s, whose", best->name);
    for (uint32_t i = 0; best->tokens[i] != NULL && n > 0 && (size_t)n < bytes; i++)
        n += snprintf(says + n, bytes - (size_t)n, " %s", best->tokens[i]);
    if (n > 0 && (size_t)n < bytes)
        snprintf(says + n, bytes - (size_t)n, " the tokenizer has");
    return SPW_OK;
}

/* ---------------------------------------------------------------- of a file */

static spw_status
read_string(const char **out, json_t *file, const char *path, const char *name, spw_error *err)
{
    json_t *v = json_object_get(file, name);
    *out = v != NULL ? json_string_value(v) : "";
    return *out != NULL && (v == NULL || strlen(*out) == json_string_length(v))
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"%s\" is not text", path, name);
}

static spw_status
read_turn(chat_turn *out, json_t *file, const char *path, const char *role, bool needed, spw_error *err)
{
    json_t *v = json_object_get(file, role);
    *out = (chat_turn){json_string_value(json_array_get(v, 0)), json_string_value(json_array_get(v, 1))};
    if ((v == NULL && !needed) || (json_array_size(v) == 2 && out->before != NULL && out->after != NULL))
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"%s\" is not [text before a content, text after it]", path, role);
}

static spw_status
read_tokens(chat_layout *out, json_t *file, const char *path, spw_error *err)
{
    json_t *list = json_object_get(file, "tokens"), *v;
    size_t i;
    if (!json_is_array(list) || json_array_size(list) >= CHAT_TOKENS_MAX)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "chat %s: \"tokens\" is not a list of the layout's special tokens, at most %d", path,
                         CHAT_TOKENS_MAX - 1);
    json_array_foreach(list, i, v)
    {
        out->tokens[i] = json_string_value(v);
        if (out->tokens[i] == NULL || out->tokens[i][0] == '\0')
            return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"tokens\" has a member that is not text", path);
    }
    return SPW_OK;
}

static spw_status
read_layout(chat_layout *out, json_t *file, const char *path, spw_error *err)
{
    static const char *const known[] = {"begin", "end", "system", "user", "assistant", "tool", "tokens", "trim"};
    json_t *v, *trim = json_object_get(file, "trim");
    const char *name;
    json_object_foreach(file, name, v)
    {
        bool found = false;
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
            found = found || strcmp(name, known[i]) == 0;
        if (!found)
            return SPW_RAISE(err, SPW_ECONFIG, "chat %s: unknown member \"%.60s\"", path, name);
    }
    if (trim != NULL && !json_is_boolean(trim))
        return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"trim\" is not true or false", path);
    *out = (chat_layout){.name = path, .trim = json_is_true(trim)};
    SPW_TRY(read_string(&out->begin, file, path, "begin", err));
    SPW_TRY(read_string(&out->end, file, path, "end", err));
    SPW_TRY(read_turn(&out->turns[CHAT_SYSTEM], file, path, "system", false, err));
    SPW_TRY(read_turn(&out->turns[CHAT_USER], file, path, "user", true, err));
    SPW_TRY(read_turn(&out->turns[CHAT_ASSISTANT], file, path, "assistant", true, err));
    SPW_TRY(read_turn(&out->turns[CHAT_TOOL], file, path, "tool", false, err));
    return read_tokens(out, file, path, err);
}

static spw_status
load_layout(chat_layout *out, json_t **file, const char *path, spw_error *err)
{
    json_error_t why;
    char *text;
    SPW_TRY(spw_file_read_text(path, FILE_BYTES_MAX, &text, err));
    *file = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    spw_mem_free(text);
    if (!json_is_object(*file))
        return SPW_RAISE(err, SPW_ECORRUPT, "chat %s, line %d: %s", path, *file == NULL ? why.line : 1,
                         *file == NULL ? why.text : "not a JSON object");
    return read_layout(out, *file, path, err);
}

/* ---------------------------------------------------------------- either */

spw_status
spw__chat_find(chat_layout *out, json_t **file, char *says, size_t bytes, const char *name, const spw_tokenizer *t,
               spw_error *err)
{
    const char *dot = strrchr(name, '.'), *token;
    *file = NULL;
    *out = (chat_layout){.name = NULL};
    if (strcmp(name, "auto") == 0)
        return find_auto(out, says, bytes, t, err);
    for (int i = 0; i < LAYOUTS; i++) {
        if (strcmp(name, layouts[i].name) == 0)
            *out = layouts[i];
    }
    if (out->name == NULL && dot != NULL && strcasecmp(dot, ".json") == 0)
        SPW_TRY(load_layout(out, file, name, err));
    if (out->name == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "chat \"%.100s\" is not known: auto, %s, or a file that ends in .json", name,
                         spw_chat_names());
    if ((token = missing(out, t)) != NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "chat \"%.200s\": %s has no token %.60s", name, t->path, token);
    snprintf(says, bytes, "%s", out->name);
    return SPW_OK;
}
