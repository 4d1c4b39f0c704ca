/*
 * Links between the devices of ranks: whether all ranks can have one, and how the ranks of a channel come to it. What goes over them is the
 * caller's (wire.c, rank_bench.c).
 */
#include "runtime_internal.h"
#include <stdio.h>

/* What each rank says of itself. */
typedef struct offer {
    int32_t status; /* of making links */
    uint32_t machine;
    unsigned char id[sizeof((spw_gpu_info *)0)->id];
    char why[240];
} offer;

/* The same answer on every rank. */
static bool
all_can(const offer *all, uint32_t world, char why[SPW_LINK_WHY_BYTES])
{
    for (uint32_t r = 0; r < world; r++) {
        if (all[r].status != (int32_t)SPW_OK) {
            snprintf(why, SPW_LINK_WHY_BYTES, "rank %u: %s", r, all[r].why);
            return false;
        }
        for (uint32_t o = 0; o < r; o++) {
            if (all[o].machine == all[r].machine && memcmp(all[o].id, all[r].id, sizeof all[r].id) == 0) {
                snprintf(why, SPW_LINK_WHY_BYTES, "ranks %u and %u share a GPU, and NCCL wants one for each", o, r);
                return false;
            }
        }
    }
    return true;
}

spw_status
spw__links_agree(spw_comm *comm, spw_gpu *gpu, bool *linked_out, char why[SPW_LINK_WHY_BYTES], spw_error *err)
{
    const spw_comm_info *info = spw_comm_get_info(comm);
    offer mine = {.machine = info->machine};
    void *all;
    spw_error none = {0};
    spw_status st;
    mine.status = (int32_t)spw_gpu_link_probe(gpu, &none);
    snprintf(mine.why, sizeof mine.why, "%.*s", (int)sizeof mine.why - 1, none.message);
    memcpy(mine.id, spw_gpu_get_info(gpu)->id, sizeof mine.id);
    why[0] = '\0';
    st = spw__ranks_hear(comm, "links", &mine, &all, sizeof mine, err);
    *linked_out = st == SPW_OK && all_can(all, info->world, why);
    spw_mem_free(all);
    return st;
}

/* The first rank of a channel makes the id. */
typedef struct invitation {
    int32_t status;
    unsigned char id[SPW_GPU_LINK_ID_BYTES];
    char why[240];
} invitation;

spw_status
spw__link_open(spw_gpu_link **out, spw_gpu *gpu, spw_channel *channel, spw_gpu_going going, void *ctx, spw_error *err)
{
    spw_error own = {0};
    invitation in = {0};
    if (spw_channel_rank(channel) == 0)
        in.status = (int32_t)spw_gpu_link_id(gpu, in.id, &own);
    snprintf(in.why, sizeof in.why, "%.*s", (int)sizeof in.why - 1, own.message);
    SPW_TRY(spw_broadcast(channel, &in, sizeof in, 0, err));
    if (in.status != (int32_t)SPW_OK)
        return SPW_RAISE(err, (spw_status)in.status, "the first rank of a link: %s", in.why);
    return spw_gpu_link_create(out, gpu, in.id, spw_channel_rank(channel), spw_channel_size(channel), going, ctx, err);
}

spw_status
spw__link_connect(spw_gpu_link *link, spw_gpu_queue *queue, uint32_t world, char *scratch, spw_error *err)
{
    SPW_TRY(spw_gpu_link_swap(link, queue, scratch, SPW_LINK_LEAST, scratch + SPW_LINK_LEAST * world, SPW_LINK_LEAST,
                              SPW_LINK_LEAST, err));
    return spw_gpu_link_wait(link, queue, err);
}
