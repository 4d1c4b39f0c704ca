/*
 * Pairs of answers in windows: where they are, and what comes of them. The gradients' weights are the device's
 * (spw_gpu_preference); what is reported is summed up here, by the same function.
 */
#include "answers.h"
#include "spw_data.h"

/* The first row behind the document that begins at `at`. */
static uint64_t
document_end(const int32_t *tokens, uint64_t at, uint64_t T)
{
    uint64_t end = at + 1;
    while (end < T && (tokens[end] & SPW_TOKEN_BEGINS) == 0)
        end++;
    return end;
}

static bool
has_target(const int32_t *targets, uint64_t at, uint64_t end)
{
    while (at < end && targets[at] < 0)
        at++;
    return at < end;
}

spw_status
spw__pair_next(spw_pair *out, const int32_t *tokens, const int32_t *targets, uint64_t T, uint64_t from, spw_error *err)
{
    *out = (spw_pair){.end = 0};
    for (uint64_t at = from; at < T;) {
        const uint64_t middle = document_end(tokens, at, T);
        const uint64_t end = middle < T ? document_end(tokens, middle, T) : T;
        if (!has_target(targets, at, middle) && !has_target(targets, middle, end)) {
            at = middle; /* padding of a sequence that has no pair */
            continue;
        }
        if (middle == T || !has_target(targets, at, middle) || !has_target(targets, middle, end))
            return SPW_RAISE(err, SPW_EINVAL,
                             "a document with targets at token %llu of a sequence is not one of a pair of answers",
                             (unsigned long long)at);
        *out = (spw_pair){.chosen = (int32_t)at, .rejected = (int32_t)middle, .end = (int32_t)end};
        break;
    }
    return SPW_OK;
}

void
spw__pair_sums(const spw_pair *pair, const float *losses, const int32_t *targets, double sums[2], uint64_t counts[2])
{
    const int32_t ends[2] = {pair->rejected, pair->end}, begins[2] = {pair->chosen, pair->rejected};
    for (int k = 0; k < 2; k++) {
        sums[k] = 0;
        counts[k] = 0;
        for (int32_t i = begins[k]; i < ends[k]; i++) {
            sums[k] += targets[i] >= 0 ? (double)losses[i] : 0;
            counts[k] += targets[i] >= 0;
        }
    }
}

void
spw__pairs_add(spw_pair_means *sum, const spw_pair *pairs, uint32_t count, const spw_preference *rule,
               const float *losses, const int32_t *targets)
{
    for (uint32_t i = 0; i < count; i++) {
        double sums[2];
        uint64_t counts[2];
        spw_preferred of;
        spw__pair_sums(&pairs[i], losses, targets, sums, counts);
        of = spw_preference_weigh(rule, &pairs[i], sums, counts);
        sum->loss += of.loss;
        sum->chosen += of.reward[0];
        sum->rejected += of.reward[1];
        sum->right += of.reward[0] > of.reward[1];
        sum->pairs++;
    }
}
