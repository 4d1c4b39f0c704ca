/*
 * Recognising a file and opening it as a row of tokens: bytes of text and llm.c's streams here, Megatron's datasets and
 * cached tokens in files of their own. Nothing is mapped: a mapping's pages count as the process's memory.
 */
#include "data_internal.h"
#include "spw_files.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LLMC_HEADER_BYTES = 1024, LLMC_U16 = 20240520, LLMC_U32 = 20240801, START_BYTES = 16 };

static const char *const format_names[SPW_DATA_FORMAT_COUNT] = {"auto", "text", "llm.c", "megatron", "jsonl"};

const char *
spw_data_format_name(spw_data_format f)
{
    return f < SPW_DATA_FORMAT_COUNT ? format_names[f] : "?";
}

bool
spw_data_format_parse(const char *name, spw_data_format *out)
{
    for (int f = 0; f < SPW_DATA_FORMAT_COUNT; f++) {
        if (strcmp(name, format_names[f]) == 0) {
            *out = (spw_data_format)f;
            return true;
        }
    }
    return false;
}

uint32_t
spw__data_element_bytes(data_element e)
{
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 8, 2, 4};
    return bytes[e];
}

/* ---------------------------------------------------------------- reading */

spw_status
spw__data_fd(int *out, const char *path, bool scattered, spw_error *err)
{
    *out = SPW_CALL(EIO, open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)); /* a FIFO is refused, not waited for */
    if (*out < 0)
        return SPW_RAISE_SYS(err, errno, "data: open %s", path);
    if (scattered)
        (void)posix_fadvise(*out, 0, 0, POSIX_FADV_RANDOM); /* windows: what lies beside them is not asked for soon */
    return SPW_OK;
}

spw_status
spw__data_read(int fd, const char *path, uint64_t offset, void *data, uint64_t bytes, spw_error *err)
{
    spw_status st = spw_file_read_at(fd, path, data, bytes, offset, err);
    if (st != SPW_OK)
        spw_error_wrap(err, "data");
    return st;
}

/* ---------------------------------------------------------------- recognising */

/* How files begin that somebody may take for training data. */
static const struct {
    const char *bytes;
    uint32_t count;
    const char *what;
} known[] = {
    {"BIN.TOK\n", 8, "an llmq token stream"},
    {"\x1f\x8b", 2, "compressed with gzip"},
    {"\x28\xb5\x2f\xfd", 4, "compressed with zstd"},
    {"BZh", 3, "compressed with bzip2"},
    {"\xfd"
     "7zXZ",
     5, "compressed with xz"},
    {"PK\x03\x04", 4, "a zip archive"},
    {"PAR1", 4, "a Parquet table"},
    {"ARROW1", 6, "an Arrow table"},
    {"\x93NUMPY", 6, "a NumPy array"},
};

/* llm.c's other files. */
static const char *
llmc_kind(uint64_t magic)
{
    switch (magic) {
    case 20240522: return "llm.c's multiple-choice evaluation data";
    case 20240326: return "llm.c's weights";
    case 20240327: return "llm.c's reference state";
    case 20240328: return "llm.c's tokenizer";
    case 20240527: return "llm.c's optimizer state";
    default: return NULL;
    }
}

static bool
ends_in(const char *path, const char *extension)
{
    size_t n = strlen(path), m = strlen(extension);
    return n > m && strcasecmp(path + n - m, extension) == 0;
}

/* path with its last `cut` bytes replaced by extension. NULL: no memory. */
static char *
with_extension(const char *path, size_t cut, const char *extension)
{
    size_t n = strlen(path) - cut, m = strlen(extension);
    char *out = spw_mem_zalloc(n + m + 1);
    if (out != NULL) {
        memcpy(out, path, n);
        memcpy(out + n, extension, m);
    }
    return out;
}

static spw_status
recognise(const char *path, const unsigned char *start, uint64_t bytes, bool has_index, spw_data_format *out,
          spw_error *err)
{
    uint64_t magic = bytes >= 4 ? spw__data_le(start, 4) : 0;
    *out = SPW_DATA_TEXT;
    if (bytes == 0 && !ends_in(path, ".bin"))
        return SPW_OK;
    if (magic == LLMC_U16 || magic == LLMC_U32) {
        *out = SPW_DATA_LLMC;
        return SPW_OK;
    }
    if (bytes >= 9 && memcmp(start, "MMIDIDX\0\0", 9) == 0) {
        *out = SPW_DATA_MEGATRON;
        return SPW_OK;
    }
    if (llmc_kind(magic) != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s is %s (magic %llu at offset 0), not a stream of tokens", path,
                         llmc_kind(magic), (unsigned long long)magic);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (bytes >= known[i].count && memcmp(start, known[i].bytes, known[i].count) == 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED,
                             "data: %s is %s, which is not read (data.format text takes its bytes as tokens)", path,
                             known[i].what);
    }
    if (ends_in(path, ".bin") && has_index)
        *out = SPW_DATA_MEGATRON;
    else if (ends_in(path, ".bin"))
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "data: %s is neither llm.c's (magic at offset 0 is %llu, not %d or %d) nor Megatron's (no .idx "
            "beside it); data.format text takes its bytes as tokens",
            path, (unsigned long long)magic, LLMC_U16, LLMC_U32);
    else if (ends_in(path, ".idx"))
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "data: %s is not Megatron's index: no \"MMIDIDX\" at offset 0 (data.format text takes its bytes "
            "as tokens)",
            path);
    else if (spw_data_name_is_jsonl(path))
        *out = SPW_DATA_JSONL;
    return SPW_OK;
}

/* ---------------------------------------------------------------- opening */

/*
 *   0  i32 magic | 4  i32 version: 1 with uint16, 7 with uint32 | 8  i32 token count | zeros up to 1024 | tokens
 */
spw_status
spw__data_llmc_open(data_file *f, int fd, const spw_data_options *o, spw_error *err)
{
    unsigned char header[12];
    uint64_t magic, version, count, size;
    bool wide;
    if (f->bytes < LLMC_HEADER_BYTES)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s has %llu bytes, llm.c's header alone has %d", f->path,
                         (unsigned long long)f->bytes, LLMC_HEADER_BYTES);
    SPW_TRY(spw__data_read(fd, f->path, 0, header, sizeof header, err));
    magic = spw__data_le(header, 4);
    version = spw__data_le(header + 4, 4);
    count = spw__data_le(header + 8, 4);
    wide = magic == LLMC_U32;
    if (!wide && magic != LLMC_U16)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: magic at offset 0 is %llu, llm.c's are %d and %d", f->path,
                         (unsigned long long)magic, LLMC_U16, LLMC_U32);
    if (version != (wide ? 7 : 1))
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s: version at offset 4 is %llu, %d is known for magic %llu",
                         f->path, (unsigned long long)version, wide ? 7 : 1, (unsigned long long)magic);
    if (count > INT32_MAX)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: token count at offset 8 is negative", f->path);
    size = LLMC_HEADER_BYTES + count * (wide ? 4 : 2);
    if (f->bytes != size)
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "data: %s: token count at offset 8 is %llu: a file of %llu bytes, but it has %llu%s", f->path,
                         (unsigned long long)count, (unsigned long long)size, (unsigned long long)f->bytes,
                         f->bytes < size ? " (truncated)" : "");
    f->element = wide ? E_U32 : E_U16;
    f->begin = LLMC_HEADER_BYTES;
    f->tokens = count;
    f->delimiter = o->end_of_text_set ? o->end_of_text : wide ? 128000 : 50256;
    return SPW_OK;
}

/* Megatron's dataset by any of its names: PREFIX, PREFIX.bin, PREFIX.idx. */
static spw_status
name_dataset(data_file *f, const char *path, spw_error *err)
{
    size_t cut = ends_in(path, ".bin") || ends_in(path, ".idx") ? 4 : 0;
    f->path = with_extension(path, cut, ".bin");
    f->index = with_extension(path, cut, ".idx");
    f->store = with_extension(path, cut, ".bin");
    return f->path != NULL && f->index != NULL && f->store != NULL ? SPW_OK
                                                                   : SPW_RAISE(err, SPW_ENOMEM, "name of %s", path);
}

static spw_status
open_as(data_file *f, const char *path, const struct stat *info, const spw_data_options *o, spw_error *err)
{
    struct stat bin = *info;
    spw_status st;
    int index;
    if (f->format == SPW_DATA_MEGATRON) {
        SPW_TRY(name_dataset(f, path, err));
    } else if ((f->path = spw_mem_strdup(path)) == NULL || (f->store = spw_mem_strdup(path)) == NULL) {
        return SPW_RAISE(err, SPW_ENOMEM, "name of %s", path);
    }
    if (f->format == SPW_DATA_JSONL ||
        (f->format == SPW_DATA_TEXT && (o->encode != NULL || o->documents == SPW_DOCUMENTS_WHOLE))) {
        f->bytes = (uint64_t)info->st_size;
        return spw__data_encode(f, o, err);
    }
    if (o->documents == SPW_DOCUMENTS_WHOLE)
        spw_log(
            SPW_LOG_NOTE,
            "data: %s: windows cut documents of %s tokens, which lie as they are (data.documents whole is for text and "
            "JSON lines)",
            f->path, spw_data_format_name(f->format));
    SPW_TRY(spw__data_fd(&f->fd, f->path, true, err));
    if (fstat(f->fd, &bin) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->path);
    f->bytes = (uint64_t)bin.st_size;
    f->delimiter = -1;
    if (f->format == SPW_DATA_LLMC)
        return spw__data_llmc_open(f, f->fd, o, err);
    if (f->format == SPW_DATA_TEXT) {
        f->element = E_U8;
        f->tokens = f->bytes;
        return SPW_OK;
    }
    SPW_TRY(spw__data_fd(&index, f->index, false, err));
    st = spw__data_megatron_open(f, index, err);
    close(index);
    return st;
}

spw_status
spw__data_file_open(data_file *f, const char *path, const spw_data_options *o, spw_error *err)
{
    unsigned char start[START_BYTES] = {0};
    struct stat info, beside;
    spw_status st = SPW_OK;
    char *idx = with_extension(path, ends_in(path, ".bin") ? 4 : 0, ".idx");
    bool has_index = idx != NULL && stat(idx, &beside) == 0;
    int fd;
    f->fd = -1;
    f->delimiter = -1;
    if (idx == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "name of %s", path);
    spw_mem_free(idx);
    SPW_TRY(spw__data_fd(&fd, path, false, err));
    if (fstat(fd, &info) != 0) {
        st = SPW_RAISE_SYS(err, errno, "data: size of %s", path);
    } else if (S_ISDIR(info.st_mode)) {
        close(fd);
        return SPW_OK;
    } else if (!S_ISREG(info.st_mode)) {
        st = SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s is not a file that can be read at any place", path);
    }
    f->format = o->format;
    if (st == SPW_OK && o->format == SPW_DATA_AUTO) {
        uint64_t n = (uint64_t)info.st_size < START_BYTES ? (uint64_t)info.st_size : START_BYTES;
        st = spw__data_read(fd, path, 0, start, n, err);
        if (st == SPW_OK)
            st = recognise(path, start, (uint64_t)info.st_size, has_index, &f->format, err);
    }
    close(fd);
    return st == SPW_OK ? open_as(f, path, &info, o, err) : st;
}

void
spw__data_file_close(data_file *f)
{
    if (f->store != NULL && f->fd >= 0)
        close(f->fd);
    spw_mem_free(f->path);
    spw_mem_free(f->store);
    spw_mem_free(f->index);
    *f = (data_file){.fd = -1};
}
