/* What `bench io` and `tune` share: a row of medians over interleaved rounds, and JSON. */
#ifndef SPW_CLI_BENCH_IO_H
#define SPW_CLI_BENCH_IO_H

#include "cli.h"
#include <stdio.h>

typedef struct bench_row {
    spw_aio_pattern pattern;
    spw_aio_backend backend;
    uint64_t block_bytes, wrong;
    uint32_t depth, threads, rounds; /* threads: 0 for io_uring */
    double gb_s, burst_gb_s, settled_gb_s, p50_us, p99_us, cpu_s_per_gb;
    double bare_gb_s, bare_cpu_s_per_gb; /* 0: not measured */
    double device_ratio;                 /* 0: unknown, device_note says why */
    bool direct;
    char device_note[128];
} bench_row;

/* Measures in rounds, with the bare ring in turn when asked. */
spw_status cli_bench_row(spw_aio_bench *bench, const spw_aio_bench_run *run, bool with_bare, uint32_t rounds,
                         bench_row *row, spw_error *err);
/* A JSON string, with its quotes. */
void cli_bench_write_text(FILE *f, const char *text);
/* One JSON object on a line of its own. */
void cli_bench_print_json(const bench_row *row, const char *path);

#endif
