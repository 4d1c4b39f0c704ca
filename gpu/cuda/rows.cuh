/*
 * Kernels that take rows as units: embedding and its backward, rotary embedding, rows into a cache, cross-entropy, of a part of a vocabulary too.
 *
 * Embedding backward without atomics on floats: the first row of each id is found (a least of whole numbers, the same in any
 * order), and the blocks of that row collect the id's other rows in their order and add them to the table in registers.
 */
#ifndef SPW_CUDA_ROWS_CUH
#define SPW_CUDA_ROWS_CUH

#include "common.cuh"

/* Which row of a table of rows [first, first + V) an id means; V or more: none. */
SPW_DEVICE uint64_t
row_of_table(int32_t id, uint64_t first)
{
    return (uint64_t)id - first;
}

template <class T>
__global__ void
embedding_kernel(T *y, const int32_t *ids, const T *table, uint64_t first, uint64_t V, uint64_t C, bool add, bool wide)
{
    uint64_t row = blockIdx.x, at = row_of_table(ids[row], first);
    const T *from = table + at * C;
    if (at >= V)
        return;
    for (uint64_t c = threadIdx.x * 8; c < C; c += blockDim.x * 8) {
        eight<T> of_table, of_y = {};
        float v[8], old[8];
        load_eight(&of_table, from + c, C - c, wide);
        if (add)
            load_eight(&of_y, y + row * C + c, C - c, wide);
        widen8(v, of_table);
        widen8(old, of_y);
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = add ? v[j] + old[j] : v[j];
        store8(y + row * C + c, v, C - c, wide);
    }
}

/* leads (V), the first row of y for each of the table, starts above every row. */
SPW_KERNEL void
first_rows_kernel(int *leads, const int32_t *ids, uint64_t M, uint64_t first, uint64_t V)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, at = i < M ? row_of_table(ids[i], first) : V;
    if (at < V)
        atomicMin(&leads[at], (int)i);
}

enum { EMBED_THREADS = 128, EMBED_COLUMNS = 2 * EMBED_THREADS }; /* columns of a block */

template <class T>
__global__ void
embedding_backward_kernel(float *dtable, const T *dy, const int32_t *ids, const int *leads, uint64_t M, uint64_t first,
                          uint64_t V, uint64_t C)
{
    __shared__ int rows[EMBED_THREADS];
    __shared__ unsigned found[EMBED_THREADS / 32];
    uint64_t row = blockIdx.x, c0 = (uint64_t)blockIdx.y * EMBED_COLUMNS + threadIdx.x, c1 = c0 + EMBED_THREADS;
    uint64_t at = row_of_table(ids[row], first);
    int32_t id = ids[row];
    float sum0, sum1;
    if (at >= V || leads[at] != (int)row)
        return; /* the whole block */
    sum0 = c0 < C ? dtable[at * C + c0] : 0.0f;
    sum1 = c1 < C ? dtable[at * C + c1] : 0.0f;
    for (uint64_t i = row; i < M; i += EMBED_THREADS) {
        uint64_t mine = i + threadIdx.x;
        bool hit = mine < M && ids[mine] == id;
        unsigned bits = __ballot_sync(0xffffffffu, hit), warp = threadIdx.x / 32, lane = threadIdx.x % 32, before = 0;
        unsigned count = 0;
        if (lane == 0)
            found[warp] = (unsigned)__popc(bits);
        __syncthreads();
        for (unsigned w = 0; w < EMBED_THREADS / 32; w++) {
            before += w < warp ? found[w] : 0;
            count += found[w];
        }
        if (hit)
            rows[before + (unsigned)__popc(bits & ((1u << lane) - 1))] = (int)mine;
        __syncthreads(); /* found is read too; rows are, before the next round's first barrier */
#pragma unroll 4
        for (unsigned k = 0; k < count; k++) {
            const T *from = dy + (uint64_t)rows[k] * C;
            sum0 += c0 < C ? widen(from[c0]) : 0.0f;
            sum1 += c1 < C ? widen(from[c1]) : 0.0f;
        }
    }
    if (c0 < C)
        dtable[at * C + c0] = sum0;
    if (c1 < C)
        dtable[at * C + c1] = sum1;
}

/* Pairs of a and b by their angles. */
SPW_DEVICE void
turn(float *a, float *b, float c, float s)
{
    float x = *a * c - *b * s;
    *b = *b * c + *a * s;
    *a = x;
}

/* A thread per pair (j, j + R/2), or (2j, 2j + 1) with neighbors; places NULL: row i is at i % T. */
template <class T>
__global__ void
rope_kernel(T *x, uint64_t stride, const float *cos_sin, const int32_t *places, uint64_t M, uint64_t positions,
            uint64_t H, uint64_t D, uint64_t R, bool neighbors, float sign)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, half = R / 2;
    uint64_t j = i % half, h = i / half % H, row = i / half / H;
    if (row >= M)
        return;
    const float *at = cos_sin + (places != NULL ? (uint64_t)places[row] : row % positions) * R;
    T *pair = x + row * stride + h * D + (neighbors ? 2 * j : j), *other = pair + (neighbors ? 1 : half);
    float a = widen(*pair), b = widen(*other);
    turn(&a, &b, at[j], sign * at[j + half]);
    narrow(pair, a);
    narrow(other, b);
}

/*
 * The same where eight elements can be loaded at once: a thread per eight pairs, with neighbors four. One division of 64 bits takes longer
 * than a pair's way to memory and back: all counts are below 2^32.
 */
template <class T, bool NEIGHBORS>
__global__ void
rope_wide_kernel(T *x, uint64_t stride, const float *cos_sin, const int32_t *places, unsigned M, unsigned positions,
                 unsigned H, unsigned D, unsigned R, float sign)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, each = NEIGHBORS ? R / 8 : R / 16;
    unsigned j = i % each, h = i / each % H, row = i / each / H;
    float a[8], b[8], c[8], s[8];
    eight<T> first, second;
    if (row >= M)
        return;
    const float *at = cos_sin + (uint64_t)(places != NULL ? (unsigned)places[row] : row % positions) * R;
    T *to = x + row * stride + h * D + j * 8, *other = to + R / 2;
    load_eight(&first, to, 8, true);
    if (!NEIGHBORS)
        load_eight(&second, other, 8, true);
    at += NEIGHBORS ? j * 4 : j * 8;
#pragma unroll
    for (int k = 0; k < (NEIGHBORS ? 4 : 8); k += 4) {
        float4 of_cos = *(const float4 *)(at + k), of_sin = *(const float4 *)(at + R / 2 + k);
        c[k] = of_cos.x, c[k + 1] = of_cos.y, c[k + 2] = of_cos.z, c[k + 3] = of_cos.w;
        s[k] = of_sin.x, s[k + 1] = of_sin.y, s[k + 2] = of_sin.z, s[k + 3] = of_sin.w;
    }
    widen8(a, first);
    if (NEIGHBORS) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            turn(&a[2 * k], &a[2 * k + 1], c[k], sign * s[k]);
    } else {
        widen8(b, second);
#pragma unroll
        for (int k = 0; k < 8; k++)
            turn(&a[k], &b[k], c[k], sign * s[k]);
        store8(other, b, 8, true);
    }
    store8(to, a, 8, true);
}

/* A thread per eight elements of a head. */
template <class T>
__global__ void
copy_heads_kernel(T *y, uint64_t y_stride, uint64_t y_head, const T *x, uint64_t x_stride, uint64_t x_head, uint64_t M,
                  uint64_t H, uint64_t D, bool wide)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, eights = (D + 7) / 8;
    uint64_t d = i % eights * 8, h = i / eights % H, row = i / eights / H;
    float v[8];
    if (row >= M)
        return;
    load8(v, x + row * x_stride + h * x_head + d, D - d, wide);
    store8(y + row * y_stride + h * y_head + d, v, D - d, wide);
}

/* A thread per eight sums. */
template <class T>
__global__ void
sum_heads_kernel(T *y, uint64_t y_stride, const T *x, uint64_t x_stride, uint64_t x_head, uint64_t M, uint64_t H,
                 uint64_t D, bool wide)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, eights = (D + 7) / 8;
    uint64_t d = i % eights * 8, row = i / eights;
    float sum[8], v[8];
    if (row >= M)
        return;
    x += row * x_stride + d;
    load8(sum, x, D - d, wide);
#pragma unroll 4
    for (uint64_t h = 1; h < H; h++) {
        load8(v, x + h * x_head, D - d, wide);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum[j] += v[j];
    }
    store8(y + row * y_stride + d, sum, D - d, wide);
}

/* Row t of sequence b goes to row slots[b] capacity + starts[b] + t of the cache. A block per row. */
template <class T>
__global__ void
put_rows_kernel(T *cache, const T *rows, const int32_t *slots, const int32_t *starts, uint64_t capacity,
                uint64_t positions, uint64_t stride, uint64_t heads, uint64_t head, uint64_t width)
{
    uint64_t b = blockIdx.x / positions, t = blockIdx.x % positions;
    T *to = cache + ((uint64_t)slots[b] * capacity + (uint64_t)starts[b] + t) * heads * width;
    const T *from = rows + blockIdx.x * stride;
    for (uint64_t c = threadIdx.x; c < heads * width; c += blockDim.x)
        to[c] = from[c / width * head + c % width];
}

/* e^(x - most): as the hardware has it where results are of 16 bits. */
template <class T>
SPW_DEVICE float
power_of_e(float x, float most)
{
    const float log2e = 1.44269504088896341f;
    return sizeof(T) == 4 ? expf(x - most) : power_of_2(__fmaf_rn(x, log2e, -(most * log2e)));
}

/*
 * One row of logits, CAP: without their cap: the loss, and in place scale * (softmax - one-hot), times the slope of the cap, when wanted, with
 * zeros up to the stride; scale times the row's weight, where there are weights.
 */
template <class T, bool CAP>
__global__ void
cross_entropy_kernel(float *losses, T *logits, const int32_t *targets, const float *weights, uint64_t V,
                     uint64_t stride, float scale, float cap, bool want_grad, bool wide)
{
    uint64_t row = blockIdx.x;
    T *in = logits + row * stride;
    int32_t target = targets[row];
    float max = -INFINITY, sum = 0.0f, v[8], at_target = target >= 0 ? widen(in[target]) : 0.0f, all;
    at_target = CAP ? cap * tanhf(at_target / cap) : at_target;
    for (uint64_t c = V + threadIdx.x; c < stride && want_grad; c += blockDim.x)
        narrow(in + c, 0.0f);
    if (target < 0) {
        float zero[8] = {0};
        for (uint64_t c = threadIdx.x * 8; c < V && want_grad; c += blockDim.x * 8)
            store8(in + c, zero, V - c, wide);
        if (threadIdx.x == 0)
            losses[row] = 0.0f;
        return;
    }
    for (uint64_t c = threadIdx.x * 8; c < V; c += blockDim.x * 8) {
        float top = max;
        load8(v, in + c, V - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = CAP ? cap * tanhf(v[j] / cap) : v[j];
            v[j] = c + (unsigned)j < V ? v[j] : -INFINITY;
            top = fmaxf(top, v[j]);
        }
        if (top > max) {
            sum *= power_of_e<T>(max, top); /* 0 at first */
            max = top;
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += power_of_e<T>(v[j], max); /* a NaN spreads from here */
    }
    all = block_max(max);
    sum = block_sum(max == -INFINITY ? sum * 0.0f : sum * expf(max - all));
    if (threadIdx.x == 0)
        losses[row] = logf(sum) + all - at_target;
    if (!want_grad)
        return;
    sum = 1.0f / sum;
    scale = weights != NULL ? scale * weights[row] : scale;
    for (uint64_t c = threadIdx.x * 8; c < V; c += blockDim.x * 8) {
        load8(v, in + c, V - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float t = CAP ? tanhf(v[j] / cap) : 0.0f, y = CAP ? cap * t : v[j];
            v[j] = scale * (power_of_e<T>(y, all) * sum - (c + (unsigned)j == (uint64_t)target ? 1.0f : 0.0f));
            v[j] = CAP ? v[j] * (1.0f - t * t) : v[j];
        }
        store8(in + c, v, V - c, wide);
    }
}

/*
 * The same where logits are columns [first, first + V) of a row, in two kernels with the whole row's sums between them (M, 3), as spw_gpu.h has
 * them: into the sums here, and from them. Apart from the one above, whose bits depend on what a compiler makes one instruction of.
 */
template <class T, bool CAP>
__global__ void
head_see_kernel(float *sums, const T *logits, const int32_t *targets, uint64_t first, uint64_t V, uint64_t stride,
                float cap, bool wide)
{
    uint64_t row = blockIdx.x, target = row_of_table(targets[row], first);
    const T *in = logits + row * stride;
    float max = -INFINITY, sum = 0.0f, v[8], all, *so_far = sums + row * 3;
    if (targets[row] < 0)
        return; /* the whole block */
    for (uint64_t c = threadIdx.x * 8; c < V; c += blockDim.x * 8) {
        float top = max;
        load8(v, in + c, V - c, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = CAP ? cap * tanhf(v[j] / cap) : v[j];
            v[j] = c + (unsigned)j < V ? v[j] : -INFINITY;
            top = fmaxf(top, v[j]);
        }
        if (top > max) {
            sum *= power_of_e<T>(max, top); /* 0 at first */
            max = top;
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += power_of_e<T>(v[j], max); /* a NaN spreads from here */
    }
    all = block_max(max);
    sum = block_sum(max == -INFINITY ? sum * 0.0f : sum * expf(max - all));
    if (threadIdx.x != 0)
        return;
    if (first > 0) { /* a NaN is in one of the sums, whatever becomes of the greatest */
        max = fmaxf(so_far[0], all);
        sum = so_far[1] * expf(so_far[0] - max) + sum * expf(all - max);
        all = max;
    }
    so_far[0] = all;
    so_far[1] = sum;
    if (target < V)
        so_far[2] = CAP ? cap * tanhf(widen(in[target]) / cap) : widen(in[target]);
    else if (first == 0)
        so_far[2] = 0.0f;
}

SPW_KERNEL void
head_losses_kernel(float *losses, const float *sums, const int32_t *targets, uint64_t M)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < M)
        losses[i] = targets[i] < 0 ? 0.0f : logf(sums[i * 3 + 1]) + sums[i * 3] - sums[i * 3 + 2];
}

template <class T, bool CAP>
__global__ void
head_gradient_kernel(T *logits, const float *sums, const int32_t *targets, const float *weights, uint64_t first,
                     uint64_t V, uint64_t stride, float scale, float cap, bool wide)
{
    uint64_t row = blockIdx.x, target = row_of_table(targets[row], first);
    T *in = logits + row * stride;
    bool has = targets[row] >= 0;
    float v[8] = {0}, most = sums[row * 3], part = 1.0f / sums[row * 3 + 1];
    scale = has && weights != NULL ? scale * weights[row] : scale;
    for (uint64_t c = threadIdx.x * 8; c < V; c += blockDim.x * 8) {
        if (has)
            load8(v, in + c, V - c, wide);
#pragma unroll
        for (int j = 0; j < 8 && has; j++) {
            float t = CAP ? tanhf(v[j] / cap) : 0.0f, y = CAP ? cap * t : v[j];
            v[j] = scale * (power_of_e<T>(y, most) * part - (c + (unsigned)j == target ? 1.0f : 0.0f));
            v[j] = CAP ? v[j] * (1.0f - t * t) : v[j];
        }
        store8(in + c, v, V - c, wide);
    }
}

#endif
