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

/* As Mistral 7B v0.3 has them, behind a space that Tekken's models do not have. JSON of functions has its quotes escaped. */
#define BRACKETS(space)                                                                                                \
    {                                                                                                                  \
        .place = CHAT_BEFORE_LAST_USER, .list = {"[AVAILABLE_TOOLS]" space "[", ", ", "][/AVAILABLE_TOOLS]"},          \
        .functions = true,                                                                                             \
        .calls = {"[TOOL_CALLS]" space "[", "{\"name\": \"{name}\", \"arguments\": {arguments}, \"id\": \"{id}\"}",    \
                  ", ", "]"},                                                                                          \
        .id_bytes = 9,                                                                                                 \
        .tokens = {"[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"},    \
        .spelled = {"[AVAILABLE_TOOLS]" space "[", "[TOOL_CALLS]" space "[", "[TOOL_RESULTS]" space "{"},              \
    }
#define BRACKETS_RESULT(space)                                                                                         \
    {                                                                                                                  \
        "[TOOL_RESULTS]" space "{\"content\": ", ", \"call_id\": \"{id}\"}[/TOOL_RESULTS]"                             \
    }

static const chat_layout layouts[] = {
    /* Qwen2, Qwen2.5, Qwen3, SmolLM2; tools are those of Qwen2.5 and Qwen3, reasoning is Qwen3's. */
    {.name = "chatml",
     .begin = "",
     .end = "",
     .turns = {IM("system"), IM("user"), IM("assistant"), {"\n<tool_response>\n", "\n</tool_response>"}},
     .tools = {.place = CHAT_IN_SYSTEM,
               .list = {"# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
                        "provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
                        "\n",
                        "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
                        "within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, "
                        "\"arguments\": <args-json-object>}\n</tool_call>"},
               .calls = {"", "<tool_call>\n{\"name\": \"{name}\", \"arguments\": {arguments}}\n</tool_call>", "\n", ""},
               .joint = "\n",
               .results = {"<|im_start|>user", "<|im_end|>\n"},
               .spelled = {"<tool_response>", "<args-json-object>"}},
     .reasoning = {"<think>\n", "\n</think>\n\n"},
     .reasoning_spelled = "last_query_index",
     .tokens = {"<|im_start|>", "<|im_end|>"}},
    /* Llama 3; tools are those of 3.1 to 3.3, whose template has two lines with dates behind the environment's. */
    {.name = "llama3",
     .begin = "<|begin_of_text|>",
     .end = "",
     .turns = {HEADER("system"), HEADER("user"), HEADER("assistant"), HEADER("ipython")},
     .tools = {.place = CHAT_IN_FIRST_USER,
               .list = {"Given the following functions, please respond with a JSON for a function call with its proper "
                        "arguments that best answers the given prompt.\n\nRespond in the format {\"name\": function "
                        "name, \"parameters\": dictionary of argument name and its value}.Do not use variables.\n\n",
                        "\n\n", "\n\n"},
               .indent = 4,
               .environment = "Environment: ipython\n\n",
               .calls = {"", "{\"name\": \"{name}\", \"parameters\": {arguments}}", NULL, ""},
               .quoted = true,
               .spelled = {"ipython", "with its proper arguments that best answers the given prompt"}},
     .tokens = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     .trim = true},
    /* Where [INST] is a token: Mistral 7B v0.3 and Mixtral 8x22B; with Tekken's vocabulary, Nemo and Ministral. */
    {.name = "mistral",
     .begin = "<s>",
     .end = "",
     .turns = {{NULL, NULL}, {"[INST] ", "[/INST]"}, {" ", "</s>"}, BRACKETS_RESULT(" ")},
     .tools = BRACKETS(" "),
     .tokens = {"<s>", "</s>", "[INST]", "[/INST]"},
     .vocabulary = CHAT_BY_CHARS},
    {.name = "mistral-tekken",
     .begin = "<s>",
     .end = "",
     .turns = {{NULL, NULL}, {"[INST]", "[/INST]"}, {"", "</s>"}, BRACKETS_RESULT("")},
     .tools = BRACKETS(""),
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

static bool
spell(const json_t *templates, const char *text)
{
    bool found = false;
    for (size_t i = 0; i < json_array_size(templates); i++)
        found = found || strstr(json_string_value(json_array_get(templates, i)), text) != NULL;
    return found;
}

/* A vocabulary has tokens of layouts that its model was not tuned with, too: OLMo 2's has those of chatml. */
static bool
is_used(const chat_layout *l, const json_t *templates)
{
    bool used = json_array_size(templates) == 0;
    for (uint32_t k = 0; l->tokens[k] != NULL; k++)
        used = used || spell(templates, l->tokens[k]);
    return used;
}

/* What of a layout the templates do not spell, by which they have tools or reasoning in another way or not at all. */
static void
note_unspelled(chat_layout *l, const json_t *templates)
{
    if (json_array_size(templates) == 0)
        return;
    for (int i = 0; i < CHAT_SPELLED_MAX && l->tools.spelled[i] != NULL; i++) {
        if (l->unspelled_tools == NULL && !spell(templates, l->tools.spelled[i]))
            l->unspelled_tools = l->tools.spelled[i];
    }
    if (l->reasoning_spelled != NULL && !spell(templates, l->reasoning_spelled))
        l->unspelled_reasoning = l->reasoning_spelled;
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
    if (st == SPW_OK) {
        *out = *best;
        note_unspelled(out, templates);
    }
    json_decref(templates);
    SPW_TRY(st);
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

/* A list of so many texts, of which `may_lack` (-1: none) may be null. */
static spw_status
read_texts(const char **out, int count, int may_lack, json_t *file, const char *path, const char *name,
           const char *wanted, spw_error *err)
{
    json_t *v = json_object_get(file, name);
    bool fits = v == NULL || json_array_size(v) == (size_t)count;
    for (int i = 0; v != NULL && i < count && fits; i++) {
        out[i] = json_string_value(json_array_get(v, (size_t)i));
        fits = out[i] != NULL || (i == may_lack && json_is_null(json_array_get(v, (size_t)i)));
    }
    return fits ? SPW_OK : SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"%s\" is not %s", path, name, wanted);
}

static spw_status
read_place(chat_tools *t, json_t *file, const char *path, spw_error *err)
{
    static const char *const places[] = {"system", "first user", "last user"};
    json_t *v = json_object_get(file, "tools_in"), *indent = json_object_get(file, "tools_indent");
    const char *name = v != NULL ? json_string_value(v) : places[0];
    int place = 0;
    while (place < 3 && (name == NULL || strcmp(name, places[place]) != 0))
        place++;
    if (place == 3)
        return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"tools_in\" is not \"system\", \"first user\" or \"last user\"",
                         path);
    if (indent != NULL &&
        (!json_is_integer(indent) || json_integer_value(indent) < 0 || json_integer_value(indent) > 16))
        return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"tools_indent\" is not a number from 0 to 16", path);
    t->place = (chat_place)place;
    t->indent = (int)json_integer_value(indent);
    return SPW_OK;
}

/* Tools, calls and reasoning. */
static spw_status
read_tool_parts(chat_layout *out, json_t *file, const char *path, spw_error *err)
{
    chat_tools *t = &out->tools;
    SPW_TRY(read_texts(t->list, 3, -1, file, path, "tools", "[text before the tools, between two, behind them]", err));
    SPW_TRY(read_texts(t->calls, 4, 2, file, path, "calls",
                       "[text before calls, a call, between two (null: one at a time), behind them]", err));
    SPW_TRY(read_texts(t->results, 2, -1, file, path, "results", "[text before results, text behind them]", err));
    SPW_TRY(read_texts(out->reasoning, 2, -1, file, path, "reasoning", "[text before reasoning, text behind it]", err));
    SPW_TRY(read_place(t, file, path, err));
    if (json_object_get(file, "calls_behind") != NULL)
        SPW_TRY(read_string(&t->joint, file, path, "calls_behind", err));
    if (t->calls[1] != NULL && (strstr(t->calls[1], "{name}") == NULL || strstr(t->calls[1], "{arguments}") == NULL))
        return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"calls\" has a call without {name} and {arguments}", path);
    if ((t->calls[1] != NULL) != (t->list[0] != NULL) || (t->calls[1] != NULL && out->turns[CHAT_TOOL].before == NULL))
        return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"tools\", \"calls\" and \"tool\" belong together", path);
    if (t->list[0] != NULL && t->place == CHAT_IN_SYSTEM && out->turns[CHAT_SYSTEM].before == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "chat %s: \"tools_in\" is the system's turn, and there is no \"system\"",
                         path);
    return SPW_OK;
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
    static const char *const known[] = {"begin", "end",          "system",       "user",    "assistant",
                                        "tool",  "tokens",       "trim",         "tools",   "tools_in",
                                        "calls", "calls_behind", "tools_indent", "results", "reasoning"};
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
    SPW_TRY(read_tool_parts(out, file, path, err));
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
