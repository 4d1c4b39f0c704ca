/*
 * spw_plan.h - the plan: where every byte lives, what each link moves in a step, how long that takes, and why.
 *
 * Deciding is kept apart from doing: everything here but spw_calibrate is a function of plain data. A plan comes from
 * spw_engine_create (with plan_only nothing is taken), rates from spw_calibrate or from a test.
 */
#ifndef SPW_PLAN_H
#define SPW_PLAN_H

#include "spw_config.h"
#include "spw_gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- the plan */

/* Something that the configuration left open, what the planner took, and why. */
typedef struct spw_decision {
    char name[64], value[64], reason[200];
} spw_decision;
enum { SPW_DECISIONS_MAX = 30 + 2 * SPW_PATHS_MAX }; /* each path may have two */

/* How many times over the store could update everything while a step computes. */
enum { SPW_PACE_COUNT = 7, SPW_PACE_DEFAULT = 4 /* where rates are not known */ };
extern const double spw_paces[SPW_PACE_COUNT]; /* ascending: 0, 1/2, 1, 2, 4, 8, 16 */

/* Bytes of one steady step; evaluations and checkpoints come on top. */
typedef struct spw_traffic {
    uint64_t nvme_read, nvme_write, h2d, d2h;
    uint64_t path_read[SPW_PATHS_MAX], path_write[SPW_PATHS_MAX];
} spw_traffic;

/* Bytes that a rank receives from the others, weights or gradients, in one steady step, or the mean of several; far: of them, from other hosts. */
typedef struct spw_received {
    uint64_t all, far;
} spw_received;

/* What a plan that does not fit has too little of. */
typedef enum spw_lack {
    SPW_LACK_NOTHING,
    SPW_LACK_HOST, /* spillway.host_memory */
    SPW_LACK_ROOM, /* what the machine has left, whatever the budgets say */
    SPW_LACK_DEVICE,
    SPW_LACK_DISK
} spw_lack;

typedef struct spw_plan {
    spw_lack lack;
    uint64_t least_bytes; /* host, device: the budget that would do; room: host memory that is needed */
    uint64_t weight_host, weight_device, weight_nvme, record_host, record_device, record_nvme; /* bytes */
    uint64_t weight_in_place; /* of weight_nvme: frozen, read from the files they come from and not in swap */
    uint64_t grad_host, slots_host, process_host, tables_host, host_bytes, host_budget;
    uint64_t tables_arena; /* of tables_host: what lies in the arena */
    uint64_t wire_host;    /* staging between ranks whose devices the host cannot address, or codes on their way */
    uint64_t kept_host;    /* between ranks: slices of gathered weights, to gather them again */
    uint64_t grad_nvme; /* gradients that wait for their updates there; windows they pass through are in slots_host */
    uint32_t grad_windows;
    uint64_t
        grad_path[SPW_PATHS_MAX]; /* of grad_nvme: written and read again in a step whose updates wait for the norm */
    bool late;                    /* updates are made beside the next backward pass */
    bool ahead;                   /* updates may begin before the norm is known (spw_offload.h) */
    bool undo_room;               /* record slots have room for the weights of before */
    uint64_t spare_nvme, spare_host; /* second places of what is updated so; in memory logs that take it back */
    uint64_t spared_host;            /* of the records in host memory: those that have one */
    uint64_t undo_write;             /* weights of before, in memory, that go to nvme in a step if all of it is */
    uint64_t grad_device;            /* gradients that stay on the device; grads_device is where they are made */
    bool single_grad;                /* one at a time: it leaves the device before the next is begun */
    uint64_t parts_device;           /* between ranks: this rank's parts of units on their way to be gathered */
    uint64_t cache_device, grads_device, activations_device, arena_device, batch_device, padding_device, device_bytes,
        device_budget;
    uint64_t tapes_device; /* what blocks computed between two checkpoints, kept for the backward pass */
    uint32_t tape_count;   /* so many micro-batches of blocks, the last ones; the others are computed again */
    uint64_t activations_host, activations_nvme; /* with staging buffers; with the padding to whole pages */
    bool device_apart;                           /* the device has memory, and computes, of its own: not the host's */
    uint32_t weight_slots, record_slots, path_count;
    /* Checkpoints of activations by tier, and the buffers that those off the device pass through (spw_offload.h). */
    uint32_t activation_count[SPW_TIER_COUNT], activation_working, activation_staging;
    const char *paths[SPW_PATHS_MAX];
    uint64_t path_bytes[SPW_PATHS_MAX], path_limit[SPW_PATHS_MAX]; /* of the swap files; limit 0: none */
    double path_weight[SPW_PATHS_MAX];
    uint32_t cpu_ranks;                 /* of this host, that share this one's processors, it among them; 0 is 1 */
    uint32_t device_ranks;              /* and that share this one's device, if it is apart; 0 is 1 */
    uint32_t path_ranks[SPW_PATHS_MAX]; /* of this host, that swap to its disk, this one among them; 0 is 1 */
    /* One step. */
    uint64_t params, elems, tokens;      /* real and padded parameters; tokens of all micro-batches and ranks */
    uint64_t trained;                    /* of elems: with gradient and record */
    uint64_t trained_device;             /* of them: updated on the device, which their gradients do not leave */
    bool gated;                          /* updates wait for the gradient's norm, but for those ahead of it */
    bool clips;                          /* and a norm above a limit changes them */
    uint32_t passes;                     /* forward and backward; 0 is 1 */
    double flops;                        /* that the device is to do */
    double model_flops;                  /* without what is computed again: what a model's utilisation counts */
    double orthogonal_flops;             /* of flops, by Muon, before the next forward pass uses what came of it */
    double attention_flops;              /* of flops, by attention, which is slower than products */
    spw_traffic traffic[SPW_PACE_COUNT]; /* by the pace of updates: how far they run ahead changes what is read twice */
    uint32_t ranks, local_ranks;         /* of the world; of them, those on this machine */
    bool linked;                         /* their devices reach each other without the host */
    const spw_gpu_spec *gpu;             /* that it is for, though it may not be here; NULL: the device that is */
    spw_received gathered, reduced;      /* weights, gradients */
    spw_received traded;         /* what attention of shared sequences takes of others (sequence_parallel_size) */
    spw_received gathered_first; /* of gathered: in the first forward pass, when updates have changed them */
    uint32_t decision_count;
    spw_decision decisions[SPW_DECISIONS_MAX];
} spw_plan;
/* The plan as a table for people; calls line(ctx, text). */
void spw_plan_print(const spw_plan *plan, void (*line)(void *ctx, const char *text), void *ctx);

/* ---------------------------------------------------------------- rates and predicted time */

/* How ranks reach each other: those of a host; those of other hosts, over what the host's ranks share. */
typedef enum spw_rank_way { SPW_WAY_NEAR, SPW_WAY_FAR, SPW_WAY_COUNT } spw_rank_way;
/* What for: weights that are gathered, gradients that are summed up, as many bytes of each at once. */
typedef enum spw_rank_use { SPW_USE_GATHER, SPW_USE_REDUCE, SPW_USE_BOTH, SPW_USE_COUNT } spw_rank_use;
const char *spw_rank_way_name(spw_rank_way way); /* "ranks", "network" */
const char *spw_rank_use_name(spw_rank_use use); /* "gather", "reduce", "both" */

/* Calibrated, of whole disks, whoever else uses them; 0: unknown. Paths are in the plan's order. */
typedef struct spw_rates {
    double nvme_read[SPW_PATHS_MAX], nvme_write[SPW_PATHS_MAX]; /* bytes/s of one direction alone */
    double nvme_mixed[SPW_PATHS_MAX];                           /* bytes/s, as much of each at once */
    uint64_t device_id[SPW_PATHS_MAX];                          /* paths with the same share their device's rate */
    double h2d, d2h;                                            /* bytes/s on the host's side */
    double optimizer;                                           /* parameters/s, all threads */
    double flops;                                               /* floating point operations/s */
    double orthogonal;                                          /* the same of spw_gpu_orthogonalize() */
    double attention;      /* the same of attention, forward and twice that backward; 0: as of products */
    uint32_t shared_cores; /* compute, optimizer and copies take turns on so many cores (cpu device); 0: they do not */
    uint32_t compute_threads, optimizer_threads; /* that their rates are of, where fewer than cores; 0: as many */
    /* Bytes/s that a rank receives from those of its host, all at once; that a host's ranks together receive from other hosts. */
    double received[SPW_WAY_COUNT][SPW_USE_COUNT];
    double received_cpu[SPW_WAY_COUNT]; /* bytes that a rank receives in a second of one processor */
} spw_rates;

typedef enum spw_resource {
    SPW_RESOURCE_COMPUTE,
    SPW_RESOURCE_OPTIMIZER,
    SPW_RESOURCE_H2D,
    SPW_RESOURCE_D2H,
    SPW_RESOURCE_CPU, /* compute, optimizer and copies where they share cores */
    SPW_RESOURCE_NVME_READ,
    SPW_RESOURCE_NVME_WRITE,
    SPW_RESOURCE_NVME,    /* both directions of a device together */
    SPW_RESOURCE_RANKS,   /* what comes from ranks of this host */
    SPW_RESOURCE_NETWORK, /* what comes from others to all ranks of this host */
    SPW_RESOURCE_COUNT
} spw_resource;
const char *spw_resource_name(spw_resource resource); /* "compute", "nvme_read", ... */

typedef struct spw_prediction {
    spw_traffic traffic;
    double seconds[SPW_RESOURCE_COUNT]; /* of a step; NaN: the rate is not known */
    bool timed; /* all that is needed was known, but perhaps between ranks: the fields below hold, without these then */
    spw_resource bound;
    double bound_s; /* the longest of seconds */
    /* The backward pass, and behind it the longer of the next forward pass and what is left of the updates, which run beside it; of late
     * ones the forward pass, and the longer of the backward pass and updates. 0: they do not wait. */
    double gated_s;
    double orthogonal_s; /* of compute's: it comes in front of that forward pass, and updates run beside it too */
    double clipped_s;    /* of a step while every one clips: nothing is updated ahead */
    double step_s, tokens_per_s; /* of a step that is as long as the longer of both */
    double written;              /* bytes of a step on all paths together, by all ranks that swap to their disks */
    double written_per_day;      /* and of a day */
    double tbw_years;            /* until tbw_bytes are written; infinite: nothing is written; NaN: no rating */
} spw_prediction;
/* rates may be NULL: then only the traffic holds. tbw_bytes 0: no rating. Pure. */
void spw_plan_predict(const spw_plan *plan, const spw_rates *rates, uint64_t tbw_bytes, spw_prediction *out);

/* What a step moved, and kept busy. */
typedef struct spw_step_load {
    uint64_t nvme_read, nvme_write;
    spw_received gathered, reduced, traded;
    double compute_s, cpu_s; /* the device's busy time; processor time of all threads */
} spw_step_load;
/*
 * spw_step_bound - what a step with this load could not have been faster than. Where compute, optimizer and copies
 * share cores (rates->shared_cores), the processor time of the process over its share of them; else the device's time; then
 * the bytes over the rates of the disks, one way and both ways, and between ranks. seconds[]: 0 where a rate is not known. Pure.
 * Returns  the resource with the longest time.
 */
spw_resource spw_step_bound(const spw_plan *plan, const spw_rates *rates, const spw_step_load *load,
                            double seconds[SPW_RESOURCE_COUNT]);

/*
 * spw_calibrate - the rates of this machine and of the plan's paths, from the cache or measured in one to two seconds.
 *
 * Measures  each path with the library's own transfers on a file that is removed; copies between host and device with
 *           the formats' conversions; the optimizer on all its threads; a matrix product of the model's width; with Muon what it makes orthogonal;
 *           attention where it is more than a tenth of the operations.
 * Cache     $XDG_CACHE_HOME/spillway/rates.json or ~/.cache/spillway/rates.json, kept by machine (host name, processor,
 *           CPUs) and by what was measured (path and its device, aio settings; format and optimizer; threads), for 30
 *           days. A file that cannot be read is measured over with one line in the log; one that cannot be written too.
 * Estimated what a device that the plan is for (plan->gpu) computes, by half of its peak, the most that training gets out of one, copies, and
 *           receives from others like it on its host.
 * Unknown   what cannot be measured (no such path, a full disk) stays 0, with one line in the log; what ranks receive from each other,
 *           which only ranks can measure (spw_rank_bench.h), without one.
 * Threads   one call at a time; uses the cores and disks that it measures.
 */
typedef enum spw_calibrate_mode {
    SPW_CALIBRATE_CACHE_ONLY, /* measures nothing */
    SPW_CALIBRATE_AUTO,       /* measures what the cache does not have */
    SPW_CALIBRATE_FORCE       /* measures everything anew */
} spw_calibrate_mode;
typedef struct spw_calibration {
    uint32_t measured, cached, unknown; /* how many of the paths, copies, optimizer and compute */
    bool estimated;                     /* copies, compute and ranks of a host: of plan->gpu */
    double seconds, oldest_days;        /* spent measuring; age of the oldest value from the cache */
    char cache_path[SPW_PATH_BYTES];    /* "": there is no cache */
} spw_calibration;
void spw_calibrate(spw_rates *out, const spw_config *config, const spw_plan *plan, spw_calibrate_mode mode,
                   spw_calibration *report);

/* ---------------------------------------------------------------- the paper's table */

/*
 * Bytes per device of mixed-precision Adam for a model of params parameters split mp ways, on ranks devices, at a ZeRO
 * stage 0 to 3: 2 bytes of weights, 2 of gradients, 12 of optimizer state.
 * Source  Rajbhandari et al. 2020, ZeRO, section 5 and table 1.
 */
double spw_zero_bytes(double params, uint32_t stage, double ranks, double mp);

#ifdef __cplusplus
}
#endif
#endif
