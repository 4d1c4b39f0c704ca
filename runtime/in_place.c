/*
 * Which frozen weights may stay in the files that they come from: chunks of units without records, all of whose parameters
 * have the type there that the state format gives weights. For these it finds the pieces (file, offset) that the store
 * reads; whether a chunk then is on nvme, where alone that matters, is the plan's to say. What has another type is converted
 * when it is loaded, and copied.
 */
#include "engine_internal.h"
#include "spw_files.h"
#include <stdio.h>

static spw_status
add_file(engine_in_place *o, const spw_st_extent *at, uint32_t *idx, spw_error *err)
{
    spw_store_file *files;
    size_t bytes = strlen(at->path) + 1;
    char *path;
    for (*idx = 0; *idx < o->file_count; ++*idx) {
        if (strcmp(o->files[*idx].path, at->path) == 0)
            return SPW_OK;
    }
    files = spw_mem_calloc(o->file_count + 1, sizeof *files);
    path = spw_mem_zalloc(bytes);
    if (files == NULL || path == NULL) {
        spw_mem_free(files);
        spw_mem_free(path);
        return SPW_RAISE(err, SPW_ENOMEM, "files of frozen weights");
    }
    memcpy(path, at->path, bytes);
    if (o->file_count > 0)
        memcpy(files, o->files, o->file_count * sizeof *files);
    files[o->file_count++] = (spw_store_file){path, at->file_bytes, at->mtime_ns};
    spw_mem_free(o->files);
    o->files = files;
    return SPW_OK;
}

/* The pieces of a chunk, appended; none if one of its parameters has to be converted. At most one for each parameter. */
static spw_status
find_pieces(spw_engine *e, spw_store_chunk *c, const spw_hf_reader *r, spw_error *err)
{
    engine_in_place *o = &e->in_place;
    const spw_layout *l = &e->layout;
    uint32_t bytes = spw_state_weight_bytes(e->config.run.state_format), begin = o->piece_count;
    c->piece_first = begin;
    for (layout_stretch s = {0}; spw__layout_next(l, c, &s);) {
        spw_st_extent at;
        spw_dtype dtype;
        uint32_t file;
        if (!spw_hf_reader_extent(r, s.id, &at, &dtype) ||
            dtype != spw_state_weight_dtype(e->config.run.state_format)) {
            o->piece_count = begin;
            return SPW_OK;
        }
        SPW_TRY(add_file(o, &at, &file, err));
        o->pieces[o->piece_count++] = (spw_store_piece){file, at.offset + (s.first - s.from) * bytes,
                                                        (s.first - c->first) * bytes, (s.end - s.first) * bytes};
    }
    c->piece_count = o->piece_count - begin;
    return SPW_OK;
}

static spw_status
find_all(spw_engine *e, const spw_hf_reader *r, spw_error *err)
{
    uint32_t most = e->layout.chunk_count + e->layout.param_count; /* a chunk's first parameter may begin before it */
    e->in_place.pieces = spw_mem_calloc(most, sizeof *e->in_place.pieces);
    if (e->in_place.pieces == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%u pieces of frozen weights", most);
    for (uint32_t i = 0; i < e->layout.chunk_count; i++) {
        spw_store_chunk *c = &e->layout.chunks[i];
        if (!e->layout.units[c->unit_idx].trainable && e->layout.units[c->unit_idx].form == SPW_QUANT_NONE)
            SPW_TRY(find_pieces(e, c, r, err));
    }
    return SPW_OK;
}

bool
spw__in_place_wanted(const spw_engine *e)
{
    return e->config.run.frozen_in_place && e->config.zero.offload_param == SPW_TIER_NVME &&
           spw__layout_trained(&e->layout) < e->layout.elems;
}

spw_status
spw__in_place_find(spw_engine *e, const char *path, spw_error *err)
{
    spw_hf_reader *r = NULL;
    spw_status st = spw_hf_reader_open(&r, path, err);
    if (st == SPW_OK)
        st = spw_hf_reader_bind(r, e->model, err);
    if (st == SPW_OK)
        st = find_all(e, r, err);
    spw_hf_reader_close(r);
    snprintf(e->in_place.from, sizeof e->in_place.from, "%.1000s", path);
    return st;
}

void
spw__in_place_free(spw_engine *e)
{
    for (uint32_t i = 0; i < e->in_place.file_count; i++)
        spw_mem_free((void *)(uintptr_t)e->in_place.files[i].path);
    spw_mem_free(e->in_place.files);
    spw_mem_free(e->in_place.pieces);
}

spw_status
spw__in_place_check(const spw_engine *e, const char *path, spw_error *err)
{
    bool any = false;
    for (uint32_t i = 0; i < e->layout.chunk_count; i++)
        any = any || (e->layout.chunks[i].piece_count > 0 && e->layout.chunks[i].weight_tier == SPW_TIER_NVME);
    if (!any || strcmp(path, e->in_place.from) == 0)
        return SPW_OK;
    return SPW_RAISE(err, SPW_EINVAL,
                     "this engine reads frozen weights in place, from %s: it cannot take others (%s); "
                     "spillway.frozen_in_place false copies them",
                     e->in_place.from, path);
}
