/*
 * Hugging Face's config.json into a model's configuration. The reader takes what the families of this library
 * compute and refuses by name what would make another model of the same weights; no key that changes numbers is ignored.
 * Rotary positions, windows and experts have readers of their own (hf_rope.c, hf_window.c, hf_experts.c).
 * Source: FORMATS S7 (the configuration classes of several releases, older and newer rope keys).
 */
#include "hf_source.h"
#include <errno.h>
#include <strings.h>
#include <unistd.h>

enum { CONFIG_BYTES_MAX = 4 << 20 };

/* ---------------------------------------------------------------- what sets the families apart */

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
    if (!spw__hf_is_gemma(c->family) || c->family == SPW_FAMILY_GEMMA4)
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
    if (c->family != SPW_FAMILY_GRANITE)
        return SPW_OK;
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
        *factors[i].out = 1;
        SPW_TRY(read_real(s, factors[i].key, factors[i].out));
        if (!(*factors[i].out > 0))
            return wrong(s, factors[i].key, "number above 0", get(s, factors[i].key));
    }
    return SPW_OK;
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

static spw_status
read_llama(const source *s, spw_model_config *c)
{
    bool gpt_oss = c->family == SPW_FAMILY_GPT_OSS, seed = c->family == SPW_FAMILY_SEED_OSS;
    bool qwen3 = c->family == SPW_FAMILY_QWEN3 || c->family == SPW_FAMILY_QWEN3_MOE;
    bool olmo = c->family == SPW_FAMILY_OLMO2 || c->family == SPW_FAMILY_OLMO3, gemma = spw__hf_is_gemma(c->family);
    bool biases =
        c->family == SPW_FAMILY_LLAMA || c->family == SPW_FAMILY_SMOLLM3 || c->family == SPW_FAMILY_GRANITE || seed;
    bool olmoe = c->family == SPW_FAMILY_OLMOE;
    bool solar = c->family == SPW_FAMILY_SOLAR_OPEN, glm = c->family == SPW_FAMILY_GLM4_MOE || solar;
    bool dots = c->family == SPW_FAMILY_DOTS1, latent = spw__hf_is_latent(c->family);
    bool minimax = c->family == SPW_FAMILY_MINIMAX_M2, ernie = c->family == SPW_FAMILY_ERNIE;
    bool glm_dense = spw__hf_is_glm_dense(c->family), exaone = c->family == SPW_FAMILY_EXAONE4;
    bool ministral = c->family == SPW_FAMILY_MINISTRAL3;
    bool linear = spw__hf_is_linear(c->family), many = s->axes && c->family == SPW_FAMILY_QWEN3_MOE;
    uint64_t kv_default = c->family == SPW_FAMILY_MISTRAL || c->family == SPW_FAMILY_MIXTRAL || gpt_oss || glm ||
                                  minimax || seed || ministral
                              ? 8
                          : c->family == SPW_FAMILY_GEMMA || many                                                   ? 16
                          : glm_dense || ernie || (linear && c->family != SPW_FAMILY_QWEN3_5)                       ? 2
                          : linear || c->family == SPW_FAMILY_QWEN3_MOE || c->family == SPW_FAMILY_SMOLLM3 || gemma ? 4
                          : s->qwen_vl                                                                              ? 8
                          : c->family == SPW_FAMILY_QWEN2_MOE                                                       ? 16
                          : c->family == SPW_FAMILY_QWEN2 || c->family == SPW_FAMILY_QWEN3 || exaone || dots        ? 32
                                                                                                                    : 0;
    bool coarse = c->family == SPW_FAMILY_MIXTRAL || c->family == SPW_FAMILY_PHI3 || c->family == SPW_FAMILY_GLM4_LITE;
    bool bias = gpt_oss || seed || glm_dense;
    c->norm_eps = glm_dense                                                                                 ? 1.5625e-7
                  : coarse || olmo || olmoe || gpt_oss || glm || ernie || exaone || ministral || s->qwen_vl ? 1e-5
                                                                                                            : 1e-6;
    SPW_TRY(read_size(s, "hidden_size", 1, &c->width));
    SPW_TRY(read_size(s, "num_hidden_layers", 1, &c->layers));
    SPW_TRY(read_size(s, "num_attention_heads", 1, &c->heads));
    SPW_TRY(read_size(s, "intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "max_position_embeddings", 1, &c->positions));
    c->kv_heads = kv_default > 0 && json_object_get(s->object, "num_key_value_heads") == NULL ? kv_default : c->heads;
    SPW_TRY(read_size(s, "num_key_value_heads", 1, &c->kv_heads));
    c->head_dim = gemma || linear                                                                                ? 256
                  : gpt_oss                                                                                      ? 64
                  : c->family == SPW_FAMILY_QWEN3 || minimax || seed || glm_dense || ernie || ministral || solar ? 128
                  : c->heads > 0 ? c->width / c->heads
                                 : 0;
    SPW_TRY(read_size(s, "head_dim", 1, &c->head_dim));
    if (c->width > 0 && c->heads > c->width && c->head_dim == 0)
        return wrong(s, "num_attention_heads", "no more heads than hidden_size",
                     json_object_get(s->object, "num_attention_heads"));
    SPW_TRY(read_real(s, "rms_norm_eps", &c->norm_eps));
    SPW_TRY(spw__hf_read_latent(s, c));
    SPW_TRY(spw__hf_read_linear(s, c));
    SPW_TRY(spw__hf_read_rope(s, c));
    SPW_TRY(spw__hf_read_no_rope(s, c));
    SPW_TRY(spw__hf_read_window(s, c));
    SPW_TRY(spw__hf_read_experts(s, c));
    if (ernie)
        SPW_TRY(read_bool(s, "use_bias", &bias));
    else if (biases || qwen3 || dots || olmo || olmoe || gemma || gpt_oss || glm || latent || glm_dense)
        SPW_TRY(read_bool(s, "attention_bias", &bias));
    else
        SPW_TRY(must_be(s, "attention_bias", false));
    c->qkv_bias = bias || c->family == SPW_FAMILY_QWEN2 || c->family == SPW_FAMILY_QWEN2_MOE;
    if (c->family == SPW_FAMILY_QWEN2_MOE)
        SPW_TRY(read_bool(s, "qkv_bias", &c->qkv_bias));
    c->out_bias = bias && !glm && !seed && !glm_dense;
    if (seed)
        SPW_TRY(read_bool(s, "attention_out_bias", &c->out_bias));
    c->mlp_bias = ernie && bias;
    if (biases)
        SPW_TRY(read_bool(s, "mlp_bias", &c->mlp_bias));
    else
        SPW_TRY(must_be(s, "mlp_bias", c->mlp_bias));
    c->qk_norm = linear || exaone || qwen3 || dots || olmo || olmoe || minimax || c->family == SPW_FAMILY_GEMMA3;
    if (glm && !solar)
        SPW_TRY(read_bool(s, "use_qk_norm", &c->qk_norm));
    c->qk_norm_whole = olmo || olmoe || minimax;
    if (olmoe)
        SPW_TRY(check_olmoe(s));
    c->packed = c->family == SPW_FAMILY_PHI3;
    c->gate_packed = c->packed || glm_dense;
    c->norms = olmo || exaone ? SPW_NORMS_AFTER : c->family == SPW_FAMILY_GLM4 ? SPW_NORMS_BOTH : SPW_NORMS_BEFORE;
    SPW_TRY(read_gpt_oss(s, c));
    SPW_TRY(read_granite(s, c));
    return read_gemma(s, c);
}

static spw_status
read_gpt2(const source *s, spw_model_config *c)
{
    c->norm_eps = 1e-5;
    SPW_TRY(read_size(s, "n_embd", 1, &c->width));
    SPW_TRY(read_size(s, "n_layer", 1, &c->layers));
    SPW_TRY(read_size(s, "n_head", 1, &c->heads));
    SPW_TRY(read_size(s, "n_ctx", 1, &c->positions)); /* the older name */
    SPW_TRY(read_size(s, "n_positions", 1, &c->positions));
    c->kv_heads = c->heads;
    c->head_dim = c->heads > 0 ? c->width / c->heads : 0;
    c->mlp_width = 4 * c->width;
    SPW_TRY(read_size(s, "n_inner", 1, &c->mlp_width));
    SPW_TRY(read_real(s, "layer_norm_epsilon", &c->norm_eps));
    SPW_TRY(must_be(s, "scale_attn_weights", true));
    SPW_TRY(must_be(s, "scale_attn_by_inverse_layer_idx", false));
    SPW_TRY(must_be(s, "reorder_and_upcast_attn", false));
    return must_be(s, "add_cross_attention", false);
}

/* One probability for the embedding and the residual branches. */
static spw_status
read_dropout(const source *s, spw_model_config *c)
{
    static const char *const no_dropout[] = {"attn_pdrop",       "attention_dropout",  "hidden_dropout",
                                             "dropout",          "activation_dropout", "layerdrop",
                                             "residual_dropout", "embedding_dropout"};
    double resid = -1, embd = -1;
    for (size_t i = 0; i < sizeof no_dropout / sizeof no_dropout[0]; i++) {
        double p = 0;
        SPW_TRY(read_real(s, no_dropout[i], &p));
        if (p != 0)
            return refuse(s, no_dropout[i], get(s, no_dropout[i])); /* inside attention, or by a class of its own */
    }
    if (!spw_hf_config_has_key(c->family, "resid_pdrop"))
        return SPW_OK;
    SPW_TRY(read_real(s, "resid_pdrop", &resid));
    SPW_TRY(read_real(s, "embd_pdrop", &embd));
    if (resid >= 1 || embd >= 1)
        return wrong(s, resid >= 1 ? "resid_pdrop" : "embd_pdrop", "number in [0, 1)",
                     get(s, resid >= 1 ? "resid_pdrop" : "embd_pdrop"));
    if (c->family == SPW_FAMILY_PHI3 && embd > 0) /* which its class has, and never looks at */
        return refuse(s, "embd_pdrop", get(s, "embd_pdrop"));
    if (c->family != SPW_FAMILY_PHI3 && resid >= 0 && embd >= 0 && resid != embd)
        return wrong(s, "embd_pdrop", "the same as resid_pdrop", get(s, "embd_pdrop"));
    c->dropout = resid > 0 ? resid : embd > 0 ? embd : 0;
    return SPW_OK;
}

/* ---------------------------------------------------------------- reading */

/* Models of text and images, as most sizes of Gemma 3, all of Gemma 4 and Mistral Small 3 are published, and what their text part is. */
static const struct with_images {
    const char *type, *architecture, *text_type;
    spw_family text;
    bool axes;
    bool qwen_vl; /* then the text's keys may also stand beside the others */
    uint64_t vocab, positions, width, layers, heads, mlp_width; /* of a missing key; 0: as in a model of text */
} with_images[] = {
    {"gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", SPW_FAMILY_GEMMA3, false, false, 262208, 131072, 2304,
     26, 8, 9216},
    {"mistral3", "Mistral3ForConditionalGeneration", "mistral", SPW_FAMILY_MISTRAL, false, false, 0, 0, 0, 0, 0, 0},
    {"qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text", SPW_FAMILY_QWEN2, true, true, 152064, 32768, 8192,
     80, 64, 29568},
    {"qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", SPW_FAMILY_QWEN2, true, true, 152064, 32768,
     8192, 80, 64, 29568},
    {"qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", SPW_FAMILY_QWEN3, true, false, 151936, 128000,
     4096, 32, 32, 22016},
    {"qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", SPW_FAMILY_QWEN3_MOE, true, false,
     151936, 128000, 2048, 24, 16, 5632},
    {"qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", SPW_FAMILY_QWEN3_5, true, false, 248320, 32768, 4096,
     32, 16, 12288},
    {"qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", SPW_FAMILY_QWEN3_5_MOE, true, false,
     248320, 32768, 2048, 40, 16, 0},
    {"gemma4", "Gemma4ForConditionalGeneration", "gemma4_text", SPW_FAMILY_GEMMA4, false, false, 262144, 131072, 2304,
     30, 8, 9216},
    {"gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", SPW_FAMILY_GEMMA4, false, false,
     262144, 262144, 2304, 30, 8, 9216}};

/* Relatives of what is computed here, and what of them is not. */
static const char *
missing_of(const char *type)
{
    for (size_t i = 0; i < sizeof with_images / sizeof with_images[0]; i++) {
        if (strcmp(type, with_images[i].type) == 0)
            return ": of a model of text and images only a folder's text part is read";
    }
    return "";
}

static spw_status
read_family(const source *s, spw_family *out)
{
    const json_t *type = get(s, "model_type"), *list = get(s, "architectures");
    const json_t *built_as = json_is_array(list) ? json_array_get(list, 0) : list;
    if (type == NULL)
        return SPW_RAISE(
            s->err, SPW_ECONFIG,
            "%s: %smodel_type is missing (gpt2, llama, qwen3 ...: spillway help config model_type names all)", s->name,
            s->prefix);
    if (!json_is_string(type))
        return refuse(s, "model_type", type);
    if (strcmp(json_string_value(type), "kimi_k2") == 0) /* DeepSeek-V3's class, by its architectures too */
        *out = SPW_FAMILY_DEEPSEEK_V3;
    else if (!spw_family_parse(json_string_value(type), out) || *out == SPW_FAMILY_CUSTOM)
        return say(s, "not supported yet: ", "model_type", " ", type, missing_of(json_string_value(type)));
    if (built_as != NULL &&
        (!json_is_string(built_as) || strcasecmp(json_string_value(built_as), spw__hf_architectures[*out]) != 0))
        return refuse(s, "architectures[0]", built_as);
    return SPW_OK;
}

/* gelu_new and gelu_pytorch_tanh are one formula; by gelu in the older key Gemma's files mean that, too. */
static spw_status
check_activation(const source *s, spw_family family)
{
    bool gelu = family == SPW_FAMILY_GPT2 || spw__hf_is_gemma(family), older;
    const char *key = family == SPW_FAMILY_GPT2  ? "activation_function"
                      : spw__hf_is_gemma(family) ? "hidden_activation"
                                                 : "hidden_act";
    const json_t *v = get(s, key);
    const char *name;
    if (spw__hf_has_layer_norm(family)) /* they have more than one */
        return SPW_OK;
    older = family == SPW_FAMILY_GEMMA && v == NULL;
    if (older)
        v = get(s, key = "hidden_act");
    name = json_string_value(v);
    if (older && name != NULL && strcmp(name, "gelu") == 0)
        return SPW_OK;
    if (v == NULL || (name != NULL && !gelu && strcmp(name, "silu") == 0) ||
        (name != NULL && gelu && (strcmp(name, "gelu_new") == 0 || strcmp(name, "gelu_pytorch_tanh") == 0)))
        return SPW_OK;
    return refuse(s, key, v);
}

/* As gpt-oss is published; the reader of weights makes numbers of it. */
static bool
is_mxfp4(spw_family family, const json_t *quantization)
{
    const char *method = json_string_value(json_object_get(quantization, "quant_method"));
    return family == SPW_FAMILY_GPT_OSS && method != NULL && strcmp(method, "mxfp4") == 0;
}

static spw_status
check_quantization(const source *s, spw_family family)
{
    const json_t *q = get(s, "quantization_config");
    uint64_t block[2];
    const char *refused = q == NULL || is_mxfp4(family, q) ? NULL : spw__fp8_refused(q, block);
    source inner;
    if (refused == NULL)
        return SPW_OK;
    if (strcmp(refused, "quant_method") == 0)
        return say(s, "not supported yet: ", "quantization_config", " ", q,
                   ": take the folder that was quantized; spillway.frozen_codes makes codes of its weights");
    SPW_TRY(read_member(s, "quantization_config", &inner));
    return say(&inner, "not supported yet: ", refused, " ", get(&inner, refused),
               ": of 8-bit floats e4m3 is read, with a scale for each block of weights or for all of a matrix");
}

/* The family of a Qwen's text part, or of a Gemma's with images in no tower, is not what it is called. */
static spw_status
read_text_family(const source *s, const struct with_images *kind, spw_family *out)
{
    const json_t *type = get(s, "model_type");
    const char *name = json_string_value(type);
    if (!kind->axes && !is_unified(s))
        SPW_TRY(read_family(s, out));
    else if (name != NULL && (strcmp(name, kind->text_type) == 0 || strcmp(name, kind->type) == 0))
        *out = kind->text;
    else
        return refuse(s, "model_type", type);
    return *out == kind->text || (kind->text == SPW_FAMILY_MISTRAL && *out == SPW_FAMILY_MINISTRAL3)
               ? SPW_OK
               : refuse(s, "model_type", type);
}

/* kind: whose text part this is; NULL: a model of text. */
static spw_status
read_config(const source *s, bool section, const struct with_images *kind, spw_model_config *c)
{
    memset(c, 0, sizeof *c);
    SPW_TRY(kind != NULL ? read_text_family(s, kind, &c->family) : read_family(s, &c->family));
    if (kind != NULL) {
        c->width = kind->width;
        c->layers = kind->layers;
        c->heads = kind->heads;
        c->mlp_width = kind->mlp_width;
    }
    SPW_TRY(check_activation(s, c->family));
    SPW_TRY(check_quantization(s, c->family));
    c->vocab = kind != NULL && kind->vocab > 0 ? kind->vocab : 256;
    c->positions = kind != NULL && kind->positions > 0 ? kind->positions : 1024;
    c->init_std = c->family == SPW_FAMILY_STARCODER2 ? 0.018042 : 0.02;
    c->tied = c->family == SPW_FAMILY_GPT2 || c->family == SPW_FAMILY_SMOLLM3 || c->family == SPW_FAMILY_ERNIE ||
              c->family == SPW_FAMILY_OPT || c->family == SPW_FAMILY_STARCODER2 || spw__hf_is_gemma(c->family);
    SPW_TRY(read_size(s, "vocab_size", 1, &c->vocab));
    SPW_TRY(read_real(s, "initializer_range", &c->init_std));
    SPW_TRY(read_bool(s, "tie_word_embeddings", &c->tied));
    SPW_TRY(c->family == SPW_FAMILY_GPT2        ? read_gpt2(s, c)
            : spw__hf_has_layer_norm(c->family) ? spw__hf_read_layer_norm(s, c)
                                                : read_llama(s, c));
    if (section) /* GPT-2's files say 0.1 whoever reads them: not for those */
        SPW_TRY(read_dropout(s, c));
    if (c->width == 0 || c->layers == 0 || c->heads == 0 || c->mlp_width == 0)
        return SPW_RAISE(s->err, SPW_ECONFIG, "%s: %s are needed", s->name,
                         c->family == SPW_FAMILY_GPT2 ? "model: n_embd, n_layer, n_head"
                         : c->family == SPW_FAMILY_OPT
                             ? "model: hidden_size, num_hidden_layers, num_attention_heads, ffn_dim"
                             : "model: hidden_size, num_hidden_layers, num_attention_heads, intermediate_size");
    return SPW_OK;
}

/* NULL: it is none of them. */
static const struct with_images *
find_images(const source *s)
{
    const char *type = json_string_value(get(s, "model_type"));
    for (size_t i = 0; i < sizeof with_images / sizeof with_images[0]; i++) {
        if (type != NULL && strcmp(type, with_images[i].type) == 0 &&
            (with_images[i].qwen_vl || json_is_object(get(s, "text_config"))))
            return &with_images[i];
    }
    return NULL;
}

bool
spw_hf_config_has_images(const char *json_text)
{
    json_t *root = json_loads(json_text, 0, NULL);
    source s = {root, "", "", NULL, false, false};
    bool has = root != NULL && find_images(&s) != NULL;
    json_decref(root);
    return has;
}

static spw_status
read_text_part(const source *s, const struct with_images *kind, spw_model_config *c)
{
    const json_t *list = get(s, "architectures"), *built_as = json_is_array(list) ? json_array_get(list, 0) : list;
    bool apart = json_is_object(get(s, "text_config")), tied = false;
    source text = {apart ? get(s, "text_config") : s->object, s->name, "", s->err, kind->axes, kind->qwen_vl};
    if (built_as != NULL && (!json_is_string(built_as) || strcmp(json_string_value(built_as), kind->architecture) != 0))
        return refuse(s, "architectures[0]", built_as);
    snprintf(text.prefix, sizeof text.prefix, "%s", apart ? "text_config." : "");
    SPW_TRY(read_config(&text, false, kind, c));
    SPW_TRY(check_quantization(s, c->family));
    if (kind->axes) /* said in either place; of a mixture's text part transformers writes what its class does not look at */
        SPW_TRY(read_bool(s, "tie_word_embeddings", &tied));
    c->tied = tied || (c->tied && kind->text != SPW_FAMILY_QWEN3_MOE);
    spw_log(SPW_LOG_NOTE, "%s: a model of text and images: its text part is taken, and the rest left out", s->name);
    return SPW_OK;
}

spw_status
spw_hf_config_parse(spw_model_config *out, const char *json_text, const char *name, bool section, spw_error *err)
{
    json_error_t where;
    json_t *root = json_loads(json_text, JSON_REJECT_DUPLICATES, &where);
    source s = {root, name, "", err, false, false};
    spw_status st;
    if (root == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "%s:%d:%d: %s", name, where.line, where.column, where.text);
    if (section)
        snprintf(s.prefix, sizeof s.prefix, "model.");
    if (!json_is_object(root))
        st = SPW_RAISE(err, SPW_ECONFIG, "%s: not a JSON object", name);
    else
        st = !section && find_images(&s) != NULL ? read_text_part(&s, find_images(&s), out)
                                                 : read_config(&s, section, NULL, out);
    json_decref(root);
    return st;
}

bool
spw__hf_folder_is_of(const char *path, const char *type)
{
    char file[4096], *text;
    const char *said;
    json_t *root;
    bool is;
    if (!spw_dir_has(path, "config.json") || snprintf(file, sizeof file, "%s/config.json", path) >= (int)sizeof file ||
        spw_file_read_text(file, CONFIG_BYTES_MAX, &text, NULL) != SPW_OK)
        return false;
    root = json_loads(text, 0, NULL);
    said = json_string_value(json_object_get(root, "model_type"));
    is = said != NULL && strcmp(said, type) == 0;
    json_decref(root);
    spw_mem_free(text);
    return is;
}

spw_status
spw_hf_check_folder(const char *path, spw_error *err)
{
    const char *slash = strchr(path, '/');
    char what[SPW_HF_WHAT_BYTES];
    if (spw_dir_has(path, "adapter_config.json") && !spw_dir_has(path, "config.json") &&
        spw_hf_has_other_weights(path, what))
        return SPW_RAISE(err, SPW_ENOENT,
                         "%s has %s, and no config.json: with that model's config.json and weights beside them "
                         "spillway export merges them",
                         path, what);
    if (access(path, F_OK) == 0 || errno != ENOENT || path[0] == '.' || slash == NULL || slash == path ||
        slash[1] == '\0' || strchr(slash + 1, '/') != NULL)
        return SPW_OK;
    return SPW_RAISE(
        err, SPW_ENOENT,
        "%s: there is no such folder; if it is a model on the Hugging Face hub, \"hf download %s --local-dir "
        "DIR\" fetches it to a folder that can be named here",
        path, path);
}

spw_status
spw_hf_config_load(spw_model_config *out, const char *folder, spw_error *err)
{
    char file[4096], *text;
    spw_status st;
    SPW_TRY(spw_hf_check_folder(folder, err));
    if (snprintf(file, sizeof file, "%s/config.json", folder) >= (int)sizeof file)
        return SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", folder);
    SPW_TRY(spw_file_read_text(file, CONFIG_BYTES_MAX, &text, err));
    st = spw_hf_config_parse(out, text, file, false, err);
    spw_mem_free(text);
    return st;
}
