/*
 * Frozen weights that are kept in the codes of model.path's folder (spillway.frozen_codes published): they always come from there. A checkpoint has the
 * numbers, for whoever reads it; going on from it, or from any other folder, these are compared with what the codes decode to, so that nothing is
 * trained on that the files do not say.
 */
#include "checkpoint_internal.h"
#include "quant.h"
#include "spw_files.h"
#include <string.h>

enum { BLOCK_ELEMS = 4096 };

spw_status
spw__checkpoint_open_codes(spw__checkpoint_sources *job, const char *path, spw_error *err)
{
    const char *folder = spw__engine_config(job->e)->model_path;
    const spw_layout *l = spw_engine_layout(job->e);
    bool any = false;
    for (uint32_t u = 0; u < l->unit_count; u++)
        any = any || spw__layout_published(l, u) != SPW_QUANT_NONE;
    if (!any)
        return SPW_OK;
    if (path != NULL && strcmp(path, folder) == 0) {
        job->codes = job->model;
        return SPW_OK;
    }
    SPW_TRY(spw_hf_reader_open(&job->codes, folder, err));
    SPW_TRY(spw_hf_reader_bind(job->codes, spw_engine_model(job->e), err));
    spw_hf_reader_past_cache(job->codes, job->bounce);
    return SPW_OK;
}

/* Of a stretch of a parameter that was filled: its codes, from the block on that has element `first` of it. */
typedef struct filled {
    const spw__checkpoint_sources *job;
    const spw_param *param;
    const uint8_t *codes;
    uint64_t first; /* a multiple of a block or a strip */
    spw_quant form;
} filled;

/* As many elements from `at` on as are decoded at once, n at most, in want from *skip on. */
static uint64_t
decode_some(const filled *f, spw_dtype type, uint64_t at, uint64_t n, float want[BLOCK_ELEMS], uint64_t *skip)
{
    const uint64_t unit = spw_codes_unit(f->form), strip = at / unit * unit, cols = spw_codes_cols(f->form);
    const uint64_t room = BLOCK_ELEMS - at % SPW_QUANT_BLOCK;
    float row[BLOCK_ELEMS];
    if (cols == 0) {
        n = n < room ? n : room;
        *skip = at % SPW_QUANT_BLOCK;
        spw__quant_decode(want, type, f->codes + spw__quant_bytes(f->form, at - *skip), f->form,
                          spw_round_up(*skip + n, SPW_QUANT_BLOCK));
        return n;
    }
    n = n < cols - at % cols ? n : cols - at % cols;
    n = n < BLOCK_ELEMS ? n : BLOCK_ELEMS;
    *skip = 0;
    spw__quant_strip_row(row, f->form, f->codes + spw__quant_bytes(f->form, strip), (uint32_t)((at - strip) / cols),
                         (uint32_t)(at % cols), (uint32_t)n);
    spw_convert(want, type, row, SPW_F32, n);
    return n;
}

/* As the state format rounds what it loads. */
static spw_status
compare(void *ctx, uint64_t first, const float *data, uint64_t count, spw_error *err)
{
    const filled *f = ctx;
    const spw_dtype type = spw_state_weight_dtype(f->job->format);
    const uint32_t size = spw_dtype_bytes(type);
    for (uint64_t i = 0, n; i < count; i += n) {
        float there[BLOCK_ELEMS], want[BLOCK_ELEMS];
        uint64_t skip;
        n = decode_some(f, type, first + i - f->first, count - i, want, &skip);
        spw_state_set(f->job->format, NULL, there, NULL, BLOCK_ELEMS, SPW_PART_MASTER, 0, n, data + i);
        if (memcmp(there, (const char *)want + skip * size, n * size) != 0)
            return SPW_RAISE(err, SPW_EINVAL,
                             "%s, elements %llu to %llu: these weights are not what the codes of %s stand for, which "
                             "are kept (spillway.frozen_codes \"published\")",
                             f->param->name, (unsigned long long)(first + i), (unsigned long long)(first + i + n - 1),
                             spw__engine_config(f->job->e)->model_path);
    }
    return SPW_OK;
}

spw_status
spw__codes_load(const spw__checkpoint_sources *job, const spw_store_chunk *c, void *codes, spw_error *err)
{
    const spw_layout *l = spw_engine_layout(job->e);
    const spw_quant form = spw__layout_published(l, c->unit_idx);
    memset(codes, 0, spw_store_weight_bytes(c->elems, 0, form));
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        const uint64_t at = s.first - s.from, n = s.end - s.first;
        uint8_t *to = (uint8_t *)codes + spw__quant_bytes(form, s.first - c->first);
        filled f = {job, &spw_engine_model(job->e)->params[s.id], to, at, form};
        SPW_TRY(spw_hf_read_codes(job->codes, s.id, form, at, n, to, err));
        if (job->codes != job->model)
            SPW_TRY(spw_hf_read_run(job->model, s.id, at, n, compare, &f, err));
    }
    return SPW_OK;
}
