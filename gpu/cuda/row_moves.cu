/* Rows by their numbers: a block per row, in the widest words that the rows are made of. And transposes. */
#include "common.cuh"
#include "cuda_internal.h"

template <class U, bool PUT>
SPW_KERNEL void
rows_kernel(U *out, const U *in, const int32_t *rows, uint64_t units)
{
    const uint64_t row = (uint64_t)rows[blockIdx.x], to = PUT ? row : blockIdx.x, from = PUT ? blockIdx.x : row;
    for (uint64_t u = threadIdx.x; u < units; u += blockDim.x)
        out[to * units + u] = in[from * units + u];
}

template <class U, bool PUT>
static void
run_by(cuda_queue *q, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes)
{
    const uint64_t units = row_bytes / sizeof(U);
    const unsigned threads = units < 32 ? 32 : units < 256 ? (unsigned)spw_round_up(units, 32) : 256;
    LAUNCH(q, (unsigned)count, threads, 0, (rows_kernel<U, PUT>), (U *)out, (const U *)in, rows, units);
}

template <bool PUT>
static void
run(spw_gpu_queue *queue, void *out, const void *in, const int32_t *rows, uint64_t count, uint64_t row_bytes)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (count == 0)
        return;
    if (row_bytes % sizeof(uint4) == 0 && spw__cuda_aligned(out, in))
        run_by<uint4, PUT>(q, out, in, rows, count, row_bytes);
    else if (row_bytes % sizeof(uint32_t) == 0)
        run_by<uint32_t, PUT>(q, out, in, rows, count, row_bytes);
    else
        run_by<uint16_t, PUT>(q, out, in, rows, count, row_bytes);
}

void
spw__cuda_take_rows(spw_gpu_queue *queue, void *out, const void *in, const int32_t *rows, uint64_t count,
                    uint64_t row_bytes)
{
    run<false>(queue, out, in, rows, count, row_bytes);
}

void
spw__cuda_put_rows(spw_gpu_queue *queue, void *out, const void *in, const int32_t *rows, uint64_t count,
                   uint64_t row_bytes)
{
    run<true>(queue, out, in, rows, count, row_bytes);
}

enum { SQUARE = 32, SQUARE_ROWS = 8 };

/* A square of 32 by 32 through shared memory, so that both sides go along rows. ADD: to what y has. */
template <class T, bool ADD>
SPW_KERNEL void
transpose_kernel(T *y, const T *x, float scale, uint64_t M, uint64_t N, unsigned across)
{
    __shared__ float square[SQUARE][SQUARE + 1];
    const unsigned tx = threadIdx.x % SQUARE, ty = threadIdx.x / SQUARE;
    const uint64_t m0 = (uint64_t)(blockIdx.x / across) * SQUARE, n0 = (uint64_t)(blockIdx.x % across) * SQUARE;
    for (unsigned i = ty; i < SQUARE; i += SQUARE_ROWS) {
        if (m0 + i < M && n0 + tx < N)
            square[i][tx] = widen(x[(m0 + i) * N + n0 + tx]);
    }
    __syncthreads();
    for (unsigned i = ty; i < SQUARE; i += SQUARE_ROWS) {
        T *at = y + (n0 + i) * M + m0 + tx;
        if (n0 + i < N && m0 + tx < M)
            narrow(at, (ADD ? widen(*at) : 0.0f) + scale * square[tx][i]);
    }
}

template <class T, bool ADD>
static void
transpose(cuda_queue *q, void *y, const void *x, float scale, uint64_t M, uint64_t N)
{
    const unsigned across = spw__cuda_blocks(N, SQUARE);
    const uint64_t squares = across * (uint64_t)spw__cuda_blocks(M, SQUARE);
    SPW_ASSERT(squares <= INT32_MAX);
    if (squares > 0)
        LAUNCH(q, (unsigned)squares, SQUARE * SQUARE_ROWS, 0, (transpose_kernel<T, ADD>), (T *)y, (const T *)x, scale,
               M, N, across);
}

void
spw__cuda_transpose(spw_gpu_queue *queue, act *y, const act *x, float scale, uint64_t M, uint64_t N)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    BY_TYPE(q, transpose<T, false>(q, y, x, scale, M, N));
}

void
spw__cuda_transpose_sum(spw_gpu_queue *queue, float *y, const float *x, float scale, uint64_t M, uint64_t N)
{
    transpose<float, true>(spw__cuda_queue_of(queue), y, x, scale, M, N);
}
