/*
 * Swap space: one preallocated file per rank and path, below a folder of its own with a lock that dies with the
 * process. What a killed run left behind is recognised by its free lock and removed by the next run on that path.
 */
#include "spw_offload.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

struct spw_swap {
    spw_aio_file *file;
    int lock_fd;
    char job_dir[PATH_BYTES], rank_dir[PATH_BYTES + 32], file_path[PATH_BYTES + 64], lock_path[PATH_BYTES + 64];
};

const char *
spw_tier_name(spw_tier tier)
{
    static const char *const names[SPW_TIER_COUNT] = {"device", "host", "nvme"};
    return (unsigned)tier < SPW_TIER_COUNT ? names[tier] : "unknown";
}

/* Removes one rank folder if nobody holds its lock. */
static bool
reclaim_rank(int job_fd, const char *name)
{
    bool gone = false;
    int dir_fd = openat(job_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), lock_fd;
    if (dir_fd < 0)
        return false;
    lock_fd = openat(dir_fd, "lock", O_RDWR | O_CLOEXEC);
    if (lock_fd < 0 ? errno == ENOENT : flock(lock_fd, LOCK_EX | LOCK_NB) == 0) {
        (void)unlinkat(dir_fd, "swap.bin", 0); /* may be missing: the run died before it */
        (void)unlinkat(dir_fd, "lock", 0);
        gone = unlinkat(job_fd, name, AT_REMOVEDIR) == 0;
    }
    if (lock_fd >= 0)
        close(lock_fd);
    close(dir_fd);
    return gone;
}

/* With the folder's lock held by the caller. */
static uint32_t
reclaim_below(const char *dir)
{
    uint32_t count = 0;
    DIR *top = opendir(dir);
    struct dirent *job, *rank;
    if (top == NULL)
        return 0;
    while ((job = readdir(top)) != NULL) {
        int job_fd;
        DIR *ranks;
        if (strncmp(job->d_name, "spillway-", 9) != 0)
            continue;
        job_fd = openat(dirfd(top), job->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        ranks = job_fd < 0 ? NULL : fdopendir(job_fd);
        if (ranks == NULL) {
            if (job_fd >= 0)
                close(job_fd);
            continue;
        }
        while ((rank = readdir(ranks)) != NULL) {
            if (strncmp(rank->d_name, "rank-", 5) == 0 && reclaim_rank(job_fd, rank->d_name)) {
                spw_log(SPW_LOG_INFO, "reclaimed the swap space of a dead run: %s/%s/%s", dir, job->d_name,
                        rank->d_name);
                count++;
            }
        }
        closedir(ranks);
        (void)unlinkat(dirfd(top), job->d_name, AT_REMOVEDIR); /* stays while other ranks live in it */
    }
    closedir(top);
    return count;
}

/* Creation and reclaim exclude each other, whatever signals come while one waits for the other. Closing the folder lets go. */
static bool
lock_folder(int fd)
{
    int rc;
    do
        rc = flock(fd, LOCK_EX);
    while (rc != 0 && errno == EINTR);
    return rc == 0;
}

uint32_t
spw_swap_reclaim(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    uint32_t count = 0;
    if (fd < 0)
        return 0;
    if (lock_folder(fd))
        count = reclaim_below(dir);
    close(fd);
    return count;
}

/*
 * A file system that writes each block to a new place reserves with fallocate for the first write alone, and later runs out of space in the middle of a
 * step. Of a file that is empty it can be told not to; others do not know the flag.
 */
static void
write_in_place(int fd)
{
    int flags = 0;
    if (ioctl(fd, FS_IOC_GETFLAGS, &flags) != 0 || (flags & FS_NOCOW_FL) != 0)
        return;
    flags |= FS_NOCOW_FL;
    (void)ioctl(fd, FS_IOC_SETFLAGS, &flags);
}

static spw_status
raise_full(const char *dir, uint64_t bytes, uint64_t free_bytes, spw_error *err)
{
    char need[32], have[32];
    return SPW_RAISE(err, SPW_ENOSPC, "swap space in %s: needs %s (%llu bytes), %s free", dir,
                     spw_format_bytes(need, sizeof need, bytes), (unsigned long long)bytes,
                     spw_format_bytes(have, sizeof have, free_bytes));
}

/* Of the file system of fd; ramfs and the like do not know their size. */
static uint64_t
free_bytes_of(int fd)
{
    struct statvfs fs;
    return fstatvfs(fd, &fs) == 0 && fs.f_blocks > 0 ? (uint64_t)fs.f_bavail * fs.f_frsize : UINT64_MAX;
}

static spw_status
preallocate(int fd, const char *path, const char *dir, uint64_t bytes, spw_error *err)
{
    const uint64_t free_bytes = free_bytes_of(fd);
    int rc;
    write_in_place(fd);
    if (free_bytes < bytes)
        return raise_full(dir, bytes, free_bytes, err);
    do
        rc = fallocate(fd, 0, 0, (off_t)bytes);
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno == EOPNOTSUPP)
        rc = ftruncate(fd, (off_t)bytes);
    if (rc != 0 && errno == ENOSPC)
        return raise_full(dir, bytes, free_bytes, err);
    return rc == 0 ? SPW_OK
                   : SPW_RAISE_SYS(err, errno, "preallocating %llu bytes of %s", (unsigned long long)bytes, path);
}

static spw_status
open_locked(spw_swap *s, spw_aio *aio, const char *dir, uint64_t bytes, spw_error *err)
{
    if (mkdir(s->job_dir, 0700) != 0 && errno != EEXIST)
        return SPW_RAISE_SYS(err, errno, "creating swap folder %s (nvme_path %s)", s->job_dir, dir);
    if (mkdir(s->rank_dir, 0700) != 0 && errno != EEXIST)
        return SPW_RAISE_SYS(err, errno, "creating swap folder %s", s->rank_dir);
    s->lock_fd = open(s->lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (s->lock_fd < 0)
        return SPW_RAISE_SYS(err, errno, "open %s", s->lock_path);
    if (SPW_CALL(ENOLCK, flock(s->lock_fd, LOCK_EX | LOCK_NB)) != 0) {
        int errnum = errno;
        close(s->lock_fd);
        s->lock_fd = -1;
        if (errnum != EWOULDBLOCK) { /* network file systems, mounted without locks */
            (void)unlink(s->lock_path);
            return SPW_RAISE_SYS(err, errnum, "lock %s (nvme_path is to be a disk of this machine)", s->lock_path);
        }
        s->rank_dir[0] = s->job_dir[0] = '\0'; /* it is another run's: nothing of it is ours to remove */
        return SPW_RAISE(err, SPW_EBUSY, "swap folder %s is in use by another run", s->lock_path);
    }
    SPW_TRY(spw_aio_file_open(&s->file, aio, s->file_path, SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE,
                              err));
    return preallocate(spw_aio_file_fd(s->file), s->file_path, dir, bytes, err);
}

/* A path that is a folder, in which nothing of runs that are gone is left, until it is closed. */
static spw_status
open_folder(int *fd, const char *dir, spw_error *err)
{
    *fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0)
        return SPW_RAISE_SYS(err, errno, errno == ENOENT ? "nvme_path %s (mkdir -p makes it)" : "nvme_path %s", dir);
    (void)lock_folder(*fd); /* a file system without locks is told when the file is opened */
    (void)reclaim_below(dir);
    return SPW_OK;
}

/* The device that a folder is on, and what is free there. False: it does not open. */
static bool
look(const char *dir, dev_t *device, uint64_t *free_bytes)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat info;
    bool there = fd >= 0 && fstat(fd, &info) == 0;
    if (there) {
        *device = info.st_dev;
        *free_bytes = free_bytes_of(fd);
    }
    if (fd >= 0)
        close(fd);
    return there;
}

/* The folders from the first on that are on its device take what is free there together. */
static spw_status
check_together(const char *const *dirs, const uint64_t *bytes, uint32_t count, spw_error *err)
{
    char names[256];
    uint64_t need = 0, free_bytes = 0, ignored;
    dev_t device = 0, other;
    size_t used = 0;
    if (!look(dirs[0], &device, &free_bytes))
        return SPW_OK;
    for (uint32_t i = 0; i < count; i++) {
        if (bytes[i] == 0 || !look(dirs[i], &other, &ignored) || other != device)
            continue;
        need += bytes[i];
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? " and " : "", dirs[i]);
    }
    return free_bytes < need ? raise_full(names, need, free_bytes, err) : SPW_OK;
}

spw_status
spw_swap_check(const char *const *dirs, const uint64_t *bytes, uint32_t count, spw_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        if (bytes[i] > 0)
            (void)spw_swap_reclaim(dirs[i]);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (bytes[i] > 0)
            SPW_TRY(check_together(dirs + i, bytes + i, count - i, err));
    }
    return SPW_OK;
}

spw_status
spw_swap_open(spw_swap **out, spw_aio *aio, const char *dir, const char *job, uint32_t rank, uint64_t bytes,
              spw_error *err)
{
    spw_status st;
    int dir_fd;
    spw_swap *s = spw_mem_zalloc(sizeof *s);
    *out = NULL;
    if (s == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "swap space handle");
    s->lock_fd = -1;
    if ((size_t)snprintf(s->job_dir, sizeof s->job_dir, "%s/spillway-%s", dir, job) >= sizeof s->job_dir - 64) {
        s->job_dir[0] = '\0';
        spw_swap_close(s);
        return SPW_RAISE(err, SPW_EINVAL, "nvme_path is too long: %s", dir);
    }
    st = open_folder(&dir_fd, dir, err);
    if (st != SPW_OK) {
        s->job_dir[0] = '\0';
        spw_swap_close(s);
        return st;
    }
    snprintf(s->rank_dir, sizeof s->rank_dir, "%s/rank-%u", s->job_dir, rank);
    snprintf(s->file_path, sizeof s->file_path, "%s/swap.bin", s->rank_dir);
    snprintf(s->lock_path, sizeof s->lock_path, "%s/lock", s->rank_dir);
    st = open_locked(s, aio, dir, bytes, err);
    if (st != SPW_OK)
        spw_swap_close(s);
    else
        *out = s;
    close(dir_fd);
    return st;
}

void
spw_swap_close(spw_swap *s)
{
    if (s == NULL)
        return;
    spw_aio_file_close(s->file);
    if (s->lock_fd >= 0) {
        (void)unlink(s->file_path);
        (void)unlink(s->lock_path);
        close(s->lock_fd);
    }
    if (s->rank_dir[0] != '\0')
        (void)rmdir(s->rank_dir);
    if (s->job_dir[0] != '\0')
        (void)rmdir(s->job_dir); /* stays while other ranks live in it */
    spw_mem_free(s);
}

spw_aio_file *
spw_swap_file(const spw_swap *swap)
{
    return swap->file;
}
