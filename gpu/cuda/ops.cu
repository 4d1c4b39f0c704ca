/*
 * Launches of the row-wise and element-wise operations. Grids depend on shapes alone. An operation is written once and
 * dispatched by the device's compute type.
 */
#include "cuda_internal.h"
#include "elements.cuh"
#include "norms.cuh"
#include "rows.cuh"

static unsigned
element_blocks(uint64_t n)
{
    return spw__cuda_blocks(n, ELEMENTS_PER_BLOCK);
}

/* Threads for a row of C, eight elements each. */
static unsigned
row_threads(uint64_t C)
{
    uint64_t threads = spw_round_up((C + 7) / 8, 32);
    return threads > 512 ? 512 : (unsigned)threads;
}

void
spw__cuda_add_scaled(spw_gpu_queue *queue, act *y, const act *a, const act *b, float scale, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (n == 0)
        return;
    BY_TYPE(q, LAUNCH(q, element_blocks(n), ELEMENT_THREADS, 0, (add_scaled_kernel<T>), (T *)y, (const T *)a,
                      (const T *)b, scale, n, spw__cuda_aligned(y, a, b)));
}

void
spw__cuda_add(spw_gpu_queue *queue, act *y, const act *a, const act *b, uint64_t n)
{
    spw__cuda_add_scaled(queue, y, a, b, 1.0f, n);
}

void
spw__cuda_add_scaled_by(spw_gpu_queue *queue, act *y, const act *a, const act *b, const act *terms, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (n == 0)
        return;
    BY_TYPE(q, LAUNCH(q, element_blocks(n), ELEMENT_THREADS, 0, (add_scaled_by_kernel<T>), (T *)y, (const T *)a,
                      (const T *)b, (const T *)terms, n, spw__cuda_aligned(y, a, b)));
}

void
spw__cuda_soft_cap(spw_gpu_queue *queue, act *y, const act *x, float cap, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (n == 0)
        return;
    BY_TYPE(q, LAUNCH(q, element_blocks(n), ELEMENT_THREADS, 0, (soft_cap_kernel<T>), (T *)y, (const T *)x, cap, n,
                      spw__cuda_aligned(y, x)));
}

template <spw_curve kind>
static void
curve(cuda_queue *q, act *y, const act *x, uint64_t n)
{
    BY_TYPE(q, LAUNCH(q, element_blocks(n), ELEMENT_THREADS, 0, (curve_kernel<T, kind>), (T *)y, (const T *)x, n,
                      spw__cuda_aligned(y, x)));
}

void
spw__cuda_curve(spw_gpu_queue *queue, spw_curve kind, act *y, const act *x, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (n == 0)
        return;
    switch (kind) {
    case SPW_CURVE_GELU_ERF: curve<SPW_CURVE_GELU_ERF>(q, y, x, n); break;
    case SPW_CURVE_RELU: curve<SPW_CURVE_RELU>(q, y, x, n); break;
    case SPW_CURVE_RELU_SQUARED: curve<SPW_CURVE_RELU_SQUARED>(q, y, x, n); break;
    default: curve<SPW_CURVE_GELU>(q, y, x, n); break;
    }
}

template <spw_curve kind>
static void
curve_backward(cuda_queue *q, act *dx, const act *dy, const act *x, uint64_t n, bool add)
{
    BY_TYPE(q, LAUNCH(q, element_blocks(n), ELEMENT_THREADS, 0, (curve_backward_kernel<T, kind>), (T *)dx,
                      (const T *)dy, (const T *)x, n, add, spw__cuda_aligned(dx, dy, x)));
}

void
spw__cuda_curve_backward(spw_gpu_queue *queue, spw_curve kind, act *dx, const act *dy, const act *x, uint64_t n,
                         unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool add = (flags & SPW_OP_ACC_DX) != 0;
    if (n == 0)
        return;
    switch (kind) {
    case SPW_CURVE_GELU_ERF: curve_backward<SPW_CURVE_GELU_ERF>(q, dx, dy, x, n, add); break;
    case SPW_CURVE_RELU: curve_backward<SPW_CURVE_RELU>(q, dx, dy, x, n, add); break;
    case SPW_CURVE_RELU_SQUARED: curve_backward<SPW_CURVE_RELU_SQUARED>(q, dx, dy, x, n, add); break;
    default: curve_backward<SPW_CURVE_GELU>(q, dx, dy, x, n, add); break;
    }
}

/* Eight elements of a row are loaded at once when every row begins where they can be. */
static bool
rows_aligned(uint64_t M, uint64_t C, uint64_t stride)
{
    return M == 1 || (C % 8 == 0 && stride % 8 == 0);
}

template <class T, spw_gate kind>
static void
gate_mul(cuda_queue *q, act *y, const act *gate, const act *up, uint64_t M, uint64_t C, uint64_t stride)
{
    LAUNCH(q, element_blocks(M * spw_round_up(C, 8)), ELEMENT_THREADS, 0, (gate_mul_kernel<T, kind>), (T *)y,
           (const T *)gate, (const T *)up, M, C, stride, rows_aligned(M, C, stride) && spw__cuda_aligned(y, gate, up));
}

void
spw__cuda_gate_mul(spw_gpu_queue *queue, spw_gate kind, act *y, const act *gate, const act *up, uint64_t M, uint64_t C,
                   uint64_t stride)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (M * C == 0)
        return;
    if (kind == SPW_GATE_SILU)
        BY_TYPE(q, gate_mul<T, SPW_GATE_SILU>(q, y, gate, up, M, C, stride));
    else if (kind == SPW_GATE_SIGMOID)
        BY_TYPE(q, gate_mul<T, SPW_GATE_SIGMOID>(q, y, gate, up, M, C, stride));
    else if (kind == SPW_GATE_SILU_CLAMPED)
        BY_TYPE(q, gate_mul<T, SPW_GATE_SILU_CLAMPED>(q, y, gate, up, M, C, stride));
    else if (kind == SPW_GATE_PLAIN)
        BY_TYPE(q, gate_mul<T, SPW_GATE_PLAIN>(q, y, gate, up, M, C, stride));
    else if (kind == SPW_GATE_CLAMPED)
        BY_TYPE(q,
                LAUNCH(q, element_blocks(M * spw_round_up(C, 8)), ELEMENT_THREADS, 0, (clamped_mul_kernel<T>), (T *)y,
                       (const T *)gate, M, C, stride, rows_aligned(M, C, stride) && spw__cuda_aligned(y, gate)));
    else
        BY_TYPE(q, gate_mul<T, SPW_GATE_GELU>(q, y, gate, up, M, C, stride));
}

template <class T, spw_gate kind>
static void
gate_mul_backward(cuda_queue *q, act *dgate, act *dup, const act *dy, const act *gate, const act *up, uint64_t M,
                  uint64_t C, uint64_t stride, unsigned flags)
{
    bool wide = rows_aligned(M, C, stride) && spw__cuda_aligned(dgate, dup, dy, gate) && spw__cuda_aligned(up);
    LAUNCH(q, element_blocks(M * spw_round_up(C, 8)), ELEMENT_THREADS, 0, (gate_mul_backward_kernel<T, kind>),
           (T *)dgate, (T *)dup, (const T *)dy, (const T *)gate, (const T *)up, M, C, stride,
           (flags & SPW_OP_ACC_DX) != 0, (flags & SPW_OP_ACC_DX2) != 0, wide);
}

void
spw__cuda_gate_mul_backward(spw_gpu_queue *queue, spw_gate kind, act *dgate, act *dup, const act *dy, const act *gate,
                            const act *up, uint64_t M, uint64_t C, uint64_t stride, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (M * C == 0 || (kind == SPW_GATE_CLAMPED && dgate == NULL))
        return;
    if (kind == SPW_GATE_SILU)
        BY_TYPE(q, gate_mul_backward<T, SPW_GATE_SILU>(q, dgate, dup, dy, gate, up, M, C, stride, flags));
    else if (kind == SPW_GATE_SIGMOID)
        BY_TYPE(q, gate_mul_backward<T, SPW_GATE_SIGMOID>(q, dgate, dup, dy, gate, up, M, C, stride, flags));
    else if (kind == SPW_GATE_SILU_CLAMPED)
        BY_TYPE(q, gate_mul_backward<T, SPW_GATE_SILU_CLAMPED>(q, dgate, dup, dy, gate, up, M, C, stride, flags));
    else if (kind == SPW_GATE_PLAIN)
        BY_TYPE(q, gate_mul_backward<T, SPW_GATE_PLAIN>(q, dgate, dup, dy, gate, up, M, C, stride, flags));
    else if (kind == SPW_GATE_CLAMPED)
        BY_TYPE(q,
                LAUNCH(q, element_blocks(M * spw_round_up(C, 8)), ELEMENT_THREADS, 0, (clamped_mul_backward_kernel<T>),
                       (T *)dgate, (const T *)dy, (const T *)gate, M, C, stride, (flags & SPW_OP_ACC_DX) != 0,
                       rows_aligned(M, C, stride) && spw__cuda_aligned(dgate, dy, gate)));
    else
        BY_TYPE(q, gate_mul_backward<T, SPW_GATE_GELU>(q, dgate, dup, dy, gate, up, M, C, stride, flags));
}

void
spw__cuda_dropout(spw_gpu_queue *queue, act *y, const act *x, uint64_t n, float p, uint64_t key, uint64_t counter_hi,
                  uint64_t first)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (n == 0)
        return;
    BY_TYPE(q, LAUNCH(q, element_blocks(n), ELEMENT_THREADS, 0, (dropout_kernel<T>), (T *)y, (const T *)x, n, p, key,
                      counter_hi, first, spw__cuda_aligned(y, x)));
}

/* ---------------------------------------------------------------- embedding and rope */

void
spw__cuda_embedding(spw_gpu_queue *queue, act *y, const int32_t *ids, const act *table, uint64_t first, uint64_t M,
                    uint64_t V, uint64_t C, bool add)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (M == 0)
        return;
    BY_TYPE(q, LAUNCH(q, (unsigned)M, row_threads(C), 0, (embedding_kernel<T>), (T *)y, ids, (const T *)table, first, V,
                      C, add, C % 8 == 0 && spw__cuda_aligned(y, table)));
}

void
spw__cuda_embedding_backward(spw_gpu_queue *queue, float *dtable, const act *dy, const int32_t *ids, uint64_t first,
                             uint64_t M, uint64_t V, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    int *leads;
    dim3 grid((unsigned)M, spw__cuda_blocks(C, EMBED_COLUMNS));
    if (M == 0 || V == 0 || (leads = (int *)spw__cuda_scratch(q, V * sizeof *leads)) == NULL)
        return;
    (void)spw__cuda_ok(q->gpu, cudaMemsetAsync(leads, 0x7f, V * sizeof *leads, q->stream), "zero");
    LAUNCH(q, spw__cuda_blocks(M, 256), 256, 0, (first_rows_kernel), leads, ids, M, first, V);
    BY_TYPE(q, LAUNCH(q, grid, EMBED_THREADS, 0, (embedding_backward_kernel<T>), dtable, (const T *)dy, ids, leads, M,
                      first, V, C));
}

template <class T, bool NEIGHBORS>
static void
rope_wide(cuda_queue *q, act *x, uint64_t stride, const float *cos_sin, const int32_t *places, uint64_t M,
          uint64_t positions, uint64_t H, uint64_t D, uint64_t R, uint64_t threads, int sign)
{
    LAUNCH(q, spw__cuda_blocks(threads, 256), 256, 0, (rope_wide_kernel<T, NEIGHBORS>), (T *)x, stride, cos_sin, places,
           (unsigned)M, (unsigned)positions, (unsigned)H, (unsigned)D, (unsigned)R, (float)sign);
}

void
spw__cuda_rope(spw_gpu_queue *queue, act *x, uint64_t stride, const float *cos_sin, const int32_t *places, uint64_t M,
               uint64_t T_, uint64_t H, uint64_t D, uint64_t R, bool neighbors, int sign)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t n = M * H * (R / 2), eights = n / (neighbors ? 4 : 8);
    bool whole = R % (neighbors ? 8 : 16) == 0 && D % 8 == 0 && stride % 8 == 0 && spw__cuda_aligned(x, cos_sin);
    if (n == 0)
        return;
    if (whole && M <= UINT32_MAX && T_ <= UINT32_MAX && eights <= UINT32_MAX - 256) {
        BY_TYPE(q, neighbors ? rope_wide<T, true>(q, x, stride, cos_sin, places, M, T_, H, D, R, eights, sign)
                             : rope_wide<T, false>(q, x, stride, cos_sin, places, M, T_, H, D, R, eights, sign));
        return;
    }
    BY_TYPE(q, LAUNCH(q, spw__cuda_blocks(n, 256), 256, 0, (rope_kernel<T>), (T *)x, stride, cos_sin, places, M, T_, H,
                      D, R, neighbors, (float)sign));
}

void
spw__cuda_copy_heads(spw_gpu_queue *queue, act *y, uint64_t y_stride, uint64_t y_head, const act *x, uint64_t x_stride,
                     uint64_t x_head, uint64_t M, uint64_t H, uint64_t D)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t n = M * H * ((D + 7) / 8);
    bool wide = (y_stride | y_head | x_stride | x_head | D) % 8 == 0 && spw__cuda_aligned(y, x);
    if (n > 0)
        BY_TYPE(q, LAUNCH(q, spw__cuda_blocks(n, 256), 256, 0, (copy_heads_kernel<T>), (T *)y, y_stride, y_head,
                          (const T *)x, x_stride, x_head, M, H, D, wide));
}

void
spw__cuda_sum_heads(spw_gpu_queue *queue, act *y, uint64_t y_stride, const act *x, uint64_t x_stride, uint64_t x_head,
                    uint64_t M, uint64_t H, uint64_t D)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t n = M * ((D + 7) / 8);
    bool wide = (y_stride | x_stride | x_head | D) % 8 == 0 && spw__cuda_aligned(y, x);
    SPW_ASSERT(H > 0);
    if (n > 0)
        BY_TYPE(q, LAUNCH(q, spw__cuda_blocks(n, 128), 128, 0, (sum_heads_kernel<T>), (T *)y, y_stride, (const T *)x,
                          x_stride, x_head, M, H, D, wide));
}

/* ---------------------------------------------------------------- norms */

template <class T, bool SCALED>
static void
column_sums(cuda_queue *q, float *of_sums, float *of_scaled, const void *a, const void *x, const float *mean,
            const float *rstd, uint64_t M, uint64_t C, uint64_t stride, uint64_t slices, uint64_t rows_per_slice)
{
    LAUNCH(q, dim3(spw__cuda_blocks(C, COLUMN_LANES * LANE_COLUMNS), (unsigned)slices), COLUMN_LANES * ROW_LANES, 0,
           (column_sums_kernel<T, SCALED>), of_sums, of_scaled, (const T *)a, (const T *)x, mean, rstd, M, C, stride,
           rows_per_slice, (C | stride) % LANE_COLUMNS == 0 && spw__cuda_aligned(a, x));
}

void
spw__cuda_add_slices(cuda_queue *q, float *sums, const float *of_sums, float *scaled, const float *of_scaled,
                     uint64_t C, uint64_t slices)
{
    two_sums both = {};
    unsigned count = 0;
    if (sums != NULL)
        both.of[count++] = slices_of{sums, of_sums};
    if (scaled != NULL)
        both.of[count++] = slices_of{scaled, of_scaled};
    LAUNCH(q, dim3(spw__cuda_blocks(C, COLUMN_LANES), count), COLUMN_LANES * SLICE_LANES, 0, (add_slices_kernel), both,
           C, (unsigned)slices);
}

void
spw__cuda_column_sums(cuda_queue *q, float *sums, float *scaled, const void *a, const void *x, const float *mean,
                      const float *rstd, uint64_t M, uint64_t C, uint64_t stride)
{
    uint64_t columns = spw__cuda_blocks(C, COLUMN_LANES * LANE_COLUMNS), slices = (M + 63) / 64, rows_per_slice;
    uint64_t most_slices;
    float *partial, *of_sums, *of_scaled;
    if (M == 0 || C == 0 || (sums == NULL && scaled == NULL))
        return;
    /* Hundreds of blocks, if there are so many rows; but slices are added up one by one. */
    most_slices = columns <= 2 ? 256 : columns < 8 ? 512 / columns : 64;
    slices = slices > most_slices ? most_slices : slices;
    rows_per_slice = (M + slices - 1) / slices;
    slices = (M + rows_per_slice - 1) / rows_per_slice;
    partial = (float *)spw__cuda_scratch(q, 2 * slices * C * sizeof *partial);
    if (partial == NULL)
        return;
    of_sums = sums != NULL ? partial : NULL;
    of_scaled = scaled != NULL ? partial + slices * C : NULL;
    if (scaled != NULL)
        BY_TYPE(q, column_sums<T, true>(q, of_sums, of_scaled, a, x, mean, rstd, M, C, stride, slices, rows_per_slice));
    else
        BY_TYPE(q, column_sums<T, false>(q, of_sums, NULL, a, NULL, NULL, NULL, M, C, stride, slices, rows_per_slice));
    spw__cuda_add_slices(q, sums, of_sums, scaled, of_scaled, C, slices);
}

enum { ROWS_OF_BLOCK = 8 }; /* that have a warp each */

template <class T, int EIGHTS, bool PLAIN>
static void
norm_rows(cuda_queue *q, T *y, float *mean, float *rstd, const T *x, const T *g, const T *b, float offset, uint64_t M,
          uint64_t C, uint64_t stride, float eps, bool wide)
{
    LAUNCH(q, spw__cuda_blocks(M, ROWS_OF_BLOCK), 32 * ROWS_OF_BLOCK, 0, (norm_rows_kernel<T, EIGHTS, PLAIN>), y, mean,
           rstd, x, g, b, offset, M, C, stride, eps, wide);
}

template <class T, bool PLAIN>
static void
launch_norm(cuda_queue *q, T *y, float *mean, float *rstd, const T *x, const T *g, const T *b, float offset, uint64_t M,
            uint64_t C, uint64_t stride, float eps, bool wide)
{
    if (C <= 256)
        norm_rows<T, 1, PLAIN>(q, y, mean, rstd, x, g, b, offset, M, C, stride, eps, wide);
    else if (C <= 512)
        norm_rows<T, 2, PLAIN>(q, y, mean, rstd, x, g, b, offset, M, C, stride, eps, wide);
    else if (C <= 1024)
        norm_rows<T, 4, PLAIN>(q, y, mean, rstd, x, g, b, offset, M, C, stride, eps, wide);
    else if (C <= 2048)
        norm_rows<T, 8, PLAIN>(q, y, mean, rstd, x, g, b, offset, M, C, stride, eps, wide);
    else if (C <= 4096 && sizeof(T) == 2)
        norm_rows<T, sizeof(T) == 2 ? 16 : 8, PLAIN>(q, y, mean, rstd, x, g, b, offset, M, C, stride, eps, wide);
    else
        LAUNCH(q, (unsigned)M, row_threads(C), 0, (norm_kernel<T, PLAIN>), y, mean, rstd, x, g, b, offset, C, stride,
               eps, wide);
}

static void
norm(spw_gpu_queue *queue, act *y, float *mean, float *rstd, const act *x, const act *g, const act *b, float offset,
     uint64_t M, uint64_t C, uint64_t stride, float eps)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = (C | stride) % 8 == 0 && spw__cuda_aligned(y, x, g, b);
    if (M == 0)
        return;
    if (g == NULL)
        BY_TYPE(q,
                launch_norm<T, true>(q, (T *)y, NULL, rstd, (const T *)x, NULL, NULL, offset, M, C, stride, eps, wide));
    else
        BY_TYPE(q, launch_norm<T, false>(q, (T *)y, mean, rstd, (const T *)x, (const T *)g, (const T *)b, offset, M, C,
                                         stride, eps, wide));
}

void
spw__cuda_layernorm(spw_gpu_queue *queue, act *y, float *mean, float *rstd, const act *x, const act *g, const act *b,
                    uint64_t M, uint64_t C, float eps)
{
    norm(queue, y, mean, rstd, x, g, b, 0.0f, M, C, C, eps);
}

void
spw__cuda_rmsnorm(spw_gpu_queue *queue, act *y, float *rstd, const act *x, const act *g, float offset, uint64_t M,
                  uint64_t C, uint64_t stride, float eps)
{
    norm(queue, y, NULL, rstd, x, g, NULL, offset, M, C, stride, eps);
}

/* Rows of fewer elements than the one leave a block too few threads. Slices have a block each, and so many threads fill an H200. */
enum { SUMS_LEAST = 512, SUMS_SLICES = 512, SUMS_THREADS = 56 << 10 };

template <class T>
static void
norm_backward_sums(cuda_queue *q, T *dx, const T *onto, float *dg, float *db, const T *dy, const T *x, const T *g,
                   float offset, const float *mean, const float *rstd, uint64_t M, uint64_t C, uint64_t stride,
                   bool wide)
{
    uint64_t filled = SUMS_THREADS / row_threads(C), most = filled < SUMS_SLICES ? filled : (uint64_t)SUMS_SLICES;
    uint64_t rows_per_slice = spw_round_up((M + most - 1) / most, 2 * ROWS_TOGETHER);
    uint64_t slices = (M + rows_per_slice - 1) / rows_per_slice;
    float *partial = (float *)spw__cuda_scratch(q, 2 * slices * C * sizeof *partial);
    float *of_db = db != NULL ? partial : NULL, *of_dg = dg != NULL ? partial + slices * C : NULL;
    if (partial == NULL)
        return;
    LAUNCH(q, (unsigned)slices, row_threads(C), 0, (norm_backward_sums_kernel<T>), dx, of_db, of_dg, onto, dy, x, g,
           offset, mean, rstd, M, C, stride, rows_per_slice, wide);
    spw__cuda_add_slices(q, db, of_db, dg, of_dg, C, slices);
}

template <class T, bool PLAIN>
static void
norm_backward_rows(cuda_queue *q, T *dx, const T *onto, const T *dy, const T *x, const T *g, float offset,
                   const float *mean, const float *rstd, uint64_t M, uint64_t C, uint64_t stride, bool wide)
{
    if (row_threads(C) == 32)
        LAUNCH(q, spw__cuda_blocks(M, ROWS_OF_BLOCK), 32 * ROWS_OF_BLOCK, 0, (norm_backward_kernel<T, true, PLAIN>), dx,
               onto, dy, x, g, offset, mean, rstd, M, C, stride, wide);
    else
        LAUNCH(q, (unsigned)M, row_threads(C), 0, (norm_backward_kernel<T, false, PLAIN>), dx, onto, dy, x, g, offset,
               mean, rstd, M, C, stride, wide);
}

/* The parameters' gradients first: dx may be dy. */
static void
norm_backward(spw_gpu_queue *queue, act *dx, const act *onto, float *dg, float *db, const act *dy, const act *x,
              const act *g, float offset, const float *mean, const float *rstd, uint64_t M, uint64_t C, uint64_t stride)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = (C | stride) % 8 == 0 && spw__cuda_aligned(dx, dy, x, g) && spw__cuda_aligned(onto);
    if (M == 0)
        return;
    if (dx != NULL && (dg != NULL || db != NULL) && C >= SUMS_LEAST && C <= WARPS_OF_ROW * 256) {
        BY_TYPE(q, norm_backward_sums<T>(q, (T *)dx, (const T *)onto, dg, db, (const T *)dy, (const T *)x, (const T *)g,
                                         offset, mean, rstd, M, C, stride, wide));
        return;
    }
    spw__cuda_column_sums(q, db, dg, dy, x, mean, rstd, M, C, stride);
    if (dx == NULL)
        return;
    if (g == NULL)
        BY_TYPE(q, norm_backward_rows<T, true>(q, (T *)dx, (const T *)onto, (const T *)dy, (const T *)x, NULL, offset,
                                               NULL, rstd, M, C, stride, wide));
    else
        BY_TYPE(q, norm_backward_rows<T, false>(q, (T *)dx, (const T *)onto, (const T *)dy, (const T *)x, (const T *)g,
                                                offset, mean, rstd, M, C, stride, wide));
}

void
spw__cuda_layernorm_backward(spw_gpu_queue *queue, act *dx, const act *onto, float *dg, float *db, const act *dy,
                             const act *x, const act *g, const float *mean, const float *rstd, uint64_t M, uint64_t C)
{
    norm_backward(queue, dx, onto, dg, db, dy, x, g, 0.0f, mean, rstd, M, C, C);
}

void
spw__cuda_rmsnorm_backward(spw_gpu_queue *queue, act *dx, const act *onto, float *dg, const act *dy, const act *x,
                           const act *g, float offset, const float *rstd, uint64_t M, uint64_t C, uint64_t stride)
{
    norm_backward(queue, dx, onto, dg, NULL, dy, x, g, offset, NULL, rstd, M, C, stride);
}

/* ---------------------------------------------------------------- loss */

/*
 * A head, some of whose rows of logits are in memory at a time. Its vocabulary is in two: of a number of columns that is no multiple of 8
 * cuBLASLt's products take kernels for any alignment, 6 times slower (GPT-2's 50257 on an H200). The last V % 64 columns are products of
 * their own, of 64 columns with zeros behind, whose weights and gradients lie in scratch memory.
 */
enum { COLUMNS_TOGETHER = 64 };

typedef struct head {
    cuda_queue *q;
    uint64_t V, C, elem_bytes;
    uint64_t stride;      /* of rows of logits */
    uint64_t whole, rest; /* V = whole + rest, whole a multiple of COLUMNS_TOGETHER, which is above rest */
    const act *w;         /* (V, C) */
    act *logits;
    act *rest_w;    /* (COLUMNS_TOGETHER, C), zeros from rest on */
    float *rest_dw; /* likewise; what lies from rest on is nobody's */
    act *rest_logits;
} head;

static bool
head_open(head *h, spw_gpu_queue *queue, const act *w, act *logits, uint64_t V, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t elem_bytes = spw_dtype_bytes(q->gpu->info.compute_dtype), row = C * elem_bytes, n = COLUMNS_TOGETHER * C;
    *h = head{};
    h->q = q;
    h->V = V;
    h->C = C;
    h->elem_bytes = elem_bytes;
    h->stride = spw_gpu_logits_stride(V);
    h->rest = V % COLUMNS_TOGETHER;
    h->whole = V - h->rest;
    h->w = w;
    h->logits = logits;
    h->rest_logits = (char *)logits + h->whole * elem_bytes;
    if (h->rest == 0)
        return true;
    SPW_ASSERT(h->whole + COLUMNS_TOGETHER <= h->stride); /* the zeros behind have their place in a row of logits */
    if ((h->rest_dw = (float *)spw__cuda_scratch(q, n * sizeof *h->rest_dw + COLUMNS_TOGETHER * row)) == NULL)
        return false;
    h->rest_w = h->rest_dw + n;
    return spw__cuda_ok(q->gpu,
                        cudaMemcpyAsync(h->rest_w, (const char *)w + h->whole * row, h->rest * row, cudaMemcpyDefault,
                                        q->stream),
                        "copy") &&
           spw__cuda_ok(
               q->gpu,
               cudaMemsetAsync((char *)h->rest_w + h->rest * row, 0, (COLUMNS_TOGETHER - h->rest) * row, q->stream),
               "zero");
}

/* Of m rows: `columns` of their logits. */
static void
make_logits(const head *h, act *logits, const void *x, const act *w, uint64_t m, uint64_t columns)
{
    cuda_product p = spw__cuda_dense_product(logits, x, w, m, columns, h->C);
    p.trans_b = true;
    p.c_stride = h->stride;
    spw__cuda_gemm(h->q, &p);
}

static void
make_dx(const head *h, void *dx, bool f32_out, bool onto, const act *logits, const act *w, uint64_t m, uint64_t columns)
{
    cuda_product p = spw__cuda_dense_product(dx, logits, w, m, h->C, columns);
    p.f32_out = f32_out;
    p.a_stride = h->stride;
    p.onto = onto ? dx : NULL;
    p.rounds_twice = true; /* gradients of logits are numbers of 16 bits */
    if (columns > 0)
        spw__cuda_gemm(h->q, &p);
}

static void
make_dw(const head *h, float *dw, bool onto, const act *logits, const void *x, uint64_t m, uint64_t columns)
{
    cuda_product p = spw__cuda_dense_product(dw, logits, x, columns, h->C, m);
    p.trans_a = p.f32_out = true;
    p.a_stride = h->stride;
    p.onto = onto ? dw : NULL;
    spw__cuda_gemm(h->q, &p);
}

/* The logits of m rows of x. */
static void
head_logits(const head *h, const void *x, uint64_t m)
{
    make_logits(h, h->logits, x, h->w, m, h->whole);
    if (h->rest > 0)
        make_logits(h, h->rest_logits, x, h->rest_w, m, COLUMNS_TOGETHER);
}

/* From gradients of logits; with onto, dx is added to. */
static void
head_dx(const head *h, void *dx, bool f32_out, bool onto, uint64_t m)
{
    if (h->rest > 0) /* the few columns first: what dx is rounded to between is then small */
        make_dx(h, dx, f32_out, onto, h->rest_logits, h->rest_w, m, COLUMNS_TOGETHER);
    make_dx(h, dx, f32_out, h->rest > 0 || onto, h->logits, h->w, m, h->whole);
}

/* Likewise. The last columns' gradients are added up apart, and are dw's when begun by head_dw() and ended by head_dw_rest(). */
static void
head_dw(const head *h, float *dw, bool onto, bool begins, const void *x, uint64_t m)
{
    make_dw(h, dw, onto, h->logits, x, m, h->whole);
    if (h->rest > 0)
        make_dw(h, h->rest_dw, !begins, h->rest_logits, x, m, COLUMNS_TOGETHER);
}

static void
head_dw_rest(const head *h, float *dw, bool onto)
{
    uint64_t n = h->rest * h->C;
    dw += h->whole * h->C;
    if (h->rest == 0)
        return;
    if (onto)
        spw__cuda_add_slices(h->q, dw, h->rest_dw, NULL, NULL, n, 1);
    else
        (void)spw__cuda_ok(h->q->gpu, cudaMemcpyAsync(dw, h->rest_dw, n * sizeof *dw, cudaMemcpyDefault, h->q->stream),
                           "copy");
}

/* Weights of rows `at` and on, where there are any. */
static const float *
behind(const float *weights, uint64_t at)
{
    return weights != NULL ? weights + at : NULL;
}

template <class T, bool CAP>
static void
cross_entropy(const head *h, float *losses, const int32_t *targets, const float *weights, uint64_t m, float scale,
              float cap, bool want_grad)
{
    LAUNCH(h->q, (unsigned)m, row_threads(h->V), 0, (cross_entropy_kernel<T, CAP>), losses, (T *)h->logits, targets,
           weights, h->V, h->stride, scale, cap, want_grad, spw__cuda_aligned(h->logits));
}

void
spw__cuda_linear_cross_entropy(spw_gpu_queue *queue, float *losses, act *dx, float *dw, const act *x, const act *w,
                               const int32_t *targets, const float *weights, act *logits, uint64_t rows_per_chunk,
                               uint64_t M, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    bool want_grad = dx != NULL || dw != NULL, set_dw = (flags & SPW_OP_SET_DW) != 0;
    head h;
    if (M == 0 || !head_open(&h, queue, w, logits, V, C))
        return;
    for (uint64_t at = 0; at < M; at += rows_per_chunk) {
        uint64_t m = M - at < rows_per_chunk ? M - at : rows_per_chunk;
        const char *xs = (const char *)x + at * C * h.elem_bytes;
        head_logits(&h, xs, m);
        BY_TYPE(h.q, cap > 0 ? cross_entropy<T, true>(&h, losses + at, targets + at, behind(weights, at), m, grad_scale,
                                                      cap, want_grad)
                             : cross_entropy<T, false>(&h, losses + at, targets + at, behind(weights, at), m,
                                                       grad_scale, cap, want_grad));
        if (dx != NULL)
            head_dx(&h, (char *)dx + at * C * h.elem_bytes, false, flags & SPW_OP_ACC_DX, m);
        if (dw != NULL)
            head_dw(&h, dw, at > 0 || !set_dw, at == 0, xs, m);
    }
    if (dw != NULL)
        head_dw_rest(&h, dw, !set_dw);
}

template <class T, bool CAP>
static void
head_see(const head *h, float *sums, const int32_t *targets, uint64_t m, uint64_t first, float cap)
{
    LAUNCH(h->q, (unsigned)m, row_threads(h->V), 0, (head_see_kernel<T, CAP>), sums, (const T *)h->logits, targets,
           first, h->V, h->stride, cap, spw__cuda_aligned(h->logits));
}

void
spw__cuda_head_see(spw_gpu_queue *queue, float *sums, const act *x, const act *w, const int32_t *targets, act *logits,
                   uint64_t rows_per_chunk, uint64_t M, uint64_t first, uint64_t V, uint64_t C, float cap)
{
    head h;
    if (M == 0 || !head_open(&h, queue, w, logits, V, C))
        return;
    for (uint64_t at = 0; at < M; at += rows_per_chunk) {
        uint64_t m = M - at < rows_per_chunk ? M - at : rows_per_chunk;
        head_logits(&h, (const char *)x + at * C * h.elem_bytes, m);
        BY_TYPE(h.q, cap > 0 ? head_see<T, true>(&h, sums + at * 3, targets + at, m, first, cap)
                             : head_see<T, false>(&h, sums + at * 3, targets + at, m, first, cap));
    }
}

void
spw__cuda_head_losses(spw_gpu_queue *queue, float *losses, const float *sums, const int32_t *targets, uint64_t M)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (M > 0)
        LAUNCH(q, spw__cuda_blocks(M, 256), 256, 0, (head_losses_kernel), losses, sums, targets, M);
}

template <class T, bool CAP>
static void
head_gradient(const head *h, const float *sums, const int32_t *targets, const float *weights, uint64_t m,
              uint64_t first, float scale, float cap)
{
    LAUNCH(h->q, (unsigned)m, row_threads(h->V), 0, (head_gradient_kernel<T, CAP>), (T *)h->logits, sums, targets,
           weights, first, h->V, h->stride, scale, cap, spw__cuda_aligned(h->logits));
}

void
spw__cuda_head_backward(spw_gpu_queue *queue, float *dx, float *dw, const act *x, const act *w, const int32_t *targets,
                        const float *weights, const float *sums, act *logits, uint64_t rows_per_chunk, uint64_t M,
                        uint64_t first, uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    bool set_dw = (flags & SPW_OP_SET_DW) != 0;
    head h;
    if (M == 0 || (dx == NULL && dw == NULL) || !head_open(&h, queue, w, logits, V, C))
        return;
    for (uint64_t at = 0; at < M; at += rows_per_chunk) {
        uint64_t m = M - at < rows_per_chunk ? M - at : rows_per_chunk;
        const char *xs = (const char *)x + at * C * h.elem_bytes;
        head_logits(&h, xs, m);
        BY_TYPE(h.q, cap > 0 ? head_gradient<T, true>(&h, sums + at * 3, targets + at, behind(weights, at), m, first,
                                                      grad_scale, cap)
                             : head_gradient<T, false>(&h, sums + at * 3, targets + at, behind(weights, at), m, first,
                                                       grad_scale, cap));
        if (dx != NULL)
            head_dx(&h, dx + at * C, true, flags & SPW_OP_ACC_DX, m);
        if (dw != NULL)
            head_dw(&h, dw, at > 0 || !set_dw, at == 0, xs, m);
    }
    if (dw != NULL)
        head_dw_rest(&h, dw, !set_dw);
}
