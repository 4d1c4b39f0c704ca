/* safetensors and small files: round trips, every rule of the format, faults, and nothing left behind. */
#include "lib_tiny.h"
#include "spw_files.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

static const spw_tensor_info tensors[] = {
    {.name = "b.half", .dtype = SPW_BF16, .ndim = 1, .shape = {7}},
    {.name = "a.matrix", .dtype = SPW_F32, .ndim = 2, .shape = {3, 5}},
    {.name = "scalar", .dtype = SPW_F32, .ndim = 0},
    {.name = "nothing", .dtype = SPW_F32, .ndim = 2, .shape = {0, 4}},
};

/* Ranges written in any order come back; the wide tensors lie first; commit leaves one file, destroy without commit none. */
static void
test_round_trip(void **state)
{
    char dir[256], path[300];
    float matrix[15], back[15];
    uint16_t half[7] = {1, 2, 3, 4, 5, 6, 7}, half_back[7];
    spw_st_writer *w = NULL;
    spw_st_reader *r = NULL;
    const spw_tensor_info *t;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/x.safetensors", dir);
    for (int i = 0; i < 15; i++)
        matrix[i] = (float)i;
    assert_int_equal(spw_st_writer_create(&w, path, tensors, 4, &err), SPW_OK);
    spw_st_writer_destroy(w);
    assert_int_equal(tiny_dir_entries(dir), 0);
    assert_int_equal(spw_st_writer_create(&w, path, tensors, 4, &err), SPW_OK);
    assert_int_equal(spw_st_write(w, 1, 20, matrix + 5, 40, &err), SPW_OK);
    assert_int_equal(spw_st_write(w, 0, 0, half, 14, &err), SPW_OK);
    assert_int_equal(spw_st_write(w, 1, 0, matrix, 20, &err), SPW_OK);
    assert_int_equal(spw_st_write(w, 2, 0, matrix + 3, 4, &err), SPW_OK);
    assert_int_equal(spw_st_write(w, 1, 40, matrix, 24, &err), SPW_EINVAL);
    assert_int_equal(spw_st_writer_commit(w, &err), SPW_OK);
    spw_st_writer_destroy(w);
    assert_int_equal(tiny_dir_entries(dir), 1);
    assert_int_equal(spw_st_reader_open(&r, path, &err), SPW_OK);
    assert_int_equal(spw_st_reader_count(r), 4);
    t = spw_st_reader_find(r, "a.matrix");
    assert_true(t != NULL && t->begin == 0 && t->ndim == 2 && t->shape[1] == 5);
    assert_int_equal(spw_st_read(r, t, 0, back, 60, &err), SPW_OK);
    assert_memory_equal(matrix, back, 60);
    assert_int_equal(spw_st_read(r, spw_st_reader_find(r, "b.half"), 0, half_back, 14, &err), SPW_OK);
    assert_memory_equal(half, half_back, 14);
    assert_null(spw_st_reader_find(r, "c"));
    assert_int_equal(spw_st_read(r, t, 56, back, 8, &err), SPW_EINVAL);
    spw_st_reader_close(r);
    tiny_dir_remove(dir);
}

/* Two writers' sums make the CRC of the file that they wrote together, and say what is missing before. */
static void
test_sums(void **state)
{
    enum { BYTES = 1 << 20 };
    static float block[BYTES / 4];
    static unsigned char file[3 * BYTES];
    const spw_tensor_info large[] = {{.name = "a", .dtype = SPW_F32, .ndim = 1, .shape = {BYTES / 4}},
                                     {.name = "b", .dtype = SPW_BF16, .ndim = 1, .shape = {BYTES / 4}}};
    char dir[256], path[300];
    uint64_t bytes, parts;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    for (int i = 0; i < BYTES / 4; i++)
        block[i] = (float)(i * 7919 % 10007);
    for (int mistake = 0; mistake < 2; mistake++) {
        spw_st_writer *first, *second;
        spw_st_sum a, b;
        FILE *f;
        assert_int_equal(spw_st_writer_create(&first, path, large, 2, NULL), SPW_OK);
        assert_int_equal(spw_st_writer_join(&second, spw_st_writer_temporary(first), large, 2, NULL), SPW_OK);
        bytes = spw_st_writer_file_bytes(first);
        assert_int_equal(spw_st_writer_sum(first).bytes, bytes - BYTES * 3 / 2); /* the header */
        assert_int_equal(spw_st_writer_sum(second).bytes, 0);
        assert_int_equal(spw_st_write(second, 0, 300004, block + 75001, BYTES - 300004, NULL), SPW_OK);
        assert_int_equal(spw_st_write(first, 1, 0, block, 1002, NULL), SPW_OK);
        assert_int_equal(spw_st_write(second, 1, 1002, (char *)block + 1002, BYTES / 2 - 1002, NULL), SPW_OK);
        a = spw_st_writer_sum(first), b = spw_st_writer_sum(second);
        assert_int_equal(a.bytes + b.bytes, bytes - 300004);
        assert_int_equal(spw_st_write(first, 0, 0, block, 300004, NULL), SPW_OK);
        a = spw_st_writer_sum(first);
        assert_int_equal(a.bytes + b.bytes, bytes);
        assert_int_equal(spw_st_writer_commit(second, NULL), SPW_OK);
        assert_int_equal(spw_st_writer_commit(first, NULL), SPW_OK);
        spw_st_writer_destroy(first);
        spw_st_writer_destroy(second);
        f = fopen(path, "r");
        assert_non_null(f);
        assert_int_equal(fread(file, 1, sizeof file, f), bytes);
        fclose(f);
        file[bytes / 2] ^= mistake == 0 ? 0 : 1;
        parts = spw_crc64_part(file, bytes, 0);
        assert_true((spw_crc64_whole(a.parts ^ b.parts, bytes) == spw_crc64_whole(parts, bytes)) == (mistake == 0));
    }
    tiny_dir_remove(dir);
}

/* A file of 60000 tensors, as the optimizer's of a model with experts: each is found by name, in far less than a scan takes. */
static void
test_many_tensors(void **state)
{
    enum { COUNT = 60000 };
    spw_tensor_info *many = spw_mem_calloc(COUNT, sizeof *many);
    spw_error err = {0};
    spw_st_writer *w;
    spw_st_reader *r;
    char dir[256], path[300];
    uint64_t cpu_ns;
    (void)state;
    assert_non_null(many);
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/many", dir);
    for (uint32_t i = 0; i < COUNT; i++) {
        many[i].dtype = i % 2 ? SPW_F32 : SPW_BF16;
        many[i].ndim = 1;
        many[i].shape[0] = 1 + i % 3;
        snprintf(many[i].name, sizeof many[i].name, "model.layers.%u.experts.%u.m", i % 90, i / 90);
    }
    assert_int_equal(spw_st_writer_create(&w, path, many, COUNT, &err), SPW_OK);
    assert_int_equal(spw_st_writer_commit(w, &err), SPW_OK);
    spw_st_writer_destroy(w);
    assert_int_equal(spw_st_reader_open(&r, path, &err), SPW_OK);
    assert_int_equal(spw_st_reader_count(r), COUNT);
    cpu_ns = spw_process_cpu_ns();
    for (uint32_t i = 0; i < COUNT; i++) {
        const spw_tensor_info *t = spw_st_reader_find(r, many[i].name);
        char other[80];
        assert_non_null(t);
        assert_string_equal(t->name, many[i].name);
        assert_true(t->dtype == many[i].dtype && t->shape[0] == many[i].shape[0]);
        snprintf(other, sizeof other, "%.60s2", many[i].name);
        assert_null(spw_st_reader_find(r, other));
    }
    assert_true(spw_process_cpu_ns() - cpu_ns < 2000000000);
    assert_null(spw_st_reader_find(r, ""));
    assert_null(spw_st_reader_find(r, "zzz"));
    spw_st_reader_close(r);
    spw_mem_free(many);
    tiny_dir_remove(dir);
}

/* Headers that break a rule are refused, with the file and the field in the message; odd but legal ones are read. */
static void
test_headers(void **state)
{
    static const struct {
        const char *header;
        int data_bytes;
        const char *says; /* NULL: legal */
    } cases[] = {
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, NULL},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ", 8, NULL},
        {"{\"b\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[8,10]},\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
         "\"data_offsets\":[0,8]}}",
         10, NULL},
        {"{\"__metadata__\":{\"format\":\"pt\"}}", 0, NULL},
        {" {}", 0, "'{'"},
        {"{\"a\":", 0, "header"},
        {"{\"a\":1,\"a\":2}", 0, "header"},
        {"{\"__metadata__\":{\"x\":1}}", 0, "__metadata__"},
        {"{\"a\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, NULL},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]}}", 3, NULL},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "a.shape"},
        {"{\"a\":{\"dtype\":\"BOOL\",\"shape\":[8],\"data_offsets\":[0,7]}}", 7, "a.shape"},
        {"{\"a\":{\"dtype\":\"I65\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "a.dtype is I65"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "a.dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8, "a.shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "a.shape[0]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,8]}}", 8, "a.shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "a.data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "a.data_offsets begins at 4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],"
         "\"data_offsets\":[4,12]}}",
         12, "b.data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7, "truncated"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9,
         "the file has 9: more was written behind"},
    };
    char dir[256], path[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/h", dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint64_t n = strlen(cases[i].header);
        FILE *f = fopen(path, "wb");
        spw_st_reader *r = NULL;
        spw_error err = {0};
        spw_status st;
        assert_non_null(f);
        fwrite(&n, 8, 1, f);
        fwrite(cases[i].header, 1, n, f);
        for (int k = 0; k < cases[i].data_bytes; k++)
            fputc(0, f);
        fclose(f);
        st = spw_st_reader_open(&r, path, &err);
        if (cases[i].says == NULL
                ? st != SPW_OK
                : st != SPW_ECORRUPT || strstr(err.message, cases[i].says) == NULL || strstr(err.message, path) == NULL)
            fail_msg("%s: %s: %s", cases[i].header, spw_status_name(st), err.message);
        spw_st_reader_close(r);
    }
    {
        uint64_t n = 1000;
        FILE *f = fopen(path, "wb");
        spw_st_reader *r = NULL;
        spw_error err = {0};
        assert_non_null(f);
        fwrite(&n, 8, 1, f);
        fclose(f);
        assert_int_equal(spw_st_reader_open(&r, path, &err), SPW_ECORRUPT);
        assert_non_null(strstr(err.message, "header length is 1000"));
        assert_int_equal(truncate(path, 3), 0);
        assert_int_equal(spw_st_reader_open(&r, path, &err), SPW_ECORRUPT);
        assert_non_null(strstr(err.message, "not copied or fetched whole"));
        assert_int_equal(spw_st_reader_open(&r, "/nowhere/x", &err), SPW_ENOENT);
    }
    tiny_dir_remove(dir);
}

/* Each allocation of writer and reader may fail: SPW_ENOMEM, no object and no file is left. */
static void
test_allocation_failures(void **state)
{
    char dir[256], path[300];
    bool through = false;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    for (unsigned k = 1; !through; k++) {
        long live = spw_test_live_allocs();
        spw_st_writer *w = NULL;
        spw_status st;
        spw_test_fail_alloc(k);
        st = spw_st_writer_create(&w, path, tensors, 4, NULL);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        if (through)
            assert_int_equal(spw_st_writer_commit(w, NULL), SPW_OK);
        spw_st_writer_destroy(w);
        assert_int_equal(spw_test_live_allocs(), live);
        assert_int_equal(tiny_dir_entries(dir), through ? 1 : 0);
    }
    through = false;
    for (unsigned k = 1; !through; k++) {
        long live = spw_test_live_allocs();
        spw_st_reader *r = NULL;
        spw_status st;
        spw_test_fail_alloc(k);
        st = spw_st_reader_open(&r, path, NULL);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        spw_st_reader_close(r);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    tiny_dir_remove(dir);
}

/* Text files replace each other whole; folders are made with parents and removed with what is below. */
static void
test_paths(void **state)
{
    char dir[256], path[400], *text = NULL;
    spw_error err = {0};
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/a/b/c", dir);
    assert_int_equal(spw_dir_make(path, &err), SPW_OK);
    assert_int_equal(spw_dir_make(path, &err), SPW_OK);
    snprintf(path, sizeof path, "%s/a/b/c/t", dir);
    assert_int_equal(spw_file_write_text(path, "one", &err), SPW_OK);
    assert_int_equal(spw_file_write_text(path, "two", &err), SPW_OK);
    assert_int_equal(spw_file_read_text(path, 100, &text, &err), SPW_OK);
    assert_string_equal(text, "two");
    spw_mem_free(text);
    assert_int_equal(spw_file_read_text(path, 2, &text, &err), SPW_EINVAL);
    for (int marks = 0; marks < 3; marks++) { /* the mark of UTF-8 is no text, and there is one at most */
        static const char *const written[] = {"\xef\xbb\xbfone", "\xef\xbb\xbf", "\xef\xbbone"};
        static const char *const found[] = {"one", "", "\xef\xbbone"};
        assert_int_equal(spw_file_write_text(path, written[marks], &err), SPW_OK);
        assert_int_equal(spw_file_read_text(path, 100, &text, &err), SPW_OK);
        assert_string_equal(text, found[marks]);
        spw_mem_free(text);
    }
    f = fopen(path, "wb");
    assert_non_null(f);
    fwrite("one\ntwo\0three", 1, 13, f); /* a zero byte would end it */
    fclose(f);
    assert_int_equal(spw_file_read_text(path, 100, &text, &err), SPW_ECORRUPT);
    assert_null(text);
    assert_non_null(strstr(err.message, "/c/t, line 2: a zero byte, at byte 7"));
    assert_int_equal(spw_dir_make(path, &err), SPW_EINVAL);
    snprintf(path, sizeof path, "%s/a", dir);
    assert_int_equal(spw_dir_remove(path, &err), SPW_OK);
    assert_int_equal(tiny_dir_entries(dir), 0);
    assert_int_equal(spw_dir_remove(path, &err), SPW_ENOENT);
    tiny_dir_remove(dir);
}

/* Bytes at an offset: all of them, or an error that says where the file ends or which read failed, the first or a later one. */
static void
test_read_at(void **state)
{
    char dir[256], path[300], text[] = "0123456789", got[8] = "";
    spw_error err = {0};
    int fd;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/ten", dir);
    assert_int_equal(spw_file_write_text(path, text, &err), SPW_OK);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(spw_file_read_at(fd, path, got, 6, 4, &err), SPW_OK);
    assert_string_equal(got, "456789");
    assert_int_equal(spw_file_read_at(fd, path, got, 0, 100, &err), SPW_OK);
    assert_int_equal(spw_file_read_at(fd, path, got, 7, 4, &err), SPW_ECORRUPT); /* a short read, and then none */
    assert_non_null(strstr(err.message, "ten ends at byte 10, 7 bytes at 4 are needed"));
    assert_int_equal(spw_file_read_at(fd, path, got, 7, 4, NULL), SPW_ECORRUPT);
    assert_int_equal(spw_file_read_at(fd, path, got, 7, 50, &err),
                     SPW_ECORRUPT); /* behind the end, as when it was cut off */
    assert_non_null(strstr(err.message, "ten ends at byte 10, 7 bytes at 50 are needed"));
    for (unsigned k = 1; k <= 3; k++) {
        spw_status st;
        memset(&err, 0, sizeof err);
        spw_test_fail_call(k);
        st = spw_file_read_at(fd, path, got, 7, 4, &err);
        assert_true(spw_test_call_fired() == (k <= 2));
        spw_test_fail_call(0);
        assert_int_equal(st, k <= 2 ? SPW_EIO : SPW_ECORRUPT);
        assert_non_null(strstr(err.message, k == 1 ? "ten at byte 4" : k == 2 ? "ten at byte 10" : "ends at byte 10"));
        assert_non_null(strstr(err.message, k <= 2 ? strerror(EIO) : "needed"));
    }
    close(fd);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_many_tensors),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_read_at),
    };
    return cmocka_run_group_tests_name("files", tests, NULL, NULL);
}
