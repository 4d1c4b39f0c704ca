/*
 * libFuzzer target: bytes as a sequence of requests, polls, waits, faults, closed files and destroyed contexts. Each
 * request comes back at most once and, unless its context was destroyed, exactly once; a read gives the model's bytes;
 * a write that succeeded is in the file, one that failed left old or new bytes, and nothing else has changed.
 */
#include "spw_aio.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SLOTS = 8, SLOT_BYTES = 9000, SPAN = SLOTS * SLOT_BYTES, BUF_BYTES = SLOT_BYTES + 64 };
static const uint64_t LONG_NS = 20ull * 1000000000u;

typedef struct slot {
    spw_aio_request req;
    unsigned char buf[BUF_BYTES] __attribute__((aligned(4096)));
    unsigned char written[SLOT_BYTES];
    bool lent;
} slot;

static slot slots[SLOTS];
static unsigned char model[SPAN], actual[SPAN];
static char dir[4000], path[4096];
static int fd = -1;

static void
need(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "fuzz_aio: %s\n", what);
        abort();
    }
}

static uint8_t
byte(const uint8_t **data, const uint8_t *end)
{
    return *data < end ? *(*data)++ : 0;
}

/* Whatever became of a write, the file says; old and new bytes may both be there when it failed or was dropped. */
static void
settle(const slot *s, bool certain)
{
    const spw_aio_request *r = &s->req;
    if (r->op != SPW_AIO_WRITE)
        return;
    need(pread(fd, actual, r->bytes, (off_t)r->offset) == (ssize_t)r->bytes, "the file became shorter");
    for (uint64_t i = 0; i < r->bytes; i++)
        need(actual[i] == s->written[i] || (!certain && actual[i] == model[r->offset + i]), "a write left other bytes");
    memcpy(model + r->offset, actual, r->bytes);
}

static void
take(spw_aio_request *req)
{
    slot *s = req->user;
    spw_error err = {0};
    need(s->lent, "a request came back twice");
    s->lent = false;
    if (req->status != SPW_OK)
        need(spw_aio_request_error(req, &err) == req->status && err.message[0] != '\0', "a failure without a message");
    else if (req->op == SPW_AIO_READ)
        need(memcmp(req->buf, model + req->offset, req->bytes) == 0, "a read gave other bytes");
    settle(s, req->status == SPW_OK);
    memset(s->buf, 0x5a, sizeof s->buf);
}

static spw_aio *
context(uint8_t options)
{
    spw_error err = {0};
    spw_aio *aio = NULL;
    if (spw_aio_create(&aio,
                       &(spw_aio_options){.backend = options & 1 ? SPW_AIO_THREADS : SPW_AIO_AUTO,
                                          .block_bytes = 4096u << (options >> 1 & 1),
                                          .queue_depth = 1 + (options >> 2 & 3),
                                          .thread_count = 2,
                                          .lockstep = options >> 4 & 1,
                                          .single_submit = options >> 5 & 1,
                                          .probe_dir = dir},
                       &err) != SPW_OK)
        need(false, err.message);
    return aio;
}

static spw_aio_file *
open_file(spw_aio *aio, uint8_t options)
{
    spw_error err = {0};
    spw_aio_file *file = NULL;
    if (spw_aio_file_open(&file, aio, path,
                          SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | (options & 64 ? SPW_AIO_OPEN_BUFFERED : 0),
                          &err) != SPW_OK)
        need(false, err.message);
    return file;
}

/* After a context or file is gone: what was lent to it comes back by that. */
static void
all_returned(void)
{
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].lent) {
            slots[i].lent = false;
            settle(&slots[i], false);
        }
}

static void
submit(spw_aio *aio, spw_aio_file *file, const uint8_t **data, const uint8_t *end)
{
    uint8_t what = byte(data, end);
    slot *s = &slots[what & 7];
    uint64_t skip = (byte(data, end) << 8 | byte(data, end)) % SLOT_BYTES;
    uint64_t bytes = 1 + (byte(data, end) << 8 | byte(data, end)) % (SLOT_BYTES - skip);
    spw_error err = {0};
    if (s->lent)
        return;
    s->req = (spw_aio_request){.op = (spw_aio_op)(what >> 3 & 3),
                               .priority = (spw_aio_priority)((what >> 5 & 7) % SPW_AIO_PRIORITY_COUNT),
                               .file = file,
                               .offset = (uint64_t)(what & 7) * SLOT_BYTES + skip,
                               .bytes = bytes,
                               .buf = s->buf + byte(data, end) % 64,
                               .user = s};
    if (s->req.op == SPW_AIO_WRITE) {
        for (uint64_t i = 0; i < bytes; i++)
            s->written[i] = (unsigned char)(what + i * 7 + skip);
        memcpy(s->req.buf, s->written, bytes);
    }
    need(spw_aio_submit(aio, &s->req, &err) == SPW_OK, err.message);
    s->lent = true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint8_t *end = data + bytes;
    static spw_test_aio_schedule faults;
    uint8_t options = byte(&data, end);
    spw_aio_request *req;
    spw_aio *aio;
    spw_aio_file *file;
    if (fd < 0) {
        snprintf(dir, sizeof dir, "%s", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
        snprintf(path, sizeof path, "%s/spw-fuzz-aio-%ld", dir, (long)getpid());
        fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
        need(fd >= 0, "no folder for the file");
    }
    for (int i = 0; i < SPAN; i++)
        model[i] = (unsigned char)(i * 31 >> 3);
    need(pwrite(fd, model, SPAN, 0) == SPAN, "the file cannot be written");
    aio = context(options);
    file = open_file(aio, options);
    faults = (spw_test_aio_schedule){0};
    while (data < end) {
        switch (byte(&data, end) % 8) {
        case 0:
        case 1:
        case 2: submit(aio, file, &data, end); break;
        case 3:
            req = spw_aio_poll(aio);
            if (req != NULL)
                take(req);
            break;
        case 4: {
            bool any = false;
            for (int i = 0; i < SLOTS; i++)
                any |= slots[i].lent;
            req = spw_aio_wait(aio, any ? LONG_NS : 0);
            need(req != NULL || !any, "a request did not come back");
            if (req != NULL)
                take(req);
            break;
        }
        case 5:
            faults = (spw_test_aio_schedule){.seed = byte(&data, end), .delay_ns_max = 20000};
            faults.delays = byte(&data, end);
            faults.shorts = byte(&data, end);
            faults.agains = byte(&data, end) / 2;
            faults.errors = faults.full = faults.torn = byte(&data, end) / 4;
            spw_test_aio_fault(aio, spw_test_aio_scheduled, &faults);
            break;
        case 6:
            spw_aio_file_close(file);
            all_returned();
            while ((req = spw_aio_poll(aio)) != NULL) /* those that had finished before */
                need(false, "a request of a closed file came back");
            file = open_file(aio, options);
            break;
        default:
            spw_aio_destroy(aio);
            all_returned();
            options = byte(&data, end);
            aio = context(options);
            file = open_file(aio, options);
            break;
        }
    }
    for (;;) {
        bool any = false;
        for (int i = 0; i < SLOTS; i++)
            any |= slots[i].lent;
        if (!any)
            break;
        req = spw_aio_wait(aio, LONG_NS);
        need(req != NULL, "a request did not come back");
        take(req);
    }
    need(spw_aio_poll(aio) == NULL, "one came back too many");
    spw_aio_destroy(aio);
    need(pread(fd, actual, SPAN, 0) == SPAN && memcmp(actual, model, SPAN) == 0, "the file differs from the model");
    return 0;
}
