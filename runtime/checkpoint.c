/*
 * Checkpoints: a folder with Hugging Face's model.safetensors and config.json, the optimizer's tensors in full shape,
 * and spillway.json. Tensors are keyed by name and full shape, so any placement, chunk size and exact state format can
 * load them; adapters are in a file of their own beside the model's, in fp32. This file finds, reads and loads;
 * checkpoint_save.c writes.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <dirent.h>
#include <libgen.h>
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
spw__checkpoint_source(const spw_engine *e, const spw_config *c)
{
    char path[SPW_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%.1000s/config.json", c->model_path);
    if (c->model_path[0] == '\0')
        return NULL;
    if (access(path, R_OK) == 0)
        return c->model_path;
    if (spw__engine_rank(e) == 0)
        spw_log(
            SPW_LOG_WARN,
            "%s cannot be read any more: what is saved has a config.json without what else that says, such as where "
            "texts end, and what model.path's folder had beside it (tokenizer, chat template) is not brought along",
            path);
    return NULL;
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

const spw_optimizer *
spw__checkpoint_rule(const spw_engine *e, uint32_t id)
{
    return spw__engine_optimizer(e, spw_engine_layout(e)->places[id].unit_idx);
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
    snprintf(manifest, sizeof manifest, "%.1000s", path);
    if (access(path, F_OK) != 0) /* a step's, whose name may have been taken from it */
        spw__checkpoint_recover(dirname(manifest));
    snprintf(manifest, sizeof manifest, "%.1000s/" SPW_MANIFEST_FILE, path);
    if (spw__manifest_there(manifest)) {
        snprintf(found, SPW_PATH_BYTES, "%.1000s", path);
        return SPW_OK;
    }
    spw__checkpoint_recover(path);
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

/* Of a file that nobody has read as a whole. */
static spw_status
check_digest(const spw_manifest *m, int file, const char *path, spw_bounce *bounce, spw_error *err)
{
    char name[SPW_PATH_BYTES + 64];
    uint64_t digest = 0;
    snprintf(name, sizeof name, "%.1000s/%s", path, spw__digest_names[file]);
    SPW_TRY(spw_file_digest(name, bounce, &digest, err));
    return compare(m, file, path, digest, err);
}

static void
warn_unchecked(const char *path)
{
    spw_log(
        SPW_LOG_WARN,
        "%s is of an earlier version, whose digests are not computed any more: its files are not checked for damage",
        path);
}

static spw_status
check_digests(const spw_manifest *m, const char *path, bool optimizer, spw_error *err)
{
    spw_bounce *bounce;
    spw_status st;
    SPW_TRY(spw_bounce_create(&bounce, spw__checkpoint_buffers(spw_cpu_allowed_count()), err));
    st = m->base[0] == '\0' ? check_digest(m, SPW_DIGEST_MODEL, path, bounce, err) : SPW_OK;
    if (st == SPW_OK && spw_dir_has(path, SPW_ADAPTER_FILE))
        st = check_digest(m, SPW_DIGEST_ADAPTER, path, bounce, err);
    if (st == SPW_OK && optimizer && spw_dir_has(path, SPW_OPTIMIZER_FILE))
        st = check_digest(m, SPW_DIGEST_OPTIMIZER, path, bounce, err);
    spw_bounce_destroy(bounce);
    return st;
}

spw_status
spw_checkpoint_verify(const char *path, bool optimizer, spw_error *err)
{
    spw_manifest m;
    spw_status st = SPW_OK;
    SPW_TRY(spw__manifest_read(&m, path, err));
    if (m.digests_known)
        st = check_digests(&m, path, optimizer, err);
    else
        warn_unchecked(path);
    spw__manifest_free(&m);
    return st;
}

spw_status
spw__checkpoint_sum_ranks(spw_engine *e, spw_st_sum sums[SPW_DIGEST_COUNT], spw_error *err)
{
    uint64_t bytes = SPW_DIGEST_COUNT * sizeof *sums;
    void *said;
    spw_status st = spw__engine_tell(e, sums, &said, bytes, err);
    const spw_st_sum *all = said;
    memset(sums, 0, bytes);
    for (uint32_t i = 0; st == SPW_OK && i < spw__engine_world(e) * SPW_DIGEST_COUNT; i++) {
        sums[i % SPW_DIGEST_COUNT].parts ^= all[i].parts;
        sums[i % SPW_DIGEST_COUNT].bytes += all[i].bytes;
    }
    spw_mem_free(said);
    return st;
}

/* What a rank has read of a file, the first with the header; of ranks that read the same one counts. */
typedef struct file_read {
    spw_st_sum sum;
    uint64_t bytes; /* of the file; 0: none, or not to be checked */
} file_read;

/*
 * Files are summed as they are read, each rank its parts. One that was not read as a whole (weights whose masters are the
 * optimizer's, records of what is trained no more) is read for that. Collective.
 */
static spw_status
check_read(spw_engine *e, const spw_manifest *m, const char *path, const file_read files[SPW_DIGEST_COUNT],
           spw_bounce *bounce, spw_error *err)
{
    spw_st_sum sums[SPW_DIGEST_COUNT] = {{0}};
    for (int i = 0; i < SPW_DIGEST_COUNT && spw__engine_writes(e); i++)
        sums[i] = files[i].sum;
    SPW_TRY(spw__checkpoint_sum_ranks(e, sums, err));
    for (int i = 0; i < SPW_DIGEST_COUNT; i++) {
        if (files[i].bytes == 0)
            continue;
        if (sums[i].bytes == files[i].bytes)
            SPW_TRY(compare(m, i, path, spw_crc64_whole(sums[i].parts, files[i].bytes), err));
        else if (spw__engine_rank(e) == 0)
            SPW_TRY(check_digest(m, i, path, bounce, err));
    }
    return SPW_OK;
}

spw_status
spw__checkpoint_check_weights(spw_engine *e, const char *path, const spw_hf_reader *reader, spw_bounce *bounce,
                              spw_error *err)
{
    file_read files[SPW_DIGEST_COUNT] = {{{0}, 0}};
    spw_manifest m = {0};
    spw_error own = {0};
    int64_t none = 0;
    spw_status st = spw__manifest_read(&m, path, &own);
    st = spw__engine_agree(e, st, &own, &none, err);
    files[SPW_DIGEST_MODEL].sum = spw_hf_reader_sum(reader, spw__engine_rank(e) == 0, &files[SPW_DIGEST_MODEL].bytes);
    if (st == SPW_OK && m.digests_known)
        st = check_read(e, &m, path, files, bounce, err);
    else if (st == SPW_OK && spw__engine_rank(e) == 0)
        warn_unchecked(path);
    spw__manifest_free(&m);
    return st;
}

/* ---------------------------------------------------------------- loading */

static spw_status
take_bytes(void *ctx, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    return spw__chunk_take(ctx, offset / 4, data, bytes / 4, err);
}

static const spw_tensor_info *
tensor_of(const spw__checkpoint_sources *job, uint32_t id, int part)
{
    return job->tensors != NULL ? job->tensors[(size_t)id * SPW_PART_COUNT + (size_t)part] : NULL;
}

static spw_status
load_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    spw__checkpoint_sources *job = ctx;
    const spw_layout *l = spw_engine_layout(job->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    const spw_optimizer *rule = spw__engine_optimizer(job->e, c->unit_idx);
    (void)grad;
    if (spw__layout_published(l, c->unit_idx) != SPW_QUANT_NONE)
        return spw__codes_load(job, c, weights, err);
    memset(weights, 0, c->elems * spw_state_weight_bytes(job->format));
    if (record != NULL)
        memset(record, 0, spw_state_record_bytes(job->format, rule, c->elems));
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        uint64_t from = s.from, at = s.first - from, n = s.end - s.first;
        spw__chunk_view v = {job->format, rule, c, weights, record, from, SPW_PART_MASTER};
        const spw_tensor_info *master = tensor_of(job, s.id, SPW_PART_MASTER), *moment;
        bool adapter = spw_engine_model(job->e)->params[s.id].adapter;
        if (adapter && job->adapter == NULL)
            SPW_TRY(spw__chunk_draw(&v, job->e, s.id, at, n, err));
        else if (adapter)
            SPW_TRY(spw_st_read_run(job->adapter, master, at * 4, n * 4, take_bytes, &v, err));
        else if (record != NULL && master != NULL)
            SPW_TRY(spw_st_read_run(job->optimizer, master, at * 4, n * 4, take_bytes, &v, err));
        else
            SPW_TRY(spw_hf_read_run(job->model, s.id, at, n, spw__chunk_take, &v, err));
        for (int p = SPW_PART_EXP_AVG; record != NULL && p < (int)spw__checkpoint_part_end(rule); p++) {
            v.part = (spw_state_part)p;
            if ((moment = tensor_of(job, s.id, p)) != NULL)
                SPW_TRY(spw_st_read_run(job->optimizer, moment, at * 4, n * 4, take_bytes, &v, err));
        }
    }
    return SPW_OK;
}

spw_status
spw__checkpoint_sources_init(spw__checkpoint_sources *job, spw_engine *e, spw_error *err)
{
    uint64_t count = (uint64_t)spw_engine_model(e)->param_count * SPW_PART_COUNT;
    *job = (spw__checkpoint_sources){.e = e, .format = spw__engine_format(e)};
    job->tensors = spw_mem_calloc(count, sizeof *job->tensors);
    return job->tensors != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "tensors of a checkpoint");
}

void
spw__checkpoint_sources_deinit(spw__checkpoint_sources *job)
{
    if (job->codes != job->model)
        spw_hf_reader_close(job->codes);
    spw_hf_reader_close(job->model);
    spw_st_reader_close(job->optimizer);
    spw_st_reader_close(job->adapter);
    spw_bounce_destroy(job->bounce);
    spw_mem_free(job->tensors);
}

spw_status
spw__checkpoint_fill(spw__checkpoint_sources *job, spw_error *err)
{
    spw_error own = {0};
    spw_status st = spw__engine_fill(job->e, load_chunk, job, &own);
    return spw__engine_agree_loaded(job->e, st, &own, err);
}

/* Collective, after all of it was read. */
static spw_status
check_files(const spw__checkpoint_sources *job, const spw_manifest *m, const char *path, spw_error *err)
{
    bool first = spw__engine_rank(job->e) == 0;
    file_read files[SPW_DIGEST_COUNT] = {{{0}, 0}};
    if (m->base[0] == '\0')
        files[SPW_DIGEST_MODEL].sum = spw_hf_reader_sum(job->model, first, &files[SPW_DIGEST_MODEL].bytes);
    if (job->optimizer != NULL)
        files[SPW_DIGEST_OPTIMIZER] =
            (file_read){spw_st_reader_sum(job->optimizer, first), spw_st_reader_file_bytes(job->optimizer)};
    if (job->adapter != NULL)
        files[SPW_DIGEST_ADAPTER] =
            (file_read){spw_st_reader_sum(job->adapter, first), spw_st_reader_file_bytes(job->adapter)};
    return check_read(job->e, m, path, files, job->bounce, err);
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
    if ((*out)->ndim != want.ndim || memcmp((*out)->shape, want.shape, want.ndim * sizeof *want.shape) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s has shape [%llu, %llu], this model needs [%llu, %llu]", path,
                         want.name, (unsigned long long)(*out)->shape[0],
                         (unsigned long long)((*out)->ndim > 1 ? (*out)->shape[(*out)->ndim - 1] : 1),
                         (unsigned long long)want.shape[0],
                         (unsigned long long)(want.ndim > 1 ? want.shape[want.ndim - 1] : 1));
    return SPW_OK;
}

static spw_status
open_tensors(spw__checkpoint_sources *job, const char *path, const char *weights, bool with_optimizer, spw_error *err)
{
    const spw_model *m = spw_engine_model(job->e);
    char file[SPW_PATH_BYTES + 64];
    SPW_TRY(spw_hf_reader_open(&job->model, weights, err));
    SPW_TRY(spw_hf_reader_bind(job->model, m, err));
    SPW_TRY(spw_bounce_create(&job->bounce, spw__checkpoint_buffers(spw__engine_workers(job->e)), err));
    spw_hf_reader_past_cache(job->model, job->bounce);
    SPW_TRY(spw__checkpoint_open_codes(job, weights, err));
    if (m->lora.rank > 0) {
        snprintf(file, sizeof file, "%.1000s/" SPW_ADAPTER_FILE, path);
        SPW_TRY(spw_st_reader_open(&job->adapter, file, err));
        spw_st_reader_past_cache(job->adapter, job->bounce);
        for (uint32_t id = spw__base_count(m); id < m->param_count; id++)
            SPW_TRY(find_tensor(job->adapter, file, &m->params[id], NULL,
                                &job->tensors[(size_t)id * SPW_PART_COUNT + SPW_PART_MASTER], err));
    }
    if (!with_optimizer)
        return SPW_OK;
    snprintf(file, sizeof file, "%.1000s/" SPW_OPTIMIZER_FILE, path);
    SPW_TRY(spw_st_reader_open(&job->optimizer, file, err));
    spw_st_reader_past_cache(job->optimizer, job->bounce);
    for (uint32_t id = 0; id < m->param_count; id++) {
        const spw_optimizer *rule = spw__checkpoint_rule(job->e, id);
        for (int p = 0; spw__checkpoint_trains(job->e, id) && p < (int)spw__checkpoint_part_end(rule); p++) {
            const spw_tensor_info **slot = &job->tensors[(size_t)id * SPW_PART_COUNT + (size_t)p];
            spw_tensor_info want;
            spw__checkpoint_info(&want, &m->params[id], spw__checkpoint_part_suffix(rule, p), SPW_F32);
            if (p == SPW_PART_MASTER && (m->params[id].adapter || !spw_st_reader_find(job->optimizer, want.name)))
                continue; /* written by the fp32 format, or found above */
            SPW_TRY(find_tensor(job->optimizer, file, &m->params[id], spw__checkpoint_part_suffix(rule, p), slot, err));
        }
    }
    return SPW_OK;
}

/* Would a save write the model's file as it is? What our own codes stand for is not what they were made of. */
static bool
is_kept(const spw__checkpoint_sources *job, const spw_manifest *manifest)
{
    const spw_model *m = spw_engine_model(job->e);
    const char *codes = spw__engine_config(job->e)->run.frozen_codes;
    const char *then =
        json_string_value(json_object_get(json_object_get(manifest->config, "spillway"), "frozen_codes"));
    bool same = !spw__codes_round(codes) || (then != NULL && strcmp(codes, then) == 0);
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
    spw__checkpoint_sources job;
    bool with_optimizer = spw__layout_trained(spw_engine_layout(e)) > 0;
    char weights[SPW_WEIGHTS_BYTES] = "";
    spw_manifest manifest = {0};
    spw_error own = {0};
    int64_t none = 0;
    spw_status st;
    SPW_TRY(spw__checkpoint_sources_init(&job, e, err));
    st = spw__manifest_read(&manifest, path, &own);
    if (st == SPW_OK)
        st = spw__checkpoint_weights(&manifest, path, spw__engine_config(e)->model_path, weights, &own);
    if (st == SPW_OK)
        st = spw__in_place_check(e, weights, &own);
    if (st == SPW_OK && manifest.base[0] != '\0' && with_optimizer)
        st = spw__checkpoint_check_base(&manifest, path, spw__engine_config(e), &own);
    if (st == SPW_OK) {
        if (manifest.scaled) /* without one (of bf16, say) the scale is where it begins */
            spw_engine_set_loss_scaler(e, &manifest.scaler);
        st = open_tensors(&job, path, weights, with_optimizer, &own);
    }
    st = spw__engine_agree(e, st, &own, &none, err);
    if (st == SPW_OK)
        st = spw__checkpoint_fill(&job, err);
    if (st == SPW_OK && manifest.digests_known) {
        st = check_files(&job, &manifest, path, &own);
        st = spw__engine_agree_loaded(e, st, &own, err);
    } else if (st == SPW_OK && spw__engine_rank(e) == 0) {
        warn_unchecked(path);
    }
    if (st == SPW_OK && manifest.base[0] != '\0' && with_optimizer)
        spw__checkpoint_began(e, weights);
    else if (st == SPW_OK && manifest.digests_known && is_kept(&job, &manifest))
        spw__checkpoint_saved(e, path, manifest.digests[SPW_DIGEST_MODEL], spw__checkpoint_contents(e));
    if (st == SPW_OK) {
        spw_engine_set_updates(e, manifest.state.updates);
        spw__engine_set_steps(e, manifest.state.step);
    } else {
        spw_error_wrap(err, "loading checkpoint %s", path);
    }
    spw__checkpoint_sources_deinit(&job);
    spw__manifest_free(&manifest);
    return st;
}
