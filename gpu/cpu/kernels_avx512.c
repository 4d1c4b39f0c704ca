/* The vector kernels of the cpu device for avx512; see kernels_body.h. */
#define KERNELS spw__cpu_kernels_avx512
#include "kernels_body.h"
