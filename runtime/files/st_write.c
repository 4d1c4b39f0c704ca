/*
 * Writing safetensors: tensors are laid out by element size, then name, and any range comes from any thread. The file's bytes are summed on
 * their way; large runs of them go past the page cache.
 */
#include "files_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_BYTES = 4096, SUM_BYTES = 256 << 10 };

struct spw_st_writer {
    char path[PATH_BYTES], tmp[PATH_BYTES + 32];
    int fd;
    spw__large_file large; /* the same, for runs */
    spw_bounce *bounce;    /* lent; NULL: there are no runs */
    uint64_t data_at, data_bytes;
    uint32_t tensor_count;
    uint64_t *begin, *bytes;
    bool *whole;
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
    uint32_t bx = x->t->whole ? 8 : spw_dtype_bytes(x->t->dtype), by = y->t->whole ? 8 : spw_dtype_bytes(y->t->dtype);
    if (bx != by)
        return bx > by ? -1 : 1;
    if (strcmp(x->t->name, y->t->name) != 0)
        return strcmp(x->t->name, y->t->name);
    return x->t->slice < y->t->slice ? -1 : x->t->slice > y->t->slice;
}

/* Of the format's types. */
static const spw__st_type *
type_of(const spw_tensor_info *t)
{
    static const spw__st_type whole = {"I64", 64};
    return t->whole ? &whole : &spw__st_types[t->dtype];
}

static json_t *
describe(const spw_tensor_info *t, uint64_t begin, uint64_t end)
{
    json_t *shape = json_array();
    if (t->stack > 0)
        json_array_append_new(shape, json_integer((json_int_t)t->stack));
    for (uint32_t d = 0; d < t->ndim; d++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", type_of(t)->name, "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)end);
}

/* Summed before it goes, still in the processor's cache: what a bad write changes is seen. */
static void
sum(spw_st_writer *w, const void *data, uint64_t bytes, uint64_t offset)
{
    spw__st_add_sum(&w->sum, spw_crc64_part(data, bytes, w->data_at + w->data_bytes - offset - bytes), bytes);
}

/* Through the page cache. */
static spw_status
write_summed(spw_st_writer *w, const void *data, uint64_t bytes, uint64_t offset, spw_error *err)
{
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < SUM_BYTES ? bytes - at : SUM_BYTES;
        sum(w, (const char *)data + at, n, offset + at);
        SPW_TRY(spw__file_write_at(w->fd, spw_st_writer_temporary(w), (const char *)data + at, n, offset + at, err));
    }
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
            !spw__st_tensor_bytes(&tensors[i], type_of(&tensors[i])->bits, &w->bytes[i]) ||
            (tensors[i].slice == 0 ? json_object_get(root, tensors[i].name) != NULL
                                   : k == 0 || !follows(&tensors[i], sorted[k - 1].t)))
            st = SPW_RAISE(err, SPW_EINVAL, "%s: tensor %s has a bad shape or dtype, or its name is taken", w->path,
                           tensors[i].name);
        w->begin[i] = w->data_bytes;
        w->whole[i] = tensors[i].whole;
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
    w->fd = w->large.direct_fd = -1;
    w->tensor_count = tensor_count;
    snprintf(w->path, sizeof w->path, "%s", path);
    w->begin = spw_mem_calloc(tensor_count + 1, sizeof *w->begin);
    w->bytes = spw_mem_calloc(tensor_count + 1, sizeof *w->bytes);
    w->whole = spw_mem_calloc(tensor_count + 1, sizeof *w->whole);
    st = w->begin == NULL || w->bytes == NULL || w->whole == NULL ? SPW_RAISE(err, SPW_ENOMEM, "writer of %s", path)
                                                                  : SPW_OK;
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

/*
 * Ranks on several hosts write parts of one page. They open the file for writing alone: of one that is read too, NFS fetches the page that is written
 * in part and later sends all of it, with what other hosts have written since as it was before.
 */
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
        w->fd = open(w->tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
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
        w->fd = open(temporary, O_WRONLY | O_CLOEXEC);
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

void
spw_st_writer_past_cache(spw_st_writer *w, spw_bounce *bounce)
{
    w->bounce = bounce;
    w->large.fd = w->fd;
    spw__large_open(&w->large, spw_st_writer_temporary(w), O_WRONLY);
}

/* Cut where the file's own blocks of a buffer's size end: whole pages, but for the run's ends. */
spw_status
spw_st_write_run(spw_st_writer *w, uint32_t i, uint64_t offset, uint64_t bytes, spw_st_make_fn make, void *ctx,
                 spw_error *err)
{
    uint64_t first = w->data_at + w->begin[i] + offset, at = first, end = first + bytes;
    char *buffer = spw__bounce_take(w->bounce);
    spw_status st = SPW_OK;
    SPW_ASSERT(offset <= w->bytes[i] && bytes <= w->bytes[i] - offset);
    for (uint64_t n; st == SPW_OK && at < end; at += n) {
        char *data = spw__bounce_at(buffer, at);
        n = SPW_BOUNCE_BYTES - at % SPW_BOUNCE_BYTES;
        n = n < end - at ? n : end - at;
        st = make(ctx, offset + (at - first), data, n, err);
        if (st == SPW_OK) {
            sum(w, data, n, at);
            st = spw__bounce_write(w->bounce, &w->large, buffer, at, n, err);
        }
    }
    spw__bounce_give(w->bounce, buffer);
    return st;
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
    if (w->bounce != NULL)
        SPW_TRY(spw__bounce_flush(w->bounce, &w->large, err));
    if (fsync(w->fd) != 0)
        return SPW_RAISE_SYS(err, errno, "fsync %s", spw_st_writer_temporary(w));
    if (w->bounce != NULL)
        (void)posix_fadvise(w->fd, 0, 0, POSIX_FADV_DONTNEED); /* what went there after all */
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
    if (w->bounce != NULL)
        (void)spw__bounce_flush(w->bounce, &w->large, NULL);
    if (w->large.direct_fd >= 0)
        close(w->large.direct_fd);
    if (w->fd >= 0) {
        close(w->fd);
        if (w->tmp[0] != '\0')
            (void)unlink(w->tmp);
    }
    spw_mem_free(w->begin);
    spw_mem_free(w->bytes);
    spw_mem_free(w->whole);
    spw_mem_free(w);
}

spw_status
spw_st_write_terms(spw_st_writer *w, uint32_t i, uint64_t first, float *terms, uint64_t count, spw_error *err)
{
    SPW_ASSERT(first % SPW_TERMS == 0 && count % SPW_TERMS == 0);
    spw_terms_sum(terms, terms, count / SPW_TERMS);
    for (uint64_t at = 0, n; w->whole[i] && at < count / SPW_TERMS; at += n) {
        int64_t block[512];
        n = count / SPW_TERMS - at < 512 ? count / SPW_TERMS - at : 512;
        for (uint64_t k = 0; k < n; k++)
            block[k] = (int64_t)terms[at + k];
        SPW_TRY(spw_st_write(w, i, (first / SPW_TERMS + at) * sizeof *block, block, n * sizeof *block, err));
    }
    if (w->whole[i])
        return SPW_OK;
    return spw_st_write(w, i, first / SPW_TERMS * sizeof *terms, terms, count / SPW_TERMS * sizeof *terms, err);
}
