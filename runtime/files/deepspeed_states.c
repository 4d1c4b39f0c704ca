/*
 * What a checkpoint of DeepSpeed says of the model: mp_rank_00_model_states.pt, of which stage 3 has one for each rank. It names the parameters in
 * the order in which the optimizer's flat arrays have them, and holds those that were frozen, and buffers.
 */
#include "foreign.h"
#include <stdio.h>

spw_status
spw__ds_damaged(const spw__torch *t, const char *what, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s", spw__torch_path(t), what);
}

/* Of sizes above 0 that can be counted. */
static bool
read_shape(const spw__py *v, spw_tensor_info *out)
{
    uint64_t n = 1;
    v = spw__torch_size(v);
    if (v == NULL || v->kind != SPW__PY_LIST || v->count > SPW_TENSOR_DIMS_MAX)
        return false;
    out->ndim = (uint32_t)v->count;
    for (uint32_t i = 0; i < out->ndim; i++) {
        int64_t size;
        if (!spw__py_int(v->items[i], &size) || size < 1 || !spw_mul_u64(n, (uint64_t)size, &n))
            return false;
        out->shape[i] = (uint64_t)size;
    }
    return n <= UINT64_MAX / 16;
}

uint64_t
spw__foreign_elements(const spw_tensor_info *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

static spw_status
add_param(spw_foreign *d, const spw__torch *t, const char *name, const spw__py *shape, uint32_t group_idx,
          spw_error *err)
{
    spw__foreign_param *p = &d->params[d->param_count];
    if (name == NULL || strlen(name) >= sizeof p->info.name || !read_shape(shape, &p->info))
        return spw__ds_damaged(t, "param_shapes: a name or shape that is none", err);
    snprintf(p->info.name, sizeof p->info.name, "%s", name);
    p->info.dtype = SPW_F32;
    p->info.type = spw__st_types[SPW_F32].name;
    p->info.bytes = spw__foreign_elements(&p->info) * 4;
    p->group_idx = group_idx;
    d->param_count++;
    return SPW_OK;
}

static const spw__py *
find_buffer(const spw__torch *t, const char *name)
{
    return spw__py_get(spw__py_get(spw__torch_root(t), "module"), name);
}

/* What no optimizer has, as the biases that experts are chosen by. Of those that are no floats, a text model needs none. */
static spw_status
add_buffer(spw_foreign *d, const spw__torch *t, const char *name, spw_error *err)
{
    const spw__py *v = name != NULL ? find_buffer(t, name) : NULL;
    spw__foreign_param *p = &d->params[d->param_count];
    if (v == NULL || !spw__torch_is_tensor(v))
        return SPW_OK;
    if (strlen(name) >= sizeof p->info.name)
        return spw__ds_damaged(t, "buffer_names: a name that is too long", err);
    SPW_TRY(spw__torch_tensor(t, v, name, &p->info, err));
    if (p->info.dtype == SPW_DTYPE_COUNT || p->info.bytes == 0)
        return SPW_OK;
    snprintf(p->info.name, sizeof p->info.name, "%s", name);
    p->frozen = p->buffer = true;
    d->param_count++;
    return SPW_OK;
}

/* Names and shapes of what was trained, group by group, of what was frozen, and of buffers. */
static spw_status
read_params(spw_foreign *d, const spw__torch *t, spw_error *err)
{
    const spw__py *root = spw__torch_root(t), *groups = spw__py_get(root, "param_shapes");
    const spw__py *frozen = spw__py_get(root, "frozen_param_shapes"), *buffers = spw__py_get(root, "buffer_names");
    uint64_t count = 0, frozen_items = frozen != NULL ? frozen->count : 0;
    uint64_t buffer_count = buffers != NULL && buffers->kind == SPW__PY_LIST ? buffers->count : 0;
    if (groups == NULL || groups->kind != SPW__PY_LIST || groups->count == 0 || groups->count > SPW__DS_GROUPS_MAX)
        return spw__ds_damaged(t, "param_shapes, the names of what the optimizer has, is missing", err);
    for (uint64_t g = 0; g < groups->count; g++)
        count += groups->items[g]->count / 2;
    d->params = spw_mem_calloc(count + frozen_items / 2 + buffer_count + 1, sizeof *d->params);
    if (d->params == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "parameters of %s", d->folder);
    for (uint32_t g = 0; g < groups->count; g++) {
        const spw__py *names = groups->items[g];
        for (uint64_t i = 0; i + 1 < names->count; i += 2)
            SPW_TRY(add_param(d, t, spw__py_text(names->items[i]), names->items[i + 1], g, err));
    }
    d->trained_count = d->param_count;
    if (d->trained_count == 0)
        return spw__ds_damaged(t, "param_shapes names nothing", err);
    for (uint64_t i = 0; i + 1 < frozen_items; i += 2) {
        SPW_TRY(add_param(d, t, spw__py_text(frozen->items[i]), frozen->items[i + 1], 0, err));
        d->params[d->param_count - 1].frozen = true;
    }
    for (uint64_t i = 0; i < buffer_count; i++)
        SPW_TRY(add_buffer(d, t, spw__py_text(buffers->items[i]), err));
    return SPW_OK;
}

static spw_status
read_about(spw_foreign *d, const spw__torch *t, spw_error *err)
{
    const spw__py *root = spw__torch_root(t);
    const char *version = spw__py_text(spw__py_get(root, "ds_version"));
    int64_t steps = -1, samples = -1, skipped = 0;
    if (!spw__py_int(spw__py_get(root, "global_steps"), &steps) || steps < 0 ||
        !spw__py_int(spw__py_get(root, "global_samples"), &samples) || samples < 0)
        return spw__ds_damaged(t, "global_steps or global_samples is missing", err);
    (void)spw__py_int(spw__py_get(root, "skipped_steps"), &skipped);
    d->about.steps = (uint64_t)steps;
    d->about.samples = (uint64_t)samples;
    if (skipped < 0 || skipped > steps)
        return spw__ds_damaged(t, "skipped_steps is more than global_steps", err);
    d->about.updates = (uint64_t)(steps - skipped); /* unless the optimizer says how many it made */
    snprintf(d->about.version, sizeof d->about.version, "%s", version != NULL ? version : "unknown");
    return SPW_OK;
}

/* The weights of frozen parameter i, in whose order they are; a search for each of very many would take long. */
static const spw__py *
fragment(const spw__torch *t, uint64_t i, const char *name)
{
    const spw__py *all = spw__py_get(spw__torch_root(t), "frozen_param_fragments");
    const char *there = all != NULL && 2 * i + 1 < all->count ? spw__py_text(all->items[2 * i]) : NULL;
    return there != NULL && strcmp(there, name) == 0 ? all->items[2 * i + 1] : spw__py_get(all, name);
}

/* One frozen parameter's weights in a rank's file of states: all of them, or in stage 3 the rank's part, but of a buffer. */
static spw_status
add_frozen(spw_foreign *d, const spw__torch *t, uint32_t file_idx, uint32_t rank, spw__foreign_param *p, spw_error *err)
{
    const spw__py *v = p->buffer ? find_buffer(t, p->info.name)
                                 : fragment(t, (uint64_t)(p - d->params) - d->trained_count, p->info.name);
    uint64_t all = spw__foreign_elements(&p->info), count = all, size;
    spw_tensor_info info;
    SPW_TRY(spw__torch_tensor(t, v, p->info.name, &info, err));
    if (info.dtype == SPW_DTYPE_COUNT)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s is %s; fp32, bf16 and fp16 are read", spw__torch_path(t),
                         p->info.name, info.type);
    if (d->about.stage == 3 && !p->buffer)
        count = (all + d->about.ranks - 1) / d->about.ranks; /* the last ranks' are filled up */
    size = spw_dtype_bytes(info.dtype);
    if (rank == 0) {
        p->info.dtype = info.dtype;
        p->info.type = info.type;
        p->info.bytes = all * size;
    }
    if (info.dtype != p->info.dtype || info.bytes < count * size)
        return spw__ds_damaged(t, "a frozen parameter's part is too short, or of another type than the first rank's",
                               err);
    return spw__span_add(d->span, file_idx, info.begin, count * size, err);
}

static void
state_path(const spw_foreign *d, uint32_t rank, char *path, size_t bytes)
{
    if (d->about.stage == 3)
        snprintf(path, bytes, "%s/zero_pp_rank_%u_mp_rank_00_model_states.pt", d->folder, rank);
    else
        snprintf(path, bytes, "%s/mp_rank_00_model_states.pt", d->folder);
}

/* Frozen weights: a parameter's parts follow each other, so every rank's file is open at once. */
spw_status
spw__ds_read_frozen(spw_foreign *d, spw_error *err)
{
    uint32_t files = d->about.stage == 3 ? d->about.ranks : 1;
    spw__torch **t = spw_mem_calloc(files, sizeof *t);
    uint32_t *file_idx = spw_mem_calloc(files, sizeof *file_idx);
    spw_status st = t != NULL && file_idx != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "states of %s", d->folder);
    for (uint32_t r = 0; st == SPW_OK && r < files; r++) {
        char path[SPW__FOREIGN_PATH_BYTES + 100];
        state_path(d, r, path, sizeof path);
        st = spw__span_open(d->span, path, &file_idx[r], err);
        if (st == SPW_OK)
            st = spw__torch_open(&t[r], path, err);
    }
    for (uint32_t i = d->trained_count; st == SPW_OK && i < d->param_count; i++) {
        d->params[i].info.begin = spw__span_bytes(d->span);
        for (uint32_t r = 0; st == SPW_OK && r < (d->params[i].buffer ? 1 : files); r++)
            st = add_frozen(d, t[r], file_idx[r], r, &d->params[i], err);
    }
    for (uint32_t r = 0; t != NULL && r < files; r++)
        spw__torch_close(t[r]);
    spw_mem_free(t);
    spw_mem_free(file_idx);
    return st;
}

/* The first rank's; stage 3 has one for each. */
spw_status
spw__ds_read_states(spw_foreign *d, spw_error *err)
{
    char path[SPW__FOREIGN_PATH_BYTES + 100];
    spw__torch *t;
    spw_status st;
    d->about.stage = spw_dir_has(d->folder, "mp_rank_00_model_states.pt") ? 2 : 3;
    state_path(d, 0, path, sizeof path);
    SPW_TRY(spw__torch_open(&t, path, err));
    st = read_about(d, t, err);
    if (st == SPW_OK)
        st = read_params(d, t, err);
    spw__torch_close(t);
    return st;
}
