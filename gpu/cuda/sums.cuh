/*
 * Kernels of the copies: element types converted, sums of squares per 4096 elements, as another type would hold them, in the
 * order of the cpu device (16 lanes, then the lanes in turn, in double, where squares are exact), so that both give the same
 * bits.
 */
#ifndef SPW_CUDA_SUMS_CUH
#define SPW_CUDA_SUMS_CUH

#include "common.cuh"

enum { SUM_LANES = 16, SUM_CHUNKS = 8, CHUNK_ELEMS = 4096 };

template <class D, class S>
__global__ void
convert_kernel(D *dst, const S *src, uint64_t n, bool wide)
{
    uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    float v[8];
    if (i >= n)
        return;
    load8(v, src + i, n - i, wide);
    store8(dst + i, v, n - i, wide);
}

/* What a D holds of an S. */
template <class D, class S> struct rounded {
    SPW_DEVICE float
    of(S x)
    {
        D d;
        narrow(&d, widen(x));
        return widen(d);
    }
};
template <class T> struct rounded<T, T> {
    SPW_DEVICE float
    of(T x)
    {
        return widen(x);
    }
};

/* 16 threads per 4096 elements, eight of these per block. */
template <class D, class S>
__global__ void
sumsq_kernel(double *sums, const S *x, uint64_t n)
{
    __shared__ double lanes[SUM_CHUNKS * SUM_LANES];
    uint64_t chunk = (uint64_t)blockIdx.x * SUM_CHUNKS + threadIdx.x / SUM_LANES, first = chunk * CHUNK_ELEMS;
    uint64_t end = least(n, first + CHUNK_ELEMS);
    double sum = 0;
    for (uint64_t i = first + threadIdx.x % SUM_LANES; i < end; i += SUM_LANES) {
        double v = (double)rounded<D, S>::of(x[i]);
        sum += v * v;
    }
    lanes[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x % SUM_LANES == 0 && first < n) {
        sum = 0;
        for (int j = 0; j < SUM_LANES; j++)
            sum += lanes[threadIdx.x + j];
        sums[chunk] = sum;
    }
}

#endif
