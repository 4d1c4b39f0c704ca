/*
 * Order on disk: a dead run's folder goes and a living one's stays, several paths train to the bits of one, and a damaged or
 * missing file is an error that names it.
 */
#include "lib_rig.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

/* A byte that changed on disk is an error that names file and offset; it is never trained on, and nothing is left behind. */
static void
test_damaged_swap(void **state)
{
    rig r;
    spw_step_result result;
    char path[1024];
    spw_status st = SPW_OK;
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    r.c.run.weight_slots = r.c.run.record_slots = 1;
    rig_need(&r, rig_begin(&r));
    assert_int_equal(rig_step(&r, 0, &result), SPW_OK);
    assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
    tiny_settle(spw_engine_store(r.e));
    tiny_swap_file(r.dir, path);
    tiny_spoil_file(path, 100);
    for (uint64_t s = 1; s < 4 && st == SPW_OK; s++)
        st = rig_step(&r, s, &result);
    assert_int_equal(st, SPW_ECORRUPT);
    assert_non_null(strstr(r.err.message, "swap.bin"));
    assert_non_null(strstr(r.err.message, "offset"));
    assert_int_equal(rig_step(&r, 4, &result), SPW_ECORRUPT); /* and it stays so */
    rig_close(&r);
    assert_int_equal(tiny_dir_entries(r.dir), 0);
    rig_remove(&r);
}

/* One more swap folder below the rig's own, for both kinds; returns its name. */
static const char *
rig_add_path(rig *r, const char *name, double weight, uint64_t bytes)
{
    spw_path_list *lists[2] = {&r->c.zero.param_path, &r->c.zero.optimizer_path};
    uint32_t i = lists[0]->count;
    char path[300];
    snprintf(path, sizeof path, "%s/%s", r->dir, name);
    for (int k = 0; k < 2; k++) {
        snprintf(lists[k]->item[i], SPW_PATH_BYTES, "%s", path);
        lists[k]->weight[i] = weight;
        lists[k]->bytes[i] = bytes;
        lists[k]->count = i + 1;
    }
    return lists[0]->item[i];
}

/* Two folders below the rig's instead of the rig's own. */
static void
rig_two_paths(rig *r, double weight_a, double weight_b)
{
    rig_config(r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    r->c.run.chunk_elems = 4096;
    r->c.zero.param_path.count = 0;
    assert_int_equal(mkdir(rig_add_path(r, "first", weight_a, 0), 0700), 0);
    (void)rig_add_path(r, "second", weight_b, 0);
}

/* Two paths with weights 3:1: the losses and the state of one path, and swap files of three quarters and a quarter. */
static void
test_two_paths(void **state)
{
    rig r;
    double losses[4];
    uint64_t digest, size[2];
    (void)state;
    rig_config(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    r.c.run.chunk_elems = 4096;
    rig_need(&r, rig_begin(&r));
    for (uint64_t s = 0; s < 4; s++) {
        spw_step_result result;
        assert_int_equal(rig_step(&r, s, &result), SPW_OK);
        losses[s] = result.loss;
    }
    digest = tiny_digest(r.e);
    rig_remove(&r);
    rig_two_paths(&r, 3, 1);
    assert_int_equal(mkdir(r.c.zero.param_path.item[1], 0700), 0);
    rig_need(&r, rig_begin(&r));
    for (uint64_t s = 0; s < 4; s++) {
        spw_step_result result;
        assert_int_equal(rig_step(&r, s, &result), SPW_OK);
        assert_memory_equal(&result.loss, &losses[s], sizeof losses[s]);
    }
    assert_true(tiny_digest(r.e) == digest);
    for (int k = 0; k < 2; k++) {
        char path[1024];
        struct stat info;
        tiny_swap_file(r.c.zero.param_path.item[k], path);
        assert_int_equal(stat(path, &info), 0);
        size[k] = (uint64_t)info.st_size;
        assert_true(size[k] == spw_engine_plan(r.e)->path_bytes[k]);
    }
    assert_true(fabs((double)size[0] - 0.75 * (double)(size[0] + size[1])) <= 4096 * 16); /* a chunk and its record */
    rig_close(&r);
    assert_int_equal(tiny_dir_entries(r.c.zero.param_path.item[0]) + tiny_dir_entries(r.c.zero.param_path.item[1]), 0);
    rig_remove(&r);
}

/* The second of two paths is missing, is a file, may not be written, is limited to too little, or loses a byte while
 * training: the error names it and not the first, and nothing stays behind. */
static void
test_second_path_fails(void **state)
{
    (void)state;
    for (int k = 0; k < 5; k++) {
        rig r;
        const char *first, *second;
        spw_status st;
        rig_two_paths(&r, 1, 1);
        first = r.c.zero.param_path.item[0];
        second = r.c.zero.param_path.item[1];
        if (k == 1)
            close(open(second, O_CREAT | O_WRONLY, 0600));
        else if (k > 1)
            assert_int_equal(mkdir(second, k == 2 ? 0500 : 0700), 0);
        if (k == 2 && access(second, W_OK) == 0) { /* root writes everywhere: test_cli.sh does it as another user */
            rig_remove(&r);
            continue;
        }
        if (k == 3)
            for (int i = 0; i < 2; i++)
                r.c.zero.param_path.bytes[i] = r.c.zero.optimizer_path.bytes[i] = i == 0 ? 1 << 19 : 8192;
        st = rig_begin(&r);
        if (k == 3) {
            assert_int_equal(st, SPW_ENOFIT);
            assert_non_null(strstr(r.err.message, "/first at most 512 KiB"));
            assert_non_null(strstr(r.err.message, "/second at most 8.00 KiB"));
            assert_true(rig_least_named(&r, "nvme_path") > (1 << 19) + 8192);
        } else if (k == 4) {
            spw_step_result result;
            char path[1024];
            assert_int_equal(st, SPW_OK);
            assert_int_equal(spw_engine_drain(r.e, &r.err), SPW_OK);
            tiny_settle(spw_engine_store(r.e));
            tiny_swap_file(second, path);
            tiny_spoil_file(path, 0);
            for (uint64_t s = 0; s < 4 && st == SPW_OK; s++)
                st = rig_step(&r, s, &result);
            assert_int_equal(st, SPW_ECORRUPT);
        } else {
            assert_true(st != SPW_OK && st != SPW_ENOFIT);
        }
        if (strstr(r.err.message, second) == NULL && k != 3)
            fail_msg("case %d: %s: no %s", k, r.err.message, second);
        assert_true(k == 3 || strstr(r.err.message, first) == NULL);
        rig_close(&r);
        assert_int_equal(tiny_dir_entries(first), 0);
        assert_true(k < 2 || tiny_dir_entries(second) == 0);
        rig_remove(&r);
    }
}

/* A dead run's folder goes with the next start on the path; a living run's stays and does not disturb. */
static void
test_swap_folders(void **state)
{
    rig a, b;
    char path[1024];
    double losses[2];
    spw_step_result result;
    (void)state;
    rig_config(&a, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    snprintf(path, sizeof path, "%s/spillway-dead", a.dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/spillway-dead/rank-0", a.dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/spillway-dead/rank-0/swap.bin", a.dir);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    snprintf(path, sizeof path, "%s/spillway-dead/rank-0/lock", a.dir);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    rig_need(&a, rig_begin(&a));
    assert_int_equal(tiny_dir_entries(a.dir), 1);
    assert_int_equal(access(path, F_OK), -1);
    rig_config(&b, SPW_FAMILY_GPT2, SPW_STATE_FP32, SPW_TIER_NVME);
    tiny_dir_remove(b.dir);
    b.c = a.c;
    rig_need(&b, rig_begin(&b));
    assert_int_equal(tiny_dir_entries(a.dir), 2);
    for (uint64_t s = 0; s < 3; s++) {
        assert_int_equal(rig_step(&a, s, &result), SPW_OK);
        losses[0] = result.loss;
        assert_int_equal(rig_step(&b, s, &result), SPW_OK);
        losses[1] = result.loss;
        assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
    }
    rig_close(&b);
    assert_int_equal(tiny_dir_entries(a.dir), 1);
    rig_close(&a);
    assert_int_equal(tiny_dir_entries(a.dir), 0);
    rig_remove(&a);
}

/* Each call that opening swap space makes may fail: the cause is named, a lock that cannot be had is nobody's, nothing stays. */
static void
test_each_call_fails(void **state)
{
    char dir[256];
    spw_aio *aio;
    spw_error err = {0};
    bool through = false, unlocked = false;
    (void)state;
    tiny_dir_make(dir);
    assert_int_equal(spw_aio_create(&aio, &(spw_aio_options){.probe_dir = dir}, &err), SPW_OK);
    for (unsigned k = 1; !through; k++) {
        spw_swap *swap;
        spw_status st;
        memset(&err, 0, sizeof err);
        spw_test_fail_call(k);
        st = spw_swap_open(&swap, aio, dir, "job", 0, 8192, &err);
        through = !spw_test_call_fired();
        spw_test_fail_call(0);
        assert_true(!through || st == SPW_OK);
        assert_true(st == SPW_OK || (swap == NULL && st != SPW_EBUSY && strstr(err.message, "rank-0") != NULL));
        unlocked = unlocked || strstr(err.message, strerror(ENOLCK)) != NULL;
        spw_swap_close(swap);
        assert_int_equal(tiny_dir_entries(dir), 0);
    }
    assert_true(unlocked);
    spw_aio_destroy(aio);
    tiny_dir_remove(dir);
}

/* Paths that share a file system share what is free there: each alone would fit. One that does not open is told later. */
static void
test_shared_room(void **state)
{
    char dir[256], first[300], second[300], gone[300], need[64];
    const char *const dirs[] = {gone, first, second};
    uint64_t bytes[] = {1, 0, 0};
    struct statvfs fs;
    spw_error err = {0};
    (void)state;
    tiny_dir_make(dir);
    snprintf(first, sizeof first, "%s/first", dir);
    snprintf(second, sizeof second, "%s/second", dir);
    snprintf(gone, sizeof gone, "%s/gone", dir);
    assert_int_equal(mkdir(first, 0700), 0);
    assert_int_equal(mkdir(second, 0700), 0);
    assert_int_equal(statvfs(dir, &fs), 0);
    bytes[1] = (uint64_t)fs.f_bavail * fs.f_frsize / 10 * 6;
    assert_true(bytes[1] > 0);
    assert_int_equal(spw_swap_check(dirs, bytes, 3, &err), SPW_OK);
    bytes[2] = bytes[1];
    assert_int_equal(spw_swap_check(dirs, bytes, 3, &err), SPW_ENOSPC);
    snprintf(need, sizeof need, "(%llu bytes)", (unsigned long long)(2 * bytes[1]));
    assert_true(strstr(err.message, first) != NULL && strstr(err.message, second) != NULL &&
                strstr(err.message, need) != NULL);
    bytes[1] = 0;
    assert_int_equal(spw_swap_check(dirs, bytes, 3, &err), SPW_OK);
    assert_int_equal(tiny_dir_entries(first) + tiny_dir_entries(second), 0);
    assert_int_equal(rmdir(first), 0);
    assert_int_equal(rmdir(second), 0);
    tiny_dir_remove(dir);
}

static void
on_alarm(int number)
{
    (void)number;
}

/* Whoever waits for a swap folder that another run has its hands on waits on when a signal comes, and does not go in beside it. */
static void
test_signal_while_waiting(void **state)
{
    struct sigaction action = {.sa_handler = on_alarm}, before;
    char dir[256], path[400];
    int tell[2], fd;
    pid_t other;
    char told;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/spillway-1-1", dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/spillway-1-1/rank-0", dir);
    assert_int_equal(mkdir(path, 0700), 0); /* of a run that was killed */
    assert_int_equal(pipe(tell), 0);
    other = fork();
    assert_true(other >= 0);
    if (other == 0) { /* a run that takes half a second to make its own */
        fd = open(dir, O_RDONLY | O_DIRECTORY);
        told = (char)flock(fd, LOCK_EX);
        (void)!write(tell[1], &told, 1);
        spw_sleep_ns(500000000);
        _exit(0);
    }
    assert_int_equal(read(tell[0], &told, 1), 1);
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &(struct itimerval){.it_interval.tv_usec = 50000, .it_value.tv_usec = 50000}, NULL);
    assert_int_equal(spw_swap_reclaim(dir), 1);
    setitimer(ITIMER_REAL, &(struct itimerval){.it_value.tv_sec = 0}, NULL);
    sigaction(SIGALRM, &before, NULL);
    while (waitpid(other, NULL, 0) < 0 && errno == EINTR) {
    }
    close(tell[0]);
    close(tell[1]);
    assert_int_equal(rmdir(dir), 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_damaged_swap),         cmocka_unit_test(test_two_paths),
        cmocka_unit_test(test_second_path_fails),    cmocka_unit_test(test_swap_folders),
        cmocka_unit_test(test_each_call_fails),      cmocka_unit_test(test_shared_room),
        cmocka_unit_test(test_signal_while_waiting),
    };
    return cmocka_run_group_tests_name("swap_paths", tests, NULL, NULL);
}
