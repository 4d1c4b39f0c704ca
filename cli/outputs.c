/*
 * What a command writes at its end, looked at before its work: a run of hours is not lost to a name that could have been
 * refused at once, or to another run that writes there too. Only a folder that is taken is made. A disk that fills up
 * meanwhile still fails at the end.
 */
#include "cli.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { HOST_BYTES = 65 };

void
cli_nearest(char out[SPW_PATH_BYTES], const char *path)
{
    struct stat info;
    snprintf(out, SPW_PATH_BYTES, "%s", path);
    while (out[0] != '\0' && stat(out, &info) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        char *slash = strrchr(out, '/');
        if (slash == NULL)
            snprintf(out, SPW_PATH_BYTES, ".");
        else
            slash[slash == out] = '\0'; /* "/x" is in "/" */
    }
}

/* A new one is complete before an old one goes. */
uint64_t
cli_checkpoints_at_once(const spw_config *c, const spw_checkpoint_state *from)
{
    uint64_t at = from != NULL ? from->step : 0, steps = c->run.steps > at ? c->run.steps - at : 1;
    uint64_t every = c->run.checkpoint_interval, saves = every > 0 ? (steps - 1) / every + 1 : 1;
    uint64_t most = c->run.keep_last == 0 ? saves : from != NULL ? 1 : c->run.keep_last + 1;
    return c->run.checkpoint_dir[0] == '\0' ? 0 : saves < most ? saves : most;
}

/* Whoever sees it at the first save, or the tenth, has trained for nothing. Room may still be made. */
void
cli_warn_of_full_disk(const spw_config *c, const spw_engine *e, const spw_checkpoint_state *from, uint64_t swap_bytes)
{
    uint64_t count = cli_checkpoints_at_once(c, from), room;
    char path[SPW_PATH_BYTES], a[32], b[32], many[64] = "a checkpoint takes";
    struct statvfs fs;
    cli_nearest(path, c->run.checkpoint_dir);
    if (count == 0 || statvfs(path, &fs) != 0 || fs.f_blocks == 0)
        return;
    room = (uint64_t)fs.f_bavail * fs.f_frsize;
    room = room > swap_bytes ? room - swap_bytes : 0;
    if (room >= spw_checkpoint_disk_bytes(e, count))
        return;
    if (room < spw_checkpoint_disk_bytes(e, 1))
        count = 1;
    if (count > 1)
        snprintf(many, sizeof many, "%llu checkpoints at once take", (unsigned long long)count);
    fprintf(stderr,
            "spillway: warning: %s %s and spillway.checkpoint_dir %s has %s free%s: saving will fail unless room is "
            "made%s%s\n",
            many, spw_format_bytes(a, sizeof a, spw_checkpoint_disk_bytes(e, count)), c->run.checkpoint_dir,
            spw_format_bytes(b, sizeof b, room), swap_bytes > 0 ? " beside swap" : "",
            count > 1 && c->run.keep_last == 0 ? " or spillway.keep_last says that fewer stay" : "",
            c->run.lora.rank > 0 && c->run.checkpoint_base && spw_config_start_folder(c) != NULL
                ? "; with spillway.checkpoint_base false they hold adapters alone"
                : "");
}

spw_status
cli_check_folder(const char *what, const char *path, spw_error *err)
{
    char nearest[SPW_PATH_BYTES];
    struct stat info;
    cli_nearest(nearest, path);
    if (stat(nearest, &info) == 0 && !S_ISDIR(info.st_mode))
        return SPW_RAISE(err, SPW_EINVAL, "%s %s: %s is not a folder", what, path, nearest);
    if (access(nearest, W_OK | X_OK) != 0)
        return SPW_RAISE_SYS(err, errno, "%s %s: writing to %s", what, path, nearest);
    return SPW_OK;
}

spw_status
cli_check_file(const char *what, const char *path, spw_error *err)
{
    char folder[SPW_PATH_BYTES], *slash;
    struct stat info;
    int fd;
    if (path[0] == '\0')
        return SPW_RAISE(err, SPW_EINVAL, "%s: the name of the file is empty", what);
    if (stat(path, &info) == 0) {
        if (S_ISDIR(info.st_mode))
            return SPW_RAISE_SYS(err, EISDIR, "%s %s", what, path);
        return access(path, W_OK) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "%s %s", what, path);
    }
    snprintf(folder, sizeof folder, "%s", path);
    slash = strrchr(folder, '/');
    if (slash == NULL)
        snprintf(folder, sizeof folder, ".");
    else
        slash[slash == folder] = '\0';
    if (access(folder, W_OK | X_OK) != 0)
        return SPW_RAISE_SYS(err, errno, "%s %s", what, path);
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
              0666); /* names that are too long, file systems that take none */
    if (fd < 0)
        return errno == EEXIST ? SPW_OK : SPW_RAISE_SYS(err, errno, "%s %s", what, path);
    close(fd);
    (void)unlink(path);
    return SPW_OK;
}

spw_status
cli_check_replaced(const char *what, const char *path, spw_error *err)
{
    struct stat info;
    SPW_TRY(cli_check_file(what, path, err));
    if (lstat(path, &info) != 0 || S_ISREG(info.st_mode))
        return SPW_OK;
    return S_ISLNK(info.st_mode)
               ? SPW_RAISE(err, SPW_EINVAL, "%s %s is a link, whose place the file would take: name the file itself",
                           what, path)
               : SPW_RAISE(err, SPW_EINVAL, "%s %s is not a regular file", what, path);
}

/* Opened for whoever may write it: locks need no more than that it can be read. */
static int
open_lock(const char *file)
{
    int fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return fd >= 0 || errno != EACCES ? fd : open(file, O_RDONLY | O_CLOEXEC);
}

/* The file still has its name: who held it before takes the name away at its end. */
static bool
still_named(int fd, const char *file)
{
    struct stat held, named;
    return fstat(fd, &held) == 0 && stat(file, &named) == 0 && held.st_ino == named.st_ino &&
           held.st_dev == named.st_dev;
}

/* A process of another host may hold it, where they share the folder. */
static spw_status
taken(const cli_folder *f, const char *what, spw_error *err)
{
    char text[HOST_BYTES + 24] = "", pid[24] = "unknown", host[HOST_BYTES] = "", own[HOST_BYTES] = "";
    ssize_t n = pread(f->fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    (void)sscanf(text, "%23s %64s", pid, host);
    (void)gethostname(own, sizeof own - 1);
    if (strcmp(host, own) == 0)
        host[0] = '\0';
    return SPW_RAISE(err, SPW_EBUSY,
                     "%s %s: another run saves there now (process %s%s%s, which holds %s); each would remove the "
                     "other's checkpoints: end that one, or take another folder",
                     what, f->path, pid, host[0] != '\0' ? " of host " : "", host, f->file);
}

spw_status
cli_folder_take(cli_folder *f, const char *what, const char *path, spw_error *err)
{
    char host[HOST_BYTES] = "";
    *f = (cli_folder){.fd = -1, .made = access(path, F_OK) != 0};
    snprintf(f->path, sizeof f->path, "%s", path);
    snprintf(f->file, sizeof f->file, "%.1000s/.spillway.lock", path);
    if (spw_dir_make(path, err) != SPW_OK) {
        spw_error_wrap(err, "%s", what);
        return err->status;
    }
    do {
        if (f->fd >= 0)
            close(f->fd);
        f->fd = open_lock(f->file);
        if (f->fd < 0 && (errno == ENOSPC || errno == EDQUOT)) /* room may be made before the first save */
            return SPW_OK;
        if (f->fd < 0)
            return SPW_RAISE_SYS(err, errno, "%s %s: creating %s", what, path, f->file);
        if (flock(f->fd, LOCK_EX | LOCK_NB) != 0) {
            spw_status st = errno == EWOULDBLOCK ? taken(f, what, err) : SPW_OK; /* else there are no locks there */
            close(f->fd);
            f->fd = -1;
            f->made = f->made && st == SPW_OK;
            return st;
        }
    } while (!still_named(f->fd, f->file));
    (void)gethostname(host, sizeof host - 1);
    if (ftruncate(f->fd, 0) == 0)
        (void)dprintf(f->fd, "%ld %s\n", (long)getpid(), host);
    return SPW_OK;
}

void
cli_folder_leave(cli_folder *f)
{
    if (f->path[0] == '\0')
        return;
    if (f->fd >= 0) {
        (void)unlink(f->file); /* while it is held */
        close(f->fd);
    }
    if (f->made)
        (void)rmdir(f->path); /* if nothing was saved */
    f->path[0] = '\0';
}
