/*
 * Initial values of parameters: drawn from the run's seed by parameter and element, so that they are the same however units are cut and
 * wherever chunks lie.
 */
#include "engine_internal.h"
#include "normal.h"
#include <math.h>

typedef struct init_job {
    spw_engine *e;
    uint64_t seed;
} init_job;

/* Logarithms of a uniform draw; or of what softplus makes steps of, whose logarithms are as likely as each other. */
static void
draw_logs(float *out, const spw_param *p, uint32_t param_id, uint64_t seed, uint64_t at, uint64_t n)
{
    const bool steps = p->init == SPW_INIT_STEPS;
    const double least = steps ? 0.001 : 0.01, most = steps ? 0.1 : 16;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t r[4];
        double u;
        spw_philox(seed, param_id, at + i, r);
        u = ((double)r[0] + 0.5) * 0x1p-32;
        out[i] = (float)log(steps ? expm1(least * pow(most / least, u)) : least + (most - least) * u);
    }
}

static void
draw_in_turn(float *out, const spw_param *p, uint64_t at, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t e = (at + i) / SPW_TERMS;
        float terms[SPW_TERMS];
        spw_terms_split((float)((e / p->row_cols + e % p->row_cols) % p->below), terms);
        out[i] = terms[(at + i) % SPW_TERMS];
    }
}

void
spw__draw_param(float *out, const spw_param *p, uint32_t param_id, uint64_t seed, uint64_t at, uint64_t n)
{
    if (p->init == SPW_INIT_NORMAL) {
        spw__normal_draw(out, seed, param_id, at, n, p->init_std);
        return;
    }
    if (p->init == SPW_INIT_LOG_UNIFORM || p->init == SPW_INIT_STEPS) {
        draw_logs(out, p, param_id, seed, at, n);
        return;
    }
    if (p->init == SPW_INIT_IN_TURN) {
        draw_in_turn(out, p, at, n);
        return;
    }
    for (uint64_t i = 0; i < n && p->init == SPW_INIT_LOG_COUNT; i++)
        out[i] = (float)log((double)(at + i + 1));
    for (uint64_t i = 0; i < n && p->init != SPW_INIT_LOG_COUNT; i++)
        out[i] = p->init == SPW_INIT_ONES && (!p->in_terms || (at + i) % SPW_TERMS == 0) ? 1.0f : 0.0f;
}

static spw_status
init_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    init_job *job = ctx;
    spw_engine *e = job->e;
    const spw_store_chunk *c = &e->layout.chunks[chunk_idx];
    spw_state_format f = e->config.run.state_format;
    const spw_optimizer *rule = spw__engine_optimizer(e, c->unit_idx);
    float block[4096];
    (void)grad;
    (void)err;
    memset(weights, 0, c->elems * spw_state_weight_bytes(f));
    if (record != NULL)
        memset(record, 0, spw_state_record_bytes(f, rule, c->elems));
    for (layout_stretch s = {0}; spw__layout_next(&e->layout, c, &s);) {
        for (uint64_t i = s.first; i < s.end; i += 4096) {
            uint64_t n = s.end - i < 4096 ? s.end - i : 4096;
            spw__draw_param(block, &e->model->params[s.id], s.id, job->seed, i - s.from, n);
            spw_state_set(f, rule, weights, record, c->elems, SPW_PART_MASTER, i - c->first, n, block);
        }
    }
    return SPW_OK;
}

spw_status
spw_engine_init_params(spw_engine *e, uint64_t seed, spw_error *err)
{
    init_job job = {e, seed};
    spw_error own = {0};
    spw_status st = spw__in_place_check(e, "drawn at random", &own);
    for (uint32_t u = 0; st == SPW_OK && u < e->layout.unit_count; u++)
        if (spw__layout_published(&e->layout, u) != SPW_QUANT_NONE)
            st = SPW_RAISE(&own, SPW_EINVAL,
                           "weights drawn at random are not those that %s has: spillway.frozen_codes \"published\" "
                           "keeps its codes",
                           e->config.model_path);
    if (st == SPW_OK)
        st = spw__engine_fill(e, init_chunk, &job, &own);
    return spw__engine_agree_loaded(e, st, &own, err);
}
