/*
 * Inside comm. launch.c reads from the environment what world this process belongs to; comm.c makes the world; shm.c is
 * memory and waiting among the ranks of a host; memory.c are the operands they map of each other; watch.c is the thread
 * that notices failures and says where everybody is; channel.c opens channels; order.c is how each operation begins and ends
 * on all ranks; collectives.c and small.c are the operations; sum_*.c the arithmetic. tcp.c, tcp_door.c, tcp_link.c and mpi.c (a
 * plugin) are transports between hosts.
 */
#ifndef SPW_COMM_INTERNAL_H
#define SPW_COMM_INTERNAL_H

#include "comm_transport.h"
#include "spw_comm.h"
#include <stdatomic.h>
#include <sys/types.h>

enum {
    BOARD_ENTRIES = 16, /* channels that a rank shows in messages */
    CAUSE_BYTES = 320,  /* of why the world failed, without where the ranks are */
    NAME_BYTES = 24,    /* of a channel's name in messages */
    LINK_CONTROL = 0,   /* link ids: of the watchers, and of the world's own channel; channels follow */
    LINK_WORLD = 1,
    NO_IDX = 0xffffffff,
    SLICE_MS = 50,       /* nobody sleeps longer without looking whether the world has failed */
    VERDICT_BYTES = 256, /* how one rank says that it is well, or not */
    BOUNCE_BYTES = 256 << 10,
    SUM_BLOCK = 4096 /* elements per sum of squares, and worked on at a time */
};

/* ---------------------------------------------------------------- launch.c */

typedef struct spw__launch {
    spw_comm_backend backend; /* never SPW_COMM_AUTO */
    uint32_t rank, world;     /* of tcp */
    uint32_t started;         /* of mpi: so many processes at least, by its launcher; 0: it does not say */
    char host[256], port[16]; /* of tcp: where rank 0 listens */
    char reason[160];
} spw__launch;
spw_status spw__launch_read(spw__launch *out, spw_comm_backend wanted, spw_error *err);
/* Seconds that SPW_JOIN_TIMEOUT says; out is left as it is where it is not set. */
spw_status spw__launch_join_timeout(double *out, spw_error *err);
/* Finds the plugin, loads it and starts MPI. */
spw_status spw__mpi_load(spw__transport **out, uint64_t deadline_ns, spw_error *err);
spw_status
spw__tcp_open(spw__transport **out, const spw__launch *launch, uint64_t deadline_ns, double timeout_s, spw_error *err);

/* ---------------------------------------------------------------- shm.c */

/* Memory that other ranks of this host can map while it is shown. */
typedef struct spw__segment {
    spw_region region;
    bool shown;
    int fd; /* while shown */
} spw__segment;
/* shared false: of this process alone. Zeroed. */
spw_status spw__segment_create(spw__segment *out, uint64_t bytes, bool shared, unsigned flags, spw_error *err);
/* Maps what another process shows. */
spw_status spw__segment_attach(spw__segment *out, pid_t pid, int fd, uint64_t bytes, spw_error *err);
void spw__segment_hide(spw__segment *segment);
void spw__segment_close(spw__segment *segment); /* accepts a zeroed one */

/*
 * A barrier of n ranks in shared memory: everybody counts one, and has passed when the count is n times its phases.
 * Whoever counts the last one wakes the others.
 */
typedef struct spw__gate {
    _Atomic uint32_t count;
} spw__gate;
void spw__gate_arrive(spw__gate *gate, uint32_t target);
bool spw__gate_open(const spw__gate *gate, uint32_t target);
/* Waits at most SLICE_MS, the first spin rounds without sleeping; true when open. */
bool spw__gate_wait(spw__gate *gate, uint32_t target, uint32_t spin);
/* What makes processes local to each other: see there. */
void spw__host_identity(char *out, size_t out_bytes);
uint64_t spw__process_start_ticks(pid_t pid); /* with the pid it names a process for good; 0: there is none */

/* ---------------------------------------------------------------- operations */

/* What a rank says it is calling; equal on all ranks of a channel, or the call fails on all. */
typedef struct spw__call {
    uint64_t number, bytes;          /* number counts the channel's calls from 1; bytes of a part */
    uint64_t place_id, place_offset; /* of the operand: which spw_comm_alloc(), and where in it; id 0: any memory */
    uint32_t op, unit, detail;       /* detail: dtype or root */
    uint32_t unused;
} spw__call;

/* Where a rank is on one channel. Written by the channel's thread, read by the watcher. */
typedef struct spw__position {
    _Atomic uint32_t link_id; /* 0: unused entry */
    _Atomic uint32_t op, unit;
    _Atomic uint32_t in_call;
    _Atomic uint64_t number, bytes, since_ns;
    char name[NAME_BYTES]; /* written before link_id */
} spw__position;

/* The same as others are told it. */
typedef struct spw__place {
    uint32_t link_id, op, unit, in_call;
    uint64_t number, bytes, waited_ns;
    char name[NAME_BYTES];
} spw__place;

enum { SEAT_OPEN, SEAT_FAILED, SEAT_LEFT };
/* What one rank of a host shows the others. */
typedef struct spw__seat {
    _Atomic uint32_t state;
    uint32_t cause_status, cause_channel; /* these before state becomes SEAT_FAILED */
    char cause[CAUSE_BYTES];
    spw__place board[BOARD_ENTRIES]; /* as it was then */
} spw__seat;

/* ---------------------------------------------------------------- the world */

typedef struct spw__peer {
    uint32_t host, local_rank;
    pid_t pid;
    uint64_t start_ticks;
} spw__peer;

typedef struct spw__alloc {
    uint64_t id; /* 0: free; the same on all ranks */
    spw__segment own;
    spw__segment *peers; /* (local_world); one's own stays empty */
} spw__alloc;

typedef struct spw__watch spw__watch;

struct spw_comm {
    /* Fixed after open; any thread may read. */
    spw_comm_info info;
    spw_comm_options options; /* no zeros that mean a default */
    spw__transport *transport;
    spw__peer *peers; /* (world) */
    uint32_t *locals; /* (local_world) ranks in the world */
    spw__segment seats_segment;
    spw__seat *seats; /* (local_world) */
    uint32_t spin;
    spw_channel *world;
    spw__watch *watch; /* NULL: one rank */
    /* Owned by the thread of open, alloc and close. */
    uint64_t alloc_next_id;
    uint32_t link_next_id;
    spw__position board[BOARD_ENTRIES]; /* entries are given out under lock, then belong to a channel */
    /* Under lock. */
    pthread_mutex_t lock;
    pthread_cond_t settled_cond;
    spw__alloc allocs[SPW_COMM_ALLOCS_MAX];
    spw_error cause;        /* why the world failed: status, and text without positions */
    uint32_t cause_channel; /* link id whose positions explain it; 0: any */
    spw_error failure;      /* what every call returns, once settled */
    /* Atomic. */
    _Atomic bool failed, settled;
    _Atomic uint64_t chaos_calls;
};

/* memory.c: which allocation holds [p, p + bytes), and where; false: none. */
bool spw__alloc_find(spw_comm *comm, const void *p, uint64_t bytes, uint64_t *id, uint64_t *offset);
/* The same place in the memory of a rank of this host; NULL when this rank has freed it. */
const char *spw__alloc_peer(spw_comm *comm, uint64_t id, uint64_t offset, uint32_t local_rank);

/* watch.c */
spw_status spw__watch_start(spw_comm *comm, uint64_t deadline_ns, spw_error *err);
void spw__watch_stop(spw_comm *comm); /* says farewell first, unless the world has failed */
uint64_t spw__watch_bytes(uint32_t world);
/* The world has failed, by what this rank saw. The first cause stays. Does not wait. */
void spw__fail(spw_comm *comm, spw_status st, uint32_t link_id, const char *fmt, ...) SPW_PRINTF(4, 5);
/* Waits until it is known where everybody is (about a second at most); what every call returns from now on. */
spw_status spw__failure(spw_comm *comm, spw_error *err);
static inline bool
spw__failed(const spw_comm *comm)
{
    return atomic_load_explicit(&comm->failed, memory_order_acquire);
}

/* ---------------------------------------------------------------- channels */

/* What the members on one host share of a channel; a desk per member follows. */
typedef struct spw__block {
    _Alignas(64) spw__gate gate;
    _Alignas(64) char bounce[BOUNCE_BYTES]; /* of a broadcast */
} spw__block;
typedef struct spw__desk {
    spw__call call;
    char mail[SPW_EXCHANGE_MAX];
} spw__desk;

struct spw_channel {
    /* Fixed after open. */
    spw_comm *comm;
    const char *name;
    uint32_t link_id;
    uint32_t rank, size;
    uint32_t *members;    /* (size) ranks in the world */
    uint32_t *desk_idx;   /* (size) of members on this host, else NO_IDX */
    uint32_t *far;        /* (far_count) their ranks in the world, rising: the link's peers */
    uint32_t *far_member; /* (far_count) index among the members */
    uint32_t near_count, far_count;
    uint32_t first_near; /* which of the ranks that opened it made the block */
    spw__segment segment;
    spw__block *block;
    spw__desk *desks;
    spw__link *link;
    spw__position *position; /* NULL when the board is full */
    spw_region staging;      /* (far_count, 2, piece_bytes) */
    uint64_t piece_bytes;    /* of a stream with another host; the same on all ranks */
    char *mail;              /* (size, SPW_EXCHANGE_MAX) */
    char *verdicts;          /* (size, VERDICT_BYTES) */
    spw__flow *out, *in;     /* (far_count) still to be handed to the link, in pieces */
    spw__call *far_calls;    /* (far_count) as received */
    spw__call *near_calls;   /* (near_count) as read from the desks */
    const void **operands;   /* (size) */
    uint64_t *posted;        /* (far_count) pieces asked for so far */
    /* Owned by the calling thread. */
    spw__call call;
    uint64_t number; /* of calls */
    uint32_t gate_target;
    uint64_t begin_ns, came_ns;
    spw_waiting waiting; /* for something to come */
    double timeout_s;
    /* Atomic: statistics, one writer. */
    struct {
        _Atomic uint64_t calls, local_bytes, remote_bytes, busy_ns, wait_ns;
    } op[SPW_COLL_COUNT];
};

/* channel.c: the world's own channel, made with the transport's gather (NULL: one rank). */
spw_status spw__channel_open_world(spw_comm *comm, uint64_t deadline_ns, spw_error *err);
uint64_t spw__channel_bytes(const spw_comm_options *options, uint32_t world, uint32_t far_count);
/*
 * Every rank tells the others how it went: SPW_OK when all went well, else the first rank's trouble on all of them.
 * Collective over the channel.
 */
spw_status spw__agree(spw_channel *ch, spw_status st, spw_error *err);

/*
 * order.c. begin() returns when everybody has come and says the same; then what the members of this host said is in
 * near_calls. end() returns when nobody reads this rank's memory any more. After an error there is no end().
 */
spw_status spw__op_begin(spw_channel *ch, const spw__call *call, spw_error *err);
spw_status spw__op_end(spw_channel *ch, uint64_t local_bytes, uint64_t remote_bytes, spw_error *err);
/* Everybody on this host has done what came before. */
spw_status spw__op_phase(spw_channel *ch, spw_error *err);
/* Hands pieces of out and in to the link and moves what can be moved, waiting for something if wait. */
spw_status spw__op_pump(spw_channel *ch, bool wait, spw_error *err);
bool spw__op_received(const spw_channel *ch, uint32_t far_idx); /* what was asked of this one is here */
/* Until all of out and in is through. */
spw_status spw__op_flush(spw_channel *ch, spw_error *err);
/* Tests: a random delay where work is handed over. */
void spw__chaos(spw_comm *comm);

/* ---------------------------------------------------------------- sum_*.c */

typedef struct spw__sum {
    const void *const *operands; /* (count) of (elems) dtype */
    uint32_t count;
    spw_dtype dtype;
    void *sink;
    spw_dtype sink_dtype;
    bool add;
    double *sumsq; /* NULL, or (ceil(elems / SUM_BLOCK)) */
    uint64_t elems;
} spw__sum;
void spw__sum_scalar(const spw__sum *s);
void spw__sum_avx2(const spw__sum *s);
void spw__sum_avx512(const spw__sum *s);
void spw__sum_run(const spw__sum *s); /* the best that this processor has */

#endif
