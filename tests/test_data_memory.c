/*
 * Training data that is large or in many files: nothing large in memory, few files open, and what is asked for ahead of its
 * use comes from disk meanwhile.
 */
#include "lib_dataset.h"
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

/* A stream of 8 GB opens at once, and neither it nor windows all over it stay in memory. */
static void
test_large(void **state)
{
    enum { COUNT = 2000000000 };
    spw_data_options o = dataset_options("big.bin");
    int32_t tokens[1024], targets[1024];
    uint64_t rss, n;
    spw_data *d;
    (void)state;
    dataset_write_llmc("big.bin", 20240801, 7, 0, 0);
    dataset_patch("big.bin", 8, COUNT, 4);
    if (truncate(dataset_path("big.bin"), 1024 + 4ll * COUNT) != 0) {
        int refusal = errno;
        unlink(dataset_path("big.bin"));
        assert_int_equal(refusal, EFBIG); /* only a file system that has no files of that size */
        skip();
    }
    dataset_patch("big.bin", 1024 + 4ll * (COUNT - 1), 77, 4);
    o.seq_length = 1024;
    for (uint64_t try = 0, begin = spw_now_ns(); try == 0 || spw_now_ns() - begin > 1000000000; try++) {
        assert_true(try < 5); /* a machine that does other things meanwhile is not at it five times */
        begin = spw_now_ns();
        spw_data_close(dataset_open(&o));
    }
    rss = spw_process_rss_bytes();
    d = dataset_open(&o);
    assert_int_equal(spw_data_tokens(d), COUNT);
    n = spw_data_sequences(d, SPW_SPLIT_TRAIN);
    assert_int_equal(n, (COUNT - 1) / 1024);
    for (uint64_t p = 0; p < 2000; p++)
        dataset_fill(d, SPW_SPLIT_TRAIN, p * 977, 1, tokens, targets);
    assert_true(spw_data_memory_bytes(d) < 64 << 10);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(spw_process_rss_bytes() < rss + (1 << 20));
#else
    (void)rss;
#endif
    spw_data_close(d);
}

/* More files than are kept open. */
static void
test_many_files(void **state)
{
    spw_data_options o;
    int32_t tokens[T], targets[T];
    bool seen[200] = {0};
    spw_data *d;
    (void)state;
    for (int i = 0; i < 200; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%03d", i);
        dataset_write_windows(name, T + 1, i);
    }
    o = dataset_options("f*");
    d = dataset_open(&o);
    assert_true(spw_data_memory_bytes(d) < 128 << 10);
    for (uint64_t p = 0; p < 200; p++) {
        dataset_fill(d, SPW_SPLIT_TRAIN, p, 1, tokens, targets);
        seen[tokens[0]] = true;
    }
    for (int i = 0; i < 200; i++)
        assert_true(seen[i]);
    spw_data_close(d);
}

/* Pages of a file that are in the page cache. */
static uint32_t
cached_pages(int fd, size_t bytes)
{
    unsigned char seen[256];
    uint32_t count = 0;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(map != MAP_FAILED && bytes <= sizeof seen * 4096);
    assert_int_equal(mincore(map, bytes, seen), 0);
    for (size_t i = 0; i < bytes / 4096; i++)
        count += seen[i] & 1;
    munmap(map, bytes);
    return count;
}

/* What is asked for comes from disk while nobody waits for it, and no more than that. */
static void
test_asked_ahead(void **state)
{
    enum { LONG = 8192, PAGES = 256, WINDOWS = 4 };
    static unsigned char bytes[PAGES * 4096];
    static int32_t tokens[2][WINDOWS * LONG], targets[WINDOWS * LONG];
    spw_data_options o = dataset_options("f");
    spw_data *d;
    uint32_t before, after = 0;
    int fd;
    (void)state;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 24);
    dataset_write_bytes("f", bytes, sizeof bytes);
    o.seq_length = LONG;
    d = dataset_open(&o);
    dataset_fill(d, SPW_SPLIT_TRAIN, 5, WINDOWS, tokens[0], targets);
    fd = open(dataset_path("f"), O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    before = cached_pages(fd, sizeof bytes);
    if (before < PAGES / 8) {
        spw_data_ask(d, SPW_SPLIT_TRAIN, 5, WINDOWS);
        for (int i = 0; i < 5000 && after < WINDOWS * LONG / 4096; i++) {
            spw_sleep_ns(1000000);
            after = cached_pages(fd, sizeof bytes) - before;
        }
        assert_in_range(after, WINDOWS * LONG / 4096, WINDOWS * (LONG / 4096 + 2));
    }
    dataset_fill(d, SPW_SPLIT_TRAIN, 5, WINDOWS, tokens[1], targets);
    assert_memory_equal(tokens[0], tokens[1], sizeof tokens[0]);
    close(fd);
    spw_data_close(d);
    if (before >= PAGES / 8)
        skip(); /* the file system is memory: nothing can be brought */
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        IN_DIR(test_large),
        IN_DIR(test_many_files),
        IN_DIR(test_asked_ahead),
    };
    return cmocka_run_group_tests_name("data_memory", tests, NULL, NULL);
}
