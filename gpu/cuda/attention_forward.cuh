/*
 * Causal attention forward on tensor cores, bf16 or fp16 in and out, fp32 sums. A block of four warps takes 64 MT query rows of one
 * head and walks over tiles of BN keys that some row of it reads; scores live in registers, and the online softmax rescales
 * sums when a row's maximum grows. Keys and values of the next tile travel while this one is computed: K is free once the
 * scores are, V once the sums are. Tiles begin at multiples of BN whatever the rows, and a tile that a row does not read leaves
 * its sums as they are to the bit, so a row depends on its own keys alone. Source: Dao 2023, FlashAttention-2.
 */
#ifndef SPW_CUDA_ATTENTION_FORWARD_CUH
#define SPW_CUDA_ATTENTION_FORWARD_CUH

#include "attention.h"
#include "mma.cuh"

enum { ATTENTION_THREADS = 128 };
#define SPW_LOG2E 1.44269504088896341f

/*
 * Tiles have DP columns, zeros beyond D (of values VP and Dv); products stop at the first multiple of STEP that is not below D. Each test for that divides
 * the code that the compiler may mix: loads of one step do not hide behind products of another. STEP = DP makes none.
 */

/* s += A B^T: A the warp's 16 MT rows of a tile, B the BN rows of another. */
template <int DP, int STEP, int MT, int BN, class E>
SPW_DEVICE void
add_scores(float (&s)[MT][BN / 8][4], const E *a_tile, int my_row, const E *b_tile, int D)
{
    const int ld = DP + 8;
#pragma unroll
    for (int d = 0; d < DP; d += 16) {
        unsigned a[MT][4];
        if (d > 0 && d % STEP == 0 && d >= D)
            break;
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_a(a[m], a_tile, ld, my_row + 16 * m, d);
#pragma unroll
        for (int n = 0; n < BN; n += 16) {
            unsigned b[4];
            load_b_rows(b, b_tile, ld, n, d);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma<E>(s[m][n / 8], a[m], b[0], b[1]);
                mma<E>(s[m][n / 8 + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* sums += s B, B the BN rows of a tile: scores lie in registers as a left factor wants them. */
template <int DP, int STEP, int MT, int BN, class E>
SPW_DEVICE void
add_weighted(float (&sums)[MT][DP / 8][4], const float (&s)[MT][BN / 8][4], const E *b_tile, int D)
{
    const int ld = DP + 8;
#pragma unroll
    for (int n = 0; n < BN; n += 16) {
        unsigned a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = pack<E>(s[m][n / 8 + i / 2][i % 2 * 2], s[m][n / 8 + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < DP; d += 16) {
            unsigned b[4];
            if (d > 0 && d % STEP == 0 && d >= D)
                break;
            load_b_columns(b, b_tile, ld, n, d);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma<E>(sums[m][d / 8], a[m], b[0], b[1]);
                mma<E>(sums[m][d / 8 + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/*
 * Scores of keys that a row does not read become -inf, in the warp's rows, which begin at my_row. The first query of the tile of
 * queries is `apart` positions behind the first key of that of keys. KEY_ROWS: rows are keys and columns queries.
 */
template <bool KEY_ROWS, int MT, int BN>
SPW_DEVICE void
hide_unread(float (&s)[MT][BN / 8][4], int my_row, int64_t apart, uint64_t window)
{
    const int64_t far = 1024; /* than which no two elements of a tile are further apart */
    int lane = (int)threadIdx.x % 32, down = (my_row + lane / 4 - lane % 4 * 2) * (KEY_ROWS ? -1 : 1);
    int behind = (int)most(least(apart, far), -far) + down;
    int outside = (window > 0 ? (int)most(least(apart - (int64_t)window, far), -far) : -(int)far) + down;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int more = (16 * m + i / 2 * 8 - 8 * n - i % 2) * (KEY_ROWS ? -1 : 1);
                s[m][n][i] = (behind < -more) | (outside >= -more) ? -INFINITY : s[m][n][i];
            }
}

/*
 * Scores across documents become -inf, in the warp's rows. bounds (rows) belongs to the rows: where a query's document begins, or, with
 * KEY_ROWS, where a key's ends; col is the position of the first column.
 */
template <bool KEY_ROWS, int MT, int BN>
SPW_DEVICE void
hide_others(float (&s)[MT][BN / 8][4], int my_row, const int32_t *bounds, int64_t rows, uint64_t col)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = my_row + 16 * m + lane / 4 + 8 * r;
            int bound = row < rows ? bounds[row] - (int)col - lane % 4 * 2 : 0;
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * n + i < bound ? !KEY_ROWS : KEY_ROWS)
                        s[m][n][2 * r + i] = -INFINITY;
        }
}

/*
 * Scores of keys that are not chosen become -inf, in the warp's rows. bits: of the sequence's first query; the tile's queries, `queries` of them, begin with q0,
 * and its keys with k0, a multiple of 32. A tile's keys end at most where words do, or behind what any query may read.
 */
template <bool KEY_ROWS, int MT, int BN>
SPW_DEVICE void
hide_unchosen(float (&s)[MT][BN / 8][4], int my_row, const uint32_t *bits, uint64_t words, uint64_t q0, int64_t queries,
              uint64_t k0)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = my_row + 16 * m + lane / 4 + i / 2 * 8, col = 8 * n + lane % 4 * 2 + i % 2;
                int query = KEY_ROWS ? col : row, key = KEY_ROWS ? row : col;
                uint64_t word = k0 / 32 + (uint64_t)(key / 32);
                unsigned of_query = query < queries && word < words ? bits[(q0 + (uint64_t)query) * words + word] : 0;
                s[m][n][i] = (of_query >> key % 32 & 1) == 0 ? -INFINITY : s[m][n][i];
            }
}

/* Scores become the hyperbolic tangents that their cap is multiplied by. per_cap: scale / cap. */
template <int MT, int BN>
SPW_DEVICE void
cap_scores(float (&s)[MT][BN / 8][4], float per_cap)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = quick_tanh(s[m][n][i] * per_cap);
}

/* The slope of a capped score at its tangent; 0 for one that is not read, whose tangent is -inf. */
SPW_DEVICE float
cap_slope(float t)
{
    return fmaxf(1.0f - t * t, 0.0f);
}

/*
 * Of a row, whose scores lie in four lanes in pairs, these become weights, 2^(scale2 s) over its greatest so far; what was summed before
 * is to be multiplied by what is returned.
 */
template <int PAIRS>
SPW_DEVICE float
soften_row(float (&s)[PAIRS][2], float *max, float *sum, float scale2)
{
    float top = *max, base, shrink, part = 0.0f;
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
        top = fmaxf(top, fmaxf(s[n][0], s[n][1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    /* Rounded before the difference: a maximum that stays makes a factor of 1. Nothing read so far: weights of 0, not NaN. */
    base = top == -INFINITY ? 0.0f : __fmul_rn(top, scale2);
    shrink = *max == -INFINITY ? 0.0f : power_of_2(__fsub_rn(__fmul_rn(*max, scale2), base));
    *max = top;
#pragma unroll
    for (int n = 0; n < PAIRS; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[n][i] = power_of_2(__fmaf_rn(s[n][i], scale2, -base));
            part += s[n][i];
        }
    *sum = *sum * shrink + part;
    return shrink;
}

/* The same for a warp's rows, and the sums are multiplied. */
template <int MT, int VP, int BN>
SPW_DEVICE void
soften(float (&o)[MT][VP / 8][4], float (&s)[MT][BN / 8][4], float (*max)[2], float (*sum)[2], float scale2)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float row[BN / 8][2], shrink;
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
                row[n][0] = s[m][n][2 * r], row[n][1] = s[m][n][2 * r + 1];
            shrink = soften_row(row, &max[m][r], &sum[m][r], scale2);
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
                s[m][n][2 * r] = row[n][0], s[m][n][2 * r + 1] = row[n][1];
#pragma unroll
            for (int d = 0; d < VP / 8; d++) {
                o[m][d][2 * r] *= shrink;
                o[m][d][2 * r + 1] *= shrink;
            }
        }
}

/* The warp's rows of out and lse, from sums of weighted values and of weights. */
template <int MT, int VP, class E>
SPW_DEVICE void
store_rows(const attention_args<E> &g, const float (&o)[MT][VP / 8][4], const float (*max)[2], const float (*sum)[2],
           float scale, int my_row, int64_t rows, uint64_t q0, int h, int b)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = my_row + 16 * m + lane / 4 + 8 * r;
            float total = sum[m][r], inverse, lse;
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse = 1.0f / total;
            if (row >= rows)
                continue;
            lse = max[m][r] * scale + logf(total);
            if (g.sinks != NULL) {
                float all = log_of_sum(lse, widen(g.sinks[h]));
                inverse *= expf(lse - all);
                lse = all;
            }
            E *out = g.out + (((uint64_t)b * g.T + q0 + (uint64_t)row) * (uint64_t)g.Hq + (uint64_t)h) * (uint64_t)g.Dv;
#pragma unroll
            for (int d = 0; d < VP / 8; d++)
                store_pair(out, 8 * d + lane % 4 * 2, g.Dv, g.wide, o[m][d][2 * r] * inverse,
                           o[m][d][2 * r + 1] * inverse);
            if (g.lse != NULL && lane % 4 == 0)
                g.lse[((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T + q0 + (uint64_t)row] = lse;
        }
}

template <int DP, int VP, int MT, int BN>
constexpr size_t
forward_shared_bytes()
{
    return (size_t)((64 * MT + BN) * (DP + 8) + BN * (VP + 8)) * sizeof(bf16);
}

template <class E, int DP, int VP, int STEP, int MT, int BN, bool CAP, bool FEW>
__global__ void
__launch_bounds__(ATTENTION_THREADS) attention_forward_kernel(attention_args<E> g)
{
    const int BM = 64 * MT, ld = DP + 8, warp = (int)threadIdx.x / 32;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp * 16 * MT;
    SPW_DYNAMIC_SHARED(shared);
    E *q_tile = (E *)shared, *k_tile = q_tile + BM * ld, *v_tile = k_tile + BN * ld;
    /* The last tiles read the most keys: they go first. */
    uint64_t q0 = (uint64_t)(gridDim.x - 1 - blockIdx.x) * BM;
    int64_t rows = (int64_t)least((uint64_t)BM, g.T - q0);
    uint64_t before = g.starts != NULL ? (uint64_t)g.starts[b] : 0, p0 = before + q0, keys = p0 + (uint64_t)rows;
    uint64_t kv_row = g.slots != NULL ? (uint64_t)g.slots[b] * g.capacity : (uint64_t)b * g.T;
    uint64_t k0 = g.window > 0 && p0 + 1 > g.window ? (p0 + 1 - g.window) / BN * BN : 0;
    const E *q = g.q + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head;
    const E *key = g.key + kv_row * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const E *value = g.value + kv_row * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    const float scale = CAP ? g.cap : g.scale; /* of what is left of a score in registers */
    float o[MT][VP / 8][4] = {}, max[MT][2], sum[MT][2] = {}, scale2 = scale * SPW_LOG2E;
#pragma unroll
    for (int m = 0; m < MT; m++)
        max[m][0] = max[m][1] = -INFINITY;
    if (g.begins != NULL)
        k0 = most(k0, (uint64_t)g.begins[(uint64_t)b * g.T + q0] / BN * BN);

    load_tile<BM, DP, ATTENTION_THREADS>(q_tile, q, g.q_stride, rows, g.D, g.wide);
    load_tile<BN, DP, ATTENTION_THREADS>(k_tile, key + k0 * g.kv_stride, g.kv_stride, (int64_t)(keys - k0), g.D,
                                         g.wide);
    copy_commit();
    load_tile<BN, VP, ATTENTION_THREADS>(v_tile, value + k0 * g.v_stride, g.v_stride, (int64_t)(keys - k0), g.Dv,
                                         g.wide);
    copy_commit();
    for (; k0 < keys; k0 += BN) {
        uint64_t next = k0 + BN;
        float s[MT][BN / 8][4] = {};
        copy_wait<1>(); /* keys are here; values may be on their way */
        __syncthreads();
        add_scores<DP, STEP, MT, BN>(s, q_tile, my_row, k_tile, g.D);
        __syncthreads(); /* keys are read */
        if (next < keys)
            load_tile<BN, DP, ATTENTION_THREADS>(k_tile, key + next * g.kv_stride, g.kv_stride, (int64_t)(keys - next),
                                                 g.D, g.wide);
        copy_commit();

        if (CAP)
            cap_scores<MT, BN>(s, g.scale / g.cap);
        if (k0 + BN > p0 + 1 || (g.window > 0 && k0 + g.window < keys)) /* this tile has unread scores */
            hide_unread<false, MT, BN>(s, my_row, (int64_t)(p0 - k0), g.window);
        if (g.begins != NULL)
            hide_others<false, MT, BN>(s, my_row, g.begins + (uint64_t)b * g.T + q0, rows, k0);
        if (FEW)
            hide_unchosen<false, MT, BN>(s, my_row, g.chosen + (uint64_t)b * g.T * g.words, g.words, q0, rows, k0);
        soften<MT, VP, BN>(o, s, max, sum, scale2);

        copy_wait<1>(); /* values are here; the next keys may be on their way */
        __syncthreads();
        /* Steps of 128 take too many registers, and so does a bound of its own where values have the columns of keys. */
        add_weighted<VP, (STEP < 64 ? STEP : 64), MT, BN>(o, s, v_tile, VP == DP ? g.D : g.Dv);
        __syncthreads(); /* values are read */
        if (next < keys)
            load_tile<BN, VP, ATTENTION_THREADS>(v_tile, value + next * g.v_stride, g.v_stride, (int64_t)(keys - next),
                                                 g.Dv, g.wide);
        copy_commit();
    }

    store_rows<MT, VP>(g, o, max, sum, scale, my_row, rows, q0, h, b);
}

#endif
