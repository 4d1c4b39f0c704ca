/*
 * spw_aio.h - asynchronous file transfers: one context, one request type, several backends (io_uring, threads).
 *
 * A request is any (file, offset, bytes, buffer). The context cuts it into pieces of block_bytes, keeps queue_depth
 * pieces in flight per device, resumes short transfers, retries EAGAIN and EINTR, and completes each request once, with
 * its own status. Files on one device share its queue: urgent requests first, then reads and writes by the bytes that
 * each still has to move. It knows nothing of chunks or tiers.
 */
#ifndef SPW_AIO_H
#define SPW_AIO_H

#include "spw_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spw_aio spw_aio;
typedef struct spw_aio_file spw_aio_file;

typedef enum spw_aio_backend {
    SPW_AIO_AUTO,    /* the first below whose probe I/O succeeds */
    SPW_AIO_URING,   /* io_uring through liburing */
    SPW_AIO_THREADS, /* a pool of pread/pwrite threads */
    SPW_AIO_BACKEND_COUNT
} spw_aio_backend;
const char *spw_aio_backend_name(spw_aio_backend backend); /* "auto", "io_uring", "threads" */

typedef enum spw_aio_op {
    SPW_AIO_READ,
    SPW_AIO_WRITE,
    SPW_AIO_FSYNC,
    SPW_AIO_FDATASYNC, /* FSYNC without the times and other metadata that reading does not need */
    SPW_AIO_OP_COUNT
} spw_aio_op;

/* Order of service when pieces compete for the queue of a device. */
typedef enum spw_aio_priority {
    SPW_AIO_URGENT, /* somebody waits for it now */
    SPW_AIO_NORMAL, /* reads ahead */
    SPW_AIO_BULK,   /* writes behind */
    SPW_AIO_PRIORITY_COUNT
} spw_aio_priority;

typedef struct spw_aio_options {
    spw_aio_backend backend;
    uint64_t block_bytes;    /* piece size; multiple of 4096; 0: 1 MiB */
    uint32_t queue_depth;    /* pieces in flight per device; 0: 16 */
    uint32_t thread_count;   /* threads backend only; 0: 4 */
    bool single_submit;      /* every piece is handed over by itself; else all that can start go together */
    bool lockstep;           /* a batch of queue_depth pieces lands whole before the next starts; else they overlap */
    bool sqpoll;             /* io_uring: a kernel thread submits; costs a core. Refusal is logged, not an error */
    bool iopoll;             /* io_uring: completions are polled, not interrupts; needs poll queues. Likewise */
    const char *probe_dir;   /* folder for the probe I/O; NULL: $TMPDIR or /tmp */
    const spw_region *fixed; /* one region to register with io_uring; NULL: none. Refusal is logged, not an error */
} spw_aio_options;

typedef struct spw_aio_request spw_aio_request;
struct spw_aio_request {
    /* Set by the caller before submit. */
    spw_aio_op op;
    spw_aio_priority priority;
    spw_aio_file *file;
    uint64_t offset; /* any */
    uint64_t bytes;  /* any above 0; ignored by FSYNC and FDATASYNC */
    void *buf;       /* any address; aligned ones (spw_aio_file_align) are transferred without a bounce copy */
    void *user;      /* the caller's, untouched */
    /* Valid once the request came back from spw_aio_poll or spw_aio_wait. */
    spw_status status;
    int sys_errno;                         /* of the failed piece, else 0 */
    uint64_t done_bytes;                   /* equals bytes when status is SPW_OK */
    uint64_t submit_ns, start_ns, done_ns; /* start: the first piece went to the backend; 0: none did */
    /* Private to aio. */
    spw_aio_request *next;
    uint64_t issued_bytes;
    uint32_t pieces_inflight;
    bool failed;
};

/*
 * spw_aio_create - opens a context and chooses a backend with a real write and read in probe_dir.
 * Errors   SPW_EUNSUPPORTED if the backend that was asked for fails its probe (the message says why: ENOSYS, EPERM
 *          by seccomp, sysctl io_uring_disabled, memlock), SPW_EINVAL for bad options, SPW_ENOMEM.
 * Threads  a context, its files and its requests belong to one thread; only spw_aio_wake may come from others. While
 *          nothing is in flight, all of them together may be handed to another thread.
 * Owns     options->fixed is borrowed until spw_aio_destroy().
 */
spw_status spw_aio_create(spw_aio **out, const spw_aio_options *options, spw_error *err);
/* Waits for transfers in flight, drops what was not started, closes all files. NULL is fine. */
void spw_aio_destroy(spw_aio *aio);
spw_aio_backend spw_aio_backend_of(const spw_aio *aio);
/* Why this backend: "io_uring (probe I/O succeeded, 64 MiB registered)" and so on. Lives as long as the context. */
const char *spw_aio_reason(const spw_aio *aio);

enum { SPW_AIO_OPEN_READ = 1, SPW_AIO_OPEN_WRITE = 2, SPW_AIO_OPEN_CREATE = 4, SPW_AIO_OPEN_BUFFERED = 8 };
/*
 * spw_aio_file_open - O_DIRECT unless SPW_AIO_OPEN_BUFFERED; where the file system refuses O_DIRECT the file is opened
 * buffered, with one warning. Errors name the path.
 */
spw_status spw_aio_file_open(spw_aio_file **out, spw_aio *aio, const char *path, unsigned flags, spw_error *err);
/* Waits for the file's requests in flight and drops those that have not come back: none of them will. NULL is fine. */
void spw_aio_file_close(spw_aio_file *file);
const char *spw_aio_file_path(const spw_aio_file *file);
bool spw_aio_file_direct(const spw_aio_file *file);
/* Bytes; offset, length and address for a copy-free transfer. At least a page; 1 for a buffered file. */
uint32_t spw_aio_file_align(const spw_aio_file *file);
int spw_aio_file_fd(const spw_aio_file *file); /* for fallocate and the like; not for I/O */

/*
 * spw_aio_submit - start one transfer.
 *   SPW_OK     req and its buffer are lent until spw_aio_poll() or spw_aio_wait() returns req, once, its status set.
 *   otherwise  (SPW_EINVAL: zero bytes, wrong open mode, offset overflow) nothing was started and nothing changed.
 * A queue that is full is no error: the request waits inside. Nothing moves before the next spw_aio_poll() or
 * spw_aio_wait(), so that requests submitted together are ordered and handed over together. Requests are not ordered
 * among each other: FSYNC covers the writes that came back before it was submitted.
 */
spw_status spw_aio_submit(spw_aio *aio, spw_aio_request *req, spw_error *err);
/* Returns one finished request; when none is at hand, pushes what is queued to the backend and looks again. */
spw_aio_request *spw_aio_poll(spw_aio *aio);
/*
 * spw_aio_wait - the same, but sleeps until a request finishes, spw_aio_wake() is called, or timeout_ns has passed
 * (UINT64_MAX: no limit). NULL in the last two cases. Also sleeps (until wake or timeout) when nothing is in flight.
 */
spw_aio_request *spw_aio_wait(spw_aio *aio, uint64_t timeout_ns);
/* Makes the spw_aio_wait() that sleeps now, or else the next one, return. Any thread; async-signal-safe. */
void spw_aio_wake(spw_aio *aio);
/* Fills err from a finished request whose status is not SPW_OK: path, op, offset, wanted and got bytes, cause. */
spw_status spw_aio_request_error(const spw_aio_request *req, spw_error *err);

/* What a context takes of memory besides its caller's buffers, with files on device_count devices. At most; pure. */
uint64_t spw_aio_memory_bytes(const spw_aio_options *options, uint32_t device_count);
/* And besides, once requests come whose offset and address differ within a block. */
uint64_t spw_aio_bounce_bytes(const spw_aio_options *options);

/* Counters since create; the owning thread only. */
typedef struct spw_aio_stats {
    uint64_t read_bytes, write_bytes;     /* of finished pieces, as transferred (bounce rounding included) */
    uint64_t bounce_bytes;                /* of those, copied through a bounce buffer */
    uint64_t requests, pieces, retries;   /* retries: short transfers resumed, EAGAIN and EINTR */
    uint64_t read_busy_ns, write_busy_ns; /* time with at least one read (write) in flight */
} spw_aio_stats;
void spw_aio_get_stats(const spw_aio *aio, spw_aio_stats *out);

/* ---------------------------------------------------------------- measuring */

typedef enum spw_aio_pattern {
    SPW_AIO_PATTERN_READ,
    SPW_AIO_PATTERN_WRITE,
    SPW_AIO_PATTERN_MIXED, /* as many bytes read as written */
    SPW_AIO_PATTERN_SWAP,  /* a training step: records in, compute gap, records out in place, weights read ahead */
    SPW_AIO_PATTERN_COUNT
} spw_aio_pattern;
const char *spw_aio_pattern_name(spw_aio_pattern pattern); /* "read", "write", "mixed", "swap" */

enum { SPW_AIO_BENCH_DIRS_MAX = 16 };

/* A file of numbered pages in each folder, and what every page must hold by now. One thread at a time. */
typedef struct spw_aio_bench spw_aio_bench;

typedef struct spw_aio_bench_options {
    const char *const *dirs;
    uint32_t dir_count;         /* 1 to SPW_AIO_BENCH_DIRS_MAX */
    uint64_t file_bytes;        /* in each; a multiple of 64 MiB */
    const spw_aio_options *aio; /* for filling the files; may be NULL */
    const volatile int *stop;   /* not NULL: becomes nonzero when the user wants no more (SPW_ECANCELED) */
} spw_aio_bench_options;
/* Errors  SPW_ENOSPC with needed and free bytes; those of spw_aio_create and spw_aio_file_open. Nothing stays behind. */
spw_status spw_aio_bench_open(spw_aio_bench **out, const spw_aio_bench_options *options, spw_error *err);
void spw_aio_bench_close(spw_aio_bench *bench); /* removes the files; NULL is fine */

typedef struct spw_aio_bench_run {
    spw_aio_pattern pattern;
    const spw_aio_options *aio; /* fixed and probe_dir are set here */
    uint64_t duration_ns;       /* after it no request starts */
    uint32_t dir_first, dir_count;
    bool bare;    /* the same requests on a bare io_uring loop: what the path gives without this library (not SWAP) */
    double reads; /* bare and MIXED: share of the bytes that is read; 0: half */
    bool verify;  /* afterwards, untimed: every byte of the files */
    /* Buffers take turns over so much memory (not SWAP); 0: one for each request, which may all stay in the caches. */
    uint64_t memory_bytes;
} spw_aio_bench_run;

typedef struct spw_aio_bench_result {
    uint64_t read_bytes, write_bytes, requests;
    double seconds;                  /* until the last transfer, writes flushed to the device */
    double flush_seconds;            /* of these: the closing flush */
    double gb_s;                     /* 1e9 bytes, both directions, over all of it */
    double burst_gb_s, settled_gb_s; /* in the first quarter of the time, in the second half */
    double p50_us, p99_us;           /* of a block, from its start to its end; of SWAP: of records read */
    double cpu_s_per_gb;             /* user and system time of this process */
    uint64_t wrong;                  /* pages with other bytes than were written */
    double device_ratio;             /* bytes that the block devices counted / bytes moved; 0: unknown */
    char device_note[128];           /* why it is unknown */
    bool direct;                     /* O_DIRECT on every file */
    spw_aio_backend backend;         /* that was used */
    char reason[384];
} spw_aio_bench_result;
/* Errors  the first failed transfer, SPW_EUNSUPPORTED for bare without io_uring, SPW_ECANCELED after stop. */
spw_status
spw_aio_bench_measure(spw_aio_bench *bench, const spw_aio_bench_run *run, spw_aio_bench_result *out, spw_error *err);

/* ---------------------------------------------------------------- faults for tests */

/*
 * Called by the context's thread before each transfer; NULL (the default) turns it off. *move_bytes holds the bytes
 * wanted: a smaller value makes the transfer short. Returning an errno makes it fail: with *move_bytes untouched before
 * anything has moved, with a smaller value after that many (a torn write). *delay_ns: how long the completion is held
 * back; different delays reorder completions.
 */
typedef int (*spw_aio_fault_fn)(void *ctx, const spw_aio_request *req, uint64_t offset, uint64_t bytes,
                                uint64_t *move_bytes, uint64_t *delay_ns);
void spw_test_aio_fault(spw_aio *aio, spw_aio_fault_fn fn, void *ctx);

/* A schedule of faults drawn from a seed; chances are per 1000 transfers. Zeroed: no faults. */
typedef struct spw_test_aio_schedule {
    uint64_t seed;
    uint32_t delays, shorts, agains; /* agains: EAGAIN or EINTR */
    uint32_t errors, full, torn;     /* EIO; ENOSPC and torn for writes only */
    uint64_t delay_ns_max;
    uint64_t error_at; /* the error_at-th transfer from now fails with EIO; 0: none */
    /* Counted as they happen. */
    uint64_t transfers, failures; /* failures: EIO, ENOSPC and torn writes */
} spw_test_aio_schedule;
/* An spw_aio_fault_fn; ctx is an spw_test_aio_schedule. */
int spw_test_aio_scheduled(void *ctx, const spw_aio_request *req, uint64_t offset, uint64_t bytes, uint64_t *move_bytes,
                           uint64_t *delay_ns);
/* Makes iopoll take an ordinary second ring, so that its code runs where no device has poll queues. */
void spw_test_aio_iopoll_pretend(bool on);

#ifdef __cplusplus
}
#endif
#endif
