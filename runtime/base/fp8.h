/*
 * 8-bit floats: E4M3 without infinities and E5M2 with them, and the scale that brings a tensor into their range. A tensor is codes times one
 * scale, a power of two: the bits that a code has are then the first of the number itself, and dividing and multiplying by
 * the scale never rounds. What that costs is at most one of 18 or 32 binades below the greatest element.
 *
 * Source  Micikevicius et al. 2022 (2209.05433)
 */
#ifndef SPW_FP8_H
#define SPW_FP8_H

#include "spw_base.h"

/* A format's bits of mantissa, bias of the exponent and greatest code. */
typedef struct spw_fp8_kind {
    uint32_t mantissa, bias, most;
} spw_fp8_kind;

static inline spw_fp8_kind
spw_fp8_kind_of(spw_fp8 format)
{
    return format == SPW_E4M3 ? (spw_fp8_kind){3, 7, 0x7e} : (spw_fp8_kind){2, 15, 0x7b};
}

/*
 * Rounded to nearest, ties to even; what is too large, infinity too, gets the greatest code, a NaN 0x7f or 0xff. Both roundings are done,
 * and one is chosen: a loop of it is a loop of vectors.
 */
static inline uint8_t
spw_f32_to_fp8(spw_fp8 format, float f)
{
    const spw_fp8_kind k = spw_fp8_kind_of(format);
    uint32_t u = spw_f32_bits(f), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu, shift = 23 - k.mantissa;
    uint32_t ones = (127 + 1 - k.bias + shift) << 23; /* of a subnormal's sum the last place is that of the code */
    uint32_t subnormal = spw_f32_bits(spw_bits_f32(a) + spw_bits_f32(ones)) - ones;
    uint32_t normal = ((a + (1u << (shift - 1)) - 1 + (a >> shift & 1u)) >> shift) - ((127 - k.bias) << k.mantissa);
    uint32_t small = (uint32_t)0 - (a < (128 - k.bias) << 23); /* of ?: compilers make a branch around the sum */
    uint32_t code = (subnormal & small) | (normal & ~small), clipped = code < k.most ? code : k.most;
    return (uint8_t)(sign | (a > 0x7f800000u ? 0x7fu : clipped));
}

/* Exact. */
static inline float
spw_fp8_to_f32(spw_fp8 format, uint8_t code)
{
    const spw_fp8_kind k = spw_fp8_kind_of(format);
    uint32_t sign = (code & 0x80u) << 24, a = code & 0x7fu;
    if (a >> k.mantissa == 0) /* subnormal */
        return spw_bits_f32(sign | spw_f32_bits((float)a * spw_bits_f32((128 - k.bias - k.mantissa) << 23)));
    if (a > k.most) /* E4M3 has one NaN, E5M2 what IEEE says */
        return spw_bits_f32(sign | (a == 0x7cu ? 0x7f800000u : 0x7fc00000u));
    return spw_bits_f32(sign | ((a << (23 - k.mantissa)) + ((127 - k.bias) << 23)));
}

/*
 * What codes are multiplied by, of a tensor whose greatest magnitude has these bits: the least power of two from 2^-126 on that brings it to the
 * greatest code's value or below; not finite: NaN, so that products of it are. It never falls when greatest grows, as bits too.
 */
static inline float
spw_fp8_scale(spw_fp8 format, uint32_t greatest)
{
    uint32_t emax = format == SPW_E4M3 ? 8 : 15, exponent = greatest >> 23;
    if (greatest >= 0x7f800000u)
        return spw_bits_f32(0x7fc00000u);
    exponent += (greatest & 0x7fffffu) > 0x600000u; /* both formats end at 1.75 times a power of two */
    return spw_bits_f32((exponent > emax + 1 ? exponent - emax : 1u) << 23);
}

/* What tensors are multiplied by before they are rounded, 1 / scale; 0: the scale is a NaN, and codes are zeros. */
static inline float
spw_fp8_inverse(float scale)
{
    uint32_t u = spw_f32_bits(scale);
    return u < 0x7f800000u ? spw_bits_f32((254u << 23) - u) : 0.0f;
}

#endif
