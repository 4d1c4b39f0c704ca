/*
 * What a measurement says of its samples: the median, and the sample at a rank for tails and best quarters. They are found by
 * counting: samples stay in the order they were taken, however many there are, and a thousand take a millisecond.
 */
#include "spw_base.h"
#include <math.h>

double
spw_sample_at(const double *v, uint32_t n, uint32_t rank)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t below = 0, same = 0;
        for (uint32_t k = 0; k < n; k++) {
            below += v[k] < v[i];
            same += v[k] == v[i];
        }
        if (below <= rank && rank < below + same)
            return v[i];
    }
    return NAN;
}

double
spw_median(const double *v, uint32_t n)
{
    return n == 0 ? 0 : (spw_sample_at(v, n, (n - 1) / 2) + spw_sample_at(v, n, n / 2)) / 2;
}
