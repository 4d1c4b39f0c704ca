/* See lib_dataset.h. */
#include "lib_dataset.h"
#include "lib_tiny.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

char dataset_dir[256];

int
dataset_dir_make(void **state)
{
    (void)state;
    tiny_dir_make(dataset_dir);
    return 0;
}

int
dataset_dir_remove(void **state)
{
    (void)state;
    tiny_dir_remove(dataset_dir);
    return 0;
}

const char *
dataset_path(const char *name)
{
    static char paths[8][600];
    static unsigned next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dataset_dir, name);
    return path;
}

void
dataset_write_bytes(const char *name, const void *data, size_t bytes)
{
    FILE *f = fopen(dataset_path(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
}

void
dataset_write_windows(const char *name, int bytes, int first)
{
    FILE *f = fopen(dataset_path(name), "wb");
    assert_non_null(f);
    for (int i = 0; i < bytes; i++)
        fputc((first + i / T) % 256, f); /* window w starts with byte first + w */
    fclose(f);
}

void
dataset_write_text(const char *name, const char *text)
{
    dataset_write_bytes(name, text, strlen(text));
}

void
dataset_put(FILE *f, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++)
        fputc((int)(x >> 8 * i & 255), f);
}

void
dataset_write_llmc(const char *name, uint64_t magic, uint64_t version, uint64_t count, uint64_t base)
{
    FILE *f = fopen(dataset_path(name), "wb");
    assert_non_null(f);
    dataset_put(f, magic, 4);
    dataset_put(f, version, 4);
    dataset_put(f, count, 4);
    for (int i = 3; i < 256; i++)
        dataset_put(f, 0, 4);
    for (uint64_t i = 0; i < count; i++)
        dataset_put(f, base + i, magic == 20240520 ? 2 : 4);
    fclose(f);
}

void
dataset_write_llmq(const char *name, uint64_t version, uint64_t count, uint64_t base, bool loss)
{
    FILE *f = fopen(dataset_path(name), "wb");
    assert_non_null(f);
    fwrite("BIN.TOK\n", 1, 8, f);
    dataset_put(f, version, 4);
    dataset_put(f, 4, 4);
    dataset_put(f, count, 4);
    for (int i = 20; i < 1024; i++)
        fputc('*', f); /* what its writer leaves there */
    for (uint64_t i = 0; i < count; i++)
        dataset_put(f, base + i, 4);
    for (uint64_t i = 0; loss && i < count; i += 8) {
        uint64_t bits = 0;
        for (uint64_t k = 0; k < 8; k++)
            bits |= (uint64_t)((i + k) % 3 != 0) << k;
        dataset_put(f, bits, 1);
    }
    fclose(f);
}

void
dataset_write_megatron(const char *prefix, int code, int width, uint64_t base, const uint32_t *lengths,
                       uint64_t sequences, const uint64_t *documents, uint64_t ends)
{
    char name[300];
    FILE *f;
    uint64_t at = 0;
    snprintf(name, sizeof name, "%s.idx", prefix);
    f = fopen(dataset_path(name), "wb");
    assert_non_null(f);
    fwrite("MMIDIDX\0\0", 1, 9, f);
    dataset_put(f, 1, 8);
    dataset_put(f, (uint64_t)code, 1);
    dataset_put(f, sequences, 8);
    dataset_put(f, ends, 8);
    for (uint64_t i = 0; i < sequences; i++)
        dataset_put(f, lengths[i], 4);
    for (uint64_t i = 0; i < sequences; i++) {
        dataset_put(f, at * (uint64_t)width, 8);
        at += lengths[i];
    }
    for (uint64_t i = 0; i < ends; i++)
        dataset_put(f, documents[i], 8);
    fclose(f);
    snprintf(name, sizeof name, "%s.bin", prefix);
    f = fopen(dataset_path(name), "wb");
    assert_non_null(f);
    for (uint64_t i = 0; i < at; i++)
        dataset_put(f, base + i, width);
    fclose(f);
}

spw_data_options
dataset_options(const char *pattern)
{
    static char paths[8][600], cache[300];
    static const char *patterns[8];
    static unsigned next;
    unsigned slot = next++ % 8;
    snprintf(paths[slot], sizeof paths[slot], "%s/%s", dataset_dir, pattern);
    patterns[slot] = paths[slot];
    snprintf(cache, sizeof cache, "%s/cache", dataset_dir);
    return (spw_data_options){.patterns = &patterns[slot], .pattern_count = 1, .seq_length = T, .cache_dir = cache};
}

spw_status
dataset_try(spw_data **d, const char *pattern, double split, uint64_t seed, spw_error *err)
{
    spw_data_options o = dataset_options(pattern);
    o.validation_split = split;
    o.seed = seed;
    return spw_data_open(d, &o, err);
}

spw_data *
dataset_open(const spw_data_options *o)
{
    spw_data *d = NULL;
    spw_error err = {0};
    if (spw_data_open(&d, o, &err) != SPW_OK)
        fail_msg("%s", err.message);
    return d;
}

void
dataset_fill(const spw_data *d, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets)
{
    spw_error err = {0};
    if (spw_data_fill(d, split, first, count, tokens, targets, &err) != SPW_OK)
        fail_msg("%s", err.message);
}

void
dataset_refuse(const spw_data_options *o, spw_status st, ...)
{
    spw_data *d = NULL;
    spw_error err = {0};
    long live = spw_test_live_allocs();
    va_list texts;
    spw_status got = spw_data_open(&d, o, &err);
    const char *text;
    if (got != st)
        fail_msg("%s, wanted %s: %s", spw_status_name(got), spw_status_name(st), err.message);
    assert_null(d);
    assert_int_equal(spw_test_live_allocs(), live);
    va_start(texts, st);
    while ((text = va_arg(texts, const char *)) != NULL) {
        if (strstr(err.message, text) == NULL)
            fail_msg("no \"%s\" in: %s", text, err.message);
    }
    va_end(texts);
}

void
dataset_patch(const char *name, long offset, uint64_t x, int bytes)
{
    FILE *f = fopen(dataset_path(name), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, offset, SEEK_SET), 0);
    dataset_put(f, x, bytes);
    fclose(f);
}
