/*
 * Parameter groups: which coefficients every element takes, as stretches of each chunk, and the update that the store's
 * workers call with them.
 */
#include "engine_internal.h"
#include <fnmatch.h>
#include <math.h>

/* The parameter of a unit that holds an element, or else the next one; NULL behind the last. */
static const spw_param *
param_from(const spw_engine *e, uint32_t unit_idx, uint64_t element, uint64_t *end)
{
    const spw_layout *l = &e->layout;
    uint32_t k = spw__layout_from(l, unit_idx, element);
    spw_place at;
    if (k == l->param_first[unit_idx + 1])
        return NULL;
    at = spw__layout_in_unit(l, l->param_ids[k], unit_idx);
    *end = spw_round_up(at.first + at.elems, SPW_STATE_GROUP); /* what shares a scale with it is updated with it */
    return &e->model->params[l->param_ids[k]];
}

/* Of the configuration's groups the one that a parameter belongs to, from 1 on; 0: to none. */
static uint32_t
group_of(const spw_config *c, const spw_param *p)
{
    for (uint32_t g = 0; g < c->optimizer.group_count; g++) {
        if (fnmatch(c->optimizer.groups[g].match, p->name, 0) == 0)
            return g + 1;
    }
    return 0;
}

static uint32_t
kind_of(const spw_param *p)
{
    return p->ndim > 1 ? MATRIX : VECTOR;
}

static uint32_t
coef_of(const spw_engine *e, const spw_param *p)
{
    const spw_place *at = &e->layout.places[p - e->model->params];
    return KINDS * group_of(&e->config, p) + (e->layout.units[at->unit_idx].whole ? WHOLE : kind_of(p));
}

static double
decay_of(const spw_config *c, uint32_t group, uint32_t kind)
{
    if (group > 0 && !isnan(c->optimizer.groups[group - 1].weight_decay))
        return c->optimizer.groups[group - 1].weight_decay;
    return kind == VECTOR && !c->run.decay_norm_and_bias ? 0 : c->optimizer.weight_decay;
}

double
spw__weight_decay_of(const spw_config *c, const spw_param *p)
{
    return decay_of(c, group_of(c, p), kind_of(p));
}

/* A group that no parameter belongs to is a mistake in its glob. */
spw_status
spw__check_groups(const spw_engine *e, spw_error *err)
{
    for (uint32_t g = 1; g <= e->config.optimizer.group_count; g++) {
        bool used = false;
        for (uint32_t id = 0; id < e->model->param_count; id++)
            used |= coef_of(e, &e->model->params[id]) / KINDS == g;
        if (!used)
            return SPW_RAISE(err, SPW_ECONFIG,
                             "spillway.param_groups: no parameter is left for \"%s\" (names look like %s)",
                             e->config.optimizer.groups[g - 1].match, e->model->params[0].name);
    }
    return SPW_OK;
}

/* Cuts every chunk into stretches of one parameter group; padding goes with what follows, but for what shares a scale with what is before. */
spw_status
spw__make_ranges(spw_engine *e, spw_error *err)
{
    uint32_t count = 0, most = e->layout.param_count + 2 * e->layout.chunk_count;
    uint32_t longest = 0;
    e->ranges = spw_mem_calloc(most, sizeof *e->ranges);
    e->range_first = spw_mem_calloc(e->layout.chunk_count + 1, sizeof *e->range_first);
    if (e->ranges == NULL || e->range_first == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "parameter groups of %u chunks", e->layout.chunk_count);
    for (uint32_t i = 0; i < e->layout.chunk_count; i++) {
        const spw_store_chunk *c = &e->layout.chunks[i];
        uint64_t end = 0;
        e->range_first[i] = count;
        for (uint64_t at = 0; at < c->elems; at = end) {
            const spw_param *p = param_from(e, c->unit_idx, c->first + at, &end);
            const spw_opt_coef *coef = &e->coefs[p != NULL                            ? coef_of(e, p)
                                                 : e->layout.units[c->unit_idx].whole ? WHOLE
                                                                                      : MATRIX];
            end = p == NULL || end - c->first > c->elems ? c->elems : end - c->first;
            SPW_ASSERT(end % SPW_STATE_GROUP == 0);
            if (count > e->range_first[i] && e->ranges[count - 1].coef == coef)
                count--;
            e->ranges[count++] = (spw_opt_range){end, coef};
        }
    }
    e->range_first[e->layout.chunk_count] = count;
    SPW_ASSERT(count <= most);
    for (uint32_t i = 0; i < e->layout.chunk_count; i++)
        longest =
            e->range_first[i + 1] - e->range_first[i] > longest ? e->range_first[i + 1] - e->range_first[i] : longest;
    e->device_ranges = spw_mem_calloc(e->device_updates ? longest : 1, sizeof *e->device_ranges);
    return e->device_ranges != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "parameter groups of a chunk");
}

/* Into coefs (COEF_COUNT); NULL: only whether they can be had. */
static spw_status
prepare(const spw_engine *e, double lr, double grad_scale, spw_opt_coef *coefs, spw_error *err)
{
    const spw_config *c = &e->config;
    spw_opt_hp hp = {.lr = lr,
                     .beta1 = c->optimizer.beta1,
                     .beta2 = c->optimizer.beta2,
                     .eps = c->optimizer.eps,
                     .decoupled = c->optimizer.adam_w_mode,
                     .bias_correction = c->optimizer.bias_correction,
                     .momentum = c->optimizer.momentum,
                     .dampening = c->optimizer.dampening,
                     .nesterov = c->optimizer.nesterov,
                     .lr_decay = c->optimizer.lr_decay,
                     .step = e->updates + 1,
                     .grad_scale = grad_scale,
                     .seed = c->run.seed,
                     .nearest = c->run.nearest_moments};
    for (uint32_t g = 0; g <= c->optimizer.group_count; g++) {
        const spw_param_group *own = g > 0 ? &c->optimizer.groups[g - 1] : NULL;
        for (uint32_t kind = MATRIX; kind < KINDS; kind++) {
            const spw_optimizer *o = spw__optimizer_for(e->optimizer, kind == WHOLE);
            spw_opt_hp with = hp;
            spw_opt_coef unused;
            if (kind == WHOLE && o != &spw_opt_muon)
                continue;
            if (e->optimizer == &spw_opt_muon)
                with.lr =
                    spw_schedule_group_lr(c, hp.step, lr, kind == WHOLE ? c->optimizer.muon_lr : c->optimizer.adam_lr);
            with.weight_decay = decay_of(c, g, kind);
            if (own != NULL && !isnan(own->lr))
                with.lr = spw_schedule_group_lr(c, hp.step, lr, own->lr);
            if (own != NULL && !isnan(own->beta1)) {
                with.beta1 = own->beta1;
                with.beta2 = own->beta2;
            }
            spw_schedule_betas(c, with.step, &with.beta1, &with.beta2); /* whose cycle is every group's, as there */
            SPW_TRY(spw_opt_prepare(coefs != NULL ? &coefs[KINDS * g + kind] : &unused, o, &with, err));
        }
    }
    return SPW_OK;
}

spw_status
spw__set_coefficients(spw_engine *e, double lr, double grad_scale, spw_error *err)
{
    return prepare(e, lr, grad_scale, e->coefs, err);
}

spw_status
spw__check_rate(const spw_engine *e, double lr, spw_error *err)
{
    return prepare(e, lr, 1, NULL, err);
}

spw_opt_chunk
spw__opt_chunk(const spw_engine *e, uint32_t chunk_idx, const spw_store_state *state, const void *grad, uint64_t first,
               uint64_t count)
{
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    return (spw_opt_chunk){.format = e->config.run.state_format,
                           .elems = c->elems,
                           .weights = state->weights,
                           .record = state->record,
                           .log = state->log,
                           .log_weights = state->log_weights,
                           .grad = grad,
                           .grad_dtype = e->config.run.grad_dtype,
                           .first = e->layout.bases[c->unit_idx] + c->first,
                           .begin = first,
                           .end = first + count};
}

spw_status
spw__update_chunk(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first,
                  uint64_t count, spw_error *err)
{
    const spw_engine *e = ctx;
    const spw_opt_chunk chunk = spw__opt_chunk(e, chunk_idx, state, grad, first, count);
    const uint32_t at = e->range_first[chunk_idx];
    uint64_t bad = spw_opt_step(&chunk, e->ranges + at, e->range_first[chunk_idx + 1] - at);
    state->no_room = bad == SPW_OPT_NO_ROOM;
    return bad > 0 && !state->no_room ? spw__raise_nonfinite(ctx, chunk_idx, bad, err) : SPW_OK;
}

spw_status
spw__undo_chunk(void *ctx, uint32_t chunk_idx, spw_store_state *state, const void *grad, uint64_t first, uint64_t count,
                spw_error *err)
{
    const spw_engine *e = ctx;
    const spw_opt_chunk chunk = spw__opt_chunk(e, chunk_idx, state, grad, first, count);
    const uint32_t at = e->range_first[chunk_idx];
    (void)err;
    spw_opt_undo(&chunk, e->ranges + at, e->range_first[chunk_idx + 1] - at);
    return SPW_OK;
}

spw_status
spw__raise_nonfinite(void *ctx, uint32_t chunk_idx, uint64_t bad, spw_error *err)
{
    const spw_engine *e = ctx;
    return SPW_RAISE(err, SPW_ENONFINITE,
                     "%llu elements of the gradient of unit %u are infinite or NaN; with gradient_clipping or "
                     "bf16.check_grad_overflow such a step is skipped",
                     (unsigned long long)bad, e->layout.chunks[chunk_idx].unit_idx);
}

/* ---------------------------------------------------------------- on the device */

_Static_assert((int)SPW_OPT_ADAM == (int)SPW_RULE_ADAM && (int)SPW_OPT_ADAGRAD == (int)SPW_RULE_ADAGRAD &&
                   (int)SPW_OPT_LION == (int)SPW_RULE_LION && (int)SPW_OPT_SGD == (int)SPW_RULE_SGD &&
                   (int)SPW_OPT_MUON == (int)SPW_RULE_MUON,
               "gpu has cpu_adam's rules");

static spw_gpu_update
device_update(const spw_engine *e, uint32_t chunk_idx, void *weights, void *record, const void *grad)
{
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    const spw_opt_coef *coef = e->ranges[e->range_first[chunk_idx]].coef;
    spw_state_format f = e->config.run.state_format;
    return (spw_gpu_update){.rule = (spw_gpu_rule)spw__engine_optimizer(e, c->unit_idx)->builtin,
                            .weight_dtype = spw_state_weight_dtype(f),
                            .grad_dtype = e->config.run.grad_dtype,
                            .low_bytes = spw_state_low_bytes(f),
                            .moment_bytes = spw_state_moment_bytes(f),
                            .elems = c->elems,
                            .weights = weights,
                            .record = record,
                            .grad = grad,
                            .nearest = coef->nearest,
                            .key = coef->key,
                            .first = e->layout.bases[c->unit_idx] + c->first};
}

/* Of a chunk, in device_ranges; scaled: the gradient is as it was made. Returns how many. */
static uint32_t
ranges_for_device(const spw_engine *e, uint32_t chunk_idx, bool scaled)
{
    const spw_opt_range *ranges = e->ranges + e->range_first[chunk_idx];
    const uint32_t count = e->range_first[chunk_idx + 1] - e->range_first[chunk_idx];
    for (uint32_t k = 0; k < count; k++) {
        spw_gpu_update_range *r = &e->device_ranges[k];
        *r = (spw_gpu_update_range){.end = ranges[k].end, .grad_scale = scaled ? ranges[k].coef->grad_scale : 1};
        memcpy(r->c, ranges[k].coef->c, sizeof r->c);
    }
    return count;
}

void
spw__update_on_device(void *ctx, uint32_t chunk_idx, spw_gpu_queue *queue, void *weights, void *record, void *grad,
                      uint64_t *bad)
{
    const spw_engine *e = ctx;
    const spw_gpu_update u = device_update(e, chunk_idx, weights, record, grad);
    const uint32_t count = ranges_for_device(e, chunk_idx, u.rule != SPW_RULE_MUON);
    spw_gpu_update_state(queue, &u, e->device_ranges, count, bad);
}

void
spw__take_momentum_on_device(void *ctx, uint32_t chunk_idx, spw_gpu_queue *queue, void *weights, void *record,
                             void *grad, uint64_t *bad)
{
    const spw_engine *e = ctx;
    const spw_gpu_update u = device_update(e, chunk_idx, weights, record, grad);
    const uint32_t count = ranges_for_device(e, chunk_idx, true);
    spw_gpu_momentum(queue, &u, grad, e->device_ranges, count, spw__chunk_squares(e, chunk_idx, 0), bad);
}
