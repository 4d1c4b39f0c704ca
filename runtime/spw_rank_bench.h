/*
 * spw_rank_bench.h - how many bytes ranks receive from each other in a second, by the collectives that train, and what is kept of it for
 * plans and bounds (spw_plan.h).
 *
 * Threads   one; every call is collective, with the same arguments on all ranks.
 */
#ifndef SPW_RANK_BENCH_H
#define SPW_RANK_BENCH_H

#include "spw_comm.h"
#include "spw_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spw_rank_bench spw_rank_bench;
typedef struct spw_rank_bench_options {
    const char *device;      /* as spillway.device */
    const char *collectives; /* as spillway.collectives */
    uint64_t unit_bytes;     /* the largest that is to be measured */
} spw_rank_bench_options;
typedef struct spw_rank_bench_info {
    bool there[SPW_WAY_COUNT]; /* some rank has others on its host; there are several hosts */
    bool linked;               /* from device to device, else through memory of hosts */
    char why[300];             /* and why */
    const char *device;        /* description */
} spw_rank_bench_info;

/*
 * spw_rank_bench_open - opens the device, channels, and links between devices where all ranks can have them.
 * Takes   4 unit_bytes of host memory on each rank; of a linked device 5, and 2 of the host
 * Errors  the same on every rank: SPW_EINVAL for a unit of less than a block of 4096 elements for each rank; SPW_EUNSUPPORTED with collectives
 *         "nccl" where devices cannot be linked; what opening a device, memory and channels fail with
 */
spw_status
spw_rank_bench_open(spw_rank_bench **out, spw_comm *comm, const spw_rank_bench_options *options, spw_error *err);
void spw_rank_bench_close(spw_rank_bench *bench, bool together); /* together: nothing has failed. NULL is fine */
const spw_rank_bench_info *spw_rank_bench_get_info(const spw_rank_bench *bench);

typedef struct spw_rank_rate {
    double rank, host; /* bytes/s: what this rank received, what all ranks of its host did */
    double cpu;        /* bytes that this rank received in a second of one processor's time */
    double
        memcpy; /* bytes/s of memcpy on each rank in turns with it, all at once; 0: not through host memory, or between hosts */
    double seconds;        /* of a call, from the first rank's begin to the last one's end */
    uint64_t calls, wrong; /* of each of five samples; elements that all ranks got wrong */
} spw_rank_rate;
/*
 * spw_rank_bench_measure - a unit of so many bytes, gathered (GATHER), summed up and scattered (REDUCE), or, as in a backward pass, one and
 * the other at once, by a thread each, over links in turns (BOTH): among the ranks of each host (NEAR), all hosts at once, or
 * among those that have the same place on their hosts (FAR), all at once. Medians of five samples; every element is checked at the end.
 *   bytes     4 per element where elements are summed up; at most unit_bytes
 *   duration  of all samples, about
 */
spw_status spw_rank_bench_measure(spw_rank_bench *bench, spw_rank_way way, spw_rank_use use, uint64_t bytes,
                                  uint64_t duration_ns, spw_rank_rate *out, spw_error *err);
/*
 * spw_rank_bench_keep - on each host, in turn, keeps what the largest unit gave, the last time, where all uses of a way were, for spw_calibrate() to find: where as
 * many ranks of a host reach each other in the same way. path (SPW_PATH_BYTES): where, "": nowhere.
 */
spw_status spw_rank_bench_keep(spw_rank_bench *bench, char *path, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
