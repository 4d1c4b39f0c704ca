#include "lib_folder.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

void
folder_path(char path[400], const char *name, const char *file)
{
    snprintf(path, 400, "tests/vectors/scaled/%s/%s", name, file);
}

struct tensor *
folder_add(folder *f, const char *name, const char *type, uint32_t ndim, const uint64_t *shape, uint64_t bytes)
{
    struct tensor *t = &f->tensors[f->count++];
    assert_true(f->count <= TENSORS_MAX);
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    snprintf(t->type, sizeof t->type, "%s", type);
    t->ndim = ndim;
    memcpy(t->shape, shape, ndim * sizeof *shape);
    t->bytes = bytes;
    t->data = malloc(bytes);
    assert_non_null(t->data);
    return t;
}

struct tensor *
folder_find(folder *f, const char *name)
{
    uint32_t i = 0;
    while (i < f->count && strcmp(f->tensors[i].name, name) != 0)
        i++;
    assert_true(i < f->count);
    return &f->tensors[i];
}

folder *
folder_make(void)
{
    folder *f = calloc(1, sizeof *f);
    assert_non_null(f);
    tiny_dir_make(f->dir);
    return f;
}

folder *
folder_read(const char *name)
{
    folder *f = folder_make();
    spw_st_reader *r = NULL;
    spw_error err = {0};
    char path[400], *text;
    folder_path(path, name, "config.json");
    DONE(spw_file_read_text(path, TEXT_BYTES - 1, &text, &err));
    snprintf(f->config, sizeof f->config, "%s", text);
    spw_mem_free(text);
    folder_path(path, name, "model.safetensors");
    DONE(spw_st_reader_open(&r, path, &err));
    for (uint32_t i = 0; i < spw_st_reader_count(r); i++) {
        const spw_tensor_info *t = spw_st_reader_tensor(r, i);
        DONE(spw_st_read(r, t, 0, folder_add(f, t->name, t->type, t->ndim, t->shape, t->bytes)->data, t->bytes, &err));
    }
    spw_st_reader_close(r);
    return f;
}

void
folder_write(const folder *f)
{
    char path[400], *header = calloc(1, (size_t)TENSORS_MAX * 400), *at = header;
    uint64_t begin = 0, n;
    spw_error err = {0};
    FILE *out;
    assert_non_null(header);
    at += sprintf(at, "{");
    for (uint32_t i = 0; i < f->count; begin += f->tensors[i++].bytes) {
        const struct tensor *t = &f->tensors[i];
        at += sprintf(at, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i > 0 ? "," : "", t->name, t->type);
        for (uint32_t d = 0; d < t->ndim; d++)
            at += sprintf(at, d > 0 ? ",%llu" : "%llu", (unsigned long long)t->shape[d]);
        at += sprintf(at, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                      (unsigned long long)(begin + t->bytes));
    }
    at += sprintf(at, "}");
    n = (uint64_t)(at - header);
    snprintf(path, sizeof path, "%s/model.safetensors", f->dir);
    out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(&n, 1, 8, out), 8);
    assert_int_equal(fwrite(header, 1, n, out), n);
    for (uint32_t i = 0; i < f->count; i++)
        assert_int_equal(fwrite(f->tensors[i].data, 1, f->tensors[i].bytes, out), f->tensors[i].bytes);
    assert_int_equal(fclose(out), 0);
    free(header);
    snprintf(path, sizeof path, "%s/config.json", f->dir);
    if (f->config[0] != '\0')
        DONE(spw_file_write_text(path, f->config, &err));
    else
        (void)remove(path);
}

void
folder_free(folder *f)
{
    for (uint32_t i = 0; i < f->count; i++)
        free(f->tensors[i].data);
    tiny_dir_remove(f->dir);
    free(f);
}

void
folder_replace(folder *f, const char *what, const char *with)
{
    char *at = strstr(f->config, what), rest[TEXT_BYTES];
    if (at == NULL)
        fail_msg("config.json has no %s", what);
    snprintf(rest, sizeof rest, "%s", at + strlen(what));
    snprintf(at, sizeof f->config - (size_t)(at - f->config), "%s%s", with, rest);
}
