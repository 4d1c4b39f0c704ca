/*
 * test_aio_faults.c - aio under failures: ten thousand random schedules, the failure of every single call and transfer,
 * and the policy that shares a device. SPW_SCHEDULES changes how many schedules run, SPW_SEED which.
 */
#include "aio_internal.h"
#include "lib_aio.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---------------------------------------------------------------- random schedules */

enum {
    SLOT_COUNT = 16,
    SLOT_BYTES = 6000, /* not whole blocks: neighbours meet inside one */
    SPAN = SLOT_COUNT * SLOT_BYTES,
    GUARD = 64,
    LENT = 0xee,
    RETURNED = 0x5a,
};

typedef struct slot {
    spw_aio_request req;
    unsigned char *area;    /* GUARD + up to 512 of shift + SLOT_BYTES + GUARD */
    unsigned char *written; /* what the request asked to write */
    unsigned times_back;
    char path[PATH_MAX];
} slot;

typedef struct stage {
    spw_aio *aio;
    spw_aio_file *files[2]; /* one direct, one through the page cache */
    int fds[2];
    unsigned char *model[2], *actual; /* (SPAN) */
    slot slots[SLOT_COUNT];
    unsigned long failed, succeeded;
} stage;

static void
stage_open(stage *s, const world *w, dice *d)
{
    s->aio = aio_test_open_with(w, (spw_aio_options){.block_bytes = 4096u << aio_test_roll(d, 3),
                                                     .queue_depth = 1 + aio_test_roll(d, 6),
                                                     .lockstep = aio_test_roll(d, 4) == 0,
                                                     .single_submit = aio_test_roll(d, 4) == 0});
    s->files[0] = aio_test_file_open(s->aio, w, "direct", 0);
    s->files[1] = aio_test_file_open(s->aio, w, "buffered", SPW_AIO_OPEN_BUFFERED);
}

static void
request_draw(stage *s, unsigned i, dice *d)
{
    slot *t = &s->slots[i];
    uint64_t skip = aio_test_roll(d, 3) == 0 ? 0 : aio_test_roll(d, SLOT_BYTES - 1);
    uint64_t bytes = 1 + aio_test_roll(d, (uint32_t)(SLOT_BYTES - skip));
    uint64_t shift = aio_test_roll(d, 2) ? 0 : aio_test_roll(d, 512);
    uint32_t op = aio_test_roll(d, 16), f = aio_test_roll(d, 2);
    t->req = (spw_aio_request){.op = op == 0   ? SPW_AIO_FSYNC
                                     : op == 1 ? SPW_AIO_FDATASYNC
                                     : op < 9  ? SPW_AIO_WRITE
                                               : SPW_AIO_READ,
                               .priority = (spw_aio_priority)aio_test_roll(d, SPW_AIO_PRIORITY_COUNT),
                               .file = s->files[f],
                               .offset = (uint64_t)i * SLOT_BYTES + skip,
                               .bytes = bytes,
                               .buf = t->area + GUARD + shift,
                               .user = &s->slots[i]};
    t->times_back = 0;
    memset(t->area, LENT, SLOT_BYTES + 512 + 2 * GUARD);
    if (t->req.op == SPW_AIO_WRITE) {
        aio_test_pattern_fill(t->written, bytes, (uint32_t)d->count);
        memcpy(t->req.buf, t->written, bytes);
    }
    snprintf(t->path, sizeof t->path, "%s", spw_aio_file_path(s->files[f]));
}

static void
error_names_all(const slot *t)
{
    spw_error err = {0};
    char text[64];
    assert_int_equal(spw_aio_request_error(&t->req, &err), t->req.status);
    assert_true(t->req.status == SPW_EIO || t->req.status == SPW_ENOSPC);
    assert_non_null(strstr(err.message, t->path));
    if (t->req.op == SPW_AIO_FSYNC || t->req.op == SPW_AIO_FDATASYNC)
        return;
    snprintf(text, sizeof text, "offset %llu", (unsigned long long)t->req.offset);
    assert_non_null(strstr(err.message, text));
    snprintf(text, sizeof text, "wanted %llu", (unsigned long long)t->req.bytes);
    assert_non_null(strstr(err.message, text));
    snprintf(text, sizeof text, "got %llu", (unsigned long long)t->req.done_bytes);
    assert_non_null(strstr(err.message, text));
    assert_true(t->req.done_bytes < t->req.bytes);
}

/* A request came back: its result against the model, then its buffer is marked as returned. */
static void
request_back(stage *s, slot *t)
{
    const unsigned f = t->req.file == s->files[1];
    unsigned char *buf = t->req.buf, *end = t->area + SLOT_BYTES + 512 + 2 * GUARD;
    assert_int_equal(t->times_back++, 0);
    assert_true(t->req.done_ns >= t->req.submit_ns);
    for (unsigned char *p = t->area; p < buf; p++)
        assert_int_equal(*p, LENT);
    for (unsigned char *p = buf + (t->req.op == SPW_AIO_READ || t->req.op == SPW_AIO_WRITE ? t->req.bytes : 0); p < end;
         p++)
        assert_int_equal(*p, LENT);
    if (t->req.status != SPW_OK) {
        error_names_all(t);
        s->failed++;
    } else {
        s->succeeded++;
        if (t->req.op == SPW_AIO_READ)
            assert_memory_equal(buf, s->model[f] + t->req.offset, t->req.bytes);
    }
    memset(t->area, RETURNED, (size_t)(end - t->area));
}

/* The files against the model: what was written, byte for byte; old or new where a write failed. */
static void
files_match(stage *s)
{
    for (unsigned i = 0; i < SLOT_COUNT; i++) {
        const slot *t = &s->slots[i];
        if (t->req.op == SPW_AIO_WRITE && t->req.status == SPW_OK && t->times_back == 1)
            memcpy(s->model[t->req.file == s->files[1]] + t->req.offset, t->written, t->req.bytes);
    }
    for (unsigned f = 0; f < 2; f++) {
        assert_int_equal(pread(s->fds[f], s->actual, SPAN, 0), SPAN);
        for (unsigned i = 0; i < SLOT_COUNT; i++) {
            const slot *t = &s->slots[i];
            unsigned char *old = s->model[f] + t->req.offset, *now = s->actual + t->req.offset;
            if (t->req.op != SPW_AIO_WRITE || t->req.file != s->files[f] || t->req.status == SPW_OK)
                continue;
            for (uint64_t k = 0; k < t->req.bytes; k++)
                assert_true(now[k] == old[k] || now[k] == t->written[k]);
            memcpy(old, now, t->req.bytes);
        }
        assert_memory_equal(s->actual, s->model[f], SPAN);
    }
    for (unsigned i = 0; i < SLOT_COUNT; i++)
        for (unsigned k = 0; k < SLOT_BYTES + 512 + 2 * GUARD; k++)
            assert_int_equal(s->slots[i].area[k], RETURNED);
}

static void
schedule_run(stage *s, uint64_t seed)
{
    dice d = {.seed = seed};
    spw_test_aio_schedule faults = {.seed = ~seed, .delay_ns_max = 1 + aio_test_roll(&d, 60000)};
    uint32_t kind = aio_test_roll(&d, 4); /* a quarter of the schedules has no errors */
    unsigned submitted = 0, back = 0, failed_before = (unsigned)s->failed;
    faults.delays = aio_test_roll(&d, 1000);
    faults.shorts = aio_test_roll(&d, 300);
    faults.agains = aio_test_roll(&d, 200);
    if (kind > 0) {
        faults.errors = aio_test_roll(&d, 100);
        faults.full = aio_test_roll(&d, 50);
        faults.torn = aio_test_roll(&d, 100);
    }
    spw_test_aio_fault(s->aio, spw_test_aio_scheduled, &faults);
    while (back < SLOT_COUNT) {
        spw_aio_request *req;
        for (uint32_t n = aio_test_roll(&d, SLOT_COUNT + 1); n > 0 && submitted < SLOT_COUNT; n--, submitted++) {
            request_draw(s, submitted, &d);
            aio_test_submit(s->aio, &s->slots[submitted].req);
        }
        req = aio_test_roll(&d, 4) == 0 ? spw_aio_poll(s->aio)
                                        : spw_aio_wait(s->aio, submitted > back ? AIO_TEST_LONG_NS : 0);
        if (req == NULL)
            continue;
        request_back(s, req->user);
        back++;
    }
    assert_null(spw_aio_poll(s->aio));
    spw_test_aio_fault(s->aio, NULL, NULL);
    if (s->failed == failed_before)
        assert_int_equal(faults.failures, 0); /* no error is lost */
    else
        assert_true(s->failed - failed_before <= faults.failures);
    files_match(s);
}

static void
test_schedules(void **state)
{
    /* Shows over thousands of schedules of delays, reorders, short and torn transfers, EAGAIN, EINTR, EIO and ENOSPC:
     * each request comes back once, no buffer is touched after that, bytes are those of a synchronous run or the error
     * names path, offset, wanted and got. */
    world *w = aio_test_world_or_skip(state);
    const char *text = getenv("SPW_SCHEDULES");
    uint64_t count = text != NULL ? strtoull(text, NULL, 0) : 5000, seed = aio_test_seed_get();
    stage *s = calloc(1, sizeof *s);
    static const char *const names[2] = {"direct", "buffered"};
    assert_non_null(s);
    print_message("SPW_SEED=%llu\n", (unsigned long long)seed);
    s->actual = aio_test_buffer_new(SPAN);
    for (unsigned f = 0; f < 2; f++) {
        s->model[f] = aio_test_buffer_new(SPAN);
        aio_test_pattern_fill(s->model[f], SPAN, f);
        s->fds[f] = open(aio_test_path_in(w, names[f]), O_RDWR | O_CREAT, 0600);
        assert_int_equal(pwrite(s->fds[f], s->model[f], SPAN, 0), SPAN);
    }
    for (unsigned i = 0; i < SLOT_COUNT; i++) {
        s->slots[i].area = aio_test_buffer_new(SLOT_BYTES + 512 + 2 * GUARD);
        s->slots[i].written = aio_test_buffer_new(SLOT_BYTES);
    }
    for (uint64_t k = 0; k < count; k++) {
        if (k % 100 == 0) {
            dice d = {.seed = seed + k, .count = 1000};
            spw_aio_destroy(s->aio);
            stage_open(s, w, &d);
        }
        schedule_run(s, seed + k);
    }
    assert_true(count < 100 || (s->failed > 0 && s->succeeded > s->failed));
    print_message("# %llu schedules: %lu requests succeeded, %lu failed\n", (unsigned long long)count, s->succeeded,
                  s->failed);
    spw_aio_destroy(s->aio);
    for (unsigned i = 0; i < SLOT_COUNT; i++) {
        free(s->slots[i].area);
        free(s->slots[i].written);
    }
    for (unsigned f = 0; f < 2; f++) {
        close(s->fds[f]);
        free(s->model[f]);
    }
    free(s->actual);
    free(s);
}

/* ---------------------------------------------------------------- the k-th failure */

enum { STORY_BYTES = 50003, STORY_REQUESTS = 6 };

/*
 * One short life of a context: create, open, write in three requests, flush, read back, close. SPW_OK means that the
 * right bytes came back; otherwise err says what failed. Every request that was accepted came back once.
 */
static spw_status
story(const world *w, spw_region *region, bool automatic, spw_test_aio_schedule *faults, spw_error *err)
{
    static unsigned char wanted[STORY_BYTES];
    unsigned char *in = region->base, *out = in + 64 * 1024;
    spw_aio_options options = {.backend = automatic ? SPW_AIO_AUTO : w->backend,
                               .block_bytes = 8192,
                               .queue_depth = 3,
                               .thread_count = 2,
                               .probe_dir = w->dir,
                               .fixed = region};
    spw_aio *aio = NULL;
    spw_aio_file *file = NULL;
    spw_status st = SPW_EUNSUPPORTED;
    /* A kernel that counts rings as locked memory gives a closed one's back when it has time for that. */
    for (int tries = 0; tries < 8 && st == SPW_EUNSUPPORTED && (tries == 0 || strstr(err->message, "memlock"));
         tries++) {
        *err = (spw_error){0};
        st = spw_aio_create(&aio, &options, err);
    }
    if (st == SPW_OK)
        st = spw_aio_file_open(&file, aio, aio_test_path_in(w, "story"),
                               SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE, err);
    if (st == SPW_OK && faults != NULL)
        spw_test_aio_fault(aio, spw_test_aio_scheduled, faults);
    aio_test_pattern_fill(wanted, STORY_BYTES, 11);
    memcpy(in, wanted, STORY_BYTES);
    memset(out, 0, STORY_BYTES);
    for (unsigned phase = 0; phase < 3 && st == SPW_OK; phase++) {
        spw_aio_request reqs[3];
        unsigned count = phase == 1 ? 1 : 3, back = 0;
        for (unsigned i = 0; i < count; i++) {
            uint64_t at = i * 17000, bytes = i == 2 ? STORY_BYTES - at : 17000;
            reqs[i] = (spw_aio_request){.op = phase == 0   ? SPW_AIO_WRITE
                                              : phase == 1 ? SPW_AIO_FDATASYNC
                                                           : SPW_AIO_READ,
                                        .file = file,
                                        .offset = at,
                                        .bytes = bytes,
                                        .buf = (phase == 0 ? in : out) + at};
            aio_test_submit(aio, &reqs[i]);
        }
        for (; back < count; back++) {
            spw_aio_request *req = spw_aio_wait(aio, AIO_TEST_LONG_NS);
            assert_non_null(req);
            if (req->status != SPW_OK && st == SPW_OK)
                st = spw_aio_request_error(req, err);
        }
        assert_null(spw_aio_poll(aio));
    }
    if (st == SPW_OK)
        assert_memory_equal(out, wanted, STORY_BYTES);
    spw_aio_destroy(aio);
    return st;
}

static void
test_kth_call(void **state)
{
    /* Shows that the failure of any one system call ends in an error with a message or in the right bytes, and leaves
     * neither memory nor a descriptor behind. */
    world *w = aio_test_world_or_skip(state);
    spw_region region = {0};
    unsigned refused = 0, survived = 0;
    assert_int_equal(spw_region_map(&region, 128 * 1024, 0, NULL), SPW_OK);
    for (int automatic = 0; automatic < 2; automatic++) {
        bool through = false;
        for (unsigned k = 1; !through; k++) {
            spw_error err = {0};
            long live = spw_test_live_allocs();
            int fd = aio_test_lowest_free_fd();
            spw_test_fail_call(k);
            spw_status st = story(w, &region, automatic, NULL, &err);
            through = !spw_test_call_fired();
            spw_test_fail_call(0);
            if (through)
                assert_int_equal(st, SPW_OK);
            assert_int_equal(err.status, st);
            assert_true(st == SPW_OK || err.message[0] != '\0');
            assert_int_equal(spw_test_live_allocs(), live);
            assert_int_equal(aio_test_lowest_free_fd(), fd);
            assert_true(k < 1000);
            if (st != SPW_OK)
                refused++;
            else if (!through)
                survived++;
        }
    }
    assert_true(refused > 5 && survived > 2);
    print_message("# %u calls ended in an error, %u were survived\n", refused, survived);
    spw_region_unmap(&region);
}

static void
test_kth_transfer(void **state)
{
    /* Shows that an EIO in any one transfer is reported by exactly the request it hit, and never lost. */
    world *w = aio_test_world_or_skip(state);
    spw_region region = {0};
    uint64_t k = 1;
    assert_int_equal(spw_region_map(&region, 128 * 1024, 0, NULL), SPW_OK);
    for (bool through = false; !through; k++) {
        spw_test_aio_schedule faults = {.error_at = k};
        spw_error err = {0};
        spw_status st = story(w, &region, false, &faults, &err);
        through = faults.failures == 0;
        assert_int_equal(st, through ? SPW_OK : SPW_EIO);
        if (!through) {
            assert_non_null(strstr(err.message, "story"));
            assert_int_equal(err.sys_errno, EIO);
        }
    }
    assert_true(k > 15); /* pieces of 8 KiB and the flush */
    spw_region_unmap(&region);
}

/* ---------------------------------------------------------------- sharing a device */

/* Serves a load whose pieces take equal time, the oldest landing first; returns reads among the first n turns. */
static unsigned
serve(spw__aio_load *load, const uint64_t bytes[SPW__AIO_CLASS_COUNT], unsigned n, uint64_t *longest_wait)
{
    unsigned reads = 0;
    uint64_t waited[2] = {0};
    uint32_t flight[64], head = 0, tail = 0;
    *longest_wait = 0;
    for (uint32_t c = 0; c < SPW__AIO_CLASS_COUNT; c++) {
        load->waiting_bytes[c] = bytes[c];
        load->waiting_count[c] = bytes[c] > 0;
    }
    for (unsigned turn = 0; turn < n; turn++) {
        uint32_t c = spw__aio_share_next(load), side;
        assert_true(c < SPW__AIO_CLASS_COUNT && load->waiting_count[c] > 0);
        side = c == SPW__AIO_CLASS_WRITE || c == SPW__AIO_CLASS_BULK_WRITE;
        reads += side == 0;
        load->inflight[side]++;
        flight[tail++ % 64] = side;
        load->passed[side] = 0;
        load->passed[1 - side]++;
        waited[side] = 0;
        if (++waited[1 - side] > *longest_wait)
            *longest_wait = waited[1 - side];
        if (load->inflight[0] + load->inflight[1] == load->depth)
            load->inflight[flight[head++ % 64]]--;
    }
    return reads;
}

static void
test_share_policy(void **state)
{
    /* Shows who is served: urgent first, then by bytes still needed, nobody starved, at every depth. */
    (void)state;
    for (uint32_t depth = 1; depth <= 32; depth *= 2) {
        enum { R = SPW__AIO_CLASS_READ, W = SPW__AIO_CLASS_WRITE, BW = SPW__AIO_CLASS_BULK_WRITE, N = 1000 };
        static const struct {
            uint64_t read, write, bulk_write;
            double reads_min, reads_max; /* of the turns, from depth 8 on */
        } cases[] = {{100, 100, 0, 0.45, 0.55}, {300, 100, 0, 0.70, 0.80},   {100, 300, 0, 0.20, 0.30},
                     {100, 0, 100, 0.75, 0.85}, {1000000, 1, 0, 0.80, 0.98}, {1, 1000000, 0, 0.02, 0.20}};
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            spw__aio_load load = {.depth = depth};
            uint64_t longest;
            const uint64_t bytes[SPW__AIO_CLASS_COUNT] = {
                [R] = cases[i].read << 20, [W] = cases[i].write << 20, [BW] = cases[i].bulk_write << 20};
            double part = serve(&load, bytes, N, &longest) / (double)N;
            if (depth >= 8)
                assert_true(part >= cases[i].reads_min && part <= cases[i].reads_max);
            assert_true(longest <= 4 * depth + 1);
        }
        spw__aio_load load = {.depth = depth};
        assert_int_equal(spw__aio_share_next(&load), SPW__AIO_CLASS_COUNT);
        for (uint32_t c = SPW__AIO_CLASS_COUNT; c-- > 0;) {
            load.waiting_count[c] = 1;
            load.waiting_bytes[c] = 4096;
            if (c != SPW__AIO_CLASS_WRITE) /* where the bulk read may go on, depending on the depth */
                assert_int_equal(spw__aio_share_next(&load), c);
        }
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {ON_EACH_BACKEND(test_schedules), ON_EACH_BACKEND(test_kth_call),
                                       ON_EACH_BACKEND(test_kth_transfer), cmocka_unit_test(test_share_policy)};
    return cmocka_run_group_tests_name("aio_faults", tests, NULL, NULL);
}
