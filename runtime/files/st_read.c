/*
 * Reading safetensors: every rule of the format is checked before a tensor is given out. Files of torch.save that hold tensors by name are
 * read too, by the same ranges (torch.c finds them), llm.c's weights (llmc.c), and tensors that lie in pieces of several files (span.c).
 */
#include "llmc.h"
#include "torch.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HEADER_MAX = 100000000, PATH_BYTES = 4096 };

struct spw_st_reader {
    char path[PATH_BYTES];
    spw__span *span;
    spw_bounce *bounce;                        /* lent; NULL: there are no runs */
    uint64_t data_at, data_bytes, header_part; /* of the file's CRC-64 */
    spw_st_sum sum;                            /* atomic, each member for itself */
    uint32_t count;
    spw_tensor_info *tensors;        /* (count) by offset */
    const spw_tensor_info **by_name; /* (count) the same */
};

static bool
read_size(const json_t *v, uint64_t *out)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

static spw_status
read_entry(spw_st_reader *r, const char *name, json_t *v, spw_tensor_info *t, spw_error *err)
{
    json_t *shape = json_object_get(v, "shape"), *offsets = json_object_get(v, "data_offsets");
    const char *dtype = json_string_value(json_object_get(v, "dtype"));
    uint64_t end, bytes, dim;
    int type = 0;
    if (strlen(name) >= sizeof t->name)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor name %.40s... is longer than %zu bytes", r->path, name,
                         sizeof t->name - 1);
    snprintf(t->name, sizeof t->name, "%s", name);
    while (dtype != NULL && type < SPW__ST_TYPE_COUNT && strcmp(dtype, spw__st_types[type].name) != 0)
        type++;
    if (dtype == NULL || type == SPW__ST_TYPE_COUNT)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.dtype is %s, which the format does not have", r->path, name,
                         dtype != NULL ? dtype : "missing");
    t->dtype = type < SPW_DTYPE_COUNT ? (spw_dtype)type : SPW_DTYPE_COUNT;
    t->type = spw__st_types[type].name;
    if (!json_is_array(shape) || json_array_size(shape) > SPW_TENSOR_DIMS_MAX)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.shape is not an array of at most %d sizes", r->path, name,
                         SPW_TENSOR_DIMS_MAX);
    t->ndim = (uint32_t)json_array_size(shape);
    for (uint32_t d = 0; d < t->ndim; d++) {
        if (!read_size(json_array_get(shape, d), &dim))
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.shape[%u] is not a size", r->path, name, d);
        t->shape[d] = dim;
    }
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !read_size(json_array_get(offsets, 0), &t->begin) ||
        !read_size(json_array_get(offsets, 1), &end) || end < t->begin)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.data_offsets is not [begin, end]", r->path, name);
    t->bytes = end - t->begin;
    if (!spw__st_tensor_bytes(t, spw__st_types[type].bits, &bytes) || bytes != t->bytes)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.shape does not give the %llu bytes of its data_offsets", r->path,
                         name, (unsigned long long)t->bytes);
    return SPW_OK;
}

static int
by_offset(const void *a, const void *b)
{
    const spw_tensor_info *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int
by_name(const void *a, const void *b)
{
    return strcmp((*(const spw_tensor_info *const *)a)->name, (*(const spw_tensor_info *const *)b)->name);
}

static spw_status
make_room(spw_st_reader *r, uint64_t count, spw_error *err)
{
    r->tensors = spw_mem_calloc(count + 1, sizeof *r->tensors);
    r->by_name = spw_mem_calloc(count + 1, sizeof *r->by_name);
    return r->tensors != NULL && r->by_name != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "tensors of %s", r->path);
}

/* By offset and by name, of which there is only one. */
static spw_status
put_in_order(spw_st_reader *r, spw_error *err)
{
    qsort(r->tensors, r->count, sizeof *r->tensors, by_offset);
    for (uint32_t i = 0; i < r->count; i++)
        r->by_name[i] = &r->tensors[i];
    qsort(r->by_name, r->count, sizeof *r->by_name, by_name);
    for (uint32_t i = 1; i < r->count; i++) {
        if (strcmp(r->by_name[i - 1]->name, r->by_name[i]->name) == 0)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensor %s is there twice", r->path, r->by_name[i]->name);
    }
    return SPW_OK;
}

static spw_status
read_header(spw_st_reader *r, const char *text, uint64_t bytes, spw_error *err)
{
    json_error_t where;
    json_t *root, *v, *meta;
    const char *name;
    uint64_t at = 0;
    spw_status st = SPW_OK;
    if (bytes == 0 || text[0] != '{')
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: header does not start with '{'", r->path);
    root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (root == NULL)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: header, byte %d: %s", r->path, where.position, where.text);
    meta = json_object_get(root, "__metadata__");
    json_object_foreach(meta, name, v)
    {
        if (!json_is_string(v))
            st = SPW_RAISE(err, SPW_ECORRUPT, "%s: __metadata__.%s is not a string", r->path, name);
    }
    if (meta != NULL && !json_is_object(meta))
        st = SPW_RAISE(err, SPW_ECORRUPT, "%s: __metadata__ is not an object", r->path);
    if (st == SPW_OK)
        st = make_room(r, json_object_size(root), err);
    json_object_foreach(root, name, v)
    {
        if (st == SPW_OK && strcmp(name, "__metadata__") != 0)
            st = read_entry(r, name, v, &r->tensors[r->count++], err);
    }
    json_decref(root);
    if (st != SPW_OK)
        return st;
    SPW_TRY(put_in_order(r, err));
    for (uint32_t i = 0; i < r->count; i++) {
        if (r->tensors[i].begin != at)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.data_offsets begins at %llu, the tensor before it ends at %llu",
                             r->path, r->tensors[i].name, (unsigned long long)r->tensors[i].begin,
                             (unsigned long long)at);
        at += r->tensors[i].bytes;
    }
    if (at != r->data_bytes)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensors take %llu bytes, the file has %llu%s", r->path,
                         (unsigned long long)at, (unsigned long long)r->data_bytes,
                         at > r->data_bytes ? " (truncated?)" : ": more was written behind them");
    return SPW_OK;
}

/* ---------------------------------------------------------------- opening */

static spw_status
read_safetensors(spw_st_reader *r, uint64_t n, spw_error *err)
{
    uint64_t all = spw__span_bytes(r->span);
    spw_status st;
    char *text;
    if (memcmp(&n, "version ", sizeof n) == 0) /* how such a file begins */
        return SPW_RAISE(err, SPW_ECORRUPT, "%s is a pointer of Git LFS, not the file itself; git lfs pull fetches it",
                         r->path);
    if (n > HEADER_MAX || n > all - 8)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s is not a safetensors file, or damaged: its header length is %llu, the file has %llu bytes "
                         "and the limit is %d",
                         r->path, (unsigned long long)n, (unsigned long long)all, HEADER_MAX);
    text = spw_mem_zalloc(n + 1);
    if (text == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "header of %s", r->path);
    st = spw__span_read(r->span, text, n, 8, err);
    if (st == SPW_OK) {
        r->data_at = 8 + n;
        r->data_bytes = all - r->data_at;
        r->header_part = spw_crc64_part(&n, 8, n + r->data_bytes) ^ spw_crc64_part(text, n, r->data_bytes);
        st = read_header(r, text, n, err);
    }
    spw_mem_free(text);
    return st;
}

/* The tensors that a dict of torch.save has by their names; what else is in it is passed over. */
static spw_status
list_torch(spw_st_reader *r, const spw__torch *t, spw_error *err)
{
    const spw__py *root = spw__torch_root(t);
    uint64_t count = root->kind == SPW__PY_DICT || root->kind == SPW__PY_OBJECT ? root->count : 0;
    SPW_TRY(make_room(r, count / 2, err));
    for (uint64_t i = 0; i + 1 < count; i += 2) {
        const char *name = spw__py_text(root->items[i]);
        if (name != NULL && spw__torch_is_tensor(root->items[i + 1]))
            SPW_TRY(spw__torch_tensor(t, root->items[i + 1], name, &r->tensors[r->count++], err));
    }
    if (r->count == 0)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s holds no tensors by their names%s", r->path,
                         spw__py_get(root, "ds_version") != NULL
                             ? ": it is a part of a checkpoint of DeepSpeed, whose folder --resume takes"
                             : "");
    r->data_bytes = spw__span_bytes(r->span);
    return put_in_order(r, err);
}

static spw_status
read_torch(spw_st_reader *r, spw_error *err)
{
    spw__torch *t;
    spw_status st;
    SPW_TRY(spw__torch_open(&t, r->path, err));
    st = list_torch(r, t, err);
    spw__torch_close(t);
    return st;
}

/* The span has the whole file. */
static spw_status
read_llmc(spw_st_reader *r, spw_error *err)
{
    spw__llmc m;
    SPW_TRY(spw__llmc_open(&m, r->path, err));
    r->count = spw__llmc_tensor_count(&m);
    SPW_TRY(make_room(r, r->count, err));
    SPW_TRY(spw__llmc_list(&m, r->span, SPW__LLMC_HEADER_BYTES, m.dtype, r->tensors, err));
    r->data_bytes = spw__span_bytes(r->span);
    return put_in_order(r, err);
}

static spw_status
read_file(spw_st_reader *r, spw_error *err)
{
    uint64_t bytes, n;
    uint32_t file;
    SPW_TRY(spw__span_create(&r->span, err));
    SPW_TRY(spw__span_open(r->span, r->path, &file, err));
    bytes = spw__span_file_bytes(r->span, file);
    if (bytes < 8)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "%s: %llu bytes are too few for a header length: it was not copied or fetched whole", r->path,
                         (unsigned long long)bytes);
    SPW_TRY(spw__span_add(r->span, file, 0, bytes, err));
    SPW_TRY(spw__span_read(r->span, &n, 8, 0, err));
    if (spw__llmc_begins(&n))
        return read_llmc(r, err);
    return spw__torch_begins(&n) ? read_torch(r, err) : read_safetensors(r, n, err);
}

spw_status
spw_st_reader_open(spw_st_reader **out, const char *path, spw_error *err)
{
    spw_st_reader *r = spw_mem_zalloc(sizeof *r);
    spw_status st;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    snprintf(r->path, sizeof r->path, "%s", path);
    st = read_file(r, err);
    if (st != SPW_OK)
        spw_st_reader_close(r);
    else
        *out = r;
    return st;
}

spw_status
spw__st_reader_over(spw_st_reader **out, const char *name, spw__span *span, const spw_tensor_info *tensors,
                    uint32_t count, spw_error *err)
{
    spw_st_reader *r = spw_mem_zalloc(sizeof *r);
    spw_status st;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", name);
    snprintf(r->path, sizeof r->path, "%s", name);
    r->span = spw__span_share(span);
    r->data_bytes = spw__span_bytes(span);
    st = make_room(r, count, err);
    if (st == SPW_OK) {
        memcpy(r->tensors, tensors, count * sizeof *tensors);
        r->count = count;
        st = put_in_order(r, err);
    }
    if (st != SPW_OK)
        spw_st_reader_close(r);
    else
        *out = r;
    return st;
}

void
spw_st_reader_close(spw_st_reader *r)
{
    if (r == NULL)
        return;
    spw__span_release(r->span);
    spw_mem_free(r->tensors);
    spw_mem_free(r->by_name);
    spw_mem_free(r);
}

/* ---------------------------------------------------------------- tensors and their bytes */

uint32_t
spw_st_reader_count(const spw_st_reader *r)
{
    return r->count;
}

const spw_tensor_info *
spw_st_reader_tensor(const spw_st_reader *r, uint32_t i)
{
    return i < r->count ? &r->tensors[i] : NULL;
}

const spw_tensor_info *
spw_st_reader_find(const spw_st_reader *r, const char *name)
{
    uint32_t low = 0, high = r->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int side = strcmp(name, r->by_name[middle]->name);
        if (side == 0)
            return r->by_name[middle];
        if (side < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

spw_status
spw__st_map(spw_st_reader *r, const spw_tensor_info *t, const uint8_t **out, spw_error *err)
{
    spw_st_extent unused;
    if (!spw_st_reader_extent(r, t, &unused))
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: tensor %s is in several pieces", r->path, t->name);
    return spw__span_map(r->span, r->data_at + t->begin, out, err);
}

spw_status
spw__st_check_map(const spw_st_reader *r, spw_error *err)
{
    return spw__span_check_maps(r->span, err);
}

void
spw__st_let_go(const uint8_t *mapped, uint64_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)mapped + page - 1) / page * page,
              end = ((uintptr_t)mapped + bytes) / page * page;
    if (end > first)
        (void)madvise((void *)first, end - first, MADV_DONTNEED);
}

bool
spw_st_reader_extent(const spw_st_reader *r, const spw_tensor_info *t, spw_st_extent *out)
{
    return spw__span_extent(r->span, r->data_at + t->begin, t->bytes, out);
}

spw_status
spw_st_read(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, void *data, uint64_t bytes, spw_error *err)
{
    if (offset > t->bytes || bytes > t->bytes - offset)
        return SPW_RAISE(err, SPW_EINVAL, "%s: bytes %llu to %llu are outside tensor %s", r->path,
                         (unsigned long long)offset, (unsigned long long)(offset + bytes), t->name);
    return spw__span_read(r->span, data, bytes, r->data_at + t->begin + offset, err);
}

void
spw_st_reader_past_cache(spw_st_reader *r, spw_bounce *bounce)
{
    r->bounce = bounce;
    spw__span_past_cache(r->span);
}

/* Files of others may begin a tensor anywhere; who takes its elements finds them where their type may be. */
static const char *
aligned(char *data, uint64_t bytes, spw_dtype dtype)
{
    uint64_t off = dtype < SPW_DTYPE_COUNT ? (uintptr_t)data % spw_dtype_bytes(dtype) : 0;
    return off == 0 ? data : memmove(data - off, data, bytes);
}

spw_status
spw_st_read_run(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, uint64_t bytes, spw_st_take_fn take,
                void *ctx, spw_error *err)
{
    uint64_t begin = r->data_at + t->begin;
    char *buffer = spw__bounce_take(r->bounce), *raw;
    spw_status st = SPW_OK;
    SPW_ASSERT(offset <= t->bytes && bytes <= t->bytes - offset);
    for (uint64_t n; st == SPW_OK && bytes > 0; offset += n, bytes -= n) {
        n = bytes < SPW_BOUNCE_BYTES ? bytes : SPW_BOUNCE_BYTES;
        st = spw__span_read_run(r->span, buffer, begin + offset, &n, &raw, err);
        if (st == SPW_OK) {
            const char *data = aligned(raw, n, t->dtype);
            spw__st_add_sum(&r->sum, spw_crc64_part(data, n, r->data_bytes - t->begin - offset - n), n);
            st = take(ctx, offset, data, n, err);
        }
    }
    spw__bounce_give(r->bounce, buffer);
    return st;
}

spw_st_sum
spw_st_reader_sum(const spw_st_reader *r, bool header)
{
    return header ? (spw_st_sum){r->sum.parts ^ r->header_part, r->sum.bytes + r->data_at} : r->sum;
}

uint64_t
spw_st_reader_file_bytes(const spw_st_reader *r)
{
    return r->data_at + r->data_bytes;
}
