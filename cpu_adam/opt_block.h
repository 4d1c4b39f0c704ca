/*
 * opt_block.h - the optimizers and state formats on blocks that fit L1, as plain C; compiled once per instruction set.
 *
 * A chunk is taken 256 elements at a time: what is not fp32 is decoded into buffers in L1, the rule updates the block in
 * place, and what was decoded is encoded again. Memory is read and written once; the detour costs L1 traffic only. So
 * rules and formats add up instead of multiplying, and a rule is a loop over fp32 arrays that any compiler vectorises.
 * Bits are the same on every instruction set: every multiply-add is an explicit fma, sqrt and divide are IEEE, nothing
 * is summed across elements except maxima, and a NaN result is always 0x7fc00000.
 *
 * Included by opt_ref.c, opt_avx2.c and opt_avx512.c, which define OPT_TABLE.
 */
#include "convert.h"
#include "cpu_adam_internal.h"
#include <math.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define SIMD static inline __attribute__((always_inline))

SIMD float
canonical(float x)
{
    return x != x ? spw_bits_f32(SPW__SPLIT_NAN) : x;
}

/* ---------------------------------------------------------------- rules; c: coefficients, n <= SPW_OPT_BLOCK */

/* adam_ref.c's formula; c as in spw_adam_coef. */
static void
rule_adam(const float *restrict c, uint32_t n, float *restrict w, float *restrict m, float *restrict v,
          const float *restrict grad)
{
    const float b1 = c[0], b2 = c[1], b2c = c[2], eps = c[3], l2 = c[4], decay = c[5], step = -c[6], inv = c[7];
    for (uint32_t i = 0; i < n; i++) {
        float g = grad[i], d, x;
        g = l2 != 0.0f ? fmaf(l2, w[i], g) : g;
        x = fmaf(b1, g - m[i], m[i]);
        m[i] = canonical(x);
        x = fmaf(b2, v[i], (b2c * g) * g);
        v[i] = canonical(x);
        d = fmaf(sqrtf(v[i]), inv, eps);
        w[i] = canonical(fmaf(step, m[i] / d, w[i] * decay));
    }
}

/* ---------------------------------------------------------------- Adam with a way back (undo.c) */

/* Where the state after came from, up to roundings. q is what the update moved the master by, in steps. */
typedef struct backwards {
    float b1, b2c, l2, step, back_m, back_v, back_w;
} backwards;

SIMD backwards
backwards_of(const float *c)
{
    return (backwards){c[0], c[2], c[4], -c[6], 1.0f / (1.0f - c[0]), 1.0f / c[1], 1.0f / c[5]};
}

SIMD float
master_before(const backwards *k, float w, float q)
{
    return fmaf(-k->step, q, w) * k->back_w;
}

SIMD float
first_before(const backwards *k, float m, float g)
{
    return fmaf(-k->b1, g, m) * k->back_m;
}

SIMD float
second_before(const backwards *k, float v, float g)
{
    return (v - (k->b2c * g) * g) * k->back_v;
}

/* A master that changes on its way to memory and back; NaN too. */
SIMD uint32_t
changes(float w)
{
    return (spw_f32_bits(w) & 0x7fffffffu) > SPW__SPLIT_MAX;
}

/* rule_adam's numbers. */
static uint32_t
adam_logged(const float *restrict c, uint32_t n, const float *restrict w, const float *restrict m,
            const float *restrict v, const float *restrict grad, float *restrict w_after, float *restrict m_after,
            float *restrict v_after, uint8_t *restrict m_bits, uint8_t *restrict vw_bits, uint32_t *restrict misfit)
{
    const float b1 = c[0], b2 = c[1], b2c = c[2], eps = c[3], l2 = c[4], decay = c[5], step = -c[6], inv = c[7];
    const backwards k = backwards_of(c);
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++) {
        float g = grad[i], m1, v1, w1, q;
        uint32_t off_m, off_v, off_w, misses;
        g = l2 != 0.0f ? fmaf(l2, w[i], g) : g;
        m1 = fmaf(b1, g - m[i], m[i]);
        v1 = fmaf(b2, v[i], (b2c * g) * g);
        q = m1 / fmaf(sqrtf(v1), inv, eps);
        w1 = fmaf(step, q, w[i] * decay); /* NaN if one of them is */
        off_m = spw_f32_bits(m[i]) - spw_f32_bits(first_before(&k, m1, g)) + SPW__M_BIAS;
        off_v = spw_f32_bits(v[i]) - spw_f32_bits(second_before(&k, v1, g)) + SPW__V_BIAS;
        off_w = spw_f32_bits(w[i]) - spw_f32_bits(master_before(&k, w1, q)) + SPW__W_BIAS;
        misses = (off_m > 0xff) | (off_v > SPW__V_MASK) | (off_w > SPW__V_MASK) | changes(w1);
        m_after[i] = canonical(m1);
        v_after[i] = canonical(v1);
        w_after[i] = canonical(w1);
        misfit[i] = misses;
        count += misses;
        m_bits[i] = (uint8_t)off_m;
        vw_bits[i] = (uint8_t)((off_v & SPW__V_MASK) | off_w << SPW__W_SHIFT);
    }
    return count;
}

static void
adam_back(const float *restrict c, uint32_t n, float *restrict w, float *restrict m, float *restrict v,
          const float *restrict grad, const uint8_t *restrict m_bits, const uint8_t *restrict vw_bits)
{
    const float eps = c[3], inv = c[7];
    const backwards k = backwards_of(c);
    for (uint32_t i = 0; i < n; i++) {
        float g = grad[i], q = m[i] / fmaf(sqrtf(v[i]), inv, eps);
        w[i] = spw_bits_f32(spw_f32_bits(master_before(&k, w[i], q)) + (uint32_t)(vw_bits[i] >> SPW__W_SHIFT) -
                            SPW__W_BIAS);
        g = k.l2 != 0.0f ? fmaf(k.l2, w[i], g) : g;
        m[i] = spw_bits_f32(spw_f32_bits(first_before(&k, m[i], g)) + m_bits[i] - SPW__M_BIAS);
        v[i] =
            spw_bits_f32(spw_f32_bits(second_before(&k, v[i], g)) + (uint32_t)(vw_bits[i] & SPW__V_MASK) - SPW__V_BIAS);
    }
}

static void
copy_past(void *restrict to, const void *restrict from, uint64_t bytes)
{
    uint64_t at = 0;
#ifdef __AVX2__
    for (; (uintptr_t)to % 32 == 0 && at + 32 <= bytes; at += 32)
        _mm256_stream_si256((__m256i *)(void *)((char *)to + at),
                            _mm256_loadu_si256((const __m256i *)(const void *)((const char *)from + at)));
    _mm_sfence();
#endif
    memcpy((char *)to + at, (const char *)from + at, bytes - at);
}

/* ---------------------------------------------------------------- the other rules */

/* c: 0 step size lr / (1 + (t - 1) lr_decay), 1 eps, 2 l2. Duchi, Hazan, Singer 2011. */
static void
rule_adagrad(const float *restrict c, uint32_t n, float *restrict w, float *restrict sum, float *restrict unused,
             const float *restrict grad)
{
    const float step = -c[0], eps = c[1], l2 = c[2];
    (void)unused;
    for (uint32_t i = 0; i < n; i++) {
        float g = grad[i];
        g = l2 != 0.0f ? fmaf(l2, w[i], g) : g;
        sum[i] = canonical(fmaf(g, g, sum[i]));
        w[i] = canonical(fmaf(step, g / (sqrtf(sum[i]) + eps), w[i]));
    }
}

/* c: 0 beta1, 1 1 - beta1, 2 beta2, 3 1 - beta2, 4 decay 1 - lr wd, 5 lr. Chen et al. 2023, Algorithm 2. */
static void
rule_lion(const float *restrict c, uint32_t n, float *restrict w, float *restrict m, float *restrict unused,
          const float *restrict grad)
{
    const float b1 = c[0], b1c = c[1], b2 = c[2], b2c = c[3], decay = c[4], lr = c[5];
    (void)unused;
    for (uint32_t i = 0; i < n; i++) {
        float g = grad[i], u = fmaf(b1, m[i], b1c * g);
        float signed_lr = spw_bits_f32(spw_f32_bits(lr) | (spw_f32_bits(u) & 0x80000000u));
        float step = fabsf(u) > 0.0f ? signed_lr : u; /* NaN stays NaN */
        w[i] = canonical(w[i] * decay - step);
        m[i] = canonical(fmaf(b2, m[i], b2c * g));
    }
}

/* c: 0 lr, 1 momentum, 2 1 - dampening (1 at the first step), 3 l2, 4 nesterov. Sutskever et al. 2013 as PyTorch has it. */
static void
rule_sgd(const float *restrict c, uint32_t n, float *restrict w, float *restrict m, float *restrict unused,
         const float *restrict grad)
{
    const float lr = -c[0], momentum = c[1], damp = c[2], l2 = c[3];
    const int nesterov = c[4] != 0.0f;
    (void)unused;
    for (uint32_t i = 0; i < n; i++) {
        float g = grad[i], d;
        g = l2 != 0.0f ? fmaf(l2, w[i], g) : g;
        m[i] = canonical(fmaf(momentum, m[i], damp * g));
        d = nesterov ? fmaf(momentum, m[i], g) : m[i];
        w[i] = canonical(fmaf(lr, d, w[i]));
    }
}

/*
 * Muon's second half; grad is what its first half made, orthogonal by now. c: 0 lr, 1 decay 1 - lr wd, 2 1 - momentum, 3 momentum,
 * 4 nesterov.
 */
static void
rule_muon(const float *restrict c, uint32_t n, float *restrict w, float *restrict unused0, float *restrict unused1,
          const float *restrict grad)
{
    const float lr = -c[0], decay = c[1];
    (void)unused0;
    (void)unused1;
    for (uint32_t i = 0; i < n; i++)
        w[i] = canonical(fmaf(lr, grad[i], w[i] * decay));
}

/* And its first; g in: the gradient, out: what is to be made orthogonal, times up. Adds its squares to lanes. */
static void
momentum(const float *restrict c, uint32_t n, float *restrict m, float *restrict g, float up,
         double lane[SPW_SUM_LANES])
{
    const float part = c[2], rest = c[3];
    const int nesterov = c[4] != 0.0f;
    for (uint32_t i = 0; i < n; i++) {
        float x = canonical(fmaf(part, g[i] - m[i], m[i]));
        g[i] = canonical(nesterov ? fmaf(rest, x - g[i], g[i]) : x) * up;
        m[i] = x;
    }
    spw_sumsq_add(lane, g, n);
}

/*
 * A loop that is not inlined, with the count as an argument: a compiler that knows it to be SPW__GROUP unrolls the loop whole and
 * then finds nothing to vectorise.
 */
#ifdef __clang__
#define GROUP_LOOP static __attribute__((noinline))
#else
#define GROUP_LOOP static __attribute__((noinline, noclone))
#endif

/* The largest magnitude, as bits. Loops leave out what only rare numbers need where a block has none of them. */
GROUP_LOOP uint32_t
top_of(const float *restrict x, uint32_t n)
{
    uint32_t top = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = spw_f32_bits(x[i]) & 0x7fffffffu;
        top = u > top ? u : top;
    }
    return top;
}

/* ---------------------------------------------------------------- gradients */

static uint64_t
count_nonfinite(const float *restrict g, uint32_t n)
{
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n; i++)
        bad += (spw_f32_bits(g[i]) & 0x7fffffffu) >= SPW__F32_INF;
    return bad;
}

static uint64_t
load_grad(float *restrict g, const void *restrict grad, spw_dtype dtype, uint32_t n, float scale)
{
    if (dtype == SPW_F32) {
        for (uint32_t i = 0; i < n; i++)
            g[i] = ((const float *)grad)[i] * scale;
    } else if (dtype == SPW_BF16) {
        for (uint32_t i = 0; i < n; i++)
            g[i] = spw_bits_f32((uint32_t)((const uint16_t *)grad)[i] << 16) * scale;
    } else {
        spw__widen_f16(g, grad, n);
        for (uint32_t i = 0; i < n; i++)
            g[i] *= scale;
    }
    return top_of(g, n) < SPW__F32_INF ? 0 : count_nonfinite(g, n);
}

/* ---------------------------------------------------------------- weights */

static void
store_bf16(uint16_t *restrict out, const float *restrict w, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = spw__weight_bf16(w[i]);
}

static void
store_f16(uint16_t *restrict out, const float *restrict w, uint32_t n)
{
    spw__narrow_f16(out, w, n);
}

static void
load_split(float *restrict w, const uint16_t *restrict hi, const int16_t *restrict lo, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        w[i] = spw_bits_f32(((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i]);
}

SIMD void
store_split_as(uint16_t *restrict hi, int16_t *restrict lo, const float *restrict w, uint32_t n, bool unusual)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = unusual ? spw__split_bits(w[i]) : spw_f32_bits(w[i]);
        hi[i] = (uint16_t)((u + 0x8000u) >> 16);
        lo[i] = (int16_t)(uint16_t)(u & 0xffffu);
    }
}

static void
store_split(uint16_t *restrict hi, int16_t *restrict lo, const float *restrict w, uint32_t n)
{
    if (top_of(w, n) > SPW__SPLIT_MAX)
        store_split_as(hi, lo, w, n, true);
    else
        store_split_as(hi, lo, w, n, false);
}

/* 24 bits of master: lo counts 256ths of hi's last place. The master is within 2^-16 of it, relative, within 2^-15 where lo would be 128. */
static void
load_split24(float *restrict w, const uint16_t *restrict hi, const int8_t *restrict lo, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        w[i] = spw_bits_f32(((uint32_t)hi[i] << 16) + ((uint32_t)(int32_t)lo[i] << 8));
}

SIMD void
store_split24_as(uint16_t *restrict hi, int8_t *restrict lo, const float *restrict w, uint32_t n, bool unusual)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = unusual ? spw__split_bits(w[i]) : spw_f32_bits(w[i]);
        int16_t low = (int16_t)(uint16_t)(u & 0xffffu), clipped = low < 0x7f7f ? low : 0x7f7f;
        hi[i] = (uint16_t)((u + 0x8000u) >> 16);
        lo[i] = (int8_t)((int16_t)(clipped + 128) >> 8);
    }
}

static void
store_split24(uint16_t *restrict hi, int8_t *restrict lo, const float *restrict w, uint32_t n)
{
    if (top_of(w, n) > SPW__SPLIT_MAX)
        store_split24_as(hi, lo, w, n, true);
    else
        store_split24_as(hi, lo, w, n, false);
}

/* ---------------------------------------------------------------- moments */

static void
load_bf16(float *restrict x, const uint16_t *restrict in, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = spw_bits_f32((uint32_t)in[i] << 16);
}

/*
 * The low 16 bits decide with the probability that they stand for. Elements come in pairs that share two hashes of a
 * counter, one for each moment; the even element takes the lower half.
 */
#define BF16_TOP 0x7f7f0000u /* the largest finite one */
typedef union random_bits {
    uint32_t hash[SPW_OPT_BLOCK / 2 + 1];
    uint16_t half[SPW_OPT_BLOCK + 2];
} random_bits;

/* Infinities and NaN stay as they are, and no finite number becomes one. */
SIMD void
round_by(uint16_t *restrict out, const float *restrict x, const random_bits *random, uint32_t odd, uint32_t n,
         bool unusual)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u = spw_f32_bits(x[i]), rounded = (u + random->half[odd + i]) >> 16;
        out[i] = (uint16_t)(unusual && (u & 0x7fffffffu) >= BF16_TOP ? u >> 16 : rounded);
    }
}

static void
store_bf16_stochastic(uint16_t *restrict out, const float *restrict x, uint32_t n, uint32_t key, uint32_t first)
{
    random_bits random;
    for (uint32_t i = 0; i < n / 2 + 1; i++)
        random.hash[i] = spw__rounding_hash((first / 2 + i) * 2 * SPW__HASH_STEP + key);
    if (top_of(x, n) >= BF16_TOP)
        round_by(out, x, &random, first % 2, n, true);
    else
        round_by(out, x, &random, first % 2, n, false);
}

/*
 * 8 bits in groups of 64 with a bf16 scale s, companded as telephony's mu-law is (G.711): the code of x is the distance
 * from 1 to f = 1 + |x|/s in floats with 4 bits of mantissa, so it is linear near zero and logarithmic above. Signed, 7
 * bits: f reaches 248 at the group's largest magnitude, top. Unsigned: f reaches 63488. With f of at most 4 bits of
 * mantissa the error of f is at most 1/32: that of x is below |x|/32 + top/7904, unsigned x/32 + top/2031584. The unsigned
 * code is at least 1, so that no second moment becomes 0 and blows up its step. Decoding is exact.
 *
 * What was decoded encodes to the same numbers when the scale is rounded to nearest too: a checkpoint changes nothing. In a
 * step the scale is rounded stochastically: to nearest, a group whose moments shrink by less than half of bf16's spacing
 * per step, as they do with beta2 0.999, would stand still. A group that holds an infinity or NaN reads as NaN; one below
 * 2^-90 as 0; within 3 % of the largest float, numbers are clipped.
 */

GROUP_LOOP void
encode_signed(int8_t *restrict code, const float *restrict x, uint32_t n, float k)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t sign = spw_f32_bits(x[i]) & 0x80000000u,
                 f = spw_f32_bits(fmaf(x[i], k, spw_bits_f32(SPW__CODE_ZERO | sign)));
        uint32_t c = ((f & 0x7fffffffu) - SPW__CODE_ZERO + (1u << (SPW__CODE_SHIFT - 1))) >> SPW__CODE_SHIFT;
        uint32_t clipped = c < 127 ? c : 127;
        code[i] = (int8_t)(uint8_t)(clipped | sign >> 24);
    }
}

GROUP_LOOP void
decode_signed(float *restrict x, const int8_t *restrict code, uint32_t n, float s)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = (uint8_t)code[i], sign = (c & 0x80u) << 24, f = SPW__CODE_ZERO + ((c & 0x7fu) << SPW__CODE_SHIFT);
        x[i] = fmaf(spw_bits_f32(f | sign), s, spw_bits_f32(spw_f32_bits(s) | (~sign & 0x80000000u)));
    }
}

GROUP_LOOP void
encode_unsigned(uint8_t *restrict code, const float *restrict x, uint32_t n, float k)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t f = spw_f32_bits(fmaf(spw_bits_f32(spw_f32_bits(x[i]) & 0x7fffffffu), k, 1.0f));
        uint32_t c = (f - SPW__CODE_ZERO + (1u << (SPW__CODE_SHIFT - 1))) >> SPW__CODE_SHIFT,
                 clipped = c < 255 ? c : 255;
        code[i] = (uint8_t)(clipped > 1 ? clipped : 1);
    }
}

GROUP_LOOP void
decode_unsigned(float *restrict x, const uint8_t *restrict code, uint32_t n, float s)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = fmaf(spw_bits_f32(SPW__CODE_ZERO + ((uint32_t)code[i] << SPW__CODE_SHIFT)), s, -s);
}

/* The scale of a group as bf16, rounded by adding `rounding` below it; 0 where its codes are 0 whatever it holds. */
static float
group_scale(const float *restrict x, float up, uint32_t most, uint32_t rounding, uint16_t *scale)
{
    uint32_t top = top_of(x, SPW__GROUP), rounded = (spw_f32_bits(spw_bits_f32(top) * up) + rounding) >> 16;
    if (top < SPW__F32_INF && rounded > most)
        rounded = most;
    if (top < SPW__SCALE_LEAST)
        rounded = 0;
    if (top >= SPW__F32_INF)
        rounded = 0x7fc0u;
    *scale = (uint16_t)rounded;
    return top >= SPW__F32_INF ? 0.0f : spw_bits_f32(rounded << 16);
}

/* Signed and unsigned moments of a group share a hash. */
static uint32_t
group_rounding(const spw__scale_rounding *by, uint32_t group)
{
    return by == NULL ? SPW__SCALE_NEAREST << 16 | SPW__SCALE_NEAREST
                      : spw__rounding_hash((by->group + group) * SPW__HASH_STEP + by->key);
}

static void
store_int8(int8_t *restrict code, uint16_t *restrict scale, const float *restrict x, uint32_t n,
           const spw__scale_rounding *by)
{
    for (uint32_t at = 0; at < n; at += SPW__GROUP) {
        uint32_t g = at / SPW__GROUP, rounding = group_rounding(by, g) & 0xffffu;
        float s = group_scale(x + at, SPW__SIGNED_UP, SPW__SIGNED_MOST, rounding, &scale[g]);
        if (s > 0.0f)
            encode_signed(code + at, x + at, SPW__GROUP, 1.0f / s);
        else
            memset(code + at, 0, SPW__GROUP);
    }
}

static void
load_int8(float *restrict x, const int8_t *restrict code, const uint16_t *restrict scale, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += SPW__GROUP)
        decode_signed(x + at, code + at, SPW__GROUP, spw_bits_f32((uint32_t)scale[at / SPW__GROUP] << 16));
    if (top_of(x, n) > SPW__F32_INF)
        for (uint32_t i = 0; i < n; i++)
            x[i] = canonical(x[i]);
}

static void
store_uint8(uint8_t *restrict code, uint16_t *restrict scale, const float *restrict x, uint32_t n,
            const spw__scale_rounding *by)
{
    for (uint32_t at = 0; at < n; at += SPW__GROUP) {
        uint32_t g = at / SPW__GROUP, rounding = group_rounding(by, g) >> 16;
        float s = group_scale(x + at, SPW__UNSIGNED_UP, SPW__UNSIGNED_MOST, rounding, &scale[g]);
        if (s > 0.0f)
            encode_unsigned(code + at, x + at, SPW__GROUP, 1.0f / s);
        else
            memset(code + at, 0, SPW__GROUP);
    }
}

static void
load_uint8(float *restrict x, const uint8_t *restrict code, const uint16_t *restrict scale, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += SPW__GROUP)
        decode_unsigned(x + at, code + at, SPW__GROUP, spw_bits_f32((uint32_t)scale[at / SPW__GROUP] << 16));
    if (top_of(x, n) > SPW__F32_INF)
        for (uint32_t i = 0; i < n; i++)
            x[i] = canonical(x[i]);
}

const spw__opt_table OPT_TABLE = {
    .rules = {[SPW_OPT_ADAM] = rule_adam,
              [SPW_OPT_ADAGRAD] = rule_adagrad,
              [SPW_OPT_LION] = rule_lion,
              [SPW_OPT_SGD] = rule_sgd,
              [SPW_OPT_MUON] = rule_muon},
    .momentum = momentum,
    .adam_logged = adam_logged,
    .adam_back = adam_back,
    .copy_past = copy_past,
    .load_grad = load_grad,
    .store_bf16 = store_bf16,
    .store_f16 = store_f16,
    .load_split = load_split,
    .store_split = store_split,
    .load_split24 = load_split24,
    .store_split24 = store_split24,
    .load_bf16 = load_bf16,
    .store_bf16_stochastic = store_bf16_stochastic,
    .load_int8 = load_int8,
    .store_int8 = store_int8,
    .load_uint8 = load_uint8,
    .store_uint8 = store_uint8,
};
