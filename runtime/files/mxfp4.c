/*
 * MXFP4, as gpt-oss is published: 32 numbers of 4 bits (a sign, two bits of exponent, one of mantissa) in 16 bytes, the low half
 * of each first, and one power of two for them. Every number is one that bf16 has. Files hold the transpose of what products
 * here take. Source: OCP Microscaling Formats (MX) 1.0, 5.2 and 5.3.
 */
#include "files_internal.h"
#include <string.h>

/* 2 to the exponent - 127; 255 is NaN, for all of its group. */
static float
scale_of(uint8_t exponent)
{
    uint32_t bits = exponent == 255 ? 0x7fc00000u : exponent > 0 ? (uint32_t)exponent << 23 : 1u << 22;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

void
spw__mxfp4_read(float *out, const uint8_t *blocks, const uint8_t *scales, uint64_t rows, uint64_t cols, uint64_t first,
                uint64_t count)
{
    const uint64_t groups = rows / SPW_MXFP4_GROUP;
    for (uint64_t row = first / cols, col = first % cols; count > 0; row++, col = 0) {
        uint64_t n = cols - col < count ? cols - col : count, group = col * groups + row / SPW_MXFP4_GROUP;
        unsigned at = row % SPW_MXFP4_GROUP / 2, shift = row % 2 * 4;
        for (uint64_t i = 0; i < n; i++, group += groups)
            out[i] = spw__e2m1(blocks[group * (SPW_MXFP4_GROUP / 2) + at] >> shift & 15) * scale_of(scales[group]);
        out += n;
        count -= n;
    }
}
