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
    const E *old_kv, *old_gate;     /* of running sequences (spw_window_cache) */
    const int32_t *slots, *starts;  /* NULL: sequences are whole */
};

/* The position of a sequence's first row. */
template <class E>
SPW_DEVICE uint64_t
compress_start(const compress_args<E> &g, uint64_t b)
{
    return g.starts != NULL ? (uint64_t)g.starts[b] : 0;
}

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
    return compress_window{first, first + g.rate <= compress_start(g, b) + g.T, first >= begin + g.rate};
}

/* Element c of a slot of a window of sequence b: of values, or of gates, and of the bias. Of whole sequences both lie `at` behind those of the batch. */
template <class E> struct compress_slot {
    const E *kv, *gate;
    uint64_t at, bias_at;
};

template <class E>
SPW_DEVICE compress_slot<E>
slot_of(const compress_args<E> &g, uint64_t b, uint64_t first, unsigned slot, uint64_t c)
{
    bool before = g.parts == 2 && slot < g.rate;
    uint64_t i = slot % g.rate, col = g.parts == 2 && !before ? g.D + c : c, start = compress_start(g, b);
    uint64_t row = first - (before ? g.rate : 0) + i, width = g.parts * g.D, ring = g.parts * g.rate;
    uint64_t at = (b * g.T + row - start) * width + col;
    if (g.starts == NULL || row >= start)
        return compress_slot<E>{g.kv + at, g.gate + at, at, i * width + col};
    at = ((uint64_t)g.slots[b] * ring + row % ring) * width + col;
    return compress_slot<E>{g.old_kv + at, g.old_gate + at, at, i * width + col};
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
soften_column(const compress_args<E> &g, uint64_t b, const compress_window &w, uint64_t c, float *max, float *sum,
              float *y)
{
    *max = -INFINITY;
    *sum = *y = 0.0f;
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot<E> s = slot_of(g, b, w.first, slot, c);
        *max = fmaxf(*max, widen(*s.gate) + widen(g.bias[s.bias_at]));
    }
    for (unsigned slot = first_slot(g, w); slot < g.parts * g.rate; slot++) {
        compress_slot<E> s = slot_of(g, b, w.first, slot, c);
        float p = expf(widen(*s.gate) + widen(g.bias[s.bias_at]) - *max);
        *sum += p;
        *y += p * widen(*s.kv);
    }
    *y /= *sum;
}

template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) compress_kernel(compress_args<E> g)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, w = blockIdx.y, b = blockIdx.z;
    float max, sum, y = 0.0f;
    if (c >= g.D)
        return;
    const compress_window window = window_of(g, b, w);
    if (window.there)
        soften_column(g, b, window, c, &max, &sum, &y);
    narrow(g.y + (b * g.windows + w) * g.D + c, y);
}

/* What nobody reads of a sequence: the last window's first columns where windows overlap, and rows behind it. */
template <class E>
SPW_DEVICE void
zero_unread(const compress_args<E> &g, uint64_t b, uint64_t c)
{
    for (unsigned slot = 0; g.parts == 2 && g.windows > 0 && slot < g.rate; slot++) {
        compress_slot<E> s = slot_of(g, b, g.windows * g.rate, slot, c);
        narrow(g.dkv + s.at, 0.0f);
        narrow(g.dgate + s.at, 0.0f);
    }
    for (uint64_t row = g.windows * g.rate; row < g.T; row++)
        for (unsigned part = 0; part < g.parts; part++) {
            uint64_t at = ((b * g.T + row) * g.parts + part) * g.D + c;
            narrow(g.dkv + at, 0.0f);
            narrow(g.dgate + at, 0.0f);
        }
}

template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) compress_backward_kernel(compress_args<E> g)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, w = blockIdx.y, b = blockIdx.z;
    float max, sum, y, dy;
    if (c >= g.D)
        return;
    if (w == g.windows) {
        if (g.firsts == NULL)
            zero_unread(g, b, c);
        return;
    }
    const compress_window window = window_of(g, b, w);
    if (!window.there)
        return;
    soften_column(g, b, window, c, &max, &sum, &y);
    dy = widen(g.dy[(b * g.windows + w) * g.D + c]);
    for (unsigned slot = first_slot(g, window); slot < g.parts * g.rate; slot++) {
        compress_slot<E> s = slot_of(g, b, window.first, slot, c);
        float p = expf(widen(*s.gate) + widen(g.bias[s.bias_at]) - max) / sum;
        narrow(g.dkv + s.at, p * dy);
        narrow(g.dgate + s.at, p * dy * (widen(*s.kv) - y));
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
windows_kernel(int32_t *firsts, const int32_t *begins, const int32_t *starts, uint64_t count, uint64_t windows,
               uint64_t T, uint64_t rate)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, w = i % windows, start, first;
    uint64_t least_row = (w + 1) * rate - 1, found = T - 1;
    if (i >= count)
        return;
    start = starts != NULL ? (uint64_t)starts[i / windows] : 0;
    first = (start / rate + w) * rate;
    if (begins == NULL)
        found = first + rate <= start + T ? first : start + T - 1;
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

/* A row of the call's that windows to come read, to its place: t is counted from the first one of these. */
template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) compress_keep_kernel(E *old_kv, E *old_gate, compress_args<E> g, uint64_t skipped)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, t = skipped + blockIdx.y, b = blockIdx.z;
    uint64_t width = g.parts * g.D, ring = g.parts * g.rate, from = (b * g.T + t) * width + c;
    uint64_t to = ((uint64_t)g.slots[b] * ring + (compress_start(g, b) + t) % ring) * width + c;
    if (c >= width)
        return;
    old_kv[to] = g.kv[from];
    old_gate[to] = g.gate[from];
}

/* y's windows that are complete to their places among a sequence's keys. */
template <class E>
__global__ void
__launch_bounds__(COMPRESS_THREADS) keep_windows_kernel(E *keys, uint64_t capacity, const E *y, compress_args<E> g)
{
    uint64_t c = (uint64_t)blockIdx.x * COMPRESS_THREADS + threadIdx.x, w = blockIdx.y, b = blockIdx.z;
    const compress_window window = window_of(g, b, w);
    if (c < g.D && window.there)
        keys[((uint64_t)g.slots[b] * capacity + window.first / g.rate) * g.D + c] = y[(b * g.windows + w) * g.D + c];
}

#endif
