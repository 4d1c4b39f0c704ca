/*
 * Values of a config.json by their keys, and how messages call them. What reads a key that is missing or null leaves its result as it is.
 */
#ifndef SPW_HF_SOURCE_H
#define SPW_HF_SOURCE_H

#include "files_internal.h"
#include "hf_families.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An object that is read, and how messages call it. */
typedef struct source {
    const json_t *object;
    const char *name; /* of the file */
    char prefix[64];  /* of its keys: "", "model.", "rope_scaling." */
    spw_error *err;
    bool axes;    /* of a Qwen-VL, whose positions have three, alike where there is text alone */
    bool qwen_vl; /* and of these of a Qwen2-VL or 2.5-VL */
} source;

/* NULL for a key that is not there or null. */
static inline const json_t *
get(const source *s, const char *key)
{
    const json_t *v = json_object_get(s->object, key);
    return json_is_null(v) ? NULL : v;
}

static inline spw_status
say(const source *s, const char *before, const char *key, const char *after, const json_t *v, const char *advice)
{
    char *text = v == NULL ? NULL : json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    spw_status st = SPW_RAISE(s->err, SPW_ECONFIG, "%s: %s%s%s%s%.100s%s", s->name, before, s->prefix, key, after,
                              text != NULL ? text : "nothing", advice);
    free(text);
    return st;
}

static inline spw_status
refuse(const source *s, const char *key, const json_t *v)
{
    return say(s, "not supported yet: ", key, " ", v, "");
}

static inline spw_status
wrong(const source *s, const char *key, const char *expected, const json_t *v)
{
    char after[160];
    snprintf(after, sizeof after, ": expected %s, got ", expected);
    return say(s, "", key, after, v, "");
}

/* *out stays as it is where the key is missing or null. */
static inline spw_status
read_size(const source *s, const char *key, uint64_t min, uint64_t *out)
{
    const json_t *v = get(s, key);
    double x = json_number_value(v);
    char expected[64];
    if (v == NULL)
        return SPW_OK;
    snprintf(expected, sizeof expected, "integer in [%llu, 2147483648]", (unsigned long long)min);
    if (!json_is_number(v) || !(x >= (double)min && x <= 2147483648.0) || x != floor(x))
        return wrong(s, key, expected, v);
    *out = (uint64_t)x;
    return SPW_OK;
}

static inline spw_status
read_real(const source *s, const char *key, double *out)
{
    const json_t *v = get(s, key);
    if (v == NULL)
        return SPW_OK;
    *out = json_number_value(v);
    return json_is_number(v) && *out >= 0 && *out <= 1e12 ? SPW_OK : wrong(s, key, "number in [0, 1e12]", v);
}

static inline spw_status
read_bool(const source *s, const char *key, bool *out)
{
    const json_t *v = get(s, key);
    if (v == NULL)
        return SPW_OK;
    *out = json_is_true(v);
    return json_is_boolean(v) ? SPW_OK : wrong(s, key, "true or false", v);
}

/* A switch whose other position is not built. */
static inline spw_status
must_be(const source *s, const char *key, bool want)
{
    bool is = want;
    SPW_TRY(read_bool(s, key, &is));
    return is == want ? SPW_OK : refuse(s, key, get(s, key));
}

/* Whether this is the text part of Gemma 4's size without embeddings for each layer, whose class has other defaults. */
static inline bool
is_unified(const source *s)
{
    const char *type = json_string_value(get(s, "model_type"));
    return type != NULL && strncmp(type, "gemma4_unified", strlen("gemma4_unified")) == 0;
}

/* An object in s, which may be missing. */
static inline spw_status
read_member(const source *s, const char *key, source *out)
{
    *out = (source){get(s, key), s->name, "", s->err, s->axes, s->qwen_vl};
    snprintf(out->prefix, sizeof out->prefix, "%.40s%.20s.", s->prefix, key);
    return out->object == NULL || json_is_object(out->object) ? SPW_OK : wrong(s, key, "an object", out->object);
}

static inline void
set_size(json_t *o, const char *key, uint64_t n)
{
    json_object_set_new(o, key, json_integer((json_int_t)n));
}

/* hf_rope.c; sizes of heads were read. no_rope: which layers turn nothing, for families that have such. */
spw_status spw__hf_read_rope(const source *s, spw_model_config *c);
spw_status spw__hf_read_no_rope(const source *s, spw_model_config *c);
/* hf_window.c; after rope: where no layer has a window, none has a theta of its own. */
spw_status spw__hf_read_window(const source *s, spw_model_config *c);
/* hf_experts.c: sizes of latent attention, and mixtures of experts; nothing for families without. mlp_width was read. */
spw_status spw__hf_read_latent(const source *s, spw_model_config *c);
spw_status spw__hf_read_indexer(const source *s, spw_model_config *c);
void spw__hf_write_indexer(json_t *o, const spw_model_config *c);
spw_status spw__hf_read_experts(const source *s, spw_model_config *c);
spw_status spw__hf_check_router_logits(const source *s);
/* What follows from the keys of a mixture: which layers have no experts, `shared` ones for all rows, one group. */
spw_status spw__hf_settle_experts(const source *s, spw_model_config *c, uint64_t shared);
/* hf_kimi.c: Kimi Linear's layers, and its experts; and the same written. */
spw_status spw__hf_read_kimi(const source *s, spw_model_config *c);
spw_status spw__hf_read_kimi_experts(const source *s, spw_model_config *c);
void spw__hf_write_kimi(json_t *o, const spw_model_config *c);
/* hf_layer_norm.c: all of what a configuration of such a family has beside the others' first keys, and the same written. */
spw_status spw__hf_read_layer_norm(const source *s, spw_model_config *c);
void spw__hf_write_layer_norm(json_t *o, const spw_model_config *c);
/* hf_linear.c: layers by a list, of which each kind has two words; any: those without attention to all keys. */
spw_status
spw__hf_read_layer_kinds(const source *s, const char *name, const char *const words[2], spw_model_config *c, bool *any);
/*
 * hf_linear.c: Mamba-2 by keys that begin with mamba_, whose heads have `all` elements together, 0: mamba_expand times a row's; together says so where
 * they have not.
 */
spw_status spw__hf_read_mamba(const source *s, spw_model_config *c, uint64_t all, const char *together);
/* hf_linear.c: the sizes of linear attention, and what is set for such families; the same written, with which layers have it. */
spw_status spw__hf_read_linear(const source *s, spw_model_config *c);
void spw__hf_write_linear(json_t *o, const spw_model_config *c);
void spw__hf_write_mamba(json_t *o, const spw_model_config *c);
void spw__hf_write_lfm(json_t *o, const spw_model_config *c);
/* That kernels have room for heads' keys and values and for taps, which these keys say; and that steps have no other limit than none. */
spw_status spw__hf_check_linear(const source *s, const spw_model_config *c, const char *keys, const char *values,
                                const char *taps);
spw_status spw__hf_check_steps(const source *s);
/* hf_falcon.c: what sets Falcon-H1 apart; the same written. */
spw_status spw__hf_read_falcon(const source *s, spw_model_config *c);
void spw__hf_write_falcon(json_t *o, const spw_model_config *c);
/* hf_nemotron.c: all of what a configuration of Nemotron-H has beside the others' first keys, and the same written. */
spw_status spw__hf_read_nemotron(const source *s, spw_model_config *c);
void spw__hf_write_nemotron(json_t *o, const spw_model_config *c);
/* hf_deepseek4.c: all of what a configuration of DeepSeek-V4 has beside the others' first keys, and the same written. */
spw_status spw__hf_read_deepseek4(const source *s, spw_model_config *c);
void spw__hf_write_deepseek4(json_t *o, const spw_model_config *c, json_t *scaling);
/* hf_rope.c: none, or yarn, as rope says it without a theta. */
spw_status spw__hf_read_scaled_rope(const source *s, const source *rope, spw_model_config *c);
/* hf_gemma4.c: what sets Gemma 4 apart, once windows and rope were read; the same written. Nothing for other families. */
spw_status spw__hf_read_gemma4(const source *s, spw_model_config *c);
void spw__hf_write_gemma4(json_t *o, const spw_model_config *c);
/* hf_llama4.c: what sets Llama 4 apart, once rope and its layers were read; the same written. Reading does nothing for other families. */
spw_status spw__hf_read_llama4(const source *s, spw_model_config *c);
void spw__hf_write_llama4(json_t *o, const spw_model_config *c);
/* hf_mimo.c: what sets MiMo-V2 apart, once rope, windows and experts were read; the same written. Reading does nothing for other families. */
spw_status spw__hf_read_mimo(const source *s, spw_model_config *c);
void spw__hf_write_mimo(json_t *o, const spw_model_config *c);
/* hf_llama.c: all of what a configuration of Llama's relatives has beside the others' first keys. kv_heads and norm_eps: 0, or the default. */
spw_status spw__hf_read_llama(const source *s, spw_model_config *c);
/* hf_llama.c: a number above 0 that logits or scores come to at most; of a missing key otherwise, of null 0: none. */
spw_status spw__hf_read_cap(const source *s, const char *key, double otherwise, double *out);
/* hf_write.c: DeepSeek's experts, by its names. */
void spw__hf_write_shared_experts(json_t *o, const spw_model_config *c);
/* hf_write.c: the windows of who has no rope without one. */
void spw__hf_write_rope_windows(json_t *o, const spw_model_config *c);
/* hf_write.c: what is done to frequencies, under its older key, if anything is. */
void spw__hf_write_scaling(json_t *o, const spw_model_config *c);

#endif
