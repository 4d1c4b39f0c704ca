/*
 * One value of a configuration: what its row says about type, range and choices, and where it goes. Errors name the file, the key, what
 * was expected and the value.
 */
#include "config_internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_BYTES = SPW_CONFIG_KEY_BYTES };

spw_status
spw__config_bad_value(const config_reader *r, const char *key, const char *expected, const json_t *v)
{
    /* By jansson's json_type; true, false and null name themselves. */
    static const char *const kinds[] = {"object", "list", "string", "integer", "number", "", "", ""};
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15)); /* 0.9 as it was written */
    spw_status st = SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s: expected %s, got %s%s%.100s", r->name, key, expected,
                              kinds[json_typeof(v)], kinds[json_typeof(v)][0] != '\0' ? " " : "",
                              text != NULL ? text : "something else");
    free(text);
    return st;
}

static spw_status
read_integer(const config_reader *r, const key_row *row, const json_t *v, uint64_t *out)
{
    char expected[100];
    double x = json_is_number(v) ? json_number_value(v) : 0;
    if (!json_is_number(v))
        return spw__config_bad_value(r, row->key, "integer", v);
    snprintf(expected, sizeof expected, "integer in [%.10g, %.10g]", row->min, row->max);
    if (x != floor(x) || x < row->min || x > row->max)
        return spw__config_bad_value(r, row->key, expected, v);
    *out = json_is_integer(v) ? (uint64_t)json_integer_value(v) : x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x;
    return SPW_OK;
}

static spw_status
read_number(const config_reader *r, const key_row *row, const json_t *v, double *out)
{
    char expected[100];
    double x = json_is_number(v) ? json_number_value(v) : 0;
    if (!json_is_number(v))
        return spw__config_bad_value(r, row->key, "number", v);
    snprintf(expected, sizeof expected, "number in [%.10g, %.10g]", row->min, row->max);
    if (!(x >= row->min && x <= row->max))
        return spw__config_bad_value(r, row->key, expected, v);
    *out = x;
    return SPW_OK;
}

static spw_status
read_bytes(const config_reader *r, const key_row *row, const json_t *v, uint64_t *out)
{
    if (json_is_string(v) && strcmp(json_string_value(v), "auto") == 0) {
        *out = SPW_AUTO;
        return SPW_OK;
    }
    if (json_is_string(v) && spw_parse_bytes(json_string_value(v), out) && (double)*out >= row->min &&
        (double)*out <= row->max)
        return SPW_OK;
    return json_is_number(v)
               ? read_integer(r, row, v, out)
               : spw__config_bad_value(
                     r, row->key,
                     "bytes (a number, or a text such as \"256MiB\" or \"8GB\") of at least 4096, or \"auto\"", v);
}

/* {"path": ..., "weight": ..., "bytes": ...}: the members besides path; sources have weights, swap folders both. */
static spw_status
read_path_members(const config_reader *r, const key_row *row, json_t *object, const char *path, double *weight,
                  uint64_t *bytes)
{
    bool swap = strcmp(spw__config_last_part(row->key), "nvme_path") == 0;
    bool weighs = swap || strcmp(row->key, "data.sources") == 0;
    char key[KEY_BYTES + SPW_PATH_BYTES];
    const char *name;
    json_t *v;
    json_object_foreach(object, name, v)
    {
        key_row member = {.key = key, .min = 4096, .max = 1e18};
        snprintf(key, sizeof key, "%s: %s of %s", row->key, name, path);
        if (strcmp(name, "path") == 0)
            continue;
        if (weighs && strcmp(name, "weight") == 0) {
            *weight = json_is_number(v) ? json_number_value(v) : 0;
            if (!(*weight > 0 && *weight <= 1e9))
                return spw__config_bad_value(r, key, "number above 0 and up to 1e+09", v);
        } else if (swap && strcmp(name, "bytes") == 0) {
            SPW_TRY(read_bytes(r, &member, v, bytes));
            *bytes = *bytes == SPW_AUTO ? 0 : *bytes;
        } else {
            return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s: unknown member \"%s\" of %s; allowed: %s", r->name, row->key,
                             name, path,
                             swap     ? "path, weight, bytes"
                             : weighs ? "path, weight"
                                      : "path");
        }
    }
    return SPW_OK;
}

spw_status
spw__config_path(char out[2 * SPW_PATH_BYTES], const char *name, const char *key, const char *text, spw_error *err)
{
    const char *home = getenv("HOME");
    bool of_home = text[0] == '~' && (text[1] == '/' || text[1] == '\0');
    if (of_home && (home == NULL || home[0] == '\0'))
        return SPW_RAISE(err, SPW_ECONFIG, "%s: %s: %s is in the home folder, and HOME is not set", name, key, text);
    snprintf(out, 2 * SPW_PATH_BYTES, "%s%s", of_home ? home : "", of_home ? text + 1 : text);
    return SPW_OK;
}

static spw_status
add_path(const config_reader *r, const key_row *row, spw_path_list *list, json_t *v)
{
    const char *text = json_string_value(json_is_object(v) ? json_object_get(v, "path") : v);
    char path[2 * SPW_PATH_BYTES];
    uint32_t i = list->count;
    if (text == NULL || text[0] == '\0')
        return spw__config_bad_value(r, row->key, "a path or a list of paths", v);
    SPW_TRY(spw__config_path(path, r->name, row->key, text, r->err));
    if (list->count == SPW_PATHS_MAX || strlen(path) >= SPW_PATH_BYTES)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s: at most %d paths of %d bytes", r->name, row->key, SPW_PATHS_MAX,
                         SPW_PATH_BYTES - 1);
    if (json_is_object(v))
        SPW_TRY(read_path_members(r, row, v, text, &list->weight[i], &list->bytes[i]));
    memcpy(list->item[i], path, strlen(path) + 1);
    list->count++;
    return SPW_OK;
}

static spw_status
read_paths(const config_reader *r, const key_row *row, json_t *v, spw_path_list *list)
{
    memset(list, 0, sizeof *list);
    if (!json_is_array(v))
        return add_path(r, row, list, v);
    for (size_t i = 0; i < json_array_size(v); i++)
        SPW_TRY(add_path(r, row, list, json_array_get(v, i)));
    return list->count > 0 ? SPW_OK : spw__config_bad_value(r, row->key, "at least one path", v);
}

static spw_status
read_text(const config_reader *r, const key_row *row, const json_t *v, char *out)
{
    const char *text = json_string_value(v), *at = row->choices;
    char path[2 * SPW_PATH_BYTES];
    size_t n;
    if (text == NULL)
        return spw__config_bad_value(r, row->key, "string", v);
    if (row->type == K_PATH) {
        SPW_TRY(spw__config_path(path, r->name, row->key, text, r->err));
        text = path;
    }
    n = strlen(text);
    for (; at != NULL; at = strchr(at, '|') != NULL ? strchr(at, '|') + 1 : NULL) {
        if (strncmp(at, text, n) == 0 && (at[n] == '|' || at[n] == '\0'))
            break;
    }
    if (row->choices != NULL && at == NULL)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: not supported yet: %s \"%s\" (one of %s)", r->name, row->key, text,
                         row->choices + strspn(row->choices, "|"));
    if (row->class == C_INERT || row->offset == SPW_CONFIG_NOWHERE)
        return SPW_OK;
    if (out == NULL) { /* scheduler.params.warmup_type */
        r->out->scheduler.warmup_linear = strcmp(text, "linear") == 0;
        return SPW_OK;
    }
    if (n >= row->size)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s is longer than %zu bytes", r->name, row->key, row->size - 1);
    memset(out, 0, row->size);
    memcpy(out, text, n);
    return SPW_OK;
}

const char *const spw__config_tiers[SPW_TIER_COUNT] = {
    [SPW_TIER_DEVICE] = "none", [SPW_TIER_HOST] = "cpu", [SPW_TIER_NVME] = "nvme"};

static spw_status
read_word(const config_reader *r, const key_row *row, const json_t *v, void *field)
{
    const char *text = json_string_value(v) != NULL ? json_string_value(v) : "";
    for (int i = 0; row->type == K_TIER && i < SPW_TIER_COUNT; i++) {
        if (strcmp(text, spw__config_tiers[i]) == 0) {
            *(spw_tier *)field = (spw_tier)i;
            return SPW_OK;
        }
    }
    for (int i = 0; row->type == K_PLACE && i < SPW_TIER_COUNT; i++) {
        if (strcmp(text, spw_tier_name((spw_tier)i)) == 0) {
            *(spw_tier *)field = (spw_tier)i;
            return SPW_OK;
        }
    }
    if (row->type == K_PLACE && strcmp(text, "auto") == 0) {
        *(spw_tier *)field = SPW_TIER_COUNT;
        return SPW_OK;
    }
    for (int i = 0; row->type == K_BACKEND && i < SPW_AIO_BACKEND_COUNT; i++) {
        if (strcmp(text, spw_aio_backend_name((spw_aio_backend)i)) == 0) {
            *(spw_aio_backend *)field = (spw_aio_backend)i;
            return SPW_OK;
        }
    }
    if (row->type == K_FORMAT && spw_state_parse(text, field))
        return SPW_OK;
    if (row->type == K_DTYPE && spw_dtype_parse(text, field))
        return SPW_OK;
    return spw__config_bad_value(r, row->key, row->help, v);
}

static spw_status
read_betas(const config_reader *r, const key_row *row, const json_t *v)
{
    for (size_t i = 0; i < 2; i++) {
        const json_t *b = json_array_get(v, i);
        double x = json_is_number(b) ? json_number_value(b) : -1;
        if (json_array_size(v) != 2 || !(x >= 0 && x < 1))
            return spw__config_bad_value(r, row->key, "two numbers in [0, 1)", v);
        *(i ? &r->out->optimizer.beta2 : &r->out->optimizer.beta1) = x;
    }
    return SPW_OK;
}

static spw_status
read_group(const config_reader *r, const key_row *row, const json_t *v, spw_param_group *g)
{
    const char *key, *match = json_string_value(json_object_get(v, "match"));
    json_t *member;
    if (!json_is_object(v) || match == NULL || match[0] == '\0' || strlen(match) >= sizeof g->match)
        return spw__config_bad_value(r, row->key, "an object with match, a name or glob of at most 95 bytes", v);
    *g = (spw_param_group){.lr = NAN, .weight_decay = NAN, .beta1 = NAN, .beta2 = NAN};
    snprintf(g->match, sizeof g->match, "%s", match);
    json_object_foreach((json_t *)(uintptr_t)v, key, member)
    {
        double x = json_is_number(member) ? json_number_value(member) : -1;
        if (strcmp(key, "match") == 0)
            continue;
        if (strcmp(key, "betas") == 0) {
            double b[2] = {-1, -1};
            for (size_t i = 0; i < 2 && json_array_size(member) == 2; i++)
                b[i] = json_is_number(json_array_get(member, i)) ? json_number_value(json_array_get(member, i)) : -1;
            if (!(b[0] >= 0 && b[0] < 1 && b[1] >= 0 && b[1] < 1))
                return spw__config_bad_value(r, row->key, "betas of two numbers in [0, 1)", v);
            g->beta1 = b[0];
            g->beta2 = b[1];
        } else if (strcmp(key, "lr") == 0 || strcmp(key, "weight_decay") == 0) {
            if (!(x >= 0 && x <= 1e6))
                return spw__config_bad_value(r, row->key, "lr and weight_decay from 0 to 1e6", v);
            *(key[0] == 'l' ? &g->lr : &g->weight_decay) = x;
        } else {
            return SPW_RAISE(r->err, SPW_ECONFIG,
                             "%s: %s: unknown member \"%s\"; match, lr, weight_decay and betas are", r->name, row->key,
                             key);
        }
    }
    return SPW_OK;
}

static spw_status
read_groups(const config_reader *r, const key_row *row, const json_t *v)
{
    spw_config *c = r->out;
    c->optimizer.group_count = 0;
    if (!json_is_array(v) || json_array_size(v) > SPW_PARAM_GROUPS_MAX)
        return spw__config_bad_value(r, row->key, "a list of at most 8 objects", v);
    for (size_t i = 0; i < json_array_size(v); i++)
        SPW_TRY(read_group(r, row, json_array_get(v, i), &c->optimizer.groups[c->optimizer.group_count++]));
    return SPW_OK;
}

static spw_status
read_globs(const config_reader *r, const key_row *row, const json_t *v, spw_glob_list *list)
{
    bool one = json_is_string(v);
    size_t count = one ? 1 : json_array_size(v);
    if ((!one && !json_is_array(v)) || count > SPW_GLOBS_MAX)
        return spw__config_bad_value(r, row->key, "a list of at most 16 names or globs", v);
    memset(list, 0, sizeof *list);
    for (size_t i = 0; i < count; i++) {
        const char *text = json_string_value(one ? v : json_array_get(v, i));
        if (text == NULL || text[0] == '\0' || strlen(text) >= sizeof list->item[0])
            return spw__config_bad_value(r, row->key, "a list of names or globs of at most 95 bytes", v);
        snprintf(list->item[list->count++], sizeof list->item[0], "%s", text);
    }
    return SPW_OK;
}

static bool
is_auto(const json_t *v)
{
    return json_is_string(v) && strcmp(json_string_value(v), "auto") == 0;
}

/*
 * Nothing in it switches anything on, however deep: {"enabled": false, "bits": 8}, what the groups of a technique of compression say
 * while what they share does not, tensor parallelism over one rank.
 */
static bool
is_off(const json_t *v)
{
    const json_t *ranks = json_object_get(v, "autotp_size");
    const char *name;
    json_t *member;
    if (!json_is_object(v))
        return json_is_null(v) || json_is_false(v) || (json_is_number(v) && json_number_value(v) == 0);
    if (json_is_false(json_object_get(v, "enabled")) || (json_is_number(ranks) && json_number_value(ranks) <= 1) ||
        json_is_false(json_object_get(json_object_get(v, "shared_parameters"), "enabled")))
        return true;
    json_object_foreach((json_t *)(uintptr_t)v, name, member)
    {
        if (!is_off(member))
            return false;
    }
    return true;
}

bool
spw__config_says_default(const key_row *row, const json_t *v)
{
    json_t *usual = row->fallback != NULL ? json_loads(row->fallback, JSON_DECODE_ANY, NULL) : NULL;
    bool same = is_auto(v) || json_equal(usual, v) ||
                (json_is_number(v) && json_is_number(usual) && json_number_value(v) == json_number_value(usual));
    json_decref(usual);
    return same;
}

static spw_status
read_unbuilt(const config_reader *r, const key_row *row, const json_t *v)
{
    json_t *inert = json_loads(row->fallback, JSON_DECODE_ANY, NULL);
    bool off = json_equal(inert, v) || json_is_null(v) || (json_is_false(v) && !json_is_number(inert)) ||
               (!json_is_object(inert) && is_auto(v)) || is_auto(json_object_get(v, "enabled")) ||
               (json_is_number(v) && json_is_number(inert) && json_number_value(v) == json_number_value(inert)) ||
               (json_is_object(v) && is_off(v));
    off = off ||
          (json_is_object(v) && json_object_get(inert, "enabled") != NULL && json_object_get(v, "enabled") == NULL);
    json_decref(inert);
    if (!off && strstr(r->remarks->unbuilt, r->name) != NULL)
        spw__config_remark(r->remarks->unbuilt, "%s (%s)", row->key, row->help);
    else if (!off)
        spw__config_remark(r->remarks->unbuilt, "%s: not supported yet: %s (%s)", r->name, row->key, row->help);
    return SPW_OK; /* refused when all of them are known */
}

static spw_status
read_deprecated(const config_reader *r, const key_row *row, const json_t *v)
{
    const char *name = spw__config_last_part(row->key);
    if (!json_is_boolean(v))
        return spw__config_bad_value(r, row->key, "true or false", v);
    spw_log(SPW_LOG_WARN, "%s: %s is deprecated; use %s", r->name, row->key, row->help);
    if (json_is_true(v) && strcmp(name, "cpu_offload") == 0)
        r->out->zero.offload_optimizer = SPW_TIER_HOST;
    else if (json_is_true(v) && strcmp(name, "cpu_offload_params") == 0)
        r->out->zero.offload_param = SPW_TIER_HOST;
    else if (strcmp(name, "cpu_offload_use_pin_memory") == 0)
        r->out->zero.pin_memory_optimizer = r->out->zero.pin_memory_param = json_is_true(v);
    return SPW_OK;
}

/* Where "auto" is an argument of transformers or accelerate, and the result or a tier hangs on it. bf16 and fp16 are looked at together, later. */
static bool
trainer_fills(const char *key)
{
    return strcmp(key, "gradient_clipping") == 0 || strncmp(key, "optimizer.params.", 17) == 0 ||
           strcmp(key, "zero_optimization.stage") == 0 || strcmp(spw__config_last_part(key), "device") == 0 ||
           (strncmp(key, "scheduler.params.", 17) == 0 && strcmp(key + 17, "total_num_steps") != 0);
}

/* A Trainer's argument, as it is by default; other defaults stand. */
static spw_status
read_auto(const config_reader *r, const key_row *row)
{
    const char *argument = spw__config_trainer_default(row->key);
    const char *stands = argument != NULL ? argument : spw__config_fallback(row, r->out->optimizer.type);
    if (stands != NULL && trainer_fills(row->key))
        spw__config_remark(r->remarks->autos, "%s %s", row->key, stands);
    return argument != NULL ? spw__config_set_default(r, row, argument) : SPW_OK;
}

spw_status
spw__config_set_default(const config_reader *r, const key_row *row, const char *fallback)
{
    json_t *v = json_loads(fallback, JSON_DECODE_ANY, NULL);
    spw_status st = spw__config_read_value(r, row, v);
    json_decref(v);
    return st;
}

spw_status
spw__config_read_value(const config_reader *r, const key_row *row, json_t *v)
{
    uint64_t n = 0, unkept = 0;
    void *field = row->offset == SPW_CONFIG_NOWHERE ? (char *)&unkept : (char *)r->out + row->offset;
    if (json_is_null(v))
        return SPW_OK; /* nothing was said */
    if (row->class == C_UNBUILT)
        return read_unbuilt(r, row, v);
    if (row->class == C_DEPRECATED)
        return read_deprecated(r, row, v);
    if (row->type == K_ANY)
        return SPW_OK;
    if (is_auto(v) && row->type != K_BYTES && row->type != K_TEXT && row->type != K_PATH && row->type != K_BACKEND &&
        row->type != K_PLACE)
        return read_auto(r, row);
    switch (row->type) {
    case K_BOOL:
        if (!json_is_boolean(v))
            return spw__config_bad_value(r, row->key, "true or false", v);
        *(bool *)field = json_is_true(v);
        return SPW_OK;
    case K_U64: return read_integer(r, row, v, field);
    case K_U32:
        SPW_TRY(read_integer(r, row, v, &n));
        *(uint32_t *)field = (uint32_t)n;
        return SPW_OK;
    case K_I32:
        SPW_TRY(read_integer(r, row, v, &n));
        *(int32_t *)field = (int32_t)(int64_t)n;
        return SPW_OK;
    case K_REAL: return read_number(r, row, v, field);
    case K_PATH:
    case K_TEXT: return read_text(r, row, v, row->size == 0 ? NULL : field);
    case K_BYTES: return read_bytes(r, row, v, field);
    case K_PATHS: return read_paths(r, row, v, field);
    case K_BETAS: return read_betas(r, row, v);
    case K_GROUPS: return read_groups(r, row, v);
    case K_GLOBS: return read_globs(r, row, v, field);
    default: return read_word(r, row, v, field);
    }
}
