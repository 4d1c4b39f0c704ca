/* Rows by their numbers, on the cpu device, and transposes: a part moves some rows. */
#include "cpu_internal.h"

enum { PART_BYTES = 256 << 10 };

typedef struct rows_args {
    char *out;
    const char *in;
    const int32_t *rows;
    uint64_t count, row_bytes, grain; /* rows of a part */
    bool put;
} rows_args;

static void
rows_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const rows_args *a = ctx;
    uint64_t first, end = cpu_slice(a->count, a->grain, part_idx, &first);
    (void)worker_idx;
    end += first;
    for (uint64_t i = first; i < end; i++) {
        const uint64_t row = (uint64_t)a->rows[i];
        memcpy(a->out + (a->put ? row : i) * a->row_bytes, a->in + (a->put ? i : row) * a->row_bytes, a->row_bytes);
    }
}

static void
run(spw_gpu_queue *q, rows_args *a)
{
    a->grain = PART_BYTES / a->row_bytes + 1;
    spw__cpu_run(q, cpu_slices(a->count, a->grain), rows_part, a);
}

void
spw__cpu_take_rows(spw_gpu_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes)
{
    run(q, &(rows_args){.out = out, .in = in, .rows = rows, .count = count, .row_bytes = row_bytes});
}

void
spw__cpu_put_rows(spw_gpu_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes)
{
    run(q, &(rows_args){.out = out, .in = in, .rows = rows, .count = count, .row_bytes = row_bytes, .put = true});
}

typedef struct transpose_args {
    float *y, scale;
    const float *x;
    uint64_t M, N, grain; /* grain: rows of a part */
    bool add;
} transpose_args;

/* By sixteen rows, which are a cache line of the result. */
static void
transpose_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const transpose_args *a = ctx;
    uint64_t first, end = cpu_slice(a->M, a->grain, part_idx, &first);
    (void)worker_idx;
    end += first;
    for (uint64_t at = first; at < end; at += 16)
        for (uint64_t n = 0; n < a->N; n++)
            for (uint64_t m = at; m < end && m < at + 16; m++) {
                float *y = a->y + n * a->M + m;
                *y = (a->add ? *y : 0.0f) + a->scale * a->x[m * a->N + n];
            }
}

static void
transpose(spw_gpu_queue *q, transpose_args *a)
{
    a->grain = spw_round_up(PART_BYTES / (a->N * sizeof(float) + 1) + 1, 16);
    spw__cpu_run(q, cpu_slices(a->M, a->grain), transpose_part, a);
}

void
spw__cpu_transpose(spw_gpu_queue *q, act *y, const act *x, float scale, uint64_t M, uint64_t N)
{
    transpose(q, &(transpose_args){.y = y, .x = x, .scale = scale, .M = M, .N = N});
}

void
spw__cpu_transpose_sum(spw_gpu_queue *q, float *y, const float *x, float scale, uint64_t M, uint64_t N)
{
    transpose(q, &(transpose_args){.y = y, .x = x, .scale = scale, .M = M, .N = N, .add = true});
}
