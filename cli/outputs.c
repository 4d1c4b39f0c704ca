/*
 * What a command writes at its end, looked at before its work: a run of hours is not lost to a name that could have been
 * refused at once. Nothing is made. A disk that fills up meanwhile still fails at the end.
 */
#include "cli.h"
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

void
cli_nearest(char out[SPW_PATH_BYTES], const char *path)
{
    struct stat info;
    snprintf(out, SPW_PATH_BYTES, "%s", path);
    while (out[0] != '\0' && stat(out, &info) != 0 && errno == ENOENT) {
        char *slash = strrchr(out, '/');
        if (slash == NULL)
            snprintf(out, SPW_PATH_BYTES, ".");
        else
            slash[slash == out] = '\0'; /* "/x" is in "/" */
    }
}

spw_status
cli_check_folder(const char *what, const char *path, spw_error *err)
{
    char nearest[SPW_PATH_BYTES];
    struct stat info;
    cli_nearest(nearest, path);
    if (stat(nearest, &info) == 0 && !S_ISDIR(info.st_mode))
        return SPW_RAISE(err, SPW_EINVAL, "%s %s: %s is not a folder", what, path, nearest);
    if (access(nearest, W_OK | X_OK) != 0)
        return SPW_RAISE_SYS(err, errno, "%s %s: writing to %s", what, path, nearest);
    return SPW_OK;
}

spw_status
cli_check_file(const char *what, const char *path, spw_error *err)
{
    char folder[SPW_PATH_BYTES], *slash;
    struct stat info;
    if (stat(path, &info) == 0) {
        if (S_ISDIR(info.st_mode))
            return SPW_RAISE_SYS(err, EISDIR, "%s %s", what, path);
        return access(path, W_OK) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "%s %s", what, path);
    }
    snprintf(folder, sizeof folder, "%s", path);
    slash = strrchr(folder, '/');
    if (slash == NULL)
        snprintf(folder, sizeof folder, ".");
    else
        slash[slash == folder] = '\0';
    return access(folder, W_OK | X_OK) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "%s %s", what, path);
}
