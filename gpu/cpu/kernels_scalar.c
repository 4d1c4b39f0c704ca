/* The vector kernels of the cpu device for scalar; see kernels_body.h. */
#define KERNELS spw__cpu_kernels_scalar
#include "kernels_body.h"
