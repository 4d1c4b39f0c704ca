/*
 * Checkpoints of DeepSpeed's ZeRO stages: which bytes of which rank's file are which parameter's. Nothing of them is loaded; the parts of
 * a tensor become stretches of a span, and what reads a tensor then reads the ranks' files where they are.
 *
 *   stage 1, 2   of each group of parameters one flat array, cut among the ranks; parameters in the order of param_shapes, with padding
 *                behind each where param_alignment_paddings says so, and behind the last
 *   stage 3      each rank has of each parameter the next ceil(n / ranks) elements, the last ones filled up; a rank's parts lie in the
 *                order of param_shapes in the flat arrays of its sub-groups. Those that were on nvme are in files of their own, below
 *                offloaded_tensors/
 *
 * Masters and what the optimizer keeps lie alike. The order of the names is in the model's states, which in stage 3 each rank has.
 *
 * Source  DeepSpeed's documentation of checkpoints, and the layout of files that 0.19.8 writes.
 */
#include "hf_reader.h"
#include "torch.h"
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    PATH_BYTES = 4096,
    PARTS_MAX = 1 + SPW_DEEPSPEED_MOMENTS_MAX,
    RANKS_MAX = 65536,
    LATEST_BYTES_MAX = 4096,
    PADDING_MAX = 1 << 30,
    GROUPS_MAX = 1 << 20
};

/* A flat array in a file of the span. */
typedef struct flat {
    uint32_t file_idx;
    uint64_t offset, elems;
} flat;

typedef struct rank_file {
    uint32_t file_idx;
    flat *flats; /* (PARTS_MAX, group_count); masters first */
} rank_file;

/* A parameter as DeepSpeed saved it. */
typedef struct parameter {
    spw_tensor_info info; /* begin: of its masters, or of a frozen one's weights, in the span */
    uint64_t moment[SPW_DEEPSPEED_MOMENTS_MAX];
    uint32_t group_idx;
    uint64_t padding; /* elements behind it */
    bool frozen;
} parameter;

struct spw_deepspeed {
    char folder[PATH_BYTES];
    spw_deepspeed_about about;
    rank_file *ranks; /* (about.ranks) */
    uint32_t group_count;
    double *decays;    /* (group_count) NAN: not known */
    parameter *params; /* in their files' order; frozen ones behind */
    uint32_t param_count, trained_count;
    spw__span *span;
    char *config; /* JSON */
};

/* ---------------------------------------------------------------- finding */

/* The rank in "[bf16_]zero_pp_rank_<R>_mp_rank_00_optim_states.pt"; false: another file, or of another part of the model (its number is *part). */
static bool
parse_name(const char *name, const char *end, uint64_t *rank, uint64_t *part)
{
    const char *at = strstr(name, "zero_pp_rank_");
    char *after;
    if (at == NULL || strlen(name) < strlen(end) || strcmp(name + strlen(name) - strlen(end), end) != 0)
        return false;
    *rank = strtoull(at + strlen("zero_pp_rank_"), &after, 10);
    if (strncmp(after, "_mp_rank_", 9) != 0)
        return false;
    *part = strtoull(after + 9, &after, 10);
    return strcmp(after, end) == 0;
}

/* How many ranks' files there are; parts: the highest number of a part of the model, from 0 on. */
static uint64_t
count_ranks(const char *folder, uint64_t *parts)
{
    DIR *dir = opendir(folder);
    struct dirent *at;
    uint64_t count = 0, rank, part;
    *parts = 0;
    while (dir != NULL && (at = readdir(dir)) != NULL) {
        if (!parse_name(at->d_name, "_optim_states.pt", &rank, &part))
            continue;
        count = rank < RANKS_MAX && rank + 1 > count ? rank + 1 : count;
        *parts = part > *parts ? part : *parts;
    }
    if (dir != NULL)
        closedir(dir);
    return count;
}

bool
spw_deepspeed_find(const char *path, char *found, uint64_t bytes)
{
    char name[PATH_BYTES], *tag = NULL;
    uint64_t parts;
    spw_error ignored = {0};
    snprintf(name, sizeof name, "%.3000s/latest", path);
    if (spw_file_read_text(name, LATEST_BYTES_MAX, &tag, &ignored) == SPW_OK) {
        tag[strcspn(tag, "\r\n")] = '\0';
        snprintf(name, sizeof name, "%.3000s/%.1000s", path, tag);
        spw_mem_free(tag);
    } else {
        snprintf(name, sizeof name, "%.3000s", path);
    }
    return count_ranks(name, &parts) > 0 && snprintf(found, bytes, "%s", name) < (int)bytes;
}

/* ---------------------------------------------------------------- the model's states */

static spw_status
damaged(const spw__torch *t, const char *what, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s", spw__torch_path(t), what);
}

/* torch.Size, or a tuple. */
static bool
read_shape(const spw__py *v, spw_tensor_info *out)
{
    uint64_t n = 1;
    if (spw__py_is(v, "torch.Size"))
        v = spw__py_item(v->args, 0);
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

static uint64_t
elements(const spw_tensor_info *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

static spw_status
add_param(spw_deepspeed *d, const spw__torch *t, const char *name, const spw__py *shape, uint32_t group_idx,
          spw_error *err)
{
    parameter *p = &d->params[d->param_count];
    if (name == NULL || strlen(name) >= sizeof p->info.name || !read_shape(shape, &p->info))
        return damaged(t, "param_shapes: a name or shape that is none", err);
    snprintf(p->info.name, sizeof p->info.name, "%s", name);
    p->info.dtype = SPW_F32;
    p->info.type = spw__st_types[SPW_F32].name;
    p->info.bytes = elements(&p->info) * 4;
    p->group_idx = group_idx;
    d->param_count++;
    return SPW_OK;
}

/* Names and shapes of what was trained, group by group, and of what was frozen. */
static spw_status
read_params(spw_deepspeed *d, const spw__torch *t, spw_error *err)
{
    const spw__py *root = spw__torch_root(t), *groups = spw__py_get(root, "param_shapes");
    const spw__py *frozen = spw__py_get(root, "frozen_param_shapes");
    uint64_t count = 0, frozen_items = frozen != NULL ? frozen->count : 0;
    if (groups == NULL || groups->kind != SPW__PY_LIST || groups->count == 0 || groups->count > GROUPS_MAX)
        return damaged(t, "param_shapes, the names of what the optimizer has, is missing", err);
    for (uint64_t g = 0; g < groups->count; g++)
        count += groups->items[g]->count / 2;
    d->params = spw_mem_calloc(count + frozen_items / 2 + 1, sizeof *d->params);
    if (d->params == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "parameters of %s", d->folder);
    for (uint32_t g = 0; g < groups->count; g++) {
        const spw__py *names = groups->items[g];
        for (uint64_t i = 0; i + 1 < names->count; i += 2)
            SPW_TRY(add_param(d, t, spw__py_text(names->items[i]), names->items[i + 1], g, err));
    }
    d->trained_count = d->param_count;
    if (d->trained_count == 0)
        return damaged(t, "param_shapes names nothing", err);
    for (uint64_t i = 0; i + 1 < frozen_items; i += 2) {
        SPW_TRY(add_param(d, t, spw__py_text(frozen->items[i]), frozen->items[i + 1], 0, err));
        d->params[d->param_count - 1].frozen = true;
    }
    return SPW_OK;
}

static spw_status
read_about(spw_deepspeed *d, const spw__torch *t, spw_error *err)
{
    const spw__py *root = spw__torch_root(t);
    const char *version = spw__py_text(spw__py_get(root, "ds_version"));
    int64_t steps = -1, samples = -1, skipped = 0;
    if (!spw__py_int(spw__py_get(root, "global_steps"), &steps) || steps < 0 ||
        !spw__py_int(spw__py_get(root, "global_samples"), &samples) || samples < 0)
        return damaged(t, "global_steps or global_samples is missing", err);
    (void)spw__py_int(spw__py_get(root, "skipped_steps"), &skipped);
    d->about.steps = (uint64_t)steps;
    d->about.samples = (uint64_t)samples;
    if (skipped < 0 || skipped > steps)
        return damaged(t, "skipped_steps is more than global_steps", err);
    d->about.updates = (uint64_t)(steps - skipped); /* unless the optimizer says how many it made */
    snprintf(d->about.version, sizeof d->about.version, "%s", version != NULL ? version : "unknown");
    return SPW_OK;
}

/* One frozen parameter's weights in a rank's file of states: all of them, or in stage 3 the rank's part. */
static spw_status
add_frozen(spw_deepspeed *d, const spw__torch *t, uint32_t file_idx, uint32_t rank, parameter *p, spw_error *err)
{
    const spw__py *v = spw__py_get(spw__py_get(spw__torch_root(t), "frozen_param_fragments"), p->info.name);
    uint64_t all = elements(&p->info), count = all, size;
    spw_tensor_info info;
    SPW_TRY(spw__torch_tensor(t, v, p->info.name, &info, err));
    if (info.dtype == SPW_DTYPE_COUNT)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: %s is %s; fp32, bf16 and fp16 are read", spw__torch_path(t),
                         p->info.name, info.type);
    if (d->about.stage == 3)
        count = (all + d->about.ranks - 1) / d->about.ranks; /* the last ranks' are filled up */
    size = spw_dtype_bytes(info.dtype);
    if (rank == 0) {
        p->info.dtype = info.dtype;
        p->info.type = info.type;
        p->info.bytes = all * size;
    }
    if (info.dtype != p->info.dtype || info.bytes < count * size)
        return damaged(t, "a frozen parameter's part is too short, or of another type than the first rank's", err);
    return spw__span_add(d->span, file_idx, info.begin, count * size, err);
}

static void
state_path(const spw_deepspeed *d, uint32_t rank, char *path, size_t bytes)
{
    if (d->about.stage == 3)
        snprintf(path, bytes, "%s/zero_pp_rank_%u_mp_rank_00_model_states.pt", d->folder, rank);
    else
        snprintf(path, bytes, "%s/mp_rank_00_model_states.pt", d->folder);
}

/* Frozen weights: a parameter's parts follow each other, so every rank's file is open at once. */
static spw_status
read_frozen(spw_deepspeed *d, spw_error *err)
{
    uint32_t files = d->about.stage == 3 ? d->about.ranks : 1;
    spw__torch **t = spw_mem_calloc(files, sizeof *t);
    uint32_t *file_idx = spw_mem_calloc(files, sizeof *file_idx);
    spw_status st = t != NULL && file_idx != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "states of %s", d->folder);
    for (uint32_t r = 0; st == SPW_OK && r < files; r++) {
        char path[PATH_BYTES + 100];
        state_path(d, r, path, sizeof path);
        st = spw__span_open(d->span, path, &file_idx[r], err);
        if (st == SPW_OK)
            st = spw__torch_open(&t[r], path, err);
    }
    for (uint32_t i = d->trained_count; st == SPW_OK && i < d->param_count; i++) {
        d->params[i].info.begin = spw__span_bytes(d->span);
        for (uint32_t r = 0; st == SPW_OK && r < files; r++)
            st = add_frozen(d, t[r], file_idx[r], r, &d->params[i], err);
    }
    for (uint32_t r = 0; t != NULL && r < files; r++)
        spw__torch_close(t[r]);
    spw_mem_free(t);
    spw_mem_free(file_idx);
    return st;
}

/* The first rank's; stage 3 has one for each. */
static spw_status
read_states(spw_deepspeed *d, spw_error *err)
{
    char path[PATH_BYTES + 100];
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

/* ---------------------------------------------------------------- what a rank's file says */

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
read_flat(const spw__torch *t, const spw__py *v, const char *name, flat *out, spw_error *err)
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
group_elems(const spw_deepspeed *d, uint32_t g)
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
find_swapped(spw_deepspeed *d, uint32_t rank, uint32_t g, const char *moment, const char *id, flat *out, spw_error *err)
{
    char path[PATH_BYTES + 200];
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
learn_moments(spw_deepspeed *d, const spw__torch *t, const spw__py *state, spw_error *err)
{
    for (uint64_t i = 0; state != NULL && state->kind == SPW__PY_DICT && i + 1 < state->count; i += 2) {
        const char *name = spw__py_text(state->items[i]);
        spw_tensor_info info;
        if (name == NULL || !spw__torch_is_tensor(state->items[i + 1]))
            continue;
        SPW_TRY(spw__torch_tensor(t, state->items[i + 1], name, &info, err));
        if (info.ndim == 0)
            continue;
        if (d->about.moment_count == SPW_DEEPSPEED_MOMENTS_MAX || strlen(name) >= sizeof d->about.moments[0])
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "%s: an optimizer with %s for each element, and %d more, is not read", spw__torch_path(t),
                             name, SPW_DEEPSPEED_MOMENTS_MAX);
        snprintf(d->about.moments[d->about.moment_count++], sizeof d->about.moments[0], "%s", name);
    }
    return SPW_OK;
}

static spw_status
read_flats(spw_deepspeed *d, const spw__torch *t, uint32_t rank, const spw__py *optimizer, spw_error *err)
{
    rank_file *r = &d->ranks[rank];
    const spw__py *masters =
        spw__py_get(optimizer, d->about.stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups");
    if (masters == NULL || masters->kind != SPW__PY_LIST || masters->count == 0 || masters->count > GROUPS_MAX)
        return damaged(t, "fp32 masters of the optimizer's groups are missing", err);
    if (d->group_count == 0) {
        d->group_count = (uint32_t)masters->count;
        SPW_TRY(learn_moments(d, t, group_state(optimizer, d->about.stage, 0), err));
    }
    if (masters->count != d->group_count ||
        (d->about.stage < 3 && d->params[d->trained_count - 1].group_idx >= d->group_count))
        return damaged(t, "it has other groups than the first rank's file, or than param_shapes", err);
    r->flats = spw_mem_calloc((size_t)PARTS_MAX * d->group_count, sizeof *r->flats);
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
            flat *f = &r->flats[(size_t)(m + 1) * d->group_count + g];
            f->file_idx = r->file_idx;
            SPW_TRY(read_flat(t, spw__py_get(state, name), name, f, err));
            if (swapped && f->elems == 0)
                SPW_TRY(find_swapped(d, rank, g, name, id, f, err));
            if (f->elems < r->flats[g].elems)
                return damaged(t, "the optimizer's state is shorter than its masters", err);
        }
        if (d->about.stage == 3 && r->flats[g].elems != d->ranks[0].flats[g].elems)
            return damaged(t, "its masters are not as many as the first rank's", err);
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
read_updates(spw_deepspeed *d, const spw__torch *t, const spw__py *optimizer, spw_error *err)
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
            return damaged(t, "the optimizer's step is more than the steps that were made", err);
        d->about.updates = (uint64_t)n;
    }
    return SPW_OK;
}

static void
read_scaler(spw_deepspeed *d, const spw__py *optimizer)
{
    const spw__py *s = spw__py_get(optimizer, "loss_scaler"), *dynamic = spw__py_get(optimizer, "dynamic_loss_scale");
    spw_deepspeed_about *a = &d->about;
    int64_t on = 0;
    a->scaled = spw__py_real(spw__py_attribute(s, "cur_scale"), &a->scale) && spw__py_int(dynamic, &on) && on != 0 &&
                spw__py_int(spw__py_attribute(s, "cur_hysteresis"), &a->hysteresis) &&
                spw__py_int(spw__py_attribute(s, "cur_iter"), &a->scaler_steps) &&
                spw__py_int(spw__py_attribute(s, "last_overflow_iter"), &a->last_overflow);
}

/* What lies behind each parameter of stage 1 and 2; older versions have nothing there. */
static spw_status
read_paddings(spw_deepspeed *d, const spw__torch *t, const spw__py *optimizer, spw_error *err)
{
    const spw__py *paddings = spw__py_get(optimizer, "param_alignment_paddings");
    uint64_t in_group = 0;
    for (uint32_t i = 0; paddings != NULL && paddings->kind != SPW__PY_NONE && i < d->trained_count; i++) {
        parameter *p = &d->params[i];
        int64_t n = 0;
        in_group = i > 0 && d->params[i - 1].group_idx == p->group_idx ? in_group + 1 : 0;
        if (!spw__py_int(spw__py_item(spw__py_item(paddings, p->group_idx), in_group), &n) || n < 0 ||
            (uint64_t)n > PADDING_MAX)
            return damaged(t, "param_alignment_paddings does not have the parameters' groups", err);
        p->padding = (uint64_t)n;
    }
    return SPW_OK;
}

/* What is read of the first rank's file alone. */
static spw_status
read_first(spw_deepspeed *d, const spw__torch *t, const spw__py *optimizer, spw_error *err)
{
    const spw__py *ranks = spw__py_get(optimizer, "partition_count");
    const spw__py *said = spw__py_get(optimizer, "zero_stage");
    int64_t stage = 1, n = 0, most = 0; /* bf16 with fp32 accumulation, which is stage 1, says nothing */
    if ((said != NULL && !spw__py_int(said, &stage)) || stage < 1 || stage > 3 || (stage == 3) != (d->about.stage == 3))
        return damaged(t, "zero_stage is not 1, 2 or 3, or not that of the model's states", err);
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

/* The hyperparameters that its optimizer had; elastic_checkpoint keeps none. */
static spw_status
read_groups(spw_deepspeed *d, const spw__py *optimizer, spw_error *err)
{
    spw_deepspeed_about *a = &d->about;
    const spw__py *groups = spw__py_get(
        spw__py_get(optimizer, a->stage == 3 ? "optimizer_state_dict" : "base_optimizer_state"), "param_groups");
    const spw__py *first = spw__py_item(groups, 0), *betas = spw__py_get(first, "betas");
    if (!spw__py_real(spw__py_get(optimizer, "clip_grad"), &a->clip))
        a->clip = NAN;
    if (!spw__py_real(spw__py_item(betas, 0), &a->beta1) || !spw__py_real(spw__py_item(betas, 1), &a->beta2))
        a->beta1 = a->beta2 = NAN;
    if (!spw__py_real(spw__py_get(first, "eps"), &a->eps))
        a->eps = NAN;
    d->decays = spw_mem_calloc(d->group_count, sizeof *d->decays);
    if (d->decays == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "groups of %s", d->folder);
    for (uint32_t g = 0; g < d->group_count; g++)
        d->decays[g] = NAN;
    for (uint32_t i = 0; spw__py_item(groups, i) != NULL; i++) { /* stage 3: each has several of the flat arrays */
        const spw__py *arrays = spw__py_get(groups->items[i], "params");
        double decay;
        int64_t g = i;
        if (!spw__py_real(spw__py_get(groups->items[i], "weight_decay"), &decay))
            continue;
        for (uint64_t k = 0; k == 0 || (a->stage == 3 && spw__py_item(arrays, k) != NULL); k++) {
            if ((a->stage < 3 || spw__py_int(spw__py_item(arrays, k), &g)) && g >= 0 && g < d->group_count)
                d->decays[g] = decay;
        }
    }
    return SPW_OK;
}

static spw_status
keep_config(spw_deepspeed *d, const spw__py *config, spw_error *err)
{
    json_t *o = spw__py_json(config);
    char *text = o != NULL ? json_dumps(o, 0) : NULL;
    d->config = text != NULL ? spw_mem_strdup(text) : NULL;
    free(text);
    json_decref(o);
    return config == NULL || d->config != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "configuration in %s", d->folder);
}

static spw_status
read_rank(spw_deepspeed *d, uint32_t rank, spw_error *err)
{
    static const char *const begins[] = {"", "bf16_", "fp16_"};
    char path[PATH_BYTES + 100] = "";
    const spw__py *optimizer;
    spw__torch *t;
    spw_status st;
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
        snprintf(path, sizeof path, "%s/%szero_pp_rank_%u_mp_rank_00_optim_states.pt", d->folder, begins[i], rank);
        if (access(path, F_OK) == 0)
            break;
    }
    SPW_TRY(spw__span_open(d->span, path, &d->ranks[rank].file_idx, err));
    SPW_TRY(spw__torch_open(&t, path, err));
    optimizer = spw__py_get(spw__torch_root(t), "optimizer_state_dict");
    st = optimizer != NULL ? SPW_OK : damaged(t, "optimizer_state_dict is missing", err);
    if (st == SPW_OK && rank == 0)
        st = read_first(d, t, optimizer, err);
    if (st == SPW_OK)
        st = read_flats(d, t, rank, optimizer, err);
    if (st == SPW_OK && rank == 0)
        st = read_groups(d, optimizer, err);
    if (st == SPW_OK && rank == 0)
        st = keep_config(d, spw__py_get(spw__torch_root(t), "ds_config"), err);
    spw__torch_close(t);
    return st;
}

/* ---------------------------------------------------------------- where parameters lie */

static flat
flat_of(const spw_deepspeed *d, uint32_t rank, uint32_t part, uint32_t group)
{
    return d->ranks[rank].flats[(size_t)part * d->group_count + group];
}

static void
place(parameter *p, uint32_t part, uint64_t begin)
{
    if (part == 0)
        p->info.begin = begin;
    else
        p->moment[part - 1] = begin;
}

static spw_status
not_all(const spw_deepspeed *d, uint64_t want, uint64_t have, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT,
                     "%s: parameters take %llu elements of a flat array, and its files have %llu: they are not of one "
                     "checkpoint, or in a layout that is not read",
                     d->folder, (unsigned long long)want, (unsigned long long)have);
}

/* Stage 1 and 2: the ranks' parts of a group, one after the other. */
static spw_status
place_group(spw_deepspeed *d, uint32_t part, uint32_t g, spw_error *err)
{
    uint64_t begin = spw__span_bytes(d->span), at = 0, have = 0;
    for (uint32_t r = 0; r < d->about.ranks; r++) {
        flat f = flat_of(d, r, part, g);
        SPW_TRY(spw__span_add(d->span, f.file_idx, f.offset, f.elems * 4, err));
        have += f.elems;
    }
    for (uint32_t i = 0; i < d->trained_count; i++) {
        if (d->params[i].group_idx != g)
            continue;
        place(&d->params[i], part, begin + at * 4);
        at += d->params[i].info.bytes / 4 + d->params[i].padding;
    }
    /* Behind the last one there may be padding, to a multiple of twice the ranks; the moments' is never cut off. */
    if (at > have || (part == 0 && have - at >= 2ull * d->about.ranks))
        return not_all(d, at, have, err);
    return SPW_OK;
}

/* Elements [first, first + count) of a rank's flat arrays, one after the other. */
static spw_status
add_part(spw_deepspeed *d, uint32_t rank, uint32_t part, uint64_t first, uint64_t count, spw_error *err)
{
    uint64_t before = 0;
    for (uint32_t g = 0; g < d->group_count && count > 0; g++) {
        flat f = flat_of(d, rank, part, g);
        uint64_t skip = first - before, n;
        before += f.elems;
        if (first >= before)
            continue;
        n = f.elems - skip < count ? f.elems - skip : count;
        SPW_TRY(spw__span_add(d->span, f.file_idx, f.offset + skip * 4, n * 4, err));
        first += n;
        count -= n;
    }
    return count == 0 ? SPW_OK : not_all(d, first + count, before, err);
}

static spw_status
place_parts(spw_deepspeed *d, uint32_t part, spw_error *err)
{
    uint64_t at = 0, have = 0;
    for (uint32_t i = 0; i < d->trained_count; i++) {
        uint64_t all = d->params[i].info.bytes / 4, each = (all + d->about.ranks - 1) / d->about.ranks;
        place(&d->params[i], part, spw__span_bytes(d->span));
        for (uint32_t r = 0; r < d->about.ranks; r++)
            SPW_TRY(add_part(d, r, part, at, each, err));
        at += each;
    }
    for (uint32_t g = 0; g < d->group_count; g++)
        have += flat_of(d, 0, part, g).elems;
    return at == have ? SPW_OK : not_all(d, at, have, err);
}

static spw_status
place_all(spw_deepspeed *d, spw_error *err)
{
    for (uint32_t part = 0; part <= d->about.moment_count; part++) {
        if (d->about.stage == 3)
            SPW_TRY(place_parts(d, part, err));
        for (uint32_t g = 0; d->about.stage < 3 && g < d->group_count; g++)
            SPW_TRY(place_group(d, part, g, err));
    }
    return d->param_count > d->trained_count ? read_frozen(d, err) : SPW_OK;
}

/* ---------------------------------------------------------------- the checkpoint */

static spw_status
read_all(spw_deepspeed *d, spw_error *err)
{
    uint64_t parts, ranks = count_ranks(d->folder, &parts);
    if (ranks == 0)
        return SPW_RAISE(err, SPW_ENOENT, "%s has no *_optim_states.pt: it is no checkpoint of DeepSpeed's ZeRO",
                         d->folder);
    if (parts > 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: the model is cut into %llu parts (mp_rank); whole ones are read",
                         d->folder, (unsigned long long)parts + 1);
    d->about.ranks = (uint32_t)ranks;
    d->ranks = spw_mem_calloc(ranks, sizeof *d->ranks);
    if (d->ranks == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "ranks of %s", d->folder);
    SPW_TRY(spw__span_create(&d->span, err));
    SPW_TRY(read_states(d, err));
    for (uint32_t r = 0; r < d->about.ranks; r++)
        SPW_TRY(read_rank(d, r, err));
    return place_all(d, err);
}

spw_status
spw_deepspeed_open(spw_deepspeed **out, const char *folder, spw_error *err)
{
    spw_deepspeed *d = spw_mem_zalloc(sizeof *d);
    spw_status st;
    *out = NULL;
    if (d == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", folder);
    st = snprintf(d->folder, sizeof d->folder, "%s", folder) < (int)sizeof d->folder
             ? read_all(d, err)
             : SPW_RAISE(err, SPW_EINVAL, "the path %.60s... is too long", folder);
    if (st != SPW_OK)
        spw_deepspeed_close(d);
    else
        *out = d;
    return st;
}

void
spw_deepspeed_close(spw_deepspeed *d)
{
    if (d == NULL)
        return;
    for (uint32_t r = 0; d->ranks != NULL && r < d->about.ranks; r++)
        spw_mem_free(d->ranks[r].flats);
    spw_mem_free(d->ranks);
    spw_mem_free(d->decays);
    spw_mem_free(d->params);
    spw__span_release(d->span);
    spw_mem_free(d->config);
    spw_mem_free(d);
}

const spw_deepspeed_about *
spw_deepspeed_get_about(const spw_deepspeed *d)
{
    return &d->about;
}

const char *
spw_deepspeed_config(const spw_deepspeed *d)
{
    return d->config;
}

static const parameter *
find_param(const spw_deepspeed *d, const char *name)
{
    for (uint32_t i = 0; i < d->param_count; i++) {
        if (strcmp(d->params[i].info.name, name) == 0)
            return &d->params[i];
    }
    return NULL;
}

bool
spw_deepspeed_trained(const spw_deepspeed *d, const char *name, double *decay)
{
    const parameter *p = find_param(d, name);
    if (p == NULL || p->frozen)
        return false;
    *decay = p->group_idx < d->group_count ? d->decays[p->group_idx] : NAN;
    return true;
}

spw_status
spw_deepspeed_weights(spw_deepspeed *d, spw_hf_reader **out, spw_error *err)
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

static int
by_name(const void *a, const void *b)
{
    return strcmp((*(const parameter *const *)a)->info.name, (*(const parameter *const *)b)->info.name);
}

static int
compare_name(const void *name, const void *param)
{
    return strcmp(name, (*(const parameter *const *)param)->info.name);
}

/* order: (param_count) the same parameters by name. */
static spw_status
list_moments(const spw_deepspeed *d, const spw_hf_reader *weights, const spw_model *m, const parameter **order,
             const uint32_t *which, spw_tensor_info *infos, uint32_t *count, spw_error *err)
{
    for (uint32_t id = 0; id < m->param_count; id++) {
        uint64_t first;
        const char *name = spw_hf_bound_name(weights, id, &first);
        const parameter *const *p =
            name != NULL ? bsearch(name, order, d->param_count, sizeof *order, compare_name) : NULL;
        for (uint32_t k = 0; p != NULL && !(*p)->frozen && which[k] != UINT32_MAX; k++) {
            spw_tensor_info *t = &infos[(*count)++];
            *t = (spw_tensor_info){.dtype = SPW_F32, .type = spw__st_types[SPW_F32].name};
            spw_st_describe(t, &m->params[id], SPW_F32);
            t->type = spw__st_types[SPW_F32].name;
            t->stack = t->slice = 0;
            if (snprintf(t->name, sizeof t->name, "%.100s.%s", m->params[id].name, d->about.moments[which[k]]) >=
                (int)sizeof t->name)
                return SPW_RAISE(err, SPW_ECORRUPT, "%s: the name of %s is too long", d->folder, name);
            t->begin = (*p)->moment[which[k]] + first * 4;
            t->bytes = elements(t) * 4;
        }
    }
    return SPW_OK;
}

spw_status
spw_deepspeed_moments(spw_deepspeed *d, const spw_hf_reader *weights, const spw_model *m, const char *const *names,
                      uint32_t count, spw_st_reader **out, spw_error *err)
{
    const parameter **order = spw_mem_calloc(d->param_count + 1, sizeof *order);
    spw_tensor_info *infos = spw_mem_calloc((size_t)m->param_count * (count + 1) + 1, sizeof *infos);
    uint32_t which[SPW_DEEPSPEED_MOMENTS_MAX + 1], found = 0;
    spw_status st = order != NULL && infos != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "tensors of %s", d->folder);
    *out = NULL;
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
    for (uint32_t i = 0; st == SPW_OK && i < d->param_count; i++)
        order[i] = &d->params[i];
    if (st == SPW_OK) {
        qsort(order, d->param_count, sizeof *order, by_name);
        st = list_moments(d, weights, m, order, which, infos, &found, err);
    }
    if (st == SPW_OK)
        st = spw__st_reader_over(out, d->folder, d->span, infos, found, err);
    spw_mem_free(order);
    spw_mem_free(infos);
    return st;
}
