/*
 * The watcher: a thread per process that learns of failures and tells them. It sees processes of this host end (pidfd),
 * connections to other hosts close, what local ranks write on their seats and what others send on the control link.
 * When the world has failed, for whatever reason, every rank tells where it is; the watcher collects that for at most a
 * second and writes the one message that all calls return from then on. Waiting threads look at comm->failed.
 */
#include "comm_internal.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RECORD_FAILED = 1, RECORD_LEAVING = 2, SETTLE_MS = 1000, FAREWELL_MS = 2000 };

/* What one rank sends to those on other hosts. */
typedef struct record {
    uint32_t kind, cause_status, cause_channel, unused;
    char cause[CAUSE_BYTES];
    spw__place board[BOARD_ENTRIES];
} record;

typedef struct witness { /* what is known of one rank */
    bool ended, left, told;
    int unreached; /* of one that has ended, by all that is known: why its connection did, not by its end; 0: by that */
    int pidfd;     /* -1: not of this host, or its end was seen */
    spw__place board[BOARD_ENTRIES];
} witness;

struct spw__watch {
    spw_comm *comm;
    pthread_t thread;
    int wake_fd;
    _Atomic bool stop;
    spw__link *link; /* NULL: everybody is on this host */
    uint32_t *far;   /* (far_count) ranks in the world */
    uint32_t far_count;
    /* Of the thread. */
    witness *witnesses; /* (world) */
    record *received;   /* (far_count) */
    record mine;
    struct pollfd *polls; /* (1 + world) */
    bool announced;
    uint64_t announced_ns;
};

uint64_t
spw__watch_bytes(uint32_t world)
{
    return sizeof(spw__watch) + world * (sizeof(witness) + sizeof(record) + 64) + spw_touched_bytes(SPW_STACK_BYTES);
}

/* ---------------------------------------------------------------- the first cause, and what every call returns */

static void
wake(spw__watch *w)
{
    uint64_t one = 1;
    if (w != NULL && w->wake_fd >= 0 && write(w->wake_fd, &one, sizeof one) < 0) {
        /* full: it is awake already */
    }
}

void
spw__fail(spw_comm *comm, spw_status st, uint32_t link_id, const char *fmt, ...)
{
    char text[CAUSE_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    pthread_mutex_lock(&comm->lock);
    if (comm->cause.status == SPW_OK) {
        SPW_RAISE(&comm->cause, st, "%s", text);
        comm->cause_channel = link_id;
        atomic_store_explicit(&comm->failed, true, memory_order_release);
    }
    pthread_mutex_unlock(&comm->lock);
    wake(comm->watch);
}

spw_status
spw__failure(spw_comm *comm, spw_error *err)
{
    struct timespec until;
    spw_error failure;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 3;
    pthread_mutex_lock(&comm->lock);
    while (comm->watch != NULL && !atomic_load(&comm->settled) &&
           pthread_cond_clockwait(&comm->settled_cond, &comm->lock, CLOCK_MONOTONIC, &until) == 0) {
    }
    failure = atomic_load(&comm->settled) ? comm->failure : comm->cause;
    pthread_mutex_unlock(&comm->lock);
    if (err != NULL)
        *err = failure;
    return failure.status;
}

/* ---------------------------------------------------------------- where everybody is */

static void
read_board(spw__place *out, const spw__position *board)
{
    uint64_t now = spw_now_ns();
    for (uint32_t i = 0; i < BOARD_ENTRIES; i++) {
        const spw__position *p = &board[i];
        uint64_t since = atomic_load(&p->since_ns);
        out[i] = (spw__place){.link_id = atomic_load_explicit(&p->link_id, memory_order_acquire),
                              .op = atomic_load(&p->op),
                              .unit = atomic_load(&p->unit),
                              .in_call = atomic_load(&p->in_call),
                              .number = atomic_load(&p->number),
                              .bytes = atomic_load(&p->bytes),
                              .waited_ns = now > since ? now - since : 0};
        if (out[i].link_id != 0)
            memcpy(out[i].name, p->name, NAME_BYTES);
        out[i].name[NAME_BYTES - 1] = '\0';
    }
}

/* The entry that explains most: of the channel in question, else one inside a call. */
static const spw__place *
telling_place(const spw__place *board, uint32_t channel)
{
    const spw__place *best = NULL;
    for (uint32_t i = 0; i < BOARD_ENTRIES; i++) {
        const spw__place *p = &board[i];
        if (p->link_id == 0 || (p->number == 0 && p->link_id != channel))
            continue;
        if (p->link_id == channel)
            return p;
        if (best == NULL || p->in_call > best->in_call)
            best = p;
    }
    return best;
}

static void
describe(char *out, size_t out_bytes, const spw__watch *w, uint32_t rank, uint64_t *waited_ns)
{
    const witness *x = &w->witnesses[rank];
    const spw__place *p = telling_place(x->board, w->comm->cause_channel);
    char what[120];
    *waited_ns = 0;
    if (x->ended && x->unreached != 0) {
        snprintf(out, out_bytes, "cannot be reached");
        return;
    }
    if (x->ended) {
        snprintf(out, out_bytes, "has ended (pid %d)", (int)w->comm->peers[rank].pid);
        return;
    }
    if (x->left || !x->told) {
        snprintf(out, out_bytes, x->left ? "has closed" : "does not answer");
        return;
    }
    if (p == NULL || p->number == 0) {
        snprintf(out, out_bytes, "in no call");
        return;
    }
    if (p->op == SPW_COLL_EXCHANGE || p->op == SPW_COLL_BROADCAST || p->op == SPW_COLL_BARRIER)
        snprintf(what, sizeof what, "%s", spw_collective_name(p->op));
    else
        snprintf(what, sizeof what, "%s of unit %u", spw_collective_name(p->op), p->unit);
    snprintf(out, out_bytes, "%s%s, %llu bytes, number %llu on channel %s", p->in_call ? "" : "in no call; last was ",
             what, (unsigned long long)p->bytes, (unsigned long long)p->number, p->name);
    *waited_ns = p->in_call ? p->waited_ns : 0;
}

static size_t
append(spw_error *e, size_t at, const char *fmt, ...)
{
    va_list args;
    int n;
    if (at >= sizeof e->message)
        return at;
    va_start(args, fmt);
    n = vsnprintf(e->message + at, sizeof e->message - at, fmt, args);
    va_end(args);
    return at + (n > 0 ? (size_t)n : 0);
}

/* Ranks at the same place share a phrase: "ranks 0, 2-3: all_gather of unit 3 ...". */
static void
compose(const spw__watch *w, spw_error *e)
{
    enum { TEXT = 200 };
    uint32_t world = w->comm->info.world;
    char(*texts)[TEXT] = spw_mem_calloc(world, TEXT);
    uint64_t *waited = spw_mem_calloc(world, sizeof *waited);
    size_t at = strlen(e->message);
    for (uint32_t r = 0; texts != NULL && waited != NULL && r < world; r++)
        describe(texts[r], TEXT, w, r, &waited[r]);
    for (uint32_t r = 0; texts != NULL && waited != NULL && r < world; r++) {
        uint32_t same = 0;
        uint64_t longest = 0;
        const char *comma = " ";
        if (texts[r][0] == '\0')
            continue;
        for (uint32_t q = r + 1; q < world; q++)
            same += strcmp(texts[r], texts[q]) == 0;
        at = append(e, at, same > 0 ? "; ranks" : "; rank");
        for (uint32_t q = r; q < world; q++) {
            uint32_t last = q;
            if (strcmp(texts[r], texts[q]) != 0)
                continue;
            while (last + 1 < world && strcmp(texts[r], texts[last + 1]) == 0)
                last++;
            at = last > q ? append(e, at, "%s%u-%u", comma, q, last) : append(e, at, "%s%u", comma, q);
            comma = ", ";
            for (; q < last + 1; q++) {
                longest = waited[q] > longest ? waited[q] : longest;
                if (q != r)
                    texts[q][0] = '\0';
            }
            q = last;
        }
        at = append(e, at, ": %s", texts[r]);
        if (longest > 0)
            at = append(e, at, ", waiting %.1f s", (double)longest * 1e-9);
    }
    if (at >= sizeof e->message)
        memcpy(e->message + sizeof e->message - 4, "...", 4);
    spw_mem_free(texts);
    spw_mem_free(waited);
}

static void
settle(spw__watch *w)
{
    spw_comm *comm = w->comm;
    spw_error e;
    pthread_mutex_lock(&comm->lock);
    e = comm->cause;
    pthread_mutex_unlock(&comm->lock);
    compose(w, &e);
    pthread_mutex_lock(&comm->lock);
    comm->failure = e;
    atomic_store(&comm->settled, true);
    pthread_cond_broadcast(&comm->settled_cond);
    pthread_mutex_unlock(&comm->lock);
}

/* ---------------------------------------------------------------- what others say */

static void
adopt(spw__watch *w, uint32_t status, uint32_t channel, const char *cause)
{
    if (!spw__failed(w->comm))
        spw__fail(w->comm, status != SPW_OK && status < SPW_STATUS_COUNT ? (spw_status)status : SPW_ESYS, channel,
                  "%.*s", CAUSE_BYTES - 1, cause);
}

static void
rank_ended(spw__watch *w, uint32_t rank, int why)
{
    witness *x = &w->witnesses[rank];
    x->ended = !x->left && !x->told;
    x->unreached = why;
    if (!x->ended || spw__failed(w->comm))
        return;
    if (why != 0)
        spw__fail(w->comm, SPW_EIO, 0, "rank %u cannot be reached any more: its host or the network is gone (%s)", rank,
                  strerror(why));
    else
        spw__fail(w->comm, SPW_EIO, 0, "rank %u has ended (pid %d)", rank, (int)w->comm->peers[rank].pid);
}

static void
look_at_host(spw__watch *w)
{
    const spw_comm *comm = w->comm;
    for (uint32_t i = 0; i < comm->info.local_world; i++) {
        uint32_t rank = comm->locals[i], state = atomic_load_explicit(&comm->seats[i].state, memory_order_acquire);
        witness *x = &w->witnesses[rank];
        if (rank == comm->info.rank || x->told)
            continue;
        x->left = state == SEAT_LEFT;
        if (state == SEAT_FAILED) {
            memcpy(x->board, comm->seats[i].board, sizeof x->board);
            x->told = true;
            adopt(w, comm->seats[i].cause_status, comm->seats[i].cause_channel, comm->seats[i].cause);
        }
    }
}

static void
take_records(spw__watch *w)
{
    for (uint32_t i = 0; w->link != NULL && i < w->far_count; i++) {
        witness *x = &w->witnesses[w->far[i]];
        record *r = &w->received[i];
        if (w->link->recv[i].left > 0 || x->left || x->told || x->ended)
            continue;
        r->cause[CAUSE_BYTES - 1] = '\0';
        if (r->kind == RECORD_LEAVING) {
            x->left = true;
        } else {
            memcpy(x->board, r->board, sizeof x->board);
            x->told = true;
            adopt(w, r->cause_status, r->cause_channel, r->cause);
        }
    }
}

static void
look_far(spw__watch *w)
{
    int64_t moved = 0;
    while (w->link != NULL && (moved = w->link->transport->progress(w->link, 0)) > 0) {
    }
    take_records(w);
    if (moved < 0) {
        rank_ended(w, w->far[w->link->gone_idx], w->link->gone_errno);
        w->link->recv[w->link->gone_idx].left = w->link->send[w->link->gone_idx].left = 0;
    }
}

/* ---------------------------------------------------------------- what this rank says */

static void
send_record(spw__watch *w, uint32_t kind)
{
    w->mine.kind = kind;
    for (uint32_t i = 0; w->link != NULL && i < w->far_count; i++) {
        if (!w->witnesses[w->far[i]].ended && w->link->send[i].left == 0)
            w->link->send[i] = (spw__flow){.at = (char *)&w->mine, .left = sizeof w->mine};
    }
}

static void
announce(spw__watch *w)
{
    spw_comm *comm = w->comm;
    spw__seat *seat = &comm->seats[comm->info.local_rank];
    witness *x = &w->witnesses[comm->info.rank];
    pthread_mutex_lock(&comm->lock);
    w->mine.cause_status = seat->cause_status = comm->cause.status;
    w->mine.cause_channel = seat->cause_channel = comm->cause_channel;
    snprintf(w->mine.cause, CAUSE_BYTES, "%.*s", CAUSE_BYTES - 1, comm->cause.message);
    memcpy(seat->cause, w->mine.cause, CAUSE_BYTES);
    pthread_mutex_unlock(&comm->lock);
    read_board(w->mine.board, comm->board);
    memcpy(seat->board, w->mine.board, sizeof seat->board);
    memcpy(x->board, w->mine.board, sizeof x->board);
    x->told = true;
    atomic_store_explicit(&seat->state, SEAT_FAILED, memory_order_release);
    send_record(w, RECORD_FAILED);
    w->announced = true;
    w->announced_ns = spw_now_ns();
}

static bool
all_known(const spw__watch *w)
{
    for (uint32_t r = 0; r < w->comm->info.world; r++) {
        const witness *x = &w->witnesses[r];
        if (!x->told && !x->ended && !x->left)
            return false;
    }
    return true;
}

static bool
all_sent(const spw__watch *w)
{
    for (uint32_t i = 0; w->link != NULL && i < w->far_count; i++) {
        const witness *x = &w->witnesses[w->far[i]];
        if (w->link->send[i].left > 0 && !x->ended)
            return false;
    }
    return true;
}

/* ---------------------------------------------------------------- the thread */

static void
nap(spw__watch *w)
{
    nfds_t n = 0;
    uint64_t drained;
    w->polls[n++] = (struct pollfd){.fd = w->wake_fd, .events = POLLIN};
    for (uint32_t r = 0; r < w->comm->info.world; r++) {
        if (w->witnesses[r].pidfd >= 0)
            w->polls[n++] = (struct pollfd){.fd = w->witnesses[r].pidfd, .events = POLLIN, .revents = 0};
    }
    for (uint32_t i = 0; w->link != NULL && w->link->fds != NULL && i < w->far_count; i++) {
        if (w->link->fds[i] >= 0 &&
            w->link->recv[i].left > 0) /* one that has said its last is always readable: its end */
            w->polls[n++] = (struct pollfd){.fd = w->link->fds[i], .events = POLLIN};
    }
    if (poll(w->polls, n, w->link != NULL && w->link->fds == NULL ? SLICE_MS / 2 : SLICE_MS) <= 0)
        return;
    if (w->polls[0].revents != 0 && read(w->wake_fd, &drained, sizeof drained) < 0) {
        /* somebody else's wake was taken with the last one */
    }
    look_at_host(w); /* first what they said, then that they have ended */
    n = 1;
    for (uint32_t r = 0; r < w->comm->info.world; r++) {
        witness *x = &w->witnesses[r];
        if (x->pidfd < 0 || w->polls[n++].revents == 0)
            continue;
        close(x->pidfd);
        x->pidfd = -1;
        look_at_host(w); /* its last word may have come since */
        rank_ended(w, r, 0);
    }
}

static void *
watch_main(void *arg)
{
    spw__watch *w = arg;
    spw_comm *comm = w->comm;
    (void)pthread_setname_np(pthread_self(), "spw-watch");
    while (!atomic_load(&w->stop)) {
        look_at_host(w);
        look_far(w);
        if (spw__failed(comm) && !w->announced) {
            announce(w);
            look_far(w);
        }
        if (w->announced && !atomic_load(&comm->settled) &&
            (all_known(w) || spw_now_ns() - w->announced_ns > SETTLE_MS * 1000000ull))
            settle(w);
        nap(w);
    }
    if (!spw__failed(comm)) {
        send_record(w, RECORD_LEAVING);
    } else if (!w->announced) {
        announce(w);
        settle(w);
    }
    for (uint32_t i = 0; i < comm->info.local_world; i++) /* these need no farewell */
        w->witnesses[comm->locals[i]].left = true;
    /* MPI must not end with messages under way: without a failure everybody's farewell is waited for */
    for (uint64_t until = spw_now_ns() + FAREWELL_MS * 1000000ull; w->link != NULL && spw_now_ns() < until;) {
        look_far(w);
        if (all_sent(w) && (w->announced || all_known(w) || spw__failed(comm)))
            break;
        spw_sleep_ns(1000000);
    }
    return NULL;
}

static void
watch_free(spw__watch *w)
{
    for (uint32_t r = 0; w->witnesses != NULL && r < w->comm->info.world; r++) {
        if (w->witnesses[r].pidfd >= 0)
            close(w->witnesses[r].pidfd);
    }
    if (w->link != NULL)
        w->link->transport->link_close(w->link);
    if (w->wake_fd >= 0)
        close(w->wake_fd);
    spw_mem_free(w->witnesses);
    spw_mem_free(w->received);
    spw_mem_free(w->far);
    spw_mem_free(w->polls);
    spw_mem_free(w);
}

/* A descriptor that tells when a process of this host ends; -1 where the kernel has none, and timeouts must do. */
static int
watch_process(const spw__peer *peer, bool *ended)
{
    int fd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
    *ended = spw__process_start_ticks(peer->pid) != peer->start_ticks; /* the number may be another's by now */
    if (fd >= 0 && *ended) {
        close(fd);
        fd = -1;
    }
    return fd;
}

spw_status
spw__watch_start(spw_comm *comm, uint64_t deadline_ns, spw_error *err)
{
    uint32_t world = comm->info.world;
    spw__watch *w = spw_mem_zalloc(sizeof *w);
    spw_status st = SPW_OK;
    int rc;
    if (w == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "watcher of ranks");
    w->comm = comm;
    w->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->witnesses = spw_mem_calloc(world, sizeof *w->witnesses);
    w->received = spw_mem_calloc(world, sizeof *w->received);
    w->far = spw_mem_calloc(world, sizeof *w->far);
    w->polls = spw_mem_calloc(world + 1, sizeof *w->polls);
    for (uint32_t r = 0; w->witnesses != NULL && r < world; r++)
        w->witnesses[r].pidfd = -1;
    if (w->wake_fd < 0 || w->witnesses == NULL || w->received == NULL || w->far == NULL || w->polls == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "watcher of %u ranks", world);
    for (uint32_t r = 0; st == SPW_OK && r < world; r++) {
        witness *x = &w->witnesses[r];
        if (comm->peers[r].host != comm->info.host)
            w->far[w->far_count++] = r;
        else if (r != comm->info.rank)
            x->pidfd = watch_process(&comm->peers[r], &x->ended);
        if (x->ended)
            st = SPW_RAISE(err, SPW_EIO, "rank %u has ended (pid %d)", r, (int)comm->peers[r].pid);
    }
    if (st == SPW_OK && w->far_count > 0)
        st = comm->transport->link_create(comm->transport, &w->link, LINK_CONTROL, w->far, w->far_count, err);
    if (st == SPW_OK && w->link != NULL)
        st = comm->transport->link_join(w->link, deadline_ns, err);
    for (uint32_t i = 0; st == SPW_OK && i < w->far_count; i++)
        w->link->recv[i] = (spw__flow){.at = (char *)&w->received[i], .left = sizeof(record)};
    if (st == SPW_OK) {
        comm->watch = w;
        rc = pthread_create(&w->thread, NULL, watch_main, w);
        if (rc != 0)
            st = SPW_RAISE_SYS(err, rc, "start of the watcher of ranks " SPW_THREAD_LIMITS);
    }
    if (st != SPW_OK) {
        comm->watch = NULL;
        watch_free(w);
    }
    return st;
}

void
spw__watch_stop(spw_comm *comm)
{
    spw__watch *w = comm->watch;
    if (w == NULL)
        return;
    atomic_store(&w->stop, true);
    wake(w);
    pthread_join(w->thread, NULL);
    comm->watch = NULL;
    if (!spw__failed(comm))
        atomic_store_explicit(&comm->seats[comm->info.local_rank].state, SEAT_LEFT, memory_order_release);
    watch_free(w);
}
