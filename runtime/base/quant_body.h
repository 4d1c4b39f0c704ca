/*
 * The quantizer (quant.h), included once per instruction set with QUANT set to the name of its kernels. Plain loops over a
 * block that compilers vectorise; every operation is IEEE's and none is contracted, so all of them make the same bytes.
 */
#include "convert.h"
#include "quant.h"

enum { BLOCK = SPW_QUANT_BLOCK, HALF = SPW_QUANT_BLOCK / 2, CODES8 = BLOCK, CODES4 = HALF };

#define SMALLEST 0x1p-126f        /* normal: so its reciprocal is finite */
#define LARGEST  0x1.020406p+121f /* 127 times it is finite, 127 times the next one is not */
#define ROUNDER  12582912.0f /* 1.5 * 2^23: adding it leaves x, rounded to an integer, in the low bits of the sum */

/* An element's code in the low bits. */
static inline uint32_t
code_of(float x, float inverse)
{
    return spw_f32_bits(x * inverse + ROUNDER);
}

/* False: something in the block is not finite. As integers magnitudes compare like floats, and NaN above all. */
static inline bool
scale_of(const float *x, int32_t top, float *scale)
{
    int32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        int32_t magnitude = (int32_t)(spw_f32_bits(x[i]) & 0x7fffffffu);
        most = magnitude > most ? magnitude : most;
    }
    *scale = spw_bits_f32((uint32_t)most) / (float)top;
    *scale = *scale < SMALLEST ? SMALLEST : *scale > LARGEST && top == 127 ? LARGEST : *scale;
    return most < 0x7f800000;
}

/* The least scale of the kind that is not below this one and has few enough bits. */
static inline float
settled(float scale, spw_quant kind)
{
    uint32_t low = kind == SPW_QUANT_INT8 ? 0x7fffffu : 0x7ffffu; /* bits of the fraction that must be 0 */
    float least = kind == SPW_QUANT_INT8 ? 0x1p-24f : 0x1p-20f;   /* all its codes' numbers are whole steps of fp16 */
    return scale < least ? least : spw_bits_f32((spw_f32_bits(scale) + low) & ~low);
}

static inline void
encode_block(uint8_t *out, spw_quant kind, const float *x, bool settle)
{
    float scale, inverse;
    uint8_t *restrict codes = out + sizeof scale;
    if (!scale_of(x, kind == SPW_QUANT_INT8 ? 127 : 7, &scale)) {
        scale = spw_bits_f32(0x7fc00000u);
        memset(codes, 0, kind == SPW_QUANT_INT8 ? CODES8 : CODES4);
        memcpy(out, &scale, sizeof scale);
        return;
    }
    scale = settle ? settled(scale, kind) : scale;
    memcpy(out, &scale, sizeof scale);
    inverse = 1.0f / scale;
    if (kind == SPW_QUANT_INT8) {
        for (int i = 0; i < BLOCK; i++)
            codes[i] = (uint8_t)code_of(x[i], inverse);
    } else {
        for (int i = 0; i < HALF; i++)
            codes[i] = (uint8_t)((code_of(x[i], inverse) & 15u) | (code_of(x[i + HALF], inverse) << 4));
    }
}

/*
 * Codes of a published block as numbers. A float of few bits is one of fp32 with another bias; below its least exponent one is put in front of the
 * fraction and taken off again: subnormal numbers of fp32 would cost a hundred times as much.
 */
static inline float
widen_float(uint32_t code, uint32_t bits, uint32_t mantissa, uint32_t bias)
{
    const uint32_t sign = 1u << (bits - 1), a = (code & (sign - 1)) << (23 - mantissa), small = 0u - (a < 0x800000u);
    const float x =
        spw_bits_f32(a + ((127 - bias) << 23) + (small & 0x800000u)) - spw_bits_f32(small & ((128 - bias) << 23));
    return spw_bits_f32(spw_f32_bits(x) | (code & sign) << (32 - bits));
}

static inline void
widen_floats(float *restrict x, const uint8_t *restrict codes, uint32_t bits)
{
    if (bits == 8) {
        for (int i = 0; i < BLOCK; i++)
            x[i] = widen_float(codes[i], 8, 3, 7);
        return;
    }
    for (int i = 0; i < HALF; i++)
        x[i] = widen_float(codes[i] & 15u, 4, 1, 1);
    for (int i = 0; i < HALF; i++)
        x[i + HALF] = widen_float(codes[i] >> 4, 4, 1, 1);
}

static inline void
widen_integers(float *restrict x, const uint8_t *restrict codes, uint32_t bits)
{
    if (bits == 8) {
        for (int i = 0; i < BLOCK; i++)
            x[i] = (float)(int8_t)codes[i];
        return;
    }
    for (int i = 0; i < HALF; i++)
        x[i] = (float)((int32_t)((codes[i] & 15u) ^ 8u) - 8);
    for (int i = 0; i < HALF; i++)
        x[i + HALF] = (float)((int32_t)((codes[i] >> 4) ^ 8u) - 8);
}

/* That of group g of a block. */
static inline float
published_scale(const uint8_t *block, spw_quant form, uint32_t g)
{
    float scale;
    uint16_t half;
    if (spw_codes_scale_of(form) == SPW_SCALE_E8M0)
        return spw_bits_f32(block[g] > 0 ? (uint32_t)block[g] << 23 : 1u << 22);
    if (spw_codes_scale_of(form) == SPW_SCALE_BF16) {
        memcpy(&half, block + g * sizeof half, sizeof half);
        return spw_bf16_to_f32(half);
    }
    memcpy(&scale, block + g * sizeof scale, sizeof scale);
    return scale;
}

static inline void
decode_published(float *restrict x, spw_quant form, const uint8_t *in)
{
    const uint32_t group = spw_codes_group(form), bits = spw_codes_bits(form);
    if (spw_codes_are_floats(form))
        widen_floats(x, in + spw_codes_begin(form), bits);
    else
        widen_integers(x, in + spw_codes_begin(form), bits);
    for (uint32_t g = 0; g < BLOCK / group; g++) {
        const float scale = published_scale(in, form, g);
        for (uint32_t i = g * group; i < (g + 1) * group; i++)
            x[i] *= scale;
    }
    for (int i = 0; spw_codes_round(form) && i < BLOCK; i++)
        x[i] = spw_bits_f32((spw_f32_bits(x[i]) + 0x8000u) & 0xffff0000u);
}

static inline void
decode_block(float *restrict x, spw_quant kind, const uint8_t *in)
{
    float scale;
    const uint8_t *codes = in + sizeof scale;
    if (spw_codes_group(kind) > 0) {
        decode_published(x, kind, in);
        return;
    }
    memcpy(&scale, in, sizeof scale);
    if (kind == SPW_QUANT_INT8) {
        for (int i = 0; i < BLOCK; i++)
            x[i] = (float)(int8_t)codes[i] * scale;
    } else {
        for (int i = 0; i < HALF; i++)
            x[i] = (float)((int32_t)((codes[i] & 15u) ^ 8u) - 8) * scale;
        for (int i = 0; i < HALF; i++)
            x[i + HALF] = (float)((int32_t)((codes[i] >> 4) ^ 8u) - 8) * scale;
    }
}

static inline void
encode_as(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems, bool settle)
{
    uint64_t step = spw__quant_bytes(kind, BLOCK);
    uint8_t *out = codes;
    for (uint64_t at = 0; at < elems; at += BLOCK, out += step) {
        _Alignas(64) float wide[BLOCK];
        if (type == SPW_F32) {
            encode_block(out, kind, (const float *)src + at, settle);
        } else {
            spw__convert_here(wide, SPW_F32, (const uint16_t *)src + at, type, BLOCK);
            encode_block(out, kind, wide, settle);
        }
    }
}

static void
encode(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems)
{
    encode_as(codes, kind, src, type, elems, false);
}

static void
settle(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems)
{
    encode_as(codes, kind, src, type, elems, true);
}

static void
decode_strips(void *dst, spw_dtype type, const uint8_t *in, spw_quant form, uint64_t elems)
{
    const uint32_t cols = spw_codes_cols(form);
    uint64_t at = 0;
    for (; at < elems; in += spw__quant_bytes(form, spw_codes_unit(form))) {
        for (uint32_t row = 0; row < SPW_STRIP_ROWS; row++) {
            for (uint32_t col = 0, n; col < cols; col += n, at += n) {
                _Alignas(64) float wide[BLOCK];
                n = cols - col < BLOCK ? cols - col : BLOCK;
                spw__quant_strip_row(wide, form, in, row, col, n);
                if (type == SPW_F32)
                    memcpy((float *)dst + at, wide, n * sizeof *wide);
                else
                    spw__convert_here((uint16_t *)dst + at, type, wide, SPW_F32, n);
            }
        }
    }
}

static void
decode(void *dst, spw_dtype type, const void *codes, spw_quant kind, uint64_t elems)
{
    uint64_t step = spw__quant_bytes(kind, BLOCK);
    const uint8_t *in = codes;
    if (spw_codes_cols(kind) > 0) {
        decode_strips(dst, type, in, kind, elems);
        return;
    }
    for (uint64_t at = 0; at < elems; at += BLOCK, in += step) {
        _Alignas(64) float wide[BLOCK];
        if (type == SPW_F32) {
            decode_block((float *)dst + at, kind, in);
        } else {
            decode_block(wide, kind, in);
            spw__convert_here((uint16_t *)dst + at, type, wide, SPW_F32, BLOCK);
        }
    }
}

const spw__quant_kernels QUANT = {encode, decode, settle};
