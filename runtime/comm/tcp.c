/*
 * Sockets: how processes find each other. Rank 0 listens at MASTER_ADDR:MASTER_PORT; the others connect, say who they
 * are and where they listen, and get the list of all and a number that only this job knows. Whoever connects without
 * it is turned away. What is gathered while the world is made passes through rank 0.
 *
 * Debian's /etc/hosts gives a machine's own name the address 127.0.1.1. Where MASTER_ADDR is a name that its own host knows
 * as such, the ranks there listen everywhere, and others take their addresses for that of rank 0 with another port.
 */
#include "comm_tcp.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HELLO_MAGIC = 0x53505721, TELL_AFTER_S = 30 };
#define TRY_NS    3000000000u
#define MOMENT_NS 500000000u
#define GRACE_NS  2000000000u /* rank 0 says who is missing a little after the time is over */

/* What a process says first to rank 0. */
typedef struct hello {
    uint32_t magic, rank, world, port;
} hello;

/* What rank 0 answers, then and to everything that is gathered. */
typedef struct verdict {
    uint32_t magic, status;
    uint64_t cookie;
    char text[400];
} verdict;

static verdict
verdict_of(uint64_t cookie, spw_status st, const spw_error *why)
{
    verdict v = {.magic = HELLO_MAGIC, .status = st, .cookie = cookie};
    snprintf(v.text, sizeof v.text, "%.399s", why->message);
    return v;
}

static spw_status
raise_verdict(const verdict *v, spw_error *err)
{
    if (v->status == SPW_OK)
        return SPW_OK;
    return SPW_RAISE(err, v->status < SPW_STATUS_COUNT ? (spw_status)v->status : SPW_ESYS, "%.*s",
                     (int)sizeof v->text - 1, v->text);
}

int
spw__tcp_left_ms(uint64_t deadline_ns)
{
    uint64_t now = spw_now_ns();
    return now >= deadline_ns
               ? 0
               : (int)((deadline_ns - now) / 1000000 + 1 < 1000 ? (deadline_ns - now) / 1000000 + 1 : 1000);
}

/* A host that is gone without a word (its power, its cable) is noticed within 50 s, also by who only waits to hear from it. */
void
spw__tcp_prepare(int fd)
{
    int one = 1, idle_s = 20, every_s = 10, probes = 3;
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

/* All bytes or an errno; ECONNRESET when the other side has ended. */
int
spw__tcp_send_all(int fd, const void *data, uint64_t bytes, uint64_t deadline_ns)
{
    for (const char *at = data; bytes > 0;) {
        ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
        if (n > 0) {
            at += n;
            bytes -= (uint64_t)n;
        } else if (errno == EAGAIN) {
            if (spw__tcp_left_ms(deadline_ns) == 0)
                return ETIMEDOUT;
            (void)poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, spw__tcp_left_ms(deadline_ns));
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

int
spw__tcp_recv_all(int fd, void *data, uint64_t bytes, uint64_t deadline_ns)
{
    for (char *at = data; bytes > 0;) {
        ssize_t n = recv(fd, at, bytes, 0);
        if (n > 0) {
            at += n;
            bytes -= (uint64_t)n;
        } else if (n == 0) {
            return ECONNRESET;
        } else if (errno == EAGAIN) {
            if (spw__tcp_left_ms(deadline_ns) == 0)
                return ETIMEDOUT;
            (void)poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, spw__tcp_left_ms(deadline_ns));
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

/* ---------------------------------------------------------------- addresses */

uint32_t
spw__tcp_port_of(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? ntohs(((const struct sockaddr_in6 *)a)->sin6_port)
                                    : ntohs(((const struct sockaddr_in *)a)->sin_port);
}

static void
set_port(struct sockaddr_storage *a, uint32_t port)
{
    if (a->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)a)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)a)->sin_port = htons((uint16_t)port);
}

socklen_t
spw__tcp_address_len(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

static bool
is_loopback(const struct sockaddr_storage *a)
{
    const struct sockaddr_in6 *a6 = (const struct sockaddr_in6 *)a;
    if (a->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
    return a->ss_family == AF_INET6 && (IN6_IS_ADDR_LOOPBACK(&a6->sin6_addr) ||
                                        (IN6_IS_ADDR_V4MAPPED(&a6->sin6_addr) && a6->sin6_addr.s6_addr[12] == 127));
}

/* Whether MASTER_ADDR says that nobody comes from another host: an address, or a name that means this host everywhere. */
static bool
means_loopback(const spw__launch *launch)
{
    struct in6_addr unused;
    return strncmp(launch->host, "localhost", 9) == 0 || inet_pton(AF_INET, launch->host, &unused) == 1 ||
           inet_pton(AF_INET6, launch->host, &unused) == 1;
}

/* Everywhere instead of at a loopback address that other hosts would be sent to. */
static void
open_up(struct sockaddr_storage *a, const spw__launch *launch)
{
    struct sockaddr_storage any = {.ss_family = a->ss_family};
    if (!is_loopback(a) || means_loopback(launch))
        return;
    set_port(&any, spw__tcp_port_of(a));
    *a = any;
}

const char *
spw__tcp_show_host(char out[SPW__HOST_BYTES], const struct sockaddr_storage *a)
{
    const void *at = a->ss_family == AF_INET6 ? (const void *)&((const struct sockaddr_in6 *)a)->sin6_addr
                                              : (const void *)&((const struct sockaddr_in *)a)->sin_addr;
    return inet_ntop(a->ss_family, at, out, SPW__HOST_BYTES) != NULL ? out : "unknown";
}

/* Once, when the others take long: what this rank waits for. */
static bool
time_to_tell(uint64_t *tell_ns)
{
    bool now = spw_now_ns() >= *tell_ns;
    if (now)
        *tell_ns = UINT64_MAX;
    return now;
}

static spw_status
resolve(const spw__launch *launch, struct addrinfo **out, spw_error *err)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    int rc = getaddrinfo(launch->host, launch->port, &hints, out);
    if (rc != 0)
        return SPW_RAISE(err, SPW_ECONFIG, "MASTER_ADDR %s, MASTER_PORT %s: %s", launch->host, launch->port,
                         gai_strerror(rc));
    return SPW_OK;
}

static int
listen_at(struct sockaddr_storage *a)
{
    int one = 1, errnum, fd = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t len = sizeof *a;
    if (fd < 0)
        return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)a, spw__tcp_address_len(a)) == 0 && listen(fd, 4096) == 0 &&
        getsockname(fd, (struct sockaddr *)a, &len) == 0) {
        spw__tcp_prepare(fd);
        return fd;
    }
    errnum = errno;
    close(fd);
    errno = errnum;
    return -1;
}

/* ---------------------------------------------------------------- rank 0 */

static spw_status
listen_as_master(spw__tcp *t, const spw__launch *launch, spw_error *err)
{
    struct addrinfo *list;
    SPW_TRY(resolve(launch, &list, err));
    for (struct addrinfo *a = list; a != NULL && t->listen_fd < 0; a = a->ai_next) {
        struct sockaddr_storage at = {0};
        memcpy(&at, a->ai_addr, a->ai_addrlen);
        open_up(&at, launch);
        t->listen_fd = listen_at(&at);
        if (t->listen_fd < 0 && errno == EADDRNOTAVAIL) { /* a name for this machine that is not its own: behind NAT */
            struct sockaddr_storage any = {.ss_family = at.ss_family};
            set_port(&any, spw__tcp_port_of(&at));
            t->listen_fd = listen_at(&any);
            t->elsewhere = true;
        }
    }
    freeaddrinfo(list);
    if (t->listen_fd < 0)
        return SPW_RAISE_SYS(err, errno, "rank 0 listens at %s:%s", launch->host, launch->port);
    return SPW_OK;
}

/* Who has not come, and a reason that there may be. */
static void
list_missing(const spw__tcp *t, const spw__launch *launch, char *out, size_t out_bytes)
{
    enum { LIST = 200 };
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t r = 1; r < t->base.world && at + 16 < LIST; r++) {
        if (t->star[r] < 0)
            at += (size_t)snprintf(out + at, out_bytes - at, "%s%u", at > 0 ? ", " : "", r);
    }
    if (at + 16 >= LIST)
        at += (size_t)snprintf(out + at, out_bytes - at, ", ...");
    if (t->elsewhere)
        snprintf(out + at, out_bytes - at, "; MASTER_ADDR %.80s is no address of this host, where rank 0 runs",
                 launch->host);
}

/* A rank that has come and ended since may be started again. */
static void
miss_ended(spw__tcp *t, uint32_t rank, uint32_t *come)
{
    char byte;
    ssize_t n = t->star[rank] >= 0 ? recv(t->star[rank], &byte, 1, MSG_PEEK) : 1;
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    close(t->star[rank]);
    t->star[rank] = -1;
    --*come;
}

/* Looks at a complete hello. A rank of ours gets its place, and a stranger is turned away; who is refused stays the caller's. */
static spw_status
admit(spw__tcp *t, spw__guest *g, uint32_t *come, spw_error *err)
{
    hello h;
    memcpy(&h, g->says, sizeof h);
    if (h.magic != HELLO_MAGIC) {
        close(g->fd);
        g->fd = -1;
        return SPW_OK;
    }
    if (h.world != t->base.world || h.rank >= t->base.world)
        return SPW_RAISE(err, SPW_ECONFIG, "rank %u says that there are %u ranks, rank 0 that there are %u", h.rank,
                         h.world, t->base.world);
    miss_ended(t, h.rank, come);
    if (h.rank == 0 || t->star[h.rank] >= 0)
        return SPW_RAISE(err, SPW_ECONFIG, "two processes say that they are rank %u", h.rank);
    t->star[h.rank] = g->fd;
    t->addresses[h.rank] = g->from;
    set_port(&t->addresses[h.rank], h.port);
    g->fd = -1;
    ++*come;
    return SPW_OK;
}

/* Tells g why, and for a moment whoever else comes: they would wait for a rank 0 that has gone. */
static void
refuse(spw__door *door, spw__guest *g, const spw_error *why)
{
    verdict v = verdict_of(0, why->status, why);
    uint64_t until = spw_now_ns() + MOMENT_NS;
    do {
        if (g->fd >= 0) {
            (void)spw__tcp_send_all(g->fd, &v, sizeof v, until);
            close(g->fd);
        }
    } while (spw_now_ns() < until && spw__door_next(door, 20, g, NULL) == SPW_OK);
    if (g->fd >= 0)
        close(g->fd);
}

static spw_status
receive_ranks(spw__tcp *t, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, spw_error *why)
{
    uint64_t tell_ns = spw_now_ns() + TELL_AFTER_S * 1000000000ull;
    uint32_t come = 1;
    char missing[400];
    spw__guest g = {.fd = -1};
    spw__door door;
    spw_status st = spw__door_open(&door, t->listen_fd, sizeof(hello), t->base.world, why);
    while (st == SPW_OK && come < t->base.world) {
        int left = spw__tcp_left_ms(deadline_ns);
        if (left == 0) {
            list_missing(t, launch, missing, sizeof missing);
            st = SPW_RAISE(why, SPW_ETIMEDOUT, "of %u ranks, these did not come in %.1f s (SPW_JOIN_TIMEOUT): %s",
                           t->base.world, timeout_s, missing);
            break;
        }
        if (time_to_tell(&tell_ns)) {
            list_missing(t, launch, missing, sizeof missing);
            spw_log(SPW_LOG_WARN, "rank 0 waits, up to %.0f s in all (SPW_JOIN_TIMEOUT), for ranks %s", timeout_s,
                    missing);
        }
        st = spw__door_next(&door, left, &g, why);
        if (st == SPW_OK && g.fd >= 0 && (st = admit(t, &g, &come, why)) != SPW_OK)
            refuse(&door, &g, why);
        for (uint32_t r = 1; r < t->base.world && come == t->base.world; r++)
            miss_ended(t, r, &come);
    }
    spw__door_close(&door);
    return st;
}

/*
 * The verdict to all others, and after a good one what they asked for. Whom it does not reach has ended: what is gathered next shows it,
 * or, when all has been, the watcher.
 */
static void
answer(const spw__tcp *t, const verdict *v, const void *more, uint64_t bytes, uint64_t deadline_ns)
{
    for (uint32_t r = 1; r < t->base.world; r++) {
        if (t->star[r] >= 0 && spw__tcp_send_all(t->star[r], v, sizeof *v, deadline_ns) == 0 && v->status == SPW_OK)
            (void)spw__tcp_send_all(t->star[r], more, bytes, deadline_ns);
    }
}

static spw_status
open_as_master(spw__tcp *t, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, spw_error *err)
{
    verdict v;
    spw_error why = {0};
    spw_status st = listen_as_master(t, launch, err);
    if (st != SPW_OK)
        return st;
    if (getrandom(&t->cookie, sizeof t->cookie, 0) != sizeof t->cookie)
        t->cookie = spw_now_ns() * 0x9e3779b97f4a7c15u;
    st = receive_ranks(t, launch, deadline_ns, timeout_s, &why);
    v = verdict_of(t->cookie, st, &why);
    answer(t, &v, t->addresses, t->base.world * sizeof *t->addresses, deadline_ns + GRACE_NS / 2);
    if (st != SPW_OK && err != NULL)
        *err = why;
    return st;
}

/* ---------------------------------------------------------------- the others */

/* Where nobody listens, and the kernel happens to take the very port for the connection's own end, it connects to itself. */
static bool
is_own_end(int fd)
{
    struct sockaddr_storage own = {0}, other = {0};
    socklen_t own_len = sizeof own, other_len = sizeof other;
    return getsockname(fd, (struct sockaddr *)&own, &own_len) == 0 &&
           getpeername(fd, (struct sockaddr *)&other, &other_len) == 0 && memcmp(&own, &other, sizeof own) == 0;
}

int
spw__tcp_connect(const struct sockaddr_storage *to, uint64_t deadline_ns)
{
    int errnum = 0, fd = socket(to->ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const struct linger at_once = {.l_onoff = 1};
    socklen_t len = sizeof errnum;
    if (fd < 0)
        return -1;
    spw__tcp_prepare(fd);
    if (connect(fd, (const struct sockaddr *)to, spw__tcp_address_len(to)) != 0) {
        errnum = errno;
        if (errnum == EINPROGRESS) {
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            int ready;
            do
                ready = poll(&p, 1, spw__tcp_left_ms(deadline_ns));
            while ((ready == 0 || (ready < 0 && errno == EINTR)) && spw__tcp_left_ms(deadline_ns) > 0);
            errnum = ready > 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &errnum, &len) == 0 ? errnum : ETIMEDOUT;
        }
    }
    if (errnum == 0 && is_own_end(fd)) {
        (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once); /* the port is rank 0's */
        errnum = ECONNREFUSED;
    }
    if (errnum != 0) {
        close(fd);
        errno = errnum;
        return -1;
    }
    return fd;
}

/* One attempt; err says why there is no connection. */
static spw_status
try_master(spw__tcp *t, const spw__launch *launch, uint64_t deadline_ns, spw_error *err)
{
    char host[SPW__HOST_BYTES];
    struct addrinfo *list;
    SPW_TRY(resolve(launch, &list, err));
    for (struct addrinfo *a = list; a != NULL && t->star[0] < 0; a = a->ai_next) {
        uint64_t try_ns = spw_now_ns() + TRY_NS; /* one that does not answer leaves the others time */
        memset(&t->addresses[0], 0, sizeof t->addresses[0]);
        memcpy(&t->addresses[0], a->ai_addr, a->ai_addrlen);
        t->star[0] = spw__tcp_connect(&t->addresses[0], try_ns < deadline_ns ? try_ns : deadline_ns);
        if (t->star[0] < 0)
            SPW_RAISE(err, SPW_ETIMEDOUT, "nobody listens at %s:%s, which is %s here (%s)", launch->host, launch->port,
                      spw__tcp_show_host(host, &t->addresses[0]), strerror(errno));
    }
    freeaddrinfo(list);
    return t->star[0] >= 0 ? SPW_OK : SPW_ETIMEDOUT;
}

/* It may start later than this rank, and so may its name. */
static spw_status
reach_master(spw__tcp *t, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, spw_error *err)
{
    uint64_t tell_ns = spw_now_ns() + TELL_AFTER_S * 1000000000ull, nap_ns = 20000000;
    spw_error why = {0};
    spw_status st;
    while ((st = try_master(t, launch, deadline_ns, &why)) != SPW_OK && spw__tcp_left_ms(deadline_ns) > 0) {
        if (time_to_tell(&tell_ns))
            spw_log(SPW_LOG_WARN, "rank %u waits for rank 0, up to %.0f s in all (SPW_JOIN_TIMEOUT): %s", launch->rank,
                    timeout_s, why.message);
        spw_sleep_ns(nap_ns);
        nap_ns = nap_ns < 300000000 ? nap_ns + nap_ns / 8
                                    : nap_ns; /* hundreds of ranks ask one host, or one server of names */
    }
    return st == SPW_OK
               ? st
               : SPW_RAISE(err, st, "rank 0 did not come in %.1f s (SPW_JOIN_TIMEOUT): %s", timeout_s, why.message);
}

/* What rank 0 says of another rank, as it is seen from here, where rank 0 is at master. */
static void
see_from_here(struct sockaddr_storage *a, const struct sockaddr_storage *master)
{
    struct sockaddr_in6 *a6 = (struct sockaddr_in6 *)a;
    if (is_loopback(a) && !is_loopback(master)) { /* a neighbour of rank 0 */
        uint32_t port = spw__tcp_port_of(a);
        *a = *master;
        set_port(a, port);
    } else if (a->ss_family == AF_INET6 && master->ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&a6->sin6_addr)) {
        /* the interface had rank 0's number of it */
        a6->sin6_scope_id = ((const struct sockaddr_in6 *)master)->sin6_scope_id;
    }
}

/* Connects, says who this is and hears the verdict: 0 or the errno of the connection, a status of rank 0's in v. */
static spw_status
knock(spw__tcp *t, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, verdict *v, int *rc,
      spw_error *err)
{
    struct sockaddr_storage own = {0};
    socklen_t len = sizeof own;
    hello h = {.magic = HELLO_MAGIC, .rank = t->base.rank, .world = t->base.world};
    SPW_TRY(reach_master(t, launch, deadline_ns, timeout_s, err));
    (void)getsockname(t->star[0], (struct sockaddr *)&own, &len);
    set_port(&own, 0);
    open_up(&own, launch);
    t->listen_fd = listen_at(&own); /* on the interface that leads to rank 0 */
    if (t->listen_fd < 0)
        return SPW_RAISE_SYS(err, errno, "listening for other ranks");
    h.port = spw__tcp_port_of(&own);
    *rc = spw__tcp_send_all(t->star[0], &h, sizeof h, deadline_ns);
    if (*rc == 0)
        *rc = spw__tcp_recv_all(t->star[0], v, sizeof *v, deadline_ns + GRACE_NS);
    if (*rc == 0 && v->magic != HELLO_MAGIC)
        return SPW_RAISE(err, SPW_ECONFIG, "what listens at %s:%s is not rank 0", launch->host, launch->port);
    return SPW_OK;
}

static spw_status
open_as_guest(spw__tcp *t, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, spw_error *err)
{
    struct sockaddr_storage master;
    verdict v = {0};
    int rc = 0;
    SPW_TRY(knock(t, launch, deadline_ns, timeout_s, &v, &rc, err));
    while ((rc == ECONNRESET || rc == EPIPE) && spw__tcp_left_ms(deadline_ns) > 0) {
        /* whoever listened has gone: rank 0 of a world before this one, that was about to close */
        close(t->star[0]);
        close(t->listen_fd);
        t->star[0] = t->listen_fd = -1;
        spw_sleep_ns(20000000);
        SPW_TRY(knock(t, launch, deadline_ns, timeout_s, &v, &rc, err));
    }
    if (rc == 0)
        SPW_TRY(raise_verdict(&v, err));
    if (rc == 0) {
        t->cookie = v.cookie;
        master = t->addresses[0]; /* as seen from here */
        rc = spw__tcp_recv_all(t->star[0], t->addresses, t->base.world * sizeof *t->addresses, deadline_ns + GRACE_NS);
        t->addresses[0] = master;
        for (uint32_t r = 1; r < t->base.world; r++)
            see_from_here(&t->addresses[r], &master);
    }
    if (rc != 0)
        return SPW_RAISE_SYS(err, rc, "rank 0 at %s:%s does not answer", launch->host, launch->port);
    return SPW_OK;
}

/* ---------------------------------------------------------------- the transport */

/* Rank 0's part of a gather. Once one is missed the others are heard for a moment still: what they said must not be in the way of the answer. */
static spw_status
collect(const spw__tcp *t, const void *mine, char *all, uint32_t bytes, uint64_t deadline_ns, spw_error *why)
{
    spw_status st = SPW_OK;
    memcpy(all, mine, bytes);
    for (uint32_t r = 1; r < t->base.world; r++) {
        int rc = spw__tcp_recv_all(t->star[r], all + (uint64_t)r * bytes, bytes, deadline_ns);
        if (rc == 0 || st != SPW_OK)
            continue;
        st = SPW_RAISE(why, rc == ETIMEDOUT ? SPW_ETIMEDOUT : SPW_EIO, "rank %u has ended, or did not come: %s", r,
                       strerror(rc));
        deadline_ns = spw_now_ns() + MOMENT_NS;
    }
    return st;
}

static spw_status
gather(spw__transport *base, const void *mine, void *all, uint32_t bytes, uint64_t deadline_ns, spw_error *err)
{
    spw__tcp *t = (spw__tcp *)base;
    spw_error why = {0};
    verdict v;
    int rc;
    if (base->rank == 0) {
        spw_status st = collect(t, mine, all, bytes, deadline_ns, &why);
        v = verdict_of(t->cookie, st, &why);
        answer(t, &v, all, (uint64_t)bytes * base->world, deadline_ns + GRACE_NS / 2);
        if (st != SPW_OK && err != NULL)
            *err = why;
        return st;
    }
    rc = spw__tcp_send_all(t->star[0], mine, bytes, deadline_ns);
    if (rc == 0)
        rc = spw__tcp_recv_all(t->star[0], &v, sizeof v, deadline_ns + GRACE_NS);
    if (rc == 0)
        SPW_TRY(raise_verdict(&v, err));
    if (rc == 0)
        rc = spw__tcp_recv_all(t->star[0], all, (uint64_t)bytes * base->world, deadline_ns + GRACE_NS);
    return rc == 0 ? SPW_OK : SPW_RAISE_SYS(err, rc, "rank 0 has ended, or others did not come");
}

static void
tcp_close(spw__transport *base, bool failed)
{
    spw__tcp *t = (spw__tcp *)base;
    (void)failed;
    for (uint32_t r = 0; t->star != NULL && r < base->world; r++) {
        if (t->star[r] >= 0)
            close(t->star[r]);
    }
    if (t->listen_fd >= 0)
        close(t->listen_fd);
    spw_mem_free(t->star);
    spw_mem_free(t->addresses);
    spw_mem_free(t);
}

spw_status
spw__tcp_open(spw__transport **out, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, spw_error *err)
{
    spw__tcp *t = spw_mem_zalloc(sizeof *t);
    spw_status st;
    *out = NULL;
    if (t == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "sockets of ranks");
    t->base = (spw__transport){.name = "tcp",
                               .rank = launch->rank,
                               .world = launch->world,
                               .gather = gather,
                               .link_create = spw__tcp_link_create,
                               .link_join = spw__tcp_link_join,
                               .progress = spw__tcp_progress,
                               .link_close = spw__tcp_link_close,
                               .close = tcp_close};
    snprintf(t->base.about, sizeof t->base.about, "rank 0 at %.80s:%s", launch->host, launch->port);
    t->listen_fd = -1;
    t->addresses = spw_mem_calloc(launch->world, sizeof *t->addresses);
    t->star = spw_mem_calloc(launch->world, sizeof *t->star);
    for (uint32_t r = 0; t->star != NULL && r < launch->world; r++)
        t->star[r] = -1;
    if (t->addresses == NULL || t->star == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "sockets of %u ranks", launch->world);
    else if (launch->rank == 0)
        st = open_as_master(t, launch, deadline_ns, timeout_s, err);
    else
        st = open_as_guest(t, launch, deadline_ns, timeout_s, err);
    if (st != SPW_OK) {
        tcp_close(&t->base, true);
        return st;
    }
    *out = &t->base;
    return SPW_OK;
}
