/*
 * The key "include": files merged below a configuration, so that a program (a tuner) can write its findings into a file of
 * its own. Objects merge member by member; everything else, lists too, is taken whole from the file that wins: the
 * including file, then the last of the included ones. An alias is the same key. Included files include nothing themselves.
 * The files stay at hand until the configuration is read, for messages to name the right one.
 */
#include "config_internal.h"
#include "spw_files.h"
#include <stdio.h>

const char *
spw__config_other_spelling(const char *key, const char *name)
{
    const key_row *row = strchr(name, '.') == NULL ? spw__config_find_row(key) : NULL;
    if (row == NULL || row->alias == NULL)
        return NULL;
    return strcmp(row->alias, name) == 0 ? spw__config_last_part(row->key) : row->alias;
}

/* What above says replaces what below says; -1: no memory. */
static int
overlay(json_t *below, json_t *above, const char *prefix)
{
    const char *name;
    json_t *v;
    int rc = 0;
    json_object_foreach(above, name, v)
    {
        char key[SPW_CONFIG_KEY_BYTES];
        const char *other;
        json_t *held = json_object_get(below, name);
        snprintf(key, sizeof key, "%s%s%s", prefix, prefix[0] != '\0' ? "." : "", name);
        if ((other = spw__config_other_spelling(key, name)) != NULL && json_object_get(above, other) == NULL)
            (void)json_object_del(below, other);
        rc |= json_is_object(held) && json_is_object(v) ? overlay(held, v, key)
                                                        : json_object_set_new(below, name, json_deep_copy(v));
    }
    return rc;
}

/* Relative paths start at the folder of the including file. */
static spw_status
find_file(const char *name, const json_t *v, char path[2 * SPW_PATH_BYTES], spw_error *err)
{
    const char *text = json_string_value(v), *slash = strrchr(name, '/');
    char file[2 * SPW_PATH_BYTES];
    if (text == NULL || text[0] == '\0')
        return SPW_RAISE(err, SPW_ECONFIG, "%s: include: expected a path or a list of paths", name);
    SPW_TRY(spw__config_path(file, name, "include", text, err));
    if (file[0] == '/')
        slash = NULL;
    if (strlen(file) >= SPW_PATH_BYTES || (slash != NULL && slash - name >= SPW_PATH_BYTES))
        return SPW_RAISE(err, SPW_ECONFIG, "%s: include: a path is longer than %d bytes", name, SPW_PATH_BYTES - 1);
    snprintf(path, 2 * SPW_PATH_BYTES, "%.*s%s%s", slash != NULL ? (int)(slash - name) : 0, name,
             slash != NULL ? "/" : "", file);
    return SPW_OK;
}

static spw_status
add_layer(config_layers *l, const char *name, json_t *root, spw_error *err)
{
    l->layer[l->count].root = root;
    l->layer[l->count].name = spw_mem_strdup(name);
    return l->layer[l->count++].name != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "including %s", name);
}

static spw_status
read_file(config_layers *l, const char *name, const char *path, spw_error *err)
{
    json_t *root = NULL;
    char *text;
    spw_status st = spw_file_read_text(path, SPW_CONFIG_TEXT_BYTES, &text, err);
    if (st == SPW_OK) {
        st = spw__config_json(&root, text, path, err);
        spw_mem_free(text);
    }
    if (st != SPW_OK) {
        spw_error_wrap(err, "%s: include", name);
        return st;
    }
    SPW_TRY(add_layer(l, path, root, err)); /* owns root from here, error or not */
    if (json_object_get(root, "include") != NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "%s: include: not in a file that is itself included, here by %s", path,
                         name);
    return SPW_OK;
}

spw_status
spw__config_include(json_t **root, const char *name, config_layers *layers, spw_error *err)
{
    json_t *files = json_object_get(*root, "include"), *merged;
    uint32_t count = json_is_array(files) ? (uint32_t)json_array_size(files) : 1;
    int rc = 0;
    if (files == NULL || json_is_null(files))
        return SPW_OK;
    if (count > SPW_PATHS_MAX)
        return SPW_RAISE(err, SPW_ECONFIG, "%s: include: at most %d files", name, SPW_PATHS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        char path[2 * SPW_PATH_BYTES];
        SPW_TRY(find_file(name, json_is_array(files) ? json_array_get(files, i) : files, path, err));
        SPW_TRY(read_file(layers, name, path, err));
    }
    (void)json_object_del(*root, "include");
    SPW_TRY(add_layer(layers, name, json_incref(*root), err));
    merged = json_object();
    for (uint32_t i = 0; i < layers->count; i++)
        rc |= overlay(merged, layers->layer[i].root, "");
    if (rc != 0) {
        json_decref(merged);
        return SPW_RAISE(err, SPW_ENOMEM, "%s: merging %u included files", name, count);
    }
    json_decref(*root);
    *root = merged;
    return SPW_OK;
}

const char *
spw__config_source(const config_layers *layers, const char *name, const char *key, const json_t *v)
{
    for (uint32_t i = layers->count; i-- > 0;) {
        const json_t *held = layers->layer[i].root;
        char part[SPW_CONFIG_KEY_BYTES];
        for (const char *at = key; held != NULL; at += strcspn(at, ".") + 1) {
            size_t n = strcspn(at, ".");
            snprintf(part, sizeof part, "%.*s", (int)n, at);
            held = json_object_get(held, part);
            if (at[n] == '\0')
                break;
        }
        if (held != NULL && json_equal(held, v))
            return layers->layer[i].name;
    }
    return name;
}

void
spw__config_layers_deinit(config_layers *layers)
{
    for (uint32_t i = 0; i < layers->count; i++) {
        spw_mem_free(layers->layer[i].name);
        json_decref(layers->layer[i].root);
    }
    layers->count = 0;
}
