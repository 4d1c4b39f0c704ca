/*
 * Which keys attention reads, by another attention's scores (spw_gpu.h). Scores of 64 rows and 64 keys stay in a block's registers while it goes through the
 * heads, on tensor cores for 16-bit types, and are written once, to scratch. Then a block per row finds its k-th greatest by four digits of eight bits,
 * counted in shared memory, and writes a bit for each key that is not below it.
 */
#ifndef SPW_CUDA_CHOICE_CUH
#define SPW_CUDA_CHOICE_CUH

#include "attention_forward.cuh"

/* Where rows and their keys are: what both kernels are given of the shape. */
struct choice_rows {
    uint64_t T, first, capacity, keys, words, each, key_rows;
    const int32_t *begins, *slots, *starts;
};
template <class E> struct choice_args {
    choice_rows at;
    const E *q, *key, *weights;
    float *scores;
    int H, D;
    bool wide;
};

/* The position of row t of sequence b. */
SPW_DEVICE uint64_t
choice_position(const choice_rows &g, uint64_t b, uint64_t t)
{
    return g.first + t + (g.starts != NULL ? (uint64_t)g.starts[b] : 0);
}

/* The first key that a row may read. */
SPW_DEVICE uint64_t
choice_first(const choice_rows &g, uint64_t row)
{
    return g.begins != NULL ? (uint64_t)g.begins[row] / g.each : 0;
}

/* Where the keys end that row t of sequence b may read. */
SPW_DEVICE uint64_t
choice_end(const choice_rows &g, uint64_t b, uint64_t t)
{
    uint64_t row = b * g.T + t, begin = g.begins != NULL ? (uint64_t)g.begins[row] : 0;
    return choice_first(g, row) + (choice_position(g, b, t) + 1 - begin) / g.each;
}

/* Whether a row of a tile may read a key of another; `end` is behind the last that any does. */
SPW_DEVICE bool
choice_meets(const choice_rows &g, uint64_t row, uint64_t k0, uint64_t tile, uint64_t end)
{
    return k0 < end && k0 + tile > choice_first(g, row);
}

/* A head's part of a score; a NaN stays. */
SPW_DEVICE float
choice_part(float weight, float product)
{
    return weight * (product < 0.0f ? 0.0f : product);
}

enum { CHOICE_THREADS = 128, CHOICE_TILE = 64, CHOICE_COLUMNS = 128 };

constexpr size_t
choice_shared_bytes()
{
    return (size_t)4 * CHOICE_TILE * (CHOICE_COLUMNS + 8) * sizeof(bf16);
}

/* Heads of more columns than a tile's go through it in parts; of others keys are loaded once. The next step's tiles travel while one is computed. */
template <class E>
__global__ void
__launch_bounds__(CHOICE_THREADS) choice_scores_kernel(choice_args<E> g)
{
    const int size = CHOICE_TILE * (CHOICE_COLUMNS + 8), lane = (int)threadIdx.x % 32,
              my_row = (int)threadIdx.x / 32 * 16;
    const int parts = (g.D + CHOICE_COLUMNS - 1) / CHOICE_COLUMNS, steps = g.H * parts;
    SPW_DYNAMIC_SHARED(shared);
    E *q_tiles = (E *)shared, *k_tiles = q_tiles + 2 * size;
    uint64_t b = blockIdx.z, t0 = (uint64_t)blockIdx.y * CHOICE_TILE, k0 = (uint64_t)blockIdx.x * CHOICE_TILE;
    uint64_t row = b * g.at.T + t0, rows = least((uint64_t)CHOICE_TILE, g.at.T - t0), cols = g.at.words * 32;
    uint64_t end = choice_end(g.at, b, t0 + rows - 1);
    const E *q = g.q + row * (uint64_t)(g.H * g.D);
    const E *key = g.key + ((g.at.slots != NULL ? (uint64_t)g.at.slots[b] * g.at.capacity : b * g.at.key_rows) + k0) *
                               (uint64_t)g.D;
    float s[1][CHOICE_TILE / 8][4] = {}, sum[CHOICE_TILE / 8][4] = {};
    if (!choice_meets(g.at, row, k0, CHOICE_TILE, end))
        return; /* the whole block */
    auto load = [&](int step) {
        int d = step % parts * CHOICE_COLUMNS;
        if (step < steps)
            load_tile<CHOICE_TILE, CHOICE_COLUMNS, CHOICE_THREADS>(q_tiles + step % 2 * size,
                                                                   q + step / parts * g.D + d, (uint64_t)(g.H * g.D),
                                                                   (int64_t)rows, g.D - d, g.wide);
        if (step < steps && (parts > 1 || step == 0))
            load_tile<CHOICE_TILE, CHOICE_COLUMNS, CHOICE_THREADS>(k_tiles + step % 2 * size, key + d, (uint64_t)g.D,
                                                                   (int64_t)(end - k0), g.D - d, g.wide);
        copy_commit();
    };
    load(0);
    for (int step = 0; step < steps; step++) {
        load(step + 1);
        copy_wait<1>();
        __syncthreads();
        add_scores<CHOICE_COLUMNS, 64, 1, CHOICE_TILE>(s, q_tiles + step % 2 * size, my_row,
                                                       k_tiles + (parts > 1 ? step % 2 * size : 0),
                                                       g.D - step % parts * CHOICE_COLUMNS);
        __syncthreads(); /* tiles are read */
        if (step % parts + 1 < parts)
            continue;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint64_t mine = (uint64_t)(my_row + lane / 4 + 8 * r);
            float weight =
                mine < rows ? widen(g.weights[(row + mine) * (uint64_t)g.H + (uint64_t)(step / parts)]) : 0.0f;
#pragma unroll
            for (int n = 0; n < CHOICE_TILE / 8; n++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    sum[n][i] += choice_part(weight, s[0][n][i]);
                    s[0][n][i] = 0.0f;
                }
        }
    }
#pragma unroll
    for (int n = 0; n < CHOICE_TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint64_t mine = (uint64_t)(my_row + lane / 4 + i / 2 * 8),
                     u = k0 + (uint64_t)(8 * n + lane % 4 * 2 + i % 2);
            if (mine < rows && u < cols)
                g.scores[(row + mine) * cols + u] = sum[n][i];
        }
}

enum { CHOICE_F32_TILE = 16, CHOICE_F32_THREADS = CHOICE_F32_TILE * CHOICE_F32_TILE };

/* In fp32, a thread per score. */
SPW_KERNEL void
choice_scores_f32_kernel(choice_args<float> g)
{
    SPW_DYNAMIC_SHARED(shared);
    const int tile = CHOICE_F32_TILE, ld = g.D + 1, r = (int)threadIdx.x / tile, c = (int)threadIdx.x % tile;
    float *q = (float *)shared, *k = q + tile * ld, sum = 0.0f;
    uint64_t b = blockIdx.z, t0 = (uint64_t)blockIdx.y * CHOICE_F32_TILE, k0 = (uint64_t)blockIdx.x * CHOICE_F32_TILE;
    uint64_t row = b * g.at.T + t0, rows = least((uint64_t)CHOICE_F32_TILE, g.at.T - t0), cols = g.at.words * 32;
    uint64_t end = choice_end(g.at, b, t0 + rows - 1);
    uint64_t key = (g.at.slots != NULL ? (uint64_t)g.at.slots[b] * g.at.capacity : b * g.at.key_rows) + k0;
    if (!choice_meets(g.at, row, k0, CHOICE_F32_TILE, end))
        return; /* the whole block */
    for (int i = (int)threadIdx.x; i < tile * g.D; i += CHOICE_F32_THREADS)
        k[i / g.D * ld + i % g.D] = k0 + (uint64_t)(i / g.D) < end ? g.key[key * (uint64_t)g.D + (uint64_t)i] : 0.0f;
    for (int h = 0; h < g.H; h++) {
        float product = 0.0f;
        __syncthreads(); /* the queries before are read */
        for (int i = (int)threadIdx.x; i < tile * g.D; i += CHOICE_F32_THREADS)
            q[i / g.D * ld + i % g.D] =
                (uint64_t)(i / g.D) < rows
                    ? g.q[((row + (uint64_t)(i / g.D)) * (uint64_t)g.H + (uint64_t)h) * (uint64_t)g.D +
                          (uint64_t)(i % g.D)]
                    : 0.0f;
        __syncthreads();
        for (int d = 0; d < g.D; d++)
            product += q[r * ld + d] * k[c * ld + d];
        if ((uint64_t)r < rows)
            sum += choice_part(g.weights[(row + (uint64_t)r) * (uint64_t)g.H + (uint64_t)h], product);
    }
    if ((uint64_t)r < rows && k0 + (uint64_t)c < cols)
        g.scores[(row + (uint64_t)r) * cols + k0 + (uint64_t)c] = sum;
}

/* Whole numbers in the order of numbers, with 0 and -0 the same, and a NaN above all. */
SPW_DEVICE unsigned
choice_rank(float x)
{
    unsigned bits = __float_as_uint(x);
    if (x != x)
        return 0xffffffffu;
    bits = bits == 0x80000000u ? 0 : bits;
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

enum { PICK_THREADS = 256, PICK_WARPS = PICK_THREADS / 32 };

SPW_KERNEL void
choice_pick_kernel(uint32_t *bits, const float *scores, choice_rows g)
{
    __shared__ unsigned counts[PICK_THREADS]; /* of each digit */
    __shared__ unsigned found[2]; /* the rank so far, and how many of those that begin with it are among the chosen */
    __shared__ unsigned equals[PICK_WARPS];
    uint64_t row = blockIdx.x, first = choice_first(g, row), end = choice_end(g, row / g.T, row % g.T);
    unsigned least_rank = 0, left = (unsigned)g.keys, taken = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool all = end - first <= g.keys;
    scores += row * g.words * 32;
    for (int shift = 24; shift >= 0 && !all; shift -= 8) {
        counts[threadIdx.x] = 0;
        __syncthreads();
        for (uint64_t u = first + threadIdx.x; u < end; u += PICK_THREADS) {
            unsigned rank = choice_rank(scores[u]);
            if ((rank ^ least_rank) >> shift >> 8 == 0)
                atomicAdd(&counts[rank >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned digit = 255;
            for (; counts[digit] < left; digit--)
                left -= counts[digit];
            found[0] = least_rank | digit << shift;
            found[1] = left;
        }
        __syncthreads();
        least_rank = found[0];
        left = found[1];
    }
    for (uint64_t word0 = 0; word0 < g.words; word0 += PICK_WARPS) {
        uint64_t u = word0 * 32 + threadIdx.x;
        bool may = u >= first && u < end;
        unsigned rank = may && !all ? choice_rank(scores[u]) : 0, before = taken;
        unsigned same = __ballot_sync(0xffffffffu, may && !all && rank == least_rank), picked;
        if (lane == 0)
            equals[warp] = (unsigned)__popc(same);
        __syncthreads();
        for (unsigned w = 0; w < PICK_WARPS; w++) {
            before += w < warp ? equals[w] : 0;
            taken += equals[w];
        }
        before += (unsigned)__popc(same & ((1u << lane) - 1));
        picked = __ballot_sync(0xffffffffu, may && (all || rank > least_rank || (rank == least_rank && before < left)));
        if (lane == 0 && word0 + warp < g.words)
            bits[row * g.words + word0 + warp] = picked;
        __syncthreads(); /* equals are read */
    }
}

#endif
