/*
 * Our own matrix products: a plain tiled one that takes any shape and alignment, for machines without cuBLASLt and for what it
 * has no algorithm for; and two whose rows have the same bits whatever the number of rows, for a few rows at a time, which read
 * the weights once per four rows. Sums are fp32 in an order that depends on K alone.
 */
#ifndef SPW_CUDA_GEMM_CUH
#define SPW_CUDA_GEMM_CUH

#include "common.cuh"

enum { GEMM_TILE = 64, GEMM_DEPTH = 16, GEMM_THREADS = 256 };

/* C(M,N) = scale A B + by onto + bias; A at (m a_row + k a_col), B at (k b_row + n b_col). 4 by 4 elements per thread. */
template <class T, class O>
__global__ void
__launch_bounds__(GEMM_THREADS)
    gemm_kernel(O *C, const T *A, const T *B, const O *onto, const T *bias, float scale, float by, uint64_t M,
                uint64_t N, uint64_t K, uint64_t a_row, uint64_t a_col, uint64_t b_row, uint64_t b_col, uint64_t c_row)
{
    __shared__ __align__(16) float a[GEMM_DEPTH][GEMM_TILE + 4], b[GEMM_DEPTH][GEMM_TILE + 4]; /* read by fours */
    uint64_t m0 = (uint64_t)blockIdx.x * GEMM_TILE, n0 = (uint64_t)blockIdx.y * GEMM_TILE;
    unsigned tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float sum[4][4] = {};
    for (uint64_t k0 = 0; k0 < K; k0 += GEMM_DEPTH) {
        for (unsigned i = threadIdx.x; i < GEMM_TILE * GEMM_DEPTH; i += GEMM_THREADS) {
            /* neighbours in memory for neighbouring threads, in either layout */
            unsigned r = a_col == 1 ? i / GEMM_DEPTH : i % GEMM_TILE, k = a_col == 1 ? i % GEMM_DEPTH : i / GEMM_TILE;
            unsigned c = b_row == 1 ? i / GEMM_DEPTH : i % GEMM_TILE, l = b_row == 1 ? i % GEMM_DEPTH : i / GEMM_TILE;
            a[k][r] = m0 + r < M && k0 + k < K ? widen(A[(m0 + r) * a_row + (k0 + k) * a_col]) : 0.0f;
            b[l][c] = n0 + c < N && k0 + l < K ? widen(B[(k0 + l) * b_row + (n0 + c) * b_col]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < GEMM_DEPTH; k++) {
            float4 va = *(const float4 *)&a[k][ty * 4], vb = *(const float4 *)&b[k][tx * 4];
            float x[4] = {va.x, va.y, va.z, va.w}, y[4] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint64_t m = m0 + ty * 4 + (unsigned)i, n = n0 + tx * 4 + (unsigned)j;
            if (m < M && n < N) {
                float v = scale * sum[i][j] + (bias != NULL ? widen(bias[n]) : 0.0f);
                narrow(C + m * c_row + n, onto != NULL ? by * widen(onto[m * c_row + n]) + v : v);
            }
        }
}

enum { ROWS_AT_ONCE = 4 };

/* w (N,K): a warp per output column. */
template <class T>
__global__ void
row_dots_kernel(T *y, const T *x, const T *w, const T *bias, uint64_t M, uint64_t N, uint64_t K, bool wide)
{
    uint64_t n = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, m0 = (uint64_t)blockIdx.y * ROWS_AT_ONCE;
    unsigned lane = threadIdx.x % 32;
    float sum[ROWS_AT_ONCE] = {0};
    if (n >= N)
        return; /* the whole warp */
    for (uint64_t k = lane * 8; k < K; k += 32 * 8) {
        float a[8], b[8];
        load8(b, w + n * K + k, K - k, wide);
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; r++)
            if (m0 + (unsigned)r < M) {
                load8(a, x + (m0 + (unsigned)r) * K + k, K - k, wide);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    sum[r] += a[j] * b[j];
            }
    }
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0 && m0 + (unsigned)r < M)
            narrow(y + (m0 + (unsigned)r) * N + n, sum[r] + (bias != NULL ? widen(bias[n]) : 0.0f));
    }
}

/* w (K,N): 32 columns per block, eight slices of K, added up in turn. */
template <class T>
__global__ void
row_axpys_kernel(T *y, const T *x, const T *w, const T *bias, uint64_t M, uint64_t N, uint64_t K)
{
    __shared__ float slices[8][ROWS_AT_ONCE][32];
    unsigned lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    uint64_t n = (uint64_t)blockIdx.x * 32 + lane, m0 = (uint64_t)blockIdx.y * ROWS_AT_ONCE;
    float sum[ROWS_AT_ONCE] = {0};
    for (uint64_t k = slice; k < K && n < N; k += 8) {
        float b = widen(w[k * N + n]);
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; r++)
            if (m0 + (unsigned)r < M)
                sum[r] += widen(x[(m0 + (unsigned)r) * K + k]) * b;
    }
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; r++)
        slices[slice][r][lane] = sum[r];
    __syncthreads();
    if (slice < ROWS_AT_ONCE && n < N && m0 + slice < M) {
        float all = 0.0f;
        for (int s = 0; s < 8; s++)
            all += slices[s][slice][lane];
        narrow(y + (m0 + slice) * N + n, all + (bias != NULL ? widen(bias[n]) : 0.0f));
    }
}

#endif
