/*
 * Small files and folders: read whole, replaced by rename after fsync, made with parents, removed without following links.
 */
#include "files_internal.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

/* Nothing is at byte at any more: of a file that was cut off meanwhile the end is further in front. */
static spw_status
raise_end(int fd, const char *path, uint64_t at, uint64_t bytes, uint64_t offset, spw_error *err)
{
    struct stat info;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size < at)
        at = (uint64_t)info.st_size;
    return SPW_RAISE(err, SPW_ECORRUPT, "%s ends at byte %llu, %llu bytes at %llu are needed", path,
                     (unsigned long long)at, (unsigned long long)bytes, (unsigned long long)offset);
}

spw_status
spw_file_read_at(int fd, const char *path, void *data, uint64_t bytes, uint64_t offset, spw_error *err)
{
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t rc = SPW_CALL(EIO, pread(fd, (char *)data + done, bytes - done, (off_t)(offset + done)));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc < 0)
            return SPW_RAISE_SYS(err, errno, "read %s at byte %llu", path, (unsigned long long)(offset + done));
        if (rc == 0)
            return raise_end(fd, path, offset + done, bytes, offset, err);
        done += (uint64_t)rc;
    }
    return SPW_OK;
}

spw_status
spw__file_write_at(int fd, const char *path, const void *data, uint64_t bytes, uint64_t offset, spw_error *err)
{
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t rc = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc < 0)
            return SPW_RAISE_SYS(err, errno, "write %s: wanted %llu bytes at offset %llu, got %llu", path,
                                 (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)done);
        done += (uint64_t)rc;
    }
    return SPW_OK;
}

uint64_t
spw_text_mark(const char *text, uint64_t bytes)
{
    return bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

/* Text ends at its first zero byte for whoever reads it: what is behind one would be lost without a word. */
static spw_status
refuse_zeros(const char *path, const char *text, uint64_t bytes, spw_error *err)
{
    uint64_t end = strlen(text), line = 1;
    if (end >= bytes)
        return SPW_OK;
    for (uint64_t i = 0; i < end; i++)
        line += text[i] == '\n';
    return SPW_RAISE(err, SPW_ECORRUPT, "%s, line %llu: a zero byte, at byte %llu: this is no text", path,
                     (unsigned long long)line, (unsigned long long)end);
}

spw_status
spw_file_read(const char *path, uint64_t bytes_max, void **out, uint64_t *bytes, spw_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    char *data = NULL;
    uint64_t got = 0;
    spw_status st = SPW_OK;
    *out = NULL;
    *bytes = 0;
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "open %s", path);
    if (fstat(fd, &info) != 0)
        st = SPW_RAISE_SYS(err, errno, "stat %s", path);
    else if (!S_ISREG(info.st_mode))
        st = SPW_RAISE(err, SPW_EINVAL, "%s is not a regular file%s", path,
                       S_ISDIR(info.st_mode) ? " but a folder" : "");
    else if ((uint64_t)info.st_size > bytes_max)
        st = SPW_RAISE(err, SPW_EINVAL, "%s has %llu bytes, at most %llu are read", path,
                       (unsigned long long)info.st_size, (unsigned long long)bytes_max);
    else if ((data = spw_mem_zalloc((uint64_t)info.st_size + 1)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "reading %s", path);
    while (st == SPW_OK && got < (uint64_t)info.st_size) {
        ssize_t rc = read(fd, data + got, (uint64_t)info.st_size - got);
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc < 0)
            st = SPW_RAISE_SYS(err, errno, "read %s", path);
        if (rc <= 0)
            break;
        got += (uint64_t)rc;
    }
    close(fd);
    if (st != SPW_OK) {
        spw_mem_free(data);
        return st;
    }
    *out = data;
    *bytes = got;
    return SPW_OK;
}

spw_status
spw_file_read_text(const char *path, uint64_t bytes_max, char **text_out, spw_error *err)
{
    uint64_t got, mark;
    void *data;
    char *text;
    spw_status st;
    *text_out = NULL;
    SPW_TRY(spw_file_read(path, bytes_max, &data, &got, err));
    text = data;
    st = refuse_zeros(path, text, got, err);
    if (st != SPW_OK) {
        spw_mem_free(text);
        return st;
    }
    mark = spw_text_mark(text, got);
    memmove(text, text + mark, got - mark + 1);
    *text_out = text;
    return SPW_OK;
}

/* Without the slashes that a folder's name may end with. */
static int
name_bytes(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    return (int)n;
}

bool
spw_dir_partial(const char *path, char *out, size_t bytes)
{
    return (size_t)snprintf(out, bytes, "%.*s.partial", name_bytes(path), path) < bytes;
}

/* The folder part of a path. */
static void
folder_of(const char *path, char folder[PATH_BYTES])
{
    char *slash;
    snprintf(folder, PATH_BYTES, "%.*s", name_bytes(path), path);
    slash = strrchr(folder, '/');
    if (slash == NULL)
        snprintf(folder, PATH_BYTES, ".");
    else if (slash == folder)
        slash[1] = '\0';
    else
        *slash = '\0';
}

spw_status
spw_file_write_text(const char *path, const char *text, spw_error *err)
{
    return spw_file_write(path, text, strlen(text), err);
}

spw_status
spw_file_write(const char *path, const void *data, uint64_t bytes, spw_error *err)
{
    char tmp[PATH_BYTES];
    uint64_t done = 0;
    spw_status st = SPW_OK;
    int fd;
    snprintf(tmp, sizeof tmp, "%s.tmp-%ld", path, (long)getpid());
    fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "open %s", tmp);
    while (st == SPW_OK && done < bytes) {
        ssize_t rc = write(fd, (const char *)data + done, bytes - done);
        if (rc >= 0)
            done += (uint64_t)rc;
        else if (errno != EINTR)
            st = SPW_RAISE_SYS(err, errno, "write %s", tmp);
    }
    if (st == SPW_OK && fsync(fd) != 0)
        st = SPW_RAISE_SYS(err, errno, "fsync %s", tmp);
    if (close(fd) != 0 && st == SPW_OK)
        st = SPW_RAISE_SYS(err, errno, "close %s", tmp);
    if (st == SPW_OK && rename(tmp, path) != 0)
        st = SPW_RAISE_SYS(err, errno, "renaming %s to %s", tmp, path);
    if (st != SPW_OK) {
        (void)unlink(tmp);
        return st;
    }
    return spw_dir_sync_above(path, err);
}

static bool
ends_inside_a_line(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    char last = '\n';
    if (fd < 0)
        return false;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0)
        (void)!pread(fd, &last, 1, info.st_size - 1);
    close(fd);
    return last != '\n';
}

FILE *
spw_file_append_lines(const char *path)
{
    bool torn = ends_inside_a_line(path);
    FILE *f = fopen(path, "ae");
    if (f != NULL && torn)
        (void)fputc('\n', f); /* an error stays with the file, and shows with the first line */
    return f;
}

/* A new folder's name outlasts a power cut. A folder above it that may be written and not read cannot be flushed. */
static spw_status
make_one(const char *path, spw_error *err)
{
    spw_error own = {0};
    if (mkdir(path, 0777) != 0)
        return errno == EEXIST ? SPW_OK : SPW_RAISE_SYS(err, errno, "creating folder %s", path);
    if (spw_dir_sync_above(path, &own) == SPW_OK || own.sys_errno == EACCES)
        return SPW_OK;
    spw_error_keep_first(err, &own);
    return own.status;
}

bool
spw_dir_has(const char *folder, const char *name)
{
    char path[PATH_BYTES];
    return snprintf(path, sizeof path, "%s/%s", folder, name) < PATH_BYTES && access(path, F_OK) == 0;
}

spw_status
spw_dir_make(const char *path, spw_error *err)
{
    char part[PATH_BYTES];
    struct stat info;
    snprintf(part, sizeof part, "%s", path);
    for (char *at = part + 1; *at != '\0'; at++) {
        if (*at != '/')
            continue;
        *at = '\0';
        SPW_TRY(make_one(part, err));
        *at = '/';
    }
    SPW_TRY(make_one(part, err));
    if (stat(part, &info) != 0 || !S_ISDIR(info.st_mode))
        return SPW_RAISE(err, SPW_EINVAL, "%s is not a folder", path);
    return SPW_OK;
}

spw_status
spw_dir_check_room(const char *folder, uint64_t bytes, const char *remedy, spw_error *err)
{
    char need[32], have[32];
    struct statvfs fs;
    uint64_t free_bytes;
    if (statvfs(folder, &fs) != 0 || fs.f_blocks == 0) /* ramfs and the like do not know their size */
        return SPW_OK;
    free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return free_bytes >= bytes ? SPW_OK
                               : SPW_RAISE(err, SPW_ENOSPC, "it needs %s (%llu bytes), %s free; %s",
                                           spw_format_bytes(need, sizeof need, bytes), (unsigned long long)bytes,
                                           spw_format_bytes(have, sizeof have, free_bytes), remedy);
}

spw_status
spw_dir_sync(const char *path, spw_error *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    spw_status st = SPW_OK;
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "open folder %s", path);
    if (fsync(fd) != 0 && errno != EINVAL) /* EINVAL: the file system has nothing to flush for a folder */
        st = SPW_RAISE_SYS(err, errno, "fsync folder %s", path);
    close(fd);
    return st;
}

spw_status
spw_dir_sync_above(const char *path, spw_error *err)
{
    char folder[PATH_BYTES];
    folder_of(path, folder);
    return spw_dir_sync(folder, err);
}

static spw_status
remove_below(int parent, const char *name, const char *shown, spw_error *err)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    spw_status st = SPW_OK;
    struct dirent *entry;
    DIR *dir;
    if (fd < 0)
        return SPW_RAISE_SYS(err, errno, "open folder %s", shown);
    dir = fdopendir(fd);
    if (dir == NULL) {
        close(fd);
        return SPW_RAISE(err, SPW_ENOMEM, "reading folder %s", shown);
    }
    while (st == SPW_OK && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) == 0)
            continue;
        if (errno == EISDIR || errno == EPERM)
            st = remove_below(dirfd(dir), entry->d_name, entry->d_name, err);
        else
            st = SPW_RAISE_SYS(err, errno, "removing %s/%s", shown, entry->d_name);
    }
    closedir(dir);
    if (st == SPW_OK && unlinkat(parent, name, AT_REMOVEDIR) != 0)
        st = SPW_RAISE_SYS(err, errno, "removing folder %s", shown);
    return st;
}

spw_status
spw_dir_remove(const char *path, spw_error *err)
{
    return remove_below(AT_FDCWD, path, path, err);
}
