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

/* Sigmoid of h, and *slope, by h. */
SPW_PREFERENCE_FN double
spw__preference_sigmoid(double h, double *slope)
{
    double small = exp(-fabs(h)), less = small / (1 + small), more = 1 / (1 + small);
    *slope = less * more;
    return h < 0 ? less : more;
}

/* Log of p / (1 - p), of -log p, and *slope, by it. That of a certain answer is very large, not infinite. */
SPW_PREFERENCE_FN double
spw__preference_log_odds(double mean, double *slope)
{
    double m = mean < 1e-12 ? 1e-12 : mean, rest = -expm1(-m);
    *slope = -1 / rest;
    return -m - log(rest);
}

SPW_PREFERENCE_FN bool
spw__preference_refers(spw_preference_kind kind)
{
    return kind != SPW_PREFERENCE_SIMPO && kind != SPW_PREFERENCE_ORPO;
}

SPW_PREFERENCE_FN spw_preferred
spw__preference_weigh(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2])
{
    const double beta = (double)rule->beta, e = (double)rule->label_smoothing;
    spw_preferred out = {0, {0, 0}, {0, 0}};
    double n[2], ratio[2], mean[2], slope, slopes[2], off;
    if (counts[0] == 0 || counts[1] == 0)
        return out;
    for (int k = 0; k < 2; k++) {
        n[k] = (double)counts[k];
        mean[k] = sums[k] / n[k];
        ratio[k] = pair->reference[k] - sums[k];
        out.reward[k] = spw__preference_refers(rule->kind) ? beta * ratio[k] : -beta * mean[k];
    }
    if (rule->kind == SPW_PREFERENCE_DPO) {
        out.loss = spw__preference_logistic(out.reward[0] - out.reward[1], e, &slope);
        out.coef[0] = -slope * beta;
        out.coef[1] = slope * beta;
    } else if (rule->kind == SPW_PREFERENCE_SIMPO) {
        out.loss = spw__preference_logistic(out.reward[0] - out.reward[1] - (double)rule->margin, e, &slope);
        out.coef[0] = -slope * beta / n[0];
        out.coef[1] = slope * beta / n[1];
    } else if (rule->kind == SPW_PREFERENCE_ORPO) {
        off = spw__preference_log_odds(mean[0], &slopes[0]) - spw__preference_log_odds(mean[1], &slopes[1]);
        out.loss = beta * spw__preference_logistic(off, 0, &slope);
        out.coef[0] = beta * slope * slopes[0] / n[0];
        out.coef[1] = -beta * slope * slopes[1] / n[1];
    } else if (rule->kind == SPW_PREFERENCE_APO_ZERO) {
        out.loss =
            spw__preference_sigmoid(-out.reward[0], &slopes[0]) + spw__preference_sigmoid(out.reward[1], &slopes[1]);
        out.coef[0] = beta * slopes[0];
        out.coef[1] = -beta * slopes[1];
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
