/*
 * A configuration as text again, every key with the value that counts, and the list of all keys for people. Both walk the table of
 * config_keys.c.
 */
#include "config_internal.h"
#include "spw_files.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { KEY_BYTES = SPW_CONFIG_KEY_BYTES };

static json_t *
dump_globs(const spw_glob_list *list)
{
    json_t *array = list->count > 0 ? json_array() : NULL;
    for (uint32_t i = 0; i < list->count; i++)
        json_array_append_new(array, json_string(list->item[i]));
    return array;
}

static json_t *
dump_groups(const spw_config *c)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < c->optimizer.group_count; i++) {
        const spw_param_group *g = &c->optimizer.groups[i];
        json_t *o = json_pack("{s:s}", "match", g->match);
        if (!isnan(g->lr))
            json_object_set_new(o, "lr", json_real(g->lr));
        if (!isnan(g->weight_decay))
            json_object_set_new(o, "weight_decay", json_real(g->weight_decay));
        if (!isnan(g->beta1))
            json_object_set_new(o, "betas", json_pack("[f, f]", g->beta1, g->beta2));
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *
path_json(const spw_path_list *list, uint32_t i)
{
    json_t *object;
    if ((list->weight[i] == 0 || list->weight[i] == 1) && list->bytes[i] == 0)
        return json_string(list->item[i]);
    object = json_pack("{s:s, s:f}", "path", list->item[i], "weight", list->weight[i]);
    if (list->bytes[i] > 0)
        json_object_set_new(object, "bytes", json_integer((json_int_t)list->bytes[i]));
    return object;
}

static json_t *
value_json(const spw_config *c, const key_row *row)
{
    const void *field = (const char *)c + row->offset;
    switch (row->type) {
    case K_BOOL: return json_boolean(*(const bool *)field);
    case K_U64:
        return *(const uint64_t *)field == 0 && row->min > 0 ? NULL
                                                             : json_integer((json_int_t) * (const uint64_t *)field);
    case K_U32: return json_integer((json_int_t) * (const uint32_t *)field);
    case K_I32: return json_integer(*(const int32_t *)field);
    case K_REAL: return isnan(*(const double *)field) ? NULL : json_real(*(const double *)field);
    case K_PATH:
    case K_TEXT:
        if (row->size == 0)
            return json_string(c->scheduler.warmup_linear ? "linear" : "log");
        if (field == c->optimizer.type && strcasecmp(field, "AdamW") == 0 && !c->optimizer.adam_w_mode)
            return json_string("Adam"); /* what has L2 by a program or an older version is called */
        return json_string(field);
    case K_BYTES:
        return *(const uint64_t *)field == SPW_AUTO ? json_string("auto")
                                                    : json_integer((json_int_t) * (const uint64_t *)field);
    case K_PATHS: {
        const spw_path_list *list = field;
        json_t *array = list->count == 0 ? NULL : json_array();
        for (uint32_t i = 0; i < list->count; i++)
            json_array_append_new(array, path_json(list, i));
        return array;
    }
    case K_TIER: return json_string(spw__config_tiers[*(const spw_tier *)field]);
    case K_PLACE:
        return json_string(*(const spw_tier *)field == SPW_TIER_COUNT ? "auto"
                                                                      : spw_tier_name(*(const spw_tier *)field));
    case K_FORMAT: return json_string(spw_state_name(*(const spw_state_format *)field));
    case K_DTYPE: return json_string(spw_dtype_name(*(const spw_dtype *)field));
    case K_BACKEND: return json_string(spw_aio_backend_name(*(const spw_aio_backend *)field));
    case K_BETAS: return json_pack("[f, f]", c->optimizer.beta1, c->optimizer.beta2);
    case K_GROUPS: return c->optimizer.group_count > 0 ? dump_groups(c) : NULL;
    case K_GLOBS: return dump_globs(field);
    default: return NULL;
    }
}

static void
put(json_t *root, const char *key, json_t *value)
{
    char part[KEY_BYTES];
    const char *at = key;
    size_t n;
    while (n = strcspn(at, "."), at[n] == '.') {
        memcpy(part, at, n);
        part[n] = '\0';
        if (json_object_get(root, part) == NULL)
            json_object_set_new(root, part, json_object());
        root = json_object_get(root, part);
        at += n + 1;
    }
    json_object_set_new(root, at, value);
}

static json_t *
model_json(const spw_config *c)
{
    char *text = spw_hf_config_text(&c->model, SPW_DTYPE_COUNT);
    json_t *m = text == NULL ? NULL : json_loads(text, 0, NULL);
    spw_mem_free(text);
    return m;
}

char *
spw_config_dump(const spw_config *c)
{
    json_t *root = json_object();
    char *text, *copy;
    json_object_set_new(root, "model", model_json(c));
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        bool kept = (row->class == C_BUILT || row->class == C_INERT) && row->offset != SPW_CONFIG_NOWHERE;
        json_t *v = kept && row->type != K_SECTION && row->type != K_ANY ? value_json(c, row) : NULL;
        if ((strncmp(row->key, "scheduler.params.", 17) == 0 &&
             !spw__config_scheduler_takes(c->scheduler.type, row->key + 17)) ||
            (strncmp(row->key, "optimizer.params.", 17) == 0 &&
             !spw__config_optimizer_takes(c->optimizer.type, row->key + 17))) {
            json_decref(v);
            v = NULL;
        }
        if (v != NULL)
            put(root, row->key, v);
    }
    text = json_dumps(root, JSON_INDENT(2));
    json_decref(root);
    copy = text == NULL ? NULL : spw_mem_strdup(text);
    free(text);
    return copy;
}

void
spw_config_help(void (*line)(void *ctx, const char *text), void *ctx)
{
    static const char *const types[] = {
        [K_SECTION] = "section", [K_BOOL] = "bool",         [K_U64] = "int",     [K_U32] = "int",
        [K_REAL] = "number",     [K_TEXT] = "text",         [K_BYTES] = "bytes", [K_PATHS] = "paths",
        [K_TIER] = "enum",       [K_PLACE] = "enum",        [K_FORMAT] = "enum", [K_DTYPE] = "enum",
        [K_BACKEND] = "enum",    [K_BETAS] = "two numbers", [K_GROUPS] = "list", [K_GLOBS] = "globs",
        [K_ANY] = "any",         [K_I32] = "int",           [K_PATH] = "path"};
    static const char *const classes[] = {"", " [no effect here]", " [not supported yet]",
                                          " [deprecated: use it instead]"};
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        char text[1000], also[100] = "", range[80] = "";
        if (row->alias != NULL)
            snprintf(also, sizeof also, " (also %s)", row->alias);
        if (row->class != C_UNBUILT && row->max > 0 &&
            (row->type == K_U64 || row->type == K_U32 || row->type == K_I32 || row->type == K_REAL))
            snprintf(range, sizeof range, " in [%.4g, %.4g]", row->min, row->max);
        else if (row->choices != NULL)
            snprintf(range, sizeof range, " of %s", row->choices + (row->choices[0] == '|'));
        snprintf(text, sizeof text, "  %s%s: %s%s = %s  %s%s", row->key, also, types[row->type], range,
                 row->type == K_SECTION  ? "{...}"
                 : row->fallback != NULL ? row->fallback
                                         : "(none)",
                 row->help, classes[row->class]);
        line(ctx, text);
    }
}
