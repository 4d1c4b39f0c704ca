/* See lib_worlds.h. */
#include "lib_worlds.h"
#include "lib_tiny.h"
#include "engine_internal.h"
#include "spw_data.h"
#include <glob.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <cmocka.h>

typedef struct visit {
    spw_engine *e;
    outcome *out;
    uint32_t rank;
} visit;

/* In any order. */
static void
add_digest(uint64_t *digest, uint64_t chunk_idx, const void *bytes, uint64_t count)
{
    uint64_t said[2] = {chunk_idx, spw_checksum(bytes, count)};
    __atomic_fetch_add(digest, spw_checksum(said, sizeof said), __ATOMIC_RELAXED);
}

static spw_status
take_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    visit *v = ctx;
    const spw_layout *l = spw_engine_layout(v->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    const spw_place last = spw__layout_in_unit(l, l->param_ids[l->param_first[c->unit_idx + 1] - 1], c->unit_idx);
    uint64_t base = l->bases[c->unit_idx] + c->first, end;
    uint64_t next = l->bases[c->unit_idx] + spw_round_up(last.first + last.elems, 4096);
    (void)grad;
    (void)err;
    add_digest(&v->out->digest[v->rank], chunk_idx, weights,
               c->elems * spw_state_weight_bytes(spw__engine_format(v->e)));
    if (record != NULL)
        add_digest(
            &v->out->digest[v->rank], l->chunk_count + chunk_idx, record,
            spw_state_record_bytes(spw__engine_format(v->e), spw__engine_optimizer(v->e, c->unit_idx), c->elems));
    for (int p = 0; p <= (record != NULL ? (int)spw__engine_optimizer(v->e, c->unit_idx)->moment_count : 0); p++) {
        end = base + c->elems < next ? c->elems : next > base ? next - base : 0; /* the rest is padding of the parts */
        for (uint64_t at = 0; at < end; at += 4096)
            spw_state_get(spw__engine_format(v->e), spw__engine_optimizer(v->e, c->unit_idx), weights, record, c->elems,
                          (spw_state_part)p, at, end - at < 4096 ? end - at : 4096, v->out->state[p] + base + at);
    }
    return SPW_OK;
}

/* Elements of the model in a row, padded as with one rank. */
static uint64_t
count_elems(const spw_model *m)
{
    spw_layout l;
    uint64_t elems;
    assert_int_equal(spw_layout_make(&l, m, 4096, true, 0, NULL, false, 0, 0, 1, NULL), SPW_OK);
    elems = l.elems;
    spw_layout_free(&l);
    return elems;
}

static void
add_times(outcome *o, const spw_step_result *r)
{
    o->step_s += r->step_s;
    o->compute_s += r->compute_s;
    o->collective_s += r->stall_s[SPW_STALL_COLLECTIVE];
    o->parts_s += r->compute_s + r->other_s;
    for (int k = 0; k < SPW_STALL_COUNT; k++)
        o->parts_s += r->stall_s[k];
    o->busy_s += (double)(r->gather + r->reduce + r->trade);
}

static spw_checkpoint_state
state_at(const spw_engine *e, uint32_t step)
{
    return (spw_checkpoint_state){.step = step, .updates = spw_engine_updates(e)};
}

/* Of a step, of all ranks. */
static uint64_t
micros(const world *w)
{
    return w->micros > 0 ? w->micros : MICRO;
}

static spw_status
run_steps(const world *w, spw_engine *e, const spw_config *c, uint32_t rank, uint64_t vocab, spw_error *err)
{
    spw_checkpoint_job *job = NULL;
    spw_checkpoint_state at;
    const uint32_t groups = w->ranks / spw_config_sharers(c), group = rank / spw_config_sharers(c);
    uint64_t one = c->micro_batch * c->data.seq_length, count = micros(w), each = count / groups;
    int32_t *all[2] = {malloc(count * one * 4), malloc(count * one * 4)};
    int32_t *own[2] = {malloc(each * one * 4), malloc(each * one * 4)};
    double *reference[2] = {calloc(count * one, sizeof(double)), calloc(each * one, sizeof(double))};
    const bool prefers = strcmp(c->data.documents, "whole") == 0;
    spw_step_result r = {0};
    spw_store_stats stats;
    double eval;
    for (uint32_t s = w->first_step; s < w->first_step + w->steps; s++) {
        tiny_batch(s, vocab, count * one, all[0], all[1]);
        for (uint64_t i = 0; i < (count < 5 ? count : 5) * one; i++)
            all[1][i] = i % 3 == 0 ? -1 : all[1][i]; /* ranks have different numbers of targets */
        for (uint64_t i = 0; i < count * one && strcmp(c->data.documents, "separate") == 0; i++)
            all[0][i] |= (i * 7 + s) % 11 == 0 ? SPW_TOKEN_BEGINS : 0;
        if (prefers)
            tiny_pairs(count * one, c->data.seq_length, all[0], all[1], reference[0]);
        for (uint64_t i = 0; i < each; i++) {
            for (int k = 0; k < 2; k++)
                memcpy(own[k] + i * one, all[k] + (i * groups + group) * one, one * 4);
            memcpy(reference[1] + i * one, reference[0] + (i * groups + group) * one, one * sizeof(double));
        }
        spw_engine_set_reference(e, prefers ? reference[1] : NULL);
        for (uint64_t i = 0; i < each * one && w->idle && s == 1 && rank + 1 == w->ranks; i++)
            own[1][i] = -1;
        at = state_at(e, s);
        if (s > 0 && s == w->settles)
            SPW_TRY(w->meanwhile ? spw_checkpoint_begin(&job, e, c, w->save, &at, err) : spw__engine_settle(e, err));
        SPW_TRY(spw_engine_step(e, own[0], own[1], (uint32_t)each, c->optimizer.lr, &r, err));
        if (rank == 0)
            w->out->losses[s] = r.loss;
        w->out->skipped += rank == 0 && r.skipped;
        if (rank == 0 && s > w->first_step)
            add_times(w->out, &r);
    }
    SPW_TRY(spw_checkpoint_finish(job, NULL, err));
    if (w->steps > 0)
        SPW_TRY(spw_engine_eval(e, own[0], own[1], w->micros > 0 ? (uint32_t)each : 1, &eval, err));
    spw_store_get_stats(e->store, &stats);
    w->out->h2d[rank] = stats.h2d_bytes;
    w->out->parts[rank] = stats.uses;
    if (rank == 0 && w->steps > 0) {
        w->out->eval = eval;
        w->out->norm = r.grad_norm;
    }
    if (e->ranks != NULL) { /* everything that was asked for has been used by now */
        spw_received gathered, reduced, traded;
        spw__ranks_bytes(e->ranks, &gathered, &reduced, &traded);
        w->out->trade[rank] = traded.all;
        w->out->far_trade[rank] = traded.far;
        w->out->gather[rank] = gathered.all;
        w->out->reduce[rank] = reduced.all;
        w->out->far_gather[rank] = gathered.far;
        w->out->far_reduce[rank] = reduced.far;
    }
    for (int k = 0; k < 2; k++) {
        free(all[k]);
        free(own[k]);
        free(reference[k]);
    }
    return SPW_OK;
}

/* What a rank's channels map, by opening as many. */
static spw_status
channel_bytes(spw_comm *comm, const engine_zeropp *z, uint32_t sharers, uint64_t *out, spw_error *err)
{
    rank_channels channels = {NULL};
    uint64_t before = spw_region_bytes_live();
    SPW_TRY(spw__ranks_open_channels(&channels, comm, z, sharers, 0, err));
    *out = spw_region_bytes_live() - before;
    spw__ranks_close_channels(&channels);
    return SPW_OK;
}

/* Of this process' swap files, as the file system has them. */
static uint64_t
swap_bytes(const spw_plan *p, uint32_t rank)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < p->path_count; i++) {
        char pattern[SPW_PATH_BYTES + 64];
        glob_t found;
        snprintf(pattern, sizeof pattern, "%s/spillway-*/rank-%u/swap.bin", p->paths[i], rank);
        if (glob(pattern, 0, NULL, &found) == 0) {
            for (size_t f = 0; f < found.gl_pathc; f++) {
                struct stat st;
                bytes += stat(found.gl_pathv[f], &st) == 0 ? (uint64_t)st.st_size : 0;
            }
            globfree(&found);
        }
    }
    return bytes;
}

/* What the plan of a device that is far too small names. */
static uint64_t
least_device(const world *w, const spw_config *config, const spw_model *model)
{
    static spw_config c;
    static spw_plan p;
    spw_engine *e = NULL;
    c = *config;
    c.run.device_memory = 4096;
    assert_int_equal(spw_engine_create(&e,
                                       &(spw_engine_options){.config = &c,
                                                             .model = model,
                                                             .plan_only = true,
                                                             .local_ranks = w->per_host,
                                                             .process_bytes = TINY_PROCESS_BYTES,
                                                             .plan_out = &p},
                                       NULL),
                     SPW_ENOFIT);
    assert_int_equal(p.lack, SPW_LACK_DEVICE);
    return p.least_bytes;
}

/* Of one of so many ranks, on hosts that are not there. */
static spw_status
plan_alone(const world *w, const spw_config *c, const spw_model *model, spw_error *err)
{
    spw_engine *e;
    SPW_TRY(spw_engine_create(&e,
                              &(spw_engine_options){.config = c,
                                                    .model = model,
                                                    .plan_only = true,
                                                    .local_ranks = w->per_host,
                                                    .resumes = true,
                                                    .process_bytes = TINY_PROCESS_BYTES,
                                                    .plan_out = &w->out->alone},
                              err));
    spw_engine_destroy(e);
    return SPW_OK;
}

/* A second save of the step meanwhile is refused on all ranks, and leaves the first alone. */
static spw_status
save_once(const world *w, spw_engine *e, const spw_config *c, const spw_checkpoint_state *at, spw_error *err)
{
    spw_checkpoint_job *job, *second;
    spw_error refusal = {0};
    SPW_TRY(spw_checkpoint_begin(&job, e, c, w->save, at, err));
    if (spw_checkpoint_begin(&second, e, c, w->save, at, &refusal) != SPW_EINVAL)
        return SPW_RAISE(err, SPW_EINVAL, "a second save of the step was not refused: %s", refusal.message);
    return spw_checkpoint_finish(job, NULL, err);
}

/* In the process of one rank; with one rank in this process. */
static spw_status
run_rank(const world *w, spw_comm *comm, uint32_t rank, spw_error *err)
{
    bool last = rank + 1 == w->ranks;
    spw_config c = last && w->last != NULL ? *w->last : *w->config;
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    visit v;
    uint64_t regions, channels = 0;
    spw_checkpoint_state at;
    char found[SPW_PATH_BYTES] = "", weights[SPW_PATH_BYTES + 32];
    uint32_t shard = w->config->zero.mics_shard_size > 0 ? (uint32_t)w->config->zero.mics_shard_size : w->ranks;
    engine_zeropp z = {.group = w->config->zero.hpz_partition_size,
                       .host_ranks = w->per_host,
                       .shard = shard > 1 && shard < w->ranks ? shard : 0,
                       .by_host =
                           w->config->zero.mics_by_host && w->per_host > 1 && w->per_host < shard ? w->per_host : 0};
    tiny_model_config(&mc, w->family == SPW_FAMILY_QWEN2 ? SPW_FAMILY_GPT2 : w->family);
    if (w->family == SPW_FAMILY_QWEN2) /* a larger one, so that padding is little */
        mc.width = 96, mc.head_dim = 24, mc.mlp_width = 384, mc.layers = 8, mc.vocab = 256;
    mc.dropout = w->dropout;
    mc.mlp_width = w->mlp_width > 0 ? w->mlp_width : mc.mlp_width;
    mc.vocab = w->vocab > 0 ? w->vocab : mc.vocab;
    mc.shared_width = mc.sigmoid ? mc.mlp_width : mc.shared_width;
    c.model = mc;
    c.run.ranks = w->ranks;
    c.accumulation = micros(w) / (w->ranks / spw_config_sharers(&c));
    c.train_batch_size = micros(w) * c.micro_batch;
    SPW_TRY(spw_model_from_config(&model, &c, err));
    if (w->frozen)
        assert_true(spw_model_freeze(model, mc.family == SPW_FAMILY_GPT2 ? "h.1.*" : "model.layers.1.*") > 0);
    w->out->elems = count_elems(model);
    assert_true(w->out->elems <= ELEMS_MAX);
    if (w->plugin != NULL) {
        setenv("SPW_CUDA_PLUGIN", w->plugin, 1);
        snprintf(c.run.device, sizeof c.run.device, "cuda");
    }
    z.grads = w->config->zero.quantized_gradients && w->per_host > 0;
    if (comm != NULL)
        SPW_TRY(channel_bytes(comm, &z, spw_config_sharers(&c), &channels, err));
    regions = spw_region_bytes_live() + channels;
    if (w->least_device || (last && w->last_least))
        c.run.device_memory = least_device(w, &c, model);
    if (rank == 0 && w->alone)
        SPW_TRY(plan_alone(w, &c, model, err));
    if (w->load != NULL)
        SPW_TRY(spw_checkpoint_find(w->load, found, err));
    snprintf(weights, sizeof weights, "%.1000s/model.safetensors", found);
    SPW_TRY(spw_engine_create(&e,
                              &(spw_engine_options){.config = &c,
                                                    .model = model,
                                                    .comm = comm,
                                                    .resumes = true,
                                                    .weights_from = w->load != NULL ? weights : NULL,
                                                    .process_bytes = TINY_PROCESS_BYTES,
                                                    .room_bytes = last ? w->last_room : 0},
                              err));
    v = (visit){e, w->out, rank};
    w->out->digest[rank] = 0;
    w->out->part[rank] = e->layout.part;
    w->out->plan[rank] = *spw_engine_plan(e);
    w->out->held[rank] = spw_engine_layout(e)->elems;
    for (uint32_t u = 0; rank == 0 && u < e->layout.unit_count; u++)
        w->out->padded += spw__grad_elems(e, u);
    if (last)
        spw_sleep_ns((uint64_t)(w->late_s * 1e9));
    SPW_TRY(w->load != NULL ? spw_checkpoint_load(e, found, err) : spw_engine_init_params(e, c.run.seed, err));
    if (w->prepare != NULL)
        SPW_TRY(w->prepare(e, err));
    SPW_TRY(run_steps(w, e, &c, rank, mc.vocab, err));
    w->out->taken[rank] = spw_region_bytes_live() - regions + swap_bytes(spw_engine_plan(e), rank) +
                          (e->host_addressable ? 0 : spw_gpu_bytes_live(e->gpu));
    at = state_at(e, w->first_step + w->steps);
    if (w->save != NULL && !w->meanwhile)
        SPW_TRY(save_once(w, e, &c, &at, err));
    SPW_TRY(spw_store_sweep(spw_engine_store(e), SPW_SWEEP_VISIT, take_chunk, &v, err));
    spw_engine_destroy(e);
    spw_model_destroy(model);
    return SPW_OK;
}

static spw_status
run_one(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    return run_rank(ctx, comm, rank, err);
}

void
world_run(const world *w)
{
    world own = *w;
    ranks_on_hosts(w->per_host, w->ranks,
                   &(spw_comm_options){.link_bytes_per_s = w->link, .chaos_seed = w->config->run.chaos_seed}, run_one,
                   &own);
    for (uint32_t r = 0; r < w->ranks; r++) {
        if (w->out->digest[r] != w->out->digest[w->out->part[r]])
            fail_msg("rank %u of %u has part %u as rank %u has, and other bytes in it", r, w->ranks, w->out->part[r],
                     w->out->part[r]);
    }
}

outcome *
outcome_new(void)
{
    return ranks_share(sizeof(outcome));
}

void
outcome_free(outcome *o)
{
    ranks_unshare(o, sizeof *o);
}

typedef struct refusal {
    const spw_config *config;
    spw_family family;
    const char *says;
} refusal;

static spw_status
refused(void *ctx, spw_comm *comm, uint32_t rank, spw_error *err)
{
    const refusal *f = ctx;
    spw_config c = *f->config;
    spw_model_config mc;
    spw_model *model;
    spw_engine *e;
    spw_error why = {0};
    (void)rank;
    c.run.ranks = spw_comm_get_info(comm)->world;
    tiny_model_config(&mc, f->family);
    SPW_TRY(spw_model_build(&model, &mc, err));
    if (spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model, .comm = comm}, &why) != SPW_ECONFIG ||
        strstr(why.message, f->says) == NULL)
        return SPW_RAISE(err, SPW_EINVAL, "not refused, or with other words: %s", why.message);
    spw_model_destroy(model);
    return SPW_OK;
}

void
world_refused(const spw_config *c, spw_family family, uint32_t per_host, uint32_t ranks, const char *says)
{
    refusal f = {c, family, says};
    ranks_on_hosts(per_host, ranks, &(spw_comm_options){0}, refused, &f);
}

void
outcome_within(const outcome *a, const outcome *b, double most, const char *what)
{
    double worst = 0, top = 0;
    assert_int_equal(a->elems, b->elems);
    for (int s = 0; s < STEPS_MAX; s++) { /* those that were not run are 0 */
        if (fabs(a->losses[s] - b->losses[s]) > 1e-6 * fabs(a->losses[s]))
            fail_msg("%s: loss of step %d is %.9g, one rank has %.9g", what, s + 1, b->losses[s], a->losses[s]);
    }
    for (uint64_t i = 0; i < a->elems; i++) {
        double d = fabs((double)a->state[0][i] - (double)b->state[0][i]);
        worst = d > worst ? d : worst;
        top = fabs((double)a->state[0][i]) > top ? fabs((double)a->state[0][i]) : top;
    }
    if (!(worst <= most * top))
        fail_msg("%s: weights differ by %.3g, the largest is %.3g", what, worst, top);
}

void
outcome_near(const outcome *one, const outcome *other, const char *what)
{
    outcome_within(one, other, 1e-6, what);
}

void
outcome_same(const outcome *a, const outcome *b, const char *what)
{
    for (int s = 0; s < STEPS_MAX; s++) {
        if (memcmp(&a->losses[s], &b->losses[s], sizeof a->losses[s]) != 0)
            fail_msg("%s: loss of step %d is %.17g, expected %.17g", what, s + 1, b->losses[s], a->losses[s]);
    }
    if (memcmp(&a->norm, &b->norm, sizeof a->norm) != 0 || memcmp(&a->eval, &b->eval, sizeof a->eval) != 0)
        fail_msg("%s: norm %.17g and evaluation %.17g, expected %.17g and %.17g", what, b->norm, b->eval, a->norm,
                 a->eval);
    for (int p = 0; p < PARTS; p++) {
        if (memcmp(a->state[p], b->state[p], a->elems * sizeof(float)) != 0)
            fail_msg("%s: other bytes in part %d of the state", what, p);
    }
}
