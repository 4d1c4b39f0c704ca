/*
 * export.c - from one form of a model to a Hugging Face folder: another type, other shards, from a checkpoint or llm.c. One
 * parameter after the other, each by all threads, with its adapter added if there is one; the folder is written beside its name and renamed when
 * it is complete.
 */
#include "adapters.h"
#include "hf_reader.h"
#include "llmc.h"
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK_ELEMS = 16384, RUN_ELEMS = 1 << 20, THREADS_MAX = 4, PATH_MAX_BYTES = 1100, CONFIG_BYTES_MAX = 1 << 20 };

typedef struct job {
    const spw_export_options *o;
    spw_export_report *report;
    spw_model_config config;
    spw_model *model;
    const char *beside; /* the folder that config.json and the tokenizer are taken from; NULL: none */
    spw_hf_reader *folder;
    spw_st_reader *masters;     /* of a checkpoint, for fp32; NULL: none */
    char base[SPW__BASE_BYTES]; /* where the source has adapters alone */
    const char *weights;        /* the source, or base */
    spw__adapters *adapters;    /* of the source; NULL: there are none */
    bool is_foreign;            /* another program's checkpoint */
    bool says_model;            /* such a one, of the model that config is */
    char partial[PATH_MAX_BYTES];
    bool made;         /* that folder */
    uint32_t *file_of; /* (param_count) */
    uint64_t done, all;
    spw_bounce *bounce; /* two of each thread: what it reads, what it writes */
    spw_pool *pool;     /* NULL: one thread */
} job;

/* The masters of another program's checkpoint: they go before weights in 16 bits that lie beside it, as a Trainer saves both. */
static spw_status
open_foreign(job *j, const char *found, spw_error *err)
{
    spw_foreign *d;
    spw_status st;
    SPW_TRY(spw_foreign_open(&d, found, err));
    st = spw_foreign_weights(d, &j->folder, err);
    j->is_foreign = true;
    j->says_model = spw_foreign_model(d) != NULL;
    if (j->says_model)
        j->config = *spw_foreign_model(d);
    if (st == SPW_OK && spw_hf_has_weights(j->o->source) && !spw_foreign_get_about(d)->hf_weights)
        spw_log(SPW_LOG_NOTE,
                "%s is a checkpoint: its masters are taken, not the weights in Hugging Face's files beside it", found);
    spw_foreign_close(d);
    return st;
}

/* The reader of the weights that a folder or another program's checkpoint has. */
static spw_status
open_weights(job *j, spw_error *err)
{
    char found[PATH_MAX_BYTES];
    spw_status st;
    if (!spw_foreign_find(j->weights, found, sizeof found))
        return spw_hf_reader_open(&j->folder, j->weights, err);
    st = open_foreign(j, found, err);
    if (st != SPW_OK && spw_hf_has_weights(j->weights))
        spw_error_wrap(err,
                       "the masters beside Hugging Face's files in %s (which can be exported with config.json "
                       "in a folder of their own)",
                       j->weights);
    return st;
}

static spw_status
open_folder(job *j, spw_error *err)
{
    char path[PATH_MAX_BYTES + 64];
    SPW_TRY(open_weights(j, err));
    j->beside = j->o->model != NULL || j->says_model ? j->o->model : j->weights;
    if (j->is_foreign && j->beside != NULL && !spw_dir_has(j->beside, "config.json"))
        return SPW_RAISE(err, SPW_ENOENT,
                         "%s has no config.json: such a checkpoint does not say what model it is of; --model FOLDER "
                         "names the folder that training began with",
                         j->beside);
    if (j->beside != NULL)
        SPW_TRY(spw_hf_config_load(&j->config, j->beside, err));
    SPW_TRY(spw_model_build(&j->model, &j->config, err));
    SPW_TRY(spw_hf_reader_bind(j->folder, j->model, err));
    snprintf(path, sizeof path, "%.1000s/optimizer-00001-of-00001.safetensors", j->weights);
    if (j->o->dtype == SPW_F32 && access(path, F_OK) == 0)
        SPW_TRY(spw_st_reader_open(&j->masters, path, err));
    return spw__adapters_open(&j->adapters, j->o->source, j->model, err);
}

/* llm.c's weights, whose header says what model they are of. */
static spw_status
open_file(job *j, spw_error *err)
{
    spw__llmc m;
    SPW_TRY(spw__llmc_open(&m, j->o->source, err));
    j->config = m.config;
    SPW_TRY(spw_model_build(&j->model, &j->config, err));
    SPW_TRY(spw_hf_reader_open(&j->folder, j->o->source, err));
    return spw_hf_reader_bind(j->folder, j->model, err);
}

static spw_status
open_source(job *j, spw_error *err)
{
    struct stat info;
    j->weights = j->o->source;
    if (spw__adapters_alone(j->o->source)) {
        SPW_TRY(spw__adapters_base(j->o->source, j->o->model, j->base, err));
        j->weights = j->base;
    }
    SPW_TRY(spw_hf_check_folder(j->weights, err));
    if (stat(j->weights, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "%s", j->weights);
    return S_ISDIR(info.st_mode) ? open_folder(j, err) : open_file(j, err);
}

/* A parameter on its way, by all threads. */
typedef struct move {
    job *j;
    const spw_param *p;
    const spw_tensor_info *master; /* NULL: not from the masters */
    spw_st_writer *w;
    uint32_t id, in_file;
    pthread_mutex_t lock;
    spw_error error; /* under lock: the first */
} move;

/* What is asked for of one, filled from the first element on. */
typedef struct piece {
    const move *m;
    char *out;
    uint64_t first;
} piece;

static spw_status
take_elems(void *ctx, uint64_t first, const float *data, uint64_t count, spw_error *err)
{
    const piece *to = ctx;
    const spw_dtype dtype = to->m->j->report->dtype;
    char *out = to->out + (first - to->first) * spw_dtype_bytes(dtype);
    if (to->m->j->adapters == NULL || !spw__adapters_adds(to->m->j->adapters))
        return spw_st_round(out, dtype, data, count, to->m->p->name, first, err);
    for (uint64_t at = 0, n; at < count; at += n) {
        float block[BLOCK_ELEMS];
        n = count - at < BLOCK_ELEMS ? count - at : BLOCK_ELEMS;
        memcpy(block, data + at, n * sizeof *block);
        spw__adapters_add(to->m->j->adapters, first + at, n, block);
        SPW_TRY(spw_st_round(out + at * spw_dtype_bytes(dtype), dtype, block, n, to->m->p->name, first + at, err));
    }
    return SPW_OK;
}

static spw_status
take_masters(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    return take_elems(ctx, offset / sizeof(float), data, bytes / sizeof(float), err);
}

static spw_status
make_elems(void *ctx, uint64_t offset, void *out, uint64_t bytes, spw_error *err)
{
    const move *m = ctx;
    const uint32_t size = spw_dtype_bytes(m->j->report->dtype);
    const uint64_t first = offset / size, count = bytes / size;
    piece to = {m, out, first};
    if (m->master != NULL)
        return spw_st_read_run(m->j->masters, m->master, first * sizeof(float), count * sizeof(float), take_masters,
                               &to, err);
    return spw_hf_read_run(m->j->folder, m->id, first, count, take_elems, &to, err);
}

static void
write_run(void *ctx, uint32_t run, uint32_t worker_idx)
{
    move *m = ctx;
    const uint64_t all = m->p->rows * m->p->cols, first = (uint64_t)run * RUN_ELEMS,
                   count = all - first < RUN_ELEMS ? all - first : RUN_ELEMS,
                   size = spw_dtype_bytes(m->j->report->dtype);
    spw_error own = {0};
    (void)worker_idx;
    if (spw_st_write_run(m->w, m->in_file, first * size, count * size, make_elems, m, &own) == SPW_OK)
        return;
    pthread_mutex_lock(&m->lock);
    spw_error_keep_first(&m->error, &own);
    pthread_mutex_unlock(&m->lock);
}

/* In terms: their sums are in the file. No such parameter is large. */
static spw_status
write_terms(const move *m, spw_error *err)
{
    float block[BLOCK_ELEMS];
    for (uint64_t at = 0, n; at < m->p->cols; at += n) {
        n = m->p->cols - at < BLOCK_ELEMS ? m->p->cols - at : BLOCK_ELEMS;
        SPW_TRY(spw_hf_read_param(m->j->folder, m->id, at, n, block, err));
        SPW_TRY(spw_st_write_terms(m->w, m->in_file, at, block, n, err));
    }
    return SPW_OK;
}

static spw_status
write_param(job *j, spw_st_writer *w, uint32_t in_file, uint32_t id, spw_error *err)
{
    const spw_param *p = &j->model->params[id];
    move m = {.j = j, .p = p, .w = w, .id = id, .in_file = in_file};
    uint64_t elems = p->rows * p->cols;
    spw_status st = SPW_OK;
    if (j->masters != NULL) {
        char name[SPW_TENSOR_NAME_BYTES];
        snprintf(name, sizeof name, "%.100s.master", p->name);
        m.master = spw_st_reader_find(j->masters, name);
        if (m.master != NULL && (m.master->dtype != SPW_F32 || m.master->bytes != elems * sizeof(float)))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: the checkpoint's %s has %llu bytes, not %llu", j->o->source, name,
                             (unsigned long long)m.master->bytes, (unsigned long long)(elems * sizeof(float)));
    }
    if (j->adapters != NULL)
        SPW_TRY(spw__adapters_take(j->adapters, id, err));
    if (p->in_terms) {
        st = write_terms(&m, err);
    } else {
        pthread_mutex_init(&m.lock, NULL);
        spw_pool_run(j->pool, (uint32_t)((elems + RUN_ELEMS - 1) / RUN_ELEMS), write_run, &m);
        pthread_mutex_destroy(&m.lock);
        st = m.error.status;
        if (st != SPW_OK && err != NULL)
            *err = m.error;
    }
    j->done += p->in_terms ? elems / SPW_TERMS * sizeof(float) : elems * spw_dtype_bytes(j->report->dtype);
    if (st == SPW_OK && j->o->progress != NULL)
        j->o->progress(j->o->progress_ctx, j->done, j->all);
    return st;
}

/* Which file each parameter goes to: in order, a new one when the last is full, but between slices of one tensor. */
static void
cut(job *j)
{
    uint64_t filled = 0;
    j->report->files = 1;
    for (uint32_t id = 0; id < j->model->param_count; id++) {
        const spw_param *p = &j->model->params[id];
        uint64_t elems = p->in_terms ? p->cols / SPW_TERMS : p->rows * p->cols;
        uint64_t bytes = elems * (p->in_terms ? sizeof(float) : spw_dtype_bytes(j->report->dtype));
        bool whole = p->stack == 0 || p->expert == 1;
        if (whole && j->o->shard_bytes > 0 && filled > 0 &&
            filled + bytes * (p->stack > 0 ? p->stack : 1) > j->o->shard_bytes) {
            j->report->files++;
            filled = 0;
        }
        filled += bytes;
        j->all += bytes;
        j->file_of[id] = j->report->files - 1;
        j->report->params += elems;
        j->report->tensors += whole;
    }
    j->report->bytes = j->all;
}

static void
file_name(const job *j, uint32_t file, char *out, size_t bytes)
{
    if (j->report->files == 1)
        snprintf(out, bytes, "model.safetensors");
    else
        snprintf(out, bytes, "model-%05u-of-%05u.safetensors", file + 1, j->report->files);
}

static spw_status
write_file(job *j, uint32_t file, spw_tensor_info *infos, spw_error *err)
{
    char path[PATH_MAX_BYTES + 64], name[64];
    spw_st_writer *w = NULL;
    uint32_t first = 0, end;
    spw_status st;
    while (j->file_of[first] < file)
        first++;
    for (end = first; end < j->model->param_count && j->file_of[end] == file; end++)
        spw_st_describe(&infos[end - first], &j->model->params[end], j->report->dtype);
    file_name(j, file, name, sizeof name);
    snprintf(path, sizeof path, "%s/%s", j->partial, name);
    st = spw_st_writer_create(&w, path, infos, end - first, err);
    if (st == SPW_OK)
        spw_st_writer_past_cache(w, j->bounce);
    for (uint32_t id = first; st == SPW_OK && id < end; id++)
        st = write_param(j, w, id - first, id, err);
    if (st == SPW_OK)
        st = spw_st_writer_commit(w, err);
    spw_st_writer_destroy(w);
    return st;
}

static spw_status
write_json(const char *folder, const char *name, json_t *object, spw_error *err)
{
    char path[PATH_MAX_BYTES + 64], *text = object != NULL ? json_dumps(object, JSON_INDENT(2)) : NULL;
    spw_status st;
    snprintf(path, sizeof path, "%.1000s/%s", folder, name);
    st = text != NULL ? spw_file_write_text(path, text, err) : SPW_RAISE(err, SPW_ENOMEM, "writing %s", path);
    free(text);
    return st;
}

static spw_status
write_index(job *j, spw_error *err)
{
    json_t *map = json_object(), *root;
    char name[64];
    spw_status st;
    for (uint32_t id = 0; id < j->model->param_count; id++) {
        spw_tensor_info t;
        spw_st_describe(&t, &j->model->params[id], j->report->dtype);
        file_name(j, j->file_of[id], name, sizeof name);
        json_object_set_new(map, t.name, json_string(name));
    }
    root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)j->all, "weight_map", map);
    st = write_json(j->partial, "model.safetensors.index.json", root, err);
    json_decref(root);
    return st;
}

static spw_status
write_config(job *j, spw_error *err)
{
    char path[PATH_MAX_BYTES + 64], *text;
    spw_status st;
    SPW_TRY(spw_hf_config_carry(&text, &j->config, j->beside, j->report->dtype, err));
    snprintf(path, sizeof path, "%.1000s/config.json", j->partial);
    st = spw_file_write_text(path, text, err);
    spw_mem_free(text);
    return st;
}

/* Adapters may have been trained with another chat template than the model's: then a tokenizer is saved beside them. */
static const char *
of_tokenizer(const job *j)
{
    const bool own = j->weights == j->base && spw_dir_has(j->o->source, "tokenizer_config.json");
    return own ? j->o->source : j->beside;
}

/* Of all shards, before the first: a disk that is too small would be found by one of the last. */
static spw_status
check_room(const job *j, spw_error *err)
{
    spw_status st = spw_dir_check_room(j->partial, j->all, "make room, or take another folder", err);
    if (st != SPW_OK)
        spw_error_wrap(err, "writing %s", j->o->to);
    return st;
}

static spw_status
write_all(job *j, spw_error *err)
{
    spw_tensor_info *infos = spw_mem_calloc(j->model->param_count, sizeof *infos);
    spw_status st = SPW_OK;
    j->file_of = spw_mem_calloc(j->model->param_count, sizeof *j->file_of);
    if (infos == NULL || j->file_of == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "export of %u tensors", j->model->param_count);
    else
        cut(j);
    if (st == SPW_OK)
        st = check_room(j, err);
    for (uint32_t f = 0; st == SPW_OK && f < j->report->files; f++)
        st = write_file(j, f, infos, err);
    if (st == SPW_OK && j->report->files > 1)
        st = write_index(j, err);
    if (st == SPW_OK)
        st = write_config(j, err);
    if (st == SPW_OK && j->beside != NULL)
        st = spw_hf_copy_companions(j->beside, of_tokenizer(j), j->partial, err);
    spw_mem_free(infos);
    spw_mem_free(j->file_of);
    return st;
}

/* Of masters: frozen weights may lie in 16 bits beside them, and routers' corrections in fp32 beside weights in 16 bits. */
static spw_dtype
widest_dtype(const job *j)
{
    spw_dtype widest = SPW_DTYPE_COUNT;
    for (uint32_t id = 0; id < j->model->param_count; id++) {
        spw_dtype dtype = j->folder->tensors[j->folder->of_param[id]].info->dtype;
        if (!j->model->params[id].in_terms && (widest == SPW_DTYPE_COUNT || dtype == SPW_F32))
            widest = dtype;
    }
    return widest;
}

/* As it is stored: of a folder the type of the model's first parameter that is there as numbers; bf16 where all are codes. */
static spw_dtype
stored_dtype(const job *j)
{
    spw_st_extent unused;
    spw_dtype dtype = SPW_BF16;
    if (j->is_foreign)
        return widest_dtype(j);
    for (uint32_t id = 0; id < j->model->param_count; id++) {
        if (spw_hf_reader_extent(j->folder, id, &unused, &dtype))
            break;
    }
    return dtype;
}

static spw_status
open_threads(job *j, spw_error *err)
{
    uint32_t cpus = spw_cpu_allowed_count(), threads = cpus < THREADS_MAX ? cpus : THREADS_MAX;
    SPW_TRY(spw_bounce_create(&j->bounce, 2 * threads, err));
    spw_hf_reader_past_cache(j->folder, j->bounce);
    if (j->masters != NULL)
        spw_st_reader_past_cache(j->masters, j->bounce);
    return threads > 1 ? spw_pool_create(&j->pool, threads, "spw-export", err) : SPW_OK;
}

static spw_status
export_to_partial(job *j, spw_error *err)
{
    SPW_TRY(open_source(j, err));
    SPW_TRY(open_threads(j, err));
    j->report->dtype = j->o->dtype != SPW_DTYPE_COUNT ? j->o->dtype : stored_dtype(j);
    SPW_TRY(spw_hf_remove_partial(j->partial, err)); /* of one that was killed */
    j->made = true;
    SPW_TRY(spw_dir_make(j->partial, err));
    SPW_TRY(write_all(j, err));
    SPW_TRY(spw_dir_sync(j->partial, err));
    if (rename(j->partial, j->o->to) != 0)
        return SPW_RAISE_SYS(err, errno, "renaming %s to %s", j->partial, j->o->to);
    return spw_dir_sync_above(j->o->to, err);
}

spw_status
spw_export(const spw_export_options *o, spw_export_report *report, spw_error *err)
{
    job j = {.o = o, .report = report};
    spw_error ignored = {0};
    struct stat info;
    spw_status st;
    memset(report, 0, sizeof *report);
    if (strlen(o->source) > 1000 || strlen(o->to) > 1000 || o->to[0] == '\0')
        return SPW_RAISE(err, SPW_EINVAL, "export: a path is empty or longer than 1000 bytes");
    if (lstat(o->to, &info) == 0)
        return SPW_RAISE_SYS(err, EEXIST, "%s, where export makes a new folder", o->to);
    (void)spw_dir_partial(o->to, j.partial, sizeof j.partial);
    st = export_to_partial(&j, err);
    if (st != SPW_OK && j.made)
        (void)spw_dir_remove(j.partial, &ignored);
    spw_hf_reader_close(j.folder);
    spw_st_reader_close(j.masters);
    spw__adapters_close(j.adapters);
    spw_pool_destroy(j.pool);
    spw_bounce_destroy(j.bounce);
    spw_model_destroy(j.model);
    return st;
}
