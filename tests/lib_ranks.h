/* Worlds of several ranks on this machine, for tests: the processes are forked, and what they leave lies in shared memory. */
#ifndef LIB_RANKS_H
#define LIB_RANKS_H

#include "spw_engine.h"

/*
 * ranks_run - calls fn in every rank of a world; fails the test with each rank's error unless all return SPW_OK.
 * options' backend and timeout are set here. With one rank fn runs in this process, comm NULL. In a forked rank no
 * cmocka assertion may fail: return an error instead.
 */
typedef spw_status (*ranks_fn)(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err);
/* per_host: so many ranks in a row take themselves for those of one host; 0: all of them. */
void ranks_on_hosts(uint32_t per_host, uint32_t ranks, const spw_comm_options *options, ranks_fn fn, void *ctx);
void ranks_run(uint32_t ranks, const spw_comm_options *options, ranks_fn fn, void *ctx);
/* A port for a world: this process's own as long as it lives, below those that the system hands out. */
uint32_t ranks_port(void);
/* Zeroed memory that ranks forked later share. */
void *ranks_share(uint64_t bytes);
void ranks_unshare(void *memory, uint64_t bytes);

/* tiny_config, with an Adam for which a gradient of nothing but rounding is not a step of full length. */
void ranks_config(spw_config *c, spw_state_format format);
/* Swaps there. */
void ranks_use_dir(spw_config *c, const char *dir);

#endif
