/* The other rules on packed state with AVX-512; see rules_packed_body.h. */
#include "cpu_adam_internal.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "packed_avx512.h"

#include "rules_packed_body.h"
const spw__packed_fn spw__rules_packed_avx512 = step;
#else
const spw__packed_fn spw__rules_packed_avx512 = NULL;
#endif
