/*
 * aio_file.c - the files of a context: opened twice where O_DIRECT works, once plain and once direct.
 *
 * The direct descriptor moves whole blocks, the plain one parts of blocks (aio_piece.c says why). The block is what the
 * kernel asks for in direct I/O: statx(STATX_DIOALIGN), else the logical block size of the device, and never less than
 * a page, so that no page is ever written both directly and through the page cache at once.
 *
 * Files of one st_dev share a device. Where O_DIRECT is refused, pages are given back to the kernel right after use:
 * state is read once per step, so the page cache would only push out memory that is needed.
 */
#include "aio_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* The kernel's struct statx as far as it matters here; the C library's may be older than the running kernel. */
typedef struct statx_words {
    uint32_t mask;
    uint32_t unused[37];
    uint32_t dio_align_mem;    /* byte 152 */
    uint32_t dio_align_offset; /* byte 156 */
    uint32_t spare[24];
} statx_words;
_Static_assert(sizeof(statx_words) == 256, "struct statx is 256 bytes");
enum { STATX_MASK_DIOALIGN = 0x2000 };

static uint32_t
logical_block_bytes(int fd)
{
    static const char *const patterns[] = {"/sys/dev/block/%u:%u/queue/logical_block_size",
                                           "/sys/dev/block/%u:%u/../queue/logical_block_size"}; /* a partition */
    struct stat sb;
    if (fstat(fd, &sb) != 0)
        return 0;
    for (int i = 0; i < 2; i++) {
        char path[96], text[32];
        ssize_t n;
        int sys;
        snprintf(path, sizeof path, patterns[i], major(sb.st_dev), minor(sb.st_dev));
        sys = open(path, O_RDONLY | O_CLOEXEC);
        if (sys < 0)
            continue;
        n = read(sys, text, sizeof text - 1);
        close(sys);
        if (n > 0) {
            text[n] = '\0';
            return (uint32_t)strtoul(text, NULL, 10);
        }
    }
    return 0;
}

/*
 * What the page cache keeps and writes back as one: a page, or a block of the file system where those are larger (XFS). What goes around it and what
 * goes through it may not lie in one of them, or one is written back over the other. Network file systems
 * say what they like to transfer: more than any bounce buffer.
 */
static uint32_t
cached_block_bytes(int fd)
{
    long page = sysconf(_SC_PAGESIZE);
    int block = 0;
    if (ioctl(fd, FIGETBSZ, &block) != 0 || block < 0 || block > SPW__AIO_BOUNCE_BYTES_MIN)
        block = 0;
    return page > block ? (uint32_t)page : (uint32_t)block;
}

static bool
power_of_two(uint32_t x)
{
    return x != 0 && (x & (x - 1)) == 0;
}

/* False when the kernel says that this file has no direct I/O, or wants blocks larger than a bounce buffer. */
static bool
find_align(spw_aio_file *file, int fd)
{
    statx_words sx = {0};
    uint32_t align = 0, align_mem = 0;
#ifdef SYS_statx
    if (SPW_CALL(ENOSYS, syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_MASK_DIOALIGN, &sx)) == 0 &&
        (sx.mask & STATX_MASK_DIOALIGN)) {
        align = sx.dio_align_offset;
        align_mem = sx.dio_align_mem;
        if (align == 0)
            return false;
    }
#endif
    if (align == 0)
        align = logical_block_bytes(fd);
    if (align < SPW__AIO_PAGE_BYTES)
        align = SPW__AIO_PAGE_BYTES;
    if (align < cached_block_bytes(fd))
        align = cached_block_bytes(fd);
    if (!power_of_two(align) || align > file->aio->bounce_bytes)
        return false;
    if (!power_of_two(align_mem) || align_mem > SPW__AIO_PAGE_BYTES)
        align_mem = SPW__AIO_PAGE_BYTES; /* every mapping, so every bounce buffer, has at least this */
    file->align = align;
    file->align_mem = align_mem;
    return true;
}

/* Opens the second descriptor; the file stays plain where that is refused. */
static spw_status
open_direct(spw_aio_file *file, int mode, spw_error *err)
{
    struct stat plain, direct;
    int fd = SPW_CALL(EMFILE, open(file->path, mode | O_DIRECT | O_CLOEXEC));
    if (fd < 0 && errno != EINVAL)
        return SPW_RAISE_SYS(err, errno, "open %s with O_DIRECT", file->path);
    if (fd >= 0 && (fstat(file->fds[SPW__AIO_FD_PLAIN], &plain) != 0 || fstat(fd, &direct) != 0 ||
                    plain.st_dev != direct.st_dev || plain.st_ino != direct.st_ino)) {
        close(fd);
        return SPW_RAISE(err, SPW_EBUSY, "open %s: it was replaced by another file meanwhile", file->path);
    }
    if (fd < 0 || !find_align(file, fd)) {
        if (fd >= 0)
            close(fd);
        spw_log(SPW_LOG_WARN, "aio: %s: the file system refuses O_DIRECT; transfers go through the page cache",
                file->path);
        return SPW_OK;
    }
    file->fds[SPW__AIO_FD_DIRECT] = fd;
    file->block_bytes = file->aio->options.block_bytes / file->align * file->align;
    if (file->block_bytes == 0)
        file->block_bytes = file->align;
    return SPW_OK;
}

/* ---------------------------------------------------------------- devices */

static spw_status
device_acquire(spw_aio *aio, dev_t dev, spw__aio_device **out, spw_error *err)
{
    uint32_t depth = aio->options.queue_depth;
    spw__aio_device *d;
    for (d = aio->devices; d != NULL && d->dev != dev; d = d->next)
        ;
    if (d == NULL) {
        d = spw_mem_zalloc(sizeof *d);
        if (d != NULL)
            d->pieces = spw_mem_calloc(depth, sizeof *d->pieces);
        if (d == NULL || d->pieces == NULL) {
            spw_mem_free(d);
            return SPW_RAISE(err, SPW_ENOMEM, "queue of %u pieces (%zu bytes each)", depth, sizeof *d->pieces);
        }
        d->dev = dev;
        d->load.depth = depth;
        for (uint32_t i = 0; i < depth; i++)
            spw__aio_list_push(&d->free, &d->pieces[i]);
        d->next = aio->devices;
        aio->devices = d;
    }
    d->file_count++;
    *out = d;
    return SPW_OK;
}

static void
device_release(spw_aio *aio, spw__aio_device *device)
{
    spw__aio_device **link = &aio->devices;
    if (device == NULL || --device->file_count > 0)
        return;
    while (*link != device)
        link = &(*link)->next;
    *link = device->next;
    spw_mem_free(device->pieces);
    spw_mem_free(device);
}

/* ---------------------------------------------------------------- pages */

/* DONTNEED starts the writing of dirty pages and drops clean ones, so writes are told twice: now and some time later. */
void
spw__aio_file_forget(spw_aio_file *file, spw_aio_op op, uint64_t offset, uint64_t bytes)
{
    int fd = file->fds[SPW__AIO_FD_PLAIN];
    (void)posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
    if (op != SPW_AIO_WRITE)
        return;
    if (file->behind[file->behind_idx].bytes > 0)
        (void)posix_fadvise(fd, (off_t)file->behind[file->behind_idx].offset,
                            (off_t)file->behind[file->behind_idx].bytes, POSIX_FADV_DONTNEED);
    file->behind[file->behind_idx].offset = offset;
    file->behind[file->behind_idx].bytes = bytes;
    file->behind_idx = (file->behind_idx + 1) % SPW__AIO_BEHIND_COUNT;
}

/* ---------------------------------------------------------------- files */

static void
file_free(spw_aio_file *file)
{
    for (int i = 0; i < SPW__AIO_FD_COUNT; i++)
        if (file->fds[i] >= 0)
            close(file->fds[i]);
    device_release(file->aio, file->device);
    spw_mem_free(file->path);
    spw_mem_free(file);
}

spw_status
spw_aio_file_open(spw_aio_file **out, spw_aio *aio, const char *path, unsigned flags, spw_error *err)
{
    const unsigned known = SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE | SPW_AIO_OPEN_CREATE | SPW_AIO_OPEN_BUFFERED;
    spw_status st = SPW_OK;
    spw_aio_file *file;
    struct stat sb;
    int mode;
    *out = NULL;
    if ((flags & ~known) != 0 || (flags & (SPW_AIO_OPEN_READ | SPW_AIO_OPEN_WRITE)) == 0)
        return SPW_RAISE(err, SPW_EINVAL, "open %s: flags 0x%x ask for neither reading nor writing, or are unknown",
                         path, flags);
    if ((flags & SPW_AIO_OPEN_CREATE) && !(flags & SPW_AIO_OPEN_WRITE))
        return SPW_RAISE(err, SPW_EINVAL, "open %s: a file that is created must be open for writing", path);
    file = spw_mem_zalloc(sizeof *file);
    if (file == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "open %s: file handle (%zu bytes)", path, sizeof *file);
    file->aio = aio;
    file->flags = flags;
    for (int i = 0; i < SPW__AIO_FD_COUNT; i++)
        file->fds[i] = file->slots[i] = -1;
    file->align = file->align_mem = 1;
    file->block_bytes = aio->options.block_bytes;
    file->path = spw_mem_strdup(path);
    if (file->path == NULL) {
        st = SPW_RAISE(err, SPW_ENOMEM, "open %s: its name", path);
        goto fail;
    }
    mode = (flags & SPW_AIO_OPEN_READ) ? ((flags & SPW_AIO_OPEN_WRITE) ? O_RDWR : O_RDONLY) : O_WRONLY;
    file->fds[SPW__AIO_FD_PLAIN] =
        SPW_CALL(EMFILE, open(path, mode | O_CLOEXEC | ((flags & SPW_AIO_OPEN_CREATE) ? O_CREAT : 0),
                              0600)); /* it can leave a file */
    if (file->fds[SPW__AIO_FD_PLAIN] < 0) {
        st = SPW_RAISE_SYS(err, errno, "open %s", path);
        goto fail;
    }
    if (SPW_CALL(EIO, fstat(file->fds[SPW__AIO_FD_PLAIN], &sb)) != 0) {
        st = SPW_RAISE_SYS(err, errno, "stat %s", path);
        goto fail;
    }
    st = device_acquire(aio, sb.st_dev, &file->device, err);
    if (st == SPW_OK && !(flags & SPW_AIO_OPEN_BUFFERED))
        st = open_direct(file, mode, err);
    if (st != SPW_OK)
        goto fail;
    if (file->fds[SPW__AIO_FD_DIRECT] < 0) /* what is wanted ahead is asked for; folios read ahead outlive DONTNEED */
        (void)posix_fadvise(file->fds[SPW__AIO_FD_PLAIN], 0, 0, POSIX_FADV_RANDOM);
    aio->ops->file_add(aio->backend, file);
    file->next = aio->files;
    aio->files = file;
    *out = file;
    return SPW_OK;
fail:
    file_free(file);
    return st;
}

void
spw_aio_file_close(spw_aio_file *file)
{
    spw_aio_file **link;
    if (file == NULL)
        return;
    spw__aio_drain(file->aio, file);
    for (link = &file->aio->files; *link != file;)
        link = &(*link)->next;
    *link = file->next;
    file->aio->ops->file_remove(file->aio->backend, file);
    if (file->fds[SPW__AIO_FD_DIRECT] < 0)
        (void)posix_fadvise(file->fds[SPW__AIO_FD_PLAIN], 0, 0, POSIX_FADV_DONTNEED);
    file_free(file);
}

const char *
spw_aio_file_path(const spw_aio_file *file)
{
    return file->path;
}

bool
spw_aio_file_direct(const spw_aio_file *file)
{
    return file->fds[SPW__AIO_FD_DIRECT] >= 0;
}

uint32_t
spw_aio_file_align(const spw_aio_file *file)
{
    return file->align;
}

int
spw_aio_file_fd(const spw_aio_file *file)
{
    return file->fds[SPW__AIO_FD_PLAIN];
}
