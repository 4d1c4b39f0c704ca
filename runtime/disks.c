/*
 * Which ranks of this host swap to the same disks: what a disk delivers, and what it has left, is theirs together, so the plan and the
 * bound of a rank count with its share. Decides nothing about where bytes go; that is the configuration's and the planner's.
 */
#include "engine_internal.h"

enum { LISTS = 2, DISKS_MAX = LISTS * SPW_PATHS_MAX };

/* What a rank says of itself. */
typedef struct offer {
    uint32_t host;
    uint64_t disks[DISKS_MAX]; /* by list and place in it; 0: none, or not known */
} offer;

static uint32_t
count_ranks(const offer *all, uint32_t world, uint32_t host, uint64_t disk)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < world; r++) {
        bool there = false;
        for (uint32_t i = 0; i < DISKS_MAX && all[r].host == host; i++)
            there = there || all[r].disks[i] == disk;
        n += there;
    }
    return n;
}

/* How many of this rank's own paths, each counted once, are on that disk. */
static uint64_t
count_paths(const spw_path_list *const lists[LISTS], const offer *mine, uint64_t disk)
{
    uint64_t n = 0;
    for (uint32_t k = 0; k < LISTS; k++) {
        for (uint32_t i = 0; i < lists[k]->count; i++) {
            bool known = mine->disks[k * SPW_PATHS_MAX + i] != disk;
            for (uint32_t j = 0; k > 0 && j < lists[0]->count; j++)
                known = known || strcmp(lists[0]->item[j], lists[k]->item[i]) == 0;
            n += !known;
        }
    }
    return n > 0 ? n : 1;
}

/* What killed runs have left on the disks is free for this one: it is removed before it counts as taken, and before a full disk refuses a probe. */
static void
reclaim(const spw_path_list *const lists[LISTS])
{
    for (uint32_t k = 0; k < LISTS; k++) {
        for (uint32_t i = 0; i < lists[k]->count; i++)
            (void)spw_swap_reclaim(lists[k]->item[i]);
    }
}

static void
share_free(spw_engine *e, const spw_path_list *const lists[LISTS], const offer *mine)
{
    for (uint32_t k = 0; k < LISTS; k++) {
        for (uint32_t i = 0; i < lists[k]->count; i++)
            e->path_free[k][i] = spw_disk_free(lists[k]->item[i]) / e->path_ranks[k][i] /
                                 count_paths(lists, mine, mine->disks[k * SPW_PATHS_MAX + i]);
    }
}

spw_status
spw__disks_share(spw_engine *e, bool plan_only, spw_error *err)
{
    const spw_path_list *lists[LISTS] = {&e->config.zero.param_path, &e->config.zero.optimizer_path};
    offer mine = {0};
    void *all;
    spw_status st;
    if (!plan_only)
        reclaim(lists);
    for (uint32_t k = 0; k < LISTS; k++) {
        for (uint32_t i = 0; i < lists[k]->count; i++) {
            mine.disks[k * SPW_PATHS_MAX + i] = spw_disk_of(lists[k]->item[i]);
            e->path_ranks[k][i] = e->local_world; /* all of them have this configuration */
        }
    }
    share_free(e, lists, &mine);
    if (e->comm == NULL || plan_only)
        return SPW_OK;
    mine.host = spw_comm_get_info(e->comm)->machine;
    st = spw__ranks_hear(e->comm, "disks", &mine, &all, sizeof mine, err);
    for (uint32_t k = 0; k < LISTS && st == SPW_OK; k++) {
        for (uint32_t i = 0; i < lists[k]->count; i++) {
            uint64_t disk = mine.disks[k * SPW_PATHS_MAX + i];
            e->path_ranks[k][i] = disk != 0 ? count_ranks(all, e->world, mine.host, disk) : 1;
        }
    }
    share_free(e, lists, &mine);
    spw_mem_free(all);
    return st;
}
