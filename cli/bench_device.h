/* What `bench gemm` and `bench attention` share: arrays on a device, a row that is timed and checked, and their table. */
#ifndef SPW_CLI_BENCH_DEVICE_H
#define SPW_CLI_BENCH_DEVICE_H

#include "cli.h"

enum { BENCH_REPS_MAX = 200, BENCH_PATTERN = 1 << 16, BENCH_ARRAYS = 12, BENCH_SAMPLES = 48 };

typedef struct device_bench device_bench;
typedef struct device_row device_row;
/* What a row times; only queued. */
typedef void (*device_work)(device_bench *b, const device_row *r);
/* Counts samples of its result that are wrong. */
typedef void (*device_check)(device_bench *b, device_row *r);

struct device_row {
    const char *name;
    void *a[9];       /* its arrays on the device */
    uint64_t M, N, K; /* gemm */
    enum { PLAIN, UP, DOWN, HEAD } use;
    uint64_t experts;            /* gemm: M rows over so many, and W and DW are theirs; 0: none */
    bool in_out;                 /* and so their weights lie */
    spw_attention_shape shape;   /* attention */
    spw_delta_shape rule;        /* and of a row of linear attention */
    const char *what;            /* "forward", "backward" */
    device_work work;            /* what it times */
    double flops, limit_flops_s; /* of one call; the peak or what the square product reached */
    uint64_t wrong;
    uint32_t reps;
    double seconds[BENCH_REPS_MAX], p50;
};

struct device_bench {
    const char *name; /* "gemm", "attention" */
    const char *device;
    spw_dtype dtype;
    double seconds;
    bool json, smoke;
    spw_gpu *gpu;
    spw_gpu_queue *queue;
    spw_dtype type; /* what the device computes in */
    float pattern[BENCH_PATTERN];
    void *arrays[BENCH_ARRAYS];
    uint32_t array_count;
    void *square[3]; /* the ceiling's product; NULL: the peak is known */
    uint64_t square_side;
    spw_error err; /* the first failure */
};

/* The whole command: options, the device, rows_fn with its rows, which returns how many samples are wrong, and the exit code. */
int cli_device_run_bench(const char *name, uint64_t (*rows_fn)(device_bench *b), int argc, char **argv);

/* An array on the device; NULL after a failure, which is kept. */
void *cli_device_take(device_bench *b, uint64_t bytes);
/* Element i is pattern[(i + shift) % BENCH_PATTERN] in the compute type, which holds it exactly. */
void *cli_device_take_filled(device_bench *b, uint64_t elems, uint64_t shift);
/* Frees all arrays but for the first `from`. */
void cli_device_give_back(device_bench *b, uint32_t from);
/* Times a row, checks it unless check is NULL, and prints it; returns how many samples are wrong. Nothing after a failure. */
uint64_t cli_device_run_row(device_bench *b, device_row *r, const char *what, double flops, device_work work,
                            device_check check);
/* The rows of bench attention that are linear attention; how many samples are wrong. */
uint64_t cli_bench_delta_rows(device_bench *b);
/* Is one element of an array of the compute type what it should be, within its rounding and the sum's? */
bool cli_device_is_near(device_bench *b, const void *array, uint64_t i, double want, double scale);

/* Element i of an array that was filled with that shift. Here, as the sums in fp64 take it millions of times. */
static inline double
pattern_at(const device_bench *b, uint64_t i, uint64_t shift)
{
    return (double)b->pattern[(i + shift) % BENCH_PATTERN];
}

#endif
