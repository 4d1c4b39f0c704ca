/*
 * aio_piece.c - how requests become transfers: cut into pieces, started in order of class, landed one by one.
 *
 * A cut never mixes whole blocks with parts of blocks. Whole blocks go through the O_DIRECT descriptor, straight from
 * or to the caller's buffer when its address is aligned, else through a bounce buffer. A part of a block (the head or
 * tail of a misaligned request) is read by reading the block around it into a bounce buffer. It is written through the
 * plain descriptor: the page cache does the read-modify-write under the kernel's own locks, so two requests that meet
 * inside one block cannot undo each other, and the file never grows past the last byte written. Because blocks are
 * whole pages, a page is never written both ways at once by requests that do not overlap.
 *
 * A transfer that came back short is resumed where it stopped; when that is inside a block, through the plain
 * descriptor, which has no alignment. So each resumption makes progress, and zero bytes means the end of the file.
 * Called by aio.c on the context's thread.
 */
#include "aio_internal.h"

#include <errno.h>

enum { TRIES_MAX = 64 }; /* EAGAIN in a row before a piece fails; about half a second of waiting */

uint32_t
spw__aio_class(spw_aio_op op, spw_aio_priority priority)
{
    switch (priority) {
    case SPW_AIO_URGENT: return SPW__AIO_CLASS_URGENT;
    case SPW_AIO_NORMAL: return op == SPW_AIO_READ ? SPW__AIO_CLASS_READ : SPW__AIO_CLASS_WRITE;
    default: return op == SPW_AIO_READ ? SPW__AIO_CLASS_BULK_READ : SPW__AIO_CLASS_BULK_WRITE;
    }
}

static bool
request_all_issued(const spw_aio_request *req)
{
    return req->issued_bytes == (spw__aio_is_sync(req->op) ? 1 : req->bytes);
}

static void
busy_change(spw_aio *aio, spw_aio_op op, bool begin)
{
    uint64_t now;
    uint32_t k = spw__aio_side(op);
    if (spw__aio_is_sync(op))
        return;
    if (begin ? aio->busy_count[k]++ > 0 : --aio->busy_count[k] > 0)
        return;
    now = spw_now_ns();
    if (begin)
        aio->busy_begin_ns[k] = now;
    else
        *(k == 0 ? &aio->stats.read_busy_ns : &aio->stats.write_busy_ns) += now - aio->busy_begin_ns[k];
}

/* ---------------------------------------------------------------- cutting and starting */

static bool
address_aligned(const spw_aio_file *file, const void *buf)
{
    return (uintptr_t)buf % file->align_mem == 0;
}

/* Describes the next piece of req; false when it needs a bounce buffer and none is free. */
static bool
piece_cut(spw_aio *aio, spw_aio_file *file, spw_aio_request *req, spw__aio_piece *p)
{
    uint64_t left, head, n;
    bool part;
    memset(p, 0, sizeof *p);
    p->req = req;
    p->file = file;
    p->class_idx = spw__aio_class(req->op, req->priority);
    if (spw__aio_is_sync(req->op))
        return true;
    p->offset = req->offset + req->issued_bytes;
    p->buf = (char *)req->buf + req->issued_bytes;
    left = req->bytes - req->issued_bytes;
    head = p->offset % file->align;
    part = head > 0 || left < file->align;
    n = part ? file->align - head : file->block_bytes - p->offset % file->block_bytes;
    if (n > left)
        n = part ? left : left - left % file->align;
    p->bytes = n;
    p->io_offset = p->offset;
    p->io_bytes = n;
    p->io_buf = p->buf;
    if (file->fds[SPW__AIO_FD_DIRECT] < 0 || (part && req->op == SPW_AIO_WRITE)) {
        p->fd_idx = SPW__AIO_FD_PLAIN;
        return true;
    }
    p->fd_idx = SPW__AIO_FD_DIRECT;
    if (!part && address_aligned(file, p->buf))
        return true;
    if (aio->bounce_free_count == 0)
        return false;
    p->bounce = aio->bounce_free[--aio->bounce_free_count];
    p->io_buf = p->bounce;
    if (part) {
        p->skip = head;
        p->io_offset -= head;
        p->io_bytes = file->align;
    }
    if (req->op == SPW_AIO_WRITE)
        memcpy(p->bounce, p->buf, n);
    return true;
}

/* Its file is being closed, or all of them: it is not started again and not held back. */
static bool
piece_closing(const spw_aio *aio, const spw__aio_piece *p)
{
    return aio->closing && (aio->closing_file == NULL || aio->closing_file == p->file);
}

/* Asks the test's fault what shall become of the next transfer. True when it shall fail before it starts. */
static bool
draw_fault(spw_aio *aio, spw__aio_piece *p)
{
    uint64_t bytes = spw__aio_transfer_bytes(p), move = bytes, delay_ns = 0;
    int errnum;
    if (p->drawn || aio->fault == NULL || piece_closing(aio, p))
        return false;
    errnum = aio->fault(aio->fault_ctx, p->req, spw__aio_transfer_offset(p), bytes, &move, &delay_ns);
    p->drawn = true;
    p->fault_errno = errnum;
    p->fault_bytes = move < bytes ? move : bytes;
    p->fault_delay_ns = delay_ns;
    p->move_bytes = p->fault_bytes;
    if (p->fd_idx == SPW__AIO_FD_DIRECT && p->move_bytes % p->file->align != 0) { /* direct I/O moves whole blocks */
        p->move_bytes -= p->move_bytes % p->file->align;
        if (errnum == 0)
            p->move_bytes += p->file->align; /* more than will be told, which is harmless */
    }
    if (spw__aio_is_sync(p->req->op))
        return errnum != 0;
    return p->move_bytes == 0 || (errnum != 0 && move >= bytes);
}

static void park(spw_aio *aio, spw__aio_piece *p, bool landing, uint64_t delay_ns);

/* Hands the next transfer to the backend; false when that is full. */
static bool
piece_start(spw_aio *aio, spw__aio_piece *p)
{
    if (draw_fault(aio, p)) {
        p->result = p->fault_errno != 0 ? -(int64_t)p->fault_errno : 0;
        park(aio, p, true, p->fault_delay_ns);
        return true;
    }
    if (!aio->ops->start(aio->backend, p))
        return false;
    if (aio->options.single_submit)
        aio->ops->flush(aio->backend);
    return true;
}

static void
waiting_change(spw__aio_device *device, uint32_t class_idx, int64_t requests, int64_t bytes)
{
    device->load.waiting_count[class_idx] += (uint64_t)requests;
    device->load.waiting_bytes[class_idx] += (uint64_t)bytes;
}

void
spw__aio_enqueue(spw_aio_request *req)
{
    spw__aio_device *device = req->file->device;
    uint32_t c = spw__aio_class(req->op, req->priority);
    spw__aio_queue_push(&device->queues[c], req);
    waiting_change(device, c, 1, spw__aio_is_sync(req->op) ? 0 : (int64_t)req->bytes);
}

/* Takes the head of a queue out, with what is left of it. */
static spw_aio_request *
dequeue(spw__aio_device *device, uint32_t class_idx)
{
    spw_aio_request *req = spw__aio_queue_pop(&device->queues[class_idx]);
    if (req != NULL)
        waiting_change(device, class_idx, -1,
                       spw__aio_is_sync(req->op) ? 0 : -(int64_t)(req->bytes - req->issued_bytes));
    return req;
}

/* A turn was given to one side; the other, if it waits, has let it pass. */
static void
count_turn(spw__aio_load *load, spw_aio_op op)
{
    static const uint32_t classes[2][2] = {{SPW__AIO_CLASS_READ, SPW__AIO_CLASS_BULK_READ},
                                           {SPW__AIO_CLASS_WRITE, SPW__AIO_CLASS_BULK_WRITE}};
    uint32_t side = spw__aio_side(op), other = 1 - side;
    load->inflight[side]++;
    load->passed[side] = 0;
    if (load->waiting_count[classes[other][0]] + load->waiting_count[classes[other][1]] > 0)
        load->passed[other]++;
    else
        load->passed[other] = 0;
}

/* Fills the device's queue; false when the backend is full. */
static bool
device_pump(spw_aio *aio, spw__aio_device *device)
{
    spw__aio_load *load = &device->load;
    if (aio->options.lockstep && load->inflight[0] + load->inflight[1] > 0)
        return true;
    while (device->free.head != NULL) {
        uint32_t c = spw__aio_share_next(load);
        spw_aio_request *req = c < SPW__AIO_CLASS_COUNT ? device->queues[c].head : NULL;
        spw__aio_piece *p;
        if (req == NULL)
            return true;
        p = spw__aio_list_pop(&device->free);
        if (!piece_cut(aio, req->file, req, p)) {
            spw__aio_list_push(&device->free, p);
            return true; /* in order: what is behind waits for the bounce buffer too */
        }
        if (!piece_start(aio, p)) {
            if (p->bounce != NULL)
                aio->bounce_free[aio->bounce_free_count++] = p->bounce;
            spw__aio_list_push(&device->free, p);
            return false;
        }
        count_turn(load, req->op);
        req->file->inflight++;
        aio->inflight++;
        aio->stats.pieces++;
        busy_change(aio, req->op, true);
        req->pieces_inflight++;
        if (req->start_ns == 0)
            req->start_ns = spw_now_ns();
        if (!spw__aio_is_sync(req->op)) {
            req->issued_bytes += p->bytes;
            waiting_change(device, c, 0, -(int64_t)p->bytes);
        } else {
            req->issued_bytes = 1;
        }
        if (request_all_issued(req)) {
            spw__aio_queue_pop(&device->queues[c]);
            waiting_change(device, c, -1, 0);
        }
    }
    return true;
}

static void
pump(spw_aio *aio)
{
    spw__aio_device *first;
    if (aio->devices == NULL)
        return;
    for (spw__aio_device *d = aio->devices; d != NULL; d = d->next)
        if (!device_pump(aio, d))
            break;
    /* Another device begins next time, so that a full backend or a lack of bounce buffers starves none. */
    first = aio->devices;
    if (first->next != NULL) {
        spw__aio_device *last = first->next;
        aio->devices = last;
        while (last->next != NULL)
            last = last->next;
        last->next = first;
        first->next = NULL;
    }
}

/* ---------------------------------------------------------------- landing */

static spw_status
status_of_errno(int errnum)
{
    return errnum == ENOSPC || errnum == EDQUOT ? SPW_ENOSPC : SPW_EIO;
}

static void
request_finish_maybe(spw_aio *aio, spw_aio_request *req)
{
    if (req->pieces_inflight > 0 || (!req->failed && !request_all_issued(req)))
        return;
    req->done_ns = spw_now_ns();
    SPW_ASSERT(req->failed || spw__aio_is_sync(req->op) || req->done_bytes == req->bytes);
    spw__aio_queue_push(&aio->finished, req);
}

/* The piece is over; status is SPW_OK or why it failed. */
static void
piece_finish(spw_aio *aio, spw__aio_piece *p, spw_status status, int sys_errno)
{
    spw_aio_request *req = p->req;
    spw_aio_file *file = p->file;
    spw__aio_device *device = file->device;
    uint64_t got = p->io_done > p->skip ? p->io_done - p->skip : 0;
    if (got > p->bytes)
        got = p->bytes;
    if (p->bounce != NULL) {
        if (req->op == SPW_AIO_READ && got > 0)
            memcpy(p->buf, p->bounce + p->skip, got);
        aio->stats.bounce_bytes += p->io_done;
        aio->bounce_free[aio->bounce_free_count++] = p->bounce;
        p->bounce = NULL;
    }
    if (req->op == SPW_AIO_READ)
        aio->stats.read_bytes += p->io_done;
    else if (req->op == SPW_AIO_WRITE)
        aio->stats.write_bytes += p->io_done;
    if (p->io_done > 0 && file->fds[SPW__AIO_FD_DIRECT] < 0)
        spw__aio_file_forget(file, req->op, p->io_offset, p->io_done);
    busy_change(aio, req->op, false);
    file->inflight--;
    aio->inflight--;
    device->load.inflight[spw__aio_side(req->op)]--;
    spw__aio_list_push(&device->free, p);

    req->done_bytes += got;
    req->pieces_inflight--;
    if (status != SPW_OK && !req->failed) {
        req->failed = true;
        req->status = status;
        req->sys_errno = sys_errno;
        if (!request_all_issued(req) && device->queues[p->class_idx].head == req)
            dequeue(device, p->class_idx); /* the rest is not started */
    }
    request_finish_maybe(aio, req);
}

static void
park(spw_aio *aio, spw__aio_piece *p, bool landing, uint64_t delay_ns)
{
    uint64_t now = spw_now_ns();
    p->landing = landing;
    p->blocked = false;
    p->ready_ns = delay_ns > UINT64_MAX - now ? UINT64_MAX : now + delay_ns;
    spw__aio_list_push(&aio->parked, p);
}

static void
piece_restart(spw_aio *aio, spw__aio_piece *p, uint64_t delay_ns)
{
    aio->stats.retries++;
    if (piece_closing(aio, p))
        piece_finish(aio, p, SPW_ECANCELED, ECANCELED);
    else if (delay_ns > 0)
        park(aio, p, false, delay_ns);
    else if (!piece_start(aio, p)) {
        park(aio, p, false, 0);
        p->blocked = true;
    }
}

static void
piece_land(spw_aio *aio, spw__aio_piece *p)
{
    int64_t r = p->result;
    p->drawn = false; /* the next transfer draws anew */
    if (r == -EAGAIN || r == -EINTR) {
        uint64_t delay_ns = p->tries == 0 ? 0 : 1000ull << (p->tries < 13 ? p->tries : 13);
        if (++p->tries > TRIES_MAX)
            piece_finish(aio, p, SPW_EIO, (int)-r);
        else
            piece_restart(aio, p, delay_ns);
        return;
    }
    if (r < 0) {
        piece_finish(aio, p, status_of_errno((int)-r), (int)-r);
        return;
    }
    if (spw__aio_is_sync(p->req->op)) {
        piece_finish(aio, p, SPW_OK, 0);
        return;
    }
    p->tries = 0;
    p->io_done += (uint64_t)r;
    SPW_ASSERT(p->io_done <= p->io_bytes);
    if (p->io_done >= p->skip + p->bytes) { /* a block around the file's end may stop behind what was wanted */
        piece_finish(aio, p, SPW_OK, 0);
        return;
    }
    if (r == 0) {
        piece_finish(aio, p, SPW_EIO, 0);
        return;
    }
    if (p->io_done % p->file->align != 0 || !address_aligned(p->file, p->io_buf + p->io_done))
        p->fd_idx = SPW__AIO_FD_PLAIN;
    piece_restart(aio, p, 0);
}

/* A transfer came back from the backend. The test's fault may change its result or hold it back. */
static void
piece_arrive(spw_aio *aio, spw__aio_piece *p)
{
    if (p->drawn && p->fault_errno != 0)
        p->result = -(int64_t)p->fault_errno;
    else if (p->drawn && p->result > (int64_t)p->fault_bytes)
        p->result = (int64_t)p->fault_bytes;
    if (p->drawn && p->fault_delay_ns > 0 && !piece_closing(aio, p))
        park(aio, p, true, p->fault_delay_ns);
    else
        piece_land(aio, p);
}

/* ---------------------------------------------------------------- the crank */

/* When a parked piece is due next; UINT64_MAX: none. A blocked one waits for a completion of the full backend. */
static uint64_t
parked_due_ns(const spw_aio *aio)
{
    uint64_t due = UINT64_MAX;
    for (const spw__aio_piece *p = aio->parked.head; p != NULL; p = p->next)
        if (!p->blocked && p->ready_ns < due)
            due = p->ready_ns;
    return due;
}

static void
unpark(spw_aio *aio)
{
    spw__aio_list waiting = aio->parked;
    spw__aio_piece *p;
    uint64_t now;
    if (waiting.head == NULL)
        return;
    now = spw_now_ns();
    memset(&aio->parked, 0, sizeof aio->parked);
    while ((p = spw__aio_list_pop(&waiting)) != NULL) {
        if (piece_closing(aio, p) && !p->landing)
            piece_finish(aio, p, SPW_ECANCELED, ECANCELED);
        else if (p->ready_ns > now && !piece_closing(aio, p))
            spw__aio_list_push(&aio->parked, p);
        else if (p->landing)
            piece_land(aio, p);
        else if (!piece_start(aio, p)) {
            p->blocked = true;
            spw__aio_list_push(&aio->parked, p);
        }
    }
}

/* Nothing is in flight any more of what is being closed. */
static bool
drained(const spw_aio *aio)
{
    return aio->closing && (aio->closing_file != NULL ? aio->closing_file->inflight : aio->inflight) == 0;
}

void
spw__aio_turn(spw_aio *aio, uint64_t deadline_ns)
{
    spw__aio_list done = {0};
    spw__aio_piece *p;
    uint64_t timeout_ns = 0;
    unpark(aio);
    pump(aio);
    if (deadline_ns > 0 && aio->finished.head == NULL && !aio->woken && !drained(aio)) {
        uint64_t due = parked_due_ns(aio);
        if (due > deadline_ns)
            due = deadline_ns;
        timeout_ns = due;
        if (due != UINT64_MAX) {
            uint64_t now = spw_now_ns();
            timeout_ns = due > now ? due - now : 0;
        }
    }
    aio->ops->reap(aio->backend, timeout_ns, &done, &aio->woken);
    if (done.head == NULL)
        return;
    while ((p = spw__aio_list_pop(&done)) != NULL)
        piece_arrive(aio, p);
    unpark(aio);
    pump(aio);
    aio->ops->flush(aio->backend); /* the disk works on while the caller computes */
}

/* Forgets the requests of one file, or of all. */
static void
queue_drop(spw__aio_device *device, uint32_t class_idx, const spw_aio_file *file)
{
    spw__aio_queue kept = {0};
    spw_aio_request *req;
    while ((req = dequeue(device, class_idx)) != NULL)
        if (file != NULL && req->file != file)
            spw__aio_queue_push(&kept, req);
    while ((req = spw__aio_queue_pop(&kept)) != NULL) {
        spw__aio_queue_push(&device->queues[class_idx], req);
        waiting_change(device, class_idx, 1, spw__aio_is_sync(req->op) ? 0 : (int64_t)(req->bytes - req->issued_bytes));
    }
}

void
spw__aio_drain(spw_aio *aio, spw_aio_file *file)
{
    bool was_woken = aio->woken;
    spw__aio_queue kept = {0};
    spw_aio_request *req;
    for (spw__aio_device *d = aio->devices; d != NULL; d = d->next)
        if (file == NULL || d == file->device)
            for (uint32_t c = 0; c < SPW__AIO_CLASS_COUNT; c++)
                queue_drop(d, c, file);
    aio->closing = true;
    aio->closing_file = file;
    while (!drained(aio)) {
        aio->woken = false; /* a wake does not end this sleep, but the next wait shall see it */
        spw__aio_turn(aio, UINT64_MAX);
        was_woken |= aio->woken;
    }
    aio->woken = was_woken;
    aio->closing = false;
    while ((req = spw__aio_queue_pop(&aio->finished)) != NULL) /* finished, and never taken */
        if (file != NULL && req->file != file)
            spw__aio_queue_push(&kept, req);
    aio->finished = kept;
}
