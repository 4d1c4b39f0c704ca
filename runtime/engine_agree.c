/*
 * What each rank says of something that all of them did or are about to do, and what all make of it: the first failure is everybody's,
 * and where all must ask for the same, another number is one. Collective; without other ranks the own word counts.
 */
#include "engine_internal.h"
#include <stdio.h>

/* What each rank says of something that all of them did. */
typedef struct verdict {
    int32_t status;
    int64_t number;
    char message[480];
} verdict;

/* *all (ranks, bytes) is the caller's to free. A rank without memory for it tells the others, who wait for what it does not say. */
static spw_status
tell(spw_engine *e, spw_channel *channel, const void *mine, void **all, uint64_t bytes, spw_error *err)
{
    *all = spw_mem_calloc(e->world, bytes);
    if (*all == NULL)
        return spw__ranks_fail(e->ranks, SPW_RAISE(err, SPW_ENOMEM, "what %u ranks say", e->world), err);
    return spw_exchange(channel, mine, *all, bytes, err);
}

/* same: all must give the same number. */
static spw_status
agree(spw_engine *e, spw_channel *channel, spw_status st, const spw_error *own, int64_t *number, bool same,
      spw_error *err)
{
    verdict mine = {.status = (int32_t)st, .number = *number}, *all;
    uint32_t bad = 0;
    void *said;
    snprintf(mine.message, sizeof mine.message, "%.*s", (int)sizeof mine.message - 1, st != SPW_OK ? own->message : "");
    st = tell(e, channel, &mine, &said, sizeof mine, err);
    if ((all = said) == NULL)
        return st;
    while (st == SPW_OK && bad < e->world && all[bad].status == (int32_t)SPW_OK)
        bad++;
    if (st == SPW_OK && bad < e->world)
        st = SPW_RAISE(err, (spw_status)all[bad].status, "rank %u: %s", bad, all[bad].message);
    for (uint32_t r = 1; same && st == SPW_OK && r < e->world; r++) {
        if (all[r].number != all[0].number)
            st = SPW_RAISE(err, SPW_EINVAL, "rank %u asks for something else than rank 0, in a call that is collective",
                           r);
    }
    *number = all[0].number;
    spw_mem_free(all);
    return st;
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
    return e->ranks == NULL ? alone(st, own, err)
                            : agree(e, spw__ranks_get_channels(e->ranks)->saves, st, own, number, false, err);
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
    int64_t number = (int64_t)what;
    return e->ranks == NULL
               ? alone(own->status, own, err)
               : agree(e, spw__ranks_get_channels(e->ranks)->control, own->status, own, &number, true, err);
}
