/*
 * test_aio.c - what spw_aio.h promises, on every backend: the right bytes, each request once, its own status. The
 * reference is always pread() and pwrite() on a descriptor of the test's own. With SPW_TEST_AIO_BUFFERED set every file
 * is opened without O_DIRECT; TMPDIR chooses the file system (test_aio_limits.sh uses both).
 */
#include "aio_internal.h"
#include "lib_aio.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { KIB = 1024 };

static void
file_is(int fd, const unsigned char *want, uint64_t bytes)
{
    struct stat sb;
    unsigned char *got = malloc(bytes + 1);
    assert_non_null(got);
    assert_int_equal(fstat(fd, &sb), 0);
    assert_int_equal(sb.st_size, bytes);
    assert_int_equal(pread(fd, got, bytes, 0), bytes);
    assert_memory_equal(got, want, bytes);
    free(got);
}

/* ---------------------------------------------------------------- the right bytes */

static void
round_trip(const world *w, unsigned flags, spw_aio_options options)
{
    static const uint64_t sizes[] = {1, 2, 511, 513, 4095, 4096, 4097, 8191, 8192, 20480, 65537, 100003};
    static const uint64_t offsets[] = {0, 1, 511, 4096, 4097, 12345};
    static const uint64_t shifts[] = {0, 1, 512};
    enum { SPAN = 128 * KIB };
    options.block_bytes = 8192;
    options.queue_depth = 4;
    spw_aio *aio = aio_test_open_with(w, options);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", flags);
    unsigned char *model = aio_test_buffer_new(SPAN), *buf = aio_test_buffer_new(SPAN);
    dice d = {.seed = aio_test_seed_get()};
    int fd = open(aio_test_path_in(w, "data"), O_RDWR);
    assert_true(fd >= 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t j = 0; j < sizeof offsets / sizeof *offsets; j++)
            for (size_t k = 0; k < sizeof shifts / sizeof *shifts; k++) {
                uint64_t bytes = sizes[i], offset = offsets[j],
                         before = aio_test_roll(&d, 3) == 0 ? 0 : aio_test_roll(&d, 120000);
                uint64_t after = offset + bytes > before ? offset + bytes : before;
                unsigned char *at = buf + shifts[k];
                memset(model, 0, SPAN);
                aio_test_pattern_fill(model, before, (uint32_t)d.count);
                assert_int_equal(ftruncate(fd, 0), 0);
                assert_int_equal(pwrite(fd, model, before, 0), before);
                aio_test_pattern_fill(at, bytes, (uint32_t)(i * 100 + j * 10 + k));
                memcpy(model + offset, at, bytes);
                assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, at, bytes, offset), SPW_OK);
                file_is(fd, model, after);
                memset(buf, 0xa5, SPAN);
                assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, at, bytes, offset), SPW_OK);
                assert_memory_equal(at, model + offset, bytes);
                if (at > buf)
                    assert_int_equal(at[-1], 0xa5);
                assert_int_equal(at[bytes], 0xa5);
            }
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_FSYNC, NULL, 0, 0), SPW_OK);
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_FDATASYNC, NULL, 0, 0), SPW_OK);
    close(fd);
    free(model);
    free(buf);
    spw_aio_file_close(file);
    spw_aio_destroy(aio);
}

static void
test_round_trip(void **state)
{
    /* Shows that any size, offset and address moves the right bytes, no neighbour, and never makes the file longer. */
    round_trip(aio_test_world_or_skip(state), 0, (spw_aio_options){0});
}

static void
test_round_trip_buffered(void **state)
{
    /* Shows the same for a file that was opened without O_DIRECT. */
    round_trip(aio_test_world_or_skip(state), SPW_AIO_OPEN_BUFFERED, (spw_aio_options){0});
}

static void
test_round_trip_one_by_one(void **state)
{
    /* Shows the same when pieces are handed over singly and batches land whole (single_submit, no overlap_events). */
    round_trip(aio_test_world_or_skip(state), 0, (spw_aio_options){.single_submit = true, .lockstep = true});
}

static void
keep_reason(void *ctx, spw_log_level level, const char *line)
{
    if (level == SPW_LOG_WARN)
        snprintf(ctx, 512, "%s", line);
}

static void
test_round_trip_polled(void **state)
{
    /* Shows the same with sqpoll and iopoll; where the machine refuses one, the context works without and says why. */
    world *w = aio_test_world_or_skip(state);
    char warning[512] = "";
    spw_aio *aio;
    spw_log_set(keep_reason, warning);
    aio = aio_test_open_with(w, (spw_aio_options){.sqpoll = true, .iopoll = true});
    if (w->backend == SPW_AIO_URING) {
        bool sqpoll = strstr(spw_aio_reason(aio), " sqpoll") != NULL, iopoll = strstr(spw_aio_reason(aio), " iopoll");
        assert_true(sqpoll || strstr(warning, "sqpoll") != NULL || strstr(warning, "iopoll") != NULL);
        assert_true(iopoll || strstr(warning, "iopoll") != NULL);
        print_message("%s; %s\n", spw_aio_reason(aio), warning);
    }
    spw_aio_destroy(aio);
    spw_log_set(NULL, NULL);
    round_trip(w, 0, (spw_aio_options){.sqpoll = true});
    round_trip(w, 0, (spw_aio_options){.iopoll = true});
    spw_test_aio_iopoll_pretend(true); /* the code of the second ring, on a device that cannot poll */
    round_trip(w, 0, (spw_aio_options){.iopoll = true});
    round_trip(w, 0, (spw_aio_options){.iopoll = true, .sqpoll = true});
    spw_test_aio_iopoll_pretend(false);
}

static uint64_t
resident_bytes(int fd, uint64_t bytes)
{
    uint64_t pages = (bytes + 4095) / 4096, resident = 0;
    unsigned char *in_core = malloc(pages);
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(map != MAP_FAILED);
    assert_int_equal(mincore(map, bytes, in_core), 0);
    for (uint64_t i = 0; i < pages; i++)
        resident += in_core[i] & 1;
    munmap(map, bytes);
    free(in_core);
    return resident * 4096;
}

static void
test_pages_given_back(void **state)
{
    /* Shows that a file without O_DIRECT does not fill the page cache, neither by writing nor by reading. */
    world *w = aio_test_world_or_skip(state);
    enum { BYTES = 32 << 20, MIB = 1 << 20 };
    spw_aio *aio = aio_test_open(w, 256 * KIB, 8);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", SPW_AIO_OPEN_BUFFERED);
    unsigned char *buf = aio_test_buffer_new(MIB);
    int fd = open(aio_test_path_in(w, "data"), O_RDWR);
    struct statfs fs;
    if (fstatfs(fd, &fs) == 0 && fs.f_type == TMPFS_MAGIC) { /* its pages are the file */
        close(fd);
        free(buf);
        spw_aio_destroy(aio);
        skip();
    }
    for (int pass = 0; pass < 2; pass++) {
        for (uint64_t at = 0; at < BYTES; at += MIB)
            assert_int_equal(aio_test_transfer(aio, file, pass == 0 ? SPW_AIO_WRITE : SPW_AIO_READ, buf, MIB, at),
                             SPW_OK);
        if (pass == 1) /* what was written last may still be on its way */
            assert_true(resident_bytes(fd, BYTES) < BYTES / 8);
        assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_FDATASYNC, NULL, 0, 0), SPW_OK);
        spw_aio_file_close(file);
        assert_true(resident_bytes(fd, BYTES) < BYTES / 8);
        file = aio_test_file_open(aio, w, "data", SPW_AIO_OPEN_BUFFERED);
    }
    close(fd);
    free(buf);
    spw_aio_destroy(aio);
}

static void
test_neighbours_in_one_block(void **state)
{
    /* Shows that writes that meet inside a block, all in flight at once, do not undo each other. */
    world *w = aio_test_world_or_skip(state);
    enum { COUNT = 150, STEP = 1009 };
    spw_aio *aio = aio_test_open(w, 4096, 16);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    unsigned char *buf = aio_test_buffer_new(COUNT * STEP);
    spw_aio_request *reqs = calloc(COUNT, sizeof *reqs);
    int fd = open(aio_test_path_in(w, "data"), O_RDWR);
    assert_non_null(reqs);
    aio_test_pattern_fill(buf, COUNT * STEP, 7);
    for (int i = 0; i < COUNT; i++) {
        int k = i * 37 % COUNT;
        reqs[k] = (spw_aio_request){
            .op = SPW_AIO_WRITE, .file = file, .buf = buf + k * STEP, .bytes = STEP, .offset = (uint64_t)k * STEP};
        aio_test_submit(aio, &reqs[k]);
    }
    for (int i = 0; i < COUNT; i++) {
        spw_aio_request *req = spw_aio_wait(aio, AIO_TEST_LONG_NS);
        assert_non_null(req);
        assert_int_equal(req->status, SPW_OK);
    }
    file_is(fd, buf, COUNT * STEP);
    close(fd);
    free(reqs);
    free(buf);
    spw_aio_destroy(aio);
}

static void
test_many_against_small_queue(void **state)
{
    /* Shows that thousands of requests wait for tiny queues and each comes back once, with two files at it. */
    world *w = aio_test_world_or_skip(state);
    enum { COUNT_MAX = 2000, BYTES = 12 * KIB };
    const int count = getenv("SPW_TEST_AIO_FEW") != NULL ? 200 : COUNT_MAX;
    for (uint32_t depth = 1; depth <= 2; depth++) {
        spw_aio *aio = aio_test_open(w, 4096, depth);
        spw_aio_file *files[2] = {aio_test_file_open(aio, w, "a", 0), aio_test_file_open(aio, w, "b", 0)};
        unsigned char *buf = aio_test_buffer_new(count * BYTES), *back = aio_test_buffer_new(count * BYTES);
        spw_aio_request *reqs = calloc(count, sizeof *reqs);
        spw_aio_stats stats;
        assert_non_null(reqs);
        aio_test_pattern_fill(buf, count * BYTES, depth);
        for (int pass = 0; pass < 2; pass++) {
            static int seen[COUNT_MAX];
            memset(seen, 0, sizeof seen);
            for (int i = 0; i < count; i++) {
                reqs[i] = (spw_aio_request){.op = pass == 0 ? SPW_AIO_WRITE : SPW_AIO_READ,
                                            .priority = (spw_aio_priority)(i % SPW_AIO_PRIORITY_COUNT),
                                            .file = files[i % 2],
                                            .buf = (pass == 0 ? buf : back) + i * BYTES,
                                            .bytes = BYTES,
                                            .offset = (uint64_t)i * BYTES,
                                            .user = &seen[i]};
                aio_test_submit(aio, &reqs[i]);
            }
            for (int i = 0; i < count; i++) {
                spw_aio_request *req = spw_aio_wait(aio, AIO_TEST_LONG_NS);
                assert_non_null(req);
                assert_int_equal(req->status, SPW_OK);
                assert_int_equal((*(int *)req->user)++, 0);
            }
            assert_null(spw_aio_poll(aio));
        }
        assert_memory_equal(buf, back, count * BYTES);
        spw_aio_get_stats(aio, &stats);
        assert_int_equal(stats.requests, 2 * count);
        assert_int_equal(stats.pieces, 2 * count * (BYTES / 4096));
        assert_int_equal(stats.read_bytes, count * BYTES);
        assert_int_equal(stats.write_bytes, count * BYTES);
        assert_true(stats.bounce_bytes == 0);
        assert_true(stats.read_busy_ns > 0 && stats.write_busy_ns > 0);
        free(reqs);
        free(buf);
        free(back);
        spw_aio_destroy(aio);
    }
}

static void
test_beyond_2_gib(void **state)
{
    /* Shows that offsets above 2 and 4 GiB are not cut off; the file is sparse. */
    world *w = aio_test_world_or_skip(state);
    static const uint64_t offsets[] = {(2ull << 30) - 4096, (3ull << 30) + 12288, (5ull << 30) + 77};
    enum { BYTES = 40001 };
    spw_aio *aio = aio_test_open(w, 16 * KIB, 4);
    spw_aio_file *file = aio_test_file_open(aio, w, "sparse", 0);
    unsigned char *buf = aio_test_buffer_new(BYTES), *back = aio_test_buffer_new(BYTES);
    int fd = open(aio_test_path_in(w, "sparse"), O_RDONLY);
    for (int i = 0; i < 3; i++) {
        aio_test_pattern_fill(buf, BYTES, (uint32_t)i);
        assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, buf, BYTES, offsets[i]), SPW_OK);
        assert_int_equal(pread(fd, back, BYTES, (off_t)offsets[i]), BYTES);
        assert_memory_equal(buf, back, BYTES);
        memset(back, 0, BYTES);
        assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, back, BYTES, offsets[i]), SPW_OK);
        assert_memory_equal(buf, back, BYTES);
    }
    close(fd);
    free(buf);
    free(back);
    spw_aio_destroy(aio);
}

static void
show_warning(void *ctx, spw_log_level level, const char *line)
{
    (void)ctx;
    if (level == SPW_LOG_WARN)
        print_message("# %s\n", line);
}

static void
test_registered_region(void **state)
{
    /* Shows that a registered region moves the same bytes, inside it and beside it, and that the reason tells of it. */
    world *w = aio_test_world_or_skip(state);
    spw_region region = {0};
    spw_error err = {0};
    spw_aio *aio = NULL;
    unsigned char *other = aio_test_buffer_new(256 * KIB);
    assert_int_equal(spw_region_map(&region, 1024 * KIB, 0, &err), SPW_OK);
    spw_log_set(show_warning, NULL);
    spw_aio_options options = {.backend = w->backend, .block_bytes = 32 * KIB, .probe_dir = w->dir, .fixed = &region};
    assert_int_equal(spw_aio_create(&aio, &options, &err), SPW_OK);
    assert_int_equal(spw_aio_backend_of(aio), w->backend);
    assert_non_null(strstr(spw_aio_reason(aio), spw_aio_backend_name(w->backend)));
    if (w->backend == SPW_AIO_URING)
        assert_non_null(strstr(spw_aio_reason(aio), "registered")); /* or "buffers not registered" */
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    unsigned char *in = region.base, *out = in + 512 * KIB;
    aio_test_pattern_fill(in, 256 * KIB, 3);
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, in, 256 * KIB, 0), SPW_OK);
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, out, 256 * KIB, 0), SPW_OK);
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, other, 256 * KIB, 0), SPW_OK);
    assert_memory_equal(in, out, 256 * KIB);
    assert_memory_equal(in, other, 256 * KIB);
    out = (unsigned char *)region.base + region.bytes - 5000; /* up to the last byte */
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, out, 5000, 1234), SPW_OK);
    assert_memory_equal(in + 1234, out, 5000);
    spw_aio_destroy(aio);
    spw_region_unmap(&region);
    free(other);
}

/* Reads that the device of a file has done since boot; -1: it is not listed. */
static long long
device_reads(int fd)
{
    char line[512];
    long long found = -1;
    struct stat sb;
    FILE *f = fopen("/proc/diskstats", "re");
    assert_int_equal(fstat(fd, &sb), 0);
    while (f != NULL && found < 0 && fgets(line, sizeof line, f) != NULL) {
        unsigned a, b;
        long long reads;
        if (sscanf(line, "%u %u %*s %lld", &a, &b, &reads) == 3 && a == major(sb.st_dev) && b == minor(sb.st_dev))
            found = reads;
    }
    if (f != NULL)
        fclose(f);
    return found;
}

/* How much of the mapping at base lies on huge pages. */
static uint64_t
huge_bytes(const void *base)
{
    char line[512], start[32];
    uint64_t kib = 0;
    bool inside = false;
    FILE *f = fopen("/proc/self/smaps", "re");
    snprintf(start, sizeof start, "%lx-", (unsigned long)(uintptr_t)base);
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        unsigned long long n;
        if (sscanf(line, "AnonHugePages: %llu", &n) == 1)
            kib += inside ? n : 0;
        else if (strchr(line, '-') != NULL && strstr(line, "kB") == NULL)
            inside = strncmp(line, start, strlen(start)) == 0;
    }
    if (f != NULL)
        fclose(f);
    return kib * KIB;
}

/* Requests of one block each that a file takes when a block in two extents of the disk takes two; 0: it does not say. */
static unsigned
requests_of(int fd, uint64_t bytes, uint64_t block)
{
    enum { EXTENTS = 1024 };
    struct fiemap *map = calloc(1, sizeof *map + EXTENTS * sizeof map->fm_extents[0]);
    unsigned requests = 0;
    assert_non_null(map);
    map->fm_length = bytes;
    map->fm_extent_count = EXTENTS;
    bool known = ioctl(fd, FS_IOC_FIEMAP, map) == 0;
    for (unsigned i = 0; known && i < map->fm_mapped_extents; i++) {
        const struct fiemap_extent *e = &map->fm_extents[i];
        uint64_t end = e->fe_logical + e->fe_length < bytes ? e->fe_logical + e->fe_length : bytes;
        requests += (unsigned)((end - 1) / block - e->fe_logical / block + 1);
    }
    free(map);
    return requests;
}

/*
 * A region whose end is not a huge page: blocks in its huge pages reach the disk whole. When one small page makes the kernel
 * see all of them as such, a disk that takes 254 pieces of memory at once gets two requests for each block of 1 MiB.
 */
static void
test_whole_requests(void **state)
{
    enum { MIB = 1024 * KIB, REGION = 66 * MIB + 12 * KIB, FILE_BYTES = 32 * MIB, TRIES = 200 };
    world *w = aio_test_world_or_skip(state);
    spw_region region = {0};
    spw_aio *aio = NULL;
    long long least = INT64_MAX;
    spw_error err = {0};
    assert_int_equal(spw_region_map(&region, REGION, 0, &err), SPW_OK);
    memset(region.base, 1, region.bytes);
    spw_aio_options options = {.backend = w->backend, .block_bytes = MIB, .probe_dir = w->dir, .fixed = &region};
    assert_int_equal(spw_aio_create(&aio, &options, &err), SPW_OK);
    spw_aio_file *file = aio_test_file_open(aio, w, "whole", 0);
    char *base = region.base;
    aio_test_pattern_fill((unsigned char *)base, FILE_BYTES, 5);
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, base, FILE_BYTES, 0), SPW_OK);
    /* a file in pieces takes a few more; wrong is twice */
    long long most = requests_of(spw_aio_file_fd(file), FILE_BYTES, MIB) + FILE_BYTES / MIB / 2;
    for (int try = 0; try < TRIES && least > most; try++) { /* others may read too */
        long long before = device_reads(spw_aio_file_fd(file));
        /* over the border of two registered buffers */
        assert_int_equal(
            aio_test_transfer(aio, file, SPW_AIO_READ, base + REGION - 12 * KIB - FILE_BYTES, FILE_BYTES, 0), SPW_OK);
        long long reads = device_reads(spw_aio_file_fd(file)) - before;
        least = before >= 0 && reads < least ? reads : least;
        assert_memory_equal(base, base + REGION - 12 * KIB - FILE_BYTES, FILE_BYTES);
    }
    bool huge = huge_bytes(base) >= 64 * MIB;
    bool listed = least < INT64_MAX && most > FILE_BYTES / MIB / 2 && spw_aio_file_direct(file);
    /* and up to the last byte, which is in the last buffer */
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, base + REGION - 20 * KIB, 20 * KIB, 4096), SPW_OK);
    assert_memory_equal(base + 4096, base + REGION - 20 * KIB, 20 * KIB);
    spw_aio_destroy(aio);
    spw_region_unmap(&region);
    if (!huge || !listed)
        skip(); /* no huge pages were to be had, or no disk counts the reads */
    print_message("# %lld requests for %d blocks, at most %lld\n", least, FILE_BYTES / MIB, most);
    assert_in_range(least, 1, most);
}

/* ---------------------------------------------------------------- failures */

typedef struct fault_plan {
    unsigned calls;
    unsigned shorten_every, eagain_every; /* 0: never */
    int errnum;                           /* for every aio_test_transfer that covers errnum_offset */
    uint64_t errnum_offset;
    uint64_t delay_offset, delay_ns; /* for the aio_test_transfer that starts there */
} fault_plan;

static int
fault_by_plan(void *ctx, const spw_aio_request *req, uint64_t offset, uint64_t bytes, uint64_t *done_bytes,
              uint64_t *delay_ns)
{
    fault_plan *plan = ctx;
    (void)req;
    plan->calls++;
    if (plan->delay_ns > 0 && offset == plan->delay_offset)
        *delay_ns = plan->delay_ns;
    if (plan->errnum != 0 && offset <= plan->errnum_offset && plan->errnum_offset - offset < bytes)
        return plan->errnum;
    if (plan->eagain_every > 0 && plan->calls % plan->eagain_every == 0)
        return plan->calls % 2 ? EAGAIN : EINTR;
    if (plan->shorten_every > 0 && plan->calls % plan->shorten_every == 0)
        *done_bytes = (*done_bytes + 2) / 3;
    return 0;
}

static void
test_short_and_again(void **state)
{
    /* Shows that short transfers are resumed and EAGAIN and EINTR retried, with the right bytes in the end. */
    world *w = aio_test_world_or_skip(state);
    static const uint64_t shifts[] = {0, 1, 512};
    enum { BYTES = 100003 };
    for (int round = 0; round < 6; round++) {
        spw_aio *aio = aio_test_open(w, 16 * KIB, 4);
        spw_aio_file *file = aio_test_file_open(aio, w, "data", round % 2 ? SPW_AIO_OPEN_BUFFERED : 0);
        unsigned char *buf = aio_test_buffer_new(BYTES + AIO_TEST_ALIGN),
                      *back = aio_test_buffer_new(BYTES + AIO_TEST_ALIGN);
        fault_plan plan = {.shorten_every = 2, .eagain_every = 3};
        uint64_t offset = round < 3 ? 0 : 777, shift = shifts[round % 3];
        spw_aio_stats stats;
        int fd = open(aio_test_path_in(w, "data"), O_RDONLY);
        aio_test_pattern_fill(buf, BYTES + AIO_TEST_ALIGN, (uint32_t)round);
        spw_test_aio_fault(aio, fault_by_plan, &plan);
        assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, buf + shift, BYTES, offset), SPW_OK);
        assert_int_equal(pread(fd, back, BYTES, (off_t)offset), BYTES);
        assert_memory_equal(back, buf + shift, BYTES);
        memset(back, 0, BYTES);
        assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, back + shift, BYTES, offset), SPW_OK);
        assert_memory_equal(back + shift, buf + shift, BYTES);
        spw_aio_get_stats(aio, &stats);
        assert_true(stats.retries > 0);
        assert_true(plan.calls > stats.pieces);
        close(fd);
        free(buf);
        free(back);
        spw_aio_destroy(aio);
        assert_int_equal(unlink(aio_test_path_in(w, "data")), 0);
    }
}

static void
test_eagain_for_ever(void **state)
{
    /* Shows that a aio_test_transfer that is never accepted fails in the end instead of hanging. */
    world *w = aio_test_world_or_skip(state);
    spw_aio *aio = aio_test_open(w, 4096, 2);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    fault_plan plan = {.errnum = EAGAIN};
    unsigned char *buf = aio_test_buffer_new(4096);
    spw_test_aio_fault(aio, fault_by_plan, &plan);
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, buf, 4096, 0), SPW_EIO);
    spw_aio_destroy(aio);
    free(buf);
}

static void
test_io_error(void **state)
{
    /* Shows that a failed piece fails its request alone, and that the message names path, op, offset and counts. */
    world *w = aio_test_world_or_skip(state);
    enum { BYTES = 64 * KIB };
    spw_aio *aio = aio_test_open(w, 8192, 2);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    unsigned char *buf = aio_test_buffer_new(2 * BYTES);
    fault_plan plan = {.errnum = EIO, .errnum_offset = 20000};
    char wanted[64];
    spw_aio_request bad = {.op = SPW_AIO_WRITE, .file = file, .buf = buf, .bytes = BYTES, .offset = 4096};
    spw_aio_request good = {.op = SPW_AIO_WRITE, .file = file, .buf = buf, .bytes = BYTES, .offset = 2 * BYTES};
    spw_error err = {0};
    spw_test_aio_fault(aio, fault_by_plan, &plan);
    aio_test_submit(aio, &bad);
    aio_test_submit(aio, &good);
    for (int i = 0; i < 2; i++)
        assert_non_null(spw_aio_wait(aio, AIO_TEST_LONG_NS));
    assert_null(spw_aio_poll(aio));
    assert_int_equal(good.status, SPW_OK);
    assert_int_equal(bad.status, SPW_EIO);
    assert_int_equal(bad.sys_errno, EIO);
    assert_true(bad.done_bytes < BYTES);
    assert_int_equal(spw_aio_request_error(&bad, &err), SPW_EIO);
    assert_int_equal(err.status, SPW_EIO);
    assert_int_equal(err.sys_errno, EIO);
    assert_non_null(strstr(err.message, aio_test_path_in(w, "data")));
    assert_non_null(strstr(err.message, "write"));
    assert_non_null(strstr(err.message, "offset 4096"));
    assert_non_null(strstr(err.message, "wanted 65536"));
    snprintf(wanted, sizeof wanted, "got %llu", (unsigned long long)bad.done_bytes);
    assert_non_null(strstr(err.message, wanted));
    plan.errnum = ENOSPC;
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, buf, BYTES, 4096), SPW_ENOSPC);
    plan.errnum = 0; /* the file is as usable as before */
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, buf, BYTES, 4096), SPW_OK);
    plan.errnum = EIO;
    plan.errnum_offset = 0;
    spw_aio_file_close(file);
    spw_aio_destroy(aio);
    free(buf);
}

static void
test_read_past_end(void **state)
{
    /* Shows that a read beyond the file's end is an error that says how much was there, never silent zeros. */
    world *w = aio_test_world_or_skip(state);
    static const uint64_t ends[] = {10000, 8192, 100, 4096};
    unsigned char *buf = aio_test_buffer_new(64 * KIB), *model = aio_test_buffer_new(64 * KIB);
    aio_test_pattern_fill(model, 64 * KIB, 1);
    for (int i = 0; i < 8; i++) {
        uint64_t end = ends[i % 4], offset = i < 4 ? 0 : 50;
        spw_aio *aio = aio_test_open(w, 4096, 4);
        spw_aio_file *file = aio_test_file_open(aio, w, "data", i % 2 ? SPW_AIO_OPEN_BUFFERED : 0);
        spw_aio_request req = {.op = SPW_AIO_READ, .file = file, .buf = buf, .bytes = 20000, .offset = offset};
        spw_error err = {0};
        char got[32];
        int fd = open(aio_test_path_in(w, "data"), O_RDWR | O_TRUNC);
        assert_int_equal(pwrite(fd, model, end, 0), end);
        aio_test_submit(aio, &req);
        assert_ptr_equal(spw_aio_wait(aio, AIO_TEST_LONG_NS), &req);
        assert_int_equal(req.status, SPW_EIO);
        assert_int_equal(req.sys_errno, 0);
        assert_true(req.done_bytes <= end - offset);
        spw_aio_request_error(&req, &err);
        assert_non_null(strstr(err.message, "end of file"));
        assert_non_null(strstr(err.message, "wanted 20000"));
        snprintf(got, sizeof got, "got %llu", (unsigned long long)req.done_bytes);
        assert_non_null(strstr(err.message, got));
        assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, buf, end - offset, offset),
                         SPW_OK); /* up to the end */
        assert_memory_equal(buf, model + offset, end - offset);
        close(fd);
        spw_aio_destroy(aio);
    }
    free(buf);
    free(model);
}

static void
test_refused_requests(void **state)
{
    /* Shows that a caller's mistake is SPW_EINVAL at once, and that a refused request never comes back. */
    world *w = aio_test_world_or_skip(state);
    spw_aio *aio = aio_test_open(w, 0, 0), *stranger = aio_test_open(w, 0, 0);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0), *read_only = NULL, *none = NULL;
    char byte = 0;
    spw_error err = {0};
    assert_int_equal(spw_aio_file_open(&read_only, aio, aio_test_path_in(w, "data"), SPW_AIO_OPEN_READ, &err), SPW_OK);
    spw_aio_request ok = {.op = SPW_AIO_WRITE, .file = file, .buf = &byte, .bytes = 1};
    spw_aio_request req = ok;
    req.bytes = 0;
    assert_int_equal(spw_aio_submit(aio, &req, &err), SPW_EINVAL);
    req = ok;
    req.buf = NULL;
    assert_int_equal(spw_aio_submit(aio, &req, &err), SPW_EINVAL);
    req = ok;
    req.file = read_only;
    assert_int_equal(spw_aio_submit(aio, &req, &err), SPW_EINVAL);
    req = ok;
    req.offset = UINT64_MAX;
    assert_int_equal(spw_aio_submit(aio, &req, &err), SPW_EINVAL);
    req.offset = INT64_MAX;
    assert_int_equal(spw_aio_submit(aio, &req, &err), SPW_EINVAL);
    req = ok;
    assert_int_equal(spw_aio_submit(stranger, &req, &err), SPW_EINVAL);
    assert_null(spw_aio_poll(aio));
    assert_null(spw_aio_wait(stranger, 1000));
    assert_int_equal(
        spw_aio_file_open(&none, aio, aio_test_path_in(w, "x"), SPW_AIO_OPEN_READ | SPW_AIO_OPEN_CREATE, &err),
        SPW_EINVAL);
    assert_int_equal(spw_aio_file_open(&none, aio, aio_test_path_in(w, "x"), 0, &err), SPW_EINVAL);
    assert_int_equal(spw_aio_file_open(&none, aio, aio_test_path_in(w, "missing"), SPW_AIO_OPEN_READ, &err),
                     SPW_ENOENT);
    assert_non_null(strstr(err.message, aio_test_path_in(w, "missing")));
    assert_null(none);
    spw_aio_destroy(aio);
    spw_aio_destroy(stranger);

    spw_aio_options bad = {.backend = w->backend, .block_bytes = 1000};
    assert_int_equal(spw_aio_create(&aio, &bad, &err), SPW_EINVAL);
    assert_null(aio);
    bad = (spw_aio_options){.backend = SPW_AIO_BACKEND_COUNT};
    assert_int_equal(spw_aio_create(&aio, &bad, &err), SPW_EINVAL);
    bad = (spw_aio_options){.backend = w->backend, .probe_dir = aio_test_path_in(w, "missing")};
    assert_int_equal(spw_aio_create(&aio, &bad, &err), SPW_ENOENT);
    assert_null(aio);
}

static void
count_warning(void *ctx, spw_log_level level, const char *line)
{
    if (level == SPW_LOG_WARN && strstr(line, "O_DIRECT") != NULL)
        ++*(int *)ctx;
}

static void
test_direct_refused(void **state)
{
    /* Shows that a file whose file system refuses O_DIRECT is used through the page cache, with one warning. */
    world *w = aio_test_world_or_skip(state);
    spw_aio *aio = aio_test_open(w, 0, 0);
    spw_aio_file *file = NULL;
    spw_error err = {0};
    char want[8] = "", got[8] = "";
    int warnings = 0, fd = open("/proc/version", O_RDONLY), direct = open("/proc/version", O_RDONLY | O_DIRECT);
    if (direct >= 0 || fd < 0) {
        close(direct);
        close(fd);
        spw_aio_destroy(aio);
        skip();
    }
    assert_int_equal(pread(fd, want, sizeof want, 1), sizeof want);
    close(fd);
    spw_log_set(count_warning, &warnings);
    assert_int_equal(spw_aio_file_open(&file, aio, "/proc/version", SPW_AIO_OPEN_READ, &err), SPW_OK);
    assert_int_equal(warnings, 1);
    assert_false(spw_aio_file_direct(file));
    assert_int_equal(spw_aio_file_align(file), 1);
    assert_string_equal(spw_aio_file_path(file), "/proc/version");
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_READ, got, sizeof got, 1), SPW_OK);
    assert_memory_equal(got, want, sizeof want);
    assert_int_equal(warnings, 1);
    spw_aio_destroy(aio);
}

static void
test_failed_allocations(void **state)
{
    /* Shows that create and open survive the failure of every single allocation and leave nothing behind. */
    world *w = aio_test_world_or_skip(state);
    spw_region region = {0};
    bool through = false;
    if (getenv("SPW_TEST_AIO_FEW") != NULL)
        skip(); /* the same with any limit, and slow where each of many rings waits for what the last one had locked */
    assert_int_equal(spw_region_map(&region, 64 * KIB, 0, NULL), SPW_OK);
    for (int automatic = 0; automatic < 2; automatic++, through = false) {
        for (unsigned k = 1; !through; k++) {
            spw_aio_options options = {
                .backend = automatic ? SPW_AIO_AUTO : w->backend, .probe_dir = w->dir, .fixed = &region};
            spw_error err = {0};
            spw_aio *aio = NULL;
            spw_aio_file *file = NULL;
            long live = spw_test_live_allocs();
            spw_test_fail_alloc(k);
            spw_status st = spw_aio_create(&aio, &options, &err);
            if (st == SPW_OK)
                st = spw_aio_file_open(&file, aio, aio_test_path_in(w, "data"),
                                       SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE, &err);
            through = !spw_test_fault_fired();
            spw_test_fail_alloc(0);
            assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
            assert_int_equal(err.status, st);
            spw_aio_file_close(file);
            spw_aio_destroy(aio);
            assert_int_equal(spw_test_live_allocs(), live);
            assert_true(k < 100);
        }
    }
    spw_region_unmap(&region);
}

/* ---------------------------------------------------------------- order and time */

static void
test_priority_order(void **state)
{
    /* Shows the order of service: urgent, normal reads, normal writes, bulk reads, bulk writes. */
    world *w = aio_test_world_or_skip(state);
    static const struct {
        spw_aio_op op;
        spw_aio_priority priority;
    } order[] = {{SPW_AIO_WRITE, SPW_AIO_URGENT},
                 {SPW_AIO_READ, SPW_AIO_NORMAL},
                 {SPW_AIO_WRITE, SPW_AIO_NORMAL},
                 {SPW_AIO_READ, SPW_AIO_BULK},
                 {SPW_AIO_WRITE, SPW_AIO_BULK}};
    enum { COUNT = sizeof order / sizeof *order, BYTES = 8192 };
    spw_aio *aio = aio_test_open(w, 4096, 1);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    unsigned char *buf = aio_test_buffer_new(2 * COUNT * BYTES);
    spw_aio_request reqs[2 * COUNT];
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, buf, 2 * COUNT * BYTES, 0), SPW_OK);
    for (int i = 2 * COUNT - 1; i >= 0; i--) { /* worst first; two of each */
        reqs[i] = (spw_aio_request){.op = order[i / 2].op,
                                    .priority = order[i / 2].priority,
                                    .file = file,
                                    .buf = buf + i * BYTES,
                                    .bytes = BYTES,
                                    .offset = (uint64_t)i * BYTES};
        aio_test_submit(aio, &reqs[i]);
    }
    for (int i = 0; i < 2 * COUNT; i++) {
        spw_aio_request *req = spw_aio_wait(aio, AIO_TEST_LONG_NS);
        assert_non_null(req);
        assert_int_equal(req->status, SPW_OK);
        assert_int_equal((req - reqs) / 2, i / 2);
    }
    spw_aio_destroy(aio);
    free(buf);
}

/* Four writes, of which the second is held back: true if it is the last to come, not before it is due. */
static bool
held_back_is_last(world *w, uint64_t delay_ns)
{
    spw_aio *aio = aio_test_open(w, 4096, 4);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    fault_plan plan = {.delay_offset = 4096, .delay_ns = delay_ns};
    unsigned char *buf = aio_test_buffer_new(16 * KIB);
    spw_aio_request reqs[4], *last = NULL;
    uint64_t begin = spw_now_ns();
    spw_test_aio_fault(aio, fault_by_plan, &plan);
    for (int i = 0; i < 4; i++) {
        reqs[i] = (spw_aio_request){
            .op = SPW_AIO_WRITE, .file = file, .buf = buf + i * 4096, .bytes = 4096, .offset = (uint64_t)i * 4096};
        aio_test_submit(aio, &reqs[i]);
    }
    for (int i = 0; i < 4; i++) {
        last = spw_aio_wait(aio, AIO_TEST_LONG_NS);
        assert_non_null(last);
        assert_true(last != &reqs[1] || spw_now_ns() - begin >= delay_ns);
    }
    spw_aio_destroy(aio);
    free(buf);
    return last == &reqs[1];
}

static void
test_delay_holds_back_one(void **state)
{
    /*
     * Shows that a completion that is held back delays its own request and no other, and ends a sleep when it is due. A slow
     * disk's other writes may take as long: a longer delay shows it then.
     */
    world *w = aio_test_world_or_skip(state);
    uint64_t delay_ns = 60000000;
    while (!held_back_is_last(w, delay_ns)) {
        delay_ns *= 4;
        assert_true(delay_ns < 5000000000);
    }
}

static void *
wake_later(void *arg)
{
    spw_sleep_ns(20000000);
    spw_aio_wake(arg);
    return NULL;
}

static void
test_wake_and_timeout(void **state)
{
    /* Shows that a wake ends the sleep of now or of next time, once, and that a timeout ends it too. */
    world *w = aio_test_world_or_skip(state);
    spw_aio *aio = aio_test_open(w, 0, 0);
    spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
    pthread_t thread;
    uint64_t begin = spw_now_ns();
    char byte = 1;
    assert_null(spw_aio_wait(aio, 5000000));
    assert_true(spw_now_ns() - begin >= 5000000);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(pthread_create(&thread, NULL, wake_later, aio), 0);
        assert_null(spw_aio_wait(aio, UINT64_MAX));
        pthread_join(thread, NULL);
    }
    assert_int_equal(aio_test_transfer(aio, file, SPW_AIO_WRITE, &byte, 1, 0), SPW_OK);
    spw_aio_wake(aio); /* nobody sleeps: kept for the next wait, also when polls come in between */
    spw_aio_wake(aio);
    assert_null(spw_aio_poll(aio));
    assert_null(spw_aio_wait(aio, UINT64_MAX));
    begin = spw_now_ns();
    assert_null(spw_aio_wait(aio, 5000000)); /* that was it */
    assert_true(spw_now_ns() - begin >= 5000000);
    spw_aio_destroy(aio);
}

typedef struct handover {
    spw_aio *aio;
    spw_aio_file *file;
    unsigned char *buf;
    spw_status status;
    bool closes; /* the thread closes the file too */
} handover;

static void *
write_block(void *arg)
{
    handover *h = arg;
    spw_aio_request req = {.op = SPW_AIO_WRITE, .file = h->file, .buf = h->buf, .bytes = 8192, .offset = 0};
    spw_error err = {0};
    h->status = spw_aio_submit(h->aio, &req, &err);
    if (h->status == SPW_OK)
        h->status = spw_aio_wait(h->aio, AIO_TEST_LONG_NS) == &req ? req.status : SPW_ETIMEDOUT;
    if (h->closes)
        spw_aio_file_close(h->file);
    return NULL;
}

static void
test_handover_between_threads(void **state)
{
    /* Shows that an idle context with its files may go from thread to thread. */
    world *w = aio_test_world_or_skip(state);
    spw_aio *aio = aio_test_open(w, 0, 0);
    handover h = {.aio = aio, .file = aio_test_file_open(aio, w, "data", 0), .buf = aio_test_buffer_new(8192)};
    pthread_t thread;
    for (int i = 0; i < 4; i++) {
        h.status = SPW_ESYS;
        h.closes = i == 3;
        assert_int_equal(pthread_create(&thread, NULL, write_block, &h), 0);
        pthread_join(thread, NULL);
        assert_int_equal(h.status, SPW_OK);
        if (i == 1)
            assert_int_equal(aio_test_transfer(aio, h.file, SPW_AIO_READ, h.buf, 8192, 0), SPW_OK);
    }
    h.file = aio_test_file_open(aio, w, "data", 0);
    assert_int_equal(aio_test_transfer(aio, h.file, SPW_AIO_READ, h.buf, 8192, 0), SPW_OK);
    h.closes = false;
    assert_int_equal(pthread_create(&thread, NULL, write_block, &h), 0);
    pthread_join(thread, NULL);
    assert_int_equal(h.status, SPW_OK);
    spw_aio_file_close(h.file); /* here, after the other thread's transfers */
    h.file = aio_test_file_open(aio, w, "data", 0);
    assert_int_equal(aio_test_transfer(aio, h.file, SPW_AIO_READ, h.buf, 8192, 0), SPW_OK);
    spw_aio_destroy(aio);
    free(h.buf);
}

static void
test_destroy_in_flight(void **state)
{
    /* Shows that destroy waits for what is in flight, drops the rest, and leaves no memory or descriptor behind. */
    world *w = aio_test_world_or_skip(state);
    enum { COUNT = 40, BYTES = 64 * KIB };
    long live = spw_test_live_allocs();
    unsigned char *buf = aio_test_buffer_new(COUNT * BYTES + 1);
    spw_aio_request *reqs = calloc(COUNT, sizeof *reqs);
    int fd_free = aio_test_lowest_free_fd();
    assert_non_null(reqs);
    for (int round = 0; round < 4; round++) {
        spw_aio *aio = aio_test_open(w, 8192, 3);
        spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
        fault_plan plan = {.delay_offset = 0, .delay_ns = AIO_TEST_LONG_NS, .eagain_every = round % 2 ? 2 : 0};
        if (round > 1)
            spw_test_aio_fault(aio, fault_by_plan, &plan);
        for (int i = 0; i < COUNT; i++) {
            reqs[i] = (spw_aio_request){.op = SPW_AIO_WRITE,
                                        .file = file,
                                        .buf = buf + i * BYTES + round % 2,
                                        .bytes = BYTES,
                                        .offset = (uint64_t)i * BYTES};
            aio_test_submit(aio, &reqs[i]);
        }
        spw_aio_poll(aio);
        spw_aio_wake(aio);
        spw_aio_destroy(aio);
        assert_int_equal(spw_test_live_allocs(), live);
        assert_int_equal(aio_test_lowest_free_fd(), fd_free);
    }
    free(buf);
    free(reqs);
}

enum { HELD_BACK_NS = 200000000 };

typedef struct other_file {
    const spw_aio_file *shortened;
    uint64_t delay_ns;
    unsigned times;
} other_file;

/* All transfers come late; the first one of a file comes short too. */
static int
fault_late(void *ctx, const spw_aio_request *req, uint64_t offset, uint64_t bytes, uint64_t *done_bytes,
           uint64_t *delay_ns)
{
    other_file *o = ctx;
    (void)offset;
    *delay_ns = o->delay_ns;
    if (req->file == o->shortened && o->times++ == 0)
        *done_bytes = bytes / 2;
    return 0;
}

/* False if the machine stood still and nothing was held back any more when the file was to be closed. */
static bool
close_spares_others(world *w, uint64_t delay_ns)
{
    enum { BYTES = 16 * KIB };
    spw_aio *aio = aio_test_open(w, BYTES, 4);
    spw_aio_file *closed = aio_test_file_open(aio, w, "closed", 0), *kept = aio_test_file_open(aio, w, "kept", 0);
    unsigned char *buf = aio_test_buffer_new(2 * BYTES), *back = aio_test_buffer_new(BYTES);
    other_file o = {.shortened = kept, .delay_ns = delay_ns};
    spw_aio_request gone = {.op = SPW_AIO_WRITE, .file = closed, .buf = buf, .bytes = BYTES};
    spw_aio_request stays = {.op = SPW_AIO_WRITE, .file = kept, .buf = buf + BYTES, .bytes = BYTES};
    bool held;
    aio_test_pattern_fill(buf, 2 * BYTES, 3);
    spw_test_aio_fault(aio, fault_late, &o);
    aio_test_submit(aio, &gone);
    aio_test_submit(aio, &stays);
    held = spw_aio_poll(aio) == NULL;
    spw_sleep_ns(20000000); /* both have moved, and are held back */
    held = spw_aio_poll(aio) == NULL && held;
    if (held) {
        spw_aio_file_close(closed);
        assert_ptr_equal(spw_aio_wait(aio, AIO_TEST_LONG_NS), &stays);
        assert_int_equal(stays.status, SPW_OK);
        assert_int_equal(o.times, 2);
        assert_int_equal(aio_test_transfer(aio, kept, SPW_AIO_READ, back, BYTES, 0), SPW_OK);
        assert_memory_equal(back, buf + BYTES, BYTES);
    }
    spw_aio_destroy(aio);
    free(buf);
    free(back);
    return held;
}

static void
test_close_spares_others(void **state)
{
    /* Shows that closing a file while another one's transfer has to be resumed does not cancel that one. */
    world *w = aio_test_world_or_skip(state);
    uint64_t delay_ns = HELD_BACK_NS;
    while (!close_spares_others(w, delay_ns)) {
        delay_ns *= 4;
        assert_true(delay_ns < 5000000000);
    }
}

static void
test_close_before_the_rest(void **state)
{
    /* Shows that closing does not wait for ever when the last completion was held back and the request's rest never starts. */
    world *w = aio_test_world_or_skip(state);
    enum { BYTES = 16 * KIB };
    unsigned char *buf = aio_test_buffer_new(BYTES);
    for (int whole = 0; whole < 2; whole++) {
        spw_aio *aio = aio_test_open(w, 4096, 1);
        spw_aio_file *file = aio_test_file_open(aio, w, "data", 0);
        other_file o = {.delay_ns = HELD_BACK_NS};
        spw_aio_request req = {.op = SPW_AIO_WRITE, .file = file, .buf = buf, .bytes = BYTES};
        spw_test_aio_fault(aio, fault_late, &o);
        aio_test_submit(aio, &req);
        assert_null(spw_aio_poll(aio));
        spw_sleep_ns(20000000); /* the first of four has moved, and is held back */
        assert_null(spw_aio_poll(aio));
        (void)alarm(200);
        if (whole == 0)
            spw_aio_file_close(file);
        spw_aio_destroy(aio);
        (void)alarm(0);
    }
    free(buf);
}

/* ---------------------------------------------------------------- a random schedule */

typedef struct chaos {
    dice dice;
    unsigned errors;
} chaos;

static int
fault_by_dice(void *ctx, const spw_aio_request *req, uint64_t offset, uint64_t bytes, uint64_t *done_bytes,
              uint64_t *delay_ns)
{
    chaos *c = ctx;
    (void)req;
    (void)offset;
    (void)bytes;
    if (aio_test_roll(&c->dice, 4) == 0)
        *delay_ns = 1 + aio_test_roll(&c->dice, 2000000);
    switch (aio_test_roll(&c->dice, 16)) {
    case 0: return EAGAIN;
    case 1: return EINTR;
    case 2: c->errors++; return EIO;
    case 3:
    case 4:
    case 5:
        if (*done_bytes > 1)
            *done_bytes = 1 + aio_test_roll(&c->dice, (uint32_t)*done_bytes - 1);
        return 0;
    default: return 0;
    }
}

static void
test_random_schedule(void **state)
{
    /* Shows that under delays, errors and short transfers each request comes back once, and what succeeded is right. */
    world *w = aio_test_world_or_skip(state);
    enum { COUNT = 250, SPAN = 40 * KIB };
    uint64_t seed = aio_test_seed_get();
    print_message("SPW_SEED=%llu\n", (unsigned long long)seed);
    for (int round = 0; round < 2; round++, seed++) {
        chaos c = {.dice = {.seed = seed}};
        dice d = {.seed = ~seed};
        spw_aio *aio = aio_test_open(w, 4096u << aio_test_roll(&d, 3), 1 + aio_test_roll(&d, 5));
        spw_aio_file *files[2] = {aio_test_file_open(aio, w, "a", 0),
                                  aio_test_file_open(aio, w, "b", SPW_AIO_OPEN_BUFFERED)};
        unsigned char *model = aio_test_buffer_new(COUNT * SPAN), *buf = aio_test_buffer_new(COUNT * SPAN);
        spw_aio_request *reqs = calloc(COUNT, sizeof *reqs);
        unsigned char seen[COUNT] = {0};
        unsigned submitted = 0, back = 0, failed = 0;
        int fds[2];
        assert_non_null(reqs);
        aio_test_pattern_fill(model, COUNT * SPAN, (uint32_t)seed);
        for (int f = 0; f < 2; f++) {
            fds[f] = open(aio_test_path_in(w, f == 0 ? "a" : "b"), O_RDWR);
            assert_int_equal(pwrite(fds[f], model, COUNT * SPAN, 0), COUNT * SPAN);
        }
        spw_test_aio_fault(aio, fault_by_dice, &c);
        while (back < COUNT) {
            spw_aio_request *req;
            for (uint32_t n = aio_test_roll(&d, 20); n > 0 && submitted < COUNT; n--, submitted++) {
                uint64_t skip_bytes = aio_test_roll(&d, 2) ? aio_test_roll(&d, 5000) : 0;
                uint64_t bytes =
                    aio_test_roll(&d, 2) ? 1 + aio_test_roll(&d, SPAN - 5000) : 4096 * (1 + aio_test_roll(&d, 8));
                uint32_t op = aio_test_roll(&d, 10);
                req = &reqs[submitted];
                *req = (spw_aio_request){.op = op == 0  ? SPW_AIO_FSYNC
                                               : op < 5 ? SPW_AIO_WRITE
                                                        : SPW_AIO_READ,
                                         .priority = (spw_aio_priority)aio_test_roll(&d, SPW_AIO_PRIORITY_COUNT),
                                         .file = files[aio_test_roll(&d, 2)],
                                         .offset = submitted * (uint64_t)SPAN + skip_bytes,
                                         .bytes = bytes,
                                         .buf = buf + submitted * (uint64_t)SPAN +
                                                (aio_test_roll(&d, 2) ? skip_bytes : 0)};
                if (req->op == SPW_AIO_WRITE)
                    memcpy(req->buf, model + req->offset, bytes); /* the bytes that are there: still true afterwards */
                aio_test_submit(aio, req);
            }
            req = aio_test_roll(&d, 2)
                      ? spw_aio_poll(aio)
                      : spw_aio_wait(aio, submitted > back && aio_test_roll(&d, 2) ? AIO_TEST_LONG_NS
                                                                                   : aio_test_roll(&d, 1000000));
            if (req == NULL)
                continue;
            assert_in_range(req - reqs, 0, submitted - 1);
            assert_int_equal(seen[req - reqs]++, 0);
            back++;
            if (req->status != SPW_OK) {
                spw_error err = {0};
                assert_int_equal(req->status, SPW_EIO);
                assert_int_equal(spw_aio_request_error(req, &err), SPW_EIO);
                failed++;
            } else if (req->op == SPW_AIO_READ) {
                assert_memory_equal(req->buf, model + req->offset, req->bytes);
            }
        }
        assert_true(failed > 0 && failed <= c.errors && failed < COUNT);
        spw_test_aio_fault(aio, NULL, NULL);
        assert_null(spw_aio_poll(aio));
        for (int f = 0; f < 2; f++) {
            file_is(fds[f], model, COUNT * SPAN);
            close(fds[f]);
        }
        spw_aio_destroy(aio);
        free(reqs);
        free(model);
        free(buf);
    }
}

/* ---------------------------------------------------------------- all of them, on every backend */

int
main(void)
{
    const struct CMUnitTest tests[] = {
        ON_EACH_BACKEND(test_round_trip),
        ON_EACH_BACKEND(test_round_trip_buffered),
        ON_EACH_BACKEND(test_round_trip_one_by_one),
        ON_EACH_BACKEND(test_round_trip_polled),
        ON_EACH_BACKEND(test_pages_given_back),
        ON_EACH_BACKEND(test_neighbours_in_one_block),
        ON_EACH_BACKEND(test_many_against_small_queue),
        ON_EACH_BACKEND(test_beyond_2_gib),
        ON_EACH_BACKEND(test_registered_region),
        ON_EACH_BACKEND(test_whole_requests),
        ON_EACH_BACKEND(test_short_and_again),
        ON_EACH_BACKEND(test_eagain_for_ever),
        ON_EACH_BACKEND(test_io_error),
        ON_EACH_BACKEND(test_read_past_end),
        ON_EACH_BACKEND(test_refused_requests),
        ON_EACH_BACKEND(test_direct_refused),
        ON_EACH_BACKEND(test_failed_allocations),
        ON_EACH_BACKEND(test_priority_order),
        ON_EACH_BACKEND(test_delay_holds_back_one),
        ON_EACH_BACKEND(test_wake_and_timeout),
        ON_EACH_BACKEND(test_handover_between_threads),
        ON_EACH_BACKEND(test_destroy_in_flight),
        ON_EACH_BACKEND(test_close_spares_others),
        ON_EACH_BACKEND(test_close_before_the_rest),
        ON_EACH_BACKEND(test_random_schedule),
    };
    return cmocka_run_group_tests_name("aio", tests, NULL, NULL);
}
