/* opt_block.h compiled with AVX-512. */
#include "cpu_adam_internal.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define OPT_TABLE spw__opt_table_avx512_data
#include "opt_block.h"
const spw__opt_table *const spw__opt_table_avx512 = &spw__opt_table_avx512_data;
#else
const spw__opt_table *const spw__opt_table_avx512 = NULL;
#endif
