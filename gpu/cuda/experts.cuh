/*
 * A mixture of experts: routing with a warp per row, the stable sort of its pairs by expert, and rows to their experts and back.
 *
 * The sort counts: blocks of consecutive pairs count their experts, one scan over the blocks of each expert says where theirs begin,
 * and the blocks place their pairs in order. Inside a block a warp finds by ballots which of its pairs share an expert, so that
 * neither pass needs an atomic. Rows are moved by the row, not by the sorted pair: what k experts get is read once.
 */
#ifndef SPW_CUDA_EXPERTS_CUH
#define SPW_CUDA_EXPERTS_CUH

#include "common.cuh"
#include "spw_gpu.h"

enum {
    WARP = 32,
    LANE_FEW = 8, /* experts of a lane where there are at most 256: lane, lane + 32, ... */
    LANE_MANY = SPW_EXPERTS_MAX / WARP,
    ROUTE_WARPS = 8, /* rows, or pairs, of a block */
    ROUTE_THREADS = ROUTE_WARPS * WARP,
};

/* ---------------------------------------------------------------- routing */

/* Greater for the greater logit, of equal ones for the lower expert; a NaN is above all. Never 0. */
SPW_DEVICE uint64_t
rank_of(float logit, unsigned expert)
{
    unsigned bits = __float_as_uint(logit + 0.0f); /* -0 is 0 */
    bits ^= bits & 0x80000000u ? 0xffffffffu : 0x80000000u;
    bits = logit != logit ? 0xffffffffu : bits;
    return (uint64_t)bits << 32 | (0xffffffffu - expert);
}

SPW_DEVICE float
value_of(uint64_t rank)
{
    unsigned bits = (unsigned)(rank >> 32);
    return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

SPW_DEVICE float
logistic(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

SPW_DEVICE float
softplus_of(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* The probability of an expert that has one by itself. */
SPW_DEVICE float
alone(const spw_routing_rule &rule, float logit)
{
    return rule.root ? sqrtf(softplus_of(logit)) : logistic(logit);
}

/* Its slope over it; of the root 1/2 at the lower end, where both are lost. */
SPW_DEVICE float
slope_of(const spw_routing_rule &rule, float logit)
{
    if (!rule.root)
        return 1.0f - logistic(logit);
    return logit < -15.0f ? 0.5f : logistic(logit) / (2.0f * softplus_of(logit));
}

/* The greatest of the warp's ranks, which is taken out of them. experts: how many there are. */
template <int L>
SPW_DEVICE uint64_t
take_best(uint64_t (&rank)[L], unsigned experts)
{
    uint64_t best = rank[0];
#pragma unroll
    for (unsigned i = 1; i < L && i * WARP < experts; i++)
        best = most(best, rank[i]);
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2)
        best = most(best, __shfl_xor_sync(0xffffffffu, best, d));
#pragma unroll
    for (unsigned i = 0; i < L && i * WARP < experts; i++)
        rank[i] = rank[i] == best ? 0 : rank[i];
    return best;
}

/* Of a row's logits. */
template <int L, class T>
SPW_DEVICE float
largest(const T *logits, unsigned E)
{
    uint64_t best = 0;
#pragma unroll
    for (unsigned i = 0; i < L; i++)
        best = threadIdx.x % WARP + i * WARP < E ? most(best, rank_of(widen(logits[threadIdx.x % WARP + i * WARP]), 0))
                                                 : best;
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2)
        best = most(best, __shfl_xor_sync(0xffffffffu, best, d));
    return value_of(best);
}

/* Experts of groups that are not among the best get the rank of -inf. */
template <int L>
__device__ static void
leave_groups(uint64_t (&rank)[L], const spw_routing_rule &rule, unsigned E)
{
    unsigned lane = threadIdx.x % WARP, groups = (unsigned)rule.groups, each = E / groups;
    uint64_t worth[L] = {0}, stays[L / 2] = {0}; /* of group lane + 32 i; a bit each */
    for (unsigned g = 0; g < groups; g++) {
        uint64_t mine[L], best;
        float value;
#pragma unroll
        for (unsigned i = 0; i < L; i++)
            mine[i] = lane + i * WARP < E && (lane + i * WARP) / each == g ? rank[i] : 0;
        best = take_best(mine, E);
        value = value_of(best);
        if (rule.sigmoid && each > 1)
            value += value_of(take_best(mine, E));
#pragma unroll
        for (unsigned i = 0; i < L; i++)
            worth[i] = lane + i * WARP == g ? rank_of(value, g) : worth[i];
    }
    for (unsigned j = 0; j < (unsigned)rule.group_choices; j++) {
        unsigned g = 0xffffffffu - (unsigned)take_best(worth, groups);
#pragma unroll
        for (unsigned i = 0; i < L / 2; i++)
            stays[i] |= g / 64 == i ? 1ull << g % 64 : 0ull;
    }
#pragma unroll
    for (unsigned i = 0; i < L; i++) {
        unsigned e = lane + i * WARP, g = e / each;
        bool stay = false;
#pragma unroll
        for (unsigned k = 0; k < L / 2; k++)
            stay = stay || (g / 64 == k && (stays[k] >> g % 64 & 1) != 0);
        if (e < E && !stay)
            rank[i] = rank_of(-INFINITY, e);
    }
}

/* The first k lanes of a warp have an expert each: the lane-th lowest of them. */
SPW_DEVICE unsigned
in_order(unsigned expert, unsigned k)
{
    unsigned lane = threadIdx.x % WARP, place = 0, mine = 0;
    for (unsigned j = 0; j < k; j++) {
        unsigned other = __shfl_sync(0xffffffffu, expert, (int)j);
        place += other < expert || (other == expert && j < lane) ? 1 : 0;
    }
    for (unsigned j = 0; j < k; j++) {
        unsigned other = __shfl_sync(0xffffffffu, expert, (int)j);
        if (__shfl_sync(0xffffffffu, place, (int)j) == lane)
            mine = other;
    }
    return mine;
}

template <class T, int L>
__global__ void
route_kernel(spw_routing r, const T *logits, spw_routing_rule rule)
{
    uint64_t row = (uint64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP, rank[L];
    unsigned lane = threadIdx.x % WARP, E = (unsigned)r.E, expert = 0;
    float v[L], mine = 0.0f, max, weight, sum, all = 0.0f;
    const T *bias = (const T *)rule.bias, *factors = (const T *)rule.factors;
    if (row >= r.M)
        return; /* the whole warp */
    max = largest<L>(logits + row * E, E);
#pragma unroll
    for (unsigned i = 0; i < L; i++) {
        v[i] = lane + i * WARP < E ? widen(logits[row * E + lane + i * WARP]) : -INFINITY;
        all += lane + i * WARP < E && !rule.sigmoid && (bias != NULL || !rule.sum_to_one) ? expf(v[i] - max) : 0.0f;
    }
    all = rule.sigmoid ? 1.0f : warp_sum(all);
#pragma unroll
    for (unsigned i = 0; i < L; i++) {
        unsigned e = lane + i * WARP;
        float key = rule.sigmoid ? alone(rule, v[i]) : bias != NULL ? expf(v[i] - max) / all : v[i];
        if (bias != NULL && e < E)
            key += sum_of_terms(bias + SPW_TERMS * e);
        rank[i] = e < E ? rank_of(key, e) : 0;
    }
    if (rule.groups > 0)
        leave_groups(rank, rule, E);
    for (unsigned j = 0; j < r.k && rule.table == NULL; j++) {
        uint64_t best = take_best(rank, E);
        if (lane == j)
            expert = 0xffffffffu - (unsigned)best;
    }
    if (rule.table != NULL && lane < r.k)
        expert =
            least((unsigned)sum_of_terms((const T *)rule.table + ((uint64_t)rule.tokens[row] * r.k + lane) * SPW_TERMS),
                  E - 1);
    expert = in_order(expert, (unsigned)r.k);
    if (lane < r.k)
        mine = widen(logits[row * E + expert]);
    weight = lane >= r.k ? 0.0f : rule.sigmoid ? alone(rule, mine) : expf(mine - max);
    sum = rule.sum_to_one ? warp_sum(weight) : all;
    if (rule.sum_to_one && (rule.sigmoid || bias != NULL))
        sum += rule.least > 0.0f ? rule.least : SPW_WEIGHTS_LEAST;
    if (lane < r.k) {
        weight = weight / sum * rule.scale;
        if (factors != NULL) {
            r.shares[row * r.k + lane] = weight;
            weight *= widen(factors[expert]);
        }
        r.weights[row * r.k + lane] = weight;
        r.choices[row * r.k + lane] = (int32_t)expert;
    }
}

/* How many pairs an expert has; 0 for one that there is not. */
__device__ static inline int32_t
pairs_of(const spw_routing &r, unsigned e)
{
    return e >= r.E ? 0 : e > 0 ? r.ends[e] - r.ends[e - 1] : r.ends[e];
}

/*
 * Of a softmax, over the chosen ones or over all, times scale: dlogits[e] = w[e] (dw[e] - sum of w dw / scale), dw 0 where not chosen. Of a
 * sigmoid or a root: w[e] times its slope over it times (dw[e] - that sum, if weights are divided by theirs) of the chosen ones alone. With factors w is what it was
 * before them, and dw is multiplied by its expert's.
 */
template <class T, int L>
__global__ void
route_backward_kernel(T *dlogits, const float *dweights, const T *logits, spw_routing r, spw_routing_rule rule,
                      float balance, bool add)
{
    uint64_t row = (uint64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP;
    unsigned lane = threadIdx.x % WARP, E = (unsigned)r.E, expert = 0;
    const T *factors = (const T *)rule.factors;
    float d[L] = {0}, w = 0.0f, dw = 0.0f, slope = 1.0f, mean, sum = 0.0f;
    if (row >= r.M)
        return; /* the whole warp */
    if (lane < r.k) {
        w = (factors != NULL ? r.shares : r.weights)[row * r.k + lane];
        dw = dweights[row * r.k + lane];
        expert = (unsigned)r.choices[row * r.k + lane];
        if (factors != NULL)
            dw *= widen(factors[expert]);
        slope = rule.sigmoid ? slope_of(rule, widen(logits[row * E + expert])) : 1.0f;
    }
    mean = rule.sigmoid && !rule.sum_to_one ? 0.0f : warp_sum(w * dw);
    if (!rule.sum_to_one && !rule.sigmoid) {
        float max = largest<L>(logits + row * E, E);
#pragma unroll
        for (unsigned i = 0; i < L; i++) {
            d[i] = lane + i * WARP < E ? expf(widen(logits[row * E + lane + i * WARP]) - max) : 0.0f;
            sum += d[i];
        }
        sum = -mean / warp_sum(sum);
#pragma unroll
        for (unsigned i = 0; i < L; i++)
            d[i] *= sum;
    }
    for (unsigned j = 0, before = E; j < r.k; j++) {
        unsigned chosen = __shfl_sync(0xffffffffu, expert, (int)j);
        float of_chosen = __shfl_sync(0xffffffffu, w * (dw - mean / rule.scale) * slope, (int)j);
#pragma unroll
        for (unsigned i = 0; i < L; i++)
            d[i] = chosen == lane + i * WARP ? (chosen == before ? d[i] : 0.0f) + of_chosen : d[i];
        before = chosen;
    }
    if (balance != 0.0f) {
        float max = largest<L>(logits + row * E, E), p[L], slopes[L], all = 0.0f, c = 0.0f;
#pragma unroll
        for (unsigned i = 0; i < L; i++) {
            float logit = lane + i * WARP < E ? widen(logits[row * E + lane + i * WARP]) : -INFINITY;
            p[i] = lane + i * WARP >= E ? 0.0f : rule.sigmoid ? alone(rule, logit) : expf(logit - max);
            slopes[i] = rule.sigmoid && lane + i * WARP < E ? slope_of(rule, logit) : 1.0f;
            all += p[i];
            c += p[i] * balance * (float)pairs_of(r, lane + i * WARP);
        }
        all = 1.0f / warp_sum(all);
        c = warp_sum(c) * all;
#pragma unroll
        for (unsigned i = 0; i < L; i++)
            d[i] += p[i] * all * (balance * (float)pairs_of(r, lane + i * WARP) - c) * slopes[i];
    }
#pragma unroll
    for (unsigned i = 0; i < L; i++) {
        T *to = dlogits + row * E + lane + i * WARP;
        if (lane + i * WARP < E)
            narrow(to, add ? widen(*to) + d[i] : d[i]);
    }
}

enum { FACTOR_THREADS = 256 };

/*
 * A block per expert. A thread has its pairs among rows_each rows, which are as many whichever they are, and takes them in order: so the shape
 * alone decides what is added to what, and a thread's rows are few though an expert may have all.
 */
SPW_KERNEL void
factors_backward_kernel(float *dfactors, const float *dweights, spw_routing r, uint64_t rows_each)
{
    unsigned e = blockIdx.x;
    uint64_t at = e > 0 ? (uint64_t)r.ends[e - 1] : 0, end = (uint64_t)r.ends[e], least_above = end;
    uint64_t first = threadIdx.x * rows_each * r.k, past = first + rows_each * r.k;
    float sum = 0.0f;
    while (at < least_above) { /* the first one that is not below */
        uint64_t middle = (at + least_above) / 2;
        if ((uint64_t)r.pairs[middle] < first)
            at = middle + 1;
        else
            least_above = middle;
    }
    for (; at < end && (uint64_t)r.pairs[at] < past; at++)
        sum += dweights[r.pairs[at]] * r.shares[r.pairs[at]];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        dfactors[e] += sum;
}

/* ---------------------------------------------------------------- the sort */

enum {
    SORT_ROUNDS = 8, /* pairs of a thread: a warp takes 256 consecutive ones */
    SCAN_THREADS = 256,
};
/* A block of the sort has L warps: a thread for each of at most 32 L experts. */

/* The sum over the threads before this one; *all gets that over the block. */
SPW_DEVICE int
block_scan(int v, int *all)
{
    __shared__ int parts[32];
    int lane = (int)(threadIdx.x % WARP), sum = v, before = 0;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        int lower = __shfl_sync(0xffffffffu, sum, lane >= d ? lane - d : lane);
        sum += lane >= d ? lower : 0;
    }
    __syncthreads(); /* parts of the call before have been read */
    if (lane == WARP - 1)
        parts[threadIdx.x / WARP] = sum;
    __syncthreads();
    *all = 0;
    for (unsigned w = 0; w < blockDim.x / WARP; w++) {
        before += w < threadIdx.x / WARP ? parts[w] : 0;
        *all += parts[w];
    }
    return before + sum - v;
}

SPW_DEVICE uint64_t
pair_of_round(unsigned r)
{
    uint64_t warp = (uint64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    return (warp * SORT_ROUNDS + r) * WARP + threadIdx.x % WARP;
}

/*
 * counts[w][e] gets how many of warp w's pairs chose e, before[r] how many of those come before this thread's pair of round r, which
 * chose expert[r]. All threads call it; a barrier follows.
 */
template <int EXPERTS>
SPW_DEVICE void
count_in_warps(int (*counts)[EXPERTS], int *before, unsigned *expert, const int32_t *choices, uint64_t n)
{
    unsigned lane = threadIdx.x % WARP;
    int *mine = counts[threadIdx.x / WARP];
    for (unsigned e = lane; e < EXPERTS; e += WARP)
        mine[e] = 0;
    __syncwarp();
#pragma unroll
    for (unsigned r = 0; r < SORT_ROUNDS; r++) {
        bool there = pair_of_round(r) < n;
        unsigned alike = __ballot_sync(0xffffffffu, there), lower;
        expert[r] = there ? (unsigned)choices[pair_of_round(r)] : 0;
        for (unsigned b = 1; b < EXPERTS; b *= 2) {
            unsigned set = __ballot_sync(0xffffffffu, (expert[r] & b) != 0);
            alike &= expert[r] & b ? set : ~set;
        }
        lower = alike & ((1u << lane) - 1);
        before[r] = mine[expert[r]] + __popc(lower);
        __syncwarp(); /* it has been read */
        if (there && lower == 0)
            mine[expert[r]] += __popc(alike);
        __syncwarp();
    }
    __syncthreads();
}

/* counts (E, blocks): of each block's pairs. */
template <int L>
__global__ void
count_kernel(int *counts, const int32_t *choices, uint64_t n, unsigned E)
{
    __shared__ int in_warps[L][L * WARP];
    int before[SORT_ROUNDS], sum = 0;
    unsigned expert[SORT_ROUNDS], e = threadIdx.x;
    count_in_warps(in_warps, before, expert, choices, n);
    if (e >= E)
        return;
    for (unsigned w = 0; w < L; w++)
        sum += in_warps[w][e];
    counts[(uint64_t)e * gridDim.x + blockIdx.x] = sum;
}

/* A block per expert: each of its counts becomes the sum of those before, totals (E) get that of all. */
SPW_KERNEL void
scan_kernel(int *counts, int *totals, unsigned blocks)
{
    int *mine = counts + (uint64_t)blockIdx.x * blocks, sum = 0;
    for (unsigned at = 0; at < blocks; at += blockDim.x) {
        unsigned b = at + threadIdx.x;
        int all, before = block_scan(b < blocks ? mine[b] : 0, &all);
        if (b < blocks)
            mine[b] = sum + before;
        sum += all;
    }
    if (threadIdx.x == 0)
        totals[blockIdx.x] = sum;
}

template <int L>
__global__ void
place_kernel(spw_routing r, const int *counts, const int *totals)
{
    __shared__ int in_warps[L][L * WARP];
    int before[SORT_ROUNDS], all, total, at;
    unsigned expert[SORT_ROUNDS], e = threadIdx.x, warp = threadIdx.x / WARP;
    uint64_t n = r.M * r.k;
    count_in_warps(in_warps, before, expert, r.choices, n);
    total = e < r.E ? totals[e] : 0;
    at = block_scan(total, &all);
    if (e < r.E) {
        if (blockIdx.x == 0)
            r.ends[e] = at + total;
        at += counts[(uint64_t)e * gridDim.x + blockIdx.x];
        for (unsigned w = 0; w < L; w++) {
            int count = in_warps[w][e];
            in_warps[w][e] = at;
            at += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (unsigned round = 0; round < SORT_ROUNDS; round++) {
        uint64_t i = pair_of_round(round);
        if (i < n) {
            int place = in_warps[warp][expert[round]] + before[round];
            r.places[i] = place;
            r.pairs[place] = (int32_t)i;
        }
    }
}

/* ---------------------------------------------------------------- rows */

/* U is what a thread copies at a time, units of them a row. A block per row of x. */
template <class U>
__global__ void
dispatch_kernel(U *y, const U *x, spw_routing r, uint64_t units)
{
    const int32_t *places = r.places + blockIdx.x * r.k;
    for (uint64_t u = threadIdx.x; u < units; u += blockDim.x) {
        U v = x[blockIdx.x * units + u];
#pragma unroll 4
        for (unsigned j = 0; j < r.k; j++)
            y[(uint64_t)places[j] * units + u] = v;
    }
}

/* What load8() and store8() are told is left of a row; WIDE: whole eights, so that loads of several rows need no branch in between. */
template <bool WIDE>
SPW_DEVICE uint64_t
left_of(uint64_t C, uint64_t c)
{
    return WIDE ? 8 : C - c;
}

/* sum += of N rows of x from the j-th choice on, or down from it, in order, once all of them are on their way. */
template <int N, class T, bool WIDE>
SPW_DEVICE void
add_rows(float *sum, const T *x, const int32_t *places, const float *weights, unsigned j, bool down, uint64_t C,
         uint64_t c)
{
    float v[N][8], w[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        unsigned at = down ? j - (unsigned)n : j + (unsigned)n;
        w[n] = weights != NULL ? weights[at] : 1.0f;
        load8(v[n], x + (uint64_t)places[at] * C + c, left_of<WIDE>(C, c), WIDE);
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += w[n] * v[n][i];
}

template <class T, bool WIDE>
__global__ void
combine_kernel(T *y, const T *onto, const T *x, spw_routing r, bool weighted, bool down, uint64_t C)
{
    const int32_t *places = r.places + blockIdx.x * r.k;
    const float *weights = weighted ? r.weights + blockIdx.x * r.k : NULL;
    unsigned k = (unsigned)r.k;
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        float sum[8], there[8] = {0};
        unsigned done = 0;
        if (onto != NULL)
            load8(there, onto + blockIdx.x * C + c, left_of<WIDE>(C, c), WIDE);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = down ? 0.0f : there[i];
        for (; done + 4 <= k; done += 4)
            add_rows<4, T, WIDE>(sum, x, places, weights, down ? k - 1 - done : done, down, C, c);
        if (k & 2) {
            add_rows<2, T, WIDE>(sum, x, places, weights, down ? k - 1 - done : done, down, C, c);
            done += 2;
        }
        if (k & 1)
            add_rows<1, T, WIDE>(sum, x, places, weights, down ? k - 1 - done : done, down, C, c);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += down ? there[i] : 0.0f;
        store8(y + blockIdx.x * C + c, sum, left_of<WIDE>(C, c), WIDE);
    }
}

/* A warp per pair: those of one row are neighbours, and find dy in the cache. */
template <class T, bool WIDE>
__global__ void
combine_backward_kernel(T *dx, float *dweights, const T *dy, const T *x, spw_routing r, uint64_t C)
{
    uint64_t pair = (uint64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP, at;
    float w, dot = 0.0f;
    if (pair >= r.M * r.k)
        return; /* the whole warp */
    w = r.weights[pair];
    at = (uint64_t)r.places[pair] * C;
    dy += (uint64_t)((unsigned)pair / (unsigned)r.k) * C;
    for (uint64_t c = threadIdx.x % WARP * 8; c < C; c += WARP * 8) {
        uint64_t left = left_of<WIDE>(C, c);
        float d[8], v[8] = {0};
        load8(d, dy + c, left, WIDE);
        if (dweights != NULL)
            load8(v, x + at + c, left, WIDE); /* zeros behind the end */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            dot += d[i] * v[i];
            d[i] *= w;
        }
        if (dx != NULL)
            store8(dx + at + c, d, left, WIDE);
    }
    if (dweights == NULL)
        return;
    dot = warp_sum(dot);
    if (threadIdx.x % WARP == 0)
        dweights[pair] = dot;
}

/* ---------------------------------------------------------------- some places, whose rows lie by themselves */

/* A block per row. U: the widest piece that row and addresses allow. */
template <class U>
__global__ void
dispatch_piece_kernel(U *y, const U *x, const int32_t *pairs, unsigned k, uint64_t units)
{
    const U *from = x + (uint64_t)((unsigned)pairs[blockIdx.x] / k) * units;
    for (uint64_t u = threadIdx.x; u < units; u += blockDim.x)
        y[blockIdx.x * units + u] = from[u];
}

/*
 * A warp per place. The lowest place of a row here adds all of them to the row's sum, by place: no two warps add to one.
 */
template <class T, bool WIDE>
__global__ void
combine_piece_kernel(float *sum, const T *x, spw_routing r, bool weighted, bool down, uint64_t first, uint64_t rows,
                     uint64_t C)
{
    uint64_t i = (uint64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP;
    unsigned k = (unsigned)r.k, row, from = 0, past; /* its choices that are here, by place */
    const int32_t *places;
    if (i >= rows)
        return; /* the whole warp */
    row = (unsigned)r.pairs[first + i] / k;
    places = r.places + (uint64_t)row * k;
    while ((uint64_t)places[from] < first)
        from++;
    if ((uint64_t)places[from] != first + i)
        return;
    for (past = from + 1; past < k && (uint64_t)places[past] < first + rows; past++)
        continue;
    sum += (uint64_t)row * C;
    for (uint64_t c = threadIdx.x % WARP * 8; c < C; c += WARP * 8) {
        uint64_t left = left_of<WIDE>(C, c);
        float s[8], v[8];
        load8(s, sum + c, left, WIDE);
        for (unsigned a = 0; a < past - from; a++) {
            unsigned j = down ? past - 1 - a : from + a;
            float w = weighted ? r.weights[(uint64_t)row * k + j] : 1.0f;
            load8(v, x + ((uint64_t)places[j] - first) * C + c, left, WIDE);
#pragma unroll
            for (int e = 0; e < 8; e++)
                s[e] += w * v[e];
        }
        store8(sum + c, s, left, WIDE);
    }
}

/* A warp per place. */
template <class T, bool WIDE>
__global__ void
combine_backward_piece_kernel(T *dx, float *dweights, const T *dy, const T *x, spw_routing r, uint64_t first,
                              uint64_t rows, uint64_t C)
{
    uint64_t i = (uint64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP;
    unsigned pair;
    float w, dot = 0.0f;
    if (i >= rows)
        return; /* the whole warp */
    pair = (unsigned)r.pairs[first + i];
    w = r.weights[pair];
    dy += (uint64_t)(pair / (unsigned)r.k) * C;
    for (uint64_t c = threadIdx.x % WARP * 8; c < C; c += WARP * 8) {
        uint64_t left = left_of<WIDE>(C, c);
        float d[8], v[8] = {};
        load8(d, dy + c, left, WIDE);
        if (dweights != NULL)
            load8(v, x + i * C + c, left, WIDE); /* zeros behind the end */
#pragma unroll
        for (int e = 0; e < 8; e++) {
            dot += d[e] * v[e];
            d[e] *= w;
        }
        if (dx != NULL)
            store8(dx + i * C + c, d, left, WIDE);
    }
    dot = warp_sum(dot);
    if (dweights != NULL && threadIdx.x % WARP == 0)
        dweights[pair] = dot;
}

/* A block per row. */
template <class T, bool WIDE>
__global__ void
close_sums_kernel(T *y, const float *sums, const T *onto, uint64_t C)
{
    uint64_t row = blockIdx.x * C;
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        uint64_t left = left_of<WIDE>(C, c);
        float sum[8], there[8] = {0};
        load8(sum, sums + row + c, left, WIDE);
        if (onto != NULL) {
            load8(there, onto + row + c, left, WIDE);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += there[i];
        }
        store8(y + row + c, sum, left, WIDE);
    }
}

/* ---------------------------------------------------------------- an expert of all rows */

SPW_DEVICE float
sigmoid_of(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* A block per row. */
template <class T, bool WIDE>
__global__ void
add_gated_kernel(T *y, const T *onto, const T *x, const T *gate, uint64_t C)
{
    float s = sigmoid_of(widen(gate[blockIdx.x]));
    uint64_t row = blockIdx.x * C;
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        uint64_t left = left_of<WIDE>(C, c);
        float sum[8], v[8];
        load8(sum, onto + row + c, left, WIDE);
        load8(v, x + row + c, left, WIDE);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] += s * v[i];
        store8(y + row + c, sum, left, WIDE);
    }
}

/* A warp per row. */
template <class T, bool WIDE>
__global__ void
add_gated_backward_kernel(T *dx, T *dgate, const T *dy, const T *x, const T *gate, uint64_t M, uint64_t C)
{
    uint64_t row = (uint64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / WARP;
    float s, dot = 0.0f;
    if (row >= M)
        return; /* the whole warp */
    s = sigmoid_of(widen(gate[row]));
    for (uint64_t c = threadIdx.x % WARP * 8; c < C; c += WARP * 8) {
        uint64_t left = left_of<WIDE>(C, c);
        float d[8], v[8];
        load8(d, dy + row * C + c, left, WIDE);
        load8(v, x + row * C + c, left, WIDE); /* zeros behind the end */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            dot += d[i] * v[i];
            d[i] *= s;
        }
        store8(dx + row * C + c, d, left, WIDE);
    }
    dot = warp_sum(dot);
    if (threadIdx.x % WARP == 0)
        narrow(dgate + row, s * (1.0f - s) * dot);
}

#endif
