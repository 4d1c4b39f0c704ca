/* Inside runtime: what the planner is told and what engine and checkpoints share. */
#ifndef SPW_RUNTIME_INTERNAL_H
#define SPW_RUNTIME_INTERNAL_H

#include "spw_engine.h"

/* Measured or derived before planning; plain numbers. */
typedef struct plan_input {
    const spw_config *config;
    spw_layout *layout; /* its chunks get their tiers */
    bool inference;
    uint32_t weight_bytes, record_bytes, grad_bytes, compute_bytes;
    uint64_t largest_block_bytes; /* on the device: all units one block uses */
    uint64_t grads_device, activations_device, arena_device, batch_device;
    uint64_t process_bytes; /* resident before the engine takes anything */
} plan_input;
/* Errors  SPW_ENOFIT with the budget that would do; plan is filled all the same. */
spw_status spw__plan_make(spw_plan *plan, const plan_input *in, spw_error *err);

spw_state_format spw__engine_format(const spw_engine *e);
const spw_config *spw__engine_config(const spw_engine *e);

#endif
