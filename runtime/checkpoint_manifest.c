/*
 * The manifest of a checkpoint, spillway.json: from a plain struct to text and back. Reading trusts nothing: a field that is
 * missing, of another type or out of range is an error that names file, field and value, because a guess in its place (step
 * 0, say) would train on as if nothing were wrong. Fields that it does not know are passed over.
 */
#include "checkpoint_internal.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

enum { MANIFEST_BYTES_MAX = 16 << 20, FORMAT = 2 /* 1: digests were XXH3 over those of blocks */ };

const char *const spw__digest_names[SPW_DIGEST_COUNT] = {SPW_MODEL_FILE, SPW_OPTIMIZER_FILE, SPW_ADAPTER_FILE};

/* ---------------------------------------------------------------- writing */

static json_t *
count_json(uint64_t n)
{
    return json_integer((json_int_t)n);
}

char *
spw__manifest_text(const spw_manifest *m)
{
    const spw_checkpoint_state *s = &m->state;
    json_t *root = json_object(), *digests = json_object();
    char *text;
    json_object_set_new(root, "format", json_integer(FORMAT));
    json_object_set_new(root, "spillway", json_string(SPW_VERSION));
    json_object_set_new(root, "step", count_json(s->step));
    json_object_set_new(root, "data_position", count_json(s->data_position));
    json_object_set_new(root, "updates", count_json(s->updates));
    json_object_set_new(root, "bytes_written", count_json(s->bytes_written));
    json_object_set_new(root, "tokens", json_real(s->tokens));
    for (int i = 0; i < SPW_DIGEST_COUNT; i++) {
        if (m->digests[i][0] != '\0')
            json_object_set_new(digests, spw__digest_names[i], json_string(m->digests[i]));
    }
    json_object_set_new(root, "digests", digests);
    if (m->base[0] != '\0')
        json_object_set_new(root, "base", json_pack("{s:s, s:s}", "path", m->base, "fingerprint", m->base_digest));
    json_object_set(root, "config", m->config);
    if (m->scaled)
        json_object_set_new(root, "loss_scale",
                            json_pack("{s:f, s:I, s:I, s:I}", "scale", m->scaler.scale, "hysteresis",
                                      (json_int_t)m->scaler.hysteresis, "steps", (json_int_t)m->scaler.steps,
                                      "last_overflow", (json_int_t)m->scaler.last_overflow));
    if (s->data.files > 0) {
        json_t *data =
            json_pack("{s:I, s:I, s:I, s:s}", "files", (json_int_t)s->data.files, "bytes", (json_int_t)s->data.bytes,
                      "tokens", (json_int_t)s->data.tokens, "formats", s->data.formats);
        if (s->data.encoder[0] != '\0')
            json_object_set_new(data, "encoder", json_string(s->data.encoder));
        if (s->data.held_out_known)
            json_object_set_new(data, "held_out", count_json(s->data.held_out));
        json_object_set_new(root, "data", data);
    }
    text = json_object_size(json_object_get(root, "config")) > 0 ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    return text;
}

/* ---------------------------------------------------------------- reading */

/* Keeps the first mistake: what is read after it does not matter. */
typedef struct reading {
    const char *file;
    spw_error *err;
    spw_status st;
} reading;

static void
wrong(reading *r, const char *field, const json_t *v, const char *expected)
{
    char *text = v != NULL ? json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    if (r->st == SPW_OK)
        r->st = SPW_RAISE(r->err, SPW_ECORRUPT, "%s: %s: expected %s, got %.60s", r->file, field, expected,
                          v == NULL      ? "nothing"
                          : text != NULL ? text
                                         : "something else");
    free(text);
}

/* "data" and "files" give "data.files" in messages. in NULL: nothing is there. */
static const json_t *
field(const json_t *in, const char *section, const char *key, char name[64])
{
    snprintf(name, 64, "%s%s%s", section, section[0] != '\0' ? "." : "", key);
    return json_object_get(in, key);
}

enum { REQUIRED = 1 };

static int64_t
integer(reading *r, const json_t *in, const char *section, const char *key, int64_t least, int flags)
{
    char name[64], expected[64];
    const json_t *v = field(in, section, key, name);
    if (v == NULL && flags != REQUIRED)
        return 0;
    if (json_is_integer(v) && json_integer_value(v) >= least)
        return json_integer_value(v);
    snprintf(expected, sizeof expected, "an integer of at least %lld", (long long)least);
    wrong(r, name, v, expected);
    return 0;
}

static double
number(reading *r, const json_t *in, const char *section, const char *key, bool above_zero, int flags)
{
    char name[64];
    const json_t *v = field(in, section, key, name);
    if (v == NULL && flags != REQUIRED)
        return 0;
    if (json_is_number(v) && (above_zero ? json_number_value(v) > 0 : json_number_value(v) >= 0))
        return json_number_value(v);
    wrong(r, name, v, above_zero ? "a number above 0" : "a number of at least 0");
    return 0;
}

static void
string(reading *r, const json_t *in, const char *section, const char *key, char *out, size_t bytes, int flags)
{
    char name[64], expected[64];
    const json_t *v = field(in, section, key, name);
    out[0] = '\0';
    if (v == NULL && flags != REQUIRED)
        return;
    if (json_is_string(v) && json_string_length(v) < bytes) {
        snprintf(out, bytes, "%s", json_string_value(v));
        return;
    }
    snprintf(expected, sizeof expected, "a text of less than %zu bytes", bytes);
    wrong(r, name, v, expected);
}

/* An object, or NULL. */
static const json_t *
object(reading *r, const json_t *in, const char *key, int flags)
{
    const json_t *v = json_object_get(in, key);
    if (!json_is_object(v) && (v != NULL || flags == REQUIRED)) {
        wrong(r, key, v, "an object");
        return NULL;
    }
    return v;
}

static void
check_digits(reading *r, const char *name, const json_t *v, const char digits[17])
{
    if (v != NULL && strspn(digits, "0123456789abcdef") != 16)
        wrong(r, name, v, "16 hexadecimal digits");
}

static void
read_base(reading *r, const json_t *in, spw_manifest *out)
{
    const json_t *base = object(r, in, "base", 0);
    if (base == NULL)
        return;
    string(r, base, "base", "path", out->base, sizeof out->base, REQUIRED);
    string(r, base, "base", "fingerprint", out->base_digest, sizeof out->base_digest, REQUIRED);
    check_digits(r, "base.fingerprint", json_object_get(base, "fingerprint"), out->base_digest);
    if (r->st == SPW_OK && out->base[0] != '/')
        wrong(r, "base.path", json_object_get(base, "path"), "a path from the root");
}

static void
read_digests(reading *r, const json_t *in, spw_manifest *out)
{
    const json_t *digests = object(r, in, "digests", REQUIRED);
    for (int i = 0; i < SPW_DIGEST_COUNT && digests != NULL; i++) {
        char name[64];
        const json_t *v = field(digests, "digests", spw__digest_names[i], name);
        string(r, digests, "digests", spw__digest_names[i], out->digests[i], sizeof out->digests[i],
               i == SPW_DIGEST_MODEL && out->base[0] == '\0' ? REQUIRED : 0);
        check_digits(r, name, v, out->digests[i]);
    }
}

static void
read_fields(reading *r, const json_t *root, spw_manifest *out)
{
    const json_t *data, *scale;
    spw_checkpoint_state *s = &out->state;
    json_int_t format = json_integer_value(json_object_get(root, "format"));
    if (!json_is_object(root) || format < 1 || format > FORMAT) {
        wrong(r, "format", json_object_get(root, "format"), "2 (a checkpoint of this version) or 1");
        return;
    }
    out->digests_known = format == FORMAT;
    s->step = (uint64_t)integer(r, root, "", "step", 0, REQUIRED);
    s->data_position = (uint64_t)integer(r, root, "", "data_position", 0, REQUIRED);
    s->updates = (uint64_t)integer(r, root, "", "updates", 0, REQUIRED);
    s->bytes_written = (uint64_t)integer(r, root, "", "bytes_written", 0, 0);
    s->tokens = number(r, root, "", "tokens", false, 0);
    read_base(r, root, out);
    read_digests(r, root, out);
    if ((data = object(r, root, "data", 0)) != NULL) {
        s->data.files = (uint64_t)integer(r, data, "data", "files", 1, REQUIRED);
        s->data.bytes = (uint64_t)integer(r, data, "data", "bytes", 0, REQUIRED);
        s->data.tokens = (uint64_t)integer(r, data, "data", "tokens", 0, REQUIRED);
        string(r, data, "data", "formats", s->data.formats, sizeof s->data.formats, REQUIRED);
        string(r, data, "data", "encoder", s->data.encoder, sizeof s->data.encoder, 0);
        s->data.held_out_known = json_object_get(data, "held_out") != NULL;
        s->data.held_out = (uint64_t)integer(r, data, "data", "held_out", 0, 0);
    }
    if ((scale = object(r, root, "loss_scale", 0)) != NULL) {
        out->scaled = true;
        out->scaler.scale = number(r, scale, "loss_scale", "scale", true, REQUIRED);
        out->scaler.hysteresis = (uint64_t)integer(r, scale, "loss_scale", "hysteresis", 1, REQUIRED);
        out->scaler.steps = integer(r, scale, "loss_scale", "steps", INT64_MIN, REQUIRED);
        out->scaler.last_overflow = integer(r, scale, "loss_scale", "last_overflow", INT64_MIN, REQUIRED);
    }
    out->config = json_incref(json_object_get(root, "config"));
    if (!json_is_object(out->config))
        wrong(r, "config", out->config, "an object");
}

spw_status
spw__manifest_parse(spw_manifest *out, const char *text, const char *file, spw_error *err)
{
    reading r = {file, err, SPW_OK};
    json_error_t where;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &where);
    memset(out, 0, sizeof *out);
    if (root == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s:%d:%d: %s", file, where.line, where.column, where.text);
    read_fields(&r, root, out);
    json_decref(root);
    if (r.st != SPW_OK)
        spw__manifest_free(out);
    return r.st;
}

spw_status
spw__manifest_read(spw_manifest *out, const char *path, spw_error *err)
{
    char file[SPW_PATH_BYTES + 64], *text = NULL;
    spw_status st;
    snprintf(file, sizeof file, "%.1000s/" SPW_MANIFEST_FILE, path);
    memset(out, 0, sizeof *out);
    SPW_TRY(spw_file_read_text(file, MANIFEST_BYTES_MAX, &text, err));
    st = spw__manifest_parse(out, text, file, err);
    spw_mem_free(text);
    return st;
}

bool
spw__manifest_there(const char *file)
{
    return access(file, F_OK) == 0 || errno == EACCES;
}

void
spw__manifest_free(spw_manifest *m)
{
    json_decref(m->config);
    m->config = NULL;
}

spw_status
spw__manifest_config(const spw_manifest *m, const char *file, spw_config *config, spw_error *err)
{
    const json_t *optimizer = json_object_get(m->config, "optimizer");
    const char *type = json_string_value(json_object_get(optimizer, "type"));
    const char *const l2[] = {"optimizer.type=\"Adam\""};
    /* A manifest says what was done: older versions did AdamW with adam_w_mode false, and that was Adam with L2. */
    bool was_l2 = type != NULL && strcasecmp(type, "AdamW") == 0 &&
                  json_is_false(json_object_get(json_object_get(optimizer, "params"), "adam_w_mode"));
    char *text = json_dumps(m->config, 0);
    spw_status st = text == NULL ? SPW_RAISE(err, SPW_ENOMEM, "checkpoint manifest")
                                 : spw_config_parse(config, text, file, l2, was_l2, err);
    free(text);
    return st;
}
