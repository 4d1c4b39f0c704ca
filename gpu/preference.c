/* The host's spw_preference_weigh(). */
#include "preference_body.h"

spw_preferred
spw_preference_weigh(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2])
{
    return spw__preference_weigh(rule, pair, sums, counts);
}
