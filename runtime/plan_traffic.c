/*
 * What a step of the plan moves over each link, at each pace of the disks: a rehearsal of the step, and what it needs no rehearsal to
 * know. Pure.
 */
#include "plan_internal.h"
#include <string.h>

const double spw_paces[SPW_PACE_COUNT] = {0, 0.5, 1, 2, 4, 8, 16};

bool
spw__plan_early_gate(const plan_input *in)
{
    return in->config->gradient_clipping <= 0 && !in->config->bf16_check_overflow && !in->config->fp16;
}

static rehearsal_input
rehearsed(const spw_plan *p, const plan_input *in, double pace)
{
    return (rehearsal_input){.layout = in->layout,
                             .uses = in->uses,
                             .use_count = in->use_count,
                             .forward_count = in->forward_count,
                             .passes = in->passes,
                             .future_max = in->future_max,
                             .weight_slots = p->weight_slots,
                             .weight_bytes = in->weight_bytes,
                             .compute_bytes = in->compute_bytes,
                             .direct = in->direct,
                             .cache_bytes =
                                 in->layout->parts > 1 ? p->cache_device / in->layout->parts : p->cache_device,
                             .prefetch_elems = in->config->zero.prefetch_bucket_size / in->layout->parts,
                             .update_reads_weights = in->update_reads_weights,
                             .prefetch = in->config->run.prefetch,
                             .grad_windows = in->grad_windows,
                             .early_gate = spw__plan_early_gate(in) || in->ahead || p->late,
                             .gathers_again = in->kept_host > 0,
                             .backward = 3 - spw__plan_kept_share(p, in),
                             .pace = pace};
}

spw_status
spw__plan_rehearse(const spw_plan *p, const plan_input *in, double pace, rehearsal *out, spw_error *err)
{
    rehearsal_input r = rehearsed(p, in, pace);
    return spw__rehearse(&r, out, err);
}

spw_status
spw__plan_gathers(const spw_plan *p, const plan_input *in, uint32_t *anew, uint32_t *again, uint32_t *steps,
                  spw_error *err)
{
    rehearsal_input r = rehearsed(p, in, 0);
    return spw__rehearse_gathers(&r, p->cache_device, anew, again, steps, err);
}

/*
 * Where updates wait for the norm: of units that spill the gradients that come last stay in their windows, all but one. Else all are consumed
 * there.
 */
static uint32_t
first_that_leaves(const plan_input *in)
{
    uint32_t stay = 1, u = 0;
    for (; u < in->layout->unit_count && (spw__plan_early_gate(in) || stay < in->grad_windows); u++)
        stay += in->layout->units[u].spills;
    return u;
}

/* Of a path's chunks. */
static void
count_leaving(spw_plan *p, const plan_input *in)
{
    const uint32_t leaves = first_that_leaves(in);
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        p->grad_path[c->path_idx] += c->unit_idx >= leaves ? plan_spilled(in, c) : 0;
    }
}

/* Of pieces whose gradients leave the device. */
static uint64_t
pieces_elems(const plan_input *in)
{
    uint64_t elems = 0;
    for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
        const spw_store_chunk *c = &in->layout->chunks[i];
        bool leaves = plan_has_record(in, c) && !(in->device_updates && c->record_tier == SPW_TIER_DEVICE);
        elems += in->piece_returns > 0 && in->layout->of_vocab[c->unit_idx] && leaves ? c->elems : 0;
    }
    return elems;
}

/* Between ranks all of a matrix comes to each that has some of it. To and from a device that has the state goes what others have. */
plan_whole
spw__plan_whole(const plan_input *in)
{
    const spw_layout *l = in->layout;
    plan_whole w = {0};
    for (uint32_t id = 0; id < l->param_count && l->whole; id++) {
        const bool there = in->device_updates && spw__layout_record_tier(l, l->places[id].unit_idx) == SPW_TIER_DEVICE;
        uint64_t first, end;
        if (!spw__layout_own_whole(l, id, &first, &end))
            continue;
        w.own += end - first;
        w.h2d += there ? l->places[id].elems - (end - first) : l->places[id].elems;
        w.d2h += there ? 0 : end - first;
    }
    for (uint32_t u = 0; u < l->unit_count && l->parts > 1; u++) {
        whole_piece head, tail;
        if (!l->units[u].whole || !in->device_updates || spw__layout_record_tier(l, u) != SPW_TIER_DEVICE)
            continue;
        (void)spw__whole_given(l, u, in->grad_bytes, l->part, &head, &tail);
        w.d2h += head.end - head.first + tail.end - tail.first;
    }
    return w;
}

uint32_t
spw__plan_records_on_nvme(const plan_input *in, uint32_t unit_idx)
{
    const spw_store_unit *u = &in->layout->units[unit_idx];
    uint32_t count = 0;
    for (uint32_t i = u->chunk_first; i < u->chunk_first + u->chunk_count; i++)
        count += in->layout->chunks[i].record_tier == SPW_TIER_NVME;
    return count;
}

/*
 * Weights on nvme that are trained are written once a step, records read and written once, or, where slots do not hold them, for each half
 * of an update that has two; the rest is rehearsed.
 */
spw_status
spw__plan_traffic(spw_plan *p, const plan_input *in, spw_error *err)
{
    const uint64_t grads = (p->trained - p->trained_device) * in->grad_bytes, leave = in->holds ? 1 : in->passes;
    const uint64_t returning = in->piece_returns * pieces_elems(in) * in->grad_bytes;
    const plan_whole between = spw__plan_whole(in);
    rehearsal r = {.waits = true};
    count_leaving(p, in);
    for (int k = 0; k < SPW_PACE_COUNT; k++) {
        spw_traffic *t = &p->traffic[k];
        if ((in->trial != NULL && k > 0) || !r.waits) {
            *t = p->traffic[k - 1];
            continue;
        }
        SPW_TRY(spw__plan_rehearse(p, in, spw_paces[in->trial != NULL ? SPW_PACE_DEFAULT : k], &r, err));
        t->h2d = r.h2d + (leave - 1) * grads + returning +
                 between.h2d * in->grad_bytes; /* sums of earlier passes go back in */
        t->d2h = leave * grads + returning + between.d2h * in->grad_bytes;
        memcpy(t->path_read, r.path_read, sizeof t->path_read);
        spw__plan_activations_traffic(in, t);
        for (uint32_t i = 0; i < in->layout->chunk_count; i++) {
            const spw_store_chunk *c = &in->layout->chunks[i];
            uint64_t record = c->record_tier == SPW_TIER_NVME ? plan_record(in, c) : 0;
            if (!plan_has_record(in, c))
                continue; /* what is frozen is read only, which the rehearsal counts */
            if (in->layout->units[c->unit_idx].whole &&
                !spw_store_holds(p->record_slots, spw__plan_records_on_nvme(in, c->unit_idx)))
                record *= 2;
            t->path_write[c->path_idx] += record + (c->weight_tier == SPW_TIER_NVME ? plan_weights(in, c) : 0);
            t->path_read[c->path_idx] += record;
        }
        for (uint32_t i = 0; i < SPW_PATHS_MAX; i++) {
            t->path_write[i] += p->ahead ? 0 : p->grad_path[i];
            t->path_read[i] += p->ahead ? 0 : p->grad_path[i];
            t->nvme_read += t->path_read[i];
            t->nvme_write += t->path_write[i];
        }
    }
    return SPW_OK;
}
