/*
 * Operands that lie where others read them: every allocation is a segment of this process, and a mapping of each local
 * rank's. The address of an operand travels as (allocation, offset), which means the same in every process.
 */
#include "comm_internal.h"
#include <unistd.h>

/* One rank's part of an allocation, as others must know it. */
typedef struct offer {
    int32_t fd;
    uint32_t unused;
    uint64_t bytes;
} offer;

static spw__alloc *
free_slot(spw_comm *comm)
{
    spw__alloc *found = NULL;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t i = 0; i < SPW_COMM_ALLOCS_MAX && found == NULL; i++) {
        if (comm->allocs[i].id == 0)
            found = &comm->allocs[i];
    }
    pthread_mutex_unlock(&comm->lock);
    return found;
}

static void
release(spw_comm *comm, spw__alloc *a)
{
    for (uint32_t i = 0; a->peers != NULL && i < comm->info.local_world; i++)
        spw__segment_close(&a->peers[i]);
    spw__segment_close(&a->own);
    spw_mem_free(a->peers);
}

static spw_status
attach_peers(spw_comm *comm, spw__alloc *a, const offer *offers, uint64_t bytes, spw_error *err)
{
    for (uint32_t i = 0; i < comm->info.local_world; i++) {
        uint32_t rank = comm->locals[i];
        if (rank != comm->info.rank)
            SPW_TRY(spw__segment_attach(&a->peers[i], comm->peers[rank].pid, offers[rank].fd, bytes, err));
    }
    return SPW_OK;
}

spw_status
spw_comm_alloc(spw_comm *comm, void **out, uint64_t bytes, spw_error *err)
{
    spw__alloc *slot = free_slot(comm), made = {.id = ++comm->alloc_next_id};
    uint32_t world = comm->info.world;
    uint64_t map_bytes = bytes > 0 ? bytes : 1; /* an address of its own even of nothing */
    offer mine = {.bytes = bytes}, *offers;
    spw_status st = SPW_OK, agreed;
    *out = NULL;
    offers = spw_mem_calloc(world, sizeof *offers);
    made.peers = spw_mem_calloc(comm->info.local_world, sizeof *made.peers);
    if (slot == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "%u allocations that ranks share are live already", SPW_COMM_ALLOCS_MAX);
    else if (offers == NULL || made.peers == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", world);
    if (st == SPW_OK)
        st = spw__segment_create(&made.own, map_bytes, comm->info.local_world > 1, 0, err);
    agreed = spw__agree(comm->world, st, err);
    if (agreed != SPW_OK)
        goto done;
    mine.fd = made.own.fd;
    st = spw_exchange(comm->world, &mine, offers, sizeof mine, err);
    for (uint32_t r = 0; st == SPW_OK && r < world; r++) {
        if (offers[r].bytes != bytes)
            st = SPW_RAISE(err, SPW_EINVAL, "rank %u allocates %llu bytes, rank %u %llu", r,
                           (unsigned long long)offers[r].bytes, comm->info.rank, (unsigned long long)bytes);
    }
    if (st == SPW_OK)
        st = attach_peers(comm, &made, offers, map_bytes, err);
    agreed = spw__agree(comm->world, st, err);
    spw__segment_hide(&made.own);
done:
    spw_mem_free(offers);
    if (agreed != SPW_OK) {
        release(comm, &made);
        return agreed;
    }
    pthread_mutex_lock(&comm->lock);
    *slot = made;
    pthread_mutex_unlock(&comm->lock);
    *out = made.own.region.base;
    return SPW_OK;
}

void
spw_comm_free(spw_comm *comm, void *p)
{
    spw__alloc gone = {0};
    if (p == NULL)
        return;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t i = 0; i < SPW_COMM_ALLOCS_MAX; i++) {
        spw__alloc *a = &comm->allocs[i];
        if (a->id != 0 && a->own.region.base == p) {
            gone = *a;
            memset(a, 0, sizeof *a);
        }
    }
    pthread_mutex_unlock(&comm->lock);
    SPW_ASSERT(gone.id != 0);
    release(comm, &gone);
}

bool
spw__alloc_find(spw_comm *comm, const void *p, uint64_t bytes, uint64_t *id, uint64_t *offset)
{
    uintptr_t at = (uintptr_t)p;
    bool found = false;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t i = 0; i < SPW_COMM_ALLOCS_MAX && !found; i++) {
        const spw__alloc *a = &comm->allocs[i];
        uintptr_t base = (uintptr_t)a->own.region.base;
        found =
            a->id != 0 && at >= base && at - base <= a->own.region.bytes && bytes <= a->own.region.bytes - (at - base);
        if (found) {
            *id = a->id;
            *offset = at - base;
        }
    }
    pthread_mutex_unlock(&comm->lock);
    return found;
}

const char *
spw__alloc_peer(spw_comm *comm, uint64_t id, uint64_t offset, uint32_t local_rank)
{
    const char *base = NULL;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t i = 0; i < SPW_COMM_ALLOCS_MAX; i++) {
        const spw__alloc *a = &comm->allocs[i];
        if (a->id == id)
            base = local_rank == comm->info.local_rank ? a->own.region.base : a->peers[local_rank].region.base;
    }
    pthread_mutex_unlock(&comm->lock);
    return base != NULL ? base + offset : NULL;
}
