/*
 * For tests of random configurations: what is drawn depends on SPW_SEED, how many there are on SPW_RUNS, and one that stands still
 * is ended by an alarm and named.
 */
#ifndef LIB_RANDOM_H
#define LIB_RANDOM_H

#include "spw_config.h"
#include <stdint.h>

extern char random_said[480];
/* Draw number `what` of a run, below n. */
uint64_t random_pick(uint64_t run, uint32_t what, uint64_t n);
uint64_t random_seed(void);
uint64_t random_runs(uint64_t otherwise);
/* A second swap folder, in the first one, which takes another share, or little. */
void random_paths(uint64_t at, spw_config *c, const char *dir);
/* Names what runs from now on, with the seed in front, and gives it so many seconds. */
void random_says(unsigned seconds, const char *format, ...) __attribute__((format(printf, 2, 3)));
void random_done(void); /* no alarm any more */

/* A family that lib_tiny makes small; GPT-2 is drawn twice as often. */
spw_family random_family(uint64_t run, uint32_t what);

#endif
