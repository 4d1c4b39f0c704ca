/* Launches of the optimizer's kernels: finds a chunk's arrays in its record and hands its ranges over a few at a time. */
#include "cuda_internal.h"
#include "optimizer.cuh"

static_assert((int)SPW_RULE_ADAM == UPDATE_ADAM && (int)SPW_RULE_ADAGRAD == UPDATE_ADAGRAD &&
                  (int)SPW_RULE_LION == UPDATE_LION && (int)SPW_RULE_SGD == UPDATE_SGD &&
                  (int)SPW_RULE_MUON == UPDATE_MUON && SPW_RULE_COUNT == 5,
              "rules");

static void
find_arrays(update_args *a, const spw_gpu_update *u)
{
    uint32_t count = u->rule == SPW_RULE_ADAM ? 2 : 1;
    char *at = (char *)u->record;
    a->first = u->first;
    a->weights = u->weights;
    a->low = at;
    a->grad = u->grad;
    a->key = u->key;
    a->nearest = u->nearest;
    a->rule = (int)u->rule;
    a->grad_type = u->grad_dtype == SPW_F32    ? UPDATE_GRAD_F32
                   : u->grad_dtype == SPW_BF16 ? UPDATE_GRAD_BF16
                                               : UPDATE_GRAD_F16;
    at += u->elems * u->low_bytes;
    for (uint32_t j = 0; j < count; j++, at += u->elems * u->moment_bytes)
        a->moment[j] = at;
    for (uint32_t j = 0; j < count && u->moment_bytes == 1; j++, at += u->elems / UPDATE_GROUP * 2)
        a->scale[j] = (uint16_t *)at;
    a->is_unsigned[0] = u->rule == SPW_RULE_ADAGRAD; /* sums of squares are never negative */
    a->is_unsigned[1] = u->rule == SPW_RULE_ADAM;
}

static void
launch(cuda_queue *q, const spw_gpu_update *u, const update_args *a)
{
    unsigned blocks = spw__cuda_blocks(a->end - a->begin, UPDATE_THREADS * UPDATE_EACH);
#define UPDATE(type, low, code) LAUNCH(q, blocks, UPDATE_THREADS, 0, (update_kernel<type, low, code>), *a)
    if (u->moment_bytes == 2)
        UPDATE(bf16, 2, UPDATE_MOMENT_BF16);
    else if (u->moment_bytes == 1 && u->low_bytes == 2)
        UPDATE(bf16, 2, UPDATE_MOMENT_INT8);
    else if (u->moment_bytes == 1)
        UPDATE(bf16, 1, UPDATE_MOMENT_INT8);
    else if (u->low_bytes == 0)
        UPDATE(float, 0, UPDATE_MOMENT_F32);
    else if (u->low_bytes == 2)
        UPDATE(bf16, 2, UPDATE_MOMENT_F32);
    else if (u->weight_dtype == SPW_BF16)
        UPDATE(bf16, 4, UPDATE_MOMENT_F32);
    else
        UPDATE(f16, 4, UPDATE_MOMENT_F32);
#undef UPDATE
}

/*
 * What kernels leave for the host: in its memory, if they reach it, for they write to it once for 4096 elements, and count there only when
 * something is wrong. Else in scratch memory, and every update has to clear and deliver that, which takes as long as the update.
 */
typedef struct outcome {
    unsigned long long *nonfinite;
    double *squares;
    char *scratch; /* nonfinite and squares, those that are there; NULL: none are */
} outcome;

enum { COUNT_BYTES = 256 };

/* squares: NULL with sum_bytes 0. False after a sticky error. */
static bool
find_outcome(cuda_queue *q, outcome *out, uint64_t *nonfinite, double *squares, uint64_t sum_bytes)
{
    out->nonfinite = (unsigned long long *)spw__cuda_reach(nonfinite);
    out->squares = squares != NULL ? (double *)spw__cuda_reach(squares) : NULL;
    out->scratch = NULL;
    if (out->nonfinite != NULL && (squares == NULL || out->squares != NULL))
        return true;
    out->scratch = (char *)spw__cuda_scratch(q, COUNT_BYTES + sum_bytes);
    if (out->scratch == NULL)
        return false;
    out->nonfinite = (unsigned long long *)(void *)out->scratch;
    out->squares = (double *)(void *)(out->scratch + COUNT_BYTES);
    return spw__cuda_ok(q->gpu, cudaMemsetAsync(out->scratch, 0, sizeof *nonfinite, q->stream), "zero");
}

static void
deliver(cuda_queue *q, const outcome *out, uint64_t *nonfinite, double *squares, uint64_t sum_bytes)
{
    if (out->scratch == NULL)
        return;
    spw__cuda_deliver(q, nonfinite, out->nonfinite, sizeof *nonfinite);
    if (squares != NULL)
        spw__cuda_deliver(q, squares, out->squares, sum_bytes);
}

/* As many ranges from r on as a launch takes; returns where they end: whole multiples of `each`. */
static uint64_t
take_ranges(update_range *out, uint64_t elems, const spw_gpu_update_range *ranges, uint32_t range_count, uint32_t r,
            uint64_t each)
{
    uint32_t n = range_count - r < (uint32_t)UPDATE_RANGES ? range_count - r : (uint32_t)UPDATE_RANGES;
    for (uint32_t k = 0; k < n; k++) {
        out[k].end = ranges[r + k].end;
        out[k].grad_scale = ranges[r + k].grad_scale;
        memcpy(out[k].c, ranges[r + k].c, sizeof out[k].c);
    }
    return r + n < range_count ? ranges[r + n - 1].end / each * each : elems;
}

/* The first that does not end before `at`: a launch may begin in the middle of one. */
static uint32_t
range_at(const spw_gpu_update_range *ranges, uint32_t range_count, uint32_t r, uint64_t at)
{
    while (r < range_count && ranges[r].end <= at)
        r++;
    return r;
}

void
spw__cuda_update_state(spw_gpu_queue *queue, const spw_gpu_update *u, const spw_gpu_update_range *ranges,
                       uint32_t range_count, uint64_t *nonfinite)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    update_args a;
    outcome out;
    SPW_ASSERT(u->elems % UPDATE_GROUP == 0 && range_count > 0 && ranges[range_count - 1].end == u->elems);
    if (!find_outcome(q, &out, nonfinite, NULL, 0))
        return;
    memset(&a, 0, sizeof a);
    a.nonfinite = out.nonfinite;
    find_arrays(&a, u);
    if (u->rule == SPW_RULE_MUON) /* which its first half has changed */
        a.moment[0] = NULL;
    for (uint32_t r = 0; a.begin < u->elems; a.begin = a.end, r = range_at(ranges, range_count, r, a.begin)) {
        a.end = take_ranges(a.ranges, u->elems, ranges, range_count, r, UPDATE_GROUP);
        SPW_ASSERT(a.end > a.begin); /* a group belongs to a few ranges at most */
        launch(q, u, &a);
    }
    deliver(q, &out, nonfinite, NULL, 0);
}

template <int CODE>
static void
launch_momentum(cuda_queue *q, const spw_gpu_update *u, const momentum_args *a)
{
    unsigned blocks = (unsigned)((a->chunk.end - a->chunk.begin) / MOMENTUM_ELEMS);
    if (u->grad_dtype == SPW_F32)
        LAUNCH(q, blocks, UPDATE_THREADS, 0, (momentum_kernel<float, CODE>), *a);
    else if (u->grad_dtype == SPW_BF16)
        LAUNCH(q, blocks, UPDATE_THREADS, 0, (momentum_kernel<bf16, CODE>), *a);
    else
        LAUNCH(q, blocks, UPDATE_THREADS, 0, (momentum_kernel<f16, CODE>), *a);
}

void
spw__cuda_momentum(spw_gpu_queue *queue, const spw_gpu_update *u, void *grad, const spw_gpu_update_range *ranges,
                   uint32_t range_count, double *squares, uint64_t *nonfinite)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    const uint64_t sum_bytes = u->elems / MOMENTUM_ELEMS * sizeof(double);
    momentum_args a;
    update_args *c = &a.chunk;
    outcome out;
    SPW_ASSERT(u->elems % MOMENTUM_ELEMS == 0 && range_count > 0 && ranges[range_count - 1].end == u->elems);
    if (!find_outcome(q, &out, nonfinite, squares, sum_bytes))
        return;
    memset(&a, 0, sizeof a);
    find_arrays(c, u);
    c->nonfinite = out.nonfinite;
    a.grad = grad;
    for (uint32_t r = 0; c->begin < u->elems; c->begin = c->end, r = range_at(ranges, range_count, r, c->begin)) {
        c->end = take_ranges(c->ranges, u->elems, ranges, range_count, r, MOMENTUM_ELEMS);
        SPW_ASSERT(c->end > c->begin);
        a.sums = out.squares + c->begin / MOMENTUM_ELEMS;
        if (u->moment_bytes == 4)
            launch_momentum<UPDATE_MOMENT_F32>(q, u, &a);
        else if (u->moment_bytes == 2)
            launch_momentum<UPDATE_MOMENT_BF16>(q, u, &a);
        else
            launch_momentum<UPDATE_MOMENT_INT8>(q, u, &a);
    }
    deliver(q, &out, nonfinite, squares, sum_bytes);
}
