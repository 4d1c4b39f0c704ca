/*
 * The order of operations on a channel. Each begins with every rank saying what it calls, on a desk in shared memory and
 * in a header to other hosts; when all have come and say the same, data moves; it ends when nobody on this host reads
 * this rank's memory any more. Waiting ends with the timeout or when the watcher has seen a failure. Nothing waits for
 * a local rank while a stream has bytes that a remote rank waits for, or the other way round in a circle: first all
 * headers, then all local ranks, then all data, then the end.
 */
#include "comm_internal.h"
#include <stdio.h>

void
spw__chaos(spw_comm *comm)
{
    uint32_t r[4];
    if (comm->options.chaos_seed == 0)
        return;
    spw_philox(comm->options.chaos_seed, comm->info.rank, atomic_fetch_add(&comm->chaos_calls, 1), r);
    if (r[0] % 4 == 0)
        spw_sleep_ns(r[1] % (r[0] % 64 == 0 ? 3000000 : 200000));
}

/* The operation fails with the world, and its operands are the caller's again. */
static spw_status
give_up(spw_channel *ch, spw_error *err)
{
    if (ch->link != NULL && ch->link->transport->link_stop != NULL)
        ch->link->transport->link_stop(ch->link);
    return spw__failure(ch->comm, err);
}

static spw_status
timed_out(spw_channel *ch, spw_error *err)
{
    spw_comm *comm = ch->comm;
    spw__fail(comm, SPW_ETIMEDOUT, ch->link_id, "rank %u waited %.1f s for others on channel %s", comm->info.rank,
              ch->timeout_s, ch->name);
    return give_up(ch, err);
}

static bool
late(spw_channel *ch)
{
    return spw_waiting_look(&ch->waiting) > ch->timeout_s;
}

static spw_status
pass_gate(spw_channel *ch, spw_error *err)
{
    spw_waiting_begin(&ch->waiting);
    ch->gate_target += ch->near_count;
    spw__gate_arrive(&ch->block->gate, ch->gate_target);
    while (!spw__gate_wait(&ch->block->gate, ch->gate_target, ch->comm->spin)) {
        if (spw__failed(ch->comm))
            return give_up(ch, err);
        if (late(ch))
            return timed_out(ch, err);
    }
    return SPW_OK;
}

spw_status
spw__op_phase(spw_channel *ch, spw_error *err)
{
    spw__chaos(ch->comm);
    return pass_gate(ch, err);
}

/* ---------------------------------------------------------------- streams */

static void
hand_over(spw__flow *rest, spw__flow *link, uint64_t piece_bytes)
{
    if (link->left > 0 || rest->left == 0)
        return;
    *link = (spw__flow){.at = rest->at, .left = rest->left < piece_bytes ? rest->left : piece_bytes};
    rest->at += link->left;
    rest->left -= link->left;
}

static spw_status
lost(spw_channel *ch, spw_error *err)
{
    spw_comm *comm = ch->comm;
    uint64_t since = spw_now_ns();
    while (!spw__failed(comm) && spw_now_ns() - since < 1000000000u)
        spw_sleep_ns(1000000); /* the watcher is about to learn more than that the connection is gone */
    if (!spw__failed(comm))
        spw__fail(comm, SPW_EIO, ch->link_id, "the connection to rank %u is gone%s%s", ch->far[ch->link->gone_idx],
                  ch->link->gone_errno != 0 ? ": " : "",
                  ch->link->gone_errno != 0 ? strerror(ch->link->gone_errno) : "");
    return give_up(ch, err);
}

spw_status
spw__op_pump(spw_channel *ch, bool wait, spw_error *err)
{
    int64_t moved;
    if (ch->far_count == 0)
        return SPW_OK;
    for (uint32_t i = 0; i < ch->far_count; i++) {
        hand_over(&ch->out[i], &ch->link->send[i], ch->piece_bytes);
        hand_over(&ch->in[i], &ch->link->recv[i], ch->piece_bytes);
    }
    moved = ch->link->transport->progress(ch->link, wait ? SLICE_MS : 0);
    if (moved < 0)
        return lost(ch, err);
    if (moved > 0)
        spw_waiting_begin(&ch->waiting);
    else if (spw__failed(ch->comm))
        return give_up(ch, err);
    else if (wait && late(ch))
        return timed_out(ch, err);
    return SPW_OK;
}

bool
spw__op_received(const spw_channel *ch, uint32_t far_idx)
{
    return ch->in[far_idx].left == 0 && ch->link->recv[far_idx].left == 0;
}

static bool
all_through(const spw_channel *ch)
{
    for (uint32_t i = 0; i < ch->far_count; i++) {
        if (!spw__op_received(ch, i) || ch->out[i].left > 0 || ch->link->send[i].left > 0)
            return false;
    }
    return true;
}

spw_status
spw__op_flush(spw_channel *ch, spw_error *err)
{
    spw_waiting_begin(&ch->waiting);
    while (!all_through(ch))
        SPW_TRY(spw__op_pump(ch, true, err));
    return SPW_OK;
}

/* ---------------------------------------------------------------- begin and end */

static void
show_position(spw_channel *ch)
{
    spw__position *p = ch->position;
    if (p == NULL)
        return;
    atomic_store(&p->op, ch->call.op);
    atomic_store(&p->unit, ch->call.unit);
    atomic_store(&p->bytes, ch->call.bytes);
    atomic_store(&p->number, ch->call.number);
    atomic_store(&p->since_ns, ch->begin_ns);
    atomic_store(&p->in_call, 1);
}

static bool
same_call(const spw__call *a, const spw__call *b)
{
    bool places = a->op == SPW_COLL_ALL_TO_ALL || (a->place_id == b->place_id && a->place_offset == b->place_offset);
    return a->op == b->op && a->unit == b->unit && a->detail == b->detail && a->bytes == b->bytes &&
           a->number == b->number && places;
}

static spw_status
check_call(spw_channel *ch, const spw__call *other, uint32_t member, spw_error *err)
{
    const spw__call *mine = &ch->call;
    const char *what = "operations";
    if (same_call(mine, other))
        return SPW_OK;
    if (mine->op == other->op)
        what = mine->unit != other->unit       ? "units"
               : mine->bytes != other->bytes   ? "sizes"
               : mine->detail != other->detail ? "types or roots"
               : mine->number != other->number ? "numbers of calls"
                                               : "places of buffers";
    spw__fail(ch->comm, SPW_EINVAL, ch->link_id,
              "the calls of ranks on channel %s differ: %s of rank %u (%s, unit %u) and rank %u (%s, unit %u)",
              ch->name, what, ch->comm->info.rank, spw_collective_name(mine->op), mine->unit, ch->members[member],
              spw_collective_name(other->op), other->unit);
    return give_up(ch, err);
}

spw_status
spw__op_begin(spw_channel *ch, const spw__call *call, spw_error *err)
{
    spw_comm *comm = ch->comm;
    if (spw__failed(comm))
        return give_up(ch, err);
    ch->begin_ns = spw_now_ns();
    ch->call = *call;
    ch->call.number = ++ch->number;
    show_position(ch);
    spw__chaos(comm);
    ch->desks[ch->desk_idx[ch->rank]].call = ch->call;
    for (uint32_t i = 0; i < ch->far_count; i++) {
        ch->out[i] = (spw__flow){.at = (char *)&ch->call, .left = sizeof ch->call};
        ch->in[i] = (spw__flow){.at = (char *)&ch->far_calls[i], .left = sizeof ch->call};
    }
    /* Neither wait depends on anything but on others coming: a header is small, and what was before it has been read. */
    if (ch->far_count > 0)
        SPW_TRY(spw__op_pump(ch, false, err));
    SPW_TRY(pass_gate(ch, err));
    SPW_TRY(spw__op_flush(ch, err));
    for (uint32_t m = 0, far = 0; m < ch->size; m++) {
        if (ch->desk_idx[m] != NO_IDX) {
            ch->near_calls[ch->desk_idx[m]] = ch->desks[ch->desk_idx[m]].call;
            SPW_TRY(check_call(ch, &ch->near_calls[ch->desk_idx[m]], m, err));
        } else {
            SPW_TRY(check_call(ch, &ch->far_calls[far++], m, err));
        }
    }
    ch->came_ns = spw_now_ns();
    spw__chaos(comm);
    return SPW_OK;
}

/* What a slower link would take: tests of overlap. */
static void
delay(const spw_channel *ch, uint64_t bytes)
{
    const spw_comm_options *o = &ch->comm->options;
    double seconds = o->link_latency_s + (o->link_bytes_per_s > 0 ? (double)bytes / o->link_bytes_per_s : 0);
    uint64_t until = ch->came_ns + (uint64_t)(seconds * 1e9), now;
    while (ch->size > 1 && seconds > 0 && (now = spw_now_ns()) < until && !spw__failed(ch->comm))
        spw_sleep_ns(until - now < SLICE_MS * 1000000ull ? until - now : SLICE_MS * 1000000ull);
}

spw_status
spw__op_end(spw_channel *ch, uint64_t local_bytes, uint64_t remote_bytes, spw_error *err)
{
    uint32_t op = ch->call.op;
    uint64_t end;
    delay(ch, local_bytes + remote_bytes);
    spw__chaos(ch->comm);
    SPW_TRY(pass_gate(ch, err));
    spw__chaos(ch->comm);
    end = spw_now_ns();
    if (ch->position != NULL)
        atomic_store(&ch->position->in_call, 0);
    atomic_fetch_add_explicit(&ch->op[op].calls, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&ch->op[op].local_bytes, local_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&ch->op[op].remote_bytes, remote_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&ch->op[op].busy_ns, end - ch->begin_ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&ch->op[op].wait_ns, ch->came_ns - ch->begin_ns, memory_order_relaxed);
    spw_timeline_add(SPW_LANE_COMM, ch->name, ch->call.unit, ch->begin_ns, end);
    return SPW_OK;
}
