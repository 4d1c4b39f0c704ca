/*
 * quant.h - numbers as codes of 8 or 4 bits in blocks with a scale each: what ZeRO++ sends instead of weights and gradients, and
 * what frozen weights can be stored as; and those that are published (spw_codes.h), as far as they are decoded.
 *
 * A block is 128 elements, because parameters begin at multiples of 128 elements of their unit: no scale is shared by two
 * parameters, however different they are. Blocks lie one after another, without a header:
 *
 *   8 bits   scale (fp32)   code of element i in byte i                                        132 bytes
 *   4 bits   scale (fp32)   code of element i in the low half of byte i, of i + 64 in the high   68 bytes
 *
 * With top = 127 or 7:  scale = max(max |x| / top, 2^-126),  code = x / scale to the nearest integer, ties to even, in two's
 * complement,  decoded code * scale, all in fp32. So |decoded - x| <= (0.5 + 3e-5) scale; zeros, -0 too, become 0. Scales end
 * where top * scale would overflow. A block with a NaN or an infinity decodes to NaN: the finite check of a step sees it.
 * Every instruction set makes the same bytes, and so does every cut at a multiple of a block.
 *
 * Source  Wang et al. 2023, ZeRO++ (arXiv 2306.10209), section 3: block quantization of weights (INT8) and gradients (INT4).
 */
#ifndef SPW_QUANT_H
#define SPW_QUANT_H

#include "spw_codes.h"
#include "spw_base.h"

/* Of elems elements, a multiple of a block or a strip. Pure. */
static inline uint64_t
spw__quant_bytes(spw_quant kind, uint64_t elems)
{
    return elems / SPW_QUANT_BLOCK * spw_codes_block_bytes(kind);
}
/* elems is a multiple of a block, or of a strip; arrays do not overlap, codes need no alignment. Any thread. decode takes published forms too (spw_codes.h). */
void spw__quant_encode(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems);
void spw__quant_decode(void *dst, spw_dtype type, const void *codes, spw_quant kind, uint64_t elems);
/*
 * spw__quant_settle - the same codes with a scale that is rounded up, so that what they decode to is a number of every type,
 * bf16 too, and what comes of it when that is settled: a power of two for 8 bits, five leading bits for 4 (7 or 3 bits of a code come on
 * top of that, and bf16 has 8). 2^-24 or 2^-20 at least, for fp16. |decoded - x| <= 0.5 scale; scale is below 2 max |x| / 127, or 17/16 max |x| / 7.
 */
void spw__quant_settle(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems);

/* Elements [col, col + n) of a row of a strip (spw_codes.h), as fp32 after its rounding. */
static inline void
spw__quant_strip_row(float *restrict x, spw_quant form, const uint8_t *restrict strip, uint32_t row, uint32_t col,
                     uint32_t n)
{
    const uint32_t cols = spw_codes_cols(form), shift = row < SPW_STRIP_ROWS / 2 ? 0 : 4;
    const uint32_t half = spw_codes_round(form) ? 0x8000u : 0, keep = spw_codes_round(form) ? 0xffff0000u : ~0u;
    const uint8_t *scales = strip + col, *codes = scales + cols * (1 + row % (SPW_STRIP_ROWS / 2));
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t code = (uint32_t)codes[i] >> shift & 15u, e = scales[i], a = (code & 7u) << 22;
        const uint32_t small = 0u - (a < 0x800000u);
        const float magnitude =
            spw_bits_f32(a + (126u << 23) + (small & 0x800000u)) - spw_bits_f32(small & (127u << 23));
        const float scale = spw_bits_f32((e << 23) | (e == 0 ? 1u << 22 : 0));
        const float y = spw_bits_f32(spw_f32_bits(magnitude) | (code & 8u) << 28) * scale;
        x[i] = spw_bits_f32((spw_f32_bits(y) + half) & keep);
    }
}

/* The same with one instruction set, for quant.c and tests. */
typedef struct spw__quant_kernels {
    void (*encode)(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems);
    void (*decode)(void *dst, spw_dtype type, const void *codes, spw_quant kind, uint64_t elems);
    void (*settle)(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems);
} spw__quant_kernels;
extern const spw__quant_kernels spw__quant_scalar, spw__quant_avx2, spw__quant_avx512;

#endif
