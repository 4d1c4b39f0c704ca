/*
 * each.cuh with a Hopper's products (wgmma.cuh): the same tiles of the same experts, where all begin at multiples of 16 bytes. A warpgroup has 64
 * rows of a tile and all of its columns; products of a stage are under way while the next ones are loaded.
 */
#ifndef SPW_CUDA_EACH_HOPPER_CUH
#define SPW_CUDA_EACH_HOPPER_CUH

#include "each.cuh"
#include "wgmma.cuh"

enum { HOPPER_STAGES = 3 };

template <int BM>
constexpr size_t
each_hopper_shared_bytes()
{
    return (size_t)HOPPER_STAGES * (BM + EACH_COLS) * EACH_DEPTH * sizeof(bf16) + SWIZZLED_BYTES;
}

/* DEPTH of a factor from depth k on, swizzled; as load_factor(). */
template <int LINES, bool ROWS, int THREADS, class E>
SPW_DEVICE void
load_swizzled_factor(E *tile, const each_factor<E> &f, uint64_t k, uint64_t depth)
{
    const int left = (int)least(depth - k, (uint64_t)EACH_DEPTH);
    if (ROWS)
        load_swizzled<LINES, EACH_DEPTH, THREADS>(tile, f.at + k, f.stride, f.lines, left);
    else
        load_swizzled<EACH_DEPTH, LINES, THREADS>(tile, f.at + k * f.stride, f.stride, left,
                                                  (int)least(f.lines, (int64_t)LINES));
}

template <class E, int BM, bool OF_ROWS, bool B_ROWS>
__global__ void
__launch_bounds__(BM * 2, 2) each_hopper_kernel(const __grid_constant__ each_args<E> g)
{
    const int THREADS = BM * 2, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, my_row = warp * 16;
    const int of_a = BM * EACH_DEPTH, stage = of_a + EACH_COLS * EACH_DEPTH;
    static_assert((int)EACH_DEPTH == (int)SWIZZLED_ROW, "a stage is a row of a tile");
    SPW_DYNAMIC_SHARED(shared);
    E *stages = swizzled_tiles<E>(shared);
    const each_tile<E> t = find_tile<BM, OF_ROWS, B_ROWS>(g);
    float sums[EACH_COLS / 8][4] = {};
    auto load = [&](uint64_t step) {
        E *tile = stages + (int)(step % HOPPER_STAGES) * stage;
        if (step < t.steps) {
            load_swizzled_factor<BM, OF_ROWS, THREADS>(tile, t.a, step * EACH_DEPTH, t.depth);
            load_swizzled_factor<EACH_COLS, B_ROWS, THREADS>(tile + of_a, t.b, step * EACH_DEPTH, t.depth);
        }
        copy_commit();
    };
#pragma unroll
    for (int s = 0; s < HOPPER_STAGES - 1; s++)
        load((uint64_t)s);
    for (uint64_t step = 0; step < t.steps; step++) {
        const E *tile = stages + (int)(step % HOPPER_STAGES) * stage;
        copy_wait<HOPPER_STAGES - 2>();
        products_may_read();
        products_wait<0>(); /* of the step before, whose stage is loaded next */
        __syncthreads();
        ask_products<!OF_ROWS, !B_ROWS, BM>(sums, tile, warp / 4 * 64, tile + of_a);
        load(step + HOPPER_STAGES - 1);
    }
    products_wait<0>();
    products_end(sums);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint64_t row = t.m0 + (uint64_t)(my_row + lane / 4 + 8 * r);
        if (row >= t.M)
            continue;
#pragma unroll
        for (int n = 0; n < EACH_COLS / 8; n++) {
            const uint64_t col = t.n0 + (uint64_t)(8 * n + lane % 4 * 2);
            if (OF_ROWS)
                store_each<true>(g, *t.x, row, col, sums[n][2 * r], sums[n][2 * r + 1]);
            else
                store_gradient<true>(g, *t.x, row, col, sums[n][2 * r], sums[n][2 * r + 1]);
        }
    }
}

#endif
