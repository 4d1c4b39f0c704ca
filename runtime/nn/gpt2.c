/*
 * GPT-2: learned positions, LayerNorm before each half of a block, packed qkv, GELU, tied head. Linear weights are
 * stored (in, out) as the Hugging Face files have them. Source: Radford et al. 2019.
 */
#include "nn_internal.h"
#include <math.h>
#include <stdio.h>

spw_value *
spw__nn_head(const spw_call *call, spw_value *x, spw_value *w)
{
    float cap = (float)call->model->config.logit_cap;
    if (call->logits_out != NULL) {
        spw_value *y = spw_nn_linear(call->tape, x, w, NULL, 0);
        return cap > 0 ? spw_nn_soft_cap(call->tape, y, cap) : y;
    }
    return spw_nn_head_loss(call->tape, x, w, call->batch, cap);
}

spw_value *
spw_gpt2_embed_forward(const spw_call *call, spw_value *x)
{
    const spw_batch *b = call->batch;
    (void)x;
    x = spw_nn_embedding(call->tape, b->tokens, b->sequences * b->positions, call->params[0]);
    x = spw_nn_embedding_add(call->tape, x, b->places, call->params[1], 0);
    return call->training ? spw_nn_dropout(call->tape, x, call->model->config.dropout, b, 0) : x;
}

spw_value *
spw__nn_add_half(const spw_call *call, spw_value *onto, spw_value *x, uint32_t w, spw_value *bias, unsigned flags,
                 uint64_t site, bool ends)
{
    float p = call->training ? (float)call->model->config.dropout : 0.0f;
    if (p == 0 && ends)
        spw_nn_into(call->tape, 0);
    x = spw__nn_adapted(call, p == 0 ? onto : NULL, x, w, bias, flags);
    if (p == 0)
        return x;
    x = spw_nn_dropout(call->tape, x, p, call->batch, site);
    if (ends)
        spw_nn_into(call->tape, 0);
    return spw_nn_add(call->tape, onto, x);
}

enum { LN1_W, LN1_B, QKV_W, QKV_B, PROJ_W, PROJ_B, LN2_W, LN2_B, FC_W, FC_B, OUT_W, OUT_B };

static void
before_attention(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_value *const *p = call->params;
    spw_value *h = spw_nn_layernorm(call->tape, in[0], p[LN1_W], p[LN1_B], call->model->config.norm_eps);
    (void)at; /* parameters have names here */
    spw_nn_into(call->tape, 0);
    out[0] = spw__nn_adapted(call, NULL, h, QKV_W, p[QKV_B], SPW_OP_W_IN_OUT);
}

/* Of the block's input and what attention gives. */
static void
after_attention(const spw_call *call, uint32_t *at, spw_value *const *in, spw_value **out)
{
    spw_tape *t = call->tape;
    spw_value *const *p = call->params;
    uint64_t site = 1 + 2 * (uint64_t)call->block->layer_idx;
    spw_value *x = spw__nn_add_half(call, in[0], in[1], PROJ_W, p[PROJ_B], SPW_OP_W_IN_OUT, site, false);
    spw_value *h = spw_nn_layernorm(t, x, p[LN2_W], p[LN2_B], call->model->config.norm_eps);
    (void)at;
    if (call->block->adapter_at[FC_W] == 0)
        h = spw_nn_linear_gelu(t, h, p[FC_W], p[FC_B], SPW_OP_W_IN_OUT);
    else
        h = spw_nn_curve(t, SPW_CURVE_GELU, spw__nn_adapted(call, NULL, h, FC_W, p[FC_B], SPW_OP_W_IN_OUT));
    out[0] = spw__nn_add_half(call, x, h, OUT_W, p[OUT_B], SPW_OP_W_IN_OUT, site + 1, true);
}

spw_value *
spw_gpt2_layer_forward(const spw_call *call, spw_value *x)
{
    const spw_model_config *c = &call->model->config;
    spw_attention_shape shape = {.B = call->batch->sequences,
                                 .T = call->batch->positions,
                                 .Hq = c->heads,
                                 .Hk = c->heads,
                                 .D = c->head_dim,
                                 .scale = 1.0f / sqrtf((float)c->head_dim),
                                 .begins = call->batch->begins,
                                 .ends = call->batch->ends};
    spw_value *qkv, *h, *y;
    uint32_t at = 0;
    spw_nn_rows(call, &at, before_attention, (spw_value *[]){x}, 1, &qkv, 1);
    h = spw_nn_attention(call->tape, qkv, 0, qkv, c->width, qkv, 2 * c->width, NULL, &shape);
    spw_nn_rows(call, &at, after_attention, (spw_value *[]){x, h}, 2, &y, 1);
    return y;
}

spw_value *
spw_gpt2_head_forward(const spw_call *call, spw_value *x)
{
    x = spw_nn_layernorm(call->tape, x, call->params[0], call->params[1], call->model->config.norm_eps);
    return spw__nn_head(call, x, call->params[2]);
}

void
spw__nn_build_gpt2(spw_model *m)
{
    const spw_model_config *c = &m->config;
    uint64_t C = c->width, I = c->mlp_width;
    float std = (float)c->init_std, out_std = std / sqrtf(2.0f * (float)c->layers);
    spw_block *b = spw_model_add_block(m, "embed", spw_gpt2_embed_forward);
    spw__nn_own(m, b, "", "wte.weight", c->vocab, C, 2, SPW_INIT_NORMAL, std);
    spw__nn_own(m, b, "", "wpe.weight", c->positions, C, 2, SPW_INIT_NORMAL, std);
    for (uint32_t l = 0; l < c->layers; l++) {
        char h[32];
        snprintf(h, sizeof h, "h.%u", l);
        b = spw_model_add_block(m, h, spw_gpt2_layer_forward);
        b->layer_idx = l;
        snprintf(h, sizeof h, "h.%u.", l);
        spw__nn_own(m, b, h, "ln_1.weight", 1, C, 1, SPW_INIT_ONES, 0);
        spw__nn_own(m, b, h, "ln_1.bias", 1, C, 1, SPW_INIT_ZEROS, 0);
        spw__nn_own(m, b, h, "attn.c_attn.weight", C, 3 * C, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "attn.c_attn.bias", 1, 3 * C, 1, SPW_INIT_ZEROS, 0);
        spw__nn_own(m, b, h, "attn.c_proj.weight", C, C, 2, SPW_INIT_NORMAL, out_std);
        spw__nn_own(m, b, h, "attn.c_proj.bias", 1, C, 1, SPW_INIT_ZEROS, 0);
        spw__nn_own(m, b, h, "ln_2.weight", 1, C, 1, SPW_INIT_ONES, 0);
        spw__nn_own(m, b, h, "ln_2.bias", 1, C, 1, SPW_INIT_ZEROS, 0);
        spw__nn_own(m, b, h, "mlp.c_fc.weight", C, I, 2, SPW_INIT_NORMAL, std);
        spw__nn_own(m, b, h, "mlp.c_fc.bias", 1, I, 1, SPW_INIT_ZEROS, 0);
        spw__nn_own(m, b, h, "mlp.c_proj.weight", I, C, 2, SPW_INIT_NORMAL, out_std);
        spw__nn_own(m, b, h, "mlp.c_proj.bias", 1, C, 1, SPW_INIT_ZEROS, 0);
    }
    b = spw_model_add_block(m, "head", spw_gpt2_head_forward);
    spw__nn_own(m, b, "", "ln_f.weight", 1, C, 1, SPW_INIT_ONES, 0);
    spw__nn_own(m, b, "", "ln_f.bias", 1, C, 1, SPW_INIT_ZEROS, 0);
    if (c->tied)
        spw_block_use(m, b, m->blocks[0].param_ids[0]);
    else
        spw__nn_own(m, b, "", "lm_head.weight", c->vocab, C, 2, SPW_INIT_NORMAL, std);
}
