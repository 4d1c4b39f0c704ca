/*
 * test_aio_bench.c - the measurement itself: that it notices damaged, lost and misplaced pages, tells where the bytes
 * went, ends when told to, and leaves no file behind.
 */
#include "lib_aio.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PAGE = 4096, BLOCK = 128 * 1024 };
static const uint64_t FILE_BYTES = 64u << 20;

static spw_aio_bench *
bench_open(const world *w, const volatile int *stop)
{
    const char *dirs[1] = {w->dir};
    spw_aio_options aio = {.backend = w->backend};
    spw_aio_bench *b = NULL;
    spw_error err = {0};
    if (spw_aio_bench_open(
            &b,
            &(spw_aio_bench_options){.dirs = dirs, .dir_count = 1, .file_bytes = FILE_BYTES, .aio = &aio, .stop = stop},
            &err) != SPW_OK)
        fail_msg("%s", err.message);
    return b;
}

static spw_status
measure(spw_aio_bench *b, const world *w, spw_aio_pattern pattern, uint64_t block, bool verify, spw_aio_bench_result *r,
        spw_error *err)
{
    spw_aio_options aio = {.backend = w->backend, .block_bytes = block, .queue_depth = 3, .thread_count = 3};
    return spw_aio_bench_measure(b,
                                 &(spw_aio_bench_run){.pattern = pattern,
                                                      .aio = &aio,
                                                      .duration_ns = 20000000,
                                                      .dir_count = 1,
                                                      .verify = verify,
                                                      .memory_bytes = block > 8192 ? 7 * block : 0},
                                 r, err);
}

/* The only file in the folder; NULL when there is none. */
static const char *
only_file(const world *w)
{
    static char path[PATH_MAX];
    struct dirent *entry;
    DIR *dir = opendir(w->dir);
    path[0] = '\0';
    while ((entry = readdir(dir)) != NULL)
        if (entry->d_name[0] != '.')
            snprintf(path, sizeof path, "%s", aio_test_path_in(w, entry->d_name));
    closedir(dir);
    return path[0] != '\0' ? path : NULL;
}

/* The bench's file, which has no name: among this process' descriptors. */
static int
open_bench_file(const world *w)
{
    char link[64], target[PATH_MAX];
    for (int fd = 0; fd < 64; fd++) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        if (strstr(target, w->dir) != NULL && strstr(target, "spw-bench-") != NULL)
            return open(link, O_RDWR);
    }
    return -1;
}

static void
test_patterns(void **state)
{
    /* Shows that every pattern, block size and the bare loop move bytes, that all are right, and what is counted; and
     * that no file has a name meanwhile, which a process that is killed would leave behind. */
    world *w = aio_test_world_or_skip(state);
    static const uint64_t blocks[] = {4096, 8192, 65536, 1 << 20};
    spw_aio_bench *b = bench_open(w, NULL);
    assert_null(only_file(w));
    for (int p = 0; p < SPW_AIO_PATTERN_COUNT; p++)
        for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
            spw_aio_bench_result r;
            spw_error err = {0};
            if (measure(b, w, (spw_aio_pattern)p, blocks[i], true, &r, &err) != SPW_OK)
                fail_msg("%s", err.message);
            assert_int_equal(r.wrong, 0);
            assert_int_equal(r.backend, w->backend);
            assert_true((r.read_bytes > 0) == (p != SPW_AIO_PATTERN_WRITE));
            assert_true((r.write_bytes > 0) == (p != SPW_AIO_PATTERN_READ));
            assert_true(r.gb_s > 0 && r.burst_gb_s >= 0 && r.seconds >= 0.02); /* a loaded machine may begin late */
            assert_true(r.p50_us > 0 && r.p99_us >= r.p50_us && r.requests > 0);
            if (p == SPW_AIO_PATTERN_MIXED && r.requests > 100)
                assert_true(r.read_bytes < 2 * r.write_bytes && r.write_bytes < 2 * r.read_bytes);
            if (r.direct && r.device_note[0] == '\0')
                assert_true(r.device_ratio > 0.99 && r.device_ratio <= 1.0);
            else
                assert_true(r.device_note[0] != '\0' || !r.direct);
        }
    spw_aio_bench_close(b);
    assert_null(only_file(w));
}

static void
test_bare(void **state)
{
    /* Shows that the bare loop writes pages that the library reads as right, and the other way round. */
    world *w = aio_test_world_or_skip(state);
    spw_aio_bench *b = bench_open(w, NULL);
    for (int p = 0; p < SPW_AIO_PATTERN_SWAP; p++) {
        spw_aio_options aio = {.block_bytes = 65536, .queue_depth = 4};
        spw_aio_bench_run run = {.pattern = (spw_aio_pattern)p,
                                 .aio = &aio,
                                 .duration_ns = 20000000,
                                 .dir_count = 1,
                                 .bare = true,
                                 .verify = true};
        spw_aio_bench_result r;
        spw_error err = {0};
        spw_status st = spw_aio_bench_measure(b, &run, &r, &err);
        if (st == SPW_EUNSUPPORTED)
            break;
        assert_int_equal(st, SPW_OK);
        assert_int_equal(r.wrong, 0);
    }
    spw_aio_bench_close(b);
}

static void
test_notices(void **state)
{
    /* Shows that flipped bits, a lost write and pages that changed places are counted as wrong. */
    world *w = aio_test_world_or_skip(state);
    static const off_t flips[] = {5, 3 * PAGE + 4095, 9000 * (off_t)PAGE + 2000};
    unsigned char old[PAGE], other[PAGE];
    spw_aio_bench_result r;
    spw_error err = {0};
    for (int kind = 0; kind < 3; kind++) {
        spw_aio_bench *b = bench_open(w, NULL);
        int fd = open_bench_file(w);
        assert_true(fd >= 0);
        if (kind == 0)
            for (int i = 0; i < 3; i++) {
                assert_int_equal(pread(fd, old, 1, flips[i]), 1);
                old[0] ^= 4;
                assert_int_equal(pwrite(fd, old, 1, flips[i]), 1);
            }
        if (kind == 1) { /* the write of a run never arrives */
            assert_int_equal(pread(fd, old, PAGE, 7 * PAGE), PAGE);
            assert_int_equal(measure(b, w, SPW_AIO_PATTERN_WRITE, BLOCK, true, &r, &err), SPW_OK);
            assert_int_equal(r.wrong, 0);
            assert_int_equal(pwrite(fd, old, PAGE, 7 * PAGE), PAGE);
        }
        if (kind == 2) {
            assert_int_equal(pread(fd, old, PAGE, 7 * PAGE), PAGE);
            assert_int_equal(pread(fd, other, PAGE, 71 * PAGE), PAGE); /* same place in its block */
            assert_int_equal(pwrite(fd, old, PAGE, 71 * PAGE), PAGE);
            assert_int_equal(pwrite(fd, other, PAGE, 7 * PAGE), PAGE);
        }
        assert_int_equal(fsync(fd), 0);
        close(fd);
        assert_int_equal(measure(b, w, SPW_AIO_PATTERN_READ, BLOCK, true, &r, &err), SPW_OK);
        assert_true(r.wrong >= (kind == 0 ? 3 : kind == 1 ? 1 : 2));
        spw_aio_bench_close(b);
        assert_null(only_file(w));
    }
}

static void
test_refusals(void **state)
{
    /* Shows that bad options, a missing folder, a full disk and a stop are errors that say why, and leave no file. */
    world *w = aio_test_world_or_skip(state);
    const char *dirs[1] = {"/nonexistent/folder"};
    spw_aio_bench_options options = {.dirs = dirs, .dir_count = 1, .file_bytes = FILE_BYTES};
    volatile int stop = 0;
    spw_aio_bench *b = NULL;
    spw_aio_bench_result r;
    spw_error err = {0};
    bool through = false;
    assert_int_not_equal(spw_aio_bench_open(&b, &options, &err), SPW_OK);
    assert_null(b);
    assert_non_null(strstr(err.message, dirs[0]));
    dirs[0] = w->dir;
    options.file_bytes = 1ull << 55;
    err = (spw_error){0};
    assert_int_not_equal(spw_aio_bench_open(&b, &options, &err), SPW_OK);
    assert_null(only_file(w));
    options.file_bytes = 1000;
    assert_int_equal(spw_aio_bench_open(&b, &options, NULL), SPW_EINVAL);
    options.file_bytes = FILE_BYTES;
    for (unsigned k = 1; !through; k++) { /* every call into the system until the file is filled fails once */
        err = (spw_error){0};
        spw_test_fail_call(k);
        spw_status st = spw_aio_bench_open(&b, &options, &err);
        through = !spw_test_call_fired();
        spw_test_fail_call(0);
        assert_true(through ? st == SPW_OK : st == SPW_OK || err.message[0] != '\0');
        if (k == 2) { /* fallocate */
            assert_int_equal(st, SPW_ENOSPC);
            assert_non_null(strstr(err.message, "needs 64.0 MiB"));
            assert_non_null(strstr(err.message, "free"));
        }
        spw_aio_bench_close(b);
        assert_null(only_file(w));
        if (k > 30)
            k += 20; /* the transfers of the filling, all alike */
    }
    b = bench_open(w, &stop);
    assert_int_equal(measure(b, w, SPW_AIO_PATTERN_READ, 5000, false, &r, &err), SPW_EINVAL);
    assert_int_equal(measure(b, w, SPW_AIO_PATTERN_COUNT, BLOCK, false, &r, &err), SPW_EINVAL);
    stop = 1;
    err = (spw_error){0};
    assert_int_equal(measure(b, w, SPW_AIO_PATTERN_SWAP, BLOCK, false, &r, &err), SPW_ECANCELED);
    assert_int_equal(measure(b, w, SPW_AIO_PATTERN_READ, BLOCK, false, &r, &err), SPW_ECANCELED);
    spw_aio_bench_close(b);
    assert_null(only_file(w));
}

int
main(void)
{
    const struct CMUnitTest tests[] = {ON_EACH_BACKEND(test_patterns), ON_EACH_BACKEND(test_bare),
                                       ON_EACH_BACKEND(test_notices), ON_EACH_BACKEND(test_refusals)};
    return cmocka_run_group_tests_name("aio_bench", tests, NULL, NULL);
}
