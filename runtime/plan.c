/*
 * The plan: which tier each chunk lives in, how many slots, and what everything costs, before a byte is taken. Pure
 * arithmetic. What must be in host memory comes first (gradients, the smallest slots), then slots up to a useful number,
 * then chunks by the seconds that a byte in host memory saves per step, until the budget is used.
 *
 * That order needs no measured rate. A byte of weights saves reads / R + 1 / W seconds on a disk that reads R and writes
 * W bytes per second, a byte of a record 1 / R + 1 / W: which is more depends on the number of reads alone, and that
 * comes from a rehearsal with all of them on nvme. So the order is weights that are read again and again, then records,
 * then weights that the slots hold anyway; and a measurement that wobbles moves nothing.
 */
#include "plan_internal.h"
#include <stdio.h>

const double spw_paces[SPW_PACE_COUNT] = {0, 0.5, 1, 2, 4, 8, 16};

/*
 * Slots keep transfers going while updates and passes take turns: at least so many, and with host_memory auto so many bytes,
 * because during the backward pass only records that have a slot can be read ahead. Within a budget a chunk that stays in
 * host memory saves as much time as a slot does, and writes nothing.
 */
enum {
    USEFUL_WEIGHT_SLOTS = 8,
    USEFUL_RECORD_SLOTS = 8,
    GRAD_WINDOWS = 2, /* one is filled while the other leaves */
    USEFUL_WEIGHT_BYTES = 64 << 20,
    USEFUL_RECORD_BYTES = 256 << 20
};

uint64_t
spw__plan_largest_chunk(const spw_layout *l)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < l->chunk_count; i++)
        largest = l->chunks[i].elems > largest ? l->chunks[i].elems : largest;
    return largest;
}

uint64_t
spw__plan_largest_trained(const spw_layout *l)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < l->chunk_count; i++) {
        if (l->units[l->chunks[i].unit_idx].trainable && l->chunks[i].elems > largest)
            largest = l->chunks[i].elems;
    }
    return largest;
}

/* Bytes of the largest weights that any chunk may have on nvme. */
static uint64_t
largest_weights(const plan_input *in)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        uint64_t bytes = plan_weights(in, &in->layout->chunks[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

uint64_t
spw__plan_slot_weights(const plan_input *in)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        uint64_t bytes = c->weight_tier == SPW_TIER_NVME ? plan_weights(in, c) : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

uint64_t
spw__plan_slot_record(const plan_input *in)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        bool there = c->record_tier == SPW_TIER_NVME && plan_has_record(in, c);
        uint64_t bytes = there ? plan_record_room(in, c->elems) + plan_spilled(in, c) + plan_undo(in, c) : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* ---------------------------------------------------------------- placement */

/* Chunks of one kind on nvme move to host memory, those whose weights are read from least to most times, while they fit. */
static void
fill_host(const plan_input *in, bool records, const uint32_t *reads, uint32_t least, uint32_t most, uint64_t *left)
{
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        spw_store_chunk *c = &in->layout->chunks[i];
        spw_tier *tier = records ? &c->record_tier : &c->weight_tier;
        uint64_t bytes = records ? plan_record_room(in, c->elems) : plan_weights(in, c);
        if (records && in->layout->units[c->unit_idx].spills)
            continue; /* its gradient comes back to the record's slot */
        if (*tier == SPW_TIER_NVME && bytes <= *left && (records || (reads[i] >= least && reads[i] <= most))) {
            *tier = SPW_TIER_HOST;
            c->spare = c->spare && !records; /* in host memory second places come last */
            *left -= bytes;
        }
    }
}

/* Of one slot of each kind, whatever of it is on nvme, and of all windows for gradients. */
typedef struct slot_sizes {
    uint64_t weights, record, windows;
} slot_sizes;

static slot_sizes
slot_sizes_of(const spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    const uint64_t trained = spw__plan_largest_trained(in->layout);
    const uint64_t spilled = spw__layout_largest_spilled(in->layout) * in->grad_bytes;
    slot_sizes z = {.weights = c->zero.offload_param == SPW_TIER_NVME ? largest_weights(in) : 0};
    if (c->zero.offload_optimizer != SPW_TIER_NVME || in->inference)
        return z;
    z.record = plan_record_room(in, trained) + (spilled > 0 ? trained * in->grad_bytes : 0); /* it comes back there */
    if (p->undo_room)
        z.record += spw_round_up(trained * in->weight_bytes, 4096);
    z.windows = GRAD_WINDOWS * spilled;
    return z;
}

static uint64_t
slot_bytes(const spw_plan *p, const slot_sizes *z)
{
    return p->weight_slots * z->weights + p->record_slots * z->record + z->windows;
}

/* Gradients that were to wait on nvme stay in host memory: those of the first units, which are updated first. */
static void
fill_gradients(spw_plan *p, const plan_input *in, uint64_t *left)
{
    const uint64_t before = p->slots_host;
    slot_sizes sizes;
    for (uint32_t u = 0; u < in->layout->unit_count; u++) {
        spw_store_unit *unit = &in->layout->units[u];
        uint64_t bytes = unit->elems * in->grad_bytes;
        if (unit->spills && bytes <= *left) {
            unit->spills = false;
            *left -= bytes;
        }
    }
    sizes = slot_sizes_of(p, in);
    p->slots_host = slot_bytes(p, &sizes);
    *left += before - p->slots_host;
}

/* Updates need not wait for the norm. */
static bool
early_gate(const plan_input *in)
{
    return in->config->gradient_clipping <= 0 && !in->config->bf16_check_overflow && !in->config->fp16;
}

static spw_status
rehearse(const spw_plan *p, const plan_input *in, double pace, rehearsal *out, spw_error *err)
{
    rehearsal_input r = {.layout = in->layout,
                         .uses = in->uses,
                         .use_count = in->use_count,
                         .forward_count = in->forward_count,
                         .passes = in->passes,
                         .future_max = in->future_max,
                         .weight_slots = p->weight_slots,
                         .weight_bytes = in->weight_bytes,
                         .compute_bytes = in->compute_bytes,
                         .direct = in->direct,
                         .cache_bytes = in->layout->parts > 1 ? p->cache_device / in->layout->parts : p->cache_device,
                         .prefetch_elems = in->config->zero.prefetch_bucket_size / in->layout->parts,
                         .update_reads_weights = in->update_reads_weights,
                         .prefetch = in->config->run.prefetch,
                         .early_gate = early_gate(in) || in->ahead,
                         .gathers_again = in->kept_host > 0,
                         .backward = 3 - spw__plan_kept_share(p, in),
                         .pace = pace};
    return spw__rehearse(&r, out, err);
}

/* Water-filling: everything where the configuration says, then from nvme to what is left of the host budget. */
static spw_status
place(spw_plan *p, const plan_input *in, uint64_t *left, spw_error *err)
{
    const spw_config *c = in->config;
    uint32_t most = 0, *reads;
    rehearsal r = {.h2d = 0};
    spw_status st = SPW_OK;
    if (*left == 0 || (c->zero.offload_param != SPW_TIER_NVME && c->zero.offload_optimizer != SPW_TIER_NVME))
        return SPW_OK;
    reads = spw_mem_calloc(in->layout->chunk_count, sizeof *reads);
    if (reads == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "plan of %u chunks", in->layout->chunk_count);
    r.chunk_reads = reads;
    if (in->use_count > 0 && c->zero.offload_param == SPW_TIER_NVME)
        st = rehearse(p, in, spw_paces[SPW_PACE_DEFAULT], &r, err);
    for (uint32_t i = 0; i < in->layout->chunk_count; i++)
        most = reads[i] > most ? reads[i] : most;
    for (uint32_t k = most; st == SPW_OK && k >= 1; k--)
        fill_host(in, false, reads, k, k, left);
    if (st == SPW_OK && !in->inference) {
        fill_gradients(p, in, left);
        fill_host(in, true, NULL, 0, 0, left);
    }
    if (st == SPW_OK)
        fill_host(in, false, reads, 0, UINT32_MAX, left);
    spw_mem_free(reads);
    return st;
}

/* Of a chunk that may be updated ahead in host memory. */
static uint64_t
spare_bytes(const plan_input *in, const spw_store_chunk *c)
{
    uint64_t weights = c->weight_tier == SPW_TIER_HOST ? spw_round_up(plan_weights(in, c), 4096) : 0;
    return c->record_tier == SPW_TIER_HOST ? weights + plan_record_room(in, c->elems) : 0;
}

/*
 * What nothing else wants gives records in host memory second places: those of the last units first, whose gradients come first. Of a
 * machine without a budget at most half of what is left. Where the host computes too, its processors have nothing to gain, and where
 * updates to other memory take longer than in place perhaps something to lose.
 */
static void
place_spares(const spw_plan *p, const plan_input *in)
{
    const plan_places placed = spw__plan_count(in);
    const bool always = strcmp(in->config->run.update_ahead, "always") == 0;
    uint64_t taken = p->process_host + p->tables_host + p->grad_host + p->wire_host + p->kept_host + p->slots_host +
                     p->activations_host + placed.weights[SPW_TIER_HOST] + placed.records[SPW_TIER_HOST] +
                     placed.padding[SPW_TIER_HOST];
    uint64_t room = p->host_budget != SPW_AUTO ? p->host_budget : spw__plan_host_room(p, in) / 8 * 7, left;
    if (!in->ahead || in->spill || ((in->device_in_host || !in->update_streams) && !always))
        return;
    left = room > taken ? room - taken : 0;
    left = p->host_budget != SPW_AUTO ? left : left / 2;
    for (uint32_t i = in->layout->chunk_count; i-- > 0;) {
        spw_store_chunk *c = &in->layout->chunks[i];
        const uint64_t bytes = spare_bytes(in, c);
        if (!plan_has_record(in, c) || bytes == 0 || bytes > left || c->weight_tier == SPW_TIER_DEVICE)
            continue;
        c->spare = true;
        left -= bytes;
    }
}

static void
add_up(spw_plan *p, const plan_input *in)
{
    uint64_t *weight[SPW_TIER_COUNT] = {&p->weight_device, &p->weight_host, &p->weight_nvme};
    uint64_t *record[SPW_TIER_COUNT] = {&p->record_device, &p->record_host, &p->record_nvme};
    plan_places placed = spw__plan_count(in);
    p->grad_host = in->inference ? 0 : (p->trained - placed.updated_there - placed.spilled) * in->grad_bytes;
    p->grad_nvme = placed.spilled * in->grad_bytes;
    p->grad_windows = placed.spilled > 0 ? GRAD_WINDOWS : 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        spw_store_chunk *c = &in->layout->chunks[i];
        if (c->spare) {
            p->ahead = true;
            p->spare_nvme += plan_in_swap(in, c) + plan_undo(in, c);
            p->undo_write += plan_undo(in, c);
            p->spare_host += spare_bytes(in, c);
            p->spared_host += c->record_tier == SPW_TIER_HOST ? plan_record(in, c->elems) : 0;
        }
        uint64_t w = plan_weights(in, c), r = plan_has_record(in, c) ? plan_record(in, c->elems) : 0;
        *weight[c->weight_tier] += w;
        p->weight_in_place += c->weight_tier == SPW_TIER_NVME && c->piece_count > 0 ? w : 0;
        *record[c->record_tier] += r;
    }
}

/* Weights and record of a chunk go to one path; then checkpoints of activations, one by one. */
static spw_status
spread(spw_plan *p, const plan_input *in, spw_error *err)
{
    uint32_t chunk_count = in->layout->chunk_count, nvme_count = p->activation_count[SPW_TIER_NVME];
    uint32_t count = chunk_count + nvme_count; /* of activations, those on nvme come first */
    stripe_path paths[SPW_PATHS_MAX];
    uint64_t *bytes = spw_mem_calloc(count, sizeof *bytes);
    uint32_t *path_idx = spw_mem_calloc(count, sizeof *path_idx);
    spw_status st = SPW_OK;
    for (uint32_t i = 0; i < p->path_count; i++)
        paths[i] = (stripe_path){p->paths[i], p->path_weight[i], p->path_limit[i], 0};
    if (bytes == NULL || path_idx == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "plan of %u chunks", count);
    for (uint32_t i = chunk_count; st == SPW_OK && i < count; i++)
        bytes[i] = p->activations_nvme / nvme_count;
    for (uint32_t i = 0; st == SPW_OK && i < chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        bytes[i] = plan_in_swap(in, c) * (c->spare ? 2 : 1);
        if (c->record_tier == SPW_TIER_NVME && plan_has_record(in, c))
            bytes[i] += plan_spilled(in, c);
    }
    if (st == SPW_OK)
        st = spw__stripe(paths, p->path_count, bytes, count, path_idx, err);
    for (uint32_t i = 0; st == SPW_OK && i < chunk_count; i++)
        in->layout->chunks[i].path_idx = path_idx[i];
    for (uint32_t i = 0; st == SPW_OK && i < nvme_count; i++)
        in->activation_places[i].path_idx = path_idx[chunk_count + i];
    for (uint32_t i = 0; st == SPW_OK && i < p->path_count; i++)
        p->path_bytes[i] = paths[i].bytes;
    spw_mem_free(bytes);
    spw_mem_free(path_idx);
    return st;
}

static bool
state_on_nvme(const spw_config *c)
{
    return c->zero.offload_param == SPW_TIER_NVME || c->zero.offload_optimizer == SPW_TIER_NVME;
}

/* One list of paths for both kinds; a path named twice counts once. Activations go where state goes, or else anywhere. */
static void
collect_paths(spw_plan *p, const plan_input *in)
{
    const spw_config *c = in->config;
    const spw_path_list *lists[2] = {&c->zero.param_path, &c->zero.optimizer_path};
    bool any = !state_on_nvme(c),
         used[2] = {any || c->zero.offload_param == SPW_TIER_NVME, any || c->zero.offload_optimizer == SPW_TIER_NVME};
    for (int k = 0; k < 2; k++) {
        for (uint32_t i = 0; used[k] && i < lists[k]->count && p->path_count < SPW_PATHS_MAX; i++) {
            bool known = false;
            for (uint32_t j = 0; j < p->path_count; j++)
                known = known || strcmp(p->paths[j], lists[k]->item[i]) == 0;
            if (known)
                continue;
            p->path_weight[p->path_count] = lists[k]->weight[i] > 0 ? lists[k]->weight[i] : 1;
            p->path_limit[p->path_count] = lists[k]->bytes[i];
            p->path_ranks[p->path_count] = in->path_ranks[k] != NULL ? in->path_ranks[k][i] : 1;
            p->paths[p->path_count++] = lists[k]->item[i];
        }
    }
}

/* How many slots of a chunk hold that many elements: at least 1, at most one per chunk. */
static uint32_t
slots_for(uint64_t elems, uint64_t chunk, uint32_t chunk_count)
{
    uint64_t slots = elems / chunk > 0 ? elems / chunk : 1;
    return slots > chunk_count ? chunk_count : (uint32_t)slots;
}

/* What does not depend on the budget; the slots that are wanted go to *w_want and *r_want. */
static uint64_t
fixed_host(spw_plan *p, const plan_input *in, uint32_t *w_want, uint32_t *r_want)
{
    const spw_config *c = in->config;
    uint64_t chunk = spw__plan_largest_chunk(in->layout), fixed;
    plan_places placed = spw__plan_count(in);
    uint32_t count = in->layout->chunk_count;
    *w_want = c->run.weight_slots > 0 ? c->run.weight_slots : USEFUL_WEIGHT_SLOTS;
    *r_want = c->run.record_slots > 0 ? c->run.record_slots : USEFUL_RECORD_SLOTS;
    if (c->zero.param_buffer_count > 0 && c->run.weight_slots == 0) { /* the staging budget in DeepSpeed's words */
        uint64_t elems = UINT64_MAX;
        if (!spw_mul_u64(c->zero.param_buffer_count, c->zero.param_buffer_size, &elems))
            elems = UINT64_MAX; /* more than there is: a slot for every chunk */
        *w_want = slots_for(elems, chunk, count);
    }
    if (c->zero.optimizer_buffer_count > 0 && c->run.record_slots == 0)
        *r_want = (uint32_t)c->zero.optimizer_buffer_count;
    if (c->zero.max_in_cpu > 0 && c->zero.max_in_cpu != SPW_AUTO && c->run.weight_slots == 0) {
        uint32_t slots = slots_for(c->zero.max_in_cpu, chunk, count);
        *w_want = slots > *w_want ? slots : *w_want;
    }
    p->process_host = in->process_bytes;
    p->grad_host = in->inference ? 0 : (p->trained - placed.updated_there - placed.spilled) * in->grad_bytes;
    p->tables_host = in->tables_bytes;
    p->wire_host = in->wire_host;
    p->kept_host = in->kept_host;
    fixed = p->process_host + p->tables_host + p->grad_host + p->wire_host + p->kept_host;
    return fixed + placed.weights[SPW_TIER_HOST] + placed.records[SPW_TIER_HOST] + placed.padding[SPW_TIER_HOST];
}

uint64_t
spw__plan_host_room(const spw_plan *p, const plan_input *in)
{
    uint64_t device = in->device_in_host ? p->device_bytes : 0;
    uint64_t room =
        in->room_bytes / (in->local_ranks > 1 ? in->local_ranks : 1); /* all ranks here look at the same memory */
    if (in->room_bytes == 0 || in->room_bytes == UINT64_MAX)
        return UINT64_MAX;
    return in->process_bytes + (room > device ? room - device : 0);
}

/* host_memory auto: slots by bytes, in what the machine has left, and no more than there are chunks. */
static void
plan_host_auto(spw_plan *p, const plan_input *in, uint64_t fixed, uint32_t w_want, uint32_t r_want)
{
    const spw_config *c = in->config;
    const slot_sizes sizes = slot_sizes_of(p, in);
    const uint64_t room = spw__plan_host_room(p, in) / 8 * 7;
    uint32_t count = in->layout->chunk_count;
    bool w_nvme = p->weight_slots > 0, r_nvme = p->record_slots > 0;
    if (c->run.weight_slots == 0 && c->zero.param_buffer_count == 0) {
        uint64_t by_bytes = USEFUL_WEIGHT_BYTES / largest_weights(in);
        w_want = by_bytes > w_want ? (uint32_t)by_bytes : w_want;
        w_want = w_want > count ? count : w_want;
    }
    if (r_nvme && c->run.record_slots == 0 && c->zero.optimizer_buffer_count == 0) {
        uint64_t by_bytes = USEFUL_RECORD_BYTES / plan_record_room(in, spw__plan_largest_trained(in->layout));
        r_want = by_bytes > r_want ? (uint32_t)by_bytes : r_want;
        r_want = r_want > count ? count : r_want;
    }
    p->weight_slots = w_nvme ? w_want : 0;
    p->record_slots = r_nvme ? r_want : 0;
    while (fixed + p->activations_host + slot_bytes(p, &sizes) > room && (p->weight_slots > 1 || p->record_slots > 1)) {
        if (p->record_slots > p->weight_slots || p->weight_slots <= 1)
            p->record_slots--;
        else
            p->weight_slots--;
    }
    p->slots_host = slot_bytes(p, &sizes);
}

/* Slots of a kind with nothing left on nvme are not needed: their bytes go to what still is. */
static bool
drop_idle_slots(spw_plan *p, const plan_input *in, uint64_t *left)
{
    const slot_sizes sizes = slot_sizes_of(p, in);
    uint64_t before = slot_bytes(p, &sizes);
    bool weights = false, records = false;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        weights = weights || in->layout->chunks[i].weight_tier == SPW_TIER_NVME;
        records = records || in->layout->chunks[i].record_tier == SPW_TIER_NVME;
    }
    p->weight_slots = weights ? p->weight_slots : 0;
    p->record_slots = records ? p->record_slots : 0;
    p->slots_host = slot_bytes(p, &sizes);
    *left += before - p->slots_host;
    return before != p->slots_host;
}

/* What host memory would take of everything that is on nvme now. */
static uint64_t
on_nvme(const plan_input *in)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        bytes += c->weight_tier == SPW_TIER_NVME ? plan_weights(in, c) : 0;
        bytes += c->record_tier == SPW_TIER_NVME && plan_has_record(in, c) ? plan_record_room(in, c->elems) : 0;
        bytes += plan_spilled(in, c);
    }
    return bytes;
}

/* Everything fits, and then slots are for nobody. */
static bool
fits_whole(spw_plan *p, const plan_input *in, uint64_t fixed)
{
    uint64_t room = p->host_budget > fixed ? p->host_budget - fixed : 0;
    spw__plan_activations_host(p, in, p->path_count > 0, room);
    return p->activation_count[SPW_TIER_NVME] == 0 && fixed + p->activations_host + on_nvme(in) <= p->host_budget;
}

static spw_status
plan_host(spw_plan *p, const plan_input *in, spw_error *err)
{
    const spw_config *c = in->config;
    slot_sizes sizes;
    uint64_t left, fixed, budget = c->run.host_memory;
    bool w_nvme = c->zero.offload_param == SPW_TIER_NVME,
         r_nvme = c->zero.offload_optimizer == SPW_TIER_NVME && !in->inference;
    uint32_t w_want, r_want;
    p->undo_room = in->ahead && !in->spill && !w_nvme; /* else nothing is in memory yet that would be changed there */
    sizes = slot_sizes_of(p, in);
    fixed = fixed_host(p, in, &w_want, &r_want);
    p->host_budget = budget;
    p->weight_slots = w_nvme ? 1 : 0;
    p->record_slots = r_nvme ? 1 : 0;
    p->slots_host = slot_bytes(p, &sizes);
    if (budget == SPW_AUTO) {
        uint64_t room = spw__plan_host_room(p, in) / 8 * 7, others = fixed + p->slots_host;
        spw__plan_activations_host(p, in, p->path_count > 0, room > others ? room - others : 0);
        plan_host_auto(p, in, fixed, w_want, r_want);
        return SPW_OK;
    }
    if (fits_whole(p, in, fixed)) {
        left = budget - fixed - p->activations_host;
        p->weight_slots = p->record_slots = 0;
        p->slots_host = 0;
        return place(p, in, &left, err);
    }
    spw__plan_activations_host(p, in, p->path_count > 0, 0); /* the least */
    fixed += p->activations_host;
    if (fixed + p->slots_host > budget) {
        char need[32], have[32];
        p->lack = SPW_LACK_HOST;
        p->least_bytes = fixed + p->slots_host;
        return SPW_RAISE(err, SPW_ENOFIT,
                         "spillway.host_memory is %s, this configuration needs at least %s (%llu bytes); smaller "
                         "spillway.chunk_elems, grad_dtype bf16 or offloading to nvme lower it",
                         spw_format_bytes(have, sizeof have, budget),
                         spw_format_bytes(need, sizeof need, p->least_bytes), (unsigned long long)p->least_bytes);
    }
    /* Slots up to the useful number, in one order, so that more memory never means fewer of one kind. */
    while ((w_nvme && p->weight_slots < w_want) || (r_nvme && p->record_slots < r_want)) {
        uint32_t *slots = &p->weight_slots;
        if (r_nvme && p->record_slots < r_want &&
            (!w_nvme || p->weight_slots == w_want || p->record_slots < p->weight_slots))
            slots = &p->record_slots;
        ++*slots;
        if (fixed + slot_bytes(p, &sizes) <= budget)
            continue;
        --*slots;
        p->slots_host = slot_bytes(p, &sizes);
        return SPW_OK; /* what is left is less than a slot, and becomes one with a little more: it is not given away */
    }
    if (in->ahead && !in->spill && !p->undo_room) { /* nor is what is less than room behind all records */
        p->undo_room = true;
        sizes = slot_sizes_of(p, in);
        if (fixed + slot_bytes(p, &sizes) > budget) {
            p->undo_room = false;
            sizes = slot_sizes_of(p, in);
            p->slots_host = slot_bytes(p, &sizes);
            return SPW_OK;
        }
    }
    p->slots_host = slot_bytes(p, &sizes);
    left = budget - fixed - p->slots_host + p->activations_host;
    spw__plan_activations_host(p, in, p->path_count > 0, left); /* before chunks: what moves both ways in every pass */
    left -= p->activations_host;
    SPW_TRY(place(p, in, &left, err));
    while (drop_idle_slots(p, in, &left))
        SPW_TRY(place(p, in, &left, err));
    /* What the store will take; not given away, or a chunk more in host memory could cost one that is larger. */
    sizes = slot_sizes_of(p, in);
    sizes.weights = spw__plan_slot_weights(in);
    sizes.record = spw__plan_slot_record(in);
    p->slots_host = slot_bytes(p, &sizes);
    return SPW_OK;
}

/* Of units that spill the gradients that come last stay in their windows, all but one, and without a norm to wait for all do. */
static uint32_t
first_that_leaves(const plan_input *in)
{
    uint32_t stay = 0, u = 0;
    for (; u < in->layout->unit_count && (early_gate(in) || stay < GRAD_WINDOWS - 1); u++)
        stay += in->layout->units[u].spills;
    return u;
}

/* Weights on nvme that are trained are written once a step, records read and written once; the rest is rehearsed. */
static spw_status
add_traffic(spw_plan *p, const plan_input *in, spw_error *err)
{
    const uint64_t grads = (p->trained - p->trained_device) * in->grad_bytes;
    const uint32_t leaves = first_that_leaves(in);
    for (int k = 0; k < SPW_PACE_COUNT; k++) {
        spw_traffic *t = &p->traffic[k];
        rehearsal r = {.h2d = 0};
        SPW_TRY(rehearse(p, in, spw_paces[k], &r, err));
        t->h2d = r.h2d + (in->passes - 1) * grads; /* sums of earlier passes go back in */
        t->d2h = in->passes * grads;
        memcpy(t->path_read, r.path_read, sizeof t->path_read);
        spw__plan_activations_traffic(in, t);
        for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
            const spw_store_chunk *c = &in->layout->chunks[i];
            uint64_t record = c->record_tier == SPW_TIER_NVME ? plan_record(in, c->elems) : 0;
            if (!plan_has_record(in, c))
                continue; /* what is frozen is read only, which the rehearsal counts */
            if (c->unit_idx >= leaves)
                record += plan_spilled(in, c);
            t->path_write[c->path_idx] += record + (c->weight_tier == SPW_TIER_NVME ? plan_weights(in, c) : 0);
            t->path_read[c->path_idx] += record;
        }
        for (uint32_t i = 0; i < SPW_PATHS_MAX; i++) {
            t->nvme_read += t->path_read[i];
            t->nvme_write += t->path_write[i];
        }
    }
    return SPW_OK;
}

static spw_status
make_plan(spw_plan *p, const plan_input *in, spw_error *err)
{
    spw_error device = {0};
    spw_status st;
    memset(p, 0, sizeof *p);
    p->params = in->layout->params;
    p->elems = in->layout->elems;
    p->trained = spw__layout_trained(in->layout);
    p->tokens = in->tokens;
    p->flops = in->flops;
    p->model_flops = in->flops - in->recompute_flops;
    p->device_apart = !in->device_in_host;
    p->cpu_ranks = in->cpu_ranks;
    collect_paths(p, in);
    (void)spw__plan_device(p, in, &device); /* first: how often weights are read depends on what the device holds */
    st = plan_host(p, in, err);
    if (st == SPW_OK)
        place_spares(p, in);
    add_up(p, in);
    spw__plan_activations_place(p, in);
    if (!state_on_nvme(in->config) && p->activation_count[SPW_TIER_NVME] == 0)
        p->path_count = 0; /* they are there and not needed */
    if (st == SPW_OK && p->path_count > 0) {
        st = spread(p, in, err);
        p->lack = st == SPW_ENOFIT ? SPW_LACK_DISK : SPW_LACK_NOTHING;
    }
    if (st == SPW_OK && device.status != SPW_OK) {
        spw_error_keep_first(err, &device);
        st = device.status;
        p->lack = SPW_LACK_DEVICE;
        p->least_bytes = spw__plan_device_least(p, in);
    }
    p->tables_host += spw__plan_count(in).padding[SPW_TIER_HOST];
    p->host_bytes = p->process_host + p->tables_host + p->grad_host + p->wire_host + p->kept_host + p->slots_host +
                    p->activations_host + p->weight_host + p->record_host + p->spare_host;
    if (st == SPW_OK)
        spw__plan_tapes(p, in);
    if (st == SPW_OK && p->host_bytes > spw__plan_host_room(p, in)) {
        char need[32], room[32];
        p->lack = SPW_LACK_ROOM;
        p->least_bytes = p->host_bytes + (in->device_in_host ? p->device_bytes : 0);
        st =
            SPW_RAISE(err, SPW_ENOFIT,
                      "the plan takes %s (%llu bytes) of host memory, and this machine (or its cgroup or address space "
                      "limit) has room for %s beside the device's memory; a smaller spillway.host_memory, spillway."
                      "chunk_elems or offloading to nvme lowers it",
                      spw_format_bytes(need, sizeof need, p->host_bytes), (unsigned long long)p->host_bytes,
                      spw_format_bytes(room, sizeof room, spw__plan_host_room(p, in)));
    }
    if (st == SPW_OK && in->use_count > 0 && !in->inference)
        st = add_traffic(p, in, err);
    spw__plan_explain(p, in);
    return st;
}

/* The norm decides something, and what it decides can be undone where the state is. Who counts writes wants none in vain. */
static bool
may_go_ahead(const plan_input *in)
{
    const spw_config *c = in->config;
    return !in->inference && c->zero.offload_optimizer != SPW_TIER_DEVICE && !early_gate(in) &&
           strcmp(c->run.update_ahead, "never") != 0 &&
           (c->run.write_budget == 0 || !state_on_nvme(c) || strcmp(c->run.update_ahead, "always") == 0);
}

/* What a path has left; 0: unknown. Where it stands in both lists, both say the same. */
static uint64_t
free_of(const plan_input *in, const char *path)
{
    const spw_path_list *lists[2] = {&in->config->zero.param_path, &in->config->zero.optimizer_path};
    uint64_t bytes = 0;
    for (int k = 0; k < 2; k++) {
        for (uint32_t i = 0; in->path_free[k] != NULL && i < lists[k]->count; i++) {
            if (strcmp(lists[k]->item[i], path) == 0)
                bytes = in->path_free[k][i];
        }
    }
    return bytes;
}

/* Leaves a tenth of what is there. */
static bool
disks_have_room(const spw_plan *p, const plan_input *in)
{
    bool room = true;
    for (uint32_t i = 0; i < p->path_count && strcmp(in->config->run.update_ahead, "always") != 0; i++) {
        uint64_t bytes = free_of(in, p->paths[i]);
        room = room && (bytes == 0 || p->path_bytes[i] <= bytes / 10 * 9);
    }
    return room;
}

/* With second places for state that is offloaded, if all on nvme fits so. */
static spw_status
plan_ahead(spw_plan *p, plan_input *in, spw_error *err)
{
    spw_error refused = {0};
    in->ahead = may_go_ahead(in) && !in->spill;
    if (in->ahead) {
        spw_status st = make_plan(p, in, &refused);
        if (st == SPW_OK && disks_have_room(p, in))
            return SPW_OK;
        if (st != SPW_OK && st != SPW_ENOFIT && err != NULL)
            *err = refused;
        if (st != SPW_OK && st != SPW_ENOFIT)
            return st;
    }
    in->ahead = false;
    return make_plan(p, in, err);
}

/* Gradients that are to wait where there is room do so in host memory, unless that alone does not hold the plan. */
spw_status
spw__plan_make(spw_plan *p, const plan_input *in, spw_error *err)
{
    const spw_config *c = in->config;
    plan_input own = *in;
    bool possible = !in->inference && c->zero.offload_optimizer == SPW_TIER_NVME;
    spw_error first = {0}, second = {0};
    spw_status st;
    own.spill = possible && strcmp(c->run.gradients, "nvme") == 0;
    st = plan_ahead(p, &own, &first);
    if (st == SPW_ENOFIT && (p->lack == SPW_LACK_HOST || p->lack == SPW_LACK_ROOM) && possible && in->passes == 1 &&
        strcmp(c->run.gradients, "auto") == 0) {
        own.spill = true;
        st = plan_ahead(p, &own, &second);
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

void
spw_plan_print(const spw_plan *p, void (*line)(void *ctx, const char *text), void *ctx)
{
    const struct {
        const char *name;
        uint64_t device, host, nvme;
    } rows[] = {{"weights", p->weight_device, p->weight_host, p->weight_nvme},
                {"optimizer records", p->record_device, p->record_host, p->record_nvme},
                {"gradients", p->grads_device + p->grad_device, p->grad_host, p->grad_nvme},
                {"staging slots", 0, p->slots_host, 0},
                {"gathered units", p->cache_device + p->parts_device, 0, 0},
                {"activation checkpoints", p->activations_device, p->activations_host, p->activations_nvme},
                {"activations between", p->tapes_device, 0, 0},
                {"between ranks", 0, p->wire_host, 0},
                {"kept gathered weights", 0, p->kept_host, 0},
                {"working memory", p->arena_device + p->batch_device + p->padding_device, 0, 0},
                {"tables and stacks", 0, p->tables_host, 0},
                {"process", 0, p->process_host, 0},
                {"places to undo updates", 0, p->spare_host, p->spare_nvme},
                {"total", p->device_bytes, p->host_bytes,
                 p->weight_nvme + p->record_nvme + p->grad_nvme + p->activations_nvme + p->spare_nvme}};
    char text[160], a[32], b[32], c[32];
    snprintf(text, sizeof text, "  %-24s %12s %12s %12s", "plan", "device", "host", "nvme");
    line(ctx, text);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if ((p->wire_host == 0 && strcmp(rows[i].name, "between ranks") == 0) ||
            (p->kept_host == 0 && strcmp(rows[i].name, "kept gathered weights") == 0) ||
            (p->spare_nvme + p->spare_host == 0 && strcmp(rows[i].name, "places to undo updates") == 0))
            continue;
        snprintf(text, sizeof text, "  %-24s %12s %12s %12s", rows[i].name,
                 spw_format_bytes(a, sizeof a, rows[i].device), spw_format_bytes(b, sizeof b, rows[i].host),
                 spw_format_bytes(c, sizeof c, rows[i].nvme));
        line(ctx, text);
        if (i == 0 && p->weight_in_place > 0) {
            snprintf(text, sizeof text, "  %-24s %12s %12s %12s", "  frozen, in their files", "", "",
                     spw_format_bytes(c, sizeof c, p->weight_in_place));
            line(ctx, text);
        }
    }
    snprintf(text, sizeof text, "  %-24s %12s %12s", "budget",
             p->device_budget == SPW_AUTO ? "auto" : spw_format_bytes(a, sizeof a, p->device_budget),
             p->host_budget == SPW_AUTO ? "auto" : spw_format_bytes(b, sizeof b, p->host_budget));
    line(ctx, text);
}
