/* The sum of ranks' operands for scalar; see sum_body.h. */
#define SUM spw__sum_scalar
#include "sum_body.h"

void
spw__sum_run(const spw__sum *s)
{
    switch (spw_cpu_isa()) {
    case SPW_ISA_AVX512: spw__sum_avx512(s); return;
    case SPW_ISA_AVX2: spw__sum_avx2(s); return;
    default: spw__sum_scalar(s); return;
    }
}
