/*
 * Against an independent implementation: the same weights and tokens as plain PyTorch in fp32 (vectors made by
 * gen_torch_vectors.py) give the same logits, loss, gradients and 20 steps of AdamW with accumulation and clipping, of Muon, and of
 * preferences between answers.
 */
#include "lib_tiny.h"
#include "spw_data.h"
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum {
    H_MAGIC,
    H_FAMILY,
    H_VOCAB,
    H_WIDTH,
    H_LAYERS,
    H_HEADS,
    H_KV,
    H_DIM,
    H_MLP,
    H_POSITIONS,
    H_T,
    H_B,
    H_A,
    H_STEPS,
    H_TIED,
    H_TENSORS,
    H_COUNT
};

/*
 * Relative, of all 20 steps. PyTorch in fp32 is as far as 7.8e-6 in losses, 7.2e-5 in norms and 3.6e-6 in sums from itself in fp64 with
 * AdamW, and 2.7e-6, 1.2e-5 and 1.7e-6 with Muon; four iterations instead of five, or half the decay, are 7e-5 or more of a loss.
 */
static const double LOSS_APART = 1e-5, NORM_APART = 1e-4, SQUARES_APART = 1e-5;
/* Of preferences: PyTorch is as far as 8.1e-6, 7.7e-6 and 9.4e-7 from itself, and in means of rewards 6e-6, which are of about 1. */
static const double PREFERRED_APART = 2e-5;

typedef struct vectors {
    char *bytes, *muon, *pairs;
    int32_t h[H_COUNT];
    const char *names[64];
    int32_t name_len[64], count[64];
    const char *weights[64], *grads[64]; /* unaligned fp32 */
    const char *tokens, *targets, *logits, *losses, *norms, *squares;
    const char *margins; /* of preferences */
    spw_preference rule;
} vectors;

static void
load(vectors *v, const char *name)
{
    char path[256];
    uint64_t size;
    const char *at;
    snprintf(path, sizeof path, "tests/vectors/torch_%s.bin", name);
    v->bytes = tiny_load(path, &size);
    v->muon = v->pairs = NULL;
    memcpy(v->h, v->bytes, sizeof v->h);
    assert_int_equal(v->h[H_MAGIC], 0x53505754);
    at = v->bytes + sizeof v->h;
    for (int i = 0; i < v->h[H_TENSORS]; i++) {
        memcpy(&v->name_len[i], at, 4);
        v->names[i] = at + 4;
        at += 4 + v->name_len[i];
        memcpy(&v->count[i], at, 4);
        v->weights[i] = at + 4;
        v->grads[i] = at + 4 + 4 * (size_t)v->count[i];
        at += 4 + 8 * (size_t)v->count[i];
    }
    size_t tokens = (size_t)v->h[H_STEPS] * (size_t)v->h[H_A] * (size_t)v->h[H_B] * (size_t)v->h[H_T];
    v->tokens = at;
    v->targets = v->tokens + 4 * tokens;
    v->logits = v->targets + 4 * tokens;
    v->losses = v->logits + 8 * (size_t)v->h[H_VOCAB];
    v->norms = v->losses + 8 * (size_t)v->h[H_STEPS];
    v->squares = v->norms + 8 * (size_t)v->h[H_STEPS];
    assert_ptr_equal(v->squares + 8 * (size_t)v->h[H_TENSORS], v->bytes + size);
}

/* What the model came to with Muon stands for what it came to with AdamW; model_idx: in the file of all. */
static void
load_muon(vectors *v, uint32_t model_idx)
{
    const char *at;
    uint64_t size;
    at = v->muon = tiny_load("tests/vectors/torch_muon.bin", &size);
    for (uint32_t i = 0; i <= model_idx; i++) {
        int32_t steps, tensors;
        assert_true(at < v->muon + size);
        memcpy(&steps, at, 4);
        v->losses = at + 4;
        v->norms = v->losses + 8 * (size_t)steps;
        memcpy(&tensors, v->norms + 8 * (size_t)steps, 4);
        v->squares = v->norms + 8 * (size_t)steps + 4;
        at = v->squares + 8 * (size_t)tensors;
        assert_true(steps == v->h[H_STEPS] && (i < model_idx || tensors == v->h[H_TENSORS]));
    }
    assert_true(at <= v->muon + size);
}

static double
double_at(const char *p, int i)
{
    double x;
    memcpy(&x, p + 8 * i, 8);
    return x;
}

/* In the order of torch_muon.bin and torch_preference.bin. */
enum { GPT2, LLAMA_TIED, LLAMA_UNTIED, MODELS };
static const char *const names[MODELS] = {"gpt2", "llama_tied", "llama_untied"};
enum { RULES = 6 };

/* The same for preferences by the rule. */
static void
load_preference(vectors *v, uint32_t model_idx, uint32_t rule_idx)
{
    const char *at;
    uint64_t size;
    int32_t kind, tensors;
    at = v->pairs = tiny_load("tests/vectors/torch_preference.bin", &size);
    for (uint32_t i = 0; i <= model_idx * RULES + rule_idx; i++) {
        assert_true(at < v->pairs + size);
        memcpy(&kind, at, 4);
        v->rule = (spw_preference){.kind = (spw_preference_kind)kind,
                                   .beta = (float)double_at(at + 4, 0),
                                   .label_smoothing = (float)double_at(at + 4, 1),
                                   .margin = (float)double_at(at + 4, 2),
                                   .likelihood = (float)double_at(at + 4, 3)};
        v->losses = at + 36;
        v->norms = v->losses + 8 * (size_t)v->h[H_STEPS];
        v->margins = v->norms + 8 * (size_t)v->h[H_STEPS];
        memcpy(&tensors, v->margins + 8 * (size_t)v->h[H_STEPS], 4);
        v->squares = v->margins + 8 * (size_t)v->h[H_STEPS] + 4;
        at = v->squares + 8 * (size_t)tensors;
    }
    assert_true(at <= v->pairs + size && tensors == v->h[H_TENSORS]);
}

static int
tensor_of(const vectors *v, const spw_param *p)
{
    for (int i = 0; i < v->h[H_TENSORS]; i++) {
        if (strlen(p->name) == (size_t)v->name_len[i] && memcmp(p->name, v->names[i], (size_t)v->name_len[i]) == 0) {
            assert_int_equal(v->count[i], p->rows * p->cols);
            return i;
        }
    }
    fail_msg("the vectors have no tensor %s", p->name);
    return -1;
}

typedef struct job {
    spw_engine *e;
    const vectors *v;
    double squares[64]; /* per tensor, of the master weights */
    pthread_mutex_t lock;
} job;

/* Sets or adds up the part of every parameter that lies in the chunk. In fp32 the master is the weight, whatever the optimizer is. */
static void
walk_chunk(job *j, uint32_t chunk_idx, void *weights, void *record, bool set)
{
    const spw_layout *l = spw_engine_layout(j->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    float part[4096];
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_place *at = &l->places[id];
        uint64_t from = at->first > c->first ? at->first : c->first, to = at->first + at->elems;
        int t = at->unit_idx == c->unit_idx ? tensor_of(j->v, &spw_engine_model(j->e)->params[id]) : -1;
        const char *name = spw_engine_model(j->e)->params[id].name;
        bool packed = strstr(name, ".c_attn.bias") != NULL; /* its key third is noise: see gen_torch_vectors.py */
        double sum = 0;
        if (to > c->first + c->elems)
            to = c->first + c->elems;
        for (uint64_t n; t >= 0 && from < to; from += n) {
            n = to - from < 4096 ? to - from : 4096;
            if (set) {
                memcpy(part, j->v->weights[t] + 4 * (from - at->first), 4 * n);
                spw_state_set(SPW_STATE_FP32, &spw_opt_adam, weights, record, c->elems, SPW_PART_MASTER,
                              from - c->first, n, part);
                continue;
            }
            spw_state_get(SPW_STATE_FP32, &spw_opt_adam, weights, record, c->elems, SPW_PART_MASTER, from - c->first, n,
                          part);
            for (uint64_t i = 0; i < n; i++)
                sum += packed && (from - at->first + i) * 3 / at->elems == 1 ? 0 : (double)part[i] * (double)part[i];
        }
        if (t >= 0 && !set) {
            pthread_mutex_lock(&j->lock);
            j->squares[t] += sum;
            pthread_mutex_unlock(&j->lock);
        }
    }
}

static spw_status
set_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    (void)grad;
    (void)err;
    walk_chunk(ctx, chunk_idx, weights, record, true);
    return SPW_OK;
}

static spw_status
square_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    (void)grad;
    (void)err;
    walk_chunk(ctx, chunk_idx, weights, record, false);
    return SPW_OK;
}

static spw_engine *
make_engine(const vectors *v, const spw_config *c, spw_model **model, bool inference)
{
    spw_model_config m = {.family = v->h[H_FAMILY] == 0 ? SPW_FAMILY_GPT2 : SPW_FAMILY_LLAMA,
                          .vocab = (uint64_t)v->h[H_VOCAB],
                          .width = (uint64_t)v->h[H_WIDTH],
                          .layers = (uint64_t)v->h[H_LAYERS],
                          .heads = (uint64_t)v->h[H_HEADS],
                          .kv_heads = (uint64_t)v->h[H_KV],
                          .head_dim = (uint64_t)v->h[H_DIM],
                          .mlp_width = (uint64_t)v->h[H_MLP],
                          .positions = (uint64_t)v->h[H_POSITIONS],
                          .norm_eps = 1e-5f,
                          .rope_theta = 10000.0f,
                          .init_std = 0.02f,
                          .tied = v->h[H_TIED] != 0};
    spw_engine *e = NULL;
    spw_error err = {0};
    job j = {.v = v};
    assert_int_equal(spw_model_build(model, &m, &err), SPW_OK);
    (void)spw_engine_create(&e, &(spw_engine_options){.config = c, .model = *model, .inference = inference}, &err);
    if (e == NULL)
        fail_msg("%s", err.message);
    j.e = e;
    DONE(spw_engine_init_params(e, 1, &err)); /* moments are 0 then */
    DONE(spw_store_sweep_some(spw_engine_store(e), SPW_SWEEP_EDIT, 0, spw_engine_layout(e)->chunk_count, set_chunk, &j,
                              &err));
    return e;
}

/* Norm of the difference relative to the tensor's norm. */
static void
compare_grads(spw_engine *e, const vectors *v)
{
    const spw_layout *l = spw_engine_layout(e);
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_place *at = &l->places[id];
        const float *got = (const float *)spw_store_grad(spw_engine_store(e), at->unit_idx) + at->first;
        const char *want = v->grads[tensor_of(v, &spw_engine_model(e)->params[id])];
        double diff = 0, norm = 0;
        for (uint64_t i = 0; i < at->elems; i++) {
            float w;
            memcpy(&w, want + 4 * i, 4);
            diff += ((double)got[i] - (double)w) * ((double)got[i] - (double)w);
            norm += (double)w * (double)w;
        }
        if (!(sqrt(diff) <= 1e-5 * sqrt(norm)))
            fail_msg("gradient of %s: relative error %.3g", spw_engine_model(e)->params[id].name, sqrt(diff / norm));
    }
}

/* The final weights' sums of squares, tensor by tensor. */
static void
compare_squares(spw_engine *e, const vectors *v)
{
    job j = {.e = e, .v = v, .lock = PTHREAD_MUTEX_INITIALIZER};
    spw_error err = {0};
    assert_int_equal(spw_engine_drain(e, &err), SPW_OK);
    assert_int_equal(spw_store_sweep(spw_engine_store(e), SPW_SWEEP_VISIT, square_chunk, &j, &err), SPW_OK);
    for (int t = 0; t < v->h[H_TENSORS]; t++) {
        double want = double_at(v->squares, t);
        if (!(fabs(j.squares[t] - want) <= SQUARES_APART * want))
            fail_msg("final %.*s: sum of squares %.9g, PyTorch has %.9g", v->name_len[t], v->names[t], j.squares[t],
                     want);
    }
}

static void
compare_logits(const char *name, const vectors *v, const spw_config *c)
{
    spw_model *model = NULL;
    spw_engine *e = make_engine(v, c, &model, true);
    spw_error err = {0};
    float logits[256], want;
    int32_t prompt[256];
    memcpy(prompt, v->tokens, 4 * (size_t)v->h[H_T]);
    for (int k = 0; k < 2; k++) { /* the whole sequence, then its first third */
        uint64_t count = (uint64_t)v->h[H_T] / (k ? 3 : 1);
        assert_int_equal(spw_engine_logits(e, prompt, count, logits, &err), SPW_OK);
        for (int i = 0; i < v->h[H_VOCAB]; i++) {
            memcpy(&want, v->logits + 4 * (k * v->h[H_VOCAB] + i), 4);
            if (!(fabs((double)logits[i] - (double)want) <= 1e-5))
                fail_msg("%s: logit %d after %llu tokens is %.9g, PyTorch's is %.9g", name, i,
                         (unsigned long long)count, (double)logits[i], (double)want);
        }
    }
    spw_engine_destroy(e);
    spw_model_destroy(model);
}

static void
set_config(spw_config *c, const vectors *v, spw_tier tier, const char *dir)
{
    tiny_config(c, SPW_STATE_FP32);
    c->micro_batch = (uint64_t)v->h[H_B];
    c->accumulation = (uint64_t)v->h[H_A];
    c->data.seq_length = (uint64_t)v->h[H_T];
    c->optimizer.lr = 3e-3;
    c->run.decay_norm_and_bias = true; /* as the vectors were made */
    c->zero.offload_param = c->zero.offload_optimizer = tier;
    c->zero.param_path.count = c->zero.optimizer_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
    snprintf(c->zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
}

static void
run(uint32_t model_idx, spw_tier tier, bool muon)
{
    const char *name = names[model_idx];
    vectors v;
    spw_config c;
    spw_model *model = NULL;
    spw_engine *e;
    spw_error err = {0};
    char dir[256];
    size_t n;
    load(&v, name);
    if (muon)
        load_muon(&v, model_idx);
    tiny_dir_make(dir);
    set_config(&c, &v, tier, dir);
    if (muon)
        tiny_muon(&c);
    n = (size_t)(v.h[H_A] * v.h[H_B] * v.h[H_T]);
    if (!muon)
        compare_logits(name, &v, &c);
    e = make_engine(&v, &c, &model, false);
    {
        int32_t *tokens = malloc(4 * n), *targets = malloc(4 * n);
        assert_non_null(tokens);
        assert_non_null(targets);
        for (int s = 0; s < v.h[H_STEPS]; s++) {
            spw_step_result r;
            double loss = double_at(v.losses, s), norm = double_at(v.norms, s);
            memcpy(tokens, v.tokens + 4 * n * (size_t)s, 4 * n);
            memcpy(targets, v.targets + 4 * n * (size_t)s, 4 * n);
            assert_int_equal(spw_engine_step(e, tokens, targets, (uint32_t)v.h[H_A], c.optimizer.lr, &r, &err), SPW_OK);
            if (!(fabs(r.loss - loss) <= LOSS_APART * loss) || !(fabs(r.grad_norm - norm) <= NORM_APART * norm))
                fail_msg("%s%s, step %d: loss %.9g and norm %.9g, PyTorch has %.9g and %.9g", name,
                         muon ? " with Muon" : "", s + 1, r.loss, r.grad_norm, loss, norm);
            /* Of records on nvme some may have passed through their memory since, and Muon's matrices have their updates there. */
            if (s == 0 && tier == SPW_TIER_HOST && !muon) {
                assert_int_equal(spw_engine_drain(e, &err), SPW_OK);
                compare_grads(e, &v);
            }
        }
        compare_squares(e, &v);
        free(tokens);
        free(targets);
    }
    spw_engine_destroy(e);
    spw_model_destroy(model);
    free(v.bytes);
    free(v.muon);
    tiny_dir_remove(dir);
}

/* GPT-2 (tied head, packed qkv, tanh GELU), on host and streamed from disk. */
static void
test_gpt2(void **state)
{
    (void)state;
    run(GPT2, SPW_TIER_HOST, false);
    run(GPT2, SPW_TIER_NVME, false);
}

/* Llama with 2 query heads per key/value head and a tied head, and with one key/value head and a head of its own. */
static void
test_llama(void **state)
{
    (void)state;
    run(LLAMA_TIED, SPW_TIER_HOST, false);
    run(LLAMA_TIED, SPW_TIER_NVME, false);
    run(LLAMA_UNTIED, SPW_TIER_HOST, false);
    run(LLAMA_UNTIED, SPW_TIER_NVME, false);
}

/* All three with Muon: matrices of the blocks are made orthogonal, whichever way they are stored, and all else takes AdamW. */
static void
test_muon(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < MODELS; i++) {
        run(i, SPW_TIER_HOST, true);
        run(i, SPW_TIER_NVME, true);
    }
}

/* As gen_torch_vectors.py has them: where documents begin, and the next token of all rows but those of a prompt's first and a document's last. */
static void
make_pairs(const vectors *v, int step, int32_t *tokens, int32_t *targets)
{
    static const int32_t begins[] = {0, 7, 13, 18}, end = 23;
    const int32_t T = v->h[H_T], n = v->h[H_A] * v->h[H_B] * T;
    memcpy(tokens, v->tokens + 4 * (size_t)n * (size_t)step, 4 * (size_t)n);
    for (int32_t at = 0; at < n; at += T) {
        for (int32_t i = 0; i < T; i++)
            targets[at + i] = -1;
        for (int k = 0; k < 4; k++) {
            for (int32_t i = begins[k] + 1; i < (k < 3 ? begins[k + 1] : end) - 1; i++)
                targets[at + i] = tokens[at + i + 1];
        }
        for (int k = 0; k < 4; k++)
            tokens[at + begins[k]] |= SPW_TOKEN_BEGINS;
    }
}

static void
run_preference(uint32_t model_idx, uint32_t rule_idx, spw_tier tier, uint64_t tile_vocab)
{
    enum { DIFFERENT = 4 }; /* steps, whose tokens come again */
    vectors v;
    spw_config c;
    spw_model *model = NULL;
    spw_engine *e;
    spw_error err = {0};
    char dir[256];
    double *reference[DIFFERENT], loss;
    int32_t *tokens, *targets;
    size_t n;
    load(&v, names[model_idx]);
    load_preference(&v, model_idx, rule_idx);
    tiny_dir_make(dir);
    set_config(&c, &v, tier, dir);
    snprintf(c.data.documents, sizeof c.data.documents, "whole");
    snprintf(c.run.preference.loss, sizeof c.run.preference.loss, "%s", spw_preference_name(v.rule.kind));
    c.run.preference.beta = (double)v.rule.beta;
    c.run.preference.label_smoothing = (double)v.rule.label_smoothing;
    c.run.preference.margin = (double)v.rule.margin;
    c.run.preference.likelihood = (double)v.rule.likelihood;
    c.run.tile_vocab = tile_vocab;
    n = (size_t)(v.h[H_A] * v.h[H_B] * v.h[H_T]);
    tokens = malloc(4 * n);
    targets = malloc(4 * n);
    assert_true(tokens != NULL && targets != NULL);
    e = make_engine(&v, &c, &model, false);
    for (int s = 0; s < DIFFERENT; s++) {
        reference[s] = calloc(n, sizeof(double));
        assert_non_null(reference[s]);
        make_pairs(&v, s, tokens, targets);
        DONE(spw_engine_eval(e, tokens, targets, (uint32_t)v.h[H_A], &loss, &err));
        spw_engine_answers(e, targets, (uint32_t)v.h[H_A], reference[s]);
    }
    for (int s = 0; s < v.h[H_STEPS]; s++) {
        spw_step_result r;
        const double want = double_at(v.losses, s), norm = double_at(v.norms, s), margin = double_at(v.margins, s);
        make_pairs(&v, s, tokens, targets);
        spw_engine_set_reference(e, reference[s % DIFFERENT]);
        DONE(spw_engine_step(e, tokens, targets, (uint32_t)v.h[H_A], c.optimizer.lr, &r, &err));
        if (!(fabs(r.loss - want) <= PREFERRED_APART * want) || !(fabs(r.grad_norm - norm) <= NORM_APART * norm) ||
            !(fabs(r.preferred.chosen - r.preferred.rejected - margin) <= PREFERRED_APART * (1 + fabs(margin))))
            fail_msg("%s with %s, step %d: loss %.9g, norm %.9g and margin %.9g, PyTorch has %.9g, %.9g and %.9g",
                     names[model_idx], spw_preference_name(v.rule.kind), s + 1, r.loss, r.grad_norm,
                     r.preferred.chosen - r.preferred.rejected, want, norm, margin);
        assert_true(r.targets == 8 && r.preferred.pairs == 8 && (s < 15 || r.preferred.right == 1));
        if (s == 0 && v.rule.kind == SPW_PREFERENCE_DPO && rule_idx == 0) /* its own reference, bit for bit */
            assert_true(r.loss == log(2) && r.preferred.chosen == 0 && r.preferred.rejected == 0);
    }
    compare_squares(e, &v);
    spw_engine_destroy(e);
    spw_model_destroy(model);
    for (int s = 0; s < DIFFERENT; s++)
        free(reference[s]);
    free(tokens);
    free(targets);
    free(v.bytes);
    free(v.pairs);
    tiny_dir_remove(dir);
}

/* Pairs of answers, several in a sequence, by every rule; of the head in pieces too. */
static void
test_preference(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < MODELS; i++) {
        for (uint32_t k = 0; k < RULES; k++)
            run_preference(i, k, k % 2 == 0 ? SPW_TIER_HOST : SPW_TIER_NVME, 0);
    }
    run_preference(GPT2, 1, SPW_TIER_HOST, 16);
    run_preference(LLAMA_UNTIED, 2, SPW_TIER_NVME, 16);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2),
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_muon),
        cmocka_unit_test(test_preference),
    };
    return cmocka_run_group_tests_name("torch", tests, NULL, NULL);
}
