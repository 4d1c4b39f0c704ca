/*
 * JSON lines, one at a time, and the texts in a line. Whoever makes tokens of them reads them here, so that train and tokenize
 * find the same texts. Errors do not say where: the caller knows file and line.
 */
#include "spw_data.h"
#include "spw_files.h"
#include <jansson.h>
#include <stdio.h>

spw_status
spw_data_line_open(spw_data_line **out, const char *line, uint64_t bytes, spw_error *err)
{
    json_error_t why;
    json_t *object;
    uint64_t blank = 0, mark = spw_text_mark(line, bytes); /* files that were put together may have several */
    *out = NULL;
    line += mark;
    bytes -= mark;
    while (blank < bytes && (line[blank] == ' ' || line[blank] == '\t' || line[blank] == '\r'))
        blank++;
    if (blank == bytes)
        return SPW_OK;
    object =
        json_loadb(line, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL,
                   &why); /* as real: numbers of any size may stand in other fields */
    if (object == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "not JSON at byte %d: %s", why.position, why.text);
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

spw_status
spw_data_line_text(spw_data_line *line, const char *field, const char **text, uint64_t *bytes, spw_error *err)
{
    json_t *object = (json_t *)line, *v = json_object_get(object, field);
    char fields[200];
    if (v == NULL) {
        bool talk = json_is_array(json_object_get(object, "messages")) ||
                    json_is_array(json_object_get(object, "conversations"));
        list_fields(object, fields, sizeof fields);
        return SPW_RAISE(err, SPW_ECORRUPT, "no field \"%s\"; it has %s%s", field, fields[0] != '\0' ? fields : "none",
                         talk ? " (data.chat, and --chat of eval, are for conversations)" : "");
    }
    if (!json_is_string(v))
        return SPW_RAISE(err, SPW_ECORRUPT, "field \"%s\" is not a string", field);
    *text = json_string_value(v);
    *bytes = json_string_length(v);
    return SPW_OK;
}

void
spw_data_line_close(spw_data_line *line)
{
    json_decref((json_t *)line);
}
