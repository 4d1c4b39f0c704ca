/*
 * Links over sockets: one connection per pair of ranks and channel, made by the higher rank; bytes move without
 * blocking, both ways with all peers at once, so that no order of sends and receives can come to a standstill.
 */
#include "comm_tcp.h"
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

enum { LINK_MAGIC = 0x53505722 };

typedef struct tcp_link {
    spw__link base;
    struct pollfd *polls; /* (peer_count) */
} tcp_link;

/* What a connection says first. */
typedef struct greeting {
    uint32_t magic, id;
    uint64_t cookie;
    uint32_t rank, unused;
} greeting;

static uint32_t
peer_idx(const spw__link *link, uint32_t rank)
{
    for (uint32_t i = 0; i < link->peer_count; i++) {
        if (link->peers[i] == rank)
            return i;
    }
    return NO_IDX;
}

static spw_status
connect_lower(spw__tcp *t, spw__link *link, uint64_t deadline_ns, spw_error *err)
{
    greeting g = {.magic = LINK_MAGIC, .id = link->id, .cookie = t->cookie, .rank = t->base.rank};
    for (uint32_t i = 0; i < link->peer_count; i++) {
        uint32_t rank = link->peers[i];
        char host[SPW__HOST_BYTES];
        int rc = 0;
        if (rank > t->base.rank)
            continue;
        link->fds[i] = spw__tcp_connect(&t->addresses[rank], deadline_ns);
        rc = link->fds[i] < 0 ? errno : spw__tcp_send_all(link->fds[i], &g, sizeof g, deadline_ns);
        if (rc != 0)
            return SPW_RAISE_SYS(err, rc, "connection to rank %u, which listens at %s, port %u", rank,
                                 spw__tcp_show_host(host, &t->addresses[rank]), spw__tcp_port_of(&t->addresses[rank]));
    }
    return SPW_OK;
}

/* A stranger is turned away. */
static spw_status
receive(spw__tcp *t, spw__link *link, const spw__guest *guest, uint32_t *missing, spw_error *err)
{
    greeting g;
    uint32_t i;
    memcpy(&g, guest->says, sizeof g);
    if (g.magic != LINK_MAGIC || g.cookie != t->cookie) {
        close(guest->fd);
        return SPW_OK;
    }
    i = peer_idx(link, g.rank);
    if (g.id != link->id || i == NO_IDX || link->fds[i] >= 0) {
        close(guest->fd);
        return SPW_RAISE(err, SPW_EINVAL, "rank %u opens another channel", g.rank);
    }
    link->fds[i] = guest->fd;
    --*missing;
    return SPW_OK;
}

static spw_status
accept_higher(spw__tcp *t, spw__link *link, uint64_t deadline_ns, spw_error *err)
{
    uint32_t missing = 0;
    spw__door door = {.count = 0};
    spw_status st = SPW_OK;
    for (uint32_t i = 0; i < link->peer_count; i++)
        missing += link->peers[i] > t->base.rank;
    if (missing > 0)
        st = spw__door_open(&door, t->listen_fd, sizeof(greeting), missing, err);
    while (st == SPW_OK && missing > 0) {
        spw__guest guest;
        int left = spw__tcp_left_ms(deadline_ns);
        if (left == 0)
            st = SPW_RAISE(err, SPW_ETIMEDOUT, "%u ranks did not connect in time", missing);
        else
            st = spw__door_next(&door, left, &guest, err);
        if (st == SPW_OK && guest.fd >= 0)
            st = receive(t, link, &guest, &missing, err);
    }
    spw__door_close(&door);
    return st;
}

spw_status
spw__tcp_link_create(spw__transport *base, spw__link **out, uint32_t id, const uint32_t *peers, uint32_t peer_count,
                     spw_error *err)
{
    tcp_link *l = spw_mem_zalloc(sizeof *l);
    *out = NULL;
    if (l == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "connections to %u ranks", peer_count);
    l->base = (spw__link){.transport = base, .id = id, .peers = peers, .peer_count = peer_count};
    l->base.send = spw_mem_calloc(peer_count, sizeof *l->base.send);
    l->base.recv = spw_mem_calloc(peer_count, sizeof *l->base.recv);
    l->base.fds = spw_mem_calloc(peer_count, sizeof *l->base.fds);
    l->polls = spw_mem_calloc(peer_count, sizeof *l->polls);
    for (uint32_t i = 0; l->base.fds != NULL && i < peer_count; i++)
        l->base.fds[i] = -1;
    if (l->base.send == NULL || l->base.recv == NULL || l->base.fds == NULL || l->polls == NULL) {
        spw__tcp_link_close(&l->base);
        return SPW_RAISE(err, SPW_ENOMEM, "connections to %u ranks", peer_count);
    }
    *out = &l->base;
    return SPW_OK;
}

spw_status
spw__tcp_link_join(spw__link *link, uint64_t deadline_ns, spw_error *err)
{
    spw__tcp *t = (spw__tcp *)link->transport;
    SPW_TRY(connect_lower(t, link, deadline_ns, err));
    return accept_higher(t, link, deadline_ns, err);
}

void
spw__tcp_link_close(spw__link *link)
{
    tcp_link *l = (tcp_link *)link;
    if (l == NULL)
        return;
    for (uint32_t i = 0; link->fds != NULL && i < link->peer_count; i++) {
        if (link->fds[i] >= 0)
            close(link->fds[i]);
    }
    spw_mem_free(link->send);
    spw_mem_free(link->recv);
    spw_mem_free(link->fds);
    spw_mem_free(l->polls);
    spw_mem_free(l);
}

/* Of one flow what goes without waiting; -1: the connection has ended, *why as of the link's gone_errno. */
static int64_t
move(int fd, spw__flow *f, bool sends, int *why)
{
    int64_t moved = 0;
    while (f->left > 0) {
        ssize_t n = sends ? send(fd, f->at, f->left, MSG_NOSIGNAL) : recv(fd, f->at, f->left, 0);
        if (n > 0) {
            f->at += n;
            f->left -= (uint64_t)n;
            moved += n;
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && errno == EAGAIN) {
            break;
        } else {
            *why = n == 0 || errno == ECONNRESET || errno == EPIPE ? 0 : errno;
            return moved > 0 ? moved : -1; /* what came is told first; the next call meets the end again */
        }
    }
    return moved;
}

int64_t
spw__tcp_progress(spw__link *link, int wait_ms)
{
    tcp_link *l = (tcp_link *)link;
    for (;;) {
        int64_t moved = 0;
        for (uint32_t i = 0; i < link->peer_count; i++) {
            int64_t in, out;
            l->polls[i] = (struct pollfd){.fd = -1};
            if (link->fds[i] < 0)
                continue;
            in = move(link->fds[i], &link->recv[i], false, &link->gone_errno);
            out = in < 0 ? -1 : move(link->fds[i], &link->send[i], true, &link->gone_errno);
            if (in < 0 || (out < 0 && in == 0)) {
                close(link->fds[i]);
                link->fds[i] = -1;
                link->gone_idx = i;
                return -1;
            }
            moved += in + (out > 0 ? out : 0);
            l->polls[i].events =
                (short)((link->recv[i].left > 0 ? POLLIN : 0) | (link->send[i].left > 0 ? POLLOUT : 0));
            if (l->polls[i].events != 0)
                l->polls[i].fd = link->fds[i];
        }
        if (moved > 0 || wait_ms == 0)
            return moved;
        if (poll(l->polls, link->peer_count, wait_ms) <= 0)
            return 0;
        wait_ms = 0;
    }
}
