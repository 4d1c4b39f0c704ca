/*
 * Stands in for CUDA's header of this name in tests: the kernels and the host code of gpu/cuda compile as C++ against it and
 * run on the CPU, where there is no GPU. The threads of a block are fibers that yield at barriers and at what a warp does
 * together (shuffles, matrix products). Streams do their work at once or, by SPW_EMULATE_STREAMS, in other orders that the caller's
 * waits permit: "late", not before somebody waits for it; "odd", every second one so; a number, as that draws. emulate.cpp has
 * both. What is emulated is the logic, not the time: races between threads show only as far as the order of fibers,
 * SPW_EMULATE_ORDER, brings them out.
 */
#ifndef SPW_EMULATE_CUDA_RUNTIME_H
#define SPW_EMULATE_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <functional>
#include <type_traits>
#include "races.h"
#ifdef __F16C__
#include <immintrin.h>
#else
#include "spw_base.h"
#endif

#define SPW_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__      static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c)
    {
    }
};
struct __align__(16) float4
{
    float x, y, z, w;
};
struct __align__(16) uint4
{
    unsigned x, y, z, w;
};
struct __align__(8) float2
{
    float x, y;
};
struct __align__(8) uint2
{
    unsigned x, y;
};

/* ---------------------------------------------------------------- the running thread */

struct emulated_stream;
namespace emulate
{
struct here {
    uint3 thread, block;
    int lane;
    dim3 block_dim, grid_dim;
    unsigned char *dynamic_shared;
};
extern here now; /* of the fiber that runs: one at a time, under the device's lock */
/* Puts a grid into a stream. Once kernels have been loaded ahead, one that was not stops the test. */
void launch(emulated_stream *stream, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
            std::function<void()> body);
/* A launch's arguments: what they say of where something lies must be true for a GPU. */
void check_addresses(const char *kernel, const void *bytes, size_t n);
template <class T>
void
check_argument(const char *kernel, const T &argument)
{
    if (std::is_pointer<T>::value || std::is_class<T>::value)
        check_addresses(kernel, &argument, sizeof argument);
}
void sync_block();
/*
 * Puts bytes into the lane's slot, waits for the warp, and returns all 32 slots, which stand until the next call but one. What the whole
 * warp makes of them, `combine` does once, before anybody goes on; it may write into the slots.
 */
enum { SLOT_BYTES = 64 };
#define EMULATE_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE() /* of the call */
unsigned char *open_slots();                             /* of the warp, for what its next close_slots() shows */
void close_slots(void (*combine)(unsigned char *slots)); /* waits for the warp; combine may be NULL */
template <class T>
const unsigned char *
gather(const T &mine, void (*combine)(unsigned char *slots) = NULL, EMULATE_HERE)
{
    races::at_warp(file, line);
    static_assert(sizeof mine <= SLOT_BYTES, "a slot is too small");
    unsigned char *slots = open_slots();
    memcpy(slots + now.lane * SLOT_BYTES, &mine, sizeof mine);
    close_slots(combine);
    return slots;
}
void close_slots_in_order(); /* waits for the warp, whose accesses before it are ordered before those behind it */
/* Copies that arrive when they are waited for, not before. */
void copy_later(void *dst, const void *src, size_t bytes);
void copy_commit();
void copy_wait(unsigned groups_left);
/* A warpgroup's product that was asked for reads shared memory until it is waited for. */
void product_reads(const void *p, size_t bytes);
void product_commit();
void product_wait(unsigned groups_left);
/* A load or store of so many bytes at once: a GPU faults where they are not aligned, this CPU would not. */
inline void
need_aligned(const void *p, size_t bytes)
{
    if ((uintptr_t)p % bytes == 0)
        return;
    fprintf(stderr, "emulated kernel: %zu bytes at once that are not aligned\n", bytes);
    abort();
}
inline int
lane()
{
    return now.lane;
}
template <class T>
T
from_lane(T value, int source, const char *file, int line)
{
    T got;
    memcpy(&got, gather(value, NULL, file, line) + source * SLOT_BYTES, sizeof got);
    return got;
}
} // namespace emulate

#define threadIdx (emulate::now.thread)
#define blockIdx  (emulate::now.block)
#define blockDim  (emulate::now.block_dim)
#define gridDim   (emulate::now.grid_dim)

inline void
__syncthreads(EMULATE_HERE)
{
    emulate::races::at_block(file, line);
    emulate::sync_block();
}
inline void
__syncwarp(unsigned = 0xffffffffu, EMULATE_HERE)
{
    emulate::races::at_warp(file, line);
    emulate::close_slots_in_order();
}
template <class T>
T
__shfl_xor_sync(unsigned, T v, int mask, EMULATE_HERE)
{
    return emulate::from_lane(v, emulate::lane() ^ mask, file, line);
}
template <class T>
T
__shfl_sync(unsigned, T v, int source, EMULATE_HERE)
{
    return emulate::from_lane(v, source, file, line);
}
inline unsigned
__ballot_sync(unsigned, int predicate, EMULATE_HERE)
{
    unsigned char mine = predicate != 0;
    const unsigned char *all = emulate::gather(mine, NULL, file, line);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++)
        bits |= (unsigned)all[i * emulate::SLOT_BYTES] << i;
    return bits;
}
/* In one instruction, where the CPU has it: products of f16 are many. */
inline float
spw_emulate_widen(uint16_t half)
{
#ifdef __F16C__
    return _cvtsh_ss(half);
#else
    return spw_f16_to_f32(half);
#endif
}
inline uint16_t
spw_emulate_narrow(float x)
{
#ifdef __F16C__
    return x != x ? 0x7fffu : _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    return x != x ? 0x7fffu : spw_f32_to_f16(x);
#endif
}
inline int
__popc(unsigned x)
{
    return __builtin_popcount(x);
}
inline unsigned
__float_as_uint(float f)
{
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
inline float
__uint_as_float(unsigned u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
/*
 * These kernels are compiled with contraction, as by nvcc: a product and the sum it goes into round once. Not so what is said to round
 * by itself: its operands and results pass through memory that the compiler may not look into.
 */
inline float
spw_emulate_opaque(float x)
{
    __asm__("" : "+m"(x));
    return x;
}
inline float
__fmul_rn(float a, float b)
{
    return spw_emulate_opaque(a * b);
}
inline float
__fadd_rn(float a, float b)
{
    return spw_emulate_opaque(a) + spw_emulate_opaque(b);
}
inline float
__fsub_rn(float a, float b)
{
    return spw_emulate_opaque(a) - spw_emulate_opaque(b);
}
inline float
__fdiv_rn(float a, float b)
{
    return a / b;
}
inline float
__fsqrt_rn(float a)
{
    return sqrtf(a);
}
inline float
__fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
template <class T>
T
__ldg(const T *p)
{
    return *p;
}
inline int
atomicMin(int *p, int v)
{
    emulate::races::touch(p, sizeof *p, emulate::races::ATOMIC);
    emulate::races::hidden hidden;
    int old = *p;
    *p = v < old ? v : old;
    return old;
}
inline unsigned
atomicMax(unsigned *p, unsigned v)
{
    emulate::races::touch(p, sizeof *p, emulate::races::ATOMIC);
    emulate::races::hidden hidden;
    unsigned old = *p;
    *p = v > old ? v : old;
    return old;
}
inline unsigned
atomicAdd(unsigned *p, unsigned v)
{
    emulate::races::touch(p, sizeof *p, emulate::races::ATOMIC);
    emulate::races::hidden hidden;
    unsigned old = *p;
    *p += v;
    return old;
}
inline unsigned long long
atomicAdd(unsigned long long *p, unsigned long long v)
{
    emulate::races::touch(p, sizeof *p, emulate::races::ATOMIC);
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

/* ---------------------------------------------------------------- the host's side */

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorUnknown = 999,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorNotSupported = 801
} cudaError_t;
typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *);
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum {
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventDisableTiming = 2,
    cudaEventBlockingSync = 1,
    cudaHostAllocDefault = 0,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2,
    cudaDeviceScheduleBlockingSync = 4,
    cudaInitDeviceFlagsAreValid = 1
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaDeviceProp {
    char name[256], uuid[16];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem, sharedMemPerBlockOptin;
};

cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
/* For libraries beside the plugin: work that is tried until it returns true, at its turn in the stream. */
extern "C" __attribute__((visibility("default"))) void
spw_emulate_submit(cudaStream_t stream, bool (*try_it)(void *), void *arg);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end);
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};
/* Of memory of the host: what has been registered, and nothing else. */
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *p);
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned);
cudaError_t cudaInitDevice(int device_idx, unsigned device_flags, unsigned flags);
cudaError_t cudaGetLastError();
cudaError_t cudaSetDevice(int device_idx);
struct cudaFuncAttributes {
    int nothing;
};
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *kernel);
inline cudaError_t
cudaFreeHost(void *p)
{
    free(p);
    return cudaSuccess;
}
inline int
emulate_capability() /* SPW_EMULATE_CAPABILITY=80: compute capability 8.0 */
{
    const char *given = getenv("SPW_EMULATE_CAPABILITY");
    return given != NULL ? atoi(given) : 89;
}
inline size_t
emulate_shared_bytes() /* of a block */
{
    return (emulate_capability() / 10 == 9 ? 227 : 99) << 10;
}
inline cudaError_t
cudaGetDeviceProperties(cudaDeviceProp *p, int idx)
{
    const char *hidden = getenv("SPW_EMULATE_HIDDEN"); /* so many before those that this process sees */
    const int number = idx + (hidden != NULL ? atoi(hidden) : 0);
    memset(p, 0, sizeof *p);
    memcpy(p->uuid, &number, sizeof number);
    strcpy(p->name, "emulated on the CPU");
    p->major = emulate_capability() / 10;
    p->minor = emulate_capability() % 10;
    p->multiProcessorCount = 1;
    p->totalGlobalMem = (size_t)16 << 30;
    p->sharedMemPerBlockOptin = emulate_shared_bytes();
    return cudaSuccess;
}
enum cudaDeviceAttr {
    cudaDevAttrClockRate = 13,
    cudaDevAttrHostNativeAtomicSupported = 86,
    cudaDevAttrMemoryPoolsSupported = 115
};
inline bool
emulate_pools() /* SPW_EMULATE_POOLS=0: memory is not given out in the order of a stream */
{
    const char *given = getenv("SPW_EMULATE_POOLS");
    return given == NULL || strcmp(given, "0") != 0;
}
inline cudaError_t
cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int)
{
    const char *khz = getenv("SPW_EMULATE_KHZ"); /* none: the peak is not known */
    *value = what == cudaDevAttrClockRate && khz != NULL ? atoi(khz)
                                                         : what == cudaDevAttrMemoryPoolsSupported && emulate_pools();
    return cudaSuccess;
}
inline cudaError_t
cudaDeviceGetPCIBusId(char *out, int bytes, int)
{
    strncpy(out, "0000:00:ff.7", (size_t)bytes);
    return cudaSuccess;
}
inline cudaError_t
cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    const char *given = getenv("SPW_EMULATE_FREE"),
               *rank = getenv("RANK"); /* "RANK:KIB": that a rank's device has less free */
    unsigned whose, kib;
    *free_bytes = *total = (size_t)16 << 30;
    if (given != NULL && rank != NULL && sscanf(given, "%u:%u", &whose, &kib) == 2 && whose == (unsigned)atoi(rank))
        *free_bytes = (size_t)kib << 10;
    return cudaSuccess;
}
inline cudaError_t
cudaGetDeviceCount(int *n)
{
    const char *given = getenv("SPW_EMULATE_DEVICES");
    *n = given != NULL ? atoi(given) : 1;
    return cudaSuccess;
}
inline cudaError_t
cudaDriverGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}
inline cudaError_t
cudaRuntimeGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}
inline const char *
cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess ? "no error" : "emulated error";
}
#define EMULATE_NOTHING(name, ...)                                                                                     \
    inline cudaError_t name(__VA_ARGS__)                                                                               \
    {                                                                                                                  \
        return cudaSuccess;                                                                                            \
    }
EMULATE_NOTHING(cudaFuncSetAttribute, const void *, cudaFuncAttribute, int)
inline cudaError_t
cudaDeviceGetStreamPriorityRange(int *low, int *high)
{
    *low = *high = 0;
    return cudaSuccess;
}

#endif
