/* Normal numbers for every processor, and which function runs; see normal_body.h. */
#define NORMAL spw__normal_scalar
#include "normal_body.h"

void
spw__normal_draw(float *out, uint64_t seed, uint64_t stream, uint64_t first, uint64_t n, float deviation)
{
    spw__normal_fn *const draw = spw_cpu_isa() == SPW_ISA_AVX512 ? spw__normal_avx512
                                 : spw_cpu_isa() == SPW_ISA_AVX2 ? spw__normal_avx2
                                                                 : spw__normal_scalar;
    draw(out, seed, stream, first, n, deviation);
}
