/*
 * Checkpoints: a folder with Hugging Face's model.safetensors and config.json, the optimizer's tensors in full shape,
 * and spillway.json. Tensors are keyed by name and full shape, so any placement, chunk size and exact state format can
 * load them; adapters are in a file of their own beside the model's, in fp32. This file finds, reads and loads;
 * checkpoint_save.c writes.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---------------------------------------------------------------- shared with saving */

spw_status
spw__checkpoint_fits(const char *path, spw_error *err)
{
    return strlen(path) < SPW_CHECKPOINT_DIR_BYTES
               ? SPW_OK
               : SPW_RAISE(err, SPW_EINVAL, "checkpoint %.60s...: the path is longer than %d bytes", path,
                           SPW_CHECKPOINT_DIR_BYTES - 1);
}

const char *
spw__checkpoint_part_suffix(const spw_optimizer *o, int part)
{
    return part == SPW_PART_MASTER ? "master" : o->moment_names[part - SPW_PART_EXP_AVG];
}

uint32_t
spw__checkpoint_part_end(const spw_optimizer *o)
{
    return SPW_PART_EXP_AVG + o->moment_count;
}

bool
spw__checkpoint_trains(const spw_engine *e, uint32_t id)
{
    const spw_layout *l = spw_engine_layout(e);
    return l->units[l->places[id].unit_idx].trainable;
}

void
spw__checkpoint_info(spw_tensor_info *t, const spw_param *p, const char *suffix, spw_dtype dtype)
{
    spw_st_describe(t, p, dtype);
    if (suffix == NULL)
        return;
    snprintf(t->name, sizeof t->name, "%s.%s", p->name, suffix); /* each parameter's own */
    t->stack = t->slice = 0;
}

/* ---------------------------------------------------------------- finding and reading */

spw_status
spw_checkpoint_find(const char *path, char *found, spw_error *err)
{
    char manifest[SPW_PATH_BYTES + 300];
    uint64_t best = 0, n;
    bool any = false;
    struct dirent *entry;
    DIR *dir;
    SPW_TRY(spw__checkpoint_fits(path, err));
    snprintf(manifest, sizeof manifest, "%.1000s/" SPW_MANIFEST_FILE, path);
    if (spw__manifest_there(manifest)) {
        snprintf(found, SPW_PATH_BYTES, "%.1000s", path);
        return SPW_OK;
    }
    dir = opendir(path);
    if (dir == NULL)
        return SPW_RAISE_SYS(err, errno, "checkpoint %s", path);
    while ((entry = readdir(dir)) != NULL) {
        if (!spw__checkpoint_step(path, entry->d_name, &n) || (any && n < best))
            continue;
        best = n;
        any = true;
    }
    closedir(dir);
    if (!any)
        return SPW_RAISE(err, SPW_ENOENT, "%s holds no complete checkpoint (step-<n>/" SPW_MANIFEST_FILE ")", path);
    snprintf(found, SPW_PATH_BYTES, "%.900s/step-%llu", path, (unsigned long long)best);
    return SPW_OK;
}

spw_status
spw_checkpoint_read_config(const char *path, spw_config *config, spw_checkpoint_state *state, spw_error *err)
{
    char file[SPW_PATH_BYTES + 64];
    spw_manifest m;
    spw_status st;
    SPW_TRY(spw__manifest_read(&m, path, err));
    snprintf(file, sizeof file, "%.1000s/" SPW_MANIFEST_FILE, path);
    st = spw__manifest_config(&m, file, config, err);
    if (state != NULL)
        *state = m.state;
    spw__manifest_free(&m);
    return st;
}

static spw_status
compare(const spw_manifest *m, int file, const char *path, uint64_t digest, spw_error *err)
{
    const char *want = m->digests[file];
    char got[20];
    snprintf(got, sizeof got, "%016llx", (unsigned long long)digest);
    if (strcmp(want, got) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s/%s: digest is %s, " SPW_MANIFEST_FILE " says %s; the file is truncated or damaged", path,
                         spw__digest_names[file], got, want[0] != '\0' ? want : "nothing");
    return SPW_OK;
}

static spw_status
check_digest(const spw_manifest *m, int file, const char *path, spw_error *err)
{
    char name[SPW_PATH_BYTES + 64];
    uint64_t digest = 0;
    snprintf(name, sizeof name, "%.1000s/%s", path, spw__digest_names[file]);
    SPW_TRY(spw__checkpoint_digest(name, spw__checkpoint_spare(name), &digest, err));
    return compare(m, file, path, digest, err);
}

/* Of the files that are read. */
static spw_status
check_digests(const spw_manifest *m, const char *path, bool adapter, bool optimizer, spw_error *err)
{
    if (!m->digests_known) {
        spw_log(SPW_LOG_WARN,
                "%s is of an earlier version, whose digests are not computed any more: its files are not "
                "checked for damage",
                path);
        return SPW_OK;
    }
    SPW_TRY(check_digest(m, SPW_DIGEST_MODEL, path, err));
    if (adapter)
        SPW_TRY(check_digest(m, SPW_DIGEST_ADAPTER, path, err));
    return optimizer ? check_digest(m, SPW_DIGEST_OPTIMIZER, path, err) : SPW_OK;
}

spw_status
spw_checkpoint_verify(const char *path, bool optimizer, spw_error *err)
{
    spw_manifest m;
    spw_status st;
    SPW_TRY(spw__manifest_read(&m, path, err));
    st = check_digests(&m, path, spw_dir_has(path, SPW_ADAPTER_FILE),
                       optimizer && spw_dir_has(path, SPW_OPTIMIZER_FILE), err);
    spw__manifest_free(&m);
    return st;
}

/* ---------------------------------------------------------------- loading */

typedef struct load_job {
    spw_engine *e;
    spw_state_format format;
    const spw_optimizer *rule;
    spw_hf_reader *model;
    spw_st_reader *optimizer;        /* NULL: inference */
    spw_st_reader *adapter;          /* NULL: the model has none */
    const spw_tensor_info **tensors; /* (param_count, SPW_PART_COUNT) of the optimizer's file; NULL: not stored.
                                        An adapter's master is in the adapters' file */
} load_job;

static spw_status
load_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    load_job *job = ctx;
    const spw_layout *l = spw_engine_layout(job->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    (void)grad;
    memset(weights, 0, c->elems * spw_state_weight_bytes(job->format));
    if (record != NULL)
        memset(record, 0, spw_state_record_bytes(job->format, job->rule, c->elems));
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        const spw_tensor_info **t = job->tensors + (size_t)s.id * SPW_PART_COUNT;
        uint32_t id = s.id;
        for (uint64_t i = s.first; i < s.end; i += SPW_BLOCK_ELEMS) {
            float block[SPW_BLOCK_ELEMS];
            uint64_t n = s.end - i < SPW_BLOCK_ELEMS ? s.end - i : SPW_BLOCK_ELEMS, at = i - l->places[id].first;
            if (spw_engine_model(job->e)->params[id].adapter)
                SPW_TRY(spw_st_read(job->adapter, t[SPW_PART_MASTER], at * 4, block, n * 4, err));
            else if (record != NULL && t[SPW_PART_MASTER] != NULL)
                SPW_TRY(spw_st_read_summed(job->optimizer, t[SPW_PART_MASTER], at * 4, block, n * 4, err));
            else
                SPW_TRY(spw_hf_read_param(job->model, id, at, n, block, err));
            spw_state_set(job->format, job->rule, weights, record, c->elems, SPW_PART_MASTER, i - c->first, n, block);
            for (int p = SPW_PART_EXP_AVG; record != NULL && p < (int)spw__checkpoint_part_end(job->rule); p++) {
                SPW_TRY(spw_st_read_summed(job->optimizer, t[p], at * 4, block, n * 4, err));
                spw_state_set(job->format, job->rule, weights, record, c->elems, (spw_state_part)p, i - c->first, n,
                              block);
            }
        }
    }
    return SPW_OK;
}

/*
 * The optimizer's file, which is the most of a checkpoint, is summed as it is read, each rank its part. One that was not read as a
 * whole, where less is trained now than then, is read again for it. Collective.
 */
static spw_status
check_read(const load_job *job, const spw_manifest *m, const char *path, spw_error *err)
{
    spw_st_sum sums[SPW_DIGEST_COUNT] = {{0}}, *sum = &sums[SPW_DIGEST_OPTIMIZER];
    uint64_t bytes = spw_st_reader_file_bytes(job->optimizer);
    if (spw__engine_writes(job->e)) /* the others read the same */
        *sum = spw_st_reader_sum(job->optimizer, spw__engine_rank(job->e) == 0);
    SPW_TRY(spw__checkpoint_sum_ranks(job->e, sums, err));
    if (sum->bytes != bytes)
        return spw__engine_rank(job->e) == 0 ? check_digest(m, SPW_DIGEST_OPTIMIZER, path, err) : SPW_OK;
    return compare(m, SPW_DIGEST_OPTIMIZER, path, spw_crc64_whole(sum->parts, bytes), err);
}

static spw_status
find_tensor(spw_st_reader *r, const char *path, const spw_param *p, const char *suffix, const spw_tensor_info **out,
            spw_error *err)
{
    spw_tensor_info want;
    spw__checkpoint_info(&want, p, suffix, SPW_F32);
    *out = spw_st_reader_find(r, want.name);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s: tensor %s is missing; this is a checkpoint of another optimizer or model", path,
                         want.name);
    if ((*out)->dtype != SPW_F32)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is %s, it must be fp32", path, want.name,
                         spw_dtype_name((*out)->dtype));
    if ((*out)->ndim != want.ndim || (*out)->shape[0] != want.shape[0] ||
        (want.ndim > 1 && (*out)->shape[1] != want.shape[1]))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape [%llu, %llu], this model needs [%llu, %llu]", path,
                         want.name, (unsigned long long)(*out)->shape[0],
                         (unsigned long long)((*out)->ndim > 1 ? (*out)->shape[1] : 1),
                         (unsigned long long)want.shape[0], (unsigned long long)(want.ndim > 1 ? want.shape[1] : 1));
    return SPW_OK;
}

static spw_status
open_tensors(load_job *job, const char *path, bool with_optimizer, spw_error *err)
{
    const spw_model *m = spw_engine_model(job->e);
    char file[SPW_PATH_BYTES + 64];
    snprintf(file, sizeof file, "%.1000s/" SPW_MODEL_FILE, path);
    SPW_TRY(spw_hf_reader_open(&job->model, file, err));
    SPW_TRY(spw_hf_reader_bind(job->model, m, err));
    if (m->lora.rank > 0) {
        snprintf(file, sizeof file, "%.1000s/" SPW_ADAPTER_FILE, path);
        SPW_TRY(spw_st_reader_open(&job->adapter, file, err));
        for (uint32_t id = spw__base_count(m); id < m->param_count; id++)
            SPW_TRY(find_tensor(job->adapter, file, &m->params[id], NULL,
                                &job->tensors[(size_t)id * SPW_PART_COUNT + SPW_PART_MASTER], err));
    }
    if (!with_optimizer)
        return SPW_OK;
    snprintf(file, sizeof file, "%.1000s/" SPW_OPTIMIZER_FILE, path);
    SPW_TRY(spw_st_reader_open(&job->optimizer, file, err));
    for (uint32_t id = 0; id < m->param_count; id++) {
        for (int p = 0; spw__checkpoint_trains(job->e, id) && p < (int)spw__checkpoint_part_end(job->rule); p++) {
            const spw_tensor_info **slot = &job->tensors[(size_t)id * SPW_PART_COUNT + (size_t)p];
            spw_tensor_info want;
            spw__checkpoint_info(&want, &m->params[id], spw__checkpoint_part_suffix(job->rule, p), SPW_F32);
            if (p == SPW_PART_MASTER && (m->params[id].adapter || !spw_st_reader_find(job->optimizer, want.name)))
                continue; /* written by the fp32 format, or found above */
            SPW_TRY(find_tensor(job->optimizer, file, &m->params[id], spw__checkpoint_part_suffix(job->rule, p), slot,
                                err));
        }
    }
    return SPW_OK;
}

/* Would a save write the model's file as it is? */
static bool
same_types(const load_job *job)
{
    const spw_model *m = spw_engine_model(job->e);
    bool same = true;
    for (uint32_t id = 0; id < spw__base_count(m) && same; id++) {
        spw_st_extent at;
        spw_dtype dtype;
        if (!m->params[id].in_terms) /* always fp32 */
            same = spw_hf_reader_extent(job->model, id, &at, &dtype) && dtype == spw_state_weight_dtype(job->format);
    }
    return same;
}

spw_status
spw_checkpoint_load(spw_engine *e, const char *path, spw_error *err)
{
    load_job job = {.e = e, .format = spw__engine_format(e), .rule = spw__engine_optimizer(e)};
    bool with_optimizer = spw__layout_trained(spw_engine_layout(e)) > 0;
    char model[SPW_PATH_BYTES + 64];
    spw_manifest manifest = {0};
    spw_error own = {0};
    int64_t none = 0;
    spw_status st;
    job.tensors = spw_mem_calloc((uint64_t)spw_engine_model(e)->param_count * SPW_PART_COUNT, sizeof *job.tensors);
    if (job.tensors == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint");
    snprintf(model, sizeof model, "%.1000s/" SPW_MODEL_FILE, path);
    st = spw__in_place_check(e, model, &own);
    if (st == SPW_OK)
        st = spw__manifest_read(&manifest, path, &own);
    if (st == SPW_OK) {
        if (manifest.scaled) /* without one (of bf16, say) the scale is where it begins */
            spw_engine_set_loss_scaler(e, &manifest.scaler);
        st = open_tensors(&job, path, with_optimizer, &own);
        if (st == SPW_OK && spw__engine_rank(e) == 0) /* one reads all of them, for all */
            st = check_digests(&manifest, path, job.adapter != NULL, false, &own);
    }
    st = spw__engine_agree(e, st, &own, &none, err);
    if (st == SPW_OK) {
        st = spw__engine_fill(e, load_chunk, &job, &own);
        st = spw__engine_agree_loaded(e, st, &own, err);
    }
    if (st == SPW_OK && with_optimizer && manifest.digests_known) {
        st = check_read(&job, &manifest, path, &own);
        st = spw__engine_agree_loaded(e, st, &own, err);
    }
    if (st == SPW_OK && manifest.digests_known && same_types(&job))
        spw__checkpoint_saved(e, path, manifest.digests[SPW_DIGEST_MODEL], spw__checkpoint_contents(e));
    if (st == SPW_OK) {
        spw_engine_set_updates(e, manifest.state.updates);
        spw__engine_set_steps(e, manifest.state.step);
    } else {
        spw_error_wrap(err, "loading checkpoint %s", path);
    }
    spw_hf_reader_close(job.model);
    spw_st_reader_close(job.optimizer);
    spw_st_reader_close(job.adapter);
    spw_mem_free(job.tensors);
    spw__manifest_free(&manifest);
    return st;
}
