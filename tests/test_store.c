/*
 * The store alone, told by hand what will be used: fills that were begun and given up, and how often weights come to the device.
 */
#include "lib_tiny.h"
#include "spw_offload.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>
#include <cmocka.h>

enum { UNITS = 4, CHUNKS = 24, ELEMS = CHUNKS * 4096 };

typedef struct fixture {
    spw_gpu *gpu;
    spw_store *store;
    spw_store_unit units[UNITS];
    spw_store_chunk chunks[UNITS * CHUNKS];
} fixture;

/* Every element of unit u is u. */
static spw_status
fill_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    float *w = weights;
    (void)ctx;
    (void)record;
    (void)grad;
    (void)err;
    for (int i = 0; i < 4096; i++)
        w[i] = (float)(chunk_idx / CHUNKS);
    return SPW_OK;
}

/* A store of UNITS units; records from unit `nvme_from` on are on nvme, and config knows the rest. */
static void
open_units(fixture *f, spw_store_config config, spw_tier weights, bool trainable, uint32_t nvme_from)
{
    memset(f, 0, sizeof *f);
    for (uint32_t u = 0; u < UNITS; u++) {
        f->units[u] =
            (spw_store_unit){.chunk_first = u * CHUNKS, .chunk_count = CHUNKS, .elems = ELEMS, .trainable = trainable};
        for (uint32_t k = 0; k < CHUNKS; k++)
            f->chunks[u * CHUNKS + k] = (spw_store_chunk){.unit_idx = u,
                                                          .first = k * 4096,
                                                          .elems = 4096,
                                                          .weight_tier = weights,
                                                          .record_tier = u < nvme_from ? SPW_TIER_HOST : SPW_TIER_NVME};
    }
    assert_int_equal(spw_gpu_open(&f->gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
    config.gpu = f->gpu;
    config.units = f->units;
    config.chunks = f->chunks;
    config.unit_count = UNITS;
    config.chunk_count = UNITS * CHUNKS;
    config.weight_bytes = 4;
    config.record[0].bytes_32 = 256;
    config.worker_count = 1;
    assert_int_equal(spw_store_create(&f->store, &config, NULL), SPW_OK);
    assert_int_equal(spw_store_sweep(f->store, SPW_SWEEP_INIT, fill_chunk, NULL, NULL), SPW_OK);
}

/* Frozen units in host memory, and a device on which `room` of them fit. */
static void
open_store(fixture *f, uint32_t room, uint64_t chaos)
{
    open_units(f, (spw_store_config){.device_cache_bytes = room * ELEMS * 4, .chaos_seed = chaos}, SPW_TIER_HOST, false,
               UNITS);
}

static void
close_store(fixture *f)
{
    spw_store_destroy(f->store);
    spw_gpu_close(f->gpu);
}

static void
use(fixture *f, uint32_t unit)
{
    const void *weights;
    const float *w;
    assert_int_equal(spw_store_acquire(f->store, &(spw_store_use){unit, 0}, 1, &weights, NULL), SPW_OK);
    w = weights;
    for (int i = 0; i < ELEMS; i += 1021)
        assert_true(w[i] == (float)unit);
    spw_store_release(f->store, unit, NULL);
}

/* Fills that were begun for a future that is not fetched any more do not keep out what is wanted now. */
static void
test_given_up(void **state)
{
    const spw_store_use future[] = {{0, 0}, {1, 0}};
    (void)state;
    alarm(200); /* before it was mended it waited for ever */
    for (uint64_t run = 1; run <= 20; run++) {
        fixture f;
        open_store(&f, 2, run);
        spw_store_set_future(f.store, future, 2, 2);
        spw_sleep_ns(run % 5 * 100000);
        spw_store_set_future(f.store, future, 2, 0); /* both are still to come, later */
        use(&f, 2);
        use(&f, 3);
        use(&f, 0);
        close_store(&f);
    }
    alarm(0);
}

/* Each use brings its unit once, although nobody says anew what is to come after each. */
static void
test_fetched_once(void **state)
{
    const spw_store_use future[] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
    fixture f;
    spw_store_stats stats;
    (void)state;
    open_store(&f, 1, 0);
    spw_store_set_future(f.store, future, 4, 4);
    for (uint32_t u = 0; u < UNITS; u++) {
        use(&f, u);
        spw_sleep_ns(5000000); /* time enough to fetch too much */
    }
    spw_store_get_stats(f.store, &stats);
    assert_int_equal(stats.h2d_bytes, UNITS * ELEMS * 4);
    close_store(&f);
}

/* What comes to the device from nvme is read once for it, though slots are few and chunks arrive in any order. */
static void
test_read_once(void **state)
{
    char dir[256];
    const char *path = dir;
    (void)state;
    tiny_dir_make(dir);
    for (uint64_t run = 1; run <= 20; run++) {
        const spw_store_use future[] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
        spw_test_aio_schedule late = {.seed = run, .delays = 500, .delay_ns_max = 300000};
        fixture f;
        spw_store_stats first, stats;
        open_units(&f,
                   (spw_store_config){.device_cache_bytes = (1 + run % 3) * ELEMS * 4,
                                      .weight_slot_count = 1 + (uint32_t)run % 6,
                                      .record_slot_count = 1,
                                      .integrity = true,
                                      .paths = &path,
                                      .path_count = 1,
                                      .aio = {.backend = SPW_AIO_THREADS, .queue_depth = 8, .thread_count = 4},
                                      .aio_faults = &late,
                                      .chaos_seed = run},
                   SPW_TIER_NVME, false, UNITS);
        spw_store_get_stats(f.store, &first);
        for (uint32_t pass = 0; pass < 2; pass++) {
            spw_store_set_future(f.store, future, UNITS, pass == 0 ? UNITS : 0); /* fetched ahead, and not */
            for (uint32_t u = 0; u < UNITS; u++)
                use(&f, u);
        }
        spw_store_get_stats(f.store, &stats);
        assert_true(stats.h2d_bytes - first.h2d_bytes >= UNITS * ELEMS * 4);
        assert_int_equal(stats.nvme_read_bytes - first.nvme_read_bytes, stats.h2d_bytes - first.h2d_bytes);
        close_store(&f);
    }
    tiny_dir_remove(dir);
}

/* Which chunk was updated when, by one worker. */
typedef struct order {
    uint32_t count, chunk[2 * UNITS * CHUNKS];
} order;

static spw_status
note_update(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first, uint64_t count,
            spw_error *err)
{
    order *o = ctx;
    (void)state;
    (void)grad;
    (void)first;
    (void)count;
    (void)err;
    o->chunk[o->count++] = chunk_idx;
    return SPW_OK;
}

/* Updates that pass through the same slots leave what a fill has read, and has yet to copy, where it is. */
static void
test_read_once_beside_updates(void **state)
{
    const bool with[UNITS] = {true, true, false, false};
    const spw_store_use future[] = {{2, 0}, {3, 0}};
    char dir[256];
    const char *path = dir;
    (void)state;
    tiny_dir_make(dir);
    alarm(200);
    for (uint64_t run = 1; run <= 20; run++) {
        spw_test_aio_schedule late = {.seed = run, .delays = 500, .delay_ns_max = 300000};
        fixture f;
        order o = {0};
        spw_store_stats first, stats;
        open_units(&f,
                   (spw_store_config){.device_cache_bytes = 2 * ELEMS * 4,
                                      .weight_slot_count = 1 + (uint32_t)run % 6,
                                      .record_slot_count = 1,
                                      .record = {{.parts = {256}, .part_count = 1}},
                                      .paths = &path,
                                      .path_count = 1,
                                      .aio = {.backend = SPW_AIO_THREADS, .queue_depth = 8, .thread_count = 4},
                                      .aio_faults = &late,
                                      .chaos_seed = run,
                                      .update = note_update,
                                      .update_ctx = &o},
                   SPW_TIER_NVME, true, UNITS);
        assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
        spw_store_get_stats(f.store, &first);
        spw_store_step_begin(f.store, with, SPW_STEP_GATED);
        for (uint32_t u = 0; u < 2; u++) {
            assert_int_equal(spw_store_grad_open(f.store, u, NULL), SPW_OK);
            memset(spw_store_grad(f.store, u), 0, ELEMS * 4);
            spw_store_grad_ready(f.store, u);
        }
        spw_store_step_go(f.store);
        spw_store_set_future(f.store, future, 2, 2);
        if (run % 2 == 0)
            assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK); /* nobody waits for the units; or somebody does */
        use(&f, 2);
        use(&f, 3);
        assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
        assert_int_equal(o.count, 2 * CHUNKS);
        spw_store_get_stats(f.store, &stats);
        assert_int_equal(stats.h2d_bytes - first.h2d_bytes, 2 * ELEMS * 4);
        /* once, or not at all what lies in a slot since it was filled, if the future is known before the mover wakes up */
        assert_true(stats.nvme_read_bytes - first.nvme_read_bytes <= 2 * ELEMS * 4);
        close_store(&f);
    }
    alarm(0);
    tiny_dir_remove(dir);
}

enum { SLOTS = 8, RECORD_BYTES = 4096 * 8 };

/* All units trainable, records of the first two in host memory, of the others on nvme, read ahead as far as slots go. */
static void
open_trainable(fixture *f, order *o, const char *const *path, spw_test_aio_schedule *faults)
{
    spw_store_config config = {.record = {{.parts = {256}, .part_count = 1}},
                               .record_slot_count = SLOTS,
                               .device_cache_bytes = ELEMS * 4,
                               .paths = path,
                               .path_count = 1,
                               .update = note_update,
                               .update_ctx = o,
                               .aio_faults = faults};
    spw_store_stats stats;
    memset(o, 0, sizeof *o);
    open_units(f, config, SPW_TIER_HOST, true, 2);
    assert_int_equal(spw_store_drain(f->store, NULL), SPW_OK);
    spw_store_step_begin(f->store, NULL, SPW_STEP_GATED);
    for (uint32_t u = 0; u < UNITS; u++) {
        assert_int_equal(spw_store_grad_open(f->store, u, NULL), SPW_OK);
        memset(spw_store_grad(f->store, u), 0, ELEMS * 4);
        spw_store_grad_ready(f->store, u);
    }
    do {
        spw_sleep_ns(1000000);
        spw_store_get_stats(f->store, &stats);
    } while (stats.nvme_moving > 0 || stats.nvme_read_bytes < SLOTS * RECORD_BYTES);
    spw_sleep_ns(10000000); /* the mover has taken them in */
}

/* Those that were read ahead give their slots back while records in host memory are updated, and not after all of them. */
static void
test_slots_take_turns(void **state)
{
    fixture f;
    order o;
    char dir[256];
    const char *path = dir;
    uint32_t early = 0;
    (void)state;
    tiny_dir_make(dir);
    open_trainable(&f, &o, &path, NULL);
    spw_store_step_go(f.store);
    assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
    assert_int_equal(o.count, UNITS * CHUNKS);
    for (uint32_t i = 0; i < 2 * SLOTS + 4; i++)
        early += o.chunk[i] >= 2 * CHUNKS;
    if (early < SLOTS - 1)
        fail_msg("%u of the first %d updates gave a slot back", early, 2 * SLOTS + 4);
    close_store(&f);
    tiny_dir_remove(dir);
}

/* Asked whether a gradient's memory is free of records, the store says so without waiting, and from then on none goes there. */
static void
test_asked(void **state)
{
    spw_test_aio_schedule late = {.seed = 3, .delays = 1000, .delay_ns_max = 500000000};
    fixture f;
    order o;
    char dir[256];
    const char *path = dir;
    spw_store_stats stats;
    bool waits = false;
    (void)state;
    tiny_dir_make(dir);
    open_trainable(&f, &o, &path, &late);
    spw_store_step_go(f.store);
    do { /* until records lie in the memory of gradients; all of unit 0's are consumed before */
        spw_sleep_ns(1000000);
        spw_store_get_stats(f.store, &stats);
    } while (stats.loans == 0);
    for (uint32_t u = 0; u < 2; u++)
        waits = !spw_store_grad_ask(f.store, u) || waits;
    assert_true(waits); /* a transfer takes a quarter of a second */
    for (uint32_t u = 0; u < 2; u++) {
        while (!spw_store_grad_ask(f.store, u))
            spw_sleep_ns(1000000);
        assert_int_equal(spw_store_grad_open(f.store, u, NULL), SPW_OK);
    }
    spw_store_get_stats(f.store, &stats);
    assert_int_equal(stats.stall_ns[SPW_STALL_NVME_WRITE] + stats.stall_ns[SPW_STALL_NVME_READ] +
                         stats.stall_ns[SPW_STALL_OPTIMIZER],
                     0);
    assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
    assert_int_equal(o.count, UNITS * CHUNKS);
    close_store(&f);
    tiny_dir_remove(dir);
}

/* A unit that has no gradient in a step holds no slot of those that have one, nor does it after a step that was skipped. */
static void
test_left_out(void **state)
{
    const bool without[UNITS] = {false, false, false, true}; /* nobody's gradient makes room but its own */
    (void)state;
    alarm(200); /* before it was mended it waited for ever */
    for (int skipped = 0; skipped < 2; skipped++) {
        fixture f;
        order o;
        char dir[256];
        const char *path = dir;
        tiny_dir_make(dir);
        open_trainable(&f, &o, &path, NULL); /* unit 2 has read ahead into every slot */
        if (skipped)
            spw_store_step_skip(f.store);
        else
            spw_store_step_go(f.store);
        assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
        o.count = 0;
        spw_store_step_begin(f.store, without, SPW_STEP_GATED);
        spw_sleep_ns(20000000); /* time to read ahead */
        for (uint32_t u = 0; u < UNITS; u++) {
            assert_int_equal(spw_store_grad_open(f.store, u, NULL), SPW_OK);
            if (without[u])
                spw_store_grad_ready(f.store, u);
        }
        spw_store_step_go(f.store);
        assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
        assert_int_equal(o.count, CHUNKS);
        close_store(&f);
        tiny_dir_remove(dir);
    }
    alarm(0);
}

/* In a backward pass records leave the memory that gradients need before others are read ahead. */
static void
test_leave_first(void **state)
{
    const uint64_t on_nvme = 2 * CHUNKS * RECORD_BYTES;
    spw_test_aio_schedule late = {.seed = 5, .delays = 1000, .delay_ns_max = 200000000};
    fixture f;
    order o;
    char dir[256];
    const char *path = dir;
    spw_store_stats stats, first;
    (void)state;
    tiny_dir_make(dir);
    open_trainable(&f, &o, &path, &late);
    spw_store_get_stats(f.store, &first);
    spw_store_step_go(f.store);
    do {
        spw_sleep_ns(1000000);
        spw_store_get_stats(f.store, &stats);
    } while (stats.updates < UNITS * CHUNKS);
    spw_store_step_begin(f.store, NULL, SPW_STEP_GATED);
    assert_true(stats.nvme_write_bytes - first.nvme_write_bytes < on_nvme); /* else this shows nothing */
    for (uint64_t read = stats.nvme_read_bytes; stats.nvme_read_bytes == read;) {
        spw_sleep_ns(100000);
        spw_store_get_stats(f.store, &stats);
    }
    assert_int_equal(stats.nvme_write_bytes - first.nvme_write_bytes, on_nvme);
    for (uint32_t u = UNITS; u-- > 0;) {
        assert_int_equal(spw_store_grad_open(f.store, u, NULL), SPW_OK);
        memset(spw_store_grad(f.store, u), 0, ELEMS * 4);
        spw_store_grad_ready(f.store, u);
    }
    spw_store_step_go(f.store);
    assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
    assert_int_equal(o.count, 2 * UNITS * CHUNKS);
    close_store(&f);
    tiny_dir_remove(dir);
}

/* One slot for weights, one place on the device: unit 0 is trained, unit 1 frozen, all of both on nvme. */
static void
open_narrow(fixture *f, order *o, const char *const *path)
{
    memset(f, 0, sizeof *f);
    memset(o, 0, sizeof *o);
    for (uint32_t u = 0; u < 2; u++) {
        f->units[u] = (spw_store_unit){.chunk_first = u, .chunk_count = 1, .elems = 4096, .trainable = u == 0};
        f->chunks[u] =
            (spw_store_chunk){.unit_idx = u, .elems = 4096, .weight_tier = SPW_TIER_NVME, .record_tier = SPW_TIER_NVME};
    }
    assert_int_equal(spw_gpu_open(&f->gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
    spw_store_config config = {.gpu = f->gpu,
                               .units = f->units,
                               .chunks = f->chunks,
                               .unit_count = 2,
                               .chunk_count = 2,
                               .weight_bytes = 4,
                               .record = {{256, {256}, 1}},
                               .weight_slot_count = 1,
                               .record_slot_count = 1,
                               .device_cache_bytes = 4096 * 4,
                               .worker_count = 1,
                               .paths = path,
                               .path_count = 1,
                               .update = note_update,
                               .update_ctx = o};
    assert_int_equal(spw_store_create(&f->store, &config, NULL), SPW_OK);
    assert_int_equal(spw_store_sweep(f->store, SPW_SWEEP_INIT, fill_chunk, NULL, NULL), SPW_OK);
}

static spw_status
look(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    (void)ctx;
    (void)chunk_idx;
    (void)weights;
    (void)record;
    (void)grad;
    (void)err;
    return SPW_OK;
}

static void
one_gradient(fixture *f)
{
    spw_store_step_begin(f->store, NULL, SPW_STEP_GATED);
    assert_int_equal(spw_store_grad_open(f->store, 0, NULL), SPW_OK);
    memset(spw_store_grad(f->store, 0), 0, 4096 * 4);
    spw_store_grad_ready(f->store, 0);
}

/*
 * Unit 0's next weights do not exist yet, and the one slot holds those it has, which are used before unit 1's. Were unit 1 given the place on
 * the device meanwhile, its fill would wait for the slot, and the slot for the place.
 */
static void
test_place_without_slot(void **state)
{
    const spw_store_use future[] = {{0, 1}, {1, 0}};
    const void *weights;
    fixture f;
    order o;
    char dir[256];
    const char *path = dir;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    open_narrow(&f, &o, &path);
    assert_int_equal(spw_store_sweep_some(f.store, SPW_SWEEP_VISIT, 0, 1, look, NULL, NULL), SPW_OK);
    one_gradient(&f);
    spw_store_set_future(f.store, future, 2, 2);
    spw_sleep_ns(20000000); /* time enough for a fill to begin */
    spw_store_step_go(f.store);
    for (uint32_t i = 0; i < 2; i++) {
        if (spw_store_acquire(f.store, &future[i], 1, &weights, &err) != SPW_OK)
            fail_msg("%s", err.message);
        spw_store_release(f.store, i, NULL);
    }
    assert_int_equal(o.count, 1);
    close_store(&f);
    tiny_dir_remove(dir);
}

/*
 * Unit 1 is given the place on the device, and before it has a slot unit 0, whose weights have stayed in the one slot, is put in front of it:
 * the place is unit 0's then, for whose sake the slot is not given away.
 */
static void
test_place_before_slot(void **state)
{
    const spw_store_use later[] = {{1, 0}}, first[] = {{0, 0}, {1, 0}};
    const void *weights;
    char dir[256];
    const char *path = dir;
    (void)state;
    tiny_dir_make(dir);
    for (int run = 0; run < 50; run++) {
        fixture f;
        order o;
        spw_error err = {0};
        open_narrow(&f, &o, &path);
        for (int i = 0; i < 2; i++) {
            if (i == 1) {
                spw_store_set_future(f.store, later, 1, 1);
                spw_store_set_future(f.store, first, 2, 2);
            }
            if (spw_store_acquire(f.store, first, 1, &weights, &err) != SPW_OK)
                fail_msg("%s", err.message);
            spw_store_release(f.store, 0, NULL);
        }
        close_store(&f);
    }
    tiny_dir_remove(dir);
}

/* Whoever waits for an update that nobody released is told so, and does not wait for ever; nor does anybody later. */
static void
test_stands_still(void **state)
{
    const void *weights;
    fixture f;
    order o;
    char dir[256];
    const char *path = dir;
    spw_error err = {0};
    (void)state;
    alarm(200);
    tiny_dir_make(dir);
    open_narrow(&f, &o, &path);
    one_gradient(&f);
    assert_int_equal(spw_store_acquire(f.store, &(spw_store_use){0, 1}, 1, &weights, &err), SPW_ETIMEDOUT);
    assert_non_null(strstr(err.message, "unit 0 is wanted as of 1 updates and has 0"));
    assert_non_null(strstr(err.message, "gate closed"));
    assert_int_equal(spw_store_acquire(f.store, &(spw_store_use){1, 0}, 1, &weights, &err), SPW_ETIMEDOUT);
    close_store(&f);
    tiny_dir_remove(dir);
    alarm(0);
}

static spw_status
prepare_nothing(void *ctx, uint32_t chunk_idx, void *record, void *grad, uint64_t first, uint64_t count, spw_error *err)
{
    (void)ctx;
    (void)chunk_idx;
    (void)record;
    (void)grad;
    (void)first;
    (void)count;
    (void)err;
    return SPW_OK;
}

typedef struct failing {
    spw_store *store;
    bool now; /* atomic */
} failing;

static void *
fail_when_told(void *arg)
{
    failing *f = arg;
    while (!__atomic_load_n(&f->now, __ATOMIC_ACQUIRE)) {
    }
    spw_store_fail(f->store, &(spw_error){.status = SPW_EIO, .message = "a disk is gone"});
    return NULL;
}

/* Who is not given a unit between the halves of its update, because the store fails at that moment, has none to give back: the store can end. */
static void
test_taken_or_not(void **state)
{
    enum { WHOLE = 128, RUNS = 100 };
    static spw_store_unit units[WHOLE];
    static spw_store_chunk chunks[WHOLE];
    uint32_t told = 0;
    (void)state;
    alarm(200);
    for (uint32_t u = 0; u < WHOLE; u++) {
        units[u] =
            (spw_store_unit){.chunk_first = u, .chunk_count = 1, .elems = 4096, .trainable = true, .whole = true};
        chunks[u] =
            (spw_store_chunk){.unit_idx = u, .elems = 4096, .weight_tier = SPW_TIER_HOST, .record_tier = SPW_TIER_HOST};
    }
    for (uint32_t run = 0; run < RUNS; run++) {
        order o = {0};
        spw_store_config c = {.units = units,
                              .chunks = chunks,
                              .unit_count = WHOLE,
                              .chunk_count = WHOLE,
                              .weight_bytes = 4,
                              .record = {{128, {128}, 1}, {128, {128}, 1}},
                              .device_cache_bytes = 4096 * 4,
                              .worker_count = 1,
                              .update = note_update,
                              .prepare = prepare_nothing,
                              .update_ctx = &o};
        spw_status st = SPW_OK;
        pthread_t other;
        failing by;
        fixture f;
        assert_int_equal(spw_gpu_open(&f.gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
        c.gpu = f.gpu;
        assert_int_equal(spw_store_create(&f.store, &c, NULL), SPW_OK);
        spw_store_step_begin(f.store, NULL, SPW_STEP_GATED);
        for (uint32_t u = 0; u < WHOLE; u++)
            spw_store_grad_ready(f.store, u);
        spw_store_step_go(f.store);
        by = (failing){.store = f.store};
        assert_int_equal(pthread_create(&other, NULL, fail_when_told, &by), 0);
        for (uint32_t u = 0; u < WHOLE && st == SPW_OK; u++) {
            void *grad;
            if (u == run)
                __atomic_store_n(&by.now, true, __ATOMIC_RELEASE);
            st = spw_store_whole_take(f.store, u, &grad, NULL);
            if (st == SPW_OK)
                spw_store_whole_done(f.store, u);
        }
        assert_int_equal(pthread_join(other, NULL), 0);
        told += st != SPW_OK;
        close_store(&f);
    }
    alarm(0);
    assert_true(told > 0);
}

/* A disk that is too small is told before memory is taken, which for a large arena is minutes; here there is neither. */
static void
test_disk_first(void **state)
{
    const uint64_t many = (uint64_t)1 << 44;
    const spw_store_unit unit = {.chunk_count = 1, .elems = many, .trainable = true};
    const spw_store_chunk chunk = {.elems = many, .weight_tier = SPW_TIER_HOST, .record_tier = SPW_TIER_NVME};
    const char *const paths[] = {"."};
    spw_store_config c = {.units = &unit,
                          .chunks = &chunk,
                          .unit_count = 1,
                          .chunk_count = 1,
                          .weight_bytes = 4,
                          .record[0].bytes_32 = 256,
                          .device_cache_bytes = many * 4,
                          .record_slot_count = 1,
                          .worker_count = 1,
                          .paths = paths,
                          .path_count = 1};
    spw_error err = {0};
    spw_gpu *gpu;
    spw_store *s = NULL;
    (void)state;
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, NULL), SPW_OK);
    c.gpu = gpu;
    assert_int_equal(spw_store_create(&s, &c, &err), SPW_ENOSPC);
    assert_non_null(strstr(err.message, "swap space in .: needs 128 TiB"));
    assert_null(s);
    spw_gpu_close(gpu);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_fetched_once),
        cmocka_unit_test(test_read_once),
        cmocka_unit_test(test_slots_take_turns),
        cmocka_unit_test(test_read_once_beside_updates),
        cmocka_unit_test(test_asked),
        cmocka_unit_test(test_left_out),
        cmocka_unit_test(test_leave_first),
        cmocka_unit_test(test_place_without_slot),
        cmocka_unit_test(test_place_before_slot),
        cmocka_unit_test(test_stands_still),
        cmocka_unit_test(test_taken_or_not),
        cmocka_unit_test(test_disk_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
