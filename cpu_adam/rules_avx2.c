/* The other rules on packed state with AVX2; see rules_packed_body.h. */
#include "cpu_adam_internal.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "packed_avx2.h"

#include "rules_packed_body.h"
const spw__packed_fn spw__rules_packed_avx2 = step;
#else
const spw__packed_fn spw__rules_packed_avx2 = NULL;
#endif
