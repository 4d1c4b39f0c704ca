/* Launches of the optimizer's kernels: finds a chunk's arrays in its record and hands its ranges over a few at a time. */
#include "cuda_internal.h"
#include "optimizer.cuh"

static_assert((int)SPW_RULE_ADAM == UPDATE_ADAM && (int)SPW_RULE_ADAGRAD == UPDATE_ADAGRAD &&
                  (int)SPW_RULE_LION == UPDATE_LION && (int)SPW_RULE_SGD == UPDATE_SGD && SPW_RULE_COUNT == 4,
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
 * Where the kernels count: in the caller's memory, if the device knows it, for they add to it only when something is wrong. Else in scratch
 * memory, and every update has to clear and deliver it, which takes as long as the update.
 */
static unsigned long long *
find_count(cuda_queue *q, uint64_t *nonfinite, bool *deliver)
{
    cudaPointerAttributes known;
    unsigned long long *count;
    *deliver = false;
    if (spw__cuda_refused(cudaPointerGetAttributes(&known, nonfinite)) == cudaSuccess &&
        known.type == cudaMemoryTypeHost && known.devicePointer != NULL)
        return (unsigned long long *)known.devicePointer;
    *deliver = true;
    count = (unsigned long long *)spw__cuda_scratch(q, sizeof *count);
    if (count != NULL)
        (void)spw__cuda_ok(q->gpu, cudaMemsetAsync(count, 0, sizeof *count, q->stream), "zero");
    return count;
}

void
spw__cuda_update_state(spw_gpu_queue *queue, const spw_gpu_update *u, const spw_gpu_update_range *ranges,
                       uint32_t range_count, uint64_t *nonfinite)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    update_args a;
    bool deliver;
    SPW_ASSERT(u->elems % UPDATE_GROUP == 0 && range_count > 0 && ranges[range_count - 1].end == u->elems);
    memset(&a, 0, sizeof a);
    a.nonfinite = find_count(q, nonfinite, &deliver);
    if (a.nonfinite == NULL)
        return;
    find_arrays(&a, u);
    for (uint32_t r = 0; r < range_count;) {
        uint32_t n = range_count - r < (uint32_t)UPDATE_RANGES ? range_count - r : (uint32_t)UPDATE_RANGES;
        for (uint32_t k = 0; k < n; k++) {
            a.ranges[k].end = ranges[r + k].end;
            a.ranges[k].grad_scale = ranges[r + k].grad_scale;
            memcpy(a.ranges[k].c, ranges[r + k].c, sizeof a.ranges[k].c);
        }
        a.end = r + n < range_count ? ranges[r + n - 1].end / UPDATE_GROUP * UPDATE_GROUP : u->elems;
        SPW_ASSERT(a.end > a.begin); /* a group belongs to a few ranges at most */
        launch(q, u, &a);
        while (r < range_count && ranges[r].end <= a.end) /* the next launch may begin in the middle of one */
            r++;
        a.begin = a.end;
    }
    if (deliver)
        spw__cuda_deliver(q, nonfinite, a.nonfinite, sizeof *nonfinite);
}
