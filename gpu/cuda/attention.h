/*
 * What the attention kernels of both compute types are given; attention.cu fills it from spw_gpu.h's shapes.
 */
#ifndef SPW_CUDA_ATTENTION_H
#define SPW_CUDA_ATTENTION_H

#include <stdint.h>

/* E: bf16, f16 or float. Forward and backward read the fields they need; lse may be NULL in forward. */
template <class E> struct attention_args {
    const E *q, *key, *value, *dout;
    E *out, *dq, *dk, *dv;
    float *lse, *delta; /* (B, Hq, T) */
    uint64_t T, q_stride, kv_stride, v_stride, window, capacity;
    uint64_t q_head, k_head, v_head; /* from a head to the next one */
    int Hq, Hk, D, Dv, group;
    float scale, cap;              /* scores scale q k; with a cap above 0 cap tanh(scale q k / cap) */
    const int32_t *slots, *starts; /* NULL: keys beside the queries */
    const int32_t *begins, *ends;  /* (B, T) of documents; NULL: a sequence is one */
    const E *sinks;                /* (Hq) NULL: none */
    const uint32_t *chosen;        /* (B T, words) bits of keys that a row reads; NULL: of all */
    uint64_t words;
    uint64_t front, front_each; /* keys in front of a sequence's, of which chosen is then; 0: none */
    const int32_t *front_rows;  /* (B, front) the first row that each stands for, with documents */
    bool wide;
};

#endif
