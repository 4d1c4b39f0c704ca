/*
 * Attention in fp32 for compute_dtype fp32, where exactness counts and speed does not: tiles of TILE rows and as many keys in
 * shared memory, plain multiply-adds, no T x T matrix, no atomics. Same cut as the bf16 kernels: rows own dq, keys own dk and dv. TILE is 16
 * for heads of up to 256 elements, and 8 for up to 512: four tiles fit 99 KiB, and a thread has 32 sums of either in registers.
 */
#ifndef SPW_CUDA_ATTENTION_F32_CUH
#define SPW_CUDA_ATTENTION_F32_CUH

#include "attention.h"
#include "common.cuh"

enum { F32_THREADS = 128 };
#define F32_COLUMNS(TILE) (32 / (TILE)) /* of a thread, F32_THREADS apart */

/* `tiles` tiles of vectors, a tile of scores or two, three numbers per row. */
template <int TILE>
static inline size_t
f32_shared_bytes(int tiles, int D)
{
    return ((size_t)tiles * TILE * (size_t)(D + 1) + 2 * TILE * (TILE + 1) + 3 * TILE) * sizeof(float);
}

/* Leading dimension ld = g.D + 1: rows begin in other banks. Zeros beyond `valid` rows. */
template <int TILE>
SPW_DEVICE void
load_f32(float *tile, int ld, const float *src, uint64_t stride, int64_t valid, int cols)
{
    for (int i = (int)threadIdx.x; i < TILE * cols; i += F32_THREADS) {
        int row = i / cols, col = i % cols;
        tile[row * ld + col] = row < valid ? src[(uint64_t)row * stride + col] : 0.0f;
    }
}

SPW_DEVICE float
dot_f32(const float *a, const float *b, int D)
{
    float sum = 0.0f;
    for (int d = 0; d < D; d++)
        sum += a[d] * b[d];
    return sum;
}

/* Where the document begins of the row at a position; rows behind the last are asked for, too. */
SPW_DEVICE uint64_t
begin_of(const attention_args<float> &g, int b, uint64_t at)
{
    uint64_t row = g.starts != NULL ? at - (uint64_t)g.starts[b] : at;
    return g.begins != NULL ? (uint64_t)g.begins[(uint64_t)b * g.T + least(row, g.T - 1)] : 0;
}

SPW_DEVICE bool
is_chosen(const attention_args<float> &g, int b, uint64_t at, uint64_t u)
{
    uint64_t row = g.starts != NULL ? at - (uint64_t)g.starts[b] : at;
    return row < g.T && (g.chosen[((uint64_t)b * g.T + row) * g.words + u / 32] >> u % 32 & 1) != 0;
}

/* Where the keys in front end that the row at a position reads; they begin with the first that its document may have. */
SPW_DEVICE uint64_t
front_of(const attention_args<float> &g, int b, uint64_t at)
{
    uint64_t begin = begin_of(g, b, at);
    return g.front > 0 ? least(g.front, begin / g.front_each + (at + 1 - begin) / g.front_each) : 0;
}

/* Keys are counted from the first one in front. */
SPW_DEVICE bool
reads(const attention_args<float> &g, int b, uint64_t at, uint64_t u)
{
    if (u < g.front)
        return u < front_of(g, b, at) && u >= begin_of(g, b, at) / g.front_each &&
               (g.chosen == NULL || is_chosen(g, b, at, u));
    u -= g.front;
    return u <= at && (g.window == 0 || u + g.window > at) && u >= begin_of(g, b, at) &&
           (g.chosen == NULL || g.front > 0 || is_chosen(g, b, at, u));
}

/* The first tile of a sequence's own keys that rows from q0 on read. */
template <int TILE>
SPW_DEVICE uint64_t
first_own_tile(const attention_args<float> &g, int b, uint64_t q0)
{
    uint64_t from = g.window > 0 && q0 + 1 > g.window ? q0 + 1 - g.window : 0;
    return (g.front + most(from, begin_of(g, b, q0))) / TILE * TILE;
}

/* The next tile after k0 - TILE that the rows from q0 to `last` read. */
template <int TILE>
SPW_DEVICE uint64_t
tile_from(const attention_args<float> &g, int b, uint64_t q0, uint64_t last, uint64_t k0)
{
    if (g.front > 0)
        k0 = most(k0, begin_of(g, b, q0) / g.front_each / TILE * TILE);
    return k0 < front_of(g, b, last) ? k0 : most(k0, first_own_tile<TILE>(g, b, q0));
}

/* How many keys a tile has; of keys in front alone only those that a row reads, for others may not be made yet. */
template <int TILE>
SPW_DEVICE int64_t
tile_keys(const attention_args<float> &g, int b, uint64_t last, uint64_t keys, uint64_t k0)
{
    return (int64_t)((k0 + TILE <= g.front ? front_of(g, b, last) : keys) - k0);
}

/* A score with its scale, and its cap where there is one. */
template <bool CAP>
SPW_DEVICE float
score_f32(const attention_args<float> &g, const float *q, const float *k)
{
    float s = dot_f32(q, k, g.D) * g.scale;
    return CAP ? g.cap * tanhf(s / g.cap) : s;
}

template <bool CAP, int TILE>
__global__ void
__launch_bounds__(F32_THREADS) attention_f32_forward_kernel(attention_args<float> g)
{
    SPW_DYNAMIC_SHARED(shared);
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, ld = g.D + 1;
    float *q = (float *)shared, *k = q + TILE * ld, *v = k + TILE * ld, *s = v + TILE * ld;
    float *max = s + 2 * TILE * (TILE + 1), *sum = max + TILE, *shrink = sum + TILE;
    uint64_t q0 = (uint64_t)blockIdx.x * TILE;
    int64_t rows = (int64_t)least((uint64_t)TILE, g.T - q0);
    uint64_t before = g.starts != NULL ? (uint64_t)g.starts[b] : 0, p0 = before + q0, last = p0 + (uint64_t)rows - 1;
    uint64_t keys = g.front + last + 1;
    uint64_t kv_row = g.slots != NULL ? (uint64_t)g.slots[b] * g.capacity : (uint64_t)b * (g.front + g.T);
    uint64_t k0 = tile_from<TILE>(g, b, p0, last, 0);
    const float *key = g.key + kv_row * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const float *value = g.value + kv_row * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    float o[TILE][F32_COLUMNS(TILE)] = {};
    load_f32<TILE>(q, ld, g.q + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head, g.q_stride, rows, g.D);
    if (threadIdx.x < TILE) {
        max[threadIdx.x] = -INFINITY;
        sum[threadIdx.x] = 0.0f;
    }
    for (; k0 < keys; k0 = tile_from<TILE>(g, b, p0, last, k0 + TILE)) {
        const int64_t have = tile_keys<TILE>(g, b, last, keys, k0);
        load_f32<TILE>(k, ld, key + k0 * g.kv_stride, g.kv_stride, have, g.D);
        load_f32<TILE>(v, ld, value + k0 * g.v_stride, g.v_stride, have, g.Dv);
        __syncthreads();
        for (int i = (int)threadIdx.x; i < TILE * TILE; i += F32_THREADS) {
            int r = i / TILE, c = i % TILE;
            s[r * (TILE + 1) + c] =
                reads(g, b, p0 + (uint64_t)r, k0 + (uint64_t)c) ? score_f32<CAP>(g, q + r * ld, k + c * ld) : -INFINITY;
        }
        __syncthreads();
        if (threadIdx.x < TILE) {
            float *row = s + threadIdx.x * (TILE + 1), old = max[threadIdx.x], top = old, part = 0.0f, base;
            for (int c = 0; c < TILE; c++)
                top = fmaxf(top, row[c]);
            base = top == -INFINITY ? 0.0f : top;
            for (int c = 0; c < TILE; c++) {
                row[c] = expf(row[c] - base);
                part += row[c];
            }
            shrink[threadIdx.x] = old == -INFINITY ? 0.0f : expf(old - base);
            max[threadIdx.x] = top;
            sum[threadIdx.x] = sum[threadIdx.x] * shrink[threadIdx.x] + part;
        }
        __syncthreads();
#pragma unroll
        for (int part = 0; part < F32_COLUMNS(TILE); part++) {
            int col = (int)threadIdx.x + part * F32_THREADS;
            if (col < g.Dv)
#pragma unroll
                for (int r = 0; r < TILE; r++) {
                    float add = 0.0f;
                    for (int c = 0; c < TILE; c++)
                        add += s[r * (TILE + 1) + c] * v[c * ld + col];
                    o[r][part] = o[r][part] * shrink[r] + add;
                }
        }
        __syncthreads();
    }
    if ((int64_t)threadIdx.x < rows) {
        float lse = max[threadIdx.x] + logf(sum[threadIdx.x]);
        if (g.sinks != NULL) {
            float all = log_of_sum(lse, g.sinks[h]);
            sum[threadIdx.x] *= expf(all - lse);
            lse = all;
        }
        if (g.lse != NULL)
            g.lse[((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T + q0 + threadIdx.x] = lse;
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < F32_COLUMNS(TILE); part++) {
        int col = (int)threadIdx.x + part * F32_THREADS;
#pragma unroll
        for (int r = 0; r < TILE; r++)
            if (col < g.Dv && r < rows)
                g.out[(((uint64_t)b * g.T + q0 + (uint64_t)r) * (uint64_t)g.Hq + (uint64_t)h) * (uint64_t)g.Dv +
                      (uint64_t)col] = o[r][part] / sum[r];
    }
}

/* p and ds of rows q0 and keys k0 from their tiles, into s and ds. */
template <bool CAP, int TILE>
SPW_DEVICE void
backward_scores_f32(float *s, float *ds, const float *q, const float *dout, const float *k, const float *v,
                    const attention_args<float> &g, int b, uint64_t stats, uint64_t q0, uint64_t k0)
{
    const int ld = g.D + 1;
    for (int i = (int)threadIdx.x; i < TILE * TILE; i += F32_THREADS) {
        int r = i / TILE, c = i % TILE;
        uint64_t at = q0 + (uint64_t)r, u = k0 + (uint64_t)c;
        float p = 0.0f, d = 0.0f;
        if (at < g.T && reads(g, b, at, u)) {
            float y = score_f32<CAP>(g, q + r * ld, k + c * ld);
            p = expf(y - g.lse[stats + at]);
            d = p * (dot_f32(dout + r * ld, v + c * ld, g.Dv) - g.delta[stats + at]) * g.scale;
            d *= CAP ? 1.0f - (y / g.cap) * (y / g.cap) : 1.0f;
        }
        s[r * (TILE + 1) + c] = p;
        ds[r * (TILE + 1) + c] = d;
    }
}

template <bool CAP, int TILE>
__global__ void
__launch_bounds__(F32_THREADS) attention_f32_dq_kernel(attention_args<float> g)
{
    SPW_DYNAMIC_SHARED(shared);
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, ld = g.D + 1;
    float *q = (float *)shared, *dout = q + TILE * ld, *k = dout + TILE * ld, *v = k + TILE * ld;
    float *s = v + TILE * ld, *ds = s + TILE * (TILE + 1);
    uint64_t q0 = (uint64_t)blockIdx.x * TILE, out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    int64_t rows = (int64_t)least((uint64_t)TILE, g.T - q0);
    uint64_t last = q0 + (uint64_t)rows - 1, keys = g.front + last + 1;
    uint64_t k0 = tile_from<TILE>(g, b, q0, last, 0), first_row = (uint64_t)b * (g.front + g.T);
    uint64_t k_at = first_row * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    uint64_t v_at = first_row * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    uint64_t q_at = ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head;
    uint64_t stats = ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T;
    float dq[TILE][F32_COLUMNS(TILE)] = {};
    load_f32<TILE>(q, ld, g.q + q_at, g.q_stride, rows, g.D);
    load_f32<TILE>(dout, ld, g.dout + ((uint64_t)b * g.T + q0) * out_stride + (uint64_t)h * (uint64_t)g.Dv, out_stride,
                   rows, g.Dv);
    for (; k0 < keys; k0 = tile_from<TILE>(g, b, q0, last, k0 + TILE)) {
        load_f32<TILE>(k, ld, g.key + k_at + k0 * g.kv_stride, g.kv_stride, (int64_t)(keys - k0), g.D);
        load_f32<TILE>(v, ld, g.value + v_at + k0 * g.v_stride, g.v_stride, (int64_t)(keys - k0), g.Dv);
        __syncthreads();
        backward_scores_f32<CAP, TILE>(s, ds, q, dout, k, v, g, b, stats, q0, k0);
        __syncthreads();
#pragma unroll
        for (int part = 0; part < F32_COLUMNS(TILE); part++) {
            int col = (int)threadIdx.x + part * F32_THREADS;
            if (col < g.D)
#pragma unroll
                for (int r = 0; r < TILE; r++)
                    for (int c = 0; c < TILE; c++)
                        dq[r][part] += ds[r * (TILE + 1) + c] * k[c * ld + col];
        }
        __syncthreads();
    }
#pragma unroll
    for (int part = 0; part < F32_COLUMNS(TILE); part++) {
        int col = (int)threadIdx.x + part * F32_THREADS;
#pragma unroll
        for (int r = 0; r < TILE; r++)
            if (col < g.D && r < rows)
                g.dq[q_at + (uint64_t)r * g.q_stride + (uint64_t)col] = dq[r][part];
    }
}

template <bool CAP, int TILE>
__global__ void
__launch_bounds__(F32_THREADS) attention_f32_dkv_kernel(attention_args<float> g)
{
    SPW_DYNAMIC_SHARED(shared);
    const int hk = (int)blockIdx.y, b = (int)blockIdx.z, ld = g.D + 1;
    float *k = (float *)shared, *v = k + TILE * ld, *q = v + TILE * ld, *dout = q + TILE * ld;
    float *s = dout + TILE * ld, *ds = s + TILE * (TILE + 1);
    uint64_t k0 = (uint64_t)blockIdx.x * TILE, out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    int64_t rows = (int64_t)least((uint64_t)TILE, g.front + g.T - k0);
    /* Of a sequence's own; a tile that has others too is read by all behind its first. */
    uint64_t own = most(k0 + (uint64_t)rows, g.front) - g.front, key_row = (uint64_t)b * (g.front + g.T) + k0;
    uint64_t first = k0 >= g.front ? k0 - g.front : own > 0 ? 0 : (k0 + 1) * g.front_each - 1;
    uint64_t end = g.window > 0 && k0 >= g.front ? least(g.T, own - 1 + g.window) : g.T;
    if (g.ends != NULL && k0 >= g.front)
        end = least(end, (uint64_t)g.ends[(uint64_t)b * g.T + own - 1]);
    else if (g.ends != NULL && own == 0) /* from the last row that the last key can stand for */
        end = (uint64_t)g.ends[(uint64_t)b * g.T + least((k0 + (uint64_t)rows + 1) * g.front_each - 1, g.T) - 1];
    uint64_t k_at = key_row * g.kv_stride + (uint64_t)hk * g.k_head;
    uint64_t v_at = key_row * g.v_stride + (uint64_t)hk * g.v_head;
    float dk[TILE][F32_COLUMNS(TILE)] = {}, dv[TILE][F32_COLUMNS(TILE)] = {};
    load_f32<TILE>(k, ld, g.key + k_at, g.kv_stride, rows, g.D);
    load_f32<TILE>(v, ld, g.value + v_at, g.v_stride, rows, g.Dv);
    for (int h = hk * g.group; h < (hk + 1) * g.group; h++)
        for (uint64_t q0 = first; q0 < end; q0 += TILE) {
            uint64_t row = (uint64_t)b * g.T + q0;
            load_f32<TILE>(q, ld, g.q + row * g.q_stride + (uint64_t)h * g.q_head, g.q_stride, (int64_t)(g.T - q0),
                           g.D);
            load_f32<TILE>(dout, ld, g.dout + row * out_stride + (uint64_t)h * (uint64_t)g.Dv, out_stride,
                           (int64_t)(g.T - q0), g.Dv);
            __syncthreads();
            backward_scores_f32<CAP, TILE>(s, ds, q, dout, k, v, g, b,
                                           ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T, q0, k0);
            __syncthreads();
#pragma unroll
            for (int part = 0; part < F32_COLUMNS(TILE); part++) {
                int col = (int)threadIdx.x + part * F32_THREADS;
                if (col < g.D)
#pragma unroll
                    for (int c = 0; c < TILE; c++)
                        for (int r = 0; r < TILE; r++)
                            dk[c][part] += ds[r * (TILE + 1) + c] * q[r * ld + col];
                if (col < g.Dv)
#pragma unroll
                    for (int c = 0; c < TILE; c++)
                        for (int r = 0; r < TILE; r++)
                            dv[c][part] += s[r * (TILE + 1) + c] * dout[r * ld + col];
            }
            __syncthreads();
        }
#pragma unroll
    for (int part = 0; part < F32_COLUMNS(TILE); part++) {
        int col = (int)threadIdx.x + part * F32_THREADS;
#pragma unroll
        for (int c = 0; c < TILE; c++)
            if (c < rows) {
                if (col < g.D)
                    g.dk[k_at + (uint64_t)c * g.kv_stride + (uint64_t)col] = dk[c][part];
                if (col < g.Dv)
                    g.dv[v_at + (uint64_t)c * g.v_stride + (uint64_t)col] = dv[c][part];
            }
    }
}

#endif
