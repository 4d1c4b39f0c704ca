/* The quantizer for every processor, and which one runs; see quant_body.h. */
#define QUANT spw__quant_scalar
#include "quant_body.h"
#include <math.h>

static const spw__quant_kernels *
kernels(void)
{
    switch (spw_cpu_isa()) {
    case SPW_ISA_AVX512: return &spw__quant_avx512;
    case SPW_ISA_AVX2: return &spw__quant_avx2;
    default: return &spw__quant_scalar;
    }
}

void
spw__quant_encode(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems)
{
    kernels()->encode(codes, kind, src, type, elems);
}

void
spw__quant_decode(void *dst, spw_dtype type, const void *codes, spw_quant kind, uint64_t elems)
{
    kernels()->decode(dst, type, codes, kind, elems);
}

/* The least scale of the kind that is not below x, for 0 <= x < infinity. */
static float
settled_scale(float x, spw_quant kind)
{
    uint32_t low = kind == SPW_QUANT_INT8 ? 0x7fffffu : 0x7ffffu; /* bits of the fraction that must be 0 */
    float least = kind == SPW_QUANT_INT8 ? 0x1p-24f : 0x1p-20f;   /* all its codes' numbers are whole steps of fp16 */
    x = x < least ? least : x;
    return spw_bits_f32((spw_f32_bits(x) + low) & ~low);
}

void
spw__quant_settle(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems)
{
    float top = kind == SPW_QUANT_INT8 ? 127.0f : 7.0f;
    uint8_t *out = codes;
    for (uint64_t at = 0; at < elems; at += BLOCK, out += spw__quant_bytes(kind, BLOCK)) {
        float x[BLOCK], most = 0, scale, inverse;
        bool finite = true;
        spw_convert(x, SPW_F32, (const char *)src + at * spw_dtype_bytes(type), type, BLOCK);
        for (int i = 0; i < BLOCK; i++) {
            finite = finite && isfinite(x[i]);
            most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        }
        scale = finite ? settled_scale(most / top, kind) : spw_bits_f32(0x7fc00000u);
        inverse = finite ? 1.0f / scale : 0;
        memcpy(out, &scale, sizeof scale);
        for (int i = 0; i < (kind == SPW_QUANT_INT8 ? BLOCK : HALF); i++) {
            uint32_t low = code_of(finite ? x[i] : 0, inverse), high;
            if (kind == SPW_QUANT_INT8) {
                out[sizeof scale + i] = (uint8_t)low;
                continue;
            }
            high = code_of(finite ? x[i + HALF] : 0, inverse);
            out[sizeof scale + i] = (uint8_t)((low & 15u) | (high << 4));
        }
    }
}
