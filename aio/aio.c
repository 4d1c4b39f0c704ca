/*
 * aio.c - the context as its caller sees it: create with a probe, submit, poll, wait, wake, counters.
 *
 * The probe moves real bytes, because a kernel may offer io_uring and a sandbox forbid it at the first transfer. It
 * runs on a backend of its own, so that the one that stays has not yet met the thread that will use it. Cutting and
 * landing are in aio_piece.c, files in aio_file.c.
 */
#include "aio_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    QUEUE_DEPTH_MAX = 4096,
    THREAD_COUNT_MAX = 256,
    BLOCK_BYTES_MAX = 1 << 30,    /* one transfer's result is an int in io_uring */
    RING_ENTRIES_EACH = 8,        /* of io_uring, for each piece in flight; see aio_uring.c */
    RING_ENTRY_BYTES = 128,       /* one to submit and two that complete */
    THREAD_STACK_BYTES = 40 << 10 /* touched by a thread that only calls the kernel */
};

const char *
spw_aio_backend_name(spw_aio_backend backend)
{
    static const char *const names[SPW_AIO_BACKEND_COUNT] = {"auto", "io_uring", "threads"};
    return (unsigned)backend < SPW_AIO_BACKEND_COUNT ? names[backend] : "unknown";
}

static const char *
op_name(spw_aio_op op)
{
    static const char *const names[SPW_AIO_OP_COUNT] = {"read", "write", "fsync", "fdatasync"};
    return names[op];
}

/* ---------------------------------------------------------------- probe */

/* Opened as real files are, O_DIRECT where it may be; without a name where the file system knows that, so that a kill leaves nothing behind. */
static spw_status
open_probe_file(const char *dir, int *fd_out, spw_error *err)
{
    char path[4096];
    int fd;
    if (dir == NULL || dir[0] == '\0')
        dir = getenv("TMPDIR");
    if (dir == NULL || dir[0] == '\0')
        dir = "/tmp";
    *fd_out = SPW_CALL(EOPNOTSUPP, open(dir, O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600));
    if (*fd_out >= 0)
        return SPW_OK;
    if ((size_t)snprintf(path, sizeof path, "%s/spw-probe-XXXXXX", dir) >= sizeof path)
        return SPW_RAISE(err, SPW_EINVAL, "probe folder %.64s...: the path is too long", dir);
    fd = SPW_CALL(EACCES, mkostemp(path, O_CLOEXEC));
    if (fd < 0 && errno == ENOENT &&
        access(dir, F_OK) != 0) /* not made here: where a disk is not mounted it would lie on another one */
        return SPW_RAISE(err, SPW_ENOENT, "folder %s does not exist; mkdir -p makes it, if its disk is mounted", dir);
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "folder %s cannot be written to (probe file %s)", dir, path);
    *fd_out = SPW_CALL(EINVAL, open(path, O_RDWR | O_DIRECT | O_CLOEXEC));
    unlink(path);
    if (*fd_out < 0)
        *fd_out = fd;
    else
        close(fd);
    return SPW_OK;
}

/* One transfer of a block from start to end, on a backend that nobody else uses. */
static spw_status
probe_transfer(const spw__aio_backend_ops *ops, void *backend, spw__aio_piece *p, spw_error *err)
{
    const uint64_t limit_ns = 30ull * 1000000000u;
    uint64_t begin_ns = spw_now_ns();
    spw__aio_list done = {0};
    bool woken = false;
    if (!ops->start(backend, p))
        return SPW_RAISE(err, SPW_ESYS, "probe %s was not accepted", op_name(p->req->op));
    do
        ops->reap(backend, limit_ns, &done, &woken);
    while (done.head == NULL && spw_now_ns() - begin_ns < limit_ns);
    if (done.head == NULL)
        return SPW_RAISE(err, SPW_ETIMEDOUT, "probe %s did not finish within 30 s", op_name(p->req->op));
    if (p->result < 0)
        return SPW_RAISE_SYS(err, (int)-p->result, "probe %s of %llu bytes", op_name(p->req->op),
                             (unsigned long long)p->io_bytes);
    if ((uint64_t)p->result != p->io_bytes)
        return SPW_RAISE(err, SPW_EIO, "probe %s moved %lld of %llu bytes%s", op_name(p->req->op), (long long)p->result,
                         (unsigned long long)p->io_bytes,
                         p->req->op == SPW_AIO_WRITE ? ": a full disk, or ulimit -f?" : "");
    return SPW_OK;
}

/* Writes a block through the backend and reads it back. */
static spw_status
probe_backend(const spw__aio_backend_ops *ops, const spw_aio_options *options, int wake_fd, int fd, char *block,
              spw_error *err)
{
    spw_aio_options own = *options;
    spw_aio_file file = {.fds = {fd, fd}, .slots = {-1, -1}};
    spw_aio_request req = {.file = &file, .op = SPW_AIO_WRITE};
    spw__aio_piece p = {.req = &req, .file = &file, .io_bytes = SPW__AIO_PAGE_BYTES, .fd_idx = SPW__AIO_FD_DIRECT};
    void *backend = NULL;
    spw_status st;
    own.fixed = NULL;
    own.thread_count = 1;
    own.queue_depth = 1; /* sqpoll and iopoll stay: the probe is what decides about them */
    SPW_TRY(ops->create(&backend, &own, wake_fd, err));
    ops->file_add(backend, &file);
    for (int i = 0; i < SPW__AIO_PAGE_BYTES; i++)
        block[i] = (char)(i * 7 + 1);
    p.io_buf = block;
    st = probe_transfer(ops, backend, &p, err);
    if (st == SPW_OK) {
        req.op = SPW_AIO_READ;
        p.io_buf = block + SPW__AIO_PAGE_BYTES;
        st = probe_transfer(ops, backend, &p, err);
    }
    if (st == SPW_OK && memcmp(block, block + SPW__AIO_PAGE_BYTES, SPW__AIO_PAGE_BYTES) != 0)
        st = SPW_RAISE(err, SPW_ECORRUPT, "probe read other bytes than were written");
    ops->file_remove(backend, &file);
    ops->destroy(backend); /* waits in the kernel or joins, so a block still under way is safe */
    return st;
}

/* ---------------------------------------------------------------- create and destroy */

static const spw__aio_backend_ops *
backend_ops(spw_aio_backend kind)
{
#ifdef SPW_HAVE_URING
    if (kind == SPW_AIO_URING)
        return &spw__aio_uring_ops;
#endif
    return kind == SPW_AIO_THREADS ? &spw__aio_threads_ops : NULL;
}

static spw_status
backend_try(spw_aio *aio, spw_aio_backend kind, int probe_fd, char *block, spw_error *err)
{
    const spw__aio_backend_ops *ops = backend_ops(kind);
    if (ops == NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "this build has no liburing");
    SPW_TRY(probe_backend(ops, &aio->options, aio->wake_fd, probe_fd, block, err));
    SPW_TRY(ops->create(&aio->backend, &aio->options, aio->wake_fd, err));
    aio->ops = ops;
    aio->backend_kind = kind;
    return SPW_OK;
}

/* io_uring with sqpoll and iopoll as far as the probe gets through with them. */
static spw_status
uring_try(spw_aio *aio, int probe_fd, char *block, spw_error *err)
{
    bool *const extras[2] = {&aio->options.iopoll, &aio->options.sqpoll};
    static const char *const names[2] = {"iopoll", "sqpoll"};
    spw_error refusal = {0};
    spw_status st = backend_try(aio, SPW_AIO_URING, probe_fd, block, &refusal);
    for (int i = 0; i < 2 && st != SPW_OK && st != SPW_ENOMEM; i++) {
        spw_error without = {0};
        if (!*extras[i])
            continue;
        *extras[i] = false;
        st = backend_try(aio, SPW_AIO_URING, probe_fd, block, &without);
        if (st == SPW_OK)
            spw_log(SPW_LOG_WARN, "aio: io_uring without %s, which failed its probe: %s", names[i], refusal.message);
        refusal = without;
    }
    if (st != SPW_OK)
        spw_error_keep_first(err, &refusal);
    return st;
}

static void
reason_set(spw_aio *aio, const spw_error *refusal)
{
    char size[32];
    bool uring = aio->backend_kind == SPW_AIO_URING;
    int n = snprintf(aio->reason, sizeof aio->reason, "%s%s%s (probe I/O succeeded",
                     spw_aio_backend_name(aio->backend_kind), uring && aio->options.sqpoll ? " sqpoll" : "",
                     uring && aio->options.iopoll ? " iopoll" : "");
    uint64_t fixed_bytes = aio->ops->fixed_bytes(aio->backend);
    size_t left = sizeof aio->reason - (size_t)n;
    if (refusal->status != SPW_OK)
        snprintf(aio->reason + n, left, "; io_uring: %.280s)", refusal->message);
    else if (fixed_bytes > 0)
        snprintf(aio->reason + n, left, ", %s registered)", spw_format_bytes(size, sizeof size, fixed_bytes));
    else
        snprintf(aio->reason + n, left, "%s", uring && aio->options.fixed != NULL ? ", buffers not registered)" : ")");
}

static spw_status
backend_choose(spw_aio *aio, spw_error *err)
{
    spw_error refusal = {0};
    spw_region block = {0};
    spw_status st;
    int probe_fd = -1;
    st = spw_region_map(&block, 2 * SPW__AIO_PAGE_BYTES, SPW_REGION_TABLE, err);
    if (st == SPW_OK)
        st = open_probe_file(aio->options.probe_dir, &probe_fd, err);
    if (st != SPW_OK)
        goto out;
    if (aio->options.backend != SPW_AIO_AUTO) {
        st = aio->options.backend == SPW_AIO_URING ? uring_try(aio, probe_fd, block.base, err)
                                                   : backend_try(aio, aio->options.backend, probe_fd, block.base, err);
        if (st != SPW_OK && st != SPW_ENOMEM) {
            spw_error_wrap(err, "aio backend %s", spw_aio_backend_name(aio->options.backend));
            st = SPW_EUNSUPPORTED;
            if (err != NULL)
                err->status = st;
        }
    } else {
        st = uring_try(aio, probe_fd, block.base, &refusal);
        if (st == SPW_ENOMEM) {
            spw_error_keep_first(err, &refusal); /* short of memory is not short of io_uring */
            goto out;
        }
        if (st != SPW_OK)
            st = backend_try(aio, SPW_AIO_THREADS, probe_fd, block.base, err);
    }
    if (st == SPW_OK) {
        reason_set(aio, &refusal);
        spw_log(SPW_LOG_INFO, "aio: %s", aio->reason);
    }
out:
    if (probe_fd >= 0)
        close(probe_fd);
    spw_region_unmap(&block);
    return st;
}

static spw_status
options_check(const spw_aio_options *options, spw_aio_options *out, spw_error *err)
{
    *out = *options;
    if ((unsigned)options->backend >= SPW_AIO_BACKEND_COUNT)
        return SPW_RAISE(err, SPW_EINVAL, "aio backend %d does not exist", (int)options->backend);
    if (options->block_bytes % SPW__AIO_PAGE_BYTES != 0 || options->block_bytes > BLOCK_BYTES_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "aio block_bytes %llu is not a multiple of 4096 up to 1 GiB",
                         (unsigned long long)options->block_bytes);
    if (options->queue_depth > QUEUE_DEPTH_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "aio queue_depth %u is above %d", options->queue_depth, QUEUE_DEPTH_MAX);
    if (options->thread_count > THREAD_COUNT_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "aio thread_count %u is above %d", options->thread_count, THREAD_COUNT_MAX);
    if (out->block_bytes == 0)
        out->block_bytes = 1 << 20;
    if (out->queue_depth == 0)
        out->queue_depth = 16;
    if (out->thread_count == 0)
        out->thread_count = 4;
    if (out->fixed != NULL && out->fixed->bytes == 0)
        out->fixed = NULL;
    return SPW_OK;
}

spw_status
spw_aio_create(spw_aio **out, const spw_aio_options *options, spw_error *err)
{
    static const spw_aio_options defaults;
    spw_aio_options checked;
    spw_status st;
    spw_aio *aio;
    *out = NULL;
    SPW_TRY(options_check(options != NULL ? options : &defaults, &checked, err));
    aio = spw_mem_zalloc(sizeof *aio);
    if (aio == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "aio context (%zu bytes)", sizeof *aio);
    aio->options = checked;
    aio->bounce_bytes = checked.block_bytes;
    if (aio->bounce_bytes < SPW__AIO_BOUNCE_BYTES_MIN)
        aio->bounce_bytes = SPW__AIO_BOUNCE_BYTES_MIN;
    aio->wake_fd = SPW_CALL(EMFILE, eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (aio->wake_fd < 0) {
        st = SPW_RAISE_SYS(err, errno, "eventfd for aio");
        goto fail;
    }
    /* Resident only once misaligned requests come; aligned ones never touch it. */
    st = spw_region_map(&aio->bounce_region, SPW__AIO_BOUNCE_COUNT * aio->bounce_bytes, SPW_REGION_LAZY, err);
    if (st != SPW_OK) {
        spw_error_wrap(err, "bounce buffers of aio");
        goto fail;
    }
    for (int i = 0; i < SPW__AIO_BOUNCE_COUNT; i++)
        aio->bounce_free[aio->bounce_free_count++] = (char *)aio->bounce_region.base + i * aio->bounce_bytes;
    st = backend_choose(aio, err);
    if (st != SPW_OK)
        goto fail;
    aio->options.probe_dir = NULL; /* the caller's string; not kept */
    *out = aio;
    return SPW_OK;
fail:
    spw_aio_destroy(aio);
    return st;
}

uint64_t
spw_aio_memory_bytes(const spw_aio_options *options, uint32_t device_count)
{
    uint64_t depth = options->queue_depth > 0 ? options->queue_depth : 16;
    uint64_t threads = options->thread_count > 0 ? options->thread_count : 4;
    uint64_t ring = depth * RING_ENTRIES_EACH * RING_ENTRY_BYTES; /* of io_uring, or else threads */
    uint64_t stacks = options->backend == SPW_AIO_URING ? 0 : threads * spw_touched_bytes(THREAD_STACK_BYTES);
    return sizeof(spw_aio) + device_count * depth * sizeof(spw__aio_piece) +
           SPW__AIO_BOUNCE_COUNT * spw_touched_bytes(SPW__AIO_PAGE_BYTES) + (stacks > ring ? stacks : ring);
}

uint64_t
spw_aio_bounce_bytes(const spw_aio_options *options)
{
    uint64_t block = options->block_bytes;
    return SPW__AIO_BOUNCE_COUNT * (block > SPW__AIO_BOUNCE_BYTES_MIN ? block : SPW__AIO_BOUNCE_BYTES_MIN);
}

void
spw_aio_destroy(spw_aio *aio)
{
    if (aio == NULL)
        return;
    if (aio->backend != NULL) {
        spw__aio_drain(aio, NULL);
        while (aio->files != NULL)
            spw_aio_file_close(aio->files);
        aio->ops->destroy(aio->backend);
    }
    spw_region_unmap(&aio->bounce_region);
    if (aio->wake_fd >= 0)
        close(aio->wake_fd);
    spw_mem_free(aio);
}

spw_aio_backend
spw_aio_backend_of(const spw_aio *aio)
{
    return aio->backend_kind;
}

const char *
spw_aio_reason(const spw_aio *aio)
{
    return aio->reason;
}

/* ---------------------------------------------------------------- requests */

spw_status
spw_aio_submit(spw_aio *aio, spw_aio_request *req, spw_error *err)
{
    const unsigned need = req->op == SPW_AIO_READ ? SPW_AIO_OPEN_READ : SPW_AIO_OPEN_WRITE;
    uint64_t end;
    if (req->file == NULL || req->file->aio != aio)
        return SPW_RAISE(err, SPW_EINVAL, "aio request for a file of another context");
    if ((unsigned)req->op >= SPW_AIO_OP_COUNT || (unsigned)req->priority >= SPW_AIO_PRIORITY_COUNT)
        return SPW_RAISE(err, SPW_EINVAL, "%s: unknown op %d or priority %d", req->file->path, (int)req->op,
                         (int)req->priority);
    if (!spw__aio_is_sync(req->op)) {
        if (req->bytes == 0 || req->buf == NULL)
            return SPW_RAISE(err, SPW_EINVAL, "%s %s: zero bytes or no buffer", op_name(req->op), req->file->path);
        if ((req->file->flags & need) == 0)
            return SPW_RAISE(err, SPW_EINVAL, "%s %s: the file is not open for that", op_name(req->op),
                             req->file->path);
        if (!spw_add_u64(req->offset, req->bytes, &end) || end > INT64_MAX)
            return SPW_RAISE(err, SPW_EINVAL, "%s %s: %llu bytes at %llu end beyond any file", op_name(req->op),
                             req->file->path, (unsigned long long)req->bytes, (unsigned long long)req->offset);
    }
    req->status = SPW_OK;
    req->sys_errno = 0;
    req->done_bytes = 0;
    req->issued_bytes = 0;
    req->pieces_inflight = 0;
    req->failed = false;
    req->start_ns = req->done_ns = 0;
    req->submit_ns = spw_now_ns();
    aio->stats.requests++;
    spw__aio_enqueue(req);
    return SPW_OK;
}

spw_aio_request *
spw_aio_poll(spw_aio *aio)
{
    if (aio->finished.head == NULL)
        spw__aio_turn(aio, 0);
    return spw__aio_queue_pop(&aio->finished);
}

spw_aio_request *
spw_aio_wait(spw_aio *aio, uint64_t timeout_ns)
{
    uint64_t now = spw_now_ns();
    uint64_t deadline_ns = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
    for (;;) {
        spw_aio_request *req;
        if (aio->finished.head == NULL) /* else what the caller submits for each goes to the kernel together */
            spw__aio_turn(aio, deadline_ns);
        req = spw__aio_queue_pop(&aio->finished);
        if (req != NULL)
            return req;
        if (aio->woken) {
            aio->woken = false;
            return NULL;
        }
        if (deadline_ns != UINT64_MAX && spw_now_ns() >= deadline_ns)
            return NULL;
    }
}

void
spw_aio_wake(spw_aio *aio)
{
    int saved_errno = errno; /* may be called from a signal handler */
    uint64_t one = 1;
    while (write(aio->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ; /* EAGAIN: the counter is full, which is as good as set */
    errno = saved_errno;
}

spw_status
spw_aio_request_error(const spw_aio_request *req, spw_error *err)
{
    const char *path = req->file->path, *cause = req->op == SPW_AIO_READ ? "end of file" : "no progress";
    char text[128];
    if (req->sys_errno != 0)
        cause = strerror_r(req->sys_errno, text, sizeof text);
    if (spw__aio_is_sync(req->op))
        spw_error_raise(err, req->status, "%s %.400s: %s", op_name(req->op), path, cause);
    else
        spw_error_raise(err, req->status, "%s %.400s at offset %llu: wanted %llu bytes, got %llu: %s", op_name(req->op),
                        path, (unsigned long long)req->offset, (unsigned long long)req->bytes,
                        (unsigned long long)req->done_bytes, cause);
    if (err != NULL)
        err->sys_errno = req->sys_errno;
    return req->status;
}

/* ---------------------------------------------------------------- counters */

void
spw_aio_get_stats(const spw_aio *aio, spw_aio_stats *out)
{
    uint64_t now = spw_now_ns();
    *out = aio->stats;
    if (aio->busy_count[0] > 0)
        out->read_busy_ns += now - aio->busy_begin_ns[0];
    if (aio->busy_count[1] > 0)
        out->write_busy_ns += now - aio->busy_begin_ns[1];
}
