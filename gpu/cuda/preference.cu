/* Weights of rows from preferences: a block per pair. */
#include "common.cuh"
#include "cuda_internal.h"
#define SPW_PREFERENCE_FN SPW_DEVICE
#include "preference_body.h"

enum { PAIR_THREADS = 256 };

/* A thread adds up every 256th row of each answer, and a tree all of these. */
SPW_KERNEL void
preference_kernel(float *weights, const float *losses, const int32_t *targets, const spw_pair *pairs,
                  spw_preference rule)
{
    __shared__ double sums[2][PAIR_THREADS];
    __shared__ unsigned counts[2][PAIR_THREADS];
    __shared__ float coef[2];
    const spw_pair *pair = pairs + blockIdx.x;
    const int32_t bounds[] = {pair->chosen, pair->rejected, pair->end};
    const unsigned t = threadIdx.x;
    if (bounds[2] == 0)
        return; /* the whole block */
#pragma unroll
    for (int k = 0; k < 2; k++) {
        double sum = 0;
        unsigned count = 0;
        for (int64_t i = bounds[k] + (int64_t)t; i < bounds[k + 1]; i += PAIR_THREADS) {
            bool has = targets[i] >= 0;
            sum += has ? (double)losses[i] : 0;
            count += has;
        }
        sums[k][t] = sum;
        counts[k][t] = count;
    }
    for (unsigned n = PAIR_THREADS / 2; n > 0; n /= 2) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 2 && t < n; k++) {
            sums[k][t] += sums[k][t + n];
            counts[k][t] += counts[k][t + n];
        }
    }
    if (t == 0) {
        const double all[] = {sums[0][0], sums[1][0]};
        const uint64_t rows[] = {counts[0][0], counts[1][0]};
        spw_preferred of = spw__preference_weigh(&rule, pair, all, rows);
        coef[0] = (float)of.coef[0];
        coef[1] = (float)of.coef[1];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; k++)
        for (int64_t i = bounds[k] + (int64_t)t; i < bounds[k + 1]; i += PAIR_THREADS)
            weights[i] = targets[i] >= 0 ? coef[k] : 0.0f;
}

void
spw__cuda_preference(spw_gpu_queue *queue, float *weights, const float *losses, const int32_t *targets,
                     const spw_pair *pairs, uint64_t pair_count, const spw_preference *rule)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (pair_count > 0)
        LAUNCH(q, (unsigned)pair_count, PAIR_THREADS, 0, (preference_kernel), weights, losses, targets, pairs, *rule);
}
