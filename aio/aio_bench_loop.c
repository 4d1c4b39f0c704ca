/*
 * aio_bench_loop.c - keeps transfers going while the clock runs: single blocks, on a context or on a bare ring, and the
 * pattern of a training step.
 *
 * The bare ring is the comparison: registered file and buffers, batched submission, nothing else. It runs the same
 * loop over the same requests, so a difference is what this library costs. Called by aio_bench.c.
 */
#include "aio_bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef SPW_HAVE_URING
#include <liburing.h>
#endif

enum { SIDE_READ, SIDE_WRITE };

static bool
time_over(const spw_aio_bench *bench, const spw_aio_bench_run *run, const spw__bench_count *count)
{
    return spw_now_ns() - count->begin_ns >= run->duration_ns || (bench->stop != NULL && *bench->stop != 0);
}

static spw_status
stopped(const spw_aio_bench *bench, spw_error *err)
{
    return bench->stop != NULL && *bench->stop != 0 ? SPW_RAISE(err, SPW_ECANCELED, "stopped") : SPW_OK;
}

static uint64_t
stream_take(spw__bench_stream *s, uint64_t bytes)
{
    uint64_t at = s->at;
    s->at = at + 2 * bytes <= s->end ? at + bytes : s->begin;
    return at;
}

/* ---------------------------------------------------------------- a bare ring */

typedef struct bare_ring {
#ifdef SPW_HAVE_URING
    struct io_uring ring;
#endif
    bool ready;
} bare_ring;

#ifdef SPW_HAVE_URING
static spw_status
bare_open(bare_ring *b, const spw_aio_bench_run *run, spw_aio_file **files, const spw_region *region, spw_error *err)
{
    unsigned flags[2] = {0, 0};
    int fds[SPW_AIO_BENCH_DIRS_MAX], rc = -EINVAL;
    struct iovec all = {.iov_base = region->base, .iov_len = region->bytes};
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
    flags[0] = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
#endif
    for (int i = 0; i < 2 && rc == -EINVAL; i++)
        rc = io_uring_queue_init(run->aio->queue_depth * run->dir_count, &b->ring, flags[i] | IORING_SETUP_CLAMP);
    if (rc != 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "bare io_uring: %s", strerror(-rc));
    b->ready = true;
    for (uint32_t i = 0; i < run->dir_count; i++)
        fds[i] = files[i]->fds[files[i]->fds[SPW__AIO_FD_DIRECT] >= 0 ? SPW__AIO_FD_DIRECT : SPW__AIO_FD_PLAIN];
    rc = io_uring_register_files(&b->ring, fds, run->dir_count);
    if (rc != 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "bare io_uring, registered files: %s", strerror(-rc));
    rc = io_uring_register_buffers(&b->ring, &all, 1);
    return rc == 0 ? SPW_OK : SPW_RAISE(err, SPW_EUNSUPPORTED, "bare io_uring, registered buffers: %s", strerror(-rc));
}

static void
bare_close(bare_ring *b)
{
    if (b->ready)
        io_uring_queue_exit(&b->ring);
}

static void
bare_start(bare_ring *b, spw_aio_request *req, uint32_t file_idx)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&b->ring); /* as many as requests */
    if (req->op == SPW_AIO_READ)
        io_uring_prep_read_fixed(sqe, (int)file_idx, req->buf, (unsigned)req->bytes, req->offset, 0);
    else
        io_uring_prep_write_fixed(sqe, (int)file_idx, req->buf, (unsigned)req->bytes, req->offset, 0);
    sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, req);
    req->start_ns = spw_now_ns();
}

/* The next that finished; sleeps only when sleep is true, and hands over first. */
static spw_aio_request *
bare_take(bare_ring *b, bool sleep)
{
    struct io_uring_cqe *cqe;
    spw_aio_request *req;
    if (io_uring_peek_cqe(&b->ring, &cqe) != 0) {
        if (!sleep || io_uring_submit_and_wait(&b->ring, 1) < 0 || io_uring_peek_cqe(&b->ring, &cqe) != 0)
            return NULL;
    }
    req = io_uring_cqe_get_data(cqe);
    req->sys_errno = cqe->res < 0 ? -cqe->res : 0;
    req->done_bytes = cqe->res < 0 ? 0 : (uint64_t)cqe->res;
    req->status = req->done_bytes == req->bytes ? SPW_OK : SPW_EIO;
    io_uring_cqe_seen(&b->ring, cqe);
    return req;
}
#else
static spw_status
bare_open(bare_ring *b, const spw_aio_bench_run *run, spw_aio_file **files, const spw_region *region, spw_error *err)
{
    (void)b, (void)run, (void)files, (void)region;
    return SPW_RAISE(err, SPW_EUNSUPPORTED, "bare io_uring: this build has no liburing");
}
static void
bare_close(bare_ring *b)
{
    (void)b;
}
static void
bare_start(bare_ring *b, spw_aio_request *req, uint32_t file_idx)
{
    (void)b, (void)req, (void)file_idx;
}
static spw_aio_request *
bare_take(bare_ring *b, bool sleep)
{
    (void)b, (void)sleep;
    return NULL;
}
#endif

/* ---------------------------------------------------------------- blocks */

typedef struct bench_buffer {
    char *base;
    uint64_t offset; /* of what it holds; UINT64_MAX: nothing yet */
} bench_buffer;

typedef struct block_loop {
    spw_aio_bench *bench;
    const spw_aio_bench_run *run;
    spw_aio *aio; /* NULL: bare */
    bare_ring bare;
    spw_aio_file **files;
    spw_aio_request *reqs; /* queue_depth of each file, one file after the other */
    double reads;          /* share of the bytes */
    spw__bench_stream streams[SPW_AIO_BENCH_DIRS_MAX][2];
    uint64_t issued[SPW_AIO_BENCH_DIRS_MAX][2];
    bench_buffer *spare; /* (spare_count), a ring: the one that has rested longest is taken */
    uint32_t spare_count, spare_at;
} block_loop;

/* One for each request, and those that rest meanwhile. */
static uint32_t
block_buffers(const spw_aio_bench_run *run)
{
    const uint64_t least = (uint64_t)run->aio->queue_depth * run->dir_count;
    const uint64_t asked = run->memory_bytes / run->aio->block_bytes;
    return (uint32_t)(asked > least ? asked : least);
}

uint64_t
spw__bench_blocks_bytes(const spw_aio_bench_run *run)
{
    return run->aio->block_bytes * block_buffers(run);
}

static spw_status
block_start(block_loop *l, spw_aio_request *req, spw_error *err)
{
    uint32_t i = (uint32_t)(req - l->reqs) / l->run->aio->queue_depth;
    uint64_t *issued = l->issued[i];
    int side = l->reads >= 1 || (l->reads > 0 && (double)issued[0] * (1 - l->reads) <= (double)issued[1] * l->reads)
                   ? SIDE_READ
                   : SIDE_WRITE;
    uint64_t old_offset;
    if (l->spare_count > 0) {
        bench_buffer *spare = &l->spare[l->spare_at++ % l->spare_count], own = {req->buf, req->offset};
        req->buf = spare->base;
        req->offset = spare->offset;
        *spare = own;
    }
    old_offset = req->offset;
    req->op = side == SIDE_READ ? SPW_AIO_READ : SPW_AIO_WRITE;
    req->offset = stream_take(&l->streams[i][side], req->bytes);
    issued[side] += req->bytes;
    if (side == SIDE_WRITE)
        spw__bench_stamp_pages(l->bench, l->run->dir_first + i, old_offset, req->offset, req->bytes, 1, req->buf);
    if (l->aio != NULL)
        return spw_aio_submit(l->aio, req, err);
    bare_start(&l->bare, req, i);
    return SPW_OK;
}

static spw_status
block_loop_run(block_loop *l, spw__bench_count *count, spw_error *err)
{
    const uint32_t depth = l->run->aio->queue_depth, total = depth * l->run->dir_count;
    uint32_t going = 0;
    spw_status st = SPW_OK;
    bool over = false;
    for (uint32_t i = 0; i < total && st == SPW_OK; i++) {
        st = block_start(l, &l->reqs[i], err);
        going += st == SPW_OK;
    }
    while (going > 0) {
        spw_aio_request *req = l->aio != NULL ? spw_aio_wait(l->aio, UINT64_MAX) : bare_take(&l->bare, true);
        if (req == NULL)
            continue;
        going--;
        if (req->status != SPW_OK) {
            if (st == SPW_OK)
                st = spw_aio_request_error(req, err);
            continue;
        }
        spw__bench_land(l->bench, count, req->op, req->bytes, req->start_ns);
        if (req->op == SPW_AIO_READ)
            count->wrong += spw__bench_check_ends(l->bench, l->run->dir_first + (uint32_t)(req - l->reqs) / depth,
                                                  req->offset, req->bytes, req->buf);
        over = over || time_over(l->bench, l->run, count);
        if (!over && st == SPW_OK) {
            st = block_start(l, req, err);
            going += st == SPW_OK;
        }
    }
    return st == SPW_OK ? stopped(l->bench, err) : st;
}

spw_status
spw__bench_blocks(spw_aio_bench *bench, const spw_aio_bench_run *run, spw_aio *aio, spw_aio_file **files,
                  const spw_region *region, spw__bench_count *count, spw_error *err)
{
    const uint32_t depth = run->aio->queue_depth, total = depth * run->dir_count;
    const uint64_t half = bench->file_bytes / 2;
    block_loop l = {.bench = bench, .run = run, .aio = aio, .files = files};
    spw_status st = SPW_OK;
    l.reads = run->pattern == SPW_AIO_PATTERN_READ ? 1 : run->pattern == SPW_AIO_PATTERN_WRITE ? 0 : 0.5;
    if (run->pattern == SPW_AIO_PATTERN_MIXED && run->reads > 0)
        l.reads = run->reads;
    l.spare_count = block_buffers(run) - total;
    l.reqs = spw_mem_calloc(total, sizeof *l.reqs);
    l.spare = spw_mem_calloc(l.spare_count + 1, sizeof *l.spare);
    if (l.reqs == NULL || l.spare == NULL) {
        st = SPW_RAISE(err, SPW_ENOMEM, "bench requests");
        goto out;
    }
    for (uint32_t i = 0; i < l.spare_count; i++)
        l.spare[i] = (bench_buffer){(char *)region->base + (total + i) * run->aio->block_bytes, UINT64_MAX};
    for (uint32_t i = 0; i < total; i++) {
        l.reqs[i].file = files[i / depth];
        l.reqs[i].bytes = run->aio->block_bytes;
        l.reqs[i].offset = UINT64_MAX;
        l.reqs[i].buf = (char *)region->base + i * run->aio->block_bytes;
    }
    for (uint32_t i = 0; i < run->dir_count; i++) {
        bool both = l.reads > 0 && l.reads < 1;
        l.streams[i][SIDE_READ] = (spw__bench_stream){.end = both ? half : bench->file_bytes};
        l.streams[i][SIDE_WRITE] =
            (spw__bench_stream){.begin = both ? half : 0, .end = bench->file_bytes, .at = both ? half : 0};
    }
    if (aio == NULL)
        st = bare_open(&l.bare, run, files, region, err);
    count->begin_ns = spw_now_ns();
    if (st == SPW_OK)
        st = block_loop_run(&l, count, err);
    bare_close(&l.bare);
out:
    spw_mem_free(l.reqs);
    spw_mem_free(l.spare);
    return st;
}

/* ---------------------------------------------------------------- the pattern of a training step */

/*
 * With 16-bit weights and the `split` record an element has 10 bytes of record and 2 of weights. Its records come in
 * and go out once per step, the weights go out once and come in twice, for the forward and for the backward pass. So
 * for five blocks of records there are one of weights out and two in. The update of a block takes a nanosecond per
 * element, one block after the other; meanwhile its buffer waits.
 */
enum { JOB_RECORD, JOB_WEIGHT_OUT, JOB_WEIGHT_IN };
static const uint8_t jobs[] = {JOB_RECORD, JOB_RECORD,     JOB_WEIGHT_IN, JOB_RECORD,
                               JOB_RECORD, JOB_WEIGHT_OUT, JOB_RECORD,    JOB_WEIGHT_IN};
enum { JOB_COUNT = sizeof jobs / sizeof *jobs, ELEMENT_RECORD_BYTES = 10, IN_PLACE_STAMP_EVERY = 8 };

typedef enum slot_state { SLOT_FREE, SLOT_MOVING, SLOT_UPDATING } slot_state;

typedef struct swap_slot {
    spw_aio_request req;
    slot_state state;
    uint32_t job, file_idx;
    uint64_t ready_ns;   /* the update's end */
    uint64_t old_offset; /* of what the buffer holds; UINT64_MAX: nothing yet */
} swap_slot;

typedef struct swap_loop {
    spw_aio_bench *bench;
    const spw_aio_bench_run *run;
    spw_aio *aio;
    spw_aio_file **files;
    swap_slot *slots;
    uint32_t slot_count;
    spw__bench_stream streams[SPW_AIO_BENCH_DIRS_MAX][3]; /* by job */
    uint64_t jobs_begun, busy_until_ns;
    uint32_t going;
} swap_loop;

/* The queue full, and few more being updated: a small pool stays in the caches. */
static uint32_t
swap_slots(const spw_aio_bench_run *run)
{
    return (run->aio->queue_depth + run->aio->queue_depth / 8 + 1) * run->dir_count;
}

uint64_t
spw__bench_swap_bytes(const spw_aio_bench_run *run)
{
    return swap_slots(run) * run->aio->block_bytes;
}

static spw_status
swap_submit(swap_loop *l, swap_slot *s, spw_aio_op op, spw_error *err)
{
    s->req.op = op;
    s->req.priority = op == SPW_AIO_WRITE ? SPW_AIO_BULK : SPW_AIO_NORMAL;
    if (op == SPW_AIO_WRITE)
        spw__bench_stamp_pages(l->bench, l->run->dir_first + s->file_idx, s->old_offset, s->req.offset, s->req.bytes,
                               s->job == JOB_RECORD ? IN_PLACE_STAMP_EVERY : 1, s->req.buf);
    s->old_offset = s->req.offset;
    SPW_TRY(spw_aio_submit(l->aio, &s->req, err));
    s->state = SLOT_MOVING;
    l->going++;
    return SPW_OK;
}

/* Starts what may start; wake_ns: when the next update ends. */
static spw_status
swap_start(swap_loop *l, bool over, uint64_t *wake_ns, spw_error *err)
{
    uint64_t now = spw_now_ns();
    *wake_ns = UINT64_MAX;
    for (uint32_t i = 0; i < l->slot_count; i++) {
        swap_slot *s = &l->slots[i];
        if (s->state == SLOT_UPDATING && s->ready_ns <= now) {
            SPW_TRY(swap_submit(l, s, SPW_AIO_WRITE, err));
        } else if (s->state == SLOT_UPDATING) {
            *wake_ns = s->ready_ns < *wake_ns ? s->ready_ns : *wake_ns;
        } else if (s->state == SLOT_FREE && !over) {
            s->file_idx = (uint32_t)(l->jobs_begun / JOB_COUNT % l->run->dir_count);
            s->job = jobs[l->jobs_begun++ % JOB_COUNT];
            s->req.file = l->files[s->file_idx];
            s->req.offset = stream_take(&l->streams[s->file_idx][s->job], s->req.bytes);
            SPW_TRY(swap_submit(l, s, s->job == JOB_WEIGHT_OUT ? SPW_AIO_WRITE : SPW_AIO_READ, err));
        }
    }
    return SPW_OK;
}

static void
swap_land(swap_loop *l, swap_slot *s, spw__bench_count *count)
{
    const spw_aio_request *req = &s->req;
    bool updates = s->job == JOB_RECORD && req->op == SPW_AIO_READ;
    spw__bench_land(l->bench, count, req->op, req->bytes, updates ? req->start_ns : 0);
    if (req->op == SPW_AIO_READ)
        count->wrong +=
            spw__bench_check_ends(l->bench, l->run->dir_first + s->file_idx, req->offset, req->bytes, req->buf);
    if (updates) {
        uint64_t now = spw_now_ns(), begin = l->busy_until_ns > now ? l->busy_until_ns : now;
        s->ready_ns = l->busy_until_ns = begin + req->bytes / ELEMENT_RECORD_BYTES;
    }
    s->state = updates ? SLOT_UPDATING : SLOT_FREE;
}

static spw_status
swap_loop_run(swap_loop *l, spw__bench_count *count, spw_error *err)
{
    const uint32_t queue = l->run->aio->queue_depth * l->run->dir_count;
    spw_status st = SPW_OK;
    for (;;) {
        bool over = time_over(l->bench, l->run, count);
        uint64_t wake_ns = UINT64_MAX, now;
        spw_aio_request *req;
        if (st == SPW_OK)
            st = swap_start(l, over, &wake_ns, err);
        if (st != SPW_OK)
            wake_ns = UINT64_MAX;
        if (l->going == 0 && wake_ns == UINT64_MAX)
            break;
        now = spw_now_ns();
        if (l->going >= queue) /* the disk is busy; what it finishes wakes us soon enough */
            wake_ns = UINT64_MAX;
        req = spw_aio_wait(l->aio, wake_ns == UINT64_MAX ? UINT64_MAX : wake_ns > now ? wake_ns - now : 0);
        if (req == NULL)
            continue;
        l->going--;
        if (req->status == SPW_OK)
            swap_land(l, req->user, count);
        else if (st == SPW_OK)
            st = spw_aio_request_error(req, err);
    }
    return st == SPW_OK ? stopped(l->bench, err) : st;
}

spw_status
spw__bench_swap(spw_aio_bench *bench, const spw_aio_bench_run *run, spw_aio *aio, spw_aio_file **files,
                const spw_region *region, spw__bench_count *count, spw_error *err)
{
    swap_loop l = {.bench = bench, .run = run, .aio = aio, .files = files, .slot_count = swap_slots(run)};
    const uint64_t block = run->aio->block_bytes, eighth = bench->file_bytes / 8 / block * block;
    spw_status st;
    if (eighth < 4 * block)
        return SPW_RAISE(err, SPW_EINVAL, "bench: a file of %llu bytes is too small for blocks of %llu",
                         (unsigned long long)bench->file_bytes, (unsigned long long)block);
    l.slots = spw_mem_calloc(l.slot_count, sizeof *l.slots);
    if (l.slots == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "bench requests");
    for (uint32_t i = 0; i < l.slot_count; i++) {
        l.slots[i].req.bytes = block;
        l.slots[i].old_offset = UINT64_MAX;
        l.slots[i].req.buf = (char *)region->base + i * block;
        l.slots[i].req.user = &l.slots[i];
    }
    for (uint32_t i = 0; i < run->dir_count;
         i++) { /* weights that are read are not those that are just being written */
        l.streams[i][JOB_RECORD] = (spw__bench_stream){.begin = 0, .end = 6 * eighth};
        l.streams[i][JOB_WEIGHT_OUT] = (spw__bench_stream){.begin = 6 * eighth, .end = 7 * eighth, .at = 6 * eighth};
        l.streams[i][JOB_WEIGHT_IN] = (spw__bench_stream){.begin = 7 * eighth, .end = 8 * eighth, .at = 7 * eighth};
    }
    count->begin_ns = spw_now_ns();
    st = swap_loop_run(&l, count, err);
    spw_mem_free(l.slots);
    return st;
}
