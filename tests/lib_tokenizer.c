/* lib_tokenizer.c - see lib_tokenizer.h. */
#include "lib_tokenizer.h"
#include "spw_files.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

const char *const tok_names[TOK_NAMES] = {"gpt2", "llama3", "qwen2", "mixed", "llama2",  "mistral", "across",
                                          "bare", "gemma",  "o200k", "alone", "qwen3_5", "gemma4",  "kimi"};

char *
tok_read_file(const char *path, uint64_t *bytes)
{
    FILE *f = fopen(path, "rb");
    char *data;
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *bytes = (uint64_t)ftell(f);
    rewind(f);
    data = malloc(*bytes + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *bytes, f), *bytes);
    data[*bytes] = '\0';
    fclose(f);
    return data;
}

/* The one token before a text; -1: none. */
int32_t
tok_begin_of(const spw_tokenizer *t)
{
    spw_begin b = spw_tokenizer_begin(t);
    assert_true(b.count <= 1);
    return b.count == 1 ? b.ids[0] : -1;
}

void
tok_path_of(char path[300], const char *name)
{
    snprintf(path, 300, "tests/vectors/tok_%s.json", name);
    if (access(path, F_OK) != 0) /* a folder */
        snprintf(path, 300, "tests/vectors/tok_%s", name);
}

spw_tokenizer *
tok_open_named(const char *name)
{
    char path[300];
    spw_tokenizer *t;
    spw_error err = {0};
    tok_path_of(path, name);
    if (spw_tokenizer_open(&t, path, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return t;
}

void
tok_encode(const spw_tokenizer *t, const char *text, uint64_t bytes, bool special, spw_tokens *out)
{
    spw_error err = {0};
    out->count = 0;
    if (spw_tokenizer_encode(t, text, bytes, special, out, &err) != SPW_OK)
        fail_msg("%s", err.message);
}

uint64_t
tok_decode(const spw_tokenizer *t, const spw_tokens *ids, char **text)
{
    uint64_t bytes, again;
    assert_int_equal(spw_tokenizer_decode(t, ids->ids, ids->count, true, NULL, 0, &bytes, NULL), SPW_OK);
    *text = malloc(bytes + 1);
    assert_int_equal(spw_tokenizer_decode(t, ids->ids, ids->count, true, *text, bytes, &again, NULL), SPW_OK);
    assert_int_equal(bytes, again);
    return bytes;
}

void
tok_assert_same_ids(const char *what, uint64_t number, const spw_tokens *got, const spw_tokens *want)
{
    for (uint64_t i = 0; i < got->count && i < want->count; i++) {
        if (got->ids[i] != want->ids[i])
            fail_msg("%s, case %llu: token %llu is %d, not %d", what, (unsigned long long)number, (unsigned long long)i,
                     got->ids[i], want->ids[i]);
    }
    if (got->count != want->count)
        fail_msg("%s, case %llu: %llu tokens, not %llu", what, (unsigned long long)number,
                 (unsigned long long)got->count, (unsigned long long)want->count);
}

/* Sets what stands at "a.b.0.c" to a JSON value; "-" takes it out. */
void
tok_set_at(json_t *root, const char *where, const char *value)
{
    char path[200], *last = path, *dot;
    json_t *at = root, *v;
    json_error_t why;
    snprintf(path, sizeof path, "%s", where);
    while ((dot = strchr(last, '.')) != NULL) {
        *dot = '\0';
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(last)) : json_object_get(at, last);
        last = dot + 1;
    }
    assert_non_null(at);
    if (strcmp(value, "-") == 0) {
        assert_int_equal(json_object_del(at, last), 0);
        return;
    }
    v = json_loads(value, JSON_DECODE_ANY, &why);
    assert_non_null(v);
    if (json_is_array(at))
        assert_int_equal(json_array_set_new(at, (size_t)atoi(last), v), 0);
    else
        assert_int_equal(json_object_set_new(at, last, v), 0);
}

json_t *
tok_load_named(const char *name)
{
    char path[300];
    json_error_t why;
    json_t *root;
    snprintf(path, sizeof path, "tests/vectors/tok_%s.json", name);
    root = json_load_file(path, 0, &why);
    assert_non_null(root);
    return root;
}

void
tok_write_text(const char *dir, const char *name, const char *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(spw_file_write_text(path, text, NULL), SPW_OK);
}

void
tok_write_json(const char *dir, const char *name, const json_t *v)
{
    char *text = json_dumps(v, JSON_COMPACT);
    tok_write_text(dir, name, text);
    free(text);
}
