/*
 * libFuzzer target: any bytes as training data are read or refused, never a crash, a leak or a read outside the file. The
 * first byte says as what: llm.c's stream, Megatron's index (beside a .bin of the length that its second byte says),
 * JSON lines (conversations by a bit of the second), or whatever is recognised; the third how windows are drawn. A bit of
 * the second puts a header in front that is right, because chance seldom writes one. Runs in the repository's root.
 */
#include "spw_chat.h"
#include "spw_data.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static char dir[64];

static void
cleanup(void)
{
    static const char *const names[] = {"x.bin", "x.idx", "x.jsonl", "x"};
    char path[128];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        (void)unlink(path);
    }
    (void)rmdir(dir);
}

/* Removes the cache folder and the tokens in it. */
static void
empty(const char *cache)
{
    DIR *open_dir = opendir(cache);
    char path[512];
    for (struct dirent *e; open_dir != NULL && (e = readdir(open_dir)) != NULL;) {
        snprintf(path, sizeof path, "%s/%s", cache, e->d_name);
        if (e->d_name[0] != '.')
            (void)unlink(path);
    }
    if (open_dir != NULL)
        closedir(open_dir);
    (void)rmdir(cache);
}

static void
put_file(const char *path, const void *head, size_t head_bytes, const uint8_t *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    if (f == NULL)
        abort();
    fwrite(head, 1, head_bytes, f);
    fwrite(data, 1, bytes, f);
    fclose(f);
}

static spw_status
no_words(void *ctx, const char *text, uint64_t bytes, bool rest, int32_t *tokens, uint64_t max, uint64_t *count,
         spw_error *err)
{
    (void)ctx, (void)text, (void)rest, (void)err;
    *count = bytes / 3;
    for (uint64_t i = 0; i < *count && *count <= max; i++)
        tokens[i] = (int32_t)i % 500;
    return SPW_OK;
}

/* A layout on a small tokenizer, opened once. */
static spw_chat *
layout(spw_tokenizer **t)
{
    static spw_tokenizer *tokenizer;
    static spw_chat *chat;
    spw_error err = {0};
    if (chat == NULL && (spw_tokenizer_open(&tokenizer, "tests/vectors/tok_qwen2.json", &err) != SPW_OK ||
                         spw_chat_open(&chat, "auto", tokenizer, &err) != SPW_OK))
        abort();
    *t = tokenizer;
    return chat;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const uint8_t zeros[256 * 8];
    static const uint8_t index[17] = "MMIDIDX\0\0\1";
    int32_t header[256] = {20240520, 1};
    size_t head_bytes = 0;
    char path[128], bin[128], cache[128];
    const char *pattern = path;
    int32_t tokens[2][40], targets[2][40];
    spw_data_options o = {.patterns = &pattern, .pattern_count = 1, .validation_split = 0.2, .cache_dir = cache};
    spw_error err = {0};
    spw_data *d = NULL;
    if (bytes < 3)
        return 0;
    if (dir[0] == '\0') {
        const char *tmp = getenv("TMPDIR");
        snprintf(dir, sizeof dir, "%.40s/spw-fuzz-XXXXXX", tmp != NULL ? tmp : "/tmp");
        if (mkdtemp(dir) == NULL)
            abort();
        atexit(cleanup);
    }
    snprintf(bin, sizeof bin, "%s/x.bin", dir);
    snprintf(cache, sizeof cache, "%s/cache", dir);
    snprintf(path, sizeof path, "%s/x%s", dir, (const char *[]){".bin", ".idx", ".jsonl", ""}[data[0] % 4]);
    if (data[0] % 4 == 1)
        put_file(bin, zeros, 0, zeros, data[1] * 8u);
    if ((data[1] & 4) != 0 && data[0] % 4 < 2)
        head_bytes = data[0] % 4 == 0 ? sizeof header : sizeof index;
    header[2] = (int32_t)((bytes - 3) / 2);
    put_file(path, data[0] % 4 == 0 ? (const void *)header : index, head_bytes, data + 3, bytes - 3);
    o.seq_length = data[2] % 40 + 1;
    o.documents = (spw_documents)((data[2] >> 6) % 3);
    o.vocab = data[2] & 128 ? 256 : 0;
    o.prompt_field = data[1] & 1 ? "p" : NULL;
    o.text_field = data[1] & 16 ? "i" : NULL;
    o.pairs = data[0] % 4 == 2 && (data[1] & 32) != 0;
    o.documents = o.pairs ? SPW_DOCUMENTS_WHOLE : o.documents;
    o.encode = data[1] & 2 ? no_words : NULL;
    o.encode_key = bytes;
    if (data[1] & 8) {
        spw_tokenizer *t;
        o.chat = layout(&t);
        o.encode = spw_tokenizer_encode_data;
        o.encode_ctx = t;
    }
    if (spw_data_open(&d, &o, &err) == SPW_OK) {
        for (uint64_t p = 0; p < 3; p++)
            (void)spw_data_fill(d, SPW_SPLIT_TRAIN, p, 2, tokens[0], targets[0], &err);
        (void)spw_data_fill(d, SPW_SPLIT_VALIDATION, 0, 2, tokens[0], targets[0], &err);
    } else if (err.message[0] == '\0') {
        abort();
    }
    spw_data_close(d);
    (void)unlink(path);
    (void)unlink(bin);
    empty(cache);
    return 0;
}
