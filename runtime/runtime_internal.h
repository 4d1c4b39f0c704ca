/* Inside runtime: what the planner is told and what engine and checkpoints share. */
#ifndef SPW_RUNTIME_INTERNAL_H
#define SPW_RUNTIME_INTERNAL_H

#include "spw_engine.h"

/*
 * One of the uses of a pass, in their order, of a unit's weights. Those up to `end` are made together; it stays on the device until the
 * use `until`. ends_later: its gradient goes on when weights have been used for the last time, and is there when the pass is over.
 */
typedef struct plan_use {
    uint32_t unit_idx, end, until;
    bool ends_later;
} plan_use;

/*
 * A plan that is compared with others, and only made again if it is taken: what it moves is rehearsed at one pace, and it is given up (as
 * lacking device memory) once the device's part sends more checkpoints away, makes gradients one at a time where it must not, was to
 * have state there and has none, or gathers less than that and cannot fetch ahead (spw__plan_fetches_ahead()).
 */
typedef struct plan_trial {
    uint32_t away;
    bool single_grad, has_state;
    uint64_t gathered; /* bytes */
} plan_trial;

/* Measured or derived before planning; plain numbers. */
typedef struct plan_input {
    const spw_config *config;
    spw_layout *layout; /* its chunks get their tiers */
    bool inference;
    uint32_t local_ranks;  /* of this host; 0 is 1 */
    uint32_t cpu_ranks;    /* of them, those on this one's processors; 0 is 1 */
    uint32_t device_ranks; /* and those on this one's device */
    const uint32_t
        *path_ranks[2]; /* of the configuration's swap paths for weights, for records: spw_plan's; NULL: alone */
    const uint64_t
        *path_free[2]; /* of the same: bytes that their file systems have left for this rank; NULL, 0: unknown */
    uint32_t weight_bytes, grad_bytes, compute_bytes;
    uint32_t record_bytes_32[2];  /* per 32 elements; of units that are whole: [1] */
    uint64_t largest_block_bytes; /* on the device: all units one block uses */
    uint64_t grads_device, arena_device, batch_device;
    uint64_t grads_device_least; /* of grads_device, if each gradient leaves before the next is begun */
    /*
     * Activations: flow_device holds the block's input and output of every micro-batch of a group. What is kept beside them
     * for the backward pass gets its tier in places (activation_slots, activation_micros); so many slots are used
     * (another chain may use more).
     */
    uint64_t flow_device, activation_elems;
    uint32_t activation_slots, activation_slots_used, activation_micros;
    spw_act_place *activation_places;
    spw_act_tables activation_tables;
    uint32_t tapes_most; /* micro-batches of blocks that are kept whole, at most */
    uint64_t tape_bytes; /* what a block computes between two checkpoints of a micro-batch, at most */
    uint64_t
        process_bytes; /* resident before the engine takes anything; whole MiB, so that it seldom differs between runs */
    uint64_t tables_bytes; /* host memory that is taken beside arena and device: tables, stacks, buffers of libraries */
    uint64_t stage_bytes;  /* of tables_bytes: what lies in the arena */
    uint64_t wire_host;    /* staging between ranks */
    uint64_t kept_host;    /* slices of gathered units, to gather them again */
    bool spill;            /* gradients may wait on nvme; the planner's own */
    bool ahead;        /* state on nvme has two places there, for updates before the norm is known; the planner's own */
    bool coded_grads;  /* gradients go from host to host as codes */
    uint32_t replicas; /* ranks that hold the same part; 0 is 1 */
    uint64_t room_bytes;     /* what the process may still take; 0: unknown */
    bool device_in_host;     /* the device's memory comes out of it too */
    uint64_t device_room;    /* what the device has; 0: nothing that would limit it */
    uint64_t device_asked;   /* of it, more than there is: the configuration says what there is instead; 0: no more */
    uint32_t grad_windows;   /* that gradients on their way to nvme pass through; plan.c's */
    uint64_t gather_most;    /* of gathered units, where another rank holds no more; 0: as there is room */
    bool single_grad;        /* gradients are made one at a time, as another rank has to */
    bool device_updates;     /* where records are on the device, gradients stay there and updates run there */
    bool fills;              /* offloaded state of the first units takes device memory that is left */
    double device_share;     /* of the elements that are trained: whose state the first units have there at least */
    const plan_trial *trial; /* NULL: it is not one */
    bool unexplained, uncounted; /* spw_engine_options' */
    bool measured;               /* what was chosen by time was so by rates of this machine */
    bool given;                  /* or by others that the caller knows of */
    bool displaces;              /* state is where weights could stay gathered */
    bool direct;            /* weights that lie on the device have its compute type and are used there, not gathered */
    bool gather_all;        /* the configuration wants the weights on the device: room for all of them, if there is */
    bool in_pieces;         /* embeddings and heads come in pieces */
    uint64_t piece_returns; /* how often their gradients leave in a step beyond once a pass, and come back */
    const plan_use *uses;   /* of one pass, forward then backward */
    uint32_t use_count, forward_count, passes, micro_batches;
    bool holds; /* passes hold gradients on the device, which they leave in the last one */
    bool
        made_there; /* those of state that is there are then made where they stay; between ranks they are summed first */
    uint32_t expert_turns; /* in which a layer's experts come; 1 or 0: all at once */
    uint32_t read_kept;    /* in so many layers what they read is one more checkpoint */
    uint32_t future_max;   /* uses that the store is told at most */
    uint32_t optimizer_threads;
    bool update_reads_weights;
    uint32_t log_bytes_32[2];      /* what takes an update back, of a record and of its weights too (spw_offload.h) */
    uint64_t tokens;               /* of a step, of all ranks */
    double flops, recompute_flops; /* of the step; what can be kept instead is part of both */
    double attention_flops, attention_again; /* of each of them, by attention */
    double orthogonal_flops;                 /* and of what Muon makes orthogonal */
    double twice_flops; /* and of what is made twice whatever is kept: logits of heads in pieces, experts in pieces */
} plan_input;
/* Errors  SPW_ENOFIT with the budget that would do; plan is filled all the same. */
spw_status spw__plan_make(spw_plan *plan, const plan_input *in, spw_error *err);

/*
 * Where checkpoints of activations live (plan_activations.c): first what the device keeps within room, ease less when
 * something has to leave, then what host memory takes, then the places.
 */
void spw__plan_activations_device(spw_plan *plan, const plan_input *in, uint64_t room, uint64_t ease);
void spw__plan_activations_host(spw_plan *plan, const plan_input *in, bool nvme_there, uint64_t room);
void spw__plan_activations_place(const spw_plan *plan, const plan_input *in);
/* How much of what lies between checkpoints is kept in so much device memory, instead of computing it again. */
void spw__plan_activations_tapes(spw_plan *plan, const plan_input *in, uint64_t room);
/* spw__rehearse_gathers() of the plan. */
spw_status spw__plan_gathers(const spw_plan *plan, const plan_input *in, uint32_t *anew, uint32_t *again,
                             uint32_t *steps, spw_error *err);
/* Adds what they move in a step. */
void spw__plan_activations_traffic(const plan_input *in, spw_traffic *traffic);

/* The decisions of a plan with their reasons (plan_reasons.c). */
void spw__plan_explain(spw_plan *plan, const plan_input *in);
/* Bytes of a slot: of the largest weights, record (and gradient, if it comes back there) that are on nvme; 0: there are none. */
uint64_t spw__plan_slot_weights(const plan_input *in);
uint64_t spw__plan_slot_record(const plan_input *in);
uint64_t spw__plan_largest_chunk(const spw_layout *layout);
/* The largest with a record; 0: there is none. */
uint64_t spw__plan_largest_trained(const spw_layout *layout);

/* One step of the store on paper (rehearse.c): which weights its rules move. */
typedef struct rehearsal_input {
    const spw_layout *layout; /* tiers and paths of its chunks */
    const plan_use *uses;
    uint32_t use_count, forward_count, passes, future_max;
    uint32_t weight_slots, weight_bytes, compute_bytes;
    bool direct; /* plan_input's */
    uint64_t cache_bytes, prefetch_elems;
    bool update_reads_weights, prefetch;
    bool early_gate;       /* updates need not wait for the norm */
    uint32_t grad_windows; /* in which gradients that spill are consumed then */
    bool gathers_again;    /* what has been on the device at a generation comes there again without the store */
    double backward; /* time of a block's backward pass over that of its forward pass: 3 with recompute, 2 without */
    double pace; /* elements that the store updates while a step computes / all of them; 0: each when it is needed */
} rehearsal_input;
typedef struct rehearsal {
    uint64_t path_read[SPW_PATHS_MAX], h2d; /* bytes of weights */
    uint32_t *chunk_reads;                  /* (chunk_count) reads of the weights of each; the caller's; may be NULL */
    bool
        waits; /* an update had to wait for time: at a higher pace a step may move something else, which it does not where none has to */
} rehearsal;
/* Of *out the caller sets chunk_reads. Errors  SPW_ENOMEM. */
spw_status spw__rehearse(const rehearsal_input *in, rehearsal *out, spw_error *err);

/*
 * How often each unit is gathered in so many steps of a rank, on paper (rehearse_gathers.c): anew, and again from what ranks kept;
 * both (unit_count). pool_bytes: of the device, for gathered units. Errors  SPW_ENOMEM.
 */
spw_status spw__rehearse_gathers(const rehearsal_input *in, uint64_t pool_bytes, uint32_t *anew, uint32_t *again,
                                 uint32_t *steps, spw_error *err);

/*
 * Gathered units on the device (gather.c). Which unit lies where, of which generation; a unit that is there may still be on its
 * way. A new generation takes the place of the old one.
 */
typedef struct gather_unit {
    bool kept; /* gathered at kept_generation before, of which ranks keep slices */
    uint64_t offset, bytes, generation, kept_generation;
    uint32_t pins;                    /* blocks that use it now */
    uint32_t next_use;                /* position in the future; UINT32_MAX: none */
    uint64_t read_offset, read_bytes; /* where it was read last, perhaps still is; 0 bytes: nobody reads it any more */
} gather_unit;
typedef struct gather_pool {
    bool keeps; /* ranks keep what they gather */
    uint32_t unit_count;
    gather_unit *units;
    uint64_t bytes; /* of their memory */
    spw_gaps room;  /* what is free of it */
    spw_set there;  /* units that have a place in it */
} gather_pool;
spw_status spw__gather_init(gather_pool *pool, uint32_t unit_count, uint64_t bytes, spw_error *err);
void spw__gather_deinit(gather_pool *pool);
/* The uses to come, nearest first. */
void spw__gather_tell(gather_pool *pool, const spw_store_use *future, uint32_t count);
/*
 * Gives the unit a place at a generation, by giving up units that are not pinned and whose next use comes at position
 * nearer_than of the future or later (0: any). THERE: nothing to do; ASK: it is to be gathered to its offset now; AGAIN: so it is,
 * from what was kept.
 */
typedef enum gather_answer { GATHER_THERE, GATHER_ASK, GATHER_AGAIN, GATHER_NO_ROOM } gather_answer;
gather_answer
spw__gather_ask(gather_pool *pool, uint32_t unit_idx, uint64_t bytes, uint64_t generation, uint64_t nearer_than);
bool spw__gather_has(const gather_pool *pool, spw_store_use use); /* at its generation */
/* Who is told what is to be gathered, in that order, and of what size units are on the device. */
typedef struct gather_asker {
    const spw_layout *layout;
    uint32_t elem_bytes;
    void (*ask)(void *ctx, spw_store_use use, bool again); /* again: from what was kept */
    void *ctx;
} gather_asker;
/* Gives each of them its place and pins it, until its pins are taken back. False: they do not fit together; nothing is pinned. */
bool spw__gather_pin(gather_pool *pool, const gather_asker *asker, const spw_store_use *uses, uint32_t count);
/* Tells the uses to come, and asks for the first of them (ahead) as far as their generations are there and there is room. */
void spw__gather_ahead(gather_pool *pool, const gather_asker *asker, const spw_store_use *future, uint32_t count,
                       uint32_t ahead, const uint64_t *generations);
/* What reads the unit has been submitted, on a device that works by itself, and may be under way for long. */
void spw__gather_read(gather_pool *pool, uint32_t unit_idx);
/*
 * Must the gather of a unit, which has its place, follow all that was submitted so far? If somebody may still read there, and if the unit
 * itself may still be read somewhere else, which its next readers make forget. Gathers run in order: readers that one follows are
 * no matter for those after it.
 */
bool spw__gather_follows(gather_pool *pool, uint32_t unit_idx);
void spw__gather_give_up(gather_pool *pool, uint32_t unit_idx); /* its place, if it has one; not while it is pinned */
void spw__gather_forget(gather_pool *pool);                     /* all of them */

/* ---------------------------------------------------------------- links.c: from device to device, between ranks */

enum { SPW_LINK_WHY_BYTES = 280 };
/* Collective: whether the devices of all ranks can be linked; why: what one of them lacks, "" if they can. */
spw_status
spw__links_agree(spw_comm *comm, spw_gpu *gpu, bool *linked_out, char why[SPW_LINK_WHY_BYTES], spw_error *err);
/* Among the ranks of the channel, collective; going and ctx as of spw_gpu_link_create(). */
spw_status
spw__link_open(spw_gpu_link **out, spw_gpu *gpu, spw_channel *channel, spw_gpu_going going, void *ctx, spw_error *err);

/*
 * The first swap connects each pair of ranks, with memory for each, and waits for the others: to be done at the start, not in the first backward
 * pass, beside work that they wait for. (Gathering is connected when a link is made.) Collective; scratch: 2 SPW_LINK_LEAST bytes of the device
 * for each rank.
 */
enum { SPW_LINK_LEAST = 16 };
spw_status spw__link_connect(spw_gpu_link *link, spw_gpu_queue *queue, uint32_t world, char *scratch, spw_error *err);

/* ---------------------------------------------------------------- rate_cache.c, calibrate.c */

/* Measured rates from earlier runs of this machine (rate_cache.c). Values are all above 0. */
typedef struct rate_cache rate_cache;
enum { RATE_VALUES_MAX = 4, RATE_KEY_BYTES = 2048 };
/* Never NULL but for lack of memory; empty when there is no file, or (with a line in the log) when it is damaged. */
rate_cache *spw__rate_cache_open(void);
const char *spw__rate_cache_path(const rate_cache *cache); /* "": nowhere to keep it */
/* False: not there, not count values, or older than 30 days at now_s. */
bool spw__rate_cache_get(const rate_cache *cache, const char *key, int64_t now_s, double *values, uint32_t count,
                         double *age_days);
void spw__rate_cache_put(rate_cache *cache, const char *key, int64_t now_s, const double *values, uint32_t count);
/* Writes what was put, by rename; a refusal is a line in the log. */
void spw__rate_cache_close(rate_cache *cache);
/* Keeps what ranks receive (calibrate.c), of ways of which all is known. path (SPW_PATH_BYTES): where, "": nowhere. */
void spw__keep_received(bool linked, uint32_t local_ranks, const spw_rates *rates, char *path);

/* One swap path to stripe over. */
typedef struct stripe_path {
    const char *name; /* for messages */
    double weight;    /* > 0 */
    uint64_t limit;   /* bytes; 0: none */
    uint64_t bytes;   /* out: what was assigned */
} stripe_path;
/*
 * spw__stripe - the path of each chunk, by weight and within the limits (how: stripe.c). Pure.
 *   chunk_bytes  (chunk_count) in   bytes on nvme; 0: none, and path 0
 *   path_idx     (chunk_count) out  index of a path
 * Errors  SPW_ENOFIT with the bytes needed and each path's limit. path_count is 1 to SPW_PATHS_MAX.
 */
spw_status spw__stripe(stripe_path *paths, uint32_t path_count, const uint64_t *chunk_bytes, uint32_t chunk_count,
                       uint32_t *path_idx, spw_error *err);

/* A sum of doubles that are not negative, without rounding: the same bits in any order (exact_sum.c). Zeroed it is 0. */
enum { EXACT_DIGITS = 68, EXACT_VALUES = 1 + EXACT_DIGITS };
typedef struct exact_sum {
    uint64_t digits[EXACT_DIGITS];
    double special; /* infinities and NaN */
    uint32_t adds;
} exact_sum;
void spw__exact_add(exact_sum *s, double x);
void spw__exact_merge(exact_sum *s, exact_sum *more);
double spw__exact_value(exact_sum *s);
/* To and from values that may be added up over ranks, up to 2^21 of them, one by one. */
void spw__exact_save(exact_sum *s, double values[EXACT_VALUES]);
void spw__exact_load(exact_sum *s, const double values[EXACT_VALUES]);

/* What a device that has the choice computes in. Pure. */
static inline spw_dtype
spw__config_compute(const spw_config *c)
{
    return c->fp16 ? SPW_F16 : c->bf16 ? SPW_BF16 : SPW_F32;
}

/* The stretch that a parameter and a chunk share, as elements of the unit; false if there is none. Pure. */
bool spw__layout_overlap(const spw_place *at, const spw_store_chunk *c, uint64_t *first, uint64_t *end);
/* What this rank has of a parameter whose optimizer takes it whole, likewise; false for every other one. Pure. */
bool spw__layout_own_whole(const spw_layout *l, uint32_t id, uint64_t *first, uint64_t *end);
/* Elements [first, end) of a unit, at `at` in memory between ranks; none: first is end. */
typedef struct whole_piece {
    uint64_t first, end, at;
} whole_piece;
/*
 * orthogonal_pieces.c. What a part of a unit of matrices gives to others: to parts in front of it its head, to those behind its tail, which
 * lies where the head does if they are the same, and is empty then. grad_bytes: of an element of the gradient. Returns the memory that
 * these take. Pure.
 */
uint64_t spw__whole_given(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes, uint32_t part, whole_piece *head,
                          whole_piece *tail);
/* And gets, by part; NULL: not asked for. Returns the memory for what it gives and gets. */
uint64_t spw__whole_got(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes, uint32_t part, whole_piece *in,
                        spw_comm_piece *take, spw_comm_piece *give);
uint64_t
spw__whole_most(const spw_layout *l, uint32_t unit_idx, uint32_t grad_bytes); /* of any part; 0: nothing goes */
/* Where a piece's sums of squares are behind its gradients. */
static inline uint64_t
spw__whole_squares_at(const whole_piece *p, uint32_t grad_bytes)
{
    return spw_round_up((p->end - p->first) * grad_bytes, sizeof(double));
}
/*
 * All of these of one chunk, by their places: each call makes *s the next, which is zeroed before the first call; false: that
 * was the last. A model may have tens of thousands of parameters and more chunks: this looks at those that share something.
 */
typedef struct layout_stretch {
    uint32_t id;         /* of the parameter */
    uint32_t next;       /* the iteration's own: 1 + where the one behind it is in param_ids */
    uint64_t first, end; /* elements of the unit */
    uint64_t
        from; /* first - from: which of the parameter's elements that is. Of a later piece it is below 0, modulo 2^64 */
} layout_stretch;
bool spw__layout_next(const spw_layout *l, const spw_store_chunk *c, layout_stretch *s);
/* Of a parameter what lies in that unit, which has some of it. Pure. */
spw_place spw__layout_in_unit(const spw_layout *l, uint32_t id, uint32_t unit_idx);
/* Where in param_ids is the unit's first parameter that ends behind this element; that of the next unit: it has none. Pure. */
uint32_t spw__layout_from(const spw_layout *l, uint32_t unit_idx, uint64_t element);

/* Elements of units that have gradients and records. Pure. */
uint64_t spw__layout_trained(const spw_layout *layout);
spw_tier
spw__layout_record_tier(const spw_layout *layout, uint32_t unit_idx); /* of a trained unit, once there is a plan */
/* Of the units whose gradients wait on nvme; 0: none. */
uint64_t spw__layout_largest_spilled(const spw_layout *layout);
/* Elements that a unit, and all of them, take on the device. Pure. */
uint64_t spw__layout_on_device(const spw_layout *layout, uint32_t unit_idx);
uint64_t spw__layout_all_on_device(const spw_layout *layout);

/* Levenshtein distance of two names; far away if one has more than 64 characters. Pure. */
unsigned spw__name_distance(const char *a, const char *b);

/* Memory that saving or loading a checkpoint takes at most, with what is on the workers' stacks. Pure. */
uint64_t spw__checkpoint_bytes(const spw_model *model, const spw_layout *layout, const spw_optimizer *optimizer,
                               uint32_t workers);

/* How many transfers of files are under way at a time, with so many workers. Pure. */
uint32_t spw__checkpoint_buffers(uint32_t workers);

/* Initial values of elements [at, at + n) of a parameter. Pure. */
void spw__draw_param(float *out, const spw_param *p, uint32_t param_id, uint64_t seed, uint64_t at, uint64_t n);
/*
 * One forward pass over new tokens of sequences whose keys and values the engine keeps (options.cache_slots). A part is computed
 * by itself: a piece of one sequence, or one token each of several, and where it lies in the pass changes no bit of it.
 */
typedef struct engine_part {
    uint64_t sequences, positions; /* positions 1, or one sequence */
    uint64_t row, sequence;        /* where its tokens and places begin; its slots and starts */
} engine_part;
typedef struct engine_extension {
    const engine_part *parts;
    uint32_t part_count, logit_count;
    const int32_t *tokens, *places; /* (rows) of all parts */
    const int32_t *slots, *starts;  /* (cache_slots) */
    const uint64_t *logit_rows;     /* (logit_count) whose logits are wanted, at most cache_slots */
    float *logits;                  /* (logit_count, V) out */
} engine_extension;
/* After an error the cache holds nothing that can be gone on with. */
spw_status spw__engine_extend(spw_engine *engine, const engine_extension *extension, spw_error *err);

/* The weight decay of a parameter, by its group or kind (engine_groups.c). Pure. */
double spw__weight_decay_of(const spw_config *config, const spw_param *param);
/* After spw_engine_set_updates(): steps done, with those that were skipped; they count for what is drawn in a step. */
void spw__engine_set_steps(spw_engine *e, uint64_t steps);
/* Weights are about to change without an update: what was gathered of them is forgotten. */
spw_status spw__engine_forget(spw_engine *e, spw_error *err);
/* fn gives every chunk its value: training begins anew, at whatever step the engine was. */
spw_status spw__engine_fill(spw_engine *e, spw_store_fn fn, void *ctx, spw_error *err);
/*
 * *all (ranks, bytes): what each rank says, once, on a channel of that name; spw_mem_free(), also after an error. Collective, before there is
 * an engine that could tell: a rank without memory for it is told to the others, who would wait for it.
 */
spw_status
spw__ranks_hear(spw_comm *comm, const char *name, const void *mine, void **all, uint64_t bytes, spw_error *err);
/*
 * What all ranks say of something that each did: SPW_OK if all of them do, else the first failure, named by its rank, on every
 * rank. *number becomes rank 0's. Collective, on a channel of its own: one thread at a time. With one rank: st and own.
 */
spw_status spw__engine_agree(spw_engine *e, spw_status st, const spw_error *own, int64_t *number, spw_error *err);
/*
 * *all (ranks, bytes): what each says, SPW_EXCHANGE_MAX bytes at most; spw_mem_free(), also after an error. Collective, on the same
 * channel.
 */
spw_status spw__engine_tell(spw_engine *e, const void *mine, void **all, uint64_t bytes, spw_error *err);
/*
 * Ends what fills a rank's tiers, st being how it went here: disks take ranks differently long, and the next call that they make
 * together has spillway.comm_timeout.
 */
spw_status spw__engine_agree_loaded(spw_engine *e, spw_status st, const spw_error *own, spw_error *err);
/*
 * The same between steps, on the engine's thread, before something that all of them mean to do: own is SPW_OK or why not.
 * what must be the same number on every rank. Errors  SPW_EINVAL on every rank if it is not.
 */
spw_status spw__engine_consent(spw_engine *e, const spw_error *own, uint64_t what, spw_error *err);
/*
 * Between steps, each rank for itself: updates that were to be made a step late (spillway.delayed_update) are let run.
 * Errors  also that of a step that broke off: there is nothing that could be saved.
 */
spw_status spw__engine_settle(spw_engine *e, spw_error *err);
bool spw__engine_writes(const spw_engine *e); /* of those that hold what this rank holds, this one saves it */
uint32_t spw__engine_workers(const spw_engine *e);
uint32_t spw__engine_rank(const spw_engine *e);
uint32_t spw__engine_world(const spw_engine *e);         /* ranks, 1 at least */
uint32_t spw__engine_machine_ranks(const spw_engine *e); /* of them on this machine, 1 at least */
spw_state_format spw__engine_format(const spw_engine *e);
/* May weights come from path (a folder or file as given to create)? SPW_EINVAL when frozen ones stay elsewhere. */
spw_status spw__in_place_check(const spw_engine *e, const char *path, spw_error *err);
const spw_optimizer *spw__engine_optimizer(const spw_engine *e, uint32_t unit_idx);
/* What updates a unit; beside Muon, which takes those that are whole, it is Adam. */
const spw_optimizer *spw__optimizer_for(const spw_optimizer *configured, bool whole);
const spw_config *spw__engine_config(const spw_engine *e);
/* The published codes that a unit is kept in; SPW_QUANT_NONE: it is none. */
static inline spw_quant
spw__layout_published(const spw_layout *l, uint32_t unit_idx)
{
    return spw_codes_group(l->units[unit_idx].form) > 0 ? l->units[unit_idx].form : SPW_QUANT_NONE;
}

/* Bytes of a chunk's weights in its tier; bytes: per element, where they are no codes. */
static inline uint64_t
spw__layout_weight_bytes(const spw_layout *l, const spw_store_chunk *c, uint32_t bytes)
{
    return spw_store_weight_bytes(c->elems, bytes, l->units[c->unit_idx].form);
}
/* The model's file that holds what is frozen, all of the model but adapters (checkpoint_link.c), or the folder that it came from (checkpoint_base.c). */
typedef struct saved_model {
    bool there, base;  /* base: a folder, whose fingerprint is the digest; the last four are not known */
    uint64_t contents; /* of the store, when it was the same */
    char path[SPW_PATH_BYTES + 32], digest[17];
    uint64_t device, inode, bytes, changed_ns;
} saved_model;
saved_model *spw__engine_saved(spw_engine *e);
/* The save under way; it points to NULL: none is. */
const spw_checkpoint_job **spw__engine_saving(spw_engine *e);
/* Plans another configuration with an engine's options, all but its reasons, and makes no engine (nearest.c, faster.c). Errors  as spw_engine_create(). */
spw_status spw__try_plan(const spw_engine_options *options, const spw_config *c, spw_plan *plan);
/* Enough for products of any width to fill a device: tokens by width take 64 MiB in bf16. By the model alone: it decides about rounding. */
static inline uint64_t
spw__tile_tokens(const spw_config *c, const spw_model *model)
{
    const uint64_t asked = c->run.tile_tokens, width = model->config.width;
    return asked > 0 ? asked : width < 1 << 25 ? (1 << 25) / width : 1;
}

/* (unit_count) where the updates released so far take each unit. */
const uint64_t *spw__engine_generations(const spw_engine *e);

#endif
