/*
 * spw_nn.h - tape, blocks and model families.
 *
 * A block's forward is ordinary C that calls the operations below; backward is derived from the tape. The engine calls
 * forward without recording in the forward pass, and with recording in the backward pass (recompute), where it finds its
 * results when they were kept. Memory comes from an arena that is handed out the same way in every call; a dry tape computes
 * nothing and only measures the arena that a call needs.
 */
#ifndef SPW_NN_H
#define SPW_NN_H

#include "spw_gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- values and the tape */

/* A routing on the device (spw_gpu_route), and what the tape knows of it besides. */
typedef struct spw_routed {
    spw_routing on_device;
    int32_t ends[SPW_EXPERTS_MAX]; /* of each expert's rows, on the host: products are made by expert */
    uint64_t piece_rows;           /* places that are computed at a time; 0: all */
    bool weighs_input;             /* weights are of what experts read, not of what they give */
    float *dweights, balance;      /* as spw_gpu_route_backward() takes it */
    spw_routing_rule rule;
} spw_routed;

/* A matrix of activations (rows, cols) on the device, or a parameter. */
typedef struct spw_value {
    act *data;
    act *grad; /* activations: allocated when first written */
    act *
        so_far; /* what there is of grad, where that is not there yet: another value's, which needs it no more; NULL: none */
    act *gelu_in;  /* data is gelu() of this; NULL: of nothing that is known */
    float *w_grad; /* parameters: fp32; NULL: frozen */
    bool *w_begun; /* something is in w_grad already, and more is added; NULL: it is */
    uint64_t rows, cols;
    bool needs_grad, grad_set, is_param;
    bool trained; /* parameters: a gradient is wanted, though w_grad may come with a turn */
    bool
        passes; /* parameters: backward has made, or would have in a dry call, the gradient of what it is multiplied by */
    bool fp8;   /* parameters: linear layers compute with 8-bit floats of it, where sizes are multiples of 16 */
    uint8_t *codes, *turned; /* activations: 8-bit floats of data, and of its transpose; NULL: no memory for them yet */
    bool scaled, coded, turned_coded; /* the scale behind codes, these and those are computed */
    bool grad_of_gelu_in;             /* grad went through the gelu already */
    bool there;                       /* data were computed in an earlier call */
    struct spw_value *part_of; /* parameters: so many elements behind this one's first begins data; NULL: it is whole */
    uint64_t part_first;
    uint64_t
        piece_rows; /* parameters: embedding and head find so many of its rows in data and w_grad at a time, and the last ones, each
                            in its turn (spw_tape_on_turn); 0: all of them */
    uint64_t pieces_before; /* parameters: of matrices in pieces in front of it in the block; turns count all */
    bool absent; /* parameters: data are nowhere, because the call needs the gradient alone (spw_model_is_embedding) */
    spw_routed *routed; /* it is a routing (rows, choices): data are weights in fp32 */
} spw_value;

/* What one micro-batch brings. Arrays on the device, one int32 per token. */
typedef struct spw_batch {
    uint64_t sequences, positions;            /* B, T */
    const int32_t *tokens, *targets, *places; /* places: position of each token; targets: -1 for no loss */
    const int32_t *begins, *ends;             /* of documents, for attention's shape; NULL: a sequence is one */
    const int32_t *chunk_begins, *chunk_ends; /* the same of chunks (spw_gpu_chunks); NULL: no chunk ends in the call */
    /* (These four are of all positions of shared sequences, spw_tape_share(); what else is of rows, of this rank's.) */
    const int32_t *targeted; /* rows with a target, of which heads compute nothing else; NULL: all are computed */
    uint64_t targeted_count;
    float grad_scale;                 /* of the sum of losses */
    float balance;                    /* of a loss for routers, scaled as the losses are; 0: none */
    float *losses;                    /* (B T) out */
    const spw_preference *preference; /* what is minimised is this, of pairs; NULL: the sum of losses */
    const spw_pair *pairs;            /* (pair_count) on the device */
    uint64_t pair_count;
    uint64_t dropout_key, dropout_counter;
} spw_batch;

typedef struct spw_tape spw_tape;
/* queue: of device, whose compute type values have. */
spw_status spw_tape_create(spw_tape **out, spw_gpu_queue *queue, const spw_gpu_info *device, spw_error *err);
void spw_tape_destroy(spw_tape *tape);
/* Starts a call: an empty tape over arena memory. record: backward will follow. arena NULL: dry, measures only. */
void spw_tape_reset(spw_tape *tape, void *arena, uint64_t arena_bytes, bool record);
/* The same, not recorded, and all that backward reads stays in the arena, for spw_tape_reset_kept(). */
void spw_tape_reset_keeping(spw_tape *tape, void *arena, uint64_t arena_bytes);
/*
 * spw_tape_in_tiles - from the next reset on, spw_nn_rows() computes at most so many rows at a time, and experts take so many of theirs where
 * a batch has more rows; 0, as at first: all. Calls with a cache have no tiles.
 */
void spw_tape_in_tiles(spw_tape *tape, uint64_t rows);
/*
 * spw_tape_share - from the next reset on, sequences are shared with other ranks: a call has T positions of each, rank r of count ranks those from r T on, and
 * attention is computed of all count T of them, by each rank for its part of the heads. share NULL, as at first: sequences are whole.
 *   send   memory of spw_tape_sent_most() bytes, which is written on the tape's queue; not looked at by a dry call
 *   trade  what `send` has for rank r, from r times part_bytes on, is sent to it; what the others send comes to its place in `to`, device memory, in the queue's
 *          order. Own parts are not touched. All ranks call it in the same order, with the same bytes; its error is that of spw_tape_check()
 * Errors  SPW_EINVAL at spw_tape_check(): heads that count does not divide, keys' heads that neither divides, a cache. Of what looks at other rows besides
 *         attention, linear or not (an indexer), the caller has made sure that there is none.
 * Source  Jacobs et al. 2023 (2309.14509)
 */
typedef struct spw_share {
    uint32_t rank, count; /* count 2 or more */
    act *send;
    spw_status (*trade)(void *ctx, act *to, uint64_t part_bytes, spw_error *err);
    void *ctx;
} spw_share;
void spw_tape_share(spw_tape *tape, const spw_share *share);
/* Bytes that came from others in this call, dry: would have; and the most that was to be sent at once so far. */
uint64_t spw_tape_traded(const spw_tape *tape);
uint64_t spw_tape_sent_most(const spw_tape *tape);
/* Most that was used of the arena in this call. */
uint64_t spw_tape_arena_used(const spw_tape *tape);
/* Floating point operations of the products of linear layers that forward computed, experts' aside; dry: would have. */
uint64_t spw_tape_linear_flops(const spw_tape *tape);
/* What backward went through: attention, a mixture's experts, linear attention. */
enum { SPW_PASSED_ATTENTION = 1, SPW_PASSED_EXPERTS = 2, SPW_PASSED_LINEAR = 4 };
unsigned spw_tape_passed(const spw_tape *tape);
/*
 * spw_tape_reset_kept - starts a recorded call whose forward was done before: the same block, input and batch, after
 * spw_tape_reset_keeping() with the arena `kept`, which nobody has written since. Forward computes nothing and finds everything where it was; backward takes
 * its memory from `arena`. Blocks that make a loss cannot be called like this (SPW_EINVAL at spw_tape_check()).
 */
void spw_tape_reset_kept(spw_tape *tape, void *kept, uint64_t kept_bytes, void *arena, uint64_t arena_bytes);
/*
 * spw_tape_use_cache - until the next reset, forward takes new tokens of running sequences: the call's one attention reads and
 * extends this cache (rows of width elements), and rope takes row i's position from places[i]. A block need not know.
 *   by_row  linear layers give a row the same bits however many there are: for one token each of many sequences
 * Both stay the caller's. A tape that records, a second attention and another width than Hk D are SPW_EINVAL at spw_tape_check().
 */
void spw_tape_use_cache(spw_tape *tape, const spw_attention_cache *cache, uint64_t width, const int32_t *places,
                        bool by_row);
/*
 * What running sequences keep besides, of a layer whose keys stand for several tokens (spw_gpu_compress_cached, spw_attention_shape): so many such keys a sequence
 * are in front of its own in the other cache, and of the layer's indexer index_keys (slots, keys, index_dim), where there is a choice. What
 * both are made of is in the rest. With it a dry call takes as much memory as one with both caches.
 */
typedef struct spw_front_cache {
    uint64_t keys;
    act *kv, *gate;
    act *index_keys, *index_kv, *index_gate;
} spw_front_cache;
void spw_tape_use_front_cache(spw_tape *tape, const spw_front_cache *cache);
/* The same for a call of linear attention, one at most, whose state of the sequences this is; beside it, for the rest. */
void spw_tape_use_delta_cache(spw_tape *tape, const spw_delta_cache *cache);
/*
 * spw_tape_on_route - until the next reset, forward calls fn after each routing that it computes, before anything uses it: for
 * weights that are fetched when it is known that rows will meet them. An error is that of spw_tape_check().
 */
typedef spw_status (*spw_route_fn)(void *ctx, const spw_routed *routed, spw_error *err);
void spw_tape_on_route(spw_tape *tape, spw_route_fn fn, void *ctx);
/*
 * spw_tape_on_turn - until the next reset, what lies between a dispatch and its combine is computed for so many experts at a time, upwards
 * in forward and downwards in backward. fn is told of each turn before it (the weights of experts [first, end) that have rows, and in
 * backward the w_grad of all of them, are needed from then on) and when it is over. Forward that is recorded leaves the experts out, because backward computes each turn
 * again before it uses it: what combine gives then is undefined, so it must be for sums alone; but not onto nothing, where it is computed. The same bits as without.
 * Pieces of tables or a head (spw_value.piece_rows) have turns too, the piece first of them, without a routing: forward upwards in an embedding,
 * and in a head, whose losses are known when all have been seen; backward downwards in both.
 */
typedef enum spw_turn { SPW_TURN_FORWARD, SPW_TURN_BACKWARD, SPW_TURN_OVER } spw_turn;
typedef spw_status (*spw_turn_fn)(void *ctx, const spw_routed *routed, uint64_t first, uint64_t end, spw_turn turn,
                                  spw_error *err);
void spw_tape_on_turn(spw_tape *tape, uint64_t experts, spw_turn_fn fn, void *ctx);
/*
 * A call in parts, so that experts in turns serve several micro-batches in each: what lies before them, for every micro-batch; then turn by
 * turn, each for all; then what lies behind. Each part is a call of the block's forward, which computes its part alone; what the next ones read is held in
 * between. The block has one mixture, and adds to what its combine gives, which is onto something. The same bits as a call in one.
 *   BEFORE       forward up to the experts
 *   TURN         forward of experts [first, end), whose weights are there
 *   AFTER        forward of what is behind them, and what the block gives
 *   BACK_BEFORE  forward up to the experts once more
 *   BACK_READ    the same where what they read is held: only who reads it is found out once more (spw_nn_read)
 *   BACK_TURN    recorded: spw_tape_backward() goes through experts [first, end), turns downwards, for the gradient dy of what the block gives
 *   BACK         recorded: spw_tape_backward() goes through all the rest, the block's output's gradient being dy
 */
typedef enum spw_part {
    SPW_PART_ALL,
    SPW_PART_BEFORE,
    SPW_PART_TURN,
    SPW_PART_AFTER,
    SPW_PART_BACK_BEFORE,
    SPW_PART_BACK_READ,
    SPW_PART_BACK_TURN,
    SPW_PART_BACK
} spw_part;
/* What is held of a micro-batch, in device memory of the caller's. */
typedef struct spw_apart {
    act *read;     /* (rows, width) what experts read: made by BEFORE and BACK_BEFORE; not looked at by BACK */
    float *sums;   /* (rows, width) what they give, or the gradient of what they read */
    void *routing; /* spw_tape_routing_bytes() */
    act *dy;       /* (rows, width) */
    int32_t ends[SPW_EXPERTS_MAX]; /* on the host, the tape's */
} spw_apart;
uint64_t spw_tape_routing_bytes(uint64_t rows, uint64_t choices, uint64_t experts);
/* The next call is this part, after a reset, which takes it back. [first, end): of a turn. */
void spw_tape_call_part(spw_tape *tape, spw_part part, spw_apart *apart, uint64_t first, uint64_t end);
/*
 * SPW_ENOMEM if the arena was too small, SPW_EINVAL for shapes that do not fit; the call's results are void then. A recorded call's last
 * linear layer is computed here at the latest, or, when backward was run before, never.
 */
spw_status spw_tape_check(spw_tape *tape, spw_error *err);
/*
 * A value over memory of the caller's: an input (needs_grad), or a parameter. Its gradient is added to w_grad, or, where w_begun
 * says false, written there first, whatever was in it; then w_begun is true.
 */
spw_value *spw_tape_input(spw_tape *tape, act *data, uint64_t rows, uint64_t cols, bool needs_grad);
spw_value *spw_tape_param(spw_tape *tape, const act *data, float *w_grad, bool *w_begun, uint64_t rows, uint64_t cols);
/* Runs backward from `out`, whose grad was set by the caller (or by a loss); fills the grads of inputs and parameters. */
void spw_tape_backward(spw_tape *tape, spw_value *out);

/* ---------------------------------------------------------------- operations; a NULL or failed input gives NULL */

spw_value *spw_nn_linear(spw_tape *t, spw_value *x, spw_value *w, spw_value *b, unsigned flags);
/* onto + linear(x), and gelu(linear(x)): as two operations would, with less to move. */
spw_value *spw_nn_linear_add(spw_tape *t, spw_value *onto, spw_value *x, spw_value *w, spw_value *b, unsigned flags);
/* The same in onto's memory, which must have no other user; where rows are to have the same bits one by one in memory of its own. */
spw_value *spw_nn_linear_onto(spw_tape *t, spw_value *onto, spw_value *x, spw_value *w, spw_value *b, unsigned flags);
spw_value *spw_nn_linear_gelu(spw_tape *t, spw_value *x, spw_value *w, spw_value *b, unsigned flags);
spw_value *spw_nn_embedding(spw_tape *t, const int32_t *ids, uint64_t count, spw_value *table);
/* x + table[before + ids], in x's memory. */
spw_value *spw_nn_embedding_add(spw_tape *t, spw_value *x, const int32_t *ids, spw_value *table, uint64_t before);
/* b NULL: zeros. */
spw_value *spw_nn_layernorm(spw_tape *t, spw_value *x, spw_value *g, spw_value *b, float eps);
/* Over each row, or over each head of g's size when a row holds several. */
spw_value *spw_nn_rmsnorm(spw_tape *t, spw_value *x, spw_value *g, float eps);
/* Over each of so many groups of a row's columns, of which g, as long as a row, has weights for each. */
spw_value *spw_nn_rmsnorm_groups(spw_tape *t, spw_value *x, spw_value *g, uint64_t groups, float eps);
/* The same by 1 + g: weights of 0 are the norm alone. */
spw_value *spw_nn_rmsnorm_from_one(spw_tape *t, spw_value *x, spw_value *g, float eps);
/* Without weights, over each cols elements of a row. */
spw_value *spw_nn_rmsnorm_plain(spw_tape *t, spw_value *x, uint64_t cols, float eps);
/*
 * Rotates the first R elements of each head of D in place, from column col on; x must have no other user. cos_sin (T, R) on the device.
 * Pairs are elements j and j + R / 2, or 2j and 2j + 1 where they are neighbors. places: of each row, where a cache has none; NULL: rows of a
 * sequence have those from 0 on.
 */
spw_value *spw_nn_rope(spw_tape *t, spw_value *x, uint64_t col, const float *cos_sin, const int32_t *places, uint64_t T,
                       uint64_t heads, uint64_t D, uint64_t R, bool neighbors);
/* The other way round: by the same angles back. */
spw_value *spw_nn_rope_back(spw_tape *t, spw_value *x, uint64_t col, const float *cos_sin, const int32_t *places,
                            uint64_t T, uint64_t heads, uint64_t D, uint64_t R, bool neighbors);
/*
 * What values are cut into, and what latent attention makes keys of. Backward writes the gradients of the columns that they read and adds to nothing:
 * of a value that one of them reads, they and attention together read each column once, and nothing else reads any.
 *   spw_nn_parts    a row of x holds `heads` groups of parts of these sizes (elements); part `first` of all heads, then the next one of all,
 *                   for count parts
 *   spw_nn_beside   up to three values, which have no other user, side by side
 *   spw_nn_keys     (rows, heads (N + R)): each head has the first N columns of its own, of own's columns over heads each, and behind them
 *                   shared's R columns from col on, whose gradient is the heads' sum in fp32
 * Source  DeepSeek-AI 2024 (2405.04434, 2.1)
 */
enum { SPW_PARTS_MAX = 4 };
spw_value *
spw_nn_parts(spw_tape *t, spw_value *x, uint64_t heads, const uint64_t *sizes, uint32_t first, uint32_t count);
spw_value *spw_nn_beside(spw_tape *t, spw_value *const *x, uint32_t count);
spw_value *
spw_nn_keys(spw_tape *t, spw_value *own, spw_value *shared, uint64_t col, uint64_t heads, uint64_t N, uint64_t R);
/* q, k, v start at columns of values with the given strides; packed qkv is the same value three times. sinks (1, Hq): a parameter, or NULL.
 * shape's strides are the values'; its v_head counts. */
spw_value *spw_nn_attention(spw_tape *t, spw_value *q, uint64_t q_col, spw_value *k, uint64_t k_col, spw_value *v,
                            uint64_t v_col, spw_value *sinks, const spw_attention_shape *shape);
/*
 * What DeepSeek-V4 has of its own. x, mixes, kv, gate, q and the keys have no other user.
 *   spw_nn_repeat        (rows, n cols): x n times side by side
 *   spw_nn_stream_maps   of mixes; scale and base are parameters (spw_gpu_stream_maps); shape's M counts
 *   spw_nn_mix           h NULL: what a half reads of streams x; else the streams behind it, h being what the half gave. Of one value of maps both are
 *                        made, or a head's one
 *   spw_nn_compress      (B (T / rate), D) keys of several rows; bias is a parameter; of shape firsts are not looked at: *firsts are. With a cache those that
 *                        spw_gpu_compress_cached() makes
 *   spw_nn_front_attention  of keys that are values too, (rows, D), with others in front, (B (T / rate), D) or NULL; shape's sizes, window, sinks and chosen bits.
 *                        With a front cache front is NULL: they are there
 *   spw_nn_linear_groups (rows, w->rows): each of so many groups of x's columns by its rows of w
 */
spw_value *spw_nn_repeat(spw_tape *t, spw_value *x, uint64_t n);
spw_value *
spw_nn_stream_maps(spw_tape *t, spw_value *mixes, spw_value *scale, spw_value *base, const spw_streams *shape);
spw_value *spw_nn_mix(spw_tape *t, spw_value *h, spw_value *x, spw_value *maps, const spw_streams *shape);
spw_value *spw_nn_compress(spw_tape *t, spw_value *kv, spw_value *gate, spw_value *bias,
                           const spw_compress_shape *shape, const spw_window_cache *cache, const int32_t **firsts);
spw_value *spw_nn_front_attention(spw_tape *t, spw_value *q, spw_value *front, spw_value *kv, spw_value *sinks,
                                  const spw_attention_shape *shape);
spw_value *spw_nn_linear_groups(spw_tape *t, spw_value *x, spw_value *w, uint64_t groups);
/*
 * Linear attention: the short convolution, by the taps of one to three parameters w (., K), each of the channels behind the one before, and of as many biases (1, .),
 * which may be NULL; and the gated delta rule or Mamba-2's (spw_gpu_conv,
 * spw_gpu_delta); qkv, a and b have no other user, log_a, dt_bias and skip (1, Hv), with channels dt_bias (1, Hv Dk), are parameters; b is NULL of Mamba-2, skip of the other. What a sequence's later rows read is kept in the delta cache, if the call has one.
 */
spw_value *spw_nn_conv(spw_tape *t, spw_value *x, spw_value *const *w, spw_value *const *bias, uint32_t count,
                       const spw_conv_shape *shape);
spw_value *spw_nn_delta(spw_tape *t, spw_value *qkv, spw_value *a, spw_value *b, spw_value *log_a, spw_value *dt_bias,
                        spw_value *skip, const spw_delta_shape *shape);
spw_value *spw_nn_curve(spw_tape *t, spw_curve kind, spw_value *x);
spw_value *spw_nn_gate_mul(spw_tape *t, spw_gate kind, spw_value *gate, spw_value *up);
/* The same of one value's halves: gate has the first columns, up the last; of SPW_GATE_CLAMPED, which is in one value always, they take turns. */
spw_value *spw_nn_gate_mul_packed(spw_tape *t, spw_gate kind, spw_value *x);
/*
 * A mixture of experts: a routing of rows by logits (rows, experts), to `choices` experts each; x's rows in order of experts (rows
 * choices, cols); linear layers, w[e] and b[e] (b NULL: none) for the rows of expert e, whose weights have one shape; and, weighted, back to where the
 * rows were, onto what is there (NULL: nothing). Between dispatch and combine there are such layers, gated products and curves alone. In tiles the rows between are a
 * piece's, whose memory is shared by all pieces, sums are formed in fp32 by place, and a recorded forward leaves the experts out as with turns. Forward waits for the device once for each routing, to learn how many rows each expert has. balance:
 * backward adds the gradient of balance times experts times the sum over experts of (share of the pairs times mean probability).
 */
/* Tells that x is what experts will read, before anything is made of it: where a part's caller holds it, the call computes from here on. */
void spw_nn_read(spw_tape *t, spw_value *x);
spw_value *spw_nn_route(spw_tape *t, spw_value *logits, uint64_t choices, const spw_routing_rule *rule, float balance);
/* The same with the rule's factors, a parameter (1, experts); NULL: none. */
spw_value *spw_nn_route_scaled(spw_tape *t, spw_value *logits, uint64_t choices, const spw_routing_rule *rule,
                               float balance, spw_value *factors);
spw_value *spw_nn_dispatch(spw_tape *t, spw_value *x, spw_value *routing);
/* The same, weighted, and combine adds up what experts make of it as it is. */
spw_value *spw_nn_dispatch_weighed(spw_tape *t, spw_value *x, spw_value *routing);
spw_value *spw_nn_linear_each(spw_tape *t, spw_value *x, spw_value *routing, spw_value *const *w, spw_value *const *b,
                              unsigned flags);
/*
 * The same onto what another one of the same rows gave, in its memory, which has no other user; and by a stack, a parameter or what
 * spw_nn_by_expert() made of one: experts' matrices of one shape are below each other, and of each this takes rows [first, first + rows).
 */
spw_value *spw_nn_linear_each_onto(spw_tape *t, spw_value *onto, spw_value *x, spw_value *routing, spw_value *const *w,
                                   spw_value *const *b, unsigned flags);
spw_value *spw_nn_linear_stack(spw_tape *t, spw_value *x, spw_value *routing, spw_value *stack, uint64_t first,
                               uint64_t rows, unsigned flags);
/*
 * A stack (experts rows, cols) of a parameter (rows, cols experts) in whose rows an element's experts are beside each other, times scale; for
 * linear layers of one mixture, in front of its dispatch.
 */
spw_value *spw_nn_by_expert(spw_tape *t, spw_value *w, uint64_t experts, float scale);
spw_value *spw_nn_combine(spw_tape *t, spw_value *onto, spw_value *x, spw_value *routing);
/* onto + sigmoid(gate) x, gate (rows, 1): of an expert of all rows. x and gate, which want gradients, have no other user. */
spw_value *spw_nn_add_gated(spw_tape *t, spw_value *onto, spw_value *x, spw_value *gate);
spw_value *spw_nn_add(spw_tape *t, spw_value *a, spw_value *b);
spw_value *spw_nn_scale(spw_tape *t, spw_value *x, float scale);
/* (a + b) s, by a number that lies on the device: s is a frozen parameter of one element in terms (spw_param.in_terms). */
spw_value *spw_nn_add_scaled_by(spw_tape *t, spw_value *a, spw_value *b, spw_value *s);
float spw_nn_rounded(const spw_tape *t, float x); /* to the compute type, as if x were a tensor of it */
/*
 * What a block leaves for blocks behind the next one (leave: x, once), and those bring: cols columns from col on, all of which any number of
 * blocks may read, and some one. Its gradient is in memory until the block that left it goes back; a block that leaves may bring, too.
 */
typedef struct spw_side {
    act *data, *grad; /* (rows, cols); grad NULL: nobody wants it */
    bool begun;       /* a block behind this one has put something into grad */
    uint64_t cols;    /* 0: there is none */
} spw_side;
void spw_nn_leave(spw_tape *t, spw_value *x, const spw_side *side);
spw_value *spw_nn_bring(spw_tape *t, const spw_side *side, uint64_t rows, uint64_t col, uint64_t cols);
spw_value *spw_nn_dropout(spw_tape *t, spw_value *x, float p, const spw_batch *batch, uint64_t site);
/*
 * Linear head and cross-entropy, over as many rows at a time as the device does well with; losses go to batch->losses. While
 * recording also all gradients. cap: of the logits, as spw_gpu_linear_cross_entropy() takes it; 0: none. In pieces logits are computed once more
 * for gradients, and x's is summed over the pieces in fp32.
 */
spw_value *spw_nn_head_loss(spw_tape *t, spw_value *x, spw_value *w, const spw_batch *batch, float cap);
/* cap tanh(x / cap), in x's memory: of logits that are made for themselves. It has no backward: SPW_EINVAL while recording. */
spw_value *spw_nn_soft_cap(spw_tape *t, spw_value *x, float cap);

/*
 * spw_nn_rows - a part of a block that treats each row by itself: linear layers, norms, gates, rope, dropout and sums, no attention and no
 * routing. Between tiles of the batch's rows only in and out remain; backward computes a tile's inside again before it uses it.
 *   at   where the part's parameters begin in call->params; behind them afterwards
 *   fn   the part, for all rows or a tile: `call` has the tape that its operations go to. It may be called again until backward is over, so
 *        call's batch and params must stay till then. In front of the operation that makes out[k] it calls spw_nn_into(tape, k).
 *   in   (in_count) values of the batch's rows
 *   out  (out_count) written, in order; none may be another one's memory
 * Bytes   of a recorded call: out and, when backward comes to it, gradients of in, beside one tile's inside
 * Errors  those of spw_tape_check(): a value that is not where spw_nn_into() said, more than eight parts in a block
 * Source  the tiling of Rajbhandari et al. 2021 (2104.07857, 5.1.3), along the sequence: Bekman et al. 2025 (2506.13996)
 */
enum { SPW_ROWS_VALUES = 4 };
struct spw_call;
typedef void (*spw_rows_fn)(const struct spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out);
bool spw_nn_rows(const struct spw_call *call, uint32_t *at, spw_rows_fn fn, spw_value *const *in, uint32_t in_count,
                 spw_value **out, uint32_t out_count);
void spw_nn_into(spw_tape *t, uint32_t k);
uint32_t spw_nn_hold_into(
    spw_tape *t); /* takes back what spw_nn_into() said of the next value: its k; SPW_ROWS_VALUES: nothing */
/*
 * Rows of a tile of at most so many (0: of any number): all of the batch, whole sequences, or parts of one of about the same size, in
 * sixteens if that is not too many. A batch of one shorter sequence has no larger tiles in tiles of that size.
 */
uint64_t spw_nn_tile_rows(uint64_t sequences, uint64_t positions, uint64_t most);

/* ---------------------------------------------------------------- models */

/* LOG_UNIFORM: logarithms of numbers between 0.01 and 16, each as likely as the next. LOG_COUNT: logarithms of 1, 2, 3 and so on. STEPS: what softplus makes
 * steps of between 0.001 and 0.1 of, whose logarithms are uniform. IN_TURN: a table of whole numbers, whose
 * row r has r, r + 1 and so on, modulo spw_param.below. */
typedef enum spw_init {
    SPW_INIT_NORMAL,
    SPW_INIT_ZEROS,
    SPW_INIT_ONES,
    SPW_INIT_LOG_UNIFORM,
    SPW_INIT_LOG_COUNT,
    SPW_INIT_STEPS,
    SPW_INIT_IN_TURN
} spw_init;

typedef struct spw_param {
    char name[96];       /* Hugging Face name */
    uint64_t rows, cols; /* a vector has rows 1 and ndim 1 */
    uint32_t ndim;       /* 3: a convolution's, which files have as (rows, 1, cols), and no linear layer's */
    spw_init init;
    float init_std;
    bool frozen;     /* no gradient, no record; set it before an engine is made */
    bool adapter;    /* made by spw_model_add_lora: not part of the model's own files */
    bool of_experts; /* it has a part for each of a layer's experts, beside whose matrices it is */
    /*
     * Each element of the vector that files have, in fp32, is here the sum of SPW_TERMS in a row, so that weights of 16 bits
     * keep all of it. It is frozen always, and cols counts terms.
     */
    bool in_terms;
    bool in_row;   /* a vector, which files have as (1, cols) */
    bool of_heads; /* or as (1, 1, cols, 1) */
    /*
     * A vector that multiplies nothing, which files have in rows of so many, terms being one: a table. 0: as one. whole: in files its numbers are 64-bit
     * integers, each below `below`
     */
    uint64_t row_cols, below;
    bool whole;
    bool
        of_indexer; /* it chooses what attention reads: it is frozen always, and nobody reads it where all keys are read */
    uint32_t owner_block;
    uint32_t expert; /* 1 + the one of its layer's experts that it belongs to; 0: none */
    uint32_t
        stack; /* files have it as slice expert - 1 of a tensor (stack, ...) of all experts, whose name is this one's up to
                        its last dot; 0: as a tensor of its own */
} spw_param;

typedef struct spw_block spw_block;
typedef struct spw_model spw_model;

/* Which keys attention reads, where an indexer chooses them: bits as spw_attention_shape has them, in device memory. */
typedef struct spw_choice {
    uint64_t words; /* of a row; 0: all keys are read, and nothing is chosen */
    uint32_t
        *bits; /* (rows, words) that this layer leaves to those behind it, or takes from one before it; NULL: neither */
    act *
        cache; /* (slots, capacity, index_dim) keys of the layer's indexer, of running sequences; NULL: there are none */
    act *keys;  /* (rows, index_dim) the same of the call's rows. This and what follows is the block's own */
    bool there; /* bits are */
} spw_choice;

/* What forward sees: the tape, the batch, and its parameters by the order in which the block lists them. */
typedef struct spw_call {
    spw_tape *tape;
    const spw_batch *batch;
    const spw_block *block;
    spw_value *const *params; /* (block->param_count) */
    const spw_model *model;
    const float *cos_sin;       /* the layer's rope table on the device, NULL without rope */
    const float *query_cos_sin; /* and that of its queries */
    const spw_side *sides;      /* (SPW_SIDES_MAX) what blocks leave for later ones */
    spw_choice choice;
    bool training;
    act *logits_out; /* head only: write logits of all rows here instead of the loss; NULL: loss */
} spw_call;

typedef spw_value *(*spw_forward_fn)(const spw_call *call, spw_value *x);

/*
 * The tensors that transformers 5 has of a layer's routed experts, (experts, ., .): gate and up of each in one, and down. Of an adapter beside
 * one, peft's A is (rank experts, a_cols), expert by expert, and B (b_rows, rank experts), in whose rows a rank's experts are beside each
 * other: what an expert's matrix gets is, rows by columns, B A, and where the tensor is (experts, in, out) and peft knows it, A^T B^T.
 */
typedef enum spw_fused_kind { SPW_FUSED_GATE_UP, SPW_FUSED_DOWN, SPW_FUSED_COUNT } spw_fused_kind;
typedef struct spw_fused {
    char name[96]; /* "model.layers.0.mlp.experts.gate_up_proj" */
    uint64_t a_cols, b_rows;
    bool turned; /* A^T B^T */
} spw_fused;
/* Of a layer; false: it has no experts. */
bool spw_model_fused(const spw_model *model, const spw_block *block, spw_fused_kind kind, spw_fused *out);
/* peft's name of the module with that adapter, by which of a layer's tensors have one: modules are wrapped once for each. */
void spw_fused_module(const spw_fused *fused, spw_fused_kind kind, bool both, char name[96]);
/* Whether the block's k-th parameter is an expert's part of such a tensor: which one, and its first row there. */
bool
spw_model_fused_part(const spw_model *model, const spw_block *block, uint32_t k, spw_fused_kind *kind, uint64_t *first);
/* Whether a glob matches a tensor's name, or what is left of it behind any of its dots. */
bool spw_fused_matches(const spw_fused *fused, const char *glob);

enum { SPW_BLOCK_PARAMS_MAX = 2048 };
struct spw_block {
    char name[64];
    spw_forward_fn forward; /* (B T, C) -> (B T, C); the first block gets NULL; the last gives the loss */
    uint32_t param_count;
    uint32_t param_ids[SPW_BLOCK_PARAMS_MAX];  /* own ones first, then external ones (owned by another block) */
    uint16_t adapter_at[SPW_BLOCK_PARAMS_MAX]; /* of a weight: where its A is in param_ids, B follows; 0: it has none */
    uint16_t fused_at[SPW_FUSED_COUNT];        /* of experts' tensors, the same */
    uint32_t layer_idx;
    const void *user; /* a user block's own data */
};

typedef enum spw_family {
    SPW_FAMILY_GPT2,
    SPW_FAMILY_LLAMA,
    SPW_FAMILY_MISTRAL,
    SPW_FAMILY_QWEN2,
    SPW_FAMILY_QWEN3,
    SPW_FAMILY_MIXTRAL,
    SPW_FAMILY_QWEN3_MOE,
    SPW_FAMILY_PHI3,
    SPW_FAMILY_SMOLLM3,
    SPW_FAMILY_QWEN2_MOE,
    SPW_FAMILY_OLMO2,
    SPW_FAMILY_GEMMA3,
    SPW_FAMILY_GEMMA2,
    SPW_FAMILY_GPT_OSS,
    SPW_FAMILY_GLM4_MOE,
    SPW_FAMILY_DEEPSEEK_V2,
    SPW_FAMILY_DEEPSEEK_V3,
    SPW_FAMILY_GLM4_LITE,
    SPW_FAMILY_MINIMAX_M2,
    SPW_FAMILY_OLMO3,
    SPW_FAMILY_GEMMA,
    SPW_FAMILY_GRANITE,
    SPW_FAMILY_OLMOE,
    SPW_FAMILY_SEED_OSS,
    SPW_FAMILY_GLM,
    SPW_FAMILY_GLM4,
    SPW_FAMILY_ERNIE,
    SPW_FAMILY_EXAONE4,
    SPW_FAMILY_MINISTRAL3,
    SPW_FAMILY_NEOX,
    SPW_FAMILY_OPT,
    SPW_FAMILY_STARCODER2,
    SPW_FAMILY_STABLELM,
    SPW_FAMILY_QWEN3_5,
    SPW_FAMILY_QWEN3_5_MOE,
    SPW_FAMILY_QWEN3_NEXT,
    SPW_FAMILY_GEMMA4,
    SPW_FAMILY_DOTS1,
    SPW_FAMILY_SOLAR_OPEN,
    SPW_FAMILY_ERNIE_MOE,
    SPW_FAMILY_HY_V3,
    SPW_FAMILY_HUNYUAN,
    SPW_FAMILY_HUNYUAN_MOE,
    SPW_FAMILY_COHERE,
    SPW_FAMILY_COHERE2,
    SPW_FAMILY_GRANITE_HYBRID,
    SPW_FAMILY_LLAMA4,
    SPW_FAMILY_DEEPSEEK_V32,
    SPW_FAMILY_GLM_DSA,
    SPW_FAMILY_EXAONE_MOE,
    SPW_FAMILY_NEMOTRON_H,
    SPW_FAMILY_DEEPSEEK_V4,
    SPW_FAMILY_MISTRAL4,
    SPW_FAMILY_MIMO_V2,
    SPW_FAMILY_LFM2,
    SPW_FAMILY_LFM2_MOE,
    SPW_FAMILY_BAMBA,
    SPW_FAMILY_AFMOE,
    SPW_FAMILY_OLMO_HYBRID,
    SPW_FAMILY_FALCON_H1,
    SPW_FAMILY_KIMI_LINEAR,
    SPW_FAMILY_CUSTOM,
    SPW_FAMILY_COUNT
} spw_family;
/* Hugging Face's model_type ("gpt2"); "custom" for own blocks. */
const char *spw_family_name(spw_family family);
bool spw_family_parse(const char *name, spw_family *out);
/* What files call the head's weight, without ".weight", where a model has one of its own. */
const char *spw_family_head(spw_family family);

/* What is done to the frequencies of rotary positions. */
typedef enum spw_rope {
    SPW_ROPE_PLAIN,
    SPW_ROPE_LINEAR,
    SPW_ROPE_LLAMA3,
    SPW_ROPE_YARN,
    SPW_ROPE_LONG,
    SPW_ROPE_PROPORTIONAL
} spw_rope;
enum { SPW_ROPE_FACTORS_MAX = 128, SPW_FULL_LAYERS_MAX = 1024 };

/* Where a layer has RMSNorms: of what attention and the MLP read, of what they give before it is added, or of both. */
typedef enum spw_norms { SPW_NORMS_BEFORE, SPW_NORMS_AFTER, SPW_NORMS_BOTH } spw_norms;

typedef struct spw_model_config {
    spw_family family;
    uint64_t vocab, width, layers, heads, kv_heads, head_dim, mlp_width, positions;
    double norm_eps, init_std, dropout;
    bool tied;
    /* All but GPT-2. */
    bool qkv_bias, out_bias, mlp_bias; /* of q, k and v; of the projection after attention; of the three in the MLP */
    bool qk_norm;                      /* RMSNorm over each head of q and k, before rope */
    bool qk_norm_whole;                /* and over all heads together */
    bool qk_norm_last;                 /* but behind rope */
    bool qk_unit;                      /* or behind rope without weights, in layers that have rope alone */
    /*
     * Latent attention: keys and values are made of kv_rank numbers of a row, but for rope_dim of each key, which all heads share; queries of
     * q_rank numbers, or of the row. Only the last rope_dim of head_dim elements are turned.
     */
    uint64_t kv_rank, q_rank, rope_dim; /* kv_rank 0: keys and values of the row; q_rank 0: queries of the row */
    uint64_t value_dim;                 /* of a head's values; 0: head_dim */
    /*
     * Latent attention of index_keys of the keys before a token, which an indexer chooses (DeepSeek-V3.2's): so many heads, elements of each. With
     * index_keys tokens or fewer these are all keys, and nothing computes with the indexers. The first index_from layers
     * have one, and each index_every-th behind them, of which the others take what it chose. index_keys 0: all keys are read
     */
    uint64_t index_keys, index_heads, index_dim, index_from, index_every;
    bool index_paired; /* pairs that are turned of its queries and keys are neighbors */
    /*
     * Attention of one head of keys, which are its values too (DeepSeek-V4's): queries are made of q_rank numbers, each head and the keys are normed, the last
     * rope_dim elements of both are turned, and of what is found turned back; sinks; a projection in out_groups of heads, to out_rank numbers each, and of all of
     * them to a row. Besides the keys of a window, layers with a bit in few_layers read index_keys of those that stand for few_rate rows each, which an
     * indexer chooses, layers with one in many_layers all of those that stand for many_rate rows. Layers with neither turn by rope_local_theta, the others by rope.
     */
    bool keys_are_values;
    uint64_t out_groups, out_rank, few_rate, many_rate;
    uint64_t few_layers[SPW_FULL_LAYERS_MAX / 64], many_layers[SPW_FULL_LAYERS_MAX / 64];
    /* Between blocks a row is so many streams, which each half of a layer mixes (spw_streams): rounds and eps of their maps. 0: it is one */
    uint64_t streams, stream_rounds;
    double stream_eps;
    /* head_dim and kv_heads of layers without a window, both; 0: as the others' */
    uint64_t full_head_dim, full_kv_heads;
    bool rope_paired; /* pairs that are turned are neighbors */
    bool packed;      /* q, k and v are one matrix; then neither qk_norm nor experts */
    bool woven;       /* packed: a head's q, k and v are beside each other, and each has its own k and v */
    bool gate_packed; /* gate and up of the MLP are, and those of each expert and of the one of all rows */
    spw_norms norms;
    bool norms_from_one; /* norms multiply by 1 + w */
    bool values_normed;  /* a head's values are, without weights */
    double value_scale;  /* values are multiplied by it; 0: by nothing */
    bool values_of_keys; /* and in layers without a window made of what keys are made of */
    bool layer_scaled;   /* what a layer gives is multiplied by a number of its own, which is frozen */
    /*
     * Embeddings of each layer (Gemma 3n's): so many elements for each layer and token, of a table with so many rows and of what the first
     * layer reads; a layer's gate lets them in. 0: none
     */
    uint64_t inputs_dim, inputs_vocab;
    /* The last so many layers have no keys and values, but read those of the last one before them that is of their kind. */
    uint64_t readers;
    bool readers_double; /* whose MLP is twice as wide */
    bool layer_norm;     /* they are LayerNorms, with biases; then before halves, of no head, and not from one */
    bool norm_unbiased;  /* but for the biases */
    bool
        parallel; /* the MLP reads what attention reads, and what both give is added to it; then norms before, and no experts */
    bool parallel_norm; /* by a norm of its own */
    bool ungated;       /* the MLP has two matrices, and the curve between them; then no experts */
    spw_curve curve;
    spw_gate gate;         /* of the MLP */
    bool embedding_scaled; /* times the square root of width, in the compute type */
    /* Granite's: what embeddings, each half of a layer and scores are multiplied by, and logits divided by; 0: by nothing, scores as below */
    double embedding_scale, half_scale, score_scale, logit_divisor;
    uint64_t query_scalar;       /* attention's scores are divided by its square root; 0: by head_dim's */
    double score_cap, logit_cap; /* what they, and the head's logits, come to at most, by a tanh; 0: no end */
    uint64_t experts, choices;   /* of each layer's MLP, and how many of them a row goes through; 0: one MLP for all */
    bool sum_to_one;             /* the weights of the chosen ones do */
    bool
        experts_paired; /* an expert's gate and up take turns in one matrix (in, out); it, down and the router have biases */
    bool
        experts_packed; /* an expert's gate and up are one matrix, and its matrices parts of two tensors of all experts */
    bool sigmoid; /* a row's weights are sigmoids, not a softmax, and choices go by them and a bias of each expert */
    /*
     * They are what experts' input is multiplied by, and choices have no bias (Llama 4's); an expert's gate is in front of its up in one matrix
     * (in, out), and an expert of all rows is besides
     */
    bool experts_weighed;
    bool softmax_biased; /* choices go by a softmax and such a bias */
    bool root;           /* with sigmoid: weights are roots of softplus (spw_routing_rule) */
    uint64_t hashed_layers[SPW_FULL_LAYERS_MAX / 64]; /* with a bit here a layer's choices are a table's, by tokens */
    uint64_t groups, group_choices;    /* of experts, and of how many of them choices may be; 0: one of all */
    double choice_scale;               /* weights are so many times as large; 0: once */
    double choice_least;               /* added to the sum of sigmoids that become one; 0: next to nothing */
    uint64_t dense_first, dense_width; /* the first so many layers have one MLP for all, of this width */
    uint64_t sparse_every;             /* and of the others all but every so many-th; 0: none of them */
    uint64_t shared_width;             /* of an expert that every row goes through besides; 0: none */
    uint64_t
        latent_width; /* of what the others read, made of a row, and of what they give, which is made as wide as a row; 0: rows themselves */
    bool shared_gated; /* by a gate of its own */
    /*
     * Experts are beside the MLP of all rows, whose width is dense_width, and read the same sum by a norm of their own, as their router does; each
     * weighs what a row gives it times a factor of its own. Norms of both; a factor's vector, and matrices with gate and up in one
     */
    bool experts_beside;
    uint64_t window, window_from; /* layers from window_from on read this many keys; window 0: no layer does */
    uint64_t full_every;          /* but every so many-th layer, which has no window; 0: none such */
    bool learned_places;          /* a table of places is added to embeddings, and no layer has rope */
    uint64_t places_before;       /* rows of that table in front of the first place's */
    spw_rope rope;
    bool sinks;          /* a logit of each head that no key has */
    bool sinks_windowed; /* but in layers without a window */
    /*
     * Linear attention by the gated delta rule, in all layers but each full_every-th: so many heads of values and, a divisor of that, of
     * queries and keys, with so many elements; the convolution's taps. linear_heads 0: in none
     * linear_mamba: they are Mamba-2's, and the layers with attention are those with a bit in full_layers, of the first SPW_FULL_LAYERS_MAX;
     * linear_bias: their convolution has a bias. linear_step: a step of theirs is at least so long
     */
    uint64_t linear_heads, linear_key_heads, linear_key_dim, linear_value_dim, linear_taps;
    bool linear_mamba, linear_bias;
    /* They are convolutions between two gates (LFM2's), by full_layers, too: of one head as wide as a row, and keys without elements */
    bool linear_conv;
    double linear_step;
    uint64_t full_layers[SPW_FULL_LAYERS_MAX / 64];
    /*
     * Each layer has both, Mamba-2's beside attention (Falcon-H1's): they read the same norm of its input, and their sum is added to that. unnormed: what Mamba-2
     * gives is not normed; norm_first: in front of its gate. scales: by what all of it is multiplied; 0: by nothing
     */
    bool linear_beside, linear_unnormed, linear_norm_first;
    struct {
        double attention_in, keys, attention_out, linear_in, linear_out, gate, mlp;
        double linear[5]; /* gates, values, keys, queries and steps of Mamba-2 */
    } scales;
    /*
     * A layer is one half alone: an MLP where it has a bit in mlp_layers, of experts where it has one in sparse_layers, too; elsewhere attention,
     * linear or not.
     */
    bool halves_apart;
    uint64_t mlp_layers[SPW_FULL_LAYERS_MAX / 64], sparse_layers[SPW_FULL_LAYERS_MAX / 64];
    bool linear_woven; /* q, k, v and gates of a key head are beside each other in one matrix, b and a in another */
    bool linear_apart; /* each of q, k and v has a matrix of its own, and taps */
    /*
     * And decays are those of each channel of the keys (Kimi Linear's), by full_layers, too; they, and gates, are made by two matrices with linear_key_dim
     * numbers between them, and a gate is a sigmoid
     */
    bool linear_channels;
    bool linear_before;   /* layers of linear attention have norms before their halves, wherever the others have them */
    double linear_most;   /* beta comes to at most; 0: 1 */
    double linear_eps;    /* of the norm of what linear attention gives; 0: norm_eps */
    bool attention_gated; /* behind a head's queries is a gate of their size; its sigmoid times what attention gives */
    bool gate_apart;      /* but all heads' gates are made by a matrix of their own */
    double rope_theta;    /* 0: no rotary positions */
    double rope_local_theta;                 /* of layers with a window, whose rope is then plain; 0: as the others' */
    double rope_factor, rope_low, rope_high; /* factor; low_freq_factor, high_freq_factor, or beta_slow, beta_fast */
    uint64_t rope_positions;                 /* original_max_position_embeddings */
    uint64_t rope_skip_every;                /* the last of each so many layers does without; 0: all have it */
    double rope_mscale, rope_all_dim;        /* yarn of latent attention, whose scores the latter enlarges; 0: none */
    double rope_growth; /* yarn: queries grow with the log of how many rope_positions are before them; 0: not */
    /*
     * Layers without rope: queries grow with the log of how many times so many places are before them and theirs, and by how much; chunk: layers with
     * rope read keys of their own so many places alone. 0: not
     */
    uint64_t still_places;
    double still_growth;
    uint64_t chunk;
    double rope_attention; /* yarn, long: cos and sin are so many times as large */
    bool rope_truncate;    /* yarn */
    double rope_part; /* of each head's elements, the first, that are turned; 0: all are. proportional: of its pairs */
    float rope_short[SPW_ROPE_FACTORS_MAX], rope_long[SPW_ROPE_FACTORS_MAX]; /* long: of each frequency */
} spw_model_config;

/* Adapters of low rank beside linear weights. */
typedef struct spw_lora {
    uint64_t rank; /* 0: none */
    double alpha;  /* 0: rank */
    double dropout;
} spw_lora;

struct spw_model {
    spw_model_config config;
    spw_lora lora;
    uint32_t param_count, block_count, params_max, blocks_max;
    char fault[240]; /* the first mistake in putting it together; "": none */
    spw_param *params;
    spw_block *blocks;
};

/*
 * spw_model_build - blocks and parameters of a built-in family.
 * Errors  SPW_ECONFIG naming the key: sizes that are 0 or do not divide.
 */
spw_status spw_model_build(spw_model **out, const spw_model_config *config, spw_error *err);
/*
 * An empty chain for user blocks: config.width and config.vocab must be set. At most so many parameters and blocks are added below,
 * which return no status: what is too much is left out, and no engine takes such a model (spw_model_check).
 */
spw_status spw_model_create(spw_model **out, const spw_model_config *config, uint32_t params_max, uint32_t blocks_max,
                            spw_error *err);
void spw_model_destroy(spw_model *model);
/* Returns the parameter's id; names are unique. */
uint32_t spw_model_add_param(spw_model *model, const char *name, uint64_t rows, uint64_t cols, uint32_t ndim,
                             spw_init init, float std);
spw_block *spw_model_add_block(spw_model *model, const char *name, spw_forward_fn forward);
/*
 * The next of the block's params is this parameter. The first block to use one owns it; for the others it is an external
 * parameter, whose weights come and whose gradient goes as if it were their own.
 */
void spw_block_use(spw_model *model, spw_block *block, uint32_t param_id);
uint32_t spw_model_find_param(const spw_model *model, const char *name); /* its id; UINT32_MAX: there is none */
/*
 * Whether an engine takes the model, which asks this first. SPW_EINVAL with what is wrong: more of something than there is room for, a
 * parameter that is not there, one that no block uses, a name twice.
 */
spw_status spw_model_check(const spw_model *model, spw_error *err);
/*
 * spw_model_add_lora - freezes all parameters and puts adapters beside the linear weights that targets match.
 *   targets  (count) globs on the linear's name, without ".weight" ("model.layers.0.self_attn.q_proj"), or on what is left
 *            of it behind any of its dots ("q_proj"). A router's weight is only matched by one that ends in its own name ("gate"), and
 *            by none where it is a bare parameter in transformers 4 (gpt_oss, glm4_moe, deepseek_v2, deepseek_v3), or has no other class (qwen3_5_moe_text).
 *            An indexer's (spw_param.of_indexer) has none
 * Computes  y = x W^T + alpha / rank * drop(x) A^T B^T with A (rank, in) and B (out, rank), whatever the order of W's own
 *           dimensions. A is drawn from a normal distribution of standard deviation 1 / sqrt(3 in), which is the one of
 *           the uniform distribution in +- 1 / sqrt(in); B is 0, so that the model is at first the one without adapters.
 *   fused    (fused_count) the same of names of experts' tensors (spw_fused): "mlp.experts.gate_up_proj", or "down_proj"
 * Names     base_model.model.<linear>.lora_A.weight and .lora_B.weight, as in the files of peft
 * Errors    SPW_ECONFIG naming a target that matches no linear weight of a layer, or no tensor of experts, for a rank of 0, a dropout
 *           outside [0, 1), or one of adapters beside experts, which peft has none of, and a second call; SPW_ENOMEM. Embeddings and
 *           heads cannot have adapters, nor can blocks of one's own.
 * Source    Hu et al. 2021 (2106.09685)
 */
spw_status spw_model_add_lora(spw_model *model, const spw_lora *lora, const char *const *targets, uint32_t count,
                              const char *const *fused, uint32_t fused_count, spw_error *err);
/* The factor of an adapter's output. */
float spw_lora_scale(const spw_lora *lora);
/*
 * spw_model_freeze - marks parameters whose name matches a glob (fnmatch, no flags) as frozen: engines made for the model
 * give them no gradient and no record, and their weights never change. Returns how many match.
 */
uint32_t spw_model_freeze(spw_model *model, const char *glob);
/* Whether this is a dense linear weight of a layer of a family's: not an expert's, a router's or an adapter's. */
bool spw_model_is_dense(const spw_model *model, const spw_block *block, uint32_t param_id);
/*
 * Whether a matrix has a row for each token and is used by families' embeddings and heads alone, which take it in pieces of its rows too
 * (spw_value.piece_rows). piece_rows: rows of each of the fewest equal pieces, multiples of 64, that have at most so many, but of 1024 pieces at most; 0: it stays whole.
 */
bool spw_model_by_vocab(const spw_model *model, uint32_t param_id);
uint64_t spw_model_piece_rows(const spw_model_config *config, uint64_t most);
/* Whether the block is a family's embedding: its backward pass reads none of its weights, nor what forward gave. */
bool spw_model_is_embedding(const spw_model *model, uint32_t block_idx);
/* Elements of all parameters, each counted once. */
uint64_t spw_model_elems(const spw_model *model);
/* Blocks that others may reuse in their own chains. */
spw_value *spw_gpt2_embed_forward(const spw_call *call, spw_value *x);
spw_value *spw_gpt2_layer_forward(const spw_call *call, spw_value *x);
spw_value *spw_gpt2_head_forward(const spw_call *call, spw_value *x);
spw_value *spw_llama_embed_forward(const spw_call *call, spw_value *x);
spw_value *spw_llama_layer_forward(const spw_call *call, spw_value *x);
spw_value *spw_llama_head_forward(const spw_call *call, spw_value *x);
/* Elements of a row between blocks. */
uint64_t spw_model_row_cols(const spw_model_config *config);
/* How many rows the keys in front of this layer's own stand for, 0: it has none; whether their windows overlap, and a layer's choices are a table's. */
uint64_t spw_model_front_rate(const spw_model_config *config, uint64_t layer_idx);
bool spw_model_front_overlaps(const spw_model_config *config, uint64_t layer_idx);
bool spw_model_is_hashed(const spw_model_config *config, uint64_t layer_idx);
/* How many keys an indexer chooses of, of so many positions. */
uint64_t spw_model_index_keys(const spw_model_config *config, uint64_t positions);
/* Whether this layer has an indexer of its own, or takes what the next one before it chose; whether it leaves that to the next one. */
bool spw_model_has_indexer(const spw_model_config *config, uint64_t layer_idx);
bool spw_model_lends_choice(const spw_model_config *config, uint64_t layer_idx);
/* Whether something reads what experts give, so that it is more than added to a row. */
bool spw_model_reads_experts(const spw_model_config *config);
/* The elements that an expert reads of a row, and gives. */
uint64_t spw_model_expert_cols(const spw_model_config *config);
/* How many experts this layer has; 0: one MLP for all. */
uint64_t spw_model_experts(const spw_model_config *config, uint64_t layer_idx);
/* SPW_TERMS numbers that bf16 has and whose sum, first ones first, is x; and the sums of count times as many. sums may be terms. */
void spw_terms_split(float x, float *terms);
void spw_terms_sum(float *sums, const float *terms, uint64_t count);
/* The layer whose keys and values this one reads: itself, or an earlier one; and whether a later one reads its. */
uint64_t spw_model_keys_of(const spw_model_config *config, uint64_t layer_idx);
bool spw_model_lends_keys(const spw_model_config *config, uint64_t layer_idx);
/*
 * What blocks leave for later ones: embeddings of all layers, of tokens alone and as layers read them, keys and values of layers with a window
 * and of those without. How many columns each has (0: none), the block that leaves it, and the last one that reads all of its columns.
 */
enum spw_sides {
    SPW_SIDE_TOKENS,
    SPW_SIDE_INPUTS,
    SPW_SIDE_KEYS,
    SPW_SIDE_VALUES,
    SPW_SIDE_FULL_KEYS,
    SPW_SIDE_FULL_VALUES,
    SPW_SIDES_MAX
};
uint64_t spw_model_side_cols(const spw_model_config *config, uint32_t side);
uint32_t spw_model_side_block(const spw_model_config *config, uint32_t side);
uint32_t spw_model_side_reader(const spw_model_config *config, uint32_t side);
/* Width of the MLP that all rows of this layer go through. */
uint64_t spw_model_dense_width(const spw_model_config *config, uint64_t layer_idx);
/* Whether this layer turns its queries and keys, where any does. */
bool spw_model_has_rope(const spw_model_config *config, uint64_t layer_idx);
/* Whether this layer has attention, linear or not, and whether it has an MLP, of experts or not: nearly all have both. */
bool spw_model_attends(const spw_model_config *config, uint64_t layer_idx);
bool spw_model_has_mlp(const spw_model_config *config, uint64_t layer_idx);
/* Whether this layer has linear attention in place of attention. */
bool spw_model_is_linear(const spw_model_config *config, uint64_t layer_idx);
/* Whether it has some, in place of attention or beside it. */
bool spw_model_has_linear(const spw_model_config *config, uint64_t layer_idx);
/* Where this layer has norms. */
spw_norms spw_model_norms(const spw_model_config *config, uint64_t layer_idx);
/* Elements of a row's queries, keys and values there, which the convolution goes over. */
uint64_t spw_model_linear_channels(const spw_model_config *config);
/* Whether this layer's heads have sinks. */
bool spw_model_has_sinks(const spw_model_config *config, uint64_t layer_idx);
/* How many keys a row of this layer reads at most; 0: all before it. */
uint64_t spw_model_window(const spw_model_config *config, uint64_t layer_idx);
/* The places of which a row of this layer reads its own; 0: all are one chunk. */
uint64_t spw_model_chunk(const spw_model_config *config, uint64_t layer_idx);
/* Elements of a head of this layer's queries and keys, and of its values; how many heads its keys and values have. */
uint64_t spw_model_head_dim(const spw_model_config *config, uint64_t layer_idx);
uint64_t spw_model_value_dim(const spw_model_config *config, uint64_t layer_idx);
uint64_t spw_model_kv_heads(const spw_model_config *config, uint64_t layer_idx);
/* What the products of queries and keys are multiplied by. Source of the factor for longer texts: Peng et al. 2023 (2309.00071, 3.4). */
float spw_model_score_scale(const spw_model_config *config);
/* How many elements of a head are turned by a table, and room for each of the model's tables. */
uint64_t spw_model_rope_width(const spw_model_config *config, uint64_t table_idx);
uint64_t spw_model_rope_elems(const spw_model_config *config, uint64_t T);
/* How many rope tables the model's layers take, and which one this layer does, and its queries. */
uint64_t spw_model_rope_tables(const spw_model_config *config);
uint64_t spw_model_rope_table(const spw_model_config *config, uint64_t layer_idx);
uint64_t spw_model_query_table(const spw_model_config *config, uint64_t layer_idx);
/*
 * spw_rope_table - cos and sin for T positions into out (T, R) in host memory, R being the table's width; table_idx 1: of
 *           layers with a window, or of DeepSeek-V4's without keys in front, whose other tables are 0, and 2 and 3 of keys for few and many rows; or of queries that grow, by 1 + rope_growth log(1 + floor(t / rope_positions)), and with
 *           latent attention all of whose elements grow: that and 0; or of those that grow where nothing is turned:
 *           1 + still_growth log(1 + floor((t + 1) / still_places)) and 0.
 * Computes  frequency f[j] = theta^(-2j/R). linear: f / factor. llama3, with the wavelength w = 2 pi / f and M original
 *           positions: f where w < M / high, f / factor where w > M / low, and between them the mean of both, f with the
 *           weight (M / w - low) / (high - low). yarn: f up to the place j that turns high times over M positions, f / factor
 *           from the one that turns low times on, and between them the mean of both by j; with truncate the places are rounded
 *           outwards; cos and sin times rope_attention. proportional: f / factor, but 0 from j = rope_part R / 2 on. long: f / rope_long[j] where T is above rope_positions, else f / rope_short[j],
 *           cos and sin as in yarn. Frequencies and angles are rounded to fp32 as in the usual implementation.
 * Source    Su et al. 2021 (RoFormer); linear: Chen et al. 2023 (2306.15595); llama3: the model's config.json; yarn: Peng et
 *           al. 2023 (2309.00071); long: Ding et al. 2024 (2402.13753).
 */
void spw_rope_table(const spw_model_config *config, uint64_t table_idx, uint64_t T, float *out);

#ifdef __cplusplus
}
#endif
#endif
