/*
 * Products by a warpgroup, four warps in a row, as Hopper (sm_90a) has them: wgmma, asynchronous, whose right factor and, if wanted, left factor lie
 * in shared memory. A warp owns 16 of 64 rows, and its lanes hold of them what they hold of an mma's (mma.cuh), so what is done to scores
 * in between is the same. Each function has its C twin for the emulation, where a product is done when it is asked for. Source: PTX manual,
 * asynchronous warpgroup level matrix instructions.
 *
 * Tiles: rows of 64 elements, 128 bytes, one behind the other; a tile of more columns is two or four of them. The 16 bytes at column 8 c of row r lie
 * at place c ^ r % 8 of the row, in which order the hardware reads without conflicts of banks. Tiles begin at multiples of 1024 bytes.
 */
#ifndef SPW_CUDA_WGMMA_CUH
#define SPW_CUDA_WGMMA_CUH

#include "mma.cuh"

enum { WARPGROUP = 128, SWIZZLED_ROW = 64, SWIZZLED_BYTES = 1024 };

/* The first place where a tile may begin: up to SWIZZLED_BYTES from where shared memory does. */
template <class E>
SPW_DEVICE E *
swizzled_tiles(unsigned char *shared)
{
#ifdef SPW_EMULATED
    uintptr_t at = (uintptr_t)shared;
#else
    uintptr_t at = (uintptr_t)__cvta_generic_to_shared(shared);
#endif
    return (E *)(void *)(shared + (SWIZZLED_BYTES - at % SWIZZLED_BYTES) % SWIZZLED_BYTES);
}

/* Where the element of a tile of ROWS rows lies. */
template <int ROWS>
SPW_DEVICE int
swizzled(int row, int col)
{
    return col / SWIZZLED_ROW * (ROWS * SWIZZLED_ROW) + row * SWIZZLED_ROW +
           ((col % SWIZZLED_ROW / 8) ^ (row % 8)) * 8 + col % 8;
}

/* As load_tile() of mma.cuh with wide: COLS is 64, 128 or 256, and D a multiple of 8. */
template <int ROWS, int COLS, int THREADS, class E>
SPW_DEVICE void
load_swizzled(E *tile, const E *src, uint64_t stride, int64_t valid, int D)
{
    const int eights = COLS / 8, step = THREADS / eights;
    static_assert(step % 8 == 0 && ROWS % step == 0, "a thread stays in its place of a row");
    int row = (int)threadIdx.x / eights, col = (int)threadIdx.x % eights * 8;
    int left = col < D ? (int)least(valid, (int64_t)ROWS) - row : 0;
    E *to = tile + swizzled<ROWS>(row, col);
    const E *from = src + (uint64_t)row * stride + col;
#pragma unroll
    for (int i = 0; i < ROWS; i += step, from += step * stride)
        copy16(to + i * SWIZZLED_ROW, from, i < left);
}

/* The thread's copies that have arrived are there for products as well. */
SPW_DEVICE void
products_may_read(void)
{
#ifdef SPW_EMULATED
    emulate::races::fence();
#elif defined __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Before the first product after registers of it were written. */
SPW_DEVICE void
products_begin(void)
{
#if defined __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

SPW_DEVICE void
products_commit(void)
{
#ifdef SPW_EMULATED
    emulate::product_commit();
#elif defined __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* All products but the last LEFT that were committed are done. The compiler doesn't know that registers change meanwhile: products_end() of
 * each array of sums comes behind. */
template <int LEFT>
SPW_DEVICE void
products_wait(void)
{
#ifdef SPW_EMULATED
    emulate::product_wait(LEFT);
#elif defined __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

#ifdef SPW_EMULATED
/* Of a product that is asked for. */
template <class E>
void
product_reads(const E *from, int elements)
{
    emulate::product_reads(from, (size_t)elements * sizeof *from);
}
#endif

template <int N>
SPW_DEVICE void
products_end(float (&c)[N][4])
{
#if defined __CUDA_ARCH_FEAT_SM90_ALL
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("" : "+f"(c[n][i])::"memory");
#else
    (void)c;
#endif
}

#if defined __CUDA_ARCH_FEAT_SM90_ALL

/* Of 16 bytes: where it begins, from one 64 columns to the next where columns are what is not summed over, and from eight rows to the next. */
SPW_DEVICE uint64_t
descriptor(const void *at, unsigned columns_apart)
{
    uint64_t where = (unsigned)__cvta_generic_to_shared(at);
    return (where & 0x3ffff) >> 4 | (uint64_t)columns_apart << 16 | (uint64_t)(SWIZZLED_BYTES / 16) << 32 |
           (uint64_t)1 << 62;
}

#define SPW_C4(n)  "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SPW_C16(n) SPW_C4(n), SPW_C4(n + 1), SPW_C4(n + 2), SPW_C4(n + 3)
#define SPW_R16    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SPW_R32    SPW_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPW_R64                                                                                                        \
    SPW_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "   \
            "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SPW_WGMMA(n, type) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {"
/* Both factors in shared memory. */
#define SPW_SS(n, type, regs, left, right, on, left_columns, right_columns, ...)                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " on ", 0;\n" SPW_WGMMA(n, type) regs                               \
                 "}, " left ", " right ", p, 1, 1, " left_columns ", " right_columns ";\n}\n"                          \
                 : __VA_ARGS__                                                                                         \
                 : "l"(of_a), "l"(of_b), "r"((int)add), "n"((int)A_COLUMNS), "n"((int)B_COLUMNS))
/* The left one in registers, columns of the right one. */
#define SPW_RS(n, type, regs, left, right, ...)                                                                        \
    asm volatile(SPW_WGMMA(n, type) regs "}, {" left "}, " right ", 1, 1, 1, 1;\n"                                     \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(of_b))

/* c (+)= A B^T; A_COLUMNS, B_COLUMNS: rows of its tile are the depth. */
template <bool A_COLUMNS, bool B_COLUMNS, class E, int N>
SPW_DEVICE void
multiply(float (&c)[N][4], uint64_t of_a, uint64_t of_b, bool add)
{
    static_assert(N == 4 || N == 8 || N == 16, "32, 64 or 128 columns");
    if constexpr (N == 4 && is_bf16<E>)
        SPW_SS("32", "bf16", SPW_R16, "%16", "%17", "%18", "%19", "%20", SPW_C16(0));
    else if constexpr (N == 4)
        SPW_SS("32", "f16", SPW_R16, "%16", "%17", "%18", "%19", "%20", SPW_C16(0));
    else if constexpr (N == 8 && is_bf16<E>)
        SPW_SS("64", "bf16", SPW_R32, "%32", "%33", "%34", "%35", "%36", SPW_C16(0), SPW_C16(4));
    else if constexpr (N == 8)
        SPW_SS("64", "f16", SPW_R32, "%32", "%33", "%34", "%35", "%36", SPW_C16(0), SPW_C16(4));
    else if constexpr (is_bf16<E>)
        SPW_SS("128", "bf16", SPW_R64, "%64", "%65", "%66", "%67", "%68", SPW_C16(0), SPW_C16(4), SPW_C16(8),
               SPW_C16(12));
    else
        SPW_SS("128", "f16", SPW_R64, "%64", "%65", "%66", "%67", "%68", SPW_C16(0), SPW_C16(4), SPW_C16(8),
               SPW_C16(12));
}

template <class E, int N>
SPW_DEVICE void
multiply_columns(float (&c)[N][4], const unsigned (&a)[4], uint64_t of_b)
{
    static_assert(N == 8 || N == 16, "64 or 128 columns");
    if constexpr (N == 8 && is_bf16<E>)
        SPW_RS("64", "bf16", SPW_R32, "%32, %33, %34, %35", "%36", SPW_C16(0), SPW_C16(4));
    else if constexpr (N == 8)
        SPW_RS("64", "f16", SPW_R32, "%32, %33, %34, %35", "%36", SPW_C16(0), SPW_C16(4));
    else if constexpr (is_bf16<E>)
        SPW_RS("128", "bf16", SPW_R64, "%64, %65, %66, %67", "%68", SPW_C16(0), SPW_C16(4), SPW_C16(8), SPW_C16(12));
    else
        SPW_RS("128", "f16", SPW_R64, "%64, %65, %66, %67", "%68", SPW_C16(0), SPW_C16(4), SPW_C16(8), SPW_C16(12));
}
#endif

/*
 * s = A B^T, asked for and committed: A the warpgroup's 64 rows, which begin at my_rows of a tile of A_ROWS, B the BN rows of another, both of
 * DP columns.
 */
template <int DP, int A_ROWS, int BN, class E>
SPW_DEVICE void
ask_scores(float (&s)[BN / 8][4], const E *a_tile, int my_rows, const E *b_tile)
{
#ifdef SPW_EMULATED
    int lane = (int)threadIdx.x % 32, row = my_rows + (int)threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
    for (int d = 0; d < DP; d += SWIZZLED_ROW)
        product_reads(a_tile + d * A_ROWS + my_rows * SWIZZLED_ROW, 64 * SWIZZLED_ROW);
    product_reads(b_tile, BN * DP);
    emulate::races::hidden told;
    for (int n = 0; n < BN / 8; n++)
        for (int i = 0; i < 4; i++) {
            float sum = 0;
            for (int d = 0; d < DP; d++)
                sum += widen(a_tile[swizzled<A_ROWS>(row + i / 2 * 8, d)]) *
                       widen(b_tile[swizzled<BN>(8 * n + lane % 4 * 2 + i % 2, d)]);
            s[n][i] = sum;
        }
    products_commit();
#elif defined __CUDA_ARCH_FEAT_SM90_ALL
    products_begin();
#pragma unroll
    for (int d = 0; d < DP; d += 16)
        multiply<false, false, E>(
            s,
            descriptor(a_tile + d / SWIZZLED_ROW * (A_ROWS * SWIZZLED_ROW) + my_rows * SWIZZLED_ROW + d % SWIZZLED_ROW,
                       1),
            descriptor(b_tile + d / SWIZZLED_ROW * (BN * SWIZZLED_ROW) + d % SWIZZLED_ROW, 1), d > 0);
    products_commit();
#else
    (void)s, (void)a_tile, (void)my_rows, (void)b_tile;
#endif
}

/*
 * sums += A B, asked for and committed, along a depth of SWIZZLED_ROW: A the warpgroup's 64 rows of A_LINES, from my_line on, B 8 N columns, which
 * are all of its tile. A tile's rows are a factor's lines, or the depth, for B too: B (N, depth) or with B_COLUMNS (depth, N).
 */
template <bool A_COLUMNS, bool B_COLUMNS, int A_LINES, class E, int N>
SPW_DEVICE void
ask_products(float (&sums)[N][4], const E *a_tile, int my_line, const E *b_tile)
{
#ifdef SPW_EMULATED
    int lane = (int)threadIdx.x % 32, row = my_line + (int)threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
    product_reads(a_tile + my_line * SWIZZLED_ROW, 64 * SWIZZLED_ROW);
    product_reads(b_tile, 8 * N * SWIZZLED_ROW);
    emulate::races::hidden told;
    for (int n = 0; n < N; n++)
        for (int i = 0; i < 4; i++)
            for (int d = 0; d < SWIZZLED_ROW; d++) {
                int m = row + i / 2 * 8, col = 8 * n + lane % 4 * 2 + i % 2;
                sums[n][i] += widen(a_tile[A_COLUMNS ? swizzled<SWIZZLED_ROW>(d, m) : swizzled<A_LINES>(m, d)]) *
                              widen(b_tile[B_COLUMNS ? swizzled<SWIZZLED_ROW>(d, col) : swizzled<8 * N>(col, d)]);
            }
    products_commit();
#elif defined __CUDA_ARCH_FEAT_SM90_ALL
    const unsigned apart = SWIZZLED_ROW * SWIZZLED_ROW * 2 / 16; /* of 64 columns from the next */
    products_begin();
#pragma unroll
    for (int d = 0; d < SWIZZLED_ROW; d += 16)
        multiply<A_COLUMNS, B_COLUMNS, E>(
            sums, descriptor(a_tile + my_line * SWIZZLED_ROW + d * (A_COLUMNS ? SWIZZLED_ROW : 1), apart),
            descriptor(b_tile + d * (B_COLUMNS ? SWIZZLED_ROW : 1), apart), true);
    products_commit();
#else
    (void)sums, (void)a_tile, (void)my_line, (void)b_tile;
#endif
}

/* sums += s B, asked for and committed, B the BN rows of a tile of DP columns. */
template <int DP, int BN, class E>
SPW_DEVICE void
ask_weighted(float (&sums)[DP / 8][4], const float (&s)[BN / 8][4], const E *b_tile)
{
    unsigned a[BN / 16][4];
#pragma unroll
    for (int n = 0; n < BN; n += 16)
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[n / 16][i] = pack<E>(s[n / 8 + i / 2][i % 2 * 2], s[n / 8 + i / 2][i % 2 * 2 + 1]);
#ifdef SPW_EMULATED
    int lane = (int)threadIdx.x % 32;
    product_reads(b_tile, BN * DP);
    for (int n = 0; n < BN; n += 16) {
        const unsigned char *slots = emulate::gather(a[n / 16]);
        emulate::races::hidden told;
        for (int t = 0; t < 4; t++) {
            unsigned theirs[4];
            memcpy(theirs, slots + (lane / 4 * 4 + t) * emulate::SLOT_BYTES, sizeof theirs);
            for (int i = 0; i < 4; i++) {
                float pair[2];
                unpack<E>(pair, theirs[i]);
                for (int k = 0; k < 2; k++)
                    for (int d = 0; d < DP / 8; d++)
                        for (int j = 0; j < 2; j++)
                            sums[d][i % 2 * 2 + j] +=
                                pair[k] *
                                widen(b_tile[swizzled<BN>(n + i / 2 * 8 + 2 * t + k, 8 * d + lane % 4 * 2 + j)]);
            }
        }
    }
    products_commit();
#elif defined __CUDA_ARCH_FEAT_SM90_ALL
    const int once = DP < 128 ? DP : 128;              /* columns of one product */
    const unsigned apart = BN * SWIZZLED_ROW * 2 / 16; /* of 64 columns from the next */
    products_begin();
#pragma unroll
    for (int d = 0; d < DP; d += once)
#pragma unroll
        for (int n = 0; n < BN; n += 16)
            multiply_columns<E>(*(float(*)[once / 8][4]) & sums[d / 8], a[n / 16],
                                descriptor(b_tile + d * BN + n * SWIZZLED_ROW, apart));
    products_commit();
#else
    (void)sums, (void)a, (void)b_tile;
#endif
}

#endif
