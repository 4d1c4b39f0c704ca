/*
 * A checkpoint that another program wrote, DeepSpeed (deepspeed.c), PyTorch (dcp.c, full_state.c) or llm.c (llmc_state.c): its parameters by name, each in pieces of the files that
 * its ranks left, and what its optimizer kept of them. Whoever reads sees tensors; nothing is put together elsewhere.
 */
#include "foreign.h"
#include "hf_reader.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

bool
spw_foreign_find(const char *path, char *found, uint64_t bytes)
{
    if (spw__dcp_there(path) || spw__full_there(path))
        return snprintf(found, bytes, "%s", path) < (int)bytes;
    return spw__ds_find(path, found, bytes) || spw__llmc_find(path, found, bytes);
}

spw_status
spw__foreign_moment(spw_foreign *d, const char *name, uint32_t *out, spw_error *err)
{
    spw_foreign_about *a = &d->about;
    uint32_t k = 0;
    while (k < a->moment_count && strcmp(a->moments[k], name) != 0)
        k++;
    *out = k;
    if (k == SPW_FOREIGN_MOMENTS_MAX || strlen(name) >= sizeof a->moments[0])
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: an optimizer with %s for each element is not read", d->folder,
                         name);
    if (k == a->moment_count)
        snprintf(a->moments[a->moment_count++], sizeof a->moments[0], "%s", name);
    return SPW_OK;
}

bool
spw__foreign_see_updates(spw_foreign *d, double updates)
{
    spw_foreign_about *a = &d->about;
    uint64_t n;
    if (!(updates >= 0 && updates < 9e15))
        return false;
    n = (uint64_t)updates;
    a->uneven = a->uneven || (d->counted && n != a->updates);
    a->updates = a->steps = n > a->updates ? n : a->updates;
    d->counted = true;
    return true;
}

static int
by_name(const void *a, const void *b)
{
    return strcmp((*(const spw__foreign_param *const *)a)->info.name,
                  (*(const spw__foreign_param *const *)b)->info.name);
}

static int
compare_name(const void *name, const void *param)
{
    return strcmp(name, (*(const spw__foreign_param *const *)param)->info.name);
}

static spw_status
sort_names(spw_foreign *d, spw_error *err)
{
    d->by_name = spw_mem_calloc(d->param_count, sizeof *d->by_name);
    if (d->by_name == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "parameters of %s", d->folder);
    for (uint32_t i = 0; i < d->param_count; i++)
        d->by_name[i] = &d->params[i];
    qsort(d->by_name, d->param_count, sizeof *d->by_name, by_name);
    return SPW_OK;
}

static spw_status
read_all(spw_foreign *d, spw_error *err)
{
    d->about.samples = UINT64_MAX;
    d->about.clip = d->about.beta1 = d->about.beta2 = d->about.eps = NAN;
    SPW_TRY(spw__span_create(&d->span, err));
    SPW_TRY(spw__llmc_is(d->folder)     ? spw__llmc_read(d, err)
            : spw__dcp_there(d->folder) ? spw__dcp_read(d, err)
            : spw__full_is(d->folder)   ? spw__full_read(d, err)
                                        : spw__ds_read(d, err));
    return sort_names(d, err);
}

spw_status
spw_foreign_open(spw_foreign **out, const char *found, spw_error *err)
{
    spw_foreign *d = spw_mem_zalloc(sizeof *d);
    spw_status st;
    *out = NULL;
    if (d == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", found);
    st = snprintf(d->folder, sizeof d->folder, "%s", found) < (int)sizeof d->folder
             ? read_all(d, err)
             : SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", found);
    if (st != SPW_OK)
        spw_foreign_close(d);
    else
        *out = d;
    return st;
}

void
spw_foreign_close(spw_foreign *d)
{
    if (d == NULL)
        return;
    for (uint32_t r = 0; d->ranks != NULL && r < d->about.ranks; r++)
        spw_mem_free(d->ranks[r].flats);
    spw_mem_free(d->ranks);
    spw_mem_free(d->params);
    spw_mem_free(d->by_name);
    spw__span_release(d->span);
    spw_mem_free(d->config);
    spw_mem_free(d);
}

const spw_foreign_about *
spw_foreign_get_about(const spw_foreign *d)
{
    return &d->about;
}

const char *
spw_foreign_config(const spw_foreign *d)
{
    return d->config;
}

const spw_model_config *
spw_foreign_model(const spw_foreign *d)
{
    return d->says_model ? &d->model : NULL;
}

spw_status
spw_foreign_check_state(const spw_foreign *d, spw_error *err)
{
    if (d->unread.status != SPW_OK)
        spw_error_keep_first(err, &d->unread);
    return d->unread.status;
}

static const spw__foreign_param *
find_param(const spw_foreign *d, const char *name)
{
    const spw__foreign_param *const *found =
        bsearch(name, d->by_name, d->param_count, sizeof *d->by_name, compare_name);
    return found != NULL ? *found : NULL;
}

bool
spw_foreign_trained(const spw_foreign *d, const char *name, double *decay)
{
    const spw__foreign_param *p = find_param(d, name);
    if (p == NULL || p->frozen)
        return false;
    *decay = p->decay;
    return true;
}

spw_status
spw_foreign_weights(spw_foreign *d, spw_hf_reader **out, spw_error *err)
{
    spw_tensor_info *infos = spw_mem_calloc(d->param_count + 1, sizeof *infos);
    spw_st_reader *r = NULL;
    spw_status st;
    *out = NULL;
    if (infos == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tensors of %s", d->folder);
    for (uint32_t i = 0; i < d->param_count; i++)
        infos[i] = d->params[i].info;
    st = spw__st_reader_over(&r, d->folder, d->span, infos, d->param_count, err);
    if (st == SPW_OK)
        st = spw__hf_reader_over(out, r, d->folder, err);
    spw_mem_free(infos);
    return st;
}

/*
 * Where what the optimizer has of a parameter begins in the span: at an element of a moment, as it begins at one of its tensor. Of an expert whose
 * matrices are read as others' columns (hf_bind.c) the moment's are turned in the span.
 */
static spw_status
place_moment(const spw_foreign *d, const spw_hf_reader *weights, uint32_t id, uint64_t moment, uint64_t first,
             uint64_t *begin, spw_error *err)
{
    const spw__hf_mapped *c = &weights->mapped[id];
    const uint64_t elems = c->stride * c->cols; /* of the expert's matrix, which others may have a part of */
    *begin = moment + first * sizeof(float);
    if (c->columns == NULL)
        return SPW_OK;
    *begin = spw__span_bytes(d->span) + first % elems * sizeof(float);
    return spw__span_add_turned(d->span, moment + first / elems * elems * sizeof(float), c->stride, c->cols,
                                sizeof(float), err);
}

/* which: indices of the moments that are asked for, UINT32_MAX behind them. */
static spw_status
list_moments(const spw_foreign *d, const spw_hf_reader *weights, const spw_model *m, const uint32_t *which,
             spw_tensor_info *infos, uint32_t *count, spw_error *err)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t first;
        const char *name = spw_hf_bound_name(weights, id, &first);
        const spw__foreign_param *p = name != NULL ? find_param(d, name) : NULL;
        for (uint32_t k = 0; p != NULL && !p->frozen && which[k] != UINT32_MAX; k++) {
            spw_tensor_info *t = &infos[(*count)++];
            spw_st_describe(t, &m->params[id], SPW_F32);
            t->type = spw__st_types[SPW_F32].name;
            t->stack = t->slice = 0;
            if (snprintf(t->name, sizeof t->name, "%.100s.%s", m->params[id].name, d->about.moments[which[k]]) >=
                (int)sizeof t->name)
                return SPW_RAISE(err, SPW_ECORRUPT, "%s: the name of %s is too long", d->folder, name);
            SPW_TRY(place_moment(d, weights, id, p->moment[which[k]], first, &t->begin, err));
            t->bytes = spw__foreign_elements(t) * 4;
        }
    }
    return SPW_OK;
}

spw_status
spw_foreign_moments(spw_foreign *d, const spw_hf_reader *weights, const spw_model *m, const char *const *names,
                    uint32_t count, spw_st_reader **out, spw_error *err)
{
    spw_tensor_info *infos;
    uint32_t which[SPW_FOREIGN_MOMENTS_MAX + 1], found = 0;
    spw_status st = SPW_OK;
    *out = NULL;
    SPW_TRY(spw_foreign_check_state(d, err));
    infos = spw_mem_calloc((size_t)m->param_count * (count + 1) + 1, sizeof *infos);
    if (infos == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tensors of %s", d->folder);
    memset(which, 0xff, sizeof which);
    for (uint32_t k = 0; st == SPW_OK && k < count; k++) {
        for (uint32_t i = 0; i < d->about.moment_count; i++)
            which[k] = strcmp(names[k], d->about.moments[i]) == 0 ? i : which[k];
        if (which[k] == UINT32_MAX)
            st = SPW_RAISE(err, SPW_ECONFIG,
                           "%s: its optimizer has no %s, which this configuration's needs; it keeps: %s%s%s", d->folder,
                           names[k], d->about.moment_count > 0 ? d->about.moments[0] : "nothing",
                           d->about.moment_count > 1 ? ", " : "", d->about.moment_count > 1 ? d->about.moments[1] : "");
    }
    if (st == SPW_OK)
        st = list_moments(d, weights, m, which, infos, &found, err);
    if (st == SPW_OK)
        st = spw__st_reader_over(out, d->folder, d->span, infos, found, err);
    spw_mem_free(infos);
    return st;
}
