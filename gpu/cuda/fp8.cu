/*
 * 8-bit floats: codes, and products by cuBLASLt; where it has no way for one, codes become numbers of the compute type again, which
 * holds them exactly, and our own product takes those.
 */
#include "fp8.cuh"
#include "cuda_internal.h"

template <int FORMAT, class T>
static void
scale_of(cuda_queue *q, float *scale, const void *x, uint64_t n)
{
    const unsigned most_blocks = 1024, blocks = spw__cuda_blocks(n, FP8_THREADS * 8);
    LAUNCH(q, blocks < most_blocks ? blocks : most_blocks, FP8_THREADS, 0, (fp8_scale_kernel<FORMAT, T>),
           (unsigned *)scale, (const T *)x, n, spw__cuda_aligned(x));
}

void
spw__cuda_fp8_scale(spw_gpu_queue *queue, float *scale, spw_fp8 format, const act *x, uint64_t n)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    spw__cuda_zero(queue, scale, sizeof *scale);
    if (format == SPW_E4M3)
        BY_TYPE(q, scale_of<0, T>(q, scale, x, n));
    else
        BY_TYPE(q, scale_of<1, T>(q, scale, x, n));
}

template <int FORMAT, class T>
static void
encode(cuda_queue *q, uint8_t *codes, uint8_t *turned, const float *scale, const void *x, uint64_t M, uint64_t N)
{
    dim3 grid(spw__cuda_blocks(N, FP8_SQUARE), spw__cuda_blocks(M, FP8_SQUARE));
    LAUNCH(q, grid, FP8_THREADS, 0, (fp8_encode_kernel<FORMAT, T>), codes, turned, scale, (const T *)x, M, N,
           spw__cuda_aligned(x));
}

void
spw__cuda_fp8_encode(spw_gpu_queue *queue, uint8_t *codes, uint8_t *turned, spw_fp8 format, const float *scale,
                     const act *x, uint64_t M, uint64_t N)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    SPW_ASSERT(M % 16 == 0 && N % 16 == 0 && spw__cuda_aligned(codes, turned));
    if (format == SPW_E4M3)
        BY_TYPE(q, encode<0, T>(q, codes, turned, scale, x, M, N));
    else
        BY_TYPE(q, encode<1, T>(q, codes, turned, scale, x, M, N));
}

template <class T>
static void
decode(cuda_queue *q, T *y, const spw_fp8_matrix *m, uint64_t n)
{
    if (m->format == SPW_E4M3)
        LAUNCH(q, spw__cuda_blocks(n, FP8_THREADS), FP8_THREADS, 0, (fp8_decode_kernel<0, T>), y, m->codes, m->scale,
               n);
    else
        LAUNCH(q, spw__cuda_blocks(n, FP8_THREADS), FP8_THREADS, 0, (fp8_decode_kernel<1, T>), y, m->codes, m->scale,
               n);
}

template <class T>
static void
own_product(cuda_queue *q, const spw_fp8_product *p, cuda_product *way)
{
    uint64_t a = p->M * p->K, b = p->N * p->K;
    T *numbers = (T *)spw__cuda_scratch(q, (a + b) * sizeof(T));
    if (numbers == NULL)
        return;
    decode(q, numbers, &p->a, a);
    decode(q, numbers + a, &p->b, b);
    way->A = numbers;
    way->B = numbers + a;
    way->a_scale = way->b_scale = NULL;
    spw__cuda_gemm(q, way);
}

void
spw__cuda_fp8_product(spw_gpu_queue *queue, const spw_fp8_product *p)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    cuda_product way = spw__cuda_dense_product(p->y, p->a.codes, p->b.codes, p->M, p->N, p->K);
    SPW_ASSERT(p->M % 16 == 0 && p->N % 16 == 0 && p->K % 16 == 0);
    way.trans_b = true;
    way.f32_out = p->f32_out;
    way.onto = p->onto;
    way.bias = p->bias;
    way.a_scale = p->a.scale;
    way.b_scale = p->b.scale;
    way.a_format = p->a.format;
    way.b_format = p->b.format;
    if (q->gpu->info.compute_dtype == SPW_BF16 && q->gpu->blas != NULL && spw__cuda_blas_gemm(q, &way))
        return;
    BY_TYPE(q, own_product<T>(q, p, &way));
}
