/*
 * What a checkpoint of DeepSpeed says of the optimizer, a file for each rank: where its flat arrays of masters and moments are, and of the
 * first rank stage, loss scale, hyperparameters and configuration.
 */
#include "foreign.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PADDING_MAX = 1 << 30 };

/* The value of an integer key. */
static const spw__py *
get_numbered(const spw__py *v, int64_t key)
{
    int64_t n;
    for (uint64_t i = 0; v != NULL && v->kind == SPW__PY_DICT && i + 1 < v->count; i += 2) {
        if (v->items[i]->kind == SPW__PY_INT && spw__py_int(v->items[i], &n) && n == key)
            return v->items[i + 1];
    }
    return NULL;
}

/* What the optimizer keeps of group i: a dict by name. */
static const spw__py *
group_state(const spw__py *optimizer, uint32_t stage, uint32_t i)
{
    const spw__py *base = spw__py_get(optimizer, stage == 3 ? "optimizer_state_dict" : "base_optimizer_state"), *first;
    int64_t key = i;
    if (base != NULL && base->kind == SPW__PY_LIST) /* elastic_checkpoint */
        return spw__py_item(base, i);
    first = spw__py_item(spw__py_get(spw__py_item(spw__py_get(base, "param_groups"), i), "params"), 0);
    if (stage != 3)
        (void)spw__py_int(first, &key);
    return get_numbered(spw__py_get(base, "state"), key);
}

/* A flat array of fp32 numbers in a rank's own file. */
static spw_status
read_flat(const spw__torch *t, const spw__py *v, const char *name, spw__ds_flat *out, spw_error *err)
{
    spw_tensor_info info;
    SPW_TRY(spw__torch_tensor(t, v, name, &info, err));
    if (info.dtype != SPW_F32 || info.ndim != 1)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s is %s with %u dimensions; a flat array of fp32 is read",
                         spw__torch_path(t), name, info.type, info.ndim);
    out->offset = info.begin;
    out->elems = info.shape[0];
    return SPW_OK;
}

/* Elements of a group's flat array in stage 3: of each parameter one rank's part. */
static uint64_t
group_elems(const spw_foreign *d, uint32_t g)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < d->trained_count; i++) {
        if (d->params[i].group_idx == g)
            n += (d->params[i].info.bytes / 4 + d->about.ranks - 1) / d->about.ranks;
    }
    return n;
}

/* One that was on nvme lies beside, in a file of its own with padding behind it; what the rank's file has in its place is empty. */
static spw_status
find_swapped(spw_foreign *d, uint32_t rank, uint32_t g, const char *moment, const char *id, spw__ds_flat *out,
             spw_error *err)
{
    char path[SPW__FOREIGN_PATH_BYTES + 200];
    out->elems = group_elems(d, g);
    out->offset = 0;
    snprintf(path, sizeof path, "%s/offloaded_tensors/rank%02u/%s%s%.40s.tensor.swp", d->folder, rank, moment,
             moment[0] != '\0' ? "-" : "", id);
    SPW_TRY(spw__span_open(d->span, path, &out->file_idx, err));
    if (spw__span_file_bytes(d->span, out->file_idx) / 4 < out->elems)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s has %llu bytes, and its parameters take %llu", path,
                         (unsigned long long)spw__span_file_bytes(d->span, out->file_idx),
                         (unsigned long long)out->elems * 4);
    return SPW_OK;
}

/* The names of what the optimizer keeps for each element, from its first group. */
static spw_status
learn_moments(spw_foreign *d, const spw__torch *t, const spw__py *state, spw_error *err)
{
    for (uint64_t i = 0; state != NULL && state->kind == SPW__PY_DICT && i + 1 < state->count; i += 2) {
        const char *name = spw__py_text(state->items[i]);
        spw_tensor_info info;
        uint32_t unused;
        if (name == NULL || !spw__torch_is_tensor(state->items[i + 1]))
            continue;
        SPW_TRY(spw__torch_tensor(t, state->items[i + 1], name, &info, err));
        if (info.ndim == 0)
            continue;
        SPW_TRY(spw__foreign_moment(d, name, &unused, err));
    }
    return SPW_OK;
}

static spw_status
read_flats(spw_foreign *d, const spw__torch *t, uint32_t rank, const spw__py *optimizer, spw_error *err)
{
    spw__ds_rank *r = &d->ranks[rank];
    const spw__py *masters =
        spw__py_get(optimizer, d->about.stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
    if (masters == NULL || masters->kind != SPW__PY_LIST || masters->count == 0 || masters->count > SPW__DS_GROUPS_MAX)
        return spw__ds_damaged(t, "fp32 masters of the optimizer's groups are missing", err);
    if (d->group_count == 0) {
        d->group_count = (uint32_t)masters->count;
        SPW_TRY(learn_moments(d, t, group_state(optimizer, d->about.stage, 0), err));
    }
    if (masters->count != d->group_count ||
        (d->about.stage < 3 && d->params[d->trained_count - 1].group_idx >= d->group_count))
        return spw__ds_damaged(t, "it has other groups than the first rank's file, or than param_shapes", err);
    r->flats = spw_mem_calloc((size_t)SPW__DS_PARTS_MAX * d->group_count, sizeof *r->flats);
    if (r->flats == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "groups of %s", spw__torch_path(t));
    for (uint32_t g = 0; g < d->group_count; g++) {
        const spw__py *state = group_state(optimizer, d->about.stage, g);
        const char *id = spw__py_text(spw__torch_attribute(masters->items[g], "ds_id"));
        bool swapped = false;
        r->flats[g].file_idx = r->file_idx;
        SPW_TRY(read_flat(t, masters->items[g], "the masters", &r->flats[g], err));
        swapped = r->flats[g].elems == 0 && d->about.stage == 3 && id != NULL && group_elems(d, g) > 0;
        if (swapped)
            SPW_TRY(find_swapped(d, rank, g, "", id, &r->flats[g], err));
        for (uint32_t m = 0; m < d->about.moment_count; m++) {
            const char *name = d->about.moments[m];
            spw__ds_flat *f = &r->flats[(size_t)(m + 1) * d->group_count + g];
            f->file_idx = r->file_idx;
            SPW_TRY(read_flat(t, spw__py_get(state, name), name, f, err));
            if (swapped && f->elems == 0)
                SPW_TRY(find_swapped(d, rank, g, name, id, f, err));
            if (f->elems < r->flats[g].elems)
                return spw__ds_damaged(t, "the optimizer's state is shorter than its masters", err);
        }
        if (d->about.stage == 3 && r->flats[g].elems != d->ranks[0].flats[g].elems)
            return spw__ds_damaged(t, "its masters are not as many as the first rank's", err);
    }
    return SPW_OK;
}

/* A number that may be a tensor without dimensions. */
static spw_status
read_number(const spw__torch *t, const spw__py *v, double *out, bool *known, spw_error *err)
{
    spw_tensor_info info;
    union {
        float f32;
        int64_t i64;
    } x;
    *known = spw__py_real(v, out);
    if (*known || !spw__torch_is_tensor(v))
        return SPW_OK;
    SPW_TRY(spw__torch_tensor(t, v, "step", &info, err));
    *known = info.ndim == 0 && (info.dtype == SPW_F32 || strcmp(info.type, "I64") == 0);
    if (*known) {
        SPW_TRY(spw__torch_read(t, &info, &x, err));
        *out = info.dtype == SPW_F32 ? (double)x.f32 : (double)x.i64;
    }
    return SPW_OK;
}

/* How many updates the optimizer made: with its groups, their state or beside them, as its class has it. */
static spw_status
read_updates(spw_foreign *d, const spw__torch *t, const spw__py *optimizer, spw_error *err)
{
    bool known = false;
    const spw__py *base = spw__py_get(optimizer, d->about.stage == 3 ? "optimizer_state_dict" : "base_optimizer_state");
    const spw__py *places[] = {spw__py_get(group_state(optimizer, d->about.stage, 0), "step"),
                               spw__py_get(spw__py_item(spw__py_get(base, "param_groups"), 0), "step"),
                               spw__py_get(optimizer, "base_optimizer_state_step")};
    for (size_t i = 0; i < sizeof places / sizeof places[0] && !known; i++) {
        double n = 0;
        SPW_TRY(read_number(t, places[i], &n, &known, err));
        if (!known)
            continue;
        if (!(n >= 0 && n <= (double)d->about.steps))
            return spw__ds_damaged(t, "the optimizer's step is more than the steps that were made", err);
        d->about.updates = (uint64_t)n;
    }
    return SPW_OK;
}

static void
read_scaler(spw_foreign *d, const spw__py *optimizer)
{
    const spw__py *s = spw__py_get(optimizer, "loss_scaler"), *dynamic = spw__py_get(optimizer, "dynamic_loss_scale");
    spw_foreign_about *a = &d->about;
    int64_t on = 0;
    a->scaled = spw__py_real(spw__py_attribute(s, "cur_scale"), &a->scale) && spw__py_int(dynamic, &on) && on != 0 &&
                spw__py_int(spw__py_attribute(s, "cur_hysteresis"), &a->hysteresis) &&
                spw__py_int(spw__py_attribute(s, "cur_iter"), &a->scaler_steps) &&
                spw__py_int(spw__py_attribute(s, "last_overflow_iter"), &a->last_overflow);
}

/* What lies behind each parameter of stage 1 and 2; older versions have nothing there. */
static spw_status
read_paddings(spw_foreign *d, const spw__torch *t, const spw__py *optimizer, spw_error *err)
{
    const spw__py *paddings = spw__py_get(optimizer, "param_alignment_paddings");
    uint64_t in_group = 0;
    for (uint32_t i = 0; paddings != NULL && paddings->kind != SPW__PY_NONE && i < d->trained_count; i++) {
        spw__foreign_param *p = &d->params[i];
        int64_t n = 0;
        in_group = i > 0 && d->params[i - 1].group_idx == p->group_idx ? in_group + 1 : 0;
        if (!spw__py_int(spw__py_item(spw__py_item(paddings, p->group_idx), in_group), &n) || n < 0 ||
            (uint64_t)n > PADDING_MAX)
            return spw__ds_damaged(t, "param_alignment_paddings does not have the parameters' groups", err);
        p->padding = (uint64_t)n;
    }
    return SPW_OK;
}

/* What is read of the first rank's file alone. */
static spw_status
read_first(spw_foreign *d, const spw__torch *t, const spw__py *optimizer, spw_error *err)
{
    const spw__py *ranks = spw__py_get(optimizer, "partition_count");
    const spw__py *said = spw__py_get(optimizer, "zero_stage");
    int64_t stage = 1, n = 0, most = 0; /* bf16 with fp32 accumulation, which is stage 1, says nothing */
    if ((said != NULL && !spw__py_int(said, &stage)) || stage < 1 || stage > 3 || (stage == 3) != (d->about.stage == 3))
        return spw__ds_damaged(t, "zero_stage is not 1, 2 or 3, or not that of the model's states", err);
    d->about.stage = (uint32_t)stage;
    for (uint64_t i = 0; ranks != NULL && ranks->kind == SPW__PY_LIST && i < ranks->count; i++)
        most = spw__py_int(ranks->items[i], &n) && n > most ? n : most;
    if (!spw__py_int(ranks, &n))
        n = most;
    if (n != d->about.ranks)
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "%s was written by %lld ranks, and there are files of %u: some are missing, or left from another "
            "run",
            d->folder, (long long)n, d->about.ranks);
    read_scaler(d, optimizer);
    if (stage < 3)
        SPW_TRY(read_paddings(d, t, optimizer, err));
    return read_updates(d, t, optimizer, err);
}

static void
set_decay(spw_foreign *d, int64_t group, double decay)
{
    for (uint32_t i = 0; i < d->trained_count; i++)
        d->params[i].decay = d->params[i].group_idx == group ? decay : d->params[i].decay;
}

/* The hyperparameters that its optimizer had; elastic_checkpoint keeps none. */
static void
read_groups(spw_foreign *d, const spw__py *optimizer)
{
    spw_foreign_about *a = &d->about;
    const spw__py *groups = spw__py_get(
        spw__py_get(optimizer, a->stage == 3 ? "optimizer_state_dict" : "base_optimizer_state"), "param_groups");
    const spw__py *first = spw__py_item(groups, 0), *betas = spw__py_get(first, "betas");
    (void)spw__py_real(spw__py_get(optimizer, "clip_grad"), &a->clip);
    if (!spw__py_real(spw__py_item(betas, 0), &a->beta1) || !spw__py_real(spw__py_item(betas, 1), &a->beta2))
        a->beta1 = a->beta2 = NAN;
    (void)spw__py_real(spw__py_get(first, "eps"), &a->eps);
    for (uint32_t i = 0; i < d->trained_count; i++)
        d->params[i].decay = NAN;
    for (uint32_t i = 0; spw__py_item(groups, i) != NULL; i++) { /* stage 3: each has several of the flat arrays */
        const spw__py *arrays = spw__py_get(groups->items[i], "params");
        double decay;
        int64_t g = i;
        if (!spw__py_real(spw__py_get(groups->items[i], "weight_decay"), &decay))
            continue;
        for (uint64_t k = 0; k == 0 || (a->stage == 3 && spw__py_item(arrays, k) != NULL); k++) {
            if (a->stage < 3 || spw__py_int(spw__py_item(arrays, k), &g))
                set_decay(d, g, decay);
        }
    }
}

/* What its client gave DeepSpeed: a dict, or a file's name, which is all there is of it then. */
static spw_status
keep_config(spw_foreign *d, const spw__py *config, spw_error *err)
{
    json_t *o = config != NULL && config->kind == SPW__PY_DICT ? spw__py_json(config) : NULL;
    char *text = o != NULL ? json_dumps(o, 0) : NULL;
    d->config = text != NULL ? spw_mem_strdup(text) : NULL;
    free(text);
    if (spw__py_text(config) != NULL)
        snprintf(d->about.config_name, sizeof d->about.config_name, "%s", spw__py_text(config));
    json_decref(o);
    return o == NULL || d->config != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "configuration in %s", d->folder);
}

spw_status
spw__ds_read_rank(spw_foreign *d, uint32_t rank, spw_error *err)
{
    static const char *const begins[] = {"", "bf16_", "fp16_"};
    char name[100] = "", path[SPW__FOREIGN_PATH_BYTES + 100];
    const spw__py *optimizer;
    spw__torch *t;
    spw_status st;
    for (size_t i = sizeof begins / sizeof begins[0]; i-- > 0;) {
        snprintf(name, sizeof name, "%szero_pp_rank_%u_mp_rank_00_optim_states.pt", begins[i], rank);
        if (spw_dir_has(d->folder, name))
            break;
    }
    if (!spw_dir_has(d->folder, name))
        return SPW_RAISE(err, SPW_ENOENT, "%s: the file of rank %u, %s, is missing", d->folder, rank, name);
    snprintf(path, sizeof path, "%s/%s", d->folder, name);
    SPW_TRY(spw__span_open(d->span, path, &d->ranks[rank].file_idx, err));
    SPW_TRY(spw__torch_open(&t, path, err));
    optimizer = spw__py_get(spw__torch_root(t), "optimizer_state_dict");
    st = optimizer != NULL ? SPW_OK : spw__ds_damaged(t, "optimizer_state_dict is missing", err);
    if (st == SPW_OK && rank == 0)
        st = read_first(d, t, optimizer, err);
    if (st == SPW_OK)
        st = read_flats(d, t, rank, optimizer, err);
    if (st == SPW_OK && rank == 0)
        read_groups(d, optimizer);
    if (st == SPW_OK && rank == 0)
        st = keep_config(d, spw__py_get(spw__torch_root(t), "ds_config"), err);
    spw__torch_close(t);
    return st;
}
