/*
 * Llama and its relatives: RMSNorm, rotary positions, grouped heads, SwiGLU, linear weights (out, in). What sets Mistral (a
 * window), Qwen2 (biases of q, k and v), Qwen3 (norms of q and k), Mixtral, Qwen2-MoE and Qwen3-MoE (experts), Phi-3 (packed
 * weights), SmolLM3 (layers without rope), OLMo 2 (norms of what is added), Gemma 3 (the same and more norms, by 1 + w, gelu, two
 * kinds of layers), Gemma 2 (caps of scores and logits), gpt-oss (sinks, experts of paired columns with biases), GLM-4.5 (layers without
 * experts first, choices by sigmoids), MiniMax-M2 (both norms over all heads and such choices), OLMo 3 (OLMo 2 with windows),
 * DeepSeek-V2, V3 and GLM-4.7-Flash (latent attention besides), Gemma (Gemma 3's norms where Llama has them), Granite (four factors),
 * OLMoE (OLMo 2's norms of q and k, experts), Seed-OSS (biases), GLM-4 (gate and up in one, pairs that are turned are neighbors;
 * since 0414 norms where Gemma 2 has them), ERNIE 4.5 (such pairs) and EXAONE 4 (OLMo 2's norms, Qwen3's of q and k, no rope without
 * a window; its mixture has Llama's norms and DeepSeek's experts), Ministral 3 (queries that grow with their place), GPT-NeoX (LayerNorm, an MLP without a gate beside attention), OPT (LayerNorm,
 * learned places), Starcoder2 (LayerNorm, an MLP without a gate), StableLM (LayerNorm), Qwen3.5 and Qwen3-Next (layers of linear attention
 * between others whose attention has gates), Gemma 4 (larger heads without a window, values made of keys, experts beside the MLP,
 * embeddings of each layer, layers that read another's keys), Granite 4 (Mamba-2's layers between others), Nemotron-H (the same, halves of a layer apart, experts without a gate), Llama 4 (what experts read is weighed, chunks, heads normed behind rope),
 * DeepSeek-V3.2 and GLM-5 (V3 with indexers, indexer.c), DeepSeek-V4 (deepseek4.c), Mistral 4 (V3 whose queries grow, experts in one), MiMo-V2
 * (V3's experts; sinks and more keys in layers with a window, values of another size), LFM2 (gated convolutions between its layers), AFMoE (V3's experts between
 * norms, gates of attention by a matrix of their own, no rope without a window), OLMo Hybrid (layers of linear attention with Llama's norms between OLMo 2's), Falcon-H1
 * (Mamba-2's beside attention in each layer, multipliers), Kimi Linear (V3 without places, layers of linear attention whose decays are channels') apart are flags of the configuration, not functions.
 * Sources: Touvron et al. 2023 (2302.13971, and 2307.09288 for grouped heads), Jiang et al. 2023 (2310.06825) and 2024
 * (2401.04088), Yang et al. 2024 (2407.10671) and 2025 (2505.09388), Abdin et al. 2024 (2404.14219), OLMo Team 2024
 * (2501.00656), Black et al. 2022 (2204.06745), Zhang et al. 2022 (2205.01068), Lozhkov et al. 2024 (2402.19173), Gemma Team 2024 (2408.00118) and 2025 (2503.19786), OpenAI 2025 (2508.10925), DeepSeek-AI 2024 (2405.04434 and
 * 2412.19437), Yang et al. 2024 (2412.06464) and Qiu et al. 2025 (2505.06708) for Qwen3-Next's layers, Dao and Gu 2024 (2405.21060).
 */
#include "nn_internal.h"
#include "tape_internal.h"
#include <math.h>
#include <stdio.h>

spw_value *
spw_llama_embed_forward(const spw_call *call, spw_value *x)
{
    const spw_batch *b = call->batch;
    const spw_model_config *c = &call->model->config;
    (void)x;
    x = spw_nn_embedding(call->tape, b->tokens, b->sequences * b->positions, call->params[0]);
    if (c->inputs_dim > 0) {
        spw_value *all = spw_nn_embedding(call->tape, b->tokens, b->sequences * b->positions, call->params[1]);
        all = spw_nn_scale(call->tape, all, spw_nn_rounded(call->tape, sqrtf((float)c->inputs_dim)));
        spw_nn_leave(call->tape, all, &call->sides[SPW_SIDE_TOKENS]);
    }
    if (c->learned_places)
        return spw_nn_embedding_add(call->tape, x, b->places, call->params[1], c->places_before);
    if (c->embedding_scaled)
        return spw_nn_scale(call->tape, x, spw_nn_rounded(call->tape, sqrtf((float)c->width)));
    if (c->streams > 0)
        return spw_nn_repeat(call->tape, x, c->streams);
    return c->embedding_scale > 0 ? spw_nn_scale(call->tape, x, (float)c->embedding_scale) : x;
}

/*
 * y = x w^T, with the bias that may follow w in the block's list; at moves past both. The adapter lies at the list's end.
 */
static spw_value *
linear(const spw_call *call, uint32_t *at, spw_value *x, bool bias)
{
    uint32_t w = (*at)++;
    return spw__nn_adapted(call, NULL, x, w, bias ? call->params[(*at)++] : NULL, 0);
}

/* The same, and onto if that is not NULL, for what ends a half of the block, or the block. Dropout's site is the weight's id. */
static spw_value *
linear_onto(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *x, bool bias, bool ends)
{
    uint32_t w = *at;
    if (onto == NULL)
        return linear(call, at, x, bias);
    *at += bias ? 2 : 1;
    return spw__nn_add_half(call, onto, x, w, bias ? call->params[w + 1] : NULL, 0, call->block->param_ids[w], ends);
}

spw_value *
spw__nn_norm(const spw_call *call, uint32_t *at, spw_value *x)
{
    const spw_model_config *c = &call->model->config;
    spw_value *w = call->params[(*at)++];
    if (c->layer_norm)
        return spw_nn_layernorm(call->tape, x, w, c->norm_unbiased ? NULL : call->params[(*at)++], (float)c->norm_eps);
    return c->norms_from_one ? spw_nn_rmsnorm_from_one(call->tape, x, w, (float)c->norm_eps)
                             : spw_nn_rmsnorm(call->tape, x, w, (float)c->norm_eps);
}

static spw_norms
norms_of(const spw_call *call)
{
    return spw_model_norms(&call->model->config, call->block->layer_idx);
}

static spw_value *
normed(const spw_call *call, uint32_t *at, spw_value *x, uint32_t k)
{
    spw_nn_into(call->tape, k);
    return spw__nn_norm(call, at, x);
}

/* Times a number; 0 and 1: as it is. */
static spw_value *
scaled(const spw_call *call, spw_value *x, double scale)
{
    return scale > 0 && scale != 1 ? spw_nn_scale(call->tape, x, (float)scale) : x;
}

/* Whether the heads of this layer's queries and keys are made as long as each other behind rope. */
static bool
is_unit(const spw_model_config *c, uint64_t layer_idx)
{
    return c->qk_unit && spw_model_has_rope(c, layer_idx);
}

/* Turning goes by what lies between two rows, growth by how far a document has come; NULL: rows of a sequence begin at 0. */
static const int32_t *
grown_places(const spw_call *call)
{
    const spw_model_config *c = &call->model->config;
    bool grows = c->rope_growth > 0 || c->still_growth > 0;
    return grows && call->batch->begins != NULL ? call->batch->places : NULL;
}

/* Norm and rope of so many heads, or rope and norm; the part's output k. */
static spw_value *
turned(const spw_call *call, uint32_t *at, spw_value *x, uint64_t heads, uint32_t k)
{
    const spw_model_config *c = &call->model->config;
    uint64_t l = call->block->layer_idx;
    if (c->qk_norm && !c->qk_norm_last)
        x = normed(call, at, x, k);
    if (spw_model_has_rope(c, l) || (k == 0 && c->still_growth > 0))
        x = spw_nn_rope(call->tape, x, 0, k == 0 ? call->query_cos_sin : call->cos_sin, grown_places(call),
                        call->batch->positions, heads, spw_model_head_dim(c, l),
                        spw_model_rope_width(c, spw_model_rope_table(c, l)), c->rope_paired);
    if (is_unit(c, l)) {
        spw_nn_into(call->tape, k);
        return spw_nn_rmsnorm_plain(call->tape, x, spw_model_head_dim(c, l), (float)c->norm_eps);
    }
    return c->qk_norm_last ? normed(call, at, x, k) : x;
}

/* Queries or keys, or both and values after them: linear, norm, rope of so many heads; the part's output k. */
static spw_value *
projected(const spw_call *call, uint32_t *at, spw_value *x, uint64_t heads, uint32_t k)
{
    const spw_model_config *c = &call->model->config;
    if (!c->qk_norm && !is_unit(c, call->block->layer_idx))
        spw_nn_into(call->tape, k);
    x = linear(call, at, x, c->qkv_bias);
    return turned(call, at, x, heads, k);
}

/* Keys and values after them. */
static void
keys_and_values(const spw_call *call, uint32_t *at, spw_value *x, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    uint64_t l = call->block->layer_idx, heads = spw_model_kv_heads(c, l);
    spw_value *v;
    if (!c->values_normed) {
        out[1] = projected(call, at, x, heads, 1);
        if (c->value_scale == 0)
            spw_nn_into(call->tape, 2);
        out[2] = v = linear(call, at, x, c->qkv_bias);
        if (c->value_scale > 0) {
            spw_nn_into(call->tape, 2);
            out[2] = spw_nn_scale(call->tape, v, (float)c->value_scale);
        }
        return;
    }
    v = linear(call, at, x, c->qkv_bias);
    out[1] = turned(call, at, v, heads, 1);
    if (!c->values_of_keys || spw_model_window(c, l) > 0)
        v = linear(call, at, x, c->qkv_bias);
    spw_nn_into(call->tape, 2);
    out[2] = spw_nn_rmsnorm_plain(call->tape, v, spw_model_value_dim(c, l), (float)c->norm_eps);
}

/* Queries, and the gate of what they find, the part's output 3: a head's are beside each other. */
static spw_value *
gated_queries(const spw_call *call, uint32_t *at, spw_value *h, spw_value **gate)
{
    const spw_model_config *c = &call->model->config;
    const uint64_t sizes[2] = {c->head_dim, c->head_dim};
    h = linear(call, at, h, c->qkv_bias);
    spw_nn_into(call->tape, 3);
    *gate = spw_nn_parts(call->tape, h, c->heads, sizes, 1, 1);
    h = spw_nn_parts(call->tape, h, c->heads, sizes, 0, 1);
    return turned(call, at, h, c->heads, 0);
}

/* Queries, keys and values of the heads in turn. */
static spw_value *
woven(const spw_call *call, uint32_t *at, spw_value *x)
{
    const spw_model_config *c = &call->model->config;
    spw_nn_into(call->tape, 0);
    x = linear(call, at, x, c->qkv_bias);
    for (uint64_t k = 0; k < 2; k++)
        x = spw_nn_rope(call->tape, x, k * c->head_dim, k == 0 ? call->query_cos_sin : call->cos_sin, NULL,
                        call->batch->positions, c->heads, 3 * c->head_dim, spw_model_rope_width(c, 0), c->rope_paired);
    return x;
}

static spw_value *
gated(const spw_call *call, uint32_t *at, spw_value *h)
{
    const spw_model_config *c = &call->model->config;
    spw_value *gate = scaled(call, linear(call, at, h, c->mlp_bias), c->scales.gate);
    spw_value *up = linear(call, at, h, c->mlp_bias);
    return spw_nn_gate_mul(call->tape, c->gate, gate, up);
}

/* The curve of a linear layer; a gelu is made with it where no adapter is beside it. */
static spw_value *
curved(const spw_call *call, uint32_t *at, spw_value *h)
{
    const spw_model_config *c = &call->model->config;
    uint32_t w = *at;
    if (c->curve != SPW_CURVE_GELU || call->block->adapter_at[w] > 0)
        return spw_nn_curve(call->tape, c->curve, linear(call, at, h, c->mlp_bias));
    *at += c->mlp_bias ? 2 : 1;
    return spw_nn_linear_gelu(call->tape, h, call->params[w], c->mlp_bias ? call->params[w + 1] : NULL, 0);
}

/* What an MLP's last matrix reads. */
static spw_value *
inner(const spw_call *call, uint32_t *at, spw_value *h)
{
    const spw_model_config *c = &call->model->config;
    if (c->ungated)
        return curved(call, at, h);
    return c->gate_packed ? spw_nn_gate_mul_packed(call->tape, c->gate, linear(call, at, h, c->mlp_bias))
                          : gated(call, at, h);
}

/* onto + the expert of all rows, as far as each row's gate lets it if there is one. */
static spw_value *
shared(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h)
{
    const spw_model_config *c = &call->model->config;
    spw_value *x = inner(call, at, h);
    if (c->half_scale > 0) {
        x = spw_nn_scale(call->tape, linear(call, at, x, c->mlp_bias), (float)c->half_scale);
        spw_nn_into(call->tape, 0);
        return spw_nn_add(call->tape, onto, x);
    }
    if (!c->shared_gated)
        return linear_onto(call, at, onto, x, c->mlp_bias, true);
    x = linear(call, at, x, false);
    h = linear(call, at, h, false);
    spw_nn_into(call->tape, 0);
    return spw_nn_add_gated(call->tape, onto, x, h);
}

static spw_value *
route(const spw_call *call, uint32_t *at, spw_value *logits)
{
    const spw_model_config *c = &call->model->config;
    spw_value *factors = c->experts_beside ? call->params[(*at)++] : NULL;
    spw_routing_rule rule = {.sum_to_one = c->sum_to_one,
                             .sigmoid = c->sigmoid,
                             .scale = c->choice_scale > 0 ? (float)c->choice_scale : 1,
                             .least = (float)c->choice_least,
                             .groups = c->groups,
                             .group_choices = c->group_choices};
    rule.root = c->root;
    rule.tokens = call->batch->tokens;
    if (spw_model_is_hashed(c, call->block->layer_idx))
        rule.table = call->params[(*at)++]->data;
    else if ((c->sigmoid && !c->experts_weighed) || c->softmax_biased)
        rule.bias = call->params[(*at)++]->data;
    return spw_nn_route_scaled(call->tape, logits, c->choices, &rule, call->batch->balance, factors);
}

/* onto (or NULL) + what the experts that each row chooses by logits make of h. */
static spw_value *
experts(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h, spw_value *logits)
{
    const spw_model_config *c = &call->model->config;
    spw_tape *t = call->tape;
    spw_value *gate, *up, *routing = route(call, at, logits), *x;
    spw_value *const *w = call->params + *at;
    spw__fused_adapter in = spw__nn_fused_adapter(call, SPW_FUSED_GATE_UP);
    spw__fused_adapter out = spw__nn_fused_adapter(call, SPW_FUSED_DOWN);
    x = c->experts_weighed ? spw_nn_dispatch_weighed(t, h, routing) : spw_nn_dispatch(t, h, routing);
    if (c->experts_paired) {
        *at += (uint32_t)(4 * c->experts);
        gate = spw__nn_each(t, &in, 1, x, routing, w, w + c->experts, SPW_OP_W_IN_OUT);
        x = spw_nn_gate_mul_packed(t, c->gate, gate);
        x = spw__nn_each(t, &out, 1, x, routing, w + 2 * c->experts, w + 3 * c->experts, SPW_OP_W_IN_OUT);
    } else if (c->experts_beside || c->experts_weighed || c->experts_packed || c->gate_packed || c->ungated) {
        unsigned flags = c->experts_weighed ? SPW_OP_W_IN_OUT : 0;
        *at += (uint32_t)(2 * c->experts);
        x = spw__nn_each(t, &in, 1, x, routing, w, NULL, flags);
        x = c->ungated ? spw_nn_curve(t, c->curve, x) : spw_nn_gate_mul_packed(t, c->gate, x);
        x = spw__nn_each(t, &out, 1, x, routing, w + c->experts, NULL, flags);
    } else {
        *at += (uint32_t)(3 * c->experts);
        gate = spw__nn_each(t, &in, 2, x, routing, w, NULL, 0);
        up = spw__nn_each(t, &in, 2, x, routing, w + c->experts, NULL, 0);
        x = spw_nn_gate_mul(t, c->gate, gate, up);
        x = spw__nn_each(t, &out, 1, x, routing, w + 2 * c->experts, NULL, 0);
    }
    return spw_nn_combine(t, onto, x, routing);
}

spw_value *
spw__nn_experts(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h, spw_value *logits)
{
    return experts(call, at, onto, h, logits);
}

spw_value *
spw__nn_add_mlp(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h)
{
    return linear_onto(call, at, onto, inner(call, at, h), call->model->config.mlp_bias, false);
}

spw_value *
spw__nn_linear(const spw_call *call, uint32_t *at, spw_value *x)
{
    return linear(call, at, x, false);
}

/* onto (or NULL) + the MLP of h. */
static spw_value *
mlp(const spw_call *call, uint32_t *at, spw_value *onto, spw_value *h)
{
    return linear_onto(call, at, onto, inner(call, at, h), call->model->config.mlp_bias, true);
}

/* Queries, keys and values, or all in one; behind them what they are made of, where the MLP reads it too, or a gate. */
static void
before_attention(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    bool shares = c->parallel && !c->parallel_norm;
    spw_value *h = in[0];
    if (shares)
        spw_nn_into(call->tape, c->packed ? 1 : 3);
    if (norms_of(call) != SPW_NORMS_AFTER && !c->linear_beside)
        h = spw__nn_norm(call, at, h);
    h = scaled(call, h, c->scales.attention_in);
    if (shares)
        out[c->packed ? 1 : 3] = h;
    if (c->woven) {
        out[0] = woven(call, at, h);
        return;
    }
    if (c->attention_gated && !c->gate_apart)
        out[0] = gated_queries(call, at, h, &out[3]);
    else
        out[0] = projected(call, at, h, c->heads + (c->packed ? c->kv_heads : 0), 0);
    if (!c->packed && spw_model_keys_of(c, call->block->layer_idx) == call->block->layer_idx)
        keys_and_values(call, at, h, out);
    if (c->gate_apart) {
        spw_nn_into(call->tape, 3);
        out[3] = linear(call, at, h, false);
    }
}

/* By the class's default, whatever the other norms have. */
static spw_value *
latent_norm(const spw_call *call, uint32_t *at, spw_value *x)
{
    return spw_nn_rmsnorm(call->tape, x, call->params[(*at)++], 1e-6f);
}

/* How many parameters an indexer has, and how many, and one bias, lie between it and the norm of what queries are made of. */
enum { INDEXER_PARAMS = 5, BEFORE_INDEXER = 4 };

/* Queries, keys, and the matrix where a head's values lie behind what its keys have of their own. */
static void
before_latent_attention(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    uint64_t T = call->batch->positions, R = c->rope_dim, N = c->head_dim - R;
    const bool rope = spw_model_has_rope(c, call->block->layer_idx);
    spw_tape *t = call->tape;
    spw_value *h = spw__nn_norm(call, at, in[0]), *q = h, *kv;
    if (c->q_rank > 0)
        q = latent_norm(call, at, linear(call, at, h, c->qkv_bias));
    if (spw_model_has_indexer(c, call->block->layer_idx))
        spw__nn_choose(call, *at + BEFORE_INDEXER + c->qkv_bias, h, q);
    spw_nn_into(t, 0);
    q = linear(call, at, q, false);
    out[0] = rope ? spw_nn_rope(t, q, N, call->cos_sin, NULL, T, c->heads, c->head_dim, R, c->rope_paired) : q;
    if (c->rope_growth > 0)
        out[0] = spw_nn_rope(t, out[0], 0, call->query_cos_sin, grown_places(call), T, c->heads, c->head_dim,
                             c->head_dim, false);
    kv = linear(call, at, h, c->qkv_bias);
    if (rope)
        kv = spw_nn_rope(t, kv, c->kv_rank, call->cos_sin, NULL, T, 1, R, R, c->rope_paired);
    h = latent_norm(call, at, spw_nn_parts(t, kv, 1, &c->kv_rank, 0, 1));
    spw_nn_into(t, 2);
    out[2] = linear(call, at, h, false);
    spw_nn_into(t, 1);
    out[1] = spw_nn_keys(t, out[2], kv, c->kv_rank, c->heads, N, R);
    *at += spw_model_has_indexer(c, call->block->layer_idx) ? INDEXER_PARAMS : 0;
}

/* What attention gives (in[1]), as far as its gate (in[2]) lets it. */
static spw_value *
let_through(const spw_call *call, uint32_t *at, spw_value *const *in)
{
    const spw_model_config *c = &call->model->config;
    if (spw_model_is_linear(c, call->block->layer_idx))
        return spw__nn_linear_gated(call, at, in[1], in[2]);
    return c->attention_gated ? spw_nn_gate_mul(call->tape, SPW_GATE_SIGMOID, in[2], in[1]) : in[1];
}

/* Whether what ends attention has a bias. */
static bool
out_bias(const spw_call *call)
{
    const spw_model_config *c = &call->model->config;
    return c->out_bias && !spw_model_is_linear(c, call->block->layer_idx);
}

/* What half of a layer gives, as it is added. */
static spw_value *
given(const spw_call *call, uint32_t *at, spw_value *h)
{
    const spw_model_config *c = &call->model->config;
    return c->half_scale > 0 ? spw_nn_scale(call->tape, h, (float)c->half_scale) : spw__nn_norm(call, at, h);
}

/* What a layer gives: the sum of two, and it times the layer's number if that has one. */
static spw_value *
last_sum(const spw_call *call, uint32_t *at, spw_value *a, spw_value *b)
{
    spw_nn_into(call->tape, 0);
    return call->model->config.layer_scaled ? spw_nn_add_scaled_by(call->tape, a, b, call->params[(*at)++])
                                            : spw_nn_add(call->tape, a, b);
}

/* What a layer's own embeddings (inputs) give, as a gate made of x lets them, is added to x. */
static spw_value *
add_inputs(const spw_call *call, uint32_t *at, spw_value *x, spw_value *inputs)
{
    const spw_model_config *c = &call->model->config;
    spw_value *h = spw_nn_gate_mul(call->tape, c->gate, linear(call, at, x, false), inputs);
    return last_sum(call, at, x, spw__nn_norm(call, at, linear(call, at, h, false)));
}

/* Of the block's input, what attention gives, and its gate, or the layer's own embeddings. */
static void
after_attention(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    bool before = norms_of(call) != SPW_NORMS_AFTER, apart = norms_of(call) != SPW_NORMS_BEFORE || c->half_scale > 0;
    spw_tape *t = call->tape;
    spw_value *x = in[0], *h = let_through(call, at, in);
    h = linear_onto(call, at, apart ? NULL : x, h, out_bias(call), false);
    x = apart ? spw_nn_add(t, x, given(call, at, h)) : h;
    h = mlp(call, at, apart ? NULL : x, before ? spw__nn_norm(call, at, x) : x);
    if (c->inputs_dim > 0)
        out[0] = add_inputs(call, at, spw_nn_add(t, x, given(call, at, h)), in[2]);
    else
        out[0] = apart ? last_sum(call, at, x, given(call, at, h)) : h;
}

/* Of the block's input and what attention gives, in a layer without an MLP. */
static void
attention_alone(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    out[0] = linear_onto(call, at, in[0], let_through(call, at, in), out_bias(call), true);
}

/* Of the block's input, in a layer without attention; experts need what they read of it. */
static void
mlp_alone(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    out[0] = mlp(call, at, in[0], spw__nn_norm(call, at, in[0]));
}

static void
experts_alone(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    out[0] = normed(call, at, in[0], 0);
}

/* The same, and something narrower made of it, which experts read in its place. */
static void
narrowed(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    out[0] = normed(call, at, in[0], 0);
    spw_nn_into(call->tape, 1);
    out[1] = linear(call, at, out[0], call->model->config.mlp_bias);
}

/* Of the block's input, what attention gives, and what it was made of where the MLP reads that. */
static void
beside_attention(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    spw_value *x = linear_onto(call, at, in[0], in[1], c->out_bias, false);
    out[0] = mlp(call, at, x, c->parallel_norm ? spw__nn_norm(call, at, in[0]) : in[2]);
}

/* What attention gives is added to the block's input; what experts read of the sum. */
static void
before_experts(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    spw_value *h = let_through(call, at, in);
    if (c->half_scale > 0 || c->norms != SPW_NORMS_BEFORE) {
        h = given(call, at, linear(call, at, h, out_bias(call)));
        spw_nn_into(call->tape, 0);
        out[0] = spw_nn_add(call->tape, in[0], h);
    } else {
        out[0] = linear_onto(call, at, in[0], h, out_bias(call), true);
    }
    spw_nn_into(call->tape, 1);
    out[1] = spw__nn_norm(call, at, out[0]);
}

/* The logits of who reads it. */
static void
who_reads(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_nn_into(call->tape, 0);
    out[0] = linear(call, at, in[0], call->model->config.experts_paired);
}

/* Of the block's input, of what that was made into, and of what experts give, which is made as wide as these. */
static void
after_narrowed(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_value *x = linear_onto(call, at, in[0], in[2], call->model->config.mlp_bias, false);
    out[0] = shared(call, at, x, in[1]);
}

/* Of what they give, and of what they have read. */
static void
after_experts(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    out[0] = shared(call, at, in[0], in[1]);
}

/* Of the block's input with what attention gave, of what experts have read, and of what they give, which is normed with the expert of all rows. */
static void
after_normed(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    spw_value *y = in[2];
    if (c->shared_width > 0)
        y = linear_onto(call, at, y, inner(call, at, in[1]), c->mlp_bias, false);
    out[0] = last_sum(call, at, in[0], spw__nn_norm(call, at, y));
}

/*
 * What attention gives (in[1]) is added to the block's input; of the sum what experts read, the logits of who reads it, and what the MLP
 * beside them gives.
 */
static void
before_experts_beside(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    spw_tape *t = call->tape;
    spw_value *h = given(call, at, linear(call, at, in[1], c->out_bias)), *x;
    spw_nn_into(t, 0);
    out[0] = x = spw_nn_add(t, in[0], h);
    h = mlp(call, at, NULL, spw__nn_norm(call, at, x));
    spw_nn_into(t, 3);
    out[3] = spw__nn_norm(call, at, h);
    h = linear(call, at, spw__nn_norm(call, at, x), false);
    spw_nn_into(t, 2);
    out[2] = spw_nn_scale(t, h, 1 / sqrtf((float)c->width));
    spw_nn_into(t, 1);
    out[1] = spw__nn_norm(call, at, x);
}

/* Of that sum, what the MLP gives, and what experts give. */
static void
after_experts_beside(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_value *h = spw_nn_add(call->tape, in[1], spw__nn_norm(call, at, in[2]));
    out[0] = last_sum(call, at, in[0], spw__nn_norm(call, at, h));
}

static spw_value *
mixture_beside(const spw_call *call, uint32_t *at, spw_value *x, spw_value *attended)
{
    spw_value *v[4], *y;
    spw_nn_rows(call, at, before_experts_beside, (spw_value *[]){x, attended}, 2, v, 4);
    y = experts(call, at, NULL, v[1], v[2]);
    spw_nn_rows(call, at, after_experts_beside, (spw_value *[]){v[0], v[3], y}, 3, &y, 1);
    return y;
}

/* In a layer without attention, experts that read something narrower: their sum is read, too. */
static spw_value *
narrow_mixture(const spw_call *call, uint32_t *at, spw_value *x)
{
    spw_value *v[2], *logits, *y;
    spw_nn_rows(call, at, narrowed, &x, 1, v, 2);
    spw_nn_rows(call, at, who_reads, &v[0], 1, &logits, 1);
    y = experts(call, at, NULL, v[1], logits);
    spw_nn_rows(call, at, after_narrowed, (spw_value *[]){x, v[0], y}, 3, &y, 1);
    return y;
}

/* Where what experts give is normed before it is added: their sum is read, too. gate: of what attention gives, or NULL. */
static spw_value *
normed_mixture(const spw_call *call, uint32_t *at, spw_value *x, spw_value *attended, spw_value *gate)
{
    spw_value *v[2], *logits, *y;
    spw_nn_rows(call, at, before_experts, (spw_value *[]){x, attended, gate}, gate != NULL ? 3 : 2, v, 2);
    spw_nn_rows(call, at, who_reads, &v[1], 1, &logits, 1);
    y = experts(call, at, NULL, v[1], logits);
    spw_nn_rows(call, at, after_normed, (spw_value *[]){v[0], v[1], y}, 3, &y, 1);
    return y;
}

/*
 * Rows meet in routing, which is in no tile; experts take their rows in pieces of a tile's size.
 * attended NULL: the layer has no attention. gate: of what attention gives, or NULL.
 */
static spw_value *
mixture(const spw_call *call, uint32_t *at, spw_value *x, spw_value *attended, spw_value *gate)
{
    spw_value *v[2] = {x, NULL}, *logits, *y;
    if (call->model->config.latent_width > 0)
        return narrow_mixture(call, at, x);
    if (call->model->config.norms != SPW_NORMS_BEFORE)
        return normed_mixture(call, at, x, attended, gate);
    if (attended == NULL)
        spw_nn_rows(call, at, experts_alone, &x, 1, &v[1], 1);
    else
        spw_nn_rows(call, at, before_experts, (spw_value *[]){x, attended, gate}, gate != NULL ? 3 : 2, v, 2);
    spw_nn_read(call->tape, v[1]);
    spw_nn_rows(call, at, who_reads, &v[1], 1, &logits, 1);
    y = experts(call, at, v[0], v[1], logits);
    if (call->model->config.shared_width > 0)
        spw_nn_rows(call, at, after_experts, (spw_value *[]){y, v[1]}, 2, &y, 1);
    return y;
}

/* What attention gives; *beside: what the rest of the block reads of it besides, what it was made of or a gate, or NULL. */
static spw_value *
attended(const spw_call *call, uint32_t *at, spw_value *x, spw_value **beside)
{
    const spw_model_config *c = &call->model->config;
    uint64_t l = call->block->layer_idx, rows = call->batch->sequences * call->batch->positions;
    spw_attention_shape shape = {.B = call->batch->sequences,
                                 .T = call->batch->positions,
                                 .Hq = c->heads,
                                 .Hk = spw_model_kv_heads(c, l),
                                 .D = spw_model_head_dim(c, l),
                                 .Dv = spw_model_value_dim(c, l),
                                 .scale = spw_model_score_scale(c),
                                 .window = spw_model_window(c, l),
                                 .begins = call->batch->begins,
                                 .ends = call->batch->ends,
                                 .cap = (float)c->score_cap};
    uint64_t Q = c->packed ? c->heads * c->head_dim : 0, KV = c->packed ? c->kv_heads * c->head_dim : 0;
    uint64_t N = c->head_dim - c->rope_dim;
    bool reads = spw_model_keys_of(c, l) != l, lends = spw_model_lends_keys(c, l);
    uint32_t side = shape.window > 0 ? SPW_SIDE_KEYS : SPW_SIDE_FULL_KEYS;
    uint32_t qkv_count = c->packed || reads ? 1 : 3, more = (c->parallel && !c->parallel_norm) || c->attention_gated;
    spw_value *qkv[4], *sinks;
    spw_call own = *call;
    own.choice = spw__nn_begin_choice(call);
    shape.chosen = own.choice.bits;
    shape.chosen_words = own.choice.words;
    if (c->kv_rank > 0) {
        Q = 0;
        KV = N; /* where values begin */
        shape.v_head = N + shape.Dv;
    } else if (c->woven) {
        Q = KV = c->head_dim;
        shape.qk_head = shape.v_head = 3 * c->head_dim;
    }
    if (spw_model_chunk(c, l) > 0 && call->batch->chunk_begins != NULL) {
        shape.begins = call->batch->chunk_begins;
        shape.ends = call->batch->chunk_ends;
    } else if (spw_model_chunk(c, l) > 0 && spw__tape_sees(call->tape, shape.T) > spw_model_chunk(c, l)) {
        return spw__tape_fail(call->tape); /* who made the batch has not cut it */
    }
    spw_nn_rows(&own, at, c->kv_rank > 0 ? before_latent_attention : before_attention, (spw_value *[]){x}, 1, qkv,
                qkv_count + more);
    *beside = more ? qkv[qkv_count] : NULL;
    for (uint32_t k = 0; k < 2 && reads; k++)
        qkv[1 + k] = spw_nn_bring(call->tape, &call->sides[side + k], rows, 0, call->sides[side + k].cols);
    for (uint32_t k = 0; k < 2 && lends; k++)
        spw_nn_leave(call->tape, qkv[1 + k], &call->sides[side + k]);
    sinks = spw_model_has_sinks(c, l) ? call->params[(*at)++] : NULL;
    return spw_nn_attention(call->tape, qkv[0], 0, qkv[c->packed ? 0 : 1], Q, qkv[c->packed ? 0 : 2], Q + KV, sinks,
                            &shape);
}

/* Of what the first layer reads, and of tokens: the embeddings of all layers. */
static void
make_inputs(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    spw_tape *t = call->tape;
    spw_value *h = spw_nn_scale(t, linear(call, at, in[0], false), 1 / sqrtf((float)c->width));
    h = spw_nn_add(t, spw__nn_norm(call, at, h), in[1]);
    spw_nn_into(t, 0);
    out[0] = spw_nn_scale(t, h, sqrtf(0.5f));
}

/* A layer's own embeddings; the first one makes all of them. */
static spw_value *
own_inputs(const spw_call *call, uint32_t *at, spw_value *x)
{
    const spw_model_config *c = &call->model->config;
    const spw_side *tokens = &call->sides[SPW_SIDE_TOKENS], *inputs = &call->sides[SPW_SIDE_INPUTS];
    uint64_t l = call->block->layer_idx, rows = call->batch->sequences * call->batch->positions;
    if (l == 0) {
        spw_value *y;
        spw_nn_rows(call, at, make_inputs, (spw_value *[]){x, spw_nn_bring(call->tape, tokens, rows, 0, tokens->cols)},
                    2, &y, 1);
        spw_nn_leave(call->tape, y, inputs);
    }
    return spw_nn_bring(call->tape, inputs, rows, l * c->inputs_dim, c->inputs_dim);
}

/* A layer that has one half. */
static spw_value *
half_layer(const spw_call *call, spw_value *x)
{
    const spw_model_config *c = &call->model->config;
    uint64_t l = call->block->layer_idx;
    uint32_t at = 0;
    spw_value *y = NULL, *h, *gate = NULL;
    if (spw_model_experts(c, l) > 0)
        return mixture(call, &at, x, NULL, NULL);
    if (spw_model_has_mlp(c, l)) {
        spw_nn_rows(call, &at, mlp_alone, &x, 1, &y, 1);
        return y;
    }
    h = spw_model_is_linear(c, l) ? spw__nn_linear_attention(call, &at, x, &gate) : attended(call, &at, x, &gate);
    spw_nn_rows(call, &at, attention_alone, (spw_value *[]){x, h, gate}, gate != NULL ? 3 : 2, &y, 1);
    return y;
}

/* What attention and linear attention beside it read of the block's input. */
static void
before_both(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_nn_into(call->tape, 0);
    out[0] = spw__nn_norm(call, at, in[0]);
}

/* Of the block's input, what attention gives, what linear attention gives, and the gate of that. */
static void
after_both(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    const spw_model_config *c = &call->model->config;
    spw_value *h = spw__nn_linear_gated(call, at, in[2], in[3]), *a, *x;
    h = scaled(call, linear(call, at, h, false), c->scales.linear_out);
    a = scaled(call, linear(call, at, in[1], c->out_bias), c->scales.attention_out);
    x = spw_nn_add(call->tape, in[0], spw_nn_add(call->tape, h, a));
    h = linear(call, at, inner(call, at, spw__nn_norm(call, at, x)), c->mlp_bias);
    out[0] = last_sum(call, at, x, scaled(call, h, c->scales.mlp));
}

/* A layer that has both. */
static spw_value *
both_layer(const spw_call *call, spw_value *x)
{
    uint32_t at = 0;
    spw_value *h, *found, *read, *gate, *y;
    spw_nn_rows(call, &at, before_both, &x, 1, &h, 1);
    found = attended(call, &at, h, &gate);
    read = spw__nn_linear_attention(call, &at, h, &gate);
    spw_nn_rows(call, &at, after_both, (spw_value *[]){x, found, read, gate}, 4, &y, 1);
    return y;
}

spw_value *
spw_llama_layer_forward(const spw_call *call, spw_value *x)
{
    const spw_model_config *c = &call->model->config;
    uint64_t l = call->block->layer_idx;
    uint32_t at = 0;
    spw_value *y, *h, *inputs, *beside;
    if (c->halves_apart)
        return half_layer(call, x);
    if (c->linear_beside)
        return both_layer(call, x);
    if (c->streams > 0)
        return spw__nn_streams_layer(call, x);
    inputs = c->inputs_dim > 0 ? own_inputs(call, &at, x) : NULL;
    h = spw_model_is_linear(c, l) ? spw__nn_linear_attention(call, &at, x, &beside) : attended(call, &at, x, &beside);
    beside = inputs != NULL ? inputs : beside;
    if (spw_model_experts(c, l) == 0)
        spw_nn_rows(call, &at, c->parallel ? beside_attention : after_attention, (spw_value *[]){x, h, beside},
                    beside != NULL ? 3 : 2, &y, 1);
    else if (c->experts_beside)
        y = mixture_beside(call, &at, x, h);
    else
        y = mixture(call, &at, x, h, beside);
    return y;
}

spw_value *
spw_llama_head_forward(const spw_call *call, spw_value *x)
{
    double divisor = call->model->config.logit_divisor;
    uint32_t at = 0;
    if (call->model->config.streams > 0)
        x = spw__nn_streams_head(call, &at, x);
    x = spw__nn_norm(call, &at, x);
    if (divisor > 0) /* of the logits, which are linear in x */
        x = spw_nn_scale(call->tape, x, (float)(1 / divisor));
    return spw__nn_head(call, x, call->params[at]);
}
