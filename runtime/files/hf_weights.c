/*
 * The weights of a Hugging Face folder: one file of safetensors or torch.save, or shards with an index that says where each tensor is. All
 * of it is checked when it is opened and when a model is bound (hf_bind.c); reading then is by ranges, from any thread.
 * Source: README of huggingface/safetensors, "Format".
 */
#include "fp8.h"
#include "hf_reader.h"
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* One file, or the index of several; those of torch.save count where there are none of safetensors. */
static const char *const forms[][2] = {{"model.safetensors", "model.safetensors.index.json"},
                                       {"pytorch_model.bin", "pytorch_model.bin.index.json"}};
enum { FORMS = sizeof forms / sizeof forms[0] };
enum { PATH_BYTES = SPW__HF_PATH_BYTES, INDEX_BYTES_MAX = 64 << 20, BLOCK = SPW__HF_BLOCK };

typedef spw__hf_shard shard;
typedef spw__hf_entry entry;
typedef spw__hf_mapped mapped;

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
open_index(spw_hf_reader *r, const char *name, spw_error *err)
{
    char index[PATH_BYTES + 64], *text;
    json_error_t where;
    json_t *root, *map;
    spw_status st;
    snprintf(index, sizeof index, "%s/%s", r->path, name);
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

static spw_status
open_single(spw_hf_reader *r, const char *folder, const char *name, spw_error *err)
{
    r->shards = spw_mem_calloc(1, sizeof *r->shards);
    return r->shards != NULL ? add_shard(r, folder, name, err) : SPW_RAISE(err, SPW_ENOMEM, "reader of %s", r->path);
}

/* A file by its own name; a folder's single file, which wins as it does in transformers; else the index. */
static spw_status
open_files(spw_hf_reader *r, spw_error *err)
{
    char what[SPW_HF_WHAT_BYTES];
    struct stat info;
    if (stat(r->path, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "open %s", r->path);
    if (!S_ISDIR(info.st_mode))
        return open_single(r, "", r->path, err);
    for (int i = 0; i < FORMS; i++) {
        if (spw_dir_has(r->path, forms[i][0]))
            return open_single(r, r->path, forms[i][0], err);
        if (spw_dir_has(r->path, forms[i][1]))
            return open_index(r, forms[i][1], err);
    }
    if (spw_hf_has_other_weights(r->path, what))
        return SPW_RAISE(err, SPW_ENOENT, "%s has %s, which is not read, and none of %s, %s, %s and %s", r->path, what,
                         forms[0][0], forms[0][1], forms[1][0], forms[1][1]);
    return SPW_RAISE(err, SPW_ENOENT, "%s has none of %s, %s, %s and %s", r->path, forms[0][0], forms[0][1],
                     forms[1][0], forms[1][1]);
}

bool
spw_hf_has_weights(const char *folder)
{
    bool any = false;
    for (int i = 0; i < FORMS; i++)
        any = any || spw_dir_has(folder, forms[i][0]) || spw_dir_has(folder, forms[i][1]);
    return any;
}

/* Behind the name of a file of adapters: those of which model. */
static void
add_base(const char *folder, char what[SPW_HF_WHAT_BYTES])
{
    char path[PATH_BYTES + 64], *text = NULL;
    spw_error ignored = {0};
    size_t at = strlen(what);
    const char *base;
    json_t *root;
    snprintf(path, sizeof path, "%.1000s/adapter_config.json", folder);
    (void)spw_file_read_text(path, INDEX_BYTES_MAX, &text, &ignored);
    root = text != NULL ? json_loads(text, 0, NULL) : NULL;
    base = json_string_value(json_object_get(root, "base_model_name_or_path"));
    if (base != NULL)
        snprintf(what + at, SPW_HF_WHAT_BYTES - at, " (adapters of %.150s, as adapter_config.json says)", base);
    else
        snprintf(what + at, SPW_HF_WHAT_BYTES - at, " (adapters of a model that adapter_config.json does not name)");
    json_decref(root);
    spw_mem_free(text);
}

const char *
spw_hf_adapters(const char *folder)
{
    static const char *const names[] = {"adapter_model.safetensors", "adapter_model.bin"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (spw_dir_has(folder, names[i]))
            return names[i];
    }
    return NULL;
}

bool
spw_hf_has_other_weights(const char *folder, char what[SPW_HF_WHAT_BYTES])
{
    static const char *const others[] = {
        "pytorch_model*.bin", "model*.safetensors", "consolidated*",     "*.gguf",     "tf_model.h5",
        "flax_model*",        "*.safetensors.part", "adapter_model.bin", "*.bin.part", "adapter_model.safetensors"};
    DIR *dir = opendir(folder);
    struct dirent *at;
    what[0] = '\0';
    while (dir != NULL && (at = readdir(dir)) != NULL) {
        for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
            if (fnmatch(others[i], at->d_name, 0) == 0 && (what[0] == '\0' || strcmp(at->d_name, what) < 0))
                snprintf(what, SPW_HF_WHAT_BYTES, "%s", at->d_name);
        }
    }
    if (dir != NULL)
        closedir(dir);
    if (strncmp(what, "adapter_model.", strlen("adapter_model.")) == 0)
        add_base(folder, what);
    return what[0] != '\0';
}

/* Of the shards that are open. */
static spw_status
list_tensors(spw_hf_reader *r, spw_error *err)
{
    uint32_t n = 0;
    r->tensors = spw_mem_calloc(r->tensor_count + 1, sizeof *r->tensors);
    if (r->tensors == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", r->path);
    for (uint32_t s = 0; s < r->shard_count; s++) {
        for (uint32_t i = 0; i < spw_st_reader_count(r->shards[s].reader); i++)
            r->tensors[n++] = (entry){spw_st_reader_tensor(r->shards[s].reader, i), s};
    }
    return SPW_OK;
}

spw_status
spw_hf_reader_open(spw_hf_reader **out, const char *path, spw_error *err)
{
    spw_hf_reader *r = spw_mem_zalloc(sizeof *r);
    spw_status st;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    st = snprintf(r->path, sizeof r->path, "%s", path) < (int)sizeof r->path
             ? open_files(r, err)
             : SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", path);
    if (st == SPW_OK)
        st = list_tensors(r, err);
    if (st != SPW_OK)
        spw_hf_reader_close(r);
    else
        *out = r;
    return st;
}

spw_status
spw__hf_reader_over(spw_hf_reader **out, spw_st_reader *file, const char *path, spw_error *err)
{
    spw_hf_reader *r = spw_mem_zalloc(sizeof *r);
    spw_status st = SPW_OK;
    *out = NULL;
    if (r == NULL || (r->shards = spw_mem_calloc(1, sizeof *r->shards)) == NULL) {
        spw_st_reader_close(file);
        spw_mem_free(r);
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    }
    snprintf(r->path, sizeof r->path, "%s", path);
    r->shards[0] = (shard){spw_mem_strdup(path), file};
    r->shard_count = 1;
    r->tensor_count = spw_st_reader_count(file);
    st = r->shards[0].name != NULL ? list_tensors(r, err) : SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
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
    spw_mem_free(r->mapped);
    spw_mem_free(r->in_terms);
    spw_mem_free(r->scale_of);
    spw_mem_free(r->scale_of_all);
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

spw_status
spw__hf_read_floats(spw_hf_reader *r, uint32_t i, uint64_t first, uint64_t count, float *out, spw_error *err)
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

void
spw__hf_was_read(mapped *c, uint64_t count)
{
    const uint64_t all = c->rows * c->cols, groups = all / SPW_MXFP4_GROUP;
    if (__atomic_add_fetch(&c->read, count, __ATOMIC_RELAXED) % all == 0) {
        spw__st_let_go(c->blocks, groups * (SPW_MXFP4_GROUP / 2));
        spw__st_let_go(c->scales, groups);
    }
}

static spw_status
read_coded(mapped *c, uint64_t first, uint64_t count, float *out)
{
    spw__mxfp4_read(out, c->blocks, c->scales, c->rows, c->cols, first, count);
    spw__hf_was_read(c, count);
    return SPW_OK;
}

/* Whoever reads its last elements lets go of it. */
static void
read_columns(mapped *c, spw_dtype dtype, uint64_t first, uint64_t count, float *out)
{
    const uint32_t size = spw_dtype_bytes(dtype);
    for (uint64_t at = 0, n; at < count; at += n) {
        unsigned char raw[BLOCK * sizeof(float)];
        uint64_t row = (first + at) / c->cols, col = (first + at) % c->cols;
        n = count - at < BLOCK ? count - at : BLOCK;
        for (uint64_t i = 0; i < n; i++) {
            memcpy(raw + i * size, c->columns + (col * c->stride + row) * size, size);
            col = col + 1 < c->cols ? col + 1 : 0;
            row += col == 0;
        }
        spw_convert(out + at, SPW_F32, raw, dtype, n);
    }
    if (__atomic_add_fetch(&c->read, count, __ATOMIC_RELAXED) % (c->rows * c->cols) == 0)
        spw__st_let_go(c->columns, ((c->cols - 1) * c->stride + c->rows) * size);
}

/* What scales are divided by: a file has it, or (ModelOpt's) its inverse. */
static spw_status
read_scale_of_all(spw_hf_reader *r, uint32_t id, float *out, spw_error *err)
{
    const char *name = r->tensors[r->scale_of_all[id]].info->name;
    SPW_TRY(spw__hf_read_floats(r, r->scale_of_all[id], 0, 1, out, err));
    if (strcmp(name + strlen(name) - strlen("scale_2"), "scale_2") == 0)
        *out = 1 / *out;
    return SPW_OK;
}

spw_status
spw__hf_read_scales(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    const spw_scaled *b = spw__hf_blocks_of(r, id);
    uint8_t raw[BLOCK];
    float all = 1;
    if (b->scales == SPW_SCALES_NUMBERS && !spw__hf_is_e8m0(r->tensors[r->scale_of[id]].info))
        return spw__hf_read_floats(r, r->scale_of[id], first, count, out, err);
    SPW_TRY(spw_hf_read(r, r->scale_of[id], first, raw, count, err));
    if (b->scales == SPW_SCALES_E4M3)
        SPW_TRY(read_scale_of_all(r, id, &all, err));
    for (uint64_t i = 0; i < count; i++)
        out[i] = b->scales == SPW_SCALES_E4M3 ? spw_fp8_to_f32(SPW_E4M3, raw[i]) / all
                                              : spw_bits_f32(raw[i] > 0 ? (uint32_t)raw[i] << 23 : 1u << 22);
    return SPW_OK;
}

/* Of codes; the scales that a piece needs are read with it. */
static spw_status
read_scaled(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    const spw_scaled *b = spw__hf_blocks_of(r, id);
    const uint64_t cols = spw__hf_code_cols(r, id);
    while (count > 0) {
        spw_scaled_piece p = spw__scaled_piece(b, cols, first, count < BLOCK ? count : BLOCK);
        const uint64_t begin = first * b->bits / 8, end = ((first + p.count) * b->bits + 7) / 8;
        uint8_t codes[BLOCK];
        float scales[BLOCK];
        SPW_TRY(spw_hf_read(r, r->of_param[id], begin, codes, end - begin, err));
        SPW_TRY(spw__hf_read_scales(r, id, p.scale_first, p.scale_count, scales, err));
        spw__scaled_read(out, b, cols, codes, scales, first, &p);
        first += p.count;
        out += p.count;
        count -= p.count;
    }
    return SPW_OK;
}

/* A 64-bit integer, where the file has those. */
static bool
is_whole(const spw_tensor_info *t)
{
    return strcmp(t->type, "I64") == 0;
}

static spw_status
read_number(spw_hf_reader *r, uint32_t i, uint64_t at, float *out, spw_error *err)
{
    int64_t whole;
    if (!is_whole(r->tensors[i].info))
        return spw__hf_read_floats(r, i, at, 1, out, err);
    SPW_TRY(spw_hf_read(r, i, at * sizeof whole, &whole, sizeof whole, err));
    *out = (float)whole;
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
        SPW_TRY(read_number(r, i, at / SPW_TERMS, &x, err));
        spw_terms_split(x, terms);
        memcpy(out + (at - first), terms + at % SPW_TERMS, n * sizeof *out);
    }
    return SPW_OK;
}

/* Of a parameter that has its tensors. */
spw_status
spw__hf_read_bound(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err)
{
    if (spw__hf_is_mapped(r, id))
        SPW_TRY(spw__st_check_map(r->shards[r->tensors[r->of_param[id]].shard_idx].reader, err));
    if (r->mapped[id].columns != NULL) {
        read_columns(&r->mapped[id], r->tensors[r->of_param[id]].info->dtype, first, count, out);
        return SPW_OK;
    }
    if (r->mapped[id].blocks != NULL)
        return read_coded(&r->mapped[id], first, count, out);
    if (r->scale_of[id] != UINT32_MAX)
        return read_scaled(r, id, first, count, out, err);
    if (r->in_terms[id])
        return read_terms(r, r->of_param[id], first, count, out, err);
    return spw__hf_read_floats(r, r->of_param[id], r->first[id] + first, count, out, err);
}

const char *
spw_hf_bound_name(const spw_hf_reader *r, uint32_t param_id, uint64_t *first)
{
    if (param_id >= r->param_count || r->of_param[param_id] == UINT32_MAX)
        return NULL;
    *first = r->first[param_id];
    return r->tensors[r->of_param[param_id]].info->name;
}

bool
spw_hf_reader_extent(const spw_hf_reader *r, uint32_t param_id, spw_st_extent *out, spw_dtype *dtype)
{
    const entry *e;
    if (param_id >= r->param_count || r->of_param[param_id] == UINT32_MAX || spw__hf_is_mapped(r, param_id) ||
        r->in_terms[param_id] || r->scale_of[param_id] != UINT32_MAX)
        return false;
    e = &r->tensors[r->of_param[param_id]];
    if (!spw_st_reader_extent(r->shards[e->shard_idx].reader, e->info, out))
        return false;
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
    return spw__hf_read_bound(r, param_id, first, count, out, err);
}

/* ---------------------------------------------------------------- runs */

void
spw_hf_reader_past_cache(spw_hf_reader *r, spw_bounce *bounce)
{
    for (uint32_t i = 0; i < r->shard_count; i++)
        spw_st_reader_past_cache(r->shards[i].reader, bounce);
}

/* Of a run: who takes its elements, and what they are in the file. */
typedef struct run {
    spw_hf_take_fn take;
    void *ctx;
    spw_dtype dtype;
    bool whole;
    uint64_t first; /* the parameter's first element in its tensor */
} run;

static spw_status
take_numbers(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    const run *job = ctx;
    const uint32_t size = spw_dtype_bytes(job->dtype);
    const uint64_t count = bytes / size, first = offset / size - job->first;
    if (job->dtype == SPW_F32)
        return job->take(job->ctx, first, data, count, err);
    for (uint64_t at = 0, n; at < count; at += n) {
        float block[BLOCK];
        n = count - at < BLOCK ? count - at : BLOCK;
        spw_convert(block, SPW_F32, (const char *)data + at * size, job->dtype, n);
        SPW_TRY(job->take(job->ctx, first + at, block, n, err));
    }
    return SPW_OK;
}

/* One number for SPW_TERMS elements. */
static spw_status
take_terms(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    const run *job = ctx;
    const uint32_t size = job->whole ? sizeof(int64_t) : spw_dtype_bytes(job->dtype);
    for (uint64_t at = 0; at < bytes; at += size) {
        float x, terms[SPW_TERMS];
        int64_t whole;
        if (job->whole) {
            memcpy(&whole, (const char *)data + at, sizeof whole);
            x = (float)whole;
        } else {
            spw_convert(&x, SPW_F32, (const char *)data + at, job->dtype, 1);
        }
        spw_terms_split(x, terms);
        SPW_TRY(job->take(job->ctx, (offset + at) / size * SPW_TERMS, terms, SPW_TERMS, err));
    }
    return SPW_OK;
}

static spw_status
read_blocks(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, spw_hf_take_fn take, void *ctx,
            spw_error *err)
{
    for (uint64_t at = 0, n; at < count; at += n) {
        float block[BLOCK];
        n = count - at < BLOCK ? count - at : BLOCK;
        SPW_TRY(spw_hf_read_param(r, id, first + at, n, block, err));
        SPW_TRY(take(ctx, first + at, block, n, err));
    }
    return SPW_OK;
}

spw_status
spw_hf_read_run(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, spw_hf_take_fn take, void *ctx,
                spw_error *err)
{
    bool bound = id < r->param_count && r->of_param[id] != UINT32_MAX;
    const entry *e = bound ? &r->tensors[r->of_param[id]] : NULL;
    run job = {.take = take, .ctx = ctx};
    uint64_t size;
    if (!bound || spw__hf_is_mapped(r, id) || r->scale_of[id] != UINT32_MAX)
        return read_blocks(r, id, first, count, take, ctx, err);
    job.dtype = e->info->dtype;
    job.first = r->first[id];
    job.whole = is_whole(e->info);
    size = job.whole ? sizeof(int64_t) : spw_dtype_bytes(job.dtype);
    if (!r->in_terms[id])
        return spw_st_read_run(r->shards[e->shard_idx].reader, e->info, (job.first + first) * size, count * size,
                               take_numbers, &job, err);
    SPW_ASSERT(first % SPW_TERMS == 0 && count % SPW_TERMS == 0);
    return spw_st_read_run(r->shards[e->shard_idx].reader, e->info, first / SPW_TERMS * size, count / SPW_TERMS * size,
                           take_terms, &job, err);
}

spw_st_sum
spw_hf_reader_sum(const spw_hf_reader *r, bool header, uint64_t *file_bytes)
{
    SPW_ASSERT(r->shard_count == 1);
    *file_bytes = spw_st_reader_file_bytes(r->shards[0].reader);
    return spw_st_reader_sum(r->shards[0].reader, header);
}
