/*
 * What the reference finds of answers, by window: kept, given back beside other tokens, written to a file and read again; and what is no
 * such file, or another training's.
 */
#include "lib_tiny.h"
#include "spw_reference.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { WINDOWS = 5, ANSWERS = 12, T = 10, KEY = 77 };
static const int32_t HERE = SPW_TOKEN_BEGINS;

static spw_reference *
make(uint64_t answers)
{
    spw_reference *r = NULL;
    spw_error err = {0};
    DONE(spw_reference_create(&r, WINDOWS, answers, KEY, &err));
    return r;
}

/* Windows 3 and 1, in this order, of four answers and of two. */
static spw_reference *
make_full(void)
{
    spw_reference *r = make(ANSWERS);
    spw_error err = {0};
    DONE(spw_reference_put(r, 3, (double[]){1.5, 2.5, 1.0 / 3, 4.5}, 4, &err));
    DONE(spw_reference_put(r, 1, (double[]){10, 20}, 2, &err));
    assert_int_equal(spw_reference_count(r), 2);
    return r;
}

/* The padding of window 1 begins like a document, and has no target; so does a row of window 3 that no document begins at. */
static void
expect_full(const spw_reference *r)
{
    static const int32_t one[T] = {5 | HERE, 5, 5, 6 | HERE, 6, 6, 0 | HERE, 0, 0, 0};
    static const int32_t one_targets[T] = {5, 5, -1, -1, 6, -1, -1, -1, -1, -1};
    static const int32_t three[T] = {5, 5, 6 | HERE, 6, 6, 7 | HERE, 7, 8 | HERE, 8, 8};
    static const int32_t three_targets[T] = {5, -1, -1, 6, -1, 7, -1, -1, 8, -1};
    static const double want_one[T] = {10, 0, 0, 20}, want_three[T] = {1.5, 0, 2.5, 0, 0, 1.0 / 3, 0, 4.5};
    double got[T];
    spw_error err = {0};
    memset(got, 0xee, sizeof got);
    DONE(spw_reference_fill(r, 1, one, one_targets, T, got, &err));
    assert_memory_equal(got, want_one, sizeof got);
    DONE(spw_reference_fill(r, 3, three, three_targets, T, got, &err));
    assert_memory_equal(got, want_three, sizeof got);
    assert_int_equal(spw_reference_fill(r, 1, three, three_targets, T, got, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "has 4 answers, the reference was asked about 2"));
    err = (spw_error){0};
    assert_int_equal(spw_reference_fill(r, 3, one, one_targets, T, got, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "has 2 answers, the reference was asked about 4"));
    err = (spw_error){0};
    assert_int_equal(spw_reference_fill(r, 4, one, one_targets, T, got, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "was not asked about sequence 4"));
    assert_int_equal(spw_reference_fill(r, WINDOWS, one, one_targets, T, got, &err), SPW_EINVAL);
}

static void
test_table(void **state)
{
    static const double more[ANSWERS];
    spw_reference *r = make_full();
    spw_error err = {0};
    (void)state;
    expect_full(r);
    DONE(spw_reference_put(r, 1, (double[]){7, 7}, 2, &err)); /* it is there: in another epoch, or of another rank */
    expect_full(r);
    assert_int_equal(spw_reference_put(r, 0, more, ANSWERS - 5, &err), SPW_EINVAL);
    assert_int_equal(spw_reference_put(r, WINDOWS, more, 1, &err), SPW_EINVAL);
    assert_int_equal(spw_reference_put(r, 0, more, 0, &err), SPW_EINVAL);
    DONE(spw_reference_put(r, 0, more, ANSWERS - 6, &err));
    DONE(spw_reference_put(r, 1, (double[]){7, 7}, 2, &err)); /* nor does it need room then */
    expect_full(r);
    assert_int_equal(spw_reference_count(r), 3);
    spw_reference_destroy(r);
    spw_reference_destroy(NULL);
}

static void
test_file(void **state)
{
    char dir[256], path[300], other[300];
    spw_reference *r = make_full(), *again = make(ANSWERS), *small = make(5), *keyed = NULL;
    spw_error err = {0};
    uint64_t bytes, other_bytes;
    char *file, *same;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/reference.bin", dir);
    snprintf(other, sizeof other, "%s/again.bin", dir);
    assert_int_equal(spw_reference_load(again, path, NULL, &err), SPW_ENOENT);
    err = (spw_error){0};
    DONE(spw_reference_save(r, path, &err));
    DONE(spw_reference_load(again, path, NULL, &err));
    assert_int_equal(spw_reference_count(again), 2);
    expect_full(again);
    DONE(spw_reference_put(again, 2, (double[]){1, 2}, 2, &err)); /* and it goes on */
    expect_full(again);
    spw_reference_destroy(again);
    again = make(ANSWERS);
    DONE(spw_reference_load(again, path, NULL, &err));
    DONE(spw_reference_save(again, other, &err)); /* the same bytes, though windows came in another order */
    file = tiny_load(path, &bytes);
    same = tiny_load(other, &other_bytes);
    assert_int_equal(bytes, 48 + 4 * WINDOWS + 8 * 6);
    assert_true(bytes == other_bytes && memcmp(file, same, bytes) == 0);
    DONE(spw_reference_create(&keyed, WINDOWS, ANSWERS, KEY + 1, &err));
    assert_int_equal(spw_reference_load(keyed, path, NULL, &err), SPW_EINVAL);
    assert_non_null(strstr(err.message, "of other data"));
    err = (spw_error){0};
    assert_int_equal(spw_reference_load(small, path, NULL, &err), SPW_EINVAL); /* of six answers */
    for (uint64_t at = 0; at < bytes; at++) {                                  /* any byte of it */
        spw_reference *damaged = make(ANSWERS);
        if (at == 12)
            at = 16; /* which is not used */
        file[at] ^= 4;
        tiny_store(other, file, bytes);
        if (spw_reference_load(damaged, other, NULL, &err) == SPW_OK)
            fail_msg("byte %llu is another one", (unsigned long long)at);
        file[at] ^= 4;
        spw_reference_destroy(damaged);
    }
    for (uint64_t less = 0; less < bytes; less += 7) {
        spw_reference *cut = make(ANSWERS);
        tiny_store(other, file, less);
        assert_int_equal(spw_reference_load(cut, other, NULL, &err), SPW_ECORRUPT);
        assert_non_null(strstr(err.message, "again.bin"));
        spw_reference_destroy(cut);
    }
    for (int64_t more = -2; more <= 2; more += 4) { /* whole, but with fewer or more sums than its windows have */
        const uint64_t n = bytes + (uint64_t)(8 * more);
        unsigned char *wrong = calloc(n + 16, 1);
        spw_reference *damaged = make(ANSWERS);
        memcpy(wrong, file, n < bytes ? n : bytes);
        spw_put_le(wrong + 32, (uint64_t)(6 + more), 8);
        spw_put_le(wrong + 40, spw_checksum_more(0, wrong + 48, n - 48), 8);
        tiny_store(other, (char *)wrong, n);
        err = (spw_error){0};
        assert_int_equal(spw_reference_load(damaged, other, NULL, &err), SPW_ECORRUPT);
        assert_non_null(strstr(err.message, "its windows have not as many answers as it has sums"));
        spw_reference_destroy(damaged);
        free(wrong);
    }
    spw_reference_destroy(r);
    spw_reference_destroy(again);
    spw_reference_destroy(small);
    spw_reference_destroy(keyed);
    free(file);
    free(same);
    tiny_dir_remove(dir);
}

/* Each allocation refused in turn. */
static void
test_no_memory(void **state)
{
    spw_error err = {0};
    unsigned refused = 0;
    (void)state;
    for (;; refused++) {
        spw_reference *r = NULL;
        spw_status st;
        spw_test_fail_alloc(refused + 1);
        st = spw_reference_create(&r, WINDOWS, ANSWERS, KEY, &err);
        spw_test_fail_alloc(0);
        if (st == SPW_OK) {
            spw_reference_destroy(r);
            break;
        }
        assert_true(st == SPW_ENOMEM && r == NULL);
    }
    assert_int_equal(refused, 5);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests_name("reference", tests, NULL, NULL);
}
