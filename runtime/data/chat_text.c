/*
 * A conversation as text with marks: text of a layout, in which its special tokens are marks, and contents, in which nothing is. Every
 * byte and every mark knows whether it has loss. chat_talk.c writes, and chat.c makes tokens of what is written.
 */
#include "chat_internal.h"

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

static bool
is_one_of(const char *const *tokens, const tok_added *a)
{
    for (uint32_t i = 0; tokens[i] != NULL; i++) {
        if (strlen(tokens[i]) == a->bytes && memcmp(tokens[i], a->text, a->bytes) == 0)
            return true;
    }
    return false;
}

static bool
is_layouts(const chat_layout *l, const tok_added *a)
{
    return a->special || is_one_of(l->tokens, a) || is_one_of(l->tools.tokens, a);
}

/* The longest added token that text (bytes) begins with, or NULL. all: also those that are found in contents, too. */
static const tok_added *
token_at(const spw_chat *c, const char *text, uint64_t bytes, bool all)
{
    const tok_added *found = NULL;
    const spw_tokenizer *t = c->t;
    const unsigned char first = (unsigned char)*text;
    if (!t->raw.starts[first] && !t->normal.starts[first])
        return NULL;
    for (uint32_t i = 0; i < t->added_count; i++) {
        const tok_added *a = &t->added[i];
        if (a->bytes > 0 && a->bytes <= bytes && (found == NULL || a->bytes > found->bytes) &&
            memcmp(text, a->text, a->bytes) == 0)
            found = a;
    }
    return found != NULL && (all || is_layouts(&c->layout, found)) ? found : NULL;
}

/* ends: it ends a turn, and what is behind its first token has no loss. */
static spw_status
put_layout(spw_chat *c, const char *text, uint64_t bytes, bool loss, bool ends, spw_error *err)
{
    const char *end = text + bytes;
    while (text < end) {
        const tok_added *a = token_at(c, text, (uint64_t)(end - text), ends);
        if (a == NULL) {
            SPW_TRY(put_bytes(c, text++, 1, loss, err));
            continue;
        }
        SPW_TRY(spw__tok_grow((void **)&c->marks, &c->mark_bytes, (c->mark_count + 1) * sizeof *c->marks,
                              c->mark_count * sizeof *c->marks, "a conversation", err));
        c->marks[c->mark_count++] = (chat_mark){c->bytes, a, loss};
        loss = loss && !ends;
        text += a->bytes;
    }
    return SPW_OK;
}

spw_status
spw__chat_put_text(spw_chat *c, const char *text, uint64_t bytes, bool loss, spw_error *err)
{
    return put_layout(c, text, bytes, loss, false, err);
}

spw_status
spw__chat_put_end(spw_chat *c, const char *text, bool loss, spw_error *err)
{
    return put_layout(c, text, strlen(text), loss, true, err);
}

spw_status
spw__chat_put_content(spw_chat *c, const char *text, uint64_t bytes, bool trim, bool loss, spw_error *err)
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

void
spw__chat_drop_spaces(spw_chat *c)
{
    while (c->bytes > 0 && c->text[c->bytes - 1] == ' ' &&
           (c->mark_count == 0 || c->bytes > c->marks[c->mark_count - 1].at))
        c->bytes--;
}

void
spw__chat_restart(spw_chat *c)
{
    c->bytes = c->mark_count = 0;
    c->folded = false;
}
