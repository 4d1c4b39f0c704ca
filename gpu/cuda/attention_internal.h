/*
 * Between attention.cu, which reads shapes, and the files that hold one kernel each for every head size: they are apart so that
 * they compile side by side.
 */
#ifndef SPW_CUDA_ATTENTION_INTERNAL_H
#define SPW_CUDA_ATTENTION_INTERNAL_H

#include "attention.h"
#include "common.cuh"
#include "cuda_internal.h"

enum { HEAD_MAX = 512 };

/* Grids over B sequences. E: bf16 or f16. */
template <class E> void spw__cuda_attention_forward(cuda_queue *q, const attention_args<E> &args, uint64_t B);
template <class E> void spw__cuda_attention_dq(cuda_queue *q, const attention_args<E> &args, uint64_t B);
template <class E> void spw__cuda_attention_dkv(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk);

/* Heads of more than 256 elements, and keys in front; backward is both. */
template <class E> void spw__cuda_attention_forward_wide(cuda_queue *q, const attention_args<E> &args, uint64_t B);
template <class E> void spw__cuda_attention_backward_wide(cuda_queue *q, const attention_args<E> &args, uint64_t B);

/* The same on a Hopper, where the build has it (cuda_internal.h). */
template <class E> void spw__cuda_attention_forward_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B);
template <class E> void spw__cuda_attention_dq_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B);
template <class E>
void spw__cuda_attention_dkv_hopper(cuda_queue *q, const attention_args<E> &args, uint64_t B, uint64_t Hk);

#endif
