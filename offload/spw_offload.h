/*
 * spw_offload.h - moves bytes between tiers: swap space on NVMe, slots in host memory, unit buffers on the device.
 *
 * The store owns every copy of every chunk and one mover thread that decides nothing about training: it is told which
 * units will be used next (policy: runtime), fetches them in that order as far as memory allows, and streams records
 * past a function it was handed (Adam: it does not know). A copy is used only at the generation that was asked for.
 */
#ifndef SPW_OFFLOAD_H
#define SPW_OFFLOAD_H

#include "spw_aio.h"
#include "spw_base.h"
#include "spw_gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum spw_tier { SPW_TIER_DEVICE, SPW_TIER_HOST, SPW_TIER_NVME, SPW_TIER_COUNT } spw_tier;
const char *spw_tier_name(spw_tier tier); /* "device", "host", "nvme" */

/* ---------------------------------------------------------------- swap space */

/*
 * One preallocated file in <dir>/spillway-<job>/rank-<rank>/swap.bin, locked while it is open. Opening first reclaims
 * the folders of runs that are gone (their lock is free).
 */
typedef struct spw_swap spw_swap;
/*
 * Whether there is room for so many bytes in each of count folders, before anything is made for them; those on one device share what is free
 * there. Folders of runs that are gone are reclaimed first. SPW_OK too where one does not open: who needs it says why.
 */
spw_status spw_swap_check(const char *const *dirs, const uint64_t *bytes, uint32_t count, spw_error *err);
/* Errors  SPW_ENOSPC with needed and free bytes, SPW_ENOENT / SPW_ESYS naming the folder. Nothing is left behind. */
spw_status spw_swap_open(spw_swap **out, spw_aio *aio, const char *dir, const char *job, uint32_t rank, uint64_t bytes,
                         spw_error *err);
void spw_swap_close(spw_swap *swap); /* removes the file and its folders; NULL is fine */
spw_aio_file *spw_swap_file(const spw_swap *swap);
/* Removes folders of dead runs below dir; returns how many. */
uint32_t spw_swap_reclaim(const char *dir);

/* ---------------------------------------------------------------- the store */

/*
 * Plain data from the plan. Chunks of a unit are consecutive; units are in the order of the forward pass. A store may hold
 * one stretch of each unit, a rank's part: then its weights on the device and its gradient are that stretch.
 * On a device that the host cannot address a trainable unit is on the device with all it has, gradient included, or not at all.
 * If all weights of a unit are there, in the type that it computes in, they are used where they lie: it is not gathered
 * (spw_store_direct).
 */
typedef struct spw_store_chunk {
    uint32_t unit_idx;
    uint64_t first; /* element of the whole unit */
    uint64_t elems; /* multiple of 4096 */
    spw_tier weight_tier, record_tier;
    uint32_t path_idx; /* of the swap path, when either tier is nvme */
    /* Frozen weights on nvme that stay where they are: of spw_store_config's pieces. Count 0: in swap, like all others. */
    uint32_t piece_first, piece_count;
    /*
     * It may be updated before the gate opens: what is on nvme has a second place there, and weights in memory beside a record on nvme
     * go out behind it; a record in memory, and weights there beside it, have a log. Of a unit's records on nvme all are so or none.
     */
    bool spare;
} spw_store_chunk;

/* A stretch of a chunk's weights in a file; a chunk's rise, and what lies between them is zero. */
typedef struct spw_store_piece {
    uint32_t file_idx;
    uint64_t offset;    /* in the file */
    uint64_t at, bytes; /* in the chunk's weights */
} spw_store_piece;

/* As it was when the pieces were found. */
typedef struct spw_store_file {
    const char *path;
    uint64_t bytes;
    int64_t mtime_ns;
} spw_store_file;

typedef struct spw_store_unit {
    uint32_t chunk_first, chunk_count;
    uint64_t first, elems; /* the stretch held here: where it starts in the whole unit; padded */
    bool trainable;        /* has records and a gradient */
    bool spills;           /* its gradient waits on nvme for its update; all its records are there too */
    spw_quant
        form; /* its weights are stored as codes of this form, and it is not trainable; SPW_QUANT_NONE: as numbers */
    /*
     * Its update has two halves: the first leaves in its gradient what the second begins with once somebody has changed that as a whole
     * (spw_store_config.whole). It has a gradient in memory, host's or device's, and no chunk that is spare.
     */
    bool whole;
} spw_store_unit;

/* One use of a unit: its weights as of `generation` updates. */
typedef struct spw_store_use {
    uint32_t unit_idx;
    uint64_t generation;
} spw_store_use;

/*
 * Called on a worker thread with one chunk in memory. record and grad are NULL for a frozen unit (grad also in sweeps).
 * Different chunks come on different threads at once. A status other than SPW_OK poisons the store.
 */
/*
 * What is stored as codes comes as what they decode to; what is left there becomes our own, which round it (spw__quant_settle). Codes of a published
 * form never become others: INIT has them themselves for weights (spw_store_weight_bytes, all of which are stored), and EDIT is refused.
 */
typedef spw_status (*spw_store_fn)(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad,
                                   spw_error *err);
/* A chunk's state, changed in place. */
typedef struct spw_store_state {
    void *weights, *record;
    void *log;        /* what takes the update back goes there; NULL: nothing does */
    bool log_weights; /* for the weights too */
    bool no_room;     /* out, with log_weights: the log does not hold it; of this piece nothing was changed */
} spw_store_state;
/*
 * The same for an update, of elements [first, first + count) of the chunk: piece by piece, in order, so that what is read
 * from nvme, verified, updated and summed again comes from memory once. first and count are multiples of 4096. As undo it takes the
 * update of such a piece back by its log; weights that the log leaves out may be missing then.
 */
typedef spw_status (*spw_store_update_fn)(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad,
                                          uint64_t first, uint64_t count, spw_error *err);
/*
 * An update on a device that the host cannot address: puts all of it into queue and returns. The arrays are device memory; *bad,
 * which is 0 and in the host arena, is how many gradients were not finite once the queue has passed. Then, if any was not, bad_fn
 * makes the error of it.
 */
typedef void (*spw_store_device_fn)(void *ctx, uint32_t chunk_idx, spw_gpu_queue *queue, void *weights, void *record,
                                    void *grad, uint64_t *bad);
typedef spw_status (*spw_store_bad_fn)(void *ctx, uint32_t chunk_idx, uint64_t bad, spw_error *err);
enum { SPW_RECORD_PARTS_MAX = 8 };
/* An update's first half: as spw_store_update_fn, of the record and the gradient alone. */
typedef spw_status (*spw_store_prepare_fn)(void *ctx, uint32_t chunk_idx, void *record, void *grad, uint64_t first,
                                           uint64_t count, spw_error *err);
/*
 * What lies between the halves of a unit's update: changes grad (unit elems, grad_dtype, where spw_store_grad() is), maybe in queues only,
 * and calls spw_store_whole_done() once that is done, before or after it returns. Called in the thread that waits in the store, or calls
 * spw_store_help(), without any lock; one unit after the other, lowest first.
 */
typedef void (*spw_store_whole_fn)(void *ctx, uint32_t unit_idx, void *grad);

typedef struct spw_store_record {
    uint32_t bytes_32;                    /* per 32 elements: 8-bit state shares scales */
    uint32_t parts[SPW_RECORD_PARTS_MAX]; /* its arrays, in bytes per 32 elements; they add up to it */
    uint32_t part_count;
} spw_store_record;

typedef struct spw_store_config {
    spw_gpu *gpu;
    const spw_store_unit *units;
    const spw_store_chunk *chunks;
    uint32_t unit_count, chunk_count;
    spw_dtype weight_dtype, grad_dtype;
    uint32_t weight_bytes;      /* per element */
    spw_store_record record[2]; /* of units that are whole: [1] */
    uint32_t log_bytes_32[2];   /* of the record alone, and of the weights too; with undo */
    bool update_reads_weights;
    uint32_t weight_slot_count, record_slot_count; /* used only by chunks on nvme; at least 1 then */
    uint32_t grad_window_count; /* for units that spill: so many gradients are in host memory; at least 1 then */
    uint64_t device_granule; /* units take multiples of it there, so that one fits where others were; 0: whole pages */
    uint64_t device_cache_bytes; /* for gathered units, in the device's compute type; unused where none are gathered */
    uint32_t worker_count;       /* optimizer threads; 0: 1 */
    bool pin_memory, integrity;
    const spw_topology *topology; /* lent to create: its nodes hold the host arena in turn; NULL: as it comes */
    bool pin_threads;             /* seat the workers in the topology (spw_seat_workers) */
    const char *const *paths;     /* swap folders */
    uint32_t path_count;
    /* Lent until destroy. An edit of chunks that have pieces is refused; INIT leaves them as they are. */
    const spw_store_piece *pieces;
    const spw_store_file *files;
    uint32_t file_count;
    const char *job; /* NULL: unique to this process */
    uint32_t rank;
    spw_aio_options aio;
    spw_store_update_fn update, undo; /* undo: where chunks in memory are updated before the gate opens */
    /* For units on a device that the host cannot address, with bad_fn; prepare_device: of those that are whole the first half, without weights. */
    spw_store_device_fn update_device, prepare_device;
    spw_store_bad_fn bad_fn;
    spw_store_prepare_fn prepare; /* for units that are whole */
    spw_store_whole_fn whole; /* NULL: the caller takes them himself, in an order of his own (spw_store_whole_take) */
    void *update_ctx;
    uint64_t chaos_seed;               /* tests: random delays everywhere and poisoned released buffers; 0: off */
    spw_test_aio_schedule *aio_faults; /* tests: of the swap files' transfers; NULL: none */
} spw_store_config;

/*
 * Records of a unit that is whole, so many chunks of them on nvme, stay in their slots from one half of its update to the other: it waits
 * until so many may. Where there are too few slots for that they are written and read again between the halves. Two are for others. Pure.
 */
static inline bool
spw_store_holds(uint32_t slot_count, uint32_t chunk_count)
{
    return chunk_count + 2 <= slot_count;
}

/* Bytes that so many weights take in a tier: bytes each, or codes in whole pages. Pure. */
static inline uint64_t
spw_store_weight_bytes(uint64_t elems, uint32_t bytes, spw_quant form)
{
    return form == SPW_QUANT_NONE ? elems * bytes
                                  : spw_round_up(elems / SPW_QUANT_BLOCK * spw_codes_block_bytes(form), 4096);
}

/* What create will take, from the same arithmetic. Pure. */
typedef struct spw_store_need {
    uint64_t host_bytes, device_bytes;
    uint64_t *path_bytes; /* (path_count), the caller's array; may be NULL */
} spw_store_need;
void spw_store_compute_need(const spw_store_config *config, spw_store_need *need);
/* The unit's acquired weights are those that updates change, not copies of them. Pure. */
bool spw_store_direct(const spw_store_config *config, uint32_t unit_idx);
/*
 * Of need.host_bytes, what brings chunks of a device that the host cannot address, and what codes decode to, to the workers: such a chunk
 * for each of spw_store_stages(); and what updates there tell of each. Pure.
 */
uint64_t spw_store_stage_bytes(const spw_store_config *config);
uint32_t spw_store_stages(uint32_t worker_count);
/* Of that, what updates tell: whole pages. */
static inline uint64_t
spw_store_told_bytes(uint32_t chunk_count)
{
    return spw_round_up(chunk_count * sizeof(uint64_t), 4096);
}
/*
 * Host memory that a store takes besides its arena: tables, stacks (functions handed to it with more than 16 KiB there
 * come on top), transfers in flight. Of config it reads the counts and aio, so it can be asked before anything is placed.
 */
uint64_t spw_store_table_bytes(const spw_store_config *config);

typedef struct spw_store spw_store;
spw_status spw_store_create(spw_store **out, const spw_store_config *config, spw_error *err);
void spw_store_destroy(spw_store *store); /* waits for work in flight, removes the swap files; NULL is fine */

/*
 * spw_store_sweep - runs fn once for every chunk, on the workers, each chunk brought to memory first.
 * INIT: contents are undefined before, stored after (generation 0). VISIT: read only. Blocks; no step may be open. One that broke
 * off is not any more: what ran ahead in it is undone first.
 */
typedef enum spw_sweep { SPW_SWEEP_INIT, SPW_SWEEP_VISIT, SPW_SWEEP_EDIT } spw_sweep;
spw_status spw_store_sweep(spw_store *store, spw_sweep mode, spw_store_fn fn, void *ctx, spw_error *err);
/*
 * spw_store_sweep_some - the same for chunks [first, first + count) alone: no other chunk is read or written.
 * VISIT, or EDIT: fn may change weights and record. Then both go to their tiers, with new checksums, at the generation
 * that they have, and what was on the device of their units is dropped: who acquires such a unit meanwhile waits and
 * sees the change. The caller holds none of them.
 * Writes to nvme go on behind its back, as after an update: whoever reads next waits for them.
 * Errors  SPW_EINVAL while a snapshot is under way or in the middle of a step, also with count 0; an edit of weights in their files, or in published
 *         codes. Nothing has changed.
 */
spw_status spw_store_sweep_some(spw_store *store, spw_sweep mode, uint32_t first, uint32_t count, spw_store_fn fn,
                                void *ctx, spw_error *err);

/*
 * spw_store_snapshot_begin - hands every chunk to fn once, as it is after generations[unit] updates, while steps go on.
 *   generations  (unit_count) in   where the updates released so far take each unit
 *   trained      only chunks that have a record; the others are not even read
 * A chunk's next update hands it over before it changes it; until then idle workers take what is in memory anyway, at most
 * half of them. So nothing is read for it, and nothing is kept twice. Returns at once.
 * spw_store_snapshot_finish - visits what is left, such as everything after the last step; fn is not called any more when
 * it returns, also after a failure. Blocks only if something is left; no step may be open then (as for a sweep).
 * Errors  SPW_EINVAL: one at a time, and no sweep meanwhile.
 */
spw_status spw_store_snapshot_begin(spw_store *store, const uint64_t *generations, bool trained, spw_store_fn fn,
                                    void *ctx, spw_error *err);
spw_status spw_store_snapshot_finish(spw_store *store, spw_error *err);

/* The uses to come, nearest first: the first fetch_count may be fetched, all of them guide eviction. A hint; copied. */
void spw_store_set_future(spw_store *store, const spw_store_use *uses, uint32_t use_count, uint32_t fetch_count);
/*
 * The same uses as were told last, less the first `dropped` of them, with use_count others behind them: what a pass changes from use to use.
 * Cost  of what is dropped and added, however many uses or units there are.
 */
void spw_store_future_goes_on(spw_store *store, uint32_t dropped, const spw_store_use *uses, uint32_t use_count,
                              uint32_t fetch_count);
/* Drops what is on the device and held by nobody, and the future: the next uses fetch again. Waits for copies under way. */
void spw_store_forget(spw_store *store);
/*
 * spw_store_acquire - waits until all of the units are on the device at once at their generations, and keeps them there.
 *   weights  (count) out: each unit's contiguous weights in the compute type
 * What is wanted together is asked for together: one unit held while another is waited for could lie just where that one
 * would fit. Each unit acquired needs one release. count is at most SPW_ACQUIRE_MAX, no unit twice.
 * Errors  SPW_ESTALE if that generation has passed; SPW_EPOISONED's first reason after a failure.
 */
enum { SPW_ACQUIRE_MAX = 320 };
spw_status
spw_store_acquire(spw_store *store, const spw_store_use *uses, uint32_t count, const void **weights, spw_error *err);
/* reader: the queue whose work so far reads the weights; NULL: whoever read them has finished. */
void spw_store_release(spw_store *store, uint32_t unit_idx, spw_gpu_queue *reader);

/*
 * Host buffer (unit elems, grad_dtype) for the unit's reduced gradient: the caller's from spw_store_grad_open to
 * spw_store_grad_ready, and readable until step_go. The update consumes it: afterwards records pass through its memory, and open
 * waits until the last of them is on nvme. Open again before the update (more micro-batches, a skipped step): no change.
 * Of a unit that spills it is a window, which open takes: it may have to wait for one, and from ready on nobody may read it.
 * Of a unit on a device that the host cannot address it is device memory. Ask is for whoever is about to make a gradient: what lies in
 * its memory leaves before other records. True: nothing is there any more, open will not wait. Ask never waits; any thread.
 */
void *spw_store_grad(spw_store *store, uint32_t unit_idx);
bool spw_store_grad_on_device(const spw_store *store, uint32_t unit_idx);
bool spw_store_grad_ask(spw_store *store, uint32_t unit_idx);
spw_status spw_store_grad_open(spw_store *store, uint32_t unit_idx, spw_error *err);
/*
 * A step: begin (records may be read ahead) -> grad_ready per unit -> go (updates may run; may come first) -> the units
 * reach generation + 1 one by one, lowest first, while the caller goes on. skip instead of go: nothing changes.
 *   takes_part  (units) which trainable units get a gradient in this step; NULL: all. A unit without one that had records read ahead
 *               would hold their slots for ever.
 * GATED  updates wait for go.
 * EARLY  go comes before the gradients: nothing is read ahead, slots are for those whose gradient comes first.
 * AHEAD  chunks that may (spare) are updated as soon as the gradient is ready, in the hope that go will follow; what was there before
 *        stays in the other place, or follows from the log. go makes it final. If updates must differ: undo, then go, unless
 *        gradients that spill are spent: then skip, and make all gradients again in a step of EARLY. skip undoes by itself.
 * LATE   go comes first, and the gradients are there since the step before: ready says that the unit's weights are not used with this
 *        generation any more. Highest first, records are read ahead in that order, and grad_open waits for the unit's update, whose gradient
 *        the next one replaces: ready once more, when that has come, says nothing. Not for units that spill, nor for those on a device.
 */
typedef enum spw_step_mode { SPW_STEP_GATED, SPW_STEP_EARLY, SPW_STEP_AHEAD, SPW_STEP_LATE } spw_step_mode;
void spw_store_step_begin(spw_store *store, const bool *takes_part, spw_step_mode mode);
/* AHEAD, before undo: no further update begins before go. Any thread; a gradient that must not be used becomes ready after it. */
void spw_store_step_hold(spw_store *store);
/*
 * AHEAD: an update has begun, or has ended, that consumes its gradient, because that spills. After undo this does not change any more; and then
 * no gradient that spills is kept.
 */
bool spw_store_step_spent(spw_store *store);
/*
 * Everything is as it was at begin, and gradients are there still, but for those that spill if some are spent. Blocks, as long as updates of
 * what was done in memory would take; the config's undo must see what update saw. Without an update to take back it returns at once.
 */
spw_status spw_store_step_undo(spw_store *store, spw_error *err);
void spw_store_grad_ready(spw_store *store, uint32_t unit_idx); /* any thread, also from a queue's notify */
void spw_store_step_go(spw_store *store);
void spw_store_step_skip(spw_store *store);
/* Does what lies between the halves of updates, of the units that have come to it. Never waits for another one. */
void spw_store_help(spw_store *store);
/*
 * Waits until this unit has come to it, and hands its gradient out, to be changed as spw_store_whole_fn does. Nothing else may wait for it
 * then. The lowest comes first, in a step of SPW_STEP_EARLY the highest: those further on may have to wait for its records' slots.
 */
spw_status spw_store_whole_take(spw_store *store, uint32_t unit_idx, void **grad, spw_error *err);
void spw_store_whole_done(spw_store *store, uint32_t unit_idx); /* any thread, also from a queue's notify */
/* Waits until all updates that were released have finished and reached their tier's memory. */
spw_status spw_store_drain(spw_store *store, spw_error *err);

/* What the thread that computes waits for. The store knows the first four; the others are the runtime's. */
typedef enum spw_stall {
    SPW_STALL_NVME_READ,
    SPW_STALL_NVME_WRITE, /* back-pressure: a slot that is still being written */
    SPW_STALL_H2D,
    SPW_STALL_OPTIMIZER,
    SPW_STALL_D2H,
    SPW_STALL_COLLECTIVE,
    SPW_STALL_DATA,
    SPW_STALL_COUNT
} spw_stall;
const char *spw_stall_name(spw_stall stall); /* "nvme_read", ... */
typedef struct spw_store_stats {
    uint64_t nvme_read_bytes, nvme_write_bytes, h2d_bytes;
    uint64_t
        nvme_moving; /* now: transfers under way, plus 1 while a chunk waits to be written; 0: all of it lies there */
    uint64_t uses, hits; /* hit: when acquire was called, the future had started the unit's fetch */
    uint64_t stall_ns[SPW_STALL_COUNT];
    uint64_t update_busy_ns;             /* summed over workers, checksums included */
    uint64_t checked_bytes, checksum_ns; /* of them: what was summed on the way out or verified on the way in */
    uint64_t read_busy_ns, write_busy_ns;
    uint64_t updates;       /* chunks */
    uint64_t ahead, undone; /* of them: before the gate opened; and taken back, to be done again or not at all */
    uint64_t no_room;       /* begun before the gate opened and not done then, for the log had no room */
    uint64_t loans;         /* records that passed through the memory of consumed gradients */
    uint64_t frozen_edits;  /* sweeps that may have changed a chunk that has no record */
} spw_store_stats;
void spw_store_get_stats(spw_store *store, spw_store_stats *out);
/* "io_uring (...)" or "none". */
const char *spw_store_aio_reason(const spw_store *store);
/* From now on every call fails with this, unless one has failed before: whoever waits in the store goes on. Any thread. */
void spw_store_fail(spw_store *store, const spw_error *reason);
/* The first failure, or SPW_OK. */
spw_status spw_store_check(spw_store *store, spw_error *err);

/* ---------------------------------------------------------------- activation checkpoints */

/*
 * What the forward pass keeps for the backward pass: buffers of one size, each known by its slot (how early it is made)
 * and its micro-batch; index = slot x micro_count + micro. A pass goes
 *
 *   begin -> put (rising index) -> turn -> get, release (slots from last to first, in each the micro-batches rising)
 *
 * and leaves out what it does not need. On the device a checkpoint has a home that the caller writes to itself. Others are
 * copied out, to a home in host memory or through a few staging buffers to nvme, and from turn on come back by
 * themselves, in the order of their use, as far as working buffers go: everything leaves before anything comes back.
 *
 * Threads  the calls below belong to one thread. One driver thread moves what is not on the device.
 * Errors   the first failure of a transfer, from every call that can fail, until destroy.
 */
typedef struct spw_act_place {
    spw_tier tier;
    uint32_t path_idx; /* of the swap path, on nvme */
} spw_act_place;

typedef struct spw_act_config {
    spw_gpu *gpu;
    spw_dtype dtype;
    uint64_t elems; /* per checkpoint */
    uint32_t slot_count, micro_count;
    const spw_act_place *places; /* (slot_count, micro_count), lent to create */
    uint32_t working_count;      /* device buffers they come back to; at least 1 when any is not on the device */
    uint32_t staging_count;      /* host buffers; at least 1 when any is on nvme */
    bool pin_memory, integrity;
    const char *const *paths; /* swap folders */
    uint32_t path_count;
    const char *job; /* NULL: unique to this process */
    uint32_t rank;
    spw_aio_options aio;
    uint64_t *stall_ns;                /* (SPW_STALL_COUNT), the caller's: its waits are added; may be NULL */
    uint64_t chaos_seed;               /* tests: random delays and poisoned released buffers; 0: off */
    spw_test_aio_schedule *aio_faults; /* tests: of the swap files' transfers; NULL: none */
} spw_act_config;

/* What create will take. Pure: of the configuration only sizes, counts and places matter. */
typedef struct spw_act_need {
    uint64_t host_bytes, device_bytes;
    uint64_t nvme_bytes; /* of one checkpoint there: whole pages */
} spw_act_need;
void spw_act_compute_need(const spw_act_config *config, spw_act_need *need);

/*
 * Host memory that it takes besides: tables; the threads, when any checkpoint is off the device; transfers, when any is on
 * nvme. Of config it reads the counts and aio, so it can be asked before anything is placed.
 */
typedef struct spw_act_tables {
    uint64_t table_bytes, thread_bytes, transfer_bytes;
} spw_act_tables;
void spw_act_compute_tables(const spw_act_config *config, spw_act_tables *out);

typedef struct spw_act spw_act;
/* Errors  SPW_ENOSPC with needed and free bytes, SPW_EINVAL, SPW_ENOMEM. Nothing is left behind. */
spw_status spw_act_create(spw_act **out, const spw_act_config *config, spw_error *err);
void spw_act_destroy(spw_act *act); /* waits for transfers, removes the swap files; NULL is fine */
/* Where a checkpoint on the device lives; NULL for the others. */
void *spw_act_home(const spw_act *act, uint32_t idx);

/* Forgets every checkpoint, also those of a pass that broke off; waits for what is under way. */
spw_status spw_act_begin(spw_act *act, spw_error *err);
/*
 * spw_act_put - keeps a checkpoint that compute has been given to write. Does not wait.
 *   source  on the device: its home, or a buffer that stays lent until spw_act_settle(idx): others may read it meanwhile
 */
spw_status spw_act_put(spw_act *act, uint32_t idx, const void *source, spw_gpu_queue *compute, spw_error *err);
/* Waits until the source of put has been copied out and may be overwritten. Of an index that was not put: at once. */
spw_status spw_act_settle(spw_act *act, uint32_t idx, spw_error *err);
/* No more puts in this pass. */
void spw_act_turn(spw_act *act);
/* Waits until the checkpoint is on the device. It stays until release, which comes before the next get. */
spw_status spw_act_get(spw_act *act, uint32_t idx, void **device_out, spw_error *err);
/* compute: the queue whose work so far reads it. */
void spw_act_release(spw_act *act, uint32_t idx, spw_gpu_queue *compute);

typedef struct spw_act_stats {
    uint64_t nvme_read_bytes, nvme_write_bytes, h2d_bytes, d2h_bytes;
} spw_act_stats;
void spw_act_get_stats(spw_act *act, spw_act_stats *out);

#ifdef __cplusplus
}
#endif
#endif
