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
    return req->issued_bytes == (req->op == SPW_AIO_FSYNC ? 1 : req->bytes);
}

static void
busy_change(spw_aio *aio, spw_aio_op op, bool begin)
{
    uint64_t now;
    int k = op == SPW_AIO_READ ? 0 : 1;
    if (op == SPW_AIO_FSYNC)
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
    if (req->op == SPW_AIO_FSYNC)
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

static spw_aio_request *
file_next_request(spw_aio_file *file, spw__aio_queue **queue)
{
    for (uint32_t c = 0; c < SPW__AIO_CLASS_COUNT; c++) {
        *queue = &file->queues[c];
        if ((*queue)->head != NULL)
            return (*queue)->head;
    }
    return NULL;
}

/* Fills the file's queue depth; false when the backend is full. */
static bool
file_pump(spw_aio *aio, spw_aio_file *file)
{
    while (file->free.head != NULL) {
        spw__aio_queue *queue;
        spw_aio_request *req = file_next_request(file, &queue);
        spw__aio_piece *p = file->free.head, *rest = p->next;
        if (req == NULL)
            return true;
        if (!piece_cut(aio, file, req, p)) {
            p->next = rest;
            return true; /* in order: what is behind waits for the bounce buffer too */
        }
        if (!aio->ops->start(aio->backend, p)) {
            if (p->bounce != NULL)
                aio->bounce_free[aio->bounce_free_count++] = p->bounce;
            p->next = rest;
            return false;
        }
        file->free.head = rest;
        if (rest == NULL)
            file->free.tail = NULL;
        file->inflight++;
        aio->inflight++;
        aio->stats.pieces++;
        busy_change(aio, req->op, true);
        req->pieces_inflight++;
        req->issued_bytes += req->op == SPW_AIO_FSYNC ? 1 : p->bytes;
        if (request_all_issued(req))
            spw__aio_queue_pop(queue);
    }
    return true;
}

static void
pump(spw_aio *aio)
{
    spw_aio_file *first;
    if (aio->closing || aio->files == NULL)
        return;
    for (spw_aio_file *f = aio->files; f != NULL; f = f->next)
        if (!file_pump(aio, f))
            break;
    /* Another file begins next time, so that a full backend or a lack of bounce buffers starves none. */
    first = aio->files;
    if (first->next != NULL) {
        spw_aio_file *last = first->next;
        aio->files = last;
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
    SPW_ASSERT(req->failed || req->op == SPW_AIO_FSYNC || req->done_bytes == req->bytes);
    spw__aio_queue_push(&aio->finished, req);
}

/* The piece is over; status is SPW_OK or why it failed. */
static void
piece_finish(spw_aio *aio, spw__aio_piece *p, spw_status status, int sys_errno)
{
    spw_aio_request *req = p->req;
    spw_aio_file *file = p->file;
    spw__aio_queue *queue = &file->queues[p->class_idx];
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
    busy_change(aio, req->op, false);
    file->inflight--;
    aio->inflight--;
    spw__aio_list_push(&file->free, p);

    req->done_bytes += got;
    req->pieces_inflight--;
    if (status != SPW_OK && !req->failed) {
        req->failed = true;
        req->status = status;
        req->sys_errno = sys_errno;
        if (!request_all_issued(req) && queue->head == req)
            spw__aio_queue_pop(queue); /* the rest is not started */
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
    if (aio->closing)
        piece_finish(aio, p, SPW_ECANCELED, ECANCELED);
    else if (delay_ns > 0)
        park(aio, p, false, delay_ns);
    else if (!aio->ops->start(aio->backend, p)) {
        park(aio, p, false, 0);
        p->blocked = true;
    }
}

static void
piece_land(spw_aio *aio, spw__aio_piece *p)
{
    int64_t r = p->result;
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
    if (p->req->op == SPW_AIO_FSYNC) {
        piece_finish(aio, p, SPW_OK, 0);
        return;
    }
    SPW_ASSERT((uint64_t)r <= spw__aio_transfer_bytes(p));
    p->tries = 0;
    p->io_done += (uint64_t)r;
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
    uint64_t delay_ns = 0;
    if (aio->fault != NULL && !aio->closing) {
        uint64_t done = p->result > 0 ? (uint64_t)p->result : 0, shortened = done;
        int errnum = aio->fault(aio->fault_ctx, p->req->op, spw__aio_transfer_offset(p), spw__aio_transfer_bytes(p),
                                &shortened, &delay_ns);
        if (errnum != 0)
            p->result = -(int64_t)errnum;
        else if (shortened < done)
            p->result = (int64_t)shortened;
    }
    if (delay_ns > 0)
        park(aio, p, true, delay_ns);
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
        if (aio->closing && !p->landing)
            piece_finish(aio, p, SPW_ECANCELED, ECANCELED);
        else if (p->ready_ns > now && !aio->closing)
            spw__aio_list_push(&aio->parked, p);
        else if (p->landing)
            piece_land(aio, p);
        else if (!aio->ops->start(aio->backend, p)) {
            p->blocked = true;
            spw__aio_list_push(&aio->parked, p);
        }
    }
}

void
spw__aio_turn(spw_aio *aio, uint64_t deadline_ns)
{
    spw__aio_list done = {0};
    spw__aio_piece *p;
    uint64_t timeout_ns = 0;
    unpark(aio);
    pump(aio);
    if (deadline_ns > 0 && aio->finished.head == NULL && !aio->woken) {
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

void
spw__aio_drain(spw_aio *aio, spw_aio_file *file)
{
    bool was_woken = aio->woken;
    for (spw_aio_file *f = aio->files; f != NULL; f = f->next)
        if (file == NULL || f == file)
            memset(f->queues, 0, sizeof f->queues);
    aio->closing = true;
    while (file != NULL ? file->inflight > 0 : aio->inflight > 0) {
        aio->woken = false; /* a wake does not end this sleep, but the next wait shall see it */
        spw__aio_turn(aio, UINT64_MAX);
        was_woken |= aio->woken;
    }
    aio->woken = was_woken;
    aio->closing = false;
}
