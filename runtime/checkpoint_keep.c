/*
 * Which checkpoints stay: the new one takes its name, older ones go. A checkpoint that is to go is renamed first, so that
 * whoever looks for one finds it whole or not at all, whatever kills the process between two calls.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = SPW_PATH_BYTES + 300 };

/* Whether this is what a checkpoint of some step is called. */
static bool
is_numbered(const char *name, uint64_t *step_out)
{
    char again[32], rest;
    unsigned long long n;
    if (sscanf(name, "step-%llu%c", &n, &rest) != 1)
        return false;
    snprintf(again, sizeof again, "step-%llu", n);
    *step_out = n;
    return strcmp(again, name) == 0; /* not step-007: it is looked up by number */
}

static bool
is_complete(const char *path)
{
    char manifest[PATH_BYTES];
    snprintf(manifest, sizeof manifest, "%.1200s/" SPW_MANIFEST_FILE, path);
    return spw__manifest_there(manifest);
}

bool
spw__checkpoint_step(const char *dir, const char *name, uint64_t *step_out)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%.1000s/%.200s", dir, name);
    return is_numbered(name, step_out) && is_complete(path);
}

spw_status
spw__checkpoint_check_name(const char *final, spw_error *err)
{
    if (access(final, F_OK) != 0 || is_complete(final))
        return SPW_OK;
    return SPW_RAISE_SYS(err, EEXIST,
                         "%s would be replaced, and is no checkpoint of this program: move it away, or save to another "
                         "folder (spillway.checkpoint_dir)",
                         final);
}

spw_status
spw_checkpoint_check_names(const char *dir, uint64_t after, uint64_t last, spw_error *err)
{
    DIR *folder = opendir(dir);
    const struct dirent *entry;
    spw_status st = SPW_OK;
    while (folder != NULL && st == SPW_OK && (entry = readdir(folder)) != NULL) {
        char path[PATH_BYTES];
        uint64_t n;
        snprintf(path, sizeof path, "%.1000s/%.200s", dir, entry->d_name);
        if (is_numbered(entry->d_name, &n) && n > after && n <= last)
            st = spw__checkpoint_check_name(path, err);
    }
    if (folder != NULL)
        closedir(folder);
    return st;
}

/* A folder, or a link, of which what it points to is not ours. */
static spw_status
remove_aside(const char *old, spw_error *err)
{
    struct stat info;
    if (lstat(old, &info) != 0 || !S_ISLNK(info.st_mode))
        return spw_dir_remove(old, err);
    return unlink(old) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "removing link %s", old);
}

/* Takes a folder's name away: old, of PATH_BYTES, is what it is called then. */
static spw_status
set_aside(const char *path, char *old, spw_error *err)
{
    struct stat info;
    snprintf(old, PATH_BYTES, "%.1000s.old", path);
    if (lstat(old, &info) == 0)
        SPW_TRY(remove_aside(old, err)); /* a removal that was killed */
    return rename(path, old) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "renaming %s to %s", path, old);
}

static spw_status
discard(const char *path, spw_error *err)
{
    char old[PATH_BYTES];
    SPW_TRY(set_aside(path, old, err));
    return remove_aside(old, err);
}

static void
warn_of_rest(const char *final, const spw_error *left)
{
    spw_log(SPW_LOG_WARN, "what was checkpoint %s before is left behind: %s", final, left->message);
}

/* Or somebody who looked for checkpoints just did. */
static bool
take_name(const char *partial, const char *final)
{
    struct stat own, named;
    bool known = stat(partial, &own) == 0;
    int errnum;
    if (rename(partial, final) == 0)
        return true;
    errnum = errno;
    if (known && errnum == ENOENT && stat(final, &named) == 0 && named.st_ino == own.st_ino)
        return true;
    errno = errnum;
    return false;
}

/*
 * Where names cannot be exchanged: for a moment this step has no checkpoint. Whoever is killed there leaves two that are complete,
 * of which spw__checkpoint_recover() gives the new one the name.
 */
static spw_status
replace(const char *dir, const char *partial, const char *final, spw_error *err)
{
    char old[PATH_BYTES];
    spw_error left = {0};
    spw_status st;
    SPW_TRY(set_aside(final, old, err));
    if (!take_name(partial, final)) {
        int errnum = errno;
        (void)rename(old, final);
        return SPW_RAISE_SYS(err, errnum, "renaming %s to %s", partial, final);
    }
    if ((st = spw_dir_sync(dir, err)) != SPW_OK) {
        if (rename(final, partial) == 0)
            (void)rename(old, final);
        return st;
    }
    if (remove_aside(old, &left) != SPW_OK)
        warn_of_rest(final, &left);
    return SPW_OK;
}

/* What fails takes its names back: a save that failed leaves what was there before. */
spw_status
spw__checkpoint_place(const char *dir, const char *partial, const char *final, spw_error *err)
{
    spw_error left = {0};
    spw_status st;
    if (renameat2(AT_FDCWD, partial, AT_FDCWD, final, RENAME_EXCHANGE) == 0) { /* the same step saved again */
        if ((st = spw_dir_sync(dir, err)) != SPW_OK) {
            (void)renameat2(AT_FDCWD, partial, AT_FDCWD, final, RENAME_EXCHANGE);
            return st;
        }
        if (discard(partial, &left) != SPW_OK)
            warn_of_rest(final, &left);
        return SPW_OK;
    }
    if (errno != ENOENT && access(final, F_OK) == 0)
        return replace(dir, partial, final, err);
    if (!take_name(partial, final))
        return SPW_RAISE_SYS(err, errno, "renaming %s to %s", partial, final);
    if ((st = spw_dir_sync(dir, err)) != SPW_OK)
        (void)rename(final, partial);
    return st;
}

void
spw__checkpoint_recover(const char *dir)
{
    DIR *folder = opendir(dir);
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        const char *end = strstr(entry->d_name, ".partial");
        char final[PATH_BYTES], partial[PATH_BYTES], old[PATH_BYTES];
        if (end == NULL || strcmp(end, ".partial") != 0)
            continue;
        snprintf(final, sizeof final, "%.1000s/%.*s", dir, (int)(end - entry->d_name), entry->d_name);
        snprintf(partial, sizeof partial, "%.1200s.partial", final);
        snprintf(old, sizeof old, "%.1200s.old", final);
        if (access(final, F_OK) != 0 && is_complete(old) && is_complete(partial))
            (void)rename(partial, final); /* a folder that may only be read stays as it is */
    }
    if (folder != NULL)
        closedir(folder);
}

/* The complete checkpoint with the largest step below `below`; false: there is none. */
static bool
newest_below(const char *dir, uint64_t below, uint64_t *step_out, spw_error *err)
{
    DIR *folder = opendir(dir);
    struct dirent *entry;
    bool any = false;
    uint64_t n;
    if (folder == NULL) {
        (void)SPW_RAISE_SYS(err, errno, "open folder %s", dir);
        return false;
    }
    while ((entry = readdir(folder)) != NULL) {
        if (!spw__checkpoint_step(dir, entry->d_name, &n) || n >= below || (any && n < *step_out))
            continue;
        *step_out = n;
        any = true;
    }
    closedir(folder);
    return any;
}

/* Left by a removal that was killed (it has no number of its own any more), or by the save of an earlier step. */
static bool
is_remains(const char *name, uint64_t step)
{
    unsigned long long n;
    int end = -1;
    if (sscanf(name, "step-%llu%n", &n, &end) != 1 || end < 0)
        return false;
    if (strncmp(name + end, ".partial", 8) == 0) {
        end += 8;
        if (name[end] == '\0')
            return n < step;
    }
    return strcmp(name + end, ".old") == 0;
}

static void
clear_away(const char *dir, uint64_t step, spw_error *err)
{
    DIR *folder = opendir(dir);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[PATH_BYTES];
        snprintf(path, sizeof path, "%.1000s/%.200s", dir, entry->d_name);
        if (is_remains(entry->d_name, step))
            (void)remove_aside(path, err);
    }
    if (folder != NULL)
        closedir(folder);
}

void
spw__checkpoint_trim(const char *dir, uint64_t step, uint64_t keep)
{
    spw_error err = {0};
    uint64_t n = step;
    clear_away(dir, step, &err);
    for (uint64_t kept = 1; keep > 0 && newest_below(dir, n, &n, &err); kept++) {
        char path[PATH_BYTES];
        if (kept < keep)
            continue;
        snprintf(path, sizeof path, "%.900s/step-%llu", dir, (unsigned long long)n);
        if (discard(path, &err) != SPW_OK)
            break;
    }
    if (err.status != SPW_OK)
        spw_log(SPW_LOG_WARN, "an older checkpoint stays: %s", err.message);
}
