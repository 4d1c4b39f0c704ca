/* spillway bench: picks the benchmark, one file each; what they share is how a build is named in their headers. */
#include "cli.h"
#include <stdio.h>

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

int
cli_bench(int argc, char **argv)
{
    if (argc < 2)
        return cli_usage("bench", "which one is needed: io, adam, copy, gemm or attention");
    if (strcmp(argv[1], "adam") == 0)
        return cli_bench_adam(argc - 1, argv + 1);
    if (strcmp(argv[1], "io") == 0)
        return cli_bench_io(argc - 1, argv + 1);
    if (strcmp(argv[1], "copy") == 0)
        return cli_bench_copy(argc - 1, argv + 1);
    if (strcmp(argv[1], "gemm") == 0)
        return cli_bench_gemm(argc - 1, argv + 1);
    if (strcmp(argv[1], "attention") == 0)
        return cli_bench_attention(argc - 1, argv + 1);
    return cli_usage("bench", "there is no benchmark %s", argv[1]);
}
