/*
 * Between ranks: units are gathered to the device and their gradients reduced, each by a thread that works off what the
 * engine's thread asked for, in that order. All ranks ask for the same in the same order (gather.c), so the collectives of
 * the two channels meet; what a rank waits for at home - its part of the weights, the memory of a gradient - is waited for
 * in these threads, while the engine's thread goes on.
 *
 * A gather needs a generation whose update has been released, and stands in the queue behind all that the engine waits
 * for before it releases the next one: so the queue always moves.
 *
 * Where devices are linked, the two threads take turns with the link, in the order in which the engine's thread asked, which is that of all ranks:
 * two collectives that ranks begin in different orders may wait for each other for ever (link.cu). A thread that waits at home keeps the
 * other one's later jobs waiting. That goes on as above: whatever a gather waits for at home was asked for before it.
 */
#include "engine_internal.h"
#include <time.h>

/* A part of a unit to be made whole in the pool. */
typedef struct gather_job {
    spw_store_use use;
    uint64_t offset, ticket, turn;
    bool again;           /* from what the group has kept */
    spw_gpu_event *after; /* compute may still read what lay there; NULL: no */
} gather_job;

/* A gradient to be summed over the ranks. */
typedef struct reduce_job {
    uint32_t unit_idx;
    uint64_t turn;
    float *data;          /* lent until the job is done */
    spw_gpu_event *after; /* what makes it; NULL: it is there */
    bool add, last;       /* to what earlier passes summed up; there are no more of this step */
} reduce_job;

enum { EVENT_BYTES = 256 }; /* of a device, with its place in a table */

/* One of the two threads and how far it is in its queue. */
typedef struct lane {
    pthread_t thread;
    bool started;
    /* Under lock. */
    uint64_t done, asked;                                /* jobs */
    enum { PHASE_IDLE, PHASE_HOME, PHASE_OTHERS } phase; /* what it waits for: this rank, or all */
} lane;

struct spw_ranks {
    spw_engine *e;
    spw_comm *comm;
    rank_channels channels;
    uint32_t world;
    char *pool_memory;
    spw_wire *wire;
    spw_sequences *sequences;
    /* The engine's thread alone. */
    gather_pool pool;
    gather_asker asker;
    uint64_t *tickets; /* (unit_count) the last that was asked for */
    uint64_t *told;    /* (unit_count) 1 + the generation of which the store was told a use */
    uint64_t turns;    /* jobs of both threads */
    /* (queue_size), one for each place in the queue; of a device that works by itself, else NULL. */
    spw_gpu_event **gather_events, **reduce_events;
    lane gather, reduce;

    pthread_mutex_t lock;
    pthread_cond_t work, done;
    /* Under lock. */
    gather_job *gather_queue; /* rings of queue_size */
    reduce_job *reduce_queue;
    uint64_t queue_size;
    uint64_t *arrived; /* (unit_count) ticket */
    uint64_t turn;     /* of the job that has the link, or is the next to have it */
    bool stop;
    spw_error failure;
};

/* ---------------------------------------------------------------- failure */

/* The first failure of this rank is everybody's. */
static void
fail(spw_ranks *r, const spw_error *err)
{
    bool first;
    pthread_mutex_lock(&r->lock);
    first = r->failure.status == SPW_OK;
    spw_error_keep_first(&r->failure, err);
    pthread_cond_broadcast(&r->work);
    pthread_cond_broadcast(&r->done);
    pthread_mutex_unlock(&r->lock);
    if (!first)
        return;
    spw_store_fail(r->e->store, err);
    spw_comm_abort(r->comm, err->message);
}

static spw_status
failed(spw_ranks *r, spw_error *err)
{
    spw_status st;
    pthread_mutex_lock(&r->lock);
    st = r->failure.status;
    if (st != SPW_OK && err != NULL)
        *err = r->failure;
    pthread_mutex_unlock(&r->lock);
    return st;
}

spw_status
spw__ranks_fail(spw_ranks *r, spw_status st, const spw_error *err)
{
    spw_error unsaid = {0};
    if (r != NULL)
        fail(r, err != NULL ? err : (SPW_RAISE(&unsaid, st, "a rank could not go on"), &unsaid));
    return st;
}

/* ---------------------------------------------------------------- the two threads */

/* All is there at home, and it is the job's turn with the link if there is one. */
static spw_status
begin_with_others(spw_ranks *r, lane *l, uint64_t turn, spw_error *err)
{
    SPW_TRY(spw__wire_ready(r->wire, l == &r->gather, err));
    pthread_mutex_lock(&r->lock);
    l->phase = PHASE_OTHERS;
    while (r->e->linked && r->turn != turn && r->failure.status == SPW_OK)
        pthread_cond_wait(&r->work, &r->lock);
    pthread_mutex_unlock(&r->lock);
    return failed(r, err);
}

/* The other thread's job may follow on the link; this one waits for its own. st: how the job went so far. */
static spw_status
end_with_others(spw_ranks *r, const lane *l, spw_status st, spw_error *err)
{
    SPW_TRY(st);
    spw__ranks_end_turn(r);
    return spw__wire_wait(r->wire, l == &r->gather, err);
}

/* Waits for the next job; it stays where it is in the queue until finish(). False: there are to be no more. */
static bool
take(spw_ranks *r, lane *l, uint64_t *at)
{
    bool more;
    pthread_mutex_lock(&r->lock);
    while (l->done == l->asked && !r->stop && r->failure.status == SPW_OK)
        pthread_cond_wait(&r->work, &r->lock);
    more = l->done < l->asked && r->failure.status == SPW_OK;
    *at = l->done % r->queue_size;
    l->phase = more ? PHASE_HOME : PHASE_IDLE;
    pthread_mutex_unlock(&r->lock);
    return more;
}

static void
finish(spw_ranks *r, lane *l, spw_status st, const spw_error *err)
{
    if (st != SPW_OK)
        fail(r, err);
    pthread_mutex_lock(&r->lock);
    l->done++;
    l->phase = PHASE_IDLE;
    pthread_cond_broadcast(&r->done);
    pthread_mutex_unlock(&r->lock);
}

static spw_status
run_gather(spw_ranks *r, const gather_job *job, spw_error *err)
{
    spw_engine *e = r->e;
    const spw_store_unit *u = &e->layout.units[job->use.unit_idx];
    uint64_t begin;
    char *to = r->pool_memory + job->offset;
    const void *part = NULL;
    if (!job->again)
        SPW_TRY(spw_store_acquire(e->store, &job->use, 1, &part, err));
    spw__wire_put_part(r->wire, job->after, to, part, u->elems);
    if (!job->again)
        spw_store_release(e->store, job->use.unit_idx, spw__wire_reader(r->wire));
    SPW_TRY(begin_with_others(r, &r->gather, job->turn, err));
    begin = spw_now_ns();
    SPW_TRY(end_with_others(r, &r->gather, spw__wire_gather(r->wire, job->use.unit_idx, to, job->again, err), err));
    spw_timeline_add(SPW_LANE_COMM, job->again ? "gather again" : "gather", job->use.unit_idx, begin, spw_now_ns());
    pthread_mutex_lock(&r->lock);
    r->arrived[job->use.unit_idx] = job->ticket;
    pthread_mutex_unlock(&r->lock);
    return SPW_OK;
}

static void *
gather_main(void *arg)
{
    spw_ranks *r = arg;
    uint64_t at;
    (void)pthread_setname_np(pthread_self(), "spw-gather");
    while (take(r, &r->gather, &at)) {
        spw_error err = {0};
        finish(r, &r->gather, run_gather(r, &r->gather_queue[at], &err), &err);
    }
    return NULL;
}

static spw_status
run_reduce(spw_ranks *r, const reduce_job *job, spw_error *err)
{
    spw_engine *e = r->e;
    uint32_t u = job->unit_idx;
    uint64_t elems = e->layout.units[u].elems, begin;
    uint64_t part = e->layout.parts > 1 ? elems : spw_layout_part(elems, r->world);
    spw_reduce_sink sink = {.dtype = e->config.run.grad_dtype,
                            .add = job->add,
                            .sumsq = job->last ? e->partials + e->unit_partial[u] : NULL};
    SPW_TRY(spw_store_grad_open(e->store, u, err));
    sink.data = spw_store_grad(e->store, u);
    if (job->after != NULL)
        spw__wire_follow(r->wire, job->after);
    SPW_TRY(begin_with_others(r, &r->reduce, job->turn, err));
    begin = spw_now_ns();
    SPW_TRY(end_with_others(r, &r->reduce,
                            e->layout.parts > 1 ? spw__wire_scatter(r->wire, u, job->data, part, &sink, err)
                                                : spw__wire_sum(r->wire, u, job->data, part, &sink, elems, err),
                            err));
    spw_timeline_add(SPW_LANE_COMM, "reduce", u, begin, spw_now_ns());
    if (job->last) {
        spw__squares_see(e, u);
        spw_store_grad_ready(e->store, u);
    }
    return SPW_OK;
}

static void *
reduce_main(void *arg)
{
    spw_ranks *r = arg;
    uint64_t at;
    (void)pthread_setname_np(pthread_self(), "spw-reduce");
    while (take(r, &r->reduce, &at)) {
        spw_error err = {0};
        finish(r, &r->reduce, run_reduce(r, &r->reduce_queue[at], &err), &err);
    }
    return NULL;
}

/* ---------------------------------------------------------------- waiting for them, by cause */

/* Lock held. One wait on `done` of a millisecond at most; its time goes to what the thread in question waits for. */
static void
wait_on(spw_ranks *r, const lane *l)
{
    spw_engine *e = r->e;
    uint64_t begin = spw_now_ns(), until = begin + 1000000, spent, counted = 0;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
    spw_store_stats before, after;
    bool home = l->phase == PHASE_HOME;
    if (home)
        spw_store_get_stats(e->store, &before);
    (void)pthread_cond_clockwait(&r->done, &r->lock, CLOCK_MONOTONIC, &t);
    spent = spw_now_ns() - begin;
    if (home) {
        spw_store_get_stats(e->store, &after);
        for (int k = 0; k < SPW_STALL_COUNT; k++) {
            uint64_t ns = after.stall_ns[k] - before.stall_ns[k];
            ns = ns < spent - counted ? ns : spent - counted;
            e->stall_ns[k] += ns;
            counted += ns;
        }
    }
    e->stall_ns[SPW_STALL_COLLECTIVE] += spent - counted;
}

/* A thread that waits at home does not see that another rank has failed. */
static spw_status
look_around(spw_ranks *r, spw_error *err)
{
    spw_error others = {0};
    if (spw_comm_check(r->comm, &others) != SPW_OK)
        fail(r, &others);
    return failed(r, err);
}

static spw_status
wait_arrived(spw_ranks *r, uint32_t unit_idx, spw_error *err)
{
    spw_status st = SPW_OK;
    pthread_mutex_lock(&r->lock);
    while (r->arrived[unit_idx] < r->tickets[unit_idx] && st == SPW_OK) {
        wait_on(r, &r->gather);
        pthread_mutex_unlock(&r->lock);
        st = look_around(r, err);
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return st;
}

/* Until so many gradients are reduced. */
static spw_status
wait_reduced(spw_ranks *r, uint64_t count, spw_error *err)
{
    spw_status st = SPW_OK;
    pthread_mutex_lock(&r->lock);
    while (r->reduce.done < count && st == SPW_OK) {
        wait_on(r, &r->reduce);
        pthread_mutex_unlock(&r->lock);
        st = look_around(r, err);
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return st;
}

spw_status
spw__ranks_wait_reduced(spw_ranks *r, spw_error *err)
{
    return wait_reduced(r, r->reduce.asked, err); /* asked is changed by this thread alone */
}

spw_status
spw__ranks_wait_free(spw_ranks *r, const grad_buffer *b, spw_error *err)
{
    return wait_reduced(r, b->job, err);
}

/* ---------------------------------------------------------------- asking */

/* Lock not held. The queue never fills: the engine asks for no more than it can hold before it waits. */
static void
ask_gather(void *ctx, spw_store_use use, bool again)
{
    spw_ranks *r = ctx;
    const gather_unit *u = &r->pool.units[use.unit_idx];
    gather_job job = {
        .use = use, .offset = u->offset, .ticket = ++r->tickets[use.unit_idx], .turn = r->turns++, .again = again};
    uint64_t slot = r->gather.asked % r->queue_size; /* asked is changed by this thread alone */
    if (r->gather_events != NULL && spw__gather_follows(&r->pool, use.unit_idx)) {
        job.after = r->gather_events[slot];
        spw_gpu_event_record(job.after, r->e->compute);
    }
    spw__wire_count_weights(r->wire, use.unit_idx, again, &r->e->d2h_bytes, &r->e->h2d_bytes);
    pthread_mutex_lock(&r->lock);
    SPW_ASSERT(r->gather.asked - r->gather.done < r->queue_size);
    r->gather_queue[slot] = job;
    r->gather.asked++;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
}

spw_status
spw__ranks_acquire(spw_ranks *r, const spw_store_use *uses, uint32_t count, const void **weights, spw_error *err)
{
    if (!spw__gather_pin(&r->pool, &r->asker, uses, count))
        return SPW_RAISE(err, SPW_ENOFIT, "the units of one block do not fit the %llu bytes for gathered units",
                         (unsigned long long)r->pool.bytes);
    for (uint32_t k = 0; k < count; k++) {
        SPW_TRY(wait_arrived(r, uses[k].unit_idx, err));
        weights[k] = r->pool_memory + r->pool.units[uses[k].unit_idx].offset;
    }
    return SPW_OK;
}

void
spw__ranks_release(spw_ranks *r, uint32_t unit_idx)
{
    gather_unit *u = &r->pool.units[unit_idx];
    SPW_ASSERT(u->pins > 0);
    u->pins--;
    if (r->gather_events != NULL)
        spw__gather_read(&r->pool, unit_idx);
}

/* Will this use need the store's part? Where gathered units are kept, the first of a generation does. */
static bool
needs_part(spw_ranks *r, spw_store_use use)
{
    const gather_unit *u = &r->pool.units[use.unit_idx];
    uint64_t told = r->told[use.unit_idx];
    if (spw__gather_has(&r->pool, use))
        return false;
    r->told[use.unit_idx] = 1 + use.generation;
    return !r->pool.keeps || (told != 1 + use.generation && !(u->kept && u->kept_generation == use.generation));
}

/*
 * The store is told what is certain first: the parts of gathers that were asked for, without the one under way whose part is used
 * already. Then what the trace says of the others.
 */
static void
tell_store(spw_ranks *r, const spw_store_use *future, uint32_t count, spw_store_use *out, uint32_t max)
{
    uint32_t n = 0, certain;
    memset(r->told, 0, r->e->layout.unit_count * sizeof *r->told);
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = r->gather.done + (r->gather.phase == PHASE_OTHERS); i < r->gather.asked && n < max; i++) {
        const gather_job *job = &r->gather_queue[i % r->queue_size];
        if (!job->again)
            out[n++] = job->use;
    }
    pthread_mutex_unlock(&r->lock);
    certain = n;
    for (uint32_t i = 0; i < count && n < max; i++) {
        if (needs_part(r, future[i]))
            out[n++] = future[i];
    }
    spw_store_set_future(r->e->store, out, n, certain);
}

void
spw__ranks_tell(spw_ranks *r, const spw_store_use *future, uint32_t count, uint32_t ahead)
{
    spw_engine *e = r->e;
    spw__gather_ahead(&r->pool, &r->asker, future, count, ahead, e->generations);
    tell_store(r, future, count, e->future + e->future_max, e->future_max);
}

void
spw__ranks_send(spw_ranks *r, uint32_t unit_idx, grad_buffer *b, bool add, bool last)
{
    reduce_job job = {.unit_idx = unit_idx, .turn = r->turns++, .data = b->data, .add = add, .last = last};
    uint64_t slot = r->reduce.asked % r->queue_size;
    if (r->reduce_events != NULL) {
        job.after = r->reduce_events[slot];
        spw_gpu_event_record(job.after, r->e->compute);
    }
    spw__wire_count_grad(r->wire, unit_idx, add, &r->e->d2h_bytes, &r->e->h2d_bytes);
    pthread_mutex_lock(&r->lock);
    SPW_ASSERT(r->reduce.asked - r->reduce.done < r->queue_size);
    r->reduce_queue[slot] = job;
    r->reduce.asked++;
    b->job = r->reduce.asked;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
}

spw_status
spw__ranks_take_turn(spw_ranks *r, spw_error *err)
{
    const uint64_t turn = r->turns++;
    spw_status st = SPW_OK;
    pthread_mutex_lock(&r->lock);
    while (r->turn != turn && r->failure.status == SPW_OK && st == SPW_OK) {
        const uint64_t until = spw_now_ns() + 1000000;
        const struct timespec t = {.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
        (void)pthread_cond_clockwait(&r->work, &r->lock, CLOCK_MONOTONIC, &t);
        pthread_mutex_unlock(&r->lock);
        st = look_around(r, err);
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return failed(r, err);
}

void
spw__ranks_end_turn(spw_ranks *r)
{
    pthread_mutex_lock(&r->lock);
    r->turn++;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
}

/* ---------------------------------------------------------------- what steps decide */

spw_status
spw__ranks_sum(spw_ranks *r, double *values, uint32_t count, spw_error *err)
{
    uint64_t begin = spw_now_ns();
    spw_status st = spw_sum(r->channels.control, values, count, err);
    r->e->stall_ns[SPW_STALL_COLLECTIVE] += spw_now_ns() - begin;
    return st == SPW_OK ? st : spw__ranks_fail(r, st, err);
}

spw_status
spw__ranks_broadcast(spw_ranks *r, void *buf, uint64_t bytes, uint32_t root, spw_error *err)
{
    spw_status st = spw_broadcast(r->channels.control, buf, bytes, root, err);
    return st == SPW_OK ? st : spw__ranks_fail(r, st, err);
}

spw_status
spw__ranks_begin(spw_ranks *r, double *count, spw_error *err)
{
    double sums[2] = {count != NULL ? *count : 0, r->e->part_changed};
    SPW_TRY(spw__ranks_sum(r, sums, 2, err));
    if (count != NULL)
        *count = sums[0];
    r->e->part_changed = false;
    return sums[1] > 0 ? spw__ranks_forget(r, err) : SPW_OK;
}

/* ---------------------------------------------------------------- lifetime */

spw_status
spw__ranks_forget(spw_ranks *r, spw_error *err)
{
    pthread_mutex_lock(&r->lock);
    while (r->gather.done < r->gather.asked && r->failure.status == SPW_OK)
        pthread_cond_wait(&r->done, &r->lock);
    pthread_mutex_unlock(&r->lock);
    SPW_TRY(failed(r, err));
    spw__gather_forget(&r->pool);
    return SPW_OK;
}

uint64_t
spw__ranks_table_bytes(const spw_engine *e)
{
    uint64_t units = e->layout.unit_count;
    return sizeof(spw_ranks) + units * (4 * sizeof(uint64_t) + sizeof(gather_unit)) +
           (4 * units + 64) * (sizeof(gather_job) + sizeof(reduce_job) + (e->host_addressable ? 0 : 2 * EVENT_BYTES)) +
           e->future_max * sizeof(spw_store_use) + 2 * SPW_STACK_BYTES +
           (e->host_addressable ? 0 : spw_gpu_work_bytes(e->gpu)); /* the queues of wire.c */
}

const rank_channels *
spw__ranks_get_channels(const spw_ranks *r)
{
    return &r->channels;
}

/* What compute has made, or still reads, is marked for the two threads. */
static spw_status
open_events(spw_ranks *r, spw_error *err)
{
    r->gather_events = spw_mem_calloc(r->queue_size, sizeof *r->gather_events);
    r->reduce_events = spw_mem_calloc(r->queue_size, sizeof *r->reduce_events);
    if (!r->gather_events || !r->reduce_events)
        return SPW_RAISE(err, SPW_ENOMEM, "ranks");
    for (uint64_t i = 0; i < r->queue_size; i++) {
        SPW_TRY(spw_gpu_event_create(&r->gather_events[i], r->e->gpu, err));
        SPW_TRY(spw_gpu_event_create(&r->reduce_events[i], r->e->gpu, err));
    }
    return SPW_OK;
}

static void
close_events(spw_gpu_event **events, uint64_t count)
{
    for (uint64_t i = 0; events != NULL && i < count; i++) {
        if (events[i] != NULL)
            spw_gpu_event_destroy(events[i]);
    }
    spw_mem_free(events);
}

static spw_status
open_ranks(spw_ranks *r, spw_error *err)
{
    spw_engine *e = r->e;
    int rc;
    r->queue_size = 4 * (uint64_t)e->layout.unit_count + 64;
    if (!e->host_addressable)
        SPW_TRY(open_events(r, err));
    r->gather_queue = spw_mem_calloc(r->queue_size, sizeof *r->gather_queue);
    r->reduce_queue = spw_mem_calloc(r->queue_size, sizeof *r->reduce_queue);
    r->tickets = spw_mem_calloc(e->layout.unit_count, sizeof *r->tickets);
    r->arrived = spw_mem_calloc(e->layout.unit_count, sizeof *r->arrived);
    r->told = spw_mem_calloc(e->layout.unit_count, sizeof *r->told);
    if (!r->gather_queue || !r->reduce_queue || !r->tickets || !r->arrived || !r->told)
        return SPW_RAISE(err, SPW_ENOMEM, "ranks");
    SPW_TRY(spw__gather_init(&r->pool, e->layout.unit_count, e->layout.parts > 1 ? e->plan.cache_device : 0, err));
    r->pool.keeps = e->zeropp.group > 1;
    SPW_TRY(spw__ranks_open_channels(&r->channels, r->comm, &e->zeropp, e->sequence_ranks, e->config.run.comm_timeout,
                                     err));
    SPW_TRY(spw__wire_open(&r->wire, e, &r->channels, e->wire_memory, err));
    SPW_TRY(spw__sequences_open(&r->sequences, e, &r->channels, err));
    if ((rc = pthread_create(&r->gather.thread, NULL, gather_main, r)) != 0)
        return SPW_RAISE_SYS(err, rc, "start of the gather thread " SPW_THREAD_LIMITS);
    r->gather.started = true;
    if ((rc = pthread_create(&r->reduce.thread, NULL, reduce_main, r)) != 0)
        return SPW_RAISE_SYS(err, rc, "start of the reduce thread " SPW_THREAD_LIMITS);
    r->reduce.started = true;
    return SPW_OK;
}

spw_status
spw__ranks_create(spw_ranks **out, spw_engine *e, spw_comm *comm, char *pool_memory, spw_error *err)
{
    spw_ranks *r = spw_mem_zalloc(sizeof *r);
    spw_status st;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "ranks");
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->work, NULL);
    pthread_cond_init(&r->done, NULL);
    r->e = e;
    r->comm = comm;
    r->world = spw_comm_get_info(comm)->world;
    r->asker = (gather_asker){.layout = &e->layout,
                              .elem_bytes = spw_dtype_bytes(spw_gpu_get_info(e->gpu)->compute_dtype),
                              .ask = ask_gather,
                              .ctx = r};
    r->pool_memory = pool_memory;
    st = open_ranks(r, err);
    if (st != SPW_OK)
        spw__ranks_destroy(r);
    else
        *out = r;
    return st;
}

/* What was asked for on all ranks comes to its end on all ranks; after a failure nothing does. */
void
spw__ranks_destroy(spw_ranks *r)
{
    bool together;
    if (r == NULL)
        return;
    pthread_mutex_lock(&r->lock);
    r->stop = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
    if (r->gather.started)
        pthread_join(r->gather.thread, NULL);
    if (r->reduce.started)
        pthread_join(r->reduce.thread, NULL);
    together = r->failure.status == SPW_OK && spw_comm_check(r->comm, NULL) == SPW_OK;
    spw__sequences_close(r->sequences, together);
    spw__wire_close(r->wire, together);
    spw__ranks_close_channels(&r->channels);
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->done);
    pthread_mutex_destroy(&r->lock);
    close_events(r->gather_events, r->queue_size);
    close_events(r->reduce_events, r->queue_size);
    spw__gather_deinit(&r->pool);
    spw_mem_free(r->gather_queue);
    spw_mem_free(r->reduce_queue);
    spw_mem_free(r->tickets);
    spw_mem_free(r->arrived);
    spw_mem_free(r->told);
    spw_mem_free(r);
}
