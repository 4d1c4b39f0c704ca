/*
 * Inside the store: the states of a chunk's copies and of a unit's device buffer. Everything below `lock` in spw_store
 * is touched only with it held; buffers in a lent state (READING, WRITING, VERIFYING, UPDATING) belong to aio, or to
 * the worker that took the job, until it hands them back under the lock.
 *
 *   weights  EMPTY -> READING -> VERIFYING -> CLEAN -> UPDATING -> DIRTY -> WRITING -> CLEAN -> EMPTY (evicted)
 *   record   EMPTY -> READING -> READY -> UPDATING -> DIRTY -> WRITING -> EMPTY
 *   device   NONE -> FILLING -> READY -> NONE
 *
 * Where a unit's weights are used in place (spw_store_direct), READY says that readers may have them: updates and edits wait until the last
 * of these is done. Copies that live in host or device memory stay CLEAN (READY) and go through UPDATING only. Of a unit on a device that the host
 * cannot address an UPDATING chunk belongs to the h2d queue; everything but updates sees it through staging memory. An edit goes the way of an
 * update, but the generation stays, so no copy on the device may survive it or be filled meanwhile.
 */
#ifndef SPW_OFFLOAD_INTERNAL_H
#define SPW_OFFLOAD_INTERNAL_H

#include "future_internal.h"
#include <pthread.h>

typedef enum { W_EMPTY, W_READING, W_VERIFYING, W_CLEAN, W_UPDATING, W_DIRTY, W_WRITING } w_state;
typedef enum { R_NONE, R_EMPTY, R_READING, R_READY, R_UPDATING, R_DIRTY, R_WRITING } r_state;
/* Of units that spill (grads.c). */
typedef enum { G_NONE, G_WINDOW, G_SUMMING, G_LEAVING, G_AWAY, G_COMING, G_THERE } g_state;
typedef enum { D_NONE, D_FILLING, D_READY } d_state;
typedef enum { OP_NONE, OP_UPDATE, OP_INIT, OP_VISIT, OP_EDIT, OP_PREPARE } unit_op; /* PREPARE: of jobs alone */
/* How far the update of a unit that is whole has come; of others it is in the second half. */
typedef enum { H_SECOND, H_FIRST, H_BETWEEN, H_CHANGING } unit_half;

typedef struct chunk chunk;
struct chunk {
    spw_store *store;
    spw_store_chunk plan;
    uint32_t idx;
    uint64_t weight_offset, record_offset, grad_offset; /* in the swap file */
    uint64_t weight_spare, record_spare;                /* the other places, of one that has some (ahead.c) */
    void *log;                                          /* or what takes its update back, of one in memory */
    w_state w;
    r_state r;
    g_state g;
    void *weights, *record; /* memory that holds the copy; NULL when EMPTY */
    int32_t weight_slot, record_slot;
    uint32_t pins;     /* readers of `weights`: copies in flight, a visit, or a hold for the update to come */
    bool held;         /* one of the pins is the update's own */
    bool started;      /* its job of this op was handed to the workers */
    bool record_fresh; /* just read: verify before use */
    bool released;     /* READING: for an update that may run */
    bool rush;         /* its record lies where a gradient is to go */
    uint64_t generation;
    uint64_t weight_sum, record_sum, grad_sum;
    /* ahead: its update began before the gate opened; undoable: it has ended, and can be taken back. */
    bool ahead, undoable, undo_read; /* undo_read: its weights of before are to be read back */
    bool taking_back;                /* its job takes its update back by its log */
    /* The log had no room: steps in which it is not tried, this one among them; and what they last were, less for each that stood. */
    uint32_t rest, rest_next;
    uint64_t weight_sum_before, record_sum_before, undo_sum;
    uint32_t piece_next; /* in place: the piece that is being read */
    bool summed;         /* in place: weight_sum is that of its first read */
    chunk *next_job,
        *next_dirty; /* next_job: of the workers' list, or of the updates on the device that end together */
    bool in_dirty;
    bool snap;                     /* the snapshot under way does not have it yet */
    bool snap_taken;               /* an idle worker is about to change that */
    uint64_t snap_generation;      /* and wants it as of so many updates */
    bool grad_held;                /* its part of the gradient is being made, or is not consumed yet */
    uint32_t loan_first, loan_end; /* which loans lie in that part */
    chunk *
        next_grad; /* of those that are to get a checksum, or have got one and go out; or of undo_head, once updates have consumed those */
    spw_aio_request weight_req, record_req, grad_req;
};

typedef struct unit {
    spw_store_unit plan;
    void *grad;
    bool on_device;      /* its updates, or both their halves, run in the h2d queue, and grad is device memory */
    bool spare;          /* some of its chunks may be updated before the gate opens */
    bool direct;         /* used where it lies (spw_store_direct): no place in the cache, nothing to gather */
    uint64_t generation; /* all chunks have reached it */
    unit_op op;
    unit_half half;
    uint32_t on_nvme; /* of its records, chunks */
    bool holding;     /* until its update has ended these stay in memory once they are there (spw_store_holds) */
    bool grad_ready;
    bool waits;         /* for it, and is counted */
    int32_t window;     /* where its gradient is, of units that spill; -1: nowhere */
    uint64_t grad_turn; /* of the windows that were taken */
    uint32_t in_window; /* chunks whose gradient is still there */
    uint32_t load_next, job_next,
        done_next;   /* chunks of the unit, in this op: the first that is not loaded, handed to */
    uint32_t op_end; /* the workers, counted as done; and where it ends */
    d_state d;
    uint64_t device_offset, device_bytes, device_generation;
    uint32_t fill_next, read_next, copied_count, copies_inflight;
    uint32_t pins;
    bool abort_fill, by_demand;
    bool wanted;       /* the caller of acquire waits for it, and for others with it */
    uint64_t last_use; /* release's count */
    /* Of a device that works by itself: the compute that read it last, where it lay then, whether that may be under way. */
    spw_gpu_event *used;
    uint64_t used_offset;
    bool used_pending;
} unit;

/*
 * A record slot in the memory of consumed gradients: from the update of its chunks until their next gradient it is
 * free. Only records whose update was released may be there: they need nobody's help to leave.
 */
typedef struct loan {
    uint32_t held; /* chunks that have a gradient there */
    chunk *chunk;  /* whose record it holds; NULL: none */
} loan;

/* Memory in which one worker at a time sees a chunk that it cannot see where it is. */
enum { STAGES_MAX = 8 };
typedef struct stage {
    char *weights, *codes, *record;
    spw_gpu_queue *queue;
    bool taken;
} stage;

struct spw_store {
    /* Fixed after create. */
    spw_store_config cfg;
    uint32_t chunk_count, unit_count;
    uint64_t slot_weight_bytes, slot_record_bytes;
    spw_region host, logs; /* logs: of chunks in memory that may be updated ahead, which no device and no disk sees */
    void *device_memory;
    char *device_cache;
    uint32_t compute_bytes;
    char *weight_slots, *record_slots, *grads, *window_memory;
    uint64_t window_bytes;
    uint64_t *bad; /* (chunk_count) gradients that were not finite, of the update in the h2d queue, which writes it */
    spw_swap **swaps;
    spw_aio_file **files; /* (cfg.file_count) of frozen weights in place */
    bool any_nvme, pinned;
    bool apart; /* the host cannot address device memory */
    pthread_t mover, *workers;
    uint32_t worker_started;
    bool mover_started;
    spw_gpu_queue *h2d;
    spw_aio *aio; /* used by the mover thread alone */

    /* Who has taken a stage; without the store's lock. */
    pthread_mutex_t stage_lock;
    pthread_cond_t stage_freed;
    stage stages[STAGES_MAX];
    uint32_t stage_count; /* 0: nothing is staged */

    pthread_mutex_t lock;
    pthread_cond_t main_cond, work_cond, mover_cond;
    /* Under lock. */
    unit *units;
    chunk *chunks;
    int32_t *weight_slot_owner; /* chunk index or -1 */
    int32_t *record_slot_free;
    uint32_t record_slot_free_count;
    uint32_t holding; /* chunks of units that do */
    uint32_t between; /* units whose update is (H_BETWEEN) */
    unit **windows;   /* (cfg.grad_window_count) whose gradient is there; NULL: free */
    uint32_t window_free, grads_leaving;
    uint64_t grad_turns;
    chunk *sum_head, *summed_head; /* gradients: for the workers, and back */
    loan *loans;                   /* record slot number record_slot_count + i */
    uint32_t loan_count;
    future future;
    spw_store_use demand;
    spw_gaps room;    /* of the device's cache */
    spw_set resident; /* units that have a place there */
    spw_set busy;     /* units with an operation */
    spw_set
        todo; /* of these, without those that wait for a gradient (waiting) and those of which all is handed out and nothing on the device */
    uint32_t waiting;
    spw_set read; /* units in the cache whose last reader may be under way (used_pending) */
    uint64_t releases;
    bool tight; /* a wanted unit had to make room for another: nothing is fetched ahead until they are acquired */
    bool demand_set, gate_open, step_open, stop, mover_kicked;
    spw_step_mode mode;
    bool held_back; /* AHEAD: no further update begins before the gate opens */
    bool spent;     /* AHEAD: an update has begun that consumes a gradient of a unit that spills */
    bool undoing;   /* no record is read: what was done is on its way back */
    chunk
        *undo_head; /* whose weights are to be read back, by next_grad; a unit that may be ahead has no use for that */
    uint32_t undo_left; /* chunks that are not back yet */
    /* Work for the workers; passing: chunks that hold a slot, which other transfers wait for. They and the others take turns. */
    chunk *verify_head, *verify_tail, *job_head, *job_tail, *passing_head, *passing_tail;
    bool passing_turn;
    chunk *together_head, *together_tail; /* updates in the h2d queue whose span is open; the mover closes it */
    uint64_t together_elems;
    chunk *dirty_head;
    uint32_t jobs_running, copies_inflight, aio_inflight;
    uint64_t passes, ended; /* of the mover over all states; transfers, copies and jobs that came to an end */
    uint32_t update_reads, record_writes; /* records in flight: read for updates that may run; written */
    uint32_t dirty_weights, rushed;       /* chunks whose weights, or whose record at once, must be written */
    bool out_of_slots;                    /* an update that may run has no memory for its next record */
    bool backward;                        /* a gradient of this step is still to come */
    spw_store_fn sweep_fn;
    void *sweep_ctx;
    spw_store_fn snap_fn; /* NULL: no snapshot is under way */
    void *snap_ctx;
    uint32_t snap_left, snap_next, snap_idle; /* chunks it lacks; where idle workers look next; how many are at it */
    bool snap_sweep;                          /* it is being finished: visits of what it lacks */
    spw_error poison;                         /* status SPW_OK while healthy */
    spw_store_stats stats;
    uint64_t chaos_state;
};

/* The snapshot under way is to have this chunk as it is now: before its next update. Lock held. */
static inline bool
spw__snap_wants(const chunk *c)
{
    return c->snap && c->generation == c->snap_generation;
}

static inline chunk *
spw__unit_chunk(spw_store *s, const unit *u, uint32_t k)
{
    return &s->chunks[u->plan.chunk_first + k];
}

/* Its operation runs without any help from the main thread. Lock held. */
static inline bool
spw__may_run(const spw_store *s, const unit *u)
{
    return u->op == OP_INIT || u->op == OP_VISIT || u->op == OP_EDIT ||
           (u->op == OP_UPDATE && u->grad_ready && s->gate_open);
}

/* Its weights stay in the files they come from (in_place.c): no extent in swap, never written. */
static inline bool
spw__in_place(const spw_store_chunk *c)
{
    return c->weight_tier == SPW_TIER_NVME && c->piece_count > 0;
}

spw_status spw__in_place_open(spw_store *s, spw_error *err);
void spw__in_place_close(spw_store *s); /* accepts what open left half done */
/* Aims a read of the chunk's weights at the piece whose turn it is; more: there is another one after it. */
void spw__in_place_aim(spw_store *s, chunk *c, spw_aio_request *req);
bool spw__in_place_more(chunk *c);
/* Takes the checksum of what was read, or compares it. No lock held, the chunk is the caller's. */
spw_status spw__in_place_verify(const spw_store *s, chunk *c, uint64_t found, spw_error *err);

/* view.c: one of the store's functions with the chunk as arguments, which begin as what is there (read), and change it (write). No lock held. */
spw_status
spw__store_call_with(spw_store *s, const chunk *c, spw_store_fn fn, void *ctx, bool read, bool write, spw_error *err);

/* ---------------------------------------------------------------- ahead.c: updates before the gate opens */

/* What goes out behind a record on nvme, to be able to undo: weights that are changed where they lie. Whole pages; 0: nothing. */
uint64_t spw__undo_bytes(const spw_store_config *cfg, const spw_store_chunk *c);
/* Its log takes back the weights too: they are in memory. */
static inline bool
spw__logs_weights(const spw_store_chunk *c)
{
    return c->weight_tier != SPW_TIER_NVME;
}
/* Of the log of a record in memory; 0: it has none. */
uint64_t spw__log_bytes(const spw_store_config *cfg, const spw_store_chunk *c);
/* In memory, behind the record. */
char *spw__undo_of(const spw_store *s, const chunk *c);
/* And in swap, of a chunk that was taken back. */
uint64_t spw__undo_offset(const spw_store *s, const chunk *c);
/* Lock held, as in all of these. Updates run before the gate opens, as far as gradients are there. */
bool spw__before_gate(const spw_store *s);
/* Those of the unit may, and are not final yet. */
bool spw__runs_ahead(const spw_store *s, const unit *u);
/* Gradients that some of its updates have consumed are wanted again: no update can begin before they come. */
bool spw__must_come_again(const spw_store *s);
/* The update of a chunk that is ahead has ended: on nvme it lives in the other place from now on. */
void spw__ahead_done(chunk *c);
/* The job that took its update back has ended. */
void spw__ahead_is_back(spw_store *s, chunk *c);
/* The gate opens: all that was done stays. */
void spw__ahead_commit(spw_store *s);
void spw__ahead_reads(spw_store *s); /* the mover's */
void spw__undo_is_back(spw_store *s, chunk *c);

/* A record is never smaller than 3 bytes per element, a gradient never larger than 4. */
enum { LOANS_PER_CHUNK = 2 };
/* room.c, before threads run. */
spw_quant spw__store_code_form(const spw_store_config *cfg, const spw_store_chunk *c); /* 0: no codes */
bool spw__store_on_device(const spw_store_config *cfg, uint32_t unit_idx); /* all of the unit is there, or nothing */
spw_status spw__store_check_config(const spw_store_config *cfg, spw_error *err);
spw_status spw__store_carve(spw_store *s, spw_error *err);

/* What a unit's jobs do now. */
static inline unit_op
spw__half_op(const unit *u)
{
    return u->half == H_FIRST ? OP_PREPARE : u->op;
}

static inline bool
spw__op_changes(unit_op op) /* an update, or the first half of one */
{
    return op == OP_UPDATE || op == OP_PREPARE;
}

static inline const spw_store_record *
spw__record_of(const spw_store_config *cfg, uint32_t unit_idx)
{
    return &cfg->record[cfg->units[unit_idx].whole];
}

static inline uint64_t
spw__chunk_weights(const spw_store *s, const chunk *c)
{
    return spw_store_weight_bytes(c->plan.elems, s->cfg.weight_bytes, spw__store_code_form(&s->cfg, &c->plan));
}

static inline uint64_t
spw__chunk_record(const spw_store *s, const chunk *c)
{
    return c->plan.elems / 32 * spw__record_of(&s->cfg, c->plan.unit_idx)->bytes_32;
}

void *spw__store_mover_main(void *store);
void *spw__store_worker_main(void *store);

/* ---------------------------------------------------------------- with the lock held */

/* store.c */
void spw__store_kick(spw_store *s);
void spw__store_poison(spw_store *s, const spw_error *err);
void spw__store_begin_op(spw_store *s, unit *u, unit_op op, uint32_t first, uint32_t end); /* its chunks [first, end) */
void spw__store_end_op(spw_store *s, unit *u);
/* Something changed of how far its operation is, of its gradient, or of what the device shows of it. */
void spw__store_note_op(spw_store *s, unit *u);
bool spw__store_has_todo(const unit *u); /* it is to be in that set */
void spw__store_wait_idle(spw_store *s); /* until no unit has an operation that can run */
void spw__store_wait_a_moment(spw_store *s);
/* What is waited for where somebody waits for this unit. Lock held. */
spw_stall spw__store_stall_cause(const spw_store *s, const unit *u, uint64_t generation);
/* Idle. Units whose update did not come to run keep their state; records read ahead stay for the next step. */
void spw__store_close_step(spw_store *s);
void spw__store_drop_read_ahead(spw_store *s);           /* sweep.c. Idle: no unit has an operation any more */
void spw__store_drop_records(spw_store *s, unit *u);     /* those read ahead for an operation it no longer has */
void spw__store_rush(spw_store *s, chunk *c, bool rush); /* its record goes before others, or not */

void spw__store_stop_holding(spw_store *s, unit *u);
/* still.c: waits that never end. Zeroed before a wait, asked once a round of it. True: fail_still makes an error of it. */
typedef struct still {
    uint32_t rounds;
    uint64_t passes, ended;
} still;
bool spw__store_still(spw_store *s, still *watch);
void spw__store_fail_still(spw_store *s, const char *what);

/* worker.c. The chunk's job of this op is done; who did it hands it back. */
void spw__store_finish_job(spw_store *s, chunk *c, unit_op op);
/* All chunks of its operation are done. */
void spw__store_finish_unit(spw_store *s, unit *u);

/* grads.c */
char *spw__store_grad_of(const spw_store *s, const chunk *c);
/* A gradient is there from now on, or, when not held, none that anybody will read. */
void spw__store_hold_grad(spw_store *s, chunk *c, bool held);
void spw__store_hold_unit(spw_store *s, const unit *u);
/* The chunk's gradient is not in its unit's window any more; whoever is last frees it. */
void spw__store_leave_window(spw_store *s, chunk *c, g_state g);
void spw__store_drop_grads(spw_store *s); /* idle: what no update will consume */

/*
 * slots.c. A slot for c, by evicting the clean copy needed last if it is needed later than `nearer_than`. False: there is none
 * to be had, but one will come.
 */
bool spw__store_take_weight_slot(spw_store *s, chunk *c, uint64_t nearer_than);
/* released: the update runs without any help from the main thread. */
bool spw__store_take_record_slot(spw_store *s, chunk *c, bool released);
void spw__store_free_record_slot(spw_store *s, chunk *c); /* its record becomes EMPTY */
void spw__store_free_weight_slot(spw_store *s, chunk *c); /* the same of its weights */

/* transfers.c */
void spw__store_submit(spw_store *s, chunk *c, bool is_weight, spw_aio_op op, spw_aio_priority priority);
void spw__store_submit_grad(spw_store *s, chunk *c, spw_aio_op op);
void spw__store_finish_request(spw_store *s, spw_aio_request *req);
void spw__store_push_job(chunk **head, chunk **tail, chunk *c); /* behind the others of a list of jobs */

/* fills.c */
enum { GATHERS_INFLIGHT_MAX = 8 }; /* in the h2d queue, updates on the device included */
void spw__store_drop_device(spw_store *s, unit *u);
/* Something changed of whether it is being filled, or there and held or wanted by nobody. */
void spw__store_note(spw_store *s, unit *u);
void spw__store_follow(spw_store *s, unit *u); /* h2d waits for what read the unit last */
/* Gives a half-filled buffer up as soon as no copy writes to it any more. */
void spw__store_abort_fill(spw_store *s, unit *u);
/* Starts the fills of the uses to come, as far as device memory goes: the mover finds them under way. */
void spw__store_reserve(spw_store *s);
/* The fill is under way for a use that is waited for or fetched ahead: each pass of the mover copies what has come for it. */
bool spw__store_fill_goes_on(const spw_store *s, const unit *u);

/* What the mover does in a pass: grads.c, transfers.c, fills.c, updates.c. */
void spw__store_schedule_grads(spw_store *s);
void spw__store_schedule_writes(spw_store *s);
void spw__store_schedule_fills(spw_store *s);
void spw__store_schedule_updates(spw_store *s);

/* ---------------------------------------------------------------- without it */

void spw__store_chaos_delay(spw_store *s, uint64_t salt);
/* Makes all of it known to the device, once. False, with a line in the log if it was refused: nothing to unpin. */
bool spw__pin_host(spw_gpu *gpu, const spw_region *region);
/* Tests: now and then sleeps up to 0.3 ms; *calls counts. Any thread. */
void spw__chaos_delay(uint64_t seed, uint64_t *calls, uint64_t salt);

#endif
