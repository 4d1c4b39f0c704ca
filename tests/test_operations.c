/*
 * Operations that a plan counts: they are those of the products that the device is asked for in a step, to the last one, whatever the family,
 * with adapters beside dense weights and beside experts, with what is computed again, and without what nobody asks for.
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

/* The cpu device, with products that count their operations; experts' are one for each of them, and attention's are apart. */
static struct {
    const spw_gpu_calls *own;
    spw_gpu_calls calls;
    double sum, attention;
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

/* Of keys that stand for several rows, those that T rows may read. */
static double
fronts_of(double T, uint64_t each)
{
    const double all = floor(T / (double)each);
    return all * (T + 1 - (double)each * (all + 1) / 2);
}

/* Of a row's keys all before it, or those of its window, and those in front. */
static double
attended(const spw_attention_shape *s)
{
    const double T = (double)s->T, W = s->window == 0 || s->window > s->T ? T : (double)s->window;
    const uint64_t Dv = s->Dv > 0 ? s->Dv : s->D;
    return 2.0 * (double)(s->B * s->Hq * (s->D + Dv)) *
           (W * T - W * W / 2 + (s->front > 0 ? fronts_of(T, s->front_each) : 0));
}

static void
attention(spw_gpu_queue *q, act *out, float *lse, const act *query, const act *key, const act *value,
          const spw_attention_shape *s)
{
    counted.attention += attended(s);
    counted.own->attention(q, out, lse, query, key, value, s);
}

static void
attention_backward(spw_gpu_queue *q, act *dquery, act *dkey, act *dvalue, float *dsinks, const act *dout,
                   const act *out, const float *lse, const act *query, const act *key, const act *value,
                   const spw_attention_shape *s)
{
    counted.attention += 2 * attended(s);
    counted.own->attention_backward(q, dquery, dkey, dvalue, dsinks, dout, out, lse, query, key, value, s);
}

static void
choose_keys(spw_gpu_queue *q, uint32_t *bits, const act *query, act *key, const act *new_key, const act *weights,
            float *scratch, const spw_choice_shape *s)
{
    const double T = (double)s->T;
    counted.attention += 2.0 * (double)(s->B * s->H * s->D) *
                         (s->each > 1 ? fronts_of((double)s->first + T, s->each) - fronts_of((double)s->first, s->each)
                                      : T * (double)s->first + T * T / 2);
    counted.own->choose_keys(q, bits, query, key, new_key, weights, scratch, s);
}

static double
of_state(const spw_delta_shape *s)
{
    return (s->mamba ? 4.0 : 6.0) * (double)(s->B * s->T * s->Hv * s->Dk * s->Dv);
}

static void
delta(spw_gpu_queue *q, act *out, float *rows, const spw_delta_inputs *in, const spw_delta_shape *s)
{
    counted.attention += of_state(s);
    counted.own->delta(q, out, rows, in, s);
}

static void
delta_backward(spw_gpu_queue *q, act *dqkv, act *da, act *db, float *dlog_a, float *ddt_bias, float *dskip,
               const act *dout, const float *rows, float *scratch, const spw_delta_inputs *in, const spw_delta_shape *s)
{
    counted.attention += 2 * of_state(s);
    counted.own->delta_backward(q, dqkv, da, db, dlog_a, ddt_bias, dskip, dout, rows, scratch, in, s);
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
    counted.calls.attention = attention;
    counted.calls.attention_backward = attention_backward;
    counted.calls.choose_keys = choose_keys;
    counted.calls.delta = delta;
    counted.calls.delta_backward = delta_backward;
    e->compute->calls = &counted.calls;
    counted.sum = counted.attention = 0;
}

static void
check(const rig *r, const char *what, double planned, double done)
{
    if (!(fabs(planned - done) <= 1e-12 * planned))
        fail_msg("%s%s, %s%s: %.0f operations are planned, and the device was asked for %.0f",
                 tiny_family_name(r->c.model.family), r->c.run.lora.rank > 0 ? ", adapters" : "", what,
                 r->e->plan.tape_count == 0 ? ", computed again" : "", planned, done);
}

/* Of the second step; chunks of places are not counted. */
static void
compare(spw_family family, void (*change)(rig *r))
{
    static const char *const how[] = {"auto", "always", "least"};
    for (int k = 0; k < 3; k++) {
        rig r;
        rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
        if (change != NULL)
            change(&r);
        snprintf(r.c.run.recompute, sizeof r.c.run.recompute, "%s", how[k]);
        rig_open(&r);
        assert_true((r.e->plan.tape_count == 0) ==
                    (k == 1 || r.e->shares_turns || spw__kept_blocks(r.e->lowest, r.e->chain_count) == 0));
        rig_need(&r, spw_engine_init_params(r.e, 7, &r.err));
        rig_train(&r, 0, 1);
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        count(r.e);
        rig_train(&r, 1, 2);
        rig_need(&r, spw_engine_drain(r.e, &r.err));
        check(&r, how[k], r.e->plan.flops - r.e->plan.attention_flops, counted.sum);
        if (r.c.model.chunk == 0)
            check(&r, how[k], r.e->plan.attention_flops, counted.attention);
        rig_remove(&r);
    }
}

/* All weights are trained; adapters; those beside experts. */
static void
test_families(void **state)
{
    static const spw_family families[] = {
        SPW_FAMILY_GPT2,       SPW_FAMILY_LLAMA,       SPW_FAMILY_PHI3,           SPW_FAMILY_OLMO2,
        SPW_FAMILY_GEMMA3,     SPW_FAMILY_MIXTRAL,     SPW_FAMILY_QWEN2_MOE,      SPW_FAMILY_GPT_OSS,
        SPW_FAMILY_GLM4_MOE,   SPW_FAMILY_DEEPSEEK_V2, SPW_FAMILY_QWEN3_NEXT,     SPW_FAMILY_GEMMA4,
        TINY_GEMMA4_SMALL,     SPW_FAMILY_ERNIE_MOE,   SPW_FAMILY_GRANITE_HYBRID, SPW_FAMILY_LLAMA4,
        SPW_FAMILY_NEMOTRON_H, SPW_FAMILY_MISTRAL4,    SPW_FAMILY_MIMO_V2,        SPW_FAMILY_LFM2_MOE,
        SPW_FAMILY_AFMOE,      SPW_FAMILY_OLMO_HYBRID, SPW_FAMILY_FALCON_H1,      SPW_FAMILY_KIMI_LINEAR};
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof families[0]; f++) {
        spw_model_config m;
        tiny_model_config(&m, families[f]);
        compare(families[f], NULL);
        compare(families[f], rig_lora);
        if (m.experts > 0)
            compare(families[f], rig_lora_experts);
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

/* What lies before experts whose turns serve several micro-batches is computed three times, or two where what they read is kept. */
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

/* Experts read something narrower than a row, and what they give is read. */
static void
narrow(rig *r)
{
    r->c.model.latent_width = 12;
}

static void
narrow_in_turns(rig *r)
{
    narrow(r);
    in_turns(r);
}

static void
narrow_in_pieces(rig *r)
{
    narrow(r);
    adapted_in_pieces(r);
}

static void
narrow_in_turns_and_pieces(rig *r)
{
    narrow(r);
    in_turns_and_pieces(r);
}

/* Experts in turns and in pieces, heads in pieces of the vocabulary, keys that are chosen, matrices that are made orthogonal, frozen layers below. */
static void
test_others(void **state)
{
    (void)state;
    compare(SPW_FAMILY_QWEN3_MOE, adapted_in_turns);
    compare(SPW_FAMILY_QWEN3_MOE, in_turns_and_pieces);
    compare(SPW_FAMILY_QWEN3_MOE, in_shared_turns);
    compare(SPW_FAMILY_QWEN2_MOE, in_shared_turns_and_pieces);
    compare(SPW_FAMILY_DEEPSEEK_V3, in_shared_turns);
    compare(SPW_FAMILY_NEMOTRON_H, adapted_in_shared_turns); /* layers of experts alone */
    compare(SPW_FAMILY_NEMOTRON_H, in_turns_and_pieces);
    compare(SPW_FAMILY_NEMOTRON_H, narrow);
    compare(SPW_FAMILY_NEMOTRON_H, narrow_in_turns);
    compare(SPW_FAMILY_NEMOTRON_H, narrow_in_pieces);
    compare(SPW_FAMILY_NEMOTRON_H, narrow_in_turns_and_pieces);
    compare(SPW_FAMILY_GLM_DSA, NULL);
    compare(SPW_FAMILY_DEEPSEEK_V4, NULL); /* keys that stand for several rows, some of them chosen, and streams */
    compare(SPW_FAMILY_DEEPSEEK_V4, in_turns_and_pieces);
    compare(SPW_FAMILY_DEEPSEEK_V4, rig_lora);
    compare(SPW_FAMILY_DEEPSEEK_V4, rig_lora_experts);
    compare(SPW_FAMILY_DEEPSEEK_V4, rig_freeze_lower);
    compare(TINY_FEW_KEYS, NULL);
    compare(TINY_FEW_KEYS, in_pieces);
    compare(TINY_FEW_KEYS, in_shared_turns);
    compare(TINY_FEW_KEYS, rig_lora);
    compare(SPW_FAMILY_LLAMA4, adapted_in_shared_turns);
    compare(SPW_FAMILY_GEMMA4, in_turns); /* whose experts' sum is read */
    compare(SPW_FAMILY_GEMMA4, in_pieces);
    compare(SPW_FAMILY_GEMMA4, in_turns_and_pieces);
    compare(SPW_FAMILY_LLAMA4, adapted_in_turns);
    compare(SPW_FAMILY_LLAMA, in_pieces);
    compare(SPW_FAMILY_GPT_OSS, adapted_in_pieces);
    compare(SPW_FAMILY_LLAMA, head_in_pieces);
    compare(SPW_FAMILY_LLAMA, muon);
    compare(SPW_FAMILY_LLAMA, rig_freeze_lower);
    compare(SPW_FAMILY_QWEN3_MOE, rig_freeze_mlps);
}

/* Adapters of one weight of one layer: a layer's input needs no gradient there, nor does what lies in front of the weight. */
static void
adapt(rig *r, const char *glob)
{
    rig_lora(r);
    r->c.run.lora_targets.count = 1;
    snprintf(r->c.run.lora_targets.item[0], sizeof r->c.run.lora_targets.item[0], "%s", glob);
}

static void
adapt_down(rig *r)
{
    adapt(r, r->c.model.family == SPW_FAMILY_GPT2 ? "h.1.mlp.c_proj" : "*.layers.1.mlp.down_proj");
}

static void
adapt_gate(rig *r)
{
    adapt(r, "*.layers.1.mlp.gate_proj");
}

static void
adapt_query(rig *r)
{
    adapt(r, "*.layers.1.*.q_proj");
}

static void
adapt_down_in_tiles(rig *r)
{
    in_pieces(r);
    adapt_down(r);
}

static void
adapt_gate_in_tiles(rig *r)
{
    in_pieces(r);
    adapt_gate(r);
}

static void
adapt_shared(rig *r)
{
    adapt(r, "*.layers.1.*shared_expert*down_proj");
}

static void
adapt_shared_in_turns(rig *r)
{
    in_turns(r);
    adapt_shared(r);
}

static void
adapt_shared_in_shared_turns(rig *r)
{
    in_shared_turns(r);
    adapt_shared(r);
}

static void
adapt_experts(rig *r)
{
    rig_lora_experts(r);
    r->c.run.lora_targets.count = 0;
}

static void
adapt_experts_in_shared_turns(rig *r)
{
    in_shared_turns(r);
    adapt_experts(r);
}

static void
adapt_experts_in_pieces(rig *r)
{
    in_pieces(r);
    adapt_experts(r);
}

static void
freeze_norms(rig *r)
{
    rig_freeze(r, "*norm*");
}

static void
freeze_lower_and_norms(rig *r)
{
    rig_freeze_lower(r);
    freeze_norms(r);
}

static void
freeze_all_but_head(rig *r)
{
    r->c.model.tied = false;
    rig_freeze(r, "*embed_tokens*");
    rig_freeze(r, "*.layers.*");
    freeze_norms(r);
}

static double
planned(spw_family family, void (*change)(rig *r), const spw_model_config *m)
{
    double flops;
    rig r;
    rig_config(&r, family, SPW_STATE_FP32, SPW_TIER_HOST);
    assert_memory_equal(&r.c.model, m, sizeof *m);
    change(&r);
    rig_open(&r);
    flops = r.e->plan.flops;
    rig_remove(&r);
    return flops;
}

/* What lies in front of the lowest weight that is trained has no gradient, and its products are not made. */
static void
test_lowest(void **state)
{
    rig r;
    double each, less;
    (void)state;
    compare(SPW_FAMILY_LLAMA, adapt_down);
    compare(SPW_FAMILY_LLAMA, adapt_down_in_tiles);
    compare(SPW_FAMILY_LLAMA, adapt_gate);
    compare(SPW_FAMILY_LLAMA, adapt_gate_in_tiles);
    compare(SPW_FAMILY_LLAMA, adapt_query);
    compare(SPW_FAMILY_GPT2, adapt_down);
    compare(SPW_FAMILY_LLAMA, freeze_norms);
    compare(SPW_FAMILY_LLAMA, freeze_lower_and_norms);
    compare(SPW_FAMILY_LLAMA, freeze_all_but_head);
    compare(SPW_FAMILY_QWEN2_MOE, adapt_shared);
    compare(SPW_FAMILY_QWEN2_MOE, adapt_shared_in_turns);
    compare(SPW_FAMILY_QWEN2_MOE, adapt_shared_in_shared_turns);
    compare(SPW_FAMILY_QWEN3_MOE, adapt_experts);
    compare(SPW_FAMILY_QWEN3_MOE, adapt_experts_in_pieces);
    compare(SPW_FAMILY_QWEN3_MOE, adapt_experts_in_shared_turns);
    compare(SPW_FAMILY_LLAMA4, adapt_experts);
    compare(SPW_FAMILY_GPT_OSS, adapt_experts);
    rig_config(&r, SPW_FAMILY_LLAMA, SPW_STATE_FP32, SPW_TIER_HOST);
    each = 2.0 * (double)(r.c.accumulation * r.c.micro_batch * r.c.data.seq_length);
    less = each * (double)(r.c.model.width * (r.c.model.heads + 2 * r.c.model.kv_heads) * r.c.model.head_dim);
    assert_true(planned(SPW_FAMILY_LLAMA, rig_freeze_lower, &r.c.model) -
                    planned(SPW_FAMILY_LLAMA, freeze_lower_and_norms, &r.c.model) ==
                less);
}

/* Experts whose rows have no gradient, or that have none themselves: turns change no bit. */
static void
test_turns(void **state)
{
    static const struct {
        spw_family family;
        void (*change)(rig *r);
    } all[] = {{SPW_FAMILY_QWEN3_MOE, adapt_experts},
               {SPW_FAMILY_LLAMA4, adapt_experts},
               {SPW_FAMILY_GPT_OSS, adapt_experts},
               {SPW_FAMILY_NEMOTRON_H, adapt_experts},
               {SPW_FAMILY_QWEN2_MOE, adapt_shared}};
    (void)state;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        rig_outcome want, got;
        for (int turns = 0; turns < 3; turns++) { /* none, for each micro-batch by itself, shared */
            rig r;
            rig_config(&r, all[i].family, SPW_STATE_FP32, SPW_TIER_HOST);
            all[i].change(&r);
            r.c.run.expert_turns = turns > 0 ? 3 : 0;
            r.c.run.micro_batches_per_pass = turns == 1 ? 1 : 0;
            rig_descend(&r, turns == 0 ? &want : &got);
            assert_true(r.e->in_turns == (turns > 0) && r.e->shares_turns == (turns == 2));
            if (turns > 0) {
                rig_near(&want, &got, 0, tiny_family_name(all[i].family));
                free(got.masters);
            }
            rig_remove(&r);
        }
        free(want.masters);
    }
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_families), cmocka_unit_test(test_others),
                                       cmocka_unit_test(test_lowest), cmocka_unit_test(test_turns)};
    return cmocka_run_group_tests_name("operations", tests, NULL, NULL);
}
