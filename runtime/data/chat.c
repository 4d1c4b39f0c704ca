/*
 * Conversations to tokens: a conversation is written as text by its layout, with the layout's special tokens as marks between
 * stretches of it, and every byte knows whether it is the assistant's. A stretch is then encoded as the tokenizer encodes
 * what stands between two special tokens, so text of the layout and content merge as in the rendered whole, and
 * nothing in a content can be a special token. A token has a target if one of its bytes is the assistant's.
 *
 * Where a token lies is counted in bytes, so contents are brought to NFC before they are written where the tokenizer would do
 * that. Layouts come from chat_layout.c.
 */
#include "chat_internal.h"
#include "tokenizer_internal.h"
#include <stdio.h>

enum { SAYS_BYTES = 256 };

/* A token of the layout, before the byte `at` of the text. */
typedef struct mark {
    uint64_t at;
    const tok_added *token;
    bool loss;
} mark;

struct spw_chat {
    /* Fixed after open. */
    const spw_tokenizer *t;
    chat_layout layout;
    json_t *file; /* that the layout's strings lie in, or NULL */
    char says[SAYS_BYTES];
    uint64_t key;
    int32_t end_of_turn;
    /* The conversation that is being written. */
    char *text; /* (bytes) */
    bool *loss; /* (bytes) */
    mark *marks;
    uint64_t bytes, text_bytes, loss_bytes, mark_count, mark_bytes; /* the *_bytes: room */
    char *joined;                                                   /* content that comes in parts */
    char *system; /* (system_length) text that waits for the user's turn; folded: there is one */
    uint64_t joined_bytes, system_bytes, system_length;
    bool folded;
    tok_scratch s; /* normal forms */
};

/* ---------------------------------------------------------------- writing */

static spw_status
put_bytes(spw_chat *c, const char *text, uint64_t bytes, bool loss, spw_error *err)
{
    if (bytes == 0)
        return SPW_OK;
    SPW_TRY(spw__tok_grow((void **)&c->text, &c->text_bytes, c->bytes + bytes, c->bytes, "a conversation", err));
    SPW_TRY(spw__tok_grow((void **)&c->loss, &c->loss_bytes, c->bytes + bytes, c->bytes, "a conversation", err));
    memcpy(c->text + c->bytes, text, bytes);
    memset(c->loss + c->bytes, loss, bytes);
    c->bytes += bytes;
    return SPW_OK;
}

/* The longest added token that text begins with, or NULL. */
static const tok_added *
token_at(const spw_tokenizer *t, const char *text)
{
    const tok_added *found = NULL;
    for (uint32_t i = 0; i < t->added_count; i++) {
        const tok_added *a = &t->added[i];
        if (a->bytes > 0 && (found == NULL || a->bytes > found->bytes) && strncmp(text, a->text, a->bytes) == 0)
            found = a;
    }
    return found;
}

/* Text of the layout. With loss: up to its first token, which ends a turn; all of it if there is none. */
static spw_status
put_layout(spw_chat *c, const char *text, bool loss, spw_error *err)
{
    while (*text != '\0') {
        unsigned char first = (unsigned char)*text;
        const tok_added *a = c->t->raw.starts[first] || c->t->normal.starts[first] ? token_at(c->t, text) : NULL;
        if (a == NULL) {
            SPW_TRY(put_bytes(c, text++, 1, loss, err));
            continue;
        }
        SPW_TRY(spw__tok_grow((void **)&c->marks, &c->mark_bytes, (c->mark_count + 1) * sizeof *c->marks,
                              c->mark_count * sizeof *c->marks, "a conversation", err));
        c->marks[c->mark_count++] = (mark){c->bytes, a, loss};
        loss = false;
        text += a->bytes;
    }
    return SPW_OK;
}

static spw_status
put_content(spw_chat *c, const char *text, uint64_t bytes, bool trim, bool loss, spw_error *err)
{
    if (trim) {
        uint64_t begin = spw__tok_space_after(text, 0, bytes, false);
        bytes = spw__tok_space_before(text, begin, bytes, false) - begin;
        text += begin;
    }
    if (c->t->nfc)
        SPW_TRY(spw__tok_nfc(&c->s, text, bytes, &text, &bytes, err));
    return put_bytes(c, text, bytes, loss, err);
}

static void
restart(spw_chat *c)
{
    c->bytes = c->mark_count = 0;
    c->folded = false;
}

/* ---------------------------------------------------------------- messages */

typedef struct message {
    chat_role role;
    const char *text;
    uint64_t bytes;
    bool loss;
} message;

/* NULL, too, where it is null: rows of several sources have each other's columns so. */
static const json_t *
member(const json_t *object, const char *name)
{
    const json_t *v = json_object_get(object, name);
    return json_is_null(v) ? NULL : v;
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
join_parts(spw_chat *c, message *m, const json_t *parts, spw_error *err)
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

/* Whether a member says nothing: missing, false, or empty. */
static bool
says_nothing(const json_t *v)
{
    return v == NULL || json_is_false(v) || (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) || (json_is_object(v) && json_object_size(v) == 0);
}

static spw_status
read_message(spw_chat *c, message *m, const json_t *v, spw_error *err)
{
    static const char *const unsaid[] = {"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"};
    const json_t *role = member(v, "role"), *content = member(v, "content");
    SPW_TRY(read_role(&m->role, role != NULL ? role : member(v, "from"), err));
    for (size_t i = 0; i < sizeof unsaid / sizeof unsaid[0]; i++) {
        if (!says_nothing(member(v, unsaid[i])))
            return SPW_RAISE(err, SPW_ECORRUPT, "it has %s, which no layout here can say", unsaid[i]);
    }
    m->loss = m->role == CHAT_ASSISTANT;
    SPW_TRY(read_weight(&m->loss, member(v, "weight"), err));
    content = content != NULL ? content : member(v, "value");
    if (json_is_array(content))
        return join_parts(c, m, content, err);
    if (!json_is_string(content))
        return SPW_RAISE(err, SPW_ECORRUPT, "it has no \"content\" (or \"value\") that is text");
    m->text = json_string_value(content);
    m->bytes = json_string_length(content);
    return SPW_OK;
}

/* Whether the layout can say m after turns of role `last` (CHAT_ROLES: it is the first). */
static spw_status
check_turn(const spw_chat *c, chat_role last, const message *m, spw_error *err)
{
    static const char *const names[] = {"system", "user", "assistant", "tool"};
    const chat_layout *l = &c->layout;
    bool folds = l->turns[CHAT_SYSTEM].before == NULL;
    if (m->role == CHAT_TOOL && l->turns[CHAT_TOOL].before == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "layout %s has no turns of a tool", l->name);
    if (!folds || m->role == CHAT_TOOL)
        return SPW_OK;
    if (m->role == CHAT_SYSTEM && last != CHAT_ROLES)
        return SPW_RAISE(err, SPW_ECORRUPT, "layout %s has a system's text in front only", l->name);
    if (m->role == CHAT_ASSISTANT && (last == CHAT_ROLES || last == CHAT_SYSTEM))
        return SPW_RAISE(err, SPW_ECORRUPT, "conversations of layout %s begin with the user", l->name);
    if (m->role == last)
        return SPW_RAISE(err, SPW_ECORRUPT, "two turns of the %s in a row, which layout %s does not have",
                         names[m->role], l->name);
    return SPW_OK;
}

/* Keeps a system's text for the user's turn that follows. */
static spw_status
fold_system(spw_chat *c, const message *m, spw_error *err)
{
    SPW_TRY(spw__tok_grow((void **)&c->system, &c->system_bytes, m->bytes + 1, 0, "a system's text", err));
    memcpy(c->system, m->text, m->bytes);
    c->system_length = m->bytes;
    c->folded = true;
    return SPW_OK;
}

static spw_status
put_message(spw_chat *c, const message *m, spw_error *err)
{
    const chat_turn *turn = &c->layout.turns[m->role];
    if (turn->before == NULL)
        return fold_system(c, m, err);
    SPW_TRY(put_layout(c, turn->before, false, err));
    if (c->folded) {
        SPW_TRY(put_content(c, c->system, c->system_length, false, false, err));
        SPW_TRY(put_bytes(c, "\n\n", 2, false, err));
        c->folded = false;
    }
    SPW_TRY(put_content(c, m->text, m->bytes, c->layout.trim, m->loss, err));
    return put_layout(c, turn->after, m->loss, err);
}

/* How far a conversation is written. */
typedef struct talk {
    const json_t *system; /* what the line has besides its lists, or NULL */
    chat_role last;       /* CHAT_ROLES: no turn yet */
    uint64_t count;       /* messages so far; of these the first `without` have no loss */
    uint64_t without;
} talk;

static spw_status
put_turn(spw_chat *c, talk *k, message *m, spw_error *err)
{
    SPW_TRY(check_turn(c, k->last, m, err));
    k->last = m->role;
    m->loss = m->loss && k->count >= k->without;
    return put_message(c, m, err);
}

static spw_status
put_next(spw_chat *c, talk *k, const json_t *v, spw_error *err)
{
    message m = {.role = CHAT_ROLES};
    SPW_TRY(read_message(c, &m, v, err));
    if (k->count == 0 && k->system != NULL && m.role == CHAT_SYSTEM) {
        if (m.bytes == json_string_length(k->system) && memcmp(m.text, json_string_value(k->system), m.bytes) == 0)
            return SPW_OK;
        return SPW_RAISE(err, SPW_ECORRUPT, "it is the system's, with another text than the line's \"system\"");
    }
    return put_turn(c, k, &m, err);
}

static spw_status
begin_talk(spw_chat *c, const talk *k, spw_error *err)
{
    restart(c);
    SPW_TRY(put_layout(c, c->layout.begin, false, err));
    if (k->system != NULL) {
        const message m = {
            .role = CHAT_SYSTEM, .text = json_string_value(k->system), .bytes = json_string_length(k->system)};
        SPW_TRY(put_message(c, &m, err));
    }
    return SPW_OK;
}

/* The messages of a field. */
static spw_status
put_list(spw_chat *c, talk *k, const json_t *line, const char *field, spw_error *err)
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
static spw_status
put_prompt(spw_chat *c, talk *k, const json_t *line, const char *field, spw_error *err)
{
    const json_t *text = json_object_get(line, field);
    message m = {.role = CHAT_USER, .text = json_string_value(text), .bytes = json_string_length(text)};
    spw_status st;
    if (!json_is_string(text))
        return put_list(c, k, line, field, err);
    st = put_turn(c, k, &m, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "field \"%s\"", field);
    k->count++;
    return st;
}

static spw_status
end_talk(spw_chat *c, const char *field, spw_error *err)
{
    if (c->folded)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "field \"%s\": a system's text without a user's turn, which layout %s does not have", field,
                         c->layout.name);
    return put_layout(c, c->layout.end, false, err);
}

/* ---------------------------------------------------------------- tokens */

static spw_status
push(spw_tokens *tokens, spw_tokens *targets, int32_t id, bool loss, spw_error *err)
{
    SPW_TRY(spw_tokens_push(tokens, id, err));
    return targets != NULL ? spw_tokens_push(targets, loss ? id : -1, err) : SPW_OK;
}

static bool
any(const bool *loss, uint64_t begin, uint64_t end)
{
    for (uint64_t i = begin; i < end; i++) {
        if (loss[i])
            return true;
    }
    return false;
}

/* Whether the tokenizer puts a space before a text. */
static bool
gets_space(const spw_tokenizer *t, bool first, const char *text, uint64_t bytes)
{
    bool missing = t->prefix == TOK_PREFIX_MISSING || (t->prefix == TOK_PREFIX_FIRST && first);
    return t->chars && (t->prefix == TOK_PREFIX_ALWAYS || (missing && spw__tok_chars_space(text, bytes) == 0));
}

/* How many bytes of normalized text an id is. */
static uint64_t
bytes_of(const spw_tokenizer *t, int32_t id)
{
    for (uint32_t i = 0; (t->tokens[id].flags & TOK_ADDED) != 0 && i < t->normal.count; i++) {
        if (t->normal.list[i].id == id)
            return t->normal.list[i].bytes;
    }
    return t->tokens[id].bytes;
}

/* Where `count` bytes of normalized text end that begin at `at`: one of them may stand for U+2581. */
static uint64_t
go_on(const spw_chat *c, uint64_t at, uint64_t end, uint64_t count)
{
    for (; at < end && count > 0; count--) {
        uint64_t space = c->t->chars ? spw__tok_chars_space(c->text + at, end - at) : 0;
        at += space > 0 ? space : 1;
    }
    return at;
}

/* Text without added tokens that are looked for before normalisation. A space put before it belongs to its first byte. */
static spw_status
encode_stretch(const spw_chat *c, uint64_t begin, uint64_t end, spw_tokens *tokens, spw_tokens *targets, spw_error *err)
{
    bool first = begin == 0 && (c->mark_count == 0 || c->marks[0].at > 0), spaced;
    uint64_t before = tokens->count, at = begin;
    if (begin == end)
        return SPW_OK;
    SPW_TRY(spw__tok_stretch(c->t, c->text + begin, end - begin, first, tokens, err));
    spaced = gets_space(c->t, first, c->text + begin, end - begin);
    for (uint64_t i = before; targets != NULL && i < tokens->count; i++) {
        uint64_t next = go_on(c, at, end, bytes_of(c->t, tokens->ids[i]) - (spaced && i == before));
        bool loss = any(c->loss, at, next > at || at == end ? next : at + 1);
        SPW_TRY(spw_tokens_push(targets, loss ? tokens->ids[i] : -1, err));
        at = next;
    }
    return SPW_OK;
}

static bool
is_layouts(const spw_chat *c, int32_t id)
{
    for (uint32_t i = 0; c->layout.tokens[i] != NULL; i++) {
        if (spw__tok_added_find(c->t, c->layout.tokens[i])->id == id)
            return true;
    }
    return false;
}

/* Text between two marks. Added tokens that are not special count, but for those of the layout. */
static spw_status
encode_between(const spw_chat *c, uint64_t begin, uint64_t end, spw_tokens *tokens, spw_tokens *targets, spw_error *err)
{
    const char *text = c->text + begin;
    uint64_t search = 0, done = 0, bytes = end - begin;
    tok_match m;
    while (bytes > 0 && spw__tok_added_next(&c->t->raw, text, bytes, false, &search, done, &m)) {
        if (is_layouts(c, m.id))
            continue;
        SPW_TRY(encode_stretch(c, begin + done, begin + m.begin, tokens, targets, err));
        SPW_TRY(push(tokens, targets, m.id, any(c->loss + begin, m.begin, m.end), err));
        done = m.end;
    }
    return encode_stretch(c, begin + done, end, tokens, targets, err);
}

static spw_status
encode_all(const spw_chat *c, spw_tokens *tokens, spw_tokens *targets, spw_error *err)
{
    uint64_t done = 0;
    for (uint64_t i = 0; i <= c->mark_count; i++) {
        const mark *m = i < c->mark_count ? &c->marks[i] : NULL;
        uint64_t next = m != NULL ? m->at : c->bytes, end = next;
        if (i > 0 && c->marks[i - 1].token->rstrip && c->text != NULL)
            done = spw__tok_space_after(c->text, done, end, false);
        if (m != NULL && m->token->lstrip && c->text != NULL)
            end = spw__tok_space_before(c->text, done, end, false);
        if (done < end)
            SPW_TRY(encode_between(c, done, end, tokens, targets, err));
        if (m != NULL)
            SPW_TRY(push(tokens, targets, m->token->id, m->loss, err));
        done = next;
    }
    return SPW_OK;
}

bool
spw_chat_is_in(const spw_data_line *line, const char *field)
{
    const json_t *object = (const json_t *)line;
    return field != NULL && field[0] != '\0'
               ? member(object, field) != NULL
               : member(object, "messages") != NULL || member(object, "conversations") != NULL;
}

/* What a line says besides its messages: *system is NULL where it has no text of the system's. */
static spw_status
read_line(const json_t **system, const json_t *line, spw_error *err)
{
    static const char *const unsaid[] = {"tools", "functions"};
    *system = member(line, "system");
    for (size_t i = 0; i < sizeof unsaid / sizeof unsaid[0]; i++) {
        if (!says_nothing(member(line, unsaid[i])))
            return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is not empty, and no layout here can say tools",
                             unsaid[i]);
    }
    if (says_nothing(*system))
        *system = NULL;
    return *system == NULL || json_is_string(*system) ? SPW_OK
                                                      : SPW_RAISE(err, SPW_ECORRUPT, "field \"system\" is not text");
}

spw_status
spw_chat_encode_answer(spw_chat *c, const spw_data_line *line, const char *prompt, const char *field, uint64_t without,
                       spw_tokens *tokens, spw_tokens *targets, spw_error *err)
{
    const json_t *object = (const json_t *)line;
    talk k = {.last = CHAT_ROLES, .without = without};
    SPW_TRY(read_line(&k.system, object, err));
    k.last = k.system != NULL ? CHAT_SYSTEM : CHAT_ROLES;
    SPW_TRY(begin_talk(c, &k, err));
    if (prompt != NULL)
        SPW_TRY(put_prompt(c, &k, object, prompt, err));
    SPW_TRY(put_list(c, &k, object, field, err));
    SPW_TRY(end_talk(c, field, err));
    return encode_all(c, tokens, targets, err);
}

spw_status
spw_chat_encode(spw_chat *c, const spw_data_line *line, const char *field, spw_tokens *tokens, spw_tokens *targets,
                spw_error *err)
{
    if (field == NULL || field[0] == '\0')
        field = member((const json_t *)line, "messages") != NULL ? "messages" : "conversations";
    return spw_chat_encode_answer(c, line, NULL, field, 0, tokens, targets, err);
}

spw_status
spw_chat_encode_prompt(spw_chat *c, const char *text, uint64_t bytes, spw_tokens *tokens, spw_error *err)
{
    const message m = {.role = CHAT_USER, .text = text, .bytes = bytes};
    restart(c);
    SPW_TRY(put_layout(c, c->layout.begin, false, err));
    SPW_TRY(put_message(c, &m, err));
    SPW_TRY(put_layout(c, c->layout.turns[CHAT_ASSISTANT].before, false, err));
    while (c->bytes > 0 && c->text[c->bytes - 1] == ' ' &&
           (c->mark_count == 0 || c->bytes > c->marks[c->mark_count - 1].at))
        c->bytes--; /* the answer's first token has it */
    return encode_all(c, tokens, NULL, err);
}

/* ---------------------------------------------------------------- open and close */

static uint64_t
key_of(const chat_layout *l)
{
    const char *ends[] = {l->begin, l->end};
    uint64_t sum = spw_checksum_more(0, &l->trim, sizeof l->trim);
    for (int i = 0; i < 2; i++)
        sum = spw_checksum_more(sum, ends[i], strlen(ends[i]) + 1);
    for (int r = 0; r < CHAT_ROLES; r++) {
        const chat_turn *turn = &l->turns[r];
        const bool is = turn->before != NULL;
        sum = spw_checksum_more(sum, &is, sizeof is);
        if (is) {
            sum = spw_checksum_more(sum, turn->before, strlen(turn->before) + 1);
            sum = spw_checksum_more(sum, turn->after, strlen(turn->after) + 1);
        }
    }
    for (int i = 0; l->tokens[i] != NULL; i++)
        sum = spw_checksum_more(sum, l->tokens[i], strlen(l->tokens[i]) + 1);
    return sum;
}

static spw_status
load(spw_chat *c, const char *layout, spw_error *err)
{
    SPW_TRY(spw__chat_find(&c->layout, &c->file, c->says, sizeof c->says, layout, c->t, err));
    for (uint32_t i = 0; c->layout.tokens[i] != NULL; i++) {
        const tok_added *a = spw__tok_added_find(c->t, c->layout.tokens[i]);
        if (!a->special && a->normalized)
            return SPW_RAISE(err, SPW_ECONFIG,
                             "chat \"%.200s\": token %s of %s is not special (added_tokens: special false, normalized "
                             "true), so contents could not spell it as text",
                             c->layout.name, c->layout.tokens[i], c->t->path);
    }
    c->key = key_of(&c->layout);
    SPW_TRY(put_layout(c, c->layout.turns[CHAT_ASSISTANT].after, true, err));
    c->end_of_turn = c->mark_count > 0 ? c->marks[0].token->id : -1;
    return SPW_OK;
}

spw_status
spw_chat_open(spw_chat **out, const char *layout, const spw_tokenizer *t, spw_error *err)
{
    spw_chat *c = spw_mem_zalloc(sizeof *c);
    spw_status st;
    *out = NULL;
    if (c == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "layout of conversations");
    c->t = t;
    st = load(c, layout, err);
    if (st != SPW_OK)
        spw_chat_close(c);
    else
        *out = c;
    return st;
}

void
spw_chat_close(spw_chat *c)
{
    if (c == NULL)
        return;
    json_decref(c->file);
    spw_mem_free(c->text);
    spw_mem_free(c->loss);
    spw_mem_free(c->marks);
    spw_mem_free(c->joined);
    spw_mem_free(c->system);
    spw_mem_free(c->s.normal);
    spw_mem_free(c->s.points);
    spw_mem_free(c);
}

const char *
spw_chat_says(const spw_chat *c)
{
    return c->says;
}

uint64_t
spw_chat_key(const spw_chat *c)
{
    return c->key;
}

int32_t
spw_chat_end_of_turn(const spw_chat *c)
{
    return c->end_of_turn;
}
