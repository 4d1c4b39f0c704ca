/* Inside the engine: what its files share. One engine belongs to one thread; the store's workers call spw__update_chunk(). */
#ifndef SPW_ENGINE_INTERNAL_H
#define SPW_ENGINE_INTERNAL_H

#include "answers.h"
#include "runtime_internal.h"
#include "spw_access.h"

/* CHOICE: few rows go through a mixture of experts, whose weights are fetched when they are chosen. */
enum { MODE_TRAIN, MODE_EVAL, MODE_CHOICE, MODE_COUNT };

/* Where a unit's gradient is accumulated on the device while the backward pass needs it. */
typedef struct grad_buffer {
    float *data;
    float *at; /* where the unit's is made: data, or the store's memory, if it stays on the device as it is made */
    uint64_t elems;
    uint32_t unit_idx;   /* UINT32_MAX: free */
    uint32_t owner;      /* it is kept for this unit, which several blocks use; UINT32_MAX: any other unit's */
    uint32_t kind;       /* of those units it is for */
    uint64_t turn, job;  /* between ranks: it is free when the reduce thread has done so many */
    spw_gpu_event *sent; /* its last copy to the store */
    spw_gpu_event *made; /* what is to be copied */
    bool leaves, final;  /* it is to be copied; with all of the step's passes */
} grad_buffer;

typedef struct spw_ranks spw_ranks;
typedef struct spw_wire spw_wire;
typedef struct spw_sequences spw_sequences;

/* Streams of collectives, each of one thread: weights, gradients, what steps decide, checkpoints. */
typedef struct rank_channels {
    spw_channel *gathers, *reduces, *control, *saves;
    spw_channel *group;            /* weights too: of the ranks that keep slices of them together; NULL: none do */
    spw_channel *abroad, *at_home; /* and: of one rank on each host of MiCS' group, of its ranks on this one; or NULL */
    spw_channel *host;             /* gradients too: of this host's ranks; NULL: all ranks sum at once */
    spw_channel *sequences;        /* of those that share them, the engine's thread; NULL: none do */
    spw_channel *across; /* of one rank of each host; of each of MiCS' groups, then gathers and reduces are a group's */
} rank_channels;

/* What one of so many ranks sums up of a part that all of them hold: the last share ends behind the part. */
static inline uint64_t
spw__share_elems(uint64_t part, uint32_t replicas)
{
    return spw_round_up((part + replicas - 1) / replicas, 128);
}

/* What a copy's completion has to say, to whom. */
typedef struct grad_note {
    spw_engine *engine;
    uint32_t unit_idx;
} grad_note;

/*
 * Coefficients for each parameter group of the configuration and, first, for all other parameters; twice each: weight
 * decay is for matrices and embeddings, norms and biases stay as they are unless their group says otherwise.
 */
/* Muon: two matrices take turns on their way to the device and back, and between ranks two units on theirs to all of them. */
typedef struct orthogonal {
    char *memory, *matrix[2], *work;
    spw_gpu_queue *link;
    spw_gpu_event *came[2], *made[2];
    char *shared;                /* twice what goes to and from this rank of a unit; NULL: nothing does */
    uint64_t half_bytes, *most;  /* one of these; of each unit, 0: nothing of it goes */
    whole_piece *in[2];          /* (parts) of what is in each half */
    spw_comm_piece *take, *give; /* (parts) */
    bool pinned;
    spw_gpu_event *read[2]; /* nothing of that half is on its way to the device any more */
} orthogonal;

enum { MATRIX, VECTOR, WHOLE, KINDS, COEF_COUNT = KINDS * (SPW_PARAM_GROUPS_MAX + 1) };

/* What steps have taught about clipping (ahead.c): so many in a row did not, and so many are to be waited for. */
typedef struct ahead_policy {
    uint32_t calm, wait;
} ahead_policy;

/* Frozen weights that stay in their files (in_place.c). */
typedef struct engine_in_place {
    char from[SPW_PATH_BYTES]; /* folder or file; "": none do */
    spw_store_piece *pieces;
    spw_store_file *files; /* their paths are allocated */
    uint32_t piece_count, file_count;
} engine_in_place;

/* What ZeRO++ and MiCS change between these ranks (zeropp.c). With one rank: nothing. */
typedef struct engine_zeropp {
    bool weights, frozen; /* these units are gathered as codes: all of them; those that are not trained */
    uint32_t group; /* so many ranks keep gathered units, a slice each, and gather them again from there; 1: none do */
    bool grads;     /* gradients go from host to host as codes */
    uint32_t host_ranks; /* with grads: so many ranks in a row are on each host */
    /* MiCS. */
    uint32_t shard;   /* so many ranks in a row have all parts among them, and so have the others; 0: all, or each */
    uint32_t by_host; /* so many are on each of a group's hosts, where weights come once; 0: from all to all */
    const char *flat; /* why that is so; NULL: nobody wants it otherwise */
} engine_zeropp;

/* Bytes that a block's calls for a micro-batch bring from ranks that share its sequences. */
typedef struct block_trades {
    uint64_t forward, again, backward; /* again: forward once more, if what it left is not kept */
} block_trades;

struct spw_engine {
    spw_config config;
    engine_in_place in_place;
    const spw_model *model;
    bool inference;
    spw_gpu *gpu;
    spw_gpu_queue *compute, *d2h;
    spw_gpu_event *passed;   /* d2h has brought the gradients of an earlier pass to the host */
    spw_dtype compute_dtype; /* of activations, gathered weights, keys and values */
    uint32_t compute_bytes;
    bool linked; /* by NCCL */
    engine_zeropp zeropp;
    char *wire_memory;       /* device, for wire.c */
    uint32_t device_sharers; /* ranks of this host on this device */
    uint64_t device_asked;   /* of its memory, more than there is; 0: no more */
    uint64_t gather_most;    /* bytes of gathered units, as ranks agreed on them; 0: they did not yet, or none are */
    uint32_t tapes_most;     /* of what lies between checkpoints, where ranks compute attention together */
    bool single_grad, lands; /* they make gradients one at a time; one of them updates on its device */
    bool in_turns;           /* a layer's experts come to the device turn by turn, while the layer is computed */
    bool in_pieces;          /* matrices with a row for each token come piece by piece, while their block is computed */
    uint32_t turn_experts;   /* in which there are so many; without turns all of a layer */
    bool shares_turns;       /* each serves all micro-batches of a pass */
    uint32_t read_kept_from; /* the block from which on what experts read is then kept as the block's input is */
    bool host_addressable;   /* device memory can be read in place, and the thread itself computes */
    bool device_updates;     /* state may be on a device apart from the host, and is updated there */
    bool may_fill;           /* whether it is, though it is offloaded, is a matter of time (engine_choose.c) */
    bool fills_device;       /* it takes device memory that is left */
    double device_share;     /* of what is trained, whose state is there at least */
    const plan_trial *trial; /* while plans are compared */
    bool measured;           /* by rates that were measured here, not by estimates */
    bool displaces;          /* state is where weights could stay gathered */
    bool gather_all;         /* the device was to hold the weights: it holds them gathered, as far as they fit */
    spw_store *store;
    spw_comm *comm;                        /* NULL: one rank */
    spw_ranks *ranks;                      /* NULL: one rank */
    uint32_t rank, world, local_world;     /* local: of the machine */
    uint32_t path_ranks[2][SPW_PATHS_MAX]; /* of this host, that swap to the disk of a path for weights, for records */
    uint64_t path_free[2][SPW_PATHS_MAX];  /* that the disk has left for this rank and path; 0: unknown */
    spw_layout layout;
    spw_plan plan;
    spw_tape *tape;
    uint64_t B, T, rows; /* rows: of a micro-batch's B T positions, this rank's */
    /* Sequences that ranks share (sequences.c): so many do, this one's place among them, and how many positions each has. 1, 0, T: none do. */
    uint32_t sequence_ranks, sequence_rank;
    uint64_t own_T;
    spw_share share;
    uint64_t send_bytes;  /* of share.send */
    block_trades *trades; /* (blocks) of a micro-batch; NULL: none are shared */
    int32_t *own_ids;     /* (2, rows) this rank's tokens and targets of a micro-batch; NULL: likewise */
    uint64_t cache_slots, cache_positions; /* generation: B is the slots, T the longest piece of a prompt; else 0 */
    uint32_t micro_max, group_max, chain_max;
    uint64_t target_count; /* of this step, on all ranks: positions with a target */
    /* Device memory. */
    void *device;
    char
        *between; /* gradients, gathered units; on the cpu device other ranks read them, else they are part of device */
    char *arena;
    uint64_t arena_bytes;
    char *tapes; /* (plan.tape_count) of tape_bytes: what the last checkpoints' blocks computed (spw_tape_reset_kept) */
    uint64_t tape_bytes;
    double again_flops;   /* of a micro-batch's linear layers, computed again before their backward pass */
    uint32_t *users;      /* (unit_count) how many blocks use each; while plans are made */
    bool *passes;         /* (parameters) backward makes the gradient of what it is multiplied by; likewise */
    unsigned *back;       /* (blocks) what backward goes through, SPW_PASSED_; likewise */
    uint64_t block_elems; /* of all units that one block uses, at most */
    float *cos_sin, *losses;
    int32_t *tokens, *targets, *places, *slots, *starts;
    /*
     * Where documents are separate (micro_max, rows) places, and of all positions (2, micro_max, B T) begins and ends; where a sequence has chunks (2, micro_max
     * or 1, B T) theirs; else NULL.
     */
    int32_t *documents, *chunks;
    const volatile int *stop; /* looked at while state is made or loaded; NULL: it is not to stop */
    bool hides_targets;       /* many rows may have none */
    double targeted_share;    /* of rows that heads compute, on average */
    int32_t *targeted; /* (micro_max, rows) of each micro-batch, the rows with a target; NULL: mostly all have one */
    int32_t *targeted_host;    /* (rows) */
    uint32_t *targeted_counts; /* (micro_max) */
    bool prefers;              /* pairs are trained on, by this rule */
    spw_preference preference;
    spw_pair *pairs;          /* (micro_max, spw__pairs_max()) */
    spw_pair *pairs_host;     /* the same */
    uint32_t *pair_counts;    /* (micro_max) */
    const double *reference;  /* spw_engine_set_reference(); NULL: none */
    spw_pair_means preferred; /* of the last step or evaluation */
    char *sides;              /* what blocks leave for later ones (find_sides) */
    bool chooses;             /* indexers choose what attention reads: sequences are longer than that */
    char *choices;            /* what layers leave to the next one of it (find_choice) */
    char *cache;              /* of the layers, one after another, what spw__cache_of_layer() says */
    /*
     * x[c], the input of the block at c, of every micro-batch: kept for the backward pass from the lowest block that is
     * trained (but not the first, which has none) to the last but one.
     * The flow holds the others, and in the backward pass the gradients: rows take turns, so that what is made never
     * lies on what it is made from. A kept x[c] that has no home on the device leaves from the flow.
     */
    char *flow; /* (2, group_max, rows, width); behind it what is held between the parts of blocks that share turns */
    spw_apart *apart; /* (group_max) where that is */
    bool defers;      /* passes go back to the second block, and the last one through the first for all */
    char *deferred;   /* (accumulation, rows, width): what they leave for it, the gradients of its outputs */
    spw_act *act;     /* NULL: inference */
    spw_act_place *activation_places; /* (kept_slots, group_max) */
    uint32_t kept_slots, *flow_lent;  /* (2, group_max) the checkpoint that may still be leaving from there */
    grad_buffer *buffers;
    uint32_t buffer_count;
    bool grads_stay; /* all gradients are made in the store's memory: buffers have none */
    bool may_hold;   /* passes may hold gradients in buffers, one for each unit, which they leave in the last pass */
    bool holds;      /* and they do */
    uint64_t buffer_turn;
    grad_note *notes; /* (unit_count) */
    /* Host. */
    double *partials; /* sums of squares, one per 4096 elements of what is trained; once d2h has passed them */
    spw_region partial_memory;
    bool partials_pinned; /* the device leaves them there itself */
    int32_t *window;    /* (4, B T) a micro-batch's ids, places, begins and ends on their way to the device; or NULL */
    float *losses_host; /* (micro_max, rows) where device memory cannot be read in place, else NULL */
    uint64_t *unit_partial; /* where a unit's partials start */
    uint32_t *chain, chain_count;
    uint32_t lowest;               /* position in the chain below which nothing is trained: backward ends there */
    int32_t *first_use, *last_use; /* of a unit, positions in the chain; -1: unused */
    bool *takes_part;              /* of a unit: it is trained and in the chain, so a step makes its gradient */
    bool *grad_begun;              /* of a parameter: something of this pass is in its gradient */
    uint64_t *generations;
    spw_trace traces[MODE_COUNT];
    spw_trace_told
        told; /* of the trace of told_mode, what the store knows; goes_on is cleared where generations change */
    int told_mode;
    spw_store_use *future; /* (future_max); between ranks as many more for the store */
    uint32_t future_max;
    uint64_t updates, step_count;
    uint64_t fills; /* how often all parameters were loaded or drawn */
    ahead_policy ahead;
    struct {
        bool pending;     /* the last step left its update to the next one, and gradients lie in the store */
        bool runs;        /* and now it is made */
        double lr, scale; /* of those gradients */
        bool *units;      /* (unit_count) that have one */
    } late;
    bool goes_ahead; /* in the step under way updates may begin before its norm is known */
    bool may_spend;  /* on some rank they may have consumed gradients for which passes are made again */
    pthread_mutex_t squares_lock;
    exact_sum squares; /* under squares_lock: of the gradients of this step that are there, on this rank */
    spw_loss_scaler scaler;
    const spw_optimizer *optimizer; /* as configured; spw__engine_optimizer() */
    orthogonal orthogonal;
    spw_opt_coef coefs[COEF_COUNT];
    spw_opt_range *ranges; /* (range_first[chunk_count]) which group's coefficients a chunk's elements take */
    uint32_t *range_first; /* (chunk_count + 1) */
    spw_gpu_update_range *device_ranges; /* of one chunk: the store's mover fills it for each update that it starts */
    uint64_t d2h_bytes, h2d_bytes;       /* besides the store's and those of checkpoints */
    /* Access to the state (access.c). */
    spw_gradients_fn on_gradients;
    void *gradients_ctx;
    spw_error broken;          /* why a step broke off half-way; its status SPW_OK: none did */
    bool in_step, grads_there; /* gradients lie in the store, all of them, and nobody consumes them */
    double grad_factor;        /* what they are to be multiplied by */
    bool part_changed;         /* what other ranks have gathered of this rank's parts is not what is there */
    /* Of the step under way. */
    uint64_t compute_ns, stall_ns[SPW_STALL_COUNT];
    uint64_t device_ns; /* atomic: what a device that works by itself has computed, by its own clock */
    spw_rates rates;
    spw_store_stats counted; /* up to here the steps' bytes have been told; what moves between two steps counts too */
    spw_received gathered, reduced, traded; /* up to here, too */
    double expert_peak;                     /* of this step so far */
    bool counting;                          /* false: something else than steps has moved bytes since */
    saved_model saved;
    const spw_checkpoint_job *saving; /* NULL: none is under way */
};

/* Of the thread's own computing: when it began, and what it had waited before. */
typedef struct compute_span {
    const char *name;
    uint64_t begin_ns, waited_ns;
} compute_span;

/* One use of a block: its units, and where their weights and gradients are. */
typedef struct block_run {
    uint32_t block_idx, at;        /* at: position in the chain */
    uint64_t side_row;             /* in the group's rows, of what blocks leave for later ones */
    bool later_group, final_group; /* backward: micro-batches have come before this pass, none come after it */
    bool later_micro, final_micro; /* and in the pass before and after the one that the block computes now */
    compute_span timed;
    spw_batch batch; /* which the block computes now: the tape looks at it until backward is over */
    spw_engine *e;
    spw_value *params[SPW_BLOCK_PARAMS_MAX];
    const void *weights[SPW_BLOCK_PARAMS_MAX]; /* by unit, parallel to units */
    float *grads[SPW_BLOCK_PARAMS_MAX];
    uint32_t units[SPW_BLOCK_PARAMS_MAX], unit_count;
    uint32_t held;        /* units that stay while those of experts come and go */
    bool gradients_alone; /* no weights are needed, so none are acquired */
    int mode;
} block_run;

/* ---------------------------------------------------------------- engine_device.c: what it computes on */

/* The device, which can do what is asked: device auto takes the cpu device where another one cannot, and says why. */
spw_status spw__open_device(spw_engine *e, spw_gpu_options *options, spw_error *err);
/* No more of it is counted on than there is, whatever spillway.device_memory says. tell: so that somebody sees it who makes no plan. */
void spw__bound_device(spw_engine *e, bool tell);
/* Ranks of one host that use this rank's GPU, of as many GPUs as it sees: each may see others. */
uint32_t spw__guess_sharers(const spw_engine *e);
/* Whether ranks' devices are of one kind, and how many ranks are on this one's: device_sharers. Collective. */
spw_status spw__devices_compare(spw_engine *e, spw_error *err);

/* ---------------------------------------------------------------- engine_plan.c: before anything is taken */

/* Counts everything the run needs and plans; with the plan in e, and in o->plan_out if there is one. */
spw_status spw__engine_make_plan(spw_engine *e, const spw_engine_options *o, spw_error *err);
/* For engine.group_max micro-batches in a pass, and the other choices that e has made; o knows what is free. */
spw_status spw__make_one_plan(spw_engine *e, const spw_engine_options *o, spw_error *err);
uint32_t spw__engine_cpus(const spw_engine *e); /* this rank's share */
spw_aio_options spw__engine_aio(const spw_config *c);
/*
 * What a layer keeps of running sequences: arrays one behind the other, at a byte of engine.cache. Keys and values (cache_slots,
 * cache_positions, cache_width), and of its indexer's keys (cache_slots, cache_positions, index_dim); or, of linear attention, states (cache_slots, Hv, Dk, Dv) fp32 and the last inputs of its convolution
 * (cache_slots, K - 1, C); these behind the others where it is beside attention. Of keys that are values too (cache_slots, F + cache_positions, cache_width), with F that stand for several rows in front; what
 * those are made of, twice (cache_slots, rows, elements); and of its indexer (cache_slots, F, index_dim) and what these are made of likewise.
 */
typedef struct layer_cache {
    uint64_t at, bytes[3];
    uint64_t beside[2]; /* state and rows of linear attention beside attention */
} layer_cache;
layer_cache spw__cache_of_layer(const spw_engine *e, uint64_t layer_idx);
spw_front_cache
spw__front_cache(const spw_engine *e,
                 uint64_t layer_idx); /* of such a layer; places that nobody looks at before memory is taken */
uint64_t spw__cache_bytes(const spw_engine *e);                     /* of all layers */
uint64_t spw__cache_width(const spw_engine *e, uint64_t layer_idx); /* elements of a row of keys */
uint64_t spw__table_positions(const spw_engine *e);                 /* of the rotary table */
uint64_t spw__rope_elems(const spw_engine *e);
uint64_t spw__partial_bytes(const spw_engine *e);
uint64_t spw__losses_bytes(const spw_engine *e);    /* of all micro-batches of a step */
uint64_t spw__deferred_bytes(const spw_engine *e);  /* of engine.deferred */
uint64_t spw__sides_bytes(const spw_engine *e);     /* of engine.sides, and of their gradients */
uint64_t spw__choice_words(const spw_engine *e);    /* of a row's bits, one for each position; 0: nothing is chosen */
uint64_t spw__choices_bytes(const spw_engine *e);   /* of engine.choices */
uint64_t spw__documents_bytes(const spw_engine *e); /* of engine.window; 0: documents are not separate */
uint64_t spw__chunks_bytes(const spw_engine *e);    /* of engine.chunks; 0: a sequence has no more than one */
/* begins, then ends, of a micro-batch's rows; NULL, NULL: none. And those of sequences that are a document each, made on the queue. */
typedef struct chunk_rows {
    int32_t *begins, *ends;
} chunk_rows;
chunk_rows spw__chunks_of(const spw_engine *e, uint32_t micro);
void spw__cut_sequences(spw_engine *e);
uint64_t spw__pairs_max(const spw_engine *e);   /* in a micro-batch; 0: there are none */
uint64_t spw__pairs_bytes(const spw_engine *e); /* of engine.pairs */

/* ---------------------------------------------------------------- engine_choose.c: what of a plan is a matter of time */

/* What is known before the plan. And the plan, of those that engine.may_hold and may_fill allow the one that is soonest done; *e has made its choices. */
void spw__settle_choices(spw_engine *e, const spw_engine_options *o);
spw_status spw__choose_plan(spw_engine *e, const spw_engine_options *o, spw_error *err);

/* ---------------------------------------------------------------- ahead.c: updates before the norm is known */

/* Is it worth trying in the next step? And what a step taught: did it try, and was its gradient finite and not clipped? Pure. */
bool spw__ahead_worth(const ahead_policy *p);
void spw__ahead_learn(ahead_policy *p, bool tried, bool stood);
bool spw__ahead_try(const spw_engine *e);
/* What is there of the step's gradients has these squares: may updates ahead go on? Any thread. */
void spw__ahead_see(spw_engine *e, double squares);
/* A step whose gradient has this norm, as far as it is there: finite, and not clipped. */
bool spw__norm_stands(const spw_engine *e, double norm);
/* After undo, alike on all ranks: a gradient is gone that the step needs once more (spw_store_step_spent). */
spw_status spw__ahead_spent(spw_engine *e, bool *spent, spw_error *err);

/* ---------------------------------------------------------------- in_place.c: frozen weights that stay in their files */

/* Finds the pieces of path's weights, a folder or a file, and tells the layout's chunks. Before the plan. */
spw_status spw__in_place_find(spw_engine *e, const char *path, spw_error *err);
void spw__in_place_free(spw_engine *e);
/* Whether frozen weights would stay in the files that a run begins with. */
bool spw__in_place_wanted(const spw_engine *e);

/* ---------------------------------------------------------------- orthogonal.c: Muon */

uint64_t spw__orthogonal_bytes(const spw_engine *e);            /* of orthogonal.memory; 0: nothing is made so */
double spw__orthogonal_flops(const spw_engine *e);              /* of a step */
uint64_t spw__orthogonal_host_bytes(const spw_engine *e);       /* of orthogonal.shared */
spw_status spw__orthogonal_open(spw_engine *e, spw_error *err); /* it has its memory */
void spw__orthogonal_close(spw_engine *e);                      /* before the store */
void spw__orthogonal_help(spw_engine *e);                       /* makes what has come to it; waits for nothing */
/* Where ranks have parts of units, collective: all of a step's. All ranks take units in the same order. */
spw_status spw__orthogonal_all(spw_engine *e, bool early, spw_error *err);
/* The store's spw_store_prepare_fn and spw_store_whole_fn; ctx is the engine. */
spw_status spw__take_momentum(void *ctx, uint32_t chunk_idx, void *record, void *grad, uint64_t first, uint64_t count,
                              spw_error *err);
void spw__make_orthogonal(void *ctx, uint32_t unit_idx, void *grad);
/* Where the sums of squares go of what the first half leaves of the chunk from its element `first` on. */
double *spw__chunk_squares(const spw_engine *e, uint32_t chunk_idx, uint64_t first);

/* ---------------------------------------------------------------- engine_groups.c: who takes which coefficients */

spw_status spw__check_groups(const spw_engine *e, spw_error *err);
spw_status spw__make_ranges(spw_engine *e, spw_error *err);
/* For the next update; gradients are multiplied by grad_scale first. */
spw_status spw__set_coefficients(spw_engine *e, double lr, double grad_scale, spw_error *err);
/* Whether that will do, before a step changes anything. */
spw_status spw__check_rate(const spw_engine *e, double lr, spw_error *err);
/* The store's two spw_store_update_fn; ctx is the engine. */
spw_status spw__update_chunk(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first,
                             uint64_t count, spw_error *err);
spw_status spw__undo_chunk(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first,
                           uint64_t count, spw_error *err);
/* The store's functions of the device, and its spw_store_bad_fn. */
void spw__update_on_device(void *ctx, uint32_t chunk_idx, spw_gpu_queue *queue, void *weights, void *record, void *grad,
                           uint64_t *bad);
void spw__take_momentum_on_device(void *ctx, uint32_t chunk_idx, spw_gpu_queue *queue, void *weights, void *record,
                                  void *grad, uint64_t *bad);
/* The chunk as cpu_adam takes it. */
spw_opt_chunk spw__opt_chunk(const spw_engine *e, uint32_t chunk_idx, const spw_store_state *state, const void *grad,
                             uint64_t first, uint64_t count);
spw_status spw__raise_nonfinite(void *ctx, uint32_t chunk_idx, uint64_t bad, spw_error *err);

/* ---------------------------------------------------------------- engine_turns.c: in how many turns experts come */

/*
 * Into how many turns a layer's experts are cut (1: they come with what else the layer has), how many micro-batches each serves at most, and
 * from which block on what they read is kept for the backward pass; READ_NOT_KEPT: of none.
 */
typedef struct expert_way {
    uint32_t turns, micros, read_kept_from;
} expert_way;
enum { READ_NOT_KEPT = INT32_MAX };
/* engine.c */
spw_status spw__engine_build(spw_engine **out, const spw_engine_options *o, expert_way way, spw_error *err);
spw_status spw__engine_in_turns(spw_engine **out, const spw_engine_options *o, spw_error *err);
/*
 * engine_choose.c: seconds of a step by its plan, by the rates that choices go by (INFINITY: not known); uncomputed: those that it takes at
 * least, however little is computed.
 */
double spw__engine_seconds(spw_engine *e, const spw_engine_options *o, double *uncomputed);

/* ---------------------------------------------------------------- engine_units.c: which units blocks use */

uint32_t spw__block_units(const spw_engine *e, uint32_t block_idx, uint32_t *out);
/* Does the unit come while its block is computed, and go when its turn is over? */
bool spw__in_turns(const spw_engine *e, uint32_t unit_idx);
/* Has the block experts whose turns serve all micro-batches of a pass? */
bool spw__shares_turns(const spw_engine *e, uint32_t block_idx);
/* And is what these read kept for the backward pass? */
bool spw__keeps_read(const spw_engine *e, uint32_t block_idx);
/*
 * Gradients that are made at the same time have buffers of different kinds: what comes at once, what comes in turns, and beside either's
 * matrices that are taken whole the rest of what is trained.
 */
enum { GRAD_AT_ONCE, GRAD_BESIDE, GRAD_OF_TURN, GRAD_BESIDE_OF_TURN, GRAD_KINDS };
uint32_t spw__grad_kind(const spw_engine *e, uint32_t unit_idx);
/* Of the gradient of a piece, which leaves with each of its turns: how often it does in a step. */
uint64_t spw__piece_leaves(const spw_engine *e, uint32_t unit_idx);
/* Of these, a block_units() list, the first that comes in a turn, behind those that come at once: count if none does. */
uint32_t spw__block_turns(const spw_engine *e, const uint32_t *units, uint32_t count);
/* How many of these, units that come in turns, in order, come in the turn of the first, or of the last. */
uint32_t spw__turn_units(const spw_engine *e, const uint32_t *units, uint32_t count, bool last);
uint64_t spw__block_elems(const spw_engine *e, uint32_t block_idx);
bool spw__made_there(const spw_engine *e); /* plan_input.made_there */
/* Of a unit's gradient on the device: a part for each rank, or what replicas share out. */
uint64_t spw__grad_elems(const spw_engine *e, uint32_t unit_idx);
void spw__note_uses(spw_engine *e); /* after a change of the chain */
/* Position in a chain of the first block with something to train; the last one's if there is none. */
uint32_t spw__lowest_trained(const spw_engine *e, const uint32_t *chain, uint32_t count);
/* Of how many blocks the inputs are kept for the backward pass of such a chain. */
uint32_t spw__kept_blocks(uint32_t lowest, uint32_t count);
/* Checkpoints of a micro-batch: of those blocks' inputs and, behind each, of what its experts read if that is kept. */
uint32_t spw__kept_slots(const spw_engine *e, const uint32_t *chain, uint32_t lowest, uint32_t count);

/* ---------------------------------------------------------------- engine_block.c: one use of a block */

void spw__tell_future(spw_engine *e, int mode);
spw_status spw__acquire_block(spw_engine *e, int mode, block_run *run, spw_error *err);
/* Binds the parameters and calls forward on the tape, which was reset. Dry when run->weights are not set. */
spw_value *
spw__call_forward(spw_engine *e, block_run *run, const spw_batch *batch, spw_value *x, bool training, bool logits);
void spw__release_block(spw_engine *e, const block_run *run);
/* Before and after a turn of experts [first, end) that serves all micro-batches of a pass: their units come, and go. */
spw_status spw__take_turn(block_run *run, uint64_t first, uint64_t end, spw_turn turn, spw_error *err);
/* What is between the two counts as the run's computing, without waits that are counted. */
compute_span spw__begin_compute(spw_engine *e, const char *name);
void spw__end_compute(spw_engine *e, const block_run *run);

/* ---------------------------------------------------------------- engine_grads.c: gradients' buffers, and their way out */

/* Of the run's units from the first on. A buffer will be free for each gradient that is made here first. */
/*
 * late.c. step: does the next one leave its update to the one after it? keep: at its end, with what its update goes by. begin: with the
 * next backward pass. may: the unit's weights are not needed as they are any more. end: of that pass; what is left of updates runs on.
 */
bool spw__late_step(const spw_engine *e);
void spw__late_keep(spw_engine *e, double lr, double scale);
spw_status spw__late_begin(spw_engine *e, spw_error *err);
void spw__late_may(spw_engine *e, uint32_t unit_idx);
void spw__late_end(spw_engine *e);
spw_status spw__free_grad_buffers(spw_engine *e, const block_run *run, uint32_t first, spw_error *err);
/* They have their buffers, in run->grads. */
spw_status spw__open_grads(spw_engine *e, block_run *run, uint32_t first, spw_error *err);
/* Those that are made here last leave. */
spw_status spw__send_grads(spw_engine *e, const block_run *run, uint32_t first, spw_error *err);
/* A pass is over: all that still wait for their copies to the store leave. */
spw_status spw__ship_grads(spw_engine *e, bool final_group, spw_error *err);
/* A unit's gradient is there, with its sums of squares; before the store is told. Any thread. */
void spw__squares_see(spw_engine *e, uint32_t unit_idx);
/* All gradients are in the store, on account of d2h or of the collectives. */
spw_status spw__wait_grads(spw_engine *e, spw_error *err);

/* ---------------------------------------------------------------- engine_walk.c: the chain, block by block */

char *spw__flow(const spw_engine *e, uint32_t turn, uint32_t micro);
/* Whether the backward pass finds what the block at c of the chain computes for a micro-batch, once there is a plan. */
bool spw__tape_is_kept(const spw_engine *e, uint32_t c, uint32_t micro);
/* Of device memory: the flow and what is held. */
uint64_t spw__flow_bytes(const spw_engine *e);
/* keep: blocks' inputs are kept for the backward pass. */
spw_status spw__forward_group(spw_engine *e, int mode, uint32_t first, uint32_t count, bool keep, spw_error *err);
spw_status
spw__backward_group(spw_engine *e, uint32_t first, uint32_t count, bool later_group, bool final_group, spw_error *err);

/* ---------------------------------------------------------------- engine_step.c */

/* Errors  that of the step that broke off: what it left is neither the state before it nor that after it. */
spw_status spw__engine_unbroken(const spw_engine *e, spw_error *err);

/* ---------------------------------------------------------------- disks.c: who else swaps there */

spw_status
spw__disks_share(spw_engine *e, bool plan_only, spw_error *err); /* to path_ranks; collective unless plan_only */

/* Ranks that hold the same part: one of each of MiCS' groups; all, where nothing is cut. */
static inline uint32_t
spw__replicas(const spw_engine *e)
{
    return e->world / e->layout.parts;
}

/* ---------------------------------------------------------------- zeropp.c: which of ZeRO++'s savings are on, and MiCS */

/* Into how many parts the stage cuts what there is. Errors  SPW_ECONFIG: zero_optimization.mics_shard_size cannot. */
spw_status spw__zeropp_parts(const spw_engine *e, uint32_t *out, spw_error *err);
/* The host that a rank is on, or is planned to be on. */
uint32_t spw__host_of(const spw_engine *e, uint32_t rank);
/*
 * From the configuration, once the layout is there; before spw__wire_choose.
 * Errors  SPW_ECONFIG with the key, on every rank: these ranks cannot.
 */
spw_status spw__zeropp_settle(spw_engine *e, spw_error *err);
/* Once the wire is chosen: which keys have no effect; says so, and why, unless plan_only. */
void spw__zeropp_tell(spw_engine *e, bool plan_only);
uint64_t spw__zeropp_kept_bytes(const spw_engine *e, uint32_t unit_idx); /* this rank's slice of it */
bool spw__zeropp_coded(const spw_engine *e, uint32_t unit_idx);          /* it is gathered as codes */

/* ---------------------------------------------------------------- received.c */

/* Into the plan, which fits and has a step to count: what this rank receives from others in it. Errors  SPW_ENOMEM. */
spw_status spw__count_received(spw_engine *e, const plan_input *in, spw_error *err);

/* ---------------------------------------------------------------- wire.c: bytes of a unit from rank to rank */

/* Says whether devices are linked (e->linked); collective unless plan_only. Errors  SPW_EUNSUPPORTED: they cannot, and must be. */
spw_status spw__wire_choose(spw_engine *e, bool plan_only, spw_error *err);
uint64_t spw__wire_host_bytes(const spw_engine *e); /* that it will take, from the layout, besides what is kept */
uint64_t spw__wire_kept_bytes(const spw_engine *e); /* host memory too */
uint64_t spw__wire_device_bytes(const spw_engine *e);
/* Collective. The channels outlive it. memory: spw__wire_device_bytes() of the device. */
spw_status
spw__wire_open(spw_wire **out, const spw_engine *e, const rank_channels *channels, char *memory, spw_error *err);
void spw__wire_close(spw_wire *x, bool together); /* together: nothing has failed anywhere. NULL is fine */
/*
 * Weights, on one thread. put_part brings this rank's part to its place in whole, after what `after` marks (NULL: nothing); what
 * reads it is on the queue `reader` (NULL: it has been read). gather makes the unit whole and returns when it is there. again: from
 * what the group has kept of it, which needs no part, only the wait: put_part with NULL.
 */
void spw__wire_put_part(spw_wire *x, const spw_gpu_event *after, char *whole, const void *part, uint64_t elems);
spw_gpu_queue *spw__wire_reader(const spw_wire *x);
spw_status spw__wire_gather(spw_wire *x, uint32_t unit, char *whole, bool again, spw_error *err);
/*
 * Gradients, on another thread: data (world, part_elems) on the device, made by what `after` marks, is used up. scatter gives
 * each rank the sum of its part, sum gives all of them all of it. The sink is the store's gradient, wherever that is; it is
 * there on return. sink_elems: the last rank's part ends in padding that the sink does not have.
 */
void spw__wire_follow(spw_wire *x, const spw_gpu_event *after);
spw_status spw__wire_scatter(spw_wire *x, uint32_t unit, float *data, uint64_t part_elems, const spw_reduce_sink *sink,
                             spw_error *err);
spw_status spw__wire_sum(spw_wire *x, uint32_t unit, float *data, uint64_t part_elems, const spw_reduce_sink *sink,
                         uint64_t sink_elems, spw_error *err);
/*
 * Over a link gather, scatter and sum return when all is in the order of its stream. ready, before them: what they will follow has come to its
 * end, so that nothing stands behind it. wait, after them: all is done, as it is on return on other wires.
 */
spw_status spw__wire_ready(spw_wire *x, bool gather, spw_error *err);
spw_status spw__wire_wait(spw_wire *x, bool gather, spw_error *err);
/* Adds what gathering a unit, or reducing its gradient, moves between host and device. add: to what earlier passes summed up. */
void spw__wire_count_weights(const spw_wire *x, uint32_t unit, bool again, uint64_t *d2h, uint64_t *h2d);
void spw__wire_count_grad(const spw_wire *x, uint32_t unit, bool add, uint64_t *d2h, uint64_t *h2d);

/* ---------------------------------------------------------------- rank_channels.c: who talks to whom */

enum {
    SPW__FILES_S = 24 * 3600
}; /* disks and memory take ranks differently long, and one may have work for all of them */

/* How many; opened, collective, in out (zeroed); closed, also half of them. timeout_s 0: the world's. sharers: of a sequence, in a row. */
uint32_t spw__ranks_channels(const engine_zeropp *z, uint32_t sharers);
spw_status spw__ranks_open_channels(rank_channels *out, spw_comm *comm, const engine_zeropp *z, uint32_t sharers,
                                    double timeout_s, spw_error *err);
void spw__ranks_close_channels(rank_channels *channels);
/* Received so far. */
void spw__ranks_bytes(const spw_ranks *r, spw_received *gathered, spw_received *reduced, spw_received *traded);

/* ---------------------------------------------------------------- sequences.c: those that ranks share */

/*
 * From the configuration, where rows and positions of this rank follow; before anything is counted.
 * Errors  SPW_ECONFIG: a model, a length or something else that cannot be shared, with the key.
 */
spw_status spw__sequences_settle(spw_engine *e, spw_error *err);
/* Which of so many groups of ranks has other sequences than the others. */
static inline uint32_t
spw__sequence_groups(const spw_engine *e)
{
    return e->world / e->sequence_ranks;
}
uint64_t spw__sequences_device_bytes(const spw_engine *e); /* among gradients; once blocks were measured */
uint64_t spw__sequences_host_bytes(const spw_engine *e);   /* on the way between devices */
/* This rank's rows of a micro-batch, in memory of the engine's until the next call with this k, 0 or 1. */
const int32_t *spw__own_rows(spw_engine *e, const int32_t *whole, int k);
/* What this rank receives in a step, into the plan. */
void spw__sequences_count(spw_engine *e);
/* Collective; the tape trades from then on. *out NULL: none are shared. close: together as for wires. */
spw_status spw__sequences_open(spw_sequences **out, spw_engine *e, const rank_channels *channels, spw_error *err);
void spw__sequences_close(spw_sequences *s, bool together);

/* ---------------------------------------------------------------- engine_ranks.c: gathering and reducing */

/* Collective. pool_memory: for gathered units, plan.cache_device bytes of the device; not used with whole units. */
spw_status spw__ranks_create(spw_ranks **out, spw_engine *e, spw_comm *comm, char *pool_memory, spw_error *err);
const rank_channels *spw__ranks_get_channels(const spw_ranks *r);
void spw__ranks_destroy(spw_ranks *r); /* before the store; NULL is fine */
uint64_t spw__ranks_table_bytes(const spw_engine *e);
/* Waits until all of the units are gathered, and keeps them there. Each unit acquired needs one release. */
spw_status
spw__ranks_acquire(spw_ranks *r, const spw_store_use *uses, uint32_t count, const void **weights, spw_error *err);
void spw__ranks_release(spw_ranks *r, uint32_t unit_idx);
/* The uses to come: the first `ahead` are asked for as far as there is room, and the store is told. */
void spw__ranks_tell(spw_ranks *r, const spw_store_use *future, uint32_t count, uint32_t ahead);
/* Hands a unit's gradient to the reduce thread; the buffer is free after spw__ranks_wait_free. */
void spw__ranks_send(spw_ranks *r, uint32_t unit_idx, grad_buffer *b, bool add, bool last);
spw_status spw__ranks_wait_free(spw_ranks *r, const grad_buffer *b, spw_error *err);
spw_status spw__ranks_wait_reduced(spw_ranks *r, spw_error *err);
/* values[i] = sum over ranks, in their order. */
spw_status spw__ranks_sum(spw_ranks *r, double *values, uint32_t count, spw_error *err);
/* Collective, before a pass; count (may be NULL) becomes its sum. What ranks have changed by themselves is seen from here on. */
spw_status spw__ranks_begin(spw_ranks *r, double *count, spw_error *err);
spw_status spw__ranks_broadcast(spw_ranks *r, void *buf, uint64_t bytes, uint32_t root, spw_error *err);
/* Weights have changed without an update: nothing that was gathered is good any more. */
spw_status spw__ranks_forget(spw_ranks *r, spw_error *err);
/*
 * The engine's own turn with the link, if there is one: what was asked for before has been given to it on return; what is asked for afterwards waits
 * for end_turn.
 */
spw_status spw__ranks_take_turn(spw_ranks *r, spw_error *err);
void spw__ranks_end_turn(spw_ranks *r);
/* This rank cannot go on: the others are told. Returns st. r and err may be NULL. */
spw_status spw__ranks_fail(spw_ranks *r, spw_status st, const spw_error *err);

#endif
