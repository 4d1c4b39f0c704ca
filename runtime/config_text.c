/*
 * A configuration's text as DeepSpeed takes it: JSON, with Hjson's comments (//, # and slash-star) and with commas before a closing
 * bracket. They are blanked out before jansson reads the rest, so that lines and columns in messages stay those of the
 * file. The rest of Hjson (names and strings without quotes, lines without commas) is refused as the syntax error it is in
 * JSON.
 */
#include "config_internal.h"

/* The end of the string that starts at at, behind its quote. */
static char *
string_end(char *at)
{
    for (at++; *at != '\0' && *at != '"' && *at != '\n'; at++)
        at += at[0] == '\\' && at[1] != '\0';
    return *at == '"' ? at + 1 : at;
}

/* The end of the comment that starts at at; at where none does, or one that is never closed. */
static char *
comment_end(char *at)
{
    char *end;
    if (at[0] == '#' || (at[0] == '/' && at[1] == '/'))
        return at + strcspn(at, "\n");
    end = at[0] == '/' && at[1] == '*' ? strstr(at + 2, "*/") : NULL;
    return end != NULL ? end + 2 : at;
}

static void
blank(char *from, const char *end)
{
    for (; from < end; from++)
        *from = *from == '\n' ? '\n' : ' ';
}

static void
to_plain_json(char *text)
{
    char *comma = NULL; /* behind a value, and only blanks since */
    char before = '\0'; /* the last character that was none */
    for (char *at = text; *at != '\0';) {
        char *end = comment_end(at);
        if (end > at) {
            blank(at, end);
            at = end;
            continue;
        }
        if (strchr(" \t\r\n", *at) == NULL) {
            if ((*at == '}' || *at == ']') && comma != NULL)
                *comma = ' ';
            comma = *at == ',' && strchr("{[,:", before) == NULL ? at : NULL;
            before = *at;
        }
        at = *at == '"' ? string_end(at) : at + 1;
    }
}

/* Files of launchers, which name one of DeepSpeed's. */
static const char *
advice(const char *name)
{
    const char *end = strrchr(name, '.');
    bool yaml = end != NULL && (strcmp(end, ".yaml") == 0 || strcmp(end, ".yml") == 0);
    return yaml ? ": a configuration is JSON, not YAML; of accelerate give the file that deepspeed_config_file names, "
                  "of "
                  "Axolotl the one that deepspeed names"
                : "";
}

spw_status
spw__config_json(json_t **out, const char *text, const char *name, spw_error *err)
{
    json_error_t where;
    char *plain = spw_mem_strdup(text);
    *out = NULL;
    if (plain == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s: the text of the configuration", name);
    to_plain_json(plain);
    *out = json_loads(plain, JSON_REJECT_DUPLICATES, &where);
    spw_mem_free(plain);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "%s:%d:%d: %s%s", name, where.line, where.column, where.text, advice(name));
    if (json_is_object(*out))
        return SPW_OK;
    json_decref(*out);
    *out = NULL;
    return SPW_RAISE(err, SPW_ECONFIG, "%s:1:1: the configuration is not an object", name);
}
