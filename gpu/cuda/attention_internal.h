/*
 * Between attention.cu, which reads shapes, and the files that hold one kernel each for every head size: they are apart so that
 * they compile side by side.
 */
#ifndef SPW_CUDA_ATTENTION_INTERNAL_H
#define SPW_CUDA_ATTENTION_INTERNAL_H

#include "attention.h"
#include "common.cuh"
#include "cuda_internal.h"

enum { HEAD_MAX = 256 };

/* Grids over B sequences. */
void spw__cuda_attention_forward_bf16(cuda_queue *q, const attention_args<bf16> &args, uint64_t B);
void spw__cuda_attention_dq_bf16(cuda_queue *q, const attention_args<bf16> &args, uint64_t B);
void spw__cuda_attention_dkv_bf16(cuda_queue *q, const attention_args<bf16> &args, uint64_t B, uint64_t Hk);

#endif
