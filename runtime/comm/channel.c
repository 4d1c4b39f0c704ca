/*
 * Channels: who belongs to one, the memory its members on a host share, the link to those on other hosts, and its numbers.
 * Opening takes three exchanges among the parent's ranks: colors, then the shared memory that the first member of each host
 * has made, then whether everybody has mapped it and is connected. A rank that cannot says so, and all fail alike.
 */
#include "comm_internal.h"
#include <stdio.h>
#include <unistd.h>

/* What ranks tell each other while they open a channel. */
typedef struct hello {
    uint32_t color, next_id, status;
    int32_t fd;
    char text[200];
} hello;

_Static_assert(sizeof(hello) <= VERDICT_BYTES, "room of a verdict");

/* How the ranks that open together reach each other: over the parent, or the transport before there is any channel. */
typedef struct opener {
    spw_comm *comm;
    spw_channel *parent; /* NULL: the world */
    uint32_t size;
    uint64_t deadline_ns;
    hello mine, *all; /* (size) */
} opener;

static spw_status
exchange(opener *o, spw_error *err)
{
    if (o->parent != NULL)
        return spw_exchange(o->parent, &o->mine, o->all, sizeof o->mine, err);
    if (o->comm->transport != NULL)
        return o->comm->transport->gather(o->comm->transport, &o->mine, o->all, sizeof o->mine, o->deadline_ns, err);
    o->all[0] = o->mine;
    return SPW_OK;
}

static uint32_t
world_rank(const opener *o, uint32_t i)
{
    return o->parent != NULL ? o->parent->members[i] : i;
}

static spw_status
trouble_of(const hello *all, uint32_t size, spw_error *err)
{
    for (uint32_t i = 0; i < size; i++) {
        if (all[i].status != SPW_OK)
            return SPW_RAISE(err, (spw_status)all[i].status, "%.*s", (int)sizeof all[i].text - 1, all[i].text);
    }
    return SPW_OK;
}

static void
tell(hello *mine, spw_comm *comm, spw_status st, const spw_error *why)
{
    mine->status = st;
    snprintf(mine->text, sizeof mine->text, "rank %u: %.180s", comm->info.rank, why != NULL ? why->message : "");
}

spw_status
spw__agree(spw_channel *ch, spw_status st, spw_error *err)
{
    hello mine = {0}, *all = (hello *)(void *)ch->verdicts;
    spw_error none = {0};
    tell(&mine, ch->comm, st, err != NULL ? err : &none);
    SPW_TRY(spw_exchange(ch, &mine, all, sizeof mine, err));
    return trouble_of(all, ch->size, err);
}

/* ---------------------------------------------------------------- memory */

static uint64_t
block_bytes(uint32_t near_count)
{
    return sizeof(spw__block) + near_count * sizeof(spw__desk);
}

/* The least that streams work with: whole blocks of squares, of two pieces for each rank. */
static uint64_t
piece_bytes(const spw_comm_options *options, uint32_t size)
{
    uint64_t grain = SUM_BLOCK * sizeof(float), piece = options->staging_bytes / size / 2 / grain * grain;
    return piece > grain ? piece : grain;
}

uint64_t
spw__channel_bytes(const spw_comm_options *options, uint32_t world, uint32_t far_count)
{
    if (world < 2)
        return sizeof(spw_channel) + block_bytes(1) + 2 * SPW_EXCHANGE_MAX;
    return sizeof(spw_channel) + block_bytes(world) + far_count * 2 * piece_bytes(options, world) +
           (uint64_t)world * (SPW_EXCHANGE_MAX + VERDICT_BYTES + sizeof(hello) + 2 * sizeof(spw__call) + 256);
}

/* Who of the parent gives this color. */
static spw_status
find_members(spw_channel *ch, const opener *o, spw_error *err)
{
    spw_comm *comm = ch->comm;
    uint32_t host = comm->info.host;
    for (uint32_t i = 0; i < o->size; i++)
        ch->size += o->all[i].color == o->mine.color;
    ch->members = spw_mem_calloc(ch->size, sizeof *ch->members);
    ch->desk_idx = spw_mem_calloc(ch->size, sizeof *ch->desk_idx);
    ch->far = spw_mem_calloc(ch->size, sizeof *ch->far);
    ch->far_member = spw_mem_calloc(ch->size, sizeof *ch->far_member);
    ch->far_calls = spw_mem_calloc(ch->size, sizeof *ch->far_calls);
    ch->near_calls = spw_mem_calloc(ch->size, sizeof *ch->near_calls);
    ch->out = spw_mem_calloc(ch->size, sizeof *ch->out);
    ch->in = spw_mem_calloc(ch->size, sizeof *ch->in);
    ch->posted = spw_mem_calloc(ch->size, sizeof *ch->posted);
    ch->operands = spw_mem_calloc(ch->size, sizeof *ch->operands);
    ch->mail = spw_mem_calloc(ch->size, SPW_EXCHANGE_MAX);
    ch->verdicts = spw_mem_calloc(ch->size, VERDICT_BYTES);
    if (ch->members == NULL || ch->desk_idx == NULL || ch->far == NULL || ch->far_member == NULL ||
        ch->far_calls == NULL || ch->near_calls == NULL || ch->out == NULL || ch->in == NULL || ch->posted == NULL ||
        ch->operands == NULL || ch->mail == NULL || ch->verdicts == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "channel %s of %u ranks", ch->name, ch->size);
    for (uint32_t i = 0, m = 0; i < o->size; i++) {
        uint32_t rank = world_rank(o, i);
        if (o->all[i].color != o->mine.color)
            continue;
        ch->members[m] = rank;
        if (rank == comm->info.rank)
            ch->rank = m;
        if (comm->peers[rank].host == host) {
            if (ch->near_count == 0)
                ch->first_near = i;
            ch->desk_idx[m] = ch->near_count++;
        } else {
            ch->desk_idx[m] = NO_IDX;
            ch->far[ch->far_count] = rank;
            ch->far_member[ch->far_count++] = m;
        }
        m++;
    }
    ch->piece_bytes = piece_bytes(&comm->options, ch->size);
    if (ch->far_count == 0)
        return SPW_OK;
    SPW_TRY(spw_region_map(&ch->staging, ch->far_count * 2 * ch->piece_bytes, SPW_REGION_TABLE, err));
    return comm->transport->link_create(comm->transport, &ch->link, ch->link_id, ch->far, ch->far_count, err);
}

static spw_status
join(spw_channel *ch, const opener *o, spw_error *err)
{
    spw_comm *comm = ch->comm;
    if (ch->desk_idx[ch->rank] > 0)
        SPW_TRY(spw__segment_attach(&ch->segment, comm->peers[world_rank(o, ch->first_near)].pid,
                                    o->all[ch->first_near].fd, block_bytes(ch->near_count), err));
    ch->block = ch->segment.region.base;
    ch->desks = (spw__desk *)(ch->block + 1);
    return ch->link != NULL ? comm->transport->link_join(ch->link, o->deadline_ns, err) : SPW_OK;
}

static void
take_position(spw_channel *ch)
{
    spw_comm *comm = ch->comm;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t i = 0; i < BOARD_ENTRIES && ch->position == NULL; i++) {
        spw__position *p = &comm->board[i];
        if (atomic_load(&p->link_id) != 0)
            continue;
        snprintf(p->name, sizeof p->name, "%s", ch->name);
        atomic_store(&p->in_call, 0);
        atomic_store(&p->number, 0);
        atomic_store_explicit(&p->link_id, ch->link_id, memory_order_release);
        ch->position = p;
    }
    pthread_mutex_unlock(&comm->lock);
}

/* The second exchange: is everybody ready to be joined? After the third: is everybody joined? */
static spw_status
compare(opener *o, spw_status st, const spw_error *why, spw_error *err)
{
    tell(&o->mine, o->comm, st, why);
    SPW_TRY(exchange(o, err));
    return trouble_of(o->all, o->size, err);
}

static spw_status
open_with(spw_channel **out, opener *o, uint32_t color, const char *name, spw_error *err)
{
    spw_comm *comm = o->comm;
    spw_channel *ch = spw_mem_zalloc(sizeof *ch);
    spw_status st = ch != NULL ? SPW_OK : SPW_ENOMEM, agreed;
    spw_error why = {.message = "channel handle"};
    uint32_t link_id = 0;
    *out = NULL;
    o->mine = (hello){.color = color, .next_id = comm->link_next_id};
    agreed = exchange(o, err);
    for (uint32_t i = 0; agreed == SPW_OK && i < o->size; i++)
        link_id = o->all[i].next_id > link_id ? o->all[i].next_id : link_id;
    if (agreed != SPW_OK)
        goto done;
    comm->link_next_id = link_id + 1;
    if (ch != NULL) {
        ch->comm = comm;
        ch->name = name;
        ch->timeout_s = comm->options.timeout_s;
        ch->link_id = link_id;
        st = find_members(ch, o, &why);
        if (st == SPW_OK && ch->desk_idx[ch->rank] == 0)
            st = spw__segment_create(&ch->segment, block_bytes(ch->near_count), ch->near_count > 1, SPW_REGION_TABLE,
                                     &why);
        o->mine.fd = ch->segment.fd;
    }
    agreed = compare(o, st, &why, err);
    if (agreed != SPW_OK)
        goto done;
    st = join(ch, o, &why);
    agreed = compare(o, st, &why, err);
    spw__segment_hide(&ch->segment);
done:
    if (agreed != SPW_OK) {
        spw_error_wrap(err, "opening channel %s", name);
        spw_channel_close(ch);
        return agreed;
    }
    take_position(ch);
    *out = ch;
    return SPW_OK;
}

spw_status
spw__channel_open_world(spw_comm *comm, uint64_t deadline_ns, spw_error *err)
{
    opener o = {.comm = comm, .size = comm->info.world, .deadline_ns = deadline_ns};
    spw_status st;
    o.all = spw_mem_calloc(o.size, sizeof *o.all);
    if (o.all == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "list of %u ranks", o.size);
    st = open_with(&comm->world, &o, 0, "world", err);
    spw_mem_free(o.all);
    return st;
}

spw_status
spw_channel_open(spw_channel **out, spw_comm *comm, spw_channel *parent, uint32_t color, const char *name,
                 spw_error *err)
{
    opener o = {.comm = comm, .parent = parent != NULL ? parent : comm->world};
    o.size = o.parent->size;
    o.all = (hello *)(void *)o.parent->verdicts; /* there already: a rank without memory can still say so */
    o.deadline_ns = spw_now_ns() + (uint64_t)(comm->options.timeout_s * 1e9);
    return open_with(out, &o, color, name, err);
}

void
spw_channel_set_timeout(spw_channel *ch, double timeout_s)
{
    ch->timeout_s = timeout_s;
}

void
spw_channel_close(spw_channel *ch)
{
    if (ch == NULL)
        return;
    if (ch->position != NULL)
        atomic_store(&ch->position->link_id, 0);
    if (ch->link != NULL)
        ch->comm->transport->link_close(ch->link);
    spw__segment_close(&ch->segment);
    spw_region_unmap(&ch->staging);
    spw_mem_free(ch->members);
    spw_mem_free(ch->desk_idx);
    spw_mem_free(ch->far);
    spw_mem_free(ch->far_member);
    spw_mem_free(ch->far_calls);
    spw_mem_free(ch->near_calls);
    spw_mem_free(ch->out);
    spw_mem_free(ch->in);
    spw_mem_free(ch->posted);
    spw_mem_free(ch->operands);
    spw_mem_free(ch->mail);
    spw_mem_free(ch->verdicts);
    spw_mem_free(ch);
}

uint32_t
spw_channel_rank(const spw_channel *ch)
{
    return ch->rank;
}

uint32_t
spw_channel_size(const spw_channel *ch)
{
    return ch->size;
}

const char *
spw_collective_name(spw_collective op)
{
    static const char *const names[SPW_COLL_COUNT] = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all",
                                                      "exchange",   "broadcast",      "barrier"};
    return (unsigned)op < SPW_COLL_COUNT ? names[op] : "unknown operation";
}

void
spw_channel_get_stats(const spw_channel *ch, spw_comm_stats *out)
{
    for (int i = 0; i < SPW_COLL_COUNT; i++) {
        out->op[i].calls = atomic_load_explicit(&ch->op[i].calls, memory_order_relaxed);
        out->op[i].local_bytes = atomic_load_explicit(&ch->op[i].local_bytes, memory_order_relaxed);
        out->op[i].remote_bytes = atomic_load_explicit(&ch->op[i].remote_bytes, memory_order_relaxed);
        out->op[i].busy_ns = atomic_load_explicit(&ch->op[i].busy_ns, memory_order_relaxed);
        out->op[i].wait_ns = atomic_load_explicit(&ch->op[i].wait_ns, memory_order_relaxed);
    }
}
