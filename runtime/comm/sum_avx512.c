/* The sum of ranks' operands for avx512; see sum_body.h. */
#define SUM spw__sum_avx512
#include "sum_body.h"
