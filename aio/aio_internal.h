/*
 * Inside aio: a piece is one transfer that a backend carries out; the core cuts requests into pieces and puts the
 * results together again. A backend knows pieces and file descriptors only.
 */
#ifndef SPW_AIO_INTERNAL_H
#define SPW_AIO_INTERNAL_H

#include "spw_aio.h"

typedef struct aio_piece aio_piece;
struct aio_piece {
    spw_aio_request *req;
    spw_aio_op op;
    int fd;
    uint64_t offset, bytes; /* of what is still to do */
    char *buf;
    aio_piece *next;
    uint64_t due_ns; /* tests: when a delayed completion may be seen */
    int64_t result;
};

typedef struct aio_backend {
    /* Starts one piece. Never fails: trouble is the piece's result. */
    void (*submit)(spw_aio *aio, aio_piece *piece);
    /* Pushes what was submitted, takes finished pieces (each through spw__aio_piece_done); sleeps up to timeout_ns for
     * the first one or a wake. */
    void (*reap)(spw_aio *aio, uint64_t timeout_ns);
    void (*wake)(spw_aio *aio);
    void (*destroy)(spw_aio *aio);
} aio_backend;

struct spw_aio_file {
    spw_aio *aio;
    char *path;
    int direct_fd, buffered_fd; /* direct_fd is -1 where O_DIRECT is refused */
    uint32_t align;
    unsigned flags;
    uint32_t inflight;
    spw_aio_file *next;
};

enum { AIO_LISTS = 2 * SPW_AIO_PRIORITY_COUNT };

struct spw_aio {
    /* Fixed after create. */
    spw_aio_options options;
    spw_aio_backend kind;
    const aio_backend *backend;
    void *state; /* the backend's */
    char reason[256];
    /* Owned by the context's thread. */
    spw_aio_file *files;
    aio_piece *pieces, *free_pieces, *delayed;
    spw_aio_request *pending_head[AIO_LISTS], *pending_tail[AIO_LISTS];
    spw_aio_request *done_head, *done_tail;
    uint32_t inflight, reads_inflight, writes_inflight;
    uint64_t read_since_ns, write_since_ns;
    spw_aio_stats stats;
    spw_aio_fault_fn fault;
    void *fault_ctx;
};

/* result: bytes moved, or -errno. */
void spw__aio_piece_done(spw_aio *aio, aio_piece *piece, int64_t result);
spw_status spw__aio_uring_open(spw_aio *aio, spw_error *err);
spw_status spw__aio_threads_open(spw_aio *aio, spw_error *err);

#endif
