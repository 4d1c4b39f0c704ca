/*
 * Causal attention backward on tensor cores, bf16 or fp16 with fp32 sums, without atomics: one kernel owns query rows and makes dq, one
 * owns key rows and makes dk and dv, each going through the other side's tiles in a fixed order. Scores are computed in both, 7
 * products where atomics or an order imposed on blocks would need 5; in return no block waits for another and there is no fp32
 * copy of dq. The key side works on transposed scores, so that they lie in registers as the left factor of its products.
 *
 *   p = exp(s - lse)   dv = p^T dout   dp = dout v^T   ds = p (dp - delta) scale   dq = ds k   dk = ds^T q
 *
 * with delta the row sums of dout * out; where scores have a cap, t = tanh(scale q k / cap) stands for s, and ds has 1 - t^2 besides.
 * Source: Dao et al. 2022, FlashAttention, Algorithm 4.
 */
#ifndef SPW_CUDA_ATTENTION_BACKWARD_CUH
#define SPW_CUDA_ATTENTION_BACKWARD_CUH

#include "attention_forward.cuh"

/*
 * delta(B, Hq, T), as many lanes per row and head as eight elements each take: a power of two, a warp's at most, which go on by as
 * many elements as they take together. pairs: of a row and a head.
 */
template <class E>
__global__ void
attention_delta_kernel(float *delta, const E *dout, const E *out, uint64_t pairs, uint64_t T, uint64_t Hq, uint64_t D,
                       unsigned lanes, bool wide)
{
    uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / lanes, d = threadIdx.x % lanes * 8;
    float sum = 0.0f;
    for (; i < pairs && d < D; d += 8 * lanes) {
        eight<E> of_dout, of_out;
        float x[8], y[8];
        load_eight(&of_dout, dout + i * D + d, D - d, wide);
        load_eight(&of_out, out + i * D + d, D - d, wide);
        widen8(x, of_dout);
        widen8(y, of_out);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += x[j] * y[j];
    }
    for (unsigned far = lanes / 2; far > 0; far /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, far);
    if (i < pairs && threadIdx.x % lanes == 0)
        delta[(i / Hq / T * Hq + i % Hq) * T + i / Hq % T] = sum;
}

/* A block per head: what its sink's weight, exp(sink - lse), takes from rows that get delta from theirs. */
template <class E>
__global__ void
attention_sinks_kernel(float *dsinks, const E *sinks, const float *lse, const float *delta, uint64_t B, uint64_t T)
{
    uint64_t h = blockIdx.x, Hq = gridDim.x;
    float sink = widen(sinks[h]), sum = 0.0f;
    for (uint64_t row = threadIdx.x; row < B * T; row += blockDim.x) {
        uint64_t at = (row / T * Hq + h) * T + row % T;
        sum += expf(sink - lse[at]) * delta[at];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        dsinks[h] -= sum;
}

/* The warp's rows of a gradient; `to` is the block's first. */
template <int MT, int DP, class E>
SPW_DEVICE void
store_gradients(E *to, uint64_t stride, const float (&x)[MT][DP / 8][4], int my_row, int64_t rows, int D, bool wide,
                float scale)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = my_row + 16 * m + lane / 4 + 8 * r;
#pragma unroll
            for (int d = 0; d < DP / 8; d++)
                if (row < rows)
                    store_pair(to + (uint64_t)row * stride, 8 * d + lane % 4 * 2, D, wide, x[m][d][2 * r] * scale,
                               x[m][d][2 * r + 1] * scale);
        }
}

/* ---------------------------------------------------------------- dq */

/* A block's rows of two tensors stay; tiles of two others go through BUFFERS. */
template <int DP, int VP, int MT, int BN, int BUFFERS>
constexpr size_t
backward_shared_bytes()
{
    return (size_t)(64 * MT + BUFFERS * BN) * (DP + 8 + VP + 8) * sizeof(bf16);
}

template <class E, int DP, int VP, int STEP, int MT, int BN, bool CAP, bool FEW>
__global__ void
__launch_bounds__(ATTENTION_THREADS) attention_dq_kernel(attention_args<E> g)
{
    const int BM = 64 * MT, ld = DP + 8, ldv = VP + 8, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp * 16 * MT;
    SPW_DYNAMIC_SHARED(shared);
    E *q_tile = (E *)shared, *do_tile = q_tile + BM * ld, *k_tile = do_tile + BM * ldv, *v_tile = k_tile + BN * ld;
    uint64_t q0 = (uint64_t)(gridDim.x - 1 - blockIdx.x) * BM, out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    int64_t rows = (int64_t)least((uint64_t)BM, g.T - q0);
    uint64_t keys = q0 + (uint64_t)rows, k0 = g.window > 0 && q0 + 1 > g.window ? (q0 + 1 - g.window) / BN * BN : 0;
    const E *key = g.key + (uint64_t)b * g.T * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const E *value = g.value + (uint64_t)b * g.T * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    uint64_t stats = ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T + q0;
    float dq[MT][DP / 8][4] = {}, lse2[MT][2], delta[MT][2], scale2 = (CAP ? g.cap : g.scale) * SPW_LOG2E;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = my_row + 16 * m + lane / 4 + 8 * r;
            lse2[m][r] = row < rows ? g.lse[stats + (uint64_t)row] * SPW_LOG2E : INFINITY;
            delta[m][r] = row < rows ? g.delta[stats + (uint64_t)row] : 0.0f;
        }
    load_tile<BM, DP, ATTENTION_THREADS>(q_tile, g.q + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head,
                                         g.q_stride, rows, g.D, g.wide);
    load_tile<BM, VP, ATTENTION_THREADS>(do_tile, g.dout + ((uint64_t)b * g.T + q0) * out_stride + (uint64_t)h * g.Dv,
                                         out_stride, rows, g.Dv, g.wide);
    auto load_keys = [&](uint64_t at) {
        if (at < keys)
            load_tile<BN, DP, ATTENTION_THREADS>(k_tile, key + at * g.kv_stride, g.kv_stride, (int64_t)(keys - at), g.D,
                                                 g.wide);
    };
    auto load_values = [&](uint64_t at) {
        if (at < keys)
            load_tile<BN, VP, ATTENTION_THREADS>(v_tile, value + at * g.v_stride, g.v_stride, (int64_t)(keys - at),
                                                 g.Dv, g.wide);
    };
    if (g.begins != NULL)
        k0 = most(k0, (uint64_t)g.begins[(uint64_t)b * g.T + q0] / BN * BN);
    load_values(k0);
    copy_commit();
    load_keys(k0);
    copy_commit();
    for (; k0 < keys; k0 += BN) {
        uint64_t next = k0 + BN;
        float s[MT][BN / 8][4] = {}, dp[MT][BN / 8][4] = {};
        copy_wait<1>(); /* values are here; keys, needed to the end of the round before, may be on their way */
        __syncthreads();
        add_scores<VP, STEP, MT, BN>(dp, do_tile, my_row, v_tile, g.Dv);
        copy_wait<0>();
        __syncthreads(); /* keys are here, and values are read */
        load_values(next);
        copy_commit();
        add_scores<DP, STEP, MT, BN>(s, q_tile, my_row, k_tile, g.D);
        if (CAP)
            cap_scores<MT, BN>(s, g.scale / g.cap);
        if (k0 + BN > q0 + 1 || (g.window > 0 && k0 + g.window < keys)) /* this tile has unread scores */
            hide_unread<false, MT, BN>(s, my_row, (int64_t)(q0 - k0), g.window);
        if (g.begins != NULL)
            hide_others<false, MT, BN>(s, my_row, g.begins + (uint64_t)b * g.T + q0, rows, k0);
        if (FEW)
            hide_unchosen<false, MT, BN>(s, my_row, g.chosen + (uint64_t)b * g.T * g.words, g.words, q0, rows, k0);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float slope = CAP ? cap_slope(s[m][n][i]) : 1.0f;
                    s[m][n][i] = power_of_2(s[m][n][i] * scale2 - lse2[m][i / 2]) * (dp[m][n][i] - delta[m][i / 2]);
                    s[m][n][i] = CAP ? s[m][n][i] * slope : s[m][n][i];
                }
        add_weighted<DP, STEP, MT, BN>(dq, s, k_tile, g.D);
        __syncthreads(); /* keys are read */
        load_keys(next);
        copy_commit();
    }
    store_gradients<MT, DP>(g.dq + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head, g.q_stride, dq,
                            my_row, rows, g.D, g.wide, g.scale);
}

/* ---------------------------------------------------------------- dk and dv */

/*
 * Rows are keys, BN queries per tile. DK and DV say what is made: both at once where registers suffice. With two BUFFERS the next tile
 * travels all the time that one is computed, and there is one barrier per tile; with one each half is loaded as soon as it has been read.
 */
template <class E, int DP, int VP, int STEP, int MT, int BN, int BUFFERS, bool DK, bool DV, bool CAP, bool FEW>
__global__ void
__launch_bounds__(ATTENTION_THREADS) attention_dkv_kernel(attention_args<E> g)
{
    const int BM = 64 * MT, ld = DP + 8, ldv = VP + 8, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int hk = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp * 16 * MT;
    SPW_DYNAMIC_SHARED(shared);
    E *k_tile = (E *)shared, *v_tile = k_tile + BM * ld, *tiles = v_tile + BM * ldv;
    const int do_at = BN * ld, both = BN * (ld + ldv); /* dout lies behind the queries */
    int now = 0;                                       /* where in tiles this round's are: 0 or, of two buffers, both */
    uint64_t k0 = (uint64_t)blockIdx.x * BM,
             out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv; /* the first have most queries */
    int64_t rows = (int64_t)least((uint64_t)BM, g.T - k0);
    uint64_t first = k0 / BN * BN, end = g.window > 0 ? least(g.T, k0 + (uint64_t)rows - 1 + g.window) : g.T;
    uint64_t k_at = ((uint64_t)b * g.T + k0) * g.kv_stride + (uint64_t)hk * g.k_head;
    uint64_t v_at = ((uint64_t)b * g.T + k0) * g.v_stride + (uint64_t)hk * g.v_head;
    float dk[DK ? MT : 1][DK ? DP / 8 : 1][4] = {}, dv[DV ? MT : 1][DV ? VP / 8 : 1][4] = {};
    float scale2 = (CAP ? g.cap : g.scale) * SPW_LOG2E;
    static_assert(BN == 32, "a lane per query");
    if (g.ends != NULL)
        end = least(end, (uint64_t)g.ends[(uint64_t)b * g.T + k0 + (uint64_t)rows - 1]);
    load_tile<BM, DP, ATTENTION_THREADS>(k_tile, g.key + k_at, g.kv_stride, rows, g.D, g.wide);
    if (DK)
        load_tile<BM, VP, ATTENTION_THREADS>(v_tile, g.value + v_at, g.v_stride, rows, g.Dv, g.wide);
    for (int h = hk * g.group; h < (hk + 1) * g.group; h++) {
        const E *q = g.q + (uint64_t)b * g.T * g.q_stride + (uint64_t)h * g.q_head;
        const E *dout = g.dout + (uint64_t)b * g.T * out_stride + (uint64_t)h * (uint64_t)g.Dv;
        const float *lse = g.lse + ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T;
        const float *delta = g.delta + ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T;
        auto load_queries = [&](E *tile, uint64_t at) {
            if (at < end)
                load_tile<BN, DP, ATTENTION_THREADS>(tile, q + at * g.q_stride, g.q_stride, (int64_t)(g.T - at), g.D,
                                                     g.wide);
        };
        auto load_douts = [&](E *tile, uint64_t at) {
            if (at < end)
                load_tile<BN, VP, ATTENTION_THREADS>(tile, dout + at * out_stride, out_stride, (int64_t)(g.T - at),
                                                     g.Dv, g.wide);
        };
        load_queries(tiles + now, first);
        load_douts(tiles + now + do_at, first);
        copy_commit();
        for (uint64_t q0 = first; q0 < end; q0 += BN, now = BUFFERS == 2 ? both - now : 0) {
            const E *q_tile = tiles + now, *do_tile = q_tile + do_at;
            uint64_t next = q0 + BN, mine = q0 + (uint64_t)lane, known = least(mine, g.T - 1);
            float my_lse = lse[known], my_delta = DK ? delta[known] : 0.0f; /* a query per lane, for all its scores */
            float s[MT][BN / 8][4] = {}, dp[MT][BN / 8][4] = {};
            copy_wait<0>();
            __syncthreads();
            if (BUFFERS == 2) { /* the other is read: all have come to this round */
                load_queries(tiles + both - now, next);
                load_douts(tiles + both - now + do_at, next);
                copy_commit();
            }
            add_scores<DP, STEP, MT, BN>(s, k_tile, my_row, q_tile, g.D);
            if (DK)
                add_scores<VP, STEP, MT, BN>(dp, v_tile, my_row, do_tile, g.Dv);
            if (CAP)
                cap_scores<MT, BN>(s, g.scale / g.cap);
            if (q0 < k0 + BM || (g.window > 0 && q0 + BN > k0 + g.window)) /* this tile has unread scores */
                hide_unread<true, MT, BN>(s, my_row, (int64_t)(q0 - k0), g.window);
            if (g.ends != NULL)
                hide_others<true, MT, BN>(s, my_row, g.ends + (uint64_t)b * g.T + k0, rows, q0);
            if (FEW)
                hide_unchosen<true, MT, BN>(s, my_row, g.chosen + (uint64_t)b * g.T * g.words, g.words, q0,
                                            (int64_t)(g.T - q0), k0);
            my_lse = mine < g.T ? my_lse * SPW_LOG2E : INFINITY;
            my_delta = mine < g.T ? my_delta : 0.0f;
            /* s becomes p, dp becomes ds without its scale. */
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float lse2 = __shfl_sync(0xffffffffu, my_lse, 8 * n + lane % 4 * 2 + j);
                    float del = DK ? __shfl_sync(0xffffffffu, my_delta, 8 * n + lane % 4 * 2 + j) : 0.0f;
#pragma unroll
                    for (int m = 0; m < MT; m++)
#pragma unroll
                        for (int i = j; i < 4; i += 2) {
                            float slope = CAP && DK ? cap_slope(s[m][n][i]) : 1.0f;
                            s[m][n][i] = power_of_2(s[m][n][i] * scale2 - lse2);
                            dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - del);
                            dp[m][n][i] = CAP && DK ? dp[m][n][i] * slope : dp[m][n][i];
                        }
                }
            if constexpr (DV)
                add_weighted<VP, STEP, MT, BN>(dv, s, do_tile, g.Dv);
            if (BUFFERS == 1) {
                __syncthreads(); /* dout is read */
                load_douts(tiles + do_at, next);
                copy_commit();
            }
            if constexpr (DK)
                add_weighted<DP, STEP, MT, BN>(dk, dp, q_tile, g.D);
            if (BUFFERS == 1) {
                __syncthreads(); /* queries are read */
                load_queries(tiles, next);
                copy_commit();
            }
        }
    }
    if constexpr (DK)
        store_gradients<MT, DP>(g.dk + k_at, g.kv_stride, dk, my_row, rows, g.D, g.wide, g.scale);
    if constexpr (DV)
        store_gradients<MT, VP>(g.dv + v_at, g.v_stride, dv, my_row, rows, g.Dv, g.wide, 1.0f);
}

#endif
