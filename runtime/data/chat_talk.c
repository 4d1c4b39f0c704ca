/*
 * A conversation by its layout: messages in their order, the tools, calls and results, and which of the reasoning is kept. What the layout
 * cannot say is refused by name and never left out. chat_message.c reads messages, and chat_text.c keeps what is written.
 */
#include "chat_internal.h"
#include <ctype.h>

/* ---------------------------------------------------------------- what a layout can say */

static spw_status
check_order(const spw_chat *c, const chat_talk *k, const chat_message *m, spw_error *err)
{
    static const char *const names[] = {"system", "user", "assistant", "tool"};
    const chat_layout *l = &c->layout;
    const bool first = k->last == CHAT_ROLES;
    if (l->turns[CHAT_SYSTEM].before != NULL || m->role == CHAT_TOOL)
        return SPW_OK;
    if (m->role == CHAT_SYSTEM && !first)
        return SPW_RAISE(err, SPW_ECORRUPT, "layout %s has a system's text in front only", l->name);
    if (m->role == CHAT_ASSISTANT && (first || k->last == CHAT_SYSTEM))
        return SPW_RAISE(err, SPW_ECORRUPT, "conversations of layout %s begin with the user", l->name);
    if (m->role == k->last)
        return SPW_RAISE(err, SPW_ECORRUPT, "two turns of the %s in a row, which layout %s does not have",
                         names[m->role], l->name);
    if (m->role == CHAT_USER && l->tools.calls[1] != NULL && k->calls != NULL)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "a turn of the user before the answer to a tool, which layout %s does not have", l->name);
    return SPW_OK;
}

/* Whether the layout has tools (part: of its texts), and the model was tuned with them so. what: has them. */
static spw_status
check_tools(const spw_chat *c, const char *what, const char *part, spw_error *err)
{
    const chat_layout *l = &c->layout;
    if (part == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: layout %s cannot say tools", what, l->name);
    if (l->unspelled_tools != NULL)
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "%s: the chat template beside %s, by which the model was tuned, does not say tools as layout %s "
            "does, with %s; data.chat %s, by name, says them so nevertheless",
            what, c->t->path, l->name, l->unspelled_tools, l->name);
    for (int i = 0; l->tools.tokens[i] != NULL; i++) {
        if (spw__tok_added_find(c->t, l->tools.tokens[i]) == NULL)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: layout %s needs the token %s for tools, which %s does not have",
                             what, l->name, l->tools.tokens[i], c->t->path);
    }
    return SPW_OK;
}

static spw_status
check_id(const spw_chat *c, const char *what, const char *id, spw_error *err)
{
    const uint32_t bytes = c->layout.tools.id_bytes;
    bool fits = id != NULL && (bytes == 0 || strlen(id) == bytes);
    for (uint32_t i = 0; fits && i < bytes; i++)
        fits = isalnum((unsigned char)id[i]);
    if (fits)
        return SPW_OK;
    if (id == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "it has no \"%s\", which layout %s writes", what, c->layout.name);
    return SPW_RAISE(err, SPW_ECORRUPT, "its \"%s\" is \"%.40s\", and layout %s has %u letters and digits there", what,
                     id, c->layout.name, bytes);
}

static spw_status
check_calls(const spw_chat *c, const chat_talk *k, const chat_message *m, spw_error *err)
{
    const chat_tools *t = &c->layout.tools;
    if (m->role != CHAT_ASSISTANT)
        return SPW_OK;
    if (k->tools != NULL && !k->listed && t->place == CHAT_IN_FIRST_USER)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "layout %s has the tools in the first user's turn, and there is none before this one",
                         c->layout.name);
    if (m->calls == NULL)
        return SPW_OK;
    SPW_TRY(check_tools(c, "tool_calls", t->calls[1], err));
    if (json_array_size(m->calls) > 1 && t->calls[2] == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "it has %zu tool_calls, and layout %s has one in a turn",
                         json_array_size(m->calls), c->layout.name);
    if (m->bytes > 0 && t->joint == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "it has content and tool_calls, and layout %s has no content beside calls",
                         c->layout.name);
    return SPW_OK;
}

/* Whether a tool's turn answers a call. Layouts of a file may have such turns and no calls. */
static spw_status
check_result(const spw_chat *c, const chat_talk *k, const chat_message *m, spw_error *err)
{
    const chat_layout *l = &c->layout;
    const json_t *call;
    bool found = m->id == NULL;
    size_t i;
    if (m->role != CHAT_TOOL)
        return SPW_OK;
    if (l->turns[CHAT_TOOL].before == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "layout %s has no turns of a tool", l->name);
    if (l->tools.calls[1] == NULL)
        return SPW_OK;
    SPW_TRY(check_tools(c, "a tool's content", l->tools.calls[1], err));
    if (k->open == 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "it is a tool's, and no call before it is without an answer");
    json_array_foreach(k->calls, i, call)
    {
        const char *id = json_string_value(spw__chat_member(call, "id"));
        found = found || id == NULL || strcmp(id, m->id) == 0;
    }
    return found ? SPW_OK
                 : SPW_RAISE(err, SPW_ECORRUPT, "its \"tool_call_id\" \"%.40s\" is none of the calls before it", m->id);
}

static spw_status
check_thought(const spw_chat *c, const chat_message *m, spw_error *err)
{
    const chat_layout *l = &c->layout;
    if (m->thought == NULL)
        return SPW_OK;
    if (l->reasoning[0] == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "it has reasoning_content (or reasoning, or thinking), which layout %s cannot say", l->name);
    if (l->unspelled_reasoning != NULL)
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "it has reasoning_content (or reasoning, or thinking), and the chat template beside %s, by which "
            "the model was tuned, does not say it as layout %s does, with %s; data.chat %s, by name, does so "
            "nevertheless",
            c->t->path, l->name, l->unspelled_reasoning, l->name);
    return SPW_OK;
}

/* ---------------------------------------------------------------- tools */

static spw_status
put_text(spw_chat *c, const char *text, bool loss, spw_error *err)
{
    return text != NULL ? spw__chat_put_text(c, text, strlen(text), loss, err) : SPW_OK;
}

static spw_status
put_json(spw_chat *c, bool loss, spw_error *err)
{
    return spw__chat_put_content(c, c->json.text, c->json.length, false, loss, err);
}

/* {"type": "function", "function": {...}}, whatever else a tool has. */
static spw_status
write_function(chat_json *out, const json_t *tool, spw_error *err)
{
    json_t *function = json_copy(json_object_get(tool, "function")), *said;
    spw_status st;
    (void)json_object_del(function, "return");
    said = json_pack("{s:s, s:o}", "type", "function", "function", function); /* takes function */
    st = said != NULL ? spw__chat_json_write(out, said, 0, err) : SPW_RAISE(err, SPW_ENOMEM, "a tool");
    json_decref(said);
    return st;
}

static spw_status
put_tools(spw_chat *c, chat_talk *k, spw_error *err)
{
    const chat_tools *t = &c->layout.tools;
    const json_t *tool;
    size_t i;
    k->listed = true;
    SPW_TRY(put_text(c, t->list[0], false, err));
    json_array_foreach(k->tools, i, tool)
    {
        spw_status st;
        if (i > 0)
            SPW_TRY(put_text(c, t->list[1], false, err));
        c->json.length = 0;
        st = t->functions ? write_function(&c->json, tool, err) : spw__chat_json_write(&c->json, tool, t->indent, err);
        if (st != SPW_OK) {
            spw_error_wrap(err, "tools: tool %zu", i + 1);
            return st;
        }
        SPW_TRY(put_json(c, false, err));
    }
    return put_text(c, t->list[2], false, err);
}

/* What {name}, {arguments} and {id} in a text of the layout stand for. */
typedef struct fill {
    const char *name, *id;
    const json_t *arguments;
} fill;

static spw_status
put_filled(spw_chat *c, const char *text, const fill *f, bool loss, spw_error *err)
{
    static const char *const names[] = {"{name}", "{arguments}", "{id}"};
    for (const char *at = text; *at != '\0';) {
        int which = 0;
        while (which < 3 && strncmp(at, names[which], strlen(names[which])) != 0)
            which++;
        if (which == 3) {
            const char *next = strchr(at + 1, '{');
            const uint64_t bytes = next != NULL ? (uint64_t)(next - at) : strlen(at);
            SPW_TRY(spw__chat_put_text(c, at, bytes, loss, err));
            at += bytes;
            continue;
        }
        at += strlen(names[which]);
        c->json.length = 0;
        SPW_TRY(which == 1 ? spw__chat_json_write(&c->json, f->arguments, 0, err)
                           : spw__chat_json_text(&c->json, which == 0 ? f->name : f->id, err));
        SPW_TRY(put_json(c, loss, err));
    }
    return SPW_OK;
}

static bool
has_id(const char *text)
{
    return text != NULL && strstr(text, "{id}") != NULL;
}

static spw_status
put_call(spw_chat *c, const json_t *call, bool loss, spw_error *err)
{
    const char *text = c->layout.tools.calls[1];
    json_t *arguments;
    fill f;
    spw_status st = spw__chat_read_call(call, &f.name, &f.id, &arguments, err);
    f.arguments = arguments;
    if (st == SPW_OK && has_id(text))
        st = check_id(c, "id", f.id, err);
    if (st == SPW_OK)
        st = put_filled(c, text, &f, loss, err);
    json_decref(arguments);
    return st;
}

static spw_status
put_calls(spw_chat *c, const chat_message *m, spw_error *err)
{
    const chat_tools *t = &c->layout.tools;
    const json_t *call;
    size_t i;
    if (m->bytes > 0)
        SPW_TRY(put_text(c, t->joint, m->loss, err));
    else if (m->thought == NULL)
        spw__chat_drop_spaces(c); /* which stand before a content */
    SPW_TRY(put_text(c, t->calls[0], m->loss, err));
    json_array_foreach(m->calls, i, call)
    {
        spw_status st = i > 0 ? put_text(c, t->calls[2], m->loss, err) : SPW_OK;
        if (st == SPW_OK)
            st = put_call(c, call, m->loss, err);
        if (st != SPW_OK) {
            spw_error_wrap(err, "tool_calls: call %zu", i + 1);
            return st;
        }
    }
    return put_text(c, t->calls[3], m->loss, err);
}

static spw_status
put_result(spw_chat *c, chat_talk *k, const chat_message *m, spw_error *err)
{
    const chat_turn *turn = &c->layout.turns[CHAT_TOOL];
    const chat_tools *t = &c->layout.tools;
    const fill f = {.name = "", .id = m->id};
    if (!k->results)
        SPW_TRY(put_text(c, t->results[0], false, err));
    k->results = true;
    k->open -= k->open > 0;
    SPW_TRY(put_text(c, turn->before, false, err));
    if (t->quoted) {
        c->json.length = 0;
        SPW_TRY(spw__chat_json_string(&c->json, m->text, m->bytes, err));
        SPW_TRY(put_json(c, false, err));
    } else {
        SPW_TRY(spw__chat_put_content(c, m->text, m->bytes, c->layout.trim, false, err));
    }
    if (!has_id(turn->after))
        return put_text(c, turn->after, false, err);
    SPW_TRY(check_id(c, "tool_call_id", m->id, err));
    return put_filled(c, turn->after, &f, false, err);
}

/* ---------------------------------------------------------------- turns */

/* Keeps a system's text for the user's turn that follows. */
static spw_status
fold_system(spw_chat *c, const chat_message *m, spw_error *err)
{
    SPW_TRY(spw__tok_grow((void **)&c->system, &c->system_bytes, m->bytes + 1, 0, "a system's text", err));
    memcpy(c->system, m->text, m->bytes);
    c->system_length = m->bytes;
    c->folded = true;
    return SPW_OK;
}

/* text NULL: a turn for what is said of tools alone. */
static spw_status
put_system(spw_chat *c, chat_talk *k, const chat_message *m, spw_error *err)
{
    const chat_turn *turn = &c->layout.turns[CHAT_SYSTEM];
    const chat_tools *t = &c->layout.tools;
    const bool first = k->tools != NULL && !k->told;
    k->told = true;
    SPW_TRY(put_text(c, turn->before, false, err));
    if (first)
        SPW_TRY(put_text(c, t->environment, false, err));
    if (m != NULL)
        SPW_TRY(spw__chat_put_content(c, m->text, m->bytes, c->layout.trim, false, err));
    if (first && t->place == CHAT_IN_SYSTEM) {
        if (m != NULL)
            SPW_TRY(put_text(c, "\n\n", false, err));
        SPW_TRY(put_tools(c, k, err));
    }
    return put_text(c, turn->after, false, err);
}

static spw_status
put_user(spw_chat *c, chat_talk *k, const chat_message *m, spw_error *err)
{
    const chat_turn *turn = &c->layout.turns[CHAT_USER];
    const chat_place place = c->layout.tools.place;
    const bool lists = k->tools != NULL && !k->listed;
    if (lists && place == CHAT_BEFORE_LAST_USER && k->count == k->last_user)
        SPW_TRY(put_tools(c, k, err));
    SPW_TRY(put_text(c, turn->before, false, err));
    if (lists && place == CHAT_IN_FIRST_USER)
        SPW_TRY(put_tools(c, k, err));
    if (c->folded) {
        SPW_TRY(spw__chat_put_content(c, c->system, c->system_length, false, false, err));
        SPW_TRY(put_text(c, "\n\n", false, err));
        c->folded = false;
    }
    SPW_TRY(spw__chat_put_content(c, m->text, m->bytes, c->layout.trim, false, err));
    return put_text(c, turn->after, false, err);
}

/* Without line ends around it; *text and *bytes, the content, without those before it. */
static spw_status
put_thought(spw_chat *c, const chat_message *m, const char **text, uint64_t *bytes, spw_error *err)
{
    const char *thought = json_string_value(m->thought);
    uint64_t n = json_string_length(m->thought);
    for (; n > 0 && thought[0] == '\n'; n--)
        thought++;
    while (n > 0 && thought[n - 1] == '\n')
        n--;
    for (; *bytes > 0 && **text == '\n'; (*bytes)--)
        (*text)++;
    SPW_TRY(put_text(c, c->layout.reasoning[0], m->loss, err));
    SPW_TRY(spw__chat_put_content(c, thought, n, false, m->loss, err));
    return put_text(c, c->layout.reasoning[1], m->loss, err);
}

static spw_status
put_answer(spw_chat *c, const chat_message *m, spw_error *err)
{
    const chat_turn *turn = &c->layout.turns[CHAT_ASSISTANT];
    const char *text = m->text;
    uint64_t bytes = m->bytes;
    SPW_TRY(put_text(c, turn->before, false, err));
    if (m->thought != NULL)
        SPW_TRY(put_thought(c, m, &text, &bytes, err));
    SPW_TRY(spw__chat_put_content(c, text, bytes, c->layout.trim, m->loss, err));
    if (m->calls != NULL)
        SPW_TRY(put_calls(c, m, err));
    return spw__chat_put_end(c, turn->after, m->loss, err);
}

static spw_status
close_results(spw_chat *c, chat_talk *k, spw_error *err)
{
    const bool open = k->results;
    k->results = false;
    return open ? put_text(c, c->layout.tools.results[1], false, err) : SPW_OK;
}

static spw_status
put_message(spw_chat *c, chat_talk *k, const chat_message *m, spw_error *err)
{
    const chat_tools *t = &c->layout.tools;
    if (m->role == CHAT_TOOL)
        return put_result(c, k, m, err);
    SPW_TRY(close_results(c, k, err));
    k->calls = m->calls;
    k->open = json_array_size(m->calls);
    if (m->role == CHAT_SYSTEM)
        return c->layout.turns[CHAT_SYSTEM].before == NULL ? fold_system(c, m, err) : put_system(c, k, m, err);
    if (k->tools != NULL && !k->told && (t->place == CHAT_IN_SYSTEM || t->environment != NULL))
        SPW_TRY(put_system(c, k, NULL, err));
    return m->role == CHAT_USER ? put_user(c, k, m, err) : put_answer(c, m, err);
}

static spw_status
put_turn(spw_chat *c, chat_talk *k, chat_message *m, spw_error *err)
{
    SPW_TRY(check_result(c, k, m, err));
    SPW_TRY(check_order(c, k, m, err));
    SPW_TRY(check_calls(c, k, m, err));
    SPW_TRY(check_thought(c, m, err));
    if (k->last_question == UINT64_MAX || k->count < k->last_question)
        m->thought = NULL;
    k->last = m->role;
    m->loss = m->loss && k->count >= k->without;
    return put_message(c, k, m, err);
}

/* ---------------------------------------------------------------- conversations */

static spw_status
put_next(spw_chat *c, chat_talk *k, const json_t *v, spw_error *err)
{
    chat_message m;
    SPW_TRY(spw__chat_read(c, &m, v, err));
    if (k->count == 0 && k->system != NULL && m.role == CHAT_SYSTEM) {
        if (m.bytes == json_string_length(k->system) && memcmp(m.text, json_string_value(k->system), m.bytes) == 0)
            return SPW_OK;
        return SPW_RAISE(err, SPW_ECORRUPT, "it is the system's, with another text than the line's \"system\"");
    }
    return put_turn(c, k, &m, err);
}

static uint64_t
look_through(const spw_chat *c, chat_talk *k, const json_t *list, uint64_t count)
{
    const json_t *v;
    size_t i;
    if (json_is_string(list))
        k->last_user = k->last_question = count++;
    json_array_foreach(list, i, v)
    {
        const char *role =
            json_string_value(spw__chat_member(v, spw__chat_member(v, "role") != NULL ? "role" : "from"));
        if (role != NULL && (strcmp(role, "user") == 0 || strcmp(role, "human") == 0))
            k->last_user = count;
        if (spw__chat_is_question(c, v))
            k->last_question = count;
        count++;
    }
    return count;
}

void
spw__chat_look(const spw_chat *c, chat_talk *k, const json_t *line, const char *prompt, const char *field)
{
    uint64_t count = 0;
    k->last_user = k->last_question = UINT64_MAX;
    if (prompt != NULL)
        count = look_through(c, k, json_object_get(line, prompt), 0);
    if (json_is_array(json_object_get(line, field)))
        (void)look_through(c, k, json_object_get(line, field), count);
}

spw_status
spw__chat_begin(spw_chat *c, chat_talk *k, spw_error *err)
{
    spw__chat_restart(c);
    k->last = k->system != NULL ? CHAT_SYSTEM : CHAT_ROLES;
    if (k->tools != NULL)
        SPW_TRY(check_tools(c, "field \"tools\"", c->layout.tools.list[0], err));
    SPW_TRY(put_text(c, c->layout.begin, false, err));
    if (k->system != NULL) {
        const chat_message m = {
            .role = CHAT_SYSTEM, .text = json_string_value(k->system), .bytes = json_string_length(k->system)};
        SPW_TRY(put_message(c, k, &m, err));
    }
    return SPW_OK;
}

spw_status
spw__chat_put_list(spw_chat *c, chat_talk *k, const json_t *line, const char *field, spw_error *err)
{
    const json_t *list = json_object_get(line, field), *v;
    size_t i;
    if (json_array_size(list) == 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is not a list of messages", field);
    json_array_foreach(list, i, v)
    {
        spw_status st = put_next(c, k, v, err);
        if (st != SPW_OK) {
            spw_error_wrap(err, "field \"%s\": message %zu", field, i + 1);
            return st;
        }
        k->count++;
    }
    return SPW_OK;
}

/* A field that comes before others; a text in it is a user's turn. */
spw_status
spw__chat_put_prompt(spw_chat *c, chat_talk *k, const json_t *line, const char *field, spw_error *err)
{
    const json_t *text = json_object_get(line, field);
    chat_message m = {.role = CHAT_USER, .text = json_string_value(text), .bytes = json_string_length(text)};
    spw_status st;
    if (!json_is_string(text))
        return spw__chat_put_list(c, k, line, field, err);
    st = put_turn(c, k, &m, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "field \"%s\"", field);
    k->count++;
    return st;
}

spw_status
spw__chat_end(spw_chat *c, chat_talk *k, const char *field, spw_error *err)
{
    if (c->folded)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "field \"%s\": a system's text without a user's turn, which layout %s does not have", field,
                         c->layout.name);
    if (k->tools != NULL && !k->listed)
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\": tools without a user's turn, where layout %s has them",
                         field, c->layout.name);
    SPW_TRY(close_results(c, k, err));
    return put_text(c, c->layout.end, false, err);
}

spw_status
spw__chat_ask(spw_chat *c, const char *text, uint64_t bytes, spw_error *err)
{
    chat_talk k = {.last = CHAT_ROLES, .last_user = 0};
    const chat_message m = {.role = CHAT_USER, .text = text, .bytes = bytes};
    SPW_TRY(spw__chat_begin(c, &k, err));
    SPW_TRY(put_message(c, &k, &m, err));
    SPW_TRY(put_text(c, c->layout.turns[CHAT_ASSISTANT].before, false, err));
    spw__chat_drop_spaces(c); /* the answer's first token has them */
    return SPW_OK;
}
