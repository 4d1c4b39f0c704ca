/*
 * Which tensor of a Hugging Face folder is which parameter of a model: by name, whatever files call it, with every type and shape
 * checked. Source: the models of transformers (tensor names; what old files hold besides parameters).
 */
#include "hf_families.h"
#include "hf_reader.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

/* What stands behind X of a parameter X.weight that files have as codes: the codes, their shape, and their scales. */
#define PACKED       ".weight_packed"
#define PACKED_SHAPE ".weight_shape"
#define SCALE        ".weight_scale"
#define SCALE_INV    ".weight_scale_inv"
#define SCALE_PLAIN  ".scale"               /* DeepSeek-V4's */
#define SCALE_OF_ALL ".weight_global_scale" /* what scales are divided by */
#define SCALE_2      ".weight_scale_2"      /* its inverse */

typedef spw__hf_entry entry;
typedef spw__hf_mapped mapped;

static bool
begins_with(const char *text, const char *begin)
{
    return strncmp(text, begin, strlen(begin)) == 0;
}

/* Families whose files say block_sparse_moe where transformers 5 has mlp in memory, and other names for an expert's matrices. */
#define OLDER_EXPERTS (MIXTRAL | MINIMAX)
#define NUMBERED      (OLDER_EXPERTS | DEEPSEEK_V4 | LFM_MOE | KIMI) /* whose experts' matrices are w1, w3 and w2 */

/* What transformers 5 has in memory under other names than in files: who saves that writes those, and it reads both. */
static const struct {
    spw_family family;
    const char *there, *here;
} in_memory[] = {{SPW_FAMILY_ERNIE_MOE, ".mlp.gate.moe_statics.", ".mlp.moe_statics."},
                 {SPW_FAMILY_EXAONE_MOE, ".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"},
                 {SPW_FAMILY_HY_V3, ".mlp.gate.", ".mlp.router.gate."},
                 {SPW_FAMILY_HY_V3, ".mlp.e_score_correction_bias", ".mlp.expert_bias"},
                 {SPW_FAMILY_HY_V3, ".mlp.shared_experts.", ".mlp.shared_mlp."},
                 {SPW_FAMILY_KIMI_LINEAR, ".mlp.experts.", ".block_sparse_moe.experts."},
                 {SPW_FAMILY_KIMI_LINEAR, ".mlp.gate.", ".block_sparse_moe.gate."},
                 {SPW_FAMILY_KIMI_LINEAR, ".mlp.shared_experts.", ".block_sparse_moe.shared_experts."},
                 {SPW_FAMILY_KIMI_LINEAR, ".block_sparse_moe.gate_proj.", ".mlp.gate_proj."}, /* as it saves all MLPs */
                 {SPW_FAMILY_KIMI_LINEAR, ".block_sparse_moe.up_proj.", ".mlp.up_proj."},
                 {SPW_FAMILY_KIMI_LINEAR, ".block_sparse_moe.down_proj.", ".mlp.down_proj."},
                 {SPW_FAMILY_KIMI_LINEAR, ".self_attn.forget_gate.", ".self_attn."},
                 {SPW_FAMILY_MIMO_V2, ".self_attn.sinks", ".self_attn.attention_sink_bias"}};

/* What DeepSeek-V4's files call what transformers has in memory, by what stands in a name; they may be without "model.". */
static const struct {
    const char *there, *here;
} of_deepseek4[] = {
    {".attn.indexer.compressor.norm.", ".self_attn.compressor.indexer.kv_norm."},
    {".attn.indexer.compressor.", ".self_attn.compressor.indexer."},
    {".attn.indexer.weights_proj.", ".self_attn.compressor.indexer.scorer.weights_proj."},
    {".attn.indexer.wq_b.", ".self_attn.compressor.indexer.q_b_proj."},
    {".attn.compressor.norm.", ".self_attn.compressor.kv_norm."},
    {".attn.norm.", ".self_attn.kv_norm."},
    {".attn.attn_sink", ".self_attn.sinks"},
    {".compressor.indexer.norm.", ".compressor.indexer.kv_norm."}, /* as it saves what it read by its own names */
    {".compressor.norm.", ".compressor.kv_norm."},
    {".self_attn.norm.", ".self_attn.kv_norm."},
    {".attn.", ".self_attn."},
    {".attn_norm.", ".input_layernorm."},
    {".ffn_norm.", ".post_attention_layernorm."},
    {".hc_attn_", ".attn_hc."},
    {".hc_ffn_", ".ffn_hc."},
    {".ffn.gate.bias", ".mlp.gate.e_score_correction_bias"},
    {".ffn.shared_experts.w1.", ".mlp.shared_experts.gate_proj."},
    {".ffn.shared_experts.w2.", ".mlp.shared_experts.down_proj."},
    {".ffn.shared_experts.w3.", ".mlp.shared_experts.up_proj."},
    {".ffn.", ".mlp."},
    {".ape", ".position_bias"},
    {".wq_a.", ".q_a_proj."},
    {".wq_b.", ".q_b_proj."},
    {".wkv.", ".kv_proj."},
    {".wgate.", ".gate_proj."},
    {".wo_a.", ".o_a_proj."},
    {".wo_b.", ".o_b_proj."},
    {".q_norm.", ".q_a_norm."}};

static const char *
name_of_deepseek4(const char *name, char room[SPW_TENSOR_NAME_BYTES])
{
    static const char *const beside[][2] = {{"head.weight", "lm_head.weight"},
                                            {"embed.weight", "model.embed_tokens.weight"},
                                            {"model.embed.weight", "model.embed_tokens.weight"},
                                            {"norm.weight", "model.norm.weight"},
                                            {"hc_head_fn", "model.hc_head.hc_fn"},
                                            {"hc_head_base", "model.hc_head.hc_base"},
                                            {"hc_head_scale", "model.hc_head.hc_scale"}};
    for (size_t i = 0; i < sizeof beside / sizeof beside[0]; i++)
        if (strcmp(name, beside[i][0]) == 0)
            return beside[i][1];
    snprintf(room, SPW_TENSOR_NAME_BYTES, "%s%s", begins_with(name, "layers.") ? "model." : "", name);
    for (size_t i = 0; i < sizeof of_deepseek4 / sizeof of_deepseek4[0]; i++) {
        const char *found = strstr(room, of_deepseek4[i].there);
        char after[SPW_TENSOR_NAME_BYTES];
        if (found == NULL)
            continue;
        snprintf(after, sizeof after, "%.*s%s%s", (int)(found - room), room, of_deepseek4[i].here,
                 found + strlen(of_deepseek4[i].there));
        memcpy(room, after, sizeof after);
    }
    return room;
}

/* GPT-2's files may have a prefix, and the text part of a model with images has, older or newer ("model.language_model.norm.weight"). */
const char *
spw__hf_name_here(const char *name, spw_family family, char room[SPW_TENSOR_NAME_BYTES])
{
    const char *prefix = family == SPW_FAMILY_GPT2 ? "transformer." : "language_model.", *mlp = strstr(name, ".mlp.");
    const char *at;
    if (family == SPW_FAMILY_DEEPSEEK_V4)
        return name_of_deepseek4(name, room);
    if (mlp != NULL && spw__hf_of(family, OLDER_EXPERTS)) {
        snprintf(room, SPW_TENSOR_NAME_BYTES, "%.*s.block_sparse_moe.%s", (int)(mlp - name), name,
                 mlp + strlen(".mlp."));
        return room;
    }
    for (size_t i = 0; i < sizeof in_memory / sizeof in_memory[0]; i++) {
        if (in_memory[i].family == family && (at = strstr(name, in_memory[i].there)) != NULL) {
            snprintf(room, SPW_TENSOR_NAME_BYTES, "%.*s%s%s", (int)(at - name), name, in_memory[i].here,
                     at + strlen(in_memory[i].there));
            return room;
        }
    }
    if (family == SPW_FAMILY_OPT && begins_with(name, "decoder.")) { /* of the class without a head */
        snprintf(room, SPW_TENSOR_NAME_BYTES, "model.%s", name);
        return room;
    }
    if (family == SPW_FAMILY_NEOX && strcmp(name, "lm_head.weight") == 0) /* as transformers 5 has it in memory */
        return "embed_out.weight";
    if (family == SPW_FAMILY_NEMOTRON_H && begins_with(name, "model.")) { /* likewise */
        snprintf(room, SPW_TENSOR_NAME_BYTES, "backbone.%s", name + strlen("model."));
        return room;
    }
    if (begins_with(name, "model.language_model.")) {
        snprintf(room, SPW_TENSOR_NAME_BYTES, "model.%s", name + strlen("model.language_model."));
        return room;
    }
    return begins_with(name, prefix) ? name + strlen(prefix) : name;
}

static bool
ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* What makes keys and values, of a layer that reads another's: its class has none, and older files have. */
static bool
is_of_reader(const char *name, const spw_model_config *c)
{
    uint64_t l = strtoull(name + strlen("model.layers."), NULL, 10);
    return spw_model_keys_of(c, l) != l &&
           (strstr(name, ".self_attn.k_") != NULL || strstr(name, ".self_attn.v_") != NULL);
}

/*
 * What files hold besides a text model's parameters, and whose: what reads images and sounds (`within`: below "model.", where newer files have
 * all), layers that predict further tokens, old masks and tables of frequencies, and of 8-bit files scales for who rounds activations.
 */
static const struct {
    hf_families families;
    const char *begin, *end;
    bool within;
} besides[] = {
    {MISTRAL | MISTRAL4 | GEMMA3 | DEEPSEEK_V3, "vision_tower.", "", true},
    {DEEPSEEK_V3, "mm_projector.", "", true},
    {MISTRAL | MISTRAL4 | GEMMA3 | LLAMA4, "multi_modal_projector.", "", true},
    {LLAMA4, "vision_model.", "", true},
    {GEMMA4, "vision_", "", true},
    {GEMMA4, "embed_vision.", "", true},
    {GEMMA4, "audio_tower.", "", true},
    {GEMMA4, "embed_audio.", "", true},
    {QWEN | OF(QWEN3_MOE) | LINEAR, "visual.", "", true},
    {LINEAR | NEMOTRON | DEEPSEEK_V4, "mtp.", "", false},
    {DEEPSEEK_V4, "mtp.", "", true},
    {MIMO, "mtp.", "", true},
    {ERNIE_MOE, "mtp_", "", true},
    {GPT2, "h.", ".attn.bias", false},
    {GPT2, "h.", ".attn.masked_bias", false},
    {NEOX, "", ".attention.bias", false},
    {NEOX, "", ".attention.masked_bias", false},
    {~GPT2, "", ".rotary_emb.inv_freq", false},
    {~GPT2, "", ".activation_scale", false},
    {~GPT2, "", ".input_scale", false},
    {~GPT2, "", ".input_global_scale", false},
    {~GPT2, "", ".k_scale", false},
    {~GPT2, "", ".v_scale", false},
};

bool
spw__hf_is_passed_over(const char *name, const spw_model_config *c)
{
    const char *inner = begins_with(name, "model.") ? name + strlen("model.") : name;
    for (size_t i = 0; i < sizeof besides / sizeof *besides; i++)
        if (spw__hf_of(c->family, besides[i].families) &&
            begins_with(besides[i].within ? inner : name, besides[i].begin) && ends_with(name, besides[i].end))
            return true;
    if (!begins_with(name, "model.layers."))
        return false;
    return (c->readers > 0 && is_of_reader(name, c)) ||
           (c->sigmoid && !c->experts_weighed && /* of GLM and DeepSeek, further tokens' */
            strtoull(name + strlen("model.layers."), NULL, 10) >= c->layers);
}

static bool
is_head(const char *name, const spw_model_config *c)
{
    char head[48];
    snprintf(head, sizeof head, "%s.weight", spw_family_head(c->family));
    return strcmp(name, head) == 0;
}

/* A tied model's lm_head.weight, where a file has one, must be the embedding. */
static spw_status
compare_tied(spw_hf_reader *r, uint32_t head, uint32_t embedding, spw_error *err)
{
    const spw_tensor_info *a = r->tensors[head].info, *b = r->tensors[r->of_param[embedding]].info;
    uint64_t n = b->shape[0] * b->shape[1];
    bool same = a->ndim == 2 && a->shape[0] == b->shape[0] && a->shape[1] == b->shape[1];
    for (uint64_t at = 0; same && at < n; at += SPW__HF_BLOCK) {
        float x[SPW__HF_BLOCK], y[SPW__HF_BLOCK];
        uint64_t count = n - at < SPW__HF_BLOCK ? n - at : SPW__HF_BLOCK;
        SPW_TRY(spw__hf_read_floats(r, head, at, count, x, err));
        SPW_TRY(spw__hf_read_bound(r, embedding, at, count, y, err));
        same = memcmp(x, y, count * sizeof *x) == 0;
    }
    if (!same)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s differs from %s, and tie_word_embeddings says they are one",
                         r->path, a->name, b->name);
    return SPW_OK;
}

/* "[2, 3]" */
static const char *
shape_text(char *buf, size_t bytes, const uint64_t *shape, uint32_t ndim)
{
    size_t at = (size_t)snprintf(buf, bytes, "[");
    for (uint32_t d = 0; d < ndim; d++)
        at += (size_t)snprintf(buf + at, bytes - at, d > 0 ? ", %llu" : "%llu", (unsigned long long)shape[d]);
    snprintf(buf + at, bytes - at, "]");
    return buf;
}

static spw_status
check_type(const spw_hf_reader *r, const entry *e, spw_error *err)
{
    if (e->info->dtype != SPW_DTYPE_COUNT)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s; F32, BF16 and F16 are read", r->shards[e->shard_idx].name,
                     e->info->name, e->info->type);
}

static spw_status
check_shape(const spw_hf_reader *r, const entry *e, const spw_param *p, spw_error *err)
{
    const spw_tensor_info *t = e->info;
    uint64_t want[SPW_TENSOR_DIMS_MAX + 1] = {p->stack};
    uint32_t ndim = p->stack > 0;
    spw_tensor_info described;
    char is[120], needed[80];
    spw_st_describe(&described, p, SPW_F32);
    memcpy(want + ndim, described.shape, described.ndim * sizeof *want);
    ndim += described.ndim;
    if (t->ndim == ndim && memcmp(t->shape, want, ndim * sizeof *want) == 0)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape %s, this model needs %s", r->shards[e->shard_idx].name,
                     t->name, shape_text(is, sizeof is, t->shape, t->ndim),
                     shape_text(needed, sizeof needed, want, ndim));
}

/* A parameter as files name it. */
typedef struct named {
    char name[SPW_TENSOR_NAME_BYTES];
    uint32_t id; /* of a stack's slices the first */
} named;

static int
by_name_in_files(const void *a, const void *b)
{
    return strcmp(((const named *)a)->name, ((const named *)b)->name);
}

static int
compare_name(const void *name, const void *param)
{
    return strcmp(name, ((const named *)param)->name);
}

/* Tensor i is that of a parameter, or of all of a stack's. */
static void
bind_tensor(spw_hf_reader *r, const spw_model *m, uint32_t id, uint32_t i)
{
    const spw_param *p = &m->params[id];
    for (uint32_t slice = 0; slice < (p->stack > 0 ? p->stack : 1); slice++) {
        r->of_param[id + slice] = i;
        r->first[id + slice] = slice * p->rows * p->cols;
    }
}

/* "..._blocks" or "..._scales" of a stack of matrices; *id is the first one's. */
static bool
is_coded(const spw_model *m, const named *names, uint32_t count, const char *name, uint32_t *id)
{
    char plain[SPW_TENSOR_NAME_BYTES];
    const named *found;
    if (!ends_with(name, "_blocks") && !ends_with(name, "_scales"))
        return false;
    snprintf(plain, sizeof plain, "%.*s", (int)(strlen(name) - strlen("_blocks")), name);
    found = bsearch(plain, names, count, sizeof *names, compare_name);
    if (found == NULL || m->params[found->id].stack == 0 || m->params[found->id].ndim != 2)
        return false;
    *id = found->id;
    return true;
}

/* One of the two tensors that a stack is in MXFP4. */
static spw_status
bind_coded(spw_hf_reader *r, const spw_model *m, uint32_t id, uint32_t i, spw_error *err)
{
    const spw_param *p = &m->params[id];
    const spw_tensor_info *t = r->tensors[i].info;
    bool blocks = ends_with(t->name, "_blocks");
    uint64_t groups = p->rows / SPW_MXFP4_GROUP, bytes = p->cols * groups * (blocks ? SPW_MXFP4_GROUP / 2 : 1);
    uint64_t want[4] = {p->stack, p->cols, groups, SPW_MXFP4_GROUP / 2};
    const uint8_t *at;
    char is[120], needed[100];
    if (strcmp(t->type, "U8") != 0 || p->rows % SPW_MXFP4_GROUP != 0 || t->ndim != (blocks ? 4u : 3u) ||
        memcmp(t->shape, want, t->ndim * sizeof *want) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s of shape %s, MXFP4 of this model is U8 of %s",
                         r->shards[r->tensors[i].shard_idx].name, t->name, t->type,
                         shape_text(is, sizeof is, t->shape, t->ndim),
                         shape_text(needed, sizeof needed, want, blocks ? 4 : 3));
    SPW_TRY(spw__st_map(r->shards[r->tensors[i].shard_idx].reader, t, &at, err));
    for (uint32_t slice = 0; slice < p->stack; slice++, at += bytes) {
        mapped *c = &r->mapped[id + slice];
        if (blocks)
            r->of_param[id + slice] = i;
        *(blocks ? &c->blocks : &c->scales) = at;
        c->rows = p->rows;
        c->cols = p->cols;
    }
    return SPW_OK;
}

static bool
is_packed(const spw_tensor_info *t)
{
    return strcmp(t->type, "U8") == 0 || ends_with(t->name, PACKED);
}

/* Codes that take a scale: 8-bit floats, or integers or floats that are packed. */
static bool
is_scaled(const spw_tensor_info *t, const spw_param *p)
{
    return (strcmp(t->type, "F8_E4M3") == 0 || strcmp(t->type, "I8") == 0 || is_packed(t)) && p->ndim == 2 &&
           p->stack == 0;
}

/* "X.weight" (rows, bytes of two floats) beside others in 8-bit floats. */
static spw_status
bind_fp4(spw_hf_reader *r, uint32_t id, const spw_param *p, uint32_t i, spw_error *err)
{
    const spw_tensor_info *t = r->tensors[i].info;
    const uint64_t want[2] = {p->rows, p->cols / 2};
    char is[120], needed[80];
    if (r->blocks.rows == 0 || r->blocks.packed)
        SPW_TRY(spw__scaled_of(&r->blocks, r->path, false, err));
    spw__scaled_of_experts(&r->experts);
    if (t->ndim != 2 || memcmp(t->shape, want, sizeof want) != 0 || p->cols % 2 != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is I8 of shape %s, floats of 4 bits are I8 of %s",
                         r->shards[r->tensors[i].shard_idx].name, t->name, shape_text(is, sizeof is, t->shape, t->ndim),
                         shape_text(needed, sizeof needed, want, 2));
    r->of_param[id] = i;
    return SPW_OK;
}

/* "X.weight_packed" (rows, words of 32 bits, or bytes of two floats) of "X.weight", which ModelOpt's bytes are called too. */
static spw_status
bind_packed(spw_hf_reader *r, uint32_t id, const spw_param *p, uint32_t i, spw_error *err)
{
    const spw_tensor_info *t = r->tensors[i].info;
    uint64_t want[2] = {p->rows}, unit;
    char is[120], needed[80];
    if (p->ndim != 2 || p->stack > 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s of shape %s, and %s is no matrix of its own",
                         r->shards[r->tensors[i].shard_idx].name, t->name, t->type,
                         shape_text(is, sizeof is, t->shape, t->ndim), p->name);
    if (r->blocks.rows == 0 || !r->blocks.packed)
        SPW_TRY(spw__scaled_of(&r->blocks, r->path, true, err));
    unit = r->blocks.floats ? 8 : 32;
    want[1] = p->cols * r->blocks.bits / unit;
    if (strcmp(t->type, unit == 8 ? "U8" : "I32") != 0 || t->ndim != 2 || memcmp(t->shape, want, sizeof want) != 0 ||
        p->cols * r->blocks.bits % unit != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s of shape %s, %u bits for each weight are %s of %s",
                         r->shards[r->tensors[i].shard_idx].name, t->name, t->type,
                         shape_text(is, sizeof is, t->shape, t->ndim), r->blocks.bits, unit == 8 ? "U8" : "I32",
                         shape_text(needed, sizeof needed, want, 2));
    r->of_param[id] = i;
    return SPW_OK;
}

/* Integers, each below the parameter's `below`. */
static spw_status
check_whole(spw_hf_reader *r, const spw_param *p, uint32_t i, spw_error *err)
{
    const spw_tensor_info *t = r->tensors[i].info;
    const uint64_t all = p->cols / SPW_TERMS;
    if (strcmp(t->type, "I64") != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s; of it I64 is read",
                         r->shards[r->tensors[i].shard_idx].name, t->name, t->type);
    SPW_TRY(check_shape(r, &r->tensors[i], p, err));
    for (uint64_t at = 0, n; at < all; at += n) {
        int64_t block[512];
        n = all - at < 512 ? all - at : 512;
        SPW_TRY(spw_hf_read(r, i, at * sizeof *block, block, n * sizeof *block, err));
        for (uint64_t k = 0; k < n; k++)
            if (block[k] < 0 || (uint64_t)block[k] >= p->below)
                return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s, element %llu, is %lld; it must be 0 to %llu",
                                 r->shards[r->tensors[i].shard_idx].name, t->name, (unsigned long long)(at + k),
                                 (long long)block[k], (unsigned long long)p->below - 1);
    }
    return SPW_OK;
}

/* A parameter's tensor of numbers that are read, or of codes. */
static spw_status
bind_weights(spw_hf_reader *r, const spw_model *m, uint32_t id, uint32_t i, spw_error *err)
{
    const spw_param *p = &m->params[id];
    if (p->whole) {
        SPW_TRY(check_whole(r, p, i, err));
        bind_tensor(r, m, id, i);
        return SPW_OK;
    }
    if (is_scaled(r->tensors[i].info, p) && is_packed(r->tensors[i].info))
        return bind_packed(r, id, p, i, err);
    if (is_scaled(r->tensors[i].info, p) && strcmp(r->tensors[i].info->type, "I8") == 0)
        return bind_fp4(r, id, p, i, err);
    if (!is_scaled(r->tensors[i].info, p))
        SPW_TRY(check_type(r, &r->tensors[i], err));
    else if (r->blocks.rows == 0 || r->blocks.packed)
        SPW_TRY(spw__scaled_of(&r->blocks, r->path, false, err));
    SPW_TRY(check_shape(r, &r->tensors[i], p, err));
    bind_tensor(r, m, id, i);
    return SPW_OK;
}

/*
 * A tensor of all experts, as transformers 5 has them in memory, and Qwen3.5 is published: "X.experts.gate_up_proj" (experts, 2 width, cols),
 * each one's gate in front of its up, or "X.experts.up_proj" where there is no gate, or "X.experts.down_proj". ids: the first expert's parameters
 * that are parts of it.
 */
static bool
is_of_experts(spw_family family, const named *names, uint32_t count, const char *name, uint32_t ids[2], uint32_t *parts)
{
    static const char *const kinds[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    bool down = ends_with(name, ".experts.down_proj"), up = ends_with(name, ".experts.up_proj");
    if (!down && !up && !ends_with(name, ".experts.gate_up_proj"))
        return false;
    *parts = down || up ? 1 : 2;
    for (uint32_t k = 0; k < *parts; k++) {
        char plain[SPW_TENSOR_NAME_BYTES];
        const named *found;
        snprintf(plain, sizeof plain, "%.*s.0.%s.weight", (int)(strrchr(name, '.') - name), name,
                 kinds[spw__hf_of(family, NUMBERED)][down ? 2
                                                     : up ? 1
                                                          : k]);
        found = bsearch(plain, names, count, sizeof *names, compare_name);
        if (found == NULL)
            return false;
        ids[k] = found->id;
    }
    return true;
}

/*
 * Qwen3-VL is published with experts' matrices (in, out), and transformers saves it as others. Where one of a layer's two tensors is square,
 * and looks like both, the other is not: all of a folder are as the first that tells.
 */
static bool
are_turned(const spw_hf_reader *r, const spw_model_config *c)
{
    for (uint32_t i = 0; i < r->tensor_count; i++) {
        const spw_tensor_info *t = r->tensors[i].info;
        const bool down = ends_with(t->name, ".experts.down_proj");
        const uint64_t rows = down ? c->width : 2 * c->mlp_width, cols = down ? c->mlp_width : c->width;
        if ((down || ends_with(t->name, ".experts.gate_up_proj")) && t->ndim == 3 && rows != cols)
            return t->shape[1] == cols && t->shape[2] == rows;
    }
    return false;
}

/* Parameters of experts have ids in a row. */
static spw_status
bind_experts(spw_hf_reader *r, const spw_model *m, const uint32_t ids[2], uint32_t parts, uint32_t i, spw_error *err)
{
    const spw_param *p = &m->params[ids[0]];
    const spw_tensor_info *t = r->tensors[i].info;
    const uint64_t rows = parts * p->rows, elems = p->rows * p->cols;
    const uint64_t want[3] = {m->config.experts, rows, p->cols}, turned[3] = {m->config.experts, p->cols, rows};
    const bool is_turned = r->turned && t->ndim == 3 && memcmp(t->shape, turned, sizeof turned) == 0;
    const uint8_t *at = NULL;
    char is[120], needed[80];
    SPW_TRY(check_type(r, &r->tensors[i], err));
    if (!is_turned && (t->ndim != 3 || memcmp(t->shape, want, sizeof want) != 0))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape %s, this model needs %s",
                         r->shards[r->tensors[i].shard_idx].name, t->name, shape_text(is, sizeof is, t->shape, t->ndim),
                         shape_text(needed, sizeof needed, want, 3));
    if (is_turned)
        SPW_TRY(spw__st_map(r->shards[r->tensors[i].shard_idx].reader, t, &at, err));
    for (uint32_t e = 0; e < m->config.experts; e++) {
        for (uint32_t k = 0; k < parts; k++) {
            const uint32_t id = ids[k] + e;
            if (r->of_param[id] != UINT32_MAX)
                return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is there twice, of all experts and of each",
                                 r->shards[r->tensors[i].shard_idx].name, m->params[id].name);
            r->of_param[id] = i;
            r->first[id] = (e * parts + k) * elems;
            if (is_turned)
                r->mapped[id] = (mapped){.columns = at + (e * parts * elems + k * p->rows) * spw_dtype_bytes(t->dtype),
                                         .stride = rows,
                                         .rows = p->rows,
                                         .cols = p->cols};
        }
    }
    return SPW_OK;
}

/* "X.weight" and more of a parameter "X.weight". */
static bool
is_beside(const named *names, uint32_t count, const char *name, const char *more, uint32_t *id)
{
    char plain[SPW_TENSOR_NAME_BYTES];
    const named *found;
    if (!ends_with(name, more))
        return false;
    snprintf(plain, sizeof plain, "%.*s.weight", (int)(strlen(name) - strlen(more)), name);
    found = bsearch(plain, names, count, sizeof *names, compare_name);
    *id = found != NULL ? found->id : *id;
    return found != NULL;
}

static bool
is_scale(const named *names, uint32_t count, const char *name, uint32_t *id)
{
    return is_beside(names, count, name, SCALE_INV, id) || is_beside(names, count, name, SCALE, id) ||
           is_beside(names, count, name, SCALE_PLAIN, id);
}

static bool
is_of_all(const named *names, uint32_t count, const char *name, uint32_t *id)
{
    return is_beside(names, count, name, SCALE_OF_ALL, id) || is_beside(names, count, name, SCALE_2, id);
}

/* Numbers, or what the codes' format has. */
static spw_status
check_scale_type(const spw_hf_reader *r, const entry *e, const spw_scaled *b, spw_error *err)
{
    static const char *const types[] = {[SPW_SCALES_E4M3] = "F8_E4M3", [SPW_SCALES_E8M0] = "U8"};
    const spw_scales kind = b->scales;
    if (kind == SPW_SCALES_NUMBERS)
        return spw__hf_is_e8m0(e->info) && !b->packed ? SPW_OK : check_type(r, e, err);
    if (strcmp(e->info->type, types[kind]) == 0 || (kind == SPW_SCALES_E8M0 && strcmp(e->info->type, "F8_E8M0") == 0))
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s; scales of this format are %s",
                     r->shards[e->shard_idx].name, e->info->name, e->info->type, types[kind]);
}

/* The number by which all scales of a matrix are divided, where the format has one. */
static spw_status
check_scale_of_all(const spw_hf_reader *r, uint32_t id, const spw_param *p, bool packed, spw_error *err)
{
    const entry *e = r->scale_of_all[id] != UINT32_MAX ? &r->tensors[r->scale_of_all[id]] : NULL;
    const bool needed = packed && r->blocks.scales == SPW_SCALES_E4M3;
    if (e == NULL && needed)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: the scale of all of %s is missing (%s or %s)", r->path, p->name,
                         SCALE_OF_ALL + 1, SCALE_2 + 1);
    if (e != NULL && (!needed || e->info->dtype != SPW_F32 || e->info->bytes != sizeof(float)))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s of %llu bytes; one F32 is for packed weights in NVFP4",
                         r->shards[e->shard_idx].name, e->info->name, e->info->type,
                         (unsigned long long)e->info->bytes);
    return SPW_OK;
}

/* A scale for each block of codes, and none elsewhere. */
static spw_status
check_scales(const spw_hf_reader *r, const spw_param *p, const entry *weights, const entry *scales, spw_error *err)
{
    const bool scaled = weights != NULL && is_scaled(weights->info, p);
    const bool packed = scaled && is_packed(weights->info);
    const spw_scaled *b = scaled && strcmp(weights->info->type, "I8") == 0 ? &r->experts : &r->blocks;
    const spw_tensor_info *s = scales != NULL ? scales->info : NULL;
    uint64_t want[2];
    char is[120], needed[80];
    if (s == NULL && scaled)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s, and its scales are missing (%s%s)",
                         r->shards[weights->shard_idx].name, weights->info->name, weights->info->type, p->name,
                         (packed ? SCALE : SCALE_INV) + strlen(".weight"));
    if (s == NULL)
        return SPW_OK;
    if (!scaled || (packed && !ends_with(s->name, SCALE)))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is for weights that are F8_E4M3%s, and %s is %s",
                         r->shards[scales->shard_idx].name, s->name, ends_with(s->name, SCALE) ? " or packed" : "",
                         p->name, weights != NULL ? weights->info->type : "missing");
    SPW_TRY(check_scale_type(r, scales, b, err));
    want[0] = (p->rows - 1) / b->rows + 1;
    want[1] = (p->cols - 1) / b->cols + 1;
    if (want[0] * want[1] == 1 && b->scales == SPW_SCALES_NUMBERS &&
        s->bytes == spw_dtype_bytes(s->dtype)) /* of a matrix with one, [] */
        return SPW_OK;
    if (s->ndim != 2 || memcmp(s->shape, want, sizeof want) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape %s, blocks of %llu x %llu need %s",
                         r->shards[scales->shard_idx].name, s->name, shape_text(is, sizeof is, s->shape, s->ndim),
                         (unsigned long long)b->rows, (unsigned long long)b->cols,
                         shape_text(needed, sizeof needed, want, 2));
    return SPW_OK;
}

/* Every parameter has a tensor, or the two of MXFP4, or of codes and their scales. */
static spw_status
check_bound(const spw_hf_reader *r, const spw_model *m, spw_error *err)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        const mapped *c = &r->mapped[id];
        const entry *weights = r->of_param[id] != UINT32_MAX ? &r->tensors[r->of_param[id]] : NULL;
        const entry *scales = r->scale_of[id] != UINT32_MAX ? &r->tensors[r->scale_of[id]] : NULL;
        SPW_TRY(check_scales(r, &m->params[id], weights, scales, err));
        SPW_TRY(check_scale_of_all(
            r, id, &m->params[id],
            weights != NULL && is_scaled(weights->info, &m->params[id]) && is_packed(weights->info), err));
        if (r->of_param[id] == UINT32_MAX && !m->params[id].adapter)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is missing; %s", r->path, m->params[id].name,
                             is_head(m->params[id].name, &m->config)
                                 ? "where the head is the embeddings, config.json says \"tie_word_embeddings\": true"
                                 : "these are the weights of another model");
        if ((c->blocks == NULL) != (c->scales == NULL))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: of the MXFP4 tensors of %s, the %s are missing", r->path,
                             m->params[id].name, c->blocks == NULL ? "blocks" : "scales");
    }
    return SPW_OK;
}

/* Of a tensor that is no parameter's; known: but its name is one's. */
static const char *
what_is_wrong(const char *name, bool known)
{
    if (ends_with(name, "_proj_scale_inv"))
        return "for experts of 8-bit floats in one tensor, which are not read; those in a tensor each are";
    return known ? "there twice, with and without its prefix" : "not in this model";
}

/*
 * OLMo Hybrid's norms, which files of layers of linear attention have by other names than those of the others; transformers has the latter in
 * memory, and writes the former for both kinds of layers. NULL: not such a name, or no parameter's.
 */
static const named *
by_other_name(spw_family family, const named *names, uint32_t count, const char *name)
{
    static const char *const others[][2] = {{".input_layernorm.", ".attention_layer_norm."},
                                            {".post_attention_layernorm.", ".feedforward_layer_norm."},
                                            {".feedforward_layer_norm.", ".post_attention_layernorm."}};
    for (size_t i = 0; family == SPW_FAMILY_OLMO_HYBRID && i < sizeof others / sizeof others[0]; i++) {
        const char *at = strstr(name, others[i][0]);
        char other[SPW_TENSOR_NAME_BYTES];
        if (at == NULL)
            continue;
        snprintf(other, sizeof other, "%.*s%s%s", (int)(at - name), name, others[i][1], at + strlen(others[i][0]));
        return bsearch(other, names, count, sizeof *names, compare_name);
    }
    return NULL;
}

/* names: (count) of the model's parameters in files, in order. */
static spw_status
bind_tensors(spw_hf_reader *r, const spw_model *m, const named *names, uint32_t count, spw_error *err)
{
    spw_family family = m->config.family;
    uint32_t head = UINT32_MAX;
    for (uint32_t i = 0; i < r->tensor_count; i++) {
        char room[SPW_TENSOR_NAME_BYTES];
        const char *name = spw__hf_name_here(r->tensors[i].info->name, family, room);
        const named *exact = bsearch(name, names, count, sizeof *names, compare_name);
        const named *found = exact != NULL ? exact : by_other_name(family, names, count, name);
        uint32_t id = found != NULL ? found->id : m->param_count, ids[2], parts;
        if (found == NULL && is_coded(m, names, count, name, &id) &&
            (r->of_param[id] == UINT32_MAX || spw__hf_is_mapped(r, id))) {
            SPW_TRY(bind_coded(r, m, id, i, err));
        } else if (found == NULL && is_of_experts(family, names, count, name, ids, &parts)) {
            SPW_TRY(bind_experts(r, m, ids, parts, i, err));
        } else if (id < m->param_count && r->of_param[id] == UINT32_MAX) {
            SPW_TRY(bind_weights(r, m, id, i, err));
        } else if (found == NULL && is_scale(names, count, name, &id) && r->scale_of[id] == UINT32_MAX) {
            r->scale_of[id] = i;
        } else if (found == NULL && is_of_all(names, count, name, &id) && r->scale_of_all[id] == UINT32_MAX) {
            r->scale_of_all[id] = i;
        } else if (found == NULL && is_beside(names, count, name, PACKED, &id) && r->of_param[id] == UINT32_MAX) {
            SPW_TRY(bind_packed(r, id, &m->params[id], i, err));
        } else if (found == NULL && is_beside(names, count, name, PACKED_SHAPE, &id)) {
            continue; /* what the model says too */
        } else if (id == m->param_count && m->config.tied && is_head(name, &m->config)) {
            SPW_TRY(check_type(r, &r->tensors[i], err));
            head = i;
        } else if (id < m->param_count || !spw__hf_is_passed_over(name, &m->config)) {
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s", r->shards[r->tensors[i].shard_idx].name,
                             r->tensors[i].info->name, what_is_wrong(name, id < m->param_count));
        }
    }
    SPW_TRY(check_bound(r, m, err));
    if (head != UINT32_MAX)
        SPW_TRY(compare_tied(r, head, m->blocks[0].param_ids[0], err));
    r->param_count = m->param_count;
    for (uint32_t id = 0; id < m->param_count; id++)
        r->in_terms[id] = m->params[id].in_terms;
    return SPW_OK;
}

/* Whether the path is that of a Qwen3-VL's folder. */
static bool
is_qwen3_vl(const char *path)
{
    char file[SPW_HF_CONFIG_PATH_BYTES];
    const char *type;
    json_t *root;
    bool is;
    if (!spw_dir_has(path, "config.json") || spw__hf_folder_config(&root, file, path, NULL) != SPW_OK)
        return false;
    type = json_string_value(json_object_get(root, "model_type"));
    is = type != NULL && strcmp(type, "qwen3_vl_moe") == 0;
    json_decref(root);
    return is;
}

spw_status
spw_hf_reader_bind(spw_hf_reader *r, const spw_model *m, spw_error *err)
{
    named *names = spw_mem_calloc(m->param_count + 1, sizeof *names);
    uint32_t count = 0;
    spw_status st;
    spw_mem_free(r->of_param);
    spw_mem_free(r->first);
    spw_mem_free(r->mapped);
    spw_mem_free(r->in_terms);
    r->in_terms = spw_mem_calloc(m->param_count + 1, sizeof *r->in_terms);
    spw_mem_free(r->scale_of);
    r->scale_of = spw_mem_calloc(m->param_count + 1, sizeof *r->scale_of);
    spw_mem_free(r->scale_of_all);
    r->scale_of_all = spw_mem_calloc(m->param_count + 1, sizeof *r->scale_of_all);
    r->mapped = spw_mem_calloc(m->param_count + 1, sizeof *r->mapped);
    r->of_param = spw_mem_calloc(m->param_count + 1, sizeof *r->of_param);
    r->first = spw_mem_calloc(m->param_count + 1, sizeof *r->first);
    r->param_count = 0;
    if (r->of_param == NULL || r->first == NULL || r->mapped == NULL || r->in_terms == NULL || r->scale_of == NULL ||
        r->scale_of_all == NULL || names == NULL) {
        spw_mem_free(names);
        return SPW_RAISE(err, SPW_ENOMEM, "tensors of %s", r->path);
    }
    memset(r->of_param, 0xff, m->param_count * sizeof *r->of_param);
    memset(r->scale_of, 0xff, m->param_count * sizeof *r->scale_of);
    memset(r->scale_of_all, 0xff, m->param_count * sizeof *r->scale_of_all);
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_tensor_info t;
        spw_st_describe(&t, &m->params[id], SPW_F32);
        if (t.slice > 0)
            continue;
        memcpy(names[count].name, t.name, sizeof t.name);
        names[count++].id = id;
    }
    qsort(names, count, sizeof *names, by_name_in_files);
    r->turned = m->config.family == SPW_FAMILY_QWEN3_MOE && are_turned(r, &m->config) && is_qwen3_vl(r->path);
    st = bind_tensors(r, m, names, count, err);
    spw_mem_free(names);
    return st;
}
