/*
 * The small collectives, of any memory: what ranks of a host tell each other passes through their desks, a broadcast
 * through a buffer that the members on the root's host share.
 */
#include "comm_internal.h"
#include <stdio.h>

spw_status
spw_exchange(spw_channel *ch, const void *mine, void *all, uint64_t bytes, spw_error *err)
{
    spw__call call = {.op = SPW_COLL_EXCHANGE, .bytes = bytes};
    char *own = ch->desks[ch->desk_idx[ch->rank]].mail, *to = all;
    if (bytes > SPW_EXCHANGE_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "exchange on channel %s: %llu bytes are more than %d", ch->name,
                         (unsigned long long)bytes, SPW_EXCHANGE_MAX);
    memcpy(own, mine, bytes); /* nobody reads it: the call before has ended */
    SPW_TRY(spw__op_begin(ch, &call, err));
    for (uint32_t i = 0; i < ch->far_count; i++) {
        ch->out[i] = (spw__flow){.at = own, .left = bytes};
        ch->in[i] = (spw__flow){.at = to + ch->far_member[i] * bytes, .left = bytes};
    }
    for (uint32_t m = 0; m < ch->size; m++) {
        if (ch->desk_idx[m] != NO_IDX)
            memcpy(to + m * bytes, ch->desks[ch->desk_idx[m]].mail, bytes);
    }
    SPW_TRY(spw__op_flush(ch, err));
    return spw__op_end(ch, (ch->near_count - 1) * bytes, ch->far_count * bytes, err);
}

spw_status
spw_sum(spw_channel *ch, double *values, uint32_t count, spw_error *err)
{
    const double *all = (const double *)(const void *)ch->mail;
    SPW_TRY(spw_exchange(ch, values, ch->mail, count * sizeof *values, err));
    for (uint32_t i = 0; i < count; i++) {
        double sum = all[i];
        for (uint32_t m = 1; m < ch->size; m++)
            sum += all[(uint64_t)m * count + i];
        values[i] = sum;
    }
    return SPW_OK;
}

/* From the root to the members on its host. */
static spw_status
through_bounce(spw_channel *ch, char *buf, uint64_t bytes, bool is_root, spw_error *err)
{
    for (uint64_t at = 0; at < bytes; at += BOUNCE_BYTES) {
        uint64_t n = bytes - at < BOUNCE_BYTES ? bytes - at : BOUNCE_BYTES;
        if (is_root)
            memcpy(ch->block->bounce, buf + at, n);
        SPW_TRY(spw__op_phase(ch, err));
        if (!is_root)
            memcpy(buf + at, ch->block->bounce, n);
        SPW_TRY(spw__op_phase(ch, err));
        SPW_TRY(spw__op_pump(ch, false, err));
    }
    return SPW_OK;
}

spw_status
spw_broadcast(spw_channel *ch, void *buf, uint64_t bytes, uint32_t root, spw_error *err)
{
    spw__call call = {.op = SPW_COLL_BROADCAST, .bytes = bytes, .detail = root};
    bool is_root = root == ch->rank, near;
    if (root >= ch->size)
        return SPW_RAISE(err, SPW_EINVAL, "broadcast on channel %s: root %u of %u ranks", ch->name, root, ch->size);
    near = ch->desk_idx[root] != NO_IDX;
    SPW_TRY(spw__op_begin(ch, &call, err));
    for (uint32_t i = 0; i < ch->far_count; i++) {
        if (is_root)
            ch->out[i] = (spw__flow){.at = buf, .left = bytes};
        else if (ch->far_member[i] == root)
            ch->in[i] = (spw__flow){.at = buf, .left = bytes};
    }
    SPW_TRY(spw__op_pump(ch, false, err));
    if (near && ch->near_count > 1)
        SPW_TRY(through_bounce(ch, buf, bytes, is_root, err));
    SPW_TRY(spw__op_flush(ch, err));
    return spw__op_end(ch, near && !is_root ? bytes : 0, near ? 0 : bytes, err);
}

spw_status
spw_barrier(spw_channel *ch, spw_error *err)
{
    SPW_TRY(spw__op_begin(ch, &(spw__call){.op = SPW_COLL_BARRIER}, err));
    return spw__op_end(ch, 0, 0, err);
}

typedef struct verdict {
    int32_t status;
    int64_t number;
    char message[480];
} verdict;

spw_status
spw_agree(spw_channel *ch, spw_status st, const spw_error *own, spw_word *word, spw_error *err)
{
    verdict mine = {.status = (int32_t)st, .number = word != NULL ? word->number : 0};
    const verdict *all = (const verdict *)(const void *)ch->mail;
    uint32_t first = 0, other = 0;
    if (word != NULL)
        *word = (spw_word){.first = ch->size};
    snprintf(mine.message, sizeof mine.message, "%.*s", (int)sizeof mine.message - 1, st != SPW_OK ? own->message : "");
    SPW_TRY(spw_exchange(ch, &mine, ch->mail, sizeof mine, err));
    while (first < ch->size && all[first].status == (int32_t)SPW_OK)
        first++;
    for (uint32_t m = 1; m < ch->size && other == 0; m++)
        other = all[m].number != all[0].number ? m : 0;
    if (word != NULL)
        *word = (spw_word){.number = all[0].number, .first = first, .other = other};
    if (first == ch->size)
        return SPW_OK;
    return SPW_RAISE(err, (spw_status)all[first].status, "rank %u: %s", first, all[first].message);
}
