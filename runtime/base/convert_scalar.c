/* Conversions for every processor, and which ones run; see convert.h. */
#include "convert.h"

void
spw__convert_scalar(void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    spw__convert_here(dst, dst_type, src, src_type, n);
}

static spw__convert_fn *
best(void)
{
    switch (spw_cpu_isa()) {
    case SPW_ISA_AVX512: return spw__convert_avx512;
    case SPW_ISA_AVX2: return spw__convert_avx2;
    default: return spw__convert_scalar;
    }
}

void
spw_convert(void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    enum { BLOCK = 1024 };
    spw__convert_fn *convert;
    if (dst_type == src_type) {
        memcpy(dst, src, n * spw_dtype_bytes(dst_type));
        return;
    }
    convert = best();
    if (dst_type == SPW_F32 || src_type == SPW_F32) {
        convert(dst, dst_type, src, src_type, n);
        return;
    }
    for (uint64_t at = 0, count; at < n; at += count) { /* from one half float to the other */
        float wide[BLOCK];
        count = n - at < BLOCK ? n - at : BLOCK;
        convert(wide, SPW_F32, (const uint16_t *)src + at, src_type, count);
        convert((uint16_t *)dst + at, dst_type, wide, SPW_F32, count);
    }
}
