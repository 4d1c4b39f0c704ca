/*
 * The digest of a file that nobody reads for anything else, CRC-64/XZ of its bytes. Stretches of a buffer's size are summed by
 * themselves, by several threads at once.
 */
#include "files_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

enum { THREADS_MAX = 4 };

typedef struct digest_job {
    spw__large_file file;
    uint64_t bytes;
    spw_bounce *bounce;
    pthread_mutex_t lock;
    /* Under lock. */
    uint64_t parts;  /* of the stretches that were summed */
    spw_error error; /* the first */
} digest_job;

/* A small file has no use for more than it has stretches. */
static uint32_t
thread_count(uint64_t stretches)
{
    uint64_t most = stretches > THREADS_MAX ? THREADS_MAX : stretches > 0 ? stretches : 1;
    uint32_t cpus = spw_cpu_allowed_count();
    return cpus < most ? cpus : (uint32_t)most;
}

uint64_t
spw_file_digest_bytes(void)
{
    return (thread_count(THREADS_MAX) - 1) * spw_touched_bytes(SPW_STACK_BYTES);
}

static void
sum_stretch(void *ctx, uint32_t idx, uint32_t worker_idx)
{
    digest_job *job = ctx;
    uint64_t at = (uint64_t)idx * SPW_BOUNCE_BYTES, parts = 0;
    uint64_t bytes = job->bytes - at < SPW_BOUNCE_BYTES ? job->bytes - at : SPW_BOUNCE_BYTES;
    spw_error own = {0};
    bool wanted;
    char *buffer;
    (void)worker_idx;
    pthread_mutex_lock(&job->lock);
    wanted = job->error.status == SPW_OK;
    pthread_mutex_unlock(&job->lock);
    if (!wanted)
        return;
    buffer = spw__bounce_take(job->bounce);
    if (spw__bounce_read(&job->file, buffer, at, bytes, &own) == SPW_OK)
        parts = spw_crc64_part(spw__bounce_at(buffer, at), bytes, job->bytes - at - bytes);
    spw__bounce_give(job->bounce, buffer);
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
    uint64_t count = (job->bytes + SPW_BOUNCE_BYTES - 1) / SPW_BOUNCE_BYTES;
    uint32_t threads = thread_count(count);
    spw_pool *pool = NULL;
    if (threads > 1)
        SPW_TRY(spw_pool_create(&pool, threads, "spw-digest", err));
    pthread_mutex_init(&job->lock, NULL);
    spw_pool_run(pool, (uint32_t)count, sum_stretch, job);
    pthread_mutex_destroy(&job->lock);
    spw_pool_destroy(pool);
    *digest_out = spw_crc64_whole(job->parts, job->bytes);
    if (job->error.status != SPW_OK && err != NULL)
        *err = job->error;
    return job->error.status;
}

spw_status
spw_file_digest(const char *path, spw_bounce *bounce, uint64_t *digest_out, spw_error *err)
{
    digest_job job = {.file = {.fd = open(path, O_RDONLY | O_CLOEXEC)}, .bounce = bounce};
    struct stat info;
    spw_status st;
    if (job.file.fd < 0 || fstat(job.file.fd, &info) != 0) {
        st = SPW_RAISE_SYS(err, errno, "open %s", path);
        if (job.file.fd >= 0)
            close(job.file.fd);
        return st;
    }
    job.bytes = (uint64_t)info.st_size;
    spw__large_open(&job.file, path, O_RDONLY);
    st = sum_file(&job, digest_out, err);
    if (job.file.direct_fd >= 0)
        close(job.file.direct_fd);
    close(job.file.fd);
    return st;
}
