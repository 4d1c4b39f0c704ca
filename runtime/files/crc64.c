/*
 * CRC-64/XZ (ECMA-182's polynomial, reflected) of bytes that come in any order. A CRC is linear over GF(2): what a stretch adds to that
 * of the whole hangs only on its bytes and on how many follow, so stretches are summed by whoever has them and put together by
 * XOR. ISA-L sums the bytes; here is the factor x^(8 n) mod P, n the bytes behind, that moves a sum to its place.
 */
#include "spw_files.h"
#include <isa-l/crc64.h>
#include <pthread.h>

/* Bit 63 is x^0, bit 0 is x^63. */
static const uint64_t P = 0xC96C5795D7870F42u, ONE = 1ull << 63;
enum { NIBBLES = 16 };

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;
static uint64_t overflow[NIBBLES];        /* what the lowest nibble becomes when it is multiplied by x^4 */
static uint64_t powers[NIBBLES][NIBBLES]; /* [k][d]: x^(8 d 16^k) */

static uint64_t
times_x(uint64_t v)
{
    return v >> 1 ^ (v & 1 ? P : 0);
}

static uint64_t
multiply(uint64_t a, uint64_t b)
{
    uint64_t multiples[NIBBLES] = {0}, sum = 0;
    for (uint32_t bit = NIBBLES / 2; bit > 0; bit /= 2, b = times_x(b)) {
        for (uint32_t n = bit; n < NIBBLES; n++)
            multiples[n] ^= n & bit ? b : 0;
    }
    for (uint32_t k = 0; k < 64; k += 4)
        sum = sum >> 4 ^ overflow[sum & 15] ^ multiples[a >> k & 15];
    return sum;
}

static void
make_tables(void)
{
    uint64_t step = ONE;
    for (uint32_t n = 0; n < NIBBLES; n++)
        overflow[n] = times_x(times_x(times_x(times_x(n))));
    for (uint32_t i = 0; i < 8; i++)
        step = times_x(step);
    for (uint32_t k = 0; k < NIBBLES; k++) {
        powers[k][0] = ONE;
        for (uint32_t d = 1; d < NIBBLES; d++)
            powers[k][d] = multiply(powers[k][d - 1], step);
        step = multiply(powers[k][NIBBLES - 1], step);
    }
}

static uint64_t
move(uint64_t sum, uint64_t behind)
{
    pthread_once(&tables_once, make_tables);
    for (uint32_t k = 0; behind > 0; k++, behind /= NIBBLES) {
        if (behind % NIBBLES > 0)
            sum = multiply(sum, powers[k][behind % NIBBLES]);
    }
    return sum;
}

/*
 * ISA-L's sums leave the upper halves of vector registers in use, and what runs next of code for SSE, such as ours that every
 * processor takes, is three times as slow until they are given back.
 */
static void
give_back_vectors(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx"))
        __asm__ volatile("vzeroupper" ::
                             : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                               "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
#endif
}

uint64_t
spw_crc64_part(const void *data, uint64_t bytes, uint64_t behind)
{
    uint64_t sum = ~crc64_ecma_refl(UINT64_MAX, data, bytes); /* begins with zero, and ends without its inversion */
    give_back_vectors();
    return move(sum, behind);
}

uint64_t
spw_crc64_whole(uint64_t parts, uint64_t bytes)
{
    return ~(parts ^ move(UINT64_MAX, bytes));
}
