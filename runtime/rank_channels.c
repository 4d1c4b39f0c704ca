/*
 * The channels between ranks: which there are for a world with or without ZeRO++ and MiCS, which ranks are on one together, and what came
 * in over them. Each is one thread's (rank_channels says whose); what goes over them is engine_ranks.c's and wire.c's.
 */
#include "engine_internal.h"

static spw_status
open_channel(spw_channel **out, spw_comm *comm, uint32_t color, const char *name, double timeout_s, spw_error *err)
{
    SPW_TRY(spw_channel_open(out, comm, NULL, color, name, err));
    if (timeout_s > 0)
        spw_channel_set_timeout(*out, timeout_s);
    return SPW_OK;
}

uint32_t
spw__ranks_channels(const engine_zeropp *z, uint32_t sharers)
{
    return 4 + (sharers > 1) + (z->group > 1) + (z->grads ? 2 : 0) + (z->shard > 0) + (z->by_host > 0 ? 2 : 0);
}

spw_status
spw__ranks_open_channels(rank_channels *c, spw_comm *comm, const engine_zeropp *z, uint32_t sharers, double timeout_s,
                         spw_error *err)
{
    uint32_t rank = spw_comm_get_info(comm)->rank, group = z->shard > 0 ? rank / z->shard : 0;
    SPW_TRY(open_channel(&c->gathers, comm, group, "weights", timeout_s, err));
    SPW_TRY(open_channel(&c->reduces, comm, group, "gradients", timeout_s, err));
    SPW_TRY(open_channel(&c->control, comm, 0, "control", timeout_s, err));
    SPW_TRY(open_channel(&c->saves, comm, 0, "saves", SPW__FILES_S, err));
    if (sharers > 1)
        SPW_TRY(open_channel(&c->sequences, comm, rank / sharers, "sequences", timeout_s, err));
    if (z->group > 1)
        SPW_TRY(open_channel(&c->group, comm, rank / z->group, "kept weights", timeout_s, err));
    if (z->grads) {
        SPW_TRY(open_channel(&c->host, comm, rank / z->host_ranks, "gradients of a host", timeout_s, err));
        SPW_TRY(open_channel(&c->across, comm, rank % z->host_ranks, "gradients of hosts", timeout_s, err));
    } else if (z->shard > 0) {
        SPW_TRY(open_channel(&c->across, comm, rank % z->shard, "gradients of groups", timeout_s, err));
    }
    if (z->by_host > 0) {
        SPW_TRY(open_channel(&c->at_home, comm, rank / z->by_host, "weights of a host", timeout_s, err));
        SPW_TRY(
            open_channel(&c->abroad, comm, group * z->by_host + rank % z->by_host, "weights of hosts", timeout_s, err));
    }
    return SPW_OK;
}

void
spw__ranks_close_channels(rank_channels *c)
{
    spw_channel_close(c->gathers);
    spw_channel_close(c->reduces);
    spw_channel_close(c->control);
    spw_channel_close(c->saves);
    spw_channel_close(c->group);
    spw_channel_close(c->at_home);
    spw_channel_close(c->abroad);
    spw_channel_close(c->host);
    spw_channel_close(c->across);
    spw_channel_close(c->sequences);
}

/* Adds what the channel says that came from others; NULL: there is no channel. */
static void
add_received(const spw_channel *c, spw_received *r)
{
    spw_comm_stats s;
    if (c == NULL)
        return;
    spw_channel_get_stats(c, &s);
    for (int op = 0; op < SPW_COLL_COUNT; op++) {
        r->all += s.op[op].local_bytes + s.op[op].remote_bytes;
        r->far += s.op[op].remote_bytes;
    }
}

void
spw__ranks_bytes(const spw_ranks *r, spw_received *gathered, spw_received *reduced, spw_received *traded)
{
    const rank_channels *c = spw__ranks_get_channels(r);
    *gathered = *reduced = *traded = (spw_received){0};
    add_received(c->gathers, gathered);
    add_received(c->group, gathered);
    add_received(c->at_home, gathered);
    add_received(c->abroad, gathered);
    add_received(c->reduces, reduced);
    add_received(c->host, reduced);
    add_received(c->across, reduced);
    add_received(c->sequences, traded);
}
