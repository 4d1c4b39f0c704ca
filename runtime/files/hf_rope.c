/*
 * What config.json says of rotary positions: theta, scaling by each of its names, how much of a head is turned, and which layers have
 * none; in the keys of older releases and of newer ones.
 * Source: the configuration classes of transformers.
 */
#include "hf_source.h"

/* Qwen3.5's class of text knows what is said of axes, too. */
static bool
has_axes(const source *s, const spw_model_config *c)
{
    return s->axes || c->family == SPW_FAMILY_QWEN3_5 || c->family == SPW_FAMILY_QWEN3_5_MOE;
}

/* HunYuan's, which its files call dynamic: theta is larger, whatever the text's length; 0: it is none. */
static double
alpha_of(const source *s, const spw_model_config *c)
{
    const char *kind = json_string_value(get(s, get(s, "rope_type") != NULL ? "rope_type" : "type"));
    bool dynamic = kind != NULL && strcmp(kind, "dynamic") == 0;
    return dynamic && spw__hf_of(c->family, HUNYUAN) && c->head_dim > 2 ? json_number_value(get(s, "alpha")) : 0;
}

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
    if (v == NULL || alpha_of(s, c) > 0 ||
        (kind != NULL && (strcmp(kind, "default") == 0 || (has_axes(s, c) && strcmp(kind, "mrope") == 0))))
        return SPW_OK;
    if (c->family == SPW_FAMILY_GEMMA4 && kind != NULL && strcmp(kind, "proportional") == 0) {
        c->rope = SPW_ROPE_PROPORTIONAL;
        return SPW_OK;
    }
    c->rope = kind != NULL && strcmp(kind, "linear") == 0   ? SPW_ROPE_LINEAR
              : kind != NULL && strcmp(kind, "llama3") == 0 ? SPW_ROPE_LLAMA3
              : kind != NULL && strcmp(kind, "yarn") == 0   ? SPW_ROPE_YARN
                                                            : SPW_ROPE_PLAIN;
    if (spw__hf_of(c->family, GEMMA4 | MIMO) || (spw__hf_of(c->family, LATENT | LINEAR) && c->rope != SPW_ROPE_YARN))
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
    if (spw__hf_of(c->family, LATENT)) {
        c->rope_mscale = mscale;
        c->rope_all_dim = all_dim;
    }
    if (spw__hf_of(c->family, GROWING))
        SPW_TRY(read_real(s, "llama_4_scaling_beta", &c->rope_growth));
    SPW_TRY(read_real(s, "attention_factor", &c->rope_attention));
    c->rope_truncate = json_object_get(s->object, "truncate") == NULL; /* null is false */
    return read_bool(s, "truncate", &c->rope_truncate);
}

/* A number above 0 for each frequency. */
static spw_status
read_factors(const source *s, const char *key, const spw_model_config *c, float *out)
{
    const json_t *list = get(s, key);
    uint64_t count = spw_model_rope_width(c, 0) / 2;
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
    c->rope_factor = c->rope == SPW_ROPE_PROPORTIONAL; /* 1 where nothing is said */
    SPW_TRY(read_real(s, "factor", &c->rope_factor));
    if (!(c->rope_factor >= 1))
        return wrong(s, "factor", "number of at least 1", get(s, "factor"));
    if (c->rope == SPW_ROPE_LINEAR || c->rope == SPW_ROPE_PROPORTIONAL)
        return SPW_OK;
    SPW_TRY(read_rope_positions(s, top, c));
    if (c->rope == SPW_ROPE_YARN)
        return read_yarn(s, c);
    SPW_TRY(read_real(s, "low_freq_factor", &c->rope_low));
    SPW_TRY(read_real(s, "high_freq_factor", &c->rope_high));
    if (!(c->rope_low > 0))
        return wrong(s, "low_freq_factor", "number above 0", get(s, "low_freq_factor"));
    if (!(c->rope_high >= c->rope_low)) /* alike in Llama 4's files: there is nothing between them */
        return wrong(s, "high_freq_factor", "number of at least low_freq_factor", get(s, "high_freq_factor"));
    if (c->rope_positions == 0)
        return wrong(s, "original_max_position_embeddings", "integer", NULL);
    return SPW_OK;
}

/*
 * Phi-3's, GLM's, MiniMax's, GPT-NeoX's, StableLM's, Qwen3-Next's and Qwen3.5's classes turn the first part of a head, and look in the rope object before they look beside; the
 * others know of no part. Gemma 4's proportional rope turns a part of all pairs.
 */
static spw_status
read_rope_part(const source *s, const char *key, spw_model_config *c)
{
    double part = c->rope_part > 0 ? c->rope_part : 1;
    SPW_TRY(read_real(s, key, &part));
    if (c->family == SPW_FAMILY_MISTRAL4) /* whose other keys say it */
        return get(s, key) == NULL || (uint64_t)(part * (double)c->head_dim) == c->rope_dim
                   ? SPW_OK
                   : wrong(s, key, "the share of qk_rope_head_dim in a head", get(s, key));
    if (part != 1 && c->family != SPW_FAMILY_PHI3 && c->family != SPW_FAMILY_GLM4_MOE &&
        !spw__hf_of(c->family, MINIMAX | GLM_DENSE | NEOX | STABLELM | LINEAR | MIMO | BAMBA) &&
        c->rope != SPW_ROPE_PROPORTIONAL)
        return refuse(s, key, get(s, key));
    if (!(part > 0 && part <= 1))
        return wrong(s, key, "number above 0, at most 1", get(s, key));
    c->rope_part = part < 1 || c->rope == SPW_ROPE_PROPORTIONAL ? part : 0;
    return SPW_OK;
}

/* Programs differ in what a yarn's attn_factor is: whoever reads the model elsewhere has to be told which. */
static spw_status
refuse_factor(const source *rope, const json_t *v)
{
    double factor = json_number_value(get(rope, "factor"));
    char advice[200];
    snprintf(advice, sizeof advice,
             ": transformers does not look at it, vLLM multiplies by it; take it out for the former, for the latter "
             "write \"attention_factor\": %.9g in its place",
             spw__hf_yarn_attention(factor, 1) * json_number_value(v));
    return say(rope, "not supported yet: ", "attn_factor", " ", v, advice);
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
        found =
            found || (has_axes(s, c) && (strcmp(name, "mrope_section") == 0 || strcmp(name, "mrope_interleaved") == 0));
        found = found || (spw__hf_of(c->family, GROWING) &&
                          (strcmp(name, "llama_4_scaling_beta") == 0 || strcmp(name, "max_position_embeddings") == 0));
        found = found || (strcmp(name, "alpha") == 0 && alpha_of(rope, c) > 0);
        if (!found && c->rope == SPW_ROPE_YARN && strcmp(name, "attn_factor") == 0 && json_is_number(v))
            return refuse_factor(rope, v);
        if (!found && !json_is_null(v))
            return refuse(rope, name, v);
    }
    SPW_TRY(read_rope_part(rope, "partial_rotary_factor", c));
    SPW_TRY(read_real(rope, "rope_theta", &c->rope_theta));
    if (top != NULL && c->rope_theta != json_number_value(top))
        return wrong(rope, "rope_theta", "the same as outside", get(rope, "rope_theta"));
    if (!(c->rope_theta > 0))
        return wrong(top != NULL ? s : rope, top != NULL ? theta : "rope_theta", "number above 0",
                     top != NULL ? top : get(rope, "rope_theta"));
    if (alpha_of(rope, c) > 0)
        c->rope_theta *= pow(alpha_of(rope, c), (double)c->head_dim / (double)(c->head_dim - 2));
    return read_rope_scale(rope, s, c);
}

spw_status
spw__hf_read_scaled_rope(const source *s, const source *rope, spw_model_config *c)
{
    SPW_TRY(read_rope_object(s, rope, "", c));
    return c->rope == SPW_ROPE_PLAIN || c->rope == SPW_ROPE_YARN ? SPW_OK
                                                                 : refuse(rope, "rope_type", get(rope, "rope_type"));
}

/*
 * Gemma 3's, Gemma 4's, MiMo's and OLMo 3's layers with a window and those without have an object each in newer files; in older ones scaling is for the latter.
 * There releases differ in the theta that OLMo's layers with a window have, unless it is the default.
 */
static spw_status
read_rope_by_layer(const source *s, const source *rope, bool newer, spw_model_config *c)
{
    bool olmo = c->family == SPW_FAMILY_OLMO3, mimo = c->family == SPW_FAMILY_MIMO_V2;
    spw_model_config local = {.rope_theta = olmo ? c->rope_theta : 10000};
    source full = *rope, sliding = {NULL, s->name, "", s->err, false, false};
    const char *name;
    json_t *v;
    if (c->family == SPW_FAMILY_GEMMA4 && !newer) { /* which looks at no older key */
        c->rope = SPW_ROPE_PROPORTIONAL;
        c->rope_part = 0.25;
        c->rope_factor = 1;
        c->rope_local_theta = local.rope_theta;
        return rope->object == NULL ? SPW_OK : refuse(s, "rope_scaling", rope->object);
    }
    if (newer) {
        SPW_TRY(read_member(rope, "full_attention", &full));
        SPW_TRY(read_member(rope, "sliding_attention", &sliding));
        json_object_foreach((json_t *)(uintptr_t)rope->object, name, v)
        {
            if (strcmp(name, "full_attention") != 0 && strcmp(name, "sliding_attention") != 0 && !json_is_null(v))
                return refuse(rope, name, v);
        }
    }
    if (mimo) {
        local.family = c->family;
        local.head_dim = c->head_dim;
        local.rope_part = c->rope_part;
    }
    SPW_TRY(read_rope_object(s, &full, "rope_theta", c));
    if (olmo && !newer && c->rope_theta != local.rope_theta)
        return wrong(s, "rope_theta", "500000, or rope_parameters with one for each kind of layer",
                     get(s, "rope_theta"));
    SPW_TRY(read_rope_object(s, &sliding, olmo ? "" : mimo ? "swa_rope_theta" : "rope_local_base_freq", &local));
    c->rope_local_theta = local.rope_theta;
    if (local.rope_part != c->rope_part && mimo)
        return refuse(&sliding, "partial_rotary_factor", get(&sliding, "partial_rotary_factor"));
    return local.rope == SPW_ROPE_PLAIN ? SPW_OK : refuse(&sliding, "rope_type", get(&sliding, "rope_type"));
}

/* A model's class where a key is missing; of the others theta is 10000, and a head is turned as a whole. */
static const struct class
{
    double theta, part; /* 0: as of the others */
    bool paired;        /* neighbours are turned together, whatever is said */
} classes[SPW_FAMILY_CUSTOM] = {
    [SPW_FAMILY_MIXTRAL] = {1e6},
    [SPW_FAMILY_GEMMA3] = {1e6},
    [SPW_FAMILY_GEMMA4] = {1e6},
    [SPW_FAMILY_SOLAR_OPEN] = {1e6},
    [SPW_FAMILY_OLMO3] = {5e5},
    [SPW_FAMILY_ERNIE] = {5e5, .paired = true},
    [SPW_FAMILY_ERNIE_MOE] = {5e5, .paired = true},
    [SPW_FAMILY_COHERE] = {5e5},
    [SPW_FAMILY_LLAMA4] = {5e5},
    [SPW_FAMILY_MINIMAX_M2] = {5e6},
    [SPW_FAMILY_HY_V3] = {11158840},
    [SPW_FAMILY_SMOLLM3] = {2e6},
    [SPW_FAMILY_GPT_OSS] = {150000},
    [SPW_FAMILY_GLM4_MOE] = {.part = 0.5},
    [SPW_FAMILY_GLM] = {.part = 0.5, .paired = true},
    [SPW_FAMILY_GLM4] = {.part = 0.5, .paired = true},
    [SPW_FAMILY_NEOX] = {.part = 0.25},
    [SPW_FAMILY_STABLELM] = {.part = 0.25},
    [SPW_FAMILY_QWEN3_5] = {.part = 0.25},
    [SPW_FAMILY_QWEN3_5_MOE] = {.part = 0.25},
    [SPW_FAMILY_QWEN3_NEXT] = {.part = 0.25},
    [SPW_FAMILY_MIMO_V2] = {5e6, 0.334},
    [SPW_FAMILY_BAMBA] = {.part = 0.5},
    [SPW_FAMILY_LFM2] = {1e6},
    [SPW_FAMILY_LFM2_MOE] = {1e6},
};

/*
 * OLMo Hybrid's, which turn nothing where theta is said to be null, in the object or, where that does not have it, beside it. Of an object that is null
 * without that its class makes one with a theta, and says that none is meant: so it has to be said.
 */
static spw_status
read_none(const source *s, const source *rope, spw_model_config *c)
{
    const json_t *said = json_object_get(s->object, "rope_parameters");
    const json_t *inside = json_object_get(rope->object, "rope_theta"),
                 *beside = json_object_get(s->object, "rope_theta");
    if (json_is_null(said) && beside == NULL)
        return say(
            s, "not supported yet: ", "rope_parameters", " ", said,
            ": transformers takes it for a rope_theta of 10000; write {\"rope_type\": \"default\", \"rope_theta\": "
            "null} for none, or with a theta");
    if (!json_is_null(inside) && (inside != NULL || !json_is_null(beside)))
        return SPW_OK;
    c->rope_theta = 0;
    return c->rope == SPW_ROPE_PLAIN ? SPW_OK : refuse(rope, "rope_type", get(rope, "rope_type"));
}

/* Older files: rope_theta and rope_scaling. Newer ones: rope_parameters with both. */
spw_status
spw__hf_read_rope(const source *s, spw_model_config *c)
{
    const struct class *of = &classes[c->family];
    bool newer = get(s, "rope_parameters") != NULL, minimax = c->family == SPW_FAMILY_MINIMAX_M2;
    bool neox = c->family == SPW_FAMILY_NEOX; /* with names of its own */
    bool by_layer = spw__hf_of(c->family, GEMMA3 | GEMMA4 | OLMO3 | MIMO);
    uint64_t turned = c->head_dim;
    source rope;
    if (c->family == SPW_FAMILY_KIMI_LINEAR) { /* which has none, whatever is said */
        c->rope_theta = 0;
        return newer ? refuse(s, "rope_parameters", get(s, "rope_parameters")) : SPW_OK;
    }
    if (newer && get(s, "rope_scaling") != NULL)
        return SPW_RAISE(s->err, SPW_ECONFIG, "%s: %srope_parameters and rope_scaling say the same twice", s->name,
                         s->prefix);
    c->rope_theta = of->theta > 0 ? of->theta : 10000;
    if (!spw__hf_of(c->family, LINEAR) && (s->qwen_vl || s->axes))
        c->rope_theta = s->qwen_vl ? 1e6 : 5e5;
    c->rope_paired = c->rope_paired || of->paired;
    c->rope_part = of->part;
    if (minimax && c->head_dim > 0) { /* the older name */
        SPW_TRY(read_size(s, "rotary_dim", 2, &turned));
        if (turned > c->head_dim)
            return wrong(s, "rotary_dim", "no more than head_dim", get(s, "rotary_dim"));
        c->rope_part = (double)turned / (double)c->head_dim;
    }
    SPW_TRY(read_rope_part(s, neox ? "rotary_pct" : "partial_rotary_factor", c));
    SPW_TRY(read_member(s, newer ? "rope_parameters" : "rope_scaling", &rope));
    if (spw__hf_of(c->family, GPT_OSS | GROWING) && rope.object == NULL)
        return wrong(s, c->family == SPW_FAMILY_GPT_OSS ? "rope_scaling" : "rope_parameters",
                     "an object, as the family's folders have it", NULL);
    SPW_TRY(by_layer ? read_rope_by_layer(s, &rope, newer, c)
                     : read_rope_object(s, &rope, neox ? "rotary_emb_base" : "rope_theta", c));
    if (c->family == SPW_FAMILY_OLMO_HYBRID)
        SPW_TRY(read_none(s, &rope, c));
    return spw__hf_of(c->family, GROWING) && c->rope != SPW_ROPE_YARN
               ? refuse(&rope, "rope_type", get(&rope, "rope_type"))
               : SPW_OK;
}

/* The list, which counts more than the interval, must be what some interval gives. */
spw_status
spw__hf_read_no_rope(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "no_rope_layers");
    uint64_t with = 0;
    if (c->family != SPW_FAMILY_SMOLLM3 && c->family != SPW_FAMILY_LLAMA4)
        return SPW_OK;
    if (c->family == SPW_FAMILY_LLAMA4 && json_is_array(list) && json_array_size(list) == 0)
        list = NULL; /* as its files have it: by the interval */
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
