/* The vector kernels of the cpu device for avx2; see kernels_body.h. */
#define KERNELS spw__cpu_kernels_avx2
#include "kernels_body.h"
