/* llm.c's checkpoints: matrices that are read as the transpose of what is stored, and files that are damaged, missing or of another run. */
#include "files_internal.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static spw_error err;

/* ---------------------------------------------------------------- spans */

enum { FILES = 3, PIECE = 700, ELEMS = 2 * PIECE * FILES };

/* Numbers in files, and the same in memory in the order of the span's stretches. */
static void
make_span(const char *dir, spw__span **span, uint8_t all[ELEMS])
{
    char path[300];
    uint32_t files[FILES];
    DONE(spw__span_create(span, &err));
    for (uint32_t f = 0; f < FILES; f++) {
        uint8_t bytes[2 * PIECE];
        FILE *out;
        snprintf(path, sizeof path, "%s/%u", dir, f);
        out = fopen(path, "wb");
        assert_non_null(out);
        for (uint32_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)(rand() >> 8);
        memcpy(all + (size_t)f * PIECE, bytes, PIECE);
        memcpy(all + (size_t)(FILES + f) * PIECE, bytes + PIECE, PIECE);
        assert_int_equal(fwrite(bytes, 1, sizeof bytes, out), sizeof bytes);
        assert_int_equal(fclose(out), 0);
        DONE(spw__span_open(*span, path, &files[f], &err));
    }
    for (uint32_t i = 0; i < 2 * FILES; i++)
        DONE(spw__span_add(*span, files[i % FILES], i / FILES * PIECE, PIECE, &err));
}

/* Any stretch of a matrix whose transpose lies across files, read at once and by runs, beside one that was turned in memory. */
static void
test_turned(void **state)
{
    char dir[256];
    uint8_t all[ELEMS], want[ELEMS], got[ELEMS];
    spw_bounce *bounce;
    char *buffer;
    (void)state;
    tiny_dir_make(dir);
    DONE(spw_bounce_create(&bounce, 1, &err));
    buffer = spw__bounce_take(bounce);
    srand(7);
    for (int run = 0; run < 200; run++) {
        const uint32_t size = run % 2 == 0 ? 4 : 2;
        const uint64_t rows = (uint64_t)rand() % 40 + 1, cols = (uint64_t)rand() % 25 + 1, elems = rows * cols;
        const uint64_t source = (uint64_t)rand() % (ELEMS - elems * size + 1);
        spw__span *span;
        uint64_t base;
        spw_st_extent extent;
        make_span(dir, &span, all);
        if (run % 3 == 0) /* with something behind it, too */
            DONE(spw__span_add_turned(span, 0, 3, 5, 2, &err));
        base = spw__span_bytes(span);
        DONE(spw__span_add_turned(span, source, rows, cols, size, &err));
        assert_int_equal(spw__span_bytes(span), base + elems * size);
        if (run % 3 == 1)
            DONE(spw__span_add(span, 0, 0, 64, &err));
        if (run % 5 == 0)
            spw__span_past_cache(span);
        assert_false(spw__span_extent(span, base, elems * size, &extent));
        for (uint64_t r = 0; r < rows; r++) {
            for (uint64_t c = 0; c < cols; c++)
                memcpy(want + (r * cols + c) * size, all + source + (c * rows + r) * size, size);
        }
        for (int k = 0; k < 20; k++) {
            uint64_t first = k == 0 ? 0 : (uint64_t)rand() % elems;
            uint64_t count = k == 0 ? elems : (uint64_t)rand() % (elems - first) + 1, bytes = count * size, done = 0;
            char *data;
            memset(got, 0xa5, sizeof got);
            DONE(spw__span_read(span, got, bytes, base + first * size, &err));
            assert_memory_equal(got, want + first * size, bytes);
            assert_int_equal(got[bytes], 0xa5);
            for (uint64_t n; done < bytes; done += n) {
                n = bytes - done;
                DONE(spw__span_read_run(span, buffer, base + first * size + done, &n, &data, &err));
                assert_memory_equal(data, want + first * size + done, n);
            }
        }
        spw__span_release(span);
    }
    spw__bounce_give(bounce, buffer);
    spw_bounce_destroy(bounce);
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- what is found, and what is refused */

static char dir[256];

static void
copy(const char *kind)
{
    char command[600];
    snprintf(command, sizeof command, "rm -rf %s/* && cp tests/vectors/llmc/%s/*0* %s", dir, kind, dir);
    assert_int_equal(system(command), 0);
}

/* Sets an int32 of a file, or its size where at is -1 (by so many bytes more). */
static void
change(const char *name, int at, int32_t to)
{
    char path[400];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, at < 0 ? 0 : 4L * at, at < 0 ? SEEK_END : SEEK_SET), 0);
    if (at >= 0)
        assert_int_equal(fwrite(&to, sizeof to, 1, f), 1);
    else
        assert_int_equal(ftruncate(fileno(f), ftell(f) + to), 0);
    assert_int_equal(fclose(f), 0);
}

static void
refused(const char *what, spw_status st, const char *says)
{
    char found[400];
    spw_foreign *d = NULL;
    snprintf(found, sizeof found, "%s/model_00000004.bin", dir);
    err = (spw_error){0};
    if (spw_foreign_open(&d, found, &err) != st || strstr(err.message, says) == NULL)
        fail_msg("%s: \"%s\" should hold \"%s\"", what, err.message, says);
}

#define STATE_0 "state_00000004_00000.bin"
#define STATE_1 "state_00000004_00001.bin"

static void
test_refused(void **state)
{
    static const struct {
        const char *kind, *file;
        int at;
        int32_t to;
        const char *says;
    } cases[] = {
        {"parts", STATE_0, 0, 7, STATE_0 ": magic number at offset 0 is 7, it must be 20240527"},
        {"parts", STATE_0, 1, 2, "version at offset 4 is 2, it must be 1"},
        {"parts", STATE_0, 2, 0, "number of ranks at offset 8 is 0, outside [1, 65536]"},
        {"parts", STATE_0, 2, 70000, "number of ranks at offset 8 is 70000"},
        {"parts", STATE_0, 2, 3, "which are neither those of the whole state"},
        {"parts", STATE_0, 2, 4, "which are neither those of the whole state"},
        {"parts", STATE_1, 2, 3, STATE_1 ": number of ranks at offset 8 is 3, it must be 2"},
        {"parts", STATE_0, 3, 1, "rank at offset 12 is 1, it must be 0"},
        {"parts", STATE_1, 3, 0, "rank at offset 12 is 0, it must be 1"},
        {"parts", STATE_1, 4, 0, STATE_1 ": masters and shuffling at offsets 16 and 20 are not those of rank 0"},
        {"parts", STATE_1, 5, 0, "masters and shuffling"},
        {"parts", STATE_0, 4, 0, "which are neither those of the whole state"},
        {"parts", STATE_0, 5, 0, "which are neither those of the whole state"},
        {"parts", STATE_1, 10, 8, STATE_1 ": step at offset 40 is 8, it must be 4"},
        {"parts", STATE_0, -1, -4, "has 21048 bytes, which are neither those of the whole state of"},
        {"parts", STATE_1, -1, 4, STATE_1 " has 21056 bytes, which are neither"},
        {"parts", STATE_1, -1, -2540, "which are neither"},
        {"parts", STATE_1, -1, -20100, STATE_1 " is shorter than its header"},
        /* behind 3 x 1456 elements and the header: how many files a loader that shuffles has, and their order */
        {"parts", STATE_0, 256 + 3 * 1456, 3, "which are neither"},
        {"parts", STATE_0, 256 + 3 * 1456 + 1, 1 << 30, "which are neither"},
        {"parts", STATE_0, 256 + 3 * 1456 + 4, 4, "which are neither"},
        {"one", STATE_0, -1, 4, "which are neither"},
        {"copies", STATE_0, 4, 0, "which are neither"},
        {"one", "model_00000004.bin", 6, 16, "has 12672 bytes, its header says"},
        {"one", "model_00000004.bin", 0, 6, "magic number 6 at offset 0"},
    };
    (void)state;
    tiny_dir_make(dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        copy(cases[i].kind);
        change(cases[i].file, cases[i].at, cases[i].to);
        refused(cases[i].says, SPW_ECORRUPT, cases[i].says);
    }
    tiny_dir_remove(dir);
}

/* The last whole one of a folder, or the one that is named; a file that was not finished is none. */
static void
test_found(void **state)
{
    char found[400], path[400], want[400];
    spw_foreign *d;
    (void)state;
    tiny_dir_make(dir);
    assert_false(spw_foreign_find(dir, found, sizeof found));
    copy("copies");
    snprintf(want, sizeof want, "%s/model_00000004.bin", dir);
    assert_true(spw_foreign_find(dir, found, sizeof found));
    assert_string_equal(found, want);
    assert_true(spw_foreign_find(want, found, sizeof found));
    assert_string_equal(found, want);
    assert_false(spw_foreign_find(dir, found, strlen(want)));
    snprintf(path, sizeof path, "touch %s/DONE_00000003 %s/DONE_10000000.old %s/DONE_9 %s/model_00000007.bin", dir, dir,
             dir, dir);
    assert_int_equal(system(path), 0);
    assert_true(spw_foreign_find(dir, found, sizeof found));
    assert_string_equal(found, want);
    DONE(spw_foreign_open(&d, found, &err));
    assert_int_equal(spw_foreign_get_about(d)->ranks, 2);
    spw_foreign_close(d);
    for (int digits = 9; digits < 30; digits++) { /* earlier ones, which come in any order */
        FILE *f;
        snprintf(path, sizeof path, "%s/DONE_%0*d", dir, digits, digits % 4);
        f = fopen(path, "w");
        assert_non_null(f);
        fclose(f);
    }
    assert_true(spw_foreign_find(dir, found, sizeof found));
    assert_string_equal(found, want);
    snprintf(path, sizeof path, "%s/" STATE_1, dir); /* the first rank has all of it */
    assert_int_equal(unlink(path), 0);
    DONE(spw_foreign_open(&d, found, &err));
    spw_foreign_close(d);
    copy("parts");
    assert_int_equal(unlink(path), 0);
    refused("a state", SPW_ENOENT, STATE_1 ": No such file");
    snprintf(path, sizeof path, "%s/" STATE_0, dir);
    assert_int_equal(unlink(path), 0);
    refused("a state", SPW_ENOENT, STATE_0 ": No such file");
    snprintf(path, sizeof path, "%s/DONE_00000004", dir);
    assert_int_equal(unlink(path), 0);
    refused("DONE", SPW_ECORRUPT, "DONE_00000004 is missing, so the checkpoint is not whole");
    assert_false(spw_foreign_find(dir, found, sizeof found));
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_turned), cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
