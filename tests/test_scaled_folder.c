/*
 * Folders whose weights are codes with a scale for each block: 8-bit floats, and integers of 4 and 8 bits that are packed. Their numbers against
 * torch's and compressed-tensors' (vectors made by make_fp8_vectors.py and make_packed_vectors.py) in any range and for any shape, what they
 * train to, what is made of them, and what is refused, by name.
 */
#include "lib_folder.h"
#include "lib_rig.h"
#include "spw_generate.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static const struct {
    const char *name;
    uint32_t count;
    const char *quantized[2]; /* its matrices that are codes have one of these in their names */
} cases[] = {{"llama", 14, {"_proj."}},
             {"qwen3_moe", 13, {"_proj."}},
             {"ministral3", 14, {"_proj."}},
             {"kimi_k25", 12, {".experts."}},
             {"llama_int8", 14, {"_proj."}},
             {"llama_float", 14, {"_proj."}},
             {"llama_nvfp4", 7, {"_proj."}},
             {"llama_modelopt", 7, {"_proj."}},
             {"llama_mxfp4", 7, {"_proj."}},
             {"qwen3_fp4", 10, {"_proj."}},
             {"deepseek_v4", 7, {".experts.", ".o_b_proj."}}};

/* ---------------------------------------------------------------- numbers */

static bool
is_quantized(size_t k, const char *name)
{
    const char *const *in = cases[k].quantized;
    return strstr(name, in[0]) != NULL || (in[1] != NULL && strstr(name, in[1]) != NULL);
}

typedef struct opened {
    spw_model *model;
    spw_hf_reader *r;
} opened;

/* config: of this folder; the weights of path. */
static opened
open_bound(const char *config, const char *path)
{
    spw_error err = {0};
    spw_model_config m;
    opened o = {0};
    DONE(spw_hf_config_load(&m, config, &err));
    DONE(spw_model_build(&o.model, &m, &err));
    DONE(spw_hf_reader_open(&o.r, path, &err));
    DONE(spw_hf_reader_bind(o.r, o.model, &err));
    return o;
}

static void
close_bound(opened *o)
{
    spw_hf_reader_close(o->r);
    spw_model_destroy(o->model);
}

static uint32_t
param_id(const spw_model *m, const char *name)
{
    uint32_t id = 0;
    while (id < m->param_count && strcmp(m->params[id].name, name) != 0)
        id++;
    assert_true(id < m->param_count);
    return id;
}

/* torch's numbers by name; the caller frees them. */
static float *
expected(const char *name, const char *tensor, uint64_t elems)
{
    char path[400];
    spw_st_reader *r = NULL;
    spw_error err = {0};
    const spw_tensor_info *t;
    float *out = malloc(elems * sizeof *out);
    assert_non_null(out);
    folder_path(path, name, "expect.safetensors");
    DONE(spw_st_reader_open(&r, path, &err));
    t = spw_st_reader_find(r, tensor);
    if (t == NULL || t->bytes != elems * sizeof *out)
        fail_msg("the vectors have no %s", tensor);
    else
        DONE(spw_st_read(r, t, 0, out, t->bytes, &err));
    spw_st_reader_close(r);
    return out;
}

static uint64_t
pick(uint64_t *seed, uint64_t n)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (*seed >> 33) % n;
}

/* The whole parameter, and ranges of it that begin and end anywhere: the bytes of want. */
static void
same_in_ranges(const opened *o, uint32_t id, const float *want)
{
    uint64_t elems = o->model->params[id].rows * o->model->params[id].cols, seed = id + 3;
    float *got = malloc(elems * sizeof *got);
    spw_error err = {0};
    assert_non_null(got);
    for (int k = 0; k < 40; k++) {
        uint64_t first = k == 0 ? 0 : pick(&seed, elems), n = k == 0 ? elems : 1 + pick(&seed, elems - first);
        DONE(spw_hf_read_param(o->r, id, first, n, got, &err));
        for (uint64_t i = 0; i < n; i++) {
            if (memcmp(&got[i], &want[first + i], sizeof *got) != 0)
                fail_msg("%s, element %llu of %llu from %llu on: %a, not %a", o->model->params[id].name,
                         (unsigned long long)i, (unsigned long long)n, (unsigned long long)first, (double)got[i],
                         (double)want[first + i]);
        }
    }
    free(got);
}

/* Every matrix is what torch decodes, bit for bit; its bytes are nobody else's to read. */
static void
test_against_torch(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        char dir[400];
        opened o;
        uint32_t coded = 0;
        folder_path(dir, cases[k].name, "");
        o = open_bound(dir, dir);
        for (uint32_t id = 0; id < o.model->param_count; id++) {
            const spw_param *p = &o.model->params[id];
            spw_st_extent at;
            spw_dtype dtype;
            const bool quantized = is_quantized(k, p->name);
            assert_true(spw_hf_reader_extent(o.r, id, &at, &dtype) == (!quantized && !p->in_terms));
            if (quantized) {
                float *want = expected(cases[k].name, p->name, p->rows * p->cols);
                same_in_ranges(&o, id, want);
                free(want);
                coded++;
            }
        }
        assert_int_equal(coded, cases[k].count);
        close_bound(&o);
    }
}

/* Each of the 256 codes, times one and times a number that rounds. */
static void
test_codes(void **state)
{
    static const char *const name = "model.layers.1.self_attn.q_proj.weight";
    float *values = expected("llama", "e4m3", 256), scales[6] = {1.0f, 1.0f, 1.0f, 0.3f, 0.3f, 0.3f};
    folder *f = folder_read("llama");
    uint8_t *codes = folder_find(f, name)->data; /* (24, 24): blocks of 16 x 10 make [2, 3] */
    opened o;
    float got[24 * 24];
    spw_error err = {0};
    (void)state;
    for (int i = 0; i < 24 * 24; i++)
        codes[i] = (uint8_t)i;
    memcpy(folder_find(f, "model.layers.1.self_attn.q_proj.weight_scale_inv")->data, scales, sizeof scales);
    folder_write(f);
    o = open_bound(f->dir, f->dir);
    DONE(spw_hf_read_param(o.r, param_id(o.model, name), 0, 24 * 24, got, &err));
    for (int i = 0; i < 24 * 24; i++) {
        float want = values[i % 256] * scales[i / 24 < 16 ? 0 : 3];
        if (isnan(want) ? !isnan(got[i]) : memcmp(&got[i], &want, sizeof want) != 0)
            fail_msg("code %d: %a, not %a", i % 256, (double)got[i], (double)want);
    }
    close_bound(&o);
    folder_free(f);
    free(values);
}

/* Codes that are numbers, and scales of one of the three types. */
static void
add_random(folder *f, const spw_param *p, const uint64_t block[2], uint64_t *seed)
{
    static const char *const types[] = {"F32", "BF16", "F16"};
    spw_dtype type = (spw_dtype)pick(seed, 3);
    uint64_t shape[2] = {(p->rows + block[0] - 1) / block[0], (p->cols + block[1] - 1) / block[1]};
    uint64_t blocks = shape[0] * shape[1];
    char name[SPW_TENSOR_NAME_BYTES];
    float *scales = malloc(blocks * sizeof *scales);
    uint8_t *codes = folder_add(f, p->name, "F8_E4M3", 2, (uint64_t[]){p->rows, p->cols}, p->rows * p->cols)->data;
    assert_non_null(scales);
    for (uint64_t i = 0; i < p->rows * p->cols; i++)
        codes[i] = (uint8_t)(pick(seed, 127) + 128 * pick(seed, 2));
    for (uint64_t i = 0; i < blocks; i++)
        scales[i] = 0.01f + (float)pick(seed, 100000) * 3e-6f;
    snprintf(name, sizeof name, "%.100s_scale_inv", p->name);
    spw_convert(folder_add(f, name, types[type], 2, shape, blocks * spw_dtype_bytes(type))->data, type, scales, SPW_F32,
                blocks);
    free(scales);
}

/* The plainest decoding there is. */
static float *
decode(folder *f, const spw_param *p, const uint64_t block[2], const float *values)
{
    uint64_t across = (p->cols + block[1] - 1) / block[1];
    char name[SPW_TENSOR_NAME_BYTES];
    const uint8_t *codes = folder_find(f, p->name)->data;
    const struct tensor *t;
    float *out = malloc(p->rows * p->cols * sizeof *out), *scales;
    snprintf(name, sizeof name, "%.100s_scale_inv", p->name);
    t = folder_find(f, name);
    scales = malloc(t->shape[0] * t->shape[1] * sizeof *scales);
    assert_true(out != NULL && scales != NULL);
    spw_convert(scales, SPW_F32, t->data,
                t->type[0] == 'B'   ? SPW_BF16
                : t->type[1] == '1' ? SPW_F16
                                    : SPW_F32,
                t->shape[0] * t->shape[1]);
    for (uint64_t i = 0; i < p->rows * p->cols; i++)
        out[i] = values[codes[i]] * scales[i / p->cols / block[0] * across + i % p->cols / block[1]];
    free(scales);
    return out;
}

/* Rows longer than what is read at once, and many in it; blocks of one element, of whole rows, and larger than the matrix. */
static void
test_random_shapes(void **state)
{
    float *values = expected("llama", "e4m3", 256);
    uint64_t seed = 11;
    (void)state;
    for (int k = 0; k < 24; k++) {
        static const uint64_t sizes[] = {1, 3, 16, 128, 1000, 100000};
        const uint64_t block[2] = {sizes[pick(&seed, 6)], sizes[pick(&seed, 6)]};
        folder *f = folder_make();
        spw_model *m = NULL;
        spw_model_config c;
        spw_error err = {0};
        opened o;
        char text[TEXT_BYTES];
        snprintf(text, sizeof text,
                 "{\"model_type\":\"llama\",\"hidden_size\":%d,\"num_attention_heads\":1,\"num_hidden_layers\":1,"
                 "\"intermediate_size\":%d,\"vocab_size\":3,\"quantization_config\":{\"quant_method\":\"fp8\","
                 "\"weight_block_size\":[%llu,%llu]}}",
                 (int)(2 + 2 * pick(&seed, 30)), (int)(k % 2 == 0 ? 1 + pick(&seed, 200) : 4000 + pick(&seed, 9000)),
                 (unsigned long long)block[0], (unsigned long long)block[1]);
        snprintf(f->config, sizeof f->config, "%s", text);
        DONE(spw_hf_config_parse(&c, text, "test", false, &err));
        DONE(spw_model_build(&m, &c, &err));
        for (uint32_t id = 0; id < m->param_count; id++) {
            const spw_param *p = &m->params[id];
            if (p->ndim == 2)
                add_random(f, p, block, &seed);
            else
                memset(folder_add(f, p->name, "F32", 1, (uint64_t[]){p->cols}, 4 * p->cols)->data, 0, 4 * p->cols);
        }
        folder_write(f);
        o = open_bound(f->dir, f->dir);
        for (uint32_t id = 0; id < m->param_count; id++) {
            if (m->params[id].ndim == 2) {
                float *want = decode(f, &m->params[id], block, values);
                same_in_ranges(&o, id, want);
                free(want);
            }
        }
        close_bound(&o);
        spw_model_destroy(m);
        folder_free(f);
    }
    free(values);
}

/* A parameter as integers that are packed; returns what they stand for, which the caller frees. */
static float *
add_packed(folder *f, const spw_param *p, uint32_t bits, uint64_t group, uint64_t *seed)
{
    const uint64_t elems = p->rows * p->cols, across = (p->cols + group - 1) / group;
    const uint64_t shape[2] = {p->rows, p->cols * bits / 32}, scaled[2] = {p->rows, across};
    const int stem = (int)(strlen(p->name) - strlen(".weight"));
    char name[SPW_TENSOR_NAME_BYTES];
    float *out = malloc(elems * sizeof *out), *scales;
    uint32_t *words;
    assert_non_null(out);
    snprintf(name, sizeof name, "%.*s.weight_packed", stem, p->name);
    words = folder_add(f, name, "I32", 2, shape, elems * bits / 8)->data;
    memset(words, 0, elems * bits / 8);
    snprintf(name, sizeof name, "%.*s.weight_scale", stem, p->name);
    scales = folder_add(f, name, "F32", 2, scaled, p->rows * across * sizeof *scales)->data;
    for (uint64_t i = 0; i < p->rows * across; i++)
        scales[i] = 0.01f + (float)pick(seed, 100000) * 3e-6f;
    for (uint64_t i = 0; i < elems; i++) {
        const uint64_t row = i / p->cols, col = i % p->cols, bit = col * bits;
        const int value = (int)pick(seed, 1u << bits) - (1 << (bits - 1));
        words[row * shape[1] + bit / 32] |= (uint32_t)(value + (1 << (bits - 1))) << bit % 32;
        out[i] = (float)value * scales[row * across + col / group];
    }
    return out;
}

/* Groups that do not divide a row, rows longer than what is read at once, and many in it. */
static void
test_random_packed(void **state)
{
    uint64_t seed = 12;
    (void)state;
    for (int k = 0; k < 24; k++) {
        static const uint64_t sizes[] = {1, 3, 16, 32, 1000, 100000};
        const uint32_t bits = k % 2 == 0 ? 4 : 8;
        const uint64_t group = sizes[pick(&seed, 6)];
        float *want[16] = {NULL};
        folder *f = folder_make();
        spw_model *m = NULL;
        spw_model_config c;
        spw_error err = {0};
        opened o;
        snprintf(f->config, sizeof f->config,
                 "{\"model_type\":\"llama\",\"hidden_size\":%d,\"num_attention_heads\":1,\"num_hidden_layers\":1,"
                 "\"intermediate_size\":%d,\"vocab_size\":3,\"quantization_config\":{\"quant_method\":"
                 "\"compressed-tensors\",\"format\":\"pack-quantized\",\"config_groups\":{\"group_0\":{\"weights\":"
                 "{\"num_bits\":%u,\"symmetric\":true,\"strategy\":\"group\",\"group_size\":%llu}}}}}",
                 (int)(8 + 8 * pick(&seed, 8)), (int)(8 * (k % 4 < 2 ? 1 + pick(&seed, 25) : 500 + pick(&seed, 1100))),
                 bits, (unsigned long long)group);
        DONE(spw_hf_config_parse(&c, f->config, "test", false, &err));
        DONE(spw_model_build(&m, &c, &err));
        assert_true(m->param_count <= 16);
        for (uint32_t id = 0; id < m->param_count; id++) {
            const spw_param *p = &m->params[id];
            if (p->ndim == 2)
                want[id] = add_packed(f, p, bits, group, &seed);
            else
                memset(folder_add(f, p->name, "F32", 1, (uint64_t[]){p->cols}, 4 * p->cols)->data, 0, 4 * p->cols);
        }
        folder_write(f);
        o = open_bound(f->dir, f->dir);
        for (uint32_t id = 0; id < m->param_count; id++) {
            if (want[id] != NULL)
                same_in_ranges(&o, id, want[id]);
            free(want[id]);
        }
        close_bound(&o);
        spw_model_destroy(m);
        folder_free(f);
    }
}

/* A file alone, and a folder without config.json: 128 x 128. */
static void
test_without_config(void **state)
{
    static const char *const name = "model.layers.0.mlp.experts.2.down_proj.weight";
    char dir[400], file[400];
    folder *f = folder_read("qwen3_moe");
    float *want = expected("qwen3_moe", name, 24 * 136);
    (void)state;
    folder_path(dir, "qwen3_moe", "");
    folder_path(file, "qwen3_moe", "model.safetensors");
    f->config[0] = '\0';
    folder_write(f);
    for (int k = 0; k < 2; k++) {
        opened o = open_bound(dir, k == 0 ? file : f->dir);
        same_in_ranges(&o, param_id(o.model, name), want);
        close_bound(&o);
    }
    free(want);
    folder_free(f);
}

/* An embedding of 8-bit floats, and a head beside it that is the same in fp32 or is not; exported it has the type of what follows. */
static void
test_tied_head(void **state)
{
    folder *f = folder_read("qwen3_moe");
    struct tensor *t = folder_find(f, "model.embed_tokens.weight"), *head, *scale;
    float *values = expected("llama", "e4m3", 256);
    spw_error err = {0};
    spw_hf_reader *r = NULL;
    spw_export_report report;
    opened o;
    char to[300];
    (void)state;
    snprintf(t->type, sizeof t->type, "F8_E4M3");
    t->bytes /= 2;
    for (uint64_t i = 0; i < t->bytes; i++)
        ((uint8_t *)t->data)[i] = (uint8_t)(i % 127);
    scale = folder_add(f, "model.embed_tokens.weight_scale_inv", "F32", 2, (uint64_t[]){1, 1}, 4);
    *(float *)scale->data = 0.3f;
    head = folder_add(f, "lm_head.weight", "F32", 2, t->shape, 4 * t->bytes);
    for (uint64_t i = 0; i < t->bytes; i++)
        ((float *)head->data)[i] = values[i % 127] * 0.3f;
    folder_write(f);
    o = open_bound(f->dir, f->dir);
    snprintf(to, sizeof to, "%s/exported", f->dir);
    DONE(spw_export(&(spw_export_options){.source = f->dir, .to = to, .dtype = SPW_DTYPE_COUNT}, &report, &err));
    assert_int_equal(report.dtype, SPW_BF16);
    ((float *)head->data)[t->bytes - 1] += 1.0f;
    folder_write(f);
    DONE(spw_hf_reader_open(&r, f->dir, &err));
    assert_int_equal(spw_hf_reader_bind(r, o.model, &err), SPW_ECORRUPT);
    assert_non_null(strstr(err.message, "lm_head.weight differs from model.embed_tokens.weight"));
    spw_hf_reader_close(r);
    close_bound(&o);
    free(values);
    folder_free(f);
}

/* ---------------------------------------------------------------- what is refused */

static void
refused_config_of(const char *name, const char *what, const char *with, const char *says)
{
    folder *f = folder_read(name);
    spw_model_config m;
    spw_error err = {0};
    folder_replace(f, what, with);
    if (spw_hf_config_parse(&m, f->config, "test", false, &err) != SPW_ECONFIG || strstr(err.message, says) == NULL)
        fail_msg("%s: \"%s\" was expected: %s", with, says, err.message);
    folder_free(f);
}

static void
refused_config(const char *what, const char *with, const char *says)
{
    refused_config_of("llama", what, with, says);
}

static void
taken_config_of(const char *name, const char *what, const char *with)
{
    folder *f = folder_read(name);
    spw_model_config m;
    spw_error err = {0};
    folder_replace(f, what, with);
    DONE(spw_hf_config_parse(&m, f->config, "test", false, &err));
    folder_free(f);
}

static void
taken_config(const char *what, const char *with)
{
    taken_config_of("llama", what, with);
}

/* Of compressed-tensors' formats two are read. */
static void
test_packed_config(void **state)
{
    static const char *const kimi = "kimi_k25", *const bits = "\"num_bits\": 4", *const size = "\"group_size\": 16",
                             *const strategy = "\"strategy\": \"group\"", *const order = "\"actorder\": null",
                             *const group = "not supported yet: text_config.quantization_config.config_groups {",
                             *const format = "\"format\": \"pack-quantized\"",
                             *const cache = "\"kv_cache_scheme\": null";
    (void)state;
    refused_config_of(kimi, bits, "\"num_bits\": 3", group);
    refused_config_of(kimi, bits, "\"bits\": 4", group);
    refused_config_of(kimi, size, "\"group_size\": 0", group);
    refused_config_of(kimi, size, "\"group_size\": 1.5", group);
    refused_config_of(kimi, size, "\"group_size\": -1", group);
    refused_config_of(kimi, strategy, "\"strategy\": \"tensor_group\"", group);
    refused_config_of(kimi, strategy, "\"strategy\": \"block\"", group);
    refused_config_of(kimi, order, "\"actorder\": \"group\"", group);
    refused_config_of(kimi, "\"symmetric\": true", "\"symmetric\": false", group);
    refused_config_of(kimi, "\"dynamic\": false", "\"dynamic\": true", group);
    refused_config_of(kimi, "\"type\": \"int\"", "\"type\": \"float\"", group);
    refused_config_of(kimi, "\"group_0\": {", "\"group_1\": {}, \"group_0\": {", group);
    refused_config_of(kimi, "\"group_0\": {", "\"group_0\": {\"format\": \"float-quantized\",", group);
    refused_config_of(kimi, format, "\"format\": \"nvfp4-pack-quantized\"",
                      "text_config.quantization_config.format \"nvfp4-pack-quantized\": of 8-bit floats");
    refused_config_of(kimi, format, "\"format\": \"float-quantized\"",
                      "quantization_config.format \"float-quantized\"");
    refused_config_of(kimi, format, "\"formats\": \"pack-quantized\"", "quantization_config.format nothing");
    refused_config_of(kimi, cache, "\"kv_cache_scheme\": {\"num_bits\": 8}", "quantization_config.kv_cache_scheme {");
    refused_config_of(kimi, cache, "\"transform_config\": {\"config_groups\": {}}",
                      "quantization_config.transform_config {");
    refused_config_of(kimi, "\"compressed\"", "\"initialized\"", "quantization_config.quantization_status \"init");
    refused_config_of("llama_float", "\"float-quantized\"", "\"pack-quantized\"", "quantization_config.format \"pack");
    refused_config_of("llama_float", "\"num_bits\": 8", "\"num_bits\": 4", "quantization_config.config_groups {");
    taken_config_of(kimi, order, "\"actorder\": \"static\"");
    taken_config_of(kimi, "\"type\": \"int\"", "\"type\": null");
    taken_config_of(kimi, cache, "\"sparsity_config\": {}");
    taken_config_of(kimi, "\"group_0\": {", "\"group_0\": {\"format\": \"pack-quantized\",");
    taken_config_of("llama_float", "\"strategy\": \"channel\"", "\"strategy\": \"tensor\"");
    taken_config_of("llama_float", "\"block_structure\": null", "\"block_structure\": [16, 10]");
}

static void
test_config(void **state)
{
    static const char *const fmt = "\"fmt\": \"e4m3\"", *const scheme = "\"activation_scheme\": \"dynamic\"",
                             *const lists = "\"modules_to_not_convert\"", *const size = "\"weight_block_size\": [";
    (void)state;
    refused_config(fmt, "\"fmt\": \"e5m2\"",
                   "test: not supported yet: quantization_config.fmt \"e5m2\": of 8-bit floats");
    refused_config(fmt, "\"fmt\": 8", "quantization_config.fmt 8");
    refused_config(scheme, "\"activation_scheme\": \"fixed\"", "quantization_config.activation_scheme \"fixed\"");
    refused_config(size, "\"sizes\": [", "quantization_config.sizes [16,10]");
    refused_config(size, "\"ignored_layers\": [", "quantization_config.weight_block_size nothing");
    refused_config(size, "\"weight_block_size\": [1, ", "quantization_config.weight_block_size [1,16,10]");
    refused_config("16,", "0,", "quantization_config.weight_block_size [0,10]");
    refused_config("16,", "-16,", "quantization_config.weight_block_size [-16,10]");
    refused_config("16,", "1.5,", "quantization_config.weight_block_size [1.5,10]");
    refused_config("16,", "1e40,", "quantization_config.weight_block_size [1e40,10]");
    refused_config("16,", "\"16\",", "quantization_config.weight_block_size [\"16\",10]");
    refused_config(lists, "\"scale_fmt\": \"e5m2\", \"ignored_layers\"", "quantization_config.scale_fmt \"e5m2\"");
    refused_config(lists, "\"expert_dtype\": \"fp6\", \"ignored_layers\"", "quantization_config.expert_dtype \"fp6\"");
    refused_config(lists, "\"rotation\": 1, \"ignored_layers\"", "quantization_config.rotation 1");
    refused_config("\"fp8\"", "\"gptq\"", "take the folder that was quantized");
    refused_config("\"fp8\"", "8", "take the folder that was quantized");
    taken_config(lists, "\"scale_fmt\": \"ue8m0\", \"ignored_layers\"");
    taken_config(fmt, "\"fmt\": \"float8_e4m3fn\", \"dequantize\": false, \"expert_dtype\": \"fp8\"");
    taken_config(fmt, "\"scale_fmt\": \"float\", \"modules_to_convert\": null");
    taken_config(scheme, "\"fmt_\": null");
}

/* Folders with images say it beside the text part. */
static void
test_config_of_images(void **state)
{
    static const char *const path = "tests/vectors/families/qwen3_vl_images/config.json";
    static const struct {
        const char *quantization, *says; /* NULL: it is taken */
    } texts[] = {{"{\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}", NULL},
                 {"{\"quant_method\": \"fp8\"}", "quantization_config.weight_block_size nothing"},
                 {"{\"quant_method\": \"awq\"}", "take the folder that was quantized"}};
    char *text, changed[TEXT_BYTES + 200];
    spw_error err = {0};
    (void)state;
    DONE(spw_file_read_text(path, TEXT_BYTES, &text, &err));
    for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++) {
        spw_model_config m;
        spw_status st;
        snprintf(changed, sizeof changed, "{\"quantization_config\": %s, %s", texts[k].quantization, text + 1);
        st = spw_hf_config_parse(&m, changed, "test", false, &err);
        if (texts[k].says == NULL)
            DONE(st);
        else if (st != SPW_ECONFIG || strstr(err.message, texts[k].says) == NULL)
            fail_msg("\"%s\" was expected: %s", texts[k].says, err.message);
    }
    spw_mem_free(text);
}

/* The folder as it is now does not bind to the model of the case; f is freed. */
static void
refused_weights(folder *f, const char *model, spw_status status, const char *says, const char *also)
{
    char dir[400];
    spw_model_config c;
    spw_model *m = NULL;
    spw_hf_reader *r = NULL;
    spw_error err = {0};
    spw_status st;
    folder_write(f);
    folder_path(dir, model, "");
    DONE(spw_hf_config_load(&c, dir, &err));
    DONE(spw_model_build(&m, &c, &err));
    DONE(spw_hf_reader_open(&r, f->dir, &err));
    st = spw_hf_reader_bind(r, m, &err);
    if (st != status || strstr(err.message, says) == NULL || strstr(err.message, also) == NULL)
        fail_msg("\"%s\" and \"%s\" were expected: %s", says, also, err.message);
    assert_int_equal(spw_hf_read_param(r, 0, 0, 1, &(float){0}, &err), SPW_EINVAL); /* nothing is bound */
    spw_hf_reader_close(r);
    spw_model_destroy(m);
    folder_free(f);
}

#define UP   "model.layers.1.mlp.up_proj.weight"                          /* (44, 24), scales (3, 3) */
#define UP_0 "language_model.model.layers.1.mlp.experts.0.up_proj.weight" /* (16, 32), of 4 bits, scales (16, 2) */

static void
drop(folder *f, const char *name)
{
    struct tensor *t = folder_find(f, name);
    free(t->data);
    *t = f->tensors[--f->count];
}

static folder *
with_type_of(const char *name, const char *tensor, const char *type, uint64_t rows, uint64_t cols, uint64_t bytes)
{
    folder *f = folder_read(name);
    struct tensor *t = folder_find(f, tensor);
    snprintf(t->type, sizeof t->type, "%s", type);
    t->ndim = cols > 0 ? 2 : 1;
    t->shape[0] = rows;
    t->shape[1] = cols;
    t->bytes = bytes;
    t->data = realloc(t->data, bytes);
    assert_non_null(t->data);
    memset(t->data, 0, bytes);
    return f;
}

static folder *
with_type(const char *tensor, const char *type, uint64_t rows, uint64_t cols, uint64_t bytes)
{
    return with_type_of("llama", tensor, type, rows, cols, bytes);
}

static void
test_packed_refused(void **state)
{
    static const char *const kimi = "kimi_k25";
    folder *f = folder_read(kimi);
    (void)state;
    drop(f, UP_0 "_scale");
    refused_weights(f, kimi, SPW_ECORRUPT, "/model.safetensors: tensor " UP_0 "_packed is I32",
                    "scales are missing (model.layers.1.mlp.experts.0.up_proj.weight_scale)");
    f = folder_read(kimi);
    drop(f, UP_0 "_packed");
    refused_weights(f, kimi, SPW_ECORRUPT, "tensor " UP_0 "_scale is for weights that are F8_E4M3 or packed",
                    "is missing");
    f = folder_read(kimi); /* what says less than the model does may be missing */
    drop(f, UP_0 "_shape");
    drop(f, UP_0 "_packed");
    drop(f, UP_0 "_scale");
    refused_weights(f, kimi, SPW_ECORRUPT, "experts.0.up_proj.weight is missing", "the weights of another model");
    refused_weights(with_type_of(kimi, UP_0 "_packed", "I64", 16, 4, 16 * 4 * 8), kimi, SPW_ECORRUPT,
                    UP_0 "_packed is I64", "4 bits for each weight are I32 of [16, 4]");
    refused_weights(with_type_of(kimi, UP_0 "_packed", "I32", 16, 8, 16 * 8 * 4), kimi, SPW_ECORRUPT,
                    UP_0 "_packed is I32 of shape [16, 8]", "I32 of [16, 4]");
    refused_weights(with_type_of(kimi, UP_0 "_scale", "BF16", 16, 1, 32), kimi, SPW_ECORRUPT,
                    UP_0 "_scale has shape [16, 1]", "blocks of 1 x 16 need [16, 2]");
    refused_weights(with_type_of(kimi, UP_0 "_scale", "F8_E4M3", 16, 2, 32), kimi, SPW_ECORRUPT,
                    UP_0 "_scale is F8_E4M3", "F32, BF16 and F16 are read");
    f = folder_read(kimi);
    memset(folder_add(f, UP_0 "_zero_point", "I32", 2, (uint64_t[]){2, 2}, 16)->data, 0, 16);
    refused_weights(f, kimi, SPW_ECORRUPT, UP_0 "_zero_point is not in this model", "");
    f = folder_read(kimi);
    memset(folder_add(f, UP_0, "BF16", 2, (uint64_t[]){16, 32}, 16 * 64)->data, 0, 16 * 64);
    refused_weights(f, kimi, SPW_ECORRUPT, "experts.0.up_proj.weight", "there twice");
    f = folder_read(kimi);
    folder_replace(f, "\"quantization_config\"", "\"quantization\"");
    refused_weights(f, kimi, SPW_ECONFIG, "/config.json: there are packed weights", "no quantization_config");
    f = folder_read(kimi); /* a norm is no matrix */
    drop(f, "language_model.model.norm.weight");
    memset(folder_add(f, "language_model.model.norm.weight_packed", "I32", 2, (uint64_t[]){1, 4}, 16)->data, 0, 16);
    refused_weights(f, kimi, SPW_ECORRUPT, "norm.weight_packed is I32 of shape [1, 4]", "is no matrix of its own");
    f = folder_read("llama_float"); /* another kind of codes than config.json says, behind its own */
    drop(f, UP);
    memset(folder_add(f, UP "_packed", "I32", 2, (uint64_t[]){44, 6}, 44 * 24)->data, 0, 44 * 24);
    refused_weights(f, "llama_float", SPW_ECONFIG, "quantization_config.quant_method is not that of packed weights",
                    "");
    f = folder_read(kimi);
    f->config[0] = '\0';
    refused_weights(f, kimi, SPW_ECONFIG, "there are packed weights, and no config.json that says their bits", "");
    f = folder_read("llama_float");
    folder_replace(f, "\"type\": \"float\"", "\"type\": \"int\"");
    folder_replace(f, "\"float-quantized\"", "\"pack-quantized\"");
    refused_weights(f, "llama_float", SPW_ECONFIG,
                    "quantization_config.quant_method is not that of weights in 8-bit floats", "");
}

/* Each by the names of tensor and file. */
static void
test_weights_refused(void **state)
{
    folder *f = folder_read("llama");
    (void)state;
    drop(f, UP "_scale_inv");
    refused_weights(f, "llama", SPW_ECORRUPT, "/model.safetensors: tensor " UP " is F8_E4M3",
                    "scales are missing (" UP "_scale_inv)");
    f = folder_read("llama");
    drop(f, UP);
    refused_weights(f, "llama", SPW_ECORRUPT, "/model.safetensors: tensor " UP "_scale_inv is for weights", "missing");
    refused_weights(with_type(UP, "BF16", 44, 24, 44 * 24 * 2), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor " UP "_scale_inv is for weights that are F8_E4M3", UP " is BF16");
    refused_weights(with_type(UP, "F8_E5M2", 44, 24, 44 * 24), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor " UP " is F8_E5M2", "F32, BF16");
    refused_weights(with_type(UP, "F8_E4M3", 24, 44, 44 * 24), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor " UP " has shape [24, 44]", "[44, 24]");
    refused_weights(with_type(UP "_scale_inv", "F32", 2, 3, 24), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor " UP "_scale_inv has shape [2, 3]", "blocks of 16 x 10 need [3, 3]");
    refused_weights(with_type(UP "_scale_inv", "F32", 9, 0, 36), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor " UP "_scale_inv has shape [9]", "blocks of 16 x 10 need [3, 3]");
    refused_weights(with_type(UP "_scale_inv", "F8_E5M2", 3, 3, 9), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor " UP "_scale_inv is F8_E5M2", "F32, BF16 and F16 are read");
    refused_weights(with_type("model.norm.weight", "F8_E4M3", 24, 0, 24), "llama", SPW_ECORRUPT,
                    "/model.safetensors: tensor model.norm.weight is F8_E4M3", "F32, BF16 and F16 are read");
    f = folder_read("llama");
    *(float *)folder_add(f, "model.norm.weight_scale_inv", "F32", 1, (uint64_t[]){1}, 4)->data = 1.0f;
    refused_weights(f, "llama", SPW_ECORRUPT, "/model.safetensors: tensor model.norm.weight_scale_inv is for weights",
                    "model.norm.weight is BF16");
    f = folder_read("llama");
    *(float *)folder_add(f, "model.layers.9.mlp.up_proj.weight_scale_inv", "F32", 1, (uint64_t[]){1}, 4)->data = 1.0f;
    refused_weights(f, "llama", SPW_ECORRUPT, "/model.safetensors: tensor model.layers.9.mlp.up_proj.weight_scale_inv",
                    "not in this model");
    f = folder_read("llama");
    memset(folder_add(f, "language_model." UP "_scale_inv", "F32", 2, (uint64_t[]){3, 3}, 36)->data, 0, 36);
    refused_weights(f, "llama", SPW_ECORRUPT, UP "_scale_inv is ", "there twice, with and without its prefix");
    f = folder_read("llama"); /* the model is another folder's: what this one says of its blocks counts */
    folder_replace(f, "\"quantization_config\"", "\"quantization\"");
    refused_weights(f, "llama", SPW_ECONFIG, "/config.json: there are weights in 8-bit floats",
                    "no quantization_config");
    f = folder_read("llama");
    folder_replace(f, "e4m3", "e5m2");
    refused_weights(f, "llama", SPW_ECONFIG, "/config.json: quantization_config.fmt", "8-bit floats");
    f = folder_read("llama");
    f->config[1] = '}';
    refused_weights(f, "llama", SPW_ECONFIG, "/config.json:1:17: ", "end of file expected");
    f = folder_read("llama");
    f->config[0] = '\0';
    refused_weights(f, "llama", SPW_ECORRUPT, "_scale_inv has shape [", "blocks of 128 x 128 need [1, 1]");
}

/* The k-th allocation or read fails, for every k: an error, and nothing is left behind. */
static void
test_faults(void **state)
{
    char dir[400];
    spw_model_config c;
    spw_model *m = NULL;
    spw_error err = {0};
    bool through = false;
    (void)state;
    folder_path(dir, "llama", "");
    DONE(spw_hf_config_load(&c, dir, &err));
    DONE(spw_model_build(&m, &c, &err));
    for (unsigned k = 1; !through; k++) {
        spw_hf_reader *r = NULL;
        long live = spw_test_live_allocs();
        spw_status st;
        DONE(spw_hf_reader_open(&r, dir, &err));
        spw_test_fail_alloc(k);
        st = spw_hf_reader_bind(r, m, &err);
        through = !spw_test_fault_fired();
        spw_test_fail_alloc(0);
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        spw_hf_reader_close(r);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    through = false;
    for (unsigned k = 1; !through; k++) {
        opened o = open_bound(dir, dir);
        float got[44 * 24];
        spw_status st;
        spw_test_fail_call(k);
        st = spw_hf_read_param(o.r, param_id(o.model, UP), 5, 44 * 24 - 5, got, &err);
        through = !spw_test_call_fired();
        spw_test_fail_call(0);
        assert_int_equal(st, through ? SPW_OK : SPW_EIO);
        assert_true(!through || k > 4); /* codes and scales of the first row, and of the others */
        close_bound(&o);
    }
    spw_model_destroy(m);
}

/* Floats of 4 bits: NVFP4 as two programs write it, and MXFP4. */
static void
test_floats4_config(void **state)
{
    static const char *const nv = "llama_nvfp4", *const mx = "llama_mxfp4", *const opt = "llama_modelopt",
                             *const group = "not supported yet: quantization_config.config_groups {";
    (void)state;
    refused_config_of(nv, "\"group_size\": 16", "\"group_size\": 8", group);
    refused_config_of(nv, "\"strategy\": \"tensor_group\"", "\"strategy\": \"group\"", group);
    refused_config_of(nv, "\"torch.float8_e4m3fn\"", "\"torch.uint8\"", group);
    refused_config_of(nv, "\"symmetric\": true", "\"symmetric\": false", group);
    refused_config_of(nv, "\"dynamic\": false", "\"dynamic\": true", group);
    refused_config_of(nv, "\"format\": \"nvfp4-pack-quantized\"", "\"format\": \"pack-quantized\"", group);
    refused_config_of(mx, "\"group_size\": 32", "\"group_size\": 64", group);
    refused_config_of(mx, "\"strategy\": \"group\"", "\"strategy\": \"tensor_group\"", group);
    refused_config_of(mx, "\"torch.uint8\"", "\"torch.float8_e4m3fn\"", group);
    refused_config_of(mx, "\"num_bits\": 4", "\"num_bits\": 6", group);
    refused_config_of(opt, "\"NVFP4\"", "\"FP8\"", "quantization_config.quant_algo \"FP8\"");
    refused_config_of(opt, "\"NVFP4\"", "\"W4A16_AWQ\"", "quantization_config.quant_algo \"W4A16_AWQ\"");
    refused_config_of(opt, "\"group_size\": 16", "\"group_size\": 32", group);
    taken_config_of(nv, "\"scale_dtype\": \"torch.float8_e4m3fn\"", "\"scale_dtype\": null");
    taken_config_of(opt, "\"ignore\"", "\"kv_cache_scheme\": {\"num_bits\": 8}, \"ignore\"");
}

#define DOWN   "model.layers.0.mlp.down_proj.weight"
#define DOWN_0 "model.layers.0.mlp.experts.0.down_proj.weight" /* (32, 64) */

static void
test_floats4_refused(void **state)
{
    static const char *const nv = "llama_nvfp4", *const mx = "llama_mxfp4", *const opt = "llama_modelopt";
    folder *f = folder_read(nv);
    (void)state;
    drop(f, DOWN "_global_scale");
    refused_weights(f, nv, SPW_ECORRUPT, "the scale of all of " DOWN " is missing", "weight_scale_2");
    f = folder_read(opt);
    drop(f, DOWN "_scale");
    refused_weights(f, opt, SPW_ECORRUPT, DOWN " is U8, and its scales are missing", "");
    f = folder_read(mx);
    memset(folder_add(f, DOWN "_global_scale", "F32", 1, (uint64_t[]){1}, 4)->data, 0, 4);
    refused_weights(f, mx, SPW_ECORRUPT, DOWN "_global_scale is F32", "for packed weights in NVFP4");
    refused_weights(with_type_of(nv, DOWN "_packed", "I32", 64, 4, 64 * 16), nv, SPW_ECORRUPT, DOWN "_packed is I32",
                    "4 bits for each weight are U8 of [64, 16]");
    refused_weights(with_type_of(nv, DOWN "_packed", "U8", 64, 32, 64 * 32), nv, SPW_ECORRUPT,
                    DOWN "_packed is U8 of shape [64, 32]", "U8 of [64, 16]");
    refused_weights(with_type_of(nv, DOWN "_scale", "U8", 64, 2, 128), nv, SPW_ECORRUPT, DOWN "_scale is U8",
                    "scales of this format are F8_E4M3");
    refused_weights(with_type_of(mx, DOWN "_scale", "BF16", 64, 1, 128), mx, SPW_ECORRUPT, DOWN "_scale is BF16",
                    "scales of this format are U8");
    refused_weights(with_type_of(mx, DOWN "_scale", "U8", 64, 2, 128), mx, SPW_ECORRUPT,
                    DOWN "_scale has shape [64, 2]", "blocks of 1 x 32 need [64, 1]");
    refused_weights(with_type_of(nv, DOWN "_global_scale", "BF16", 1, 1, 2), nv, SPW_ECORRUPT,
                    DOWN "_global_scale is BF16", "one F32 is for packed weights");
    refused_weights(with_type_of("qwen3_fp4", DOWN_0, "I8", 32, 64, 32 * 64), "qwen3_fp4", SPW_ECORRUPT,
                    DOWN_0 " is I8 of shape [32, 64]", "floats of 4 bits are I8 of [32, 32]");
    refused_weights(with_type_of("qwen3_fp4", DOWN_0 "_scale_inv", "F8_E8M0", 4, 4, 16), "qwen3_fp4", SPW_ECORRUPT,
                    DOWN_0 "_scale_inv has shape [4, 4]", "blocks of 1 x 32 need [32, 2]");
    refused_weights(with_type_of("qwen3_fp4", DOWN_0 "_scale_inv", "BF16", 32, 2, 128), "qwen3_fp4", SPW_ECORRUPT,
                    DOWN_0 "_scale_inv is BF16", "scales of this format are U8");
}

/* ---------------------------------------------------------------- what is made of them */

/* The same folder with the numbers in fp32, but for those that are bf16 in both. */
static folder *
decoded(const char *name)
{
    folder *f = folder_read(name);
    folder_replace(f, "\"quantization_config\"", "\"quantization\"");
    for (uint32_t i = 0; i < f->count; i++) {
        struct tensor *t = &f->tensors[i];
        char *packed = strstr(t->name, "_packed"), *inner = strstr(t->name, "model.layers.");
        uint64_t elems;
        const bool bytes = strcmp(t->type, "U8") == 0;
        if ((packed == NULL && !bytes && strcmp(t->type, "F8_E4M3") != 0) || strstr(t->name, ".weight_s") != NULL)
            continue;
        if (packed != NULL || bytes)
            t->shape[1] *= bytes ? 2 : strcmp(name, "llama_int8") == 0 ? 4 : 8;
        if (packed != NULL)
            *packed = '\0';
        elems = t->shape[0] * t->shape[1];
        free(t->data);
        t->data = expected(name, inner, elems);
        t->bytes = 4 * elems;
        snprintf(t->type, sizeof t->type, "F32");
    }
    for (uint32_t i = f->count; i-- > 0;) {
        if (strstr(f->tensors[i].name, ".weight_s") != NULL || /* scales, and shapes of what was packed */
            strstr(f->tensors[i].name, ".weight_global_scale") != NULL)
            drop(f, f->tensors[i].name);
    }
    folder_write(f);
    return f;
}

static void
freeze_layers(rig *r)
{
    rig_freeze(r, "*_proj.weight");
}

static void
int8_codes(rig *r)
{
    freeze_layers(r);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "int8");
}

static void
int4_lora(rig *r)
{
    rig_lora(r);
    snprintf(r->c.run.frozen_codes, sizeof r->c.run.frozen_codes, "int4");
}

static void
start(rig *r, const char *from, spw_state_format format, spw_tier tier, void (*change)(rig *r))
{
    rig_config(r, SPW_FAMILY_LLAMA, format, tier);
    rig_need(r, spw_hf_config_load(&r->c.model, from, &r->err));
    snprintf(r->c.model_path, sizeof r->c.model_path, "%s", from);
    if (change != NULL)
        change(r);
    r->from = from;
    rig_open(r);
    rig_need(r, spw_engine_load_weights(r->e, from, &r->err));
}

/* Losses and all state after training from codes are those after training from the numbers. */
static void
same_training(const char *name, spw_state_format format, spw_tier tier, void (*change)(rig *r))
{
    char dir[400];
    folder *f = decoded(name);
    rig coded, plain;
    folder_path(dir, name, "");
    start(&coded, dir, format, tier, change);
    start(&plain, f->dir, format, tier, change);
    rig_train(&coded, 0, RIG_STEPS);
    rig_train(&plain, 0, RIG_STEPS);
    assert_true(coded.losses[0] > 1 && coded.losses[0] < 10 && coded.losses[0] != coded.losses[RIG_STEPS - 1]);
    assert_memory_equal(coded.losses, plain.losses, sizeof coded.losses);
    assert_memory_equal(coded.norms, plain.norms, sizeof coded.norms);
    rig_same_state(&coded, &plain, "state after training from codes");
    rig_remove(&coded);
    rig_remove(&plain);
    folder_free(f);
}

static void
test_training(void **state)
{
    (void)state;
    same_training("llama", SPW_STATE_FP32, SPW_TIER_HOST, NULL);
    same_training("llama", SPW_STATE_SPLIT, SPW_TIER_NVME, NULL);
    same_training("qwen3_moe", SPW_STATE_FP32, SPW_TIER_NVME, NULL);
    same_training("qwen3_moe", SPW_STATE_MIXED, SPW_TIER_HOST, NULL);
    same_training("kimi_k25", SPW_STATE_SPLIT, SPW_TIER_NVME, NULL);
    same_training("llama_int8", SPW_STATE_FP32, SPW_TIER_HOST, NULL);
    same_training("llama_float", SPW_STATE_MIXED, SPW_TIER_NVME, NULL);
    same_training("llama_modelopt", SPW_STATE_SPLIT, SPW_TIER_NVME, NULL);
}

/* What is frozen could stay in its file, where it is not what trains; as codes it is made of the numbers. */
static void
test_frozen(void **state)
{
    (void)state;
    same_training("llama", SPW_STATE_FP32, SPW_TIER_NVME, freeze_layers);
    same_training("qwen3_moe", SPW_STATE_MIXED, SPW_TIER_NVME, freeze_layers);
    same_training("llama", SPW_STATE_FP32, SPW_TIER_NVME, int8_codes);
    same_training("qwen3_moe", SPW_STATE_SPLIT, SPW_TIER_HOST, int8_codes);
    same_training("llama", SPW_STATE_SPLIT, SPW_TIER_NVME, int4_lora);
    same_training("kimi_k25", SPW_STATE_SPLIT, SPW_TIER_NVME, int4_lora);
    same_training("kimi_k25", SPW_STATE_MIXED, SPW_TIER_NVME, freeze_layers);
}

static void
check_export(const char *name, const char *dir, spw_dtype asked, spw_dtype dtype)
{
    char from[400], to[400], config[500], *text;
    spw_export_report report;
    spw_error err = {0};
    opened o, source;
    folder_path(from, name, "");
    snprintf(to, sizeof to, "%s/%s-%d", dir, name, (int)asked);
    DONE(spw_export(&(spw_export_options){.source = from, .to = to, .dtype = asked}, &report, &err));
    assert_int_equal(report.dtype, dtype);
    snprintf(config, sizeof config, "%s/config.json", to);
    DONE(spw_file_read_text(config, TEXT_BYTES, &text, &err));
    assert_null(strstr(text, "quantization"));
    spw_mem_free(text);
    o = open_bound(to, to);
    source = open_bound(from, from);
    for (uint32_t id = 0; id < o.model->param_count; id++) {
        uint64_t elems = o.model->params[id].rows * o.model->params[id].cols;
        float *want = malloc(elems * sizeof *want);
        uint16_t *half = malloc(elems * sizeof *half);
        assert_true(want != NULL && half != NULL);
        DONE(spw_hf_read_param(source.r, id, 0, elems, want, &err));
        if (dtype != SPW_F32) {
            spw_convert(half, dtype, want, SPW_F32, elems);
            spw_convert(want, SPW_F32, half, dtype, elems);
        }
        same_in_ranges(&o, id, want);
        free(want);
        free(half);
    }
    close_bound(&source);
    close_bound(&o);
}

/* Numbers, in the type of what is not quantized or the one that is asked for, and no word of a quantization. */
static void
test_export(void **state)
{
    char dir[256];
    (void)state;
    tiny_dir_make(dir);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        check_export(cases[k].name, dir, SPW_DTYPE_COUNT, SPW_BF16);
        check_export(cases[k].name, dir, SPW_F32, SPW_F32);
    }
    tiny_dir_remove(dir);
}

/* A checkpoint of a run that began there says nothing of a quantization either, and is loaded like others. */
static void
test_checkpoint(void **state)
{
    char path[400], config[500], *text;
    spw_error err = {0};
    rig r, again;
    (void)state;
    folder_path(path, "llama", "");
    start(&r, path, SPW_STATE_SPLIT, SPW_TIER_HOST, NULL);
    rig_train(&r, 0, 2);
    rig_save(&r, 2);
    snprintf(config, sizeof config, "%s/step-2/config.json", r.dir);
    DONE(spw_file_read_text(config, TEXT_BYTES, &text, &err));
    assert_null(strstr(text, "quantization"));
    spw_mem_free(text);
    rig_config(&again, SPW_FAMILY_LLAMA, SPW_STATE_SPLIT, SPW_TIER_HOST);
    again.c.model = r.c.model;
    rig_load(&again, &r, 2);
    rig_same_state(&r, &again, "a checkpoint's state");
    rig_remove(&r);
    rig_remove(&again);
}

/* A generator has bf16 weights of what is bf16 but for codes, and fp32 of anything else. */
static void
test_generator(void **state)
{
    static spw_weights w;
    char path[400];
    folder *f = folder_read("llama");
    struct tensor *t = folder_find(f, "model.norm.weight"); /* it comes after the codes */
    spw_error err = {0};
    (void)state;
    folder_path(path, "llama", "");
    DONE(spw_weights_find(&w, path, &err));
    assert_int_equal(w.config.run.state_format, SPW_STATE_MIXED);
    assert_string_equal(w.config.run.frozen_codes, "none"); /* blocks of 10 columns */
    snprintf(t->type, sizeof t->type, "F16");
    folder_write(f);
    DONE(spw_weights_find(&w, f->dir, &err));
    assert_int_equal(w.config.run.state_format, SPW_STATE_FP32);
    folder_free(f);
    folder_path(path, "kimi_k25", "");
    DONE(spw_weights_find(&w, path, &err));
    assert_int_equal(w.config.run.state_format, SPW_STATE_MIXED);
    assert_string_equal(w.config.run.frozen_codes, "published");
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_torch),    cmocka_unit_test(test_codes),
        cmocka_unit_test(test_random_shapes),    cmocka_unit_test(test_without_config),
        cmocka_unit_test(test_tied_head),        cmocka_unit_test(test_config),
        cmocka_unit_test(test_config_of_images), cmocka_unit_test(test_weights_refused),
        cmocka_unit_test(test_packed_config),    cmocka_unit_test(test_packed_refused),
        cmocka_unit_test(test_floats4_config),   cmocka_unit_test(test_floats4_refused),
        cmocka_unit_test(test_random_packed),    cmocka_unit_test(test_faults),
        cmocka_unit_test(test_training),         cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_export),           cmocka_unit_test(test_checkpoint),
        cmocka_unit_test(test_generator),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
