/*
 * JSON in prompts: tools and the arguments of calls as Python's json.dumps() writes them, because models were tuned with what
 * transformers' chat templates make of them, and a space elsewhere or a 5.0 for a 5 are other tokens. chat_talk.c calls this.
 */
#include "chat_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static spw_status
put(chat_json *out, const char *text, uint64_t bytes, spw_error *err)
{
    SPW_TRY(spw__tok_grow((void **)&out->text, &out->room, out->length + bytes + 1, out->length,
                          "JSON of a conversation", err));
    if (bytes > 0)
        memcpy(out->text + out->length, text, bytes);
    out->length += bytes;
    return SPW_OK;
}

spw_status
spw__chat_json_text(chat_json *out, const char *text, spw_error *err)
{
    return put(out, text, strlen(text), err);
}

spw_status
spw__chat_json_string(chat_json *out, const char *text, uint64_t bytes, spw_error *err)
{
    static const char plain[] = "\"\\\n\r\t\b\f", letters[] = "\"\\nrtbf";
    uint64_t done = 0;
    SPW_TRY(put(out, "\"", 1, err));
    for (uint64_t i = 0; i < bytes; i++) {
        const char *found = text[i] != '\0' ? strchr(plain, text[i]) : NULL;
        char escape[8];
        if (found == NULL && (unsigned char)text[i] >= ' ')
            continue;
        SPW_TRY(put(out, text + done, i - done, err));
        if (found != NULL)
            snprintf(escape, sizeof escape, "\\%c", letters[found - plain]);
        else
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned char)text[i]);
        SPW_TRY(put(out, escape, strlen(escape), err));
        done = i + 1;
    }
    SPW_TRY(put(out, text + done, bytes - done, err));
    return put(out, "\"", 1, err);
}

/* Whether text reads back as x, if need be with one more in the last of its digits: below a power of two doubles are closer together. */
static bool
reads_back(char *text, double x)
{
    char *last = strchr(text, 'e') - 1;
    if (strtod(text, NULL) == x)
        return true;
    *last += *last < '9';
    return strtod(text, NULL) == x;
}

/* The fewest digits that read back as x, without an exponent from 1e-4 up to 1e16. */
static spw_status
put_real(chat_json *out, double x, spw_error *err)
{
    char text[64];
    int digits = 0, exponent;
    do
        snprintf(text, sizeof text, "%.*e", digits, x);
    while (!reads_back(text, x) && ++digits < 17);
    exponent = atoi(strchr(text, 'e') + 1);
    if (floor(x) == x && fabs(x) >= 1e17) /* as which integers of more than 64 bits were read */
        return SPW_RAISE(err, SPW_ECORRUPT, "number %s is an integer of more than 64 bits, or might be one", text);
    if (exponent >= -4 && exponent < 16) /* where powers of two have few digits */
        snprintf(text, sizeof text, "%.*f", digits - exponent > 1 ? digits - exponent : 1, x);
    return put(out, text, strlen(text), err);
}

static spw_status
put_number(chat_json *out, const json_t *v, spw_error *err)
{
    char text[32];
    if (json_is_real(v))
        return put_real(out, json_real_value(v), err);
    snprintf(text, sizeof text, "%lld", (long long)json_integer_value(v));
    return put(out, text, strlen(text), err);
}

/* What stands between two members, or around them: a line's end with an indent, else a space behind a comma. */
static spw_status
put_gap(chat_json *out, int indent, int depth, bool comma, spw_error *err)
{
    if (comma)
        SPW_TRY(put(out, ", ", indent > 0 ? 1 : 2, err));
    if (indent == 0)
        return SPW_OK;
    SPW_TRY(put(out, "\n", 1, err));
    for (int i = 0; i < indent * depth; i++)
        SPW_TRY(put(out, " ", 1, err));
    return SPW_OK;
}

static spw_status write_value(chat_json *out, const json_t *v, int indent, int depth, spw_error *err);

static spw_status
write_members(chat_json *out, const json_t *v, int indent, int depth, spw_error *err)
{
    const bool object = json_is_object(v);
    const size_t count = object ? json_object_size(v) : json_array_size(v);
    void *at = json_object_iter((json_t *)v);
    SPW_TRY(put(out, object ? "{" : "[", 1, err));
    for (size_t i = 0; i < count; i++) {
        const json_t *member = object ? json_object_iter_value(at) : json_array_get(v, i);
        SPW_TRY(put_gap(out, indent, depth + 1, i > 0, err));
        if (object) {
            const char *name = json_object_iter_key(at);
            SPW_TRY(spw__chat_json_string(out, name, strlen(name), err));
            SPW_TRY(put(out, ": ", 2, err));
            at = json_object_iter_next((json_t *)v, at);
        }
        SPW_TRY(write_value(out, member, indent, depth + 1, err));
    }
    if (count > 0)
        SPW_TRY(put_gap(out, indent, depth, false, err));
    return put(out, object ? "}" : "]", 1, err);
}

static spw_status
write_value(chat_json *out, const json_t *v, int indent, int depth, spw_error *err)
{
    if (json_is_object(v) || json_is_array(v))
        return write_members(out, v, indent, depth, err);
    if (json_is_string(v))
        return spw__chat_json_string(out, json_string_value(v), json_string_length(v), err);
    if (json_is_number(v))
        return put_number(out, v, err);
    return spw__chat_json_text(out, json_is_true(v) ? "true" : json_is_false(v) ? "false" : "null", err);
}

spw_status
spw__chat_json_write(chat_json *out, const json_t *v, int indent, spw_error *err)
{
    return write_value(out, v, indent, 0, err);
}
