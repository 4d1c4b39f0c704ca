/* Conversions for avx512; see convert.h. */
#include "convert.h"

void
spw__convert_avx512(void *dst, spw_dtype dst_type, const void *src, spw_dtype src_type, uint64_t n)
{
    spw__convert_here(dst, dst_type, src, src_type, n);
}
