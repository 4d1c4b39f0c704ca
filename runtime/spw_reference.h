/*
 * spw_reference.h - what the reference of preference training finds of answers: the weights that training starts from, asked once, before
 * they change, about every window that will be drawn. So a step has no second model, and moves no byte for one.
 *
 * The file that goes beside checkpoints, for those who go on from one (numbers are little-endian):
 *   0  "SPWREFER" | 8  u32 version 1 | 12  u32 zero | 16  u64 key | 24  u64 windows | 32  u64 answers | 40  u64 checksum of what follows
 *   48  u32 answers of each window, 0: it was not asked about | f64 sum of -log p of each answer, window after window
 *
 * Threads   one. With a channel calls are collective on it.
 */
#ifndef SPW_REFERENCE_H
#define SPW_REFERENCE_H

#include "spw_comm.h"
#include "spw_data.h"
#include "spw_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct spw_reference spw_reference;

/* Room for so many windows (spw_data_window()) and answers, two of each pair. key: of the data, which a file has to have. */
spw_status spw_reference_create(spw_reference **out, uint64_t windows, uint64_t answers, uint64_t key, spw_error *err);
void spw_reference_destroy(spw_reference *reference);                    /* NULL is fine */
uint64_t spw_reference_memory_bytes(uint64_t windows, uint64_t answers); /* that it takes, with its file */

/*
 * spw_reference_put - of a window, whose answers come in its order. One that is there already stays as it is.
 * spw_reference_check - whether it was asked about all sequences at positions [first, end) of a split.
 * spw_reference_fill - out (T): at the first token of each answer's document of the window what is known of it, elsewhere 0.
 * Errors  put: SPW_EINVAL for an answer too many; check, fill: SPW_EINVAL where the window was not asked about, or about another number of answers
 *         than documents of its tokens (T) have targets (T).
 */
spw_status
spw_reference_put(spw_reference *reference, uint64_t window, const double *sums, uint32_t count, spw_error *err);
spw_status spw_reference_check(const spw_reference *reference, const spw_data *data, spw_split split, uint64_t first,
                               uint64_t end, spw_error *err);
spw_status spw_reference_fill(const spw_reference *reference, uint64_t window, const int32_t *tokens,
                              const int32_t *targets, uint64_t T, double *out, spw_error *err);
uint64_t spw_reference_count(const spw_reference *reference); /* windows that are there */

/*
 * spw_reference_ask - evaluates the sequences at positions [0, positions) of a split whose windows are not there yet, in whole micro-batches as they
 * are drawn, and puts what comes of them on all ranks. A sequence's bits hang on its place in the micro-batch alone.
 *   tokens, targets, answers  (micro_batches, sequences, T) each, of the caller's
 * Errors  of the data and the engine; SPW_ECANCELED where it was to stop, on the rank that was told so.
 */
typedef struct spw_reference_asking {
    spw_engine *engine; /* of weights as they are to be asked */
    const spw_data *data;
    spw_channel *channel; /* NULL: one rank */
    uint64_t sequences, T;
    uint32_t micro_batches; /* that a rank's engine takes at once */
    int32_t *tokens, *targets;
    double *answers;
    bool (*told)(void *ctx, uint64_t asked); /* windows so far; false: to stop there. NULL: nobody is told */
    void *ctx;
} spw_reference_asking;
spw_status spw_reference_ask(spw_reference *reference, const spw_reference_asking *asking, spw_split split,
                             uint64_t positions, spw_error *err);

/*
 * spw_reference_save - the file, complete or as it was before. Of one rank.
 * spw_reference_load - the file that the channel's first rank finds, on all. NULL: one rank.
 * Errors  SPW_ENOENT; SPW_ECORRUPT naming path and field; SPW_EINVAL where the key or the windows are others. SPW_EIO.
 */
spw_status spw_reference_save(const spw_reference *reference, const char *path, spw_error *err);
spw_status spw_reference_load(spw_reference *reference, const char *path, spw_channel *channel, spw_error *err);

#ifdef __cplusplus
}
#endif
#endif
