/*
 * The core of aio: cuts requests into pieces, keeps queue_depth of them in flight per file in order of priority, resumes
 * short transfers, retries EAGAIN and EINTR, and completes each request once.
 *
 * O_DIRECT needs aligned offset, length and address. The part of a request that is aligned goes through the O_DIRECT
 * descriptor; a misaligned head or tail, or all of it when the address is misaligned, through a buffered descriptor of
 * the same file, where the kernel does the rounding that a bounce buffer would do.
 */
#include "aio_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <linux/stat.h>
#include <unistd.h>

enum { PIECES = 512, TRIES_MAX = 1000 };

const char *
spw_aio_backend_name(spw_aio_backend backend)
{
    static const char *const names[SPW_AIO_BACKEND_COUNT] = {"auto", "io_uring", "threads"};
    return (unsigned)backend < SPW_AIO_BACKEND_COUNT ? names[backend] : "unknown";
}

/* ---------------------------------------------------------------- lifetime */

static spw_status
take_request_sync(spw_aio *aio, spw_aio_request *req, spw_error *err)
{
    SPW_TRY(spw_aio_submit(aio, req, err));
    while (spw_aio_wait(aio, 5000000000ull) != req) {
    }
    return req->status == SPW_OK ? SPW_OK : spw_aio_request_error(req, err);
}

/* A real write and read of one block, in a file that is unlinked at once. */
static spw_status
probe(spw_aio *aio, spw_error *err)
{
    const char *dir = aio->options.probe_dir;
    char path[4096];
    spw_region block;
    spw_aio_file *file = NULL;
    spw_aio_request req = {.op = SPW_AIO_WRITE, .bytes = 4096};
    spw_status st;
    int fd;
    if (dir == NULL)
        dir = getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp";
    snprintf(path, sizeof path, "%s/.spw-probe-XXXXXX", dir);
    fd = mkstemp(path);
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "probe file in %s", dir);
    close(fd);
    st = spw_region_map(&block, 8192, 0, err);
    if (st == SPW_OK)
        st = spw_aio_file_open(&file, aio, path, SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE, err);
    (void)unlink(path);
    if (st == SPW_OK) {
        memset(block.base, 0x5a, 4096);
        req.file = file;
        req.buf = block.base;
        st = take_request_sync(aio, &req, err);
    }
    if (st == SPW_OK) {
        req.op = SPW_AIO_READ;
        req.buf = (char *)block.base + 4096;
        st = take_request_sync(aio, &req, err);
    }
    if (st == SPW_OK && memcmp(block.base, (char *)block.base + 4096, 4096) != 0)
        st = SPW_RAISE(err, SPW_ECORRUPT, "probe in %s read back other bytes than it wrote", dir);
    spw_aio_file_close(file);
    spw_region_unmap(&block);
    return st;
}

static spw_status
try_backend(spw_aio *aio, spw_aio_backend kind, spw_error *err)
{
    spw_status st = kind == SPW_AIO_URING ? spw__aio_uring_open(aio, err) : spw__aio_threads_open(aio, err);
    if (st != SPW_OK)
        return st;
    aio->kind = kind;
    st = probe(aio, err);
    if (st != SPW_OK) {
        aio->backend->destroy(aio);
        aio->backend = NULL;
        return st;
    }
    aio->backend->destroy(aio); /* a ring belongs to the thread that uses it first: the real one opens now, unused */
    st = kind == SPW_AIO_URING ? spw__aio_uring_open(aio, err) : spw__aio_threads_open(aio, err);
    if (st != SPW_OK)
        aio->backend = NULL;
    memset(&aio->stats, 0, sizeof aio->stats);
    return st;
}

spw_status
spw_aio_create(spw_aio **out, const spw_aio_options *options, spw_error *err)
{
    spw_aio *aio = spw_mem_zalloc(sizeof *aio);
    spw_error uring_err = {0};
    spw_status st;
    *out = NULL;
    if (aio == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "aio context");
    aio->options = *options;
    if (aio->options.block_bytes == 0)
        aio->options.block_bytes = 1u << 20;
    if (aio->options.queue_depth == 0)
        aio->options.queue_depth = 16;
    if (aio->options.thread_count == 0)
        aio->options.thread_count = 4;
    if (aio->options.block_bytes % 4096 != 0 || (unsigned)options->backend >= SPW_AIO_BACKEND_COUNT) {
        st = SPW_RAISE(err, SPW_EINVAL, "aio: block_size %llu is not a multiple of 4096",
                       (unsigned long long)aio->options.block_bytes);
        goto fail;
    }
    aio->pieces = spw_mem_calloc(PIECES, sizeof *aio->pieces);
    if (aio->pieces == NULL) {
        st = SPW_RAISE(err, SPW_ENOMEM, "aio pieces");
        goto fail;
    }
    for (int i = 0; i < PIECES; i++) {
        aio->pieces[i].next = aio->free_pieces;
        aio->free_pieces = &aio->pieces[i];
    }
    st = SPW_EUNSUPPORTED;
    if (options->backend != SPW_AIO_THREADS)
        st = try_backend(aio, SPW_AIO_URING, &uring_err);
    if (st != SPW_OK && options->backend == SPW_AIO_URING) {
        st = SPW_RAISE(err, st == SPW_ENOMEM ? st : SPW_EUNSUPPORTED, "aio.backend io_uring does not work here: %s",
                       uring_err.message);
        goto fail;
    }
    if (st != SPW_OK) {
        st = try_backend(aio, SPW_AIO_THREADS, err);
        if (st != SPW_OK)
            goto fail;
        snprintf(aio->reason, sizeof aio->reason, "threads (%u threads; %.180s)", aio->options.thread_count,
                 options->backend == SPW_AIO_THREADS ? "asked for" : uring_err.message);
    } else {
        snprintf(aio->reason, sizeof aio->reason, "io_uring (probe I/O succeeded)");
    }
    spw_log(SPW_LOG_INFO, "aio: %s", aio->reason);
    *out = aio;
    return SPW_OK;
fail:
    spw_aio_destroy(aio);
    return st;
}

void
spw_aio_destroy(spw_aio *aio)
{
    if (aio == NULL)
        return;
    for (int i = 0; i < AIO_LISTS; i++)
        aio->pending_head[i] = NULL; /* never started: dropped */
    while (aio->backend != NULL && aio->inflight > 0)
        aio->backend->reap(aio, 100000000);
    if (aio->backend != NULL)
        aio->backend->destroy(aio);
    while (aio->files != NULL)
        spw_aio_file_close(aio->files);
    spw_mem_free(aio->pieces);
    spw_mem_free(aio);
}

spw_aio_backend
spw_aio_backend_of(const spw_aio *aio)
{
    return aio->kind;
}

const char *
spw_aio_reason(const spw_aio *aio)
{
    return aio->reason;
}

/* ---------------------------------------------------------------- files */

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

/* stx_dio_mem_align and stx_dio_offset_align follow stx_mnt_id; older headers end before them. */
enum { STATX_DIO_MEM_AT = 0x98, STATX_DIO_OFFSET_AT = 0x9c };

static uint32_t
direct_align(int fd)
{
    _Alignas(8) unsigned char stx[512] = {0};
    uint32_t mask, mem, offset;
    struct stat st;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, stx) == 0) {
        memcpy(&mask, stx, sizeof mask);
        memcpy(&mem, stx + STATX_DIO_MEM_AT, sizeof mem);
        memcpy(&offset, stx + STATX_DIO_OFFSET_AT, sizeof offset);
        if ((mask & STATX_DIOALIGN) != 0 && offset > 0)
            return mem > offset ? mem : offset;
    }
    if (fstat(fd, &st) == 0 && st.st_blksize >= 512 && st.st_blksize <= 65536)
        return (uint32_t)st.st_blksize;
    return 4096;
}

spw_status
spw_aio_file_open(spw_aio_file **out, spw_aio *aio, const char *path, unsigned flags, spw_error *err)
{
    int mode = (flags & SPW_AIO_OPEN_WRITE) ? O_RDWR : O_RDONLY;
    spw_aio_file *f = spw_mem_zalloc(sizeof *f);
    *out = NULL;
    if (f == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "file handle for %s", path);
    f->direct_fd = -1;
    f->align = 1;
    f->aio = aio;
    f->flags = flags;
    f->path = spw_mem_strdup(path);
    if (f->path == NULL) {
        spw_mem_free(f);
        return SPW_RAISE(err, SPW_ENOMEM, "file handle for %s", path);
    }
    f->buffered_fd = open(path, mode | O_CLOEXEC | ((flags & SPW_AIO_OPEN_CREATE) ? O_CREAT : 0), 0600);
    if (f->buffered_fd < 0) {
        spw_status st = SPW_RAISE_SYS(err, errno, "open %s", path);
        spw_mem_free(f->path);
        spw_mem_free(f);
        return st;
    }
    if ((flags & SPW_AIO_OPEN_BUFFERED) == 0) {
        f->direct_fd = open(path, mode | O_CLOEXEC | O_DIRECT);
        if (f->direct_fd >= 0)
            f->align = direct_align(f->direct_fd);
        else
            spw_log(SPW_LOG_WARN, "%s: O_DIRECT is refused here (%s), using the page cache", path,
                    errno == EINVAL ? "not supported by the file system" : "error");
    }
    f->next = aio->files;
    aio->files = f;
    *out = f;
    return SPW_OK;
}

void
spw_aio_file_close(spw_aio_file *file)
{
    if (file == NULL)
        return;
    for (spw_aio_file **at = &file->aio->files; *at != NULL; at = &(*at)->next) {
        if (*at == file) {
            *at = file->next;
            break;
        }
    }
    if (file->direct_fd >= 0)
        close(file->direct_fd);
    close(file->buffered_fd);
    spw_mem_free(file->path);
    spw_mem_free(file);
}

const char *
spw_aio_file_path(const spw_aio_file *file)
{
    return file->path;
}

bool
spw_aio_file_direct(const spw_aio_file *file)
{
    return file->direct_fd >= 0;
}

uint32_t
spw_aio_file_align(const spw_aio_file *file)
{
    return file->align;
}

int
spw_aio_file_fd(const spw_aio_file *file)
{
    return file->buffered_fd;
}

/* ---------------------------------------------------------------- requests */

spw_status
spw_aio_submit(spw_aio *aio, spw_aio_request *req, spw_error *err)
{
    uint64_t end;
    int list = 2 * (int)req->priority + (req->op != SPW_AIO_READ && req->priority != SPW_AIO_URGENT);
    if (req->file == NULL || (unsigned)req->priority >= SPW_AIO_PRIORITY_COUNT ||
        (req->op != SPW_AIO_FSYNC && (req->bytes == 0 || req->buf == NULL)))
        return SPW_RAISE(err, SPW_EINVAL, "aio request without file, buffer or bytes");
    if (!spw_add_u64(req->offset, req->bytes, &end) || end > (uint64_t)INT64_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "aio request on %s: offset %llu + %llu bytes is too large", req->file->path,
                         (unsigned long long)req->offset, (unsigned long long)req->bytes);
    if (req->op == SPW_AIO_WRITE && (req->file->flags & SPW_AIO_OPEN_WRITE) == 0)
        return SPW_RAISE(err, SPW_EINVAL, "write to %s, which is open for reading", req->file->path);
    req->status = SPW_OK;
    req->sys_errno = 0;
    req->done_bytes = req->issued_bytes = 0;
    req->pieces_inflight = 0;
    req->failed = false;
    req->next = NULL;
    req->submit_ns = spw_now_ns();
    if (aio->pending_head[list] == NULL)
        aio->pending_head[list] = req;
    else
        aio->pending_tail[list]->next = req;
    aio->pending_tail[list] = req;
    aio->stats.requests++;
    return SPW_OK;
}

static void
complete(spw_aio *aio, spw_aio_request *req)
{
    req->done_ns = spw_now_ns();
    req->next = NULL;
    if (aio->done_head == NULL)
        aio->done_head = req;
    else
        aio->done_tail->next = req;
    aio->done_tail = req;
}

/* Fewer bytes than asked for until the next multiple of align, so that what follows is aligned. */
static void
cut_piece(const spw_aio *aio, aio_piece *p, spw_aio_request *req)
{
    const spw_aio_file *f = req->file;
    uint64_t offset = req->offset + req->issued_bytes, left = req->bytes - req->issued_bytes, a = f->align;
    char *buf = (char *)req->buf + req->issued_bytes;
    p->req = req;
    p->op = req->op;
    p->fd = f->buffered_fd;
    p->offset = offset;
    p->buf = buf;
    p->bytes = left < aio->options.block_bytes ? left : aio->options.block_bytes;
    if (f->direct_fd < 0)
        return;
    if (((uintptr_t)buf - offset) % a != 0)
        return; /* the address never meets the alignment: all of it buffered */
    if (offset % a != 0) {
        uint64_t head = a - offset % a;
        p->bytes = left < head ? left : head;
    } else if (left >= a) {
        p->fd = f->direct_fd;
        p->bytes = left < aio->options.block_bytes ? left / a * a : aio->options.block_bytes;
    }
}

static void
count_inflight(spw_aio *aio, spw_aio_op op, int delta)
{
    uint64_t now = spw_now_ns();
    uint32_t *count = op == SPW_AIO_READ ? &aio->reads_inflight : &aio->writes_inflight;
    uint64_t *since = op == SPW_AIO_READ ? &aio->read_since_ns : &aio->write_since_ns;
    uint64_t *busy = op == SPW_AIO_READ ? &aio->stats.read_busy_ns : &aio->stats.write_busy_ns;
    if (delta > 0 && *count == 0)
        *since = now;
    *count += (uint32_t)delta;
    if (delta < 0 && *count == 0)
        *busy += now - *since;
}

static void
start_pieces(spw_aio *aio, int list)
{
    spw_aio_request **at = &aio->pending_head[list], *prev = NULL;
    while (*at != NULL && aio->free_pieces != NULL) {
        spw_aio_request *req = *at;
        bool issued_all;
        while (aio->free_pieces != NULL && req->file->inflight < aio->options.queue_depth && !req->failed &&
               (req->issued_bytes < req->bytes || req->op == SPW_AIO_FSYNC)) {
            aio_piece *p = aio->free_pieces;
            aio->free_pieces = p->next;
            if (req->op == SPW_AIO_FSYNC) {
                *p = (aio_piece){.req = req, .op = req->op, .fd = req->file->buffered_fd};
            } else {
                cut_piece(aio, p, req);
                req->issued_bytes += p->bytes;
            }
            req->pieces_inflight++;
            req->file->inflight++;
            aio->inflight++;
            aio->stats.pieces++;
            count_inflight(aio, req->op, 1);
            aio->backend->submit(aio, p);
            if (req->op == SPW_AIO_FSYNC)
                break;
        }
        issued_all =
            req->failed || (req->op == SPW_AIO_FSYNC ? req->pieces_inflight > 0 : req->issued_bytes == req->bytes);
        if (!issued_all) {
            prev = req;
            at = &req->next;
            continue;
        }
        *at = req->next;
        if (aio->pending_tail[list] == req)
            aio->pending_tail[list] = prev;
        if (req->pieces_inflight == 0)
            complete(aio, req); /* failed, and the last piece came back before this list was looked at again */
    }
}

static void
start_all(spw_aio *aio)
{
    for (int list = 0; list < AIO_LISTS; list++)
        start_pieces(aio, list);
}

static bool
waits_in_list(const spw_aio_request *req)
{
    return req->op != SPW_AIO_FSYNC && req->issued_bytes < req->bytes;
}

static void
end_piece(spw_aio *aio, aio_piece *p)
{
    spw_aio_request *req = p->req;
    req->pieces_inflight--;
    req->file->inflight--;
    aio->inflight--;
    count_inflight(aio, req->op, -1);
    p->next = aio->free_pieces;
    aio->free_pieces = p;
    if (req->pieces_inflight == 0 && !waits_in_list(req))
        complete(aio, req);
}

static void
apply_result(spw_aio *aio, aio_piece *p, int64_t result)
{
    spw_aio_request *req = p->req;
    if (result == -EAGAIN || result == -EINTR) {
        aio->stats.retries++;
        aio->backend->submit(aio, p);
        return;
    }
    if (result < 0 || (result == 0 && p->op != SPW_AIO_FSYNC)) {
        if (!req->failed) {
            req->failed = true;
            req->sys_errno = result < 0 ? (int)-result : 0;
            req->status = result == -ENOSPC ? SPW_ENOSPC : result == -ENOMEM ? SPW_ENOMEM : SPW_EIO;
        }
        end_piece(aio, p);
        return;
    }
    if (p->op != SPW_AIO_FSYNC) {
        req->done_bytes += (uint64_t)result;
        *(p->op == SPW_AIO_READ ? &aio->stats.read_bytes : &aio->stats.write_bytes) += (uint64_t)result;
        if ((uint64_t)result < p->bytes) { /* short: the rest goes on, buffered if it lost its alignment */
            p->offset += (uint64_t)result;
            p->buf += result;
            p->bytes -= (uint64_t)result;
            if ((p->offset | p->bytes | (uintptr_t)p->buf) % req->file->align != 0)
                p->fd = req->file->buffered_fd;
            aio->stats.retries++;
            aio->backend->submit(aio, p);
            return;
        }
    }
    end_piece(aio, p);
}

void
spw__aio_piece_done(spw_aio *aio, aio_piece *p, int64_t result)
{
    if (aio->fault != NULL && p->op != SPW_AIO_FSYNC && result > 0) {
        uint64_t done = (uint64_t)result, delay_ns = 0;
        int errnum = aio->fault(aio->fault_ctx, p->op, p->offset, p->bytes, &done, &delay_ns);
        result = errnum != 0 ? -errnum : (int64_t)done;
        if (delay_ns > 0) {
            p->due_ns = spw_now_ns() + delay_ns;
            p->result = result;
            p->next = aio->delayed;
            aio->delayed = p;
            return;
        }
    }
    apply_result(aio, p, result);
}

/* Lets delayed completions through; returns how long to sleep at most for the next one. */
static uint64_t
release_delayed(spw_aio *aio, uint64_t timeout_ns)
{
    aio_piece *list = aio->delayed;
    uint64_t now = list != NULL ? spw_now_ns() : 0;
    aio->delayed = NULL;
    while (list != NULL) {
        aio_piece *p = list;
        list = p->next;
        if (p->due_ns <= now) {
            apply_result(aio, p, p->result);
        } else {
            if (p->due_ns - now < timeout_ns)
                timeout_ns = p->due_ns - now;
            p->next = aio->delayed;
            aio->delayed = p;
        }
    }
    return timeout_ns;
}

static spw_aio_request *
take_done(spw_aio *aio)
{
    spw_aio_request *req = aio->done_head;
    if (req != NULL) {
        aio->done_head = req->next;
        req->next = NULL;
    }
    return req;
}

spw_aio_request *
spw_aio_poll(spw_aio *aio)
{
    spw_aio_request *req;
    start_all(aio);
    req = take_done(aio);
    if (req != NULL)
        return req;
    if (aio->inflight > 0)
        aio->backend->reap(aio, 0);
    release_delayed(aio, 0);
    start_all(aio);
    return take_done(aio);
}

spw_aio_request *
spw_aio_wait(spw_aio *aio, uint64_t timeout_ns)
{
    spw_aio_request *req = spw_aio_poll(aio);
    uint64_t sleep_ns;
    if (req != NULL || timeout_ns == 0)
        return req;
    sleep_ns = release_delayed(aio, timeout_ns);
    if (aio->done_head == NULL && !aio->woken)
        aio->backend->reap(aio, sleep_ns);
    aio->woken = false;
    release_delayed(aio, 0);
    return take_done(aio);
}

void
spw_aio_wake(spw_aio *aio)
{
    aio->backend->wake(aio);
}

spw_status
spw_aio_request_error(const spw_aio_request *req, spw_error *err)
{
    const char *op = req->op == SPW_AIO_READ ? "read" : req->op == SPW_AIO_WRITE ? "write" : "fsync";
    spw_status st = req->status;
    char cause[128];
    if (st == SPW_OK)
        return SPW_OK;
    if (req->sys_errno != 0)
        return spw_error_raise(err, st, "%s of %s at offset %llu: wanted %llu bytes, got %llu: %s", op, req->file->path,
                               (unsigned long long)req->offset, (unsigned long long)req->bytes,
                               (unsigned long long)req->done_bytes, strerror_r(req->sys_errno, cause, sizeof cause));
    return spw_error_raise(err, st, "%s of %s at offset %llu: wanted %llu bytes, got %llu: the file ends there", op,
                           req->file->path, (unsigned long long)req->offset, (unsigned long long)req->bytes,
                           (unsigned long long)req->done_bytes);
}

void
spw_aio_get_stats(const spw_aio *aio, spw_aio_stats *out)
{
    *out = aio->stats;
}

void
spw_test_aio_fault(spw_aio *aio, spw_aio_fault_fn fn, void *ctx)
{
    aio->fault = fn;
    aio->fault_ctx = ctx;
}
