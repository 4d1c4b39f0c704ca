/*
 * Weights as codes, and a number for each block of rows and columns, or one for all, by which what the codes stand for is multiplied. Three kinds:
 *   8-bit floats  as DeepSeek-V3 and what follows it are published: e4m3 without infinities; files call the numbers weight_scale_inv: it is
 *                 what the quantizer divided by
 *   packed        as Kimi-K2 Thinking and what follows it are published, in compressed-tensors' format pack-quantized: integers of 4 or 8 bits, of
 *                 which half the range is taken off, in words of 32 bits, the lowest bits first
 *   of 4 bits     E2M1, two to a byte: NVFP4, whose scales are 8-bit floats for each 16 of a row, divided by a number of the matrix (compressed-tensors'
 *                 nvfp4-pack-quantized, and NVIDIA's ModelOpt, whose files have the inverse of that number), and MXFP4, whose scales are powers of two for
 *                 each 32 (mxfp4-pack-quantized; that of gpt-oss, which lies the other way round, is mxfp4.c's)
 *                 Such experts may stand beside 8-bit floats (DeepSeek-V4), whose scales are then powers of two in 8 bits too
 * A decoded number is one product in fp32, rounded once. Here is what a config.json says of them, which part of the scales a range of
 * a matrix takes, and the decoding; the files are the reader's.
 * Source: Micikevicius et al. 2022 (2209.05433), 3.1; DeepSeek-AI 2024 (2412.19437), 3.3.2; the documentation of compressed-tensors, "pack-quantized"; OCP Microscaling Formats (MX) 1.0, 5.3, E2M1; compressed-tensors' converter of ModelOpt's files.
 */
#include "files_internal.h"
#include "fp8.h"
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define BLOCK_MAX 2147483648.0

/* ---------------------------------------------------------------- what config.json says */

static bool
is_one_of(const json_t *v, const char *a, const char *b)
{
    const char *text = json_string_value(v);
    return text != NULL && (strcmp(text, a) == 0 || strcmp(text, b) == 0);
}

/* Null: all of a matrix is one. */
static bool
read_block(const json_t *v, spw_scaled *out)
{
    uint64_t block[2] = {(uint64_t)BLOCK_MAX, (uint64_t)BLOCK_MAX};
    for (size_t i = 0; i < 2 && !json_is_null(v); i++) {
        double x = json_number_value(json_array_get(v, i));
        if (json_array_size(v) != 2 || !(x >= 1 && x <= BLOCK_MAX) || x != (double)(uint64_t)x)
            return false;
        block[i] = (uint64_t)x;
    }
    out->rows = block[0];
    out->cols = block[1];
    return true;
}

/* Which weights are in 8 bits, their types in the files say: lists of modules are not looked at. */
static bool
is_understood(const char *member, const json_t *v, spw_scaled *out)
{
    if (strcmp(member, "quant_method") == 0 || strcmp(member, "modules_to_not_convert") == 0 ||
        strcmp(member, "ignored_layers") == 0 || strcmp(member, "modules_to_convert") == 0)
        return true;
    if (strcmp(member, "weight_block_size") == 0)
        return read_block(v, out);
    if (json_is_null(v))
        return true;
    if (strcmp(member, "fmt") == 0)
        return is_one_of(v, "e4m3", "float8_e4m3fn");
    if (strcmp(member, "activation_scheme") == 0) /* of whoever multiplies in 8 bits */
        return is_one_of(v, "dynamic", "static");
    if (strcmp(member, "scale_fmt") == 0) /* powers of two: numbers like others, or in 8 bits, as their type says */
        return is_one_of(v, "float", "ue8m0");
    if (strcmp(member, "expert_dtype") == 0)
        return is_one_of(v, "fp8", "fp4");
    return strcmp(member, "dequantize") == 0 && json_is_boolean(v); /* a choice of whoever loads it */
}

static const char *
fp8_refused(const json_t *quantization, spw_scaled *out)
{
    const char *member;
    json_t *v;
    *out = (spw_scaled){.rows = 128, .cols = 128, .bits = 8};
    json_object_foreach((json_t *)(uintptr_t)quantization, member, v)
    {
        if (!is_understood(member, v, out))
            return member;
    }
    return json_object_get(quantization, "weight_block_size") == NULL ? "weight_block_size" : NULL;
}

static bool
is_missing(const json_t *v)
{
    return v == NULL || json_is_null(v);
}

/* Floats of 4 bits: NVFP4 and MXFP4 are those that there are. Types of scales, where they are said, are those that the formats have. */
static bool
read_floats_group(const json_t *w, spw_scaled *out)
{
    const json_t *strategy = json_object_get(w, "strategy"), *type = json_object_get(w, "scale_dtype");
    const double each = json_number_value(json_object_get(w, "group_size"));
    const bool nv = each == 16;
    *out = (spw_scaled){.rows = 1,
                        .cols = nv ? 16 : 32,
                        .bits = 4,
                        .packed = true,
                        .floats = true,
                        .scales = nv ? SPW_SCALES_E4M3 : SPW_SCALES_E8M0};
    if (nv)
        return (is_missing(strategy) || is_one_of(strategy, "tensor_group", "tensor_group")) &&
               (is_missing(type) || is_one_of(type, "torch.float8_e4m3fn", "float8_e4m3fn"));
    return each == 32 && is_one_of(strategy, "group", "group") &&
           (is_missing(type) || is_one_of(type, "torch.uint8", "uint8"));
}

/* How a group of modules has its weights as codes. How these were found is not looked at, nor what whoever multiplies rounds besides. */
static bool
read_group(const json_t *group, spw_scaled *out)
{
    const json_t *w = json_object_get(group, "weights"), *strategy = json_object_get(w, "strategy"),
                 *order = json_object_get(w, "actorder"), *type = json_object_get(w, "type");
    const double bits = json_number_value(json_object_get(w, "num_bits")),
                 each = json_number_value(json_object_get(w, "group_size"));
    const bool whole = is_one_of(strategy, "tensor", "tensor"), grouped = is_one_of(strategy, "group", "group");
    const uint64_t all = (uint64_t)BLOCK_MAX, size = each >= 1 && each <= BLOCK_MAX ? (uint64_t)each : 0;
    if (is_one_of(type, "float", "float") && bits == 4)
        return !json_is_false(json_object_get(w, "symmetric")) && !json_is_true(json_object_get(w, "dynamic")) &&
               read_floats_group(w, out);
    out->packed = is_missing(type) || is_one_of(type, "int", "int");
    out->bits = bits == 4 ? 4 : 8;
    if (!json_is_true(json_object_get(w, "symmetric")) || json_is_true(json_object_get(w, "dynamic")) ||
        !(out->packed ? bits == 4 || bits == 8 : bits == 8 && is_one_of(type, "float", "float")))
        return false;
    if (!is_missing(order) && !is_one_of(order, "weight", "static")) /* "group" would put columns in another order */
        return false;
    if (is_one_of(strategy, "block", "block"))
        return json_is_array(json_object_get(w, "block_structure")) &&
               read_block(json_object_get(w, "block_structure"), out);
    out->rows = whole ? all : 1;
    out->cols = grouped ? size : all;
    return grouped ? size > 0 && each == (double)size : whole || is_one_of(strategy, "channel", "channel");
}

static const char *
compressed_refused(const json_t *quantization, spw_scaled *out)
{
    static const char *const empty[] = {"kv_cache_scheme", "sparsity_config", "transform_config"};
    const json_t *groups = json_object_get(quantization, "config_groups"),
                 *group = json_object_iter_value(json_object_iter((json_t *)(uintptr_t)groups)),
                 *status = json_object_get(quantization, "quantization_status"),
                 *own = json_object_get(group, "format");
    const char *format;
    *out = (spw_scaled){.rows = 0};
    if (json_object_size(groups) != 1 || !read_group(group, out))
        return "config_groups";
    format = out->scales == SPW_SCALES_E4M3   ? "nvfp4-pack-quantized"
             : out->scales == SPW_SCALES_E8M0 ? "mxfp4-pack-quantized"
             : out->packed                    ? "pack-quantized"
                                              : "float-quantized";
    if (!is_one_of(json_object_get(quantization, "format"), format, format))
        return "format";
    if (!is_missing(own) && !is_one_of(own, format, format))
        return "config_groups";
    if (!is_missing(status) && !is_one_of(status, "compressed", "compressed"))
        return "quantization_status";
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if (json_object_size(json_object_get(quantization, empty[i])) > 0)
            return empty[i];
    return NULL;
}

/* Keys and values that a server rounds are none of the weights. */
static const char *
modelopt_refused(const json_t *quantization, spw_scaled *out)
{
    const json_t *groups = json_object_get(quantization, "config_groups"),
                 *group = json_object_iter_value(json_object_iter((json_t *)(uintptr_t)groups));
    *out = (spw_scaled){.packed = true, .floats = true, .bits = 4, .rows = 1, .cols = 16, .scales = SPW_SCALES_E4M3};
    if (!is_one_of(json_object_get(quantization, "quant_algo"), "NVFP4", "NVFP4"))
        return "quant_algo";
    if (groups == NULL)
        return NULL;
    return json_object_size(groups) == 1 && read_group(group, out) && out->scales == SPW_SCALES_E4M3 ? NULL
                                                                                                     : "config_groups";
}

const char *
spw__scaled_refused(const json_t *quantization, spw_scaled *out)
{
    const json_t *method = json_object_get(quantization, "quant_method");
    return is_one_of(method, "fp8", "fp8")                                 ? fp8_refused(quantization, out)
           : is_one_of(method, "compressed-tensors", "compressed-tensors") ? compressed_refused(quantization, out)
           : is_one_of(method, "modelopt", "modelopt")                     ? modelopt_refused(quantization, out)
                                                                           : "quant_method";
}

/* That of a model of text and images may be in its text part. */
static spw_status
blocks_of(const json_t *root, const char *file, bool packed, spw_scaled *out, spw_error *err)
{
    const json_t *whole = json_object_get(root, "quantization_config");
    const json_t *q =
        json_is_object(whole) ? whole : json_object_get(json_object_get(root, "text_config"), "quantization_config");
    const char *refused = spw__scaled_refused(q, out), *what = packed ? "packed weights" : "weights in 8-bit floats";
    if (q == NULL)
        return SPW_RAISE(err, SPW_ECONFIG, "%s: there are %s, and no quantization_config that says their blocks", file,
                         what);
    if (refused != NULL || out->packed != packed)
        return SPW_RAISE(err, SPW_ECONFIG, "%s: quantization_config.%s is not that of %s with blocks", file,
                         refused != NULL ? refused : "quant_method", what);
    return SPW_OK;
}

static void
fill_values(spw_scaled *b)
{
    for (int code = 0; code < 1 << b->bits; code++)
        b->values[code] = b->floats   ? spw__e2m1(code)
                          : b->packed ? (float)(code - (1 << (b->bits - 1)))
                                      : spw_fp8_to_f32(SPW_E4M3, (uint8_t)code);
}

void
spw__scaled_of_experts(spw_scaled *out)
{
    *out = (spw_scaled){.rows = 1, .cols = 32, .bits = 4, .packed = true, .floats = true, .scales = SPW_SCALES_E8M0};
    fill_values(out);
}

spw_status
spw__scaled_of(spw_scaled *out, const char *folder, bool packed, spw_error *err)
{
    char file[SPW_HF_CONFIG_PATH_BYTES];
    json_t *root;
    spw_status st;
    if (!spw_dir_has(folder, "config.json")) {
        if (packed)
            return SPW_RAISE(err, SPW_ECONFIG, "%s: there are packed weights, and no config.json that says their bits",
                             folder);
        *out = (spw_scaled){.rows = 128, .cols = 128, .bits = 8};
    } else {
        SPW_TRY(spw__hf_folder_config(&root, file, folder, err));
        st = blocks_of(root, file, packed, out, err);
        json_decref(root);
        if (st != SPW_OK)
            out->rows = 0;
        SPW_TRY(st);
    }
    fill_values(out);
    return SPW_OK;
}

/* ---------------------------------------------------------------- ranges of a matrix */

/* A piece lies in one row, or is whole rows: its scales lie in one piece too, and are no more than it has elements. */
spw_scaled_piece
spw__scaled_piece(const spw_scaled *b, uint64_t cols, uint64_t first, uint64_t count)
{
    uint64_t row = first / cols, col = first % cols, end, across = (cols - 1) / b->cols + 1;
    if (col > 0 || count < cols)
        count = count < cols - col ? count : cols - col;
    else
        count -= count % cols;
    end = first + count - 1; /* the last one */
    first = row / b->rows * across + col / b->cols;
    return (spw_scaled_piece){count, first, end / cols / b->rows * across + end % cols / b->cols - first + 1};
}

/* What n codes stand for, from code `at` on, times scale. */
static void
decode(float *out, const spw_scaled *b, const uint8_t *codes, uint64_t at, uint64_t n, float scale)
{
    if (b->bits == 8)
        for (uint64_t i = 0; i < n; i++)
            out[i] = b->values[codes[at + i]] * scale;
    else
        for (uint64_t i = 0; i < n; i++)
            out[i] = b->values[codes[(at + i) / 2] >> (at + i) % 2 * 4 & 15] * scale;
}

void
spw__scaled_read(float *out, const spw_scaled *b, uint64_t cols, const uint8_t *codes, const float *scales,
                 uint64_t first, const spw_scaled_piece *piece)
{
    uint64_t across = (cols - 1) / b->cols + 1, left = piece->count, at = b->bits == 4 ? first % 2 : 0;
    for (uint64_t row = first / cols, col = first % cols; left > 0; row++, col = 0) {
        uint64_t end = cols - col < left ? cols : col + left;
        left -= end - col;
        while (col < end) {
            uint64_t next = (col / b->cols + 1) * b->cols, n = (next < end ? next : end) - col;
            decode(out, b, codes, at, n, scales[row / b->rows * across + col / b->cols - piece->scale_first]);
            out += n;
            at += n;
            col += n;
        }
    }
}
