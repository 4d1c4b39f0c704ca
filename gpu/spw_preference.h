/*
 * spw_preference.h - what preference training minimises of a pair of answers, and how that hangs on the losses of their rows.
 *
 * An answer's part in it is the sum over its targets of -log p, so a head's gradient needs one number for all rows of an answer: the derivative
 * by that sum. Devices make weights of rows from it (spw_gpu_preference), the host reports it; both in fp64, by the one text in preference_body.h.
 */
#ifndef SPW_PREFERENCE_H
#define SPW_PREFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum spw_preference_kind {
    SPW_PREFERENCE_DPO,
    SPW_PREFERENCE_IPO,
    SPW_PREFERENCE_SIMPO,
    SPW_PREFERENCE_ORPO,
    SPW_PREFERENCE_APO_ZERO,
    SPW_PREFERENCE_COUNT
} spw_preference_kind;
/* "dpo", "apo_zero" ... And whether it is beside a reference: not SimPO, not ORPO. */
const char *spw_preference_name(spw_preference_kind kind);
bool spw_preference_refers(spw_preference_kind kind);

typedef struct spw_preference {
    spw_preference_kind kind;
    float beta;            /* above 0; IPO's tau, ORPO's lambda */
    float label_smoothing; /* DPO and SimPO: how often the chosen answer is taken to be the worse one */
    float margin;          /* SimPO's gamma */
    float likelihood;      /* weight of the mean -log p of the chosen answer's targets, added to the loss */
} spw_preference;

typedef struct spw_pair { /* rows of a micro-batch */
    /* First row of the chosen answer's document, of the rejected one's, which comes next, and behind that; end 0: no pair. */
    int32_t chosen, rejected, end;
    double reference
        [2]; /* sums of -log p over targets by the reference, chosen and rejected; 0 where it has no reference */
} spw_pair;

/* Of each two numbers, the chosen answer's is first. */
typedef struct spw_preferred {
    double loss;
    double coef[2]; /* d loss / d sums[k]: the weight of every row of answer k that has a target */
    double reward
        [2]; /* beta (log p, less that of the reference), of the answer; without one: beta times the mean of log p */
} spw_preferred;

/*
 * spw_preference_weigh - one pair, of which the reference's sums are read.
 *   sums    [2]  -log p by the policy, summed over the answer's rows with a target
 *   counts  [2]  N, number of these rows; where one is 0, all that comes back is 0
 *
 * Computes  with r[k] = reference[k] - sums[k], beside the reference the answer's log p:
 *           DPO    h = beta (r[0] - r[1]);                                 loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h)
 *           IPO    d = r[0]/N[0] - r[1]/N[1];                              loss = (d - 1/(2 beta))^2
 *           SimPO  h = beta (sums[1]/N[1] - sums[0]/N[0]) - margin;        loss as DPO's
 *           ORPO   m[k] = sums[k]/N[k], o[k] = -m[k] - log(1 - exp(-m[k])); loss = -beta log sigmoid(o[0] - o[1])
 *           APO    zero: loss = 1 - sigmoid(beta r[0]) + sigmoid(beta r[1])
 *           and to it likelihood sums[0]/N[0], which ORPO has as 1.
 * Source    Rafailov et al. 2023 (2305.18290), equation 7, with labels smoothed; Azar et al. 2023 (2310.12036), equation 17, on means over
 *           targets; Meng et al. 2024 (2405.14734), equation 6; Hong et al. 2024 (2403.07691), equations 6 and 7; D'Oosterlinck et al. 2024
 *           (2408.06266), APO-zero.
 */
spw_preferred
spw_preference_weigh(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2]);

#ifdef __cplusplus
}
#endif
#endif
