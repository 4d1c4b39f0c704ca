/*
 * LayerNorm and RMSNorm (mean NULL) by offset + g with a block per row, or a warp where rows are short, and sums over the rows of a
 * matrix: partial sums of fixed slices of rows, then the slices in turn, so that the order depends on the shape alone.
 * Rows of C elements begin stride apart.
 * PLAIN: there is no g, which is zeros; a kernel of its own, because a branch in front of a load costs others registers.
 */
#ifndef SPW_CUDA_NORMS_CUH
#define SPW_CUDA_NORMS_CUH

#include "common.cuh"

/* A thread's row and its place there. WARP: a warp has a row; of a block's first threads the sums are the same to the bit. */
template <bool WARP>
SPW_DEVICE uint64_t
my_row(unsigned *place, unsigned *places)
{
    *place = WARP ? threadIdx.x % 32 : threadIdx.x;
    *places = WARP ? 32 : blockDim.x;
    return WARP ? (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32 : blockIdx.x;
}

template <bool WARP>
SPW_DEVICE float
row_sum(float v)
{
    if constexpr (WARP)
        return warp_sum(v);
    else
        return block_sum(v);
}

/* A warp has a row of up to 256 EIGHTS elements in registers: memory is read once, and no thread waits for another's. */
template <class T, int EIGHTS, bool PLAIN>
__global__ void
norm_rows_kernel(T *y, float *mean, float *rstd, const T *x, const T *g, const T *b, float offset, uint64_t M,
                 uint64_t C, uint64_t stride, float eps, bool wide)
{
    const unsigned lane = threadIdx.x % 32;
    const uint64_t row = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    eight<T> raw[EIGHTS] = {}; /* zeros behind the end */
    float sum = 0.0f, mu = 0.0f, r, v[8], gain[8], shift[8];
    if (row >= M)
        return; /* the whole warp */
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        uint64_t c = (uint64_t)((unsigned)k * 32 + lane) * 8;
        if (c < C)
            load_eight(&raw[k], x + row * stride + c, C - c, wide);
    }
    if (mean != NULL) {
#pragma unroll
        for (int k = 0; k < EIGHTS; k++) {
            widen8(v, raw[k]);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum += v[j];
        }
        mu = warp_sum(sum) / (float)C;
        sum = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        uint64_t c = (uint64_t)((unsigned)k * 32 + lane) * 8;
        widen8(v, raw[k]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += c + (unsigned)j < C ? (v[j] - mu) * (v[j] - mu) : 0.0f;
    }
    r = 1.0f / sqrtf(warp_sum(sum) / (float)C + eps);
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        uint64_t c = (uint64_t)((unsigned)k * 32 + lane) * 8;
        eight<T> of_g = {}, of_b = {};
        if (c >= C)
            break;
        if (!PLAIN)
            load_eight(&of_g, g + c, C - c, wide);
        if (b != NULL)
            load_eight(&of_b, b + c, C - c, wide);
        widen8(v, raw[k]);
        widen8(gain, of_g);
        widen8(shift, of_b);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = (v[j] - mu) * r * (offset + gain[j]) + shift[j];
        store8(y + row * stride + c, v, C - c, wide);
    }
    if (lane == 0) {
        if (mean != NULL)
            mean[row] = mu;
        rstd[row] = r;
    }
}

/* A block has a row. */
template <class T, bool PLAIN>
__global__ void
norm_kernel(T *y, float *mean, float *rstd, const T *x, const T *g, const T *b, float offset, uint64_t C,
            uint64_t stride, float eps, bool wide)
{
    const unsigned place = threadIdx.x, places = blockDim.x;
    const uint64_t row = blockIdx.x;
    const T *in = x + row * stride;
    float sum = 0.0f, mu = 0.0f, r, v[8], gain[8], shift[8];
    if (mean != NULL) {
        for (uint64_t c = place * 8; c < C; c += places * 8) {
            load8(v, in + c, C - c, wide);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum += v[j];
        }
        mu = block_sum(sum) / (float)C;
        sum = 0.0f;
    }
    for (uint64_t c = place * 8; c < C; c += places * 8) {
        load8(v, in + c, C - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += c + (unsigned)j < C ? (v[j] - mu) * (v[j] - mu) : 0.0f;
    }
    r = 1.0f / sqrtf(block_sum(sum) / (float)C + eps);
    for (uint64_t c = place * 8; c < C; c += places * 8) {
        eight<T> of_x, of_g = {}, of_b = {};
        load_eight(&of_x, in + c, C - c, wide);
        if (!PLAIN)
            load_eight(&of_g, g + c, C - c, wide);
        if (b != NULL)
            load_eight(&of_b, b + c, C - c, wide);
        widen8(v, of_x);
        widen8(gain, of_g);
        widen8(shift, of_b);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = (v[j] - mu) * r * (offset + gain[j]) + shift[j];
        store8(y + row * stride + c, v, C - c, wide);
    }
    if (place == 0) {
        if (mean != NULL)
            mean[row] = mu;
        rstd[row] = r;
    }
}

template <class T, bool WARP, bool PLAIN>
__global__ void
norm_backward_kernel(T *dx, const T *onto, const T *dy, const T *x, const T *g, float offset, const float *mean,
                     const float *rstd, uint64_t M, uint64_t C, uint64_t stride, bool wide)
{
    unsigned place, places;
    uint64_t row = my_row<WARP>(&place, &places), at = row * stride;
    float mu, r, a = 0.0f, b = 0.0f, v[8], d[8], gain[8], old[8];
    if (row >= M)
        return; /* the whole warp */
    mu = mean != NULL ? mean[row] : 0.0f;
    r = rstd[row];
    for (uint64_t c = place * 8; c < C; c += places * 8) {
        eight<T> of_x, of_dy, of_g = {};
        load_eight(&of_x, x + at + c, C - c, wide);
        load_eight(&of_dy, dy + at + c, C - c, wide); /* zero behind the end, so that these add nothing */
        if (!PLAIN)
            load_eight(&of_g, g + c, C - c, wide);
        widen8(v, of_x);
        widen8(d, of_dy);
        widen8(gain, of_g);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            a += d[j] * (offset + gain[j]);
            b += d[j] * (offset + gain[j]) * ((v[j] - mu) * r);
        }
    }
    a = mean != NULL ? row_sum<WARP>(a) / (float)C : 0.0f;
    b = row_sum<WARP>(b) / (float)C;
    for (uint64_t c = place * 8; c < C; c += places * 8) {
        eight<T> of_x, of_dy, of_g = {}, of_onto = {};
        load_eight(&of_x, x + at + c, C - c, wide);
        load_eight(&of_dy, dy + at + c, C - c, wide);
        if (!PLAIN)
            load_eight(&of_g, g + c, C - c, wide);
        if (onto != NULL)
            load_eight(&of_onto, onto + at + c, C - c, wide);
        widen8(v, of_x);
        widen8(d, of_dy);
        widen8(gain, of_g);
        widen8(old, of_onto);
#pragma unroll
        for (int j = 0; j < 8; j++)
            d[j] = old[j] + (d[j] * (offset + gain[j]) - a - (v[j] - mu) * r * b) * r;
        store8(dx + at + c, d, C - c, wide);
    }
}

enum { ROWS_TOGETHER = 2, WARPS_OF_ROW = 16 };

/* Of rows at a time a thread's eight columns, and what their norms were. */
template <class T> struct norm_rows_of {
    eight<T> x[ROWS_TOGETHER], dy[ROWS_TOGETHER];
    float mean[ROWS_TOGETHER], rstd[ROWS_TOGETHER];
};

/* Zeros where nothing is: they add nothing. */
template <class T>
SPW_DEVICE void
load_norm_rows(norm_rows_of<T> *rows, const T *x, const T *dy, const float *mean, const float *rstd, uint64_t row,
               uint64_t end, uint64_t c, uint64_t C, uint64_t stride, bool wide)
{
    *rows = norm_rows_of<T>{};
#pragma unroll
    for (int k = 0; k < ROWS_TOGETHER; k++) {
        const uint64_t mine = row + (unsigned)k;
        if (mine >= end)
            continue;
        rows->mean[k] = mean != NULL ? mean[mine] : 0.0f;
        rows->rstd[k] = rstd[mine];
        if (c < C) {
            load_eight(&rows->x[k], x + mine * stride + c, C - c, wide);
            load_eight(&rows->dy[k], dy + mine * stride + c, C - c, wide);
        }
    }
}

/*
 * As above, and in the same pass the sums over rows that g and b get: partial(slices, C) of dy, and scaled(slices, C) of dy (x - mean) rstd, either
 * NULL: not wanted. A block goes through a slice's rows, some at a time, and a thread has eight columns of all of them; those that come next are
 * under way while it adds up.
 */
template <class T>
__global__ void
__launch_bounds__(WARPS_OF_ROW * 32, 1)
    norm_backward_sums_kernel(T *dx, float *partial, float *scaled, const T *onto, const T *dy, const T *x, const T *g,
                              float offset, const float *mean, const float *rstd, uint64_t M, uint64_t C,
                              uint64_t stride, uint64_t rows_per_slice, bool wide)
{
    __shared__ float parts[2][2 * ROWS_TOGETHER][WARPS_OF_ROW];
    const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const uint64_t c = (uint64_t)threadIdx.x * 8, first = blockIdx.x * rows_per_slice;
    const uint64_t end = least(M, first + rows_per_slice);
    float gain[8] = {0}, sum[8] = {0}, sum_scaled[8] = {0};
    norm_rows_of<T> rows;
    int turn = 0;
    if (c < C) {
        eight<T> of_g;
        load_eight(&of_g, g + c, C - c, wide);
        widen8(gain, of_g);
    }
    load_norm_rows(&rows, x, dy, mean, rstd, first, end, c, C, stride, wide);
    for (uint64_t row = first; row < end; row += ROWS_TOGETHER, turn ^= 1) {
        norm_rows_of<T> next;
        eight<T> of_onto[ROWS_TOGETHER] = {};
        float v[8], d[8], old[8];
#pragma unroll
        for (int k = 0; k < ROWS_TOGETHER; k++)
            if (onto != NULL && row + (unsigned)k < end && c < C)
                load_eight(&of_onto[k], onto + (row + (unsigned)k) * stride + c, C - c, wide);
        load_norm_rows(&next, x, dy, mean, rstd, row + ROWS_TOGETHER, end, c, C, stride, wide);
#pragma unroll
        for (int k = 0; k < ROWS_TOGETHER; k++) {
            float a = 0.0f, b = 0.0f;
            widen8(v, rows.x[k]);
            widen8(d, rows.dy[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float n = (v[j] - rows.mean[k]) * rows.rstd[k];
                a += d[j] * (offset + gain[j]);
                b += d[j] * (offset + gain[j]) * n;
                sum[j] += d[j];
                sum_scaled[j] += d[j] * n;
            }
            a = warp_sum(a);
            b = warp_sum(b);
            if (threadIdx.x % 32 == 0) {
                parts[turn][2 * k][warp] = a;
                parts[turn][2 * k + 1][warp] = b;
            }
        }
        __syncthreads(); /* and what the turn before last left has been read */
#pragma unroll
        for (int k = 0; k < ROWS_TOGETHER; k++) {
            float a = 0.0f, b = 0.0f;
            for (unsigned w = 0; w < warps; w++) {
                a += parts[turn][2 * k][w];
                b += parts[turn][2 * k + 1][w];
            }
            a = mean != NULL ? a / (float)C : 0.0f;
            b = b / (float)C;
            if (row + (unsigned)k >= end || c >= C)
                continue;
            widen8(v, rows.x[k]);
            widen8(d, rows.dy[k]);
            widen8(old, of_onto[k]);
#pragma unroll
            for (int j = 0; j < 8; j++)
                d[j] =
                    old[j] + (d[j] * (offset + gain[j]) - a - (v[j] - rows.mean[k]) * rows.rstd[k] * b) * rows.rstd[k];
            store8(dx + (row + (unsigned)k) * stride + c, d, C - c, wide);
        }
        rows = next;
    }
    for (unsigned j = 0; j < 8 && c + j < C; j++) {
        if (partial != NULL)
            partial[blockIdx.x * C + c + j] = sum[j];
        if (scaled != NULL)
            scaled[blockIdx.x * C + c + j] = sum_scaled[j];
    }
}

/* ---------------------------------------------------------------- sums over rows */

enum { COLUMN_LANES = 32, ROW_LANES = 8, LANE_COLUMNS = 8 }; /* threads of a block: columns by rows */

/* Sums over the row lanes of a block, in their order; a thread has the sum of one of the block's columns, one lane's eighth after the other's. */
SPW_DEVICE void
put_partial(float *partial, const float *sum, uint64_t C)
{
    __shared__ float lanes[ROW_LANES][LANE_COLUMNS][COLUMN_LANES];
    const unsigned lane = threadIdx.x / COLUMN_LANES, column = threadIdx.x % COLUMN_LANES;
    const uint64_t c = ((uint64_t)blockIdx.x * COLUMN_LANES + column) * LANE_COLUMNS + lane;
    float all;
    static_assert((int)ROW_LANES == (int)LANE_COLUMNS, "a thread for each of the block's columns");
    __syncthreads(); /* what the call before left has been read */
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++)
        lanes[lane][j][column] = sum[j];
    __syncthreads();
    all = lanes[0][lane][column];
    for (int i = 1; i < ROW_LANES; i++)
        all += lanes[i][lane][column];
    if (c < C)
        partial[blockIdx.y * C + c] = all;
}

/*
 * partial(slices, C): slice s sums rows s rows_per_slice and on of a, NULL: not wanted; with SCALED scaled(slices, C): of
 * a * (x - mean) * rstd. A thread loads from several rows before it adds the first, for their loads to be under way together.
 */
template <class T, bool SCALED>
__global__ void
column_sums_kernel(float *partial, float *scaled, const T *a, const T *x, const float *mean, const float *rstd,
                   uint64_t M, uint64_t C, uint64_t stride, uint64_t rows_per_slice, bool wide)
{
    const int rows = SCALED ? 2 : 4;
    uint64_t c = ((uint64_t)blockIdx.x * COLUMN_LANES + threadIdx.x % COLUMN_LANES) * LANE_COLUMNS;
    uint64_t first = blockIdx.y * rows_per_slice, end = least(M, first + rows_per_slice);
    float sum[LANE_COLUMNS] = {0}, sum_scaled[LANE_COLUMNS] = {0};
    for (uint64_t r = first + threadIdx.x / COLUMN_LANES; r < end && c < C; r += rows * ROW_LANES) {
        eight<T> of_a[rows] = {}, of_x[rows] = {}; /* zeros where there is no row: they add nothing */
        float mu[rows] = {0}, scale[rows] = {0};
#pragma unroll
        for (int k = 0; k < rows; k++) {
            uint64_t row = r + (unsigned)k * ROW_LANES;
            if (row >= end)
                break;
            load_eight(&of_a[k], a + row * stride + c, C - c, wide);
            if (SCALED) {
                load_eight(&of_x[k], x + row * stride + c, C - c, wide);
                mu[k] = mean != NULL ? mean[row] : 0.0f;
                scale[k] = rstd[row];
            }
        }
#pragma unroll
        for (int k = 0; k < rows; k++) {
            float v[LANE_COLUMNS], w[LANE_COLUMNS];
            widen8(v, of_a[k]);
            widen8(w, of_x[k]);
#pragma unroll
            for (int j = 0; j < LANE_COLUMNS; j++) {
                sum[j] += v[j];
                sum_scaled[j] += v[j] * ((w[j] - mu[k]) * scale[k]);
            }
        }
    }
    if (partial != NULL)
        put_partial(partial, sum, C);
    if (SCALED)
        put_partial(scaled, sum_scaled, C);
}

enum { SLICE_LANES = 32 };

/* What slices have of one or two sums, by blockIdx.y, to them: lanes take a slice after another, and are added up in their order. */
struct slices_of {
    float *sums;
    const float *partial;
};
struct two_sums {
    slices_of of[2];
};

SPW_KERNEL void
add_slices_kernel(two_sums both, uint64_t C, unsigned slices)
{
    __shared__ float lanes[SLICE_LANES][COLUMN_LANES];
    const slices_of mine = both.of[blockIdx.y];
    const unsigned lane = threadIdx.x / COLUMN_LANES, column = threadIdx.x % COLUMN_LANES;
    const uint64_t c = (uint64_t)blockIdx.x * COLUMN_LANES + column;
    float sum = 0.0f;
    if (c < C) {
#pragma unroll 8
        for (unsigned s = lane; s < slices; s += SLICE_LANES)
            sum += mine.partial[s * C + c];
    }
    lanes[lane][column] = sum;
    __syncthreads();
    if (lane > 0 || c >= C)
        return;
    for (int i = 1; i < SLICE_LANES; i++)
        sum += lanes[i][column];
    mine.sums[c] += sum;
}

#endif
