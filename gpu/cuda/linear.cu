/*
 * Linear layers: cuBLASLt where it is there and has an algorithm, our own product where not.
 */
#include "cuda_internal.h"
#include "gemm.cuh"

template <class T, class O>
static void
own_gemm(cuda_queue *q, bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, const void *A, const void *B,
         bool add, void *C, const void *bias)
{
    dim3 grid(spw__cuda_blocks(M, GEMM_TILE), spw__cuda_blocks(N, GEMM_TILE));
    LAUNCH(q, grid, GEMM_THREADS, 0, (gemm_kernel<T, O>), (O *)C, (const T *)A, (const T *)B, (const T *)bias, M, N, K,
           trans_a ? 1 : K, trans_a ? M : 1, trans_b ? 1 : N, trans_b ? K : 1, add);
}

void
spw__cuda_gemm(cuda_queue *q, bool trans_a, bool trans_b, uint64_t M, uint64_t N, uint64_t K, const void *A,
               const void *B, bool add, void *C, bool f32_out, const void *bias)
{
    if (M == 0 || N == 0 || (K == 0 && add))
        return;
    if (q->gpu->blas != NULL && spw__cuda_blas_gemm(q, trans_a, trans_b, M, N, K, A, B, add, C, f32_out, bias))
        return;
    if (f32_out)
        BY_TYPE(q, own_gemm<T, float>(q, trans_a, trans_b, M, N, K, A, B, add, C, bias));
    else
        BY_TYPE(q, own_gemm<T, T>(q, trans_a, trans_b, M, N, K, A, B, add, C, bias));
}

template <class T>
static void
linear_by_row(cuda_queue *q, void *y, const void *x, const void *w, const void *b, uint64_t M, uint64_t N, uint64_t K,
              bool in_out)
{
    unsigned groups = spw__cuda_blocks(M, ROWS_AT_ONCE);
    if (in_out)
        LAUNCH(q, dim3(spw__cuda_blocks(N, 32), groups), 256, 0, (row_axpys_kernel<T>), (T *)y, (const T *)x,
               (const T *)w, (const T *)b, M, N, K);
    else
        LAUNCH(q, dim3(spw__cuda_blocks(N, 4), groups), 128, 0, (row_dots_kernel<T>), (T *)y, (const T *)x,
               (const T *)w, (const T *)b, M, N, K, K % 8 == 0 && spw__cuda_aligned(x, w));
}

void
spw__cuda_linear(spw_gpu_queue *queue, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N,
                 uint64_t K, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool in_out = (flags & SPW_OP_W_IN_OUT) != 0;
    if (M == 0)
        return;
    if ((flags & SPW_OP_BY_ROW) == 0)
        spw__cuda_gemm(q, false, !in_out, M, N, K, x, w, false, y, false, b);
    else
        BY_TYPE(q, linear_by_row<T>(q, y, x, w, b, M, N, K, in_out));
}

void
spw__cuda_linear_backward(spw_gpu_queue *queue, act *dx, float *dw, float *db, const act *dy, const act *x,
                          const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool in_out = (flags & SPW_OP_W_IN_OUT) != 0, add = (flags & SPW_OP_SET_DW) == 0;
    if (db != NULL)
        spw__cuda_column_sums(q, db, dy, NULL, NULL, NULL, M, N);
    if (dw != NULL && in_out)
        spw__cuda_gemm(q, true, false, K, N, M, x, dy, add, dw, true, NULL);
    else if (dw != NULL)
        spw__cuda_gemm(q, true, false, N, K, M, dy, x, add, dw, true, NULL);
    if (dx != NULL)
        spw__cuda_gemm(q, false, in_out, M, K, N, dy, w, (flags & SPW_OP_ACC_DX) != 0, dx, false, NULL);
}
