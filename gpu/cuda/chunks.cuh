/*
 * What cuts documents into chunks for attention within those: bounds of each row, which its kernels take for a document's.
 */
#ifndef SPW_CUDA_CHUNKS_CUH
#define SPW_CUDA_CHUNKS_CUH

#include "common.cuh"

/* Of spw_gpu_chunks(). A thread per row. */
static __global__ void
chunks_kernel(int32_t *to_begins, int32_t *to_ends, const int32_t *begins, const int32_t *ends, const int32_t *starts,
              uint64_t rows, uint64_t T, uint64_t chunk)
{
    uint64_t row = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    uint64_t at = row % T + (starts != NULL ? (uint64_t)starts[row / T] : 0);
    uint64_t document = begins != NULL ? (uint64_t)begins[row] : 0, end = ends != NULL ? (uint64_t)ends[row] : T;
    uint64_t begin = document + (at - document) / chunk * chunk;
    to_begins[row] = (int32_t)begin;
    if (to_ends != NULL)
        to_ends[row] = (int32_t)least(end, begin + chunk);
}

#endif
