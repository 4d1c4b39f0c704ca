/*
 * 8-bit floats of the cpu device, the reference: codes and scales as runtime/base/fp8.h makes them. A product decodes a panel of both
 * factors at a time, on the stack of a worker, and leaves the rest to BLAS: values of codes times a power of two are exact.
 */
#include "cpu_internal.h"
#include "fp8.h"

enum { GRAIN = 16384, BAND = 16, TILE = 64, DEPTH = 256 };

static uint64_t
least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

typedef struct encoding {
    const cpu_kernels *k;
    const float *x, *scale;
    uint8_t *codes, *turned;
    uint32_t *greatest; /* atomic */
    uint64_t n, M, N;
    spw_fp8 format;
} encoding;

/* Whole numbers: the greatest is the same in any order. A NaN is above infinity, that above all numbers. */
static void
scale_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const encoding *e = ctx;
    uint64_t first = (uint64_t)part_idx * GRAIN, end = e->n - first < GRAIN ? e->n : first + GRAIN;
    uint32_t most = 0, before = __atomic_load_n(e->greatest, __ATOMIC_RELAXED);
    (void)worker_idx;
    for (uint64_t i = first; i < end; i++) {
        uint32_t a = spw_f32_bits(e->x[i]) & 0x7fffffffu;
        most = a > most ? a : most;
    }
    while (most > before &&
           !__atomic_compare_exchange_n(e->greatest, &before, most, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void
spw__cpu_fp8_scale(spw_gpu_queue *q, float *scale, spw_fp8 format, const act *x, uint64_t n)
{
    uint32_t greatest = 0;
    encoding e = {.x = x, .greatest = &greatest, .n = n};
    spw__cpu_run(q, (uint32_t)((n + GRAIN - 1) / GRAIN), scale_part, &e);
    *scale = spw_fp8_scale(format, greatest);
}

/* As many rows as fill cache lines of the transpose. */
static void
encode_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const encoding *e = ctx;
    const uint64_t first = (uint64_t)part_idx * TILE, rows = least(TILE, e->M - first);
    const float inverse = spw_fp8_inverse(*e->scale);
    uint8_t codes[TILE][TILE] = {{0}};
    (void)worker_idx;
    for (uint64_t at = 0; at < e->N; at += TILE) {
        const uint64_t n = least(TILE, e->N - at);
        for (uint64_t m = 0; m < rows && inverse > 0; m++)
            e->k->to_fp8(codes[m], e->format, e->x + (first + m) * e->N + at, inverse, n);
        for (uint64_t m = 0; m < rows && e->codes != NULL; m++)
            memcpy(e->codes + (first + m) * e->N + at, codes[m], n);
        for (uint64_t i = 0; i < n && e->turned != NULL; i++)
            for (uint64_t m = 0; m < rows; m++)
                e->turned[(at + i) * e->M + first + m] = codes[m][i];
    }
}

void
spw__cpu_fp8_encode(spw_gpu_queue *q, uint8_t *codes, uint8_t *turned, spw_fp8 format, const float *scale, const act *x,
                    uint64_t M, uint64_t N)
{
    encoding e = {.k = spw__cpu_kernels(q),
                  .x = x,
                  .scale = scale,
                  .codes = codes,
                  .turned = turned,
                  .M = M,
                  .N = N,
                  .format = format};
    SPW_ASSERT(M % BAND == 0 && N % BAND == 0);
    spw__cpu_run(q, (uint32_t)((M + TILE - 1) / TILE), encode_part, &e);
}

/* rows of depth numbers, from codes in rows of K. */
static void
decode(float *out, const float *values, const uint8_t *codes, uint64_t rows, uint64_t depth, uint64_t K)
{
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t k = 0; k < depth; k++)
            out[r * depth + k] = values[codes[r * K + k]];
}

static void
values_of(float *values, const spw_fp8_matrix *m)
{
    for (unsigned code = 0; code < 256; code++)
        values[code] = spw_fp8_to_f32(m->format, (uint8_t)code) * *m->scale;
}

static void
product_part(void *ctx, uint32_t part_idx, uint32_t worker_idx)
{
    const spw_fp8_product *p = ctx;
    uint64_t across = (p->N + TILE - 1) / TILE, m0 = part_idx / across * TILE, n0 = part_idx % across * TILE;
    uint64_t rows = least(TILE, p->M - m0), cols = least(TILE, p->N - n0);
    const float *onto = p->onto, *bias = p->bias;
    float *y = (float *)p->y + m0 * p->N + n0, a[TILE * DEPTH], b[TILE * DEPTH], of_a[256], of_b[256];
    (void)worker_idx;
    values_of(of_a, &p->a);
    values_of(of_b, &p->b);
    for (uint64_t m = 0; m < rows; m++)
        for (uint64_t n = 0; n < cols; n++)
            y[m * p->N + n] = (onto != NULL ? onto[(m0 + m) * p->N + n0 + n] : 0) + (bias != NULL ? bias[n0 + n] : 0);
    for (uint64_t k = 0; k < p->K; k += DEPTH) {
        uint64_t depth = least(DEPTH, p->K - k);
        decode(a, of_a, p->a.codes + m0 * p->K + k, rows, depth, p->K);
        decode(b, of_b, p->b.codes + n0 * p->K + k, cols, depth, p->K);
        spw__cpu_gemm_here(false, true, rows, cols, depth, 1.0f, a, depth, b, depth, 1.0f, y, p->N);
    }
}

void
spw__cpu_fp8_product(spw_gpu_queue *q, const spw_fp8_product *p)
{
    uint64_t tiles = ((p->M + TILE - 1) / TILE) * ((p->N + TILE - 1) / TILE);
    SPW_ASSERT(p->M % BAND == 0 && p->N % BAND == 0 && p->K % BAND == 0);
    spw__cpu_run(q, (uint32_t)tiles, product_part, (void *)(uintptr_t)p);
}
