/*
 * Where training starts: drawn at random, or from the weights of a Hugging Face folder (adapters are always drawn). Each byte of the folder is read
 * once, by the worker that fills the chunk it belongs to, and goes straight to the chunk's tier; of a checkpoint's folder all of it
 * is compared with its digest before.
 */
#include "runtime_internal.h"
#include "spw_files.h"
#include <stdio.h>
#include <string.h>

enum { BLOCK_ELEMS = 16384 };

typedef struct load_job {
    spw_engine *e;
    spw_state_format format;
    const spw_optimizer *rule;
    spw_hf_reader *reader;
} load_job;

static spw_status
load_chunk(void *ctx, uint32_t chunk_idx, void *weights, void *record, const void *grad, spw_error *err)
{
    load_job *job = ctx;
    const spw_layout *l = spw_engine_layout(job->e);
    const spw_store_chunk *c = &l->chunks[chunk_idx];
    float block[BLOCK_ELEMS];
    (void)grad;
    memset(weights, 0, c->elems * spw_state_weight_bytes(job->format));
    if (record != NULL)
        memset(record, 0, spw_state_record_bytes(job->format, job->rule, c->elems));
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        uint32_t id = s.id;
        const spw_param *p = &spw_engine_model(job->e)->params[id];
        for (uint64_t i = s.first; i < s.end; i += BLOCK_ELEMS) {
            uint64_t n = s.end - i < BLOCK_ELEMS ? s.end - i : BLOCK_ELEMS;
            if (p->adapter)
                spw__draw_param(block, p, id, spw__engine_config(job->e)->run.seed, i - l->places[id].first, n);
            else
                SPW_TRY(spw_hf_read_param(job->reader, id, i - l->places[id].first, n, block, err));
            spw_state_set(job->format, job->rule, weights, record, c->elems, SPW_PART_MASTER, i - c->first, n, block);
        }
    }
    return SPW_OK;
}

static spw_status
load_own_part(spw_engine *e, const char *path, spw_error *err)
{
    load_job job = {.e = e, .format = spw__engine_format(e), .rule = spw__engine_optimizer(e)};
    spw_status st;
    if (spw_dir_has(
            path,
            "adapter_model.safetensors")) /* they are part of what was trained, and would be left out without a word */
        return SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "%s/adapter_model.safetensors: there are adapters beside the weights; merge them with spillway "
            "export, or go on with --resume",
            path);
    SPW_TRY(spw__in_place_check(e, path, err));
    if (spw__engine_rank(e) == 0 && spw_dir_has(path, "spillway.json")) /* a checkpoint: one reads all of it, for all */
        SPW_TRY(spw_checkpoint_verify(path, false, err));
    st = spw_hf_reader_open(&job.reader, path, err);
    if (st == SPW_OK)
        st = spw_hf_reader_bind(job.reader, spw_engine_model(e), err);
    if (st == SPW_OK)
        st = spw__engine_fill(e, load_chunk, &job, err);
    spw_hf_reader_close(job.reader);
    return st;
}

spw_status
spw_engine_load_weights(spw_engine *e, const char *path, spw_error *err)
{
    spw_error own = {0};
    spw_status st = load_own_part(e, path, &own);
    return spw__engine_agree_loaded(e, st, &own, err);
}

const char *
spw_config_start_folder(const spw_config *c)
{
    bool wanted = strcmp(c->run.start, "weights") == 0;
    if (strcmp(c->run.start, "random") == 0 || c->model_path[0] == '\0')
        return NULL;
    return wanted || spw_hf_has_weights(c->model_path) ? c->model_path : NULL;
}

spw_status
spw_engine_start(spw_engine *e, bool *loaded_out, spw_error *err)
{
    const spw_config *c = spw__engine_config(e);
    const char *folder = spw_config_start_folder(c);
    *loaded_out = folder != NULL;
    if (folder != NULL)
        return spw_engine_load_weights(e, folder, err);
    if (strcmp(c->run.start, "weights") == 0)
        return SPW_RAISE(err, SPW_ECONFIG, "spillway.start weights needs a folder in model.path");
    return spw_engine_init_params(e, c->run.seed, err);
}
