/*
 * llm.c's GPT-2: a header of 256 int32, then sixteen arrays, each with all layers one behind the other. Inside files.
 *
 * Linear weights are (out, in) there and (in, out) in Hugging Face's GPT-2, whose names and shapes tensors have here: they are read as the
 * transpose of what is stored.
 *
 * Source  llm.c (commit f1e2ace): train_gpt2.py, llmc/dataloader.h
 */
#ifndef SPW_LLMC_H
#define SPW_LLMC_H

#include "files_internal.h"

enum { SPW__LLMC_HEADER_INTS = 256, SPW__LLMC_HEADER_BYTES = 1024, SPW__LLMC_ARRAYS = 16 };

/* What a header says. */
typedef struct spw__llmc {
    spw_model_config config;
    spw_dtype dtype;
    uint64_t layers, elems;                 /* of all arrays, with the rows that pad the vocabulary */
    uint64_t first[SPW__LLMC_ARRAYS];       /* elements before each array */
    uint64_t layer[SPW__LLMC_ARRAYS];       /* elements of one layer of it, or of all of one without */
    uint64_t layer_count[SPW__LLMC_ARRAYS]; /* 1 of one without */
} spw__llmc;

/* Does a file of its weights begin so? Behind the magic number is a version; a safetensors file of so long a header has 0 there. */
bool spw__llmc_begins(const void *eight_bytes);
/*
 * The header of a file of weights, whose size it must give. Errors  SPW_ECORRUPT naming file, field and offset, SPW_EUNSUPPORTED for
 * another version, and those of reading.
 */
spw_status spw__llmc_open(spw__llmc *out, const char *path, spw_error *err);
/* How many tensors a model has: what is an array there is one for each layer. */
uint32_t spw__llmc_tensor_count(const spw__llmc *m);
/*
 * All tensors of sixteen arrays of this type that the span has at begin, to infos (spw__llmc_tensor_count): names, shapes and where each begins
 * in the span, to which the turned ones are added.
 */
spw_status spw__llmc_list(const spw__llmc *m, spw__span *span, uint64_t begin, spw_dtype dtype, spw_tensor_info *infos,
                          spw_error *err);

#endif
