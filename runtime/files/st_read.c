/* Reading safetensors: every rule of the format is checked before a tensor is given out. */
#include "files_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_MAX = 100000000, PATH_BYTES = 4096 };

struct spw_st_reader {
    char path[PATH_BYTES];
    int fd;
    spw__large_file large;                     /* the same, for runs */
    spw_bounce *bounce;                        /* lent; NULL: there are no runs */
    uint64_t data_at, data_bytes, header_part; /* of the file's CRC-64 */
    spw_st_sum sum;                            /* atomic, each member for itself */
    int64_t mtime_ns;
    uint32_t count;
    spw_tensor_info *tensors;        /* (count) by offset */
    const spw_tensor_info **by_name; /* (count) the same */
    void *map;                       /* NULL: not mapped */
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
    r->tensors = spw_mem_calloc(json_object_size(root) + 1, sizeof *r->tensors);
    r->by_name = spw_mem_calloc(json_object_size(root) + 1, sizeof *r->by_name);
    if (r->tensors == NULL || r->by_name == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "header of %s", r->path);
    json_object_foreach(root, name, v)
    {
        if (st == SPW_OK && strcmp(name, "__metadata__") != 0)
            st = read_entry(r, name, v, &r->tensors[r->count++], err);
    }
    json_decref(root);
    if (st != SPW_OK)
        return st;
    qsort(r->tensors, r->count, sizeof *r->tensors, by_offset);
    for (uint32_t i = 0; i < r->count; i++) {
        if (r->tensors[i].begin != at)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.data_offsets begins at %llu, the tensor before it ends at %llu",
                             r->path, r->tensors[i].name, (unsigned long long)r->tensors[i].begin,
                             (unsigned long long)at);
        at += r->tensors[i].bytes;
        r->by_name[i] = &r->tensors[i];
    }
    qsort(r->by_name, r->count, sizeof *r->by_name, by_name);
    if (at != r->data_bytes)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: tensors take %llu bytes, the file has %llu (truncated?)", r->path,
                         (unsigned long long)at, (unsigned long long)r->data_bytes);
    return SPW_OK;
}

spw_status
spw_st_reader_open(spw_st_reader **out, const char *path, spw_error *err)
{
    spw_st_reader *r = spw_mem_zalloc(sizeof *r);
    struct stat info;
    uint64_t n = 0;
    char *text = NULL;
    spw_status st = SPW_OK;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    snprintf(r->path, sizeof r->path, "%s", path);
    r->large.direct_fd = -1;
    r->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0 || fstat(r->fd, &info) != 0)
        st = SPW_RAISE_SYS(err, errno, "open %s", path);
    else if (info.st_size < 8)
        st = SPW_RAISE(err, SPW_ECORRUPT,
                       "%s: %lld bytes are too few for a header length: it was not copied or fetched whole", path,
                       (long long)info.st_size);
    if (st == SPW_OK)
        st = spw_file_read_at(r->fd, path, &n, 8, 0, err);
    if (st == SPW_OK && memcmp(&n, "version ", sizeof n) == 0) /* how such a file begins */
        st = SPW_RAISE(err, SPW_ECORRUPT, "%s is a pointer of Git LFS, not the file itself; git lfs pull fetches it",
                       path);
    if (st == SPW_OK && (n > HEADER_MAX || n > (uint64_t)info.st_size - 8))
        st = SPW_RAISE(
            err, SPW_ECORRUPT,
            "%s is not a safetensors file, or damaged: its header length is %llu, the file has %lld bytes and "
            "the limit is %d",
            path, (unsigned long long)n, (long long)info.st_size, HEADER_MAX);
    if (st == SPW_OK && (text = spw_mem_zalloc(n + 1)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "header of %s", path);
    if (st == SPW_OK)
        st = spw_file_read_at(r->fd, path, text, n, 8, err);
    if (st == SPW_OK) {
        r->data_at = 8 + n;
        r->data_bytes = (uint64_t)info.st_size - r->data_at;
        r->header_part = spw_crc64_part(&n, 8, n + r->data_bytes) ^ spw_crc64_part(text, n, r->data_bytes);
        r->mtime_ns = (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec;
        st = read_header(r, text, n, err);
    }
    spw_mem_free(text);
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
    if (r->map != NULL)
        munmap(r->map, r->data_at + r->data_bytes);
    if (r->large.direct_fd >= 0)
        close(r->large.direct_fd);
    if (r->fd >= 0)
        close(r->fd);
    spw_mem_free(r->tensors);
    spw_mem_free(r->by_name);
    spw_mem_free(r);
}

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
    void *map = r->map != NULL ? r->map : mmap(NULL, r->data_at + r->data_bytes, PROT_READ, MAP_PRIVATE, r->fd, 0);
    if (map == MAP_FAILED)
        return SPW_RAISE_SYS(err, errno, "mapping %s", r->path);
    r->map = map;
    *out = (const uint8_t *)map + r->data_at + t->begin;
    return SPW_OK;
}

void
spw__st_let_go(const uint8_t *mapped, uint64_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)mapped + page - 1) / page * page,
              end = ((uintptr_t)mapped + bytes) / page * page;
    if (end > first)
        (void)madvise((void *)first, end - first, MADV_DONTNEED);
}

spw_st_extent
spw_st_reader_extent(const spw_st_reader *r, const spw_tensor_info *t)
{
    return (spw_st_extent){r->path, r->data_at + r->data_bytes, r->data_at + t->begin, r->mtime_ns};
}

spw_status
spw_st_read(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, void *data, uint64_t bytes, spw_error *err)
{
    if (offset > t->bytes || bytes > t->bytes - offset)
        return SPW_RAISE(err, SPW_EINVAL, "%s: bytes %llu to %llu are outside tensor %s", r->path,
                         (unsigned long long)offset, (unsigned long long)(offset + bytes), t->name);
    return spw_file_read_at(r->fd, r->path, data, bytes, r->data_at + t->begin + offset, err);
}

void
spw_st_reader_past_cache(spw_st_reader *r, spw_bounce *bounce)
{
    r->bounce = bounce;
    r->large.fd = r->fd;
    spw__large_open(&r->large, r->path, O_RDONLY);
}

/* Files of others may begin a tensor anywhere; who takes its elements finds them where their type may be. */
static const char *
aligned(char *buffer, uint64_t at, uint64_t bytes, spw_dtype dtype)
{
    char *data = spw__bounce_at(buffer, at);
    uint64_t off = dtype < SPW_DTYPE_COUNT ? (uintptr_t)data % spw_dtype_bytes(dtype) : 0;
    return off == 0 ? data : memmove(data - off, data, bytes);
}

spw_status
spw_st_read_run(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, uint64_t bytes, spw_st_take_fn take,
                void *ctx, spw_error *err)
{
    uint64_t begin = r->data_at + t->begin;
    char *buffer = spw__bounce_take(r->bounce);
    spw_status st = SPW_OK;
    SPW_ASSERT(offset <= t->bytes && bytes <= t->bytes - offset);
    for (uint64_t n; st == SPW_OK && bytes > 0; offset += n, bytes -= n) {
        n = bytes < SPW_BOUNCE_BYTES ? bytes : SPW_BOUNCE_BYTES;
        st = spw__bounce_read(&r->large, buffer, begin + offset, n, err);
        if (st == SPW_OK) {
            const char *data = aligned(buffer, begin + offset, n, t->dtype);
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
