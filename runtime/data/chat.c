/*
 * Conversations to tokens: a conversation is written as text by its layout, with the layout's special tokens as marks between
 * stretches of it, and every byte knows whether it is the assistant's. A stretch is then encoded as the tokenizer encodes
 * what stands between two special tokens, so text of the layout and content merge as in the rendered whole, and
 * nothing in a content can be a special token. A token has a target if one of its bytes is the assistant's.
 *
 * Where a token lies is counted in bytes, so contents are brought to NFC before they are written where the tokenizer would do
 * that. Layouts come from chat_layout.c, and the text from chat_talk.c.
 */
#include "chat_internal.h"
#include "data_internal.h"

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
is_one_of(const spw_chat *c, const char *const *tokens, int32_t id)
{
    for (uint32_t i = 0; tokens[i] != NULL; i++) {
        const tok_added *a = spw__tok_added_find(c->t, tokens[i]);
        if (a != NULL && a->id == id)
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
        if (is_one_of(c, c->layout.tokens, m.id) || is_one_of(c, c->layout.tools.tokens, m.id))
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
        const chat_mark *m = i < c->mark_count ? &c->marks[i] : NULL;
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

/* ---------------------------------------------------------------- lines */

bool
spw_chat_is_in(const spw_data_line *line, const char *field)
{
    const json_t *object = (const json_t *)line;
    return field != NULL && field[0] != '\0'
               ? spw__chat_member(object, field) != NULL
               : spw__chat_member(object, "messages") != NULL || spw__chat_member(object, "conversations") != NULL;
}

/* The line's tools: a list of objects, or text that holds one; *out, NULL where there is none, is the caller's. */
static spw_status
read_tools(json_t **out, const json_t *line, bool functions, spw_error *err)
{
    const json_t *v = spw__chat_member(line, "tools"), *tool;
    json_t *list = json_incref((json_t *)v);
    spw_status st = SPW_OK;
    size_t i;
    *out = NULL;
    if (spw__chat_says_nothing(v)) {
        json_decref(list);
        return SPW_OK;
    }
    if (json_is_string(v)) {
        json_decref(list);
        st = spw__data_json(&list, json_string_value(v), json_string_length(v), err);
    }
    if (st == SPW_OK && !json_is_array(list))
        st = SPW_RAISE(err, SPW_ECORRUPT, "it is neither a list of tools nor text that holds one");
    json_array_foreach(list, i, tool)
    {
        if (st == SPW_OK &&
            (!json_is_object(tool) || (functions && !json_is_object(json_object_get(tool, "function")))))
            st = SPW_RAISE(err, SPW_ECORRUPT, "tool %zu is not an object%s", i + 1,
                           functions ? " with a \"function\"" : "");
    }
    if (st == SPW_OK && json_array_size(list) > 0)
        *out = json_incref(list);
    json_decref(list);
    if (st != SPW_OK)
        spw_error_wrap(err, "field \"tools\"");
    return st;
}

/* What a line says besides its messages: k->system is NULL where it has no text of the system's. */
static spw_status
read_line(const spw_chat *c, chat_talk *k, const json_t *line, spw_error *err)
{
    k->system = spw__chat_member(line, "system");
    if (!spw__chat_says_nothing(spw__chat_member(line, "functions")))
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "field \"functions\" is not empty: it is an older form of \"tools\", which is not read");
    if (spw__chat_says_nothing(k->system))
        k->system = NULL;
    if (k->system != NULL && !json_is_string(k->system))
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"system\" is not text");
    return read_tools(&k->tools, line, c->layout.tools.functions, err);
}

static spw_status
write_line(spw_chat *c, chat_talk *k, const json_t *line, const char *prompt, const char *field, spw_error *err)
{
    spw__chat_look(c, k, line, prompt, field);
    SPW_TRY(spw__chat_begin(c, k, err));
    if (prompt != NULL)
        SPW_TRY(spw__chat_put_prompt(c, k, line, prompt, err));
    SPW_TRY(spw__chat_put_list(c, k, line, field, err));
    return spw__chat_end(c, k, field, err);
}

spw_status
spw_chat_encode_answer(spw_chat *c, const spw_data_line *line, const char *prompt, const char *field, uint64_t without,
                       spw_tokens *tokens, spw_tokens *targets, spw_error *err)
{
    chat_talk k = {.without = without};
    spw_status st = read_line(c, &k, (const json_t *)line, err);
    if (st == SPW_OK)
        st = write_line(c, &k, (const json_t *)line, prompt, field, err);
    json_decref(k.tools);
    return st == SPW_OK ? encode_all(c, tokens, targets, err) : st;
}

spw_status
spw_chat_encode(spw_chat *c, const spw_data_line *line, const char *field, spw_tokens *tokens, spw_tokens *targets,
                spw_error *err)
{
    if (field == NULL || field[0] == '\0')
        field = spw__chat_member((const json_t *)line, "messages") != NULL ? "messages" : "conversations";
    return spw_chat_encode_answer(c, line, NULL, field, 0, tokens, targets, err);
}

spw_status
spw_chat_encode_prompt(spw_chat *c, const char *text, uint64_t bytes, spw_tokens *tokens, spw_error *err)
{
    SPW_TRY(spw__chat_ask(c, text, bytes, err));
    return encode_all(c, tokens, NULL, err);
}

/* ---------------------------------------------------------------- open and close */

static uint64_t
add_text(uint64_t sum, const char *text)
{
    const bool is = text != NULL;
    sum = spw_checksum_more(sum, &is, sizeof is);
    return is ? spw_checksum_more(sum, text, strlen(text) + 1) : sum;
}

/* What tools and reasoning add. */
static uint64_t
key_of_tools(const chat_layout *l, uint64_t sum)
{
    const chat_tools *t = &l->tools;
    const char *texts[] = {t->list[0],     t->list[1],      t->list[2],     t->calls[0],   t->calls[1],
                           t->calls[2],    t->calls[3],     t->results[0],  t->results[1], t->joint,
                           t->environment, l->reasoning[0], l->reasoning[1]};
    const uint32_t numbers[] = {t->place, (uint32_t)t->indent, t->functions, t->quoted, t->id_bytes};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        sum = add_text(sum, texts[i]);
    return spw_checksum_more(sum, numbers, sizeof numbers);
}

static uint64_t
key_of(const chat_layout *l)
{
    const char *ends[] = {l->begin, l->end};
    uint64_t sum = spw_checksum_more(0, &l->trim, sizeof l->trim);
    for (int i = 0; i < 2; i++)
        sum = spw_checksum_more(sum, ends[i], strlen(ends[i]) + 1);
    for (int r = 0; r < CHAT_ROLES; r++) {
        sum = add_text(sum, l->turns[r].before);
        if (l->turns[r].before != NULL)
            sum = spw_checksum_more(sum, l->turns[r].after, strlen(l->turns[r].after) + 1);
    }
    for (int i = 0; l->tokens[i] != NULL; i++)
        sum = spw_checksum_more(sum, l->tokens[i], strlen(l->tokens[i]) + 1);
    return l->tools.calls[1] != NULL || l->tools.list[0] != NULL || l->tools.results[0] != NULL ||
                   l->reasoning[0] != NULL
               ? key_of_tools(l, sum)
               : sum;
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
    SPW_TRY(spw__chat_put_end(c, c->layout.turns[CHAT_ASSISTANT].after, true, err));
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
    spw_mem_free(c->json.text);
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
