/*
 * Documents that are separate: training on windows with several of them is training on each document alone, in every family; and
 * the same bits in every placement.
 */
#include "lib_tiny.h"
#include "spw_access.h"
#include "spw_data.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { T = 24, SEQUENCES = 4, N = SEQUENCES * T, STEPS = 4, PARAM_MAX = 8192 };

typedef struct batch {
    uint64_t sequences;
    int32_t tokens[N * T], targets[N * T];
} batch;

/* Windows of documents of 1 to 9 tokens, of which one may be cut at either end; the last sequence is one document. */
static void
draw_windows(uint64_t step, uint64_t vocab, batch *b)
{
    uint64_t left = 0;
    b->sequences = SEQUENCES;
    tiny_batch(step, vocab, N, b->tokens, b->targets);
    for (uint64_t i = 0; i < N - T; i++, left--) {
        if (left == 0) {
            left = 1 + (i * 7 + step * 5) % 9;
            b->tokens[i] |= SPW_TOKEN_BEGINS;
            if (i % T > 0)
                b->targets[i - 1] = -1;
        }
    }
}

/* Each document a sequence of its own, with tokens behind it that nobody before them sees and that give no loss. */
static void
draw_apart(uint64_t step, uint64_t vocab, batch *b)
{
    batch *w = malloc(sizeof *w);
    assert_non_null(w);
    draw_windows(step, vocab, w);
    b->sequences = 0;
    for (uint64_t i = 0, at = 0; i < N; i++, at++) {
        if (i % T == 0 || (w->tokens[i] & SPW_TOKEN_BEGINS) != 0) {
            at = 0;
            for (uint64_t t = 0; t < T; t++) {
                b->tokens[b->sequences * T + t] = (int32_t)((t + step) % vocab);
                b->targets[b->sequences * T + t] = -1;
            }
            b->sequences++;
        }
        b->tokens[(b->sequences - 1) * T + at] = w->tokens[i] & ~SPW_TOKEN_BEGINS;
        b->targets[(b->sequences - 1) * T + at] = w->targets[i];
    }
    free(w);
}

typedef struct outcome {
    double losses[STEPS + 1]; /* of the steps, and of an evaluation */
    uint64_t digest;
    float *weights; /* all masters, one after the other */
    uint64_t count;
} outcome;

static void
run(const spw_config *c, spw_family family, uint64_t window, bool apart, outcome *out)
{
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_error err = {0};
    spw_config own = *c;
    batch *b = malloc(sizeof *b);
    assert_non_null(b);
    tiny_model_config(&mc, family);
    mc.window = window;
    if (mc.keys_are_values)
        mc.index_keys = 1; /* of the two that documents have */
    if (apart) {
        draw_apart(0, mc.vocab, b);
        own.micro_batch = 0;
        for (uint64_t s = 0; s <= STEPS; s++) { /* steps have different numbers of documents: the most */
            draw_apart(s, mc.vocab, b);
            own.micro_batch = b->sequences > own.micro_batch ? b->sequences : own.micro_batch;
        }
        own.accumulation = own.run.eval_batches = 1;
        own.data.documents[0] = '\0';
    }
    assert_int_equal(spw_model_build(&model, &mc, &err), SPW_OK);
    if (spw_engine_create(&e,
                          &(spw_engine_options){.config = &own, .model = model, .process_bytes = TINY_PROCESS_BYTES},
                          &err) != SPW_OK ||
        spw_engine_init_params(e, own.run.seed, &err) != SPW_OK)
        fail_msg("%s", err.message);
    for (uint64_t s = 0; s <= STEPS; s++) {
        uint64_t all = own.micro_batch * own.accumulation * T;
        spw_step_result r;
        (apart ? draw_apart : draw_windows)(s, mc.vocab, b);
        for (uint64_t i = b->sequences * T; i < all; i++) {
            b->tokens[i] = 0;
            b->targets[i] = -1;
        }
        if (s < STEPS &&
            spw_engine_step(e, b->tokens, b->targets, (uint32_t)own.accumulation, 0.05, &r, &err) == SPW_OK)
            out->losses[s] = r.loss;
        else if (s == STEPS)
            (void)spw_engine_eval(e, b->tokens, b->targets, (uint32_t)own.accumulation, &out->losses[s], &err);
        if (err.status != SPW_OK)
            fail_msg("%s", err.message);
    }
    out->digest = tiny_digest(e);
    out->count = 0;
    out->weights = malloc(spw_model_elems(model) * sizeof(float));
    assert_non_null(out->weights);
    for (uint32_t i = 0; i < model->param_count; i++) {
        spw_access a = {.param = model->params[i].name, .part = SPW_ACCESS_MASTER};
        if (spw_access_get_full(e, &a, out->weights + out->count, &err) != SPW_OK)
            fail_msg("%s", err.message);
        out->count += model->params[i].rows * model->params[i].cols;
    }
    spw_engine_destroy(e);
    spw_model_destroy(model);
    free(b);
}

static void
configure(spw_config *c)
{
    tiny_config(c, SPW_STATE_FP32);
    snprintf(c->optimizer.type, sizeof c->optimizer.type, "SGD"); /* what a gradient does is as large as it is */
    snprintf(c->data.documents, sizeof c->data.documents, "separate");
    c->optimizer.weight_decay = 0;
    c->run.router_balance = 0; /* counts tokens without loss, too */
}

static void
near(const outcome *a, const outcome *b, double within, const char *what)
{
    double apart = 0, size = 0;
    for (int s = 0; s <= STEPS; s++) {
        if (!(fabs(a->losses[s] - b->losses[s]) <= within * fabs(b->losses[s])))
            fail_msg("%s: loss %d is %.9g, of documents alone %.9g", what, s, a->losses[s], b->losses[s]);
    }
    assert_int_equal(a->count, b->count);
    for (uint64_t i = 0; i < a->count; i++) {
        double d = (double)a->weights[i] - (double)b->weights[i];
        apart += d * d;
        size += (double)b->weights[i] * (double)b->weights[i];
    }
    if (!(sqrt(apart) <= within * sqrt(size)))
        fail_msg("%s: weights are %.3g of their norm away from those of documents alone", what, sqrt(apart / size));
}

static const struct {
    const char *name;
    spw_family family;
    uint64_t window;
} models[] = {{"gpt2", SPW_FAMILY_GPT2, 0},
              {"llama", SPW_FAMILY_LLAMA, 0},
              {"mistral with a window", SPW_FAMILY_MISTRAL, 5},
              {"qwen3_moe", SPW_FAMILY_QWEN3_MOE, 0},
              {"phi3 with a window", SPW_FAMILY_PHI3, 5},
              {"qwen2_moe", SPW_FAMILY_QWEN2_MOE, 0},
              {"olmo2", SPW_FAMILY_OLMO2, 0},
              {"gemma3 with two tables of positions", SPW_FAMILY_GEMMA3, 4},
              {"gemma2 with caps", SPW_FAMILY_GEMMA2, 4},
              {"gpt_oss", SPW_FAMILY_GPT_OSS, 4},
              {"gpt_neox", SPW_FAMILY_NEOX, 0},
              {"opt", SPW_FAMILY_OPT, 0},
              {"starcoder2 with a window", SPW_FAMILY_STARCODER2, 5},
              {"stablelm", SPW_FAMILY_STABLELM, 0},
              {"qwen3_5", SPW_FAMILY_QWEN3_5, 0},
              {"qwen3_next", SPW_FAMILY_QWEN3_NEXT, 0},
              {"granitemoehybrid", SPW_FAMILY_GRANITE_HYBRID, 0},
              {"nemotron_h", SPW_FAMILY_NEMOTRON_H, 0},
              {"ministral3, whose queries grow", SPW_FAMILY_MINISTRAL3, 0},
              {"mistral4, of whose latent attention they grow", SPW_FAMILY_MISTRAL4, 0},
              {"mimo_v2_flash", SPW_FAMILY_MIMO_V2, 0},
              {"afmoe", SPW_FAMILY_AFMOE, 0},
              {"olmo_hybrid", SPW_FAMILY_OLMO_HYBRID, 0},
              {"kimi_linear", SPW_FAMILY_KIMI_LINEAR, 0},
              {"falcon_h1", SPW_FAMILY_FALCON_H1, 0},
              {"lfm2_moe, with convolutions", SPW_FAMILY_LFM2_MOE, 0},
              {"llama4 in chunks", SPW_FAMILY_LLAMA4, 0},
              {"gemma4", SPW_FAMILY_GEMMA4, 4},
              {"gemma4 with embeddings of each layer", TINY_GEMMA4_SMALL, 4},
              {"glm_moe_dsa that chooses keys", TINY_FEW_KEYS, 0},
              {"deepseek_v4, with keys of several tokens", SPW_FAMILY_DEEPSEEK_V4, 4}};

/* Losses, an evaluation, and the weights after some steps. And what it is not: the same as with documents that see each other. */
static void
test_alone(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        spw_config c;
        outcome packed, apart;
        configure(&c);
        run(&c, models[i].family, models[i].window, false, &packed);
        run(&c, models[i].family, models[i].window, true, &apart);
        near(&packed, &apart, 2e-6, models[i].name);
        free(packed.weights);
        free(apart.weights);
    }
}

/* On the device that has its own memory and kernels, too. */
static void
test_emulated(void **state)
{
    (void)state;
    if (SANITIZED || !tiny_emulated_device())
        skip();
    setenv("SPW_CUDA_COMPUTE", "fp32", 1);
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        spw_config c;
        outcome there, here;
        configure(&c);
        run(&c, models[i].family, models[i].window, false, &here);
        snprintf(c.run.device, sizeof c.run.device, "cuda");
        run(&c, models[i].family, models[i].window, false, &there);
        near(&there, &here, 2e-6, models[i].name);
        free(there.weights);
        free(here.weights);
    }
}

/* Wherever state and activations lie, kept or computed again, by one thread or two: the same bits. */
static void
test_placements(void **state)
{
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t m = 0; m < 3; m++) {
        const size_t i = m < 2 ? m : sizeof models / sizeof models[0] - 1;
        outcome first = {0};
        for (int k = 0; k < 4; k++) {
            spw_config c;
            outcome o;
            configure(&c);
            if (k > 0) {
                c.zero.offload_param = c.zero.offload_optimizer = SPW_TIER_NVME;
                c.zero.param_path.count = c.zero.optimizer_path.count = 1;
                snprintf(c.zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
                snprintf(c.zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
                c.run.chaos_seed = 3 + (uint64_t)k;
            }
            if (k == 2)
                snprintf(c.run.recompute, sizeof c.run.recompute, "always");
            if (k == 2)
                c.run.activations = SPW_TIER_NVME;
            if (k == 3)
                c.run.compute_threads = 1;
            run(&c, models[i].family, models[i].window, false, k == 0 ? &first : &o);
            if (k > 0) {
                assert_memory_equal(o.losses, first.losses, sizeof o.losses);
                assert_int_equal(o.digest, first.digest);
                free(o.weights);
            }
        }
        free(first.weights);
    }
    tiny_dir_remove(dir);
}

/* Marks that nobody asked for are ids that no vocabulary has. */
static void
test_refused(void **state)
{
    spw_model_config mc;
    spw_model *model = NULL;
    spw_engine *e = NULL;
    spw_error err = {0};
    spw_config c;
    spw_step_result r;
    batch *b = malloc(sizeof *b);
    (void)state;
    assert_non_null(b);
    for (int k = 0; k < 2; k++) {
        configure(&c);
        if (k == 0)
            snprintf(c.data.documents, sizeof c.data.documents, "mask");
        tiny_model_config(&mc, SPW_FAMILY_LLAMA);
        assert_int_equal(spw_model_build(&model, &mc, &err), SPW_OK);
        assert_int_equal(spw_engine_create(&e, &(spw_engine_options){.config = &c, .model = model}, &err), SPW_OK);
        assert_int_equal(spw_engine_init_params(e, 1, &err), SPW_OK);
        draw_windows(0, mc.vocab, b);
        if (k == 1)
            b->tokens[3] = (int32_t)mc.vocab | SPW_TOKEN_BEGINS;
        assert_int_equal(spw_engine_step(e, b->tokens, b->targets, 2, 0.05, &r, &err), SPW_EINVAL);
        assert_non_null(strstr(err.message, "outside the vocabulary of 61"));
        spw_engine_destroy(e);
        spw_model_destroy(model);
    }
    free(b);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_emulated),
        cmocka_unit_test(test_placements),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("documents", tests, NULL, NULL);
}
