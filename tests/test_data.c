/* Text data: every window once per epoch in an order that only seed and position decide; clear errors. */
#include "lib_tiny.h"
#include "spw_data.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { T = 10 };

static void
write_file(const char *dir, const char *name, int bytes, int first)
{
    char path[300];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < bytes; i++)
        fputc((first + i / T) % 256, f); /* window w starts with byte first + w */
    fclose(f);
}

static spw_status
open_data(spw_data **d, const char *dir, const char *pattern, double split, uint64_t seed, spw_error *err)
{
    char path[300];
    const char *p = path;
    snprintf(path, sizeof path, "%s/%s", dir, pattern);
    return spw_data_open(
        d,
        &(spw_data_options){
            .patterns = &p, .pattern_count = 1, .seq_length = T, .validation_split = split, .seed = seed},
        err);
}

/* Over two files: each training window once per epoch, another order in the next, the same for the same seed; targets are
 * the tokens shifted by one; what is held out is never trained on. */
static void
test_order(void **state)
{
    char dir[256];
    spw_data *d = NULL, *again = NULL;
    int32_t tokens[T], targets[T], other[T];
    int seen[256], order[2][256];
    uint64_t n, held;
    (void)state;
    tiny_dir_make(dir);
    write_file(dir, "a.txt", 50 * T + 1, 0);
    write_file(dir, "b.txt", 30 * T + 5, 100);
    write_file(dir, "c.txt", 3, 200); /* too short for a window */
    assert_int_equal(open_data(&d, dir, "*.txt", 0.1, 5, NULL), SPW_OK);
    assert_int_equal(open_data(&again, dir, "*.txt", 0.1, 5, NULL), SPW_OK);
    n = spw_data_sequences(d, SPW_SPLIT_TRAIN);
    held = spw_data_sequences(d, SPW_SPLIT_VALIDATION);
    assert_int_equal(n + held, 80);
    assert_int_equal(held, 8);
    for (int epoch = 0; epoch < 2; epoch++) {
        memset(seen, 0, sizeof seen);
        for (uint64_t i = 0; i < n; i++) {
            spw_data_fill(d, SPW_SPLIT_TRAIN, (uint64_t)epoch * n + i, 1, tokens, targets);
            spw_data_fill(again, SPW_SPLIT_TRAIN, (uint64_t)epoch * n + i, 1, other, targets);
            assert_memory_equal(tokens, other, sizeof tokens);
            assert_memory_equal(tokens + 1, targets, (T - 1) * sizeof *tokens);
            seen[tokens[0]]++;
            order[epoch][i] = tokens[0];
        }
        for (int w = 0; w < 256; w++)
            assert_int_equal(seen[w], (w < 45 || (w >= 100 && w < 127)) ? 1 : 0);
    }
    assert_memory_not_equal(order[0], order[1], n * sizeof(int));
    for (uint64_t i = 0; i < held; i++) {
        spw_data_fill(d, SPW_SPLIT_VALIDATION, i, 1, tokens, targets);
        assert_true((tokens[0] >= 45 && tokens[0] < 50) || (tokens[0] >= 127 && tokens[0] < 130));
    }
    spw_data_close(again);
    assert_int_equal(open_data(&again, dir, "*.txt", 0.1, 6, NULL), SPW_OK);
    for (uint64_t i = 0; i < n; i++) {
        spw_data_fill(again, SPW_SPLIT_TRAIN, i, 1, tokens, targets);
        order[1][i] = tokens[0];
    }
    assert_memory_not_equal(order[0], order[1], n * sizeof(int));
    spw_data_close(again);
    spw_data_close(d);
    tiny_dir_remove(dir);
}

/* A split holds out one window at least; none is held out at 0. */
static void
test_split(void **state)
{
    char dir[256];
    spw_data *d = NULL;
    (void)state;
    tiny_dir_make(dir);
    write_file(dir, "a.txt", 4 * T + 1, 0);
    assert_int_equal(open_data(&d, dir, "a.txt", 0.05, 1, NULL), SPW_OK);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 1);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 3);
    spw_data_close(d);
    assert_int_equal(open_data(&d, dir, "a.txt", 0.0, 1, NULL), SPW_OK);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 0);
    spw_data_close(d);
    tiny_dir_remove(dir);
}

/* No match, empty files and files that are too short, each with what a person needs to know. */
static void
test_errors(void **state)
{
    char dir[256];
    spw_data *d = NULL;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    write_file(dir, "empty", 0, 0);
    write_file(dir, "short", T, 0);
    assert_int_equal(open_data(&d, dir, "*.none", 0.1, 1, &err), SPW_ENOENT);
    assert_non_null(strstr(err.message, ".none"));
    assert_int_equal(open_data(&d, dir, "empty", 0.1, 1, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "empty"));
    assert_int_equal(open_data(&d, dir, "*", 0.1, 1, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "11 bytes"));
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests_name("data", tests, NULL, NULL);
}
