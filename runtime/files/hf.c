/*
 * Hugging Face's config.json into a model's configuration. The reader takes what the families of this library
 * compute and refuses by name what would make another model of the same weights; no key that changes numbers is ignored.
 * Source: FORMATS S7 (the configuration classes of several releases, older and newer rope keys).
 */
#include "hf_source.h"
#include <errno.h>
#include <strings.h>
#include <unistd.h>

enum { CONFIG_BYTES_MAX = 4 << 20, KEY_BYTES = 160 };

/* Which families a key belongs to. */
enum {
    GPT2 = 1 << SPW_FAMILY_GPT2,
    LLAMA = 1 << SPW_FAMILY_LLAMA,
    MISTRAL = 1 << SPW_FAMILY_MISTRAL,
    QWEN = 1 << SPW_FAMILY_QWEN2 | 1 << SPW_FAMILY_QWEN3,
    MIXTRAL = 1 << SPW_FAMILY_MIXTRAL,
    QWEN2_MOE = 1 << SPW_FAMILY_QWEN2_MOE,
    QWEN_MOE = QWEN2_MOE | 1 << SPW_FAMILY_QWEN3_MOE,
    EXPERTS = MIXTRAL | QWEN_MOE,
    PHI3 = 1 << SPW_FAMILY_PHI3,
    SMOLLM3 = 1 << SPW_FAMILY_SMOLLM3,
    OLMO3 = 1 << SPW_FAMILY_OLMO3,
    OLMO = 1 << SPW_FAMILY_OLMO2 | OLMO3,
    GEMMA2 = 1 << SPW_FAMILY_GEMMA2,
    GEMMA3 = 1 << SPW_FAMILY_GEMMA3,
    GEMMA = GEMMA2 | GEMMA3,
    GPT_OSS = 1 << SPW_FAMILY_GPT_OSS,
    GLM = 1 << SPW_FAMILY_GLM4_MOE,
    MINIMAX = 1 << SPW_FAMILY_MINIMAX_M2,
    DEEPSEEK_V2 = 1 << SPW_FAMILY_DEEPSEEK_V2,
    DEEPSEEK_V3 = 1 << SPW_FAMILY_DEEPSEEK_V3,
    GLM_LITE = 1 << SPW_FAMILY_GLM4_LITE,
    LATENT = DEEPSEEK_V2 | DEEPSEEK_V3 | GLM_LITE,
    SHARED = GLM | LATENT, /* an expert of all rows beside the others, by DeepSeek's names */
    LLAMAS = LLAMA | MISTRAL | QWEN | EXPERTS | PHI3 | SMOLLM3 | OLMO | GEMMA | GPT_OSS | SHARED | MINIMAX,
    ALL = GPT2 | LLAMAS
};

static const struct {
    const char *key;
    unsigned families;
} keys[] = {
    {"model_type", ALL},
    {"architectures", ALL},
    {"vocab_size", ALL},
    {"n_embd", GPT2},
    {"n_layer", GPT2},
    {"n_head", GPT2},
    {"n_inner", GPT2},
    {"n_positions", GPT2},
    {"n_ctx", GPT2},
    {"hidden_size", LLAMAS},
    {"num_hidden_layers", LLAMAS},
    {"num_attention_heads", LLAMAS},
    {"num_key_value_heads", LLAMAS},
    {"head_dim", LLAMAS},
    {"intermediate_size", LLAMAS},
    {"max_position_embeddings", LLAMAS},
    {"original_max_position_embeddings", LLAMAS},
    {"activation_function", GPT2},
    {"hidden_act", LLAMAS & ~GEMMA3}, /* Gemma 2's files have both, and its class looks at the other */
    {"hidden_activation", GEMMA},
    {"layer_norm_epsilon", GPT2},
    {"rms_norm_eps", LLAMAS},
    {"initializer_range", ALL},
    {"tie_word_embeddings", ALL},
    {"rope_theta", LLAMAS},
    {"rope_scaling", LLAMAS},
    {"rope_parameters", LLAMAS},
    {"partial_rotary_factor", LLAMAS},
    {"no_rope_layers", SMOLLM3},
    {"no_rope_layer_interval", SMOLLM3},
    {"rope_local_base_freq", GEMMA3},
    {"attention_bias", LLAMAS},
    {"mlp_bias", LLAMAS},
    {"sliding_window", LLAMAS & ~(SHARED | MINIMAX)},
    {"use_sliding_window", LLAMAS & ~(GEMMA | GPT_OSS | SHARED | MINIMAX | OLMO3)},
    {"max_window_layers", QWEN | QWEN_MOE},
    {"sliding_window_pattern", GEMMA3},
    {"_sliding_window_pattern", GEMMA3}, /* a note beside layer_types, which transformers does not read either */
    {"query_pre_attn_scalar", GEMMA},
    {"attn_logit_softcapping", GEMMA},
    {"final_logit_softcapping", GEMMA},
    {"use_bidirectional_attention", GEMMA},
    {"cache_implementation", GEMMA},
    {"num_experts", EXPERTS | GPT_OSS | MINIMAX},
    {"num_local_experts", (EXPERTS & ~QWEN2_MOE) | GPT_OSS | MINIMAX},
    {"shared_expert_intermediate_size", QWEN2_MOE},
    {"qkv_bias", QWEN2_MOE},
    {"num_experts_per_tok", EXPERTS | GPT_OSS | SHARED | MINIMAX},
    {"n_routed_experts", SHARED},
    {"n_shared_experts", SHARED},
    {"first_k_dense_replace", SHARED},
    {"n_group", SHARED},
    {"topk_group", SHARED},
    {"routed_scaling_factor", SHARED},
    {"use_qk_norm", GLM | MINIMAX},
    {"kv_lora_rank", LATENT},
    {"q_lora_rank", LATENT},
    {"qk_nope_head_dim", LATENT},
    {"qk_rope_head_dim", LATENT},
    {"v_head_dim", LATENT},
    {"rope_interleave", DEEPSEEK_V3 | GLM_LITE},
    {"topk_method", LATENT},
    {"scoring_func", LATENT | MINIMAX},
    {"rotary_dim", MINIMAX},
    {"qk_norm_type", MINIMAX},
    {"use_routing_bias", MINIMAX},
    {"shared_intermediate_size", MINIMAX},
    {"moe_layer_freq", LATENT},
    {"mlp_layer_types", GLM_LITE},
    {"aux_loss_alpha", LATENT},
    {"seq_aux", LATENT},
    {"ep_size", LATENT},
    {"num_nextn_predict_layers", SHARED}, /* layers behind the last one, which are left out */
    {"num_mtp_layers", SHARED},
    {"swiglu_limit", GPT_OSS},
    {"swiglu_alpha", GPT_OSS},
    {"moe_intermediate_size", QWEN_MOE | SHARED},
    {"norm_topk_prob", QWEN_MOE | SHARED},
    {"decoder_sparse_step", QWEN_MOE},
    {"mlp_only_layers", QWEN_MOE},
    {"output_router_logits", EXPERTS | GPT_OSS | SHARED | MINIMAX},
    {"router_aux_loss_coef", EXPERTS | GPT_OSS | SHARED | MINIMAX},
    {"router_jitter_noise", MIXTRAL | MINIMAX},
    {"layer_types", LLAMAS},
    {"resid_pdrop", GPT2 | PHI3},
    {"embd_pdrop", GPT2 | PHI3},
    {"attn_pdrop", ALL},
    {"attention_dropout", ALL},
    {"scale_attn_weights", GPT2},
    {"scale_attn_by_inverse_layer_idx", GPT2},
    {"reorder_and_upcast_attn", GPT2},
    {"add_cross_attention", GPT2},
    {"pretraining_tp", LLAMAS},
    {"torch_dtype", ALL},
    {"dtype", ALL},
    {"bos_token_id", ALL},
    {"eos_token_id", ALL},
    {"pad_token_id", ALL},
    {"use_cache", ALL},
    {"transformers_version", ALL},
};

const char *const spw__hf_architectures[SPW_FAMILY_CUSTOM] = {
    "GPT2LMHeadModel",       "LlamaForCausalLM",       "MistralForCausalLM",   "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",      "MixtralForCausalLM",     "Qwen3MoeForCausalLM",  "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",    "Qwen2MoeForCausalLM",    "Olmo2ForCausalLM",     "Gemma3ForCausalLM",
    "Gemma2ForCausalLM",     "GptOssForCausalLM",      "Glm4MoeForCausalLM",   "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "MiniMaxM2ForCausalLM", "Olmo3ForCausalLM"};

const char *
spw_hf_config_key(uint32_t i)
{
    return i < sizeof keys / sizeof keys[0] ? keys[i].key : NULL;
}

bool
spw_hf_config_has_key(spw_family family, const char *key)
{
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (strcmp(keys[i].key, key) == 0)
            return (keys[i].families & 1u << family) != 0;
    }
    return false;
}

/* ---------------------------------------------------------------- rope */

static spw_status
read_rope_kind(const source *s, spw_model_config *c)
{
    const char *key = get(s, "rope_type") != NULL ? "rope_type" : "type";
    const json_t *v = get(s, key);
    const char *kind = json_string_value(v);
    if (v == NULL && get(s, "factor") != NULL)
        return wrong(s, "rope_type", "default, linear, llama3 or yarn", NULL);
    if (c->family == SPW_FAMILY_PHI3 && kind != NULL &&
        (strcmp(kind, "longrope") == 0 || strcmp(kind, "su") == 0 || strcmp(kind, "yarn") == 0)) {
        c->rope = SPW_ROPE_LONG; /* by all of its class's names */
        return SPW_OK;
    }
    if (v == NULL || (kind != NULL && (strcmp(kind, "default") == 0 || (s->axes && strcmp(kind, "mrope") == 0))))
        return SPW_OK;
    c->rope = kind != NULL && strcmp(kind, "linear") == 0   ? SPW_ROPE_LINEAR
              : kind != NULL && strcmp(kind, "llama3") == 0 ? SPW_ROPE_LLAMA3
              : kind != NULL && strcmp(kind, "yarn") == 0   ? SPW_ROPE_YARN
                                                            : SPW_ROPE_PLAIN;
    if (spw__hf_is_latent(c->family) && c->rope != SPW_ROPE_YARN)
        return refuse(s, key, v);
    return c->rope != SPW_ROPE_PLAIN && c->family != SPW_FAMILY_PHI3 ? SPW_OK : refuse(s, key, v);
}

/* What the class makes of the factor where nothing else is said; both at 1 for one that is 1 or less. */
double
spw__hf_yarn_attention(double factor, double weight)
{
    return factor <= 1 ? 1 : 0.1 * weight * log(factor) + 1;
}

static spw_status
read_yarn(const source *s, spw_model_config *c)
{
    double mscale = 0, all_dim = 0;
    SPW_TRY(read_real(s, "beta_slow", &c->rope_low));
    SPW_TRY(read_real(s, "beta_fast", &c->rope_high));
    SPW_TRY(read_real(s, "mscale", &mscale));
    SPW_TRY(read_real(s, "mscale_all_dim", &all_dim));
    c->rope_low = c->rope_low > 0 ? c->rope_low : 1; /* 0 is the default too */
    c->rope_high = c->rope_high > 0 ? c->rope_high : 32;
    c->rope_attention = spw__hf_yarn_attention(c->rope_factor, 1);
    if (mscale > 0 && all_dim > 0)
        c->rope_attention =
            spw__hf_yarn_attention(c->rope_factor, mscale) / spw__hf_yarn_attention(c->rope_factor, all_dim);
    if (spw__hf_is_latent(c->family)) {
        c->rope_mscale = mscale;
        c->rope_all_dim = all_dim;
    }
    SPW_TRY(read_real(s, "attention_factor", &c->rope_attention));
    c->rope_truncate = json_object_get(s->object, "truncate") == NULL; /* null is false */
    return read_bool(s, "truncate", &c->rope_truncate);
}

/* A number above 0 for each frequency. */
static spw_status
read_factors(const source *s, const char *key, const spw_model_config *c, float *out)
{
    const json_t *list = get(s, key);
    uint64_t count = spw_model_rope_width(c) / 2;
    char expected[64];
    snprintf(expected, sizeof expected, "a list of %llu numbers above 0", (unsigned long long)count);
    if (count > SPW_ROPE_FACTORS_MAX)
        return refuse(s, key, list);
    if (!json_is_array(list) || json_array_size(list) != count)
        return wrong(s, key, expected, list);
    for (uint64_t i = 0; i < count; i++) {
        out[i] = (float)json_number_value(json_array_get(list, i));
        if (!(out[i] > 0 && out[i] <= 1e12f))
            return wrong(s, key, expected, list);
    }
    return SPW_OK;
}

/* What the class makes of both lengths, and of a factor that is said, where nothing else is. */
double
spw__hf_long_attention(double factor, uint64_t positions)
{
    return factor <= 1 ? 1 : sqrt(1 + log(factor) / log((double)positions));
}

/* The original length counts beside the rope object alone; transformers writes it in both. */
static spw_status
read_long(const source *s, const source *top, spw_model_config *c)
{
    static const char *const original = "original_max_position_embeddings";
    double factor;
    c->rope_positions = 4096;
    SPW_TRY(read_size(top, original, 2, &c->rope_positions));
    if (get(s, original) != NULL && json_number_value(get(s, original)) != (double)c->rope_positions)
        return wrong(s, original, "the same as outside", get(s, original));
    SPW_TRY(read_factors(s, "short_factor", c, c->rope_short));
    SPW_TRY(read_factors(s, "long_factor", c, c->rope_long));
    factor = (double)c->positions / (double)c->rope_positions;
    SPW_TRY(read_real(s, "factor", &factor));
    c->rope_factor = 1; /* for cos and sin alone */
    c->rope_attention = spw__hf_long_attention(factor, c->rope_positions);
    return read_real(s, "attention_factor", &c->rope_attention);
}

/* A value beside the rope object counts more than one in it. */
static spw_status
read_rope_positions(const source *s, const source *top, spw_model_config *c)
{
    if (c->rope == SPW_ROPE_YARN)
        c->rope_positions = c->positions;
    SPW_TRY(read_size(s, "original_max_position_embeddings", 1, &c->rope_positions));
    return read_size(top, "original_max_position_embeddings", 1, &c->rope_positions);
}

static spw_status
read_rope_scale(const source *s, const source *top, spw_model_config *c)
{
    if (c->rope == SPW_ROPE_PLAIN)
        return SPW_OK;
    if (c->rope == SPW_ROPE_LONG)
        return read_long(s, top, c);
    SPW_TRY(read_real(s, "factor", &c->rope_factor));
    if (!(c->rope_factor >= 1))
        return wrong(s, "factor", "number of at least 1", get(s, "factor"));
    if (c->rope == SPW_ROPE_LINEAR)
        return SPW_OK;
    SPW_TRY(read_rope_positions(s, top, c));
    if (c->rope == SPW_ROPE_YARN)
        return read_yarn(s, c);
    SPW_TRY(read_real(s, "low_freq_factor", &c->rope_low));
    SPW_TRY(read_real(s, "high_freq_factor", &c->rope_high));
    if (!(c->rope_low > 0))
        return wrong(s, "low_freq_factor", "number above 0", get(s, "low_freq_factor"));
    if (!(c->rope_high > c->rope_low))
        return wrong(s, "high_freq_factor", "number above low_freq_factor", get(s, "high_freq_factor"));
    if (c->rope_positions == 0)
        return wrong(s, "original_max_position_embeddings", "integer", NULL);
    return SPW_OK;
}

/* Phi-3's, GLM's and MiniMax's classes turn the first part of a head, and look in the rope object before they look beside; the others know of no part. */
static spw_status
read_rope_part(const source *s, spw_model_config *c)
{
    double part = c->rope_part > 0 ? c->rope_part : 1;
    SPW_TRY(read_real(s, "partial_rotary_factor", &part));
    if (part != 1 && c->family != SPW_FAMILY_PHI3 && c->family != SPW_FAMILY_GLM4_MOE &&
        c->family != SPW_FAMILY_MINIMAX_M2)
        return refuse(s, "partial_rotary_factor", get(s, "partial_rotary_factor"));
    if (!(part > 0 && part <= 1))
        return wrong(s, "partial_rotary_factor", "number above 0, at most 1", get(s, "partial_rotary_factor"));
    c->rope_part = part < 1 ? part : 0;
    return SPW_OK;
}

/* What rope says, and the key in s that may say theta; c has the theta that is meant without both. */
static spw_status
read_rope_object(const source *s, const source *rope, const char *theta, spw_model_config *c)
{
    static const char *const known[] = {"rope_type",
                                        "type",
                                        "rope_theta",
                                        "factor",
                                        "low_freq_factor",
                                        "high_freq_factor",
                                        "original_max_position_embeddings",
                                        "beta_fast",
                                        "beta_slow",
                                        "mscale",
                                        "mscale_all_dim",
                                        "attention_factor",
                                        "truncate",
                                        "partial_rotary_factor"};
    const json_t *top = get(s, theta);
    const char *name;
    json_t *v;
    SPW_TRY(read_real(s, theta, &c->rope_theta));
    SPW_TRY(read_rope_kind(rope, c)); /* first: what it is called says more than the members that only it has */
    json_object_foreach((json_t *)(uintptr_t)rope->object, name, v)
    {
        bool found =
            c->rope == SPW_ROPE_LONG && (strcmp(name, "short_factor") == 0 || strcmp(name, "long_factor") == 0);
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
            found = found || strcmp(name, known[i]) == 0;
        found = found || (s->axes && (strcmp(name, "mrope_section") == 0 || strcmp(name, "mrope_interleaved") == 0));
        if (!found && !json_is_null(v))
            return refuse(rope, name, v);
    }
    SPW_TRY(read_rope_part(rope, c));
    SPW_TRY(read_real(rope, "rope_theta", &c->rope_theta));
    if (top != NULL && c->rope_theta != json_number_value(top))
        return wrong(rope, "rope_theta", "the same as outside", get(rope, "rope_theta"));
    if (!(c->rope_theta > 0))
        return wrong(top != NULL ? s : rope, top != NULL ? theta : "rope_theta", "number above 0",
                     top != NULL ? top : get(rope, "rope_theta"));
    return read_rope_scale(rope, s, c);
}

/*
 * Gemma 3's and OLMo 3's layers with a window and those without have an object each in newer files; in older ones scaling is for the latter.
 * There releases differ in the theta that OLMo's layers with a window have, unless it is the default.
 */
static spw_status
read_rope_by_layer(const source *s, const source *rope, bool newer, spw_model_config *c)
{
    bool olmo = c->family == SPW_FAMILY_OLMO3;
    spw_model_config local = {.rope_theta = olmo ? c->rope_theta : 10000};
    source full = *rope, sliding = {NULL, s->name, "", s->err, false, false};
    const char *name;
    json_t *v;
    if (newer) {
        SPW_TRY(read_member(rope, "full_attention", &full));
        SPW_TRY(read_member(rope, "sliding_attention", &sliding));
        json_object_foreach((json_t *)(uintptr_t)rope->object, name, v)
        {
            if (strcmp(name, "full_attention") != 0 && strcmp(name, "sliding_attention") != 0 && !json_is_null(v))
                return refuse(rope, name, v);
        }
    }
    SPW_TRY(read_rope_object(s, &full, "rope_theta", c));
    if (olmo && !newer && c->rope_theta != local.rope_theta)
        return wrong(s, "rope_theta", "500000, or rope_parameters with one for each kind of layer",
                     get(s, "rope_theta"));
    SPW_TRY(read_rope_object(s, &sliding, olmo ? "" : "rope_local_base_freq", &local));
    c->rope_local_theta = local.rope_theta;
    return local.rope == SPW_ROPE_PLAIN ? SPW_OK : refuse(&sliding, "rope_type", get(&sliding, "rope_type"));
}

/* Older files: rope_theta and rope_scaling. Newer ones: rope_parameters with both. */
static spw_status
read_rope(const source *s, spw_model_config *c)
{
    bool newer = get(s, "rope_parameters") != NULL, minimax = c->family == SPW_FAMILY_MINIMAX_M2;
    bool by_layer = c->family == SPW_FAMILY_GEMMA3 || c->family == SPW_FAMILY_OLMO3;
    uint64_t turned = c->head_dim;
    source rope;
    if (newer && get(s, "rope_scaling") != NULL)
        return SPW_RAISE(s->err, SPW_ECONFIG, "%s: %srope_parameters and rope_scaling say the same twice", s->name,
                         s->prefix);
    c->rope_theta = c->family == SPW_FAMILY_MIXTRAL || c->family == SPW_FAMILY_GEMMA3 || s->qwen_vl ? 1e6
                    : s->axes || by_layer                                                           ? 5e5
                    : minimax                                                                       ? 5e6
                    : c->family == SPW_FAMILY_SMOLLM3                                               ? 2e6
                    : c->family == SPW_FAMILY_GPT_OSS                                               ? 150000
                                                                                                    : 10000;
    c->rope_part = c->family == SPW_FAMILY_GLM4_MOE ? 0.5 : 0;
    if (minimax && c->head_dim > 0) { /* the older name */
        SPW_TRY(read_size(s, "rotary_dim", 2, &turned));
        if (turned > c->head_dim)
            return wrong(s, "rotary_dim", "no more than head_dim", get(s, "rotary_dim"));
        c->rope_part = (double)turned / (double)c->head_dim;
    }
    SPW_TRY(read_rope_part(s, c));
    SPW_TRY(read_member(s, newer ? "rope_parameters" : "rope_scaling", &rope));
    if (c->family == SPW_FAMILY_GPT_OSS && rope.object == NULL)
        return wrong(s, "rope_scaling", "an object, as the family's folders have it", NULL);
    return by_layer ? read_rope_by_layer(s, &rope, newer, c) : read_rope_object(s, &rope, "rope_theta", c);
}

/* ---------------------------------------------------------------- what sets the families apart */

/* The list, which counts more than the interval, must be what some interval gives. */
static spw_status
read_no_rope(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "no_rope_layers");
    uint64_t with = 0;
    if (c->family != SPW_FAMILY_SMOLLM3)
        return SPW_OK;
    c->rope_skip_every = 4;
    SPW_TRY(read_size(s, "no_rope_layer_interval", 1, &c->rope_skip_every));
    if (list != NULL && (!json_is_array(list) || json_array_size(list) < c->layers))
        return wrong(s, "no_rope_layers", "a list with an entry for each layer", list);
    while (list != NULL && with < c->layers && json_integer_value(json_array_get(list, with)) != 0)
        with++;
    if (list != NULL)
        c->rope_skip_every = with + 1;
    if (c->rope_skip_every > c->layers)
        c->rope_skip_every = 0;
    for (uint64_t l = 0; list != NULL && l < c->layers; l++) {
        const json_t *v = json_array_get(list, l);
        char key[40];
        snprintf(key, sizeof key, "no_rope_layers[%llu]", (unsigned long long)l);
        if (!json_is_integer(v) || (json_integer_value(v) != 0) != spw_model_has_rope(c, l))
            return refuse(s, key, v);
    }
    return SPW_OK;
}

static bool
is_full(const json_t *layer_types, uint64_t l)
{
    const char *text = json_string_value(json_array_get(layer_types, l));
    return text != NULL && strcmp(text, "full_attention") == 0;
}

/* layer_types, where it is given, must say what window and window_from do; for qwen it sets where windows begin. */
static spw_status
read_layer_types(const source *s, spw_model_config *c, bool sets_first)
{
    const json_t *list = get(s, "layer_types");
    if (list == NULL)
        return SPW_OK;
    if (!json_is_array(list) || json_array_size(list) != c->layers)
        return wrong(s, "layer_types", "a list with one entry for each layer", list);
    if (sets_first && c->window > 0) {
        c->window_from = 0;
        while (c->window_from < c->layers && is_full(list, c->window_from))
            c->window_from++;
    }
    for (uint64_t l = 0; l < c->layers; l++) {
        const char *text = json_string_value(json_array_get(list, l));
        const char *want = spw_model_window(c, l) > 0 ? "sliding_attention" : "full_attention";
        char key[40];
        snprintf(key, sizeof key, "layer_types[%llu]", (unsigned long long)l);
        if (text == NULL || strcmp(text, want) != 0)
            return refuse(s, key, json_array_get(list, l));
    }
    return SPW_OK;
}

/* Gemma's, gpt-oss's and OLMo 3's windows: in all layers but each so many-th, by layer_types where that is given; else Gemma 3's by sliding_window_pattern. */
static spw_status
read_windows_between(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "layer_types"), *said = json_object_get(s->object, "sliding_window");
    c->window = c->family == SPW_FAMILY_GPT_OSS ? 128 : 4096; /* the classes' defaults */
    c->full_every = c->family == SPW_FAMILY_GPT_OSS || c->family == SPW_FAMILY_GEMMA2 ? 2
                    : c->family == SPW_FAMILY_OLMO3                                   ? 4
                                                                                      : 6;
    SPW_TRY(read_size(s, "sliding_window", 1, &c->window));
    if (c->family == SPW_FAMILY_GEMMA3)
        SPW_TRY(read_size(s, "sliding_window_pattern", 1, &c->full_every));
    if (json_is_array(list)) {
        c->full_every = 1;
        while (c->full_every <= json_array_size(list) && !is_full(list, c->full_every - 1))
            c->full_every++;
    }
    SPW_TRY(read_layer_types(s, c, false));
    if (c->full_every == 1) {
        c->window = c->full_every = 0;
        c->rope_local_theta = 0;
    }
    if (c->full_every > c->layers)
        c->full_every = 0;
    return c->window > 0 && json_is_null(said) ? wrong(s, "sliding_window", "integer", said) : SPW_OK;
}

static spw_status
read_window(const source *s, spw_model_config *c)
{
    bool moe = c->family == SPW_FAMILY_QWEN3_MOE; /* a window is for all of its layers */
    bool qwen = c->family == SPW_FAMILY_QWEN2 || c->family == SPW_FAMILY_QWEN3;
    bool none = c->family == SPW_FAMILY_MIXTRAL || c->family == SPW_FAMILY_PHI3;      /* where nothing is said */
    bool idle = c->family == SPW_FAMILY_SMOLLM3 || c->family == SPW_FAMILY_QWEN2_MOE; /* said, and not used */
    bool used = c->family == SPW_FAMILY_MISTRAL || none;
    bool said = json_object_get(s->object, "sliding_window") != NULL || none;
    if (c->family == SPW_FAMILY_GLM4_MOE || c->family == SPW_FAMILY_MINIMAX_M2 ||
        spw__hf_is_latent(c->family)) /* their classes know of none */
        return read_layer_types(s, c, false);
    if (spw__hf_is_gemma(c->family) || c->family == SPW_FAMILY_GPT_OSS || c->family == SPW_FAMILY_OLMO3)
        return read_windows_between(s, c);
    if (!qwen && !moe)
        SPW_TRY(must_be(s, "use_sliding_window", used));
    else
        SPW_TRY(read_bool(s, "use_sliding_window", &used));
    if (used) {
        c->window = said ? 0 : 4096; /* the classes' default; null is none */
        SPW_TRY(read_size(s, "sliding_window", 1, &c->window));
        c->window_from = s->qwen_vl ? 80 : qwen ? 28 : 0;
        if (qwen)
            SPW_TRY(read_size(s, "max_window_layers", 0, &c->window_from));
    } else if (!qwen && !moe && !idle && get(s, "sliding_window") != NULL) {
        return refuse(s, "sliding_window", get(s, "sliding_window"));
    }
    SPW_TRY(read_layer_types(s, c, qwen));
    if (c->window == 0 || c->window_from >= c->layers)
        c->window = c->window_from = 0;
    return SPW_OK;
}

/* A cap that is null is none. Gemma 3's class has them too, and what it does with one depends on how it attends. */
static spw_status
read_cap(const source *s, const char *key, double otherwise, double *out)
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
    if (!spw__hf_is_gemma(c->family))
        return SPW_OK;
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        if (!capped && get(s, caps[i]) != NULL)
            return refuse(s, caps[i], get(s, caps[i]));
    }
    if (capped) {
        SPW_TRY(read_cap(s, caps[0], 50, &c->score_cap));
        SPW_TRY(read_cap(s, caps[1], 30, &c->logit_cap));
    }
    c->norms = SPW_NORMS_BOTH;
    c->norms_from_one = c->embedding_scaled = true;
    c->gate = SPW_GATE_GELU;
    c->query_scalar = 256;
    SPW_TRY(read_size(s, "query_pre_attn_scalar", 1, &c->query_scalar));
    return must_be(s, "use_bidirectional_attention", false);
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

static spw_status
read_llama(const source *s, spw_model_config *c)
{
    bool gpt_oss = c->family == SPW_FAMILY_GPT_OSS, bias = gpt_oss;
    bool qwen3 = c->family == SPW_FAMILY_QWEN3 || c->family == SPW_FAMILY_QWEN3_MOE;
    bool olmo = c->family == SPW_FAMILY_OLMO2 || c->family == SPW_FAMILY_OLMO3, gemma = spw__hf_is_gemma(c->family);
    bool biases = c->family == SPW_FAMILY_LLAMA || c->family == SPW_FAMILY_SMOLLM3;
    bool glm = c->family == SPW_FAMILY_GLM4_MOE, latent = spw__hf_is_latent(c->family);
    bool minimax = c->family == SPW_FAMILY_MINIMAX_M2;
    uint64_t kv_default =
        c->family == SPW_FAMILY_MISTRAL || c->family == SPW_FAMILY_MIXTRAL || gpt_oss || glm || minimax ? 8
        : c->family == SPW_FAMILY_QWEN3_MOE || c->family == SPW_FAMILY_SMOLLM3 || gemma                 ? 4
        : s->qwen_vl                                                                                    ? 8
        : c->family == SPW_FAMILY_QWEN2_MOE                                                             ? 16
        : c->family == SPW_FAMILY_QWEN2 || c->family == SPW_FAMILY_QWEN3                                ? 32
                                                                                                        : 0;
    bool coarse = c->family == SPW_FAMILY_MIXTRAL || c->family == SPW_FAMILY_PHI3 || c->family == SPW_FAMILY_GLM4_LITE;
    c->norm_eps = coarse || olmo || gpt_oss || glm || s->qwen_vl ? 1e-5 : 1e-6;
    SPW_TRY(read_size(s, "hidden_size", 1, &c->width));
    SPW_TRY(read_size(s, "num_hidden_layers", 1, &c->layers));
    SPW_TRY(read_size(s, "num_attention_heads", 1, &c->heads));
    SPW_TRY(read_size(s, "intermediate_size", 1, &c->mlp_width));
    SPW_TRY(read_size(s, "max_position_embeddings", 1, &c->positions));
    c->kv_heads = kv_default > 0 && json_object_get(s->object, "num_key_value_heads") == NULL ? kv_default : c->heads;
    SPW_TRY(read_size(s, "num_key_value_heads", 1, &c->kv_heads));
    c->head_dim = gemma                                      ? 256
                  : gpt_oss                                  ? 64
                  : c->family == SPW_FAMILY_QWEN3 || minimax ? 128
                  : c->heads > 0                             ? c->width / c->heads
                                                             : 0;
    SPW_TRY(read_size(s, "head_dim", 1, &c->head_dim));
    if (c->width > 0 && c->heads > c->width && c->head_dim == 0)
        return wrong(s, "num_attention_heads", "no more heads than hidden_size",
                     json_object_get(s->object, "num_attention_heads"));
    SPW_TRY(read_real(s, "rms_norm_eps", &c->norm_eps));
    SPW_TRY(spw__hf_read_latent(s, c));
    SPW_TRY(read_rope(s, c));
    SPW_TRY(read_no_rope(s, c));
    SPW_TRY(read_window(s, c));
    SPW_TRY(spw__hf_read_experts(s, c));
    if (biases || qwen3 || olmo || gemma || gpt_oss || glm || latent)
        SPW_TRY(read_bool(s, "attention_bias", &bias));
    else
        SPW_TRY(must_be(s, "attention_bias", false));
    c->qkv_bias = bias || c->family == SPW_FAMILY_QWEN2 || c->family == SPW_FAMILY_QWEN2_MOE;
    if (c->family == SPW_FAMILY_QWEN2_MOE)
        SPW_TRY(read_bool(s, "qkv_bias", &c->qkv_bias));
    c->out_bias = bias && !glm;
    if (biases)
        SPW_TRY(read_bool(s, "mlp_bias", &c->mlp_bias));
    else
        SPW_TRY(must_be(s, "mlp_bias", false));
    c->qk_norm = qwen3 || olmo || minimax || c->family == SPW_FAMILY_GEMMA3;
    if (glm)
        SPW_TRY(read_bool(s, "use_qk_norm", &c->qk_norm));
    c->qk_norm_whole = olmo || minimax;
    c->packed = c->family == SPW_FAMILY_PHI3;
    c->norms = olmo ? SPW_NORMS_AFTER : SPW_NORMS_BEFORE;
    SPW_TRY(read_gpt_oss(s, c));
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
    static const char *const no_dropout[] = {"attn_pdrop", "attention_dropout"};
    double resid = -1, embd = -1;
    for (size_t i = 0; i < 2; i++) {
        double p = 0;
        SPW_TRY(read_real(s, no_dropout[i], &p));
        if (p != 0)
            return refuse(s, no_dropout[i], get(s, no_dropout[i])); /* inside attention */
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

/* Relatives of what is computed here, and what of them is not. */
static const char *
missing_of(const char *type)
{
    return strcmp(type, "gemma3") == 0 || strcmp(type, "mistral3") == 0 || strcmp(type, "qwen2_vl") == 0 ||
                   strcmp(type, "qwen2_5_vl") == 0
               ? ": of a model of text and images only a folder's text part is read"
               : "";
}

static spw_status
read_family(const source *s, spw_family *out)
{
    const json_t *type = get(s, "model_type"), *list = get(s, "architectures");
    const json_t *built_as = json_is_array(list) ? json_array_get(list, 0) : list;
    if (type == NULL)
        return SPW_RAISE(s->err, SPW_ECONFIG,
                         "%s: %smodel_type is missing (gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, phi3, "
                         "smollm3, qwen2_moe, olmo2, gemma2, gemma3_text, gpt_oss, glm4_moe, deepseek_v2, "
                         "deepseek_v3, glm4_moe_lite, minimax_m2 or olmo3)",
                         s->name, s->prefix);
    if (!json_is_string(type))
        return refuse(s, "model_type", type);
    if (!spw_family_parse(json_string_value(type), out) || *out == SPW_FAMILY_CUSTOM)
        return say(s, "not supported yet: ", "model_type", " ", type, missing_of(json_string_value(type)));
    if (built_as != NULL &&
        (!json_is_string(built_as) || strcasecmp(json_string_value(built_as), spw__hf_architectures[*out]) != 0))
        return refuse(s, "architectures[0]", built_as);
    return SPW_OK;
}

/* gelu_new and gelu_pytorch_tanh are one formula. */
static spw_status
check_activation(const source *s, spw_family family)
{
    bool gelu = family == SPW_FAMILY_GPT2 || spw__hf_is_gemma(family);
    const char *key = family == SPW_FAMILY_GPT2  ? "activation_function"
                      : spw__hf_is_gemma(family) ? "hidden_activation"
                                                 : "hidden_act";
    const json_t *v = get(s, key);
    const char *name = json_string_value(v);
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
               ": of 8-bit floats e4m3 is read, with a scale for each block of weights");
}

/* Models of text and images, as most sizes of Gemma 3 and Mistral Small 3 are published, and what their text part is. */
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
     4096, 32, 32, 22016}};

/* The family of a Qwen's text part is not what it is called. */
static spw_status
read_text_family(const source *s, const struct with_images *kind, spw_family *out)
{
    const json_t *type = get(s, "model_type");
    const char *name = json_string_value(type);
    if (!kind->axes)
        SPW_TRY(read_family(s, out));
    else if (name != NULL && (strcmp(name, kind->text_type) == 0 || strcmp(name, kind->type) == 0))
        *out = kind->text;
    else
        return refuse(s, "model_type", type);
    return *out == kind->text ? SPW_OK : refuse(s, "model_type", type);
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
    c->init_std = 0.02;
    c->tied = c->family == SPW_FAMILY_GPT2 || c->family == SPW_FAMILY_SMOLLM3 || spw__hf_is_gemma(c->family);
    SPW_TRY(read_size(s, "vocab_size", 1, &c->vocab));
    SPW_TRY(read_real(s, "initializer_range", &c->init_std));
    SPW_TRY(read_bool(s, "tie_word_embeddings", &c->tied));
    SPW_TRY(c->family == SPW_FAMILY_GPT2 ? read_gpt2(s, c) : read_llama(s, c));
    if (section) /* GPT-2's files say 0.1 whoever reads them: not for those */
        SPW_TRY(read_dropout(s, c));
    if (c->width == 0 || c->layers == 0 || c->heads == 0 || c->mlp_width == 0)
        return SPW_RAISE(s->err, SPW_ECONFIG, "%s: %s are needed", s->name,
                         c->family == SPW_FAMILY_GPT2
                             ? "model: n_embd, n_layer, n_head"
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
    if (kind->axes) /* said in either place */
        SPW_TRY(read_bool(s, "tie_word_embeddings", &tied));
    c->tied = c->tied || tied;
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

spw_status
spw_hf_check_folder(const char *path, spw_error *err)
{
    const char *slash = strchr(path, '/');
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
