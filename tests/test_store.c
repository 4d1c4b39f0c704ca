/*
 * The store alone, told by hand what will be used: fills that were begun and given up, and how often weights come to the device.
 */
#include "lib_tiny.h"
#include "spw_offload.h"
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

/* Frozen units in host memory, and a device on which `room` of them fit. */
static void
open_store(fixture *f, uint32_t room, uint64_t chaos)
{
    spw_gpu_options gpu = {.name = "cpu", .thread_count = 1};
    spw_store_config config = {.units = f->units,
                               .chunks = f->chunks,
                               .unit_count = UNITS,
                               .chunk_count = UNITS * CHUNKS,
                               .weight_bytes = 4,
                               .record_bytes_32 = 256,
                               .device_cache_bytes = room * ELEMS * 4,
                               .worker_count = 1,
                               .chaos_seed = chaos};
    memset(f, 0, sizeof *f);
    for (uint32_t u = 0; u < UNITS; u++) {
        f->units[u] = (spw_store_unit){.chunk_first = u * CHUNKS, .chunk_count = CHUNKS, .elems = ELEMS};
        for (uint32_t k = 0; k < CHUNKS; k++)
            f->chunks[u * CHUNKS + k] = (spw_store_chunk){.unit_idx = u,
                                                          .first = k * 4096,
                                                          .elems = 4096,
                                                          .weight_tier = SPW_TIER_HOST,
                                                          .record_tier = SPW_TIER_HOST};
    }
    assert_int_equal(spw_gpu_open(&f->gpu, &gpu, NULL), SPW_OK);
    config.gpu = f->gpu;
    assert_int_equal(spw_store_create(&f->store, &config, NULL), SPW_OK);
    assert_int_equal(spw_store_sweep(f->store, SPW_SWEEP_INIT, fill_chunk, NULL, NULL), SPW_OK);
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
    alarm(60); /* before it was mended it waited for ever */
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

/* Which chunk was updated when, by one worker. */
typedef struct order {
    uint32_t count, chunk[UNITS * CHUNKS];
} order;

static spw_status
note_update(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, uint64_t first,
            uint64_t count, spw_error *err)
{
    order *o = ctx;
    (void)weights;
    (void)record;
    (void)grad;
    (void)first;
    (void)count;
    (void)err;
    o->chunk[o->count++] = chunk_idx;
    return SPW_OK;
}

/*
 * Two units' records in host memory, two on nvme, of which some were read ahead: these give their slots back while the first
 * are updated, and not after all of them.
 */
static void
test_slots_take_turns(void **state)
{
    enum { SLOTS = 8, RECORD_BYTES = 4096 * 8 };
    fixture f;
    order o = {0};
    char dir[256];
    const char *path = dir;
    spw_gpu_options gpu = {.name = "cpu", .thread_count = 1};
    spw_store_config config = {.units = f.units,
                               .chunks = f.chunks,
                               .unit_count = UNITS,
                               .chunk_count = UNITS * CHUNKS,
                               .weight_bytes = 4,
                               .record_bytes_32 = 256,
                               .record_parts = {256},
                               .record_part_count = 1,
                               .record_slot_count = SLOTS,
                               .device_cache_bytes = ELEMS * 4,
                               .worker_count = 1,
                               .paths = &path,
                               .path_count = 1,
                               .update = note_update,
                               .update_ctx = &o};
    spw_store_stats stats;
    uint32_t early = 0;
    (void)state;
    tiny_dir_make(dir);
    memset(&f, 0, sizeof f);
    for (uint32_t u = 0; u < UNITS; u++) {
        f.units[u] =
            (spw_store_unit){.chunk_first = u * CHUNKS, .chunk_count = CHUNKS, .elems = ELEMS, .trainable = true};
        for (uint32_t k = 0; k < CHUNKS; k++)
            f.chunks[u * CHUNKS + k] = (spw_store_chunk){.unit_idx = u,
                                                         .first = k * 4096,
                                                         .elems = 4096,
                                                         .weight_tier = SPW_TIER_HOST,
                                                         .record_tier = u < 2 ? SPW_TIER_HOST : SPW_TIER_NVME};
    }
    assert_int_equal(spw_gpu_open(&f.gpu, &gpu, NULL), SPW_OK);
    config.gpu = f.gpu;
    assert_int_equal(spw_store_create(&f.store, &config, NULL), SPW_OK);
    assert_int_equal(spw_store_sweep(f.store, SPW_SWEEP_INIT, fill_chunk, NULL, NULL), SPW_OK);
    assert_int_equal(spw_store_drain(f.store, NULL), SPW_OK);
    spw_store_step_begin(f.store);
    for (uint32_t u = 0; u < UNITS; u++) {
        assert_int_equal(spw_store_grad_open(f.store, u, NULL), SPW_OK);
        memset(spw_store_grad(f.store, u), 0, ELEMS * 4);
        spw_store_grad_ready(f.store, u);
    }
    do {
        spw_sleep_ns(1000000);
        spw_store_get_stats(f.store, &stats);
    } while (stats.nvme_moving > 0 || stats.nvme_read_bytes < SLOTS * RECORD_BYTES);
    spw_sleep_ns(10000000); /* the mover has taken them in */
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

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_given_up),
        cmocka_unit_test(test_fetched_once),
        cmocka_unit_test(test_slots_take_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
