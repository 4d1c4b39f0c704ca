/* Activation checkpoints by themselves: every mix of tiers gives back what was put, in order, whatever goes wrong. */
#include "lib_tiny.h"
#include <errno.h>
#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

enum { SLOTS = 7, MICROS = 3, COUNT = SLOTS * MICROS, ELEMS = 1700 /* not whole pages */, PASSES = 3 };

typedef struct rig {
    spw_gpu *gpu;
    spw_gpu_queue *compute;
    float *flow; /* (2, MICROS, ELEMS) what checkpoints come from */
    spw_act *act;
    spw_act_config cfg;
    spw_act_place places[COUNT];
    uint64_t stall_ns[SPW_STALL_COUNT];
    spw_error err;
    char dir[256];
    const char *path;
} rig;

/* The lowest slots on nvme, then host, then device. */
static void
rig_open(rig *r, uint32_t nvme, uint32_t host, uint32_t working, uint32_t staging)
{
    memset(r, 0, sizeof *r);
    tiny_dir_make(r->dir);
    r->path = r->dir;
    assert_int_equal(spw_gpu_open(&r->gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, &r->err), SPW_OK);
    assert_int_equal(spw_gpu_queue_create(&r->compute, r->gpu, SPW_QUEUE_COMPUTE, &r->err), SPW_OK);
    assert_int_equal(spw_gpu_alloc(r->gpu, (void **)&r->flow, 2 * MICROS * ELEMS * sizeof(float), &r->err), SPW_OK);
    for (uint32_t i = 0; i < COUNT; i++)
        r->places[i].tier = i < nvme ? SPW_TIER_NVME : i < nvme + host ? SPW_TIER_HOST : SPW_TIER_DEVICE;
    r->cfg = (spw_act_config){.gpu = r->gpu,
                              .dtype = SPW_F32,
                              .elems = ELEMS,
                              .slot_count = SLOTS,
                              .micro_count = MICROS,
                              .places = r->places,
                              .working_count = working,
                              .staging_count = staging,
                              .integrity = true,
                              .paths = &r->path,
                              .path_count = 1,
                              .stall_ns = r->stall_ns,
                              .aio = {.block_bytes = 4096}};
}

static void
rig_close(rig *r)
{
    spw_act_destroy(r->act);
    spw_gpu_free(r->gpu, r->flow);
    spw_gpu_queue_destroy(r->compute);
    assert_int_equal(spw_gpu_bytes_live(r->gpu), 0);
    spw_gpu_close(r->gpu);
    assert_int_equal(rmdir(r->dir), 0); /* nothing is left in it */
}

static float
value(uint32_t pass, uint32_t idx, uint32_t element)
{
    return (float)(pass * 1000 + idx) + (float)element / 4096.0f;
}

/* Slots and micro-batches below the given counts, as the engine does it: two rows of buffers take turns. */
static spw_status
forward(rig *r, uint32_t pass, uint32_t slots, uint32_t micros)
{
    SPW_TRY(spw_act_begin(r->act, &r->err));
    for (uint32_t s = 0; s < slots; s++) {
        for (uint32_t i = 0; i < micros; i++) {
            uint32_t idx = s * MICROS + i;
            float *home = spw_act_home(r->act, idx), *out = home;
            if (home == NULL) {
                out = r->flow + ((s % 2) * MICROS + i) * ELEMS;
                if (s >= 2)
                    SPW_TRY(spw_act_settle(r->act, idx - 2 * MICROS, &r->err));
            }
            for (uint32_t e = 0; e < ELEMS; e++)
                out[e] = value(pass, idx, e);
            SPW_TRY(spw_act_put(r->act, idx, out, r->compute, &r->err));
        }
    }
    spw_act_turn(r->act);
    return SPW_OK;
}

static spw_status
backward(rig *r, uint32_t pass, uint32_t slots, uint32_t micros)
{
    for (uint32_t s = slots; s-- > 0;) {
        for (uint32_t i = 0; i < micros; i++) {
            uint32_t idx = s * MICROS + i;
            void *got;
            SPW_TRY(spw_act_get(r->act, idx, &got, &r->err));
            for (uint32_t e = 0; e < ELEMS; e++)
                assert_true(((float *)got)[e] == value(pass, idx, e));
            spw_act_release(r->act, idx, r->compute);
        }
    }
    return SPW_OK;
}

/* All mixes, one buffer of each kind and several, random delays and poisoned buffers, passes that use less than all. */
static void
test_roundtrip(void **state)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    static const struct {
        uint32_t nvme, host, working, staging;
    } mixes[] = {{0, 0, 0, 0}, {0, COUNT, 1, 0}, {COUNT, 0, 1, 1}, {COUNT, 0, 2, 4}, {5, 7, 1, 1},        {4, 2, 2, 2},
                 {1, 0, 1, 1}, {0, 5, 3, 0},     {COUNT, 0, 5, 1}, {COUNT, 0, 1, 9}, {9, COUNT - 9, 2, 3}};
    (void)state;
    for (size_t m = 0; m < sizeof mixes / sizeof mixes[0]; m++) {
        for (int backend = SPW_AIO_AUTO; backend <= SPW_AIO_THREADS; backend += SPW_AIO_THREADS) {
            rig r;
            spw_act_need need;
            spw_act_stats stats;
            uint64_t regions = spw_region_bytes_live(), device, used = 0, on_nvme = 0, bytes = ELEMS * sizeof(float);
            rig_open(&r, mixes[m].nvme, mixes[m].host, mixes[m].working, mixes[m].staging);
            r.cfg.aio.backend = (spw_aio_backend)backend;
            r.cfg.chaos_seed = m % 3 == 1 ? 0 : m + 1;
            device = spw_gpu_bytes_live(r.gpu);
            regions = spw_region_bytes_live();
            spw_act_compute_need(&r.cfg, &need);
            assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_OK);
            assert_int_equal(spw_gpu_bytes_live(r.gpu) - device, need.device_bytes);
            if (mixes[m].nvme == 0) /* aio has buffers of its own */
                assert_int_equal(spw_region_bytes_live() - regions,
                                 spw_round_up(need.host_bytes, page) + spw_round_up(need.device_bytes, page));
            for (uint32_t pass = 0; pass < PASSES; pass++) {
                uint32_t slots = pass == 1 ? SLOTS - 2 : SLOTS, micros = pass == 2 ? MICROS - 1 : MICROS;
                assert_int_equal(forward(&r, pass, slots, micros), SPW_OK);
                assert_int_equal(backward(&r, pass, slots, micros), SPW_OK);
                for (uint32_t i = 0; i < COUNT; i++) {
                    bool put = i / MICROS < slots && i % MICROS < micros;
                    used += put && r.places[i].tier != SPW_TIER_DEVICE;
                    on_nvme += put && r.places[i].tier == SPW_TIER_NVME;
                }
            }
            spw_act_get_stats(r.act, &stats);
            assert_int_equal(stats.h2d_bytes, used * bytes);
            assert_int_equal(stats.d2h_bytes, used * bytes);
            assert_int_equal(stats.nvme_read_bytes, on_nvme * need.nvme_bytes);
            assert_int_equal(stats.nvme_write_bytes, on_nvme * need.nvme_bytes);
            rig_close(&r);
        }
    }
}

/* A pass that breaks off, in either direction and at any point, is forgotten; destroying in the middle is fine too. */
static void
test_broken_off(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < 2 * SLOTS; k++) {
        rig r;
        rig_open(&r, 8, 6, 2, 2);
        r.cfg.chaos_seed = k + 1;
        assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_OK);
        assert_int_equal(forward(&r, 7, k < SLOTS ? k : SLOTS, MICROS), SPW_OK);
        for (uint32_t i = 0; k > SLOTS && i < MICROS; i++) { /* some of the last slot; one not released */
            void *got;
            assert_int_equal(spw_act_get(r.act, (SLOTS - 1) * MICROS + i, &got, &r.err), SPW_OK);
            if (i + 1 < MICROS)
                spw_act_release(r.act, (SLOTS - 1) * MICROS + i, r.compute);
        }
        assert_int_equal(forward(&r, 8, SLOTS, MICROS), SPW_OK);
        assert_int_equal(backward(&r, 8, SLOTS, MICROS), SPW_OK);
        assert_int_equal(forward(&r, 9, k % SLOTS, MICROS), SPW_OK);
        rig_close(&r);
    }
}

/* Mistakes of the caller are told apart from trouble and change nothing. */
static void
test_order(void **state)
{
    rig r;
    void *got;
    (void)state;
    rig_open(&r, 3, 3, 1, 1);
    assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_OK);
    assert_int_equal(spw_act_get(r.act, 0, &got, &r.err), SPW_EINVAL); /* not put */
    assert_int_equal(forward(&r, 1, SLOTS, MICROS), SPW_OK);
    assert_int_equal(spw_act_put(r.act, COUNT - 1, spw_act_home(r.act, COUNT - 1), r.compute, &r.err), SPW_EINVAL);
    assert_int_equal(spw_act_get(r.act, 0, &got, &r.err), SPW_EINVAL); /* not its turn */
    assert_int_equal(backward(&r, 1, SLOTS, MICROS), SPW_OK);
    assert_int_equal(spw_act_begin(r.act, &r.err), SPW_OK);
    assert_int_equal(spw_act_put(r.act, COUNT - 1, r.flow, r.compute, &r.err), SPW_EINVAL); /* not its home */
    rig_close(&r);
    rig_open(&r, 1, 0, 0, 1);
    assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_EINVAL);
    r.cfg.working_count = 1;
    r.cfg.staging_count = 0;
    assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_EINVAL);
    rig_close(&r);
}

/* Any allocation may fail: an error, and nothing left behind. */
static void
test_no_memory(void **state)
{
    bool through = false;
    rig r;
    (void)state;
    rig_open(&r, 4, 4, 2, 2);
    for (unsigned k = 1; !through; k++) {
        spw_error err = {0};
        long live = spw_test_live_allocs();
        spw_status st;
        spw_test_fail_alloc(k);
        st = spw_act_create(&r.act, &r.cfg, &err);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        if (st == SPW_OK) { /* io_uring may do without some of its memory */
            spw_act_destroy(r.act);
            r.act = NULL;
        } else {
            assert_int_equal(st, SPW_ENOMEM);
            assert_false(through);
        }
        assert_int_equal(spw_test_live_allocs(), live);
    }
    rig_close(&r);
}

/* A failing transfer, whichever it is, ends the pass with one error that names the file, and stays. */
static void
test_faults(void **state)
{
    uint32_t hits = 0;
    (void)state;
    for (int full = 0; full < 2; full++) {
        for (uint64_t at = 1; at < 200; at = at < 8 ? at + 1 : at * 3 / 2) {
            spw_test_aio_schedule faults = {.seed = at, .error_at = full ? 0 : at, .full = full ? 200 : 0};
            spw_error again = {0};
            spw_status st;
            rig r;
            rig_open(&r, COUNT, 0, 2, 2);
            r.cfg.aio_faults = &faults;
            assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_OK);
            st = forward(&r, 1, SLOTS, MICROS);
            if (st == SPW_OK)
                st = backward(&r, 1, SLOTS, MICROS);
            if (faults.failures > 0) {
                hits++;
                assert_int_equal(st, full ? SPW_ENOSPC : SPW_EIO);
                assert_non_null(strstr(r.err.message, "swap.bin"));
                assert_non_null(strstr(r.err.message, "activation checkpoint of slot"));
                assert_int_equal(spw_act_begin(r.act, &again), st);
                assert_string_equal(again.message, r.err.message);
            } else {
                assert_int_equal(st, SPW_OK);
            }
            rig_close(&r);
        }
    }
    assert_true(hits > 12);
}

/* A byte that changes on disk is found and named; without integrity nobody looks. */
static void
test_corrupt(void **state)
{
    (void)state;
    for (int integrity = 0; integrity < 2; integrity++) {
        char pattern[320];
        spw_act_stats stats;
        spw_act_need need;
        glob_t found;
        void *got;
        rig r;
        rig_open(&r, 2, 0, 1, 2);
        r.cfg.integrity = integrity;
        spw_act_compute_need(&r.cfg, &need);
        assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_OK);
        assert_int_equal(forward(&r, 1, 0, 0), SPW_OK);
        assert_int_equal(spw_act_begin(r.act, &r.err), SPW_OK);
        for (uint32_t i = 0; i < 2; i++) {
            memset(r.flow + i * ELEMS, 0, ELEMS * sizeof(float));
            assert_int_equal(spw_act_put(r.act, i, r.flow + i * ELEMS, r.compute, &r.err), SPW_OK);
        }
        do {
            spw_sleep_ns(100000);
            spw_act_get_stats(r.act, &stats);
        } while (stats.nvme_write_bytes < 2 * need.nvme_bytes);
        snprintf(pattern, sizeof pattern, "%s/spillway-*-act/rank-0/swap.bin", r.dir);
        assert_int_equal(glob(pattern, 0, NULL, &found), 0);
        assert_int_equal(found.gl_pathc, 1);
        tiny_spoil_file(found.gl_pathv[0], need.nvme_bytes + 100);
        globfree(&found);
        spw_act_turn(r.act);
        if (spw_act_get(r.act, 0, &got, &r.err) == SPW_OK) { /* the other one may be found out first */
            spw_act_release(r.act, 0, r.compute);
            (void)spw_act_get(r.act, 1, &got, &r.err);
        }
        assert_int_equal(r.err.status, integrity ? SPW_ECORRUPT : SPW_OK);
        if (integrity) {
            assert_non_null(strstr(r.err.message, "slot 0, micro-batch 1"));
            assert_non_null(strstr(r.err.message, "swap.bin at offset"));
        }
        rig_close(&r);
    }
}

/* A disk too small, or no folder, is told before anything is trained. */
static void
test_no_disk(void **state)
{
    enum { MANY = 1 << 16 };
    spw_act_place *places = calloc(MANY, sizeof *places);
    rig r;
    (void)state;
    assert_non_null(places);
    for (uint32_t i = 0; i < MANY; i++)
        places[i].tier = SPW_TIER_NVME;
    rig_open(&r, COUNT, 0, 1, 1);
    r.cfg.places = places;
    r.cfg.slot_count = MANY;
    r.cfg.micro_count = 1;
    r.cfg.elems = 16u << 20; /* 4 TiB in all */
    assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_ENOSPC);
    assert_non_null(strstr(r.err.message, "activation checkpoints: swap space in"));
    assert_non_null(strstr(r.err.message, "4.00 TiB"));
    free(places);
    rig_close(&r);
    rig_open(&r, COUNT, 0, 1, 1);
    r.path = "/nowhere/at/all";
    assert_int_equal(spw_act_create(&r.act, &r.cfg, &r.err), SPW_ENOENT);
    assert_non_null(strstr(r.err.message, "/nowhere/at/all"));
    rig_close(&r);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_roundtrip), cmocka_unit_test(test_broken_off), cmocka_unit_test(test_order),
        cmocka_unit_test(test_no_memory), cmocka_unit_test(test_faults),     cmocka_unit_test(test_corrupt),
        cmocka_unit_test(test_no_disk),
    };
    return cmocka_run_group_tests_name("activations", tests, NULL, NULL);
}
