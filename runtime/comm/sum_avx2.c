/* The sum of ranks' operands for avx2; see sum_body.h. */
#define SUM spw__sum_avx2
#include "sum_body.h"
