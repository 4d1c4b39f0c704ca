/*
 * spw_codes.h - what numbers are as codes, said in one word: those of quant.h, which are made here (SPW_QUANT_INT8 and INT4), and those in which
 * others publish weights. Blocks of either are 128 elements with the scales for them in front.
 *
 *   a published block   128 / group scales, then a byte for each element, or a half: element i low in byte i, element i + 64 high
 *
 *   integers of 4 or 8 bits in two's complement; floats of 4 bits (E2M1) or 8 (E4M3, fp8.h)
 *   scales   fp32; bf16; or a power of two, e meaning 2^(e - 127): for each 16, 32, 64 or 128 elements, 4 bytes of them at least
 *
 * Of a matrix whose columns have scales, for each 32 rows of one (gpt-oss' MXFP4, as products take it), the codes are those of strips of 32 rows, one
 * after the other, in 4.25 bits a weight as in blocks:
 *
 *   a strip             a power of two for each column, then for each of 16 rows a byte for each column: this row's code low, that of 16 rows on high
 *
 * A number is code * scale, one product in fp32; where weights are bf16 that is rounded as a state format rounds them, to nearest, ties
 * away from zero.
 *
 * Source  OCP Microscaling Formats (MX) 1.0, 5.2 and 5.3 (E2M1, powers of two); Micikevicius et al. 2022 (2209.05433), E4M3.
 */
#ifndef SPW_CODES_H
#define SPW_CODES_H

#include <stdint.h>

enum { SPW_QUANT_BLOCK = 128 };

/* Its low four bits are those of a code; what is above is 0 for our own. */
typedef uint32_t spw_quant;
enum { SPW_QUANT_NONE = 0, SPW_QUANT_INT4 = 4, SPW_QUANT_INT8 = 8 };
enum { SPW_FORMS_MAX = 4 }; /* that the weights of one model are in */
typedef enum spw_codes_scale { SPW_SCALE_F32, SPW_SCALE_BF16, SPW_SCALE_E8M0 } spw_codes_scale;

static inline spw_quant
spw_codes_published(uint32_t bits, int floats, spw_codes_scale scale, uint32_t group, int bf16)
{
    return bits | (floats ? 16u : 0u) | (bf16 ? 32u : 0u) | (uint32_t)scale << 6 | group << 8;
}

/* Strips of a matrix with so many columns: a multiple of 4, SPW_STRIP_COLS_MAX at most. */
enum { SPW_STRIP_ROWS = 32, SPW_STRIP_COLS_MAX = 32764 };
static inline spw_quant
spw_codes_strips(uint32_t cols, int bf16)
{
    return spw_codes_published(4, 1, SPW_SCALE_E8M0, SPW_STRIP_ROWS, bf16) | cols << 16;
}

/* 0: there are blocks. */
static inline uint32_t
spw_codes_cols(spw_quant form)
{
    return form >> 16;
}

/* Elements of a block or a strip, of which codes are cut into whole ones. */
static inline uint32_t
spw_codes_unit(spw_quant form)
{
    return spw_codes_cols(form) > 0 ? SPW_STRIP_ROWS * spw_codes_cols(form) : (uint32_t)SPW_QUANT_BLOCK;
}

static inline uint32_t
spw_codes_bits(spw_quant form)
{
    return form & 15u;
}

/* Elements of a scale; 0: the form is our own. */
static inline uint32_t
spw_codes_group(spw_quant form)
{
    return form >> 8 & 255u;
}

static inline int
spw_codes_are_floats(spw_quant form)
{
    return (form & 16u) != 0;
}

/* Numbers are rounded to bf16. */
static inline int
spw_codes_round(spw_quant form)
{
    return (form & 32u) != 0;
}

static inline spw_codes_scale
spw_codes_scale_of(spw_quant form)
{
    return (spw_codes_scale)(form >> 6 & 3u);
}

static inline uint32_t
spw_codes_scale_bytes(spw_quant form)
{
    return spw_codes_scale_of(form) == SPW_SCALE_F32 ? 4u : spw_codes_scale_of(form) == SPW_SCALE_BF16 ? 2u : 1u;
}

/* Of a block, or 128 elements of strips, what stands in front of the codes: a multiple of 4, as all of it is. */
static inline uint32_t
spw_codes_begin(spw_quant form)
{
    return spw_codes_group(form) == 0 ? 4u : SPW_QUANT_BLOCK / spw_codes_group(form) * spw_codes_scale_bytes(form);
}

static inline uint32_t
spw_codes_block_bytes(spw_quant form)
{
    return spw_codes_begin(form) + SPW_QUANT_BLOCK / 8 * spw_codes_bits(form);
}

#endif
