/*
 * What each rank says of something that all of them did or are about to do, and what all make of it: the first failure is everybody's,
 * and where all must ask for the same, another number is one. Collective; without other ranks the own word counts.
 */
#include "engine_internal.h"
#include <stdio.h>

spw_status
spw__ranks_hear(spw_comm *comm, const char *name, const void *mine, void **all, uint64_t bytes, spw_error *err)
{
    const uint32_t world = spw_comm_get_info(comm)->world;
    spw_channel *channel = NULL;
    spw_status st;
    *all = spw_mem_calloc(world, bytes);
    if (*all == NULL) {
        spw_comm_abort(comm, "no memory for what ranks say");
        return SPW_RAISE(err, SPW_ENOMEM, "what %u ranks say", world);
    }
    st = spw_channel_open(&channel, comm, NULL, 0, name, err);
    if (st == SPW_OK)
        st = spw_exchange(channel, mine, *all, bytes, err);
    spw_channel_close(channel);
    return st;
}

/* *all (ranks, bytes) is the caller's to free. A rank without memory for it tells the others, who wait for what it does not say. */
static spw_status
tell(spw_engine *e, spw_channel *channel, const void *mine, void **all, uint64_t bytes, spw_error *err)
{
    *all = spw_mem_calloc(e->world, bytes);
    if (*all == NULL)
        return spw__ranks_fail(e->ranks, SPW_RAISE(err, SPW_ENOMEM, "what %u ranks say", e->world), err);
    return spw_exchange(channel, mine, *all, bytes, err);
}

/* Without other ranks. */
static spw_status
alone(spw_status st, const spw_error *own, spw_error *err)
{
    if (st != SPW_OK && err != NULL)
        *err = *own;
    return st;
}

spw_status
spw__engine_agree(spw_engine *e, spw_status st, const spw_error *own, int64_t *number, spw_error *err)
{
    spw_word word = {.number = *number};
    if (e->ranks == NULL)
        return alone(st, own, err);
    st = spw_agree(spw__ranks_get_channels(e->ranks)->saves, st, own, &word, err);
    *number = word.number;
    return st;
}

spw_status
spw__engine_tell(spw_engine *e, const void *mine, void **all, uint64_t bytes, spw_error *err)
{
    if (e->ranks != NULL)
        return tell(e, spw__ranks_get_channels(e->ranks)->saves, mine, all, bytes, err);
    *all = spw_mem_calloc(1, bytes);
    if (*all == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "what a rank says");
    memcpy(*all, mine, bytes);
    return SPW_OK;
}

spw_status
spw__engine_agree_loaded(spw_engine *e, spw_status st, const spw_error *own, spw_error *err)
{
    int64_t none = 0;
    return spw__engine_agree(e, st, own, &none, err);
}

spw_status
spw__engine_consent(spw_engine *e, const spw_error *own, uint64_t what, spw_error *err)
{
    spw_word word = {.number = (int64_t)what};
    if (e->ranks == NULL)
        return alone(own->status, own, err);
    SPW_TRY(spw_agree(spw__ranks_get_channels(e->ranks)->control, own->status, own, &word, err));
    if (word.other == 0)
        return SPW_OK;
    return SPW_RAISE(err, SPW_EINVAL, "rank %u asks for something else than rank 0, in a call that is collective",
                     word.other);
}
