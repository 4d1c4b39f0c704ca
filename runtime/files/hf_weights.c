/*
 * The weights of a Hugging Face folder: one safetensors file, or shards with an index that says where each tensor is. All
 * of it is checked when it is opened and when a model is bound, by name; reading then is by ranges, from any thread.
 * Source: FORMATS S1, S8 (tensor names; what old files hold besides parameters).
 */
#include "files_internal.h"
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define SINGLE_FILE "model.safetensors"
#define INDEX_FILE  "model.safetensors.index.json"
enum { PATH_BYTES = 4096, INDEX_BYTES_MAX = 64 << 20, BLOCK = 4096 };

typedef struct shard {
    char *name; /* as messages call it */
    spw_st_reader *reader;
} shard;

typedef struct entry {
    const spw_tensor_info *info; /* in the shard's reader */
    uint32_t shard_idx;
} entry;

/* Of a parameter (rows, cols) in MXFP4; its blocks are its tensor. */
typedef struct coded {
    const uint8_t *blocks, *scales; /* mapped, of this slice; NULL: not seen */
    uint64_t rows, cols, read;      /* read: elements so far; atomic */
} coded;

struct spw_hf_reader {
    char path[PATH_BYTES];
    shard *shards;
    entry *tensors;
    uint32_t *of_param; /* (param_count) index of each parameter's tensor; NULL: not bound */
    uint64_t *first;    /* (param_count) the parameter's first element in it */
    coded *coded;       /* (param_count) of those that are MXFP4 */
    bool *in_terms;     /* (param_count) as spw_param has it */
    uint32_t *scale_of; /* (param_count) of those that are 8-bit floats: index of their scales' tensor */
    spw_fp8_blocks blocks;
    uint32_t shard_count, tensor_count, param_count;
};

/* ---------------------------------------------------------------- files */

static spw_status
add_shard(spw_hf_reader *r, const char *folder, const char *name, spw_error *err)
{
    shard *s = &r->shards[r->shard_count];
    size_t bytes = strlen(folder) + strlen(name) + 2;
    s->name = spw_mem_zalloc(bytes);
    if (s->name == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", r->path);
    snprintf(s->name, bytes, "%s%s%s", folder, folder[0] != '\0' ? "/" : "", name);
    r->shard_count++; /* close takes a shard without a reader */
    SPW_TRY(spw_st_reader_open(&s->reader, s->name, err));
    r->tensor_count += spw_st_reader_count(s->reader);
    return SPW_OK;
}

/* The shard of that name below the folder; NULL: it was not opened. */
static const shard *
find_shard(const spw_hf_reader *r, const char *name)
{
    for (uint32_t i = 0; i < r->shard_count; i++) {
        if (strcmp(strrchr(r->shards[i].name, '/') + 1, name) == 0)
            return &r->shards[i];
    }
    return NULL;
}

static int
by_name(const void *a, const void *b)
{
    return strcmp(((const shard *)a)->name, ((const shard *)b)->name);
}

/* Every tensor of a shard is listed there, and nowhere else. */
static spw_status
check_shard(const spw_hf_reader *r, const shard *s, const json_t *map, const char *index, spw_error *err)
{
    for (uint32_t i = 0; i < spw_st_reader_count(s->reader); i++) {
        const char *tensor = spw_st_reader_tensor(s->reader, i)->name;
        const char *listed = json_string_value(json_object_get(map, tensor));
        const shard *other = listed != NULL ? find_shard(r, listed) : NULL;
        if (listed == NULL)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s of %s is not listed", index, tensor, s->name);
        if (other != s && spw_st_reader_find(other->reader, tensor) != NULL)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is in two shards, %s and %s", index, tensor, other->name,
                             s->name);
    }
    return SPW_OK;
}

static spw_status
open_shards(spw_hf_reader *r, const json_t *map, const char *index, spw_error *err)
{
    const char *tensor, *name;
    spw_status st;
    json_t *v;
    r->shards = spw_mem_calloc(json_object_size(map) + 1, sizeof *r->shards);
    if (r->shards == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", index);
    json_object_foreach((json_t *)(uintptr_t)map, tensor, v)
    {
        name = json_string_value(v);
        if (name == NULL || name[0] == '\0' || strchr(name, '/') != NULL)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: weight_map.%s is not the name of a file in its folder", index,
                             tensor);
        if (find_shard(r, name) != NULL)
            continue;
        st = add_shard(r, r->path, name, err);
        if (st != SPW_OK) {
            spw_error_wrap(err, "%s lists %s in shard %s", index, tensor, name);
            return st;
        }
    }
    qsort(r->shards, r->shard_count, sizeof *r->shards, by_name);
    json_object_foreach((json_t *)(uintptr_t)map, tensor, v)
    {
        const shard *s = find_shard(r, json_string_value(v));
        if (spw_st_reader_find(s->reader, tensor) == NULL)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s lists tensor %s in %s, which does not have it", index, tensor,
                             s->name);
    }
    for (uint32_t i = 0; i < r->shard_count; i++)
        SPW_TRY(check_shard(r, &r->shards[i], map, index, err));
    return SPW_OK;
}

static spw_status
open_index(spw_hf_reader *r, spw_error *err)
{
    char index[PATH_BYTES + 64], *text;
    json_error_t where;
    json_t *root, *map;
    spw_status st;
    snprintf(index, sizeof index, "%s/" INDEX_FILE, r->path);
    SPW_TRY(spw_file_read_text(index, INDEX_BYTES_MAX, &text, err));
    root = json_loads(text, JSON_REJECT_DUPLICATES, &where);
    spw_mem_free(text);
    if (root == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s:%d:%d: %s", index, where.line, where.column, where.text);
    map = json_object_get(root, "weight_map");
    st = json_object_size(map) > 0 ? open_shards(r, map, index, err)
                                   : SPW_RAISE(err, SPW_ECORRUPT, "%s: weight_map is missing or empty", index);
    json_decref(root);
    return st;
}

/* A file by its own name; a folder's single file, which wins as it does in transformers; else the index. */
static spw_status
open_files(spw_hf_reader *r, spw_error *err)
{
    char file[PATH_BYTES + 64], index[PATH_BYTES + 64];
    struct stat info;
    if (stat(r->path, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "open %s", r->path);
    snprintf(file, sizeof file, "%s/" SINGLE_FILE, r->path);
    snprintf(index, sizeof index, "%s/" INDEX_FILE, r->path);
    if (S_ISDIR(info.st_mode) && access(file, F_OK) != 0) {
        if (access(index, F_OK) == 0)
            return open_index(r, err);
        return SPW_RAISE(err, SPW_ENOENT, "%s has neither " SINGLE_FILE " nor " INDEX_FILE, r->path);
    }
    r->shards = spw_mem_calloc(1, sizeof *r->shards);
    if (r->shards == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", r->path);
    return S_ISDIR(info.st_mode) ? add_shard(r, r->path, SINGLE_FILE, err) : add_shard(r, "", r->path, err);
}

bool
spw_hf_has_weights(const char *folder)
{
    return spw_dir_has(folder, SINGLE_FILE) || spw_dir_has(folder, INDEX_FILE);
}

bool
spw_hf_has_other_weights(const char *folder, char name[256])
{
    static const char *const forms[] = {"pytorch_model*.bin", "model*.safetensors", "consolidated*", "*.gguf",
                                        "tf_model.h5",        "flax_model*"};
    DIR *dir = opendir(folder);
    struct dirent *at;
    name[0] = '\0';
    while (dir != NULL && (at = readdir(dir)) != NULL) {
        for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
            if (fnmatch(forms[i], at->d_name, 0) == 0 && (name[0] == '\0' || strcmp(at->d_name, name) < 0))
                snprintf(name, 256, "%s", at->d_name);
        }
    }
    if (dir != NULL)
        closedir(dir);
    return name[0] != '\0';
}

spw_status
spw_hf_reader_open(spw_hf_reader **out, const char *path, spw_error *err)
{
    spw_hf_reader *r = spw_mem_zalloc(sizeof *r);
    spw_status st;
    uint32_t n = 0;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    st = snprintf(r->path, sizeof r->path, "%s", path) < (int)sizeof r->path
             ? open_files(r, err)
             : SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", path);
    if (st == SPW_OK && (r->tensors = spw_mem_calloc(r->tensor_count + 1, sizeof *r->tensors)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    for (uint32_t s = 0; st == SPW_OK && s < r->shard_count; s++) {
        for (uint32_t i = 0; i < spw_st_reader_count(r->shards[s].reader); i++)
            r->tensors[n++] = (entry){spw_st_reader_tensor(r->shards[s].reader, i), s};
    }
    if (st != SPW_OK)
        spw_hf_reader_close(r);
    else
        *out = r;
    return st;
}

void
spw_hf_reader_close(spw_hf_reader *r)
{
    if (r == NULL)
        return;
    for (uint32_t i = 0; r->shards != NULL && i < r->shard_count; i++) {
        spw_st_reader_close(r->shards[i].reader);
        spw_mem_free(r->shards[i].name);
    }
    spw_mem_free(r->shards);
    spw_mem_free(r->tensors);
    spw_mem_free(r->of_param);
    spw_mem_free(r->first);
    spw_mem_free(r->coded);
    spw_mem_free(r->in_terms);
    spw_mem_free(r->scale_of);
    spw_mem_free(r);
}

uint32_t
spw_hf_reader_count(const spw_hf_reader *r)
{
    return r->tensor_count;
}

const spw_tensor_info *
spw_hf_reader_tensor(const spw_hf_reader *r, uint32_t i, const char **file)
{
    if (i >= r->tensor_count)
        return NULL;
    if (file != NULL)
        *file = r->shards[r->tensors[i].shard_idx].name;
    return r->tensors[i].info;
}

spw_status
spw_hf_read(spw_hf_reader *r, uint32_t i, uint64_t offset, void *data, uint64_t bytes, spw_error *err)
{
    if (i >= r->tensor_count)
        return SPW_RAISE(err, SPW_EINVAL, "%s has %u tensors, not %u", r->path, r->tensor_count, i + 1);
    return spw_st_read(r->shards[r->tensors[i].shard_idx].reader, r->tensors[i].info, offset, data, bytes, err);
}

/* ---------------------------------------------------------------- a model's parameters */

static bool
begins_with(const char *text, const char *begin)
{
    return strncmp(text, begin, strlen(begin)) == 0;
}

/* GPT-2's files may have a prefix, and the text part of a model with images has, older or newer ("model.language_model.norm.weight"). */
static const char *
without_prefix(const char *name, spw_family family, char room[SPW_TENSOR_NAME_BYTES])
{
    const char *prefix = family == SPW_FAMILY_GPT2 ? "transformer." : "language_model.";
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

/*
 * What files hold besides a text model's parameters: old ones masks and the table of frequencies, some what reads images, and those
 * of GLM and DeepSeek layers behind the last one, which predict further tokens.
 */
static bool
is_passed_over(const char *name, const spw_model_config *c)
{
    spw_family family = c->family;
    const char *inner = begins_with(name, "model.") ? name + strlen("model.") : name; /* in newer files all are there */
    if ((family == SPW_FAMILY_GEMMA3 || family == SPW_FAMILY_MISTRAL) &&
        (begins_with(inner, "vision_tower.") || begins_with(inner, "multi_modal_projector.")))
        return true;
    if ((family == SPW_FAMILY_QWEN2 || family == SPW_FAMILY_QWEN3) && begins_with(inner, "visual."))
        return true;
    if (c->sigmoid && begins_with(name, "model.layers.") &&
        strtoull(name + strlen("model.layers."), NULL, 10) >= c->layers)
        return true;
    if (family == SPW_FAMILY_GPT2)
        return begins_with(name, "h.") && (ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias"));
    return ends_with(name, ".rotary_emb.inv_freq");
}

static spw_status
read_floats(spw_hf_reader *r, uint32_t i, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    const spw_tensor_info *t = r->tensors[i].info;
    uint32_t size = spw_dtype_bytes(t->dtype);
    if (t->dtype == SPW_F32)
        return spw_hf_read(r, i, first * size, out, count * size, err);
    while (count > 0) {
        uint16_t raw[BLOCK];
        uint64_t n = count < BLOCK ? count : BLOCK;
        SPW_TRY(spw_hf_read(r, i, first * size, raw, n * size, err));
        spw_convert(out, SPW_F32, raw, t->dtype, n);
        first += n;
        out += n;
        count -= n;
    }
    return SPW_OK;
}

/* Whoever reads its last elements lets go of it. */
static spw_status
read_coded(coded *c, uint64_t first, uint64_t count, float *out)
{
    const uint64_t all = c->rows * c->cols, groups = all / SPW_MXFP4_GROUP;
    spw__mxfp4_read(out, c->blocks, c->scales, c->rows, c->cols, first, count);
    if (__atomic_add_fetch(&c->read, count, __ATOMIC_RELAXED) % all == 0) {
        spw__st_let_go(c->blocks, groups * (SPW_MXFP4_GROUP / 2));
        spw__st_let_go(c->scales, groups);
    }
    return SPW_OK;
}

/* Of 8-bit floats; the scales that a piece needs are read with it. */
static spw_status
read_scaled(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    const uint64_t cols = r->tensors[r->of_param[id]].info->shape[1];
    while (count > 0) {
        spw_fp8_piece p = spw__fp8_piece(&r->blocks, cols, first, count < BLOCK ? count : BLOCK);
        uint8_t codes[BLOCK];
        float scales[BLOCK];
        SPW_TRY(spw_hf_read(r, r->of_param[id], first, codes, p.count, err));
        SPW_TRY(read_floats(r, r->scale_of[id], p.scale_first, p.scale_count, scales, err));
        spw__fp8_read(out, &r->blocks, cols, codes, scales, first, &p);
        first += p.count;
        out += p.count;
        count -= p.count;
    }
    return SPW_OK;
}

/* Terms [first, first + count) of what the file has one number for each row of. */
static spw_status
read_terms(spw_hf_reader *r, uint32_t i, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    for (uint64_t at = first, n; at < first + count; at += n) {
        float x, terms[SPW_TERMS];
        n = SPW_TERMS - at % SPW_TERMS;
        n = n < first + count - at ? n : first + count - at;
        SPW_TRY(read_floats(r, i, at / SPW_TERMS, 1, &x, err));
        spw_terms_split(x, terms);
        memcpy(out + (at - first), terms + at % SPW_TERMS, n * sizeof *out);
    }
    return SPW_OK;
}

/* Of a parameter that has its tensors. */
static spw_status
read_bound(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    if (r->coded[id].blocks != NULL)
        return read_coded(&r->coded[id], first, count, out);
    if (r->scale_of[id] != UINT32_MAX)
        return read_scaled(r, id, first, count, out, err);
    if (r->in_terms[id])
        return read_terms(r, r->of_param[id], first, count, out, err);
    return read_floats(r, r->of_param[id], r->first[id] + first, count, out, err);
}

/* A tied model's lm_head.weight, where a file has one, must be the embedding. */
static spw_status
compare_tied(spw_hf_reader *r, uint32_t head, uint32_t embedding, spw_error *err)
{
    const spw_tensor_info *a = r->tensors[head].info, *b = r->tensors[r->of_param[embedding]].info;
    uint64_t n = b->shape[0] * b->shape[1];
    bool same = a->ndim == 2 && a->shape[0] == b->shape[0] && a->shape[1] == b->shape[1];
    for (uint64_t at = 0; same && at < n; at += BLOCK) {
        float x[BLOCK], y[BLOCK];
        uint64_t count = n - at < BLOCK ? n - at : BLOCK;
        SPW_TRY(read_floats(r, head, at, count, x, err));
        SPW_TRY(read_bound(r, embedding, at, count, y, err));
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
    uint64_t want[3] = {p->stack, p->ndim > 1 ? p->rows : p->in_terms ? p->cols / SPW_TERMS : p->cols, p->cols};
    uint32_t ndim = p->ndim + (p->stack > 0);
    const uint64_t *shape = p->stack > 0 ? want : want + 1;
    char is[120], needed[80];
    if (t->ndim == ndim && memcmp(t->shape, shape, ndim * sizeof *shape) == 0)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape %s, this model needs %s", r->shards[e->shard_idx].name,
                     t->name, shape_text(is, sizeof is, t->shape, t->ndim),
                     shape_text(needed, sizeof needed, shape, ndim));
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
        coded *c = &r->coded[id + slice];
        if (blocks)
            r->of_param[id + slice] = i;
        *(blocks ? &c->blocks : &c->scales) = at;
        c->rows = p->rows;
        c->cols = p->cols;
    }
    return SPW_OK;
}

static bool
is_fp8(const spw_tensor_info *t, const spw_param *p)
{
    return strcmp(t->type, "F8_E4M3") == 0 && p->ndim == 2 && p->stack == 0;
}

/* A parameter's tensor of numbers that are read, or of codes. */
static spw_status
bind_weights(spw_hf_reader *r, const spw_model *m, uint32_t id, uint32_t i, spw_error *err)
{
    const spw_param *p = &m->params[id];
    if (!is_fp8(r->tensors[i].info, p))
        SPW_TRY(check_type(r, &r->tensors[i], err));
    else if (r->blocks.rows == 0)
        SPW_TRY(spw__fp8_blocks_of(&r->blocks, r->path, err));
    SPW_TRY(check_shape(r, &r->tensors[i], p, err));
    bind_tensor(r, m, id, i);
    return SPW_OK;
}

/* "X.weight_scale_inv" of a parameter "X.weight". */
static bool
is_scale(const named *names, uint32_t count, const char *name, uint32_t *id)
{
    static const char *const suffix = "_scale_inv";
    char plain[SPW_TENSOR_NAME_BYTES];
    const named *found;
    if (!ends_with(name, ".weight_scale_inv"))
        return false;
    snprintf(plain, sizeof plain, "%.*s", (int)(strlen(name) - strlen(suffix)), name);
    found = bsearch(plain, names, count, sizeof *names, compare_name);
    *id = found != NULL ? found->id : *id;
    return found != NULL;
}

/* A scale for each block of weights in 8-bit floats, and none elsewhere. */
static spw_status
check_scales(const spw_hf_reader *r, const spw_param *p, const entry *weights, const entry *scales, spw_error *err)
{
    bool fp8 = weights != NULL && is_fp8(weights->info, p);
    const spw_tensor_info *s = scales != NULL ? scales->info : NULL;
    uint64_t want[2];
    char is[120], needed[80];
    if (s == NULL && fp8)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is F8_E4M3, and its scales are missing (%s_scale_inv)",
                         r->shards[weights->shard_idx].name, weights->info->name, weights->info->name);
    if (s == NULL)
        return SPW_OK;
    if (!fp8)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is for weights that are F8_E4M3, and %s is %s",
                         r->shards[scales->shard_idx].name, s->name, p->name,
                         weights != NULL ? weights->info->type : "missing");
    SPW_TRY(check_type(r, scales, err));
    want[0] = (p->rows - 1) / r->blocks.rows + 1;
    want[1] = (p->cols - 1) / r->blocks.cols + 1;
    if (s->ndim != 2 || memcmp(s->shape, want, sizeof want) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape %s, blocks of %llu x %llu need %s",
                         r->shards[scales->shard_idx].name, s->name, shape_text(is, sizeof is, s->shape, s->ndim),
                         (unsigned long long)r->blocks.rows, (unsigned long long)r->blocks.cols,
                         shape_text(needed, sizeof needed, want, 2));
    return SPW_OK;
}

/* Every parameter has a tensor, or the two of MXFP4, or of 8-bit floats and their scales. */
static spw_status
check_bound(const spw_hf_reader *r, const spw_model *m, spw_error *err)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        const coded *c = &r->coded[id];
        const entry *weights = r->of_param[id] != UINT32_MAX ? &r->tensors[r->of_param[id]] : NULL;
        const entry *scales = r->scale_of[id] != UINT32_MAX ? &r->tensors[r->scale_of[id]] : NULL;
        SPW_TRY(check_scales(r, &m->params[id], weights, scales, err));
        if (r->of_param[id] == UINT32_MAX && !m->params[id].adapter)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is missing; these are the weights of another model",
                             r->path, m->params[id].name);
        if ((c->blocks == NULL) != (c->scales == NULL))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: of the MXFP4 tensors of %s, the %s are missing", r->path,
                             m->params[id].name, c->blocks == NULL ? "blocks" : "scales");
    }
    return SPW_OK;
}

/* names: (count) of the model's parameters in files, in order. */
static spw_status
bind_tensors(spw_hf_reader *r, const spw_model *m, const named *names, uint32_t count, spw_error *err)
{
    spw_family family = m->config.family;
    uint32_t head = UINT32_MAX;
    for (uint32_t i = 0; i < r->tensor_count; i++) {
        char room[SPW_TENSOR_NAME_BYTES];
        const char *name = without_prefix(r->tensors[i].info->name, family, room);
        const named *found = bsearch(name, names, count, sizeof *names, compare_name);
        uint32_t id = found != NULL ? found->id : m->param_count;
        if (found == NULL && is_coded(m, names, count, name, &id) &&
            (r->of_param[id] == UINT32_MAX || r->coded[id].blocks != NULL)) {
            SPW_TRY(bind_coded(r, m, id, i, err));
        } else if (id < m->param_count && r->of_param[id] == UINT32_MAX) {
            SPW_TRY(bind_weights(r, m, id, i, err));
        } else if (found == NULL && is_scale(names, count, name, &id) && r->scale_of[id] == UINT32_MAX) {
            r->scale_of[id] = i;
        } else if (id == m->param_count && m->config.tied && strcmp(name, "lm_head.weight") == 0) {
            SPW_TRY(check_type(r, &r->tensors[i], err));
            head = i;
        } else if (id < m->param_count || !is_passed_over(name, &m->config)) {
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s", r->shards[r->tensors[i].shard_idx].name,
                             r->tensors[i].info->name,
                             id < m->param_count ? "there twice, with and without its prefix" : "not in this model");
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

spw_status
spw_hf_reader_bind(spw_hf_reader *r, const spw_model *m, spw_error *err)
{
    named *names = spw_mem_calloc(m->param_count + 1, sizeof *names);
    uint32_t count = 0;
    spw_status st;
    spw_mem_free(r->of_param);
    spw_mem_free(r->first);
    spw_mem_free(r->coded);
    spw_mem_free(r->in_terms);
    r->in_terms = spw_mem_calloc(m->param_count + 1, sizeof *r->in_terms);
    spw_mem_free(r->scale_of);
    r->scale_of = spw_mem_calloc(m->param_count + 1, sizeof *r->scale_of);
    r->coded = spw_mem_calloc(m->param_count + 1, sizeof *r->coded);
    r->of_param = spw_mem_calloc(m->param_count + 1, sizeof *r->of_param);
    r->first = spw_mem_calloc(m->param_count + 1, sizeof *r->first);
    r->param_count = 0;
    if (r->of_param == NULL || r->first == NULL || r->coded == NULL || r->in_terms == NULL || r->scale_of == NULL ||
        names == NULL) {
        spw_mem_free(names);
        return SPW_RAISE(err, SPW_ENOMEM, "tensors of %s", r->path);
    }
    memset(r->of_param, 0xff, m->param_count * sizeof *r->of_param);
    memset(r->scale_of, 0xff, m->param_count * sizeof *r->scale_of);
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw_tensor_info t;
        spw_st_describe(&t, &m->params[id], SPW_F32);
        if (t.slice > 0)
            continue;
        memcpy(names[count].name, t.name, sizeof t.name);
        names[count++].id = id;
    }
    qsort(names, count, sizeof *names, by_name_in_files);
    st = bind_tensors(r, m, names, count, err);
    spw_mem_free(names);
    return st;
}

bool
spw_hf_reader_extent(const spw_hf_reader *r, uint32_t param_id, spw_st_extent *out, spw_dtype *dtype)
{
    const entry *e;
    if (param_id >= r->param_count || r->of_param[param_id] == UINT32_MAX || r->coded[param_id].blocks != NULL ||
        r->in_terms[param_id] || r->scale_of[param_id] != UINT32_MAX)
        return false;
    e = &r->tensors[r->of_param[param_id]];
    *out = spw_st_reader_extent(r->shards[e->shard_idx].reader, e->info);
    out->offset += r->first[param_id] * spw_dtype_bytes(e->info->dtype);
    *dtype = e->info->dtype;
    return true;
}

spw_status
spw_hf_read_param(spw_hf_reader *r, uint32_t param_id, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    if (param_id >= r->param_count || r->of_param[param_id] == UINT32_MAX)
        return SPW_RAISE(err, SPW_EINVAL, "%s: parameter %u is none of the %u that are bound", r->path, param_id,
                         r->param_count);
    return read_bound(r, param_id, first, count, out, err);
}
