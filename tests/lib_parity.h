/*
 * lib_parity - every operation of a device beside the cpu device, element by element, on the same inputs; and the device beside
 * itself, where bits must be equal. For the GPU (test_cuda) and for its emulation (test_cuda_emulated).
 */
#ifndef LIB_PARITY_H
#define LIB_PARITY_H

#include "spw_gpu.h"

typedef struct parity {
    spw_gpu *gpu;
    bool large;                /* shapes for a GPU, besides the small ones */
    const char *const *orders; /* NULL-terminated SPW_EMULATE_ORDERs that give the same bits; NULL: run twice */
} parity;

/* One per group of operations; fails the running cmocka test. */
void parity_linear(const parity *p);
void parity_linear_and_more(const parity *p);
void parity_linear_by_row(const parity *p);
void parity_elements(const parity *p);
void parity_norms(const parity *p);
void parity_embedding_and_rope(const parity *p);
void parity_loss(const parity *p);
void parity_head(const parity *p);
void parity_preference(const parity *p);
void parity_attention(const parity *p);
/* Lengths of documents around `length`, cut into B sequences of T: begins and ends (B, T) of spw_gpu_attention(). */
void parity_documents(uint64_t B, uint64_t T, uint64_t length, int32_t *begins, int32_t *ends);
void parity_attention_cached(const parity *p);
void parity_chunks(const parity *p);
void parity_choose_keys(const parity *p);
void parity_compress(const parity *p);
void parity_streams(const parity *p);
/*
 * Bits (B T, words) of spw_attention_shape.chosen: each key with a chance of 1 in `every`, and one at least that the row may read. starts NULL: rows are
 * at their place in the sequence.
 */
void parity_chosen(uint64_t B, uint64_t T, uint64_t every, uint64_t words, const int32_t *begins, const int32_t *starts,
                   int32_t *bits);
void parity_attention_bits(const parity *p); /* the promises of spw_gpu_attention_cached() */
void parity_conv(const parity *p);
void parity_delta(const parity *p);
void parity_delta_cached(const parity *p);
void parity_delta_bits(const parity *p); /* the promises of spw_gpu_conv_cached() and spw_gpu_delta_cached() */
void parity_delta_bounds(const parity *p);
void parity_delta_turns(const parity *p);
void parity_copies(const parity *p);
void parity_codes(const parity *p);
void parity_queues(const parity *p);
void parity_memory(const parity *p);
void parity_nan_spreads(const parity *p);
void parity_update(const parity *p);
void parity_spans(const parity *p);
void parity_experts(const parity *p);
void parity_linear_each(const parity *p);
void parity_fp8(const parity *p);
void parity_orthogonal(const parity *p);

/* Runs every check above as a test of the group; returns how many failed. */
void parity_list(void); /* the tests' names, on stdout */
int parity_run_all(parity *p, const char *group);
/* Those of them that multiply matrices. */
int parity_run_products(parity *p, const char *group);

#endif
