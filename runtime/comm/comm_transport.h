/*
 * comm_transport.h - what comm asks of sockets or an MPI library: blobs gathered from all processes while the world is
 * made, and links, ordered byte streams to ranks on other hosts. Of base it takes types alone, because the MPI plugin
 * is loaded into programs whose functions it cannot see.
 *
 * Threads   gather, link_create, link_join and close: one thread. A link belongs to one thread at a time; links do not wait for each
 *           other.
 */
#ifndef SPW_COMM_TRANSPORT_H
#define SPW_COMM_TRANSPORT_H

#include "spw_base.h"

typedef struct spw__transport spw__transport;
typedef struct spw__link spw__link;

/* What is under way with one peer in one direction; nothing when left is 0. The peer's opposite flow has the same bytes. */
typedef struct spw__flow {
    char *at;
    uint64_t left;
} spw__flow;

struct spw__link {
    spw__transport *transport;
    uint32_t id, peer_count;
    const uint32_t *peers; /* (peer_count) ranks in the world, rising */
    spw__flow *send;       /* (peer_count) */
    spw__flow *recv;       /* (peer_count) */
    int *fds;              /* (peer_count) to poll for input, -1 of a peer that has ended; NULL: nothing to poll */
    uint32_t gone_idx;     /* after progress() == -1 */
    int gone_errno;        /* and why; 0: the other side has ended, or nobody knows */
};

struct spw__transport {
    const char *name;
    uint32_t rank, world;
    char about[120]; /* for spw_comm_info.reason */
    /* all (world, bytes) gets every process's `mine`. */
    spw_status (*gather)(spw__transport *t, const void *mine, void *all, uint32_t bytes, uint64_t deadline_ns,
                         spw_error *err);
    /* Memory of a link, for this rank alone. peers is kept by reference; no two links of a pair of ranks share an id. */
    spw_status (*link_create)(spw__transport *t, spw__link **out, uint32_t id, const uint32_t *peers,
                              uint32_t peer_count, spw_error *err);
    /* Connects it. Collective over this rank and the peers. */
    spw_status (*link_join)(spw__link *link, uint64_t deadline_ns, spw_error *err);
    /*
     * Moves what can be moved now, else waits up to wait_ms for something. Bytes that moved, or -1 when the connection
     * to a peer has ended: told once per peer, whose flows are then left as they were and not touched again.
     */
    int64_t (*progress)(spw__link *link, int wait_ms);
    /* What is under way is not gone on with, and its memory is the caller's again. NULL: nothing moves but in progress(). */
    void (*link_stop)(spw__link *link);
    void (*link_close)(spw__link *link); /* stops it first; NULL is fine */
    /* failed: others may never come; nothing is waited for. */
    void (*close)(spw__transport *t, bool failed);
};

/* The one symbol of the MPI plugin. version is the caller's SPW_VERSION and SPW__TRANSPORT_SIZES: no other fits. */
#define SPW__MPI_PLUGIN_SYMBOL "spw__mpi_open"
typedef spw_status (*spw__mpi_open_fn)(spw__transport **out, const char *version, uint64_t sizes, uint64_t deadline_ns,
                                       spw_error *err);
#define SPW__TRANSPORT_SIZES (sizeof(spw__transport) << 32 | sizeof(spw__link) << 16 | sizeof(spw_error))

#endif
