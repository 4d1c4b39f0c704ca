/*
 * The short convolution in front of linear attention. A thread has two channels and walks over rows whose neighbors it keeps in registers,
 * with the rows that come next under way: forward in time, or backward for the gradients, of which those of the taps are sums of
 * fixed pieces of rows. A row's sum has one order, wherever a walk began.
 */
#ifndef SPW_CUDA_CONV_CUH
#define SPW_CUDA_CONV_CUH

#include "common.cuh"

enum {
    CONV_THREADS = 128,
    CONV_CHANNELS = 2,
    CONV_ROWS = 32,
    CONV_AHEAD = 4
}; /* rows of a walk forward, and of a load */

template <class E> struct conv_args {
    const E *x, *w, *dy;
    E *y, *dx;
    float *partial; /* (pieces, C, K) of dw; NULL: not wanted */
    const int32_t *begins, *ends;
    E *before;                     /* (slots, K - 1, C) NULL: no cache */
    const int32_t *slots, *starts; /* (B) */
    uint64_t T, C, M, rows;        /* rows of a piece */
    unsigned K;
    bool wide, add; /* rows begin where two channels can be loaded at once; onto dx */
};

/* p[0 .. least(left, 2)), zeros behind. */
template <class E>
SPW_DEVICE void
load_two(float *v, const E *p, uint64_t left, bool wide)
{
    if (wide && left >= CONV_CHANNELS) {
        SPW_NEED_ALIGNED(p, 2 * sizeof(E));
        if constexpr (sizeof(E) == 4) {
            float2 two = *(const float2 *)p;
            v[0] = two.x;
            v[1] = two.y;
        } else {
            unpack<E>(v, *(const unsigned *)p);
        }
    } else {
        v[0] = left > 0 ? widen(p[0]) : 0.0f;
        v[1] = left > 1 ? widen(p[1]) : 0.0f;
    }
}

template <class E>
SPW_DEVICE void
store_two(E *p, const float *v, uint64_t left, bool wide)
{
    if (wide && left >= CONV_CHANNELS) {
        SPW_NEED_ALIGNED(p, 2 * sizeof(E));
        if constexpr (sizeof(E) == 4)
            *(float2 *)p = float2{v[0], v[1]};
        else
            *(unsigned *)p = pack<E>(v[0], v[1]);
    } else {
        narrow(p, v[0]);
        if (left > 1)
            narrow(p + 1, v[1]);
    }
}

/* A thread's channels from c on, and their taps: the last K of TAPS, as all arrays of them have it. */
template <class E, int TAPS> struct conv_channels {
    uint64_t c, left;
    unsigned K;
    float w[TAPS][CONV_CHANNELS];
};

/* False: there are none. */
template <class E, int TAPS>
SPW_DEVICE bool
my_channels(conv_channels<E, TAPS> *m, const conv_args<E> &g)
{
    m->c = ((uint64_t)blockIdx.x * CONV_THREADS + threadIdx.x) * CONV_CHANNELS;
    m->K = TAPS == 4 ? 4 : g.K;
    if (m->c >= g.C)
        return false;
    m->left = g.C - m->c;
#pragma unroll
    for (unsigned j = 0; j < TAPS; j++)
#pragma unroll
        for (unsigned i = 0; i < CONV_CHANNELS; i++)
            m->w[j][i] = j + m->K >= TAPS && i < m->left ? widen(g.w[(m->c + i) * m->K + j + m->K - TAPS]) : 0.0f;
    return true;
}

/* What goes into the SiLU, of the last K rows of x. */
template <class E, int TAPS>
SPW_DEVICE float
taps_sum(const conv_channels<E, TAPS> &m, const float x[TAPS][CONV_CHANNELS], int i)
{
    float sum = 0.0f;
#pragma unroll
    for (unsigned j = 0; j < TAPS; j++)
        if (j + m.K >= TAPS)
            sum = __fmaf_rn(m.w[j][i], x[j][i], sum);
    return sum;
}

/* The rows before row t0 of sequence b, as far as they are in its document, into the window's places for them. */
template <class E, int TAPS>
SPW_DEVICE void
rows_before(float x[TAPS][CONV_CHANNELS], const conv_args<E> &g, const conv_channels<E, TAPS> &m, uint64_t b,
            uint64_t t0)
{
    const uint64_t begin = g.begins != NULL ? (uint64_t)g.begins[b * g.T + t0] : 0;
    const bool kept = g.before != NULL && t0 == 0 && g.starts[b] > 0;
#pragma unroll
    for (unsigned i = 1; i < TAPS; i++) {
        const bool is_tap = i < m.K, here = is_tap && t0 >= begin + i;
        const E *from = kept && is_tap ? g.before + ((uint64_t)g.slots[b] * (m.K - 1) + m.K - 1 - i) * g.C
                        : here         ? g.x + (b * g.T + t0 - i) * g.C
                                       : g.x;
        load_two(x[TAPS - 1 - i], from + m.c, (kept && is_tap) || here ? m.left : 0, g.wide);
    }
}

/* Rows that come next: row t of sequence b and those behind it, zeros from end on; whether a document begins with each. */
template <class E> struct conv_coming {
    float x[CONV_AHEAD][CONV_CHANNELS];
    bool anew[CONV_AHEAD];
};

template <class E, int TAPS>
SPW_DEVICE void
load_coming(conv_coming<E> *coming, const conv_args<E> &g, const conv_channels<E, TAPS> &m, uint64_t b, uint64_t t,
            uint64_t end)
{
#pragma unroll
    for (unsigned k = 0; k < CONV_AHEAD; k++) {
        const bool here = t + k < end;
        const uint64_t row = here ? b * g.T + t + k : 0;
        load_two(coming->x[k], g.x + row * g.C + m.c, here ? m.left : 0, g.wide);
        coming->anew[k] = g.begins != NULL && here && (uint64_t)g.begins[row] == t + k;
    }
}

/* Blocks: channels, runs of CONV_ROWS rows, sequences. What a cache keeps is written here where one run is all there is. */
template <class E, int TAPS>
__global__ void
__launch_bounds__(CONV_THREADS) conv_kernel(conv_args<E> g)
{
    const uint64_t b = blockIdx.z, t0 = (uint64_t)blockIdx.y * CONV_ROWS, end = least(g.T, t0 + CONV_ROWS);
    conv_channels<E, TAPS> m;
    conv_coming<E> now, next;
    float x[TAPS][CONV_CHANNELS] = {};
    if (!my_channels(&m, g))
        return;
    rows_before<E, TAPS>(x, g, m, b, t0);
    load_coming(&next, g, m, b, t0, end);
    for (uint64_t t = t0; t < end; t += CONV_AHEAD) {
        now = next;
        load_coming(&next, g, m, b, t + CONV_AHEAD, end);
#pragma unroll
        for (unsigned k = 0; k < CONV_AHEAD; k++) {
            float y[CONV_CHANNELS];
            if (t + k >= end)
                break;
#pragma unroll
            for (int i = 0; i < CONV_CHANNELS; i++) {
                x[TAPS - 1][i] = now.x[k][i];
#pragma unroll
                for (int j = 0; j < TAPS - 1; j++)
                    x[j][i] = now.anew[k] ? 0.0f : x[j][i];
                y[i] = taps_sum(m, x, i);
                y[i] *= quick_sigmoid(y[i]);
#pragma unroll
                for (int j = 0; j < TAPS - 1; j++)
                    x[j][i] = x[j + 1][i];
            }
            store_two(g.y + (b * g.T + t + k) * g.C + m.c, y, m.left, g.wide);
        }
    }
    if (g.before != NULL && gridDim.y == 1)
#pragma unroll
        for (unsigned j = 0; j < TAPS - 1; j++) /* each has moved on by one */
            if (j + m.K >= TAPS)
                store_two(g.before + ((uint64_t)g.slots[b] * (m.K - 1) + j + m.K - TAPS) * g.C + m.c, x[j], m.left,
                          g.wide);
}

/* The last K - 1 of many new rows into the cache. Blocks: channels, rows, sequences. */
template <class E>
__global__ void
conv_keep_kernel(E *before, const E *x, const int32_t *slots, uint64_t positions, uint64_t C, uint64_t kept)
{
    const uint64_t c = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y, b = blockIdx.z;
    if (c < C)
        before[((uint64_t)slots[b] * kept + j) * C + c] = x[(b * positions + positions - kept + j) * C + c];
}

/* ---------------------------------------------------------------- backward */

/* Of rows of all sequences, in which the walk goes down: what comes back to each, and the first row that it reads. */
template <class E> struct conv_coming_back {
    float dy[CONV_AHEAD][CONV_CHANNELS], x[CONV_AHEAD][CONV_CHANNELS];
    unsigned back[CONV_AHEAD]; /* rows before it in its document, as many as there are taps at most */
    bool last[CONV_AHEAD];     /* in its document */
};

/* From row r on, which is at *position of its sequence; that moves along. */
template <class E, int TAPS>
SPW_DEVICE void
load_coming_back(conv_coming_back<E> *coming, const conv_args<E> &g, const conv_channels<E, TAPS> &m, int64_t r,
                 int64_t first, uint64_t *position)
{
#pragma unroll
    for (int k = 0; k < CONV_AHEAD; k++) {
        const bool here = r - k >= first, reads = here && r - k >= (int64_t)m.K - 1;
        const uint64_t row = here ? (uint64_t)(r - k) : 0, t = *position;
        load_two(coming->dy[k], g.dy + row * g.C + m.c, here ? m.left : 0, g.wide);
        load_two(coming->x[k], g.x + (reads ? row - (m.K - 1) : 0) * g.C + m.c, reads ? m.left : 0, g.wide);
        coming->back[k] = (unsigned)least(g.begins != NULL ? t - (uint64_t)g.begins[row] : t, (uint64_t)TAPS);
        coming->last[k] = (g.ends != NULL ? (uint64_t)g.ends[row] : g.T) == t + 1;
        *position = t > 0 ? t - 1 : g.T - 1;
    }
}

/* The rows that row `top` reads, except its first one, as far as there are any: into the places before that where a walk down begins. */
template <class E, int TAPS>
SPW_DEVICE void
rows_below(float x[TAPS][CONV_CHANNELS], const conv_args<E> &g, const conv_channels<E, TAPS> &m, uint64_t top)
{
#pragma unroll
    for (unsigned j = 0; j < TAPS - 1; j++) {
        const unsigned behind = TAPS - 2 - j; /* rows that it comes before row top */
        const bool here = j + m.K >= TAPS && top >= behind;
        load_two(x[j], g.x + (here ? top - behind : 0) * g.C + m.c, here ? m.left : 0, g.wide);
    }
}

/*
 * Blocks: channels, pieces of g.rows rows of all sequences. Walks down from the last row whose gradient reaches the piece; dx and the taps'
 * gradients are of the piece's own rows.
 */
template <class E, int TAPS>
__global__ void
__launch_bounds__(CONV_THREADS) conv_backward_kernel(conv_args<E> g)
{
    const uint64_t first = (uint64_t)blockIdx.y * g.rows, end = least(g.M, first + g.rows), last_t = (end - 1) % g.T;
    const uint64_t behind = (g.ends != NULL ? (uint64_t)g.ends[end - 1] : g.T) - 1 - last_t;
    conv_channels<E, TAPS> m;
    conv_coming_back<E> now, next;
    float x[TAPS][CONV_CHANNELS] = {}, du[TAPS][CONV_CHANNELS] = {}, dw[TAPS][CONV_CHANNELS] = {};
    if (!my_channels(&m, g))
        return;
    const uint64_t top = end - 1 + least(behind, (uint64_t)m.K - 1);
    rows_below<E, TAPS>(x, g, m, top);
    uint64_t position = top % g.T;
    load_coming_back(&next, g, m, (int64_t)top, (int64_t)first, &position);
    for (int64_t r = (int64_t)top; r >= (int64_t)first; r -= CONV_AHEAD) {
        now = next;
        load_coming_back(&next, g, m, r - CONV_AHEAD, (int64_t)first, &position);
#pragma unroll
        for (int k = 0; k < CONV_AHEAD; k++) {
            const uint64_t row = (uint64_t)(r - k), at = row * g.C + m.c;
            const bool mine = row < end;
            float dx[CONV_CHANNELS] = {};
            if (r - k < (int64_t)first)
                break;
            if (mine && g.dx != NULL && g.add)
                load_two(dx, g.dx + at, m.left, g.wide);
#pragma unroll
            for (int i = 0; i < CONV_CHANNELS; i++) {
                float seen[TAPS][CONV_CHANNELS], u, s;
#pragma unroll
                for (int j = TAPS - 1; j > 0;
                     j--) { /* up by one: the last is row r now, and of du row r + 1 the first */
                    x[j][i] = x[j - 1][i];
                    du[j][i] = now.last[k] ? 0.0f : du[j - 1][i];
                }
#pragma unroll
                for (unsigned j = 0; j < TAPS; j++)
                    if (j + m.K == TAPS)
                        x[j][i] = now.x[k][i];
#pragma unroll
                for (unsigned j = 0; j < TAPS; j++)
                    seen[j][i] = TAPS - 1 - j <= now.back[k] ? x[j][i] : 0.0f;
                u = taps_sum(m, seen, i);
                s = quick_sigmoid(u);
                du[0][i] = now.dy[k][i] * (s + u * s * (1.0f - s));
#pragma unroll
                for (int j = 0; j < TAPS; j++) { /* row r + j reads it by its j-th last tap */
                    if ((unsigned)j < m.K)
                        dx[i] = __fmaf_rn(m.w[TAPS - 1 - j][i], du[j][i], dx[i]);
                    if (mine)
                        dw[j][i] = __fmaf_rn(du[0][i], seen[j][i], dw[j][i]);
                }
            }
            if (mine && g.dx != NULL)
                store_two(g.dx + at, dx, m.left, g.wide);
        }
    }
    if (g.partial != NULL)
#pragma unroll
        for (unsigned j = 0; j < TAPS; j++)
#pragma unroll
            for (unsigned i = 0; i < CONV_CHANNELS; i++)
                if (j + m.K >= TAPS && i < m.left)
                    g.partial[((uint64_t)blockIdx.y * g.C + m.c + i) * m.K + j + m.K - TAPS] = dw[j][i];
}

#endif
