/*
 * The door: connections that were accepted and have not said all of what a connection says first. Any number of them at a time, so that
 * one which is late, or a stranger who says nothing, keeps nobody waiting.
 */
#include "comm_tcp.h"
#include <errno.h>
#include <unistd.h>

enum { STRANGERS = 16 }; /* there may be so many besides those who are waited for */

spw_status
spw__door_open(spw__door *d, int listen_fd, uint32_t bytes, uint32_t awaited, spw_error *err)
{
    *d = (spw__door){.listen_fd = listen_fd, .bytes = bytes, .most = awaited + STRANGERS};
    SPW_ASSERT(bytes <= SPW__GUEST_BYTES);
    d->guests = spw_mem_calloc(d->most, sizeof *d->guests);
    d->polls = spw_mem_calloc(d->most + 1, sizeof *d->polls);
    if (d->guests != NULL && d->polls != NULL)
        return SPW_OK;
    spw__door_close(d);
    return SPW_RAISE(err, SPW_ENOMEM, "connections of %u ranks", awaited);
}

void
spw__door_close(spw__door *d)
{
    while (d->count > 0)
        close(d->guests[--d->count].fd);
    spw_mem_free(d->guests);
    spw_mem_free(d->polls);
    *d = (spw__door){.count = 0};
}

static spw_status
let_in(spw__door *d, spw_error *err)
{
    spw__guest g = {.fd = -1};
    socklen_t len = sizeof g.from;
    g.fd = SPW_CALL(EMFILE, accept4(d->listen_fd, (struct sockaddr *)&g.from, &len, SOCK_CLOEXEC));
    if (g.fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
        return SPW_RAISE_SYS(err, errno, "taking the connection of another rank"); /* it would be there again at once */
    if (g.fd < 0)
        return SPW_OK; /* it has gone again */
    spw__tcp_prepare(g.fd);
    if (d->count == d->most) { /* strangers that never say anything make room */
        close(d->guests[0].fd);
        memmove(d->guests, d->guests + 1, --d->count * sizeof *d->guests);
    }
    d->guests[d->count++] = g;
    return SPW_OK;
}

/* Reads what guest i says; true when it is all of it, and then the guest is the caller's. One that has ended goes. */
static bool
listen_to(spw__door *d, uint32_t i, spw__guest *out)
{
    spw__guest *g = &d->guests[i];
    ssize_t n = recv(g->fd, g->says + g->got, d->bytes - g->got, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    g->got += n > 0 ? (uint32_t)n : 0;
    if (n > 0 && g->got < d->bytes)
        return false;
    if (n > 0)
        *out = *g;
    else
        close(g->fd);
    *g = d->guests[--d->count];
    return n > 0;
}

spw_status
spw__door_next(spw__door *d, int wait_ms, spw__guest *out, spw_error *err)
{
    out->fd = -1;
    d->polls[0] = (struct pollfd){.fd = d->listen_fd, .events = POLLIN};
    for (uint32_t i = 0; i < d->count; i++)
        d->polls[1 + i] = (struct pollfd){.fd = d->guests[i].fd, .events = POLLIN};
    if (poll(d->polls, d->count + 1, wait_ms) <= 0)
        return SPW_OK;
    for (uint32_t i = d->count; i-- > 0;) {
        if (d->polls[1 + i].revents != 0 && listen_to(d, i, out))
            return SPW_OK;
    }
    return d->polls[0].revents != 0 ? let_in(d, err) : SPW_OK;
}
