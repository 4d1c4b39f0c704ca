/*
 * csv_monitor and tensorboard: records byte for byte as the tensorboard package 2.21.0 writes them (RecordWriter over
 * Event.SerializeToString()), files and folders, appending, and a folder that is no longer there.
 */
#include "lib_tiny.h"
#include "spw_monitor.h"
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <cmocka.h>

static void
assert_record(const char *hex, double wall_s, const char *tag, float value, uint64_t samples)
{
    unsigned char got[SPW_MONITOR_RECORD_BYTES], want[SPW_MONITOR_RECORD_BYTES];
    uint64_t n = strlen(hex) / 2;
    for (uint64_t i = 0; i < n; i++) {
        const char byte[3] = {hex[2 * i], hex[2 * i + 1], '\0'};
        want[i] = (unsigned char)strtoul(byte, NULL, 16);
    }
    assert_int_equal(spw_monitor_record(got, wall_s, tag, value, samples), n);
    assert_memory_equal(got, want, n);
}

static void
test_records(void **state)
{
    char tag[131];
    (void)state;
    memset(tag, 'x', 130);
    tag[130] = '\0';
    assert_record("1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9", 1700000000.25,
                  NULL, 0, 0);
    assert_record("100000000000000095fbfe18090000e040fc54d9411081203a0208012abfc3f1", 1700000003.5, NULL, 0, 4097);
    assert_record(
        "2e00000000000000c5cb57fa0900006040fc54d94110052a210a1f0a18547261696e2f53616d706c65732f747261696e5f6c6f7373"
        "154df82d402cb55dbb",
        1700000001.5, "Train/Samples/train_loss", 2.71828f, 5);
    assert_record("a0000000000000002a557225090000b040fc54d94110cae7a3a6df1c2a8d010a8a010a820178787878787878787878787878"
                  "7878787878787878787878787878787878787878787878787878787878787878787878787878787878787878787878787878"
                  "7878787878787878787878787878787878787878787878787878787878787878787878787878787878787878787878787878"
                  "7878787878787878787878787878787878150000807fcc8e9394",
                  1700000002.75, tag, INFINITY, 987654321098ull);
}

static uint64_t
read_all(const char *path, char *out, uint64_t bytes)
{
    FILE *f = fopen(path, "re");
    uint64_t n;
    assert_non_null(f);
    n = fread(out, 1, bytes - 1, f);
    out[n] = '\0';
    fclose(f);
    return n;
}

/* Two runs, one after the other: rows go on, and each has an event file of its own. */
static void
test_files(void **state)
{
    char dir[256], path[600], text[2000];
    static spw_config c;
    uint64_t found = 0;
    struct dirent *entry;
    spw_monitor *m = NULL;
    spw_error err = {0};
    DIR *folder;
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_FP32);
    assert_int_equal(spw_monitor_open(&m, &c, 0, &err), SPW_OK);
    assert_null(m);
    spw_monitor_write(m, "none", 1, 1);
    c.csv_monitor.enabled = c.tensorboard.enabled = true;
    snprintf(c.csv_monitor.output_path, sizeof c.csv_monitor.output_path, "%s/a/b", dir);
    snprintf(c.csv_monitor.job_name, sizeof c.csv_monitor.job_name, "job");
    snprintf(c.tensorboard.output_path, sizeof c.tensorboard.output_path, "%s", dir);
    snprintf(c.tensorboard.job_name, sizeof c.tensorboard.job_name, "events");
    for (uint64_t run = 0; run < 2; run++) {
        assert_int_equal(spw_monitor_open(&m, &c, 32 * run, &err), SPW_OK);
        spw_monitor_write(m, "Train/Samples/train_loss", 2.5, 32 * run + 16);
        spw_monitor_write(m, "Train/Samples/train_loss", (double)NAN, 32 * run + 32);
        spw_monitor_write(m, "Train/Samples/lr", 1e-4, 32 * run + 16);
        spw_monitor_close(m);
    }
    snprintf(path, sizeof path, "%s/a/b/job/Train_Samples_train_loss.csv", dir);
    read_all(path, text, sizeof text);
    assert_string_equal(text, "step,train_loss\n16,2.5\n32,nan\n48,2.5\n64,nan\n");
    snprintf(path, sizeof path, "%s/a/b/job/Train_Samples_lr.csv", dir);
    read_all(path, text, sizeof text);
    assert_string_equal(text, "step,lr\n16,0.0001\n48,0.0001\n");
    snprintf(path, sizeof path, "%s/events", dir);
    folder = opendir(path);
    assert_non_null(folder);
    while ((entry = readdir(folder)) != NULL) {
        uint64_t bytes;
        if (entry->d_name[0] == '.')
            continue;
        assert_int_equal(strncmp(entry->d_name, "events.out.tfevents.", 20), 0);
        snprintf(path, sizeof path, "%s/events/%s", dir, entry->d_name);
        bytes = read_all(path, text, sizeof text);
        for (uint64_t at = 0; at < bytes; at += 16 + (unsigned char)text[at]) { /* all are short */
            assert_true(at + 16 + (unsigned char)text[at] <= bytes);
            found++;
        }
    }
    closedir(folder);
    assert_int_equal(found, 4 + 5); /* within a second, too; the second one says where it goes on */
    tiny_dir_remove(dir);
}

static void
test_failures(void **state)
{
    char dir[256], path[600];
    static spw_config c;
    spw_monitor *m = NULL;
    spw_error err = {0};
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    tiny_config(&c, SPW_STATE_FP32);
    c.csv_monitor.enabled = true;
    snprintf(c.csv_monitor.output_path, sizeof c.csv_monitor.output_path, "%s", dir);
    snprintf(c.csv_monitor.job_name, sizeof c.csv_monitor.job_name, "job");
    assert_int_equal(spw_monitor_open(&m, &c, 0, &err), SPW_OK);
    tiny_dir_remove(dir);
    spw_monitor_write(m, "lr", 1, 1); /* warns */
    spw_monitor_write(m, "lr", 1, 2); /* and does not try again, though it could now */
    snprintf(path, sizeof path, "%s/job", dir);
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    spw_monitor_write(m, "lr", 1, 3);
    assert_int_equal(tiny_dir_entries(path), 0);
    spw_monitor_close(m);
    tiny_dir_remove(dir);
    f = fopen(dir, "we"); /* a file where the folder should be */
    assert_non_null(f);
    fclose(f);
    assert_true(spw_monitor_open(&m, &c, 0, &err) != SPW_OK);
    assert_non_null(strstr(err.message, "csv_monitor"));
    assert_null(m);
    assert_int_equal(remove(dir), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests_name("monitor", tests, NULL, NULL);
}
