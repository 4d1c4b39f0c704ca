/*
 * spillway inspect: what a safetensors file, a Hugging Face folder or a checkpoint holds. Every header and index is checked
 * as training checks it; of a folder also whether its tensors are those of the model that config.json describes, and of a checkpoint whose
 * bytes are read anyway whether they are those that were saved.
 */
#include "cli.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

enum { BLOCK_BYTES = 1 << 20 };

#define OPTIMIZER_FILE "optimizer-00001-of-00001.safetensors"

/* What is known besides the tensors. */
typedef struct about {
    bool has_config, fits, has_state;
    spw_model_config config;
    uint64_t params;
    spw_error refusal; /* of config.json, or of the tensors */
    spw_checkpoint_state state;
    bool is_foreign, has_others; /* others: weights beside a foreign one, which are not shown */
    spw_foreign_about foreign;
    spw_error no_resume;          /* why a checkpoint cannot be gone on from */
    char base[SPW_WEIGHTS_BYTES]; /* of adapters alone, whose weights they are beside */
} about;

typedef struct totals {
    uint64_t tensors, elements, bytes;
} totals;

static const char *
shape_text(char *buf, size_t bytes, const spw_tensor_info *t)
{
    size_t at = (size_t)snprintf(buf, bytes, "[");
    for (uint32_t d = 0; d < t->ndim; d++)
        at += (size_t)snprintf(buf + at, bytes - at, d > 0 ? ", %llu" : "%llu", (unsigned long long)t->shape[d]);
    snprintf(buf + at, bytes - at, "]");
    return buf;
}

/* "bf16"; of what nothing here computes with the file's own word, "BOOL". */
static const char *
type_text(const spw_tensor_info *t)
{
    return t->dtype != SPW_DTYPE_COUNT ? spw_dtype_name(t->dtype) : t->type;
}

static uint64_t
elements(const spw_tensor_info *t)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < t->ndim; d++)
        n *= t->shape[d];
    return n;
}

static spw_status
digest(spw_hf_reader *r, uint32_t i, char out[17], spw_error *err)
{
    const spw_tensor_info *t = spw_hf_reader_tensor(r, i, NULL);
    spw_checksum_stream *stream = spw_checksum_open();
    char *block = spw_mem_zalloc(BLOCK_BYTES);
    spw_status st = SPW_OK;
    if (stream == NULL || block == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "digest of %s", t->name);
    else
        spw_checksum_begin(stream);
    for (uint64_t at = 0, n; st == SPW_OK && at < t->bytes; at += n) {
        n = t->bytes - at < BLOCK_BYTES ? t->bytes - at : BLOCK_BYTES;
        st = spw_hf_read(r, i, at, block, n, err);
        spw_checksum_add(stream, block, n);
    }
    if (st == SPW_OK)
        snprintf(out, 17, "%016llx", (unsigned long long)spw_checksum_sum(stream));
    spw_mem_free(block);
    spw_checksum_close(stream);
    return st;
}

/* ---------------------------------------------------------------- one file or set of shards */

static spw_status
print_tensors(spw_hf_reader *r, bool with_digest, totals *sum, spw_error *err)
{
    uint32_t n = spw_hf_reader_count(r), width = 4, type_width = 5, shape_width = 5;
    const char *file = NULL, *last = NULL;
    char shape[120], bytes[32], sum_text[17] = "";
    for (uint32_t i = 0; i < n; i++) {
        const spw_tensor_info *t = spw_hf_reader_tensor(r, i, NULL);
        uint32_t shown = (uint32_t)strlen(shape_text(shape, sizeof shape, t));
        width = strlen(t->name) > width ? (uint32_t)strlen(t->name) : width;
        shape_width = shown > shape_width ? shown : shape_width;
        type_width = strlen(type_text(t)) > type_width ? (uint32_t)strlen(type_text(t)) : type_width;
    }
    for (uint32_t i = 0; i < n; i++) {
        const spw_tensor_info *t = spw_hf_reader_tensor(r, i, &file);
        if (with_digest)
            SPW_TRY(digest(r, i, sum_text, err));
        if (file != last) {
            printf("%s\n", file);
            printf("  %-*s  %-*s  %-*s  %11s%s\n", (int)width, "name", (int)type_width, "dtype", (int)shape_width,
                   "shape", "bytes", with_digest ? "  xxh3" : "");
        }
        last = file;
        printf("  %-*s  %-*s  %-*s  %11s%s%s\n", (int)width, t->name, (int)type_width, type_text(t), (int)shape_width,
               shape_text(shape, sizeof shape, t), spw_format_bytes(bytes, sizeof bytes, t->bytes),
               with_digest ? "  " : "", sum_text);
        sum->tensors++;
        sum->elements += elements(t);
        sum->bytes += t->bytes;
    }
    return SPW_OK;
}

static spw_status
list_tensors(spw_hf_reader *r, bool with_digest, totals *sum, json_t *list, spw_error *err)
{
    for (uint32_t i = 0; i < spw_hf_reader_count(r); i++) {
        const char *file = NULL;
        const spw_tensor_info *t = spw_hf_reader_tensor(r, i, &file);
        json_t *shape = json_array(), *o;
        char sum_text[17];
        for (uint32_t d = 0; d < t->ndim; d++)
            json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
        o = json_pack("{s:s, s:o, s:s, s:o, s:I}", "name", t->name, "file", cli_json_text(file), "dtype", type_text(t),
                      "shape", shape, "bytes", (json_int_t)t->bytes);
        json_array_append_new(list, o);
        if (with_digest) {
            SPW_TRY(digest(r, i, sum_text, err));
            json_object_set_new(o, "xxh3", json_string(sum_text));
        }
        sum->tensors++;
        sum->elements += elements(t);
        sum->bytes += t->bytes;
    }
    return SPW_OK;
}

/* ---------------------------------------------------------------- what belongs to a folder */

/* Of a config, which is the about's: whether there is such a model, and the tensors are its. r NULL: adapters alone. */
static void
learn_model(about *a, spw_hf_reader *r)
{
    spw_model *model = NULL;
    a->has_config = spw_model_build(&model, &a->config, &a->refusal) == SPW_OK;
    a->params = model != NULL ? spw_model_elems(model) : 0;
    a->fits = model != NULL && r != NULL && spw_hf_reader_bind(r, model, &a->refusal) == SPW_OK;
    spw_model_destroy(model);
}

static void
learn(about *a, const char *folder, spw_hf_reader *r)
{
    static spw_config config; /* large */
    const char *of = folder;
    a->has_state = spw_dir_has(folder, "spillway.json") &&
                   spw_checkpoint_read_config(folder, &config, &a->state, &a->no_resume) == SPW_OK;
    if (a->has_state && r == NULL && spw_checkpoint_weights(folder, &config, a->base, &a->no_resume) == SPW_OK)
        of = a->base;
    if (spw_dir_has(of, "config.json") && spw_hf_config_load(&a->config, of, &a->refusal) == SPW_OK)
        learn_model(a, r);
    if (a->has_state && !spw_dir_has(folder, OPTIMIZER_FILE)) /* it is written even where nothing has state */
        (void)SPW_RAISE(&a->no_resume, SPW_ENOENT, "%s/" OPTIMIZER_FILE " is not there", folder);
}

static void
print_about(const about *a)
{
    const spw_model_config *c = &a->config;
    if (a->has_config)
        printf("%s, %.4g M parameters: %llu layers, width %llu, %llu heads of %llu (%llu key/value), MLP %llu, "
               "vocabulary %llu%s\n",
               spw_family_name(c->family), (double)a->params * 1e-6, (unsigned long long)c->layers,
               (unsigned long long)c->width, (unsigned long long)c->heads, (unsigned long long)c->head_dim,
               (unsigned long long)c->kv_heads, (unsigned long long)c->mlp_width, (unsigned long long)c->vocab,
               c->tied ? ", tied head" : "");
    if (a->has_state && a->base[0] != '\0')
        printf("the weights are those of %s\n", a->base);
    if (a->has_state)
        printf("checkpoint of step %llu, %.6g tokens\n", (unsigned long long)a->state.step, a->state.tokens);
    if (a->is_foreign) {
        const spw_foreign_about *d = &a->foreign;
        printf("checkpoint of %s%s%s: ", d->maker, d->version[0] != '\0' ? " " : "", d->version);
        if (d->stage > 0)
            printf("ZeRO stage %u, ", d->stage);
        printf("%u rank%s, step %llu, %llu updates; kept for each parameter:", d->ranks, d->ranks > 1 ? "s" : "",
               (unsigned long long)d->steps, (unsigned long long)d->updates);
        for (uint32_t i = 0; i < d->moment_count; i++)
            printf(" %s", d->moments[i]);
        printf("%s\n", d->moment_count == 0 ? " nothing" : "");
        if (a->has_others)
            puts("the weights in Hugging Face's files beside it are not shown");
    }
    if (a->no_resume.status != SPW_OK)
        printf("training cannot go on from it: %s\n", a->no_resume.message);
    if (a->has_config && a->fits)
        puts("the tensors are this model's");
    if (a->refusal.status != SPW_OK)
        printf("not a model that spillway trains: %s\n", a->refusal.message);
}

static json_t *
about_json(const about *a)
{
    json_t *o = json_object();
    if (a->has_config) {
        char *text = spw_hf_config_text(&a->config, SPW_DTYPE_COUNT);
        json_object_set_new(o, "config", text == NULL ? json_null() : json_loads(text, 0, NULL));
        json_object_set_new(o, "params", json_integer((json_int_t)a->params));
        json_object_set_new(o, "fits", json_boolean(a->fits));
        spw_mem_free(text);
    }
    if (a->has_state)
        json_object_set_new(o, "step", json_integer((json_int_t)a->state.step));
    if (a->is_foreign)
        json_object_set_new(o, "foreign",
                            json_pack("{s:s, s:s, s:i, s:i, s:I, s:I}", "maker", a->foreign.maker, "version",
                                      a->foreign.version, "stage", (int)a->foreign.stage, "ranks",
                                      (int)a->foreign.ranks, "step", (json_int_t)a->foreign.steps, "updates",
                                      (json_int_t)a->foreign.updates));
    if (a->refusal.status != SPW_OK)
        json_object_set_new(o, "refusal", cli_json_text(a->refusal.message));
    if (a->no_resume.status != SPW_OK)
        json_object_set_new(o, "no_resume", cli_json_text(a->no_resume.message));
    return o;
}

/* ---------------------------------------------------------------- the command */

static spw_status
show(spw_hf_reader *r, bool with_digest, totals *sum, json_t *list, spw_error *err)
{
    return list == NULL ? print_tensors(r, with_digest, sum, err) : list_tensors(r, with_digest, sum, list, err);
}

/* The parameters of another program's checkpoint, found in or at path. */
static spw_status
inspect_foreign(const char *found, const char *path, bool with_digest, totals *sum, about *a, json_t *list,
                spw_error *err)
{
    spw_foreign *d;
    spw_hf_reader *r = NULL;
    spw_status st;
    SPW_TRY(spw_foreign_open(&d, found, err));
    a->is_foreign = true;
    a->foreign = *spw_foreign_get_about(d);
    a->has_others = spw_hf_has_weights(path) && !a->foreign.hf_weights;
    (void)spw_foreign_check_state(d, &a->no_resume);
    st = spw_foreign_weights(d, &r, err);
    if (st == SPW_OK && spw_foreign_model(d) != NULL) {
        a->config = *spw_foreign_model(d);
        learn_model(a, r);
    } else if (st == SPW_OK) {
        learn(a, path, r);
    }
    if (st == SPW_OK)
        st = show(r, with_digest, sum, list, err);
    spw_hf_reader_close(r);
    spw_foreign_close(d);
    return st;
}

/* path itself, then what else of a checkpoint lies beside the weights; list NULL: prints. */
static spw_status
inspect_all(const char *path, bool is_folder, bool with_digest, totals *sum, about *a, json_t *list, spw_error *err)
{
    static const char *const beside[] = {"adapter_model.safetensors", "adapter_model.bin", OPTIMIZER_FILE};
    char file[SPW_PATH_BYTES + 64];
    spw_hf_reader *r = NULL;
    spw_status st = SPW_OK;
    if (is_folder && spw_foreign_find(path, file, sizeof file))
        return inspect_foreign(file, path, with_digest, sum, a, list, err);
    if (is_folder && spw_hf_adapters(path) != NULL && !spw_hf_has_weights(path)) {
        learn(a, path, NULL);
    } else {
        st = spw_hf_reader_open(&r, path, err);
        if (st == SPW_OK && is_folder)
            learn(a, path, r);
        if (st == SPW_OK)
            st = show(r, with_digest, sum, list, err);
        spw_hf_reader_close(r);
    }
    for (size_t i = 0; st == SPW_OK && is_folder && i < sizeof beside / sizeof beside[0]; i++) {
        if (!spw_dir_has(path, beside[i]))
            continue;
        snprintf(file, sizeof file, "%.1000s/%s", path, beside[i]);
        st = spw_hf_reader_open(&r, file, err);
        if (st == SPW_OK)
            st = show(r, with_digest, sum, list, err);
        spw_hf_reader_close(r);
        r = NULL;
    }
    return st;
}

/* A folder that holds no weights may hold checkpoints. */
static void
find_checkpoint(const char *path, bool is_folder, char *found)
{
    char file[SPW_PATH_BYTES + 64];
    spw_error ignored = {0};
    snprintf(found, SPW_PATH_BYTES, "%s", path);
    if (is_folder && !spw_hf_has_weights(path) && spw_checkpoint_find(path, file, &ignored) == SPW_OK)
        snprintf(found, SPW_PATH_BYTES, "%.1023s", file);
}

/* What it has is shown of a damaged checkpoint of ours, too. */
static int
whole(const about *a)
{
    return a->is_foreign || a->no_resume.status == SPW_OK ? EXIT_DONE : EXIT_FAILED;
}

int
cli_inspect(int argc, char **argv)
{
    const char *path = NULL;
    char found[SPW_PATH_BYTES], of_hub[SPW_HUB_PATH_BYTES], bytes[32];
    bool with_digest = false, json = false;
    static about a;
    totals sum = {0};
    spw_error err = {0};
    struct stat info;
    json_t *list = NULL, *root;
    spw_status st;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--digest") == 0)
            with_digest = true;
        else if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (argv[i][0] == '-')
            return cli_unknown_option("inspect", argv[i]);
        else if (path != NULL)
            return cli_usage("inspect", "one path at a time, got %s too", argv[i]);
        else
            path = argv[i];
    }
    if (path == NULL)
        return cli_usage("inspect", "a file or folder is needed");
    path = spw_hub_find(of_hub, path) ? of_hub : path;
    if (strlen(path) >= 1000 || stat(path, &info) != 0) {
        (void)SPW_RAISE_SYS(&err, strlen(path) >= 1000 ? ENAMETOOLONG : errno, "open %.100s", path);
        return cli_fail(&err);
    }
    find_checkpoint(path, S_ISDIR(info.st_mode), found);
    if (json)
        list = json_array();
    st = inspect_all(found, S_ISDIR(info.st_mode), with_digest, &sum, &a, list, &err);
    if (st == SPW_OK && with_digest && S_ISDIR(info.st_mode) && spw_dir_has(found, "spillway.json"))
        st = spw_checkpoint_verify(found, true, &err);
    if (st != SPW_OK) {
        json_decref(list);
        return cli_fail(&err);
    }
    if (json) {
        char *text;
        root = about_json(&a);
        json_object_set_new(root, "path", cli_json_text(found));
        json_object_set_new(root, "tensors", list);
        json_object_set_new(root, "elements", json_integer((json_int_t)sum.elements));
        json_object_set_new(root, "bytes", json_integer((json_int_t)sum.bytes));
        text = json_dumps(root, JSON_INDENT(2));
        puts(text != NULL ? text : "{}");
        free(text);
        json_decref(root);
        return whole(&a);
    }
    printf("%llu tensors, %llu elements, %s\n", (unsigned long long)sum.tensors, (unsigned long long)sum.elements,
           spw_format_bytes(bytes, sizeof bytes, sum.bytes));
    print_about(&a);
    return whole(&a);
}
