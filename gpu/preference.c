/* Preferences on the host: names, and spw_preference_weigh(). */
#include "preference_body.h"

const char *
spw_preference_name(spw_preference_kind kind)
{
    static const char *const names[SPW_PREFERENCE_COUNT] = {"dpo", "ipo", "simpo", "orpo", "apo_zero"};
    return names[kind];
}

bool
spw_preference_refers(spw_preference_kind kind)
{
    return spw__preference_refers(kind);
}

spw_preferred
spw_preference_weigh(const spw_preference *rule, const spw_pair *pair, const double sums[2], const uint64_t counts[2])
{
    return spw__preference_weigh(rule, pair, sums, counts);
}
