/*
 * The digest of a checkpoint's file, CRC-64/XZ of its bytes, from the file: a save has it from what it writes. Blocks are summed by
 * themselves, so several threads read a file at once, each a block in pieces: together they have the memory that one had for a
 * whole block.
 *
 * Where memory is short, what the page cache has is read there and the rest past it: what several threads read ahead fills a
 * cgroup faster than the kernel gives pages back, which kills the run. Elsewhere the cache is left with what is read again soon.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK = 1 << 20, THREADS_MAX = 4, PIECE = BLOCK / THREADS_MAX, PAGE_LEAST = 4096, SPARE_SHARE = 4 };

typedef struct digest_job {
    const char *path;
    int fd, direct_fd; /* direct_fd -1: the file system has no direct I/O, or there is memory enough */
    uint64_t bytes;
    bool spare;   /* leave nothing in the page cache that was not there */
    char *pieces; /* (threads, PIECE), page-aligned, one of each thread */
    pthread_mutex_t lock;
    /* Under lock. */
    uint64_t parts;  /* of the blocks that were summed */
    spw_error error; /* the first */
} digest_job;

/* A small file has no use for more than it has blocks. */
static uint32_t
thread_count(uint64_t block_count)
{
    uint64_t most = block_count > THREADS_MAX ? THREADS_MAX : block_count > 0 ? block_count : 1;
    uint32_t cpus = spw_cpu_allowed_count();
    return cpus < most ? cpus : (uint32_t)most;
}

uint64_t
spw__checkpoint_digest_bytes(uint64_t file_bytes)
{
    uint64_t count = file_bytes / BLOCK + 1, threads = thread_count(count);
    return threads * PIECE + (threads - 1) * spw_touched_bytes(SPW_STACK_BYTES);
}

/* All pages of the block at this offset are in the page cache; also said of a file that belongs to somebody else. */
static bool
is_cached(const digest_job *job, uint64_t at, uint64_t bytes)
{
    unsigned char pages[BLOCK / PAGE_LEAST];
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE), count = (bytes + page_bytes - 1) / page_bytes;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, job->fd, (off_t)at);
    bool cached = map != MAP_FAILED && mincore(map, bytes, pages) == 0;
    for (size_t i = 0; cached && i < count; i++)
        cached = (pages[i] & 1) != 0;
    if (map != MAP_FAILED)
        munmap(map, bytes);
    return cached;
}

/* Up to a piece's end or the file's. A place that direct I/O does not take (after a short read) goes through the cache. */
static ssize_t
read_piece(const digest_job *job, bool cached, char *piece, uint64_t at)
{
    size_t bytes = PIECE - at % PIECE;
    if (!cached && job->direct_fd >= 0) {
        ssize_t got = SPW_CALL(EINVAL, pread(job->direct_fd, piece, bytes, (off_t)at));
        if (got >= 0 || errno != EINVAL)
            return got;
    }
    return pread(job->fd, piece, bytes, (off_t)at);
}

static spw_status
sum_block(const digest_job *job, uint32_t block_idx, uint32_t worker_idx, uint64_t *parts, spw_error *err)
{
    uint64_t first = (uint64_t)block_idx * BLOCK, at = first, end = job->bytes - at < BLOCK ? job->bytes : at + BLOCK;
    char *piece = job->pieces + (uint64_t)worker_idx * PIECE;
    bool cached = !job->spare || is_cached(job, at, end - at);
    while (at < end) {
        ssize_t got = read_piece(job, cached, piece, at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? SPW_RAISE_SYS(err, errno, "read %s", job->path)
                           : SPW_RAISE(err, SPW_EIO, "%s shrank", job->path);
        at += (uint64_t)got;
        *parts ^= spw_crc64_part(piece, (uint64_t)got, job->bytes - at);
    }
    if (!cached && job->direct_fd < 0)
        (void)posix_fadvise(job->fd, (off_t)first, BLOCK, POSIX_FADV_DONTNEED);
    return SPW_OK;
}

static void
sum_part(void *ctx, uint32_t block_idx, uint32_t worker_idx)
{
    digest_job *job = ctx;
    spw_error own = {0};
    uint64_t parts = 0;
    bool wanted;
    pthread_mutex_lock(&job->lock);
    wanted = job->error.status == SPW_OK;
    pthread_mutex_unlock(&job->lock);
    if (!wanted)
        return;
    (void)sum_block(job, block_idx, worker_idx, &parts, &own);
    pthread_mutex_lock(&job->lock);
    job->parts ^= parts;
    if (own.status != SPW_OK)
        spw_error_keep_first(&job->error, &own);
    pthread_mutex_unlock(&job->lock);
}

/* job's file is open. */
static spw_status
sum_file(digest_job *job, uint64_t *digest_out, spw_error *err)
{
    uint64_t count = (job->bytes + BLOCK - 1) / BLOCK;
    uint32_t threads = thread_count(count);
    spw_region pieces = {0};
    spw_pool *pool = NULL;
    spw_status st = spw_region_map(&pieces, (uint64_t)threads * PIECE, SPW_REGION_TABLE, err);
    if (st == SPW_OK && threads > 1)
        st = spw_pool_create(&pool, threads, "spw-digest", err);
    if (st == SPW_OK) {
        job->pieces = pieces.base;
        pthread_mutex_init(&job->lock, NULL);
        spw_pool_run(pool, (uint32_t)count, sum_part, job);
        pthread_mutex_destroy(&job->lock);
        st = job->error.status;
        if (st != SPW_OK && err != NULL)
            *err = job->error;
    }
    if (st == SPW_OK)
        *digest_out = spw_crc64_whole(job->parts, job->bytes);
    spw_pool_destroy(pool);
    spw_region_unmap(&pieces);
    return st;
}

bool
spw__checkpoint_spare(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && spw_memory_room_bytes(0) / SPARE_SHARE < (uint64_t)info.st_size;
}

spw_status
spw__checkpoint_digest(const char *path, bool spare, uint64_t *digest_out, spw_error *err)
{
    digest_job job = {.path = path, .spare = spare, .direct_fd = -1, .fd = open(path, O_RDONLY | O_CLOEXEC)};
    struct stat info;
    spw_status st;
    if (job.fd < 0 || fstat(job.fd, &info) != 0) {
        st = SPW_RAISE_SYS(err, errno, "open %s", path);
        if (job.fd >= 0)
            close(job.fd);
        return st;
    }
    job.bytes = (uint64_t)info.st_size;
    if (spare) {
        job.direct_fd = SPW_CALL(EINVAL, open(path, O_RDONLY | O_DIRECT | O_CLOEXEC));
        (void)posix_fadvise(job.fd, 0, 0, POSIX_FADV_RANDOM); /* nothing ahead of what is asked for */
    }
    st = sum_file(&job, digest_out, err);
    if (job.direct_fd >= 0)
        close(job.direct_fd);
    close(job.fd);
    return st;
}

spw_status
spw__checkpoint_sum_ranks(spw_engine *e, spw_st_sum sums[SPW_DIGEST_COUNT], spw_error *err)
{
    uint64_t bytes = SPW_DIGEST_COUNT * sizeof *sums;
    void *said;
    spw_status st = spw__engine_tell(e, sums, &said, bytes, err);
    const spw_st_sum *all = said;
    memset(sums, 0, bytes);
    for (uint32_t i = 0; st == SPW_OK && i < spw__engine_world(e) * SPW_DIGEST_COUNT; i++) {
        sums[i % SPW_DIGEST_COUNT].parts ^= all[i].parts;
        sums[i % SPW_DIGEST_COUNT].bytes += all[i].bytes;
    }
    spw_mem_free(said);
    return st;
}
