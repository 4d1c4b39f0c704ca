/*
 * llmc.c - GPT-2 weights as llm.c writes them (format: FORMATS S2): a header of 256 int32, then sixteen arrays, each with all
 * layers one behind the other. Linear weights are (out, in) there and (in, out) in Hugging Face's GPT-2; a parameter is read and
 * transposed whole, so memory is that of the largest one.
 */
#include "spw_files.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 20240326, HEADER_INTS = 256, HEADER_BYTES = 1024, ARRAYS = 16, BLOCK = 1024 };
#define NONE UINT32_MAX

struct spw_llmc_reader {
    char path[1024];
    int fd;
    spw_dtype dtype;
    spw_model_config config;
    uint64_t padded_vocab, offset[ARRAYS], elems[ARRAYS]; /* elements before each array; of one layer of it */
    /* The parameter that was read last. */
    uint32_t param_id;
    float *values;
    uint64_t values_max;
};

/* Its name in Hugging Face's files, in the order of the file; those with a layer begin with "transformer.h.<layer>.". */
static const char *const names[ARRAYS] = {
    "wte.weight",         "wpe.weight",       "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
    "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight",    "mlp.c_fc.bias",
    "mlp.c_proj.weight",  "mlp.c_proj.bias",  "ln_f.weight", "ln_f.bias"};

static bool
has_layers(uint32_t array)
{
    return array >= 2 && array < 14;
}

static spw_status
check_header(spw_llmc_reader *r, const int32_t *h, uint64_t file_bytes, spw_error *err)
{
    static const struct {
        int at;
        const char *name;
        int32_t most;
    } fields[] = {{2, "positions", 1 << 24}, {3, "vocabulary", 1 << 24}, {4, "layers", 1 << 16},
                  {5, "heads", 1 << 16},     {6, "channels", 1 << 20},   {7, "padded vocabulary", 1 << 24}};
    uint64_t C, L, bytes;
    char text[256];
    if (h[0] != MAGIC)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: magic number %d at offset 0 is not that of llm.c's GPT-2 weights (%d)",
                         r->path, h[0], MAGIC);
    if (h[1] != 3 && h[1] != 5)
        return SPW_RAISE(err, SPW_EUNSUPPORTED, "%s: version %d at offset 4 is not known (3: fp32, 5: bf16)", r->path,
                         h[1]);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (h[fields[i].at] < 1 || h[fields[i].at] > fields[i].most)
            return SPW_RAISE(err, SPW_ECORRUPT, "%s: %s %d at offset %d is outside [1, %d]", r->path, fields[i].name,
                             h[fields[i].at], 4 * fields[i].at, fields[i].most);
    }
    if (h[7] < h[3] || h[6] % h[5] != 0)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s: padded vocabulary %d of %d, or %d channels for %d heads, cannot be",
                         r->path, h[7], h[3], h[6], h[5]);
    r->dtype = h[1] == 3 ? SPW_F32 : SPW_BF16;
    r->padded_vocab = (uint64_t)h[7];
    C = (uint64_t)h[6];
    L = (uint64_t)h[4];
    snprintf(text, sizeof text,
             "{\"model_type\": \"gpt2\", \"n_positions\": %d, \"vocab_size\": %d, \"n_layer\": %d, \"n_head\": %d, "
             "\"n_embd\": %d}",
             h[2], h[3], h[4], h[5], h[6]);
    SPW_TRY(spw_hf_config_parse(&r->config, text, r->path, false, err)); /* the rest is GPT-2's */
    {
        const uint64_t elems[ARRAYS] = {r->padded_vocab * C,
                                        (uint64_t)h[2] * C,
                                        C,
                                        C,
                                        3 * C * C,
                                        3 * C,
                                        C * C,
                                        C,
                                        C,
                                        C,
                                        4 * C * C,
                                        4 * C,
                                        4 * C * C,
                                        C,
                                        C,
                                        C};
        uint64_t at = 0;
        for (uint32_t i = 0; i < ARRAYS; i++) {
            r->offset[i] = at;
            r->elems[i] = elems[i];
            at += elems[i] * (has_layers(i) ? L : 1);
        }
        bytes = HEADER_BYTES + at * spw_dtype_bytes(r->dtype);
    }
    if (file_bytes != bytes)
        return SPW_RAISE(err, SPW_ECORRUPT, "%s has %llu bytes, its header says %llu", r->path,
                         (unsigned long long)file_bytes, (unsigned long long)bytes);
    return SPW_OK;
}

spw_status
spw_llmc_reader_open(spw_llmc_reader **out, const char *path, spw_error *err)
{
    int32_t header[HEADER_INTS];
    struct stat info;
    spw_llmc_reader *r = spw_mem_zalloc(sizeof *r);
    spw_status st = SPW_OK;
    *out = NULL;
    if (r == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "reader of %s", path);
    r->param_id = NONE;
    snprintf(r->path, sizeof r->path, "%.1000s", path);
    r->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0 || fstat(r->fd, &info) != 0)
        st = SPW_RAISE_SYS(err, errno, "opening %s", path);
    if (st == SPW_OK)
        st = spw_file_read_at(r->fd, r->path, header, sizeof header, 0, err);
    if (st == SPW_OK)
        st = check_header(r, header, (uint64_t)info.st_size, err);
    if (st != SPW_OK)
        spw_llmc_reader_close(r);
    else
        *out = r;
    return st;
}

void
spw_llmc_reader_close(spw_llmc_reader *r)
{
    if (r == NULL)
        return;
    if (r->fd >= 0)
        close(r->fd);
    spw_mem_free(r->values);
    spw_mem_free(r);
}

const spw_model_config *
spw_llmc_reader_config(const spw_llmc_reader *r)
{
    return &r->config;
}

spw_dtype
spw_llmc_reader_dtype(const spw_llmc_reader *r)
{
    return r->dtype;
}

/* Which array a parameter is, and its layer. */
static bool
find_array(const char *name, uint32_t *array, uint64_t *layer)
{
    unsigned long long n = 0;
    int used = 0;
    const char *at = strncmp(name, "transformer.", 12) == 0 ? name + 12 : name;
    bool in_layer = sscanf(at, "h.%llu.%n", &n, &used) == 1 && used > 0;
    *layer = n;
    for (*array = 0; *array < ARRAYS; ++*array) {
        if (has_layers(*array) == in_layer && strcmp(at + (in_layer ? used : 0), names[*array]) == 0)
            return true;
    }
    return false;
}

/* The whole parameter, in Hugging Face's order. */
static spw_status
read_whole(spw_llmc_reader *r, uint32_t param_id, const spw_param *p, spw_error *err)
{
    uint64_t n = p->rows * p->cols, layer, bytes = spw_dtype_bytes(r->dtype), at;
    uint32_t array;
    bool turned;
    char *raw;
    spw_status st;
    if (!find_array(p->name, &array, &layer) || n > r->elems[array])
        return SPW_RAISE(err, SPW_EINVAL, "%s: the file has no tensor %s of that shape", r->path, p->name);
    turned = has_layers(array) && p->ndim > 1;
    r->param_id = NONE;
    if (n > r->values_max) {
        spw_mem_free(r->values);
        r->values_max = 0;
        r->values = spw_mem_calloc(n, sizeof *r->values);
        if (r->values == NULL)
            return SPW_RAISE(err, SPW_ENOMEM, "%s of %s", p->name, r->path);
        r->values_max = n;
    }
    at = HEADER_BYTES + (r->offset[array] + layer * r->elems[array]) * bytes;
    raw = spw_mem_calloc(n, bytes);
    if (raw == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "%s of %s", p->name, r->path);
    st = spw_file_read_at(r->fd, r->path, raw, n * bytes, at, err);
    if (st == SPW_OK && !turned)
        spw_convert(r->values, SPW_F32, raw, r->dtype, n);
    for (uint64_t out = 0; st == SPW_OK && turned && out < p->cols; out++) { /* (cols, rows) there */
        for (uint64_t first = 0, part; first < p->rows; first += part) {
            float block[BLOCK];
            part = p->rows - first < BLOCK ? p->rows - first : BLOCK;
            spw_convert(block, SPW_F32, raw + (out * p->rows + first) * bytes, r->dtype, part);
            for (uint64_t i = 0; i < part; i++)
                r->values[(first + i) * p->cols + out] = block[i];
        }
    }
    spw_mem_free(raw);
    r->param_id = st == SPW_OK ? param_id : NONE;
    return st;
}

spw_status
spw_llmc_read_param(spw_llmc_reader *r, const spw_model *m, uint32_t param_id, uint64_t first, uint64_t count,
                    float *out, spw_error *err)
{
    if (r->param_id != param_id)
        SPW_TRY(read_whole(r, param_id, &m->params[param_id], err));
    memcpy(out, r->values + first, count * sizeof *out);
    return SPW_OK;
}
