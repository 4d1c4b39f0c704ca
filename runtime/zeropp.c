/*
 * ZeRO++ (Wang et al. 2023): which of its savings are on between these ranks; and MiCS (Zhang et al. 2022), which cuts state among
 * fewer ranks than there are. How they are made is wire_weights.c's and wire_grads.c's; here is what the configuration and
 * the places of the ranks say about it, the same on every rank.
 */
#include "engine_internal.h"
#include "quant.h"

/* Groups of MiCS whose weights are to come once to each host. */
static bool
wants_by_host(const spw_engine *e)
{
    return e->config.zero.mics_by_host && e->config.zero.mics_shard_size > 1 && e->layout.parts > 1;
}

uint32_t
spw__host_of(const spw_engine *e, uint32_t rank)
{
    return e->comm != NULL ? spw_comm_host_of(e->comm, rank) : rank / e->local_world;
}

static uint32_t
count_hosts(const spw_engine *e)
{
    return e->comm != NULL ? spw_comm_get_info(e->comm)->host_count : (e->world + e->local_world - 1) / e->local_world;
}

/* Sums inside a host are of parts that lie in a row. */
static spw_status
check_hosts(const spw_engine *e, spw_error *err)
{
    uint32_t count = count_hosts(e);
    bool even = e->world % count == 0;
    for (uint32_t r = 0; r < e->world; r++)
        even = even && spw__host_of(e, r) == r / e->zeropp.host_ranks;
    return even ? SPW_OK
                : SPW_RAISE(err, SPW_ECONFIG,
                            "zero_optimization.zero_quantized_gradients needs as many ranks on every host, in a row; "
                            "these %u ranks are on %u hosts in another way",
                            e->world, count);
}

static spw_status
check_groups(const spw_engine *e, spw_error *err)
{
    uint32_t group = e->zeropp.group;
    for (uint32_t r = 0; r < e->world; r++) {
        if (spw__host_of(e, r) != spw__host_of(e, r / group * group))
            return SPW_RAISE(
                err, SPW_ECONFIG,
                "zero_optimization.zero_hpz_partition_size %u: ranks %u and %u would keep weights together "
                "and are on different hosts",
                group, r / group * group, r);
    }
    return SPW_OK;
}

/* Where MiCS' groups are on several hosts: can weights come once to each? */
static void
settle_by_host(spw_engine *e)
{
    const uint32_t parts = e->layout.parts;
    uint32_t near = 1;
    bool even;
    while (near < parts && spw__host_of(e, near) == spw__host_of(e, 0))
        near++;
    even = parts % near == 0;
    for (uint32_t r = 0; r < e->world && even; r++)
        even = spw__host_of(e, r) == spw__host_of(e, r / near * near) &&
               (r % parts < near || spw__host_of(e, r) != spw__host_of(e, r - near));
    if (!even)
        e->zeropp.flat = "a group's hosts have differently many of its ranks, or not in a row";
    else if (near == parts)
        e->zeropp.flat = "the ranks of a group are on one host, and read each other's parts where they lie";
    else if (near == 1)
        e->zeropp.flat = "no two ranks of a group are on one host";
    e->zeropp.by_host = e->zeropp.flat == NULL ? near : 0;
}

spw_status
spw__zeropp_parts(const spw_engine *e, uint32_t *out, spw_error *err)
{
    const spw_config *c = &e->config;
    uint32_t shard = c->zero.stage == 3 && c->zero.mics_shard_size > 0 ? (uint32_t)c->zero.mics_shard_size : e->world;
    *out = 1;
    if (e->world == 1 || c->zero.stage == 0)
        return SPW_OK;
    if (e->world % shard != 0)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "zero_optimization.mics_shard_size %u does not divide the %u ranks into groups", shard,
                         e->world);
    *out = shard;
    return SPW_OK;
}

/* Kept slices and sums of hosts are of all ranks' parts. */
static spw_status
check_shards(const spw_config *c, spw_error *err)
{
    if (c->zero.hpz_partition_size > 1)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "zero_optimization.mics_shard_size %d and zero_hpz_partition_size %u: a group has all parts and "
            "gathers them from itself, nothing is to be kept",
            c->zero.mics_shard_size, c->zero.hpz_partition_size);
    if (c->zero.quantized_gradients)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "zero_optimization.mics_shard_size %d and zero_quantized_gradients: groups add up their "
                         "gradients in fp32; one of the two, please",
                         c->zero.mics_shard_size);
    return SPW_OK;
}

spw_status
spw__zeropp_settle(spw_engine *e, spw_error *err)
{
    const spw_config *c = &e->config;
    const uint32_t hosts = count_hosts(e);
    e->zeropp.group = 1;
    if (e->world > 1 && c->zero.stage == 3 && c->zero.mics_shard_size > 0)
        SPW_TRY(check_shards(c, err));
    e->zeropp.shard = e->layout.parts > 1 && e->layout.parts < e->world ? e->layout.parts : 0;
    if (e->layout.parts == 1 || c->zero.stage < 3)
        return SPW_OK;
    e->zeropp.weights = c->zero.quantized_weights;
    e->zeropp.frozen = c->zero.quantized_frozen && spw__layout_trained(&e->layout) < e->layout.elems && !e->inference;
    if (c->zero.hpz_partition_size > 1)
        e->zeropp.group = c->zero.hpz_partition_size;
    if (e->world % e->zeropp.group != 0)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "zero_optimization.zero_hpz_partition_size %u does not divide the %u ranks into groups",
                         e->zeropp.group, e->world);
    if (c->zero.quantized_gradients && c->comm_dtype != SPW_F32)
        return SPW_RAISE(
            err, SPW_ECONFIG,
            "zero_optimization.zero_quantized_gradients and communication_data_type %s: what goes from host "
            "to host is 4-bit codes, and sums inside a host are fp32's",
            spw_dtype_name(c->comm_dtype));
    e->zeropp.grads = c->zero.quantized_gradients && hosts > 1 && !e->inference;
    e->zeropp.host_ranks = (e->world + hosts - 1) / hosts;
    if (e->zeropp.group > 1)
        SPW_TRY(check_groups(e, err));
    if (wants_by_host(e))
        settle_by_host(e);
    return e->zeropp.grads ? check_hosts(e, err) : SPW_OK;
}

void
spw__zeropp_tell(spw_engine *e, bool plan_only)
{
    const char *why = e->zeropp.flat;
    if (!e->config.zero.mics_by_host)
        return;
    if (!wants_by_host(e))
        why = "there are no groups of zero_optimization.mics_shard_size ranks";
    else if (e->linked)
        why = "NCCL, which links the devices, finds its own ways";
    if (why == NULL)
        return;
    e->zeropp.by_host = 0;
    if (e->rank == 0 && !plan_only)
        spw_log(SPW_LOG_WARN, "zero_optimization.mics_hierarchical_params_gather has no effect here: %s", why);
}

bool
spw__zeropp_coded(const spw_engine *e, uint32_t unit_idx)
{
    return e->zeropp.weights || (e->zeropp.frozen && !e->layout.units[unit_idx].trainable);
}

uint64_t
spw__zeropp_kept_bytes(const spw_engine *e, uint32_t unit_idx)
{
    uint64_t slice = spw_layout_whole(&e->layout, unit_idx) / e->zeropp.group;
    if (e->zeropp.group == 1)
        return 0;
    return spw__zeropp_coded(e, unit_idx) ? spw__quant_bytes(SPW_QUANT_INT8, slice) : slice * e->compute_bytes;
}
