/*
 * The cache of measured rates: a JSON file of this user's, {"spillway_rates": 1, "entries": {KEY: {"time": UNIX SECONDS,
 * "values": [...]}}}. A key says all that a value depends on (calibrate.c makes it). It can always be measured again, so
 * nothing here is an error: a damaged file counts as empty, one that cannot be written is not kept.
 */
#include "runtime_internal.h"
#include "spw_files.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SCHEMA = 1, MAX_AGE_S = 30 * 86400 };

struct rate_cache {
    json_t *root, *entries;
    bool changed;
    char folder[SPW_PATH_BYTES - 32], path[SPW_PATH_BYTES];
};

const char *
spw__rate_cache_path(const rate_cache *c)
{
    return c->path;
}

static void
load(rate_cache *c)
{
    json_error_t error;
    json_t *root;
    if (c->path[0] == '\0' || access(c->path, F_OK) != 0)
        return;
    root = json_load_file(c->path, 0, &error);
    if (json_is_object(root) && json_integer_value(json_object_get(root, "spillway_rates")) == SCHEMA &&
        json_is_object(json_object_get(root, "entries"))) {
        json_decref(c->root);
        c->root = root;
        c->entries = json_object_get(root, "entries");
        return;
    }
    spw_log(SPW_LOG_WARN, "%s holds no rates that can be read (%s): they are measured again", c->path,
            root == NULL ? error.text : "other contents");
    json_decref(root);
}

rate_cache *
spw__rate_cache_open(void)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    rate_cache *c = spw_mem_zalloc(sizeof *c);
    int n = 0;
    if (c == NULL)
        return NULL;
    if (xdg != NULL && xdg[0] == '/') /* the specification ignores relative ones */
        n = snprintf(c->folder, sizeof c->folder, "%s/spillway", xdg);
    else if (home != NULL && home[0] == '/')
        n = snprintf(c->folder, sizeof c->folder, "%s/.cache/spillway", home);
    if (n > 0 && (size_t)n < sizeof c->folder)
        snprintf(c->path, sizeof c->path, "%s/rates.json", c->folder);
    c->root = json_pack("{s:i, s:{}}", "spillway_rates", SCHEMA, "entries");
    c->entries = json_object_get(c->root, "entries");
    load(c);
    return c;
}

bool
spw__rate_cache_get(const rate_cache *c, const char *key, int64_t now_s, double *values, uint32_t count,
                    double *age_days)
{
    const json_t *entry = json_object_get(c->entries, key), *list = json_object_get(entry, "values");
    int64_t age = now_s - json_integer_value(json_object_get(entry, "time"));
    if (!json_is_array(list) || json_array_size(list) != count || age > MAX_AGE_S || age < 0)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        values[i] = json_number_value(json_array_get(list, i));
        if (!(values[i] > 0) || !isfinite(values[i]))
            return false;
    }
    *age_days = (double)age / 86400;
    return true;
}

void
spw__rate_cache_put(rate_cache *c, const char *key, int64_t now_s, const double *values, uint32_t count)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, json_real(values[i]));
    json_object_set_new(c->entries, key, json_pack("{s:I, s:o}", "time", (json_int_t)now_s, "values", list));
    c->changed = true;
}

static void
save(const rate_cache *c)
{
    char partial[SPW_PATH_BYTES + 40];
    spw_error err = {0};
    snprintf(partial, sizeof partial, "%s.%ld.partial", c->path, (long)getpid());
    if (spw_dir_make(c->folder, &err) != SPW_OK) {
        spw_log(SPW_LOG_INFO, "rates are not kept: %s", err.message);
        return;
    }
    if (json_dump_file(c->root, partial, JSON_INDENT(1) | JSON_SORT_KEYS) != 0 || rename(partial, c->path) != 0) {
        spw_log(SPW_LOG_INFO, "rates are not kept: write %s: %s", c->path, strerror(errno));
        (void)unlink(partial);
    }
}

void
spw__rate_cache_close(rate_cache *c)
{
    if (c == NULL)
        return;
    if (c->changed && c->path[0] != '\0')
        save(c);
    json_decref(c->root);
    spw_mem_free(c);
}
