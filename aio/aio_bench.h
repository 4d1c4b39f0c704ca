/*
 * aio_bench.h - what the two files of the measurement share: aio_bench.c owns the files, the pages' expected contents
 * and the result; aio_bench_loop.c keeps transfers going on a context or on a bare ring and takes times.
 */
#ifndef SPW_AIO_BENCH_H
#define SPW_AIO_BENCH_H

#include "aio_internal.h"

enum { SPW__BENCH_LATENCY_MAX = 1 << 20, SPW__BENCH_WINDOW_COUNT = 64 };

/* Where each stream of a file goes on; offsets are multiples of the request. */
typedef struct spw__bench_stream {
    uint64_t begin, end, at;
} spw__bench_stream;

struct spw_aio_bench {
    uint32_t dir_count;
    uint64_t file_bytes;
    char *dirs[SPW_AIO_BENCH_DIRS_MAX], *paths[SPW_AIO_BENCH_DIRS_MAX];
    int fds[SPW_AIO_BENCH_DIRS_MAX]; /* where there is a path: it holds the file, which has no name any more */
    dev_t devs[SPW_AIO_BENCH_DIRS_MAX];
    uint8_t *generations[SPW_AIO_BENCH_DIRS_MAX]; /* (file_bytes / 4096): of the last write of a page */
    uint8_t generation;                           /* of the writes of this run */
    uint64_t rotation;                            /* which pages of a block were stamped last */
    const volatile int *stop;
    float *latency_us; /* (SPW__BENCH_LATENCY_MAX) */
};

/* A page holds its number and generation in two words, and in all others what every page holds there. */
static inline uint64_t
spw__bench_stamp(uint64_t file_idx, uint64_t page_idx, uint8_t generation)
{
    return ((page_idx << 8 | generation) + 1) * 0x9e3779b97f4a7c15u ^ file_idx << 56;
}
/*
 * Prepares a buffer, which held the pages at old_offset (UINT64_MAX: none), for being written at offset: stamps its
 * pages, or one in `every`, and notes their generation.
 */
void spw__bench_stamp_pages(spw_aio_bench *bench, uint32_t file_idx, uint64_t old_offset, uint64_t offset,
                            uint64_t bytes, uint64_t every, void *buf);
/* First and last page of a buffer that was read; returns how many are wrong. */
uint64_t
spw__bench_check_ends(const spw_aio_bench *bench, uint32_t file_idx, uint64_t offset, uint64_t bytes, const void *buf);

/* What a loop counted. */
typedef struct spw__bench_count {
    uint64_t bytes[2]; /* read, written */
    uint64_t requests, wrong, latency_count;
    uint64_t begin_ns, end_ns;
    uint64_t window_bytes[SPW__BENCH_WINDOW_COUNT]; /* landed in each part of the duration; the rest in the last */
    uint64_t window_ns;
} spw__bench_count;

void spw__bench_land(spw_aio_bench *bench, spw__bench_count *count, spw_aio_op op, uint64_t bytes, uint64_t start_ns);

/* Reads and writes of one block each, a full queue of them per file, on aio; or on a bare ring when aio is NULL. */
spw_status spw__bench_blocks(spw_aio_bench *bench, const spw_aio_bench_run *run, spw_aio *aio, spw_aio_file **files,
                             const spw_region *region, spw__bench_count *count, spw_error *err);
uint64_t spw__bench_blocks_bytes(const spw_aio_bench_run *run); /* of the region */
/* The pattern of a training step, on aio. */
spw_status spw__bench_swap(spw_aio_bench *bench, const spw_aio_bench_run *run, spw_aio *aio, spw_aio_file **files,
                           const spw_region *region, spw__bench_count *count, spw_error *err);
uint64_t spw__bench_swap_bytes(const spw_aio_bench_run *run);

#endif
