/*
 * What config.json says of which layers have a window, chunks, or linear attention, in place of attention to all keys. layer_types, where it stands, has to
 * say the same as the other keys do.
 * Source: the configuration classes of transformers.
 */
#include "hf_source.h"

static bool
is_full(const json_t *layer_types, uint64_t l)
{
    const char *text = json_string_value(json_array_get(layer_types, l));
    return text != NULL && strcmp(text, "full_attention") == 0;
}

/* Counted from 1; one more than there are: none is. */
static uint64_t
first_full(const json_t *layer_types)
{
    uint64_t l = 0;
    while (l < json_array_size(layer_types) && !is_full(layer_types, l))
        l++;
    return l + 1;
}

/* layer_types, where it is given, must say what the other keys do; for qwen it sets where windows begin. */
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
        const char *want = c->index_keys > 0            ? "indexed_attention"
                           : spw_model_is_linear(c, l)  ? "linear_attention"
                           : spw_model_chunk(c, l) > 0  ? "chunked_attention"
                           : spw_model_window(c, l) > 0 ? "sliding_attention"
                                                        : "full_attention";
        char key[40];
        snprintf(key, sizeof key, "layer_types[%llu]", (unsigned long long)l);
        if (text == NULL || strcmp(text, want) != 0)
            return refuse(s, key, json_array_get(list, l));
    }
    return SPW_OK;
}

/*
 * Gemma's, gpt-oss's, OLMo 3's, EXAONE's, Cohere 2's and AFMoE's windows: in all layers but each so many-th, by layer_types where that is given; else Gemma 3's and
 * the last three's by a number. Their layers without one have no rope, EXAONE's unless none has one.
 */
static spw_status
read_windows_between(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "layer_types"), *said = json_object_get(s->object, "sliding_window");
    bool exaone = spw__hf_of(c->family, EXAONE), afmoe = c->family == SPW_FAMILY_AFMOE;
    bool skips = exaone || afmoe || c->family == SPW_FAMILY_COHERE2;
    if (exaone && json_is_null(said))
        return read_layer_types(s, c, false);
    c->window = c->family == SPW_FAMILY_GPT_OSS  ? 128 /* the classes' defaults */
                : afmoe                          ? 1024
                : c->family == SPW_FAMILY_GEMMA4 ? (is_unified(s) ? 1024 : 512)
                                                 : 4096;
    c->full_every = c->family == SPW_FAMILY_GPT_OSS || c->family == SPW_FAMILY_GEMMA2 ? 2
                    : c->family == SPW_FAMILY_OLMO3 || skips                          ? 4
                                                                                      : 6;
    SPW_TRY(read_size(s, "sliding_window", 1, &c->window));
    if (c->family == SPW_FAMILY_GEMMA3 || (skips && list == NULL)) /* else a text, "LLLG" */
        SPW_TRY(read_size(s, afmoe ? "global_attn_every_n_layers" : "sliding_window_pattern", 1, &c->full_every));
    if (json_is_array(list))
        c->full_every = first_full(list);
    SPW_TRY(read_layer_types(s, c, false));
    if (skips)
        c->rope_skip_every = c->full_every > c->layers ? 0 : c->full_every;
    if (c->full_every == 1) {
        c->window = c->full_every = 0;
        c->rope_local_theta = 0;
    }
    if (c->full_every > c->layers)
        c->full_every = 0;
    return c->window > 0 && json_is_null(said) ? wrong(s, "sliding_window", "integer", said) : SPW_OK;
}

/* Linear attention's: a layer's is full where it is the last of each so many; a list counts more than their number. OLMo Hybrid has both kinds. */
static spw_status
read_full_between(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "layer_types");
    c->full_every = 4;
    SPW_TRY(read_size(s, "full_attention_interval", 1, &c->full_every));
    if (c->full_every > c->layers) /* as the list would have it, in which no layer is full */
        c->full_every = c->layers + 1;
    if (c->family == SPW_FAMILY_OLMO_HYBRID && list == NULL && c->full_every > c->layers)
        c->full_every = c->layers; /* the last one then */
    if (json_is_array(list))
        c->full_every = first_full(list);
    if (c->family == SPW_FAMILY_OLMO_HYBRID && (c->full_every == 1 || c->full_every > c->layers))
        return list != NULL ? refuse(s, "layer_types", list)
                            : refuse(s, "num_hidden_layers", get(s, "num_hidden_layers"));
    return read_layer_types(s, c, false);
}

/*
 * MiMo's layers without a window: the first ones, and behind them each so many-th; by layer_types, or as the class has it. What its files say
 * beside counts more, and is of keys before the row.
 */
static spw_status
read_windows_behind(const source *s, spw_model_config *c)
{
    const json_t *list = get(s, "layer_types");
    uint64_t before = 128;
    c->window = before + 1;
    c->window_from = 1;
    c->full_every = 6;
    SPW_TRY(read_size(s, "sliding_window", 1, &c->window));
    SPW_TRY(read_size(s, "sliding_window_size", 0, &before));
    if (get(s, "sliding_window_size") != NULL)
        c->window = before + 1;
    if (json_is_array(list)) {
        for (c->window_from = 0; is_full(list, c->window_from); c->window_from++) {
        }
        for (c->full_every = c->window_from + 1; c->full_every <= json_array_size(list); c->full_every++) {
            if (is_full(list, c->full_every - 1))
                break;
        }
    }
    if (c->full_every > c->layers)
        c->full_every = 0;
    if (c->window_from >= c->layers)
        c->window = c->window_from = c->full_every = 0;
    if (c->window == 0)
        c->rope_local_theta = 0;
    return read_layer_types(s, c, false);
}

spw_status
spw__hf_read_window(const source *s, spw_model_config *c)
{
    bool moe = c->family == SPW_FAMILY_QWEN3_MOE; /* a window is for all of its layers */
    bool dots = c->family == SPW_FAMILY_DOTS1;    /* as qwen, and always used */
    bool qwen = c->family == SPW_FAMILY_QWEN2 || c->family == SPW_FAMILY_QWEN3 || dots;
    bool none = spw__hf_of(c->family, MIXTRAL | PHI3 | OF(MINISTRAL3)); /* where nothing is said */
    bool idle = spw__hf_of(c->family, SMOLLM3 | QWEN2_MOE);             /* said, and not used */
    bool used = c->family == SPW_FAMILY_MISTRAL || dots || none;
    bool said = json_object_get(s->object, "sliding_window") != NULL || none;
    if (spw__hf_of(c->family, LINEAR | OLMO_HYBRID))
        return read_full_between(s, c);
    if (spw__hf_of(c->family, GRANITE4 | LFM | BAMBA | KIMI)) /* it is read where their other layers are */
        return SPW_OK;
    if (c->family == SPW_FAMILY_LLAMA4) { /* null is none */
        c->chunk = json_is_null(json_object_get(s->object, "attention_chunk_size")) ? 0 : 8192;
        SPW_TRY(read_size(s, "attention_chunk_size", 1, &c->chunk));
    }
    if (c->family == SPW_FAMILY_MIMO_V2)
        return read_windows_behind(s, c);
    if (spw__hf_of(c->family, FULL))
        return read_layer_types(s, c, false);
    if (spw__hf_of(c->family, GEMMAS | GPT_OSS | OLMO3 | EXAONE | COHERE2 | AFMOE))
        return read_windows_between(s, c);
    if (!qwen && !moe)
        SPW_TRY(must_be(s, "use_sliding_window", used));
    else if (!dots)
        SPW_TRY(read_bool(s, "use_sliding_window", &used));
    if (used) {
        c->window = said ? 0 : 4096; /* the classes' default; null is none */
        SPW_TRY(read_size(s, "sliding_window", 1, &c->window));
        c->window_from = s->qwen_vl ? 80 : dots ? 62 : qwen ? 28 : 0;
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
