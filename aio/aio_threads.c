/*
 * aio_threads.c - the backend that works everywhere: a few threads that call pread, pwrite and fsync.
 *
 * One lock guards the queues, one per class so that an urgent piece overtakes what waits here, and the list of finished
 * pieces. The context's thread sleeps in ppoll on two eventfds: "something finished" and the caller's wake. A piece
 * belongs to a worker from the moment it leaves a queue until it is on the finished list.
 */
#include "aio_internal.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

typedef struct threads_backend {
    /* Fixed after create. */
    int wake_fd, done_fd;
    uint32_t thread_count; /* that run */
    pthread_t *threads;
    bool lock_ready, cond_ready;
    /* Under lock. */
    pthread_mutex_t lock;
    pthread_cond_t work_ready;
    spw__aio_list queues[SPW__AIO_CLASS_COUNT];
    spw__aio_list done;
    bool stopping;
} threads_backend;

static int64_t
transfer(const spw__aio_piece *p)
{
    int fd = p->file->fds[p->fd_idx];
    char *buf = spw__aio_transfer_buf(p);
    size_t bytes = (size_t)spw__aio_transfer_bytes(p);
    off_t offset = (off_t)spw__aio_transfer_offset(p);
    ssize_t r;
    switch (p->req->op) {
    case SPW_AIO_READ: r = SPW_CALL(EIO, pread(fd, buf, bytes, offset)); break;
    case SPW_AIO_WRITE: r = SPW_CALL(EIO, pwrite(fd, buf, bytes, offset)); break;
    case SPW_AIO_FSYNC: r = SPW_CALL(EIO, fsync(fd)); break;
    default: r = SPW_CALL(EIO, fdatasync(fd)); break;
    }
    return r < 0 ? -(int64_t)errno : (int64_t)r;
}

static void
eventfd_signal(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ; /* EAGAIN: the counter is full, which is as good as set */
}

static bool
eventfd_drain(int fd)
{
    uint64_t count;
    ssize_t r;
    do
        r = read(fd, &count, sizeof count);
    while (r < 0 && errno == EINTR);
    return r == (ssize_t)sizeof count;
}

static void *
worker(void *arg)
{
    threads_backend *b = arg;
    pthread_mutex_lock(&b->lock);
    for (;;) {
        spw__aio_piece *p = NULL;
        bool first;
        for (uint32_t c = 0; c < SPW__AIO_CLASS_COUNT && p == NULL; c++)
            p = spw__aio_list_pop(&b->queues[c]);
        if (p == NULL) {
            if (b->stopping)
                break;
            pthread_cond_wait(&b->work_ready, &b->lock);
            continue;
        }
        pthread_mutex_unlock(&b->lock);
        p->result = transfer(p);
        pthread_mutex_lock(&b->lock);
        first = b->done.head == NULL;
        spw__aio_list_push(&b->done, p);
        if (first)
            eventfd_signal(b->done_fd);
    }
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

static void
threads_destroy(void *backend)
{
    threads_backend *b = backend;
    if (b == NULL)
        return;
    if (b->thread_count > 0) {
        pthread_mutex_lock(&b->lock);
        b->stopping = true;
        pthread_cond_broadcast(&b->work_ready);
        pthread_mutex_unlock(&b->lock);
        for (uint32_t i = 0; i < b->thread_count; i++)
            pthread_join(b->threads[i], NULL);
    }
    if (b->cond_ready)
        pthread_cond_destroy(&b->work_ready);
    if (b->lock_ready)
        pthread_mutex_destroy(&b->lock);
    if (b->done_fd >= 0)
        close(b->done_fd);
    spw_mem_free(b->threads);
    spw_mem_free(b);
}

static spw_status
threads_create(void **out, const spw_aio_options *options, int wake_fd, spw_error *err)
{
    spw_status st;
    sigset_t all, old;
    int rc = 0;
    threads_backend *b = spw_mem_zalloc(sizeof *b);
    *out = NULL;
    if (b == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "aio threads backend (%zu bytes)", sizeof *b);
    b->wake_fd = wake_fd;
    b->done_fd = -1;
    b->threads = spw_mem_calloc(options->thread_count, sizeof *b->threads);
    if (b->threads == NULL) {
        st = SPW_RAISE(err, SPW_ENOMEM, "handles of %u aio threads", options->thread_count);
        goto fail;
    }
    b->lock_ready = pthread_mutex_init(&b->lock, NULL) == 0;
    b->cond_ready = pthread_cond_init(&b->work_ready, NULL) == 0;
    if (!b->lock_ready || !b->cond_ready) {
        st = SPW_RAISE(err, SPW_ESYS, "lock of the aio threads");
        goto fail;
    }
    b->done_fd = SPW_CALL(EMFILE, eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (b->done_fd < 0) {
        st = SPW_RAISE_SYS(err, errno, "eventfd for aio threads");
        goto fail;
    }
    sigfillset(&all); /* signals go to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (rc == 0 && b->thread_count < options->thread_count) {
        rc = spw__call_fails() ? EAGAIN : pthread_create(&b->threads[b->thread_count], NULL, worker, b);
        if (rc == 0)
            pthread_setname_np(b->threads[b->thread_count++], "spw-aio");
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        st = SPW_RAISE_SYS(err, rc, "start of aio thread %u of %u " SPW_THREAD_LIMITS, b->thread_count + 1,
                           options->thread_count);
        goto fail;
    }
    *out = b;
    return SPW_OK;
fail:
    threads_destroy(b);
    return st;
}

static void
threads_file_add(void *backend, spw_aio_file *file)
{
    (void)backend;
    (void)file; /* descriptors need no preparation here */
}

static bool
threads_start(void *backend, spw__aio_piece *p)
{
    threads_backend *b = backend;
    pthread_mutex_lock(&b->lock);
    spw__aio_list_push(&b->queues[p->class_idx], p);
    pthread_cond_signal(&b->work_ready);
    pthread_mutex_unlock(&b->lock);
    return true;
}

static void
threads_flush(void *backend)
{
    (void)backend; /* start() has handed the pieces over */
}

static bool
take_done(threads_backend *b, spw__aio_list *done)
{
    spw__aio_piece *p;
    pthread_mutex_lock(&b->lock);
    while ((p = spw__aio_list_pop(&b->done)) != NULL)
        spw__aio_list_push(done, p);
    pthread_mutex_unlock(&b->lock);
    return done->head != NULL;
}

static void
threads_reap(void *backend, uint64_t timeout_ns, spw__aio_list *done, bool *woken)
{
    threads_backend *b = backend;
    struct pollfd fds[2] = {{.fd = b->done_fd, .events = POLLIN}, {.fd = b->wake_fd, .events = POLLIN}};
    struct timespec ts = {.tv_sec = (time_t)(timeout_ns / 1000000000u), .tv_nsec = (long)(timeout_ns % 1000000000u)};
    if (take_done(b, done) || timeout_ns == 0)
        return;
    if (ppoll(fds, 2, timeout_ns == UINT64_MAX ? NULL : &ts, NULL) <= 0)
        return; /* nothing, or EINTR */
    if (fds[0].revents != 0)
        eventfd_drain(b->done_fd); /* before the list is taken: what arrives after that signals again */
    if (fds[1].revents != 0 && eventfd_drain(b->wake_fd))
        *woken = true;
    take_done(b, done);
}

static uint64_t
threads_fixed_bytes(const void *backend)
{
    (void)backend;
    return 0;
}

const spw__aio_backend_ops spw__aio_threads_ops = {
    .create = threads_create,
    .destroy = threads_destroy,
    .file_add = threads_file_add,
    .file_remove = threads_file_add,
    .start = threads_start,
    .flush = threads_flush,
    .reap = threads_reap,
    .fixed_bytes = threads_fixed_bytes,
};
