/*
 * adapters.c - low-rank adapters in a folder as peft writes them (adapter_model.safetensors or .bin, adapter_config.json), found for the
 * weights of a model that they are beside, and added to these. Which folder has the weights, where the adapters lie alone.
 */
#include "adapters.h"
#include "hf_reader.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_MAX_BYTES = 1100, CONFIG_BYTES_MAX = 1 << 20 };

/* Where an expert's matrix lies in a tensor of all experts. */
typedef struct fused_part {
    spw_fused fused;
    uint64_t first;
} fused_part;

struct spw__adapters {
    const char *folder;
    const spw_model *model;
    spw_st_reader *file;
    const spw_tensor_info **matrices; /* (param_count, 2) of them: A and B of each parameter, NULL where it has none */
    double alpha;
    bool by_root;       /* alpha counts over the square root of the rank, not over the rank */
    json_t *fused;      /* names of experts' tensors that have adapters, or ends of them; NULL: none */
    fused_part *places; /* (param_count) of experts' matrices in such tensors */
    struct {            /* of the parameter that was taken last; rank 0: it has none */
        uint64_t rank, cols, in, row,
            step; /* of the parameter: cols;  elements between A's rows, between B's, and between what a row of B has for two ranks */
        const spw_tensor_info *of[2]; /* what is in matrix */
        float *matrix[2], scale;      /* A, B as they are in the file */
        const float *a, *b;           /* the parameter's own part */
        bool turned;                  /* it is A^T B^T */
    } now;
};

/* Ways to begin that leave the model's own weights as they were: with others B A alone is not what training added. */
static bool
begins_beside(const json_t *init)
{
    static const char *const names[] = {"gaussian", "eva", "orthogonal", "mica"};
    const char *name = json_string_value(init);
    for (size_t i = 0; name != NULL && i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i]) == 0)
            return true;
    }
    return name == NULL;
}

static spw_status
read_config(spw__adapters *a, const json_t *root, const char *path, spw_error *err)
{
    const json_t *init = json_object_get(root, "init_lora_weights");
    const char *unread = json_is_true(json_object_get(root, "use_dora"))                   ? "use_dora"
                         : json_object_size(json_object_get(root, "alpha_pattern")) > 0    ? "alpha_pattern"
                         : json_array_size(json_object_get(root, "layer_replication")) > 0 ? "layer_replication"
                                                                                           : NULL;
    a->alpha = json_number_value(json_object_get(root, "lora_alpha"));
    a->by_root = json_is_true(json_object_get(root, "use_rslora"));
    a->fused = json_incref(json_object_get(root, "target_parameters"));
    if (!(a->alpha > 0))
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: lora_alpha is missing or not above 0", path);
    if (!begins_beside(init))
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s: init_lora_weights \"%.40s\" has changed the weights that the adapters are beside; peft's "
                         "save_pretrained makes plain adapters of them (path_initial_model_for_weight_conversion), and "
                         "where the weights here are the changed ones, set it to true",
                         path, json_string_value(init));
    if (json_is_array(json_object_get(root, "alora_invocation_tokens")))
        return SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "%s: adapters with alora_invocation_tokens are for what follows these tokens alone, and cannot "
            "be merged",
            path);
    if (unread != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s: not supported yet: %s; peft's merge_and_unload() makes weights of such adapters", path,
                         unread);
    return SPW_OK;
}

/* "base_model.model.X.lora_A.weight" is A of the weight X, by its name here; weight: "" of another tensor. */
static void
name_adapted(const spw__adapters *a, const char *name, bool *is_b, char weight[SPW_TENSOR_NAME_BYTES])
{
    static const char *const prefix = "base_model.model.";
    const char *end = strstr(name, ".lora_"), *inner = name + strlen(prefix);
    char there[SPW_TENSOR_NAME_BYTES], room[SPW_TENSOR_NAME_BYTES];
    weight[0] = '\0';
    if (end == NULL || end < inner || strncmp(name, prefix, strlen(prefix)) != 0)
        return;
    *is_b = strcmp(end, ".lora_B.weight") == 0;
    if (!*is_b && strcmp(end, ".lora_A.weight") != 0)
        return;
    snprintf(there, sizeof there, "%.*s.weight", (int)(end - inner), inner);
    snprintf(weight, SPW_TENSOR_NAME_BYTES, "%s", spw__hf_name_here(there, a->model->config.family, room));
}

/* Whether peft was told to put adapters beside the tensor; of a model of text and images it may have been by a longer name. */
static bool
is_fused_target(const spw__adapters *a, const spw_fused *fused)
{
    static const char *const longer = "language_model.";
    for (size_t i = 0; i < json_array_size(a->fused); i++) {
        const char *name = json_string_value(json_array_get(a->fused, i)),
                   *at = name != NULL ? strstr(name, longer) : NULL;
        if (name != NULL && spw_fused_matches(fused, at != NULL ? at + strlen(longer) : name))
            return true;
    }
    return false;
}

static bool
is_module(const char *tensor, const char *module)
{
    const char *at = strstr(tensor, ".layers."), *want = strstr(module, ".layers.");
    size_t n = want != NULL ? strlen(want) : 0;
    return at != NULL && want != NULL && strncmp(at, want, n) == 0 && strncmp(at + n, ".lora_", 6) == 0;
}

static spw_status
say_twice(const spw__adapters *a, const spw_tensor_info *t, spw_error *err)
{
    return SPW_RAISE(err, SPW_ECORRUPT, "%s/%s: %s is there twice, with and without its prefix", a->folder,
                     spw_hf_adapters(a->folder), t->name);
}

/* A or B of a tensor of all experts, to whose matrices it is bound; found: whether it is one. */
static spw_status
bind_fused(spw__adapters *a, const spw_tensor_info *t, bool is_b, bool *found, spw_error *err)
{
    *found = false;
    for (uint32_t b = 0; b < a->model->block_count && a->fused != NULL && !*found; b++) {
        const spw_block *block = &a->model->blocks[b];
        spw_fused fused[SPW_FUSED_COUNT];
        spw_fused_kind kind = SPW_FUSED_COUNT, of_part;
        bool wanted[SPW_FUSED_COUNT] = {false};
        uint64_t first;
        for (int k = 0; k < SPW_FUSED_COUNT; k++)
            wanted[k] = spw_model_fused(a->model, block, (spw_fused_kind)k, &fused[k]) && is_fused_target(a, &fused[k]);
        for (int k = 0; k < SPW_FUSED_COUNT; k++) {
            char module[96];
            if (!wanted[k])
                continue;
            spw_fused_module(&fused[k], (spw_fused_kind)k, wanted[0] && wanted[1], module);
            kind = is_module(t->name, module) ? (spw_fused_kind)k : kind;
        }
        *found = kind != SPW_FUSED_COUNT;
        for (uint32_t k = 0; *found && k < block->param_count; k++) {
            const uint32_t id = block->param_ids[k];
            if (!spw_model_fused_part(a->model, block, k, &of_part, &first) || of_part != kind)
                continue;
            if (a->matrices[2 * (size_t)id + is_b] != NULL)
                return say_twice(a, t, err);
            a->matrices[2 * (size_t)id + is_b] = t;
            a->places[id] = (fused_part){fused[kind], first};
        }
    }
    return SPW_OK;
}

/* Each tensor is A or B of a weight here, or of what reads images, which is left out: nothing else that was trained is. */
static spw_status
bind_adapters(spw__adapters *a, spw_error *err)
{
    a->matrices = spw_mem_calloc((size_t)a->model->param_count * 2 + 1, sizeof *a->matrices);
    a->places = spw_mem_calloc((size_t)a->model->param_count + 1, sizeof *a->places);
    if (a->matrices == NULL || a->places == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "adapters in %s", a->folder);
    for (uint32_t i = 0; i < spw_st_reader_count(a->file); i++) {
        const spw_tensor_info *t = spw_st_reader_tensor(a->file, i);
        char weight[SPW_TENSOR_NAME_BYTES];
        bool is_b = false, of_experts = false;
        uint32_t id;
        name_adapted(a, t->name, &is_b, weight);
        if (weight[0] != '\0')
            SPW_TRY(bind_fused(a, t, is_b, &of_experts, err));
        if (of_experts)
            continue;
        id = spw_model_find_param(a->model, weight);
        if (id == UINT32_MAX && spw__hf_is_passed_over(weight, &a->model->config))
            continue;
        if (id == UINT32_MAX || a->model->params[id].ndim != 2)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s/%s: %s is not an adapter of a weight of this model", a->folder,
                             spw_hf_adapters(a->folder), t->name);
        if (a->matrices[2 * (size_t)id + is_b] != NULL)
            return say_twice(a, t, err);
        a->matrices[2 * (size_t)id + is_b] = t;
    }
    return SPW_OK;
}

/* adapter_config.json of a folder; NULL: no object. */
static spw_status
open_config(json_t **out, const char *folder, char path[PATH_MAX_BYTES], spw_error *err)
{
    char *text = NULL;
    *out = NULL;
    snprintf(path, PATH_MAX_BYTES, "%.1000s/adapter_config.json", folder);
    SPW_TRY(spw_file_read_text(path, CONFIG_BYTES_MAX, &text, err));
    *out = json_loads(text, 0, NULL);
    spw_mem_free(text);
    return SPW_OK;
}

static spw_status
open_both(spw__adapters *a, spw_error *err)
{
    char path[PATH_MAX_BYTES];
    json_t *root;
    spw_status st;
    snprintf(path, sizeof path, "%.1000s/%s", a->folder, spw_hf_adapters(a->folder));
    SPW_TRY(spw_st_reader_open(&a->file, path, err));
    SPW_TRY(open_config(&root, a->folder, path, err));
    st = read_config(a, root, path, err);
    json_decref(root);
    return st == SPW_OK ? bind_adapters(a, err) : st;
}

spw_status
spw__adapters_open(spw__adapters **out, const char *folder, const spw_model *model, spw_error *err)
{
    spw_status st;
    *out = NULL;
    if (spw_hf_adapters(folder) == NULL)
        return SPW_OK;
    *out = spw_mem_calloc(1, sizeof **out);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "adapters in %s", folder);
    **out = (spw__adapters){.folder = folder, .model = model};
    st = open_both(*out, err);
    if (st == SPW_OK)
        return SPW_OK;
    spw__adapters_close(*out);
    *out = NULL;
    return st;
}

bool
spw__adapters_alone(const char *folder)
{
    char found[PATH_MAX_BYTES];
    return spw_hf_adapters(folder) != NULL && !spw_hf_has_weights(folder) &&
           !spw_foreign_find(folder, found, sizeof found);
}

/* The folder that it names here, at its path or as a model of the hub, of the revision that it names and no other. */
static const char *
base_in_config(const json_t *root, char of_hub[SPW_HUB_PATH_BYTES])
{
    const char *named = json_string_value(json_object_get(root, "base_model_name_or_path"));
    const char *revision = json_string_value(json_object_get(root, "revision"));
    char name[2 * SPW_HUB_NAME_BYTES];
    if (named == NULL)
        return NULL;
    snprintf(name, sizeof name, "%.250s%s%.250s", named, revision != NULL ? "@" : "", revision != NULL ? revision : "");
    return access(named, F_OK) != 0 && spw_hub_find(of_hub, name) ? of_hub : named;
}

spw_status
spw__adapters_base(const char *folder, const char *named, char base[SPW__BASE_BYTES], spw_error *err)
{
    char path[PATH_MAX_BYTES], what[SPW_HF_WHAT_BYTES], of_hub[SPW_HUB_PATH_BYTES];
    json_t *root = NULL;
    if (named == NULL) {
        SPW_TRY(open_config(&root, folder, path, err));
        named = base_in_config(root, of_hub);
        (void)spw_hf_has_other_weights(folder, what);
        if (named == NULL || !spw_dir_has(named, "config.json")) {
            json_decref(root);
            return SPW_RAISE(err, SPW_ENOENT,
                             "%s has %s, and no weights of that model: --model FOLDER names the folder that has them",
                             folder, what);
        }
    }
    snprintf(base, SPW__BASE_BYTES, "%s", named);
    json_decref(root);
    if (spw_hf_adapters(base) != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "%s, whose weights the adapters of %s are beside, has adapters itself: spillway export merges "
                         "those, and --model names what it wrote",
                         base, folder);
    return SPW_OK;
}

static spw_status
read_matrix(const spw__adapters *a, const spw_tensor_info *info, float **out, spw_error *err)
{
    char *stored;
    uint64_t elems;
    spw_status st = SPW_OK;
    if (info->dtype == SPW_DTYPE_COUNT || info->ndim != 2)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s must be a matrix of F32, BF16 or F16", a->folder, info->name);
    elems = info->shape[0] * info->shape[1];
    stored = spw_mem_zalloc(info->bytes);
    *out = spw_mem_zalloc(elems * sizeof **out);
    if (stored == NULL || *out == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "%s (%llu elements)", info->name, (unsigned long long)elems);
    if (st == SPW_OK)
        st = spw_st_read(a->file, info, 0, stored, info->bytes, err);
    if (st == SPW_OK)
        spw_convert(*out, SPW_F32, stored, info->dtype, elems);
    spw_mem_free(stored);
    return st;
}

static void
forget_adapter(spw__adapters *a)
{
    for (int k = 0; k < 2; k++)
        spw_mem_free(a->now.matrix[k]);
    memset(&a->now, 0, sizeof a->now);
}

/* A and B of the parameter, unless they are there already: all experts of a layer have the same. */
static spw_status
load_adapter(spw__adapters *a, const spw_tensor_info *const of[2], spw_error *err)
{
    if (of[0] == a->now.of[0] && of[1] == a->now.of[1])
        return SPW_OK;
    forget_adapter(a);
    for (int k = 0; k < 2; k++) {
        if (of[k] != NULL)
            SPW_TRY(read_matrix(a, of[k], &a->now.matrix[k], err));
        a->now.of[k] = of[k];
    }
    return SPW_OK;
}

spw_status
spw__adapters_take(spw__adapters *a, uint32_t id, spw_error *err)
{
    const spw_param *p = &a->model->params[id];
    const fused_part *part = a->places != NULL && a->places[id].fused.name[0] != '\0' ? &a->places[id] : NULL;
    const bool in_out = a->model->config.family == SPW_FAMILY_GPT2;
    const uint64_t experts = part != NULL ? a->model->config.experts : 1;
    const uint64_t in = part != NULL ? part->fused.a_cols : in_out ? p->rows : p->cols;
    const uint64_t out = part != NULL ? part->fused.b_rows : in_out ? p->cols : p->rows;
    const spw_tensor_info *const *of = a->matrices != NULL ? &a->matrices[2 * (size_t)id] : NULL;
    uint64_t all;
    a->now.rank = 0;
    if (of == NULL || (of[0] == NULL && of[1] == NULL))
        return SPW_OK;
    SPW_TRY(load_adapter(a, of, err));
    if (of[0] == NULL || of[1] == NULL || of[0]->shape[1] != in || of[1]->shape[0] != out ||
        of[0]->shape[0] != of[1]->shape[1] || of[0]->shape[0] == 0 || of[0]->shape[0] % experts != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: the adapter of %s is not (rank, %llu) and (%llu, rank)%s", a->folder,
                         part != NULL ? part->fused.name : p->name, (unsigned long long)in, (unsigned long long)out,
                         part != NULL ? " with a rank for each expert, as peft 0.21 has it with transformers 5" : "");
    all = of[0]->shape[0];
    a->now.rank = all / experts;
    a->now.cols = p->cols;
    a->now.in = in;
    a->now.row = all;
    a->now.step = experts;
    a->now.a = a->now.matrix[0];
    a->now.b = a->now.matrix[1];
    a->now.turned = part != NULL ? part->fused.turned : in_out;
    if (part != NULL) {
        a->now.a += (p->expert - 1) * a->now.rank * in;
        a->now.b += part->first * all + p->expert - 1;
    }
    a->now.scale = (float)(a->alpha / (a->by_root ? sqrt((double)a->now.rank) : (double)a->now.rank));
    return SPW_OK;
}

bool
spw__adapters_adds(const spw__adapters *a)
{
    return a->now.rank > 0;
}

void
spw__adapters_add(const spw__adapters *a, uint64_t first, uint64_t n, float *w)
{
    const uint64_t in = a->now.in, step = a->now.step, cols = a->now.cols;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t row = (first + i) / cols, col = (first + i) % cols;
        const float *of_b = a->now.b + (a->now.turned ? col : row) * a->now.row;
        const float *of_a = a->now.a + (a->now.turned ? row : col);
        float sum = 0;
        for (uint64_t k = 0; k < a->now.rank; k++)
            sum += of_b[k * step] * of_a[k * in];
        w[i] += a->now.scale * sum;
    }
}

void
spw__adapters_close(spw__adapters *a)
{
    if (a == NULL)
        return;
    spw_st_reader_close(a->file);
    spw_mem_free(a->matrices);
    spw_mem_free(a->places);
    json_decref(a->fused);
    forget_adapter(a);
    spw_mem_free(a);
}
