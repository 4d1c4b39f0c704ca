/*
 * Linear layers of the cpu device: products (gemm.c), what is added to them, and sums of columns; and rows of which each has its own bits.
 */
#include "cpu_internal.h"

typedef struct linear {
    const cpu_kernels *k;
    float *y;                      /* (M, N) */
    const float *x, *w, *b, *onto; /* (M, K); (N, K), or (K, N); (N); (M, N) */
    uint64_t M, N, K;
} linear;

/* y = onto + b, either of which may be NULL. */
static void
begin_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const linear *l = ctx;
    uint64_t first, n = cpu_slice(l->M, cpu_row_grain(l->N), part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = first; r < first + n; r++) {
        float *y = l->y + r * l->N;
        if (l->onto != NULL && l->b != NULL)
            l->k->add(y, l->onto + r * l->N, l->b, l->N);
        else
            memcpy(y, l->onto != NULL ? l->onto + r * l->N : l->b, l->N * sizeof *y);
    }
}

/* What a product is then added to: no second pass over y. */
static void
begin(spw_gpu_queue *q, float *y, const float *onto, const float *b, uint64_t M, uint64_t N)
{
    linear l = {.k = spw__cpu_kernels(q), .y = y, .onto = onto, .b = b, .M = M, .N = N};
    spw__cpu_run(q, cpu_slices(M, cpu_row_grain(N)), begin_part, &l);
}

/* y (N) += sums of x's columns, (M, N), rows in order. */
static void
column_sum_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const linear *l = ctx;
    uint64_t first, n = cpu_slice(l->N, CPU_COL_GRAIN, part_idx, &first);
    (void)worker_idx;
    for (uint64_t r = 0; r < l->M; r++)
        l->k->axpy(l->y + first, 1.0f, l->x + r * l->N + first, n);
}

/*
 * A few rows against weights that come from memory once: each part reads its weights in stripes and takes all rows to one
 * stripe. Every element is a dot product in one fixed order, unlike BLAS', which depends on the number of rows.
 */
enum { STRIPE = 512 };

static void
dots_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const linear *l = ctx;
    const uint64_t N = l->N, K = l->K;
    uint64_t first, n = cpu_slice(N, cpu_row_grain(K), part_idx, &first);
    float four[4];
    (void)worker_idx;
    for (uint64_t j = first; j < first + n; j++) {
        float bias = l->b != NULL ? l->b[j] : 0.0f;
        uint64_t m = 0;
        for (; m + 4 <= l->M; m += 4) {
            l->k->dot4(four, l->x + m * K, K, l->w + j * K, K);
            for (int i = 0; i < 4; i++)
                l->y[(m + (uint64_t)i) * N + j] = four[i] + bias;
        }
        for (; m < l->M; m++)
            l->y[m * N + j] = l->k->dot(l->x + m * K, l->w + j * K, K) + bias;
    }
}

static void
axpys_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const linear *l = ctx;
    const uint64_t N = l->N, K = l->K;
    uint64_t first, n = cpu_slice(N, STRIPE, part_idx, &first), k = 0;
    float *y = l->y + first;
    (void)worker_idx;
    for (uint64_t m = 0; m < l->M; m++) {
        if (l->b != NULL)
            memcpy(y + m * N, l->b + first, n * sizeof *y);
        else
            memset(y + m * N, 0, n * sizeof *y);
    }
    for (; k + 4 <= K; k += 4)
        for (uint64_t m = 0; m < l->M; m++)
            l->k->axpy4(y + m * N, l->x + m * K + k, l->w + k * N + first, N, n);
    for (; k < K; k++)
        for (uint64_t m = 0; m < l->M; m++)
            l->k->axpy(y + m * N, l->x[m * K + k], l->w + k * N + first, n);
}

static void
linear_by_row(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N, uint64_t K,
              bool in_out)
{
    linear l = {.k = spw__cpu_kernels(q), .y = y, .x = x, .w = w, .b = b, .M = M, .N = N, .K = K};
    spw__cpu_run(q, cpu_slices(N, in_out ? STRIPE : cpu_row_grain(K)), in_out ? axpys_part : dots_part, &l);
}

void
spw__cpu_linear(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N, uint64_t K,
                unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT;
    if (flags & SPW_OP_BY_ROW) {
        linear_by_row(q, y, x, w, b, M, N, K, in_out);
        return;
    }
    if (b != NULL)
        begin(q, y, NULL, b, M, N);
    spw__cpu_gemm(q, false, !in_out, M, N, K, x, K, w, in_out ? N : K, b != NULL ? 1.0f : 0.0f, y, N);
}

void
spw__cpu_linear_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *w,
                         uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT;
    float before = flags & SPW_OP_SET_DW ? 0.0f : 1.0f;
    linear sums = {.k = spw__cpu_kernels(q), .y = db, .x = dy, .M = M, .N = N};
    if (db != NULL)
        spw__cpu_run(q, cpu_slices(N, CPU_COL_GRAIN), column_sum_part, &sums);
    if (dw != NULL && in_out)
        spw__cpu_gemm(q, true, false, K, N, M, x, K, dy, N, before, dw, N);
    else if (dw != NULL)
        spw__cpu_gemm(q, true, false, N, K, M, dy, N, x, K, before, dw, K);
    if (dx != NULL)
        spw__cpu_gemm(q, false, in_out, M, K, N, dy, N, w, in_out ? N : K, flags & SPW_OP_ACC_DX ? 1.0f : 0.0f, dx, K);
}

void
spw__cpu_linear_add(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *w, const act *b, uint64_t M,
                    uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT;
    if (flags & SPW_OP_BY_ROW) {
        SPW_ASSERT(y != onto);
        linear_by_row(q, y, x, w, b, M, N, K, in_out);
        spw__cpu_add(q, y, onto, y, M * N);
        return;
    }
    if (b != NULL || y != onto)
        begin(q, y, onto, b, M, N);
    spw__cpu_gemm(q, false, !in_out, M, N, K, x, K, w, in_out ? N : K, 1.0f, y, N);
}

void
spw__cpu_product(spw_gpu_queue *q, act *y, const act *onto, float by, const act *x, const act *w, float scale,
                 uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = flags & SPW_OP_W_IN_OUT, turned = flags & SPW_OP_X_IN_OUT;
    if (onto != NULL)
        begin(q, y, onto, NULL, M, N);
    spw__cpu_gemm_scaled(q, turned, !in_out, M, N, K, scale, x, turned ? M : K, w, in_out ? N : K,
                         onto != NULL ? by : 0.0f, y, N);
}

void
spw__cpu_linear_gelu(spw_gpu_queue *q, act *y, act *gelu_in, const act *x, const act *w, const act *b, uint64_t M,
                     uint64_t N, uint64_t K, unsigned flags)
{
    spw__cpu_linear(q, gelu_in, x, w, b, M, N, K, flags);
    spw__cpu_curve(q, SPW_CURVE_GELU, y, gelu_in, M * N);
}

void
spw__cpu_linear_gelu_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x,
                              const act *gelu_in, const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    SPW_ASSERT((flags & SPW_OP_ACC_DX) == 0);
    spw__cpu_linear_backward(q, dx, dw, db, dy, x, w, M, N, K, flags);
    if (dx != NULL)
        spw__cpu_curve_backward(q, SPW_CURVE_GELU, dx, dx, gelu_in, M * K, 0);
}
