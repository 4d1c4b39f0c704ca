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
    const spw_window_cache *cache; /* NULL: sequences are whole */
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

/* The position of a sequence's first row. */
static uint64_t
start_of(const compress *a, uint64_t b)
{
    return a->cache != NULL ? (uint64_t)a->cache->starts[b] : 0;
}

/* Whether a window is anybody's, with a cache whether it is complete. */
static bool
is_there(const compress *a, uint64_t b, uint64_t w)
{
    return first_of(a, b, w) + a->s.rate <= start_of(a, b) + a->s.T;
}

/* A slot of a window: its values, its gates and what these are biased with. */
typedef struct slot {
    const float *kv, *gate, *bias;
} slot;

/* False: there is none. */
static bool
slot_at(const compress *a, uint64_t b, uint64_t w, uint64_t slot_idx, slot *out)
{
    const spw_compress_shape *s = &a->s;
    const uint64_t width = a->parts * s->D, i = slot_idx % s->rate, first = first_of(a, b, w), start = start_of(a, b);
    const uint64_t document = s->begins != NULL ? (uint64_t)s->begins[b * s->T + first] : 0;
    const bool before = s->overlaps && slot_idx < s->rate;
    const uint64_t row = first - (before ? s->rate : 0) + i, col = s->overlaps && !before ? s->D : 0;
    if (before && first < document + s->rate)
        return false;
    out->bias = a->bias + i * width + col;
    if (row >= start) {
        out->kv = a->kv + (b * s->T + row - start) * width + col;
        out->gate = a->gate + (b * s->T + row - start) * width + col;
    } else {
        const uint64_t ring = a->parts * s->rate, at = (uint64_t)a->cache->slots[b] * ring + row % ring;
        out->kv = (const float *)a->cache->kv + at * width + col;
        out->gate = (const float *)a->cache->gate + at * width + col;
    }
    return true;
}

/* Of columns [c, c + n) of a window: the greatest logit and the sum of exp(logit - that), and what is made of values by these weights. */
static void
soften(const compress *a, uint64_t b, uint64_t w, uint64_t c, uint64_t n, float *max, float *sum, float *y)
{
    slot s;
    for (uint64_t j = 0; j < n; j++) {
        max[j] = -INFINITY;
        sum[j] = y[j] = 0;
    }
    for (uint64_t i = 0; i < a->parts * a->s.rate; i++) {
        const bool there = slot_at(a, b, w, i, &s);
        for (uint64_t j = 0; there && j < n; j++)
            max[j] = fmaxf(max[j], s.gate[c + j] + s.bias[c + j]);
    }
    for (uint64_t i = 0; i < a->parts * a->s.rate; i++) {
        const bool there = slot_at(a, b, w, i, &s);
        for (uint64_t j = 0; there && j < n; j++) {
            float p = expf(s.gate[c + j] + s.bias[c + j] - max[j]);
            sum[j] += p;
            y[j] += p * s.kv[c + j];
        }
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
        slot s;
        soften(a, b, w, c, n, max, sum, y);
        for (uint64_t i = 0; i < a->parts * a->s.rate; i++) {
            const bool there = slot_at(a, b, w, i, &s);
            for (uint64_t j = 0; there && j < n; j++) {
                const uint64_t at = (uint64_t)(s.kv - a->kv) + c + j;
                float p = expf(s.gate[c + j] + s.bias[c + j] - max[j]) / sum[j];
                a->out[at] = p * dy[j];
                a->dgate[at] = p * dy[j] * (s.kv[c + j] - y[j]);
            }
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

/* The call's rows of a sequence that windows to come read, to their places. */
static void
keep_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const compress *a = ctx;
    const uint64_t ring = a->parts * a->s.rate, width = a->parts * a->s.D, start = start_of(a, part_idx);
    (void)worker_idx;
    for (uint64_t t = a->s.T > ring ? a->s.T - ring : 0; t < a->s.T; t++) {
        const uint64_t to = ((uint64_t)a->cache->slots[part_idx] * ring + (start + t) % ring) * width;
        const uint64_t from = (part_idx * a->s.T + t) * width;
        memcpy((float *)a->cache->kv + to, a->kv + from, width * sizeof(float));
        memcpy((float *)a->cache->gate + to, a->gate + from, width * sizeof(float));
    }
}

void
spw__cpu_compress_cached(spw_gpu_queue *q, act *y, const act *kv, const act *gate, const act *bias,
                         const spw_window_cache *cache, const spw_compress_shape *shape)
{
    compress a = begin(q, shape);
    a.windows = (shape->T + shape->rate - 1) / shape->rate;
    a.out = y;
    a.kv = kv;
    a.gate = gate;
    a.bias = bias;
    a.cache = cache;
    spw__cpu_run(q, (uint32_t)(shape->B * a.windows), compress_part, &a);
    spw__cpu_run(q, (uint32_t)shape->B, keep_part, &a);
}

typedef struct kept {
    compress of;
    float *keys;
    const float *rows;
    uint64_t capacity;
} kept;

static void
keep_window_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const kept *k = ctx;
    const compress *a = &k->of;
    const uint64_t b = part_idx / a->windows, w = part_idx % a->windows, D = a->s.D;
    (void)worker_idx;
    if (is_there(a, b, w))
        memcpy(k->keys + ((uint64_t)a->cache->slots[b] * k->capacity + first_of(a, b, w) / a->s.rate) * D,
               k->rows + part_idx * D, D * sizeof(float));
}

void
spw__cpu_keep_windows(spw_gpu_queue *q, act *keys, uint64_t capacity, const act *y, const spw_window_cache *cache,
                      const spw_compress_shape *shape)
{
    kept k = {begin(q, shape), keys, y, capacity};
    k.of.windows = (shape->T + shape->rate - 1) / shape->rate;
    k.of.cache = cache;
    spw__cpu_run(q, (uint32_t)(shape->B * k.of.windows), keep_window_part, &k);
}

typedef struct windows {
    int32_t *firsts;
    const int32_t *begins, *starts;
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
    const uint64_t start = a->starts != NULL ? (uint64_t)a->starts[part_idx] : 0, end = start + a->T;
    (void)worker_idx;
    for (uint64_t w = 0; w < a->count; w++) {
        uint64_t last = a->begins != NULL ? last_of(a, part_idx, w) : (start / a->rate + w + 1) * a->rate - 1;
        a->firsts[part_idx * a->count + w] = (int32_t)(last < end ? last + 1 - a->rate : end - 1);
    }
}

void
spw__cpu_windows(spw_gpu_queue *q, int32_t *firsts, const int32_t *begins, const int32_t *starts, uint64_t B,
                 uint64_t T, uint64_t rate)
{
    const uint64_t count = starts != NULL ? (T + rate - 1) / rate : T / rate;
    spw__cpu_run(q, (uint32_t)B, windows_part, &(windows){firsts, begins, starts, T, rate, count});
}
