/*
 * Operations that a plan counts: they are those of the products that the device is asked for in a step, to the last one, whatever the family,
 * with adapters beside dense weights and beside experts, and with what is computed again.
 */
#include "lib_rig.h"
#include "engine_internal.h"
#include "gpu_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

/* The cpu device, with products that count their operations; experts' are one for each of them. */
static struct {
    const spw_gpu_calls *own;
    spw_gpu_calls calls;
    double sum;
} counted;

static void
add(unsigned products, uint64_t M, uint64_t N, uint64_t K)
{
    counted.sum += 2.0 * products * (double)(M * N) * (double)K;
}

static void
linear(spw_gpu_queue *q, act *y, const act *x, const act *w, const act *b, uint64_t M, uint64_t N, uint64_t K,
       unsigned flags)
{
    add(1, M, N, K);
    counted.own->linear(q, y, x, w, b, M, N, K, flags);
}

static void
linear_add(spw_gpu_queue *q, act *y, const act *onto, const act *x, const act *w, const act *b, uint64_t M, uint64_t N,
           uint64_t K, unsigned flags)
{
    add(1, M, N, K);
    counted.own->linear_add(q, y, onto, x, w, b, M, N, K, flags);
}

static void
linear_gelu(spw_gpu_queue *q, act *y, act *gelu_in, const act *x, const act *w, const act *b, uint64_t M, uint64_t N,
            uint64_t K, unsigned flags)
{
    add(1, M, N, K);
    counted.own->linear_gelu(q, y, gelu_in, x, w, b, M, N, K, flags);
}

static void
linear_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *w, uint64_t M,
                uint64_t N, uint64_t K, unsigned flags)
{
    add((dx != NULL) + (dw != NULL), M, N, K);
    counted.own->linear_backward(q, dx, dw, db, dy, x, w, M, N, K, flags);
}

static void
linear_gelu_backward(spw_gpu_queue *q, act *dx, float *dw, float *db, const act *dy, const act *x, const act *gelu_in,
                     const act *w, uint64_t M, uint64_t N, uint64_t K, unsigned flags)
{
    add((dx != NULL) + (dw != NULL), M, N, K);
    counted.own->linear_gelu_backward(q, dx, dw, db, dy, x, gelu_in, w, M, N, K, flags);
}

static void
linear_cross_entropy(spw_gpu_queue *q, float *losses, act *dx, float *dw, const act *x, const act *w,
                     const int32_t *targets, const float *weights, act *logits, uint64_t rows_per_chunk, uint64_t M,
                     uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    add(1 + (dx != NULL) + (dw != NULL), M, V, C);
    counted.own->linear_cross_entropy(q, losses, dx, dw, x, w, targets, weights, logits, rows_per_chunk, M, V, C,
                                      grad_scale, cap, flags);
}

static void
head_see(spw_gpu_queue *q, float *sums, const act *x, const act *w, const int32_t *targets, act *logits,
         uint64_t rows_per_chunk, uint64_t M, uint64_t first, uint64_t V, uint64_t C, float cap)
{
    add(1, M, V, C);
    counted.own->head_see(q, sums, x, w, targets, logits, rows_per_chunk, M, first, V, C, cap);
}

static void
head_backward(spw_gpu_queue *q, float *dx, float *dw, const act *x, const act *w, const int32_t *targets,
              const float *weights, const float *sums, act *logits, uint64_t rows_per_chunk, uint64_t M, uint64_t first,
              uint64_t V, uint64_t C, float grad_scale, float cap, unsigned flags)
{
    add(1 + (dx != NULL) + (dw != NULL), M, V, C);
    counted.own->head_backward(q, dx, dw, x, w, targets, weights, sums, logits, rows_per_chunk, M, first, V, C,
                               grad_scale, cap, flags);
}

static void
product(spw_gpu_queue *q, act *y, const act *onto, float by, const act *x, const act *w, float scale, uint64_t M,
        uint64_t N, uint64_t K, unsigned flags)
{
    add(1, M, N, K);
    counted.own->product(q, y, onto, by, x, w, scale, M, N, K, flags);
}

static void
count(spw_engine *e)
{
    counted.own = e->compute->calls;
    counted.calls = *counted.own;
    counted.calls.linear = linear;
    counted.calls.linear_add = linear_add;
    counted.calls.linear_gelu = linear_gelu;
    counted.calls.linear_backward = linear_backward;
    counted.calls.linear_gelu_backward = linear_gelu_backward;
    counted.calls.linear_cross_entropy = linear_cross_entropy;
    counted.calls.head_see = head_see;
    counted.calls.head_backward = head_backward;
    counted.calls.product = product;
    e->compute->calls = &counted.calls;
    counted.sum = 0;
}

/* Of the second step. most: this share of what is planned, at most, the device is not asked for; it is never asked for more. */
static void
compare(spw_family family, void (*change)(rig *r), double most)
{
    for (int again = 0; again < 2; again++) {
        double planned;
        rig r;
        rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
        if (change != NULL)
            change(&r);
        snprintf(r.c.run.recompute, sizeof r.c.run.recompute, again ? "always" : "auto");
        rig_open(&r);
        assert_true((r.e->plan.tape_count == 0) == (again > 0 || r.e->shares_turns));
        planned = r.e->plan.flops - r.e->plan.attention_flops;
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        rig_train(&r, 0, 1);
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        count(r.e);
        rig_train(&r, 1, 2);
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        if (!(planned >= counted.sum * (1 - 1e-12)) || !(planned - counted.sum <= (most + 1e-12) * planned))
            fail_msg("%s%s%s: %.0f operations are planned, and the device was asked for %.0f", tiny_family_name(family),
                     r.c.run.lora.rank > 0 ? ", adapters" : "", again ? ", computed again" : "", planned, counted.sum);
        rig_remove(&r);
    }
}

/* All weights are trained; adapters; those beside experts. */
static void
test_families(void **state)
{
    static const spw_family families[] = {
        SPW_FAMILY_GPT2,     SPW_FAMILY_LLAMA,       SPW_FAMILY_PHI3,           SPW_FAMILY_OLMO2,
        SPW_FAMILY_GEMMA3,   SPW_FAMILY_MIXTRAL,     SPW_FAMILY_QWEN2_MOE,      SPW_FAMILY_GPT_OSS,
        SPW_FAMILY_GLM4_MOE, SPW_FAMILY_DEEPSEEK_V2, SPW_FAMILY_QWEN3_NEXT,     SPW_FAMILY_GEMMA4,
        TINY_GEMMA4_SMALL,   SPW_FAMILY_ERNIE_MOE,   SPW_FAMILY_GRANITE_HYBRID, SPW_FAMILY_LLAMA4};
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        spw_model_config m;
        /* gradients of what enters the lowest layer, where no norm comes first, are not made; taps of a convolution are no product's */
        bool taps = families[f] == SPW_FAMILY_QWEN3_NEXT;
        double most = families[f] == SPW_FAMILY_OLMO2 || families[f] == TINY_GEMMA4_SMALL ? 0.04 : taps ? 0.02 : 0;
        tiny_model_config(&m, families[f]);
        compare(families[f], NULL, taps ? most : 0);
        compare(families[f], rig_lora, most);
        if (m.experts > 0)
            compare(families[f], rig_lora_experts, most);
    }
}

static void
in_turns(rig *r)
{
    r->c.run.micro_batches_per_pass = 1;
    r->c.run.expert_turns = 3;
}

static void
adapted_in_turns(rig *r)
{
    in_turns(r);
    rig_lora_experts(r);
}

/* What lies before experts whose turns serve several micro-batches is computed three times. */
static void
in_shared_turns(rig *r)
{
    r->c.run.expert_turns = 3;
    r->c.accumulation = 3;
}

static void
adapted_in_shared_turns(rig *r)
{
    in_shared_turns(r);
    rig_lora_experts(r);
}

static void
in_pieces(rig *r)
{
    r->c.run.tile_tokens = 7;
}

static void
adapted_in_pieces(rig *r)
{
    in_pieces(r);
    rig_lora_experts(r);
}

static void
head_in_pieces(rig *r)
{
    r->c.model.vocab = 200;
    r->c.run.tile_vocab = 64;
}

static void
in_turns_and_pieces(rig *r)
{
    in_turns(r);
    in_pieces(r);
}

static void
in_shared_turns_and_pieces(rig *r)
{
    in_shared_turns(r);
    in_pieces(r);
}

static void
muon(rig *r)
{
    tiny_muon(&r->c);
}

/* Experts in turns and in pieces, heads in pieces of the vocabulary, matrices that are made orthogonal, frozen layers below. */
static void
test_others(void **state)
{
    (void)state;
    compare(SPW_FAMILY_QWEN3_MOE, adapted_in_turns, 0);
    compare(SPW_FAMILY_QWEN3_MOE, in_turns_and_pieces, 0);
    compare(SPW_FAMILY_QWEN3_MOE, in_shared_turns, 0);
    compare(SPW_FAMILY_QWEN2_MOE, in_shared_turns_and_pieces, 0);
    compare(SPW_FAMILY_DEEPSEEK_V3, in_shared_turns, 0);
    compare(SPW_FAMILY_LLAMA4, adapted_in_shared_turns, 0);
    compare(SPW_FAMILY_GEMMA4, in_turns, 0); /* whose experts' sum is read */
    compare(SPW_FAMILY_GEMMA4, in_pieces, 0);
    compare(SPW_FAMILY_GEMMA4, in_turns_and_pieces, 0);
    compare(SPW_FAMILY_LLAMA4, adapted_in_turns, 0);
    compare(SPW_FAMILY_LLAMA, in_pieces, 0);
    compare(SPW_FAMILY_GPT_OSS, adapted_in_pieces, 0);
    compare(SPW_FAMILY_LLAMA, head_in_pieces, 0);
    compare(SPW_FAMILY_LLAMA, muon, 0);
    compare(SPW_FAMILY_LLAMA, rig_freeze_lower, 0);
    compare(SPW_FAMILY_QWEN3_MOE, rig_freeze_mlps, 0);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_families), cmocka_unit_test(test_others)};
    return cmocka_run_group_tests_name("operations", tests, NULL, NULL);
}
