/*
 * Products of many experts in one launch, on tensor cores: bf16 or fp16 in, fp32 sums. An expert alone has too few rows to fill a GPU, and its
 * number of rows is another one each time. A block computes one tile of one expert's result; which, it finds among the ends of the
 * experts' tiles. Tiles of the factors, DEPTH of the depth each, travel through a ring of STAGES in shared memory, and a warp takes
 * fragments of them. Sums go along the depth in steps of 16, whatever the tiles are: an element's bits hang on its row and column of the
 * factors alone. Tiles of a result that share columns come one after another, so that what they read of the weights is in the cache.
 */
#ifndef SPW_CUDA_EACH_CUH
#define SPW_CUDA_EACH_CUH

#include "mma.cuh"

enum { EACH_THREADS = 256, EACH_COLS = 128, EACH_DEPTH = 64, EACH_STAGES = 2, EACH_EXPERTS = 64 };

/* One expert. Of rows: they begin at `first`, and weights are B; of a gradient: they are the depth, and weights are C. */
struct each_expert {
    const void *w;
    const void *bias; /* (N), of rows alone; NULL: none */
    uint64_t first;
    uint32_t rows, tile_end; /* tile_end: where its tiles end, and the next one's begin */
    bool set;                /* of a gradient: written, not added to */
};

/*
 * OF_ROWS: C (rows, N) = A (rows, K) B + bias, A and C from row `first` on; B (K, N), or (N, K) with B_ROWS.
 * Else a gradient: C (M, N) fp32 = A^T B, A (rows, M) and B (rows, N) from row `first` on.
 */
template <class E> struct each_args {
    const E *A, *B;
    E *C;
    uint64_t M, N, K;
    bool add; /* of rows: to what C has */
    uint32_t count;
    each_expert experts[EACH_EXPERTS];
};

/* Elements of a stage: of A, and of both. Rows of tiles begin in other banks. */
template <int BM, bool OF_ROWS, bool B_ROWS> struct each_stage {
    static const int A = OF_ROWS ? BM * (EACH_DEPTH + 8) : EACH_DEPTH * (BM + 8);
    static const int ALL = A + (B_ROWS ? EACH_COLS * (EACH_DEPTH + 8) : EACH_DEPTH * (EACH_COLS + 8));
};

template <int BM, bool OF_ROWS, bool B_ROWS>
constexpr size_t
each_shared_bytes()
{
    return (size_t)EACH_STAGES * each_stage<BM, OF_ROWS, B_ROWS>::ALL * sizeof(bf16);
}

/* Where it begins, and how much of it there is, for one tile. */
template <class E> struct each_factor {
    const E *at;
    uint64_t stride;
    int64_t lines; /* rows, or of a factor that lies along the depth columns, from the tile on */
};

/* A block's tile of an expert's result: from row m0 and column n0 on of M rows, of a depth that takes so many steps. */
template <class E> struct each_tile {
    const each_expert *x;
    uint64_t M, depth, m0, n0, steps;
    each_factor<E> a, b;
};

template <int BM, bool OF_ROWS, bool B_ROWS, class E>
SPW_DEVICE each_tile<E>
find_tile(const each_args<E> &g)
{
    each_tile<E> t;
    uint64_t downs;
    uint32_t i = 0, tile;
    while (blockIdx.x >= g.experts[i].tile_end)
        i++;
    const each_expert &x = g.experts[i];
    t.x = &x;
    t.M = OF_ROWS ? x.rows : g.M;
    t.depth = OF_ROWS ? g.K : x.rows;
    t.steps = (t.depth + EACH_DEPTH - 1) / EACH_DEPTH;
    downs = (t.M + BM - 1) / BM;
    tile = blockIdx.x - (i > 0 ? g.experts[i - 1].tile_end : 0);
    t.m0 = tile % downs * BM;
    t.n0 = tile / downs * EACH_COLS;
    if (OF_ROWS) {
        t.a = each_factor<E>{g.A + (x.first + t.m0) * g.K, g.K, (int64_t)(t.M - t.m0)};
        t.b = each_factor<E>{(const E *)x.w + t.n0 * (B_ROWS ? g.K : 1), B_ROWS ? g.K : g.N, (int64_t)(g.N - t.n0)};
    } else {
        t.a = each_factor<E>{g.A + x.first * g.M + t.m0, g.M, (int64_t)(t.M - t.m0)};
        t.b = each_factor<E>{g.B + x.first * g.N + t.n0, g.N, (int64_t)(g.N - t.n0)};
    }
    return t;
}

/* DEPTH of a factor from depth k on: rows of the tile are rows of the factor, or the depth. */
template <int LINES, bool ROWS, bool WIDE, class E>
SPW_DEVICE void
load_factor(E *tile, const each_factor<E> &f, uint64_t k, uint64_t depth)
{
    const int left = (int)least(depth - k, (uint64_t)EACH_DEPTH);
    if (ROWS)
        load_columns<LINES, EACH_DEPTH, EACH_DEPTH + 8, EACH_THREADS>(tile, f.at + k, f.stride, f.lines, left, WIDE);
    else
        load_columns<EACH_DEPTH, LINES, LINES + 8, EACH_THREADS>(tile, f.at + k * f.stride, f.stride, left,
                                                                 (int)least(f.lines, (int64_t)LINES), WIDE);
}

template <class E>
SPW_DEVICE void
add_pair(float *v, const E *at, int col, int N)
{
    v[0] += col < N ? widen(at[col]) : 0.0f;
    v[1] += col + 1 < N ? widen(at[col + 1]) : 0.0f;
}

/* Two neighbours of a row of C. */
template <bool WIDE, class E>
SPW_DEVICE void
store_each(const each_args<E> &g, const each_expert &x, uint64_t row, uint64_t col, float lo, float hi)
{
    E *at = g.C + (x.first + row) * g.N;
    float v[2] = {lo, hi};
    if (x.bias != NULL)
        add_pair(v, (const E *)x.bias, (int)col, (int)g.N);
    if (g.add)
        add_pair(v, at, (int)col, (int)g.N);
    store_pair(at, (int)col, (int)g.N, WIDE, v[0], v[1]);
}

template <bool WIDE, class E>
SPW_DEVICE void
store_gradient(const each_args<E> &g, const each_expert &x, uint64_t row, uint64_t col, float lo, float hi)
{
    float *at = (float *)(uintptr_t)x.w + row * g.N + col;
    if (WIDE && col + 1 < g.N) {
        float2 v = x.set ? float2{0.0f, 0.0f} : *(const float2 *)at;
        SPW_NEED_ALIGNED(at, 8);
        *(float2 *)at = float2{v.x + lo, v.y + hi};
        return;
    }
    if (col < g.N)
        at[0] = (x.set ? 0.0f : at[0]) + lo;
    if (col + 1 < g.N)
        at[1] = (x.set ? 0.0f : at[1]) + hi;
}

/* WIDE: all begin at multiples of 16 bytes, and so do their rows. */
template <class E, int BM, bool OF_ROWS, bool B_ROWS, bool WIDE>
__global__ void
__launch_bounds__(EACH_THREADS, 2) each_kernel(const __grid_constant__ each_args<E> g)
{
    const int MT = BM / 32; /* sixteens of a warp's rows; warps are 2 by 4, and take 32 columns each */
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int my_row = warp / 4 * (BM / 2), my_col = warp % 4 * 32;
    const int a_ld = OF_ROWS ? EACH_DEPTH + 8 : BM + 8, b_ld = B_ROWS ? EACH_DEPTH + 8 : EACH_COLS + 8;
    typedef each_stage<BM, OF_ROWS, B_ROWS> stage;
    SPW_DYNAMIC_SHARED(shared);
    E *stages = (E *)shared;
    const each_tile<E> t = find_tile<BM, OF_ROWS, B_ROWS>(g);
    float sums[MT][4][4] = {};

#pragma unroll
    for (int s = 0; s < EACH_STAGES - 1; s++) {
        E *at = stages + s * stage::ALL;
        if ((uint64_t)s < t.steps) {
            load_factor<BM, OF_ROWS, WIDE>(at, t.a, (uint64_t)s * EACH_DEPTH, t.depth);
            load_factor<EACH_COLS, B_ROWS, WIDE>(at + stage::A, t.b, (uint64_t)s * EACH_DEPTH, t.depth);
        }
        copy_commit();
    }
    for (uint64_t step = 0; step < t.steps; step++) {
        const uint64_t ahead = step + EACH_STAGES - 1;
        const E *a_tile = stages + (int)(step % EACH_STAGES) * stage::ALL;
        const E *b_tile = a_tile + stage::A;
        copy_wait<EACH_STAGES - 2>(); /* this stage is here, and nobody reads the one before any more */
        __syncthreads();
        if (ahead < t.steps) {
            E *at = stages + (int)(ahead % EACH_STAGES) * stage::ALL;
            load_factor<BM, OF_ROWS, WIDE>(at, t.a, ahead * EACH_DEPTH, t.depth);
            load_factor<EACH_COLS, B_ROWS, WIDE>(at + stage::A, t.b, ahead * EACH_DEPTH, t.depth);
        }
        copy_commit();
#pragma unroll
        for (int k = 0; k < EACH_DEPTH; k += 16) {
            unsigned fa[MT][4], fb[2][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                if (OF_ROWS)
                    load_a(fa[m], a_tile, a_ld, my_row + 16 * m, k);
                else
                    load_a_columns(fa[m], a_tile, a_ld, k, my_row + 16 * m);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (B_ROWS)
                    load_b_rows(fb[n], b_tile, b_ld, my_col + 16 * n, k);
                else
                    load_b_columns(fb[n], b_tile, b_ld, k, my_col + 16 * n);
            }
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    mma<E>(sums[m][n], fa[m], fb[n / 2][n % 2 * 2], fb[n / 2][n % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint64_t row = t.m0 + (uint64_t)(my_row + 16 * m + lane / 4 + 8 * r);
            if (row >= t.M)
                continue;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint64_t col = t.n0 + (uint64_t)(my_col + 8 * n + lane % 4 * 2);
                if (OF_ROWS)
                    store_each<WIDE>(g, *t.x, row, col, sums[m][n][2 * r], sums[m][n][2 * r + 1]);
                else
                    store_gradient<WIDE>(g, *t.x, row, col, sums[m][n][2 * r], sums[m][n][2 * r + 1]);
            }
        }
}

#endif
