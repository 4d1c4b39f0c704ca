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
    const E *x, *w, *dy, *bias; /* bias NULL: none */
    E *y, *dx;
    float *partial, *partial_bias; /* (pieces, C, K) of dw, and (pieces, C) of dbias; NULL: not wanted */
    const int32_t *begins, *ends;
    E *before;                     /* (slots, K - 1, C) NULL: no cache */
    const int32_t *slots, *starts; /* (B) */
    uint64_t T, C, M, rows;        /* rows of a piece */
    uint64_t stride;               /* of a row of x, y and what is kept */
    unsigned K;
    bool wide, add, plain; /* every two channels can be loaded at once; onto dx; without SiLU */
};

/* A thread's channels: both there, and where two can be loaded at once (WIDE), or perhaps one; their taps are the last K of TAPS. */
template <class E, int TAPS> struct conv_channels {
    uint64_t c;
    unsigned K;
    bool both;
    float w[TAPS][CONV_CHANNELS], bias[CONV_CHANNELS];
};

/* Zeros where nothing is. */
template <bool WIDE, class E>
SPW_DEVICE void
load_two(float *v, const E *p, bool here, bool both)
{
    v[0] = v[1] = 0.0f;
    if (WIDE && here) {
        SPW_NEED_ALIGNED(p, 2 * sizeof(E));
        if constexpr (sizeof(E) == 4) {
            float2 two = *(const float2 *)p;
            v[0] = two.x;
            v[1] = two.y;
        } else {
            unpack<E>(v, *(const unsigned *)p);
        }
    } else if (here) {
        v[0] = widen(p[0]);
        v[1] = both ? widen(p[1]) : 0.0f;
    }
}

template <bool WIDE, class E>
SPW_DEVICE void
store_two(E *p, const float *v, bool both)
{
    if (WIDE) {
        SPW_NEED_ALIGNED(p, 2 * sizeof(E));
        if constexpr (sizeof(E) == 4)
            *(float2 *)p = float2{v[0], v[1]};
        else
            *(unsigned *)p = pack<E>(v[0], v[1]);
    } else {
        narrow(p, v[0]);
        if (both)
            narrow(p + 1, v[1]);
    }
}

/* False: there are none. */
template <class E, int TAPS>
SPW_DEVICE bool
my_channels(conv_channels<E, TAPS> *m, const conv_args<E> &g)
{
    m->c = ((uint64_t)blockIdx.x * CONV_THREADS + threadIdx.x) * CONV_CHANNELS;
    m->K = TAPS == 4 ? 4 : g.K;
    m->both = m->c + 1 < g.C;
    if (m->c >= g.C)
        return false;
#pragma unroll
    for (unsigned i = 0; i < CONV_CHANNELS; i++)
        m->bias[i] = g.bias != NULL && (i == 0 || m->both) ? widen(g.bias[m->c + i]) : 0.0f;
#pragma unroll
    for (unsigned j = 0; j < TAPS; j++)
#pragma unroll
        for (unsigned i = 0; i < CONV_CHANNELS; i++)
            m->w[j][i] =
                j + m->K >= TAPS && (i == 0 || m->both) ? widen(g.w[(m->c + i) * m->K + j + m->K - TAPS]) : 0.0f;
    return true;
}

/* What goes into the SiLU, or out, of the last K rows of x. */
template <class E, int TAPS>
SPW_DEVICE float
taps_sum(const conv_channels<E, TAPS> &m, const float x[TAPS][CONV_CHANNELS], int i)
{
    float sum = m.bias[i];
#pragma unroll
    for (unsigned j = 0; j < TAPS; j++)
        if (j + m.K >= TAPS)
            sum = __fmaf_rn(m.w[j][i], x[j][i], sum);
    return sum;
}

/* The rows before row t0 of sequence b, as far as they are in its document, into the window's places for them. */
template <bool WIDE, class E, int TAPS>
SPW_DEVICE void
rows_before(float x[TAPS][CONV_CHANNELS], const conv_args<E> &g, const conv_channels<E, TAPS> &m, uint64_t b,
            uint64_t t0)
{
    const uint64_t begin = g.begins != NULL ? (uint64_t)g.begins[b * g.T + t0] : 0;
    const bool kept = g.before != NULL && t0 == 0 && g.starts[b] > 0;
#pragma unroll
    for (unsigned i = 1; i < TAPS; i++) {
        const bool is_tap = i < m.K, here = is_tap && t0 >= begin + i;
        const E *from = kept && is_tap ? g.before + ((uint64_t)g.slots[b] * (m.K - 1) + m.K - 1 - i) * g.stride
                        : here         ? g.x + (b * g.T + t0 - i) * g.stride
                                       : g.x;
        load_two<WIDE>(x[TAPS - 1 - i], from + m.c, (kept && is_tap) || here, m.both);
    }
}

/* Rows that come next, zeros from row `end` on, and whether a document begins with each. */
struct conv_coming {
    float x[CONV_AHEAD][CONV_CHANNELS];
    bool anew[CONV_AHEAD];
};

/* From row t on, whose channels are at x; begins of the sequence, or NULL. */
template <bool WIDE, class E>
SPW_DEVICE void
load_coming(conv_coming *coming, const E *x, uint64_t stride, const int32_t *begins, unsigned t, unsigned end,
            bool both)
{
#pragma unroll
    for (unsigned k = 0; k < CONV_AHEAD; k++, x += stride) {
        const bool here = t + k < end;
        load_two<WIDE>(coming->x[k], x, here, both);
        coming->anew[k] = begins != NULL && here && (unsigned)begins[t + k] == t + k;
    }
}

/* Blocks: channels, runs of CONV_ROWS rows, sequences. What a cache keeps is written here where one run is all there is. */
template <class E, int TAPS, bool WIDE>
__global__ void
__launch_bounds__(CONV_THREADS, 4) conv_kernel(conv_args<E> g)
{
    const uint64_t b = blockIdx.z;
    const unsigned t0 = blockIdx.y * CONV_ROWS, end = (unsigned)least(g.T, (uint64_t)t0 + CONV_ROWS);
    const int32_t *begins = g.begins != NULL ? g.begins + b * g.T : NULL;
    conv_channels<E, TAPS> m;
    conv_coming now, next;
    float x[TAPS][CONV_CHANNELS] = {};
    if (!my_channels(&m, g))
        return;
    const E *from = g.x + (b * g.T + t0) * g.stride + m.c;
    E *to = g.y + (b * g.T + t0) * g.stride + m.c;
    rows_before<WIDE, E, TAPS>(x, g, m, b, t0);
    load_coming<WIDE>(&next, from, g.stride, begins, t0, end, m.both);
    auto step = [&](int k) {
        float y[CONV_CHANNELS];
#pragma unroll
        for (int i = 0; i < CONV_CHANNELS; i++) {
            x[TAPS - 1][i] = now.x[k][i];
#pragma unroll
            for (int j = 0; j < TAPS - 1; j++)
                x[j][i] = now.anew[k] ? 0.0f : x[j][i];
            y[i] = taps_sum(m, x, i);
            y[i] *= g.plain ? 1.0f : quick_sigmoid(y[i]);
#pragma unroll
            for (int j = 0; j < TAPS - 1; j++)
                x[j][i] = x[j + 1][i];
        }
        store_two<WIDE>(to, y, m.both);
        to += g.stride;
    };
    unsigned t = t0;
    for (; t + CONV_AHEAD <= end; t += CONV_AHEAD) {
        now = next;
        from += CONV_AHEAD * g.stride;
        load_coming<WIDE>(&next, from, g.stride, begins, t + CONV_AHEAD, end, m.both);
#pragma unroll
        for (int k = 0; k < CONV_AHEAD; k++)
            step(k);
    }
    now = next;
#pragma unroll
    for (int k = 0; k < CONV_AHEAD - 1; k++)
        if (t + (unsigned)k < end)
            step(k);
    if (g.before != NULL && gridDim.y == 1)
#pragma unroll
        for (unsigned j = 0; j < TAPS - 1; j++) /* each has moved on by one */
            if (j + m.K >= TAPS)
                store_two<WIDE>(g.before + ((uint64_t)g.slots[b] * (m.K - 1) + j + m.K - TAPS) * g.stride + m.c, x[j],
                                m.both);
}

/* The last K - 1 of many new rows into the cache. Blocks: channels, rows, sequences. */
template <class E>
__global__ void
conv_keep_kernel(E *before, const E *x, const int32_t *slots, uint64_t positions, uint64_t C, uint64_t stride,
                 uint64_t kept)
{
    const uint64_t c = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y, b = blockIdx.z;
    if (c < C)
        before[((uint64_t)slots[b] * kept + j) * stride + c] = x[(b * positions + positions - kept + j) * stride + c];
}

/* ---------------------------------------------------------------- backward */

/* Of rows of all sequences, in which the walk goes down: what comes back to each, and the first row that it reads. */
struct conv_coming_back {
    float dy[CONV_AHEAD][CONV_CHANNELS], x[CONV_AHEAD][CONV_CHANNELS];
    unsigned back[CONV_AHEAD]; /* rows before it in its document */
    bool last[CONV_AHEAD];     /* in its document */
};

/*
 * Where a walk is that goes down: the row's dy and the first x that it reads, its document's ends, its place in the sequence; how many rows are
 * to come, and how many of x, of the sequences before too.
 */
template <class E> struct conv_walk {
    const E *dy, *x;
    const int32_t *begins, *ends; /* NULL: there are no documents */
    unsigned t, left, of_x;
};

template <bool WIDE, class E, int TAPS>
SPW_DEVICE void
load_coming_back(conv_coming_back *coming, conv_walk<E> *walk, const conv_args<E> &g, const conv_channels<E, TAPS> &m)
{
#pragma unroll
    for (int k = 0; k < CONV_AHEAD; k++) {
        const bool here = walk->left > 0;
        const unsigned t = walk->t;
        load_two<WIDE>(coming->dy[k], walk->dy, here, m.both);
        load_two<WIDE>(coming->x[k], walk->x, here && walk->of_x > 0, m.both);
        coming->back[k] = walk->begins != NULL && here ? t - (unsigned)*walk->begins : t;
        coming->last[k] = (walk->begins != NULL && here ? (unsigned)*walk->ends : (unsigned)g.T) == t + 1;
        walk->dy -= g.stride;
        walk->x -= g.stride;
        walk->begins -= walk->begins != NULL;
        walk->ends -= walk->ends != NULL;
        walk->t = t > 0 ? t - 1 : (unsigned)g.T - 1;
        walk->left -= here;
        walk->of_x -= walk->of_x > 0;
    }
}

/* The rows that row `top` reads, except its first one, as far as there are any: into the places before that where a walk down begins. */
template <bool WIDE, class E, int TAPS>
SPW_DEVICE void
rows_below(float x[TAPS][CONV_CHANNELS], const conv_args<E> &g, const conv_channels<E, TAPS> &m, uint64_t top)
{
#pragma unroll
    for (unsigned j = 0; j < TAPS - 1; j++) {
        const unsigned behind = TAPS - 2 - j; /* rows that it comes before row top */
        const bool here = j + m.K >= TAPS && top >= behind;
        load_two<WIDE>(x[j], g.x + (here ? top - behind : 0) * g.stride + m.c, here, m.both);
    }
}

/*
 * Blocks: channels, pieces of g.rows rows of all sequences. Walks down from the last row whose gradient reaches the piece; dx and the taps'
 * gradients are of the piece's own rows.
 */
template <class E, int TAPS, bool WIDE>
__global__ void
__launch_bounds__(CONV_THREADS) conv_backward_kernel(conv_args<E> g)
{
    const uint64_t first = (uint64_t)blockIdx.y * g.rows, end = least(g.M, first + g.rows), last_t = (end - 1) % g.T;
    const uint64_t behind = (g.ends != NULL ? (uint64_t)g.ends[end - 1] : g.T) - 1 - last_t;
    conv_channels<E, TAPS> m;
    conv_coming_back now, next;
    float x[TAPS][CONV_CHANNELS] = {}, du[TAPS][CONV_CHANNELS] = {}, dw[TAPS][CONV_CHANNELS] = {};
    float dbias[CONV_CHANNELS] = {};
    if (!my_channels(&m, g))
        return;
    const uint64_t top = end - 1 + least(behind, (uint64_t)m.K - 1);
    const bool documents = g.begins != NULL;
    unsigned left = (unsigned)(top + 1 - first);
    const unsigned own = (unsigned)(end - first);
    conv_walk<E> walk = {g.dy + top * g.stride + m.c,
                         g.x + ((int64_t)top - (int64_t)m.K + 1) * (int64_t)g.stride + m.c,
                         documents ? g.begins + top : NULL,
                         documents ? g.ends + top : NULL,
                         (unsigned)(top % g.T),
                         left,
                         (unsigned)(most(top + 2, (uint64_t)m.K) - m.K)};
    E *to = g.dx != NULL ? g.dx + top * g.stride + m.c : NULL;
    auto step = [&](int k) {
        const bool mine = left <= own;
        float dx[CONV_CHANNELS] = {};
        if (mine && to != NULL && g.add)
            load_two<WIDE>(dx, to, true, m.both);
#pragma unroll
        for (int i = 0; i < CONV_CHANNELS; i++) {
            float seen[TAPS][CONV_CHANNELS], u, s;
#pragma unroll
            for (int j = TAPS - 1; j > 0;
                 j--) { /* the last x is this row's then, and the second du of the row behind */
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
            du[0][i] = now.dy[k][i] * (g.plain ? 1.0f : s + u * s * (1.0f - s));
            if (mine)
                dbias[i] += du[0][i];
#pragma unroll
            for (int j = 0; j < TAPS; j++) { /* the j-th row behind reads it by its j-th last tap */
                if ((unsigned)j < m.K)
                    dx[i] = __fmaf_rn(m.w[TAPS - 1 - j][i], du[j][i], dx[i]);
                if (mine)
                    dw[j][i] = __fmaf_rn(du[0][i], seen[j][i], dw[j][i]);
            }
        }
        if (mine && to != NULL)
            store_two<WIDE>(to, dx, m.both);
        to -= to != NULL ? g.stride : 0;
        left--;
    };
    rows_below<WIDE, E, TAPS>(x, g, m, top);
    load_coming_back<WIDE>(&next, &walk, g, m);
    while (left >= CONV_AHEAD) {
        now = next;
        load_coming_back<WIDE>(&next, &walk, g, m);
#pragma unroll
        for (int k = 0; k < CONV_AHEAD; k++)
            step(k);
    }
    now = next;
#pragma unroll
    for (int k = 0; k < CONV_AHEAD - 1; k++)
        if (left > 0)
            step(k);
    if (g.partial != NULL)
#pragma unroll
        for (unsigned j = 0; j < TAPS; j++)
#pragma unroll
            for (unsigned i = 0; i < CONV_CHANNELS; i++)
                if (j + m.K >= TAPS && (i == 0 || m.both))
                    g.partial[((uint64_t)blockIdx.y * g.C + m.c + i) * m.K + j + m.K - TAPS] = dw[j][i];
    if (g.partial_bias != NULL)
#pragma unroll
        for (unsigned i = 0; i < CONV_CHANNELS; i++)
            if (i == 0 || m.both)
                g.partial_bias[(uint64_t)blockIdx.y * g.C + m.c + i] = dbias[i];
}

#endif
