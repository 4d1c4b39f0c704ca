/*
 * A worker pool: the caller and n - 1 threads take parts of one job by moving a ticket on. A job is over when all its parts are
 * done: nobody waits for a worker that has not woken up yet, which on busy CPUs takes longer than many an operation. Workers
 * sleep on a condition variable between jobs; a short spin first keeps back-to-back operations from paying two context switches each.
 */
#include "spw_base.h"
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

struct spw_pool {
    /* Fixed after create. */
    uint32_t thread_count;
    pthread_t *threads; /* thread_count - 1 */
    struct worker *workers;
    /*
     * The ticket: the job's number in the upper half, the next part in the lower. Who moves it on from (job, part) has that
     * part, and until it is done fn and ctx are that job's. part_count is read before that is sure, so between two jobs
     * the ticket is CLOSED: whoever read it before then fails to move it on.
     */
    _Atomic uint64_t ticket;
    _Atomic uint32_t part_count;
    spw_pool_fn fn;
    void *ctx;
    _Atomic uint32_t done_count;
    /* Under lock. */
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    uint32_t asleep; /* workers */
    bool stop;
};

#define CLOSED UINT32_MAX

struct worker {
    spw_pool *pool;
    uint32_t idx;
};

enum { SPIN_COUNT = 2000 };

static inline void
relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Parts of the job that is there, if any are left. */
static void
take_parts(spw_pool *pool, uint32_t worker_idx)
{
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        uint32_t part = (uint32_t)ticket, count = atomic_load_explicit(&pool->part_count, memory_order_acquire);
        if (part == CLOSED || part >= count)
            return;
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket + 1, memory_order_acq_rel,
                                                   memory_order_relaxed))
            continue;
        pool->fn(pool->ctx, part, worker_idx);
        if (atomic_fetch_add_explicit(&pool->done_count, 1, memory_order_acq_rel) + 1 == count && worker_idx != 0) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static uint32_t
job_of(spw_pool *pool)
{
    return (uint32_t)(atomic_load_explicit(&pool->ticket, memory_order_acquire) >> 32);
}

static void *
worker_main(void *arg)
{
    struct worker *w = arg;
    spw_pool *pool = w->pool;
    uint32_t seen = 0;
    for (;;) {
        bool stop;
        for (int spin = 0; spin < SPIN_COUNT && job_of(pool) == seen; spin++)
            relax();
        pthread_mutex_lock(&pool->lock);
        pool->asleep++;
        while (job_of(pool) == seen && !pool->stop)
            pthread_cond_wait(&pool->start, &pool->lock);
        pool->asleep--;
        stop = pool->stop;
        seen = job_of(pool);
        pthread_mutex_unlock(&pool->lock);
        if (stop)
            return NULL;
        take_parts(pool, w->idx);
    }
}

spw_status
spw_pool_create(spw_pool **out, uint32_t thread_count, const char *name, spw_error *err)
{
    spw_pool *pool = spw_mem_zalloc(sizeof *pool);
    uint32_t started = 0, wanted = thread_count > 0 ? thread_count : spw_cpu_allowed_count();
    *out = NULL;
    if (pool == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "worker pool");
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->start, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->thread_count = 1;
    atomic_init(&pool->ticket, CLOSED);
    pool->threads = spw_mem_calloc(wanted, sizeof *pool->threads);
    pool->workers = spw_mem_calloc(wanted, sizeof *pool->workers);
    if (pool->threads == NULL || pool->workers == NULL) {
        spw_pool_destroy(pool);
        return SPW_RAISE(err, SPW_ENOMEM, "worker pool of %u threads", wanted);
    }
    for (; started + 1 < wanted; started++) {
        char thread_name[16];
        int rc;
        pool->workers[started] = (struct worker){.pool = pool, .idx = started + 1};
        rc = pthread_create(&pool->threads[started], NULL, worker_main, &pool->workers[started]);
        if (rc != 0) {
            spw_pool_destroy(pool);
            return SPW_RAISE_SYS(err, rc, "start of thread %u of %u for %s " SPW_THREAD_LIMITS, started + 2, wanted,
                                 name);
        }
        pool->thread_count++;
        snprintf(thread_name, sizeof thread_name, "%.11s-%u", name, (started + 1) % 1000);
        (void)pthread_setname_np(pool->threads[started], thread_name); /* cosmetic */
    }
    *out = pool;
    return SPW_OK;
}

spw_status
spw_pool_seat(spw_pool *pool, const spw_topology *topology, spw_error *err)
{
    spw_seat *seats = spw_mem_calloc(pool->thread_count, sizeof *seats);
    if (seats == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "seats of %u threads", pool->thread_count);
    spw_seat_workers(seats, pool->thread_count, topology);
    for (uint32_t i = 0; i + 1 < pool->thread_count; i++)
        spw_seat_apply(&seats[i + 1], pool->threads[i]);
    spw_mem_free(seats);
    return SPW_OK;
}

void
spw_pool_destroy(spw_pool *pool)
{
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i + 1 < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->start);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    spw_mem_free(pool->threads);
    spw_mem_free(pool->workers);
    spw_mem_free(pool);
}

uint32_t
spw_pool_threads(const spw_pool *pool)
{
    return pool == NULL ? 1 : pool->thread_count;
}

static bool
all_done(spw_pool *pool, uint32_t part_count)
{
    return atomic_load_explicit(&pool->done_count, memory_order_acquire) == part_count;
}

void
spw_pool_run(spw_pool *pool, uint32_t part_count, spw_pool_fn fn, void *ctx)
{
    uint32_t job;
    SPW_ASSERT(part_count < CLOSED);
    if (pool == NULL || pool->thread_count == 1 || part_count <= 1) {
        for (uint32_t i = 0; i < part_count; i++)
            fn(ctx, i, 0);
        return;
    }
    job = job_of(pool);
    atomic_store_explicit(&pool->ticket, (uint64_t)job << 32 | CLOSED, memory_order_release);
    pool->fn = fn;
    pool->ctx = ctx;
    atomic_store_explicit(&pool->part_count, part_count, memory_order_release); /* who sees it sees CLOSED */
    atomic_store_explicit(&pool->done_count, 0, memory_order_relaxed);
    pthread_mutex_lock(&pool->lock);
    atomic_store_explicit(&pool->ticket, (uint64_t)(job + 1) << 32, memory_order_release);
    if (pool->asleep > 0)
        pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    take_parts(pool, 0);
    for (int spin = 0; spin < SPIN_COUNT && !all_done(pool, part_count); spin++)
        relax();
    pthread_mutex_lock(&pool->lock);
    while (!all_done(pool, part_count))
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
