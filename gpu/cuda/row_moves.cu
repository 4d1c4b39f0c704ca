/* Rows by their numbers: a block per row, in the widest words that the rows are made of. */
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
