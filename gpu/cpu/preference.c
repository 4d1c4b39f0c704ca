/* Weights of rows from preferences, on the cpu device: a part has a pair, and goes from row to row. */
#include "cpu_internal.h"

typedef struct preference {
    float *weights;
    const float *losses;
    const int32_t *targets;
    const spw_pair *pairs;
    const spw_preference *rule;
} preference;

static void
pair_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const preference *a = ctx;
    const spw_pair *pair = &a->pairs[part_idx];
    const int32_t bounds[] = {pair->chosen, pair->rejected, pair->end};
    double sums[2] = {0, 0};
    uint64_t counts[2] = {0, 0};
    spw_preferred of;
    (void)worker_idx;
    if (pair->end == 0)
        return;
    for (int k = 0; k < 2; k++)
        for (int32_t i = bounds[k]; i < bounds[k + 1]; i++)
            if (a->targets[i] >= 0) {
                sums[k] += (double)a->losses[i];
                counts[k]++;
            }
    of = spw_preference_weigh(a->rule, pair, sums, counts);
    for (int k = 0; k < 2; k++)
        for (int32_t i = bounds[k]; i < bounds[k + 1]; i++)
            a->weights[i] = a->targets[i] >= 0 ? (float)of.coef[k] : 0.0f;
}

void
spw__cpu_preference(spw_gpu_queue *q, float *weights, const float *losses, const int32_t *targets,
                    const spw_pair *pairs, uint64_t pair_count, const spw_preference *rule)
{
    preference a = {.weights = weights, .losses = losses, .targets = targets, .pairs = pairs, .rule = rule};
    spw__cpu_run(q, (uint32_t)pair_count, pair_part, &a);
}
