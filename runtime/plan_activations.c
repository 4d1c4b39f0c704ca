/*
 * Where checkpoints of activations live. Those made last are needed first, so the device keeps the last ones, host memory
 * the ones before them, and nvme the first ones, which are needed last. Everything stays on the device while it fits. Once
 * something has to leave, enough leaves that the device also has room to gather one block ahead: weights that come while
 * the step waits cost more than checkpoints that come while it computes. Device memory that is left when everything else is
 * placed keeps what blocks computed between checkpoints, so that the backward pass need not compute it again. Pure; called by
 * the planner.
 */
#include "runtime_internal.h"

enum {
    WORKING = 2, /* one that is used, one that arrives */
    STAGING_LEAST = 2,
    STAGING_MOST = 16,
    STAGING_BYTES = 16 << 20 /* enough to keep a disk busy both ways */
};

static uint32_t
all_of(const plan_input *in)
{
    return in->inference ? 0 : in->activation_slots * in->activation_micros;
}

static spw_tier
asked(const plan_input *in)
{
    const spw_config *c = in->config;
    return c->run.activations == SPW_TIER_COUNT && c->run.cpu_checkpointing ? SPW_TIER_HOST : c->run.activations;
}

static uint64_t
checkpoint_bytes(const plan_input *in)
{
    return in->activation_elems * in->compute_bytes;
}

static uint64_t
page_bytes(const plan_input *in)
{
    return spw_round_up(checkpoint_bytes(in), 4096);
}

static uint64_t
on_device(const plan_input *in, uint32_t buffers)
{
    return in->flow_device + spw_round_up(buffers * checkpoint_bytes(in), 4096);
}

static uint64_t
on_host(const plan_input *in, uint32_t homes, uint32_t staging)
{
    return spw_round_up(homes * checkpoint_bytes(in), 4096) + staging * page_bytes(in) +
           (homes + staging > 0 ? in->activation_tables.thread_bytes : 0) +
           (staging > 0 ? in->activation_tables.transfer_bytes : 0);
}

void
spw__plan_activations_device(spw_plan *p, const plan_input *in, uint64_t room, uint64_t ease)
{
    uint32_t all = all_of(in), kept = all, working = 0;
    spw_tier tier = asked(in);
    if (tier == SPW_TIER_HOST || tier == SPW_TIER_NVME ||
        (tier != SPW_TIER_DEVICE && all > 0 && on_device(in, all) > room)) {
        uint64_t roomy = room > ease ? room - ease : 0, none;
        working = all < WORKING ? all : WORKING;
        none = on_device(in, working);
        kept = tier == SPW_TIER_COUNT && roomy > none ? (uint32_t)((roomy - none) / checkpoint_bytes(in)) : 0;
        kept = kept > all - working ? all - working : kept;
        while (kept > 0 && on_device(in, kept + working) > roomy) /* whole pages */
            kept--;
    }
    p->activation_count[SPW_TIER_DEVICE] = kept;
    p->activation_count[SPW_TIER_HOST] = all - kept;
    p->activation_working = working;
    p->activations_device = on_device(in, kept + working);
}

void
spw__plan_activations_tapes(spw_plan *p, const plan_input *in, uint64_t room)
{
    uint64_t count = (uint64_t)in->activation_slots_used * in->activation_micros;
    if (in->inference || in->tape_bytes == 0 || p->activation_count[SPW_TIER_DEVICE] < all_of(in))
        return; /* a device without room for checkpoints has none for more; nor is it meant where they are sent away */
    count = count < in->tapes_most ? count : in->tapes_most;
    p->tape_count = (uint32_t)(room / in->tape_bytes < count ? room / in->tape_bytes : count);
    p->tapes_device = p->tape_count * in->tape_bytes;
}

/* Staging for so many checkpoints on nvme: as many as are useful within a quarter of the room, at least one. */
static uint32_t
staging_for(const plan_input *in, uint32_t nvme, uint64_t room)
{
    uint64_t want = STAGING_BYTES / page_bytes(in);
    want = want < STAGING_LEAST ? STAGING_LEAST : want > STAGING_MOST ? STAGING_MOST : want;
    want = want > nvme ? nvme : want;
    while (want > 1 && on_host(in, 0, (uint32_t)want) > room / 4)
        want--;
    return (uint32_t)want;
}

void
spw__plan_activations_host(spw_plan *p, const plan_input *in, bool nvme_there, uint64_t room)
{
    uint32_t away = all_of(in) - p->activation_count[SPW_TIER_DEVICE], host = away, staging = 0;
    spw_tier tier = asked(in);
    bool helps = nvme_there && on_host(in, 0, 1) < on_host(in, away, 0); /* transfers take memory too */
    if (away > 0 && (tier == SPW_TIER_NVME || (tier != SPW_TIER_HOST && helps && on_host(in, away, 0) > room))) {
        uint64_t left;
        staging = staging_for(in, away, room);
        left = room > on_host(in, 0, staging) ? room - on_host(in, 0, staging) : 0;
        host = tier == SPW_TIER_NVME
                   ? 0
                   : (uint32_t)(left / checkpoint_bytes(in) < away ? left / checkpoint_bytes(in) : away - 1);
        while (host > 0 && on_host(in, host, staging) > room) /* whole pages */
            host--;
        staging = staging > away - host ? away - host : staging;
    }
    p->activation_count[SPW_TIER_HOST] = host;
    p->activation_count[SPW_TIER_NVME] = away - host;
    p->activation_staging = staging;
    p->activations_host = on_host(in, host, staging);
    p->activations_nvme = (away - host) * page_bytes(in);
}

void
spw__plan_activations_place(const spw_plan *p, const plan_input *in)
{
    uint32_t nvme = p->activation_count[SPW_TIER_NVME], host = p->activation_count[SPW_TIER_HOST];
    for (uint32_t i = 0; i < all_of(in); i++)
        in->activation_places[i].tier = i < nvme ? SPW_TIER_NVME : i < nvme + host ? SPW_TIER_HOST : SPW_TIER_DEVICE;
}

void
spw__plan_activations_traffic(const plan_input *in, spw_traffic *t)
{
    for (uint32_t i = 0; i < all_of(in); i++) {
        const spw_act_place *at = &in->activation_places[i];
        uint32_t micro = i % in->activation_micros;
        uint64_t passes = in->micro_batches > micro /* that have so many micro-batches */
                              ? (in->micro_batches - micro - 1) / in->activation_micros + 1
                              : 0;
        if (at->tier == SPW_TIER_DEVICE || i / in->activation_micros >= in->activation_slots_used)
            continue;
        t->h2d += passes * checkpoint_bytes(in);
        t->d2h += passes * checkpoint_bytes(in);
        if (at->tier == SPW_TIER_NVME) {
            t->path_read[at->path_idx] += passes * page_bytes(in);
            t->path_write[at->path_idx] += passes * page_bytes(in);
        }
    }
}
