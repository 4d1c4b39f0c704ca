/*
 * MPI as a transport: the one file that is compiled against an MPI library, into a plugin. Ranks of one host share
 * memory without it; what is left are streams between hosts: non-blocking messages on one communicator of our own, the
 * link's number as tag. Messages are polled for, because no MPI call that waits can be told to stop.
 *
 * MPI is started once per process and ended when the process ends, unless the world failed: then others may never come
 * to the end, and the launcher cleans up.
 */
#include "comm_transport.h"
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { NAP_NS_MAX = 200000, POLLS_BEFORE_NAP = 50, LINGER_NS = 999999999, STOP_NS = 200000000 };

typedef struct mpi_transport {
    spw__transport base; /* first */
    MPI_Comm comm;
} mpi_transport;

typedef struct mpi_link {
    spw__link base;             /* first */
    MPI_Request *sends, *recvs; /* (peer_count) of what is under way */
    uint32_t idle_polls;
} mpi_link;

static bool world_failed;
/* With less than MPI_THREAD_MULTIPLE one thread at a time may call. */
static bool one_at_a_time;
static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;

spw_status
spw__mpi_open(spw__transport **out, const char *version, uint64_t sizes, uint64_t deadline_ns, spw_error *err);

static void
enter(void)
{
    if (one_at_a_time)
        pthread_mutex_lock(&calls_lock);
}

static void
leave(void)
{
    if (one_at_a_time)
        pthread_mutex_unlock(&calls_lock);
}

static uint64_t
now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void
nap(uint64_t ns)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

static spw_status
complain(spw_error *err, spw_status st, int rc, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    if (rc != MPI_SUCCESS)
        (void)MPI_Error_string(rc, text, &n);
    if (err != NULL) {
        err->status = st;
        err->sys_errno = 0;
        snprintf(err->message, sizeof err->message, "MPI: %s%s%s", what, n > 0 ? ": " : "", text);
    }
    return st;
}

static spw_status
gather(spw__transport *base, const void *mine, void *all, uint32_t bytes, uint64_t deadline_ns, spw_error *err)
{
    mpi_transport *t = (mpi_transport *)base;
    MPI_Request request;
    int done = 0, rc;
    enter();
    rc = MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, t->comm, &request);
    leave();
    while (rc == MPI_SUCCESS && !done) {
        enter();
        rc = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        leave();
        if (!done && now_ns() > deadline_ns) {
            world_failed = true;
            return complain(err, SPW_ETIMEDOUT, MPI_SUCCESS, "not all ranks came in time");
        }
        if (!done)
            nap(20000);
    }
    return rc == MPI_SUCCESS ? SPW_OK : complain(err, SPW_EIO, rc, "all-gather of addresses");
}

/* A request that does not end in time is left to itself. */
static void
await_end(MPI_Request *r, uint64_t until_ns)
{
    int done = *r == MPI_REQUEST_NULL, rc = MPI_SUCCESS;
    while (!done && rc == MPI_SUCCESS && now_ns() < until_ns) {
        enter();
        rc = MPI_Test(r, &done, MPI_STATUS_IGNORE);
        leave();
        if (!done)
            nap(20000);
    }
    *r = MPI_REQUEST_NULL;
}

/*
 * A message that comes later, while another link moves, must not land in memory that has a new owner by then: receives are taken back. One
 * whose message is on its way already comes to its end, as what is sent does where the other side takes it.
 */
static void
link_stop(spw__link *base)
{
    mpi_link *l = (mpi_link *)base;
    uint64_t until = now_ns() + STOP_NS;
    for (uint32_t i = 0; i < base->peer_count; i++) {
        enter();
        if (l->recvs[i] != MPI_REQUEST_NULL)
            (void)MPI_Cancel(&l->recvs[i]);
        leave();
    }
    for (uint32_t i = 0; i < base->peer_count; i++) {
        await_end(&l->recvs[i], until);
        await_end(&l->sends[i], until);
        base->send[i] = base->recv[i] = (spw__flow){.left = 0};
    }
}

static void
link_close(spw__link *base)
{
    mpi_link *l = (mpi_link *)base;
    if (l == NULL)
        return;
    if (l->base.send != NULL && l->base.recv != NULL && l->sends != NULL && l->recvs != NULL)
        link_stop(base);
    free(l->sends);
    free(l->recvs);
    free(base->send);
    free(base->recv);
    free(l);
}

static spw_status
link_create(spw__transport *base, spw__link **out, uint32_t id, const uint32_t *peers, uint32_t peer_count,
            spw_error *err)
{
    mpi_link *l = calloc(1, sizeof *l);
    int *most = NULL, found = 0;
    *out = NULL;
    if (l == NULL)
        return complain(err, SPW_ENOMEM, MPI_SUCCESS, "memory of a link");
    l->base = (spw__link){.transport = base, .id = id, .peers = peers, .peer_count = peer_count};
    l->base.send = calloc(peer_count, sizeof *l->base.send);
    l->base.recv = calloc(peer_count, sizeof *l->base.recv);
    l->sends = calloc(peer_count, sizeof *l->sends);
    l->recvs = calloc(peer_count, sizeof *l->recvs);
    if (l->base.send == NULL || l->base.recv == NULL || l->sends == NULL || l->recvs == NULL) {
        link_close(&l->base);
        return complain(err, SPW_ENOMEM, MPI_SUCCESS, "memory of a link");
    }
    for (uint32_t i = 0; i < peer_count; i++)
        l->sends[i] = l->recvs[i] = MPI_REQUEST_NULL;
    enter();
    (void)MPI_Comm_get_attr(((mpi_transport *)base)->comm, MPI_TAG_UB, &most, &found);
    leave();
    if (found && id > (uint32_t)*most) {
        link_close(&l->base);
        return complain(err, SPW_EUNSUPPORTED, MPI_SUCCESS, "more channels were opened than it has tags");
    }
    *out = &l->base;
    return SPW_OK;
}

static spw_status
link_join(spw__link *link, uint64_t deadline_ns, spw_error *err)
{
    (void)link; /* nothing is exchanged: the tag is enough */
    (void)deadline_ns;
    (void)err;
    return SPW_OK;
}

/* Starts or continues one flow. A flow is one message: the other side has the same bytes. Bytes that moved; -1: an error. */
static int64_t
move(mpi_link *l, uint32_t i, bool sends)
{
    MPI_Comm comm = ((mpi_transport *)l->base.transport)->comm;
    spw__flow *f = sends ? &l->base.send[i] : &l->base.recv[i];
    MPI_Request *r = sends ? &l->sends[i] : &l->recvs[i];
    int done = 0, rc = MPI_SUCCESS, peer = (int)l->base.peers[i], tag = (int)l->base.id;
    int64_t bytes = (int64_t)f->left;
    if (bytes == 0)
        return 0;
    if (bytes > INT_MAX)
        return -1;
    enter();
    if (*r == MPI_REQUEST_NULL)
        rc = sends ? MPI_Isend(f->at, (int)bytes, MPI_BYTE, peer, tag, comm, r)
                   : MPI_Irecv(f->at, (int)bytes, MPI_BYTE, peer, tag, comm, r);
    if (rc == MPI_SUCCESS)
        rc = MPI_Test(r, &done, MPI_STATUS_IGNORE);
    leave();
    if (rc != MPI_SUCCESS)
        return -1;
    if (!done)
        return 0;
    f->at += bytes;
    f->left = 0;
    return bytes;
}

static int64_t
progress(spw__link *base, int wait_ms)
{
    mpi_link *l = (mpi_link *)base;
    uint64_t until = wait_ms > 0 ? now_ns() + (uint64_t)wait_ms * 1000000u : 0;
    for (;;) {
        int64_t moved = 0;
        for (uint32_t i = 0; i < base->peer_count; i++) {
            int64_t in = move(l, i, false), out = move(l, i, true);
            if (in < 0 || out < 0) {
                base->gone_idx = i;
                return -1;
            }
            moved += in + out;
        }
        if (moved > 0) {
            l->idle_polls = 0;
            return moved;
        }
        if (wait_ms == 0 || now_ns() > until)
            return 0;
        if (++l->idle_polls > POLLS_BEFORE_NAP) { /* longer and longer: others need the processor */
            uint64_t ns = (l->idle_polls - POLLS_BEFORE_NAP) * 2000u;
            nap(ns < NAP_NS_MAX ? ns : NAP_NS_MAX);
        }
    }
}

static void
close_transport(spw__transport *base, bool failed)
{
    mpi_transport *t = (mpi_transport *)base;
    world_failed = world_failed || failed;
    if (!world_failed) {
        enter();
        (void)MPI_Comm_free(&t->comm);
        leave();
    }
    free(t);
}

static void
end_at_exit(void)
{
    int ended = 0;
    (void)MPI_Finalized(&ended);
    if (!ended && world_failed)
        nap(LINGER_NS); /* the launcher kills all ranks when the first one ends like this: let them speak */
    else if (!ended)
        (void)MPI_Finalize();
}

spw_status
spw__mpi_open(spw__transport **out, const char *version, uint64_t sizes, uint64_t deadline_ns, spw_error *err)
{
    mpi_transport *t;
    int running = 0, ended = 0, level = MPI_THREAD_SINGLE, rank = 0, world = 1, n = 0, rc;
    char library[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    (void)deadline_ns; /* MPI_Init knows no deadline; the launcher ends all when one rank ends */
    *out = NULL;
    if (strcmp(version, SPW_VERSION) != 0 || sizes != SPW__TRANSPORT_SIZES)
        return complain(err, SPW_EUNSUPPORTED, MPI_SUCCESS, "the plugin is of another build, " SPW_VERSION);
    (void)MPI_Finalized(&ended);
    (void)MPI_Initialized(&running);
    if (ended || world_failed)
        return complain(err, SPW_EUNSUPPORTED, MPI_SUCCESS, "it has ended in this process and cannot start again");
    if (!running) {
        rc = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
        if (rc != MPI_SUCCESS)
            return complain(err, SPW_EUNSUPPORTED, rc, "MPI_Init_thread");
        (void)atexit(end_at_exit);
    } else {
        (void)MPI_Query_thread(&level);
    }
    if (level < MPI_THREAD_SERIALIZED)
        return complain(err, SPW_EUNSUPPORTED, MPI_SUCCESS, "this library lets no thread but the first call it");
    one_at_a_time = level < MPI_THREAD_MULTIPLE;
    t = calloc(1, sizeof *t);
    if (t == NULL)
        return complain(err, SPW_ENOMEM, MPI_SUCCESS, "memory");
    enter();
    rc = MPI_Comm_dup(MPI_COMM_WORLD, &t->comm);
    if (rc == MPI_SUCCESS) {
        (void)MPI_Comm_set_errhandler(t->comm, MPI_ERRORS_RETURN);
        (void)MPI_Comm_rank(t->comm, &rank);
        (void)MPI_Comm_size(t->comm, &world);
        (void)MPI_Get_library_version(library, &n);
    }
    leave();
    if (rc != MPI_SUCCESS) {
        free(t);
        return complain(err, SPW_EUNSUPPORTED, rc, "MPI_Comm_dup");
    }
    t->base = (spw__transport){.name = "mpi",
                               .rank = (uint32_t)rank,
                               .world = (uint32_t)world,
                               .gather = gather,
                               .link_create = link_create,
                               .link_join = link_join,
                               .progress = progress,
                               .link_stop = link_stop,
                               .link_close = link_close,
                               .close = close_transport};
    library[strcspn(library, ",\n")] = '\0';
    snprintf(t->base.about, sizeof t->base.about, "%.80s, %s", library,
             one_at_a_time ? "one thread at a time" : "any thread");
    *out = &t->base;
    return SPW_OK;
}
