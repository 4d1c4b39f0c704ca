/*
 * spw_comm.h - ranks: who there is, memory that the ranks of a host share, and channels, ordered streams of collectives.
 *
 * Every sum is formed in the order of the ranks, element by element, in fp32: its bits depend on the operands and their
 * number alone, never on timing, backend or where ranks run. Large operands are read where they lie: ranks of one host
 * map each other's memory, ranks of different hosts send straight from and receive straight to it.
 *
 * Threads   calls on one channel come from one thread at a time; different channels belong to different threads and do not
 *           wait for each other. Calls block; overlap is having a thread per channel. Everything else: one thread.
 * Failure   a rank that fails, dies, calls something else than the others or does not come in time makes the call return an
 *           error on every rank, with where each rank is; from then on every call on every channel returns that error.
 */
#ifndef SPW_COMM_H
#define SPW_COMM_H

#include "spw_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spw_comm spw_comm;
typedef struct spw_channel spw_channel;

/* ---------------------------------------------------------------- the world */

typedef enum spw_comm_backend {
    SPW_COMM_AUTO, /* tcp when RANK, WORLD_SIZE and MASTER_ADDR are set, else mpi when an MPI launcher started several
                      processes, else tcp when srun did and MASTER_ADDR is set, else self */
    SPW_COMM_SELF, /* one rank */
    SPW_COMM_TCP,  /* sockets; RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT */
    SPW_COMM_MPI   /* an MPI library, opened at run time */
} spw_comm_backend;
const char *spw_comm_backend_name(spw_comm_backend backend); /* "auto", "self", "tcp", "mpi" */

typedef struct spw_comm_options {
    spw_comm_backend backend;
    double timeout_s; /* that one collective may wait for others; 0: 60 */
    double
        join_timeout_s; /* that spw_comm_open() may; 0: SPW_JOIN_TIMEOUT of the environment, else timeout_s, else 600 */
    uint64_t staging_bytes;  /* per channel, for operands of ranks on other hosts; 0: 8 MiB */
    double link_bytes_per_s; /* tests: every operation takes at least its bytes over this; 0: off */
    double link_latency_s;   /* and so much on top */
    uint64_t chaos_seed;     /* tests: random delays; 0: off */
    const char *version; /* tests: what it says that it is; NULL: SPW_VERSION, which must be the same on all ranks */
    uint32_t sources;    /* tests: and of which sources; 0: those it was built from, the same on all ranks too */
} spw_comm_options;

typedef struct spw_comm_info {
    uint32_t rank, world;
    uint32_t local_rank, local_world; /* among the ranks of this host */
    uint32_t host, host_count;
    /*
     * As local_rank, local_world and host, for what a machine has once: memory, disks, GPUs. They differ where ranks of one machine
     * cannot map each other's memory, and are hosts of their own.
     */
    uint32_t machine_rank, machine_world, machine;
    uint32_t cpu_sharers; /* ranks of this machine that may use the same CPUs as this one, which is one of them */
    const char *backend;  /* "self", "tcp", "mpi" */
    char reason[200];     /* why this one, with what it found */
} spw_comm_info;

/*
 * spw_comm_open - joins the world that the process was started into. Collective.
 * Errors  SPW_ECONFIG for a variable that is missing or makes no sense, and for ranks of different versions, SPW_EUNSUPPORTED
 *         when the backend is not there, SPW_ETIMEDOUT naming the ranks that did not come. Ranks that wait say so in the log after 30 s.
 */
spw_status spw_comm_open(spw_comm **out, const spw_comm_options *options, spw_error *err);
void spw_comm_close(spw_comm *comm); /* collective unless something failed; channels and memory first; NULL is fine */
const spw_comm_info *spw_comm_get_info(const spw_comm *comm);
uint32_t spw_comm_host_of(const spw_comm *comm, uint32_t rank); /* the host of any rank of the world */
/* Instead of the timeout_s that it was opened with, for channels that are opened from now on, and for opening them. */
void spw_comm_set_timeout(spw_comm *comm, double timeout_s);
/* Tells all ranks that this one cannot go on: their calls fail with the reason. Any thread, any time. */
void spw_comm_abort(spw_comm *comm, const char *reason);
/* The first failure, or SPW_OK. Any thread. */
spw_status spw_comm_check(spw_comm *comm, spw_error *err);
/*
 * Host memory that a world of this size takes on a host with local_world of its ranks, besides spw_comm_alloc: tables, and
 * the staging of channel_count channels where there are other hosts. options NULL: the defaults. Pure.
 */
uint64_t
spw_comm_table_bytes(const spw_comm_options *options, uint32_t world, uint32_t local_world, uint32_t channel_count);

/*
 * spw_comm_alloc - memory that collectives may read where it lies: resident, at least 4096-byte aligned, zeroed.
 * Collective over the world, the same bytes on every rank. At most SPW_COMM_ALLOCS_MAX live.
 * Errors  SPW_ENOMEM on every rank if one of them cannot.
 */
enum { SPW_COMM_ALLOCS_MAX = 16 };
spw_status spw_comm_alloc(spw_comm *comm, void **out, uint64_t bytes, spw_error *err);
void spw_comm_free(spw_comm *comm, void *p); /* not collective: others keep what they have mapped; NULL is fine */

/* ---------------------------------------------------------------- channels */

/*
 * spw_channel_open - a channel over the world, or over those ranks of parent that give the same color, ordered by their
 * rank. Collective over parent (NULL: the world). name (a literal) shows in messages and traces.
 */
spw_status spw_channel_open(spw_channel **out, spw_comm *comm, spw_channel *parent, uint32_t color, const char *name,
                            spw_error *err);
void spw_channel_close(spw_channel *channel); /* NULL is fine */
/*
 * How long a call on it may wait for others from now on; before, what the world was opened with. For work that takes ranks
 * differently long, such as reading files: one that ends is noticed all the same.
 */
void spw_channel_set_timeout(spw_channel *channel, double timeout_s);
uint32_t spw_channel_rank(const spw_channel *channel);
uint32_t spw_channel_size(const spw_channel *channel);

typedef enum spw_collective {
    SPW_COLL_ALL_GATHER,
    SPW_COLL_REDUCE_SCATTER,
    SPW_COLL_ALL_REDUCE,
    SPW_COLL_ALL_TO_ALL,
    SPW_COLL_EXCHANGE,
    SPW_COLL_BROADCAST,
    SPW_COLL_BARRIER,
    SPW_COLL_COUNT
} spw_collective;
const char *spw_collective_name(spw_collective op); /* "all_gather", ... */

/*
 * spw_all_gather - every rank's part to all, in place.
 *   buf  (size, part_bytes) in memory of spw_comm_alloc, at the same place on every rank: in: part number rank; out: all
 *   unit is shown in messages and must be the same on all ranks.
 * On return this rank may overwrite buf.
 */
spw_status spw_all_gather(spw_channel *channel, uint32_t unit, void *buf, uint64_t part_bytes, spw_error *err);
/* The same, part r at r * every * part_bytes; what lies between is left alone. every is above 0 and the same on all ranks. */
spw_status spw_all_gather_apart(spw_channel *channel, uint32_t unit, void *buf, uint64_t part_bytes, uint32_t every,
                                spw_error *err);

/*
 * spw_reduce_scatter - the sum of every rank's operand; each rank gets its part.
 *   buf     (size, part_elems) of dtype in memory of spw_comm_alloc, at the same place on every rank; kept unless it is the sink
 *   sink    data (part_elems) of sink.dtype, any memory; the part of buf itself is fine if the types are equal.
 *           add: sink.data (fp32 only) is added to instead of written.
 *           sumsq: NULL, or ceil(part_elems / 4096) fp64 sums of squares of the elements as stored, one per 4096, each in
 *           the order of spw_gpu_copy_d2h.
 * Computes  ((b0 + b1) + b2) + ... in fp32, rounded to sink.dtype once. On return this rank may overwrite buf.
 */
typedef struct spw_reduce_sink {
    void *data;
    spw_dtype dtype;
    bool add;
    double *sumsq;
} spw_reduce_sink;
spw_status spw_reduce_scatter(spw_channel *channel, uint32_t unit, const void *buf, spw_dtype dtype,
                              uint64_t part_elems, const spw_reduce_sink *sink, spw_error *err);

/* The same sum to all ranks, in place: buf (size, part_elems) fp32. Bits as of spw_reduce_scatter. */
spw_status spw_all_reduce(spw_channel *channel, uint32_t unit, float *buf, uint64_t part_elems, spw_error *err);

/*
 * The part for rank r is part r of send, in memory of spw_comm_alloc; recv, any memory, gets a part of each other rank at its place. Own parts
 * are not touched, nor read. On return this rank may overwrite send.
 */
spw_status
spw_all_to_all(spw_channel *channel, uint32_t unit, const void *send, void *recv, uint64_t part_bytes, spw_error *err);

/*
 * spw_all_to_all_v - each rank takes pieces of the others' operands, as many bytes of each as it says.
 *   buf   (bytes) in memory of spw_comm_alloc; bytes must be the same on all ranks
 *   take  (size): of rank m's buf the bytes from `from` on come to `to` in this one's; bytes 0: nothing does
 *   give  (size): what rank m takes of this one, as that one says it
 * No piece may come to where another one is taken from. On return this rank may overwrite buf.
 * Errors  SPW_EINVAL for a piece that is not in buf; what a rank takes and another one does not give ends with the timeout.
 */
typedef struct spw_comm_piece {
    uint64_t from, to, bytes;
} spw_comm_piece;
spw_status spw_all_to_all_v(spw_channel *channel, uint32_t unit, void *buf, uint64_t bytes, const spw_comm_piece *take,
                            const spw_comm_piece *give, spw_error *err);

/*
 * spw_meet - the ranks come together for an operation whose bytes then go another way (from device to device): what they call
 * is compared, and counted as if it were done here. part_bytes as that operation has it. Returns when everybody has come.
 */
spw_status spw_meet(spw_channel *channel, spw_collective op, uint32_t unit, uint64_t part_bytes, spw_error *err);

/* Small ones, of any memory. all (size, bytes): every rank's `mine`, at most SPW_EXCHANGE_MAX bytes each. */
enum { SPW_EXCHANGE_MAX = 4096 };
spw_status spw_exchange(spw_channel *channel, const void *mine, void *all, uint64_t bytes, spw_error *err);
/* values[i] = sum over ranks in their order, fp64; count is at most SPW_EXCHANGE_MAX / 8. */
spw_status spw_sum(spw_channel *channel, double *values, uint32_t count, spw_error *err);
/* Any memory, any size. */
spw_status spw_broadcast(spw_channel *channel, void *buf, uint64_t bytes, uint32_t root, spw_error *err);
spw_status spw_barrier(spw_channel *channel, spw_error *err);
/*
 * spw_agree - after something that all ranks did, or before something that all are to do: the first failure is everybody's.
 *   st, own   how it went here; own's message is read where st is not SPW_OK
 *   word      what is said beside it; NULL: nothing
 * Errors  on all ranks the status of the first rank that has one, and "rank N: " with its message; then word->first is not the size
 */
typedef struct spw_word {
    int64_t number; /* this rank's, then the first one's */
    uint32_t first; /* out: the first rank with a failure; size: none has */
    uint32_t other; /* out: the first rank that has another number than the first one; 0: none has */
} spw_word;
spw_status spw_agree(spw_channel *channel, spw_status st, const spw_error *own, spw_word *word, spw_error *err);

/* Of this rank since open. Bytes are what it got from others: (size - 1) parts of a gather or reduce-scatter. */
typedef struct spw_comm_stats {
    struct {
        uint64_t calls, local_bytes, remote_bytes; /* from ranks of this host, from others */
        uint64_t busy_ns, wait_ns;                 /* in the call; of that, until the others had come */
    } op[SPW_COLL_COUNT];
} spw_comm_stats;
void spw_channel_get_stats(const spw_channel *channel, spw_comm_stats *out); /* any thread */

#ifdef __cplusplus
}
#endif
#endif
