/* Normal numbers for avx2; see normal_body.h. */
#define NORMAL spw__normal_avx2
#include "normal_body.h"
