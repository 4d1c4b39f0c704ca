/*
 * libFuzzer target: any bytes as a file of torch.save, and any pickle in such a file, in the files of a checkpoint of DeepSpeed and as what describes
 * one of PyTorch, are read or refused, never a crash or a leak. The first byte says which: a file; a pickle, and a checkpoint of stage 1 or 2; of
 * stage 3; .metadata.
 */
#include "pickle.h"
#include <isa-l/crc.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum { STORAGES = 100, STORAGE_BYTES = 8192, ROOM = 1 << 20 };

static uint8_t file[ROOM];
static size_t at;

static void
put(const void *bytes, size_t n)
{
    if (n > ROOM - at)
        abort();
    memcpy(file + at, bytes, n);
    at += n;
}

static void
put_uint(uint64_t x, int n)
{
    for (int i = 0; i < n; i++) {
        uint8_t b = i < 8 ? (uint8_t)(x >> (8 * i)) : 0;
        put(&b, 1);
    }
}

/* A member's header, before its bytes (central false) or in the directory. */
static void
put_header(bool central, const char *name, uint32_t crc, size_t bytes, size_t header_at)
{
    put(central ? "PK\1\2\0\0\0\0\0\0\0\0\0\0\0\0" : "PK\3\4\0\0\0\0\0\0\0\0\0\0", central ? 16 : 14);
    put_uint(crc, 4);
    put_uint(bytes, 4);
    put_uint(bytes, 4);
    put_uint(strlen(name), 2);
    put_uint(0, 2);
    if (central) {
        put_uint(0, 10);
        put_uint(header_at, 4);
    }
    put(name, strlen(name));
}

/* An archive with this pickle, and storages that are all the same zeros. */
static void
wrap(const uint8_t *pickle, size_t bytes)
{
    static const uint8_t zeros[STORAGE_BYTES];
    uint32_t crc = crc32_gzip_refl(0, pickle, bytes);
    size_t storage_at, directory_at;
    at = 0;
    put_header(false, "a/data.pkl", crc, bytes, 0);
    put(pickle, bytes);
    storage_at = at;
    put_header(false, "a/data/0", 0, STORAGE_BYTES, 0);
    put(zeros, sizeof zeros);
    directory_at = at;
    put_header(true, "a/data.pkl", crc, bytes, 0);
    for (int i = 0; i < STORAGES; i++) {
        char name[20];
        snprintf(name, sizeof name, "a/data/%d", i);
        put_header(true, name, 0, STORAGE_BYTES, storage_at);
    }
    storage_at = at;
    put("PK\5\6\0\0\0\0", 8);
    put_uint(STORAGES + 1, 2);
    put_uint(STORAGES + 1, 2);
    put_uint(storage_at - directory_at, 4);
    put_uint(directory_at, 4);
    put_uint(0, 2);
}

static void
write_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(bytes, 1, n, f) != n || fclose(f) != 0)
        abort();
}

static void
read_all(spw_hf_reader *r)
{
    spw_error err = {0};
    for (uint32_t i = 0; i < spw_hf_reader_count(r); i++) {
        const spw_tensor_info *t = spw_hf_reader_tensor(r, i, NULL);
        char first[8];
        (void)spw_hf_read(r, i, 0, first, t->bytes < sizeof first ? t->bytes : sizeof first, &err);
        (void)spw_hf_read(r, i, t->bytes - (t->bytes < sizeof first ? t->bytes : sizeof first), first,
                          t->bytes < sizeof first ? t->bytes : sizeof first, &err);
    }
}

static const char *
folder(void)
{
    static char dir[64];
    if (dir[0] != '\0')
        return dir;
    snprintf(dir, sizeof dir, "%.30s/spw-fuzz-torch-XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    if (mkdtemp(dir) == NULL)
        abort();
    return dir;
}

static void
try_file(const void *bytes, size_t n)
{
    char path[100];
    spw_hf_reader *r = NULL;
    spw_error err = {0};
    snprintf(path, sizeof path, "%s/file", folder());
    write_file(path, bytes, n);
    if (spw_hf_reader_open(&r, path, &err) == SPW_OK)
        read_all(r);
    spw_hf_reader_close(r);
}

static void
read_checkpoint(void)
{
    spw_hf_reader *r = NULL;
    spw_foreign *f;
    spw_error err = {0};
    if (spw_foreign_open(&f, folder(), &err) != SPW_OK)
        return;
    if (spw_foreign_weights(f, &r, &err) == SPW_OK)
        read_all(r);
    spw_hf_reader_close(r);
    spw_foreign_close(f);
}

static void
try_checkpoint(bool stage3)
{
    char optimizer[200], states[200];
    snprintf(optimizer, sizeof optimizer, "%s/zero_pp_rank_0_mp_rank_00_optim_states.pt", folder());
    snprintf(states, sizeof states, "%s/%smp_rank_00_model_states.pt", folder(), stage3 ? "zero_pp_rank_0_" : "");
    write_file(optimizer, file, at);
    write_file(states, file, at);
    read_checkpoint();
    unlink(states);
}

/* .metadata, beside a file whose every item is a tensor of (2, 3). */
static void
try_metadata(const uint8_t *data, size_t bytes)
{
    static const char tensor[] =
        "\x80\x02"
        "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storage"
        "ctorch\nFloatStorage\nX\x01\0\0\0000X\x03\0\0\0cpuK\x06tQK\0K\x02K\x03\x86K\x03K\x01\x86\x89)tR.";
    char path[200];
    wrap((const uint8_t *)tensor, sizeof tensor - 1);
    snprintf(path, sizeof path, "%s/__0_0.distcp", folder());
    write_file(path, file, at);
    snprintf(path, sizeof path, "%s/.metadata", folder());
    write_file(path, data, bytes);
    read_checkpoint();
    unlink(path);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    spw__pickle *p;
    spw_error err = {0};
    if (bytes < 1 || bytes > ROOM / 2)
        return 0;
    if (data[0] % 4 == 0) {
        try_file(data + 1, bytes - 1);
        return 0;
    }
    if (spw__pickle_parse(&p, data + 1, bytes - 1, "fuzz", &err) != SPW_OK)
        return 0;
    json_decref(spw__py_json(spw__pickle_root(p)));
    spw__pickle_free(p);
    if (data[0] % 4 == 3) {
        try_metadata(data + 1, bytes - 1);
        return 0;
    }
    wrap(data + 1, bytes - 1);
    try_file(file, at);
    try_checkpoint(data[0] % 4 == 2);
    return 0;
}
