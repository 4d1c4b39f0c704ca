/*
 * Optimizers on state in device memory, with the bits of cpu_adam: adam_ref.c and opt_block.h say what is computed and why,
 * and this repeats it with every rounding spelled out (_rn), so that nothing is contracted. A warp takes groups of 64 elements,
 * a lane two of each: what 8-bit groups share is a maximum over the warp. The bound is device memory.
 */
#ifndef SPW_CUDA_OPTIMIZER_CUH
#define SPW_CUDA_OPTIMIZER_CUH

#include "common.cuh"

enum { UPDATE_THREADS = 256, UPDATE_EACH = 4, UPDATE_RANGES = 8, UPDATE_GROUP = 64, UPDATE_PAIR = 2 };
enum { UPDATE_ADAM, UPDATE_ADAGRAD, UPDATE_LION, UPDATE_SGD, UPDATE_MUON };
enum { MOMENTUM_ELEMS = 4096, MOMENTUM_LANES = 16 };
enum { UPDATE_GRAD_F32, UPDATE_GRAD_BF16, UPDATE_GRAD_F16 };
enum { UPDATE_MOMENT_F32, UPDATE_MOMENT_BF16, UPDATE_MOMENT_INT8 };

struct update_range {
    uint64_t end;
    float grad_scale, c[8];
};

/* A launch: elements [begin, end) of a chunk, whole groups, in at most UPDATE_RANGES ranges. */
struct update_args {
    uint64_t begin, end, first;
    void *weights, *low;
    const void *grad;
    void *moment[2];               /* NULL: the rule has one, or none */
    uint16_t *scale[2];            /* of groups; 8 bits only */
    unsigned long long *nonfinite; /* may be host memory: added to by the device alone, and rarely */
    uint32_t key;
    int rule, grad_type;
    bool nearest, is_unsigned[2];
    update_range ranges[UPDATE_RANGES];
};

/* ---------------------------------------------------------------- the rules: opt_block.h */

SPW_DEVICE float
canonical(float x)
{
    return x != x ? __uint_as_float(0x7fc00000u) : x;
}

SPW_DEVICE void
update_element(int rule, const float *c, float g, float *w, float *m, float *v)
{
    if (rule == UPDATE_ADAM) {
        float d;
        g = c[4] != 0.0f ? __fmaf_rn(c[4], *w, g) : g;
        *m = canonical(__fmaf_rn(c[0], __fsub_rn(g, *m), *m));
        *v = canonical(__fmaf_rn(c[1], *v, __fmul_rn(__fmul_rn(c[2], g), g)));
        d = __fmaf_rn(__fsqrt_rn(*v), c[7], c[3]);
        *w = canonical(__fmaf_rn(-c[6], __fdiv_rn(*m, d), __fmul_rn(*w, c[5])));
    } else if (rule == UPDATE_ADAGRAD) {
        g = c[2] != 0.0f ? __fmaf_rn(c[2], *w, g) : g;
        *m = canonical(__fmaf_rn(g, g, *m));
        *w = canonical(__fmaf_rn(-c[0], __fdiv_rn(g, __fadd_rn(__fsqrt_rn(*m), c[1])), *w));
    } else if (rule == UPDATE_LION) {
        float u = __fmaf_rn(c[0], *m, __fmul_rn(c[1], g));
        float sign = u > 0.0f ? c[5] : u < 0.0f ? -c[5] : __fmul_rn(u, 0.0f); /* NaN stays NaN */
        *w = canonical(__fsub_rn(__fmul_rn(*w, c[4]), sign));
        *m = canonical(__fmaf_rn(c[2], *m, __fmul_rn(c[3], g)));
    } else if (rule == UPDATE_MUON) {
        *w = canonical(__fmaf_rn(-c[0], g, __fmul_rn(*w, c[1])));
    } else {
        float d;
        g = c[3] != 0.0f ? __fmaf_rn(c[3], *w, g) : g;
        *m = canonical(__fmaf_rn(c[1], *m, __fmul_rn(c[2], g)));
        d = c[4] != 0.0f ? __fmaf_rn(c[1], *m, g) : *m;
        *w = canonical(__fmaf_rn(-c[0], d, *w));
    }
}

/* ---------------------------------------------------------------- masters: cpu_adam_internal.h */

SPW_DEVICE uint32_t
split_bits(float w)
{
    uint32_t u = __float_as_uint(w), magnitude = u & 0x7fffffffu;
    uint32_t finite = magnitude > 0x7f7f7fffu && magnitude < 0x7f800000u ? (u & 0x80000000u) | 0x7f7f7fffu : u;
    return magnitude > 0x7f800000u ? 0x7fc00000u : finite;
}

/* From its parts: high is the weight (LOW 4: unused), low what the record adds. */
template <int LOW>
SPW_DEVICE float
master_of(uint32_t high, uint32_t low)
{
    return __uint_as_float(LOW == 0   ? high
                           : LOW == 4 ? low
                           : LOW == 2 ? (high << 16) + low
                                      : (high << 16) + (low << 8));
}

SPW_DEVICE void
store_weight(float *weights, uint64_t i, float w)
{
    weights[i] = w;
}

SPW_DEVICE void
store_weight(bf16 *weights, uint64_t i, float w)
{
    uint32_t u = __float_as_uint(w);
    weights[i].bits = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : (u + 0x8000u) >> 16);
}

SPW_DEVICE void
store_weight(f16 *weights, uint64_t i, float w)
{
    narrow(weights + i, w);
}

template <class W, int LOW>
SPW_DEVICE void
store_master(void *weights, void *low, uint64_t i, float w)
{
    if (LOW == 4)
        ((float *)low)[i] = w;
    if (LOW == 4 || LOW == 0) {
        store_weight((W *)weights, i, w);
        return;
    }
    uint32_t u = split_bits(w);
    int32_t below = (int32_t)(int16_t)(uint16_t)(u & 0xffffu), code = (below + 128) >> 8;
    ((uint16_t *)weights)[i] = (uint16_t)((u + 0x8000u) >> 16);
    if (LOW == 2)
        ((int16_t *)low)[i] = (int16_t)below;
    else
        ((int8_t *)low)[i] = (int8_t)(code > 127 ? 127 : code);
}

/* ---------------------------------------------------------------- moments: opt_block.h */

SPW_DEVICE uint32_t
rounding_hash(uint32_t counter)
{
    uint32_t h = (counter ^ counter >> 16) * 0x85ebca6bu;
    return h ^ h >> 15;
}

template <int CODE>
SPW_DEVICE float
moment_of(uint32_t c, uint32_t scale, bool is_unsigned)
{
    if (CODE == UPDATE_MOMENT_F32)
        return __uint_as_float(c);
    if (CODE == UPDATE_MOMENT_BF16)
        return __uint_as_float(c << 16);
    float s = __uint_as_float(scale << 16);
    uint32_t sign = (c & 0x80u) << 24, f = 0x3f800000u + (is_unsigned ? c << 19 : sign + ((c & 0x7fu) << 19));
    uint32_t from = is_unsigned ? 0x80000000u ^ __float_as_uint(s) : __float_as_uint(s) | (~sign & 0x80000000u);
    return canonical(__fmaf_rn(__uint_as_float(f), s, __uint_as_float(from)));
}

SPW_DEVICE void
store_moment_bf16(const update_args &a, int j, uint64_t i, float x)
{
    uint32_t e = (uint32_t)(a.first + i), u = __float_as_uint(x);
    uint32_t h = rounding_hash((e & ~1u) * 0x9e3779b9u + a.key + (uint32_t)j * 0x9e3779b9u);
    bf16 *at = (bf16 *)a.moment[j] + i;
    if (a.nearest)
        store_weight(at, 0, x);
    else /* infinities and NaN stay as they are, and no finite number becomes one */
        at->bits =
            (uint16_t)((u & 0x7fffffffu) >= 0x7f7f0000u ? u >> 16 : (u + (h >> ((e & 1u) << 4) & 0xffffu)) >> 16);
}

SPW_DEVICE uint8_t
encode_moment(float x, float s, bool is_unsigned)
{
    uint32_t u = __float_as_uint(x), sign = is_unsigned ? 0 : u & 0x80000000u, limit = is_unsigned ? 255u : 127u;
    float k = __fdiv_rn(1.0f, s), magnitude = is_unsigned ? __uint_as_float(u & 0x7fffffffu) : x;
    uint32_t f = __float_as_uint(__fmaf_rn(magnitude, k, __uint_as_float(0x3f800000u | sign)));
    uint32_t code = least(((f & 0x7fffffffu) - 0x3f800000u + (1u << 18)) >> 19, limit);
    return (uint8_t)(is_unsigned ? most(code, 1u) : code | sign >> 24);
}

/* All lanes of a warp, which hold one group: a lane elements i and i + 32. */
SPW_DEVICE void
store_moment_int8(const update_args &a, int j, uint64_t i, const float *x)
{
    const bool is_unsigned = a.is_unsigned[j];
    uint32_t top = most(__float_as_uint(x[0]) & 0x7fffffffu, __float_as_uint(x[1]) & 0x7fffffffu);
    uint32_t rounding = 0x8000u, scale, most_scale = is_unsigned ? 0x7780u : 0x7b80u;
    float s;
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        top = most(top, __shfl_xor_sync(0xffffffffu, top, d));
    if (!a.nearest) {
        uint32_t h = rounding_hash((uint32_t)((a.first + i) / UPDATE_GROUP) * 0x9e3779b9u + a.key);
        rounding = is_unsigned ? h >> 16 : h & 0xffffu;
    }
    scale =
        (__float_as_uint(__fmul_rn(__uint_as_float(top), is_unsigned ? 1.0f / 63487.0f : 1.0f / 247.0f)) + rounding) >>
        16;
    if (top < 0x7f800000u && scale > most_scale)
        scale = most_scale;
    if (top < 0x12800000u)
        scale = 0;
    if (top >= 0x7f800000u)
        scale = 0x7fc0u;
    s = top >= 0x7f800000u ? 0.0f : __uint_as_float(scale << 16);
#pragma unroll
    for (int e = 0; e < UPDATE_PAIR; e++)
        ((uint8_t *)a.moment[j])[i + (uint64_t)e * 32] = s > 0.0f ? encode_moment(x[e], s, is_unsigned) : (uint8_t)0;
    __syncwarp(); /* all lanes have read the scale of before */
    if (i % UPDATE_GROUP == 0)
        a.scale[j][i / UPDATE_GROUP] = (uint16_t)scale;
}

/* Of elements i and i + 32. */
template <int CODE>
SPW_DEVICE void
store_moments(const update_args &a, int j, uint64_t i, const float *x)
{
    if (CODE == UPDATE_MOMENT_INT8)
        store_moment_int8(a, j, i, x);
#pragma unroll
    for (int e = 0; e < UPDATE_PAIR && CODE != UPDATE_MOMENT_INT8; e++) {
        if (CODE == UPDATE_MOMENT_F32)
            ((float *)a.moment[j])[i + (uint64_t)e * 32] = x[e];
        else
            store_moment_bf16(a, j, i + (uint64_t)e * 32, x[e]);
    }
}

/* ---------------------------------------------------------------- a chunk */

/* What memory holds of elements i and i + 32, before anything is made of it. */
struct update_raw {
    uint32_t grad[UPDATE_PAIR], high[UPDATE_PAIR], low[UPDATE_PAIR], moment[2][UPDATE_PAIR], scale[2];
};

/* Loads alone: no use, and no branch that would divide them. */
template <int LOW, int CODE>
SPW_DEVICE void
load_raw(update_raw *x, const update_args &a, uint64_t i)
{
#pragma unroll
    for (int e = 0; e < UPDATE_PAIR; e++, i += 32) {
        x->grad[e] = a.grad_type == UPDATE_GRAD_F32 ? __float_as_uint(((const float *)a.grad)[i])
                                                    : ((const bf16 *)a.grad)[i].bits;
        x->high[e] = LOW == 0   ? __float_as_uint(((const float *)a.weights)[i])
                     : LOW == 4 ? 0
                                : ((const uint16_t *)a.weights)[i];
        x->low[e] = LOW == 4   ? __float_as_uint(((const float *)a.low)[i])
                    : LOW == 2 ? (uint32_t)(int32_t)((const int16_t *)a.low)[i]
                    : LOW == 1 ? (uint32_t)(int32_t)((const int8_t *)a.low)[i]
                               : 0;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            bool there = a.moment[j] != NULL;
            if (CODE == UPDATE_MOMENT_F32)
                x->moment[j][e] = there ? __float_as_uint(((const float *)a.moment[j])[i]) : 0;
            else if (CODE == UPDATE_MOMENT_BF16)
                x->moment[j][e] = there ? ((const bf16 *)a.moment[j])[i].bits : 0;
            else
                x->moment[j][e] = there ? ((const uint8_t *)a.moment[j])[i] : 0;
            if (e == 0)
                x->scale[j] = CODE == UPDATE_MOMENT_INT8 && there ? a.scale[j][i / UPDATE_GROUP] : 0;
        }
    }
}

SPW_DEVICE float
gradient_of(uint32_t raw, int type)
{
    f16 half = {(uint16_t)raw};
    return type == UPDATE_GRAD_F16 ? widen(half) : __uint_as_float(type == UPDATE_GRAD_F32 ? raw : raw << 16);
}

template <class W, int LOW, int CODE>
__global__ void
__launch_bounds__(UPDATE_THREADS) update_kernel(const __grid_constant__ update_args a)
{
    update_raw raw[UPDATE_EACH / UPDATE_PAIR];
    /* A warp's first group; its next one lies behind those of the block's other warps. */
    uint64_t at = a.begin + (uint64_t)blockIdx.x * (UPDATE_THREADS * UPDATE_EACH) + threadIdx.x / 32 * UPDATE_GROUP +
                  threadIdx.x % 32;
    bool one = a.moment[0] != NULL, two = a.moment[1] != NULL;
    if (at >= a.end)
        return; /* the whole warp */
#pragma unroll
    for (int k = 0; k < UPDATE_EACH / UPDATE_PAIR; k++) { /* all loads before the first use */
        uint64_t first = at + (uint64_t)k * (UPDATE_PAIR * UPDATE_THREADS);
        load_raw<LOW, CODE>(&raw[k], a, first < a.end ? first : at); /* behind the end: what is there, and not used */
    }
#pragma unroll
    for (int k = 0; k < UPDATE_EACH / UPDATE_PAIR; k++) {
        uint64_t first = at + (uint64_t)k * (UPDATE_PAIR * UPDATE_THREADS);
        float m[UPDATE_PAIR], v[UPDATE_PAIR];
        if (first >= a.end)
            break;
#pragma unroll
        for (int e = 0; e < UPDATE_PAIR; e++) {
            uint64_t i = first + (uint64_t)e * 32;
            float g, w;
            int r = 0;
            unsigned bad;
            while (a.ranges[r].end <= i)
                r++;
            g = __fmul_rn(gradient_of(raw[k].grad[e], a.grad_type), a.ranges[r].grad_scale);
            bad = __ballot_sync(0xffffffffu, (__float_as_uint(g) & 0x7fffffffu) >= 0x7f800000u);
            if (bad != 0 && threadIdx.x % 32 == 0)
                atomicAdd(a.nonfinite, (unsigned long long)__popc(bad));
            w = master_of<LOW>(raw[k].high[e], raw[k].low[e]);
            m[e] = one ? moment_of<CODE>(raw[k].moment[0][e], raw[k].scale[0], a.is_unsigned[0]) : 0.0f;
            v[e] = two ? moment_of<CODE>(raw[k].moment[1][e], raw[k].scale[1], a.is_unsigned[1]) : 0.0f;
            update_element(a.rule, a.ranges[r].c, g, &w, &m[e], &v[e]);
            store_master<W, LOW>(a.weights, a.low, i, w);
        }
        if (one)
            store_moments<CODE>(a, 0, first, m);
        if (two)
            store_moments<CODE>(a, 1, first, v);
    }
}

/* ---------------------------------------------------------------- Muon's first half */

/* A launch: elements of a chunk from its begin on, 4096 for each block of threads. */
struct momentum_args {
    update_args chunk; /* neither weights nor its gradient, which is not only read */
    void *grad;
    double *sums; /* of squares, one per 4096 elements from begin on */
};

template <int CODE>
SPW_DEVICE float
load_moment(const update_args &a, uint64_t i)
{
    if (CODE == UPDATE_MOMENT_F32)
        return ((const float *)a.moment[0])[i];
    if (CODE == UPDATE_MOMENT_BF16)
        return moment_of<CODE>(((const bf16 *)a.moment[0])[i].bits, 0, false);
    return moment_of<CODE>(((const uint8_t *)a.moment[0])[i], a.scale[0][i / UPDATE_GROUP], false);
}

/* A block of threads for 4096 elements, a warp for groups of 64 in turn. The sum has the order of spw_sumsq(). */
template <class G, int CODE>
__global__ void
__launch_bounds__(UPDATE_THREADS) momentum_kernel(const __grid_constant__ momentum_args a)
{
    __shared__ float made[MOMENTUM_ELEMS];
    __shared__ double lanes[MOMENTUM_LANES];
    const uint64_t first = a.chunk.begin + (uint64_t)blockIdx.x * MOMENTUM_ELEMS;
    unsigned long long bad = 0;
    int r = 0;
    for (int i = (int)(threadIdx.x / 32 * UPDATE_GROUP + threadIdx.x % 32); i < MOMENTUM_ELEMS;
         i += UPDATE_THREADS * UPDATE_PAIR) {
        float x[UPDATE_PAIR];
#pragma unroll
        for (int e = 0; e < UPDATE_PAIR; e++) {
            const uint64_t at = first + (uint64_t)(i + e * 32);
            while (a.chunk.ranges[r].end <= at)
                r++;
            const float *c = a.chunk.ranges[r].c, scale = a.chunk.ranges[r].grad_scale;
            const float m = load_moment<CODE>(a.chunk, at);
            float g = __fmul_rn(widen(((G *)a.grad)[at]), scale);
            bad += (__float_as_uint(g) & 0x7fffffffu) >= 0x7f800000u;
            x[e] = canonical(__fmaf_rn(c[2], __fsub_rn(g, m), m));
            g = canonical(c[4] != 0.0f ? __fmaf_rn(c[3], __fsub_rn(x[e], g), g) : x[e]);
            g = is_f16<G> ? __fmul_rn(g, __fdiv_rn(1.0f, scale)) : g;
            store_weight((G *)a.grad, at, g); /* rounded as cpu_adam does: what lies in the middle upwards */
            made[i + e * 32] = g;
        }
        store_moments<CODE>(a.chunk, 0, first + (uint64_t)i, x);
    }
    if (bad > 0)
        atomicAdd(a.chunk.nonfinite, bad);
    __syncthreads();
    if (threadIdx.x < MOMENTUM_LANES) {
        double sum = 0;
        for (int i = (int)threadIdx.x; i < MOMENTUM_ELEMS; i += MOMENTUM_LANES)
            sum += (double)made[i] * (double)made[i];
        lanes[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int j = 0; j < MOMENTUM_LANES; j++)
            sum += lanes[j];
        a.sums[blockIdx.x] = sum;
    }
}

#endif
