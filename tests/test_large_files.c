/*
 * Large files past the page cache: digests of whole files, and runs of tensors from several threads, with the bytes of their
 * definitions wherever they come from and whatever the file system refuses; and nothing of them is left in the cache.
 */
#include "lib_tiny.h"
#include "spw_files.h"
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

enum { BLOCK = 1 << 20, BYTES_MAX = 5 * BLOCK + 77777, FILE_MAX = 8 << 20 };

/* CRC-64/XZ bit by bit, from its definition: polynomial 42f0e1eba9ea3693, reflected, begun with ones and inverted at the end. */
static uint64_t
crc64(const unsigned char *bytes, uint64_t count)
{
    uint64_t crc = UINT64_MAX;
    for (uint64_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xc96c5795d7870f42u : 0);
    }
    return ~crc;
}

static spw_status
digest_of(const char *path, uint64_t *digest, spw_error *err)
{
    spw_bounce *bounce;
    spw_status st = spw_bounce_create(&bounce, 2, err); /* fewer than threads, where there are four */
    if (st == SPW_OK)
        st = spw_file_digest(path, bounce, digest, err);
    spw_bounce_destroy(bounce);
    return st;
}

/* However many threads sum it, a file's digest is that of its definition. Of every length around a block's, and what a byte changes. */
static void
test_digest(void **state)
{
    static const uint64_t lengths[] = {0, 1, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, BYTES_MAX};
    static unsigned char bytes[BYTES_MAX];
    char dir[256], path[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/file", dir);
    for (uint64_t i = 0; i < BYTES_MAX; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
        uint64_t got = 0;
        spw_error err = {0};
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        assert_int_equal(fwrite(bytes, 1, lengths[k], f), lengths[k]);
        assert_int_equal(fclose(f), 0);
        if (digest_of(path, &got, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_true(got == crc64(bytes, lengths[k]));
    }
    for (int k = 0; k < 6; k++) {
        uint64_t before = 0, after = 0;
        FILE *f = fopen(path, "r+");
        assert_non_null(f);
        assert_int_equal(digest_of(path, &before, NULL), SPW_OK);
        assert_int_equal(fseek(f, k < 5 ? (long)k * BLOCK + 5 : BYTES_MAX - 1, SEEK_SET), 0);
        assert_int_equal(fputc(k < 5 ? ~bytes[k * BLOCK + 5] & 255 : ~bytes[BYTES_MAX - 1] & 255, f) >= 0, 1);
        assert_int_equal(fclose(f), 0);
        assert_int_equal(digest_of(path, &after, NULL), SPW_OK);
        assert_true(before != after);
    }
    tiny_dir_remove(dir);
}

/* The published check value; and stretches in any order, cut anywhere, some empty, give what the bytes give in one. */
static void
test_crc64(void **state)
{
    static unsigned char bytes[70001];
    uint64_t draw = 1;
    (void)state;
    assert_true(spw_crc64_whole(spw_crc64_part("123456789", 9, 0), 9) == 0x995dc9bbdf1939fau);
    assert_true(crc64((const unsigned char *)"123456789", 9) == 0x995dc9bbdf1939fau);
    assert_true(spw_crc64_whole(0, 0) == 0);
    for (uint64_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)((draw = draw * 6364136223846793005u + 1442695040888963407u) >> 56);
    for (int k = 0; k < 200; k++) {
        uint64_t cuts[9] = {0}, parts = 0, length = sizeof bytes - (uint64_t)k * 300;
        for (int i = 1; i < 8; i++) {
            draw = draw * 6364136223846793005u + 1442695040888963407u;
            cuts[i] = cuts[i - 1] + (draw >> 32) % (1 + (length - cuts[i - 1]) / 2);
        }
        cuts[8] = length;
        for (int i = 0; i < 8; i++) {
            int at = (i * 5 + k) % 8;
            parts ^= spw_crc64_part(bytes + cuts[at], cuts[at + 1] - cuts[at], length - cuts[at + 1]);
        }
        assert_true(spw_crc64_whole(parts, length) == crc64(bytes, length));
    }
    /* Places as in files of terabytes: a byte moves by one and by many as by their sum. */
    for (uint64_t far = 1; far < 1ull << 50; far = far * 3 + 1) {
        uint64_t once = spw_crc64_part("x", 1, far + 5), zeros[2] = {0};
        unsigned char six[6] = "x";
        assert_true(once == spw_crc64_part(six, 6, far) && spw_crc64_part(zeros, 16, far) == 0);
    }
}

/* Pages of a file that are in the page cache. */
static uint64_t
cached_pages(const char *path, uint64_t length)
{
    static unsigned char pages[FILE_MAX / 4096 + 1];
    uint64_t count = 0, most = (length + (uint64_t)sysconf(_SC_PAGESIZE) - 1) / (uint64_t)sysconf(_SC_PAGESIZE);
    int fd = open(path, O_RDONLY);
    void *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(fd >= 0 && map != MAP_FAILED && mincore(map, length, pages) == 0);
    for (uint64_t i = 0; i < most; i++)
        count += pages[i] & 1;
    munmap(map, length);
    close(fd);
    return count;
}

/* True where what is written around the page cache is in it all the same: tmpfs, ext4 that journals data, ZFS, btrfs of late. */
static bool
keeps_pages(const char *dir)
{
    static _Alignas(4096) char block[4096];
    char path[300];
    bool keeps;
    int fd;
    snprintf(path, sizeof path, "%s/probe", dir);
    fd = open(path, O_WRONLY | O_CREAT | O_DIRECT, 0600);
    keeps = fd < 0 || write(fd, block, sizeof block) != sizeof block || cached_pages(path, sizeof block) > 0;
    if (fd >= 0)
        close(fd);
    unlink(path);
    if (keeps)
        print_message("the file system keeps pages: no more to see here\n");
    return keeps;
}

/* A folder whose files' pages can leave memory; elsewhere the test ends here. */
static void
dir_make_or_skip(char dir[256])
{
    tiny_dir_make(dir);
    if (keeps_pages(dir)) {
        tiny_dir_remove(dir);
        skip();
    }
}

/* A digest leaves nothing in the page cache that was not there, and gives the same wherever its bytes come from. */
static void
test_digest_leaves_no_pages(void **state)
{
    static unsigned char bytes[BYTES_MAX];
    char dir[256], path[300];
    uint64_t cached = 0, direct = 0, refused = 0, mixed = 0;
    bool through = false;
    int fd;
    (void)state;
    dir_make_or_skip(dir);
    snprintf(path, sizeof path, "%s/file", dir);
    for (uint64_t i = 0; i < BYTES_MAX; i++)
        bytes[i] = (unsigned char)(i * 2246822519u >> 11);
    fd = open(path, O_RDWR | O_CREAT, 0600);
    assert_true(fd >= 0 && write(fd, bytes, BYTES_MAX) == (ssize_t)BYTES_MAX && fsync(fd) == 0);
    assert_int_equal(digest_of(path, &cached, NULL), SPW_OK);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    assert_int_equal(digest_of(path, &direct, NULL), SPW_OK);
    assert_int_equal(cached_pages(path, BYTES_MAX), 0);
    assert_true(direct == cached);
    for (unsigned k = 1; !through;
         k++) { /* direct I/O is refused, all of it or a piece; or what the cache reads fails */
        spw_status st;
        spw_test_fail_call(k);
        st = digest_of(path, &refused, NULL);
        through = !spw_test_call_fired();
        assert_true(st == SPW_OK ? refused == cached : !through && st == SPW_EIO);
    }
    spw_test_fail_call(0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    assert_true(pread(fd, bytes, 1 << 20, 1 << 20) == 1 << 20); /* a block of it */
    assert_int_equal(digest_of(path, &mixed, NULL), SPW_OK);
    assert_true(mixed == cached);
    close(fd);
    tiny_dir_remove(dir);
}

/* What refuses memory is told and leaves nothing; nor does a file that is not there. */
static void
test_digest_faults(void **state)
{
    char dir[256], path[300];
    static const unsigned char bytes[3 * BLOCK];
    bool through = false;
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/file", dir);
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, sizeof bytes, f), sizeof bytes);
    assert_int_equal(fclose(f), 0);
    for (unsigned k = 1; !through; k++) {
        spw_error err = {0};
        uint64_t digest;
        long live = spw_test_live_allocs();
        spw_test_fail_alloc(k);
        spw_status st = digest_of(path, &digest, &err);
        through = !spw_test_fault_fired();
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    spw_test_fail_alloc(0);
    snprintf(path, sizeof path, "%s/none", dir);
    assert_int_equal(digest_of(path, &(uint64_t){0}, NULL), SPW_ENOENT);
    tiny_dir_remove(dir);
}

/* ---------------------------------------------------------------- runs of tensors */

enum { TENSORS_MAX = 400, CUTS = 9, THREADS = 3 };

/* Of a file: its tensors and, for each, stretches of whole elements, one of them empty; in what order they come is drawn. */
typedef struct runs {
    spw_tensor_info *tensors; /* (count) */
    uint32_t count;
    spw_st_writer *w;
    spw_st_reader *r;
    uint64_t cuts[TENSORS_MAX][CUTS + 1];
    uint32_t order[TENSORS_MAX * CUTS];
    uint32_t next;   /* atomic */
    spw_error error; /* of the last run that failed */
} runs;

static uint64_t
tensor_bytes(const runs *job, uint32_t i)
{
    return job->tensors[i].shape[0] * spw_dtype_bytes(job->tensors[i].dtype);
}

static unsigned char
byte_of(uint32_t i, uint64_t at)
{
    return (unsigned char)((at + 1) * (2 * i + 3) * 0x9E3779B97F4A7C15u >> 41);
}

static uint64_t
drawn(uint64_t *draw)
{
    return (*draw = *draw * 6364136223846793005u + 1442695040888963407u) >> 33;
}

/* Two large tensors and a small one; or as many as there is room for, most of them less than a page. */
static void
make_tensors(runs *job, bool many)
{
    static spw_tensor_info few[3] = {{.name = "0", .dtype = SPW_F32, .ndim = 1, .shape = {1100003}},
                                     {.name = "1", .dtype = SPW_BF16, .ndim = 1, .shape = {900099}},
                                     {.name = "2", .dtype = SPW_F32, .ndim = 1, .shape = {101}}},
                           lots[TENSORS_MAX];
    memset(job, 0, sizeof *job);
    job->tensors = many ? lots : few;
    job->count = many ? TENSORS_MAX : 3;
    for (uint32_t i = 0; many && i < TENSORS_MAX; i++) {
        snprintf(lots[i].name, sizeof lots[i].name, "%u", i);
        lots[i].dtype = i % 3 == 0 ? SPW_BF16 : SPW_F32;
        lots[i].ndim = 1;
        lots[i].shape[0] = i % 16 == 0 ? 30000 + i : i * 7919 % 1200 + 1;
    }
}

static void
cut_runs(runs *job, uint64_t seed)
{
    uint64_t draw = seed;
    for (uint32_t i = 0; i < job->count; i++) {
        uint64_t size = spw_dtype_bytes(job->tensors[i].dtype), left = job->tensors[i].shape[0];
        for (uint32_t k = 1; k < CUTS; k++) {
            job->cuts[i][k] = job->cuts[i][k - 1] + (k == 4 ? 0 : drawn(&draw) % (left / 2 + 1) * size);
            left = (tensor_bytes(job, i) - job->cuts[i][k]) / size;
        }
        job->cuts[i][CUTS] = tensor_bytes(job, i);
    }
    for (uint32_t k = 0; k < job->count * CUTS; k++) {
        uint32_t other = (uint32_t)(drawn(&draw) % (k + 1));
        job->order[k] = job->order[other];
        job->order[other] = k;
    }
}

static spw_status
make(void *ctx, uint64_t offset, void *out, uint64_t bytes, spw_error *err)
{
    (void)err;
    assert_true(bytes > 0 && bytes <= SPW_BOUNCE_BYTES);
    for (uint64_t k = 0; k < bytes; k++)
        ((unsigned char *)out)[k] = byte_of(*(uint32_t *)ctx, offset + k);
    return SPW_OK;
}

static spw_status
take(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    for (uint64_t k = 0; k < bytes; k++)
        if (((const unsigned char *)data)[k] != byte_of(*(uint32_t *)ctx, offset + k))
            return SPW_RAISE(err, SPW_ECORRUPT, "tensor %u, byte %llu", *(uint32_t *)ctx,
                             (unsigned long long)(offset + k));
    return SPW_OK;
}

/* Writes, or reads, what nobody else has. */
static void *
run_main(void *arg)
{
    runs *job = arg;
    uint32_t k;
    while ((k = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count * CUTS) {
        uint32_t i = job->order[k] / CUTS, cut = job->order[k] % CUTS;
        uint64_t at = job->cuts[i][cut], bytes = job->cuts[i][cut + 1] - at;
        spw_error err = {0};
        spw_status st = job->w != NULL ? spw_st_write_run(job->w, i, at, bytes, make, &i, &err)
                                       : spw_st_read_run(job->r, spw_st_reader_find(job->r, job->tensors[i].name), at,
                                                         bytes, take, &i, &err);
        if (st != SPW_OK)
            job->error = err;
    }
    return NULL;
}

static spw_status
run_all(runs *job, int threads)
{
    pthread_t thread[THREADS];
    job->next = 0;
    job->error = (spw_error){0};
    for (int i = 1; i < threads; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, run_main, job), 0);
    run_main(job);
    for (int i = 1; i < threads; i++)
        pthread_join(thread[i], NULL);
    return job->error.status;
}

/* What the file must hold behind its header, read the plain way. */
static void
check_file(const runs *job, const char *path)
{
    static unsigned char got[FILE_MAX];
    spw_error err = {0};
    spw_st_reader *r;
    assert_int_equal(spw_st_reader_open(&r, path, NULL), SPW_OK);
    for (uint32_t i = 0; i < job->count; i++) {
        const spw_tensor_info *t = spw_st_reader_find(r, job->tensors[i].name);
        assert_true(t->bytes == tensor_bytes(job, i) && t->bytes <= FILE_MAX);
        assert_int_equal(spw_st_read(r, t, 0, got, t->bytes, NULL), SPW_OK);
        if (take(&i, 0, got, t->bytes, &err) != SPW_OK)
            fail_msg("%s", err.message);
    }
    spw_st_reader_close(r);
}

/* Committed; the writer stays, for its sum. Returns whether the call that was to fail has come. */
static bool
write_file(runs *job, const char *path, spw_bounce *bounce, int threads, unsigned fail_call)
{
    bool fired;
    assert_int_equal(spw_st_writer_create(&job->w, path, job->tensors, job->count, NULL), SPW_OK);
    spw_test_fail_call(fail_call);
    spw_st_writer_past_cache(job->w, bounce);
    if (run_all(job, threads) != SPW_OK)
        fail_msg("%s", job->error.message);
    assert_int_equal(spw_st_writer_commit(job->w, NULL), SPW_OK);
    fired = spw_test_call_fired();
    spw_test_fail_call(0);
    check_file(job, path);
    return fired;
}

static void
end_writer(runs *job)
{
    spw_st_writer_destroy(job->w);
    job->w = NULL;
}

/* Every run's ends may lie anywhere in a page, which others have the rest of. */
static void
test_runs(void **state)
{
    static runs job;
    char dir[256], path[300];
    spw_bounce *bounce;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    assert_int_equal(spw_bounce_create(&bounce, THREADS - 1, NULL), SPW_OK); /* one waits */
    for (uint64_t seed = 1; seed <= 16; seed++) {
        uint64_t digest, bytes;
        spw_st_sum sum;
        make_tensors(&job, seed % 2 == 0);
        cut_runs(&job, seed);
        write_file(&job, path, bounce, THREADS, 0);
        sum = spw_st_writer_sum(job.w);
        bytes = spw_st_writer_file_bytes(job.w);
        end_writer(&job);
        assert_int_equal(sum.bytes, bytes);
        assert_int_equal(spw_file_digest(path, bounce, &digest, NULL), SPW_OK);
        assert_true(spw_crc64_whole(sum.parts, bytes) == digest);
        cut_runs(&job, seed + 100);
        assert_int_equal(spw_st_reader_open(&job.r, path, NULL), SPW_OK);
        spw_st_reader_past_cache(job.r, bounce);
        if (run_all(&job, THREADS) != SPW_OK)
            fail_msg("%s", job.error.message);
        sum = spw_st_reader_sum(job.r, true);
        assert_true(sum.bytes == bytes && spw_crc64_whole(sum.parts, bytes) == digest);
        spw_st_reader_close(job.r);
    }
    spw_bounce_destroy(bounce);
    tiny_dir_remove(dir);
}

/* What a slow disk would hold up goes to the page cache, no more than may, and is the same; what was committed is not there any more. */
static void
test_slow_disk(void **state)
{
    enum { SPARE = 3 << 20, AT_ONCE = 32 << 20, ROUNDS = 12 };
    static runs job;
    char dir[256], path[300];
    spw_bounce *bounce;
    bool keeps_all;
    (void)state;
    tiny_dir_make(dir);
    keeps_all = keeps_pages(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    for (int slow = 0; slow < 2; slow++) {
        uint64_t spilled = 0, written = 0, page = (uint64_t)sysconf(_SC_PAGESIZE);
        assert_int_equal(spw_bounce_create(&bounce, THREADS, NULL), SPW_OK);
        spw_bounce_spill(bounce, SPARE, slow ? UINT64_MAX : 1); /* no disk is as fast, or as slow */
        for (uint64_t seed = 1; seed <= ROUNDS; seed++) {
            uint64_t bytes, cached, left;
            make_tensors(&job, false);
            cut_runs(&job, seed);
            assert_int_equal(spw_st_writer_create(&job.w, path, job.tensors, job.count, NULL), SPW_OK);
            bytes = spw_st_writer_file_bytes(job.w);
            spw_st_writer_past_cache(job.w, bounce);
            assert_int_equal(run_all(&job, THREADS), SPW_OK);
            cached = cached_pages(spw_st_writer_temporary(job.w), bytes);
            assert_int_equal(spw_st_writer_commit(job.w, NULL), SPW_OK);
            left = cached_pages(path, bytes);
            assert_true(keeps_all || left == 0);
            spilled += written < AT_ONCE / 2 ? 0 : cached * page;
            if (!keeps_all && written < AT_ONCE / 2) /* header, and pages whose parts wait */
                assert_true(cached < 64);
            written += bytes;
            check_file(&job, path);
            end_writer(&job);
        }
        assert_true(written > AT_ONCE + 2 * SPARE);
        if (!keeps_all)
            assert_true(slow ? spilled > SPARE / 2 && spilled < SPARE + (1 << 20) : spilled < 1 << 20);
        spw_bounce_destroy(bounce);
    }
    tiny_dir_remove(dir);
    if (keeps_all)
        skip();
}

/* Two writers share buffers and table; one of them is given up in the middle, and what waited of it is nowhere. */
static void
test_two_files(void **state)
{
    static runs a, b;
    char dir[256], path[2][300];
    spw_bounce *bounce;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path[0], sizeof path[0], "%s/a", dir);
    snprintf(path[1], sizeof path[1], "%s/b", dir);
    assert_int_equal(spw_bounce_create(&bounce, 2, NULL), SPW_OK);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        make_tensors(&a, true);
        make_tensors(&b, true);
        cut_runs(&a, seed);
        cut_runs(&b, seed + 50);
        assert_int_equal(spw_st_writer_create(&a.w, path[0], a.tensors, a.count, NULL), SPW_OK);
        spw_st_writer_past_cache(a.w, bounce);
        a.next = a.count * CUTS / 2; /* half of it is never written */
        run_main(&a);
        write_file(&b, path[1], bounce, THREADS, 0);
        end_writer(&a);
        end_writer(&b);
        assert_int_equal(tiny_dir_entries(dir), 1);
    }
    spw_bounce_destroy(bounce);
    tiny_dir_remove(dir);
}

/* Where direct I/O is refused, at once or in the middle, the cache has the rest: the same bytes. */
static void
test_runs_refused(void **state)
{
    static runs job;
    char dir[256], path[300];
    spw_bounce *bounce;
    bool through = false;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    assert_int_equal(spw_bounce_create(&bounce, 1, NULL), SPW_OK);
    make_tensors(&job, false);
    cut_runs(&job, 7);
    for (unsigned k = 1; !through; k++) {
        through = !write_file(&job, path, bounce, 1, k);
        end_writer(&job);
    }
    through = false;
    for (unsigned k = 1; !through; k++) {
        int fd = open(path, O_RDONLY);
        assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
        close(fd);
        assert_int_equal(spw_st_reader_open(&job.r, path, NULL), SPW_OK);
        spw_test_fail_call(k);
        spw_st_reader_past_cache(job.r, bounce);
        (void)run_all(&job, 1);
        through = !spw_test_call_fired();
        spw_test_fail_call(0);
        assert_true(job.error.status == SPW_OK || (!through && job.error.status == SPW_EIO));
        spw_st_reader_close(job.r);
    }
    spw_bounce_destroy(bounce);
    tiny_dir_remove(dir);
}

static spw_status
take_ints(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    const uint32_t *ints = data;
    if ((uintptr_t)data % 4 != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "byte %llu is not aligned", (unsigned long long)offset);
    for (uint64_t k = 0; k < bytes / 4; k++)
        if (ints[k] != offset / 4 + k)
            return SPW_RAISE(err, SPW_ECORRUPT, "number %llu", (unsigned long long)(offset / 4 + k));
    *(uint64_t *)ctx += bytes;
    return SPW_OK;
}

/* A file of others: three bytes in front of a tensor of four-byte numbers. */
static void
test_misaligned(void **state)
{
    enum { COUNT = 700000 };
    static uint32_t ints[COUNT];
    char dir[256], path[300], header[256];
    uint64_t length, taken = 0;
    spw_bounce *bounce;
    spw_st_reader *r;
    spw_error err = {0};
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    for (uint32_t i = 0; i < COUNT; i++)
        ints[i] = i;
    length =
        (uint64_t)snprintf(header, sizeof header,
                           "{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"b\":{\"dtype\":\"F32\","
                           "\"shape\":[%d],\"data_offsets\":[3,%d]}}",
                           COUNT, 3 + 4 * COUNT);
    while (length % 8 != 0)
        header[length++] = ' ';
    f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fwrite(&length, 8, 1, f) == 1 && fwrite(header, length, 1, f) == 1 && fwrite("abc", 3, 1, f) == 1);
    assert_int_equal(fwrite(ints, sizeof ints, 1, f), 1);
    fclose(f);
    assert_int_equal(spw_bounce_create(&bounce, 1, NULL), SPW_OK);
    assert_int_equal(spw_st_reader_open(&r, path, NULL), SPW_OK);
    spw_st_reader_past_cache(r, bounce);
    if (spw_st_read_run(r, spw_st_reader_find(r, "b"), 0, sizeof ints, take_ints, &taken, &err) != SPW_OK)
        fail_msg("%s", err.message);
    assert_true(taken == sizeof ints && spw_st_reader_sum(r, false).bytes == sizeof ints);
    spw_st_reader_close(r);
    spw_bounce_destroy(bounce);
    tiny_dir_remove(dir);
}

/* But for the header's end, the file's and what is short. In order, a page is whole as soon as its last part comes. */
static void
test_runs_leave_no_pages(void **state)
{
    static runs job;
    char dir[256], path[300];
    spw_bounce *bounce;
    (void)state;
    dir_make_or_skip(dir);
    snprintf(path, sizeof path, "%s/x", dir);
    assert_int_equal(spw_bounce_create(&bounce, 1, NULL), SPW_OK);
    for (int many = 0; many < 2; many++) {
        uint64_t bytes, all, left, header;
        make_tensors(&job, many == 1);
        cut_runs(&job, 3);
        for (uint32_t k = 0; k < job.count * CUTS; k++)
            job.order[k] = k;
        assert_int_equal(spw_st_writer_create(&job.w, path, job.tensors, job.count, NULL), SPW_OK);
        spw_st_writer_past_cache(job.w, bounce);
        assert_int_equal(run_all(&job, 1), SPW_OK);
        assert_int_equal(spw_st_writer_commit(job.w, NULL), SPW_OK);
        bytes = spw_st_writer_file_bytes(job.w);
        end_writer(&job);
        header = bytes;
        for (uint32_t i = 0; i < job.count; i++)
            header -= tensor_bytes(&job, i);
        all = bytes / (uint64_t)sysconf(_SC_PAGESIZE);
        left = cached_pages(path, bytes);
        print_message("of %llu pages, %llu of them the header's, writing left %llu\n", (unsigned long long)all,
                      (unsigned long long)(header / (uint64_t)sysconf(_SC_PAGESIZE) + 1), (unsigned long long)left);
        assert_true(left <= header / (uint64_t)sysconf(_SC_PAGESIZE) + 2);
        if (many == 1)
            break;
        for (uint32_t i = 0; i < job.count; i++) { /* in halves: short runs are read through the cache */
            for (uint32_t k = 1; k < CUTS; k++)
                job.cuts[i][k] = tensor_bytes(&job, i) / 8 * 4;
        }
        assert_int_equal(spw_st_reader_open(&job.r, path, NULL), SPW_OK);
        spw_st_reader_past_cache(job.r, bounce);
        assert_int_equal(run_all(&job, 1), SPW_OK);
        left = cached_pages(path, bytes);
        print_message("reading left %llu\n", (unsigned long long)left);
        assert_true(left < all / 16); /* what the kernel reads ahead of the header */
        spw_st_reader_close(job.r);
    }
    spw_bounce_destroy(bounce);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crc64),         cmocka_unit_test(test_digest),
        cmocka_unit_test(test_digest_faults), cmocka_unit_test(test_digest_leaves_no_pages),
        cmocka_unit_test(test_runs),          cmocka_unit_test(test_slow_disk),
        cmocka_unit_test(test_two_files),     cmocka_unit_test(test_runs_refused),
        cmocka_unit_test(test_misaligned),    cmocka_unit_test(test_runs_leave_no_pages),
    };
    return cmocka_run_group_tests_name("large files", tests, NULL, NULL);
}
