/*
 * What the race detector must find, and what it must not: small kernels with one fault each beside the same without it. tests/test_races.sh runs
 * them.
 */
#include "cuda_internal.h"
#include "wgmma.cuh"
#include <functional>

enum { THREADS = 128 };

/* Each writes its own, and reads its neighbour's. */
template <bool ORDERED>
static void
neighbours(float *out)
{
    __shared__ float tile[THREADS];
    const unsigned i = threadIdx.x;
    tile[i] = (float)i;
    if (ORDERED)
        __syncthreads();
    out[i] = tile[(i + 1) % THREADS];
}

/* Once more into what the others may still read. */
template <bool ORDERED>
static void
again(float *out)
{
    __shared__ float tile[THREADS];
    const unsigned i = threadIdx.x;
    for (int step = 0; step < 2; step++) {
        tile[i] = (float)i;
        __syncthreads();
        out[i] = tile[(i + 40) % THREADS];
        if (ORDERED)
            __syncthreads();
    }
}

/* Within a warp: a shuffle orders no memory. */
template <bool ORDERED>
static void
lanes(float *out)
{
    __shared__ float tile[THREADS];
    const unsigned i = threadIdx.x;
    tile[i] = (float)i;
    if (ORDERED)
        __syncwarp();
    else
        (void)__shfl_xor_sync(0xffffffffu, i, 1);
    out[i] = tile[i ^ 1];
}

/* A warp's barrier where the block's is needed. */
template <bool ORDERED>
static void
warps(float *out)
{
    __shared__ float tile[THREADS];
    const unsigned i = threadIdx.x;
    tile[i] = (float)i;
    if (ORDERED)
        __syncthreads();
    else
        __syncwarp();
    out[i] = tile[(i + 32) % THREADS];
}

/* Memory of the block before, of which some is nobody's in this one. */
template <bool ORDERED>
static void
unwritten(float *out)
{
    __shared__ float tile[THREADS];
    if (ORDERED || threadIdx.x != 5)
        tile[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = tile[THREADS - 1 - threadIdx.x];
}

/* A barrier that not all come to, but another one. */
template <bool ORDERED>
static void
branches(float *out)
{
    if (ORDERED || threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 0;
}

/* And of a warp: lanes that meet in two shuffles. */
template <bool ORDERED>
static void
shuffles(float *out)
{
    float v = 1;
    if (ORDERED || threadIdx.x % 2 == 0)
        v = __shfl_xor_sync(0xffffffffu, v, 2);
    else
        v = __shfl_xor_sync(0xffffffffu, v, 4);
    out[threadIdx.x] = v;
}

/* Blocks that write one number, each the same. */
template <bool ORDERED>
static void
blocks_write(float *out)
{
    if (threadIdx.x == 0)
        out[ORDERED ? blockIdx.x : 0] = 1;
}

/* Blocks that read what another one writes, before and behind it. */
template <bool ORDERED>
static void
blocks_read(float *out)
{
    if (threadIdx.x == 0 && blockIdx.x == 1)
        out[0] = 1;
    else if (threadIdx.x == 0)
        out[2 + blockIdx.x] = out[ORDERED ? 1 : 0];
}

/* Halves of a word are two threads', and one of both is not. */
template <bool ORDERED>
static void
halves(float *out)
{
    uint16_t *at = (uint16_t *)(void *)out;
    at[ORDERED ? threadIdx.x : threadIdx.x / 2] = 1;
}

/* Atomic sums, and a plain one beside them. */
template <bool ORDERED>
static void
sums(float *out)
{
    unsigned long long *sum = (unsigned long long *)(void *)out;
    if (ORDERED || threadIdx.x > 0)
        atomicAdd(sum, 1);
    else
        *sum = 1;
}

/* What is copied meanwhile is read after a barrier, but behind the wait for it. */
template <bool ORDERED>
static void
copies(float *out)
{
    __shared__ __align__(16) f16 tile[THREADS * 8];
    const unsigned i = threadIdx.x;
    copy16(tile + i * 8, (const f16 *)(const void *)(out + THREADS) + i * 8, true);
    copy_commit();
    if (ORDERED)
        copy_wait<0>();
    __syncthreads();
    if (!ORDERED)
        copy_wait<0>();
    out[i] = (float)tile[(i * 8 + 64) % (THREADS * 8)].bits;
}

/* A product's factors, written before it with a fence, or written again while it is under way. */
enum product_fault { NO_FAULT, NO_FENCE, TOO_EARLY };
template <product_fault FAULT>
static void
product(float *out)
{
    f16 *tile = swizzled_tiles<f16>(emulate::now.dynamic_shared);
    float sums[8][4] = {};
    for (int k = 0; k < 32; k++)
        tile[threadIdx.x * 32 + k].bits = 0;
    if (FAULT != NO_FENCE)
        products_may_read();
    __syncthreads();
    ask_products<false, false, 64>(sums, tile, 0, tile);
    if (FAULT != TOO_EARLY)
        products_wait<0>();
    __syncthreads();
    tile[threadIdx.x].bits = 1;
    if (FAULT == TOO_EARLY)
        products_wait<0>();
    out[threadIdx.x] = sums[0][0];
}

static cudaStream_t stream;
static float *memory;
static int count, failed;

static void
expect(const char *what, bool fault, void (*kernel)(float *))
{
    const unsigned before = emulate::races::found();
    emulate::launch(stream, (const void *)kernel, dim3(3), dim3(THREADS), 10000, [=] { kernel(memory); });
    (void)cudaStreamSynchronize(stream);
    const bool ok = (emulate::races::found() > before) == fault;
    failed += !ok;
    printf("%s %d - %s %s\n", ok ? "ok" : "not ok", ++count, what, fault ? "is found" : "without the fault is clean");
}

/* out is a block's own where the fault is none of blocks. */
template <void (*KERNEL)(float *)>
static void
apart(float *out)
{
    KERNEL(out + (blockIdx.x + 1) * 8 * THREADS);
}

#define BOTH(what, wrap, kernel)                                                                                       \
    do {                                                                                                               \
        expect(what, true, wrap kernel<false>);                                                                        \
        expect(what, false, wrap kernel<true>);                                                                        \
    } while (0)
#define APART(what, kernel)                                                                                            \
    do {                                                                                                               \
        expect(what, true, apart<kernel<false>>);                                                                      \
        expect(what, false, apart<kernel<true>>);                                                                      \
    } while (0)

int
main()
{
    setenv("SPW_EMULATE_RACES", "allowed", 1);
    (void)cudaInitDevice(0, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid);
    (void)cudaStreamCreateWithPriority(&stream, 0, 0);
    (void)cudaMalloc((void **)&memory, 64 * THREADS * sizeof *memory);
    APART("a missing barrier before reading", neighbours);
    APART("a missing barrier before writing again", again);
    APART("a shuffle in place of a warp's barrier", lanes);
    APART("a warp's barrier in place of the block's", warps);
    APART("two threads' write of one half of a word", halves);
    APART("a plain write beside atomic sums", sums);
    APART("a copy that is waited for behind the barrier", copies);
    APART("shared memory that nobody has written", unwritten);
    APART("a barrier of one branch and of the other", branches);
    APART("a shuffle of one branch and of the other", shuffles);
    BOTH("one number that blocks write", , blocks_write);
    BOTH("a number that one block writes and others read", , blocks_read);
    expect("a product without a fence", true, apart<product<NO_FENCE>>);
    expect("a write before a product is over", true, apart<product<TOO_EARLY>>);
    expect("a product", false, apart<product<NO_FAULT>>);
    printf("1..%d\n", count);
    return failed > 0;
}
