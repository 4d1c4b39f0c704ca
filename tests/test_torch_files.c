/*
 * Files of torch.save are read as PyTorch reads them, and nothing else is taken for one: pickles, whole files and shards. Those in
 * tests/vectors/torch were written by it (make_foreign_vectors.py).
 */
#include "lib_tiny.h"
#include "pickle.h"
#include "spw_files.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { BYTES_MAX = 16384 };

static spw_error err;

static void
need(spw_status st)
{
    if (st != SPW_OK)
        fail_msg("%s", err.message);
}

/* ---------------------------------------------------------------- pickles */

static const spw__py *
parse(spw__pickle **p, const char *text, uint64_t bytes)
{
    need(spw__pickle_parse(p, text, bytes, "text", &err));
    return spw__pickle_root(*p);
}
#define PARSE(p, text) parse(p, text, sizeof(text) - 1)

static void
test_values(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
        int64_t is;
    } numbers[] = {{"\x80\x02K\xff.", 5, 255},
                   {"M\x01\x80.", 4, 32769},
                   {"J\xfe\xff\xff\xff.", 6, -2},
                   {"\x8a\x00.", 3, 0},
                   {"\x8a\x01\x80.", 4, -128},
                   {"\x8a\x02\x80\x00.", 5, 128},
                   {"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f.", 11, INT64_MAX},
                   {"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.", 12, INT64_MAX}, /* 2^63 */
                   {"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xff.", 12, INT64_MIN}, /* -2^64 */
                   {"\x88.", 2, 1}};
    spw__pickle *p;
    const spw__py *v;
    double x;
    int64_t n;
    char *text;
    json_t *o;
    (void)state;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        assert_true(spw__py_int(parse(&p, numbers[i].text, numbers[i].bytes), &n));
        assert_int_equal(n, numbers[i].is);
        spw__pickle_free(p);
    }
    assert_true(spw__py_real(PARSE(&p, "G\x3f\xf8\x00\x00\x00\x00\x00\x00."), &x) && x == 1.5);
    spw__pickle_free(p);
    /* {"a": [1, (2, None)], "b": "x"} in protocol 2, and the list once more, from the memo */
    v = PARSE(&p, "\x80\x02}q\x00(X\x01\x00\x00\x00\x61]q\x01("
                  "K\x01K\x02N\x86\x65X\x01\x00\x00\x00\x62X\x01\x00\x00\x00xX\x01\x00\x00\x00"
                  "ch\x01u.");
    o = spw__py_json(v);
    text = json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
    assert_string_equal(text, "{\"a\":[1,[2,null]],\"b\":\"x\",\"c\":[1,[2,null]]}");
    free(text);
    json_decref(o);
    assert_null(spw__py_get(v, "d"));
    assert_string_equal(spw__py_text(spw__py_get(v, "b")), "x");
    spw__pickle_free(p);
    /* Enum(3), and an object with a state: names in protocol 4 */
    v = PARSE(&p, "\x80\x04\x8c\x01m\x8c\x01\x45\x93\x94K\x03\x85R.");
    assert_true(spw__py_is(v, "m.E") && spw__py_int(v, &n) && n == 3);
    spw__pickle_free(p);
    v = PARSE(&p, "cm\nO\n)\x81}X\x01\x00\x00\x00sK\x07sb.");
    assert_true(spw__py_is(v, "m.O") && spw__py_int(spw__py_attribute(v, "s"), &n) && n == 7);
    assert_null(spw__py_attribute(v, "t"));
    spw__pickle_free(p);
    v = PARSE(&p, "}(X\x01\x00\x00\x00\x61K\x01X\x01\x00\x00\x00\x61K\x02u."); /* the last value of a key counts */
    assert_true(spw__py_int(spw__py_get(v, "a"), &n) && n == 2);
    spw__pickle_free(p);
    /* A list in itself, and 2^40 values in lists of lists: as JSON they end. */
    o = spw__py_json(PARSE(&p, "]q\x00h\x00\x61."));
    json_decref(o);
    spw__pickle_free(p);
    o = spw__py_json(PARSE(&p, "]q\x00(h\x00h\x00\x65."));
    json_decref(o);
    spw__pickle_free(p);
}

static void
test_broken_pickles(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
        const char *says;
    } cases[] = {{"", 0, "cut off at byte 0 of 0"},
                 {"N", 1, "cut off"},
                 {"X\x05\x00\x00\x00\x61.", 7, "cut off"},
                 {".", 1, "more than one value"},
                 {"NN.", 3, "more than one"},
                 {"(.", 2, "more than one value"},
                 {"s.", 2, "a value is missing"},
                 {"K\x01R.", 4, "is missing"},
                 {"e.", 2, "a mark is missing"},
                 {"}(K\x01u.", 6, "without a value"},
                 {"K\x01(K\x01u.", 7, "keys for what is no dict"},
                 {"K\x01(K\x01K\x02u.", 9, "keys for what is no dict"},
                 {"}K\x01\x61.", 5, "no list"},
                 {"h\x05.", 3, "memo that was not"},
                 {"Nr\xff\xff\xff\xff.", 7, "memo's number"},
                 {"cm\n", 3, "does not end"},
                 {"K\x01K\x02\x93.", 6, "no text"},
                 {"I5\n.", 4, "opcode 0x49"},
                 {"(0N(N.", 6, "more than one"}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        spw__pickle *p;
        err = (spw_error){0};
        if (spw__pickle_parse(&p, cases[i].text, cases[i].bytes, "text", &err) == SPW_OK ||
            strstr(err.message, cases[i].says) == NULL)
            fail_msg("case %zu: \"%s\" should hold \"%s\"", i, err.message, cases[i].says);
        assert_null(p);
    }
}

/* ---------------------------------------------------------------- files of torch.save */

/* The same tensors, by name: shapes, types and bytes. */
static void
same_tensors(const char *path, const char *want_path)
{
    spw_hf_reader *r, *want;
    need(spw_hf_reader_open(&want, want_path, &err));
    need(spw_hf_reader_open(&r, path, &err));
    assert_int_equal(spw_hf_reader_count(r), spw_hf_reader_count(want));
    for (uint32_t i = 0; i < spw_hf_reader_count(want); i++) {
        const spw_tensor_info *t = spw_hf_reader_tensor(want, i, NULL), *got = NULL;
        char a[BYTES_MAX], b[BYTES_MAX];
        uint32_t k = 0;
        while ((got = spw_hf_reader_tensor(r, k, NULL)) != NULL && strcmp(got->name, t->name) != 0)
            k++;
        if (got == NULL || got->dtype != t->dtype || got->ndim != t->ndim || got->bytes != t->bytes ||
            memcmp(got->shape, t->shape, t->ndim * sizeof *t->shape) != 0)
            fail_msg("%s: %s", path, t->name);
        need(spw_hf_read(want, i, 0, a, t->bytes, &err));
        need(spw_hf_read(r, k, 0, b, t->bytes, &err));
        if (memcmp(a, b, t->bytes) != 0)
            fail_msg("%s: %s differs", path, t->name);
    }
    spw_hf_reader_close(r);
    spw_hf_reader_close(want);
}

static void
test_torch(void **state)
{
    spw_config c;
    char text[300];
    (void)state;
    same_tensors("tests/vectors/torch/one", "tests/vectors/torch/expect");
    same_tensors("tests/vectors/torch/shards", "tests/vectors/torch/expect");
    same_tensors("tests/vectors/torch/one/pytorch_model.bin", "tests/vectors/torch/expect/model.safetensors");
    snprintf(text, sizeof text,
             "{\"model\":{\"path\":\"%s\"},\"data\":{\"path\":\"a\",\"tokenizer\":\"bytes\"},\"train_batch_size\":1,"
             "\"spillway\":{\"steps\":1}}",
             "tests/vectors/torch/shards");
    need(spw_config_parse(&c, text, "c.json", NULL, 0, &err));
    assert_string_equal(spw_config_start_folder(&c), "tests/vectors/torch/shards");
}

static void
test_torch_refused(void **state)
{
    static const struct {
        const char *file, *says;
    } cases[] = {{"transposed.bin", "a is a transposed or strided view"},
                 {"nested.bin", "holds no tensors by their names"},
                 {"complex.bin", "a is of a type that is not read"},
                 {"legacy.bin", "as PyTorch wrote before 1.6"}};
    char path[200];
    spw_hf_reader *r;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(path, sizeof path, "tests/vectors/torch/refused/%s", cases[i].file);
        err = (spw_error){0};
        if (spw_hf_reader_open(&r, path, &err) == SPW_OK || strstr(err.message, cases[i].says) == NULL ||
            strstr(err.message, cases[i].file) == NULL)
            fail_msg("%s: \"%s\" should hold \"%s\"", path, err.message, cases[i].says);
    }
    need(spw_hf_reader_open(&r, "tests/vectors/torch/refused/empty.bin",
                            &err)); /* a tensor of no rows; the rest is passed over */
    assert_int_equal(spw_hf_reader_count(r), 1);
    assert_int_equal(spw_hf_reader_tensor(r, 0, NULL)->bytes, 0);
    spw_hf_reader_close(r);
}

/* Cut off anywhere, or with any byte of its directory and pickle changed: read the same or refused, never anything else. */
static void
test_torch_damaged(void **state)
{
    char dir[256], path[300];
    uint64_t bytes, refused = 0, tried = 0;
    char *text = tiny_load("tests/vectors/torch/one/pytorch_model.bin", &bytes);
    spw_hf_reader *r;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/pytorch_model.bin", dir);
    for (uint64_t n = 0; n < bytes; n += n < 64 ? 1 : 61) {
        tiny_store(path, text, n);
        err = (spw_error){0};
        assert_int_not_equal(spw_hf_reader_open(&r, path, &err), SPW_OK);
        assert_non_null(strstr(err.message, path));
    }
    for (uint64_t at = 0; at < bytes; at += 7) {
        text[at] = (char)(text[at] ^ 0x15);
        tiny_store(path, text, bytes);
        tried++;
        if (spw_hf_reader_open(&r, path, &err) == SPW_OK)
            spw_hf_reader_close(r);
        else
            refused++;
        text[at] = (char)(text[at] ^ 0x15);
    }
    assert_true(refused > tried / 4); /* the pickle has a checksum, and is a third of the file */
    free(text);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_values), cmocka_unit_test(test_broken_pickles),
                                       cmocka_unit_test(test_torch), cmocka_unit_test(test_torch_refused),
                                       cmocka_unit_test(test_torch_damaged)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
