/*
 * What the machine is: time, allowed CPUs, memory limits and instruction sets.
 */
#include "spw_base.h"
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

uint64_t
spw_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void
spw_sleep_ns(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
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

uint32_t
spw_cpu_allowed_count(void)
{
    cpu_set_t set;
    char line[128];
    unsigned long long quota, period;
    uint32_t count = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        count = (uint32_t)CPU_COUNT(&set);
    if (read_line("/sys/fs/cgroup/cpu.max", line, sizeof line) && sscanf(line, "%llu %llu", &quota, &period) == 2 &&
        period > 0) {
        uint32_t by_quota = (uint32_t)((quota + period - 1) / period);
        if (by_quota < count)
            count = by_quota;
    }
    return count > 0 ? count : 1;
}

uint64_t
spw_cgroup_memory_bytes(void)
{
    static const char *const paths[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    char line[128];
    unsigned long long bytes;
    for (int i = 0; i < 2; i++) {
        if (read_line(paths[i], line, sizeof line) && sscanf(line, "%llu", &bytes) == 1 && bytes < (1ull << 62))
            return bytes;
    }
    return UINT64_MAX;
}

uint64_t
spw_memory_available_bytes(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return 0;
    while (fgets(line, sizeof line, f) != NULL && sscanf(line, "MemAvailable: %llu", &kib) != 1) {
    }
    fclose(f);
    return kib * 1024u;
}

spw_isa
spw_cpu_isa_native(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return SPW_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return SPW_ISA_AVX2;
#endif
    return SPW_ISA_SCALAR;
}

const char *
spw_isa_name(spw_isa isa)
{
    static const char *const names[SPW_ISA_COUNT] = {"scalar", "avx2", "avx512"};
    return (unsigned)isa < SPW_ISA_COUNT ? names[isa] : "unknown";
}

spw_isa
spw_cpu_isa(void)
{
    spw_isa best = spw_cpu_isa_native();
    const char *wish = getenv("SPW_ISA");
    for (int i = 0; wish != NULL && i < SPW_ISA_COUNT; i++) {
        if (strcmp(wish, spw_isa_name((spw_isa)i)) == 0 && (spw_isa)i < best)
            best = (spw_isa)i;
    }
    return best;
}
