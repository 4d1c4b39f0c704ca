/*
 * The parameters of Llama and its relatives: which a block has, what files call them, in the order in which the forward pass (llama.c) takes them.
 */
#include "nn_internal.h"
#include <stdio.h>

/* "<name>.weight" (rows, cols) and, with bias, "<name>.bias" (rows). */
static void
own_linear(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols, bool bias)
{
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    spw__nn_own(m, b, prefix, full, rows, cols, 2, SPW_INIT_NORMAL, (float)m->config.init_std);
    snprintf(full, sizeof full, "%s.bias", name);
    if (bias)
        spw__nn_own(m, b, prefix, full, 1, rows, 1, SPW_INIT_ZEROS, 0);
}

static void
own_norm(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t cols)
{
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    spw__nn_own(m, b, prefix, full, 1, cols, 1, m->config.norms_from_one ? SPW_INIT_ZEROS : SPW_INIT_ONES, 0);
    snprintf(full, sizeof full, "%s.bias", name);
    if (m->config.layer_norm && !m->config.norm_unbiased)
        spw__nn_own(m, b, prefix, full, 1, cols, 1, SPW_INIT_ZEROS, 0);
}

/* A matrix (rows, cols), or with ndim 1 a vector, of each expert, which files have in one tensor. */
static void
own_each(spw_model *m, spw_block *b, const char *prefix, const char *name, uint64_t rows, uint64_t cols, uint32_t ndim)
{
    char full[64];
    for (uint32_t e = 0; e < m->config.experts; e++) {
        snprintf(full, sizeof full, "%s.%u", name, e);
        spw__nn_own(m, b, prefix, full, rows, cols, ndim, ndim == 1 ? SPW_INIT_ZEROS : SPW_INIT_NORMAL,
                    ndim == 1 ? 0 : (float)m->config.init_std);
        m->params[m->param_count - 1].expert = e + 1;
        m->params[m->param_count - 1].stack = (uint32_t)m->config.experts;
    }
}

/* What files call the parts of a mixture. */
typedef struct mixture_names {
    const char *mlp, *router, *bias, *shared;
    const char *gate, *up, *down; /* of an expert */
    bool alike;                   /* of an MLP for all rows too, which else has Llama's names */
} mixture_names;

static mixture_names
names_of(const spw_model_config *c)
{
    mixture_names n = {"mlp",
                       c->experts_paired ? "router" : "gate",
                       "gate.e_score_correction_bias",
                       c->shared_gated ? "shared_expert" : "shared_experts",
                       "gate_proj",
                       "up_proj",
                       "down_proj",
                       false};
    switch (c->family) {
    case SPW_FAMILY_MIXTRAL:
    case SPW_FAMILY_MINIMAX_M2:
        n = (mixture_names){"block_sparse_moe", "gate", "e_score_correction_bias", NULL, "w1", "w3", "w2", false};
        break;
    case SPW_FAMILY_KIMI_LINEAR:
        n.mlp = "block_sparse_moe";
        n.gate = "w1"; /* of an expert: the one of all rows, and MLPs of layers without, have Llama's names */
        n.up = "w3";
        n.down = "w2";
        break;
    case SPW_FAMILY_EXAONE_MOE: n.bias = "e_score_correction_bias"; break;
    case SPW_FAMILY_ERNIE_MOE: n.bias = "moe_statics.e_score_correction_bias"; break;
    case SPW_FAMILY_HY_V3:
        n.router = "router.gate";
        n.bias = "expert_bias";
        n.shared = "shared_mlp";
        break;
    case SPW_FAMILY_AFMOE:
        n.router = "router.gate";
        n.bias = "expert_bias";
        break;
    case SPW_FAMILY_HUNYUAN_MOE:
        n.router = "gate.wg";
        n.shared = "shared_mlp";
        break;
    case SPW_FAMILY_GRANITE_HYBRID:
        n.mlp = "block_sparse_moe";
        n.router = "router.layer";
        break;
    case SPW_FAMILY_NEMOTRON_H: n.mlp = "mixer"; break;
    case SPW_FAMILY_DEEPSEEK_V4:
        n.gate = "w1"; /* of each expert in files, which have the others' by names of their own */
        n.up = "w3";
        n.down = "w2";
        break;
    case SPW_FAMILY_BAMBA:
    case SPW_FAMILY_FALCON_H1: n.mlp = "feed_forward"; break;
    case SPW_FAMILY_LFM2:
    case SPW_FAMILY_LFM2_MOE:
        n = (mixture_names){"feed_forward", "gate", "expert_bias", NULL, "w1", "w3", "w2", true};
        break;
    case SPW_FAMILY_LLAMA4:
        n.mlp = "feed_forward";
        n.router = "router";
        n.shared = "shared_expert";
        break;
    default: break;
    }
    return n;
}

static void
own_router(spw_model *m, spw_block *b, const char *prefix, const mixture_names *names)
{
    const spw_model_config *c = &m->config;
    const bool hashed = spw_model_is_hashed(c, b->layer_idx);
    char name[48];
    spw_param *p;
    snprintf(name, sizeof name, "%s.%s", names->mlp, names->router);
    own_linear(m, b, prefix, name, c->experts, c->width, c->experts_paired);
    if ((!c->sigmoid || c->experts_weighed) && !c->softmax_biased)
        return;
    snprintf(name, sizeof name, "%s.%s", names->mlp, hashed ? "gate.tid2eid" : names->bias);
    spw__nn_own(m, b, prefix, name, 1, SPW_TERMS * (hashed ? c->vocab * c->choices : c->experts), 1,
                hashed ? SPW_INIT_IN_TURN : SPW_INIT_ZEROS, 0);
    p = &m->params[m->param_count - 1];
    p->in_terms = p->frozen = true;
    p->whole = hashed;
    p->row_cols = hashed ? c->choices : 0;
    p->below = hashed ? c->experts : 0;
    p->in_row = c->family == SPW_FAMILY_ERNIE_MOE;
}

/* One MLP for all rows, "<mlp>.gate_proj" and so on, or without that. */
static void
own_gated(spw_model *m, spw_block *b, const char *prefix, const char *mlp, uint64_t width, bool bias)
{
    const spw_model_config *c = &m->config;
    const mixture_names parts = names_of(c);
    const char *const names[3] = {parts.alike ? parts.gate : "gate_proj", parts.alike ? parts.up : "up_proj",
                                  parts.alike ? parts.down : "down_proj"};
    char name[48];
    for (int k = c->ungated ? 1 : 0; k < 3; k++) {
        snprintf(name, sizeof name, "%s.%s", mlp, names[k]);
        own_linear(m, b, prefix, name, k < 2 ? width : c->width, k < 2 ? c->width : width, bias);
    }
}

/* The same with gate and up in one. */
static void
own_packed(spw_model *m, spw_block *b, const char *prefix, uint64_t width)
{
    const spw_model_config *c = &m->config;
    own_linear(m, b, prefix, spw__nn_names(c->family)->up, 2 * width, c->width, c->mlp_bias);
    own_linear(m, b, prefix, spw__nn_names(c->family)->down, c->width, width, c->mlp_bias);
}

static void
own_experts(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    const mixture_names names = names_of(c);
    const char *const parts[3] = {names.gate, names.up, names.down};
    char name[48];
    if (c->latent_width > 0)
        own_linear(m, b, prefix, "mixer.fc1_latent_proj", c->latent_width, c->width, c->mlp_bias);
    own_router(m, b, prefix, &names);
    if (c->experts_paired) {
        own_each(m, b, prefix, "mlp.experts.gate_up_proj", c->width, 2 * c->mlp_width, 2);
        own_each(m, b, prefix, "mlp.experts.gate_up_proj_bias", 1, 2 * c->mlp_width, 1);
        own_each(m, b, prefix, "mlp.experts.down_proj", c->mlp_width, c->width, 2);
        own_each(m, b, prefix, "mlp.experts.down_proj_bias", 1, c->width, 1);
        return;
    }
    if (c->experts_weighed) {
        own_each(m, b, prefix, "feed_forward.experts.gate_up_proj", c->width, 2 * c->mlp_width, 2);
        own_each(m, b, prefix, "feed_forward.experts.down_proj", c->mlp_width, c->width, 2);
    }
    if (c->experts_packed) {
        own_each(m, b, prefix, "mlp.experts.gate_up_proj", 2 * c->mlp_width, c->width, 2);
        own_each(m, b, prefix, "mlp.experts.down_proj", c->width, c->mlp_width, 2);
    }
    if (c->gate_packed) {
        own_each(m, b, prefix, "block_sparse_moe.input_linear.weight", 2 * c->mlp_width, c->width, 2);
        own_each(m, b, prefix, "block_sparse_moe.output_linear.weight", c->width, c->mlp_width, 2);
        own_packed(m, b, prefix, c->shared_width);
        return;
    }
    for (int k = c->ungated ? 1 : 0; k < 3 && !c->experts_weighed && !c->experts_packed; k++) {
        uint64_t wide = spw_model_expert_cols(c);
        uint64_t rows = k < 2 ? c->mlp_width : wide, cols = k < 2 ? wide : c->mlp_width;
        for (uint64_t e = 0; e < c->experts; e++) {
            snprintf(name, sizeof name, "%s.experts.%u.%s", names.mlp, (unsigned)e, parts[k]);
            own_linear(m, b, prefix, name, rows, cols, false);
            m->params[m->param_count - 1].expert = (uint32_t)e + 1;
        }
    }
    if (c->latent_width > 0)
        own_linear(m, b, prefix, "mixer.fc2_latent_proj", c->width, c->latent_width, c->mlp_bias);
    if (c->shared_width > 0) {
        snprintf(name, sizeof name, "%s.%s", names.mlp, names.shared);
        own_gated(m, b, prefix, name, c->shared_width, c->mlp_bias);
    }
    if (c->shared_width > 0 && c->shared_gated)
        own_linear(m, b, prefix, "mlp.shared_expert_gate", 1, c->width, false);
}

/* The MLP of all rows and, between norms of each, experts beside it. */
static void
own_experts_beside(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    own_gated(m, b, prefix, "mlp", c->dense_width, c->mlp_bias);
    own_norm(m, b, prefix, "post_feedforward_layernorm_1", c->width);
    spw__nn_own(m, b, prefix, "router.scale", 1, c->width, 1, SPW_INIT_ONES, 0);
    own_linear(m, b, prefix, "router.proj", c->experts, c->width, false);
    own_norm(m, b, prefix, "pre_feedforward_layernorm_2", c->width);
    spw__nn_own(m, b, prefix, "router.per_expert_scale", 1, c->experts, 1, SPW_INIT_ONES, 0);
    own_each(m, b, prefix, "experts.gate_up_proj", 2 * c->mlp_width, c->width, 2);
    own_each(m, b, prefix, "experts.down_proj", c->width, c->mlp_width, 2);
    own_norm(m, b, prefix, "post_feedforward_layernorm_2", c->width);
}

static void
own_mlp(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    const spw__names *names = spw__nn_names(c->family);
    if (c->experts_beside) {
        own_experts_beside(m, b, prefix);
    } else if (spw_model_experts(c, b->layer_idx) > 0) {
        own_experts(m, b, prefix);
    } else if (c->ungated) {
        own_linear(m, b, prefix, names->up, spw_model_dense_width(c, b->layer_idx), c->width, c->mlp_bias);
        own_linear(m, b, prefix, names->down, c->width, spw_model_dense_width(c, b->layer_idx), c->mlp_bias);
    } else if (c->gate_packed) {
        own_packed(m, b, prefix, c->mlp_width);
    } else {
        own_gated(m, b, prefix, c->family == SPW_FAMILY_KIMI_LINEAR ? "mlp" : names_of(c).mlp,
                  spw_model_dense_width(c, b->layer_idx), c->mlp_bias);
    }
}

static void
own_latent(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    uint64_t H = c->width, Q = c->heads * c->head_dim, own = c->head_dim - c->rope_dim + spw_model_value_dim(c, 0);
    if (c->q_rank > 0) {
        own_linear(m, b, prefix, "self_attn.q_a_proj", c->q_rank, H, c->qkv_bias);
        own_norm(m, b, prefix, "self_attn.q_a_layernorm", c->q_rank);
        own_linear(m, b, prefix, "self_attn.q_b_proj", Q, c->q_rank, false);
    } else {
        own_linear(m, b, prefix, "self_attn.q_proj", Q, H, false);
    }
    own_linear(m, b, prefix, "self_attn.kv_a_proj_with_mqa", c->kv_rank + c->rope_dim, H, c->qkv_bias);
    own_norm(m, b, prefix, "self_attn.kv_a_layernorm", c->kv_rank);
    own_linear(m, b, prefix, "self_attn.kv_b_proj", c->heads * own, c->kv_rank, false);
    if (spw_model_has_indexer(c, b->layer_idx))
        spw__nn_own_indexer(m, b, prefix);
}

static void
own_qkv(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    const spw__names *names = spw__nn_names(c->family);
    uint64_t l = b->layer_idx, D = spw_model_head_dim(c, l), KV = spw_model_kv_heads(c, l) * D;
    uint64_t H = c->width, Q = c->heads * D;
    if (c->kv_rank > 0) {
        own_latent(m, b, prefix);
        return;
    }
    if (c->packed) {
        own_linear(m, b, prefix, names->qkv, Q + 2 * KV, H, c->qkv_bias);
        return;
    }
    own_linear(m, b, prefix, names->q, c->attention_gated && !c->gate_apart ? 2 * Q : Q, H, c->qkv_bias);
    if (c->qk_norm)
        own_norm(m, b, prefix, c->qk_norm_last ? "self_attn.query_layernorm" : names->q_norm, c->qk_norm_whole ? Q : D);
    if (spw_model_keys_of(c, l) != l)
        return;
    own_linear(m, b, prefix, names->k, KV, H, c->qkv_bias);
    if (c->qk_norm)
        own_norm(m, b, prefix, c->qk_norm_last ? "self_attn.key_layernorm" : names->k_norm, c->qk_norm_whole ? KV : D);
    if (!c->values_of_keys || spw_model_window(c, l) > 0)
        own_linear(m, b, prefix, names->v, spw_model_kv_heads(c, l) * spw_model_value_dim(c, l), H, c->qkv_bias);
    if (c->gate_apart)
        own_linear(m, b, prefix, "self_attn.gate_proj", Q, H, false);
    if (spw_model_has_sinks(c, l))
        spw__nn_own(m, b, prefix, c->sinks_windowed ? "self_attn.attention_sink_bias" : "self_attn.sinks", 1, c->heads,
                    1, SPW_INIT_NORMAL, (float)c->init_std);
}

static void
own_attention(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    if (spw_model_is_linear(c, b->layer_idx)) {
        spw__nn_own_linear_attention(m, b, prefix);
        return;
    }
    own_qkv(m, b, prefix);
    if (c->linear_beside)
        spw__nn_own_linear_attention(m, b, prefix);
    own_linear(m, b, prefix, spw__nn_names(c->family)->out, c->width, c->heads * spw_model_value_dim(c, b->layer_idx),
               c->out_bias);
}

/* What the first layer makes all layers' embeddings with. */
static void
own_first(spw_model *m, spw_block *b)
{
    const spw_model_config *c = &m->config;
    own_linear(m, b, "model.", "per_layer_model_projection", c->layers * c->inputs_dim, c->width, false);
    own_norm(m, b, "model.", "per_layer_projection_norm", c->inputs_dim);
}

static void
own_inputs_gate(spw_model *m, spw_block *b, const char *prefix)
{
    const spw_model_config *c = &m->config;
    own_linear(m, b, prefix, "per_layer_input_gate", c->inputs_dim, c->width, false);
    own_linear(m, b, prefix, "per_layer_projection", c->width, c->inputs_dim, false);
    own_norm(m, b, prefix, "post_per_layer_input_norm", c->width);
}

/* One element that is frozen, 1 at first, and fp32 in any format. */
static void
own_number(spw_model *m, spw_block *b, const char *prefix, const char *name)
{
    spw_param *p;
    spw__nn_own(m, b, prefix, name, 1, SPW_TERMS, 1, SPW_INIT_ONES, 0);
    p = &m->params[m->param_count - 1];
    p->in_terms = p->frozen = true;
}

void
spw__nn_build_llama(spw_model *m)
{
    const spw_model_config *c = &m->config;
    const spw__names *names = spw__nn_names(c->family);
    uint64_t H = c->width;
    char own[48];
    bool glm = c->family == SPW_FAMILY_GLM4, afmoe = c->family == SPW_FAMILY_AFMOE;
    float std = (float)c->init_std;
    spw_block *b = spw_model_add_block(m, "embed", spw_llama_embed_forward);
    snprintf(own, sizeof own, "%s.weight", names->embedding);
    spw__nn_own(m, b, names->base, own, c->vocab, H, 2, SPW_INIT_NORMAL, std);
    if (c->learned_places)
        spw__nn_own(m, b, names->base, "embed_positions.weight", c->places_before + c->positions, H, 2, SPW_INIT_NORMAL,
                    std);
    if (c->inputs_dim > 0)
        spw__nn_own(m, b, names->base, "embed_tokens_per_layer.weight", c->inputs_vocab, c->layers * c->inputs_dim, 2,
                    SPW_INIT_NORMAL, std);
    for (uint32_t l = 0; l < c->layers; l++) {
        char h[40];
        snprintf(h, sizeof h, "layers.%u", l);
        const spw_norms norms = spw_model_norms(c, l);
        const bool before = norms != SPW_NORMS_AFTER, after = norms != SPW_NORMS_BEFORE;
        const bool apart = names->linear_halves[0] != NULL && spw_model_is_linear(c, l);
        b = spw_model_add_block(m, h, spw_llama_layer_forward);
        b->layer_idx = l;
        if (l == 0 && c->inputs_dim > 0)
            own_first(m, b);
        snprintf(h, sizeof h, "%slayers.%u.", names->base, l);
        if (c->streams > 0) {
            spw__nn_own_streams_layer(m, b, h, own_experts);
            continue;
        }
        if (before)
            own_norm(m, b, h, apart ? names->linear_halves[0] : names->norm, H);
        if (spw_model_attends(c, l))
            own_attention(m, b, h);
        if (glm)
            own_norm(m, b, h, "post_self_attn_layernorm", H);
        if ((!c->parallel || c->parallel_norm) && !c->halves_apart)
            own_norm(m, b, h, apart ? names->linear_halves[1] : names->mlp_norm,
                     H); /* of what the MLP reads where no norm is after attention */
        if (before && after && !glm)
            own_norm(m, b, h, afmoe ? "pre_mlp_layernorm" : "pre_feedforward_layernorm", H);
        if (spw_model_has_mlp(c, l))
            own_mlp(m, b, h);
        if (after)
            own_norm(m, b, h, glm || afmoe ? "post_mlp_layernorm" : "post_feedforward_layernorm", H);
        if (c->inputs_dim > 0)
            own_inputs_gate(m, b, h);
        if (c->layer_scaled)
            own_number(m, b, h, "layer_scalar");
    }
    b = spw_model_add_block(m, "head", spw_llama_head_forward);
    if (c->streams > 0)
        spw__nn_own_streams_head(m, b);
    own_norm(m, b, names->base, names->last_norm, H);
    if (c->tied)
        spw_block_use(m, b, m->blocks[0].param_ids[0]);
    else
        own_linear(m, b, "", names->head, c->vocab, H, false);
}
