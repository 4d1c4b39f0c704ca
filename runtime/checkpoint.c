/*
 * Checkpoints: a folder with Hugging Face's model.safetensors and config.json, the optimizer's tensors in full shape,
 * and spillway.json. It is written beside its final name and renamed when everything is on disk: complete or absent.
 * Tensors are keyed by name and full shape, so any placement, chunk size and exact state format can load them. Adapters
 * are in a file of their own beside the model's, in fp32.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { BLOCK_ELEMS = 16384, MANIFEST_BYTES_MAX = 16 << 20 };

/* "master", then what the optimizer calls its moments. */
static const char *
part_suffix(const spw_optimizer *o, int part)
{
    return part == SPW_PART_MASTER ? "master" : o->moment_names[part - SPW_PART_EXP_AVG];
}

static uint32_t
part_end(const spw_optimizer *o)
{
    return SPW_PART_EXP_AVG + o->moment_count;
}

/* ---------------------------------------------------------------- writing */

typedef struct save_job {
    spw_engine *e;
    spw_state_format format;
    const spw_optimizer *rule;
    spw_st_writer *model, *optimizer, *adapter; /* adapter NULL: the model has none */
    uint32_t base;                              /* parameters that are no adapters: those come behind them */
    uint32_t *rank; /* (param_count) of a trained parameter among those: they have tensors in the optimizer's file */
} save_job;

/* The stretch that a parameter and a chunk share, as elements of the unit; false if there is none. */
static bool
overlap(const spw_place *at, const spw_store_chunk *c, uint64_t *first, uint64_t *end)
{
    *first = at->first > c->first ? at->first : c->first;
    *end = at->first + at->elems < c->first + c->elems ? at->first + at->elems : c->first + c->elems;
    return at->unit_idx == c->unit_idx && *first < *end;
}

/* fp32's master is the weight itself and is not stored twice. */
static int
first_part(spw_state_format f)
{
    return f == SPW_STATE_FP32 ? SPW_PART_EXP_AVG : SPW_PART_MASTER;
}

/* Frozen parameters have no record, and none has in an engine for inference. */
static bool
trains(const spw_engine *e, uint32_t id)
{
    const spw_layout *l = spw_engine_layout(e);
    return l->units[l->places[id].unit_idx].trainable;
}

/* Elements [first, end) of a unit, all of one parameter and one chunk, as fp32 to a tensor. */
static spw_status
save_part(const save_job *job, spw_st_writer *w, uint32_t tensor, spw_state_part part, const spw_store_chunk *c,
          const void *weights, const void *record, uint64_t param_first, uint64_t first, uint64_t end, spw_error *err)
{
    float block[BLOCK_ELEMS];
    for (uint64_t i = first; i < end; i += BLOCK_ELEMS) {
        uint64_t n = end - i < BLOCK_ELEMS ? end - i : BLOCK_ELEMS;
        spw_state_get(job->format, job->rule, weights, record, c->elems, part, i - c->first, n, block);
        SPW_TRY(spw_st_write(w, tensor, (i - param_first) * 4, block, n * 4, err));
    }
    return SPW_OK;
}

static spw_status
save_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    save_job *job = ctx;
    const spw_layout *l = spw_engine_layout(job->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    uint32_t wb = spw_state_weight_bytes(job->format), parts = part_end(job->rule) - (uint32_t)first_part(job->format);
    (void)grad;
    for (uint32_t id = 0; id < l->param_count; id++) {
        uint64_t first, end, from = l->places[id].first;
        if (!overlap(&l->places[id], c, &first, &end))
            continue;
        if (id >= job->base)
            SPW_TRY(save_part(job, job->adapter, id - job->base, SPW_PART_MASTER, c, weights, record, from, first, end,
                              err));
        else
            SPW_TRY(spw_st_write(job->model, id, (first - from) * wb, (char *)weights + (first - c->first) * wb,
                                 (end - first) * wb, err));
        for (uint32_t k = 0; record != NULL && k < parts; k++)
            SPW_TRY(save_part(job, job->optimizer, job->rank[id] * parts + k,
                              (spw_state_part)(first_part(job->format) + (int)k), c, weights, record, from, first, end,
                              err));
    }
    return SPW_OK;
}

static void
fill_info(spw_tensor_info *t, const spw_param *p, const char *suffix, spw_dtype dtype)
{
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, suffix != NULL ? "%s.%s" : "%s", p->name, suffix);
    t->dtype = dtype;
    t->ndim = p->ndim;
    t->shape[0] = p->ndim == 1 ? p->cols : p->rows;
    t->shape[1] = p->ndim == 1 ? 0 : p->cols;
}

/* Before a byte is written: what the tensors take, with a little for header and manifest. */
static spw_status
check_space(const char *folder, const spw_tensor_info *infos, uint32_t count, spw_error *err)
{
    uint64_t need = 1 << 16, free_bytes;
    char a[32], b[32];
    struct statvfs fs;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = spw_dtype_bytes(infos[i].dtype);
        for (uint32_t d = 0; d < infos[i].ndim; d++)
            bytes *= infos[i].shape[d];
        need += bytes + 256;
    }
    if (statvfs(folder, &fs) != 0 || fs.f_blocks == 0) /* ramfs and the like do not know their size */
        return SPW_OK;
    free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (free_bytes >= need)
        return SPW_OK;
    return SPW_RAISE(err, SPW_ENOSPC, "it needs %s (%llu bytes), %s free; make room, or set spillway.keep_last",
                     spw_format_bytes(a, sizeof a, need), (unsigned long long)need,
                     spw_format_bytes(b, sizeof b, free_bytes));
}

static spw_status
write_tensors(spw_engine *e, const char *folder, spw_error *err)
{
    const spw_model *m = spw_engine_model(e);
    save_job job = {.e = e, .format = spw__engine_format(e), .rule = spw__engine_optimizer(e)};
    uint32_t parts = part_end(job.rule) - (uint32_t)first_part(job.format);
    spw_tensor_info *infos = spw_mem_calloc((uint64_t)m->param_count * (1 + parts), sizeof *infos);
    char path[SPW_PATH_BYTES + 64];
    uint32_t trained = 0;
    spw_status st = SPW_OK;
    job.base = spw__base_count(m);
    job.rank = spw_mem_calloc(m->param_count, sizeof *job.rank);
    if (infos == NULL || job.rank == NULL) {
        spw_mem_free(infos);
        spw_mem_free(job.rank);
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint");
    }
    for (uint32_t id = 0; id < m->param_count; id++) {
        fill_info(&infos[id], &m->params[id], NULL, id < job.base ? spw_state_weight_dtype(job.format) : SPW_F32);
        if (!trains(e, id))
            continue;
        for (uint32_t k = 0; k < parts; k++)
            fill_info(&infos[m->param_count + trained * parts + k], &m->params[id],
                      part_suffix(job.rule, first_part(job.format) + (int)k), SPW_F32);
        job.rank[id] = trained++;
    }
    st = check_space(folder, infos, m->param_count + trained * parts, err);
    snprintf(path, sizeof path, "%s/" SPW_MODEL_FILE, folder);
    if (st == SPW_OK)
        st = spw_st_writer_create(&job.model, path, infos, job.base, err);
    snprintf(path, sizeof path, "%s/" SPW_ADAPTER_FILE, folder);
    if (st == SPW_OK && job.base < m->param_count)
        st = spw_st_writer_create(&job.adapter, path, infos + job.base, m->param_count - job.base, err);
    snprintf(path, sizeof path, "%s/" SPW_OPTIMIZER_FILE, folder);
    if (st == SPW_OK)
        st = spw_st_writer_create(&job.optimizer, path, infos + m->param_count, trained * parts, err);
    if (st == SPW_OK)
        st = spw_engine_drain(e, err); /* what is read now belongs to no step */
    if (st == SPW_OK)
        st = spw_store_sweep(spw_engine_store(e), SPW_SWEEP_VISIT, save_chunk, &job, err);
    if (st == SPW_OK)
        st = spw_st_writer_commit(job.model, err);
    if (st == SPW_OK)
        st = spw_st_writer_commit(job.optimizer, err);
    if (st == SPW_OK && job.adapter != NULL)
        st = spw_st_writer_commit(job.adapter, err);
    spw_st_writer_destroy(job.model);
    spw_st_writer_destroy(job.optimizer);
    spw_st_writer_destroy(job.adapter);
    spw_mem_free(infos);
    spw_mem_free(job.rank);
    return st;
}

enum { DIGEST_BLOCK = 1 << 20 };

/* A tensor's entry in the header: as text, and as what the JSON library makes of it. */
enum { HEADER_TENSOR_BYTES = 1536 };

uint64_t
spw__checkpoint_bytes(const spw_model *model, const spw_layout *layout, const spw_optimizer *optimizer,
                      uint32_t workers)
{
    uint64_t tensors = (uint64_t)model->param_count * (1 + part_end(optimizer));
    uint64_t sums = layout->elems * sizeof(float) * part_end(optimizer) / DIGEST_BLOCK * sizeof(uint64_t);
    return DIGEST_BLOCK + sums + tensors * (2 * sizeof(spw_tensor_info) + HEADER_TENSOR_BYTES) +
           workers * spw_touched_bytes(2 * BLOCK_ELEMS * sizeof(float));
}

/* XXH3 over the checksums of the file's 1 MiB blocks. */
static spw_status
file_digest(const char *path, uint64_t *digest_out, spw_error *err)
{
    enum { BLOCK = DIGEST_BLOCK };
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    uint64_t *sums, blocks;
    spw_region buffer;
    spw_status st;
    if (fd < 0 || fstat(fd, &info) != 0) {
        st = SPW_RAISE_SYS(err, errno, "open %s", path);
        if (fd >= 0)
            close(fd);
        return st;
    }
    blocks = ((uint64_t)info.st_size + BLOCK - 1) / BLOCK;
    sums = spw_mem_calloc(blocks + 1, sizeof *sums);
    st = sums == NULL ? SPW_RAISE(err, SPW_ENOMEM, "digest of %s", path) : spw_region_map(&buffer, BLOCK, 0, err);
    for (uint64_t i = 0; st == SPW_OK && i < blocks; i++) {
        uint64_t want = (uint64_t)info.st_size - i * BLOCK < BLOCK ? (uint64_t)info.st_size - i * BLOCK : BLOCK,
                 got = 0;
        while (got < want) {
            ssize_t rc = pread(fd, (char *)buffer.base + got, want - got, (off_t)(i * BLOCK + got));
            if (rc < 0 && errno == EINTR)
                continue;
            if (rc <= 0) {
                st = rc < 0 ? SPW_RAISE_SYS(err, errno, "read %s", path) : SPW_RAISE(err, SPW_EIO, "%s shrank", path);
                break;
            }
            got += (uint64_t)rc;
        }
        sums[i] = spw_checksum(buffer.base, want);
    }
    if (st == SPW_OK)
        *digest_out = spw_checksum(sums, blocks * sizeof *sums);
    if (sums != NULL)
        spw_region_unmap(&buffer);
    spw_mem_free(sums);
    close(fd);
    return st;
}

static spw_status
write_json(const char *folder, const char *name, json_t *object, spw_error *err)
{
    char path[SPW_PATH_BYTES + 64];
    char *text = object == NULL ? NULL : json_dumps(object, JSON_INDENT(2));
    spw_status st;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    st = text == NULL ? SPW_RAISE(err, SPW_ENOMEM, "writing %s", path) : spw_file_write_text(path, text, err);
    free(text);
    json_decref(object);
    return st;
}

/* Hugging Face's, so that the folder loads elsewhere. */
static spw_status
write_model_config(const char *folder, const spw_model *m, spw_state_format f, spw_error *err)
{
    char path[SPW_PATH_BYTES + 64], *text = spw_hf_config_text(&m->config, spw_state_weight_dtype(f));
    spw_status st;
    snprintf(path, sizeof path, "%s/config.json", folder);
    st = text == NULL ? SPW_RAISE(err, SPW_ENOMEM, "writing %s", path) : spw_file_write_text(path, text, err);
    spw_mem_free(text);
    return st;
}

static spw_status
write_manifest(const char *folder, const spw_config *config, const spw_checkpoint_state *state, spw_error *err)
{
    char path[SPW_PATH_BYTES + 64], model[20], optimizer[20], adapter[20] = "", *dump = spw_config_dump(config);
    uint64_t digest = 0;
    json_t *parsed, *root;
    if (dump == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint manifest");
    parsed = json_loads(dump, 0, NULL);
    spw_mem_free(dump);
    snprintf(path, sizeof path, "%s/" SPW_MODEL_FILE, folder);
    spw_status st = file_digest(path, &digest, err);
    snprintf(model, sizeof model, "%016llx", (unsigned long long)digest);
    snprintf(path, sizeof path, "%s/" SPW_OPTIMIZER_FILE, folder);
    if (st == SPW_OK)
        st = file_digest(path, &digest, err);
    snprintf(optimizer, sizeof optimizer, "%016llx", (unsigned long long)digest);
    snprintf(path, sizeof path, "%s/" SPW_ADAPTER_FILE, folder);
    if (st == SPW_OK && access(path, F_OK) == 0) {
        st = file_digest(path, &digest, err);
        snprintf(adapter, sizeof adapter, "%016llx", (unsigned long long)digest);
    }
    if (st != SPW_OK) {
        json_decref(parsed);
        return st;
    }
    root = json_pack("{s:i, s:s, s:I, s:I, s:I, s:I, s:f, s:{s:s, s:s}, s:o}", "format", 1, "spillway", SPW_VERSION,
                     "step", (json_int_t)state->step, "data_position", (json_int_t)state->data_position, "updates",
                     (json_int_t)state->updates, "bytes_written", (json_int_t)state->bytes_written, "tokens",
                     state->tokens, "digests", SPW_MODEL_FILE, model, SPW_OPTIMIZER_FILE, optimizer, "config", parsed);
    if (root != NULL && adapter[0] != '\0')
        json_object_set_new(json_object_get(root, "digests"), SPW_ADAPTER_FILE, json_string(adapter));
    if (root != NULL && state->data.files > 0)
        json_object_set_new(root, "data",
                            json_pack("{s:I, s:I, s:I, s:s}", "files", (json_int_t)state->data.files, "bytes",
                                      (json_int_t)state->data.bytes, "tokens", (json_int_t)state->data.tokens,
                                      "formats", state->data.formats));
    return write_json(folder, SPW_MANIFEST_FILE, root, err);
}

spw_status
spw_checkpoint_save(spw_engine *e, const spw_config *config, const char *dir, const spw_checkpoint_state *state,
                    char *path_out, spw_error *err)
{
    char partial[SPW_PATH_BYTES + 64], final[SPW_PATH_BYTES + 64];
    spw_error ignored = {0};
    spw_status st;
    snprintf(final, sizeof final, "%.900s/step-%llu", dir, (unsigned long long)state->step);
    snprintf(partial, sizeof partial, "%.1000s.partial", final);
    SPW_TRY(spw_dir_make(dir, err));
    if (access(partial, F_OK) == 0)
        SPW_TRY(spw_dir_remove(partial, err)); /* a save that was killed */
    SPW_TRY(spw_dir_make(partial, err));
    st = write_tensors(e, partial, err);
    if (st == SPW_OK)
        st = write_model_config(partial, spw_engine_model(e), spw__engine_format(e), err);
    if (st == SPW_OK && spw_engine_model(e)->lora.rank > 0)
        st = write_json(partial, SPW_ADAPTER_CONFIG_FILE, spw__adapter_config(spw_engine_model(e), config), err);
    if (st == SPW_OK)
        st = write_manifest(partial, config, state, err);
    if (st == SPW_OK)
        st = spw_dir_sync(partial, err);
    if (st == SPW_OK)
        st = spw__checkpoint_place(dir, partial, final, err);
    if (st == SPW_OK)
        spw__checkpoint_trim(dir, state->step, config->run.keep_last);
    if (st != SPW_OK) {
        (void)spw_dir_remove(partial, &ignored); /* the first error is the one to tell */
        spw_error_wrap(err, "saving checkpoint %s", final);
    } else if (path_out != NULL) {
        snprintf(path_out, SPW_PATH_BYTES, "%.1000s", final);
    }
    return st;
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
    snprintf(manifest, sizeof manifest, "%.1000s/" SPW_MANIFEST_FILE, path);
    if (access(manifest, R_OK) == 0) {
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
spw__manifest_read(const char *path, json_t **out, spw_error *err)
{
    char file[SPW_PATH_BYTES + 64], *text = NULL;
    json_error_t where;
    snprintf(file, sizeof file, "%.1000s/" SPW_MANIFEST_FILE, path);
    SPW_TRY(spw_file_read_text(file, MANIFEST_BYTES_MAX, &text, err));
    *out = json_loads(text, JSON_REJECT_DUPLICATES, &where);
    spw_mem_free(text);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s:%d:%d: %s", file, where.line, where.column, where.text);
    if (json_integer_value(json_object_get(*out, "format")) != 1 || !json_is_object(json_object_get(*out, "config"))) {
        json_decref(*out);
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: not a checkpoint manifest of format 1", file);
    }
    return SPW_OK;
}

spw_status
spw__manifest_config(const json_t *manifest, const char *path, spw_config *config, spw_error *err)
{
    char *text = json_dumps(json_object_get(manifest, "config"), 0), name[SPW_PATH_BYTES + 64];
    spw_status st;
    snprintf(name, sizeof name, "%.1000s/" SPW_MANIFEST_FILE, path);
    st = text == NULL ? SPW_RAISE(err, SPW_ENOMEM, "checkpoint manifest")
                      : spw_config_parse(config, text, name, NULL, 0, err);
    free(text);
    return st;
}

static uint64_t
count_of(const json_t *object, const char *key)
{
    json_int_t n = json_integer_value(json_object_get(object, key));
    return n > 0 ? (uint64_t)n : 0;
}

void
spw__manifest_data(const json_t *manifest, spw_data_summary *out)
{
    const json_t *data = json_object_get(manifest, "data");
    const char *formats = json_string_value(json_object_get(data, "formats"));
    *out = (spw_data_summary){
        .files = count_of(data, "files"), .bytes = count_of(data, "bytes"), .tokens = count_of(data, "tokens")};
    snprintf(out->formats, sizeof out->formats, "%s", formats != NULL ? formats : "");
}

spw_status
spw_checkpoint_read_config(const char *path, spw_config *config, spw_checkpoint_state *state, spw_error *err)
{
    json_t *root;
    spw_status st;
    SPW_TRY(spw__manifest_read(path, &root, err));
    st = spw__manifest_config(root, path, config, err);
    if (state != NULL) {
        *state = (spw_checkpoint_state){.step = count_of(root, "step"),
                                        .data_position = count_of(root, "data_position"),
                                        .updates = count_of(root, "updates"),
                                        .bytes_written = count_of(root, "bytes_written"),
                                        .tokens = json_number_value(json_object_get(root, "tokens"))};
        spw__manifest_data(root, &state->data);
    }
    json_decref(root);
    return st;
}

static spw_status
check_digest(json_t *root, const char *path, const char *name, spw_error *err)
{
    const char *want = json_string_value(json_object_get(json_object_get(root, "digests"), name));
    char file[SPW_PATH_BYTES + 64], got[20];
    uint64_t digest = 0;
    snprintf(file, sizeof file, "%.1000s/%s", path, name);
    SPW_TRY(file_digest(file, &digest, err));
    snprintf(got, sizeof got, "%016llx", (unsigned long long)digest);
    if (want == NULL || strcmp(want, got) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s: digest is %s, " SPW_MANIFEST_FILE " says %s; the file is truncated or damaged", file, got,
                         want != NULL ? want : "nothing");
    return SPW_OK;
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
    for (uint32_t id = 0; id < l->param_count; id++) {
        const spw_tensor_info **t = job->tensors + (size_t)id * SPW_PART_COUNT;
        uint64_t first, end;
        if (!overlap(&l->places[id], c, &first, &end))
            continue;
        for (uint64_t i = first; i < end; i += BLOCK_ELEMS) {
            float block[BLOCK_ELEMS];
            uint64_t n = end - i < BLOCK_ELEMS ? end - i : BLOCK_ELEMS, at = i - l->places[id].first;
            if (spw_engine_model(job->e)->params[id].adapter)
                SPW_TRY(spw_st_read(job->adapter, t[SPW_PART_MASTER], at * 4, block, n * 4, err));
            else if (record != NULL && t[SPW_PART_MASTER] != NULL)
                SPW_TRY(spw_st_read(job->optimizer, t[SPW_PART_MASTER], at * 4, block, n * 4, err));
            else
                SPW_TRY(spw_hf_read_param(job->model, id, at, n, block, err));
            spw_state_set(job->format, job->rule, weights, record, c->elems, SPW_PART_MASTER, i - c->first, n, block);
            for (int p = SPW_PART_EXP_AVG; record != NULL && p < (int)part_end(job->rule); p++) {
                SPW_TRY(spw_st_read(job->optimizer, t[p], at * 4, block, n * 4, err));
                spw_state_set(job->format, job->rule, weights, record, c->elems, (spw_state_part)p, i - c->first, n,
                              block);
            }
        }
    }
    return SPW_OK;
}

static spw_status
find_tensor(spw_st_reader *r, const char *path, const spw_param *p, const char *suffix, const spw_tensor_info **out,
            spw_error *err)
{
    spw_tensor_info want;
    fill_info(&want, p, suffix, SPW_F32);
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
        for (int p = 0; trains(job->e, id) && p < (int)part_end(job->rule); p++) {
            const spw_tensor_info **slot = &job->tensors[(size_t)id * SPW_PART_COUNT + (size_t)p];
            spw_tensor_info want;
            fill_info(&want, &m->params[id], part_suffix(job->rule, p), SPW_F32);
            if (p == SPW_PART_MASTER && (m->params[id].adapter || !spw_st_reader_find(job->optimizer, want.name)))
                continue; /* written by the fp32 format, or found above */
            SPW_TRY(find_tensor(job->optimizer, file, &m->params[id], part_suffix(job->rule, p), slot, err));
        }
    }
    return SPW_OK;
}

spw_status
spw_checkpoint_load(spw_engine *e, const char *path, spw_error *err)
{
    load_job job = {.e = e, .format = spw__engine_format(e), .rule = spw__engine_optimizer(e)};
    bool with_optimizer = spw__layout_trained(spw_engine_layout(e)) > 0;
    spw_checkpoint_state state = {0};
    json_t *root;
    spw_status st;
    job.tensors = spw_mem_calloc((uint64_t)spw_engine_model(e)->param_count * SPW_PART_COUNT, sizeof *job.tensors);
    if (job.tensors == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "checkpoint");
    st = spw__manifest_read(path, &root, err);
    if (st == SPW_OK) {
        state.updates = (uint64_t)json_integer_value(json_object_get(root, "updates"));
        st = open_tensors(&job, path, with_optimizer, err);
        if (st == SPW_OK)
            st = check_digest(root, path, SPW_MODEL_FILE, err);
        if (st == SPW_OK && job.adapter != NULL)
            st = check_digest(root, path, SPW_ADAPTER_FILE, err);
        if (st == SPW_OK && with_optimizer)
            st = check_digest(root, path, SPW_OPTIMIZER_FILE, err);
        json_decref(root);
    }
    if (st == SPW_OK)
        st = spw_store_sweep(spw_engine_store(e), SPW_SWEEP_INIT, load_chunk, &job, err);
    if (st == SPW_OK)
        spw_engine_set_updates(e, state.updates);
    else
        spw_error_wrap(err, "loading checkpoint %s", path);
    spw_hf_reader_close(job.model);
    spw_st_reader_close(job.optimizer);
    spw_st_reader_close(job.adapter);
    spw_mem_free(job.tensors);
    return st;
}
