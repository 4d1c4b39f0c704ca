/*
 * libFuzzer target: any bytes as a config.json are read or refused, and what was read is written and read back the same;
 * as the index of a folder with one shard they are read or refused. Never a crash or a leak.
 */
#include "spw_files.h"
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void
try_config(const char *text, bool section)
{
    spw_model_config m, again;
    spw_error err = {0};
    char *written;
    if (spw_hf_config_parse(&m, text, "fuzz", section, &err) != SPW_OK)
        return;
    written = spw_hf_config_text(&m, SPW_F32);
    if (written == NULL || spw_hf_config_parse(&again, written, "again", true, &err) != SPW_OK ||
        memcmp(&m, &again, sizeof m) != 0)
        abort();
    spw_mem_free(written);
}

static const char *
folder(void)
{
    static char dir[64];
    spw_tensor_info t[2] = {{.name = "a", .ndim = 1, .shape = {2}}, {.name = "b", .ndim = 1, .shape = {3}}};
    spw_st_writer *w = NULL;
    char path[100];
    if (dir[0] != '\0')
        return dir;
    snprintf(dir, sizeof dir, "%.40s/spw-fuzz-hf-XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    if (mkdtemp(dir) == NULL)
        abort();
    snprintf(path, sizeof path, "%s/s", dir);
    if (spw_st_writer_create(&w, path, t, 2, NULL) != SPW_OK || spw_st_writer_commit(w, NULL) != SPW_OK)
        abort();
    spw_st_writer_destroy(w);
    return dir;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    char *text = spw_mem_zalloc(bytes + 1), path[100];
    spw_hf_reader *r = NULL;
    spw_error err = {0};
    FILE *f;
    if (text == NULL)
        return 0;
    memcpy(text, data, bytes);
    try_config(text, false);
    try_config(text, true);
    spw_mem_free(text);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder());
    f = fopen(path, "wb");
    if (f == NULL || fwrite(data, 1, bytes, f) != bytes)
        abort();
    fclose(f);
    (void)spw_hf_reader_open(&r, folder(), &err);
    spw_hf_reader_close(r);
    return 0;
}
