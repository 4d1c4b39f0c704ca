/*
 * Hugging Face's config.json into a model's configuration. The reader takes what the families of this library
 * compute and refuses by name what would make another model of the same weights; no key that changes numbers is ignored.
 * Llama's relatives have a reader of their own (hf_llama.c), and so have those with LayerNorms (hf_layer_norm.c).
 * Source: the configuration classes of several releases of transformers, older and newer rope keys.
 */
#include "hf_source.h"
#include <errno.h>
#include <strings.h>
#include <unistd.h>

enum { CONFIG_BYTES_MAX = 4 << 20 };

static spw_status
read_gpt2(const source *s, spw_model_config *c)
{
    c->norm_eps = 1e-5;
    c->tied = true;
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

#define QWEN2_VL                                                                                                       \
    {                                                                                                                  \
        .vocab = 152064, .positions = 32768, .width = 8192, .layers = 80, .heads = 64, .kv_heads = 8,                  \
        .mlp_width = 29568, .norm_eps = 1e-5                                                                           \
    }
/* Models of text and images, as most sizes of Gemma 3, all of Gemma 4 and Mistral Small 3 are published, and what their text part is. */
static const struct with_images {
    const char *type, *architecture, *text_type;
    spw_family text;
    const char *published; /* how folders call the architecture that transformers did not write; NULL: as it does */
    bool axes;
    bool qwen_vl;             /* then the text's keys may also stand beside the others */
    spw_model_config missing; /* what a missing key is; 0: as in a model of text */
} with_images[] = {
    {"gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", SPW_FAMILY_GEMMA3,
     .missing = {.vocab = 262208, .positions = 131072, .width = 2304, .layers = 26, .heads = 8, .mlp_width = 9216}},
    {"llama4", "Llama4ForConditionalGeneration", "llama4_text", SPW_FAMILY_LLAMA4,
     .missing = {.vocab = 202048, .positions = 131072, .width = 5120, .layers = 48, .heads = 40, .mlp_width = 8192}},
    {"mistral3", "Mistral3ForConditionalGeneration", "mistral", SPW_FAMILY_MISTRAL, .missing = {.vocab = 0}},
    {"kimi_k25", "Kimi_K25ForConditionalGeneration", "kimi_k2", SPW_FAMILY_DEEPSEEK_V3,
     .published = "KimiK25ForConditionalGeneration", .missing = {.vocab = 0}},
    {"qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text", SPW_FAMILY_QWEN2, NULL, true, true, QWEN2_VL},
    {"qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", SPW_FAMILY_QWEN2, NULL, true, true,
     QWEN2_VL},
    {"qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", SPW_FAMILY_QWEN3, .axes = true,
     .missing = {.vocab = 151936, .positions = 128000, .width = 4096, .layers = 32, .heads = 32, .mlp_width = 22016}},
    {"qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", SPW_FAMILY_QWEN3_MOE, .axes = true,
     .missing = {.vocab = 151936,
                 .positions = 128000,
                 .width = 2048,
                 .layers = 24,
                 .heads = 16,
                 .kv_heads = 16,
                 .mlp_width = 5632}},
    {"qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", SPW_FAMILY_QWEN3_5, .axes = true,
     .missing = {.vocab = 248320, .positions = 32768, .width = 4096, .layers = 32, .heads = 16, .mlp_width = 12288}},
    {"qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", SPW_FAMILY_QWEN3_5_MOE, .axes = true,
     .missing = {.vocab = 248320, .positions = 32768, .width = 2048, .layers = 40, .heads = 16}},
    {"gemma4", "Gemma4ForConditionalGeneration", "gemma4_text", SPW_FAMILY_GEMMA4,
     .missing = {.vocab = 262144, .positions = 131072, .width = 2304, .layers = 30, .heads = 8, .mlp_width = 9216}},
    {"gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", SPW_FAMILY_GEMMA4,
     .missing = {.vocab = 262144, .positions = 262144, .width = 2304, .layers = 30, .heads = 8, .mlp_width = 9216}}};

/* Relatives of what is computed here, and what of them is not; of others, what is. */
static const char *
missing_of(const char *type)
{
    for (size_t i = 0; i < sizeof with_images / sizeof with_images[0]; i++) {
        if (strcmp(type, with_images[i].type) == 0)
            return ": of a model of text and images only a folder's text part is read";
    }
    return " (spillway help config model_type names all that are)";
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
    bool gelu = family == SPW_FAMILY_GPT2 || spw__hf_of(family, GEMMAS), older;
    const char *key = family == SPW_FAMILY_GPT2    ? "activation_function"
                      : spw__hf_of(family, GEMMAS) ? "hidden_activation"
                                                   : "hidden_act";
    const json_t *v = get(s, key);
    const char *name;
    if (spw__hf_of(family, LAYER_NORM | NEMOTRON)) /* they have more than one, or other keys */
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
    spw_scaled unused;
    const char *refused = q == NULL || is_mxfp4(family, q) ? NULL : spw__scaled_refused(q, &unused);
    source inner;
    if (refused == NULL)
        return SPW_OK;
    if (strcmp(refused, "quant_method") == 0)
        return say(s, "not supported yet: ", "quantization_config", " ", q,
                   ": take the folder that was quantized; spillway.frozen_codes makes codes of its weights");
    SPW_TRY(read_member(s, "quantization_config", &inner));
    return say(&inner, "not supported yet: ", refused, " ", get(&inner, refused),
               ": of 8-bit floats e4m3 is read, with a scale for each block of weights or for all of a matrix, of "
               "compressed-tensors symmetric integers of 4 or 8 bits that are packed (pack-quantized) and floats of 4 "
               "(nvfp4-pack-quantized, mxfp4-pack-quantized), and of modelopt NVFP4");
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
    return *out == kind->text || (kind->text == SPW_FAMILY_MISTRAL && spw__hf_of(*out, GROWING))
               ? SPW_OK
               : refuse(s, "model_type", type);
}

/* kind: whose text part this is; NULL: a model of text. */
static spw_status
read_config(const source *s, bool section, const struct with_images *kind, spw_model_config *c)
{
    memset(c, 0, sizeof *c);
    if (kind != NULL)
        *c = kind->missing;
    SPW_TRY(kind != NULL ? read_text_family(s, kind, &c->family) : read_family(s, &c->family));
    SPW_TRY(check_activation(s, c->family));
    SPW_TRY(check_quantization(s, c->family));
    c->vocab = c->vocab > 0 ? c->vocab : 256;
    c->positions = c->positions > 0 ? c->positions : 1024;
    c->init_std = c->family == SPW_FAMILY_STARCODER2 ? 0.018042 : 0.02;
    SPW_TRY(read_size(s, "vocab_size", 1, &c->vocab));
    SPW_TRY(read_real(s, "initializer_range", &c->init_std));
    SPW_TRY(c->family == SPW_FAMILY_GPT2         ? read_gpt2(s, c)
            : spw__hf_of(c->family, LAYER_NORM)  ? spw__hf_read_layer_norm(s, c)
            : spw__hf_of(c->family, NEMOTRON)    ? spw__hf_read_nemotron(s, c)
            : spw__hf_of(c->family, DEEPSEEK_V4) ? spw__hf_read_deepseek4(s, c)
                                                 : spw__hf_read_llama(s, c));
    SPW_TRY(read_bool(s, "tie_word_embeddings", &c->tied)); /* last: readers set what it is where nothing is said */
    if (section) /* GPT-2's files say 0.1 whoever reads them: not for those */
        SPW_TRY(read_dropout(s, c));
    if (c->width == 0 || c->layers == 0 || c->heads == 0 || c->mlp_width == 0)
        return SPW_RAISE(s->err, SPW_ECONFIG, "%s: %s are needed", s->name,
                         c->family == SPW_FAMILY_GPT2 ? "model: n_embd, n_layer, n_head"
                         : c->family == SPW_FAMILY_DEEPSEEK_V4
                             ? "model: hidden_size, num_hidden_layers, num_attention_heads"
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
spw__hf_has_images(const json_t *root)
{
    return find_images(&(source){.object = root}) != NULL;
}

static bool
is_architecture(const json_t *v, const struct with_images *kind)
{
    const char *name = json_string_value(v);
    return name != NULL &&
           (strcmp(name, kind->architecture) == 0 || (kind->published != NULL && strcmp(name, kind->published) == 0));
}

static spw_status
read_text_part(const source *s, const struct with_images *kind, spw_model_config *c)
{
    const json_t *list = get(s, "architectures"), *built_as = json_is_array(list) ? json_array_get(list, 0) : list;
    bool apart = json_is_object(get(s, "text_config")), tied = false;
    source text = {apart ? get(s, "text_config") : s->object, s->name, "", s->err, kind->axes, kind->qwen_vl};
    if (built_as != NULL && !is_architecture(built_as, kind))
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

char *
spw_hf_plain_json(const char *text)
{
    static const char *const word = "Infinity", *const instead = "{\"__float__\": \"Infinity\"}";
    uint64_t extra = 0;
    char *out, *to;
    bool quoted = false;
    for (const char *at = text; (at = strstr(at, word)) != NULL; at++)
        extra += strlen(instead);
    out = to = spw_mem_calloc(strlen(text) + extra + 1, 1);
    for (const char *at = text; out != NULL && *at != '\0';) {
        if (!quoted && strncmp(at, word, strlen(word)) == 0) {
            to = (char *)memcpy(to, instead, strlen(instead)) + strlen(instead);
            at += strlen(word);
            continue;
        }
        quoted ^= *at == '"';
        if (quoted && at[0] == '\\' && at[1] != '\0')
            *to++ = *at++;
        *to++ = *at++;
    }
    if (out != NULL)
        *to = '\0';
    return out;
}

/* The object that a text is, which becomes the caller's. */
static spw_status
parse_object(json_t **out, const char *text, const char *name, spw_error *err)
{
    json_error_t where;
    char *plain = spw_hf_plain_json(text);
    *out = NULL;
    if (plain == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s", name);
    *out = json_loads(plain, JSON_REJECT_DUPLICATES, &where);
    spw_mem_free(plain);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "%s:%d:%d: %s", name, where.line, where.column, where.text);
    if (json_is_object(*out))
        return SPW_OK;
    json_decref(*out);
    *out = NULL;
    return SPW_RAISE(err, SPW_ECONFIG, "%s: not a JSON object", name);
}

static spw_status
read_root(spw_model_config *out, const json_t *root, const char *name, bool section, spw_error *err)
{
    source s = {root, name, "", err, false, false};
    const struct with_images *kind = section ? NULL : find_images(&s);
    snprintf(s.prefix, sizeof s.prefix, "%s", section ? "model." : "");
    return kind != NULL ? read_text_part(&s, kind, out) : read_config(&s, section, NULL, out);
}

spw_status
spw_hf_config_parse(spw_model_config *out, const char *json_text, const char *name, bool section, spw_error *err)
{
    json_t *root;
    spw_status st = parse_object(&root, json_text, name, err);
    if (st == SPW_OK)
        st = read_root(out, root, name, section, err);
    json_decref(root);
    return st;
}

spw_status
spw__hf_folder_config(json_t **out, char file[SPW_HF_CONFIG_PATH_BYTES], const char *folder, spw_error *err)
{
    char *text;
    spw_status st;
    *out = NULL;
    if (snprintf(file, SPW_HF_CONFIG_PATH_BYTES, "%s/config.json", folder) >= SPW_HF_CONFIG_PATH_BYTES)
        return SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", folder);
    SPW_TRY(spw_file_read_text(file, CONFIG_BYTES_MAX, &text, err));
    st = parse_object(out, text, file, err);
    spw_mem_free(text);
    return st;
}

spw_status
spw_hf_check_folder(const char *path, spw_error *err)
{
    const char *slash = strchr(path, '/');
    char what[SPW_HF_WHAT_BYTES], cache[SPW_HUB_PATH_BYTES];
    if (spw_dir_has(path, "adapter_config.json") && !spw_dir_has(path, "config.json") &&
        spw_hf_has_other_weights(path, what))
        return SPW_RAISE(err, SPW_ENOENT,
                         "%s has %s, and no model: spillway export merges them into that model's weights (--model "
                         "FOLDER, where adapter_config.json names no folder here)",
                         path, what);
    if (access(path, F_OK) == 0 || errno != ENOENT || path[0] == '.' || slash == NULL || slash == path ||
        slash[1] == '\0' || strchr(slash + 1, '/') != NULL)
        return SPW_OK;
    if (spw_hub_count(path) > 0)
        return SPW_RAISE(
            err, SPW_ENOENT,
            "%s: there is no such folder, and what the Hugging Face cache has of this model (%u commit%s) is "
            "not what is named: OWNER/NAME@COMMIT names one",
            path, spw_hub_count(path), spw_hub_count(path) > 1 ? "s" : "");
    return SPW_RAISE(
        err, SPW_ENOENT,
        "%s: there is no such folder, and no model of that name in the Hugging Face cache (%s): \"hf download "
        "%.*s\" fetches it there",
        path, spw_hub_cache(cache) ? cache : "HF_HOME is not set, nor HOME", (int)strcspn(path, "@"), path);
}

spw_status
spw_hf_config_load(spw_model_config *out, const char *folder, spw_error *err)
{
    char file[SPW_HF_CONFIG_PATH_BYTES];
    json_t *root;
    spw_status st;
    SPW_TRY(spw_hf_check_folder(folder, err));
    if (access(folder, F_OK) != 0 && errno == ENOENT)
        return SPW_RAISE(
            err, SPW_ENOENT,
            "there is no folder %s; \"hf download OWNER/NAME --local-dir %s\" fetches a model of the Hugging "
            "Face hub to it",
            folder, folder);
    SPW_TRY(spw__hf_folder_config(&root, file, folder, err));
    st = read_root(out, root, file, false, err);
    json_decref(root);
    return st;
}
