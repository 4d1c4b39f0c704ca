/*
 * Keys that stand for several rows (spw_gpu.h): a thread has a column of a window, and goes through the window's rows twice, once for the greatest logit
 * and once for the sums; backward makes both again. The windows of a sequence are followed by one that nobody has made: there backward writes the zeros of
 * what is read by none.
 */
#ifndef SPW_CUDA_COMPRESS_CUH
#define SPW_CUDA_COMPRESS_CUH

#include "common.cuh"

enum { COMPRESS_THREADS = 128 };

template <class E> struct compress_args {
    const E *kv, *gate, *bias, *dy;
    E *y, *dkv, *dgate;
    uint64_t T, D, windows;
    unsigned rate, parts;
};

/* Element c of a slot of window w, and of the bias: where both are from the beginning of the sequence, and of the bias. */
struct compress_slot {
    uint64_t at, bias_at;
};

template <class E>
SPW_DEVICE compress_slot
slot_of(const compress_args<E> &g, uint64_t w, unsigned slot, uint64_t c)
{
    bool before = g.parts == 2 && slot < g.rate;
    uint64_t row = slot % g.rate, col = g.parts == 2 && !before ? g.D + c : c;
    return compress_slot{((w - (before ? 1 : 0)) * g.rate + row) * g.parts * g.D + col, row * g.parts * g.D + col};
}

/* The window's first slot that there is, and how many there are. */
template <class E>
SPW_DEVICE unsigned
first_slot(const compress_args<E> &g, uint64_t w)
{
    return g.parts == 2 && w == 0 ? g.rate : 0;
}

/* The greatest logit of a column, the sum of exp(logit - that), and what is made of the values. */
template <class E>
SPW_DEVICE void
soften_column(const compress_args<E> &g, const E *kv, const E *gate, uint64_t w, uint64_t c, float *max, float *sum,
              float *y)
{
    *max = -INFINITY;
    *sum = *y = 0.0f;
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot s = slot_of(g, w, slot, c);
        *max = fmaxf(*max, widen(gate[s.at]) + widen(g.bias[s.bias_at]));
    }
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot s = slot_of(g, w, slot, c);
        float p = expf(widen(gate[s.at]) + widen(g.bias[s.bias_at]) - *max);
        *sum += p;
        *y += p * widen(kv[s.at]);
    }
    *y /= *sum;
}

template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) compress_kernel(compress_args<E> g)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, w = blockIdx.y, b = blockIdx.z;
    uint64_t first = b * g.T * g.parts * g.D;
    float max, sum, y;
    if (c >= g.D)
        return;
    soften_column(g, g.kv + first, g.gate + first, w, c, &max, &sum, &y);
    narrow(g.y + (b * g.windows + w) * g.D + c, y);
}

/* What nobody reads of a sequence: the last window's first columns where windows overlap, and rows behind it. */
template <class E>
SPW_DEVICE void
zero_unread(const compress_args<E> &g, E *dkv, E *dgate, uint64_t c)
{
    for (unsigned slot = 0; g.parts == 2 && g.windows > 0 && slot < g.rate; slot++) {
        compress_slot s = slot_of(g, g.windows, slot, c);
        narrow(dkv + s.at, 0.0f);
        narrow(dgate + s.at, 0.0f);
    }
    for (uint64_t row = g.windows * g.rate; row < g.T; row++)
        for (unsigned part = 0; part < g.parts; part++) {
            narrow(dkv + (row * g.parts + part) * g.D + c, 0.0f);
            narrow(dgate + (row * g.parts + part) * g.D + c, 0.0f);
        }
}

template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) compress_backward_kernel(compress_args<E> g)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, w = blockIdx.y, b = blockIdx.z;
    uint64_t first = b * g.T * g.parts * g.D;
    float max, sum, y, dy;
    if (c >= g.D)
        return;
    if (w == g.windows) {
        zero_unread(g, g.dkv + first, g.dgate + first, c);
        return;
    }
    soften_column(g, g.kv + first, g.gate + first, w, c, &max, &sum, &y);
    dy = widen(g.dy[(b * g.windows + w) * g.D + c]);
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot s = slot_of(g, w, slot, c);
        float p = expf(widen(g.gate[first + s.at]) + widen(g.bias[s.bias_at]) - max) / sum;
        narrow(g.dkv + first + s.at, p * dy);
        narrow(g.dgate + first + s.at, p * dy * (widen(g.kv[first + s.at]) - y));
    }
}

#endif
