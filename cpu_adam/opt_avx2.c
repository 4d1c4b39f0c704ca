/* opt_block.h compiled with AVX2, FMA and F16C. */
#include "cpu_adam_internal.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OPT_TABLE spw__opt_table_avx2_data
#include "opt_block.h"
const spw__opt_table *const spw__opt_table_avx2 = &spw__opt_table_avx2_data;
#else
const spw__opt_table *const spw__opt_table_avx2 = NULL;
#endif
