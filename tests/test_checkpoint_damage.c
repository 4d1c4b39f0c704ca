/*
 * A checkpoint's files are summed on their way to the disk and back: a byte that changes anywhere in them is found when they are loaded, in
 * every format and tier, also where only a part is read; and neither a save nor a load reads anything twice.
 */
#include "lib_rig.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static const char model_file[] = "model.safetensors", optimizer_file[] = "optimizer-00001-of-00001.safetensors";

static uint64_t
file_bytes(const char *path)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    return (uint64_t)info.st_size;
}

static void
flip(const char *path, uint64_t at)
{
    unsigned char byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &byte, 1, (off_t)at) == 1);
    byte ^= (unsigned char)(1 << at % 8);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

/* Where tensors begin. */
static uint64_t
header_bytes(const char *path)
{
    uint64_t n;
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0 && pread(fd, &n, 8, 0) == 8);
    close(fd);
    return n + 8;
}

/* r is open. The state of a load that failed is nobody's, and a load after it gets the file's. */
static void
expect_found(rig *r, const char *folder, const char *name, uint64_t at)
{
    char path[600];
    spw_error err = {0};
    spw_status st;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    flip(path, at);
    st = spw_checkpoint_load(r->e, folder, &err);
    flip(path, at);
    if (st != SPW_ECORRUPT || strstr(err.message, name) == NULL)
        fail_msg("%s, byte %llu flipped: %d %s", name, (unsigned long long)at, (int)st, err.message);
}

/* In turn: formats and tiers; trained as a whole or, saved so, less of it afterwards. */
static void
test_flips(void **state)
{
    static const spw_tier tiers[] = {SPW_TIER_HOST, SPW_TIER_NVME, SPW_TIER_DEVICE};
    uint64_t draw = 5;
    (void)state;
    for (int f = 0; f < SPW_STATE_COUNT; f++) {
        rig saved, loaded;
        char folder[400], path[600];
        uint64_t opt_bytes, opt_header;
        rig_config(&saved, SPW_FAMILY_GPT2, (spw_state_format)f, SPW_TIER_HOST);
        rig_need(&saved, rig_begin(&saved));
        rig_train(&saved, 0, 2);
        rig_save(&saved, 2);
        snprintf(folder, sizeof folder, "%s/step-2", saved.dir);
        snprintf(path, sizeof path, "%s/%s", folder, optimizer_file);
        opt_bytes = file_bytes(path);
        opt_header = header_bytes(path);
        rig_config(&loaded, SPW_FAMILY_GPT2, (spw_state_format)f, tiers[f % 3]);
        loaded.c.run.chunk_elems = 4096;
        rig_open(&loaded);
        for (int k = 0; k < 12; k++) {
            draw = draw * 6364136223846793005u + 1442695040888963407u;
            expect_found(&loaded, folder, optimizer_file, opt_header + (draw >> 20) % (opt_bytes - opt_header));
        }
        expect_found(&loaded, folder, optimizer_file, opt_header);
        expect_found(&loaded, folder, optimizer_file, opt_bytes - 1);
        expect_found(&loaded, folder, optimizer_file, opt_header - 1); /* a space behind the JSON, or its bracket */
        snprintf(path, sizeof path, "%s/%s", folder, model_file);
        expect_found(&loaded, folder, model_file, file_bytes(path) - 1);
        expect_found(&loaded, folder, model_file, header_bytes(path));
        rig_need(&loaded, spw_checkpoint_load(loaded.e, folder, &loaded.err));
        rig_same_state(&saved, &loaded, "loaded after damage was found and mended");
        rig_remove(&loaded);
        /* Where matrices are frozen that were trained, their tensors in the optimizer's file are not read. */
        rig_config(&loaded, SPW_FAMILY_GPT2, (spw_state_format)f, tiers[f % 3]);
        rig_freeze_mlps(&loaded);
        rig_open(&loaded);
        for (uint64_t at = opt_header; at < opt_bytes; at += (opt_bytes - opt_header) / 9)
            expect_found(&loaded, folder, optimizer_file, at);
        rig_need(&loaded, spw_checkpoint_load(loaded.e, folder, &loaded.err));
        rig_remove(&loaded);
        rig_remove(&saved);
    }
}

/* Bytes that this process has read, from wherever they came. */
static uint64_t
bytes_read(void)
{
    char line[100];
    unsigned long long n = 0;
    FILE *f = fopen("/proc/self/io", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL && sscanf(line, "rchar: %llu", &n) != 1)
        ;
    fclose(f);
    return n;
}

/* A save reads nothing, a load the optimizer's file and the model's once each, whatever of them it takes: in split no weight. */
static void
test_bytes_read(void **state)
{
    enum { SLACK = 16 << 10 };
    static const spw_state_format formats[] = {SPW_STATE_SPLIT, SPW_STATE_FP32, SPW_STATE_MIXED};
    (void)state;
    for (int k = 0; k < 3; k++) {
        rig saved, loaded;
        char folder[400], path[600];
        uint64_t before, model_bytes, opt_bytes, by_save, by_load, by_start;
        rig_config(&saved, SPW_FAMILY_GPT2, formats[k], SPW_TIER_HOST);
        rig_need(&saved, rig_begin(&saved));
        rig_train(&saved, 0, 1);
        rig_save(&saved, 1);
        before = bytes_read();
        rig_save(&saved, 2);
        by_save = bytes_read() - before;
        snprintf(folder, sizeof folder, "%s/step-2", saved.dir);
        snprintf(path, sizeof path, "%s/%s", folder, model_file);
        model_bytes = file_bytes(path);
        snprintf(path, sizeof path, "%s/%s", folder, optimizer_file);
        opt_bytes = file_bytes(path);
        rig_config(&loaded, SPW_FAMILY_GPT2, formats[k], SPW_TIER_HOST);
        rig_open(&loaded);
        before = bytes_read();
        rig_need(&loaded, spw_checkpoint_load(loaded.e, folder, &loaded.err));
        by_load = bytes_read() - before;
        before = bytes_read();
        rig_need(&loaded, spw_engine_load_weights(loaded.e, folder, &loaded.err));
        by_start = bytes_read() - before;
        printf(
            "# of %llu and %llu bytes of model and optimizer, a save reads %llu, a load %llu, a start from it %llu\n",
            (unsigned long long)model_bytes, (unsigned long long)opt_bytes, (unsigned long long)by_save,
            (unsigned long long)by_load, (unsigned long long)by_start);
        assert_true(model_bytes > 2 * SLACK && by_save < SLACK);
        assert_true(by_load >= opt_bytes + model_bytes && by_load < opt_bytes + model_bytes + SLACK);
        assert_true(by_start >= model_bytes && by_start < model_bytes + SLACK);
        rig_remove(&saved);
        rig_remove(&loaded);
    }
}

/* Weights that training starts from are a checkpoint's too, and are compared as they are read. */
static void
test_start(void **state)
{
    rig saved, started;
    char folder[400], path[600];
    uint64_t header, bytes;
    (void)state;
    rig_config(&saved, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    rig_need(&saved, rig_begin(&saved));
    rig_save(&saved, 1);
    snprintf(folder, sizeof folder, "%s/step-1", saved.dir);
    snprintf(path, sizeof path, "%s/%s", folder, model_file);
    header = header_bytes(path);
    bytes = file_bytes(path);
    rig_config(&started, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_NVME);
    rig_open(&started);
    for (uint64_t k = 0; k <= 7; k++) {
        uint64_t at = k == 7 ? header - 1 : header + (bytes - header - 1) * k / 6;
        spw_error err = {0};
        flip(path, at);
        assert_int_equal(spw_engine_load_weights(started.e, folder, &err), SPW_ECORRUPT);
        flip(path, at);
        if (strstr(err.message, model_file) == NULL)
            fail_msg("byte %llu flipped: %s", (unsigned long long)at, err.message);
    }
    rig_need(&started, spw_engine_load_weights(started.e, folder, &started.err));
    rig_remove(&started);
    rig_remove(&saved);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_flips), cmocka_unit_test(test_bytes_read),
                                       cmocka_unit_test(test_start)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
