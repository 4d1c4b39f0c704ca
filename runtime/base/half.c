/*
 * Half floats, checksums and counter-based random numbers: small pure functions on bits. Arrays of half floats are convert.h's.
 */
#include "philox.h"
#include "spw_base.h"
#include <strings.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h> /* the same sums with the widest vectors of this processor */
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

const char *
spw_dtype_name(spw_dtype t)
{
    static const char *const names[SPW_DTYPE_COUNT] = {"fp32", "bf16", "fp16"};
    return (unsigned)t < SPW_DTYPE_COUNT ? names[t] : "unknown";
}

bool
spw_dtype_parse(const char *text, spw_dtype *out)
{
    static const char *const names[SPW_DTYPE_COUNT][4] = {
        [SPW_F32] = {"fp32", "float32", "float"},
        [SPW_BF16] = {"bf16", "bfloat16", "bfloat"},
        [SPW_F16] = {"fp16", "float16", "half"},
    };
    text += strncmp(text, "torch.", 6) == 0 ? 6 : 0;
    for (int t = 0; t < SPW_DTYPE_COUNT; t++) {
        for (const char *const *name = names[t]; *name != NULL; name++) {
            if (strcasecmp(text, *name) == 0) {
                *out = (spw_dtype)t;
                return true;
            }
        }
    }
    return false;
}

float
spw_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31) /* a NaN is quiet, as F16C makes it */
        return spw_bits_f32(sign | 0x7f800000u | (mantissa != 0 ? 0x400000u : 0) | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24 is exact */
        float f = (float)mantissa * 5.9604644775390625e-8f;
        return spw_bits_f32(spw_f32_bits(f) | sign);
    }
    return spw_bits_f32(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t
spw_f32_to_f16(float f)
{
    uint32_t u = spw_f32_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) /* rounds to 65520 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) { /* below 2^-14: the addition rounds to a multiple of 2^-24, ties to even */
        float r = spw_bits_f32(a) + 0.5f;
        return (uint16_t)(sign | (spw_f32_bits(r) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

uint64_t
spw_checksum(const void *data, uint64_t bytes)
{
    return XXH3_64bits(data, bytes);
}

uint64_t
spw_checksum_more(uint64_t before, const void *data, uint64_t bytes)
{
    return XXH3_64bits_withSeed(data, bytes, before);
}

/* A stream is the library's state, of 576 bytes. */

spw_checksum_stream *
spw_checksum_open(void)
{
    return (spw_checksum_stream *)XXH3_createState();
}

void
spw_checksum_begin(spw_checksum_stream *stream)
{
    (void)XXH3_64bits_reset((XXH3_state_t *)stream);
}

void
spw_checksum_add(spw_checksum_stream *stream, const void *data, uint64_t bytes)
{
    (void)XXH3_64bits_update((XXH3_state_t *)stream, data, bytes);
}

uint64_t
spw_checksum_sum(const spw_checksum_stream *stream)
{
    return XXH3_64bits_digest((const XXH3_state_t *)stream);
}

void
spw_checksum_close(spw_checksum_stream *stream)
{
    if (stream != NULL)
        (void)XXH3_freeState((XXH3_state_t *)stream);
}

void
spw_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo, uint32_t out[4])
{
    spw__philox(key, counter_hi, counter_lo, out);
}
