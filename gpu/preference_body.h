/*
 * What spw_preference_weigh() computes, for the host (preference.c) and, where SPW_PREFERENCE_FN says so, for a device.
 */
#ifndef SPW_PREFERENCE_BODY_H
#define SPW_PREFERENCE_BODY_H

#include "spw_preference.h"
#include <math.h>

#ifndef SPW_PREFERENCE_FN
#define SPW_PREFERENCE_FN static inline
#endif

/* Of -log sigmoid(h), which the wrong label has with probability e: the value, and *slope, by h. */
SPW_PREFERENCE_FN double
spw__preference_logistic(double h, double e, double *slope)
{
    double small = exp(-fabs(h)), less = small / (1 + small), more = 1 / (1 + small); /* sigmoid(-|h|), sigmoid(|h|) */
    double rest = log1p(small), right = rest + (h < 0 ? -h : 0), wrong = rest + (h > 0 ? h : 0);
    *slope = e * (h < 0 ? less : more) - (1 - e) * (h < 0 ? more : less);
    return (1 - e) * right + e * wrong;
}

SPW_PREFERENCE_FN spw_preferred
spw__preference_weigh(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2])
{
    const double beta = (double)rule->beta, e = (double)rule->label_smoothing;
    spw_preferred out = {0, {0, 0}, {0, 0}};
    double n[2], ratio[2], mean[2], slope, off;
    if (counts[0] == 0 || counts[1] == 0)
        return out;
    for (int k = 0; k < 2; k++) {
        n[k] = (double)counts[k];
        mean[k] = sums[k] / n[k];
        ratio[k] = pair->reference[k] - sums[k];
        out.reward[k] = rule->kind == SPW_PREFERENCE_SIMPO ? -beta * mean[k] : beta * ratio[k];
    }
    if (rule->kind == SPW_PREFERENCE_DPO) {
        out.loss = spw__preference_logistic(out.reward[0] - out.reward[1], e, &slope);
        out.coef[0] = -slope * beta;
        out.coef[1] = slope * beta;
    } else if (rule->kind == SPW_PREFERENCE_SIMPO) {
        out.loss = spw__preference_logistic(out.reward[0] - out.reward[1] - (double)rule->margin, e, &slope);
        out.coef[0] = -slope * beta / n[0];
        out.coef[1] = slope * beta / n[1];
    } else {
        off = ratio[0] / n[0] - ratio[1] / n[1] - 1 / (2 * beta);
        out.loss = off * off;
        out.coef[0] = -2 * off / n[0];
        out.coef[1] = 2 * off / n[1];
    }
    out.loss += (double)rule->likelihood * mean[0];
    out.coef[0] += (double)rule->likelihood / n[0];
    return out;
}

#endif
