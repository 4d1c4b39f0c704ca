/* llmc.c - GPT-2 weights as llm.c writes them. */
#include "llmc.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 20240326 };

/* Shapes in Hugging Face's files: rows and columns in widths of the model, 0 where a header says how many. */
typedef struct array {
    const char *name; /* behind "h.<layer>." of those with layers */
    bool layers, turned;
    uint32_t rows, cols; /* rows 1: a vector */
} array;
static const array arrays[SPW__LLMC_ARRAYS] = {
    {"wte.weight", false, false, 0, 1},       {"wpe.weight", false, false, 0, 1},
    {"ln_1.weight", true, false, 0, 1},       {"ln_1.bias", true, false, 0, 1},
    {"attn.c_attn.weight", true, true, 1, 3}, {"attn.c_attn.bias", true, false, 0, 3},
    {"attn.c_proj.weight", true, true, 1, 1}, {"attn.c_proj.bias", true, false, 0, 1},
    {"ln_2.weight", true, false, 0, 1},       {"ln_2.bias", true, false, 0, 1},
    {"mlp.c_fc.weight", true, true, 1, 4},    {"mlp.c_fc.bias", true, false, 0, 4},
    {"mlp.c_proj.weight", true, true, 4, 1},  {"mlp.c_proj.bias", true, false, 0, 1},
    {"ln_f.weight", false, false, 0, 1},      {"ln_f.bias", false, false, 0, 1}};
enum { WTE, WPE };

bool
spw__llmc_begins(const void *eight_bytes)
{
    int32_t h[2];
    memcpy(h, eight_bytes, sizeof h);
    return h[0] == MAGIC && h[1] != 0;
}

static void
lay_out(spw__llmc *m, const int32_t *h)
{
    const uint64_t width = (uint64_t)h[6];
    m->layers = (uint64_t)h[4];
    m->elems = 0;
    for (uint32_t i = 0; i < SPW__LLMC_ARRAYS; i++) {
        uint64_t rows = i == WTE           ? (uint64_t)h[7]
                        : i == WPE         ? (uint64_t)h[2]
                        : arrays[i].turned ? arrays[i].rows * width
                                           : 1;
        m->first[i] = m->elems;
        m->layer[i] = rows * arrays[i].cols * width;
        m->layer_count[i] = arrays[i].layers ? m->layers : 1;
        m->elems += m->layer[i] * m->layer_count[i];
    }
}

static spw_status
check_header(spw__llmc *m, const char *path, const int32_t *h, uint64_t file_bytes, spw_error *err)
{
    static const struct {
        int at;
        const char *name;
        int32_t most;
    } fields[] = {{2, "positions", 1 << 24}, {3, "vocabulary", 1 << 24}, {4, "layers", 1 << 16},
                  {5, "heads", 1 << 16},     {6, "channels", 1 << 20},   {7, "padded vocabulary", 1 << 24}};
    uint64_t bytes;
    char text[256];
    if (h[0] != MAGIC)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: magic number %d at offset 0 is not that of llm.c's GPT-2 weights (%d)",
                         path, h[0], MAGIC);
    if (h[1] != 3 && h[1] != 5)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: version %d at offset 4 is not known (3: fp32, 5: bf16)", path,
                         h[1]);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (h[fields[i].at] < 1 || h[fields[i].at] > fields[i].most)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s %d at offset %d is outside [1, %d]", path, fields[i].name,
                             h[fields[i].at], 4 * fields[i].at, fields[i].most);
    }
    if (h[7] < h[3] || h[6] % h[5] != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: padded vocabulary %d of %d, or %d channels for %d heads, cannot be",
                         path, h[7], h[3], h[6], h[5]);
    snprintf(text, sizeof text,
             "{\"model_type\": \"gpt2\", \"n_positions\": %d, \"vocab_size\": %d, \"n_layer\": %d, \"n_head\": %d, "
             "\"n_embd\": %d}",
             h[2], h[3], h[4], h[5], h[6]);
    SPW_TRY(spw_hf_config_parse(&m->config, text, path, false, err)); /* the rest is GPT-2's */
    m->dtype = h[1] == 3 ? SPW_F32 : SPW_BF16;
    lay_out(m, h);
    bytes = SPW__LLMC_HEADER_BYTES + m->elems * spw_dtype_bytes(m->dtype);
    if (file_bytes != bytes)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s has %llu bytes, its header says %llu", path,
                         (unsigned long long)file_bytes, (unsigned long long)bytes);
    return SPW_OK;
}

spw_status
spw__llmc_open(spw__llmc *out, const char *path, spw_error *err)
{
    int32_t header[SPW__LLMC_HEADER_INTS];
    struct stat info;
    spw_status st = SPW_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0)
        st = SPW_RAISE_SYS(err, errno, "opening %s", path);
    if (st == SPW_OK)
        st = spw_file_read_at(fd, path, header, sizeof header, 0, err);
    if (st == SPW_OK)
        st = check_header(out, path, header, (uint64_t)info.st_size, err);
    if (fd >= 0)
        close(fd);
    return st;
}

uint32_t
spw__llmc_tensor_count(const spw__llmc *m)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < SPW__LLMC_ARRAYS; i++)
        count += m->layer_count[i];
    return (uint32_t)count;
}

/* Of layer l of array i, which begins there in the span. */
static spw_status
describe(const spw__llmc *m, spw__span *span, uint32_t i, uint64_t l, uint64_t begin, spw_dtype dtype,
         spw_tensor_info *t, spw_error *err)
{
    const array *a = &arrays[i];
    const uint64_t width = m->config.width, cols = a->cols * width;
    memset(t, 0, sizeof *t);
    if (a->layers)
        snprintf(t->name, sizeof t->name, "h.%llu.%s", (unsigned long long)l, a->name);
    else
        snprintf(t->name, sizeof t->name, "%s", a->name);
    t->dtype = dtype;
    t->type = spw__st_types[dtype].name;
    t->ndim = i <= WPE || a->turned ? 2 : 1;
    t->shape[0] = i == WTE ? m->config.vocab : i == WPE ? m->config.positions : a->turned ? a->rows * width : cols;
    t->shape[1] = t->ndim == 2 ? cols : 0;
    t->bytes = (t->ndim == 2 ? t->shape[0] * cols : cols) * spw_dtype_bytes(dtype);
    t->begin = begin;
    if (!a->turned)
        return SPW_OK;
    t->begin = spw__span_bytes(span);
    return spw__span_add_turned(span, begin, t->shape[0], cols, spw_dtype_bytes(dtype), err);
}

spw_status
spw__llmc_list(const spw__llmc *m, spw__span *span, uint64_t begin, spw_dtype dtype, spw_tensor_info *infos,
               spw_error *err)
{
    const uint64_t size = spw_dtype_bytes(dtype);
    uint32_t n = 0;
    for (uint32_t i = 0; i < SPW__LLMC_ARRAYS; i++) {
        for (uint64_t l = 0; l < m->layer_count[i]; l++)
            SPW_TRY(describe(m, span, i, l, begin + (m->first[i] + l * m->layer[i]) * size, dtype, &infos[n++], err));
    }
    return SPW_OK;
}
