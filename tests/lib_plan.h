/* Plans for tests: a small model, a configuration of it with its state on nvme, and rates to predict with. Errors fail the test. */
#ifndef LIB_PLAN_H
#define LIB_PLAN_H

#include "lib_tiny.h"

enum { PLAN_PROCESS_BYTES = 8 << 20 }; /* what these plans count for the process */

/* The folder of the tests that run; made, and removed, for a group of them. Removing fails it where memory was left behind. */
extern char plan_dir[256];
int plan_dir_make(void **state);
int plan_dir_remove(void **state);

/* Two disks, the second faster, and a link whose directions differ. */
spw_rates plan_some_rates(void);
/* A GPT of 10 units; state on nvme, in the folder. */
void plan_nvme_config(spw_config *c, spw_state_format format);
spw_model *plan_make_model(void);
/* Plans and takes nothing, on a machine that has so much memory left; plan_of: that has room for everything. */
spw_status
plan_in_room(const spw_config *c, const spw_model *model, uint64_t room_bytes, spw_plan *plan, spw_error *err);
/* With so many ranks on a host; 0: all. */
spw_status plan_on_hosts(const spw_config *c, const spw_model *model, uint32_t local_ranks, uint64_t room_bytes,
                         spw_plan *plan, spw_error *err);
spw_status plan_of(const spw_config *c, const spw_model *model, spw_plan *plan, spw_error *err);

#endif
