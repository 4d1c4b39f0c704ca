/*
 * The host's part of the plan: what must be in its memory comes first (gradients, the smallest slots), then slots up to a useful number,
 * then chunks by the seconds that a byte in host memory saves per step, until the budget is used. Pure.
 *
 * That order needs no measured rate. A byte of weights saves reads / R + 1 / W seconds on a disk that reads R and writes
 * W bytes per second, a byte of a record 1 / R + 1 / W: which is more depends on the number of reads alone, and that
 * comes from a rehearsal with all of them on nvme. So the order is weights that are read again and again, then records,
 * then weights that the slots hold anyway; and a measurement that wobbles moves nothing.
 */
#include "plan_internal.h"
#include <stdio.h>
#include <string.h>

/*
 * Slots keep transfers going while updates and passes take turns: at least so many, and with host_memory auto so many bytes,
 * because during the backward pass only records that have a slot can be read ahead. Within a budget a chunk that stays in
 * host memory saves as much time as a slot does, and writes nothing.
 */
enum { USEFUL_WEIGHT_SLOTS = 8, USEFUL_RECORD_SLOTS = 8 };

/* ---------------------------------------------------------------- slots */

/* A unit's first chunk is its largest, and so are that one's weights and record. */
uint64_t
spw__plan_largest_chunk(const spw_layout *l)
{
    uint64_t largest = 0;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        uint64_t elems = l->units[u].chunk_count > 0 ? l->chunks[l->units[u].chunk_first].elems : 0;
        largest = elems > largest ? elems : largest;
    }
    return largest;
}

uint64_t
spw__plan_largest_trained(const spw_layout *l)
{
    uint64_t largest = 0;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        const spw_store_unit *unit = &l->units[u];
        uint64_t elems = unit->trainable && unit->chunk_count > 0 ? l->chunks[unit->chunk_first].elems : 0;
        largest = elems > largest ? elems : largest;
    }
    return largest;
}

/* Memory for the largest record. */
static uint64_t
largest_record(const plan_input *in)
{
    const spw_layout *l = in->layout;
    uint64_t most = 0;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        const spw_store_unit *unit = &l->units[u];
        uint64_t bytes =
            unit->trainable && unit->chunk_count > 0 ? plan_record_room(in, &l->chunks[unit->chunk_first]) : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Bytes of the largest weights that any chunk may have on nvme. */
static uint64_t
largest_weights(const plan_input *in)
{
    const spw_layout *l = in->layout;
    uint64_t most = 0;
    for (uint32_t u = 0; u < l->unit_count; u++) {
        uint64_t bytes = l->units[u].chunk_count > 0 ? plan_weights(in, &l->chunks[l->units[u].chunk_first]) : 0;
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
        uint64_t bytes = there ? plan_record_room(in, c) + plan_behind(in, c) : 0;
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
        uint64_t bytes = records ? plan_record_room(in, c) : plan_weights(in, c);
        if (records && in->layout->units[c->unit_idx].spills)
            continue; /* its gradient comes back to the record's slot */
        if (*tier == SPW_TIER_NVME && bytes <= *left && (records || (reads[i] >= least && reads[i] <= most))) {
            *tier = SPW_TIER_HOST;
            c->spare = c->spare && !records; /* logs in host memory come last */
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
    uint64_t behind, undo;
    if (c->zero.offload_optimizer != SPW_TIER_NVME || in->inference)
        return z;
    behind = spilled > 0 ? trained * in->grad_bytes : 0; /* it comes back there */
    undo = p->undo_room ? spw_round_up(trained * in->weight_bytes, 4096) : 0;
    z.record = largest_record(in) + (behind > undo ? behind : undo);
    z.windows = in->grad_windows * spilled;
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

/* Weights that are on nvme would take no more than the slots do that are there for them alone. */
static bool
outweigh_slots(const spw_plan *p, const plan_input *in, uint64_t left)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++)
        bytes += in->layout->chunks[i].weight_tier == SPW_TIER_NVME ? plan_weights(in, &in->layout->chunks[i]) : 0;
    return bytes <= left && bytes <= p->weight_slots * largest_weights(in);
}

/* Water-filling: everything where the configuration says, then from nvme to what is left of the host budget. */
static spw_status
place(spw_plan *p, const plan_input *in, plan_places *placed, uint64_t *left, spw_error *err)
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
        st = spw__plan_rehearse(p, in, spw_paces[SPW_PACE_DEFAULT], &r, err);
    for (uint32_t i = 0; i < in->layout->chunk_count; i++)
        most = reads[i] > most ? reads[i] : most;
    for (uint32_t k = most; st == SPW_OK && k >= 1; k--)
        fill_host(in, false, reads, k, k, left);
    if (st == SPW_OK && outweigh_slots(p, in, *left))
        fill_host(in, false, reads, 0, UINT32_MAX, left);
    if (st == SPW_OK && !in->inference) {
        fill_gradients(p, in, left);
        fill_host(in, true, NULL, 0, 0, left);
    }
    if (st == SPW_OK)
        fill_host(in, false, reads, 0, UINT32_MAX, left);
    *placed = spw__plan_count(in);
    spw_mem_free(reads);
    return st;
}

/*
 * What nothing else wants gives records in host memory logs, by which updates ahead of the norm are taken back: those of the last units
 * first, whose gradients come first. Of a machine without a budget at most half of what is left. Where the host computes too, its
 * processors have nothing to gain.
 */
void
spw__plan_logs(const spw_plan *p, const plan_input *in, const plan_places *placed)
{
    const bool always = strcmp(in->config->run.update_ahead, "always") == 0;
    const uint64_t grads = plan_grad_host(p, in, placed); /* some may be back */
    uint64_t taken = p->process_host + p->tables_host + grads + p->wire_host + p->kept_host + p->slots_host +
                     p->activations_host + placed->weights[SPW_TIER_HOST] + placed->records[SPW_TIER_HOST] +
                     placed->padding[SPW_TIER_HOST];
    uint64_t room = p->host_budget != SPW_AUTO ? p->host_budget : spw__plan_host_room(p, in) / 8 * 7, left;
    if (!in->ahead || (in->device_in_host && !always))
        return;
    left = room > taken ? room - taken : 0;
    left = p->host_budget != SPW_AUTO ? left : left / 2;
    for (uint32_t i = in->layout->chunk_count; i-- > 0;) {
        spw_store_chunk *c = &in->layout->chunks[i];
        const uint64_t bytes = plan_log(in, c);
        if (!plan_has_record(in, c) || bytes == 0 || bytes > left || c->weight_tier == SPW_TIER_DEVICE ||
            in->layout->units[c->unit_idx].whole)
            continue;
        c->spare = true;
        left -= bytes;
    }
}

/* ---------------------------------------------------------------- the budget */

/* How many slots of a chunk hold that many elements: at least 1, at most one per chunk. */
static uint32_t
slots_for(uint64_t elems, uint64_t chunk, uint32_t chunk_count)
{
    uint64_t slots = elems / chunk > 0 ? elems / chunk : 1;
    return slots > chunk_count ? chunk_count : (uint32_t)slots;
}

/* With which records of one unit that is whole are held while the next one's come. */
static uint32_t
slots_of_whole(const plan_input *in)
{
    const spw_layout *l = in->layout;
    uint32_t most = 0;
    for (uint32_t u = 0; u < l->unit_count; u++)
        most = l->units[u].whole && l->units[u].chunk_count > most ? l->units[u].chunk_count : most;
    return most == 0 ? 0 : 2 * most + 2 < l->chunk_count ? 2 * most + 2 : l->chunk_count;
}

/* What does not depend on the budget; the slots that are wanted go to *w_want and *r_want. */
static uint64_t
fixed_host(spw_plan *p, const plan_input *in, const plan_places *placed, uint32_t *w_want, uint32_t *r_want)
{
    const spw_config *c = in->config;
    uint64_t chunk = spw__plan_largest_chunk(in->layout), fixed;
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
    else if (c->run.record_slots == 0 && slots_of_whole(in) > *r_want)
        *r_want = slots_of_whole(in);
    if (c->zero.max_in_cpu > 0 && c->zero.max_in_cpu != SPW_AUTO && c->run.weight_slots == 0) {
        uint32_t slots = slots_for(c->zero.max_in_cpu, chunk, count);
        *w_want = slots > *w_want ? slots : *w_want;
    }
    p->process_host = in->process_bytes;
    p->grad_host = plan_grad_host(p, in, placed);
    p->tables_host = in->tables_bytes;
    p->wire_host = in->wire_host;
    p->kept_host = in->kept_host;
    fixed = p->process_host + p->tables_host + p->grad_host + p->wire_host + p->kept_host;
    return fixed + placed->weights[SPW_TIER_HOST] + placed->records[SPW_TIER_HOST] + placed->padding[SPW_TIER_HOST];
}

uint64_t
spw__plan_host_room(const spw_plan *p, const plan_input *in)
{
    uint64_t device = in->device_in_host ? p->device_bytes : 0;
    if (in->room_bytes == 0 || in->room_bytes == UINT64_MAX)
        return UINT64_MAX;
    return in->process_bytes + (in->room_bytes > device ? in->room_bytes - device : 0);
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
        uint64_t by_bytes = PLAN_USEFUL_WEIGHTS / largest_weights(in);
        w_want = by_bytes > w_want ? (uint32_t)by_bytes : w_want;
        w_want = w_want > count ? count : w_want;
    }
    if (r_nvme && c->run.record_slots == 0 && c->zero.optimizer_buffer_count == 0) {
        uint64_t by_bytes = PLAN_USEFUL_RECORDS / largest_record(in);
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
        bytes += c->record_tier == SPW_TIER_NVME && plan_has_record(in, c) ? plan_record_room(in, c) : 0;
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

spw_status
spw__plan_host(spw_plan *p, const plan_input *in, plan_places *placed, spw_error *err)
{
    const spw_config *c = in->config;
    slot_sizes sizes;
    uint64_t left, fixed, budget = c->run.host_memory;
    bool w_nvme = c->zero.offload_param == SPW_TIER_NVME,
         r_nvme = c->zero.offload_optimizer == SPW_TIER_NVME && !in->inference;
    uint32_t w_want, r_want;
    p->undo_room = in->ahead && !w_nvme; /* else nothing is in memory yet that would be changed there */
    sizes = slot_sizes_of(p, in);
    fixed = fixed_host(p, in, placed, &w_want, &r_want);
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
        return place(p, in, placed, &left, err);
    }
    spw__plan_activations_host(p, in, p->path_count > 0, 0); /* the least */
    fixed += p->activations_host;
    if (fixed + p->slots_host > budget) {
        char need[32], have[32];
        p->lack = SPW_LACK_HOST;
        p->least_bytes = fixed + p->slots_host;
        return SPW_RAISE(err, SPW_ENOFIT,
                         "spillway.host_memory is %s, this configuration needs at least %s (%llu bytes); %s lower it",
                         spw_format_bytes(have, sizeof have, budget),
                         spw_format_bytes(need, sizeof need, p->least_bytes), (unsigned long long)p->least_bytes,
                         in->inference ? "weights on nvme or as codes (--nvme, --codes)"
                                       : "smaller spillway.chunk_elems, grad_dtype bf16 or offloading to nvme");
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
    if (in->ahead && !p->undo_room) { /* nor is what is less than room behind all records */
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
    SPW_TRY(place(p, in, placed, &left, err));
    while (drop_idle_slots(p, in, &left))
        SPW_TRY(place(p, in, placed, &left, err));
    /* What the store will take; not given away, or a chunk more in host memory could cost one that is larger. */
    sizes = slot_sizes_of(p, in);
    sizes.weights = spw__plan_slot_weights(in);
    sizes.record = spw__plan_slot_record(in);
    p->slots_host = slot_bytes(p, &sizes);
    return SPW_OK;
}
