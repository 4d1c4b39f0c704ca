/*
 * spw_data.h - text as token sequences: files and globs in, windows of tokens and targets out.
 *
 * The order is a pure function of (seed, position): position p of the training split is the p-th sequence ever drawn,
 * epochs included, so a position is all that a checkpoint has to keep. Bytes are tokens (vocabulary 256).
 */
#ifndef SPW_DATA_H
#define SPW_DATA_H

#include "spw_base.h"

typedef struct spw_data spw_data;
typedef enum spw_split { SPW_SPLIT_TRAIN, SPW_SPLIT_VALIDATION } spw_split;

typedef struct spw_data_options {
    const char *const *patterns; /* files or globs */
    uint32_t pattern_count;
    uint64_t seq_length;     /* T; a window is T + 1 bytes */
    double validation_split; /* share of the windows held out: the last ones of every file's end */
    uint64_t seed;
} spw_data_options;

/*
 * Errors  SPW_ENOENT naming a pattern that matches nothing, SPW_ESYS for an unreadable file, SPW_EINVAL when all files
 *         together are empty or shorter than one sequence (the message gives bytes found and bytes needed).
 */
spw_status spw_data_open(spw_data **out, const spw_data_options *options, spw_error *err);
void spw_data_close(spw_data *data); /* NULL is fine */
uint64_t spw_data_bytes(const spw_data *data);
uint32_t spw_data_file_count(const spw_data *data);
uint64_t spw_data_sequences(const spw_data *data, spw_split split); /* per epoch */
/* Fills tokens and targets (count, T) with the sequences at positions [first, first + count). Any thread. */
void
spw_data_fill(const spw_data *data, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets);

#endif
