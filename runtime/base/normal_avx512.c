/* Normal numbers for avx512; see normal_body.h. */
#define NORMAL spw__normal_avx512
#include "normal_body.h"
