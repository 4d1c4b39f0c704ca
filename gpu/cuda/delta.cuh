/*
 * The gated delta rule, row after row. Columns of the state are independent of each other, and so are its rows once delta is there: a block
 * has some lines of one head of one sequence, and a few threads share a line in registers. What lines have in common, a row's vectors of the
 * head, is brought to shared memory for some rows at a time, normalized, while the rows before are walked over: a step waits for two
 * shuffles, not for memory. Sums have one order each, and nothing depends on where a walk began.
 *
 * A line of up to DIM elements has zeros behind the head's, as its vectors have: they stay zero.
 *
 * RULE: the gated delta rule, or Mamba-2's recurrence, the same walks without what the state gives for a row's keys; or the first with a decay for
 * each channel of the keys, which comes to shared memory with them, and takes half of what rows are staged at a time.
 */
#ifndef SPW_CUDA_DELTA_CUH
#define SPW_CUDA_DELTA_CUH

#include "common.cuh"

enum delta_rules { DELTA, MAMBA, CHANNELS };

/* COLUMNS_STAGED, ROWS_STAGED: elements of a vector times rows that are staged at a time, where lines are columns and where they are rows. */
enum { DELTA_THREADS = 128, COLUMNS_STAGED = 2048, ROWS_STAGED = 1024 };

template <class E> struct delta_args {
    const E *qkv, *a, *b, *log_a, *dt_bias, *skip, *dout;
    E *out, *dqkv, *da, *db;
    float *delta;  /* (M, Hv Dv) forward: NULL, not wanted */
    float *ddelta; /* (M, Hv Dv) its gradient */
    float *dq, *written,
        *read; /* (M, Hv, Dk) gradients of queries, and of keys by what wrote the state and what read it */
    /* (B, Hv, T) what a row has of gamma's gradient, by how much it lengthens the state, and by how much the state's gradient */
    float *share, *written_length, *asked;
    float *dbeta, *dskip;          /* of Mamba-2 what a row has of these, in such order too */
    float *factors;                /* (M, 2 Hk) that make queries and keys of length one, and queries smaller */
    float2 *gates;                 /* (M, Hv) gamma and beta; with channels 1 and beta */
    float *decays;                 /* (M, Hv, Dk) of channels */
    float *state;                  /* (slots, Hv, Dk, Dv) NULL: no cache */
    const int32_t *slots, *starts; /* (B) */
    const int32_t *begins;
    uint64_t T, M, stride; /* of a row of qkv */
    unsigned Hk, Hv, Dk, Dv, group;
    unsigned head, heads;        /* of values, that backward takes now: its scratch has these for Hv; forward 0, Hv */
    float shrink;                /* 1 / sqrt(Dk) */
    float step_least, beta_most; /* of spw_delta_shape; the latter is never 0 */
    bool wide;
};

/* How a line lies in LANES threads of a warp, in groups of four elements that take turns: neighbors in a warp have other lines. */
template <int DIM> struct line_of {
    enum { LANES = DIM > 128 ? 8 : 4, QUADS = DIM / (4 * LANES), ELEMS = 4 * QUADS, APART = 32 / LANES };
    enum { LINES = DELTA_THREADS / LANES, EIGHTS = DIM / 8 };
};

/* A thread's line among those of its block, and its part of it. */
template <int DIM>
SPW_DEVICE unsigned
my_line(unsigned *part)
{
    const unsigned lane = threadIdx.x % 32;
    *part = lane / line_of<DIM>::APART;
    return threadIdx.x / 32 * line_of<DIM>::APART + lane % line_of<DIM>::APART;
}

/* The thread's part of a vector in shared memory. */
template <int DIM>
SPW_DEVICE void
load_part(float *v, const float *vector, unsigned part)
{
#pragma unroll
    for (unsigned i = 0; i < line_of<DIM>::QUADS; i++) {
        const float4 four = *(const float4 *)(vector + 4 * (part + line_of<DIM>::LANES * i));
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
}

template <int DIM>
SPW_DEVICE float
part_product(const float *x, const float *y)
{
    float sum[4] = {0};
#pragma unroll
    for (int i = 0; i < line_of<DIM>::ELEMS; i++)
        sum[i % 4] = __fmaf_rn(x[i], y[i], sum[i % 4]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Over `lanes` lanes of a warp, those that differ in bits from `apart` on; the same in each of them. */
SPW_DEVICE float
lanes_sum(float v, int apart, int lanes)
{
    for (int d = apart; d < apart * lanes; d *= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

template <int DIM>
SPW_DEVICE float
line_sum(float v)
{
#pragma unroll
    for (int d = line_of<DIM>::APART; d < 32; d *= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

/* What makes a vector have length one, of the sum of its squares. */
SPW_DEVICE float
to_length_one(float squares)
{
#ifdef SPW_EMULATED
    return 1.0f / sqrtf(squares + 1e-6f);
#else
    return rsqrtf(squares + 1e-6f);
#endif
}

SPW_DEVICE float
sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* log(gamma) of a row is -exp(log_a) times this, with x = a + dt_bias: log(1 + e^x), but of Mamba-2 at least `least`. A NaN stays one. */
template <int RULE>
SPW_DEVICE float
step_of(float x, float least)
{
    const float step = x > 20.0f ? x : log1pf(expf(x));
    return RULE == MAMBA && step < least ? least : step;
}

/* A row's gamma, 0 where nothing is carried into it, and beta. */
template <int RULE, class E>
SPW_DEVICE float2
gates_of(const delta_args<E> &g, float a, float b, float log_a, float dt_bias, bool anew)
{
    if (RULE == CHANNELS)
        return float2{1.0f, g.beta_most * sigmoid(b)};
    const float x = step_of<RULE>(a + dt_bias, g.step_least);
    return float2{anew ? 0.0f : expf(-expf(log_a) * x), RULE == MAMBA ? x : g.beta_most * sigmoid(b)};
}

/* Eight decays of channels that begin at one of a's, with dt_bias. */
template <class E>
SPW_DEVICE void
decays_of(float *v, const eight<E> &a, const eight<E> &dt_bias, float rate, bool anew)
{
    float b[8];
    widen8(v, a);
    widen8(b, dt_bias);
#pragma unroll
    for (int j = 0; j < 8; j++)
        v[j] = anew ? 0.0f : expf(rate * step_of<CHANNELS>(v[j] + b[j], 0.0f));
}

/* Where a row's a of channels is. */
template <class E>
SPW_DEVICE uint64_t
channels_at(const delta_args<E> &g, uint64_t row, unsigned h)
{
    return (row * g.Hv + h) * g.Dk;
}

/* Where in a row of qkv a key head's queries are, or (which 1) its keys; and where the values are. */
template <int RULE, class E>
SPW_DEVICE uint64_t
vector_at(const delta_args<E> &g, unsigned which, unsigned head)
{
    return RULE == MAMBA ? (uint64_t)g.Hv * g.Dv + ((1 - which) * g.Hk + head) * (uint64_t)g.Dk
                         : (which * g.Hk + head) * (uint64_t)g.Dk;
}

template <int RULE, class E>
SPW_DEVICE uint64_t
values_at(const delta_args<E> &g)
{
    return RULE == MAMBA ? 0 : 2 * (uint64_t)g.Hk * g.Dk;
}

template <class E>
SPW_DEVICE bool
begins_at(const delta_args<E> &g, uint64_t row, uint64_t t)
{
    return g.begins != NULL && (uint64_t)g.begins[row] == t;
}

/* ---------------------------------------------------------------- walks of columns */

template <int DIM, int RULE> struct staged_decays {
    enum { STAGED = COLUMNS_STAGED, ROWS = STAGED / DIM };
};

template <int DIM> struct __align__(16) staged_decays<DIM, CHANNELS>
{
    enum { STAGED = COLUMNS_STAGED / 2, ROWS = STAGED / DIM };
    float decays[ROWS][DIM];
};

/* Rows of a head in shared memory; values are the block's columns of v or of out's gradient. */
template <int DIM, int RULE> struct __align__(16) staged_columns : staged_decays<DIM, RULE>
{
    enum { ROWS = staged_decays<DIM, RULE>::ROWS };
    float queries[ROWS][DIM], keys[ROWS][DIM], values[ROWS][line_of<DIM>::LINES];
    float2 gates[ROWS];
};

template <class E, int RULE> struct coming_decays {
};
template <class E> struct coming_decays<E, CHANNELS> {
    eight<E> steps, bias;
    bool none; /* nothing is carried into that row */
};

/* What a thread brings there, on its way. */
template <class E, int DIM, int RULE> struct coming_columns : coming_decays<E, RULE> {
    enum { EACH = 2 * staged_decays<DIM, RULE>::STAGED / 8 / DELTA_THREADS };
    eight<E> vectors[EACH], values;
    float a, b;
    bool anew;
};

/* Values of the block's head and columns: row t of sequence b at values + (b T + t) stride; left: columns from the first on. */
template <class E> struct columns_of {
    const E *values;
    uint64_t stride, b, left;
    unsigned h;
};

template <class E>
SPW_DEVICE columns_of<E>
my_columns(const delta_args<E> &g, const E *values, uint64_t stride, unsigned lines)
{
    const unsigned first = blockIdx.x * lines;
    columns_of<E> c;
    c.h = g.head + blockIdx.y;
    c.b = blockIdx.z;
    c.values = values + (uint64_t)c.h * g.Dv + first;
    c.stride = stride;
    c.left = g.Dv - first;
    return c;
}

SPW_DEVICE uint64_t
left_from(uint64_t left, uint64_t at)
{
    return left > at ? left - at : 0;
}

/* Decays of rows from t0 on: each thread has eight of one. */
template <class E, int DIM>
SPW_DEVICE void
load_decays(coming_decays<E, CHANNELS> *coming, const delta_args<E> &g, const columns_of<E> &c, uint64_t t0)
{
    static_assert(staged_decays<DIM, CHANNELS>::STAGED == 8 * DELTA_THREADS, "eight decays for a thread");
    const unsigned at = threadIdx.x % line_of<DIM>::EIGHTS * 8;
    const uint64_t t = t0 + threadIdx.x / line_of<DIM>::EIGHTS, row = c.b * g.T + t;
    const uint64_t left = t < g.T ? left_from(g.Dk, at) : 0;
    load_eight(&coming->steps, g.a + channels_at(g, row, c.h) + at, left, g.wide);
    load_eight(&coming->bias, g.dt_bias + (uint64_t)c.h * g.Dk + at, left, g.wide);
    coming->none = t < g.T && begins_at(g, row, t);
}

/* Rows from t0 on. */
template <int RULE, class E, int DIM>
SPW_DEVICE void
load_columns(coming_columns<E, DIM, RULE> *coming, const delta_args<E> &g, const columns_of<E> &c, uint64_t t0)
{
    typedef staged_columns<DIM, RULE> staged;
    const unsigned eights = line_of<DIM>::EIGHTS, wide_row = line_of<DIM>::LINES / 8;
#pragma unroll
    for (unsigned i = 0; i < (coming_columns<E, DIM, RULE>::EACH); i++) {
        const unsigned u = threadIdx.x + i * DELTA_THREADS, at = u % eights * 8, vector = u / eights;
        const uint64_t t = t0 + vector / 2, head = vector_at<RULE>(g, vector % 2, c.h / g.group);
        load_eight(&coming->vectors[i], g.qkv + (c.b * g.T + t) * g.stride + head + at,
                   t < g.T ? left_from(g.Dk, at) : 0, g.wide);
    }
    {
        const unsigned at = threadIdx.x % wide_row * 8, r = threadIdx.x / wide_row;
        load_eight(&coming->values, c.values + (c.b * g.T + t0 + r) * c.stride + at,
                   r < staged::ROWS && t0 + r < g.T ? left_from(c.left, at) : 0, g.wide);
    }
    const unsigned r = DELTA_THREADS - 1 - threadIdx.x; /* the last warp, which may have no values */
    if (r < staged::ROWS && t0 + r < g.T) {
        const uint64_t row = c.b * g.T + t0 + r;
        if (RULE != CHANNELS)
            coming->a = widen(g.a[row * g.Hv + c.h]);
        if (RULE != MAMBA)
            coming->b = widen(g.b[row * g.Hv + c.h]);
        coming->anew = begins_at(g, row, t0 + r);
    }
    if constexpr (RULE == CHANNELS)
        load_decays<E, DIM>(coming, g, c, t0);
}

template <int RULE, class E, int DIM>
SPW_DEVICE void
stage_columns(staged_columns<DIM, RULE> *to, const coming_columns<E, DIM, RULE> &coming, const delta_args<E> &g,
              float log_a, float dt_bias)
{
    const unsigned eights = line_of<DIM>::EIGHTS, wide_row = line_of<DIM>::LINES / 8;
    const unsigned last = DELTA_THREADS - 1 - threadIdx.x;
    float v[8];
#pragma unroll
    for (unsigned i = 0; i < (coming_columns<E, DIM, RULE>::EACH); i++) {
        const unsigned u = threadIdx.x + i * DELTA_THREADS, at = u % eights * 8, vector = u / eights;
        widen8(v, coming.vectors[i]);
        if (RULE != MAMBA) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum = __fmaf_rn(v[j], v[j], sum);
            sum = to_length_one(lanes_sum(sum, 1, (int)eights)) * (vector % 2 == 0 ? g.shrink : 1.0f);
#pragma unroll
            for (int j = 0; j < 8; j++)
                v[j] *= sum;
        }
        store8((vector % 2 == 0 ? to->queries : to->keys)[vector / 2] + at, v, 8, true);
    }
    if (threadIdx.x / wide_row < (staged_columns<DIM, RULE>::ROWS)) {
        widen8(v, coming.values);
        store8(to->values[threadIdx.x / wide_row] + threadIdx.x % wide_row * 8, v, 8, true);
    }
    if (last < (staged_columns<DIM, RULE>::ROWS))
        to->gates[last] = gates_of<RULE>(g, coming.a, coming.b, log_a, dt_bias, coming.anew);
    if constexpr (RULE == CHANNELS) {
        decays_of(v, coming.steps, coming.bias, -expf(log_a), coming.none);
        store8(to->decays[threadIdx.x / eights] + threadIdx.x % eights * 8, v, 8, true);
    }
}

/* A column of the state that a slot of the cache has. */
template <class E>
SPW_DEVICE float *
state_of(const delta_args<E> &g, const columns_of<E> &c, unsigned column)
{
    return g.state + ((uint64_t)g.slots[c.b] * g.Hv + c.h) * g.Dk * g.Dv + column;
}

/* The thread's part of a column; of rows behind the last nothing. */
template <int DIM>
SPW_DEVICE void
load_state(float *s, const float *state, unsigned part, unsigned Dk, unsigned Dv)
{
#pragma unroll
    for (unsigned i = 0; i < line_of<DIM>::ELEMS; i++) {
        const unsigned row = 4 * (part + line_of<DIM>::LANES * (i / 4)) + i % 4;
        s[i] = row < Dk ? state[row * Dv] : 0.0f;
    }
}

template <int DIM>
SPW_DEVICE void
store_state(float *state, const float *s, unsigned part, unsigned Dk, unsigned Dv)
{
#pragma unroll
    for (unsigned i = 0; i < line_of<DIM>::ELEMS; i++) {
        const unsigned row = 4 * (part + line_of<DIM>::LANES * (i / 4)) + i % 4;
        if (row < Dk)
            state[row * Dv] = s[i];
    }
}

/* Each element by what is in its place of a vector in shared memory. */
template <int DIM>
SPW_DEVICE void
decay_each(float *s, const float *decays, unsigned part)
{
    float by[line_of<DIM>::ELEMS];
    load_part<DIM>(by, decays, part);
#pragma unroll
    for (int i = 0; i < line_of<DIM>::ELEMS; i++)
        s[i] *= by[i];
}

/*
 * Blocks: columns, heads, sequences. A row's product of queries and state is summed up over the lanes together with the next row's product
 * of keys: neither waits for the other.
 */
template <class E, int DIM, int RULE>
__global__ void
__launch_bounds__(DELTA_THREADS, 2) delta_kernel(delta_args<E> g)
{
    typedef line_of<DIM> line;
    enum { ROWS = staged_columns<DIM, RULE>::ROWS };
    __shared__ staged_columns<DIM, RULE> staged[2];
    unsigned part;
    const unsigned mine = my_line<DIM>(&part), column = blockIdx.x * line::LINES + mine;
    const columns_of<E> c = my_columns(g, g.qkv + values_at<RULE>(g), g.stride, line::LINES);
    const float log_a = widen(g.log_a[c.h]), dt_bias = widen(g.dt_bias[c.h]);
    const float skip = RULE == MAMBA && part == 0 ? widen(g.skip[c.h]) : 0.0f;
    const uint64_t width = (uint64_t)g.Hv * g.Dv;
    const bool here = column < g.Dv;
    uint64_t at = c.b * g.T * width + (uint64_t)c.h * g.Dv + column;
    coming_columns<E, DIM, RULE> coming = {};
    float s[line::ELEMS] = {0}, k[line::ELEMS], q[line::ELEMS], late = 0.0f;
    if (g.state != NULL && here && g.starts[c.b] > 0)
        load_state<DIM>(s, state_of(g, c, column), part, g.Dk, g.Dv);
    load_columns<RULE>(&coming, g, c, 0);
    stage_columns<RULE>(&staged[0], coming, g, log_a, dt_bias);
    __syncthreads();
    for (uint64_t t0 = 0, turn = 0; t0 < g.T; t0 += ROWS, turn ^= 1) {
        const staged_columns<DIM, RULE> &now = staged[turn];
        const int rows = (int)least((uint64_t)ROWS, g.T - t0);
        if (t0 + ROWS < g.T)
            load_columns<RULE>(&coming, g, c, t0 + ROWS);
        load_part<DIM>(k, now.keys[0], part);
        for (int r = 0; r < rows; r++) {
            const float2 gates = now.gates[r]; /* gamma, beta */
            const float v = now.values[r][mine];
            if constexpr (RULE == CHANNELS)
                decay_each<DIM>(s, now.decays[r], part);
            float m = RULE == MAMBA ? 0.0f : part_product<DIM>(k, s), delta;
            load_part<DIM>(q, now.queries[r], part);
#pragma unroll
            for (int d = line::APART; d < 32; d *= 2) {
                if (RULE != MAMBA)
                    m += __shfl_xor_sync(0xffffffffu, m, d);
                late += __shfl_xor_sync(0xffffffffu, late, d);
            }
            delta = gates.y * (RULE == MAMBA ? v : __fmaf_rn(-gates.x, m, v));
#pragma unroll
            for (int i = 0; i < line::ELEMS; i++)
                s[i] = __fmaf_rn(k[i], delta, gates.x * s[i]);
            load_part<DIM>(k, now.keys[r + 1 < rows ? r + 1 : r], part);
            if (part == 0 && here && t0 + (unsigned)r > 0)
                narrow(g.out + at - width, late);
            if (part == 1 && here && g.delta != NULL)
                g.delta[at] = delta;
            at += width;
            late = part_product<DIM>(q, s);
            if (RULE == MAMBA)
                late = __fmaf_rn(skip, v, late);
        }
        if (t0 + ROWS < g.T)
            stage_columns<RULE>(&staged[turn ^ 1], coming, g, log_a, dt_bias);
        __syncthreads();
    }
    late = line_sum<DIM>(late);
    if (part == 0 && here)
        narrow(g.out + at - width, late);
    if (g.state != NULL && here)
        store_state<DIM>(state_of(g, c, column), s, part, g.Dk, g.Dv);
}

#endif
