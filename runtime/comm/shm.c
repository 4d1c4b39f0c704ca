/*
 * Memory that ranks of one host share, and waiting in it. A segment is a memory file without a name: others open it
 * through /proc/<pid>/fd while its owner shows it, and the kernel takes it back when the last process that maps it ends,
 * however it ends. A gate is a barrier in such memory that survives the death of anybody who waits there.
 */
#include "comm_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

spw_status
spw__segment_create(spw__segment *out, uint64_t bytes, bool shared, unsigned flags, spw_error *err)
{
    char text[32];
    spw_status st;
    *out = (spw__segment){.shown = false};
    if (!shared)
        return spw_region_map(&out->region, bytes, flags, err);
    out->fd = SPW_CALL(EMFILE, memfd_create("spillway", MFD_CLOEXEC));
    if (out->fd < 0)
        return SPW_RAISE_SYS(err, errno, "memory to share");
    out->shown = true;
    spw_format_bytes(text, sizeof text, bytes);
    if (bytes > INT64_MAX || SPW_CALL(ENOMEM, ftruncate(out->fd, (off_t)bytes)) != 0)
        st = SPW_RAISE(err, SPW_ENOMEM, "%s of memory to share", text);
    else
        st = spw_region_map_fd(&out->region, out->fd, bytes, SPW_REGION_LAZY, err);
    /* Mapped first: the mapping asks for huge pages. Only what is allocated may be touched without fear of SIGBUS. */
    if (st == SPW_OK && bytes > 0 && SPW_CALL(ENOMEM, fallocate(out->fd, 0, 0, (off_t)bytes)) != 0)
        st = SPW_RAISE(err, SPW_ENOMEM, "%s of memory to share: %s", text, strerror(errno));
    if (st == SPW_OK) { /* anew, counted and with its page table filled */
        spw_region_unmap(&out->region);
        st = spw_region_map_fd(&out->region, out->fd, bytes, flags, err);
    }
    if (st != SPW_OK)
        spw__segment_close(out);
    return st;
}

spw_status
spw__segment_attach(spw__segment *out, pid_t pid, int fd, uint64_t bytes, spw_error *err)
{
    char path[64];
    struct stat sb;
    spw_status st;
    int own;
    *out = (spw__segment){.shown = false};
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
    own = SPW_CALL(EACCES, open(path, O_RDWR | O_CLOEXEC));
    if (own < 0)
        return SPW_RAISE_SYS(err, errno, "memory of process %d", (int)pid);
    if (fstat(own, &sb) != 0 || (uint64_t)sb.st_size < bytes)
        st = SPW_RAISE(err, SPW_ESYS, "memory of process %d is not what was expected", (int)pid);
    else
        st = spw_region_map_fd(&out->region, own, bytes, SPW_REGION_LAZY, err);
    close(own);
    return st;
}

void
spw__segment_hide(spw__segment *segment)
{
    if (segment->shown)
        close(segment->fd);
    segment->shown = false;
}

void
spw__segment_close(spw__segment *segment)
{
    spw__segment_hide(segment);
    spw_region_unmap(&segment->region);
}

/* ---------------------------------------------------------------- gates */

void
spw__gate_arrive(spw__gate *gate, uint32_t target)
{
    if (atomic_fetch_add(&gate->count, 1) + 1 == target)
        (void)syscall(SYS_futex, &gate->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool
spw__gate_open(const spw__gate *gate, uint32_t target)
{
    return (int32_t)(atomic_load_explicit(&gate->count, memory_order_acquire) - target) >= 0;
}

bool
spw__gate_wait(spw__gate *gate, uint32_t target, uint32_t spin)
{
    struct timespec slice = {.tv_nsec = SLICE_MS * 1000000l};
    uint64_t until;
    for (uint32_t i = 0; i < spin; i++) {
        if (spw__gate_open(gate, target))
            return true;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    until = spw_now_ns() + SLICE_MS * 1000000ull;
    do {
        uint32_t seen = atomic_load(&gate->count);
        if ((int32_t)(seen - target) >= 0)
            return true;
        (void)syscall(SYS_futex, &gate->count, FUTEX_WAIT, seen, &slice, NULL, 0);
    } while (spw_now_ns() < until);
    return spw__gate_open(gate, target);
}

/* ---------------------------------------------------------------- who is on this host */

/*
 * Processes are local to each other when they can open each other's memory: same kernel, same process numbers, same user.
 * SPW_HOST splits them further, so that tests can have several hosts on one machine.
 */
void
spw__host_identity(char *out, size_t out_bytes)
{
    char boot[64] = "", pids[64] = "";
    const char *name = getenv("SPW_HOST");
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    ssize_t n = readlink("/proc/self/ns/pid", pids, sizeof pids - 1);
    if (f != NULL) {
        if (fgets(boot, sizeof boot, f) == NULL)
            boot[0] = '\0';
        fclose(f);
    }
    boot[strcspn(boot, "\n")] = '\0';
    pids[n > 0 ? n : 0] = '\0';
    if (boot[0] == '\0' || pids[0] == '\0') /* unknown: a host of its own */
        snprintf(boot, sizeof boot, "%d.%llu", (int)getpid(), (unsigned long long)spw_now_ns());
    snprintf(out, out_bytes, "%s %s %u %s", boot, pids, (unsigned)geteuid(), name != NULL ? name : "");
}

uint64_t
spw__process_start_ticks(pid_t pid)
{
    char path[64], line[1024], *p;
    unsigned long long ticks = 0;
    FILE *f;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    f = fopen(path, "re");
    if (f == NULL)
        return 0;
    p = fgets(line, sizeof line, f) != NULL ? strrchr(line, ')') : NULL; /* the name may hold anything */
    fclose(f);
    if (p == NULL ||
        sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks) != 1)
        return 0;
    return ticks;
}
