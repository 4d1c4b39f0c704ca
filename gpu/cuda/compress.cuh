/*
 * Keys that stand for several rows (spw_gpu.h): a thread has a column of a window, and goes through the window's rows twice, once for the greatest logit
 * and once for the sums; backward makes both again. The windows of a sequence are followed by one that nobody has made: there backward writes the zeros of
 * what is read by none. With documents these are anywhere, and everything is zero before.
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
    const int32_t *begins, *firsts; /* (B, T), (B, windows) of documents; NULL: a sequence is one */
};

/* A window: its first row in its sequence, whether it is anybody's, and whether its document has one before it. */
struct compress_window {
    uint64_t first;
    bool there, follows;
};

template <class E>
SPW_DEVICE compress_window
window_of(const compress_args<E> &g, uint64_t b, uint64_t w)
{
    uint64_t first = g.firsts != NULL ? (uint64_t)g.firsts[b * g.windows + w] : w * g.rate;
    uint64_t begin = g.begins != NULL ? (uint64_t)g.begins[b * g.T + first] : 0;
    return compress_window{first, first + g.rate <= g.T, first >= begin + g.rate};
}

/* Element c of a slot of a window, and of the bias: where both are from the beginning of the sequence, and of the bias. */
struct compress_slot {
    uint64_t at, bias_at;
};

template <class E>
SPW_DEVICE compress_slot
slot_of(const compress_args<E> &g, uint64_t first, unsigned slot, uint64_t c)
{
    bool before = g.parts == 2 && slot < g.rate;
    uint64_t row = slot % g.rate, col = g.parts == 2 && !before ? g.D + c : c;
    return compress_slot{(first - (before ? g.rate : 0) + row) * g.parts * g.D + col, row * g.parts * g.D + col};
}

/* The window's first slot that there is, and how many there are. */
template <class E>
SPW_DEVICE unsigned
first_slot(const compress_args<E> &g, const compress_window &w)
{
    return g.parts == 2 && !w.follows ? g.rate : 0;
}

/* The greatest logit of a column, the sum of exp(logit - that), and what is made of the values. */
template <class E>
SPW_DEVICE void
soften_column(const compress_args<E> &g, const E *kv, const E *gate, const compress_window &w, uint64_t c, float *max,
              float *sum, float *y)
{
    *max = -INFINITY;
    *sum = *y = 0.0f;
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot s = slot_of(g, w.first, slot, c);
        *max = fmaxf(*max, widen(gate[s.at]) + widen(g.bias[s.bias_at]));
    }
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot s = slot_of(g, w.first, slot, c);
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
    float max, sum, y = 0.0f;
    if (c >= g.D)
        return;
    const compress_window window = window_of(g, b, w);
    if (window.there)
        soften_column(g, g.kv + first, g.gate + first, window, c, &max, &sum, &y);
    narrow(g.y + (b * g.windows + w) * g.D + c, y);
}

/* What nobody reads of a sequence: the last window's first columns where windows overlap, and rows behind it. */
template <class E>
SPW_DEVICE void
zero_unread(const compress_args<E> &g, E *dkv, E *dgate, uint64_t c)
{
    for (unsigned slot = 0; g.parts == 2 && g.windows > 0 && slot < g.rate; slot++) {
        compress_slot s = slot_of(g, g.windows * g.rate, slot, c);
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
        if (g.firsts == NULL)
            zero_unread(g, g.dkv + first, g.dgate + first, c);
        return;
    }
    const compress_window window = window_of(g, b, w);
    if (!window.there)
        return;
    soften_column(g, g.kv + first, g.gate + first, window, c, &max, &sum, &y);
    dy = widen(g.dy[(b * g.windows + w) * g.D + c]);
    for (unsigned slot = first_slot(g, window); slot < g.parts * g.rate; slot++) {
        compress_slot s = slot_of(g, window.first, slot, c);
        float p = expf(widen(g.gate[first + s.at]) + widen(g.bias[s.bias_at]) - max) / sum;
        narrow(g.dkv + first + s.at, p * dy);
        narrow(g.dgate + first + s.at, p * dy * (widen(g.kv[first + s.at]) - y));
    }
}

/* With documents: a thread per element of a place in the window, over all windows in order. */
template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) compress_bias_kernel(float *dbias, compress_args<E> g, uint64_t B)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, width = g.parts * g.D, row = blockIdx.y;
    float sum = 0.0f;
    if (c >= width)
        return;
    for (uint64_t i = 0; i < B * g.windows; i++) {
        uint64_t first = (uint64_t)g.firsts[i];
        if (first + g.rate <= g.T)
            sum += widen(g.dgate[(i / g.windows * g.T + first + row) * width + c]);
    }
    dbias[row * width + c] += sum;
}

/* A thread per window: the last row of it is one of `rate` rows, of which at most one is the last of any. */
SPW_KERNEL void
windows_kernel(int32_t *firsts, const int32_t *begins, uint64_t count, uint64_t T, uint64_t rate)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, windows = T / rate, w = i % windows;
    uint64_t least_row = (w + 1) * rate - 1, found = begins == NULL ? w * rate : T - 1;
    if (i >= count)
        return;
    begins = begins != NULL ? begins + i / windows * T : NULL;
    for (uint64_t row = least(least_row + rate, T) - 1; begins != NULL && row >= least_row;) {
        uint64_t begin = (uint64_t)begins[row], end = begin + (row + 1 - begin) / rate * rate;
        if (end > begin && end > least_row)
            found = end - rate;
        if (found < T - 1 || begin == 0)
            break;
        row = begin - 1;
    }
    firsts[i] = (int32_t)found;
}

#endif
