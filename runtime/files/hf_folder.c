/*
 * What lies in a model's folder beside the weights: its config.json and the files that say how it is used, carried over from the
 * folder it came from; and what an interrupted save has left there.
 */
#include "files_internal.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK_BYTES = 16384, PATH_MAX_BYTES = 1100 };

/* The model's own config, with the token ids that the source has outside or in its text part, if there is one. */
static json_t *
own_config(const spw_model_config *config, const json_t *source, spw_dtype dtype)
{
    static const char *const ids[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    const json_t *inner = json_object_get(source, "text_config");
    char *text = spw_hf_config_text(config, dtype);
    json_t *root = text != NULL ? json_loads(text, 0, NULL) : NULL;
    spw_mem_free(text);
    for (size_t i = 0; root != NULL && i < sizeof ids / sizeof ids[0]; i++) {
        json_t *outside = json_object_get(source, ids[i]);
        json_object_set(root, ids[i], outside != NULL ? outside : json_object_get(inner, ids[i]));
    }
    return root;
}

spw_status
spw_hf_config_carry(char **text_out, const spw_model_config *config, const char *source, spw_dtype dtype,
                    spw_error *err)
{
    static const char *const names[] = {[SPW_F32] = "float32", [SPW_BF16] = "bfloat16", [SPW_F16] = "float16"};
    char file[SPW_HF_CONFIG_PATH_BYTES], *text;
    json_t *root, *whole = NULL;
    *text_out = NULL;
    if (source != NULL)
        SPW_TRY(spw__hf_folder_config(&whole, file, source, err));
    root = whole == NULL || spw__hf_has_images(whole) ? own_config(config, whole, dtype) : json_incref(whole);
    json_decref(whole);
    (void)json_object_del(root, "quantization_config"); /* what is written is not quantised */
    (void)json_object_del(root, "auto_map"); /* Python files that are not written; transformers has the class itself */
    if (source != NULL)
        json_object_set_new(root, "model_type", json_string(spw_family_name(config->family))); /* not "kimi_k2" */
    if (json_object_get(root, "dtype") != NULL)
        json_object_set_new(root, "dtype", json_string(names[dtype]));
    if (json_object_get(root, "torch_dtype") != NULL || json_object_get(root, "dtype") == NULL)
        json_object_set_new(root, "torch_dtype", json_string(names[dtype]));
    text = root != NULL ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    *text_out = text != NULL ? spw_mem_strdup(text) : NULL;
    free(text);
    return *text_out != NULL ? SPW_OK : SPW_RAISE(err, SPW_ENOMEM, "config.json");
}

/* A block at a time: a tokenizer can be 20 MB. */
static spw_status
copy_file(const char *source, const char *target, spw_error *err)
{
    char block[BLOCK_BYTES];
    int in = open(source, O_RDONLY | O_CLOEXEC), out = -1;
    spw_status st = SPW_OK;
    ssize_t n = 0;
    if (in < 0)
        return SPW_RAISE_SYS(err, errno, "opening %s", source);
    out = open(target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (out < 0)
        st = SPW_RAISE_SYS(err, errno, "creating %s", target);
    while (st == SPW_OK && (n = read(in, block, sizeof block)) != 0) {
        if (n < 0 && errno != EINTR)
            st = SPW_RAISE_SYS(err, errno, "reading %s", source);
        for (ssize_t at = 0, k; st == SPW_OK && at < n; at += k) {
            k = write(out, block + at, (size_t)(n - at));
            if (k < 0 && errno != EINTR)
                st = SPW_RAISE_SYS(err, errno, "writing %s", target);
            k = k < 0 ? 0 : k;
        }
    }
    if (st == SPW_OK && fsync(out) != 0)
        st = SPW_RAISE_SYS(err, errno, "writing %s", target);
    close(in);
    if (out >= 0)
        close(out);
    return st;
}

#define GENERATION "generation_config.json"
static const char *const companions[] = {"tokenizer.json",    "tokenizer_config.json", "vocab.json",
                                         "merges.txt",        "tokenizer.model",       "special_tokens_map.json",
                                         "added_tokens.json", "chat_template.jinja",   GENERATION,
                                         "tiktoken.model",    "tokenization_kimi.py",  "tool_declaration_ts.py"};
enum { COMPANIONS = sizeof companions / sizeof companions[0] };

/* A file, as name in the folder; nothing where there is none. */
static spw_status
copy_to(const char *source, const char *to, const char *name, spw_error *err)
{
    char target[PATH_MAX_BYTES + 64];
    snprintf(target, sizeof target, "%.1000s/%s", to, name);
    return access(source, F_OK) == 0 ? copy_file(source, target, err) : SPW_OK;
}

/* Of those files the ones that are the model's, or the tokenizer's. */
static spw_status
copy_from(const char *from, bool models, const char *to, spw_error *err)
{
    for (size_t i = 0; i < COMPANIONS; i++) {
        char source[PATH_MAX_BYTES + 64];
        snprintf(source, sizeof source, "%.1000s/%s", from, companions[i]);
        if (models == (strcmp(companions[i], GENERATION) == 0))
            SPW_TRY(copy_to(source, to, companions[i], err));
    }
    return SPW_OK;
}

spw_status
spw_hf_copy_companions(const char *model, const char *tokenizer, const char *to, spw_error *err)
{
    static const char *const read_beside[] = {"tokenizer_config.json",
                                              "chat_template.jinja"}; /* whatever its name is */
    char folder[PATH_MAX_BYTES + 64];
    struct stat info;
    char *name;
    if (model != NULL)
        SPW_TRY(copy_from(model, true, to, err));
    if (tokenizer == NULL || stat(tokenizer, &info) != 0)
        return SPW_OK;
    snprintf(folder, sizeof folder, "%s%.1000s", tokenizer[0] == '/' || S_ISDIR(info.st_mode) ? "" : "./", tokenizer);
    if (S_ISDIR(info.st_mode))
        return copy_from(folder, false, to, err);
    name = strrchr(folder, '/');
    *name++ = '\0';
    if (strcmp(name, "tokenizer.json") == 0 || strcmp(name, "vocab.json") == 0 || strcmp(name, "tiktoken.model") == 0)
        return copy_from(folder, false, to, err);
    SPW_TRY(copy_to(tokenizer, to, "tokenizer.json", err)); /* by another name, beside whatever */
    for (size_t i = 0; i < sizeof read_beside / sizeof read_beside[0]; i++) {
        char source[PATH_MAX_BYTES + 128];
        snprintf(source, sizeof source, "%s/%s", folder, read_beside[i]);
        SPW_TRY(copy_to(source, to, read_beside[i], err));
    }
    return SPW_OK;
}

/* Of a file in a model's folder as it is written, or of what it is called until it is complete. */
static bool
is_model_file(const char *name)
{
    static const char *const globs[] = {"config.json",       "adapter_config.json",      "model.safetensors.index.json",
                                        "model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"};
    const char *tmp = strstr(name, ".tmp-");
    char whole[256];
    bool is = false;
    snprintf(whole, sizeof whole, "%.*s", tmp != NULL ? (int)(tmp - name) : 255, name);
    for (size_t i = 0; i < COMPANIONS; i++)
        is = is || strcmp(whole, companions[i]) == 0;
    for (size_t i = 0; i < sizeof globs / sizeof globs[0]; i++)
        is = is || fnmatch(globs[i], whole, 0) == 0;
    return is;
}

spw_status
spw_hf_remove_partial(const char *path, spw_error *err)
{
    DIR *dir = opendir(path);
    const struct dirent *entry;
    char other[256] = "";
    if (dir == NULL && errno == ENOENT)
        return SPW_OK;
    if (dir == NULL)
        return SPW_RAISE_SYS(err, errno, "open folder %s", path);
    while (other[0] == '\0' && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && !is_model_file(entry->d_name))
            snprintf(other, sizeof other, "%.255s", entry->d_name);
    }
    closedir(dir);
    if (other[0] != '\0')
        return SPW_RAISE_SYS(
            err, EEXIST, "%s, where files are to be written first, has %s, which no save leaves there; move it away",
            path, other);
    return spw_dir_remove(path, err);
}
