/* The quantizer for every processor, and which one runs; see quant_body.h. */
#define QUANT spw__quant_scalar
#include "quant_body.h"

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

void
spw__quant_settle(void *codes, spw_quant kind, const void *src, spw_dtype type, uint64_t elems)
{
    kernels()->settle(codes, kind, src, type, elems);
}
