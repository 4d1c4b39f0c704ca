/* Inside runtime: what the planner is told and what engine and checkpoints share. */
#ifndef SPW_RUNTIME_INTERNAL_H
#define SPW_RUNTIME_INTERNAL_H

#include "spw_engine.h"

/* Measured or derived before planning; plain numbers. */
typedef struct plan_input {
    const spw_config *config;
    spw_layout *layout; /* its chunks get their tiers */
    bool inference;
    uint32_t weight_bytes, grad_bytes, compute_bytes;
    uint32_t record_bytes_32;     /* per 32 elements */
    uint64_t largest_block_bytes; /* on the device: all units one block uses */
    uint64_t grads_device, activations_device, arena_device, batch_device;
    uint64_t process_bytes; /* resident before the engine takes anything */
} plan_input;
/* Errors  SPW_ENOFIT with the budget that would do; plan is filled all the same. */
spw_status spw__plan_make(spw_plan *plan, const plan_input *in, spw_error *err);

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

spw_state_format spw__engine_format(const spw_engine *e);
const spw_optimizer *spw__engine_optimizer(const spw_engine *e);
const spw_config *spw__engine_config(const spw_engine *e);

#endif
