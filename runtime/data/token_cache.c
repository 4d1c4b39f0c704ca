/*
 * Text and JSON lines as a file of tokens in a cache folder. Without one, finding the n-th window of JSON lines would need an
 * index in memory and parsing at every use; with it, all formats are rows of tokens that are read by window.
 *
 *   0  "SPWTOKEN" | 8  u32 version 2 | 12  u32 bytes per token, 2 or 4 | 16  u64 key | 24  u64 tokens | 32  u64 documents
 *   40  u64 windows in which no token has a target | 48  u64 documents longer than a window | 56  u64 targets, 0: not counted | tokens: the two
 *   top bits are CACHE_FIRST and CACHE_NO_LOSS. Of pairs of answers 32 counts pairs, and 48 those that were left out.
 *
 * Two bytes hold vocabularies up to 16384. The key says what the tokens were made from and how: the file's path, size and
 * time, the fields, pairs, the encoder, the layout of conversations, the token that ends texts, and windows where they are laid out or
 * counted; the file is named by it. It is written without a name, or
 * beside its place where the file system knows no such files, and put there when complete: a kill leaves nothing that looks like a
 * cache, or nothing at all, and of runs that make it at the same time the first one's stays. Nothing deletes caches; anybody may.
 */
#include "encode_internal.h"
#include "spw_files.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { VERSION = 2, HEADER_BYTES = 64, NARROW_VOCAB = 16384 };

static spw_status
cache_folder(const spw_data_options *o, char folder[PATH_MAX], spw_error *err)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    spw_status st;
    int n = 0;
    if (o->cache_dir != NULL && o->cache_dir[0] != '\0')
        n = snprintf(folder, PATH_MAX, "%s", o->cache_dir);
    else if (xdg != NULL && xdg[0] == '/')
        n = snprintf(folder, PATH_MAX, "%s/spillway/tokens", xdg);
    else if (home != NULL && home[0] == '/')
        n = snprintf(folder, PATH_MAX, "%s/.cache/spillway/tokens", home);
    if (n <= 0)
        return SPW_RAISE(
            err, SPW_EINVAL,
            "data.cache_dir is needed for tokens of text and JSON lines: neither $XDG_CACHE_HOME nor $HOME "
            "is an absolute path");
    if (n >= PATH_MAX - 64)
        return SPW_RAISE(err, SPW_EINVAL, "data.cache_dir is longer than %d bytes", PATH_MAX - 65);
    st = spw_dir_make(folder, err);
    if (st != SPW_OK)
        spw_error_wrap(err, o->cache_dir != NULL && o->cache_dir[0] != '\0'
                                ? "data.cache_dir"
                                : "data.cache_dir, which is below $XDG_CACHE_HOME or $HOME where nothing says it");
    return st;
}

static uint64_t
more(uint64_t sum, const char *text)
{
    return spw_checksum_more(sum, text, strlen(text) + 1);
}

uint64_t
spw__data_chat_key(const spw_data_options *o)
{
    return more(spw_chat_key(o->chat), o->messages_field != NULL ? o->messages_field : "");
}

uint64_t
spw_data_encode_key(const spw_data_options *o)
{
    const spw_begin *b = &o->begin_of_text;
    return b->count > 0 ? spw_checksum_more(o->encode_key, b->ids, b->count * sizeof b->ids[0]) : o->encode_key;
}

/* Whether tokens of f may have no loss, so that windows are worth counting. */
static bool
hides_targets(const data_file *f, const spw_data_options *o)
{
    return f->format == SPW_DATA_JSONL &&
           (f->of_tokens || o->pairs || o->chat != NULL || (o->prompt_field != NULL && o->prompt_field[0] != '\0'));
}

static uint64_t
key_of(const data_file *f, const struct stat *info, const spw_data_options *o, bool wide)
{
    const uint64_t numbers[] = {VERSION,
                                (uint64_t)info->st_size,
                                (uint64_t)info->st_mtim.tv_sec,
                                (uint64_t)info->st_mtim.tv_nsec,
                                (uint64_t)f->format,
                                o->encode != NULL,
                                o->encode != NULL || o->begin_of_text.count > 0 ? spw_data_encode_key(o) : 0,
                                o->end_of_text_set ? (uint64_t)o->end_of_text : UINT64_MAX,
                                wide};
    char *real = realpath(f->path, NULL);
    uint64_t sum = spw_checksum_more(0, numbers, sizeof numbers);
    sum = more(sum, real != NULL ? real : f->path);
    free(real);
    if (f->format == SPW_DATA_JSONL) {
        if (o->pairs) {
            sum = spw__data_pair_key(o, sum);
        } else {
            sum = more(sum, spw__encoding_text_field(o));
            sum = more(sum, o->prompt_field != NULL ? o->prompt_field : "");
        }
        if (f->of_tokens)
            sum = more(more(sum, "documents of tokens"), o->labels_field != NULL ? o->labels_field : "");
        if (o->chat != NULL) {
            const uint64_t chat = spw__data_chat_key(o);
            sum = spw_checksum_more(sum, &chat, sizeof chat);
        }
    }
    if (o->documents == SPW_DOCUMENTS_WHOLE || hides_targets(f, o)) {
        const uint64_t windows[] = {o->documents, o->seq_length};
        sum = spw_checksum_more(sum, windows, sizeof windows);
    }
    return sum;
}

/* Takes an open cache file if it is what f needs. SPW_ECORRUPT: it is something else; other errors are of reading it. */
static spw_status
accept(data_file *f, const spw_data_options *o, uint64_t key, spw_error *err)
{
    unsigned char h[HEADER_BYTES];
    struct stat info;
    uint64_t width = f->element == E_CACHE32 ? 4 : 2, tokens;
    if (fstat(f->fd, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->store);
    SPW_TRY(spw__data_read(f->fd, f->store, 0, h, sizeof h, err));
    tokens = spw_get_le(h + 24, 8);
    if (memcmp(h, "SPWTOKEN", 8) != 0 || spw_get_le(h + 8, 4) != VERSION || spw_get_le(h + 12, 4) != width ||
        spw_get_le(h + 16, 8) != key || tokens > (uint64_t)INT64_MAX / 8 ||
        (uint64_t)info.st_size != HEADER_BYTES + tokens * width)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s changed while it was written", f->store);
    f->begin = HEADER_BYTES;
    f->tokens = tokens;
    f->targets = hides_targets(f, o) || o->documents == SPW_DOCUMENTS_WHOLE ? spw_get_le(h + 56, 8) : 0;
    f->untargeted = hides_targets(f, o) ? spw_get_le(h + 40, 8) : 0; /* else it may be other windows' */
    f->cut = o->documents == SPW_DOCUMENTS_WHOLE ? spw_get_le(h + 48, 8) : 0;
    f->pairs = o->pairs ? spw_get_le(h + 32, 8) : 0;
    return SPW_OK;
}

static spw_status
write_header(encoding *e, uint64_t key, spw_error *err)
{
    unsigned char h[HEADER_BYTES] = "SPWTOKEN";
    spw_put_le(h + 8, VERSION, 4);
    spw_put_le(h + 12, e->wide ? 4 : 2, 4);
    spw_put_le(h + 16, key, 8);
    spw_put_le(h + 24, e->tokens, 8);
    spw_put_le(h + 32, e->documents, 8);
    spw_put_le(h + 40, e->untargeted, 8);
    spw_put_le(h + 48, e->cut, 8);
    spw_put_le(h + 56, e->targets_seen, 8);
    if (SPW_CALL(EIO, pwrite(e->out, h, sizeof h, 0)) != (ssize_t)sizeof h || SPW_CALL(EIO, fsync(e->out)) != 0)
        return SPW_RAISE_SYS(err, errno != 0 ? errno : EIO, "data: write tokens of %s to %s", e->path, e->part);
    return SPW_OK;
}

/* O_TMPFILE needs the file system's help, and giving such a file its name /proc. */
static spw_status
open_part(encoding *e, const char *folder, spw_error *err)
{
    char link[64];
    e->out = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (e->out >= 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", e->out);
        e->nameless = access(link, F_OK) == 0;
    }
    if (e->out >= 0 && !e->nameless)
        close(e->out);
    if (!e->nameless)
        e->out = SPW_CALL(EIO, mkostemp(e->part, O_CLOEXEC));
    if (e->out < 0)
        return SPW_RAISE_SYS(err, errno, "data.cache_dir: make %s", e->part);
    (void)fchmod(e->out, e->mode); /* some file systems have no modes */
    return SPW_OK;
}

/* Opens the cache file if it is there and what f needs; anything else is made anew. */
static bool
open_made(data_file *f, const spw_data_options *o, uint64_t key)
{
    f->fd = open(f->store, O_RDONLY | O_CLOEXEC);
    if (f->fd >= 0 && accept(f, o, key, NULL) == SPW_OK) {
        (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM); /* as spw__data_fd() says of windows */
        return true;
    }
    if (f->fd >= 0)
        close(f->fd);
    f->fd = -1;
    return false;
}

/* Another user's, in a folder that everybody writes to and nobody removes others' files from. */
static spw_status
in_the_way(const char *name, int errnum, spw_error *err)
{
    return SPW_RAISE_SYS(err, errnum, "data.cache_dir has to be another folder: %s cannot be read, nor replaced", name);
}

/*
 * What has the name already stays if it is accepted: another run, on a host that shares the folder say, has put it there and may read it, and one
 * that opens it finds a name at any time: it is f's, too. What is not accepted is replaced.
 */
static spw_status
place(data_file *f, const encoding *e, uint64_t key, spw_error *err)
{
    const char *name = f->store;
    char link[64];
    if (!e->nameless) {
        if (open_made(f, e->o, key))
            return unlink(e->part) == 0 ? SPW_OK : SPW_RAISE_SYS(err, errno, "data.cache_dir: remove %s", e->part);
        if (SPW_CALL(EIO, rename(e->part, name)) == 0)
            return SPW_OK;
        return errno == EPERM ? in_the_way(name, errno, err)
                              : SPW_RAISE_SYS(err, errno, "data.cache_dir: rename %s to %s", e->part, name);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", e->out);
    while (SPW_CALL(EIO, linkat(AT_FDCWD, link, AT_FDCWD, name, AT_SYMLINK_FOLLOW)) != 0) {
        int why = errno;
        if (why == EEXIST && open_made(f, e->o, key))
            return SPW_OK;
        if (why != EEXIST)
            return SPW_RAISE_SYS(err, why, "data.cache_dir: name %s", name);
        if (unlink(name) != 0 && errno != ENOENT)
            return in_the_way(name, errno, err);
    }
    return SPW_OK;
}

static spw_status
make(data_file *f, encoding *e, uint64_t key, const char *folder, spw_error *err)
{
    spw_status st = spw__data_fd(&e->fd, f->path, false, err);
    if (st != SPW_OK)
        return st;
    f->made = true;
    spw_log(f->bytes >= NOTED_BYTES ? SPW_LOG_NOTE : SPW_LOG_INFO, "data: making tokens of %s (%llu bytes) in %s",
            f->path, (unsigned long long)f->bytes, f->store);
    SPW_TRY(open_part(e, folder, err));
    e->buffered = HEADER_BYTES; /* zeros until the rest is known */
    st = spw__encoding_run(e, f->format, err);
    if (st == SPW_OK)
        st = write_header(e, key, err);
    if (st == SPW_OK)
        st = place(f, e, key, err);
    if (st != SPW_OK && !e->nameless)
        (void)unlink(e->part);
    return st;
}

spw_status
spw__data_encode(data_file *f, const spw_data_options *o, spw_error *err)
{
    char folder[PATH_MAX], name[PATH_MAX + 64], part[PATH_MAX + 128];
    bool wide =
        o->vocab > NARROW_VOCAB ||
        (o->vocab == 0 && (o->encode != NULL || (o->end_of_text_set && (uint64_t)o->end_of_text >= NARROW_VOCAB)));
    struct stat info;
    encoding *e;
    spw_status st;
    uint64_t key;
    if (stat(f->path, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->path);
    if (f->format == SPW_DATA_JSONL)
        SPW_TRY(spw__encoding_see_first_line(f, o, err));
    SPW_TRY(cache_folder(o, folder, err));
    key = key_of(f, &info, o, wide);
    snprintf(name, sizeof name, "%s/%016llx.tokens", folder, (unsigned long long)key);
    snprintf(part, sizeof part, "%s.part-XXXXXX", name);
    spw_mem_free(f->store);
    if ((f->store = spw_mem_strdup(name)) == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "name of %s", name);
    f->element = wide ? E_CACHE32 : E_CACHE16;
    if (open_made(f, o, key))
        return SPW_OK;
    e = spw_mem_zalloc(sizeof *e);
    if (e == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "tokenising %s", f->path);
    *e = (encoding){.o = o,
                    .path = f->path,
                    .fd = -1,
                    .out = -1,
                    .part = part,
                    .wide = wide,
                    .of_tokens = f->of_tokens,
                    .mode = info.st_mode & S_IROTH ? 0644 : 0600};
    e->vocab = wide ? 1 << 30 : NARROW_VOCAB;
    e->vocab = o->vocab > 0 && o->vocab < e->vocab ? o->vocab : e->vocab;
    st = make(f, e, key, folder, err);
    spw__encoding_deinit(e);
    spw_mem_free(e);
    SPW_TRY(st);
    if (f->fd >= 0) /* another run's */
        return SPW_OK;
    SPW_TRY(spw__data_fd(&f->fd, f->store, true, err));
    return accept(f, o, key, err);
}
