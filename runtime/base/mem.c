/*
 * Accounted memory: small heap objects with a fault hook for tests, and large page-aligned regions whose bytes are
 * counted, so that "peak bytes" in a plan and on the machine mean the same thing.
 */
#include "spw_base.h"
#include <errno.h>
#include <numaif.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_BYTES = 2 << 20, TOUCH_THREADS = 16 };
static const uint64_t TOUCH_BYTES = 64 << 20,
                      TOUCH_TOGETHER = 1 << 30; /* of a thread at a time; from which on there are several */

static _Atomic long live_allocs;
typedef struct fault_count {
    _Atomic unsigned countdown;
    _Atomic bool fired;
} fault_count;
static fault_count alloc_fault, call_fault;
static _Atomic uint64_t region_live, region_peak;

static bool
fault_now(fault_count *f)
{
    unsigned k = atomic_load_explicit(&f->countdown, memory_order_relaxed);
    while (k > 0) {
        if (atomic_compare_exchange_weak(&f->countdown, &k, k - 1)) {
            if (k == 1)
                atomic_store(&f->fired, true);
            return k == 1;
        }
    }
    return false;
}

static void
fault_set(fault_count *f, unsigned k)
{
    atomic_store(&f->fired, false);
    atomic_store(&f->countdown, k);
}

bool
spw__call_fails(void)
{
    return fault_now(&call_fault);
}

void
spw_test_fail_call(unsigned k)
{
    fault_set(&call_fault, k);
}

bool
spw_test_call_fired(void)
{
    return atomic_load(&call_fault.fired);
}

void *
spw_mem_zalloc(size_t bytes)
{
    void *p = fault_now(&alloc_fault) ? NULL : calloc(1, bytes > 0 ? bytes : 1);
    if (p != NULL)
        atomic_fetch_add(&live_allocs, 1);
    return p;
}

void *
spw_mem_calloc(size_t count, size_t bytes)
{
    uint64_t total;
    return spw_mul_u64(count, bytes, &total) ? spw_mem_zalloc(total) : NULL;
}

char *
spw_mem_strdup(const char *s)
{
    size_t bytes = strlen(s) + 1;
    char *copy = spw_mem_zalloc(bytes);
    if (copy != NULL)
        memcpy(copy, s, bytes);
    return copy;
}

bool
spw_mem_grow(void **array, uint64_t *have_bytes, uint64_t want_bytes, uint64_t keep_bytes)
{
    uint64_t bytes = *have_bytes * 2 > want_bytes ? *have_bytes * 2 : want_bytes + 256;
    void *grown;
    if (want_bytes <= *have_bytes)
        return true;
    grown = spw_mem_zalloc(bytes);
    if (grown == NULL)
        return false;
    if (keep_bytes > 0)
        memcpy(grown, *array, keep_bytes);
    spw_mem_free(*array);
    *array = grown;
    *have_bytes = bytes;
    return true;
}

void
spw_mem_free(void *p)
{
    if (p != NULL)
        atomic_fetch_sub(&live_allocs, 1);
    free(p);
}

void
spw_test_fail_alloc(unsigned k)
{
    fault_set(&alloc_fault, k);
}

bool
spw_test_fault_fired(void)
{
    return atomic_load(&alloc_fault.fired);
}

long
spw_test_live_allocs(void)
{
    return atomic_load(&live_allocs);
}

static void
count_region(uint64_t bytes)
{
    uint64_t now = atomic_fetch_add(&region_live, bytes) + bytes;
    uint64_t peak = atomic_load(&region_peak);
    while (now > peak && !atomic_compare_exchange_weak(&region_peak, &peak, now)) {
    }
}

/* Maps more than is asked for and gives the ends back, because only whole aligned 2 MiB can become one page. */
static void *
map_aligned(uint64_t bytes, uint64_t align, int fd)
{
    int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    char *p, *at;
    if (align == 0)
        return mmap(NULL, bytes, PROT_READ | PROT_WRITE, kind, fd, 0);
    p = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return p;
    at = p + (align - (uintptr_t)p % align) % align;
    if (at > p)
        (void)munmap(p, (size_t)(at - p));
    if (at + bytes < p + bytes + align)
        (void)munmap(at + bytes, (size_t)(p + align - at));
    if (mmap(at, bytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int errnum = errno;
        (void)munmap(at, bytes);
        errno = errnum;
        return MAP_FAILED;
    }
    return at;
}

static pthread_once_t nodes_known = PTHREAD_ONCE_INIT;
static spw_id_set host_nodes; /* all but GPUs'; none where there is no such GPU */

static void
find_nodes(void)
{
    spw_id_set of_gpus;
    if (spw_gpu_nodes("", &of_gpus) == 0 || !spw_memory_nodes("", &host_nodes))
        return;
    for (uint32_t i = 0; i < SPW_IDS_MAX / 64; i++)
        host_nodes.bits[i] &= ~of_gpus.bits[i];
}

/*
 * On several nodes in turns; else anywhere but in a GPU's memory, of which the kernel gives pages as soon as the node nearby is full of
 * files. A hint, and only where nobody has chosen: a process under numactl keeps what it was given.
 */
static void
choose_nodes(void *p, uint64_t bytes, const spw_id_set *nodes)
{
    const bool turns = nodes != NULL && spw_id_set_count(nodes) > 1;
    unsigned long mask[SPW_IDS_MAX / 64];
    int mode;
    _Static_assert(sizeof mask == sizeof nodes->bits, "the kernel's masks are of longs");
    (void)pthread_once(&nodes_known, find_nodes);
    if (!turns && spw_id_set_count(&host_nodes) == 0)
        return;
    memcpy(mask, turns ? nodes->bits : host_nodes.bits, sizeof mask);
    if (get_mempolicy(&mode, NULL, 0, NULL, 0) == 0 && mode == MPOL_DEFAULT)
        (void)mbind(p, bytes, turns ? MPOL_INTERLEAVE : MPOL_BIND, mask, SPW_IDS_MAX + 1, 0);
}

typedef struct touch_job {
    volatile char *base;
    uint64_t bytes, page;
} touch_job;

static void
touch_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const touch_job *job = ctx;
    uint64_t at = part_idx * TOUCH_BYTES, end = job->bytes - at < TOUCH_BYTES ? job->bytes : at + TOUCH_BYTES;
    (void)worker_idx;
    for (; at < end; at += job->page)
        job->base[at] = 0;
}

/* Every page: the kernel finds it and clears it now. It clears a few GB a second per thread, so large regions get several. */
static void
touch(void *base, uint64_t bytes, uint64_t page)
{
    touch_job job = {base, bytes, page};
    spw_pool *pool = NULL; /* NULL, also where none can be made: this thread alone */
    if (bytes >= TOUCH_TOGETHER) {
        uint32_t cpus = spw_cpu_allowed_count();
        (void)spw_pool_create(&pool, cpus < TOUCH_THREADS ? cpus : TOUCH_THREADS, "spw-touch", NULL);
    }
    spw_pool_run(pool, (uint32_t)((bytes + TOUCH_BYTES - 1) / TOUCH_BYTES), touch_part, &job);
    spw_pool_destroy(pool);
}

static spw_status
map_region(spw_region *region, int fd, uint64_t bytes, unsigned flags, const spw_id_set *nodes, spw_error *err)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), map_bytes;
    bool huge;
    char text[32];
    void *p;
    memset(region, 0, sizeof *region);
    if (bytes == 0)
        return SPW_OK;
    map_bytes = spw_round_up(bytes, page);
    huge = map_bytes >= HUGE_BYTES && (fd >= 0 || (flags & SPW_REGION_LAZY) == 0);
    if (bytes > UINT64_MAX / 2 || fault_now(&alloc_fault))
        return SPW_RAISE(err, SPW_ENOMEM, "mapping %s of memory", spw_format_bytes(text, sizeof text, bytes));
    p = map_aligned(map_bytes, huge ? HUGE_BYTES : 0, fd);
    if (p == MAP_FAILED)
        return SPW_RAISE_SYS(err, errno, "mapping %s of memory", spw_format_bytes(text, sizeof text, bytes));
    if (huge)
        (void)madvise(p, map_bytes,
                      MADV_HUGEPAGE);  /* a hint: refused on kernels without THP, and then 4 KiB pages serve */
    choose_nodes(p, map_bytes, nodes); /* before the first touch, which settles where a page is */
    if (fd < 0 && (flags & SPW_REGION_LAZY) == 0)
        touch(p, map_bytes, page);
    region->base = p;
    region->bytes = region->map_bytes = map_bytes;
    region->counted_bytes = (flags & (SPW_REGION_LAZY | SPW_REGION_TABLE)) == 0 ? map_bytes : 0;
    region->locked = (flags & SPW_REGION_LOCK) != 0 && mlock(p, map_bytes) == 0;
    atomic_fetch_add(&live_allocs, 1);
    count_region(region->counted_bytes);
    return SPW_OK;
}

spw_status
spw_region_map(spw_region *region, uint64_t bytes, unsigned flags, spw_error *err)
{
    return map_region(region, -1, bytes, flags, NULL, err);
}

spw_status
spw_region_map_over(spw_region *region, uint64_t bytes, unsigned flags, const spw_id_set *nodes, spw_error *err)
{
    return map_region(region, -1, bytes, flags, nodes, err);
}

spw_status
spw_region_map_fd(spw_region *region, int fd, uint64_t bytes, unsigned flags, spw_error *err)
{
    SPW_TRY(map_region(region, fd, bytes, flags, NULL, err));
#ifdef MADV_POPULATE_WRITE
    if (bytes > 0)
        (void)madvise(region->base, region->map_bytes, MADV_POPULATE_WRITE); /* a hint: saves a fault per page later */
#endif
    return SPW_OK;
}

void
spw_region_unmap(spw_region *region)
{
    if (region->base == NULL)
        return;
    (void)munmap(region->base, region->map_bytes);
    atomic_fetch_sub(&region_live, region->counted_bytes);
    atomic_fetch_sub(&live_allocs, 1);
    memset(region, 0, sizeof *region);
}

uint64_t
spw_region_bytes_live(void)
{
    return atomic_load(&region_live);
}

uint64_t
spw_region_bytes_peak(void)
{
    return atomic_load(&region_peak);
}

void *
spw_carve_take(spw_carve *carve, uint64_t bytes)
{
    uint64_t need = spw_round_up(bytes, 4096);
    void *p = carve->base + carve->used;
    if (need < bytes || need > carve->bytes - carve->used)
        return NULL;
    carve->used += need;
    return p;
}

bool
spw_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

bool
spw_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* A line "name: n kB" of a file below /proc/self; 0: there is none. */
static uint64_t
status_bytes(const char *path, const char *name)
{
    char line[256];
    unsigned long long kib = 0;
    size_t n = strlen(name);
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (strncmp(line, name, n) == 0 && sscanf(line + n, ": %llu", &kib) == 1)
            break;
    }
    if (f != NULL)
        fclose(f);
    return kib * 1024u;
}

uint64_t
spw_process_rss_bytes(void)
{
    uint64_t bytes = status_bytes("/proc/self/smaps_rollup", "Rss"); /* counted; statm is off by pages per CPU */
    return bytes > 0 ? bytes : status_bytes("/proc/self/status", "VmRSS");
}

uint64_t
spw_process_rss_peak_bytes(void)
{
    return status_bytes("/proc/self/status", "VmHWM"); /* getrusage() also tells what the parent was before exec */
}

uint64_t
spw_touched_bytes(uint64_t bytes)
{
    char line[64] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    bool always = f != NULL && fgets(line, sizeof line, f) != NULL && strstr(line, "[always]") != NULL;
    if (f != NULL)
        fclose(f);
    return always && bytes > 0 ? spw_round_up(bytes, HUGE_BYTES) : spw_round_up(bytes, 4096);
}

bool
spw_parse_bytes(const char *text, uint64_t *bytes_out)
{
    static const struct {
        const char *suffix;
        double factor;
    } units[] = {{"", 1},       {"B", 1},         {"KB", 1e3},         {"MB", 1e6},           {"GB", 1e9},
                 {"TB", 1e12},  {"KiB", 1024.0},  {"MiB", 1048576.0},  {"GiB", 1073741824.0}, {"TiB", 1099511627776.0},
                 {"K", 1024.0}, {"M", 1048576.0}, {"G", 1073741824.0}, {"T", 1099511627776.0}};
    char *end;
    double value;
    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    value = strtod(text, &end);
    if (errno != 0 || end != text + strspn(text, "0123456789.")) /* no exponents, no hexadecimal */
        return false;
    while (*end == ' ')
        end++;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(end, units[i].suffix) == 0) {
            value *= units[i].factor;
            if (!(value < 9.0e18))
                return false;
            *bytes_out = (uint64_t)value;
            return true;
        }
    }
    return false;
}

char *
spw_format_bytes(char *buf, size_t buf_bytes, uint64_t bytes)
{
    static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    int unit = 0;
    while (value >= 1024 && unit < 6) {
        value /= 1024;
        unit++;
    }
    snprintf(buf, buf_bytes,
             value < 10 && unit > 0    ? "%.2f %s"
             : value < 100 && unit > 0 ? "%.1f %s"
                                       : "%.0f %s",
             value, names[unit]);
    return buf;
}
