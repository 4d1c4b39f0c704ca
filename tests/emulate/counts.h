/*
 * What the emulated plugin exports for tests: what has been put into its streams so far and how often a thread had to wait for an
 * event, of all threads together; and refusals.
 */
#ifndef SPW_EMULATE_COUNTS_H
#define SPW_EMULATE_COUNTS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct spw_emulate_counts {
    uint64_t launches, copies, sets, host_functions, notes; /* notes: events that are recorded with their time */
    uint64_t waits, kernels; /* kernels: that have been loaded before they were launched */
    uint64_t under_way;      /* work that is to be done when this is counted */
    uint64_t freed_in_use;   /* memory that was freed while such work was to use it: the runtime waits then */
} spw_emulate_counts;
typedef void (*spw_emulate_count_fn)(spw_emulate_counts *out);
#define SPW_EMULATE_COUNT_SYMBOL "spw_emulate_count"
/* The k-th allocation or creation of an event from now on is refused; 0: none. Whether the one asked for before was. */
typedef bool (*spw_emulate_refuse_fn)(unsigned k);
#define SPW_EMULATE_REFUSE_SYMBOL "spw_emulate_refuse"

#endif
