/*
 * LayerNorm and RMSNorm (mean NULL) with a block per row, and sums over the rows of a matrix: partial sums of fixed slices of
 * rows, then the slices in turn, so that the order depends on the shape alone.
 */
#ifndef SPW_CUDA_NORMS_CUH
#define SPW_CUDA_NORMS_CUH

#include "common.cuh"

template <class T>
__global__ void
norm_kernel(T *y, float *mean, float *rstd, const T *x, const T *g, const T *b, uint64_t C, float eps, bool wide)
{
    uint64_t row = blockIdx.x;
    const T *in = x + row * C;
    float sum = 0.0f, mu = 0.0f, r, v[8], gain[8], shift[8] = {0};
    if (mean != NULL) {
        for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
            load8(v, in + c, C - c, wide);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum += v[j];
        }
        mu = block_sum(sum) / (float)C;
        sum = 0.0f;
    }
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        load8(v, in + c, C - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += c + (unsigned)j < C ? (v[j] - mu) * (v[j] - mu) : 0.0f;
    }
    r = 1.0f / sqrtf(block_sum(sum) / (float)C + eps);
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        load8(v, in + c, C - c, wide);
        load8(gain, g + c, C - c, wide);
        if (b != NULL)
            load8(shift, b + c, C - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = (v[j] - mu) * r * gain[j] + shift[j];
        store8(y + row * C + c, v, C - c, wide);
    }
    if (threadIdx.x == 0) {
        if (mean != NULL)
            mean[row] = mu;
        rstd[row] = r;
    }
}

template <class T>
__global__ void
norm_backward_kernel(T *dx, const T *dy, const T *x, const T *g, const float *mean, const float *rstd, uint64_t C,
                     bool add, bool wide)
{
    uint64_t row = blockIdx.x, at = row * C;
    float mu = mean != NULL ? mean[row] : 0.0f, r = rstd[row], a = 0.0f, b = 0.0f, v[8], d[8], gain[8], old[8] = {0};
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        load8(v, x + at + c, C - c, wide);
        load8(d, dy + at + c, C - c, wide);
        load8(gain, g + c, C - c, wide); /* zero behind the end, so that these add nothing */
#pragma unroll
        for (int j = 0; j < 8; j++) {
            a += d[j] * gain[j];
            b += d[j] * gain[j] * ((v[j] - mu) * r);
        }
    }
    a = mean != NULL ? block_sum(a) / (float)C : 0.0f;
    b = block_sum(b) / (float)C;
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        load8(v, x + at + c, C - c, wide);
        load8(d, dy + at + c, C - c, wide);
        load8(gain, g + c, C - c, wide);
        if (add)
            load8(old, dx + at + c, C - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            d[j] = old[j] + (d[j] * gain[j] - a - (v[j] - mu) * r * b) * r;
        store8(dx + at + c, d, C - c, wide);
    }
}

/* ---------------------------------------------------------------- sums over rows */

enum { COLUMN_LANES = 32, ROW_LANES = 8 }; /* threads of a block: columns by rows */

/* partial(slices, C): slice s sums rows s rows_per_slice and on; a, or a * (x - mean) * rstd when x is not NULL. */
template <class T>
__global__ void
column_sums_kernel(float *partial, const T *a, const T *x, const float *mean, const float *rstd, uint64_t M, uint64_t C,
                   uint64_t rows_per_slice)
{
    __shared__ float lanes[ROW_LANES][COLUMN_LANES];
    uint64_t c = (uint64_t)blockIdx.x * COLUMN_LANES + threadIdx.x % COLUMN_LANES;
    uint64_t first = blockIdx.y * rows_per_slice, end = least(M, first + rows_per_slice);
    unsigned lane = threadIdx.x / COLUMN_LANES;
    float sum = 0.0f;
    for (uint64_t r = first + lane; r < end && c < C; r += ROW_LANES) {
        float v = widen(a[r * C + c]);
        if (x != NULL)
            v *= (widen(x[r * C + c]) - (mean != NULL ? mean[r] : 0.0f)) * rstd[r];
        sum += v;
    }
    lanes[lane][threadIdx.x % COLUMN_LANES] = sum;
    __syncthreads();
    if (lane == 0 && c < C) {
        for (int i = 1; i < ROW_LANES; i++)
            sum += lanes[i][threadIdx.x];
        partial[blockIdx.y * C + c] = sum;
    }
}

SPW_KERNEL void
add_slices_kernel(float *sums, const float *partial, uint64_t C, unsigned slices)
{
    uint64_t c = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    if (c >= C)
        return;
    for (unsigned s = 0; s < slices; s++)
        sum += partial[s * C + c];
    sums[c] += sum;
}

#endif
