/* Adam on split-bf16 with AVX-512; see adam_bf16_body.h. */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "packed_avx512.h"

#include "adam_bf16_body.h"
const spw__packed_fn spw__packed_bf16_avx512 = step;
#else
const spw__packed_fn spw__packed_bf16_avx512 = NULL;
#endif
