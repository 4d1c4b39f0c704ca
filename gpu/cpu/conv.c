/*
 * The short convolution of the cpu device in front of linear attention: a part has a block of channels, and goes from row to row.
 */
#include "cpu_internal.h"

enum { BLOCK = 128 }; /* channels that a part takes */

typedef struct conv {
    const cpu_kernels *k;
    float *out, *dw, *dbias;
    const float *x, *dy, *w;
    const spw_delta_cache *cache;
    spw_conv_shape s;
    bool acc;
} conv;

/* The block's taps (K, n). */
static void
turn_taps(const conv *a, uint64_t c0, uint64_t n, float *taps)
{
    for (uint64_t j = 0; j < a->s.K; j++)
        for (uint64_t i = 0; i < n; i++)
            taps[j * n + i] = a->w[(c0 + i) * a->s.K + j];
}

static const float *
cached_row(const conv *a, uint64_t b, uint64_t back, uint64_t c0)
{
    uint64_t kept = a->s.K - 1;
    if (a->cache == NULL || a->cache->starts[b] == 0)
        return NULL;
    return (const float *)a->cache->before + ((uint64_t)a->cache->slots[b] * kept + kept - back) * a->s.stride + c0;
}

/* The K rows that row t reads; NULL: none. */
static void
read_rows(const conv *a, uint64_t b, uint64_t t, uint64_t c0, const float **x)
{
    const spw_conv_shape *s = &a->s;
    uint64_t first = s->begins != NULL ? (uint64_t)s->begins[b * s->T + t] : 0;
    for (uint64_t j = 0; j < s->K; j++) {
        uint64_t back = s->K - 1 - j;
        x[j] = back <= t - first ? a->x + (b * s->T + t - back) * s->stride + c0 : cached_row(a, b, back - t, c0);
    }
}

/* What goes into the SiLU, or out. */
static void
sum_taps(const conv *a, const float *const *x, const float *taps, uint64_t c0, uint64_t n, float *u)
{
    a->k->conv(u, x, taps, a->s.K, n);
    if (a->s.bias != NULL)
        a->k->axpy(u, 1.0f, (const float *)a->s.bias + c0, n);
}

/* Rows are kept for those that come: the last ones of what was kept and what came. */
static void
keep_rows(const conv *a, uint64_t b, uint64_t c0, uint64_t n)
{
    const spw_conv_shape *s = &a->s;
    uint64_t kept = s->K - 1;
    float *to = (float *)a->cache->before + (uint64_t)a->cache->slots[b] * kept * s->stride + c0;
    for (uint64_t i = 0; i < kept; i++) {
        uint64_t back = kept - i; /* from the end */
        const float *from =
            back <= s->T ? a->x + (b * s->T + s->T - back) * s->stride + c0 : cached_row(a, b, back - s->T, c0);
        if (from != NULL)
            memmove(to + i * s->stride, from, n * sizeof *to);
        else
            memset(to + i * s->stride, 0, n * sizeof *to);
    }
}

static void
conv_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const conv *a = ctx;
    const spw_conv_shape *s = &a->s;
    uint64_t blocks = (s->C + BLOCK - 1) / BLOCK, b = part_idx / blocks, c0 = part_idx % blocks * BLOCK;
    uint64_t n = min_u64(BLOCK, s->C - c0);
    float taps[SPW_TAPS_MAX * BLOCK], u[BLOCK];
    const float *x[SPW_TAPS_MAX];
    (void)worker_idx;
    turn_taps(a, c0, n, taps);
    for (uint64_t t = 0; t < s->T; t++) {
        read_rows(a, b, t, c0, x);
        sum_taps(a, x, taps, c0, n, u);
        if (s->plain)
            memcpy(a->out + (b * s->T + t) * s->stride + c0, u, n * sizeof *u);
        else
            a->k->silu(a->out + (b * s->T + t) * s->stride + c0, u, n);
    }
    if (a->cache != NULL)
        keep_rows(a, b, c0, n);
}

static void
run_conv(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_delta_cache *cache, const spw_conv_shape *s)
{
    conv a = {.k = spw__cpu_kernels(q), .out = y, .x = x, .w = w, .cache = cache, .s = *s};
    spw__cpu_run(q, (uint32_t)(s->B * ((s->C + BLOCK - 1) / BLOCK)), conv_part, &a);
}

void
spw__cpu_conv(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_conv_shape *shape)
{
    run_conv(q, y, x, w, NULL, shape);
}

void
spw__cpu_conv_cached(spw_gpu_queue *q, act *y, const act *x, const act *w, const spw_delta_cache *cache,
                     const spw_conv_shape *shape)
{
    run_conv(q, y, x, w, cache, shape);
}

/* A block of channels: the gradients of row t's sum go to the rows that it has read. */
static void
conv_backward_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const conv *a = ctx;
    const spw_conv_shape *s = &a->s;
    uint64_t c0 = (uint64_t)part_idx * BLOCK, n = min_u64(BLOCK, s->C - c0);
    float taps[SPW_TAPS_MAX * BLOCK], dtaps[SPW_TAPS_MAX * BLOCK] = {0}, dbias[BLOCK] = {0}, u[BLOCK], du[BLOCK];
    const float *x[SPW_TAPS_MAX];
    (void)worker_idx;
    turn_taps(a, c0, n, taps);
    for (uint64_t row = 0; row < s->B * s->T; row++) {
        read_rows(a, row / s->T, row % s->T, c0, x);
        if (!s->plain)
            sum_taps(a, x, taps, c0, n, u);
        if (s->plain)
            memcpy(du, a->dy + row * s->stride + c0, n * sizeof *du);
        else
            a->k->silu_backward(du, a->dy + row * s->stride + c0, u, n);
        a->k->axpy(dbias, 1.0f, du, n);
        if (a->out != NULL && !a->acc)
            memset(a->out + row * s->stride + c0, 0, n * sizeof(float));
        for (uint64_t j = 0; j < s->K; j++) {
            if (x[j] == NULL)
                continue;
            a->k->mul_add(dtaps + j * n, du, x[j], n);
            if (a->out != NULL)
                a->k->mul_add(a->out + (x[j] - a->x), taps + j * n, du, n);
        }
    }
    for (uint64_t i = 0; a->dw != NULL && i < n * s->K; i++)
        a->dw[(c0 + i / s->K) * s->K + i % s->K] += dtaps[i % s->K * n + i / s->K];
    if (a->dbias != NULL)
        a->k->axpy(a->dbias + c0, 1.0f, dbias, n);
}

void
spw__cpu_conv_backward(spw_gpu_queue *q, act *dx, float *dw, float *dbias, const act *dy, const act *x, const act *w,
                       const spw_conv_shape *shape, unsigned flags)
{
    conv a = {.k = spw__cpu_kernels(q),
              .out = dx,
              .dw = dw,
              .dbias = dbias,
              .x = x,
              .dy = dy,
              .w = w,
              .s = *shape,
              .acc = flags & SPW_OP_ACC_DX};
    spw__cpu_run(q, (uint32_t)((shape->C + BLOCK - 1) / BLOCK), conv_backward_part, &a);
}
