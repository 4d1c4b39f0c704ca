/*
 * Reading a configuration: JSON by jansson, with what --set changes of it; every leaf is looked up (config_names.c) in the table of
 * config_keys.c and read by its row (config_values.c). The checks that need more than one key are config_settle.c's.
 */
#include "config_internal.h"
#include "spw_files.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_BYTES = SPW_CONFIG_KEY_BYTES, TEXT_MAX = SPW_CONFIG_TEXT_BYTES };

/* r for what stands under key: messages name the file that says it. */
static config_reader
reader_of(const config_reader *r, const char *key, const json_t *v)
{
    config_reader at = *r;
    if (r->layers != NULL)
        at.name = spw__config_source(r->layers, r->name, key, v);
    return at;
}

static spw_status
not_a_section(const config_reader *r, const char *key, const json_t *v)
{
    static const struct {
        const char *key, *example;
    } known[] = {{"model", "{\"path\": \"FOLDER\"}"},
                 {"data", "{\"path\": \"FILE\"}"},
                 {"bf16", "{\"enabled\": true}"},
                 {"fp16", "{\"enabled\": true}"},
                 {"optimizer", "{\"type\": \"AdamW\"}"},
                 {"scheduler", "{\"type\": \"WarmupLR\"}"},
                 {"zero_optimization", "{\"stage\": 3}"},
                 {"zero_optimization.offload_param", "{\"device\": \"cpu\"}"},
                 {"zero_optimization.offload_optimizer", "{\"device\": \"cpu\"}"},
                 {"spillway.lora", "{\"rank\": 8}"}};
    char expected[80] = "an object";
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(known[i].key, key) == 0)
            snprintf(expected, sizeof expected, "an object such as %s", known[i].example);
    }
    return spw__config_bad_value(r, key, expected, v);
}

/* ---------------------------------------------------------------- the model section */

/* Its keys are Hugging Face's, by family (runtime/files/hf_keys.c); here they must all be known. */
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
            return spw__config_unknown_key(&at, key);
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
    char path[2 * SPW_PATH_BYTES];
    spw_status st;
    if (!json_is_object(m))
        return not_a_section(r, "model", m);
    if (json_object_get(m, "path") == NULL)
        return read_model(r, m);
    if (folder == NULL || folder[0] == '\0')
        return spw__config_bad_value(r, "model.path", "a folder with config.json", json_object_get(m, "path"));
    SPW_TRY(spw__config_path(path, r->name, "model.path", folder, r->err));
    (void)spw_hub_find(path, folder);
    if (json_object_size(m) > 1 || strlen(path) > 1000)
        return SPW_RAISE(
            r->err, SPW_ECONFIG,
            "%s: model.path stands alone, because the folder's config.json says the rest, and has at most 1000 bytes; "
            "--set 'model={\"path\":\"FOLDER\"}' takes the place of all of model",
            r->name);
    memcpy(r->out->model_path, path, strlen(path) + 1);
    st = spw_hf_config_load(&r->out->model, path, r->err);
    if (st != SPW_OK)
        spw_error_wrap(r->err, "%s: model.path", r->name);
    return st;
}

/* ---------------------------------------------------------------- the walk */

/* null is DeepSpeed's way to say nothing, and --set KEY=null ours to leave a key or a section out. */
static bool
says(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return v != NULL && !json_is_null(v);
}

/* Two spellings of one key, or a deprecated key beside its successor, would leave one of them ignored. */
static spw_status
check_said_once(const config_reader *r, const key_row *row, const char *name, const json_t *object)
{
    char successor[KEY_BYTES] = "";
    size_t prefix = (size_t)(spw__config_last_part(row->key) - row->key);
    if (row->alias != NULL && strcmp(name, row->alias) == 0 && says(object, spw__config_last_part(row->key)))
        return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s is given twice, once as %s", r->name, row->key, row->alias);
    if (row->class == C_DEPRECATED) {
        snprintf(successor, sizeof successor, "%.*s", (int)strcspn(row->help + prefix, "."), row->help + prefix);
        if (says(object, successor))
            return SPW_RAISE(r->err, SPW_ECONFIG, "%s: %s is deprecated and cannot stand beside %s", r->name, row->key,
                             row->help);
    }
    return SPW_OK;
}

/* Those that are of this type only: its parameters come later. */
static spw_status
set_optimizer_defaults(const config_reader *r)
{
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        const char *fallback = spw__config_fallback(row, r->out->optimizer.type);
        if (fallback != row->fallback)
            SPW_TRY(spw__config_set_default(r, row, fallback));
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
    SPW_TRY(spw__config_read_value(&at, row, v));
    if (strcmp(section->key, "optimizer") != 0)
        return SPW_OK;
    SPW_TRY(spw__config_check_optimizer(&at, r->out->optimizer.type));
    return set_optimizer_defaults(r);
}

static spw_status read_object(const config_reader *r, const char *prefix, json_t *object);

static spw_status
read_member(const config_reader *r, const char *prefix, json_t *object, const char *name, json_t *v)
{
    char key[KEY_BYTES];
    const key_row *row;
    config_reader at;
    snprintf(key, sizeof key, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", name);
    if (name[0] == '_') /* nobody's key begins like that: people write their comments so */
        return SPW_OK;
    row = spw__config_find_row(key);
    at = reader_of(r, key, v);
    if (row == NULL || strchr(name, '.') != NULL) /* a dotted name inside an object is nobody's key */
        return spw__config_unknown_key(&at, key);
    if (json_is_null(v))
        return SPW_OK;
    SPW_TRY(check_said_once(&at, row, name, object));
    if (row->class == C_INERT)
        spw_log(SPW_LOG_INFO, "%s: %s has no effect here: %s", at.name, row->key, row->help);
    if (row->class == C_INERT && !spw__config_says_default(row, v))
        spw__config_remark(r->remarks->inert, "%s", row->key);
    if (row->type != K_SECTION)
        return spw__config_read_value(&at, row, v);
    if (strcmp(key, "model") == 0)
        return read_model_section(r, v);
    if (strcmp(key, "zero_optimization") == 0 && json_is_boolean(v)) {
        spw_log(SPW_LOG_WARN, "%s: zero_optimization %s is deprecated; use zero_optimization.stage", at.name,
                json_is_true(v) ? "true" : "false");
        r->out->zero.stage = json_is_true(v);
        return SPW_OK;
    }
    if (!json_is_object(v))
        return not_a_section(&at, row->key, v);
    SPW_TRY(read_type(r, row, v)); /* of an unknown one the parameters are unknown too */
    return read_object(r, row->key, v);
}

static spw_status
read_object(const config_reader *r, const char *prefix, json_t *object)
{
    const char *name;
    json_t *v;
    json_object_foreach(object, name, v)
    {
        SPW_TRY(spw__config_note(r, read_member(r, prefix, object, name, v)));
    }
    return SPW_OK;
}

static spw_status
set_defaults(const config_reader *r)
{
    memset(r->out, 0, sizeof *r->out);
    r->out->scheduler.warmup_max_lr = r->out->scheduler.cycle_min_lr = r->out->scheduler.cycle_max_lr = NAN;
    r->out->scheduler.second_steps = r->out->scheduler.second_stairs = NAN;
    r->out->optimizer.muon_lr = r->out->optimizer.adam_lr = NAN;
    for (uint32_t i = 0; i < spw__config_row_count; i++) {
        const key_row *row = &spw__config_rows[i];
        if (row->fallback != NULL && row->offset != SPW_CONFIG_NOWHERE && row->class != C_UNBUILT)
            SPW_TRY(spw__config_set_default(r, row, row->fallback));
    }
    return SPW_OK;
}

/* Nothing else begins so: a path may begin with a bracket, of a glob. */
static bool
begins_json(const char *text)
{
    return text[0] == '{' || text[0] == '"' || (text[0] == '[' && (text[1] == '"' || text[1] == '{'));
}

/* "a.b=c": c is JSON, or else a text. Objects are made on the way; another spelling of the same key goes. */
static spw_status
apply_override(const config_reader *r, json_t *root, const char *text)
{
    const char *equals = strchr(text, '='), *at = text;
    json_t *value, *object = root;
    char part[KEY_BYTES], key[KEY_BYTES];
    json_error_t why;
    if (equals == NULL || equals == text)
        return SPW_RAISE(r->err, SPW_ECONFIG, "--set %s: expected key=value", text);
    value = json_loads(equals + 1, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &why);
    if (value == NULL && begins_json(equals + 1))
        return SPW_RAISE(r->err, SPW_ECONFIG, "--set %s: the value is no complete JSON: %s, at byte %d of it", text,
                         why.text, why.position);
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
    spw_error unheard = {0};
    config_reader r = {out, name, err != NULL ? err : &unheard, &layers, &said};
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
        st = spw__config_note(&r, SPW_RAISE(r.err, SPW_ECONFIG, "%s; --set KEY=null leaves one out", said.unbuilt));
    if (st == SPW_OK)
        st = spw__config_settle(&r, root);
    if (st == SPW_OK && said.inert[0] != '\0')
        spw_log(SPW_LOG_NOTE, "%s: these change nothing here, as spillway help config explains: %s", name, said.inert);
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
