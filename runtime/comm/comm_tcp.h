/* Inside the sockets: the transport that tcp.c makes and tcp_link.c connects on, and the door that both listen at. */
#ifndef SPW_COMM_TCP_H
#define SPW_COMM_TCP_H

#include "comm_internal.h"
#include <poll.h>
#include <sys/socket.h>

typedef struct spw__tcp {
    spw__transport base; /* first */
    int listen_fd;
    bool elsewhere;                     /* of rank 0: MASTER_ADDR is no address of this host */
    uint64_t cookie;                    /* what a connection must show */
    struct sockaddr_storage *addresses; /* (world) where each rank listens; one's own is not used */
    int *star; /* (world) while the world is made: rank 0's to all, theirs to rank 0; else -1 */
} spw__tcp;

int spw__tcp_left_ms(uint64_t deadline_ns); /* at most a second at a time; 0: over */
void spw__tcp_prepare(int fd);
/* 0 or an errno. The socket does not block; these do, until the deadline. */
int spw__tcp_send_all(int fd, const void *data, uint64_t bytes, uint64_t deadline_ns);
int spw__tcp_recv_all(int fd, void *data, uint64_t bytes, uint64_t deadline_ns);
int spw__tcp_connect(const struct sockaddr_storage *to, uint64_t deadline_ns); /* -1 with errno */
socklen_t spw__tcp_address_len(const struct sockaddr_storage *a);
uint32_t spw__tcp_port_of(const struct sockaddr_storage *a);
enum { SPW__HOST_BYTES = 64 };
const char *spw__tcp_show_host(char out[SPW__HOST_BYTES], const struct sockaddr_storage *a);

/* tcp_door.c */
enum { SPW__GUEST_BYTES = 64 };
typedef struct spw__guest {
    int fd;
    uint32_t got;
    char says[SPW__GUEST_BYTES];
    struct sockaddr_storage from;
} spw__guest;
typedef struct spw__door {
    int listen_fd;
    uint32_t bytes, count, most; /* that each guest says first; of guests */
    spw__guest *guests;          /* (most) in the order in which they came, as long as nobody has gone */
    struct pollfd *polls;        /* (most + 1) */
} spw__door;
/* bytes is at most SPW__GUEST_BYTES. */
spw_status spw__door_open(spw__door *d, int listen_fd, uint32_t bytes, uint32_t awaited, spw_error *err);
/* Waits up to wait_ms for something to happen. out->fd is a guest that has said all, and the caller's to close; -1: nobody has yet. */
spw_status spw__door_next(spw__door *d, int wait_ms, spw__guest *out, spw_error *err);
void spw__door_close(spw__door *d); /* and all who are at it; accepts a zeroed one */

spw_status spw__tcp_link_create(spw__transport *t, spw__link **out, uint32_t id, const uint32_t *peers,
                                uint32_t peer_count, spw_error *err);
spw_status spw__tcp_link_join(spw__link *link, uint64_t deadline_ns, spw_error *err);
int64_t spw__tcp_progress(spw__link *link, int wait_ms);
void spw__tcp_link_close(spw__link *link);

#endif
