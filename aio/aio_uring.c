/*
 * The io_uring backend: one ring, submissions batched until the core polls or waits, an eventfd read in the ring for
 * wakes. The ring is opened at first use, because with SINGLE_ISSUER it belongs to that thread.
 */
#include "aio_internal.h"
#include <errno.h>

#ifndef SPW_HAVE_URING

spw_status
spw__aio_uring_open(spw_aio *aio, spw_error *err)
{
    (void)aio;
    return SPW_RAISE(err, SPW_EUNSUPPORTED, "built without liburing");
}

#else

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { ENTRIES = 1024, FIXED_MAX = 64 };
static const uint64_t fixed_bytes_max = 1ull << 30; /* the kernel's limit for one registered buffer */

typedef struct uring {
    struct io_uring ring;
    bool open, armed, fixed;
    int wake_fd;
    uint64_t wake_value;
    int open_errno;
} uring;

static void
register_fixed(spw_aio *aio, uring *u)
{
    const spw_region *r = aio->options.fixed;
    struct iovec parts[FIXED_MAX];
    unsigned count = 0;
    int rc;
    if (r == NULL || r->bytes == 0 || r->bytes > FIXED_MAX * fixed_bytes_max)
        return;
    for (uint64_t at = 0; at < r->bytes; at += fixed_bytes_max)
        parts[count++] = (struct iovec){.iov_base = (char *)r->base + at,
                                        .iov_len = r->bytes - at < fixed_bytes_max ? r->bytes - at : fixed_bytes_max};
    rc = io_uring_register_buffers(&u->ring, parts, count);
    u->fixed = rc == 0;
    if (rc != 0)
        spw_log(SPW_LOG_WARN, "io_uring: %llu bytes could not be registered (%s; see ulimit -l), plain reads are used",
                (unsigned long long)r->bytes, strerror(-rc));
}

static bool
ensure_open(spw_aio *aio)
{
    static const unsigned flag_sets[] = {
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
        0
    };
    uring *u = aio->state;
    int rc = -ENOSYS;
    if (u->open)
        return true;
    for (size_t i = 0; i < sizeof flag_sets / sizeof flag_sets[0]; i++) {
        rc = io_uring_queue_init(ENTRIES, &u->ring, flag_sets[i]);
        if (rc == 0)
            break;
    }
    u->open = rc == 0;
    u->open_errno = -rc;
    if (u->open)
        register_fixed(aio, u);
    return u->open;
}

static struct io_uring_sqe *
get_sqe(uring *u)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    if (sqe == NULL) {
        (void)io_uring_submit(&u->ring); /* the queue was full; it is empty after a submit */
        sqe = io_uring_get_sqe(&u->ring);
    }
    return sqe;
}

static void
uring_submit(spw_aio *aio, aio_piece *p)
{
    uring *u = aio->state;
    struct io_uring_sqe *sqe;
    int fixed_idx = -1;
    if (!ensure_open(aio) || (sqe = get_sqe(u)) == NULL) {
        spw__aio_piece_done(aio, p, u->open ? -EIO : -u->open_errno);
        return;
    }
    if (u->fixed && p->op != SPW_AIO_FSYNC) {
        const spw_region *r = aio->options.fixed;
        uint64_t at = (uint64_t)(p->buf - (char *)r->base);
        if (p->buf >= (char *)r->base && at + p->bytes <= r->bytes &&
            at / fixed_bytes_max == (at + p->bytes - 1) / fixed_bytes_max)
            fixed_idx = (int)(at / fixed_bytes_max);
    }
    if (p->op == SPW_AIO_FSYNC)
        io_uring_prep_fsync(sqe, p->fd, IORING_FSYNC_DATASYNC);
    else if (p->op == SPW_AIO_READ && fixed_idx >= 0)
        io_uring_prep_read_fixed(sqe, p->fd, p->buf, (unsigned)p->bytes, p->offset, fixed_idx);
    else if (p->op == SPW_AIO_READ)
        io_uring_prep_read(sqe, p->fd, p->buf, (unsigned)p->bytes, p->offset);
    else if (fixed_idx >= 0)
        io_uring_prep_write_fixed(sqe, p->fd, p->buf, (unsigned)p->bytes, p->offset, fixed_idx);
    else
        io_uring_prep_write(sqe, p->fd, p->buf, (unsigned)p->bytes, p->offset);
    io_uring_sqe_set_data(sqe, p);
}

static void
uring_reap(spw_aio *aio, uint64_t timeout_ns)
{
    uring *u = aio->state;
    struct io_uring_cqe *cqe = NULL;
    if (!ensure_open(aio)) {
        if (timeout_ns > 0)
            spw_sleep_ns(1000000);
        return;
    }
    if (!u->armed) {
        struct io_uring_sqe *sqe = get_sqe(u);
        if (sqe != NULL) {
            io_uring_prep_read(sqe, u->wake_fd, &u->wake_value, sizeof u->wake_value, 0);
            io_uring_sqe_set_data(sqe, NULL);
            u->armed = true;
        }
    }
    if (timeout_ns == UINT64_MAX) {
        (void)io_uring_submit_and_wait(&u->ring, 1);
    } else if (timeout_ns > 0) {
        struct __kernel_timespec ts = {.tv_sec = (long long)(timeout_ns / 1000000000u),
                                       .tv_nsec = (long long)(timeout_ns % 1000000000u)};
        (void)io_uring_submit_and_wait_timeout(&u->ring, &cqe, 1, &ts, NULL);
    } else {
        (void)io_uring_submit_and_get_events(&u->ring);
    }
    for (;;) { /* the queue moves on before the core sees a piece: the core may submit again */
        aio_piece *p;
        int result;
        if (io_uring_peek_cqe(&u->ring, &cqe) != 0 || cqe == NULL)
            return;
        p = io_uring_cqe_get_data(cqe);
        result = cqe->res;
        io_uring_cqe_seen(&u->ring, cqe);
        if (p == NULL) {
            u->armed = false;
            aio->woken = true;
        } else {
            spw__aio_piece_done(aio, p, result);
        }
    }
}

static void
uring_wake(spw_aio *aio)
{
    uring *u = aio->state;
    uint64_t one = 1;
    ssize_t rc = write(u->wake_fd, &one, sizeof one);
    (void)rc; /* EAGAIN: the counter is full, so a wake is pending already */
}

static void
uring_destroy(spw_aio *aio)
{
    uring *u = aio->state;
    if (u->open)
        io_uring_queue_exit(&u->ring);
    close(u->wake_fd);
    spw_mem_free(u);
    aio->state = NULL;
}

spw_status
spw__aio_uring_open(spw_aio *aio, spw_error *err)
{
    static const aio_backend backend = {uring_submit, uring_reap, uring_wake, uring_destroy};
    uring *u = spw_mem_zalloc(sizeof *u);
    if (u == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "io_uring backend");
    u->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (u->wake_fd < 0) {
        spw_mem_free(u);
        return SPW_RAISE_SYS(err, errno, "eventfd");
    }
    aio->state = u;
    aio->backend = &backend;
    return SPW_OK;
}

#endif
