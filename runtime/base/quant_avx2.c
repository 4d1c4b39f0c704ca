/* The quantizer for avx2; see quant_body.h. */
#define QUANT spw__quant_avx2
#include "quant_body.h"
