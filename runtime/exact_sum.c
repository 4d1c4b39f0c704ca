/*
 * A sum of doubles without rounding: a fixed-point number as wide as the type, in digits of 32 bits with room for carries (Kulisch and
 * Miranker 1986). Terms may come in any order and on any rank: the sum has the same bits.
 */
#include "runtime_internal.h"
#include <math.h>

enum { DIGIT_BITS = 32, LOWEST = -1074, ADDS_MAX = 1 << 30 };

/* Digits below 2^32 again. */
static void
carry(exact_sum *s)
{
    uint64_t over = 0;
    for (int i = 0; i < EXACT_DIGITS; i++) {
        s->digits[i] += over;
        over = s->digits[i] >> DIGIT_BITS;
        s->digits[i] &= UINT32_MAX;
    }
    s->adds = 0;
}

void
spw__exact_add(exact_sum *s, double x)
{
    uint64_t bits, mantissa, low, high;
    uint32_t place;
    if (!isfinite(x)) {
        s->special += x;
        return;
    }
    SPW_ASSERT(x >= 0);
    if (x == 0)
        return;
    if (s->adds == ADDS_MAX)
        carry(s);
    memcpy(&bits, &x, sizeof bits); /* a number of 1 to 53 bits, so many places above the least one of the type */
    mantissa = bits & (((uint64_t)1 << 52) - 1);
    place = (uint32_t)(bits >> 52) & 0x7ff;
    if (place > 0) { /* not a subnormal */
        mantissa |= (uint64_t)1 << 52;
        place--;
    }
    low = (mantissa & UINT32_MAX) << place % DIGIT_BITS;
    high = (mantissa >> DIGIT_BITS) << place % DIGIT_BITS;
    s->digits[place / DIGIT_BITS] += low & UINT32_MAX;
    s->digits[place / DIGIT_BITS + 1] += (low >> DIGIT_BITS) + (high & UINT32_MAX);
    s->digits[place / DIGIT_BITS + 2] += high >> DIGIT_BITS;
    s->adds++;
}

/* more stays what it is worth. */
void
spw__exact_merge(exact_sum *s, exact_sum *more)
{
    carry(more);
    if (s->adds == ADDS_MAX)
        carry(s);
    for (int i = 0; i < EXACT_DIGITS; i++)
        s->digits[i] += more->digits[i];
    s->special += more->special;
    s->adds++;
}

double
spw__exact_value(exact_sum *s)
{
    double sum = 0;
    carry(s);
    if (s->special != 0) /* or NaN */
        return s->special;
    for (int i = 0; i < EXACT_DIGITS; i++)
        sum += ldexp((double)s->digits[i], i * DIGIT_BITS + LOWEST);
    return sum;
}

void
spw__exact_save(exact_sum *s, double values[EXACT_VALUES])
{
    carry(s);
    values[0] = s->special;
    for (int i = 0; i < EXACT_DIGITS; i++)
        values[1 + i] = (double)s->digits[i];
}

void
spw__exact_load(exact_sum *s, const double values[EXACT_VALUES])
{
    *s = (exact_sum){.special = values[0]};
    for (int i = 0; i < EXACT_DIGITS; i++)
        s->digits[i] = (uint64_t)values[1 + i];
}
