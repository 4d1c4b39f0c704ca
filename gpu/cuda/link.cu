/*
 * Links: NCCL between the devices of several ranks. It gathers parts in place, and brings every rank the parts that it is to
 * sum; the sum itself is a kernel of ours, in the order of the ranks and in fp32, so that it has the bits of the host's, whatever
 * order NCCL would choose, for the same bytes on the wire as a reduce-scatter.
 *
 * Two operations of NCCL that ranks begin in different orders may wait for each other for ever, for nothing promises that a device makes progress
 * with both: streams share the few queues of the hardware. So all links of a device have one stream for them, on which they follow each
 * other as they were called, and ranks call them in one order. A queue's own work stands around them by events.
 *
 * The library is opened at run time. Its calls never block: each is looked after until it has been handed to the stream, and
 * a link is used by one thread, which gives it up (ncclCommAbort) when its caller says that there is no going on: a rank that
 * is gone holds nobody up.
 */
#include "common.cuh"
#include "cuda_internal.h"
#include "nccl_abi.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct nccl_calls {
    void *library;
    int version;
#define X(name, args) ncclResult_t(*name) args;
    NCCL_FUNCTIONS(X)
#undef X
    const char *(*ncclGetErrorString)(ncclResult_t);
} nccl_calls;

typedef struct cuda_link {
    spw_gpu_link base;
    cuda_gpu *gpu;
    const nccl_calls *nccl;
    ncclComm_t comm; /* NULL: given up */
    uint32_t rank, world;
    spw_gpu_going going;
    void *ctx;
    cudaEvent_t passed;       /* the queue */
    cudaEvent_t came, worked; /* what the queue had before an operation; the operation */
} cuda_link;

/* ---------------------------------------------------------------- the library */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static nccl_calls opened; /* under lock until library is set, then fixed */

enum { LIBRARY_MODE = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE }; /* it has threads of its own */

/*
 * NCCL connects ranks when a collective first needs it, unless it is told otherwise before it starts: then that waits for the other ranks and
 * takes memory, in the middle of a step. Here that is part of making a link.
 */
static void *
open_library(void)
{
    const char *given = getenv("SPW_NCCL"), *home = getenv("CUDA_HOME");
    void *library = NULL;
    (void)setenv("NCCL_RUNTIME_CONNECT", "0", 0);
    if (given != NULL)
        return dlopen(given, LIBRARY_MODE);
#ifdef SPW_EMULATED
    (void)home; /* the real one cannot serve emulated streams */
#else
    static const char *const folders[] = {"", "/usr/local/cuda/lib64/", "/usr/local/cuda/lib/"};
    char path[1024];
    if (home != NULL) {
        snprintf(path, sizeof path, "%s/lib64/libnccl.so.2", home);
        library = dlopen(path, LIBRARY_MODE);
    }
    for (size_t i = 0; library == NULL && i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, sizeof path, "%slibnccl.so.2", folders[i]);
        library = dlopen(path, LIBRARY_MODE);
    }
#endif
    return library;
}

static spw_status
load(nccl_calls *n, void *library, spw_error *err)
{
    const char *missing = NULL;
#define X(name, args)                                                                                                  \
    if ((*(void **)&n->name = dlsym(library, #name)) == NULL)                                                          \
        missing = #name;
    NCCL_FUNCTIONS(X)
    X(ncclGetErrorString, )
#undef X
    if (missing != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "libnccl.so.2 has no %s", missing);
    if (n->ncclGetVersion(&n->version) != ncclSuccess || n->version < NCCL_LEAST_VERSION)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "NCCL is %d.%d, 2.18 is needed", n->version / 10000,
                         n->version % 10000 / 100);
    n->library = library;
    return SPW_OK;
}

static spw_status
open_nccl(const nccl_calls **out, spw_error *err)
{
    spw_status st = SPW_OK;
    pthread_mutex_lock(&lock);
    if (opened.library == NULL) {
        void *library = open_library();
        st = library == NULL ? SPW_RAISE(err, SPW_EUNSUPPORTED,
                                         "no libnccl.so.2 (NCCL); SPW_NCCL, CUDA_HOME or LD_LIBRARY_PATH says where")
                             : load(&opened, library, err);
        if (st != SPW_OK && library != NULL)
            dlclose(library);
    }
    *out = &opened;
    pthread_mutex_unlock(&lock);
    return st;
}

spw_status
spw__cuda_link_probe(spw_gpu *device, spw_error *err)
{
    const nccl_calls *nccl;
    (void)spw__cuda_enter((cuda_gpu *)device);
    return open_nccl(&nccl, err);
}

spw_status
spw__cuda_link_id(spw_gpu *device, unsigned char *id, spw_error *err)
{
    const nccl_calls *nccl;
    ncclUniqueId made;
    ncclResult_t rc;
    (void)spw__cuda_enter((cuda_gpu *)device);
    SPW_TRY(open_nccl(&nccl, err));
    rc = nccl->ncclGetUniqueId(&made);
    if (rc != ncclSuccess)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "NCCL makes no id: %s", nccl->ncclGetErrorString(rc));
    memcpy(id, &made, SPW_GPU_LINK_ID_BYTES);
    return SPW_OK;
}

/* ---------------------------------------------------------------- one call */

static void
give_up(cuda_link *l)
{
    if (l->comm != NULL)
        (void)l->nccl->ncclCommAbort(l->comm); /* ends its kernels too */
    l->comm = NULL;
}

static spw_status
failed(cuda_link *l, ncclResult_t rc, const char *what, spw_error *err)
{
    give_up(l);
    return SPW_RAISE(err, SPW_EIO, "NCCL, rank %u of %u, %s: %s", l->rank, l->world, what,
                     l->nccl->ncclGetErrorString(rc));
}

/* Between two looks: short at first. */
static void
pause(unsigned round)
{
    struct timespec t = {0, round < 100 ? 10000 : 200000};
    (void)nanosleep(&t, NULL);
}

/* Until what was called is in the stream. */
static spw_status
settle(cuda_link *l, ncclResult_t rc, const char *what, spw_error *err)
{
    for (unsigned round = 0; rc == ncclInProgress; round++) {
        spw_status st = l->going(l->ctx, err);
        if (st != SPW_OK) {
            give_up(l);
            return st;
        }
        if (round > 0)
            pause(round);
        if (l->nccl->ncclCommGetAsyncError(l->comm, &rc) != ncclSuccess)
            rc = ncclSystemError;
    }
    return rc == ncclSuccess ? SPW_OK : failed(l, rc, what, err);
}

/* Nothing has failed: what is in progress comes to its outcome later, in a group with the group's. */
static bool
goes_on(ncclResult_t rc)
{
    return rc == ncclSuccess || rc == ncclInProgress;
}

static spw_status
given_up(const cuda_link *l, spw_error *err)
{
    return l->comm != NULL ? SPW_OK : SPW_RAISE(err, SPW_EPOISONED, "the link of rank %u was given up", l->rank);
}

/* The stream of all links follows what the queue has, and the queue what that stream has. */
static spw_status
go_in(cuda_link *l, const cuda_queue *q, spw_error *err)
{
    SPW_TRY(given_up(l, err));
    return spw__cuda_ok(l->gpu, spw__cuda_follow(l->gpu->links, l->came, q->stream), "work between ranks")
               ? SPW_OK
               : spw__cuda_check(&l->gpu->base, err);
}

static spw_status
come_out(cuda_link *l, const cuda_queue *q, spw_error *err)
{
    return spw__cuda_ok(l->gpu, spw__cuda_follow(q->stream, l->worked, l->gpu->links), "work between ranks")
               ? SPW_OK
               : spw__cuda_check(&l->gpu->base, err);
}

static spw_status
link_all_gather(spw_gpu_link *link, spw_gpu_queue *queue, void *buf, uint64_t part_bytes, spw_error *err)
{
    cuda_link *l = (cuda_link *)link;
    cuda_queue *q = spw__cuda_queue_of(queue);
    SPW_TRY(go_in(l, q, err));
    SPW_TRY(settle(l,
                   l->nccl->ncclAllGather((const char *)buf + l->rank * part_bytes, buf, part_bytes, ncclChar, l->comm,
                                          l->gpu->links),
                   "all_gather", err));
    return come_out(l, q, err);
}

static spw_status
link_swap(spw_gpu_link *link, spw_gpu_queue *queue, const void *send, uint64_t send_stride, void *recv,
          uint64_t recv_stride, uint64_t bytes, spw_error *err)
{
    cuda_link *l = (cuda_link *)link;
    cuda_queue *q = spw__cuda_queue_of(queue);
    cudaStream_t stream = l->gpu->links;
    ncclResult_t rc, end;
    SPW_TRY(go_in(l, q, err));
    rc = l->nccl->ncclGroupStart();
    for (uint32_t k = 1; k < l->world && goes_on(rc); k++) { /* each begins with another peer */
        uint32_t to = (l->rank + k) % l->world, from = (l->rank + l->world - k) % l->world;
        rc = l->nccl->ncclSend((const char *)send + to * send_stride, bytes, ncclChar, (int)to, l->comm, stream);
        if (goes_on(rc))
            rc = l->nccl->ncclRecv((char *)recv + from * recv_stride, bytes, ncclChar, (int)from, l->comm, stream);
    }
    end = l->nccl->ncclGroupEnd();
    SPW_TRY(settle(l, goes_on(rc) ? end : rc, "swap of parts", err));
    return come_out(l, q, err);
}

/* ---------------------------------------------------------------- sums */

/* Eight elements a thread; n is a multiple of that, and so are strides and places. */
template <class T>
SPW_KERNEL void
sum_parts_kernel(float *out, const T *own, const T *parts, uint64_t stride, const float *before, uint32_t rank,
                 uint32_t world, uint64_t n)
{
    uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    float sum[8], more[8];
    if (i >= n)
        return;
    load8(sum, (rank == 0 ? own : parts) + i, n - i, true);
    for (uint32_t r = 1; r < world; r++) {
        load8(more, r == rank ? own + i : parts + r * stride + i, n - i, true);
        for (int j = 0; j < 8; j++)
            sum[j] += more[j];
    }
    if (before != NULL) {
        load8(more, before + i, n - i, true);
        for (int j = 0; j < 8; j++)
            sum[j] = more[j] + sum[j];
    }
    store8(out + i, sum, n - i, true);
}

static void
link_sum(spw_gpu_link *link, spw_gpu_queue *queue, float *out, spw_dtype type, const void *own, const void *parts,
         uint64_t stride, const float *before, uint64_t n)
{
    cuda_link *l = (cuda_link *)link;
    cuda_queue *q = spw__cuda_queue_of(queue);
    unsigned blocks = spw__cuda_blocks(n, 8 * 256);
    if (n == 0)
        return;
    if (type == SPW_F32)
        LAUNCH(q, blocks, 256, 0, (sum_parts_kernel<float>), out, (const float *)own, (const float *)parts, stride,
               before, l->rank, l->world, n);
    else if (type == SPW_BF16)
        LAUNCH(q, blocks, 256, 0, (sum_parts_kernel<bf16>), out, (const bf16 *)own, (const bf16 *)parts, stride, before,
               l->rank, l->world, n);
    else
        LAUNCH(q, blocks, 256, 0, (sum_parts_kernel<f16>), out, (const f16 *)own, (const f16 *)parts, stride, before,
               l->rank, l->world, n);
}

/* ---------------------------------------------------------------- waiting, lifetime */

static spw_status
link_wait(spw_gpu_link *link, spw_gpu_queue *queue, spw_error *err)
{
    cuda_link *l = (cuda_link *)link;
    cuda_queue *q = spw__cuda_queue_of(queue);
    cudaError_t e = cudaEventRecord(l->passed, q->stream);
    SPW_TRY(given_up(l, err));
    for (unsigned round = 0; e == cudaSuccess; round++) {
        ncclResult_t state = ncclSuccess;
        spw_status st;
        if (round > 0)
            pause(round);
        e = cudaEventQuery(l->passed);
        if (e != cudaErrorNotReady)
            break;
        e = cudaSuccess;
        (void)cudaGetLastError();
        if (l->nccl->ncclCommGetAsyncError(l->comm, &state) != ncclSuccess)
            state = ncclSystemError;
        if (!goes_on(state))
            return failed(l, state, "waiting", err);
        st = l->going(l->ctx, err);
        if (st != SPW_OK) {
            give_up(l);
            return st;
        }
    }
    if (!spw__cuda_ok(l->gpu, e, "waiting for other ranks"))
        return spw__cuda_check(&l->gpu->base, err);
    return SPW_OK;
}

static void
link_destroy(spw_gpu_link *link, bool together)
{
    cuda_link *l = (cuda_link *)link;
    spw_error err = {SPW_OK, 0, ""};
    (void)spw__cuda_enter(l->gpu);
    if (!together)
        give_up(l);
    if (l->comm != NULL && settle(l, l->nccl->ncclCommFinalize(l->comm), "end", &err) == SPW_OK)
        (void)l->nccl->ncclCommDestroy(l->comm);
    for (cudaEvent_t event : {l->passed, l->came, l->worked}) {
        if (event != NULL)
            (void)cudaEventDestroy(event);
    }
    spw_mem_free(l);
}

/* The device's stream for links, which the first one makes, and this link's events. */
static cudaError_t
open_events(cuda_link *l)
{
    int low = 0, high = 0;
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&l->gpu->lock);
    if (l->gpu->links == NULL && (e = cudaDeviceGetStreamPriorityRange(&low, &high)) == cudaSuccess)
        e = spw__cuda_refused(cudaStreamCreateWithPriority(&l->gpu->links, cudaStreamNonBlocking, high));
    pthread_mutex_unlock(&l->gpu->lock);
    for (cudaEvent_t *event : {&l->passed, &l->came, &l->worked}) {
        if (e == cudaSuccess)
            e = spw__cuda_refused(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    return e;
}

static const spw_gpu_link_calls link_calls = {link_destroy, link_all_gather, link_swap, link_sum, link_wait};

spw_status
spw__cuda_link_create(spw_gpu_link **out, spw_gpu *device, const unsigned char *id, uint32_t rank, uint32_t world,
                      spw_gpu_going going, void *ctx, spw_error *err)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    ncclConfig_t config = NCCL_CONFIG_FOR_US;
    const nccl_calls *nccl;
    ncclUniqueId same;
    cuda_link *l;
    spw_status st;
    cudaError_t e;
    *out = NULL;
    SPW_TRY(open_nccl(&nccl, err));
    l = (cuda_link *)spw_mem_zalloc(sizeof *l);
    if (l == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "link between devices");
    l->base.calls = &link_calls;
    l->gpu = gpu;
    l->nccl = nccl;
    l->rank = rank;
    l->world = world;
    l->going = going;
    l->ctx = ctx;
    memcpy(&same, id, sizeof same);
    spw__cuda_load_kernels();
    e = open_events(l);
    st = e != cudaSuccess
             ? SPW_RAISE(err, SPW_ENOMEM, "link between devices: %s", cudaGetErrorString(e))
             : settle(l, nccl->ncclCommInitRankConfig(&l->comm, (int)world, same, (int)rank, &config), "start", err);
    if (st != SPW_OK) {
        link_destroy(&l->base, false);
        return st;
    }
    *out = &l->base;
    return SPW_OK;
}
