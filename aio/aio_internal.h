/*
 * aio_internal.h - what the files of aio share: the context, its files, the pieces that requests are cut into, and the
 * table of functions that a backend fills. aio.c talks to the caller, aio_piece.c cuts, starts and lands pieces,
 * aio_share.c says whose turn it is, aio_file.c opens files, aio_fault.c draws faults for tests; aio_uring.c and
 * aio_threads.c move one piece's bytes and know nothing of requests.
 */
#ifndef SPW_AIO_INTERNAL_H
#define SPW_AIO_INTERNAL_H

#include "spw_aio.h"

#include <sys/types.h>

/* Order of service, first to last: a priority, and inside NORMAL and BULK reads before writes and flushes. */
enum {
    SPW__AIO_CLASS_URGENT,
    SPW__AIO_CLASS_READ,
    SPW__AIO_CLASS_WRITE,
    SPW__AIO_CLASS_BULK_READ,
    SPW__AIO_CLASS_BULK_WRITE,
    SPW__AIO_CLASS_COUNT
};

/* Every file has a plain descriptor; where O_DIRECT works it has a second one for whole blocks. */
enum { SPW__AIO_FD_PLAIN, SPW__AIO_FD_DIRECT, SPW__AIO_FD_COUNT };

enum {
    SPW__AIO_PAGE_BYTES = 4096,
    SPW__AIO_BOUNCE_COUNT = 4,             /* pieces that may be in bounce buffers at once; others wait */
    SPW__AIO_BOUNCE_BYTES_MIN = 64 * 1024, /* so that a block of any usual alignment fits */
};

/*
 * spw__aio_piece - a part of one request, moved by one or more transfers: the first for all of it, others when the
 * first came back short. `skip` bytes in front of the piece are read along when its start was rounded down.
 */
typedef struct spw__aio_piece {
    struct spw__aio_piece *next; /* in the list of whoever holds the piece */
    spw_aio_request *req;
    spw_aio_file *file;
    uint32_t class_idx;
    /* The piece as the request sees it. */
    uint64_t offset, bytes;
    char *buf;
    /* The piece as the file sees it. */
    uint64_t skip; /* bytes between io_offset and offset */
    uint64_t io_offset, io_bytes;
    uint64_t io_done;  /* landed so far, from io_offset */
    char *io_buf;      /* buf, or a bounce buffer */
    char *bounce;      /* NULL: none taken */
    uint32_t fd_idx;   /* SPW__AIO_FD_... for the next transfer */
    uint32_t tries;    /* EAGAIN and EINTR in a row */
    bool landing;      /* parked with a result, else parked before a start */
    bool blocked;      /* parked because the backend was full */
    uint64_t ready_ns; /* parked until then */
    /* Drawn by the test's fault for the next transfer. */
    bool drawn;
    int fault_errno;         /* its result, unless 0 */
    uint64_t fault_bytes;    /* its result at most */
    uint64_t fault_delay_ns; /* held back that long */
    uint64_t move_bytes;     /* cut to that many */
    /* One transfer: io_bytes - io_done bytes at io_offset + io_done. Set by the backend when it is over. */
    int64_t result; /* bytes, or a negative errno */
} spw__aio_piece;

typedef struct spw__aio_list {
    spw__aio_piece *head, *tail;
} spw__aio_list;

static inline void
spw__aio_list_push(spw__aio_list *list, spw__aio_piece *p)
{
    p->next = NULL;
    if (list->tail != NULL)
        list->tail->next = p;
    else
        list->head = p;
    list->tail = p;
}

static inline spw__aio_piece *
spw__aio_list_pop(spw__aio_list *list)
{
    spw__aio_piece *p = list->head;
    if (p != NULL) {
        list->head = p->next;
        if (list->head == NULL)
            list->tail = NULL;
        p->next = NULL;
    }
    return p;
}

static inline uint64_t
spw__aio_transfer_offset(const spw__aio_piece *p)
{
    return p->io_offset + p->io_done;
}
static inline uint64_t
spw__aio_transfer_bytes(const spw__aio_piece *p)
{
    uint64_t left = p->io_bytes - p->io_done;
    return p->drawn && p->move_bytes < left ? p->move_bytes : left;
}
static inline char *
spw__aio_transfer_buf(const spw__aio_piece *p)
{
    return p->io_buf != NULL ? p->io_buf + p->io_done : NULL; /* a flush has none */
}

/*
 * spw__aio_backend_ops - how pieces reach the disk. Called by the context's thread only.
 *
 * start() takes a piece or says that the backend is full; a piece that was taken comes back from reap() once, also when
 * it could not be started (its result says why). flush() hands over what start() collected. reap() flushes, then moves
 * everything that is over to `done`; with nothing over it sleeps until something is, the wake descriptor becomes
 * readable, or timeout_ns has passed. It drains that descriptor and then sets *woken. It may return early.
 */
typedef struct spw__aio_backend_ops {
    spw_status (*create)(void **out, const spw_aio_options *options, int wake_fd, spw_error *err);
    void (*destroy)(void *backend); /* with nothing in flight; NULL is fine */
    void (*file_add)(void *backend, spw_aio_file *file);
    void (*file_remove)(void *backend, spw_aio_file *file);
    bool (*start)(void *backend, spw__aio_piece *piece);
    void (*flush)(void *backend);
    void (*reap)(void *backend, uint64_t timeout_ns, spw__aio_list *done, bool *woken);
    uint64_t (*fixed_bytes)(const void *backend); /* registered with the kernel */
} spw__aio_backend_ops;

extern const spw__aio_backend_ops spw__aio_threads_ops;
#ifdef SPW_HAVE_URING
extern const spw__aio_backend_ops spw__aio_uring_ops;
#endif

typedef struct spw__aio_queue {
    spw_aio_request *head, *tail;
} spw__aio_queue;

/* aio_share.c: what waits for a device and what is under way; plain data. Side 0 reads, side 1 writes and flushes. */
typedef struct spw__aio_load {
    uint32_t depth;                               /* pieces that may be in flight */
    uint64_t waiting_bytes[SPW__AIO_CLASS_COUNT]; /* of requests that are not all issued */
    uint64_t waiting_count[SPW__AIO_CLASS_COUNT]; /* such requests */
    uint32_t inflight[2];                         /* pieces by side */
    uint32_t passed[2];                           /* turns of the other side since this one waits */
} spw__aio_load;
/* The class to serve next; SPW__AIO_CLASS_COUNT: nothing waits. Never leaves a slot empty while something waits. */
uint32_t spw__aio_share_next(const spw__aio_load *load);

/* What the files of one disk share: the queue of pieces, and the requests that wait for it. */
typedef struct spw__aio_device {
    struct spw__aio_device *next;
    dev_t dev;
    uint32_t file_count;
    spw__aio_piece *pieces; /* queue_depth of them */
    spw__aio_list free;
    spw__aio_queue queues[SPW__AIO_CLASS_COUNT]; /* only a head may be partly issued */
    spw__aio_load load;
} spw__aio_device;

enum { SPW__AIO_BEHIND_COUNT = 32 }; /* buffered writes whose pages are dropped once they are likely clean */

struct spw_aio_file {
    /* Fixed after open. */
    spw_aio *aio;
    spw__aio_device *device;
    char *path;
    unsigned flags;
    int fds[SPW__AIO_FD_COUNT];   /* the direct one is -1 for a buffered file */
    uint32_t align;               /* of offsets and lengths on the direct descriptor; 1 for a buffered file */
    uint32_t align_mem;           /* of addresses */
    uint64_t block_bytes;         /* the context's, as a multiple of align */
    int slots[SPW__AIO_FD_COUNT]; /* the backend's; -1: none */
    /* Owned by the context's thread. */
    spw_aio_file *next;
    uint32_t inflight; /* pieces of this file */
    struct {
        uint64_t offset, bytes;
    } behind[SPW__AIO_BEHIND_COUNT]; /* a buffered file's last writes, oldest at behind_idx */
    uint32_t behind_idx;
};

struct spw_aio {
    /* Fixed after create. */
    spw_aio_options options; /* defaults filled in; probe_dir is not kept */
    spw_aio_backend backend_kind;
    const spw__aio_backend_ops *ops;
    void *backend;
    int wake_fd; /* any thread may write; backends read */
    spw_region bounce_region;
    char reason[384];
    /* Owned by the context's thread. */
    spw_aio_file *files;
    spw__aio_device *devices;
    spw__aio_queue finished;
    spw__aio_list parked; /* delayed completions, and transfers to start again */
    char *bounce_free[SPW__AIO_BOUNCE_COUNT];
    uint32_t bounce_free_count;
    uint64_t bounce_bytes;
    uint64_t inflight;                /* pieces of all files */
    bool woken;                       /* a wake was seen that no wait has answered */
    bool closing;                     /* delays and retries are over */
    const spw_aio_file *closing_file; /* of this file's pieces; NULL: of all */
    spw_aio_stats stats;
    uint64_t busy_count[2], busy_begin_ns[2]; /* reads, writes */
    spw_aio_fault_fn fault;
    void *fault_ctx;
};

/*
 * aio_piece.c: one turn of the crank. Starts what may start, reaps, lands, starts again. Sleeps at most until
 * deadline_ns (0: not at all), less when a request has finished, a wake was seen or a parked piece is due.
 */
void spw__aio_turn(spw_aio *aio, uint64_t deadline_ns);
/* Drops what was not started and waits for what was; of one file, or of all when file is NULL. */
void spw__aio_drain(spw_aio *aio, spw_aio_file *file);
uint32_t spw__aio_class(spw_aio_op op, spw_aio_priority priority);
void spw__aio_enqueue(spw_aio_request *req);
/* aio_file.c: after a transfer through the page cache, gives its pages back. */
void spw__aio_file_forget(spw_aio_file *file, spw_aio_op op, uint64_t offset, uint64_t bytes);

static inline uint32_t
spw__aio_side(spw_aio_op op)
{
    return op == SPW_AIO_READ ? 0 : 1;
}
/* FSYNC and FDATASYNC are one piece without bytes. */
static inline bool
spw__aio_is_sync(spw_aio_op op)
{
    return op >= SPW_AIO_FSYNC;
}

static inline void
spw__aio_queue_push(spw__aio_queue *queue, spw_aio_request *req)
{
    req->next = NULL;
    if (queue->tail != NULL)
        queue->tail->next = req;
    else
        queue->head = req;
    queue->tail = req;
}

static inline spw_aio_request *
spw__aio_queue_pop(spw__aio_queue *queue)
{
    spw_aio_request *req = queue->head;
    if (req != NULL) {
        queue->head = req->next;
        if (queue->head == NULL)
            queue->tail = NULL;
        req->next = NULL;
    }
    return req;
}

#endif
