/* What the files of the plan share: sizes of a chunk's copies, and what lies where. Pure. */
#ifndef SPW_PLAN_INTERNAL_H
#define SPW_PLAN_INTERNAL_H

#include "runtime_internal.h"

static inline uint64_t
plan_weights(const plan_input *in, const spw_store_chunk *c)
{
    return spw__layout_weight_bytes(in->layout, c, in->weight_bytes);
}

/* Inference has no records, frozen units have none. */
static inline bool
plan_has_record(const plan_input *in, const spw_store_chunk *c)
{
    return !in->inference && in->layout->units[c->unit_idx].trainable;
}

static inline uint64_t
plan_record(const plan_input *in, const spw_store_chunk *c)
{
    return c->elems / 32 * in->record_bytes_32[in->layout->units[c->unit_idx].whole];
}

/* Memory for it: the store gives every record whole pages. */
static inline uint64_t
plan_record_room(const plan_input *in, const spw_store_chunk *c)
{
    return spw_round_up(plan_record(in, c), 4096);
}

/* Of a chunk's gradient, if it waits on nvme. */
static inline uint64_t
plan_spilled(const plan_input *in, const spw_store_chunk *c)
{
    return in->layout->units[c->unit_idx].spills ? c->elems * in->grad_bytes : 0;
}

/* Weights of before, where they lie in memory: they go out behind the record on nvme. */
static inline uint64_t
plan_undo(const plan_input *in, const spw_store_chunk *c)
{
    return c->spare && c->record_tier == SPW_TIER_NVME && c->weight_tier != SPW_TIER_NVME
               ? spw_round_up(plan_weights(in, c), 4096)
               : 0;
}

/* Behind its record in a slot: a gradient that comes back, or weights of before, for what is updated ahead has its gradient in memory. */
static inline uint64_t
plan_behind(const plan_input *in, const spw_store_chunk *c)
{
    const uint64_t grad = plan_spilled(in, c), undo = plan_undo(in, c);
    return grad > undo ? grad : undo;
}

/* Of the chunk's weights and record, in swap. */
static inline uint64_t
plan_in_swap(const plan_input *in, const spw_store_chunk *c)
{
    uint64_t bytes = 0;
    if (c->weight_tier == SPW_TIER_NVME && c->piece_count == 0)
        bytes += spw_round_up(plan_weights(in, c), 4096);
    if (c->record_tier == SPW_TIER_NVME && plan_has_record(in, c))
        bytes += plan_record_room(in, c) + plan_undo(in, c);
    return bytes;
}

/* Of a chunk's log, if it may be updated ahead in host memory. */
static inline uint64_t
plan_log(const plan_input *in, const spw_store_chunk *c)
{
    return c->record_tier == SPW_TIER_HOST
               ? spw_round_up(c->elems / 32 * in->log_bytes_32[c->weight_tier != SPW_TIER_NVME], 4096)
               : 0;
}

static inline bool
plan_on_nvme(const spw_config *c)
{
    return c->zero.offload_param == SPW_TIER_NVME || c->zero.offload_optimizer == SPW_TIER_NVME;
}

/* Of slots for weights and for records, with host_memory auto. */
enum {
    PLAN_USEFUL_WEIGHTS = 64 << 20,
    PLAN_USEFUL_RECORDS = 256 << 20,
    PLAN_USEFUL_BYTES = PLAN_USEFUL_WEIGHTS + PLAN_USEFUL_RECORDS
};

/* Bytes by tier; padding: what records leave unused at the ends of their pages. */
typedef struct plan_places {
    uint64_t weights[SPW_TIER_COUNT], records[SPW_TIER_COUNT], padding[SPW_TIER_COUNT];
    uint64_t updated_there; /* elements: records on a device that updates them */
    uint64_t spilled;       /* elements: of units whose gradients wait on nvme */
} plan_places;

/* What waits in host memory for its update. */
static inline uint64_t
plan_grad_host(const spw_plan *p, const plan_input *in, const plan_places *placed)
{
    return in->inference ? 0 : (p->trained - placed->updated_there - placed->spilled) * in->grad_bytes;
}
plan_places spw__plan_count(const plan_input *in);

/*
 * plan_device.c. Where the configuration puts everything, before memory that is left is given away: of the first units, up to
 * `first_count`, what is trained has all its state on the device. And what spw__plan_count() would say then.
 */
void spw__plan_place_all(const plan_input *in, uint32_t first_count);
plan_places spw__plan_count_placed(const plan_input *in, uint32_t first_count);
/* The least first_count with which the host updates no more than zero_optimization.offload_optimizer.ratio of the elements. */
uint32_t spw__plan_first_count(const plan_input *in);
/*
 * Fills in what the plan says of the device, and of how many first units the state is to be there (spw__plan_place_all()). Errors  SPW_ENOFIT, with
 * all fields filled; least_bytes of the plan is left to spw__plan_device_least().
 */
spw_status spw__plan_device(spw_plan *plan, const plan_input *in, uint32_t *first_count, spw_error *err);
/* All that is gathered has room, or the block in use, the next and the last. */
bool spw__plan_fetches_ahead(const spw_plan *plan, const plan_input *in, uint32_t first_count);
uint64_t spw__plan_device_least(const spw_plan *plan, const plan_input *in, uint32_t first_count);
/* What then is left of its memory keeps what lies between checkpoints. */
void spw__plan_tapes(spw_plan *plan, const plan_input *in);
/* And what that leaves of it, with device_memory auto, more gathered units, which then need not come again. */
void spw__plan_gather_more(spw_plan *plan, const plan_input *in, uint32_t first_count);
/* Of what lies between checkpoints: kept, and not computed again. */
double spw__plan_kept_share(const spw_plan *plan, const plan_input *in);

/*
 * plan_host.c. Slots, and what of the state on nvme host memory holds. placed: what lies where, before and after. Errors  SPW_ENOFIT: the
 * budget does not hold what must be there; lack and least_bytes say what would.
 */
spw_status spw__plan_host(spw_plan *plan, const plan_input *in, plan_places *placed, spw_error *err);
/* Then: logs for records in memory, of what nothing else wants. */
void spw__plan_logs(const spw_plan *plan, const plan_input *in, const plan_places *placed);
/* Bytes that all of the process may have in host memory. */
uint64_t spw__plan_host_room(const spw_plan *plan, const plan_input *in);

/* plan_paths.c. First: the list of paths; last: which of them each chunk and checkpoint goes to. Errors  SPW_ENOFIT: limits of paths. */
void spw__plan_paths(spw_plan *plan, const plan_input *in);
spw_status spw__plan_spread(spw_plan *plan, const plan_input *in, spw_error *err);
/* For second places too, where they were not asked for: a tenth of what is there is left. */
bool spw__plan_disks_have_room(const spw_plan *plan, const plan_input *in);

/* plan_traffic.c. Updates need not wait for the norm. */
bool spw__plan_early_gate(const plan_input *in);
uint32_t spw__plan_records_on_nvme(const plan_input *in, uint32_t unit_idx); /* chunks */
/* Of matrices that Muon takes whole, elements: what this rank has, and what crosses the link between the halves of their updates. */
typedef struct plan_whole {
    uint64_t own, h2d, d2h;
} plan_whole;
plan_whole spw__plan_whole(const plan_input *in);
/* A step of the plan so far, with disks of that pace. */
spw_status spw__plan_rehearse(const spw_plan *plan, const plan_input *in, double pace, rehearsal *out, spw_error *err);
/* Fills in what a step moves. */
spw_status spw__plan_traffic(spw_plan *plan, const plan_input *in, spw_error *err);

#endif
