/*
 * The sum of all ranks' operands, included once per instruction set with SUM set to the function's name. A block is
 * summed in fp32 in the order of the ranks, stored rounded, and its squares are summed while it is in the cache. Every
 * instruction set makes the same bits, payloads of NaN aside.
 */
#include "comm_internal.h"
#include "convert.h"

static inline float
widen_f32(float x)
{
    return x;
}

/*
 * dst = ((dst + a) + b) + c, or of fresh: (a + b) + c; the loops by number of operands and type. dst may be one of the
 * operands: element i depends on elements i alone.
 */
#define SUM_LOOP(expression) _Pragma("GCC ivdep") for (uint64_t i = 0; i < n; i++) dst[i] = expression
#define SUM_TYPE(name, type, widen)                                                                                    \
    static void name(float *dst, const void *const *operands, uint32_t count, bool fresh, uint64_t n)                  \
    {                                                                                                                  \
        const type *a = operands[0], *b = count > 1 ? operands[1] : NULL, *c = count > 2 ? operands[2] : NULL;         \
        if (fresh && count == 1)                                                                                       \
            SUM_LOOP(widen(a[i]));                                                                                     \
        else if (fresh && count == 2)                                                                                  \
            SUM_LOOP(widen(a[i]) + widen(b[i]));                                                                       \
        else if (fresh)                                                                                                \
            SUM_LOOP((widen(a[i]) + widen(b[i])) + widen(c[i]));                                                       \
        else if (count == 1)                                                                                           \
            SUM_LOOP(dst[i] + widen(a[i]));                                                                            \
        else if (count == 2)                                                                                           \
            SUM_LOOP((dst[i] + widen(a[i])) + widen(b[i]));                                                            \
        else                                                                                                           \
            SUM_LOOP(((dst[i] + widen(a[i])) + widen(b[i])) + widen(c[i]));                                            \
    }
SUM_TYPE(add_f32, float, widen_f32)
SUM_TYPE(add_bf16, uint16_t, spw_bf16_to_f32)

/* Stores rounded; wide then holds the elements as stored. */
static void
store(const spw__sum *s, uint64_t first, float *wide, uint64_t n)
{
    float *sink = (float *)s->sink + first;
    uint16_t *half = (uint16_t *)s->sink + first;
    if (s->sink_dtype == SPW_F32) {
        if (s->add)
            for (uint64_t i = 0; i < n; i++)
                sink[i] = wide[i] = sink[i] + wide[i];
        else
            memcpy(sink, wide, n * sizeof *sink);
    } else if (s->sink_dtype == SPW_BF16) {
        spw__narrow_bf16(half, wide, n);
        if (s->sumsq != NULL)
            spw__widen_bf16(wide, half, n);
    } else {
        spw__narrow_f16(half, wide, n);
        if (s->sumsq != NULL)
            spw__widen_f16(wide, half, n);
    }
}

static void
sum_block(const spw__sum *s, uint64_t first, uint64_t n)
{
    _Alignas(64) float acc[SUM_BLOCK], more[SUM_BLOCK];
    bool straight = s->sink_dtype == SPW_F32 && !s->add && s->count <= 3 && s->dtype == SPW_F32;
    float *dst = straight ? (float *)s->sink + first : acc;
    for (uint32_t at = 0, take; at < s->count; at += take) {
        const void *now[3];
        take = s->count - at < 3 ? s->count - at : 3;
        if (s->dtype == SPW_F16)
            take = 1;
        for (uint32_t i = 0; i < take; i++)
            now[i] = (const char *)s->operands[at + i] + first * spw_dtype_bytes(s->dtype);
        if (s->dtype == SPW_F32) {
            add_f32(dst, now, take, at == 0, n);
        } else if (s->dtype == SPW_BF16) {
            add_bf16(dst, now, take, at == 0, n);
        } else {
            spw__widen_f16(at == 0 ? dst : more, now[0], n);
            if (at > 0)
                for (uint64_t i = 0; i < n; i++)
                    dst[i] += more[i];
        }
    }
    if (!straight)
        store(s, first, acc, n);
    if (s->sumsq != NULL)
        s->sumsq[first / SUM_BLOCK] = spw_sumsq(dst, n);
}

void
SUM(const spw__sum *s)
{
    for (uint64_t first = 0; first < s->elems; first += SUM_BLOCK)
        sum_block(s, first, s->elems - first < SUM_BLOCK ? s->elems - first : SUM_BLOCK);
}
