/*
 * Where training starts: drawn at random, or from the weights of a Hugging Face folder (adapters are always drawn). Each byte of the folder is read
 * once, by the worker that fills the chunk it belongs to, and goes straight to the chunk's tier; what comes from a checkpoint's folder is
 * summed on the way, and compared with its digest.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include <stdio.h>
#include <string.h>

enum { BLOCK_ELEMS = 16384 };

spw_status
spw__chunk_take(void *ctx, uint64_t first, const float *data, uint64_t count, spw_error *err)
{
    const spw__chunk_view *v = ctx;
    (void)err;
    spw_state_set(v->format, v->rule, v->weights, v->record, v->c->elems, v->part, v->param_first + first - v->c->first,
                  count, data);
    return SPW_OK;
}

spw_status
spw__chunk_draw(spw__chunk_view *v, const spw_engine *e, uint32_t id, uint64_t first, uint64_t count, spw_error *err)
{
    for (uint64_t at = 0, n; at < count; at += n) {
        float block[BLOCK_ELEMS];
        n = count - at < BLOCK_ELEMS ? count - at : BLOCK_ELEMS;
        spw__draw_param(block, &spw_engine_model(e)->params[id], id, spw__engine_config(e)->run.seed, first + at, n);
        SPW_TRY(spw__chunk_take(v, first + at, block, n, err));
    }
    return SPW_OK;
}

static spw_status
open_folder(spw__checkpoint_sources *job, const char *path, spw_error *err)
{
    if (spw_hf_adapters(path) != NULL) /* they are part of what was trained, and would be left out without a word */
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s/%s: there are adapters beside the weights; merge them with spillway export, or go on with "
                         "--resume",
                         path, spw_hf_adapters(path));
    SPW_TRY(spw__in_place_check(job->e, path, err));
    SPW_TRY(spw_hf_reader_open(&job->model, path, err));
    SPW_TRY(spw_hf_reader_bind(job->model, spw_engine_model(job->e), err));
    SPW_TRY(spw_bounce_create(&job->bounce, spw__checkpoint_buffers(spw__engine_workers(job->e)), err));
    spw_hf_reader_past_cache(job->model, job->bounce);
    return spw__checkpoint_open_codes(job, path, err);
}

spw_status
spw_engine_load_weights(spw_engine *e, const char *path, spw_error *err)
{
    spw__checkpoint_sources job = {.e = e, .format = spw__engine_format(e)};
    int64_t checkpoint = spw_dir_has(path, SPW_MANIFEST_FILE) && spw_dir_has(path, SPW_MODEL_FILE); /* rank 0's word */
    spw_error own = {0};
    spw_status st = open_folder(&job, path, &own);
    st = spw__engine_agree(e, st, &own, &checkpoint, err);
    if (st == SPW_OK)
        st = spw__checkpoint_fill(&job, err);
    if (st == SPW_OK && checkpoint) {
        st = spw__checkpoint_check_weights(e, path, job.model, job.bounce, &own);
        st = spw__engine_agree_loaded(e, st, &own, err);
    }
    if (st == SPW_OK && !spw__engine_config(e)->run.checkpoint_base)
        spw__checkpoint_began(e, path);
    spw__checkpoint_sources_deinit(&job);
    return st;
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
spw_config_check_start(const spw_config *c, spw_error *err)
{
    const char *path = c->model_path;
    char found[SPW_PATH_BYTES];
    if (strcmp(c->run.start, "random") == 0 || path[0] == '\0' || spw_hf_has_weights(path) ||
        !spw_foreign_find(path, found, sizeof found))
        return SPW_OK;
    return SPW_RAISE(err, SPW_ECONFIG,
                     "model.path %s is another program's checkpoint, and has no weights in Hugging Face's files: "
                     "--resume %s goes on from it, spillway export %s --to DIR makes a folder of its weights, and "
                     "spillway.start random draws new ones",
                     path, path, path);
}

spw_status
spw_engine_start(spw_engine *e, bool *loaded_out, spw_error *err)
{
    const spw_config *c = spw__engine_config(e);
    const char *folder = spw_config_start_folder(c);
    SPW_TRY(spw_config_check_start(c, err));
    *loaded_out = folder != NULL;
    if (spw__engine_rank(e) == 0)
        spw__adapter_warn(spw_engine_model(e));
    if (folder != NULL)
        return spw_engine_load_weights(e, folder, err);
    if (strcmp(c->run.start, "weights") == 0)
        return SPW_RAISE(err, SPW_ECONFIG, "spillway.start weights needs a folder in model.path");
    if (spw__engine_rank(e) == 0 && c->model_path[0] != '\0' && strcmp(c->run.start, "random") != 0)
        spw_log(SPW_LOG_NOTE, "model.path %s has no weights: they are drawn by spillway.seed", c->model_path);
    return spw_engine_init_params(e, c->run.seed, err);
}
