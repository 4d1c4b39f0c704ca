/* What has been put into emulated streams since the plugin was opened, and how often a thread had to wait for an event. */
#ifndef SPW_EMULATE_COUNTS_H
#define SPW_EMULATE_COUNTS_H

#include <stdint.h>

typedef struct spw_emulate_counts {
    uint64_t launches, copies, sets, host_functions, notes; /* notes: events that are recorded with their time */
    uint64_t waits;
} spw_emulate_counts;
/* The plugin exports it; of all threads together. */
typedef void (*spw_emulate_count_fn)(spw_emulate_counts *out);
#define SPW_EMULATE_COUNT_SYMBOL "spw_emulate_count"

#endif
