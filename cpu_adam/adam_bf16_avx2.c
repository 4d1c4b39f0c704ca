/* Adam on split-bf16 with AVX2; see adam_bf16_body.h. */
#include "cpu_adam_internal.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "packed_avx2.h"

#include "adam_bf16_body.h"
const spw__packed_fn spw__packed_bf16_avx2 = step;
#else
const spw__packed_fn spw__packed_bf16_avx2 = NULL;
#endif
