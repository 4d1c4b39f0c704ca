/*
 * The weights alone, in a 16-bit type, as a Hugging Face folder. The writers are those of checkpoints, but it is a sweep
 * between steps: it is there when the call returns, and training waits for it. The first rank makes the folder and the
 * files, all write what they hold, the first one completes it.
 */
#include "checkpoint_internal.h"
#include "engine_internal.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { FOLDER_BYTES = 1000, NAME_BYTES = FOLDER_BYTES + 128 };

typedef struct job {
    /* Fixed before the sweep. */
    spw_engine *e;
    const char *folder;
    char partial[FOLDER_BYTES + 16];
    spw_dtype dtype;
    uint32_t base;            /* parameters that are no adapters */
    spw_st_writer *model;     /* written to by any worker */
    spw_st_writer *adapter;   /* NULL: the model has none */
    bool writes, made_folder; /* where several ranks hold the same, one of them writes */
    pthread_mutex_t lock;
    /* Under lock. */
    spw_error error; /* of the files, the first: it ends the save, not the training */
} job;

static spw_status
check(const job *j, spw_error *err)
{
    if (j->dtype != SPW_BF16 && j->dtype != SPW_F16)
        return SPW_RAISE(err, SPW_EINVAL, "16-bit weights are bf16 or fp16, not %s", spw_dtype_name(j->dtype));
    if (j->folder[0] == '\0' || strlen(j->folder) >= FOLDER_BYTES)
        return SPW_RAISE(err, SPW_EINVAL, "the folder's name is empty or longer than %d bytes", FOLDER_BYTES - 1);
    if (j->e->in_step)
        return SPW_RAISE(err, SPW_EINVAL, "weights cannot be saved in the middle of a step");
    if (j->e->rank == 0 && access(j->folder, F_OK) == 0)
        return SPW_RAISE_SYS(err, EEXIST, "%s, where a new folder is made", j->folder);
    return spw_store_sweep_some(j->e->store, SPW_SWEEP_VISIT, 0, 0, NULL, NULL, err);
}

/* ---------------------------------------------------------------- files */

/* owner 0: this rank makes it; else it is that of the process. */
static spw_status
open_file(const job *j, spw_st_writer **out, const char *name, spw_dtype dtype, uint32_t first, uint32_t end,
          int64_t owner, spw_error *err)
{
    char path[NAME_BYTES];
    spw_tensor_info *infos = spw_mem_calloc(end - first, sizeof *infos);
    spw_status st;
    if (infos == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%u tensors of %s", end - first, name);
    for (uint32_t id = first; id < end; id++)
        spw__checkpoint_info(&infos[id - first], &j->e->model->params[id], NULL, dtype);
    snprintf(path, sizeof path, "%s/%s", j->partial, name);
    if (owner == 0) {
        st = spw_st_writer_create(out, path, infos, end - first, err);
    } else {
        snprintf(path, sizeof path, "%s/%s.tmp-%lld", j->partial, name, (long long)owner);
        st = spw_st_writer_join(out, path, infos, end - first, err);
    }
    spw_mem_free(infos);
    return st;
}

static spw_status
open_files(job *j, int64_t owner, spw_error *err)
{
    uint32_t count = j->e->model->param_count;
    SPW_TRY(open_file(j, &j->model, SPW_MODEL_FILE, j->dtype, 0, j->base, owner, err));
    return j->base == count ? SPW_OK : open_file(j, &j->adapter, SPW_ADAPTER_FILE, SPW_F32, j->base, count, owner, err);
}

static spw_status
make_folder(job *j, spw_error *err)
{
    SPW_TRY(spw_hf_remove_partial(j->partial, err)); /* of one that was killed */
    SPW_TRY(spw_dir_make(j->partial, err));
    j->made_folder = true;
    return open_files(j, 0, err);
}

static spw_status
write_text(const job *j, const char *name, const char *text, spw_error *err)
{
    char path[NAME_BYTES];
    snprintf(path, sizeof path, "%s/%s", j->partial, name);
    return text != NULL ? spw_file_write_text(path, text, err) : SPW_RAISE(err, SPW_ENOMEM, "writing %s", path);
}

static spw_status
write_config(const job *j, spw_error *err)
{
    const spw_config *c = &j->e->config;
    const char *source = spw__checkpoint_source(j->e, c);
    char *text;
    spw_status st;
    SPW_TRY(spw_hf_config_carry(&text, &j->e->model->config, source, j->dtype, err));
    st = write_text(j, "config.json", text, err);
    spw_mem_free(text);
    if (st == SPW_OK)
        st = spw_hf_copy_companions(source, spw_config_kept_tokenizer(c), j->partial, err);
    if (st == SPW_OK && j->adapter != NULL) {
        json_t *adapters = spw__adapter_config(j->e->model, c);
        text = json_dumps(adapters, JSON_INDENT(2));
        st = write_text(j, SPW_ADAPTER_CONFIG_FILE, text, err);
        free(text);
        json_decref(adapters);
    }
    return st;
}

static spw_status
flush(const job *j, spw_error *err)
{
    SPW_TRY(spw_st_writer_commit(j->model, err));
    return j->adapter == NULL ? SPW_OK : spw_st_writer_commit(j->adapter, err);
}

/* The folder's name comes last. */
static spw_status
complete(const job *j, spw_error *err)
{
    SPW_TRY(flush(j, err));
    SPW_TRY(write_config(j, err));
    SPW_TRY(spw_dir_sync(j->partial, err));
    if (rename(j->partial, j->folder) != 0)
        return SPW_RAISE_SYS(err, errno, "renaming %s to %s", j->partial, j->folder);
    return spw_dir_sync_above(j->folder, err);
}

/* ---------------------------------------------------------------- chunks, on the store's workers */

/* Elements [first, end) of the chunk's unit, of one parameter, from their masters. */
static spw_status
write_masters(const job *j, spw_st_writer *w, uint32_t tensor, spw_dtype dtype, const spw_store_chunk *c,
              const void *weights, const void *record, uint64_t param_first, uint64_t first, uint64_t end,
              spw_error *err)
{
    float block[SPW_BLOCK_ELEMS];
    uint16_t rounded[SPW_BLOCK_ELEMS];
    uint32_t bytes = spw_dtype_bytes(dtype);
    for (uint64_t i = first; i < end; i += SPW_BLOCK_ELEMS) {
        uint64_t n = end - i < SPW_BLOCK_ELEMS ? end - i : SPW_BLOCK_ELEMS;
        spw_state_get(j->e->config.run.state_format, spw__engine_optimizer(j->e, c->unit_idx), weights, record,
                      c->elems, SPW_PART_MASTER, i - c->first, n, block);
        if (w == j->model && j->e->model->params[tensor].in_terms) {
            SPW_TRY(spw_st_write_terms(w, tensor, i - param_first, block, n, err));
            continue;
        }
        if (dtype != SPW_F32)
            SPW_TRY(spw_st_round(rounded, dtype, block, n, j->e->model->params[tensor].name, i - param_first, err));
        SPW_TRY(spw_st_write(w, tensor, (i - param_first) * bytes, dtype != SPW_F32 ? (void *)rounded : (void *)block,
                             n * bytes, err));
    }
    return SPW_OK;
}

static spw_status
write_chunk(const job *j, const spw_store_chunk *c, const void *weights, const void *record, spw_error *err)
{
    const spw_layout *l = &j->e->layout;
    spw_dtype stored = spw_state_weight_dtype(j->e->config.run.state_format);
    uint32_t wb = spw_dtype_bytes(stored);
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        uint32_t id = s.id;
        uint64_t first = s.first, end = s.end, from = s.from;
        if (id >= j->base)
            SPW_TRY(write_masters(j, j->adapter, id - j->base, SPW_F32, c, weights, record, from, first, end, err));
        else if (stored == j->dtype && !j->e->model->params[id].in_terms)
            SPW_TRY(spw_st_write(j->model, id, (first - from) * wb, (const char *)weights + (first - c->first) * wb,
                                 (end - first) * wb, err));
        else
            SPW_TRY(write_masters(j, j->model, id, j->dtype, c, weights, record, from, first, end, err));
    }
    return SPW_OK;
}

static spw_status
take_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    job *j = ctx;
    spw_error own = {0};
    (void)grad;
    (void)err;
    if (write_chunk(j, &j->e->layout.chunks[chunk_idx], weights, record, &own) == SPW_OK)
        return SPW_OK;
    pthread_mutex_lock(&j->lock);
    spw_error_keep_first(&j->error, &own);
    pthread_mutex_unlock(&j->lock);
    return SPW_OK;
}

/* ---------------------------------------------------------------- together */

/* The consent says that no checkpoint is being written: from then on the channel of saves is free, which waits for disks. */
static spw_status
save(job *j, spw_error *err)
{
    spw_engine *e = j->e;
    uint64_t said[2] = {spw_checksum(j->folder, strlen(j->folder)), j->dtype};
    int64_t owner = (int64_t)getpid(), none = 0;
    spw_error own = {0};
    (void)check(j, &own);
    SPW_TRY(spw__engine_consent(e, &own, spw_checksum(said, sizeof said), err));
    (void)spw_dir_partial(j->folder, j->partial, sizeof j->partial);
    if (spw__engine_settle(e, &own) == SPW_OK && e->rank == 0)
        (void)make_folder(j, &own);
    SPW_TRY(spw__engine_agree(e, own.status, &own, &owner, err));
    if (e->rank > 0 && j->writes)
        (void)open_files(j, owner, &own);
    SPW_TRY(spw__engine_agree(e, own.status, &own, &none, err));
    e->counting = false;
    if (j->writes && spw_store_sweep(e->store, SPW_SWEEP_VISIT, take_chunk, j, &own) == SPW_OK)
        own = j->error;
    if (own.status == SPW_OK && j->writes && e->rank > 0)
        (void)flush(j, &own);
    SPW_TRY(spw__engine_agree(e, own.status, &own, &none, err));
    if (e->rank == 0)
        (void)complete(j, &own);
    return spw__engine_agree(e, own.status, &own, &none, err);
}

spw_status
spw_engine_save_16bit(spw_engine *e, const char *folder, spw_dtype dtype, spw_error *err)
{
    job j = {.e = e, .folder = folder, .dtype = dtype, .base = spw__base_count(e->model)};
    spw_error ignored = {0}; /* the first error is the one to tell */
    spw_status st;
    j.writes = spw__engine_writes(e);
    pthread_mutex_init(&j.lock, NULL);
    st = save(&j, err);
    spw_st_writer_destroy(j.model);
    spw_st_writer_destroy(j.adapter);
    if (st != SPW_OK && j.made_folder && access(j.partial, F_OK) == 0)
        (void)spw_dir_remove(j.partial, &ignored);
    pthread_mutex_destroy(&j.lock);
    return st;
}
