/*
 * Layernorm and rmsnorm of the cpu device, row by row. Gradients of what rows are multiplied by and moved by are cut by columns, so that rows
 * are added up in their order on one worker.
 */
#include "cpu_internal.h"

/* Without means they are rmsnorm's. */
typedef struct norm_rows {
    const cpu_kernels *k;
    const float *x, *g, *b; /* (rows, C), (C), (C) */
    float *y, *mean, *rstd; /* (rows, C), (rows), (rows) */
    const float *dy, *onto;
    float *dx, *dg, *db;
    uint64_t rows, C, stride; /* of rows */
    float eps, offset;
} norm_rows;

static void
forward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const norm_rows *n = ctx;
    uint64_t first, count = cpu_slice(n->rows, cpu_row_grain(n->C), part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + count; r++) {
        uint64_t o = r * n->stride;
        if (n->mean != NULL)
            n->k->layernorm_row(n->y + o, n->mean + r, n->rstd + r, n->x + o, n->g, n->b, n->C, n->eps);
        else
            n->k->rmsnorm_row(n->y + o, n->rstd + r, n->x + o, n->g, n->offset, n->C, n->eps);
    }
}

static void
dx_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const norm_rows *n = ctx;
    uint64_t first, count = cpu_slice(n->rows, cpu_row_grain(n->C), part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + count; r++) {
        uint64_t o = r * n->stride;
        const float *onto = n->onto != NULL ? n->onto + o : NULL;
        if (n->mean != NULL)
            n->k->layernorm_dx_row(n->dx + o, onto, n->dy + o, n->x + o, n->g, n->mean[r], n->rstd[r], n->C);
        else
            n->k->rmsnorm_dx_row(n->dx + o, onto, n->dy + o, n->x + o, n->g, n->offset, n->rstd[r], n->C);
    }
}

static void
dg_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const norm_rows *n = ctx;
    uint64_t first, count = cpu_slice(n->C, CPU_COL_GRAIN, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = 0; r < n->rows; r++) {
        uint64_t o = r * n->stride + first;
        if (n->dg != NULL)
            n->k->norm_dg_row(n->dg + first, n->dy + o, n->x + o, n->mean != NULL ? n->mean[r] : 0.0f, n->rstd[r],
                              count);
        if (n->db != NULL)
            n->k->axpy(n->db + first, 1.0f, n->dy + o, count);
    }
}

static void
forward(spw_gpu_queue *q, norm_rows *n)
{
    n->k = spw__cpu_kernels(q);
    spw__cpu_run(q, cpu_slices(n->rows, cpu_row_grain(n->C)), forward_part, n);
}

/* dg reads what dx, which may be dy or onto, replaces. */
static void
backward(spw_gpu_queue *q, norm_rows *n)
{
    n->k = spw__cpu_kernels(q);
    if (n->dg != NULL || n->db != NULL)
        spw__cpu_run(q, cpu_slices(n->C, CPU_COL_GRAIN), dg_part, n);
    if (n->dx != NULL)
        spw__cpu_run(q, cpu_slices(n->rows, cpu_row_grain(n->C)), dx_part, n);
}

void
spw__cpu_layernorm(spw_gpu_queue *q, act *y, float *mean, float *rstd, const act *x, const act *g, const act *b,
                   uint64_t M, uint64_t C, float eps)
{
    forward(
        q, &(norm_rows){
               .y = y, .mean = mean, .rstd = rstd, .x = x, .g = g, .b = b, .rows = M, .C = C, .stride = C, .eps = eps});
}

void
spw__cpu_rmsnorm(spw_gpu_queue *q, act *y, float *rstd, const act *x, const act *g, float offset, uint64_t M,
                 uint64_t C, uint64_t stride, float eps)
{
    forward(
        q,
        &(norm_rows){
            .y = y, .rstd = rstd, .x = x, .g = g, .offset = offset, .rows = M, .C = C, .stride = stride, .eps = eps});
}

void
spw__cpu_layernorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, float *db, const act *dy,
                            const act *x, const act *g, const float *mean, const float *rstd, uint64_t M, uint64_t C)
{
    backward(q, &(norm_rows){.dx = dx,
                             .onto = onto,
                             .dg = dg,
                             .db = db,
                             .dy = dy,
                             .x = x,
                             .g = g,
                             .mean = (float *)(uintptr_t)mean,
                             .rstd = (float *)(uintptr_t)rstd,
                             .rows = M,
                             .C = C,
                             .stride = C});
}

void
spw__cpu_rmsnorm_backward(spw_gpu_queue *q, act *dx, const act *onto, float *dg, const act *dy, const act *x,
                          const act *g, float offset, const float *rstd, uint64_t M, uint64_t C, uint64_t stride)
{
    backward(q, &(norm_rows){.dx = dx,
                             .onto = onto,
                             .dg = dg,
                             .dy = dy,
                             .x = x,
                             .g = g,
                             .rstd = (float *)(uintptr_t)rstd,
                             .offset = offset,
                             .rows = M,
                             .C = C,
                             .stride = stride});
}
