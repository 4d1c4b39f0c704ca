/*
 * The cuda device itself: what is there and why not, memory under a limit, the sticky error, and the table that the plugin
 * hands out. The runtime is linked statically and finds the driver by itself; nothing links libcuda.
 */
#include "cuda_internal.h"
#include <stdio.h>
#include <stdlib.h>

extern const spw_gpu_calls spw__cuda_calls;

void
spw__cuda_fail(cuda_gpu *gpu, spw_status status, const char *what)
{
    pthread_mutex_lock(&gpu->lock);
    if (gpu->first.status == SPW_OK)
        SPW_RAISE(&gpu->first, status, "device cuda:%d: %s", gpu->device_idx, what);
    pthread_mutex_unlock(&gpu->lock);
}

bool
spw__cuda_ok(cuda_gpu *gpu, cudaError_t e, const char *what)
{
    char text[200];
    if (e == cudaSuccess)
        return true;
    snprintf(text, sizeof text, "%s: %s", what, cudaGetErrorString(e));
    spw__cuda_fail(gpu, e == cudaErrorMemoryAllocation ? SPW_ENOMEM : SPW_EPOISONED, text);
    return false;
}

cudaError_t
spw__cuda_refused(cudaError_t e)
{
    if (e != cudaSuccess)
        (void)cudaGetLastError();
    return e;
}

cuda_gpu *
spw__cuda_enter(cuda_gpu *gpu)
{
    (void)cudaSetDevice(gpu->device_idx); /* cheap when it is already */
    return gpu;
}

/* No device, or none that this build can use. */
static spw_status
find_device(uint32_t *idx, uint32_t turn, cudaDeviceProp *prop, int *count_out, spw_error *err)
{
    int driver = 0, runtime = 0, count = 0;
    uint32_t device_idx = *idx;
    cudaError_t e;
    (void)cudaRuntimeGetVersion(&runtime);
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "no NVIDIA driver (libcuda.so.1) on this machine");
    e = cudaGetDeviceCount(&count);
    if (e == cudaErrorInsufficientDriver)
        return SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "the driver is too old: it knows CUDA %d.%d, and this build needs %d.%d; update it, or build with an "
            "older toolkit (CUDA 12 does)",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (e == cudaErrorNoDevice || (e == cudaSuccess && count == 0))
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "the driver sees no GPU (CUDA_VISIBLE_DEVICES hides them too)");
    if (e != cudaSuccess)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "the driver does not start: %s", cudaGetErrorString(e));
    if (device_idx == SPW_GPU_ANY)
        device_idx = *idx = turn % (uint32_t)count;
    *count_out = count;
    if (device_idx >= (uint32_t)count)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "there are %d GPUs, counted from 0", count);
    e = cudaGetDeviceProperties(prop, (int)device_idx);
    if (e != cudaSuccess)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "GPU %u does not answer: %s", device_idx, cudaGetErrorString(e));
    if (prop->major < 8)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s has compute capability %d.%d, and 8.0 is needed (bf16 products)",
                         prop->name, prop->major, prop->minor);
    return SPW_OK;
}

/* What is asked for, or what the environment says instead. */
static spw_status
choose_compute(spw_dtype asked, spw_dtype *out, spw_error *err)
{
    const char *wanted = getenv("SPW_CUDA_COMPUTE");
    *out = asked;
    for (int t = 0; wanted != NULL && wanted[0] != '\0'; t++) {
        if (t == SPW_DTYPE_COUNT)
            return SPW_RAISE(err, SPW_EINVAL, "SPW_CUDA_COMPUTE is %s: fp32, bf16 or fp16", wanted);
        *out = (spw_dtype)t;
        if (strcmp(wanted, spw_dtype_name(*out)) == 0)
            break;
    }
    return SPW_OK;
}

/*
 * Floating point operations of an SM per clock, dense, fp32 sums, from NVIDIA's descriptions of the architectures. Of one
 * architecture the fastest counts: consumer parts of 8.6 reach half of it.
 */
static double
peak_flops(int device_idx, const cudaDeviceProp *prop, spw_dtype compute)
{
    static const struct {
        int major, minor;
        double half, single;
    } sms[] = {{8, 0, 2048, 128}, {8, 6, 1024, 256},  {8, 9, 512, 256},
               {9, 0, 4096, 256}, {10, 0, 8192, 256}, {12, 0, 512, 256}};
    int khz = 0;
    if (cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device_idx) != cudaSuccess)
        khz = 0;
    for (size_t i = 0; i < sizeof sms / sizeof sms[0]; i++)
        if (sms[i].major == prop->major && sms[i].minor == prop->minor)
            return (compute == SPW_F32 ? sms[i].single : sms[i].half) * prop->multiProcessorCount * khz * 1e3;
    return 0;
}

/* One line of a file of the device in sysfs, without its end; "" when there is none. */
static void
read_line(const char *bus_id, const char *name, char *out, size_t bytes)
{
    char path[256];
    FILE *f;
    out[0] = '\0';
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/%s", bus_id, name);
    f = fopen(path, "re");
    if (f == NULL)
        return;
    if (fgets(out, (int)bytes, f) != NULL)
        out[strcspn(out, "\n")] = '\0';
    (void)fclose(f);
}

/*
 * A link on which atomic operations are the hardware's is no PCIe, whatever the slot says. Else from what the kernel says of the slot: the
 * CUDA runtime does not tell. An idle link may run slower than it can.
 */
static void
describe_link(int device_idx, char *out, size_t bytes)
{
    static const double speeds[] = {2.5, 5, 8, 16, 32, 64}; /* GT/s of generations 1 to 6 */
    char bus_id[32] = "", speed[64], width[16], now_speed[64], now_width[16];
    size_t gen = 0;
    int coherent = 0;
    out[0] = '\0';
    if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device_idx) != cudaSuccess)
        return;
    for (char *c = bus_id; *c != '\0'; c++)
        *c = *c >= 'A' && *c <= 'F' ? (char)(*c - 'A' + 'a') : *c;
    if (cudaDeviceGetAttribute(&coherent, cudaDevAttrHostNativeAtomicSupported, device_idx) == cudaSuccess &&
        coherent) {
        snprintf(out, bytes, "coherent (NVLink-C2C) at %s", bus_id);
        return;
    }
    read_line(bus_id, "max_link_speed", speed, sizeof speed);
    read_line(bus_id, "max_link_width", width, sizeof width);
    read_line(bus_id, "current_link_speed", now_speed, sizeof now_speed);
    read_line(bus_id, "current_link_width", now_width, sizeof now_width);
    while (gen < sizeof speeds / sizeof speeds[0] && strtod(speed, NULL) > speeds[gen])
        gen++;
    if (strtod(speed, NULL) > 0 && gen < sizeof speeds / sizeof speeds[0]) /* "Unknown", in some virtual machines */
        snprintf(out, bytes, "PCIe %d.0 x%s at %s, now x%s at %s", (int)gen + 1, width, bus_id, now_width, now_speed);
    else
        snprintf(out, bytes, "at %s, whose PCIe link the system does not describe", bus_id);
}

/* SPW_CUDA_HOPPER: 0 leaves a Hopper's own products out, for measurements. */
static void
use_hopper(cuda_gpu *gpu, const cudaDeviceProp *prop)
{
    const char *wanted = getenv("SPW_CUDA_HOPPER");
    gpu->hopper =
        spw__cuda_hopper_built && prop->major == 9 && prop->minor == 0 && (wanted == NULL || strcmp(wanted, "0") != 0);
}

static spw_status
cuda_open(spw_gpu **out, const spw_gpu_options *options, uint32_t device_idx, spw_error *err)
{
    spw_dtype compute;
    size_t free_bytes = 0, total = 0;
    char why[256] = "";
    cudaDeviceProp prop;
    cuda_gpu *gpu;
    cudaError_t e;
    int count = 0, pools = 0;
    *out = NULL;
    SPW_TRY(choose_compute(options->compute_dtype, &compute, err));
    SPW_TRY(find_device(&device_idx, options->turn, &prop, &count, err));
    gpu = (cuda_gpu *)spw_mem_zalloc(sizeof *gpu);
    if (gpu == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device");
    pthread_mutex_init(&gpu->lock, NULL);
    gpu->device_idx = (int)device_idx;
    /* Starts the context. Threads that wait for it sleep: the processors are the optimizer's. */
    e = cudaInitDevice((int)device_idx, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid);
    if (e == cudaSuccess)
        e = cudaSetDevice((int)device_idx);
    if (e == cudaSuccess)
        e = cudaMemGetInfo(&free_bytes, &total);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, (int)device_idx);
    if (spw__cuda_refused(e) != cudaSuccess) {
        pthread_mutex_destroy(&gpu->lock);
        spw_mem_free(gpu);
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "GPU %u does not start: %s", device_idx, cudaGetErrorString(e));
    }
    gpu->pools = pools != 0;
    gpu->blas = spw__cuda_blas_open(gpu, why, sizeof why);
    gpu->info.name = "cuda";
    gpu->info.description = gpu->description;
    gpu->info.compute_dtype = compute;
    gpu->info.host_addressable = false;
    gpu->info.memory_bytes = options->memory_bytes > 0 ? options->memory_bytes : spw__apart_limit_bytes(free_bytes);
    gpu->info.free_bytes = free_bytes;
    gpu->info.thread_count = 1;
    gpu->info.device_count = (uint32_t)count;
    gpu->info.loss_rows = SPW_APART_LOSS_ROWS;
    memcpy(gpu->info.id, &prop.uuid, sizeof gpu->info.id);
    snprintf(gpu->description, sizeof gpu->description, "%s, %d SMs, %llu MiB, sm_%d%d, %s, %s", prop.name,
             prop.multiProcessorCount, (unsigned long long)(total >> 20), prop.major, prop.minor,
             spw_dtype_name(gpu->info.compute_dtype), gpu->blas != NULL ? "cuBLASLt" : why);
    gpu->info.peak_flops = peak_flops(gpu->device_idx, &prop, compute);
    use_hopper(gpu, &prop);
    gpu->info.fp8 = prop.major * 10 + prop.minor >= 89 && compute != SPW_F16;
    gpu->info.link = gpu->link;
    describe_link(gpu->device_idx, gpu->link, sizeof gpu->link);
    gpu->base.calls = &spw__cuda_calls;
    *out = &gpu->base;
    return SPW_OK;
}

void
spw__cuda_close(spw_gpu *device)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    SPW_ASSERT(gpu->bytes_live == 0);
    spw__cuda_blas_close(gpu->blas);
    if (gpu->links != NULL)
        (void)cudaStreamDestroy(gpu->links);
    pthread_mutex_destroy(&gpu->lock);
    spw_mem_free(gpu);
}

const spw_gpu_info *
spw__cuda_get_info(const spw_gpu *gpu)
{
    return &((const cuda_gpu *)gpu)->info;
}

spw_status
spw__cuda_check(spw_gpu *device, spw_error *err)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    spw_status st;
    (void)spw__cuda_ok(gpu, cudaGetLastError(), "an earlier call");
    pthread_mutex_lock(&gpu->lock);
    st = gpu->first.status;
    if (st != SPW_OK && err != NULL)
        *err = gpu->first;
    pthread_mutex_unlock(&gpu->lock);
    return st;
}

/* ---------------------------------------------------------------- memory */

spw_status
spw__cuda_alloc(spw_gpu *device, void **out, uint64_t bytes, spw_error *err)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    uint64_t need = spw_round_up(bytes > 0 ? bytes : 1, 4096), live;
    cuda_block *block = (cuda_block *)spw_mem_zalloc(sizeof *block);
    cudaError_t e;
    bool fits;
    *out = NULL;
    if (block == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device block");
    pthread_mutex_lock(&gpu->lock);
    live = gpu->bytes_live;
    fits = need >= bytes && need <= gpu->info.memory_bytes && live <= gpu->info.memory_bytes - need;
    if (fits)
        gpu->bytes_live += need;
    pthread_mutex_unlock(&gpu->lock);
    if (!fits) {
        spw_mem_free(block);
        return SPW_RAISE(err, SPW_ENOMEM, "device cuda:%d: %llu bytes asked for, %llu of its limit of %llu in use",
                         gpu->device_idx, (unsigned long long)bytes, (unsigned long long)live,
                         (unsigned long long)gpu->info.memory_bytes);
    }
    e = spw__cuda_refused(cudaMalloc(&block->p, need));
    pthread_mutex_lock(&gpu->lock);
    if (e != cudaSuccess) {
        gpu->bytes_live -= need;
    } else {
        block->bytes = need;
        block->next = gpu->blocks;
        gpu->blocks = block;
        if (gpu->bytes_live > gpu->bytes_peak)
            gpu->bytes_peak = gpu->bytes_live;
    }
    pthread_mutex_unlock(&gpu->lock);
    if (e != cudaSuccess) {
        spw_mem_free(block);
        return SPW_RAISE(err, SPW_ENOMEM, "device cuda:%d: %llu bytes asked for, %llu live, limit %llu: %s",
                         gpu->device_idx, (unsigned long long)bytes, (unsigned long long)live,
                         (unsigned long long)gpu->info.memory_bytes, cudaGetErrorString(e));
    }
    *out = block->p;
    return SPW_OK;
}

void
spw__cuda_free(spw_gpu *device, void *p)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    cuda_block *block = NULL;
    if (p == NULL)
        return;
    pthread_mutex_lock(&gpu->lock);
    for (cuda_block **at = &gpu->blocks; *at != NULL; at = &(*at)->next) {
        if ((*at)->p == p) {
            block = *at;
            *at = block->next;
            gpu->bytes_live -= block->bytes;
            break;
        }
    }
    pthread_mutex_unlock(&gpu->lock);
    SPW_ASSERT(block != NULL);
    if (block != NULL)
        (void)spw__cuda_ok(gpu, cudaFree(p), "free");
    spw_mem_free(block);
}

uint64_t
spw__cuda_work_bytes(const spw_gpu *gpu)
{
    static_assert(sizeof(cuda_queue) <= SPW_APART_QUEUE_BYTES, "what a queue keeps is planned for");
    (void)gpu;
    return spw__apart_work_bytes();
}

uint64_t
spw__cuda_product_bytes(const spw_gpu *gpu, uint32_t thread_idx, uint64_t M, uint64_t N, uint64_t K)
{
    (void)gpu;
    (void)thread_idx;
    (void)M;
    (void)N;
    (void)K;
    return 0; /* products take no host memory */
}

uint64_t
spw__cuda_bytes_live(const spw_gpu *gpu)
{
    return __atomic_load_n(&((const cuda_gpu *)gpu)->bytes_live, __ATOMIC_RELAXED);
}

uint64_t
spw__cuda_bytes_peak(const spw_gpu *gpu)
{
    return __atomic_load_n(&((const cuda_gpu *)gpu)->bytes_peak, __ATOMIC_RELAXED);
}

spw_status
spw__cuda_pin_host(spw_gpu *device, void *base, uint64_t bytes, spw_error *err)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    /* Mapped: a kernel may count there (spw_gpu_update_state), which memory that is only pinned need not allow. */
    cudaError_t e = spw__cuda_refused(cudaHostRegister(base, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    (void)gpu;
    if (e == cudaSuccess || e == (cudaError_t)cudaErrorHostMemoryAlreadyRegistered)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ENOMEM, "%llu bytes of host memory could not be pinned for the GPU: %s",
                     (unsigned long long)bytes, cudaGetErrorString(e));
}

void
spw__cuda_unpin_host(spw_gpu *device, void *base)
{
    cuda_gpu *gpu = spw__cuda_enter((cuda_gpu *)device);
    if (base != NULL)
        (void)spw__cuda_ok(gpu, cudaHostUnregister(base), "unpinning host memory");
}

/* ---------------------------------------------------------------- kernels */

static cuda_kernel *kernels; /* written while the plugin is loaded */

cuda_kernel::cuda_kernel(const void *kernel) : fn(kernel), next(kernels)
{
    kernels = this;
}

void
spw__cuda_load_kernels(void)
{
    for (const cuda_kernel *k = kernels; k != NULL; k = k->next) {
        cudaFuncAttributes unused;
        (void)spw__cuda_refused(cudaFuncGetAttributes(&unused, k->fn)); /* who launches it will be told */
    }
}

/* ---------------------------------------------------------------- the table */

const spw_gpu_calls spw__cuda_calls = {SPW_GPU_ABI, cuda_open,
#define X(name) spw__cuda_##name,
                                       SPW_GPU_CALLS(X)
#undef X
                                           spw__cuda_update_state,
                                       spw__cuda_momentum};

extern "C" __attribute__((visibility("default"))) const spw_gpu_calls *spw_gpu_plugin(void);
const spw_gpu_calls *
spw_gpu_plugin(void)
{
    return &spw__cuda_calls;
}
