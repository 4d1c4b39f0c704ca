/*
 * Models of the Hugging Face hub by name, where "hf download OWNER/NAME" leaves them on this machine: CACHE/models--OWNER--NAME has a folder for each
 * commit that was fetched in snapshots/, and in refs/ the commit of each branch or tag that was asked for. Nothing is fetched here, and what lies
 * at the path itself comes first.
 * Source: documentation of huggingface_hub, "Understand caching" and "Environment variables".
 */
#include "files_internal.h"
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { COMMIT_BYTES_MAX = 256 };
static const char PREFIX[] = "models--", SNAPSHOTS[] = "/snapshots/";

/* One that the hub allows: letters, digits, -, _ and ., which neither begin nor end it, nor stand twice ("--", "..") in it. */
static bool
is_part(const char *text, size_t n)
{
    bool ok = n > 0 && n < SPW_HUB_NAME_BYTES && strchr("-.", text[0]) == NULL && strchr("-.", text[n - 1]) == NULL;
    for (size_t i = 0; i < n && ok; i++)
        ok = (isalnum((unsigned char)text[i]) || strchr("-_.", text[i]) != NULL) &&
             (i == 0 || text[i] != text[i - 1] || strchr("-.", text[i]) == NULL);
    return ok;
}

/* The folder of the model in the cache, and what stands behind @. False: this is no model's name, or there is no cache. */
static bool
read_name(const char *name, char folder[SPW_HUB_PATH_BYTES], const char **revision)
{
    const char *at = strchr(name, '@'), *slash = strchr(name, '/');
    const size_t n = at != NULL ? (size_t)(at - name) : strlen(name),
                 owner = slash != NULL ? (size_t)(slash - name) : 0;
    char cache[SPW_HUB_PATH_BYTES];
    int end;
    if (slash != NULL ? owner >= n || !is_part(name, owner) || !is_part(slash + 1, n - owner - 1) : !is_part(name, n))
        return false;
    *revision = at != NULL ? at + 1 : "main";
    if ((*revision)[0] == '.' || strstr(*revision, "/.") != NULL || !spw_hub_cache(cache))
        return false;
    end = slash != NULL ? snprintf(folder, SPW_HUB_PATH_BYTES, "%s/%s%.*s--%.*s", cache, PREFIX, (int)owner, name,
                                   (int)(n - owner - 1), slash + 1)
                        : snprintf(folder, SPW_HUB_PATH_BYTES, "%s/%s%.*s", cache, PREFIX, (int)n, name);
    return end < SPW_HUB_PATH_BYTES;
}

bool
spw_hub_cache(char out[SPW_HUB_PATH_BYTES])
{
    static const struct {
        const char *variable, *below;
    } places[] = {{"HF_HUB_CACHE", ""},
                  {"HUGGINGFACE_HUB_CACHE", ""},
                  {"HF_HOME", "/hub"},
                  {"XDG_CACHE_HOME", "/huggingface/hub"},
                  {"HOME", "/.cache/huggingface/hub"}};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const char *value = getenv(places[i].variable);
        if (value != NULL && value[0] != '\0')
            return snprintf(out, SPW_HUB_PATH_BYTES, "%s%s", value, places[i].below) < SPW_HUB_PATH_BYTES;
    }
    return false;
}

static bool
join(char out[SPW_HUB_PATH_BYTES], const char *folder, const char *between, const char *name)
{
    return snprintf(out, SPW_HUB_PATH_BYTES, "%s%s%s", folder, between, name) < SPW_HUB_PATH_BYTES;
}

/* The commit that a branch or tag stood for when it was fetched. */
static bool
read_ref(const char *folder, const char *revision, char commit[COMMIT_BYTES_MAX])
{
    char path[SPW_HUB_PATH_BYTES], *text = NULL;
    spw_error ignored = {0};
    bool read = join(path, folder, "/refs/", revision) &&
                spw_file_read_text(path, COMMIT_BYTES_MAX - 1, &text, &ignored) == SPW_OK;
    snprintf(commit, COMMIT_BYTES_MAX, "%.*s", read ? (int)strcspn(text, " \r\n") : 0, read ? text : "");
    spw_mem_free(text);
    return commit[0] != '\0' && strchr(commit, '/') == NULL && commit[0] != '.';
}

/* How many commits were fetched; the name of one of them. */
static uint32_t
count_snapshots(const char *folder, char one[COMMIT_BYTES_MAX])
{
    char path[SPW_HUB_PATH_BYTES];
    DIR *dir = join(path, folder, SNAPSHOTS, "") ? opendir(path) : NULL;
    uint32_t count = 0;
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(one, COMMIT_BYTES_MAX, "%.255s", e->d_name);
        count++;
    }
    if (dir != NULL)
        closedir(dir);
    return count;
}

bool
spw_hub_find(char out[SPW_HUB_PATH_BYTES], const char *path)
{
    char folder[SPW_HUB_PATH_BYTES], commit[COMMIT_BYTES_MAX];
    const char *revision;
    if (access(path, F_OK) == 0 || !read_name(path, folder, &revision))
        return false;
    if (read_ref(folder, revision, commit) && join(out, folder, SNAPSHOTS, commit) && access(out, F_OK) == 0)
        return true;
    if (strchr(path, '@') != NULL)
        return revision[0] != '\0' && join(out, folder, SNAPSHOTS, revision) && access(out, F_OK) == 0;
    return count_snapshots(folder, commit) == 1 && join(out, folder, SNAPSHOTS, commit);
}

uint32_t
spw_hub_count(const char *name)
{
    char folder[SPW_HUB_PATH_BYTES], one[COMMIT_BYTES_MAX];
    const char *revision;
    return read_name(name, folder, &revision) ? count_snapshots(folder, one) : 0;
}

bool
spw_hub_name(const char *folder, char name[SPW_HUB_NAME_BYTES], char commit[SPW_HUB_NAME_BYTES])
{
    const char *at = strstr(folder, SNAPSHOTS), *begin = at, *dashes;
    size_t n;
    while (begin != NULL && begin > folder && begin[-1] != '/')
        begin--;
    if (begin == NULL || strncmp(begin, PREFIX, sizeof PREFIX - 1) != 0)
        return false;
    begin += sizeof PREFIX - 1;
    at += sizeof SNAPSHOTS - 1;
    n = strcspn(at, "/");
    if (n == 0 || n >= SPW_HUB_NAME_BYTES || at[n + strspn(at + n, "/")] != '\0')
        return false;
    snprintf(commit, SPW_HUB_NAME_BYTES, "%.*s", (int)n, at);
    n = (size_t)(at - begin) - (sizeof SNAPSHOTS - 1);
    if (n >= SPW_HUB_NAME_BYTES)
        return false;
    snprintf(name, SPW_HUB_NAME_BYTES, "%.*s", (int)n, begin);
    dashes = strstr(name, "--");
    if (dashes != NULL) {
        const size_t owner = (size_t)(dashes - name);
        name[owner] = '/';
        memmove(name + owner + 1, dashes + 2, strlen(dashes + 2) + 1);
    }
    return true;
}
