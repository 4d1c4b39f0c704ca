/*
 * What a power cut leaves: the calls that make names and make them durable are watched, and a folder that gets its name must have
 * nothing in it that is not on disk. Stands in for fsync, mkdir, link and rename of this process.
 */
#include "checkpoint_internal.h"
#include "lib_rig.h"
#include "spw_access.h"
#include "spw_files.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>

enum { INODES_MAX = 512, PATH_BYTES = 1024 };

typedef struct inodes {
    ino_t list[INODES_MAX];
    uint32_t count;
} inodes;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static inodes changed, flushed; /* folders whose names may be lost; files that are on disk */
static bool watching;
static uint32_t named, early; /* folders that got their name; of these with something that could be lost */
static bool no_exchange;      /* of names, as on some file systems */
static uint32_t fail_in;      /* the call that fails: the so-manieth from now on; 0: none */

static bool
holds(const inodes *set, ino_t ino)
{
    uint32_t i = 0;
    while (i < set->count && set->list[i] != ino)
        i++;
    return i < set->count;
}

static void
put(inodes *set, ino_t ino)
{
    if (!holds(set, ino) && set->count < INODES_MAX)
        set->list[set->count++] = ino;
}

static void
take(inodes *set, ino_t ino)
{
    for (uint32_t i = 0; i < set->count; i++)
        if (set->list[i] == ino)
            set->list[i] = set->list[--set->count];
}

/* A name in the folder above path was made or taken away. */
static void
name_changed(const char *path)
{
    char above[PATH_BYTES], *slash;
    struct stat info;
    snprintf(above, sizeof above, "%s", path);
    for (size_t n = strlen(above); n > 1 && above[n - 1] == '/'; n--)
        above[n - 1] = '\0';
    slash = strrchr(above, '/');
    if (slash == NULL || slash == above)
        return;
    *slash = '\0';
    pthread_mutex_lock(&lock);
    if (watching && stat(above, &info) == 0)
        put(&changed, info.st_ino);
    pthread_mutex_unlock(&lock);
}

/* Folder path got its name: its files are on disk, and so are theirs. */
static void
check_folder(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    struct stat info;
    bool lost;
    if (dir == NULL)
        return; /* a file */
    pthread_mutex_lock(&lock);
    lost = stat(path, &info) != 0 || holds(&changed, info.st_ino);
    while ((entry = readdir(dir)) != NULL)
        lost = lost || (entry->d_type == DT_REG && !holds(&flushed, entry->d_ino));
    named += watching;
    early += watching && lost;
    pthread_mutex_unlock(&lock);
    closedir(dir);
}

static bool
call_fails(void)
{
    bool fails;
    pthread_mutex_lock(&lock);
    fails = fail_in > 0 && --fail_in == 0;
    pthread_mutex_unlock(&lock);
    errno = EIO;
    return fails;
}

int
fsync(int fd)
{
    struct stat info;
    int rc = call_fails() ? -1 : (int)syscall(SYS_fsync, fd);
    pthread_mutex_lock(&lock);
    if (rc == 0 && watching && fstat(fd, &info) == 0) {
        if (S_ISDIR(info.st_mode))
            take(&changed, info.st_ino);
        else
            put(&flushed, info.st_ino);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

int
mkdir(const char *path, mode_t mode)
{
    int rc = call_fails() ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (rc == 0 && strstr(path, "spillway-") == NULL) /* swap is nobody's after a power cut */
        name_changed(path);
    return rc;
}

int
link(const char *from, const char *to)
{
    int rc = call_fails() ? -1 : (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (rc == 0)
        name_changed(to);
    return rc;
}

int
renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    bool goes = strstr(to, ".old") != NULL; /* it may come back: the next save clears it away */
    bool refused = no_exchange && (flags & RENAME_EXCHANGE) != 0 && access(to, F_OK) == 0;
    int rc;
    if (refused) {
        errno = EINVAL;
        return -1;
    }
    rc = call_fails() ? -1 : (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    if (rc == 0 && !goes) {
        check_folder(to);
        name_changed(to);
    }
    return rc;
}

int
rename(const char *from, const char *to)
{
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}

static void
watch(void)
{
    pthread_mutex_lock(&lock);
    changed.count = named = early = 0;
    watching = true;
    pthread_mutex_unlock(&lock);
}

/* Since watch: so many folders got their names, each when what is in it was on disk, and no name can be lost any more. */
static void
expect_durable(uint32_t folders)
{
    watching = false;
    assert_int_equal(named, folders);
    assert_int_equal(early, 0);
    assert_int_equal(changed.count, 0);
}

static void
open_drawn(rig *r, spw_family family, spw_state_format format, bool lora)
{
    rig_config(r, family, format, SPW_TIER_HOST);
    r->c.run.checkpoint_links = true;
    if (lora)
        rig_lora(r);
    rig_open(r);
    rig_need(r, spw_engine_init_params(r->e, 7, &r->err));
}

/* A checkpoint in a folder that did not exist, one after it, one of adapters that shares the model's file, and one saved again. */
static void
test_checkpoints(void **state)
{
    (void)state;
    for (int lora = 0; lora < 2; lora++) {
        char dir[300], model[400];
        struct stat info;
        rig r;
        open_drawn(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, lora == 1);
        snprintf(dir, sizeof dir, "%s/new/deep", r.dir);
        for (uint64_t step = 1; step <= 3; step++) {
            watch();
            rig_need(&r, spw_checkpoint_save(r.e, &r.c, dir, &(spw_checkpoint_state){.step = step < 3 ? step : 2}, NULL,
                                             &r.err));
            expect_durable(1);
            snprintf(model, sizeof model, "%s/step-%d/model.safetensors", dir, step < 3 ? (int)step : 2);
            assert_int_equal(stat(model, &info), 0);
            assert_int_equal(info.st_nlink, lora == 1 && step > 1 ? 2 : 1);
        }
        rig_remove(&r);
    }
}

/* A save of the step, told apart by a position. */
static spw_status
save(rig *r, const char *dir, uint64_t step, uint64_t position, spw_error *err)
{
    return spw_checkpoint_save(r->e, &r->c, dir, &(spw_checkpoint_state){.step = step, .data_position = position}, NULL,
                               err);
}

/* The checkpoint is whole, and the save at that position. */
static void
expect_position(rig *r, const char *path, uint64_t position)
{
    spw_manifest m;
    rig_need(r, spw_checkpoint_verify(path, true, &r->err));
    rig_need(r, spw__manifest_read(&m, path, &r->err));
    assert_int_equal(m.state.data_position, position);
    spw__manifest_free(&m);
}

/*
 * Each of these calls of a save may fail, of a step's first save and of one that is repeated: that is told, or it did not matter; the
 * checkpoint before is as it was, also that of the same step, and the next save leaves nothing else.
 */
static void
test_each_call_fails(void **state)
{
    (void)state;
    for (int again = 0; again < 3; again++) {
        char dir[300], first[320], second[320];
        bool through = false;
        uint64_t kept = 0;
        rig r;
        open_drawn(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, true);
        snprintf(dir, sizeof dir, "%s/saves", r.dir);
        snprintf(first, sizeof first, "%s/step-1", dir);
        snprintf(second, sizeof second, "%s/step-2", dir);
        rig_need(&r, save(&r, dir, 1, 0, &r.err));
        if (again > 0)
            rig_need(&r, save(&r, dir, 2, 0, &r.err));
        no_exchange = again == 2;
        for (uint32_t k = 1; !through; k++) {
            spw_error err = {0};
            spw_status st;
            if (again == 0 && access(second, F_OK) == 0)
                rig_need(&r, spw_dir_remove(second, &r.err));
            fail_in = k;
            st = save(&r, dir, 2, k, &err);
            through = fail_in > 0;
            fail_in = 0;
            kept = st == SPW_OK ? k : kept;
            assert_true(st == SPW_OK || (!through && strstr(err.message, r.dir) != NULL));
            expect_position(&r, first, 0);
            if (st == SPW_OK || again > 0)
                expect_position(&r, second, kept);
            else
                assert_int_not_equal(access(second, F_OK), 0);
        }
        no_exchange = false;
        assert_int_equal(tiny_dir_entries(dir), 2);
        rig_remove(&r);
    }
}

/* Killed where names cannot be exchanged, between taking a step's name from the old checkpoint and giving it to the new one: whoever looks finds the new one. */
static void
test_killed_between_names(void **state)
{
    char dir[300], second[320], old[340], partial[340], aside[320], found[SPW_PATH_BYTES];
    rig r;
    (void)state;
    open_drawn(&r, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, false);
    snprintf(dir, sizeof dir, "%s/saves", r.dir);
    snprintf(second, sizeof second, "%s/step-2", dir);
    snprintf(old, sizeof old, "%s.old", second);
    snprintf(partial, sizeof partial, "%s.partial", second);
    snprintf(aside, sizeof aside, "%s/aside", r.dir);
    rig_need(&r, save(&r, dir, 1, 0, &r.err));
    for (int next = 0; next < 3; next++) {
        rig_need(&r, save(&r, dir, 2, 5, &r.err));
        assert_int_equal(rename(second, aside), 0);
        rig_need(&r, save(&r, dir, 2, 0, &r.err));
        assert_int_equal(rename(second, old) | rename(aside, partial), 0);
        if (next < 2) { /* who goes on, or reads, and names the folder or the step */
            rig_need(&r, spw_checkpoint_find(next == 0 ? dir : second, found, &r.err));
            assert_string_equal(found, second);
        } else { /* who saves another step */
            rig_need(&r, save(&r, dir, 3, 0, &r.err));
        }
        expect_position(&r, second, 5);
    }
    rig_need(&r, save(&r, dir, 2, 0, &r.err));
    assert_int_equal(tiny_dir_entries(dir), 3);
    rig_remove(&r);
}

/* Weights alone, and an export of them. */
static void
test_folders(void **state)
{
    char one[300], two[300];
    spw_export_report report;
    rig r;
    (void)state;
    open_drawn(&r, SPW_FAMILY_GPT2, SPW_STATE_FP32, false);
    snprintf(one, sizeof one, "%s/a/b/one", r.dir);
    snprintf(two, sizeof two, "%s/c/two/", r.dir);
    watch();
    rig_need(&r, spw_engine_save_16bit(r.e, one, SPW_BF16, &r.err));
    expect_durable(1);
    watch();
    rig_need(&r, spw_export(&(spw_export_options){.source = one, .to = two, .dtype = SPW_F32, .shard_bytes = 8192},
                            &report, &r.err));
    expect_durable(1);
    assert_true(report.files > 1);
    rig_remove(&r);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_checkpoints), cmocka_unit_test(test_each_call_fails),
                                       cmocka_unit_test(test_killed_between_names), cmocka_unit_test(test_folders)};
    return cmocka_run_group_tests_name("durable", tests, NULL, NULL);
}
