/*
 * Published codes found again from the numbers that they stand for (spw_codes.h): so what is loaded, saved, resumed or edited are numbers, whoever holds
 * them as codes. The idea: the greatest number of a group is some code times the scale, rounded, so each code there may be gives a narrow range of
 * scales; within it every other number has one code at most, which narrows the range further, or shows that it was another one. A scale
 * is taken only if all numbers come out again, bit for bit.
 */
#include "fp8.h"
#include "quant.h"
#include <math.h>

enum {
    BLOCK = SPW_QUANT_BLOCK,
    LOOK = 8,
    TRIED = 64
}; /* TRIED: scales of a range, all of them; of a wider one the middle */

/*
 * A group's magnitudes, and what a product in fp32 may have been before it was rounded to each, some 2^-22 of it wider; of zeros anything. As bits:
 * those of positive floats are ordered as they are, and loops over integers become vectors.
 */
typedef struct numbers {
    uint32_t n;
    float a[BLOCK], low[BLOCK], high[BLOCK];
} numbers;

typedef struct range {
    float low, high;
} range;

static void
take_numbers(numbers *g, spw_quant form, const float *x)
{
    const uint32_t half = spw_codes_round(form) ? 0x8000u : 0;
    g->n = spw_codes_group(form);
    for (uint32_t i = 0; i < g->n; i++) {
        const uint32_t u = spw_f32_bits(x[i]) & 0x7fffffffu, some = 0u - (u > half);
        g->a[i] = spw_bits_f32(u);
        g->low[i] = spw_bits_f32((u - half) & some) * (1 - 0x1p-22f);
        g->high[i] = spw_bits_f32(((u + half) & some) | (0x7f000000u & ~some)) * (1 + 0x1p-22f);
    }
}

/* Magnitudes: integers up to 2^(bits - 1), which is negative alone; floats by their code without the sign. */
static uint32_t
greatest_code(spw_quant form)
{
    return spw_codes_are_floats(form) ? (spw_codes_bits(form) == 8 ? 126 : 7) : 1u << (spw_codes_bits(form) - 1);
}

/* Floats are those of fp32 with another bias; below the least exponent one is put in front and taken off again. */
static inline float
float_of(uint32_t code, uint32_t mantissa, uint32_t bias)
{
    const uint32_t a = code << (23 - mantissa), small = 0u - (a < 0x800000u);
    return spw_bits_f32(a + ((127 - bias) << 23) + (small & 0x800000u)) - spw_bits_f32(small & ((128 - bias) << 23));
}

static inline float
value_of(spw_quant form, uint32_t code)
{
    return !spw_codes_are_floats(form) ? (float)code
           : spw_codes_bits(form) == 8 ? float_of(code, 3, 7)
                                       : float_of(code, 1, 1);
}

static inline uint32_t
nearest_code(spw_quant form, float v)
{
    const uint32_t most = greatest_code(form);
    if (spw_codes_are_floats(form) && spw_codes_bits(form) == 8)
        return spw_f32_to_fp8(SPW_E4M3, v);
    if (spw_codes_are_floats(form))
        return (uint32_t)((v > 0.25f) + (v > 0.75f) + (v > 1.25f) + (v > 1.75f) + (v > 2.5f) + (v > 3.5f) + (v > 5.0f));
    v += 0.5f;
    return v < (float)most ? (uint32_t)(int32_t)v : most;
}

static inline float
rounded(spw_quant form, float x)
{
    return spw_codes_round(form) ? spw_bits_f32((spw_f32_bits(x) + 0x8000u) & 0xffff0000u) : x;
}

/* The least scale that is not below x > 0; 0: there is none. */
static float
scale_from(spw_quant form, float x)
{
    const uint32_t low = spw_codes_scale_of(form) == SPW_SCALE_E8M0   ? 0x7fffffu
                         : spw_codes_scale_of(form) == SPW_SCALE_BF16 ? 0xffffu
                                                                      : 0;
    uint32_t u = spw_f32_bits(x);
    if (low == 0x7fffffu && u <= 1u << 22)
        return 0x1p-127f;
    u = (u + low) & ~low;
    return u < 0x7f800000u ? spw_bits_f32(u) : 0;
}

static inline bool
come_out(spw_quant form, const numbers *g, const uint32_t *codes, float scale)
{
    uint32_t other = 0;
    for (uint32_t i = 0; i < g->n; i++)
        other |= spw_f32_bits(rounded(form, value_of(form, codes[i]) * scale)) ^ spw_f32_bits(g->a[i]);
    return other == 0;
}

/* The first scale that gives all numbers, the middle before the others; 0: none does. */
static float
scale_in(spw_quant form, const numbers *g, const uint32_t *codes, range r)
{
    const float middle = scale_from(form, r.low + (r.high - r.low) / 2);
    float scale = scale_from(form, r.low);
    if (middle > 0 && middle <= r.high && come_out(form, g, codes, middle))
        return middle;
    for (int k = 0; k < TRIED && scale > 0 && scale <= r.high; k++) {
        if (come_out(form, g, codes, scale))
            return scale;
        scale = scale_from(form, spw_bits_f32(spw_f32_bits(scale) + 1));
    }
    return 0;
}

/* Codes without signs of elements [first, end), and the scales that they leave; false: they have none. */
static inline bool
narrow(spw_quant form, const numbers *g, uint32_t *codes, uint32_t first, uint32_t end, float inverse, range *r)
{
    int32_t low = (int32_t)spw_f32_bits(r->low), high = (int32_t)spw_f32_bits(r->high);
    uint32_t other = 0;
    for (uint32_t i = first; i < end; i++) {
        const uint32_t code = nearest_code(form, g->a[i] * inverse);
        const float v = value_of(form, code > 0 ? code : 1);
        const int32_t from = (int32_t)spw_f32_bits(g->low[i] / v), to = (int32_t)spw_f32_bits(g->high[i] / v);
        codes[i] = code;
        other |= (code > 0) ^ (spw_f32_bits(g->a[i]) > 0);
        low = from > low ? from : low;
        high = to < high ? to : high;
    }
    *r = (range){spw_bits_f32((uint32_t)low), spw_bits_f32((uint32_t)high)};
    return other == 0 && low <= high;
}

/* All codes of a group whose scale is in the range; 0: there are none. Mostly the first few elements tell. */
static inline float
codes_in(spw_quant form, const numbers *g, const float *x, uint32_t *codes, range r)
{
    const float inverse = 1 / (r.low + (r.high - r.low) / 2);
    if (!narrow(form, g, codes, 0, LOOK, inverse, &r) || !narrow(form, g, codes, LOOK, g->n, inverse, &r))
        return 0;
    for (uint32_t i = 0; i < g->n && !spw_codes_are_floats(form); i++)
        if (codes[i] == greatest_code(form) && !signbit(x[i]))
            return 0;
    return scale_in(form, g, codes, r);
}

/* The group's scale; 0: it has none. */
static inline float
find_group(spw_quant form, const float *x, uint32_t *codes)
{
    uint32_t most = 0, zeros = 0;
    float scale = 0;
    range of = {0, 0};
    numbers g;
    take_numbers(&g, form, x);
    for (uint32_t i = 0; i < g.n; i++) {
        const uint32_t u = spw_f32_bits(g.a[i]);
        zeros |= spw_f32_bits(x[i]) == 0x80000000u;
        of = u > most ? (range){g.low[i], g.high[i]} : of;
        most = u > most ? u : most;
    }
    if (most >= 0x7f000000u || (zeros && !spw_codes_are_floats(form)))
        return 0;
    memset(codes, 0, g.n * sizeof *codes);
    for (uint32_t code = most > 0 ? greatest_code(form) : 0; code > 0 && scale == 0; code--) {
        const float v = value_of(form, code);
        const range r = {of.low / v, of.high / v};
        const float least = scale_from(form, r.low);
        if (least > 0 && least <= r.high)
            scale = codes_in(form, &g, x, codes, r);
    }
    return most > 0 ? scale : 1;
}

static void
put_scale(uint8_t *block, spw_quant form, uint32_t g, float scale)
{
    const uint32_t u = spw_f32_bits(scale);
    const uint16_t half = (uint16_t)(u >> 16);
    if (spw_codes_scale_of(form) == SPW_SCALE_E8M0)
        block[g] = (uint8_t)(u >> 23);
    else if (spw_codes_scale_of(form) == SPW_SCALE_BF16)
        memcpy(block + g * sizeof half, &half, sizeof half);
    else
        memcpy(block + g * sizeof scale, &scale, sizeof scale);
}

static void
put_codes(uint8_t *block, spw_quant form, const uint32_t *codes, const float *x)
{
    const uint32_t bits = spw_codes_bits(form), sign = 1u << (bits - 1);
    uint8_t *out = block + spw_codes_begin(form);
    uint8_t whole[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t code = codes[i];
        if (spw_codes_are_floats(form))
            whole[i] = (uint8_t)(code | (signbit(x[i]) ? sign : 0));
        else
            whole[i] = (uint8_t)(signbit(x[i]) ? 0u - code : code);
    }
    for (int i = 0; i < BLOCK / (bits == 8 ? 1 : 2); i++)
        out[i] = (uint8_t)(bits == 8 ? whole[i] : (whole[i] & 15) | whole[i + BLOCK / 2] << 4);
}

bool
spw__quant_find(void *codes, spw_quant form, const void *src, spw_dtype type, uint64_t elems)
{
    const uint32_t group = spw_codes_group(form);
    uint8_t *out = codes;
    SPW_ASSERT(group > 0 && (type == SPW_F32 || (type == SPW_BF16 && spw_codes_round(form))));
    for (uint64_t at = 0; at < elems; at += BLOCK, out += spw_codes_block_bytes(form)) {
        float x[BLOCK];
        uint32_t magnitudes[BLOCK];
        spw_convert(x, SPW_F32, (const char *)src + at * spw_dtype_bytes(type), type, BLOCK);
        for (uint32_t g = 0; g < BLOCK / group; g++) {
            const float scale = find_group(form, x + g * group, magnitudes + g * group);
            if (scale == 0)
                return false;
            put_scale(out, form, g, scale);
        }
        put_codes(out, form, magnitudes, x);
    }
    return true;
}
