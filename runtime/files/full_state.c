/*
 * Checkpoints of a whole state dict, as accelerate and transformers' Trainer write them of FSDP unless they are asked for shards:
 *
 *   optimizer.bin             a file of torch.save: {"state": {NAME: {"exp_avg": tensor, "step": ...}}, "param_groups": [{"params": [NAME], ...}]}
 *   pytorch_model_fsdp.bin    the weights by their names, or a Hugging Face folder's (model.safetensors, pytorch_model.bin)
 *
 * transformers 5 trains the experts of a layer in one tensor, "X.experts.gate_up_proj", and writes a folder with a tensor for each expert's matrix: what the
 * optimizer has of the one is cut into parts of the others.
 *
 * The optimizer of a training without FSDP (optimizer.pt, or accelerate's optimizer.bin) has numbers in the place of names, which nobody can tell
 * apart once its program has ended: that is no such checkpoint.
 *
 * Source  PyTorch's documentation of get_optimizer_state_dict and FullyShardedDataParallel.optim_state_dict, and the files that 2.15 writes.
 */
#include "foreign.h"
#include "hf_reader.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define OPTIMIZER "optimizer.bin"
#define WEIGHTS   "pytorch_model_fsdp.bin"

/* What the optimizer has of a parameter. */
typedef struct named_state {
    const char *name;
    const spw__py *value;
    double decay; /* NAN: not known */
    bool used;    /* there are weights of this name, or of its experts */
} named_state;

/* What of a state is a weight's: all of it, or of an expert's matrix in (experts, parts rows, cols). */
typedef struct share {
    uint64_t expert, part, parts; /* parts: 0: all of it */
} share;

typedef struct reading {
    spw_foreign *d;
    spw_hf_reader *weights;
    spw__torch *optimizer;
    uint32_t optimizer_idx; /* its file in the span */
    named_state *states;    /* (state_count) by name */
    uint64_t state_count;
    spw_error *err;
} reading;

/* Whether all of a list, or of a dict's keys, are text. */
static bool
are_names(const spw__py *v)
{
    for (uint64_t i = 0; v != NULL && i < v->count; i += v->kind == SPW__PY_DICT ? 2 : 1) {
        if (spw__py_text(v->items[i]) == NULL)
            return false;
    }
    return true;
}

/*
 * An optimizer may have no state yet, or never: its groups tell then. A file that cannot be read counts: what is wrong with it is said when
 * it is opened.
 */
static bool
has_names(const char *folder)
{
    char path[SPW__FOREIGN_PATH_BYTES + 64];
    const spw__py *root, *group;
    spw__torch *t;
    spw_error ignored = {0};
    bool names;
    snprintf(path, sizeof path, "%.4000s/" OPTIMIZER, folder);
    if (spw__torch_open(&t, path, &ignored) != SPW_OK)
        return true;
    root = spw__torch_root(t);
    names = are_names(spw__py_get(root, "state"));
    for (uint64_t g = 0; (group = spw__py_item(spw__py_get(root, "param_groups"), g)) != NULL; g++)
        names = names && are_names(spw__py_get(group, "params"));
    spw__torch_close(t);
    return names;
}

bool
spw__full_is(const char *folder)
{
    return spw_dir_has(folder, OPTIMIZER) && (spw_dir_has(folder, WEIGHTS) || spw_hf_has_weights(folder));
}

bool
spw__full_there(const char *folder)
{
    return spw__full_is(folder) && has_names(folder);
}

static spw_status
damaged(const reading *r, const char *name, const char *what)
{
    return SPW_RAISE(r->err, SPW_ECORRUPT, "%s/" OPTIMIZER ": %s: %s", r->d->folder, name, what);
}

static int
by_name(const void *a, const void *b)
{
    return strcmp(((const named_state *)a)->name, ((const named_state *)b)->name);
}

static named_state *
find_state(const reading *r, const char *name)
{
    named_state want = {.name = name};
    return bsearch(&want, r->states, r->state_count, sizeof want, by_name);
}

/* A weight's name in transformers 5's memory, where its files have an older one; room: the answer may be in it. */
static const char *
name_in_memory(const char *name, char room[SPW_TENSOR_NAME_BYTES])
{
    static const char *const older = ".block_sparse_moe.";
    static const char *const base = "backbone.";
    const char *at = strstr(name, older);
    if (strcmp(name, "embed_out.weight") == 0)
        return "lm_head.weight";
    if (strncmp(name, base, strlen(base)) == 0) {
        snprintf(room, SPW_TENSOR_NAME_BYTES, "model.%s", name + strlen(base));
        return room;
    }
    if (at == NULL)
        return name;
    snprintf(room, SPW_TENSOR_NAME_BYTES, "%.*s.mlp.%s", (int)(at - name), name, at + strlen(older));
    return room;
}

/* "X.experts.3.up_proj.weight" has the second part of the fourth of "X.experts.gate_up_proj", or is that of "X.experts.up_proj"; by an older name it is "w3". */
static named_state *
find_of_experts(const reading *r, const char *name, share *of)
{
    static const char *const kinds[] = {".gate_proj.weight", ".up_proj.weight", ".down_proj.weight",
                                        ".w1.weight",        ".w3.weight",      ".w2.weight"};
    const char *experts = strstr(name, ".experts.");
    char whole[SPW_TENSOR_NAME_BYTES], *kind;
    uint32_t k = 0;
    if (experts == NULL)
        return NULL;
    of->expert = strtoull(experts + strlen(".experts."), &kind, 10);
    while (k < 6 && strcmp(kind, kinds[k]) != 0)
        k++;
    if (k == 6)
        return NULL;
    of->part = k % 3 == 1;
    of->parts = k % 3 < 2 ? 2 : 1;
    snprintf(whole, sizeof whole, "%.*s.experts.%s", (int)(experts - name), name,
             of->parts == 2 ? "gate_up_proj" : "down_proj");
    if (of->part == 0 || find_state(r, whole) != NULL)
        return find_state(r, whole);
    *of = (share){.expert = of->expert, .parts = 1}; /* without a gate */
    snprintf(whole, sizeof whole, "%.*s.experts.up_proj", (int)(experts - name), name);
    return find_state(r, whole);
}

/* The state of a weight; NULL: it was frozen. */
static named_state *
state_of(const reading *r, const char *name, share *of)
{
    char room[SPW_TENSOR_NAME_BYTES];
    named_state *own = find_state(r, name);
    *of = (share){.parts = 0};
    if (own == NULL) {
        name = name_in_memory(name, room);
        own = find_state(r, name);
    }
    return own != NULL ? own : find_of_experts(r, name, of);
}

static spw_status
list_states(reading *r)
{
    const spw__py *states = spw__py_get(spw__torch_root(r->optimizer), "state");
    if (states == NULL || states->kind != SPW__PY_DICT || states->count == 0)
        return damaged(r, "state", "it has no parameter's");
    r->states = spw_mem_calloc(states->count / 2 + 1, sizeof *r->states);
    if (r->states == NULL)
        return SPW_RAISE(r->err, SPW_ENOMEM, "parameters of %s", r->d->folder);
    for (uint64_t i = 0; i + 1 < states->count; i += 2) {
        const char *name = spw__py_text(states->items[i]);
        if (name != NULL)
            r->states[r->state_count++] = (named_state){name, states->items[i + 1], NAN, false};
    }
    qsort(r->states, r->state_count, sizeof *r->states, by_name);
    return SPW_OK;
}

/* A number, or a tensor of one. */
static spw_status
read_number(const reading *r, const spw__py *v, double *out)
{
    spw_tensor_info t;
    float x;
    *out = NAN;
    if (spw__py_real(v, out) || !spw__torch_is_tensor(v))
        return SPW_OK;
    SPW_TRY(spw__torch_tensor(r->optimizer, v, "step", &t, r->err));
    if (t.ndim > 0 || t.dtype != SPW_F32)
        return SPW_OK;
    SPW_TRY(spw__torch_read(r->optimizer, &t, &x, r->err));
    *out = (double)x;
    return SPW_OK;
}

static bool
has_shape(const spw_tensor_info *t, const spw_tensor_info *weights, const share *of)
{
    if (of->parts == 0)
        return t->ndim == weights->ndim && memcmp(t->shape, weights->shape, t->ndim * sizeof *t->shape) == 0;
    return t->ndim == 3 && weights->ndim == 2 && of->expert < t->shape[0] &&
           t->shape[1] == of->parts * weights->shape[0] && t->shape[2] == weights->shape[1];
}

static spw_status
add_moment(reading *r, spw__foreign_param *p, const share *of, const char *name, const spw__py *v)
{
    spw_tensor_info t;
    uint64_t bytes;
    uint32_t k;
    SPW_TRY(spw__foreign_moment(r->d, name, &k, r->err));
    SPW_TRY(spw__torch_tensor(r->optimizer, v, p->info.name, &t, r->err));
    if (t.dtype != SPW_F32)
        return SPW_RAISE(r->err, SPW_EUNSUPPORTED, "%s/" OPTIMIZER ": %s of %s is %s; moments in fp32 are read",
                         r->d->folder, name, p->info.name, t.type);
    if (!has_shape(&t, &p->info, of))
        return damaged(r, p->info.name, "it has another shape than its weights");
    bytes = spw__foreign_elements(&p->info) * sizeof(float);
    p->moment[k] = spw__span_bytes(r->d->span);
    p->moment_count++;
    return spw__span_add(r->d->span, r->optimizer_idx, t.begin + (of->expert * of->parts + of->part) * bytes, bytes,
                         r->err);
}

/* What the optimizer has of a parameter: its moments, and how often it was updated. */
static spw_status
add_state(reading *r, spw__foreign_param *p, const share *of, const spw__py *state)
{
    double updates;
    for (uint64_t i = 0; i + 1 < state->count; i += 2) {
        const char *name = spw__py_text(state->items[i]);
        if (name != NULL && strcmp(name, "step") != 0 && spw__torch_is_tensor(state->items[i + 1]))
            SPW_TRY(add_moment(r, p, of, name, state->items[i + 1]));
    }
    SPW_TRY(read_number(r, spw__py_get(state, "step"), &updates));
    return spw__foreign_see_updates(r->d, updates) ? SPW_OK : damaged(r, p->info.name, "it has no number of updates");
}

/* The weights' file, where it is in the span; files (shard_count), UINT32_MAX: not yet. */
static spw_status
add_weights(reading *r, uint32_t i, uint32_t *files)
{
    const spw__hf_entry *e = &r->weights->tensors[i];
    spw__foreign_param *p = &r->d->params[i];
    spw_st_extent at;
    p->info = *e->info;
    p->info.begin = spw__span_bytes(r->d->span);
    p->decay = NAN;
    if (!spw_st_reader_extent(r->weights->shards[e->shard_idx].reader, e->info, &at))
        return damaged(r, e->info->name, "its weights are in pieces");
    if (files[e->shard_idx] == UINT32_MAX)
        SPW_TRY(spw__span_open(r->d->span, at.path, &files[e->shard_idx], r->err));
    return spw__span_add(r->d->span, files[e->shard_idx], at.offset, e->info->bytes, r->err);
}

static spw_status
add_params(reading *r)
{
    spw_foreign *d = r->d;
    const uint32_t count = spw_hf_reader_count(r->weights);
    uint32_t *files = spw_mem_calloc(r->weights->shard_count + 1, sizeof *files);
    spw_status st = SPW_OK;
    d->params = spw_mem_calloc(count + 1, sizeof *d->params);
    if (files == NULL || d->params == NULL)
        st = SPW_RAISE(r->err, SPW_ENOMEM, "parameters of %s", d->folder);
    else
        memset(files, 0xff, r->weights->shard_count * sizeof *files);
    for (uint32_t i = 0; st == SPW_OK && i < count; i++)
        st = add_weights(r, i, files);
    d->param_count = st == SPW_OK ? count : 0;
    spw_mem_free(files);
    return st;
}

/* A state that has no weights was called otherwise there, and would be left behind without a word. */
static spw_status
add_states(reading *r)
{
    spw_foreign *d = r->d;
    for (uint32_t i = 0; i < d->param_count; i++) {
        share part;
        named_state *of = state_of(r, d->params[i].info.name, &part);
        d->params[i].frozen = of == NULL;
        if (of == NULL)
            continue;
        of->used = true;
        d->trained_count++;
        SPW_TRY(add_state(r, &d->params[i], &part, of->value));
    }
    for (uint64_t i = 0; i < r->state_count; i++) {
        if (!r->states[i].used)
            return damaged(r, r->states[i].name, "there are no weights of this name");
    }
    for (uint32_t i = 0; i < d->param_count; i++) {
        if (!d->params[i].frozen && d->params[i].moment_count != d->about.moment_count)
            return damaged(r, d->params[i].info.name, "the optimizer has not all of what it has of others");
    }
    return SPW_OK;
}

/* Decay of each parameter, and the first group's betas and epsilon. */
static void
read_groups(const reading *r)
{
    const spw__py *groups = spw__py_get(spw__torch_root(r->optimizer), "param_groups"), *group, *name;
    spw_foreign_about *a = &r->d->about;
    for (uint64_t g = 0; (group = spw__py_item(groups, g)) != NULL; g++) {
        double decay = NAN;
        if (g == 0) {
            (void)spw__py_real(spw__py_item(spw__py_get(group, "betas"), 0), &a->beta1);
            (void)spw__py_real(spw__py_item(spw__py_get(group, "betas"), 1), &a->beta2);
            (void)spw__py_real(spw__py_get(group, "eps"), &a->eps);
        }
        (void)spw__py_real(spw__py_get(group, "weight_decay"), &decay);
        for (uint64_t i = 0; (name = spw__py_item(spw__py_get(group, "params"), i)) != NULL; i++) {
            named_state *of = spw__py_text(name) != NULL ? find_state(r, spw__py_text(name)) : NULL;
            if (of != NULL)
                of->decay = decay;
        }
    }
    for (uint32_t i = 0; i < r->d->param_count; i++) {
        share unused;
        const named_state *of = state_of(r, r->d->params[i].info.name, &unused);
        r->d->params[i].decay = of != NULL ? of->decay : NAN;
    }
}

static spw_status
read_weights(reading *r)
{
    char path[SPW__FOREIGN_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%.4000s/" WEIGHTS, r->d->folder);
    r->d->about.hf_weights = !spw_dir_has(r->d->folder, WEIGHTS);
    SPW_TRY(spw_hf_reader_open(&r->weights, r->d->about.hf_weights ? r->d->folder : path, r->err));
    return add_params(r);
}

static spw_status
read_optimizer(reading *r)
{
    char path[SPW__FOREIGN_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%.4000s/" OPTIMIZER, r->d->folder);
    SPW_TRY(spw__torch_open(&r->optimizer, path, r->err));
    SPW_TRY(spw__span_open(r->d->span, path, &r->optimizer_idx, r->err));
    SPW_TRY(list_states(r));
    SPW_TRY(add_states(r));
    read_groups(r);
    return SPW_OK;
}

/* Whatever its optimizer keeps, or half of it: the weights are whole. */
static spw_status
read_all(reading *r)
{
    spw_error *err = r->err, *unread = &r->d->unread;
    SPW_TRY(read_weights(r));
    r->err = unread;
    (void)read_optimizer(r);
    if (unread->status == SPW_OK || unread->status == SPW_ECORRUPT || unread->status == SPW_EUNSUPPORTED)
        return SPW_OK;
    spw_error_keep_first(err, unread);
    return unread->status;
}

spw_status
spw__full_read(spw_foreign *d, spw_error *err)
{
    reading r = {.d = d, .err = err};
    spw_status st = read_all(&r);
    snprintf(d->about.maker, sizeof d->about.maker, "PyTorch");
    d->about.ranks = 1;
    spw_mem_free(r.states);
    spw__torch_close(r.optimizer);
    spw_hf_reader_close(r.weights);
    return st;
}
