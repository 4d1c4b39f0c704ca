/*
 * The gated delta rule, backward, without one state kept: first the state's gradient by columns, backward in time, which needs none; then states and
 * their gradients again, by rows, from delta and its gradient; last what a row has for its queries and keys, and the decays', which are carried
 * from row to row. Sums have one order each.
 */
#ifndef SPW_CUDA_DELTA_BACKWARD_CUH
#define SPW_CUDA_DELTA_BACKWARD_CUH

#include "delta.cuh"

/*
 * Of each row the factors of its queries and keys, by `lanes` threads for each vector, and the gates of its heads, which others than these
 * threads may make. Of Mamba-2 the gates alone. Decays of channels are another kernel's, of the heads that are taken.
 */
template <class E, int RULE>
__global__ void
delta_prepare_kernel(delta_args<E> g, unsigned lanes)
{
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, vectors = g.M * 2 * g.Hk, v = i / lanes;
    const uint64_t row = v / (2 * g.Hk);
    const unsigned head = (unsigned)(v % (2 * g.Hk)), at = (unsigned)(i % lanes) * 8;
    if (RULE != MAMBA) {
        float x[8], sum = 0.0f;
        load8(x, g.qkv + (v < vectors ? row * g.stride + (uint64_t)head * g.Dk : 0) + at,
              v < vectors ? left_from(g.Dk, at) : 0, g.wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum = __fmaf_rn(x[j], x[j], sum);
        sum = to_length_one(lanes_sum(sum, 1, (int)lanes)) * (head < g.Hk ? g.shrink : 1.0f);
        if (v < vectors && at == 0)
            g.factors[v] = sum;
    }
    if (i < g.M * g.Hv) {
        const unsigned h = (unsigned)(i % g.Hv);
        const uint64_t of = i / g.Hv;
        g.gates[i] = gates_of<RULE>(g, widen(g.a[i]), RULE == MAMBA ? 0.0f : widen(g.b[i]), widen(g.log_a[h]),
                                    widen(g.dt_bias[h]), begins_at(g, of, of % g.T));
    }
}

/* Eight decays for a thread; a head's vectors are `lanes` of these. */
template <class E>
__global__ void
delta_decays_kernel(delta_args<E> g)
{
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, eights = g.Dk / 8, vector = i / eights;
    const uint64_t row = vector / g.heads, at = i % eights * 8;
    const unsigned h = g.head + (unsigned)(vector % g.heads);
    eight<E> steps, bias;
    float v[8];
    if (row >= g.M)
        return;
    load_eight(&steps, g.a + channels_at(g, row, h) + at, 8, g.wide);
    load_eight(&bias, g.dt_bias + (uint64_t)h * g.Dk + at, 8, g.wide);
    decays_of(v, steps, bias, -expf(widen(g.log_a[h])), row % g.T == 0 || begins_at(g, row, row % g.T));
    store8(g.decays + vector * g.Dk + at, v, 8, g.wide);
}

/* Backward in time by columns of the state's gradient: delta's gradient and that of v. Blocks: columns, heads, sequences. */
template <class E, int DIM, int RULE>
__global__ void
__launch_bounds__(DELTA_THREADS, 2) delta_columns_kernel(delta_args<E> g)
{
    typedef line_of<DIM> line;
    enum { ROWS = staged_columns<DIM, RULE>::ROWS };
    __shared__ staged_columns<DIM, RULE> staged[2];
    unsigned part;
    const unsigned mine = my_line<DIM>(&part), column = blockIdx.x * line::LINES + mine;
    const uint64_t width = (uint64_t)g.Hv * g.Dv, taken = (uint64_t)g.heads * g.Dv, blocks = (g.T + ROWS - 1) / ROWS;
    const columns_of<E> c = my_columns(g, g.dout, width, line::LINES);
    const float log_a = widen(g.log_a[c.h]), dt_bias = widen(g.dt_bias[c.h]);
    const float skip = RULE == MAMBA ? widen(g.skip[c.h]) : 0.0f;
    const bool here = column < g.Dv;
    const uint64_t in_head = (uint64_t)c.h * g.Dv + column;
    uint64_t row = (c.b + 1) * g.T;
    coming_columns<E, DIM, RULE> coming = {};
    float s[line::ELEMS] = {0}, k[line::ELEMS], q[line::ELEMS];
    load_columns<RULE>(&coming, g, c, (blocks - 1) * ROWS);
    stage_columns<RULE>(&staged[0], coming, g, log_a, dt_bias);
    __syncthreads();
    for (uint64_t n = blocks; n-- > 0;) {
        const staged_columns<DIM, RULE> &now = staged[(blocks - 1 - n) % 2];
        const int rows = (int)least((uint64_t)ROWS, g.T - n * ROWS);
        if (n > 0)
            load_columns<RULE>(&coming, g, c, (n - 1) * ROWS);
        load_part<DIM>(q, now.queries[rows - 1], part);
        for (int r = rows - 1; r >= 0; r--) {
            const float2 gates = now.gates[r];
            const float dout = now.values[r][mine];
            float ddelta;
            row--;
            load_part<DIM>(k, now.keys[r], part);
#pragma unroll
            for (int i = 0; i < line::ELEMS; i++)
                s[i] = __fmaf_rn(q[i], dout, s[i]);
            load_part<DIM>(q, now.queries[r > 0 ? r - 1 : 0], part);
            ddelta = line_sum<DIM>(part_product<DIM>(k, s));
#pragma unroll
            for (int i = 0; i < line::ELEMS; i++)
                s[i] = gates.x * (RULE == MAMBA ? s[i] : __fmaf_rn(k[i], -gates.y * ddelta, s[i]));
            if constexpr (RULE == CHANNELS)
                decay_each<DIM>(s, now.decays[r], part);
            if (part == 0 && here)
                g.ddelta[row * taken + in_head - (uint64_t)g.head * g.Dv] = ddelta;
            if (part == 1 && here)
                narrow(g.dqkv + row * g.stride + values_at<RULE>(g) + in_head,
                       RULE == MAMBA ? __fmaf_rn(skip, dout, gates.y * ddelta) : gates.y * ddelta);
        }
        if (n > 0)
            stage_columns<RULE>(&staged[(blocks - n) % 2], coming, g, log_a, dt_bias);
        __syncthreads();
    }
}

/* Rows of a head in shared memory, and of the block's lines, which are rows of the state, their elements of queries and keys. */
template <int DIM, int RULE> struct __align__(16) staged_rows
{
    enum { ROWS = ROWS_STAGED / DIM };
    float dout[ROWS][DIM], delta[ROWS][DIM], dm[ROWS][DIM];
    float elements[RULE == CHANNELS ? 3 : 2][ROWS][line_of<DIM>::LINES]; /* the third: their decays */
    float gamma[ROWS];
};

/* delta and ddelta of the rule, v of Mamba-2, whose delta is beta times that. */
template <class E, int DIM> struct coming_rows {
    eight<E> dout, elements, v;
    eight<float> delta, ddelta, decays;
    float beta, gamma, factor;
};

/* Rows of sequence b from t0 on, of the block's lines from `first` on. */
template <int RULE, class E, int DIM>
SPW_DEVICE void
load_rows(coming_rows<E, DIM> *coming, const delta_args<E> &g, unsigned h, unsigned first, uint64_t b, uint64_t t0)
{
    enum { ROWS = staged_rows<DIM, RULE>::ROWS, OF_LINES = line_of<DIM>::LINES / 8 };
    const unsigned eights = line_of<DIM>::EIGHTS, at = threadIdx.x % eights * 8;
    const uint64_t row = b * g.T + t0, t = t0 + threadIdx.x / eights, of = row + threadIdx.x / eights;
    const uint64_t left = t < g.T ? left_from(g.Dv, at) : 0, vector = (of * g.Hv + h) * g.Dv + at;
    load_eight(&coming->dout, g.dout + vector, left, g.wide);
    if (RULE == MAMBA) {
        load_eight(&coming->v, g.qkv + of * g.stride + (uint64_t)h * g.Dv + at, left, g.wide);
    } else {
        load_eight(&coming->delta, g.delta + vector, left, g.wide);
        load_eight(&coming->ddelta, g.ddelta + (of * g.heads + h - g.head) * g.Dv + at, left, g.wide);
    }
    coming->beta = t < g.T ? g.gates[of * g.Hv + h].y : 0.0f;
    if (threadIdx.x < 2 * ROWS * OF_LINES) {
        const unsigned r = threadIdx.x / OF_LINES % ROWS, which = threadIdx.x / OF_LINES / ROWS;
        const unsigned head = h / g.group, line = first + threadIdx.x % OF_LINES * 8;
        const bool there = t0 + r < g.T;
        load_eight(&coming->elements, g.qkv + (row + r) * g.stride + vector_at<RULE>(g, which, head) + line,
                   there ? left_from(g.Dk, line) : 0, g.wide);
        if (RULE != MAMBA)
            coming->factor = there ? g.factors[((row + r) * 2 + which) * g.Hk + head] : 0.0f;
    }
    if (threadIdx.x < ROWS && t0 + threadIdx.x < g.T)
        coming->gamma = g.gates[(row + threadIdx.x) * g.Hv + h].x;
    if (RULE == CHANNELS && threadIdx.x < ROWS * OF_LINES) {
        const unsigned r = threadIdx.x / OF_LINES, line = first + threadIdx.x % OF_LINES * 8;
        load_eight(&coming->decays, g.decays + ((row + r) * g.heads + h - g.head) * g.Dk + line,
                   t0 + r < g.T ? left_from(g.Dk, line) : 0, g.wide);
    }
}

template <int RULE, class E, int DIM>
SPW_DEVICE void
stage_rows(staged_rows<DIM, RULE> *to, const coming_rows<E, DIM> &coming)
{
    enum { ROWS = staged_rows<DIM, RULE>::ROWS, OF_LINES = line_of<DIM>::LINES / 8 };
    const unsigned r = threadIdx.x / line_of<DIM>::EIGHTS, at = threadIdx.x % line_of<DIM>::EIGHTS * 8;
    float v[8];
    static_assert(ROWS * line_of<DIM>::EIGHTS == DELTA_THREADS, "eight elements of each vector for a thread");
    widen8(v, coming.dout);
    store8(to->dout[r] + at, v, 8, true);
    if (RULE == MAMBA) {
        widen8(v, coming.v);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] *= coming.beta;
        store8(to->delta[r] + at, v, 8, true);
    } else {
        widen8(v, coming.delta);
        store8(to->delta[r] + at, v, 8, true);
        widen8(v, coming.ddelta);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] *= -coming.beta;
        store8(to->dm[r] + at, v, 8, true);
    }
    if (threadIdx.x < 2 * ROWS * OF_LINES) {
        widen8(v, coming.elements);
#pragma unroll
        for (int j = 0; j < 8 && RULE != MAMBA; j++)
            v[j] *= coming.factor;
        store8(to->elements[threadIdx.x / OF_LINES / ROWS][threadIdx.x / OF_LINES % ROWS] + threadIdx.x % OF_LINES * 8,
               v, 8, true);
    }
    if (threadIdx.x < ROWS)
        to->gamma[threadIdx.x] = coming.gamma;
    if constexpr (RULE == CHANNELS)
        if (threadIdx.x < ROWS * OF_LINES) {
            widen8(v, coming.decays);
            store8(to->elements[2][threadIdx.x / OF_LINES] + threadIdx.x % OF_LINES * 8, v, 8, true);
        }
}

/* What a line is decayed by in a row. */
template <int DIM, int RULE>
SPW_DEVICE float
line_decay(const staged_rows<DIM, RULE> &now, int r, unsigned line)
{
    if constexpr (RULE == CHANNELS)
        return now.elements[2][r][line];
    else
        return now.gamma[r];
}

/* One row forward in time: the state before it, decayed, gives `read` by dm, and after it the query's gradient. Parts of sums. */
template <int DIM, int RULE>
SPW_DEVICE void
step_of_state(float *s, const staged_rows<DIM, RULE> &now, int r, unsigned line, unsigned part, float *dq, float *read)
{
    const float gamma = line_decay(now, r, line), k = now.elements[1][r][line];
    float dout[line_of<DIM>::ELEMS], delta[line_of<DIM>::ELEMS], dm[line_of<DIM>::ELEMS];
    if (RULE != MAMBA)
        load_part<DIM>(dm, now.dm[r], part);
    load_part<DIM>(delta, now.delta[r], part);
    load_part<DIM>(dout, now.dout[r], part);
#pragma unroll
    for (int i = 0; i < line_of<DIM>::ELEMS; i++)
        s[i] *= gamma;
    if (RULE != MAMBA)
        *read = part_product<DIM>(s, dm);
#pragma unroll
    for (int i = 0; i < line_of<DIM>::ELEMS; i++)
        s[i] = __fmaf_rn(k, delta[i], s[i]);
    *dq = part_product<DIM>(s, dout);
}

/* One row backward in time: the state's gradient after it gives `written` by delta, and goes on to the row before. */
template <int DIM, int RULE>
SPW_DEVICE void
step_of_gradient(float *s, const staged_rows<DIM, RULE> &now, int r, unsigned line, unsigned part, float *written)
{
    const float gamma = line_decay(now, r, line), q = now.elements[0][r][line], k = now.elements[1][r][line];
    float dout[line_of<DIM>::ELEMS], delta[line_of<DIM>::ELEMS], dm[line_of<DIM>::ELEMS];
    load_part<DIM>(dout, now.dout[r], part);
    load_part<DIM>(delta, now.delta[r], part);
    if (RULE != MAMBA)
        load_part<DIM>(dm, now.dm[r], part);
#pragma unroll
    for (int i = 0; i < line_of<DIM>::ELEMS; i++)
        s[i] = __fmaf_rn(q, dout[i], s[i]);
    *written = part_product<DIM>(s, delta);
#pragma unroll
    for (int i = 0; i < line_of<DIM>::ELEMS; i++)
        s[i] = gamma * (RULE == MAMBA ? s[i] : __fmaf_rn(k, dm[i], s[i]));
}

/*
 * By rows of the state and of its gradient, in blocks of their own each: GRADIENT backward in time, for what a key has by writing; else
 * forward, for queries and for what a key has by reading. A row's sums over lanes are made in the next one's step.
 */
template <class E, int DIM, int RULE, bool GRADIENT>
SPW_DEVICE void
walk_rows(const delta_args<E> &g, staged_rows<DIM, RULE> *staged, unsigned first)
{
    enum { ROWS = staged_rows<DIM, RULE>::ROWS };
    const unsigned h = g.head + blockIdx.y;
    const uint64_t b = blockIdx.z, blocks = (g.T + ROWS - 1) / ROWS, width = (uint64_t)g.heads * g.Dk;
    unsigned part;
    const unsigned mine = my_line<DIM>(&part), line = first + mine;
    const bool here = line < g.Dk;
    const int64_t step = GRADIENT ? -(int64_t)width : (int64_t)width;
    int64_t at = (int64_t)((b * g.T + (GRADIENT ? g.T : 0)) * width + (uint64_t)blockIdx.y * g.Dk + line) -
                 (GRADIENT ? 0 : (int64_t)width);
    float s[line_of<DIM>::ELEMS] = {0}, late = 0.0f, late_read = 0.0f;
    bool any = false;
    coming_rows<E, DIM> coming = {};
    load_rows<RULE>(&coming, g, h, first, b, (GRADIENT ? blocks - 1 : 0) * ROWS);
    stage_rows<RULE>(&staged[0], coming);
    __syncthreads();
    for (uint64_t n = 0; n < blocks; n++) {
        const uint64_t t0 = (GRADIENT ? blocks - 1 - n : n) * ROWS;
        const staged_rows<DIM, RULE> &now = staged[n % 2];
        const int rows = (int)least((uint64_t)ROWS, g.T - t0);
        if (n + 1 < blocks)
            load_rows<RULE>(&coming, g, h, first, b, GRADIENT ? t0 - ROWS : t0 + ROWS);
        for (int i = 0; i < rows; i++) {
            float sum = 0.0f, read = 0.0f;
            if (GRADIENT)
                step_of_gradient<DIM, RULE>(s, now, rows - 1 - i, mine, part, &sum);
            else
                step_of_state<DIM, RULE>(s, now, i, mine, part, &sum, &read);
            late = line_sum<DIM>(late);
            if (!GRADIENT && RULE != MAMBA)
                late_read = line_sum<DIM>(late_read);
            if (part == 0 && here && any)
                (GRADIENT ? g.written : g.dq)[at] = late;
            if (!GRADIENT && RULE != MAMBA && part == 1 && here && any)
                g.read[at] = late_read;
            at += step;
            late = sum;
            late_read = read;
            any = true;
        }
        if (n + 1 < blocks)
            stage_rows<RULE>(&staged[(n + 1) % 2], coming);
        __syncthreads();
    }
    late = line_sum<DIM>(late);
    if (part == 0 && here)
        (GRADIENT ? g.written : g.dq)[at] = late;
    if (GRADIENT || RULE == MAMBA)
        return;
    late_read = line_sum<DIM>(late_read);
    if (part == 1 && here)
        g.read[at] = late_read;
}

/* Blocks: rows of the state, and then of its gradient; heads; sequences. */
template <class E, int DIM, int RULE>
__global__ void
__launch_bounds__(DELTA_THREADS, 2) delta_rows_kernel(delta_args<E> g)
{
    __shared__ staged_rows<DIM, RULE> staged[2];
    const unsigned half = gridDim.x / 2;
    if (blockIdx.x < half)
        walk_rows<E, DIM, RULE, false>(g, staged, blockIdx.x * line_of<DIM>::LINES);
    else
        walk_rows<E, DIM, RULE, true>(g, staged, (blockIdx.x - half) * line_of<DIM>::LINES);
}

/* Sums over the vectors of a row's value head, as far as a thread has them: of products, and of squares. Of Mamba-2 v stands for delta. */
struct value_sums {
    float products, delta, dout, skipped, ddelta;
};

/* at: of the head's dout and delta, v_at of v. */
template <int RULE, class E>
SPW_DEVICE value_sums
sum_values(const delta_args<E> &g, uint64_t at, uint64_t v_at, uint64_t ddelta_at, unsigned first, unsigned step)
{
    value_sums sums = {};
    for (unsigned d = first; d < g.Dv; d += step) {
        eight<float> of_delta, of_ddelta;
        eight<E> of_dout, of_v;
        float x[8], y[8], z[8];
        if (RULE == MAMBA)
            load_eight(&of_v, g.qkv + v_at + d, g.Dv - d, g.wide);
        else
            load_eight(&of_delta, g.delta + at + d, g.Dv - d, g.wide);
        load_eight(&of_ddelta, g.ddelta + ddelta_at + d, g.Dv - d, g.wide);
        load_eight(&of_dout, g.dout + at + d, g.Dv - d, g.wide);
        if (RULE == MAMBA)
            widen8(x, of_v);
        else
            widen8(x, of_delta);
        widen8(y, of_ddelta);
        widen8(z, of_dout);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sums.products += x[j] * y[j];
            sums.delta += x[j] * x[j];
            sums.dout += z[j] * z[j];
            if (RULE == MAMBA)
                sums.skipped += x[j] * z[j];
            if (RULE == CHANNELS)
                sums.ddelta += y[j] * y[j];
        }
    }
    return sums;
}

/*
 * What eight channels of a row have of the gradients of their decays (in place of dq), how much they lengthen the state's rows (of written) and
 * those of its gradient (of read).
 */
template <class E>
SPW_DEVICE void
keep_channels(const delta_args<E> &g, uint64_t vector, uint64_t left, const float *q, const float *k, const float *dq,
              const float *written, const float *read, const value_sums &sums, float beta)
{
    const float wrote = sqrtf(sums.delta), asked = sqrtf(sums.dout), gave = beta * sqrtf(sums.ddelta);
    float share[8], longer[8], gradient[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        share[j] = q[j] * dq[j] + k[j] * (read[j] - written[j]);
        longer[j] = fabsf(k[j]) * wrote;
        gradient[j] = fabsf(q[j]) * asked + fabsf(k[j]) * gave;
    }
    if (left > 0) {
        store8(g.dq + vector, share, left, g.wide);
        store8(g.written + vector, longer, left, g.wide);
        store8(g.read + vector, gradient, left, g.wide);
    }
}

/*
 * `lanes` threads have a row of a key head: sums over its value heads in their order, and back through the length of one, into q and k of
 * dqkv. On the way each value head's db, by delta and its gradient, what it has of gamma's, and what bounds that. Of Mamba-2 such sums, and what a row
 * has of beta's and skip's. With channels the numbers are each one's, and are put where the gradients were that they are made of.
 */
template <class E, int RULE>
__global__ void
delta_heads_kernel(delta_args<E> g, unsigned lanes)
{
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, unit = i / lanes, taken = g.heads / g.group;
    const bool here = unit < g.M * taken;
    const uint64_t row = here ? unit / taken : 0;
    const unsigned head = g.head / g.group + (here ? (unsigned)(unit % taken) : 0), at = (unsigned)(i % lanes) * 8;
    const uint64_t left = here ? left_from(g.Dk, at) : 0, q_at = row * g.stride + vector_at<RULE>(g, 0, head) + at;
    const uint64_t k_at = row * g.stride + vector_at<RULE>(g, 1, head) + at, b = row / g.T, t = row % g.T;
    const float q_factor = RULE == MAMBA ? 1.0f : g.factors[row * 2 * g.Hk + head];
    const float k_factor = RULE == MAMBA ? 1.0f : g.factors[(row * 2 + 1) * g.Hk + head];
    float q[8], k[8], dq[8] = {0}, dk[8] = {0}, of_q = 0.0f, of_k = 0.0f, squares = 0.0f, of_keys = 0.0f;
    eight<E> raw_q, raw_k;
    load_eight(&raw_q, g.qkv + q_at, left, g.wide);
    load_eight(&raw_k, g.qkv + k_at, left, g.wide);
    widen8(q, raw_q);
    widen8(k, raw_k);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        q[j] *= q_factor;
        k[j] *= k_factor;
        squares += q[j] * q[j];
        of_keys += k[j] * k[j];
    }
    squares = lanes_sum(squares, 1, (int)lanes);
    if (RULE == MAMBA)
        of_keys = lanes_sum(of_keys, 1, (int)lanes);
    for (unsigned h = head * g.group; h < (head + 1) * g.group; h++) {
        const uint64_t of = row * g.Hv + h, mine = row * g.heads + h - g.head, vector = mine * g.Dk + at;
        const uint64_t number = (b * g.heads + h - g.head) * g.T + t;
        eight<float> of_dq, of_written, of_read;
        float x[8], w[8], r[8], share = 0.0f;
        value_sums sums = {};
        load_eight(&of_dq, g.dq + vector, left, g.wide);
        load_eight(&of_written, g.written + vector, left, g.wide);
        if (RULE != MAMBA)
            load_eight(&of_read, g.read + vector, left, g.wide);
        if (here)
            sums = sum_values<RULE>(g, of * g.Dv, row * g.stride + (uint64_t)h * g.Dv, mine * g.Dv, at, lanes * 8);
        widen8(x, of_dq);
        widen8(w, of_written);
        if (RULE != MAMBA)
            widen8(r, of_read);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            share += RULE == MAMBA ? q[j] * x[j] - k[j] * w[j] : q[j] * x[j] + k[j] * (r[j] - w[j]);
            dq[j] += x[j];
            dk[j] += RULE == MAMBA ? w[j] : w[j] + r[j];
        }
        if (RULE != CHANNELS)
            share = lanes_sum(share, 1, (int)lanes);
        sums.products = lanes_sum(sums.products, 1, (int)lanes);
        sums.delta = lanes_sum(sums.delta, 1, (int)lanes);
        sums.dout = lanes_sum(sums.dout, 1, (int)lanes);
        if (RULE == MAMBA)
            sums.skipped = lanes_sum(sums.skipped, 1, (int)lanes);
        if (RULE == CHANNELS) {
            sums.ddelta = lanes_sum(sums.ddelta, 1, (int)lanes);
            keep_channels(g, vector, left, q, k, x, w, r, sums, here ? g.gates[of].y : 0.0f);
        }
        if (RULE == CHANNELS && here && at == 0)
            narrow(g.db + of, (1.0f - g.gates[of].y / g.beta_most) * sums.products);
        if (RULE != CHANNELS && here && at == 0) {
            g.share[number] = share;
            g.asked[number] = sqrtf(squares) * sqrtf(sums.dout);
            if (RULE == MAMBA) {
                g.written_length[number] = g.gates[of].y * sqrtf(sums.delta) * sqrtf(of_keys);
                g.dbeta[number] = sums.products;
                g.dskip[number] = sums.skipped;
            } else {
                g.written_length[number] = sqrtf(sums.delta);
                narrow(g.db + of, (1.0f - g.gates[of].y / g.beta_most) * sums.products);
            }
        }
    }
    if (RULE != MAMBA) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            of_q += q[j] * dq[j];
            of_k += k[j] * dk[j];
        }
        of_q = lanes_sum(of_q, 1, (int)lanes) *
               (float)g.Dk; /* as q has become smaller by its root, and the direction counts twice */
        of_k = lanes_sum(of_k, 1, (int)lanes);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            dq[j] = q_factor * (dq[j] - q[j] * of_q);
            dk[j] = k_factor * (dk[j] - k[j] * of_k);
        }
    }
    if (left > 0) {
        store8(g.dqkv + q_at, dq, left, g.wide);
        store8(g.dqkv + k_at, dk, left, g.wide);
    }
}

enum { DECAY_THREADS = 128 };

/* fmaxf() and fminf() would lose a NaN of either. */
SPW_DEVICE float
between(float x, float low, float high)
{
    const float cut = fmaxf(low, fminf(high, x));
    return x == x && low <= high ? cut : NAN;
}

/* What is carried from row to row by a row's decay and x: x + decay times what was. Rows in turn are such a step, too. */
SPW_DEVICE float2
carry_on(float2 before, float decay, float x)
{
    return float2{decay * before.x, decay * before.y + x};
}

/* Steps of all threads, in the order of their rows or against it, become what is carried into each in .y. */
SPW_DEVICE void
carry_through(float2 *steps, bool down)
{
    float carried = 0.0f;
#pragma unroll 8
    for (int n = 0; n < DECAY_THREADS; n++) {
        float2 *step = &steps[down ? DECAY_THREADS - 1 - n : n], own = *step;
        step->y = carried;
        carried = own.x * carried + own.y;
    }
}

/* A thread's rows of a head in a sequence, and where these are in the arrays of numbers of each row and head. */
struct decay_rows {
    uint64_t first, end, b, h;
    float *share, *written, *asked;
};

/* Into row t. */
template <class E>
SPW_DEVICE float
decay_at(const delta_args<E> &g, const decay_rows &rows, uint64_t t)
{
    return t == 0 ? 0.0f : g.gates[(rows.b * g.T + t) * g.Hv + rows.h].x;
}

/*
 * A bound of each row's gradient into `asked`: the length that the state before it can have, times its gradient's. Both are carried, the one
 * forward, the other backward in time.
 */
template <class E>
SPW_DEVICE void
bound_gradients(const delta_args<E> &g, const decay_rows &rows)
{
    __shared__ float2 states[DECAY_THREADS], gradients[DECAY_THREADS];
    float2 state = {1.0f, 0.0f}, gradient = {1.0f, 0.0f};
    float length;
#pragma unroll 4
    for (uint64_t t = rows.first; t < rows.end; t++)
        state = carry_on(state, decay_at(g, rows, t), rows.written[t]);
#pragma unroll 4
    for (uint64_t t = rows.end; t-- > rows.first;) {
        gradient.y += rows.asked[t];
        gradient = carry_on(gradient, decay_at(g, rows, t), 0.0f);
    }
    states[threadIdx.x] = state;
    gradients[threadIdx.x] = gradient;
    __syncthreads();
    if (threadIdx.x == 0)
        carry_through(states, false);
    if (threadIdx.x == 32)
        carry_through(gradients, true);
    __syncthreads();
    length = states[threadIdx.x].y;
#pragma unroll 4
    for (uint64_t t = rows.first; t < rows.end; t++) {
        const float before = decay_at(g, rows, t) * length;
        length = before + rows.written[t];
        rows.written[t] = before;
    }
    length = gradients[threadIdx.x].y;
#pragma unroll 4
    for (uint64_t t = rows.end; t-- > rows.first;) {
        length += rows.asked[t];
        rows.asked[t] = length * rows.written[t];
        length *= decay_at(g, rows, t);
    }
}

/* The gradient that is carried into a thread's rows from those behind it: each row adds its share, and is between its bounds. */
SPW_DEVICE float
carried_gradient(const decay_rows &rows)
{
    __shared__ float shares[DECAY_THREADS], lows[DECAY_THREADS], highs[DECAY_THREADS];
    float share = 0.0f, low = -INFINITY, high = INFINITY, carried = 0.0f;
#pragma unroll 4
    for (uint64_t t = rows.end; t-- > rows.first;) {
        const float x = rows.share[t], most = rows.asked[t];
        share += x;
        low = between(low + x, -most, most);
        high = between(high + x, -most, most);
    }
    shares[threadIdx.x] = share;
    lows[threadIdx.x] = low;
    highs[threadIdx.x] = high;
    __syncthreads();
    if (threadIdx.x == 0)
#pragma unroll 8
        for (int i = DECAY_THREADS - 1; i >= 0; i--) {
            const float own = shares[i];
            shares[i] = carried;
            carried = between(carried + own, lows[i], highs[i]);
        }
    __syncthreads();
    return shares[threadIdx.x];
}

/*
 * Blocks: heads, sequences. The gradient of ln gamma, from the last row of a sequence to its first, and what a and the head's two numbers have of
 * it, these as sums over the sequence: (B, Hv). Threads have rows in turn, and go over them with what the others carry. Of Mamba-2 a has beta's
 * gradient, too, and skip's is summed up.
 */
template <class E, int RULE>
__global__ void
__launch_bounds__(DECAY_THREADS) delta_decay_kernel(delta_args<E> g, float *of_log_a, float *of_dt_bias, float *of_skip)
{
    const uint64_t each = (g.T + DECAY_THREADS - 1) / DECAY_THREADS, h = g.head + blockIdx.x, b = blockIdx.y;
    const uint64_t numbers = (b * g.heads + blockIdx.x) * g.T, first = least(g.T, threadIdx.x * each);
    const float rate = -expf(widen(g.log_a[h])), dt_bias = widen(g.dt_bias[h]);
    const decay_rows rows = {
        first, least(g.T, first + each), b, h, g.share + numbers, g.written_length + numbers, g.asked + numbers};
    float gradient, sum_a = 0.0f, sum_log_a = 0.0f, sum_skip = 0.0f;
    bound_gradients(g, rows);
    gradient = carried_gradient(rows);
    for (uint64_t t = rows.end; t-- > rows.first;) {
        const uint64_t at = (b * g.T + t) * g.Hv + h;
        const float x = widen(g.a[at]) + dt_bias, most = rows.asked[t], step = step_of<RULE>(x, g.step_least);
        const float slope = RULE == MAMBA && step_of<DELTA>(x, 0.0f) < g.step_least ? 0.0f : sigmoid(x);
        gradient = between(gradient + rows.share[t], -most, most);
        if (RULE == MAMBA) {
            const float da = (gradient * rate + g.dbeta[numbers + t]) * slope;
            narrow(g.da + at, da);
            sum_a += da;
            sum_skip += g.dskip[numbers + t];
        } else {
            narrow(g.da + at, gradient * rate * slope);
            sum_a += gradient * rate * slope;
        }
        sum_log_a += gradient * rate * step;
    }
    sum_a = block_sum(sum_a);
    sum_log_a = block_sum(sum_log_a);
    if (RULE == MAMBA)
        sum_skip = block_sum(sum_skip);
    if (threadIdx.x == 0) {
        of_dt_bias[b * g.Hv + h] = sum_a;
        of_log_a[b * g.Hv + h] = sum_log_a;
        if (RULE == MAMBA)
            of_skip[b * g.Hv + h] = sum_skip;
    }
}

/* Rows of a channel that are read at a time, because what is carried waits for each. */
enum { CHANNEL_ROWS = 8, CHANNELS_MAX = 256 };

/* How long the row of the state can be that each row of a channel finds: in place of how much longer it makes it. */
template <class E>
SPW_DEVICE void
bound_channel(const delta_args<E> &g, uint64_t first, uint64_t stride)
{
    float length = 0.0f;
    for (uint64_t t0 = 0; t0 < g.T; t0 += CHANNEL_ROWS) {
        float decays[CHANNEL_ROWS], longer[CHANNEL_ROWS];
#pragma unroll
        for (unsigned n = 0; n < CHANNEL_ROWS; n++) {
            const uint64_t at = first + least(t0 + n, g.T - 1) * stride;
            decays[n] = g.decays[at];
            longer[n] = g.written[at];
        }
#pragma unroll
        for (unsigned n = 0; n < CHANNEL_ROWS; n++) {
            const float before = decays[n] * length;
            length = before + longer[n];
            if (t0 + n < g.T)
                g.written[first + (t0 + n) * stride] = before;
        }
    }
}

/*
 * Blocks: heads, sequences; a thread for each channel. The gradient of its ln gamma, from the last row of a sequence to its first, and what a, dt_bias
 * (B, Hv Dk) and the head's log_a (B, Hv) have of it, these as sums over the sequence.
 */
template <class E>
__global__ void
__launch_bounds__(CHANNELS_MAX) delta_channels_kernel(delta_args<E> g, float *of_log_a, float *of_dt_bias)
{
    const uint64_t h = g.head + blockIdx.x, b = blockIdx.y, i = least((uint64_t)threadIdx.x, (uint64_t)g.Dk - 1);
    const uint64_t stride = (uint64_t)g.heads * g.Dk, first = (b * g.T * g.heads + blockIdx.x) * g.Dk + i;
    const bool here = threadIdx.x < g.Dk;
    const float rate = -expf(widen(g.log_a[h])), dt_bias = widen(g.dt_bias[h * g.Dk + i]);
    float carried = 0.0f, length = 0.0f, sum_log_a;
    double sum_a = 0.0, sum_log = 0.0;
    if (here)
        bound_channel(g, first, stride);
    for (uint64_t left = here ? g.T : 0; left > 0; left -= least(left, (uint64_t)CHANNEL_ROWS)) {
        float share[CHANNEL_ROWS], before[CHANNEL_ROWS], asked[CHANNEL_ROWS], decays[CHANNEL_ROWS], a[CHANNEL_ROWS];
#pragma unroll
        for (unsigned n = 0; n < CHANNEL_ROWS; n++) {
            const uint64_t t = left > n ? left - 1 - n : 0, at = first + t * stride;
            share[n] = g.dq[at];
            before[n] = g.written[at];
            asked[n] = g.read[at];
            decays[n] = g.decays[at];
            a[n] = widen(g.a[channels_at(g, b * g.T + t, (unsigned)h) + i]);
        }
#pragma unroll
        for (unsigned n = 0; n < CHANNEL_ROWS; n++) {
            if (left <= n)
                break;
            const float x = a[n] + dt_bias, most = (length + asked[n]) * before[n];
            carried = between(carried + share[n], -most, most);
            length = (length + asked[n]) * decays[n];
            narrow(g.da + channels_at(g, b * g.T + left - 1 - n, (unsigned)h) + i, carried * rate * sigmoid(x));
            sum_a += (double)(carried * rate * sigmoid(x));
            sum_log += (double)(carried * rate * step_of<CHANNELS>(x, 0.0f));
        }
    }
    if (here)
        of_dt_bias[(b * g.Hv + h) * g.Dk + i] = (float)sum_a;
    sum_log_a = block_sum((float)sum_log);
    if (threadIdx.x == 0)
        of_log_a[b * g.Hv + h] = sum_log_a;
}

#endif
