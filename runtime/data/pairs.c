/*
 * Pairs of answers in JSON lines: what a line holds, and what of its tokens is learned. Datasets of preferences come in three forms: texts;
 * conversations behind a prompt of their own; and conversations that have the prompt in them, beside a field that says it once more. In
 * the last one the prompt is what both lists begin with. Texts and conversations become tokens in encode.c, which asks here.
 */
#include "chat_internal.h"
#include "data_internal.h"

static const char *
named(const char *field, const char *otherwise)
{
    return field != NULL && field[0] != '\0' ? field : otherwise;
}

static void
name_fields(const spw_data_options *o, const char *answers[2], const char **prompt)
{
    answers[0] = named(o->chosen_field, "chosen");
    answers[1] = named(o->rejected_field, "rejected");
    *prompt = named(o->prompt_field, "prompt");
}

uint64_t
spw__data_pair_key(const spw_data_options *o, uint64_t sum)
{
    const char *names[4] = {"", "", "", "pairs"};
    name_fields(o, names, &names[2]);
    for (int i = 0; i < 4; i++)
        sum = spw_checksum_more(sum, names[i], strlen(names[i]) + 1);
    return sum;
}

/* ---------------------------------------------------------------- a line */

static const json_t *
either(const json_t *message, const char *name, const char *older)
{
    const json_t *v = json_object_get(message, name);
    return v != NULL && !json_is_null(v) ? v : json_object_get(message, older);
}

static bool
says_same(const json_t *a, const json_t *b)
{
    return spw__chat_says_nothing(a) ? spw__chat_says_nothing(b) : json_equal(a, b);
}

static bool
is_same_message(const json_t *a, const json_t *b)
{
    static const char *const more[] = {"tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking"};
    bool same = json_equal(either(a, "role", "from"), either(b, "role", "from")) &&
                says_same(either(a, "content", "value"), either(b, "content", "value"));
    for (size_t i = 0; same && i < sizeof more / sizeof more[0]; i++)
        same = says_same(spw__chat_member(a, more[i]), spw__chat_member(b, more[i]));
    return same;
}

static bool
is_answer(const json_t *list, uint64_t i)
{
    const char *role = json_string_value(either(json_array_get(list, i), "role", "from"));
    return role != NULL && (strcmp(role, "assistant") == 0 || strcmp(role, "gpt") == 0);
}

static bool
begins_with_answer(const json_t *list)
{
    return is_answer(list, 0);
}

static bool
is_empty(const json_t *v)
{
    return v == NULL || json_is_null(v) || (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0);
}

/* Two lists, and what comes before them. */
static spw_status
find_talks(data_pair *p, const json_t *chosen, const json_t *rejected, const json_t *prompt, spw_error *err)
{
    bool answers = begins_with_answer(chosen);
    p->talks = true;
    if (answers != begins_with_answer(rejected))
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "field \"%s\" begins with a turn of the assistant, and field \"%s\" does not",
                         p->answers[answers ? 0 : 1], p->answers[answers ? 1 : 0]);
    if (p->prompt != NULL && !json_is_string(prompt) && !json_is_array(prompt))
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is neither text nor a list of messages", p->prompt);
    if (json_is_string(prompt) && !answers)
        p->prompt = NULL; /* the lists begin with it */
    while (p->shared < json_array_size(chosen) && p->shared < json_array_size(rejected) &&
           is_same_message(json_array_get(chosen, p->shared), json_array_get(rejected, p->shared)))
        p->shared++;
    p->apart = !is_answer(chosen, p->shared) || !is_answer(rejected, p->shared);
    if (p->prompt != NULL)
        p->shared += json_is_array(prompt) ? json_array_size(prompt) : 1;
    return SPW_OK;
}

static bool
is_tokens(const spw_data_line *line, const char *field)
{
    return spw_data_line_has_tokens(line, field) && !is_empty(json_object_get((const json_t *)line, field));
}

bool
spw__data_pair_has_tokens(const spw_data_line *line, const spw_data_options *o)
{
    const char *answers[2], *prompt;
    name_fields(o, answers, &prompt);
    return is_tokens(line, answers[0]);
}

spw_status
spw__data_pair_find(data_pair *out, spw_data_line *line, const spw_data_options *o, spw_error *err)
{
    const json_t *object = (const json_t *)line, *v[2], *prompt;
    *out = (data_pair){0};
    name_fields(o, out->answers, &out->prompt);
    prompt = json_object_get(object, out->prompt);
    out->prompted = prompt != NULL;
    if (is_empty(prompt))
        out->prompt = NULL;
    for (int i = 0; i < 2; i++) {
        const char *field = out->answers[i], *text;
        uint64_t bytes;
        v[i] = json_object_get(object, field);
        if (v[i] == NULL)
            return spw_data_line_text(line, field, &text, &bytes, err); /* which says what there is */
        if (!json_is_string(v[i]) && !json_is_array(v[i]))
            return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is neither text nor a list of messages", field);
        if (is_tokens(line, field))
            continue;
        if (json_is_array(v[i]) && o->chat == NULL)
            return SPW_RAISE(err, SPW_ECONFIG, "field \"%s\" is a list of messages, for which data.chat is needed",
                             field);
    }
    out->bare = out->prompt == NULL && json_object_size(object) > (prompt != NULL ? 3u : 2u) &&
                (json_is_string(v[0]) || is_tokens(line, out->answers[0]) || begins_with_answer(v[0]));
    if (is_tokens(line, out->answers[0])) /* whoever reads them says what is none of them */
        return SPW_OK;
    if (json_is_array(v[0]) && json_is_array(v[1]))
        return find_talks(out, v[0], v[1], prompt, err);
    if (json_is_array(v[0]) || json_is_array(v[1])) {
        const int list = json_is_array(v[0]) ? 0 : 1;
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is a list of %s, and field \"%s\" is text",
                         out->answers[list], is_tokens(line, out->answers[list]) ? "tokens" : "messages",
                         out->answers[1 - list]);
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- tokens */

/* How many tokens both begin with. */
static uint64_t
common_tokens(const spw_tokens *tokens, uint64_t middle)
{
    uint64_t n = 0;
    while (n < middle && middle + n < tokens->count && tokens->ids[n] == tokens->ids[middle + n])
        n++;
    return n;
}

void
spw__data_pair_hide(const spw_tokens *tokens, spw_tokens *targets, uint64_t middle)
{
    uint64_t n = common_tokens(tokens, middle);
    for (uint64_t i = 0; i < n; i++)
        targets->ids[i] = targets->ids[middle + i] = -1;
}

static bool
has_target(const spw_tokens *targets, uint64_t begin, uint64_t end)
{
    for (uint64_t i = begin + 1; i < end; i++) {
        if (targets->ids[i] >= 0)
            return true;
    }
    return false;
}

bool
spw__data_pair_differs(const spw_tokens *tokens, const spw_tokens *targets, uint64_t middle)
{
    bool same = tokens->count == 2 * middle && common_tokens(tokens, middle) == middle;
    return !same && has_target(targets, 0, middle) && has_target(targets, middle, targets->count);
}
