/*
 * Status codes, error messages and the log line sink. An error is filled once, where the trouble is known best, and
 * gets phrases in front on its way up.
 */
#include "spw_base.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

static spw_log_fn log_fn;
static void *log_ctx;

const char *
spw_status_name(spw_status st)
{
    static const char *const names[SPW_STATUS_COUNT] = {
        "SPW_OK",    "SPW_EINVAL",    "SPW_ENOMEM",    "SPW_EIO",       "SPW_ENOSPC",    "SPW_ENOENT",
        "SPW_ESYS",  "SPW_ECORRUPT",  "SPW_ESTALE",    "SPW_ECONFIG",   "SPW_ENOFIT",    "SPW_EUNSUPPORTED",
        "SPW_EBUSY", "SPW_ECANCELED", "SPW_ETIMEDOUT", "SPW_EPOISONED", "SPW_ENONFINITE"};
    return (unsigned)st < SPW_STATUS_COUNT ? names[st] : "unknown status";
}

spw_status
spw_error_raise(spw_error *err, spw_status st, const char *fmt, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, fmt);
        err->status = st;
        err->sys_errno = 0;
        vsnprintf(err->message, sizeof err->message, fmt, args);
        va_end(args);
    }
    return st;
}

static spw_status
status_of_errno(int errnum)
{
    switch (errnum) {
    case ENOMEM: return SPW_ENOMEM;
    case ENOSPC:
    case EDQUOT:
    case EFBIG: return SPW_ENOSPC;
    case ENOENT:
    case ENOTDIR: return SPW_ENOENT;
    case EIO: return SPW_EIO;
    case EBUSY: return SPW_EBUSY;
    default: return SPW_ESYS;
    }
}

/* The limit behind a refusal that the kernel's own words do not name. */
static const char *
limit_of_errno(int errnum)
{
    switch (errnum) {
    case EMFILE: return " (limit: ulimit -n)";
    case ENFILE: return " (limit: sysctl fs.file-max)";
    case EFBIG: return " (limit: ulimit -f, or the file system's own)";
    default: return "";
    }
}

spw_status
spw_error_raise_sys(spw_error *err, int errnum, const char *fmt, ...)
{
    spw_status st = status_of_errno(errnum);
    if (err != NULL) {
        char what[600], reason[128];
        va_list args;
        va_start(args, fmt);
        vsnprintf(what, sizeof what, fmt, args);
        va_end(args);
        err->status = st;
        err->sys_errno = errnum;
        snprintf(err->message, sizeof err->message, "%s: %s%s", what, strerror_r(errnum, reason, sizeof reason),
                 limit_of_errno(errnum));
    }
    return st;
}

void
spw_error_wrap(spw_error *err, const char *fmt, ...)
{
    char phrase[300];
    size_t phrase_len, old_len;
    va_list args;
    if (err == NULL)
        return;
    va_start(args, fmt);
    vsnprintf(phrase, sizeof phrase - 2, fmt, args);
    va_end(args);
    phrase_len = strlen(phrase);
    memcpy(phrase + phrase_len, ": ", 2);
    phrase_len += 2;
    old_len = strlen(err->message);
    if (old_len > sizeof err->message - 1 - phrase_len) /* what no longer fits is the end of the old text */
        old_len = sizeof err->message - 1 - phrase_len;
    memmove(err->message + phrase_len, err->message, old_len);
    memcpy(err->message, phrase, phrase_len);
    err->message[phrase_len + old_len] = '\0';
}

void
spw_error_keep_first(spw_error *dst, const spw_error *src)
{
    if (dst != NULL && dst->status == SPW_OK)
        *dst = *src;
}

#ifdef SPW_CHECKED
void
spw_assert_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: invariant broken: %s\n", file, line, what);
    abort();
}
#endif

void
spw_log_set(spw_log_fn fn, void *ctx)
{
    log_fn = fn;
    log_ctx = ctx;
}

void
spw_log(spw_log_level level, const char *fmt, ...)
{
    char line[1024];
    va_list args;
    if (log_fn == NULL)
        return;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    log_fn(log_ctx, level, line);
}
