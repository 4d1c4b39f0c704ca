/*
 * What is held out of training data: how much of one file, and of many that are too short for a share of their own.
 */
#include "lib_dataset.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

/* A split holds out one window at least; none is held out at 0. */
static void
test_split(void **state)
{
    spw_data *d = NULL;
    int32_t x[T];
    (void)state;
    dataset_write_windows("a.txt", 4 * T + 1, 0);
    assert_int_equal(dataset_try(&d, "a.txt", 0.05, 1, NULL), SPW_OK);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 1);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 3);
    spw_data_close(d);
    assert_int_equal(dataset_try(&d, "a.txt", 0.0, 1, NULL), SPW_OK);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 0);
    assert_int_equal(spw_data_fill(d, SPW_SPLIT_VALIDATION, 0, 1, x, x, NULL), SPW_EINVAL);
    spw_data_close(d);
}

/* Of files too short for a share of their own as many windows are held out as of one long file, of every part of the row. */
static void
test_split_of_many(void **state)
{
    spw_data_options o;
    spw_data *d;
    int32_t tokens[T], targets[T];
    uint64_t before;
    (void)state;
    for (int i = 0; i < 60; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%02d", i);
        dataset_write_windows(name, T + 1, i);
    }
    o = dataset_options("f*");
    o.validation_split = 0.05;
    d = dataset_open(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 3);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 57);
    for (uint64_t p = 0; p < 3; p++) {
        dataset_fill(d, SPW_SPLIT_VALIDATION, p, 1, tokens, targets);
        assert_int_equal(tokens[0], 9 + 20 * p); /* 0.05 x 10 rounds to 1 */
    }
    assert_true(spw_data_split_moved(d, &before));
    assert_int_equal(before, 1);
    spw_data_close(d);
    o.validation_split = 0.99;
    d = dataset_open(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_TRAIN), 1);
    spw_data_close(d);
    dataset_write_windows("long", 60 * T + 1, 0);
    o = dataset_options("long");
    o.validation_split = 0.05;
    d = dataset_open(&o);
    assert_int_equal(spw_data_sequences(d, SPW_SPLIT_VALIDATION), 3);
    assert_false(spw_data_split_moved(d, &before)); /* of one file nothing has changed */
    spw_data_close(d);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_split),
        IN_DIR(test_split_of_many),
    };
    return cmocka_run_group_tests_name("data_held_out", tests, NULL, NULL);
}
