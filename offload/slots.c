/*
 * Slots: the fixed pools of host memory that chunks on nvme pass through, one for weights and one for records, and the
 * memory of consumed gradients that is lent to records besides. Who gets one, who has to give one back; what goes through
 * them is others' business. Called by the mover, lock held.
 */
#include "offload_internal.h"

void
spw__store_free_weight_slot(spw_store *s, chunk *c)
{
    SPW_ASSERT(c->w == W_CLEAN || c->w == W_EMPTY);
    SPW_ASSERT(c->pins == 0);
    if (s->cfg.chaos_seed != 0)
        memset(c->weights, 0xff, spw__chunk_weights(s, c));
    s->weight_slot_owner[c->weight_slot] = -1;
    c->weight_slot = -1;
    c->weights = NULL;
    c->w = W_EMPTY;
}

/* How far away the next need of a chunk's host copy is; larger is farther. */
static uint64_t
distance(const spw_store *s, const chunk *c)
{
    const unit *u = &s->units[c->plan.unit_idx];
    uint32_t k = c->idx - u->plan.chunk_first;
    if (u->op == OP_UPDATE && u->grad_ready && (s->gate_open || spw__runs_ahead(s, u)) && !c->started)
        return 0; /* about to be updated */
    if (u->wanted && u->d == D_FILLING && k >= u->fill_next)
        return 0; /* about to be copied: its next use is the one after that */
    if (u->d == D_READY || (u->d == D_FILLING && k < u->fill_next))
        return (1ull << 32) + spw__future_until_again(&s->future, c->plan.unit_idx);
    return spw__future_until(&s->future, c->plan.unit_idx);
}

/*
 * Chunk o is in memory for a fill that copies it as soon as the chunks before it have come, and the next of them comes without
 * another slot. To wait for that costs whoever needs a slot less than reading o again.
 */
static bool
copied_soon(const spw_store *s, const chunk *o)
{
    const unit *u = &s->units[o->plan.unit_idx];
    const chunk *next;
    if (!spw__store_fill_goes_on(s, u) || u->fill_next > o->idx - u->plan.chunk_first ||
        o->generation != u->device_generation)
        return false;
    next = &s->chunks[u->plan.chunk_first + u->fill_next];
    return next->w != W_EMPTY && (next->w != W_CLEAN || next->generation == u->device_generation);
}

bool
spw__store_take_weight_slot(spw_store *s, chunk *c, uint64_t nearer_than)
{
    int32_t best = -1;
    uint64_t best_distance = 0;
    for (uint32_t i = 0; i < s->cfg.weight_slot_count; i++) {
        chunk *owner;
        if (s->weight_slot_owner[i] < 0) {
            best = (int32_t)i;
            best_distance = UINT64_MAX;
            break;
        }
        owner = &s->chunks[s->weight_slot_owner[i]];
        if (owner->w == W_CLEAN && owner->pins == 0 && !copied_soon(s, owner)) {
            uint64_t d = distance(s, owner) + 1;
            if (d > best_distance) {
                best = (int32_t)i;
                best_distance = d;
            }
        }
    }
    if (best < 0 || best_distance <= nearer_than)
        return false;
    if (s->weight_slot_owner[best] >= 0)
        spw__store_free_weight_slot(s, &s->chunks[s->weight_slot_owner[best]]);
    s->weight_slot_owner[best] = (int32_t)c->idx;
    c->weight_slot = best;
    c->weights = s->weight_slots + (uint64_t)best * s->slot_weight_bytes;
    return true;
}

/*
 * The lowest loan below `end`: units are updated from the lowest on and get their next gradient from the highest on, so
 * that one is free the longest.
 */
static bool
take_loan(spw_store *s, chunk *c, uint32_t end)
{
    for (uint32_t i = 0; i < end; i++) {
        if (s->loans[i].held > 0 || s->loans[i].chunk != NULL)
            continue;
        s->loans[i].chunk = c;
        c->record_slot = (int32_t)(s->cfg.record_slot_count + i);
        c->record = s->grads + i * s->slot_record_bytes;
        s->stats.loans++;
        return true;
    }
    return false;
}

/* released: the update runs without any help from the main thread. High loans last: the backward pass begins there. */
bool
spw__store_take_record_slot(spw_store *s, chunk *c, bool released)
{
    if (released && take_loan(s, c, s->loan_count / 2))
        return true;
    if (s->record_slot_free_count == 0)
        return released && take_loan(s, c, s->loan_count);
    c->record_slot = s->record_slot_free[--s->record_slot_free_count];
    c->record = s->record_slots + (uint64_t)c->record_slot * s->slot_record_bytes;
    return true;
}

void
spw__store_free_record_slot(spw_store *s, chunk *c)
{
    uint32_t slot = (uint32_t)c->record_slot;
    if (s->cfg.chaos_seed != 0)
        memset(c->record, 0xff, spw__chunk_record(s, c));
    if (slot < s->cfg.record_slot_count) {
        s->record_slot_free[s->record_slot_free_count++] = c->record_slot;
    } else {
        s->loans[slot - s->cfg.record_slot_count].chunk = NULL;
        pthread_cond_broadcast(&s->main_cond);
    }
    c->record_slot = -1;
    c->record = NULL;
    c->r = R_EMPTY;
    spw__store_rush(s, c, false);
}
