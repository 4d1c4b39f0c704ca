/*
 * The plan: which tier each chunk lives in, how many slots, and what everything costs, before a byte is taken. Pure
 * arithmetic. Here is its order: the device (plan_device.c), host memory (plan_host.c), activations, paths (plan_paths.c), and then what
 * that moves (plan_traffic.c); and the plans that are tried, with gradients on nvme or in memory, with updates ahead of the norm or not.
 */
#include "plan_internal.h"
#include <stdio.h>
#include <string.h>

static void
add_up(spw_plan *p, const plan_input *in, const plan_places *placed)
{
    uint64_t *weight[SPW_TIER_COUNT] = {&p->weight_device, &p->weight_host, &p->weight_nvme};
    uint64_t *record[SPW_TIER_COUNT] = {&p->record_device, &p->record_host, &p->record_nvme};
    for (int tier = 0; tier < SPW_TIER_COUNT; tier++) {
        *weight[tier] = placed->weights[tier];
        *record[tier] = placed->records[tier];
    }
    p->grad_host = plan_grad_host(p, in, placed);
    p->grad_nvme = placed->spilled * in->grad_bytes;
    p->grad_windows = placed->spilled > 0 ? in->grad_windows : 0;
    for (uint32_t i = 0; i < in->layout->chunk_count && in->ahead; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        if (!c->spare)
            continue;
        p->ahead = true;
        p->spare_nvme += plan_in_swap(in, c) + plan_undo(in, c);
        p->undo_write += plan_undo(in, c);
        p->spare_host += plan_log(in, c);
        p->spared_host += c->record_tier == SPW_TIER_HOST ? plan_record(in, c) : 0;
    }
    for (uint32_t i = 0; i < in->layout->chunk_count && in->config->zero.offload_param == SPW_TIER_NVME; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        if (c->piece_count > 0 && c->weight_tier == SPW_TIER_NVME)
            p->weight_in_place += plan_weights(in, c);
    }
}

/* What is away from the device is all the host's yet. */
static bool
misses(const spw_plan *p, const plan_input *in, uint32_t first_count)
{
    return p->activation_count[SPW_TIER_HOST] > in->trial->away || (p->single_grad && !in->trial->single_grad) ||
           (in->trial->has_state && p->trained_device == 0) ||
           (p->cache_device < in->trial->gathered && !spw__plan_fetches_ahead(p, in, first_count));
}

/* More host memory than this machine has left. */
static spw_status
raise_no_room(spw_plan *p, const plan_input *in, spw_error *err)
{
    char need[32], room[32], apart[32], each[40] = "";
    if (in->local_ranks > 1)
        snprintf(each, sizeof each, " for each of %u ranks", in->local_ranks);
    p->lack = SPW_LACK_ROOM;
    p->least_bytes = p->host_bytes + (in->device_in_host ? p->device_bytes : 0);
    spw_format_bytes(need, sizeof need, p->host_bytes);
    if (!in->inference && in->device_in_host && p->device_bytes > p->host_bytes)
        return SPW_RAISE(err, SPW_ENOFIT,
                         "the plan takes %s for the device, which is host memory on the cpu, and %s besides; this "
                         "machine (or its cgroup, or ulimit -v or -d) has %s left%s: fewer sequences in a "
                         "micro-batch (train_micro_batch_size_per_gpu, and more gradient_accumulation_steps) or a "
                         "smaller data.seq_length lower it",
                         spw_format_bytes(apart, sizeof apart, p->device_bytes), need,
                         in->room_bytes > 1 ? spw_format_bytes(room, sizeof room, in->room_bytes) : "nothing", each);
    return SPW_RAISE(
        err, SPW_ENOFIT,
        "the plan takes %s (%llu bytes) of host memory, and this machine (or its cgroup, or ulimit -v or -d) "
        "has room for %s beside the device's memory%s; %s it",
        need, (unsigned long long)p->host_bytes, spw_format_bytes(room, sizeof room, spw__plan_host_room(p, in)), each,
        in->inference ? "a smaller --host-memory, and weights on nvme or as codes (--nvme, --codes), lower"
                      : "a smaller spillway.host_memory, spillway.chunk_elems or offloading to nvme lowers");
}

static spw_status
plan_once(spw_plan *p, const plan_input *in, spw_error *err)
{
    spw_error device = {0};
    plan_places placed;
    uint32_t first_count;
    spw_status st;
    memset(p, 0, sizeof *p);
    p->params = in->layout->params;
    p->elems = in->layout->elems;
    p->trained = spw__layout_trained(in->layout);
    p->tokens = in->tokens;
    p->passes = in->passes;
    p->gated = !in->inference && !spw__plan_early_gate(in);
    p->clips = p->gated && in->config->gradient_clipping > 0;
    p->late = !in->inference && in->config->run.delayed_update > 0;
    p->flops = in->flops + in->twice_flops + in->orthogonal_flops;
    p->orthogonal_flops = in->orthogonal_flops;
    p->attention_flops = in->attention_flops;
    p->model_flops = in->flops - in->recompute_flops;
    p->device_apart = !in->device_in_host;
    p->cpu_ranks = in->cpu_ranks;
    p->device_ranks = in->device_ranks;
    spw__plan_paths(p, in);
    (void)spw__plan_device(p, in, &first_count,
                           &device); /* first: how often weights are read depends on what the device holds */
    if (in->trial != NULL && (device.status != SPW_OK || misses(p, in, first_count))) {
        p->lack = SPW_LACK_DEVICE;
        return SPW_ENOFIT;
    }
    spw__plan_place_all(in, first_count);
    placed = spw__plan_count_placed(in, first_count);
    st = spw__plan_host(p, in, &placed, err);
    if (st == SPW_OK)
        spw__plan_logs(p, in, &placed);
    add_up(p, in, &placed);
    spw__plan_activations_place(p, in);
    if (!plan_on_nvme(in->config) && p->activation_count[SPW_TIER_NVME] == 0)
        p->path_count = 0; /* they are there and not needed */
    if (st == SPW_OK && p->path_count > 0) {
        st = spw__plan_spread(p, in, err);
        p->lack = st == SPW_ENOFIT ? SPW_LACK_DISK : SPW_LACK_NOTHING;
    }
    if (st == SPW_OK && device.status != SPW_OK) {
        spw_error_keep_first(err, &device);
        st = device.status;
        p->lack = SPW_LACK_DEVICE;
        p->least_bytes = spw__plan_device_least(p, in, first_count);
    }
    p->tables_arena = in->stage_bytes + placed.padding[SPW_TIER_HOST];
    p->tables_host += placed.padding[SPW_TIER_HOST];
    p->host_bytes = p->process_host + p->tables_host + p->grad_host + p->wire_host + p->kept_host + p->slots_host +
                    p->activations_host + p->weight_host + p->record_host + p->spare_host;
    if (st == SPW_OK) {
        spw__plan_tapes(p, in);
        spw__plan_gather_more(p, in, first_count);
    }
    if (st == SPW_OK && p->host_bytes > spw__plan_host_room(p, in))
        st = raise_no_room(p, in, err);
    if (st == SPW_OK && in->use_count > 0 && !in->inference && !in->uncounted)
        st = spw__plan_traffic(p, in, err);
    if (in->trial == NULL && !in->unexplained)
        spw__plan_explain(p, in);
    return st;
}

/* The device has what such a host leaves, with the slots that it wants, of seven eighths of its room, or with the fewest. */
static spw_status
plan_beside(spw_plan *p, const plan_input *in, uint64_t room, uint64_t host)
{
    const uint64_t wanted[] = {(host + PLAN_USEFUL_BYTES) / 7 * 8, host};
    spw_status st = SPW_ENOFIT;
    plan_input own = *in;
    for (int k = 0; k < 2 && st == SPW_ENOFIT; k++) {
        own.device_room = room > wanted[k] ? room - wanted[k] : 0;
        if (own.device_room > 0)
            st = plan_once(p, &own, NULL);
    }
    return st;
}

/*
 * A device whose memory is the host's takes as much as is useful. Where there is no room for that, it gathers less; and then checkpoints of
 * activations leave it, too.
 */
static spw_status
make_plan(spw_plan *p, const plan_input *in, spw_error *err)
{
    const uint64_t room = in->process_bytes + in->room_bytes;
    spw_error first = {0};
    spw_status st = plan_once(p, in, &first);
    if (st == SPW_ENOFIT && p->lack == SPW_LACK_ROOM && in->device_in_host &&
        in->config->run.device_memory == SPW_AUTO) {
        plan_input own = *in;
        uint64_t least;
        st = plan_beside(p, in, room, p->host_bytes);
        if (st == SPW_OK)
            return SPW_OK;
        own.device_room = 1;
        (void)plan_once(p, &own, NULL);
        least = p->lack == SPW_LACK_DEVICE ? p->host_bytes + p->least_bytes : UINT64_MAX;
        if (least <= room && plan_beside(p, in, room, p->host_bytes) == SPW_OK)
            return SPW_OK;
        st = plan_once(p, in, NULL);
        p->least_bytes = p->least_bytes < least ? p->least_bytes : least;
    }
    if (st != SPW_OK && err != NULL)
        *err = first;
    return st;
}

/* The norm decides something, and what it decides can be undone where the state is. Who counts writes wants none in vain. */
static bool
may_go_ahead(const plan_input *in)
{
    const spw_config *c = in->config;
    return !in->inference && c->zero.offload_optimizer != SPW_TIER_DEVICE && !spw__plan_early_gate(in) &&
           c->run.delayed_update == 0 && strcmp(c->run.update_ahead, "never") != 0 &&
           (c->run.write_budget == 0 || !plan_on_nvme(c) || strcmp(c->run.update_ahead, "always") == 0);
}

/* With second places for state that is offloaded, if all on nvme fits so. */
static spw_status
plan_ahead(spw_plan *p, plan_input *in, spw_error *err)
{
    spw_error refused = {0};
    in->ahead = may_go_ahead(in);
    if (in->ahead) {
        spw_status st = make_plan(p, in, &refused);
        if (st == SPW_OK && spw__plan_disks_have_room(p, in))
            return SPW_OK;
        if (st != SPW_OK && st != SPW_ENOFIT && err != NULL)
            *err = refused;
        if (st != SPW_OK && st != SPW_ENOFIT)
            return st;
    }
    in->ahead = false;
    return make_plan(p, in, err);
}

static bool
lacks_host(spw_status st, const spw_plan *p)
{
    return st == SPW_ENOFIT && (p->lack == SPW_LACK_HOST || p->lack == SPW_LACK_ROOM);
}

/* Gradients wait on nvme: there they go through two windows, of which one is filled while the other leaves, or through one where there is no room for two. */
static spw_status
plan_spilling(spw_plan *p, plan_input *in, spw_error *err)
{
    spw_status st;
    in->spill = true;
    in->grad_windows = 2;
    st = plan_ahead(p, in, err);
    if (!lacks_host(st, p))
        return st;
    in->grad_windows = 1;
    return plan_ahead(p, in, err);
}

/* Gradients that are to wait where there is room do so in host memory, unless that alone does not hold the plan. */
spw_status
spw__plan_make(spw_plan *p, const plan_input *in, spw_error *err)
{
    const spw_config *c = in->config;
    plan_input own = *in;
    bool possible = !in->inference && c->zero.offload_optimizer == SPW_TIER_NVME && c->run.delayed_update == 0;
    spw_error first = {0}, second = {0};
    spw_status st;
    if (possible && strcmp(c->run.gradients, "nvme") == 0)
        return plan_spilling(p, &own, err);
    st = plan_ahead(p, &own, &first);
    if (lacks_host(st, p) && possible && in->passes == 1 && strcmp(c->run.gradients, "auto") == 0) {
        st = plan_spilling(p, &own, &second);
        if (p->lack != SPW_LACK_DISK) { /* what is lacking now is lacking either way */
            first = second;
        } else {
            own.spill = false;
            st = plan_ahead(p, &own, &second);
        }
    }
    if (st != SPW_OK && err != NULL)
        *err = first;
    return st;
}
