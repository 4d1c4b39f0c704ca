/*
 * Keys that stand for several rows, on the cpu device: a part has a window, and goes through its columns side by side. What it makes of gates is
 * made again for gradients.
 */
#include "cpu_internal.h"
#include <math.h>

enum { COLS = 64 }; /* at a time */

typedef struct compress {
    const cpu_kernels *k;
    float *out, *dgate, *dbias;
    const float *kv, *gate, *bias, *dy;
    spw_compress_shape s;
    uint64_t parts, windows;
} compress;

static compress
begin(spw_gpu_queue *q, const spw_compress_shape *s)
{
    return (compress){.k = spw__cpu_kernels(q), .s = *s, .parts = s->overlaps ? 2 : 1, .windows = s->T / s->rate};
}

/* The first row of a window, in its sequence. */
static uint64_t
first_of(const compress *a, uint64_t b, uint64_t w)
{
    return a->s.firsts != NULL ? (uint64_t)a->s.firsts[b * a->windows + w] : w * a->s.rate;
}

/* Whether a window is a document's; without documents each is. */
static bool
is_there(const compress *a, uint64_t b, uint64_t w)
{
    return first_of(a, b, w) + a->s.rate <= a->s.T;
}

/* Where element 0 of a window's slot is, which belongs to row *row of the bias too; false: there is none. */
static bool
slot_at(const compress *a, uint64_t b, uint64_t w, uint64_t slot, uint64_t *at, uint64_t *bias_at)
{
    const spw_compress_shape *s = &a->s;
    const uint64_t width = a->parts * s->D, i = slot % s->rate, first = first_of(a, b, w);
    const uint64_t document = s->begins != NULL ? (uint64_t)s->begins[b * s->T + first] : 0;
    const bool before = s->overlaps && slot < s->rate;
    if (before && first < document + s->rate)
        return false;
    *at = (b * s->T + first - (before ? s->rate : 0) + i) * width + (s->overlaps && !before ? s->D : 0);
    *bias_at = i * width + (s->overlaps && !before ? s->D : 0);
    return true;
}

/* Of columns [c, c + n) of a window: the greatest logit and the sum of exp(logit - that), and what is made of values by these weights. */
static void
soften(const compress *a, uint64_t b, uint64_t w, uint64_t c, uint64_t n, float *max, float *sum, float *y)
{
    uint64_t at, bias_at;
    for (uint64_t j = 0; j < n; j++) {
        max[j] = -INFINITY;
        sum[j] = y[j] = 0;
    }
    for (uint64_t slot = 0; slot < a->parts * a->s.rate; slot++)
        for (uint64_t j = 0; slot_at(a, b, w, slot, &at, &bias_at) && j < n; j++)
            max[j] = fmaxf(max[j], a->gate[at + c + j] + a->bias[bias_at + c + j]);
    for (uint64_t slot = 0; slot < a->parts * a->s.rate; slot++)
        for (uint64_t j = 0; slot_at(a, b, w, slot, &at, &bias_at) && j < n; j++) {
            float p = expf(a->gate[at + c + j] + a->bias[bias_at + c + j] - max[j]);
            sum[j] += p;
            y[j] += p * a->kv[at + c + j];
        }
    for (uint64_t j = 0; j < n; j++)
        y[j] /= sum[j];
}

static void
compress_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const compress *a = ctx;
    const uint64_t b = part_idx / a->windows, w = part_idx % a->windows;
    float max[COLS], sum[COLS];
    (void)worker_idx;
    if (!is_there(a, b, w))
        memset(a->out + part_idx * a->s.D, 0, a->s.D * sizeof(float));
    for (uint64_t c = 0; is_there(a, b, w) && c < a->s.D; c += COLS)
        soften(a, b, w, c, min_u64(COLS, a->s.D - c), max, sum, a->out + part_idx * a->s.D + c);
}

void
spw__cpu_compress(spw_gpu_queue *q, act *y, const act *kv, const act *gate, const act *bias,
                  const spw_compress_shape *shape)
{
    compress a = begin(q, shape);
    a.out = y;
    a.kv = kv;
    a.gate = gate;
    a.bias = bias;
    spw__cpu_run(q, (uint32_t)(shape->B * a.windows), compress_part, &a);
}

static void
backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const compress *a = ctx;
    const uint64_t b = part_idx / a->windows, w = part_idx % a->windows;
    float max[COLS], sum[COLS], y[COLS];
    (void)worker_idx;
    for (uint64_t c = 0; is_there(a, b, w) && c < a->s.D; c += COLS) {
        const uint64_t n = min_u64(COLS, a->s.D - c);
        const float *dy = a->dy + part_idx * a->s.D + c;
        uint64_t at, bias_at;
        soften(a, b, w, c, n, max, sum, y);
        for (uint64_t slot = 0; slot < a->parts * a->s.rate; slot++)
            for (uint64_t j = 0; slot_at(a, b, w, slot, &at, &bias_at) && j < n; j++) {
                float p = expf(a->gate[at + c + j] + a->bias[bias_at + c + j] - max[j]) / sum[j];
                a->out[at + c + j] = p * dy[j];
                a->dgate[at + c + j] = p * dy[j] * (a->kv[at + c + j] - y[j]);
            }
    }
}

/* A row of the bias: windows in order. */
static void
bias_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const compress *a = ctx;
    const uint64_t width = a->parts * a->s.D;
    (void)worker_idx;
    for (uint64_t b = 0; b < a->s.B; b++)
        for (uint64_t w = 0; w < a->windows; w++)
            if (is_there(a, b, w))
                a->k->axpy(a->dbias + part_idx * width, 1.0f,
                           a->dgate + (b * a->s.T + first_of(a, b, w) + part_idx) * width, width);
}

void
spw__cpu_compress_backward(spw_gpu_queue *q, act *dkv, act *dgate, float *dbias, const act *dy, const act *kv,
                           const act *gate, const act *bias, const spw_compress_shape *shape)
{
    compress a = begin(q, shape);
    const uint64_t n = shape->B * shape->T * a.parts * shape->D;
    a.out = dkv;
    a.dgate = dgate;
    a.dbias = dbias;
    a.dy = dy;
    a.kv = kv;
    a.gate = gate;
    a.bias = bias;
    spw__cpu_zero(q, dkv, n * sizeof(float));
    spw__cpu_zero(q, dgate, n * sizeof(float));
    spw__cpu_run(q, (uint32_t)(shape->B * a.windows), backward_part, &a);
    if (dbias != NULL)
        spw__cpu_run(q, (uint32_t)shape->rate, bias_part, &a);
}

typedef struct windows {
    int32_t *firsts;
    const int32_t *begins;
    uint64_t T, rate, count;
} windows;

/* The last row of a window, which is one of `rate` rows, of which at most one is the last of any; T: none of them is. */
static uint64_t
last_of(const windows *a, uint64_t b, uint64_t w)
{
    const uint64_t least = (w + 1) * a->rate - 1;
    for (uint64_t row = min_u64(least + a->rate, a->T) - 1, begin; row >= least; row = begin - 1) {
        uint64_t last;
        begin = (uint64_t)a->begins[b * a->T + row];
        last = begin + (row + 1 - begin) / a->rate * a->rate; /* behind it */
        if (last > begin && last > least)
            return last - 1;
        if (begin == 0)
            break;
    }
    return a->T;
}

static void
windows_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const windows *a = ctx;
    (void)worker_idx;
    for (uint64_t w = 0; w < a->count; w++) {
        uint64_t last = a->begins != NULL ? last_of(a, part_idx, w) : (w + 1) * a->rate - 1;
        a->firsts[part_idx * a->count + w] = (int32_t)(last < a->T ? last + 1 - a->rate : a->T - 1);
    }
}

void
spw__cpu_windows(spw_gpu_queue *q, int32_t *firsts, const int32_t *begins, uint64_t B, uint64_t T, uint64_t rate)
{
    spw__cpu_run(q, (uint32_t)B, windows_part, &(windows){firsts, begins, T, rate, T / rate});
}
