/*
 * JSON lines, one at a time, and the texts in a line. Whoever makes tokens of them reads them here, so that train and tokenize
 * find the same texts. Errors do not say where: the caller knows file and line.
 */
#include "data_internal.h"
#include "spw_files.h"
#include <jansson.h>
#include <stdio.h>

/* ---------------------------------------------------------------- JSON */

enum { INTEGER_DIGITS_MAX = 18 }; /* of one that 64 bits hold for sure */

/* A copy of text where integers of more digits have ".0" behind them: json_loadb() reads those as reals, of any size. NULL: no memory. */
static char *
widen_integers(const char *text, uint64_t bytes, uint64_t *out_bytes)
{
    char *out = spw_mem_zalloc(bytes + bytes / INTEGER_DIGITS_MAX * 2 + 1);
    uint64_t n = 0, digits = 0;
    bool quoted = false, real = false;
    for (uint64_t i = 0; out != NULL && i <= bytes; i++) {
        const char c = i < bytes ? text[i] : ' ';
        const bool digit = !quoted && c >= '0' && c <= '9';
        real = real || (digits > 0 && (c == '.' || c == 'e' || c == 'E'));
        if (digits > INTEGER_DIGITS_MAX && !digit && !real) {
            memcpy(out + n, ".0", 2);
            n += 2;
        }
        digits = digit ? digits + 1 : 0;
        real = real && (digit || c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-');
        if (i == bytes)
            break;
        quoted = quoted != (c == '"');
        out[n++] = c;
        if (quoted && c == '\\' && i + 1 < bytes)
            out[n++] = text[++i];
    }
    *out_bytes = n;
    return out;
}

spw_status
spw__data_json(json_t **out, const char *text, uint64_t bytes, spw_error *err)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY;
    json_error_t why;
    *out = json_loadb(text, bytes, flags, &why);
    if (*out == NULL && json_error_code(&why) == json_error_numeric_overflow) {
        uint64_t wide_bytes;
        char *wide = widen_integers(text, bytes, &wide_bytes);
        if (wide == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "a line with long numbers");
        *out = json_loadb(wide, wide_bytes, flags, &why);
        spw_mem_free(wide);
    }
    return *out != NULL ? SPW_OK : SPW_RAISE(err, SPW_ECORRUPT, "not JSON at byte %d: %s", why.position, why.text);
}

/* ---------------------------------------------------------------- lines */

spw_status
spw_data_line_open(spw_data_line **out, const char *line, uint64_t bytes, spw_error *err)
{
    json_t *object;
    uint64_t blank = 0, mark = spw_text_mark(line, bytes); /* files that were put together may have several */
    *out = NULL;
    line += mark;
    bytes -= mark;
    while (blank < bytes && (line[blank] == ' ' || line[blank] == '\t' || line[blank] == '\r'))
        blank++;
    if (blank == bytes)
        return SPW_OK;
    SPW_TRY(spw__data_json(&object, line, bytes, err));
    if (!json_is_object(object)) {
        json_decref(object);
        return SPW_RAISE(err, SPW_ECORRUPT, "not a JSON object");
    }
    *out = (spw_data_line *)object;
    return SPW_OK;
}

/* The names of an object's members, for a message. */
static void
list_fields(json_t *object, char *out, size_t bytes)
{
    const char *name;
    json_t *v;
    size_t n = 0;
    out[0] = '\0';
    json_object_foreach(object, name, v)
    {
        if (n < bytes)
            n += (size_t)snprintf(out + n, bytes - n, "%s\"%.40s\"", n > 0 ? ", " : "", name);
    }
}

/* What reads a line of a usual form that is not the one that was asked for. */
static const char *
meant_for(const json_t *object, const char *field)
{
    const bool unnamed = strcmp(field, "text") == 0; /* nobody has said what is to be read */
    if (json_is_array(json_object_get(object, "messages")) || json_is_array(json_object_get(object, "conversations")))
        return " (data.chat, and --chat of eval, are for conversations)";
    if (json_is_array(json_object_get(object, "input_ids")))
        return " (data.text_field input_ids, and --text-field of eval, take tokens)";
    if (unnamed && json_object_get(object, "chosen") != NULL && json_object_get(object, "rejected") != NULL)
        return " (spillway.preference.loss is for training on pairs of answers)";
    if (unnamed && json_is_string(json_object_get(object, "prompt")) &&
        json_is_string(json_object_get(object, "completion")))
        return " (data.prompt_field prompt and data.text_field completion read both)";
    return "";
}

spw_status
spw_data_line_text(spw_data_line *line, const char *field, const char **text, uint64_t *bytes, spw_error *err)
{
    json_t *object = (json_t *)line, *v = json_object_get(object, field);
    char fields[200];
    if (v == NULL) {
        list_fields(object, fields, sizeof fields);
        return SPW_RAISE(err, SPW_ECORRUPT, "no field \"%s\"; it has %s%s", field, fields[0] != '\0' ? fields : "none",
                         meant_for(object, field));
    }
    if (!json_is_string(v))
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is not a string", field);
    *text = json_string_value(v);
    *bytes = json_string_length(v);
    return SPW_OK;
}

bool
spw_data_line_has_tokens(const spw_data_line *line, const char *field)
{
    const json_t *v = json_object_get((const json_t *)line, field);
    return json_is_array(v) && (json_array_size(v) == 0 || json_is_number(json_array_get(v, 0)));
}

/* A whole number of a list, below 0 if it may be; false: it is none. */
static bool
read_id(const json_t *v, bool below, int32_t *out)
{
    const double x = json_number_value(v);
    *out = json_is_number(v) && x > INT32_MIN && x <= INT32_MAX ? (int32_t)x : -1;
    return json_is_number(v) && (double)*out == x && (below || *out >= 0);
}

/* The list of a field beside tokens, as long as they are; NULL: there is none. */
static spw_status
list_beside(const json_t **out, const json_t *object, const char *field, uint64_t count, spw_error *err)
{
    *out = json_object_get(object, field);
    if (*out != NULL && json_is_null(*out))
        *out = NULL;
    if (*out != NULL && (!json_is_array(*out) || json_array_size(*out) != count))
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is not a list of as many numbers as there are tokens, %llu",
                         field, (unsigned long long)count);
    return SPW_OK;
}

/* Tokens that attention is not to see are padding, which a window has of its own where it needs some. */
static spw_status
refuse_padding(const json_t *object, uint64_t count, spw_error *err)
{
    const json_t *seen;
    SPW_TRY(list_beside(&seen, object, "attention_mask", count, err));
    for (uint64_t i = 0; seen != NULL && i < count; i++) {
        if (json_number_value(json_array_get(seen, i)) == 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "attention_mask[%llu] is 0: write the tokens without padding, which is put behind them "
                             "where windows need some",
                             (unsigned long long)i);
    }
    return SPW_OK;
}

/* TRL's masks, which have 1 where there is loss: takes the targets of tokens [first, first + count) of others. */
static spw_status
apply_masks(const json_t *object, spw_tokens *targets, uint64_t first, uint64_t count, spw_error *err)
{
    static const char *const masks[] = {"completion_mask", "assistant_masks"};
    for (size_t k = 0; k < sizeof masks / sizeof masks[0]; k++) {
        const json_t *mask;
        SPW_TRY(list_beside(&mask, object, masks[k], count, err));
        for (uint64_t i = 0; mask != NULL && i < count; i++) {
            int32_t on;
            if (!read_id(json_array_get(mask, i), false, &on) || on > 1)
                return SPW_RAISE(err, SPW_ECORRUPT, "%s[%llu] is neither 0 nor 1", masks[k], (unsigned long long)i);
            targets->ids[first + i] = on == 0 ? -1 : targets->ids[first + i];
        }
    }
    return SPW_OK;
}

spw_status
spw_data_line_tokens(const spw_data_line *line, const char *field, const char *labels, spw_tokens *tokens,
                     spw_tokens *targets, spw_error *err)
{
    const json_t *object = (const json_t *)line, *list = json_object_get(object, field), *wanted = NULL;
    const uint64_t count = json_array_size(list), first = targets->count;
    if (!spw_data_line_has_tokens(line, field))
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is not a list of tokens, as it is in the file's first line",
                         field);
    if (labels != NULL) {
        SPW_TRY(list_beside(&wanted, object, labels, count, err));
        SPW_TRY(refuse_padding(object, count, err));
    }
    for (uint64_t i = 0; i < count; i++) {
        int32_t id, label;
        if (!read_id(json_array_get(list, i), false, &id))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s[%llu] is not a token's number", field, (unsigned long long)i);
        label = id;
        if (wanted != NULL && (!read_id(json_array_get(wanted, i), true, &label) || (label >= 0 && label != id)))
            return SPW_RAISE(err, SPW_ECORRUPT,
                             "%s[%llu] is neither its token, %d, nor below 0, which is without loss: data.labels_field "
                             "names a list of these",
                             labels, (unsigned long long)i, id);
        SPW_TRY(spw_tokens_push(tokens, id, err));
        SPW_TRY(spw_tokens_push(targets, label < 0 ? -1 : id, err));
    }
    return labels != NULL ? apply_masks(object, targets, first, count, err) : SPW_OK;
}

/* seq_lengths, which add up to count. */
static spw_status
take_lengths(const json_t *list, spw_tokens *lengths, uint64_t count, spw_error *err)
{
    const uint64_t parts = json_array_size(list);
    uint64_t sum = 0;
    bool whole = json_is_array(list);
    for (uint64_t i = 0; whole && i < parts; i++) {
        int32_t n;
        whole = read_id(json_array_get(list, i), false, &n) && n > 0;
        sum += whole ? (uint64_t)n : 0;
        if (whole)
            SPW_TRY(spw_tokens_push(lengths, n, err));
    }
    return whole && sum == count
               ? SPW_OK
               : SPW_RAISE(err, SPW_ECORRUPT,
                           "field \"seq_lengths\" is not a list of lengths that add up to the %llu tokens",
                           (unsigned long long)count);
}

spw_status
spw_data_line_lengths(const spw_data_line *line, uint64_t count, spw_tokens *lengths, spw_error *err)
{
    const json_t *object = (const json_t *)line, *list = json_object_get(object, "seq_lengths"), *places;
    int32_t before = -1, place;
    uint64_t begin = 0;
    if (list != NULL && !json_is_null(list))
        return take_lengths(list, lengths, count, err);
    SPW_TRY(list_beside(&places, object, "position_ids", count, err));
    for (uint64_t i = 0; places != NULL && i < count; i++, before = place) {
        if (!read_id(json_array_get(places, i), false, &place) || (i > 0 && place != 0 && place != before + 1))
            return SPW_RAISE(err, SPW_ECORRUPT,
                             "position_ids[%llu] is neither 0, where a text begins, nor one more than before",
                             (unsigned long long)i);
        if (i > begin && place == 0) {
            SPW_TRY(spw_tokens_push(lengths, (int32_t)(i - begin), err));
            begin = i;
        }
    }
    return count > begin ? spw_tokens_push(lengths, (int32_t)(count - begin), err) : SPW_OK;
}

void
spw_data_line_close(spw_data_line *line)
{
    json_decref((json_t *)line);
}
