/*
 * What config.json says of Llama and its relatives: what their classes do where a key is missing, and the few keys that one
 * family alone has. Rotary positions, windows and experts have readers of their own (hf_rope.c, hf_window.c, hf_experts.c).
 * Source: the configuration classes of several releases of transformers.
 */
#include "hf_source.h"

/* ---------------------------------------------------------------- what sets the families apart */

/* A model's class where a key is missing, and which keys it looks at. */
static const struct class
{
    uint8_t kv_heads;  /* 0: as many as heads */
    uint16_t head_dim; /* 0: the width over the heads */
    double norm_eps;
    spw_norms norms;
    bool bias;       /* what attention_bias is: that of queries, keys and values */
    bool fixed_bias; /* attention_bias may say nothing else */
    bool out_bias;   /* attention_bias stands for the output's, too */
    bool qkv_bias;   /* they have one whatever attention_bias says */
    bool mlp_bias;   /* there is such a key */
    bool qk_norm, qk_norm_whole, packed, gate_packed;
    bool tied; /* the head is the embeddings */
} classes[SPW_FAMILY_CUSTOM] = {
    [SPW_FAMILY_LLAMA] = {0, 0, 1e-6, .out_bias = true, .mlp_bias = true},
    [SPW_FAMILY_MISTRAL] = {8, 0, 1e-6, .fixed_bias = true},
    [SPW_FAMILY_QWEN2] = {32, 0, 1e-6, .fixed_bias = true, .qkv_bias = true},
    [SPW_FAMILY_QWEN3] = {32, 128, 1e-6, .out_bias = true, .qk_norm = true},
    [SPW_FAMILY_MIXTRAL] = {8, 0, 1e-5, .fixed_bias = true},
    [SPW_FAMILY_QWEN3_MOE] = {4, 0, 1e-6, .out_bias = true, .qk_norm = true},
    [SPW_FAMILY_PHI3] = {0, 0, 1e-5, .fixed_bias = true, .packed = true, .gate_packed = true},
    [SPW_FAMILY_SMOLLM3] = {4, 0, 1e-6, .out_bias = true, .mlp_bias = true, .tied = true},
    [SPW_FAMILY_QWEN2_MOE] = {16, 0, 1e-6, .fixed_bias = true, .qkv_bias = true},
    [SPW_FAMILY_OLMO2] = {0, 0, 1e-5, SPW_NORMS_AFTER, .out_bias = true, .qk_norm = true, .qk_norm_whole = true},
    [SPW_FAMILY_GEMMA3] = {4, 256, 1e-6, .out_bias = true, .qk_norm = true, .tied = true},
    [SPW_FAMILY_GEMMA2] = {4, 256, 1e-6, .out_bias = true, .tied = true},
    [SPW_FAMILY_GPT_OSS] = {8, 64, 1e-5, .bias = true, .out_bias = true},
    [SPW_FAMILY_GLM4_MOE] = {8, 0, 1e-5},
    [SPW_FAMILY_DEEPSEEK_V2] = {0, 0, 1e-6, .out_bias = true},
    [SPW_FAMILY_DEEPSEEK_V3] = {0, 0, 1e-6, .out_bias = true},
    [SPW_FAMILY_GLM4_LITE] = {0, 0, 1e-5, .out_bias = true},
    [SPW_FAMILY_DEEPSEEK_V32] = {0, 0, 1e-6, .out_bias = true},
    [SPW_FAMILY_GLM_DSA] = {0, 0, 1e-5, .out_bias = true},
    [SPW_FAMILY_MINIMAX_M2] = {8, 128, 1e-6, .fixed_bias = true, .qk_norm = true, .qk_norm_whole = true},
    [SPW_FAMILY_OLMO3] = {0, 0, 1e-5, SPW_NORMS_AFTER, .out_bias = true, .qk_norm = true, .qk_norm_whole = true},
    [SPW_FAMILY_GEMMA] = {16, 256, 1e-6, .out_bias = true, .tied = true},
    [SPW_FAMILY_GRANITE] = {0, 0, 1e-6, .out_bias = true, .mlp_bias = true},
    [SPW_FAMILY_GRANITE_HYBRID] = {0, 0, 1e-6, .out_bias = true, .gate_packed = true},
    [SPW_FAMILY_OLMOE] = {0, 0, 1e-5, .out_bias = true, .qk_norm = true, .qk_norm_whole = true},
    [SPW_FAMILY_SEED_OSS] = {8, 128, 1e-6, .bias = true, .mlp_bias = true},
    [SPW_FAMILY_GLM] = {2, 128, 1.5625e-7, .bias = true, .gate_packed = true},
    [SPW_FAMILY_GLM4] = {2, 128, 1.5625e-7, SPW_NORMS_BOTH, .bias = true, .gate_packed = true},
    [SPW_FAMILY_ERNIE] = {2, 128, 1e-5, .out_bias = true, .tied = true},
    [SPW_FAMILY_ERNIE_MOE] = {4, 0, 1e-5, .fixed_bias = true, .tied = true}, /* else its head has one, too */
    [SPW_FAMILY_EXAONE4] = {32, 0, 1e-5, SPW_NORMS_AFTER, .fixed_bias = true, .qk_norm = true},
    [SPW_FAMILY_EXAONE_MOE] = {32, 0, 1e-5, .fixed_bias = true, .qk_norm = true},
    [SPW_FAMILY_MINISTRAL3] = {8, 128, 1e-5, .fixed_bias = true},
    [SPW_FAMILY_QWEN3_5] = {4, 256, 1e-6, .fixed_bias = true, .qk_norm = true},
    [SPW_FAMILY_QWEN3_5_MOE] = {2, 256, 1e-6, .fixed_bias = true, .qk_norm = true},
    [SPW_FAMILY_QWEN3_NEXT] = {2, 256, 1e-6, .fixed_bias = true, .qk_norm = true},
    [SPW_FAMILY_GEMMA4] = {4, 256, 1e-6, .out_bias = true, .tied = true},
    [SPW_FAMILY_DOTS1] = {32, 0, 1e-6, .out_bias = true, .qk_norm = true},
    [SPW_FAMILY_HUNYUAN] = {0, 0, 1e-5, .out_bias = true, .qk_norm = true},
    [SPW_FAMILY_HUNYUAN_MOE] = {0, 0, 1e-5, .out_bias = true, .qk_norm = true},
    [SPW_FAMILY_HY_V3] = {8, 128, 1e-5, .out_bias = true, .mlp_bias = true, .qk_norm = true},
    [SPW_FAMILY_LLAMA4] = {8, 128, 1e-5, .out_bias = true},
    [SPW_FAMILY_SOLAR_OPEN] = {8, 128, 1e-5},
    [SPW_FAMILY_MISTRAL4] = {0, 0, 1e-6, .out_bias = true},
    [SPW_FAMILY_MIMO_V2] = {4, 192, 1e-5},
    [SPW_FAMILY_BAMBA] = {8, 0, 1e-5, .out_bias = true, .mlp_bias = true},
    [SPW_FAMILY_LFM2] = {8, 0, 1e-5, .fixed_bias = true, .qk_norm = true, .tied = true},
    [SPW_FAMILY_LFM2_MOE] = {8, 0, 1e-5, .fixed_bias = true, .qk_norm = true, .tied = true},
    [SPW_FAMILY_FALCON_H1] = {8, 0, 1e-5, .out_bias = true, .mlp_bias = true},
    [SPW_FAMILY_OLMO_HYBRID] = {0, 0, 1e-6, SPW_NORMS_AFTER, .out_bias = true, .qk_norm = true, .qk_norm_whole = true},
    [SPW_FAMILY_KIMI_LINEAR] = {32, 0, 1e-5, .out_bias = true},
    [SPW_FAMILY_AFMOE] = {0, 128, 1e-5, SPW_NORMS_BOTH, .out_bias = true, .qk_norm = true},
};

/* A cap that is null is none. Gemma 3's class has them too, and what it does with one depends on how it attends. */
spw_status
spw__hf_read_cap(const source *s, const char *key, double otherwise, double *out)
{
    const json_t *v = get(s, key);
    *out = json_object_get(s->object, key) == NULL ? otherwise : 0;
    SPW_TRY(read_real(s, key, out));
    return v == NULL || *out > 0 ? SPW_OK : wrong(s, key, "number above 0, or null", v);
}

static spw_status
read_gemma(const source *s, spw_model_config *c)
{
    static const char *const caps[] = {"attn_logit_softcapping", "final_logit_softcapping"};
    bool capped = c->family == SPW_FAMILY_GEMMA2;
    if (!spw__hf_of(c->family, GEMMAS) || c->family == SPW_FAMILY_GEMMA4)
        return spw__hf_read_gemma4(s, c);
    c->norms_from_one = c->embedding_scaled = true;
    c->gate = SPW_GATE_GELU;
    SPW_TRY(must_be(s, "use_bidirectional_attention", false));
    if (c->family == SPW_FAMILY_GEMMA)
        return SPW_OK;
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        if (!capped && get(s, caps[i]) != NULL)
            return refuse(s, caps[i], get(s, caps[i]));
    }
    if (capped) {
        SPW_TRY(spw__hf_read_cap(s, caps[0], 50, &c->score_cap));
        SPW_TRY(spw__hf_read_cap(s, caps[1], 30, &c->logit_cap));
    }
    c->norms = SPW_NORMS_BOTH;
    c->query_scalar = 256;
    return read_size(s, "query_pre_attn_scalar", 1, &c->query_scalar);
}

/*
 * Granite 4's, which have rope or no places at all, and experts or none, beside whom is one of all rows. What these give is multiplied as a half of
 * a layer is: the weights of the chosen are.
 */
static spw_status
read_granite_hybrid(const source *s, spw_model_config *c)
{
    const json_t *places = get(s, "position_embedding_type");
    uint64_t shared = 1024;
    const char *text = json_string_value(places);
    c->experts = 8; /* the class's defaults */
    c->choices = 2;
    SPW_TRY(read_size(s, "num_local_experts", 0, &c->experts));
    SPW_TRY(read_size(s, "num_experts_per_tok", 0, &c->choices));
    SPW_TRY(read_size(s, "shared_intermediate_size", 1, &shared));
    SPW_TRY(spw__hf_check_router_logits(s));
    if (c->experts > 0) {
        c->shared_width = shared;
        c->sum_to_one = true;
        c->choice_scale = c->half_scale;
    } else {
        c->choices = 0;
        c->mlp_width = shared;
    }
    if (places != NULL && (text == NULL || (strcmp(text, "rope") != 0 && strcmp(text, "nope") != 0)))
        return refuse(s, "position_embedding_type", places);
    if (text == NULL || strcmp(text, "rope") != 0) {
        c->rope_theta = 0;
        c->rope = SPW_ROPE_PLAIN;
    }
    return SPW_OK;
}

/* Factors that are 1 where they are not said, that of scores too. */
static spw_status
read_granite(const source *s, spw_model_config *c)
{
    const struct {
        const char *key;
        double *out;
    } factors[] = {{"embedding_multiplier", &c->embedding_scale},
                   {"residual_multiplier", &c->half_scale},
                   {"attention_multiplier", &c->score_scale},
                   {"logits_scaling", &c->logit_divisor}};
    if (!spw__hf_of(c->family, GRANITE))
        return SPW_OK;
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
        *factors[i].out = 1;
        SPW_TRY(read_real(s, factors[i].key, factors[i].out));
        if (!(*factors[i].out > 0))
            return wrong(s, factors[i].key, "number above 0", get(s, factors[i].key));
    }
    return c->family == SPW_FAMILY_GRANITE_HYBRID ? read_granite_hybrid(s, c) : SPW_OK;
}

/* The gate's numbers are its kernels'. */
static spw_status
read_gpt_oss(const source *s, spw_model_config *c)
{
    double limit = (double)SPW_GATE_LIMIT, alpha = 1.702;
    if (c->family != SPW_FAMILY_GPT_OSS)
        return SPW_OK;
    SPW_TRY(read_real(s, "swiglu_limit", &limit));
    SPW_TRY(read_real(s, "swiglu_alpha", &alpha));
    if ((float)limit != SPW_GATE_LIMIT)
        return refuse(s, "swiglu_limit", get(s, "swiglu_limit"));
    if ((float)alpha != SPW_GATE_ALPHA)
        return refuse(s, "swiglu_alpha", get(s, "swiglu_alpha"));
    c->gate = SPW_GATE_CLAMPED;
    c->experts_paired = c->sinks = true;
    return SPW_OK;
}

/* Norms behind rope, which are what its classes do anyway. */
static spw_status
read_hunyuan(const source *s, spw_model_config *c)
{
    if (!spw__hf_of(c->family, HUNYUAN))
        return SPW_OK;
    c->qk_norm_last = true;
    SPW_TRY(must_be(s, "use_qk_norm", true));
    return must_be(s, "use_cla", false);
}

/* Its class looks at a window, which no file has. */
static spw_status
check_olmoe(const source *s)
{
    static const char *const keys[] = {"clip_qkv", "sliding_window"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (get(s, keys[i]) != NULL)
            return refuse(s, keys[i], get(s, keys[i]));
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- reading */

static spw_status
read_biases(const source *s, const struct class *of, spw_model_config *c)
{
    const char *key = spw__hf_of(c->family, ERNIE) ? "use_bias" : "attention_bias";
    bool bias = of->bias;
    SPW_TRY(of->fixed_bias ? must_be(s, key, bias) : read_bool(s, key, &bias));
    c->qkv_bias = bias || of->qkv_bias;
    if (c->family == SPW_FAMILY_QWEN2_MOE)
        SPW_TRY(read_bool(s, "qkv_bias", &c->qkv_bias));
    c->out_bias = bias && of->out_bias;
    if (c->family == SPW_FAMILY_SEED_OSS)
        SPW_TRY(read_bool(s, "attention_out_bias", &c->out_bias));
    c->mlp_bias = bias && spw__hf_of(c->family, ERNIE);
    return of->mlp_bias ? read_bool(s, "mlp_bias", &c->mlp_bias) : must_be(s, "mlp_bias", c->mlp_bias);
}

static spw_status
read_heads(const source *s, const struct class *of, spw_model_config *c)
{
    SPW_TRY(read_size(s, "num_attention_heads", 1, &c->heads));
    if (json_object_get(s->object, "num_key_value_heads") != NULL) /* null is as many as heads */
        c->kv_heads = 0;
    else if (c->kv_heads == 0)
        c->kv_heads = of->kv_heads;
    c->kv_heads = c->kv_heads > 0 ? c->kv_heads : c->heads;
    SPW_TRY(read_size(s, "num_key_value_heads", 1, &c->kv_heads));
    c->head_dim = of->head_dim > 0 ? of->head_dim : c->heads > 0 ? c->width / c->heads : 0;
    SPW_TRY(read_size(s, "head_dim", 1, &c->head_dim));
    return c->width > 0 && c->heads > c->width && c->head_dim == 0
               ? wrong(s, "num_attention_heads", "no more heads than hidden_size", get(s, "num_attention_heads"))
               : SPW_OK;
}

spw_status
spw__hf_read_llama(const source *s, spw_model_config *c)
{
    const struct class *of = &classes[c->family];
    c->tied = of->tied;
    SPW_TRY(read_size(s, "hidden_size", 1, &c->width));
    SPW_TRY(read_size(s, "num_hidden_layers", 1, &c->layers));
    SPW_TRY(read_size(s, "intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "max_position_embeddings", 1, &c->positions));
    SPW_TRY(read_heads(s, of, c));
    c->norm_eps = c->norm_eps > 0 ? c->norm_eps : of->norm_eps;
    SPW_TRY(read_real(s, spw__hf_of(c->family, LFM) ? "norm_eps" : "rms_norm_eps", &c->norm_eps));
    SPW_TRY(spw__hf_read_latent(s, c));
    SPW_TRY(spw__hf_read_linear(s, c));
    SPW_TRY(spw__hf_read_rope(s, c));
    SPW_TRY(spw__hf_read_indexer(s, c));
    SPW_TRY(spw__hf_read_no_rope(s, c));
    SPW_TRY(spw__hf_read_window(s, c));
    SPW_TRY(spw__hf_read_experts(s, c));
    SPW_TRY(spw__hf_read_llama4(s, c));
    SPW_TRY(spw__hf_read_mimo(s, c));
    SPW_TRY(read_biases(s, of, c));
    c->qk_norm = of->qk_norm;
    if (c->family == SPW_FAMILY_GLM4_MOE)
        SPW_TRY(read_bool(s, "use_qk_norm", &c->qk_norm));
    c->qk_norm_whole = of->qk_norm_whole;
    c->packed = of->packed;
    c->gate_packed = of->gate_packed;
    c->norms = of->norms;
    if (c->family == SPW_FAMILY_OLMOE)
        SPW_TRY(check_olmoe(s));
    SPW_TRY(read_hunyuan(s, c));
    SPW_TRY(read_gpt_oss(s, c));
    SPW_TRY(read_granite(s, c));
    return read_gemma(s, c);
}
