/* Launches of a mixture of experts; the kernels are experts.cuh's. */
#include "experts.cuh"
#include "cuda_internal.h"

/* Threads for a row, of which each takes one piece at a time. */
static unsigned
row_threads(uint64_t pieces)
{
    uint64_t threads = spw_round_up(pieces, WARP);
    return threads > 512 ? 512 : (unsigned)threads;
}

/*
 * The sort moves about 20 bytes per pair: choices read twice, places and pairs written. A million pairs are 489 blocks, enough for
 * every multiprocessor, and their counters (250 KB for 128 experts) are little beside that.
 */
template <int L>
static void
route(cuda_queue *q, const spw_routing *r, const act *logits, const spw_routing_rule *rule)
{
    unsigned blocks = spw__cuda_blocks(r->M * r->k, L * WARP * SORT_ROUNDS), E = (unsigned)r->E;
    uint64_t count = (uint64_t)E * blocks;
    int *counts = (int *)spw__cuda_scratch(q, (count + E) * sizeof *counts);
    if (counts == NULL)
        return;
    BY_TYPE(q, LAUNCH(q, spw__cuda_blocks(r->M, ROUTE_WARPS), ROUTE_THREADS, 0, (route_kernel<T, L>), *r,
                      (const T *)logits, *rule));
    LAUNCH(q, blocks, L * WARP, 0, (count_kernel<L>), counts, r->choices, r->M * r->k, E);
    LAUNCH(q, E, SCAN_THREADS, 0, (scan_kernel), counts, counts + count, blocks);
    LAUNCH(q, blocks, L * WARP, 0, (place_kernel<L>), *r, counts, counts + count);
}

void
spw__cuda_route(spw_gpu_queue *queue, const spw_routing *r, const act *logits, const spw_routing_rule *rule)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    SPW_ASSERT(r->k > 0 && r->k <= SPW_CHOICES_MAX && r->k <= r->E && r->E <= SPW_EXPERTS_MAX);
    if (r->M == 0) {
        (void)spw__cuda_ok(q->gpu, cudaMemsetAsync(r->ends, 0, r->E * sizeof *r->ends, q->stream), "zero");
        return;
    }
    if (r->E <= LANE_FEW * WARP)
        route<LANE_FEW>(q, r, logits, rule);
    else
        route<LANE_MANY>(q, r, logits, rule);
}

template <int L>
static void
route_backward(cuda_queue *q, act *dlogits, const float *dweights, const act *logits, const spw_routing *r,
               const spw_routing_rule *rule, float balance, bool add)
{
    BY_TYPE(q, LAUNCH(q, spw__cuda_blocks(r->M, ROUTE_WARPS), ROUTE_THREADS, 0, (route_backward_kernel<T, L>),
                      (T *)dlogits, dweights, (const T *)logits, *r, *rule, balance, add));
}

void
spw__cuda_route_backward(spw_gpu_queue *queue, act *dlogits, const float *dweights, const act *logits,
                         const spw_routing *r, const spw_routing_rule *rule, float balance, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (r->M == 0)
        return;
    if (r->E <= LANE_FEW * WARP)
        route_backward<LANE_FEW>(q, dlogits, dweights, logits, r, rule, balance, (flags & SPW_OP_ACC_DX) != 0);
    else
        route_backward<LANE_MANY>(q, dlogits, dweights, logits, r, rule, balance, (flags & SPW_OP_ACC_DX) != 0);
}

void
spw__cuda_factors_backward(spw_gpu_queue *queue, float *dfactors, const float *dweights, const spw_routing *r)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (r->M > 0)
        LAUNCH(q, (unsigned)r->E, FACTOR_THREADS, 0, (factors_backward_kernel), dfactors, dweights, *r,
               (r->M + FACTOR_THREADS - 1) / FACTOR_THREADS);
}

void
spw__cuda_dispatch(spw_gpu_queue *queue, act *y, const act *x, const spw_routing *r, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t row_bytes = C * spw_dtype_bytes(q->gpu->info.compute_dtype), units = row_bytes / sizeof(uint4);
    if (r->M == 0 || C == 0)
        return;
    if (row_bytes % sizeof(uint4) == 0 && spw__cuda_aligned(y, x))
        LAUNCH(q, (unsigned)r->M, row_threads(units), 0, (dispatch_kernel<uint4>), (uint4 *)y, (const uint4 *)x, *r,
               units);
    else
        BY_TYPE(q, LAUNCH(q, (unsigned)r->M, row_threads(C), 0, (dispatch_kernel<T>), (T *)y, (const T *)x, *r, C));
}

template <class T, bool WIDE>
static void
combine(cuda_queue *q, act *y, const act *onto, const act *x, const spw_routing *r, bool weighted, bool down,
        uint64_t C)
{
    LAUNCH(q, (unsigned)r->M, row_threads((C + 7) / 8), 0, (combine_kernel<T, WIDE>), (T *)y, (const T *)onto,
           (const T *)x, *r, weighted, down, C);
}

void
spw__cuda_combine(spw_gpu_queue *queue, act *y, const act *onto, const act *x, const spw_routing *r, bool weighted,
                  bool down, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(y, onto, x);
    if (r->M == 0 || C == 0)
        return;
    BY_TYPE(q, wide ? combine<T, true>(q, y, onto, x, r, weighted, down, C)
                    : combine<T, false>(q, y, onto, x, r, weighted, down, C));
}

template <class T, bool WIDE>
static void
combine_backward(cuda_queue *q, act *dx, float *dweights, const act *dy, const act *x, const spw_routing *r, uint64_t C)
{
    LAUNCH(q, spw__cuda_blocks(r->M * r->k, ROUTE_WARPS), ROUTE_THREADS, 0, (combine_backward_kernel<T, WIDE>), (T *)dx,
           dweights, (const T *)dy, (const T *)x, *r, C);
}

void
spw__cuda_combine_backward(spw_gpu_queue *queue, act *dx, float *dweights, const act *dy, const act *x,
                           const spw_routing *r, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(dx, dy, x);
    if (r->M == 0)
        return;
    BY_TYPE(q, wide ? combine_backward<T, true>(q, dx, dweights, dy, x, r, C)
                    : combine_backward<T, false>(q, dx, dweights, dy, x, r, C));
}

void
spw__cuda_dispatch_piece(spw_gpu_queue *queue, act *y, const act *x, const spw_routing *r, uint64_t first,
                         uint64_t rows, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    uint64_t row_bytes = C * spw_dtype_bytes(q->gpu->info.compute_dtype), units = row_bytes / sizeof(uint4);
    unsigned k = (unsigned)r->k;
    if (rows == 0 || C == 0)
        return;
    if (row_bytes % sizeof(uint4) == 0 && spw__cuda_aligned(y, x))
        LAUNCH(q, (unsigned)rows, row_threads(units), 0, (dispatch_piece_kernel<uint4>), (uint4 *)y, (const uint4 *)x,
               r->pairs + first, k, units);
    else
        BY_TYPE(q, LAUNCH(q, (unsigned)rows, row_threads(C), 0, (dispatch_piece_kernel<T>), (T *)y, (const T *)x,
                          r->pairs + first, k, C));
}

template <class T, bool WIDE>
static void
combine_piece(cuda_queue *q, float *sum, const act *x, const spw_routing *r, bool weighted, bool down, uint64_t first,
              uint64_t rows, uint64_t C)
{
    LAUNCH(q, spw__cuda_blocks(rows, ROUTE_WARPS), ROUTE_THREADS, 0, (combine_piece_kernel<T, WIDE>), sum, (const T *)x,
           *r, weighted, down, first, rows, C);
}

void
spw__cuda_combine_piece(spw_gpu_queue *queue, float *sum, const act *x, const spw_routing *r, bool weighted, bool down,
                        uint64_t first, uint64_t rows, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(sum, x);
    if (rows == 0 || C == 0)
        return;
    BY_TYPE(q, wide ? combine_piece<T, true>(q, sum, x, r, weighted, down, first, rows, C)
                    : combine_piece<T, false>(q, sum, x, r, weighted, down, first, rows, C));
}

template <class T, bool WIDE>
static void
combine_backward_piece(cuda_queue *q, act *dx, float *dweights, const act *dy, const act *x, const spw_routing *r,
                       uint64_t first, uint64_t rows, uint64_t C)
{
    LAUNCH(q, spw__cuda_blocks(rows, ROUTE_WARPS), ROUTE_THREADS, 0, (combine_backward_piece_kernel<T, WIDE>), (T *)dx,
           dweights, (const T *)dy, (const T *)x, *r, first, rows, C);
}

void
spw__cuda_combine_backward_piece(spw_gpu_queue *queue, act *dx, float *dweights, const act *dy, const act *x,
                                 const spw_routing *r, uint64_t first, uint64_t rows, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(dx, dy, x);
    if (rows == 0 || C == 0)
        return;
    BY_TYPE(q, wide ? combine_backward_piece<T, true>(q, dx, dweights, dy, x, r, first, rows, C)
                    : combine_backward_piece<T, false>(q, dx, dweights, dy, x, r, first, rows, C));
}

template <class T, bool WIDE>
static void
close_sums(cuda_queue *q, act *y, const float *sums, const act *onto, uint64_t M, uint64_t C)
{
    LAUNCH(q, (unsigned)M, row_threads((C + 7) / 8), 0, (close_sums_kernel<T, WIDE>), (T *)y, sums, (const T *)onto, C);
}

void
spw__cuda_close_sums(spw_gpu_queue *queue, act *y, const float *sums, const act *onto, uint64_t M, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(y, sums, onto);
    if (M == 0 || C == 0)
        return;
    BY_TYPE(q, wide ? close_sums<T, true>(q, y, sums, onto, M, C) : close_sums<T, false>(q, y, sums, onto, M, C));
}

template <class T, bool WIDE>
static void
add_gated(cuda_queue *q, act *y, const act *onto, const act *x, const act *gate, uint64_t M, uint64_t C)
{
    LAUNCH(q, (unsigned)M, row_threads((C + 7) / 8), 0, (add_gated_kernel<T, WIDE>), (T *)y, (const T *)onto,
           (const T *)x, (const T *)gate, C);
}

void
spw__cuda_add_gated(spw_gpu_queue *queue, act *y, const act *onto, const act *x, const act *gate, uint64_t M,
                    uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(y, onto, x);
    if (M == 0 || C == 0)
        return;
    BY_TYPE(q, wide ? add_gated<T, true>(q, y, onto, x, gate, M, C) : add_gated<T, false>(q, y, onto, x, gate, M, C));
}

template <class T, bool WIDE>
static void
add_gated_backward(cuda_queue *q, act *dx, act *dgate, const act *dy, const act *x, const act *gate, uint64_t M,
                   uint64_t C)
{
    LAUNCH(q, spw__cuda_blocks(M, ROUTE_WARPS), ROUTE_THREADS, 0, (add_gated_backward_kernel<T, WIDE>), (T *)dx,
           (T *)dgate, (const T *)dy, (const T *)x, (const T *)gate, M, C);
}

void
spw__cuda_add_gated_backward(spw_gpu_queue *queue, act *dx, act *dgate, const act *dy, const act *x, const act *gate,
                             uint64_t M, uint64_t C)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    bool wide = C % 8 == 0 && spw__cuda_aligned(dx, dy, x);
    if (M == 0)
        return;
    BY_TYPE(q, wide ? add_gated_backward<T, true>(q, dx, dgate, dy, x, gate, M, C)
                    : add_gated_backward<T, false>(q, dx, dgate, dy, x, gate, M, C));
}
