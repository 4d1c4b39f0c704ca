/*
 * Linear layers: cuBLASLt where it is there and has an algorithm, our own product where not.
 */
#include "cuda_internal.h"
#include "gemm.cuh"

template <class T, class O>
static void
own_gemm(cuda_queue *q, const cuda_product *p)
{
    dim3 grid(spw__cuda_blocks(p->M, GEMM_TILE), spw__cuda_blocks(p->N, GEMM_TILE));
    uint64_t a_stride = p->a_stride > 0 ? p->a_stride : p->trans_a ? p->M : p->K;
    LAUNCH(q, grid, GEMM_THREADS, 0, (gemm_kernel<T, O>), (O *)p->C, (const T *)p->A, (const T *)p->B,
           (const O *)p->onto, (const T *)p->bias, p->scale, p->by, p->M, p->N, p->K, p->trans_a ? 1 : a_stride,
           p->trans_a ? a_stride : 1, p->trans_b ? 1 : p->N, p->trans_b ? p->K : 1,
           p->c_stride > 0 ? p->c_stride : p->N);
}

static void
plain_gemm(cuda_queue *q, const cuda_product *p)
{
    if (q->gpu->blas != NULL && spw__cuda_blas_gemm(q, p))
        return;
    if (p->f32_out)
        BY_TYPE(q, own_gemm<T, float>(q, p));
    else
        BY_TYPE(q, own_gemm<T, T>(q, p));
}

/* cuBLASLt's GELUs may take the hardware's approximate tanh: what 16 bits do not show, and fp32 does. */
void
spw__cuda_gemm(cuda_queue *q, const cuda_product *p)
{
    cuda_product plain = *p;
    if (p->M == 0 || p->N == 0 || (p->K == 0 && p->onto == p->C))
        return;
    if (p->after != AFTER_NOTHING && !spw__cuda_is_f32(q) && q->gpu->blas != NULL && spw__cuda_blas_gemm(q, p))
        return;
    plain.after = AFTER_NOTHING;
    plain.gelu_in = NULL;
    plain.C = p->after == AFTER_GELU ? p->gelu_in : p->C;
    plain_gemm(q, &plain);
    if (p->after == AFTER_GELU)
        spw__cuda_curve(&q->base, SPW_CURVE_GELU, p->C, p->gelu_in, p->M * p->N);
    else if (p->after == AFTER_GELU_BACKWARD)
        spw__cuda_curve_backward(&q->base, SPW_CURVE_GELU, p->C, p->C, p->gelu_in, p->M * p->N, 0);
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

/* y = x w^T + b in its variants. */
static void
linear(cuda_queue *q, cuda_product *p, unsigned flags)
{
    p->trans_b = (flags & SPW_OP_W_IN_OUT) == 0;
    if ((flags & SPW_OP_BY_ROW) == 0)
        spw__cuda_gemm(q, p);
    else if (p->M > 0)
        BY_TYPE(q, linear_by_row<T>(q, p->C, p->A, p->B, p->bias, p->M, p->N, p->K, !p->trans_b));
}

void
spw__cuda_linear(spw_gpu_queue *queue, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N,
                 uint64_t K, unsigned flags)
{
    cuda_product p = spw__cuda_dense_product(y, x, w, M, N, K);
    p.bias = b;
    linear(spw__cuda_queue_of(queue), &p, flags);
}

void
spw__cuda_linear_add(spw_gpu_queue *queue, act *y, const act *onto, const act *x, const act *w, const act *b,
                     uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    cuda_product p = spw__cuda_dense_product(y, x, w, M, N, K);
    SPW_ASSERT((flags & SPW_OP_BY_ROW) == 0 || y != onto);
    p.onto = onto;
    p.bias = b;
    linear(spw__cuda_queue_of(queue), &p, flags);
    if (flags & SPW_OP_BY_ROW)
        spw__cuda_add(queue, y, onto, y, M * N);
}

void
spw__cuda_product(spw_gpu_queue *queue, act *y, const act *onto, float by, const act *x, const act *w, float scale,
                  uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    cuda_product p = spw__cuda_dense_product(y, x, w, M, N, K);
    SPW_ASSERT(y != onto && y != x && y != w);
    p.onto = onto;
    p.by = by;
    p.scale = scale;
    p.trans_a = (flags & SPW_OP_X_IN_OUT) != 0;
    p.trans_b = (flags & SPW_OP_W_IN_OUT) == 0;
    spw__cuda_gemm(spw__cuda_queue_of(queue), &p);
}

void
spw__cuda_linear_gelu(spw_gpu_queue *queue, act *y, act *gelu_in, const act *x, const act *w, const act *b, uint64_t M,
                      uint64_t N, uint64_t K, unsigned flags)
{
    bool by_row = (flags & SPW_OP_BY_ROW) != 0;
    cuda_product p = spw__cuda_dense_product(by_row ? gelu_in : y, x, w, M, N, K);
    p.after = by_row ? AFTER_NOTHING : AFTER_GELU;
    p.bias = b;
    p.gelu_in = gelu_in;
    linear(spw__cuda_queue_of(queue), &p, flags);
    if (by_row)
        spw__cuda_curve(queue, SPW_CURVE_GELU, y, gelu_in, M * N);
}

/* gelu_in NULL: x is no gelu. */
static void
linear_backward(cuda_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *gelu_in,
                const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    bool in_out = (flags & SPW_OP_W_IN_OUT) != 0;
    cuda_product of_w =
        in_out ? spw__cuda_dense_product(dw, x, dy, K, N, M) : spw__cuda_dense_product(dw, dy, x, N, K, M);
    cuda_product of_x = spw__cuda_dense_product(dx, dy, w, M, K, N);
    of_w.trans_a = of_w.f32_out = true;
    of_w.onto = flags & SPW_OP_SET_DW ? NULL : dw;
    of_x.trans_b = in_out;
    of_x.onto = flags & SPW_OP_ACC_DX ? dx : NULL;
    of_x.after = gelu_in != NULL ? AFTER_GELU_BACKWARD : AFTER_NOTHING;
    of_x.gelu_in = (void *)gelu_in;
    if (db != NULL)
        spw__cuda_column_sums(q, db, NULL, dy, NULL, NULL, NULL, M, N, N);
    if (dw != NULL)
        spw__cuda_gemm(q, &of_w);
    if (dx != NULL)
        spw__cuda_gemm(q, &of_x);
}

void
spw__cuda_linear_backward(spw_gpu_queue *queue, act *dx, float *dw, float *db, const act *dy, const act *x,
                          const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    linear_backward(spw__cuda_queue_of(queue), dx, dw, db, dy, x, NULL, w, M, N, K, flags);
}

void
spw__cuda_linear_gelu_backward(spw_gpu_queue *queue, act *dx, float *dw, float *db, const act *dy, const act *x,
                               const act *gelu_in, const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    SPW_ASSERT((flags & SPW_OP_ACC_DX) == 0);
    linear_backward(spw__cuda_queue_of(queue), dx, dw, db, dy, x, gelu_in, w, M, N, K, flags);
}
