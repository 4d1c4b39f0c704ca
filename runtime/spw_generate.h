/*
 * spw_generate.h - weights from anywhere, and drawing tokens from them with a cache of keys and values.
 *
 * A generator holds sequences in slots. Tokens are fed to a slot, a forward pass runs what was fed to all of them, then each has
 * the logits of its next token:
 *
 *   spw_weights_find -> spw_model_build -> spw_generator_create -> spw_weights_load
 *   spw_generator_feed (a prompt) -> spw_generator_forward -> spw_generator_draw -> spw_generator_feed (the token) -> ...
 *
 * Weights are streamed by the store, once a forward pass for all sequences. Nothing is padded: a sequence's logits have the same
 * bits alone and beside others, in any slot, with any number of threads and wherever the weights live.
 */
#ifndef SPW_GENERATE_H
#define SPW_GENERATE_H

#include "spw_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- weights */

enum { SPW_END_TOKENS_MAX = 64 };

/* A checkpoint, or a Hugging Face folder. Large: not for the stack. */
typedef struct spw_weights {
    char path[SPW_PATH_BYTES]; /* the folder itself; of several checkpoints the newest complete one */
    bool is_checkpoint;
    char from[SPW_WEIGHTS_BYTES]; /* for spw_engine_options: the file or folder that holds them */
    spw_config config; /* its model, weights in host memory, budgets auto: the caller may place them elsewhere */
    int32_t end_tokens[SPW_END_TOKENS_MAX]; /* what ends a text: eos_token_id of its JSON files */
    uint32_t end_token_count;
    char encoder[64]; /* what made the tokens that a checkpoint was trained on (spw_data_encoder); "": not known */
} spw_weights;

/*
 * spw_weights_find - what lies at path: a checkpoint, a folder of checkpoints, or a folder with config.json and safetensors.
 * The state format is the checkpoint's; of a folder mixed (bf16 weights) when every tensor is bf16, else fp32: exact either
 * way. Weights in 8-bit floats count as bf16, and products with their scales are rounded to it; so are vectors of linear attention. Codes of a
 * folder that can be kept are (frozen_codes is "published", for a model whose parameters are frozen), also of one that a checkpoint has adapters beside.
 * Errors  those of spw_checkpoint_find(), spw_hf_config_load() and spw_hf_reader_open(), naming the file.
 */
spw_status spw_weights_find(spw_weights *out, const char *path, spw_error *err);
/* Writes them to an engine made for inference, of this model, checking digests where there are some. */
spw_status spw_weights_load(const spw_weights *weights, spw_engine *engine, spw_error *err);

/* ---------------------------------------------------------------- the next token */

typedef struct spw_sampling {
    double temperature; /* 0: the likeliest token */
    uint64_t top_k;     /* draw among the k likeliest; 0: all */
    double top_p;       /* of those, among the fewest whose probabilities add up to p; 1: all */
    uint64_t seed;
} spw_sampling;

typedef struct spw_candidate {
    float logit;
    int32_t id;
} spw_candidate;
/*
 * spw_sample - one token from logits (vocab) by a number of [0, 1).
 *   room  (vocab) scratch
 *
 * Computes  probabilities softmax(logit / temperature); the k likeliest; of these, renormalised, the shortest run from the
 *           likeliest down that reaches top_p, never none; then the one at uniform. Equal logits stand in the order of ids.
 *           Infinite logits are the likeliest, one at -infinity is never drawn.
 * Returns   the token; -1 if a logit is NaN or all are -infinity.
 * Threads   any.
 * Source    top-p: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration.
 */
int32_t spw_sample(const float *logits, uint64_t vocab, const spw_sampling *how, double uniform, spw_candidate *room);

/* ---------------------------------------------------------------- generator */

typedef struct spw_generator spw_generator; /* of one thread at a time */

typedef struct spw_generator_options {
    const spw_config *config; /* tiers, budgets, device and threads; read during create only */
    const spw_model *model;   /* borrowed; outlives the generator */
    uint32_t slots;           /* sequences at once */
    uint64_t positions;       /* tokens that one can have, prompt included; at most the model's; longrope's T */
    uint64_t piece;           /* tokens of a prompt that a forward pass takes, longer ones need several; 0: all */
    const char *weights_from; /* these three as of spw_engine_options */
    const volatile int *stop;
    spw_plan *plan_out;
} spw_generator_options;

/*
 * spw_generator_create - plans and takes memory; weights are undefined until they are loaded to its engine.
 * Memory  besides what an engine for inference takes: on the device, 2 x layers x slots x positions x (key/value heads x head
 *         size) x 4 bytes for keys and values, and slots x positions x 4 bytes x the elements of an indexer's head for each layer with one if positions are
 *         more than it chooses; of layers with linear attention slots x (value heads x key size x value size + (taps - 1) x
 *         channels) x 4 instead; of keys that are values too slots x (positions + those of several positions) x head size x 4, and slots x as many rows as two
 *         of these stand for, at most, of what they are made of; 8 bytes x slots x piece x width between two blocks; all are in the plan.
 * Errors  SPW_EINVAL for more positions than the model has; SPW_ENOFIT and others of spw_engine_create().
 */
spw_status spw_generator_create(spw_generator **out, const spw_generator_options *options, spw_error *err);
void spw_generator_destroy(spw_generator *g); /* NULL is fine */
/* For spw_weights_load(), plan and counters; it is the generator's. */
spw_engine *spw_generator_engine(spw_generator *g);

/*
 * spw_generator_feed - appends tokens to a slot's sequence; the next forward passes run them.
 * Errors  SPW_EINVAL for no such slot, a token outside the vocabulary, more tokens than positions; nothing was appended.
 */
spw_status spw_generator_feed(spw_generator *g, uint32_t slot, const int32_t *tokens, uint64_t count, spw_error *err);
/* Forgets a slot's sequence: the next feed begins another one. */
void spw_generator_clear(spw_generator *g, uint32_t slot);
/* Tokens fed to the slot since it was cleared. */
uint64_t spw_generator_length(const spw_generator *g, uint32_t slot);
/*
 * spw_generator_forward - one pass over the blocks for the next piece of every slot that was fed. Nothing to do is SPW_OK.
 * Errors  those of the store; the generator can only be destroyed after one, and says so.
 * Cost    every weight that is not in device memory is moved there once, whatever the number of slots; so each is read from
 *         nvme at most once, but for a tied head, whose first pass may read it again.
 */
spw_status spw_generator_forward(spw_generator *g, spw_error *err);
/* (V) of the token after the last one fed, until the next forward pass or clear; NULL: there are tokens it has not run. */
const float *spw_generator_logits(const spw_generator *g, uint32_t slot);
/*
 * spw_generator_draw - the next token of a slot, which is not fed by this.
 * Computes  spw_sample() with 53 bits of Philox(seed, checksum of the slot's tokens, their number): the same seed and tokens
 *           give the same draw, whatever else runs and whenever.
 * Errors    SPW_EINVAL without logits; SPW_ENONFINITE when spw_sample() finds none.
 */
spw_status spw_generator_draw(spw_generator *g, uint32_t slot, const spw_sampling *how, int32_t *token, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
