/*
 * Where somebody sees a chunk: the store's functions get its arrays in memory that the host addresses, of the types that everybody knows.
 * Mostly that is where they are. Of a device apart, and of weights that are stored as codes, it is a copy in staging memory, which
 * one worker at a time has.
 */
#include "offload_internal.h"
#include "quant.h"

typedef struct view {
    void *weights, *record;
    stage *stage;   /* where they are, if not where the chunk is */
    bool apart;     /* the chunk lies on a device apart */
    spw_quant form; /* SPW_QUANT_NONE: numbers; else weights are what codes decode to */
} view;

/* Both arrays, one way; blocks. Words of 4 bytes: every array has whole pages. */
static void
move_staged(spw_store *s, const chunk *c, const view *v, bool in)
{
    const stage *t = v->stage;
    bool record = s->units[c->plan.unit_idx].on_device;
    char *host[2] = {v->form != SPW_QUANT_NONE ? t->codes : t->weights, t->record},
         *device[2] = {c->weights, c->record};
    uint64_t bytes[2] = {spw_store_weight_bytes(c->plan.elems, s->cfg.weight_bytes, v->form), spw__chunk_record(s, c)};
    if (!in && s->units[c->plan.unit_idx]
                   .direct) /* compute may still read what is about to change; who comes later waits for the edit */
        spw_gpu_event_wait(s->units[c->plan.unit_idx].used, t->queue);
    for (int k = 0; k < (record ? 2 : 1); k++) {
        if (in)
            spw_gpu_copy_d2h(t->queue, host[k], SPW_F32, device[k], SPW_F32, bytes[k] / 4, NULL);
        else
            spw_gpu_copy_h2d(t->queue, device[k], SPW_F32, host[k], SPW_F32, bytes[k] / 4);
    }
    spw_gpu_queue_sync(t->queue);
}

static void *
codes_of(const chunk *c, const view *v)
{
    return v->apart ? v->stage->codes : c->weights;
}

/* The copy of weights becomes codes; what is behind them in their last page too is always the same. */
static void
settle_codes(const spw_store *s, const chunk *c, const view *v)
{
    uint64_t bytes = spw__quant_bytes(v->form, c->plan.elems),
             all = spw_store_weight_bytes(c->plan.elems, s->cfg.weight_bytes, v->form);
    spw__quant_settle(codes_of(c, v), v->form, v->weights, s->cfg.weight_dtype, c->plan.elems);
    memset((char *)codes_of(c, v) + bytes, 0, all - bytes);
}

static stage *
take_stage(spw_store *s)
{
    uint32_t i = 0;
    pthread_mutex_lock(&s->stage_lock);
    while (s->stages[i].taken) {
        if (++i == s->stage_count) {
            pthread_cond_wait(&s->stage_freed, &s->stage_lock);
            i = 0;
        }
    }
    s->stages[i].taken = true;
    pthread_mutex_unlock(&s->stage_lock);
    return &s->stages[i];
}

static void
give_stage(spw_store *s, stage *t)
{
    pthread_mutex_lock(&s->stage_lock);
    t->taken = false;
    pthread_cond_signal(&s->stage_freed);
    pthread_mutex_unlock(&s->stage_lock);
}

/* read: the copy begins as what is there. No lock held. */
static view
open_view(spw_store *s, const chunk *c, bool read)
{
    view v = {c->weights, c->record, NULL, s->apart && c->plan.weight_tier == SPW_TIER_DEVICE,
              spw__store_code_form(&s->cfg, &c->plan)};
    if (!v.apart && v.form == SPW_QUANT_NONE)
        return v;
    v.stage = take_stage(s);
    v.weights = v.stage->weights;
    v.record = v.apart ? v.stage->record : v.record;
    if (!read && spw_codes_group(v.form) > 0)
        v.weights = codes_of(c, &v);
    if (read && v.apart)
        move_staged(s, c, &v, true);
    if (read && v.form != SPW_QUANT_NONE)
        spw__quant_decode(v.weights, s->cfg.weight_dtype, codes_of(c, &v), v.form, c->plan.elems);
    return v;
}

/* write: what is there becomes the copy. */
static void
close_view(spw_store *s, const chunk *c, const view *v, bool write)
{
    if (v->stage == NULL)
        return;
    if (write && v->form != SPW_QUANT_NONE && spw_codes_group(v->form) == 0)
        settle_codes(s, c, v);
    if (write && v->apart)
        move_staged(s, c, v, false);
    give_stage(s, v->stage);
}

spw_status
spw__store_call_with(spw_store *s, const chunk *c, spw_store_fn fn, void *ctx, bool read, bool write, spw_error *err)
{
    bool trainable = s->units[c->plan.unit_idx].plan.trainable;
    view v = open_view(s, c, read);
    spw_status st = v.apart ? spw_gpu_check(s->cfg.gpu, err) : SPW_OK;
    if (st == SPW_OK)
        st = fn(ctx, c->idx, v.weights, trainable ? v.record : NULL, NULL, err);
    close_view(s, c, &v, write && st == SPW_OK);
    return st == SPW_OK && v.apart ? spw_gpu_check(s->cfg.gpu, err) : st;
}
