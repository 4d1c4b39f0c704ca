/*
 * PyTorch's distributed checkpoints (torch.distributed.checkpoint), as those write who train with FSDP: each rank its shards of tensors,
 * which are rows of them, and one file that says where all of them are.
 *
 *   .metadata      a pickle: for each name the tensor's size and its chunks; for each chunk a file, an offset in it and a length
 *   __R_I.distcp   what rank R wrote: each item a file of torch.save of its own
 *
 * The optimizer's tensors are "optimizer.state.NAME.exp_avg", "optim.state..." and the like, and NAME is the parameter's as its module calls it;
 * weights are the same names behind what the client put before them ("model."). transformers' Trainer writes two such folders, one of the
 * model and one of the optimizer.
 *
 * Source  PyTorch's documentation of torch.distributed.checkpoint, and the files that 2.13 writes.
 */
#include "foreign.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define METADATA ".metadata"
enum { METADATA_MAX = 512 << 20, FOLDERS_MAX = 2, FILES_MAX = 65536 };

/* A tensor's description by its name, and a chunk of one. */
typedef struct entry {
    const char *key;
    const spw__py *value;
    uint32_t folder;
} entry;
typedef struct piece {
    const char *key;
    uint64_t first; /* of its rows */
    const spw__py *where;
    uint32_t folder;
} piece;

typedef struct file_name {
    char path[SPW__FOREIGN_PATH_BYTES + 300];
    uint32_t file_idx;
} file_name;

typedef struct reading {
    spw_foreign *d;
    char folders[FOLDERS_MAX][SPW__FOREIGN_PATH_BYTES + 64];
    spw__pickle *pickles[FOLDERS_MAX];
    uint32_t folder_count;
    entry *entries; /* by key */
    piece *pieces;  /* by key and first row */
    uint64_t entry_count, piece_count, files_bytes;
    file_name *files;
    uint32_t file_count;
    uint32_t hint; /* behind the parameter that was found last */
    spw_error *err;
} reading;

/* ---------------------------------------------------------------- folders and their metadata */

static const char *const model_folder = "pytorch_model_fsdp_0", *const optimizer_folder = "optimizer_0";

bool
spw__dcp_there(const char *folder)
{
    char path[SPW__FOREIGN_PATH_BYTES + 64];
    snprintf(path, sizeof path, "%.4000s/%s", folder, model_folder);
    return spw_dir_has(folder, METADATA) || spw_dir_has(path, METADATA);
}

static spw_status
damaged(const reading *r, const char *key, const char *what)
{
    return SPW_RAISE(r->err, SPW_ECORRUPT, "%s: %s: %s", r->d->folder, key, what);
}

static spw_status
read_metadata(reading *r, const char *below)
{
    char path[SPW__FOREIGN_PATH_BYTES + 128], *folder = r->folders[r->folder_count], *text = NULL;
    struct stat info;
    spw_status st = SPW_OK;
    int fd;
    snprintf(folder, sizeof r->folders[0], "%.4000s%s%s", r->d->folder, below[0] != '\0' ? "/" : "", below);
    snprintf(path, sizeof path, "%s/" METADATA, folder);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0)
        st = SPW_RAISE_SYS(r->err, errno, "open %s", path);
    else if (info.st_size > METADATA_MAX)
        st = SPW_RAISE(r->err, SPW_EUNSUPPORTED, "%s has more than %d bytes", path, METADATA_MAX);
    else if ((text = spw_mem_zalloc((size_t)info.st_size + 1)) == NULL)
        st = SPW_RAISE(r->err, SPW_ENOMEM, "%s", path);
    if (st == SPW_OK)
        st = spw_file_read_at(fd, path, text, (uint64_t)info.st_size, 0, r->err);
    if (st == SPW_OK)
        st = spw__pickle_parse(&r->pickles[r->folder_count], text, (uint64_t)info.st_size, path, r->err);
    if (st == SPW_OK)
        r->folder_count++;
    spw_mem_free(text);
    if (fd >= 0)
        close(fd);
    return st;
}

/* The i-th number of a size. */
static bool
size_at(const spw__py *size, uint64_t i, uint64_t *out)
{
    int64_t n = -1;
    if (!spw__py_int(spw__py_item(spw__torch_size(size), i), &n) || n < 0)
        return false;
    *out = (uint64_t)n;
    return true;
}

static int
by_key(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->key, ((const entry *)b)->key);
}

static int
by_place(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    int side = strcmp(x->key, y->key);
    return side != 0 ? side : x->first < y->first ? -1 : x->first > y->first;
}

static spw_status
list_folder(reading *r, uint32_t f)
{
    const spw__py *root = spw__pickle_root(r->pickles[f]);
    const spw__py *tensors = spw__py_attribute(root, "state_dict_metadata");
    const spw__py *places = spw__py_attribute(root, "storage_data");
    if (tensors == NULL || tensors->kind != SPW__PY_DICT || places == NULL || places->kind != SPW__PY_DICT)
        return damaged(r, METADATA, "it describes no tensors and their places");
    for (uint64_t i = 0; i + 1 < tensors->count; i += 2) {
        const char *key = spw__py_text(tensors->items[i]);
        if (key != NULL)
            r->entries[r->entry_count++] = (entry){key, tensors->items[i + 1], f};
    }
    for (uint64_t i = 0; i + 1 < places->count; i += 2) {
        const char *key = spw__py_text(spw__py_attribute(places->items[i], "fqn"));
        piece p = {key, 0, places->items[i + 1], f};
        if (key == NULL)
            return damaged(r, METADATA, "a place without a name");
        (void)size_at(spw__py_attribute(places->items[i], "offset"), 0, &p.first); /* numbers have none */
        r->pieces[r->piece_count++] = p;
    }
    return SPW_OK;
}

static spw_status
list_all(reading *r)
{
    uint64_t entries = 0, pieces = 0;
    for (uint32_t f = 0; f < r->folder_count; f++) {
        const spw__py *root = spw__pickle_root(r->pickles[f]);
        const spw__py *tensors = spw__py_attribute(root, "state_dict_metadata");
        const spw__py *places = spw__py_attribute(root, "storage_data");
        entries += tensors != NULL ? tensors->count / 2 : 0;
        pieces += places != NULL ? places->count / 2 : 0;
    }
    r->entries = spw_mem_calloc(entries + 1, sizeof *r->entries);
    r->pieces = spw_mem_calloc(pieces + 1, sizeof *r->pieces);
    if (r->entries == NULL || r->pieces == NULL)
        return SPW_RAISE(r->err, SPW_ENOMEM, "tensors of %s", r->d->folder);
    for (uint32_t f = 0; f < r->folder_count; f++)
        SPW_TRY(list_folder(r, f));
    qsort(r->entries, r->entry_count, sizeof *r->entries, by_key);
    qsort(r->pieces, r->piece_count, sizeof *r->pieces, by_place);
    return SPW_OK;
}

/* ---------------------------------------------------------------- items */

/* One item's file of torch.save. Closed by the caller. */
static spw_status
open_item(reading *r, const piece *p, spw__torch **out, uint32_t *file_idx)
{
    const char *name = spw__py_text(spw__py_attribute(p->where, "relative_path"));
    const spw__py *transforms = spw__py_attribute(p->where, "transform_descriptors");
    int64_t offset, length;
    file_name path;
    uint32_t i = 0;
    if (name == NULL || strchr(name, '/') != NULL || !spw__py_int(spw__py_attribute(p->where, "offset"), &offset) ||
        offset < 0 || !spw__py_int(spw__py_attribute(p->where, "length"), &length) || length < 0)
        return damaged(r, p->key, "its place is no file, offset and length");
    if (transforms != NULL && transforms->kind != SPW__PY_NONE && transforms->count > 0)
        return SPW_RAISE(r->err, SPW_EUNSUPPORTED, "%s: %s was transformed (compressed, say) before it was written",
                         r->d->folder, p->key);
    snprintf(path.path, sizeof path.path, "%s/%.200s", r->folders[p->folder], name);
    while (i < r->file_count && strcmp(r->files[i].path, path.path) != 0)
        i++;
    if (i == r->file_count) {
        if (i == FILES_MAX ||
            !spw_mem_grow((void **)&r->files, &r->files_bytes, (i + 1) * sizeof path, i * sizeof path))
            return SPW_RAISE(r->err, SPW_ENOMEM, "files of %s", r->d->folder);
        SPW_TRY(spw__span_open(r->d->span, path.path, &path.file_idx, r->err));
        r->files[r->file_count++] = path;
    }
    *file_idx = r->files[i].file_idx;
    return spw__torch_open_at(out, path.path, (uint64_t)offset, (uint64_t)length, r->err);
}

static const piece *
find_piece(const reading *r, const char *key, uint64_t first)
{
    piece want = {.key = key, .first = first};
    return bsearch(&want, r->pieces, r->piece_count, sizeof want, by_place);
}

/* The tensor of an item. */
static spw_status
read_item(reading *r, const char *key, uint64_t first, spw_tensor_info *out, uint32_t *file_idx, double *number)
{
    const piece *p = find_piece(r, key, first);
    spw__torch *t;
    spw_status st;
    if (p == NULL)
        return damaged(r, key, "a chunk of it has no place");
    SPW_TRY(open_item(r, p, &t, file_idx));
    st = spw__torch_tensor(t, spw__torch_root(t), key, out, r->err);
    if (st == SPW_OK && number != NULL && out->ndim == 0 && out->dtype == SPW_F32) {
        float x = 0;
        st = spw__torch_read(t, out, &x, r->err);
        *number = (double)x;
    }
    spw__torch_close(t);
    return st;
}

/* A value that is no tensor: a client's number, or a list of them. NAN: it is not there, or none. */
static spw_status
read_value(reading *r, const char *key, int64_t index, double *out)
{
    const piece *p = find_piece(r, key, 0);
    const spw__py *v;
    spw__torch *t;
    uint32_t unused;
    *out = NAN;
    if (p == NULL)
        return SPW_OK;
    SPW_TRY(open_item(r, p, &t, &unused));
    v = spw__torch_root(t);
    (void)spw__py_real(index >= 0 ? spw__py_item(v, (uint64_t)index) : v, out);
    spw__torch_close(t);
    return SPW_OK;
}

/* ---------------------------------------------------------------- tensors */

static bool
is_tensor(const entry *e)
{
    return spw__py_is(e->value, "torch.distributed.checkpoint.metadata.TensorStorageMetadata");
}

/* Chunk i: its rows, and whether it is whole rows. */
static bool
chunk_rows(const spw_tensor_info *t, const spw__py *chunk, uint64_t *first, uint64_t *count)
{
    const spw__py *offsets = spw__py_attribute(chunk, "offsets"), *sizes = spw__py_attribute(chunk, "sizes");
    uint64_t at, n;
    if (!size_at(offsets, 0, first) || !size_at(sizes, 0, count))
        return false;
    for (uint32_t i = 1; i < t->ndim; i++) {
        if (!size_at(offsets, i, &at) || !size_at(sizes, i, &n) || at != 0 || n != t->shape[i])
            return false;
    }
    return true;
}

typedef struct rows {
    uint64_t first, count;
} rows;

static int
by_row(const void *a, const void *b)
{
    const rows *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Adds one chunk, behind next rows of the tensor that are in the span. */
static spw_status
add_rows(reading *r, const entry *e, const rows *chunk, uint64_t *next, spw_tensor_info *t)
{
    spw_tensor_info part;
    uint32_t file_idx;
    if (chunk->count == 0)
        return SPW_OK;
    if (chunk->first != *next)
        return damaged(r, e->key, "its chunks leave rows out, or have some twice");
    SPW_TRY(read_item(r, e->key, chunk->first, &part, &file_idx, NULL));
    if (*next > 0 && strcmp(part.type, t->type) != 0)
        return damaged(r, e->key, "its chunks are of different types");
    if (part.ndim != t->ndim || part.shape[0] != chunk->count ||
        memcmp(part.shape + 1, t->shape + 1, (t->ndim - 1) * sizeof *t->shape) != 0)
        return damaged(r, e->key, "a chunk has another shape than " METADATA " says");
    t->dtype = part.dtype;
    t->type = part.type;
    t->bytes += part.bytes;
    *next += chunk->count;
    return spw__span_add(r->d->span, file_idx, part.begin, part.bytes, r->err);
}

/* Adds the tensor's chunks, in order, to the span: all of its bytes. */
static spw_status
add_tensor(reading *r, const entry *e, spw_tensor_info *t)
{
    const spw__py *size = spw__py_attribute(e->value, "size"), *chunks = spw__py_attribute(e->value, "chunks");
    uint64_t next = 0, count = chunks != NULL && chunks->kind == SPW__PY_LIST ? chunks->count : 0;
    rows *list = spw_mem_calloc(count + 1, sizeof *list);
    spw_status st = list != NULL ? SPW_OK : SPW_RAISE(r->err, SPW_ENOMEM, "chunks of %s", e->key);
    while (t->ndim < SPW_TENSOR_DIMS_MAX && size_at(size, t->ndim, &t->shape[t->ndim]))
        t->ndim++;
    if (st == SPW_OK && (count == 0 || t->ndim == 0))
        st = damaged(r, e->key, "its size or chunks are missing");
    for (uint64_t i = 0; st == SPW_OK && i < count; i++) {
        if (!chunk_rows(t, chunks->items[i], &list[i].first, &list[i].count))
            st = SPW_RAISE(r->err, SPW_EUNSUPPORTED, "%s: %s is not cut by rows alone", r->d->folder, e->key);
    }
    if (st == SPW_OK)
        qsort(list, count, sizeof *list, by_row);
    t->begin = spw__span_bytes(r->d->span);
    for (uint64_t i = 0; st == SPW_OK && i < count; i++)
        st = add_rows(r, e, &list[i], &next, t);
    if (st == SPW_OK && next != t->shape[0])
        st = damaged(r, e->key, "its chunks are not all of its rows");
    spw_mem_free(list);
    return st;
}

/* ---------------------------------------------------------------- parameters */

/* Where the parameter's name begins in "optimizer.state.NAME.MOMENT"; NULL: another key. */
static const char *
optimizer_name(const char *key)
{
    const char *state = strstr(key, ".state.");
    const char *optim = strstr(key, "optim");
    return state != NULL && optim != NULL && optim < state ? state + strlen(".state.") : NULL;
}

static bool
is_weight(const entry *e)
{
    return optimizer_name(e->key) == NULL && is_tensor(e);
}

static bool
same_shape(const spw_tensor_info *a, const spw_tensor_info *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, a->ndim * sizeof *a->shape) == 0;
}

/* The parameter's shape is its first moment's until its weights are added. */
static spw_status
add_moment(reading *r, const entry *e, const char *name, const char *moment)
{
    spw_foreign *d = r->d;
    spw__foreign_param *p = d->param_count > 0 ? &d->params[d->param_count - 1] : NULL;
    size_t bytes = (size_t)(moment - name) - 1;
    spw_tensor_info t = {.ndim = 0};
    uint32_t k;
    if (bytes >= sizeof p->info.name)
        return damaged(r, e->key, "its name is too long");
    if (p == NULL || strlen(p->info.name) != bytes || memcmp(p->info.name, name, bytes) != 0) { /* keys are in order */
        p = &d->params[d->param_count++];
        snprintf(p->info.name, sizeof p->info.name, "%.*s", (int)bytes, name);
        p->decay = NAN;
    }
    if (strcmp(moment, "step") == 0) {
        double updates = -1;
        uint32_t unused;
        SPW_TRY(read_item(r, e->key, 0, &t, &unused, &updates));
        return spw__foreign_see_updates(d, updates) ? SPW_OK : damaged(r, e->key, "it is no number of updates");
    }
    SPW_TRY(spw__foreign_moment(d, moment, &k, r->err));
    SPW_TRY(add_tensor(r, e, &t));
    if (t.dtype != SPW_F32 && d->unread.status == SPW_OK)
        (void)SPW_RAISE(&d->unread, SPW_EUNSUPPORTED, "%s: %s is %s; moments in fp32 are read", d->folder, e->key,
                        t.type);
    if (p->info.ndim > 0 && !same_shape(&p->info, &t))
        return damaged(r, e->key, "it has another shape than the parameter's other moments");
    p->info.ndim = t.ndim;
    memcpy(p->info.shape, t.shape, sizeof t.shape);
    p->moment[k] = t.begin;
    p->moment_count++;
    return SPW_OK;
}

/* A trained parameter by its name, of so many bytes; NULL: there is none. Names come in about the order of parameters. */
static spw__foreign_param *
find_trained(reading *r, const char *name, size_t bytes)
{
    for (uint32_t i = 0; i < r->d->trained_count; i++) {
        uint32_t k = (r->hint + i) % r->d->trained_count;
        spw__foreign_param *p = &r->d->params[k];
        if (strlen(p->info.name) == bytes && memcmp(p->info.name, name, bytes) == 0) {
            r->hint = k + 1;
            return p;
        }
    }
    return NULL;
}

/* Do all trained parameters have weights by their names behind the first `before` bytes of a key? */
static bool
all_behind(const reading *r, const char *key, size_t before)
{
    char name[SPW__FOREIGN_PATH_BYTES];
    for (uint32_t k = 0; k < r->d->trained_count; k++) {
        const entry *e;
        snprintf(name, sizeof name, "%.*s%s", (int)before, key, r->d->params[k].info.name);
        e = bsearch(&(entry){.key = name}, r->entries, r->entry_count, sizeof *e, by_key);
        if (e == NULL || !is_tensor(e))
            return false;
    }
    return true;
}

/*
 * What stands before the names of weights: the first `before` bytes of a key. Averages of them, say, may be there by the same names, which are never behind
 * "model." or nothing.
 */
static spw_status
find_prefix(const reading *r, const char **prefix, size_t *before)
{
    enum { SOME = 1, ALL, USUAL };
    const char *name = r->d->params[0].info.name, *other = NULL;
    size_t n, m = strlen(name);
    int best = 0;
    for (uint64_t i = 0; i < r->entry_count; i++) {
        const char *key = r->entries[i].key;
        int found = SOME; /* which will be told to miss one */
        if (!is_weight(&r->entries[i]) || strlen(key) < m)
            continue;
        n = strlen(key) - m;
        if (strcmp(key + n, name) != 0)
            continue;
        if (all_behind(r, key, n))
            found = n == 0 || (n >= 6 && memcmp(key + n - 6, "model.", 6) == 0) ? USUAL : ALL;
        other = found == best ? key : found > best ? NULL : other;
        *prefix = found > best ? key : *prefix;
        *before = found > best ? n : *before;
        best = found > best ? found : best;
    }
    if (best == 0)
        return damaged(r, METADATA, "there is no optimizer's state whose parameter's weights are there too");
    return best == SOME || other == NULL
               ? SPW_OK
               : SPW_RAISE(r->err, SPW_EUNSUPPORTED,
                           "%s: there are weights twice, as %s and %s; which are trained is not known", r->d->folder,
                           *prefix, other);
}

/*
 * Without an optimizer's state that says the parameters' names: what all keys begin with, up to a dot. A "model." with the layers in it is no wrapper's,
 * but begins their names, in models whose head is not in a checkpoint because it is tied.
 */
static void
find_common_prefix(const reading *r, const char **prefix, size_t *before)
{
    bool has_layers = false;
    for (uint64_t i = 0; i < r->entry_count; i++) {
        const char *key = r->entries[i].key;
        size_t n = 0;
        if (!is_weight(&r->entries[i]))
            continue;
        if (*prefix == NULL) {
            *prefix = key;
            *before = strlen(key);
        }
        while (n < *before && key[n] == (*prefix)[n])
            n++;
        while (n > 0 && key[n - 1] != '.')
            n--;
        *before = n;
    }
    for (uint64_t i = 0; i < r->entry_count; i++) {
        const entry *e = &r->entries[i];
        has_layers = has_layers || (is_weight(e) && strncmp(e->key + *before, "layers.", 7) == 0);
    }
    if (has_layers && *before >= 6 && memcmp(*prefix + *before - 6, "model.", 6) == 0)
        *before -= 6;
}

/* Weights; those that the optimizer has nothing of were frozen. */
static spw_status
add_weights(reading *r)
{
    spw_foreign *d = r->d;
    const char *prefix = NULL;
    size_t before = 0;
    d->trained_count = d->param_count;
    if (d->trained_count > 0)
        SPW_TRY(find_prefix(r, &prefix, &before));
    else
        find_common_prefix(r, &prefix, &before);
    if (prefix == NULL)
        return damaged(r, METADATA, "there are no weights");
    for (uint64_t i = 0; i < r->entry_count; i++) {
        const entry *e = &r->entries[i];
        spw__foreign_param *p;
        spw_tensor_info t = {.ndim = 0};
        char name[SPW_TENSOR_NAME_BYTES];
        if (strncmp(e->key, prefix, before) != 0 || !is_weight(e))
            continue;
        if (strlen(e->key + before) >= sizeof name)
            return damaged(r, e->key, "its name is too long");
        snprintf(name, sizeof name, "%s", e->key + before);
        p = find_trained(r, name, strlen(name));
        if (p == NULL) {
            p = &d->params[d->param_count++];
            p->frozen = true;
            p->decay = NAN;
        }
        SPW_TRY(add_tensor(r, e, &t));
        if (!p->frozen && !same_shape(&p->info, &t))
            return damaged(r, e->key, "it has another shape than its moments");
        p->info = t;
        snprintf(p->info.name, sizeof p->info.name, "%s", name);
    }
    for (uint32_t k = 0; k < d->trained_count; k++) {
        if (d->params[k].info.bytes == 0)
            return damaged(r, d->params[k].info.name, "the optimizer has state of it, and its weights are missing");
        if (d->params[k].moment_count != d->about.moment_count)
            return damaged(r, d->params[k].info.name, "the optimizer has not all of what it has of others");
    }
    return SPW_OK;
}

/* The decay of all parameters that "optimizer.param_groups.0.params" names. */
static spw_status
set_decays(reading *r, const char *params_key, double decay)
{
    const piece *p = find_piece(r, params_key, 0);
    const spw__py *names;
    spw__torch *t;
    uint32_t unused;
    if (p == NULL)
        return SPW_OK;
    SPW_TRY(open_item(r, p, &t, &unused));
    names = spw__torch_root(t);
    for (uint64_t i = 0; names->kind == SPW__PY_LIST && i < names->count; i++) {
        const char *name = spw__py_text(names->items[i]);
        spw__foreign_param *param = name != NULL ? find_trained(r, name, strlen(name)) : NULL;
        if (param != NULL)
            param->decay = decay;
    }
    spw__torch_close(t);
    return SPW_OK;
}

/*
 * The groups' numbers are items of their own: "optimizer.param_groups.0.weight_decay", beside the names in its params, or, flattened, one for each
 * parameter: "optimizer.param_groups.NAME.weight_decay".
 */
static spw_status
read_groups(reading *r)
{
    spw_foreign_about *a = &r->d->about;
    for (uint64_t i = 0; i < r->entry_count; i++) {
        const char *key = r->entries[i].key, *groups = strstr(key, ".param_groups."), *last = strrchr(key, '.');
        const char *name = groups != NULL ? groups + strlen(".param_groups.") : NULL;
        if (name == NULL || last < name)
            continue;
        if (strcmp(last, ".betas") == 0 && isnan(a->beta1)) {
            SPW_TRY(read_value(r, key, 0, &a->beta1));
            SPW_TRY(read_value(r, key, 1, &a->beta2));
        } else if (strcmp(last, ".eps") == 0 && isnan(a->eps)) {
            SPW_TRY(read_value(r, key, -1, &a->eps));
        } else if (strcmp(last, ".weight_decay") == 0) {
            spw__foreign_param *param = find_trained(r, name, (size_t)(last - name));
            char params_key[SPW__FOREIGN_PATH_BYTES];
            double decay;
            SPW_TRY(read_value(r, key, -1, &decay));
            snprintf(params_key, sizeof params_key, "%.*s.params", (int)(last - key), key);
            if (param != NULL)
                param->decay = decay;
            else
                SPW_TRY(set_decays(r, params_key, decay));
        }
    }
    return SPW_OK;
}

static spw_status
read_params(reading *r)
{
    r->d->params = spw_mem_calloc(r->entry_count + 1, sizeof *r->d->params);
    if (r->d->params == NULL)
        return SPW_RAISE(r->err, SPW_ENOMEM, "parameters of %s", r->d->folder);
    for (uint64_t i = 0; i < r->entry_count; i++) {
        const entry *e = &r->entries[i];
        const char *name = optimizer_name(e->key), *moment = name != NULL ? strrchr(name, '.') : NULL;
        if (moment != NULL && is_tensor(e))
            SPW_TRY(add_moment(r, e, name, moment + 1));
    }
    SPW_TRY(add_weights(r));
    if (r->d->trained_count == 0)
        (void)SPW_RAISE(&r->d->unread, SPW_ENOENT, "%s: it holds no optimizer's state: its weights alone are there",
                        r->d->folder);
    if (!r->d->counted && r->d->unread.status == SPW_OK)
        (void)SPW_RAISE(&r->d->unread, SPW_EUNSUPPORTED,
                        "%s: its optimizer has not counted its updates, as PyTorch's SGD does not: at which of them "
                        "schedule and data would go on is not known",
                        r->d->folder);
    return read_groups(r);
}

spw_status
spw__dcp_read(spw_foreign *d, spw_error *err)
{
    reading r = {.d = d, .err = err};
    bool one = spw_dir_has(d->folder, METADATA);
    char state[SPW__FOREIGN_PATH_BYTES + 64];
    spw_status st = read_metadata(&r, one ? "" : model_folder);
    snprintf(state, sizeof state, "%.4000s/%s", d->folder, optimizer_folder);
    if (st == SPW_OK && !one && spw_dir_has(state, METADATA)) /* who saved the model alone has none */
        st = read_metadata(&r, optimizer_folder);
    if (st == SPW_OK)
        st = list_all(&r);
    if (st == SPW_OK)
        st = read_params(&r);
    snprintf(d->about.maker, sizeof d->about.maker, "PyTorch");
    d->about.ranks = r.folder_count > 0 ? r.file_count / r.folder_count : 0; /* each writes one */
    for (uint32_t f = 0; f < r.folder_count; f++)
        spw__pickle_free(r.pickles[f]);
    spw_mem_free(r.entries);
    spw_mem_free(r.pieces);
    spw_mem_free(r.files);
    return st;
}
