/*
 * Hyper-connections (spw_gpu.h): a thread makes a row's maps, whose matrix has 16 elements at most, and keeps the divisors of its turns for the way back; the
 * sums over streams are a pass over memory, in which a thread has eight columns of all streams of a row. Sums over columns are a block's, which has a row.
 */
#ifndef SPW_CUDA_STREAMS_CUH
#define SPW_CUDA_STREAMS_CUH

#include "common.cuh"
#include "spw_gpu.h"

enum {
    STREAMS = SPW_STREAMS_MAX,
    STREAM_MAPS = STREAMS * (2 + STREAMS),
    MAPS_THREADS = 64,
    MIX_THREADS = 128,
    MAP_SUMS_THREADS = 256
};

template <class E> struct maps_args {
    const E *mixes, *scale, *base, *dmaps;
    E *maps, *dmixes;
    float *dz; /* (M, width) backward, where parameters are trained */
    uint64_t M;
    unsigned n, width, rounds;
    bool head;
    float eps;
};

/* Which of the scales an element of a row has. */
SPW_DEVICE unsigned
scale_of(unsigned n, unsigned i)
{
    return i < n ? 0 : i < 2 * n ? 1 : 2;
}

SPW_DEVICE float
logistic_of(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <class E>
SPW_DEVICE void
make_z(const maps_args<E> &g, uint64_t row, float (&z)[STREAM_MAPS])
{
    for (unsigned i = 0; i < g.width; i++)
        z[i] = widen(g.mixes[row * g.width + i]) * widen(g.scale[scale_of(g.n, i)]) + widen(g.base[i]);
}

/* Maps of a row; its softmax, and the divisors of each turn. */
template <class E>
SPW_DEVICE void
make_maps(const maps_args<E> &g, const float (&z)[STREAM_MAPS], float (&maps)[STREAM_MAPS],
          float (&soft)[STREAMS * STREAMS], float (&divisors)[2 * SPW_ROUNDS_MAX][STREAMS])
{
    const unsigned n = g.n;
    float *comb = maps + 2 * n;
    for (unsigned i = 0; i < n; i++)
        maps[i] = logistic_of(z[i]) + g.eps;
    if (g.head)
        return;
    for (unsigned i = n; i < 2 * n; i++)
        maps[i] = 2.0f * logistic_of(z[i]);
    for (unsigned i = 0; i < n; i++) {
        const float *from = z + 2 * n + i * n;
        float max = from[0], sum = 0.0f;
        for (unsigned j = 1; j < n; j++)
            max = fmaxf(max, from[j]);
        for (unsigned j = 0; j < n; j++)
            sum += soft[i * n + j] = expf(from[j] - max);
        for (unsigned j = 0; j < n; j++) {
            soft[i * n + j] /= sum;
            comb[i * n + j] = soft[i * n + j] + g.eps;
        }
    }
    for (unsigned turn = 0; turn < 2 * g.rounds - 1; turn++) {
        const unsigned step = turn % 2 == 0 ? n : 1, from = turn % 2 == 0 ? 1 : n;
        for (unsigned i = 0; i < n; i++) {
            float sum = 0.0f;
            for (unsigned j = 0; j < n; j++)
                sum += comb[i * from + j * step];
            divisors[turn][i] = sum + g.eps;
            for (unsigned j = 0; j < n; j++)
                comb[i * from + j * step] /= divisors[turn][i];
        }
    }
}

template <class E>
__global__ void
__launch_bounds__(MAPS_THREADS) maps_kernel(maps_args<E> g)
{
    uint64_t row = (uint64_t)blockIdx.x * MAPS_THREADS + threadIdx.x;
    float z[STREAM_MAPS], maps[STREAM_MAPS], soft[STREAMS * STREAMS], divisors[2 * SPW_ROUNDS_MAX][STREAMS];
    if (row >= g.M)
        return;
    make_z(g, row, z);
    make_maps(g, z, maps, soft, divisors);
    for (unsigned i = 0; i < g.width; i++)
        narrow(g.maps + row * g.width + i, maps[i]);
}

/* The gradient of comb's logits from that of comb, in place: turns go back from what they gave. */
SPW_DEVICE void
comb_back(unsigned n, unsigned rounds, float *d, float *comb, const float (&soft)[STREAMS * STREAMS],
          const float (&divisors)[2 * SPW_ROUNDS_MAX][STREAMS])
{
    for (unsigned turn = 2 * rounds - 1; turn-- > 0;) {
        const unsigned step = turn % 2 == 0 ? n : 1, from = turn % 2 == 0 ? 1 : n;
        for (unsigned i = 0; i < n; i++) {
            float mean = 0.0f;
            for (unsigned j = 0; j < n; j++)
                mean += d[i * from + j * step] * comb[i * from + j * step];
            for (unsigned j = 0; j < n; j++) {
                d[i * from + j * step] = (d[i * from + j * step] - mean) / divisors[turn][i];
                comb[i * from + j * step] *= divisors[turn][i];
            }
        }
    }
    for (unsigned i = 0; i < n; i++) {
        float mean = 0.0f;
        for (unsigned j = 0; j < n; j++)
            mean += d[i * n + j] * soft[i * n + j];
        for (unsigned j = 0; j < n; j++)
            d[i * n + j] = soft[i * n + j] * (d[i * n + j] - mean);
    }
}

template <class E>
__global__ void
__launch_bounds__(MAPS_THREADS) maps_backward_kernel(maps_args<E> g)
{
    uint64_t row = (uint64_t)blockIdx.x * MAPS_THREADS + threadIdx.x;
    float z[STREAM_MAPS], d[STREAM_MAPS], maps[STREAM_MAPS], soft[STREAMS * STREAMS];
    float divisors[2 * SPW_ROUNDS_MAX][STREAMS];
    const unsigned n = g.n;
    if (row >= g.M)
        return;
    make_z(g, row, z);
    make_maps(g, z, maps, soft, divisors);
    for (unsigned i = 0; i < g.width; i++)
        d[i] = widen(g.dmaps[row * g.width + i]);
    for (unsigned i = 0; i < (g.head ? n : 2 * n); i++) {
        float p = logistic_of(z[i]);
        d[i] *= p * (1.0f - p) * (i < n ? 1.0f : 2.0f);
    }
    if (!g.head)
        comb_back(n, g.rounds, d + 2 * n, maps + 2 * n, soft, divisors);
    for (unsigned i = 0; i < g.width; i++) {
        if (g.dz != NULL)
            g.dz[row * g.width + i] = d[i];
        if (g.dmixes != NULL)
            narrow(g.dmixes + row * g.width + i, d[i] * widen(g.scale[scale_of(n, i)]));
    }
}

/* A block per element of maps adds up its dz, into dbase, and dz times mixes, into sums; rows by thread, then the threads. */
template <class E>
__global__ void
__launch_bounds__(MAP_SUMS_THREADS) maps_sums_kernel(maps_args<E> g, float *dbase, float *sums)
{
    const unsigned i = blockIdx.x;
    float base = 0.0f, scale = 0.0f;
    for (uint64_t row = threadIdx.x; row < g.M; row += MAP_SUMS_THREADS) {
        float d = g.dz[row * g.width + i];
        base += d;
        scale += d * widen(g.mixes[row * g.width + i]);
    }
    base = block_sum(base);
    scale = block_sum(scale);
    if (threadIdx.x == 0 && dbase != NULL)
        dbase[i] += base;
    if (threadIdx.x == 0)
        sums[i] = scale;
}

/* One thread: there are a few. */
SPW_KERNEL void
maps_scale_kernel(float *dscale, const float *sums, unsigned n, unsigned width)
{
    for (unsigned i = 0; threadIdx.x == 0 && i < width; i++)
        dscale[scale_of(n, i)] += sums[i];
}

/* ---------------------------------------------------------------- sums of streams */

template <class E> struct mix_args {
    const E *h, *x, *maps, *dy;
    E *y, *dh, *dx, *dmaps;
    uint64_t C;
    unsigned n, width;
    bool add, wide;
};

/* A row's maps lie in shared memory, where all threads read the same one at a time. */
template <class E>
SPW_DEVICE void
load_maps(float *w, const mix_args<E> &g, uint64_t row)
{
    if (threadIdx.x < g.width)
        w[threadIdx.x] = widen(g.maps[row * g.width + threadIdx.x]);
    __syncthreads();
}

template <class E>
__global__ void
__launch_bounds__(MIX_THREADS) mix_kernel(mix_args<E> g)
{
    __shared__ float w[STREAM_MAPS];
    const unsigned n = g.n, outs = g.h != NULL ? n : 1;
    uint64_t row = blockIdx.y, c = ((uint64_t)blockIdx.x * MIX_THREADS + threadIdx.x) * 8, left = c < g.C ? g.C - c : 0;
    eight<E> bits[STREAMS], of_h = {};
    float x[STREAMS][8], h[8];
    load_maps(w, g, row);
    if (left == 0)
        return;
#pragma unroll
    for (unsigned j = 0; j < STREAMS; j++)
        if (j < n)
            load_eight(&bits[j], g.x + (row * n + j) * g.C + c, left, g.wide);
    if (g.h != NULL)
        load_eight(&of_h, g.h + row * g.C + c, left, g.wide);
#pragma unroll
    for (unsigned j = 0; j < STREAMS; j++)
        if (j < n)
            widen8(x[j], bits[j]);
    widen8(h, of_h);
    for (unsigned k = 0; k < outs; k++) {
        float sum[8], of = g.h != NULL ? w[n + k] : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = g.h != NULL ? of * h[i] : 0.0f;
#pragma unroll
        for (unsigned j = 0; j < STREAMS; j++)
            if (j < n) {
                of = g.h != NULL ? w[2 * n + j * n + k] : w[j];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sum[i] += of * x[j][i];
            }
        store8(g.y + (row * outs + k) * g.C + c, sum, left, g.wide);
    }
}

/* What goes back to one input of a row's: din = sum over outputs of weight dy, and the products of dy and the input, a column's share. */
template <class E>
SPW_DEVICE void
mix_back(const mix_args<E> &g, E *din, const E *in, const float (&dy)[STREAMS][8], const float (&weights)[STREAMS],
         float (&sums)[STREAMS], unsigned outs, uint64_t left, bool add)
{
    eight<E> of_in, of_old = {};
    float x[8], d[8];
    load_eight(&of_in, in, left, g.wide);
    if (add && din != NULL)
        load_eight(&of_old, din, left, g.wide);
    widen8(x, of_in);
    widen8(d, of_old);
#pragma unroll
    for (unsigned k = 0; k < STREAMS; k++)
        if (k < outs)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                d[i] += weights[k] * dy[k][i];
                sums[k] += dy[k][i] * x[i];
            }
    if (din != NULL)
        store8(din, d, left, g.wide);
}

/* A block has a row. Input n is h. */
template <class E>
__global__ void
__launch_bounds__(MIX_THREADS) mix_backward_kernel(mix_args<E> g)
{
    __shared__ float w[STREAM_MAPS];
    const unsigned n = g.n, outs = g.h != NULL ? n : 1, ins = g.h != NULL ? n + 1 : n;
    uint64_t row = blockIdx.x;
    float sums[STREAMS + 1][STREAMS] = {};
    load_maps(w, g, row);
    for (uint64_t c = threadIdx.x * 8; c < g.C; c += MIX_THREADS * 8) {
        float dy[STREAMS][8];
#pragma unroll
        for (unsigned k = 0; k < STREAMS; k++)
            if (k < outs)
                load8(dy[k], g.dy + (row * outs + k) * g.C + c, g.C - c, g.wide);
#pragma unroll
        for (unsigned j = 0; j <= STREAMS; j++) {
            const bool is_h = j == n;
            const uint64_t at = is_h ? row * g.C + c : (row * n + j) * g.C + c;
            float weights[STREAMS];
            E *din = is_h ? g.dh : g.dx;
            if (j >= ins)
                continue;
#pragma unroll
            for (unsigned k = 0; k < STREAMS; k++)
                weights[k] = k >= outs ? 0.0f : g.h == NULL ? w[j] : is_h ? w[n + k] : w[2 * n + j * n + k];
            mix_back(g, din != NULL ? din + at : NULL, (is_h ? g.h : g.x) + at, dy, weights, sums[j], outs, g.C - c,
                     g.add && !is_h);
        }
    }
    if (g.dmaps == NULL)
        return;
#pragma unroll
    for (unsigned j = 0; j <= STREAMS; j++)
#pragma unroll
        for (unsigned k = 0; k < STREAMS; k++) {
            const unsigned at = g.h == NULL ? j : j == n ? n + k : 2 * n + j * n + k;
            float sum;
            if (j >= ins || k >= outs)
                continue;
            sum = block_sum(sums[j][k]);
            if (threadIdx.x == 0)
                narrow(g.dmaps + row * g.width + at, sum);
        }
}

#endif
