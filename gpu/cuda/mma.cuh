/*
 * A warp's tensor core instructions as functions: 16x8x16 products of bf16 or f16 (E) with fp32 sums, loads of 8x8 matrices from shared
 * memory, asynchronous copies into it. Each has its C twin for the emulation, written from the same tables of the PTX manual
 * (warp-level matrix instructions). With g = lane / 4 and t = lane % 4, a thread holds
 *
 *   A (16 x 16)  a[0] (g, 2t..2t+1)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)
 *   B (16 x 8)   b[0] (2t..2t+1, g)  b[1] (2t+8.., g)
 *   C (16 x 8)   c[0], c[1] (g, 2t..2t+1)   c[2], c[3] (g+8, 2t..)
 */
#ifndef SPW_CUDA_MMA_CUH
#define SPW_CUDA_MMA_CUH

#include "common.cuh"

#ifdef SPW_EMULATED
/* From each lane's a and b to its four elements of A B, in the slot's second half; sums go over the depth in order. */
enum { MMA_RESULT = emulate::SLOT_BYTES / 2 };
template <class E>
void
multiply(unsigned char *slots)
{
    typedef float row_of_8 __attribute__((vector_size(32)));
    alignas(32) float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        unsigned mine[6];
        int g = lane / 4, t = lane % 4;
        memcpy(mine, slots + lane * emulate::SLOT_BYTES, sizeof mine);
        for (int i = 0; i < 4; i++)
            unpack<E>(&a[g + i % 2 * 8][2 * t + i / 2 * 8], mine[i]);
        for (int i = 0; i < 2; i++) {
            float pair[2];
            unpack<E>(pair, mine[4 + i]);
            b[2 * t + 8 * i][g] = pair[0];
            b[2 * t + 8 * i + 1][g] = pair[1];
        }
    }
    for (int row = 0; row < 16; row++) {
        row_of_8 sum = {};
        for (int k = 0; k < 16; k++)
            sum += a[row][k] * *(const row_of_8 *)b[k];
        *(row_of_8 *)c[row] = sum;
    }
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, t = lane % 4;
        memcpy(slots + lane * emulate::SLOT_BYTES + MMA_RESULT, &c[g][2 * t], 2 * sizeof(float));
        memcpy(slots + lane * emulate::SLOT_BYTES + MMA_RESULT + 2 * sizeof(float), &c[g + 8][2 * t],
               2 * sizeof(float));
    }
}
#endif

/* C += A B. */
template <class E>
SPW_DEVICE void
mma(float *c, const unsigned *a, unsigned b0, unsigned b1)
{
#ifdef SPW_EMULATED
    unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const unsigned char *slots = emulate::gather(mine, multiply<E>);
    float sums[4];
    memcpy(sums, slots + emulate::lane() * emulate::SLOT_BYTES + MMA_RESULT, sizeof sums);
    for (int i = 0; i < 4; i++)
        c[i] += sums[i];
#else
#define SPW_MMA(type)                                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "          \
                 "{%8,%9}, {%0,%1,%2,%3};"                                                                             \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (is_bf16<E>)
        SPW_MMA("bf16");
    else
        SPW_MMA("f16");
#undef SPW_MMA
#endif
}

/*
 * Four 8x8 matrices; lane l names row l % 8 of matrix l / 8. r[i] is (g, 2t..2t+1) of matrix i, with trans (2t..2t+1, g).
 */
template <bool TRANS, class E>
SPW_DEVICE void
load_matrices(unsigned *r, const E *row)
{
#ifdef SPW_EMULATED
    emulate::need_aligned(row, 16);
    const unsigned char *slots = emulate::gather(row);
    int lane = emulate::lane(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
        const E *lo, *hi;
        memcpy(&lo, slots + (8 * i + (TRANS ? 2 * t : g)) * emulate::SLOT_BYTES, sizeof lo);
        memcpy(&hi, slots + (8 * i + (TRANS ? 2 * t + 1 : g)) * emulate::SLOT_BYTES, sizeof hi);
        r[i] = (unsigned)lo[TRANS ? g : 2 * t].bits | (unsigned)hi[TRANS ? g : 2 * t + 1].bits << 16;
    }
#else
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at)
                     : "memory");
#endif
}

/* 16 bytes into shared memory, there after copy_wait(); zeros when not valid: src is not read and may lie anywhere. */
template <class E>
SPW_DEVICE void
copy16(E *dst, const E *src, bool valid)
{
#ifdef SPW_EMULATED
    emulate::copy_later(dst, src, valid ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(dst)),
                 "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

SPW_DEVICE void
copy_commit(void)
{
#ifdef SPW_EMULATED
    emulate::copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* All of the thread's groups but the last LEFT have arrived. */
template <int LEFT>
SPW_DEVICE void
copy_wait(void)
{
#ifdef SPW_EMULATED
    emulate::copy_wait(LEFT);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

/* ---------------------------------------------------------------- fragments of tiles in shared memory */

/* A = tile rows [row, row + 16), columns [col, col + 16); ld in elements. */
template <class E>
SPW_DEVICE void
load_a(unsigned *a, const E *tile, int ld, int row, int col)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<false>(a, tile + (row + lane % 16) * ld + col + lane / 16 * 8);
}

/* A = the transpose of tile rows [row, row + 16), columns [col, col + 16): its depth is the tile's rows. */
template <class E>
SPW_DEVICE void
load_a_columns(unsigned *a, const E *tile, int ld, int row, int col)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<true>(a, tile + (row + lane / 16 * 8 + lane % 8) * ld + col + lane / 8 % 2 * 8);
}

/* Two B's whose columns are rows [row, row + 16) of the tile, and whose depth is its columns [col, col + 16): b[0], b[1] the
 * first eight, b[2], b[3] the others. For products with the tile transposed. */
template <class E>
SPW_DEVICE void
load_b_rows(unsigned *b, const E *tile, int ld, int row, int col)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<false>(b, tile + (row + lane / 16 * 8 + lane % 8) * ld + col + lane / 8 % 2 * 8);
}

/* Two B's whose depth is rows [row, row + 16) of the tile, and whose columns are its columns [col, col + 16). */
template <class E>
SPW_DEVICE void
load_b_columns(unsigned *b, const E *tile, int ld, int row, int col)
{
    int lane = (int)threadIdx.x % 32;
    load_matrices<true>(b, tile + (row + lane % 16) * ld + col + lane / 16 * 8);
}

/*
 * ROWS rows of D elements, at src + row * stride, into COLS columns of a tile of leading dimension LD, by a block of THREADS; zeros beyond
 * `valid` rows and beyond D. wide: 16 bytes at a time and asynchronous, else one by one.
 */
template <int ROWS, int COLS, int LD, int THREADS, class E>
SPW_DEVICE void
load_columns(E *tile, const E *src, uint64_t stride, int64_t valid, int D, bool wide)
{
    const int eights = COLS / 8, step = THREADS / eights;
    static_assert(THREADS % eights == 0 && ROWS % step == 0, "a thread stays in its columns");
    int row = (int)threadIdx.x / eights, col = (int)threadIdx.x % eights * 8;
    int left = (int)least(valid, (int64_t)ROWS) - row;
    E *to = tile + row * LD + col;
    const E *from = src + (uint64_t)row * stride + col;
    if (wide) {
        left = col < D ? left : 0;
#pragma unroll
        for (int i = 0; i < ROWS; i += step, from += step * stride)
            copy16(to + i * LD, from, i < left);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < ROWS; i += step, from += step * stride)
#pragma unroll
        for (int j = 0; j < 8; j++)
            to[i * LD + j].bits = i < left && col + j < D ? from[j].bits : 0;
}

/* A whole tile of DP columns; its leading dimension DP + 8 makes rows begin in other banks. */
template <int ROWS, int DP, int THREADS, class E>
SPW_DEVICE void
load_tile(E *tile, const E *src, uint64_t stride, int64_t valid, int D, bool wide)
{
    if constexpr (DP == 192) { /* two parts with a whole number of threads per row each */
        load_columns<ROWS, 128, DP + 8, THREADS>(tile, src, stride, valid, D, wide);
        load_columns<ROWS, 64, DP + 8, THREADS>(tile + 128, src + 128, stride, valid, D - 128, wide);
    } else {
        load_columns<ROWS, DP, DP + 8, THREADS>(tile, src, stride, valid, D, wide);
    }
}

/* Columns col and col + 1 of a row of D elements; paired: the row begins at a multiple of 4 bytes. */
template <class E>
SPW_DEVICE void
store_pair(E *at, int col, int D, bool paired, float lo, float hi)
{
    if (paired && col + 1 < D) {
        SPW_NEED_ALIGNED(at + col, 4);
        *(unsigned *)(at + col) = pack<E>(lo, hi);
        return;
    }
    if (col < D)
        narrow(at + col, lo);
    if (col + 1 < D)
        narrow(at + col + 1, hi);
}

#endif
