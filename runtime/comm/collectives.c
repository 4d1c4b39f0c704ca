/*
 * The large collectives. Ranks of this host read each other's operands where they lie; for ranks of other hosts pieces
 * are sent straight from the operand and received straight to their place, or to staging when they are summands. Sums
 * run over all ranks in their order, wherever they are, so that their bits do not depend on it.
 */
#include "comm_internal.h"

enum {
    ELSEWHERE = 0xffffffff,
    PIECES = 0xfffffffe
};                             /* a call's detail: its bytes go another way; are of no equal parts */
enum { COPY_BYTES = 4 << 20 }; /* copied before streams are looked after again */

/* Of each `every` parts there the first counts. */
static spw_status
place_apart(spw_channel *ch, spw_collective op, const void *p, uint64_t part, uint32_t every, uint64_t *id,
            uint64_t *offset, spw_error *err)
{
    uint64_t bytes;
    if (!spw_mul_u64(part, (uint64_t)(ch->size - 1) * every + 1, &bytes) ||
        !spw__alloc_find(ch->comm, p, bytes, id, offset))
        return SPW_RAISE(err, SPW_EINVAL,
                         "%s on channel %s: %u parts of %llu bytes at %p are not in memory of spw_comm_alloc",
                         spw_collective_name(op), ch->name, ch->size, (unsigned long long)part, p);
    return SPW_OK;
}

static spw_status
place_of(spw_channel *ch, spw_collective op, const void *p, uint64_t part, uint64_t *id, uint64_t *offset,
         spw_error *err)
{
    return place_apart(ch, op, p, part, 1, id, offset, err);
}

/* Where member m, of this host, has what it called with. */
static const char *
operand_of(spw_channel *ch, uint32_t m)
{
    const spw__call *c = &ch->near_calls[ch->desk_idx[m]];
    return spw__alloc_peer(ch->comm, c->place_id, c->place_offset, ch->comm->peers[ch->members[m]].local_rank);
}

static spw_status
copy(spw_channel *ch, char *dst, const char *src, uint64_t bytes, spw_error *err)
{
    uint64_t step = ch->far_count > 0 ? COPY_BYTES : bytes;
    for (uint64_t at = 0; at < bytes; at += step) {
        memcpy(dst + at, src + at, bytes - at < step ? bytes - at : step);
        SPW_TRY(spw__op_pump(ch, false, err));
    }
    return SPW_OK;
}

/* Every rank's part of buf to all. */
static spw_status
gather_parts(spw_channel *ch, char *buf, uint64_t part, uint64_t stride, spw_error *err)
{
    for (uint32_t i = 0; i < ch->far_count; i++) {
        ch->out[i] = (spw__flow){.at = buf + ch->rank * stride, .left = part};
        ch->in[i] = (spw__flow){.at = buf + ch->far_member[i] * stride, .left = part};
    }
    SPW_TRY(spw__op_pump(ch, false, err));
    for (uint32_t k = 1; k < ch->size; k++) { /* each begins with another peer: they do not all read the same memory */
        uint32_t m = (ch->rank + k) % ch->size;
        if (ch->desk_idx[m] != NO_IDX)
            SPW_TRY(copy(ch, buf + m * stride, operand_of(ch, m) + m * stride, part, err));
    }
    return spw__op_flush(ch, err);
}

/* Asks for pieces while there is room for them, until piece number piece_idx of everybody is here. */
static spw_status
await_piece(spw_channel *ch, uint64_t piece_idx, uint64_t piece_count, uint64_t part, spw_error *err)
{
    for (;;) {
        bool here = true;
        for (uint32_t i = 0; i < ch->far_count; i++) {
            bool idle = spw__op_received(ch, i);
            if (idle && ch->posted[i] < piece_count && ch->posted[i] < piece_idx + 2) {
                uint64_t first = ch->posted[i] * ch->piece_bytes;
                ch->in[i] = (spw__flow){.at = (char *)ch->staging.base + (i * 2 + ch->posted[i] % 2) * ch->piece_bytes,
                                        .left = part - first < ch->piece_bytes ? part - first : ch->piece_bytes};
                ch->posted[i]++;
                idle = false;
            }
            here = here && (ch->posted[i] > piece_idx + 1 || (idle && ch->posted[i] == piece_idx + 1));
        }
        if (here)
            return SPW_OK;
        SPW_TRY(spw__op_pump(ch, true, err));
    }
}

/* The sum of everybody's part for this rank. */
static spw_status
reduce_part(spw_channel *ch, const char *buf, spw_dtype dtype, uint64_t elems, const spw_reduce_sink *sink,
            spw_error *err)
{
    uint64_t part = elems * spw_dtype_bytes(dtype), piece = ch->far_count > 0 ? ch->piece_bytes : part;
    uint64_t count = part > 0 ? (part + piece - 1) / piece : 0;
    for (uint32_t i = 0; i < ch->far_count; i++) {
        ch->out[i] = (spw__flow){.at = (char *)(uintptr_t)buf + ch->far_member[i] * part, .left = part};
        ch->posted[i] = 0;
    }
    spw_waiting_begin(&ch->waiting);
    for (uint64_t k = 0; k < count; k++) {
        uint64_t first = k * piece, bytes = part - first < piece ? part - first : piece;
        uint64_t first_elem = first / spw_dtype_bytes(dtype);
        SPW_TRY(await_piece(ch, k, count, part, err));
        for (uint32_t m = 0, far = 0; m < ch->size; m++) {
            if (ch->desk_idx[m] != NO_IDX)
                ch->operands[m] = operand_of(ch, m) + ch->rank * part + first;
            else
                ch->operands[m] = (char *)ch->staging.base + (2 * far++ + k % 2) * piece;
        }
        spw__sum_run(&(spw__sum){.operands = ch->operands,
                                 .count = ch->size,
                                 .dtype = dtype,
                                 .sink = (char *)sink->data + first_elem * spw_dtype_bytes(sink->dtype),
                                 .sink_dtype = sink->dtype,
                                 .add = sink->add,
                                 .sumsq = sink->sumsq != NULL ? sink->sumsq + first_elem / SUM_BLOCK : NULL,
                                 .elems = bytes / spw_dtype_bytes(dtype)});
    }
    return spw__op_flush(ch, err);
}

/* Bytes that this rank gets when it gets a part of everybody. */
static spw_status
end(spw_channel *ch, uint64_t part, spw_error *err)
{
    return spw__op_end(ch, (ch->near_count - 1) * part, ch->far_count * part, err);
}

spw_status
spw_all_gather_apart(spw_channel *ch, uint32_t unit, void *buf, uint64_t part_bytes, uint32_t every, spw_error *err)
{
    spw__call call = {.op = SPW_COLL_ALL_GATHER, .unit = unit, .bytes = part_bytes, .detail = every - 1};
    SPW_ASSERT(every > 0);
    SPW_TRY(place_apart(ch, SPW_COLL_ALL_GATHER, buf, part_bytes, every, &call.place_id, &call.place_offset, err));
    SPW_TRY(spw__op_begin(ch, &call, err));
    SPW_TRY(gather_parts(ch, buf, part_bytes, every * part_bytes, err));
    return end(ch, part_bytes, err);
}

spw_status
spw_all_gather(spw_channel *ch, uint32_t unit, void *buf, uint64_t part_bytes, spw_error *err)
{
    return spw_all_gather_apart(ch, unit, buf, part_bytes, 1, err);
}

spw_status
spw_reduce_scatter(spw_channel *ch, uint32_t unit, const void *buf, spw_dtype dtype, uint64_t part_elems,
                   const spw_reduce_sink *sink, spw_error *err)
{
    uint64_t part;
    spw__call call = {.op = SPW_COLL_REDUCE_SCATTER, .unit = unit, .detail = dtype};
    if ((unsigned)dtype >= SPW_DTYPE_COUNT || (unsigned)sink->dtype >= SPW_DTYPE_COUNT ||
        (sink->add && sink->dtype != SPW_F32) || (sink->data == NULL && part_elems > 0) ||
        !spw_mul_u64(part_elems, spw_dtype_bytes(dtype), &part))
        return SPW_RAISE(err, SPW_EINVAL, "reduce_scatter on channel %s: %llu elements of type %d to type %d%s",
                         ch->name, (unsigned long long)part_elems, (int)dtype, (int)sink->dtype,
                         sink->add ? ", added" : "");
    call.bytes = part;
    SPW_TRY(place_of(ch, SPW_COLL_REDUCE_SCATTER, buf, part, &call.place_id, &call.place_offset, err));
    SPW_TRY(spw__op_begin(ch, &call, err));
    SPW_TRY(reduce_part(ch, buf, dtype, part_elems, sink, err));
    return end(ch, part, err);
}

spw_status
spw_all_reduce(spw_channel *ch, uint32_t unit, float *buf, uint64_t part_elems, spw_error *err)
{
    spw_reduce_sink own = {.data = buf + ch->rank * part_elems, .dtype = SPW_F32};
    uint64_t part;
    spw__call call = {.op = SPW_COLL_ALL_REDUCE, .unit = unit};
    if (!spw_mul_u64(part_elems, sizeof *buf, &part))
        return SPW_RAISE(err, SPW_EINVAL, "all_reduce on channel %s: %llu elements", ch->name,
                         (unsigned long long)part_elems);
    call.bytes = part;
    SPW_TRY(place_of(ch, SPW_COLL_ALL_REDUCE, buf, part, &call.place_id, &call.place_offset, err));
    SPW_TRY(spw__op_begin(ch, &call, err));
    SPW_TRY(reduce_part(ch, (const char *)buf, SPW_F32, part_elems, &own, err));
    SPW_TRY(spw__op_phase(ch, err)); /* all have read this rank's summands, which the sums now replace */
    SPW_TRY(gather_parts(ch, (char *)buf, part, part, err));
    return end(ch, 2 * part, err);
}

spw_status
spw_all_to_all(spw_channel *ch, uint32_t unit, const void *send, void *recv, uint64_t part_bytes, spw_error *err)
{
    spw__call call = {.op = SPW_COLL_ALL_TO_ALL, .unit = unit, .bytes = part_bytes};
    const char *from = send;
    char *to = recv;
    SPW_TRY(place_of(ch, SPW_COLL_ALL_TO_ALL, send, part_bytes, &call.place_id, &call.place_offset, err));
    if (part_bytes > 0 && from < to + ch->size * part_bytes && to < from + ch->size * part_bytes)
        return SPW_RAISE(err, SPW_EINVAL, "all_to_all on channel %s: send and recv overlap", ch->name);
    SPW_TRY(spw__op_begin(ch, &call, err));
    for (uint32_t i = 0; i < ch->far_count; i++) {
        ch->out[i] = (spw__flow){.at = (char *)(uintptr_t)from + ch->far_member[i] * part_bytes, .left = part_bytes};
        ch->in[i] = (spw__flow){.at = to + ch->far_member[i] * part_bytes, .left = part_bytes};
    }
    SPW_TRY(spw__op_pump(ch, false, err));
    for (uint32_t k = 1; k < ch->size; k++) {
        uint32_t m = (ch->rank + k) % ch->size;
        if (ch->desk_idx[m] != NO_IDX)
            SPW_TRY(copy(ch, to + m * part_bytes, operand_of(ch, m) + ch->rank * part_bytes, part_bytes, err));
    }
    SPW_TRY(spw__op_flush(ch, err));
    return end(ch, part_bytes, err);
}

static bool
within(const spw_comm_piece *p, uint64_t bytes)
{
    return p->bytes <= bytes && p->from <= bytes - p->bytes && p->to <= bytes - p->bytes;
}

spw_status
spw_all_to_all_v(spw_channel *ch, uint32_t unit, void *buf, uint64_t bytes, const spw_comm_piece *take,
                 const spw_comm_piece *give, spw_error *err)
{
    spw__call call = {.op = SPW_COLL_ALL_TO_ALL, .unit = unit, .bytes = bytes, .detail = PIECES};
    uint64_t near = 0, far = 0;
    char *at = buf;
    for (uint32_t m = 0; m < ch->size; m++) {
        if (m != ch->rank && !(within(&take[m], bytes) && within(&give[m], bytes)))
            return SPW_RAISE(err, SPW_EINVAL,
                             "all_to_all_v on channel %s: a piece for or of rank %u is not in %llu bytes", ch->name,
                             ch->members[m], (unsigned long long)bytes);
    }
    if (!spw__alloc_find(ch->comm, buf, bytes, &call.place_id, &call.place_offset))
        return SPW_RAISE(err, SPW_EINVAL,
                         "all_to_all_v on channel %s: %llu bytes at %p are not in memory of spw_comm_alloc", ch->name,
                         (unsigned long long)bytes, buf);
    SPW_TRY(spw__op_begin(ch, &call, err));
    for (uint32_t i = 0; i < ch->far_count; i++) {
        const uint32_t m = ch->far_member[i];
        ch->out[i] = (spw__flow){.at = at + give[m].from, .left = give[m].bytes};
        ch->in[i] = (spw__flow){.at = at + take[m].to, .left = take[m].bytes};
        far += take[m].bytes;
    }
    SPW_TRY(spw__op_pump(ch, false, err));
    for (uint32_t k = 1; k < ch->size; k++) {
        const uint32_t m = (ch->rank + k) % ch->size;
        if (ch->desk_idx[m] == NO_IDX)
            continue;
        SPW_TRY(copy(ch, at + take[m].to, operand_of(ch, m) + take[m].from, take[m].bytes, err));
        near += take[m].bytes;
    }
    SPW_TRY(spw__op_flush(ch, err));
    return spw__op_end(ch, near, far, err);
}

spw_status
spw_meet(spw_channel *ch, spw_collective op, uint32_t unit, uint64_t part_bytes, spw_error *err)
{
    spw__call call = {.op = op, .unit = unit, .bytes = part_bytes, .detail = ELSEWHERE};
    SPW_TRY(spw__op_begin(ch, &call, err));
    return end(ch, op == SPW_COLL_ALL_REDUCE ? 2 * part_bytes : part_bytes, err);
}
