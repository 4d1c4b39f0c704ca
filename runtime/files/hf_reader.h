/* Inside the reader of a Hugging Face folder's weights: what opens and reads them (hf_weights.c), and what finds a model's (hf_bind.c). */
#ifndef SPW_HF_READER_H
#define SPW_HF_READER_H

#include "files_internal.h"

enum { SPW__HF_PATH_BYTES = 4096, SPW__HF_BLOCK = 4096 };

typedef struct spw__hf_shard {
    char *name; /* as messages call it */
    spw_st_reader *reader;
} spw__hf_shard;

typedef struct spw__hf_entry {
    const spw_tensor_info *info; /* in the shard's reader */
    uint32_t shard_idx;
} spw__hf_entry;

/* Of a parameter (rows, cols) that is read from a mapping: in MXFP4, whose blocks are its tensor, or as columns of another matrix. */
typedef struct spw__hf_mapped {
    const uint8_t *blocks, *scales; /* of this slice; NULL: not seen, or columns */
    const uint8_t *columns;         /* element (0, 0); NULL: MXFP4 */
    uint64_t stride;                /* elements from one column to the next */
    uint64_t rows, cols, read;      /* read: elements so far; atomic */
} spw__hf_mapped;

struct spw_hf_reader {
    char path[SPW__HF_PATH_BYTES];
    spw__hf_shard *shards;
    spw__hf_entry *tensors;
    uint32_t *of_param;         /* (param_count) index of each parameter's tensor; NULL: not bound */
    uint64_t *first;            /* (param_count) the parameter's first element in it */
    spw__hf_mapped *mapped;     /* (param_count) of those that are so */
    bool *in_terms;             /* (param_count) as spw_param has it */
    uint32_t *scale_of;         /* (param_count) of those that are codes (scaled.c): index of their scales' tensor */
    uint32_t *scale_of_all;     /* (param_count) of those whose scales have one of their own: its tensor */
    spw_scaled blocks, experts; /* of all codes; of those of 4 bits beside 8-bit floats */
    bool turned;                /* tensors of all experts have matrices (in, out) */
    uint32_t shard_count, tensor_count, param_count;
};

/* How the codes of a parameter are to be read that has its tensor. */
static inline const spw_scaled *
spw__hf_blocks_of(const spw_hf_reader *r, uint32_t id)
{
    return strcmp(r->tensors[r->of_param[id]].info->type, "I8") == 0 ? &r->experts : &r->blocks;
}

/* Columns of a parameter that is codes: a tensor's are bytes, or words of 32 bits. */
static inline uint64_t
spw__hf_code_cols(const spw_hf_reader *r, uint32_t id)
{
    const spw_scaled *b = spw__hf_blocks_of(r, id);
    return r->tensors[r->of_param[id]].info->shape[1] * (b->floats ? 2 : b->packed ? 32 / b->bits : 1);
}

/* Whether scales are powers of two in 8 bits, where codes do not say it. */
static inline bool
spw__hf_is_e8m0(const spw_tensor_info *scales)
{
    return strcmp(scales->type, "F8_E8M0") == 0 || strcmp(scales->type, "U8") == 0;
}

/* Elements [first, first + count) of tensor i, numbers; and of a parameter that has its tensors. */
spw_status
spw__hf_read_floats(spw_hf_reader *r, uint32_t i, uint64_t first, uint64_t count, float *out, spw_error *err);
/* Of a parameter that is codes: up to SPW__HF_BLOCK of its scales, in the order of their tensor. */
spw_status
spw__hf_read_scales(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err);
spw_status
spw__hf_read_bound(spw_hf_reader *r, uint32_t id, uint64_t first, uint64_t count, float *out, spw_error *err);

/*
 * The name by which a family's parameter is known here: without what stands before it in models of text and images, say. And, of a name that is no
 * parameter's, whether a text model does without it. room: the answer may be in it, or be part of the name.
 */
const char *spw__hf_name_here(const char *name, spw_family family, char room[SPW_TENSOR_NAME_BYTES]);
bool spw__hf_is_passed_over(const char *name, const spw_model_config *c);
static inline bool
spw__hf_is_mapped(const spw_hf_reader *r, uint32_t id)
{
    return r->mapped[id].blocks != NULL || r->mapped[id].columns != NULL;
}

/* So many elements in MXFP4: whoever reads the last ones lets go of all. */
void spw__hf_was_read(spw__hf_mapped *c, uint64_t count);

/* A reader of one file's tensors, which it owns from now on, also after an error. */
spw_status spw__hf_reader_over(spw_hf_reader **out, spw_st_reader *file, const char *path, spw_error *err);

#endif
