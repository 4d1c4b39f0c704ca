/* Between each.cu, which gathers experts, and each_hopper.cu, which compiles for another architecture. */
#ifndef SPW_CUDA_EACH_INTERNAL_H
#define SPW_CUDA_EACH_INTERNAL_H

#include "cuda_internal.h"
#include "each.cuh"

/* Tiles of `down` rows, 64 or 128 (of gradients 128), where all begin at multiples of 16 bytes. */
template <class E>
void spw__cuda_each_hopper(cuda_queue *q, const each_args<E> &args, int down, bool of_rows, bool b_rows);

#endif
