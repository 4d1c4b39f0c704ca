/*
 * The threads backend: a pool of threads that call pread and pwrite. The same contract as io_uring, for machines where
 * that is switched off.
 */
#include "aio_internal.h"
#include <errno.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

typedef struct workers {
    pthread_t *threads;
    uint32_t started;
    pthread_mutex_t lock;
    pthread_cond_t todo_cond, done_cond;
    /* Under lock. */
    aio_piece *todo_head, *todo_tail, *done;
    bool stop, woken;
} workers;

static int64_t
carry_out(const aio_piece *p)
{
    ssize_t rc;
    if (p->op == SPW_AIO_FSYNC)
        rc = fdatasync(p->fd);
    else if (p->op == SPW_AIO_READ)
        rc = pread(p->fd, p->buf, p->bytes, (off_t)p->offset);
    else
        rc = pwrite(p->fd, p->buf, p->bytes, (off_t)p->offset);
    return rc < 0 ? -errno : rc;
}

static void *
thread_main(void *arg)
{
    workers *w = arg;
    (void)pthread_setname_np(pthread_self(), "spw-aio");
    pthread_mutex_lock(&w->lock);
    for (;;) {
        aio_piece *p;
        while (w->todo_head == NULL && !w->stop)
            pthread_cond_wait(&w->todo_cond, &w->lock);
        if (w->todo_head == NULL)
            break;
        p = w->todo_head;
        w->todo_head = p->next;
        pthread_mutex_unlock(&w->lock);
        p->result = carry_out(p);
        pthread_mutex_lock(&w->lock);
        p->next = w->done;
        w->done = p;
        pthread_cond_signal(&w->done_cond);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static void
threads_submit(spw_aio *aio, aio_piece *p)
{
    workers *w = aio->state;
    pthread_mutex_lock(&w->lock);
    p->next = NULL;
    if (w->todo_head == NULL)
        w->todo_head = p;
    else
        w->todo_tail->next = p;
    w->todo_tail = p;
    pthread_cond_signal(&w->todo_cond);
    pthread_mutex_unlock(&w->lock);
}

static void
threads_reap(spw_aio *aio, uint64_t timeout_ns)
{
    workers *w = aio->state;
    aio_piece *list;
    pthread_mutex_lock(&w->lock);
    if (timeout_ns == UINT64_MAX) {
        while (w->done == NULL && !w->woken)
            pthread_cond_wait(&w->done_cond, &w->lock);
    } else if (timeout_ns > 0) {
        uint64_t until = spw_now_ns() + timeout_ns;
        struct timespec t = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
        while (w->done == NULL && !w->woken && pthread_cond_timedwait(&w->done_cond, &w->lock, &t) != ETIMEDOUT) {
        }
    }
    if (timeout_ns > 0)
        w->woken = false;
    list = w->done;
    w->done = NULL;
    pthread_mutex_unlock(&w->lock);
    while (list != NULL) {
        aio_piece *p = list;
        list = p->next;
        spw__aio_piece_done(aio, p, p->result);
    }
}

static void
threads_wake(spw_aio *aio)
{
    workers *w = aio->state;
    pthread_mutex_lock(&w->lock);
    w->woken = true;
    pthread_cond_signal(&w->done_cond);
    pthread_mutex_unlock(&w->lock);
}

static void
threads_destroy(spw_aio *aio)
{
    workers *w = aio->state;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->todo_cond);
    pthread_mutex_unlock(&w->lock);
    for (uint32_t i = 0; i < w->started; i++)
        pthread_join(w->threads[i], NULL);
    pthread_cond_destroy(&w->todo_cond);
    pthread_cond_destroy(&w->done_cond);
    pthread_mutex_destroy(&w->lock);
    spw_mem_free(w->threads);
    spw_mem_free(w);
    aio->state = NULL;
}

spw_status
spw__aio_threads_open(spw_aio *aio, spw_error *err)
{
    static const aio_backend backend = {threads_submit, threads_reap, threads_wake, threads_destroy};
    workers *w = spw_mem_zalloc(sizeof *w);
    pthread_condattr_t monotonic;
    if (w == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "aio threads");
    w->threads = spw_mem_calloc(aio->options.thread_count, sizeof *w->threads);
    if (w->threads == NULL) {
        spw_mem_free(w);
        return SPW_RAISE(err, SPW_ENOMEM, "aio threads");
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->todo_cond, NULL);
    pthread_cond_init(&w->done_cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
    aio->state = w;
    aio->backend = &backend;
    for (; w->started < aio->options.thread_count; w->started++) {
        int rc = pthread_create(&w->threads[w->started], NULL, thread_main, w);
        if (rc != 0) {
            threads_destroy(aio);
            aio->backend = NULL;
            return SPW_RAISE_SYS(err, rc, "start of aio thread %u", w->started + 1);
        }
    }
    return SPW_OK;
}
