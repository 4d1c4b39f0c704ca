/* spillway bench: picks the benchmark, one file each; what they share: how a build is named in their headers, and options. */
#include "cli.h"
#include <stdio.h>
#include <stdlib.h>

#ifndef __has_feature
#define __has_feature(x) 0
#endif

const char *
cli_build_name(void)
{
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
    return "asan";
#elif defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
    return "tsan";
#elif !defined(__OPTIMIZE__)
    return "debug";
#elif defined(SPW_CHECKED)
    return "checked";
#else
    return "release";
#endif
}

bool
cli_bench_sizes(const char *command, const char *list, uint64_t multiple, cli_sizes *out)
{
    const uint32_t most = sizeof out->bytes / sizeof out->bytes[0];
    out->count = 0;
    for (const char *at = list;; at++) {
        size_t len = strcspn(at, ",");
        char text[64];
        uint64_t size;
        snprintf(text, sizeof text, "%.*s", (int)(len < sizeof text ? len : sizeof text - 1), at);
        if (len >= sizeof text || !spw_parse_bytes(text, &size))
            return (void)cli_usage(command, "--size %s: \"%s\" is not a size such as 256KiB", list, text), false;
        if (size == 0 || size % multiple != 0 || size > (1ull << 40))
            return (void)cli_usage(command, "--size %s: %s is not a multiple of %llu bytes from %llu B to 1 TiB", list,
                                   text, (unsigned long long)multiple, (unsigned long long)multiple),
                   false;
        if (out->count == most)
            return (void)cli_usage(command, "--size %s: more than %u sizes", list, most), false;
        out->bytes[out->count++] = size;
        at += len;
        if (*at == '\0')
            return true;
    }
}

bool
cli_bench_seconds(const char *command, const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    if (end != text && *end == '\0' && *out > 0 && *out <= 3600)
        return true;
    (void)cli_usage(command, "--seconds %s is not a number above 0 and up to 3600", text);
    return false;
}

int
cli_bench(int argc, char **argv)
{
    if (argc < 2)
        return cli_usage("bench", "which one is needed: io, adam, copy, comm, gemm or attention");
    if (strcmp(argv[1], "adam") == 0)
        return cli_bench_adam(argc - 1, argv + 1);
    if (strcmp(argv[1], "io") == 0)
        return cli_bench_io(argc - 1, argv + 1);
    if (strcmp(argv[1], "copy") == 0)
        return cli_bench_copy(argc - 1, argv + 1);
    if (strcmp(argv[1], "comm") == 0)
        return cli_bench_comm(argc - 1, argv + 1);
    if (strcmp(argv[1], "gemm") == 0)
        return cli_bench_gemm(argc - 1, argv + 1);
    if (strcmp(argv[1], "attention") == 0)
        return cli_bench_attention(argc - 1, argv + 1);
    return cli_usage("bench", "there is no benchmark %s", argv[1]);
}
