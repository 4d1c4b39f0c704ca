/*
 * Inside the tape: a list of operations with their inputs, over an arena that is handed front to back, and what its files share. Each
 * operation's file has its forward, which writes it down, and its backward, which tape.c calls.
 */
#ifndef SPW_TAPE_INTERNAL_H
#define SPW_TAPE_INTERNAL_H

#include "spw_nn.h"

typedef enum spw__op_kind {
    T_LINEAR,
    T_EMBEDDING,
    T_LAYERNORM,
    T_RMSNORM,
    T_ROPE,
    T_PARTS,
    T_BESIDE,
    T_LEAVE,
    T_BRING,
    T_KEYS,
    T_ATTENTION,
    T_SHARE_OUT,
    T_SHARE_HOME,
    T_FRONT_ATTENTION,
    T_COMPRESS,
    T_REPEAT,
    T_STREAM_MAPS,
    T_MIX,
    T_LINEAR_GROUPS,
    T_CONV,
    T_DELTA,
    T_CURVE,
    T_GATE_MUL,
    T_ROUTE,
    T_BY_EXPERT,
    T_DISPATCH,
    T_LINEAR_EACH,
    T_COMBINE,
    T_ADD_GATED,
    T_ADD,
    T_SCALE,
    T_ADD_SCALED_BY,
    T_DROPOUT,
    T_ROWS,
    T_HEAD
} spw__op_kind;

/* A part of a block that is computed for some rows at a time: what is needed to do it again. */
typedef struct spw__rows {
    spw_rows_fn fn;
    spw_call call;
    uint32_t at, end; /* its parameters */
    uint32_t in_count, out_count;
    spw_value *in[SPW_ROWS_VALUES], *out[SPW_ROWS_VALUES];
    char *kept;          /* where the tiles' memory lies one after another; NULL: it was not kept */
    uint64_t kept_bytes; /* there, at most */
    bool dropped;        /* nobody needs what it gives */
} spw__rows;

/* Columns of a value that are heads: of a row from col on, the next one `head` elements further, D elements each. */
typedef struct spw__heads {
    spw_value *x;
    uint64_t col, heads, head, D;
} spw__heads;

typedef struct spw__op {
    spw__op_kind kind;
    spw_value *out, *in[3];
    spw_value *param[3], *bias[3]; /* bias: of a convolution's parts */
    uint64_t parts[SPW_PARTS_MAX]; /* of each head, that are taken */
    uint32_t part_count;
    unsigned flags;
    spw_gate gate;
    spw_curve curve;
    const int32_t *ids;
    float *saved[2]; /* mean and rstd, or log-sum-exp */
    const float *cos_sin;
    const int32_t *places;
    uint64_t T, heads, D, R, col[3];
    bool neighbors, back; /* rope: by the same angles back */
    spw_attention_shape shape;
    spw__heads shared[3];
    spw_compress_shape compress;
    spw_streams streams;
    spw_side side;
    spw_conv_shape conv;
    spw_delta_shape delta;
    spw_value **each, **each_bias; /* by expert */
    spw_value *stack;              /* or in one, and which rows of each */
    uint64_t stack_first, stack_rows;
    act *dx[2];      /* of what is done in turns: where its inputs' gradients go */
    const act *onto; /* dispatch in pieces: what there is of its input's gradient already */
    bool later;      /* combine: what it combines is computed in the backward pass */
    float p;
    uint64_t key, counter, first;
    spw__rows *rows;
} spw__op;

enum {
    SPW__OPS_MAX = 256,
    SPW__VALUES_MAX = 2 * SPW_BLOCK_PARAMS_MAX,
    SPW__ROUTINGS_MAX = 8,
    SPW__ROWS_MAX = 8,
};

struct spw_tape {
    spw_gpu_queue *queue;
    spw_dtype act_dtype;
    uint32_t act_bytes, loss_rows;
    char *arena;
    uint64_t arena_bytes, used, peak;
    char *after; /* the arena of backward, when forward was kept in another one */
    uint64_t after_bytes;
    bool record, dry, keeping, kept, by_row, cache_taken;
    spw_status status;
    const spw_attention_cache *cache;   /* of the running sequences; NULL: none */
    const spw_delta_cache *delta_cache; /* likewise */
    const spw_front_cache *front_cache; /* likewise, in a dry call too */
    uint64_t cache_width;
    const int32_t *places;
    spw_route_fn on_route;
    void *on_route_ctx;
    spw_error failure;          /* of what the call asked others for */
    const spw_share *share;     /* with other ranks; NULL: sequences are whole */
    uint64_t traded, send_most; /* bytes that came from them in this call; of what is sent at once, ever */
    spw_turn_fn on_turn;
    void *on_turn_ctx;
    uint64_t turn_experts;
    bool in_experts, in_pieces; /* between a dispatch and its combine; values there have no memory yet */
    uint32_t experts_first;     /* the first operation there */
    spw_value *dispatched[2];   /* what dispatch takes and gives */
    spw_part part;
    spw_apart *apart; /* of that part; NULL: the call is one */
    uint64_t part_first, part_end;
    bool asleep, dry_awake; /* no part of the call's: nothing is computed, and no memory taken; dry, but for that */
    uint64_t pieces_from;   /* where memory of backward begins that is needed until their dispatch is done */
    uint32_t op_count, value_count, routing_count, each_count;
    uint32_t found;  /* operations whose outputs' needs_grad is known */
    unsigned passed; /* SPW_PASSED_ */
    /*
     * What is recorded of linear layers and parts by rows is computed when the next operation comes: backward reads no block's output,
     * and what makes it need not be computed again. Its memory begins at pending_from.
     */
    spw__op *pending;
    uint64_t pending_from, linear_flops;
    /* Parts by rows: the tape of a tile, and, on that, its first row and the places of what it is to give. */
    spw_tape *tile;
    uint64_t rows_each, first_row;
    act *into[SPW_ROWS_VALUES];
    uint32_t into_next; /* 1 + the one that the next value is; 0: none */
    bool into_there;    /* they were computed before */
    bool is_tile;
    uint32_t rows_count;
    spw__rows rows[SPW__ROWS_MAX];
    spw__op unrecorded; /* written, never read: keeps callers free of a branch */
    spw__op ops[SPW__OPS_MAX];
    spw_value values[SPW__VALUES_MAX];
    spw_routed routings[SPW__ROUTINGS_MAX];
    spw_value *each[SPW__VALUES_MAX];
};

/* Does forward compute? */
static inline bool
spw__tape_computes(const spw_tape *t)
{
    return !t->dry && !t->kept;
}

static inline act *
spw__tape_at_col(const spw_tape *t, act *p, uint64_t col)
{
    return (char *)p + col * t->act_bytes;
}

static inline act *
spw__tape_at_row(const spw_tape *t, const spw_value *v, act *base, uint64_t row)
{
    return base == NULL ? NULL : (char *)base + row * v->cols * t->act_bytes;
}

/* Where in its sequence a rank's first row is, of so many. */
static inline uint64_t
spw__tape_first_position(const spw_tape *t, uint64_t T)
{
    return t->share != NULL ? t->share->rank * T : 0;
}

/* Memory of the arena; NULL: there is too little. */
void *spw__tape_take(spw_tape *t, uint64_t bytes);
/* The call has failed, with SPW_EINVAL unless it had before; gives NULL. */
spw_value *spw__tape_fail(spw_tape *t);
/* How many places of a sequence the call's attention has, of so many positions that are new; a dry one's none. */
uint64_t spw__tape_sees(const spw_tape *t, uint64_t positions);
/* data NULL: in memory of the arena. Whether its gradient is wanted is not known before spw__tape_find_needs(). */
spw_value *spw__tape_value(spw_tape *t, uint64_t rows, uint64_t cols, act *data);
/* Where an operation is written down, if it is; NULL: there are too many. */
spw__op *spw__tape_op(spw_tape *t, spw__op_kind kind, spw_value *out);
/*
 * Finds whose gradient is wanted: what an operation gives, where that of an input is, or of a parameter of its. Whoever reads needs_grad
 * of what was recorded asks for this first.
 */
void spw__tape_find_needs(spw_tape *t);
/* Where an input's gradient goes; NULL when nobody wants it. Sets the flag when something is there already. */
act *spw__tape_grad(spw_tape *t, spw_value *v, unsigned flag, unsigned *flags);
/* The same for an operation that adds to what lies anywhere. */
act *spw__tape_grad_onto(spw_tape *t, spw_value *v, const act **onto);
/* Some of a parameter's elements, as a matrix of their own; NULL: w is. */
spw_value *spw__tape_part(spw_tape *t, spw_value *w, uint64_t first, uint64_t rows, uint64_t cols);
/* True once, for the first gradient of a parameter: nothing is there yet to which it could be added. */
bool spw__tape_begins(const spw_tape *t, spw_value *w);
/* The gradient of a parameter for an operation that only adds; NULL: nobody wants it. */
float *spw__tape_sum(spw_tape *t, spw_value *w);
/* from's gradient is a part of to's, and was needed for the last time: its memory is to's from now on, if to has none. */
void spw__tape_hand_over(spw_tape *t, spw_value *to, const spw_value *from);
/* from's gradient is a part of to's: it is copied there, or added. */
void spw__tape_pass_through(spw_tape *t, spw_value *to, const spw_value *from);
/* fp32 sums of n elements, or of as many as v has in memory of the arena, that begin with what is there (NULL: nothing). */
void spw__tape_begin_sums(spw_tape *t, float *sums, uint64_t n, const act *there);
float *spw__tape_take_sums(spw_tape *t, const spw_value *v, const act *there);
/* Tells of a turn, if anybody is to be told; false: it failed. */
bool spw__tape_turn(spw_tape *t, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn what);
/* What follows is no part of the call's, or is one again. */
void spw__tape_sleep(spw_tape *t);
void spw__tape_wake(spw_tape *t);
/* For an operation whose output lies in its input's memory: both gradients are one buffer. */
void spw__tape_share_grad(spw_value *in, const spw_value *out);
/* Backward of what was recorded, from where gradients are set. */
void spw__tape_run_backward(spw_tape *t);
/* Computes what was put off. */
void spw__tape_catch_up(spw_tape *t);
/*
 * rows.c: a tape over what is free in the arena, for what leaves nothing there, made when it is first asked for (NULL: no memory); its reset for the
 * next use; and its peak, which becomes a part of the call's.
 */
spw_tape *spw__tape_inner(spw_tape *t);
void spw__tape_reset_inner(spw_tape *t, bool record);
void spw__tape_note_inner(spw_tape *t);
/* linear.c; forward: of what was recorded, now or when it is caught up with */
void spw__linear_forward(spw_tape *t, const spw__op *o);
void spw__linear_backward(spw_tape *t, const spw__op *o);
/* norm.c */
void spw__layernorm_backward(spw_tape *t, const spw__op *o);
void spw__rmsnorm_backward(spw_tape *t, const spw__op *o);
/* attention.c */
void spw__rope_backward(spw_tape *t, const spw__op *o);
void spw__parts_backward(spw_tape *t, const spw__op *o);
void spw__beside_backward(spw_tape *t, const spw__op *o);
void spw__keys_backward(spw_tape *t, const spw__op *o);
void spw__attention_backward(spw_tape *t, const spw__op *o);
/*
 * share.c. out: of B sequences of which this rank has T positions, all positions of what it computes of each part's heads, side by side (B count T, .). home: of
 * x (B count T, .), which is this rank's of so many heads, all of them for its own positions (B T, heads D).
 */
spw_value *spw__share_out(spw_tape *t, const spw__heads *parts, uint32_t count, uint64_t B, uint64_t T);
spw_value *spw__share_home(spw_tape *t, spw_value *x, uint64_t heads, uint64_t D, uint64_t B, uint64_t T);
/* How many of so many heads a rank computes, and the first of these; and of a parameter with `each` elements for each head those of these. */
uint64_t spw__share_heads(const spw_tape *t, uint64_t heads);
uint64_t spw__share_first(const spw_tape *t, uint64_t heads);
spw_value *spw__share_part(spw_tape *t, spw_value *w, uint64_t before, uint64_t heads, uint64_t each);
void spw__share_out_backward(spw_tape *t, const spw__op *o);
void spw__share_home_backward(spw_tape *t, const spw__op *o);
/* streams.c */
void spw__repeat_backward(spw_tape *t, const spw__op *o);
void spw__stream_maps_backward(spw_tape *t, const spw__op *o);
void spw__mix_backward(spw_tape *t, const spw__op *o);
/* front.c */
void spw__front_attention_backward(spw_tape *t, const spw__op *o);
void spw__compress_backward(spw_tape *t, const spw__op *o);
void spw__linear_groups_backward(spw_tape *t, const spw__op *o);
/* side.c */
void spw__leave_backward(spw_tape *t, const spw__op *o);
void spw__bring_backward(spw_tape *t, const spw__op *o);
/* delta.c */
void spw__conv_backward(spw_tape *t, const spw__op *o);
void spw__delta_backward(spw_tape *t, const spw__op *o);
/* elementwise.c */
void spw__curve_backward(spw_tape *t, spw__op *o);
void spw__gate_mul_backward(spw_tape *t, spw__op *o);
void spw__add_gated_backward(spw_tape *t, const spw__op *o);
void spw__add_backward(spw_tape *t, const spw__op *o);
void spw__scale_backward(spw_tape *t, const spw__op *o);
void spw__add_scaled_by_backward(spw_tape *t, const spw__op *o);
void spw__dropout_backward(spw_tape *t, const spw__op *o);
/* A curve, or a gated product, of some rows. */
void spw__tape_curve(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows);
void spw__tape_curve_backward(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows);
void spw__tape_gate_mul(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows);
void spw__tape_gate_mul_backward(spw_tape *t, const spw__op *o, uint64_t first, uint64_t rows);
/* tokens.c */
void spw__embedding_backward(spw_tape *t, const spw__op *o);
/* rows.c */
void spw__rows_forward(spw_tape *t, const spw__op *o);
void spw__rows_backward(spw_tape *t, const spw__op *o);
/* fp8.c: whether a linear layer computes with 8-bit floats, by its shape alone */
bool spw__fp8_takes(const spw_value *x, const spw_value *w);
/* Memory for the codes of an input, in the order in which layers are recorded; false: there is too little. */
bool spw__fp8_prepare(spw_tape *t, spw_value *x);
/* Memory for the codes of weights, until anything else is taken. */
uint8_t *spw__fp8_lend(spw_tape *t, const spw_value *w);
void spw__fp8_forward(spw_tape *t, const spw__op *o);
/* Of weights and of x, if they have gradients; not of a bias. */
void spw__fp8_backward(spw_tape *t, const spw__op *o, act *dx, unsigned flags);
/* experts.c */
void spw__experts_route_backward(spw_tape *t, const spw__op *o);
void spw__by_expert_backward(spw_tape *t, const spw__op *o);
/* Between these two the gradients of what lies between are only given their places. */
void spw__linear_each_backward(spw_tape *t, spw__op *o);
void spw__experts_combine_backward(spw_tape *t, spw__op *o);
void spw__experts_dispatch_backward(spw_tape *t, spw__op *o);

#endif
