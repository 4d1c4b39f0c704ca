/*
 * Reading a configuration: JSON by jansson, every leaf looked up in the table of config_keys.c; the checks that need more
 * than one key are config_settle.c's. Errors name the file, the key and the value.
 */
#include "config_internal.h"
#include "runtime_internal.h"
#include "spw_files.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

enum { KEY_BYTES = SPW_CONFIG_KEY_BYTES, TEXT_MAX = SPW_CONFIG_TEXT_BYTES };

/* ---------------------------------------------------------------- looking keys up */

const char *
spw__config_last_part(const char *key)
{
    const char *dot = strrchr(key, '.');
    return dot == NULL ? key : dot + 1;
}

/* r for what stands under key: messages name the file that says it. */
static config_reader
reader_of(const config_reader *r, const char *key, const json_t *v)
{
    config_reader at = *r;
    if (r->layers != NULL)
        at.name = spw__config_source(r->layers, r->name, key, v);
    return at;
}

/* The same section, and the last part is the row's own or its alias. */
static bool
row_matches(const key_row *row, const char *key)
{
    size_t prefix = (size_t)(spw__config_last_part(row->key) - row->key);
    if (strcmp(row->key, key) == 0)
        return true;
    return row->alias != NULL && strncmp(row->key, key, prefix) == 0 && strcmp(row->alias, key + prefix) == 0;
}

const key_row *
spw__config_find_row(const char *key)
{
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        if (row_matches(&spw__config_rows[i], key))
            return &spw__config_rows[i];
    }
    return NULL;
}

unsigned
spw__name_distance(const char *a, const char *b)
{
    unsigned row[65], n = (unsigned)strlen(b);
    if (n > 64 || strlen(a) > 64)
        return 1000;
    for (unsigned j = 0; j <= n; j++)
        row[j] = j;
    for (unsigned i = 1; a[i - 1] != '\0'; i++) {
        unsigned diagonal = row[0];
        row[0] = i;
        for (unsigned j = 1; j <= n; j++) {
            unsigned best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[n];
}

/* The row's key, or with its alias as the last part. */
static const char *
row_spelling(const key_row *row, bool alias, char *buf)
{
    size_t prefix = (size_t)(spw__config_last_part(row->key) - row->key);
    snprintf(buf, KEY_BYTES, "%.*s%s", (int)(alias ? prefix : KEY_BYTES - 1), row->key, alias ? row->alias : "");
    return buf;
}

/* What an unknown key may have meant: the same name in another section, or else a key a few letters away. */
typedef struct guess {
    char near[KEY_BYTES], elsewhere[KEY_BYTES];
    unsigned near_distance, elsewhere_distance;
} guess;

static void
consider(guess *g, const char *key, const char *candidate)
{
    unsigned d = spw__name_distance(key, candidate);
    if (strcmp(spw__config_last_part(candidate), spw__config_last_part(key)) == 0 && d < g->elsewhere_distance) {
        g->elsewhere_distance = d;
        snprintf(g->elsewhere, sizeof g->elsewhere, "%s", candidate);
    }
    if (d < g->near_distance && 3 * d <= strlen(key)) {
        g->near_distance = d;
        snprintf(g->near, sizeof g->near, "%s", candidate);
    }
}

static void
consider_model_keys(guess *g, const char *key)
{
    char candidate[KEY_BYTES];
    for (uint32_t i = 0; spw_hf_config_key(i) != NULL; i++) {
        snprintf(candidate, sizeof candidate, "model.%s", spw_hf_config_key(i));
        consider(g, key, candidate);
    }
    consider(g, key, "model.path");
}

static spw_status
unknown_key(const config_reader *r, const char *key)
{
    /* What other programs call it. */
    static const struct {
        const char *name, *key;
    } meant[] = {{"max_grad_norm", "gradient_clipping"},
                 {"learning_rate", "optimizer.params.lr"},
                 {"opt_level", "fp16.enabled"},
                 {"cos_min_lr", "scheduler.params.cos_min_ratio"},
                 {"warmup_steps", "scheduler.params.warmup_num_steps"},
                 {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
                 {"train_micro_batch_size", "train_micro_batch_size_per_gpu"},
                 {"max_steps", "spillway.steps"},
                 {"num_train_epochs", "spillway.steps"},
                 {"epochs", "spillway.steps"},
                 {"output_dir", "spillway.checkpoint_dir"},
                 {"save_steps", "spillway.checkpoint_interval"},
                 {"save_total_limit", "spillway.keep_last"},
                 {"eval_steps", "spillway.eval_interval"},
                 {"gradient_checkpointing", "spillway.recompute"},
                 {"r", "spillway.lora.rank"},
                 {"lora_alpha", "spillway.lora.alpha"},
                 {"lora_dropout", "spillway.lora.dropout"},
                 {"target_modules", "spillway.lora.targets"},
                 {"model_name_or_path", "model.path"},
                 {"train_file", "data.path"},
                 {"files", "data.path"},
                 {"chat_template", "data.chat"},
                 {"seqlen", "data.seq_length"},
                 {"max_seq_length", "data.seq_length"},
                 {"max_length", "data.seq_length"}};
    guess g = {.near_distance = 4, .elsewhere_distance = UINT32_MAX};
    char candidate[KEY_BYTES];
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        consider(&g, key, row_spelling(&spw__config_rows[i], false, candidate));
        if (spw__config_rows[i].alias != NULL)
            consider(&g, key, row_spelling(&spw__config_rows[i], true, candidate));
    }
    consider_model_keys(&g, key);
    for (size_t i = 0; i < sizeof meant / sizeof meant[0]; i++) {
        if (strcmp(spw__config_last_part(key), meant[i].name) == 0) {
            snprintf(g.near, sizeof g.near, "%s", meant[i].key);
            g.elsewhere[0] = '\0';
        }
    }
    if (g.elsewhere[0] != '\0') {
        int section = (int)(spw__config_last_part(g.elsewhere) - g.elsewhere);
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: unknown key \"%s\"; \"%s\" belongs in %.*s; did you mean \"%s\"?",
                         r->name, key, spw__config_last_part(key), section > 0 ? section - 1 : 13,
                         section > 0 ? g.elsewhere : "the top level", g.elsewhere);
    }
    if (g.near[0] != '\0')
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: unknown key \"%s\"; did you mean \"%s\"?", r->name, key, g.near);
    return SPW_RAISE(r->err, SPW_ECONFIG, "%s: unknown key \"%s\"; spillway help config lists all keys", r->name, key);
}

/* ---------------------------------------------------------------- values */

static spw_status
bad_value(const config_reader *r, const char *key, const char *expected, const json_t *v)
{
    /* By jansson's json_type; true, false and null name themselves. */
    static const char *const kinds[] = {"object", "list", "string", "integer", "number", "", "", ""};
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
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
        return bad_value(r, row->key, "integer", v);
    snprintf(expected, sizeof expected, "integer in [%.10g, %.10g]", row->min, row->max);
    if (x != floor(x) || x < row->min || x > row->max)
        return bad_value(r, row->key, expected, v);
    *out = json_is_integer(v) ? (uint64_t)json_integer_value(v) : x < 0 ? (uint64_t)(int64_t)x : (uint64_t)x;
    return SPW_OK;
}

static spw_status
read_number(const config_reader *r, const key_row *row, const json_t *v, double *out)
{
    char expected[100];
    double x = json_is_number(v) ? json_number_value(v) : 0;
    if (!json_is_number(v))
        return bad_value(r, row->key, "number", v);
    snprintf(expected, sizeof expected, "number in [%.10g, %.10g]", row->min, row->max);
    if (!(x >= row->min && x <= row->max))
        return bad_value(r, row->key, expected, v);
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
               : bad_value(r, row->key, "bytes (a number, or a text such as \"256MiB\") of at least 4096, or \"auto\"",
                           v);
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
                return bad_value(r, key, "number above 0 and up to 1e+09", v);
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

static spw_status
add_path(const config_reader *r, const key_row *row, spw_path_list *list, json_t *v)
{
    const char *text = json_string_value(json_is_object(v) ? json_object_get(v, "path") : v);
    uint32_t i = list->count;
    if (text == NULL || text[0] == '\0')
        return bad_value(r, row->key, "a path or a list of paths", v);
    if (list->count == SPW_PATHS_MAX || strlen(text) >= SPW_PATH_BYTES)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s: at most %d paths of %d bytes", r->name, row->key, SPW_PATHS_MAX,
                         SPW_PATH_BYTES - 1);
    if (json_is_object(v))
        SPW_TRY(read_path_members(r, row, v, text, &list->weight[i], &list->bytes[i]));
    snprintf(list->item[i], SPW_PATH_BYTES, "%s", text);
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
    return list->count > 0 ? SPW_OK : bad_value(r, row->key, "at least one path", v);
}

static spw_status
read_text(const config_reader *r, const key_row *row, const json_t *v, char *out)
{
    const char *text = json_string_value(v), *at = row->choices;
    size_t n;
    if (text == NULL)
        return bad_value(r, row->key, "string", v);
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

static spw_status
read_word(const config_reader *r, const key_row *row, const json_t *v, void *field)
{
    const char *text = json_string_value(v) != NULL ? json_string_value(v) : "";
    static const char *const tiers[] = {"none", "cpu", "nvme"};
    static const spw_tier tier_values[] = {SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_TIER_NVME};
    for (int i = 0; row->type == K_TIER && i < 3; i++) {
        if (strcmp(text, tiers[i]) == 0) {
            *(spw_tier *)field = tier_values[i];
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
    for (int i = 0; row->type == K_DTYPE && i < SPW_DTYPE_COUNT; i++) {
        if (strcmp(text, spw_dtype_name((spw_dtype)i)) == 0) {
            *(spw_dtype *)field = (spw_dtype)i;
            return SPW_OK;
        }
    }
    return bad_value(r, row->key, row->help, v);
}

static spw_status
read_betas(const config_reader *r, const key_row *row, const json_t *v)
{
    for (size_t i = 0; i < 2; i++) {
        const json_t *b = json_array_get(v, i);
        double x = json_is_number(b) ? json_number_value(b) : -1;
        if (json_array_size(v) != 2 || !(x >= 0 && x < 1))
            return bad_value(r, row->key, "two numbers in [0, 1)", v);
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
        return bad_value(r, row->key, "an object with match, a name or glob of at most 95 bytes", v);
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
                return bad_value(r, row->key, "betas of two numbers in [0, 1)", v);
            g->beta1 = b[0];
            g->beta2 = b[1];
        } else if (strcmp(key, "lr") == 0 || strcmp(key, "weight_decay") == 0) {
            if (!(x >= 0 && x <= 1e6))
                return bad_value(r, row->key, "lr and weight_decay from 0 to 1e6", v);
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
        return bad_value(r, row->key, "a list of at most 8 objects", v);
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
        return bad_value(r, row->key, "a list of at most 16 names or globs", v);
    memset(list, 0, sizeof *list);
    for (size_t i = 0; i < count; i++) {
        const char *text = json_string_value(one ? v : json_array_get(v, i));
        if (text == NULL || text[0] == '\0' || strlen(text) >= sizeof list->item[0])
            return bad_value(r, row->key, "a list of names or globs of at most 95 bytes", v);
        snprintf(list->item[list->count++], sizeof list->item[0], "%s", text);
    }
    return SPW_OK;
}

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

static bool
is_auto(const json_t *v)
{
    return json_is_string(v) && strcmp(json_string_value(v), "auto") == 0;
}

static spw_status
read_unbuilt(const config_reader *r, const key_row *row, const json_t *v)
{
    json_t *inert = json_loads(row->fallback, JSON_DECODE_ANY, NULL);
    bool off = json_equal(inert, v) || json_is_null(v) || (json_is_false(v) && !json_is_number(inert)) ||
               (!json_is_object(inert) && is_auto(v)) || is_auto(json_object_get(v, "enabled")) ||
               (json_is_number(v) && json_is_number(inert) && json_number_value(v) == json_number_value(inert)) ||
               (json_is_object(v) && (json_object_size(v) == 0 || json_is_false(json_object_get(v, "enabled"))));
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
        return bad_value(r, row->key, "true or false", v);
    spw_log(SPW_LOG_WARN, "%s: %s is deprecated; use %s", r->name, row->key, row->help);
    if (json_is_true(v) && strcmp(name, "cpu_offload") == 0)
        r->out->zero.offload_optimizer = SPW_TIER_HOST;
    else if (json_is_true(v) && strcmp(name, "cpu_offload_params") == 0)
        r->out->zero.offload_param = SPW_TIER_HOST;
    else if (strcmp(name, "cpu_offload_use_pin_memory") == 0)
        r->out->zero.pin_memory_optimizer = r->out->zero.pin_memory_param = json_is_true(v);
    return SPW_OK;
}

/* Where "auto" is transformers' own argument, and the result hangs on it. bf16 and fp16 are looked at together, later. */
static bool
trainer_fills(const char *key)
{
    return strcmp(key, "gradient_clipping") == 0 || strncmp(key, "optimizer.params.", 17) == 0 ||
           (strncmp(key, "scheduler.params.", 17) == 0 && strcmp(key + 17, "total_num_steps") != 0);
}

static spw_status
read_value(const config_reader *r, const key_row *row, json_t *v)
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
    if (is_auto(v) && row->type != K_BYTES && row->type != K_TEXT && row->type != K_BACKEND && row->type != K_PLACE) {
        if (row->fallback != NULL && trainer_fills(row->key))
            spw__config_remark(r->remarks->autos, "%s %s", row->key, row->fallback);
        return SPW_OK; /* the default stands */
    }
    switch (row->type) {
    case K_BOOL:
        if (!json_is_boolean(v))
            return bad_value(r, row->key, "true or false", v);
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
    case K_TEXT: return read_text(r, row, v, row->size == 0 ? NULL : field);
    case K_BYTES: return read_bytes(r, row, v, field);
    case K_PATHS: return read_paths(r, row, v, field);
    case K_BETAS: return read_betas(r, row, v);
    case K_GROUPS: return read_groups(r, row, v);
    case K_GLOBS: return read_globs(r, row, v, field);
    default: return read_word(r, row, v, field);
    }
}

/* ---------------------------------------------------------------- the model section */

/* Its keys are Hugging Face's, by family (runtime/files/hf.c); here they must all be known. */
static spw_status
read_model(const config_reader *r, json_t *m)
{
    const char *type = json_string_value(json_object_get(m, "model_type")), *name;
    spw_family family;
    spw_status st;
    json_t *v;
    char *text;
    json_object_foreach(m, name, v)
    {
        if (name[0] != '_' && type != NULL && spw_family_parse(type, &family) && !spw_hf_config_has_key(family, name)) {
            char key[KEY_BYTES];
            config_reader at;
            snprintf(key, sizeof key, "model.%s", name);
            at = reader_of(r, key, v);
            return unknown_key(&at, key);
        }
    }
    text = json_dumps(m, JSON_COMPACT);
    st = text == NULL ? SPW_RAISE(r->err, SPW_ENOMEM, "%s: model", r->name)
                      : spw_hf_config_parse(&r->out->model, text, r->name, true, r->err);
    free(text);
    return st;
}

static spw_status
read_model_section(const config_reader *r, json_t *m)
{
    const char *folder = json_string_value(json_object_get(m, "path"));
    if (!json_is_object(m))
        return bad_value(r, "model", "an object", m);
    if (json_object_get(m, "path") == NULL)
        return read_model(r, m);
    if (folder == NULL || folder[0] == '\0')
        return bad_value(r, "model.path", "a folder with config.json", json_object_get(m, "path"));
    if (json_object_size(m) > 1 || strlen(folder) > 1000)
        return SPW_RAISE(
            r->err, SPW_ECONFIG,
            "%s: model.path stands alone and has at most 1000 bytes: the folder's config.json says the rest", r->name);
    snprintf(r->out->model_path, sizeof r->out->model_path, "%s", folder);
    return spw_hf_config_load(&r->out->model, folder, r->err);
}

/* ---------------------------------------------------------------- the walk */

/* Two spellings of one key, or a deprecated key beside its successor, would leave one of them ignored. */
static spw_status
check_said_once(const config_reader *r, const key_row *row, const json_t *object)
{
    char successor[KEY_BYTES] = "";
    size_t prefix = (size_t)(spw__config_last_part(row->key) - row->key);
    if (row->alias != NULL && json_object_get(object, row->alias) != NULL &&
        json_object_get(object, spw__config_last_part(row->key)) != NULL)
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s is given twice, once as %s", r->name, row->key, row->alias);
    if (row->class == C_DEPRECATED) {
        snprintf(successor, sizeof successor, "%.*s", (int)strcspn(row->help + prefix, "."), row->help + prefix);
        if (json_object_get(object, successor) != NULL)
            return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s is deprecated and cannot stand beside %s", r->name, row->key,
                             row->help);
    }
    return SPW_OK;
}

/* An optimizer or schedule that is not built is refused by its name, not by the first parameter that only it has. */
static spw_status
read_type(const config_reader *r, const key_row *section, json_t *object)
{
    char key[KEY_BYTES];
    json_t *v = json_object_get(object, "type");
    const key_row *row;
    config_reader at;
    snprintf(key, sizeof key, "%s.type", section->key);
    row = spw__config_find_row(key);
    if (row == NULL || v == NULL)
        return SPW_OK;
    at = reader_of(r, key, v);
    SPW_TRY(read_value(&at, row, v));
    return strcmp(section->key, "optimizer") == 0 ? spw__config_check_optimizer(&at, r->out->optimizer.type) : SPW_OK;
}

static spw_status
read_object(const config_reader *r, const char *prefix, json_t *object)
{
    const char *name;
    json_t *v;
    json_object_foreach(object, name, v)
    {
        char key[KEY_BYTES];
        const key_row *row;
        config_reader at;
        snprintf(key, sizeof key, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", name);
        if (name[0] == '_') /* nobody's key begins like that: people write their comments so */
            continue;
        row = spw__config_find_row(key);
        at = reader_of(r, key, v);
        if (row == NULL || strchr(name, '.') != NULL) /* a dotted name inside an object is nobody's key */
            return unknown_key(&at, key);
        SPW_TRY(check_said_once(&at, row, object));
        if (row->class == C_INERT)
            spw_log(SPW_LOG_INFO, "%s: %s has no effect here: %s", at.name, row->key, row->help);
        if (row->type != K_SECTION) {
            SPW_TRY(read_value(&at, row, v));
        } else if (strcmp(key, "model") == 0) {
            SPW_TRY(read_model_section(r, v));
        } else if (strcmp(key, "zero_optimization") == 0 && json_is_boolean(v)) {
            spw_log(SPW_LOG_WARN, "%s: zero_optimization %s is deprecated; use zero_optimization.stage", at.name,
                    json_is_true(v) ? "true" : "false");
            r->out->zero.stage = json_is_true(v);
        } else if (!json_is_object(v)) {
            return bad_value(&at, key, "an object", v);
        } else {
            SPW_TRY(read_type(r, row, v));
            SPW_TRY(read_object(r, row->key, v));
        }
    }
    return SPW_OK;
}

static spw_status
set_defaults(const config_reader *r)
{
    memset(r->out, 0, sizeof *r->out);
    r->out->scheduler.warmup_max_lr = r->out->scheduler.cycle_min_lr = r->out->scheduler.cycle_max_lr = NAN;
    r->out->scheduler.second_steps = r->out->scheduler.second_stairs = NAN;
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        json_t *v;
        spw_status st;
        if (row->fallback == NULL || row->offset == SPW_CONFIG_NOWHERE || row->class == C_UNBUILT)
            continue;
        v = json_loads(row->fallback, JSON_DECODE_ANY, NULL);
        st = read_value(r, row, v);
        json_decref(v);
        SPW_TRY(st);
    }
    return SPW_OK;
}

/* "a.b=c": c is JSON, or else a text. Objects are made on the way; another spelling of the same key goes. */
static spw_status
apply_override(const config_reader *r, json_t *root, const char *text)
{
    const char *equals = strchr(text, '='), *at = text;
    json_t *value, *object = root;
    char part[KEY_BYTES], key[KEY_BYTES];
    if (equals == NULL || equals == text)
        return SPW_RAISE(r->err, SPW_ECONFIG, "--set %s: expected key=value", text);
    value = json_loads(equals + 1, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    if (value == NULL)
        value = json_string(equals + 1);
    for (;;) {
        size_t n = strcspn(at, ".=");
        if (n == 0 || n >= sizeof part || value == NULL) {
            json_decref(value);
            return SPW_RAISE(r->err, SPW_ECONFIG,
                             "--set %s: the key has an empty or overlong part, or the value is not UTF-8", text);
        }
        memcpy(part, at, n);
        part[n] = '\0';
        if (at[n] == '=')
            break;
        if (!json_is_object(json_object_get(object, part)))
            json_object_set_new(object, part, json_object());
        object = json_object_get(object, part);
        at += n + 1;
    }
    snprintf(key, sizeof key, "%.*s", (int)(equals - text), text);
    if (spw__config_other_spelling(key, part) != NULL)
        (void)json_object_del(object, spw__config_other_spelling(key, part));
    if (value != NULL && json_object_set_new(object, part, value) != 0)
        return SPW_RAISE(r->err, SPW_ENOMEM, "--set %s", text);
    return SPW_OK;
}

spw_status
spw_config_parse(spw_config *out, const char *json_text, const char *name, const char *const *overrides,
                 uint32_t override_count, spw_error *err)
{
    config_layers layers = {.count = 0};
    config_remarks said = {.unbuilt = ""};
    config_reader r = {out, name, err, &layers, &said};
    json_t *root;
    spw_status st = spw__config_json(&root, json_text, name, err);
    for (int included = 0; included < 2 && st == SPW_OK; included++) { /* which files, then what stands above them */
        for (uint32_t i = 0; i < override_count && st == SPW_OK; i++) {
            bool which = strncmp(overrides[i], "include", 7) == 0 && (overrides[i][7] == '=' || overrides[i][7] == '.');
            if (which == (included == 0))
                st = apply_override(&r, root, overrides[i]);
        }
        if (st == SPW_OK && included == 0)
            st = spw__config_include(&root, name, &layers, err);
    }
    if (st == SPW_OK)
        st = set_defaults(&r);
    if (st == SPW_OK)
        st = read_object(&r, "", root);
    if (st == SPW_OK && said.unbuilt[0] != '\0')
        st = SPW_RAISE(err, SPW_ECONFIG, "%s", said.unbuilt);
    if (st == SPW_OK)
        st = spw__config_settle(&r, root);
    json_decref(root);
    spw__config_layers_deinit(&layers);
    return st;
}

spw_status
spw_config_load(spw_config *out, const char *path, const char *const *overrides, uint32_t override_count,
                spw_error *err)
{
    char *text;
    spw_status st;
    SPW_TRY(spw_file_read_text(path, TEXT_MAX, &text, err));
    st = spw_config_parse(out, text, path, overrides, override_count, err);
    spw_mem_free(text);
    return st;
}

/* ---------------------------------------------------------------- printing */

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
    static const char *const tiers[] = {"none", "cpu", "nvme"};
    switch (row->type) {
    case K_BOOL: return json_boolean(*(const bool *)field);
    case K_U64:
        return *(const uint64_t *)field == 0 && row->min > 0 ? NULL
                                                             : json_integer((json_int_t) * (const uint64_t *)field);
    case K_U32: return json_integer((json_int_t) * (const uint32_t *)field);
    case K_I32: return json_integer(*(const int32_t *)field);
    case K_REAL: return isnan(*(const double *)field) ? NULL : json_real(*(const double *)field);
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
    case K_TIER: return json_string(tiers[*(const spw_tier *)field]);
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
        if (strncmp(row->key, "scheduler.params.", 17) == 0 &&
            !spw__config_scheduler_takes(c->scheduler.type, row->key + 17)) {
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
    static const char *const types[] = {[K_SECTION] = "section", [K_BOOL] = "bool",         [K_U64] = "int",
                                        [K_U32] = "int",         [K_REAL] = "number",       [K_TEXT] = "text",
                                        [K_BYTES] = "bytes",     [K_PATHS] = "paths",       [K_TIER] = "enum",
                                        [K_PLACE] = "enum",      [K_FORMAT] = "enum",       [K_DTYPE] = "enum",
                                        [K_BACKEND] = "enum",    [K_BETAS] = "two numbers", [K_GROUPS] = "list",
                                        [K_GLOBS] = "globs",     [K_ANY] = "any",           [K_I32] = "int"};
    static const char *const classes[] = {"", " [no effect here]", " [not supported yet]",
                                          " [deprecated: use it instead]"};
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        char text[500], also[100] = "", range[80] = "";
        if (row->alias != NULL)
            snprintf(also, sizeof also, " (also %s)", row->alias);
        if (row->class != C_UNBUILT && row->max > 0 &&
            (row->type == K_U64 || row->type == K_U32 || row->type == K_I32 || row->type == K_REAL))
            snprintf(range, sizeof range, " in [%.4g, %.4g]", row->min, row->max);
        snprintf(text, sizeof text, "  %s%s: %s%s = %s  %s%s", row->key, also, types[row->type], range,
                 row->type == K_SECTION  ? "{...}"
                 : row->fallback != NULL ? row->fallback
                                         : "(none)",
                 row->help, classes[row->class]);
        line(ctx, text);
    }
}
