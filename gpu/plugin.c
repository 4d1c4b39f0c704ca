/*
 * Finds and opens the cuda plugin, spillway-cuda.so: nothing else of Spillway links CUDA, so one program starts on machines
 * with and without a GPU. It is sought beside the file that this code is in, one folder up (programs of the build), in the
 * lib folder next to that (installed programs), then wherever the system looks; SPW_CUDA_PLUGIN names one file instead.
 */
#include "gpu_internal.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Under lock. */
static const spw_gpu_calls *opened;

/* Folder of the library or program that holds this function; "" when the system does not tell. */
static void
own_folder(char *folder, size_t bytes)
{
    Dl_info where;
    char path[1024] = "", *resolved, *slash;
    ssize_t n;
    folder[0] = '\0';
    if (dladdr((const void *)&opened, &where) != 0 && where.dli_fname != NULL && strstr(where.dli_fname, ".so") != NULL)
        snprintf(path, sizeof path, "%s", where.dli_fname);
    else if ((n = readlink("/proc/self/exe", path, sizeof path - 1)) > 0)
        path[n] = '\0';
    resolved = path[0] != '\0' ? realpath(path, NULL) : NULL;
    if (resolved == NULL)
        return;
    slash = strrchr(resolved, '/');
    if (slash != NULL) {
        *slash = '\0';
        snprintf(folder, bytes, "%s", resolved);
    }
    free(resolved);
}

/* RTLD_LOCAL: the plugin brings its own copy of what it needs of the base. */
static void *
open_somewhere(char *sought, size_t bytes, spw_error *err)
{
    static const char *const places[] = {"", "/..", "/../lib"};
    const char *given = getenv("SPW_CUDA_PLUGIN");
    char folder[1024], path[1200];
    void *handle = NULL;
    own_folder(folder, sizeof folder);
    snprintf(sought, bytes, "%s", given != NULL ? given : folder[0] != '\0' ? folder : "the system's folders");
    if (given != NULL)
        handle = dlopen(given, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; given == NULL && handle == NULL && folder[0] != '\0' && i < sizeof places / sizeof places[0];
         i++) {
        snprintf(path, sizeof path, "%s%s/spillway-cuda.so", folder, places[i]);
        if (access(path, R_OK) != 0)
            continue;
        handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (handle == NULL) { /* there, and it does not open: that is the reason to tell */
            SPW_RAISE(err, SPW_EUNSUPPORTED, "the cuda plugin does not open: %s", dlerror());
            return NULL;
        }
    }
    if (handle == NULL && given == NULL)
        handle = dlopen("spillway-cuda.so", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL && given != NULL)
        SPW_RAISE(err, SPW_EUNSUPPORTED, "SPW_CUDA_PLUGIN does not open: %s", dlerror());
    else if (handle == NULL)
        SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "no cuda plugin: spillway-cuda.so is not in %s nor in the lib folder beside it (make builds it where nvcc "
            "is; SPW_CUDA_PLUGIN names another file)",
            sought);
    return handle;
}

spw_status
spw__gpu_cuda_calls(const spw_gpu_calls **out, spw_error *err)
{
    spw_status st = SPW_OK;
    pthread_mutex_lock(&lock);
    if (opened == NULL) {
        char sought[1024];
        void *handle = open_somewhere(sought, sizeof sought, err), *symbol;
        spw_gpu_plugin_fn plugin = NULL;
        if (handle == NULL) {
            st = SPW_EUNSUPPORTED;
        } else if ((symbol = dlsym(handle, SPW_GPU_PLUGIN_SYMBOL)) == NULL) {
            st = SPW_RAISE(err, SPW_EUNSUPPORTED, "%s is no cuda plugin: %s", sought, dlerror());
            dlclose(handle);
        } else {
            memcpy(&plugin, &symbol, sizeof plugin); /* C has no cast from an object pointer to a function pointer */
            opened = plugin();
            if (opened->abi != SPW_GPU_ABI) {
                st = SPW_RAISE(err, SPW_EUNSUPPORTED, "the cuda plugin in %s was built for another version of Spillway",
                               sought);
                opened = NULL;
                dlclose(handle);
            }
        }
    }
    *out = opened;
    pthread_mutex_unlock(&lock);
    return st;
}
