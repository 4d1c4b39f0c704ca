/*
 * MXFP4, as gpt-oss is published: 32 numbers of 4 bits (a sign, two bits of exponent, one of mantissa) in 16 bytes, the low half
 * of each first, and one power of two for them. Every number is one that bf16 has. Files hold the transpose of what products
 * here take. Source: OCP Microscaling Formats (MX) 1.0, 5.2 and 5.3.
 */
#include "files_internal.h"
#include <math.h>

void
spw__mxfp4_read(float *out, const uint8_t *blocks, const uint8_t *scales, uint64_t rows, uint64_t cols, uint64_t first,
                uint64_t count)
{
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    for (uint64_t i = 0; i < count; i++) {
        uint64_t row = (first + i) / cols, col = (first + i) % cols;
        uint64_t group = col * (rows / SPW_MXFP4_GROUP) + row / SPW_MXFP4_GROUP, in = row % SPW_MXFP4_GROUP;
        unsigned pair = blocks[group * (SPW_MXFP4_GROUP / 2) + in / 2];
        out[i] = ldexpf(values[in % 2 == 0 ? pair & 15 : pair >> 4], (int)scales[group] - 127);
    }
}
