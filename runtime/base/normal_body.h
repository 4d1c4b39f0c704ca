/*
 * normal.h's numbers, included once per instruction set with NORMAL set to the name of its function. Plain loops that compilers
 * vectorise; every operation is IEEE's and none is contracted, so all of them make the same bits. Logarithm and cosine are their series,
 * as far as fp64 shows a term: within two units of the last place.
 */
#include "normal.h"
#include "philox.h"
#include <math.h>
#include <string.h>

enum { LANES = 64 };

/* The first two of four words each. */
static void
draw_words(uint32_t *restrict first_word, uint32_t *restrict second_word, uint64_t seed, uint64_t stream,
           uint64_t first)
{
    for (int i = 0; i < LANES; i++) {
        uint32_t r[4];
        spw__philox(seed, stream, first + (uint64_t)i, r);
        first_word[i] = r[0];
        second_word[i] = r[1];
    }
}

static inline uint64_t
bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double
of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ln u for u in [2^-32, 1]: u = 2^k z with z around 1, ln z = 2 (s + s^3 / 3 + s^5 / 5 ..) with s = (z - 1) / (z + 1), at most 0.172. */
static inline double
logarithm(double u)
{
    const uint64_t root = 0x3fe6a09e667f3bcd;                                   /* sqrt(1/2), where z begins */
    const double ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45; /* k ln2_high is exact */
    uint64_t t = bits_of(u) + (0x3ff0000000000000 - root);
    double z = of_bits((t & 0x000fffffffffffff) + root);
    double k = of_bits(t >> 52 | 0x4330000000000000) - (0x1p52 + 1023); /* of an integer, without a conversion */
    double s = (z - 1.0) / (z + 1.0), q = s * s, r = 1.0 / 21;
    r = r * q + 1.0 / 19;
    r = r * q + 1.0 / 17;
    r = r * q + 1.0 / 15;
    r = r * q + 1.0 / 13;
    r = r * q + 1.0 / 11;
    r = r * q + 1.0 / 9;
    r = r * q + 1.0 / 7;
    r = r * q + 1.0 / 5;
    r = r * q + 1.0 / 3;
    return k * ln2_high + (2.0 * s + (2.0 * s * (r * q) + k * ln2_low));
}

/* cos(2 pi turn / 2^32): of the nearest quarter's remainder, at most an eighth of a turn, the sine or the cosine. */
static inline double
cosine(uint32_t turn)
{
    uint32_t quarter = (turn + (1u << 29)) >> 30;
    uint64_t sine = (uint64_t)0 - (quarter & 1), sign = (uint64_t)((quarter + 1) & 2)
                                                        << 62; /* bits, for a branch stops vectors */
    double a = (double)(int32_t)(turn - (quarter << 30)) * 0x1.921fb54442d18p-30, q = a * a;
    double c = 1.0 / 20922789888000, s = 1.0 / 355687428096000;
    c = c * q - 1.0 / 87178291200;
    c = c * q + 1.0 / 479001600;
    c = c * q - 1.0 / 3628800;
    c = c * q + 1.0 / 40320;
    c = c * q - 1.0 / 720;
    c = c * q + 1.0 / 24;
    c = c * q - 0.5;
    c = c * q + 1.0;
    s = s * q - 1.0 / 1307674368000;
    s = s * q + 1.0 / 6227020800;
    s = s * q - 1.0 / 39916800;
    s = s * q + 1.0 / 362880;
    s = s * q - 1.0 / 5040;
    s = s * q + 1.0 / 120;
    s = s * q - 1.0 / 6;
    s = a + a * (s * q);
    return of_bits(((bits_of(c) & ~sine) | (bits_of(s) & sine)) ^ sign);
}

static void
draw_lanes(float *restrict out, uint64_t seed, uint64_t stream, uint64_t first, float deviation)
{
    uint32_t r0[LANES], r1[LANES];
    draw_words(r0, r1, seed, stream, first);
    for (int i = 0; i < LANES; i++) {
        double u = ((double)(int32_t)(r0[i] ^ 0x80000000u) + (2147483648.0 + 1.0)) * 0x1p-32; /* exact */
        out[i] = (float)(sqrt(-2.0 * logarithm(u)) * cosine(r1[i]) * (double)deviation);
    }
}

void
NORMAL(float *out, uint64_t seed, uint64_t stream, uint64_t first, uint64_t n, float deviation)
{
    float last[LANES];
    uint64_t i = 0;
    for (; n - i >= LANES; i += LANES)
        draw_lanes(out + i, seed, stream, first + i, deviation);
    if (i < n) {
        draw_lanes(last, seed, stream, first + i, deviation);
        memcpy(out + i, last, (n - i) * sizeof *out);
    }
}
