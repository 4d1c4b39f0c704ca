/*
 * Saving while training goes on. The store hands over every chunk once, as it is after the step that is saved: its next
 * update does that before it changes it, idle workers before that. The chunk's part of each tensor is summed and goes past the page
 * cache; when all have come, a thread of the save flushes, describes and renames, while the next steps run. Nothing is read
 * back, and nothing kept twice in memory, so a save needs none but for its blocks and tables; but updates that a slow disk would hold up
 * leave their bytes to the page cache, as far as there is memory that nobody wants.
 */
#include "checkpoint_internal.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { NAME_BYTES = SPW_PATH_BYTES + 64 };

struct spw_checkpoint_job {
    /* Fixed before the first chunk comes. */
    spw_engine *e;
    spw_state_format format;
    spw_st_writer *model, *optimizer, *adapter; /* written to by any worker; committed and destroyed by the thread.
                                                   model NULL: it is a link; adapter NULL: the model has none */
    spw_bounce *bounce;                         /* lent to them */
    uint32_t base;                              /* parameters that are no adapters: those come behind them */
    uint32_t *first; /* (param_count) of a trained parameter's tensors in the optimizer's file */
    char dir[SPW_PATH_BYTES], partial[NAME_BYTES], final[NAME_BYTES];
    char *config, *model_config, *adapter_config; /* texts, as training is configured now; the last with malloc */
    spw_checkpoint_state state;
    spw_loss_scaler scaler;
    uint64_t keep;
    bool writes;            /* where several ranks hold the same, one of them does */
    bool unchanged, linked; /* frozen weights are what the last checkpoint's file has, on all ranks; it was linked */
    uint64_t contents;
    char model_digest[17];
    pthread_t thread;
    bool threaded; /* it was started; else who finishes the save does its work */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    /* Under lock. */
    uint32_t chunks_left;
    bool given_up, done;
    spw_error error; /* the first */
};

static void
keep_error(spw_checkpoint_job *job, const spw_error *err)
{
    pthread_mutex_lock(&job->lock);
    spw_error_keep_first(&job->error, err);
    pthread_mutex_unlock(&job->lock);
}

/* ---------------------------------------------------------------- chunks, on the store's workers */

/* fp32's master is the weight itself and is not stored twice. */
static int
first_part(spw_state_format f)
{
    return f == SPW_STATE_FP32 ? SPW_PART_EXP_AVG : SPW_PART_MASTER;
}

/* How many of a record's parts are stored. */
static uint32_t
parts_of(spw_state_format f, const spw_optimizer *rule)
{
    return spw__checkpoint_part_end(rule) - (uint32_t)first_part(f);
}

/* A part as fp32. */
static spw_status
make_part(void *ctx, uint64_t offset, void *out, uint64_t bytes, spw_error *err)
{
    const spw__chunk_view *v = ctx;
    (void)err;
    spw_state_get(v->format, v->rule, v->weights, v->record, v->c->elems, v->part,
                  v->param_first + offset / 4 - v->c->first, bytes / 4, out);
    return SPW_OK;
}

/* The weights as they are. */
static spw_status
make_weights(void *ctx, uint64_t offset, void *out, uint64_t bytes, spw_error *err)
{
    const spw__chunk_view *v = ctx;
    uint64_t size = spw_state_weight_bytes(v->format), at = v->param_first + offset / size - v->c->first;
    (void)err;
    memcpy(out, (const char *)v->weights + at * size, bytes);
    return SPW_OK;
}

/* Of a parameter in terms, whose tensor has their sums. */
static spw_status
write_terms(const spw_checkpoint_job *job, uint32_t id, const spw_store_chunk *c, const void *weights,
            const void *record, uint64_t param_first, uint64_t first, uint64_t end, spw_error *err)
{
    float block[SPW_BLOCK_ELEMS];
    for (uint64_t i = first, n; i < end; i += n) {
        n = end - i < SPW_BLOCK_ELEMS ? end - i : SPW_BLOCK_ELEMS;
        spw_state_get(job->format, spw__engine_optimizer(job->e, c->unit_idx), weights, record, c->elems,
                      SPW_PART_MASTER, i - c->first, n, block);
        SPW_TRY(spw_st_write_terms(job->model, id, i - param_first, block, n, err));
    }
    return SPW_OK;
}

static spw_status
write_chunk(const spw_checkpoint_job *job, const spw_store_chunk *c, void *weights, void *record, spw_error *err)
{
    const spw_layout *l = spw_engine_layout(job->e);
    uint32_t wb = spw_state_weight_bytes(job->format);
    const spw_optimizer *rule = spw__engine_optimizer(job->e, c->unit_idx);
    uint32_t parts = parts_of(job->format, rule);
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        uint64_t from = s.from, at = s.first - from, n = s.end - s.first;
        spw__chunk_view v = {job->format, rule, c, weights, record, from, SPW_PART_MASTER};
        if (s.id >= job->base)
            SPW_TRY(spw_st_write_run(job->adapter, s.id - job->base, at * 4, n * 4, make_part, &v, err));
        else if (job->model != NULL && spw_engine_model(job->e)->params[s.id].in_terms)
            SPW_TRY(write_terms(job, s.id, c, weights, record, from, s.first, s.end, err));
        else if (job->model != NULL)
            SPW_TRY(spw_st_write_run(job->model, s.id, at * wb, n * wb, make_weights, &v, err));
        for (uint32_t k = 0; record != NULL && k < parts; k++) {
            v.part = (spw_state_part)(first_part(job->format) + (int)k);
            SPW_TRY(spw_st_write_run(job->optimizer, job->first[s.id] + k, at * 4, n * 4, make_part, &v, err));
        }
    }
    return SPW_OK;
}

/* A file that cannot be written ends the save, not the training: the chunk counts as taken. */
static spw_status
take_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    spw_checkpoint_job *job = ctx;
    spw_error own = {0};
    bool wanted;
    (void)grad;
    (void)err;
    pthread_mutex_lock(&job->lock);
    wanted = job->error.status == SPW_OK;
    pthread_mutex_unlock(&job->lock);
    if (wanted)
        (void)write_chunk(job, &spw_engine_layout(job->e)->chunks[chunk_idx], weights, record, &own);
    pthread_mutex_lock(&job->lock);
    if (own.status != SPW_OK)
        spw_error_keep_first(&job->error, &own);
    SPW_ASSERT(job->chunks_left > 0);
    if (--job->chunks_left == 0)
        pthread_cond_signal(&job->cond);
    pthread_mutex_unlock(&job->lock);
    return SPW_OK;
}

/* ---------------------------------------------------------------- files */

/* Before a byte is written: what the tensors take, with a little for header and manifest. */
static spw_status
check_space(const char *folder, const spw_tensor_info *infos, uint32_t count, spw_error *err)
{
    uint64_t need = 1 << 16;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = spw_dtype_bytes(infos[i].dtype);
        for (uint32_t d = 0; d < infos[i].ndim; d++)
            bytes *= infos[i].shape[d];
        need += bytes + 256;
    }
    return spw_dir_check_room(folder, need, "make room, or set spillway.keep_last", err);
}

/* owner 0: this rank's file; else that of the process, which has created it. */
static spw_status
open_writer(const spw_checkpoint_job *job, spw_st_writer **out, const char *name, const spw_tensor_info *infos,
            uint32_t count, int64_t owner, spw_error *err)
{
    char path[NAME_BYTES + 128];
    if (owner == 0) {
        snprintf(path, sizeof path, "%s/%s", job->partial, name);
        SPW_TRY(spw_st_writer_create(out, path, infos, count, err));
    } else {
        snprintf(path, sizeof path, "%s/%s.tmp-%lld", job->partial, name, (long long)owner);
        SPW_TRY(spw_st_writer_join(out, path, infos, count, err));
    }
    spw_st_writer_past_cache(*out, job->bounce);
    return SPW_OK;
}

/* Slower than this a disk holds up updates for longer than a copy would; the kernel holds up who has made a larger part of memory dirty. */
enum { SLOW_DISK = 1000000000, SPARE_PART = 8 };

static void
spill_on_slow_disks(const spw_checkpoint_job *job)
{
    spw_bounce_spill(job->bounce, spw_memory_room_bytes(0, spw__engine_machine_ranks(job->e)) / SPARE_PART, SLOW_DISK);
}

static spw_status
open_writers(spw_checkpoint_job *job, int64_t owner, spw_error *err)
{
    const spw_model *m = spw_engine_model(job->e);
    bool first = owner == 0;
    uint32_t skip; /* tensors of the model that are there already */
    spw_tensor_info *infos = spw_mem_calloc((uint64_t)m->param_count * (1 + SPW_PART_COUNT), sizeof *infos);
    uint32_t tensors = 0;
    spw_status st;
    job->base = spw__base_count(m);
    job->first = spw_mem_calloc(m->param_count, sizeof *job->first);
    if (infos == NULL || job->first == NULL) {
        spw_mem_free(infos);
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint");
    }
    for (uint32_t id = 0; id < m->param_count; id++) {
        spw__checkpoint_info(&infos[id], &m->params[id], NULL,
                             id < job->base ? spw_state_weight_dtype(job->format) : SPW_F32);
        if (!spw__checkpoint_trains(job->e, id))
            continue;
        const spw_optimizer *rule = spw__checkpoint_rule(job->e, id);
        job->first[id] = tensors;
        for (uint32_t k = 0; k < parts_of(job->format, rule); k++)
            spw__checkpoint_info(&infos[m->param_count + tensors++], &m->params[id],
                                 spw__checkpoint_part_suffix(rule, first_part(job->format) + (int)k), SPW_F32);
    }
    skip = job->linked ? job->base : 0;
    st = spw_bounce_create(&job->bounce, spw__checkpoint_buffers(spw__engine_workers(job->e)), err);
    if (st == SPW_OK)
        spill_on_slow_disks(job);
    if (st == SPW_OK && first)
        st = check_space(job->partial, infos + skip, m->param_count - skip + tensors, err);
    if (st == SPW_OK && !job->linked)
        st = open_writer(job, &job->model, SPW_MODEL_FILE, infos, job->base, owner, err);
    if (st == SPW_OK && job->base < m->param_count)
        st = open_writer(job, &job->adapter, SPW_ADAPTER_FILE, infos + job->base, m->param_count - job->base, owner,
                         err);
    if (st == SPW_OK)
        st = open_writer(job, &job->optimizer, SPW_OPTIMIZER_FILE, infos + m->param_count, tensors, owner, err);
    spw_mem_free(infos);
    return st;
}

enum { BUFFERS_MAX = 8 }; /* no disk is faster with more transfers of a MiB */

uint32_t
spw__checkpoint_buffers(uint32_t workers)
{
    return workers < BUFFERS_MAX ? workers : BUFFERS_MAX;
}

/* A tensor's entry in the header: as text, and as what the JSON library makes of it. */
enum { HEADER_TENSOR_BYTES = 1536, TEXT_BYTES = 64 << 10 };

uint64_t
spw__checkpoint_bytes(const spw_model *model, const spw_layout *layout, const spw_optimizer *optimizer,
                      uint32_t workers)
{
    uint64_t tensors = model->param_count;
    for (uint32_t id = 0; id < model->param_count; id++) {
        const spw_store_unit *u = &layout->units[layout->places[id].unit_idx];
        tensors += u->trainable ? spw__checkpoint_part_end(spw__optimizer_for(optimizer, u->whole)) : 0;
    }
    return tensors * (2 * sizeof(spw_tensor_info) + HEADER_TENSOR_BYTES) + sizeof(spw_checkpoint_job) + TEXT_BYTES +
           spw_touched_bytes(SPW_STACK_BYTES) + spw_file_digest_bytes() +
           workers * spw_touched_bytes(SPW_BLOCK_ELEMS * sizeof(float)) +
           spw_bounce_bytes(spw__checkpoint_buffers(workers));
}

uint64_t
spw_checkpoint_disk_bytes(const spw_engine *e, uint64_t count)
{
    const spw_model *m = spw_engine_model(e);
    spw_state_format format = spw__engine_format(e);
    uint64_t bytes = 1 << 16, of_base = 0, base = spw__base_count(m);
    const spw_config *c = spw__engine_config(e);
    const bool named = !c->run.checkpoint_base && spw_config_start_folder(c) != NULL;
    bool linked = named || c->run.checkpoint_links;
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t elems = m->params[id].rows * m->params[id].cols;
        *(id < base ? &of_base : &bytes) +=
            m->params[id].in_terms ? elems / SPW_TERMS * 4 : elems * (id < base ? spw_state_weight_bytes(format) : 4);
        bytes += spw__checkpoint_trains(e, id) ? elems * parts_of(format, spw__checkpoint_rule(e, id)) * 4 : 0;
        linked = linked && (id >= base || !spw__checkpoint_trains(e, id));
    }
    return count * bytes + (!linked ? count : named ? 0 : 1) * of_base;
}

/* Of the files in the order of their digests; NULL: no such file, or a link. */
static void
list_writers(const spw_checkpoint_job *job, const spw_st_writer *writers[SPW_DIGEST_COUNT])
{
    writers[SPW_DIGEST_MODEL] = job->model;
    writers[SPW_DIGEST_OPTIMIZER] = job->optimizer;
    writers[SPW_DIGEST_ADAPTER] = job->adapter;
}

/* Collective; each rank has written all that it will. */
static spw_status
sum_files(const spw_checkpoint_job *job, spw_st_sum sums[SPW_DIGEST_COUNT], spw_error *err)
{
    const spw_st_writer *writers[SPW_DIGEST_COUNT];
    list_writers(job, writers);
    for (int i = 0; i < SPW_DIGEST_COUNT; i++)
        sums[i] = writers[i] != NULL ? spw_st_writer_sum(writers[i]) : (spw_st_sum){0};
    return spw__checkpoint_sum_ranks(job->e, sums, err);
}

/* Whether the frozen model is in the folder that it came from, and in no file of a checkpoint. */
static bool
names_base(const spw_checkpoint_job *job)
{
    return job->linked && spw__engine_saved(job->e)->base;
}

/* What holds what is frozen, where that is not written. */
static void
name_frozen(const saved_model *s, spw_manifest *m)
{
    memcpy(s->base ? m->base_digest : m->digests[SPW_DIGEST_MODEL], s->digest, sizeof m->base_digest);
    if (s->base)
        snprintf(m->base, sizeof m->base, "%s", s->path);
}

/* A file of which anything is missing or came twice has no digest, and is no checkpoint. */
static spw_status
write_digests(const spw_checkpoint_job *job, const spw_st_sum sums[SPW_DIGEST_COUNT], spw_manifest *m, spw_error *err)
{
    const spw_st_writer *writers[SPW_DIGEST_COUNT];
    list_writers(job, writers);
    if (job->linked)
        name_frozen(spw__engine_saved(job->e), m);
    for (int i = 0; i < SPW_DIGEST_COUNT; i++) {
        uint64_t bytes = writers[i] != NULL ? spw_st_writer_file_bytes(writers[i]) : 0;
        if (sums[i].bytes != bytes)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s/%s: %llu bytes were written of %llu: not all ranks saved the same",
                             job->partial, spw__digest_names[i], (unsigned long long)sums[i].bytes,
                             (unsigned long long)bytes);
        if (bytes > 0)
            snprintf(m->digests[i], sizeof m->digests[i], "%016llx",
                     (unsigned long long)spw_crc64_whole(sums[i].parts, bytes));
    }
    return SPW_OK;
}

static spw_status
write_manifest(spw_checkpoint_job *job, const spw_st_sum sums[SPW_DIGEST_COUNT], spw_error *err)
{
    spw_manifest m = {.state = job->state, .scaled = job->scaler.dynamic, .scaler = job->scaler};
    char path[NAME_BYTES + 64], *text;
    spw_status st;
    SPW_TRY(write_digests(job, sums, &m, err));
    memcpy(job->model_digest, m.digests[SPW_DIGEST_MODEL], sizeof job->model_digest);
    m.config = json_loads(job->config, 0, NULL);
    snprintf(path, sizeof path, "%s/" SPW_MANIFEST_FILE, job->partial);
    text = m.config == NULL ? NULL : spw__manifest_text(&m);
    st = text == NULL ? SPW_RAISE(err, SPW_ENOMEM, "writing %s", path) : spw_file_write_text(path, text, err);
    free(text);
    spw__manifest_free(&m);
    return st;
}

/* What this rank wrote is durable. */
static spw_status
flush(spw_checkpoint_job *job, spw_error *err)
{
    if (!job->writes)
        return SPW_OK;
    if (job->model != NULL)
        SPW_TRY(spw_st_writer_commit(job->model, err));
    SPW_TRY(spw_st_writer_commit(job->optimizer, err));
    return job->adapter == NULL ? SPW_OK : spw_st_writer_commit(job->adapter, err);
}

/* From here on the checkpoint is complete, or what there is of it goes. The manifest comes last. */
static spw_status
complete(spw_checkpoint_job *job, const spw_st_sum sums[SPW_DIGEST_COUNT], spw_error *err)
{
    char path[NAME_BYTES + 64];
    SPW_TRY(flush(job, err));
    snprintf(path, sizeof path, "%s/config.json", job->partial);
    if (!names_base(job)) /* so that the folder loads elsewhere: as a model, or as adapters of one */
        SPW_TRY(spw_file_write_text(path, job->model_config, err));
    if (job->adapter != NULL) {
        snprintf(path, sizeof path, "%s/" SPW_ADAPTER_CONFIG_FILE, job->partial);
        SPW_TRY(spw_file_write_text(path, job->adapter_config, err));
    }
    SPW_TRY(write_manifest(job, sums, err));
    SPW_TRY(spw_dir_sync(job->partial, err));
    SPW_TRY(spw__checkpoint_place(job->dir, job->partial, job->final, err));
    spw__checkpoint_trim(job->dir, job->state.step, job->keep);
    return SPW_OK;
}

/* ---------------------------------------------------------------- the job */

/* All ranks have written their parts before the first one completes the checkpoint, and it is complete before any is done. */
static spw_status
finish_together(spw_checkpoint_job *job, spw_error *own, spw_error *err)
{
    int64_t number = 0;
    spw_st_sum sums[SPW_DIGEST_COUNT];
    spw_error completing = {0};
    if (own->status == SPW_OK && spw__engine_rank(job->e) > 0)
        (void)flush(job, own);
    SPW_TRY(spw__engine_agree(job->e, own->status, own, &number, err));
    SPW_TRY(sum_files(job, sums, err));
    if (spw__engine_rank(job->e) == 0)
        (void)complete(job, sums, &completing);
    return spw__engine_agree(job->e, completing.status, &completing, &number, err);
}

static void *
job_main(void *arg)
{
    spw_checkpoint_job *job = arg;
    spw_error own = {0}, err = {0};
    pthread_mutex_lock(&job->lock);
    while (job->chunks_left > 0 && !job->given_up)
        pthread_cond_wait(&job->cond, &job->lock);
    own = job->error;
    pthread_mutex_unlock(&job->lock);
    (void)finish_together(job, &own, &err);
    pthread_mutex_lock(&job->lock);
    if (err.status != SPW_OK)
        spw_error_keep_first(&job->error, &err);
    job->done = true;
    pthread_mutex_unlock(&job->lock);
    return NULL;
}

static void
end_work(spw_checkpoint_job *job)
{
    if (job->threaded)
        pthread_join(job->thread, NULL);
    else
        (void)job_main(job);
}

/* What the thread does not need any more, or what there was before it. */
static void
release(spw_checkpoint_job *job, bool remove)
{
    spw_error ignored = {0}; /* the first error is the one to tell */
    const spw_checkpoint_job **saving = spw__engine_saving(job->e);
    spw_st_writer_destroy(job->model);
    spw_st_writer_destroy(job->optimizer);
    spw_st_writer_destroy(job->adapter);
    spw_bounce_destroy(job->bounce);
    spw_mem_free(job->first);
    free(job->adapter_config);
    if (*saving == job) {
        *saving = NULL;
        if (remove && spw__engine_rank(job->e) == 0 && access(job->partial, F_OK) == 0)
            (void)spw_dir_remove(job->partial, &ignored);
    }
    spw_mem_free(job->config);
    spw_mem_free(job->model_config);
    pthread_mutex_destroy(&job->lock);
    pthread_cond_destroy(&job->cond);
    spw_mem_free(job);
}

/* As peft has it; where the weights are not beside the adapters, it is told where. */
static spw_status
describe_adapters(spw_checkpoint_job *job, const spw_config *config, spw_error *err)
{
    json_t *adapters;
    if (spw_engine_model(job->e)->lora.rank == 0)
        return SPW_OK;
    adapters = spw__adapter_config(spw_engine_model(job->e), config);
    if (names_base(job))
        spw__adapter_names_base(adapters, spw__engine_saved(job->e)->path);
    job->adapter_config = json_dumps(adapters, JSON_INDENT(2));
    json_decref(adapters);
    return job->adapter_config != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "adapter_config.json");
}

static spw_status
prepare(spw_checkpoint_job *job, const spw_config *config, spw_error *err)
{
    const char *source = spw__checkpoint_source(job->e, config);
    job->config = spw_config_dump(config);
    SPW_TRY(spw_hf_config_carry(&job->model_config, &spw_engine_model(job->e)->config, source,
                                spw_state_weight_dtype(job->format), err));
    if (job->config == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint manifest");
    if (spw__engine_rank(job->e) > 0)
        return SPW_OK; /* folder and files are the first rank's */
    SPW_TRY(spw__checkpoint_check_name(job->final, err));
    SPW_TRY(spw_dir_make(job->dir, err));
    spw__checkpoint_recover(job->dir);
    if (access(job->partial, F_OK) == 0)
        SPW_TRY(spw_dir_remove(job->partial, err)); /* a save that was killed */
    SPW_TRY(spw_dir_make(job->partial, err));
    SPW_TRY(spw_hf_copy_companions(source, spw_config_kept_tokenizer(config), job->partial, err));
    job->linked = job->unchanged && spw__checkpoint_link(job->e, job->partial);
    SPW_TRY(describe_adapters(job, config, err));
    return open_writers(job, 0, err);
}

static uint32_t
chunks_to_come(const spw_checkpoint_job *job)
{
    const spw_layout *l = spw_engine_layout(job->e);
    uint32_t count = 0;
    for (uint32_t i = 0; i < l->chunk_count; i++)
        count += !job->linked || l->units[l->chunks[i].unit_idx].trainable;
    return count;
}

/* One save at a time: another one's folder may have the same name. Before anything is touched, on all ranks alike. */
static spw_status
take_turn(spw_checkpoint_job *job, spw_error *err)
{
    const spw_checkpoint_job **saving = spw__engine_saving(job->e);
    spw_error own = {0};
    if (*saving != NULL)
        (void)SPW_RAISE(&own, SPW_EINVAL, "the save of %s is under way", (*saving)->final);
    SPW_TRY(spw__engine_consent(job->e, &own, job->state.step, err));
    *saving = job;
    return SPW_OK;
}

/*
 * A user or container may have no thread left by the time of a save, and what was trained is worth more than one. Among ranks each needs
 * its own: they wait for each other here while the others train on.
 */
static spw_status
start_work(spw_checkpoint_job *job, spw_error *err)
{
    int rc = pthread_create(&job->thread, NULL, job_main, job);
    job->threaded = rc == 0;
    if (job->threaded)
        (void)pthread_setname_np(job->thread, "spw-save");
    return job->threaded || spw__engine_world(job->e) == 1
               ? SPW_OK
               : SPW_RAISE_SYS(err, rc, "start of the thread that saves " SPW_THREAD_LIMITS);
}

/* The first rank makes the files, others that write open them, and all of them know whether all of them could. */
static spw_status
prepare_together(spw_checkpoint_job *job, const spw_config *config, spw_error *err)
{
    spw_error own = {0};
    double changed = spw__checkpoint_unchanged(job->e, config) ? 0 : 1;
    int64_t owner, none = 0;
    SPW_TRY(take_turn(job, err));
    SPW_TRY(spw_engine_sum(job->e, &changed, 1, err));
    job->unchanged = changed == 0;
    job->contents = spw__checkpoint_contents(job->e);
    if (spw__engine_settle(job->e, &own) == SPW_OK)
        (void)prepare(job, config, &own);
    owner = job->linked ? -(int64_t)getpid() : (int64_t)getpid();
    SPW_TRY(spw__engine_agree(job->e, own.status, &own, &owner, err));
    job->linked = owner < 0;
    owner = owner < 0 ? -owner : owner;
    if (spw__engine_rank(job->e) > 0 && job->writes)
        (void)open_writers(job, owner, &own);
    SPW_TRY(spw__engine_agree(job->e, own.status, &own, &none, err));
    job->chunks_left = job->writes ? chunks_to_come(job) : 0;
    return start_work(job, err);
}

spw_status
spw_checkpoint_begin(spw_checkpoint_job **out, spw_engine *e, const spw_config *config, const char *dir,
                     const spw_checkpoint_state *state, spw_error *err)
{
    spw_checkpoint_job *job;
    spw_error own = {0};
    spw_status st;
    *out = NULL;
    SPW_TRY(spw__checkpoint_fits(dir, err));
    job = spw_mem_zalloc(sizeof *job);
    if (job == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint");
    job->e = e;
    job->format = spw__engine_format(e);
    job->state = *state;
    job->scaler = *spw_engine_loss_scaler(e);
    job->keep = config->run.keep_last;
    job->writes = spw__engine_writes(e);
    snprintf(job->dir, sizeof job->dir, "%.900s", dir);
    snprintf(job->final, sizeof job->final, "%.900s/step-%llu", dir, (unsigned long long)state->step);
    snprintf(job->partial, sizeof job->partial, "%.1000s.partial", job->final);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->cond, NULL);
    st = prepare_together(job, config, err);
    if (st != SPW_OK) {
        spw_error_wrap(err, "saving checkpoint %s", job->final);
        release(job, true);
        return st;
    }
    if (job->writes && spw_store_snapshot_begin(spw_engine_store(e), spw__engine_generations(e), job->linked,
                                                take_chunk, job, &own) != SPW_OK) {
        keep_error(job, &own);
        pthread_mutex_lock(&job->lock);
        job->given_up = true;
        pthread_cond_signal(&job->cond);
        pthread_mutex_unlock(&job->lock);
        end_work(job);
        release(job, true);
        if (err != NULL)
            *err = own;
        return own.status;
    }
    *out = job;
    return SPW_OK;
}

bool
spw_checkpoint_done(spw_checkpoint_job *job)
{
    bool done;
    pthread_mutex_lock(&job->lock);
    done = job->done || (!job->threaded && (job->chunks_left == 0 || job->given_up));
    pthread_mutex_unlock(&job->lock);
    return done;
}

static bool
lacks_chunks(spw_checkpoint_job *job)
{
    bool lacks;
    pthread_mutex_lock(&job->lock);
    lacks = job->chunks_left > 0;
    pthread_mutex_unlock(&job->lock);
    return lacks;
}

/* Visits what is left; nothing is handed over from here on. */
static void
end_snapshot(spw_checkpoint_job *job)
{
    spw_error own = {0};
    if (lacks_chunks(job))
        (void)spw_engine_drain(job->e, &own); /* what is read now belongs to no step */
    if (!job->writes || spw_store_snapshot_finish(spw_engine_store(job->e), &own) == SPW_OK || own.status == SPW_OK)
        return;
    pthread_mutex_lock(&job->lock);
    if (job->chunks_left > 0)
        spw_error_keep_first(&job->error, &own);
    job->given_up = true;
    pthread_cond_signal(&job->cond);
    pthread_mutex_unlock(&job->lock);
}

void
spw_checkpoint_hand_over(spw_checkpoint_job *job)
{
    if (lacks_chunks(job))
        end_snapshot(job);
}

spw_status
spw_checkpoint_finish(spw_checkpoint_job *job, char *path_out, spw_error *err)
{
    spw_status st;
    if (job == NULL)
        return SPW_OK;
    end_snapshot(job);
    end_work(job);
    st = job->error.status;
    if (st == SPW_OK && !names_base(job))
        spw__checkpoint_saved(job->e, job->final, job->model_digest, job->contents);
    if (st != SPW_OK && err != NULL) {
        *err = job->error;
        spw_error_wrap(err, "saving checkpoint %s", job->final);
    } else if (st == SPW_OK && path_out != NULL) {
        snprintf(path_out, SPW_PATH_BYTES, "%.1000s", job->final);
    }
    release(job, st != SPW_OK);
    return st;
}

spw_status
spw_checkpoint_save(spw_engine *e, const spw_config *config, const char *dir, const spw_checkpoint_state *state,
                    char *path_out, spw_error *err)
{
    spw_checkpoint_job *job;
    SPW_TRY(spw_checkpoint_begin(&job, e, config, dir, state, err));
    return spw_checkpoint_finish(job, path_out, err);
}
