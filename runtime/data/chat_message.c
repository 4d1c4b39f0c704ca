/*
 * What a message of a conversation says: who speaks, what, with which calls and what reasoning. Members that are of the wrong kind are
 * refused here, by name; what a layout cannot say is refused in chat_talk.c.
 */
#include "chat_internal.h"
#include "data_internal.h"
#include <stdio.h>

const json_t *
spw__chat_member(const json_t *object, const char *name)
{
    const json_t *v = json_object_get(object, name);
    return json_is_null(v) ? NULL : v;
}

bool
spw__chat_says_nothing(const json_t *v)
{
    return v == NULL || json_is_false(v) || (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) || (json_is_object(v) && json_object_size(v) == 0);
}

static spw_status
read_role(chat_role *out, const json_t *v, spw_error *err)
{
    static const struct {
        const char *name;
        chat_role role;
    } names[] = {{"system", CHAT_SYSTEM},       {"user", CHAT_USER},     {"human", CHAT_USER},
                 {"assistant", CHAT_ASSISTANT}, {"gpt", CHAT_ASSISTANT}, {"tool", CHAT_TOOL}};
    const char *given = json_string_value(v);
    if (given == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "it has no \"role\" (or \"from\") that is text");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        *out = names[i].role;
        if (strcmp(given, names[i].name) == 0)
            return SPW_OK;
    }
    return SPW_RAISE(err, SPW_ECORRUPT, "role \"%.40s\" is none of system, user, human, assistant, gpt, tool", given);
}

/* The texts of a content that is a list, one behind the other. */
static spw_status
join_parts(spw_chat *c, chat_message *m, const json_t *parts, spw_error *err)
{
    const json_t *part;
    size_t i;
    m->bytes = 0;
    json_array_foreach(parts, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        if (type == NULL || strcmp(type, "text") != 0 || !json_is_string(text))
            return SPW_RAISE(
                err, SPW_ECORRUPT, "part %zu of the content is %s%.40s%s: only {\"type\": \"text\"} is read", i,
                type != NULL ? "\"" : "", type != NULL ? type : "without a type", type != NULL ? "\"" : "");
        SPW_TRY(spw__tok_grow((void **)&c->joined, &c->joined_bytes, m->bytes + json_string_length(text), m->bytes,
                              "a content in parts", err));
        memcpy(c->joined + m->bytes, json_string_value(text), json_string_length(text));
        m->bytes += json_string_length(text);
    }
    m->text = m->bytes > 0 ? c->joined : "";
    return SPW_OK;
}

static spw_status
read_weight(bool *loss, const json_t *weight, spw_error *err)
{
    double w = json_number_value(weight);
    if (weight == NULL)
        return SPW_OK;
    if (!json_is_number(weight) || (w != 0 && w != 1))
        return SPW_RAISE(err, SPW_ECORRUPT, "its \"weight\" is not 0 or 1");
    *loss = *loss && w == 1;
    return SPW_OK;
}

/* ---------------------------------------------------------------- calls and reasoning */

/* The object of a call's arguments, which may be a text that holds one. */
static spw_status
read_arguments(json_t **out, const json_t *v, spw_error *err)
{
    spw_status st;
    *out = NULL;
    if (json_is_object(v)) {
        *out = json_incref((json_t *)v);
        return SPW_OK;
    }
    if (!json_is_string(v))
        return SPW_RAISE(err, SPW_ECORRUPT, "its \"arguments\" are neither an object nor text with one");
    st = spw__data_json(out, json_string_value(v), json_string_length(v), err);
    if (st != SPW_OK) {
        spw_error_wrap(err, "its \"arguments\", which are text");
        return st;
    }
    if (json_is_object(*out))
        return SPW_OK;
    json_decref(*out);
    *out = NULL;
    return SPW_RAISE(err, SPW_ECORRUPT, "its \"arguments\" are text that is no JSON object");
}

/* A name or an id: not empty, and JSON has it as it is. */
static bool
is_word(const json_t *v)
{
    const char *text = json_string_value(v);
    bool word = text != NULL && json_string_length(v) > 0;
    for (size_t i = 0; word && i < json_string_length(v); i++)
        word = (unsigned char)text[i] >= ' ' && text[i] != '"' && text[i] != '\\';
    return word;
}

spw_status
spw__chat_read_call(const json_t *call, const char **name, const char **id, json_t **arguments, spw_error *err)
{
    const json_t *function = spw__chat_member(call, "function"), *type = spw__chat_member(call, "type"), *v;
    *arguments = NULL;
    if (!json_is_object(call))
        return SPW_RAISE(err, SPW_ECORRUPT, "it is not an object");
    if (type != NULL && (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0))
        return SPW_RAISE(err, SPW_ECORRUPT, "its \"type\" is not \"function\"");
    function = function != NULL ? function : call;
    if (!is_word(spw__chat_member(function, "name")))
        return SPW_RAISE(err, SPW_ECORRUPT, "its \"function\" has no \"name\" that is text without quotes");
    *name = json_string_value(spw__chat_member(function, "name"));
    v = spw__chat_member(call, "id");
    if (v != NULL && !is_word(v))
        return SPW_RAISE(err, SPW_ECORRUPT, "its \"id\" is not text without quotes");
    *id = json_string_value(v);
    return read_arguments(arguments, spw__chat_member(function, "arguments"), err);
}

static spw_status
read_calls(chat_message *m, const json_t *v, spw_error *err)
{
    const json_t *calls = spw__chat_member(v, "tool_calls"), *call, *old = spw__chat_member(v, "function_call");
    size_t i;
    if (!spw__chat_says_nothing(old))
        return SPW_RAISE(err, SPW_ECORRUPT, "it has function_call, an older form of tool_calls, which is not read");
    if (spw__chat_says_nothing(calls))
        return SPW_OK;
    if (m->role != CHAT_ASSISTANT)
        return SPW_RAISE(err, SPW_ECORRUPT, "it has tool_calls, which only the assistant makes");
    if (!json_is_array(calls))
        return SPW_RAISE(err, SPW_ECORRUPT, "its \"tool_calls\" are not a list");
    m->calls = calls;
    json_array_foreach(calls, i, call)
    {
        const char *name, *id;
        json_t *arguments;
        spw_status st = spw__chat_read_call(call, &name, &id, &arguments, err);
        json_decref(arguments);
        if (st != SPW_OK) {
            spw_error_wrap(err, "tool_calls: call %zu", i + 1);
            return st;
        }
    }
    return SPW_OK;
}

/* An answer's reasoning, by one of its names. */
static spw_status
read_thought(chat_message *m, const json_t *v, spw_error *err)
{
    static const char *const names[] = {"reasoning_content", "reasoning", "thinking"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *thought = spw__chat_member(v, names[i]);
        if (spw__chat_says_nothing(thought))
            continue;
        if (m->role != CHAT_ASSISTANT)
            return SPW_RAISE(err, SPW_ECORRUPT, "it has %s, which only the assistant has", names[i]);
        if (!json_is_string(thought))
            return SPW_RAISE(err, SPW_ECORRUPT, "its \"%s\" is not text", names[i]);
        if (m->thought != NULL && !json_equal(m->thought, thought))
            return SPW_RAISE(err, SPW_ECORRUPT, "it has reasoning by two names, and its \"%s\" is another", names[i]);
        m->thought = thought;
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- a message */

static const json_t *
either(const json_t *v, const char *name, const char *older)
{
    const json_t *found = spw__chat_member(v, name);
    return found != NULL ? found : spw__chat_member(v, older);
}

static spw_status
read_content(spw_chat *c, chat_message *m, const json_t *v, spw_error *err)
{
    const json_t *content = either(v, "content", "value");
    if (json_is_array(content))
        return join_parts(c, m, content, err);
    if (content == NULL && m->calls != NULL)
        return SPW_OK; /* it says no more */
    if (!json_is_string(content))
        return SPW_RAISE(err, SPW_ECORRUPT, "it has no \"content\" (or \"value\") that is text");
    m->text = json_string_value(content);
    m->bytes = json_string_length(content);
    return SPW_OK;
}

spw_status
spw__chat_read(spw_chat *c, chat_message *m, const json_t *v, spw_error *err)
{
    const json_t *id = spw__chat_member(v, "tool_call_id");
    *m = (chat_message){.role = CHAT_ROLES, .text = ""};
    SPW_TRY(read_role(&m->role, either(v, "role", "from"), err));
    SPW_TRY(read_calls(m, v, err));
    SPW_TRY(read_thought(m, v, err));
    m->loss = m->role == CHAT_ASSISTANT;
    SPW_TRY(read_weight(&m->loss, spw__chat_member(v, "weight"), err));
    if (m->role == CHAT_TOOL && !spw__chat_says_nothing(id)) {
        if (!is_word(id))
            return SPW_RAISE(err, SPW_ECORRUPT, "its \"tool_call_id\" is not text without quotes");
        m->id = json_string_value(id);
    }
    return read_content(c, m, v, err);
}

/* Whether text begins, and ends, with what is written around a tool's result, white space aside. */
static bool
is_result(const chat_turn *tool, const char *text, uint64_t bytes)
{
    const char *ends[] = {tool->before, tool->after};
    for (int i = 0; i < 2; i++) {
        const uint64_t all = ends[i] != NULL ? strlen(ends[i]) : 0;
        const uint64_t begin = all > 0 ? spw__tok_space_after(ends[i], 0, all, false) : 0;
        const uint64_t n = all > 0 ? spw__tok_space_before(ends[i], begin, all, false) - begin : 0;
        if (n == 0 || n > bytes || memcmp(i == 0 ? text : text + bytes - n, ends[i] + begin, n) != 0)
            return false;
    }
    return true;
}

bool
spw__chat_is_question(const spw_chat *c, const json_t *message)
{
    const char *role = json_string_value(either(message, "role", "from"));
    const json_t *content = either(message, "content", "value");
    if (role == NULL || (strcmp(role, "user") != 0 && strcmp(role, "human") != 0))
        return false;
    return !json_is_string(content) ||
           !is_result(&c->layout.turns[CHAT_TOOL], json_string_value(content), json_string_length(content));
}
