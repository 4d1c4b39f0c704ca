/*
 * Llama: RMSNorm, rotary positions, grouped heads, SwiGLU, no biases. Source: Touvron et al. 2023 (2302.13971, and
 * 2307.09288 for grouped heads). Linear weights are (out, in).
 */
#include "nn_internal.h"
#include <math.h>
#include <stdio.h>

spw_value *
spw_llama_embed_forward(const spw_call *call, spw_value *x)
{
    const spw_batch *b = call->batch;
    (void)x;
    return spw_nn_embedding(call->tape, b->tokens, b->sequences * b->positions, call->params[0]);
}

enum { NORM1, Q_W, K_W, V_W, O_W, NORM2, GATE_W, UP_W, DOWN_W };

spw_value *
spw_llama_layer_forward(const spw_call *call, spw_value *x)
{
    spw_tape *t = call->tape;
    spw_value *const *p = call->params;
    const spw_model_config *c = &call->model->config;
    uint64_t T = call->batch->positions;
    spw_attention_shape shape = {.B = call->batch->sequences,
                                 .T = T,
                                 .Hq = c->heads,
                                 .Hk = c->kv_heads,
                                 .D = c->head_dim,
                                 .scale = 1.0f / sqrtf((float)c->head_dim)};
    spw_value *h = spw_nn_rmsnorm(t, x, p[NORM1], c->norm_eps);
    spw_value *q = spw_nn_rope(t, spw_nn_linear(t, h, p[Q_W], NULL, 0), call->cos_sin, T, c->heads, c->head_dim);
    spw_value *k = spw_nn_rope(t, spw_nn_linear(t, h, p[K_W], NULL, 0), call->cos_sin, T, c->kv_heads, c->head_dim);
    spw_value *v = spw_nn_linear(t, h, p[V_W], NULL, 0);
    h = spw_nn_attention(t, q, 0, k, 0, v, 0, &shape);
    x = spw_nn_add(t, x, spw_nn_linear(t, h, p[O_W], NULL, 0));
    h = spw_nn_rmsnorm(t, x, p[NORM2], c->norm_eps);
    {
        spw_value *gate = spw_nn_linear(t, h, p[GATE_W], NULL, 0);
        spw_value *up = spw_nn_linear(t, h, p[UP_W], NULL, 0);
        h = spw_nn_silu_mul(t, gate, up);
    }
    return spw_nn_add(t, x, spw_nn_linear(t, h, p[DOWN_W], NULL, 0));
}

spw_value *
spw_llama_head_forward(const spw_call *call, spw_value *x)
{
    x = spw_nn_rmsnorm(call->tape, x, call->params[0], call->model->config.norm_eps);
    return spw__nn_head(call, x, call->params[1]);
}

void
spw__nn_build_llama(spw_model *m)
{
    const spw_model_config *c = &m->config;
    uint64_t H = c->width, I = c->mlp_width, Q = c->heads * c->head_dim, KV = c->kv_heads * c->head_dim;
    float std = c->init_std;
    spw_block *b = spw_model_add_block(m, "embed", spw_llama_embed_forward);
    spw__nn_own(m, b, "model.", "embed_tokens.weight", c->vocab, H, 2, SPW_INIT_NORMAL, std);
    for (uint32_t l = 0; l < c->layers; l++) {
        char h[40];
        snprintf(h, sizeof h, "layers.%u", l);
        b = spw_model_add_block(m, h, spw_llama_layer_forward);
        b->layer_idx = l;
        snprintf(h, sizeof h, "model.layers.%u.", l);
        spw__nn_own(m, b, h, "input_layernorm.weight", 1, H, 1, SPW_INIT_ONES, 0);
        spw__nn_own(m, b, h, "self_attn.q_proj.weight", Q, H, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "self_attn.k_proj.weight", KV, H, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "self_attn.v_proj.weight", KV, H, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "self_attn.o_proj.weight", H, Q, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "post_attention_layernorm.weight", 1, H, 1, SPW_INIT_ONES, 0);
        spw__nn_own(m, b, h, "mlp.gate_proj.weight", I, H, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "mlp.up_proj.weight", I, H, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "mlp.down_proj.weight", H, I, 2, SPW_INIT_NORMAL, std);
    }
    b = spw_model_add_block(m, "head", spw_llama_head_forward);
    spw__nn_own(m, b, "model.", "norm.weight", 1, H, 1, SPW_INIT_ONES, 0);
    if (c->tied)
        spw_block_use(m, b, m->blocks[0].param_ids[0]);
    else
        spw__nn_own(m, b, "", "lm_head.weight", c->vocab, H, 2, SPW_INIT_NORMAL, std);
}
