/*
 * spw_base.h - the ground floor that every module stands on: status and error messages, accounted memory, a worker
 * pool, half-precision floats, checksums, time, logging and sizes. It knows nothing of tensors, files or training.
 */
#ifndef SPW_BASE_H
#define SPW_BASE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdarg.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPW_VERSION "0.1.0"

/* ---------------------------------------------------------------- status and errors */

typedef enum spw_status {
    SPW_OK = 0,
    SPW_EINVAL,       /* the caller's mistake */
    SPW_ENOMEM,       /* an allocation was refused */
    SPW_EIO,          /* a read or write failed */
    SPW_ENOSPC,       /* a file system is full */
    SPW_ENOENT,       /* a file or folder is missing */
    SPW_ESYS,         /* any other refusal by the operating system */
    SPW_ECORRUPT,     /* bytes are not the bytes that were written */
    SPW_ESTALE,       /* a copy reflects another step than the one asked for */
    SPW_ECONFIG,      /* configuration: unknown key, wrong type, bad value */
    SPW_ENOFIT,       /* does not fit the budgets given */
    SPW_EUNSUPPORTED, /* known, and not supported here */
    SPW_EBUSY,        /* held by somebody else */
    SPW_ECANCELED,    /* stopped on request */
    SPW_ETIMEDOUT,    /* did not happen in time */
    SPW_EPOISONED,    /* an earlier failure made the object unusable */
    SPW_ENONFINITE,   /* infinity or NaN where a number is needed */
    SPW_STATUS_COUNT
} spw_status;

/* spw_status_name - "SPW_EIO" and so on; never NULL. */
const char *spw_status_name(spw_status st);

/*
 * spw_error - what went wrong, for a person. Zero-initialise; may be NULL in every call.
 * The first SPW_RAISE fills it, spw_error_wrap() puts a phrase in front: "phrase: message".
 */
typedef struct spw_error {
    spw_status status;
    int sys_errno; /* 0 if no system call was involved */
    char message[768];
} spw_error;

#if defined(__GNUC__)
#define SPW_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define SPW_PRINTF(a, b)
#endif

/* Fills err (when not NULL) and returns st, so that `return SPW_RAISE(...)` is the whole error path. */
spw_status spw_error_raise(spw_error *err, spw_status st, const char *fmt, ...) SPW_PRINTF(3, 4);
/* The same with ": strerror(errnum)" at the end, and the limit to raise, if it is one; the status follows errnum (ENOSPC -> SPW_ENOSPC...). */
spw_status spw_error_raise_sys(spw_error *err, int errnum, const char *fmt, ...) SPW_PRINTF(3, 4);
/* Puts "phrase: " in front of the message. */
void spw_error_wrap(spw_error *err, const char *fmt, ...) SPW_PRINTF(2, 3);
/* Keeps the first error: copies src into dst only while dst->status is SPW_OK. */
void spw_error_keep_first(spw_error *dst, const spw_error *src);
#define SPW_RAISE(err, st, ...)         spw_error_raise((err), (st), __VA_ARGS__)
#define SPW_RAISE_SYS(err, errnum, ...) spw_error_raise_sys((err), (errnum), __VA_ARGS__)
#define SPW_THREAD_LIMITS               "(limits: ulimit -v, ulimit -u, pids.max)" /* of messages that a thread did not start */

/* Runs expr (a spw_status); returns it from the enclosing function unless SPW_OK. For functions with nothing to undo. */
#define SPW_TRY(expr)                                                                                                  \
    do {                                                                                                               \
        spw_status spw_try_st_ = (expr);                                                                               \
        if (spw_try_st_ != SPW_OK)                                                                                     \
            return spw_try_st_;                                                                                        \
    } while (0)

/* An invariant of our own. Stops a build made with -DSPW_CHECKED; does nothing otherwise. The condition never does work. */
#ifdef SPW_CHECKED
void spw_assert_failed(const char *file, int line, const char *what);
#define SPW_ASSERT(cond) ((cond) ? (void)0 : spw_assert_failed(__FILE__, __LINE__, #cond))
#else
#define SPW_ASSERT(cond) ((void)sizeof(!(cond)))
#endif

/* ---------------------------------------------------------------- logging */

/* A note is what somebody who waits wants to know: what is being done now, and may take long. */
typedef enum spw_log_level { SPW_LOG_DEBUG, SPW_LOG_INFO, SPW_LOG_NOTE, SPW_LOG_WARN } spw_log_level;
typedef void (*spw_log_fn)(void *ctx, spw_log_level level, const char *line);
/* Library code never prints: lines go to fn, or nowhere when none is set (the default). Set before threads start. */
void spw_log_set(spw_log_fn fn, void *ctx);
void spw_log(spw_log_level level, const char *fmt, ...) SPW_PRINTF(2, 3);

/* ---------------------------------------------------------------- sets of CPU or node numbers */

enum { SPW_IDS_MAX = 1024 }; /* numbers from here on are in no set */
typedef struct spw_id_set {
    uint64_t bits[SPW_IDS_MAX / 64];
} spw_id_set;
static inline bool
spw_id_set_has(const spw_id_set *set, uint32_t id)
{
    return id < SPW_IDS_MAX && (set->bits[id / 64] >> id % 64 & 1) != 0;
}
static inline void
spw_id_set_add(spw_id_set *set, uint32_t id)
{
    if (id < SPW_IDS_MAX)
        set->bits[id / 64] |= 1ull << id % 64;
}
uint32_t spw_id_set_count(const spw_id_set *set);
/* "0-3,8" to a set and back, as the kernel writes lists. Parsing is false on anything else; formatting returns buf. */
bool spw_id_set_parse(spw_id_set *out, const char *text);
char *spw_id_set_format(char *buf, size_t buf_bytes, const spw_id_set *set);

/* ---------------------------------------------------------------- memory */

/* Small heap objects, zeroed; counted, and failable by tests. NULL when refused. */
void *spw_mem_zalloc(size_t bytes);
void *spw_mem_calloc(size_t count, size_t bytes); /* NULL on overflow too */
char *spw_mem_strdup(const char *s);
void spw_mem_free(void *p); /* NULL is fine */
/*
 * spw_mem_grow - makes *array, a pointer to such memory or NULL, at least want_bytes large and then at least twice as large as it was (*have_bytes,
 * 0 for NULL); the first keep_bytes stay, what follows is zero. False: no memory, and nothing changed.
 */
bool spw_mem_grow(void **array, uint64_t *have_bytes, uint64_t want_bytes, uint64_t keep_bytes);

/*
 * spw_gaps - what is free of one memory, without who has the rest: pure. A memory that is full of pieces has few gaps, however many these are.
 */
typedef struct spw_gap {
    uint64_t offset, bytes;
} spw_gap;
typedef struct spw_gaps {
    spw_gap *list;
    uint32_t count, capacity;
    uint64_t most; /* no gap has more bytes */
} spw_gaps;
spw_status spw_gaps_init(spw_gaps *gaps, uint64_t bytes, uint32_t piece_count_max, spw_error *err);
void spw_gaps_deinit(spw_gaps *gaps);
/* The lowest gap of that size (above 0). False: there is none, and nothing changed. */
bool spw_gaps_take(spw_gaps *gaps, uint64_t bytes, uint64_t *offset);
void spw_gaps_give_back(spw_gaps *gaps, uint64_t offset, uint64_t bytes); /* all of a piece that was taken */

/*
 * spw_set - whole numbers below a bound (2^36 at most), in their order: pure. Adding what is there, and removing what is not, changes nothing.
 */
enum { SPW_SET_LEVELS = 7 };
typedef struct spw_set {
    uint64_t bound, *words;
    uint64_t *level[SPW_SET_LEVELS], word_count[SPW_SET_LEVELS]; /* of words */
    uint32_t level_count;
} spw_set;
spw_status spw_set_init(spw_set *set, uint64_t bound, spw_error *err); /* it is empty */
void spw_set_deinit(spw_set *set);
void spw_set_add(spw_set *set, uint64_t n);
void spw_set_remove(spw_set *set, uint64_t n);
bool spw_set_has(const spw_set *set, uint64_t n);
uint64_t spw_set_next(const spw_set *set, uint64_t from); /* the lowest from there on; UINT64_MAX: there is none */
uint64_t spw_set_last(const spw_set *set, uint64_t end);  /* the highest below it; UINT64_MAX: there is none */

/* Test hooks: the k-th allocation from now on fails (0 turns it off); how many objects and regions are live. */
void spw_test_fail_alloc(unsigned k);
bool spw_test_fault_fired(void);
long spw_test_live_allocs(void);

/*
 * The same for calls into the system that are written SPW_CALL(errnum, call): the k-th from now on is not made and
 * returns -1 with errno set. SPW_CALL_NEG is for functions that return a negative errno, or 0 and above.
 */
void spw_test_fail_call(unsigned k);
bool spw_test_call_fired(void);
bool spw__call_fails(void);
#define SPW_CALL(errnum, call)     (spw__call_fails() ? (errno = (errnum), -1) : (call))
#define SPW_CALL_NEG(errnum, call) (spw__call_fails() ? -(errnum) : (call))

/*
 * spw_region - one large mapping, page aligned, touched at once so that its bytes are resident and the peak is known.
 * From 2 MiB on it begins at a multiple of 2 MiB and asks for pages of that size; locks pages when asked and allowed.
 */
typedef struct spw_region {
    void *base;
    uint64_t bytes;         /* rounded up to a page; 0 for an empty region */
    bool locked;            /* mlock succeeded */
    uint64_t map_bytes;     /* private: length of the mapping */
    uint64_t counted_bytes; /* private: in the sums below */
} spw_region;
enum {
    SPW_REGION_LOCK = 1,
    SPW_REGION_LAZY = 2, /* do not touch the pages now, and take small ones */
    SPW_REGION_TABLE = 4 /* not in the sums below: a table, which a plan counts with its others */
};
/* Errors SPW_ENOMEM with the bytes asked for. A refused lock is no error: region->locked says so. */
spw_status spw_region_map(spw_region *region, uint64_t bytes, unsigned flags, spw_error *err);
/*
 * The same, its pages on the nodes in turn, for memory that threads on all of them work on. Fewer than two nodes, NULL,
 * or a process that was given a policy (numactl): just spw_region_map().
 */
spw_status
spw_region_map_over(spw_region *region, uint64_t bytes, unsigned flags, const spw_id_set *nodes, spw_error *err);
/*
 * The same of the bytes of fd, a memory file that is at least so long, seen by everybody who maps it. They are there
 * already, or touching them could end the process: allocate them first (fallocate).
 */
spw_status spw_region_map_fd(spw_region *region, int fd, uint64_t bytes, unsigned flags, spw_error *err);
void spw_region_unmap(spw_region *region); /* accepts a zeroed region */
/*
 * What touching so many bytes of a fresh mapping makes resident: whole pages, or whole huge pages where the kernel hands
 * them out unasked (transparent_hugepage: always).
 */
uint64_t spw_touched_bytes(uint64_t bytes);
enum { SPW_STACK_BYTES = 112 << 10 }; /* touched by a thread that runs our code, with what is its own in libraries */
/* Sum of all live regions' bytes but lazy ones, now and at the highest point since start. Any thread. */
uint64_t spw_region_bytes_live(void);
uint64_t spw_region_bytes_peak(void);

/*
 * spw_carve - hands out parts of one region front to back; carving is how a plan becomes addresses.
 * Not thread-safe. Alignment 4096 unless the name says otherwise.
 */
typedef struct spw_carve {
    char *base;
    uint64_t bytes, used;
} spw_carve;
void *spw_carve_take(spw_carve *carve, uint64_t bytes); /* NULL when it does not fit */

/* Here, because planning calls it for each of millions of chunks. */
static inline uint64_t
spw_round_up(uint64_t x, uint64_t multiple)
{
    return (x + multiple - 1) / multiple * multiple;
}
/* a*b and a+b with overflow as false. */
bool spw_mul_u64(uint64_t a, uint64_t b, uint64_t *out);
bool spw_add_u64(uint64_t a, uint64_t b, uint64_t *out);

/* Resident bytes of this process now, exact to a page, and its peak since exec; 0 when unknown. */
uint64_t spw_process_rss_bytes(void);
/* Processor time of all its threads so far. */
uint64_t spw_process_cpu_ns(void);
uint64_t spw_process_rss_peak_bytes(void);

/* "256MiB", "1.5GiB", "4096", "10KB" (10^3), "8G" (2^30) to bytes. False on anything else, on overflow and on negative numbers. */
bool spw_parse_bytes(const char *text, uint64_t *bytes_out);
/* "1.50 GiB", "700 MiB", "12 B" into buf; returns buf. */
char *spw_format_bytes(char *buf, size_t buf_bytes, uint64_t bytes);

/* ---------------------------------------------------------------- time and random numbers */

uint64_t spw_now_ns(void); /* CLOCK_MONOTONIC */
void spw_sleep_ns(uint64_t ns);
/*
 * How long something has been waited for, by who looks for it again and again: seconds since begin. A look that comes after more than a
 * second counts for one: this process was stopped meanwhile (Ctrl-Z, a scheduler, a frozen container), and as a rule what is waited for, too.
 */
typedef struct spw_waiting {
    uint64_t looked_ns, waited_ns;
} spw_waiting;
void spw_waiting_begin(spw_waiting *waiting);
double spw_waiting_look(spw_waiting *waiting);
/*
 * The calling thread is one that others and the disk wait for, and works little: it asks the kernel for its shortest time slice
 * (Linux 6.12) and for a nice value 10 below its own, so that it runs as soon as there is something to do, also when every
 * processor is busy. With the slice alone, having just run it may wait for the next tick, milliseconds, behind a thread that
 * never sleeps. Threads that it begins later have a nice value of 0 at least. False: the nice value was refused (it takes CAP_SYS_NICE or
 * RLIMIT_NICE) and stays.
 */
bool spw_thread_be_prompt(void);

/*
 * How long the calling thread has been ready to run and had no processor, since it began (the kernel's run_delay). UINT64_MAX: the
 * kernel does not say.
 */
uint64_t spw_thread_run_delay_ns(void);

/* Philox 4x32-10 (Salmon et al. 2011): 128 random bits from (key, counter); the same everywhere, no state. */
void spw_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo, uint32_t out[4]);
/* Uniform in [0,1) with 24 bits from one 32-bit word. */
static inline float
spw_uniform_f32(uint32_t word)
{
    return (float)(word >> 8) * (1.0f / 16777216.0f);
}

/* ---------------------------------------------------------------- element types and half floats */

typedef enum spw_dtype { SPW_F32, SPW_BF16, SPW_F16, SPW_DTYPE_COUNT } spw_dtype;
static inline uint32_t
spw_dtype_bytes(spw_dtype t)
{
    return t == SPW_F32 ? 4u : 2u;
}
const char *spw_dtype_name(spw_dtype t);                /* "fp32", "bf16", "fp16" */
bool spw_dtype_parse(const char *text, spw_dtype *out); /* also PyTorch's words, "bfloat16" and "half", in any case */
typedef enum spw_fp8 { SPW_E4M3, SPW_E5M2, SPW_FP8_COUNT } spw_fp8; /* formats of 8-bit floats */

static inline uint32_t
spw_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}
static inline float
spw_bits_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
static inline float
spw_bf16_to_f32(uint16_t h)
{
    return spw_bits_f32((uint32_t)h << 16);
}
/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t
spw_f32_to_bf16(float f)
{
    uint32_t u = spw_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float spw_f16_to_f32(uint16_t h);
uint16_t spw_f32_to_f16(float f);

/*
 * spw_convert - n elements from one type to another (fp32 <-> bf16/fp16; equal types copy). Vectorised; round to
 * nearest even. Arrays do not overlap. Any thread.
 */
void spw_convert(void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n);

/*
 * Sum of squares in fp64, in 16 lanes that are added in turn at the end: an order that depends on n alone. Here, so
 * that files built for one instruction set make it with theirs; each product is exact, so the bits are the same. In pieces of whole
 * 16 elements, the last of any number, it is the sum of the whole.
 */
enum { SPW_SUM_LANES = 16 };
static inline void
spw_sumsq_add(double lane[SPW_SUM_LANES], const float *x, uint64_t n)
{
    uint64_t i = 0;
    for (; i + SPW_SUM_LANES <= n; i += SPW_SUM_LANES)
        for (int j = 0; j < SPW_SUM_LANES; j++)
            lane[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; i < n; i++, j++)
        lane[j] += (double)x[i] * (double)x[i];
}
static inline double
spw_sumsq_end(const double lane[SPW_SUM_LANES])
{
    double sum = 0;
    for (int j = 0; j < SPW_SUM_LANES; j++)
        sum += lane[j];
    return sum;
}
static inline double
spw_sumsq(const float *x, uint64_t n)
{
    double lane[SPW_SUM_LANES] = {0};
    spw_sumsq_add(lane, x, n);
    return spw_sumsq_end(lane);
}

/* ---------------------------------------------------------------- checksums */

/* XXH3 64 bit of the bytes. */
uint64_t spw_checksum(const void *data, uint64_t bytes);
/* Of data piece by piece: `before` is the sum so far, 0 at the start. Not the sum of the whole in one call. */
uint64_t spw_checksum_more(uint64_t before, const void *data, uint64_t bytes);
/* spw_checksum() of bytes that come in pieces: open once (NULL: no memory), then begin, add, sum. One thread's; close takes NULL. */
typedef struct spw_checksum_stream spw_checksum_stream;
spw_checksum_stream *spw_checksum_open(void);
void spw_checksum_begin(spw_checksum_stream *stream);
void spw_checksum_add(spw_checksum_stream *stream, const void *data, uint64_t bytes);
uint64_t spw_checksum_sum(const spw_checksum_stream *stream);
void spw_checksum_close(spw_checksum_stream *stream);

/* ---------------------------------------------------------------- worker pool */

/*
 * spw_pool - n threads that run the parts of one job at a time and sleep in between.
 *
 * A pool belongs to the thread that calls spw_pool_run(); the caller works too, so a pool of 1 has no threads of its
 * own. Which thread runs which part is not fixed: a job whose result must not depend on it writes disjoint outputs.
 */
typedef struct spw_pool spw_pool;
typedef void (*spw_pool_fn)(void *ctx, uint32_t part_idx, uint32_t worker_idx);
/* thread_count 0: all allowed CPUs. name (up to 15 chars) shows in ps and traces. */
spw_status spw_pool_create(spw_pool **out, uint32_t thread_count, const char *name, spw_error *err);
void spw_pool_destroy(spw_pool *pool); /* NULL is fine */
uint32_t spw_pool_threads(const spw_pool *pool);
/* Calls fn(ctx, i, worker) for every i in [0, part_count), returns when all are done. A NULL pool runs them inline. */
void spw_pool_run(spw_pool *pool, uint32_t part_count, spw_pool_fn fn, void *ctx);

/* CPUs this thread may use: its affinity mask, cut by the cgroup's quota; at least 1. OMP_NUM_THREADS says nothing here. */
uint32_t spw_cpu_allowed_count(void);
/*
 * CPUs' worth of time that the cgroup of this process, or one above it, may use; infinity when none limits it. Reads
 * root/proc and root/sys, version 1 or 2; root is "" outside of tests.
 */
double spw_cgroup_cpu_quota(const char *root);
/* The least memory limit of that cgroup and those above it, in bytes; UINT64_MAX when there is none. */
uint64_t spw_cgroup_memory_bytes(const char *root);
/* What the fullest of them has left, files in the page cache not counted as used; UINT64_MAX when none has a limit. */
uint64_t spw_cgroup_memory_room_bytes(const char *root);
/*
 * The NUMA nodes that are GPUs' memory, of those that are coherent with the CPU (Grace Hopper, Grace Blackwell): the kernel counts
 * them as the machine's, and gives pages of them where others are scarce. Reads root/proc and root/sys; root is "" outside of tests.
 * Returns how many.
 */
uint32_t spw_gpu_nodes(const char *root, spw_id_set *out);
/* MemAvailable of root/proc/meminfo, without what of it is a GPU's; 0 when unknown. */
uint64_t spw_memory_available_bytes(const char *root);
/*
 * What this process may still take: its share of the least of that and of what its cgroups have left, where so many processes, one or more, want as
 * much as it does; and no more than RLIMIT_AS and RLIMIT_DATA, which are each one's own and count what is mapped: untouched_bytes is what
 * will be mapped and never be memory. 0 when unknown.
 */
uint64_t spw_memory_room_bytes(uint64_t untouched_bytes, uint32_t sharers);

/* The disk that a path lies on, or will lie on: of a partition the whole disk. Two paths with the same share it; 0: unknown. */
uint64_t spw_disk_of(const char *path);
/* Bytes that are free there for this user; 0: unknown. */
uint64_t spw_disk_free(const char *path);
/* The disk that a block device is a part of. Reads root/sys; root is "" outside of tests. */
uint64_t spw_disk_behind(const char *root, uint64_t dev);

/* CPU features, probed once. SPW_ISA=scalar|avx2|avx512|neon in the environment lowers the answer; another value is told to the log once. */
typedef enum spw_isa { SPW_ISA_SCALAR, SPW_ISA_AVX2, SPW_ISA_AVX512, SPW_ISA_NEON, SPW_ISA_COUNT } spw_isa;
spw_isa spw_cpu_isa(void);        /* the best that CPU, build and SPW_ISA allow */
spw_isa spw_cpu_isa_native(void); /* without SPW_ISA */
bool spw_cpu_has(spw_isa isa);
const char *spw_isa_name(spw_isa isa);

/* ---------------------------------------------------------------- where threads and memory go */

/* One logical CPU; all numbers are below SPW_IDS_MAX. core is the same for all hardware threads of a core, and no others. */
typedef struct spw_cpu {
    uint16_t cpu, core, node;
} spw_cpu;
typedef struct spw_topology {
    uint32_t cpu_count;        /* at least 1 */
    spw_cpu cpus[SPW_IDS_MAX]; /* by rising number */
} spw_topology;
/* The affinity mask of the calling thread. */
void spw_cpu_affinity(spw_id_set *out);
/*
 * spw_topology_read - the CPUs in allowed that are online, with their core and node. allowed NULL: those of the calling
 * thread's affinity mask. Reads root/sys; root is "" outside of tests. What it does not tell is guessed: each CPU is a
 * core of its own, on node 0.
 */
void spw_topology_read(spw_topology *out, const char *root, const spw_id_set *allowed);
/* The nodes that its CPUs are on; returns how many. */
uint32_t spw_topology_nodes(const spw_topology *topology, spw_id_set *out);
/* The nodes that have memory, GPUs' among them; false where the kernel does not say. */
bool spw_memory_nodes(const char *root, spw_id_set *out);
/*
 * spw_topology_share - leaves the CPUs of one of several processes that share a machine. Pure.
 * Computes  nodes are dealt out first, so that nobody lies across more of them than it must; then the whole cores of a node.
 *           Cores that are fewer than the processes are shared. turn < count.
 */
void spw_topology_share(spw_topology *topology, uint32_t turn, uint32_t count);

/*
 * spw_seat_workers - where workers belong. Pure.
 *   seats  (worker_count) out
 *
 * Computes  home: one worker per core, evenly over the nodes as far as their cores go; then the cores' other hardware
 *           threads in the same way; then around again. Workers of one node follow each other.
 *           cpus: on several nodes, all of the worker's node; of these, and on one node, only the first hardware thread
 *           of each core where there are cores for all workers. Never the home alone: on a machine that others use too
 *           the scheduler knows better which of them is idle. A worker that would get every CPU is not bound.
 */
typedef struct spw_seat {
    spw_cpu home;
    bool bound;
    spw_id_set cpus; /* of a bound worker */
} spw_seat;
void spw_seat_workers(spw_seat *seats, uint32_t worker_count, const spw_topology *topology);
/* Binds the thread if its seat is bound. A hint: where the system refuses, the thread stays as it is. */
void spw_seat_apply(const spw_seat *seat, pthread_t thread);
/* Seats a pool's threads; worker 0 is the caller, whose thread stays as it is. Errors  SPW_ENOMEM, nothing bound. */
spw_status spw_pool_seat(spw_pool *pool, const spw_topology *topology, spw_error *err);

/* ---------------------------------------------------------------- numbers in files */

/* Little-endian, of so many bytes, wherever they lie. */
static inline void
spw_put_le(unsigned char *p, uint64_t x, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)(x >> 8 * i);
}

static inline uint64_t
spw_get_le(const unsigned char *p, uint32_t bytes)
{
    uint64_t x = 0;
    for (uint32_t i = 0; i < bytes; i++)
        x |= (uint64_t)p[i] << 8 * i;
    return x;
}

/* ---------------------------------------------------------------- samples */

double spw_median(const double *v, uint32_t n); /* 0 of none */
/* The sample that is at this rank, below n, when they are sorted; NaN where some are no numbers. */
double spw_sample_at(const double *v, uint32_t n, uint32_t rank);

/* ---------------------------------------------------------------- timeline (Perfetto) */

/*
 * spw_timeline - what happened when, on named lanes, for Perfetto's JSON importer. Off until opened; recording is one
 * store into a ring of fixed size when on, and one load when off. The latest events win. Any thread may record.
 */
typedef enum spw_lane {
    SPW_LANE_COMPUTE,
    SPW_LANE_H2D,
    SPW_LANE_D2H,
    SPW_LANE_COMM,
    SPW_LANE_NVME_READ,
    SPW_LANE_NVME_WRITE,
    SPW_LANE_ADAM,
    SPW_LANE_COUNT
} spw_lane;
spw_status spw_timeline_open(uint64_t event_count_max, spw_error *err);
uint64_t spw_timeline_bytes(uint64_t event_count_max); /* that it takes */
/* name is a literal or lives as long as the timeline; arg is shown as "unit". Times are spw_now_ns(). */
void spw_timeline_add(spw_lane lane, const char *name, uint64_t arg, uint64_t begin_ns, uint64_t end_ns);
spw_status spw_timeline_write(const char *path, spw_error *err);
void spw_timeline_close(void);

#ifdef __cplusplus
}
#endif
#endif
