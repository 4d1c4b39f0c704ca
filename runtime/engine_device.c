/*
 * The device that an engine computes on: opened as the configuration says, or the cpu device where that one cannot do what is asked, and
 * what of the state it may hold. How much of it is the plan's to say.
 */
#include "engine_internal.h"
#include <stdio.h>

/*
 * What state a device whose memory the host cannot address may hold. Updates run where a record is, and need the weights there:
 * all of the state is on the device, or none of it. Weights on the device with records elsewhere, ZeRO-Offload, are weights that
 * are kept with their records and gathered on the device once per update. Between ranks this is said of each one's part. Of
 * records that are offloaded the plan may put some there all the same (plan_device.c), with their weights.
 */
static spw_status
settle_state(spw_engine *e, spw_error *err)
{
    spw_config *c = &e->config;
    const char *name = spw_gpu_get_info(e->gpu)->name;
    bool weights, records, some;
    weights = c->zero.offload_param == SPW_TIER_DEVICE;
    records = c->zero.offload_optimizer == SPW_TIER_DEVICE && !e->inference;
    if (records && !weights)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "optimizer state on device %s and weights elsewhere: updates run where the records are, and "
                         "need the weights there; set zero_optimization.offload_optimizer.device to cpu (or nvme), or "
                         "offload_param.device to none",
                         name);
    some = !e->inference && (records || c->zero.optimizer_ratio < 1 ||
                             (strcmp(c->run.fill_device, "always") == 0 && e->optimizer->rule == NULL));
    if (some && e->optimizer->rule != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "optimizer %s on device %s: it is a function of the host's; set "
                         "zero_optimization.offload_optimizer.device to cpu (or nvme), and its ratio to 1",
                         e->optimizer->name, name);
    e->device_updates = some;
    e->gather_all = weights && !records && !e->inference;
    if (e->gather_all)
        c->zero.offload_param = SPW_TIER_HOST;
    return SPW_OK;
}

static void
note_device(spw_engine *e)
{
    e->compute_dtype = spw_gpu_get_info(e->gpu)->compute_dtype;
    e->compute_bytes = spw_dtype_bytes(e->compute_dtype);
    e->host_addressable = spw_gpu_get_info(e->gpu)->host_addressable;
}

static spw_status
check_fp8(const spw_engine *e, spw_error *err)
{
    const spw_gpu_info *gpu = spw_gpu_get_info(e->gpu);
    if (!e->config.run.fp8 || e->inference || gpu->fp8)
        return SPW_OK;
    return SPW_RAISE(
        err, SPW_EUNSUPPORTED,
        "spillway.fp8 on device %s (%s): products of 8-bit floats need compute capability 8.9 (Ada, Hopper "
        "or Blackwell), and bf16",
        gpu->name, gpu->description);
}

spw_status
spw__open_device(spw_engine *e, spw_gpu_options *options, spw_error *err)
{
    spw_error why = {0};
    SPW_TRY(spw_gpu_open(&e->gpu, options, err));
    note_device(e);
    if (e->host_addressable || (check_fp8(e, &why) == SPW_OK && settle_state(e, &why) == SPW_OK))
        return SPW_OK;
    if (strcmp(e->config.run.device, "auto") != 0) {
        spw_error_keep_first(err, &why);
        return why.status;
    }
    spw_log(SPW_LOG_WARN, "spillway.device auto: the cpu device computes, because of %s", why.message);
    spw_gpu_close(e->gpu);
    options->name = "cpu";
    SPW_TRY(spw_gpu_open(&e->gpu, options, err));
    note_device(e);
    return SPW_OK;
}

void
spw__bound_device(spw_engine *e, bool tell)
{
    const uint64_t there = spw_gpu_get_info(e->gpu)->free_bytes / e->device_sharers;
    uint64_t *budget = &e->config.run.device_memory;
    char asked[32], left[32];
    if (there == 0 || *budget == SPW_AUTO || *budget <= there)
        return;
    if (tell)
        spw_log(SPW_LOG_WARN, "spillway.device_memory is %s, and the device has %s left%s: so much is counted on",
                spw_format_bytes(asked, sizeof asked, *budget), spw_format_bytes(left, sizeof left, there),
                e->device_sharers > 1 ? " for each rank" : "");
    e->device_asked = *budget;
    *budget = there / 4096 * 4096;
}

/* ---------------------------------------------------------------- those of all ranks */

/* What a rank computes on. */
typedef struct device_word {
    int32_t in_host, compute_dtype;
    uint32_t machine;
    unsigned char id[sizeof((spw_gpu_info *)0)->id];
    char name[24];
} device_word;

static device_word
word_of(const spw_comm *comm, const spw_gpu_info *gpu)
{
    device_word w = {.in_host = gpu->host_addressable,
                     .compute_dtype = (int32_t)gpu->compute_dtype,
                     .machine = spw_comm_get_info(comm)->machine};
    memcpy(w.id, gpu->id, sizeof w.id);
    snprintf(w.name, sizeof w.name, "%s", gpu->name);
    return w;
}

/* Weights and gradients pass between devices as they are. */
static spw_status
check_alike(const device_word *all, uint32_t world, spw_error *err)
{
    for (uint32_t r = 1; r < world; r++) {
        if (all[r].in_host != all[0].in_host || all[r].compute_dtype != all[0].compute_dtype)
            return SPW_RAISE(err, SPW_ECONFIG,
                             "rank %u computes on device %s in %s, rank 0 on device %s in %s: ranks train together on "
                             "devices of one kind (spillway.device; spillway doctor says what a host has)",
                             r, all[r].name, spw_dtype_name((spw_dtype)all[r].compute_dtype), all[0].name,
                             spw_dtype_name((spw_dtype)all[0].compute_dtype));
    }
    return SPW_OK;
}

/* Ranks that compute on the device of one of them. */
static uint32_t
count_on(const device_word *all, uint32_t world, const device_word *device)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < world; r++)
        n += all[r].machine == device->machine && !all[r].in_host &&
             memcmp(all[r].id, device->id, sizeof device->id) == 0;
    return n;
}

/* The first rank of a machine says that some of its ranks share a GPU, because it seldom is what was meant. */
static void
tell_sharing(const device_word *all, const spw_comm_info *info)
{
    uint32_t devices = 0, most = 1;
    for (uint32_t r = 0; r < info->world && info->machine_rank == 0; r++) {
        const uint32_t n = all[r].machine == info->machine ? count_on(all, info->world, &all[r]) : 0;
        most = n > most ? n : most;
        devices += n > 0 && count_on(all, r, &all[r]) == 0;
    }
    if (most > 1)
        spw_log(SPW_LOG_WARN,
                "%u ranks of this host share %u GPU%s: up to %u compute and have their memory on one, in turns",
                info->machine_world, devices, devices > 1 ? "s" : "", most);
}

spw_status
spw__devices_compare(spw_engine *e, spw_error *err)
{
    const device_word own = word_of(e->comm, spw_gpu_get_info(e->gpu));
    void *all;
    spw_status st = spw__ranks_hear(e->comm, "devices", &own, &all, sizeof own, err);
    if (st == SPW_OK)
        st = check_alike(all, e->world, err);
    if (st == SPW_OK && !e->host_addressable) {
        e->device_sharers = count_on(all, e->world, &own);
        tell_sharing(all, spw_comm_get_info(e->comm));
    }
    spw_mem_free(all);
    return st;
}

spw_status
spw_engine_device_ranks(uint32_t *out, const spw_config *config, spw_comm *comm, spw_error *err)
{
    const spw_gpu_options options = {.name = config->run.device,
                                     .thread_count = 1,
                                     .compute_dtype = spw__config_compute(config),
                                     .turn = spw_comm_get_info(comm)->machine_rank};
    const uint32_t world = spw_comm_get_info(comm)->world;
    device_word own = {.in_host = 1}; /* what keeps it from being opened, the engine will say */
    spw_gpu *gpu = NULL;
    void *all;
    spw_status st;
    if (spw_gpu_open(&gpu, &options, NULL) == SPW_OK)
        own = word_of(comm, spw_gpu_get_info(gpu));
    spw_gpu_close(gpu);
    st = spw__ranks_hear(comm, "devices", &own, &all, sizeof own, err);
    *out = st != SPW_OK || own.in_host ? 1 : count_on(all, world, &own);
    spw_mem_free(all);
    return st;
}

uint32_t
spw__guess_sharers(const spw_engine *e)
{
    const spw_gpu_info *gpu = spw_gpu_get_info(e->gpu);
    const uint32_t devices = strchr(e->config.run.device, ':') != NULL ? 1 : gpu->device_count;
    return e->host_addressable ? 1 : e->local_world / devices + (e->local_world % devices > 0);
}
