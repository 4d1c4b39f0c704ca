/*
 * Inside the cuda device: its objects, how a kernel is launched, and how an error of the runtime becomes the device's sticky
 * error. Host code in C++ without its library, so that the plugin needs no C++ runtime.
 */
#ifndef SPW_CUDA_INTERNAL_H
#define SPW_CUDA_INTERNAL_H

#include "gpu_internal.h"
#include <cuda_runtime.h>
#include <pthread.h>

/* Letters as in spw_gpu.h. */
typedef struct cuda_block {
    struct cuda_block *next;
    void *p;
    uint64_t bytes;
} cuda_block;

typedef struct cuda_gpu {
    spw_gpu base;
    /* Fixed after open. */
    spw_gpu_info info;
    char description[160], link[128];
    int device_idx;
    bool pools;             /* allocates in the order of a stream */
    bool hopper;            /* has the products of wgmma.cuh */
    struct cuda_blas *blas; /* NULL: products by our own kernels */
    pthread_mutex_t lock;
    /* Under lock. */
    spw_error first;
    cudaStream_t links; /* of all links between ranks; NULL: there was none yet. Fixed from then on */
    cuda_block *blocks;
    uint64_t bytes_live, bytes_peak;
} cuda_gpu;

enum {
    SLOTS = SPW_APART_SLOTS, /* of the pinned ring of a queue */
    SLOT_BYTES = SPW_APART_SLOT_BYTES,
    PARCEL_SLOTS = 8, /* that one small copy takes at most: the sums of 268 million elements */
    NOTES = 256,      /* notifications under way */
    SUM_ELEMS = 4096, /* one sum of squares each */
};

/*
 * PIECE_BYTES, of a converting copy in staging memory on the device, which has two of them. A piece's kernel may wait as long as the
 * longest kernel of the compute queue takes, for blocks of a product that stay until it ends leave no room, whatever the priorities
 * are: about a millisecond. As long takes the other piece on the link. BLAS_BYTES, cuBLASLt's workspace on a compute queue.
 */
#ifdef SPW_EMULATED
enum { PIECE_BYTES = 1 << 20, BLAS_BYTES = 64 << 10 };
#else
enum { PIECE_BYTES = 32 << 20, BLAS_BYTES = 32 << 20 };
#endif

/* What slots of the ring, from this one on, bring to pageable host memory once it has arrived. */
typedef struct cuda_parcel {
    void *dst;
    const void *src;
    uint64_t bytes;
} cuda_parcel;

typedef struct cuda_note {
    cudaEvent_t event;
    void (*fn)(void *arg);
    void *arg;
    spw_gpu_span_fn span_fn; /* NULL: fn; else the end of a span that began with begin */
    const char *name;
    uint64_t tag;
    cudaEvent_t begin;
} cuda_note;

typedef struct cuda_queue {
    spw_gpu_queue base;
    cuda_gpu *gpu;
    spw_gpu_queue_kind kind;
    cudaStream_t stream;
    /* Owned by the submitting thread. */
    void *scratch; /* device memory for one operation, grown in the first step */
    uint64_t scratch_bytes;
    /* Transfers of a copy that converts in pieces, beside its kernels in `stream`: whose turn it is with the pieces' memory. */
    cudaStream_t link;
    cudaEvent_t linked[2], converted[2];
    void *blas_workspace;
    unsigned char *ring; /* pinned */
    cudaEvent_t ring_passed[SLOTS];
    cuda_parcel parcels[SLOTS];
    unsigned ring_next;
    cudaEvent_t span_begins[NOTES + 1]; /* as many spans as notes may be under way, and one is open */
    const char *span_name;
    uint64_t span_count;
    /* Owned by the queue's thread: an event, when it passed by the host's clock, and the least delay seen since. */
    cudaEvent_t zero;
    uint64_t zero_ns;
    int64_t least_delay_ns; /* below 0: the device's clock is ahead */
    /* Under lock; the thread takes notes in order. */
    pthread_t thread;
    bool started, stop;
    pthread_mutex_t lock;
    pthread_cond_t filled, drained;
    cuda_note notes[NOTES];
    uint64_t head, tail;
} cuda_queue;

typedef struct cuda_event {
    spw_gpu_event base;
    cuda_gpu *gpu;
    cudaEvent_t event;
} cuda_event;

#define X(name) extern "C" __typeof__(spw_gpu_##name) spw__cuda_##name;
SPW_GPU_CALLS(X)
#undef X
extern "C" __typeof__(spw_gpu_update_state) spw__cuda_update_state;
extern "C" __typeof__(spw_gpu_momentum) spw__cuda_momentum;

/* Keeps the device's first error. */
void spw__cuda_fail(cuda_gpu *gpu, spw_status status, const char *what);
/* False, and the error kept, unless e is cudaSuccess. */
bool spw__cuda_ok(cuda_gpu *gpu, cudaError_t e, const char *what);
/* e; the thread forgets it, where a refusal is told by a status and must not be taken for a launch's. */
cudaError_t spw__cuda_refused(cudaError_t e);
/* What the one stream gets from now on comes after what the other has; `by` marks it. */
cudaError_t spw__cuda_follow(cudaStream_t later, cudaEvent_t by, cudaStream_t earlier);
/* Makes gpu the calling thread's device: threads of the engine come without one. */
cuda_gpu *spw__cuda_enter(cuda_gpu *gpu);
static inline cuda_queue *
spw__cuda_queue_of(spw_gpu_queue *queue)
{
    cuda_queue *q = (cuda_queue *)queue;
    (void)spw__cuda_enter(q->gpu);
    return q;
}
static inline bool
spw__cuda_is_f32(const cuda_queue *q)
{
    return q->gpu->info.compute_dtype == SPW_F32;
}
/* Device memory until the queue's next operation that asks; NULL after a sticky error. */
void *spw__cuda_scratch(cuda_queue *q, uint64_t bytes);
/*
 * A copy of `pieces` from the host that converts. Piece k, of at most bytes, lies in staging memory when fetch() returns, and kernels of
 * the queue may read it until release(). NULL after a sticky error.
 */
void *
spw__cuda_fetch(cuda_queue *q, uint64_t k, uint64_t pieces, uint64_t piece_bytes, const void *src_host, uint64_t bytes);
void spw__cuda_release(cuda_queue *q, uint64_t k);
/* Brings bytes to any host memory, which has them once the queue has passed; src may change after that. */
void spw__cuda_deliver(cuda_queue *q, void *dst_host, const void *src_device, uint64_t bytes);
/*
 * Where kernels reach host memory that is pinned: what they leave there in a few bytes needs neither a copy nor a host function, of which
 * each stops the stream for microseconds. NULL: it is not pinned.
 */
void *spw__cuda_reach(void *host);

/*
 * C(M,N) = scale A B + by onto + bias, all row-major; trans_a: A is (K,M); trans_b: B is (N,K). A and B of compute_dtype, C likewise or
 * fp32. Then what `after` says: C gets gelu() of that and gelu_in the sum itself, or C gets it times gelu'(gelu_in).
 */
typedef enum cuda_after { AFTER_NOTHING, AFTER_GELU, AFTER_GELU_BACKWARD } cuda_after;
typedef struct cuda_product {
    bool trans_a, trans_b, f32_out;
    cuda_after after;
    uint64_t M, N, K;
    const void *A, *B;
    void *C;
    float scale, by;
    uint64_t a_stride, c_stride; /* elements from row to row; 0: dense */
    const void *onto;            /* as C; may be C where both factors are 1. NULL: nothing */
    const void *bias;            /* (N) of compute_dtype; NULL: none */
    bool rounds_twice; /* in 16 bits A B may be rounded before onto is added: faster, where A is no better itself */
    void *gelu_in;     /* (M,N) of compute_dtype */
    /* A and B are codes of 8-bit floats, B (N,K); NULL: they are not. Then only spw__cuda_blas_gemm() takes it. */
    const float *a_scale, *b_scale;
    spw_fp8 a_format, b_format;
} cuda_product;
static inline cuda_product
spw__cuda_dense_product(void *C, const void *A, const void *B, uint64_t M, uint64_t N, uint64_t K)
{
    cuda_product p = {};
    p.C = C;
    p.A = A;
    p.B = B;
    p.M = M;
    p.N = N;
    p.K = K;
    p.scale = p.by = 1.0f;
    return p;
}
void spw__cuda_gemm(cuda_queue *q, const cuda_product *p);
/* sums(C) += of rows of a (M,C), stride apart; scaled(C) += of a * (x - mean) * rstd, mean NULL: 0. Either may be NULL. */
void spw__cuda_column_sums(cuda_queue *q, float *sums, float *scaled, const void *a, const void *x, const float *mean,
                           const float *rstd, uint64_t M, uint64_t C, uint64_t stride);
/* sums(C) += of the rows of_sums (slices, C), and scaled likewise; in an order that slices alone decide. Either may be NULL. */
void spw__cuda_add_slices(cuda_queue *q, float *sums, const float *of_sums, float *scaled, const float *of_scaled,
                          uint64_t C, uint64_t slices);

/* cuBLASLt, opened at run time. NULL and a reason when it is not there. */
struct cuda_blas *spw__cuda_blas_open(cuda_gpu *gpu, char *why, size_t why_bytes);
void spw__cuda_blas_close(struct cuda_blas *blas);
/* False when the library has no way for this product; nothing has been started then. */
bool spw__cuda_blas_gemm(cuda_queue *q, const cuda_product *p);

/* ---------------------------------------------------------------- launches */

/*
 * All kernels of the plugin: who launches one puts it into a list that is made when the plugin is loaded. The runtime loads a kernel when it is
 * first used, and that may wait for what runs on the device: for a collective, too, that waits for another rank, and that one
 * for this thread. So all are loaded before there is a link.
 */
struct cuda_kernel {
    const void *fn;
    cuda_kernel *next;
    explicit cuda_kernel(const void *kernel);
};
template <auto kernel> cuda_kernel spw__cuda_known{(const void *)kernel};
void spw__cuda_load_kernels(void);

template <class T> struct cuda_same {
    typedef T type;
};

template <auto known, class... P>
static void
spw__cuda_launch(cuda_queue *q, const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                 typename cuda_same<P>::type... args)
{
#ifdef SPW_EMULATED
    (emulate::check_argument(name, args), ...);
    emulate::launch(q->stream, spw__cuda_known<known>.fn, grid, block, shared_bytes, [=] { kernel(args...); });
#else
    (void)&spw__cuda_known<known>;
    if (shared_bytes > (48 << 10) &&
        !spw__cuda_ok(
            q->gpu,
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes),
            name))
        return;
    kernel<<<grid, block, shared_bytes, q->stream>>>(args...);
    (void)spw__cuda_ok(q->gpu, cudaGetLastError(), name);
#endif
}
extern const bool spw__cuda_hopper_built; /* for a Hopper as well: *_hopper.cu */

/* LAUNCH(q, grid, block, shared, (kernel<T, 3>), args...): the kernel's name is what an error tells. */
#define UNWRAP(...) __VA_ARGS__
#define LAUNCH(q, grid, block, shared, kernel, ...)                                                                    \
    spw__cuda_launch<UNWRAP kernel>(q, #kernel, UNWRAP kernel, grid, block, shared, __VA_ARGS__)

/* Runs the statement with T the compute type, BY_16_BITS where that is not fp32; the types are common.cuh's. */
#define BY_16_BITS(q, ...)                                                                                             \
    do {                                                                                                               \
        if ((q)->gpu->info.compute_dtype == SPW_BF16) {                                                                \
            typedef bf16 T;                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            typedef f16 T;                                                                                             \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)
#define BY_TYPE(q, ...)                                                                                                \
    do {                                                                                                               \
        if ((q)->gpu->info.compute_dtype == SPW_F32) {                                                                 \
            typedef float T;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            BY_16_BITS(q, __VA_ARGS__);                                                                                \
        }                                                                                                              \
    } while (0)

static inline unsigned
spw__cuda_blocks(uint64_t n, uint64_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}
/* Eight elements at a time need all arrays at multiples of 16 bytes. */
static inline bool
spw__cuda_aligned(const void *a, const void *b = NULL, const void *c = NULL, const void *d = NULL)
{
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & 15) == 0;
}

#endif
