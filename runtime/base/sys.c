/*
 * What the machine is: time, allowed CPUs, memory limits, disks and instruction sets.
 */
#include "spw_base.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

uint64_t
spw_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t
spw_process_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void
spw_sleep_ns(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

void
spw_waiting_begin(spw_waiting *w)
{
    *w = (spw_waiting){.looked_ns = spw_now_ns()};
}

double
spw_waiting_look(spw_waiting *w)
{
    const uint64_t most_ns = 1000000000u;
    uint64_t now = spw_now_ns(), since = now - w->looked_ns;
    w->looked_ns = now;
    w->waited_ns += since < most_ns ? since : most_ns;
    return (double)w->waited_ns * 1e-9;
}

/* As the kernel lays it out; older headers have no name for it. */
typedef struct thread_attr {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t slice_ns, deadline_ns, period_ns;
} thread_attr;

bool
spw_thread_be_prompt(void)
{
    enum { PROMPT_NICE = 10, RESET_ON_FORK = 1 };
    thread_attr own = {0}, attr;
    if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) != 0 || own.policy != SCHED_OTHER)
        return false;
    own.slice_ns = 100000; /* the least that the kernel takes */
    attr = own;
    attr.nice = own.nice > PROMPT_NICE - 20 ? own.nice - PROMPT_NICE : -20;
    attr.flags |= RESET_ON_FORK;
    if (syscall(SYS_sched_setattr, 0, &attr, 0) == 0)
        return true;
    (void)syscall(SYS_sched_setattr, 0, &own, 0);
    return false;
}

static bool
read_line(const char *path, char *buf, int buf_bytes)
{
    FILE *f = fopen(path, "re");
    bool ok = f != NULL && fgets(buf, buf_bytes, f) != NULL;
    if (f != NULL)
        fclose(f);
    return ok;
}

uint64_t
spw_thread_run_delay_ns(void)
{
    char line[96];
    unsigned long long ran, waited;
    if (!read_line("/proc/thread-self/schedstat", line, sizeof line) || sscanf(line, "%llu %llu", &ran, &waited) != 2)
        return UINT64_MAX;
    return waited;
}

static bool
read_number(const char *dir, const char *name, long long *out)
{
    char path[PATH_MAX], line[64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return read_line(path, line, sizeof line) && sscanf(line, "%lld", out) == 1;
}

/* What one cgroup sets: "quota period" or "max period" in version 2, a file for each in version 1 (-1: none). */
static double
quota_of_cgroup(const char *dir)
{
    char path[PATH_MAX], line[64];
    long long quota = -1, period = 0;
    snprintf(path, sizeof path, "%s/cpu.max", dir);
    if (read_line(path, line, sizeof line)) {
        if (sscanf(line, "%lld %lld", &quota, &period) != 2)
            return INFINITY;
    } else if (!read_number(dir, "cpu.cfs_quota_us", &quota) || !read_number(dir, "cpu.cfs_period_us", &period)) {
        return INFINITY;
    }
    return quota > 0 && period > 0 ? (double)quota / (double)period : INFINITY;
}

/* What is looked at in each cgroup of a controller that limits this process; v1: it is one of version 1. */
typedef void (*cgroup_fn)(void *ctx, const char *dir, bool v1);

/* A cgroup and those above it, up to the mount: in a container its own limit stands there. */
static void
visit_up(const char *mount, const char *cgroup, bool v1, cgroup_fn fn, void *ctx)
{
    char dir[PATH_MAX];
    size_t mount_len = strlen(mount);
    snprintf(dir, sizeof dir, "%s%s", mount, cgroup);
    for (;;) {
        char *slash;
        fn(ctx, dir, v1);
        slash = strrchr(dir, '/');
        if (slash == NULL || slash < dir + mount_len)
            return;
        *slash = '\0';
    }
}

/* The mounts of both versions, and from where the kernel says that this process is. Some are seen more than once. */
static void
visit_cgroups(const char *root, const char *controller, cgroup_fn fn, void *ctx)
{
    char path[PATH_MAX], v1[PATH_MAX], v2[PATH_MAX], line[PATH_MAX];
    FILE *f;
    snprintf(v2, sizeof v2, "%s/sys/fs/cgroup", root);
    snprintf(v1, sizeof v1, "%s/%s", v2, controller);
    fn(ctx, v2, false);
    fn(ctx, v1, true);
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) { /* "4:cpu,cpuacct:/name" or "0::/name" */
        char *save, *controllers = strchr(line, ':'), *name = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (name == NULL)
            continue;
        *name++ = '\0';
        name[strcspn(name, "\n")] = '\0';
        if (*++controllers == '\0')
            visit_up(v2, name, false, fn, ctx);
        for (char *one = strtok_r(controllers, ",", &save); one != NULL; one = strtok_r(NULL, ",", &save)) {
            if (strcmp(one, controller) == 0)
                visit_up(v1, name, true, fn, ctx);
        }
    }
    if (f != NULL)
        fclose(f);
}

static void
see_quota(void *ctx, const char *dir, bool v1)
{
    double *least = ctx;
    (void)v1;
    *least = fmin(*least, quota_of_cgroup(dir));
}

double
spw_cgroup_cpu_quota(const char *root)
{
    double least = INFINITY;
    visit_cgroups(root, "cpu", see_quota, &least);
    return least;
}

uint32_t
spw_cpu_allowed_count(void)
{
    spw_id_set set;
    double quota = spw_cgroup_cpu_quota("");
    uint32_t count;
    spw_cpu_affinity(&set);
    count = spw_id_set_count(&set);
    if (quota < count)
        count = (uint32_t)ceil(quota);
    return count > 0 ? count : 1;
}

uint32_t
spw_gpu_nodes(const char *root, spw_id_set *out)
{
    char path[PATH_MAX], line[128];
    struct dirent *entry;
    DIR *dir;
    memset(out, 0, sizeof *out);
    snprintf(path, sizeof path, "%s/proc/driver/nvidia/gpus", root);
    dir = opendir(path);
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        FILE *f;
        int node;
        snprintf(path, sizeof path, "%s/proc/driver/nvidia/gpus/%s/numa_status", root, entry->d_name);
        f = fopen(path, "re"); /* only there where the memory is coherent; -1 where the kernel has not got it */
        while (f != NULL && fgets(line, sizeof line, f) != NULL) {
            if (sscanf(line, "Node: %d", &node) == 1 && node >= 0 && node < SPW_IDS_MAX)
                spw_id_set_add(out, (uint32_t)node);
        }
        if (f != NULL)
            fclose(f);
    }
    if (dir != NULL)
        closedir(dir);
    return spw_id_set_count(out);
}

/* The sum of some lines of a meminfo, in bytes; names end with NULL. */
static uint64_t
meminfo_bytes(const char *path, const char *const *names)
{
    char line[128], name[64];
    unsigned long long kib, sum = 0;
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        const char *at = strncmp(line, "Node ", 5) == 0 ? strchr(line + 5, ' ') : line;
        if (at == NULL || sscanf(at, " %63[^:]: %llu", name, &kib) != 2)
            continue;
        for (const char *const *n = names; *n != NULL; n++)
            sum += strcmp(name, *n) == 0 ? kib : 0;
    }
    if (f != NULL)
        fclose(f);
    return sum * 1024u;
}

/* Of a GPU's node what the kernel counts as available: what is free, and files. */
uint64_t
spw_memory_available_bytes(const char *root)
{
    static const char *const all[] = {"MemAvailable", NULL}, *const of_node[] = {"MemFree", "Active(file)",
                                                                                 "Inactive(file)", NULL};
    char path[PATH_MAX];
    spw_id_set nodes;
    uint64_t available, of_gpus = 0;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    available = meminfo_bytes(path, all);
    (void)spw_gpu_nodes(root, &nodes);
    for (uint32_t node = 0; node < SPW_IDS_MAX; node++) {
        if (!spw_id_set_has(&nodes, node))
            continue;
        snprintf(path, sizeof path, "%s/sys/devices/system/node/node%u/meminfo", root, node);
        of_gpus += meminfo_bytes(path, of_node);
    }
    return available > of_gpus ? available - of_gpus : available > 0 ? 1 : 0;
}

/* Files in the page cache of a cgroup count as its memory, and go when a process wants it. */
static uint64_t
cached_of_cgroup(const char *dir, bool v1)
{
    static const char *const names[2][2] = {{"inactive_file", "active_file"},
                                            {"total_inactive_file", "total_active_file"}};
    char path[PATH_MAX], line[128], name[64];
    unsigned long long value;
    uint64_t cached = 0;
    FILE *f;
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "%63s %llu", name, &value) == 2 &&
            (strcmp(name, names[v1][0]) == 0 || strcmp(name, names[v1][1]) == 0))
            cached += value;
    }
    if (f != NULL)
        fclose(f);
    return cached;
}

static bool
read_bytes(const char *dir, const char *name, unsigned long long *out)
{
    char path[PATH_MAX], line[64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return read_line(path, line, sizeof line) && sscanf(line, "%llu", out) == 1;
}

static uint64_t
least(uint64_t a, uint64_t limit, uint64_t used)
{
    uint64_t left = limit > used ? limit - used : 1;
    return a == 0 || left < a ? left : a;
}

/* Over the cgroups that limit this process: the least limit, and the least that one of them has left. */
typedef struct memory_limits {
    uint64_t limit, room;
} memory_limits;

static void
see_memory(void *ctx, const char *dir, bool v1)
{
    static const char *const limits[] = {"memory.max", "memory.limit_in_bytes"};
    static const char *const uses[] = {"memory.current", "memory.usage_in_bytes"};
    memory_limits *m = ctx;
    unsigned long long limit, high, used = 0;
    uint64_t cached;
    if (!read_bytes(dir, limits[v1], &limit))
        limit = UINT64_MAX;
    if (!v1 && read_bytes(dir, "memory.high", &high) && high < limit)
        limit = high; /* from there on the kernel slows every allocation down */
    if (limit >= (1ull << 62))
        return;
    cached = read_bytes(dir, uses[v1], &used) ? cached_of_cgroup(dir, v1) : 0;
    m->limit = limit < m->limit ? limit : m->limit;
    m->room = least(m->room, limit, used > cached ? used - cached : 0);
}

static memory_limits
memory_of_cgroups(const char *root)
{
    memory_limits m = {UINT64_MAX, UINT64_MAX};
    visit_cgroups(root, "memory", see_memory, &m);
    return m;
}

uint64_t
spw_cgroup_memory_bytes(const char *root)
{
    return memory_of_cgroups(root).limit;
}

uint64_t
spw_cgroup_memory_room_bytes(const char *root)
{
    return memory_of_cgroups(root).room;
}

uint64_t
spw_memory_room_bytes(uint64_t untouched_bytes, uint32_t sharers)
{
    uint64_t room = spw_memory_available_bytes(""), cgroup = spw_cgroup_memory_room_bytes("");
    static const int kinds[] = {RLIMIT_AS, RLIMIT_DATA};
    unsigned long long pages[2]; /* of address space; of what is private and can be written, and stacks */
    char line[128];
    if (cgroup != UINT64_MAX)
        room = least(room, cgroup, 0);
    room = room > sharers ? room / sharers : room;
    if (!read_line("/proc/self/statm", line, sizeof line) ||
        sscanf(line, "%llu %*u %*u %*u %*u %llu", &pages[0], &pages[1]) != 2)
        return room;
    for (int i = 0; i < 2; i++) {
        struct rlimit most;
        if (getrlimit(kinds[i], &most) == 0 && most.rlim_cur != RLIM_INFINITY)
            room = least(room, most.rlim_cur, pages[i] * (uint64_t)sysconf(_SC_PAGESIZE) + untouched_bytes);
    }
    return room;
}

uint64_t
spw_disk_behind(const char *root, uint64_t dev)
{
    char path[PATH_MAX], line[64];
    unsigned whole_major, whole_minor;
    snprintf(path, sizeof path, "%s/sys/dev/block/%u:%u/partition", root, major(dev), minor(dev));
    if (access(path, F_OK) != 0)
        return dev;
    snprintf(path, sizeof path, "%s/sys/dev/block/%u:%u/../dev", root, major(dev), minor(dev));
    return read_line(path, line, sizeof line) && sscanf(line, "%u:%u", &whole_major, &whole_minor) == 2
               ? makedev(whole_major, whole_minor)
               : dev;
}

/* The folder that it is in; false: there is none above. */
static bool
go_up(char *path)
{
    char *slash = strrchr(path, '/');
    bool more = strcmp(path, ".") != 0 && strcmp(path, "/") != 0;
    if (slash == NULL)
        strcpy(path, ".");
    else
        slash[slash == path] = '\0';
    return more;
}

/* Of the path or, where that is not there yet, of the nearest folder above it: at becomes it. */
static bool
stat_nearest(const char *path, char at[PATH_MAX], struct stat *sb)
{
    int rc;
    if (path[0] == '\0' || strlen(path) >= PATH_MAX)
        return false;
    strcpy(at, path);
    while ((rc = stat(at, sb)) != 0 && errno == ENOENT && go_up(at)) {
    }
    return rc == 0;
}

uint64_t
spw_disk_of(const char *path)
{
    char at[PATH_MAX];
    struct stat sb;
    return stat_nearest(path, at, &sb) ? spw_disk_behind("", sb.st_dev) : 0;
}

uint64_t
spw_disk_free(const char *path)
{
    char at[PATH_MAX];
    struct stat sb;
    struct statvfs fs;
    return stat_nearest(path, at, &sb) && statvfs(at, &fs) == 0 ? (uint64_t)fs.f_bavail * fs.f_frsize : 0;
}

#if defined(__x86_64__)
/* Not a name that every compiler's __builtin_cpu_supports() knows. Its registers are AVX's, so the kernel that keeps those keeps it. */
static bool
has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

/* All that the files of an instruction set are compiled with: virtual machines may hide any part. */
static spw_isa
find_isa(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                   ? SPW_ISA_AVX512
                   : SPW_ISA_AVX2;
#elif defined(__aarch64__)
    return SPW_ISA_NEON; /* the architecture has it */
#endif
    return SPW_ISA_SCALAR;
}

spw_isa
spw_cpu_isa_native(void)
{
    static _Atomic int
        known; /* the instruction set plus 1: where a machine is virtual, each cpuid is an exit from it */
    int isa = atomic_load_explicit(&known, memory_order_relaxed) - 1;
    if (isa < 0) {
        isa = (int)find_isa();
        atomic_store_explicit(&known, isa + 1, memory_order_relaxed);
    }
    return (spw_isa)isa;
}

bool
spw_cpu_has(spw_isa isa)
{
    spw_isa best = spw_cpu_isa_native();
    return isa == SPW_ISA_SCALAR || isa == best || (isa == SPW_ISA_AVX2 && best == SPW_ISA_AVX512);
}

const char *
spw_isa_name(spw_isa isa)
{
    static const char *const names[SPW_ISA_COUNT] = {"scalar", "avx2", "avx512", "neon"};
    return (unsigned)isa < SPW_ISA_COUNT ? names[isa] : "unknown";
}

spw_isa
spw_cpu_isa(void)
{
    static atomic_bool said;
    spw_isa best = spw_cpu_isa_native();
    const char *wish = getenv("SPW_ISA");
    if (wish == NULL || wish[0] == '\0')
        return best;
    for (int i = 0; i < SPW_ISA_COUNT; i++) {
        if (strcmp(wish, spw_isa_name((spw_isa)i)) == 0 && spw_cpu_has((spw_isa)i))
            return (spw_isa)i;
    }
    if (!atomic_exchange_explicit(&said, true, memory_order_relaxed))
        spw_log(SPW_LOG_WARN, "variable SPW_ISA is \"%.20s\", and this CPU has no such instruction set: it takes %s",
                wish, spw_isa_name(best));
    return best;
}
