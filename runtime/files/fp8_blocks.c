/*
 * Weights in 8-bit floats, as DeepSeek-V3 and what follows it are published: e4m3 without infinities, and an fp32 number for each block of
 * rows and columns, or one for all, by which its weights are multiplied (files call it weight_scale_inv: it is what the quantizer divided by). A decoded
 * number is one product in fp32, rounded once. Here is what a config.json says of them, which part of the scales a range of
 * a matrix takes, and the decoding; the files are the reader's.
 * Source: Micikevicius et al. 2022 (2209.05433), 3.1; DeepSeek-AI 2024 (2412.19437), 3.3.2.
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
read_block(const json_t *v, uint64_t block[2])
{
    if (json_is_null(v))
        block[0] = block[1] = (uint64_t)BLOCK_MAX;
    if (json_is_null(v))
        return true;
    for (size_t i = 0; i < 2; i++) {
        double x = json_number_value(json_array_get(v, i));
        if (json_array_size(v) != 2 || !(x >= 1 && x <= BLOCK_MAX) || x != (double)(uint64_t)x)
            return false;
        block[i] = (uint64_t)x;
    }
    return true;
}

/* Which weights are in 8 bits, their types in the files say: lists of modules are not looked at. */
static bool
is_understood(const char *member, const json_t *v, uint64_t block[2])
{
    if (strcmp(member, "quant_method") == 0 || strcmp(member, "modules_to_not_convert") == 0 ||
        strcmp(member, "ignored_layers") == 0 || strcmp(member, "modules_to_convert") == 0)
        return true;
    if (strcmp(member, "weight_block_size") == 0)
        return read_block(v, block);
    if (json_is_null(v))
        return true;
    if (strcmp(member, "fmt") == 0)
        return is_one_of(v, "e4m3", "float8_e4m3fn");
    if (strcmp(member, "activation_scheme") == 0) /* of whoever multiplies in 8 bits */
        return is_one_of(v, "dynamic", "static");
    if (strcmp(member, "scale_fmt") == 0) /* powers of two are fp32 numbers like others */
        return is_one_of(v, "float", "ue8m0");
    if (strcmp(member, "expert_dtype") == 0)
        return is_one_of(v, "fp8", "fp8");
    return strcmp(member, "dequantize") == 0 && json_is_boolean(v); /* a choice of whoever loads it */
}

const char *
spw__fp8_refused(const json_t *quantization, uint64_t block[2])
{
    const char *member;
    json_t *v;
    if (!is_one_of(json_object_get(quantization, "quant_method"), "fp8", "fp8"))
        return "quant_method";
    json_object_foreach((json_t *)(uintptr_t)quantization, member, v)
    {
        if (!is_understood(member, v, block))
            return member;
    }
    return json_object_get(quantization, "weight_block_size") == NULL ? "weight_block_size" : NULL;
}

/* That of a model of text and images may be in its text part. */
static spw_status
block_of(const json_t *root, const char *file, uint64_t block[2], spw_error *err)
{
    const json_t *whole = json_object_get(root, "quantization_config");
    const json_t *q =
        json_is_object(whole) ? whole : json_object_get(json_object_get(root, "text_config"), "quantization_config");
    const char *refused = spw__fp8_refused(q, block);
    if (q == NULL)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "%s: there are weights in 8-bit floats, and no quantization_config that says their blocks",
                         file);
    if (refused != NULL)
        return SPW_RAISE(err, SPW_ECONFIG,
                         "%s: quantization_config.%s is not that of weights in 8-bit floats with blocks", file,
                         refused);
    return SPW_OK;
}

spw_status
spw__fp8_blocks_of(spw_fp8_blocks *out, const char *folder, spw_error *err)
{
    uint64_t block[2] = {128, 128};
    char file[SPW_HF_CONFIG_PATH_BYTES];
    spw_status st = SPW_OK;
    for (unsigned code = 0; code < 256; code++)
        out->values[code] = spw_fp8_to_f32(SPW_E4M3, (uint8_t)code);
    if (spw_dir_has(folder, "config.json")) {
        json_t *root;
        SPW_TRY(spw__hf_folder_config(&root, file, folder, err));
        st = block_of(root, file, block, err);
        json_decref(root);
    }
    out->rows = st == SPW_OK ? block[0] : 0;
    out->cols = block[1];
    return st;
}

/* ---------------------------------------------------------------- ranges of a matrix */

/* A piece lies in one row, or is whole rows: its scales lie in one piece too, and are no more than it has elements. */
spw_fp8_piece
spw__fp8_piece(const spw_fp8_blocks *b, uint64_t cols, uint64_t first, uint64_t count)
{
    uint64_t row = first / cols, col = first % cols, end, across = (cols - 1) / b->cols + 1;
    if (col > 0 || count < cols)
        count = count < cols - col ? count : cols - col;
    else
        count -= count % cols;
    end = first + count - 1; /* the last one */
    first = row / b->rows * across + col / b->cols;
    return (spw_fp8_piece){count, first, end / cols / b->rows * across + end % cols / b->cols - first + 1};
}

void
spw__fp8_read(float *out, const spw_fp8_blocks *b, uint64_t cols, const uint8_t *codes, const float *scales,
              uint64_t first, const spw_fp8_piece *piece)
{
    uint64_t across = (cols - 1) / b->cols + 1, left = piece->count;
    for (uint64_t row = first / cols, col = first % cols; left > 0; row++, col = 0) {
        uint64_t end = cols - col < left ? cols : col + left;
        left -= end - col;
        while (col < end) {
            uint64_t next = (col / b->cols + 1) * b->cols, n = (next < end ? next : end) - col;
            float scale = scales[row / b->rows * across + col / b->cols - piece->scale_first];
            for (uint64_t i = 0; i < n; i++)
                out[i] = b->values[codes[i]] * scale;
            out += n;
            codes += n;
            col += n;
        }
    }
}
