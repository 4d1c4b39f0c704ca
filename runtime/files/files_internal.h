/* Inside files: what they take from each other. */
#ifndef SPW_FILES_INTERNAL_H
#define SPW_FILES_INTERNAL_H

#include "spw_files.h"

extern const char *const spw__hf_architectures[SPW_FAMILY_CUSTOM]; /* "LlamaForCausalLM" */
static inline bool
spw__hf_is_gemma(spw_family family)
{
    return family == SPW_FAMILY_GEMMA2 || family == SPW_FAMILY_GEMMA3;
}

/* By which cos and sin are larger where a configuration does not say: of yarn, and of longrope. */
double spw__hf_yarn_attention(double factor, double weight);
double spw__hf_long_attention(double factor, uint64_t positions);

enum { SPW_MXFP4_GROUP = 32 }; /* numbers of one scale */
/*
 * Elements first to first + count of a matrix (rows, cols), whose transpose is in blocks (cols, rows / 32, 16) and scales
 * (cols, rows / 32).
 */
void spw__mxfp4_read(float *out, const uint8_t *blocks, const uint8_t *scales, uint64_t rows, uint64_t cols,
                     uint64_t first, uint64_t count);
/*
 * A tensor's bytes, mapped: for what is read in small pieces all over it, and only from a file that nobody cuts off meanwhile. The
 * first call of a reader maps its file, and belongs to one thread; close unmaps it. Errors  SPW_EIO, as the system says it.
 */
spw_status spw__st_map(spw_st_reader *r, const spw_tensor_info *t, const uint8_t **out, spw_error *err);
/* What is mapped counts as memory of this process until it is let go of; it may be read again. */
void spw__st_let_go(const uint8_t *mapped, uint64_t bytes);

#endif
