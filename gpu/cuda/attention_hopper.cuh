/*
 * Causal attention of attention_forward.cuh and attention_backward.cuh with a Hopper's products (wgmma.cuh), for heads without a cap: the
 * same tiles, the same order of sums, other instructions. WG warpgroups own 64 rows each of a block; tiles of the other side come two at
 * a time, one computed and one on its way, with one barrier each.
 */
#ifndef SPW_CUDA_ATTENTION_HOPPER_CUH
#define SPW_CUDA_ATTENTION_HOPPER_CUH

#include "attention_backward.cuh"
#include "wgmma.cuh"

/* Shared memory of tiles: the block's rows of OWN tensors, two tiles of BN rows of two, of DP columns; and up to where they may begin. */
template <int DP, int WG, int BN, int OWN>
constexpr size_t
hopper_shared_bytes()
{
    return (size_t)(64 * WG * OWN + 4 * BN) * DP * sizeof(bf16) + SWIZZLED_BYTES;
}

template <int BN>
constexpr size_t
hopper_row_bytes() /* behind them, where rows are keys */
{
    return (size_t)4 * BN * sizeof(float);
}

/* BN rows from row `at` on of a tensor of D columns and, behind them, of another of Dv; zeros from row `end` on. */
template <int DP, int BN, int THREADS, class E>
SPW_DEVICE void
load_both(E *tile, const E *a, uint64_t a_stride, int D, const E *b, uint64_t b_stride, int Dv, uint64_t at,
          uint64_t end)
{
    load_swizzled<BN, DP, THREADS>(tile, a + at * a_stride, a_stride, (int64_t)(end - at), D);
    load_swizzled<BN, DP, THREADS>(tile + BN * DP, b + at * b_stride, b_stride, (int64_t)(end - at), Dv);
}

template <class E, int DP, int WG, int BN, int BLOCKS>
__global__ void
__launch_bounds__(WG *WARPGROUP, BLOCKS) attention_forward_hopper_kernel(attention_args<E> g)
{
    const int BM = 64 * WG, THREADS = WG * WARPGROUP, warp = (int)threadIdx.x / 32;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp * 16;
    SPW_DYNAMIC_SHARED(shared);
    E *q_tile = swizzled_tiles<E>(shared), *tiles = q_tile + BM * DP;
    uint64_t q0 = (uint64_t)(gridDim.x - 1 - blockIdx.x) * BM;
    int64_t rows = (int64_t)least((uint64_t)BM, g.T - q0);
    uint64_t before = g.starts != NULL ? (uint64_t)g.starts[b] : 0, p0 = before + q0, keys = p0 + (uint64_t)rows;
    uint64_t kv_row = g.slots != NULL ? (uint64_t)g.slots[b] * g.capacity : (uint64_t)b * g.T;
    uint64_t k0 = g.window > 0 && p0 + 1 > g.window ? (p0 + 1 - g.window) / BN * BN : 0;
    const E *key = g.key + kv_row * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const E *value = g.value + kv_row * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    float o[1][DP / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, scale2 = g.scale * SPW_LOG2E;
    int now = 0;
    auto load = [&](E *tile, uint64_t at) {
        if (at < keys)
            load_both<DP, BN, THREADS>(tile, key, g.kv_stride, g.D, value, g.v_stride, g.Dv, at, keys);
    };
    if (g.begins != NULL)
        k0 = most(k0, (uint64_t)g.begins[(uint64_t)b * g.T + q0] / BN * BN);
    load_swizzled<BM, DP, THREADS>(q_tile, g.q + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head,
                                   g.q_stride, rows, g.D);
    load(tiles, k0);
    copy_commit();
    for (; k0 < keys; k0 += BN, now = 2 * BN * DP - now) {
        float s[1][BN / 8][4];
        copy_wait<0>();
        products_may_read();
        __syncthreads();
        ask_scores<DP, BM, BN>(s[0], q_tile, warp / 4 * 64, tiles + now);
        load(tiles + 2 * BN * DP - now, k0 + BN); /* the other tiles are read: all have come to this round */
        copy_commit();
        products_wait<0>();
        products_end(s[0]);
        if (k0 + BN > p0 + 1 || (g.window > 0 && k0 + g.window < keys)) /* this tile has unread scores */
            hide_unread<false, 1, BN>(s, my_row, (int64_t)(p0 - k0), g.window);
        if (g.begins != NULL)
            hide_others<false, 1, BN>(s, my_row, g.begins + (uint64_t)b * g.T + q0, rows, k0);
        soften<1, DP, BN>(o, s, &max, &sum, scale2);
        ask_weighted<DP, BN>(o[0], s[0], tiles + now + BN * DP);
        products_wait<0>();
        products_end(o[0]);
    }
    store_rows<1, DP>(g, o, &max, &sum, g.scale, my_row, rows, q0, h, b);
}

template <class E, int DP, int WG, int BN, int BLOCKS>
__global__ void
__launch_bounds__(WG *WARPGROUP, BLOCKS) attention_dq_hopper_kernel(attention_args<E> g)
{
    const int BM = 64 * WG, THREADS = WG * WARPGROUP, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int h = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp * 16;
    SPW_DYNAMIC_SHARED(shared);
    E *q_tile = swizzled_tiles<E>(shared), *do_tile = q_tile + BM * DP, *tiles = do_tile + BM * DP;
    uint64_t q0 = (uint64_t)(gridDim.x - 1 - blockIdx.x) * BM, out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    int64_t rows = (int64_t)least((uint64_t)BM, g.T - q0);
    uint64_t keys = q0 + (uint64_t)rows, k0 = g.window > 0 && q0 + 1 > g.window ? (q0 + 1 - g.window) / BN * BN : 0;
    const E *key = g.key + (uint64_t)b * g.T * g.kv_stride + (uint64_t)(h / g.group) * g.k_head;
    const E *value = g.value + (uint64_t)b * g.T * g.v_stride + (uint64_t)(h / g.group) * g.v_head;
    uint64_t stats = ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T + q0;
    float dq[1][DP / 8][4] = {}, lse2[2], delta[2], scale2 = g.scale * SPW_LOG2E;
    int now = 0;
    auto load = [&](E *tile, uint64_t at) {
        if (at < keys)
            load_both<DP, BN, THREADS>(tile, key, g.kv_stride, g.D, value, g.v_stride, g.Dv, at, keys);
    };
    if (g.begins != NULL)
        k0 = most(k0, (uint64_t)g.begins[(uint64_t)b * g.T + q0] / BN * BN);
    load_swizzled<BM, DP, THREADS>(q_tile, g.q + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head,
                                   g.q_stride, rows, g.D);
    load_swizzled<BM, DP, THREADS>(do_tile, g.dout + ((uint64_t)b * g.T + q0) * out_stride + (uint64_t)h * g.Dv,
                                   out_stride, rows, g.Dv);
    load(tiles, k0);
    copy_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = my_row + lane / 4 + 8 * r;
        lse2[r] = row < rows ? g.lse[stats + (uint64_t)row] * SPW_LOG2E : INFINITY;
        delta[r] = row < rows ? g.delta[stats + (uint64_t)row] : 0.0f;
    }
    for (; k0 < keys; k0 += BN, now = 2 * BN * DP - now) {
        float s[1][BN / 8][4], dp[BN / 8][4];
        copy_wait<0>();
        products_may_read();
        __syncthreads();
        ask_scores<DP, BM, BN>(s[0], q_tile, warp / 4 * 64, tiles + now);
        ask_scores<DP, BM, BN>(dp, do_tile, warp / 4 * 64, tiles + now + BN * DP);
        load(tiles + 2 * BN * DP - now, k0 + BN); /* the other tiles are read: all have come to this round */
        copy_commit();
        products_wait<0>();
        products_end(s[0]);
        products_end(dp);
        if (k0 + BN > q0 + 1 || (g.window > 0 && k0 + g.window < keys)) /* this tile has unread scores */
            hide_unread<false, 1, BN>(s, my_row, (int64_t)(q0 - k0), g.window);
        if (g.begins != NULL)
            hide_others<false, 1, BN>(s, my_row, g.begins + (uint64_t)b * g.T + q0, rows, k0);
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[0][n][i] = power_of_2(s[0][n][i] * scale2 - lse2[i / 2]) * (dp[n][i] - delta[i / 2]);
        ask_weighted<DP, BN>(dq[0], s[0], tiles + now);
        products_wait<0>();
        products_end(dq[0]);
    }
    store_gradients<1, DP>(g.dq + ((uint64_t)b * g.T + q0) * g.q_stride + (uint64_t)h * g.q_head, g.q_stride, dq,
                           my_row, rows, g.D, true, g.scale);
}

/* Rows are keys. What a query's row has besides, its lse and delta, lies behind the tiles. DK and DV say what is made: both at once where registers
 * suffice. */
template <class E, int DP, int WG, int BN, int BLOCKS, bool DK, bool DV>
__global__ void
__launch_bounds__(WG *WARPGROUP, BLOCKS) attention_dkv_hopper_kernel(attention_args<E> g)
{
    const int BM = 64 * WG, THREADS = WG * WARPGROUP, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int hk = (int)blockIdx.y, b = (int)blockIdx.z, my_row = warp * 16;
    SPW_DYNAMIC_SHARED(shared);
    E *k_tile = swizzled_tiles<E>(shared), *v_tile = k_tile + BM * DP, *tiles = v_tile + BM * DP;
    float *of_rows = (float *)(void *)(tiles + 4 * BN * DP); /* of two rounds, lse and then delta */
    int now = 0, round = 0;
    uint64_t k0 = (uint64_t)blockIdx.x * BM, out_stride = (uint64_t)g.Hq * (uint64_t)g.Dv;
    int64_t rows = (int64_t)least((uint64_t)BM, g.T - k0);
    uint64_t first = k0 / BN * BN, end = g.window > 0 ? least(g.T, k0 + (uint64_t)rows - 1 + g.window) : g.T;
    uint64_t k_at = ((uint64_t)b * g.T + k0) * g.kv_stride + (uint64_t)hk * g.k_head;
    uint64_t v_at = ((uint64_t)b * g.T + k0) * g.v_stride + (uint64_t)hk * g.v_head;
    float dk[1][DK ? DP / 8 : 1][4] = {}, dv[1][DV ? DP / 8 : 1][4] = {}, scale2 = g.scale * SPW_LOG2E;
    static_assert(2 * BN <= WARPGROUP, "a thread for each lse and delta");
    if (g.ends != NULL)
        end = least(end, (uint64_t)g.ends[(uint64_t)b * g.T + k0 + (uint64_t)rows - 1]);
    load_swizzled<BM, DP, THREADS>(k_tile, g.key + k_at, g.kv_stride, rows, g.D);
    if (DK)
        load_swizzled<BM, DP, THREADS>(v_tile, g.value + v_at, g.v_stride, rows, g.Dv);
    for (int h = hk * g.group; h < (hk + 1) * g.group; h++) {
        const E *q = g.q + (uint64_t)b * g.T * g.q_stride + (uint64_t)h * g.q_head;
        const E *dout = g.dout + (uint64_t)b * g.T * out_stride + (uint64_t)h * (uint64_t)g.Dv;
        uint64_t stats = ((uint64_t)b * (uint64_t)g.Hq + (uint64_t)h) * g.T;
        const float *mine = (threadIdx.x < BN ? g.lse : g.delta) + stats;
        int query = (int)threadIdx.x % BN;
        auto load = [&](E *tile, uint64_t at) {
            if (at < end)
                load_both<DP, BN, THREADS>(tile, q, g.q_stride, g.D, dout, out_stride, g.Dv, at, g.T);
        };
        auto row_value = [&](uint64_t at) {
            uint64_t row = at + (uint64_t)query;
            float x = mine[least(row, g.T - 1)];
            return threadIdx.x < BN ? (row < g.T ? x * SPW_LOG2E : INFINITY) : row < g.T ? x : 0.0f;
        };
        float next_value = row_value(first);
        load(tiles + now, first);
        copy_commit();
        for (uint64_t q0 = first; q0 < end; q0 += BN, now = 2 * BN * DP - now, round ^= 1) {
            const E *q_tile = tiles + now, *do_tile = q_tile + BN * DP;
            const float *lse2 = of_rows + round * 2 * BN, *delta = lse2 + BN;
            float s[1][BN / 8][4], dp[1][BN / 8][4];
            if (threadIdx.x < 2 * BN)
                of_rows[round * 2 * BN + (int)threadIdx.x] = next_value;
            copy_wait<0>();
            products_may_read();
            __syncthreads();
            ask_scores<DP, BM, BN>(s[0], k_tile, warp / 4 * 64, q_tile);
            if constexpr (DK)
                ask_scores<DP, BM, BN>(dp[0], v_tile, warp / 4 * 64, do_tile);
            load(tiles + 2 * BN * DP - now, q0 + BN); /* the other tiles are read: all have come to this round */
            copy_commit();
            next_value = row_value(q0 + BN);
            products_wait<0>();
            products_end(s[0]);
            if constexpr (DK)
                products_end(dp[0]);
            if (q0 < k0 + BM || (g.window > 0 && q0 + BN > k0 + g.window)) /* this tile has unread scores */
                hide_unread<true, 1, BN>(s, my_row, (int64_t)(q0 - k0), g.window);
            if (g.ends != NULL)
                hide_others<true, 1, BN>(s, my_row, g.ends + (uint64_t)b * g.T + k0, rows, q0);
#pragma unroll
            for (int n = 0; n < BN / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int col = 8 * n + lane % 4 * 2 + i % 2;
                    s[0][n][i] = power_of_2(s[0][n][i] * scale2 - lse2[col]);
                    if constexpr (DK)
                        dp[0][n][i] = s[0][n][i] * (dp[0][n][i] - delta[col]);
                }
            if constexpr (DV)
                ask_weighted<DP, BN>(dv[0], s[0], do_tile);
            if constexpr (DK)
                ask_weighted<DP, BN>(dk[0], dp[0], q_tile);
            products_wait<0>();
            products_end(dv[0]);
            products_end(dk[0]);
        }
    }
    if constexpr (DK)
        store_gradients<1, DP>(g.dk + k_at, g.kv_stride, dk, my_row, rows, g.D, true, g.scale);
    if constexpr (DV)
        store_gradients<1, DP>(g.dv + v_at, g.v_stride, dv, my_row, rows, g.Dv, true, 1.0f);
}

#endif
