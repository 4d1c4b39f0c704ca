/* The quantizer for avx512; see quant_body.h. */
#define QUANT spw__quant_avx512
#include "quant_body.h"
