/*
 * safetensors: a JSON header and tensor bytes. The writer lays tensors out by element size, then name, and accepts any
 * range from any thread; the reader checks every rule of the format before it gives out a tensor.
 */
#include "files_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_MAX = 100000000, PATH_BYTES = 4096, SUM_BYTES = 256 << 10 };

/* All types of the format (FORMATS S1); the first are those that are computed with. */
static const struct {
    const char *name;
    uint32_t bits;
} types[] = {[SPW_F32] = {"F32", 32},
             [SPW_BF16] = {"BF16", 16},
             [SPW_F16] = {"F16", 16},
             {"BOOL", 8},
             {"U8", 8},
             {"I8", 8},
             {"I16", 16},
             {"U16", 16},
             {"I32", 32},
             {"U32", 32},
             {"F64", 64},
             {"I64", 64},
             {"U64", 64},
             {"C64", 64},
             {"F8_E5M2", 8},
             {"F8_E4M3", 8},
             {"F8_E8M0", 8},
             {"F8_E4M3FNUZ", 8},
             {"F8_E5M2FNUZ", 8},
             {"F4", 4},
             {"F6_E2M3", 6},
             {"F6_E3M2", 6}};
enum { TYPE_COUNT = sizeof types / sizeof types[0] };

/* ---------------------------------------------------------------- writing */

struct spw_st_writer {
    char path[PATH_BYTES], tmp[PATH_BYTES + 32];
    int fd;
    uint64_t data_at, data_bytes;
    uint32_t tensor_count;
    uint64_t *begin, *bytes;
    spw_st_sum sum; /* atomic, each member for itself */
};

typedef struct order {
    const spw_tensor_info *t;
    uint32_t i;
} order;

static int
by_size_then_name(const void *a, const void *b)
{
    const order *x = a, *y = b;
    uint32_t bx = spw_dtype_bytes(x->t->dtype), by = spw_dtype_bytes(y->t->dtype);
    if (bx != by)
        return bx > by ? -1 : 1;
    if (strcmp(x->t->name, y->t->name) != 0)
        return strcmp(x->t->name, y->t->name);
    return x->t->slice < y->t->slice ? -1 : x->t->slice > y->t->slice;
}

static bool
tensor_bytes(const spw_tensor_info *t, uint32_t bits, uint64_t *out)
{
    uint64_t n = bits;
    for (uint32_t d = 0; d < t->ndim; d++) {
        if (!spw_mul_u64(n, t->shape[d], &n))
            return false;
    }
    *out = n / 8;
    return n % 8 == 0;
}

static json_t *
describe(const spw_tensor_info *t, uint64_t begin, uint64_t end)
{
    json_t *shape = json_array();
    if (t->stack > 0)
        json_array_append_new(shape, json_integer((json_int_t)t->stack));
    for (uint32_t d = 0; d < t->ndim; d++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", types[t->dtype].name, "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)end);
}

static spw_status
write_at(int fd, const char *path, const void *data, uint64_t bytes, uint64_t offset, spw_error *err)
{
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t rc = pwrite(fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc < 0)
            return SPW_RAISE_SYS(err, errno, "write %s: wanted %llu bytes at offset %llu, got %llu", path,
                                 (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)done);
        done += (uint64_t)rc;
    }
    return SPW_OK;
}

static void
add_sum(spw_st_sum *sum, uint64_t parts, uint64_t bytes)
{
    __atomic_fetch_xor(&sum->parts, parts, __ATOMIC_RELAXED);
    __atomic_fetch_add(&sum->bytes, bytes, __ATOMIC_RELAXED);
}

/* In pieces that are still in the cache when they go to the file, and are summed before: what a bad write changes is seen. */
static spw_status
write_summed(spw_st_writer *w, const void *data, uint64_t bytes, uint64_t offset, spw_error *err)
{
    uint64_t parts = 0, behind = w->data_at + w->data_bytes - offset;
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < SUM_BYTES ? bytes - at : SUM_BYTES;
        parts ^= spw_crc64_part((const char *)data + at, n, behind - at - n);
        SPW_TRY(write_at(w->fd, spw_st_writer_temporary(w), (const char *)data + at, n, offset + at, err));
    }
    add_sum(&w->sum, parts, bytes);
    return SPW_OK;
}

static bool
follows(const spw_tensor_info *t, const spw_tensor_info *before)
{
    return t->slice < t->stack && t->slice == before->slice + 1 && t->stack == before->stack &&
           t->dtype == before->dtype && t->ndim == before->ndim && strcmp(t->name, before->name) == 0 &&
           memcmp(t->shape, before->shape, t->ndim * sizeof t->shape[0]) == 0;
}

/* Places the tensors and makes the padded header; header is the caller's to free(). */
static spw_status
lay_out(spw_st_writer *w, const spw_tensor_info *tensors, char **header_out, uint64_t *header_bytes, spw_error *err)
{
    order *sorted = spw_mem_calloc(w->tensor_count + 1, sizeof *sorted);
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    spw_status st = sorted == NULL || root == NULL ? SPW_RAISE(err, SPW_ENOMEM, "header of %s", w->path) : SPW_OK;
    char *text = NULL;
    for (uint32_t i = 0; st == SPW_OK && i < w->tensor_count; i++)
        sorted[i] = (order){&tensors[i], i};
    if (st == SPW_OK)
        qsort(sorted, w->tensor_count, sizeof *sorted, by_size_then_name);
    for (uint32_t k = 0; st == SPW_OK && k < w->tensor_count; k++) {
        uint32_t i = sorted[k].i;
        if ((unsigned)tensors[i].dtype >= SPW_DTYPE_COUNT ||
            !tensor_bytes(&tensors[i], types[tensors[i].dtype].bits, &w->bytes[i]) ||
            (tensors[i].slice == 0 ? json_object_get(root, tensors[i].name) != NULL
                                   : k == 0 || !follows(&tensors[i], sorted[k - 1].t)))
            st = SPW_RAISE(err, SPW_EINVAL, "%s: tensor %s has a bad shape or dtype, or its name is taken", w->path,
                           tensors[i].name);
        w->begin[i] = w->data_bytes;
        w->data_bytes += w->bytes[i];
        if (st == SPW_OK && tensors[i].slice + 1 >= tensors[i].stack && /* the last of a stack has the end of all */
            json_object_set_new(root, tensors[i].name,
                                describe(&tensors[i], w->begin[i] - tensors[i].slice * w->bytes[i], w->data_bytes)) !=
                0)
            st = SPW_RAISE(err, SPW_ENOMEM, "header of %s", w->path);
    }
    if (st == SPW_OK && (text = json_dumps(root, JSON_COMPACT)) == NULL)
        st = SPW_RAISE(err, SPW_ENOMEM, "header of %s", w->path);
    json_decref(root);
    spw_mem_free(sorted);
    if (st != SPW_OK)
        return st;
    *header_bytes = spw_round_up(strlen(text), 8);
    *header_out = malloc(*header_bytes + 8);
    if (*header_out == NULL) {
        free(text);
        return SPW_RAISE(err, SPW_ENOMEM, "header of %s", w->path);
    }
    memset(*header_out + 8, ' ', *header_bytes);
    memcpy(*header_out, header_bytes, 8); /* little-endian, as all machines this runs on */
    memcpy(*header_out + 8, text, strlen(text));
    free(text);
    return SPW_OK;
}

/* A writer that knows where everything goes, without its file; *header is the caller's to free. */
static spw_status
lay_out_writer(spw_st_writer **out, const char *path, const spw_tensor_info *tensors, uint32_t tensor_count,
               char **header, spw_error *err)
{
    spw_st_writer *w = spw_mem_zalloc(sizeof *w);
    uint64_t header_bytes = 0;
    spw_status st;
    *header = NULL;
    *out = w;
    if (w == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "writer of %s", path);
    w->fd = -1;
    w->tensor_count = tensor_count;
    snprintf(w->path, sizeof w->path, "%s", path);
    w->begin = spw_mem_calloc(tensor_count + 1, sizeof *w->begin);
    w->bytes = spw_mem_calloc(tensor_count + 1, sizeof *w->bytes);
    st = w->begin == NULL || w->bytes == NULL ? SPW_RAISE(err, SPW_ENOMEM, "writer of %s", path) : SPW_OK;
    if (st == SPW_OK)
        st = lay_out(w, tensors, header, &header_bytes, err);
    w->data_at = 8 + header_bytes;
    return st;
}

static spw_status
reserve(spw_st_writer *w, spw_error *err)
{
    char need[32];
    int rc;
    do
        rc = fallocate(w->fd, 0, 0, (off_t)(w->data_at + w->data_bytes));
    while (rc != 0 && errno == EINTR);
    if (rc != 0 && errno == EOPNOTSUPP)
        rc = ftruncate(w->fd, (off_t)(w->data_at + w->data_bytes));
    return rc == 0 ? SPW_OK
                   : SPW_RAISE_SYS(err, errno, "%s needs %s", w->tmp,
                                   spw_format_bytes(need, sizeof need, w->data_at + w->data_bytes));
}

spw_status
spw_st_writer_create(spw_st_writer **out, const char *path, const spw_tensor_info *tensors, uint32_t tensor_count,
                     spw_error *err)
{
    spw_st_writer *w;
    char *header;
    spw_status st = lay_out_writer(&w, path, tensors, tensor_count, &header, err);
    *out = NULL;
    if (st == SPW_OK) {
        snprintf(w->tmp, sizeof w->tmp, "%s.tmp-%ld", path, (long)getpid());
        w->fd = open(w->tmp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (w->fd < 0)
            st = SPW_RAISE_SYS(err, errno, "open %s", w->tmp);
    }
    if (st == SPW_OK)
        st = reserve(w, err);
    if (st == SPW_OK)
        st = write_summed(w, header, w->data_at, 0, err);
    free(header);
    if (st != SPW_OK)
        spw_st_writer_destroy(w);
    else
        *out = w;
    return st;
}

spw_status
spw_st_writer_join(spw_st_writer **out, const char *temporary, const spw_tensor_info *tensors, uint32_t tensor_count,
                   spw_error *err)
{
    spw_st_writer *w;
    char *header;
    struct stat s;
    spw_status st = lay_out_writer(&w, temporary, tensors, tensor_count, &header, err);
    *out = NULL;
    free(header);
    if (st == SPW_OK) {
        w->fd = open(temporary, O_RDWR | O_CLOEXEC);
        if (w->fd < 0)
            st = SPW_RAISE_SYS(err, errno, "open %s (a folder that all ranks see?)", temporary);
        else if (fstat(w->fd, &s) != 0 || (uint64_t)s.st_size != w->data_at + w->data_bytes)
            st = SPW_RAISE(err, SPW_ECORRUPT, "%s has %llu bytes, its tensors need %llu", temporary,
                           (unsigned long long)s.st_size, (unsigned long long)(w->data_at + w->data_bytes));
    }
    if (st != SPW_OK)
        spw_st_writer_destroy(w);
    else
        *out = w;
    return st;
}

const char *
spw_st_writer_temporary(const spw_st_writer *w)
{
    return w->tmp[0] != '\0' ? w->tmp : w->path;
}

spw_status
spw_st_write(spw_st_writer *w, uint32_t i, uint64_t offset, const void *data, uint64_t bytes, spw_error *err)
{
    if (i >= w->tensor_count || offset > w->bytes[i] || bytes > w->bytes[i] - offset)
        return SPW_RAISE(err, SPW_EINVAL, "%s: bytes %llu to %llu are outside tensor %u", w->path,
                         (unsigned long long)offset, (unsigned long long)(offset + bytes), i);
    return write_summed(w, data, bytes, w->data_at + w->begin[i] + offset, err);
}

spw_st_sum
spw_st_writer_sum(const spw_st_writer *w)
{
    return w->sum;
}

uint64_t
spw_st_writer_file_bytes(const spw_st_writer *w)
{
    return w->data_at + w->data_bytes;
}

spw_status
spw_st_writer_commit(spw_st_writer *w, spw_error *err)
{
    if (fsync(w->fd) != 0)
        return SPW_RAISE_SYS(err, errno, "fsync %s", spw_st_writer_temporary(w));
    if (w->tmp[0] == '\0')
        return SPW_OK; /* another's file */
    if (rename(w->tmp, w->path) != 0)
        return SPW_RAISE_SYS(err, errno, "renaming %s to %s", w->tmp, w->path);
    w->tmp[0] = '\0';
    return spw_dir_sync_above(w->path, err);
}

void
spw_st_writer_destroy(spw_st_writer *w)
{
    if (w == NULL)
        return;
    if (w->fd >= 0) {
        close(w->fd);
        if (w->tmp[0] != '\0')
            (void)unlink(w->tmp);
    }
    spw_mem_free(w->begin);
    spw_mem_free(w->bytes);
    spw_mem_free(w);
}

/* ---------------------------------------------------------------- reading */

struct spw_st_reader {
    char path[PATH_BYTES];
    int fd;
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
    while (dtype != NULL && type < TYPE_COUNT && strcmp(dtype, types[type].name) != 0)
        type++;
    if (dtype == NULL || type == TYPE_COUNT)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s.dtype is %s, which the format does not have", r->path, name,
                         dtype != NULL ? dtype : "missing");
    t->dtype = type < SPW_DTYPE_COUNT ? (spw_dtype)type : SPW_DTYPE_COUNT;
    t->type = types[type].name;
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
    if (!tensor_bytes(t, types[type].bits, &bytes) || bytes != t->bytes)
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

void
spw_st_describe(spw_tensor_info *t, const spw_param *p, spw_dtype dtype)
{
    size_t bytes = p->stack > 0 ? (size_t)(strrchr(p->name, '.') - p->name) : strlen(p->name);
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%.*s", (int)bytes, p->name);
    t->dtype = dtype;
    t->ndim = p->ndim;
    t->shape[0] = p->ndim == 1 ? p->cols : p->rows;
    t->shape[1] = p->ndim == 1 ? 0 : p->cols;
    t->stack = p->stack;
    t->slice = p->stack > 0 ? p->expert - 1 : 0;
    if (p->in_terms) {
        t->dtype = SPW_F32;
        t->shape[0] /= SPW_TERMS;
    }
}

spw_status
spw_st_write_terms(spw_st_writer *w, uint32_t i, uint64_t first, float *terms, uint64_t count, spw_error *err)
{
    SPW_ASSERT(first % SPW_TERMS == 0 && count % SPW_TERMS == 0);
    spw_terms_sum(terms, terms, count / SPW_TERMS);
    return spw_st_write(w, i, first / SPW_TERMS * sizeof *terms, terms, count / SPW_TERMS * sizeof *terms, err);
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

spw_status
spw_st_read_summed(spw_st_reader *r, const spw_tensor_info *t, uint64_t offset, void *data, uint64_t bytes,
                   spw_error *err)
{
    SPW_TRY(spw_st_read(r, t, offset, data, bytes, err));
    add_sum(&r->sum, spw_crc64_part(data, bytes, r->data_bytes - t->begin - offset - bytes), bytes);
    return SPW_OK;
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
