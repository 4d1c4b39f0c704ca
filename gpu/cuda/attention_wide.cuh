/*
 * Causal attention for heads of more than 256 and up to 512 elements on tensor cores: the formulas of attention_forward.cuh and
 * attention_backward.cuh, cut in another way, since sums of 512 columns do not fit a warp's registers, nor a block's rows and tiles of as
 * many the 99 KiB of shared memory that all architectures have. Eight warps share a block's rows; each four of them has half of these, and
 * a warp a quarter of the columns: of the rows themselves, which stay in its registers, of the tiles that go by, and of the sums.
 *
 *   1  it multiplies its columns, which gives shares of scores, and leaves them in shared memory
 *   2  of each score one warp of the four adds the shares, in the order of columns, and makes of it what the next product
 *      takes as its left factor, rounded
 *   3  all four take that and add to the sums of their columns
 *
 * So nothing is computed twice, a warp reads its own columns of a tile alone, and dk and dv come from one pass. Shares and factors lie as
 * registers hold them, a lane's in the same lane's place: they are not turned round. As elsewhere a row's sums depend on its own keys
 * alone, and there are no atomics.
 */
#ifndef SPW_CUDA_ATTENTION_WIDE_CUH
#define SPW_CUDA_ATTENTION_WIDE_CUH

#include "attention_backward.cuh"

enum {
    WIDE_THREADS = 256,
    WIDE_HEAD = 512,
    WIDE_LD = WIDE_HEAD + 8, /* rows begin in other banks */
    WIDE_QUARTER = WIDE_HEAD / 4,
    WIDE_STEPS = WIDE_QUARTER / 16,
    WIDE_TILE = 32,   /* rows of the other side that go by at a time */
    WIDE_SLOTS = 2048 /* of 16 bytes, for the shares of all */
};

/* Two tiles, the slots, a number for each of 64 rows: a block is all that a processor has room for, which ptxas is told (bounds of 1). */
constexpr size_t
wide_shared_bytes()
{
    return 2 * WIDE_TILE * WIDE_LD * sizeof(bf16) + WIDE_SLOTS * sizeof(uint4) + 64 * sizeof(float);
}

/*
 * A four of warps, each with 16 MT rows, leaves 16 MT x WIDE_TILE scores in WIDE_FOUR(MT) slots: those that warp `owner` adds, from
 * warp `from`, in (owner, from, MT, lane). With MT = 2 they are its eight rows, 8 owner on, and all columns; with 1 rows 8 (owner % 2)
 * and columns 16 (owner / 2) on. The owner's factor goes where its own lane has read last.
 */
#define WIDE_FOUR(MT) (512 * (MT))

/* Of the warp's rows of a tile the quarter's columns: left factors for all of the kernel. */
template <int MT, class E>
SPW_DEVICE void
keep_rows(unsigned (&a)[MT][WIDE_STEPS][4], const E *tile, int my_row, int column)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int k = 0; k < WIDE_STEPS; k++)
            load_a(a[m][k], tile, WIDE_LD, my_row + 16 * m, column + 16 * k);
}

/* The quarter's share of scores. any: whether the head has columns there. */
template <int MT, class E>
SPW_DEVICE void
share_scores(uint4 *slots, const unsigned (&a)[MT][WIDE_STEPS][4], const E *tile, int quarter, bool any)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < WIDE_TILE / 16; n++) {
        float s[MT][2][4] = {};
        if (any)
#pragma unroll
            for (int k = 0; k < WIDE_STEPS; k++) {
                unsigned b[4];
                load_b_rows(b, tile, WIDE_LD, 16 * n, quarter * WIDE_QUARTER + 16 * k);
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma<E>(s[m][0], a[m][k], b[0], b[1]);
                    mma<E>(s[m][1], a[m][k], b[2], b[3]);
                }
            }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int owner = r + 2 * (MT == 2 ? m : n), part = MT == 2 ? n : 0;
                slots[((owner * 4 + quarter) * MT + part) * 32 + lane] =
                    uint4{__float_as_uint(s[m][0][2 * r]), __float_as_uint(s[m][0][2 * r + 1]),
                          __float_as_uint(s[m][1][2 * r]), __float_as_uint(s[m][1][2 * r + 1])};
            }
    }
}

/* The owner's scores, columns 8 n and 8 n + 1 from its lane's first. */
template <int MT>
SPW_DEVICE void
add_shares(float (&s)[2 * MT][2], const uint4 *slots, int owner)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < MT; part++)
#pragma unroll
        for (int from = 0; from < 4; from++) {
            uint4 x = slots[((owner * 4 + from) * MT + part) * 32 + lane];
            s[2 * part][0] = (from > 0 ? s[2 * part][0] : 0.0f) + __uint_as_float(x.x);
            s[2 * part][1] = (from > 0 ? s[2 * part][1] : 0.0f) + __uint_as_float(x.y);
            s[2 * part + 1][0] = (from > 0 ? s[2 * part + 1][0] : 0.0f) + __uint_as_float(x.z);
            s[2 * part + 1][1] = (from > 0 ? s[2 * part + 1][1] : 0.0f) + __uint_as_float(x.w);
        }
}

/* Where the owner's factor goes. */
template <int MT>
SPW_DEVICE uint4 *
factor_of(uint4 *slots, int owner)
{
    return &slots[owner * 4 * MT * 32 + (int)threadIdx.x % 32];
}

/*
 * sums += factor B, of a tile's rows B the quarter's columns. With MT = 2 a factor is all of what its owner left, with 1 the
 * first or the second half of it.
 */
template <int MT, bool SECOND, class E>
SPW_DEVICE void
add_by_factor(float (&sums)[MT][WIDE_QUARTER / 8][4], uint4 *slots, const E *tile, int column)
{
#pragma unroll
    for (int n = 0; n < WIDE_TILE / 16; n++) {
        unsigned a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 x = *factor_of<MT>(slots, r + 2 * (MT == 2 ? m : n));
                bool later = MT == 2 ? n == 1 : SECOND;
                a[m][r] = later ? x.z : x.x;
                a[m][2 + r] = later ? x.w : x.y;
            }
#pragma unroll
        for (int d = 0; d < WIDE_QUARTER; d += 16) {
            unsigned b[4];
            load_b_columns(b, tile, WIDE_LD, 16 * n, column + d);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma<E>(sums[m][d / 8], a[m], b[0], b[1]);
                mma<E>(sums[m][d / 8 + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/*
 * What a row reads of the other side: positions first to last, none where last is below first, and before first those from `front` to below front_end.
 * Documents' have 32 bits, too.
 */
struct wide_range {
    int first, last, front, front_end;
};

/* Of the query at position p, whose document's beginning is *begin. Keys are counted from the first one in front. */
template <bool FRONT, class E>
SPW_DEVICE wide_range
keys_of(const attention_args<E> &g, uint64_t p, const int32_t *begin)
{
    int from = begin != NULL ? *begin : 0, each = (int)g.front_each, front = FRONT ? (int)g.front : 0;
    int first = most(g.window > 0 && p + 1 > g.window ? (int)(p + 1 - g.window) : 0, from);
    return wide_range{front + first, front + (int)p, FRONT ? from / each : 0,
                      FRONT ? least(front, from / each + ((int)p + 1 - from) / each) : 0};
}

/* With keys in front: the first tile from k0, a tile's beginning, on that queries read of which the first and the last read these. */
SPW_DEVICE uint64_t
wide_tile_from(const wide_range &of_first, const wide_range &of_last, uint64_t k0)
{
    const uint64_t own = (uint64_t)of_first.first / WIDE_TILE * WIDE_TILE;
    k0 = most(k0, (uint64_t)of_first.front / WIDE_TILE * WIDE_TILE);
    return k0 < (uint64_t)of_last.front_end ? k0 : most(k0, own);
}

/* How many keys a tile has; of keys in front alone only those that a query reads, for others may not be made yet. */
template <bool FRONT, class E>
SPW_DEVICE uint64_t
wide_keys(const attention_args<E> &g, const wide_range &of_last, uint64_t keys, uint64_t k0)
{
    return (FRONT && k0 + WIDE_TILE <= g.front ? (uint64_t)of_last.front_end : keys) - k0;
}

/* Where the queries end that read the key `row` behind k0; ends: of documents from there on. */
template <class E>
SPW_DEVICE uint64_t
queries_of(const attention_args<E> &g, uint64_t k0, uint64_t row, const int32_t *ends)
{
    uint64_t end = g.window > 0 ? least(g.T, k0 + row + g.window) : g.T;
    return ends != NULL ? least(end, (uint64_t)ends[row]) : end;
}

/* The queries that read the key u of sequence b, counted from the first one in front. */
template <class E>
SPW_DEVICE wide_range
readers_of(const attention_args<E> &g, uint64_t b, uint64_t u)
{
    const int32_t *ends = g.ends != NULL ? g.ends + b * g.T : NULL;
    uint64_t last; /* that it stands for */
    if (u >= g.front)
        return wide_range{(int)(u - g.front),
                          (int)queries_of(g, u - g.front, 0, ends != NULL ? ends + u - g.front : NULL) - 1, 0, 0};
    last = (g.front_rows != NULL ? (uint64_t)g.front_rows[b * g.front + u] : u * g.front_each) + g.front_each - 1;
    return wide_range{(int)last, last >= g.T ? -1 : ends != NULL ? ends[last] - 1 : (int)g.T - 1, 0, 0};
}

/* Of all keys of a tile, some queries more: where they begin and end. */
template <class E>
SPW_DEVICE wide_range
readers_of_tile(const attention_args<E> &g, uint64_t b, uint64_t k0, uint64_t rows)
{
    const uint64_t behind = k0 + rows;
    if (k0 < g.front && behind > g.front) /* both kinds of keys */
        return wide_range{0, (int)g.T, 0, 0};
    if (k0 >= g.front)
        return wide_range{(int)((k0 - g.front) / WIDE_TILE * WIDE_TILE), readers_of(g, b, behind - 1).last + 1, 0, 0};
    uint64_t last = least((behind + 1) * g.front_each - 1, g.T) - 1; /* that the last key can stand for */
    return wide_range{(int)(((k0 + 1) * g.front_each - 1) / WIDE_TILE * WIDE_TILE),
                      g.ends != NULL ? g.ends[b * g.T + last] : (int)g.T, 0, 0};
}

/* Scores of columns that the row does not read become -inf; s begins at position `at`. */
template <bool FRONT = false, int N>
SPW_DEVICE void
hide_outside(float (&s)[N][2], wide_range range, int at)
{
    int first = range.first - at, last = range.last - at, front = range.front - at, end = range.front_end - at;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bool early = 8 * n + i < first;
            if (FRONT)
                early &= (8 * n + i < front) | (8 * n + i >= end);
            s[n][i] = early | (8 * n + i > last) ? -INFINITY : s[n][i];
        }
}

/* And of keys below `end` that the query has not chosen, whose words these are; s begins at position `at`. */
template <int N>
SPW_DEVICE void
hide_unchosen_of(float (&s)[N][2], const uint32_t *words, uint64_t count, uint64_t at, uint64_t end = UINT64_MAX)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint64_t key = at + (uint64_t)(8 * n + i);
            if (key >= end)
                continue;
            unsigned word = words != NULL && key / 32 < count ? words[key / 32] : 0;
            s[n][i] = (word >> key % 32 & 1) == 0 ? -INFINITY : s[n][i];
        }
}

template <int N>
SPW_DEVICE void
cap_shared(float (&s)[N][2], float per_cap)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            s[n][i] = quick_tanh(s[n][i] * per_cap);
}

template <class E>
SPW_DEVICE void
load_wide(E *tile, const E *src, uint64_t stride, uint64_t rows, int D, bool wide)
{
    load_tile<WIDE_TILE, WIDE_HEAD, WIDE_THREADS>(tile, src, stride, (int64_t)rows, D, wide);
}

/* ---------------------------------------------------------------- forward */

/* A number per row of the four, to which each of the rows' owners has given its own: the sums' factor. */
SPW_DEVICE void
scale_rows(float (&o)[2][WIDE_QUARTER / 8][4], const float *factors)
{
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float factor = factors[16 * m + 8 * r + (int)threadIdx.x % 32 / 4];
#pragma unroll
            for (int d = 0; d < WIDE_QUARTER / 8; d++) {
                o[m][d][2 * r] *= factor;
                o[m][d][2 * r + 1] *= factor;
            }
        }
}

/* From a row's greatest score and its thread's part of the sum of weights: what the sums are multiplied by, and lse. */
template <class E>
SPW_DEVICE float
end_row(const attention_args<E> &g, float max, float sum, float scale, float *lse_out, int h)
{
    float inverse, lse;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    inverse = 1.0f / sum;
    lse = max * scale + logf(sum);
    if (g.sinks != NULL) {
        float all = log_of_sum(lse, widen(g.sinks[h]));
        inverse *= expf(lse - all);
        lse = all;
    }
    *lse_out = lse;
    return inverse;
}

/* 64 query rows, 32 for each four. */
template <class E, bool CAP, bool FEW, bool FRONT>
__global__ void
__launch_bounds__(WIDE_THREADS, 1) attention_wide_forward_kernel(attention_args<E> g)
{
    const int MT = 2, BM = 64, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, quarter = warp % 4;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp / 4 * 16 * MT, column = quarter * WIDE_QUARTER;
    const int owned = my_row + 8 * quarter + lane / 4; /* the row whose weights this thread makes */
    SPW_DYNAMIC_SHARED(shared);
    E *k_tile = (E *)shared, *v_tile = k_tile + WIDE_TILE * WIDE_LD;
    uint4 *all = (uint4 *)(v_tile + WIDE_TILE * WIDE_LD), *slots = all + warp / 4 * WIDE_FOUR(MT);
    float *factors = (float *)(all + WIDE_SLOTS);
    /* The last tiles read the most keys: they go first. */
    uint64_t q0 = (uint64_t)(gridDim.x - 1 - blockIdx.x) * BM, rows = least((uint64_t)BM, g.T - q0);
    uint64_t before = g.starts != NULL ? (uint64_t)g.starts[b] : 0, p0 = before + q0, last = p0 + rows - 1;
    uint64_t in_front = FRONT ? g.front : 0, keys = in_front + last + 1;
    uint64_t kv_row = g.slots != NULL ? (uint64_t)g.slots[b] * g.capacity : (uint64_t)b * (in_front + g.T);
    const E *key = g.key + kv_row * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const E *value = g.value + kv_row * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    const int32_t *begins = g.begins != NULL ? g.begins + (uint64_t)b * g.T + q0 : NULL;
    const wide_range of_first = keys_of<FRONT>(g, p0, begins);
    const wide_range of_last = keys_of<FRONT>(g, last, begins != NULL ? begins + rows - 1 : NULL);
    uint64_t k0 = FRONT ? wide_tile_from(of_first, of_last, 0) : (uint64_t)of_first.first / WIDE_TILE * WIDE_TILE;
    const float scale = CAP ? g.cap : g.scale; /* of what is left of a score in registers */
    float o[MT][WIDE_QUARTER / 8][4] = {}, max = -INFINITY, sum = 0.0f, inverse, lse;
    unsigned q[MT][WIDE_STEPS][4];
    wide_range range = {0, -1, 0, 0};
    const uint32_t *chosen = NULL;
    if ((uint64_t)owned < rows)
        range = keys_of<FRONT>(g, p0 + (uint64_t)owned, begins != NULL ? begins + owned : NULL);
    if (FEW && (uint64_t)owned < rows)
        chosen = g.chosen + ((uint64_t)b * g.T + q0 + (uint64_t)owned) * g.words;

    load_tile<BM, WIDE_HEAD, WIDE_THREADS>(k_tile, g.q + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head,
                                           g.q_stride, (int64_t)rows, g.D, g.wide); /* both tiles' place */
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    keep_rows<MT>(q, k_tile, my_row, column);
    __syncthreads();
    load_wide(k_tile, key + k0 * g.kv_stride, g.kv_stride, wide_keys<FRONT>(g, of_last, keys, k0), g.D, g.wide);
    copy_commit();
    load_wide(v_tile, value + k0 * g.v_stride, g.v_stride, wide_keys<FRONT>(g, of_last, keys, k0), g.Dv, g.wide);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    for (uint64_t next; k0 < keys; k0 = next) {
        float s[2 * MT][2], shrink;
        next = FRONT ? wide_tile_from(of_first, of_last, k0 + WIDE_TILE) : k0 + WIDE_TILE;
        share_scores<MT>(slots, q, k_tile, quarter, column < g.D);
        __syncthreads(); /* shares are there, and keys are read */
        if (next < keys)
            load_wide(k_tile, key + next * g.kv_stride, g.kv_stride, wide_keys<FRONT>(g, of_last, keys, next), g.D,
                      g.wide);
        copy_commit();
        add_shares<MT>(s, slots, quarter);
        if (CAP)
            cap_shared(s, g.scale / g.cap);
        hide_outside<FRONT>(s, range, (int)k0 + lane % 4 * 2);
        if (FEW)
            hide_unchosen_of(s, chosen, g.words, k0 + (uint64_t)(lane % 4 * 2), FRONT ? g.front : UINT64_MAX);
        shrink = soften_row(s, &max, &sum, scale * SPW_LOG2E);
        *factor_of<MT>(slots, quarter) = uint4{pack<E>(s[0][0], s[0][1]), pack<E>(s[1][0], s[1][1]),
                                               pack<E>(s[2][0], s[2][1]), pack<E>(s[3][0], s[3][1])};
        if (lane % 4 == 0)
            factors[owned] = shrink;
        copy_wait<1>(); /* values are here; the next keys may be on their way */
        __syncthreads();
        if (column < g.Dv) {
            scale_rows(o, factors + my_row);
            add_by_factor<MT, false>(o, slots, v_tile, column);
        }
        copy_wait<0>();  /* keys are here */
        __syncthreads(); /* and values are read */
        if (next < keys)
            load_wide(v_tile, value + next * g.v_stride, g.v_stride, wide_keys<FRONT>(g, of_last, keys, next), g.Dv,
                      g.wide);
        copy_commit();
    }
    inverse = end_row(g, max, sum, scale, &lse, h);
    if (lane % 4 == 0) {
        factors[owned] = inverse;
        if (g.lse != NULL && (uint64_t)owned < rows)
            g.lse[((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T + q0 + (uint64_t)owned] = lse;
    }
    __syncthreads();
    scale_rows(o, factors + my_row);
    store_gradients<MT, WIDE_QUARTER>(
        g.out + (((uint64_t)b * g.T + q0) * (uint64_t)g.Hq + (uint64_t)h) * (uint64_t)g.Dv + column,
        (uint64_t)g.Hq * (uint64_t)g.Dv, o, my_row, (int64_t)rows, g.Dv - column, g.wide, 1.0f);
}

/* ---------------------------------------------------------------- dq */

/* 32 query rows, 16 for each four. */
template <class E, bool CAP, bool FEW, bool FRONT>
__global__ void
__launch_bounds__(WIDE_THREADS, 1) attention_wide_dq_kernel(attention_args<E> g)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, quarter = warp % 4, my_row = warp / 4 * 16;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, column = quarter * WIDE_QUARTER;
    const int owned = my_row + 8 * (quarter % 2) + lane / 4, first_column = quarter / 2 * 16 + lane % 4 * 2;
    SPW_DYNAMIC_SHARED(shared);
    E *k_tile = (E *)shared, *v_tile = k_tile + WIDE_TILE * WIDE_LD;
    uint4 *all = (uint4 *)(v_tile + WIDE_TILE * WIDE_LD), *slots = all + warp / 4 * WIDE_FOUR(1);
    uint4 *dp_slots = slots + WIDE_SLOTS / 2;
    uint64_t q0 = (uint64_t)(gridDim.x - 1 - blockIdx.x) * WIDE_TILE, out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    uint64_t rows = least((uint64_t)WIDE_TILE, g.T - q0), last = q0 + rows - 1, at = (uint64_t)b * g.T + q0;
    uint64_t in_front = FRONT ? g.front : 0, keys = in_front + last + 1, kv_row = (uint64_t)b * (in_front + g.T);
    const E *key = g.key + kv_row * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const E *value = g.value + kv_row * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    const int32_t *begins = g.begins != NULL ? g.begins + at : NULL;
    const wide_range of_first = keys_of<FRONT>(g, q0, begins);
    const wide_range of_last = keys_of<FRONT>(g, last, begins != NULL ? begins + rows - 1 : NULL);
    uint64_t k0 = FRONT ? wide_tile_from(of_first, of_last, 0) : (uint64_t)of_first.first / WIDE_TILE * WIDE_TILE;
    float dq[1][WIDE_QUARTER / 8][4] = {}, lse2 = 0.0f, delta = 0.0f, scale2 = (CAP ? g.cap : g.scale) * SPW_LOG2E;
    unsigned q[1][WIDE_STEPS][4], dout[1][WIDE_STEPS][4];
    const uint32_t *chosen = NULL;
    wide_range range = {0, -1, 0, 0};
    if ((uint64_t)owned < rows) {
        uint64_t stat = ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T + q0 + (uint64_t)owned;
        range = keys_of<FRONT>(g, q0 + (uint64_t)owned, begins != NULL ? begins + owned : NULL);
        chosen = FEW ? g.chosen + (at + (uint64_t)owned) * g.words : NULL;
        lse2 = g.lse[stat] * SPW_LOG2E;
        delta = g.delta[stat];
    }
    load_wide(k_tile, g.q + at * g.q_stride + (uint64_t)h * g.q_head, g.q_stride, rows, g.D, g.wide);
    load_wide(v_tile, g.dout + at * out_stride + (uint64_t)h * (uint64_t)g.Dv, out_stride, rows, g.Dv, g.wide);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    keep_rows<1>(q, k_tile, my_row, column);
    keep_rows<1>(dout, v_tile, my_row, column);
    __syncthreads();
    load_wide(v_tile, value + k0 * g.v_stride, g.v_stride, keys - k0, g.Dv, g.wide);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    load_wide(k_tile, key + k0 * g.kv_stride, g.kv_stride, keys - k0, g.D, g.wide);
    copy_commit();
    for (uint64_t next; k0 < keys; k0 = next) {
        float s[2][2], dp[2][2];
        next = FRONT ? wide_tile_from(of_first, of_last, k0 + WIDE_TILE) : k0 + WIDE_TILE;
        share_scores<1>(dp_slots, dout, v_tile, quarter, column < g.Dv);
        copy_wait<0>();
        __syncthreads(); /* keys are here, and values are read */
        if (next < keys)
            load_wide(v_tile, value + next * g.v_stride, g.v_stride, keys - next, g.Dv, g.wide);
        copy_commit();
        share_scores<1>(slots, q, k_tile, quarter, column < g.D);
        __syncthreads();
        add_shares<1>(s, slots, quarter);
        add_shares<1>(dp, dp_slots, quarter);
        if (CAP)
            cap_shared(s, g.scale / g.cap);
        hide_outside<FRONT>(s, range, (int)k0 + first_column);
        if (FEW)
            hide_unchosen_of(s, chosen, g.words, k0 + (uint64_t)first_column, FRONT ? g.front : UINT64_MAX);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float slope = CAP ? cap_slope(s[n][i]) : 1.0f;
                s[n][i] = power_of_2(s[n][i] * scale2 - lse2) * (dp[n][i] - delta);
                s[n][i] = CAP ? s[n][i] * slope : s[n][i];
            }
        *factor_of<1>(slots, quarter) = uint4{pack<E>(s[0][0], s[0][1]), pack<E>(s[1][0], s[1][1]), 0, 0};
        __syncthreads();
        if (column < g.D)
            add_by_factor<1, false>(dq, slots, k_tile, column);
        copy_wait<0>();  /* values are here */
        __syncthreads(); /* and keys are read */
        if (next < keys)
            load_wide(k_tile, key + next * g.kv_stride, g.kv_stride, keys - next, g.D, g.wide);
        copy_commit();
    }
    store_gradients<1, WIDE_QUARTER>(g.dq + at * g.q_stride + (uint64_t)h * g.q_head + column, g.q_stride, dq, my_row,
                                     (int64_t)rows, g.D - column, g.wide, g.scale);
}

/* ---------------------------------------------------------------- dk and dv */

/* 32 keys, 16 for each four; both gradients. */
template <class E, bool CAP, bool FEW, bool FRONT>
__global__ void
__launch_bounds__(WIDE_THREADS, 1) attention_wide_dkv_kernel(attention_args<E> g)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, quarter = warp % 4, my_row = warp / 4 * 16;
    const int hk = (int)blockIdx.y, b = (int)blockIdx.z, column = quarter * WIDE_QUARTER;
    const int owned = my_row + 8 * (quarter % 2) + lane / 4, first_column = quarter / 2 * 16 + lane % 4 * 2;
    SPW_DYNAMIC_SHARED(shared);
    E *q_tile = (E *)shared, *do_tile = q_tile + WIDE_TILE * WIDE_LD;
    uint4 *all = (uint4 *)(do_tile + WIDE_TILE * WIDE_LD), *slots = all + warp / 4 * WIDE_FOUR(1);
    uint4 *dp_slots = slots + WIDE_SLOTS / 2;
    uint64_t k0 = (uint64_t)blockIdx.x * WIDE_TILE; /* the first have the most queries */
    uint64_t out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    uint64_t total = (FRONT ? g.front : 0) + g.T, rows = least((uint64_t)WIDE_TILE, total - k0);
    uint64_t at = (uint64_t)b * total + k0;
    uint64_t k_at = at * g.kv_stride + (uint64_t)hk * g.k_head, v_at = at * g.v_stride + (uint64_t)hk * g.v_head;
    const int32_t *ends = !FRONT && g.ends != NULL ? g.ends + at : NULL;
    const wide_range of_tile = FRONT ? readers_of_tile(g, (uint64_t)b, k0, rows) : wide_range{0, 0, 0, 0};
    const unsigned first = FRONT ? (unsigned)of_tile.first : (unsigned)k0; /* 32 bits: registers are few */
    const unsigned end = (unsigned)(FRONT ? (uint64_t)of_tile.last : queries_of(g, k0, rows - 1, ends));
    float dk[1][WIDE_QUARTER / 8][4] = {}, dv[1][WIDE_QUARTER / 8][4] = {};
    float scale2 = (CAP ? g.cap : g.scale) * SPW_LOG2E;
    unsigned k[1][WIDE_STEPS][4], v[1][WIDE_STEPS][4];
    wide_range range = {0, -1, 0, 0};
    if ((uint64_t)owned < rows)
        range = FRONT ? readers_of(g, (uint64_t)b, k0 + (uint64_t)owned)
                      : wide_range{(int)k0 + owned, (int)queries_of(g, k0, (uint64_t)owned, ends) - 1, 0, 0};
    load_wide(q_tile, g.key + k_at, g.kv_stride, rows, g.D, g.wide);
    load_wide(do_tile, g.value + v_at, g.v_stride, rows, g.Dv, g.wide);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    keep_rows<1>(k, q_tile, my_row, column);
    keep_rows<1>(v, do_tile, my_row, column);
    __syncthreads();
    for (int h = hk * g.group; h < (hk + 1) * g.group; h++) {
        const E *q = g.q + (uint64_t)b * g.T * g.q_stride + (uint64_t)h * g.q_head;
        const E *dout = g.dout + (uint64_t)b * g.T * out_stride + (uint64_t)h * (uint64_t)g.Dv;
        uint64_t stats = ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T;
        if (FRONT && first >= end)
            break; /* no query reads these */
        load_wide(q_tile, q + first * g.q_stride, g.q_stride, g.T - first, g.D, g.wide);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        load_wide(do_tile, dout + first * out_stride, out_stride, g.T - first, g.Dv, g.wide);
        copy_commit();
        for (unsigned q0 = first; q0 < end; q0 += WIDE_TILE) {
            uint64_t next = q0 + WIDE_TILE, known = least(q0 + (uint64_t)lane, g.T - 1);
            float lse2 = g.lse[stats + known] * SPW_LOG2E, delta = g.delta[stats + known]; /* a query per lane */
            float s[2][2], dp[2][2];
            share_scores<1>(slots, k, q_tile, quarter, column < g.D);
            copy_wait<0>();
            __syncthreads(); /* dout is here */
            share_scores<1>(dp_slots, v, do_tile, quarter, column < g.Dv);
            __syncthreads();
            add_shares<1>(s, slots, quarter);
            add_shares<1>(dp, dp_slots, quarter);
            if (CAP)
                cap_shared(s, g.scale / g.cap);
            hide_outside(s, range, (int)q0 + first_column);
#pragma unroll
            for (int n = 0; n < 2 && FEW; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint64_t query = q0 + (uint64_t)(first_column + 8 * n + i), key = k0 + (uint64_t)owned;
                    if (FRONT && key >= g.front)
                        continue;
                    unsigned word = query < g.T && key / 32 < g.words
                                        ? g.chosen[((uint64_t)b * g.T + query) * g.words + key / 32]
                                        : 0;
                    s[n][i] = (word >> key % 32 & 1) == 0 ? -INFINITY : s[n][i];
                }
                /* s becomes p, dp becomes ds without its scale. */
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float slope = CAP ? cap_slope(s[n][i]) : 1.0f;
                    s[n][i] = power_of_2(s[n][i] * scale2 - __shfl_sync(0xffffffffu, lse2, first_column + 8 * n + i));
                    dp[n][i] = s[n][i] * (dp[n][i] - __shfl_sync(0xffffffffu, delta, first_column + 8 * n + i));
                    dp[n][i] = CAP ? dp[n][i] * slope : dp[n][i];
                }
            *factor_of<1>(slots, quarter) = uint4{pack<E>(dp[0][0], dp[0][1]), pack<E>(dp[1][0], dp[1][1]),
                                                  pack<E>(s[0][0], s[0][1]), pack<E>(s[1][0], s[1][1])};
            __syncthreads();
            if (column < g.D)
                add_by_factor<1, false>(dk, slots, q_tile, column);
            __syncthreads(); /* queries are read */
            if (next < end)
                load_wide(q_tile, q + next * g.q_stride, g.q_stride, g.T - next, g.D, g.wide);
            copy_commit();
            if (column < g.Dv)
                add_by_factor<1, true>(dv, slots, do_tile, column);
            copy_wait<0>();  /* queries are here */
            __syncthreads(); /* and dout is read */
            if (next < end)
                load_wide(do_tile, dout + next * out_stride, out_stride, g.T - next, g.Dv, g.wide);
            copy_commit();
        }
    }
    store_gradients<1, WIDE_QUARTER>(g.dk + k_at + column, g.kv_stride, dk, my_row, (int64_t)rows, g.D - column, g.wide,
                                     g.scale);
    store_gradients<1, WIDE_QUARTER>(g.dv + v_at + column, g.v_stride, dv, my_row, (int64_t)rows, g.Dv - column, g.wide,
                                     1.0f);
}

#endif
