/*
 * Looking at what a pickle holds. Nothing here trusts its shape: what is asked for and is not there, or is something else, is answered with NULL or
 * false.
 */
#include "pickle.h"
#include <jansson.h>

enum { DEPTH_MAX = 24, JSON_VALUES_MAX = 100000 };

const spw__py *
spw__py_get(const spw__py *v, const char *key)
{
    const spw__py *found = NULL;
    if (v == NULL || (v->kind != SPW__PY_DICT && v->kind != SPW__PY_OBJECT))
        return NULL;
    for (uint64_t i = 0; i + 1 < v->count; i += 2) {
        const char *text = spw__py_text(v->items[i]);
        if (text != NULL && strcmp(text, key) == 0)
            found = v->items[i + 1]; /* the last one counts */
    }
    return found;
}

const spw__py *
spw__py_attribute(const spw__py *v, const char *name)
{
    return v != NULL && v->kind == SPW__PY_OBJECT ? spw__py_get(v->state, name) : NULL;
}

const spw__py *
spw__py_item(const spw__py *list, uint64_t i)
{
    return list != NULL && list->kind == SPW__PY_LIST && i < list->count ? list->items[i] : NULL;
}

bool
spw__py_is(const spw__py *v, const char *callable)
{
    return v != NULL && v->kind == SPW__PY_OBJECT && v->callable->kind == SPW__PY_GLOBAL &&
           strcmp(v->callable->text, callable) == 0;
}

const char *
spw__py_text(const spw__py *v)
{
    return v != NULL && v->kind == SPW__PY_TEXT ? v->text : NULL;
}

bool
spw__py_int(const spw__py *v, int64_t *out)
{
    if (v != NULL && v->kind == SPW__PY_OBJECT && v->args->kind == SPW__PY_LIST && v->args->count == 1)
        v = v->args->items[0];
    if (v == NULL || (v->kind != SPW__PY_INT && v->kind != SPW__PY_BOOL))
        return false;
    *out = v->integer;
    return true;
}

bool
spw__py_real(const spw__py *v, double *out)
{
    int64_t n;
    if (v != NULL && v->kind == SPW__PY_REAL) {
        *out = v->real;
        return true;
    }
    if (!spw__py_int(v, &n))
        return false;
    *out = (double)n;
    return true;
}

/* left: values that may still follow; one that is in many places may be in itself, or make very many. */
static json_t *
to_json(const spw__py *v, int depth, uint32_t *left)
{
    json_t *o;
    if (depth > DEPTH_MAX || *left == 0)
        return NULL;
    --*left;
    switch (v->kind) {
    case SPW__PY_NONE: return json_null();
    case SPW__PY_BOOL: return json_boolean(v->integer != 0);
    case SPW__PY_INT: return json_integer(v->integer);
    case SPW__PY_REAL: return json_real(v->real);
    case SPW__PY_TEXT: return json_stringn(v->text, v->bytes);
    case SPW__PY_LIST:
        o = json_array();
        for (uint64_t i = 0; i < v->count; i++)
            (void)json_array_append_new(o, to_json(v->items[i], depth + 1, left));
        return o;
    case SPW__PY_DICT:
        o = json_object();
        for (uint64_t i = 0; i + 1 < v->count; i += 2) {
            const char *key = spw__py_text(v->items[i]);
            if (key != NULL)
                (void)json_object_set_new(o, key, to_json(v->items[i + 1], depth + 1, left));
        }
        return o;
    default: return NULL;
    }
}

json_t *
spw__py_json(const spw__py *v)
{
    uint32_t left = JSON_VALUES_MAX;
    return v != NULL ? to_json(v, 0, &left) : NULL;
}
