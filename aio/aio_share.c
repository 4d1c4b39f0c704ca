/*
 * aio_share.c - whose turn it is on a device: policy on plain data, without clocks, threads or files.
 *
 * Left alone, a stream of reads and a stream of writes do not share a disk: whoever queues deeper wins and the other
 * waits for seconds. Here urgent requests go first; then reads and writes each get a part of the queue in proportion
 * to the bytes that they still have to move, what is only done behind (BULK) counting a quarter. Each side that waits
 * keeps at least one slot, so neither starves, and none stays empty while anything waits. A queue of one slot cannot
 * be parted: there the other side gets a turn after a few.
 */
#include "aio_internal.h"

enum { BULK_PART = 4, PATIENCE = 4 }; /* turns per slot that a side lets pass */

static uint32_t
best_class(const spw__aio_load *load, uint32_t side)
{
    static const uint32_t order[2][2] = {{SPW__AIO_CLASS_READ, SPW__AIO_CLASS_BULK_READ},
                                         {SPW__AIO_CLASS_WRITE, SPW__AIO_CLASS_BULK_WRITE}};
    for (int i = 0; i < 2; i++)
        if (load->waiting_count[order[side][i]] > 0)
            return order[side][i];
    return SPW__AIO_CLASS_COUNT;
}

/* Bytes to move; never 0, because a flush waits without any. */
static double
need(const spw__aio_load *load, uint32_t normal, uint32_t bulk)
{
    return 1.0 + (double)load->waiting_bytes[normal] + (double)load->waiting_bytes[bulk] / BULK_PART;
}

uint32_t
spw__aio_share_next(const spw__aio_load *load)
{
    const uint32_t read = best_class(load, 0), write = best_class(load, 1);
    double reads, writes, slots;
    if (load->waiting_count[SPW__AIO_CLASS_URGENT] > 0)
        return SPW__AIO_CLASS_URGENT;
    if (read == SPW__AIO_CLASS_COUNT || write == SPW__AIO_CLASS_COUNT)
        return read == SPW__AIO_CLASS_COUNT ? write : read;
    for (uint32_t side = 0; side < 2; side++)
        if (load->passed[side] >= PATIENCE * load->depth)
            return side == 0 ? read : write;
    if (load->depth == 1)
        return write == SPW__AIO_CLASS_WRITE && read == SPW__AIO_CLASS_BULK_READ ? write : read;
    reads = need(load, SPW__AIO_CLASS_READ, SPW__AIO_CLASS_BULK_READ);
    writes = need(load, SPW__AIO_CLASS_WRITE, SPW__AIO_CLASS_BULK_WRITE);
    slots = load->depth * reads / (reads + writes);
    if (slots < 1)
        slots = 1;
    if (slots > load->depth - 1)
        slots = load->depth - 1;
    /* The side that has the smaller part of its slots; reads when both have the same. */
    return load->inflight[0] * (load->depth - slots) <= load->inflight[1] * slots ? read : write;
}
