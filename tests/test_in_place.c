/* Frozen weights that stay in the files of their folder or checkpoint: trained from there as from copies, and guarded. */
#include "lib_rig.h"
#include "spw_access.h"
#include "spw_files.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

/* A folder of the family with these bytes for weights: out of a model that was trained for a step. */
static void
make_folder(char folder[SPW_PATH_BYTES], const char *dir, spw_family family, spw_dtype dtype, uint64_t shard_bytes)
{
    rig r;
    char path[SPW_PATH_BYTES];
    spw_export_report report;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    rig_open(&r);
    rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
    rig_train(&r, 0, 1);
    rig_need(&r, spw_checkpoint_save(r.e, &r.c, r.dir, &(spw_checkpoint_state){.step = 1, .updates = 1}, path, &r.err));
    snprintf(folder, SPW_PATH_BYTES, "%.300s/folder", dir);
    rig_need(&r,
             spw_export(&(spw_export_options){.source = path, .to = folder, .dtype = dtype, .shard_bytes = shard_bytes},
                        &report, &r.err));
    rig_remove(&r);
}

/* All but one bias is frozen: nothing but that is in swap. */
static void
freeze_nearly_all(rig *r)
{
    rig_freeze(r, "[!h]*");
    rig_freeze(r, "h.[0-1].*");
    rig_freeze(r, "h.2.*weight");
}

/*
 * Trained from a folder whose frozen weights stay there, and from copies of them: the same losses and state to the last bit,
 * in small chunks, with one slot, with delays. In swap there is nothing of them: not a byte is planned, none is written.
 */
static void
stays(spw_family family, spw_state_format format, spw_dtype dtype, uint64_t shard_bytes, void (*change)(rig *r))
{
    static const struct {
        uint64_t chunk, chaos;
        uint32_t slots;
        bool copied;
    } kinds[] = {{8192, 0, 0, true}, {8192, 0, 0, false}, {4096, 0, 1, false}, {4096, 41, 2, false}};
    char dir[256], folder[SPW_PATH_BYTES];
    double want[RIG_STEPS];
    float *want_part = NULL;
    uint64_t swap[2] = {0, 0}, frozen = 0;
    tiny_dir_make(dir);
    make_folder(folder, dir, family, dtype, shard_bytes);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        rig r;
        float *got;
        spw_store_stats stats;
        rig_config(&r, family, format, SPW_TIER_NVME);
        r.c.zero.offload_optimizer = SPW_TIER_HOST;
        change(&r);
        r.from = folder;
        r.c.run.frozen_in_place = !kinds[k].copied;
        r.c.run.chunk_elems = kinds[k].chunk;
        r.c.run.weight_slots = kinds[k].slots;
        r.c.run.chaos_seed = kinds[k].chaos;
        r.c.zero.max_live_parameters = k > 1 ? 24576 : UINT64_MAX; /* a layer or two: read again in every pass */
        rig_open(&r);
        rig_need(&r, spw_engine_load_weights(r.e, folder, &r.err));
        rig_train(&r, 0, RIG_STEPS);
        got = rig_read(&r, SPW_PART_MASTER);
        spw_store_get_stats(spw_engine_store(r.e), &stats);
        if (k == 0) {
            memcpy(want, r.losses, sizeof want);
            want_part = got;
            swap[0] = spw_engine_plan(r.e)->path_bytes[0];
            assert_int_equal(rig_in_place_bytes(&r), 0);
        } else {
            assert_memory_equal(want, r.losses, sizeof want);
            for (uint32_t id = 0; id < r.model->param_count; id++)
                rig_same_param(r.model, id, want_part, got, "state");
            free(got);
        }
        if (k == 1) {
            const spw_layout *l = spw_engine_layout(r.e);
            swap[1] = spw_engine_plan(r.e)->path_bytes[0];
            for (uint32_t u = 0; u < l->unit_count; u++)
                frozen += l->units[u].trainable ? 0 : l->units[u].elems * spw_state_weight_bytes(format);
            assert_true(frozen > 0);
            assert_int_equal(rig_in_place_bytes(&r), frozen);
            assert_int_equal(swap[0] - swap[1], frozen);
            /* What is written is what is trained: its weights at the start and after each step. */
            assert_true(stats.nvme_write_bytes <= (RIG_STEPS + 1) * swap[1]);
            assert_true(stats.nvme_read_bytes > 0);
        }
        rig_remove(&r);
    }
    free(want_part);
    tiny_dir_remove(dir);
}

static void
test_stays(void **state)
{
    (void)state;
    stays(SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_F32, 0, freeze_nearly_all);
    stays(SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_BF16, 9000, rig_freeze_mlps);
    stays(SPW_FAMILY_LLAMA, SPW_STATE_MIXED, SPW_BF16, 0, rig_lora);
}

/* What has another type than the format gives weights is converted, and copied. */
static void
test_other_types_are_copied(void **state)
{
    char dir[256], folder[SPW_PATH_BYTES];
    (void)state;
    tiny_dir_make(dir);
    make_folder(folder, dir, SPW_FAMILY_LLAMA, SPW_F16, 0);
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_config(&r, SPW_FAMILY_LLAMA, k ? SPW_STATE_SPLIT : SPW_STATE_FP32, SPW_TIER_NVME);
        rig_freeze_mlps(&r);
        r.from = folder;
        rig_open(&r);
        assert_int_equal(rig_in_place_bytes(&r), 0);
        rig_need(&r, spw_engine_load_weights(r.e, folder, &r.err));
        rig_train(&r, 0, 1);
        rig_remove(&r);
    }
    tiny_dir_remove(dir);
}

static void
damage(const char *folder, uint64_t offset)
{
    char path[SPW_PATH_BYTES + 64];
    unsigned char byte;
    int fd;
    snprintf(path, sizeof path, "%.600s/model.safetensors", folder);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset), 1);
    close(fd);
}

/* Files that change are noticed: between reading the header and opening, and while they are in use. Nothing is trained on them. */
static void
test_changed_files(void **state)
{
    char dir[256], folder[SPW_PATH_BYTES], path[SPW_PATH_BYTES + 64];
    struct stat info;
    rig r;
    spw_step_result result;
    spw_status st = SPW_OK;
    (void)state;
    tiny_dir_make(dir);
    make_folder(folder, dir, SPW_FAMILY_LLAMA, SPW_BF16, 0);
    snprintf(path, sizeof path, "%.600s/model.safetensors", folder);
    assert_int_equal(stat(path, &info), 0);
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_freeze_mlps(&r);
    r.c.run.weight_slots = 1; /* and room for one layer on the device: every pass reads again */
    r.c.zero.max_live_parameters = 24576;
    r.c.run.chunk_elems = 4096;
    r.from = folder;
    rig_open(&r);
    assert_true(rig_in_place_bytes(&r) > 0);
    rig_need(&r, spw_engine_load_weights(r.e, folder, &r.err));
    rig_train(&r, 0, 2);
    for (uint64_t at = (uint64_t)info.st_size / 8; at < (uint64_t)info.st_size; at += (uint64_t)info.st_size / 8)
        damage(folder, at); /* some of it lies in what is frozen */
    for (int s = 2; s < RIG_STEPS && st == SPW_OK; s++) {
        uint64_t n = r.c.micro_batch * r.c.accumulation * r.c.data.seq_length;
        tiny_batch((uint64_t)s, r.c.model.vocab, n, rig_tokens, rig_targets);
        st = spw_engine_step(r.e, rig_tokens, rig_targets, (uint32_t)r.c.accumulation, 1e-3, &result, &r.err);
    }
    assert_int_equal(st, SPW_ECORRUPT);
    if (strstr(r.err.message, "model.safetensors changed while its frozen weights were in use") == NULL)
        fail_msg("%s", r.err.message);
    rig_close(&r);
    /* An engine takes the files that it was made for, and cannot edit what lies there. */
    memset(&r.err, 0, sizeof r.err);
    rig_open(&r);
    assert_int_equal(spw_engine_init_params(r.e, 1, &r.err), SPW_EINVAL);
    assert_non_null(strstr(r.err.message, "frozen_in_place"));
    assert_int_equal(spw_engine_load_weights(r.e, "/elsewhere", &r.err), SPW_EINVAL);
    memset(&r.err, 0, sizeof r.err);
    rig_need(&r, spw_engine_load_weights(r.e, folder, &r.err));
    for (uint32_t id = 0; id < r.model->param_count; id++) {
        spw_access a;
        spw_stretch held;
        static float values[1 << 16];
        memset(&r.err, 0, sizeof r.err);
        rig_need(&r, spw_access_find(&a, r.e, r.model->params[id].name, "master", &r.err));
        assert_int_equal(spw_access_set_local(r.e, &a, values, &held, &r.err),
                         r.model->params[id].frozen ? SPW_EUNSUPPORTED : SPW_OK);
    }
    rig_remove(&r);
    tiny_dir_remove(dir);
}

/* The store refuses a file that is not the one its header was read from: another size, another time. */
static void
test_file_changed_before_open(void **state)
{
    char dir[256], path[300];
    struct stat info;
    spw_error err = {0};
    spw_gpu *gpu = NULL;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/w", dir);
    rig_need(&(rig){.err = err}, spw_file_write_text(path, "01234567", &err));
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(spw_gpu_open(&gpu, &(spw_gpu_options){.name = "cpu", .thread_count = 1}, &err), SPW_OK);
    for (int k = 0; k < 3; k++) {
        spw_store *s = NULL;
        const char *paths[] = {dir};
        spw_store_unit unit = {.chunk_count = 1, .elems = 4096};
        spw_store_chunk chunk = {.elems = 4096, .weight_tier = SPW_TIER_NVME, .piece_count = 1};
        spw_store_piece piece = {.bytes = 8};
        spw_store_file file = {path, 8 + (k == 1),
                               (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec + (k == 2)};
        spw_store_config c = {.gpu = gpu,
                              .units = &unit,
                              .chunks = &chunk,
                              .unit_count = 1,
                              .chunk_count = 1,
                              .weight_dtype = SPW_F32,
                              .grad_dtype = SPW_F32,
                              .weight_bytes = 4,
                              .weight_slot_count = 1,
                              .device_cache_bytes = 16384,
                              .paths = paths,
                              .path_count = 1,
                              .pieces = &piece,
                              .files = &file,
                              .file_count = 1};
        spw_status st = spw_store_create(&s, &c, &err);
        assert_int_equal(st, k == 0 ? SPW_OK : SPW_ECORRUPT);
        assert_true(k == 0 || strstr(err.message, "/w changed since its header was read") != NULL);
        spw_store_destroy(s);
    }
    spw_gpu_close(gpu);
    tiny_dir_remove(dir);
}

/* A checkpoint's own weights stay in place when training goes on from it, and the bits are those of the run that was not cut. */
static void
test_stays_on_resuming(void **state)
{
    rig whole, part;
    char path[SPW_PATH_BYTES], file[SPW_PATH_BYTES + 64];
    (void)state;
    rig_config(&whole, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_lora(&whole);
    rig_open(&whole);
    rig_need(&whole, spw_engine_init_params(whole.e, 7, &whole.err));
    rig_train(&whole, 0, 2);
    rig_need(&whole, spw_checkpoint_save(whole.e, &whole.c, whole.dir, &(spw_checkpoint_state){.step = 2, .updates = 2},
                                         path, &whole.err));
    rig_train(&whole, 2, RIG_STEPS);
    rig_config(&part, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_lora(&part);
    snprintf(file, sizeof file, "%.1000s/model.safetensors", path);
    part.from = file;
    rig_open(&part);
    assert_true(rig_in_place_bytes(&part) > 0);
    rig_need(&part, spw_checkpoint_load(part.e, path, &part.err));
    rig_train(&part, 2, RIG_STEPS);
    for (int s = 2; s < RIG_STEPS; s++)
        assert_true(whole.losses[s] == part.losses[s]);
    rig_remove(&whole);
    rig_remove(&part);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stays),
        cmocka_unit_test(test_other_types_are_copied),
        cmocka_unit_test(test_changed_files),
        cmocka_unit_test(test_file_changed_before_open),
        cmocka_unit_test(test_stays_on_resuming),
    };
    return cmocka_run_group_tests_name("in_place", tests, NULL, NULL);
}
