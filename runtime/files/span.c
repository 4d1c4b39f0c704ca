/*
 * Stretches of files in a row, read as if they were one file. A safetensors file is a span of one stretch; a checkpoint whose ranks each
 * wrote their part of every tensor is one of many, and who reads a tensor does not see where the next part begins, nor that what is read
 * is the transpose of what is stored.
 */
#include "files_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct file {
    char *path;
    spw__large_file large;
    uint64_t bytes;
    int64_t mtime_ns;
    void *map; /* NULL: not mapped */
} file;

enum { TURNED = UINT32_MAX, COLUMN_BYTES = 4096 };

/* [at, at + bytes) of the span is [offset, offset + bytes) of a file, or the matrix turned[offset]. */
typedef struct stretch {
    uint64_t at, bytes, offset;
    uint32_t file_idx; /* TURNED: in none */
} stretch;

/* (rows, cols), whose transpose begins at source in the span. */
typedef struct turned {
    uint64_t source, rows, cols;
    uint32_t elem_bytes;
} turned;

struct spw__span {
    file *files;
    stretch *stretches; /* (stretch_count) in order, without gaps */
    turned *turned;
    uint64_t files_bytes, stretches_bytes, turned_bytes; /* of these arrays */
    uint32_t file_count, stretch_count, turned_count, users;
};

spw_status
spw__span_create(spw__span **out, spw_error *err)
{
    *out = spw_mem_zalloc(sizeof **out);
    if (*out == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "span of files");
    (*out)->users = 1;
    return SPW_OK;
}

spw__span *
spw__span_share(spw__span *s)
{
    s->users++;
    return s;
}

void
spw__span_release(spw__span *s)
{
    if (s == NULL || --s->users > 0)
        return;
    for (uint32_t i = 0; i < s->file_count; i++) {
        file *f = &s->files[i];
        if (f->map != NULL)
            munmap(f->map, f->bytes);
        if (f->large.direct_fd >= 0)
            close(f->large.direct_fd);
        if (f->large.fd >= 0)
            close(f->large.fd);
        spw_mem_free(f->path);
    }
    spw_mem_free(s->files);
    spw_mem_free(s->stretches);
    spw_mem_free(s->turned);
    spw_mem_free(s);
}

spw_status
spw__span_open(spw__span *s, const char *path, uint32_t *file_idx, spw_error *err)
{
    struct stat info;
    file *f;
    if (!spw_mem_grow((void **)&s->files, &s->files_bytes, (s->file_count + 1) * sizeof *f, s->file_count * sizeof *f))
        return SPW_RAISE(err, SPW_ENOMEM, "span of files");
    f = &s->files[s->file_count];
    f->large = (spw__large_file){.fd = -1, .direct_fd = -1};
    f->path = spw_mem_strdup(path);
    if (f->path == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "span of files");
    *file_idx = s->file_count++;
    f->large.path = f->path;
    f->large.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (f->large.fd < 0 || fstat(f->large.fd, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "open %s", path);
    f->bytes = (uint64_t)info.st_size;
    f->mtime_ns = (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec;
    return SPW_OK;
}

uint64_t
spw__span_file_bytes(const spw__span *s, uint32_t file_idx)
{
    return s->files[file_idx].bytes;
}

spw_status
spw__span_file_read(const spw__span *s, uint32_t file_idx, void *data, uint64_t bytes, uint64_t offset, spw_error *err)
{
    const file *f = &s->files[file_idx];
    return spw_file_read_at(f->large.fd, f->path, data, bytes, offset, err);
}

uint64_t
spw__span_bytes(const spw__span *s)
{
    const stretch *last = s->stretch_count > 0 ? &s->stretches[s->stretch_count - 1] : NULL;
    return last != NULL ? last->at + last->bytes : 0;
}

static spw_status
append(spw__span *s, uint32_t file_idx, uint64_t offset, uint64_t bytes, spw_error *err)
{
    if (!spw_mem_grow((void **)&s->stretches, &s->stretches_bytes, (s->stretch_count + 1) * sizeof *s->stretches,
                      s->stretch_count * sizeof *s->stretches))
        return SPW_RAISE(err, SPW_ENOMEM, "span of files");
    s->stretches[s->stretch_count] = (stretch){spw__span_bytes(s), bytes, offset, file_idx};
    s->stretch_count++;
    return SPW_OK;
}

spw_status
spw__span_add(spw__span *s, uint32_t file_idx, uint64_t offset, uint64_t bytes, spw_error *err)
{
    stretch *last = s->stretch_count > 0 ? &s->stretches[s->stretch_count - 1] : NULL;
    SPW_ASSERT(offset <= s->files[file_idx].bytes && bytes <= s->files[file_idx].bytes - offset);
    if (bytes == 0)
        return SPW_OK;
    if (last != NULL && last->file_idx == file_idx && last->offset + last->bytes == offset) {
        last->bytes += bytes;
        return SPW_OK;
    }
    return append(s, file_idx, offset, bytes, err);
}

spw_status
spw__span_add_turned(spw__span *s, uint64_t source, uint64_t rows, uint64_t cols, uint32_t elem_bytes, spw_error *err)
{
    uint64_t bytes = rows * cols * elem_bytes;
    SPW_ASSERT(source + bytes <= spw__span_bytes(s));
    if (bytes == 0)
        return SPW_OK;
    if (!spw_mem_grow((void **)&s->turned, &s->turned_bytes, (s->turned_count + 1) * sizeof *s->turned,
                      s->turned_count * sizeof *s->turned))
        return SPW_RAISE(err, SPW_ENOMEM, "span of files");
    s->turned[s->turned_count] = (turned){source, rows, cols, elem_bytes};
    return append(s, TURNED, s->turned_count++, bytes, err);
}

/* That has this byte, which is in the span. */
static const stretch *
find(const spw__span *s, uint64_t at)
{
    uint32_t low = 0, high = s->stretch_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (s->stretches[middle].at <= at)
            low = middle;
        else
            high = middle;
    }
    return &s->stretches[low];
}

/*
 * Elements [first, first + count) of a turned matrix, column by column: each is a row where it is stored. What is read again for the next
 * stretch of the matrix comes from the page cache, which is no memory of this process as a mapping would be.
 */
static spw_status
read_turned(const spw__span *s, const turned *t, uint64_t first, uint64_t count, char *out, spw_error *err)
{
    const uint64_t size = t->elem_bytes, end = first + count;
    char column[COLUMN_BYTES];
    for (uint64_t c = 0; c < t->cols; c++) {
        uint64_t row = first > c ? (first - c + t->cols - 1) / t->cols : 0;
        uint64_t row_end = end > c ? (end - c + t->cols - 1) / t->cols : 0;
        for (uint64_t n; row < row_end; row += n) {
            n = row_end - row < COLUMN_BYTES / size ? row_end - row : COLUMN_BYTES / size;
            SPW_TRY(spw__span_read(s, column, n * size, t->source + (c * t->rows + row) * size, err));
            for (uint64_t i = 0; i < n; i++)
                memcpy(out + ((row + i) * t->cols + c - first) * size, column + i * size, size);
        }
    }
    return SPW_OK;
}

spw_status
spw__span_read(const spw__span *s, void *data, uint64_t bytes, uint64_t at, spw_error *err)
{
    char *to = data;
    for (uint64_t n; bytes > 0; at += n, to += n, bytes -= n) {
        const stretch *p = find(s, at);
        n = p->at + p->bytes - at < bytes ? p->at + p->bytes - at : bytes;
        if (p->file_idx == TURNED) {
            const turned *t = &s->turned[p->offset];
            SPW_ASSERT((at - p->at) % t->elem_bytes == 0 && n % t->elem_bytes == 0);
            SPW_TRY(read_turned(s, t, (at - p->at) / t->elem_bytes, n / t->elem_bytes, to, err));
        } else {
            const file *f = &s->files[p->file_idx];
            SPW_TRY(spw_file_read_at(f->large.fd, f->path, to, n, p->offset + (at - p->at), err));
        }
    }
    return SPW_OK;
}

void
spw__span_past_cache(spw__span *s)
{
    for (uint32_t i = 0; i < s->file_count; i++) {
        if (s->files[i].large.direct_fd < 0)
            spw__large_open(&s->files[i].large, s->files[i].path, O_RDONLY);
    }
}

spw_status
spw__span_read_run(const spw__span *s, char *buffer, uint64_t at, uint64_t *bytes, char **data, spw_error *err)
{
    const stretch *p = find(s, at);
    uint64_t offset = p->offset + (at - p->at), room = p->at + p->bytes - at;
    *bytes = room < *bytes ? room : *bytes;
    *data = p->file_idx == TURNED ? buffer : spw__bounce_at(buffer, offset);
    if (p->file_idx == TURNED)
        return spw__span_read(s, buffer, *bytes, at, err);
    return spw__bounce_read(&s->files[p->file_idx].large, buffer, offset, *bytes, err);
}

bool
spw__span_extent(const spw__span *s, uint64_t at, uint64_t bytes, spw_st_extent *out)
{
    const stretch *p = s->stretch_count > 0 ? find(s, at) : NULL;
    if (p == NULL || p->file_idx == TURNED || at + bytes > p->at + p->bytes)
        return false;
    *out = (spw_st_extent){s->files[p->file_idx].path, s->files[p->file_idx].bytes, p->offset + (at - p->at),
                           s->files[p->file_idx].mtime_ns};
    return true;
}

spw_status
spw__span_map(spw__span *s, uint64_t at, const uint8_t **out, spw_error *err)
{
    const stretch *p = find(s, at);
    file *f = &s->files[p->file_idx];
    void *map = f->map != NULL ? f->map : mmap(NULL, f->bytes, PROT_READ, MAP_PRIVATE, f->large.fd, 0);
    if (map == MAP_FAILED)
        return SPW_RAISE_SYS(err, errno, "mapping %s", f->path);
    f->map = map;
    *out = (const uint8_t *)map + p->offset + (at - p->at);
    return SPW_OK;
}

spw_status
spw__span_check_maps(const spw__span *s, spw_error *err)
{
    for (uint32_t i = 0; i < s->file_count; i++) {
        const file *f = &s->files[i];
        struct stat info;
        if (f->map != NULL && fstat(f->large.fd, &info) == 0 && (uint64_t)info.st_size < f->bytes)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s was cut off while it was read: it has %lld of %llu bytes", f->path,
                             (long long)info.st_size, (unsigned long long)f->bytes);
    }
    return SPW_OK;
}
