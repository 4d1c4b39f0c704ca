/*
 * aio_uring.c - the backend on io_uring: one ring, registered files, one registered region, submission in batches.
 *
 * A ring made with SINGLE_ISSUER and DEFER_TASKRUN saves the kernel locks and interrupts, and belongs to the thread
 * that enables it. So it is created disabled and enabled by the first transfer or sleep; when the context is handed to
 * another thread (which is allowed while nothing is in flight) the ring is built anew there. The wake descriptor is
 * polled inside the ring, so that one system call sleeps for completions, wakes and the timeout.
 *
 * With sqpoll a kernel thread takes the entries; such a ring has none of those flags. With iopoll whole blocks go to a
 * second ring whose completions come without interrupts: somebody has to ask for them, so a sleep becomes a spin while
 * that ring has transfers. All else (parts of blocks, flushes, the wake) stays in the first ring.
 */
#include "aio_internal.h"

#ifdef SPW_HAVE_URING

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER 0
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN 0
#endif

enum {
    ENTRY_COUNT_MIN = 16,
    ENTRY_COUNT_MAX = 4096,
    FILES_EXPECTED = 8, /* with full queues; beyond that pieces wait in their files */
    MEMLOCK_TRIES = 10, /* locked memory of a closed ring is given back a little later: a second in all */
    SLOT_COUNT = 256,   /* registered descriptors; further ones are used unregistered */
    CQE_BATCH = 64,
    RING_ENTRY_BYTES = 64 + 2 * 16 + 4, /* one submission, two completions, one index */
};
static const uint64_t MEMLOCK_PAUSE_NS = 1000000; /* doubled with each try */
/*
 * The region is registered in parts: only where all pages of a registered buffer are huge ones does the kernel see them as
 * such, so one small page in it (the rest of a region at its end, or a huge page that was not to be had) would cut every
 * transfer of that buffer into pieces of 4 KiB, of which a disk takes a few hundred to a request.
 */
static const uint64_t BUFFER_BYTES_MIN = 64ull << 20, HUGE_BYTES = 2ull << 20;
enum { BUFFERS_WANTED = 8192 };            /* the kernel's limit is twice that, and 1 GiB for each */
static const unsigned SQPOLL_IDLE_MS = 20; /* then the kernel's thread sleeps until it is woken */
static bool iopoll_pretend;

typedef struct uring_backend {
    /* Fixed after create. */
    int wake_fd;
    const spw_region *fixed; /* NULL: none to register */
    uint32_t entry_count;
    bool sqpoll, iopoll;
    /* Owned by the context's thread. */
    struct io_uring ring, polled; /* polled: only with iopoll */
    bool ring_ready, polled_ready;
    uint32_t polled_inflight, polled_queued;
    bool enabled;
    bool single_issuer;
    pid_t owner_tid; /* of a single-issuer ring, once enabled */
    bool files_registered;
    int slots[SLOT_COUNT]; /* descriptors, as registered; -1: free */
    uint64_t fixed_bytes;  /* 0: not registered */
    uint64_t whole_bytes;  /* of the region, in huge pages; what is left is the last buffer */
    uint64_t buffer_bytes;
    struct iovec *iovecs; /* the region, cut; kept because a rebuilt ring registers it again */
    uint32_t iovec_count;
    uint32_t inflight; /* pieces in the ring */
    uint32_t queued;   /* entries that no enter has handed over */
    bool wake_armed;   /* a poll of wake_fd is in the ring */
    bool trouble_logged;
    spw__aio_list refused; /* pieces that could not be started; reap() returns them */
} uring_backend;

/* ---------------------------------------------------------------- the ring */

static int
read_disabled_sysctl(void)
{
    char text[16] = "";
    FILE *f = fopen("/proc/sys/kernel/io_uring_disabled", "re");
    if (f == NULL)
        return 0;
    if (fgets(text, sizeof text, f) == NULL)
        text[0] = '\0';
    fclose(f);
    return atoi(text);
}

static void
memlock_limit_text(char *text, size_t text_bytes)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        snprintf(text, text_bytes, "unknown");
    else if (limit.rlim_cur == RLIM_INFINITY)
        snprintf(text, text_bytes, "unlimited");
    else
        spw_format_bytes(text, text_bytes, limit.rlim_cur);
}

/* Whether waiting for others to give back locked memory has any sense. */
static bool
memlock_may_suffice(uint64_t bytes)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur >= bytes;
}

static spw_status
raise_setup(spw_error *err, int errnum)
{
    char limit[32];
    int disabled = read_disabled_sysctl();
    switch (errnum) {
    case ENOSYS: return SPW_RAISE(err, SPW_EUNSUPPORTED, "io_uring_setup: ENOSYS, this kernel has no io_uring");
    case EPERM:
        if (disabled > 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "io_uring_setup: EPERM, sysctl kernel.io_uring_disabled is %d",
                             disabled);
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "io_uring_setup: EPERM, forbidden by seccomp or a security module");
    case ENOMEM:
        memlock_limit_text(limit, sizeof limit);
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "io_uring_setup: ENOMEM, the memlock limit is %s", limit);
    default: spw_error_raise_sys(err, errnum, "io_uring_setup"); break;
    }
    if (err != NULL)
        err->status = SPW_EUNSUPPORTED;
    return SPW_EUNSUPPORTED;
}

/* The region in the ring; a refusal costs speed only. */
static void
register_fixed(uring_backend *u)
{
    int rc = -ENOMEM;
    u->fixed_bytes = 0;
    if (u->iovec_count == 0)
        return;
    for (int tries = 0; tries < MEMLOCK_TRIES && rc == -ENOMEM; tries++) {
        if (tries > 0 && !memlock_may_suffice(u->fixed->bytes))
            break;
        if (tries > 0)
            spw_sleep_ns(MEMLOCK_PAUSE_NS << tries);
        rc = SPW_CALL_NEG(ENOMEM, io_uring_register_buffers(&u->ring, u->iovecs, u->iovec_count));
    }
    if (rc == 0) {
        u->fixed_bytes = u->fixed->bytes;
    } else {
        char need[32], limit[32], reason[128];
        memlock_limit_text(limit, sizeof limit);
        spw_log(SPW_LOG_WARN,
                "aio: io_uring did not register the staging region (%s): it needs %s beside what this user's processes "
                "have locked already, and the memlock limit (ulimit -l) is %s; plain transfers are used",
                strerror_r(-rc, reason, sizeof reason), spw_format_bytes(need, sizeof need, u->fixed->bytes), limit);
    }
}

static void
ring_exit(uring_backend *u)
{
    if (u->ring_ready)
        io_uring_queue_exit(&u->ring);
    if (u->polled_ready)
        io_uring_queue_exit(&u->polled);
    u->ring_ready = u->polled_ready = u->enabled = u->wake_armed = false;
    u->queued = 0;
}

static int
queue_init(uring_backend *u, struct io_uring *ring, unsigned flags)
{
    int rc = -ENOMEM;
    for (int tries = 0; tries < MEMLOCK_TRIES && rc == -ENOMEM; tries++) {
        struct io_uring_params params = {.flags = flags | IORING_SETUP_CLAMP, .sq_thread_idle = SQPOLL_IDLE_MS};
        if (tries > 0 && !memlock_may_suffice(u->entry_count * RING_ENTRY_BYTES))
            break;
        if (tries > 0)
            spw_sleep_ns(MEMLOCK_PAUSE_NS << tries);
        rc = SPW_CALL_NEG(ENOMEM, io_uring_queue_init_params(u->entry_count, ring, &params));
    }
    return rc;
}

/* Best flags first: what the kernel does not know it answers with EINVAL. */
static int
ring_init(uring_backend *u)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN |
            IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_R_DISABLED,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG | IORING_SETUP_R_DISABLED, IORING_SETUP_R_DISABLED};
    int rc = -EINVAL;
    u->single_issuer = false;
    if (u->sqpoll)
        rc = queue_init(u, &u->ring, IORING_SETUP_SQPOLL | IORING_SETUP_R_DISABLED);
    for (size_t i = 0; !u->sqpoll && i < sizeof flags / sizeof *flags && rc == -EINVAL; i++) {
        rc = queue_init(u, &u->ring, flags[i]);
        u->single_issuer = IORING_SETUP_SINGLE_ISSUER != 0 && i == 0;
    }
    if (rc != 0)
        return rc;
    u->ring_ready = true;
    if (!(u->ring.features & IORING_FEAT_EXT_ARG) || !(u->ring.features & IORING_FEAT_NODROP)) {
        ring_exit(u);
        return -ENOSYS; /* before Linux 5.11 */
    }
    if (u->iopoll) {
        rc = queue_init(u, &u->polled, iopoll_pretend ? 0 : IORING_SETUP_IOPOLL);
        if (rc != 0) {
            ring_exit(u);
            return rc;
        }
        u->polled_ready = true;
    }
    if (u->entry_count > u->ring.sq.ring_entries)
        u->entry_count = u->ring.sq.ring_entries; /* clamped */
    u->files_registered = SPW_CALL_NEG(ENOMEM, io_uring_register_files(&u->ring, u->slots, SLOT_COUNT)) == 0;
    register_fixed(u);
    return 0;
}

/*
 * Makes the ring usable by this thread: enables it at first use, builds another one when the context changed threads.
 * A negative errno when that fails.
 */
static int
ring_adopt(uring_backend *u)
{
    pid_t tid = (pid_t)syscall(SYS_gettid);
    int rc;
    if (u->ring_ready && u->enabled && (!u->single_issuer || u->owner_tid == tid))
        return 0;
    if (u->ring_ready && u->enabled) {
        SPW_ASSERT(u->inflight == 0);
        if (u->inflight > 0)
            return -EXDEV;
        ring_exit(u);
    }
    if (!u->ring_ready) {
        rc = ring_init(u);
        if (rc != 0)
            return rc;
    }
    /* io_uring_enable_rings(), which the shared library of liburing 2.3 declares and does not export. */
    if (syscall(__NR_io_uring_register, u->ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0) < 0)
        return -errno;
    u->enabled = true;
    u->owner_tid = tid;
    return 0;
}

/* ---------------------------------------------------------------- create and destroy */

static void
uring_destroy(void *backend)
{
    uring_backend *u = backend;
    if (u == NULL)
        return;
    ring_exit(u);
    spw_mem_free(u->iovecs);
    spw_mem_free(u);
}

static spw_status
uring_create(void **out, const spw_aio_options *options, int wake_fd, spw_error *err)
{
    spw_status st;
    int rc;
    uring_backend *u = spw_mem_zalloc(sizeof *u);
    *out = NULL;
    if (u == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "aio io_uring backend (%zu bytes)", sizeof *u);
    u->wake_fd = wake_fd;
    u->sqpoll = options->sqpoll;
    u->iopoll = options->iopoll;
    u->entry_count = options->queue_depth * FILES_EXPECTED;
    if (u->entry_count < ENTRY_COUNT_MIN)
        u->entry_count = ENTRY_COUNT_MIN;
    if (u->entry_count > ENTRY_COUNT_MAX)
        u->entry_count = ENTRY_COUNT_MAX;
    for (int i = 0; i < SLOT_COUNT; i++)
        u->slots[i] = -1;
    if (options->fixed != NULL) {
        uint64_t bytes = options->fixed->bytes;
        u->fixed = options->fixed;
        u->whole_bytes = bytes / HUGE_BYTES * HUGE_BYTES;
        u->buffer_bytes = BUFFER_BYTES_MIN;
        while (u->whole_bytes / u->buffer_bytes > BUFFERS_WANTED)
            u->buffer_bytes *= 2;
        u->iovec_count =
            (uint32_t)((u->whole_bytes + u->buffer_bytes - 1) / u->buffer_bytes) + (bytes > u->whole_bytes);
        u->iovecs = spw_mem_calloc(u->iovec_count, sizeof *u->iovecs);
        if (u->iovecs == NULL) {
            st = SPW_RAISE(err, SPW_ENOMEM, "list of %u registered buffers", u->iovec_count);
            goto fail;
        }
        for (uint64_t i = 0, at = 0; i < u->iovec_count; at += u->iovecs[i++].iov_len) {
            uint64_t left = (at < u->whole_bytes ? u->whole_bytes : bytes) - at;
            u->iovecs[i].iov_base = (char *)u->fixed->base + at;
            u->iovecs[i].iov_len = left < u->buffer_bytes ? left : u->buffer_bytes;
        }
    }
    rc = ring_init(u);
    if (rc != 0) {
        st = raise_setup(err, -rc);
        goto fail;
    }
    *out = u;
    return SPW_OK;
fail:
    uring_destroy(u);
    return st;
}

/* ---------------------------------------------------------------- files */

static bool
slot_update(uring_backend *u, int slot, int fd)
{
    /* Refused on a thread that does not own the ring: then the slot stays as it is. */
    return io_uring_register_files_update(&u->ring, (unsigned)slot, &fd, 1) == 1;
}

static void
uring_file_add(void *backend, spw_aio_file *file)
{
    uring_backend *u = backend;
    for (int i = 0; i < SPW__AIO_FD_COUNT; i++) {
        int slot = 0;
        if (file->fds[i] < 0 || !u->ring_ready || !u->files_registered)
            continue;
        while (slot < SLOT_COUNT && u->slots[slot] >= 0)
            slot++;
        if (slot < SLOT_COUNT && slot_update(u, slot, file->fds[i])) {
            u->slots[slot] = file->fds[i];
            file->slots[i] = slot;
        }
    }
}

static void
uring_file_remove(void *backend, spw_aio_file *file)
{
    uring_backend *u = backend;
    bool stuck = false;
    for (int i = 0; i < SPW__AIO_FD_COUNT; i++) {
        int slot = file->slots[i];
        if (slot < 0)
            continue;
        u->slots[slot] = -1;
        stuck |= u->files_registered && u->ring_ready && !slot_update(u, slot, -1);
    }
    /* A ring of another thread would keep the file open; without transfers in it, it is built anew at the next use. */
    if (stuck && u->inflight == 0)
        ring_exit(u);
}

/* ---------------------------------------------------------------- transfers */

/* The registered buffer that holds all of the transfer, or -1. */
static int
fixed_index(const uring_backend *u, const char *buf, uint64_t bytes)
{
    const char *base;
    uint64_t at;
    if (u->fixed_bytes == 0)
        return -1;
    base = u->fixed->base;
    if (buf < base || (uint64_t)(buf - base) >= u->fixed_bytes || bytes > u->fixed_bytes - (uint64_t)(buf - base))
        return -1;
    at = (uint64_t)(buf - base);
    if (at >= u->whole_bytes)
        return (int)u->iovec_count - 1;
    return at / u->buffer_bytes == (at + bytes - 1) / u->buffer_bytes && at + bytes <= u->whole_bytes
               ? (int)(at / u->buffer_bytes)
               : -1;
}

/* Whole blocks only: the kernel polls for nothing else. */
static bool
goes_polled(const uring_backend *u, const spw__aio_piece *p)
{
    return u->polled_ready && !spw__aio_is_sync(p->req->op) && (p->fd_idx == SPW__AIO_FD_DIRECT || iopoll_pretend);
}

static void
fill_entry(uring_backend *u, struct io_uring_sqe *sqe, spw__aio_piece *p)
{
    bool polled = goes_polled(u, p); /* nothing is registered there */
    int slot = u->files_registered && !polled ? p->file->slots[p->fd_idx] : -1;
    int fd = slot >= 0 ? slot : p->file->fds[p->fd_idx];
    char *buf = spw__aio_transfer_buf(p);
    uint64_t bytes = spw__aio_transfer_bytes(p), offset = spw__aio_transfer_offset(p);
    int fixed = polled ? -1 : fixed_index(u, buf, bytes);
    if (spw__aio_is_sync(p->req->op))
        io_uring_prep_fsync(sqe, fd, p->req->op == SPW_AIO_FDATASYNC ? IORING_FSYNC_DATASYNC : 0);
    else if (p->req->op == SPW_AIO_READ && fixed >= 0)
        io_uring_prep_read_fixed(sqe, fd, buf, (unsigned)bytes, offset, fixed);
    else if (p->req->op == SPW_AIO_READ)
        io_uring_prep_read(sqe, fd, buf, (unsigned)bytes, offset);
    else if (fixed >= 0)
        io_uring_prep_write_fixed(sqe, fd, buf, (unsigned)bytes, offset, fixed);
    else
        io_uring_prep_write(sqe, fd, buf, (unsigned)bytes, offset);
    if (slot >= 0)
        sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, p);
}

/* Takes back the entries that the kernel has not seen; reap() returns their pieces with this result. */
static void
refuse_unsubmitted(uring_backend *u, struct io_uring *ring, int result)
{
    struct io_uring_sq *sq = &ring->sq;
    unsigned head = io_uring_smp_load_acquire(sq->khead), mask = *sq->kring_mask;
    for (unsigned at = head; at != sq->sqe_tail; at++) {
        spw__aio_piece *p = (spw__aio_piece *)(uintptr_t)sq->sqes[at & mask].user_data;
        if (p == NULL) {
            u->wake_armed = false;
            continue;
        }
        p->result = result;
        u->inflight--;
        if (ring == &u->polled)
            u->polled_inflight--;
        spw__aio_list_push(&u->refused, p);
    }
    sq->sqe_head = sq->sqe_tail = head;
    io_uring_smp_store_release(sq->ktail, head);
}

static void
enter_failed(uring_backend *u, struct io_uring *ring, int rc)
{
    char reason[128];
    if (rc == -EINTR || rc == -ETIME)
        return;
    if (rc != -EAGAIN && rc != -EBUSY && rc != -ENOMEM) {
        if (!u->trouble_logged)
            spw_log(SPW_LOG_WARN, "aio: io_uring_enter: %s", strerror_r(-rc, reason, sizeof reason));
        u->trouble_logged = true;
        if (!u->sqpoll || ring == &u->polled) /* else the kernel's thread may be taking them */
            refuse_unsubmitted(u, ring, rc);
    }
    spw_sleep_ns(100000); /* what is in flight may still land; the kernel may be short of something for now */
}

static void
uring_flush(void *backend)
{
    uring_backend *u = backend;
    int rc;
    if (!u->enabled)
        return;
    if (u->queued > 0) {
        rc = SPW_CALL_NEG(EIO, io_uring_submit(&u->ring));
        if (rc < 0)
            enter_failed(u, &u->ring, rc);
        u->queued = io_uring_sq_ready(&u->ring);
    }
    if (u->polled_queued > 0) {
        rc = SPW_CALL_NEG(EIO, io_uring_submit(&u->polled));
        if (rc < 0)
            enter_failed(u, &u->polled, rc);
        u->polled_queued = io_uring_sq_ready(&u->polled);
    }
}

static struct io_uring_sqe *
take_entry(uring_backend *u)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
    if (sqe == NULL) {
        uring_flush(u);
        sqe = io_uring_get_sqe(&u->ring);
    }
    if (sqe != NULL)
        u->queued++;
    return sqe;
}

static bool
uring_start(void *backend, spw__aio_piece *p)
{
    uring_backend *u = backend;
    struct io_uring_sqe *sqe;
    int rc;
    if (u->inflight + 1 >= u->entry_count) /* one entry is for the wake */
        return false;
    rc = ring_adopt(u);
    if (rc < 0) {
        p->result = rc == -EAGAIN || rc == -EINTR ? -EBUSY : rc;
        spw__aio_list_push(&u->refused, p);
        return true;
    }
    if (goes_polled(u, p)) {
        sqe = io_uring_get_sqe(&u->polled); /* as many entries as pieces */
        if (sqe != NULL) {
            u->polled_inflight++;
            u->polled_queued++;
        }
    } else {
        sqe = take_entry(u);
    }
    if (sqe == NULL) {
        p->result = -EAGAIN; /* comes back and is tried again, a little later each time */
        spw__aio_list_push(&u->refused, p);
        return true;
    }
    fill_entry(u, sqe, p);
    u->inflight++;
    return true;
}

static void
wake_arm(uring_backend *u)
{
    struct io_uring_sqe *sqe;
    if (u->wake_armed)
        return;
    sqe = take_entry(u);
    if (sqe == NULL)
        return; /* the next reap tries again */
    io_uring_prep_poll_add(sqe, u->wake_fd, POLLIN);
    io_uring_sqe_set_data(sqe, NULL);
    u->wake_armed = true;
}

static bool
wake_drain(const uring_backend *u)
{
    uint64_t count;
    ssize_t r;
    do
        r = read(u->wake_fd, &count, sizeof count);
    while (r < 0 && errno == EINTR);
    return r == (ssize_t)sizeof count;
}

static void
take_completions(uring_backend *u, struct io_uring *ring, spw__aio_list *done, bool *woken)
{
    struct io_uring_cqe *cqes[CQE_BATCH];
    unsigned n;
    while ((n = io_uring_peek_batch_cqe(ring, cqes, CQE_BATCH)) > 0) {
        for (unsigned i = 0; i < n; i++) {
            spw__aio_piece *p = io_uring_cqe_get_data(cqes[i]);
            if (p == NULL) {
                u->wake_armed = false;
                if (wake_drain(u))
                    *woken = true;
                continue;
            }
            p->result = cqes[i]->res;
            u->inflight--;
            if (ring == &u->polled)
                u->polled_inflight--;
            spw__aio_list_push(done, p);
        }
        io_uring_cq_advance(ring, n);
    }
}

/* Asks both rings in turn, because nothing interrupts a sleep for the polled one. */
static void
spin(uring_backend *u, uint64_t timeout_ns, spw__aio_list *done, bool *woken)
{
    uint64_t begin_ns = spw_now_ns();
    do {
        (void)io_uring_get_events(&u->polled);
        take_completions(u, &u->polled, done, woken);
        (void)io_uring_get_events(&u->ring);
        take_completions(u, &u->ring, done, woken);
    } while (done->head == NULL && !*woken && spw_now_ns() - begin_ns < timeout_ns);
}

static void
take_refused(uring_backend *u, spw__aio_list *done)
{
    spw__aio_piece *p;
    while ((p = spw__aio_list_pop(&u->refused)) != NULL)
        spw__aio_list_push(done, p);
}

/* Without a ring there is nothing to wait for but the wake. */
static void
sleep_without_ring(const uring_backend *u, uint64_t timeout_ns, bool *woken)
{
    struct timespec ts = {.tv_sec = (time_t)(timeout_ns / 1000000000u), .tv_nsec = (long)(timeout_ns % 1000000000u)};
    struct pollfd fd = {.fd = u->wake_fd, .events = POLLIN};
    if (ppoll(&fd, 1, timeout_ns == UINT64_MAX ? NULL : &ts, NULL) > 0 && wake_drain(u))
        *woken = true;
}

static void
uring_reap(void *backend, uint64_t timeout_ns, spw__aio_list *done, bool *woken)
{
    uring_backend *u = backend;
    take_refused(u, done);
    if (done->head != NULL)
        timeout_ns = 0;
    if (timeout_ns == 0 && !u->enabled)
        return;
    if (timeout_ns > 0 && ring_adopt(u) < 0) {
        sleep_without_ring(u, timeout_ns, woken);
        return;
    }
    if (timeout_ns > 0) {
        wake_arm(u);
        if (!u->wake_armed && timeout_ns > 1000000)
            timeout_ns = 1000000;
    }
    take_completions(u, &u->ring, done, woken);
    if (timeout_ns == 0 || done->head != NULL || *woken || u->polled_inflight > 0) {
        uring_flush(u);
        if (u->polled_inflight > 0)
            spin(u, done->head != NULL || *woken ? 0 : timeout_ns, done, woken);
        else
            take_completions(u, &u->ring, done, woken);
    } else { /* one system call hands over and sleeps */
        struct __kernel_timespec ts = {.tv_sec = (long long)(timeout_ns / 1000000000u),
                                       .tv_nsec = (long long)(timeout_ns % 1000000000u)};
        struct io_uring_cqe *cqe;
        int rc = spw__call_fails()          ? -EIO
                 : timeout_ns == UINT64_MAX ? io_uring_submit_and_wait(&u->ring, 1)
                                            : io_uring_submit_and_wait_timeout(&u->ring, &cqe, 1, &ts, NULL);
        if (rc < 0)
            enter_failed(u, &u->ring, rc);
        u->queued = io_uring_sq_ready(&u->ring);
        take_completions(u, &u->ring, done, woken);
    }
    take_refused(u, done);
}

static uint64_t
uring_fixed_bytes(const void *backend)
{
    return ((const uring_backend *)backend)->fixed_bytes;
}

const spw__aio_backend_ops spw__aio_uring_ops = {
    .create = uring_create,
    .destroy = uring_destroy,
    .file_add = uring_file_add,
    .file_remove = uring_file_remove,
    .start = uring_start,
    .flush = uring_flush,
    .reap = uring_reap,
    .fixed_bytes = uring_fixed_bytes,
};

void
spw_test_aio_iopoll_pretend(bool on)
{
    iopoll_pretend = on;
}

#else

void
spw_test_aio_iopoll_pretend(bool on)
{
    (void)on;
}

#endif /* SPW_HAVE_URING */
