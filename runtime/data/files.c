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

enum { LLMC_HEADER_BYTES = 1024, LLMC_U16 = 20240520, LLMC_U32 = 20240801 };
#define LLMQ_MAGIC "BIN.TOK\n"
enum { START_BYTES = 4096, FIRST_LINE_BYTES = 1 << 20 };

static const char *const format_names[SPW_DATA_FORMAT_COUNT] = {"auto", "text", "llm.c", "llmq", "megatron", "jsonl"};

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

#define AS_TEXT "data.format text, or --format text, takes its bytes as they are"
#define AS_ROWS "write its rows as JSON lines, as to_json() of datasets does"

/* How files begin that somebody may take for training data, and what to do with them. */
static const struct {
    const char *bytes;
    uint32_t count;
    const char *what, *advice;
} known[] = {
    {"\x1f\x8b", 2, "compressed with gzip", "unpack it with gunzip"},
    {"\x28\xb5\x2f\xfd", 4, "compressed with zstd", "unpack it with unzstd"},
    {"BZh", 3, "compressed with bzip2", "unpack it with bunzip2"},
    {"\xfd"
     "7zXZ",
     5, "compressed with xz", "unpack it with unxz"},
    {"PK\x03\x04", 4, "a zip archive", "unpack it with unzip"},
    {"PAR1", 4, "a Parquet table", AS_ROWS},
    {"ARROW1", 6, "an Arrow table", AS_ROWS},
    {"\xff\xff\xff\xff", 4, "a stream of Arrow tables", AS_ROWS},
    {"\x93NUMPY", 6, "a NumPy array", "write its tokens as llm.c's or Megatron's file"},
    {"\xff\xfe", 2, "text in UTF-16", "iconv -f UTF-16 -t UTF-8 writes it as it is read"},
    {"\xfe\xff", 2, "text in UTF-16", "iconv -f UTF-16 -t UTF-8 writes it as it is read"},
    {"%PDF-", 5, "a PDF", "take the text out of it, with pdftotext say"},
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

/* The length of its header in eight bytes, then the header: eight letters would be a length beyond any file. */
static bool
is_safetensors(const unsigned char *start, uint64_t bytes)
{
    return bytes > 8 && start[8] == '{' && spw_get_le(start, 8) <= bytes - 8;
}

static spw_status
refuse_binary(const char *path, const unsigned char *start, uint64_t bytes, spw_error *err)
{
    uint64_t magic = bytes >= 4 ? spw_get_le(start, 4) : 0;
    if (llmc_kind(magic) != NULL)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s is %s (magic %llu at offset 0), not a stream of tokens", path,
                         llmc_kind(magic), (unsigned long long)magic);
    if (is_safetensors(start, bytes))
        return SPW_RAISE(
            err, SPW_EUNSUPPORTED,
            "data: %s is a safetensors file, which holds weights: model.path takes their folder (" AS_TEXT ")", path);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (bytes >= known[i].count && memcmp(start, known[i].bytes, known[i].count) == 0)
            return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s is %s, which is not read: %s (" AS_TEXT ")", path,
                             known[i].what, known[i].advice);
    }
    return SPW_OK;
}

/* The first byte that is neither blank nor a byte order mark, of n; n: there is none. */
static uint64_t
first_byte(const unsigned char *start, uint64_t n)
{
    uint64_t i = spw_text_mark((const char *)start, n);
    while (i < n && strchr(" \t\r\n", start[i]) != NULL && start[i] != '\0')
        i++;
    return i;
}

/* The line at an offset as a JSON object; *out is NULL, too, where it is longer than is looked at. */
static spw_status
open_line(spw_data_line **out, int fd, const char *path, uint64_t offset, uint64_t bytes, spw_error *err)
{
    uint64_t n = bytes - offset < FIRST_LINE_BYTES ? bytes - offset : FIRST_LINE_BYTES;
    char *text = spw_mem_zalloc(n), *end;
    spw_status st;
    *out = NULL;
    if (text == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "first line of %s", path);
    st = spw__data_read(fd, path, offset, text, n, err);
    end = st == SPW_OK ? memchr(text, '\n', n) : NULL;
    if (end != NULL || (st == SPW_OK && offset + n == bytes))
        st = spw_data_line_open(out, text, end != NULL ? (uint64_t)(end - text) : n, err);
    spw_mem_free(text);
    return st;
}

/* A .json file whose first byte that is not blank is at offset: JSON lines, or what can be made to be such. */
static spw_status
recognise_json(spw_data_format *out, int fd, const char *path, const unsigned char *start, uint64_t offset,
               uint64_t bytes, spw_error *err)
{
    spw_data_line *line;
    spw_status st;
    if (start[offset] == '[')
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "data: %s is a JSON array, of which JSON lines can be made: jq -c '.[]' %s >%sl (" AS_TEXT ")",
                         path, path, path);
    if (start[offset] != '{')
        return SPW_OK;
    *out = SPW_DATA_JSONL;
    st = open_line(&line, fd, path, offset, bytes, err);
    spw_data_line_close(line);
    if (st == SPW_ECORRUPT)
        spw_error_wrap(err,
                       "data: %s does not hold JSON lines (jq -c . makes a line of an object over several; " AS_TEXT
                       "): its first line",
                       path);
    return st;
}

/* Text that would have been JSON lines by another name is trained on with its braces, which is said once. */
static spw_status
warn_of_lines(int fd, const char *path, uint64_t offset, uint64_t bytes, bool *warned, spw_error *err)
{
    static const char *const usual[] = {"messages", "conversations", "prompt", "text"};
    spw_error ignored = {0};
    spw_data_line *line;
    spw_status st = open_line(&line, fd, path, offset, bytes, &ignored);
    for (size_t i = 0; line != NULL && !*warned && i < sizeof usual / sizeof usual[0]; i++) {
        if (!spw_chat_is_in(line, usual[i]))
            continue;
        spw_log(SPW_LOG_WARN,
                "data: %s is read as text, braces and names too, but begins with a JSON object that has \"%s\": "
                "JSON lines have a name in .jsonl, or data.format (--format) jsonl",
                path, usual[i]);
        *warned = true;
    }
    spw_data_line_close(line);
    if (st == SPW_OK || st == SPW_ECORRUPT) /* it is text that begins with a brace */
        return SPW_OK;
    *err = ignored;
    return st;
}

static spw_status
recognise_text(spw_data_format *out, int fd, const char *path, const unsigned char *start, uint64_t bytes, bool *warned,
               spw_error *err)
{
    uint64_t n = bytes < START_BYTES ? bytes : START_BYTES, first = first_byte(start, n);
    if (ends_in(path, ".jsonl") || ends_in(path, ".ndjson"))
        *out = SPW_DATA_JSONL;
    else if (first < n && ends_in(path, ".json"))
        return recognise_json(out, fd, path, start, first, bytes, err);
    else if (first < n && start[first] == '{' && !*warned)
        return warn_of_lines(fd, path, first, bytes, warned, err);
    return SPW_OK;
}

/* By the start of a file, which has `bytes`. */
static spw_status
recognise(spw_data_format *out, int fd, const char *path, const unsigned char *start, uint64_t bytes, bool *warned,
          spw_error *err)
{
    uint64_t magic = bytes >= 4 ? spw_get_le(start, 4) : 0;
    struct stat beside;
    *out = SPW_DATA_TEXT;
    if (bytes == 0 && !ends_in(path, ".bin"))
        return SPW_OK;
    if (magic == LLMC_U16 || magic == LLMC_U32) {
        *out = SPW_DATA_LLMC;
        return SPW_OK;
    }
    if (bytes >= 8 && memcmp(start, LLMQ_MAGIC, 8) == 0) {
        *out = SPW_DATA_LLMQ;
        return SPW_OK;
    }
    if (bytes >= 9 && memcmp(start, "MMIDIDX\0\0", 9) == 0) {
        *out = SPW_DATA_MEGATRON;
        return SPW_OK;
    }
    if (ends_in(path, ".bin")) {
        char *idx = with_extension(path, 4, ".idx");
        if (idx == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "name of %s", path);
        *out = stat(idx, &beside) == 0 ? SPW_DATA_MEGATRON : SPW_DATA_TEXT;
        spw_mem_free(idx);
        if (*out == SPW_DATA_MEGATRON) /* whose first tokens may look like anything */
            return SPW_OK;
    }
    SPW_TRY(refuse_binary(path, start, bytes, err));
    if (ends_in(path, ".bin"))
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "data: %s is neither llm.c's (magic at offset 0 is %llu, not %d or %d) nor llmq's nor Megatron's (no .idx "
            "beside it); " AS_TEXT,
            path, (unsigned long long)magic, LLMC_U16, LLMC_U32);
    if (ends_in(path, ".idx"))
        return SPW_RAISE(err, SPW_ECORRUPT,
                         "data: %s is not Megatron's index: no \"MMIDIDX\" at offset 0 (" AS_TEXT ")", path);
    return recognise_text(out, fd, path, start, bytes, warned, err);
}

spw_status
spw_data_recognise(spw_data_format *out, const char *path, bool *warned, spw_error *err)
{
    unsigned char start[START_BYTES] = {0};
    struct stat info;
    spw_status st;
    int fd;
    SPW_TRY(spw__data_fd(&fd, path, false, err));
    if (fstat(fd, &info) != 0)
        st = SPW_RAISE_SYS(err, errno, "data: size of %s", path);
    else
        st = spw__data_read(fd, path, 0, start,
                            (uint64_t)info.st_size < START_BYTES ? (uint64_t)info.st_size : START_BYTES, err);
    if (st == SPW_OK)
        st = recognise(out, fd, path, start, (uint64_t)info.st_size, warned, err);
    close(fd);
    return st;
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
    magic = spw_get_le(header, 4);
    version = spw_get_le(header + 4, 4);
    count = spw_get_le(header + 8, 4);
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

/* Of evenly spread bits, which is enough for a plan: a file may have 256 MiB of them. Never 0, which is: not counted. */
static spw_status
count_targets(data_file *f, int fd, spw_error *err)
{
    enum { SAMPLES = 64, SAMPLE_BYTES = 4096 };
    const uint64_t bytes = (f->tokens + 7) / 8, samples = bytes <= SAMPLES * SAMPLE_BYTES ? 1 : SAMPLES;
    const uint64_t stride = bytes / samples;
    unsigned char block[SAMPLE_BYTES];
    uint64_t set = 0, seen = 0;
    for (uint64_t k = 0; k < samples; k++) {
        const uint64_t end = samples == 1 ? bytes : k * stride + SAMPLE_BYTES;
        for (uint64_t at = k * stride, n; at < end; at += n) {
            n = end - at < SAMPLE_BYTES ? end - at : SAMPLE_BYTES;
            SPW_TRY(spw__data_read(fd, f->store, f->loss_at + at, block, n, err));
            for (uint64_t i = 8 * at; i < 8 * (at + n) && i < f->tokens; i++) {
                set += block[(i - 8 * at) / 8] >> i % 8 & 1;
                seen++;
            }
        }
    }
    f->targets = seen > 0 ? (uint64_t)((double)set / (double)seen * (double)f->tokens) : 0;
    f->targets += f->targets == 0;
    return SPW_OK;
}

/*
 *   0  "BIN.TOK\n" | 8  i32 version 1 or 2 | 12  i32 bytes of a token, 4 | 16  i32 token count | up to 1024 the vocabulary's size and what is not
 *   always there | tokens | behind them, if the file has so many bytes more: a bit for each token, the lowest first
 */
spw_status
spw__data_llmq_open(data_file *f, int fd, const spw_data_options *o, spw_error *err)
{
    unsigned char header[20];
    uint64_t version, width, count, size, bits;
    if (f->bytes < LLMC_HEADER_BYTES)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s has %llu bytes, llmq's header alone has %d", f->path,
                         (unsigned long long)f->bytes, LLMC_HEADER_BYTES);
    SPW_TRY(spw__data_read(fd, f->path, 0, header, sizeof header, err));
    if (memcmp(header, LLMQ_MAGIC, 8) != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s does not begin with BIN.TOK, as llmq's files do", f->path);
    version = spw_get_le(header + 8, 4);
    width = spw_get_le(header + 12, 4);
    count = spw_get_le(header + 16, 4);
    if ((version != 1 && version != 2) || width != 4)
        return SPW_RAISE(err, SPW_EUNSUPPORTED,
                         "data: %s: version at offset 8 is %llu and a token has %llu bytes; 1 and 2, and 4, are known",
                         f->path, (unsigned long long)version, (unsigned long long)width);
    if (count > INT32_MAX)
        return SPW_RAISE(err, SPW_ECORRUPT, "data: %s: token count at offset 16 is negative", f->path);
    size = LLMC_HEADER_BYTES + count * 4;
    bits = (count + 7) / 8;
    if (f->bytes != size && f->bytes != size + bits)
        return SPW_RAISE(
            err, SPW_ECORRUPT,
            "data: %s: token count at offset 16 is %llu: a file of %llu bytes, or %llu with a bit for each, "
            "but it has %llu%s",
            f->path, (unsigned long long)count, (unsigned long long)size, (unsigned long long)(size + bits),
            (unsigned long long)f->bytes, f->bytes < size ? " (truncated)" : "");
    f->element = E_I32;
    f->begin = LLMC_HEADER_BYTES;
    f->tokens = count;
    f->delimiter = o->end_of_text_set ? o->end_of_text : -1;
    f->loss_at = f->bytes > size ? size : 0;
    return f->loss_at > 0 ? count_targets(f, fd, err) : SPW_OK;
}

/* Megatron's dataset by any of its names: PREFIX, PREFIX.bin, PREFIX.idx. */
static spw_status
name_file(data_file *f, const char *path, spw_error *err)
{
    bool dataset = f->format == SPW_DATA_MEGATRON;
    size_t cut = dataset && (ends_in(path, ".bin") || ends_in(path, ".idx")) ? 4 : 0;
    f->path = with_extension(path, cut, dataset ? ".bin" : "");
    f->store = with_extension(path, cut, dataset ? ".bin" : "");
    f->index = dataset ? with_extension(path, cut, ".idx") : NULL;
    return f->path != NULL && f->store != NULL && (f->index != NULL || !dataset)
               ? SPW_OK
               : SPW_RAISE(err, SPW_ENOMEM, "name of %s", path);
}

spw_status
spw__data_file_find(data_file *f, const char *path, const spw_data_options *o, bool *warned, spw_error *err)
{
    struct stat info;
    f->fd = -1;
    f->delimiter = -1;
    if (stat(path, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", path);
    if (S_ISDIR(info.st_mode))
        return SPW_OK;
    if (!S_ISREG(info.st_mode))
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "data: %s is not a file that can be read at any place", path);
    f->format = o->format;
    f->bytes = (uint64_t)info.st_size;
    if (o->format == SPW_DATA_AUTO)
        SPW_TRY(spw_data_recognise(&f->format, path, warned, err));
    return name_file(f, path, err);
}

spw_status
spw__data_file_open(data_file *f, const spw_data_options *o, spw_error *err)
{
    struct stat info;
    spw_status st;
    int index;
    if (f->format == SPW_DATA_JSONL ||
        (f->format == SPW_DATA_TEXT && (o->encode != NULL || o->documents == SPW_DOCUMENTS_WHOLE)))
        return spw__data_encode(f, o, err);
    if (o->documents == SPW_DOCUMENTS_WHOLE)
        spw_log(
            SPW_LOG_NOTE,
            "data: %s: windows cut documents of %s tokens, which lie as they are (data.documents whole is for text and "
            "JSON lines)",
            f->path, spw_data_format_name(f->format));
    SPW_TRY(spw__data_fd(&f->fd, f->path, true, err));
    if (fstat(f->fd, &info) != 0)
        return SPW_RAISE_SYS(err, errno, "data: size of %s", f->path);
    f->bytes = (uint64_t)info.st_size;
    if (f->format == SPW_DATA_LLMC)
        return spw__data_llmc_open(f, f->fd, o, err);
    if (f->format == SPW_DATA_LLMQ)
        return spw__data_llmq_open(f, f->fd, o, err);
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
