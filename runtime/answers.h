/*
 * answers.h - pairs of answers in windows (spw_data.h). Pure.
 */
#ifndef SPW_ANSWERS_H
#define SPW_ANSWERS_H

#include "spw_engine.h"
#include "spw_preference.h"

/*
 * The next pair of a window (T) from a document's first token on: of its documents with a target, a chosen answer's before a rejected one's.
 * end is 0 where there is none.
 * Errors  SPW_EINVAL for an answer without another one.
 */
spw_status
spw__pair_next(spw_pair *out, const int32_t *tokens, const int32_t *targets, uint64_t T, uint64_t from, spw_error *err);
/* Sums of losses over the targets of both documents, and how many those are: rows from losses[0] and targets[0] on. */
void
spw__pair_sums(const spw_pair *pair, const float *losses, const int32_t *targets, double sums[2], uint64_t counts[2]);
/* Adds up what they give. */
void spw__pairs_add(spw_pair_means *sum, const spw_pair *pairs, uint32_t count, const spw_preference *rule,
                    const float *losses, const int32_t *targets);

#endif
