/*
 * Finds the MPI plugin and loads it. It is a file of its own, spillway-mpi.so, so that the program starts on machines
 * without MPI: beside this code (the program or libspillway.so), in ../lib/spillway of it, or where SPW_MPI_PLUGIN says.
 */
#include "comm_internal.h"
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const PLUGIN = "spillway-mpi.so";

/* The folder of the file that holds this function. */
static bool
own_folder(char *out, size_t out_bytes)
{
    Dl_info info;
    char path[PATH_MAX] = "", *slash;
    ssize_t n;
    if (dladdr((void *)(uintptr_t)&spw__mpi_load, &info) == 0 || info.dli_fname == NULL ||
        realpath(info.dli_fname, path) == NULL ||
        access(path, R_OK) != 0) { /* a program found by PATH has its bare name */
        n = readlink("/proc/self/exe", path, sizeof path - 1);
        if (n <= 0)
            return false;
        path[n] = '\0';
    }
    slash = strrchr(path, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    snprintf(out, out_bytes, "%s", path);
    return true;
}

static void *
load(char *why, size_t why_bytes)
{
    /* the build's folder of tests and examples is one below the plugin's */
    static const char *const below[] = {"", "/../lib/spillway", "/..", "/spillway"};
    const char *asked = getenv("SPW_MPI_PLUGIN");
    char folder[PATH_MAX], path[PATH_MAX + 64];
    snprintf(why, why_bytes, "%s was not found beside the program", PLUGIN);
    if (asked != NULL && asked[0] != '\0') {
        void *plugin = dlopen(asked, RTLD_NOW | RTLD_GLOBAL);
        if (plugin == NULL)
            snprintf(why, why_bytes, "SPW_MPI_PLUGIN: %s", dlerror());
        return plugin;
    }
    if (!own_folder(folder, sizeof folder))
        return NULL;
    for (size_t i = 0; i < sizeof below / sizeof *below; i++) {
        void *plugin;
        snprintf(path, sizeof path, "%s%s/%s", folder, below[i], PLUGIN);
        if (access(path, R_OK) != 0)
            continue;
        plugin = dlopen(path, RTLD_NOW | RTLD_GLOBAL); /* global: MPI loads parts of itself that look for the rest */
        if (plugin == NULL)
            snprintf(why, why_bytes, "%s", dlerror());
        return plugin;
    }
    return NULL;
}

spw_status
spw__mpi_load(spw__transport **out, uint64_t deadline_ns, spw_error *err)
{
    char why[400];
    spw__mpi_open_fn open_mpi;
    void *plugin = load(why, sizeof why), *symbol; /* stays loaded: MPI cannot be taken out of a process */
    *out = NULL;
    if (plugin == NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "MPI is not there: %s", why);
    symbol = dlsym(plugin, SPW__MPI_PLUGIN_SYMBOL);
    if (symbol == NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "MPI is not there: %s", dlerror());
    memcpy(&open_mpi, &symbol, sizeof open_mpi);
    return open_mpi(out, SPW_VERSION, SPW__TRANSPORT_SIZES, deadline_ns, err);
}
