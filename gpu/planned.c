/*
 * A device that is not here, to plan for: it says of itself what the cuda device would, has queues and events, and neither memory nor
 * operations. What a plan asks a device for is all that it has.
 */
#include "gpu_internal.h"
#include <stdio.h>
#include <string.h>

/*
 * From NVIDIA's data sheets: operations per second without sparsity, in bf16 with fp32 sums, and in fp32 without tensor cores. Memory is what
 * nvidia-smi says. Links are what large copies from pinned memory get out of 16 lanes: 44 GB/s of generation 5 (docs/performance.md), and in
 * proportion 22 of generation 4; between such devices half of that, for it comes and goes over them, or three quarters of what NVLink has one way.
 */
static const spw_gpu_spec specs[] = {
    {"a100-40gb", "NVIDIA A100 SXM 40GB", 40960ull << 20, 80, 312e12, 19.5e12, 22e9, 225e9},
    {"a100-80gb", "NVIDIA A100 SXM 80GB", 81920ull << 20, 80, 312e12, 19.5e12, 22e9, 225e9},
    {"h100", "NVIDIA H100 SXM 80GB", 81559ull << 20, 90, 989e12, 67e12, 44e9, 337e9},
    {"h100-pcie", "NVIDIA H100 PCIe 80GB", 81559ull << 20, 90, 756e12, 51e12, 44e9, 22e9},
    {"h200", "NVIDIA H200 141GB", 143771ull << 20, 90, 989e12, 67e12, 44e9, 337e9},
    {"b200", "NVIDIA B200 180GB", 183359ull << 20, 100, 2250e12, 75e12, 44e9, 675e9},
    {"l4", "NVIDIA L4 24GB", 23034ull << 20, 89, 121e12, 30.3e12, 22e9, 11e9},
    {"l40s", "NVIDIA L40S 48GB", 46068ull << 20, 89, 362e12, 91.6e12, 22e9, 11e9},
    {"a10", "NVIDIA A10 24GB", 23028ull << 20, 86, 125e12, 31.2e12, 22e9, 11e9},
    {"a6000", "NVIDIA RTX A6000 48GB", 49140ull << 20, 86, 155e12, 38.7e12, 22e9, 11e9},
    {"rtx3090", "NVIDIA GeForce RTX 3090 24GB", 24576ull << 20, 86, 71e12, 35.6e12, 22e9, 11e9},
    {"rtx4090", "NVIDIA GeForce RTX 4090 24GB", 24564ull << 20, 89, 165e12, 82.6e12, 22e9, 11e9},
    {"rtx5090", "NVIDIA GeForce RTX 5090 32GB", 32607ull << 20, 120, 209e12, 104.8e12, 44e9, 22e9},
};

const spw_gpu_spec *
spw_gpu_get_specs(uint32_t *count)
{
    *count = sizeof specs / sizeof specs[0];
    return specs;
}

/* What the driver and its context take of a device, by what an H100 and an H200 had left. */
static const uint64_t CONTEXT_BYTES = 576ull << 20;

typedef struct planned {
    spw_gpu base;
    spw_gpu_info info;
    char description[160];
} planned;

static void
planned_close(spw_gpu *gpu)
{
    spw_mem_free(gpu);
}

static const spw_gpu_info *
planned_get_info(const spw_gpu *gpu)
{
    return &((const planned *)gpu)->info;
}

static spw_status
planned_check(spw_gpu *gpu, spw_error *err)
{
    (void)gpu;
    (void)err;
    return SPW_OK;
}

static spw_status
planned_alloc(spw_gpu *gpu, void **out, uint64_t bytes, spw_error *err)
{
    *out = NULL;
    return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: it is planned for, and not here: no %llu bytes of it",
                     ((planned *)gpu)->description, (unsigned long long)bytes);
}

static void
planned_free(spw_gpu *gpu, void *p)
{
    (void)gpu;
    (void)p;
}

static uint64_t
planned_work_bytes(const spw_gpu *gpu)
{
    (void)gpu;
    return spw__apart_work_bytes();
}

static uint64_t
planned_product_bytes(const spw_gpu *gpu, uint32_t thread_idx, uint64_t M, uint64_t N, uint64_t K)
{
    (void)gpu, (void)thread_idx, (void)M, (void)N, (void)K;
    return 0;
}

static uint64_t
planned_bytes(const spw_gpu *gpu)
{
    (void)gpu;
    return 0;
}

static spw_status
planned_queue_create(spw_gpu_queue **out, spw_gpu *gpu, spw_gpu_queue_kind kind, spw_error *err)
{
    (void)kind;
    *out = spw_mem_zalloc(sizeof **out);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "queue");
    (*out)->calls = gpu->calls;
    return SPW_OK;
}

static void
planned_queue_destroy(spw_gpu_queue *queue)
{
    spw_mem_free(queue);
}

static void
planned_queue_sync(spw_gpu_queue *queue)
{
    (void)queue;
}

static spw_status
planned_event_create(spw_gpu_event **out, spw_gpu *gpu, spw_error *err)
{
    *out = spw_mem_zalloc(sizeof **out);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "event");
    (*out)->calls = gpu->calls;
    return SPW_OK;
}

static void
planned_event_destroy(spw_gpu_event *event)
{
    spw_mem_free(event);
}

/* As many as ranks, and NCCL: what several such devices would have. */
static spw_status
planned_link_probe(spw_gpu *gpu, spw_error *err)
{
    (void)gpu;
    (void)err;
    return SPW_OK;
}

static const spw_gpu_calls planned_calls = {
    .abi = SPW_GPU_ABI,
    .close = planned_close,
    .get_info = planned_get_info,
    .check = planned_check,
    .alloc = planned_alloc,
    .free = planned_free,
    .work_bytes = planned_work_bytes,
    .product_bytes = planned_product_bytes,
    .bytes_live = planned_bytes,
    .bytes_peak = planned_bytes,
    .queue_create = planned_queue_create,
    .queue_destroy = planned_queue_destroy,
    .queue_sync = planned_queue_sync,
    .event_create = planned_event_create,
    .event_destroy = planned_event_destroy,
    .link_probe = planned_link_probe,
};

spw_status
spw__planned_open(spw_gpu **out, const spw_gpu_options *options, spw_error *err)
{
    const spw_gpu_spec *spec = options->planned;
    const uint64_t free_bytes = spec->memory_bytes - CONTEXT_BYTES;
    planned *p = spw_mem_zalloc(sizeof *p);
    *out = NULL;
    if (p == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "device");
    snprintf(p->description, sizeof p->description, "%s, %llu MiB, sm_%u, %s, planned for", spec->title,
             (unsigned long long)(spec->memory_bytes >> 20), spec->capability, spw_dtype_name(options->compute_dtype));
    p->base.calls = &planned_calls;
    p->info = (spw_gpu_info){
        .name = "cuda",
        .description = p->description,
        .compute_dtype = options->compute_dtype,
        .memory_bytes = options->memory_bytes > 0 ? options->memory_bytes : spw__apart_limit_bytes(free_bytes),
        .free_bytes = free_bytes,
        .thread_count = 1,
        .device_count = UINT32_MAX,
        .loss_rows = SPW_APART_LOSS_ROWS,
        .peak_flops = options->compute_dtype == SPW_F32 ? spec->single_flops : spec->half_flops,
        .link = "",
        .fp8 = spec->capability >= 89 && options->compute_dtype != SPW_F16,
    };
    *out = &p->base;
    return SPW_OK;
}
