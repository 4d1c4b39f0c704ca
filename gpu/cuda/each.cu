/* Launches each.cuh: linear layers of a mixture's experts, so many experts at a time as a launch's parameters hold. */
#include "each_internal.h"

/* What has no tensor cores, and what promises a row's bits to another kernel, goes one by one. */
static bool
alone(const cuda_queue *q, unsigned flags)
{
    return spw__cuda_is_f32(q) || (flags & SPW_OP_BY_ROW) != 0;
}

/* What differs from expert to expert: weights, or where their gradient goes. */
typedef struct each_work {
    const void *const *w, *const *bias;
    const bool *set; /* NULL: of rows */
} each_work;

template <class E, int BM, bool OF_ROWS, bool B_ROWS, bool WIDE = true>
static void
launch(cuda_queue *q, const each_args<E> &args)
{
    const uint32_t tiles = args.count > 0 ? args.experts[args.count - 1].tile_end : 0;
    if (tiles > 0 && WIDE && q->gpu->hopper)
        spw__cuda_each_hopper(q, args, BM, OF_ROWS, B_ROWS);
    else if (tiles > 0)
        LAUNCH(q, tiles, EACH_THREADS, (each_shared_bytes<BM, OF_ROWS, B_ROWS>()),
               (each_kernel<E, BM, OF_ROWS, B_ROWS, WIDE>), args);
}

/* Experts from `from` on into args, as many as it holds, with tiles of `down` by EACH_COLS. */
template <class E>
static void
gather(each_args<E> &args, const spw_each *e, const each_work &work, uint64_t from, uint64_t down)
{
    const uint64_t left = e->count - from;
    uint64_t tiles = 0;
    args.count = left < EACH_EXPERTS ? (uint32_t)left : (uint32_t)EACH_EXPERTS;
    for (uint32_t k = 0; k < args.count; k++) {
        each_expert *x = &args.experts[k];
        const uint64_t i = from + k, rows = spw__each_rows(e, i, &x->first), M = work.set != NULL ? args.M : rows;
        x->rows = (uint32_t)rows;
        x->w = work.w[i];
        x->bias = work.bias != NULL ? work.bias[i] : NULL;
        x->set = work.set != NULL && work.set[i];
        if (rows > 0 && x->w != NULL) /* else nobody is there, or the weights are frozen */
            tiles += (M + down - 1) / down * spw__cuda_blocks(args.N, EACH_COLS);
        x->tile_end = (uint32_t)tiles;
    }
    SPW_ASSERT(tiles <= INT32_MAX);
}

/* All begin at multiples of 16 bytes, and so do rows, of so many elements. */
static bool
aligned(const spw_each *e, const each_work &work, const void *a, const void *b, uint64_t row, uint64_t other_row)
{
    bool all = row % 8 == 0 && other_row % 8 == 0 && spw__cuda_aligned(a, b);
    uint64_t first;
    for (uint64_t i = 0; i < e->count; i++)
        all = all && (spw__each_rows(e, i, &first) == 0 || spw__cuda_aligned(work.w[i]));
    return all;
}

/* Experts with few rows would leave most of a larger tile empty. No bit hangs on it. */
static bool
have_few_rows(const spw_each *e)
{
    uint64_t busy = 0, first;
    for (uint64_t i = 0; i < e->count; i++)
        busy += spw__each_rows(e, i, &first) > 0;
    return e->ends[e->count - 1] < 96 * busy;
}

/* C (rows, N) = A (rows, K) B + bias of every expert. b_rows: weights are (N, K). */
template <class E>
static void
each_rows(cuda_queue *q, act *C, const act *A, const spw_each *e, const each_work &work, uint64_t N, uint64_t K,
          bool b_rows, bool add)
{
    const bool wide = aligned(e, work, A, C, N, K), few = wide && have_few_rows(e);
    each_args<E> args = {};
    args.A = (const E *)A;
    args.C = (E *)C;
    args.N = N;
    args.K = K;
    args.add = add;
    for (uint64_t from = 0; from < e->count; from += EACH_EXPERTS) {
        gather(args, e, work, from, few ? 64 : 128);
        if (few && b_rows)
            launch<E, 64, true, true>(q, args);
        else if (few)
            launch<E, 64, true, false>(q, args);
        else if (wide && b_rows)
            launch<E, 128, true, true>(q, args);
        else if (wide)
            launch<E, 128, true, false>(q, args);
        else if (b_rows)
            launch<E, 128, true, true, false>(q, args);
        else
            launch<E, 128, true, false, false>(q, args);
    }
}

/* dw (M, N) of every expert from its rows of A (rows, M) and B (rows, N). */
template <class E>
static void
each_gradient(cuda_queue *q, const act *A, const act *B, const spw_each *e, const each_work &work, uint64_t M,
              uint64_t N)
{
    const bool wide = aligned(e, work, A, B, M, N);
    each_args<E> args = {};
    args.A = (const E *)A;
    args.B = (const E *)B;
    args.M = M;
    args.N = N;
    for (uint64_t from = 0; from < e->count; from += EACH_EXPERTS) {
        gather(args, e, work, from, 128);
        if (wide)
            launch<E, 128, false, false>(q, args);
        else
            launch<E, 128, false, false, false>(q, args);
    }
}

void
spw__cuda_linear_each(spw_gpu_queue *queue, act *y, const act *x, const spw_each *e, unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    const each_work work = {e->w, e->b, NULL};
    const bool in_out = (flags & SPW_OP_W_IN_OUT) != 0;
    if (alone(q, flags))
        spw__each_alone(queue, y, x, e, spw_dtype_bytes(q->gpu->info.compute_dtype), flags);
    else if (e->count > 0)
        BY_16_BITS(q, each_rows<T>(q, y, x, e, work, e->N, e->K, !in_out, e->onto != NULL));
}

void
spw__cuda_linear_each_backward(spw_gpu_queue *queue, act *dx, const act *dy, const act *x, const spw_each *e,
                               unsigned flags)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    const each_work of_rows = {e->w, NULL, NULL}, of_weights = {(const void *const *)e->dw, NULL, e->set};
    const bool in_out = (flags & SPW_OP_W_IN_OUT) != 0;
    const uint64_t act_bytes = spw_dtype_bytes(q->gpu->info.compute_dtype);
    if (alone(q, flags)) {
        spw__each_backward_alone(queue, dx, dy, x, e, act_bytes, flags);
        return;
    }
    for (uint64_t i = 0; e->db != NULL && i < e->count; i++) {
        uint64_t first, n = spw__each_rows(e, i, &first);
        if (n > 0 && e->db[i] != NULL)
            spw__cuda_column_sums(q, e->db[i], NULL, (const char *)dy + first * e->N * act_bytes, NULL, NULL, NULL, n,
                                  e->N, e->N);
    }
    if (e->count > 0 && in_out)
        BY_16_BITS(q, each_gradient<T>(q, x, dy, e, of_weights, e->K, e->N));
    else if (e->count > 0)
        BY_16_BITS(q, each_gradient<T>(q, dy, x, e, of_weights, e->N, e->K));
    if (e->count > 0 && dx != NULL)
        BY_16_BITS(q, each_rows<T>(q, dx, dy, e, of_rows, e->K, e->N, in_out, (flags & SPW_OP_ACC_DX) != 0));
}
