/*
 * Hyper-connections on the cpu device: the maps of each row, whose rows and columns are scaled in turns, and the sums of streams by them. Of the turns
 * backward keeps the divisors alone: a matrix in front of one is what was behind it times these.
 */
#include "cpu_internal.h"
#include <math.h>

typedef struct streams {
    const cpu_kernels *k;
    float *y, *dh, *dx, *dmaps, *dz, *dscale, *dbase;
    const float *mixes, *scale, *base, *h, *x, *maps, *dy;
    spw_streams s;
    uint64_t width, grain; /* of a row of maps */
    bool add;
} streams;

/* Which of the scales an element of a row has. */
static uint64_t
scale_of(const spw_streams *s, uint64_t i)
{
    return i < s->n ? 0 : i < 2 * s->n ? 1 : 2;
}

static float
sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* Rows, or columns, over their sums + eps, which are left in divisors. */
static void
even_out(const spw_streams *s, float *comb, bool columns, float *divisors)
{
    const uint64_t n = s->n, step = columns ? n : 1, from = columns ? 1 : n;
    for (uint64_t i = 0; i < n; i++) {
        float sum = 0;
        for (uint64_t j = 0; j < n; j++)
            sum += comb[i * from + j * step];
        divisors[i] = sum + s->eps;
        for (uint64_t j = 0; j < n; j++)
            comb[i * from + j * step] /= divisors[i];
    }
}

static uint64_t
turns_of(const spw_streams *s)
{
    return 2 * s->rounds - 1;
}

/* A row of maps of z; the softmax, and divisors of each turn, are left for backward. */
static void
make_maps(const spw_streams *s, const float *z, float *maps, float *soft, float (*divisors)[SPW_STREAMS_MAX])
{
    const uint64_t n = s->n;
    for (uint64_t i = 0; i < n; i++)
        maps[i] = sigmoid(z[i]) + s->eps;
    for (uint64_t i = n; i < 2 * n && !s->head; i++)
        maps[i] = 2 * sigmoid(z[i]);
    if (s->head)
        return;
    maps += 2 * n;
    z += 2 * n;
    for (uint64_t i = 0; i < n; i++) {
        float max = z[i * n], sum = 0;
        for (uint64_t j = 1; j < n; j++)
            max = fmaxf(max, z[i * n + j]);
        for (uint64_t j = 0; j < n; j++)
            sum += soft[i * n + j] = expf(z[i * n + j] - max);
        for (uint64_t j = 0; j < n; j++) {
            soft[i * n + j] /= sum;
            maps[i * n + j] = soft[i * n + j] + s->eps;
        }
    }
    for (uint64_t turn = 0; turn < turns_of(s); turn++)
        even_out(s, maps, turn % 2 == 0, divisors[turn]);
}

/* dz of a row: turns go back from what they gave. */
static void
maps_back(const spw_streams *s, const float *z, const float *dmaps, float *dz)
{
    float maps[SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)], soft[SPW_STREAMS_MAX * SPW_STREAMS_MAX];
    float divisors[2 * SPW_ROUNDS_MAX][SPW_STREAMS_MAX], *comb = maps + 2 * s->n, *d = dz + 2 * s->n;
    const uint64_t n = s->n;
    make_maps(s, z, maps, soft, divisors);
    for (uint64_t i = 0; i < (s->head ? n : 2 * n); i++) {
        float p = sigmoid(z[i]);
        dz[i] = dmaps[i] * p * (1 - p) * (i < n ? 1 : 2);
    }
    if (s->head)
        return;
    memcpy(d, dmaps + 2 * n, n * n * sizeof *d);
    for (uint64_t turn = turns_of(s); turn-- > 0;) {
        const uint64_t step = turn % 2 == 0 ? n : 1, from = turn % 2 == 0 ? 1 : n;
        for (uint64_t i = 0; i < n; i++) {
            float mean = 0;
            for (uint64_t j = 0; j < n; j++)
                mean += d[i * from + j * step] * comb[i * from + j * step];
            for (uint64_t j = 0; j < n; j++) {
                d[i * from + j * step] = (d[i * from + j * step] - mean) / divisors[turn][i];
                comb[i * from + j * step] *= divisors[turn][i];
            }
        }
    }
    for (uint64_t i = 0; i < n; i++) {
        float mean = 0;
        for (uint64_t j = 0; j < n; j++)
            mean += d[i * n + j] * soft[i * n + j];
        for (uint64_t j = 0; j < n; j++)
            d[i * n + j] = soft[i * n + j] * (d[i * n + j] - mean);
    }
}

static void
make_z(const streams *a, uint64_t m, float *z)
{
    for (uint64_t i = 0; i < a->width; i++)
        z[i] = a->mixes[m * a->width + i] * a->scale[scale_of(&a->s, i)] + a->base[i];
}

static void
maps_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const streams *a = ctx;
    uint64_t first, rows = cpu_slice(a->s.M, a->grain, part_idx, &first);
    float z[SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)], soft[SPW_STREAMS_MAX * SPW_STREAMS_MAX];
    float divisors[2 * SPW_ROUNDS_MAX][SPW_STREAMS_MAX];
    (void)worker_idx;
    for (uint64_t m = first; m < first + rows; m++) {
        make_z(a, m, z);
        make_maps(&a->s, z, a->y + m * a->width, soft, divisors);
    }
}

static void
maps_back_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const streams *a = ctx;
    uint64_t first, rows = cpu_slice(a->s.M, a->grain, part_idx, &first);
    float z[SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)], dz[SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)];
    (void)worker_idx;
    for (uint64_t m = first; m < first + rows; m++) {
        make_z(a, m, z);
        maps_back(&a->s, z, a->dmaps + m * a->width, dz);
        for (uint64_t i = 0; i < a->width; i++)
            a->dz[m * a->width + i] = dz[i] * a->scale[scale_of(&a->s, i)];
    }
}

/* Sums over all rows, in their order, of one element of maps: a part has it, and makes dz of it again. */
static void
params_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const streams *a = ctx;
    uint64_t first, rows = cpu_slice(a->s.M, a->grain, part_idx, &first);
    float z[SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)], dz[SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)];
    float *base = a->dbase + part_idx * a->width, *scale = a->dscale + part_idx * 3;
    (void)worker_idx;
    memset(base, 0, a->width * sizeof *base);
    memset(scale, 0, 3 * sizeof *scale);
    for (uint64_t m = first; m < first + rows; m++) {
        make_z(a, m, z);
        maps_back(&a->s, z, a->dmaps + m * a->width, dz);
        for (uint64_t i = 0; i < a->width; i++) {
            base[i] += dz[i];
            scale[scale_of(&a->s, i)] += dz[i] * a->mixes[m * a->width + i];
        }
    }
}

enum { GRAIN = 256 }; /* rows of a part of maps */

void
spw__cpu_stream_maps(spw_gpu_queue *q, act *maps, const act *mixes, const act *scale, const act *base,
                     const spw_streams *s)
{
    streams a = {.y = maps, .mixes = mixes, .scale = scale, .base = base, .s = *s, .width = spw_stream_maps(s)};
    a.grain = GRAIN;
    spw__cpu_run(q, cpu_slices(s->M, GRAIN), maps_part, &a);
}

/* Adds up what parts have left, in their order, so that threads change nothing. */
static void
add_parts(float *sums, const float *parts, uint32_t count, uint64_t n, uint64_t stride)
{
    for (uint32_t p = 0; p < count && sums != NULL; p++)
        for (uint64_t i = 0; i < n; i++)
            sums[i] += parts[p * stride + i];
}

void
spw__cpu_stream_maps_backward(spw_gpu_queue *q, act *dmixes, float *dscale, float *dbase, const act *dmaps,
                              const act *mixes, const act *scale, const act *base, const spw_streams *s)
{
    enum { ROUND = 64 }; /* parts at a time, whose sums lie here */
    float bases[ROUND * SPW_STREAMS_MAX * (2 + SPW_STREAMS_MAX)], scales[ROUND * 3];
    streams a = {.dz = dmixes,
                 .dmaps = (float *)(uintptr_t)dmaps,
                 .mixes = mixes,
                 .scale = scale,
                 .base = base,
                 .s = *s,
                 .width = spw_stream_maps(s),
                 .grain = GRAIN,
                 .dbase = bases,
                 .dscale = scales};
    if (dmixes != NULL)
        spw__cpu_run(q, cpu_slices(s->M, GRAIN), maps_back_part, &a);
    for (uint64_t first = 0; (dscale != NULL || dbase != NULL) && first < s->M; first += ROUND * GRAIN) {
        streams part = a;
        part.s.M = min_u64(ROUND * GRAIN, s->M - first);
        part.mixes = a.mixes + first * a.width;
        part.dmaps = a.dmaps + first * a.width;
        spw__cpu_run(q, cpu_slices(part.s.M, GRAIN), params_part, &part);
        add_parts(dbase, bases, cpu_slices(part.s.M, GRAIN), a.width, a.width);
        add_parts(dscale, scales, cpu_slices(part.s.M, GRAIN), s->head ? 1 : 3, 3);
    }
}

/* What output k has of stream j, in a row of maps; and of h. */
static float
weight_of(const streams *a, const float *maps, uint64_t j, uint64_t k)
{
    return a->h == NULL ? maps[j] : maps[2 * a->s.n + j * a->s.n + k];
}

static void
mix_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const streams *a = ctx;
    const uint64_t n = a->s.n, C = a->s.C, outs = a->h != NULL ? n : 1;
    uint64_t first, rows = cpu_slice(a->s.M, a->grain, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + rows; m++) {
        const float *maps = a->maps + m * a->width;
        for (uint64_t k = 0; k < outs; k++) {
            float *y = a->y + (m * outs + k) * C;
            memset(y, 0, C * sizeof *y);
            if (a->h != NULL)
                a->k->axpy(y, maps[n + k], a->h + m * C, C);
            for (uint64_t j = 0; j < n; j++)
                a->k->axpy(y, weight_of(a, maps, j, k), a->x + (m * n + j) * C, C);
        }
    }
}

/* Of stream j in row m, or, with j = n, of h. */
static void
mix_back_stream(const streams *a, uint64_t m, uint64_t j, float *dx, const float *x)
{
    const uint64_t n = a->s.n, C = a->s.C, outs = a->h != NULL ? n : 1;
    const float *maps = a->maps + m * a->width;
    float *dmaps = a->dmaps != NULL ? a->dmaps + m * a->width : NULL;
    if (dx != NULL && (!a->add || j == n))
        memset(dx, 0, C * sizeof *dx);
    for (uint64_t k = 0; k < outs; k++) {
        const float *dy = a->dy + (m * outs + k) * C;
        const uint64_t at = a->h == NULL ? j : j == n ? n + k : 2 * n + j * n + k;
        if (dx != NULL)
            a->k->axpy(dx, maps[at], dy, C);
        if (dmaps != NULL)
            dmaps[at] = a->k->dot(dy, x, C);
    }
}

static void
mix_back_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const streams *a = ctx;
    const uint64_t n = a->s.n, C = a->s.C;
    uint64_t first, rows = cpu_slice(a->s.M, a->grain, part_idx, &first);
    (void)worker_idx;
    for (uint64_t m = first; m < first + rows; m++) {
        for (uint64_t j = 0; j < n; j++)
            mix_back_stream(a, m, j, a->dx != NULL ? a->dx + (m * n + j) * C : NULL, a->x + (m * n + j) * C);
        if (a->h != NULL)
            mix_back_stream(a, m, n, a->dh != NULL ? a->dh + m * C : NULL, a->h + m * C);
    }
}

static void
run_mix(spw_gpu_queue *q, streams *a, spw_pool_fn fn)
{
    a->k = spw__cpu_kernels(q);
    a->width = spw_stream_maps(&a->s);
    a->grain = cpu_row_grain(a->s.C * a->s.n);
    spw__cpu_run(q, cpu_slices(a->s.M, a->grain), fn, a);
}

void
spw__cpu_mix(spw_gpu_queue *q, act *y, const act *h, const act *x, const act *maps, const spw_streams *s)
{
    streams a = {.y = y, .h = h, .x = x, .maps = maps, .s = *s};
    run_mix(q, &a, mix_part);
}

void
spw__cpu_mix_backward(spw_gpu_queue *q, act *dh, act *dx, act *dmaps, const act *dy, const act *h, const act *x,
                      const act *maps, const spw_streams *s, unsigned flags)
{
    streams a = {.dh = dh,
                 .dx = dx,
                 .dmaps = dmaps,
                 .dy = dy,
                 .h = h,
                 .x = x,
                 .maps = maps,
                 .s = *s,
                 .add = flags & SPW_OP_ACC_DX};
    run_mix(q, &a, mix_back_part);
}
